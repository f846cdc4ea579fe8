"""A worker's own memory by the CUDA driver, as programs without torch make it. The context is the GPU's primary one, which
is torch's too."""
import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p

OK, OUT_OF_MEMORY, POSIX_FD = 0, 2, 1
DEVICE, HOST_NUMA = 1, 3
READ_WRITE = 3
PIECE = 2 << 20


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handle_types", c_int), ("location", _Location), ("win32", c_void_p),
                ("flags", ctypes.c_uint8 * 8)]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 64)]


class DriverError(Exception):
    def __init__(self, call, code):
        super().__init__(f"{call}: {code}")
        self.code = code


class Driver:
    """The first GPU's. Its context is made current for the calling thread."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", ctypes.c_uint(0))
        device, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(device), c_int(0))
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code != OK:
            text = c_char_p()
            self.cuda.cuGetErrorName(c_int(code), byref(text))
            raise DriverError(f"{name} {(text.value or b'').decode()}", code)

    # -- ordinary memory

    def allocate(self, count):
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(count))
        return address.value

    def free(self, address):
        self.call("cuMemFree_v2", c_uint64(address))

    def allocate_async(self, count):
        address = c_uint64()
        self.call("cuMemAllocAsync", byref(address), c_size_t(count), c_void_p())
        return address.value

    def free_async(self, address):
        self.call("cuMemFreeAsync", c_uint64(address), c_void_p())

    def range_of(self, address):
        """Base and bytes of the allocation."""
        base, count = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(count), c_uint64(address))
        return base.value, count.value

    def ipc_handle(self, address):
        handle = _Handle()
        self.call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle)

    def write(self, address, data):
        self.call("cuMemcpyHtoD_v2", c_uint64(address), c_char_p(data), c_size_t(len(data)))
        self.call("cuCtxSynchronize")  # it may return before a small copy has arrived

    def read(self, address, count):
        data = ctypes.create_string_buffer(count)
        self.call("cuMemcpyDtoH_v2", data, c_uint64(address), c_size_t(count))
        return data.raw

    def fill(self, address, byte, count):
        self.call("cuMemsetD8_v2", c_uint64(address), ctypes.c_uint8(byte), c_size_t(count))
        self.call("cuCtxSynchronize")


class Chunk:
    """An allocation of virtual memory, not mapped."""

    def __init__(self, driver, count, handle_types=POSIX_FD, location=DEVICE):
        self.driver, self.count, self.handle = driver, count, c_uint64()
        properties = _Properties(1, handle_types, _Location(location, 0), None, (ctypes.c_uint8 * 8)())
        driver.call("cuMemCreate", byref(self.handle), c_size_t(count), byref(properties), c_uint64(0))

    def export(self):
        """A descriptor, the caller's."""
        fd = c_int(-1)
        self.driver.call("cuMemExportToShareableHandle", byref(fd), self.handle, c_int(POSIX_FD), c_uint64(0))
        return fd.value

    def release(self):
        self.driver.call("cuMemRelease", self.handle)


class Mapped:
    """Chunks side by side, readable and writable."""

    def __init__(self, driver, chunks):
        self.driver, self.count = driver, sum(chunk.count for chunk in chunks)
        self.bounds, address = [], c_uint64()
        driver.call("cuMemAddressReserve", byref(address), c_size_t(self.count), c_size_t(0), c_uint64(0), c_uint64(0))
        self.address, at = address.value, address.value
        access = _Access(_Location(DEVICE, 0), READ_WRITE)
        for chunk in chunks:
            driver.call("cuMemMap", c_uint64(at), c_size_t(chunk.count), c_size_t(0), chunk.handle, c_uint64(0))
            driver.call("cuMemSetAccess", c_uint64(at), c_size_t(chunk.count), byref(access), c_size_t(1))
            self.bounds.append((at, chunk.count))
            at += chunk.count

    def close(self):
        for at, count in self.bounds:
            self.driver.call("cuMemUnmap", c_uint64(at), c_size_t(count))
        self.driver.call("cuMemAddressFree", c_uint64(self.address), c_size_t(self.count))
