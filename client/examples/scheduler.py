#!/usr/bin/env python3
"""A scheduler's first lines: a sequence of 100 tokens goes into a pool and comes back.

    scheduler.py SOCKET POOL      (any pool whose first region is v41)
"""
import sys

if len(sys.argv) != 3:
    sys.exit(__doc__.strip())
try:
    import numpy as np
    from kvpool_stubs import connect, pb
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: apt-get install python3-numpy python3-grpcio python3-protobuf, and use /usr/bin/python3")

rpc = connect(sys.argv[1])
pool = rpc.DescribePool(pb.DescribePoolRequest(name=sys.argv[2]))
tpb, main = pool.regions[0].tokens_per_block, pb.RegionRef(pool_id=pool.pool_id, region=0, layer=0)

# The stream is the session's liveness: when it ends, so does the session, and its blocks are free again.
events = rpc.OpenSession(pb.OpenSessionRequest(name="scheduler.py"))
session = next(events).opened.session

# Blocks for one sequence: its block table. slot = block * tokens_per_block + offset.
tokens = np.arange(100)
grant = rpc.AllocateBlocks(pb.AllocateBlocksRequest(session=session, pool_id=pool.pool_id, count=-(-100 // tpb)))
table = np.frombuffer(grant.blocks, "<i4")
slots = table[tokens // tpb] * tpb + tokens % tpb
# The load plan, one line a block: [block, first token, end, destination row].
plan = np.array([[b, 0, min(tpb, 100 - i * tpb), i * tpb] for i, b in enumerate(table)], "<i4")

# Memory that both sides see: 100 BF16 rows (a float32's upper half) to store, 100 rows to load into.
rows = (np.random.default_rng(0).standard_normal((100, 512), np.float32).view("<u4") >> 16).astype("<u2")
size = rows.nbytes
buffer = rpc.CreateBuffer(pb.CreateBufferRequest(
    session=session, device=pool.spec.placements[0], bytes=2 * size)).buffer_id
rpc.WriteBuffer(iter([pb.WriteBufferRequest(session=session, buffer_id=buffer, data=rows.tobytes())]))
source = pb.View(buffer_id=buffer, offset_bytes=0, rows=100, row_stride_bytes=1024, row_bytes=1024)
out = pb.View(buffer_id=buffer, offset_bytes=size, rows=100, row_stride_bytes=1024, row_bytes=1024)

# One step, two ops in order. It carries the epoch of the allocation, so it can never touch a block reassigned since.
done = rpc.RunStep(pb.StepRequest(session=session, step_id=1, epoch=grant.epoch,
    arrays=[pb.Array(inline=slots.astype("<i4").tobytes()), pb.Array(inline=plan.tobytes())],
    ops=[pb.Op(store=pb.StoreOp(region=main, source=source, slots=0)),
         pb.Op(load=pb.LoadOp(region=main, segments=1, total_k=100, out=out))]))

chunks = rpc.ReadBuffer(pb.ReadBufferRequest(session=session, buffer_id=buffer, offset_bytes=size, bytes=size))
back = np.frombuffer(b"".join(chunk.data for chunk in chunks), "<u2").reshape(100, 512)
a, b = ((x.astype("<u4") << 16).view("<f4") for x in (rows, back))
print(f"{done.reports[0].rows_stored} rows stored, {done.reports[1].rows_loaded} loaded back, "
      f"relative error {np.linalg.norm(b - a) / np.linalg.norm(a):.4f}")

rpc.FreeBlocks(pb.FreeBlocksRequest(session=session, pool_id=pool.pool_id, blocks=grant.blocks))
rpc.CloseSession(pb.CloseSessionRequest(session=session))
