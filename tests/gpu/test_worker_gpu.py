"""A worker on a GPU: the pool and its buffers as tensors of torch's, tensors of its own as buffers, its streams and the
executor's ops ordered by timelines; and a worker that has no CUDA of its own."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support import attach_wire as wire
from support import reference
from support.catalogue import INDEX_MXFP8, V41, Geometry
from support.cuda_driver import HOST_NUMA, PIECE, Chunk, Driver, DriverError, Mapped
from support.device import DEVICE, ON_GPU
from support.libkvpool import environment, kvpool
from support.nvml import memory_used_bytes
from support.process import wait_until
from support.traffic import random_rows, slots_of, whole_block_segments

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not ON_GPU, reason="$KVPOOL_TEST_DEVICE names no GPU")

UNDER_MPS = os.environ.get("KVPOOL_TEST_MPS") == "1"
TOKENS, BLOCKS, LAYERS = 64, 40, 3
MS = 60000
INSTEAD = "use a buffer that the daemon makes, kvpool_attachment_create_buffer"
REGIONS = [{"name": "kv", "format": "v41", "num_layers": LAYERS}, {"name": "index", "format": "index_mxfp8",
                                                                  "num_layers": LAYERS}]


@pytest.fixture
def rng():
    return np.random.default_rng(71)


@pytest.fixture(scope="module")
def scheduler(daemon):
    with kvpool.Client(str(daemon.socket), wait_until_serving=True) as made:
        yield made


@pytest.fixture
def session(scheduler):
    with scheduler.open_session("engine") as made:
        yield made


@pytest.fixture
def pool(scheduler, pool_name):
    made = scheduler.create_pool(pool_name, TOKENS, BLOCKS, REGIONS)
    yield made
    made.delete(force=True)


@pytest.fixture
def blocks(session, pool):
    return session.allocate(pool, 7)


@pytest.fixture
def worker(session, blocks):
    with kvpool.attach(session.ticket(DEVICE)) as made:
        yield made


def bf16(rows):
    """uint16 rows as a torch tensor of the GPU."""
    return torch.from_numpy(rows.view(np.int16)).cuda().view(torch.bfloat16)


def bytes_of(tensor):
    torch.cuda.synchronize()
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def segments_of(blocks):
    return np.array(whole_block_segments(blocks, TOKENS))


def store_and_load(step, layer, source, out, blocks):
    rows = len(blocks) * TOKENS
    step.store(layer, source.view(rows, V41.row_bytes), slots_of(blocks, TOKENS))
    return step.load(layer, segments_of(blocks), rows, out.view(rows, V41.row_bytes))


def test_regions_as_tensors(session, pool, pool_name, blocks, worker, rng):
    kv_rows, index_rows = random_rows(rng, V41, len(blocks) * TOKENS), random_rows(rng, INDEX_MXFP8, len(blocks) * TOKENS)
    slots = slots_of(blocks, TOKENS)
    session.store_rows(pool.layer("kv", 2), kv_rows, slots)
    session.store_rows(pool.layer("index", 1), index_rows, slots)
    mapped = worker.map_pool(pool_name)
    records = torch.from_dlpack(mapped.region("kv").array(2))
    stride = Geometry(V41, TOKENS, BLOCKS, LAYERS).block_stride_bytes
    assert records.is_cuda and records.shape == (BLOCKS, TOKENS, 1, 528) and records.stride() == (stride, 528, 528, 1)
    assert records.data_ptr() == mapped.region("kv").base + 2 * BLOCKS * stride
    ours = torch.as_tensor(blocks, dtype=torch.long, device=records.device)
    q = reference.quantize(V41, kv_rows)
    assert bytes_of(records[ours][..., :512]) == q.data.tobytes()
    assert bytes_of(records[ours][..., 512:]) == q.scales.tobytes()
    q = reference.quantize(INDEX_MXFP8, index_rows)
    data, scales = (torch.from_dlpack(a) for a in (mapped.region("index").data(1), mapped.region("index").scales(1)))
    assert bytes_of(data[ours]) == q.data.tobytes() and bytes_of(scales[ours]) == q.scales.tobytes()
    # The memory stays as long as the tensors.
    mapped.unmap()
    worker.detach()
    assert bytes_of(scales[ours]) == q.scales.tobytes()


def test_daemon_made_buffers_as_tensors(pool_name, blocks, worker, rng):
    rows = random_rows(rng, V41, len(blocks) * TOKENS)
    source, out = (worker.create_buffer(rows.nbytes) for _ in range(2))
    torch.from_dlpack(source.array("bfloat16", rows.shape)).copy_(bf16(rows))
    torch.cuda.synchronize()
    reports = worker.run(store_and_load(worker.step(), worker.map_pool(pool_name).layer("kv", 1), source, out, blocks))
    assert reports[0].rows_stored == reports[1].rows_loaded == len(rows)
    loaded = torch.from_dlpack(out.array("bfloat16", rows.shape))
    assert bytes_of(loaded) == reference.cast_back(V41, rows).tobytes()


def test_tensors_as_buffers(pool_name, blocks, worker, rng):
    """By IPC handles: somewhere inside the blocks of torch's allocator."""
    rows = random_rows(rng, V41, len(blocks) * TOKENS)
    keep = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")  # so that ours isn't at the block's begin
    source, out = bf16(rows), torch.zeros(rows.shape, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    buffers = [worker.import_tensor(tensor) for tensor in (source, out)]
    worker.run(store_and_load(worker.step(), worker.map_pool(pool_name).layer("kv"), *buffers, blocks))
    assert bytes_of(out) == reference.cast_back(V41, rows).tobytes()
    for buffer in buffers:
        buffer.release()
    del keep


def put(tensor, data):
    """Bytes into a uint8 tensor."""
    tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    torch.cuda.synchronize()


def check_rows(worker, pool_name, blocks, rng, source, out, write, read):
    """Rows go from one buffer into the pool and from there into the other one."""
    rows = random_rows(rng, V41, len(blocks) * TOKENS)
    write(rows.tobytes())
    layer = worker.map_pool(pool_name, kvpool.NOTHING).layer("kv")
    worker.run(store_and_load(worker.step(), layer, source, out, blocks))
    assert read() == reference.cast_back(V41, rows).tobytes()


def wait_memory_free(used, what):
    """The GPU has no more in use than at that time, but for what contexts take for themselves."""
    if used is not None:
        wait_until(lambda: memory_used_bytes() <= used + (64 << 20), what)


def use_one_allocation(pool_name, blocks, worker, rng):
    count = len(blocks) * TOKENS * V41.row_bytes
    whole = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    begins = (96 << 20) + 48, (200 << 20) + 16
    source, out = (whole[begin:begin + count] for begin in begins)
    buffers = [worker.import_tensor(tensor) for tensor in (source, source, out, whole)]
    assert buffers[1].address == source.data_ptr()

    def check(first):
        check_rows(worker, pool_name, blocks, rng, first, buffers[2], lambda data: put(source, data), lambda: bytes_of(out))

    check(buffers[0])
    buffers[0].release()
    check(buffers[1])
    buffers[1].release()
    again = worker.import_tensor(source)
    check(again)
    for begin in begins:
        assert not whole[begin - 4096:begin].any() and not whole[begin + count:begin + count + 4096].any()
    for buffer in (again, *buffers[2:]):
        buffer.release()


def test_one_allocation_many_times(pool_name, blocks, worker, rng):
    """Its buffers come and go; with the last one the executor has let go of it."""
    used = memory_used_bytes()
    use_one_allocation(pool_name, blocks, worker, rng)
    torch.cuda.empty_cache()
    wait_memory_free(used, "the allocation is free")


def test_fused_store_from_tensors(pool_name, blocks, worker, rng):
    """All that the op takes is the worker's own memory. The records are those of the same op on buffers of the daemon's."""
    count, positions = len(blocks) * TOKENS, 1000
    angles = torch.rand(positions, 32, device="cuda") * 6.28
    tensors = [bf16(random_rows(rng, V41, count)), (torch.rand(1, 512, device="cuda") + 0.5).bfloat16(),
               torch.cat([angles.cos(), angles.sin()], 1), torch.as_tensor(slots_of(blocks, TOKENS)).int().cuda(),
               torch.randint(positions, (count,), dtype=torch.int32, device="cuda")]
    ours = [worker.import_tensor(tensor) for tensor in tensors]
    theirs = [worker.create_buffer(tensor.numel() * tensor.element_size()) for tensor in tensors]
    for buffer, tensor in zip(theirs, tensors):
        torch.from_dlpack(buffer.array()).copy_(tensor.view(torch.uint8).flatten())
    torch.cuda.synchronize()
    mapped = worker.map_pool(pool_name)
    for layer, (source, weight, table, slots, at) in enumerate((ours, theirs)):
        step = worker.step()
        worker.run(step.fused_store(mapped.layer("kv", layer), source.view(count, 1024), weight.view(1, 1024), 1e-6,
                                    slots.int32(count), at.int32(count), table.view(positions, 256)))
    records = [torch.from_dlpack(mapped.region("kv").array(layer)) for layer in range(2)]
    first, second = (each[torch.as_tensor(blocks, dtype=torch.long, device=each.device)] for each in records)
    assert first.any() and bytes_of(first) == bytes_of(second)


@pytest.fixture(scope="module")
def driver():
    torch.cuda.init()
    return Driver()


def test_small_allocations(driver, pool_name, blocks, worker, rng):
    """Three in one block of the driver's: only the one in the middle changes."""
    count = TOKENS * V41.row_bytes
    addresses = [driver.allocate(count) for _ in range(3)]
    source = driver.allocate(count)
    for address in addresses:
        driver.fill(address, 0, count)
    buffers = [worker.import_device(address, count) for address in (source, addresses[1], addresses[0])]
    check_rows(worker, pool_name, blocks[:1], rng, *buffers[:2], lambda data: driver.write(source, data),
               lambda: driver.read(addresses[1], count))
    assert driver.read(addresses[0], count) == driver.read(addresses[2], count) == bytes(count)
    for buffer in buffers:
        buffer.release()
    for address in (*addresses, source):
        driver.free(address)


def test_virtual_memory(driver, pool_name, blocks, worker, rng):
    """Two pieces side by side, exported by the library and by the program; nothing may lie in both."""
    count = len(blocks) * TOKENS * V41.row_bytes
    chunks = [Chunk(driver, PIECE), Chunk(driver, 2 * PIECE)]
    memory = Mapped(driver, chunks)
    second = memory.address + PIECE
    source = worker.import_device(memory.address + 4096 + 16, count)
    fd = chunks[1].export()
    out = worker.import_vmm(fd, 2 * PIECE, PIECE - 48, count, second + PIECE - 48)
    os.close(fd)
    assert out.address == second + PIECE - 48
    check_rows(worker, pool_name, blocks, rng, source, out, lambda data: driver.write(source.address, data),
               lambda: driver.read(out.address, count))
    with pytest.raises(kvpool.Error, match=f"piece by piece, {INSTEAD}") as caught:
        worker.import_device(second - 4096, 8192)
    assert caught.value.status == kvpool.Status.OUT_OF_RANGE
    source.release()
    out.release()
    memory.close()
    for chunk in chunks:
        chunk.release()


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


def told(attachment, **changes):
    """What the daemon says to memory that it doesn't take; "" when it took it."""
    changes = {"fd": -1, "allocation_bytes": PIECE, "kind": wire.IPC_HANDLE, **changes}
    try:
        attachment.release_buffer(attachment.import_buffer(**changes).buffer_id)
    except wire.Refused as refusal:
        print(refusal)
        return f"{refusal.status}: {refusal.text}"
    return ""


REFUSALS = ("invalid_argument", "wrong_device")


def test_what_is_no_memory(driver, daemon, client, session, pool_name, blocks, worker, rng):
    """Wrong sizes, garbage, descriptors of other things: refused, and the executor and what it has open live on."""
    before = client.device()
    whole = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    base, size = driver.range_of(whole.data_ptr())
    handle, chunk = driver.ipc_handle(base), Chunk(driver, 2 * PIECE)
    with wire.Attachment(str(daemon.attach_socket), session.ticket(DEVICE)) as raw:
        assert told(raw, handle=handle, allocation_bytes=size) == ""
        for offset, count in ((0, size + 16), (size, 16), (size - 4096, 8192)):
            text = told(raw, handle=handle, allocation_bytes=1 << 40, offset=offset, count=count)
            assert text.startswith("out_of_range: ") and f"{count} bytes from {offset} on" in text
            assert text.endswith(f"which has {size}"), text
        for garbage in (bytes(64), b"\xff" * 64, np.random.default_rng(5).bytes(64)):
            assert told(raw, handle=garbage).split(":")[0] in REFUSALS, garbage
        fd, memfd, null = chunk.export(), os.memfd_create("none of CUDA's"), os.open("/dev/null", os.O_RDWR)
        os.truncate(memfd, PIECE)
        for other in (memfd, null):
            assert told(raw, fd=other, kind=wire.VMM).split(":")[0] in REFUSALS
        assert told(raw, fd=fd, kind=wire.VMM, allocation_bytes=3 * PIECE).startswith("invalid_argument: ")
        assert "is no multiple of" in told(raw, fd=fd, kind=wire.VMM, allocation_bytes=2 * PIECE - 16, count=64)
        assert told(raw, fd=fd, kind=wire.VMM, allocation_bytes=2 * PIECE) == ""
        for each in (fd, memfd, null):
            os.close(each)
    chunk.release()
    check_executor_lives(client, before, whole, pool_name, blocks, worker, rng)


def check_executor_lives(client, before, tensor, pool_name, blocks, worker, rng):
    count = len(blocks) * TOKENS * V41.row_bytes
    source, out = tensor[:count], tensor[32 << 20:(32 << 20) + count]
    buffers = [worker.import_tensor(each) for each in (source, out)]
    check_rows(worker, pool_name, blocks, rng, *buffers, lambda data: put(source, data), lambda: bytes_of(out))
    now = client.device()
    assert (now.executor_pid, now.restarts) == (before.executor_pid, before.restarts)
    for buffer in buffers:
        buffer.release()


def test_memory_of_the_host(driver, daemon, session):
    """Virtual memory that lies in no GPU."""
    try:
        chunk = Chunk(driver, PIECE, location=HOST_NUMA)
    except DriverError as error:
        pytest.skip(f"this driver makes none: {error}")
    fd = chunk.export()
    with wire.Attachment(str(daemon.attach_socket), session.ticket(DEVICE)) as raw:
        assert "lies in no GPU" in told(raw, fd=fd, kind=wire.VMM)
    os.close(fd)
    chunk.release()


@pytest.mark.skipif(UNDER_MPS, reason="under MPS a death inside a kernel is everybody's")
def test_a_worker_is_killed_with_its_memory_open(client, session, pool_name, blocks, worker, rng):
    """In the middle of steps on it. The executor and the others live on, and its memory is free."""
    before, used = client.device(), memory_used_bytes()
    slots = ",".join(str(slot) for slot in slots_of(blocks[:2], TOKENS))
    tensors = [torch.zeros(TOKENS * V41.row_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    buffers = [worker.import_tensor(tensor) for tensor in tensors]

    def check():
        check_rows(worker, pool_name, blocks[2:3], rng, *buffers, lambda data: put(tensors[0], data),
                   lambda: bytes_of(tensors[1]))

    tests = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join((environment()["PYTHONPATH"], tests))
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, pool_name, slots], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, env={**environment(), "PYTHONPATH": paths})
    with victim:
        victim.stdin.write(session.ticket(DEVICE).to_json())
        victim.stdin.close()
        said = victim.stdout.readline()
        if said:
            check()
        victim.kill()
    assert said == "running\n"
    wait_until(lambda: [len(s.attachments) for s in client.list_sessions() if s.session_id == session.id] == [1],
               "the victim is gone")
    check()
    now = client.device()
    assert (now.executor_pid, now.restarts) == (before.executor_pid, before.restarts)
    wait_memory_free(used, "what the victim had is free")
    for buffer in buffers:
        buffer.release()


def test_an_executor_dies_with_workers_memory(driver, daemon, client, pool_name, blocks, worker, rng):
    """Its successor opens all of it again but what is gone, which is lost by name; the rest is served."""
    count = TOKENS * V41.row_bytes
    tensor, chunk = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"), Chunk(driver, PIECE)
    memory, doomed = Mapped(driver, [chunk]), driver.allocate(64 << 20)
    begin = (32 << 20) + 16
    source, same = (worker.import_tensor(tensor[begin:begin + count]) for _ in range(2))
    out, lost = worker.import_device(memory.address + 4096, count), worker.import_device(doomed, count)
    ends = (lambda data: put(tensor[begin:begin + count], data)), (lambda: driver.read(memory.address + 4096, count))
    check_rows(worker, pool_name, blocks[:1], rng, source, out, *ends)
    executor, generation = client.device().executor_pid, worker.info()["generation"]
    os.kill(executor, signal.SIGSTOP)
    driver.free(doomed)  # which no program may do; one that has done it must not cost the others anything
    os.kill(executor, signal.SIGKILL)

    def serves():
        try:
            worker.check()
            return worker.info()["generation"] > generation
        except kvpool.DeviceLost:
            return False

    wait_until(serves, "the next executor")
    check_rows(worker, pool_name, blocks[:1], rng, source, out, *ends)
    check_rows(worker, pool_name, blocks[:1], rng, same, out, *ends)
    layer = worker.map_pool(pool_name, kvpool.NOTHING).layer("kv")
    with pytest.raises(kvpool.Error, match="is lost: its memory could not be opened again") as caught:
        worker.run(worker.step().store(layer, lost.view(TOKENS, V41.row_bytes), slots_of(blocks[:1], TOKENS)))
    assert caught.value.status == kvpool.Status.UNKNOWN_BUFFER
    [line] = [line for line in daemon.log.splitlines() if "buffer_lost" in line]
    print(line)
    assert f"buffer={lost.id} bytes={count} " in line and "cuIpcOpenMemHandle" in line
    for buffer in (lost, source, same, out):
        buffer.release()
    memory.close()
    chunk.release()


def test_streams_and_steps(pool_name, blocks, worker, rng):
    """Each replay: a stream writes rows and signals; the executor stores and loads them and signals; the stream waits and
    copies what was loaded. The CPU waits once, at the end."""
    shape = (len(blocks) * TOKENS, 512)
    source, out = (worker.create_buffer(shape[0] * V41.row_bytes) for _ in range(2))
    rows_in, rows_out = (torch.from_dlpack(b.array("bfloat16", shape)) for b in (source, out))
    ready, done = worker.new_word(kvpool.WORKER), worker.new_word(kvpool.EXECUTOR)
    step = worker.step()
    layer = worker.map_pool(pool_name, kvpool.NOTHING).layer("kv")
    step.store(layer, source.view(shape[0], V41.row_bytes), slots_of(blocks, TOKENS)).wait(ready, 1)
    step.load(layer, segments_of(blocks), shape[0], out.view(shape[0], V41.row_bytes)).signal(done, 1)
    values = [random_rows(rng, V41, shape[0]) for _ in range(8)]
    given, results = [bf16(v) for v in values], [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in values]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for replay, (rows, result) in enumerate(zip(given, results)):
        worker.post(step, base=replay, deadline_ms=20000)
        with torch.cuda.stream(stream):
            rows_in.copy_(rows)
            ready.stream_signal(replay + 1, stream)
            done.stream_wait(replay + 1, stream)
            result.copy_(rows_out)
    for _ in values:
        worker.wait(MS).check()
    stream.synchronize()
    assert done.read() == len(values)
    for value, result in zip(values, results):
        assert bytes_of(result) == reference.cast_back(V41, value).tobytes()


def run_child(text, session, *arguments, **changes):
    return subprocess.run([sys.executable, "-c", text, *arguments], input=session.ticket(DEVICE).to_json(), text=True,
                          capture_output=True, env={**environment(), **changes}, timeout=300, check=False)


WITHOUT_TORCH = """
import sys, kvpool
worker = kvpool.attach(sys.stdin.read())
mapped, buffer = worker.map_pool(sys.argv[1]), worker.create_buffer(1 << 20)
step = worker.step().store(mapped.layer("kv"), buffer.view(64, 1024), [int(s) for s in sys.argv[2].split(",")])
word = worker.new_word(kvpool.WORKER)
assert word.device_address() != 0
print(worker.run(step)[0].rows_stored, mapped.region("kv").base is not None, buffer.array().__dlpack_device__()[0])
worker.detach()
"""

ALLOCATOR = """
import sys, torch, kvpool
worker, block = kvpool.attach(sys.stdin.read()), int(sys.argv[2])
source = torch.randn(64, 512, device="cuda").bfloat16()
out = torch.zeros_like(source)
torch.cuda.synchronize()
try:
    buffers = [worker.import_tensor(tensor) for tensor in (source, out)]
except kvpool.Error as error:
    print(error.status.name, error)
    raise SystemExit
layer = worker.map_pool(sys.argv[1], kvpool.NOTHING).layer("kv")
step = worker.step().store(layer, buffers[0].view(64, 1024), [block * 64 + i for i in range(64)])
worker.run(step.load(layer, [[block, 0, 64, 0]], 64, buffers[1].view(64, 1024)))
error = float((out.float() - source.float()).norm() / source.float().norm())
print("OK" if 0 < error < 0.05 else f"wrong: {error}")
"""

VICTIM = """
import sys, torch, kvpool
from support.cuda_driver import PIECE, Chunk, Driver, Mapped
worker, slots = kvpool.attach(sys.stdin.read()), [int(s) for s in sys.argv[2].split(",")]
source = torch.ones(len(slots), 512, dtype=torch.bfloat16, device="cuda")
large = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
driver = Driver()
virtual = Mapped(driver, [Chunk(driver, PIECE)])
torch.cuda.synchronize()
buffers = [worker.import_tensor(source), worker.import_tensor(large), worker.import_device(virtual.address, PIECE)]
layer = worker.map_pool(sys.argv[1], kvpool.NOTHING).layer("kv")
step = worker.step().store(layer, buffers[0].view(len(slots), 1024), slots)
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

WRITES = """
import sys, torch, kvpool
worker = kvpool.attach(sys.stdin.read())
records = torch.from_dlpack(worker.map_pool(sys.argv[1]).region("kv").array())
try:
    records.fill_(7)
    torch.cuda.synchronize()
    print("written")
except RuntimeError:
    print("fault", flush=True)
import os
os._exit(0)
"""


def test_a_worker_without_cuda_of_its_own(session, pool, pool_name, blocks):
    slots = ",".join(str(slot) for slot in slots_of(blocks[:1], TOKENS))
    done = run_child(WITHOUT_TORCH, session, pool_name, slots)
    assert done.stdout == "64 True 2\n", done.stderr


@pytest.mark.parametrize("allocator, may_have_handles", [("expandable_segments:True", True),
                                                         ("backend:cudaMallocAsync", False)])
def test_allocators_of_torch(session, pool_name, blocks, allocator, may_have_handles):
    """Shared where torch makes memory with handles, which depends on its version; else it is said what to do instead."""
    done = run_child(ALLOCATOR, session, pool_name, str(blocks[0]), PYTORCH_CUDA_ALLOC_CONF=allocator,
                     PYTORCH_ALLOC_CONF=allocator)
    print(allocator, done.stdout)
    is_shared = may_have_handles and done.stdout == "OK\n"
    assert is_shared or (done.stdout.startswith("UNIMPLEMENTED ") and INSTEAD in done.stdout), done.stdout + done.stderr


@pytest.mark.skipif(UNDER_MPS, reason="under MPS a fault is everybody's")
def test_a_write_through_the_default_map_faults_the_writer(session, pool_name, pool, blocks, worker):
    """Refused by the hardware, in the writer's context alone."""
    done = run_child(WRITES, session, pool_name)
    assert done.stdout == "fault\n", done.stdout + done.stderr
    records = torch.from_dlpack(worker.map_pool(pool_name).region("kv").array())
    assert int(records.sum()) == 0
    worker.run(worker.step().zero_blocks(pool, blocks))


def test_broken_handles(driver, daemon, client, session, pool_name, blocks, worker, rng):
    """A handle with one word changed, whatever each of them means: whatever is said, the executor lives. Last, for it
    would cost the others theirs."""
    before = client.device()
    whole = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    handle = driver.ipc_handle(driver.range_of(whole.data_ptr())[0])
    with wire.Attachment(str(daemon.attach_socket), session.ticket(DEVICE)) as raw:
        for i in range(0, 64, 4):
            broken = bytearray(handle)
            broken[i] ^= 0x5A
            print(i, told(raw, handle=bytes(broken), count=4096) or "taken")
    check_executor_lives(client, before, whole, pool_name, blocks, worker, rng)
