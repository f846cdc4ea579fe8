#!/usr/bin/env python3
"""A prompt prefilled in chunks and one token decoded, by the ops behind store and load: two layers, each with a sliding
window in a ring, and one compressed cache in pages for both. What comes back is compared with numpy.

    prefill.py SOCKET      (makes two pools, so as the daemon's user or root, and deletes them)

A model would make the rows; these are random. The caches are bf16, which keeps rows as they are, so that all but the
decoded token is compared bit by bit.
"""
import sys

try:
    import numpy as np

    import kvpool
    from kvpool import plan
except ImportError as missing:
    sys.exit(f"{missing}: apt-get install python3-numpy, and let PYTHONPATH name client/python, KVPOOL_LIBRARY "
             "a build's client/libkvpool.so")

WIDTH = 64  # elements of a row
LAYERS, WINDOW, RATIO, BLOCK = 2, 32, 4, 16
PER_BLOCK = BLOCK // RATIO  # compressed tokens of a block
PROMPT, CHUNK = 100, 40
TOPK = 8  # compressed tokens that a query attends to
ROTARY, EPS = 32, 1e-6

random = np.random.default_rng(0)


def bf16(values):
    """To nearest even; uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def numbers(rows):
    return (rows.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def check(holds, what):
    if not holds:
        sys.exit(f"{what}: not as numpy has it")


class Room:
    """A buffer of the daemon's that ops read from or write to, as a matrix."""

    def __init__(self, session, rows, columns, dtype):
        self.shape, self.dtype = (rows, columns), np.dtype(dtype)
        row_bytes = columns * self.dtype.itemsize
        self.buffer = session.create_buffer(rows * row_bytes)
        self.view = self.buffer.view(rows, row_bytes)

    def read(self):
        return np.frombuffer(self.buffer.read(), self.dtype).reshape(self.shape)


class Inputs:
    """Buffers that hold what a step reads. A step knows them by number: they have to be there until it has run."""

    def __init__(self, session):
        self.session, self.rooms = session, []

    def view(self, matrix):
        room = Room(self.session, *matrix.shape, matrix.dtype)
        room.buffer.write(np.ascontiguousarray(matrix))
        self.rooms.append(room)
        return room.view


class Sequence:
    """Its rows, which are what numpy compares with, and where the daemon has them."""

    def __init__(self, session, paged, ring):
        tokens = PROMPT + 1
        self.window = bf16(random.standard_normal((LAYERS, tokens, WIDTH)))
        self.compressed = bf16(random.standard_normal((tokens // RATIO, WIDTH)))
        self.state = int(session.allocate(ring, 1)[0])  # the block of the ring pool: its ring in every layer
        self.table = session.allocate(paged, -(-tokens // BLOCK))


# ---- prefill -------------------------------------------------------------------------------------------------------


def prefill(session, paged, ring, sequence, begin, end):
    """One chunk. Attention of a layer reads one buffer: [window before the chunk | chunk | compressed cache]."""
    count, where = end - begin, [(sequence.state, end, end - begin, 0)]
    history, window_rows = plan.swa(where, WINDOW, WINDOW)
    segments, cu_seqlens, compressed_rows = plan.compressed([(end, count, sequence.table)], RATIO, PER_BLOCK)
    new_begin, new_end = plan.new_compressed(end, count, RATIO)
    keys = Room(session, window_rows + count + compressed_rows, WIDTH, np.uint16)
    columns = Room(session, count, WINDOW + TOPK, np.int32)
    chosen, inputs = choose(end, count, cu_seqlens), Inputs(session)

    for layer in range(LAYERS):
        step = session.step()
        if layer == 0:  # the compressed cache is both layers': the first one stores what the chunk completes
            step.store(paged.layer("kv"), inputs.view(sequence.compressed[new_begin:new_end]),
                       plan.slot_mapping(sequence.table, PER_BLOCK, new_begin, new_end))
        # The chunk's rows go to ring slots that its history still lies in: assemble reads first, then stores. The
        # second layer finds the compressed rows where the first one's assemble left them.
        step.assemble(keys.view, swa=(ring.layer("swa", layer), history, window_rows),
                      chunk={"source": inputs.view(sequence.window[layer, begin:end]),
                             "store_slots": plan.swa_slots(where, WINDOW)},
                      compressed=(paged.layer("kv"), segments, compressed_rows, layer > 0))
        if layer == 0:  # columns of `keys` that each query attends to: its window, then what the indexer chose
            windows = Room(session, count, WINDOW, np.int32)
            step.expand_swa_index(plan.swa_pivots(where, WINDOW), WINDOW, windows.view)
            step.kv_index_cat(windows.view, WINDOW, chosen, TOPK, window_rows + count, columns.view)
        assembled = step.run()[1 if layer == 0 else 0]
        check(assembled.main_kv_offset == window_rows + count, "main_kv_offset")
        prefill_check(sequence, layer, begin, chosen, keys.read(), columns.read())


def choose(end, count, cu_seqlens):
    """An indexer would score the compressed tokens that a query sees; here it is the latest TOPK of them."""
    first, last = plan.compressed_visible([(end, count)], RATIO, cu_seqlens)
    chosen = last[:, None] - 1 - np.arange(TOPK)
    return np.where(chosen >= first[:, None], chosen, -1).astype(np.int32)


def prefill_check(sequence, layer, begin, chosen, keys, columns):
    """The rows behind a query's columns are those of the tokens that it may see."""
    for query, found in enumerate(columns):
        position = begin + query
        window = sequence.window[layer, max(0, position + 1 - WINDOW):position + 1]
        compressed = sequence.compressed[chosen[query][chosen[query] >= 0]]
        check(np.array_equal(keys[found[found >= 0]], np.concatenate((window, compressed))),
              f"layer {layer}, token {position}: what attention reads")


# ---- decode --------------------------------------------------------------------------------------------------------


def decode(session, paged, ring, sequence):
    """One token. Rows go from the projection to the ring in one op, and attention reads ring and pages by slots."""
    position, where = PROMPT, [(sequence.state, PROMPT + 1, 1, 0)]
    projected = bf16(random.standard_normal((LAYERS, 1, WIDTH)))
    weight = bf16(random.uniform(0.5, 1.5, (1, WIDTH)))
    angles = np.outer(np.arange(PROMPT + 1), 10000.0 ** (-np.arange(0, ROTARY, 2) / ROTARY))
    cos_sin = np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)
    visible = (PROMPT + 1) // RATIO
    topk = np.concatenate((random.permutation(visible)[:TOPK - 2], [-1, -1])).astype(np.int32)

    step, inputs = session.step(), Inputs(session)
    stored = [Room(session, 1, WIDTH, np.uint16) for _ in range(LAYERS)]
    for layer in range(LAYERS):
        step.fused_store(ring.layer("swa", layer), inputs.view(projected[layer]), inputs.view(weight), EPS,
                         plan.swa_slots(where, WINDOW), [position], cos_sin=inputs.view(cos_sin),
                         cast_back=stored[layer].view)
    windows, slots = Room(session, 1, WINDOW, np.int32), Room(session, 1, TOPK, np.int32)
    step.swa_index_decode(ring.layer("swa"), plan.swa_decode(where, WINDOW, WINDOW), WINDOW, windows.view)
    step.convert_kv_index(paged.layer("kv"), topk, sequence.table, len(sequence.table), [TOPK], 1, slots.view)
    step.run()

    tokens = np.arange(position + 1 - WINDOW, position + 1)
    check(np.array_equal(windows.read()[0], sequence.state * WINDOW + tokens % WINDOW), "slots of the window")
    expected = sequence.table[topk // PER_BLOCK] * PER_BLOCK + topk % PER_BLOCK
    check(np.array_equal(slots.read()[0], np.where(topk >= 0, expected, -1)), "slots of the compressed cache")
    errors = []
    for layer in range(LAYERS):
        expected = rotated(normed(numbers(projected[layer][0]), numbers(weight[0])), angles[position])
        errors.append(np.linalg.norm(numbers(stored[layer].read()[0]) - expected) / np.linalg.norm(expected))
    check(max(errors) < 2.0 ** -8, "the decoded token's rows")  # rounded to BF16 twice, each time by at most 2^-9
    return max(errors)


def normed(row, weight):
    return row / np.sqrt(np.mean(row ** 2) + EPS) * weight


def rotated(row, angles):
    """Pairs (2i, 2i + 1) of the last ROTARY elements."""
    row, cos, sin = row.copy(), np.cos(angles), np.sin(angles)
    even, odd = row[-ROTARY::2].copy(), row[1 - ROTARY::2].copy()
    row[-ROTARY::2], row[1 - ROTARY::2] = even * cos - odd * sin, odd * cos + even * sin
    return row


# ---- blocks --------------------------------------------------------------------------------------------------------


def fork(session, paged, sequence):
    """A second sequence begins as a copy of the first one's blocks; then they are cleared."""
    blocks, rows = session.allocate(paged, len(sequence.table)), PROMPT // RATIO
    segments = plan.paged_range(blocks, PER_BLOCK, 0, rows)
    copied, cleared = Room(session, rows, WIDTH, np.uint16), Room(session, rows, WIDTH, np.uint16)
    step = session.step()
    step.copy_blocks(paged, np.stack((sequence.table, blocks), axis=1)).load(paged.layer("kv"), segments, rows,
                                                                              copied.view)
    step.zero_blocks(paged, blocks).load(paged.layer("kv"), segments, rows, cleared.view).run()
    check(np.array_equal(copied.read(), sequence.compressed[:rows]), "a copy of its blocks")
    check(not cleared.read().any(), "zeroed blocks")
    session.free(paged, blocks)


def main(socket):
    with kvpool.Client(socket) as client:
        paged = client.create_pool("prefill", BLOCK, 16, [
            {"name": "kv", "format": "bf16", "width": WIDTH, "num_layers": 1, "compression_ratio": RATIO}])
        try:
            ring = client.create_pool("prefill-window", WINDOW, 2, [
                {"name": "swa", "format": "bf16", "width": WIDTH, "num_layers": LAYERS}], kind=kvpool.RING)
            try:
                with client.open_session("prefill.py") as session:
                    sequence = Sequence(session, paged, ring)
                    chunks = [(begin, min(begin + CHUNK, PROMPT)) for begin in range(0, PROMPT, CHUNK)]
                    for begin, end in chunks:
                        prefill(session, paged, ring, sequence, begin, end)
                    error = decode(session, paged, ring, sequence)
                    fork(session, paged, sequence)
            finally:
                ring.delete(force=True)
        finally:
            paged.delete(force=True)
    print(f"{PROMPT} tokens prefilled in {len(chunks)} chunks by {LAYERS} layers, 1 decoded (relative error "
          f"{error:.4f}), {len(sequence.table)} blocks copied and zeroed: all as numpy has it")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    try:
        main(sys.argv[1])
    except kvpool.Error as refused:
        sys.exit(f"prefill.py: {refused}")
