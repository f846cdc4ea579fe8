#!/usr/bin/env python3
"""A scheduler and a worker of its own: the scheduler leases blocks over gRPC, the worker attaches to its session, stores
rows through a ring in shared memory, and reads the records where they lie in the pool.

    worker.py SOCKET POOL      (a pool of a host device whose first region is v41)
"""
import subprocess
import sys

try:
    import numpy as np

    import kvpool
except ImportError as missing:
    sys.exit(f"{missing}: apt-get install python3-numpy, and let PYTHONPATH name client/python, KVPOOL_LIBRARY "
             "a build's client/libkvpool.so")

TOKENS = 100


def scheduler(socket, pool_name):
    """Has the session. Whoever has its ticket may act for it: it goes to the worker through a pipe, not on a command line."""
    with kvpool.Client(socket) as client:
        pool = client.pool(pool_name)
        with client.open_session("scheduler") as session:
            per_block = pool.regions[0]["tokens_per_block"]
            blocks = session.allocate(pool, -(-TOKENS // per_block))
            ticket = session.ticket(pool.placements[0])  # after the lease: it carries the session's epoch
            worker = subprocess.run([sys.executable, __file__, "--worker", pool_name, *map(str, blocks)],
                                    input=ticket.to_json(), text=True)
            session.free(pool, blocks)
    return worker.returncode


def worker(pool_name, blocks):
    with kvpool.attach(sys.stdin.read()) as attachment, attachment.map_pool(pool_name) as pool:
        region = pool.region(0)
        layer, per_block = pool.layer(0, 0), region.tokens_per_block

        # Memory that the daemon and this process share: rows to store, rows to load into. BF16 is a float32's upper half.
        source, out = attachment.create_buffer(TOKENS * 1024), attachment.create_buffer(TOKENS * 1024)
        rows, loaded = (np.asarray(b.array("uint16", (TOKENS, 512))) for b in (source, out))
        rows[:] = np.random.default_rng(0).standard_normal((TOKENS, 512), np.float32).view(np.uint32) >> 16

        step = attachment.step()
        step.store(layer, source.view(TOKENS, 1024), kvpool.plan.slot_mapping(blocks, per_block, 0, TOKENS))
        step.load(layer, kvpool.plan.paged_range(blocks, per_block, 0, TOKENS), TOKENS, out.view(TOKENS, 1024))
        stored, read_back = attachment.run(step)

        # The pool itself, read-only and without a copy: [blocks, tokens, 1, bytes_per_token].
        records = np.asarray(region.array(layer=0))
        first = records[blocks[0], 0, 0]
        a, b = ((x.astype(np.uint32) << 16).view(np.float32) for x in (rows, loaded))
        print(f"{stored.rows_stored} rows stored, {read_back.rows_loaded} loaded back, "
              f"relative error {np.linalg.norm(b - a) / np.linalg.norm(a):.4f}; "
              f"the first record's scales: {first[512:].tolist()}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] == "--worker":
        sys.exit(worker(sys.argv[2], [int(block) for block in sys.argv[3:]]))
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    sys.exit(scheduler(*sys.argv[1:]))
