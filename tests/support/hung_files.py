"""Descriptors whose close() takes as long as their maker likes: what a hostile worker may send."""
import contextlib
import ctypes
import os
import signal
import socket
import stat
import struct
import tempfile
import threading

from support.process import process_state, wait_until


@contextlib.contextmanager
def stopped(pid):
    """The process does nothing meanwhile: what is sent to it can be closed here, and it then has the only descriptor."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: process_state(pid) == "T", f"{pid} stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class LingeringSocket:
    """A TCP socket with data that its peer doesn't take, and an hour to wait for that when it is closed."""

    def __init__(self):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            self.socket = socket.create_connection(listener.getsockname())
            self.peer, _ = listener.accept()
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.socket.send(bytes(1 << 16))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))

    def fileno(self):
        return self.socket.fileno()

    def close_ours(self):
        """When somebody else has one, or it is on its way to them."""
        self.socket.close()

    def let_go(self):
        """Whoever closes it gets on. Idempotent."""
        if self.peer.fileno() < 0:
            return
        self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        self.peer.close()
        self.socket.close()


# ---- a file system that stops answering ----------------------------------------------------------------------------

LOOKUP, FORGET, GETATTR, OPEN, RELEASE, FLUSH, INIT, BATCH_FORGET = 1, 2, 3, 14, 18, 25, 26, 42
IN_HEADER, OUT_HEADER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
ROOT, FILE = 1, 2
MOUNT_FLAGS = 2 | 4  # nosuid, nodev
FORCE, DETACH = 1, 2
ENOSYS = 38


class SilentFile:
    """A file of a FUSE file system served from here, which answers nothing any more after fall_silent()."""

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self.directory = tempfile.mkdtemp(prefix="kvpoold-fuse-", dir="/tmp")
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if self.libc.mount(b"test", self.directory.encode(), b"fuse", MOUNT_FLAGS, options) != 0:
            number = ctypes.get_errno()
            os.close(self.device)
            os.rmdir(self.directory)
            raise OSError(number, os.strerror(number))
        self.silent, self.unanswered = threading.Event(), []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.fd = os.open(f"{self.directory}/file", os.O_RDWR)

    def fileno(self):
        return self.fd

    def close_ours(self):
        os.close(self.fd)
        self.fd = -1

    def fall_silent(self):
        """From here on what is asked is only noted."""
        self.silent.set()

    def let_go(self):
        """Its end: everybody who waits for an answer is told that there will be none."""
        self.libc.umount2(self.directory.encode(), FORCE)
        self.thread.join(60)
        if self.fd >= 0:
            os.close(self.fd)
        self.libc.umount2(self.directory.encode(), DETACH)
        os.close(self.device)
        os.rmdir(self.directory)

    def _serve(self):
        while True:
            try:
                request = os.read(self.device, 1 << 20)
            except OSError:
                return  # it is over
            _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
            if opcode in (FORGET, BATCH_FORGET):
                continue  # there is no answer to these
            if self.silent.is_set():
                self.unanswered.append(opcode)
                continue
            body = self._answer(opcode, node)
            error = -ENOSYS if body is None else 0
            body = body or b""
            os.write(self.device, OUT_HEADER.pack(OUT_HEADER.size + len(body), error, unique) + body)

    @staticmethod
    def _answer(opcode, node):
        """The body of the answer; None: not known here."""
        def attributes(number):
            mode = stat.S_IFDIR | 0o755 if number == ROOT else stat.S_IFREG | 0o666
            return struct.pack("<6Q10I", number, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

        if opcode == INIT:
            return struct.pack("<4I2H2I2H8I", 7, 31, 1 << 16, 0, 8, 8, 1 << 16, 1, 0, 0, *[0] * 8)
        if opcode == LOOKUP:
            return struct.pack("<4Q2I", FILE, 0, 0, 0, 0, 0) + attributes(FILE)
        if opcode == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + attributes(node)
        if opcode == OPEN:
            return struct.pack("<QII", 1, 0, 0)
        return b"" if opcode in (FLUSH, RELEASE) else None
