"""Pool memory, owner tables and buffers of the host backend, reached without the product: the daemon's memfds as
they show in /proc, mapped read-write by the test."""
import mmap
import os
import re

import numpy as np

def descriptors(pid):
    """(fd path, link target) of every kvpool memfd a process holds."""
    found = []
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return found
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("/memfd:kvpool"):
            found.append((f"{folder}/{name}", target))
    return found


def names(pid):
    """Names of the kvpool memfds a process holds."""
    return {target.split(" ")[0].removeprefix("/memfd:") for _, target in descriptors(pid)}


def identities(pid):
    """(device, inode) of every kvpool memfd a process holds: names repeat, these don't."""
    result = set()
    for path, _ in descriptors(pid):
        try:
            info = os.stat(path)
        except OSError:
            continue
        result.add((info.st_dev, info.st_ino))
    return result


def holders(wanted):
    """Processes other than this one that hold, or have mapped, one of these memfds."""
    found = {}
    inodes = {inode for _, inode in wanted}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        held = identities(entry) & wanted
        try:
            with open(f"/proc/{entry}/maps", encoding="utf-8", errors="replace") as maps:
                held |= {("map", int(line.split()[4])) for line in maps
                         if "/memfd:kvpool" in line and int(line.split()[4]) in inodes}
        except OSError:
            pass
        if held:
            found[int(entry)] = held
    return found


def owner_table(pid, pool):
    """The entries of a pool's owner table, uint64 [num_blocks, padded to a page]: epoch << 24 | state << 16 | owner."""
    paths = [path for path, target in descriptors(pid) if target.split(" ")[0] == f"/memfd:kvpool-owner:{pool}"]
    assert paths, f"no owner table of {pool} in process {pid}"
    with open(paths[0], "rb") as table:
        data = table.read()
    return np.frombuffer(data[:len(data) // 8 * 8], "<u8")


def _mapped_inodes(pid, name):
    """Inodes of the chunks of a memory, which share its name, in the order in which a process has them mapped."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        fields = [line.split(None, 5) for line in maps]
    wanted = re.compile(rf"/memfd:{re.escape(name)}(:\d+)?( \(deleted\))?")
    return list(dict.fromkeys(int(f[4]) for f in fields if len(f) == 6 and wanted.fullmatch(f[5].strip())))


class RawMemory:
    """The chunks of one memory in order; offsets run over all of them, page padding at the end included.

    The executor says which memfds they are and in what order, the supervisor holds the descriptors.
    """

    def __init__(self, supervisor_pid, executor_pid, name):
        paths = {os.stat(path).st_ino: path for path, _ in descriptors(supervisor_pid)}
        order = _mapped_inodes(executor_pid, name)
        assert order, f"process {executor_pid} has no memory {name} mapped"
        self.maps, self.chunks, self.fds = [], [], []
        for inode in order:
            fd = os.open(paths[inode], os.O_RDWR | os.O_CLOEXEC)
            self.fds.append(fd)
            self.maps.append(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED))
            self.chunks.append(np.frombuffer(self.maps[-1], np.uint8))

    @property
    def bytes(self):
        """Page padding included."""
        return sum(len(c) for c in self.chunks)

    @property
    def array(self):
        """All of it as one writable array; memories of one chunk only."""
        assert len(self.chunks) == 1
        return self.chunks[0]

    def _pieces(self, offset, count):
        start = 0
        for chunk in self.chunks:
            low, high = max(offset, start), min(offset + count, start + len(chunk))
            if low < high:
                yield chunk, low - start, high - start, low - offset
            start += len(chunk)
        assert offset + count <= start, "past the end of the memory"

    def read(self, offset, count):
        out = np.empty(count, np.uint8)
        for chunk, low, high, at in self._pieces(offset, count):
            out[at:at + high - low] = chunk[low:high]
        return out

    def write(self, offset, data):
        data = np.asarray(data, np.uint8)
        for chunk, low, high, at in self._pieces(offset, len(data)):
            chunk[low:high] = data[at:at + high - low]

    def fill(self, byte):
        for chunk in self.chunks:
            chunk[:] = byte

    def prepare(self, byte):
        """Filled, page padding included. What it holds."""
        self.fill(byte)
        return self.snapshot()

    def randomize(self, rng):
        for chunk in self.chunks:
            chunk[:] = rng.integers(0, 256, len(chunk)).astype(np.uint8)

    def refresh(self):
        """Nothing: the chunks are the memory itself; so with flush()."""

    def flush(self):
        pass

    def snapshot(self):
        return np.concatenate(self.chunks)

    def close(self):
        self.chunks = []
        for memory in self.maps:
            try:
                memory.close()
            except BufferError:
                pass  # an array of the test still looks at it; it goes with that
        for fd in self.fds:
            os.close(fd)
        self.maps, self.fds = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
