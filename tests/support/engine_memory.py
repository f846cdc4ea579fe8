"""Memory of an engine on a daemon: buffers that views are placed in, and pools' pages with what has to be in them."""
import numpy as np

from support.reference import RegionModel

PAGE_FILL = 0xA5


class Mismatch(AssertionError):
    """What the daemon came to is not what the model says."""


def expect_equal(what, found, expected):
    if found.shape != expected.shape or not np.array_equal(found, expected):
        where = np.argwhere(found != expected)[:3].tolist() if found.shape == expected.shape else expected.shape
        raise Mismatch(f"{what}: differs at {where}")


class Arena:
    """Views one behind the other in a buffer, with gaps."""

    def __init__(self, buffer, rng, fill=None):
        self.buffer, self.rng = buffer, rng
        self.bytes = np.full(buffer.bytes, 0 if fill is None else fill, np.uint8)
        self.end = 0

    def place(self, rows, row_bytes, padded=True):
        stride = row_bytes + (16 * int(self.rng.integers(0, 3)) if padded else 0)
        offset = self.end
        self.end = (offset + rows * stride + 15) // 16 * 16 + 16 * int(self.rng.integers(0, 3))
        assert self.end <= self.buffer.bytes
        return self.buffer.view(offset, rows, row_bytes, stride)

    def put(self, matrix, padded=True):
        """A view with these rows in it."""
        matrix = np.ascontiguousarray(matrix)
        data = matrix.view(np.uint8).reshape(len(matrix), matrix.shape[1] * matrix.itemsize)
        view = self.place(len(data), data.shape[1], padded)
        self.window(view)[:] = data
        return view

    def window(self, view):
        return np.lib.stride_tricks.as_strided(self.bytes[view.offset_bytes:], (view.rows, view.row_bytes),
                                               (view.row_stride_bytes, 1))

    def write(self):
        """Everything placed so far."""
        if self.end:
            self.buffer.write(self.bytes[:self.end])

    def read(self):
        if self.end:
            self.bytes[:self.end] = self.buffer.read(0, self.end)


class Pages:
    """A region's bytes as they must be."""

    def __init__(self, daemon, pool, number, geometry):
        self.name, self.geometry = f"{pool.spec.name}/{pool.regions[number].spec.name}", geometry
        self.memory = daemon.region_memory(pool.spec.name, pool.regions[number].spec.name)
        self.expected = self.memory.prepare(PAGE_FILL)
        size = geometry.region_bytes
        self.model = RegionModel(geometry, self.expected[:size])
        self.found = RegionModel(geometry, self.memory.array[:size])

    def put(self, layer, slots, track, tokens):
        """Records of a track's tokens."""
        data, scales = self.model._indices(layer, slots)
        self.model.memory[data], self.model.memory[scales] = track.data[tokens], track.scales[tokens]

    def blocks(self):
        """[layer, block, byte] of all blocks."""
        geometry = self.geometry
        return self.model.memory.reshape(geometry.num_layers, geometry.num_blocks, geometry.block_stride_bytes)

    def check(self):
        """As they were when they were last looked at."""
        expect_equal(f"pages of {self.name}", self.memory.array, self.expected)

    def close(self):
        self.found = None
        self.memory.close()
