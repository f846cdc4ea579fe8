"""An executor on a GPU that is killed, faults, or loses its context to somebody else's death: what was finished
stays, and the next step works. How long that took is printed; nothing here fails for being slow.

$KVPOOL_TEST_DEVICE names the device. $KVPOOL_TEST_MPS=1: this runs under an MPS server. $KVPOOL_TEST_FAILPOINTS=1:
SIGUSR2 makes the executor fault its GPU."""
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from support import reference
from support.catalogue import V41, Geometry
from support.client import Step
from support.daemon import build_dir
from support.device import DEVICE, ON_GPU
from support.errors import RpcFailure, StepFailure
from support.nvml import memory_used_bytes
from support.process import wait_until
from support.stubs import pb
from support.traffic import random_rows, slots_of, whole_block_segments
from support.worker import lane_of

UNDER_MPS = os.environ.get("KVPOOL_TEST_MPS") == "1"
FAILPOINTS = os.environ.get("KVPOOL_TEST_FAILPOINTS") == "1"
GIB, MIB = 1 << 30, 1 << 20
TOKENS = 64
IN_FLIGHT = 8

pytestmark = pytest.mark.skipif(not ON_GPU, reason="$KVPOOL_TEST_DEVICE names no GPU")


@pytest.fixture
def rng():
    return np.random.default_rng(41)


@pytest.fixture
def daemon(start_daemon):
    return start_daemon(device_memory="0")


def region(layers=1):
    return {"name": "kv", "format": "v41", "num_layers": layers}


def device_lost(failure):
    assert failure.refusal is not None, failure
    return failure.status == "device_lost"


def run_until_done(run):
    """run(), again and again while the device is lost. What it returned."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return run()
        except (RpcFailure, StepFailure) as failure:
            assert device_lost(failure), failure
            assert time.monotonic() < deadline, "the device did not come back"


class StoreLoop(threading.Thread):
    """Stores to its lanes of blocks round after round, each lane's rows in two versions by turns, several steps in
    flight, until a step is lost. What each lane must hold is known for all blocks that are not said to be torn."""

    LANES, BLOCKS = 16, 8

    def __init__(self, session, pool, geometry, rng):
        super().__init__(daemon=True)
        self.session, self.pool, self.geometry = session, pool, geometry
        self.region = pb.RegionRef(pool_id=pool.pool_id)
        self.lanes = [session.allocate(pool.pool_id, self.BLOCKS) for _ in range(self.LANES)]
        self.rows = [[random_rows(rng, V41, self.BLOCKS * TOKENS) for _ in range(2)] for _ in self.lanes]
        self.sources = [[self._source(rows) for rows in versions] for versions in self.rows]
        self.queue = session.open_queue()
        self.finished = [None] * self.LANES  # the version
        self.done, self.lost, self.torn, self.error = 0, 0, set(), None

    def _source(self, rows):
        buffer = self.session.create_buffer(rows.nbytes)
        buffer.write(rows)
        return buffer

    def run(self):
        try:
            pending = []
            for number in itertools.count():
                pending.append(self._send(number))
                if len(pending) == IN_FLIGHT and not self._take(pending.pop(0)):
                    break
            for sent in pending:
                self._take(sent)
        except BaseException as error:  # told by finish()
            self.error = error

    def _send(self, number):
        lane, version = number % self.LANES, number // self.LANES % 2
        rows = self.rows[lane][version]
        source = self.sources[lane][version].view(0, len(rows), V41.row_bytes)
        step = Step(DEVICE).store(self.region, source, slots_of(self.lanes[lane], TOKENS))
        return self.queue.send(step), lane, version

    def _take(self, sent):
        step_id, lane, version = sent
        try:
            self.queue.wait(step_id)
        except StepFailure as failure:
            assert device_lost(failure), failure
            torn = set(failure.torn.get(self.pool.pool_id, ()))
            assert torn <= set(self.lanes[lane].tolist()), "blocks of another step are said to be torn"
            self.torn |= torn
            self.lost += 1
            return False
        self.finished[lane] = version
        self.done += 1
        return True

    def wait_under_way(self):
        wait_until(lambda: self.done >= 3 * self.LANES or self.error, "some rounds stored")

    def finish(self):
        self.join(120)
        assert not self.is_alive(), "the loop hangs"
        if self.error:
            raise self.error
        assert self.lost > 0, "no step was lost: the loop was not under way"

    def check(self):
        """By LoadRows, and the records themselves by a dump."""
        for blocks, rows, version in zip(self.lanes, self.rows, self.finished):
            whole = np.array([block not in self.torn for block in blocks.tolist()])
            expected = reference.quantize(V41, rows[version])
            segments = whole_block_segments(blocks, TOKENS)
            loaded, _, _ = self.session.load_rows(self.region, segments, len(rows[version]))
            shape = (self.BLOCKS, TOKENS * V41.row_bytes)
            back = reference.loaded_rows(V41, expected.data, expected.scales)
            assert (loaded.reshape(shape)[whole] == back.reshape(shape)[whole]).all()
            records = np.concatenate((expected.data, expected.scales), axis=1).reshape(self.BLOCKS, -1)
            for block, record in zip(blocks[whole].tolist(), records[whole]):
                dumped = self.session.client.dump(self.region, block, 1)
                assert dumped[:len(record)].tobytes() == record.tobytes(), f"block {block}"


def kill_executor(client):
    told = client.device()
    os.kill(told.executor_pid, signal.SIGKILL)
    return told.restarts


PHASES = re.compile(r"^\S+T(\d+):(\d+):(\d+\.\d+)Z \w+ "
                    r"(executor_died|executor_started|gpu_opened|executor_ready|device_serving) (.*)$", re.M)


def report_phases(daemon, began):
    """When what happened, from the daemon's log. began: time.time()."""
    lines = []
    for hours, minutes, seconds, event, rest in PHASES.findall(daemon.log):
        after = (int(hours) * 3600 + int(minutes) * 60 + float(seconds) - began % 86400) % 86400
        if after < 3600:
            took = " ".join(re.findall(r"(\w+_ms=\d+)", rest))
            lines.append(f"{event} {1000 * after:.0f}{f' ({took})' if took else ''}")
    print("FIGURE ... ms after the loss: " + ", ".join(lines))


def report(what, seconds):
    print(f"FIGURE {what}{' under MPS' if UNDER_MPS else ''}: {seconds:.3f} s until the next step was done")


def test_what_the_device_says(daemon):
    told = daemon.client().device()
    assert told.state == pb.DEVICE_SERVING
    assert told.mps == UNDER_MPS
    assert told.memory_bytes >= told.memory_limit_bytes > 0 and told.memory_left_bytes == told.memory_limit_bytes
    print(f"FIGURE {told.description}; driver {told.driver}; granularity {told.memory_granularity_bytes} bytes")


def test_a_device_by_its_uuid(start_daemon, rng):
    if not shutil.which("nvidia-smi"):
        pytest.skip("there is no nvidia-smi to ask for a UUID")
    listed = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True,
                            text=True, check=False)
    if listed.returncode != 0:
        pytest.skip(f"nvidia-smi says no UUID: {listed.stderr.strip() or listed.stdout.strip()}")
    device = f"cuda:{listed.stdout.split()[0]}"
    client = start_daemon(devices=(device,), device_memory="1G").client()
    session = client.open_session()
    pool = client.create_pool("uuid", TOKENS, 8, [region()])
    assert list(pool.spec.placements) == [device]
    lane = lane_of(session, pool, 0, 8, rng, Geometry(V41, TOKENS, 8), device)
    session.run(lane.store_and_load_step())
    lane.check_out()


def lose_executor(daemon, client, rng, lose, what):
    """A store loop of one session and a step of another while `lose` does its work."""
    geometry = Geometry(V41, TOKENS, 1024)
    pool = client.create_pool("loop", TOKENS, geometry.num_blocks, [region()])
    lane = lane_of(client.open_session("other"), pool, 1000, 8, rng, geometry)
    lane.session.run(lane.store_step())
    loop = StoreLoop(client.open_session("loop"), pool, geometry, rng)
    loop.start()
    loop.wait_under_way()
    restarts = client.device().restarts
    began_utc = time.time()
    lose()
    began = time.monotonic()
    run_until_done(lambda: lane.session.run(lane.load_step()))
    report(what, time.monotonic() - began)
    report_phases(daemon, began_utc)
    lane.check_out()
    loop.finish()
    assert client.device().restarts > restarts
    loop.check()
    print(f"{loop.done} steps finished, {loop.lost} lost, {len(loop.torn)} blocks torn")
    for versions, blocks in zip(loop.sources, loop.lanes):  # buffers kept their bytes, torn blocks can be stored again
        view = versions[0].view(0, len(blocks) * TOKENS, V41.row_bytes)
        loop.queue.run(Step(DEVICE).store(loop.region, view, slots_of(blocks, TOKENS)))
    loop.torn, loop.finished = set(), [0] * loop.LANES
    loop.check()


def test_killed_in_a_store_loop(daemon, rng):
    client = daemon.client()
    lose_executor(daemon, client, rng, lambda: kill_executor(client), "executor killed, one session, small pool")


def test_a_fault_of_the_gpu(daemon, rng):
    if not FAILPOINTS:
        pytest.skip("built without KVPOOL_FAILPOINTS: nothing makes the GPU fault")
    client = daemon.client()

    def fault():
        os.kill(client.device().executor_pid, signal.SIGUSR2)
        wait_until(lambda: client.device().restarts > 0 or client.device().state != pb.DEVICE_SERVING,
                   "the executor gone", 120)
    lose_executor(daemon, client, rng, fault, "GPU fault")


def test_a_large_pool_and_sixteen_sessions(daemon, rng):
    client = daemon.client()
    wanted, layers = 64 * GIB, 60
    left = client.device().memory_left_bytes
    if left < wanted:
        pytest.skip(f"needs a pool of 64 GiB, {left / GIB:.1f} GiB are left on {DEVICE}")
    blocks = wanted // (layers * V41.block_stride_bytes(TOKENS))
    geometry = Geometry(V41, TOKENS, blocks, layers)
    began = time.monotonic()
    pool = client.create_pool("large", TOKENS, blocks, [region(layers)])
    print(f"FIGURE pool of {pool.bytes_per_placement / GIB:.1f} GiB made in {time.monotonic() - began:.3f} s")
    lanes = []
    for i in range(16):
        session = client.open_session(f"session{i}")
        first = i * (blocks // 16)
        lane = lane_of(session, pool, first, 8, rng, geometry)
        lane.region = pb.RegionRef(pool_id=pool.pool_id, layer=i * 4 - i // 15)
        session.run(lane.store_step())
        lanes.append(lane)
    kill_executor(client)
    began, began_utc = time.monotonic(), time.time()
    run_until_done(lambda: lanes[0].session.run(lanes[0].load_step()))
    report("executor killed, 16 sessions, 64 GiB pool", time.monotonic() - began)
    report_phases(daemon, began_utc)
    for lane in lanes:
        run_until_done(lambda lane=lane: lane.session.run(lane.load_step()))
    print(f"FIGURE ... and {time.monotonic() - began:.3f} s until each of the 16 had one")
    for lane in lanes:
        lane.check_out()


def start_long_kernel():
    process = subprocess.Popen([build_dir() / "tests" / "gpu" / "long_kernel", "120"], stdout=subprocess.PIPE,
                               text=True)
    line = process.stdout.readline()
    assert line == "running\n", f"long_kernel said {line!r} and ended with {process.wait()}"
    return process


def test_another_process_is_killed_in_a_kernel(daemon, rng):
    """Under MPS every context of the server's clients is lost; time-sliced nothing happens to ours."""
    client = daemon.client()
    geometry = Geometry(V41, TOKENS, 64)
    pool = client.create_pool("bystander", TOKENS, 64, [region()])
    lane = lane_of(client.open_session(), pool, 0, 64, rng, geometry)
    lane.session.run(lane.store_step())
    other = start_long_kernel()
    try:
        lane.session.run(lane.load_step())  # beside the other's kernel
        lane.check_out()
    finally:
        other.kill()
        other.wait()
    began, began_utc = time.monotonic(), time.time()
    while True:  # a step may still be done by the old executor before it notices
        run_until_done(lambda: lane.session.run(lane.load_step()))
        lane.check_out()
        if not UNDER_MPS or client.device().restarts > 0 or time.monotonic() > began + 20:
            break
    restarts = client.device().restarts
    report(f"another process killed in a kernel, {restarts} executors lost", time.monotonic() - began)
    report_phases(daemon, began_utc)
    assert UNDER_MPS or restarts == 0
    assert client.device().state == pb.DEVICE_SERVING
    lane.check_memory(client.dump(lane.region, 0, 64))


def test_a_pool_that_does_not_fit(daemon):
    client = daemon.client()
    told = client.device()
    blocks = told.memory_left_bytes // V41.block_stride_bytes(TOKENS) + 1
    with pytest.raises(RpcFailure) as caught:
        client.create_pool("too-large", TOKENS, blocks, [region()])
    assert caught.value.status == "out_of_memory"
    text = caught.value.refusal.message
    for number in (Geometry(V41, TOKENS, blocks).region_bytes, told.memory_left_bytes, told.memory_limit_bytes):
        assert re.search(rf"\b{number}\b", text), (number, text)
    assert not client.pools() and client.device().memory_left_bytes == told.memory_left_bytes


def test_a_pool_as_large_as_the_memory(daemon, rng):
    client = daemon.client()
    told = client.device()
    usable = told.memory_left_bytes // told.memory_granularity_bytes * told.memory_granularity_bytes
    usable -= 64 * MIB  # for the buffers below
    layers = 60
    blocks = usable // (layers * V41.block_stride_bytes(TOKENS))
    pool = client.create_pool("all", TOKENS, blocks, [region(layers)])
    print(f"FIGURE pool of {pool.bytes_per_placement / GIB:.2f} GiB of {told.memory_bytes / GIB:.2f} GiB")
    session, geometry = client.open_session(), Geometry(V41, TOKENS, blocks, layers)
    lane = lane_of(session, pool, blocks - 8, 8, rng, geometry)
    for layer in (0, layers - 1):
        lane.write(random_rows(rng, V41, lane.count))
        lane.region = pb.RegionRef(pool_id=pool.pool_id, layer=layer)
        session.run(lane.store_and_load_step())
        lane.check_out()
    client.delete_pool(pool.pool_id, force=True)
    assert client.device().pool_bytes == 0
    again = client.create_pool("again", TOKENS, blocks, [region(layers)])
    client.delete_pool(again.pool_id)


def test_memory_beyond_the_records(start_daemon, rng):
    """What a pool takes beyond its layers * blocks * stride, and what the executor takes without any pool."""
    before = memory_used_bytes()
    if before is None:
        pytest.skip("NVML does not say how much memory is in use")
    client = start_daemon(device_memory="0").client()
    session = client.open_session()
    small = client.create_pool("warm-up", TOKENS, 8, [region()])
    lane = lane_of(session, small, 0, 8, rng, Geometry(V41, TOKENS, 8))
    session.run(lane.store_and_load_step())  # whatever is set up late is there now
    context = memory_used_bytes()
    layers = 60
    wanted = min(32 * GIB, client.device().memory_left_bytes // 2)
    blocks = wanted // (layers * V41.block_stride_bytes(TOKENS))
    pool = client.create_pool("measured", TOKENS, blocks, [region(layers)])
    exact = Geometry(V41, TOKENS, blocks, layers).region_bytes
    lane = lane_of(session, pool, 0, 8, rng, Geometry(V41, TOKENS, blocks, layers))
    session.run(lane.store_and_load_step())
    lane.release()
    used = memory_used_bytes() - context
    assert pool.bytes_per_placement == exact
    print(f"FIGURE {exact / GIB:.2f} GiB of records take {(used - exact) / MIB:.1f} MiB more (target "
          f"{exact * 0.001 / MIB + 64:.1f} MiB); context, staging and a small pool {(context - before) / MIB:.1f} MiB")
    assert used - exact <= exact * 0.001 + 64 * MIB
