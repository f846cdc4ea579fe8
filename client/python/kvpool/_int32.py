"""int32 arrays in and out, with numpy where it is and without it where it isn't."""
import array
import ctypes

try:
    import numpy
except ImportError:
    numpy = None

assert array.array("i").itemsize == 4


class Int32In:
    """Anything of whole numbers - a list, a numpy array, a tensor of a CPU - as contiguous int32 for one call."""

    def __init__(self, values):
        if hasattr(values, "numpy") and not hasattr(values, "__array_interface__"):
            values = values.numpy()  # a torch tensor; of a GPU it says that it can't
        if numpy is not None:
            self._memory = self._by_numpy(values)
            self.address, self.count = self._memory.ctypes.data, self._memory.size
        else:
            self._memory = self._by_array(values)
            self.address, self.count = self._memory.buffer_info()

    @staticmethod
    def _by_numpy(values):
        found = numpy.asarray(values)
        if found.size == 0:
            return numpy.zeros(0, numpy.int32)
        if found.dtype.kind not in "iu":
            raise TypeError(f"whole numbers are wanted, not {found.dtype}")
        if found.dtype != numpy.int32:
            if int(found.min()) < -2**31 or int(found.max()) >= 2**31:
                raise OverflowError("a number does not fit into int32")
            found = found.astype(numpy.int32)
        return numpy.ascontiguousarray(found)

    @staticmethod
    def _by_array(values):
        try:
            view = memoryview(values)
        except TypeError:
            flat = []
            for value in values:
                flat.extend(value) if hasattr(value, "__iter__") else flat.append(value)
            return array.array("i", flat)
        result = array.array("i")
        if view.format in ("i", "<i", "=i"):
            result.frombytes(view.tobytes())
        else:
            result.extend(view.cast("B").cast(view.format) if view.ndim > 1 else view)
        return result


class Int32Out:
    """Room for a call to write int32 to."""

    def __init__(self, count):
        if not 0 <= count < 2**32:
            raise ValueError(f"{count} is no count of numbers")
        self._memory = (ctypes.c_int32 * max(count, 1))()
        self.count = count
        self.address = ctypes.addressof(self._memory)

    def get(self, columns=None):
        """As a numpy array, or a memoryview without numpy: [count], or [count / columns, columns]."""
        shape = (self.count,) if columns is None else (self.count // columns, columns)
        if numpy is not None:
            return numpy.frombuffer(self._memory, numpy.int32, self.count).reshape(shape)
        flat = memoryview(self._memory).cast("B").cast("i")[:self.count]
        return flat if columns is None or self.count == 0 else flat.cast("B").cast("i", shape)
