"""A worker's own memory on a GPU, made by the driver: what the executor opens, by which handles and how far; what it
refuses; and what becomes of it when the worker or the executor dies. Tensors of torch's are in
test_worker_tensors_gpu.py.

No torch here: it also runs on a CUDA in host memory, see tests/e2e/test_gpu_imports.py."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support import attach_wire as wire
from support import reference
from support.catalogue import V41
from support.cuda_driver import HOST_NUMA, PIECE, Chunk, Driver, DriverError, Mapped
from support.device import DEVICE, ON_GPU
from support.libkvpool import environment, kvpool
from support.nvml import memory_used_bytes
from support.process import wait_until
from support.traffic import random_rows, slots_of, whole_block_segments
from support.worker_fixtures import blocks, pool, scheduler, session, worker  # fixtures

pytestmark = pytest.mark.skipif(not ON_GPU, reason="$KVPOOL_TEST_DEVICE names no GPU")

UNDER_MPS = os.environ.get("KVPOOL_TEST_MPS") == "1"
TOKENS = BLOCK_SIZE = 64
BLOCKS = 40
REGIONS = [{"name": "kv", "format": "v41", "num_layers": 1}]
BLOCK_BYTES = TOKENS * V41.row_bytes
REFUSALS = ("invalid_argument", "wrong_device")
INSTEAD = "use a buffer that the daemon makes, kvpool_attachment_create_buffer"


@pytest.fixture
def rng():
    return np.random.default_rng(72)


@pytest.fixture(scope="module")
def driver():
    return Driver()


@pytest.fixture
def raw(daemon, session, blocks):
    """A worker that says what it likes of its memory."""
    with wire.Attachment(str(daemon.attach_socket), session.ticket(DEVICE)) as made:
        yield made


@pytest.fixture
def check(driver, pool_name, worker, rng):
    """check(blocks, source, out): rows go from the beginning of one buffer into the pool, and from there into the other."""

    def check_rows(blocks, source, out):
        rows = random_rows(rng, V41, len(blocks) * TOKENS)
        driver.write(source.address, rows.tobytes())
        layer = worker.map_pool(pool_name, kvpool.NOTHING).layer("kv")
        step = worker.step().store(layer, source.view(len(rows), V41.row_bytes), slots_of(blocks, TOKENS))
        worker.run(step.load(layer, np.array(whole_block_segments(blocks, TOKENS)), len(rows),
                             out.view(len(rows), V41.row_bytes)))
        assert driver.read(out.address, rows.nbytes) == reference.cast_back(V41, rows).tobytes()

    return check_rows


@pytest.fixture
def executor_lives(driver, client, worker, blocks, check):
    """At the end of the test it is the same one as at the beginning, and opens memory as before."""
    before = client.device()
    yield
    address = driver.allocate(2 * BLOCK_BYTES)
    buffers = [worker.import_device(address + at, BLOCK_BYTES) for at in (0, BLOCK_BYTES)]
    check(blocks[:1], *buffers)
    for buffer in buffers:
        buffer.release()
    driver.free(address)
    now = client.device()
    assert (now.executor_pid, now.restarts) == (before.executor_pid, before.restarts)


def wait_memory_free(used, what):
    """The GPU has no more in use than at that time, but for what contexts take for themselves."""
    if used is not None:
        wait_until(lambda: memory_used_bytes() <= used + (64 << 20), what)


# ---- what is taken -------------------------------------------------------------------------------------------------


def test_one_allocation_many_times(driver, blocks, worker, check):
    """Its buffers come and go; with the last one the executor has let go of it."""
    used, size = memory_used_bytes(), 256 << 20
    base, count = driver.allocate(size), len(blocks) * BLOCK_BYTES
    driver.fill(base, 0, size)
    begins = (96 << 20) + 48, (200 << 20) + 16
    places = [(base + begins[0], count), (base + begins[0], count), (base + begins[1], count), (base, size)]
    first, second, out, whole = (worker.import_device(*place) for place in places)
    check(blocks, first, out)
    first.release()
    check(blocks, second, out)
    second.release()
    again = worker.import_device(*places[0])
    check(blocks, again, out)
    out.release()
    check(blocks, again, whole)
    for at in (begins[0] - 4096, begins[0] + count, begins[1] - 4096, begins[1] + count, size - 4096):
        assert driver.read(base + at, 4096) == bytes(4096), at
    again.release()
    whole.release()
    driver.free(base)
    wait_memory_free(used, "the allocation is free")


def test_small_allocations(driver, blocks, worker, check):
    """Three in one block of the driver's: only the one in the middle changes."""
    addresses = [driver.allocate(BLOCK_BYTES) for _ in range(4)]
    for address in addresses:
        driver.fill(address, 0, BLOCK_BYTES)
    out, first, source = (worker.import_device(addresses[i], BLOCK_BYTES) for i in (1, 0, 3))
    check(blocks[:1], source, out)
    assert driver.read(addresses[0], BLOCK_BYTES) == driver.read(addresses[2], BLOCK_BYTES) == bytes(BLOCK_BYTES)
    for buffer in (out, first, source):
        buffer.release()
    for address in addresses:
        driver.free(address)


def test_virtual_memory(driver, blocks, worker, check):
    """Two pieces side by side, one exported by the library, one by the program; no buffer may lie in both."""
    chunks = [Chunk(driver, PIECE), Chunk(driver, 2 * PIECE)]
    memory, count = Mapped(driver, chunks), len(blocks) * BLOCK_BYTES
    second = memory.address + PIECE
    source = worker.import_device(memory.address + 4096 + 16, count)
    fd = chunks[1].export()
    out = worker.import_vmm(fd, 2 * PIECE, PIECE - 48, count, second + PIECE - 48)
    os.close(fd)
    assert out.address == second + PIECE - 48
    check(blocks, source, out)
    with pytest.raises(kvpool.Error, match=f"piece by piece, {INSTEAD}") as caught:
        worker.import_device(second - 4096, 8192)
    assert caught.value.status == kvpool.Status.OUT_OF_RANGE
    source.release()
    out.release()
    memory.close()
    for chunk in chunks:
        chunk.release()


# ---- what is not ---------------------------------------------------------------------------------------------------


def test_memory_without_a_handle(driver, worker):
    chunk = Chunk(driver, PIECE, handle_types=0)
    memory, pooled = Mapped(driver, [chunk]), driver.allocate_async(PIECE)
    for address in (memory.address, pooled):
        with pytest.raises(kvpool.Error, match=INSTEAD) as caught:
            worker.import_device(address, PIECE)
        print(caught.value)
        assert caught.value.status == kvpool.Status.UNIMPLEMENTED
    driver.free_async(pooled)
    memory.close()
    chunk.release()


def told(raw, **changes):
    """What the daemon says to memory that it doesn't take; "" when it took it."""
    changes = {"fd": -1, "allocation_bytes": PIECE, "kind": wire.IPC_HANDLE, **changes}
    try:
        raw.release_buffer(raw.import_buffer(**changes).buffer_id)
    except wire.Refused as refusal:
        print(refusal)
        return f"{refusal.status}: {refusal.text}"
    return ""


def test_bounds_of_an_ipc_handle(driver, raw, executor_lives):
    address, size = driver.allocate(64 << 20), 64 << 20
    handle = driver.ipc_handle(address)
    assert driver.range_of(address) == (address, size)
    assert told(raw, handle=handle, allocation_bytes=size) == ""
    for offset, count in ((0, size + 16), (size, 16), (size - 4096, 8192)):
        text = told(raw, handle=handle, allocation_bytes=1 << 40, offset=offset, count=count)
        assert text.startswith("out_of_range: ") and f"{count} bytes from {offset} on" in text, text
        assert text.endswith(f"which has {size}"), text
    driver.free(address)


def test_what_is_no_handle(raw, rng, executor_lives):
    for garbage in (bytes(64), b"\xff" * 64, rng.bytes(64)):
        assert told(raw, handle=garbage).split(":")[0] in REFUSALS, garbage


def test_what_is_no_descriptor(driver, raw, executor_lives):
    memfd, null = os.memfd_create("none of CUDA's"), os.open("/dev/null", os.O_RDWR)
    os.truncate(memfd, PIECE)
    for fd in (memfd, null):
        assert told(raw, fd=fd, kind=wire.VMM).split(":")[0] in REFUSALS
        os.close(fd)


def test_bounds_of_a_descriptor(driver, raw, executor_lives):
    chunk = Chunk(driver, 2 * PIECE)
    fd = chunk.export()
    assert told(raw, fd=fd, kind=wire.VMM, allocation_bytes=3 * PIECE).startswith("invalid_argument: ")
    assert "is no multiple of" in told(raw, fd=fd, kind=wire.VMM, allocation_bytes=2 * PIECE - 16, count=64)
    assert told(raw, fd=fd, kind=wire.VMM, allocation_bytes=2 * PIECE) == ""
    os.close(fd)
    chunk.release()


def test_memory_of_the_host(driver, raw, executor_lives):
    """Virtual memory that lies in no GPU."""
    try:
        chunk = Chunk(driver, PIECE, location=HOST_NUMA)
    except DriverError as error:
        pytest.skip(f"this driver makes none: {error}")
    fd = chunk.export()
    assert "lies in no GPU" in told(raw, fd=fd, kind=wire.VMM)
    os.close(fd)
    chunk.release()


# ---- deaths --------------------------------------------------------------------------------------------------------

VICTIM = """
import sys, kvpool
from support.cuda_driver import PIECE, Chunk, Driver, Mapped
worker, driver, slots = kvpool.attach(sys.stdin.read()), Driver(), [int(s) for s in sys.argv[2].split(",")]
large, virtual = driver.allocate(512 << 20), Mapped(driver, [Chunk(driver, PIECE)])
driver.fill(large, 0x3F, len(slots) * 1024)
source, rest, piece = (worker.import_device(*each) for each in
                       ((large, len(slots) * 1024), (large, 512 << 20), (virtual.address, PIECE)))
layer = worker.map_pool(sys.argv[1], kvpool.NOTHING).layer("kv")
step = worker.step().store(layer, source.view(len(slots), 1024), slots)
worker.run(step)
print("running", flush=True)
while True:
    try:
        worker.post(step)
    except kvpool.Busy:
        pass
    while worker.poll() is not None:
        pass
"""


@pytest.mark.skipif(UNDER_MPS, reason="under MPS a death inside a kernel is everybody's")
def test_a_worker_is_killed_with_its_memory_open(driver, client, session, pool_name, blocks, worker, check,
                                                 executor_lives):
    """In the middle of steps on it. The executor and other workers live on, and its memory is free."""
    address = driver.allocate(2 * BLOCK_BYTES)
    ours = [worker.import_device(address + at, BLOCK_BYTES) for at in (0, BLOCK_BYTES)]
    used, slots = memory_used_bytes(), ",".join(str(slot) for slot in slots_of(blocks[:2], TOKENS))
    tests = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join((environment()["PYTHONPATH"], tests))
    with subprocess.Popen([sys.executable, "-c", VICTIM, pool_name, slots], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, env={**environment(), "PYTHONPATH": paths}) as victim:
        victim.stdin.write(session.ticket(DEVICE).to_json())
        victim.stdin.close()
        said = victim.stdout.readline()
        if said:
            check(blocks[2:3], *ours)
        victim.kill()
    assert said == "running\n"
    wait_until(lambda: [len(s.attachments) for s in client.list_sessions() if s.session_id == session.id] == [1],
               "the victim is gone")
    check(blocks[2:3], *ours)
    wait_memory_free(used, "what the victim had is free")
    for buffer in ours:
        buffer.release()
    driver.free(address)


def test_an_executor_dies(driver, daemon, client, pool_name, blocks, worker, check):
    """Its successor opens all of a worker's memory again but what is gone, which is lost by name; the rest is served."""
    address, size, begin = driver.allocate(64 << 20), 64 << 20, (32 << 20) + 16
    chunk = Chunk(driver, PIECE)
    memory, doomed = Mapped(driver, [chunk]), driver.allocate(size)
    source, same = (worker.import_device(address + begin, BLOCK_BYTES) for _ in range(2))
    out, lost = worker.import_device(memory.address + 4096, BLOCK_BYTES), worker.import_device(doomed, BLOCK_BYTES)
    check(blocks[:1], source, out)
    executor, generation = client.device().executor_pid, worker.info()["generation"]
    os.kill(executor, signal.SIGSTOP)
    driver.free(doomed)  # which no program may do: one that has done it costs the others nothing
    os.kill(executor, signal.SIGKILL)

    def serves():
        try:
            worker.check()
            return worker.info()["generation"] > generation
        except kvpool.DeviceLost:
            return False

    wait_until(serves, "the next executor")
    check(blocks[:1], source, out)
    check(blocks[:1], same, out)
    layer = worker.map_pool(pool_name, kvpool.NOTHING).layer("kv")
    step = worker.step().store(layer, lost.view(TOKENS, V41.row_bytes), slots_of(blocks[:1], TOKENS))
    with pytest.raises(kvpool.Error, match="is lost: its memory could not be opened again") as caught:
        worker.run(step)
    assert caught.value.status == kvpool.Status.UNKNOWN_BUFFER
    [line] = [line for line in daemon.log.splitlines() if "buffer_lost" in line]
    print(line)
    assert f"buffer={lost.id} bytes={BLOCK_BYTES} " in line and "cuIpcOpenMemHandle" in line
    for buffer in (lost, source, same, out):
        buffer.release()
    memory.close()
    chunk.release()
    driver.free(address)


def test_broken_handles(driver, raw, executor_lives):
    """A handle with one word changed, whatever each of them means: whatever is said, the executor lives. The last test,
    for if it did not, this would cost the others theirs."""
    address = driver.allocate(64 << 20)
    handle = driver.ipc_handle(address)
    for i in range(0, 64, 4):
        broken = bytearray(handle)
        broken[i] ^= 0x5A
        print(i, told(raw, handle=bytes(broken), count=4096) or "taken")
    driver.free(address)
