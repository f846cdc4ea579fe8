"""The engine's schedule on a daemon: block tables, rings, plans and steps over gRPC.

Of the model it takes which sequences a batch advances, the rows that go in and what the queries chose; where
everything lies is decided here. What the model's rows must look like in the pools is kept beside it, page by page.
"""
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from support import plans
from support.catalogue import Geometry
from support.client import Step
from support.engine_memory import Arena, Mismatch, Pages, expect_equal
from support.stubs import pb

CANARY = 0x5A
BUFFER_BYTES = 8 << 20


@dataclass
class Prefill:
    """What came back of a layer."""

    layer: int
    part_rows: tuple  # S, C, K
    raw_chunk: bool
    rows: np.ndarray  # uint8 [S + C + K, row_bytes]
    index: np.ndarray  # int32 [queries, columns]
    codes: np.ndarray = None  # of the index keys, where this layer is their source
    scales: np.ndarray = None
    cu: list = field(default_factory=list)


@dataclass
class Decode:
    window_slots: np.ndarray  # int32 [queries, window]
    slots: dict  # key -> int32 [queries, topk]


class Served:
    def __init__(self, daemon, client, session, config, rng, name, blocks, states):
        self.client, self.session, self.config, self.rng = client, session, config, rng
        self.mutation = None  # (name of an array, change): a fault to be found
        self.one_step = 0.3  # how often all layers of a prefill are one step, which hides some of them
        regions = [{"name": c.name, "format": c.format.name, "compression_ratio": c.ratio,
                    "num_layers": config.cache_layers(i)} for i, c in enumerate(config.caches)]
        self.index_region = len(regions)
        regions.append({"name": "index", "format": config.index_format.name,
                        "compression_ratio": config.caches[0].ratio, "num_layers": config.cache_layers(0)})
        self.paged = client.create_pool(f"{name}-paged", config.block_size, blocks, regions)
        self.ring = client.create_pool(f"{name}-ring", config.ring, states, [
            {"name": "window", "format": config.ring_format.name, "num_layers": len(config.layers)}], pb.POOL_RING)
        formats = [c.format for c in config.caches] + [config.index_format]
        self.pages = [Pages(daemon, self.paged, i, Geometry(fmt, self.paged.regions[i].tokens_per_block, blocks,
                                                            regions[i]["num_layers"]))
                      for i, fmt in enumerate(formats)]
        self.ring_pages = Pages(daemon, self.ring, 0, Geometry(config.ring_format, config.ring, states,
                                                               len(config.layers)))
        self.buffers = [session.create_buffer(BUFFER_BYTES) for _ in range(2)]
        self.tables, self.states = {}, {}
        self.seen_blocks, self.counts = set(), defaultdict(int)

    def close(self):
        for pages in (*self.pages, self.ring_pages):
            pages.close()
        for buffer in self.buffers:
            buffer.release()
        for pool in (self.paged, self.ring):
            self.client.delete_pool(pool.pool_id, force=True)

    # ---- places

    def tokens_per_block(self, key):
        return self.paged.regions[key[0]].tokens_per_block

    def cache_ref(self, key):
        return pb.RegionRef(pool_id=self.paged.pool_id, region=key[0], layer=key[1])

    def index_ref(self, key):
        return pb.RegionRef(pool_id=self.paged.pool_id, region=self.index_region, layer=key[1])

    def ring_ref(self, layer):
        return pb.RegionRef(pool_id=self.ring.pool_id, layer=layer)

    def _swa_sequences(self, batch):
        return [(self.states[s.number], begin + q, q, s.valid_start)
                for s, begin, q in zip(batch.sequences, batch.begins, batch.seqlens_q)]

    # ---- blocks of sequences

    def blocks_needed(self, tokens):
        return -(-tokens // self.config.block_size)

    def admit(self, sequence, batch):
        """A state, blocks of its prefix, cleared, and the compressed rows that it comes with."""
        self.states[sequence.number] = int(self.session.allocate(self.ring.pool_id, 1)[0])
        self.tables[sequence.number] = np.zeros(0, np.int32)
        self._grow(batch)
        self._run_blocks("zero", self.ring, [self.states[sequence.number]], [self.ring_pages])
        if len(self.tables[sequence.number]):
            self._run_blocks("zero", self.paged, self.tables[sequence.number], self.pages)
            step, arena = Step(), Arena(self.buffers[0], self.rng)
            for key in self.config.keys:
                self._add_compressed(step, arena, batch, key)
            self._run(step, arena)

    def fork(self, parent, child):
        state = int(self.session.allocate(self.ring.pool_id, 1)[0])
        self.states[child.number] = state
        self.tables[child.number] = self._allocate(len(self.tables[parent.number]))
        self._run_blocks("copy", self.ring, [[self.states[parent.number], state]], [self.ring_pages])
        self._run_blocks("copy", self.paged, np.stack((self.tables[parent.number], self.tables[child.number]), 1),
                         self.pages)
        self.counts["forks"] += 1

    def finish(self, sequence):
        self.session.free(self.paged.pool_id, self.tables.pop(sequence.number))
        self.session.free(self.ring.pool_id, [self.states.pop(sequence.number)])

    def _allocate(self, count):
        blocks = self.rng.permutation(self.session.allocate(self.paged.pool_id, count)).astype(np.int32)
        self.counts["blocks reused"] += len(self.seen_blocks & set(blocks.tolist()))
        self.seen_blocks |= set(blocks.tolist())
        return blocks

    def _grow(self, batch):
        for sequence, begin, q in zip(batch.sequences, batch.begins, batch.seqlens_q):
            table = self.tables[sequence.number]
            more = self.blocks_needed(begin + q) - len(table)
            if more > 0:
                self.tables[sequence.number] = np.concatenate((table, self._allocate(more)))

    def _run_blocks(self, what, pool, blocks, pages):
        blocks = np.asarray(blocks, np.int32)
        self.session.run(getattr(Step(), f"{what}_blocks")(pool.pool_id, blocks))
        for each in pages:
            memory = each.blocks()
            if what == "copy":
                memory[:, blocks[:, 1]] = memory[:, blocks[:, 0]]
            else:
                memory[:, blocks] = 0

    # ---- parts of steps

    def _mutated(self, name, values):
        """int32, with the fault that a test wants to be found."""
        values = np.asarray(values, np.int32)
        if self.mutation and self.mutation[0] == name:
            changed = self.mutation[1](values.copy())
            if changed is not None:
                self.mutation, values = None, changed
        return values

    def _array(self, step, name, values, arena=None):
        """Inline; now and then in the buffer of `arena`."""
        values = self._mutated(name, values)
        if arena is not None and values.size and self.rng.random() < 0.1:
            view = arena.put(values.reshape(1, -1), padded=False)
            return step.array(self.buffers[0].array(view.offset_bytes, values.size))
        return step.array(values)

    def _matrix(self, step, name, values, arena):
        """A view, or an array."""
        values = self._mutated(name, values)
        return step.array(values) if self.rng.random() < 0.5 else arena.put(values)

    def _add_write(self, step, arena, region, write, slots, cast_back=None):
        """The store, or the fused one, of rows."""
        source, recipe = arena.put(write.source), write.recipe
        if recipe is None:
            step.store(region, source, slots, cast_back)
        else:
            step.fused_store(region, source, arena.put(recipe.weight[None]), recipe.eps,
                             self._array(step, "positions", write.positions, arena), slots,
                             cos_sin=arena.put(recipe.cos_sin), rope_offset=recipe.rope_offset, neox=recipe.neox,
                             hadamard=recipe.hadamard, cast_back=cast_back)

    def _add_compressed(self, step, arena, batch, key):
        """Stores what the batch completes of a cache, and of its index keys."""
        new = batch.new_compressed(self.config.cache(key).ratio)
        slots, places = [], []
        for sequence, begin, end in new:
            table = self.tables[sequence.number]
            slots.append(plans.slot_mapping(table, self.tokens_per_block(key), begin, end))
            places.append((sequence, np.arange(begin, end), slots[-1].astype(np.int64)))
        slots = np.concatenate(slots)
        if len(slots) == 0:
            return
        array = self._array(step, "compressed_slots", slots, arena)
        self._add_write(step, arena, self.cache_ref(key), batch.compressed[key], array)
        if key[0] == 0:
            self._add_write(step, arena, self.index_ref(key), batch.index[key], array)
        for sequence, tokens, where in places:
            self.pages[key[0]].put(key[1], where, sequence.compressed[key], tokens)
            if key[0] == 0:
                self.pages[self.index_region].put(key[1], where, sequence.index[key], tokens)

    def _expect_window(self, batch, layer):
        """The last rows of each sequence are in its ring."""
        ring = self.config.ring
        for sequence, begin, q in zip(batch.sequences, batch.begins, batch.seqlens_q):
            tokens = np.arange(max(begin, begin + q - ring), begin + q)
            slots = self.states[sequence.number] * ring + tokens % ring
            self.ring_pages.put(layer, slots.astype(np.int64), sequence.window[layer], tokens - sequence.valid_start)

    def _run(self, step, *arenas):
        for arena in arenas:
            arena.write()
        reports = self.session.run(step)
        for op, report in enumerate(reports):
            if report.rows_rejected:
                raise Mismatch(f"op {op} {step.ops[op].WhichOneof('op')}: {report.rows_rejected} rows rejected")
        self.counts["steps"] += 1
        return reports

    def refresh_pages(self):
        for pages in (*self.pages, self.ring_pages):
            pages.memory.refresh()

    def check_pages(self):
        self.refresh_pages()
        for pages in (*self.pages, self.ring_pages):
            pages.check()

    # ---- prefill

    def prefill(self, batch):
        """Yields what each layer came to; in steps of one layer, or all of them in one, when layers that share an
        output leave only the last one's to be seen."""
        self._grow(batch)
        out = Arena(self.buffers[1], self.rng, CANARY)
        shared = Shared(self, batch, out)
        out.write()
        if self.rng.random() < self.one_step:
            step, arena = Step(), Arena(self.buffers[0], self.rng)
            shown = [(self._add_layer(step, arena, batch, shared, layer), layer)
                     for layer in range(len(self.config.layers))]
            reports = self._run(step, arena)
            out.read()
            for (op, mode), layer in shown:
                if self.config.is_last(layer):
                    yield self._layer_result(batch, shared, layer, reports[op], mode)
            return
        for layer in range(len(self.config.layers)):
            step, arena = Step(), Arena(self.buffers[0], self.rng)
            op, mode = self._add_layer(step, arena, batch, shared, layer)
            reports = self._run(step, arena)
            out.read()
            yield self._layer_result(batch, shared, layer, reports[op], mode)

    def _add_layer(self, step, arena, batch, shared, layer):
        """Index of the assemble, and whether the chunk's rows in it are not from the cache."""
        mode, write = batch.modes[layer], batch.window[layer]
        if self.config.is_source(layer):
            key = self.config.layers[layer]
            self._add_compressed(step, arena, batch, key)
            shared.add_index_load(step, key)
        out = shared.out[self.config.place(layer)]
        position = len(step.ops)
        shared.add_assemble(step, arena, layer)
        if mode in ("fused", "store"):
            slots, back = shared.array(step, arena, "store_slots"), None
            if mode == "fused":
                begin = out.offset_bytes + shared.history_rows * out.row_stride_bytes
                back = self.buffers[1].view(begin, shared.tokens, out.row_bytes, out.row_stride_bytes)
            self._add_write(step, arena, self.ring_ref(layer), write, slots, back)
        shared.add_index(step, arena, layer)
        self._expect_window(batch, layer)
        return position, mode in ("copy", "store")

    def _layer_result(self, batch, shared, layer, report, raw):
        key, out = self.config.layers[layer], shared.arena
        view = shared.out[self.config.place(layer)]
        rows = out.window(view)
        sizes = (shared.history_rows, shared.chunk_rows[layer], shared.compressed_rows(key))
        if report.main_kv_offset != sizes[0] + sizes[1]:
            raise Mismatch(f"main_kv_offset is {report.main_kv_offset}, not {sizes[0] + sizes[1]}")
        expect_equal("rows behind the assembled ones", rows[sum(sizes):],
                     np.full_like(rows[sum(sizes):], CANARY))
        index = np.ascontiguousarray(out.window(shared.index[self.config.place(layer)])).view(np.int32)
        result = Prefill(layer, sizes, raw, rows[:sum(sizes)].copy(), index, cu=shared.cu.get(key))
        if self.config.is_source(layer) and key in shared.index_out:
            result.codes, result.scales = (out.window(v).copy() for v in shared.index_out[key])
        return result

    # ---- decode

    def decode(self, batch):
        config, queries = self.config, batch.seqlens_q[0]
        self._grow(batch)
        step, arena, out = Step(), Arena(self.buffers[0], self.rng), Arena(self.buffers[1], self.rng, CANARY)
        sequences = self._swa_sequences(batch)
        slots = self._array(step, "store_slots", plans.swa_slots(sequences, config.ring), arena)
        for layer, write in enumerate(batch.window):
            self._add_write(step, arena, self.ring_ref(layer), write, slots)
            self._expect_window(batch, layer)
        results = {}
        for key in config.keys:
            self._add_compressed(step, arena, batch, key)
            results[key] = self._add_convert(step, arena, out, batch, key, queries)
        windows = plans.swa_decode(sequences, config.window, config.ring)
        window_out = out.place(len(windows), 4 * config.window)
        step.swa_index_decode(self.ring_ref(0), self._array(step, "offset_len", windows, arena), config.window,
                              window_out)
        self._run(step, arena, out)
        out.read()
        arena.read()

        def matrix(view):
            where = arena if view.buffer_id == self.buffers[0].id else out
            return np.ascontiguousarray(where.window(view)).view(np.int32)

        return Decode(matrix(window_out), {key: matrix(view) for key, view in results.items()})

    def _add_convert(self, step, arena, out, batch, key, queries):
        """The view that the slots will be in: in place, or an output."""
        tables = [self.tables[s.number] for s in batch.sequences]
        columns = max(map(len, tables))
        block_tables = np.full((len(tables), columns), -1, np.int32)
        for row, table in enumerate(tables):
            block_tables[row, :len(table)] = table
        behind = np.arange(self.config.topk) >= batch.valid[key][:, None]  # not looked at, whatever it is
        lists = np.where(behind, self.rng.integers(-2**31, 2**31, behind.shape), batch.topk[key])
        topk = self._matrix(step, "topk", lists, arena)
        in_place = isinstance(topk, pb.View) and self.rng.random() < 0.5
        view = topk if in_place else out.place(len(lists), 4 * self.config.topk)
        step.convert_kv_index(self.cache_ref(key), topk, self._array(step, "block_tables", block_tables, arena),
                              columns, self._array(step, "valid", batch.valid[key], arena), queries,
                              None if in_place else view)
        return view


class Shared:
    """What the layers of a prefill have in common: plans, outputs, and how their arrays are called in a step."""

    def __init__(self, served, batch, arena):
        self.served, self.batch, self.arena, self.config = served, batch, arena, served.config
        config, rng = self.config, served.rng
        sequences = served._swa_sequences(batch)
        self.history_rows = len(sequences) * config.window
        self.tokens = sum(batch.seqlens_q)
        self.plans = {"swa_segments": plans.swa(sequences, config.window, config.ring),
                      "store_slots": plans.swa_slots(sequences, config.ring),
                      "pivots": plans.swa_pivots(sequences, config.window)}
        self.cu, self.segments, self.index, self.index_out = {None: [0]}, {}, {}, {}
        for key in config.keys:
            tables = [(begin + q, served.tables[s.number])
                      for s, begin, q in zip(batch.sequences, batch.begins, batch.seqlens_q)]
            self.segments[key], self.cu[key] = plans.compressed(tables, config.cache(key).ratio,
                                                                served.tokens_per_block(key))
        # The chunk's rows, and how many the layers that share an output may add to them: all of a group the same.
        self.padding = {key: int(rng.choice([0, 0, 3])) for key in config.keys}
        self.chunk_rows = [self.tokens + (self.padding[key] if self._is_gathered_group(key) else 0)
                           for key in config.layers]
        row_bytes = config.ring_format.row_bytes
        self.out, places = {}, {}
        for layer, key in enumerate(config.layers):
            places[config.place(layer)] = self.chunk_rows[layer] + self.compressed_rows(key)
        for place, rows in places.items():
            self.out[place] = arena.place(self.history_rows + rows + int(rng.choice([0, 2])), row_bytes)
            topk = config.topk if place in config.keys else 0
            self.index[place] = arena.place(self.tokens, 4 * (config.window + topk))
        self.pivots_out = arena.place(self.tokens, 4 * config.window)
        self.expanded = False
        self.in_step = {}

    def _is_gathered_group(self, key):
        """Rows of padding come by a gather index alone: every layer that has that output copies."""
        return key is not None and all(self.batch.modes[layer] in ("copy", "cast_back", "store")
                                       for layer, other in enumerate(self.config.layers) if other == key)

    def compressed_rows(self, key):
        return self.cu[key][-1]

    def array(self, step, arena, name, values=None):
        """Given once in each step."""
        known = self.in_step.get(name)
        if known is None or known[0] is not step:
            values = self.plans[name] if values is None else values
            self.in_step[name] = known = (step, self.served._array(step, name.split(":")[0], values, arena))
        return known[1]

    def add_assemble(self, step, arena, layer):
        config, served, key = self.config, self.served, self.config.layers[layer]
        swa = (served.ring_ref(layer), self.array(step, arena, "swa_segments"), self.history_rows)
        chunk = {"reserved": self.tokens} if self.batch.modes[layer] == "fused" else self._chunk(step, arena, layer)
        compressed = None
        if key is not None:
            compressed = (served.cache_ref(key), self._compressed_segments(step, key), self.compressed_rows(key),
                          not config.is_source(layer))
        step.assemble(self.out[config.place(layer)], swa, {**chunk, "region": served.ring_ref(layer)},
                      compressed)

    def _compressed_segments(self, step, key):
        return self.array(step, None, f"compressed_segments:{key}", self.segments[key])

    def _chunk(self, step, arena, layer):
        """Rows as they are, or in the order of a context-parallel gather, with padding that is nobody's."""
        chunk = {}
        rng, rows, mode = self.served.rng, self.batch.window[layer].source, self.batch.modes[layer]
        padding = self.chunk_rows[layer] - self.tokens
        slots = self.plans["store_slots"]
        if padding or rng.random() < 0.3:
            ranks = int(rng.integers(1, 4))
            order = np.concatenate([plans.mirror(self.batch.seqlens_q, ranks, rank) for rank in range(ranks)])
            rows = np.where(order[:, None] >= 0, rows[order], 0x7FC0).astype(np.uint16)
            none = np.full(padding, -1, np.int32)
            gather = np.concatenate((plans.mirror_reverse(self.batch.seqlens_q, ranks), none))
            slots = np.concatenate((slots, none))
            chunk["gather"] = self.served._array(step, "gather", gather, arena)
        if mode != "store":
            name = f"store_slots:{padding}" if padding else "store_slots"
            chunk["store_slots"] = self.array(step, arena, name, slots)
        return {"source": arena.put(rows), "cast_back": mode == "cast_back", **chunk}

    def add_index_load(self, step, key):
        """The index keys of all sequences, codes and scales."""
        if key[0] != 0:
            return
        fmt, rows, served = self.config.index_format, self.compressed_rows(key), self.served
        codes = self.arena.place(rows, fmt.loaded_row_bytes)
        scales = self.arena.place(rows, fmt.loaded_scale_bytes, padded=False)
        self.index_out[key] = (codes, scales)
        step.load(served.index_ref(key), self._compressed_segments(step, key), rows, codes, scales)

    def add_index(self, step, arena, layer):
        """Once for all layers: the windows; once for each cache: what the queries chose behind them."""
        key = self.config.layers[layer]
        if not self.expanded:
            step.expand_swa_index(self.array(step, arena, "pivots"), self.config.window, self.pivots_out)
            self.expanded = True
        if key is not None and not self.config.is_source(layer):
            return
        right, columns = None, 0
        if key is not None:
            topk, columns = self.batch.topk[key], self.config.topk
            begins = np.array([self.cu[key][i] for i, _ in self.batch.queries], np.int32)[:, None]
            right = self.served._matrix(step, "topk", np.where(topk >= 0, topk + begins, -1), arena)
        step.kv_index_cat(self.pivots_out, self.config.window, right, columns,
                          self.history_rows + self.chunk_rows[layer], self.index[self.config.place(layer)])
