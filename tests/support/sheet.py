"""A buffer and what it must hold: views are placed one behind the other, with gaps, in random bytes; after a step
every byte is compared, those that nothing may have written too."""
import numpy as np

from support.client import int32_bytes

ALIGNMENT_BYTES = 16


class Sheet:
    def __init__(self, session, rng, count=1 << 20, device=None):
        self.buffer = session.create_buffer(count, **({"device": device} if device else {}))
        self.rng, self.end = rng, 0
        self.expected = rng.integers(0, 256, count).astype(np.uint8)

    def room(self, rows, row_bytes, unit=ALIGNMENT_BYTES, padded=True):
        """A view that holds what happens to be there. unit: of what its stride is a multiple."""
        stride = row_bytes + (unit * int(self.rng.integers(1, 4)) if padded else 0)
        offset = self.end + ALIGNMENT_BYTES
        self.end = (offset + max(rows * stride, 1) + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        assert self.end + ALIGNMENT_BYTES <= self.buffer.bytes
        return self.buffer.view(offset, rows, row_bytes, stride)

    def put(self, matrix, padded=True):
        """A view with these rows in it."""
        matrix = np.ascontiguousarray(matrix)
        unit = 4 if matrix.dtype == np.int32 else ALIGNMENT_BYTES
        view = self.room(len(matrix), matrix.shape[1] * matrix.itemsize, unit, padded)
        self.expect(view, matrix)
        return view

    def array(self, values):
        """An Array message of these int32 numbers, which lie in the buffer."""
        data = np.frombuffer(int32_bytes(values), np.uint8)
        view = self.room(1, len(data), padded=False)
        self.expected[view.offset_bytes:view.offset_bytes + len(data)] = data
        return self.buffer.array(view.offset_bytes, len(data) // 4)

    def window(self, view):
        """The rows of a view in what is expected: uint8 [rows, row_bytes]."""
        return np.lib.stride_tricks.as_strided(self.expected[view.offset_bytes:], (view.rows, view.row_bytes),
                                               (view.row_stride_bytes, 1))

    def expect(self, view, matrix):
        matrix = np.ascontiguousarray(matrix)
        self.window(view)[:] = matrix.view(np.uint8).reshape(len(matrix), view.row_bytes)

    def write(self):
        self.buffer.write(self.expected)
        return self

    def check(self):
        found = self.buffer.read()
        differs = np.nonzero(found != self.expected)[0]
        assert not len(differs), f"{len(differs)} bytes differ, the first at {differs[0]}"
