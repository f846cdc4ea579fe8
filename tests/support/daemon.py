"""A real kvpoold with its executors, started in a directory of its own and checked for leftovers when it ends."""
import atexit
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import grpc

from support import memory
from support.client import Client
from support.device import DEVICE, ON_GPU
from support.process import children, is_running, wait_until
from support.remote_memory import BufferCopy, RegionCopy
from support.stubs import pb

START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 60


def build_dir():
    value = os.environ.get("KVPOOL_BUILD_DIR")
    assert value, "KVPOOL_BUILD_DIR must name the build directory that holds kvpoold and kvpool-exec"
    return Path(value)


def kvpoold_path():
    return build_dir() / "server" / "supervisor" / "kvpoold"


def executor_path():
    """$KVPOOL_TEST_EXEC: another one, as in tests/unit/."""
    if "KVPOOL_TEST_EXEC" in os.environ:
        return Path(os.environ["KVPOOL_TEST_EXEC"])
    return build_dir() / "server" / "executor" / "kvpool-exec"


def fake_executor_path():
    """Says that it is a GPU, where its device's name is cuda:*; see tests/unit/fake_executor.c."""
    return build_dir() / "tests" / "unit" / "fake_executor"


def held_rings_path():
    """To be preloaded: rings that are not made before a file has gone; see tests/unit/held_rings.c."""
    return build_dir() / "tests" / "unit" / "held_rings.so"


def fake_cuda_executor_path():
    """A kvpool-exec on a CUDA in host memory (tests/unit/fake_cuda.c); builds without CUDA have none."""
    return build_dir() / "tests" / "unit" / "kvpool-exec-fake-cuda"


class Daemon:
    """Start with `Daemon(flags...)`, end with stop() or kill(); both leave nothing behind or fail."""

    def __init__(self, *flags, devices=(DEVICE,), threads=2, device_memory="2G", directory=None, log_level="info",
                 wait=True, descriptors=None, executor=None):
        self.owns_directory = directory is None
        self.directory = Path(directory or tempfile.mkdtemp(prefix="kvpoold-test-", dir="/tmp"))
        self.socket = self.directory / "kvpoold.sock"
        self.attach_socket = self.directory / "kvpoold.attach.sock"
        self.lock = self.directory / "kvpoold.sock.lock"
        self.log_path = self.directory / f"kvpoold-{time.monotonic_ns()}.log"
        self.command = [str(kvpoold_path()), "--socket", str(self.socket), "--executor", str(executor or executor_path()),
                        "--device-threads", str(threads), "--device-memory", device_memory, "--log-level", log_level]
        for device in devices:
            self.command += ["--device", device]
        self.command += [str(flag) for flag in flags]
        if descriptors is not None:
            self.command[:0] = ["prlimit", f"--nofile={descriptors}"]
        self.clients = []
        self.seen_memory, self.seen_executors = set(), set()
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        atexit.register(self._kill_quietly)
        if wait:
            try:
                self.wait_serving()
            except BaseException:
                self._kill_quietly()
                raise

    @property
    def pid(self):
        return self.process.pid

    @property
    def log(self):
        return self.log_path.read_text(errors="replace")

    def client(self):
        client = Client(f"unix:{self.socket}")
        self.clients.append(client)
        return client

    def wait_serving(self, seconds=START_SECONDS_MAX):
        def listening():
            assert self.process.poll() is None, f"kvpoold exited with {self.process.returncode}:\n{self.log}"
            return self.socket.exists()

        def serving():
            assert self.process.poll() is None, f"kvpoold exited with {self.process.returncode}:\n{self.log}"
            client = Client(f"unix:{self.socket}")  # a new one each time: gRPC waits long after a failed connect
            try:
                info = client.rpc.GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
            except grpc.RpcError as error:
                assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), error
                return False
            finally:
                client.close()
            return bool(info.devices) and all(d.state == pb.DEVICE_SERVING for d in info.devices)

        wait_until(listening, "the socket", seconds)
        wait_until(serving, "devices serving", seconds)
        self.note_processes()

    def executor_pids(self):
        return [pid for pid in children(self.pid)]

    def note_processes(self):
        """Remembers executors and memfds, so that the end can be checked against them."""
        self.seen_executors.update(self.executor_pids())
        for pid in (self.pid, *self.seen_executors):
            self.seen_memory |= memory.identities(pid)

    def region_memory(self, pool, region, device=DEVICE):
        """The bytes of a region, all layers."""
        if ON_GPU:
            return RegionCopy(Client(f"unix:{self.socket}"), pool, region)
        return memory.RawMemory(self.pid, self._executor_pid(device), f"kvpool:{pool}:{region}")

    def buffer_memory(self, buffer, device=DEVICE):
        if ON_GPU:
            return BufferCopy(buffer)
        return memory.RawMemory(self.pid, self._executor_pid(device), f"kvpool-buffer:{buffer.id}")

    def _executor_pid(self, device):
        client = Client(f"unix:{self.socket}")
        try:
            return client.device(device).executor_pid
        finally:
            client.close()

    def stop(self, expect_status=0):
        """SIGTERM, and everything must be gone."""
        self.note_processes()
        for client in self.clients:
            client.close()
        self.clients = []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            text = self.log
            self._kill_quietly()
            raise AssertionError(f"kvpoold did not end on SIGTERM:\n{text}") from None
        assert status == expect_status, f"kvpoold ended with {status}:\n{self.log}"
        self._check_nothing_left()
        assert not self.lock.exists(), f"{self.lock} is left"
        assert not re.search(r"AddressSanitizer|runtime error:|LeakSanitizer", self.log), self.log
        self._remove_directory()

    def kill(self):
        """SIGKILL, and everything must be gone. The directory stays for a successor; remove() takes it away."""
        self.note_processes()
        self.process.kill()
        self.process.wait()
        for client in self.clients:
            client.close()
        self.clients = []
        self._check_nothing_left()

    def remove(self):
        self._remove_directory()

    def _check_nothing_left(self):
        wait_until(lambda: not any(is_running(pid) for pid in self.seen_executors),
                   f"executors {self.seen_executors} gone")
        wait_until(lambda: not self.socket.exists() and not self.attach_socket.exists(), "sockets removed")
        wait_until(lambda: not memory.holders(self.seen_memory), f"memfds held: {memory.holders(self.seen_memory)}")

    def _remove_directory(self):
        atexit.unregister(self._kill_quietly)
        if self.owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _kill_quietly(self):
        executors = self.executor_pids() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for pid in executors:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._remove_directory()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.stop()
            return
        print(f"---- log of kvpoold {self.pid} ----\n{self.log[-20000:]}")
        self._kill_quietly()
