"""The Python examples, as the README has them run."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "examples"
SECONDS_MAX = 300


def run(name, *arguments, python=(sys.executable,)):
    return subprocess.run([*python, EXAMPLES / name, *map(str, arguments)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=SECONDS_MAX, check=False)


def test_scheduler(client, daemon, pool_name):
    pool = client.create_pool(pool_name, 64, 4, [dict(name="kv", format="v41", num_layers=1)])
    done = run("scheduler.py", daemon.socket, pool_name)
    assert done.returncode == 0, done.stderr
    error = re.fullmatch(r"100 rows stored, 100 loaded back, relative error (0\.\d+)\n", done.stdout)
    assert 0.02 < float(error[1]) < 0.03  # e4m3's rounding: see first_session.py
    client.delete_pool(pool.pool_id)


def test_first_session(client, daemon):
    done = run("first_session.py", daemon.socket, "--tokens", 300)
    assert done.returncode == 0, done.stdout + done.stderr
    formats = [f.name for f in client.info().formats]
    assert re.findall(r"^(\w+) +300 .* pass$", done.stdout, re.M) == formats
    assert done.stdout.endswith(f"\n{len(formats)} formats pass, 0 fail\n")
    assert "first-session" not in [p.spec.name for p in client.pools()]


@pytest.mark.parametrize("name,status,words", [("scheduler.py", 1, "scheduler.py SOCKET POOL"),
                                               ("first_session.py", 2, "usage: first_session.py")])
def test_without_arguments(name, status, words):
    done = run(name)
    assert done.returncode == status and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["scheduler.py", "first_session.py"])
def test_without_packages(name):
    """-S: without the folder that distributions put packages in; -I: without the user's."""
    done = run(name, "a", "b", python=(sys.executable, "-S", "-I"))
    assert done.returncode == 1 and "apt-get install python3-numpy" in done.stderr and "Traceback" not in done.stderr
