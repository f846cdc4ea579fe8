"""The daemon as a process: flags, configuration file, socket, signals, what it costs when idle, several devices."""
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from support import reference
from support.catalogue import V41, Geometry
from support.client import Client, Step
from support.daemon import Daemon, executor_path, kvpoold_path
from support.errors import RpcFailure, StepFailure
from support.process import cpu_seconds, is_running, wait_until
from support.stubs import pb
from support.traffic import Lane, random_rows

KV = {"name": "kv", "format": "v41", "num_layers": 1}
POOL = ('{ name = "main"; kind = "paged"; block_size = 64; num_blocks = 100; placements = ["host:0"]; '
        'regions = ( { name = "kv"; format = "v41"; num_layers = 2; compression_ratio = 4; } ); }')


def run(*flags):
    return subprocess.run([kvpoold_path(), *map(str, flags)], capture_output=True, text=True, timeout=60,
                          stdin=subprocess.DEVNULL)


def lane_on(session, client, name, blocks=4, placements=()):
    pool = client.create_pool(name, 64, blocks, [KV], placements=placements)
    made = Lane(session, Geometry(V41, 64, blocks), pool.pool_id, session.allocate(pool.pool_id, blocks))
    made.write(random_rows(np.random.default_rng(9), V41, made.count))
    return made


# -- flags and configuration

def test_version():
    done = run("--version")
    assert done.returncode == 0 and re.search(r"\d+\.\d+\.\d+", done.stdout) and not done.stderr


def test_help_names_every_flag():
    done = run("--help")
    assert done.returncode == 0
    for flag in ("--socket", "--executor", "--device", "--device-memory", "--device-reserve", "--device-threads",
                 "--log-level", "--config", "--pool", "--sessions-max", "--steps-in-flight-max", "--drain-timeout-ms", "--check-config",
                 "--version", "--help"):
        assert flag in done.stdout, flag


@pytest.mark.parametrize("flags", [
    ("--no-such-flag",), ("--sessions-max", "many"), ("--sessions-max", "0"), ("--sessions-max", "70000"),
    ("--device-memory", "5X"), ("--device-memory", "-1"), ("--device-memory", "99999999999999999999"),
    ("--log-level", "loud"), ("--device", ""), ("--socket",), ("--pool", "{ name = "), ("--pool", "{ nam = 3; }"),
    ("--config", "/nonexistent/kvpoold.conf"), ("--drain-timeout-ms", "-5"), ("stray",), ("--socket", "/" + "x" * 300)])
def test_bad_flags(flags):
    done = run("--check-config", *flags)
    assert done.returncode not in (0, None) and done.returncode > 0
    assert done.stderr.strip() and not done.stdout.strip().startswith("Usage")
    named = flags[0] if len(flags) == 1 else flags[0].lstrip("-")
    assert named in done.stderr or flags[-1] in done.stderr, done.stderr


GOOD_CONFIG = """# What the tests start from.
socket = "SOCKET";
sessions_max = 7;
steps_in_flight_max = 9;
pools = (
  POOL,
  { name = "rings"; kind = "ring"; block_size = 4096; num_blocks = 3;
    regions = ( { name = "swa"; format = "bf16"; num_layers = 1; } ); }
);
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "kvpoold.conf"
    path.write_text(GOOD_CONFIG.replace("SOCKET", str(tmp_path / "from-config.sock")).replace("POOL", POOL))
    return path


def test_check_config(config):
    done = run("--check-config", "--config", config)
    assert done.returncode == 0, done.stderr
    assert not Path(config.parent / "from-config.sock").exists()


@pytest.mark.parametrize("old, new", [
    ("sessions_max = 7", "sessions_max = "),
    ("sessions_max = 7", "sessions_max = \"seven\""),
    ("sessions_max = 7", "sessions_max = -7"),
    ("steps_in_flight_max = 9", "steps_in_flight = 9"),
    ("kind = \"ring\"", "kind = \"rink\""),
    ("block_size = 4096", "block_sise = 4096"),
    ("format = \"bf16\"", "format = \"bf17\""),
])
def test_a_bad_config_is_told_by_file_and_line(config, old, new):
    text = config.read_text()
    assert text.count(old) == 1
    line = text[:text.index(old)].count("\n") + 1
    pool_line = line - 1 if "bf16" in old else line  # a region is told by the line of its pool
    config.write_text(text.replace(old, new))
    done = run("--check-config", "--config", config)
    assert done.returncode > 0
    assert f"{config}:{line}:" in done.stderr or f"{config}:{pool_line}:" in done.stderr, done.stderr


def test_pools_from_the_config_file(config, start_daemon):
    daemon = start_daemon("--config", config)
    client = daemon.client()
    pools = {p.spec.name: p for p in client.pools()}
    assert set(pools) == {"main", "rings"}, "a device says it serves before the configured pools are there"
    main = pools["main"]
    assert (main.spec.kind, main.spec.block_size, main.spec.num_blocks) == (pb.POOL_PAGED, 64, 100)
    assert list(main.spec.placements) == ["host:0"]
    assert (main.regions[0].spec.num_layers, main.regions[0].tokens_per_block) == (2, 16)
    assert (pools["rings"].spec.kind, pools["rings"].regions[0].tokens_per_block) == (pb.POOL_RING, 4096)
    limits = client.info().limits
    assert (limits.sessions_max, limits.steps_in_flight_per_session_max) == (7, 9)
    assert not (config.parent / "from-config.sock").exists(), "the flag did not win over the file"


def test_flags_win_over_the_file(config, start_daemon):
    client = start_daemon("--config", config, "--sessions-max", 2).client()
    assert client.info().limits.sessions_max == 2


def test_pools_from_flags(start_daemon):
    client = start_daemon("--pool", POOL, "--pool", POOL.replace('"main"', '"second"')).client()
    assert sorted(p.spec.name for p in client.pools()) == ["main", "second"]


def test_a_configured_pool_that_does_not_fit(start_daemon):
    daemon = start_daemon("--pool", POOL, device_memory="1M", wait=False)
    assert daemon.process.wait(60) > 0
    assert "main" in daemon.log and str(1 << 20) in daemon.log
    assert not daemon.socket.exists()


# -- the socket

def test_the_socket(daemon):
    mode = os.stat(daemon.socket).st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o660
    assert Path(f"{daemon.socket}.lock").exists()


def test_a_second_daemon_on_the_same_socket(daemon, client):
    second = Daemon(directory=daemon.directory, wait=False)
    assert second.process.wait(60) > 0
    assert str(daemon.socket) in second.log and str(daemon.pid) in second.log
    assert client.info().pid == daemon.pid


def test_a_stale_socket_is_replaced(start_daemon, tmp_path):
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "kvpoold.sock"))
    stale.close()
    daemon = start_daemon(directory=tmp_path)
    assert daemon.client().info().pid == daemon.pid


def test_server_info(daemon, client):
    info = client.info()
    assert info.pid == daemon.pid
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", info.version)
    assert abs(info.started_unix_ns / 1e9 - time.time()) < 3600
    device = info.devices[0]
    assert (device.name, device.state, device.restarts) == ("host:0", pb.DEVICE_SERVING, 0)
    assert device.executor_pid in daemon.executor_pids() and "host" in device.description
    assert device.memory_limit_bytes == 2 << 30
    assert (info.limits.message_bytes_max, info.limits.chunk_bytes_max) == (4 << 20, 1 << 20)


# Becomes somebody else after its imports: the tests' own folder need not be open to others.
NOBODY = """
import os
import sys
from support.client import Client, Step
from support.errors import RpcFailure
from support.stubs import pb
os.setgroups([])
os.setgid(int(sys.argv[3]))
os.setuid(65534)
client = Client(sys.argv[1])
region = pb.RegionRef(pool_id=int(sys.argv[2]))
spec = pb.PoolSpec(name="theirs", block_size=16, num_blocks=1,
                   regions=[pb.RegionSpec(name="kv", format="v41", num_layers=1)])
told = []
for call in (lambda: client.call("CreatePool", pb.CreatePoolRequest(spec=spec)),
             lambda: client.delete_pool(region.pool_id, force=True),
             lambda: client.inspect(region, [0]), lambda: client.dump(region, 0, 1)):
    try:
        call()
        told.append("ok")
    except RpcFailure as failure:
        told.append(failure.status)
session = client.open_session("theirs")
block = int(session.allocate(region.pool_id, 1)[0])
told.append(session.load_rows(region, [(block, 0, 1, 0)], 1)[2].rows_loaded)
told.append(client.list_sessions()[-1].peer_uid)
session.close()
print(told)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_operators_rights(daemon, client, pool_name, tmp_path):
    """Another uid of the socket's group may be a client, and nothing more."""
    pool = client.create_pool(pool_name, 16, 2, [KV])
    os.chmod(daemon.directory, 0o755)
    group = os.stat(daemon.socket).st_gid
    done = subprocess.run([sys.executable, "-B", "-c", NOBODY, f"unix:{daemon.socket}", str(pool.pool_id), str(group)],
                          text=True, capture_output=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["permission_denied"] * 4 + [1, 65534])
    assert client.pool(pool.pool_id).free_blocks == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_others_do_not_get_in(daemon):
    os.chmod(daemon.directory, 0o755)
    connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", connect, str(daemon.socket)], user=65534, group=65534,
                          extra_groups=[], capture_output=True, text=True)
    assert "PermissionError" in done.stderr


def test_no_cuda_in_the_supervisor(daemon):
    assert "cuda" not in Path(f"/proc/{daemon.pid}/maps").read_text().lower()


def test_log_lines(daemon):
    lines = [line for line in daemon.log.splitlines() if line.strip()]
    assert lines
    for line in lines:
        assert re.match(r"\S+ (debug|info|warning|error) [a-z_.]+( [a-z_.]+=.*)?$", line), line


# -- the end

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_drains(start_daemon, number):
    daemon = start_daemon("--drain-timeout-ms", 120000)
    client = daemon.client()
    session = client.open_session()
    lane = lane_on(session, client, "drain", 64)
    queue, other_queue = session.open_queue(), session.open_queue()
    small = lane.load_step()
    long = queue.send(lane.long_step(200))
    other_queue.run(small)
    queue.wait_accepted(long)
    daemon.note_processes()
    daemon.process.send_signal(number)
    wait_until(lambda: " draining steps=" in daemon.log or daemon.process.poll() is not None, "draining said in the log")
    still_running = long not in queue.finished and daemon.process.poll() is None
    with pytest.raises((StepFailure, RpcFailure)) as caught:
        other_queue.run(small)
    if still_running:
        assert caught.value.status == "shutting_down"
    with pytest.raises(RpcFailure) as caught:
        client.open_session("late")
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE
    reports = queue.wait(long)
    assert sum(r.rows_stored for r in reports) == 200 * lane.count
    assert session.ended.wait(60)
    closing = [e.closing for e in session.events if e.WhichOneof("event") == "closing"]
    assert len(closing) == 1 and closing[0].status == pb.STATUS_SHUTTING_DOWN
    assert daemon.process.wait(60) == 0
    daemon.stop()


def test_a_drain_has_a_bound(start_daemon):
    daemon = start_daemon("--drain-timeout-ms", 100)
    client = daemon.client()
    session = client.open_session()
    lane = lane_on(session, client, "bound", 128)
    queue = session.open_queue()
    steps = [queue.send(lane.long_step(1000)) for _ in range(20)]
    queue.wait_accepted(steps[0])
    daemon.note_processes()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.wait(60)
    assert any(step_id not in queue.finished or isinstance(queue.finished[step_id], pb.StepFailed) for step_id in steps)
    daemon.stop(expect_status=daemon.process.returncode)


def test_sigint_and_an_idle_end(start_daemon):
    daemon = start_daemon()
    daemon.client().open_session()
    daemon.note_processes()
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(60) == 0
    daemon.stop()


def test_sighup_is_ignored_under_nohup(start_daemon):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the daemon inherits it, as from nohup
    try:
        daemon = start_daemon()
    finally:
        signal.signal(signal.SIGHUP, before)
    daemon.process.send_signal(signal.SIGHUP)
    client = daemon.client()
    lane_on(client.open_session(), client, "after")
    assert " signal " not in daemon.log


def test_sigterm_during_the_start(start_daemon):
    daemon = start_daemon("--pool", POOL, wait=False)
    time.sleep(0.02)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) in (0, -signal.SIGTERM)  # it may not have got as far as its signal handler
    assert not daemon.executor_pids()


def test_an_executor_that_is_not_there(start_daemon, tmp_path):
    daemon = start_daemon("--executor", tmp_path / "nothing", wait=False)
    status = daemon.process.wait(60)
    assert status > 0 and "nothing" in daemon.log


def test_a_device_without_a_backend(start_daemon):
    """The final error says why the executors did not come up."""
    daemon = start_daemon(devices=("cuda:0",), wait=False)
    assert daemon.process.wait(60) > 0
    if "backend for" not in daemon.log:
        pytest.skip("this build has the CUDA backend")
    failed = [line for line in daemon.log.splitlines() if " start_failed " in line]
    assert len(failed) == 1 and "cuda:0" in failed[0] and "no backend for 'cuda:'" in failed[0], daemon.log


def test_an_executor_by_itself_ends():
    """Without a control socket there is nothing to do."""
    done = subprocess.run([executor_path()], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert done.returncode > 0


# -- cost and devices

def test_idle_cpu(start_daemon, record_property):
    daemon = start_daemon()
    session = daemon.client().open_session()
    lane = lane_on(session, session.client, "idle")
    session.open_queue().run(lane.store_and_load_step())
    pids = [daemon.pid, *daemon.executor_pids()]
    time.sleep(1)
    before, start = [cpu_seconds(pid) for pid in pids], time.monotonic()
    time.sleep(4)
    elapsed = time.monotonic() - start
    used = [(cpu_seconds(pid) - b) / elapsed for pid, b in zip(pids, before)]
    text = ", ".join(f"{share:.2%}" for share in used)
    record_property("idle_cpu", text)
    print(f"idle: {text} of a core (supervisor, executor), over {elapsed:.1f} s")
    assert sum(used) < 0.05


def test_several_devices(start_daemon):
    daemon = start_daemon(devices=("host:0", "host:1"), threads=1)
    client = daemon.client()
    session = client.open_session()
    info = client.info()
    assert [d.name for d in info.devices] == ["host:0", "host:1"]
    assert len({d.executor_pid for d in info.devices}) == 2
    pool = client.create_pool("both", 16, 4, [KV], placements=["host:0", "host:1"])
    only = client.create_pool("second", 16, 4, [KV], placements=["host:1"])
    default = client.create_pool("first", 16, 4, [KV])
    assert list(default.spec.placements) == ["host:0"]
    assert client.device("host:0").pool_bytes == pool.bytes_per_placement + default.bytes_per_placement
    assert client.device("host:1").pool_bytes == pool.bytes_per_placement + only.bytes_per_placement
    blocks = session.allocate(pool.pool_id, 4)
    geometry, region, rng = Geometry(V41, 16, 4), pb.RegionRef(pool_id=pool.pool_id), np.random.default_rng(1)
    rows = {}
    for device in ("host:0", "host:1"):  # one block table, bytes of its own on each device
        rows[device] = random_rows(rng, V41, 64)
        session.store_rows(region, rows[device], np.arange(64), placement=device)
    for device in ("host:0", "host:1"):
        loaded, _, _ = session.load_rows(region, [(b, 0, 16, 16 * b) for b in range(4)], 64, placement=device)
        assert loaded.tobytes() == reference.cast_back(V41, rows[device]).tobytes()
        with daemon.region_memory("both", "kv", device) as memory:
            q = reference.quantize(V41, rows[device])
            model = reference.RegionModel(geometry, memory.array[:geometry.region_bytes])
            data, scales = model.records(0, np.arange(64))
            assert data.tobytes() == q.data.tobytes() and scales.tobytes() == q.scales.tobytes()
        dumped = client.dump(region, 0, 4, placement=device)
        assert reference.RegionModel(geometry, dumped).records(0, np.arange(64))[0].tobytes() == q.data.tobytes()
        assert client.inspect(region, [5], placement=device)[0].raw[:512] == q.data[5].tobytes()
    assert len(blocks) == 4

    # The first placement is the default; buffers and pools of another device are refused.
    step_lane = Lane(session, Geometry(V41, 16, 4), only.pool_id, session.allocate(only.pool_id, 4))
    with pytest.raises(RpcFailure) as caught:
        session.run(step_lane.store_step())  # its buffers are on host:0, the pool on host:1
    assert caught.value.status == "wrong_device"
    with pytest.raises(RpcFailure) as caught:
        session.load_rows(pb.RegionRef(pool_id=only.pool_id), [(0, 0, 1, 0)], 1, placement="host:0")
    assert caught.value.status == "wrong_device"
    buffer = session.create_buffer(64 * 1024, "host:1")
    buffer.write(rows["host:0"])
    report = session.run(Step().store(pb.RegionRef(pool_id=only.pool_id), buffer.view(0, 64, 1024), np.arange(64)))[0]
    assert report.rows_stored == 64


def test_many_connections(daemon, client):
    opened = [Client(f"unix:{daemon.socket}") for _ in range(40)]
    threads = [threading.Thread(target=c.info) for c in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for c in opened:
        c.close()
    assert client.info().pid == daemon.pid


def test_nothing_leaks_over_many_sessions(daemon, client, pool_name):
    """File descriptors of the supervisor and its executor are the same after 100 sessions as after the first."""
    pool = client.create_pool(pool_name, 16, 4, [KV])

    def one_session():
        session = client.open_session()
        lane = Lane(session, Geometry(V41, 16, 4), pool.pool_id, session.allocate(pool.pool_id, 4))
        lane.write(random_rows(np.random.default_rng(2), V41, 64))
        queue = session.open_queue()
        queue.run(lane.store_and_load_step())
        queue.finish()
        lane.check_out()
        session.close()
        wait_until(lambda: client.pool(pool.pool_id).free_blocks == 4, "its blocks free")

    def counts():
        return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in (daemon.pid, *daemon.executor_pids())}

    for _ in range(3):
        one_session()
    before = counts()
    for _ in range(100):
        one_session()
    wait_until(lambda: counts() == before, f"descriptors as before ({before})")
    assert all(is_running(pid) for pid in before)
