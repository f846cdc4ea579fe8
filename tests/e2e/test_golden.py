"""The golden store and load cases through a running daemon, every byte compared: the pool's memory read from its memfd
(of a GPU: dumped), the outputs from what the daemon hands out."""
import numpy as np
import pytest

from support import catalogue, golden, reference
from support.client import Step
from support.device import ON_GPU
from support.ring_door import RingDoor
from support.stubs import pb

CANARY_BYTES = 4096


class Scene:
    """A pool as the case wants it, filled, all blocks owned by one session."""

    def __init__(self, daemon, client, session, name, case):
        self.case, self.format, self.client, self.session = case, case.format, client, session
        spec = {"name": "kv", "format": self.format.name, "num_layers": 1}
        self.pool = client.create_pool(name, case.geometry.tokens_per_block, case.geometry.num_blocks, [spec])
        self.region = pb.RegionRef(pool_id=self.pool.pool_id, region=0, layer=0)
        self.memory = daemon.region_memory(name, "kv")
        self.expected = self.memory.prepare(catalogue.GOLDEN_CACHE_FILL)
        self.expected[:len(case.cache)][case.stored] = case.cache[case.stored]
        if not ON_GPU:
            assert self.expected[:len(case.cache)].tobytes() == case.cache.tobytes()
        blocks = session.allocate_range(self.pool.pool_id, 0, case.geometry.num_blocks)
        assert blocks.tolist() == list(range(case.geometry.num_blocks))

        self.out, self.out_scale = self._loaded()

    def _loaded(self):
        """What the case's load gives into filled outputs. The case loads records too that were never stored: of a GPU
        they are what memory held before."""
        case = self.case
        if not ON_GPU:
            return case.out, case.out_scale
        out = np.full_like(case.out, catalogue.GOLDEN_OUT_FILL)
        out_scale = None if case.out_scale is None else np.full_like(case.out_scale, catalogue.GOLDEN_OUT_FILL)
        reference.RegionModel(case.geometry, self.expected).load(0, case.arrays["segments"], out, out_scale)
        return out, out_scale

    def check_memory(self):
        """Nothing but the records of the slots has changed; what lies behind the region is looked at too."""
        assert self.memory.snapshot().tobytes() == self.expected.tobytes()

    def check_store_report(self, report):
        slots, rows = self.case.arrays["slots"], self.case.arrays["rows"][:len(self.case.arrays["slots"])]
        q, kept = reference.quantize(self.format, rows), slots >= 0
        assert report.rows_stored == kept.sum()
        assert report.rows_skipped == (~kept).sum()
        assert report.rows_rejected == 0
        assert report.rows_nonfinite == q.bad_rows[kept].sum()
        low, high = q.saturated[kept].sum(), (q.saturated + q.saturated_bad)[kept].sum()
        assert low <= report.groups_saturated <= high
        assert report.bytes_written == kept.sum() * self.format.bytes_per_token
        assert not report.unchecked_arrays
        assert 0 < report.queued_ns <= report.started_ns <= report.finished_ns

    def check_load_report(self, report):
        covered = self.case.covered.sum()
        assert report.rows_loaded == covered
        assert report.rows_stored == report.rows_rejected == report.rows_nonfinite == 0
        assert report.bytes_written == covered * (self.format.loaded_row_bytes + self.format.loaded_scale_bytes)

    def close(self):
        self.memory.close()
        self.client.delete_pool(self.pool.pool_id, force=True)


@pytest.fixture(params=golden.names())
def scene(request, daemon, client, session, pool_name):
    made = Scene(daemon, client, session, pool_name, golden.load(request.param))
    yield made
    made.close()


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 777])
def test_inline_rows(scene, chunk_bytes):
    case = scene.case
    report = scene.session.store_rows(scene.region, case.arrays["rows"], case.arrays["slots"], chunk_bytes=chunk_bytes)
    scene.check_memory()
    scene.check_store_report(report)

    rows, scales, report = scene.session.load_rows(scene.region, case.arrays["segments"], case.total_k)
    covered = case.covered[:, None]
    assert rows.tobytes() == np.where(covered, scene.out, 0).astype(np.uint8).tobytes()
    if case.out_scale is None:
        assert len(scales) == 0
    else:
        assert scales.tobytes() == np.where(covered, scene.out_scale, 0).astype(np.uint8).tobytes()
    scene.check_load_report(report)
    scene.check_memory()


@pytest.mark.parametrize("door", ["queue", "call", "ring"])
def test_steps_and_buffers(scene, door):
    case, session, fmt = scene.case, scene.session, scene.format
    source = session.create_buffer(case.arrays["rows"].nbytes)
    assert source.write(case.arrays["rows"]) == case.arrays["rows"].nbytes
    out = session.create_buffer(case.out.nbytes + 2 * CANARY_BYTES)
    out.write(np.full(out.bytes, catalogue.GOLDEN_OUT_FILL, np.uint8))
    out_view = out.view(CANARY_BYTES, case.total_k, fmt.loaded_row_bytes)
    scale_buffer = scale_view = None
    if fmt.is_index:
        scale_buffer = session.create_buffer(case.out_scale.nbytes + 2 * CANARY_BYTES)
        scale_buffer.write(np.full(scale_buffer.bytes, catalogue.GOLDEN_OUT_FILL, np.uint8))
        scale_view = scale_buffer.view(CANARY_BYTES, case.total_k, fmt.loaded_scale_bytes)

    step = Step()
    step.store(scene.region, source.view(0, len(case.arrays["rows"]), fmt.row_bytes), case.arrays["slots"])
    step.load(scene.region, case.arrays["segments"], case.total_k, out_view, scale_view)
    if door != "call":
        steps = session.open_queue() if door == "queue" else RingDoor(session)
        reports = steps.run(step)
        steps.finish()
    else:
        reports = session.run(step)
    assert len(reports) == 2
    scene.check_memory()
    scene.check_store_report(reports[0])
    scene.check_load_report(reports[1])

    expected = np.full(out.bytes, catalogue.GOLDEN_OUT_FILL, np.uint8)
    expected[CANARY_BYTES:-CANARY_BYTES] = scene.out.reshape(-1)
    assert out.read().tobytes() == expected.tobytes()
    if fmt.is_index:
        expected = np.full(scale_buffer.bytes, catalogue.GOLDEN_OUT_FILL, np.uint8)
        expected[CANARY_BYTES:-CANARY_BYTES] = scene.out_scale.reshape(-1)
        assert scale_buffer.read().tobytes() == expected.tobytes()
    assert source.read().tobytes() == case.arrays["rows"].tobytes()
    for buffer in (source, out, scale_buffer):
        if buffer:
            buffer.release()


@pytest.mark.parametrize("scene", [n for n in golden.names() if not n.startswith("index_")], indirect=True)
def test_cast_back_equals_a_load(scene):
    case, session, fmt = scene.case, scene.session, scene.format
    slots = case.arrays["slots"]
    buffer = session.create_buffer(case.arrays["rows"].nbytes)
    buffer.write(case.arrays["rows"])
    out = session.create_buffer(len(slots) * fmt.row_bytes + 2 * CANARY_BYTES)
    out.write(np.full(out.bytes, catalogue.GOLDEN_OUT_FILL, np.uint8))
    session.run(Step().store(scene.region, buffer.view(0, len(case.arrays["rows"]), fmt.row_bytes), slots,
                             out.view(CANARY_BYTES, len(slots), fmt.row_bytes)))
    scene.check_memory()
    expected = np.full(out.bytes, catalogue.GOLDEN_OUT_FILL, np.uint8)
    expected[CANARY_BYTES:-CANARY_BYTES] = reference.cast_back(fmt, case.arrays["rows"][:len(slots)]).reshape(-1)
    assert out.read().tobytes() == expected.tobytes()
    buffer.release()
    out.release()


def test_inspection(scene):
    """Dumps against the raw bytes, decoded records against the reference."""
    case, geometry = scene.case, scene.case.geometry
    scene.session.store_rows(scene.region, case.arrays["rows"], case.arrays["slots"])
    dumped = scene.client.dump(scene.region, 0, geometry.num_blocks)
    assert dumped.tobytes() == scene.expected[:len(case.cache)].tobytes()
    stride = geometry.block_stride_bytes
    assert scene.client.dump(scene.region, 1, 1).tobytes() == scene.expected[stride:2 * stride].tobytes()

    slots = np.array([s for s in case.arrays["slots"] if s >= 0], np.int64)
    model = reference.RegionModel(geometry, case.cache)
    data, scales = model.records(0, slots)
    # A person is shown the NaN that a 0xFF stands for, a load multiplies by Inf: both give NaN for what a store wrote.
    shown_scales = reference.decoded_scales(scene.format, scales)
    if scene.format.scale_format == "ue8m0":
        shown_scales = np.where(scales == 0xFF, np.float32("nan"), shown_scales)
    values = reference.decode(scene.format, data, scales)
    records = scene.client.inspect(scene.region, slots)
    assert [r.slot for r in records] == slots.tolist()
    for i, record in enumerate(records):
        assert record.raw == data[i].tobytes() + scales[i].tobytes()
        np.testing.assert_array_equal(np.array(record.scales, np.float32), shown_scales[i])
        np.testing.assert_array_equal(np.array(record.values, np.float32), values[i])
