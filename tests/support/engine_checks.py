"""The engine's model and the daemon in step: a random schedule, and what must agree after each batch.

Columns and slots that the daemon came to are held against where the model's tokens belong, rows and pages against the
model's through the independent quantizer, attention against attention over the model's.
"""
import numpy as np

from support import engine, plans, reference
from support.engine import Engine, attention, relative_error
from support.engine_daemon import Served
from support.engine_memory import Mismatch, expect_equal

ATTENTION_TOLERANCE = 1e-5
CHUNK_TOKENS_MAX = 160
LIVE_MAX = 5


class Run:
    """One configuration's engine and daemon."""

    def __init__(self, daemon, client, session, config, seed, name):
        self.config, self.rng = config, np.random.default_rng(seed)
        self.blocks = 4 * -(-config.tokens_max // config.block_size) + 3
        self.engine = Engine(config, self.rng)
        self.served = Served(daemon, client, session, config, self.rng, name, self.blocks, LIVE_MAX)
        self.live, self.errors = [], []

    def close(self):
        self.served.close()

    @property
    def counts(self):
        return self.served.counts

    # ---- the schedule

    def iterate(self):
        rng = self.rng
        if len(self.live) < LIVE_MAX and (not self.live or rng.random() < 0.7):
            self._arrive()
        started = [s for s in self.live if s.length >= s.prompt]
        waiting = [s for s in self.live if s.length < s.prompt]
        if started and len(self.live) < LIVE_MAX and rng.random() < 0.2:
            self._fork(started[int(rng.integers(0, len(started)))])
        if waiting and (not started or rng.random() < 0.7):
            self.prefill(waiting)
        elif started:
            self.decode(started)
        for sequence in [s for s in self.live if s.length >= s.final]:
            self.live.remove(sequence)
            self.served.finish(sequence)
            self.counts["finished"] += 1

    def _has_room(self, final):
        needed = self.served.blocks_needed
        return sum(needed(s.final) for s in self.live) + needed(final) <= self.blocks

    def _arrive(self):
        if not self._has_room(self.config.tokens_max):
            return
        sequence, batch = self.engine.arrive()
        self.live.append(sequence)
        self.served.admit(sequence, batch)

    def _fork(self, parent):
        if self._has_room(self.config.tokens_max) and parent.length < self.config.tokens_max:
            child = self.engine.fork(parent)
            self.live.append(child)
            self.served.fork(parent, child)

    def prefill(self, waiting, modes=None):
        rng, config = self.rng, self.config
        chosen = [waiting[i] for i in rng.permutation(len(waiting))[:int(rng.integers(1, 4))]]
        seqlens_q = [min(s.prompt - s.length, CHUNK_TOKENS_MAX // len(chosen),
                         int(rng.choice([1, config.window, config.ring, config.ring + 7, CHUNK_TOKENS_MAX])))
                     for s in chosen]
        if modes is None:
            modes = [str(mode) for mode in rng.choice(["copy", "cast_back", "fused", "store"], len(config.layers))]
        batch = self.engine.advance(chosen, seqlens_q, modes)
        for result in self.served.prefill(batch):
            self.check_prefill(batch, result)
        self.served.check_pages()
        self._count("prefill", batch)

    def decode(self, started):
        rng, config = self.rng, self.config
        chosen = [started[i] for i in rng.permutation(len(started))[:int(rng.integers(1, LIVE_MAX + 1))]]
        count = min(int(rng.integers(1, config.new_tokens_max + 1)), *(s.final - s.length for s in chosen), 99)
        modes = [str(mode) for mode in rng.choice(["fused", "store"], len(config.layers))]
        batch = self.engine.advance(chosen, [count] * len(chosen), modes)
        result = self.served.decode(batch)
        self.served.check_pages()
        self.check_decode(batch, result)
        self._count("decode" if count == 1 else "decode of several tokens", batch)

    def _count(self, what, batch):
        self.counts[what] += 1
        for begin, q in zip(batch.begins, batch.seqlens_q):
            self.counts["ring wraps"] += (begin + q) // self.config.ring - begin // self.config.ring

    # ---- prefill

    def check_prefill(self, batch, result):
        config, layer = self.config, result.layer
        name = f"layer {layer}, {batch.modes[layer]}"
        expect_equal(f"{name}: index", result.index, self._columns(batch, result))
        expect_equal(f"{name}: assembled rows", result.rows, self._assembled(batch, result))
        if result.codes is not None:
            tracks = [s.index[config.layers[layer]] for s in batch.sequences]
            for found, part in ((result.codes, "data"), (result.scales, "scales")):
                expect_equal(f"{name}: index keys, {part}", found, np.concatenate(
                    [_or_zero_row(getattr(track, part)) for track in tracks]))
        for row in self.engine.looked_at(batch):
            columns = result.index[row]
            self._check_attention(name, batch, layer, row, result.rows[columns[columns >= 0]], result.raw_chunk)

    def _columns(self, batch, result):
        """Where in the assembled rows each query's tokens lie."""
        config, key = self.config, self.config.layers[result.layer]
        width = config.window + (config.topk if key is not None else 0)
        history, chunk, _ = result.part_rows
        chunk_begins = history + np.cumsum([0, *batch.seqlens_q])
        expected = np.full((len(batch.queries), width), -1, np.int32)
        for row, (i, position) in enumerate(batch.queries):
            begin = batch.begins[i]
            columns = [chunk_begins[i] + t - begin if t >= begin else (i + 1) * config.window + t - begin
                       for t in engine.visible_window(config, batch.sequences[i], position)]
            expected[row, :len(columns)] = columns
            if key is not None:
                chosen = batch.topk[key][row]
                expected[row, config.window:] = np.where(chosen >= 0, history + chunk + result.cu[i] + chosen, -1)
        return expected

    def _assembled(self, batch, result):
        config, layer, key = self.config, result.layer, self.config.layers[result.layer]
        rows = np.zeros((sum(result.part_rows), config.ring_format.row_bytes), np.uint8)
        at = 0
        for sequence, begin in zip(batch.sequences, batch.begins):
            tokens = np.arange(max(begin - config.window, sequence.valid_start), begin)
            at += config.window
            rows[at - len(tokens):at] = sequence.window_rows(layer, tokens)
        name = "rows" if result.raw_chunk else "loaded"
        for sequence, begin, q in zip(batch.sequences, batch.begins, batch.seqlens_q):
            rows[at:at + q] = sequence.window_rows(layer, np.arange(begin, begin + q), name).view(np.uint8)
            at += q
        at = sum(result.part_rows[:2])
        for sequence in batch.sequences if key is not None else ():
            loaded = _or_zero_row(sequence.compressed[key].loaded)
            rows[at:at + len(loaded)] = loaded
            at += len(loaded)
        return rows

    # ---- decode

    def check_decode(self, batch, result):
        config, served = self.config, self.served
        expected = np.full((len(batch.queries), config.window), -1, np.int32)
        for row, (i, position) in enumerate(batch.queries):
            state = served.states[batch.sequences[i].number]
            slots = [state * config.ring + t % config.ring
                     for t in engine.visible_window(config, batch.sequences[i], position)]
            expected[row, :len(slots)] = slots
        expect_equal("window slots", result.window_slots, expected)
        for key in config.keys:
            expect_equal(f"slots of cache {key}", result.slots[key], self._slots(batch, key))
        for row in self.engine.looked_at(batch):
            for layer, key in enumerate(config.layers):
                rows = self._rows_at(served.ring_pages, layer, result.window_slots[row])
                if key is not None:
                    chosen = self._rows_at(served.pages[key[0]], key[1], result.slots[key][row])
                    rows = np.concatenate((rows, chosen))
                self._check_attention(f"layer {layer}, decode", batch, layer, row, rows, False)

    def _slots(self, batch, key):
        tokens_per_block = self.served.tokens_per_block(key)
        return np.array([[plans.slot_of(self.served.tables[batch.sequences[i].number], tokens_per_block, t)
                          if t >= 0 else -1 for t in batch.topk[key][row]]
                         for row, (i, _) in enumerate(batch.queries)], np.int32)

    @staticmethod
    def _rows_at(pages, layer, slots):
        """What attention reads out of the pool."""
        data, scales = pages.found.records(layer, slots[slots >= 0])
        return reference.loaded_rows(pages.geometry.format, data, scales)

    # ---- attention

    def _check_attention(self, name, batch, layer, row, rows, raw_chunk):
        query = self.engine.query()
        found = attention(query, rows)
        expected = attention(query, self.engine.attended_rows(batch, layer, row, raw_chunk))
        difference = relative_error(found, expected)
        if not difference <= ATTENTION_TOLERANCE:
            raise Mismatch(f"{name}: attention of query {row} is off by {difference}")
        unquantized = attention(query, self.engine.attended_rows(batch, layer, row, raw_chunk, "rows"))
        self.errors.append(relative_error(found, unquantized))


def _or_zero_row(rows):
    """Every sequence owns at least one row."""
    return rows if len(rows) else np.zeros((1, rows.shape[1]), np.uint8)
