"""A thin client on plain grpcio and generated stubs; shares no code with the daemon."""
import itertools
import os
import queue
import threading
from contextlib import contextmanager

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc  # noqa: E402
import numpy as np  # noqa: E402

from support.device import DEVICE  # noqa: E402
from support.errors import StepFailure, failure_of, refusal_of  # noqa: E402
from support.stubs import pb, pb_grpc  # noqa: E402

CALL_SECONDS_MAX = 120
CHUNK_BYTES = 1 << 20
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


@contextmanager
def failures():
    """Turns grpc.RpcError into RpcFailure with its detail."""
    try:
        yield
    except grpc.RpcError as error:
        raise failure_of(error) from None


def int32_bytes(values):
    return np.asarray(values, "<i4").tobytes()


def int32_array(data):
    return np.frombuffer(data, "<i4").copy()


def pieces(data, size=CHUNK_BYTES):
    view = memoryview(np.ascontiguousarray(data)).cast("B") if data is not None and len(data) else memoryview(b"")
    for start in range(0, len(view), size):
        yield start, bytes(view[start:start + size])


class Client:
    """One connection."""

    def __init__(self, target, **options):
        self.channel = grpc.insecure_channel(target, _CHANNEL_OPTIONS + tuple(options.items()))
        self.rpc = pb_grpc.KvpoolStub(self.channel)
        self.sessions = []

    def call(self, method, request, timeout=CALL_SECONDS_MAX):
        with failures():
            return getattr(self.rpc, method)(request, timeout=timeout)

    def info(self):
        return self.call("GetServerInfo", pb.GetServerInfoRequest())

    def device(self, name=DEVICE):
        return next(d for d in self.info().devices if d.name == name)

    def create_pool(self, name, block_size, num_blocks, regions, kind=pb.POOL_PAGED, placements=(),
                    namespace=""):
        """regions: RegionSpec messages, or dicts of their fields."""
        regions = [r if isinstance(r, pb.RegionSpec) else pb.RegionSpec(**r) for r in regions]
        return self.call("CreatePool", pb.CreatePoolRequest(spec=pb.PoolSpec(
            name=name, kind=kind, block_size=block_size, num_blocks=num_blocks, placements=placements,
            regions=regions, namespace=namespace)))

    def delete_pool(self, pool_id, force=False):
        return self.call("DeletePool", pb.DeletePoolRequest(pool_id=pool_id, force=force))

    def pools(self):
        return self.call("ListPools", pb.ListPoolsRequest()).pools

    def pool(self, pool_id):
        return self.call("DescribePool", pb.DescribePoolRequest(pool_id=pool_id))

    def list_sessions(self):
        return self.call("ListSessions", pb.ListSessionsRequest()).sessions

    def block_states(self, pool_id):
        """One (state, session id, epoch) for each block."""
        runs = self.call("ListBlocks", pb.ListBlocksRequest(pool_id=pool_id)).runs
        result = []
        for run in runs:
            assert run.first_block == len(result) and run.count > 0, "runs are not consecutive"
            result += [(run.state, run.session_id, run.epoch)] * run.count
        return result

    def inspect(self, region, slots, placement=""):
        return self.call("InspectRecords", pb.InspectRecordsRequest(
            region=region, placement=placement, slots=int32_bytes(slots))).records

    def dump(self, region, first_block, count, placement=""):
        data = bytearray()
        with failures():
            for chunk in self.rpc.DumpBlocks(pb.DumpBlocksRequest(region=region, placement=placement,
                                                                  first_block=first_block, count=count),
                                             timeout=CALL_SECONDS_MAX):
                assert chunk.offset_bytes == len(data)
                data += chunk.data
        return np.frombuffer(bytes(data), np.uint8)

    def open_session(self, name="test", **fields):
        session = Session(self, name, **fields)
        self.sessions.append(session)
        return session

    def close(self):
        for session in self.sessions:
            session.abandon()
        self.channel.close()


class Buffer:
    """A daemon-made buffer of a session."""

    def __init__(self, session, reply):
        self.session = session
        self.id = reply.buffer_id
        self.device = reply.device
        self.bytes = reply.bytes

    def write(self, data, offset=0, chunk_bytes=CHUNK_BYTES):
        def requests():
            for index, (start, piece) in enumerate(pieces(data, chunk_bytes)):
                head = {"session": self.session.ref, "buffer_id": self.id} if index == 0 else {}
                yield pb.WriteBufferRequest(offset_bytes=offset + start, data=piece, **head)

        with failures():
            return self.session.client.rpc.WriteBuffer(requests(), timeout=CALL_SECONDS_MAX).bytes_written

    def read(self, offset=0, count=None):
        count = self.bytes - offset if count is None else count
        data = bytearray()
        with failures():
            for chunk in self.session.client.rpc.ReadBuffer(
                    pb.ReadBufferRequest(session=self.session.ref, buffer_id=self.id, offset_bytes=offset,
                                         bytes=count), timeout=CALL_SECONDS_MAX):
                assert chunk.offset_bytes == offset + len(data)
                assert len(chunk.data) <= CHUNK_BYTES
                data += chunk.data
        return np.frombuffer(bytes(data), np.uint8)

    def release(self):
        return self.session.client.call("ReleaseBuffer",
                                        pb.ReleaseBufferRequest(session=self.session.ref, buffer_id=self.id))

    def view(self, offset, rows, row_bytes, stride=None):
        return pb.View(buffer_id=self.id, offset_bytes=offset, rows=rows, row_bytes=row_bytes,
                       row_stride_bytes=row_bytes if stride is None else stride)

    def array(self, offset, count):
        return pb.Array(buffer=pb.BufferArray(buffer_id=self.id, offset_bytes=offset, count=count))


class Step:
    """A step under construction: arrays and ops."""

    def __init__(self, placement=""):
        self.placement = placement
        self.arrays, self.ops = [], []

    def array(self, values):
        """values: int32 numbers, or an Array message. Returns its index."""
        if not isinstance(values, pb.Array):
            values = pb.Array(inline=int32_bytes(values))
        self.arrays.append(values)
        return len(self.arrays) - 1

    def store(self, region, source, slots, cast_back=None):
        """slots: index of an array, or values for a new one."""
        self.ops.append(pb.Op(store=pb.StoreOp(region=region, source=source, slots=self._index(slots),
                                               cast_back=cast_back)))
        return self

    def load(self, region, segments, total_k, out, out_scales=None, allow=False):
        self.ops.append(pb.Op(load=pb.LoadOp(region=region, segments=self._index(segments), total_k=total_k, out=out,
                                             out_scales=out_scales, allow_store_before_load=allow)))
        return self

    def assemble(self, out, swa=None, chunk=None, compressed=None, allow=False):
        """swa: (region, segments, total_k). chunk: fields of AssembleChunk. compressed: (region, segments, total_k), or
        with keep_compressed behind them."""
        op = pb.AssembleOp(out=out, allow_store_before_load=allow)
        if swa is not None:
            region, segments, total_k = swa
            op.swa.CopyFrom(pb.AssembleSwa(region=region, segments=self._index(segments), total_k=total_k))
        if chunk is not None:
            fields = {name: self._index(value) if name in ("gather", "store_slots") else value
                      for name, value in chunk.items()}
            op.chunk.CopyFrom(pb.AssembleChunk(**fields))
        if compressed is not None:
            region, segments, total_k, *keep = compressed
            op.compressed.CopyFrom(pb.AssembleCompressed(region=region, segments=self._index(segments),
                                                         total_k=total_k, keep_compressed=bool(keep and keep[0])))
        self.ops.append(pb.Op(assemble=op))
        return self

    def fused_store(self, region, source, norm_weight, eps, positions, slots, **fields):
        """fields: cos_sin, rope_offset, neox, hadamard, keep_float32, cast_back."""
        self.ops.append(pb.Op(fused_store=pb.FusedStoreOp(
            region=region, source=source, norm_weight=norm_weight, eps=eps, positions=self._index(positions),
            slots=self._index(slots), **fields)))
        return self

    def convert_kv_index(self, region, topk, block_tables, table_columns, valid, queries, out=None):
        self.ops.append(pb.Op(convert_kv_index=pb.ConvertKvIndexOp(
            region=region, topk=self._matrix(topk), out=out, block_tables=self._index(block_tables),
            table_columns=table_columns, valid=self._index(valid), queries=queries)))
        return self

    def swa_index_decode(self, region, offset_len, window, out):
        self.ops.append(pb.Op(swa_index_decode=pb.SwaIndexDecodeOp(
            region=region, offset_len=self._index(offset_len), window=window, out=out)))
        return self

    def expand_swa_index(self, pivots, width, out):
        self.ops.append(pb.Op(expand_swa_index=pb.ExpandSwaIndexOp(pivots=self._index(pivots), width=width, out=out)))
        return self

    def kv_index_cat(self, left, left_columns, right, right_columns, right_base, out):
        """left, right: as of _matrix, or None."""
        self.ops.append(pb.Op(kv_index_cat=pb.KvIndexCatOp(
            left=self._matrix(left), left_columns=left_columns, right=self._matrix(right),
            right_columns=right_columns, right_base=right_base, out=out)))
        return self

    def copy_blocks(self, pool_id, pairs):
        self.ops.append(pb.Op(copy_blocks=pb.CopyBlocksOp(pool_id=pool_id, pairs=self._index(pairs))))
        return self

    def zero_blocks(self, pool_id, blocks):
        self.ops.append(pb.Op(zero_blocks=pb.ZeroBlocksOp(pool_id=pool_id, blocks=self._index(blocks))))
        return self

    def _index(self, values):
        return values if isinstance(values, int) else self.array(values)

    def _matrix(self, values):
        """A view, or what an array may be."""
        if values is None:
            return None
        if isinstance(values, pb.View):
            return pb.Matrix(view=values)
        return pb.Matrix(array=self._index(values))

    def request(self, session, epoch, step_id=0):
        return pb.StepRequest(session=session, step_id=step_id, placement=self.placement, epoch=epoch,
                              arrays=self.arrays, ops=self.ops)


class Session:
    """An open session: its stream, its secret, and the latest epoch it has seen."""

    def __init__(self, client, name, **fields):
        self.client = client
        self.events, self.ended = [], threading.Event()
        self.end_error = None
        self._changed = threading.Condition()
        self.stream = client.rpc.OpenSession(pb.OpenSessionRequest(name=name, **fields))
        with failures():
            opened = next(self.stream).opened
        self.ref, self.epoch, self.protocol_version = opened.session, opened.epoch, opened.protocol_version
        self.queues = []
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def id(self):
        return self.ref.session_id

    def _listen(self):
        try:
            for event in self.stream:
                with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.end_error = error
        with self._changed:
            self.ended.set()
            self._changed.notify_all()

    def wait_event(self, kind, start=0, seconds=60):
        """The first event of that kind from events[start] on."""
        def found():
            return next((e for e in self.events[start:] if e.WhichOneof("event") == kind), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() or self.ended.is_set(), seconds), f"no {kind} event"
            event = found()
        assert event is not None, f"the session ended without {kind}: {self.events}"
        return getattr(event, kind)

    def close(self):
        self.client.call("CloseSession", pb.CloseSessionRequest(session=self.ref))
        assert self.ended.wait(60), "the session's stream did not end"

    def abandon(self):
        """What a dying client does."""
        for steps in self.queues:
            steps.abandon()
        self.stream.cancel()

    # -- blocks

    def allocate(self, pool_id, count):
        return self._allocated("AllocateBlocks", pb.AllocateBlocksRequest(session=self.ref, pool_id=pool_id,
                                                                          count=count))

    def allocate_range(self, pool_id, first, count):
        return self._allocated("AllocateBlockRange", pb.AllocateBlockRangeRequest(
            session=self.ref, pool_id=pool_id, first_block=first, count=count))

    def _allocated(self, method, request):
        reply = self.client.call(method, request)
        self.epoch = max(self.epoch, reply.epoch)
        return int32_array(reply.blocks)

    def free(self, pool_id, blocks):
        reply = self.client.call("FreeBlocks", pb.FreeBlocksRequest(session=self.ref, pool_id=pool_id,
                                                                    blocks=int32_bytes(blocks)))
        self.epoch = max(self.epoch, reply.epoch)

    # -- buffers

    def create_buffer(self, count, device=DEVICE):
        return Buffer(self, self.client.call("CreateBuffer", pb.CreateBufferRequest(
            session=self.ref, device=device, bytes=count)))

    # -- steps

    def run(self, step, epoch=None, timeout=CALL_SECONDS_MAX):
        """RunStep; the reports."""
        return list(self.client.call("RunStep", step.request(self.ref, self.epoch if epoch is None else epoch),
                                     timeout).reports)

    def open_queue(self):
        steps = StepQueue(self)
        self.queues.append(steps)
        return steps

    # -- rows without a buffer

    def store_rows(self, region, rows, slots, row_bytes=None, epoch=None, placement="", chunk_bytes=CHUNK_BYTES):
        """rows: uint16 [n, elements] or raw bytes as uint8. The report."""
        data = np.ascontiguousarray(rows)
        row_bytes = data.shape[1] * data.itemsize if row_bytes is None else row_bytes

        def requests():
            yield pb.StoreRowsRequest(session=self.ref, placement=placement,
                                      epoch=self.epoch if epoch is None else epoch, region=region,
                                      row_bytes=row_bytes, slots=int32_bytes(slots))
            for _, piece in pieces(data.reshape(-1), chunk_bytes):
                yield pb.StoreRowsRequest(rows=piece)

        with failures():
            reports = self.client.rpc.StoreRows(requests(), timeout=CALL_SECONDS_MAX).reports
        assert len(reports) == 1
        return reports[0]

    def load_rows(self, region, segments, total_k, epoch=None, placement=""):
        """rows and scales as flat uint8, and the report."""
        rows, scales, report = bytearray(), bytearray(), None
        with failures():
            for reply in self.client.rpc.LoadRows(pb.LoadRowsRequest(
                    session=self.ref, placement=placement, epoch=self.epoch if epoch is None else epoch,
                    region=region, segments=int32_bytes(segments), total_k=total_k), timeout=CALL_SECONDS_MAX):
                assert report is None, "something came after the report"
                assert not (scales and reply.rows), "rows came after scales"
                assert len(reply.rows) <= CHUNK_BYTES and len(reply.scales) <= CHUNK_BYTES
                rows += reply.rows
                scales += reply.scales
                if reply.HasField("report"):
                    report = reply.report
        assert report is not None, "no report"
        return np.frombuffer(bytes(rows), np.uint8), np.frombuffer(bytes(scales), np.uint8), report


class StepQueue:
    """An open Steps stream."""

    def __init__(self, session):
        self.session = session
        self.ids = itertools.count(1)
        self.accepted, self.finished, self.order = set(), {}, []
        self.end_error = None
        self.ended = False
        self._requests = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._first = True
        self.call = session.client.rpc.Steps(iter(self._requests.get, None))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        error = None
        try:
            for event in self.call:
                kind = event.WhichOneof("event")
                body = getattr(event, kind)
                with self._changed:
                    self.order.append((kind, body.step_id))
                    if kind == "accepted":
                        self.accepted.add(body.step_id)
                    else:
                        assert body.step_id not in self.finished, f"step {body.step_id} finished twice"
                        self.finished[body.step_id] = body
                    self._changed.notify_all()
        except grpc.RpcError as caught:
            error = failure_of(caught)
        with self._changed:
            self.end_error, self.ended = error, True
            self._changed.notify_all()

    def send(self, step, epoch=None, session=None):
        """Returns the step's id at once."""
        step_id = next(self.ids)
        if session is None and self._first:
            session = self.session.ref
        self._first = False
        self.send_raw(step.request(session, self.session.epoch if epoch is None else epoch, step_id))
        return step_id

    def send_raw(self, request):
        self._requests.put(request)

    def wait_accepted(self, step_id, seconds=60):
        with self._changed:
            assert self._changed.wait_for(
                lambda: step_id in self.accepted or step_id in self.finished or self.ended, seconds), \
                f"step {step_id} neither accepted nor refused"
            self._raise_if_over(step_id, step_id in self.accepted)

    def wait(self, step_id, seconds=CALL_SECONDS_MAX):
        """The reports of a step that is done; StepFailure of one that is not."""
        with self._changed:
            assert self._changed.wait_for(lambda: step_id in self.finished or self.ended, seconds), \
                f"step {step_id} did not end"
            self._raise_if_over(step_id, False)
            body = self.finished[step_id]
        assert step_id in self.accepted, "done without accepted"
        return list(body.reports)

    def _raise_if_over(self, step_id, satisfied):
        body = self.finished.get(step_id)
        if isinstance(body, pb.StepFailed):
            torn = tuple((t.pool_id, tuple(int32_array(t.blocks).tolist())) for t in body.torn)
            raise StepFailure(refusal_of(body.error, torn=torn))
        if body is None and not satisfied and self.ended:
            raise self.end_error or AssertionError(f"the stream ended before step {step_id} did")

    def run(self, step, epoch=None):
        return self.wait(self.send(step, epoch))

    def finish(self, seconds=60):
        """Half-close; the daemon ends the stream when all steps have ended."""
        self._requests.put(None)
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended, seconds), "the stream did not end"
        if self.end_error:
            raise self.end_error

    def abandon(self):
        self._requests.put(None)
        self.call.cancel()
