"""Clients that work all the time while a test breaks things around them."""
import threading

import numpy as np

from support.catalogue import V41, Geometry
from support.device import DEVICE
from support.errors import RpcFailure, StepFailure
from support.process import wait_until
from support.traffic import Lane, random_rows

TOKENS, BLOCKS = 64, 160
GEOMETRY = Geometry(V41, TOKENS, BLOCKS)
KV = {"name": "kv", "format": "v41", "num_layers": 1}


def lane_of(session, pool, first, count, rng, geometry=GEOMETRY, device=DEVICE):
    """A lane on a range of blocks, with rows to store."""
    made = Lane(session, geometry, pool.pool_id, session.allocate_range(pool.pool_id, first, count), device=device)
    made.write(random_rows(rng, V41, made.count))
    return made


class Worker(threading.Thread):
    """A client that stores and loads its own blocks forever, checking everything that is said to be done."""

    def __init__(self, daemon, pool, first, count, seed, device=DEVICE):
        super().__init__(daemon=True)
        self.client = daemon.client()
        self.session = self.client.open_session(f"worker{seed}")
        self.rng = np.random.default_rng(seed)
        self.lane = lane_of(self.session, pool, first, count, self.rng, device=device)
        self.queue = self.session.open_queue()
        self.stopping, self.done, self.lost, self.error = threading.Event(), 0, 0, None

    def run(self):
        try:
            while not self.stopping.is_set():
                self.round()
        except BaseException as error:  # told by the test that waits for it
            self.error = error

    def round(self):
        try:
            self.lane.write(random_rows(self.rng, V41, self.lane.count))
            self.queue.run(self.lane.long_step(100))  # long enough to be caught in flight
            self.queue.run(self.lane.load_step())
            self.lane.check_out()
            self.done += 1
        except (StepFailure, RpcFailure) as failure:
            assert failure.status == "device_lost", failure
            self.lost += 1

    def wait_progress(self):
        """Until a whole round that began after this call is done."""
        target = self.done + 2
        wait_until(lambda: self.done >= target or self.error, f"{self.session.ref.session_id} gets a round done", 120)
        if self.error:
            raise self.error

    def stop(self):
        self.stopping.set()
        self.join(120)
        assert not self.is_alive()
        if self.error:
            raise self.error
        self.session.close()
