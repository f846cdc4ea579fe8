"""Completion of kvpoolctl: bash as its readline calls it, zsh typed into on a terminal."""
import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from support.tool import SECONDS_MAX, Tool, environment, program

FOLDER = Path(__file__).resolve().parents[2] / "client" / "kvpoolctl" / "completion"


@pytest.fixture
def tool(daemon):
    return Tool(daemon.socket)


@pytest.fixture
def pool(client, pool_name):
    made = client.create_pool(f"{pool_name}-completed", 64, 4, [dict(name="kv", format="v41", num_layers=1)])
    yield made
    client.delete_pool(made.pool_id)


def bash(*words, breaks=None, socket="/none"):
    """What bash offers for the last word; the words are taken apart as readline does, at = where that is a break."""
    script = f'PATH={Path(program()).parent}:$PATH; source "{FOLDER}/kvpoolctl.bash"; COMP_WORDS=("$@"); ' \
        'COMP_CWORD=$(($# - 1)); _kvpoolctl; printf "%s\\n" "${COMPREPLY[@]}"'
    if breaks is None:
        # Behind a last = readline's word is the = itself.
        words = [part for word in words
                 for part in (filter(None, re.split("(=)", word)) if word.startswith("--") else [word])]
    else:
        script = f"COMP_WORDBREAKS='{breaks}'; {script}"
    done = subprocess.run(["bash", "-c", script, "bash", "kvpoolctl", *words], capture_output=True, text=True,
                          env=environment(KVPOOLD_SOCKET=socket), check=True, timeout=SECONDS_MAX)
    assert done.stderr == ""
    return sorted(done.stdout.split())


def test_bash_values_behind_an_equals_sign():
    assert bash("pool", "create", "--kind=r") == ["ring"]
    assert bash("pool", "create", "--kind=") == ["paged", "ring"]
    assert bash("get", "p/kv", "f", "--as=re") == ["record"]
    assert bash("get", "p/kv", "f", "--slots=1") == []
    assert bash("pool", "create", "--kind=r", breaks=" \t\n") == ["--kind=ring"]


def test_bash_asks_the_daemon_that_is_named(tool, pool):
    name = pool.spec.name
    for socket in (f"--socket={tool.socket}", f"-s{tool.socket}"):
        assert bash(socket, "pool", "describe", "") == [name]
        assert bash("blocks", socket, name[:-1]) == [name]
        assert bash(socket, "put", f"{name}/") == [f"{name}/kv"]
    assert bash(f"--socket={tool.socket}", "blocks", "", breaks=" \t\n") == [name]
    assert bash("blocks", "") == []


class Zsh:
    """An interactive zsh on a terminal; ^G tells the line and empties it."""

    def __init__(self, folder):
        (folder / ".zshrc").write_text(
            f"fpath=({FOLDER} $fpath); autoload -Uz compinit; compinit -D -u; bindkey -e; PS1='%% '\n"
            "tell() { zle -I; print -r -- \"<<$BUFFER>>\"; BUFFER= }; zle -N tell; bindkey '^G' tell\n"
            "unsetopt list_beep; setopt no_list_types; print READY\n")
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe("zsh", ["zsh", "-d", "-i"], environment(
                TERM="dumb", ZDOTDIR=str(folder), HOME=str(folder),
                PATH=f"{Path(program()).parent}:{os.environ['PATH']}"))
        self.read_until("READY")

    def read_until(self, pattern):
        seen = ""
        deadline = time.monotonic() + SECONDS_MAX
        while not re.search(pattern, seen):
            assert time.monotonic() < deadline, seen
            if select.select([self.fd], [], [], 0.1)[0]:
                seen += os.read(self.fd, 65536).decode(errors="replace")
        return re.search(pattern, seen)

    def complete(self, line):
        """The line that Tab makes of it."""
        os.write(self.fd, f"kvpoolctl {line}\t\x07".encode())
        return self.read_until("<<kvpoolctl (.*?)>>")[1]

    def close(self):
        os.close(self.fd)
        os.waitpid(self.pid, 0)


@pytest.fixture
def zsh(tmp_path):
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh")
    shell = Zsh(tmp_path)
    yield shell
    shell.close()


def test_zsh(tool, pool, zsh):
    name = pool.spec.name
    assert zsh.complete("sess") == "sessions "
    assert zsh.complete("pool desc") == "pool describe "
    assert zsh.complete("plan comp") == "plan compressed "
    assert zsh.complete("blocks --ro") == "blocks --rows "
    assert zsh.complete("pool create --kind r") == "pool create --kind ring "
    assert zsh.complete("pool create --kind=r") == "pool create --kind=ring "
    assert zsh.complete("get p/kv f --as=re") == "get p/kv f --as=record "
    for socket in (f"--socket={tool.socket}", f"--socket {tool.socket}", f"-s {tool.socket}", f"-s{tool.socket}"):
        assert zsh.complete(f"{socket} blocks {name[:-3]}") == f"{socket} blocks {name} "
        assert zsh.complete(f"{socket} put {name}/") == f"{socket} put {name}/kv "
