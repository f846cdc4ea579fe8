"""Random stores and loads against the reference, by every door. After each step the whole region and the whole buffer are compared,
so that a byte that nobody asked for shows wherever it falls.

KVPOOL_CASES sets the number of cases, KVPOOL_SEED their seed (printed when one fails).
"""
import os
from dataclasses import dataclass

import numpy as np
import pytest

from support import reference
from support.catalogue import FORMATS, Geometry, bf16_of_width
from support.client import Step
from support.device import ON_GPU
from support.reference import RegionModel
from support.ring_door import RingDoor
from support.stubs import pb

CASES = int(os.environ.get("KVPOOL_CASES", "10000"))
SEED = int(os.environ.get("KVPOOL_SEED", "20260930"))
BLOCKS = {1: 97, 16: 11, 17: 11, 64: 5, 133: 4, 4096: 2}
FORMAT_CHOICES = [*FORMATS.values(), bf16_of_width(72)]
POOLS = [(fmt, size) for fmt in FORMAT_CHOICES for size in BLOCKS]
BUFFER_BYTES = 2 << 20
ROWS_MAX = 160


class Layout:
    """Places views in a buffer, with gaps between them."""

    def __init__(self, rng, buffer):
        self.rng, self.buffer = rng, buffer
        self.end = 16 * int(rng.integers(0, 20))

    def place(self, rows, row_bytes):
        stride = (row_bytes + 15) // 16 * 16 + 16 * int(self.rng.choice([0, 0, 1, 5]))
        offset = self.end
        size = (rows - 1) * stride + row_bytes if rows else 0
        self.end = (offset + size + 15) // 16 * 16 + 16 * int(self.rng.integers(0, 20))
        assert self.end <= self.buffer.bytes
        return Rows(offset, rows, row_bytes, stride)

    def place_scales(self, out, row_bytes):
        """Rows of 4 bytes: side by side, spread out, or in the gaps between the rows of `out`."""
        if out.stride >= out.row_bytes + 16 and self.rng.random() < 0.5:
            self.end += 16  # the last row's lie behind it
            return Rows(out.offset + out.row_bytes, out.rows, row_bytes, out.stride)
        scales = self.place(out.rows, row_bytes)
        return Rows(scales.offset, out.rows, row_bytes, int(self.rng.choice([4, 8, scales.stride])))

    def place_array(self, values):
        offset = self.end
        self.end = (offset + values.nbytes + 15) // 16 * 16 + 16 * int(self.rng.integers(1, 5))
        assert self.end <= self.buffer.bytes
        return offset


@dataclass
class Rows:
    offset: int
    rows: int
    row_bytes: int
    stride: int

    def of(self, memory):
        """A writable [rows, row_bytes] window onto the buffer's bytes."""
        return np.lib.stride_tricks.as_strided(memory[self.offset:], (self.rows, self.row_bytes), (self.stride, 1))

    def view(self, buffer):
        return buffer.view(self.offset, self.rows, self.row_bytes, self.stride)


def random_source(rng, fmt, rows):
    """BF16 rows of every kind: ordinary, tiny, huge, special, any bits at all."""
    shape = (rows, fmt.elements)
    kind = rng.integers(0, 6)
    if kind == 0:
        return rng.integers(0, 1 << 16, shape).astype(np.uint16)  # NaN and Inf in most rows
    scale = np.float32(2.0) ** rng.integers(-30, 30, (rows, 1)).astype(np.float32)
    values = reference.f32_to_bf16(rng.standard_normal(shape, np.float32) * scale)
    if kind == 1:  # ties between codes
        values = reference.f32_to_bf16((rng.integers(-512, 513, shape) / 64).astype(np.float32))
    elif kind == 2:  # zero groups, both signs
        group = fmt.elements_per_scale or 16
        zero = np.repeat(rng.random((rows, (fmt.elements + group - 1) // group)) < 0.5, group, axis=1)
        values = np.where(zero[:, :fmt.elements], values & 0x8000, values)
    elif kind == 3:  # denormals, -0, the smallest and largest numbers, now and then one that is no number
        special = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0,
                            0xFFFF, 0x7F81], np.uint16)
        chosen = rng.random(shape) < 0.02
        values = np.where(chosen, rng.choice(special, shape), values)
    elif kind == 4:  # around and above FP4's largest
        values = reference.f32_to_bf16(rng.uniform(-4000, 4000, shape).astype(np.float32))
    return values.astype(np.uint16)


def random_slots(rng, geometry, count):
    """Distinct slots, some -1."""
    slots = rng.permutation(geometry.num_slots)[:count] if rng.random() < 0.7 else \
        (rng.integers(0, geometry.num_slots) + np.arange(min(count, geometry.num_slots))) % geometry.num_slots
    slots = slots.astype(np.int64)
    slots[rng.random(len(slots)) < rng.choice([0, 0.2, 1], p=[0.5, 0.45, 0.05])] = -1
    return slots


def random_segments(rng, geometry, rows_max):
    """Segments in random order whose destinations don't overlap, and total_k."""
    segments, at = [], 0
    tokens = geometry.tokens_per_block
    for _ in range(int(rng.integers(0, 9))):
        at = min(rows_max, at + int(rng.choice([0, 0, 1, 3])))
        length = int(rng.integers(0, min(tokens, rows_max - at) + 1)) if rng.random() < 0.85 else 0
        begin = int(rng.integers(0, tokens - length + 1))
        block = -1 if rng.random() < 0.2 else int(rng.integers(0, geometry.num_blocks))
        segments.append((block, begin, begin + length, at))
        at += length
    total_k = min(rows_max, at + int(rng.choice([0, 0, 2])))
    rng.shuffle(segments)
    return np.array(segments, np.int64).reshape(-1, 4), total_k


class Bench:
    """One pool, its session, a buffer, and what their bytes should be."""

    def __init__(self, daemon, client, session, fmt, tokens_per_block, rng, name):
        self.rng, self.client, self.session, self.format = rng, client, session, fmt
        self.geometry = Geometry(fmt, tokens_per_block, BLOCKS[tokens_per_block], 1 if tokens_per_block > 1000 else 3)
        spec = {"name": "kv", "format": fmt.name, "num_layers": self.geometry.num_layers, "compression_ratio": 2,
                "width": fmt.elements if fmt.name == "bf16" else 0}
        self.pool = client.create_pool(name, 2 * tokens_per_block, self.geometry.num_blocks, [spec])
        session.allocate_range(self.pool.pool_id, 0, self.geometry.num_blocks)
        self.buffer = session.create_buffer(BUFFER_BYTES)
        self.region_memory = daemon.region_memory(name, "kv")
        self.buffer_memory = daemon.buffer_memory(self.buffer)
        self.region = self.region_memory.array
        self.bytes = self.buffer_memory.array
        self.queue, self.ring = session.open_queue(), RingDoor(session)
        self.doors = [self.queue, self.ring, session]
        self.fill_region()
        self.expected_region = self.region.copy()
        self.model = RegionModel(self.geometry, self.expected_region[:self.geometry.region_bytes])
        self.expected_bytes = np.empty_like(self.bytes)

    def fill_region(self):
        """Random bytes make every code and scale appear in loads; what lies behind the region is a canary too. On a GPU
        every record is stored once."""
        self.region_memory.randomize(self.rng)
        if not ON_GPU:
            return
        for layer in range(self.geometry.num_layers):
            rows = random_source(self.rng, self.format, self.geometry.num_slots)
            self.session.store_rows(pb.RegionRef(pool_id=self.pool.pool_id, region=0, layer=layer), rows,
                                    np.arange(self.geometry.num_slots))
        self.region_memory.refresh()

    def close(self):
        self.queue.finish()
        self.ring.finish()
        self.buffer.release()
        self.region = self.bytes = None
        self.region_memory.close()
        self.buffer_memory.close()
        self.client.delete_pool(self.pool.pool_id, force=True)

    def run_case(self):
        rng = self.rng
        self.bytes[:] = rng.integers(0, 256)
        self.layout, self.checks = Layout(rng, self.buffer), []
        self.layer = int(rng.integers(0, self.geometry.num_layers))
        self.region_ref = pb.RegionRef(pool_id=self.pool.pool_id, region=0, layer=self.layer)
        if rng.random() < 0.5:  # store and load in one step
            step, later = Step(), []
            self.add_store(step, later)
            self.add_load(step, later)
            self.finish_step(step, later)
        else:
            for add in (self.add_store, self.add_load):
                step, later = Step(), []
                add(step, later)
                self.finish_step(step, later)

    def add_array(self, step, values):
        """Inline or in the buffer. Returns the array's index and whether it lies in the buffer."""
        values = np.asarray(values, np.int32)
        if self.rng.random() < 0.8:
            return step.array(values), False
        offset = self.layout.place_array(values)
        self.bytes[offset:offset + values.nbytes] = values.reshape(-1).view(np.uint8)
        return step.array(self.buffer.array(offset, values.size)), True

    def add_store(self, step, later):
        rng, fmt = self.rng, self.format
        rows = int(rng.choice([0, 1, int(rng.integers(2, 40)), int(rng.integers(2, ROWS_MAX))], p=[.05, .1, .7, .15]))
        slots = random_slots(rng, self.geometry, rows)
        source = self.layout.place(len(slots) + int(rng.choice([0, 0, 1, 9])), fmt.row_bytes)
        values = random_source(rng, fmt, source.rows)
        source.of(self.bytes)[:] = values.view(np.uint8).reshape(source.rows, fmt.row_bytes)
        back = None
        if not fmt.is_index and rng.random() < 0.4:
            back = self.layout.place(len(slots), fmt.row_bytes)
        index, unchecked = self.add_array(step, slots)
        step.store(self.region_ref, source.view(self.buffer), index, back and back.view(self.buffer))

        def apply(report):
            q = self.model.store(self.layer, values, slots)
            if back:
                back.of(self.expected_bytes)[:] = reference.cast_back(fmt, values[:len(slots)])
            kept = slots >= 0
            assert (report.rows_stored, report.rows_skipped, report.rows_rejected) == (kept.sum(), (~kept).sum(), 0)
            # Rows and groups of skipped rows that are only cast back may be counted or not.
            other = slice(None) if back else kept
            assert q.bad_rows[kept].sum() <= report.rows_nonfinite <= q.bad_rows[other].sum()
            assert q.saturated[kept].sum() <= report.groups_saturated <= (q.saturated + q.saturated_bad)[other].sum()
            assert report.unchecked_arrays == unchecked

        later.append(apply)

    def add_load(self, step, later):
        rng, fmt = self.rng, self.format
        segments, total_k = random_segments(rng, self.geometry, ROWS_MAX)
        out = self.layout.place(total_k + int(rng.choice([0, 0, 3])), fmt.loaded_row_bytes)
        scales = self.layout.place_scales(out, fmt.loaded_scale_bytes) if fmt.is_index else None
        index, unchecked = self.add_array(step, segments)
        step.load(self.region_ref, index, total_k, out.view(self.buffer), scales and scales.view(self.buffer))

        def apply(report):
            self.model.load(self.layer, segments, out.of(self.expected_bytes),
                            scales and scales.of(self.expected_bytes))
            lengths = segments[:, 2] - segments[:, 1]
            assert (report.rows_loaded, report.rows_rejected) == (lengths.sum(), 0)
            assert report.unchecked_arrays == unchecked

        later.append(apply)

    def finish_step(self, step, later):
        self.expected_bytes[:] = self.bytes
        self.buffer_memory.flush()
        reports = self.doors[self.rng.choice(3, p=[0.4, 0.4, 0.2])].run(step)
        assert len(reports) == len(later)
        for apply, report in zip(later, reports):
            apply(report)
        self.region_memory.refresh()
        self.buffer_memory.refresh()
        self.compare("region", self.region, self.expected_region)
        self.compare("buffer", self.bytes, self.expected_bytes)

    @staticmethod
    def compare(what, found, expected):
        size = len(found) // 8 * 8
        if not (np.array_equal(found[:size].view(np.uint64), expected[:size].view(np.uint64)) and
                np.array_equal(found[size:], expected[size:])):
            wrong = np.nonzero(found != expected)[0]
            raise AssertionError(f"{what}: {len(wrong)} bytes differ, first at {wrong[0]}: "
                                 f"{found[wrong[:8]].tolist()} instead of {expected[wrong[:8]].tolist()}, "
                                 f"last at {wrong[-1]}")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(POOLS)),
                         ids=[f"{fmt.name}{fmt.elements}_b{size}" for fmt, size in POOLS])
def test_random_cases(daemon, client, session, pool_name, number):
    fmt, size = POOLS[number]
    count = CASES // len(POOLS) + (number < CASES % len(POOLS))
    bench = Bench(daemon, client, session, fmt, size, np.random.default_rng([SEED, number]), pool_name)
    for case in range(count):
        bench.rng = np.random.default_rng([SEED, number, case])
        try:
            bench.run_case()
        except Exception as error:
            raise AssertionError(f"case {case} of {count}, KVPOOL_SEED={SEED}, pool {number}: {error}") from error
    bench.close()
