"""A model of an inference engine's KV cache: every row that was ever made, in plain arrays by sequence and token.

It knows no pool, block, slot, segment or ring. What it says of a query - the tokens it sees, their rows before and
after the independent quantizer, attention over them - is what a pool that serves the same schedule must come to.
"""
import itertools
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from support import fused, plans, reference
from support.catalogue import Format

ROTARY_DIMS = 64
QUERIES_LOOKED_AT_MAX = 8


@dataclass(frozen=True)
class Cache:
    """A compressed main cache: one row for `ratio` tokens. Its layers are those that assemble from it first."""

    name: str
    format: Format
    ratio: int


@dataclass(frozen=True)
class Config:
    name: str
    block_size: int
    window: int
    ring: int
    ring_format: Format
    caches: tuple
    index_format: Format  # keys beside the rows of caches[0]
    # Of each layer the (cache, layer of that cache) that it attends to, or None. Layers that name the same share it:
    # the first one makes its rows.
    layers: tuple
    topk: int
    new_tokens_max: int  # of a decode step
    tokens_max: int = 320  # of a sequence

    @property
    def keys(self):
        return tuple(dict.fromkeys(key for key in self.layers if key is not None))

    def cache(self, key):
        return self.caches[key[0]]

    def cache_layers(self, number):
        return sum(key[0] == number for key in self.keys)

    def place(self, layer):
        """What its outputs are called by: layers that share a cache share them."""
        key = self.layers[layer]
        return layer if key is None else key

    def is_source(self, layer):
        key = self.layers[layer]
        return key is not None and self.layers.index(key) == layer

    def is_last(self, layer):
        key = self.layers[layer]
        return key is None or key not in self.layers[layer + 1:]


class Track:
    """Rows of one cache of one sequence, as they were made and as the quantizer leaves them. Appending makes new
    arrays: a copy of a track shares the old ones."""

    def __init__(self, fmt):
        self.format = fmt
        self.rows = np.zeros((0, fmt.elements), np.uint16)
        self.data = np.zeros((0, fmt.data_bytes), np.uint8)
        self.scales = np.zeros((0, fmt.scale_bytes), np.uint8)
        self.loaded = np.zeros((0, fmt.loaded_row_bytes), np.uint8)

    def append(self, rows):
        quantized = reference.quantize(self.format, rows)
        loaded = reference.loaded_rows(self.format, quantized.data, quantized.scales)
        for name, more in (("rows", rows), ("data", quantized.data), ("scales", quantized.scales),
                           ("loaded", loaded)):
            setattr(self, name, np.concatenate((getattr(self, name), more)))

    def copy(self):
        other = Track(self.format)
        other.__dict__.update(self.__dict__)
        return other


@dataclass(eq=False)
class Sequence:
    number: int
    valid_start: int  # tokens before it came with a shared prefix: compressed rows are there, window rows are not
    prompt: int
    final: int  # tokens after the last decode step
    window: list  # Track of each layer, from token valid_start on
    compressed: dict  # key -> Track
    index: dict  # key -> Track, where caches[0] is the key's
    length: int = 0

    def window_rows(self, layer, tokens, name="loaded"):
        return getattr(self.window[layer], name)[np.asarray(tokens, np.int64) - self.valid_start]


@dataclass
class Write:
    """Rows on their way into a cache: what is handed over, and what has to arrive. No recipe: the same."""

    source: np.ndarray
    positions: np.ndarray
    recipe: Optional[fused.Recipe]
    rows: np.ndarray = None

    def __post_init__(self):
        self.rows = self.source if self.recipe is None else \
            fused.transformed(self.recipe, self.source, self.positions)


@dataclass
class Batch:
    """One step of the engine: each sequence's next tokens, in order."""

    sequences: list
    begins: list  # tokens before
    seqlens_q: list
    modes: list = None  # of each layer's new rows: "copy", "cast_back", "fused", "store"
    window: list = None  # Write of each layer, rows of all sequences one behind the other
    compressed: dict = field(default_factory=dict)  # key -> Write of the compressed rows that these tokens complete
    index: dict = field(default_factory=dict)
    topk: dict = field(default_factory=dict)  # key -> int32 [queries, topk]: tokens of the cache; -1: none
    valid: dict = field(default_factory=dict)  # key -> int32 [queries]: entries of the list that count

    @property
    def queries(self):
        """(index of the sequence, position) of each."""
        return [(i, begin + j) for i, (begin, q) in enumerate(zip(self.begins, self.seqlens_q)) for j in range(q)]

    def new_compressed(self, ratio):
        """(sequence, first token, end) for each sequence."""
        return [(s, *plans.new_compressed(b + q, q, ratio))
                for s, b, q in zip(self.sequences, self.begins, self.seqlens_q)]


def visible_window(config, sequence, position):
    """Tokens of the sliding window, the query's own last."""
    return [t for t in range(position + 1 - config.window, position + 1) if t >= sequence.valid_start]


def attention(query, rows):
    """Float64 attention of one query over BF16 rows (uint8 [n, row_bytes]) that are keys and values."""
    keys = reference.bf16_to_f32(np.ascontiguousarray(rows).view(np.uint16)).astype(np.float64)
    scores = keys @ query / np.sqrt(keys.shape[1])
    weights = np.exp(scores - scores.max())
    return weights @ keys / weights.sum()


def relative_error(value, expected):
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))


class Engine:
    def __init__(self, config, rng):
        self.config, self.rng = config, rng
        self.numbers = itertools.count()
        elements = config.ring_format.elements
        table = fused.rope_table(config.tokens_max, ROTARY_DIMS)
        self.recipe = fused.Recipe(self._weight(elements), table, rope_offset=elements - ROTARY_DIMS)
        elements = config.index_format.elements
        self.index_recipe = fused.Recipe(self._weight(elements), table, rope_offset=elements - ROTARY_DIMS,
                                         neox=True, hadamard=True)

    def _weight(self, elements):
        return reference.f32_to_bf16(self.rng.uniform(0.5, 1.5, elements).astype(np.float32))

    def _rows(self, count, elements):
        """Groups of 16 differ in size, so that scales do."""
        spread = np.exp2(self.rng.uniform(-2, 2, (count, elements // 16, 1)))
        rows = self.rng.standard_normal((count, elements // 16, 16)) * spread
        return reference.f32_to_bf16(rows.reshape(count, elements).astype(np.float32))

    def _write(self, fmt, positions, recipe):
        positions = np.array(positions, np.int32)
        return Write(self._rows(len(positions), fmt.elements), positions, recipe)

    # ---- sequences

    def arrive(self):
        """A sequence, and the batch of the compressed rows that its prefix comes with."""
        config, rng = self.config, self.rng
        prefix = config.block_size * int(rng.integers(1, 3)) if rng.random() < 0.3 else 0
        prompt = prefix + int(rng.choice([1, 2, config.window - 1, config.window, config.window + 1, config.ring,
                                          int(rng.integers(1, 2 * config.ring + 40))]))
        sequence = Sequence(next(self.numbers), prefix, prompt, prompt + int(rng.integers(1, config.ring // 2 + 8)),
                            [Track(config.ring_format) for _ in config.layers],
                            {key: Track(config.cache(key).format) for key in config.keys},
                            {key: Track(config.index_format) for key in config.keys if key[0] == 0})
        assert sequence.final <= config.tokens_max
        batch = Batch([sequence], [0], [prefix])
        self._complete_compressed(batch)
        sequence.length = prefix
        return sequence, batch

    def fork(self, parent):
        final = min(parent.length + int(self.rng.integers(1, self.config.ring // 2 + 8)), self.config.tokens_max)
        return Sequence(next(self.numbers), parent.valid_start, min(parent.prompt, parent.length), final,
                        [track.copy() for track in parent.window],
                        {key: track.copy() for key, track in parent.compressed.items()},
                        {key: track.copy() for key, track in parent.index.items()}, parent.length)

    # ---- batches

    def advance(self, sequences, seqlens_q, modes):
        """Makes the new rows of a batch; the sequences have them afterwards."""
        config = self.config
        batch = Batch(sequences, [s.length for s in sequences], seqlens_q, modes)
        positions = [position for _, position in batch.queries]
        batch.window = [self._write(config.ring_format, positions, self.recipe if mode == "fused" else None)
                        for mode in modes]
        for layer, write in enumerate(batch.window):
            for sequence, rows in zip(sequences, np.split(write.rows, np.cumsum(seqlens_q)[:-1])):
                sequence.window[layer].append(rows)
        self._complete_compressed(batch)
        for sequence, q in zip(sequences, seqlens_q):
            sequence.length += q
        for key in config.keys:
            batch.topk[key], batch.valid[key] = self._choose(batch, config.cache(key).ratio)
        return batch

    def _complete_compressed(self, batch):
        config = self.config
        for key in config.keys:
            new = batch.new_compressed(config.cache(key).ratio)
            positions = [t * config.cache(key).ratio for _, begin, end in new for t in range(begin, end)]
            recipe = self.recipe if self.rng.random() < 0.5 else None
            batch.compressed[key] = self._write(config.cache(key).format, positions, recipe)
            self._append(batch.compressed[key], new, "compressed", key)
            if key[0] == 0:
                recipe = self.index_recipe if self.rng.random() < 0.5 else None
                batch.index[key] = self._write(config.index_format, positions, recipe)
                self._append(batch.index[key], new, "index", key)

    @staticmethod
    def _append(write, new, name, key):
        at = 0
        for sequence, begin, end in new:
            track = getattr(sequence, name)[key]
            assert len(track.rows) == begin
            track.append(write.rows[at:at + end - begin])
            at += end - begin

    def _choose(self, batch, ratio):
        """What an indexer would choose: some of the compressed tokens that each query sees."""
        topk = np.full((len(batch.queries), self.config.topk), -1, np.int32)
        valid = np.zeros(len(topk), np.int32)
        for row, (i, position) in enumerate(batch.queries):
            seen = plans.visible(batch.begins[i] + batch.seqlens_q[i], ratio, position)
            chosen = self.rng.permutation(seen)[:self.config.topk]
            topk[row, :len(chosen)] = chosen
            valid[row] = len(chosen)
            if len(chosen) > 2 and self.rng.random() < 0.1:  # a hole in the list
                topk[row, int(self.rng.integers(0, len(chosen)))] = -1
        return topk, valid

    # ---- what a query sees

    def looked_at(self, batch):
        """Queries whose attention is computed: the first, the last, some between."""
        count = len(batch.queries)
        some = self.rng.choice(count, min(count, QUERIES_LOOKED_AT_MAX), replace=False)
        return sorted({0, count - 1, *map(int, some)})

    def query(self):
        return self.rng.standard_normal(self.config.ring_format.elements)

    def attended_rows(self, batch, layer, row, chunk_is_raw, name="loaded"):
        """Rows of a query's keys: its window, then its compressed tokens. chunk_is_raw: those of this batch are not
        from the cache. name "rows": none are."""
        i, position = batch.queries[row]
        sequence, key = batch.sequences[i], self.config.layers[layer]
        tokens = visible_window(self.config, sequence, position)
        old = [t for t in tokens if t < batch.begins[i]]
        new = [t for t in tokens if t >= batch.begins[i]]
        parts = [sequence.window_rows(layer, old, name),
                 sequence.window_rows(layer, new, "rows" if chunk_is_raw else name)]
        if key is not None:
            chosen = batch.topk[key][row]
            parts.append(getattr(sequence.compressed[key], name)[chosen[chosen >= 0]])
        row_bytes = self.config.ring_format.row_bytes
        return np.concatenate([part.view(np.uint8).reshape(len(part), row_bytes) for part in parts])
