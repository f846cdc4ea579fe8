"""Pool memory and buffers that nobody but the executor can map: copies, read and written through the daemon.

They are used like memory.RawMemory: `array` is the copy, refresh() makes it what the device has, flush() the other way
round. A region can't be written this way: what it held before is taken as it is.
"""
import numpy as np

from support.stubs import pb


class RegionCopy:
    """All layers of a region, block padding included."""

    def __init__(self, client, pool_name, region_name):
        self.client = client
        self.pool = client.call("DescribePool", pb.DescribePoolRequest(name=pool_name))
        self.index = next(i for i, r in enumerate(self.pool.regions) if r.spec.name == region_name)
        self.region = self.pool.regions[self.index]
        self.bytes = self.region.region_bytes
        self._array = None

    @property
    def array(self):
        if self._array is None:
            self._array = np.empty(self.bytes, np.uint8)
            self.refresh()
        return self._array

    def refresh(self):
        array = self.array
        stride = self.region.layer_stride_bytes
        for layer in range(self.region.spec.num_layers):
            array[layer * stride:(layer + 1) * stride] = self._dump(layer, 0, self.pool.spec.num_blocks)

    def flush(self):
        """Nothing: a region is written by stores alone."""

    def prepare(self, _):
        """What it holds before a test; RawMemory would fill it."""
        return self.snapshot()

    def randomize(self, _):
        """Old bytes have to do."""
        self.refresh()

    def snapshot(self):
        self.refresh()
        return self.array.copy()

    def read(self, offset, count):
        """Within one layer."""
        layer, at = divmod(offset, self.region.layer_stride_bytes)
        stride = self.region.block_stride_bytes
        first, last = at // stride, (at + count - 1) // stride
        dumped = self._dump(layer, first, last - first + 1)
        return dumped[at - first * stride:at - first * stride + count]

    def _dump(self, layer, first, count):
        region = pb.RegionRef(pool_id=self.pool.pool_id, region=self.index, layer=layer)
        return self.client.dump(region, first, count)

    def close(self):
        self.client.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class BufferCopy:
    """A buffer, through its session."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.bytes = buffer.bytes
        self.array = buffer.read().copy()

    def refresh(self):
        self.array[:] = self.buffer.read()

    def flush(self):
        self.buffer.write(self.array)

    def randomize(self, rng):
        self.array[:] = rng.integers(0, 256, self.bytes).astype(np.uint8)
        self.flush()

    def write(self, offset, data):
        self.array[offset:offset + len(data)] = data
        self.flush()

    def snapshot(self):
        self.refresh()
        return self.array.copy()

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
