"""kill -9 at every named place of the workers' protocols (KVP_FAILPOINT in client/, server/ and proto/): of the worker, of
the executor, of the daemon. What a bystander has is intact, what the dead one had is free, and the next one is served."""
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support import reference
from support.catalogue import V41
from support.daemon import Daemon, kvpoold_path
from support.libkvpool import LIBRARY, environment, kvpool
from support.process import is_running, wait_until
from support.traffic import random_rows, slots_of, whole_block_segments

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted({name for part in ("client", "server", "proto") for path in (ROOT / part).rglob("*.c")
                for name in re.findall(r'KVP_FAILPOINT\("([a-z_.]+)"\)', path.read_text())})
FOLDER = "KVPOOL_FAILPOINTS_FOLDER"
TOKENS, BLOCKS = 16, 24

pytestmark = pytest.mark.skipif(FOLDER.encode() not in kvpoold_path().read_bytes() or
                                FOLDER.encode() not in LIBRARY.read_bytes(),
                                reason="this build has no failpoints (-DKVPOOL_FAILPOINTS=ON)")

# All that a worker does, again and again: one line a round.
WORKER = """
import json, os, sys, time, kvpool
ticket, blocks, slots = json.loads(sys.stdin.readline())

def once(worker):
    mapped, buffer = worker.map_pool("shared"), worker.create_buffer(1 << 16)
    fd = os.memfd_create("own", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    __import__("fcntl").fcntl(fd, 1033, 7)
    own = worker.import_memfd(fd, 1 << 16)
    os.close(fd)
    worker.map_buffer(buffer.id)
    ready, done = worker.new_word(kvpool.WORKER), worker.new_word(kvpool.EXECUTOR)
    rows = buffer.view(len(slots), 1024)
    worker.post(worker.step().store(mapped.layer("kv"), rows, slots).wait(ready, 1).signal(done, 1), deadline_ms=20000)
    try:
        worker.wait(5)  # asleep
    except kvpool.Error as error:
        if error.status != kvpool.Status.DEADLINE_EXCEEDED:
            raise
    ready.signal(1)
    done.wait(1, 20000)
    worker.wait(20000).check()
    with kvpool.Replay(worker, 1, deadline_ms=20000) as replay:
        replay.post(worker.step().fused_store(mapped.layer("kv"), rows, buffer.view(1, 1024), 1e-6, slots,
                                              [0] * len(slots)).points(1, 1))
        replay.begin()
        replay.signal(None, 1)
        replay.end(None, 1)
        replay.check()
        worker.wait(20000).check()
    own.release()
    buffer.release()

rounds = 0
while True:
    try:
        with kvpool.attach(ticket) as worker:
            once(worker)
            rounds += 1
            print(json.dumps(["round", rounds]), flush=True)
    except kvpool.Error as error:
        print(json.dumps([error.status.name, str(error)]), flush=True)
        if error.status != kvpool.Status.DEVICE_LOST:
            sys.exit(3)
        time.sleep(0.05)
"""

# Loads what it has and compares, until it is told to end.
BYSTANDER = """
import json, select, sys, time, numpy as np, kvpool
ticket, segments, count, expected = json.loads(sys.stdin.readline())
worker = kvpool.attach(ticket)
mapped, out = worker.map_pool("shared"), worker.create_buffer(count * 1024)
step = worker.step().load(mapped.layer("kv"), segments, count, out.view(count, 1024))
done, lost = 0, 0
while not select.select([sys.stdin], [], [], 0)[0]:
    out_bytes = np.asarray(out.array("uint8", (count * 1024,)))
    try:
        worker.run(step)
    except kvpool.Error as error:
        if error.status != kvpool.Status.DEVICE_LOST:
            print(json.dumps([done, lost, error.status.name]), flush=True)
            sys.exit(0)
        lost += 1
        time.sleep(0.01)
        continue
    assert out_bytes.tobytes().hex() == expected
    done += 1
    if done == 1:
        print(json.dumps("ready"), flush=True)
print(json.dumps([done, lost, None]), flush=True)
"""


class Process:
    def __init__(self, text, first_line, env):
        self.child = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      text=True, env=env)
        self.child.stdin.write(json.dumps(first_line) + "\n")
        self.child.stdin.flush()

    def next(self):
        line = self.child.stdout.readline()
        return json.loads(line) if line else None

    def next_round(self):
        """What it said before."""
        said = []
        while (line := self.next()) is not None and line[0] != "round":
            said.append(line)
        assert line is not None, f"it ended with {self.child.wait()}: {said}"
        return said

    def end(self):
        """The last it says."""
        out, _ = self.child.communicate(timeout=60)
        return json.loads(out.splitlines()[-1])


class Scene:
    """A daemon, a session that holds rows with a worker that reads them, and one whose worker does everything."""

    def __init__(self, daemon, victim_env):
        self.daemon, self.victim_env = daemon, victim_env
        self.client = kvpool.Client(str(daemon.socket), wait_until_serving=True)
        self.pool = self.client.create_pool("shared", TOKENS, BLOCKS, [{"name": "kv", "format": "v41", "num_layers": 1}])
        self.rows = random_rows(np.random.default_rng(3), V41, 4 * TOKENS)
        self.kept, self.theirs = self.client.open_session("kept"), self.client.open_session("theirs")
        self.blocks, self.victims = self.kept.allocate(self.pool, 4), self.theirs.allocate(self.pool, 1)
        self.kept.store_rows(self.pool.layer("kv"), self.rows, slots_of(self.blocks, TOKENS))
        self.segments = np.array(whole_block_segments(self.blocks, TOKENS))
        self.expected = reference.cast_back(V41, self.rows).tobytes()
        self.processes = []
        self.bystander = self.start(BYSTANDER, [self.kept.ticket().to_json(), self.segments.tolist(), len(self.rows),
                                                self.expected.hex()], environment())
        assert self.bystander.next() == "ready"
        self.victim = self.start_victim()

    def start(self, *arguments):
        self.processes.append(Process(*arguments))
        return self.processes[-1]

    def start_victim(self):
        victim = self.start(WORKER, [self.theirs.ticket().to_json(), [int(b) for b in self.victims],
                                     slots_of(self.victims, TOKENS).tolist()], self.victim_env)
        victim.next_round()
        return victim

    def check_contents(self):
        loaded, *_ = self.kept.load_rows(self.pool.layer("kv"), self.segments, len(self.rows), V41.row_bytes)
        assert bytes(loaded) == self.expected

    def close(self):
        for process in self.processes:
            process.child.kill()
            process.child.communicate()
        self.client.close()


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "failpoints"
    made.mkdir()
    return made


@pytest.fixture
def start_scene(start_daemon, folder, monkeypatch):
    made = []

    def start(victim_passes):
        if not victim_passes:
            monkeypatch.setenv(FOLDER, str(folder))
        daemon = start_daemon()
        monkeypatch.delenv(FOLDER, raising=False)
        made.append(Scene(daemon, {**environment(), FOLDER: str(folder)} if victim_passes else environment()))
        return made[-1]

    yield start
    for scene in made:
        scene.close()


def arm(folder, name):
    (folder / name).touch()
    wait_until(lambda: not (folder / name).exists(), f"somebody passes {name}")


def of(process):
    return [name for name in NAMES if name.startswith(process + ".")]


def test_all_are_somebody_s():
    assert len(NAMES) == sum(len(of(process)) for process in ("worker", "executor", "daemon")) >= 30


@pytest.mark.parametrize("name", of("worker"))
def test_a_worker_dies(start_scene, folder, name):
    scene = start_scene(True)
    operator = scene.daemon.client()
    arm(folder, name)
    scene.victim.child.stdout.read()
    assert scene.victim.child.wait(60) == -signal.SIGKILL

    def theirs():
        return next(session for session in operator.list_sessions() if session.name == "theirs")
    wait_until(lambda: not theirs().attachments and theirs().buffers == 0, "what it had is gone")
    scene.start_victim()
    assert operator.device().restarts == 0
    done, lost, error = scene.bystander.end()
    assert done > 1 and (lost, error) == (0, None)
    scene.check_contents()


@pytest.mark.parametrize("name", of("executor"))
def test_the_executor_dies(start_scene, folder, name):
    scene = start_scene(False)
    operator = scene.daemon.client()
    executor = operator.device().executor_pid
    arm(folder, name)
    wait_until(lambda: operator.device().restarts == 1 and operator.device().executor_pid != executor, "a successor")
    for _ in range(3):
        assert {line[0] for line in scene.victim.next_round()} <= {"DEVICE_LOST"}
    scene.check_contents()
    done, _, error = scene.bystander.end()
    assert done > 1 and error is None
    assert operator.device().restarts == 1


@pytest.mark.parametrize("name", of("daemon"))
def test_the_daemon_dies(start_scene, folder, name):
    scene = start_scene(False)
    daemon = scene.daemon
    daemon.note_processes()
    arm(folder, name)
    assert daemon.process.wait(60) == -signal.SIGKILL
    assert scene.victim.child.stdout.read().count("DISCONNECTED") == 1 and scene.victim.child.wait(60) == 3
    assert scene.bystander.end()[2] == "DISCONNECTED"
    wait_until(lambda: not any(is_running(pid) for pid in daemon.seen_executors), "its executor gone")
    with Daemon(directory=daemon.directory) as successor:
        after = Scene(successor, environment())
        after.victim.next_round()
        after.check_contents()
        after.close()
