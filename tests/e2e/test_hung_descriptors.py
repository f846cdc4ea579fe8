"""Descriptors that workers send and whose close() never returns: whoever sends them hangs a thread that does nothing
else, and everybody goes on."""
import contextlib
import fcntl
import os
import signal
import socket

import pytest

from support import attach_wire as wire
from support.attach_ring import DONE, Ring, zero_blocks
from support.attach_wire import Attachment, Closed, Refused, WireSocket, hello
from support.device import ON_GPU
from support.hung_files import FLUSH, GETATTR, LingeringSocket, SilentFile, stopped
from support.process import wait_until
from support.worker import KV, TOKENS

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
UID_DESCRIPTORS_MAX, PACKET_DESCRIPTORS_MAX = 506, 253
UNIX_PASSRIGHTS = (6, 16)  # the kernel that has it

host_only = pytest.mark.skipif(ON_GPU, reason="a worker brings memory of the host")


@pytest.fixture
def lingering():
    made = LingeringSocket()
    yield made
    made.let_go()


class Scene:
    """A daemon with a session, and a worker that is attached to it."""

    def __init__(self, daemon):
        self.daemon, self.client = daemon, daemon.client()
        self.session = self.client.open_session("hostile")
        self.path = self.client.info().attach_socket
        self.pool = self.client.create_pool("p", TOKENS, 16, [KV])
        self.worker = Attachment(self.path, self.session.ref)

    def check_others_go_on(self):
        """Control calls, somebody else's worker, its memory, and a step of it."""
        other = self.client.open_session("other")
        with Attachment(self.path, other.ref) as worker:
            if not ON_GPU:
                bring_memory(worker)
            ring = Ring(worker.shared)
            ring.post(1, 1, zero_blocks(self.pool.pool_id, other.allocate(self.pool.pool_id, 1), other.epoch))
            assert ring.wait(1).kind == DONE
        other.close()


@pytest.fixture
def scene(start_daemon):
    made = Scene(start_daemon("--socket-mode", "0666"))
    os.chmod(made.daemon.directory, 0o755)
    yield made
    made.worker.close()


def bring_memory(worker):
    fd = os.memfd_create("worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return worker.import_buffer(fd, 4096)
    finally:
        os.close(fd)


def import_body(kind):
    return wire.Import(kind, 0, 4096, 0, 4096)


def receive(connection):
    """Where the other side is closed with something unread the kernel says so, once; what was told before is still there."""
    try:
        return connection.receive()
    except ConnectionResetError:
        return connection.receive()


def end_of(connection):
    """What it is told, and then its end."""
    message = receive(connection)
    assert message.kind in (wire.RESULT, wire.ENDED)
    with pytest.raises(Closed):
        receive(connection)
    return Refused(message.body)


@contextlib.contextmanager
def as_uid(uid):
    """Only root can become somebody else to try."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@host_only
@pytest.mark.parametrize("kind, status", [(wire.MEMFD, "invalid_argument"), (wire.VMM, "invalid_argument"),
                                          (0, "unimplemented")])
def test_memory_that_is_a_lingering_socket(scene, lingering, kind, status):
    with stopped(scene.daemon.pid):
        scene.worker.wire.send(wire.IMPORT_BUFFER, 7, import_body(kind), [lingering.fileno()])
        lingering.close_ours()
    with pytest.raises(Refused) as caught:
        scene.worker.answers(7)
    assert caught.value.status == status
    scene.check_others_go_on()
    bring_memory(scene.worker)  # and so does the one who did it


@pytest.mark.parametrize("kind, count, attached", [(wire.MAP_POOL, 1, True), (wire.IMPORT_BUFFER, 65, True),
                                                   (wire.IMPORT_BUFFER, 253, True), (wire.ATTACH, 1, False),
                                                   (77, 65, False)])
def test_descriptors_that_are_not_wanted(scene, lingering, kind, count, attached):
    with contextlib.closing(WireSocket(scene.path)) as unattached:
        connection = scene.worker.wire if attached else unattached
        with stopped(scene.daemon.pid):
            connection.send(kind, 1, hello(scene.session.ref), [lingering.fileno()] * count)
            lingering.close_ours()
        assert end_of(connection).status == "malformed"
        scene.check_others_go_on()


@pytest.mark.parametrize("before", [[b"x"], [b"x", b"", b""], [b"x"] + [b""] * 6])
def test_descriptors_that_nobody_reads(scene, lingering, before):
    """They are in the socket when it is closed."""
    with contextlib.closing(WireSocket(scene.path)) as connection:
        with stopped(scene.daemon.pid):
            for data in before:
                connection.send_raw(data)
            connection.send_raw(b"", [lingering.fileno()])
            lingering.close_ours()
        assert end_of(connection).status == "malformed"
        scene.check_others_go_on()


def test_a_worker_that_is_gone(scene, lingering):
    with stopped(scene.daemon.pid):
        scene.worker.wire.send(wire.MAP_POOL, 1, b"", [lingering.fileno()])
        lingering.close_ours()
        scene.worker.close()
    scene.check_others_go_on()
    wait_until(lambda: not scene.client.list_sessions()[0].attachments, "the attachment gone")


def test_the_daemon_ends_all_the_same(start_daemon, lingering):
    """Some of the connections are accepted by then, some aren't."""
    daemon = start_daemon()
    path = daemon.client().info().attach_socket
    connections = []
    with stopped(daemon.pid):
        for _ in range(40):
            connections.append(WireSocket(path))
            connections[-1].send(77, 1, b"", [lingering.fileno()])
        lingering.close_ours()
        os.kill(daemon.pid, signal.SIGTERM)
    assert daemon.process.wait(60) == 0, daemon.log
    for connection in connections:
        connection.close()


@host_only
@pytest.mark.parametrize("kind", [wire.MEMFD, wire.VMM])
def test_a_file_whose_server_does_not_answer(scene, kind):
    """Nobody asks the file anything but to close: its size would be waited for, too, and its kind."""
    try:
        file = SilentFile()
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    try:
        with stopped(scene.daemon.pid):
            scene.worker.wire.send(wire.IMPORT_BUFFER, 7, import_body(kind), [file.fileno()])
            file.close_ours()
            file.fall_silent()
        with pytest.raises(Refused) as caught:
            scene.worker.answers(7)
        assert caught.value.status == "invalid_argument"
        wait_until(lambda: FLUSH in file.unanswered, "the file being closed")
        scene.check_others_go_on()
        assert GETATTR not in file.unanswered
    finally:
        file.let_go()


def test_nothing_comes_to_the_executor(scene, lingering):
    """Not by the one socket that a worker and an executor share, either."""
    with socket.socket(fileno=os.dup(scene.worker.shared.completion_event)) as event:
        for data, fds in ((b"x", []), (b"x", [lingering.fileno()])):
            with pytest.raises(BrokenPipeError):
                socket.send_fds(event, [data], fds)


def test_nothing_comes_to_the_grpc_socket(scene, lingering):
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < UNIX_PASSRIGHTS:
        pytest.skip("this kernel can't keep descriptors out of a socket")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(scene.daemon.socket))
        with pytest.raises(PermissionError):
            socket.send_fds(connection, [b"PRI * HTTP/2.0"], [lingering.fileno()])
        connection.send(b"PRI * HTTP/2.0")


@host_only
def test_what_waits_is_bounded(scene, lingering):
    """A uid that fills its share can't come in or send any more; who is attached can ask, and others do everything."""
    asking = Attachment(scene.path, scene.session.ref)
    connections = [WireSocket(scene.path) for _ in range(2)]
    with stopped(scene.daemon.pid), open("/dev/null", "rb") as null:
        connections[0].send(77, 1, b"", [lingering.fileno()] + [null.fileno()] * 252)
        connections[1].send(77, 1, b"", [null.fileno()] * 253)
        lingering.close_ours()
    for connection in connections:
        assert end_of(connection).status == "malformed"
        connection.close()
    with pytest.raises(Refused) as caught:
        bring_memory(scene.worker)
    assert caught.value.status == "busy"
    assert "506 descriptors that uid 0" in caught.value.text and "253 more" in caught.value.text, caught.value
    with contextlib.closing(WireSocket(scene.path)) as connection:
        refusal = end_of(connection)
    assert refusal.status == "busy" and "1 more" in refusal.text, refusal
    with as_uid(12345):
        scene.check_others_go_on()
    asking.create_buffer(10)
    lingering.let_go()

    def let_in():
        try:
            with Attachment(scene.path, scene.session.ref) as worker:
                return bring_memory(worker)
        except (Refused, Closed, BrokenPipeError):
            return None
    wait_until(let_in, "descriptors taken again")
    asking.close()


@host_only
def test_places_come_back(scene):
    """More than there ever are places for, none of which hangs: each is closed, whatever it came with."""
    before = len(os.listdir(f"/proc/{scene.daemon.pid}/fd"))
    with open("/dev/null", "rb") as null:
        for _ in range(40):
            with contextlib.closing(WireSocket(scene.path)) as connection:
                with contextlib.suppress(BrokenPipeError):  # refused already: the last ones are still being closed
                    connection.send(77, 1, b"", [null.fileno()] * 253)
                assert end_of(connection).status in ("malformed", "busy")
    wait_until(lambda: len(os.listdir(f"/proc/{scene.daemon.pid}/fd")) <= before, "all of them closed")
    bring_memory(scene.worker)
