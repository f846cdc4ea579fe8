"""Mapped memory as arrays of other libraries, without a copy: DLPack, and numpy's interface on a host."""
import ctypes
from ctypes import byref, c_char_p, c_int32, c_int64, c_void_p, py_object

from ._int32 import numpy
from ._library import ArrayStruct, Hold, library

_CPU = 1

# name: DLPack's type code, bits, numpy's type string
TYPES = {
    "int8": (0, 8, "|i1"), "int16": (0, 16, "<i2"), "int32": (0, 32, "<i4"), "int64": (0, 64, "<i8"),
    "uint8": (1, 8, "|u1"), "uint16": (1, 16, "<u2"), "uint32": (1, 32, "<u4"), "uint64": (1, 64, "<u8"),
    "float16": (2, 16, "<f2"), "float32": (2, 32, "<f4"), "float64": (2, 64, "<f8"),
    "bfloat16": (4, 16, None),
}


def itemsize_of(dtype):
    if dtype not in TYPES:
        raise ValueError(f"no type {dtype!r}; there are {', '.join(TYPES)}")
    return TYPES[dtype][1] // 8


_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"  # static: capsules keep the pointers

_python = ctypes.PyDLL(None)  # functions whose types nobody else sets, as of ctypes.pythonapi
_new_capsule = _python.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
# By address: the destructor sees a capsule whose last reference has gone.
_is_valid = _python.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [c_void_p, c_char_p]
_get_pointer = _python.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, [c_void_p, c_char_p]

_DELETER = ctypes.CFUNCTYPE(None, c_void_p)
# Where `deleter` stands in DLManagedTensor and in DLManagedTensorVersioned.
_DELETER_OFFSETS = {_PLAIN: 56, _VERSIONED: 16}


def _delete(managed, name):
    deleter = c_void_p.from_address(managed + _DELETER_OFFSETS[name]).value
    _DELETER(deleter)(managed)


@ctypes.PYFUNCTYPE(None, c_void_p)
def _drop_capsule(capsule):
    """Nobody took the tensor: whoever does changes the capsule's name."""
    for name in (_PLAIN, _VERSIONED):
        if _is_valid(capsule, name):
            _delete(_get_pointer(capsule, name), name)


class Array:
    """An array over memory of a pool map or a buffer.

    numpy.asarray(a) on a host, torch.from_dlpack(a), cupy.from_dlpack(a): the same memory. It stays mapped as long as
    anybody has such an array. read_only: a write to it faults the writer.
    """

    def __init__(self, owner, export, address, shape, strides, dtype, read_only, device):
        """strides: in bytes. export: the call that makes a DLPack tensor of owner's handle. device: a DLDevice."""
        self._owner, self._export, self.address = owner, export, address
        self.shape, self.strides, self.dtype, self.read_only = tuple(shape), tuple(strides), dtype, read_only
        self._device = device
        self.itemsize = itemsize_of(dtype)
        if any(stride % self.itemsize for stride in self.strides):
            raise ValueError(f"strides of {self.strides} bytes are not multiples of {dtype}'s {self.itemsize}")

    def __repr__(self):
        return (f"<kvpool.Array {self.dtype} {list(self.shape)}, strides of {list(self.strides)} bytes"
                f"{', read-only' if self.read_only else ''}>")

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """stream: ignored, nothing of ours is queued on one; what the executor does is waited for by timelines."""
        if copy:
            raise BufferError("this memory is shared, it is not copied")
        if dl_device is not None and tuple(dl_device) != tuple(self._device):
            raise BufferError(f"the memory is of device {self._device}, not {dl_device}")
        is_versioned = max_version is not None and max_version[0] >= 1
        ndim = len(self.shape)
        shape = (c_int64 * max(ndim, 1))(*self.shape)
        strides = (c_int64 * max(ndim, 1))(*(stride // self.itemsize for stride in self.strides))
        code, bits, _ = TYPES[self.dtype]
        spec = ArrayStruct(self.address, ndim, shape, strides, code, bits)
        name = _VERSIONED if is_versioned else _PLAIN
        managed = Hold(_delete, name)
        self._export(self._owner.handle, byref(spec), is_versioned, byref(managed))
        drop = ctypes.cast(_drop_capsule, c_void_p)
        tensor, managed.value = managed.value, None  # the capsule's from here on
        return _new_capsule(tensor, name, drop)

    def _why_not_numpy(self):
        if self._device[0] != _CPU:
            return "memory of a GPU is none of numpy's: use DLPack, as torch.from_dlpack does"
        if TYPES[self.dtype][2] is None:
            return f"numpy has no {self.dtype}: ask for the array with dtype uint16, or use torch.from_dlpack"
        return None

    @property
    def __array_interface__(self):
        """Only on a host. The array that numpy makes of it keeps this object, and this object the memory."""
        why_not = self._why_not_numpy()
        if why_not is not None:
            raise AttributeError(why_not)
        return {"version": 3, "typestr": TYPES[self.dtype][2], "shape": self.shape, "strides": self.strides,
                "data": (self.address, self.read_only)}

    def __array__(self, dtype=None, copy=None):
        """What numpy calls where it got no interface: it would make an array of one object."""
        why_not = self._why_not_numpy()
        if why_not is not None:
            raise TypeError(why_not)
        found = numpy.asarray(self, dtype)
        return found.copy() if copy else found


def dl_device_of(attachment_handle):
    kind, ordinal = c_int32(), c_int32()
    library.attachment_dl_device(attachment_handle, byref(kind), byref(ordinal))
    return kind.value, ordinal.value
