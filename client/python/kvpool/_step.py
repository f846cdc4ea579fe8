"""Steps: ordered lists of ops, for both doors."""
from ctypes import byref, c_uint32, c_uint64

from ._given import whole
from ._int32 import Int32In
from ._library import (AssembleChunk, AssembleCompressed, AssembleSwa, FusedStore, Hold, Layer, Matrix, Owned, View,
                       fields_of, library)


class LayerRef:
    """One layer of one region of a pool."""

    def __init__(self, pool, region, layer):
        self.pool = pool
        self.region, self.layer = whole("region", region, c_uint32), whole("layer", layer, c_uint32)

    @property
    def struct(self):
        return Layer(self.pool.pool_handle, self.region, self.layer)

    def __repr__(self):
        return f"<kvpool.LayerRef region {self.region} layer {self.layer} of {self.pool.name!r}>"


class ViewRef:
    """Rows of a buffer."""

    def __init__(self, buffer, rows, row_bytes, offset_bytes=0, row_stride_bytes=0):
        self.buffer = buffer
        self.rows, self.row_bytes = whole("rows", rows, c_uint64), whole("row_bytes", row_bytes, c_uint32)
        self.offset_bytes = whole("offset_bytes", offset_bytes, c_uint64)
        self.row_stride_bytes = whole("row_stride_bytes", row_stride_bytes, c_uint64)

    @property
    def struct(self):
        return View(self.buffer.handle, self.offset_bytes, self.rows, self.row_stride_bytes, self.row_bytes)


class BufferArray:
    """int32 of a buffer, as an array of a step: read and checked when the op runs."""

    def __init__(self, buffer, count, offset_bytes=0):
        self.buffer, self.count = buffer, whole("count", count, c_uint64)
        self.offset_bytes = whole("offset_bytes", offset_bytes, c_uint64)


class Report:
    """What an op did: the fields of kvpool_op_report."""

    def __init__(self, struct):
        self.__dict__.update(fields_of(struct))

    def __repr__(self):
        shown = ", ".join(f"{k}={v}" for k, v in self.__dict__.items() if v and not k.endswith("_ns"))
        return f"<kvpool.Report {shown}>"


def _pointer(ref):
    return None if ref is None else byref(ref.struct)


class Step(Owned):
    """An ordered list of ops, built once and run any number of times. Methods that add an op return the step.

    A step of a session is run by `run`, or submitted to a Queue; one of an attachment, or any step whose ops wait or
    signal, is posted by the attachment. It may be cleared or changed as soon as it was posted or submitted.

    layer     a LayerRef: Pool.layer, PoolMap.layer.
    arrays    slots, segments, positions and the like are int32: the values (a list, a numpy array, a CPU tensor), which
              are copied into the step; the number that `array` gave for them; or a BufferArray, read when the op runs.
    views     source, out, cast_back and the like are ViewRefs: BufferBase.view. Their rows are read and written when
              the op runs, so the memory must be left alone until the step is done. Offsets and strides are multiples
              of 16 bytes; of scales, and of matrices of int32, the strides are multiples of 4.

    Buffers and pools that are named belong to their makers, and must be there when the step is run or posted.

    A method raises kvpool.Error and adds nothing for a layer or an array that isn't there (UNKNOWN_REGION,
    UNKNOWN_LAYER, INVALID_ARGUMENT) and for more than 1024 ops or arrays (TOO_LARGE); a number that doesn't fit raises
    OverflowError. All else is checked when the step is run or posted, the whole of it before any runs: shapes
    (INVALID_ARGUMENT), slots, blocks, segments, positions, views (OUT_OF_RANGE), row_bytes (WRONG_FORMAT), blocks that
    are another's, or leased after the step's epoch (NOT_OWNER, STALE_BLOCK), and the like, with op, array, position and
    value. What is wrong in a BufferArray is skipped instead, and counted in the report's rows_rejected."""

    def __init__(self, call, owner):
        self._make(Hold(library.step_destroy), call, owner)
        self.op_count = 0

    def destroy(self):
        """It is gone; what was posted or submitted goes on."""
        self._give_back()

    def clear(self):
        """No ops and no arrays any more; it keeps its memory."""
        library.step_clear(self.handle)
        self.op_count = 0

    def place(self, device):
        """device: the name of the one that it runs on; None: the first placement of the first op's pool."""
        library.step_set_placement(self.handle, device)
        return self

    def array(self, values):
        """values: int32 of any shape, copied, or a BufferArray. The number of a new array, for any op of this step:
        give slots that all layers use once. OverflowError for a value that isn't int32, TypeError for what isn't
        whole."""
        number = c_uint32()
        if isinstance(values, BufferArray):
            library.step_add_buffer_array(self.handle, values.buffer.handle, values.offset_bytes, values.count,
                                          byref(number))
        else:
            given = Int32In(values)
            library.step_add_array(self.handle, given.address, given.count, byref(number))
        return number.value

    def _number(self, values):
        return values if isinstance(values, int) else self.array(values)

    def _array_of_op(self, name, values):
        return c_uint32(whole(name, self._number(values), c_uint32))

    def _add(self, call, *arguments):
        call(self.handle, *arguments)
        self.op_count += 1
        return self

    def _matrix(self, values):
        if values is None:
            return None
        matrix = Matrix()
        if isinstance(values, ViewRef):
            matrix.view.contents = values.struct
        else:
            matrix.array = self._number(values)
        return byref(matrix)

    def store(self, layer, source, slots, cast_back=None):
        """Quantizes row i of source into the record of slots[i], block * tokens_per_block + token.

        source     BF16 [>= n, elements of the region]; rows behind the slots, as of a padded batch, are not looked at.
        slots      int32 [n], none of them twice; -1 skips the row.
        cast_back  BF16 [>= n, elements], written: each row as a load would return it, with slot -1 too. Main caches and
                   bf16 only."""
        return self._add(library.step_add_store, byref(layer.struct), byref(source.struct), self._number(slots),
                         _pointer(cast_back))

    def load(self, layer, segments, total_k, out, out_scales=None, allow_store_before_load=False):
        """Rows of a layer as BF16, or an index format's codes.

        segments    int32 [m, 4] = block (-1: zero rows), begin, end (tokens of the block), destination row;
                    destinations lie in [0, total_k), apart.
        out         [>= total_k, loaded_row_bytes of the format], written; rows that no segment covers keep what was
                    there.
        out_scales  [>= total_k, loaded_scale_bytes], of an index format alone.
        allow_store_before_load  a ring's layer may be stored to by an op before this one in the step, in slots that
                    this one reads, which is refused otherwise (HAZARD_STORE_BEFORE_LOAD)."""
        return self._add(library.step_add_load_flags, byref(layer.struct), self._number(segments), total_k,
                         byref(out.struct), _pointer(out_scales), bool(allow_store_before_load))

    def assemble(self, out, swa=None, chunk=None, compressed=None, allow_store_before_load=False):
        """The key buffer of a prefill's attention: S rows of a sliding window's history, C new ones of this chunk, K
        of the compressed cache, one behind the other. Each part may be absent. The report's main_kv_offset is S + C.

        out         BF16 [>= S + C + K, elements], written, apart from all that is read.
        swa         (layer of a ring pool, segments, S); segments as of a load, destinations count from the part's
                    begin.
        chunk       a dict: source, BF16 rows that are copied, or reserved=C, rows left alone that a fused_store later
                    in the step fills by its cast_back; gather, int32 [C], row i is source row gather[i], -1 a zero row
                    (without it C is source's rows); store_slots, int32 [C], where in the ring the rows go to after it
                    was loaded; cast_back=True, rows as the ring's format would give them back; layer, the ring's, where
                    there is no swa.
        compressed  (layer, segments, K), or (layer, segments, K, True): an assemble before this one wrote the very same
                    rows, and they are not written again. INVALID_ARGUMENT where the daemon can't be sure of that.
        allow_store_before_load  as of a load."""
        swa_struct = compressed_struct = chunk_struct = None
        if swa is not None:
            layer, segments, total_k = swa
            swa_struct = byref(AssembleSwa(layer.struct, self._number(segments), total_k))
        if chunk is not None:
            chunk_struct = byref(self._chunk(**chunk))
        if compressed is not None:
            layer, segments, total_k, *keep = compressed
            compressed_struct = byref(AssembleCompressed(layer.struct, self._number(segments), total_k,
                                                         bool(keep and keep[0])))
        return self._add(library.step_add_assemble, byref(out.struct), swa_struct, chunk_struct, compressed_struct,
                         bool(allow_store_before_load))

    def _chunk(self, source=None, reserved=0, gather=None, store_slots=None, cast_back=False, layer=None):
        struct = AssembleChunk(reserved=reserved, cast_back=cast_back)
        if source is not None:
            struct.source.contents = source.struct
        if gather is not None:
            struct.gather.contents = self._array_of_op("gather", gather)
        if store_slots is not None:
            struct.store_slots.contents = self._array_of_op("store_slots", store_slots)
        if layer is not None:
            struct.layer.contents = layer.struct
        return struct

    def fused_store(self, layer, source, norm_weight, eps, slots, positions, cos_sin=None, rope_offset=None,
                    neox=False, hadamard=False, keep_float32=False, cast_back=None):
        """RMSNorm, RoPE, Hadamard if asked for, quantize, store; in float32, rounded to BF16 between the stages.

        source       BF16 [>= n, D], D: the region's elements, a power of two; rows behind the slots are not looked at.
        norm_weight  BF16 [1, D], by which each element of the normalized row is multiplied as it is (no 1 + weight).
        eps          added to the mean of the squares; finite, > 0.
        slots        int32 [n], as of a store.
        positions    int32 [n]: the row of cos_sin for each row; not looked at where the slot is -1 and there is no
                     cast_back.
        cos_sin      float32 [max_position, rotary_dims]: rotary_dims / 2 cosines, then as many sines, of the angles.
                     None: no rotation.
        rope_offset  the first element that is rotated; None: D - rotary_dims.
        neox         pairs (i, i + rotary_dims / 2); else (2i, 2i + 1).
        hadamard     a Walsh-Hadamard transform of the row, times 1 / sqrt(D), before it is quantized.
        keep_float32 no rounding to BF16 between the stages.
        cast_back    BF16 [>= n, D], written: each row as a load would return it."""
        struct = FusedStore(layer=layer.struct, source=source.struct, norm_weight=norm_weight.struct, eps=eps,
                            slots=self._number(slots), positions=self._number(positions), neox=neox,
                            hadamard=hadamard, keep_float32=keep_float32)
        if cos_sin is not None:
            struct.cos_sin.contents = cos_sin.struct
        if rope_offset is not None:
            struct.rope_offset.contents = c_uint32(whole("rope_offset", rope_offset, c_uint32))
        if cast_back is not None:
            struct.cast_back.contents = cast_back.struct
        return self._add(library.step_add_fused_store, byref(struct))

    def convert_kv_index(self, layer, topk, block_tables, table_columns, valid, queries, out=None):
        """Token indices of sequences to slots: x becomes table[x // tpb] * tpb + x % tpb, tpb the region's
        tokens_per_block; -1 stays -1. Entries that are wrong become -1 and are counted in rows_rejected.

        topk           int32 [batch * queries, columns]: a ViewRef (row_bytes = 4 * columns), or an array.
        block_tables   int32 [batch, table_columns].
        valid          int32 [batch * queries]: how many entries of each row count; the rest becomes -1.
        queries        of each sequence of the batch.
        out            int32, topk's shape, written; None: in place, topk is a ViewRef."""
        if topk is None:
            raise TypeError("topk is None: a ViewRef, or an array, is wanted")
        return self._add(library.step_add_convert_kv_index, byref(layer.struct), self._matrix(topk),
                         self._number(block_tables), table_columns, self._number(valid), queries, _pointer(out))

    def swa_index_decode(self, layer, offset_len, window, out):
        """The slots of a ring that each decode query sees.

        offset_len  int32 [q, 2] = start slot, length, as plan.swa_decode makes them.
        out         int32 [>= q, window], written: slots, -1 behind each query's length. A wrong start or length makes
                    the row -1, and is counted in rows_rejected."""
        return self._add(library.step_add_swa_index_decode, byref(layer.struct), self._number(offset_len), window,
                         byref(out.struct))

    def expand_swa_index(self, pivots, width, out):
        """The rows of an assembled buffer that each prefill query sees of its window.

        pivots  int32 [r, 4] = offset and length of a run, twice, as plan.swa_pivots makes them.
        out     int32 [>= r, width], written: both runs, then -1; what exceeds the width is cut off. A negative
                length, or a column past int32, makes the row -1, and is counted in rows_rejected."""
        return self._add(library.step_add_expand_swa_index, self._number(pivots), width, byref(out.struct))

    def kv_index_cat(self, left, left_columns, right, right_columns, right_base, out):
        """Two matrices of indices side by side.

        left        int32 [r, left_columns], copied: a ViewRef, or an array; None: no columns.
        right       int32 [r, right_columns], to which right_base is added where it isn't -1; as left.
        right_base  >= 0: the assembled buffer's main_kv_offset.
        out         int32 [>= r, left_columns + right_columns], written. Entries that are wrong become -1, and are
                    counted in rows_rejected."""
        return self._add(library.step_add_kv_index_cat, self._matrix(left), left_columns, self._matrix(right),
                         right_columns, right_base, byref(out.struct))

    def copy_blocks(self, pool, pairs):
        """Whole blocks: every region and layer of the pool, on the step's device. pairs: int32 [n, 2] = from, to, no
        BufferArray; no block is written twice, or read by one pair and written by another."""
        return self._add(library.step_add_copy_blocks, pool.pool_handle, self._number(pairs))

    def zero_blocks(self, pool, blocks):
        """Whole blocks: every region and layer of the pool, on the step's device. blocks: int32 [n], no BufferArray,
        none of them twice."""
        return self._add(library.step_add_zero_blocks, pool.pool_handle, self._number(blocks))

    def wait(self, word, value):
        """The op added last begins when the word has reached the post's base + value; ops behind it wait with it. A
        word that is poisoned, or the post's deadline, fails the step."""
        library.step_set_wait(self.handle, word, value)
        return self

    def signal(self, word, value):
        """When the op added last, and all before it, are done the word, one of EXECUTOR's, becomes the post's base +
        value. A word's values must not go down; of a step that is refused or fails, signals not given are poisoned."""
        library.step_set_signal(self.handle, word, value)
        return self
