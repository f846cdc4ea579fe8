"""Workers attach on a host that takes its time to give a ring's memory: others are served meanwhile, and the worker, its
session, its executor or the daemon may go before the ring is there."""
import os
import select
import signal

import pytest

from support import attach_wire as wire
from support.attach_ring import DONE, Ring, zero_blocks
from support.attach_wire import Attachment, Closed, Refused, Shared, WireSocket, hello
from support.daemon import held_rings_path
from support.process import wait_until
from support.stubs import pb
from support.worker import KV, TOKENS


class Scene:
    """A daemon whose rings are made at once, or when let_go() has been called after hold()."""

    def __init__(self, daemon, held):
        self.daemon, self.client, self.held = daemon, daemon.client(), held
        self.path = self.client.info().attach_socket
        self.session, self.other = self.client.open_session("one"), self.client.open_session("other")
        self.pool = self.client.create_pool("p", TOKENS, 16, [KV])
        self.descriptors = self.count_descriptors()

    def hold(self):
        self.held.touch()

    def let_go(self):
        self.held.unlink(missing_ok=True)

    def count_descriptors(self):
        return len(os.listdir(f"/proc/{self.daemon.pid}/fd"))

    def workers(self, session):
        found = [s for s in self.client.list_sessions() if s.session_id == session.ref.session_id]
        return [a.state for s in found for a in s.attachments]

    def begin(self):
        """A worker whose ATTACH has been read, and whose ring is not there."""
        self.hold()
        connection = WireSocket(self.path)
        connection.send(wire.ATTACH, 1, hello(self.session.ref))
        wait_until(lambda: self.workers(self.session) == [pb.ATTACHMENT_ATTACHING], "ATTACH read")
        return connection

    def check_others_go_on(self):
        blocks = self.other.allocate(self.pool.pool_id, 2)
        self.other.free(self.pool.pool_id, blocks)

    def check_nothing_left(self):
        wait_until(lambda: self.client.device().ring_bytes == 0, "no ring's memory")
        wait_until(lambda: self.count_descriptors() <= self.descriptors, "no descriptors of rings")

    def kill_executor(self):
        device = self.client.device()
        os.kill(device.executor_pid, signal.SIGKILL)
        wait_until(lambda: self.client.device().restarts > device.restarts and
                   self.client.device().state == pb.DEVICE_SERVING, "the next executor")

    def check_ring(self, shared):
        ring = Ring(shared)
        blocks = self.session.allocate(self.pool.pool_id, 1)
        ring.post(1, 1, zero_blocks(self.pool.pool_id, blocks, self.session.epoch))
        assert ring.wait(1).kind == DONE


@pytest.fixture
def scene(start_daemon, tmp_path, monkeypatch):
    monkeypatch.setenv("KVPOOL_HELD_RINGS", str(tmp_path / "held"))
    monkeypatch.setenv("LD_PRELOAD", str(held_rings_path()))
    options = [os.environ.get("ASAN_OPTIONS"), "verify_asan_link_order=0"]
    monkeypatch.setenv("ASAN_OPTIONS", ":".join(filter(None, options)))
    daemon = start_daemon()
    monkeypatch.delenv("LD_PRELOAD")
    made = Scene(daemon, tmp_path / "held")
    yield made
    made.let_go()


def is_told(connection):
    return bool(select.select([connection.socket], [], [], 0)[0])


def attached(connection):
    answer = connection.receive()
    assert answer.kind == wire.ATTACHED, Refused(answer.body)
    return answer.body, Shared(answer.fds)


def refusal(connection):
    answer = connection.receive()
    assert answer.kind == wire.RESULT
    return Refused(answer.body).status


def test_others_are_served_meanwhile(scene):
    with Attachment(scene.path, scene.other.ref) as worker, scene.begin() as connection:
        for _ in range(10):
            scene.check_others_go_on()
            worker.release_buffer(worker.create_buffer(1 << 16)[0].buffer_id)
        assert not is_told(connection) and scene.workers(scene.session) == [pb.ATTACHMENT_ATTACHING]
        scene.let_go()
        _, shared = attached(connection)
        scene.check_ring(shared)
        shared.close()


def test_many_at_a_time(scene):
    """More than there are threads."""
    scene.hold()
    connections = [WireSocket(scene.path) for _ in range(20)]
    for connection in connections:
        connection.send(wire.ATTACH, 1, hello(scene.session.ref))
    wait_until(lambda: scene.workers(scene.session) == [pb.ATTACHMENT_ATTACHING] * 20, "each ATTACH read")
    scene.check_others_go_on()
    for connection in connections[::2]:
        connection.close()
    scene.let_go()
    for connection in connections[1::2]:
        _, shared = attached(connection)
        scene.check_ring(shared)
        shared.close()
        connection.close()
    scene.check_nothing_left()


def test_the_worker_goes(scene):
    scene.begin().close()
    wait_until(lambda: scene.workers(scene.session) == [pb.ATTACHMENT_ENDING], "its end seen")
    assert scene.client.device().ring_bytes > 0  # charged as long as it may come
    scene.let_go()
    wait_until(lambda: not scene.workers(scene.session), "worker gone")
    scene.check_nothing_left()
    with Attachment(scene.path, scene.session.ref) as worker:
        scene.check_ring(worker.shared)


def test_the_session_goes(scene):
    connection = scene.begin()
    scene.session.close()
    assert refusal(connection) == "unknown_session"
    with pytest.raises((Closed, ConnectionResetError)):
        connection.receive()
    scene.let_go()
    scene.check_nothing_left()
    connection.close()


def test_the_executor_goes(scene):
    """The worker is told nothing of it: it gets a ring of the next one's."""
    with scene.begin() as connection:
        scene.kill_executor()
        assert not is_told(connection)
        scene.let_go()
        welcome, shared = attached(connection)
        assert welcome.generation == 2 == scene.client.device().restarts + 1
        scene.check_ring(shared)
        shared.close()
    scene.check_nothing_left()


def test_the_executor_goes_from_an_attached_worker(scene):
    """Twice, while the ring that the worker is to have instead is made."""
    with Attachment(scene.path, scene.session.ref) as worker:
        scene.hold()
        scene.kill_executor()
        worker.wait_event(wire.DEVICE_LOST)
        scene.check_others_go_on()
        scene.kill_executor()
        assert not is_told(worker.wire) and scene.workers(scene.session) == [pb.ATTACHMENT_LOST]
        scene.let_go()
        restored = worker.wait_event(wire.DEVICE_RESTORED)
        assert restored.body.generation == 3
        shared = Shared(restored.fds)
        scene.check_ring(shared)
        shared.close()
    scene.check_nothing_left()


def test_an_attached_worker_goes_after_its_executor(scene):
    with Attachment(scene.path, scene.session.ref) as worker:
        scene.hold()
        scene.kill_executor()
        worker.wait_event(wire.DEVICE_LOST)
    wait_until(lambda: scene.workers(scene.session) == [pb.ATTACHMENT_ENDING], "its end seen")
    scene.let_go()
    wait_until(lambda: not scene.workers(scene.session), "worker gone")
    scene.check_nothing_left()


def test_the_daemon_goes(scene):
    """The worker is told at once; the daemon ends when the ring's memory is there, to be given back."""
    connection = scene.begin()
    scene.daemon.process.send_signal(signal.SIGTERM)
    assert refusal(connection) == "shutting_down"
    connection.close()
    scene.let_go()
    scene.daemon.stop()
