"""The attach socket, spoken byte by byte: who is let in, what is handed out, what is taken back, and what a worker can't
do to anybody else."""
import ctypes
import fcntl
import itertools
import mmap
import os
import re
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support import attach_wire as wire
from support.attach_ring import ACCEPTED, DONE, REFUSED, Ring, store, zero_blocks
from support.attach_wire import Attachment, Closed, Refused, WireSocket, close_chunks, hello
from support.catalogue import V41, Geometry
from support.client import Client
from support.daemon import fake_executor_path
from support.device import DEVICE, ON_GPU
from support.errors import RpcFailure
from support.process import wait_until
from support.stubs import pb
from support.traffic import random_rows
from support.worker import KV, TOKENS, lane_of

BLOCKS = 64
SHRINK_GROW_SEAL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
FUTURE_WRITE = 0x10
GET_SEALS = fcntl.F_GET_SEALS

# A connection; a ring of 6 and what is left of the one before; 4 in a message to the executor; in messages to the worker
# 3 rings of 5 and 16 chunks.
WORKER_DESCRIPTORS = 1 + 6 + 1 + 4 + 3 * 5 + 16

host_only = pytest.mark.skipif(ON_GPU, reason="maps memory of a host device")


@pytest.fixture
def path(client):
    return client.info().attach_socket


@pytest.fixture
def attach(path):
    """attach(session): an Attachment that is closed at the end."""
    made = []

    def begin(session, device=""):
        made.append(Attachment(path, session.ref, device))
        return made[-1]

    yield begin
    for attachment in made:
        attachment.close()


@pytest.fixture
def pool(client, pool_name):
    made = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    yield made
    client.delete_pool(made.pool_id, force=True)


@pytest.fixture(autouse=True)
def nothing_left(request):
    """Whatever a test did with the shared daemon: its descriptors are as many as before."""
    if "daemon" not in request.fixturenames:
        yield
        return
    daemon = request.getfixturevalue("daemon")
    before = open_descriptors(daemon)
    yield
    wait_until(lambda: attached(daemon) == 0, "attachments gone")
    wait_until(lambda: open_descriptors(daemon) <= before, f"{before} descriptors, now {open_descriptors(daemon)}")


def all_descriptors(daemon):
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def open_descriptors(daemon):
    """Memfds, events and sequenced sockets of supervisor and executors: what attachments are made of."""
    count = 0
    for pid in (daemon.pid, *daemon.executor_pids()):
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except FileNotFoundError:
                continue
            count += "memfd:kvpool-" in target or "memfd:worker" in target or "eventfd" in target
    return count


def attached(daemon):
    client = Client(f"unix:{daemon.socket}")
    try:
        return sum(len(s.attachments) for s in client.list_sessions())
    finally:
        client.close()


def mine(client, session):
    """What ListSessions tells about a session's attachments."""
    return next(s for s in client.list_sessions() if s.session_id == session.ref.session_id).attachments


def kill_executor(client, device=DEVICE):
    os.kill(client.device(device).executor_pid, signal.SIGKILL)


def ask_raw(path, kind, body, request=1, fds=()):
    """One message on a new connection; the error it is answered with, after which the socket must close."""
    with WireSocket(path) as connection:
        connection.send(kind, request, body, fds)
        return refusal_and_end(connection)


def refusal_and_end(connection):
    message = connection.receive()
    assert message.kind in (wire.RESULT, wire.ENDED)
    with pytest.raises((Closed, ConnectionResetError)):
        connection.receive()
    return Refused(message.body)


# ---- coming in -----------------------------------------------------------------------------------------------------


def test_what_an_attached_worker_gets(client, session, attach):
    attachment = attach(session)
    welcome, shared = attachment.welcome, attachment.shared
    assert welcome.version == wire.VERSION
    assert welcome.attachment_id > 0
    assert welcome.generation == client.device().restarts + 1
    assert welcome.deadline_ns_max == 30_000_000_000
    assert welcome.memory_granularity_bytes == client.device().memory_granularity_bytes
    assert welcome.device.decode() == DEVICE
    for fd in (shared.ring_fd, shared.timelines_fd):
        assert fcntl.fcntl(fd, GET_SEALS) == SHRINK_GROW_SEAL
    assert fcntl.fcntl(shared.status_fd, GET_SEALS) == SHRINK_GROW_SEAL | FUTURE_WRITE
    # One page of header, 1024 + 2048 records of 64 bytes, arenas of 8 and 4 MiB.
    assert os.fstat(shared.ring_fd).st_size == 4096 + 64 * 1024 + 128 * 1024 + (12 << 20)
    assert os.fstat(shared.timelines_fd).st_size == 1024 * 64
    assert os.fstat(shared.status_fd).st_size == ctypes.sizeof(wire.Status)
    assert os.readlink(f"/proc/self/fd/{shared.command_event}") == "anon_inode:[eventfd]"
    assert stat.S_ISSOCK(os.fstat(shared.completion_event).st_mode)
    assert not any(shared.timelines[:])
    assert (shared.status().state, shared.status().generation) == (wire.SERVING, welcome.generation)


def test_nobody_but_the_daemon_writes_the_status(session, attach):
    shared = attach(session).shared
    with pytest.raises(PermissionError):
        mmap.mmap(shared.status_fd, os.fstat(shared.status_fd).st_size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(shared.status_fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.status_fd, 0)


def test_who_is_attached(client, session, attach):
    assert not mine(client, session)
    first, second = attach(session), attach(session, DEVICE)
    told = {a.attachment_id: a for a in mine(client, session)}
    assert set(told) == {first.welcome.attachment_id, second.welcome.attachment_id}
    for one in told.values():
        assert (one.peer_pid, one.peer_uid, one.device) == (os.getpid(), os.getuid(), DEVICE)
        assert (one.state, one.buffers, one.steps_taken) == (pb.ATTACHMENT_SERVING, 0, 0)
        assert one.attached_unix_ns > 0
    first.close()
    wait_until(lambda: [a.attachment_id for a in mine(client, session)] == [second.welcome.attachment_id], "one left")
    other = client.open_session("other")
    assert not mine(client, other)
    other.close()


@pytest.mark.parametrize("field, status, words", [
    ({"version": 0}, "version_mismatch", "version 0"),
    ({"version": 2}, "version_mismatch", "this daemon 1"),
    ({"secret": bytes(16)}, "wrong_secret", "not that of session"),
    ({"device": "host:7"}, "wrong_device", "host:7"),
    ({"device": "a\nb"}, "invalid_argument", "device"),
])
def test_not_let_in(session, path, field, status, words):
    refusal = ask_raw(path, wire.ATTACH, hello(session.ref, **field))
    assert refusal.status == status and words in refusal.text, refusal


def test_no_such_session(session, path):
    told = hello(session.ref)
    told.session_id += 1000
    assert ask_raw(path, wire.ATTACH, told).status == "unknown_session"


def test_a_name_without_an_end(session, path):
    told = bytearray(bytes(hello(session.ref)))
    told[-wire.NAME_BYTES:] = b"x" * wire.NAME_BYTES
    assert ask_raw(path, wire.ATTACH, told).status == "invalid_argument"


def test_the_first_message_is_something_else(session, path):
    told = bytes(hello(session.ref))
    for kind, body, fds in ((wire.MAP_POOL, wire.PoolName(b"x"), ()), (77, b"", ()), (wire.ATTACH, told[:-1], ()),
                            (wire.ATTACH, told + b"\0", ()), (wire.ATTACH, b"", ()), (wire.ATTACH, told, (0,))):
        assert ask_raw(path, kind, body, fds=fds).status == "malformed"


def test_garbage(path):
    for data in (b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(16), os.urandom(16384 + 16),
                 struct.pack("<4I", wire.MAGIC, wire.ATTACH, 1, 5) + b"1234",
                 struct.pack("<4I", wire.MAGIC, wire.ATTACH, 1, 0xFFFFFFFF),
                 struct.pack("<4I", wire.MAGIC, wire.ATTACH, 1, 20000) + bytes(20000)):
        with WireSocket(path) as connection:
            connection.send_raw(data)
            assert refusal_and_end(connection).status == "malformed", data[:20]


def test_garbage_of_an_attached_worker(client, session, attach):
    for data in (b"x", struct.pack("<4I", wire.MAGIC, 77, 1, 0), struct.pack("<4I", wire.MAGIC, wire.MAP_POOL, 1, 0),
                 struct.pack("<4I", wire.MAGIC, wire.MAP_POOL, 0, 64) + bytes(64)):
        other, attachment = attach(session), attach(session)
        attachment.wire.send_raw(data)
        assert refusal_and_end(attachment.wire).status == "malformed"
        status = attachment.shared.status()
        assert status.state == wire.OVER and status.reason.text
        assert other.shared.status().state == wire.SERVING
        other.create_buffer(100)


@pytest.mark.parametrize("count", [1, 64, 65, 253])
def test_more_descriptors_than_asked_for(session, path, count):
    """Each is closed again: the fixture counts."""
    with open("/dev/null", "rb") as null, WireSocket(path) as connection:
        connection.send(wire.ATTACH, 1, hello(session.ref), [null.fileno()] * count)
        assert refusal_and_end(connection).status == "malformed"


def test_a_worker_that_says_nothing(start_daemon):
    daemon = start_daemon()
    with WireSocket(daemon.client().info().attach_socket) as connection:
        refusal = refusal_and_end(connection)
    assert refusal.status == "deadline_exceeded" and "ATTACH" in refusal.text


def test_silent_connections_of_a_user_are_few(start_daemon):
    """64 that say nothing: the next one is told so, attached workers don't notice, other users are let in, and a place
    that is free is taken. Only root can become somebody else to try."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    daemon = start_daemon("--socket-mode", "0666")
    os.chmod(daemon.directory, 0o755)
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    attachment = Attachment(path, session.ref)
    silent = as_uid(12345, lambda: [WireSocket(path) for _ in range(64)])
    with as_uid(12345, lambda: WireSocket(path)) as connection:
        refusal = refusal_and_end(connection)
    assert refusal.status == "busy" and "64 connections of uid 12345" in refusal.text, refusal
    attachment.create_buffer(10)
    Attachment(path, session.ref).close()
    as_uid(12346, lambda: Attachment(path, session.ref)).close()
    silent.pop().close()

    def let_in():
        try:
            as_uid(12345, lambda: Attachment(path, session.ref)).close()
            return True
        except (Refused, Closed, ConnectionResetError, BrokenPipeError):
            return False
    wait_until(let_in, "somebody let in again")
    attachment.close()
    for connection in silent:
        connection.close()


def test_silent_connections_of_all_users_are_few(start_daemon):
    """Four users can fill all 256 places, three can't."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    daemon = start_daemon("--socket-mode", "0666")
    os.chmod(daemon.directory, 0o755)
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    silent = []
    for uid in (12345, 12346, 12347):
        silent += as_uid(uid, lambda: [WireSocket(path) for _ in range(64)])
    Attachment(path, session.ref).close()
    silent += as_uid(12348, lambda: [WireSocket(path) for _ in range(64)])
    with WireSocket(path) as connection:
        refusal = refusal_and_end(connection)
    assert refusal.status == "busy" and "256 connections" in refusal.text, refusal
    for connection in silent:
        connection.close()


def as_uid(uid, what):
    os.seteuid(uid)
    try:
        return what()
    finally:
        os.seteuid(0)


def test_attachments_of_a_session_are_counted(client, session, attach):
    made = [attach(session) for _ in range(64)]
    with pytest.raises(Refused) as caught:
        attach(session)
    assert caught.value.status == "quota_exceeded" and "64" in caught.value.text
    other = client.open_session("other")
    attach(other).close()
    made.pop().close()
    wait_until(lambda: len(mine(client, session)) == 63, "one gone")
    attach(session)
    other.close()


# The ring of test_what_an_attached_worker_gets, timelines, and a page for the status.
RING_BYTES = 4096 + 64 * 1024 + 128 * 1024 + (12 << 20) + 64 * 1024 + 4096


@host_only
def test_memory_of_rings_is_the_device_s(start_daemon):
    """Each is charged where pools and buffers are, and one that there is no room for is refused."""
    daemon = start_daemon(device_memory=str(3 * RING_BYTES + 1000))
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket

    def told():
        device = client.device()
        return device.ring_bytes, device.memory_left_bytes
    made = [Attachment(path, session.ref) for _ in range(2)]
    assert told() == (2 * RING_BYTES, RING_BYTES + 1000)
    buffer = session.create_buffer(1001)
    with pytest.raises(Refused) as caught:
        Attachment(path, session.ref)
    assert caught.value.status == "quota_exceeded"
    assert str(RING_BYTES) in caught.value.text and f"{2 * RING_BYTES} in workers' rings" in caught.value.text
    buffer.release()
    wait_until(lambda: client.device().buffer_bytes == 0, "the buffer gone")
    made.append(Attachment(path, session.ref))
    assert told() == (3 * RING_BYTES, 1000)
    with pytest.raises(RpcFailure) as refused:
        session.create_buffer(1001)
    assert refused.value.status == "out_of_memory"
    os.kill(client.device().executor_pid, signal.SIGKILL)  # the next one's rings are instead of these
    for attachment in made:
        attachment.wait_event(wire.DEVICE_RESTORED).close()
    assert told() == (3 * RING_BYTES, 1000)
    for attachment in made:
        attachment.close()
    wait_until(lambda: told() == (0, 3 * RING_BYTES + 1000), "all of it left")


# ---- pools ---------------------------------------------------------------------------------------------------------


def test_geometry_of_a_pool(client, session, attach, pool_name):
    made = client.create_pool(pool_name, 64, 10, [
        {"name": "kv", "format": "v41", "num_layers": 2, "compression_ratio": 4},
        {"name": "index", "format": "index_fp4", "num_layers": 3, "compression_ratio": 4},
        {"name": "raw", "format": "bf16", "width": 24, "num_layers": 1}], kind=pb.POOL_RING)
    told, memories = attach(session).map_pool(pool_name)
    assert (told.pool_id, told.num_blocks, told.block_size, told.kind, told.region_count) == (made.pool_id, 10, 64, 1, 3)
    described = client.pool(made.pool_id)
    for region, geometry, chunks in zip(told.regions, described.regions, memories):
        assert region.name.decode() == geometry.spec.name
        assert (region.tokens_per_block, region.num_layers) == (geometry.tokens_per_block, geometry.spec.num_layers)
        assert region.memory_bytes == sum(count for _, count in chunks) >= geometry.region_bytes
    assert [r.width for r in told.regions[:3]] == [r.spec.width for r in described.regions]
    close_chunks(memories)
    client.delete_pool(made.pool_id)


@host_only
def test_a_map_shows_what_is_stored(client, session, attach, pool, pool_name):
    lane = lane_of(session, pool, 0, 32, np.random.default_rng(3), Geometry(V41, TOKENS, BLOCKS))
    queue = session.open_queue()
    _, memories = attach(session).map_pool(pool_name)
    [(fd, count)] = memories[0]
    assert fcntl.fcntl(fd, GET_SEALS) & SHRINK_GROW_SEAL == SHRINK_GROW_SEAL
    view = np.frombuffer(mmap.mmap(fd, count, prot=mmap.PROT_READ), np.uint8)
    assert not view.any()
    queue.run(lane.store_step())
    expected = client.dump(pb.RegionRef(pool_id=pool.pool_id, region=0, layer=0), 0, BLOCKS)
    assert expected.any() and np.array_equal(view[:len(expected)], expected)
    del view
    close_chunks(memories)


def test_no_such_pool(session, attach):
    attachment = attach(session)
    for name, status in (("nothing", "unknown_pool"), ("", "invalid_argument"), ("a/b", "invalid_argument")):
        with pytest.raises(Refused) as caught:
            attachment.map_pool(name)
        assert caught.value.status == status
    with pytest.raises(Refused) as caught:
        attachment.ask(wire.MAP_POOL, b"x" * wire.NAME_BYTES)
    assert caught.value.status == "invalid_argument" and caught.value.array == "name"
    attachment.create_buffer(1)


@host_only
def test_a_pool_of_another_device(start_daemon):
    client = start_daemon(devices=("host:0", "host:1")).client()
    client.create_pool("zero", TOKENS, 4, [KV], placements=["host:0"])
    client.create_pool("both", TOKENS, 4, [KV], placements=["host:0", "host:1"])
    session, path = client.open_session(), client.info().attach_socket
    with pytest.raises(Refused) as caught:
        Attachment(path, session.ref)
    assert caught.value.status == "wrong_device" and "2 devices" in caught.value.text
    with Attachment(path, session.ref, "host:1") as attachment:
        with pytest.raises(Refused) as caught:
            attachment.map_pool("zero")
        assert caught.value.status == "wrong_device"
        inodes = set()
        for device in ("host:0", "host:1"):
            with Attachment(path, session.ref, device) as one:
                memories = one.map_pool("both")[1]
                inodes |= {os.fstat(fd).st_ino for fd, _ in memories[0]}
                close_chunks(memories)
        assert len(inodes) == 2
        elsewhere = session.create_buffer(100, "host:0")
        with pytest.raises(Refused) as caught:
            attachment.map_buffer(elsewhere.id)
        assert caught.value.status == "wrong_device"


def test_many_chunks(start_daemon):
    """45 GiB of what says that it is a GPU: 45 descriptors, 16 in a message, of a driver's and not looked into."""
    client = start_daemon(devices=("cuda:0",), executor=fake_executor_path(), device_memory="0").client()
    pool = client.create_pool("large", 64, 45, [{"name": "kv", "format": "bf16", "width": 8192, "num_layers": 1024}])
    assert 44 << 30 < pool.bytes_per_placement <= 45 << 30
    with Attachment(client.info().attach_socket, client.open_session().ref) as attachment:
        assert attachment.welcome.flags == 3 and attachment.welcome.memory_granularity_bytes == 2 << 20
        told, *chunks, _ = attachment.ask(wire.MAP_POOL, wire.PoolName(b"large"))
        assert [len(message.fds) for message in chunks] == [16, 16, 13]
        close_chunks(wire.collect_chunks(chunks, 1))
        assert told.body.regions[0].memory_bytes == 45 << 30


def test_a_pool_goes_while_it_is_handed_out(start_daemon):
    """The worker has not read the first message of the answer when the pool is deleted."""
    client = start_daemon(devices=("cuda:0",), executor=fake_executor_path(), device_memory="0").client()
    pool = client.create_pool("large", 64, 45, [{"name": "kv", "format": "bf16", "width": 8192, "num_layers": 1024}])
    with Attachment(client.info().attach_socket, client.open_session().ref) as attachment:
        attachment.wire.send(wire.MAP_POOL, 9, wire.PoolName(b"large"))
        assert select.select([attachment.wire.socket], [], [], 60)[0]
        client.delete_pool(pool.pool_id)
        assert attachment.wire.receive().kind == wire.POOL
        with pytest.raises(Refused) as caught:
            attachment.answers(9)
        assert caught.value.status == "unknown_pool"
        assert client.device("cuda:0").pool_bytes == 0
        attachment.create_buffer(10)


# ---- requests ------------------------------------------------------------------------------------------------------


def test_several_requests_at_a_time(session, attach, pool, pool_name):
    attachment = attach(session)
    for number in range(100, 140):
        attachment.wire.send(*((wire.MAP_POOL, number, wire.PoolName(pool_name.encode())) if number % 2 else
                               (wire.CREATE_BUFFER, number, wire.BufferBody(0, number, 0))))
    for number in range(100, 140):
        found = attachment.answers(number)
        assert [m.kind for m in found] == [wire.POOL if number % 2 else wire.BUFFER, wire.MEMORY_CHUNKS, wire.RESULT]
        for message in found:
            message.close()


def test_a_worker_that_does_not_read(client, session, attach, pool, pool_name):
    """It asks as long as its socket takes anything; the daemon keeps nothing for it, and serves the others."""
    deaf, other = attach(session), attach(session)
    deaf.wire.socket.setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            deaf.wire.send(wire.MAP_POOL, sent + 1, wire.PoolName(pool_name.encode()))
            sent += 1
    assert sent > 1
    close_chunks(other.map_pool(pool_name)[1])
    deaf.wire.socket.setblocking(True)
    deaf.wire.socket.settimeout(60)
    for number in range(1, sent + 1):
        found = deaf.answers(number)
        assert [m.kind for m in found] == [wire.POOL, wire.MEMORY_CHUNKS, wire.RESULT]
        for message in found:
            message.close()


def test_a_worker_that_never_reads_is_dropped(start_daemon):
    """Every restart is told: when too much waits for it, it goes, and its session does not."""
    daemon = start_daemon()
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    before = all_descriptors(daemon)
    deaf = Attachment(path, session.ref)
    held = []
    for restart in range(1, 12):
        kill_executor(client)
        wait_until(lambda restart=restart: client.device().restarts >= restart and
                   client.device().state == pb.DEVICE_SERVING, "serving again")
        wait_until(lambda: [a.state for a in mine(client, session)] in ([], [pb.ATTACHMENT_SERVING]), "its ring")
        held.append(all_descriptors(daemon) - before)
        if not mine(client, session):
            break
    assert not mine(client, session)
    # At least two rings of five wait for it at last, beside its own and its connection; at most what it is charged for.
    assert 12 <= max(held) <= WORKER_DESCRIPTORS, held
    with Attachment(path, session.ref) as again:
        again.create_buffer(10)
    deaf.close()


# ---- buffers -------------------------------------------------------------------------------------------------------


def mapped(chunks):
    [(fd, count)] = chunks
    return mmap.mmap(fd, count)


@host_only
def test_a_buffer_of_the_daemons(client, session, attach):
    attachment = attach(session)
    made, chunks = attachment.create_buffer(5000)
    assert made.bytes == 5000 and made.memory_bytes >= 5000
    data = os.urandom(5000)
    with mapped(chunks) as memory:
        memory[:5000] = data
        assert read_buffer(session, made.buffer_id, 5000) == data
    assert [a.buffers for a in mine(client, session)] == [1]
    attachment.release_buffer(made.buffer_id)
    with pytest.raises(Refused) as caught:
        attachment.map_buffer(made.buffer_id)
    assert caught.value.status == "unknown_buffer"
    assert client.device().buffer_bytes == 0
    os.close(chunks[0][0])


@host_only
def test_the_only_worker_goes_while_its_buffer_is_made(start_daemon):
    """Its ring is gone before its buffer is there, which nobody wants any more."""
    daemon = start_daemon()
    client = daemon.client()
    session = client.open_session()
    executor = client.device().executor_pid
    for count in (4096, 1 << 20, 64 << 20):
        attachment = Attachment(client.info().attach_socket, session.ref)
        ended = daemon.log.count(" detached ")
        os.kill(executor, signal.SIGSTOP)
        attachment.wire.send(wire.CREATE_BUFFER, 51, wire.BufferBody(0, count, 0))
        attachment.close()
        wait_until(lambda: daemon.log.count(" detached ") > ended, "it is gone")
        os.kill(executor, signal.SIGCONT)
        wait_until(lambda: not mine(client, session) and client.device().buffer_bytes == 0, "its buffer, too")
    assert client.device().restarts == 0


def read_buffer(session, buffer_id, count):
    data = b""
    for chunk in session.client.rpc.ReadBuffer(pb.ReadBufferRequest(session=session.ref, buffer_id=buffer_id,
                                                                    bytes=count), timeout=60):
        data += chunk.data
    return data


@host_only
def test_a_buffer_of_the_schedulers(session, attach):
    first, second = attach(session), attach(session)
    made = session.create_buffer(300)
    data = np.frombuffer(os.urandom(300), np.uint8)
    made.write(data)
    for attachment in (first, second):
        told, chunks = attachment.map_buffer(made.id)
        assert (told.buffer_id, told.bytes) == (made.id, 300)
        with mapped(chunks) as memory:
            assert memory[:300] == data.tobytes()
        close_chunks([chunks])
        with pytest.raises(Refused) as caught:
            attachment.release_buffer(made.id)
        assert caught.value.status == "permission_denied"
    first.close()
    second.close()
    assert np.array_equal(made.read(), data)  # not theirs: it stays
    made.release()


def test_buffers_that_can_not_be(client, session, attach):
    attachment = attach(session)
    for count, status in ((0, "invalid_argument"), (1 << 62, "out_of_memory")):
        with pytest.raises(Refused) as caught:
            attachment.create_buffer(count)
        assert caught.value.status == status
    for buffer_id in (0, 4711):
        for kind in (wire.MAP_BUFFER, wire.RELEASE_BUFFER):
            with pytest.raises(Refused) as caught:
                attachment.ask(kind, wire.BufferBody(buffer_id, 0, 0))
            assert caught.value.status == "unknown_buffer"
    stranger = client.open_session("stranger")
    other = attach(stranger)
    made, chunks = other.create_buffer(10)
    close_chunks([chunks])
    with pytest.raises(Refused) as caught:
        attachment.map_buffer(made.buffer_id)
    assert caught.value.status == "unknown_buffer"
    stranger.close()


def test_buffers_die_with_their_worker(client, session, attach):
    dying, other = attach(session), attach(session)
    its = [dying.create_buffer(1000) for _ in range(5)]
    kept, chunks = other.create_buffer(1000)
    close_chunks([chunks for _, chunks in its] + [chunks])
    dying.close()
    wait_until(lambda: len(mine(client, session)) == 1, "one worker left")
    with pytest.raises(RpcFailure) as caught:
        client.call("ReleaseBuffer", pb.ReleaseBufferRequest(session=session.ref, buffer_id=its[0][0].buffer_id))
    assert caught.value.status == "unknown_buffer"
    assert len(read_buffer(session, kept.buffer_id, 1000)) == 1000
    assert client.device().buffer_bytes == kept.memory_bytes


# ---- memory of a worker's ------------------------------------------------------------------------------------------


def make_memfd(count, seals=SHRINK_GROW_SEAL, data=b""):
    fd = os.memfd_create("worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, count)
    os.pwrite(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@host_only
def test_memory_of_a_worker(client, session, attach):
    attachment = attach(session)
    data = os.urandom(8192)
    fd = make_memfd(8192, data=data)
    whole = attachment.import_buffer(fd, 8192)
    part = attachment.import_buffer(fd, 8192, 48, 100)
    assert (whole.bytes, whole.memory_bytes, part.bytes) == (8192, 0, 100)
    assert whole.buffer_id != part.buffer_id
    assert read_buffer(session, whole.buffer_id, 8192) == data
    assert read_buffer(session, part.buffer_id, 100) == data[48:148]
    os.pwrite(fd, b"new", 48)
    assert read_buffer(session, part.buffer_id, 3) == b"new"
    assert client.device().buffer_bytes == 8192 + 4096  # pages that are mapped, once for each
    with pytest.raises(Refused) as caught:
        attachment.map_buffer(part.buffer_id)
    assert caught.value.status == "invalid_argument"
    attachment.release_buffer(whole.buffer_id)
    assert read_buffer(session, part.buffer_id, 3) == b"new"
    attachment.close()
    wait_until(lambda: not mine(client, session), "worker gone")
    assert client.device().buffer_bytes == 0
    with pytest.raises(RpcFailure) as caught:
        client.call("ReleaseBuffer", pb.ReleaseBufferRequest(session=session.ref, buffer_id=part.buffer_id))
    assert caught.value.status == "unknown_buffer"
    os.close(fd)


def make_hole(count, flags=0):
    """A memfd of no page at all."""
    fd = os.memfd_create("worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, count)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SHRINK_GROW_SEAL)
    return fd


def executor_address_bytes(client):
    status = Path(f"/proc/{client.device().executor_pid}/status").read_text()
    return int(re.search(r"^VmSize:\s+(\d+) kB", status, re.M)[1]) << 10


@host_only
def test_an_allocation_is_not_mapped_as_a_whole(client, session, attach):
    """Its pages that hold the buffer are. As a whole, 128 of 1 TiB would be all the addresses that the executor has."""
    attachment, before = attach(session), executor_address_bytes(client)
    fd = make_hole(1 << 40)
    buffers = [attachment.import_buffer(fd, 1 << 40, 5000 * 4096 * i + 4080, 32) for i in range(160)]
    assert executor_address_bytes(client) - before < 160 * (1 << 20)
    assert client.device().buffer_bytes == 160 * 2 * 4096  # each in two pages
    os.pwrite(fd, b"at the end of a page, and on the next one", 5000 * 4096 * 159 + 4080)
    assert read_buffer(session, buffers[159].buffer_id, 32) == b"at the end of a page, and on the next one"[:32]
    other = client.open_session("other")
    attach(other).create_buffer(1 << 20)
    other.close()
    attachment.close()
    wait_until(lambda: client.device().buffer_bytes == 0, "buffers gone")
    os.close(fd)


@host_only
def test_a_workers_memory_is_the_devices(start_daemon):
    """What of it is not there yet comes when a step writes it: never more than the device has left."""
    client = start_daemon(device_memory="64M").client()
    session, other = client.open_session("one"), client.open_session("other")
    with Attachment(client.info().attach_socket, session.ref) as attachment:
        left, ring = client.device().memory_left_bytes, client.device().ring_bytes
        assert left == (64 << 20) - ring
        fd = make_hole(1 << 40)
        with pytest.raises(Refused) as caught:
            attachment.import_buffer(fd, 1 << 40, 0, left // 4096 * 4096 + 1)
        asked = (left // 4096 + 1) * 4096
        assert caught.value.status == "out_of_memory"
        assert (f"a worker's memory asks for {asked} bytes on {DEVICE}: {left} of {64 << 20} are left (0 in pools, "
                f"0 in buffers, {ring} in workers' rings)") in caught.value.text
        buffer = attachment.import_buffer(fd, 1 << 40, 0, 32 << 20)
        assert client.device().memory_left_bytes == left - (32 << 20)
        told = {s.session_id: s.buffer_bytes for s in client.list_sessions()}
        assert told == {session.ref.session_id: 32 << 20, other.ref.session_id: 0}
        with pytest.raises(RpcFailure) as failed:
            other.create_buffer(left - (32 << 20) + 1)
        assert failed.value.status == "out_of_memory"
        other.create_buffer(left - (32 << 20))
        attachment.release_buffer(buffer.buffer_id)
        assert client.device().memory_left_bytes == 32 << 20
        os.close(fd)
    assert not [s for s in client.list_sessions() if s.session_id == session.ref.session_id and s.buffer_bytes]


@host_only
def test_huge_pages_are_not_taken(session, attach):
    """Pages of the administrator's pool: one that isn't there any more would be the executor's SIGBUS."""
    try:
        fd = make_hole(2 << 20, os.MFD_HUGETLB)
    except OSError:
        pytest.skip("no huge pages on this kernel")
    attachment = attach(session)
    with pytest.raises(Refused) as caught:
        attachment.import_buffer(fd, 2 << 20)
    assert caught.value.status == "invalid_argument" and "is a memfd of huge pages" in caught.value.text
    os.close(fd)
    attachment.create_buffer(1)  # it is still attached


def test_addresses_of_gpu_memory(start_daemon):
    """A GPU's allocation is its worker's and no ledger's; as a whole it takes addresses of the executor's, each time."""
    daemon = start_daemon(devices=("cuda:0",), executor=fake_executor_path(), device_memory="0")
    client, tib = daemon.client(), 1 << 40
    fd = os.memfd_create("a driver's", os.MFD_CLOEXEC)
    session = client.open_session("one")
    with Attachment(client.info().attach_socket, session.ref) as attachment:
        first = attachment.import_buffer(fd, 4 * tib, 0, 4096, kind=wire.VMM)
        attachment.import_buffer(fd, 4 * tib, 0, 4096, kind=wire.VMM)
        with pytest.raises(Refused) as caught:
            attachment.import_buffer(fd, 2 << 20, 0, 4096, kind=wire.VMM)
        assert caught.value.status == "quota_exceeded"
        assert (f"session {session.ref.session_id} has workers' allocations of {8 * tib} bytes mapped, {2 << 20} more "
                f"than {8 * tib} are too many") in caught.value.text
        assert client.device("cuda:0").buffer_bytes == 0
        assert [(s.buffers, s.buffer_bytes) for s in client.list_sessions()] == [(2, 0)]
        attachment.release_buffer(first.buffer_id)
        attachment.import_buffer(fd, 4 * tib, 0, 4096, kind=wire.VMM)
        attachment.import_buffer(-1, 4 * tib, 0, 4096, kind=wire.IPC_HANDLE)  # what the driver maps once
    others = [client.open_session(f"other-{i}") for i in range(9)]
    wait_until(lambda: not mine(client, session), "worker gone")
    attached = [Attachment(client.info().attach_socket, other.ref) for other in others]
    for attachment in attached[:8]:
        attachment.import_buffer(fd, 4 * tib, 0, 4096, kind=wire.VMM)
        attachment.import_buffer(fd, 4 * tib, 0, 4096, kind=wire.VMM)
    with pytest.raises(Refused) as caught:
        attached[8].import_buffer(fd, 2 << 20, 0, 4096, kind=wire.VMM)
    assert caught.value.status == "busy" and f"cuda:0 has workers' allocations of {64 * tib} bytes" in caught.value.text
    for attachment in attached:
        attachment.close()
    os.close(fd)


@host_only
@pytest.mark.parametrize("change, status", [
    ({"seals": 0}, "invalid_argument"),
    ({"seals": fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL}, "invalid_argument"),
    ({"allocation_bytes": 4096}, "invalid_argument"),
    ({"allocation_bytes": 16384}, "invalid_argument"),
    ({"count": 8193}, "out_of_range"),
    ({"count": 0}, "out_of_range"),
    ({"offset": 16, "count": 8192}, "out_of_range"),
    ({"offset": 1 << 63, "count": 1 << 63}, "out_of_range"),
    ({"offset": 8, "count": 16}, "invalid_argument"),
    ({"fds": 0}, "invalid_argument"),
    ({"fds": 2}, "invalid_argument"),
    ({"fds": 64}, "invalid_argument"),
    ({"kind": 0}, "unimplemented"),
    ({"kind": 4}, "unimplemented"),
    ({"kind": wire.VMM}, "unimplemented"),
    ({"kind": wire.IPC_HANDLE, "fds": 0}, "unimplemented"),
    ({"kind": wire.IPC_HANDLE}, "invalid_argument"),
])
def test_memory_that_is_not_taken(session, attach, change, status):
    attachment = attach(session)
    fd = make_memfd(8192, change.get("seals", SHRINK_GROW_SEAL))
    body = wire.Import(change.get("kind", wire.MEMFD), 0, change.get("allocation_bytes", 8192), change.get("offset", 0),
                       change.get("count", 4096))
    with pytest.raises(Refused) as caught:
        attachment.ask(wire.IMPORT_BUFFER, body, [fd] * change.get("fds", 1))
    assert caught.value.status == status, caught.value
    os.close(fd)
    attachment.create_buffer(1)  # it is still attached


@host_only
@pytest.mark.parametrize("seal, access, words", [
    (fcntl.F_SEAL_WRITE, os.O_RDWR, "seals are 0xf, with WRITE"),
    (0x10, os.O_RDWR, "seals are 0x17, with FUTURE_WRITE"),  # no name in Python before 3.12
    (0, os.O_RDONLY, "not open for reading and writing"),
    (0, os.O_WRONLY, "not open for reading and writing"),
])
def test_memory_that_cannot_be_written(session, attach, seal, access, words):
    """The worker's mistake, which is told as that: the host's memory has not run out."""
    attachment = attach(session)
    made = make_memfd(4096, SHRINK_GROW_SEAL | seal)
    fd = os.dup(made) if seal else os.open(f"/proc/self/fd/{made}", access)
    with pytest.raises(Refused) as caught:
        attachment.import_buffer(fd, 4096)
    assert caught.value.status == "invalid_argument" and words in caught.value.text, caught.value
    os.close(fd)
    os.close(made)
    attachment.create_buffer(1)  # it is still attached


@host_only
def test_what_is_no_memfd(session, attach):
    attachment = attach(session)
    with open("/dev/zero", "r+b") as device, socket.socket() as connection:
        for fd in (device.fileno(), connection.fileno()):
            with pytest.raises(Refused) as caught:
                attachment.import_buffer(fd, 4096)
            assert caught.value.status == "invalid_argument"


# ---- steps ---------------------------------------------------------------------------------------------------------


def test_a_step_of_a_worker(client, session, attach, pool):
    blocks = session.allocate(pool.pool_id, 2)
    attachment = attach(session)
    ring = Ring(attachment.shared)
    ring.post(1, 41, zero_blocks(pool.pool_id, blocks, session.epoch, signal=(512, 7)))
    assert ring.wait(41).kind == DONE
    assert [c.kind for c in ring.seen] == [ACCEPTED, DONE]
    assert attachment.shared.word(512) == 7
    assert [a.steps_taken for a in mine(client, session)] == [1]
    others = client.open_session("other").allocate(pool.pool_id, 1)
    ring.post(1, 42, zero_blocks(pool.pool_id, others, client.sessions[-1].epoch))
    refused = ring.wait(42)
    assert refused.kind == REFUSED and wire.STATUS_MAP[refused.error.status][0] == "not_owner"
    client.sessions[-1].close()


def test_nonsense_in_a_ring_ends_its_worker_alone(client, session, attach, pool):
    bad, good = attach(session), attach(session)
    made, chunks = bad.create_buffer(100)
    close_chunks([chunks])
    Ring(bad.shared).post_record(os.urandom(64))
    refusal = refusal_and_end(bad.wire)
    assert refusal.status == "malformed", refusal
    assert bad.shared.status().state == wire.OVER
    wait_until(lambda: bad.shared.word(512) == bad.shared.word(1023) == wire.POISON, "its words poisoned")
    assert bad.shared.word(0) == bad.shared.word(511) == 0
    wait_until(lambda: len(mine(client, session)) == 1, "one left")
    ring = Ring(good.shared)
    ring.post(1, 1, zero_blocks(pool.pool_id, session.allocate(pool.pool_id, 1), session.epoch))
    assert ring.wait(1).kind == DONE
    with pytest.raises(RpcFailure):
        client.call("ReleaseBuffer", pb.ReleaseBufferRequest(session=session.ref, buffer_id=made.buffer_id))


def state_of(client, pool, block):
    return client.block_states(pool.pool_id)[block][0]


def waiting_step(attachment, pool, blocks, epoch):
    """One that has been accepted and waits for word 3 of the worker's to be 5."""
    ring = Ring(attachment.shared)
    ring.post(1, 1, zero_blocks(pool.pool_id, blocks, epoch, wait=(3, 5), signal=(512, 1)))
    assert ring.wait(1, (ACCEPTED, REFUSED)).kind == ACCEPTED
    return ring


def test_a_freed_block_waits_for_steps_of_workers(client, session, attach, pool):
    attachment = attach(session)
    [block] = session.allocate(pool.pool_id, 1)
    ring = waiting_step(attachment, pool, [block], session.epoch)
    session.free(pool.pool_id, [block])
    assert state_of(client, pool, block) == pb.BLOCK_QUARANTINED
    ring.post(1, 2, zero_blocks(pool.pool_id, [block], session.epoch))  # accepted later: it finds it freed
    assert ring.wait(2).kind == REFUSED
    assert state_of(client, pool, block) == pb.BLOCK_QUARANTINED
    other = client.open_session("other")
    with pytest.raises(RpcFailure) as caught:
        other.allocate_range(pool.pool_id, int(block), 1)
    assert caught.value.status == "in_use"
    attachment.shared.set_word(3, 5)
    assert ring.wait(1).kind == DONE
    wait_until(lambda: state_of(client, pool, block) == pb.BLOCK_FREE, "the block free")
    other.allocate_range(pool.pool_id, int(block), 1)
    other.close()


def test_a_wait_of_one_session_holds_no_blocks_of_others(client, attach, pool):
    """While a's step waits, b frees blocks and gets the very same again, with a worker and without, and ends; the block
    that a's step names stays where it is, though it was freed before b's."""
    a, b, without = (client.open_session(name) for name in ("a", "b", "without"))
    waiter = attach(a)
    [named, other] = a.allocate(pool.pool_id, 2)
    ring = waiting_step(waiter, pool, [named], a.epoch)
    a.free(pool.pool_id, [named])
    worker = attach(b)
    b_ring = Ring(worker.shared)
    for i in range(5):
        for session in (b, without):
            blocks = session.allocate(pool.pool_id, 4)
            assert named not in blocks
            if session is b:
                b_ring.post(1, i, zero_blocks(pool.pool_id, blocks, session.epoch))
                assert b_ring.wait(i).kind == DONE
            session.free(pool.pool_id, blocks)
            wait_until(lambda: all(state_of(client, pool, block) == pb.BLOCK_FREE for block in blocks), "they are free")
            first = int(min(blocks))
            assert list(session.allocate_range(pool.pool_id, first, 1)) == [first]
            session.free(pool.pool_id, [first])
        a.free(pool.pool_id, [other])  # behind the first: it may have been named as well
        [other] = a.allocate(pool.pool_id, 1)
    worker.close()
    b.close()
    wait_until(lambda: {s.name for s in client.list_sessions()} == {"a", "without"}, "b gone")
    assert state_of(client, pool, named) == pb.BLOCK_QUARANTINED
    assert ring.take() is None and waiter.shared.word(512) == 0
    with pytest.raises(RpcFailure) as caught:
        without.allocate_range(pool.pool_id, int(named), 1)
    assert caught.value.status == "in_use"
    waiter.shared.set_word(3, 5)
    assert ring.wait(1).kind == DONE
    wait_until(lambda: state_of(client, pool, named) == pb.BLOCK_FREE, "the block free")
    without.close()
    a.close()


def test_blocks_of_a_dead_worker_come_back(client, attach, pool):
    """Its session ends while a step of it waits for what nobody will signal any more."""
    session = client.open_session("short")
    attachment = attach(session)
    blocks = session.allocate(pool.pool_id, BLOCKS)
    waiting_step(attachment, pool, blocks, session.epoch)
    session.close()
    wait_until(lambda: all(state == pb.BLOCK_FREE for state, _, _ in client.block_states(pool.pool_id)), "blocks free")
    refusal = refusal_and_end(attachment.wire)
    assert refusal.text
    assert attachment.shared.word(512) == wire.POISON
    assert session.ref.session_id not in [s.session_id for s in client.list_sessions()]


def test_a_buffer_goes_when_no_step_uses_it(client, session, attach, pool_name):
    pool = client.create_pool(pool_name, TOKENS, 4, [{"name": "raw", "format": "bf16", "width": 32, "num_layers": 1}])
    user, maker = attach(session), attach(session)
    slots = session.allocate(pool.pool_id, 1)[:1] * TOKENS
    made, chunks = maker.create_buffer(64)
    close_chunks([chunks])
    ring = Ring(user.shared)
    ring.post(1, 1, store(pool.pool_id, slots, session.epoch, made.buffer_id, 64, wait=(3, 5)))
    assert ring.wait(1, (ACCEPTED, REFUSED)).kind == ACCEPTED
    maker.wire.send(wire.RELEASE_BUFFER, 900, wire.BufferBody(made.buffer_id, 0, 0))
    wait_until(lambda: not buffer_there(session, made.buffer_id), "hidden")
    assert client.device().buffer_bytes > 0  # a step of the other worker still uses it

    def hidden():
        ring.post(1, 2, store(pool.pool_id, slots, session.epoch, made.buffer_id, 64, wait=(3, 5)))
        ring.post(1, 3, store(pool.pool_id, slots, session.epoch, made.buffer_id + 1, 64))
        return ring.wait(3).kind == REFUSED and ring.seen[-2].kind == REFUSED
    wait_until(hidden, "hidden from rings")
    user.shared.set_word(3, 5)
    assert ring.wait(1).kind == DONE
    maker.answers(900)
    assert client.device().buffer_bytes == 0
    client.delete_pool(pool.pool_id, force=True)


def buffer_there(session, buffer_id):
    try:
        read_buffer(session, buffer_id, 1)
        return True
    except Exception as error:  # grpc's own
        assert "unknown_buffer" in str(error) or "no buffer" in str(error), error
        return False


def test_a_pool_goes_when_no_step_uses_it(client, session, attach, pool_name):
    attachment, before = attach(session), client.device().pool_bytes
    made = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    bytes_each = client.device().pool_bytes - before
    ring = waiting_step(attachment, made, session.allocate(made.pool_id, 1), session.epoch)
    deleting = client.rpc.DeletePool.future(pb.DeletePoolRequest(pool_id=made.pool_id, force=True), timeout=60)
    wait_until(lambda: all(p.pool_id != made.pool_id for p in client.pools()), "gone for everybody")
    with pytest.raises(Refused) as caught:
        attachment.map_pool(pool_name)
    assert caught.value.status == "unknown_pool"
    again = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])  # the name is free
    assert client.device().pool_bytes == before + 2 * bytes_each and not deleting.done()
    attachment.shared.set_word(3, 5)
    deleting.result()
    assert client.device().pool_bytes == before + bytes_each
    assert ring.wait(1).kind == DONE
    client.delete_pool(again.pool_id)
    assert client.device().pool_bytes == before


def test_the_daemon_ends_while_a_pool_waits_to_go(start_daemon, pool_name):
    """The step's wait is over with the daemon, and so is the deletion's."""
    daemon = start_daemon("--drain-timeout-ms", "200")
    client = Client(f"unix:{daemon.socket}")  # which the end of the daemon leaves open
    session = client.open_session()
    made = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    with Attachment(client.info().attach_socket, session.ref) as attachment:
        waiting_step(attachment, made, session.allocate(made.pool_id, 1), session.epoch)
        deleting = client.rpc.DeletePool.future(pb.DeletePoolRequest(pool_id=made.pool_id, force=True), timeout=60)
        wait_until(lambda: not client.pools(), "gone for everybody")
        daemon.stop()
        deleting.result()
    client.close()


def test_a_worker_dies_with_a_step_of_a_pool_that_goes(client, session, attach, pool_name):
    """Whoever deletes it is answered all the same, and before the step's deadline."""
    attachment, before = attach(session), client.device().pool_bytes
    made = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    waiting_step(attachment, made, session.allocate(made.pool_id, 1), session.epoch)
    deleting = client.rpc.DeletePool.future(pb.DeletePoolRequest(pool_id=made.pool_id, force=True), timeout=20)
    wait_until(lambda: all(p.pool_id != made.pool_id for p in client.pools()), "gone for everybody")
    attachment.close()
    deleting.result()
    assert client.device().pool_bytes == before


# ---- ends ----------------------------------------------------------------------------------------------------------


def test_the_session_ends(client, attach):
    session = client.open_session("short")
    attachments = [attach(session) for _ in range(3)]
    close_chunks([attachments[0].create_buffer(100)[1]])
    session.close()
    for attachment in attachments:
        refusal = refusal_and_end(attachment.wire)
        assert refusal.text == "closed by CloseSession"
        status = attachment.shared.status()
        assert (status.state, status.reason.text) == (wire.OVER, b"closed by CloseSession")
        wait_until(lambda shared=attachment.shared: shared.word(512) == wire.POISON, "words poisoned")
        attachment.shared.set_word(0, 5)
        assert attachment.shared.word(0) == 5


def test_the_scheduler_dies(client, attach):
    session = client.open_session("short")
    attachment = attach(session)
    session.abandon()
    message = attachment.wait_event(wire.ENDED)
    assert wire.STATUS_MAP[message.body.status][0] == "cancelled"


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from support import attach_wire as wire
from support.stubs import pb
ref = pb.SessionRef(session_id=int(sys.argv[3]), secret=bytes.fromhex(sys.argv[4]))
attachment = wire.Attachment(sys.argv[2], ref)
for _ in range(3):
    attachment.create_buffer(1000)
attachment.map_pool(sys.argv[5])
attachment.wire.send(wire.MAP_POOL, 99, wire.PoolName(sys.argv[5].encode()))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_worker_is_killed(client, session, path, pool, pool_name):
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, os.path.dirname(os.path.dirname(__file__)), path,
                                 str(session.ref.session_id), session.ref.secret.hex(), pool_name],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        assert all(worker.stdout.readline() == b"ready\n" for worker in workers)
        assert {a.peer_pid for a in mine(client, session)} == {worker.pid for worker in workers}
        workers[0].kill()
        wait_until(lambda: [a.peer_pid for a in mine(client, session)] == [workers[1].pid], "the dead one gone")
        assert client.device().state == pb.DEVICE_SERVING and client.device().restarts == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    wait_until(lambda: not mine(client, session), "both gone")
    assert client.device().buffer_bytes == 0
    session.allocate(pool.pool_id, 1)


# Where a worker may die: what it does, then kill -9.
DYING = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from support import attach_wire as wire
from support.attach_ring import ACCEPTED, Ring, zero_blocks
from support.stubs import pb
path, point, pool_id, epoch, blocks = sys.argv[2], sys.argv[5], int(sys.argv[7]), int(sys.argv[8]), [int(sys.argv[9])]
ref = pb.SessionRef(session_id=int(sys.argv[3]), secret=bytes.fromhex(sys.argv[4]))
name = wire.PoolName(sys.argv[6].encode())

def die(at):
    if at == point:
        os.kill(os.getpid(), signal.SIGKILL)

connection = wire.WireSocket(path)
die("connected")
connection.send(wire.ATTACH, 1, wire.hello(ref))
die("asked")
connection.receive().close()
die("answered")
connection.close()
attachment = wire.Attachment(path, ref)
die("attached")
attachment.wire.send(wire.MAP_POOL, 50, name)
die("mapping")
attachment.answers(50)
attachment.wire.send(wire.CREATE_BUFFER, 51, wire.BufferBody(0, 1 << 20, 0))
die("making a buffer")
attachment.answers(51)
fd = os.memfd_create("worker", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 4096)
__import__("fcntl").fcntl(fd, 1033, 7)
attachment.wire.send(wire.IMPORT_BUFFER, 52, wire.Import(wire.MEMFD, 0, 4096, 0, 4096), [fd])
die("importing")
buffer = attachment.answers(52)[0].body
ring = Ring(attachment.shared)
ring.post(1, 1, zero_blocks(pool_id, blocks, epoch, signal=(512, 1)))
die("step posted")
ring.wait(1)
ring.post(1, 2, zero_blocks(pool_id, blocks, epoch, wait=(3, 5), signal=(512, 2)))
ring.wait(2, (ACCEPTED,))
die("step waiting")
attachment.wire.send(wire.RELEASE_BUFFER, 53, wire.BufferBody(buffer.buffer_id, 0, 0))
die("releasing")
for number in range(100):
    attachment.wire.send(wire.MAP_POOL, 100 + number, name)
    if number == 3:
        die("asking for more")
"""
POINTS = ("connected", "asked", "answered", "attached", "mapping", "making a buffer", "importing", "step posted",
          "step waiting", "releasing", "asking for more")


@host_only
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_dies_at(client, path, pool, pool_name, point):
    """Another worker of its session, and the blocks, don't care."""
    session = client.open_session("theirs")
    other = Attachment(path, session.ref)
    [block] = session.allocate(pool.pool_id, 1)
    before = client.device().buffer_bytes
    ended = subprocess.run([sys.executable, "-c", DYING, os.path.dirname(os.path.dirname(__file__)), path,
                            str(session.ref.session_id), session.ref.secret.hex(), point, pool_name,
                            str(pool.pool_id), str(session.epoch), str(block)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    wait_until(lambda: len(mine(client, session)) == 1, "it is gone")
    assert client.device().buffer_bytes == before and client.device().restarts == 0
    ring = Ring(other.shared)
    ring.post(1, 1, zero_blocks(pool.pool_id, [block], session.epoch))
    assert ring.wait(1).kind == DONE
    session.free(pool.pool_id, [block])
    wait_until(lambda: state_of(client, pool, block) == pb.BLOCK_FREE, "the block free")
    session.close()
    other.close()


def test_nothing_leaks(client, session, path, pool, pool_name, daemon):
    """Attach, use, detach, many times: descriptors, maps and memory are the same afterwards."""
    def once(i):
        with Attachment(path, session.ref) as attachment:
            if i % 10 == 0:
                close_chunks(attachment.map_pool(pool_name)[1])
                close_chunks([attachment.create_buffer(4096)[1]])

    def used():
        return [(len(os.listdir(f"/proc/{pid}/fd")), open(f"/proc/{pid}/maps").read().count("kvpool-"))
                for pid in (daemon.pid, *daemon.executor_pids())]
    once(0)
    wait_until(lambda: not mine(client, session), "gone")
    before = used()
    for i in range(int(os.environ.get("KVPOOL_TEST_ATTACHES", "500"))):
        once(i)
    wait_until(lambda: not mine(client, session), "gone")
    wait_until(lambda: used() <= before, f"{before}, now {used()}")


# ---- executors that do not do what they should ---------------------------------------------------------------------


@pytest.fixture
def start_fake(start_daemon, monkeypatch):
    """A daemon whose executor does `rings` with a worker's ring; see tests/unit/fake_executor.c."""
    def start(rings):
        monkeypatch.setenv("FAKE_EXECUTOR_RINGS", rings)
        daemon = start_daemon(devices=("cuda:0",), executor=fake_executor_path(), device_memory="0")
        client = daemon.client()
        return daemon, client, client.open_session()
    return start


def test_an_executor_that_refuses_a_ring(start_fake):
    daemon, client, session = start_fake("refuse")
    before = open_descriptors(daemon)
    for _ in range(3):
        with pytest.raises(Refused) as caught:
            Attachment(client.info().attach_socket, session.ref)
        assert (caught.value.status, caught.value.text) == ("busy", "no room for a ring")
    wait_until(lambda: not mine(client, session) and open_descriptors(daemon) == before, "nothing left")


def test_an_executor_that_dies_of_a_ring(start_fake):
    daemon, client, session = start_fake("die")
    with pytest.raises(Refused) as caught:
        Attachment(client.info().attach_socket, session.ref)
    assert caught.value.status == "device_lost"
    wait_until(lambda: not mine(client, session), "nothing left")
    wait_until(lambda: client.device("cuda:0").state == pb.DEVICE_SERVING, "serving again")
    assert daemon.process.poll() is None


def test_an_executor_that_answers_late(start_fake):
    """A worker goes, and then its session, while the executor has not said yet that it has the ring."""
    daemon, client, session = start_fake("late")
    path, before = client.info().attach_socket, open_descriptors(daemon)
    for _ in range(2):
        connection = WireSocket(path)
        connection.send(wire.ATTACH, 1, hello(session.ref))
        wait_until(lambda: [a.state for a in mine(client, session)] == [pb.ATTACHMENT_ATTACHING], "attaching")
        connection.close()
        wait_until(lambda: not mine(client, session), "gone")
    connection = WireSocket(path)
    connection.send(wire.ATTACH, 1, hello(session.ref))
    wait_until(lambda: mine(client, session), "attaching")
    session.close()
    refusal = refusal_and_end(connection)
    assert (refusal.status, refusal.text) == ("unknown_session", "closed by CloseSession")
    wait_until(lambda: not client.list_sessions() and open_descriptors(daemon) == before, "nothing left")


def test_an_executor_that_gives_a_ring_up(start_fake):
    daemon, client, session = start_fake("fail")
    with Attachment(client.info().attach_socket, session.ref) as attachment:
        ended = attachment.wait_event(wire.ENDED)
        assert ended.body.text.decode() == f"nonsense in ring {attachment.welcome.attachment_id}"
    wait_until(lambda: not mine(client, session), "gone")
    assert daemon.process.poll() is None and client.device("cuda:0").restarts == 0


# ---- the executor dies ---------------------------------------------------------------------------------------------


@host_only
def test_a_worker_outlives_its_executor(start_daemon, pool_name):
    daemon = start_daemon()
    client = daemon.client()
    pool = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    session, path = client.open_session(), client.info().attach_socket
    blocks = session.allocate(pool.pool_id, 4)
    with Attachment(path, session.ref) as attachment:
        _, memories = attachment.map_pool(pool_name)
        view = np.frombuffer(mmap.mmap(memories[0][0][0], memories[0][0][1], prot=mmap.PROT_READ), np.uint8)
        session.store_rows(pb.RegionRef(pool_id=pool.pool_id, region=0, layer=0),
                           random_rows(np.random.default_rng(1), V41, TOKENS),
                           np.arange(TOKENS) + blocks[0] * TOKENS)
        contents = view.copy()
        assert contents.any()
        data = os.urandom(4096)
        fd = make_memfd(4096, data=data)
        imported = attachment.import_buffer(fd, 4096)
        made, chunks = attachment.create_buffer(100)
        waiting_step(attachment, pool, blocks[1:2], session.epoch)
        attachment.shared.set_word(7, 99)
        old = attachment.shared
        kill_executor(client)

        lost = attachment.wait_event(wire.DEVICE_LOST)
        assert wire.STATUS_MAP[lost.body.status][0] == "device_lost" and DEVICE in lost.body.text.decode()
        status = old.status()
        assert (status.state, status.generation, status.reason.text) == (wire.LOST, 1, lost.body.text)
        assert {old.word(w) for w in range(512, 1024)} == {wire.POISON}
        assert old.word(7) == 99  # the worker's own
        restored = attachment.wait_event(wire.DEVICE_RESTORED)
        attachment.shared = new = wire.Shared(restored.fds)
        assert restored.body.generation == 2 and restored.body.attachment_id == attachment.welcome.attachment_id
        assert (new.status().state, new.status().generation) == (wire.SERVING, 2)
        assert old.status().state == wire.LOST
        assert not any(new.timelines[:])

        assert np.array_equal(view, contents)
        ring = Ring(new)
        ring.post(1, 1, zero_blocks(pool.pool_id, blocks[:1], session.epoch, signal=(513, 3)))
        assert ring.wait(1).kind == DONE and new.word(513) == 3
        assert not view.any()
        assert read_buffer(session, imported.buffer_id, 4096) == data
        assert len(read_buffer(session, made.buffer_id, 100)) == 100
        session.free(pool.pool_id, blocks)
        wait_until(lambda: all(state == pb.BLOCK_FREE for state, _, _ in client.block_states(pool.pool_id)), "all free")
        del view
        old.close()
        close_chunks(memories + [chunks])
        os.close(fd)


def test_attaching_while_the_executor_is_away(start_daemon):
    daemon = start_daemon()
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    with Attachment(path, session.ref) as attachment:
        for _ in range(3):
            kill_executor(client)
            attachment.wait_event(wire.DEVICE_LOST)
            if client.device().state != pb.DEVICE_SERVING:
                try:
                    Attachment(path, session.ref).close()
                except Refused as refusal:
                    assert refusal.status in ("device_lost", "busy")
            attachment.wait_event(wire.DEVICE_RESTORED).close()
        session.close()
        attachment.wait_event(wire.ENDED)
    assert not client.list_sessions()


def test_a_lane_that_makes_no_sense(start_daemon):
    """The log names who it was; a worker that comes again and again is worth as many lines each time."""
    daemon = start_daemon()
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    for _ in range(3):
        with Attachment(path, session.ref) as attachment:
            ring = Ring(attachment.shared)
            ring.post_record(struct.pack("<QQIIQ", 77, 0, 1, 0, 0))
            assert "makes no sense" in attachment.wait_event(wire.ENDED).body.text.decode()
        number = attachment.welcome.attachment_id
        wait_until(lambda number=number: not mine(client, session) and
                   f" detached attachment={number} " in daemon.log, "gone")
        lines = [line for line in daemon.log.splitlines() if re.search(rf"\battachment={number}\b", line)]
        assert len(lines) == 3, lines
        assert " attached " in lines[0]
        assert [line for line in lines if " command_lane_corrupt " in line]
        detached, = (line for line in lines if " warning detached " in line)
        assert f"session={session.ref.session_id} " in detached
        assert f" pid={os.getpid()} uid={os.getuid()} " in detached and 'reason="ring: command 0' in detached
    client.open_session()


# ---- the daemon ends -----------------------------------------------------------------------------------------------


def test_the_daemon_ends(start_daemon):
    """A step that waits for its worker doesn't keep it longer than any other may."""
    daemon = start_daemon("--drain-timeout-ms", 200)
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    pool = client.create_pool("p", TOKENS, BLOCKS, [KV])
    attachment = Attachment(path, session.ref)
    ring = waiting_step(attachment, pool, session.allocate(pool.pool_id, 1), session.epoch)
    silent = WireSocket(path)
    daemon.process.send_signal(signal.SIGTERM)
    assert refusal_and_end(silent).status == "shutting_down"
    assert wire.STATUS_MAP[attachment.wait_event(wire.ENDED).body.status][0] == "shutting_down"
    assert attachment.shared.status().state == wire.OVER
    daemon.process.wait(60)
    assert attachment.shared.word(512) == wire.POISON
    del ring
    attachment.close()
    assert "drain_timeout steps=0 rings=1" in daemon.log
    daemon.stop()
    assert not os.path.exists(path)


def status_name(error):
    return wire.STATUS_MAP[error.status][0]


def test_the_daemon_drains(start_daemon):
    """Steps that were accepted go on, later ones are refused, and then everybody is told."""
    daemon = start_daemon("--drain-timeout-ms", 120000)
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    pool = client.create_pool("p", TOKENS, BLOCKS, [KV])
    busy, idle = Attachment(path, session.ref), Attachment(path, session.ref)
    blocks = session.allocate(pool.pool_id, 1)
    ring, idle_ring = waiting_step(busy, pool, blocks, session.epoch), Ring(idle.shared)
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: " draining steps=0 sessions=1 workers=2" in daemon.log, "draining said in the log")

    tags = itertools.count(2)

    def refusal(on):
        tag = next(tags)
        on.post(1, tag, zero_blocks(pool.pool_id, blocks, session.epoch))
        answer = on.wait(tag, (ACCEPTED, REFUSED))  # the former: the executor has not been told yet
        return status_name(answer.error) if answer.kind == REFUSED else None
    assert wait_until(lambda: refusal(ring), "a step refused") == "shutting_down"
    assert wait_until(lambda: refusal(idle_ring), "a step refused") == "shutting_down"
    assert daemon.process.poll() is None and busy.shared.status().state == wire.SERVING
    busy.shared.set_word(3, 5)
    assert ring.wait(1).kind == DONE
    for attachment in (busy, idle):
        assert status_name(attachment.wait_event(wire.ENDED).body) == "shutting_down"
    assert daemon.process.wait(60) == 0
    assert busy.shared.word(512) in (1, wire.POISON)  # its signal, and what all words get in the end
    assert "drain_timeout" not in daemon.log
    busy.close()
    idle.close()


def test_the_executor_dies_while_the_daemon_drains(start_daemon):
    daemon = start_daemon("--drain-timeout-ms", 120000)
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    pool = client.create_pool("p", TOKENS, BLOCKS, [KV])
    attachment = Attachment(path, session.ref)
    executor = client.device().executor_pid
    waiting_step(attachment, pool, session.allocate(pool.pool_id, 1), session.epoch)
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: " draining steps=0" in daemon.log, "draining said in the log")
    os.kill(executor, signal.SIGKILL)
    assert status_name(attachment.wait_event(wire.ENDED).body) == "shutting_down"
    assert daemon.process.wait(60) == 0
    assert "drain_timeout" not in daemon.log
    attachment.close()


def test_a_path_that_is_taken(start_daemon, tmp_path):
    path = tmp_path / "workers"
    first = start_daemon("--attach-socket", path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    second = start_daemon("--attach-socket", path, wait=False)
    assert second.process.wait(60) == 1
    assert f"pid {first.pid}, holds" in second.log and str(path) in second.log
    first.process.kill()
    first.process.wait()
    third = start_daemon("--attach-socket", path, "--socket-mode", "0600")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with Attachment(path, third.client().open_session().ref):
        pass
    taken = tmp_path / "file"
    taken.write_text("mine")
    fourth = start_daemon("--attach-socket", taken, wait=False)
    assert fourth.process.wait(60) == 1
    assert "is not a socket" in fourth.log and taken.read_text() == "mine"


def test_no_descriptors_left(start_daemon):
    """A worker's are of the budget: what it may not have is refused, and nothing else suffers."""
    daemon = start_daemon("--connections-max", 16, descriptors=460)
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    made = []
    with pytest.raises(Refused) as caught:
        for _ in range(64):
            made.append(Attachment(path, session.ref))
    assert caught.value.status == "busy" and "descriptors" in caught.value.text
    # 128 are the daemon's, 8 the device's, 2 each connection's: what is left is the workers'.
    assert len(made) == (460 - 128 - 8 - 2 * 16) // WORKER_DESCRIPTORS
    for attachment in made:
        attachment.close()
    wait_until(lambda: not mine(client, session), "gone")
    Attachment(path, session.ref).close()


def test_ipc_handles_are_for_some_uids_alone(start_daemon):
    """Only root can become somebody else to try."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    daemon = start_daemon("--ipc-uid", 12345, "--socket-mode", "0666")
    os.chmod(daemon.directory, 0o755)
    client = daemon.client()
    session, path = client.open_session(), client.info().attach_socket
    taken = "invalid_argument" if ON_GPU else "unimplemented"  # and looked at: it is no handle
    for uid, status in ((0, taken), (12345, taken), (12346, "permission_denied")):
        os.seteuid(uid)
        try:
            with Attachment(path, session.ref) as attachment:
                told = [a for a in mine(client, session) if a.peer_uid == uid]
                assert len(told) == 1
                with pytest.raises(Refused) as caught:
                    attachment.import_buffer(-1, 4096, kind=wire.IPC_HANDLE)
        finally:
            os.seteuid(0)
        assert caught.value.status == status, caught.value
