"""kvpoolctl doctor against hosts that are made up: a tree of device nodes and /proc, NVIDIA's libraries of
fake_nvidia.c, an MPS control daemon that is a listening socket, and daemons in every state."""
import ctypes
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.client import Client
from support.daemon import Daemon, build_dir, fake_executor_path
from support.process import wait_until
from support.proxy import Proxy
from support.stubs import pb
from support.tool import Tool, environment, program

CHOOSE_DEVICE = Path(__file__).resolve().parents[2] / "deploy" / "choose-device.sh"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
MEMINFO = "MemTotal:       67108864 kB\nMemFree:        1 kB\nMemAvailable:   33554432 kB\n"
NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (a@b)\nGCC version: 1\n"


class Host:
    """A made-up host below `root`."""

    def __init__(self, root, socket_path):
        self.root = root
        self.tool = Tool(socket_path)
        self.settings = {}
        for folder in ("dev/shm", "proc/driver/nvidia", "sys/bus/pci/devices", "tmp"):
            (root / folder).mkdir(parents=True)
        (root / "proc/meminfo").write_text(MEMINFO)
        self.pipes = root / "mps"

    def put_pci(self, slot, vendor="0x10de", device_class="0x030200"):
        folder = self.root / "sys/bus/pci/devices" / slot
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(device_class + "\n")

    def put_driver(self, version=NVRM, nodes=("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1")):
        if version:
            (self.root / "proc/driver/nvidia/version").write_text(version)
        for node in nodes:
            (self.root / "dev" / node).write_text("")

    def put_mps(self):
        self.pipes.mkdir()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.pipes / "control"))
        listener.listen()
        return listener

    def environment(self, **changes):
        env = environment(CUDA_MPS_PIPE_DIRECTORY=str(self.pipes), **changes)
        env["LD_LIBRARY_PATH"] = str(build_dir() / "tests" / "client" / "fake_nvidia")
        return env

    def look(self, *flags, status=0, prefix=(), libraries=True, visible=None, **settings):
        """The document; FAKE_NVIDIA is made of the settings. visible: CUDA_VISIBLE_DEVICES."""
        env = self.environment(FAKE_NVIDIA=" ".join(f"{k}={v}" for k, v in settings.items()))
        env.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        if not libraries:
            del env["LD_LIBRARY_PATH"]
        command = [*prefix, *self.tool.command("--json", "--timeout", "1500", "doctor", "--root", self.root, *flags)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, env=env,
                              check=False)
        assert done.returncode == status and done.stderr == "", f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return Findings(done.stdout)


class Findings:
    def __init__(self, text):
        self.document = json.loads(text)
        self.checks = self.document["checks"]
        for result in ("problem", "warning"):
            assert self.document[result + "s"] == len(self.of(result))

    def of(self, result, area=None):
        return [c for c in self.checks if c["result"] == result and (area is None or c["area"] == area)]

    def get(self, name):
        found = [c for c in self.checks if c["name"] == name]
        assert len(found) == 1, (name, self.checks)
        return found[0]

    def is_about(self, name, result, text, advice=""):
        check = self.get(name)
        assert (check["result"], text in check["text"], advice in check["advice"]) == (result, True, True), check
        return check


@pytest.fixture(scope="module")
def daemon():
    with Daemon(devices=("host:0",)) as running:
        yield running


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path / "host", tmp_path / "none.sock")


@pytest.fixture
def gpu_host(host):
    host.put_driver()
    listener = host.put_mps()
    yield host
    listener.close()


# ---- without a GPU -------------------------------------------------------------------------------------------------


def test_a_host_without_a_gpu_is_no_problem(host):
    found = host.look()
    found.is_about("driver", "ok", "the host backend")
    assert [c["name"] for c in found.checks if c["area"] == "GPU"] == ["driver"]
    assert found.document["problems"] == 0
    found.is_about("memory", "ok", "32.0 GiB of 64.0 GiB")
    found.is_about("memfd", "ok", "sealed")
    assert "locked memory" not in [c["name"] for c in found.checks]


def test_a_gpu_without_a_driver(host):
    host.put_pci("0000:01:00.0")
    host.put_pci("0000:02:00.0", device_class="0x030000")
    host.put_pci("0000:01:00.1", device_class="0x040300")  # its sound
    host.put_pci("0000:03:00.0", vendor="0x8086")
    host.look().is_about("driver", "warning", "2 NVIDIA GPUs on the PCI bus", "modprobe nvidia")


def test_little_memory(host):
    (host.root / "proc/meminfo").write_text(MEMINFO.replace("33554432", "1048576"))
    host.look().is_about("memory", "warning", "1.0 GiB of 64.0 GiB", "device_memory")


def test_no_shared_memory(host):
    shutil.rmtree(host.root / "dev/shm")
    host.look().is_about("/dev/shm", "warning", "is not there", "--shm-size")


@pytest.mark.parametrize("limit, result, words", [(8000, "problem", "RLIMIT_NOFILE is 8,000, kvpoold takes 8,328"),
                                                  (8428, "warning", "enough for 50 GiB of pools, or for 2 attached workers"),
                                                  (11591, "warning", "1,631 GiB of pools, or for 75 attached workers"),
                                                  (11592, "ok", "RLIMIT_NOFILE is 11,592")])
def test_descriptors(host, limit, result, words):
    # 128 of its own, 8 of a device, two for each of 4096 connections; then two for each GiB, 43 for each worker.
    # 64 workers and 256 GiB are expected: 64 * 43 + 2 * 256 = 3264.
    found = host.look(status=1 if result == "problem" else 0, prefix=["prlimit", f"--nofile={limit}:{limit}"])
    found.is_about("descriptors", result, words, "LimitNOFILE" if result != "ok" else "")


# ---- with one ------------------------------------------------------------------------------------------------------


def test_a_gpu_host_in_order(gpu_host):
    found = gpu_host.look()
    assert found.of("problem") == []
    assert [c for c in found.of("warning", "GPU") if c["name"] != "kvpool-exec"] == []  # as it was built
    found.is_about("driver", "ok", "580.95.05")
    found.is_about("device nodes", "ok", "2 of GPUs")
    found.is_about("libcuda", "ok", "CUDA 13.0, 2 GPUs")
    found.is_about("MPS", "ok", f"uid {os.geteuid()}")
    found.is_about("cuda:0", "ok", "Test GPU A, 70.0 GiB of 80.0 GiB free, compute capability 9.0, compute mode default; "
                   "also cuda:GPU-01234560-89ab-cdef-0123-456789abcdef")
    found.is_about("cuda:1", "ok", "cuda:GPU-01234561-")


def test_kernel_module_is_missing(host):
    host.put_driver(version="")
    host.look(status=1).is_about("driver", "problem", "no kernel module", "modprobe nvidia")


@pytest.mark.parametrize("missing", ["nvidiactl", "nvidia-uvm", "nvidia0"])
def test_a_device_node_is_missing(host, missing):
    host.put_driver(nodes=[n for n in ("nvidiactl", "nvidia-uvm", "nvidia0") if n != missing])
    host.look(status=1).is_about("device nodes", "problem", f"/dev/{missing} is not there", "nvidia-modprobe")


@needs_root
def test_a_device_node_is_closed(host, tmp_path):
    host.put_driver()
    (host.root / "dev/nvidia1").chmod(0o660)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    host.tool = Tool(host.tool.socket, shutil.copy(program(), tmp_path))
    prefix = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    for node in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (host.root / "dev" / node).chmod(0o666)
    host.look(status=1, prefix=prefix, libraries=False).is_about(
        "device nodes", "problem", "uid 65534 may not use /dev/nvidia1: Permission denied (uid 0, group 0, mode 0660)",
        "--gpus all")


@pytest.mark.parametrize("settings, words, advice", [
    (dict(init=802), "CUDA_ERROR_SYSTEM_NOT_READY (802)", "nvidia-fabricmanager"),
    (dict(init=100), "CUDA_ERROR_OF_A_TEST (100)", "CUDA_VISIBLE_DEVICES is not set"),
    (dict(init=999), "(999)", "dmesg"),
    (dict(version=11080), "the driver knows CUDA 11.8, kvpool-exec needs 1", "update the driver"),
    (dict(init=803), "(803)", "reboot"),
    (dict(lost=15), "cuDeviceGetCount fails: CUDA_ERROR_OF_A_TEST (15)", "dmesg"),
    (dict(crash=1), "ends the process", "MPS"),
    (dict(hang=1), "does not end", "MPS"),
    (dict(count=0), "CUDA 13.0 starts, but has no GPU", "of different versions"),
    (dict(count=-1), "CUDA 13.0 starts, but has no GPU", "of different versions"),
    (dict(visible=""), "has no GPU", "CUDA_VISIBLE_DEVICES is '', which hides every GPU"),
    (dict(visible="-1"), "has no GPU", "CUDA_VISIBLE_DEVICES is '-1', which hides every GPU"),
])
def test_libcuda_does_not_work(gpu_host, settings, words, advice):
    found = gpu_host.look(status=1, **settings)
    found.is_about("libcuda", "problem", words, advice)
    assert found.document["device"] == "host:0" and words in found.document["device_reason"]


def test_a_container_without_its_gpus(host):
    host.put_driver(nodes=["nvidiactl", "nvidia-uvm"])
    host.look(status=1, count=0).is_about("libcuda", "problem", "has no GPU", "docker run --gpus all")


def test_libraries_are_missing(gpu_host):
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        try:
            ctypes.CDLL(name)
            pytest.skip("this host has NVIDIA's libraries")
        except OSError:
            pass
    found = gpu_host.look(status=1, libraries=False)
    found.is_about("libcuda", "problem", "libcuda.so.1", "NVIDIA_DRIVER_CAPABILITIES")
    found.is_about("GPUs", "warning", "libnvidia-ml.so.1", "NVIDIA_DRIVER_CAPABILITIES")


@pytest.mark.parametrize("settings, result, advice", [
    (dict(mode=2), "problem", "nvidia-smi -i 1 -c DEFAULT"),
    (dict(mode=3), "ok", ""),
    (dict(major=7), "warning", "8.0"),
    (dict(mig=1), "warning", "MIG"),
    (dict(free=7), "warning", "in use"),
])
def test_a_gpu_that_is_set_up_otherwise(gpu_host, settings, result, advice):
    found = gpu_host.look(status=1 if result == "problem" else 0, **settings)
    found.is_about("cuda:1", result, "Test GPU B", advice)
    if "free" not in settings:
        found.is_about("cuda:0", "ok", "Test GPU A")


@pytest.mark.parametrize("settings, words", [
    (dict(handle=4), "can't say it: Insufficient Permissions (nvidia-smi's GPU 1)"),
    (dict(memory=15), "can't say its memory: GPU is lost (nvidia-smi's GPU 1)"),
])
def test_a_gpu_that_the_management_library_fails_on(gpu_host, settings, words):
    found = gpu_host.look(status=1, **settings)
    found.is_about("GPU 1" if "handle" in settings else "cuda:1", "problem", words, "nvidia-smi -i 1")
    found.is_about("cuda:0", "ok", "Test GPU A")
    assert found.document["problems"] == 1 and found.document["device"] in ("cuda:0", "host:0")


def test_numbers_of_cuda_and_of_nvidia_smi(gpu_host):
    """CUDA_VISIBLE_DEVICES gives GPUs other numbers, or none."""
    found = gpu_host.look(visible="1")
    found.is_about("cuda:0", "ok", "Test GPU B")
    found.is_about("cuda:0", "ok", "nvidia-smi's GPU 1 (CUDA_VISIBLE_DEVICES is 1)")
    found.is_about("GPU 0", "ok", "Test GPU A")
    found.is_about("GPU 0", "ok", "CUDA does not show it here (CUDA_VISIBLE_DEVICES is 1)")
    found = gpu_host.look(visible="1,0")
    found.is_about("cuda:0", "ok", "Test GPU B")
    found.is_about("cuda:1", "ok", "Test GPU A")
    found.is_about("cuda:1", "ok", "nvidia-smi's GPU 0 ")
    # What is to be done goes by nvidia-smi's number.
    gpu_host.look(status=1, visible="1,0", mode=2).is_about("cuda:0", "problem", "Test GPU B", "nvidia-smi -i 1 -c DEFAULT")


def test_an_exclusive_gpu_without_mps(host):
    host.put_driver()
    host.look(mode=3).is_about("cuda:1", "warning", "exclusive_process", "start MPS")


def test_the_management_library_fails(gpu_host):
    gpu_host.look(status=1, nvml=18).is_about("GPUs", "problem", "Driver/library version mismatch", "reboot")


def test_the_management_library_hangs(gpu_host):
    gpu_host.look(status=1, stuck=1).is_about("GPUs", "problem", "asking for them does not end", "dmesg")


def test_locked_memory(gpu_host):
    found = gpu_host.look(prefix=["prlimit", "--memlock=1048576:1048576"])
    found.is_about("locked memory", "warning", "1.0 MiB", "LimitMEMLOCK")
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        gpu_host.look().is_about("locked memory", "ok", "unlimited")
        gpu_host.look(prefix=["prlimit", "--memlock=67108864:67108864"]).is_about("locked memory", "ok", "64.0 MiB")


# ---- the programs --------------------------------------------------------------------------------------------------


def put_executor(path, words="echo 'Devices of this build: host:N, cuda:N'"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Device to serve: host:0, cuda:0'\n{words}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def installed(host, tmp_path):
    """kvpoolctl alone, installed; the place of its executor."""
    (tmp_path / "usr/bin").mkdir(parents=True)
    host.tool = Tool(host.tool.socket, shutil.copy(program(), tmp_path / "usr/bin"))
    return tmp_path / "usr/libexec/kvpool/kvpool-exec"


@pytest.mark.parametrize("devices, result, advice, device", [("host:N, cuda:N", "ok", "", "cuda:0"),
                                                             ("host:N", "warning", "nvcc", "host:0")])
def test_what_the_executor_was_built_for(gpu_host, installed, devices, result, advice, device):
    put_executor(installed, f"echo 'Devices of this build: {devices}'")
    found = gpu_host.look()
    found.is_about("kvpool-exec", result, "libexec/kvpool/kvpool-exec", advice)
    assert found.document["device"] == device
    assert ("Test GPU A" if device == "cuda:0" else "built without the CUDA backend") in found.document["device_reason"]


def members(group):
    """Processes of the group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            found.append(path)
    return found


@pytest.mark.parametrize("words, text", [("sleep 1000 & sleep 1000", "--help does not end"),
                                         ("exec >&- 2>&-; sleep 1000", "--help does not end"),
                                         ("echo hello", "is no kvpool-exec"),
                                         ("kill -9 $$", "is no kvpool-exec")])
def test_an_executor_that_does_not_behave(gpu_host, installed, words, text):
    put_executor(installed, f"echo $$ >'{installed}.pid'\n{words}")
    found = gpu_host.look(status=1)
    found.is_about("kvpool-exec", "problem", text, "--executor")
    assert found.document["device"] == "host:0" and text in found.document["device_reason"]
    group = int((installed.parent / "kvpool-exec.pid").read_text())
    wait_until(lambda: not members(group), "the end of what it has started")


def test_the_executor_of_the_configuration(host, tmp_path):
    """As kvpoold reads it; the flag goes before the file."""
    file, one, two = tmp_path / "kvpoold.conf", put_executor(tmp_path / "one"), put_executor(tmp_path / "two")
    file.write_text(f'executor = "{one}";\n')
    found = host.look("--config", file)
    found.is_about("configuration", "ok", f"{file} is valid")
    found.is_about("kvpool-exec", "ok", f"({one})")
    host.look("--config", file, "--executor", two).is_about("kvpool-exec", "ok", f"({two})")
    host.look("--executor", two).is_about("kvpool-exec", "ok", f"({two})")
    one.unlink()
    host.look("--config", file, status=1).is_about("kvpool-exec", "problem", f"{one} is not there", "`executor`")
    file.write_text("executer = 1;\n")
    host.look("--config", file, status=1).is_about("configuration", "problem", "executer is no setting of kvpoold",
                                                   f"kvpoold --config {file} --check-config")


# ---- what the quickstart goes by -----------------------------------------------------------------------------------


def choose_device(host, *flags, path=None, visible=None, **settings):
    env = host.environment(FAKE_NVIDIA=" ".join(f"{k}={v}" for k, v in settings.items()))
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run([CHOOSE_DEVICE, path or host.tool.path, "--timeout", "1500", "--root", host.root, *flags],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0 and done.stderr == "", done
    device, reason = done.stdout.splitlines()
    return device, reason


def test_the_device_to_start_with(host, tmp_path):
    executor = put_executor(tmp_path / "executor")
    plain = put_executor(tmp_path / "plain", "echo 'Devices of this build: host:N'")
    assert choose_device(host) == ("host:0", "no GPU on this machine")
    host.put_driver(version="")
    device, reason = choose_device(host, "--executor", executor)
    assert device == "host:0" and "no kernel module" in reason
    (host.root / "proc/driver/nvidia/version").write_text(NVRM)
    assert choose_device(host, "--executor", executor) == ("cuda:0", "Test GPU A")
    assert choose_device(host, "--executor", executor, visible="1") == ("cuda:0", "Test GPU B")
    assert choose_device(host, "--executor", executor, free=7) == ("cuda:0", "Test GPU A")  # better than none
    for settings, words in ((dict(init=802), "CUDA_ERROR_SYSTEM_NOT_READY"), (dict(version=11080), "CUDA 11.8"),
                            (dict(crash=1), "starting CUDA ends the process"), (dict(count=0), "has no GPU"),
                            (dict(hang=1), "starting CUDA does not end")):
        device, reason = choose_device(host, "--executor", executor, **settings)
        assert device == "host:0" and words in reason, settings
    device, reason = choose_device(host, "--executor", plain)
    assert device == "host:0" and "built without the CUDA backend" in reason
    device, reason = choose_device(host, "--executor", tmp_path / "none")
    assert device == "host:0" and "none is not there" in reason
    (host.root / "dev/nvidia-uvm").unlink()
    device, reason = choose_device(host, "--executor", executor)
    assert device == "host:0" and "/dev/nvidia-uvm is not there" in reason


def test_the_device_to_start_with_when_one_gpu_is_bad(gpu_host, tmp_path):
    executor = put_executor(tmp_path / "executor")
    assert choose_device(gpu_host, "--executor", executor, visible="1,0", mode=2) == ("cuda:1", "Test GPU A")
    assert choose_device(gpu_host, "--executor", executor, visible="1,0", major=7) == ("cuda:1", "Test GPU A")
    device, reason = choose_device(gpu_host, "--executor", executor, visible="1", mode=2)
    assert device == "host:0" and "Test GPU B" in reason


def test_the_device_to_start_with_without_a_doctor(host):
    assert choose_device(host, path="/bin/false") == ("host:0", "kvpoolctl doctor says nothing about GPUs")


# ---- files that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
@pytest.mark.parametrize("path", ["proc/driver/nvidia/version", "proc/meminfo"])
def test_what_is_no_file_is_not_read(gpu_host, path, make):
    (gpu_host.root / path).unlink()
    make(gpu_host.root / path)
    gpu_host.look(status=1).is_about("file", "problem", f"{gpu_host.root}/{path} is no regular file", "remove it")


def test_mps_whose_note_of_its_pid_is_a_fifo(gpu_host):
    os.mkfifo(gpu_host.pipes / "nvidia-cuda-mps-control.pid")
    found = gpu_host.look(status=1)
    found.is_about("file", "problem", "nvidia-cuda-mps-control.pid is no regular file")
    found.is_about("MPS", "ok", "its control daemon runs")


# ---- MPS -----------------------------------------------------------------------------------------------------------


def test_no_mps_is_a_warning(host):
    host.put_driver()
    host.look().is_about("MPS", "warning", f"no control daemon at {host.pipes}", "nvidia-cuda-mps-control -d")


def test_mps_where_it_is_by_default(host):
    host.put_driver()
    env = host.environment()
    del env["CUDA_MPS_PIPE_DIRECTORY"]
    text = host.tool.run("doctor", "--root", host.root, env=env).stdout.replace("\n", " ")
    assert "/tmp/nvidia-mps" in text


def test_mps_that_died(host):
    host.put_driver()
    host.put_mps().close()
    host.look().is_about("MPS", "warning", "no control daemon behind it", f"remove {host.pipes}")


def fill_backlog(path):
    """Connects until the next one would wait."""
    made = []
    while True:
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].setblocking(False)
        try:
            made[-1].connect(str(path))
        except BlockingIOError:
            return made


def test_mps_that_is_slow(host):
    """Only a refused connection says that nobody is there."""
    host.put_driver()
    with host.put_mps() as listener:
        listener.listen(0)
        waiting = fill_backlog(host.pipes / "control")
        host.look().is_about("MPS", "ok", "its control daemon runs")
        for connection in waiting:
            connection.close()


def test_mps_of_a_socket_that_is_another_kind(host):
    host.put_driver()
    host.pipes.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(host.pipes / "control"))
        host.look().is_about("MPS", "warning", "can't be reached", "look again")


@needs_root
def test_mps_of_another_user(host, tmp_path):
    host.put_driver()
    host.pipes.mkdir()
    host.pipes.chmod(0o777)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    script = ("import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); "
              "s.listen(); print('there', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", script, str(host.pipes / "control")], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"there\n"
        host.look().is_about("MPS", "warning", "uid 65534's, which serves no other user; kvpoold is uid 0's", "one user")
        other.stdin.close()


def start_control_daemon(host, *arguments):
    """A program of that name and these arguments, with its note of its pid; nobody asks it anything."""
    host.pipes.mkdir()
    control = host.root / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\nread -r line\n")
    control.chmod(0o755)
    process = subprocess.Popen([control, "-d", *arguments], stdin=subprocess.PIPE)
    (host.pipes / "nvidia-cuda-mps-control.pid").write_text(f"{process.pid}\n")
    wait_until(lambda: "nvidia-cuda-mps" in Path(f"/proc/{process.pid}/comm").read_text(), "its name")
    return process


def as_nobody(host, tmp_path):
    """The prefix of a look by uid 65534; needs root."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    for node in (host.root / "dev").glob("nvidia*"):
        node.chmod(0o666)
    host.tool = Tool(host.tool.socket, shutil.copy(program(), tmp_path))
    return ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


@needs_root
@pytest.mark.parametrize("arguments, result, text, advice", [
    ([], "warning", "serves one user at a time: kvpoold is uid 0's, and a worker of uid 65534", "-multiuser-server"),
    (["-multiuser-server"], "ok", "uid 0, for all users", ""),
])
def test_mps_for_workers_of_another_user(host, tmp_path, arguments, result, text, advice):
    host.put_driver()
    with socket.socket(socket.AF_UNIX) as kvpoold, start_control_daemon(host, *arguments) as control:
        kvpoold.bind(host.tool.socket)  # whose owner, root, the daemon would be
        prefix = as_nobody(host, tmp_path)
        host.look(prefix=prefix, libraries=False, status=1).is_about("MPS", result, text, advice)
        host.look().is_about("MPS", "ok", "its control daemon runs")
        control.stdin.close()


# ---- the daemon ----------------------------------------------------------------------------------------------------


def test_no_daemon_is_no_problem(host):
    found = host.look()
    found.is_about("kvpoold", "ok", f"none runs at {host.tool.socket}", "systemctl start kvpoold")
    found.is_about("socket", "ok", host.tool.socket)


def test_no_directory_for_the_socket(host, tmp_path):
    host.tool = Tool(tmp_path / "nowhere" / "a.sock")
    host.look().is_about("socket", "warning", f"{tmp_path}/nowhere", f"mkdir {tmp_path}/nowhere")


def test_a_daemon_that_serves(host, daemon):
    host.tool = Tool(daemon.socket)
    found = host.look()
    found.is_about("kvpoold", "ok", f"0.1.0 answers, pid {daemon.pid}")
    found.is_about("device", "ok", "host:0 serves: host memory")


def test_a_socket_that_was_left_behind(host):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(host.tool.socket)
    host.look().is_about("kvpoold", "warning", "nobody holds its lock", "start kvpoold")


def test_a_path_that_is_taken(host, tmp_path):
    host.tool = Tool(tmp_path / "plain")
    for make, kind in ((lambda: (tmp_path / "plain").write_text(""), "file"), (lambda: os.mkfifo(tmp_path / "plain"), "FIFO")):
        make()
        host.look(status=1).is_about("socket", "problem", f"{tmp_path}/plain is a {kind}, no socket", "move it away")
        (tmp_path / "plain").unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(host.tool.socket)
        host.look(status=1).is_about("socket", "problem", "is a socket of another kind", "another path")


def test_a_path_that_is_too_long(host, tmp_path):
    path = str(tmp_path / "x")
    host.tool = Tool(path + "y" * (108 - len(path)))
    host.look(status=1).is_about("socket", "problem", "has 108 bytes, the path of a unix socket has 107", "shorter")
    host.tool = Tool(path + "y" * (107 - len(path)))
    host.look().is_about("kvpoold", "ok", "none runs at")


def test_a_target_that_is_no_path(host):
    host.tool = Tool("tcp:127.0.0.1:5")
    host.look(status=1).is_about("socket", "problem", "kvpoold listens on a unix socket", "--socket PATH")


def test_somebody_else_listens(host):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(host.tool.socket)
        listener.listen(8)
        host.look(status=1).is_about("socket", "problem", f"another program (pid {os.getpid()}, uid {os.geteuid()}) "
                                     f"listens at {host.tool.socket}", "kvpoold does not start there")


def test_somebody_else_whose_backlog_is_full(host):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(host.tool.socket)
        listener.listen(0)
        waiting = fill_backlog(host.tool.socket)
        host.look(status=1).is_about("socket", "problem", "its backlog is full; no kvpoold holds its lock", "ss -xlp")
        for connection in waiting:
            connection.close()


@needs_root
@pytest.mark.parametrize("mode, advice", [
    (0o700, "its mode lets in its owner alone"),
    (0o710, "join group 4711"),
])
def test_a_directory_that_is_closed_to_this_user(host, start_daemon, tmp_path, mode, advice):
    """What is in it can't be seen: nothing is said of the socket, which everybody might open."""
    daemon = start_daemon("--socket-mode", "0666")
    host.tool = Tool(daemon.socket)
    prefix = as_nobody(host, tmp_path)
    os.chown(daemon.directory, -1, 4711)
    daemon.directory.chmod(mode)
    found = host.look(prefix=prefix, libraries=False, status=1)
    found.is_about("socket", "problem", f"uid {NOBODY} can't see whether {daemon.socket} is there: Permission denied "
                   f"({daemon.directory} is uid 0's, group 4711, mode 0{mode:o})", advice)
    daemon.directory.chmod(0o755)
    host.look(prefix=prefix, libraries=False).is_about("kvpoold", "ok", "answers")


@needs_root
def test_a_directory_above_is_closed_to_this_user(host, tmp_path):
    """The socket's own can't be seen either."""
    prefix = as_nobody(host, tmp_path)
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    host.tool = Tool(tmp_path / "closed" / "inner" / "a.sock", host.tool.path)
    host.look(prefix=prefix, libraries=False, status=1).is_about(
        "socket", "problem", f"({tmp_path}/closed is uid 0's, group 0, mode 0700)", "owner alone")


def test_a_daemon_whose_backlog_is_full(host):
    with socket.socket(socket.AF_UNIX) as listener, open(f"{host.tool.socket}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        listener.bind(host.tool.socket)
        listener.listen(0)
        waiting = fill_backlog(host.tool.socket)
        host.look(status=1).is_about("kvpoold", "problem", f".lock (pid {os.getpid()}), but takes no connection: its "
                                     "backlog is full", "journalctl")
        for connection in waiting:
            connection.close()


def test_a_daemon_that_does_not_answer(host, start_daemon):
    daemon = start_daemon()
    host.tool = Tool(daemon.socket)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        host.look(status=1).is_about("kvpoold", "problem", f".lock (pid {daemon.pid}), but does not answer", "journalctl")
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def changed_version(version=None, protocol=None):
    def change(method, reply):
        if method != "GetServerInfo":
            return reply
        info = pb.ServerInfo.FromString(reply)
        info.version = version or info.version
        info.protocol_version = protocol or info.protocol_version
        return info.SerializeToString()
    return change


def test_other_versions(host, daemon, tmp_path):
    for number, (change, status, result, words) in enumerate([
            (changed_version("0.9.1"), 0, "warning", "is version 0.9.1, this kvpoolctl is 0.1.0"),
            (changed_version(protocol=77), 1, "problem", "protocol version 77")]):
        with Proxy(tmp_path / f"{number}.sock", f"unix:{daemon.socket}", change) as proxy:
            host.tool = Tool(proxy.socket)
            host.look(status=status).is_about("kvpoold", result, words)


def test_devices_of_the_daemon(gpu_host, start_daemon, tmp_path, monkeypatch):
    busy = tmp_path / "busy"
    monkeypatch.setenv("FAKE_EXECUTOR_BUSY", str(busy))
    daemon = start_daemon(devices=("cuda:0",), executor=fake_executor_path())
    client = daemon.client()
    gpu_host.tool = Tool(daemon.socket)
    gpu_host.look().is_about("device", "ok", "cuda:0 serves: a GPU that is none")
    os.kill(client.device("cuda:0").executor_pid, signal.SIGKILL)
    wait_until(lambda: client.device("cuda:0").restarts == 1 and client.device("cuda:0").state == pb.DEVICE_SERVING,
               "the next executor")
    gpu_host.look().is_about("device", "warning", "1 of its executors died", "executor_died")
    busy.write_text("process 4711 has to end\n")
    os.kill(client.device("cuda:0").executor_pid, signal.SIGKILL)
    wait_until(lambda: client.device("cuda:0").state == pb.DEVICE_WAITING, "the wait")
    gpu_host.look(status=1).is_about("device", "problem", "cuda:0 waits before it can serve: process 4711 has to end",
                                     "contents stay")


def test_a_device_that_is_gone(gpu_host, start_daemon, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    monkeypatch.setenv("FAKE_EXECUTOR_REFUSED", str(gone))
    daemon = start_daemon(devices=("cuda:0",), executor=fake_executor_path())
    client = daemon.client()
    gpu_host.tool = Tool(daemon.socket)
    gone.write_text("there is no such GPU\n")
    os.kill(client.device("cuda:0").executor_pid, signal.SIGKILL)
    wait_until(lambda: client.device("cuda:0").state == pb.DEVICE_REFUSED, "the refusal")
    gpu_host.look(status=1).is_about("device", "problem", "cuda:0 can't be served: there is no such GPU", "mend that")


def test_a_gpu_that_is_not_served(gpu_host, daemon):
    gpu_host.tool = Tool(daemon.socket)
    checks = [c for c in gpu_host.look().checks if c["name"] == "device"]
    assert [c["result"] for c in checks] == ["ok", "warning"]
    assert "kvpoold serves none" in checks[1]["text"] and "cuda:0" in checks[1]["advice"]


def test_a_daemon_outside_mps(gpu_host, start_daemon, tmp_path):
    def without_mps(method, reply):
        if method != "GetServerInfo":
            return reply
        info = pb.ServerInfo.FromString(reply)
        info.devices[0].mps = False
        return info.SerializeToString()
    daemon = start_daemon(devices=("cuda:0",), executor=fake_executor_path())
    with Proxy(tmp_path / "p.sock", f"unix:{daemon.socket}", without_mps) as proxy:
        gpu_host.tool = Tool(proxy.socket)
        gpu_host.look().is_about("device", "warning", "outside the MPS", "CUDA_MPS_PIPE_DIRECTORY")


# ---- workers -------------------------------------------------------------------------------------------------------


def namespaces(*flags):
    """The prefix of a look from namespaces of its own, as a container has them."""
    prefix = ["unshare", *flags]
    done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"namespaces can't be made here: {done.stderr.strip()}")
    return prefix


@pytest.fixture
def attach_at(host, daemon, monkeypatch):
    """attach_at(path): where a worker of this environment would attach; the daemon is the module's."""
    host.tool = Tool(daemon.socket)
    return lambda path: monkeypatch.setenv("KVPOOLD_ATTACH_SOCKET", str(path))


def test_a_worker_could_attach(host, start_daemon):
    """And nothing is left of it in the daemon: no session, no attachment."""
    daemon = start_daemon()
    host.tool = Tool(daemon.socket)
    found = host.look()
    found.is_about("identity", "ok", f"kvpoold sees uid {os.geteuid()} as it is here, an operator")
    found.is_about("attach socket", "ok", f"{daemon.attach_socket} answers: a worker of uid {os.geteuid()} can attach")
    found.is_about("namespaces", "ok", "user, pid, ipc, mnt and net are kvpoold's")
    assert "MPS directory" not in [c["name"] for c in found.checks]
    assert not daemon.client().list_sessions()
    assert "attached" not in daemon.log and "session_opened" not in daemon.log


def test_no_attach_socket_here(host, daemon, attach_at, tmp_path):
    attach_at(tmp_path / "none")
    host.look().is_about("attach socket", "warning", f"kvpoold takes workers at {daemon.attach_socket}, but {tmp_path}/none "
                         "is not there", "mount its directory")


def test_an_attach_socket_of_a_daemon_that_ended(host, attach_at, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ended:
        ended.bind(str(tmp_path / "ended"))
    attach_at(tmp_path / "ended")
    host.look(status=1).is_about("attach socket", "problem", f"no kvpoold takes attachments at {tmp_path}/ended: "
                                 "Connection refused", "mount its directory")


def test_an_attach_socket_that_is_another(host, daemon, attach_at):
    attach_at(daemon.socket)
    host.look(status=1).is_about("attach socket", "problem", f"{daemon.socket} is no attach socket",
                                 "$KVPOOLD_ATTACH_SOCKET names the wrong path: it is a socket of another kind")


def test_an_attach_socket_that_does_not_answer(host, attach_at, tmp_path):
    attach_at(tmp_path / "silent")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen(8)
        host.look(status=1).is_about("attach socket", "problem", "doesn't answer for 1500 ms", "journalctl")


@needs_root
def test_an_attach_socket_that_is_closed_to_this_user(host, start_daemon, tmp_path):
    daemon = start_daemon("--socket-mode", "0666")
    daemon.directory.chmod(0o755)
    daemon.attach_socket.chmod(0o660)
    host.tool = Tool(daemon.socket)
    prefix = as_nobody(host, tmp_path)
    found = host.look(prefix=prefix, status=1)
    found.is_about("attach socket", "problem", f"{daemon.attach_socket} may not be opened by this user: Permission denied",
                   "it is uid 0's, group 0, mode 0660")
    found.is_about("identity", "ok", f"kvpoold sees uid {NOBODY} as it is here")
    assert "operator" not in found.get("identity")["text"]
    found.is_about("namespaces", "ok", f"uid {NOBODY} may not look at them", "as root")
    daemon.attach_socket.chmod(0o666)
    host.look(prefix=prefix).is_about("attach socket", "ok", f"a worker of uid {NOBODY} can attach")


def seen_as(**caller):
    def change(method, reply):
        if method != "GetServerInfo":
            return reply
        info = pb.ServerInfo.FromString(reply)
        info.ClearField("caller")
        if caller:
            info.caller.CopyFrom(pb.Caller(**caller))
        return info.SerializeToString()
    return change


@pytest.mark.parametrize("caller, result, text, advice", [
    (dict(uid=NOBODY), "warning", f"as {NOBODY}, which is everybody whom its user namespace doesn't have, and its pid out of "
     "sight", "ipc_uids"),
    (dict(uid=100000, pid=7), "ok", "as 100000, and its pid as another one", "ipc_uids and the socket's group mean 100000"),
    ({}, None, "", ""),
])
def test_who_a_worker_is_to_the_daemon(host, daemon, tmp_path, caller, result, text, advice):
    """The last one is a daemon that doesn't say."""
    if os.geteuid() == NOBODY:
        pytest.skip("this is the overflow uid")
    with Proxy(tmp_path / "p.sock", f"unix:{daemon.socket}", seen_as(**caller)) as proxy:
        host.tool = Tool(proxy.socket)
        found = host.look()
        if result is None:
            assert "identity" not in [c["name"] for c in found.checks]
        else:
            found.is_about("identity", result, f"kvpoold sees uid {os.geteuid()} {text}", advice)


def test_what_the_daemon_says_of_its_caller(daemon):
    client = Client(f"unix:{daemon.socket}")
    caller = client.info().caller
    assert (caller.uid, caller.pid, caller.is_operator) == (os.geteuid(), os.getpid(), True)
    client.close()


def test_a_user_namespace_without_this_user(host, daemon):
    """uid 65534 inside, and what it was to the daemon."""
    host.tool = Tool(daemon.socket)
    host.look(prefix=namespaces("--user")).is_about("identity", "ok", f"sees uid {NOBODY} as {os.geteuid()}, an operator")


@pytest.mark.parametrize("flags, names", [(["--ipc"], "ipc"), (["--net", "--mount"], "mnt, net"),
                                          (["--ipc", "--mount", "--net"], "ipc, mnt, net")])
def test_namespaces_that_are_not_the_daemons(gpu_host, daemon, flags, names):
    """Only what CUDA shares by them is worth a warning, and only where there is a GPU."""
    if os.geteuid() != 0:
        pytest.skip("needs root to look at them")
    prefix = namespaces(*flags)
    gpu_host.tool = Tool(daemon.socket)
    result, advice = ("warning", "--ipc=host") if "ipc" in names else ("ok", "")
    check = gpu_host.look(prefix=prefix).is_about("namespaces", result, f"{names}: others than kvpoold's (pid {daemon.pid})",
                                                  advice)
    assert check["text"].startswith(names)
    shutil.rmtree(gpu_host.root / "dev")
    shutil.rmtree(gpu_host.root / "proc/driver")
    assert gpu_host.look(prefix=prefix).is_about("namespaces", "ok", names)["advice"] == ""


# Of a host's first namespaces: linux/nsfs.h.
FIRST = {"user": "user:[4026531837]", "ipc": "ipc:[4026531839]"}


def own_here():
    """Where this test runs in a container itself."""
    return [kind for kind, link in FIRST.items() if os.readlink(f"/proc/self/ns/{kind}") != link]


def test_a_user_namespace_of_its_own(gpu_host, daemon):
    gpu_host.tool = Tool(daemon.socket)
    prefix = namespaces("--user", "--map-root-user")
    gpu_host.look(prefix=prefix, libraries=False, status=1).is_about(
        "namespaces", "warning", "uid 0 may not look at them; not the host's: user", "--ipc=host")


def test_a_pid_namespace_of_its_own(host, daemon):
    host.tool = Tool(daemon.socket)
    found = host.look(prefix=namespaces("--user", "--map-root-user", "--pid", "--fork", "--kill-child",
                                        "--mount-proc"))
    found.is_about("namespaces", "ok", "kvpoold is out of sight from this pid namespace")
    found.is_about("identity", "ok", "and its pid as another one")
    found.is_about("attach socket", "ok", "can attach")


@needs_root
def test_a_container_with_the_hosts_ipc_namespace(gpu_host, daemon):
    """--ipc=host is what MPS wants of it: nothing to warn of. Without that there is."""
    if own_here():
        pytest.skip(f"this runs in namespaces of its own: {', '.join(own_here())}")
    gpu_host.tool = Tool(daemon.socket)
    prefix = namespaces("--pid", "--fork", "--kill-child", "--mount-proc")
    check = gpu_host.look(prefix=prefix).is_about("namespaces", "ok", "kvpoold is out of sight from this pid namespace")
    assert "not the host's" not in check["text"] and check["advice"] == ""
    gpu_host.look(prefix=[*prefix, "unshare", "--ipc"]).is_about("namespaces", "warning", "; not the host's: ipc",
                                                                "--ipc=host")


def test_a_mounted_directory_that_was_removed(host, tmp_path):
    """What RuntimeDirectory= without RuntimeDirectoryPreserve= does to containers."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    host.tool = Tool(here / "kvpoold.sock")
    prefix = namespaces("--user", "--map-root-user", "--mount")
    script = 'mount --bind "$1" "$2" && rmdir "$1" && shift 2 && exec "$@"'
    found = host.look(prefix=[*prefix, "sh", "-ec", script, "sh", str(there), str(here)], status=1)
    found.is_about("socket", "problem", f"{here} is mounted here, but was removed", "RuntimeDirectoryPreserve")


@pytest.fixture
def mps_daemon(gpu_host, start_daemon, monkeypatch):
    """mps_daemon(pipes): a daemon whose executor is a GPU's, under MPS, and has that directory."""
    def start(pipes):
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
        daemon = start_daemon("--socket-mode", "0666", devices=("cuda:0",), executor=fake_executor_path())
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
        gpu_host.tool = Tool(daemon.socket)
        return daemon
    return start


def test_one_directory_of_mps(gpu_host, mps_daemon, tmp_path):
    mps_daemon(gpu_host.pipes)
    gpu_host.look().is_about("MPS directory", "ok", f"{gpu_host.pipes} is that of cuda:0, too")
    link = tmp_path / "link"
    link.symlink_to(gpu_host.pipes)
    gpu_host.pipes = link
    gpu_host.look().is_about("MPS directory", "ok", f"{link} is that of cuda:0, too")


def test_another_directory_of_mps(gpu_host, mps_daemon, tmp_path):
    (tmp_path / "other").mkdir()
    daemon = mps_daemon(tmp_path / "other")
    pid = daemon.client().device("cuda:0").executor_pid
    gpu_host.look().is_about("MPS directory", "warning", f"cuda:0's executor (pid {pid}) has {tmp_path}/other, a worker of "
                             f"this environment would have {gpu_host.pipes}", "one CUDA_MPS_PIPE_DIRECTORY")


def test_a_directory_of_mps_that_is_hidden(gpu_host, mps_daemon):
    """One name and two directories: what PrivateTmp does, and a container's mounts."""
    if os.geteuid() != 0:
        pytest.skip("needs root to look at the executor's")
    mps_daemon(gpu_host.pipes)
    script = 'mount -t tmpfs none "$1" && shift && exec "$@"'
    prefix = [*namespaces("--mount"), "sh", "-ec", script, "sh", str(gpu_host.pipes)]
    gpu_host.look(prefix=prefix).is_about("MPS directory", "warning", "is another directory of that name", "PrivateTmp")


@needs_root
def test_a_directory_of_mps_that_is_out_of_reach(gpu_host, mps_daemon, tmp_path):
    daemon = mps_daemon(gpu_host.pipes)
    daemon.directory.chmod(0o755)
    pid = daemon.client().device("cuda:0").executor_pid
    gpu_host.look(prefix=as_nobody(gpu_host, tmp_path), libraries=False, status=1).is_about(
        "MPS directory", "ok", f"uid {NOBODY} may not read /proc/{pid}/environ", "as root")


# ---- for people ----------------------------------------------------------------------------------------------------


def test_text_says_what_the_document_says(gpu_host, daemon):
    gpu_host.tool = Tool(daemon.socket)
    found = gpu_host.look(status=1, mode=2)
    env = gpu_host.environment(FAKE_NVIDIA="mode=2")
    done = gpu_host.tool.run("doctor", "--root", gpu_host.root, status=1, env=env)
    text = " ".join(done.stdout.split())
    for check in found.checks:
        if check["name"] not in ("kvpoold", "/dev/shm"):  # they have times and free bytes in them
            assert " ".join(f"{check['result']} {check['name']} {check['text']}".split()) in text
        assert " ".join(check["advice"].split()) in text
    assert done.stdout.splitlines()[-1] == f"1 problem, {len(found.of('warning'))} warning" + \
        ("" if len(found.of("warning")) == 1 else "s")
    narrow = gpu_host.tool.run("doctor", "--root", gpu_host.root, status=1, env={**env, "COLUMNS": "80"}).stdout
    words = [line for line in narrow.splitlines() if max(map(len, line.split() or [""])) < 50]
    assert max(map(len, words)) <= 80, narrow


def test_root_wants_a_folder(host):
    assert "'--root'" in host.tool.refused("doctor", "--root", status=2)[0]
    for path in ("/nonexistent", host.root / "proc/meminfo"):
        assert f"--root {path}: it is no directory" in host.tool.refused("doctor", "--root", path, status=2)[0]
