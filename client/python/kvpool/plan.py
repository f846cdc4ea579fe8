"""Planners: what block tables and sequence lengths are as slots and segments. CPU only, no daemon.

Arrays come back as int32 of numpy, or as memoryviews where there is no numpy."""
import ctypes
from ctypes import POINTER, byref, c_int32, c_int64, c_size_t

from ._given import whole
from ._int32 import Int32In, Int32Out
from ._library import Sequence, SwaSequence, library


def _sized(call, *arguments, columns=None, tail=()):
    """Asks how much it is, then has it written."""
    count = c_size_t()
    call(*arguments, None, 0, byref(count), *tail)
    out = Int32Out(count.value * (columns or 1))
    call(*arguments, out.address, count.value, byref(count), *tail)
    return out.get(columns)


def _pointer(given):
    return ctypes.cast(given.address, POINTER(c_int32)) if given.count else None


def paged_range(block_table, tokens_per_block, token_begin, token_end, dst_begin=0):
    """Segments [m, 4] that read tokens [token_begin, token_end) of a sequence through its block table."""
    table = Int32In(block_table)
    return _sized(library.plan_paged_range, table.address, table.count, tokens_per_block, token_begin, token_end,
                  dst_begin, columns=4)


def slot_mapping(block_table, tokens_per_block, token_begin, token_end):
    """Slots of tokens [token_begin, token_end)."""
    token_begin, token_end = whole("token_begin", token_begin, c_int64), whole("token_end", token_end, c_int64)
    table, out = Int32In(block_table), Int32Out(max(token_end - token_begin, 0))
    library.plan_slot_mapping(table.address, table.count, tokens_per_block, token_begin, token_end, out.address)
    return out.get()


def new_compressed(seqlen_k, seqlen_q, ratio):
    """(begin, end) of the compressed tokens that a chunk completes."""
    begin, end = c_int64(), c_int64()
    library.plan_new_compressed(seqlen_k, seqlen_q, ratio, byref(begin), byref(end))
    return begin.value, end.value


class _Batch:
    """sequences: (seqlen_k, seqlen_q, block_table) each; the table may be left out where nobody looks at it."""

    def __init__(self, sequences):
        self.tables = [Int32In(rest[0] if rest else []) for _, _, *rest in sequences]
        self.count = len(sequences)
        self.structs = (Sequence * max(self.count, 1))()
        self.queries = 0
        for struct, table, (seqlen_k, seqlen_q, *_) in zip(self.structs, self.tables, sequences):
            struct.seqlen_k, struct.seqlen_q = seqlen_k, seqlen_q
            struct.block_table, struct.table_count = _pointer(table), table.count
            self.queries += max(seqlen_q, 0)


def compressed(sequences, ratio, tokens_per_block):
    """(segments [m, 4], cu_seqlens [n + 1], total_k) of the compressed cache of a batch."""
    batch, total_k = _Batch(sequences), c_int64()
    cu_seqlens = Int32Out(batch.count + 1)
    segments = _sized(library.plan_compressed, batch.structs, batch.count, ratio, tokens_per_block,
                      cu_seqlens.address, columns=4, tail=(byref(total_k),))
    return segments, cu_seqlens.get(), total_k.value


def compressed_visible(sequences, ratio, cu_seqlens):
    """(ks, ke) of each query row: the compressed columns that it sees."""
    batch, given = _Batch(sequences), Int32In(cu_seqlens)
    if given.count != batch.count + 1:
        raise ValueError(f"cu_seqlens has {given.count} elements, a batch of {batch.count} has {batch.count + 1}")
    ks, ke = Int32Out(batch.queries), Int32Out(batch.queries)
    library.plan_compressed_visible(batch.structs, batch.count, ratio, given.address, ks.address, ke.address,
                                    batch.queries)
    return ks.get(), ke.get()


def _swa_batch(sequences):
    """sequences: (state_id, seqlen_k, seqlen_q, swa_valid_start) each."""
    structs = (SwaSequence * max(len(sequences), 1))(*(SwaSequence(*fields) for fields in sequences))
    return structs, len(sequences)


def swa(sequences, window, ring_tokens):
    """(segments [m, 4], total_k) of the history that a prefill chunk sees."""
    total_k = c_int64()
    segments = _sized(library.plan_swa, *_swa_batch(sequences), window, ring_tokens, columns=4,
                      tail=(byref(total_k),))
    return segments, total_k.value


def swa_slots(sequences, ring_tokens):
    """Slots of a chunk's new rows."""
    return _sized(library.plan_swa_slots, *_swa_batch(sequences), ring_tokens)


def swa_pivots(sequences, window):
    """[queries, 4], as expand_swa_index takes them."""
    return _sized(library.plan_swa_pivots, *_swa_batch(sequences), window, columns=4)


def swa_decode(sequences, window, ring_tokens):
    """[queries, 2], as swa_index_decode takes them."""
    return _sized(library.plan_swa_decode, *_swa_batch(sequences), window, ring_tokens, columns=2)


def _lengths(seqlens_q):
    return (c_int64 * max(len(seqlens_q), 1))(*(whole("seqlens_q", n, c_int64) for n in seqlens_q)), len(seqlens_q)


def mirror(seqlens_q, ranks, rank):
    """Rows that a rank of a context-parallel prefill holds, -1 for padding."""
    return _sized(library.plan_mirror, *_lengths(seqlens_q), ranks, rank)


def mirror_reverse(seqlens_q, ranks):
    """For each row of the packed chunks the gathered row that holds it."""
    return _sized(library.plan_mirror_reverse, *_lengths(seqlens_q), ranks)
