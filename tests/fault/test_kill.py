"""kill -9 of every process there is, with work in flight: what is lost is said, what was finished stays, others go on."""
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from support import memory as raw_memory
from support import reference
from support.catalogue import V41, Geometry
from support.daemon import Daemon
from support.errors import RpcFailure, StepFailure
from support.process import is_running, wait_until
from support.stubs import pb
from support.traffic import Lane, random_rows

KV = {"name": "kv", "format": "v41", "num_layers": 1}
TOKENS, BLOCKS = 64, 160
GEOMETRY = Geometry(V41, TOKENS, BLOCKS)


def lane_of(session, pool, first, count, rng, geometry=GEOMETRY):
    made = Lane(session, geometry, pool.pool_id, session.allocate_range(pool.pool_id, first, count))
    made.write(random_rows(rng, V41, made.count))
    return made


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


# -- the executor

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
    changed = {b for b in range(BLOCKS) if (before[b * stride:(b + 1) * stride] != after[b * stride:(b + 1) * stride]).any()}
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
    session.run(lane.load_step())
    lane.check_out()
    wait_restarted(client, restarts)
    region_memory = daemon.region_memory(pool_name, "kv")
    lane.check_memory(region_memory.snapshot())
    region_memory.close()


def test_executor_during_calls(client, session, pool_name, rng):
    """RunStep, inline rows, buffers and inspection: each succeeds or says device_lost, and works when asked again."""
    pool = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    lane = lane_of(session, pool, 0, 128, rng)
    session.run(lane.store_step())
    segments = [(int(b), 0, TOKENS, TOKENS * i) for i, b in enumerate(lane.blocks)]

    def check_rows(result):
        assert result[0].tobytes() == reference.cast_back(V41, lane.rows).tobytes()

    calls = {
        "run": lambda: session.run(lane.long_step(100)),
        "store_rows": lambda: session.store_rows(lane.region, lane.rows, lane.slots, chunk_bytes=100000),
        "load_rows": lambda: check_rows(session.load_rows(lane.region, segments, lane.count)),
        "write": lambda: lane.source.write(lane.rows, chunk_bytes=100000),
        "read": lambda: lane.source.read(),
        "dump": lambda: client.dump(lane.region, 0, BLOCKS),
        "inspect": lambda: client.inspect(lane.region, lane.slots[:1000]),
        "buffer": lambda: session.create_buffer(1 << 20).release(),
    }
    told = {}
    for name, call in calls.items():
        for delay in (0.0, 0.003, 0.01):
            thread = threading.Thread(target=lambda: told.setdefault(name, []).append(outcome(call)))
            thread.start()
            time.sleep(delay)
            restarts = kill_executor(client)
            thread.join(120)
            assert not thread.is_alive(), f"{name} hangs"
            assert told[name][-1] in (None, "device_lost", "busy"), f"{name}: {told[name][-1]}"
            wait_restarted(client, restarts)
            assert outcome(call) is None, name
    session.run(lane.store_and_load_step())
    lane.check_out()
    print(f"outcomes: {told}")


def test_executor_while_a_pool_is_made(client, session, pool_name, rng):
    """All or nothing: a pool that was refused is nowhere, one that was made works, and the ledger adds up."""
    geometry = Geometry(V41, TOKENS, 1600)  # 54 MB each
    made, refused = [], 0
    listed_before = {p.pool_id for p in client.pools()}
    bytes_before = client.device().pool_bytes
    for number in range(12):
        results = []

        def make():
            try:
                results.append(client.create_pool(f"{pool_name}-{number}", TOKENS, 1600, [KV, {**KV, "name": "kv2"}]))
            except RpcFailure as failure:
                assert failure.status in ("device_lost", "busy"), failure
                results.append(None)

        thread = threading.Thread(target=make)
        thread.start()
        time.sleep(0.001 * (number % 6))
        restarts = kill_executor(client)
        thread.join(120)
        assert not thread.is_alive(), "CreatePool hangs"
        if results[0] is None:
            refused += 1
        else:
            made.append(results[0])
        wait_restarted(client, restarts)
        assert {p.pool_id for p in client.pools()} == listed_before | {p.pool_id for p in made}
        assert client.device().pool_bytes == bytes_before + sum(p.bytes_per_placement for p in made)
        if len(made) > 4:
            client.delete_pool(made.pop(0).pool_id)
    for pool in made:
        lane = lane_of(session, pool, 1500, 4, rng, geometry)
        session.run(lane.store_and_load_step())
        lane.check_out()
        client.delete_pool(pool.pool_id, force=True)
    print(f"{refused} of 12 pools were refused")


class Worker(threading.Thread):
    """A client that stores and loads its own blocks forever, checking everything that is said to be done."""

    def __init__(self, daemon, pool, first, count, seed):
        super().__init__(daemon=True)
        self.client = daemon.client()
        self.session = self.client.open_session(f"worker{seed}")
        self.rng = np.random.default_rng(seed)
        self.lane = lane_of(self.session, pool, first, count, self.rng)
        self.queue = self.session.open_queue()
        self.stopping, self.done, self.lost, self.error = threading.Event(), 0, 0, None

    def run(self):
        try:
            while not self.stopping.is_set():
                self.round()
        except BaseException as error:  # told by the test that waits for it
            self.error = error

    def round(self):
        try:
            self.lane.write(random_rows(self.rng, V41, self.lane.count))
            self.queue.run(self.lane.long_step(4))
            self.queue.run(self.lane.load_step())
            self.lane.check_out()
            self.done += 1
        except (StepFailure, RpcFailure) as failure:
            assert failure.status == "device_lost", failure
            self.lost += 1

    def wait_progress(self):
        target = self.done + 1
        wait_until(lambda: self.done >= target or self.error, f"{self.session.ref.session_id} gets a round done", 120)
        if self.error:
            raise self.error

    def stop(self):
        self.stopping.set()
        self.join(120)
        assert not self.is_alive()
        if self.error:
            raise self.error
        self.session.close()


@pytest.mark.slow
def test_executor_twenty_times_under_load(daemon, client, pool_name):
    pool = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    workers = [Worker(daemon, pool, 8 * i, 8, i) for i in range(3)]
    restarts_before = client.device().restarts
    for worker in workers:
        worker.start()
    for round_number in range(20):
        restarts = kill_executor(client)
        wait_restarted(client, restarts)
        for worker in workers:
            worker.wait_progress()
    for worker in workers:
        worker.stop()
    assert client.device().restarts == restarts_before + 20
    print(f"rounds done {[w.done for w in workers]}, lost {[w.lost for w in workers]}")
    wait_until(lambda: client.pool(pool.pool_id).free_blocks == BLOCKS, "every block free")
    holders = raw_memory.descriptors(client.device().executor_pid)
    assert len(holders) == len({target for _, target in holders}), "a memory was imported twice"


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


# -- clients

def start_victim(daemon, pool, first, count):
    return subprocess.Popen(
        [sys.executable, "-B", "-m", "support.victim", f"unix:{daemon.socket}", str(pool.pool_id), str(TOKENS),
         str(BLOCKS), str(first), str(count)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parent.parent)


def test_client_with_steps_in_flight(daemon, client, pool_name, rng):
    pool = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    worker = Worker(daemon, pool, 0, 8, 99)
    worker.start()
    for _ in range(3):
        victim = start_victim(daemon, pool, 64, 64)
        line = victim.stdout.readline()
        assert line, "the victim died by itself"
        told = json.loads(line)
        assert told["session"] in [s.session_id for s in client.list_sessions()]
        worker.wait_progress()
        victim.kill()
        victim.wait()
        victim.stdout.close()
        wait_until(lambda: told["session"] not in [s.session_id for s in client.list_sessions()], "its session gone")
        wait_until(lambda: client.pool(pool.pool_id).free_blocks == BLOCKS - 8, "its blocks free")
        names = set().union(*map(raw_memory.names, (daemon.pid, *daemon.executor_pids())))
        assert not names & {f"kvpool-buffer:{buffer_id}" for buffer_id in told["buffers"]}, "its buffers are there"
        worker.wait_progress()
    worker.stop()
    assert worker.lost == 0, "another session noticed"
    session = client.open_session("heir")
    heir = lane_of(session, pool, 64, 64, rng)
    session.run(heir.store_and_load_step())
    heir.check_out()
    session.close()
    client.delete_pool(pool.pool_id)


# -- the supervisor

def test_supervisor_with_everything_going_on(rng):
    daemon = Daemon()
    client = daemon.client()
    pool = client.create_pool("lost", TOKENS, BLOCKS, [KV])
    session = client.open_session()
    lane = lane_of(session, pool, 0, 128, rng)
    queue = session.open_queue()
    step_id = queue.send(lane.long_step(1000))
    queue.wait_accepted(step_id)
    daemon.kill()  # checks that no executor, socket or memfd is left
    assert session.ended.wait(60)
    with pytest.raises((RpcFailure, StepFailure)):
        queue.wait(step_id)

    with Daemon(directory=daemon.directory) as successor:
        client = successor.client()
        assert not client.pools() and not client.list_sessions()
        pool = client.create_pool("lost", TOKENS, BLOCKS, [KV])
        session = client.open_session()
        lane = lane_of(session, pool, 0, 4, rng)
        session.run(lane.store_and_load_step())
        lane.check_out()
    daemon.remove()


def test_supervisor_repeatedly():
    daemon = Daemon()
    for _ in range(5):
        daemon.kill()
        daemon_before, daemon = daemon, Daemon(directory=daemon.directory)
        assert daemon.client().info().pid == daemon.pid != daemon_before.pid
    daemon.owns_directory = True
    daemon.stop()


def test_supervisor_and_executor_together():
    daemon = Daemon()
    daemon.note_processes()
    for pid in daemon.executor_pids():
        os.kill(pid, signal.SIGSTOP)  # it can't notice anything yet
    daemon.process.kill()
    daemon.process.wait()
    for pid in daemon.seen_executors:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in daemon.seen_executors), "executors gone")
    assert not raw_memory.holders(daemon.seen_memory)
    successor = Daemon(directory=daemon.directory)  # a socket nobody listens on is in its way
    successor.owns_directory = True
    successor.stop()
