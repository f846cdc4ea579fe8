"""Workers where containers have them: in user, pid, ipc, mount and network namespaces of their own, with nothing of the
daemon's but the directory of its sockets. unshare(1) makes what a container runtime would."""
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from support import reference
from support.catalogue import V41
from support.client import Client
from support.daemon import executor_path, kvpoold_path
from support.device import DEVICE, ON_GPU
from support.libkvpool import LIBRARY, PACKAGE, kvpool
from support.process import children, is_running, wait_until
from support.tool import program
from support.worker import KV, TOKENS

pytestmark = pytest.mark.skipif(ON_GPU, reason="numpy looks at memory of a host device")

BLOCKS = 16
OVERFLOW = int(Path("/proc/sys/kernel/overflowuid").read_text())
PYTHON = "/usr/bin/python3"
NAMESPACES = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount", "--ipc", "--net"]
UNPRIVILEGED = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"]
# The directory of the sockets at another place, and none where the daemon has it; a /dev/shm that holds nothing.
MOUNTS = ('mount -t proc proc /proc && mount --bind "$1" "$2" && mount -t tmpfs -o size=4k none "$1" && '
          'mount -t tmpfs -o size=4k,nr_inodes=1 none /dev/shm && shift 2 && exec "$@"')

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")


def is_possible(*command):
    done = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    return done.returncode == 0 or done.stderr.strip()


@pytest.fixture(autouse=True, scope="module")
def namespaces():
    why = is_possible("unshare", *NAMESPACES)
    if why is not True:
        pytest.skip(f"namespaces can't be made here: {why}")


@pytest.fixture(scope="module")
def kit():
    """The worker, its package and its library, for anybody to read."""
    folder = Path(tempfile.mkdtemp(prefix="kvpool-containers-", dir="/tmp"))
    shutil.copytree(PACKAGE / "kvpool", folder / "kvpool")
    shutil.copy(Path(__file__).resolve().parents[1] / "support" / "container_worker.py", folder)
    shutil.copy(LIBRARY, folder / "libkvpool.so")
    (folder / "run").mkdir()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


class Worker:
    """container_worker.py, begun by `prefix`; its daemon's sockets are in `directory`, as it sees it."""

    def __init__(self, kit, prefix, directory, by_environment=False):
        self.socket = None if by_environment else str(Path(directory) / "kvpoold.attach.sock")
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(kit), "KVPOOL_LIBRARY": str(kit / "libkvpool.so"),
               "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        if by_environment:
            env["KVPOOLD_ATTACH_SOCKET"] = str(Path(directory) / "kvpoold.attach.sock")
        self.process = subprocess.Popen([*prefix, PYTHON, str(kit / "container_worker.py")], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=kit)

    def attach(self, ticket, pool_name, blocks, seed=7):
        """What it says; it stays attached until go_on()."""
        ticket = {**json.loads(ticket.to_json()), "socket": self.socket}
        self._write({"ticket": ticket, "pool": pool_name, "blocks": [int(b) for b in blocks], "seed": seed})
        line = self.process.stdout.readline()
        if not line:
            self.process.stdin.close()
            self.process.wait()
            raise AssertionError(f"the worker ended with {self.process.returncode}: {self.process.stderr.read()}")
        return json.loads(line)

    def go_on(self):
        self._write(None)

    def _write(self, value):
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def end(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            assert self.process.wait(60) == 0, self.process.stderr.read()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


@pytest.fixture
def start_worker(kit):
    made = []

    def start(prefix, directory, **options):
        made.append(Worker(kit, prefix, directory, **options))
        return made[-1]

    yield start
    for worker in made:
        if worker.process.poll() is None:
            worker.process.stdin.close()
        worker.process.wait(60)


def container(kit, directory, *before):
    """The command in front of a contained worker, and where that sees the daemon's directory."""
    inside = kit / "run"
    return [*before, "unshare", *NAMESPACES, "sh", "-ec", MOUNTS, "sh", str(directory), str(inside)], inside


@pytest.fixture
def scheduler(daemon):
    with kvpool.Client(str(daemon.socket), wait_until_serving=True) as made:
        yield made


class Engine:
    """A scheduler's session with blocks of a pool of its own."""

    def __init__(self, scheduler, pool_name):
        self.scheduler, self.name = scheduler, pool_name
        self.pool = scheduler.create_pool(pool_name, TOKENS, BLOCKS, [KV])
        self.session = scheduler.open_session("engine")
        self.blocks = self.session.allocate(self.pool, 3)

    @property
    def ticket(self):
        return self.session.ticket(DEVICE)

    def close(self):
        self.session.close()
        self.pool.delete(force=True)


@pytest.fixture
def engine(scheduler, pool_name):
    made = Engine(scheduler, pool_name)
    yield made
    made.close()


def check_round(told, engine, seed=7):
    """All of it, against the independent implementation: what was loaded, and the records in the pool."""
    count = TOKENS * len(engine.blocks)
    rows = (np.random.default_rng(seed).standard_normal((count, 512), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    q = reference.quantize(V41, rows)
    assert "refused" not in told, told
    assert (told["stored"], told["loaded"]) == (count, count)
    assert told["rows"] == hashlib.sha256(reference.cast_back(V41, rows).tobytes()).hexdigest()
    assert told["records"] == hashlib.sha256(np.concatenate([q.data, q.scales], axis=1).tobytes()).hexdigest()


def attachments(daemon):
    client = Client(f"unix:{daemon.socket}")
    try:
        return [a for s in client.list_sessions() for a in s.attachments]
    finally:
        client.close()


def ours():
    return {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "pid", "ipc", "mnt", "net")}


# ---- a worker in a container ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_environment", [False, True], ids=["ticket", "environment"])
def test_a_worker_in_namespaces_of_its_own(kit, daemon, engine, start_worker, by_environment):
    """Attach, map, a store and a load; it has neither the daemon's /dev/shm nor anything of its network. The socket is at
    another path than the daemon's: its ticket says so, or its environment."""
    worker = start_worker(*container(kit, daemon.directory), by_environment=by_environment)
    told = worker.attach(engine.ticket, engine.name, engine.blocks)
    check_round(told, engine)
    here = ours()
    assert all(told["namespaces"][kind] != here[kind] for kind in here), told
    assert (told["uid"], told["pid"]) == (0, 1)
    attached = attachments(daemon)
    assert [a.peer_uid for a in attached] == [os.geteuid()]  # as the daemon's user namespace has it
    assert attached[0].peer_pid in children(worker.process.pid)  # and its pid namespace
    worker.go_on()
    wait_until(lambda: not attachments(daemon), "the end of the attachment")
    worker.end()


def test_a_daemon_that_starts_again_beside_a_container(kit, start_daemon, start_worker, tmp_path):
    """The directory is mounted, so that the next daemon's socket is there as well."""
    directory = tmp_path / "sockets"
    directory.mkdir()
    worker = None
    for seed in (1, 2):
        daemon = start_daemon(directory=directory)
        if worker is None:
            worker = start_worker(*container(kit, directory))
        with kvpool.Client(str(daemon.socket), wait_until_serving=True) as scheduler:
            engine = Engine(scheduler, "again")
            check_round(worker.attach(engine.ticket, engine.name, engine.blocks, seed), engine, seed)
            worker.go_on()
            engine.close()
        daemon.stop()
    worker.end()


def test_a_socket_that_was_mounted_alone_is_that_of_the_first_daemon(kit, start_daemon, start_worker, tmp_path):
    directory = tmp_path / "sockets"
    directory.mkdir()
    target = kit / "run" / "kvpoold.attach.sock"
    target.touch(mode=0o755)
    mount = 'mount --bind "$1/kvpoold.attach.sock" "$2" && shift 2 && exec "$@"'
    worker = None
    try:
        for seed in (1, 2):
            daemon = start_daemon(directory=directory)
            if worker is None:
                worker = start_worker(["unshare", *NAMESPACES, "sh", "-ec", mount, "sh", str(directory), str(target)],
                                      target.parent)
            with kvpool.Client(str(daemon.socket), wait_until_serving=True) as scheduler:
                engine = Engine(scheduler, "again")
                told = worker.attach(engine.ticket, engine.name, engine.blocks, seed)
                if seed == 1:
                    check_round(told, engine, seed)
                    worker.go_on()
                else:
                    assert told["refused"] == "DISCONNECTED" and "Connection refused" in told["text"], told
                engine.close()
            daemon.stop()
        worker.end()
    finally:
        target.unlink()


def test_a_container_that_is_stopped(kit, daemon, engine, start_worker):
    """What a runtime does: SIGTERM for the first process. It detaches, and has nothing to be killed for."""
    worker = start_worker(*container(kit, daemon.directory))
    check_round(worker.attach(engine.ticket, engine.name, engine.blocks), engine)
    (attached,) = attachments(daemon)
    os.kill(attached.peer_pid, signal.SIGTERM)
    assert worker.process.wait(60) == 0
    wait_until(lambda: not attachments(daemon), "the end of the attachment")
    assert f" detached attachment={attached.attachment_id} " in daemon.log


# ---- whose uid it is -----------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("is_contained", [False, True], ids=["plain", "rootless"])
def test_a_worker_who_may_not(kit, daemon, engine, start_worker, is_contained):
    """uid 0 of a rootless container is its user outside: no root to the daemon, and in no group of its socket's."""
    daemon.directory.chmod(0o755)
    prefix, directory = container(kit, daemon.directory, *UNPRIVILEGED) if is_contained else (UNPRIVILEGED,
                                                                                            daemon.directory)
    why = is_possible(*UNPRIVILEGED, "unshare", *NAMESPACES) if is_contained else True
    if why is not True:
        pytest.skip(f"a user can't make namespaces here: {why}")
    worker = start_worker(prefix, directory)
    told = worker.attach(engine.ticket, engine.name, engine.blocks)
    assert told["refused"] == "PERMISSION_DENIED", told
    assert f"{directory}/kvpoold.attach.sock may not be opened by this user: Permission denied" in told["text"]
    worker.end()
    assert not attachments(daemon)


@needs_root
@pytest.mark.parametrize("flags, groups", [(["--socket-mode", "0666"], ["--clear-groups"]), ([], ["--groups", "0"])],
                         ids=["mode", "group"])
def test_a_worker_of_a_rootless_container(kit, start_daemon, start_worker, flags, groups):
    """Whom socket_mode lets in, or the socket's group, which a container may keep; the daemon sees the user's uid, not the
    container's."""
    user = [*UNPRIVILEGED[:-1], *groups]
    why = is_possible(*user, "unshare", *NAMESPACES)
    if why is not True:
        pytest.skip(f"a user can't make namespaces here: {why}")
    daemon = start_daemon(*flags)
    daemon.directory.chmod(0o755)
    with kvpool.Client(str(daemon.socket), wait_until_serving=True) as scheduler:
        engine = Engine(scheduler, "rootless")
        worker = start_worker(*container(kit, daemon.directory, *user))
        told = worker.attach(engine.ticket, engine.name, engine.blocks)
        check_round(told, engine)
        assert told["uid"] == 0
        assert [a.peer_uid for a in attachments(daemon)] == [12345]
        worker.go_on()
        worker.end()
        engine.close()


# ---- a daemon in a container ---------------------------------------------------------------------------------------


class ContainedDaemon:
    """kvpoold as the first process of a container; the test is on its host."""

    def __init__(self, directory, user="--map-root-user"):
        self.socket, self.log = directory / "kvpoold.sock", directory / "log"
        with open(self.log, "wb") as log:
            self.outer = subprocess.Popen(
                ["unshare", "--user", user, "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc",
                 str(kvpoold_path()), "--socket", str(self.socket), "--socket-mode", "0666", "--executor",
                 str(executor_path()), "--device", DEVICE, "--device-threads", "2", "--device-memory", "1G"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self.socket.exists, "the socket")
        self.pid = children(self.outer.pid)[0]

    def stop(self):
        os.kill(self.pid, signal.SIGTERM)
        assert self.outer.wait(60) == 0, self.log.read_text()
        assert not is_running(self.pid)


@pytest.fixture
def contain(kit):
    """contain(user): a daemon in a container with this mapping of users."""
    directory = kit / "daemon"
    directory.mkdir(mode=0o755)
    made = []

    def start(*user):
        made.append(ContainedDaemon(directory, *user))
        return made[-1]

    yield start
    for daemon in made:
        daemon.stop()
    shutil.rmtree(directory)


@needs_root
def test_a_worker_outside_of_the_daemons_container(contain, start_worker):
    """Its pid is out of the daemon's sight (0), and a uid that the daemon's user namespace doesn't have is the overflow
    uid's; both are only told."""
    contained = contain()
    with kvpool.Client(str(contained.socket), wait_until_serving=True) as scheduler:
        engine = Engine(scheduler, "outside")
        for prefix, uid in (([], 0), (UNPRIVILEGED, OVERFLOW)):
            worker = start_worker(prefix, contained.socket.parent)
            check_round(worker.attach(engine.ticket, engine.name, engine.blocks), engine)
            assert [(a.peer_pid, a.peer_uid) for a in attachments(contained)] == [(0, uid)]
            worker.go_on()
            worker.end()
            wait_until(lambda: not attachments(contained), "the end of the attachment")
        engine.close()


@needs_root
@pytest.mark.parametrize("user, is_operator", [("--map-root-user", True), (f"--map-user={OVERFLOW}", False)],
                         ids=["root", "nobody"])
def test_nobody_is_no_operator(contain, kit, user, is_operator):
    """The test's uid is the daemon's own. As `nobody`, it can't be told from whoever the daemon's user namespace doesn't
    have: both are the overflow uid, and neither has the rights of the daemon's user."""
    contained = contain(user)
    kvpoolctl = shutil.copy(program(), kit)
    kvpool.Client(str(contained.socket), wait_until_serving=True).close()

    def create(*prefix):
        return subprocess.run([*prefix, kvpoolctl, "--socket", contained.socket, "pool", "create", "p", "--blocks", "4",
                               "--block-size", "64", "--region", "name=kv,format=v41"], capture_output=True, text=True,
                              check=False)
    stranger, own = create(*UNPRIVILEGED), create()
    assert stranger.returncode == 1 and f"the caller's uid is {OVERFLOW}" in stranger.stderr, stranger
    assert (own.returncode == 0) == is_operator, own
