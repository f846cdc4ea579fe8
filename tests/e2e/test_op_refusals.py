"""Ops that must be refused, each behind a good op that must not run: by code, op, array, position and value, the value in
the text too; and what says nothing and is done: no rows at all."""
from dataclasses import dataclass
from typing import Callable, Optional

import numpy as np
import pytest

from support.catalogue import INDEX_MXFP8, V41
from support.client import Step
from support.refusal import BLOCKS, FREE_BLOCK, INDEX, KV, OTHERS_BLOCK, TOKENS, Scene
from support.stubs import pb

RING_TOKENS, RINGS, FREE_RING = 32, 3, 2
ROW = V41.row_bytes


class OpScene(Scene):
    """Besides a ring pool - rings 0 and 1 ours, 2 free - and views for every op in our buffer."""

    def __init__(self, daemon):
        super().__init__(daemon)
        regions = [{"name": "swa", "format": "v41", "num_layers": 1}, {"name": "odd", "format": "bf16", "width": 24,
                                                                      "num_layers": 1},
                   {"name": "large", "format": "bf16", "width": 32768, "num_layers": 1}]
        self.ring_pool = self.client.create_pool("op-refusals", RING_TOKENS, RINGS, regions, kind=pb.POOL_RING)
        self.session.allocate_range(self.ring_pool.pool_id, 0, FREE_RING)
        memory = daemon.region_memory("op-refusals", "swa")
        memory.randomize(self.rng)
        self.memories.append(memory)

    def ring(self, index=0):
        return pb.RegionRef(pool_id=self.ring_pool.pool_id, region=index)

    def weight(self, **changes):
        return self.view(1 << 14, 1, ROW, **changes)

    def table(self, **changes):
        return self.view(1 << 15, 32, 256, **changes)

    def topk(self, **changes):
        return self.view(0, 6, 32, **changes)

    def ints(self, rows, columns, **changes):
        return self.view(1 << 16, rows, 4 * columns, **changes)


@pytest.fixture(scope="module")
def scene(daemon):
    made = OpScene(daemon)
    yield made
    made.close()


@dataclass(frozen=True)
class Bad:
    add: Callable  # (scene, step)
    status: str
    array: str
    value: Optional[int] = None  # None: not looked at
    position: int = -1
    says: str = ""


def assemble(out=None, swa=None, chunk=None, compressed=None):
    """Good but for what is changed: S = 4, C = 4, K = 5."""
    def add(s, step):
        parts = {
            "swa": {"region": s.ring(), "segments": [(0, 0, 4, 0)], "total_k": 4, **(swa or {})},
            "chunk": {"source": s.source(), **(chunk(s) if chunk else {})},
            "compressed": {"region": s.region(), "segments": [(0, 0, 5, 0)], "total_k": 5, "keep": False,
                           **(compressed(s) if compressed else {})},
        }
        step.assemble(s.out(**(out or {})), tuple(parts["swa"].values()), parts["chunk"],
                      tuple(parts["compressed"].values()))
    return add


ASSEMBLES = {
    "swa_segment": Bad(assemble(swa={"segments": [(0, 0, 2, 0), (0, 0, 33, 2)]}), "out_of_range", "swa.segments", 33, 6,
                       "swa.segments[1].src_end = 33 > tokens_per_block 32"),
    "swa_free_ring": Bad(assemble(swa={"segments": [(FREE_RING, 0, 2, 0)]}), "not_owner", "swa.segments", FREE_RING, 0),
    "swa_destination": Bad(assemble(swa={"segments": [(0, 0, 2, 3)]}), "out_of_range", "swa.segments", None, 3),
    "swa_more_than_out": Bad(assemble(swa={"total_k": 65}), "out_of_range", "swa.total_k", 65),
    "swa_of_a_paged_pool": Bad(lambda s, t: t.assemble(s.out(), (s.region(), [], 0)), "invalid_argument", "pool"),
    "chunk_more_than_out": Bad(assemble(out={"rows": 7}), "out_of_range", "chunk", 4),
    "chunk_huge": Bad(assemble(chunk=lambda s: {"source": None, "reserved": 2**64 - 1}), "out_of_range", "chunk"),
    "chunk_row_bytes": Bad(assemble(chunk=lambda s: {"source": s.source(row_bytes=ROW - 16)}), "wrong_format",
                           "chunk.source", ROW - 16),
    "chunk_overlaps_out": Bad(assemble(chunk=lambda s: {"source": s.out(rows=4)}), "invalid_argument", "out"),
    "gather_past_the_source": Bad(assemble(chunk=lambda s: {"gather": [0, -1, 4, 1]}), "out_of_range", "chunk.gather",
                                  4, 2),
    "gather_below_minus_one": Bad(assemble(chunk=lambda s: {"gather": [0, -1, 3, -2]}), "out_of_range", "chunk.gather",
                                  -2, 3),
    "gather_of_reserved": Bad(assemble(chunk=lambda s: {"source": None, "reserved": 2, "gather": [0, 1]}),
                              "invalid_argument", "chunk.gather"),
    "slots_of_reserved": Bad(assemble(chunk=lambda s: {"source": None, "reserved": 2, "store_slots": [0, 1]}),
                             "invalid_argument", "chunk.store_slots"),
    "cast_back_of_reserved": Bad(assemble(chunk=lambda s: {"source": None, "reserved": 2, "cast_back": True}),
                                 "invalid_argument", "chunk.cast_back"),
    "too_few_slots": Bad(assemble(chunk=lambda s: {"store_slots": [8, 9, 10]}), "invalid_argument", "chunk.store_slots",
                         3),
    "slot_of_a_zero_row": Bad(assemble(chunk=lambda s: {"gather": [0, -1], "store_slots": [8, 9]}), "invalid_argument",
                              "chunk.store_slots", 9, 1),
    "slot_twice": Bad(assemble(chunk=lambda s: {"store_slots": [8, 9, -1, 8]}), "invalid_argument", "chunk.store_slots",
                      8, 3),
    "slot_past_the_pool": Bad(assemble(chunk=lambda s: {"store_slots": [8, RINGS * RING_TOKENS, -1, -1]}),
                              "out_of_range", "chunk.store_slots", RINGS * RING_TOKENS, 1),
    "slot_of_a_free_ring": Bad(assemble(chunk=lambda s: {"store_slots": [-1, FREE_RING * RING_TOKENS, -1, -1]}),
                               "not_owner", "chunk.store_slots", FREE_RING * RING_TOKENS, 1),
    "slots_without_a_ring": Bad(lambda s, t: t.assemble(s.out(), None, {"source": s.source(), "store_slots": [8] * 4}),
                                "invalid_argument", "chunk.region"),
    "chunk_of_a_paged_pool": Bad(
        lambda s, t: t.assemble(s.out(), None, {"source": s.source(), "cast_back": True, "region": s.region()}),
        "invalid_argument", "pool"),
    "another_ring_for_the_chunk": Bad(assemble(chunk=lambda s: {"region": s.ring(1)}), "invalid_argument",
                                      "chunk.region", 1),
    "compressed_segment": Bad(assemble(compressed=lambda s: {"segments": [(0, 0, 2, 0), (0, 0, 17, 2)]}),
                              "out_of_range", "compressed.segments", 17, 6),
    "compressed_of_another": Bad(assemble(compressed=lambda s: {"segments": [(OTHERS_BLOCK, 0, 2, 0)]}), "not_owner",
                                 "compressed.segments", OTHERS_BLOCK, 0),
    "compressed_more_than_out": Bad(assemble(out={"rows": 12}), "out_of_range", "compressed.total_k", 5),
    "compressed_of_an_index": Bad(assemble(compressed=lambda s: {"region": s.region(INDEX)}), "wrong_format",
                                  "compressed.region", INDEX),
    "compressed_unknown_layer": Bad(assemble(compressed=lambda s: {"region": s.region(layer=2)}), "unknown_layer",
                                    "compressed.layer", 2),
    "kept_from_nothing": Bad(assemble(compressed=lambda s: {"keep": True}), "invalid_argument", "keep_compressed"),
    "out_row_bytes": Bad(assemble(out={"row_bytes": ROW - 16}), "wrong_format", "out", ROW - 16),
    "out_stride": Bad(assemble(out={"row_stride_bytes": ROW + 8}), "invalid_argument", "out", ROW + 8),
    "out_past_its_buffer": Bad(assemble(out={"rows": 1 << 20}), "out_of_range", "out"),
    "no_out": Bad(lambda s, t: t.assemble(None, (s.ring(), [], 0)), "invalid_argument", "out"),
}


def fused(positions=(0, 1), slots=(0, 1), eps=1e-6, region=KV, place=None, source=None, weight=None, table=None,
          **fields):
    def add(s, step):
        cos_sin = None if table is False else s.table(**(table or {}))
        step.fused_store(s.region(region) if place is None else place(s), s.source(**(source or {})),
                         s.weight(**(weight or {})), eps, list(positions), list(slots), cos_sin=cos_sin,
                         **{k: v(s) if callable(v) else v for k, v in fields.items()})
    return add


FUSED = {
    "position_past_the_table": Bad(fused(positions=[0, 32]), "out_of_range", "positions", 32, 1),
    "position_negative": Bad(fused(positions=[-1, 3]), "out_of_range", "positions", -1, 0),
    "position_of_a_skipped_row": Bad(fused(positions=[32, 3], slots=[-1, 1], cast_back=lambda s: s.out(rows=2)),
                                     "out_of_range", "positions", 32, 0),
    "positions_and_slots": Bad(fused(positions=[0, 1, 2]), "invalid_argument", "positions", 3),
    "more_slots_than_rows": Bad(fused(positions=[0] * 5, slots=range(5)), "out_of_range", "slots", 5, 4),
    "slot_past_the_region": Bad(fused(slots=[3, TOKENS * BLOCKS]), "out_of_range", "slots", TOKENS * BLOCKS, 1),
    "slot_twice": Bad(fused(slots=[3, 3]), "invalid_argument", "slots", 3, 1),
    "slot_of_another": Bad(fused(slots=[OTHERS_BLOCK * TOKENS, 1]), "not_owner", "slots", OTHERS_BLOCK * TOKENS, 0),
    "eps_zero": Bad(fused(eps=0.0), "invalid_argument", "eps", 0),
    "eps_negative": Bad(fused(eps=-1e-6), "invalid_argument", "eps"),
    "eps_nan": Bad(fused(eps=float("nan")), "invalid_argument", "eps"),
    "eps_infinite": Bad(fused(eps=float("inf")), "invalid_argument", "eps", 0x7F800000),
    "eps_too_small_for_float32": Bad(fused(eps=1e-60), "invalid_argument", "eps", 0),
    "elements_no_power_of_two": Bad(fused(place=lambda s: s.ring(1)), "wrong_format", "region", 24),
    "elements_too_many": Bad(fused(place=lambda s: s.ring(2)), "wrong_format", "region", 32768),
    "source_row_bytes": Bad(fused(source={"row_bytes": ROW - 16}), "wrong_format", "source", ROW - 16),
    "weight_row_bytes": Bad(fused(weight={"row_bytes": ROW - 16}), "wrong_format", "norm_weight", ROW - 16),
    "weights": Bad(fused(weight={"rows": 2}), "invalid_argument", "norm_weight", 2),
    "odd_rotary_dims": Bad(fused(table={"row_bytes": 252}), "invalid_argument", "cos_sin", 252),
    "rope_offset": Bad(fused(rope_offset=449), "out_of_range", "rope_offset", 449),
    "rope_offset_huge": Bad(fused(rope_offset=2**32 - 1, table=False), "out_of_range", "rope_offset", 2**32 - 1),
    "table_wider_than_rows": Bad(fused(table={"row_bytes": 4096, "row_stride_bytes": 4096, "rows": 2}), "out_of_range",
                                 "rope_offset"),
    "cast_back_of_an_index": Bad(
        fused(region=INDEX, source={"row_bytes": INDEX_MXFP8.row_bytes}, weight={"row_bytes": INDEX_MXFP8.row_bytes},
              cast_back=lambda s: s.out(rows=2, row_bytes=INDEX_MXFP8.row_bytes)), "invalid_argument", "cast_back"),
    "cast_back_too_short": Bad(fused(cast_back=lambda s: s.out(rows=1)), "out_of_range", "slots", 2, 1),
    "cast_back_on_the_source": Bad(fused(cast_back=lambda s: s.source(rows=2)), "invalid_argument", "cast_back"),
    "cast_back_on_the_table": Bad(fused(cast_back=lambda s: s.view(1 << 15, 2, ROW)), "invalid_argument", "cast_back"),
}


def convert(tables=(0, 1, 2, 3), width=2, valid=(1,) * 6, queries=3, out=None, topk=None):
    """2 sequences of 3 queries with 8 entries each."""
    def add(s, step):
        step.convert_kv_index(s.region(), s.topk(**(topk or {})) if not callable(topk) else topk(s), list(tables), width,
                              list(valid), queries, out(s) if out else None)
    return add


INDICES = {
    "convert_width_zero": Bad(convert(width=0, tables=()), "invalid_argument", "table_columns", 0),
    "convert_queries_zero": Bad(convert(queries=0), "invalid_argument", "queries", 0),
    "convert_queries_no_divisor": Bad(convert(queries=4), "invalid_argument", "queries", 4),
    "convert_tables": Bad(convert(tables=(0, 1, 2)), "invalid_argument", "block_tables", 3),
    "convert_valid": Bad(convert(valid=(1,) * 5), "invalid_argument", "valid", 5),
    "convert_columns_zero": Bad(convert(topk={"row_bytes": 0, "row_stride_bytes": 16}), "*", "topk"),
    "convert_row_bytes": Bad(convert(topk={"row_bytes": 30, "row_stride_bytes": 32}), "wrong_format", "topk", 30),
    "convert_out_row_bytes": Bad(convert(out=lambda s: s.ints(6, 7)), "wrong_format", "out", 28),
    "convert_out_rows": Bad(convert(out=lambda s: s.ints(5, 8)), "out_of_range", "*"),
    "convert_out_overlaps": Bad(convert(out=lambda s: s.view(16, 6, 32)), "invalid_argument", "out"),
    "convert_array_in_place": Bad(lambda s, t: t.convert_kv_index(s.region(), [0] * 48, [0] * 4, 2, [1] * 6, 3), "*", "*"),
    "convert_out_of_no_columns": Bad(
        lambda s, t: t.convert_kv_index(s.region(), [], [0] * 4, 2, [1] * 6, 3, s.view(1 << 16, 6, 2, row_stride_bytes=16)),
        "wrong_format", "out", 2),
    "convert_unknown_region": Bad(
        lambda s, t: t.convert_kv_index(s.region(7), s.topk(), [0] * 4, 2, [1] * 6, 3), "unknown_region", "region", 7),
    "window_zero": Bad(lambda s, t: t.swa_index_decode(s.ring(), [0, 1], 0, s.ints(1, 4)), "invalid_argument", "window",
                       0),
    "window_and_out": Bad(lambda s, t: t.swa_index_decode(s.ring(), [0, 1], 5, s.ints(1, 4)), "wrong_format", "out", 16),
    "window_rows": Bad(lambda s, t: t.swa_index_decode(s.ring(), [0, 1, 0, 1], 4, s.ints(1, 4)), "out_of_range", "*"),
    "window_half_a_pair": Bad(lambda s, t: t.swa_index_decode(s.ring(), [0, 1, 0], 4, s.ints(2, 4)), "invalid_argument",
                              "offset_len"),
    "window_of_a_paged_pool": Bad(lambda s, t: t.swa_index_decode(s.region(), [0, 1], 4, s.ints(1, 4)),
                                  "invalid_argument", "pool"),
    "width_zero": Bad(lambda s, t: t.expand_swa_index([0] * 4, 0, s.ints(1, 4)), "invalid_argument", "width", 0),
    "width_and_out": Bad(lambda s, t: t.expand_swa_index([0] * 4, 3, s.ints(1, 4)), "wrong_format", "out", 16),
    "width_rows": Bad(lambda s, t: t.expand_swa_index([0] * 8, 4, s.ints(1, 4)), "out_of_range", "*"),
    "pivots_cut": Bad(lambda s, t: t.expand_swa_index([0] * 6, 4, s.ints(2, 4)), "invalid_argument", "pivots"),
    "pivots_under_the_output": Bad(
        lambda s, t: t.expand_swa_index(s.buffer.array((1 << 16) + 16, 4), 4, s.ints(2, 4)), "invalid_argument", "out"),
    "cat_no_columns": Bad(lambda s, t: t.kv_index_cat(None, 0, None, 0, 0, s.ints(1, 4)), "invalid_argument", "columns", 0),
    "cat_left_without_columns": Bad(lambda s, t: t.kv_index_cat([1, 2], 0, [1], 1, 0, s.ints(1, 1)), "invalid_argument",
                                    "left"),
    "cat_left_missing": Bad(lambda s, t: t.kv_index_cat(None, 2, [1], 1, 0, s.ints(1, 3)), "invalid_argument", "left"),
    "cat_rows": Bad(lambda s, t: t.kv_index_cat([1, 2, 3, 4], 2, [1, 2, 3], 1, 0, s.ints(3, 3)), "invalid_argument",
                    "right", 3),
    "cat_left_cut": Bad(lambda s, t: t.kv_index_cat([1, 2, 3], 2, [1], 1, 0, s.ints(1, 3)), "invalid_argument", "left", 3),
    "cat_base_negative": Bad(lambda s, t: t.kv_index_cat(None, 0, [1], 1, -7, s.ints(1, 1)), "out_of_range",
                             "right_base", -7),
    "cat_out": Bad(lambda s, t: t.kv_index_cat([1, 2], 2, [1], 1, 0, s.ints(1, 2)), "wrong_format", "out", 8),
    "cat_out_rows": Bad(lambda s, t: t.kv_index_cat([1, 2], 1, [1, 2], 1, 0, s.ints(1, 2)), "out_of_range", "*"),
    "cat_out_overlaps": Bad(lambda s, t: t.kv_index_cat(s.topk(), 8, None, 0, 0, s.view(32, 6, 32)), "invalid_argument",
                            "out"),
}

BLOCK_OPS = {
    "copy_from_another": Bad(lambda s, t: t.copy_blocks(s.pool_id, [(0, 1), (OTHERS_BLOCK, 2)]), "not_owner", "pairs",
                             OTHERS_BLOCK, 2),
    "copy_to_a_free_block": Bad(lambda s, t: t.copy_blocks(s.pool_id, [(0, FREE_BLOCK)]), "not_owner", "pairs",
                                FREE_BLOCK, 1),
    "copy_past_the_pool": Bad(lambda s, t: t.copy_blocks(s.pool_id, [(0, BLOCKS)]), "out_of_range", "pairs", BLOCKS, 1),
    "copy_from_minus_one": Bad(lambda s, t: t.copy_blocks(s.pool_id, [(-1, 0)]), "out_of_range", "pairs", -1, 0),
    "copy_twice_to_one": Bad(lambda s, t: t.copy_blocks(s.pool_id, [(0, 2), (1, 2)]), "invalid_argument", "pairs", 2, 3),
    "copy_a_chain": Bad(lambda s, t: t.copy_blocks(s.pool_id, [(1, 2), (0, 1)]), "invalid_argument", "pairs", 1, 0),
    "copy_half_a_pair": Bad(lambda s, t: t.copy_blocks(s.pool_id, np.array([0, 1, 2])), "invalid_argument", "pairs"),
    "copy_in_a_buffer": Bad(lambda s, t: t.copy_blocks(s.pool_id, s.buffer.array(0, 2)), "invalid_argument", "pairs"),
    "zero_another": Bad(lambda s, t: t.zero_blocks(s.pool_id, [0, OTHERS_BLOCK]), "not_owner", "blocks", OTHERS_BLOCK, 1),
    "zero_past_the_pool": Bad(lambda s, t: t.zero_blocks(s.pool_id, [BLOCKS]), "out_of_range", "blocks", BLOCKS, 0),
    "zero_negative": Bad(lambda s, t: t.zero_blocks(s.pool_id, [0, -1]), "out_of_range", "blocks", -1, 1),
    "zero_twice": Bad(lambda s, t: t.zero_blocks(s.pool_id, [3, 0, 3]), "invalid_argument", "blocks", 3, 2),
    "zero_in_a_buffer": Bad(lambda s, t: t.zero_blocks(s.pool_id, s.buffer.array(0, 2)), "invalid_argument", "blocks"),
    "zero_no_pool": Bad(lambda s, t: t.zero_blocks(0, [0]), "unknown_pool", "pool_id", 0),
}

ALL = {**{f"assemble_{k}": v for k, v in ASSEMBLES.items()}, **{f"fused_{k}": v for k, v in FUSED.items()}, **INDICES,
       **BLOCK_OPS}


@pytest.mark.parametrize("name", ALL)
def test_refused(scene, name):
    bad = ALL[name]
    step = scene.good_op(Step())
    bad.add(scene, step)
    refusal = scene.refused(lambda: scene.queue.run(step))
    assert refusal.op == 1, refusal
    if bad.status != "*":
        assert refusal.status == bad.status, refusal
    if bad.array != "*":
        assert refusal.array == bad.array, refusal
        assert refusal.position == bad.position, refusal
    if bad.value is not None:
        assert refusal.value == bad.value, refusal
        if not name.startswith("fused_eps"):
            assert str(bad.value) in refusal.message, refusal
    assert bad.says in refusal.message


def test_nothing_to_do(scene):
    """No rows, lists, pairs or blocks: every op is done, and has done nothing."""
    before = scene.contents()
    step = Step()
    step.assemble(scene.out()).assemble(scene.out(), (scene.ring(), [], 0), {"reserved": 0}, (scene.region(), [], 0))
    step.assemble(scene.out(), (scene.ring(), [], 0), {"source": scene.source(rows=0), "store_slots": []})
    step.fused_store(scene.region(), scene.source(), scene.weight(), 1e-6, [], [])
    step.convert_kv_index(scene.region(), scene.topk(rows=0), [], 2, [], 3)
    step.swa_index_decode(scene.ring(), [], 4, scene.ints(0, 4)).expand_swa_index([], 4, scene.ints(0, 4))
    step.kv_index_cat([], 2, [], 2, 0, scene.ints(0, 4))
    step.copy_blocks(scene.pool_id, []).zero_blocks(scene.pool_id, [])
    for run in (scene.queue.run, scene.session.run):
        reports = run(step)
        assert len(reports) == 10
        assert all(r.bytes_read == r.bytes_written == r.rows_loaded == r.rows_stored == 0 for r in reports)
    scene.check_unchanged(before)


def test_numbers_of_arrays(scene):
    """Array numbers that the step doesn't have, by the names of their fields."""
    for message, array in [
            (pb.Op(expand_swa_index=pb.ExpandSwaIndexOp(pivots=3, width=4, out=scene.ints(1, 4))), "pivots"),
            (pb.Op(zero_blocks=pb.ZeroBlocksOp(pool_id=scene.pool_id, blocks=3)), "blocks"),
            (pb.Op(kv_index_cat=pb.KvIndexCatOp(right=pb.Matrix(array=3), right_columns=1, out=scene.ints(1, 1))),
             "right"),
            (pb.Op(assemble=pb.AssembleOp(out=scene.out(), swa=pb.AssembleSwa(region=scene.ring(), segments=3))),
             "swa.segments")]:
        step = scene.good_op(Step())
        step.ops.append(message)
        refusal = scene.refused(lambda: scene.queue.run(step))
        assert (refusal.status, refusal.op, refusal.array, refusal.value) == ("out_of_range", 1, array, 3)
        assert f"{array} = array 3, the step has 1 arrays" in refusal.message
