"""Arrays that lie in a buffer: checked while the op runs. Whatever they hold, nothing of others is touched."""
import numpy as np
import pytest

from support.catalogue import INDEX_FP4, V41, Geometry
from support.client import Step
from support.reference import RegionModel
from support.stubs import pb
from support.traffic import random_rows

TOKENS, BLOCKS, OURS = 17, 6, (0, 1, 2, 3)
SOURCE = 65536  # in the buffer


class Scene:
    """Blocks 0..3 ours, 4 another's, 5 free; a buffer of arrays, rows in and rows out."""

    def __init__(self, daemon, client, session, name, fmt):
        self.session, self.format = session, fmt
        self.geometry = Geometry(fmt, TOKENS, BLOCKS)
        pool = client.create_pool(name, TOKENS, BLOCKS, [{"name": "kv", "format": fmt.name, "num_layers": 1}])
        self.region = pb.RegionRef(pool_id=pool.pool_id)
        session.allocate_range(pool.pool_id, 0, len(OURS))
        other = client.open_session("other")
        other.allocate_range(pool.pool_id, 4, 1)
        session.epoch = max(session.epoch, other.epoch)
        self.buffer = session.create_buffer(1 << 20)
        self.memory = daemon.region_memory(name, "kv")
        self.bytes = daemon.buffer_memory(self.buffer)
        self.rng = np.random.default_rng(21)
        for memory in (self.memory, self.bytes):
            memory.randomize(self.rng)
        self.expected = self.memory.snapshot()
        self.model = RegionModel(self.geometry, self.expected[:self.geometry.region_bytes])

    def put(self, values, offset=0):
        values = np.asarray(values, np.int32)
        self.bytes.write(offset, values.reshape(-1).view(np.uint8))
        return self.buffer.array(offset, values.size)

    def put_rows(self, rows):
        """BF16 rows, at the place of the sources."""
        self.rows_at(SOURCE, len(rows), self.format.row_bytes, self.format.row_bytes)[:] = rows.view(np.uint8)
        self.bytes.flush()

    def refresh(self):
        self.memory.refresh()
        self.bytes.refresh()

    def rows_at(self, offset, rows, row_bytes, stride):
        return np.lib.stride_tricks.as_strided(self.bytes.array[offset:], (rows, row_bytes), (stride, 1))

    def owned(self, slots):
        slots = np.asarray(slots, np.int64)
        return (slots >= 0) & (slots < len(OURS) * TOKENS)


@pytest.fixture(params=[V41, INDEX_FP4], ids=lambda f: f.name)
def scene(request, daemon, client, session, pool_name):
    made = Scene(daemon, client, session, pool_name, request.param)
    yield made
    made.memory.close()
    made.bytes.close()
    client.delete_pool(made.region.pool_id, force=True)


def store(scene, slots):
    """Runs the store; checks every byte of region and buffer. The report."""
    fmt, rows = scene.format, random_rows(scene.rng, scene.format, len(slots))
    array = scene.put(slots)
    scene.put_rows(rows)
    buffer_before = scene.bytes.snapshot()
    source = scene.buffer.view(SOURCE, len(slots), fmt.row_bytes)
    report = scene.session.run(Step().store(scene.region, source, array))[0]
    scene.refresh()
    kept = np.where(scene.owned(slots), slots, -1)
    scene.model.store(0, rows, kept)
    assert (scene.memory.array == scene.expected).all()
    assert (scene.bytes.array == buffer_before).all()
    assert report.unchecked_arrays
    return report


def test_bad_slots_are_skipped_and_counted(scene):
    slots = [3, -1, TOKENS * BLOCKS, 5, -2, 2**31 - 1, -2**31, 4 * TOKENS, 5 * TOKENS + 2, 0x7FC00000, 0, 67]
    report = store(scene, slots)
    assert (report.rows_stored, report.rows_skipped, report.rows_rejected) == (4, 1, 7)


def test_random_bits_as_slots(scene):
    for round_number in range(20):
        slots = scene.rng.integers(-2**31, 2**31, 200)
        if round_number % 2:
            slots = np.unique(scene.rng.integers(-20, TOKENS * BLOCKS + 20, 200))
        report = store(scene, slots)
        good, skipped = scene.owned(slots).sum(), (np.asarray(slots) == -1).sum()
        assert (report.rows_stored, report.rows_skipped) == (good, skipped)
        assert report.rows_rejected == len(slots) - good - skipped


def test_a_slot_twice_harms_only_itself(scene):
    """Which row wins is not said; the record is one of them or a mixture, its neighbours are untouched."""
    rows = random_rows(scene.rng, scene.format, 3)
    scene.put_rows(rows)
    scene.session.run(Step().store(scene.region, scene.buffer.view(SOURCE, 3, scene.format.row_bytes),
                                   scene.put([9, 11, 9])))
    scene.refresh()
    scene.model.store(0, rows, [-1, 11, 9])
    differs = np.nonzero(scene.memory.array != scene.expected)[0]
    data, scales = scene.model._indices(0, [9])
    assert set(differs) <= set(data[0]) | set(scales[0])


def load(scene, segments, total_k):
    fmt, stride = scene.format, scene.format.loaded_row_bytes + 16
    array = scene.put(segments)
    expected = scene.bytes.snapshot()
    step = Step()
    out, scales = scene.buffer.view(65536, total_k, fmt.loaded_row_bytes, stride), None
    if fmt.is_index:
        scales = scene.buffer.view(1 << 19, total_k, fmt.loaded_scale_bytes, 16)
    report = scene.session.run(step.load(scene.region, array, total_k, out, scales))[0]
    scene.refresh()
    return report, expected, stride


def test_bad_segments_touch_nothing_of_others(scene):
    total_k = 40
    bad = [(0, 0, TOKENS + 1, 0), (-2, 0, 3, 0), (BLOCKS, 0, 3, 0), (4, 0, 3, 0), (5, 0, 3, 0), (0, -1, 3, 0),
           (0, 5, 3, 0), (0, 0, 3, total_k - 2), (0, 0, 3, -1), (2**31 - 1, 0, 3, 0), (0, 0, 3, 2**31 - 1),
           (-1, 0, TOKENS + 1, 0), (-2**31, -2**31, 2**31 - 1, -2**31)]
    good = [(1, 2, 7, 10), (-1, 0, 3, 20)]
    report, expected, stride = load(scene, bad + good, total_k)
    out = np.lib.stride_tricks.as_strided(expected[65536:], (total_k, scene.format.loaded_row_bytes), (stride, 1))
    scales = None
    if scene.format.is_index:
        scales = np.lib.stride_tricks.as_strided(expected[1 << 19:], (total_k, 4), (16, 1))
    scene.model.load(0, good, out, scales)
    assert report.rows_loaded == 8 and report.rows_rejected > 0 and report.unchecked_arrays
    assert (scene.bytes.array == expected).all()
    assert (scene.memory.array == scene.expected).all()


def test_random_bits_as_segments(scene):
    """Some may be good by chance, or overlap: rows outside the view, and the pool, stay as they are."""
    fmt, total_k = scene.format, 40
    for round_number in range(20):
        segments = scene.rng.integers(-2**31, 2**31, (64, 4))
        if round_number % 2:
            segments = scene.rng.integers(-3, 24, (64, 4))
        report, before, stride = load(scene, segments, total_k)
        allowed = np.zeros(len(before), bool)
        np.lib.stride_tricks.as_strided(allowed[65536:], (total_k, fmt.loaded_row_bytes), (stride, 1))[:] = True
        if fmt.is_index:
            np.lib.stride_tricks.as_strided(allowed[1 << 19:], (total_k, 4), (16, 1))[:] = True
        assert not (scene.bytes.array != before)[~allowed].any()
        assert (scene.memory.array == scene.expected).all()
        assert report.unchecked_arrays


@pytest.mark.parametrize("scene", [V41], indirect=True, ids=["v41"])
def test_an_array_written_by_an_earlier_op(scene):
    """Arrays in a buffer are read when their op runs: here a load of the same step puts the slots there."""
    zeros = np.zeros((1, scene.format.elements), np.uint16)  # loads as int32 zeros: slot 0
    scene.model.store(0, zeros, [2 * TOKENS + 6])
    scene.session.store_rows(scene.region, zeros, [2 * TOKENS + 6])
    rows = random_rows(scene.rng, scene.format, 1)
    scene.put_rows(rows)
    scene.put([55])
    step = Step()
    step.load(scene.region, [(2, 6, 7, 0)], 1, scene.buffer.view(0, 1, scene.format.row_bytes))
    step.store(scene.region, scene.buffer.view(SOURCE, 1, scene.format.row_bytes), scene.buffer.array(0, 1))
    reports = scene.session.run(step)
    assert reports[1].rows_stored == 1
    scene.refresh()
    scene.model.store(0, rows, [0])
    assert (scene.memory.array == scene.expected).all()
