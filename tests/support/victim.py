"""A client to be killed: opens a session, takes blocks and buffers, puts long steps in flight, says so, and sleeps.

usage: python3 -m support.victim TARGET POOL_ID TOKENS_PER_BLOCK NUM_BLOCKS FIRST_BLOCK COUNT
"""
import json
import sys
import time

import numpy as np

from support.catalogue import V41, Geometry
from support.client import Client
from support.traffic import Lane, random_rows


def main():
    target = sys.argv[1]
    pool_id, tokens_per_block, num_blocks, first, count = map(int, sys.argv[2:])
    session = Client(target).open_session("victim")
    blocks = session.allocate_range(pool_id, first, count)
    lane = Lane(session, Geometry(V41, tokens_per_block, num_blocks), pool_id, blocks)
    lane.write(random_rows(np.random.default_rng(5), V41, lane.count))
    queues = [session.open_queue() for _ in range(2)]
    steps = [queue.send(lane.long_step(20)) for queue in queues for _ in range(3)]
    queues[0].wait_accepted(steps[0])
    print(json.dumps({"session": session.id, "buffers": [lane.source.id, lane.out.id]}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
