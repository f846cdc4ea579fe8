"""The pieces fit: a model of an engine in plain arrays and the daemon run the same random schedule - sequences that
arrive with and without a prefix, fork, prefill in chunks, decode one and several tokens at a time, finish, and leave
blocks to others - and agree in every index, every assembled row, every page and in attention.

KVPOOL_SEED sets the schedule (printed when one fails), KVPOOL_CASES its size: 125 cases are a batch of each
configuration.
"""
import os
import re
from pathlib import Path

import numpy as np
import pytest

from support import fused, golden, plans, reference
from support.catalogue import BF16, INDEX_FP4, INDEX_FP8_F32, INDEX_MXFP8, V41, V41_FP4
from support.client import Step
from support.engine import Cache, Config
from support.engine_checks import Run
from support.engine_memory import Mismatch
from support.errors import RpcFailure
from support.stubs import pb
from support.traffic import random_rows

SEED = int(os.environ.get("KVPOOL_SEED", "20260930"))
CASES = int(os.environ.get("KVPOOL_CASES", "10000"))
BATCHES = max(8, CASES // 125)
COVERED_FROM_BATCHES = 60  # with fewer, not everything need have happened

CONFIGS = [
    # A window as long as its ring; two caches, a layer without one.
    Config("two_caches", 64, 32, 32, V41, (Cache("main", V41, 4), Cache("far", V41_FP4, 16)), INDEX_FP4,
           ((0, 0), (0, 0), None, (1, 0), (1, 0)), topk=12, new_tokens_max=1),
    # Groups that take turns; several new tokens in a decode step.
    Config("several_tokens", 32, 24, 40, V41, (Cache("main", V41_FP4, 2),), INDEX_MXFP8,
           ((0, 0), (0, 1), (0, 0), (0, 1)), topk=21, new_tokens_max=4),
    # Nothing quantized but the index keys: odd sizes.
    Config("unquantized", 51, 33, 133, BF16, (Cache("main", BF16, 3), Cache("fine", V41, 1)), INDEX_FP8_F32,
           ((0, 0), (1, 0), (0, 0)), topk=7, new_tokens_max=3, tokens_max=600),
]


def recorded(config):
    """What RESULTS.md has of this seed, size and numpy, whose generator made the rows; None: nothing."""
    text = (Path(__file__).parent / "RESULTS.md").read_text()
    made_with, cases = re.search(r"numpy ([\d.]+),\s+([\d,]+) cases", text).groups()
    if (made_with, int(cases.replace(",", ""))) != (np.__version__, CASES):
        return None
    rows = re.search(rf"^\| {config.name} (.*\n(?:\| \|.*\n)*)", text, re.M)[1].splitlines()
    figures = [row.strip("| ").split(" | ")[-5:] for row in rows]
    return next((found for seed, *found in figures if int(seed) == SEED), None)


@pytest.fixture
def make_run(daemon, client, session, pool_name):
    made = []

    def make(config, *seed):
        made.append(Run(daemon, client, session, config, [SEED, *seed], f"{pool_name}-{len(made)}"))
        return made[-1]

    yield make
    for run in made:
        run.close()


# ---- the support's own plans and arithmetic are the golden ones


@pytest.mark.parametrize("name,window,ring", [("plan_swa_w40_r64", 40, 64), ("plan_swa_w64_r64", 64, 64),
                                              ("plan_swa_w64_r96", 64, 96), ("plan_walkthrough_swa", 4096, 4096)])
def test_swa_plans(name, window, ring):
    arrays = golden.load(name).arrays
    assert np.array_equal(plans.swa(arrays["seqs"].tolist(), window, ring), arrays["out"])


@pytest.mark.parametrize("window", [40, 64])
def test_query_plans(window):
    arrays = golden.load(f"plan_swa_pivots_w{window}").arrays
    assert np.array_equal(plans.swa_pivots(arrays["seqs"].tolist(), window), arrays["out"])
    arrays = golden.load(f"plan_swa_decode_w{window}").arrays
    assert np.array_equal(plans.swa_decode(arrays["seqs"].tolist(), window, 64), arrays["out"])


def test_other_plans():
    for ring in (64, 4096):
        arrays = golden.load(f"swa_store_slots_r{ring}").arrays
        assert np.array_equal(plans.swa_slots(arrays["seqs"].tolist(), ring), arrays["out"])
    arrays = golden.load("plan_walkthrough_compressed").arrays
    segments, cu = plans.compressed([(10000, arrays["block_table"])], 4, 16)
    assert np.array_equal(segments, arrays["out"]) and cu == [0, 2500]


@pytest.mark.parametrize("name", sorted(p.name for p in golden.ROOT.glob("fused_*")))
def test_fused_arithmetic(name):
    case = golden.load(name)
    recipe = fused.Recipe(case.arrays["norm_weight"], case.arrays["cos_sin"], float(case.params["eps"]),
                          int(case.params["rope_offset"]), case.params["neox"] == "1", case.params["hadamard"] == "1",
                          case.params["round_to_bf16"] == "1")
    found = fused.transformed(recipe, case.arrays["rows"], case.arrays["positions"])
    assert np.array_equal(found, case.arrays["transformed"])


# ---- the schedule


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_schedule(make_run, config, record_property):
    run = make_run(config, CONFIGS.index(config))
    wanted = {"prefill", "decode", "ring wraps", "finished", "forks", "blocks reused"} | (
        {"decode of several tokens"} if config.new_tokens_max > 1 else set())
    for batch in range(4 * BATCHES):
        is_covered = BATCHES < COVERED_FROM_BATCHES or all(run.counts[what] for what in wanted)
        if batch >= BATCHES and is_covered:
            break
        try:
            run.iterate()
        except Exception as error:
            raise AssertionError(f"batch {batch}, KVPOOL_SEED={SEED}, {config.name}: {error}") from error
    assert is_covered, run.counts
    errors = np.array(run.errors)
    print(f"\n{config.name}: {dict(run.counts)}\n  attention against unquantized rows: relative error "
          f"mean {errors.mean():.4f}, median {np.median(errors):.4f}, largest {errors.max():.4f} of {len(errors)}")
    record_property("attention_error_mean", float(errors.mean()))
    record_property("attention_error_max", float(errors.max()))
    assert np.isfinite(errors).all()
    figures = [str(len(errors)), *(f"{figure:.4f}" for figure in (errors.mean(), np.median(errors), errors.max()))]
    assert recorded(config) in (None, figures)


# ---- faults, one at a time, that the checks must find


def swap_rows(values):
    """The first two rows that go somewhere change places."""
    kept = np.nonzero(values >= 0)[0][:2]
    if len(kept) < 2 or values[kept[0]] == values[kept[1]]:
        return None
    values[kept] = values[kept[::-1]]
    return values


def one_further(column):
    """A number of a row is one more, of a row whose length isn't 0."""
    def change(values):
        rows = np.nonzero(values[:, column + 1] > 0)[0]
        if len(rows) == 0:
            return None
        values[rows[-1], column] += 1
        return values
    return change


def other_entry(values):
    """One token of one list becomes another one."""
    flat = values.reshape(-1)
    entries = np.unique(flat[(flat >= 0) & (flat < 4096)])
    if len(entries) < 2:
        return None
    flat[np.argmax(flat == entries[0])] = entries[1]
    return values


def shift_segment(values):
    """The tokens of a segment begin and end one later or earlier."""
    longer = np.nonzero((values[:, 0] >= 0) & (values[:, 1] > 0))[0]
    if len(longer) == 0:
        return None
    values[longer[0], 1:3] -= 1
    return values


def other_block(values):
    """Segments of two blocks read each other's."""
    full = np.nonzero((values[:, 0] >= 0) & (values[:, 2] == values[:, 2].max()) & (values[:, 1] == 0))[0]
    full = [row for row in full if values[row, 0] != values[full[0], 0]][:1] + list(full[:1])
    if len(full) < 2:
        return None
    values[full, 0] = values[full[::-1], 0]
    return values


def shorter(values):
    """One list has an entry less, where the last one counts."""
    rows = np.nonzero(values > 2)[0]
    if len(rows) == 0:
        return None
    values[rows[0]] -= 2  # a hole may be the last one, two of them can't
    return values


def other_row(values):
    """One row of the gather is another row."""
    if len(values) < 2 or values[1] < 0:
        return None
    values[0] = values[1]
    return values


def roll_columns(values):
    """The blocks of every sequence move on by one."""
    return np.roll(values, 1, axis=1) if values.shape[1] > 1 and values[0, 1] >= 0 else None


FAULTS = {
    "pivot": ("pivots", one_further(2)),
    "pivot of history": ("pivots", one_further(0)),
    "topk": ("topk", other_entry),
    "length of a list": ("valid", shorter),
    "decode window": ("offset_len", one_further(0)),
    "swa segment": ("swa_segments", shift_segment),
    "compressed segment": ("compressed_segments", other_block),
    "ring slot": ("store_slots", swap_rows),
    "paged slot": ("compressed_slots", swap_rows),
    "gather": ("gather", other_row),
    "position": ("positions", swap_rows),
    "block table": ("block_tables", roll_columns),
}


def iterate_until(run, reached, batches_max=200):
    for _ in range(batches_max):
        if reached():
            return
        run.iterate()
    raise AssertionError("the schedule did not come to it")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(make_run, fault):
    """A wrong number in one array of a step, once."""
    run = make_run(CONFIGS[1], 100, list(FAULTS).index(fault))
    iterate_until(run, lambda: run.counts["finished"] > 0)
    run.served.mutation, run.served.one_step = FAULTS[fault], 0
    with pytest.raises(Mismatch):
        iterate_until(run, lambda: run.served.mutation is None)


def double_a_group(run, sequence, layer):
    """The record of the newest token gets another scale, and keeps its codes: a group twice as large is stored."""
    fmt, token = run.config.ring_format, sequence.length - 1
    row = sequence.window_rows(layer, [token], "rows").copy()
    group = slice(0, fmt.elements_per_scale)
    row[:, group] += np.where(row[:, group] & 0x7F80, 0x80, 0).astype(np.uint16)
    old, new = reference.quantize(fmt, sequence.window_rows(layer, [token], "rows")), reference.quantize(fmt, row)
    assert np.array_equal(old.data, new.data) and (old.scales != new.scales).sum() == 1
    slot = run.served.states[sequence.number] * run.config.ring + token % run.config.ring
    run.served.session.store_rows(run.served.ring_ref(layer), row, [slot])


def test_a_scale_is_found(make_run):
    """By the pages, by attention over them, and by the rows of a prefill that reads them."""
    run = make_run(CONFIGS[1], 200)
    iterate_until(run, lambda: any(s.length >= s.prompt for s in run.live))
    sequence = next(s for s in run.live if s.length >= s.prompt)
    run.served.check_pages()
    double_a_group(run, sequence, 2)
    with pytest.raises(Mismatch, match="pages of .*window"):
        run.served.check_pages()
    run.served.check_pages = run.served.refresh_pages
    with pytest.raises(Mismatch, match="layer 2, decode: attention"):
        run.decode([sequence])
    run = make_run(CONFIGS[1], 201)
    iterate_until(run, lambda: any(s.valid_start < s.length < s.prompt for s in run.live))
    sequence = next(s for s in run.live if s.valid_start < s.length < s.prompt)
    double_a_group(run, sequence, 3)
    with pytest.raises(Mismatch, match="layer 3, .*: assembled rows"):
        run.prefill([sequence])


# ---- load before store


RING, CHUNK, LAYERS = 8, 5, 2
NEW = range(RING, RING + CHUNK)


class Window:
    """A ring that tokens 0..7 fill, a chunk of tokens 8..12 that overwrites the oldest five, and a paged cache."""

    def __init__(self, daemon, client, session, name):
        self.session = session
        regions = [{"name": "kv", "format": "v41", "num_layers": LAYERS}]
        self.ring = client.create_pool(f"{name}-ring", RING, 2, regions, pb.POOL_RING)
        self.paged = client.create_pool(f"{name}-paged", RING, 2, regions)
        self.state = int(session.allocate(self.ring.pool_id, 2)[1])
        self.block = int(session.allocate(self.paged.pool_id, 1)[0])
        self.rng = np.random.default_rng(SEED)
        self.old, self.new = random_rows(self.rng, V41, RING), random_rows(self.rng, V41, CHUNK)
        self.recipe = fused.Recipe(reference.f32_to_bf16(np.ones(512, np.float32)), fused.rope_table(16, 64),
                                   rope_offset=448)
        self.buffer = session.create_buffer(1 << 16)
        self.pages = daemon.region_memory(self.ring.spec.name, "kv")
        for layer in range(LAYERS):
            session.store_rows(self.ref(layer), self.old, self.slots(range(RING)))
        data = (self.new, self.recipe.weight, self.recipe.cos_sin)
        offset, self.views = 0, []
        for part in data:
            rows = part.reshape(-1, part.shape[-1])
            self.views.append(self.buffer.view(offset, len(rows), rows.shape[1] * rows.itemsize))
            self.buffer.write(np.ascontiguousarray(rows).view(np.uint8).reshape(-1), offset)
            offset += rows.nbytes
        self.out = self.buffer.view(1 << 14, RING + CHUNK, V41.row_bytes)

    def ref(self, layer=0):
        return pb.RegionRef(pool_id=self.ring.pool_id, layer=layer)

    def slots(self, tokens):
        return [self.state * RING + t % RING for t in tokens]

    def add_store(self, step, tokens, layer=0):
        return step.store(self.ref(layer), self.views[0], self.slots(tokens))

    def add_fused_store(self, step, tokens, layer=0):
        step.fused_store(self.ref(layer), self.views[0], self.views[1], self.recipe.eps, np.array(NEW),
                         self.slots(tokens), cos_sin=self.views[2])

    def add_assemble_store(self, step, tokens, layer=0):
        """The chunk part alone, which stores."""
        step.assemble(self.buffer.view(3 << 14, CHUNK, V41.row_bytes), chunk={
            "region": self.ref(layer), "source": self.views[0], "store_slots": self.slots(tokens)})

    def segments(self):
        """The window of the chunk: tokens 0..7."""
        return plans.swa([(self.state, RING + CHUNK, CHUNK, 0)], RING, RING)

    def add_load(self, step, allow=False):
        step.load(self.ref(), self.segments(), RING, self.out, allow=allow)

    def add_assemble(self, step, allow=False, **chunk):
        step.assemble(self.out, (self.ref(), self.segments(), RING), {"source": self.views[0], **chunk}, allow=allow)

    def loaded(self):
        return self.buffer.read(self.out.offset_bytes, RING * V41.row_bytes).reshape(RING, -1)

    def stored(self):
        """What a load of the ring gives now, slot by slot."""
        segment = [(self.state, 0, RING, 0)]
        return self.session.load_rows(self.ref(), segment, RING)[0].reshape(RING, -1)

    def overwritten(self, rows):
        """The window with the chunk's rows over the oldest ones."""
        expected = reference.cast_back(V41, self.old)
        expected[:CHUNK] = reference.cast_back(V41, rows)
        return expected


@pytest.fixture
def window(daemon, client, session, pool_name):
    made = Window(daemon, client, session, pool_name)
    yield made
    made.pages.close()
    for pool in (made.ring, made.paged):
        client.delete_pool(pool.pool_id, force=True)


STORES = {"store": Window.add_store, "fused_store": Window.add_fused_store, "assemble": Window.add_assemble_store}
LOADS = {"load": Window.add_load, "assemble": Window.add_assemble}


def test_a_chunk_reads_its_window_before_it_overwrites_it(window):
    assert set(window.slots(NEW)) < set(window.slots(range(RING)))
    step = Step()
    window.add_assemble(step, store_slots=window.slots(NEW))
    report = window.session.run(step)[0]
    assert (report.main_kv_offset, report.rows_stored) == (RING + CHUNK, CHUNK)
    assert np.array_equal(window.loaded(), reference.cast_back(V41, window.old))
    chunk = window.buffer.read(window.out.offset_bytes + RING * V41.row_bytes, CHUNK * V41.row_bytes)
    assert chunk.tobytes() == window.new.tobytes()
    assert np.array_equal(window.stored(), window.overwritten(window.new))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("load", LOADS)
def test_a_store_behind_the_load_is_right(window, store, load):
    step = Step()
    LOADS[load](window, step)
    STORES[store](window, step, NEW)
    window.session.run(step)
    assert np.array_equal(window.loaded(), reference.cast_back(V41, window.old))
    rows = fused.transformed(window.recipe, window.new, np.array(NEW)) if store == "fused_store" else window.new
    assert np.array_equal(window.stored(), window.overwritten(rows))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("load", LOADS)
def test_a_store_before_the_load_is_refused_unless_it_is_meant(window, store, load):
    before = window.pages.snapshot()
    step = Step()
    STORES[store](window, step, NEW)
    LOADS[load](window, step)
    with pytest.raises(RpcFailure) as caught:
        window.session.run(step)
    assert (caught.value.status, caught.value.refusal.op) == ("hazard_store_before_load", 1)
    assert np.array_equal(window.pages.snapshot(), before)
    step = Step()
    STORES[store](window, step, NEW)
    LOADS[load](window, step, allow=True)
    window.session.run(step)
    rows = fused.transformed(window.recipe, window.new, np.array(NEW)) if store == "fused_store" else window.new
    assert np.array_equal(window.loaded(), window.overwritten(rows))


@pytest.mark.parametrize("store", STORES)
def test_stores_elsewhere_are_no_hazard(window, store):
    """In another layer of the region; in another ring."""
    for layer, state in ((1, window.state), (0, 1 - window.state)):
        step, own = Step(), window.state
        window.state = state
        STORES[store](window, step, NEW, layer)
        window.state = own
        window.add_load(step)
        window.session.run(step)
        assert np.array_equal(window.loaded(), reference.cast_back(V41, window.old))


def test_compressed_rows_of_a_step_are_loaded_by_it(window):
    """Paged regions are the other way round: what a step stores it loads."""
    region = pb.RegionRef(pool_id=window.paged.pool_id)
    slots = [window.block * RING + i for i in range(CHUNK)]
    window.session.store_rows(region, window.old[:CHUNK], slots)
    step = Step().store(region, window.views[0], slots)
    step.assemble(window.out, compressed=(region, [(window.block, 0, CHUNK, 0)], CHUNK))
    assert window.session.run(step)[1].main_kv_offset == 0
    assert np.array_equal(window.loaded()[:CHUNK], reference.cast_back(V41, window.new))
