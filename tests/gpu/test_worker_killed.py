"""A worker is killed inside a kernel of its own: what other workers see through their rings and in their own contexts, how
long until they are served again, and what the pool holds then. Time-sliced it is nobody's business; under MPS it may
take every context of the GPU with it."""
import json
import os
import queue
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from support import reference
from support.catalogue import V41
from support.device import DEVICE, ON_GPU
from support.libkvpool import environment, kvpool
from support.traffic import random_rows, slots_of, whole_block_segments

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not ON_GPU, reason="$KVPOOL_TEST_DEVICE names no GPU")

UNDER_MPS = os.environ.get("KVPOOL_TEST_MPS") == "1"
TOKENS, BLOCKS = 64, 64
SECONDS_MAX = 60

VICTIM = """
import sys, time, torch, kvpool
worker = kvpool.attach(sys.stdin.readline())
mapped = worker.map_pool("shared")
records = torch.from_dlpack(mapped.region("kv").array())
torch.cuda.synchronize()
torch.cuda._sleep(100_000_000_000)
time.sleep(0.3)
print("idle" if torch.cuda.current_stream().query() else "running", flush=True)
time.sleep(600)
"""

# No CUDA in this process: only its ring can tell it anything. Says when steps began to fail, and when one was done again.
RING_ONLY = """
import json, select, sys, time, kvpool
worker = kvpool.attach(sys.stdin.readline())
mapped = worker.map_pool("shared", kvpool.NOTHING)
pairs = json.loads(sys.stdin.readline())
step = worker.step().copy_blocks(mapped, pairs)
worker.run(step)
print(json.dumps({"event": "ready"}), flush=True)
done, failed_at = 0, None
while not select.select([sys.stdin], [], [], 0)[0]:
    try:
        worker.run(step)
    except kvpool.Error as error:
        assert error.status == kvpool.Status.DEVICE_LOST, error
        if failed_at is None:
            failed_at = time.monotonic()
            print(json.dumps({"event": "lost", "text": str(error)}), flush=True)
        time.sleep(0.001)
        continue
    done += 1
    if failed_at is not None:
        print(json.dumps({"event": "served", "seconds": time.monotonic() - failed_at}), flush=True)
        failed_at = None
print(json.dumps({"event": "end", "done": done}), flush=True)
worker.detach()
"""

# With a context of its own. Ends when that is lost, as the MPS server waits for that.
WITH_CONTEXT = """
import json, os, select, sys, torch, kvpool
worker = kvpool.attach(sys.stdin.readline())
mapped = worker.map_pool("shared", kvpool.NOTHING)
slots = json.loads(sys.stdin.readline())
buffer = worker.create_buffer(len(slots) * 1024)
rows = torch.from_dlpack(buffer.array("bfloat16", (len(slots), 512)))
step = worker.step().store(mapped.layer("kv"), buffer.view(len(slots), 1024), slots)
said, lost = False, 0
while not select.select([sys.stdin], [], [], 0)[0]:
    try:
        rows.normal_()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(json.dumps({"event": "context lost", "text": str(error).splitlines()[0], "steps_lost": lost}), flush=True)
        os._exit(0)
    try:
        worker.run(step)
    except kvpool.Error as error:
        assert error.status == kvpool.Status.DEVICE_LOST, error
        lost += 1
    if not said:
        said = True
        print(json.dumps({"event": "ready"}), flush=True)
print(json.dumps({"event": "end", "steps_lost": lost}), flush=True)
os._exit(0)
"""


class Child:
    def __init__(self, text, session, *lines):
        self.process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env=environment())
        for line in (session.ticket(DEVICE).to_json(), *lines):
            self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def line(self):
        """What it says next; None: it has ended."""
        return self.lines.get(timeout=SECONDS_MAX)

    def next(self):
        line = self.line()
        assert line is not None, f"it ended with status {self.process.wait()}"
        return json.loads(line)

    def end(self):
        """What it said, from here to its end."""
        self.process.stdin.close()
        said = [json.loads(line) for line in iter(self.line, None)]
        assert self.process.wait(SECONDS_MAX) == 0
        return said

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def children():
    started = []

    def start(*arguments):
        started.append(Child(*arguments))
        return started[-1]

    yield start
    for child in started:
        child.kill()


def test_a_worker_is_killed_in_a_kernel(start_daemon, children):
    assert not torch.cuda.is_initialized(), "this process would hold up MPS: these tests run by themselves"
    daemon = start_daemon()
    rng = np.random.default_rng(5)
    with kvpool.Client(str(daemon.socket), wait_until_serving=True) as scheduler:
        pool = scheduler.create_pool("shared", TOKENS, BLOCKS, [{"name": "kv", "format": "v41", "num_layers": 1}])
        session, others, owner = (scheduler.open_session(name) for name in ("kept", "others", "victim"))
        kept, theirs = np.asarray(session.allocate(pool, 16)), np.asarray(others.allocate(pool, 16))
        rows = random_rows(rng, V41, len(kept) * TOKENS)
        session.store_rows(pool.layer("kv"), rows, slots_of(kept, TOKENS))
        pairs = np.array([theirs[:4], theirs[4:8]]).T.tolist()
        ring_only = children(RING_ONLY, others, json.dumps(pairs))
        with_context = children(WITH_CONTEXT, others, json.dumps(slots_of(theirs[8:9], TOKENS).tolist()))
        assert ring_only.next()["event"] == with_context.next()["event"] == "ready"
        victim = children(VICTIM, owner)
        assert victim.line() == "running\n"
        operator = daemon.client()
        before = operator.device().restarts
        victim.kill()
        began = time.monotonic()
        while operator.device().restarts == before and time.monotonic() < began + (20 if UNDER_MPS else 3):
            time.sleep(0.05)
        is_lost = operator.device().restarts > before
        if is_lost:
            assert UNDER_MPS, "a kill of another process took the executor with it"
            assert with_context.end()[-1]["event"] == "context lost"
            ended = time.monotonic() - began
            assert [ring_only.next()["event"] for _ in range(2)] == ["lost", "served"]
            print(f"FIGURE a worker killed in a kernel under MPS: other contexts lost, the last of their processes gone "
                  f"after {ended:.2f} s, rings served again {time.monotonic() - began - ended:.2f} s later")
        else:
            said = with_context.end()
            assert [(line["event"], line["steps_lost"]) for line in said] == [("end", 0)]
            print(f"FIGURE a worker killed in a kernel{' under MPS' if UNDER_MPS else ''}: nobody else notices")
        said = ring_only.end()
        assert [line["event"] for line in said] == ["end"] and said[0]["done"] > 0
        assert operator.device().restarts <= before + 1
        segments = np.array(whole_block_segments(kept, TOKENS))
        loaded, *_ = session.load_rows(pool.layer("kv"), segments, len(rows), V41.row_bytes)
        assert bytes(loaded) == reference.cast_back(V41, rows).tobytes()
