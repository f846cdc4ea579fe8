"""A pool to ask for wrong things of, and what a refusal of them must say."""
import re
from dataclasses import dataclass
from typing import Optional

import numpy as np
import pytest

from support import reference
from support.catalogue import INDEX_MXFP8, V41
from support.client import Step
from support.errors import GRPC_CODE_OF, RpcFailure, StepFailure
from support.stubs import pb
from support.traffic import random_rows

TOKENS, BLOCKS, OTHERS_BLOCK, FREE_BLOCK = 16, 8, 6, 7
BUFFER_BYTES = 1 << 18
KV, INDEX = 0, 1


class Scene:
    """A pool of 8 blocks with a main and an index region: 0..5 ours, 6 another session's, 7 free."""

    def __init__(self, daemon):
        self.daemon, self.client = daemon, daemon.client()
        self.session, self.other = self.client.open_session("ours"), self.client.open_session("other")
        self.pool = self.client.create_pool("refusals", 4 * TOKENS, BLOCKS, [
            {"name": "kv", "format": "v41", "num_layers": 2, "compression_ratio": 4},
            {"name": "index", "format": "index_mxfp8", "num_layers": 1, "compression_ratio": 4}])
        self.pool_id = self.pool.pool_id
        self.session.allocate_range(self.pool_id, 0, OTHERS_BLOCK)
        self.other.allocate_range(self.pool_id, OTHERS_BLOCK, 1)
        self.session.epoch = self.client.call("ListBlocks", pb.ListBlocksRequest(pool_id=self.pool_id)).epoch
        self.buffer = self.session.create_buffer(BUFFER_BYTES)
        self.others_buffer = self.other.create_buffer(BUFFER_BYTES)
        self.released = self.session.create_buffer(4096)
        self.released.release()
        self.rng = np.random.default_rng(11)
        self.memories = [daemon.region_memory("refusals", "kv"), daemon.region_memory("refusals", "index"),
                         daemon.buffer_memory(self.buffer), daemon.buffer_memory(self.others_buffer)]
        for memory in self.memories:
            memory.randomize(self.rng)
        self.queue = self.session.open_queue()

    def region(self, index=KV, layer=0):
        return pb.RegionRef(pool_id=self.pool_id, region=index, layer=layer)

    def source(self, **changes):
        return self.view(0, 4, V41.row_bytes, **changes)

    def out(self, **changes):
        return self.view(1 << 16, 64, V41.row_bytes, **changes)

    def view(self, offset, count, width, **changes):
        view = self.buffer.view(offset, count, width)
        for field, value in changes.items():
            setattr(view, field, value)
        return view

    def index_out(self, **changes):
        return self.view(1 << 16, 64, INDEX_MXFP8.loaded_row_bytes, **changes)

    def index_scales(self, **changes):
        return self.view(1 << 17, 64, 4, **{"row_stride_bytes": 16, **changes})

    def good_op(self, step):
        return step.store(self.region(), self.source(), [0, 1])

    def contents(self):
        return [memory.snapshot() for memory in self.memories]

    def check_unchanged(self, before):
        for memory, old in zip(self.memories, before):
            assert (memory.snapshot() == old).all()

    def check_serving(self):
        """A correct step still does what it should, on the same stream and as a call."""
        slots = [5 * TOKENS + 3, -1, 2]
        for run in (self.queue.run, self.session.run):
            rows = random_rows(self.rng, V41, 4)
            self.buffer.write(rows)
            step = Step().store(self.region(layer=1), self.source(), slots)
            step.load(self.region(layer=1), [(5, 3, 4, 0), (0, 2, 3, 1)], 2, self.out())
            reports = run(step)
            assert (reports[0].rows_stored, reports[1].rows_loaded) == (2, 2)
            expected = reference.cast_back(V41, rows[[0, 2]])
            assert self.buffer.read(1 << 16, expected.size).tobytes() == expected.tobytes()

    def refused(self, call):
        """The refusal of call(), with memory unchanged by it and the daemon serving afterwards."""
        before = self.contents()
        with pytest.raises((RpcFailure, StepFailure)) as caught:
            call()
        self.check_unchanged(before)
        refusal = caught.value.refusal
        assert refusal is not None, f"no detail came with {caught.value}"
        assert refusal.message and "\n" not in refusal.message
        if refusal.grpc_code is not None:
            assert refusal.grpc_code == GRPC_CODE_OF[refusal.status]
        self.check_serving()
        return refusal

    def close(self):
        for memory in self.memories:
            memory.close()
        self.session.close()
        self.other.close()
        self.client.close()


@dataclass(frozen=True)
class Expect:
    """None: not looked at. array: the name, whatever index or field follows it."""

    status: object
    array: Optional[str] = None
    position: Optional[int] = None
    value: Optional[int] = None

    def check(self, refusal, op):
        statuses = (self.status,) if isinstance(self.status, str) else self.status
        assert refusal.status in statuses, refusal
        assert refusal.op == op, refusal
        if self.array is not None:
            assert re.match(r"[a-z_]*", refusal.array).group() == self.array, refusal
        if self.position is not None:
            assert refusal.position == self.position, refusal
        if self.value is not None:
            assert refusal.value == self.value, refusal
            assert str(self.value) in refusal.message, refusal
