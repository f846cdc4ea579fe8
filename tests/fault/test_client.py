"""kill -9 of a client that holds a session, blocks, buffers and steps in flight: it leaves nothing, others go on."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from support import memory as raw_memory
from support.process import wait_until
from support.worker import BLOCKS, KV, TOKENS, Worker, lane_of


def start_victim(daemon, pool, first, count):
    return subprocess.Popen(
        [sys.executable, "-B", "-m", "support.victim", f"unix:{daemon.socket}", str(pool.pool_id), str(TOKENS),
         str(BLOCKS), str(first), str(count)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parent.parent)


def test_client_with_steps_in_flight(daemon, client, pool_name):
    pool = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    worker = Worker(daemon, pool, 0, 8, 99)
    worker.start()
    for _ in range(3):
        victim = start_victim(daemon, pool, 64, 64)
        line = victim.stdout.readline()
        assert line, "the victim died by itself"
        told = json.loads(line)
        assert told["session"] in [s.session_id for s in client.list_sessions()]
        worker.wait_progress()
        victim.kill()
        victim.wait()
        victim.stdout.close()
        wait_until(lambda: told["session"] not in [s.session_id for s in client.list_sessions()], "its session gone")
        wait_until(lambda: client.pool(pool.pool_id).free_blocks == BLOCKS - 8, "its blocks free")
        names = set().union(*map(raw_memory.names, (daemon.pid, *daemon.executor_pids())))
        assert not names & {f"kvpool-buffer:{buffer_id}" for buffer_id in told["buffers"]}, "its buffers are there"
        worker.wait_progress()
    worker.stop()
    assert worker.lost == 0, "another session noticed"
    session = client.open_session("heir")
    heir = lane_of(session, pool, 64, 64, np.random.default_rng(3))
    session.run(heir.store_and_load_step())
    heir.check_out()
    session.close()
    client.delete_pool(pool.pool_id)
