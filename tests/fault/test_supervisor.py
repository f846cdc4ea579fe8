"""kill -9 of the supervisor: no executor, socket or memory is left over, and a new one starts in its place."""
import os
import re
import signal

import numpy as np
import pytest

from support import memory as raw_memory
from support.daemon import Daemon
from support.errors import RpcFailure, StepFailure
from support.process import is_running, wait_until
from support.worker import BLOCKS, KV, TOKENS, lane_of


def test_supervisor_with_everything_going_on():
    rng = np.random.default_rng(5)
    daemon = Daemon()
    client = daemon.client()
    pool = client.create_pool("lost", TOKENS, BLOCKS, [KV])
    session = client.open_session()
    lane = lane_of(session, pool, 0, 128, rng)
    queue = session.open_queue()
    step_id = queue.send(lane.long_step(1000))
    queue.wait_accepted(step_id)
    daemon.kill()  # checks that no executor, socket or memfd is left
    assert session.ended.wait(60)
    with pytest.raises((RpcFailure, StepFailure)):
        queue.wait(step_id)

    with Daemon(directory=daemon.directory) as successor:
        client = successor.client()
        assert not client.pools() and not client.list_sessions()
        pool = client.create_pool("lost", TOKENS, BLOCKS, [KV])
        session = client.open_session()
        lane = lane_of(session, pool, 0, 4, rng)
        session.run(lane.store_and_load_step())
        lane.check_out()
    daemon.remove()


@pytest.mark.parametrize("ends, told", [("stop", "yes"), ("kill", "no")])
def test_what_an_executor_knows_of_the_end(start_daemon, ends, told):
    """One that is told doesn't wait for locks of a supervisor that goes on: that was a second of every stop."""
    daemon = start_daemon()
    log = open(daemon.log_path, encoding="utf-8")
    if ends == "stop":
        daemon.stop()
    else:
        daemon.kill()
    with log:
        assert re.findall(r"executor_stopped device=\S+ code=0 told=(\w+)$", log.read(), re.M) == [told]


def test_supervisor_repeatedly():
    """Often enough to meet every order in which its descriptors may close."""
    daemon = Daemon()
    for _ in range(15):
        daemon.kill()
        daemon_before, daemon = daemon, Daemon(directory=daemon.directory)
        assert daemon.client().info().pid == daemon.pid != daemon_before.pid
    daemon.owns_directory = True
    daemon.stop()


def test_supervisor_and_executor_together():
    daemon = Daemon()
    daemon.note_processes()
    for pid in daemon.executor_pids():
        os.kill(pid, signal.SIGSTOP)  # it can't notice anything yet
    daemon.process.kill()
    daemon.process.wait()
    for pid in daemon.seen_executors:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in daemon.seen_executors), "executors gone")
    assert not raw_memory.holders(daemon.seen_memory)
    successor = Daemon(directory=daemon.directory)  # a socket nobody listens on is in its way
    successor.owns_directory = True
    successor.stop()
