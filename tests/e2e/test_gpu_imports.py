"""Memory that workers bring to a GPU, through the whole daemon. The GPU is a CUDA in host memory (tests/unit/fake_cuda.c): a
chunk of virtual memory is a memfd named fake-cuda:N, an IPC handle says which descriptor of which process to open."""
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from support import attach_wire as wire
from support import reference
from support.attach_ring import DONE, REFUSED, Ring, store
from support.attach_wire import Attachment, Refused
from support.catalogue import V41
from support.client import Step
from support.daemon import Daemon, fake_cuda_executor_path
from support.process import wait_until
from support.stubs import pb
from support.traffic import random_rows
from support.worker import KV, TOKENS

pytestmark = pytest.mark.skipif(not fake_cuda_executor_path().exists(), reason="this build has no CUDA")

DEVICE, BLOCKS, PAGE = "cuda:0", 8, 4096
ROWS = TOKENS
BYTES = ROWS * V41.row_bytes
ALLOCATION = BYTES + 2 * PAGE
NAMES = ("fake-cuda:0 of a worker", "a worker's allocation")


@pytest.fixture(scope="module")
def daemon():
    with Daemon(devices=(DEVICE,), executor=fake_cuda_executor_path(), device_memory="512M") as running:
        yield running


@pytest.fixture
def pool(client, pool_name):
    made = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    yield made
    client.delete_pool(made.pool_id, force=True)


@pytest.fixture
def attach(client):
    made = []

    def begin(session):
        made.append(Attachment(client.info().attach_socket, session.ref))
        return made[-1]

    yield begin
    for attachment in made:
        attachment.close()


@pytest.fixture
def rng():
    return np.random.default_rng(61)


class Memory:
    """An allocation of this process's."""

    def __init__(self, name=NAMES[0], count=ALLOCATION):
        self.fd, self.count = os.memfd_create(name, os.MFD_CLOEXEC), count
        os.ftruncate(self.fd, count)

    def handle(self, owner=0, device=0, count=None):
        return ipc_handle(self.fd, owner, device, self.count if count is None else count)

    def put(self, data, offset=0):
        assert os.pwrite(self.fd, data, offset) == len(data)

    def close(self):
        os.close(self.fd)


def ipc_handle(fd, owner=0, device=0, count=ALLOCATION, holder=None):
    """As tests/unit/fake_cuda_handle.h has it."""
    holder = os.getpid() if holder is None else holder
    return struct.pack("<8siiiiQQI20x", b"fakeipc", holder, fd, owner, device, count, 0, 0)


def mapped(client, name):
    """Of the executor: where it has memory of that name. A memfd whose process is gone keeps its name there."""
    return Path(f"/proc/{client.device(DEVICE).executor_pid}/maps").read_text().count(f"/memfd:{name} ")


def kept(daemon, name):
    """Descriptors of it that supervisor and executor have."""
    count = 0
    for pid in (daemon.pid, *daemon.executor_pids()):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                count += f"/memfd:{name} " in os.readlink(fd)
            except FileNotFoundError:
                pass
    return count


def import_vmm(attachment, memory, offset=0, count=None):
    return attachment.import_buffer(memory.fd, memory.count, offset, count, kind=wire.VMM)


def import_ipc(attachment, memory, offset=0, count=None):
    return attachment.import_buffer(-1, memory.count, offset, count, kind=wire.IPC_HANDLE, handle=memory.handle())


def check_store(client, session, pool, ring, tag, buffer, block, rows):
    """A step of the worker's stores the buffer's rows; the scheduler loads them."""
    slots = [block * TOKENS + i for i in range(ROWS)]
    ring.post(1, tag, store(pool.pool_id, slots, session.epoch, buffer.buffer_id, V41.row_bytes))
    end = ring.wait(tag)
    assert end.kind == DONE, end.error.text
    out = session.create_buffer(BYTES, DEVICE)
    step = Step()
    step.load(pb.RegionRef(pool_id=pool.pool_id, region=0, layer=0), [[block, 0, TOKENS, 0]], ROWS,
              out.view(0, ROWS, V41.row_bytes))
    session.run(step)
    assert out.read(0, BYTES).tobytes() == reference.cast_back(V41, rows).tobytes()
    out.release()


@pytest.mark.parametrize("name, bring", [(NAMES[0], import_vmm), (NAMES[1], import_ipc)])
def test_memory_of_a_worker(daemon, client, session, attach, pool, rng, name, bring):
    memory, rows = Memory(name), random_rows(rng, V41, ROWS)
    memory.put(rows.tobytes(), PAGE + 16)
    before = mapped(client, name)
    [block] = session.allocate(pool.pool_id, 1)
    attachment = attach(session)
    buffers = [bring(attachment, memory, PAGE + 16, BYTES), bring(attachment, memory), bring(attachment, memory, PAGE, 32)]
    assert [b.bytes for b in buffers] == [BYTES, ALLOCATION, 32]
    assert client.device(DEVICE).buffer_bytes == 0  # not the daemon's memory
    check_store(client, session, pool, Ring(attachment.shared), 1, buffers[0], block, rows)
    for buffer in buffers:
        assert mapped(client, name) > before
        attachment.release_buffer(buffer.buffer_id)  # told when the executor has let go of it
    assert mapped(client, name) == before and kept(daemon, name) == 0
    memory.close()


def test_what_is_refused(client, session, attach):
    """And the executor goes on."""
    attachment, executor, restarts = attach(session), client.device(DEVICE).executor_pid, client.device(DEVICE).restarts
    ours, other, host, plain = (Memory(name) for name in (NAMES[0], "fake-cuda:1", "fake-cuda:host", "plain"))
    (read_end, write_end), (controller, terminal) = os.pipe(), os.openpty()
    refused = [
        (wire.VMM, plain.fd, ALLOCATION, 0, None, "invalid_argument", "cuMemImportFromShareableHandle"),
        (wire.VMM, read_end, ALLOCATION, 0, None, "invalid_argument", "is no GPU driver's"),
        (wire.VMM, terminal, ALLOCATION, 0, None, "invalid_argument", "is no GPU driver's"),
        (wire.VMM, other.fd, ALLOCATION, 0, None, "wrong_device", "GPU 1, this device is GPU 0"),
        (wire.VMM, host.fd, ALLOCATION, 0, None, "invalid_argument", "lies in no GPU"),
        (wire.VMM, ours.fd, ALLOCATION + PAGE, 0, None, "invalid_argument", f"{ALLOCATION + PAGE} bytes"),
        (wire.VMM, ours.fd, ALLOCATION - 16, 0, None, "invalid_argument", "is no multiple of 4096"),
        (wire.IPC_HANDLE, os.urandom(64), ALLOCATION, 0, None, "invalid_argument", "cuIpcOpenMemHandle"),
        (wire.IPC_HANDLE, bytes(64), ALLOCATION, 0, None, "invalid_argument", "cuIpcOpenMemHandle"),
        (wire.IPC_HANDLE, ours.handle(owner=executor), ALLOCATION, 0, None, "invalid_argument", "(201)"),
        (wire.IPC_HANDLE, ipc_handle(99999), ALLOCATION, 0, None, "invalid_argument", "(400)"),
        (wire.IPC_HANDLE, ours.handle(device=1), ALLOCATION, 0, None, "wrong_device", "GPU 1, this device is GPU 0"),
        (wire.IPC_HANDLE, ours.handle(), ALLOCATION + PAGE, PAGE, ALLOCATION, "out_of_range",
         f"{ALLOCATION} bytes from {PAGE} on are not inside its allocation, which has {ALLOCATION}"),
    ]
    for kind, what, allocation, offset, count, status, text in refused:
        fd, handle = (what, bytes(64)) if kind == wire.VMM else (-1, what)
        with pytest.raises(Refused) as caught:
            attachment.import_buffer(fd, allocation, offset, count, kind=kind, handle=handle)
        assert (caught.value.status, text in caught.value.text) == (status, True), caught.value
    assert client.device(DEVICE).executor_pid == executor and client.device(DEVICE).restarts == restarts
    assert mapped(client, NAMES[0]) == 0
    attachment.release_buffer(import_ipc(attachment, ours).buffer_id)
    attachment.release_buffer(import_vmm(attachment, ours).buffer_id)
    for fd in (ours.fd, other.fd, host.fd, plain.fd, read_end, write_end, controller, terminal):
        os.close(fd)


def test_a_worker_dies_with_its_memory_open(daemon, client, session, attach, pool, rng):
    """Its mappings go, the executor and another worker's memory stay."""
    executor = client.device(DEVICE).executor_pid
    ours, rows = Memory(NAMES[0]), random_rows(rng, V41, ROWS)
    ours.put(rows.tobytes())
    [block] = session.allocate(pool.pool_id, 1)
    attachment = attach(session)
    buffer = import_ipc(attachment, ours, 0, BYTES)
    child = os.fork()
    if child == 0:
        try:
            theirs = Memory("victim")
            victim = Attachment(str(daemon.attach_socket), session.ref)
            import_ipc(victim, theirs)
            chunk = Memory(NAMES[0])
            import_vmm(victim, chunk)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    wait_until(lambda: len(mine(client, session)) == 1, "the victim is gone")
    wait_until(lambda: mapped(client, "victim") == 0 and mapped(client, NAMES[0]) == 1, "its memory is gone")
    check_store(client, session, pool, Ring(attachment.shared), 1, buffer, block, rows)
    assert client.device(DEVICE).executor_pid == executor
    attachment.release_buffer(buffer.buffer_id)
    wait_until(lambda: kept(daemon, NAMES[0]) == 0, "no descriptor is left")
    ours.close()


def mine(client, session):
    return next(s for s in client.list_sessions() if s.session_id == session.ref.session_id).attachments


def test_an_executor_dies(daemon, client, session, attach, pool, rng):
    """Its successor opens again what can be opened; what can't is lost, by name, and steps that name it are told."""
    vmm, ipc, gone = Memory(NAMES[0]), Memory(NAMES[1]), Memory("gone")
    rows = [random_rows(rng, V41, ROWS) for _ in range(2)]
    vmm.put(rows[0].tobytes(), PAGE)
    ipc.put(rows[1].tobytes(), PAGE)
    blocks = session.allocate(pool.pool_id, 2)
    attachment = attach(session)
    buffers = [import_vmm(attachment, vmm, PAGE, BYTES), import_ipc(attachment, ipc, PAGE, BYTES)]
    same, lost = import_ipc(attachment, ipc, 0, 64), import_ipc(attachment, gone, 0, BYTES)
    gone.close()  # as if its process had freed it
    os.kill(client.device(DEVICE).executor_pid, signal.SIGKILL)
    attachment.wait_event(wire.DEVICE_LOST)
    attachment.shared.close()
    attachment.shared = wire.Shared(attachment.wait_event(wire.DEVICE_RESTORED).fds)
    ring = Ring(attachment.shared)
    for i, buffer in enumerate(buffers):
        check_store(client, session, pool, ring, 1 + i, buffer, blocks[i], rows[i])
    slots = [blocks[0] * TOKENS + i for i in range(ROWS)]
    ring.post(1, 9, store(pool.pool_id, slots, session.epoch, lost.buffer_id, V41.row_bytes))
    refusal = ring.wait(9)
    assert refusal.kind == REFUSED and wire.STATUS_MAP[refusal.error.status][0] == "unknown_buffer"
    assert f"buffer {lost.buffer_id} is lost".encode() in refusal.error.text
    [line] = [line for line in daemon.log.splitlines() if "buffer_lost" in line]
    assert f"session={session.ref.session_id} buffer={lost.buffer_id} bytes={BYTES} " in line
    assert "cuIpcOpenMemHandle" in line
    attachment.release_buffer(lost.buffer_id)
    for buffer in (*buffers, same):
        attachment.release_buffer(buffer.buffer_id)
    assert mapped(client, NAMES[0]) == mapped(client, NAMES[1]) == 0
    vmm.close()
    ipc.close()


def test_workers_with_a_driver(tmp_path):
    """The tests of a real GPU: what libkvpool makes of memory by the driver, here the libcuda of tests/unit/, and what becomes
    of it."""
    tests = Path(__file__).resolve().parents[1]
    folder = fake_cuda_executor_path().parent / "fake_libcuda"
    report = tmp_path / "report.xml"
    changes = {"KVPOOL_TEST_DEVICE": DEVICE, "KVPOOL_TEST_EXEC": str(fake_cuda_executor_path()),
               "LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_BYTES": str(4 << 30)}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tests), "-c",
                           str(tests / "pytest.ini"), "--junitxml", str(report),
                           str(tests / "gpu" / "test_worker_memory_gpu.py")], env={**os.environ, **changes},
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert int(suite.get("tests")) >= 12 and int(suite.get("skipped")) == 0, done.stdout
