"""Sessions and the blocks they lease."""
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (RuleBasedStateMachine, initialize, invariant, precondition, rule,
                                  run_state_machine_as_test)

from support import memory
from support.catalogue import V41, Geometry
from support.client import Step, int32_bytes
from support.errors import RpcFailure, StepFailure
from support.process import wait_until
from support.stubs import pb
from support.traffic import Lane, random_rows

KV = {"name": "kv", "format": "v41", "num_layers": 1}
REGION_TAKEN = ("out_of_blocks", "not_owner", "in_use", "already_exists")


@pytest.fixture
def pool(client, pool_name):
    made = client.create_pool(pool_name, 16, 10, [KV])
    yield made
    client.delete_pool(made.pool_id, force=True)


def refused(call, *statuses):
    with pytest.raises((RpcFailure, StepFailure)) as caught:
        call()
    assert caught.value.refusal is not None and caught.value.refusal.status in statuses, caught.value
    return caught.value.refusal


def states(client, pool):
    return [state for state, _, _ in client.block_states(pool.pool_id)]


def lane_of(session, pool, blocks):
    made = Lane(session, Geometry(V41, 16, pool.spec.num_blocks), pool.pool_id, blocks)
    made.write(random_rows(np.random.default_rng(4), V41, made.count))
    return made


# -- blocks

def test_allocation_is_all_or_nothing(client, session, pool):
    refusal = refused(lambda: session.allocate(pool.pool_id, 11), "out_of_blocks")
    assert "11" in refusal.message and "10" in refusal.message
    assert states(client, pool) == [pb.BLOCK_FREE] * 10
    first = session.allocate(pool.pool_id, 7)
    assert len(set(first)) == 7 and all(0 <= b < 10 for b in first)
    refused(lambda: session.allocate(pool.pool_id, 4), "out_of_blocks")
    assert client.pool(pool.pool_id).free_blocks == 3
    second = session.allocate(pool.pool_id, 3)
    assert sorted([*first, *second]) == list(range(10))
    for state, owner, epoch in client.block_states(pool.pool_id):
        assert (state, owner) == (pb.BLOCK_LEASED, session.id) and 0 < epoch <= session.epoch
    refused(lambda: session.allocate(pool.pool_id, 1), "out_of_blocks")
    described = client.pool(pool.pool_id)
    assert (described.free_blocks, described.leased_blocks, described.quarantined_blocks) == (0, 10, 0)


def test_ranges(client, session, pool):
    assert session.allocate_range(pool.pool_id, 2, 3).tolist() == [2, 3, 4]
    for first, count in ((4, 1), (0, 3), (3, 5), (0, 10)):
        refusal = refused(lambda: session.allocate_range(pool.pool_id, first, count), *REGION_TAKEN)
        assert refusal.value == max(first, 2), "the first block that is taken is not named"
    for first, count in ((8, 3), (10, 1), (2**32 - 1, 2), (0, 11), (1, 2**32 - 1)):
        refused(lambda: session.allocate_range(pool.pool_id, first, count), "out_of_range", "too_large")
    assert states(client, pool) == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert sorted(session.allocate(pool.pool_id, 7)) == [0, 1, 5, 6, 7, 8, 9]


def test_frees(client, session, pool):
    other = client.open_session("other")
    session.allocate_range(pool.pool_id, 0, 4)
    other.allocate_range(pool.pool_id, 4, 2)
    for blocks, position, status in (([0, 1, 0], 2, "invalid_argument"), ([0, 4], 1, "not_owner"),
                                     ([1, 2, 7], 2, "not_owner"), ([0, 10], 1, "out_of_range"),
                                     ([-1], 0, "out_of_range"), ([0, 2**31 - 1], 1, "out_of_range"),
                                     ([0, -2**31], 1, "out_of_range")):
        refusal = refused(lambda: session.free(pool.pool_id, blocks), status)
        assert (refusal.array, refusal.position, refusal.value) == ("blocks", position, blocks[position])
        assert states(client, pool) == [1] * 6 + [0] * 4, "a refused free changed something"
    session.free(pool.pool_id, [1, 3])
    assert states(client, pool) == [1, 0, 1, 0, 1, 1, 0, 0, 0, 0]
    refusal = refused(lambda: session.free(pool.pool_id, [3]), "not_owner")
    assert (refusal.array, refusal.position, refusal.value) == ("blocks", 0, 3)
    session.free(pool.pool_id, [])
    with pytest.raises(RpcFailure) as caught:
        client.call("FreeBlocks", pb.FreeBlocksRequest(session=session.ref, pool_id=pool.pool_id,
                                                       blocks=int32_bytes([0])[:3]))
    assert caught.value.status in ("invalid_argument", "malformed")
    other.close()


def test_epochs_only_grow(client, session, pool):
    seen = [session.epoch]
    for _ in range(5):
        blocks = session.allocate(pool.pool_id, 2)
        assert session.epoch > seen[-1]
        seen.append(session.epoch)
        assert all(client.block_states(pool.pool_id)[b][2] == session.epoch for b in blocks)
        session.free(pool.pool_id, blocks)
        assert session.epoch >= seen[-1]
    assert client.info().epoch >= session.epoch
    assert client.open_session("later").epoch >= session.epoch


def test_the_owner_table_says_the_same(daemon, client, session, pool):
    """Bits 63..24 epoch, 23..16 state, 15..0 owner: read from the memfd that executors read."""
    other = client.open_session("other")
    session.allocate_range(pool.pool_id, 1, 3)
    other.allocate_range(pool.pool_id, 6, 2)
    session.free(pool.pool_id, [2])
    entries = [int(e) for e in memory.owner_table(daemon.pid, pool.spec.name)[:10]]
    told = client.block_states(pool.pool_id)
    owners = {}
    for entry, (state, owner, epoch) in zip(entries, told):
        assert entry >> 16 & 0xFF == state
        if state == pb.BLOCK_FREE:
            assert entry & 0xFFFF == 0 and owner == 0
        else:
            assert entry >> 24 == epoch and entry & 0xFFFF != 0
            owners.setdefault(owner, set()).add(entry & 0xFFFF)
    assert set(owners) == {session.id, other.id}
    assert all(len(slots) == 1 for slots in owners.values()) and owners[session.id] != owners[other.id]
    other.close()


def test_a_freed_block_waits_for_the_steps_before(client, session, pool):
    blocks = session.allocate(pool.pool_id, 10)
    lane, queue = lane_of(session, pool, blocks), session.open_queue()
    step_id = queue.send(lane.long_step(1000))
    queue.wait_accepted(step_id)
    session.free(pool.pool_id, blocks[:4])
    during = client.block_states(pool.pool_id)
    still_running = step_id not in queue.finished
    refusal = refused(lambda: queue.run(lane.load_step()), "not_owner")
    assert refusal.array.startswith("segments") and refusal.value in blocks[:4]
    if still_running:
        for block in blocks[:4]:
            assert during[block][0] == pb.BLOCK_QUARANTINED
        assert client.pool(pool.pool_id).quarantined_blocks in (4, 0)
    queue.wait(step_id)
    wait_until(lambda: states(client, pool).count(pb.BLOCK_FREE) == 4, "the quarantine over")
    assert still_running, "the step was too short to see a quarantine"
    assert sorted(session.allocate(pool.pool_id, 4)) == sorted(blocks[:4])


def test_quarantined_blocks_are_not_given_out(client, session, pool):
    blocks = session.allocate(pool.pool_id, 10)
    lane, queue = lane_of(session, pool, blocks), session.open_queue()
    step_id = queue.send(lane.long_step(1000))
    queue.wait_accepted(step_id)
    session.free(pool.pool_id, blocks)
    try:
        given = session.allocate(pool.pool_id, 1)
    except RpcFailure as failure:
        assert failure.status == "out_of_blocks"
    else:
        assert step_id in queue.finished, f"block {given} was given out while a step might write it"
    queue.wait(step_id)
    wait_until(lambda: pb.BLOCK_QUARANTINED not in states(client, pool), "the quarantine over")


def test_quota(client, pool):
    session = client.open_session("frugal", blocks_max=4)
    second = client.create_pool(pool.spec.name + "b", 16, 10, [KV])
    refusal = refused(lambda: session.allocate(pool.pool_id, 5), "quota_exceeded")
    assert "4" in refusal.message and "5" in refusal.message
    refused(lambda: session.allocate_range(pool.pool_id, 0, 5), "quota_exceeded")
    blocks = session.allocate(pool.pool_id, 3)
    session.allocate(second.pool_id, 1)
    refused(lambda: session.allocate(second.pool_id, 1), "quota_exceeded")
    session.free(pool.pool_id, blocks[:1])
    session.allocate_range(second.pool_id, 8, 1)
    refused(lambda: session.allocate_range(second.pool_id, 2, 1), "quota_exceeded")
    session.close()
    client.delete_pool(second.pool_id)


# -- sessions

def test_the_end_of_a_session_frees_its_blocks(daemon, client, pool):
    for end in ("close", "cancel", "channel"):
        owner = daemon.client() if end == "channel" else client
        session = owner.open_session("short-lived")
        session.allocate(pool.pool_id, 6)
        buffer = session.create_buffer(4096)
        assert client.pool(pool.pool_id).leased_blocks == 6
        if end == "close":
            session.close()
        elif end == "cancel":
            session.stream.cancel()
        else:
            owner.close()
        wait_until(lambda: client.pool(pool.pool_id).free_blocks == 10, f"blocks free after {end}")
        wait_until(lambda: session.id not in [s.session_id for s in client.list_sessions()], f"gone after {end}")
        assert f"kvpool-buffer:{buffer.id}" not in memory.names(daemon.pid)


def test_a_session_that_ends_with_steps_in_flight(client, pool):
    for end in ("close", "cancel"):
        session = client.open_session("busy")
        lane = lane_of(session, pool, session.allocate(pool.pool_id, 10))
        queue = session.open_queue()
        steps = [queue.send(lane.long_step(300)) for _ in range(3)]
        queue.wait_accepted(steps[0])
        if end == "close":
            session.close()
        else:
            session.stream.cancel()
        wait_until(lambda: client.pool(pool.pool_id).free_blocks == 10, f"blocks free after {end}")
        after = client.open_session("after")
        next_lane = lane_of(after, pool, after.allocate(pool.pool_id, 10))
        after.run(next_lane.store_and_load_step())
        next_lane.check_out()
        after.close()


def test_closing_twice(client):
    session = client.open_session()
    session.close()
    refused(session.close, "unknown_session")


def test_list_sessions(client, session, pool):
    named = client.open_session("vllm-0", namespace="tenant-a")
    named.allocate(pool.pool_id, 3)
    buffer = named.create_buffer(12345)
    queue = named.open_queue()
    lane = lane_of(named, pool, named.allocate(pool.pool_id, 2))
    queue.run(lane.store_step())
    refused(lambda: queue.run(Step().store(lane.region, lane.source_view, [-5])), "out_of_range")
    listed = {s.session_id: s for s in client.list_sessions()}
    info = listed[named.id]
    assert (info.name, info.namespace) == ("vllm-0", "tenant-a")
    assert (info.peer_pid, info.peer_uid) == (os.getpid(), os.geteuid())
    assert (info.blocks, info.buffers, info.queues, info.steps_in_flight) == (5, 3, 1, 0)
    assert info.buffer_bytes >= buffer.bytes
    assert info.steps_done >= 1 and info.steps_refused == 1
    assert listed[session.id].namespace == "default"
    assert "secret" not in [field.name for field in info.DESCRIPTOR.fields]
    named.close()


def test_names_are_checked(client):
    for name in ("", "x" * 64, "a b", "a/b", "ä", "a\nb"):
        refusal = refused(lambda: client.open_session(name), "invalid_argument", "too_large")
        assert refusal.message
    refused(lambda: client.open_session("ok", namespace="not ok"), "invalid_argument")
    session = client.open_session("x" * 63)
    assert "x" * 63 in [s.name for s in client.list_sessions()]
    session.close()


def test_protocol_versions(client):
    version = client.info().protocol_version
    session = client.open_session("same", protocol_version=version)
    assert session.protocol_version == version
    session.close()
    refusal = refused(lambda: client.open_session("other", protocol_version=version + 1000), "version_mismatch")
    assert str(version + 1000) in refusal.message and str(version) in refusal.message


# -- the allocator against a model

class Allocator(RuleBasedStateMachine):
    """Two sessions and one pool of 12 blocks; no step is in flight, so that a freed block is free at once."""

    blocks_count = 12
    client = pool = None  # set by the test

    @initialize()
    def start(self):
        self.owner = [None] * self.blocks_count  # the model: which session has a block
        self.sessions = [self.client.open_session(f"model{i}") for i in range(2)]
        self.epoch = 0

    def teardown(self):
        for session in getattr(self, "sessions", []):
            session.close()

    def free_count(self):
        return self.owner.count(None)

    def took(self, who, blocks):
        assert all(self.owner[b] is None for b in blocks) and len(set(blocks.tolist())) == len(blocks)
        assert self.sessions[who].epoch > self.epoch
        self.epoch = self.sessions[who].epoch
        for block in blocks:
            self.owner[block] = who

    @rule(who=st.integers(0, 1), count=st.integers(1, 14))
    def allocate(self, who, count):
        session = self.sessions[who]
        if count > self.free_count():
            refused(lambda: session.allocate(self.pool.pool_id, count), "out_of_blocks")
        else:
            blocks = session.allocate(self.pool.pool_id, count)
            assert len(blocks) == count
            self.took(who, blocks)

    @rule(who=st.integers(0, 1), first=st.integers(0, 13), count=st.integers(1, 6))
    def allocate_range(self, who, first, count):
        session = self.sessions[who]
        if first + count > self.blocks_count:
            refused(lambda: session.allocate_range(self.pool.pool_id, first, count), "out_of_range")
        elif any(o is not None for o in self.owner[first:first + count]):
            refused(lambda: session.allocate_range(self.pool.pool_id, first, count), *REGION_TAKEN)
        else:
            blocks = session.allocate_range(self.pool.pool_id, first, count)
            assert blocks.tolist() == list(range(first, first + count))
            self.took(who, blocks)

    @rule(who=st.integers(0, 1), blocks=st.lists(st.integers(-2, 13), max_size=6))
    def free(self, who, blocks):
        session = self.sessions[who]
        wrong = any(not 0 <= b < self.blocks_count or self.owner[b] != who for b in blocks)
        if wrong or len(set(blocks)) != len(blocks):
            refused(lambda: session.free(self.pool.pool_id, blocks), "not_owner", "invalid_argument", "out_of_range")
        else:
            session.free(self.pool.pool_id, blocks)
            for block in blocks:
                self.owner[block] = None

    @precondition(lambda self: any(o is not None for o in self.owner))
    @rule(data=st.data())
    def free_own(self, data):
        who = data.draw(st.sampled_from([o for o in self.owner if o is not None]))
        owned = [b for b, o in enumerate(self.owner) if o == who]
        blocks = data.draw(st.lists(st.sampled_from(owned), unique=True))
        self.sessions[who].free(self.pool.pool_id, blocks)
        for block in blocks:
            self.owner[block] = None

    @rule(who=st.integers(0, 1))
    def end(self, who):
        self.sessions[who].close()
        self.owner = [None if o == who else o for o in self.owner]
        self.sessions[who] = self.client.open_session(f"model{who}")
        wait_until(lambda: self.client.pool(self.pool.pool_id).free_blocks == self.free_count(), "its blocks free")

    @rule(who=st.integers(0, 1), block=st.integers(0, 11))
    def touch(self, who, block):
        """A step may touch what its session has, and nothing else."""
        session = self.sessions[who]
        region = pb.RegionRef(pool_id=self.pool.pool_id)
        session.epoch = max(session.epoch, self.epoch)
        if self.owner[block] == who:
            assert session.load_rows(region, [(block, 0, 1, 0)], 1)[2].rows_loaded == 1
        else:
            refused(lambda: session.load_rows(region, [(block, 0, 1, 0)], 1), "not_owner")

    @invariant()
    def the_daemon_agrees(self):
        if not hasattr(self, "sessions"):
            return
        told = self.client.block_states(self.pool.pool_id)
        assert len(told) == self.blocks_count
        for owner, (state, session_id, _) in zip(self.owner, told):
            expected = (pb.BLOCK_FREE, 0) if owner is None else (pb.BLOCK_LEASED, self.sessions[owner].id)
            assert (state, session_id) == expected
        described = self.client.pool(self.pool.pool_id)
        assert (described.free_blocks, described.quarantined_blocks) == (self.free_count(), 0)
        assert described.leased_blocks == self.blocks_count - self.free_count()


@pytest.mark.slow
def test_the_allocator_against_a_model(client, pool_name):
    Allocator.client = client
    Allocator.pool = client.create_pool(pool_name, 16, Allocator.blocks_count, [KV])
    run_state_machine_as_test(Allocator, settings=settings(
        max_examples=40, stateful_step_count=40, deadline=None, database=None,
        suppress_health_check=list(HealthCheck)))
    assert client.pool(Allocator.pool.pool_id).free_blocks == Allocator.blocks_count
