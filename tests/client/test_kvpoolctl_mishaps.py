"""kvpoolctl when something goes wrong: files that are no files, signals, pipes that close, daemons that hang or die."""
import json
import os
import pty
import resource
import signal
import stat
import subprocess
import threading
import time

import numpy as np
import pytest

from support import memory
from support.errors import RpcFailure
from support.process import process_state, wait_until
from support.proxy import Proxy
from support.stubs import pb
from support.tool import SECONDS_MAX, Tool, environment

REGIONS = [dict(name="kv", format="v41", num_layers=1)]
LONG_MS = 3600 * 1000  # what nobody waits for


@pytest.fixture
def tool(daemon):
    made = Tool(daemon.socket)
    yield made
    made.close()


def is_deleted(client, pool):
    """False while a look at it that was cut off is still under way."""
    try:
        client.delete_pool(pool.pool_id, force=True)
    except RpcFailure as failure:
        assert "in flight" in str(failure)
        return False
    return True


@pytest.fixture
def pool(client, pool_name):
    made = client.create_pool(pool_name, 64, 40, REGIONS)
    yield made
    wait_until(lambda: is_deleted(client, made), "the end of what uses the pool")


@pytest.fixture
def rows(tmp_path):
    """A file of 16 rows, its path."""
    path = tmp_path / "rows.bf16"
    np.random.default_rng(1).integers(0, 0x4000, (16, 512), np.uint16).tofile(path)
    return path


@pytest.fixture
def target(tool, pool, rows):
    """A region whose first block holds them."""
    tool.run("put", f"{pool.spec.name}/kv", rows, "--first-block", 0)
    return f"{pool.spec.name}/kv"


SLOTS = ("--slots", "0-15")
SLOTS_BYTES = 16 * 1024


def walkthrough_pools(client):
    return [p.spec.name for p in client.pools() if "walkthrough" in p.spec.name]


def only_error(text):
    """The one document of standard output, which is an error."""
    document = json.loads(text)
    assert set(document) == {"error"} and document["error"]["text"], document
    return document["error"]


# ---- the file that get writes --------------------------------------------------------------------------------------


def test_get_keeps_the_mode_and_goes_through_links(tool, target, tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to("real")
    tool.run("get", target, link, *SLOTS)
    assert link.is_symlink() and os.readlink(link) == "real"
    assert real.stat().st_size == SLOTS_BYTES and stat.S_IMODE(real.stat().st_mode) == 0o640
    dangling, chained = tmp_path / "dangling", tmp_path / "chained"
    dangling.symlink_to(tmp_path / "made")
    chained.symlink_to("dangling")
    tool.run("get", target, chained, *SLOTS)
    assert dangling.is_symlink() and (tmp_path / "made").stat().st_size == SLOTS_BYTES
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    assert "levels of symbolic links" in tool.refused("get", target, loop, *SLOTS)[0]
    assert loop.is_symlink()


def test_get_writes_to_what_is_no_file(tool, target, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    tool.run("get", target, pipe, *SLOTS)
    reader.join()
    assert len(read[0]) == SLOTS_BYTES and stat.S_ISFIFO(pipe.stat().st_mode)
    tool.run("get", target, "/dev/null", *SLOTS)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    text, hint = tool.refused("get", target, "/dev/full", *SLOTS)
    assert text == "/dev/full can't be written: No space left on device" and "space" in hint
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert "Is a directory" in tool.refused("get", target, tmp_path, *SLOTS)[0]
    text, hint = tool.refused("get", target, tmp_path / "none" / "f", *SLOTS)
    assert "No such file" in text and "directory" in hint


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_get_to_standard_output_says_nothing_else_there(tool, target, tmp_path, name):
    if name != "-" and not os.path.islink(name):
        pytest.skip(f"{name} is no link to a process's own output here")
    command = tool.command("get", target, name, *SLOTS)
    piped = subprocess.run(command, capture_output=True, check=True, timeout=SECONDS_MAX, env=environment())
    assert len(piped.stdout) == SLOTS_BYTES
    with open(tmp_path / "out", "wb") as out:
        subprocess.run(command, stdout=out, check=True, timeout=SECONDS_MAX, env=environment())
    assert (tmp_path / "out").read_bytes() == piped.stdout
    done = tool.run("--json", "get", target, name, *SLOTS, status=1)
    assert "can't both" in only_error(done.stdout)["text"]


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_get_past_the_largest_file_leaves_nothing(tool, target, tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    done = tool.run("get", target, folder / "rows", *SLOTS, status=1, preexec_fn=limit_file_size)
    assert "File too large" in done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_get_that_is_ended_leaves_nothing(daemon, client, tool, target, tmp_path, by):
    folder = tmp_path / "f"
    folder.mkdir()
    old = folder / "old"
    old.write_text("old")
    device = client.device("host:0")
    os.kill(device.executor_pid, signal.SIGSTOP)  # so that it has begun, and doesn't end
    try:
        process = tool.start("--timeout", LONG_MS, "get", target, old, *SLOTS)
        wait_until(lambda: any(str(folder) in path for path in open_files(process.pid)), "its file")
        process.send_signal(by)
        _, err = process.communicate(timeout=SECONDS_MAX)
    finally:
        os.kill(device.executor_pid, signal.SIGCONT)
    assert process.returncode == (-9 if by == signal.SIGKILL else 130)
    assert err == ("" if by == signal.SIGKILL else f"kvpoolctl: interrupted; {old} is not written\n")
    assert [p.name for p in folder.iterdir()] == ["old"] and old.read_text() == "old"


def open_files(pid):
    """What its descriptors are."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            pass
    return found


def awaits(pid, number):
    """Whether the signal is blocked: a thread of kvpoolctl's waits for it."""
    with open(f"/proc/{pid}/status") as status:
        blocked = next(line for line in status if line.startswith("SigBlk:"))
    return bool(int(blocked.split()[1], 16) >> (number - 1) & 1)


# ---- the file that put reads ---------------------------------------------------------------------------------------


def test_put_reads_pipes(tool, pool, rows, tmp_path):
    target = f"{pool.spec.name}/kv"
    with open(rows, "rb") as source:
        done = subprocess.run(tool.command("put", target, "-"), stdin=source, capture_output=True, text=True,
                              check=True, timeout=SECONDS_MAX, env=environment())
    assert "stored 16 rows" in done.stdout
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = tool.start("put", target, pipe)
    np.save(tmp_path / "a.npy", np.ones((3, 512), np.float32))
    pipe.write_bytes((tmp_path / "a.npy").read_bytes())
    out, err = process.communicate(timeout=SECONDS_MAX)
    assert "stored 3 rows of float32" in out, err
    waiting = tool.start("put", target, pipe)  # nobody writes
    wait_until(lambda: process_state(waiting.pid) == "S" and str(pipe) in open_now(waiting.pid), "its wait")
    waiting.send_signal(signal.SIGINT)
    assert waiting.communicate(timeout=SECONDS_MAX)[1] == "kvpoolctl: interrupted\n"
    assert waiting.returncode == 130


def open_now(pid):
    """The path that the process is opening, out of its memory: open(2) has no other trace."""
    try:
        number, _, path, *_ = open(f"/proc/{pid}/syscall").read().split()
        if number not in ("2", "257", "56"):  # open, openat of x86, openat of arm
            return ""
        with open(f"/proc/{pid}/mem", "rb") as memory:
            memory.seek(int(path, 16))
            return memory.read(256).split(b"\0")[0].decode()
    except (OSError, ValueError):
        return ""


@pytest.mark.parametrize("name,words", [("/dev/zero", "device"), ("/", "directory"), ("/none/at/all", "No such file")])
def test_put_refuses_what_holds_no_rows(tool, pool, name, words):
    text, hint = tool.refused("put", f"{pool.spec.name}/kv", name)
    assert words in text and hint


NPY = "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }"


def npy(descr, shape):
    text = (NPY % (descr, shape)).encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("shape,words", [("18446744073709551615, 512", "ends before its last row"),
                                         ("4294967296, 4294967296, 512", "is not one of rows"),
                                         ("99999999999999999999, 512", "not that of a plain array"),
                                         ("36028797018963968, 512", "ends before its last row"),
                                         ("2, 512", "ends before its last row")])
def test_put_of_arrays_larger_than_their_file(tool, pool, tmp_path, shape, words):
    (tmp_path / "a.npy").write_bytes(npy("<f4", shape) + bytes(2048))
    text, hint = tool.refused("put", f"{pool.spec.name}/kv", tmp_path / "a.npy")
    assert words in text and hint


# ---- what reaches a terminal ---------------------------------------------------------------------------------------

EVIL = "\x1b]0;title\x07\x1b[31mred\u009b1m"


def on_terminal(tool, *arguments):
    """What a terminal gets of it, whatever its exit status."""
    master, slave = pty.openpty()
    process = subprocess.Popen(tool.command(*arguments), stdin=slave, stdout=slave, stderr=slave,
                               env=environment(TERM="xterm-256color"))
    os.close(slave)
    output = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        output += piece
    os.close(master)
    process.wait(SECONDS_MAX)
    return output


def noted(method, reply):
    """A daemon that checks nothing: notes and devices of any bytes."""
    if method != "DescribePool":
        return reply
    pool = pb.Pool.FromString(reply)
    pool.spec.placements[0] = EVIL
    pool.regions[0].spec.note = EVIL
    return pool.SerializeToString()


def test_no_escape_of_others_reaches_the_terminal(daemon, tool, pool, tmp_path):
    (tmp_path / f"{EVIL}.npy").write_bytes(npy(EVIL[:8], "1, 512") + bytes(2048))
    with Proxy(tmp_path / "p.sock", f"unix:{daemon.socket}", noted) as proxy:
        output = on_terminal(Tool(proxy.socket), "pool", "describe", pool.spec.name)
        assert output.count(b"red") >= 1 and b"\x1b]0" not in output and b"\x1b[31mred" not in output, output
    for arguments in (["put", f"{pool.spec.name}/kv", tmp_path / f"{EVIL}.npy"],
                      ["put", f"{pool.spec.name}/kv", f"/none/{EVIL}"], ["pool", "describe", EVIL], [EVIL],
                      ["blocks", f"--{EVIL}"], ["get", f"{pool.spec.name}/kv", "f", "--slots", EVIL],
                      ["put", f"{pool.spec.name}/{EVIL}", "f"]):
        output = on_terminal(tool, *arguments)
        assert b"\x1b]0" not in output and b"\x1b[31mred" not in output and b"\xc2\x9b" not in output, output
        assert b"red" in output or b"<" in output or b"\\x1b" in output, output


def test_paths_that_are_no_utf_8(tool, pool, tmp_path):
    done = subprocess.run([*tool.command("--json", "put", f"{pool.spec.name}/kv"), b"/none/\xff\xfe"],
                          capture_output=True, check=False, timeout=SECONDS_MAX, env=environment())
    assert done.returncode == 1 and "\\xff" in only_error(done.stdout)["text"]


# ---- --json --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments,status", [
    ([], 2), (["bogus"], 2), (["pool"], 2), (["pools", "--bogus"], 2), (["--bogus", "pools"], 2), (["blocks"], 2),
    (["blocks", ""], 2), (["blocks", "x", "y"], 2), (["--timeout", "x", "pools"], 2), (["-s", "", "pools"], 2),
    (["-s", "tcp:127.0.0.1:1", "pools"], 2), (["-s", "/none", "pools"], 3), (["-s", "/", "pools"], 3),
    (["blocks", "none"], 1), (["get", "none/kv", "f", "--slots", "0"], 1), (["plan", "slots"], 2),
    (["plan", "slots", "--tokens", "0-9", "--per-block", "4", "--table", "0"], 1), (["put", "none/kv", "f"], 1),
    (["walkthrough", "--device", "none:0"], 1), (["pool", "create", "x"], 2), (["blocks", "x", "--count", "0"], 2)])
def test_json_is_one_document_whatever_comes_of_it(tool, arguments, status):
    done = tool.run("--json", *arguments, status=status)
    error = only_error(done.stdout)
    assert done.stderr.startswith(f"kvpoolctl: {error['text']}")
    assert error.get("hint") and done.stderr.endswith(f"hint: {error['hint']}\n")
    if arguments and status == 2:  # wherever it stands
        assert only_error(tool.run(*arguments, "--json", status=2).stdout) == error


def test_json_of_a_walkthrough_whose_pools_stay(daemon, client, tmp_path):
    """The result is there, and that it could not be undone."""
    def refuse(method, reply):
        assert method != "DeletePool"  # ends the call with an error
        return reply
    with Proxy(tmp_path / "p.sock", f"unix:{daemon.socket}", refuse) as proxy:
        done = Tool(proxy.socket).run("--json", "walkthrough", status=1)
    document = json.loads(done.stdout)
    assert document["passed"] is True and "DeletePool" in document["error"]["text"]
    assert "kvpoolctl pool delete --force walkthrough-" in document["error"]["hint"]
    for name in walkthrough_pools(client):  # the daemon did it, and was not believed
        client.delete_pool(next(p.pool_id for p in client.pools() if p.spec.name == name))


# ---- walkthrough ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [0, 1])
def test_walkthrough_into_a_pipe_that_closes_leaves_nothing(client, tool, reads):
    out, into = os.pipe()
    process = subprocess.Popen(tool.command("walkthrough"), stdout=into, stderr=subprocess.PIPE, text=True,
                               env=environment())
    os.close(into)
    if reads:
        assert os.read(out, 1)
    os.close(out)
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode in ((0, 1) if reads else (1,)), err  # all of it may have been written by then
    assert walkthrough_pools(client) == []


@pytest.mark.parametrize("late", ["CreatePool", "StoreRows"])
def test_walkthrough_deletes_what_was_made_too_late(daemon, client, tmp_path, late):
    """The daemon has done it; that nobody was told in time."""
    release = threading.Event()

    def delay(method, reply):
        if method == late:
            release.wait(SECONDS_MAX)
        return reply
    with Proxy(tmp_path / "p.sock", f"unix:{daemon.socket}", delay) as proxy:
        done = Tool(proxy.socket).run("--timeout", 500, "walkthrough", status=1)
        release.set()
    assert f"{late}: no answer" in done.stderr
    assert walkthrough_pools(client) == []


@pytest.mark.parametrize("pause_ms", [10, 40, 80, 120])
def test_walkthrough_told_twice_to_end_leaves_nothing(client, tool, pause_ms):
    """As timeout(1) does: the signal for the child, and again for its group."""
    process = subprocess.Popen(tool.command("walkthrough"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env=environment())
    time.sleep(pause_ms / 1000)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.wait(SECONDS_MAX)
    assert walkthrough_pools(client) == []


def test_walkthrough_tells_of_pools_that_a_killed_one_left(client, tool):
    left = client.create_pool("walkthrough-0123456789abcdef-window", 64, 4, REGIONS)
    done = tool.run("walkthrough")
    assert f"kvpoolctl pool delete {left.spec.name}" in done.stderr and "PASS" in done.stdout
    client.delete_pool(left.pool_id)
    assert tool.run("walkthrough").stderr == ""


# ---- signals, and daemons that hang or die -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["put", "get", "walkthrough"])
def test_ctrl_c_while_the_daemon_hangs(start_daemon, rows, tmp_path, command):
    """However long a call may take, a signal ends it."""
    daemon = start_daemon()
    client = daemon.client()
    client.create_pool("p", 64, 40, REGIONS)
    executor = client.device("host:0").executor_pid
    tool = Tool(daemon.socket)
    arguments = dict(put=["p/kv", rows], get=["p/kv", tmp_path / "f", *SLOTS], walkthrough=[])[command]
    os.kill(executor, signal.SIGSTOP)  # a call that has begun doesn't end
    process = tool.start("--json", "--timeout", LONG_MS, command, *arguments)
    if command == "get":
        wait_until(lambda: any(str(tmp_path) in path for path in open_files(process.pid)), "its file")
    elif command == "put":
        wait_until(lambda: any(s.blocks for s in client.list_sessions()), "its blocks")
    else:
        wait_until(lambda: any("walkthrough-" in name for name in memory.names(daemon.pid)), "the pool it asks for")
    os.kill(daemon.pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=SECONDS_MAX)
    os.kill(daemon.pid, signal.SIGCONT)
    os.kill(executor, signal.SIGCONT)
    assert process.returncode == 130, err
    assert "interrupted" in err and only_error(out)["status"] in ("cancelled", "deadline_exceeded")
    if command == "walkthrough":  # nobody could delete them, and it doesn't say that they are
        assert "are deleted" not in err and "pool delete --force walkthrough-" in err
        wait_until(lambda: not client.list_sessions(), "the session's end")


def test_a_walkthrough_interrupted_before_its_session(start_daemon):
    daemon = start_daemon()
    client = daemon.client()
    os.kill(daemon.pid, signal.SIGSTOP)
    process = Tool(daemon.socket).start("--timeout", LONG_MS, "walkthrough")
    wait_until(lambda: awaits(process.pid, signal.SIGTERM), "its wait for signals")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS_MAX)
    os.kill(daemon.pid, signal.SIGCONT)
    assert process.returncode == 130 and "deleted" not in err, err
    assert not client.pools()


def test_the_end_of_a_hold_while_the_daemon_hangs(start_daemon, rows):
    """What was held ends with the connection: that is no failure, and nobody waits for an answer."""
    daemon = start_daemon()
    daemon.client().create_pool("p", 64, 40, REGIONS)
    process = Tool(daemon.socket).start("--json", "--timeout", LONG_MS, "put", "p/kv", rows, "--hold")
    assert json.loads(process.stdout.readline())["held"]
    os.kill(daemon.pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS_MAX)
    os.kill(daemon.pid, signal.SIGCONT)
    assert (process.returncode, out, err) == (0, "", "")
    wait_until(lambda: not daemon.client().list_sessions(), "the session's end")


def takes_signals(process):
    """By the thread that waits for them: everybody else has them blocked."""
    with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
        blocked = next(line.split()[1] for line in status if line.startswith("SigBlk:"))
    return int(blocked, 16) & 1 << signal.SIGINT - 1


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", [["info"], ["pools"], ["blocks", "p"], ["sessions"], ["dump", "p/kv", 0],
                                     ["pool", "describe", "p"], ["pool", "delete", "p"], ["doctor"]], ids=str)
def test_a_signal_is_told_as_a_document(start_daemon, command, by):
    daemon = start_daemon()
    daemon.client().create_pool("p", 64, 40, REGIONS)
    os.kill(daemon.pid, signal.SIGSTOP)
    process = Tool(daemon.socket).start("--json", "--timeout", LONG_MS, *command)
    wait_until(lambda: takes_signals(process), "its readiness for signals")
    process.send_signal(by)
    out, err = process.communicate(timeout=SECONDS_MAX)
    os.kill(daemon.pid, signal.SIGCONT)
    assert (process.returncode, err) == (130, "kvpoolctl: interrupted\n")
    assert only_error(out)["status"] == "cancelled"


def test_a_pipe_that_nobody_reads_ends_a_look_silently(tool):
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(tool.command("info"), stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE,
                          env=environment()) as process:
        os.close(writer)
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE


def test_put_whose_daemon_dies(start_daemon, rows):
    daemon = start_daemon()
    client = daemon.client()
    client.create_pool("p", 64, 40, REGIONS)
    executor = client.device("host:0").executor_pid
    tool = Tool(daemon.socket)
    os.kill(executor, signal.SIGSTOP)
    process = tool.start("put", "p/kv", rows)
    wait_until(lambda: any(s.blocks for s in client.list_sessions()), "its blocks")
    process.send_signal(signal.SIGSTOP)  # within a call, or between two
    daemon.process.kill()
    os.kill(executor, signal.SIGCONT)
    daemon.kill()
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 3, err
    assert "\nhint: start it" in err, err
    daemon.remove()


def test_a_daemon_that_hangs_is_not_reached(start_daemon):
    daemon = start_daemon()
    os.kill(daemon.pid, signal.SIGSTOP)
    text, hint = Tool(daemon.socket).refused("--timeout", 200, "pools", status=3)
    os.kill(daemon.pid, signal.SIGCONT)
    assert "no answer" in text and hint


def test_sockets_that_are_none(tool, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    for path, words in ((plain, "is a file, not a socket"), (tmp_path, "is a directory, not a socket")):
        _, hint = tool.refused("--socket", path, "pools", status=3)
        assert f"{path} {words}" in hint
    assert "unix socket" in tool.refused("--socket", "tcp:127.0.0.1:5", "pools", status=2)[0]


def test_pools_of_a_daemon_that_starts(start_daemon, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow.chmod(0o755)
    daemon = start_daemon("--pool", '{ name="a"; block_size=64; num_blocks=4; regions=({ name="k"; format="v41"; '
                          'num_layers=1; }); }', executor=slow, wait=False)
    tool = Tool(daemon.socket)
    wait_until(lambda: subprocess.run(tool.command("info"), capture_output=True, env=environment(),
                                      timeout=SECONDS_MAX, check=False).returncode == 0, "the daemon")
    assert tool.run("pools").stdout == "no pools yet: the daemon is starting\n"


# ---- words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments,words", [
    (["blocks", "p", "--count", "0"], "--count 0: a number from 1 to"),
    (["blocks", "p", "--rows", "0"], "--rows 0: a number from 1 to"),
    (["blocks", ""], "an argument is empty"),
    (["put", "p/kv", "f", "--name", ""], "--name: its value is empty"),
    (["get", "p/kv", "f", "--slots", "0-3000000000"], "numbers go up to 2147483647"),
    (["get", "p/kv", "f", "--slots", "9-3"], "a range begins with the smaller number"),
    (["get", "p/kv", "f", "--blocks", "0-2147483647"], "more than 16777216 numbers"),
    (["get", "p/kv", "f", "--blocks", "1,,2"], "a list like 0-15,32 is wanted"),
    (["plan", "slots", "--tokens", "0-9", "--per-block", "0"], "--per-block 0: a number from 1 to"),
    (["pool", "create", "p", "--block-size", "0"], "--block-size 0: a number from 1 to"),
    (["pool", "create", "p", "--blocks", "0"], "--blocks 0: a number from 1 to"),
    (["pool", "create", "p", "--region", "name=a,format=v41,name=b"], "name= is there twice"),
    (["pool", "create", "p", "--region", "name=a,format=v41,ratio=0"], "ratio=0: a number from 1 to"),
    (["pool", "create", "p", "--region", "name=a,format=v41,layers=0"], "layers=0: a number from 1 to"),
    (["pool", "create", "p", "--region", "name=,format=v41"], "name= is empty")])
def test_command_lines_are_refused_with_what_is_wanted(tool, arguments, words):
    text, hint = tool.refused(*arguments, status=2)
    assert words in text and hint.endswith("--help")


def test_targets_without_a_pool(tool):
    text, hint = tool.refused("put", "/kv", "f")
    assert "which pool?" in text and "pools --names" in hint


def test_visible_columns_need_no_block_size(tool):
    """20 tokens, 8 of them new, ratio 4: row at position p sees floor((p + 1) / 4) columns, five at most."""
    document = tool.json("plan", "visible", "--sequence", "20,8", "--ratio", "4")
    assert document["ks"] == [0] * 8
    assert document["ke"] == [min(5, (p + 1) // 4) for p in range(12, 20)]
