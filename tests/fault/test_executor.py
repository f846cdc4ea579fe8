"""kill -9 of an executor with work in flight: what is lost is said, what was finished stays, the next step works."""
import os
import re
import signal
import threading
import time

import numpy as np
import pytest

from support import memory as raw_memory
from support import reference
from support.catalogue import V41, Geometry
from support.errors import RpcFailure, StepFailure
from support.process import is_running, wait_until
from support.stubs import pb
from support.traffic import random_rows
from support.worker import BLOCKS, GEOMETRY, KV, TOKENS, Worker, lane_of


def kill_executor(client, device="host:0"):
    """kill -9; the number of restarts to wait for."""
    told = client.device(device)
    os.kill(told.executor_pid, signal.SIGKILL)
    return told.restarts + 1


def wait_restarted(client, restarts, device="host:0"):
    def back():
        told = client.device(device)
        return told.state == pb.DEVICE_SERVING and told.restarts >= restarts
    wait_until(back, f"{device} serving again")


def outcome(call):
    """None, or the status of a failure."""
    try:
        call()
        return None
    except (RpcFailure, StepFailure) as failure:
        assert failure.refusal is not None, failure
        return failure.status


@pytest.fixture
def rng():
    return np.random.default_rng(17)


@pytest.fixture
def daemon(start_daemon):
    """One for each test: an executor that dies often is restarted after longer and longer pauses."""
    return start_daemon()


def test_executor_with_steps_in_flight(daemon, client, session, pool_name, rng):
    pool = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    region_memory = daemon.region_memory(pool_name, "kv")
    region_memory.fill(0xA5)
    finished = lane_of(session, pool, 0, 32, rng)
    lanes = [lane_of(session, pool, 32 + 32 * i, 32, rng) for i in range(4)]
    queues = [session.open_queue() for _ in lanes]
    for queue in queues:
        queue.run(finished.store_step())
    before, old_pid, events = region_memory.snapshot(), client.device().executor_pid, len(session.events)

    steps = [[queue.send(lane.long_step(300)) for _ in range(3)] for queue, lane in zip(queues, lanes)]
    for queue, sent in zip(queues, steps):
        queue.wait_accepted(sent[0])
    restarts = kill_executor(client)

    torn, lost = set(), 0
    for queue, lane, sent in zip(queues, lanes, steps):
        for step_id in sent:
            try:
                queue.wait(step_id)
            except StepFailure as failure:
                assert failure.status == "device_lost"
                assert set(failure.torn) <= {pool.pool_id}
                named = failure.torn.get(pool.pool_id, ())
                assert list(named) == sorted(set(named)) and set(named) <= set(lane.blocks.tolist())
                torn |= set(named)
                lost += 1
    assert lost >= 4, f"only {lost} steps were lost"
    assert torn

    # The client did nothing about it: the same streams, sessions, buffers and blocks work.
    for queue in queues:
        queue.run(finished.load_step())
        finished.check_out()
    wait_restarted(client, restarts)
    told = client.device()
    assert told.restarts == restarts and told.executor_pid != old_pid and not is_running(old_pid)
    assert told.steps_in_flight == 0

    after = region_memory.snapshot()
    finished.check_memory(after)
    stride = GEOMETRY.block_stride_bytes
    changed = {b for b in range(BLOCKS)
               if before[b * stride:(b + 1) * stride].tobytes() != after[b * stride:(b + 1) * stride].tobytes()}
    assert changed <= torn, f"blocks {sorted(changed - torn)} changed and were not named"
    for lane in lanes:
        assert lane.source.read().tobytes() == lane.rows.tobytes(), "a buffer lost its bytes"

    event = session.wait_event("device_lost", events)
    assert event.device == "host:0"
    assert session.wait_event("device_restored", events) == "host:0"
    told_torn = {int(b) for t in event.torn for b in np.frombuffer(t.blocks, "<i4")}
    assert told_torn == torn, "the session's event names other blocks than its steps' failures"

    for queue, lane in zip(queues, lanes):
        queue.run(lane.store_and_load_step())
        lane.check_out()
        lane.check_memory(region_memory.snapshot())
    region_memory.close()
    client.delete_pool(pool.pool_id, force=True)


def test_executor_while_idle(daemon, client, session, pool_name, rng):
    pool = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    lane = lane_of(session, pool, 0, 4, rng)
    session.run(lane.store_step())
    restarts = kill_executor(client)
    wait_until(lambda: client.device().restarts == restarts, "its death noticed")
    session.run(lane.load_step())  # sent while nobody is there to run it
    lane.check_out()
    wait_restarted(client, restarts)
    region_memory = daemon.region_memory(pool_name, "kv")
    lane.check_memory(region_memory.snapshot())
    region_memory.close()


def test_executor_that_serves_is_replaced_quickly(start_daemon, rng):
    """Pauses grow for executors that never come to serve, not for those that something kills again and again."""
    daemon = start_daemon()
    client = daemon.client()
    session = client.open_session()
    pool = client.create_pool("again", TOKENS, BLOCKS, [KV])
    lane = lane_of(session, pool, 0, 4, rng)
    session.run(lane.store_step())
    for _ in range(8):
        wait_restarted(client, kill_executor(client))
        session.run(lane.load_step())
        lane.check_out()
    pauses = [int(ms) for ms in re.findall(r"executor_died .*pause_ms=(\d+)", daemon.log)]
    assert pauses == [0] + [100] * 7


def calls_of(client, session, lane):
    """Everything but a stream that goes to an executor. What reads also checks."""
    segments = [(int(b), 0, TOKENS, TOKENS * i) for i, b in enumerate(lane.blocks)]

    def load_rows():
        rows, _, _ = session.load_rows(lane.region, segments, lane.count)
        assert rows.tobytes() == reference.cast_back(V41, lane.rows).tobytes()

    def read():
        assert lane.source.read().tobytes() == lane.rows.tobytes()

    return {
        "run": lambda: session.run(lane.long_step(100)),
        "store_rows": lambda: session.store_rows(lane.region, lane.rows, lane.slots, chunk_bytes=100000),
        "load_rows": load_rows,
        "write": lambda: lane.source.write(lane.rows, chunk_bytes=100000),
        "read": read,
        "dump": lambda: client.dump(lane.region, 0, BLOCKS),
        "inspect": lambda: client.inspect(lane.region, lane.slots[:500]),
        "buffer": lambda: session.create_buffer(1 << 20).release(),
    }


@pytest.mark.parametrize("name", ["run", "store_rows", "load_rows", "write", "read", "dump", "inspect", "buffer"])
def test_executor_during_a_call(client, session, pool_name, rng, name):
    """The call succeeds or says device_lost, and works when made again."""
    pool = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    lane = lane_of(session, pool, 0, 32, rng)
    session.run(lane.store_step())
    call, told = calls_of(client, session, lane)[name], []
    for delay in (0.0, 0.003, 0.01):
        thread = threading.Thread(target=lambda: told.append(outcome(call)))
        thread.start()
        time.sleep(delay)
        restarts = kill_executor(client)
        thread.join(120)
        assert not thread.is_alive(), f"{name} hangs"
        assert told[-1] in (None, "device_lost")
        wait_restarted(client, restarts)
        assert outcome(call) is None
    session.run(lane.store_and_load_step())
    lane.check_out()
    print(f"outcomes: {told}")


def test_executor_while_a_pool_is_made(start_daemon, rng):
    """All or nothing: a pool that was refused is nowhere, one that was made works, and the ledger adds up."""
    devices = [f"host:{i}" for i in range(4)]
    client = start_daemon(devices=devices, threads=1).client()
    session = client.open_session()
    geometry = Geometry(V41, TOKENS, 800)  # 27 MB a region
    made, refused = [], 0
    for number in range(12):
        device, results = devices[number % 4], []

        def make():
            try:
                results.append(client.create_pool(f"pool-{number}", TOKENS, 800, [KV, {**KV, "name": "kv2"}],
                                                  placements=[device, devices[(number + 1) % 4]]))
            except RpcFailure as failure:
                assert failure.status == "device_lost", failure
                results.append(None)

        thread = threading.Thread(target=make)
        thread.start()
        time.sleep(0.002 * (number % 5))
        restarts = kill_executor(client, device)
        thread.join(120)
        assert not thread.is_alive(), "CreatePool hangs"
        if results[0] is None:
            refused += 1
        else:
            made.append(results[0])
        wait_restarted(client, restarts, device)
        assert {p.pool_id for p in client.pools()} == {p.pool_id for p in made}
        for name in devices:
            placed = [p for p in made if name in p.spec.placements]
            assert client.device(name).pool_bytes == sum(p.bytes_per_placement for p in placed)
        if len(made) > 4:
            client.delete_pool(made.pop(0).pool_id)
    for pool in made:
        for first, device in enumerate(pool.spec.placements):
            lane = lane_of(session, pool, 700 + 4 * first, 4, rng, geometry, device)
            session.run(lane.store_and_load_step())
            lane.check_out()
        client.delete_pool(pool.pool_id, force=True)
    print(f"{refused} of 12 pools were refused")


@pytest.mark.slow
def test_executors_twenty_times_under_load(start_daemon):
    """Five devices, a client on each and one more on the first; each round another executor is killed."""
    devices = [f"host:{i}" for i in range(5)]
    daemon = start_daemon(devices=devices, threads=1)
    client = daemon.client()
    pool = client.create_pool("shared", TOKENS, BLOCKS, [KV], placements=devices)
    workers = [Worker(daemon, pool, 2 * i, 2, i, device) for i, device in enumerate([*devices, devices[0]])]
    for worker in workers:
        worker.start()
    for round_number in range(20):
        device = devices[round_number % 5]
        lost_before = [worker.lost for worker in workers]
        wait_until(lambda: client.device(device).steps_in_flight > 0, f"a step of {device} in flight")
        wait_restarted(client, kill_executor(client, device), device)
        for worker in workers:
            worker.wait_progress()
        for worker, before in zip(workers, lost_before):
            assert worker.lane.device == device or worker.lost == before, "another device's client lost a step"
    for worker in workers:
        worker.stop()
    assert [client.device(device).restarts for device in devices] == [4] * 5
    assert sum(worker.lost for worker in workers) > 0
    print(f"rounds done {[w.done for w in workers]}, lost {[w.lost for w in workers]}")
    wait_until(lambda: client.pool(pool.pool_id).free_blocks == BLOCKS, "every block free")
    held = [target for _, target in raw_memory.descriptors(daemon.pid)]
    assert len([t for t in held if "kvpool:shared:kv" in t]) == 5 and not any("kvpool-buffer" in t for t in held), held


def test_executor_of_one_device(start_daemon, rng):
    """The other device goes on as if nothing were."""
    daemon = start_daemon(devices=("host:0", "host:1"), threads=1)
    client = daemon.client()
    pool = client.create_pool("first", TOKENS, BLOCKS, [KV], placements=["host:0"])
    other = client.create_pool("second", 16, 2, [KV], placements=["host:1"])
    session = client.open_session()
    lane = lane_of(session, pool, 0, 32, rng)
    rows = random_rows(rng, V41, 32)
    session.allocate(other.pool_id, 2)
    queue = session.open_queue()
    step_id = queue.send(lane.long_step(1000))
    queue.wait_accepted(step_id)
    pid = client.device("host:1").executor_pid
    restarts = kill_executor(client)
    region = pb.RegionRef(pool_id=other.pool_id)
    session.store_rows(region, rows, np.arange(32))
    loaded, _, _ = session.load_rows(region, [(0, 0, 16, 0), (1, 0, 16, 16)], 32)
    assert loaded.tobytes() == reference.cast_back(V41, rows).tobytes()
    assert outcome(lambda: queue.wait(step_id)) == "device_lost"
    wait_restarted(client, restarts)
    told = client.device("host:1")
    assert (told.executor_pid, told.restarts) == (pid, 0)
