"""A worker on a GPU: the pool and its buffers as tensors of torch's, its streams and the executor's ops ordered by
timelines; and a worker that has no CUDA of its own. Memory of the worker's own: test_worker_memory_gpu.py."""
import os
import subprocess
import sys

import numpy as np
import pytest

from support import reference
from support.catalogue import INDEX_MXFP8, V41, Geometry
from support.device import DEVICE, ON_GPU
from support.libkvpool import environment, kvpool
from support.traffic import random_rows, slots_of, whole_block_segments
from support.worker_fixtures import blocks, pool, scheduler, session, worker  # fixtures

torch = pytest.importorskip("torch")
from support.torch_rows import bf16, bytes_of

pytestmark = pytest.mark.skipif(not ON_GPU, reason="$KVPOOL_TEST_DEVICE names no GPU")

UNDER_MPS = os.environ.get("KVPOOL_TEST_MPS") == "1"
TOKENS = BLOCK_SIZE = 64
BLOCKS, LAYERS = 40, 3
MS = 60000
REGIONS = [{"name": "kv", "format": "v41", "num_layers": LAYERS}, {"name": "index", "format": "index_mxfp8",
                                                                  "num_layers": LAYERS}]


@pytest.fixture
def rng():
    return np.random.default_rng(71)


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


@pytest.mark.skipif(UNDER_MPS, reason="under MPS a fault is everybody's")
def test_a_write_through_the_default_map_faults_the_writer(session, pool_name, pool, blocks, worker):
    """Refused by the hardware, in the writer's context alone."""
    done = run_child(WRITES, session, pool_name)
    assert done.stdout == "fault\n", done.stdout + done.stderr
    records = torch.from_dlpack(worker.map_pool(pool_name).region("kv").array())
    assert int(records.sum()) == 0
    worker.run(worker.step().zero_blocks(pool, blocks))
