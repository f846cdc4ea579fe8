"""A region larger than 4 GiB: addresses on both sides of 2^31 and 2^32 bytes, and across the borders of its chunks.

Of a host every byte is looked at, of a GPU the blocks around (contract_large looks at all of a GPU's)."""
import os

import numpy as np
import pytest

from support import reference
from support.catalogue import INDEX_FP4, V41, Geometry
from support.client import Step
from support.daemon import Daemon
from support.device import ON_GPU
from support.reference import RegionModel
from support.stubs import pb
from support.traffic import random_rows

GIB = 1 << 30
BORDERS = (GIB, 2 * GIB, 3 * GIB, 4 * GIB)
TOKENS = 133
PIECE_BYTES = 16 << 20


def available_bytes():
    with open("/proc/meminfo", encoding="ascii") as info:
        return next(int(line.split()[1]) << 10 for line in info if line.startswith("MemAvailable"))


@pytest.fixture(scope="module")
def big_daemon():
    if not ON_GPU and available_bytes() < 10 * GIB:
        pytest.skip(f"needs 10 GiB of free memory, {available_bytes() / GIB:.1f} GiB are there")
    with Daemon(device_memory="8G") as running:
        yield running


class Sparse:
    """What the region should hold: zero everywhere except for the written pieces."""

    def __init__(self, geometry):
        self.geometry, self.pieces = geometry, {}

    def put(self, layer, slots, rows):
        q = reference.quantize(self.geometry.format, rows)
        for i, slot in enumerate(slots):
            slot = int(slot)
            self.pieces[self.geometry.data_offset(layer, slot)] = q.data[i]
            self.pieces[self.geometry.scale_offset(layer, slot)] = q.scales[i]

    def check(self, memory):
        """Every byte of the region; read with pread, which leaves holes of the memfd holes."""
        start = 0
        for fd in memory.fds:
            size = os.fstat(fd).st_size
            for at in range(0, size, PIECE_BYTES):
                found = np.frombuffer(os.pread(fd, min(PIECE_BYTES, size - at), at), np.uint8)
                low = start + at
                touched = [(o, p) for o, p in self.pieces.items() if o < low + len(found) and o + len(p) > low]
                if not touched:
                    words = found[:len(found) // 8 * 8].view(np.uint64)
                    assert not words.any() and not found[words.nbytes:].any(), f"written in [{low}, {low + len(found)})"
                    continue
                expected = np.zeros(len(found), np.uint8)
                for offset, piece in touched:
                    first, last = max(offset, low), min(offset + len(piece), low + len(found))
                    expected[first - low:last - low] = piece[first - offset:last - offset]
                assert (found == expected).all(), f"in [{low}, {low + len(found)})"
            start += size


class Around:
    """The same of the blocks given and their neighbours, which are dumped before and after."""

    def __init__(self, client, pool, geometry):
        self.client, self.pool, self.geometry, self.pieces = client, pool, geometry, {}
        self.before = {}

    def _dump(self, layer, block):
        return self.client.dump(pb.RegionRef(pool_id=self.pool.pool_id, layer=layer), block, 1)

    def remember(self, layer, slots):
        blocks = {int(slot) // self.geometry.tokens_per_block + d for slot in slots for d in (-1, 0, 1)}
        for block in blocks:
            if 0 <= block < self.geometry.num_blocks:
                self.before[layer, block] = self._dump(layer, block)

    put = Sparse.put

    def check(self, _):
        stride = self.geometry.block_stride_bytes
        for (layer, block), old in self.before.items():
            expected, begin = old.copy(), layer * self.geometry.layer_stride_bytes + block * stride
            for offset, piece in self.pieces.items():
                if begin <= offset < begin + stride:
                    expected[offset - begin:offset - begin + len(piece)] = piece
            assert self._dump(layer, block).tobytes() == expected.tobytes(), f"block {block} of layer {layer}"


def slots_at(geometry, layer, border):
    """The first slot whose data ends past the border, its neighbours, and slots of the blocks around."""
    block = (border - layer * geometry.layer_stride_bytes) // geometry.block_stride_bytes
    first = block * geometry.tokens_per_block
    candidates = np.arange(first, first + geometry.tokens_per_block, dtype=np.int64)
    ends = geometry.data_offset(layer, candidates) + geometry.format.data_bytes
    middle = first + int(np.argmax(ends > border)) if (ends > border).any() else first
    wanted = {middle + d for d in (-2, -1, 0, 1, 2)} | {first, first - 1, first + geometry.tokens_per_block}
    return sorted(s for s in wanted if 0 <= s < geometry.num_slots)


@pytest.mark.slow
@pytest.mark.parametrize("fmt, layers", [(V41, 1), (INDEX_FP4, 3)], ids=["v41", "index_fp4_layers"])
def test_both_sides_of_every_border(big_daemon, pool_name, fmt, layers):
    stride = fmt.block_stride_bytes(TOKENS)
    geometry = Geometry(fmt, TOKENS, -(-(5 * GIB) // (stride * layers)), layers)
    assert 5 * GIB <= geometry.region_bytes < 5 * GIB + layers * stride
    client = big_daemon.client()
    session = client.open_session()
    pool = client.create_pool(pool_name, TOKENS, geometry.num_blocks,
                              [{"name": "kv", "format": fmt.name, "num_layers": layers}])
    assert pool.regions[0].region_bytes == geometry.region_bytes
    session.allocate_range(pool.pool_id, 0, geometry.num_blocks)
    memory = big_daemon.region_memory(pool_name, "kv")
    assert ON_GPU or len(memory.chunks) >= 5
    expected = Around(client, pool, geometry) if ON_GPU else Sparse(geometry)
    rng, queue = np.random.default_rng(8), session.open_queue()
    buffer = session.create_buffer(1 << 18)
    straddling = 0
    for layer in range(layers):
        region = pb.RegionRef(pool_id=pool.pool_id, layer=layer)
        first, last = layer * geometry.layer_stride_bytes, (layer + 1) * geometry.layer_stride_bytes
        slots = [0, 1, geometry.num_slots - 2, geometry.num_slots - 1]
        for border in BORDERS:
            if first <= border < last:
                slots += slots_at(geometry, layer, border)
                begins = geometry.data_offset(layer, np.array(slots))
                straddling += int(((begins < border) & (begins + fmt.bytes_per_token > border)).any())
        slots = np.array(sorted(set(slots)), np.int64)
        rows = random_rows(rng, fmt, len(slots))
        if ON_GPU:
            expected.remember(layer, slots)
        expected.put(layer, slots, rows)

        half = len(slots) // 2
        buffer.write(rows[:half])
        queue.run(Step().store(region, buffer.view(0, half, fmt.row_bytes), slots[:half]))
        session.store_rows(region, rows[half:], slots[half:])

        segments = [(s // TOKENS, s % TOKENS, s % TOKENS + 1, i) for i, s in enumerate(slots.tolist())]
        loaded, scales, _ = session.load_rows(region, segments, len(slots))
        q = reference.quantize(fmt, rows)
        assert loaded.tobytes() == reference.loaded_rows(fmt, q.data, q.scales).tobytes()
        assert scales.tobytes() == (q.scales.tobytes() if fmt.is_index else b"")
        for record, data, scale in zip(client.inspect(region, slots), q.data, q.scales):
            assert record.raw == data.tobytes() + scale.tobytes()
        block = int(slots[half]) // TOKENS
        dumped = client.dump(region, block, 1)
        assert dumped.tobytes() == memory.read(first + block * stride, stride).tobytes()
    expected.check(memory)
    assert straddling or fmt.is_index, "no record lay across a border: the test chose badly"
    queue.finish()
    memory.close()
    session.close()
    client.delete_pool(pool.pool_id)
    client.close()
    big_daemon.clients.remove(client)


def test_the_model_of_these_addresses():
    """Offsets past 2^32 don't wrap in the reference itself."""
    geometry = Geometry(V41, TOKENS, 80000, 1)
    slot = np.array([geometry.num_slots - 1])
    assert geometry.data_offset(0, slot)[0] == 79999 * 70752 + 132 * 528 > 1 << 32
    assert RegionModel(Geometry(V41, 1, 1)).memory.size == 1056
