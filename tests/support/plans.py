"""Plans from the prose of the operations' contract, one token at a time: every row of a plan is asked where it comes
from, and rows that lie one behind the other make a segment. Nothing is shared with the planners of libkvpool.

A sequence of the SWA plans is (state_id, seqlen_k, seqlen_q, swa_valid_start).
"""
import numpy as np

ZERO = -1  # the block of a zero row


def _segments(sources, destination=0, zero_rows_max=None):
    """sources: (block, offset) of each row, in order; ZERO blocks count up from 0. int32 [m, 4]."""
    found = []
    for row, (block, offset) in enumerate(sources, destination):
        last = found[-1] if found else None
        if last and last[0] == block and last[2] == offset and last[2] - last[1] != zero_rows_max:
            last[2] += 1
        else:
            found.append([block, offset, offset + 1, row])
    return np.array(found, np.int32).reshape(-1, 4)


def _concatenated(parts, shape):
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(shape, np.int32)


# ---- block tables


def slot_of(table, tokens_per_block, token):
    block = int(table[token // tokens_per_block])
    assert block >= 0, f"token {token} has no block"
    return block * tokens_per_block + token % tokens_per_block


def paged_range(table, tokens_per_block, begin, end, destination=0):
    return _segments([divmod(slot_of(table, tokens_per_block, t), tokens_per_block) for t in range(begin, end)],
                     destination)


def slot_mapping(table, tokens_per_block, begin, end):
    return np.array([slot_of(table, tokens_per_block, t) for t in range(begin, end)], np.int32)


def new_compressed(seqlen_k, seqlen_q, ratio):
    """[begin, end) of the compressed tokens whose last token is one of this chunk's."""
    return (seqlen_k - seqlen_q) // ratio, seqlen_k // ratio


def compressed(sequences, ratio, tokens_per_block):
    """sequences: (seqlen_k, block table). Segments, and cu_seqlens: where each sequence's rows begin."""
    parts, cu = [], [0]
    for seqlen_k, table in sequences:
        count = seqlen_k // ratio
        if count:
            parts.append(paged_range(table, tokens_per_block, 0, count, cu[-1]))
        else:
            parts.append(np.array([[ZERO, 0, 1, cu[-1]]], np.int32))
        cu.append(cu[-1] + max(1, count))
    return _concatenated(parts, (0, 4)), cu


def visible(seqlen_k, ratio, position):
    """How many compressed tokens a query at that position sees."""
    return min(seqlen_k // ratio, (position + 1) // ratio)


# ---- sliding windows


def swa(sequences, window, ring):
    """The history of each sequence: `window` rows, those before token 0 or swa_valid_start zero."""
    assert window <= ring
    parts = []
    for index, (state, seqlen_k, seqlen_q, valid_start) in enumerate(sequences):
        end = seqlen_k - seqlen_q
        tokens = range(end - window, end)
        padding = sum(t < valid_start for t in tokens)
        sources = [(ZERO, row % ring) for row in range(padding)]
        sources += [(state, t % ring) for t in tokens if t >= valid_start]
        parts.append(_segments(sources, index * window, ring))
    return _concatenated(parts, (0, 4))


def swa_slots(sequences, ring):
    slots = []
    for state, seqlen_k, seqlen_q, _ in sequences:
        for token in range(seqlen_k - seqlen_q, seqlen_k):
            slots.append(state * ring + token % ring if token >= seqlen_k - ring else -1)
    return np.array(slots, np.int32)


def swa_pivots(sequences, window):
    pivots, history, chunk = [], 0, len(sequences) * window
    for _, seqlen_k, seqlen_q, valid_start in sequences:
        end = seqlen_k - seqlen_q
        valid_rows = sum(t >= valid_start for t in range(end - window, end))
        history += window
        for j in range(seqlen_q):
            current = min(j + 1, window)
            before = min(window - current, valid_rows)
            pivots.append((history - before, before, chunk + j + 1 - current, current))
        chunk += seqlen_q
    return np.array(pivots, np.int32).reshape(-1, 4)


def swa_decode(sequences, window, ring):
    windows = []
    for state, seqlen_k, seqlen_q, valid_start in sequences:
        assert ring >= window + seqlen_q - 1, "the last new token lies where the first one's window was"
        for length in range(seqlen_k - seqlen_q + 1, seqlen_k + 1):
            count = min(max(length - valid_start, 0), window)
            windows.append((state * ring + (length - count) % ring, count))
    return np.array(windows, np.int32).reshape(-1, 2)


# ---- context-parallel mirror order


def mirror(seqlens_q, ranks, rank):
    """Rows of the packed chunks that a rank holds, -1 for padding."""
    rows, begin = [], 0
    for length in seqlens_q:
        piece = -(-length // (2 * ranks))
        for number in (rank, 2 * ranks - 1 - rank):
            rows += [begin + t if t < length else -1 for t in range(number * piece, (number + 1) * piece)]
        begin += length
    return np.array(rows, np.int32)


def mirror_reverse(seqlens_q, ranks):
    """For each row of the packed chunks, which row of the ranks' rows, rank 0 first, holds it."""
    gathered = np.concatenate([mirror(seqlens_q, ranks, rank) for rank in range(ranks)])
    reverse = np.full(sum(seqlens_q), -1, np.int32)
    for row, packed in enumerate(gathered):
        if packed >= 0:
            reverse[packed] = row
    return reverse
