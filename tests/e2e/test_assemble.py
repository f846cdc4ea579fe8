"""assemble through a running daemon, against numpy: its parts, its store, load before store, keep_compressed. Every byte
of the buffer and of both pools is compared."""
import numpy as np
import pytest

from support import reference
from support.catalogue import BF16, V41, V41_FP4, Geometry
from support.client import Step
from support.device import ON_GPU
from support.errors import RpcFailure, StepFailure
from support.fused import Recipe, rope_table, transformed
from support.reference import RegionModel
from support.ring_door import RingDoor
from support.sheet import Sheet
from support.stubs import pb
from support.traffic import random_rows

RING_TOKENS, RINGS, LAYERS = 48, 4, 2
TOKENS, BLOCKS = 16, 8
HISTORY = [(2, 40, 48, 0), (2, 0, 8, 8), (-1, 0, 3, 16), (1, 5, 6, 20)]  # row 19 is nobody's
HISTORY_ROWS = 21
COMPRESSED = [(5, 0, 16, 0), (1, 3, 9, 16)]
COMPRESSED_ROWS = 22


class Pages:
    """A region and what it must hold."""

    def __init__(self, daemon, pool_name, name, geometry, rng):
        self.geometry = geometry
        self.memory = daemon.region_memory(pool_name, name)
        self.memory.randomize(rng)
        self.expected = self.memory.snapshot()
        self.model = RegionModel(geometry, self.expected[:geometry.region_bytes])

    def fill(self, session, region, layer, rng):
        """Every record of a layer written, so that all of them decode to numbers."""
        slots = np.arange(self.geometry.num_slots)
        rows = random_rows(rng, self.geometry.format, len(slots))
        session.store_rows(region, rows, slots)
        self.model.store(layer, rows, slots)

    def load(self, layer, segments, out):
        self.model.load(layer, segments, out)

    def check(self):
        self.memory.refresh()
        assert (self.memory.snapshot() == self.expected).all()


class Scene:
    def __init__(self, daemon, client, session, name, fmt, door="queue"):
        self.client, self.session, self.format = client, session, fmt
        self.rng = np.random.default_rng(41)
        spec = [{"name": "kv", "format": fmt.name, "num_layers": LAYERS}]
        self.ring_pool = client.create_pool(name + "-ring", RING_TOKENS, RINGS, spec, kind=pb.POOL_RING)
        self.paged_pool = client.create_pool(name, 4 * TOKENS, BLOCKS, [{**spec[0], "compression_ratio": 4}])
        session.allocate_range(self.ring_pool.pool_id, 0, RINGS)
        session.allocate_range(self.paged_pool.pool_id, 0, BLOCKS)
        self.ring_pages = Pages(daemon, name + "-ring", "kv", Geometry(fmt, RING_TOKENS, RINGS, LAYERS), self.rng)
        self.paged_pages = Pages(daemon, name, "kv", Geometry(fmt, TOKENS, BLOCKS, LAYERS), self.rng)
        for layer in range(LAYERS):
            self.ring_pages.fill(session, self.ring(layer), layer, self.rng)
            self.paged_pages.fill(session, self.paged(layer), layer, self.rng)
        self.sheet = Sheet(session, self.rng)
        self.queue = session.open_queue() if door == "queue" else RingDoor(session)

    def ring(self, layer=0):
        return pb.RegionRef(pool_id=self.ring_pool.pool_id, layer=layer)

    def paged(self, layer=0):
        return pb.RegionRef(pool_id=self.paged_pool.pool_id, layer=layer)

    def rows(self, count):
        return random_rows(self.rng, self.format, count)

    def put(self, rows):
        return self.sheet.put(rows)

    def out(self, rows):
        return self.sheet.room(rows, self.format.row_bytes)

    def swa(self, segments=None, layer=0, rows=HISTORY_ROWS):
        return self.ring(layer), HISTORY if segments is None else segments, rows

    def compressed(self, segments=None, layer=0, rows=COMPRESSED_ROWS, keep=False):
        return self.paged(layer), COMPRESSED if segments is None else segments, rows, keep

    def run(self, step):
        self.sheet.write()
        return self.queue.run(step)

    def expect(self, out, swa=(), chunk=None, compressed=(), history_rows=0, layer=0, compressed_layer=0):
        """Puts what an assemble writes into what is expected of the view."""
        window = self.sheet.window(out)
        self.ring_pages.load(layer, swa, window)
        end = history_rows
        if chunk is not None:
            window[end:end + len(chunk)] = chunk
            end += len(chunk)
        self.paged_pages.load(compressed_layer, compressed, window[end:])

    def check(self):
        self.sheet.check()
        self.ring_pages.check()
        self.paged_pages.check()

    def refused(self, step, write=True):
        """The refusal of a step, with nothing changed by it."""
        if write:
            self.sheet.write()
        with pytest.raises((RpcFailure, StepFailure)) as caught:
            self.queue.run(step)
        self.check()
        return caught.value.refusal

    def close(self):
        self.ring_pages.memory.close()
        self.paged_pages.memory.close()
        self.client.delete_pool(self.ring_pool.pool_id, force=True)
        self.client.delete_pool(self.paged_pool.pool_id, force=True)


@pytest.fixture(params=["queue", "ring"])
def door(request):
    return request.param


@pytest.fixture(params=[V41], ids=lambda f: f.name)
def scene(request, daemon, client, session, pool_name, door):
    made = Scene(daemon, client, session, pool_name, request.param, door)
    yield made
    made.close()


every_format = pytest.mark.parametrize("scene", [V41, V41_FP4, BF16], indirect=True, ids=lambda f: f.name)


def as_bytes(rows):
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


def gathered(rows, gather):
    """-1: a zero row."""
    gather = np.asarray(gather)
    return np.where((gather >= 0)[:, None], rows[np.maximum(gather, 0)], 0).astype(np.uint16)


# ---- parts

@every_format
@pytest.mark.parametrize("parts", range(8))
def test_parts(scene, parts):
    """Each alone, all together, none."""
    has_swa, has_chunk, has_compressed = bool(parts & 1), bool(parts & 2), bool(parts & 4)
    rows = scene.rows(6)
    out = scene.out(HISTORY_ROWS + 6 + COMPRESSED_ROWS + 2)
    source = scene.put(rows)
    report, = scene.run(Step().assemble(out, scene.swa() if has_swa else None, {"source": source} if has_chunk else None,
                                        scene.compressed(layer=1) if has_compressed else None))
    history, chunk = HISTORY_ROWS * has_swa, 6 * has_chunk
    scene.expect(out, HISTORY if has_swa else (), as_bytes(rows) if has_chunk else None,
                 COMPRESSED if has_compressed else (), history, compressed_layer=1)
    scene.check()
    assert report.main_kv_offset == history + chunk
    assert report.rows_loaded == 20 * has_swa + chunk + 22 * has_compressed  # copied rows are loaded ones
    assert (report.rows_stored, report.rows_rejected) == (0, 0)
    assert report.bytes_written == (20 * has_swa + chunk + 22 * has_compressed) * scene.format.row_bytes
    assert not report.unchecked_arrays and not report.hazard_unchecked
    if parts:
        assert 0 < report.queued_ns <= report.started_ns <= report.finished_ns


@every_format
@pytest.mark.parametrize("where", ["inline", "buffer"])
@pytest.mark.parametrize("cast_back", [False, True], ids=["copied", "cast_back"])
@pytest.mark.parametrize("has_gather", [False, True], ids=["plain", "gather"])
@pytest.mark.parametrize("has_slots", [False, True], ids=["copy", "store"])
def test_chunk(scene, has_gather, has_slots, cast_back, where):
    """Every way a chunk's rows may come: into part 2, and behind it into the ring; the window was read before."""
    source_rows, gather = scene.rows(9), [8, -1, 3, 3, 0, -1, 7]
    rows = gathered(source_rows, gather) if has_gather else source_rows
    slots = np.array([2 * 48 + 41, -1, 2 * 48 + 40, 2 * 48 + 3, -1, -1, 1 * 48 + 5, 3 * 48, 2 * 48][:len(rows)], np.int32)

    def array(values):
        return np.asarray(values, np.int32) if where == "inline" else scene.sheet.array(values)

    chunk = {"source": scene.put(source_rows), "cast_back": cast_back}
    if has_gather:
        chunk["gather"] = array(gather)
    if has_slots:
        chunk["store_slots"] = array(slots)
    out = scene.out(HISTORY_ROWS + len(rows) + COMPRESSED_ROWS)
    report, = scene.run(Step().assemble(out, scene.swa(), chunk, scene.compressed()))
    part = reference.cast_back(scene.format, rows) if cast_back else as_bytes(rows)
    scene.expect(out, HISTORY, part, COMPRESSED, HISTORY_ROWS)
    if has_slots:
        scene.ring_pages.model.store(0, rows, slots)
    scene.check()
    assert report.main_kv_offset == HISTORY_ROWS + len(rows)
    assert (report.rows_loaded, report.rows_rejected) == (42 + (0 if cast_back else len(rows)), 0)
    assert report.rows_stored == (int((slots >= 0).sum()) if has_slots else 0)
    assert report.unchecked_arrays == (where == "buffer" and (has_gather or has_slots))


def test_a_gather_in_a_buffer_may_hold_anything(scene):
    """A row outside the source is a zero row, isn't stored, and is counted once, although it is copied and stored."""
    source_rows = scene.rows(4)
    gather, slots = [0, 4, -2, 2**31 - 1, 3, -1], [10, 11, 12, 13, 14, -1]
    out = scene.out(6)
    report, = scene.run(Step().assemble(out, chunk={
        "source": scene.put(source_rows), "gather": scene.sheet.array(gather), "store_slots": scene.sheet.array(slots),
        "region": scene.ring()}))
    rows = gathered(source_rows, [0, -1, -1, -1, 3, -1])
    scene.expect(out, chunk=as_bytes(rows))
    scene.ring_pages.model.store(0, rows, [10, -1, -1, -1, 14, -1])
    scene.check()
    assert (report.rows_stored, report.rows_skipped, report.rows_rejected) == (2, 1, 3)
    assert report.rows_loaded == 3 and report.unchecked_arrays


def test_reserved_rows_are_a_fused_stores(scene):
    """S + C counts them, the assemble leaves them alone, the fused_store fills them and the ring."""
    fmt, count = scene.format, 5
    rows, table, positions = scene.rows(count), rope_table(64, 64), [3, 63, 0, 9, 10]
    slots = [2 * 48 + 41, 2 * 48 + 42, -1, 0, 47]
    weight = reference.f32_to_bf16(scene.rng.uniform(0.5, 2, fmt.elements).astype(np.float32))
    out = scene.out(HISTORY_ROWS + count + COMPRESSED_ROWS)
    back = scene.sheet.buffer.view(out.offset_bytes + HISTORY_ROWS * out.row_stride_bytes, count, fmt.row_bytes,
                                   out.row_stride_bytes)
    step = Step().assemble(out, scene.swa(), {"reserved": count}, scene.compressed())
    step.fused_store(scene.ring(), scene.put(rows), scene.put(weight.reshape(1, -1)), 1e-6, positions, slots,
                     cos_sin=scene.put(table), cast_back=back)
    reports = scene.run(step)
    made = transformed(Recipe(weight, table, rope_offset=fmt.elements - 64), rows, positions)
    scene.expect(out, HISTORY, reference.cast_back(fmt, made), COMPRESSED, HISTORY_ROWS)
    scene.ring_pages.model.store(0, made, slots)
    scene.check()
    assert reports[0].main_kv_offset == HISTORY_ROWS + count
    assert reports[0].bytes_written == (20 + 22) * fmt.row_bytes
    assert reports[1].rows_stored == 4


def test_reserved_rows_stay(scene):
    out = scene.out(HISTORY_ROWS + 4 + COMPRESSED_ROWS)
    scene.run(Step().assemble(out, scene.swa(), {"reserved": 4}, scene.compressed()))
    untouched = scene.sheet.window(out)[HISTORY_ROWS:HISTORY_ROWS + 4].copy()
    scene.expect(out, HISTORY, untouched, COMPRESSED, HISTORY_ROWS)
    scene.check()


# ---- load before store

def test_hazard_store_then_load(scene):
    """The reversed step is refused, whole; with the override the load sees the new rows; the right order the old."""
    rows, slots = scene.rows(3), [2 * 48 + 7, 3 * 48, 2 * 48 + 9]
    source, out = scene.put(rows), scene.out(12)
    segments = [(2, 0, 12, 0)]

    def reversed_step(**fields):
        return Step().store(scene.ring(), source, slots).load(scene.ring(), segments, 12, out, **fields)

    refusal = scene.refused(reversed_step())
    assert (refusal.status, refusal.op) == ("hazard_store_before_load", 1)
    assert refusal.array == "segments" and refusal.position == 0 and refusal.value == 2 * 48 + 7
    assert "103" in refusal.message and "op 0 store" in refusal.message

    scene.run(Step().load(scene.ring(), segments, 12, out).store(scene.ring(), source, slots))
    scene.expect(out, segments)
    scene.ring_pages.model.store(0, rows, slots)
    scene.check()

    rows = scene.rows(3)
    scene.sheet.expect(source, rows)
    reports = scene.run(reversed_step(allow=True))
    scene.ring_pages.model.store(0, rows, slots)
    scene.expect(out, segments)
    scene.check()
    assert not reports[1].hazard_unchecked


def test_hazard_none(scene):
    """Other slots, another layer, zero rows: nothing is in the way. Pages of a paged pool never are."""
    rows = scene.rows(2)
    source, out = scene.put(rows), scene.out(16)
    step = Step().store(scene.ring(), source, [2 * 48 + 12, -1])
    step.load(scene.ring(), [(2, 0, 12, 0), (2, 13, 14, 12), (-1, 12, 13, 13)], 16, out)
    step.load(scene.ring(1), [(2, 12, 13, 15)], 16, out)
    scene.run(step)
    scene.expect(out, [(2, 0, 12, 0), (2, 13, 14, 12), (-1, 12, 13, 13)])
    scene.expect(out, [(2, 12, 13, 15)], layer=1)
    scene.ring_pages.model.store(0, rows, [2 * 48 + 12, -1])
    scene.check()

    scene.run(Step().store(scene.paged(), source, [5 * 16 + 3, 5 * 16]).load(scene.paged(), [(5, 0, 16, 0)], 16, out))
    scene.paged_pages.model.store(0, rows, [5 * 16 + 3, 5 * 16])
    scene.paged_pages.load(0, [(5, 0, 16, 0)], scene.sheet.window(out))
    scene.check()


def fused(scene, step, slots):
    """A fused_store of so many rows; what is stored."""
    fmt, rows = scene.format, scene.rows(len(slots))
    weight = np.full((1, fmt.elements), 0x3F80, np.uint16)
    step.fused_store(scene.ring(), scene.put(rows), scene.put(weight), 1e-6, [0] * len(slots), slots)
    return transformed(Recipe(weight[0], np.zeros((1, 0), np.float32)), rows, [0] * len(slots))


@pytest.mark.parametrize("reader", ["load", "assemble"])
@pytest.mark.parametrize("writer", ["store", "fused_store", "assemble"])
def test_hazard_of_every_pair(scene, writer, reader):
    """Whoever stores, whoever reads behind it in the step."""
    slots, rows = [2 * 48 + 47, 2 * 48 + 1], scene.rows(2)
    out, other_out = scene.out(HISTORY_ROWS + 2), scene.out(HISTORY_ROWS)

    def step_of(allow):
        step = Step()
        stored = rows
        if writer == "store":
            step.store(scene.ring(), scene.put(rows), slots)
        elif writer == "fused_store":
            stored = fused(scene, step, slots)
        else:
            step.assemble(out, scene.swa(), {"source": scene.put(rows), "store_slots": slots})
        if reader == "load":
            step.load(scene.ring(), HISTORY, HISTORY_ROWS, other_out, allow=allow)
        else:
            step.assemble(other_out, scene.swa(), allow=allow)
        return step, stored

    refusal = scene.refused(step_of(False)[0])
    assert (refusal.status, refusal.op, refusal.value) == ("hazard_store_before_load", 1, 2 * 48 + 47)
    assert f"op 0 {writer}" in refusal.message
    step, stored = step_of(True)
    scene.run(step)
    if writer == "assemble":
        scene.expect(out, HISTORY, as_bytes(rows), (), HISTORY_ROWS)
    scene.ring_pages.model.store(0, stored, slots)
    scene.expect(other_out, HISTORY)
    scene.check()


@pytest.mark.parametrize("in_buffer", ["slots", "segments"])
def test_hazard_unchecked(scene, in_buffer):
    """Arrays in a buffer can't be looked at: the later op says so, and runs."""
    rows, slots, segments = scene.rows(2), [2 * 48, 2 * 48 + 1], [(2, 0, 12, 0)]
    source, out = scene.put(rows), scene.out(12)
    step = Step().store(scene.ring(), source, scene.sheet.array(slots) if in_buffer == "slots" else slots)
    step.load(scene.ring(), scene.sheet.array(segments) if in_buffer == "segments" else segments, 12, out)
    reports = scene.run(step)
    scene.ring_pages.model.store(0, rows, slots)
    scene.expect(out, segments)
    scene.check()
    assert [r.hazard_unchecked for r in reports] == [False, True]


# ---- keep_compressed

def kept(scene, out, layer=0, **fields):
    """An assemble of a layer that follows the source layer of its group."""
    return Step().assemble(out, scene.swa(layer=layer), None, scene.compressed(keep=True, **fields))


def assembled(scene, out):
    """The source layer's."""
    scene.run(Step().assemble(out, scene.swa(), None, scene.compressed()))
    scene.expect(out, HISTORY, None, COMPRESSED, HISTORY_ROWS)
    scene.check()


@pytest.mark.parametrize("how", ["same_step", "same_queue", "other_queue"])
def test_keep_compressed(scene, how):
    """Parts 1 and 2 are another layer's, part 3 isn't written again."""
    out = scene.out(HISTORY_ROWS + COMPRESSED_ROWS)
    if how == "same_step":
        step = Step().assemble(out, scene.swa(), None, scene.compressed())
        report = scene.run(step.assemble(out, scene.swa(layer=1), None, scene.compressed(keep=True)))[1]
        scene.expect(out, HISTORY, None, COMPRESSED, HISTORY_ROWS)
    else:
        assembled(scene, out)
        run = scene.queue.run if how == "same_queue" else scene.session.run
        report, = run(kept(scene, out, 1))
    scene.expect(out, HISTORY, layer=1)
    scene.check()
    assert report.main_kv_offset == HISTORY_ROWS
    assert report.rows_loaded == 20 and report.bytes_written == 20 * scene.format.row_bytes


def test_keep_compressed_with_another_chunk_in_front(scene):
    """S + C has to be what it was, not S and C."""
    rows = scene.rows(4)
    out = scene.out(HISTORY_ROWS + COMPRESSED_ROWS)
    source = scene.put(rows)
    assembled(scene, out)
    segments = [s for s in HISTORY if s[3] + s[2] - s[1] <= HISTORY_ROWS - 4]
    scene.queue.run(Step().assemble(out, scene.swa(segments, 1, HISTORY_ROWS - 4), {"source": source},
                                    scene.compressed(keep=True)))
    scene.expect(out, segments, as_bytes(rows), (), HISTORY_ROWS - 4, layer=1)
    scene.check()


MISMATCHES = {
    "segments": lambda s, out: kept(s, out, segments=[(5, 0, 16, 0), (1, 3, 8, 16)]),
    "rows": lambda s, out: kept(s, out, rows=COMPRESSED_ROWS + 1),
    "layer_of_the_cache": lambda s, out: Step().assemble(out, s.swa(), None, (s.paged(1), COMPRESSED, COMPRESSED_ROWS, 1)),
    "offset": lambda s, out: Step().assemble(out, s.swa(), {"reserved": 1}, s.compressed(keep=True)),
    "row_offset": lambda s, out: Step().assemble(
        s.sheet.buffer.view(out.offset_bytes + out.row_stride_bytes, out.rows, out.row_bytes, out.row_stride_bytes),
        s.swa(), None, s.compressed(keep=True)),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_keep_compressed_mismatch(scene, name):
    out = scene.out(HISTORY_ROWS + 1 + COMPRESSED_ROWS)
    scene.out(1)
    assembled(scene, out)
    refusal = scene.refused(MISMATCHES[name](scene, out), write=False)
    assert refusal.status == "invalid_argument" and refusal.op == 0, refusal
    assert "keep_compressed" in refusal.message
    scene.queue.run(kept(scene, out, 1))  # the refused one has spoiled nothing
    scene.expect(out, HISTORY, layer=1)
    scene.check()


def test_keep_compressed_without_an_assemble(scene):
    out = scene.out(HISTORY_ROWS + COMPRESSED_ROWS)
    refusal = scene.refused(kept(scene, out))
    assert refusal.status == "invalid_argument" and "keep_compressed" in refusal.message


def spoil_by_write(scene, out):
    last = out.offset_bytes + (HISTORY_ROWS + COMPRESSED_ROWS - 1) * out.row_stride_bytes
    scene.sheet.expected[last] = 7
    scene.sheet.buffer.write(np.array([7], np.uint8), last)


def spoil_by_load(scene, out):
    view = scene.sheet.buffer.view(out.offset_bytes + HISTORY_ROWS * out.row_stride_bytes, 1, out.row_bytes)
    scene.queue.run(Step().load(scene.paged(), [(0, 0, 1, 0)], 1, view))
    scene.paged_pages.load(0, [(0, 0, 1, 0)], scene.sheet.window(view))


def spoil_by_store(scene, _):
    """The same rows again: written is written."""
    rows = scene.rows(1)
    scene.session.store_rows(scene.paged(), rows, [5 * TOKENS + 15])
    scene.paged_pages.model.store(0, rows, [5 * TOKENS + 15])


def shaped(pages):
    g = pages.geometry
    return pages.model.memory.reshape(g.num_layers, g.num_blocks, g.block_stride_bytes)


def spoil_by_copy(scene, _):
    scene.queue.run(Step().copy_blocks(scene.paged_pool.pool_id, [(6, 1)]))
    shaped(scene.paged_pages)[:, 1] = shaped(scene.paged_pages)[:, 6].copy()


def spoil_by_zero(scene, _):
    scene.queue.run(Step().zero_blocks(scene.paged_pool.pool_id, [5]))
    shaped(scene.paged_pages)[:, 5] = 0


def store_of_slots_in_a_buffer(scene, layer):
    """Of none: but nobody knows that before it runs."""
    slots = scene.session.create_buffer(4)
    slots.write(np.full(1, -1, np.int32))
    rows = scene.session.create_buffer(scene.format.row_bytes)
    report = scene.queue.run(Step().store(scene.paged(layer), rows.view(0, 1, scene.format.row_bytes),
                                          slots.array(0, 1)))[0]
    assert (report.rows_skipped, report.unchecked_arrays) == (1, True)


def spoil_by_slots_in_a_buffer(scene, _):
    store_of_slots_in_a_buffer(scene, 0)


def test_keep_compressed_beside_slots_in_a_buffer(scene):
    """They are of another layer, whatever they are."""
    out = scene.out(HISTORY_ROWS + COMPRESSED_ROWS)
    assembled(scene, out)
    store_of_slots_in_a_buffer(scene, 1)
    scene.queue.run(kept(scene, out, 1))
    scene.expect(out, HISTORY, layer=1)
    scene.check()


@pytest.mark.parametrize("spoil", [spoil_by_write, spoil_by_load, spoil_by_store, spoil_by_copy, spoil_by_zero,
                                   spoil_by_slots_in_a_buffer],
                         ids=lambda f: f.__name__)
def test_keep_compressed_written_since(scene, spoil):
    out = scene.out(HISTORY_ROWS + COMPRESSED_ROWS)
    assembled(scene, out)
    spoil(scene, out)
    refusal = scene.refused(kept(scene, out), write=False)
    assert refusal.status == "invalid_argument" and "keep_compressed" in refusal.message
    assembled(scene, out)  # once more, and it may
    scene.queue.run(kept(scene, out, 1))
    scene.expect(out, HISTORY, layer=1)
    scene.check()


def test_keep_compressed_in_a_step_that_writes_before(scene):
    """A write earlier in the same step counts, one behind the assemble doesn't reach it."""
    out = scene.out(HISTORY_ROWS + COMPRESSED_ROWS)
    rows = scene.rows(1)
    source = scene.put(rows)
    assembled(scene, out)
    refusal = scene.refused(Step().store(scene.paged(), source, [1 * TOKENS + 8]).assemble(
        out, scene.swa(), None, scene.compressed(keep=True)), write=False)
    assert refusal.op == 1 and "keep_compressed" in refusal.message
    scene.queue.run(Step().assemble(out, scene.swa(layer=1), None, scene.compressed(keep=True)).store(
        scene.paged(), source, [1 * TOKENS + 8]))
    scene.expect(out, HISTORY, layer=1)
    scene.paged_pages.model.store(0, rows, [1 * TOKENS + 8])
    scene.check()


@pytest.mark.parametrize("spoil", ["rows", "blocks"])
def test_keep_compressed_beside_a_writer_of_another_queue(scene, spoil):
    """A step of another queue that is accepted before the assemble, and runs for long, may write behind it. Who ends
    first is the machine's business; a part is kept only where the writer was through before the assemble came."""
    other = scene.session.open_queue()
    out = scene.out(HISTORY_ROWS + COMPRESSED_ROWS)
    rows, busy_rows = scene.rows(1), 4096
    source, busy = scene.put(rows), scene.session.create_buffer(busy_rows * scene.format.row_bytes)
    scene.sheet.write()
    refused = 0
    for _ in range(20):
        long = Step()
        everything = long.array([(block % BLOCKS, 0, TOKENS, block * TOKENS) for block in range(busy_rows // TOKENS)])
        for _ in range(1000 if ON_GPU else 12):
            long.load(scene.paged(), everything, busy_rows, busy.view(0, busy_rows, scene.format.row_bytes))
        if spoil == "rows":
            view = scene.sheet.buffer.view(out.offset_bytes + HISTORY_ROWS * out.row_stride_bytes, 1, out.row_bytes)
            long.load(scene.paged(), [(0, 0, 1, 0)], 1, view)
        else:
            long.store(scene.paged(), source, [5 * TOKENS + 15])
        writing = other.send(long)
        other.wait_accepted(writing)
        assembling, = scene.queue.run(Step().assemble(out, scene.swa(), None, scene.compressed()))
        try:
            scene.queue.run(kept(scene, out, 1))
            is_kept = True
        except (RpcFailure, StepFailure) as error:
            assert "a step of another queue, which had not finished when they were assembled" in error.refusal.message
            is_kept = False
        written = other.wait(writing)[-1]
        if is_kept:
            assert written.finished_ns <= assembling.queued_ns
            continue
        refused += 1
        assembled_again, kept_again = Step().assemble(out, scene.swa(), None, scene.compressed()), kept(scene, out, 1)
        scene.queue.run(assembled_again)
        scene.queue.run(kept_again)
        break
    assert refused
    if spoil == "blocks":
        scene.paged_pages.model.store(0, rows, [5 * TOKENS + 15])
    scene.expect(out, HISTORY, None, COMPRESSED, HISTORY_ROWS)
    scene.expect(out, HISTORY, layer=1)
    scene.check()
    busy.release()


def test_each_placement_remembers_its_own(start_daemon):
    """One pool on two devices: what one has assembled the other one hasn't, and blocks written there are others."""
    if ON_GPU:
        pytest.skip("one GPU")
    rng = np.random.default_rng(43)
    client = start_daemon(devices=("host:0", "host:1")).client()
    session = client.open_session()
    places = ("host:0", "host:1")
    pool = client.create_pool("two", 64, 4, [{"name": "kv", "format": "v41", "num_layers": 1, "compression_ratio": 4}],
                              placements=places)
    session.allocate_range(pool.pool_id, 0, 4)
    region, segments, sheets = pb.RegionRef(pool_id=pool.pool_id), [(2, 1, 9, 0)], {}
    stored = {place: random_rows(rng, V41, 16) for place in places}
    for place in places:
        session.store_rows(region, stored[place], range(32, 48), placement=place)
        sheets[place] = Sheet(session, rng, device=place)
    outs = {place: sheets[place].room(8, V41.row_bytes) for place in places}
    for sheet in sheets.values():
        sheet.write()

    def assemble(place, keep=False):
        return Step(place).assemble(outs[place], compressed=(region, segments, 8, keep))

    session.run(assemble("host:0"))
    session.run(assemble("host:0", True))
    with pytest.raises(RpcFailure, match="no assemble has written them"):
        session.run(assemble("host:1", True))
    session.run(assemble("host:1"))
    session.run(Step("host:1").zero_blocks(pool.pool_id, [2]))
    session.run(assemble("host:0", True))
    with pytest.raises(RpcFailure, match="blocks that they were assembled from were written since"):
        session.run(assemble("host:1", True))
    for place in places:
        sheets[place].expect(outs[place], reference.cast_back(V41, stored[place][1:9]))
        sheets[place].check()
    client.close()


# ---- every gRPC door

def test_an_assemble_as_a_call(scene):
    """RunStep, where everything above goes through a stream."""
    rows = scene.rows(3)
    out = scene.out(HISTORY_ROWS + 3 + COMPRESSED_ROWS)
    step = Step().assemble(out, scene.swa(), {"source": scene.put(rows), "store_slots": [0, 1, 2]}, scene.compressed())
    scene.sheet.write()
    report, = scene.session.run(step)
    scene.expect(out, HISTORY, as_bytes(rows), COMPRESSED, HISTORY_ROWS)
    scene.ring_pages.model.store(0, rows, [0, 1, 2])
    scene.check()
    assert report.main_kv_offset == HISTORY_ROWS + 3
