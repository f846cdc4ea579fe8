"""The gRPC layer by itself: tests/unit/rpc_echo_server.c, a method of each shape, seen from Python's grpcio."""
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from support.daemon import build_dir
from support.errors import failure_of
from support.process import is_running, wait_until
from support.stubs import SERVICE, pb, pb_grpc

MIB = 1 << 20
MESSAGE_BYTES_MAX = 4 * MIB  # proto/limits.h
STEP_FAILS = 2**64 - 1       # these two: on_steps of the server
STEP_NEVER_READS_ON = 0
BOUNDED_BYTES = 200 * MIB     # of the whole server, while gigabytes pass through it
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Server:
    def __init__(self, directory, mode="660", connections_max=64, lock="lock", umask=0o022, wait=True):
        self.socket = Path(directory) / "sock"
        self.lock = Path(directory) / lock
        self.log = open(Path(directory) / "log", "ab")
        program = build_dir() / "tests" / "unit" / "rpc_echo_server"
        # AddressSanitizer keeps 256 MiB of freed memory back unless told not to, and memory is measured here.
        sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=16"
        self.process = subprocess.Popen([str(program), str(self.socket), mode, str(self.lock), str(connections_max)],
                                        stdout=subprocess.PIPE, stderr=self.log, text=True, umask=umask,
                                        env=dict(os.environ, ASAN_OPTIONS=sanitizer))
        self.channels = []
        if wait:
            assert self.process.stdout.readline() == "ready\n"

    @property
    def pid(self):
        return self.process.pid

    def channel(self, **options):
        # Channels of one process share a connection unless told not to.
        arguments = UNLIMITED + [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(f"unix:{self.socket}", options=arguments, **options)
        self.channels.append(channel)
        return channel

    def stub(self, **options):
        return pb_grpc.KvpoolStub(self.channel(**options))

    def sessions(self):
        return self.stats_stub.ListSessions(pb.ListSessionsRequest(), timeout=60).sessions

    @property
    def stats_stub(self):
        if not hasattr(self, "_stats_stub"):
            self._stats_stub = self.stub()
        return self._stats_stub

    def counters(self, method):
        """(messages, half-closes, calls closed) since the server started."""
        for info in self.sessions():
            if info.name == method:
                return info.session_id, info.steps_done, info.steps_refused
        raise KeyError(method)

    def open_calls(self):
        return self.sessions()[0].buffers - 1  # the question itself is one

    def reset_peak(self):
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self):
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM")

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stop(self):
        for channel in self.channels:
            channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=60)
        self.log.close()
        log = Path(self.log.name).read_text()
        assert self.process.returncode == 0, log
        assert output == "stopped\n"
        assert not self.socket.exists() and not self.lock.exists()
        assert "ERROR" not in log, log  # of a sanitizer or valgrind


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Server(tmp_path_factory.mktemp("rpc"))
    yield running
    running.stop()


@pytest.fixture
def stub(server):
    return server.stub()


@pytest.fixture
def start_server(tmp_path):
    running = []

    def start(**options):
        running.append(Server(tmp_path, **options))
        return running[-1]

    yield start
    for one in running:
        if one.process.returncode is None:
            one.stop()


def failure(call, *arguments, **options):
    with pytest.raises(grpc.RpcError) as raised:
        result = call(*arguments, timeout=60, **options)
        list(result)  # a stream fails when it is read
    return failure_of(raised.value)


def raw_unary(server, method, payload):
    return failure(server.channel().unary_unary(f"/{SERVICE}/{method}"), payload)


class Requests:
    """A request stream that is fed step by step and half-closed by end()."""

    def __init__(self, *messages):
        self.messages = list(messages)
        self.changed = threading.Condition()
        self.ended = False

    def send(self, message):
        with self.changed:
            self.messages.append(message)
            self.changed.notify()

    def end(self):
        with self.changed:
            self.ended = True
            self.changed.notify()

    def __iter__(self):
        return self

    def __next__(self):
        with self.changed:
            self.changed.wait_for(lambda: self.messages or self.ended)
            if self.messages:
                return self.messages.pop(0)
        raise StopIteration


# ---- shapes


def test_unary_echoes_the_message(stub):
    spec = pb.PoolSpec(name="größe-池", num_blocks=2**32 - 1, placements=["host:0", "", "host:1"],
                       regions=[pb.RegionSpec(name=f"r{i}", num_layers=i, note="n" * i) for i in range(40)])
    request = pb.CreatePoolRequest(spec=spec)
    pool = stub.CreatePool(request, timeout=60)
    assert pool.spec == spec
    assert pool.bytes_per_placement == request.ByteSize()


def test_server_stream_stays_open_until_cancelled(server, stub):
    closed = server.counters("OpenSession")[2]
    events = stub.OpenSession(pb.OpenSessionRequest(name="x"))
    assert [next(events).opened.epoch for _ in range(3)] == [0, 1, 2]
    assert server.counters("OpenSession")[2] == closed
    events.cancel()
    wait_until(lambda: server.counters("OpenSession")[2] == closed + 1, "on_closed after cancel")


def test_messages_queued_before_a_failure_arrive_first(stub):
    events = stub.OpenSession(pb.OpenSessionRequest(name="closing"), timeout=60)
    seen = []
    with pytest.raises(grpc.RpcError) as raised:
        for event in events:
            seen.append(event.opened.epoch)
    assert seen == [0, 1, 2]
    assert failure_of(raised.value).status == "shutting_down"


def test_messages_queued_before_a_finish_arrive_first(server, stub):
    closed = server.counters("DumpBlocks")[2]
    chunks = list(stub.DumpBlocks(pb.DumpBlocksRequest(count=300), timeout=60))
    assert [chunk.offset_bytes for chunk in chunks] == [i * 65536 for i in range(300)]
    assert all(len(chunk.data) == 65536 for chunk in chunks)
    wait_until(lambda: server.counters("DumpBlocks")[2] == closed + 1, "on_closed after finish")


def test_client_stream_half_closes(server, stub):
    before = server.counters("WriteBuffer")
    sizes = [0, 1, 65535, MIB, 3]
    reply = stub.WriteBuffer((pb.WriteBufferRequest(data=bytes(size)) for size in sizes), timeout=60)
    assert reply.bytes_written == sum(sizes)
    wait_until(lambda: server.counters("WriteBuffer") == (before[0] + 5, before[1] + 1, before[2] + 1), "counters")


def test_client_stream_without_messages(stub):
    assert stub.WriteBuffer(iter(()), timeout=60).bytes_written == 0


def test_client_stream_answered_early(stub):
    requests = Requests(pb.StoreRowsRequest())
    assert stub.StoreRows(requests, timeout=60).step_id == 1
    requests.end()


def test_bidi_echoes_in_order_and_half_closes(server, stub):
    before = server.counters("Steps")
    requests = Requests()
    events = stub.Steps(requests, timeout=60)
    for step_id in range(1, 200):
        requests.send(pb.StepRequest(step_id=step_id))
        assert next(events).done.step_id == step_id
    requests.end()
    assert list(events) == []
    assert events.code() == grpc.StatusCode.OK
    wait_until(lambda: server.counters("Steps") == (before[0] + 199, before[1] + 1, before[2] + 1), "counters")


def test_bidi_failed_by_the_server(stub):
    requests = Requests(pb.StepRequest(step_id=7), pb.StepRequest(step_id=STEP_FAILS))
    events = stub.Steps(requests, timeout=60)
    assert next(events).done.step_id == 7
    with pytest.raises(grpc.RpcError) as raised:
        next(events)
    requests.end()
    assert failure_of(raised.value).status == "busy"


def test_no_message_comes_before_read_next(server, stub):
    before = server.counters("Steps")
    requests = Requests(pb.StepRequest(step_id=STEP_NEVER_READS_ON), pb.StepRequest(step_id=1))
    events = stub.Steps(requests)
    assert next(events).done.step_id == STEP_NEVER_READS_ON
    stub.CreatePool(pb.CreatePoolRequest(), timeout=60)  # a round trip later on the same connection
    assert server.counters("Steps") == (before[0] + 1, before[1], before[2])
    events.cancel()
    requests.end()
    wait_until(lambda: server.counters("Steps") == (before[0] + 1, before[1], before[2] + 1), "on_closed")


def test_two_hundred_calls_at_once(server, stub):
    before = server.counters("RunStep")
    held = [stub.RunStep.future(pb.StepRequest(step_id=i)) for i in range(100)]
    streams = [stub.OpenSession(pb.OpenSessionRequest(name=str(i))) for i in range(100)]
    for stream in streams:
        assert next(stream).opened.epoch == 0
    wait_until(lambda: server.counters("RunStep")[0] == before[0] + 100, "held calls arrived")
    assert server.open_calls() >= 200
    with ThreadPoolExecutor(16) as pool:
        names = [f"p{i}" for i in range(400)]
        replies = pool.map(lambda name: stub.CreatePool(pb.CreatePoolRequest(spec=pb.PoolSpec(name=name))), names)
        assert [reply.spec.name for reply in replies] == names
    for call in held + streams:
        call.cancel()
    wait_until(lambda: server.counters("RunStep")[2] == before[2] + 100, "held calls closed")
    wait_until(lambda: server.open_calls() == 0, "no call left")


def test_deadline_ends_a_held_call(server, stub):
    closed = server.counters("RunStep")[2]
    with pytest.raises(grpc.RpcError) as raised:
        stub.RunStep(pb.StepRequest(), timeout=0.2)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: server.counters("RunStep")[2] == closed + 1, "on_closed after the deadline")


# ---- amounts


def test_gigabyte_both_ways_in_bounded_memory(server, stub):
    server.reset_peak()
    data = bytes(MIB)
    assert stub.WriteBuffer(pb.WriteBufferRequest(data=data) for _ in range(1024)).bytes_written == 1024 * MIB
    offset = 0
    for chunk in stub.ReadBuffer(pb.ReadBufferRequest(bytes=1024 * MIB)):
        assert chunk.offset_bytes == offset
        offset += len(chunk.data)
    assert offset == 1024 * MIB
    assert server.peak_bytes() < BOUNDED_BYTES


def test_slow_reader_holds_up_nobody_and_fills_no_memory(server, stub):
    closed = server.counters("ReadBuffer")[2]
    server.reset_peak()
    chunks = server.stub().ReadBuffer(pb.ReadBufferRequest(bytes=2048 * MIB))
    assert next(chunks).offset_bytes == 0
    for i in range(200):
        assert stub.CreatePool(pb.CreatePoolRequest(spec=pb.PoolSpec(num_blocks=i)), timeout=60).spec.num_blocks == i
    assert server.peak_bytes() < BOUNDED_BYTES
    assert next(chunks).offset_bytes == MIB
    assert server.counters("ReadBuffer")[2] == closed
    chunks.cancel()
    wait_until(lambda: server.counters("ReadBuffer")[2] == closed + 1, "on_closed with sends queued")


# ---- errors


def test_failure_carries_its_detail(stub):
    for number, code in ((1, grpc.StatusCode.INVALID_ARGUMENT), (9, grpc.StatusCode.RESOURCE_EXHAUSTED),
                         (17, grpc.StatusCode.UNAUTHENTICATED), (30, grpc.StatusCode.INTERNAL)):
        failed = failure(stub.DescribePool, pb.DescribePoolRequest(pool_id=number, name="größe 100%"))
        assert failed.code == code
        assert failed.text == "größe 100%"
        assert (failed.refusal.op, failed.refusal.array) == (3, "slots")
        assert (failed.refusal.position, failed.refusal.value) == (17, -5)
        assert failed.refusal.message == "größe 100%"


def test_text_cut_within_a_character_is_still_utf8(stub):
    # 383 bytes fit, the last one is half an "é"
    failed = failure(stub.DescribePool, pb.DescribePoolRequest(pool_id=1, name="é" * 300))
    assert failed.refusal.message == "é" * 191 + "?"
    assert failed.text == failed.refusal.message


@pytest.mark.parametrize("method, payload, field, position, value", [
    ("CreatePool", b"\xff", "", 0, 0),
    ("CreatePool", b"\x0a\x05\x0a\x01", "", 0, 0),                                 # shorter than it says
    ("CreatePool", b"\x08\x01", "spec", -1, 0),                                    # a number for a message
    ("CreatePool", b"\x0a\x04\x0a\x02\xc3\x28", "name", 0, 0xC3),                  # bad continuation
    ("CreatePool", b"\x0a\x05\x0a\x03a\xc0\x80", "name", 1, 0xC0),                 # overlong NUL
    ("CreatePool", b"\x0a\x05\x0a\x03a\x00b", "name", 1, 0),                       # embedded NUL
    ("CreatePool", b"\x0a\x05\x0a\x03\xed\xa0\x80", "name", 0, 0xED),              # a surrogate
    ("CreatePool", b"\x0a\x06\x0a\x04\xf4\x90\x80\x80", "name", 0, 0xF4),          # past U+10FFFF
    ("CreatePool", b"\x0a\x08\x2a\x01a\x2a\x03bc\xe2", "placements", 2, 0xE2),     # the second of a repeated field
    ("CreatePool", b"\x0a\x06\x32\x04\x32\x02n\x00", "note", 1, 0),                # nested and repeated
    ("CreatePool", b"\x13\x14", "", 0, 0),                                         # a group
    ("RunStep", b"\x32\x02\x0a\x05", "", 0, 0),                                    # inside a oneof
])
def test_malformed(server, method, payload, field, position, value):
    failed = raw_unary(server, method, payload)
    assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
    assert failed.status == "malformed"
    assert failed.refusal.array == field
    if value or field:
        assert failed.refusal.position == position
    if field != "spec":
        assert failed.refusal.value == value


def test_a_malformed_message_ends_a_stream(server):
    before = server.counters("Steps")
    requests = Requests(pb.StepRequest(step_id=5).SerializeToString(), b"\x1a\x01\xff")
    events = server.channel().stream_stream(f"/{SERVICE}/Steps")(requests)
    assert pb.StepEvent.FromString(next(events)).done.step_id == 5
    with pytest.raises(grpc.RpcError) as raised:
        next(events)
    requests.end()
    failed = failure_of(raised.value)
    assert (failed.status, failed.refusal.array) == ("malformed", "placement")
    wait_until(lambda: server.counters("Steps") == (before[0] + 1, before[1], before[2] + 1), "only the good one")


def test_unknown_fields_are_skipped(server):
    channel = server.channel()
    payload = pb.CreatePoolRequest(spec=pb.PoolSpec(name="n")).SerializeToString() + b"\xfa\x07\x03\xff\x00\xff"
    reply = channel.unary_unary(f"/{SERVICE}/CreatePool")(payload, timeout=60)
    assert pb.Pool.FromString(reply).spec.name == "n"


def test_amplification_stops_at_the_arena(server):
    regions = b"\x32\x00" * 1_000_000  # two bytes on the wire, a RegionSpec each
    length = len(regions)
    varint = bytes([length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14])
    server.reset_peak()
    before = server.peak_bytes()
    failed = raw_unary(server, "CreatePool", b"\x0a" + varint + regions)
    assert (failed.code, failed.status) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_large")
    assert server.peak_bytes() - before < 64 * MIB


def test_message_sizes_on_both_sides_of_the_limit(server, stub):
    overhead = len(pb.WriteBufferRequest(data=bytes(MESSAGE_BYTES_MAX - 100)).SerializeToString()) - (
        MESSAGE_BYTES_MAX - 100)
    fits = pb.WriteBufferRequest(data=bytes(MESSAGE_BYTES_MAX - overhead))
    assert fits.ByteSize() == MESSAGE_BYTES_MAX
    assert stub.WriteBuffer(iter([fits, fits]), timeout=60).bytes_written == 2 * len(fits.data)
    large = pb.WriteBufferRequest(data=bytes(MESSAGE_BYTES_MAX - overhead + 1))
    half_closes = server.counters("WriteBuffer")[1]
    assert failure(stub.WriteBuffer, iter([fits, large])).code == grpc.StatusCode.RESOURCE_EXHAUSTED
    array = pb.Array(inline=large.data)
    assert failure(stub.RunStep, pb.StepRequest(arrays=[array])).code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure(stub.Steps, iter([pb.StepRequest(arrays=[array])])).code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.counters("WriteBuffer")[1] == half_closes
    wait_until(lambda: server.open_calls() == 0, "no call left")


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_refused_without_inflating(server, algorithm):
    before_messages = server.counters("WriteBuffer")[0]
    bomb = pb.WriteBufferRequest(data=bytes(256 * MIB))
    server.reset_peak()
    before = server.peak_bytes()
    stub = server.stub(compression=algorithm)
    assert failure(stub.WriteBuffer, iter([bomb])).code == grpc.StatusCode.UNIMPLEMENTED
    failed = failure(stub.RunStep, pb.StepRequest(arrays=[pb.Array(inline=bytes(256 * MIB))]))
    assert failed.code == grpc.StatusCode.UNIMPLEMENTED
    assert server.peak_bytes() - before < 64 * MIB
    assert server.counters("WriteBuffer")[0] == before_messages
    wait_until(lambda: server.open_calls() == 0, "no call left")


@pytest.mark.parametrize("path", [f"/{SERVICE}/NoSuchMethod", "/some.Other/Method", f"/{SERVICE}/" + "x" * 1000])
def test_unknown_methods(server, path):
    failed = failure(server.channel().unary_unary(path), b"abc")
    assert (failed.code, failed.status) == (grpc.StatusCode.UNIMPLEMENTED, "unimplemented")
    assert path[:100] in failed.text
    failed = failure(server.channel().stream_stream(path), iter([b"abc"] * 3))
    assert (failed.code, failed.status) == (grpc.StatusCode.UNIMPLEMENTED, "unimplemented")


def test_health(server):
    check = server.channel().unary_unary("/grpc.health.v1.Health/Check")
    assert check(b"", timeout=60) == b"\x08\x01"
    assert check(b"\x0a\x10" + SERVICE.encode(), timeout=60) == b"\x08\x01"
    assert failure(check, b"\x0a\x05other").code == grpc.StatusCode.NOT_FOUND


# ---- peers and connections


def run_client(server, body, uid=None, **options):
    """A client in a process of its own; it prints "there" when it has got to the end of body, then waits. With a uid it
    becomes that user after its imports: the tests' own folder need not be open to others."""
    program = textwrap.dedent(f"""
        import os, sys, time
        sys.path.insert(0, sys.argv[2])
        import grpc
        from support.stubs import pb, pb_grpc
        if {uid} is not None:
            os.setuid({uid})
        stub = pb_grpc.KvpoolStub(grpc.insecure_channel("unix:" + sys.argv[1]))
        """) + textwrap.dedent(body) + "\nprint('there', flush=True)\ntime.sleep(600)\n"
    tests = str(Path(__file__).resolve().parent.parent)
    client = subprocess.Popen([sys.executable, "-c", program, str(server.socket), tests], stdout=subprocess.PIPE,
                              text=True, **options)
    line = client.stdout.readline()
    while line not in ("there\n", ""):
        client.seen = line.strip()
        line = client.stdout.readline()
    assert line, "the client failed"
    return client


def test_a_killed_client_is_seen(server):
    names = ("RunStep", "OpenSession", "WriteBuffer", "Steps", "ReadBuffer")
    before = {name: server.counters(name) for name in names}
    client = run_client(server, """
        def endless(message):
            yield message
            while True: time.sleep(600)
        calls = [stub.RunStep.future(pb.StepRequest()),
                 stub.WriteBuffer.future(endless(pb.WriteBufferRequest(data=bytes(1000)))),
                 stub.OpenSession(pb.OpenSessionRequest()), stub.Steps(endless(pb.StepRequest(step_id=9))),
                 stub.ReadBuffer(pb.ReadBufferRequest(bytes=1 << 40))]
        for call in calls[2:]: next(call)
        """)
    for name in names:
        wait_until(lambda: server.counters(name)[0] == before[name][0] + 1, f"{name} arrived")
    client.kill()
    client.wait()
    for name in names:
        wait_until(lambda: server.counters(name)[2] == before[name][2] + 1, f"{name} closed")
        assert server.counters(name)[1] == before[name][1], f"{name}: a death looked like a half-close"
    wait_until(lambda: server.open_calls() == 0, "no call left")


def test_a_death_in_an_upload_never_looks_like_its_end(server):
    before = server.counters("WriteBuffer")
    for _ in range(8):
        client = run_client(server, """
            import os, threading
            def endless():
                for i in range(1 << 30):
                    yield pb.WriteBufferRequest(data=bytes(700000))
            threading.Thread(target=lambda: stub.WriteBuffer(endless()), daemon=True).start()
            """)
        arrived = server.counters("WriteBuffer")[0]
        wait_until(lambda: server.counters("WriteBuffer")[0] > arrived + 5, "upload on its way")
        client.kill()
        client.wait()
    wait_until(lambda: server.counters("WriteBuffer")[2] == before[2] + 8, "uploads closed")
    assert server.counters("WriteBuffer")[1] == before[1]


@pytest.mark.slow
def test_a_hung_client_is_found_by_keepalive(server):
    closed = server.counters("OpenSession")[2]
    client = run_client(server, "events = stub.OpenSession(pb.OpenSessionRequest())\nnext(events)")
    client.send_signal(signal.SIGSTOP)
    wait_until(lambda: server.counters("OpenSession")[2] == closed + 1, "keepalive", 120)
    client.kill()
    client.wait()


ASK_WHO_I_AM = """
    info = stub.ListSessions(pb.ListSessionsRequest(), timeout=60).sessions[0]
    print(info.peer_pid, info.peer_uid, flush=True)
    """


def test_peer_is_the_client(server):
    clients = [run_client(server, ASK_WHO_I_AM) for _ in range(3)]
    for client in clients:
        assert client.seen == f"{client.pid} {os.getuid()}"
        client.kill()
        client.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_operator_only_refuses_other_users(start_server, tmp_path):
    server = start_server(mode="666")
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and directory not in (Path("/"), Path("/tmp")):
            directory.chmod(directory.stat().st_mode | 0o011)
    server.stub().DeletePool(pb.DeletePoolRequest(), timeout=60)
    body = ASK_WHO_I_AM + """
    try:
        stub.DeletePool(pb.DeletePoolRequest(), timeout=60)
    except grpc.RpcError as error:
        print(info.peer_uid, error.code(), dict(error.trailing_metadata()).keys(), flush=True)
    """
    client = run_client(server, body, uid=65534,
                        env={"PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)})
    client.kill()
    client.wait()
    assert client.seen == "65534 StatusCode.PERMISSION_DENIED dict_keys(['grpc-status-details-bin'])"


def raw_connection(server):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(server.socket))
    connection.settimeout(60)
    return connection


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 4096,
                                     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200, os.urandom(100_000)])
def test_garbage_ends_only_its_connection(server, stub, garbage):
    connection = raw_connection(server)
    try:
        connection.sendall(garbage)
        while connection.recv(65536):
            pass
    except (ConnectionResetError, BrokenPipeError):
        pass
    connection.close()
    assert stub.CreatePool(pb.CreatePoolRequest(), timeout=60) == pb.Pool(bytes_per_placement=0)


def is_served(connection):
    """Says the preface and hears the server's SETTINGS."""
    try:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        return connection.recv(9) != b""
    except (ConnectionResetError, BrokenPipeError):
        return False


def test_connections_are_limited_and_given_back(start_server):
    server = start_server(connections_max=4)
    before = server.descriptors()
    for _ in range(5):
        connections = [raw_connection(server) for _ in range(4)]
        assert all(is_served(connection) for connection in connections)
        refused = raw_connection(server)
        assert not is_served(refused)
        refused.close()
        for connection in connections:
            connection.close()
        wait_until(lambda: server.descriptors() == before, "connections closed")


def test_descriptors_are_given_back(start_server):
    server = start_server()
    before = server.descriptors()
    for _ in range(100):
        connections = [raw_connection(server) for _ in range(5)]
        for connection in connections:
            connection.close()
    wait_until(lambda: server.descriptors() == before, "as many descriptors as before")


def test_without_descriptors_connections_wait(start_server):
    server = start_server()
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    assert limits[0] == limits[1], "the soft limit was not raised"
    used = {int(number) for number in os.listdir(f"/proc/{server.pid}/fd")}
    lowest_free = min(set(range(len(used) + 1)) - used)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    waiting = raw_connection(server)
    wait_until(lambda: "accept_paused" in Path(server.log.name).read_text(), "the pause")
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    assert is_served(waiting)
    waiting.close()


def numbered(server):
    """The sockets that gRPC holds: their numbers are far above all others."""
    found = []
    for number in os.listdir(f"/proc/{server.pid}/fd"):
        try:
            if int(number) >= 500 and os.readlink(f"/proc/{server.pid}/fd/{number}").startswith("socket:"):
                found.append(int(number))
        except FileNotFoundError:
            pass
    return found


def test_connection_numbers_do_not_come_again(start_server):
    server = start_server()
    seen = set()
    for _ in range(200):
        connection = raw_connection(server)
        number = wait_until(lambda: numbered(server), "the connection's descriptor")
        assert len(number) == 1 and number[0] not in seen
        seen.add(number[0])
        connection.close()
        wait_until(lambda: not numbered(server), "connection closed")


# ---- start and stop


def refusal_to_start(server):
    server.process.wait(timeout=60)
    server.process.stdout.close()
    server.log.close()
    assert server.process.returncode == 1
    return Path(server.log.name).read_text()


def test_second_server_is_refused(start_server):
    first = start_server()
    second = start_server(wait=False)
    assert f"in_use: another daemon, pid {first.pid}, holds" in refusal_to_start(second)
    third = start_server(lock="another", wait=False)
    assert "in_use: another process listens at" in refusal_to_start(third)
    assert first.stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=60).pid == first.pid


def test_restart_after_kill(start_server):
    first = start_server()
    pid = first.stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=60).pid
    first.process.kill()
    first.process.communicate()
    assert first.socket.exists() and not is_running(pid)
    second = start_server()
    assert second.stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=60).pid == second.pid != pid
    assert second.lock.read_text() == f"{second.pid}\n"


def test_starts_and_stops_that_cross(tmp_path):
    """The lock's file goes with its server; whoever is ready is the one at the path, whatever others do meanwhile."""
    program = str(build_dir() / "tests" / "unit" / "rpc_echo_server")

    def life(_):
        ready = 0
        for _ in range(15):
            with subprocess.Popen([program, str(tmp_path / "sock"), "660", str(tmp_path / "lock"), "64"],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  text=True) as process:
                if process.stdout.readline() == "ready\n":
                    ready += 1
                    with grpc.insecure_channel(f"unix:{tmp_path}/sock",
                                               options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                        told = pb_grpc.KvpoolStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
                    assert told.pid == process.pid
                    process.send_signal(signal.SIGTERM)
        return ready
    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(life, range(3))) > 0
    assert not (tmp_path / "sock").exists() and not (tmp_path / "lock").exists()


def test_paths_that_can_not_be(start_server, tmp_path):
    (tmp_path / "sock").write_text("mine")
    assert "exists and is not a socket" in refusal_to_start(start_server(wait=False))
    assert (tmp_path / "sock").read_text() == "mine" and not (tmp_path / "lock").exists()
    (tmp_path / "sock").unlink()
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    assert "allowed are 1 to 107" in refusal_to_start(Server(deep, wait=False))
    assert "No such file or directory" in refusal_to_start(start_server(lock="no/such", wait=False))
    assert "connections_max 1000000000: the hard limit of" in refusal_to_start(
        start_server(connections_max=10**9, wait=False))


@pytest.mark.parametrize("umask", [0o777, 0])
def test_socket_mode_is_exact(start_server, umask):
    server = start_server(mode="660", umask=umask)
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o660


def test_drain_lets_open_calls_go_on_and_refuses_new_ones(start_server):
    server = start_server()
    stub = server.stub()
    requests = Requests(pb.StepRequest(step_id=1))
    events = stub.Steps(requests)
    assert next(events).done.step_id == 1
    health = stub.GetServerInfo  # the same connection
    assert health(pb.GetServerInfoRequest(), timeout=60).pid == server.pid
    check = server.channels[0].unary_unary("/grpc.health.v1.Health/Check")
    server.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: check(b"", timeout=60) == b"\x08\x02", "draining")
    failed = failure(stub.GetServerInfo, pb.GetServerInfoRequest())
    assert (failed.code, failed.status) == (grpc.StatusCode.UNAVAILABLE, "shutting_down")
    assert failure(stub.Steps, iter(())).status == "shutting_down"
    with pytest.raises(ConnectionRefusedError):
        raw_connection(server)
    requests.send(pb.StepRequest(step_id=2))
    assert next(events).done.step_id == 2
    requests.end()
    assert list(events) == []


def test_stop_cancels_what_is_open(start_server):
    server = start_server()
    stub = server.stub()
    requests = Requests(pb.StepRequest(step_id=1))
    events = stub.Steps(requests)
    assert next(events).done.step_id == 1
    chunks = server.stub().ReadBuffer(pb.ReadBufferRequest(bytes=1 << 40))
    next(chunks)
    upload = Requests(pb.WriteBufferRequest(data=b"x"))
    open_calls = [stub.RunStep.future(pb.StepRequest()), stub.WriteBuffer.future(upload)]
    idle = raw_connection(server)
    wait_until(lambda: server.counters("RunStep")[0] == 1 and server.counters("WriteBuffer")[0] == 1, "calls arrived")
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(timeout=60)
    for call in open_calls:
        assert call.exception(timeout=60) is not None
    for stream in (events, chunks):
        with pytest.raises(grpc.RpcError):
            list(stream)
    requests.end()
    upload.end()
    idle.close()
    server.stop()
