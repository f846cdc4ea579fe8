"""What the Python package takes: numbers that C's types have and text without a NUL, told by their names; tickets; and
what its help says."""
import ctypes
import inspect
import json
import sys

import numpy as np
import pytest

from support.device import DEVICE, ON_GPU
from support.libkvpool import kvpool
from support.worker_fixtures import blocks, pool, scheduler, session, worker  # fixtures

pytestmark = pytest.mark.skipif(ON_GPU, reason="arguments are the same")

BLOCK_SIZE, BLOCKS = 64, 16
REGIONS = [{"name": "kv", "format": "v41", "num_layers": 2}]
U32, U64, I32, I64 = (0, 2**32), (0, 2**64), (-2**31, 2**31), (-2**63, 2**63)  # from, up to


class Things:
    """One of each whose methods take numbers."""

    def __init__(self, scheduler, session, pool, worker):
        self.client, self.session, self.pool, self.worker = scheduler, session, pool, worker
        self.mapped, self.buffer = worker.map_pool(pool.name), worker.create_buffer(1 << 16)
        self.remote, self.word = session.create_buffer(4096), worker.new_word(kvpool.WORKER)
        self.layer, self.view = pool.layer("kv"), self.buffer.view(8, 1024)
        self.step = worker.step()
        self.slots, self.positions = self.step.array([0]), self.step.array([0])
        self.step.fused_store(self.layer, self.view, self.view, 1e-6, self.slots, self.positions)
        self.replay = kvpool.Replay(worker, 3)


@pytest.fixture
def t(scheduler, session, pool, blocks, worker):
    return Things(scheduler, session, pool, worker)


# (what is called, the number's name, its range, the call)
NUMBERS = [
    ("Client", "timeout_ms", U32, lambda t, n: kvpool.Client("/tmp/nobody", timeout_ms=n)),
    ("Client.create_pool", "block_size", U32, lambda t, n: t.client.create_pool("n", n, 1, REGIONS)),
    ("Client.create_pool", "num_blocks", U32, lambda t, n: t.client.create_pool("n", 64, n, REGIONS)),
    ("Client.create_pool", "kind", I32, lambda t, n: t.client.create_pool("n", 64, 1, REGIONS, kind=n)),
    ("Client.create_pool", "num_layers", U32, lambda t, n: t.client.create_pool("n", 64, 1, [{"num_layers": n}])),
    ("Client.create_pool", "width", U32, lambda t, n: t.client.create_pool("n", 64, 1, [{"width": n}])),
    ("Client.create_pool", "compression_ratio", U32,
     lambda t, n: t.client.create_pool("n", 64, 1, [{"compression_ratio": n}])),
    ("Client.open_session", "blocks_max", U32, lambda t, n: t.client.open_session(blocks_max=n)),
    ("Pool.layer", "region", U32, lambda t, n: t.pool.layer(n)),
    ("Pool.layer", "layer", U32, lambda t, n: t.pool.layer(0, n)),
    ("Ticket", "session_id", U64, lambda t, n: kvpool.Ticket(None, n, bytes(16))),
    ("Ticket", "epoch", U64, lambda t, n: kvpool.Ticket(None, 1, bytes(16), epoch=n)),
    ("attach", "timeout_ms", U32, lambda t, n: kvpool.attach(t.session.ticket(DEVICE), timeout_ms=n)),
    ("attach", "session_id", U64, lambda t, n: kvpool.attach(session_id=n, secret=bytes(16))),
    ("attach", "epoch", U64, lambda t, n: kvpool.attach(session_id=1, secret=bytes(16), epoch=n)),
    ("make_memfd", "count", U64, lambda t, n: kvpool.make_memfd("m", n)),
    ("Session.allocate_range", "first", U32, lambda t, n: t.session.allocate_range(t.pool, n, 1)),
    ("Session.allocate_range", "count", U32, lambda t, n: t.session.allocate_range(t.pool, 0, n)),
    ("Session.create_buffer", "count", U64, lambda t, n: t.session.create_buffer(n)),
    ("Session.load_rows", "total_k", U64, lambda t, n: t.session.load_rows(t.layer, [], n, 1024)),
    ("Buffer.write", "offset_bytes", U64, lambda t, n: t.remote.write(b"", n)),
    ("Buffer.read", "count", U64, lambda t, n: t.remote.read(n)),
    ("Buffer.read", "offset_bytes", U64, lambda t, n: t.remote.read(offset_bytes=n)),
    ("Buffer.view", "rows", U64, lambda t, n: t.remote.view(n, 16)),
    ("Buffer.int32", "count", U64, lambda t, n: t.remote.int32(n)),
    ("MappedBuffer.view", "rows", U64, lambda t, n: t.buffer.view(n, 16)),
    ("MappedBuffer.view", "row_bytes", U32, lambda t, n: t.buffer.view(1, n)),
    ("MappedBuffer.view", "offset_bytes", U64, lambda t, n: t.buffer.view(1, 16, n)),
    ("MappedBuffer.view", "row_stride_bytes", U64, lambda t, n: t.buffer.view(1, 16, 0, n)),
    ("MappedBuffer.int32", "count", U64, lambda t, n: t.buffer.int32(n)),
    ("MappedBuffer.int32", "offset_bytes", U64, lambda t, n: t.buffer.int32(1, n)),
    ("MappedBuffer.array", "offset_bytes", I64, lambda t, n: t.buffer.array(offset_bytes=n)),
    ("MappedBuffer.array", "shape", I64, lambda t, n: t.buffer.array(shape=(n,))),
    ("Attachment.map_pool", "access", I32, lambda t, n: t.worker.map_pool(t.pool.name, n)),
    ("Attachment.create_buffer", "count", U64, lambda t, n: t.worker.create_buffer(n)),
    ("Attachment.map_buffer", "buffer_id", U64, lambda t, n: t.worker.map_buffer(n)),
    ("Attachment.import_memfd", "fd", I32, lambda t, n: t.worker.import_memfd(n, 4096)),
    ("Attachment.import_memfd", "memfd_bytes", U64, lambda t, n: t.worker.import_memfd(0, n, count=1)),
    ("Attachment.import_memfd", "offset_bytes", U64, lambda t, n: t.worker.import_memfd(0, 4096, n, 1)),
    ("Attachment.import_memfd", "count", U64, lambda t, n: t.worker.import_memfd(0, 4096, 0, n)),
    ("Attachment.import_device", "address", U64, lambda t, n: t.worker.import_device(n, 16)),
    ("Attachment.import_device", "count", U64, lambda t, n: t.worker.import_device(16, n)),
    ("Attachment.import_vmm", "fd", I32, lambda t, n: t.worker.import_vmm(n, 4096)),
    ("Attachment.import_vmm", "allocation_bytes", U64, lambda t, n: t.worker.import_vmm(0, n, count=1)),
    ("Attachment.import_vmm", "offset_bytes", U64, lambda t, n: t.worker.import_vmm(0, 4096, n, 1)),
    ("Attachment.import_vmm", "count", U64, lambda t, n: t.worker.import_vmm(0, 4096, 0, n)),
    ("Attachment.import_vmm", "address", U64, lambda t, n: t.worker.import_vmm(0, 4096, address=n)),
    ("Attachment.saw_epoch", "epoch", U64, lambda t, n: t.worker.saw_epoch(n)),
    ("Attachment.post", "base", U64, lambda t, n: t.worker.post(t.step, base=n)),
    ("Attachment.post", "deadline_ms", U32, lambda t, n: t.worker.post(t.step, deadline_ms=n)),
    ("Attachment.run", "base", U64, lambda t, n: t.worker.run(t.step, base=n)),
    ("Attachment.run", "deadline_ms", U32, lambda t, n: t.worker.run(t.step, deadline_ms=n)),
    ("AttachmentStep.run", "deadline_ms", U32, lambda t, n: t.step.run(deadline_ms=n)),
    ("AttachmentStep.points", "begins", U32, lambda t, n: t.step.points(n, 1)),
    ("AttachmentStep.points", "ends", U32, lambda t, n: t.step.points(1, n)),
    ("Word.signal", "value", U64, lambda t, n: t.word.signal(n)),
    ("Word.wait", "value", U64, lambda t, n: t.word.wait(n, 0)),
    ("Word.stream_signal", "value", U64, lambda t, n: t.word.stream_signal(n)),
    ("Word.stream_signal", "stream", U64, lambda t, n: t.word.stream_signal(1, n)),
    ("Word.stream_wait", "value", U64, lambda t, n: t.word.stream_wait(n)),
    ("Word.stream_wait", "stream", U64, lambda t, n: t.word.stream_wait(1, n)),
    ("Replay", "points", U32, lambda t, n: kvpool.Replay(t.worker, n)),
    ("Replay", "mode", I32, lambda t, n: kvpool.Replay(t.worker, 1, n)),
    ("Replay", "deadline_ms", U32, lambda t, n: kvpool.Replay(t.worker, 1, deadline_ms=n)),
    ("Replay.begin", "stream", U64, lambda t, n: t.replay.begin(n)),
    ("Replay.signal", "point", U32, lambda t, n: t.replay.signal(None, n)),
    ("Replay.wait", "point", U32, lambda t, n: t.replay.wait(None, n)),
    ("Replay.signal_and_wait", "point", U32, lambda t, n: t.replay.signal_and_wait(None, n)),
    ("Replay.end", "last_point", U32, lambda t, n: t.replay.end(None, n)),
    ("Step.store", "slots", U32, lambda t, n: t.step.store(t.layer, t.view, n)),
    ("Step.load", "segments", U32, lambda t, n: t.step.load(t.layer, n, 1, t.view)),
    ("Step.load", "total_k", U64, lambda t, n: t.step.load(t.layer, [[0, 0, 1, 0]], n, t.view)),
    ("Step.assemble", "total_k", U64, lambda t, n: t.step.assemble(t.view, swa=(t.layer, t.slots, n))),
    ("Step.assemble", "segments", U32, lambda t, n: t.step.assemble(t.view, compressed=(t.layer, n, 1))),
    ("Step.assemble", "reserved", U64, lambda t, n: t.step.assemble(t.view, chunk={"reserved": n})),
    ("Step.assemble", "gather", U32, lambda t, n: t.step.assemble(t.view, chunk={"source": t.view, "gather": n})),
    ("Step.assemble", "store_slots", U32,
     lambda t, n: t.step.assemble(t.view, chunk={"source": t.view, "store_slots": n})),
    ("Step.fused_store", "slots", U32, lambda t, n: t.step.fused_store(t.layer, t.view, t.view, 1e-6, n, t.positions)),
    ("Step.fused_store", "positions", U32, lambda t, n: t.step.fused_store(t.layer, t.view, t.view, 1e-6, t.slots, n)),
    ("Step.fused_store", "rope_offset", U32, lambda t, n: t.step.fused_store(t.layer, t.view, t.view, 1e-6, t.slots,
                                                                             t.positions, rope_offset=n)),
    ("Step.convert_kv_index", "table_columns", U32,
     lambda t, n: t.step.convert_kv_index(t.layer, t.view, [0], n, [0], 1)),
    ("Step.convert_kv_index", "queries", U32, lambda t, n: t.step.convert_kv_index(t.layer, t.view, [0], 1, [0], n)),
    ("Step.convert_kv_index", "array", U32,
     lambda t, n: t.step.convert_kv_index(t.layer, n, [0], 1, [0], 1, t.view)),
    ("Step.swa_index_decode", "window", U32, lambda t, n: t.step.swa_index_decode(t.layer, [[0, 1]], n, t.view)),
    ("Step.expand_swa_index", "width", U32, lambda t, n: t.step.expand_swa_index([[0, 1, 0, 0]], n, t.view)),
    ("Step.kv_index_cat", "left_columns", U32, lambda t, n: t.step.kv_index_cat(None, n, None, 0, 0, t.view)),
    ("Step.kv_index_cat", "right_columns", U32, lambda t, n: t.step.kv_index_cat(None, 0, None, n, 0, t.view)),
    ("Step.kv_index_cat", "right_base", I32, lambda t, n: t.step.kv_index_cat(None, 0, None, 0, n, t.view)),
    ("Step.copy_blocks", "pairs", U32, lambda t, n: t.step.copy_blocks(t.pool, n)),
    ("Step.zero_blocks", "blocks", U32, lambda t, n: t.step.zero_blocks(t.pool, n)),
    ("Step.wait", "word", U32, lambda t, n: t.step.wait(n, 1)),
    ("Step.wait", "value", U64, lambda t, n: t.step.wait(t.word, n)),
    ("Step.signal", "word", U32, lambda t, n: t.step.signal(n, 1)),
    ("Step.signal", "value", U64, lambda t, n: t.step.signal(t.word, n)),
    ("plan.paged_range", "tokens_per_block", U32, lambda t, n: kvpool.plan.paged_range([0], n, 0, 1)),
    ("plan.paged_range", "token_begin", I64, lambda t, n: kvpool.plan.paged_range([0], 1, n, 1)),
    ("plan.paged_range", "token_end", I64, lambda t, n: kvpool.plan.paged_range([0], 1, 0, n)),
    ("plan.paged_range", "dst_begin", I32, lambda t, n: kvpool.plan.paged_range([0], 1, 0, 1, n)),
    ("plan.slot_mapping", "tokens_per_block", U32, lambda t, n: kvpool.plan.slot_mapping([0], n, 0, 1)),
    ("plan.slot_mapping", "token_begin", I64, lambda t, n: kvpool.plan.slot_mapping([0], 1, n, n)),
    ("plan.slot_mapping", "token_end", I64, lambda t, n: kvpool.plan.slot_mapping([0], 1, 0, n)),
    ("plan.new_compressed", "seqlen_k", I64, lambda t, n: kvpool.plan.new_compressed(n, 1, 1)),
    ("plan.new_compressed", "seqlen_q", I64, lambda t, n: kvpool.plan.new_compressed(1, n, 1)),
    ("plan.new_compressed", "ratio", U32, lambda t, n: kvpool.plan.new_compressed(1, 1, n)),
    ("plan.compressed", "seqlen_k", I64, lambda t, n: kvpool.plan.compressed([(n, 1)], 4, 1)),
    ("plan.compressed", "seqlen_q", I64, lambda t, n: kvpool.plan.compressed([(1, n)], 4, 1)),
    ("plan.compressed", "ratio", U32, lambda t, n: kvpool.plan.compressed([], n, 1)),
    ("plan.compressed", "tokens_per_block", U32, lambda t, n: kvpool.plan.compressed([], 1, n)),
    ("plan.compressed_visible", "ratio", U32, lambda t, n: kvpool.plan.compressed_visible([], n, [0])),
    ("plan.swa", "state_id", I32, lambda t, n: kvpool.plan.swa([(n, 1, 1, 0)], 1, 1)),
    ("plan.swa", "seqlen_k", I64, lambda t, n: kvpool.plan.swa([(0, n, 1, 0)], 1, 1)),
    ("plan.swa", "swa_valid_start", I64, lambda t, n: kvpool.plan.swa([(0, 1, 1, n)], 1, 1)),
    ("plan.swa", "window", U32, lambda t, n: kvpool.plan.swa([], n, 1)),
    ("plan.swa", "ring_tokens", U32, lambda t, n: kvpool.plan.swa([], 1, n)),
    ("plan.swa_slots", "ring_tokens", U32, lambda t, n: kvpool.plan.swa_slots([], n)),
    ("plan.swa_pivots", "window", U32, lambda t, n: kvpool.plan.swa_pivots([], n)),
    ("plan.swa_decode", "window", U32, lambda t, n: kvpool.plan.swa_decode([], n, 1)),
    ("plan.swa_decode", "ring_tokens", U32, lambda t, n: kvpool.plan.swa_decode([], 1, n)),
    ("plan.mirror", "seqlens_q", I64, lambda t, n: kvpool.plan.mirror([n], 1, 0)),
    ("plan.mirror", "ranks", U32, lambda t, n: kvpool.plan.mirror([1], n, 0)),
    ("plan.mirror", "rank", U32, lambda t, n: kvpool.plan.mirror([1], 1, n)),
    ("plan.mirror_reverse", "seqlens_q", I64, lambda t, n: kvpool.plan.mirror_reverse([n], 1)),
    ("plan.mirror_reverse", "ranks", U32, lambda t, n: kvpool.plan.mirror_reverse([1], n)),
]

# Numbers that C isn't given, or that are refused for another reason before they are.
ELSEWHERE = {
    ("Session.allocate", "count"), ("Session.load_rows", "row_bytes"), ("Attachment.wait", "timeout_ms"),
    ("Word.wait", "timeout_ms"), ("Pool.region", "region"), ("PoolMap.region", "region"),
    ("Pool.region_index", "region"), ("PoolMap.region_index", "region"),
}
# Of names in the table: what else has them are arrays, layers and the like.
NOT_ONLY_NUMBERS = {"array", "blocks", "gather", "layer", "pairs", "positions", "region", "rows", "segments",
                    "seqlens_q", "slots", "store_slots", "stream", "word"}


@pytest.mark.parametrize("what, name, bounds, call", NUMBERS, ids=[f"{what} {name}" for what, name, *_ in NUMBERS])
def test_numbers(t, what, name, bounds, call):
    """The first on either side that C's type hasn't, what would be good modulo 2^32 or 2^64, and no whole number."""
    low, high = bounds
    for number in (low - 1, high, high + 8, low - 2**64, 2**200):
        with pytest.raises(OverflowError) as caught:
            call(t, number)
        assert str(caught.value) == f"{name} is {number}, not in [{low}, {high - 1}]"
    if name not in NOT_ONLY_NUMBERS:
        for number in (1.0, "1", np.float32(1)):
            with pytest.raises(TypeError, match=f"{name} is .*a whole number is wanted"):
                call(t, number)
    t.worker.check()


def public():
    """(name, function) of what the package has, constructors among them."""
    for name in kvpool.__all__:
        found = getattr(kvpool, name)
        if inspect.isfunction(found):
            yield name, found
        elif inspect.isclass(found) and not issubclass(found, (BaseException, int)):
            for member, function in inspect.getmembers(found, inspect.isfunction):
                if not member.startswith("_"):
                    yield f"{name}.{member}", function
    for name, function in inspect.getmembers(kvpool.plan, inspect.isfunction):
        if not name.startswith("_") and function.__module__ == kvpool.plan.__name__:
            yield f"plan.{name}", function


def test_every_number_is_in_the_table():
    """By the names that numbers have: no public function has one that isn't tried."""
    names = {name for _, name, *_ in NUMBERS} - NOT_ONLY_NUMBERS
    tried = {(what, name) for what, name, *_ in NUMBERS} | ELSEWHERE
    of_one_base = {"Buffer": ["MappedBuffer"], "MappedBuffer": ["Buffer"], "Step": ["AttachmentStep", "SessionStep"],
                   "Pool": ["PoolMap"]}
    tried |= {(f"{other}.{what.split('.')[1]}", name) for what, name in tried if "." in what
              for other in of_one_base.get(what.split(".")[0], ())}
    assert [(what, name) for what, function in public() for name in inspect.signature(function).parameters
            if name in names and (what, name) not in tried] == []


def test_whole_numbers_of_any_kind(t):
    """numpy's too."""
    view = t.buffer.view(np.int64(8), np.uint32(1024), np.int8(0))
    assert (view.struct.rows, view.struct.row_bytes) == (8, 1024)
    assert t.worker.create_buffer(np.uint16(4096)).bytes == 4096
    assert t.mapped.region(np.int32(0)).num_layers == 2
    assert kvpool.plan.slot_mapping([3], np.int64(4), 0, np.int32(2)).tolist() == [12, 13]


def test_every_number_of_c_is_checked():
    """The tables of functions and structs themselves: a whole number that programs give has a name to be told by."""
    package = sys.modules["kvpool._library"]
    whole = {ctypes.c_int, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64,
             ctypes.c_size_t}
    unnamed = [(function, kind.__name__) for table in (package._FALLIBLE, package._PLAIN)
               for function, types in table.items()
               for kind in (types if table is package._FALLIBLE else types[1:])
               if not isinstance(kind, tuple) and (kind in whole or kind is ctypes.c_char_p)]
    assert unnamed == []
    from kvpool._given import Checked
    written_by_c = {"kvpool_error", "kvpool_device_info", "kvpool_format_info", "kvpool_region_info",
                    "kvpool_session_event", "kvpool_op_report", "kvpool_completion", "kvpool_attachment_info",
                    "kvpool_mapped_region"}
    assert {name for name, struct in package.STRUCTS.items() if not issubclass(struct, Checked)} == written_by_c
    with pytest.raises(AttributeError, match="a RegionSpec has no 'layers'"):
        package.RegionSpec(layers=3)


# name of the text, the call
TEXTS = [
    ("target", lambda t, s: kvpool.Client(s)), ("name", lambda t, s: t.client.pool(s)),
    ("name", lambda t, s: t.client.create_pool(s, 64, 1, REGIONS)),
    ("name", lambda t, s: t.client.create_pool("n", 64, 1, [{"name": s}])),
    ("format", lambda t, s: t.client.create_pool("n", 64, 1, [{"format": s}])),
    ("note", lambda t, s: t.client.create_pool("n", 64, 1, [{"note": s}])),
    ("placements", lambda t, s: t.client.create_pool("n", 64, 1, REGIONS, placements=[s])),
    ("name", lambda t, s: t.client.open_session(s)),
    ("namespace_name", lambda t, s: t.client.open_session(namespace=s)),
    ("namespace_name", lambda t, s: t.client.create_pool("n", 64, 1, REGIONS, namespace=s)),
    ("device", lambda t, s: t.session.create_buffer(16, s)), ("device", lambda t, s: t.step.place(s)),
    ("device", lambda t, s: kvpool.attach(t.session.ticket(), device=s)),
    ("device", lambda t, s: kvpool.Ticket(None, 1, bytes(16), s)),
    ("socket", lambda t, s: kvpool.Ticket(s, 1, bytes(16))), ("name", lambda t, s: t.worker.map_pool(s)),
    ("name", lambda t, s: kvpool.make_memfd(s, 16)),
]


@pytest.mark.parametrize("name, call", TEXTS)
def test_texts(t, name, call):
    for bad in ("host:0\0b", "\0", "\udc80"):
        with pytest.raises(ValueError, match=f"^{name} "):
            call(t, bad)
    for bad in (7, b"host:0"):
        with pytest.raises(TypeError, match=f"^{name} is .*a str is wanted"):
            call(t, bad)


@pytest.mark.parametrize("call", [lambda t: t.client.pool(None), lambda t: t.worker.map_pool(None),
                                  lambda t: t.client.create_pool(None, 64, 1, REGIONS),
                                  lambda t: kvpool.make_memfd(None, 16)])
def test_texts_that_must_be(t, call):
    with pytest.raises(TypeError, match="name is None, a str is wanted"):
        call(t)


def test_shapes(t):
    for shape in ((-1,), (-1, -8), (8, -1)):
        with pytest.raises(ValueError, match="negative extent"):
            t.buffer.array(shape=shape)


# ---- tickets

GOOD = {"socket": "/tmp/nobody", "session_id": 1, "secret": "00" * 16, "device": None, "epoch": 0}


@pytest.mark.parametrize("text, match", [
    ("", "not JSON"), ("nonsense", "not JSON"), ("[" * 100000, "not JSON"), ("[]", "not an object"),
    ("7", "not an object"), ("null", "not an object"), ("{}", "has no 'socket'"),
    *[(json.dumps({k: v for k, v in GOOD.items() if k != name}), f"has no '{name}'") for name in GOOD],
    *[(json.dumps({**GOOD, name: bad}), f"'{name}' is not") for name, bads in (
        ("socket", (7, [])), ("session_id", ("1", 1.5, None, True)), ("secret", (7, None, "zz" * 16)),
        ("device", (7, {})), ("epoch", ("0", None, 0.0))) for bad in bads],
    (json.dumps({**GOOD, "session_id": -1}), "session_id is -1"),
    (json.dumps({**GOOD, "epoch": 2**64}), "epoch is 18446744073709551616"),
    (json.dumps({**GOOD, "secret": "00"}), "16 bytes, this one 1"),
    (json.dumps({**GOOD, "socket": "a\0b"}), "socket 'a.x00b' has a NUL"),
])
def test_tickets_that_are_none(text, match):
    """By either way in."""
    for take in (kvpool.Ticket.from_json, kvpool.attach):
        with pytest.raises(ValueError, match=match):
            take(text)


def test_a_bad_ticket_is_not_shown():
    """It may be a good one's secret."""
    for bad in ('{"secret": "5ec2e7" nonsense', json.dumps({**GOOD, "secret": "5ec2e7zz"}),
                json.dumps({**GOOD, "secret": ["5ec2e7"]})):
        with pytest.raises(ValueError) as caught:
            kvpool.attach(bad)
        assert "5ec2e7" not in str(caught.value) and caught.value.__suppress_context__ is (caught.value.__context__
                                                                                          is not None)


# ---- what a scheduler sees of a region, and help

def test_regions_of_a_pool_that_is_not_mapped(t):
    for region in (0, "kv"):
        info = t.pool.region(region)
        assert vars(info) == t.pool.regions[0]
        mapped = t.mapped.region(region)
        assert info.tokens_per_block == mapped.tokens_per_block == 64
    with pytest.raises(IndexError, match="region 1 of pool"):
        t.pool.region(1)
    with pytest.raises(KeyError, match="has no region 'x'"):
        t.pool.region("x")


def test_fewer_slots_than_rows(t, blocks):
    """By contract: rows behind the slots, as of a padded batch, are ignored. More slots than rows are refused."""
    step = t.worker.step()
    first = int(blocks[0]) * 64
    report, = t.worker.run(step.store(t.layer, t.view, [first, first + 1]))
    assert report.rows_stored == 2
    step.clear()
    with pytest.raises(kvpool.Error):
        t.worker.run(step.store(t.layer, t.view, list(range(first, first + 9))))


def test_help():
    """Each public function says something, and of each of its parameters of more than one dimension."""
    missing = [name for name, function in public() if not inspect.getdoc(function)]
    assert missing == []
    for op, words in {"store": "source slots cast_back BF16 int32", "load": "segments out out_scales total_k int32",
                      "assemble": "swa chunk compressed gather store_slots reserved BF16",
                      "fused_store": "source norm_weight eps slots positions cos_sin rope_offset neox hadamard "
                                     "keep_float32 cast_back BF16 float32 int32",
                      "convert_kv_index": "topk block_tables valid queries out int32",
                      "swa_index_decode": "offset_len window out int32", "expand_swa_index": "pivots width out int32",
                      "kv_index_cat": "left right right_base out int32", "copy_blocks": "pairs int32",
                      "zero_blocks": "blocks int32"}.items():
        text = inspect.getdoc(getattr(kvpool.Step, op))
        assert [word for word in words.split() if word not in text] == [], op
