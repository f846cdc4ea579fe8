"""Tensors of torch's as buffers of a worker on a GPU: wherever they lie in the blocks of torch's allocator, and what it says
of memory of other allocators."""
import subprocess
import sys

import numpy as np
import pytest

from support import reference
from support.catalogue import V41
from support.device import DEVICE, ON_GPU
from support.libkvpool import environment
from support.traffic import random_rows, slots_of, whole_block_segments
from support.worker_fixtures import blocks, pool, scheduler, session, worker  # fixtures

torch = pytest.importorskip("torch")
from support.torch_rows import bf16, bytes_of

pytestmark = pytest.mark.skipif(not ON_GPU, reason="$KVPOOL_TEST_DEVICE names no GPU")

TOKENS = BLOCK_SIZE = 64
BLOCKS, LAYERS = 40, 2
REGIONS = [{"name": "kv", "format": "v41", "num_layers": LAYERS}]
INSTEAD = "use a buffer that the daemon makes, kvpool_attachment_create_buffer"


@pytest.fixture
def rng():
    return np.random.default_rng(73)


def store_and_load(step, layer, source, out, blocks):
    rows = len(blocks) * TOKENS
    step.store(layer, source.view(rows, V41.row_bytes), slots_of(blocks, TOKENS))
    return step.load(layer, np.array(whole_block_segments(blocks, TOKENS)), rows, out.view(rows, V41.row_bytes))


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


def run_child(text, session, *arguments, **changes):
    return subprocess.run([sys.executable, "-c", text, *arguments], input=session.ticket(DEVICE).to_json(), text=True,
                          capture_output=True, env={**environment(), **changes}, timeout=300, check=False)


@pytest.mark.parametrize("allocator, may_have_handles", [("expandable_segments:True", True),
                                                         ("backend:cudaMallocAsync", False)])
def test_allocators_of_torch(session, pool_name, blocks, allocator, may_have_handles):
    """Shared where torch makes memory with handles, which depends on its version; else it is said what to do instead."""
    done = run_child(ALLOCATOR, session, pool_name, str(blocks[0]), PYTORCH_CUDA_ALLOC_CONF=allocator,
                     PYTORCH_ALLOC_CONF=allocator)
    print(allocator, done.stdout)
    is_shared = may_have_handles and done.stdout == "OK\n"
    assert is_shared or (done.stdout.startswith("UNIMPLEMENTED ") and INSTEAD in done.stdout), done.stdout + done.stderr
