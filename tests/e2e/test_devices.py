"""Devices as the supervisor sees them: memory by its granularity, what is kept back, and waiting for others.

The executor is tests/unit/fake_executor.c, which says that it is a GPU: 80 GiB, 8 of them in use by others, memory in
multiples of 2 MiB. Where its file of $FAKE_EXECUTOR_BUSY is there, it refuses to start as an executor does under an MPS
server that recovers; where that of $FAKE_EXECUTOR_REFUSED is, as one does without its GPU."""
import os
import re
import signal
from pathlib import Path

import grpc
import pytest

from support.client import Step
from support.daemon import fake_cuda_executor_path, fake_executor_path
from support.errors import RpcFailure
from support.process import wait_until
from support.stubs import pb

GIB, PIECE = 1 << 30, 2 << 20
UUID = "cuda:GPU-2d0f4a51-0a1b-4c5d-8e9f-0123456789ab"
SERVICE = b"kvpool.v1.Kvpool"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


@pytest.fixture
def start_gpu(start_daemon):
    def start(*flags, device="cuda:0", **options):
        options.setdefault("device_memory", "0")
        return start_daemon(*flags, devices=(device,), executor=fake_executor_path(), **options)
    return start


def replace_line(path, text):
    """At no moment half of it is there."""
    beside = path.with_suffix(".new")
    beside.write_text(text + "\n")
    beside.rename(path)


@pytest.fixture
def free(tmp_path, monkeypatch):
    """How many GiB of the GPU are free from now on."""
    path = tmp_path / "free"
    monkeypatch.setenv("FAKE_EXECUTOR_FREE", str(path))

    return lambda text: replace_line(path, text)


def only_failure(daemon):
    """The one sentence that a failed start ends with; nothing of it is left."""
    failures = re.findall(r"error +start_failed .*text=\"(.*)\"", daemon.log)
    assert len(failures) == 1, daemon.log
    assert "executor_died" not in daemon.log and daemon.log.count("executor_started") <= 1
    assert [path.suffix for path in daemon.directory.iterdir()] == [".log"]
    return failures[0]


def refused(call, status):
    with pytest.raises(RpcFailure) as caught:
        call()
    assert caught.value.status == status, caught.value
    return caught.value.refusal.message


# ---- memory --------------------------------------------------------------------------------------------------------


def test_a_uuid_in_either_case(start_gpu):
    client = start_gpu(device=UUID.upper().replace("CUDA:", "cuda:")).client()
    assert client.open_session().create_buffer(5, UUID).bytes == 5
    assert client.device(UUID.upper().replace("CUDA:", "cuda:")).buffer_bytes == PIECE


@pytest.mark.parametrize("device", ["cuda:0", "cuda:7", UUID])
def test_what_a_gpu_says(start_gpu, device):
    told = start_gpu(device=device).client().device(device)
    assert (told.memory_bytes, told.memory_limit_bytes, told.memory_left_bytes) == (80 * GIB, 71 * GIB, 71 * GIB)
    assert (told.memory_others_bytes, told.memory_granularity_bytes) == (8 * GIB, PIECE)
    assert (told.description, told.driver, told.mps) == ("a GPU that is none", "1.2.3, CUDA 4.5", True)
    assert (told.pool_bytes, told.buffer_bytes, told.waiting_for) == (0, 0, "")


def test_what_a_host_says(start_daemon):
    told = start_daemon(devices=("host:0",)).client().device("host:0")
    assert told.driver == "" and not told.mps and told.waiting_for == ""
    assert told.memory_left_bytes == told.memory_limit_bytes - told.pool_bytes - told.buffer_bytes
    assert told.memory_bytes > 0


def test_every_memory_takes_whole_pieces(start_gpu):
    client = start_gpu().client()
    session = client.open_session()
    taken = 0
    for count in (1, PIECE - 1, PIECE, PIECE + 1, 3 * GIB + 1):
        assert session.create_buffer(count, "cuda:0").bytes == count
        taken += -(-count // PIECE) * PIECE
        assert client.device("cuda:0").buffer_bytes == taken
    regions = [dict(name="a", format="v41", num_layers=1), dict(name="b", format="index_fp4", num_layers=3)]
    pool = client.create_pool("p", 64, 100, regions)
    exact = 64 * 100 * 528 + 3 * 64 * 100 * 68  # 3,379,200 and 1,305,600: two pieces and one
    assert pool.bytes_per_placement == exact
    told = client.device("cuda:0")
    assert told.pool_bytes == 3 * PIECE
    assert told.memory_left_bytes == 71 * GIB - taken - 3 * PIECE
    assert client.list_sessions()[0].buffer_bytes == 1 + 3 * PIECE + 3 * GIB + 1
    client.delete_pool(pool.pool_id)
    session.close()
    wait_until(lambda: client.device("cuda:0").memory_left_bytes == 71 * GIB, "all of it left again")


def test_a_refusal_has_all_numbers(start_gpu):
    client = start_gpu(device_memory="5M").client()
    session = client.open_session()
    session.create_buffer(1, "cuda:0")
    session.create_buffer(1, "cuda:0")
    text = refused(lambda: session.create_buffer(7, "cuda:0"), "out_of_memory")
    for number in (7, PIECE, 5 << 20, (5 << 20) - 2 * PIECE, 2 * PIECE):
        assert re.search(rf"\b{number}\b", text), (number, text)
    text = refused(lambda: client.create_pool("p", 2, 1, [dict(name="a", format="bf16", width=8, num_layers=1)]),
                   "out_of_memory")
    assert "pool 'p' asks for 32 bytes" in text and str(PIECE) in text


@pytest.mark.parametrize("reserve, limit", [("0", 72 * GIB), ("3G", 69 * GIB), (str(72 * GIB - 1), 1)])
def test_what_is_kept_back(start_gpu, reserve, limit):
    assert start_gpu("--device-reserve", reserve).client().device("cuda:0").memory_limit_bytes == limit


@pytest.mark.parametrize("reserve", ["72G", "80G", "1T"])
def test_nothing_left_is_no_start(start_gpu, reserve):
    daemon = start_gpu("--device-reserve", reserve, wait=False)
    assert daemon.process.wait(60) == 1
    failed = [line for line in daemon.log.splitlines() if "start_failed" in line]
    count = 1 << 40 if reserve == "1T" else int(reserve[:-1]) * GIB
    assert len(failed) == 1 and "cuda:0" in failed[0], daemon.log
    for number in (count, 80 * GIB, 72 * GIB):
        assert re.search(rf"\b{number}\b", failed[0]), (number, failed[0])


def test_nothing_is_free(start_gpu, free):
    free("1")
    daemon = start_gpu(wait=False)
    assert daemon.process.wait(60) == 1
    assert f"leaves nothing of its {80 * GIB} bytes, of which {GIB} are free" in only_failure(daemon)


def test_memory_that_the_driver_has_not(start_gpu):
    """What the ledger has left and the device hasn't: the refusal has the numbers of both."""
    client = start_gpu(device="cuda:5").client()
    session = client.open_session()
    session.create_buffer(GIB, "cuda:5")
    text = refused(lambda: session.create_buffer(2 * GIB, "cuda:5"), "out_of_memory")
    for number in (2 * GIB, 71 * GIB, 3 * GIB, 8 * GIB, 68 * GIB):
        assert re.search(rf"\b{number}\b", text), (number, text)
    text = refused(lambda: client.create_pool("p", 64, 40000, [dict(name="a", format="v41", num_layers=1)]),
                   "out_of_memory")
    taken = -(-64 * 40000 * 528 // PIECE) * PIECE
    for number in (64 * 40000 * 528, taken, GIB, 8 * GIB, 70 * GIB - taken):
        assert re.search(rf"\b{number}\b", text), (number, text)
    assert client.device("cuda:5").memory_left_bytes == 70 * GIB


def test_what_is_kept_back_of_a_host(start_daemon):
    def limit(*flags):
        daemon = start_daemon(*flags, devices=("host:0",), device_memory="0")
        told = daemon.client().device("host:0")
        daemon.stop()
        return told.memory_limit_bytes, told.memory_bytes
    everything, there = limit("--device-reserve", "0")
    assert everything == there
    assert limit("--device-reserve", "100M") == (there - (100 << 20), there)
    # The rule for hosts: a tenth, but at least 1 GiB or, of a small one, a quarter.
    assert limit() == (there - max(there // 10, min(there // 4, GIB)), there)


def test_others_come_and_go(start_gpu, free):
    """What they use is looked at while the executor serves; what is ours is not theirs."""
    client = start_gpu().client()
    session = client.open_session()

    def others(gib):
        wait_until(lambda: client.device("cuda:0").memory_others_bytes == gib * GIB, f"{gib} GiB of others")
    assert client.device("cuda:0").memory_others_bytes == 8 * GIB
    free("60")
    others(20)
    mine = session.create_buffer(5 * GIB, "cuda:0")
    free("70")
    others(10)  # 15 are in use, of which five are ours
    mine.release()
    free("0")  # a driver that can't say changes nothing
    free("75")
    others(5)
    told = client.device("cuda:0")
    assert (told.memory_limit_bytes, told.restarts) == (71 * GIB, 0)


def test_ours_is_not_others(start_gpu):
    """The memory of pools and buffers outlives an executor: the next one finds it in use, and it is ours."""
    client = start_gpu().client()
    session = client.open_session()
    session.create_buffer(GIB, "cuda:0")
    os.kill(client.device("cuda:0").executor_pid, signal.SIGKILL)
    wait_until(lambda: client.device("cuda:0").restarts == 1 and client.device("cuda:0").state == pb.DEVICE_SERVING,
               "the next executor")
    assert client.device("cuda:0").memory_others_bytes == 7 * GIB  # of 8 that it finds in use


# ---- waiting for others --------------------------------------------------------------------------------------------


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """The file whose first line executors refuse to start with, as long as it is there."""
    path = tmp_path / "busy"
    monkeypatch.setenv("FAKE_EXECUTOR_BUSY", str(path))

    def write(text):
        replace_line(path, text)
    write.path = path
    return write


def waiting_for(client, text):
    def waits():
        told = client.device("cuda:0")
        return told.state == pb.DEVICE_WAITING and told.waiting_for == text
    wait_until(waits, f"waiting for: {text}")


def health(daemon, service):
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        request = b"\x0a" + bytes([len(service)]) + service if service else b""
        return channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=60)


def test_a_start_that_has_to_wait(start_gpu, busy):
    busy("processes 17 and 18 have to end")
    daemon = start_gpu("--pool", '{ name = "main"; block_size = 64; num_blocks = 10; regions = '
                       '( { name = "kv"; format = "v41"; num_layers = 1; } ); }', wait=False)
    wait_until(daemon.socket.exists, "the socket")
    client = daemon.client()
    waiting_for(client, "processes 17 and 18 have to end")
    session = client.open_session()
    text = refused(lambda: session.create_buffer(1, "cuda:0"), "busy")
    assert "cuda:0" in text and "processes 17 and 18 have to end" in text
    assert health(daemon, SERVICE) == NOT_SERVING
    assert health(daemon, b"") == SERVING
    busy("process 18 has to end")
    waiting_for(client, "process 18 has to end")
    assert client.device("cuda:0").restarts == 0
    busy.path.unlink()
    daemon.wait_serving()
    told = client.device("cuda:0")
    assert (told.restarts, told.waiting_for) == (0, "")
    assert [p.spec.name for p in client.pools()] == ["main"]
    assert health(daemon, SERVICE) == SERVING
    # A line for each of the two texts, whatever the number of attempts, and one for the end.
    assert re.findall(r"(\w+) device_waiting .*text=\"(.*)\"", daemon.log) == [
        ("warning", "processes 17 and 18 have to end"), ("warning", "process 18 has to end")]
    assert len(re.findall(r"info +device_waited device=cuda:0 .*end=ready", daemon.log)) == 1
    assert "executor_died" not in daemon.log


def test_a_device_that_has_to_wait_later(start_gpu, busy):
    daemon = start_gpu()
    client = daemon.client()
    session = client.open_session()
    pool = client.create_pool("p", 64, 4, [dict(name="a", format="bf16", width=8, num_layers=1)])
    session.allocate(pool.pool_id, 4)
    step = Step()
    step.store(pb.RegionRef(pool_id=pool.pool_id, region=0, layer=0),
               session.create_buffer(64, "cuda:0").view(0, 4, 16), [0, 1, 2, 3])
    events = len(session.events)
    busy("process 5 has to end")
    os.kill(client.device("cuda:0").executor_pid, signal.SIGKILL)
    waiting_for(client, "process 5 has to end")
    text = refused(lambda: session.create_buffer(1, "cuda:0"), "device_lost")
    assert "process 5 has to end" in text
    # A step waits with its device, but not without a bound.
    text = refused(lambda: session.run(step), "device_lost")
    assert "process 5 has to end" in text
    assert client.device("cuda:0").steps_in_flight == 0
    busy.path.unlink()
    wait_until(lambda: client.device("cuda:0").state == pb.DEVICE_SERVING, "serving again")
    assert client.device("cuda:0").restarts == 1
    assert session.wait_event("device_lost", events).device == "cuda:0"
    assert session.wait_event("device_restored", events) == "cuda:0"
    assert client.pool(pool.pool_id).leased_blocks == 4


def test_a_daemon_stops_while_its_device_waits(start_gpu, busy):
    busy("somebody has to end")
    daemon = start_gpu(wait=False)
    wait_until(daemon.socket.exists, "the socket")
    client = daemon.client()
    waiting_for(client, "somebody has to end")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0
    assert re.search(r"device_waited device=cuda:0 .*end=stopped", daemon.log)


# ---- refused for good ----------------------------------------------------------------------------------------------


def test_a_device_that_is_refused_ends_the_start(start_daemon):
    """Being busy is waited for; what would be refused the same way again is the end, in the executor's words."""
    daemon = start_daemon(wait=False, devices=("cuda:42",))
    assert daemon.process.wait(60) == 2
    assert "cuda:42" in only_failure(daemon)


def test_threads_that_no_executor_makes(start_daemon):
    daemon = start_daemon(wait=False, devices=("host:0",), threads=1000)
    assert daemon.process.wait(60) == 2
    assert "1000 threads, at most 256 are allowed" in only_failure(daemon)


def test_an_executor_that_dies_is_tried_again(start_daemon, tmp_path):
    script = tmp_path / "dies"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    daemon = start_daemon(wait=False, executor=script)
    assert daemon.process.wait(60) == 1
    assert daemon.log.count("executor_died") == 5 and "5 executors of device" in daemon.log
    assert not Path(f"{daemon.socket}.lock").exists()


@pytest.fixture
def start_fake_cuda(start_daemon, monkeypatch):
    """start(errors): kvpool-exec on a CUDA in host memory, whose calls fail as `errors` says."""
    executor = fake_cuda_executor_path()
    if not executor.exists():
        pytest.skip("this build has no CUDA")

    def start(errors, *flags):
        monkeypatch.setenv("FAKE_CUDA_ERROR", errors)
        return start_daemon(*flags, wait=False, devices=("cuda:0",), executor=executor)
    return start


@pytest.mark.parametrize("errors, status, words", [
    ("cudaGetDeviceCount:3", "unimplemented", "does not get what it needs"),
    ("cudaFree:304", "unimplemented", "does not get what it needs"),
    ("cudaSetDevice:800", "permission_denied", "may not use the GPU"),
])
def test_trouble_with_the_host_ends_the_start(start_fake_cuda, errors, status, words):
    daemon = start_fake_cuda(errors)
    assert daemon.process.wait(60) == 2
    assert words in only_failure(daemon) and f"status={status} " in daemon.log
    assert "cuda_bug" not in daemon.log and "please report" not in daemon.log


def test_a_start_without_memory_says_so(start_fake_cuda):
    """Tried again, as there may be some; the failure has the refusal's status, not that of a death."""
    daemon = start_fake_cuda("cudaHostAlloc:2")
    assert daemon.process.wait(60) == 1
    failed = [line for line in daemon.log.splitlines() if "start_failed" in line]
    assert len(failed) == 1 and "status=out_of_memory " in failed[0] and "5 executors" in failed[0], daemon.log
    assert "bytes are free" in failed[0]


def test_a_system_that_is_not_initialized_yet_is_waited_for(start_fake_cuda):
    daemon = start_fake_cuda("cudaGetDeviceCount:802")
    wait_until(lambda: daemon.log.count("device_waiting") == 1 and daemon.process.poll() is None, "waiting")
    assert "nvidia-fabricmanager" in daemon.log and "executor_died" not in daemon.log


def test_a_device_that_is_refused_later(start_gpu, tmp_path, monkeypatch):
    """The GPU has gone: that is told as it is, counts as no death, and is over when the GPU comes back."""
    gone = tmp_path / "gone"
    monkeypatch.setenv("FAKE_EXECUTOR_REFUSED", str(gone))
    daemon = start_gpu()
    client = daemon.client()
    session = client.open_session()
    pool = client.create_pool("p", 64, 4, [dict(name="a", format="bf16", width=8, num_layers=1)])
    session.allocate(pool.pool_id, 4)
    step = Step()
    step.store(pb.RegionRef(pool_id=pool.pool_id, region=0, layer=0),
               session.create_buffer(64, "cuda:0").view(0, 4, 16), [0, 1, 2, 3])
    gone.write_text("device 'cuda:0': there is no such GPU\n")
    os.kill(client.device("cuda:0").executor_pid, signal.SIGKILL)
    wait_until(lambda: client.device("cuda:0").state == pb.DEVICE_REFUSED, "the refusal")
    told = client.device("cuda:0")
    assert (told.waiting_for, told.restarts) == ("device 'cuda:0': there is no such GPU", 1)
    for call in (lambda: session.create_buffer(1, "cuda:0"), lambda: session.run(step)):
        assert "can't be served; its executor says: device 'cuda:0': there is no such GPU" in refused(call, "device_lost")
    assert health(daemon, SERVICE) == NOT_SERVING
    gone.unlink()
    wait_until(lambda: client.device("cuda:0").state == pb.DEVICE_SERVING, "serving again")
    assert (client.device("cuda:0").restarts, client.device("cuda:0").waiting_for) == (1, "")
    assert client.pool(pool.pool_id).leased_blocks == 4
    assert len(re.findall(r"error +device_refused device=cuda:0 ", daemon.log)) == 1


def test_a_pool_that_costs_every_executor_its_life(start_fake_cuda):
    """Each one is ready, and dies of the pool that the configuration wants: the start ends, too."""
    pool = '{ name = "p"; block_size = 64; num_blocks = 100; ' \
           'regions = ( { name = "kv"; format = "v41"; num_layers = 2; } ); }'
    daemon = start_fake_cuda("cudaMemsetAsync:700", "--device-reserve", "0", "--pool", pool)
    assert daemon.process.wait(60) == 1
    assert daemon.log.count("executor_died") == 5
    failed = [line for line in daemon.log.splitlines() if "start_failed" in line]
    assert len(failed) == 1 and "died before the daemon served" in failed[0], daemon.log
