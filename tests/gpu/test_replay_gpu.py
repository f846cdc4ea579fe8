"""Decode captured in a CUDA graph by torch, whose stores the daemon does: 61 layers, replayed 1,000 times without being
built anew, to other slots each time, and compared with what torch makes of the same rows.

The graph of a layer makes rows, signals, waits, and reads the records back from the pool's own memory: what it saw must be
what is there afterwards. $KVPOOL_TEST_REPLAYS: fewer of them. Under MPS or time-sliced, as the environment says."""
import os
import time

import pytest

torch = pytest.importorskip("torch")

from support.device import DEVICE, ON_GPU  # noqa: E402
from support.libkvpool import kvpool  # noqa: E402

pytestmark = pytest.mark.skipif(not ON_GPU or not torch.cuda.is_available(), reason="$KVPOOL_TEST_DEVICE names no GPU")

LAYERS, ROWS, ELEMENTS, ROTARY, POSITIONS = 61, 64, 512, 64, 1000
TOKENS, BLOCKS = 64, 64
EPS = 1e-6
REPLAYS = int(os.environ.get("KVPOOL_TEST_REPLAYS", "1000"))
MS = 60000
UNDER_MPS = os.environ.get("KVPOOL_TEST_MPS") == "1"


class Case:
    """Session, worker, and the tensors that both sides share."""

    def __init__(self, scheduler, name):
        self.pool = scheduler.create_pool(name, TOKENS, BLOCKS, [{"name": "kv", "format": "v41", "num_layers": LAYERS}])
        self.session = scheduler.open_session("decode")
        self.blocks = self.session.allocate(self.pool, BLOCKS)
        self.worker = kvpool.attach(self.session.ticket(DEVICE))
        self.map = self.worker.map_pool(name)
        inputs = LAYERS * ROWS * ELEMENTS * 2
        self.buffer = self.worker.create_buffer(inputs + ELEMENTS * 2 + POSITIONS * ROTARY * 4)
        self.rows = torch.from_dlpack(self.buffer.array("bfloat16", (LAYERS, ROWS, ELEMENTS)))
        self.weight = torch.from_dlpack(self.buffer.array("bfloat16", (ELEMENTS,), inputs))
        self.table = torch.from_dlpack(self.buffer.array("float32", (POSITIONS, ROTARY), inputs + ELEMENTS * 2))
        self.weight_view = self.buffer.view(1, ELEMENTS * 2, inputs)
        self.table_view = self.buffer.view(POSITIONS, ROTARY * 4, inputs + ELEMENTS * 2)
        self.records = [torch.from_dlpack(self.map.region("kv").array(layer)) for layer in range(LAYERS)]
        angles = torch.rand(POSITIONS, ROTARY // 2, device="cuda") * 6.28
        self.weight.copy_(torch.rand(ELEMENTS, device="cuda") + 0.5)
        self.table.copy_(torch.cat([angles.cos(), angles.sin()], 1))
        self.step = self.worker.step()

    def close(self):
        torch.cuda.synchronize()
        self.records = self.rows = self.weight = self.table = None
        self.worker.detach()
        self.session.close()
        self.pool.delete(force=True)

    def fill(self, slots, positions):
        """One launch's step: an op a layer, between points layer + 1."""
        self.step.clear()
        slots, positions = self.step.array(slots), self.step.array(positions)
        for layer in range(LAYERS):
            rows = self.buffer.view(ROWS, ELEMENTS * 2, layer * ROWS * ELEMENTS * 2)
            self.step.fused_store(self.map.layer("kv", layer), rows, self.weight_view, EPS, slots, positions,
                                  self.table_view).points(layer + 1, layer + 1)
        return self.step

    def read(self, layer, slots):
        """Records as they are, [rows, 528]."""
        return self.records[layer][slots // TOKENS, slots % TOKENS, 0]


def dequantized(records):
    """v41: 512 e4m3 codes, then 16 powers of two."""
    codes = records[..., :ELEMENTS].contiguous().view(torch.float8_e4m3fn).float()
    scales = torch.exp2(records[..., ELEMENTS:].float() - 127)
    return codes * scales.repeat_interleave(32, -1)


def reference(rows, weight, table, positions):
    """What OPS calls fused_store, by torch: norm, then RoPE of pairs, BF16 in between, then v41 and back."""
    x = rows.float()
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()).bfloat16().float()
    angles = table[positions]
    cos, sin = angles[:, :ROTARY // 2], angles[:, ROTARY // 2:]
    first, second = x[..., ELEMENTS - ROTARY::2], x[..., ELEMENTS - ROTARY + 1::2]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
    x = torch.cat([x[..., :ELEMENTS - ROTARY], turned], -1).bfloat16().float()
    groups = x.unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def capture(case, replay, seen, seed, slots):
    """The graph; what it reads of each layer goes into seen[layer]."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    mixing = torch.randn(ELEMENTS, ELEMENTS, device="cuda", dtype=torch.bfloat16) / ELEMENTS**0.5

    def layers(points):
        state = seed
        for layer in range(LAYERS):
            state = torch.tanh(state @ mixing) + 0.01 * layer
            case.rows[layer].copy_(state)
            if points:
                replay.signal_and_wait(stream, layer + 1)
            seen[layer].copy_(case.read(layer, slots))
            state = state + 0.1 * dequantized(seen[layer]).bfloat16()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layers(False)  # whatever torch makes on first use
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        replay.begin(stream)
        layers(True)
        replay.end(stream, LAYERS)
    return graph


@pytest.fixture
def case(start_daemon, pool_name):
    torch.manual_seed(61)
    torch.zeros(1, device="cuda")
    daemon = start_daemon(device_memory="0")
    with kvpool.Client(str(daemon.socket), wait_until_serving=True) as scheduler:
        made = Case(scheduler, pool_name)
        yield made
        made.close()


def modes():
    return [kvpool.AUTOMATIC, kvpool.BY_OP] if UNDER_MPS else [kvpool.AUTOMATIC]


@pytest.mark.parametrize("mode", modes())
def test_decode_in_a_graph(case, mode):
    replays = REPLAYS if mode == kvpool.AUTOMATIC else min(REPLAYS, 50)
    seen = torch.zeros(LAYERS, ROWS, 528, dtype=torch.uint8, device="cuda")
    seed = torch.zeros(ROWS, ELEMENTS, dtype=torch.bfloat16, device="cuda")
    slots = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    replay = kvpool.Replay(case.worker, LAYERS, mode)
    assert replay.mode == (kvpool.ONE_LAUNCH if UNDER_MPS and mode == kvpool.AUTOMATIC else kvpool.BY_OP)
    graph = capture(case, replay, seen, seed, slots)
    first_slot = torch.as_tensor(case.blocks).repeat_interleave(TOKENS) * TOKENS
    every_slot = first_slot + torch.arange(BLOCKS * TOKENS) % TOKENS
    worst, began = 0.0, time.monotonic()
    for turn in range(replays):
        chosen = every_slot[torch.randperm(len(every_slot))[:ROWS]].to(torch.int32)
        positions = torch.randint(0, POSITIONS, (ROWS,), dtype=torch.int32)
        slots.copy_(chosen)
        seed.copy_(torch.randn(ROWS, ELEMENTS))
        step_id = replay.post(case.fill(chosen.numpy(), positions.numpy()))
        graph.replay()
        torch.cuda.synchronize()
        replay.check()
        done = case.worker.wait(MS)
        assert done.step_id == step_id and done.error is None, done.error
        assert sum(report.rows_stored for report in done.reports) == LAYERS * ROWS
        there = torch.stack([case.read(layer, slots) for layer in range(LAYERS)])
        assert torch.equal(there, seen), f"replay {turn}: the graph read other records than are there"
        if turn % 50 == 0 or turn == replays - 1:
            expected = reference(case.rows, case.weight, case.table, positions.cuda().long())
            error = torch.linalg.norm(dequantized(there) - expected) / torch.linalg.norm(expected)
            worst = max(worst, error.item())
            assert worst < 5e-3, f"replay {turn}: relative error {error.item()} against torch"
    took = time.monotonic() - began
    print(f"FIGURE {'MPS' if UNDER_MPS else 'time-sliced'}, mode {replay.mode}: {replays} replays of {LAYERS} layers, "
          f"worst relative error against torch {worst:.2e}, {1e3 * took / replays:.1f} ms each with all checks")
    graph.reset()
    replay.destroy()


def test_memory_is_made_while_a_replay_waits(case):
    """A worker that asks the daemon for something between post and launch isn't stopped by its own replay."""
    stream = torch.cuda.Stream()
    replay = kvpool.Replay(case.worker, LAYERS)
    rows = list(range(ROWS))
    step_id = replay.post(case.fill([case.blocks[0] * TOKENS + slot for slot in rows], rows))
    began = time.monotonic()
    case.worker.create_buffer(1 << 20).release()
    print(f"FIGURE {'MPS' if UNDER_MPS else 'time-sliced'}: a buffer made and released while a replay waits: "
          f"{1e3 * (time.monotonic() - began):.1f} ms")
    replay.begin(stream)
    for point in range(1, LAYERS + 1):
        replay.signal(stream, point)
    replay.end(stream, LAYERS)
    torch.cuda.synchronize()
    replay.check()
    done = case.worker.wait(MS)
    assert done.step_id == step_id and done.error is None, done.error
    replay.destroy()


def test_a_graph_whose_step_never_comes(case):
    """Its waits end, and say so; the worker's other steps run."""
    if not UNDER_MPS:
        pytest.skip("memory-operation nodes wait until somebody aborts them")
    stream = torch.cuda.Stream()
    replay = kvpool.Replay(case.worker, LAYERS, deadline_ms=200)
    replay.begin(stream)
    for point in range(1, 4):
        replay.signal_and_wait(stream, point)
    torch.cuda.synchronize()
    with pytest.raises(kvpool.DeadlineExceeded):
        replay.check()
    replay.destroy()


def test_an_aborted_graph(case):
    stream = torch.cuda.Stream()
    replay = kvpool.Replay(case.worker, LAYERS)
    replay.begin(stream)
    replay.signal_and_wait(stream, 1)
    time.sleep(0.1)  # it waits by now
    replay.abort()
    torch.cuda.synchronize()
    with pytest.raises(kvpool.Error) as caught:
        replay.check()
    assert caught.value.status == kvpool.Status.CANCELLED
    replay.destroy()


def test_a_step_whose_graph_never_comes(case):
    """The executor's wait ends by its deadline; the attachment goes on."""
    replay = kvpool.Replay(case.worker, LAYERS, deadline_ms=200)
    chosen = list(range(ROWS))
    step_id = replay.post(case.fill([case.blocks[0] * TOKENS + slot for slot in chosen], chosen))
    failed = case.worker.wait(MS)
    assert failed.step_id == step_id and failed.error.status == kvpool.Status.DEADLINE_EXCEEDED and failed.error.op == 0
    with pytest.raises(kvpool.Error) as caught:
        replay.check() if replay.mode == kvpool.BY_OP else look(replay)
    assert caught.value.status == kvpool.Status.CANCELLED
    replay.destroy()


def look(replay):
    """A graph finds out by its next wait."""
    stream = torch.cuda.Stream()
    replay.begin(stream)
    replay.wait(stream, 1)
    torch.cuda.synchronize()
    replay.check()
