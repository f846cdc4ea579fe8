"""A block that changes namespace is zeroed before anybody gets it: every region, layer and placement of it."""
import os
import signal
import threading
import time

import numpy as np
import pytest

from support.device import ON_GPU
from support.errors import RpcFailure
from support.stubs import pb

REGIONS = [{"name": "kv", "format": "v41", "num_layers": 2, "compression_ratio": 4},
           {"name": "index", "format": "index_fp4", "num_layers": 1}]
BLOCKS = 6

pytestmark = pytest.mark.skipif(ON_GPU, reason="writes the pools' memory by itself")


class Scene:
    """A pool on two devices, whose memory the test fills; sessions of two tenants."""

    def __init__(self, daemon):
        self.daemon, self.client, self.rng = daemon, daemon.client(), np.random.default_rng(51)
        self.pool = self.client.create_pool("shared", 64, BLOCKS, REGIONS, placements=("host:0", "host:1"))
        self.memories = [(daemon.region_memory("shared", region.spec.name, device), region)
                         for region in self.pool.regions for device in ("host:0", "host:1")]
        self.a, self.b = (self.client.open_session(n, namespace=n) for n in ("a", "b"))

    def scribble(self):
        """Non-zero bytes everywhere: what tenants leave behind."""
        for memory, _ in self.memories:
            memory.write(0, self.rng.integers(1, 256, memory.bytes).astype(np.uint8))

    def zeroed(self):
        """The blocks that are zero in every region, layer and placement; none may be so in part."""
        found = []
        for memory, region in self.memories:
            blocks = memory.snapshot()[:region.region_bytes].reshape(
                region.spec.num_layers, BLOCKS, region.block_stride_bytes)
            zero, full = (blocks == 0).all((0, 2)), (blocks != 0).all((0, 2))
            assert (zero | full).all(), "a block is zeroed in part"
            found.append(np.nonzero(zero)[0].tolist())
        assert all(f == found[0] for f in found)
        return found[0]

    def close(self):
        for memory, _ in self.memories:
            memory.close()
        self.client.close()


@pytest.fixture
def scene(start_daemon):
    made = Scene(start_daemon(devices=("host:0", "host:1")))
    yield made
    made.close()


def test_blocks_that_change_namespace_are_zeroed(scene):
    pool_id = scene.pool.pool_id
    scene.scribble()
    blocks = scene.a.allocate(pool_id, 4)
    assert blocks.tolist() == [0, 1, 2, 3] and scene.zeroed() == []
    scene.a.free(pool_id, blocks)
    again = scene.a.allocate(pool_id, 4)
    assert scene.zeroed() == []  # its own
    scene.a.free(pool_id, again[:2])
    got = scene.b.allocate(pool_id, 2)
    assert got.tolist() == [0, 1] and scene.zeroed() == [0, 1]
    assert [s[:2] for s in scene.client.block_states(pool_id)[:4]] == [(pb.BLOCK_LEASED, scene.b.id)] * 2 + [
        (pb.BLOCK_LEASED, scene.a.id)] * 2
    scene.scribble()
    scene.b.free(pool_id, got)
    assert scene.b.allocate_range(pool_id, 0, 1).tolist() == [0] and scene.zeroed() == []
    assert scene.a.allocate_range(pool_id, 1, 1).tolist() == [1] and scene.zeroed() == [1]


def test_a_namespace_outlives_its_sessions(scene):
    pool_id = scene.pool.pool_id
    scene.a.allocate(pool_id, 2)
    scene.b.allocate(pool_id, 2)
    scene.a.close()
    scene.scribble()
    returned = scene.client.open_session("a2", namespace="a")
    assert returned.allocate(pool_id, 2).tolist() == [0, 1] and scene.zeroed() == []
    other = scene.client.open_session("c", namespace="c")
    scene.b.close()
    assert other.allocate(pool_id, 2).tolist() == [2, 3] and scene.zeroed() == [2, 3]


def test_steps_see_zeros_and_their_epoch(scene):
    """The epoch of the answer is that of the blocks: a step with it is taken, one with the epoch before it isn't."""
    pool_id, region = scene.pool.pool_id, pb.RegionRef(pool_id=scene.pool.pool_id)
    scene.a.free(pool_id, scene.a.allocate(pool_id, 1))
    scene.scribble()
    before = scene.b.epoch = scene.a.epoch
    scene.b.allocate(pool_id, 1)
    assert scene.b.epoch == before + 1
    rows, _, _ = scene.b.load_rows(region, [(0, 0, 16, 0)], 16)
    assert not rows.any()
    with pytest.raises(RpcFailure) as caught:
        scene.b.load_rows(region, [(0, 0, 16, 0)], 16, epoch=before)
    assert caught.value.status == "stale_block"


def stopped(daemon, device, stop):
    os.kill(daemon.client().device(device).executor_pid, signal.SIGSTOP if stop else signal.SIGCONT)


class Waiting(threading.Thread):
    """An allocation in a thread of its own."""

    def __init__(self, session, pool_id, count):
        super().__init__(daemon=True)
        self.call, self.blocks, self.error = (session, pool_id, count), None, None
        self.start()

    def run(self):
        session, pool_id, count = self.call
        try:
            self.blocks = session.allocate(pool_id, count)
        except RpcFailure as error:
            self.error = error


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def leased_by_nobody(scene):
    return [s[1] for s in scene.client.block_states(scene.pool.pool_id) if s[0] == pb.BLOCK_LEASED].count(0)


def test_nobody_has_a_block_that_is_being_zeroed(scene):
    """With one executor stopped: the blocks are nobody's, a step on them is refused whatever epoch it claims, they count
    against the quota; then it goes on."""
    pool_id = scene.pool.pool_id
    scene.a.free(pool_id, scene.a.allocate(pool_id, 3))
    tenant = scene.client.open_session("c", namespace="c", blocks_max=3)
    scene.scribble()
    stopped(scene.daemon, "host:1", True)
    waiting = Waiting(tenant, pool_id, 3)
    wait_for(lambda: leased_by_nobody(scene) == 3)
    with pytest.raises(RpcFailure) as caught:
        tenant.load_rows(pb.RegionRef(pool_id=pool_id), [(0, 0, 1, 0)], 1, epoch=2**40 - 1, placement="host:0")
    assert caught.value.status == "not_owner"
    with pytest.raises(RpcFailure) as caught:
        tenant.allocate(pool_id, 1)
    assert caught.value.status == "quota_exceeded" and "has 3 blocks" in caught.value.refusal.message
    with pytest.raises(RpcFailure) as caught:
        scene.client.delete_pool(pool_id, force=True)
    assert caught.value.status == "in_use"
    assert waiting.is_alive()
    stopped(scene.daemon, "host:1", False)
    waiting.join(60)
    assert waiting.blocks.tolist() == [0, 1, 2] and scene.zeroed() == [0, 1, 2]


def test_a_session_that_ends_meanwhile_gets_nothing(scene):
    pool_id = scene.pool.pool_id
    scene.a.free(pool_id, scene.a.allocate(pool_id, 2))
    scene.scribble()
    stopped(scene.daemon, "host:0", True)
    waiting = Waiting(scene.b, pool_id, 2)
    wait_for(lambda: leased_by_nobody(scene) == 2)
    scene.b.close()
    stopped(scene.daemon, "host:0", False)
    waiting.join(60)
    assert waiting.error is not None and waiting.error.status == "unknown_session"
    wait_for(lambda: scene.client.pool(pool_id).free_blocks == BLOCKS)
    assert scene.client.open_session("d", namespace="d").allocate(pool_id, 2).tolist() == [0, 1]


def test_a_call_that_is_given_up_leaks_nothing(scene):
    pool_id = scene.pool.pool_id
    scene.a.free(pool_id, scene.a.allocate(pool_id, 2))
    stopped(scene.daemon, "host:0", True)
    call = scene.client.rpc.AllocateBlocks.future(
        pb.AllocateBlocksRequest(session=scene.b.ref, pool_id=pool_id, count=2))
    wait_for(lambda: leased_by_nobody(scene) == 2)
    call.cancel()
    stopped(scene.daemon, "host:0", False)
    wait_for(lambda: scene.client.pool(pool_id).free_blocks == BLOCKS)
    assert scene.b.allocate(pool_id, BLOCKS).tolist() == list(range(BLOCKS))


def test_an_executor_that_dies_meanwhile(scene):
    """The allocation fails, its blocks are free; the next one, on the successor, zeroes them."""
    pool_id = scene.pool.pool_id
    scene.a.free(pool_id, scene.a.allocate(pool_id, 2))
    scene.scribble()
    stopped(scene.daemon, "host:1", True)
    waiting = Waiting(scene.b, pool_id, 2)
    wait_for(lambda: leased_by_nobody(scene) == 2)
    os.kill(scene.daemon.client().device("host:1").executor_pid, signal.SIGKILL)
    waiting.join(60)
    assert waiting.error is not None and waiting.error.status == "device_lost"
    wait_for(lambda: scene.client.pool(pool_id).free_blocks == BLOCKS)
    assert scene.b.allocate(pool_id, 2).tolist() == [0, 1]
    assert scene.zeroed() == [0, 1]
