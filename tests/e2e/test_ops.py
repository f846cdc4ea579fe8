"""Index ops, fused_store and the block ops through a running daemon: golden cases with arrays sent along and arrays in a
buffer, every byte of outputs and pools compared; what numbers in a buffer may hold; several placements."""
import numpy as np
import pytest

from support import golden, reference
from support.catalogue import GOLDEN_CACHE_FILL, INDEX_FP4, V41, Format, Geometry, bf16_of_width
from support.client import Step
from support.device import ON_GPU
from support.fused import Recipe, rope_table, transformed
from support.reference import RegionModel
from support.ring_door import RingDoor
from support.sheet import Sheet
from support.stubs import pb
from support.traffic import random_rows

SOURCES = ["inline", "buffer"]


@pytest.fixture
def rng():
    return np.random.default_rng(31)


@pytest.fixture(params=["call", "ring"])
def session(request, session):
    """Whose steps come by gRPC, or through a worker's ring."""
    if request.param == "call":
        yield session
        return
    door = RingDoor(session)
    session.run = door.run
    yield session
    door.finish()


@pytest.fixture
def sheet(session, rng):
    return Sheet(session, rng)


def given(sheet, where, values):
    """An array of a step, sent along or in the buffer."""
    return np.asarray(values, np.int32).reshape(-1) if where == "inline" else sheet.array(values)


def run_one(session, step):
    reports = session.run(step)
    assert len(reports) == 1
    return reports[0]


def check_index_report(report, where, rejected, bytes_read, bytes_written):
    assert report.rows_rejected == rejected
    assert (report.bytes_read, report.bytes_written) == (bytes_read, bytes_written)
    assert report.rows_stored == report.rows_loaded == 0
    assert 0 < report.queued_ns <= report.started_ns <= report.finished_ns
    if where == "inline":
        assert not report.unchecked_arrays


# ---- convert_kv_index

CONVERT_BLOCKS = 256


def converted(topk, tables, valid, tokens, num_blocks):
    """One entry at a time: the slots, and how many entries were wrong."""
    out, rejected = np.full_like(topk, -1), 0
    for b in range(topk.shape[0]):
        for s in range(topk.shape[1]):
            for i in range(min(max(int(valid[b, s]), 0), topk.shape[2])):
                x = int(topk[b, s, i])
                if x == -1:
                    continue
                column = x // tokens
                if x < -1 or column >= tables.shape[1] or not 0 <= tables[b, column] < num_blocks:
                    rejected += 1
                    continue
                out[b, s, i] = tables[b, column] * tokens + x % tokens
    return out, rejected


@pytest.fixture
def paged(client, pool_name):
    """A region of 16 tokens a block and 256 blocks; its pool's block is 64 tokens of a sequence."""
    pool = client.create_pool(pool_name, 64, CONVERT_BLOCKS,
                              [{"name": "kv", "format": "v41", "num_layers": 2, "compression_ratio": 4}])
    yield pb.RegionRef(pool_id=pool.pool_id, layer=1)
    client.delete_pool(pool.pool_id, force=True)


@pytest.mark.parametrize("topk_as", ["view", "array"])
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
@pytest.mark.parametrize("where", SOURCES)
def test_convert_kv_index_golden(session, sheet, paged, where, in_place, topk_as):
    if in_place and topk_as == "array":
        pytest.skip("an array is no place to write to")
    case = golden.load("convert_kv_index")
    topk, tables, valid = (case.arrays[k] for k in ("topk_idxs", "block_tables", "context_lens"))
    batch, queries, columns = topk.shape
    expected, rejected = converted(topk, tables, valid, 16, CONVERT_BLOCKS)
    assert (expected == case.arrays["out"]).all()
    flat = topk.reshape(-1, columns)
    source = sheet.put(flat) if topk_as == "view" else given(sheet, where, flat)
    out = source if in_place else sheet.room(batch * queries, 4 * columns, 4)
    tables_array, valid_array = given(sheet, where, tables), given(sheet, where, valid)
    sheet.write()
    report = run_one(session, Step().convert_kv_index(paged, source, tables_array, tables.shape[1], valid_array,
                                                      queries, None if in_place else out))
    sheet.expect(out, expected.reshape(-1, columns))
    sheet.check()
    check_index_report(report, where, rejected, topk.nbytes, topk.nbytes)


@pytest.mark.parametrize("where", SOURCES)
def test_convert_kv_index_hostile(session, sheet, rng, paged, where):
    """Bits of NaNs, columns past the table, blocks past the pool, lengths past the list: -1, and counted."""
    batch, queries, columns, width = 3, 4, 40, 5
    for _ in range(5):
        sheet.end = 0
        topk = rng.integers(-4, 16 * width + 20, (batch, queries, columns)).astype(np.int32)
        wild = rng.random(topk.shape) < 0.2
        topk[wild] = rng.choice([0x7FC00000, -2**31, 2**31 - 1, -2, -256], wild.sum())
        tables = rng.integers(-3, CONVERT_BLOCKS + 3, (batch, width)).astype(np.int32)
        valid = rng.choice([0, 1, columns - 1, columns, columns + 1, -1, 2**31 - 1, -2**31], (batch, queries))
        view = sheet.put(topk.reshape(-1, columns))
        tables_array, valid_array = given(sheet, where, tables), given(sheet, where, valid)
        sheet.write()
        report = run_one(session, Step().convert_kv_index(paged, view, tables_array, width, valid_array, queries))
        expected, rejected = converted(topk, tables, valid, 16, CONVERT_BLOCKS)
        sheet.expect(view, expected.reshape(-1, columns))
        sheet.check()
        check_index_report(report, where, rejected, topk.nbytes, topk.nbytes)


# ---- swa_index_decode

@pytest.fixture
def ring(client, pool_name):
    pool = client.create_pool(pool_name, 64, 7, [{"name": "swa", "format": "v41", "num_layers": 1}], kind=pb.POOL_RING)
    yield pb.RegionRef(pool_id=pool.pool_id)
    client.delete_pool(pool.pool_id, force=True)


@pytest.mark.parametrize("where", SOURCES)
def test_swa_index_decode_golden(session, sheet, ring, where):
    case = golden.load("swa_index_decode")
    expected = case.arrays["out"]
    out = sheet.room(*expected.shape[:1], 4 * expected.shape[1], 4)
    offset_len = given(sheet, where, case.arrays["offset_len"])
    sheet.write()
    report = run_one(session, Step().swa_index_decode(ring, offset_len, expected.shape[1], out))
    sheet.expect(out, expected)
    sheet.check()
    check_index_report(report, where, 0, 0, expected.nbytes)


@pytest.mark.parametrize("where", SOURCES)
def test_swa_index_decode_hostile(session, sheet, ring, where):
    """A window that wraps, none at all, and what is wrong: a row of -1 each."""
    window, ring_tokens, slots = 8, 64, 7 * 64
    offset_len = np.array([[62, 4], [2**31 - 1, 0], [-5, 0], [slots - 1, 8], [slots, 1], [-1, 1], [0, 9], [0, -1],
                           [0x7FC00000, 0x7FC00000], [64, 1]], np.int32)
    good = {0: (0, 62, 4), 3: (6 * 64, 63, 8), 9: (64, 0, 1)}
    expected = np.full((len(offset_len), window), -1, np.int32)
    for row, (base, start, length) in good.items():
        for i in range(length):
            expected[row, i] = base + (start + i) % ring_tokens
    out = sheet.room(len(expected), 4 * window, 4)
    array = given(sheet, where, offset_len)
    sheet.write()
    report = run_one(session, Step().swa_index_decode(ring, array, window, out))
    sheet.expect(out, expected)
    sheet.check()
    check_index_report(report, where, 5, 0, expected.nbytes)


# ---- expand_swa_index

@pytest.mark.parametrize("where", SOURCES)
def test_expand_swa_index_golden(session, sheet, where):
    case = golden.load("expand_swa_index")
    expected = case.arrays["out"]
    out = sheet.room(len(expected), 4 * expected.shape[1], 4)
    pivots = given(sheet, where, case.arrays["pivots"])
    sheet.write()
    report = run_one(session, Step().expand_swa_index(pivots, expected.shape[1], out))
    sheet.expect(out, expected)
    sheet.check()
    check_index_report(report, where, 0, 0, expected.nbytes)


@pytest.mark.parametrize("where", SOURCES)
def test_expand_swa_index_hostile(session, sheet, where):
    pivots = np.array([[10, 2, 20, 3], [10, -1, 20, 3], [10, 2, 20, -2**31], [2**31 - 2, 3, 0, 0],
                       [0, 1, 2**31 - 1, 2], [5, 2**31 - 6, 0, 0], [0, 0, 0, 0], [3, 9, 7, 9]], np.int32)
    width = 6
    expected = np.array([[10, 11, 20, 21, 22, -1], [-1] * 6, [-1] * 6, [-1] * 6, [-1] * 6,
                         [5, 6, 7, 8, 9, 10], [-1] * 6, [3, 4, 5, 6, 7, 8]], np.int32)
    out = sheet.room(len(expected), 4 * width, 4)
    array = given(sheet, where, pivots)
    sheet.write()
    report = run_one(session, Step().expand_swa_index(array, width, out))
    sheet.expect(out, expected)
    sheet.check()
    check_index_report(report, where, 4, 0, expected.nbytes)


# ---- kv_index_cat

@pytest.mark.parametrize("as_views", [True, False], ids=["views", "arrays"])
@pytest.mark.parametrize("where", SOURCES)
@pytest.mark.parametrize("name", ["kv_index_cat_0_16", "kv_index_cat_16_0", "kv_index_cat_24_40", "kv_index_cat_640_8"])
def test_kv_index_cat_golden(session, sheet, name, where, as_views):
    case = golden.load(name)
    expected = case.arrays["out"]
    base = int(case.params["total_k_swa_cached"]) + int(case.params["total_k_swa_cur"])
    sides, read = [], 0
    for side in ("left", "right"):
        matrix = case.arrays[side]
        if matrix.shape[1] == 0:
            sides += [None, 0]
        else:
            sides += [sheet.put(matrix) if as_views else given(sheet, where, matrix), matrix.shape[1]]
            read += matrix.nbytes
    out = sheet.room(len(expected), 4 * expected.shape[1], 4)
    sheet.write()
    report = run_one(session, Step().kv_index_cat(*sides, base, out))
    sheet.expect(out, expected)
    sheet.check()
    check_index_report(report, where, 0, read, expected.nbytes)


def test_kv_index_cat_hostile(session, sheet):
    """The left side is copied whatever it holds; on the right what is no index, or none any more behind the base."""
    left = np.array([[-7, 2**31 - 1]] * 2, np.int32)
    right = np.array([[0, -1, -2, 2**31 - 1, 2**31 - 101], [5, -2**31, -1, 2**31 - 100, 1]], np.int32)
    expected = np.array([[-7, 2**31 - 1, 100, -1, -1, -1, 2**31 - 1], [-7, 2**31 - 1, 105, -1, -1, -1, 101]], np.int32)
    views = sheet.put(left), sheet.put(right)
    out = sheet.room(2, 28, 4)
    sheet.write()
    report = run_one(session, Step().kv_index_cat(views[0], 2, views[1], 5, 100, out))
    sheet.expect(out, expected)
    sheet.check()
    check_index_report(report, "view", 4, left.nbytes + right.nbytes, expected.nbytes)


# ---- fused_store

FUSED_CASES = sorted(p.name for p in golden.ROOT.iterdir() if p.name.startswith("fused_"))


def fused_fields(params, cos_sin):
    """Everything is said, the default of rope_offset too: test_rope_offset_default leaves it out."""
    return {"cos_sin": cos_sin, "rope_offset": int(params["rope_offset"]), "neox": params["neox"] == "1",
            "hadamard": params["hadamard"] == "1", "keep_float32": params["round_to_bf16"] == "0"}


def add_fused(step, region, case, sheet, where, cast_back):
    arrays = case.arrays
    return step.fused_store(region, sheet.put(arrays["rows"]), sheet.put(arrays["norm_weight"].reshape(1, -1)),
                            float(case.params["eps"]), given(sheet, where, arrays["positions"]),
                            given(sheet, where, arrays["slots"]), cast_back=cast_back,
                            **fused_fields(case.params, sheet.put(arrays["cos_sin"])))


class FusedPool:
    def __init__(self, daemon, client, session, name, fmt, case, width=0):
        tokens, blocks = int(case.params["block_size"]), int(case.params["num_blocks"])
        self.pool = client.create_pool(name, tokens, blocks, [{"name": "kv", "format": fmt.name, "num_layers": 1,
                                                              "width": width}])
        self.client, self.region = client, pb.RegionRef(pool_id=self.pool.pool_id)
        session.allocate_range(self.pool.pool_id, 0, blocks)
        self.memory = daemon.region_memory(name, "kv")
        self.expected = self.memory.prepare(GOLDEN_CACHE_FILL)

    def check(self):
        assert self.memory.snapshot().tobytes() == self.expected.tobytes()

    def close(self):
        self.memory.close()
        self.client.delete_pool(self.pool.pool_id, force=True)


def check_fused_report(report, case, where):
    kept = int((case.arrays["slots"] >= 0).sum())
    assert (report.rows_stored, report.rows_skipped, report.rows_rejected) == (kept, len(case.arrays["slots"]) - kept, 0)
    assert report.unchecked_arrays == (where == "buffer")
    assert 0 < report.queued_ns <= report.started_ns <= report.finished_ns


@pytest.mark.parametrize("where", SOURCES)
@pytest.mark.parametrize("name", FUSED_CASES)
def test_fused_store_golden(daemon, client, session, sheet, pool_name, name, where):
    case = golden.load(name)
    pool = FusedPool(daemon, client, session, pool_name, case.format, case)
    pool.expected[:len(case.cache)][case.stored] = case.cache[case.stored]
    if not ON_GPU:
        assert pool.expected[:len(case.cache)].tobytes() == case.cache.tobytes()
    back = None
    if not case.format.is_index:
        back = sheet.room(len(case.arrays["slots"]), case.format.row_bytes)
    step = add_fused(Step(), pool.region, case, sheet, where, back)
    sheet.write()
    check_fused_report(run_one(session, step), case, where)
    pool.check()
    if back is not None:
        sheet.expect(back, case.arrays["cast_back"])
    sheet.check()
    pool.close()


@pytest.mark.parametrize("name", FUSED_CASES)
def test_fused_store_before_the_quantizer(daemon, client, session, sheet, pool_name, name):
    """A bf16 region's cast-back is the row that a quantizer would be given."""
    case = golden.load(name)
    width = case.arrays["rows"].shape[1]
    pool = FusedPool(daemon, client, session, pool_name, bf16_of_width(width), case, width)
    back = sheet.room(len(case.arrays["slots"]), 2 * width)
    step = add_fused(Step(), pool.region, case, sheet, "inline", back)
    sheet.write()
    check_fused_report(run_one(session, step), case, "inline")
    sheet.expect(back, case.arrays["transformed"])
    sheet.check()
    pool.close()


@pytest.mark.parametrize("fmt", [V41, INDEX_FP4], ids=lambda f: f.name)
def test_rope_offset_default(daemon, client, session, sheet, rng, pool_name, fmt: Format):
    """Not said: the last dims of a row. And no table at all: no rotation."""
    geometry = Geometry(fmt, 16, 2)
    pool = client.create_pool(pool_name, 16, 2, [{"name": "kv", "format": fmt.name, "num_layers": 1}])
    session.allocate_range(pool.pool_id, 0, 2)
    region, memory = pb.RegionRef(pool_id=pool.pool_id), daemon.region_memory(pool_name, "kv")
    expected = memory.prepare(0x11)
    model = RegionModel(geometry, expected[:geometry.region_bytes])
    rows = random_rows(rng, fmt, 6)
    weight = reference.f32_to_bf16(rng.uniform(0.5, 2, fmt.elements).astype(np.float32))
    table, positions, slots = rope_table(50, 32), rng.integers(0, 50, 6), rng.permutation(32)[:12]
    source, weight_view, table_view = sheet.put(rows), sheet.put(weight.reshape(1, -1)), sheet.put(table)
    sheet.write()
    step = Step()
    step.fused_store(region, source, weight_view, 1e-6, positions, slots[:6], cos_sin=table_view)
    step.fused_store(region, source, weight_view, 1e-6, positions, slots[6:])
    session.run(step)
    rotated = Recipe(weight, table, rope_offset=fmt.elements - 32)
    plain = Recipe(weight, np.zeros((50, 0), np.float32))
    model.store(0, transformed(rotated, rows, positions), slots[:6])
    model.store(0, transformed(plain, rows, positions), slots[6:])
    assert (memory.snapshot() == expected).all()
    sheet.check()
    memory.close()
    client.delete_pool(pool.pool_id, force=True)


def test_positions_in_a_buffer_may_be_wrong(daemon, client, session, sheet, rng, pool_name):
    """The row is skipped and counted, whatever its slot."""
    fmt, geometry = V41, Geometry(V41, 16, 2)
    pool = client.create_pool(pool_name, 16, 2, [{"name": "kv", "format": fmt.name, "num_layers": 1}])
    session.allocate_range(pool.pool_id, 0, 2)
    region, memory = pb.RegionRef(pool_id=pool.pool_id), daemon.region_memory(pool_name, "kv")
    expected = memory.prepare(0x22)
    rows, table = random_rows(rng, fmt, 7), rope_table(50, 64)
    weight = np.full(fmt.elements, 0x3F80, np.uint16)
    positions, slots = [0, 50, -1, 49, 2**31 - 1, 7, -2**31], [3, 4, 5, 6, 7, 9999, 8]
    step = Step().fused_store(region, sheet.put(rows), sheet.put(weight.reshape(1, -1)), 1e-6, sheet.array(positions),
                              sheet.array(slots), cos_sin=sheet.put(table))
    sheet.write()
    report = run_one(session, step)
    assert (report.rows_stored, report.rows_skipped, report.rows_rejected) == (2, 0, 5)
    RegionModel(geometry, expected[:geometry.region_bytes]).store(
        0, transformed(Recipe(weight, table, rope_offset=448), rows[[0, 3]], [0, 49]), [3, 6])
    assert (memory.snapshot() == expected).all()
    memory.close()
    client.delete_pool(pool.pool_id, force=True)


# ---- copy_blocks, zero_blocks

BLOCK_REGIONS = [("kv", "v41", 3, 4), ("index", "index_fp4", 2, 4), ("plain", "bf16", 1, 1)]


@pytest.fixture
def blocks(daemon, client, session, rng, pool_name):
    """A pool of three regions with different formats, ratios and layers, full of random bytes; blocks 0..9 ours."""
    pool = client.create_pool(pool_name, 64, 12, [
        {"name": name, "format": fmt, "num_layers": layers, "compression_ratio": ratio}
        for name, fmt, layers, ratio in BLOCK_REGIONS])
    session.allocate_range(pool.pool_id, 0, 10)
    memories = [daemon.region_memory(pool_name, name) for name, *_ in BLOCK_REGIONS]
    for memory in memories:
        memory.randomize(rng)
        memory.flush()
    yield pool, memories
    for memory in memories:
        memory.close()
    client.delete_pool(pool.pool_id, force=True)


def blocks_of(pool, memories):
    """Of each region what must be there, and its blocks in it: uint8 [layers, blocks, stride]."""
    expected = [memory.snapshot() for memory in memories]
    shaped = [data[:r.region_bytes].reshape(r.spec.num_layers, 12, r.block_stride_bytes)
              for data, r in zip(expected, pool.regions)]
    return expected, shaped


def test_copy_and_zero_blocks(session, blocks):
    pool, memories = blocks
    assert [r.tokens_per_block for r in pool.regions] == [16, 16, 64]
    expected, shaped = blocks_of(pool, memories)
    step = Step().copy_blocks(pool.pool_id, [(0, 5), (0, 6), (3, 9)])
    step.zero_blocks(pool.pool_id, [0, 2]).copy_blocks(pool.pool_id, [(0, 1)]).copy_blocks(pool.pool_id, [])
    reports = session.run(step)
    for region in shaped:
        region[:, 5], region[:, 6], region[:, 9] = region[:, 0].copy(), region[:, 0].copy(), region[:, 3].copy()
        region[:, [0, 2]] = 0
        region[:, 1] = 0
    for memory, data in zip(memories, expected):
        memory.refresh()
        assert (memory.snapshot() == data).all()
    block_bytes = sum(r.spec.num_layers * r.block_stride_bytes for r in pool.regions)
    assert [(r.bytes_read, r.bytes_written) for r in reports] == [
        (3 * block_bytes, 3 * block_bytes), (0, 2 * block_bytes), (block_bytes, block_bytes), (0, 0)]


def test_a_fork_reads_as_its_origin(client, session, sheet, rng, blocks):
    """Rows stored to a block, the block copied: loads and records of the copy are those of the original."""
    pool, _ = blocks
    region = pb.RegionRef(pool_id=pool.pool_id, layer=2)
    rows = random_rows(rng, V41, 16)
    source, out = sheet.put(rows), sheet.room(16, V41.row_bytes)
    sheet.write()
    step = Step().store(region, source, np.arange(16) + 4 * 16).copy_blocks(pool.pool_id, [(4, 7)])
    session.run(step.load(region, [(7, 0, 16, 0)], 16, out))
    sheet.expect(out, reference.cast_back(V41, rows))
    sheet.check()
    records = client.inspect(region, [4 * 16 + 5, 7 * 16 + 5])
    assert records[0].raw == records[1].raw


# ---- placements

def test_placements_are_apart(start_daemon, rng):
    """One block table, two devices: an op runs on the one it names, the other's memory stays as it was."""
    if ON_GPU:
        pytest.skip("one GPU")
    daemon = start_daemon(devices=("host:0", "host:1"))
    client = daemon.client()
    session = client.open_session()
    pool = client.create_pool("two", 64, 4, [{"name": "kv", "format": "v41", "num_layers": 1, "compression_ratio": 4},
                                            {"name": "index", "format": "index_fp4", "num_layers": 1}],
                              placements=("host:0", "host:1"))
    session.allocate_range(pool.pool_id, 0, 4)
    memories = {(name, device): daemon.region_memory("two", name, device)
                for name in ("kv", "index") for device in ("host:0", "host:1")}
    for memory in memories.values():
        memory.randomize(rng)
    before = {key: memory.snapshot() for key, memory in memories.items()}
    rows = random_rows(rng, V41, 4)
    sheets = {device: Sheet(session, rng, device=device) for device in ("host:0", "host:1")}
    for device, sheet in sheets.items():
        source, out = sheet.put(rows), sheet.room(4, V41.row_bytes)
        sheet.write()
        session.run(Step(device).store(pb.RegionRef(pool_id=pool.pool_id), source, np.arange(4))
                    .load(pb.RegionRef(pool_id=pool.pool_id), [(0, 0, 4, 0)], 4, out)
                    .zero_blocks(pool.pool_id, [3 if device == "host:1" else 2]))
        sheet.expect(out, reference.cast_back(V41, rows))
        sheet.check()
        for (name, where), memory in memories.items():
            if where == device:
                region = pool.regions[0 if name == "kv" else 1]
                expected = before[name, where]
                shaped = expected[:region.region_bytes].reshape(4, region.block_stride_bytes)
                shaped[3 if device == "host:1" else 2] = 0
                if name == "kv":
                    RegionModel(Geometry(V41, 16, 4), expected[:region.region_bytes]).store(0, rows, np.arange(4))
            assert (memory.snapshot() == before[name, where]).all()
    for memory in memories.values():
        memory.close()
    client.close()
