"""Steps of support.client through the other door: libkvpool's steps, posted by an attachment to the same session."""
from support.device import DEVICE
from support.errors import Refusal, StepFailure
from support.libkvpool import kvpool


class RingDoor:
    """`run` as a StepQueue has it."""

    def __init__(self, session, device=DEVICE):
        self.session = session
        socket = session.client.info().attach_socket
        self.attachment = kvpool.attach(socket=socket, session_id=session.id, secret=session.ref.secret,
                                        device=device, timeout_ms=120000)
        self.pools, self.buffers = {}, {}

    def finish(self):
        self.buffers.clear()
        self.pools.clear()
        self.attachment.detach()

    close = finish

    def run(self, step, epoch=None):
        """The reports; they have the fields of protobuf's."""
        self.attachment.saw_epoch(self.session.epoch if epoch is None else epoch)
        try:
            return self.attachment.run(self.translate(step))
        except kvpool.Error as error:
            raise StepFailure(Refusal(error.status.name.lower(), error.text, error.op, error.array,
                                      -1 if error.position is None else error.position, error.value, None)) from None

    def translate(self, step):
        out = self.attachment.step()
        if step.placement:
            out.place(step.placement)
        for array in step.arrays:
            if array.WhichOneof("source") == "buffer":
                out.array(self._buffer(array.buffer.buffer_id).int32(array.buffer.count, array.buffer.offset_bytes))
            else:
                out.array(memoryview(array.inline).cast("i"))
        for op in step.ops:
            kind = op.WhichOneof("op")
            getattr(self, f"_{kind}")(out, getattr(op, kind))
        return out

    def _buffer(self, buffer_id):
        if buffer_id not in self.buffers:
            self.buffers[buffer_id] = self.attachment.map_buffer(buffer_id)
        return self.buffers[buffer_id]

    def _pool(self, pool_id):
        if pool_id not in self.pools:
            name = self.session.client.pool(pool_id).spec.name
            self.pools[pool_id] = self.attachment.map_pool(name, kvpool.NOTHING)
            assert self.pools[pool_id].id == pool_id
        return self.pools[pool_id]

    def _layer(self, region):
        return self._pool(region.pool_id).layer(region.region, region.layer)

    def _view(self, view):
        return self._buffer(view.buffer_id).view(view.rows, view.row_bytes, view.offset_bytes, view.row_stride_bytes)

    def _maybe(self, message, field):
        return self._view(getattr(message, field)) if message.HasField(field) else None

    def _matrix(self, message, field):
        if not message.HasField(field):
            return None
        matrix = getattr(message, field)
        return self._view(matrix.view) if matrix.WhichOneof("source") == "view" else matrix.array

    def _store(self, out, op):
        out.store(self._layer(op.region), self._view(op.source), op.slots, self._maybe(op, "cast_back"))

    def _load(self, out, op):
        out.load(self._layer(op.region), op.segments, op.total_k, self._view(op.out), self._maybe(op, "out_scales"),
                 op.allow_store_before_load)

    def _assemble(self, out, op):
        swa = chunk = compressed = None
        if op.HasField("swa"):
            swa = self._layer(op.swa.region), op.swa.segments, op.swa.total_k
        if op.HasField("chunk"):
            chunk = {"source": self._maybe(op.chunk, "source"), "reserved": op.chunk.reserved,
                     "cast_back": op.chunk.cast_back}
            for field in ("gather", "store_slots"):
                chunk[field] = getattr(op.chunk, field) if op.chunk.WhichOneof(f"optional_{field}") else None
            if op.chunk.HasField("region"):
                chunk["layer"] = self._layer(op.chunk.region)
        if op.HasField("compressed"):
            part = op.compressed
            compressed = self._layer(part.region), part.segments, part.total_k, part.keep_compressed
        out.assemble(self._view(op.out), swa, chunk, compressed, op.allow_store_before_load)

    def _fused_store(self, out, op):
        rope_offset = op.rope_offset if op.WhichOneof("optional_rope_offset") else None
        out.fused_store(self._layer(op.region), self._view(op.source), self._view(op.norm_weight), op.eps, op.slots,
                        op.positions, self._maybe(op, "cos_sin"), rope_offset, op.neox, op.hadamard, op.keep_float32,
                        self._maybe(op, "cast_back"))

    def _convert_kv_index(self, out, op):
        out.convert_kv_index(self._layer(op.region), self._matrix(op, "topk"), op.block_tables, op.table_columns,
                             op.valid, op.queries, self._maybe(op, "out"))

    def _swa_index_decode(self, out, op):
        out.swa_index_decode(self._layer(op.region), op.offset_len, op.window, self._view(op.out))

    def _expand_swa_index(self, out, op):
        out.expand_swa_index(op.pivots, op.width, self._view(op.out))

    def _kv_index_cat(self, out, op):
        out.kv_index_cat(self._matrix(op, "left"), op.left_columns, self._matrix(op, "right"), op.right_columns,
                         op.right_base, self._view(op.out))

    def _copy_blocks(self, out, op):
        out.copy_blocks(self._pool(op.pool_id), op.pairs)

    def _zero_blocks(self, out, op):
        out.zero_blocks(self._pool(op.pool_id), op.blocks)
