"""kvpoolctl against real daemons: what it prints, what it returns, what it leaves behind."""
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from support import catalogue, golden, reference
from support.daemon import fake_executor_path
from support.device import DEVICE
from support.libkvpool import kvpool
from support.process import wait_until
from support.proxy import Proxy
from support.stubs import pb
from support.tool import SECONDS_MAX, Tool, environment, program

COMPLETION = Path(__file__).resolve().parents[2] / "client" / "kvpoolctl" / "completion" / "kvpoolctl.bash"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
COMMANDS = ["info", "pools", "pool create", "pool describe", "pool delete", "sessions", "blocks", "put", "get", "dump",
            "plan range", "plan slots", "plan new", "plan compressed", "plan visible", "plan swa", "plan store",
            "plan pivots", "plan decode", "plan mirror", "walkthrough", "doctor", "version"]


@pytest.fixture
def tool(daemon):
    made = Tool(daemon.socket)
    yield made
    made.close()


REGIONS = [dict(name="kv", format="v41", num_layers=2, compression_ratio=4),
           dict(name="fp4", format="v41_fp4", num_layers=1),
           dict(name="index", format="index_mxfp8", num_layers=1, compression_ratio=4),
           dict(name="plain", format="bf16", num_layers=1, width=64)]


@pytest.fixture
def pool(client, pool_name):
    made = client.create_pool(pool_name, 64, 40, REGIONS)
    yield made
    client.delete_pool(made.pool_id, force=True)


def region_ref(pool, region, layer=0):
    index = [r.spec.name for r in pool.regions].index(region)
    return pb.RegionRef(pool_id=pool.pool_id, region=index, layer=layer)


def held(client, pool):
    return [i for i, (state, _, _) in enumerate(client.block_states(pool.pool_id)) if state != pb.BLOCK_FREE]


def no_sessions(client):
    return not client.list_sessions()


def random_rows(rows, width, seed=1):
    return (np.random.default_rng(seed).standard_normal((rows, width)) * 3).astype(np.float32)


def numbers(values):
    return np.array([float(v) for v in values], np.float32)


# ---- command line --------------------------------------------------------------------------------------------------


def test_help_lists_every_command_and_each_has_help_with_examples(tool):
    text = tool.run("--help").stdout
    assert re.findall(r"^  ([a-z]+(?: [a-z]+)?)  ", text, re.M) == COMMANDS
    for command in COMMANDS:
        one = tool.run(*command.split(), "--help").stdout
        assert one.startswith(f"Usage: kvpoolctl {command}")
        assert "--json" in one and "--timeout" in one
        if command != "version":
            assert f"  kvpoolctl {command}" in one.split("Examples:")[1]


def test_examples_of_help_can_be_copied(tool):
    """A line goes on in the next only where a shell reads on: argp breaks what is longer than it likes."""
    for command in COMMANDS:
        text = tool.run(*command.split(), "--help").stdout.partition("Examples:\n")[2]
        for line in text.replace("\\\n      ", "").splitlines():
            assert re.match(r"  (sudo -u kvpoold )?kvpoolctl \w", line), f"{command}: {line!r}"


@pytest.mark.parametrize("arguments, words", [
    ([], "which command"),
    (["frobnicate"], "no command 'frobnicate'"),
    (["pool"], "'pool' wants one of: create, describe, delete"),
    (["--frob", "info"], "option '--frob'"),
    (["info", "--frob"], "option '--frob'"),
    (["info", "extra"], "unexpected argument 'extra'"),
    (["info", "--timeout"], "option '--timeout'"),
    (["--timeout", "0", "info"], "--timeout 0"),
    (["info", "--timeout", "-3"], "--timeout -3"),
    (["blocks"], "which pool"),
    (["blocks", "p", "--rows", "x"], "--rows x"),
    (["pool", "create", "p", "--block-size", "64", "--blocks", "1"], "at least one --region"),
    (["pool", "create", "p", "--region", "name=a"], "format=FORMAT"),
    (["pool", "create", "p", "--region", "name=a,colour=red"], "'colour"),
    (["pool", "create", "p", "--region", "name=a,format=v41,layers=two"], "layers=two"),
    (["pool", "create", "p", "--kind", "round"], "--kind round"),
    (["pool", "create", "p", "--namespace", ""], "--namespace: its value is empty"),
    (["put", "p/kv"], "FILE"),
    (["get", "p/kv", "f"], "which records"),
    (["get", "p/kv", "f", "--slots", "3-1"], "--slots 3-1"),
    (["get", "p/kv", "f", "--slots", "0-9999999999"], "--slots"),
    (["get", "p/kv", "f", "--as", "int8", "--slots", "1"], "--as int8"),
    (["get", "p/kv", "f", "--as", "memory", "--slots", "1"], "whole blocks"),
    (["dump", "p/kv"], "SLOT"),
    (["dump", "p/kv", "-1"], "option '-1'"),
    (["dump", "p/kv", "0-2000"], "2001 slots"),
    (["plan", "range", "--tokens", "0-4"], "--per-block"),
    (["plan", "compressed", "--sequence", "10"], "--sequence"),
])
def test_wrong_command_line(tool, arguments, words):
    text, hint = tool.refused(*arguments, status=2)
    assert words in text
    assert "--help" in hint


def test_options_stand_before_or_behind_the_command(tool):
    assert json.loads(tool.run("--json", "pools").stdout) == json.loads(tool.run("pools", "--json").stdout)


def test_nobody_listens(tmp_path):
    socket = tmp_path / "none.sock"
    text, hint = Tool(socket).refused("info", status=3)
    assert str(socket) in text
    assert "systemctl start kvpoold" in hint and f"--socket {socket}" in hint
    document = json.loads(Tool(socket).run("--json", "pools", status=3).stdout)
    assert document["error"]["status"] == "disconnected"
    assert Tool(socket).json("version") == {"kvpoolctl": "0.1.0"}


def test_socket_from_environment(daemon, tool):
    done = subprocess.run([program(), "info", "--json"], capture_output=True, text=True, check=True,
                          env=environment(KVPOOLD_SOCKET=f"unix:{daemon.socket}"), timeout=SECONDS_MAX)
    assert json.loads(done.stdout)["pid"] == daemon.pid
    assert tool.json("version")["kvpoold"] == "0.1.0"


def test_full_disk_is_an_error(tool):
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run(tool.command("info"), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
                              env=environment(), timeout=SECONDS_MAX)
    assert done.returncode == 1 and "standard output" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_other_users(start_daemon):
    daemon = start_daemon("--socket-mode", "0660")
    os.chmod(daemon.directory, 0o755)
    # A copy where others may run it; the build's own folder need not be open to them.
    tool = Tool(daemon.socket, shutil.copy(program(), daemon.directory))
    _, hint = tool.refused("info", status=3, user=65534, group=65534, extra_groups=[])
    assert "uid 65534" in hint and "0660" in hint
    os.chmod(daemon.socket, 0o666)
    tool.run("info", user=65534, group=65534, extra_groups=[])
    _, hint = tool.refused("walkthrough", user=65534, group=65534, extra_groups=[])
    assert "uid 65534" in hint and "daemon's uid 0" in hint


# ---- info, pools, sessions -----------------------------------------------------------------------------------------


def check_device(document, device):
    assert set(document) == {f.name for f in pb.Device.DESCRIPTOR.fields}
    for name, value in document.items():  # what others use is looked at again and again
        assert name in ("state", "memory_others_bytes") or value == getattr(device, name), name


def test_info_says_what_the_daemon_says(client, tool):
    info = client.info()
    document = tool.json("info")
    assert document["version"] == info.version and document["pid"] == info.pid
    assert document["protocol_version"] == info.protocol_version
    assert len(document["devices"]) == len(info.devices) == 1
    check_device(document["devices"][0], info.devices[0])
    assert document["devices"][0]["state"] == "serving"
    for told, known in zip(document["formats"], info.formats, strict=True):
        for name, value in told.items():
            assert value == getattr(known, name), name
    text = tool.run("info").stdout
    assert re.search(r"^host:0 +serving ", text, re.M)
    for row in info.formats:
        assert re.search(rf"^{row.name} .* {row.bytes_per_token} B ", text, re.M)


def test_info_of_gpus(start_daemon, tmp_path, monkeypatch):
    busy = tmp_path / "busy"
    monkeypatch.setenv("FAKE_EXECUTOR_BUSY", str(busy))
    by_uuid = "cuda:GPU-2d0f4a51-0a1b-4c5d-8e9f-0123456789ab"
    daemon = start_daemon(devices=("cuda:0", by_uuid), executor=fake_executor_path(), device_memory="0")
    client, tool = daemon.client(), Tool(daemon.socket)
    client.create_pool("p", 64, 4, [dict(name="kv", format="v41", num_layers=1)])  # 135,168 bytes: one piece of 2 MiB
    text = tool.run("info").stdout
    assert re.search(r"^cuda:0 +serving .* MPS +a GPU that is none; driver 1\.2\.3, CUDA 4\.5$", text, re.M)
    assert re.search(r"^cuda:0 +0\.0 % +\S+ +71\.0 GiB +2\.0 MiB +0 B +0 B +71\.0 GiB +8\.0 GiB +80\.0 GiB$", text, re.M)
    assert re.search(r"^cuda:GPU-2d0f4a51\.\.\. +serving ", text, re.M)
    busy.write_text("processes 17 and 18 have to end\n")
    os.kill(client.device(by_uuid).executor_pid, signal.SIGKILL)
    wait_until(lambda: client.device(by_uuid).state == pb.DEVICE_WAITING, "the wait")
    text = tool.run("info").stdout
    assert re.search(r"^cuda:GPU-2d0f4a51\.\.\. +waiting ", text, re.M)
    assert f"\n{by_uuid} waits: processes 17 and 18 have to end\n" in text
    document = tool.json("info")["devices"]
    assert [d["state"] for d in document] == ["serving", "waiting"]
    for told, device in zip(document, client.info().devices, strict=True):
        check_device(told, device)
    assert all(abs(d["memory_others_bytes"] - (8 << 30)) <= 2 << 20 for d in document)
    narrow = tool.on_terminal("info", NO_COLOR="1")
    assert max(len(line) for line in narrow.splitlines() if " waits: " not in line) <= 80, narrow
    text, hint = tool.refused("pool", "create", "q", "--block-size", 64, "--blocks", 4, "--placement", by_uuid,
                              "--region", "name=a,format=v41")
    assert "processes 17 and 18 have to end" in text and "kvpoolctl info" in hint
    text, hint = tool.refused("pool", "create", "q", "--block-size", 64, "--blocks", 4000000, "--placement", "cuda:0",
                              "--region", "name=a,format=v41")
    assert "71.0 GiB" in text or str(71 << 30) in text


def test_info_of_a_gpu_that_is_gone(start_daemon, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    monkeypatch.setenv("FAKE_EXECUTOR_REFUSED", str(gone))
    daemon = start_daemon(devices=("cuda:0",), executor=fake_executor_path(), device_memory="0")
    client, tool = daemon.client(), Tool(daemon.socket)
    gone.write_text("there is no such GPU\n")
    os.kill(client.device("cuda:0").executor_pid, signal.SIGKILL)
    wait_until(lambda: tool.json("info")["devices"][0]["state"] == "refused", "the refusal")
    text = tool.run("info").stdout
    assert re.search(r"^cuda:0 +refused ", text, re.M) and "\ncuda:0 can't be served: there is no such GPU\n" in text


def check_pool(document, pool):
    assert document["name"] == pool.spec.name and document["pool_id"] == pool.pool_id
    assert document["namespace"] == pool.spec.namespace
    assert document["kind"] == ("ring" if pool.spec.kind == pb.POOL_RING else "paged")
    for name in ("block_size", "num_blocks"):
        assert document[name] == getattr(pool.spec, name)
    for name in ("free_blocks", "leased_blocks", "quarantined_blocks", "bytes_per_placement"):
        assert document[name] == getattr(pool, name)
    for told, region in zip(document["regions"], pool.regions, strict=True):
        for name, value in told.items():
            assert value == getattr(region if hasattr(region, name) else region.spec, name), name


def test_pools(client, tool, pool, session):
    session.allocate(pool.pool_id, 7)
    found = next(p for p in tool.json("pools")["pools"] if p["name"] == pool.spec.name)
    check_pool(found, client.pool(pool.pool_id))
    assert found["leased_blocks"] == 7
    check_pool(tool.json("pool", "describe", pool.spec.name), client.pool(pool.pool_id))
    row = re.search(rf"^{pool.spec.name} .*$", tool.run("pools").stdout, re.M).group()
    assert row.split()[1] == "-"
    assert re.search(r"paged +40 +17\.5 % +\S+ +33 +7 +0 +64 +4 ", row)
    assert pool.spec.name in tool.run("pools", "--names").stdout.split()
    regions = tool.run("pools", "--names", "--regions").stdout.split()
    assert [f"{pool.spec.name}/{r['name']}" for r in REGIONS] == \
        [r for r in regions if r.startswith(f"{pool.spec.name}/")]


def test_pool_create_and_delete(client, tool, pool_name):
    document = tool.json("pool", "create", pool_name, "--kind", "ring", "--block-size", 128, "--blocks", 10,
                         "--placement", "host:0", "--region", "name=a,format=v41_fp4,layers=3,note=a note",
                         "--region", "name=b,format=bf16,width=64,ratio=2")
    made = next(p for p in client.pools() if p.spec.name == pool_name)
    check_pool(document, made)
    assert made.spec.kind == pb.POOL_RING and list(made.spec.placements) == ["host:0"]
    assert [(r.spec.format, r.spec.num_layers, r.tokens_per_block, r.spec.note) for r in made.regions] == \
        [("v41_fp4", 3, 128, "a note"), ("bf16", 1, 64, "")]
    text, hint = tool.refused("pool", "create", pool_name, "--block-size", 1, "--blocks", 1, "--region",
                              "name=a,format=v41")
    assert pool_name in text and "another name" in hint
    assert tool.json("pool", "delete", pool_name) == {"deleted": pool_name}
    assert pool_name not in [p.spec.name for p in client.pools()]


def test_a_pool_of_a_namespace(client, tool, pool_name, tmp_path):
    """Shown wherever a pool is; put is a session of it."""
    document = tool.json("pool", "create", pool_name, "--block-size", 16, "--blocks", 2, "--namespace", "tenant-a",
                         "--region", "name=kv,format=v41")
    made = next(p for p in client.pools() if p.spec.name == pool_name)
    check_pool(document, made)
    assert made.spec.namespace == "tenant-a"
    assert ", of namespace tenant-a\n" in tool.run("pool", "describe", pool_name).stdout
    row = re.search(rf"^{pool_name} .*$", tool.run("pools").stdout, re.M).group()
    assert row.split()[1:3] == ["tenant-a", "paged"]
    np.save(tmp_path / "rows.npy", random_rows(3, 512))
    process, put = put_held(tool, f"{pool_name}/kv", tmp_path / "rows.npy")
    assert next(s for s in client.list_sessions() if s.session_id == put["session_id"]).namespace == "tenant-a"
    end_held(process)
    text, hint = tool.refused("put", f"{pool_name}/kv", tmp_path / "rows.npy", "--namespace", "tenant-b")
    assert "'tenant-a'" in text and "'tenant-b'" in text and "--namespace" in hint
    client.delete_pool(made.pool_id)


def test_pool_create_refusals(tool):
    text, hint = tool.refused("pool", "create", "x", "--block-size", 64, "--blocks", 10, "--region",
                              "name=a,format=v42")
    assert "v42" in text and "kvpoolctl info" in hint
    text, hint = tool.refused("pool", "create", "x", "--block-size", 64, "--blocks", 1000000, "--region",
                              "name=a,format=v41")
    assert "device_memory" in hint
    _, hint = tool.refused("pool", "create", "x", "--block-size", 64, "--blocks", 1, "--placement", "host:9",
                           "--region", "name=a,format=v41")
    assert "kvpoolctl info" in hint


def test_pool_delete_while_leased(client, tool, pool_name):
    made = client.create_pool(pool_name, 64, 4, REGIONS)
    session = client.open_session()
    session.allocate(made.pool_id, 2)
    _, hint = tool.refused("pool", "delete", pool_name)
    assert "--force" in hint
    document = json.loads(tool.run("--json", "pool", "delete", pool_name, status=1).stdout)
    assert document["error"]["status"] == "in_use"
    tool.run("pool", "delete", pool_name, "--force")
    assert pool_name not in [p.spec.name for p in client.pools()]
    session.close()


def test_unknown_pool_lists_the_known(tool, pool):
    for arguments in (["blocks", "nope"], ["pool", "describe", "nope"], ["dump", "nope/kv", "1"]):
        text, hint = tool.refused(*arguments)
        assert "nope" in text and pool.spec.name in hint.replace(",", "").split()


def test_targets(tool, pool):
    name = pool.spec.name
    _, hint = tool.refused("dump", name, "1")
    assert "kv (2 layers)" in hint and "plain (1 layer)" in hint
    assert "no region 'none'" in tool.refused("dump", f"{name}/none", "1")[0]
    assert "layers 0 to 1, not 2" in tool.refused("dump", f"{name}/kv:2", "1")[0]


def test_region_names_with_colons(client, tool, pool_name):
    made = client.create_pool(pool_name, 16, 2, [dict(name="kv", format="v41", num_layers=3),
                                                 dict(name="kv:1", format="bf16", num_layers=2)])
    assert tool.json("dump", f"{pool_name}/kv:2", "0")["layer"] == 2
    both = tool.json("dump", f"{pool_name}/kv:1", "0")
    assert both["region"] == "kv:1" and both["layer"] == 0
    assert tool.json("dump", f"{pool_name}/kv:1:1", "0")["layer"] == 1
    client.delete_pool(made.pool_id)


def test_sessions(client, tool, pool):
    session = client.open_session("scheduler-7", namespace="tenant")
    session.allocate(pool.pool_id, 5)
    session.create_buffer(4096)
    found = next(s for s in tool.json("sessions")["sessions"] if s["session_id"] == session.id)
    info = next(s for s in client.list_sessions() if s.session_id == session.id)
    for name, value in found.items():
        assert value == (list if name == "attachments" else lambda x: x)(getattr(info, name)), name
    assert found["blocks"] == 5 and found["namespace"] == "tenant" and found["peer_pid"] == os.getpid()
    row = re.search(rf"^ *{session.id} .*$", tool.run("sessions").stdout, re.M).group().split()
    assert row[1:5] == ["scheduler-7", "tenant", str(os.getpid()), str(os.geteuid())]
    session.close()


# ---- blocks --------------------------------------------------------------------------------------------------------


def map_cells(text):
    """The characters of the map, and the number in front of each row."""
    rows = [line for line in text.splitlines() if re.fullmatch(r" *[\d,]+(?: \S{10})* \S{1,10}", line)]
    cells = "".join("".join(r.split()[1:]) for r in rows)
    return cells, [int(r.split()[0].replace(",", "")) for r in rows]


def expected_cells(states, per_cell):
    owners = sorted({owner for state, owner, _ in states if state != pb.BLOCK_FREE})
    cells = ""
    for start in range(0, len(states), per_cell):
        part = states[start:start + per_cell]
        busy = [owner for state, owner, _ in part if state != pb.BLOCK_FREE]
        counts = [busy.count(owner) for owner in owners]
        if not busy:
            cells += "."
        elif 2 * len(busy) < len(part):
            cells += ":"
        else:
            cells += LETTERS[counts.index(max(counts))]
    return cells


def test_sessions_and_their_workers(client, tool):
    session = client.open_session("engine")
    assert next(s for s in tool.json("sessions")["sessions"] if s["session_id"] == session.id)["attachments"] == []
    assert "WORKER" not in tool.run("sessions").stdout
    socket = tool.json("info")["attach_socket"]
    with kvpool.attach(socket=socket, session_id=session.id, secret=session.ref.secret) as worker:
        worker.run(worker.step())
        buffer = worker.create_buffer(64)
        found, = next(s for s in tool.json("sessions")["sessions"] if s["session_id"] == session.id)["attachments"]
        info = worker.info()
        assert found["attachment_id"] == info["attachment_id"] and found["device"] == info["device"] == DEVICE
        assert (found["peer_pid"], found["peer_uid"], found["state"]) == (os.getpid(), os.getuid(), "serving")
        assert (found["steps_taken"], found["buffers"]) == (1, 1)
        assert 0 <= time.time_ns() - found["attached_unix_ns"] < 600 * 10**9
        row = re.search(rf"^ *{info['attachment_id']} +{session.id} +.*$", tool.run("sessions").stdout, re.M)
        fields = row.group().split()
        own = re.search(rf"^ *{session.id} +engine .*$", tool.run("sessions").stdout, re.M).group().split()
        assert own[-4:] == ["0", "0", "0", "1"]  # gRPC steps, in flight, refused: none; ring steps
        assert fields[2:6] == [str(os.getpid()), str(os.getuid()), DEVICE, "serving"] and fields[-2:] == ["1", "1"]
        buffer.release()
        taken = sum(a.steps_taken for s in client.list_sessions() for a in s.attachments if a.device == DEVICE)
        table = tool.run("info").stdout.splitlines()
        head, = (line for line in table if line.startswith("DEVICE "))
        row, = (line for line in table if line.startswith(f"{DEVICE} ") and "serving" in line)
        end = head.index("RING STEPS") + len("RING STEPS")
        assert row[:end].split()[-1] == str(taken)
    session.close()


def lease_randomly(client, pool, sessions, rounds, seed):
    rng = np.random.default_rng(seed)
    opened = [client.open_session(f"engine-{i}") for i in range(sessions)]
    leased = [[] for _ in opened]
    for turn in range(rounds):
        i = int(rng.integers(sessions))
        leased[i] += client_blocks(opened[i], pool, int(rng.integers(1, pool.spec.num_blocks // rounds)))
        if turn % 2 and leased[i]:
            back = [int(b) for b in rng.permutation(leased[i])[:len(leased[i]) // 2]]
            if back:
                opened[i].free(pool.pool_id, back)
                leased[i] = [b for b in leased[i] if b not in back]
    return opened


def client_blocks(session, pool, count):
    return [int(b) for b in session.allocate(pool.pool_id, count)]


def test_block_map_of_a_small_pool(client, tool, pool, session):
    other = client.open_session("other")
    session.allocate_range(pool.pool_id, 3, 4)
    other.allocate_range(pool.pool_id, 7, 1)
    session.allocate_range(pool.pool_id, 39, 1)
    states = client.block_states(pool.pool_id)
    done = tool.run("blocks", pool.spec.name)
    assert map_cells(done.stdout)[0] == expected_cells(states, 1)
    assert "6 leased by 2 sessions, 34 free in 2 pieces, the longest 31" in done.stdout
    assert re.search(rf"^a #{session.id} +test +5 +b #{other.id} +other +1$", done.stdout, re.M)
    document = tool.json("blocks", pool.spec.name)
    assert [document[k] for k in ("free", "leased", "sealed", "quarantined")] == [34, 6, 0, 0]
    assert document["free_runs"] == 2 and document["free_run_longest"] == 31
    assert {s["session_id"]: s["blocks"] for s in document["sessions"]} == {session.id: 5, other.id: 1}
    spread = [(r["state"], r["session_id"], r["epoch"]) for r in document["runs"] for _ in range(r["count"])]
    assert spread == [("free" if s == pb.BLOCK_FREE else "leased", o, e) for s, o, e in states]
    part = tool.json("blocks", pool.spec.name, "--first-block", 5, "--count", 3)
    assert part["leased"] == 3 and sum(r["count"] for r in part["runs"]) == 3
    assert map_cells(tool.run("blocks", pool.spec.name, "--first-block", 5, "--count", 3).stdout) == ("aab", [5])
    tool.refused("blocks", pool.spec.name, "--first-block", 40)
    other.close()


def other_states(session):
    """Answers ListBlocks with a pool of 40 whose quarters are free, sealed, quarantined and leased."""
    def change(method, reply):
        if method != "ListBlocks":
            return reply
        states = [pb.BLOCK_FREE, pb.BLOCK_SEALED, pb.BLOCK_QUARANTINED, pb.BLOCK_LEASED]
        runs = [pb.BlockRun(first_block=10 * i, count=10, state=state, epoch=1,
                            session_id=0 if state == pb.BLOCK_FREE else session.id) for i, state in enumerate(states)]
        return pb.ListBlocksResponse(runs=runs, epoch=1).SerializeToString()
    return change


def test_block_map_of_sealed_and_quarantined_blocks(daemon, pool, session, tmp_path):
    with Proxy(tmp_path / "states.sock", f"unix:{daemon.socket}", other_states(session)) as proxy:
        tool = Tool(proxy.socket)
        text = tool.run("blocks", pool.spec.name).stdout
        assert map_cells(text)[0] == "." * 10 + "#" * 10 + "!" * 10 + "a" * 10
        assert "10 leased by 1 session, 10 sealed, 10 quarantined, 10 free in 1 piece" in text
        # Two blocks a cell, the borders inside cells: the cell is what most of its blocks are.
        shifted = tool.run("blocks", pool.spec.name, "--rows", 1, "--first-block", 5, "--count", 31,
                           env=environment(COLUMNS="40")).stdout
        assert "one character is 2 blocks" in shifted
        assert map_cells(shifted)[0] == "..#####a!!!!aaaa"  # 19 and 20, 29 and 30: half each, and all of them a's
        document = tool.json("blocks", pool.spec.name)
        assert [document[k] for k in ("free", "leased", "sealed", "quarantined")] == [10, 10, 10, 10]
        assert [r["state"] for r in document["runs"]] == ["free", "sealed", "quarantined", "leased"]


def test_block_map_of_ten_thousand_blocks_and_fifty_sessions(client, tool, pool_name):
    pool = client.create_pool(pool_name, 16, 10000, [dict(name="kv", format="index_fp4", num_layers=1)])
    opened = lease_randomly(client, pool, 50, 200, seed=3)
    states = client.block_states(pool.pool_id)
    done = tool.run("blocks", pool_name)
    cells, labels = map_cells(done.stdout)
    assert "one character is 10 blocks" in done.stdout
    assert cells == expected_cells(states, 10)
    assert labels == list(range(0, 10000, 600))
    counts = {}
    for state, owner, _ in states:
        if state != pb.BLOCK_FREE:
            counts[owner] = counts.get(owner, 0) + 1
    legend = re.findall(r"(\S) #(\d+) +(\S+) +([\d,]+)", done.stdout)
    owners = sorted(counts)
    assert [(letter, int(n), int(c.replace(",", ""))) for letter, n, _, c in sorted(legend, key=lambda x: int(x[1]))] == \
        [(LETTERS[i], owner, counts[owner]) for i, owner in enumerate(owners)]
    for width in (60, 80, 132):
        text = tool.on_terminal("blocks", pool_name, width=width, NO_COLOR="1")
        assert max(map(len, text.splitlines())) <= max(width, 80)
        assert len(text.splitlines()[3]) <= width
        per_cell = int(re.search(r"one character is ([\d,]+) blocks", text).group(1).replace(",", ""))
        assert map_cells(text)[0] == expected_cells(states, per_cell)
    for session in opened:
        session.close()
    client.delete_pool(pool.pool_id)


def test_block_map_of_a_million_blocks(client, tool, pool_name):
    pool = client.create_pool(pool_name, 1, 1000000, [dict(name="kv", format="bf16", width=16, num_layers=1)])
    session = client.open_session()
    session.allocate_range(pool.pool_id, 500000, 100000)
    done = tool.run("blocks", pool_name)
    assert map_cells(done.stdout)[0] == "." * 500 + "a" * 100 + "." * 400
    assert "one character is 1,000 blocks" in done.stdout
    session.close()
    client.delete_pool(pool.pool_id)


# ---- terminals -----------------------------------------------------------------------------------------------------


def test_colours_only_where_they_belong(tool, pool, session):
    session.allocate(pool.pool_id, 3)
    for arguments in (["info"], ["pools"], ["sessions"], ["blocks", pool.spec.name]):
        assert "\x1b[" in tool.on_terminal(*arguments)
        assert "\x1b" not in tool.on_terminal(*arguments, NO_COLOR="1")
        assert "\x1b" not in tool.run(*arguments).stdout
        assert "\x1b" not in tool.run(*arguments, env=environment(TERM="xterm-256color")).stdout


def test_tables_fit_eighty_columns(tool, pool, session):
    session.allocate(pool.pool_id, 3)
    name = pool.spec.name
    for arguments in (["info"], ["pools"], ["sessions"], ["pool", "describe", name], ["dump", f"{name}/kv", "0-3"],
                      ["dump", f"{name}/kv", "0"], ["blocks", name], ["walkthrough"]):
        text = tool.on_terminal(*arguments, NO_COLOR="1")
        assert max(map(len, text.splitlines())) <= 80, text


def test_columns_counts_without_a_terminal(tool, pool):
    wide = tool.run("blocks", pool.spec.name, env=environment(COLUMNS="200")).stdout
    narrow = tool.run("blocks", pool.spec.name, env=environment(COLUMNS="60")).stdout
    assert len(map_cells(wide)[1]) == 1
    assert len(narrow.splitlines()[3]) == len(" 0") + 4 * len(" ..........")


def test_ascii_where_the_locale_is(tool, pool):
    env = environment()
    env["LC_ALL"] = "C"
    tool.run("pools", env=env).stdout.encode("ascii")


# ---- put, get, dump ------------------------------------------------------------------------------------------------


def put_held(tool, *arguments):
    """A put that holds its blocks, and what it said."""
    process = tool.start("--json", "put", *arguments, "--hold")
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return process, json.loads(line)


def end_held(process, by=signal.SIGINT, status=0):
    process.send_signal(by)
    out, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == status, err
    return out, err


def blocks_slots(document, per_block, rows):
    return [b * per_block + t for b in document["blocks"] for t in range(per_block)][:rows]


@pytest.mark.parametrize("region, layer", [("kv", 1), ("fp4", 0), ("index", 0), ("plain", 0)])
def test_put_stores_what_a_store_stores(client, tool, pool, tmp_path, region, layer):
    info = next(r for r in pool.regions if r.spec.name == region)
    fmt = catalogue.bf16_of_width(64) if region == "plain" else catalogue.FORMATS[info.spec.format]
    rows = random_rows(70, fmt.row_bytes // 2)
    np.save(tmp_path / "rows.npy", rows)
    process, document = put_held(tool, f"{pool.spec.name}/{region}:{layer}", tmp_path / "rows.npy", "--name", "filler")
    slots = blocks_slots(document, info.tokens_per_block, 70)
    assert held(client, pool) == sorted(document["blocks"])
    assert document["rows_stored"] == 70 and document["held"]
    session = next(s for s in client.list_sessions() if s.session_id == document["session_id"])
    assert session.name == "filler" and session.blocks == len(document["blocks"])

    stored = reference.quantize(fmt, reference.f32_to_bf16(rows))
    records = client.inspect(region_ref(pool, region, layer), slots)
    scales = stored.scales if fmt.scale_bytes else np.empty((70, 0), np.uint8)
    raw = np.concatenate([stored.data.reshape(70, -1), scales.reshape(70, -1).view(np.uint8)], axis=1)
    assert b"".join(r.raw for r in records) == raw.tobytes()

    target = f"{pool.spec.name}/{region}:{layer}"
    listed = ",".join(map(str, slots))
    tool.run("get", target, tmp_path / "record.bin", "--slots", listed, "--as", "record")
    assert (tmp_path / "record.bin").read_bytes() == raw.tobytes()
    values = np.array([r.values for r in records], np.float32)
    tool.run("get", target, tmp_path / "values.npy", "--slots", listed)
    loaded = np.load(tmp_path / "values.npy")
    assert loaded.dtype == np.float32 and np.array_equal(loaded, values)
    tool.run("get", target, tmp_path / "values.bf16", "--slots", listed)
    assert np.array_equal(np.fromfile(tmp_path / "values.bf16", np.uint16).reshape(70, -1),
                          reference.f32_to_bf16(values))
    tool.run("get", target, tmp_path / "half.npy", "--slots", listed, "--as", "float16")
    assert np.array_equal(np.load(tmp_path / "half.npy"), values.astype(np.float16))
    blocks = document["blocks"][:2]
    tool.run("get", target, tmp_path / "memory.npy", "--blocks", ",".join(map(str, blocks)), "--as", "memory")
    whole = np.concatenate([client.dump(region_ref(pool, region, layer), b, 1) for b in blocks])
    assert np.load(tmp_path / "memory.npy").tobytes() == whole.tobytes()
    end_held(process)
    wait_until(lambda: no_sessions(client), "the session's end")
    assert held(client, pool) == []


def test_put_reads_every_kind_of_file(client, tool, pool, tmp_path):
    values = np.concatenate([random_rows(30, 512), np.array([[65504, 6e-8, -1e-5, 0.1] * 128], np.float32)])
    target = f"{pool.spec.name}/kv"

    def stored_from(name, save, source):
        save(tmp_path / name)
        process, document = put_held(tool, target, tmp_path / name)
        records = client.inspect(region_ref(pool, "kv"), blocks_slots(document, 16, 31))
        end_held(process)
        stored = reference.quantize(catalogue.FORMATS["v41"], source)
        raw = np.concatenate([stored.data, stored.scales], axis=1)
        assert b"".join(r.raw for r in records) == raw.tobytes(), name

    bits = reference.f32_to_bf16(values)
    half = values.astype(np.float16)
    stored_from("raw.bin", bits.tofile, bits)
    stored_from("bits.npy", lambda path: np.save(path, bits), bits)
    stored_from("bfloat16.npy", lambda path: np.save(path, bits.view("V2")), bits)
    stored_from("half.npy", lambda path: np.save(path, half), reference.f32_to_bf16(half.astype(np.float32)))
    stored_from("shape.npy", lambda path: np.save(path, values.reshape(31, 4, 128)), bits)
    stored_from("leading.npy", lambda path: np.save(path, values.reshape(1, 31, 512)), bits)
    # NumPy writes version 2 only for long headers; the layout differs in the length field alone.
    text = str({"shape": (31, 512), "descr": "<f4", "fortran_order": False}).encode().ljust(100) + b"\n"
    stored_from("two.npy", lambda path: path.write_bytes(
        b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + values.tobytes()), bits)


@pytest.mark.parametrize("name, content, words", [
    ("none", None, "No such file"),
    ("empty", b"", "no rows"),
    ("odd", b"x" * 1023, "whole number"),
    ("cut.npy", b"\x93NUMPY\x01", "cut off"),
    ("version.npy", b"\x93NUMPY\x09\x00\x10\x00" + b" " * 16, "version 9"),
    ("huge.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "cut off"),
    ("text.npy", b"\x93NUMPY\x01\x00\x10\x00" + b"import os       ", "plain array"),
    ("twice.npy", b"\x93NUMPY\x01\x00\x36\x00" + b"{'descr': '<f4', 'descr': '<f4', 'shape': (1, 512), }   ", "plain array"),
])
def test_put_refuses_files(client, tool, pool, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    text, _ = tool.refused("put", f"{pool.spec.name}/kv", tmp_path / name)
    assert words in text and name in text
    assert held(client, pool) == []


@pytest.mark.parametrize("array, words", [
    (np.zeros((2, 512), np.float64), "<f8"),
    (np.zeros((2, 512), ">f4"), ">f4"),
    (np.zeros((2, 511), np.float32), "(2, 511)"),
    (np.zeros((0, 512), np.float32), "no rows"),
    (np.asfortranarray(np.zeros((2, 512), np.float32)), "Fortran"),
    (np.zeros((), np.float32), "()"),
])
def test_put_refuses_arrays(tool, pool, tmp_path, array, words):
    np.save(tmp_path / "a.npy", array)
    assert words in tool.refused("put", f"{pool.spec.name}/kv", tmp_path / "a.npy")[0]


def test_put_of_a_file_that_ends_early(client, tool, pool, tmp_path):
    np.save(tmp_path / "a.npy", random_rows(20, 512))
    with open(tmp_path / "a.npy", "r+b") as file:
        file.truncate(20 * 2048)
    assert "ends before its last row" in tool.refused("put", f"{pool.spec.name}/kv", tmp_path / "a.npy")[0]
    wait_until(lambda: held(client, pool) == [], "the blocks free")


def test_put_without_hold_says_that_the_blocks_are_free(client, tool, pool, tmp_path):
    np.save(tmp_path / "a.npy", random_rows(17, 512))
    done = tool.run("put", f"{pool.spec.name}/kv", tmp_path / "a.npy")
    assert re.search(r"^slots +0-16$", done.stdout, re.M) and re.search(r"^blocks +0-1$", done.stdout, re.M)
    assert "free again" in done.stdout and "--hold" in done.stdout
    wait_until(lambda: held(client, pool) == [], "the blocks free")
    assert tool.json("dump", f"{pool.spec.name}/kv", "16")["records"][0]["odd"] == ""


def test_put_first_block(client, tool, pool, session, tmp_path):
    np.save(tmp_path / "a.npy", random_rows(33, 512))
    process, document = put_held(tool, f"{pool.spec.name}/kv", tmp_path / "a.npy", "--first-block", "10")
    assert document["blocks"] == [10, 11, 12] and document["slots"] == "160-192"
    text, hint = tool.refused("put", f"{pool.spec.name}/kv", tmp_path / "a.npy", "--first-block", "12")
    assert "12" in text and "kvpoolctl blocks" in hint
    tool.refused("put", f"{pool.spec.name}/kv", tmp_path / "a.npy", "--first-block", "39")
    end_held(process, signal.SIGTERM)
    session.allocate(pool.pool_id, 38)
    assert "free" in tool.refused("put", f"{pool.spec.name}/kv", tmp_path / "a.npy")[0]
    np.save(tmp_path / "b.npy", random_rows(641, 512))
    assert "641 rows need 41 blocks" in tool.refused("put", f"{pool.spec.name}/kv", tmp_path / "b.npy")[0]


def test_put_reports_bad_rows(tool, pool, tmp_path):
    rows = random_rows(4, 512)
    rows[1, 5], rows[2, 100] = np.nan, np.inf
    np.save(tmp_path / "a.npy", rows)
    assert "2 rows with NaN or Inf" in tool.run("put", f"{pool.spec.name}/kv", tmp_path / "a.npy").stdout
    rows = np.full((1, 512), 5000, np.float32)
    np.save(tmp_path / "a.npy", rows)
    assert "32 groups saturated" in tool.run("put", f"{pool.spec.name}/fp4", tmp_path / "a.npy").stdout


def test_held_put_tells_when_the_daemon_dies(start_daemon, tmp_path):
    daemon = start_daemon()
    client = daemon.client()
    client.create_pool("p", 64, 4, REGIONS)
    np.save(tmp_path / "a.npy", random_rows(4, 512))
    process, _ = put_held(Tool(daemon.socket), "p/kv", tmp_path / "a.npy")
    daemon.kill()
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode in (1, 3) and "put again" in err
    daemon.remove()


def test_put_of_many_pieces_and_a_progress_bar(client, tool, pool_name, tmp_path):
    pool = client.create_pool(pool_name, 64, 2000, [dict(name="kv", format="v41", num_layers=1)])
    rows = np.random.default_rng(2).integers(0, 0x4000, (100000, 512), np.uint16)  # finite, below 2
    rows.tofile(tmp_path / "rows")
    text = tool.on_terminal("put", f"{pool_name}/kv", tmp_path / "rows")
    assert "stored 100,000 rows" in text
    done = tool.run("put", f"{pool_name}/kv", tmp_path / "rows")
    assert done.stderr == ""
    tool.run("get", f"{pool_name}/kv", tmp_path / "back.npy", "--slots", "50000-50009,99999", "--as", "bf16")
    stored = reference.quantize(catalogue.FORMATS["v41"], rows[[*range(50000, 50010), 99999]])
    assert np.array_equal(np.load(tmp_path / "back.npy"),
                          reference.loaded_rows(catalogue.FORMATS["v41"], stored.data, stored.scales).view(np.uint16))
    client.delete_pool(pool.pool_id)


def test_get_refusals_leave_no_file(tool, pool, tmp_path):
    target = f"{pool.spec.name}/kv"
    assert "640" in tool.refused("get", target, tmp_path / "x", "--slots", "0-639,640")[0]
    assert "no block 40" in tool.refused("get", target, tmp_path / "x", "--blocks", "40")[0]
    tool.refused("get", target, tmp_path / "x", "--blocks", "0,40", "--as", "memory")
    _, hint = tool.refused("get", target, tmp_path / "x", "--slots", "0", "--device", "host:3")
    assert "devices" in hint
    tool.refused("get", target, tmp_path / "no" / "x", "--slots", "0")
    assert list(tmp_path.iterdir()) == []


def test_get_replaces_a_file_only_when_it_is_whole(tool, pool, tmp_path):
    path = tmp_path / "x"
    path.write_text("precious")
    tool.refused("get", f"{pool.spec.name}/kv", path, "--slots", "640")
    assert path.read_text() == "precious"
    tool.run("get", f"{pool.spec.name}/kv", path, "--slots", "0")
    assert path.stat().st_size == 1024
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def odd_of(tool, target, slot):
    record = tool.json("dump", target, slot)["records"][0]
    return record["odd"], record["odd_groups"]


@pytest.mark.parametrize("fmt, change, words", [
    ("v41", lambda d, s: (d.fill(0xA5), s.fill(0xA5)), "every byte is 0xA5: a fill pattern"),
    ("v41", lambda d, s: (d.fill(0), s.fill(0)), "every byte is 0x00: never stored to"),
    ("v41", lambda d, s: d.__setitem__(slice(32, 34), 0x7F), "2 NaN codes"),
    ("v41", lambda d, s: s.__setitem__(1, 0xFF), "scale is no number, no store writes that"),
    ("v41", lambda d, s: s.__setitem__(1, 0), "scale 0 is below the smallest"),
    ("v41", lambda d, s: s.__setitem__(1, 104), "below the smallest"),
    ("v41", lambda d, s: d.__setitem__(slice(32, 64), 0), "all codes are 0"),
    ("v41", lambda d, s: d.__setitem__(slice(32, 64), 0x75), "larger than these codes need"),
    ("index_fp4", lambda d, s: s.__setitem__(1, 0xFF), "scale is no number"),
    ("index_fp4", lambda d, s: (s.__setitem__(1, 0xFF), d.__setitem__(slice(16, 32), 0)), "held NaN or Inf"),
    ("index_fp4", lambda d, s: s.__setitem__(1, 111), "below the smallest"),
    ("index_fp4", lambda d, s: d.__setitem__(slice(16, 32), 0x44), "larger than these codes need"),
    ("v41_fp4", lambda d, s: s.__setitem__(1, 0x7F), "scale is no number"),
    ("v41_fp4", lambda d, s: s.__setitem__(1, 0), "below the smallest"),
    ("v41_fp4", lambda d, s: s.__setitem__(1, 0x80), "below the smallest"),
    ("v41_fp4", lambda d, s: (s.__setitem__(1, 0x7E), d.__setitem__(8, 0x07)), "saturated"),
    ("index_fp8_f32", lambda d, s: s.__setitem__(slice(0, 4), (0, 0, 0x80, 0x7F)), "scale is no number"),
    ("index_fp8_f32", lambda d, s: s.__setitem__(slice(0, 4), (0, 0, 0x80, 0xBF)), "below the smallest"),
    ("index_fp8_f32", lambda d, s: d.__setitem__(slice(0, 128), 0x7D), "larger than these codes need"),
    ("bf16", lambda d, s: d.__setitem__(slice(0, 4), (0xC0, 0x7F, 0x80, 0x7F)), "1 NaN, 1 Inf"),
])
def test_dump_sees_what_is_odd(daemon, client, tool, pool_name, fmt, change, words):
    geometry = catalogue.Geometry(catalogue.FORMATS[fmt], 16, 4)
    pool = client.create_pool(pool_name, 16, 4, [dict(name="kv", format=fmt, num_layers=1)])
    session = client.open_session()
    session.allocate(pool.pool_id, 4)
    slot = 37
    width = geometry.format.row_bytes // 2
    session.store_rows(region_ref(pool, "kv"), reference.f32_to_bf16(random_rows(64, width)), range(64))
    assert odd_of(tool, f"{pool_name}/kv", slot) == ("", [""] * max(1, geometry.format.groups))
    with daemon.region_memory(pool_name, "kv") as memory:
        data_at, scale_at = geometry.data_offset(0, slot), geometry.scale_offset(0, slot)
        data = memory.read(data_at, geometry.format.data_bytes)
        scales = memory.read(scale_at, geometry.format.scale_bytes) if geometry.format.scale_bytes else None
        change(data, scales)
        memory.write(data_at, data)
        if scales is not None:
            memory.write(scale_at, scales)
    odd, groups = odd_of(tool, f"{pool_name}/kv", slot)
    assert words in odd
    if "every byte" not in words:
        changed = 1 if len(groups) > 1 else 0
        assert words in groups[changed] and not any(g for i, g in enumerate(groups) if i != changed)
    assert words in tool.run("dump", f"{pool_name}/kv", slot).stdout
    assert odd_of(tool, f"{pool_name}/kv", slot - 1)[0] == odd_of(tool, f"{pool_name}/kv", slot + 1)[0] == ""
    session.close()
    client.delete_pool(pool.pool_id)


@pytest.mark.parametrize("fmt", ["v41", "v41_fp4", "index_fp4", "index_fp8_f32", "index_mxfp8", "bf16"])
def test_dump_finds_nothing_odd_in_what_stores_write(client, tool, pool_name, fmt):
    width = 128 if fmt.startswith("index") else 512
    pool = client.create_pool(pool_name, 16, 63, [dict(name="kv", format=fmt, num_layers=1)])
    session = client.open_session()
    session.allocate(pool.pool_id, 63)
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((1000, width)).astype(np.float32) * np.exp2(rng.integers(-30, 8, (1000, 1)))
    rows *= np.exp2(rng.integers(-6, 1, (1000, width // 16))).repeat(16, axis=1)
    rows[0] = 0
    rows[1, ::2] = 0
    rows[2, 32:64] = -0.0
    session.store_rows(region_ref(pool, "kv"), reference.f32_to_bf16(rows), range(1000))
    odd = {r["slot"]: r["odd"] for r in tool.json("dump", f"{pool_name}/kv", "1-999")["records"] if r["odd"]}
    assert odd == {}
    zero = tool.run("dump", f"{pool_name}/kv", "0").stdout
    assert "odd: nothing" in zero and "all zero" in zero or fmt == "bf16" and "never stored to, or zeros" in zero
    session.close()
    client.delete_pool(pool.pool_id)


def test_dump_shows_bytes_scales_and_values(client, tool, pool, session):
    session.allocate(pool.pool_id, 2)
    session.store_rows(region_ref(pool, "kv"), reference.f32_to_bf16(random_rows(20, 512)), range(20))
    record = client.inspect(region_ref(pool, "kv"), [18])[0]
    document = tool.json("dump", f"{pool.spec.name}/kv", "18")["records"][0]
    assert bytes.fromhex(document["raw"]) == record.raw
    assert np.array_equal(numbers(document["values"]), np.array(record.values, np.float32))
    assert np.array_equal(numbers(document["scales"]), np.array(record.scales, np.float32))
    assert (document["block"], document["token"], document["session_id"]) == (1, 2, session.id)
    text = tool.run("dump", f"{pool.spec.name}/kv", "18").stdout
    assert f"block 1, token 2 of 16 (#{session.id} test); v41, 528 bytes" in text
    data = text.split("data, 512 bytes\n")[1].split("\nscales")[0]
    assert bytes.fromhex("".join("".join(line.split()[1:]) for line in data.splitlines())) == record.raw[:512]
    values = text.split("values, 512\n")[1]
    printed = [float(v) for line in values.splitlines() for v in line.split()[1:]]
    assert np.allclose(printed, record.values, rtol=6e-3)
    several = tool.run("dump", f"{pool.spec.name}/kv", "16-19", "0").stdout.splitlines()
    assert [line.split()[:3] for line in several[1:]] == [[str(s), str(s // 16), str(s % 16)] for s in (16, 17, 18, 19, 0)]
    assert tool.run("dump", f"{pool.spec.name}/kv", "16,17", "--full").stdout.count("values, 512") == 2


# ---- plan ----------------------------------------------------------------------------------------------------------


def walk(table, per_block, begin, end):
    """Token by token: (block, offset)."""
    return [(table[t // per_block], t % per_block) for t in range(begin, end)]


def covered(segments):
    """What each destination row comes from."""
    rows = {}
    for block, begin, end, destination in segments:
        for i in range(end - begin):
            assert destination + i not in rows
            rows[destination + i] = (block, begin + i) if block >= 0 else None
    return rows


def test_plans_against_tokens_one_by_one(tool):
    rng = np.random.default_rng(11)
    for _ in range(20):
        per_block = int(rng.integers(1, 40))
        end = int(rng.integers(1, 300))
        begin = int(rng.integers(0, end))
        table = [int(b) for b in rng.permutation(1000)[:-(-end // per_block)]]
        common = ["--tokens", f"{begin}-{end}", "--per-block", per_block, "--table", ",".join(map(str, table))]
        tokens = walk(table, per_block, begin, end)
        segments = tool.json("plan", "range", *common, "--destination", 7)["segments"]
        assert covered(segments) == {7 + i: token for i, token in enumerate(tokens)}
        slots = tool.json("plan", "slots", *common)["slots"]
        assert slots == [block * per_block + offset for block, offset in tokens]
        last = tool.run("plan", "slots", *common).stdout.splitlines()[-1].split()
        assert int(last[2].split("-")[1]) == slots[-1]


def test_plan_of_a_batch(tool):
    arguments = ["--sequence", "100,100,7-8", "--sequence", "3,3", "--sequence", "41,9", "--ratio", "4"]
    document = tool.json("plan", "compressed", *arguments, "--per-block", "16")
    assert document["cu_seqlens"] == [0, 25, 26, 36] and document["total_k"] == 36
    assert document["segments"] == [[7, 0, 16, 0], [8, 0, 9, 16], [-1, 0, 1, 25], [0, 0, 10, 26]]
    assert tool.run("plan", "compressed", *arguments, "--per-block", "16").stdout.splitlines()[-1] == \
        "4 segments, total_k 36"
    assert tool.json("plan", "new", *arguments)["sequences"] == [
        {"token_begin": 0, "token_end": 25}, {"token_begin": 0, "token_end": 0}, {"token_begin": 8, "token_end": 10}]
    visible = tool.json("plan", "visible", *arguments, "--per-block", "16")
    positions = [(0, 25, p) for p in range(100)] + [(25, 0, p) for p in range(3)] + [(26, 10, p) for p in range(32, 41)]
    assert visible["ks"] == [begin for begin, _, _ in positions]
    assert visible["ke"] == [begin + min(n, (p + 1) // 4) for begin, n, p in positions]
    assert len(tool.run("plan", "visible", *arguments, "--per-block", "16").stdout.splitlines()) == 1 + 112


def test_plan_of_the_walkthrough_is_the_golden_one(tool):
    params, arrays = {}, {}
    folder = golden.ROOT / "plan_walkthrough_compressed"
    for line in (folder / "case.txt").read_text().splitlines():
        kind, key, *rest = line.split()
        if kind == "param":
            params[key] = rest[0]
        else:
            arrays[key] = np.fromfile(folder / f"{key}.bin", "<i4")
    table = ",".join(map(str, arrays["block_table"]))
    document = tool.json("plan", "compressed", "--sequence", f"{params['seqlen_k']},1024,{table}", "--ratio",
                         params["compress_ratio"], "--per-block", "16")
    assert np.array_equal(document["segments"], arrays["out"].reshape(-1, 4))
    assert document["total_k"] == int(params["total_k"])


def test_plans_need_no_daemon_and_refuse(tmp_path):
    tool = Tool(tmp_path / "none.sock")
    assert tool.json("plan", "range", "--tokens", "0-0", "--per-block", "16")["segments"] == []
    assert "table" in tool.refused("plan", "range", "--tokens", "0-40", "--per-block", "16", "--table", "5")[0]
    tool.refused("plan", "new", "--sequence", "10,20", "--ratio", "4")
    assert "--ratio 0: a number from 1 to" in tool.refused("plan", "new", "--sequence", "10,2", "--ratio", "0",
                                                           status=2)[0]
    tool.refused("plan", "range", "--tokens", "5-2", "--per-block", "16")
    tool.refused("plan", "slots", "--tokens", "0-99999999999", "--per-block", "1")
    tool.refused("plan", "range", "--tokens", "0-40", "--per-block", "16", "--destination", "2147483640")


# ---- walkthrough ---------------------------------------------------------------------------------------------------


# By hand, from the lengths: 10,000 tokens, 1024 of them new, ratio 4, 16 compressed tokens a block, a window of 4096.
WALKTHROUGH_FIGURES = {
    "compressed tokens, segments": [2500, 157],
    "last segment: begin, end, row": [0, 4, 2496],
    "window tokens, segments": [4096, 2],
    "first segment: begin, end, row": [784, 4096, 0],
    "second segment: begin, end, row": [0, 784, 3312],
    "store slots in the ring: first, last": [784, 1807],
    "of them read by the first segment": [1024],
    "pivots of query 0": [1, 4095, 4096, 1],
    "pivots of query 1023": [1024, 3072, 4096, 1024],
    "main_kv_offset, rows": [5120, 7620],
    "rows of two layers that differ": [0],
    "assemble: bytes read, written": [1320000 + 2162688 + 1048576, 2560000 + 4194304 + 1048576],
    "saved where the compressed part is shared": [1320000, 2560000],
    "moved by the chunk's copy": [2097152],
    "load before store: rows that differ": [0],
    "load before store: rows stored": [1024],
    "of them in the ring afterwards": [1024],
    "columns of query 0: first, last": [1, 4096],
    "columns of query 1023: first, last": [1024, 5119],
    "compressed columns: first, last": [5120, 7619],
    "decode window in the ring: start, length": [1809, 4096],
    "its slots: first, last, new token's": [1809, 1808, 1808],
    "bytes of a list of 2,048 compressed tokens": [8192],
    "of them looked up wrong": [0],
}


def test_walkthrough(client, tool):
    document = tool.json("walkthrough", "--seed", 5)
    assert document["passed"] and document["seed"] == 5
    compressed, window = document["parts"]
    assert (compressed["rows"], compressed["segment_count"]) == (2500, 157)
    assert [s[1:] for s in compressed["segments"]] == [[0, 16, 16 * i] for i in range(156)] + [[0, 4, 2496]]
    assert (compressed["bytes_stored"], compressed["bytes_read"], compressed["bytes_written"]) == \
        (2500 * 528, 2500 * 528, 2500 * 1024)
    assert (window["rows"], [s[1:] for s in window["segments"]]) == (4096, [[784, 4096, 0], [0, 784, 3312]])
    assert (window["bytes_read"], window["bytes_written"]) == (4096 * 528, 4096 * 1024)
    # Three bits behind the leading one: uniform in a spacing of 1/8 to 1/16, 1/sqrt(12) of it on average.
    for part in document["parts"]:
        assert 0.02 < part["relative_l2"] < 0.035 and 0.9 < part["bound_used_max"] <= 1
    assert {f["name"]: f["values"] for f in document["figures"]} == WALKTHROUGH_FIGURES
    assert all(f["passed"] and f["expected"] == f["values"] for f in document["figures"])
    text = tool.run("walkthrough").stdout
    assert "PASS" in text and re.search(r"^compressed +2,500 +157 .* pass$", text, re.M)
    assert re.search(r"784\.\.4096 of block 1 -> row 0; +0\.\.784 of block 1 -> row 3312", text)
    assert [p.spec.name for p in client.pools() if "walkthrough" in p.spec.name] == []
    assert [s.name for s in client.list_sessions()] == []


def corrupted(method, reply):
    if method != "LoadRows":
        return reply
    message = pb.LoadRowsResponse.FromString(reply)
    if message.rows:
        rows = bytearray(message.rows)
        rows[1] ^= 0x01  # an exponent bit of the first element
        message.rows = bytes(rows)
    return message.SerializeToString()


def exchanged(method, reply):
    if method != "LoadRows":
        return reply
    message = pb.LoadRowsResponse.FromString(reply)
    if len(message.rows) > 2048:
        message.rows = message.rows[1024:2048] + message.rows[:1024] + message.rows[2048:]
    return message.SerializeToString()


@pytest.mark.parametrize("change", [corrupted, exchanged])
def test_walkthrough_fails_when_something_comes_back_wrong(daemon, client, tmp_path, change):
    with Proxy(tmp_path / "proxy.sock", f"unix:{daemon.socket}") as plain:
        assert Tool(plain.socket).json("walkthrough")["passed"]
    with Proxy(tmp_path / "wrong.sock", f"unix:{daemon.socket}", change) as proxy:
        done = Tool(proxy.socket).run("walkthrough", status=4)
        assert "FAIL" in done.stdout and re.match(r"kvpoolctl: compressed: row \d+ element \d+: bits", done.stderr)
        assert not Tool(proxy.socket).json("walkthrough", status=4)["passed"]
    assert [p.spec.name for p in client.pools() if "walkthrough" in p.spec.name] == []


def byte_changed(method, reply):
    if method != "ReadBuffer":
        return reply
    message = pb.BytesChunk.FromString(reply)
    data = bytearray(message.data)
    data[0] ^= 0x40
    message.data = bytes(data)
    return message.SerializeToString()


def test_walkthrough_fails_when_a_figure_is_not_the_one_on_paper(daemon, tmp_path):
    """One bit of each piece of what the steps wrote: an assembled row, a column, a slot."""
    with Proxy(tmp_path / "wrong.sock", f"unix:{daemon.socket}", byte_changed) as proxy:
        done = Tool(proxy.socket).run("walkthrough", status=4)
        assert "FAIL: " in done.stdout
        failed = [re.fullmatch(r"kvpoolctl: (.+): [\d ,]+, not [\d ,]+", line) for line in done.stderr.splitlines()]
        assert [f[1] for f in failed] == [
            "rows of two layers that differ", "load before store: rows that differ", "columns of query 0: first, last",
            "its slots: first, last, new token's", "of them looked up wrong"]
        document = Tool(proxy.socket).json("walkthrough", status=4)
        assert [p["passed"] for p in document["parts"]] == [True, True] and not document["passed"]


def test_walkthrough_cleans_up_after_ctrl_c(client, tool):
    for _ in range(5):
        process = tool.start("walkthrough")
        wait_until(lambda: process.poll() is not None or
                   any("walkthrough" in p.spec.name for p in client.pools()), "its pools")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode in (0, 130), err  # it may have been over already
        assert (process.returncode == 130) == ("interrupted" in err)
        assert [p.spec.name for p in client.pools() if "walkthrough" in p.spec.name] == []
        wait_until(lambda: no_sessions(client), "the session's end")


# ---- completion ----------------------------------------------------------------------------------------------------


def completions(tool, *words):
    script = (f'PATH={Path(program()).parent}:$PATH; source "{COMPLETION}"; COMP_WORDS=("$@"); '
              'COMP_CWORD=$(($# - 1)); _kvpoolctl; printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", script, "bash", "kvpoolctl", *words], capture_output=True, text=True,
                          env=environment(KVPOOLD_SOCKET=tool.socket), check=True, timeout=SECONDS_MAX)
    assert done.stderr == ""
    return sorted(done.stdout.split())


def test_bash_completion(tool, pool):
    name = pool.spec.name
    assert completions(tool, "") == sorted({c.split()[0] for c in COMMANDS})
    assert completions(tool, "se") == ["sessions"]
    assert completions(tool, "pool", "") == ["create", "delete", "describe"]
    assert completions(tool, "plan", "c") == ["compressed"]
    assert name in completions(tool, "blocks", "")
    assert completions(tool, "--json", "dump", f"{name}/k") == [f"{name}/kv"]
    assert completions(tool, "blocks", "--r") == ["--rows"]
    assert completions(tool, "pool", "create", "--b") == ["--block-size", "--blocks"]
    assert completions(tool, "pool", "create", "--kind", "r") == ["ring"]
    assert completions(tool, "get", f"{name}/kv", "f", "--as", "rec") == ["record"]
    assert completions(tool, "blocks", name, "") == []
