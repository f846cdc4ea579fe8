"""A worker for tests/e2e/test_containers.py, which copies it to where anybody may read it: numpy and kvpool are all that it
needs. Each line of standard input is a job; each line of standard output says what came of one.

SIGTERM ends it as a worker should end: it detaches.

A job: ticket, pool, blocks, seed. It attaches, stores random rows to all slots of the blocks, loads them back, and looks at
the records in the pool's memory."""
import hashlib
import json
import os
import signal
import sys

import numpy as np

import kvpool


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def round_of(attachment, job):
    with attachment.map_pool(job["pool"]) as pool:
        region, layer = pool.region(0), pool.layer(0, 0)
        per_block, blocks = region.tokens_per_block, job["blocks"]
        count = per_block * len(blocks)
        source, out = attachment.create_buffer(count * 1024), attachment.create_buffer(count * 1024)
        rows, loaded = (np.asarray(b.array("uint16", (count, 512))) for b in (source, out))
        rows[:] = np.random.default_rng(job["seed"]).standard_normal((count, 512), np.float32).view(np.uint32) >> 16
        step = attachment.step()
        step.store(layer, source.view(count, 1024), kvpool.plan.slot_mapping(blocks, per_block, 0, count))
        step.load(layer, kvpool.plan.paged_range(blocks, per_block, 0, count), count, out.view(count, 1024))
        stored, read_back = attachment.run(step)
        return {"stored": stored.rows_stored, "loaded": read_back.rows_loaded, "rows": digest(loaded),
                "records": digest(np.asarray(region.array(layer=0))[blocks])}


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    inside = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "pid", "ipc", "mnt", "net")}
    for line in sys.stdin:
        job = json.loads(line)
        try:
            with kvpool.attach(json.dumps(job["ticket"])) as attachment:
                told = round_of(attachment, job)
                print(json.dumps({**told, "uid": os.geteuid(), "pid": os.getpid(), "namespaces": inside}), flush=True)
                sys.stdin.readline()  # stays attached until it is told to go on
        except kvpool.Error as error:
            print(json.dumps({"refused": error.status.name, "text": str(error)}), flush=True)


main()
