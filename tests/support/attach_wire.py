"""The attach protocol as a worker speaks it, from its layouts alone: proto/attach_wire.h, fd_socket.h, ring.h. Shares no
code with the daemon or its library."""
import array
import ctypes
import mmap
import os
import socket
import struct
from dataclasses import dataclass, field

from support.errors import STATUS_MAP

MAGIC = 0x6374766B
VERSION = 1
NAME_BYTES, SECRET_BYTES, REGIONS_MAX, FDS_MAX, BODY_BYTES_MAX = 64, 16, 16, 64, 16384

ATTACH, MAP_POOL, CREATE_BUFFER, MAP_BUFFER, IMPORT_BUFFER, RELEASE_BUFFER = range(1, 7)
ATTACHED, POOL, BUFFER, MEMORY_CHUNKS, RESULT, DEVICE_LOST, DEVICE_RESTORED, ENDED = range(32, 40)
MEMFD, VMM, IPC_HANDLE = 1, 2, 3
SERVING, LOST, OVER = 1, 2, 3

POISON = 1 << 62
CLIENT_WORDS, EXECUTOR_WORDS, WORD_BYTES = 512, 512, 64


class Hello(ctypes.LittleEndianStructure):
    _fields_ = [("version", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("session_id", ctypes.c_uint64),
                ("secret", ctypes.c_uint8 * SECRET_BYTES), ("device", ctypes.c_char * NAME_BYTES)]


class Welcome(ctypes.LittleEndianStructure):
    _fields_ = [("version", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("attachment_id", ctypes.c_uint64),
                ("generation", ctypes.c_uint64), ("epoch", ctypes.c_uint64), ("deadline_ns_max", ctypes.c_uint64),
                ("memory_granularity_bytes", ctypes.c_uint64), ("device", ctypes.c_char * NAME_BYTES),
                ("uuid", ctypes.c_char * NAME_BYTES)]


class Error(ctypes.LittleEndianStructure):
    _fields_ = [("status", ctypes.c_int32), ("op", ctypes.c_int32), ("position", ctypes.c_int64),
                ("value", ctypes.c_int64), ("array", ctypes.c_char * 32), ("text", ctypes.c_char * 384)]


class Status(ctypes.LittleEndianStructure):
    _fields_ = [("generation", ctypes.c_uint64), ("state", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
                ("reason", Error)]


class PoolName(ctypes.LittleEndianStructure):
    _fields_ = [("name", ctypes.c_char * NAME_BYTES)]


class Region(ctypes.LittleEndianStructure):
    _fields_ = [("name", ctypes.c_char * NAME_BYTES), ("format", ctypes.c_uint32), ("width", ctypes.c_uint32),
                ("tokens_per_block", ctypes.c_uint32), ("num_layers", ctypes.c_uint32),
                ("memory_bytes", ctypes.c_uint64)]


class Pool(ctypes.LittleEndianStructure):
    _fields_ = [("pool_id", ctypes.c_uint64), ("num_blocks", ctypes.c_uint32), ("block_size", ctypes.c_uint32),
                ("kind", ctypes.c_uint32), ("region_count", ctypes.c_uint32), ("regions", Region * REGIONS_MAX)]


class BufferBody(ctypes.LittleEndianStructure):
    _fields_ = [("buffer_id", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("memory_bytes", ctypes.c_uint64)]


class Chunks(ctypes.LittleEndianStructure):
    _fields_ = [("memory_id", ctypes.c_uint64), ("memory_bytes", ctypes.c_uint64), ("first_chunk", ctypes.c_uint32),
                ("chunk_count", ctypes.c_uint32), ("chunk_bytes", ctypes.c_uint64 * FDS_MAX)]


class Import(ctypes.LittleEndianStructure):
    _fields_ = [("kind", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("allocation_bytes", ctypes.c_uint64),
                ("offset_bytes", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("ipc_handle", ctypes.c_uint8 * 64)]


BODIES = {ATTACHED: Welcome, DEVICE_RESTORED: Welcome, POOL: Pool, BUFFER: BufferBody, MEMORY_CHUNKS: Chunks,
          RESULT: Error, DEVICE_LOST: Error, ENDED: Error}


class Refused(Exception):
    """A RESULT or an ENDED that is no success."""

    def __init__(self, error):
        super().__init__(f"{STATUS_MAP[error.status][0]}: {error.text.decode()}")
        self.status, self.text = STATUS_MAP[error.status][0], error.text.decode()
        self.array, self.value = error.array.decode(), error.value


class Closed(Exception):
    """The daemon closed the socket."""


@dataclass
class Message:
    kind: int
    request: int
    body: object
    fds: list = field(default_factory=list)

    def close(self):
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class WireSocket:
    """Messages as they are; nothing is checked before it is sent."""

    def __init__(self, path, seconds=60):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(seconds)
        self.socket.connect(str(path))

    def send_raw(self, data, fds=()):
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], ancillary)

    def send(self, kind, request, body=b"", fds=()):
        data = bytes(body)
        self.send_raw(struct.pack("<4I", MAGIC, kind, request, len(data)) + data, fds)

    def receive(self):
        data, fds, flags, _ = socket.recv_fds(self.socket, 16 + BODY_BYTES_MAX, FDS_MAX, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise Closed()
        magic, kind, request, body_bytes = struct.unpack_from("<4I", data)
        assert magic == MAGIC and body_bytes == len(data) - 16 and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        layout = BODIES[kind]
        assert body_bytes == ctypes.sizeof(layout), f"kind {kind} has {body_bytes} bytes"
        return Message(kind, request, layout.from_buffer_copy(data, 16), list(fds))

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def hello(session_ref, device="", version=VERSION, secret=None):
    """session_ref: the SessionRef of a gRPC session."""
    return Hello(version, 0, session_ref.session_id,
                 (ctypes.c_uint8 * SECRET_BYTES)(*(session_ref.secret if secret is None else secret)),
                 device.encode())


class Shared:
    """The five descriptors of ATTACHED or DEVICE_RESTORED, mapped."""

    def __init__(self, fds):
        assert len(fds) == 5
        self.fds = fds
        self.ring_fd, self.command_event, self.completion_event, self.timelines_fd, self.status_fd = fds
        self.ring_map = mmap.mmap(self.ring_fd, os.fstat(self.ring_fd).st_size)
        self.timelines = mmap.mmap(self.timelines_fd, os.fstat(self.timelines_fd).st_size)
        self.status_map = mmap.mmap(self.status_fd, os.fstat(self.status_fd).st_size, prot=mmap.PROT_READ)

    def status(self):
        return Status.from_buffer_copy(self.status_map)

    def _word(self, index):
        """In the memory itself: one load or store of 8 bytes, where struct, told a byte order, would make eight."""
        return ctypes.c_uint64.from_buffer(self.timelines, index * WORD_BYTES)

    def word(self, index):
        return self._word(index).value

    def set_word(self, index, value):
        self._word(index).value = value

    def close(self):
        self.ring_map.close()
        self.timelines.close()
        self.status_map.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Attachment:
    """An attached worker. Requests one at a time; what comes with request 0 is kept in `events`."""

    def __init__(self, path, session_ref, device=""):
        self.wire = WireSocket(path)
        self.events, self.requests = [], 0
        self.shared = None
        try:
            self.wire.send(ATTACH, self._next(), hello(session_ref, device))
            answer = self.wire.receive()
            if answer.kind in (RESULT, ENDED):
                raise Refused(answer.body)
            assert answer.kind == ATTACHED and answer.request == self.requests
        except BaseException:
            self.wire.close()
            raise
        self.welcome, self.shared = answer.body, Shared(answer.fds)

    def _next(self):
        self.requests += 1
        return self.requests

    def ask(self, kind, body=b"", fds=()):
        """The messages that answer it, the RESULT last; Refused when that is no success."""
        number = self._next()
        self.wire.send(kind, number, body, fds)
        return self.answers(number)

    def answers(self, number):
        found = []
        while not found or found[-1].kind != RESULT:
            message = self.wire.receive()
            if message.kind == ENDED:
                raise Refused(message.body)
            if message.request == 0:
                self.events.append(message)
            else:
                assert message.request == number, f"answer to {message.request}, not {number}"
                found.append(message)
        if found[-1].body.status:
            for message in found:
                message.close()
            raise Refused(found[-1].body)
        return found

    def wait_event(self, kind):
        """The next event of that kind; those before it are dropped."""
        while True:
            message = self.events.pop(0) if self.events else self.wire.receive()
            assert message.request == 0, f"an answer to {message.request}"
            if message.kind == kind:
                return message
            message.close()

    def map_pool(self, name):
        """The Pool, and for each region its (fd, bytes) chunks."""
        pool, *chunks, _ = self.ask(MAP_POOL, PoolName(name.encode()))
        assert pool.kind == POOL
        return pool.body, collect_chunks(chunks, pool.body.region_count)

    def create_buffer(self, count):
        buffer, *chunks, _ = self.ask(CREATE_BUFFER, BufferBody(0, count, 0))
        return buffer.body, collect_chunks(chunks, 1)[0]

    def map_buffer(self, buffer_id):
        buffer, *chunks, _ = self.ask(MAP_BUFFER, BufferBody(buffer_id, 0, 0))
        return buffer.body, collect_chunks(chunks, 1)[0]

    def import_buffer(self, fd, allocation_bytes, offset=0, count=None, kind=MEMFD, handle=bytes(64)):
        count = allocation_bytes - offset if count is None else count
        body = Import(kind, 0, allocation_bytes, offset, count, (ctypes.c_uint8 * 64)(*handle))
        buffer, _ = self.ask(IMPORT_BUFFER, body, [fd] if fd >= 0 else [])
        return buffer.body

    def release_buffer(self, buffer_id):
        self.ask(RELEASE_BUFFER, BufferBody(buffer_id, 0, 0))

    def close(self):
        self.wire.close()
        if self.shared is not None:
            self.shared.close()
            self.shared = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def collect_chunks(messages, memory_count):
    """[memory_count] lists of (fd, bytes), from MEMORY_CHUNKS messages that must come in order."""
    memories = [[] for _ in range(memory_count)]
    expected = [None] * memory_count
    at = 0
    for message in messages:
        assert message.kind == MEMORY_CHUNKS and message.fds
        body = message.body
        assert body.memory_id >= at, "regions are out of order"
        at = body.memory_id
        assert body.first_chunk == len(memories[at]), "chunks are out of order"
        expected[at] = (body.chunk_count, body.memory_bytes)
        memories[at] += list(zip(message.fds, body.chunk_bytes))
    for chunks, told in zip(memories, expected):
        assert told == (len(chunks), sum(count for _, count in chunks))
    return memories


def close_chunks(memories):
    for chunks in memories:
        for fd, _ in chunks:
            os.close(fd)
