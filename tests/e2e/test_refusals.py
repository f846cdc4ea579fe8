"""Steps and inline rows that must be refused: by their code, naming op, array, position and value, with nothing
executed and the daemon serving on."""
from dataclasses import dataclass
from typing import Callable

import numpy as np
import pytest

from support.catalogue import INDEX_MXFP8, V41
from support.client import Buffer, Step
from support.daemon import Daemon
from support.device import ON_GPU
from support.errors import RpcFailure, StepFailure
from support.refusal import BLOCKS, BUFFER_BYTES, FREE_BLOCK, INDEX, KV, OTHERS_BLOCK, TOKENS, Expect, Scene
from support.stubs import pb
from support.traffic import random_rows


@pytest.fixture(scope="module")
def scene(daemon):
    made = Scene(daemon)
    yield made
    made.close()


# -- slots and segments: steps on a stream, steps as calls, inline rows

INT32_MAX, INT32_MIN = 2**31 - 1, -2**31

STORES = {
    "slot_past_the_region": ([3, TOKENS * BLOCKS, 4], Expect("out_of_range", "slots", 1, TOKENS * BLOCKS)),
    "slot_int32_max": ([3, 4, INT32_MAX], Expect("out_of_range", "slots", 2, INT32_MAX)),
    "slot_below_minus_one": ([-1, -2, 4], Expect("out_of_range", "slots", 1, -2)),
    "slot_int32_min": ([INT32_MIN, 4], Expect("out_of_range", "slots", 0, INT32_MIN)),
    "slot_nan_bits": ([0x7FC00000], Expect("out_of_range", "slots", 0, 0x7FC00000)),
    "slot_twice": ([9, 3, -1, 9], Expect("invalid_argument", "slots", 3, 9)),
    "slot_of_another_session": ([1, OTHERS_BLOCK * TOKENS + 2], Expect("not_owner", "slots", 1,
                                                                       OTHERS_BLOCK * TOKENS + 2)),
    "slot_of_a_free_block": ([FREE_BLOCK * TOKENS, 1], Expect("not_owner", "slots", 0, FREE_BLOCK * TOKENS)),
}

# Positions count int32 elements: 4 * segment + column. Texts name segment and column.
COLUMNS = ("src_block", "src_begin", "src_end", "dst_offset")
LOADS = {
    "end_past_its_block": ([(0, 0, 4, 0), (1, 0, 17, 8)], 32, Expect("out_of_range", "segments", 6, 17)),
    "end_int32_max": ([(0, 0, INT32_MAX, 0)], 32, Expect("out_of_range", "segments", 2, INT32_MAX)),
    "begin_negative": ([(0, -1, 4, 0)], 32, Expect("out_of_range", "segments", 1, -1)),
    "begin_after_end": ([(0, 0, 2, 0), (0, 5, 4, 8)], 32, Expect("out_of_range", "segments", 6, 4)),
    "zero_fill_past_a_block": ([(-1, 0, 17, 0)], 32, Expect("out_of_range", "segments", 2, 17)),
    "block_below_minus_one": ([(0, 0, 4, 0), (-2, 0, 4, 4)], 32, Expect("out_of_range", "segments", 4, -2)),
    "block_past_the_pool": ([(BLOCKS, 0, 4, 0)], 32, Expect("out_of_range", "segments", 0, BLOCKS)),
    "block_int32_max": ([(INT32_MAX, 0, 4, 0)], 32, Expect("out_of_range", "segments", 0, INT32_MAX)),
    "block_of_another_session": ([(0, 0, 4, 0), (OTHERS_BLOCK, 0, 4, 4)], 32,
                                 Expect("not_owner", "segments", 4, OTHERS_BLOCK)),
    "block_that_is_free": ([(FREE_BLOCK, 0, 4, 0)], 32, Expect("not_owner", "segments", 0, FREE_BLOCK)),
    "destination_negative": ([(0, 0, 4, -1)], 32, Expect("out_of_range", "segments", 3, -1)),
    "destination_past_total_k": ([(0, 0, 4, 0), (0, 0, 4, 29)], 32, Expect("out_of_range", "segments", 7)),
    "destination_overflows": ([(0, 0, 16, INT32_MAX)], 32, Expect("out_of_range", "segments", 3)),
    "destinations_overlap": ([(0, 0, 8, 4), (1, 0, 8, 20), (2, 0, 8, 11)], 32,
                             Expect("invalid_argument", "segments", 11, 11)),
    "destination_twice": ([(0, 0, 8, 4), (-1, 0, 8, 4)], 32, Expect("invalid_argument", "segments", 7, 4)),
}


def store_call(scene, door, slots):
    if door == "rows":
        rows = random_rows(scene.rng, V41, len(slots))
        return 0, lambda: scene.session.store_rows(scene.region(), rows, slots)
    step = scene.good_op(Step()).store(scene.region(), scene.source(), slots)
    return 1, lambda: (scene.queue if door == "queue" else scene.session).run(step)


def load_call(scene, door, segments, total_k):
    if door == "rows":
        return 0, lambda: scene.session.load_rows(scene.region(), segments, total_k)
    step = scene.good_op(Step()).load(scene.region(), segments, total_k, scene.out())
    return 1, lambda: (scene.queue if door == "queue" else scene.session).run(step)


@pytest.mark.parametrize("door", ["queue", "call", "rows"])
@pytest.mark.parametrize("name", STORES)
def test_bad_slots(scene, door, name):
    slots, expect = STORES[name]
    op, call = store_call(scene, door, slots)
    expect.check(scene.refused(call), op)


@pytest.mark.parametrize("door", ["queue", "call", "rows"])
@pytest.mark.parametrize("name", LOADS)
def test_bad_segments(scene, door, name):
    segments, total_k, expect = LOADS[name]
    op, call = load_call(scene, door, segments, total_k)
    refusal = scene.refused(call)
    expect.check(refusal, op)
    assert f"segments[{refusal.position // 4}].{COLUMNS[refusal.position % 4]} = {refusal.value}" in refusal.message


def test_a_text_names_everything(scene):
    """The wording that the contract gives as its example."""
    segments = [(0, 0, 1, i) for i in range(17)] + [(0, 0, 65, 17)]
    step = scene.good_op(Step()).load(scene.region(), segments, 64, scene.out())
    refusal = scene.refused(lambda: scene.session.run(step))
    assert "op 1 load: segments[17].src_end = 65 > tokens_per_block 16" in refusal.message


# -- everything else that a step can get wrong

@dataclass(frozen=True)
class BadOp:
    add: Callable  # (scene, step)
    expect: Expect


def store(**views):
    """A store whose parts come from functions of the scene."""
    def add(scene, step):
        parts = {"region": scene.region(), "source": scene.source(), "slots": [4, 5], "cast_back": None}
        parts.update({key: value(scene) for key, value in views.items()})
        step.store(**parts)
    return add


def load(**views):
    def add(scene, step):
        parts = {"region": scene.region(), "segments": [(0, 0, 4, 0)], "total_k": 8, "out": scene.out(),
                 "out_scales": None}
        parts.update({key: value(scene) for key, value in views.items()})
        step.load(**parts)
    return add


def index_load(**views):
    return load(**{"region": lambda s: s.region(INDEX), "out": lambda s: s.index_out(),
                   "out_scales": lambda s: s.index_scales(), **views})


def index_store(**views):
    return store(**{"region": lambda s: s.region(INDEX),
                    "source": lambda s: s.view(0, 4, INDEX_MXFP8.row_bytes), **views})


def raw_array(data):
    return lambda scene: pb.Array(inline=data)


def unset_op(_, step):
    step.ops.append(pb.Op())


def raw_op(_, step):
    """An op of a kind that this protocol doesn't have: field 15."""
    step.ops.append(pb.Op.FromString(b"\x7a\x00"))


def array_index(op):
    def add(scene, step):
        if op == "store":
            step.store(scene.region(), scene.source(), 9)
        else:
            step.load(scene.region(), 9, 8, scene.out())
    return add


BIG = 1 << 62

BAD_OPS = {
    "unknown_pool": BadOp(store(region=lambda s: pb.RegionRef(pool_id=999999)),
                          Expect("unknown_pool", "pool_id", value=999999)),
    "unknown_region": BadOp(store(region=lambda s: s.region(7)), Expect("unknown_region", "region", value=7)),
    "unknown_region_load": BadOp(load(region=lambda s: s.region(2)), Expect("unknown_region", "region", value=2)),
    "unknown_layer": BadOp(store(region=lambda s: s.region(KV, 2)), Expect("unknown_layer", "layer", value=2)),
    "unknown_layer_load": BadOp(index_load(region=lambda s: s.region(INDEX, 1)),
                                Expect("unknown_layer", "layer", value=1)),
    "layer_uint32_max": BadOp(store(region=lambda s: s.region(KV, 2**32 - 1)),
                              Expect("unknown_layer", "layer", value=2**32 - 1)),
    "no_region": BadOp(store(region=lambda s: None), Expect("invalid_argument", "region")),
    "unknown_buffer": BadOp(store(source=lambda s: s.source(buffer_id=424242)),
                            Expect("unknown_buffer", "source", value=424242)),
    "unknown_buffer_out": BadOp(load(out=lambda s: s.out(buffer_id=424242)),
                                Expect("unknown_buffer", "out", value=424242)),
    "another_sessions_buffer": BadOp(load(out=lambda s: s.out(buffer_id=s.others_buffer.id)),
                                     Expect("unknown_buffer", "out")),
    "another_sessions_array": BadOp(store(slots=lambda s: s.others_buffer.array(0, 2)),
                                    Expect("unknown_buffer", "slots")),
    "released_buffer": BadOp(store(source=lambda s: s.source(buffer_id=s.released.id)),
                             Expect("unknown_buffer", "source")),
    "source_width": BadOp(store(source=lambda s: s.source(row_bytes=512, row_stride_bytes=1024)),
                          Expect("wrong_format", "source", value=512)),
    "index_width_to_main": BadOp(store(source=lambda s: s.view(0, 4, INDEX_MXFP8.row_bytes)),
                                 Expect("wrong_format", "source", value=256)),
    "cast_back_width": BadOp(store(cast_back=lambda s: s.out(row_bytes=528, row_stride_bytes=1024)),
                             Expect("wrong_format", "cast_back", value=528)),
    "out_width": BadOp(load(out=lambda s: s.out(row_bytes=528, row_stride_bytes=1024)),
                       Expect("wrong_format", "out", value=528)),
    "scales_width": BadOp(index_load(out_scales=lambda s: s.index_scales(row_bytes=16)),
                          Expect("wrong_format", "out_scales", value=16)),
    "no_scales": BadOp(index_load(out_scales=lambda s: None), Expect("invalid_argument", "out_scales")),
    "scales_of_a_main_cache": BadOp(load(out_scales=lambda s: s.index_scales()),
                                    Expect("invalid_argument", "out_scales")),
    "cast_back_of_an_index": BadOp(index_store(cast_back=lambda s: s.view(1 << 16, 4, 256)),
                                   Expect("invalid_argument", "cast_back")),
    "no_source": BadOp(store(source=lambda s: None), Expect("invalid_argument", "source")),
    "no_out": BadOp(load(out=lambda s: None), Expect("invalid_argument", "out")),
    "more_slots_than_rows": BadOp(store(slots=lambda s: [1, 2, 3, 4, 5]), Expect("out_of_range", "slots", 4, 5)),
    "cast_back_too_short": BadOp(store(cast_back=lambda s: s.out(rows=1)), Expect("out_of_range", "slots", 1, 2)),
    "total_k_past_the_view": BadOp(load(total_k=lambda s: 65), Expect("out_of_range", "total_k", value=65)),
    "total_k_past_the_scales": BadOp(index_load(total_k=lambda s: 60, out_scales=lambda s: s.index_scales(rows=59)),
                                     Expect("out_of_range", "total_k", value=60)),
    "total_k_huge": BadOp(load(total_k=lambda s: 2**64 - 1), Expect("out_of_range", "total_k")),
    "offset_unaligned": BadOp(store(source=lambda s: s.source(offset_bytes=8)),
                              Expect("invalid_argument", "source", value=8)),
    "out_offset_unaligned": BadOp(load(out=lambda s: s.out(offset_bytes=65538)),
                                  Expect("invalid_argument", "out", value=65538)),
    "stride_unaligned": BadOp(store(source=lambda s: s.source(row_stride_bytes=1032)),
                              Expect("invalid_argument", "source", value=1032)),
    "scales_stride_unaligned": BadOp(index_load(out_scales=lambda s: s.index_scales(row_stride_bytes=6)),
                                     Expect("invalid_argument", "out_scales", value=6)),
    "scales_offset_unaligned": BadOp(index_load(out_scales=lambda s: s.index_scales(offset_bytes=(1 << 17) + 4)),
                                     Expect("invalid_argument", "out_scales", value=(1 << 17) + 4)),
    "stride_below_a_row": BadOp(load(out=lambda s: s.out(row_stride_bytes=1008)),
                                Expect("invalid_argument", "out", value=1008)),
    "stride_zero": BadOp(store(source=lambda s: s.source(row_stride_bytes=0)),
                         Expect("invalid_argument", "source", value=0)),
    "view_past_its_buffer": BadOp(store(source=lambda s: s.source(offset_bytes=BUFFER_BYTES - 3 * 1024)),
                                  Expect("out_of_range", "source")),
    "offset_past_its_buffer": BadOp(store(source=lambda s: s.source(offset_bytes=2 * BUFFER_BYTES)),
                                    Expect("out_of_range", "source")),
    "offset_overflows": BadOp(load(out=lambda s: s.out(offset_bytes=2**64 - 1024)), Expect("out_of_range", "out")),
    "rows_overflow": BadOp(store(source=lambda s: s.source(rows=BIG)), Expect("out_of_range", "source")),
    "stride_overflows": BadOp(load(out=lambda s: s.out(row_stride_bytes=BIG)), Expect("out_of_range", "out")),
    "scales_overlap_rows": BadOp(index_load(out_scales=lambda s: s.index_scales(offset_bytes=(1 << 16) + 128 * 63)),
                                 Expect("invalid_argument", "out_scales")),
    "cast_back_overlaps_source": BadOp(store(cast_back=lambda s: s.source(offset_bytes=1024)),
                                       Expect("invalid_argument", "cast_back")),
    "cast_back_is_source": BadOp(store(cast_back=lambda s: s.source()), Expect("invalid_argument", "cast_back")),
    "array_index_past_the_arrays": BadOp(array_index("store"), Expect("out_of_range", "slots", value=9)),
    "segments_index_past_the_arrays": BadOp(array_index("load"), Expect("out_of_range", "segments", value=9)),
    "slots_not_int32": BadOp(store(slots=raw_array(b"\x01\x00\x00\x00\x02\x00\x00")),
                             Expect("invalid_argument", "arrays", 1, 7)),
    "segments_not_quadruples": BadOp(load(segments=raw_array(b"\x00" * 20)),
                                     Expect("invalid_argument", "segments", value=20)),
    "array_not_set": BadOp(store(slots=lambda s: pb.Array()), Expect("invalid_argument", "arrays", 1)),
    "array_past_its_buffer": BadOp(store(slots=lambda s: s.buffer.array(BUFFER_BYTES - 4, 2)),
                                   Expect("out_of_range", "slots")),
    "array_count_overflows": BadOp(store(slots=lambda s: s.buffer.array(0, BIG)),
                                   Expect("out_of_range", "arrays", 1, BIG)),
    "op_not_set": BadOp(unset_op, Expect("invalid_argument", "ops", 1)),
    "op_unknown": BadOp(raw_op, Expect("invalid_argument", "ops", 1)),
}
# An array belongs to the step, not to an op.
OF_AN_ARRAY = {"array_not_set", "slots_not_int32", "array_count_overflows"}


@pytest.mark.parametrize("door", ["queue", "call"])
@pytest.mark.parametrize("name", BAD_OPS)
def test_bad_ops(scene, door, name):
    bad, step = BAD_OPS[name], scene.good_op(Step())
    bad.add(scene, step)
    refusal = scene.refused(lambda: (scene.queue if door == "queue" else scene.session).run(step))
    bad.expect.check(refusal, None if name in OF_AN_ARRAY else 1)


@pytest.mark.parametrize("door", ["queue", "call"])
@pytest.mark.parametrize("placement", ["host:9", "cuda:9" if ON_GPU else "cuda:0", "nonsense"])
def test_unknown_placement(scene, door, placement):
    step = scene.good_op(Step(placement))
    refusal = scene.refused(lambda: (scene.queue if door == "queue" else scene.session).run(step))
    assert refusal.status == "wrong_device" and placement in refusal.message


@pytest.mark.parametrize("door", ["queue", "call"])
def test_too_many_ops_and_arrays(scene, door):
    limits = scene.client.info().limits
    run = (scene.queue if door == "queue" else scene.session).run
    step = Step()
    slots = step.array([0])
    for _ in range(limits.ops_per_step_max + 1):
        step.store(scene.region(), scene.source(), slots)
    assert scene.refused(lambda: run(step)).status == "too_large"
    step = scene.good_op(Step())
    for _ in range(limits.arrays_per_step_max):
        step.array([0])
    assert scene.refused(lambda: run(step)).status == "too_large"


# -- inline rows of their own

@pytest.mark.parametrize("region, expect", [
    (pb.RegionRef(pool_id=999999), Expect("unknown_pool", value=999999)),
    ("region", Expect("unknown_region", "region", value=5)), ("layer", Expect("unknown_layer", "layer", value=2))])
def test_inline_rows_of_something_unknown(scene, region, expect):
    if isinstance(region, str):
        region = {"region": scene.region(5), "layer": scene.region(KV, 2)}[region]
    rows = random_rows(scene.rng, V41, 2)
    for call in (lambda: scene.session.store_rows(region, rows, [1, 2]),
                 lambda: scene.session.load_rows(region, [(0, 0, 1, 0)], 1)):
        refusal = scene.refused(call)
        expect.check(refusal, refusal.op)


def test_inline_rows_of_a_wrong_width(scene):
    rows = np.zeros((2, 256), np.uint8)
    refusal = scene.refused(lambda: scene.session.store_rows(scene.region(), rows, [1, 2]))
    assert (refusal.status, refusal.value) == ("wrong_format", 256)


def test_inline_rows_too_few(scene):
    rows = random_rows(scene.rng, V41, 2)
    refusal = scene.refused(lambda: scene.session.store_rows(scene.region(), rows, [1, 2, 3]))
    assert refusal.status in ("invalid_argument", "out_of_range")


def test_inline_rows_cut_in_a_row(scene):
    rows = random_rows(scene.rng, V41, 2).reshape(-1)[:-1]
    refusal = scene.refused(lambda: scene.session.store_rows(scene.region(), rows, [1, 2], row_bytes=1024))
    assert refusal.status in ("invalid_argument", "out_of_range")


def test_inline_load_without_end(scene):
    refusal = scene.refused(lambda: scene.session.load_rows(scene.region(), [], 2**63))
    assert refusal.status == "too_large"


# -- buffers of another device


PLACES = ["source", "slots", "cast_back"]


@pytest.fixture(scope="module")
def two_devices():
    """A pool on host:1 alone, and buffers by who has them and where."""
    daemon = Daemon(devices=("host:0", "host:1"), threads=1)
    client = daemon.client()
    pool = client.create_pool("second", TOKENS, BLOCKS, [{"name": "kv", "format": "v41", "num_layers": 1}],
                              placements=["host:1"])
    session, other = client.open_session("ours"), client.open_session("other")
    session.allocate(pool.pool_id, BLOCKS)
    buffers = {name: who.create_buffer(BUFFER_BYTES, device) for name, who, device in (
        ("here", session, "host:1"), ("elsewhere", session, "host:0"), ("released", session, "host:0"),
        ("theirs", other, "host:1"), ("theirs elsewhere", other, "host:0"))}
    buffers["released"].release()
    yield session, pb.RegionRef(pool_id=pool.pool_id), buffers
    daemon.stop()


def store_naming(region, buffers, place, name):
    """Two ops, the first good, the second with the named buffer at one place."""
    used = {other: buffers[name if place == other else "here"] for other in PLACES}
    return (Step().store(region, buffers["here"].view(0, 2, V41.row_bytes), [0, 1])
            .store(region, used["source"].view(0, 2, V41.row_bytes),
                   used["slots"].array(1 << 16, 2) if place == "slots" else [2, 3],
                   cast_back=used["cast_back"].view(1 << 17, 2, V41.row_bytes)))


@pytest.mark.parametrize("door", ["queue", "call"])
@pytest.mark.parametrize("place", PLACES)
def test_a_buffer_of_another_device(two_devices, door, place):
    session, region, buffers = two_devices
    run = (session.open_queue() if door == "queue" else session).run
    run(store_naming(region, buffers, None, "here"))
    with pytest.raises((RpcFailure, StepFailure)) as caught:
        run(store_naming(region, buffers, place, "elsewhere"))
    buffer = buffers["elsewhere"].id
    Expect("wrong_device", place, value=buffer).check(caught.value.refusal, 1)
    assert f"op 1: {place}: buffer {buffer} is on host:0, the step runs on host:1" in caught.value.refusal.message


@pytest.mark.parametrize("door", ["queue", "call"])
def test_another_sessions_buffer_is_unknown_wherever_it_is(two_devices, door):
    """The same words, but for the number, as of one that there never was."""
    session, region, buffers = two_devices
    run = (session.open_queue() if door == "queue" else session).run
    told = set()
    for name in ("never", "released", "theirs", "theirs elsewhere"):
        step = store_naming(region, {**buffers, "never": Buffer(session, pb.Buffer(buffer_id=424242))}, "source", name)
        with pytest.raises((RpcFailure, StepFailure)) as caught:
            run(step)
        refusal = caught.value.refusal
        told.add((refusal.status, refusal.array, refusal.message.replace(str(refusal.value), "N")))
    assert len(told) == 1 and told.pop()[:2] == ("unknown_buffer", "source")
