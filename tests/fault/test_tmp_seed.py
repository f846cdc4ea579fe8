"""Calls given up in the middle, sessions closed under calls, executors killed under both: nothing is left of any of it."""
import os
import random
import signal
import threading
import time

import grpc
import numpy as np
import pytest

from support.client import Step, int32_bytes
from support.errors import RpcFailure
from support.process import wait_until
from support.stubs import pb
from support.worker import BLOCKS, KV, TOKENS

LATENTS = 512
ROW_BYTES = 2 * LATENTS
MIB = 1 << 20


class Caller:
    """One session that begins calls and gives most of them up."""

    def __init__(self, client, pool, blocks, seed):
        self.client, self.rng = client, random.Random(seed)
        self.session = client.open_session(f"caller-{seed}")
        self.region = pb.RegionRef(pool_id=pool.pool_id)
        self.blocks = self.session.allocate_range(pool.pool_id, *blocks)
        self.slots = [int(b) * TOKENS + t for b in self.blocks for t in range(TOKENS)]
        self.ref, self.rpc = self.session.ref, client.rpc
        self.begun, self.heard_out = 0, 0

    def buffer(self):
        reply = self.rpc.CreateBuffer(pb.CreateBufferRequest(session=self.ref, device="host:0", bytes=8 * MIB),
                                      timeout=60)
        return reply.buffer_id

    def nap(self):
        time.sleep(self.rng.choice([0, 0, 0.0005, 0.002, 0.01]))

    def give_up(self, call, answers=False):
        """Waits a little, then cancels, or closes the session, or hears it out. answers: it is a stream of them."""
        self.nap()
        choice = self.rng.random()
        if choice < 0.7:
            call.cancel()
        elif choice < 0.8:
            self.rpc.CloseSession(pb.CloseSessionRequest(session=self.ref), timeout=60)
        if answers:
            for _ in call:
                pass
        else:
            call.result()
        self.heard_out += 1

    def requests(self, first, later, count):
        """A client that dawdles, and may never half-close."""
        yield first
        for _ in range(count):
            self.nap()
            yield later
        if self.rng.random() < 0.3:
            time.sleep(0.05)

    def store_rows(self):
        first = pb.StoreRowsRequest(session=self.ref, epoch=self.session.epoch, region=self.region, row_bytes=ROW_BYTES,
                                    slots=int32_bytes(self.slots), rows=bytes(MIB // 2))
        self.give_up(self.rpc.StoreRows.future(
            self.requests(first, pb.StoreRowsRequest(rows=bytes(MIB)), self.rng.randrange(5)), timeout=60))

    def load_rows(self):
        segments = [(int(b), 0, TOKENS, TOKENS * i) for i, b in enumerate(self.blocks)]
        self.give_up(self.rpc.LoadRows(pb.LoadRowsRequest(
            session=self.ref, epoch=self.session.epoch, region=self.region, segments=int32_bytes(segments),
            total_k=8192), timeout=60), answers=True)

    def write_buffer(self):
        first = pb.WriteBufferRequest(session=self.ref, buffer_id=self.buffer(), data=bytes(MIB))
        self.give_up(self.rpc.WriteBuffer.future(
            self.requests(first, pb.WriteBufferRequest(offset_bytes=3 * MIB, data=bytes(MIB)), self.rng.randrange(8)),
            timeout=60))

    def read_buffer(self):
        self.give_up(self.rpc.ReadBuffer(
            pb.ReadBufferRequest(session=self.ref, buffer_id=self.buffer(), bytes=8 * MIB), timeout=60),
            answers=True)

    def create_buffer(self):
        self.give_up(self.rpc.CreateBuffer.future(
            pb.CreateBufferRequest(session=self.ref, device="host:0", bytes=MIB), timeout=60))

    def release_buffer(self):
        buffer_id = self.buffer()
        call = self.rpc.ReadBuffer(pb.ReadBufferRequest(session=self.ref, buffer_id=buffer_id, bytes=8 * MIB), timeout=60)
        self.rpc.ReleaseBuffer(pb.ReleaseBufferRequest(session=self.ref, buffer_id=buffer_id), timeout=60)
        self.give_up(call, answers=True)

    def step(self, ops):
        source = pb.View(buffer_id=self.buffer(), rows=len(self.slots), row_bytes=ROW_BYTES, row_stride_bytes=ROW_BYTES)
        step = Step()
        slots = step.array(self.slots)
        for _ in range(ops):
            step.store(self.region, source, slots)
        return step.request(self.ref, self.session.epoch)

    def run_step(self):
        self.give_up(self.rpc.RunStep.future(self.step(20), timeout=60))

    def steps(self):
        step = self.step(5)
        self.give_up(self.rpc.Steps(self.requests(step, step, 12), timeout=60), answers=True)

    def dump(self):
        self.give_up(self.rpc.DumpBlocks(pb.DumpBlocksRequest(region=self.region, count=BLOCKS), timeout=60), answers=True)

    def inspect(self):
        self.give_up(self.rpc.InspectRecords.future(
            pb.InspectRecordsRequest(region=self.region, slots=int32_bytes(self.slots[:512])), timeout=60))

    def run(self, calls):
        kinds = [self.store_rows, self.load_rows, self.write_buffer, self.read_buffer, self.create_buffer,
                 self.release_buffer, self.run_step, self.steps, self.dump, self.inspect]
        for _ in range(calls):
            self.begun += 1
            try:
                self.rng.choice(kinds)()
            except (grpc.RpcError, grpc.FutureCancelledError, RpcFailure):
                pass
            if self.session.ended.is_set():
                return


def open_fds(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("kill", [False, True], ids=["clients", "clients and executors"])
def test_nothing_is_left(start_daemon, pool_name, kill):
    daemon = start_daemon()
    client = daemon.client()
    pool = client.create_pool(pool_name, TOKENS, BLOCKS, [KV])
    restarts, fds, begun, heard_out = 0, open_fds(daemon.pid), 0, 0
    for turn in range(6):
        callers = [Caller(client, pool, (16 * i, 16), seed=7000 + 10 * turn + i) for i in range(4)]
        threads = [threading.Thread(target=caller.run, args=(12,)) for caller in callers]
        for thread in threads:
            thread.start()
        while kill and any(thread.is_alive() for thread in threads):
            time.sleep(0.15)
            device = client.device()
            if device.state == pb.DEVICE_SERVING:
                daemon.note_processes()
                os.kill(device.executor_pid, signal.SIGKILL)
                restarts = device.restarts + 1
        for thread in threads:
            thread.join()
        for caller in callers:
            caller.session.abandon()
            begun, heard_out = begun + caller.begun, heard_out + caller.heard_out
        wait_until(lambda: not client.list_sessions(), "every session gone")
        wait_until(lambda: client.pool(pool.pool_id).free_blocks == BLOCKS, "every block free")
        wait_until(lambda: client.device().state == pb.DEVICE_SERVING and client.device().restarts >= restarts,
                   "its executor back")
        wait_until(lambda: client.device().steps_in_flight == 0, "every step retired")
        wait_until(lambda: client.device().buffer_bytes == 0, "every buffer gone, those half made too")
    wait_until(lambda: open_fds(daemon.pid) <= fds, "its descriptors closed")
    assert begun > 100 and 0 < heard_out < begun, f"{begun} calls, {heard_out} heard out: not what this test is about"

    session = client.open_session("after")
    blocks = session.allocate(pool.pool_id, 2)
    rows = np.full((2 * TOKENS, LATENTS), 0x3F80, np.uint16)  # 1.0: v41 keeps it exactly
    region = pb.RegionRef(pool_id=pool.pool_id)
    session.store_rows(region, rows, [int(b) * TOKENS + t for b in blocks for t in range(TOKENS)])
    loaded, _, report = session.load_rows(region, [(int(b), 0, TOKENS, TOKENS * i) for i, b in enumerate(blocks)],
                                          2 * TOKENS)
    assert report.rows_loaded == 2 * TOKENS and loaded.tobytes() == rows.tobytes()
    session.close()
