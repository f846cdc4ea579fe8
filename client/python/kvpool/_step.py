"""Steps: ordered lists of ops, for both doors."""
from ctypes import byref, c_uint32

from ._int32 import Int32In
from ._library import (AssembleChunk, AssembleCompressed, AssembleSwa, FusedStore, Layer, Matrix, Owned, View, fields_of,
                       library)


class LayerRef:
    """One layer of one region of a pool."""

    def __init__(self, pool, region, layer):
        self.pool, self.region, self.layer = pool, region, layer

    @property
    def struct(self):
        return Layer(self.pool.pool_handle, self.region, self.layer)

    def __repr__(self):
        return f"<kvpool.LayerRef region {self.region} layer {self.layer} of {self.pool.name!r}>"


class ViewRef:
    """Rows of a buffer."""

    def __init__(self, buffer, rows, row_bytes, offset_bytes=0, row_stride_bytes=0):
        self.buffer, self.rows, self.row_bytes = buffer, rows, row_bytes
        self.offset_bytes, self.row_stride_bytes = offset_bytes, row_stride_bytes

    @property
    def struct(self):
        return View(self.buffer.handle, self.offset_bytes, self.rows, self.row_stride_bytes, self.row_bytes)


class BufferArray:
    """int32 of a buffer, as an array of a step: read and checked when the op runs."""

    def __init__(self, buffer, count, offset_bytes=0):
        self.buffer, self.count, self.offset_bytes = buffer, count, offset_bytes


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
    """Arrays may be given by their number (of `array`), by their values, or as a BufferArray. Methods that add an op
    return the step. An op that is refused raises and adds nothing.

    A step of a session is run by `run`, or submitted to a Queue; one of an attachment, or any step whose ops wait or
    signal, is posted by the attachment.
    """

    def __init__(self, handle):
        self._own(handle, library.step_destroy)
        self.op_count = 0

    def destroy(self):
        self._give_back()

    def clear(self):
        library.step_clear(self.handle)
        self.op_count = 0

    def place(self, device):
        library.step_set_placement(self.handle, device.encode())
        return self

    def array(self, values):
        """The number of a new array."""
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
        """Quantize row i of source into the record of slots[i]; -1 skips."""
        return self._add(library.step_add_store, byref(layer.struct), byref(source.struct), self._number(slots),
                         _pointer(cast_back))

    def load(self, layer, segments, total_k, out, out_scales=None, allow_store_before_load=False):
        """segments: [m, 4] = block (-1: zero rows), begin, end, destination row."""
        return self._add(library.step_add_load_flags, byref(layer.struct), self._number(segments), total_k,
                         byref(out.struct), _pointer(out_scales), bool(allow_store_before_load))

    def assemble(self, out, swa=None, chunk=None, compressed=None, allow_store_before_load=False):
        """swa: (layer, segments, total_k). chunk: a dict of source or reserved, and gather, store_slots, cast_back,
        layer. compressed: (layer, segments, total_k), or with keep_compressed behind them."""
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
            struct.gather.contents = c_uint32(self._number(gather))
        if store_slots is not None:
            struct.store_slots.contents = c_uint32(self._number(store_slots))
        if layer is not None:
            struct.layer.contents = layer.struct
        return struct

    def fused_store(self, layer, source, norm_weight, eps, slots, positions, cos_sin=None, rope_offset=None,
                    neox=False, hadamard=False, keep_float32=False, cast_back=None):
        """RMSNorm, RoPE, Hadamard if asked for, quantize, store."""
        struct = FusedStore(layer=layer.struct, source=source.struct, norm_weight=norm_weight.struct, eps=eps,
                            slots=self._number(slots), positions=self._number(positions), neox=neox,
                            hadamard=hadamard, keep_float32=keep_float32)
        if cos_sin is not None:
            struct.cos_sin.contents = cos_sin.struct
        if rope_offset is not None:
            struct.rope_offset.contents = c_uint32(rope_offset)
        if cast_back is not None:
            struct.cast_back.contents = cast_back.struct
        return self._add(library.step_add_fused_store, byref(struct))

    def convert_kv_index(self, layer, topk, block_tables, table_columns, valid, queries, out=None):
        """topk: a ViewRef, or what an array may be; out None: in place."""
        if topk is None:
            raise TypeError("topk is None: a ViewRef, or an array, is wanted")
        return self._add(library.step_add_convert_kv_index, byref(layer.struct), self._matrix(topk),
                         self._number(block_tables), table_columns, self._number(valid), queries, _pointer(out))

    def swa_index_decode(self, layer, offset_len, window, out):
        return self._add(library.step_add_swa_index_decode, byref(layer.struct), self._number(offset_len), window,
                         byref(out.struct))

    def expand_swa_index(self, pivots, width, out):
        return self._add(library.step_add_expand_swa_index, self._number(pivots), width, byref(out.struct))

    def kv_index_cat(self, left, left_columns, right, right_columns, right_base, out):
        return self._add(library.step_add_kv_index_cat, self._matrix(left), left_columns, self._matrix(right),
                         right_columns, right_base, byref(out.struct))

    def copy_blocks(self, pool, pairs):
        return self._add(library.step_add_copy_blocks, pool.pool_handle, self._number(pairs))

    def zero_blocks(self, pool, blocks):
        return self._add(library.step_add_zero_blocks, pool.pool_handle, self._number(blocks))

    def wait(self, word, value):
        """The op added last begins when the word has reached the post's base + value."""
        library.step_set_wait(self.handle, int(word), value)
        return self

    def signal(self, word, value):
        """When the op added last, and all before it, are done the word becomes the post's base + value."""
        library.step_set_signal(self.handle, int(word), value)
        return self
