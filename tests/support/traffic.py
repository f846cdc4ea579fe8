"""Steps to keep a daemon busy with: plain ones whose result is checked, and long ones to be caught in flight."""
import numpy as np

from support import reference
from support.client import Step
from support.device import DEVICE
from support.stubs import pb


def random_rows(rng, fmt, count):
    """Finite BF16 rows: uint16 [count, elements]."""
    return reference.f32_to_bf16(rng.standard_normal((count, fmt.elements), np.float32) * 3)


def slots_of(blocks, tokens_per_block):
    """Every slot of these blocks, in order."""
    return (np.asarray(blocks, np.int64)[:, None] * tokens_per_block + np.arange(tokens_per_block)).reshape(-1)


def whole_block_segments(blocks, tokens_per_block):
    return [(int(block), 0, tokens_per_block, i * tokens_per_block) for i, block in enumerate(blocks)]


class Lane:
    """Blocks of one session in one region, a buffer for rows in and one for rows out; main caches and bf16 only."""

    def __init__(self, session, geometry, pool_id, blocks, layer=0, region=0, device=DEVICE):
        self.session, self.geometry, self.format = session, geometry, geometry.format
        self.pool_id, self.layer = pool_id, layer
        self.region = pb.RegionRef(pool_id=pool_id, region=region, layer=layer)
        self.blocks = np.asarray(blocks)
        self.slots = slots_of(blocks, geometry.tokens_per_block)
        self.count = len(self.slots)
        self.device = device
        self.source = session.create_buffer(self.count * self.format.row_bytes, device)
        self.out = session.create_buffer(self.count * self.format.row_bytes, device)
        self.source_view = self.source.view(0, self.count, self.format.row_bytes)
        self.out_view = self.out.view(0, self.count, self.format.row_bytes)
        self.rows = None

    def write(self, rows):
        """The rows that the next store stores."""
        self.rows = rows
        self.source.write(rows)

    def store_step(self):
        return Step(self.device).store(self.region, self.source_view, self.slots)

    def load_step(self):
        return self.add_load(Step(self.device))

    def store_and_load_step(self):
        return self.add_load(self.store_step())

    def long_step(self, ops):
        """The same store over and over: what is stored doesn't depend on how often it ran."""
        step = Step(self.device)
        slots = step.array(self.slots)
        for _ in range(ops):
            step.store(self.region, self.source_view, slots)
        return step

    def add_load(self, step):
        segments = whole_block_segments(self.blocks, self.geometry.tokens_per_block)
        return step.load(self.region, segments, self.count, self.out_view)

    def expected_records(self, rows=None):
        """(data, scales) of every slot after the store."""
        q = reference.quantize(self.format, self.rows if rows is None else rows)
        return q.data, q.scales

    def check_out(self):
        assert self.out.read().tobytes() == reference.cast_back(self.format, self.rows).tobytes()

    def records_in(self, memory):
        """(data, scales) of every slot, from a region's raw bytes."""
        return reference.RegionModel(self.geometry, memory).records(self.layer, self.slots)

    def check_memory(self, memory):
        for found, expected in zip(self.records_in(memory), self.expected_records()):
            assert found.tobytes() == expected.tobytes()

    def release(self):
        self.source.release()
        self.out.release()
