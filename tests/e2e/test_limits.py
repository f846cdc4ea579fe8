"""More than allowed: sessions, queued steps, memory. Each is said at once, with the numbers, and costs nobody else."""
import os
import re
import signal
import threading

import numpy as np
import pytest

from support.catalogue import V41, Geometry
from support.client import int32_bytes
from support.errors import GRPC_CODE_OF, RpcFailure, StepFailure
from support.process import wait_until
from support.stubs import pb
from support.traffic import Lane, random_rows

GIB = 1 << 30


def refused(call, status):
    with pytest.raises((RpcFailure, StepFailure)) as caught:
        call()
    refusal = caught.value.refusal
    assert refusal is not None and refusal.status == status, caught.value
    if refusal.grpc_code:
        assert refusal.grpc_code == GRPC_CODE_OF[status]
    return refusal


def test_sessions(start_daemon):
    client = start_daemon("--sessions-max", 3).client()
    assert client.info().limits.sessions_max == 3
    opened = [client.open_session(f"s{i}") for i in range(3)]
    refusal = refused(lambda: client.open_session("too-many"), "busy")
    assert "3" in refusal.message
    opened[1].close()
    wait_until(lambda: len(client.list_sessions()) == 2, "the closed session gone")
    again = client.open_session("again")
    assert len({s.id for s in opened} | {again.id}) == 4, "a session id came back"
    assert len(client.list_sessions()) == 3


@pytest.fixture
def lane(start_daemon):
    client = start_daemon("--steps-in-flight-max", 4).client()
    session = client.open_session()
    pool = client.create_pool("busy", 64, 32, [{"name": "kv", "format": "v41", "num_layers": 1}])
    made = Lane(session, Geometry(V41, 64, 32), pool.pool_id, session.allocate(pool.pool_id, 32))
    made.write(random_rows(np.random.default_rng(1), V41, made.count))
    return made


def test_steps_in_flight(lane):
    client, session = lane.session.client, lane.session
    assert client.info().limits.steps_in_flight_per_session_max == 4
    queue = session.open_queue()
    steps = [queue.send(lane.long_step(100)) for _ in range(4)]
    too_many = [queue.send(lane.load_step()) for _ in range(3)]
    for step_id in too_many:
        assert "4" in refused(lambda: queue.wait(step_id), "busy").message
    assert not any(step_id in queue.finished for step_id in steps[1:]), "busy was not said at once"
    refused(lambda: session.run(lane.load_step()), "busy")

    other = client.open_session("other")
    pool = client.create_pool("others", 16, 1, [{"name": "kv", "format": "v41", "num_layers": 1}])
    other_lane = Lane(other, Geometry(V41, 16, 1), pool.pool_id, other.allocate(pool.pool_id, 1))
    other_lane.write(random_rows(np.random.default_rng(2), V41, 16))
    other.run(other_lane.store_and_load_step())
    other_lane.check_out()

    for step_id in steps:
        queue.wait(step_id)
    queue.run(lane.load_step())
    lane.check_out()


def test_steps_of_one_queue_run_in_order(lane):
    queue = lane.session.open_queue()
    steps = [queue.send(lane.long_step(20)), queue.send(lane.load_step()), queue.send(lane.store_step())]
    reports = [queue.wait(step_id) for step_id in steps]
    assert [step_id for kind, step_id in queue.order if kind == "done"] == steps
    for before, after in zip(reports, reports[1:]):
        assert before[-1].finished_ns <= after[0].started_ns
    lane.check_out()


def test_queues(daemon, client, session):
    limit = client.info().limits.queues_per_session_max
    pool = client.create_pool("queues", 16, 1, [{"name": "kv", "format": "v41", "num_layers": 1}])
    lane = Lane(session, Geometry(V41, 16, 1), pool.pool_id, session.allocate(pool.pool_id, 1))
    lane.write(random_rows(np.random.default_rng(1), V41, 16))
    queues = [session.open_queue() for _ in range(limit)]
    for queue in queues:
        queue.run(lane.store_step())
    one_too_many = session.open_queue()
    refused(lambda: one_too_many.run(lane.store_step()), "busy")
    one_too_many.abandon()
    queues[3].finish()
    wait_until(lambda: client.list_sessions()[-1].queues == limit - 1, "the queue gone")
    session.open_queue().run(lane.store_and_load_step())
    lane.check_out()


def numbers(text):
    return [int(n) for n in re.findall(r"\d+", text)]


@pytest.mark.parametrize("num_blocks", [2 * GIB // 65536 + 1, 2**31 // 64 - 1])
def test_a_pool_that_does_not_fit(start_daemon, num_blocks):
    client = start_daemon(device_memory="64M").client()
    region = {"name": "kv", "format": "bf16", "num_layers": 1}
    refusal = refused(lambda: client.create_pool("big", 64, num_blocks, [region]), "out_of_memory")
    found = numbers(refusal.message)
    assert num_blocks * 64 * 1024 in found, refusal.message
    assert 64 << 20 in found, refusal.message
    assert not client.pools()
    device = client.device()
    assert (device.pool_bytes, device.memory_limit_bytes) == (0, 64 << 20)

    half = client.create_pool("half", 64, 512, [region])  # 32 MiB
    assert client.device().pool_bytes == half.bytes_per_placement == 32 << 20
    refused(lambda: client.create_pool("rest", 64, 513, [region]), "out_of_memory")
    client.delete_pool(half.pool_id)
    wait_until(lambda: client.device().pool_bytes == 0, "the ledger empty")
    assert client.create_pool("rest", 64, 513, [region]).bytes_per_placement == 513 * 65536


def test_a_buffer_that_does_not_fit(start_daemon):
    client = start_daemon(device_memory="64M").client()
    session = client.open_session()
    refusal = refused(lambda: session.create_buffer((64 << 20) + 4096), "out_of_memory")
    assert (64 << 20) + 4096 in numbers(refusal.message) and 64 << 20 in numbers(refusal.message)
    buffer = session.create_buffer(48 << 20)
    assert client.device().buffer_bytes >= 48 << 20
    refused(lambda: session.create_buffer(32 << 20), "out_of_memory")
    buffer.release()
    wait_until(lambda: client.device().buffer_bytes == 0, "the ledger empty")
    session.create_buffer(48 << 20)
    session.close()
    wait_until(lambda: client.device().buffer_bytes == 0, "the ledger empty")


def test_buffers_of_one_session(daemon, client, session):
    limit = client.info().limits.buffers_per_session_max
    buffers = [session.create_buffer(16) for _ in range(limit)]
    assert len({b.id for b in buffers}) == limit
    refusal = refused(lambda: session.create_buffer(16), "quota_exceeded")
    assert str(limit) in refusal.message
    assert client.list_sessions()[-1].buffers == limit
    buffers[0].release()
    session.create_buffer(16)


KV = {"name": "kv", "format": "v41", "num_layers": 1}


def small_lane(client, name, seed=1):
    """A session of its own with 16 rows in flight between a buffer and a pool."""
    session = client.open_session(name)
    pool = client.create_pool(name, 16, 1, [KV])
    lane = Lane(session, Geometry(V41, 16, 1), pool.pool_id, session.allocate(pool.pool_id, 1))
    lane.write(random_rows(np.random.default_rng(seed), V41, 16))
    return lane


def test_descriptors(start_daemon):
    daemon = start_daemon("--connections-max", 16, descriptors=600)
    client = daemon.client()
    lane = small_lane(client, "victim")
    limit = 600 - 2 * 16 - 128 - 8  # what connections, the process and its one device do not need
    used = 2 + 2 + 2 * client.list_sessions()[0].buffers  # the pool's region and owner table, the lane's buffers
    greedy = client.open_session("greedy")
    made = [greedy.create_buffer(4096) for _ in range((limit - used) // 2)]
    refusal = refused(lambda: greedy.create_buffer(4096), "quota_exceeded")
    assert numbers(refusal.message)[:3] == [2, limit, limit], refusal.message
    refusal = refused(lambda: client.create_pool("late", 16, 1, [KV]), "too_large")
    assert numbers(refusal.message)[:3] == [4, limit, limit], refusal.message
    assert client.device().restarts == 0

    lane.session.run(lane.store_and_load_step())
    lane.check_out()
    others = [daemon.client() for _ in range(12)]
    assert all(other.info().pid == daemon.pid for other in others)

    os.kill(client.device().executor_pid, signal.SIGKILL)
    wait_until(lambda: client.device().restarts == 1 and client.device().state == pb.DEVICE_SERVING, "a successor")
    lane.session.run(lane.store_and_load_step())
    lane.check_out()
    made[-1].write(np.full(4096, 7, np.uint8))
    assert (made[-1].read() == 7).all()
    assert client.device().restarts == 1

    greedy.close()
    client.create_pool("late", 16, 1, [KV])
    again = client.open_session("again")
    for _ in range((limit - used - 4) // 2):
        again.create_buffer(4096)
    refused(lambda: again.create_buffer(4096), "quota_exceeded")


def test_too_few_descriptors_to_start(start_daemon):
    daemon = start_daemon("--connections-max", 16, descriptors=128, wait=False)
    assert daemon.process.wait(60) == 2  # the next start would be refused as well
    assert "start_failed" in daemon.log and "descriptors" in daemon.log and "128" in daemon.log


def test_a_pool_of_more_descriptors_than_there_are(start_daemon):
    client = start_daemon("--connections-max", 16, descriptors=600, device_memory="4T").client()
    region = {"name": "kv", "format": "bf16", "num_layers": 1}
    blocks = 300 << 14  # of 64 KiB: 300 chunks of 1 GiB
    refusal = refused(lambda: client.create_pool("wide", 64, blocks, [region]), "too_large")
    assert numbers(refusal.message)[:3] == [600 + 2, 0, 432], refusal.message


def test_calls_of_one_session(daemon, client, session):
    limit = client.info().limits.calls_per_session_max
    assert limit == 64
    buffer = session.create_buffer(4096)
    ends = threading.Event()

    def requests():
        yield pb.WriteBufferRequest(session=session.ref, buffer_id=buffer.id, data=b"x")
        ends.wait(120)

    def queues():
        return next(s.queues for s in client.list_sessions() if s.session_id == session.id)

    calls = [client.rpc.WriteBuffer.future(requests(), timeout=120) for _ in range(limit)]
    try:
        wait_until(lambda: queues() == limit, "the calls open")
        assert str(limit) in refused(lambda: buffer.read(), "busy").message
        lane = small_lane(client, "beside-the-calls")
        lane.session.run(lane.store_and_load_step())
        lane.check_out()
        assert len(client.inspect(pb.RegionRef(pool_id=lane.pool_id), [0])) == 1
    finally:
        ends.set()
    assert [call.result().bytes_written for call in calls] == [1] * limit
    wait_until(lambda: queues() == 0, "the calls gone")
    assert bytes(buffer.read(0, 1)) == b"x"


def resident_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="a sanitizer's allocator keeps what was freed")
def test_rows_nobody_wants_are_not_kept(start_daemon):
    daemon = start_daemon()
    client = daemon.client()
    session = client.open_session()
    region = pb.RegionRef(pool_id=client.create_pool("rows", 16, 1, [KV]).pool_id)
    ends, count, rows = threading.Event(), 60, bytes(4_000_000)

    def requests():
        yield pb.StoreRowsRequest(session=session.ref, epoch=session.epoch, region=region, row_bytes=1024,
                                  slots=int32_bytes([-1]), rows=rows)
        yield pb.StoreRowsRequest(rows=b"z")
        ends.wait(120)

    before = resident_bytes(daemon.pid)
    calls = [client.rpc.StoreRows.future(requests(), timeout=120) for _ in range(count)]
    try:
        wait_until(lambda: client.list_sessions()[0].steps_done == count, "every call's one row written")
        assert resident_bytes(daemon.pid) - before < count * len(rows) / 2
    finally:
        ends.set()
    for call in calls:
        assert call.result().reports[0].rows_skipped == 1
