"""The examples, as the README and their first lines have them run."""
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import build_dir
from support.device import ON_GPU
from support.libkvpool import environment
from support.stubs import pb
from support.tool import Tool

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "examples"
SECONDS_MAX = 300


def run(name, *arguments, python=(sys.executable,), env=None):
    return subprocess.run([*python, EXAMPLES / name, *map(str, arguments)], stdin=subprocess.DEVNULL, env=env,
                          capture_output=True, text=True, timeout=SECONDS_MAX, check=False)


def test_scheduler(client, daemon, pool_name):
    pool = client.create_pool(pool_name, 64, 4, [dict(name="kv", format="v41", num_layers=1)])
    done = run("scheduler.py", daemon.socket, pool_name)
    assert done.returncode == 0, done.stderr
    error = re.fullmatch(r"100 rows stored, 100 loaded back, relative error (0\.\d+)\n", done.stdout)
    assert 0.02 < float(error[1]) < 0.03  # e4m3's rounding: see first_session.py
    client.delete_pool(pool.pool_id)


@pytest.mark.skipif(ON_GPU, reason="its rows are numpy's")
def test_worker(client, daemon, pool_name):
    pool = client.create_pool(pool_name, 64, 4, [dict(name="kv", format="v41", num_layers=1)])
    done = run("worker.py", daemon.socket, pool_name, env=environment())
    assert done.returncode == 0, done.stderr
    error, scales = re.fullmatch(r"100 rows stored, 100 loaded back, relative error (0\.\d+); the first record's "
                                 r"scales: \[([\d, ]+)\]\n", done.stdout).groups()
    assert 0.02 < float(error) < 0.03  # e4m3's rounding: see first_session.py
    assert len(scales.split(",")) == 16
    assert client.pool(pool.pool_id).free_blocks == 4
    client.delete_pool(pool.pool_id)


def test_prefill(client, daemon):
    done = run("prefill.py", daemon.socket, env=environment())
    assert done.returncode == 0, done.stderr
    error = re.fullmatch(r"100 tokens prefilled in 3 chunks by 2 layers, 1 decoded \(relative error (0\.\d+)\), "
                         r"7 blocks copied and zeroed: all as numpy has it\n", done.stdout)
    assert 0 < float(error[1]) < 0.0040  # 2^-8: two roundings to BF16
    assert not [pool.spec.name for pool in client.pools() if pool.spec.name.startswith("prefill")]


@pytest.mark.parametrize("line, changed, words", [
    ("TOPK, window_rows + count, columns", "TOPK, window_rows + count - 1, columns", "what attention reads"),
    ('"store_slots": plan.swa_slots(where, WINDOW)', '"store_slots": plan.swa_slots(where, WINDOW)[::-1]',
     "what attention reads"),
    ("plan.swa_pivots(where, WINDOW), WINDOW", "plan.swa_pivots(where, WINDOW) + np.int32([0, 0, 1, 0]), WINDOW",
     "what attention reads"),
    ("EPS,\n", "0.1,\n", "the decoded token's rows"),
    ("[position], cos_sin", "[position - 1], cos_sin", "the decoded token's rows"),
    ("np.stack((sequence.table, blocks)", "np.stack((sequence.table[::-1], blocks)", "a copy of its blocks"),
    ("step.zero_blocks(paged, blocks)", "step.zero_blocks(paged, blocks[1:])", "zeroed blocks"),
])
def test_prefill_finds_faults(client, daemon, tmp_path, line, changed, words):
    """Its checks are checks: with something wrong in a step it says what is, and its pools go all the same."""
    source = (EXAMPLES / "prefill.py").read_text()
    assert line in source
    (tmp_path / "prefill.py").write_text(source.replace(line, changed, 1))
    done = subprocess.run([sys.executable, tmp_path / "prefill.py", daemon.socket], stdin=subprocess.DEVNULL,
                          env=environment(), capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 1 and re.search(f"({words}): not as numpy has it", done.stderr), done.stderr
    assert not [pool.spec.name for pool in client.pools() if pool.spec.name.startswith("prefill")]


def built(name, *arguments):
    return subprocess.run([build_dir() / "client" / name, *map(str, arguments)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=SECONDS_MAX, check=False)


def engine(*arguments):
    return built("engine", *arguments)


@pytest.mark.skipif(ON_GPU, reason="it writes rows as its own memory")
def test_worker_in_c(client, daemon, pool_name):
    pool = client.create_pool(pool_name, 64, 4, [dict(name="kv", format="v41", num_layers=1)])
    done = built("worker", daemon.socket, pool_name)
    assert done.returncode == 0, done.stderr
    # Four-bit numbers of one group: its largest, 3.0, is scaled to 384, so 1.0 is 128 = 2^7 and 2.0 is 2^8.
    assert done.stdout == ("100 rows stored, 100 loaded back, all as they were; the first record begins with "
                           "70 78 7c\n")
    assert client.pool(pool.pool_id).free_blocks == 4 and not client.list_sessions()
    client.delete_pool(pool.pool_id)


@pytest.mark.skipif(ON_GPU, reason="its records are numpy's")
def test_the_package_s_readme(client, daemon, pool_name):
    """What it shows first runs as it stands, but for torch."""
    pool = client.create_pool(pool_name, 64, 4, [dict(name="kv", format="v41", num_layers=1)])
    text = (EXAMPLES.parent / "python" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert '"main"' in text and "torch.from_dlpack(records), " in text
    text = text.replace('"main"', repr(pool_name)).replace("torch.from_dlpack(records), ", "")
    done = subprocess.run([sys.executable, "-c", f"import numpy\n{text}\nprint(reports[0].rows_stored)"],
                          env={**environment(), "KVPOOLD_SOCKET": str(daemon.socket)}, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0 and done.stdout == "64\n", done.stderr
    client.delete_pool(pool.pool_id)


def test_worker_in_c_says_what_is_wrong(client, daemon, pool_name):
    done = built("worker", daemon.socket, "nobody's")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith("pool: "), done.stderr
    pool = client.create_pool(pool_name, 64, 1, [dict(name="kv", format="v41", num_layers=1)])
    done = built("worker", daemon.socket, pool_name)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith("allocate: "), done.stderr
    client.delete_pool(pool.pool_id)


def test_all_examples_are_installed(tmp_path):
    """And with the Python package nothing that a build of it left behind."""
    subprocess.run(["cmake", "--install", build_dir()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True,
                   env={**os.environ, "DESTDIR": str(tmp_path)}, timeout=SECONDS_MAX)
    installed, = tmp_path.rglob("kvpoold/examples")
    known = {example.name for example in EXAMPLES.iterdir() if example.is_file()}
    assert {path.name for path in installed.iterdir()} == known
    package = {path.name for path in (installed.parent / "python").iterdir()}
    assert package == {"README.md", "kvpool", "pyproject.toml"}


@pytest.fixture
def engine_pools(client):
    """Deletes what a test made for the engine, whose sequences have all gone."""
    before = {pool.pool_id for pool in client.pools()}
    yield
    for pool in client.pools():
        if pool.pool_id not in before:
            assert pool.free_blocks == pool.spec.num_blocks
            client.delete_pool(pool.pool_id)


def told_commands(done):
    """The commands of an engine that found no pools, run word for word; with the pools' names."""
    commands = re.findall(r"^  (kvpoolctl .*)$", done.stderr, re.M)
    names = []
    for command in commands:
        program, *words = shlex.split(command)
        subprocess.run([build_dir() / "client" / "kvpoolctl" / program, *words], check=True, timeout=SECONDS_MAX,
                       stdin=subprocess.DEVNULL)
        names.append(words[words.index("create") + 1])
    return names


def test_engine_without_pools(client, daemon, engine_pools):
    """It says what makes them, and that does: word for word, and as its own comment says."""
    done = engine(daemon.socket, "engine", "engine-window", 3)
    assert done.returncode == 1 and done.stdout == ""
    assert 'no pool "engine"; this' in done.stderr and 'no pool "engine-window"; this' in done.stderr
    source = (EXAMPLES / "engine.c").read_text()
    for command in re.findall(r"^ \*   (kvpoolctl pool create .*)$", source, re.M):
        assert f"  {command} --socket {daemon.socket}\n" in done.stderr
    assert told_commands(done) == ["engine", "engine-window"]
    done = engine(daemon.socket, "engine", "engine-window", 3)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("3 sequences"), done.stderr


PAGED = dict(block_size=64, num_blocks=16, regions=[dict(name="kv", format="v41", num_layers=1, compression_ratio=4)])
RING = dict(block_size=128, num_blocks=4, regions=[dict(name="swa", format="v41", num_layers=2)], kind=pb.POOL_RING)


@pytest.mark.parametrize("paged, ring", [
    (dict(kind=pb.POOL_RING, regions=[dict(name="kv", format="v41", num_layers=1)]), {}),
    (dict(regions=[dict(name="kv", format="v41_fp4", num_layers=1, compression_ratio=4)]), {}),
    (dict(num_blocks=9), {}),  # 576 tokens, of a sequence that may have 600
    (dict(block_size=8, num_blocks=100), {}),  # more blocks than it has room for
    ({}, dict(kind=pb.POOL_PAGED)),
    ({}, dict(regions=[dict(name="swa", format="bf16", num_layers=2)])),
    ({}, dict(regions=[dict(name="swa", format="v41", num_layers=1)])),
    ({}, dict(block_size=257)),
    (dict(num_blocks=1), dict(block_size=512)),
])
def test_engine_with_other_pools(client, daemon, pool_name, engine_pools, paged, ring):
    names = [pool_name, f"{pool_name}-ring"]
    client.create_pool(names[0], **{**PAGED, **paged})
    client.create_pool(names[1], **{**RING, **ring})
    done = engine(daemon.socket, *names, 3)
    assert done.returncode == 1 and done.stdout == ""
    wrong = [name for name, changed in zip(names, (paged, ring)) if changed]
    assert re.findall(r'^pool "(.*)" is not as', done.stderr, re.M) == wrong
    assert told_commands(done) == [f"{name}-fit" for name in wrong]
    done = engine(daemon.socket, *[f"{name}-fit" if name in wrong else name for name in names], 3)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("3 sequences"), done.stderr


def test_engine(client, daemon, engine_pools):
    """In the pools that its own comment makes."""
    source = (EXAMPLES / "engine.c").read_text()
    commands = re.findall(r"^ \*   kvpoolctl (pool create .*)$", source, re.M)
    assert len(commands) == 2
    for command in commands:
        Tool(daemon.socket).run(*command.split())
    done = engine(daemon.socket)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, totals = done.stdout.splitlines()
    found = [re.fullmatch(r"sequence +(\d+): prompt +(\d+) in (\d+) chunks, +(\d+) tokens decoded, +(\d+) blocks, "
                          r"ring (\d+)", line).groups() for line in lines]
    sequences = [tuple(map(int, groups)) for groups in found]
    assert sorted(s[0] for s in sequences) == list(range(12))
    for _, prompt, chunks, decoded, blocks, ring in sequences:
        assert chunks == -(-prompt // 96) and blocks == -(-(prompt + decoded) // 64) and 0 <= ring < 4
    # Both layers' rows of every chunk: a window of 128, the chunk, the compressed tokens so far or one row of zeros.
    ends = [min(prompt, chunk * 96 + 96) for _, prompt, chunks, *_ in sequences for chunk in range(chunks)]
    rows = 2 * (sum(128 + max(1, end // 4) for end in ends) + sum(s[1] for s in sequences))
    assert re.fullmatch(rf"12 sequences, \d+ steps, {rows} assembled rows as they were made, \d+\.\d MB read and "
                        r"written", totals), totals


def test_first_session(client, daemon):
    done = run("first_session.py", daemon.socket, "--tokens", 300)
    assert done.returncode == 0, done.stdout + done.stderr
    formats = [f.name for f in client.info().formats]
    assert re.findall(r"^(\w+) +300 .* pass$", done.stdout, re.M) == formats
    assert done.stdout.endswith(f"\n{len(formats)} formats pass, 0 fail\n")
    assert "first-session" not in [p.spec.name for p in client.pools()]


@pytest.mark.parametrize("name,status,words", [("scheduler.py", 1, "scheduler.py SOCKET POOL"),
                                               ("first_session.py", 2, "usage: first_session.py"),
                                               ("worker.py", 1, "worker.py SOCKET POOL"),
                                               ("prefill.py", 1, "prefill.py SOCKET")])
def test_without_arguments(name, status, words):
    done = run(name, env=environment())
    assert done.returncode == status and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["scheduler.py", "first_session.py", "worker.py", "prefill.py"])
def test_without_packages(name):
    """-S: without the folder that distributions put packages in; -I: without the user's."""
    done = run(name, "a", "b", python=(sys.executable, "-S", "-I"))
    assert done.returncode == 1 and "apt-get install python3-numpy" in done.stderr and "Traceback" not in done.stderr


def test_the_readme_names_everything():
    """Each op, each plan command, each example."""
    readme = (EXAMPLES.parents[1] / "README.md").read_text()
    ops = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ", readme.split("| op | does |")[1].split("\n\n")[0], re.M)
    assert {op for line in ops for op in re.findall(r"\w+", line)} == {field.name for field in pb.Op.DESCRIPTOR.fields}
    plans = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ", readme.split("| `kvpoolctl plan` |")[1].split("\n\n")[0], re.M)
    told = subprocess.run([build_dir() / "client" / "kvpoolctl" / "kvpoolctl", "--help"], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=SECONDS_MAX, check=True).stdout
    known = set(re.findall(r"^ +plan (\w+) ", told, re.M))
    assert {name for line in plans for name in re.findall(r"\w+", line)} == known
    for example in EXAMPLES.iterdir():
        assert example.name in readme or example.name in ("kvpool_stubs.py", "__pycache__"), example
