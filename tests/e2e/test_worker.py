"""A worker by the Python package: what it maps, shares and orders, beside a scheduler on the gRPC door."""
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from support import reference
from support.catalogue import FORMATS, INDEX_MXFP8, V41, Geometry
from support.device import DEVICE, ON_GPU
from support.libkvpool import environment, kvpool
from support.process import wait_until
from support.traffic import random_rows, slots_of, whole_block_segments
from support.worker_fixtures import pool, scheduler, session  # fixtures

pytestmark = pytest.mark.skipif(ON_GPU, reason="numpy looks at memory of a host device")

TOKENS, BLOCKS, LAYERS = 16, 24, 2
BLOCK_SIZE = 4 * TOKENS
REGIONS = [{"name": "kv", "format": "v41", "num_layers": LAYERS, "compression_ratio": 4},
           {"name": "index", "format": "index_mxfp8", "num_layers": LAYERS, "compression_ratio": 4},
           {"name": "plain", "format": "bf16", "width": 64, "num_layers": 1, "compression_ratio": 4}]
MS = 60000


@pytest.fixture
def rng():
    return np.random.default_rng(61)


@pytest.fixture
def worker(session):
    with kvpool.attach(session.ticket(DEVICE)) as made:
        yield made


# ---- attach


def test_ticket(session):
    ticket = session.ticket(DEVICE)
    assert len(ticket.secret) == 16 and ticket.secret.hex() not in repr(ticket)
    again = kvpool.Ticket.from_json(ticket.to_json())
    assert vars(again) == vars(ticket)
    with kvpool.attach(ticket.to_json()) as worker:
        info = worker.info()
        assert info["device"] == DEVICE and not info["device_memory"] and info["epoch"] == session.epoch
        worker.check()
    with pytest.raises(kvpool.Error) as caught:
        worker.map_pool("main")  # detached
    assert caught.value.status == kvpool.Status.CANCELLED


def test_no_ticket(session):
    """Refused before anybody is asked."""
    ticket = session.ticket(DEVICE)
    for ticketless in ({}, {"session_id": 1}, {"secret": bytes(16)}):
        with pytest.raises(TypeError, match="a ticket, or session_id and secret"):
            kvpool.attach(None, **ticketless)
    with pytest.raises(TypeError, match="not dict"):
        kvpool.attach(vars(ticket))
    for count in (0, 15, 17):
        with pytest.raises(ValueError, match=f"16 bytes, this one {count}"):
            kvpool.attach(**{**vars(ticket), "secret": (ticket.secret + b"x")[:count]})
    with pytest.raises(ValueError, match="16 bytes, this one 2"):
        kvpool.Ticket.from_json(ticket.to_json().replace(ticket.secret.hex(), "abcd"))
    for secret in (16, "0123456789abcdef"):
        with pytest.raises(TypeError):
            kvpool.Ticket(ticket.socket, ticket.session_id, secret)


@pytest.mark.parametrize("change, status", [
    ({"secret": bytes(16)}, "WRONG_SECRET"), ({"session_id": 999999}, "UNKNOWN_SESSION"),
    ({"device": "host:7"}, "WRONG_DEVICE"), ({"socket": "/tmp/nobody"}, "DISCONNECTED")])
def test_not_let_in(session, change, status):
    with pytest.raises(kvpool.Error) as caught:
        kvpool.attach(**{**vars(session.ticket(DEVICE)), **change})
    assert caught.value.status == kvpool.Status[status]


def test_the_grpc_socket_is_no_attach_socket(daemon, session):
    with pytest.raises(kvpool.Error, match="no attach socket"):
        kvpool.attach(**{**vars(session.ticket(DEVICE)), "socket": str(daemon.socket)})


# ---- arrays


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
def test_regions_as_arrays(scheduler, session, pool_name, rng, fmt):
    """Every record where FORMATS.md has it, by numpy.asarray and by DLPack, no byte copied."""
    geometry = Geometry(fmt, TOKENS, BLOCKS, LAYERS)
    pool = scheduler.create_pool(pool_name, TOKENS, BLOCKS, [{"name": "kv", "format": fmt.name, "num_layers": LAYERS}])
    blocks = session.allocate(pool, BLOCKS)
    rows, slots = random_rows(rng, fmt, geometry.num_slots), slots_of(blocks, TOKENS)
    session.store_rows(pool.layer("kv", 1), rows, slots)
    q = reference.quantize(fmt, rows)
    with kvpool.attach(session.ticket(DEVICE)) as worker, worker.map_pool(pool_name) as mapped:
        region = mapped.region("kv")
        data = np.asarray(region.data(1))
        assert data.shape == (BLOCKS, TOKENS, 1, fmt.data_bytes)
        assert data[blocks].reshape(-1, fmt.data_bytes).tobytes() == q.data.tobytes()
        assert not data.flags.writeable
        if fmt.scale_bytes:
            scales = np.asarray(region.scales(1))
            assert scales[blocks].reshape(-1, fmt.scale_bytes).tobytes() == q.scales.tobytes()
        if fmt.token_interleaved or not fmt.scale_bytes:
            whole = np.from_dlpack(region.array(1))
            assert whole.shape == (BLOCKS, TOKENS, 1, fmt.bytes_per_token)
            assert whole.strides == (geometry.block_stride_bytes, fmt.bytes_per_token, fmt.bytes_per_token, 1)
            assert whole.ctypes.data == region.base + geometry.layer_stride_bytes
            assert whole[..., :fmt.data_bytes].tobytes() == data.tobytes()
        else:
            with pytest.raises(ValueError, match="data and scales"):
                region.array(1)
        for layer in (-1, LAYERS):
            with pytest.raises(IndexError):
                region.data(layer)
    pool.delete(force=True)


def test_arrays_see_what_is_stored_later(session, pool, pool_name, worker, rng):
    mapped = worker.map_pool(pool_name)
    records = np.asarray(mapped.region("kv").array(0))
    blocks = session.allocate(pool, 2)
    rows = random_rows(rng, V41, 2 * TOKENS)
    session.store_rows(pool.layer("kv"), rows, slots_of(blocks, TOKENS))
    assert records[blocks][..., :512].tobytes() == reference.quantize(V41, rows).data.tobytes()


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, as DLPack 1.0 has it."""
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("data", ctypes.c_void_p),
                ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


def versioned_of(array, **asked):
    capsule = array.__dlpack__(max_version=(1, 0), **asked)
    get = ctypes.PyDLL(None).PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return capsule, Versioned.from_address(get(capsule, b"dltensor_versioned"))


@pytest.mark.parametrize("access, flags", [(kvpool.READ, 1), (kvpool.READ_WRITE, 0)])
def test_dlpack_with_a_version(worker, pool, pool_name, access, flags):
    region = worker.map_pool(pool_name, access).region("index")
    capsule, tensor = versioned_of(region.scales(1))
    geometry = Geometry(INDEX_MXFP8, TOKENS, BLOCKS, LAYERS)
    assert (tensor.major, tensor.flags) == (1, flags)
    assert (tensor.device_type, tensor.device_id) == region.scales(1).__dlpack_device__() == (1, 0)
    assert tensor.data == region.base + geometry.layer_stride_bytes + TOKENS * 128
    assert tensor.shape[:tensor.ndim] == [BLOCKS, TOKENS, 1, 4]
    assert tensor.strides[:tensor.ndim] == [geometry.block_stride_bytes, 4, 4, 1]
    assert (tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset) == (1, 8, 1, 0)
    del capsule
    for asked in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError):
            region.data().__dlpack__(**asked)


def test_arrays_keep_the_memory(session, worker, pool, pool_name):
    """Maps, buffers and the attachment are given back; whoever has an array still reads and writes."""
    mapped, buffer = worker.map_pool(pool_name), worker.create_buffer(4096)
    by_interface, by_dlpack = np.asarray(mapped.region("kv").array()), np.from_dlpack(mapped.region("kv").array())
    ours = np.asarray(buffer.array("uint32"))
    ours[:] = 7
    capsule, tensor = versioned_of(buffer.array("bfloat16", (32, 64)))
    assert (tensor.code, tensor.bits) == (4, 16)
    buffer.release()
    mapped.unmap()
    worker.detach()
    gc.collect()
    assert by_interface.sum() == by_dlpack.sum() == 0
    ours[:] += 1
    assert (ours == 8).all()
    assert ctypes.c_uint32.from_address(tensor.data).value == 8
    with pytest.raises(ValueError, match="given back"):
        mapped.layer("kv").struct
    with pytest.raises(ValueError, match="given back"):
        buffer.view(1, 16).struct


def mapped_of(name):
    with open("/proc/self/maps") as maps:
        return sum(name in line for line in maps)


def test_memory_goes_with_its_last_array(session, worker, pool, pool_name):
    region_name = f"kvpool:{pool_name}:"
    mapped = worker.map_pool(pool_name)
    arrays = [np.from_dlpack(mapped.region(i).data()) for i in range(3)]
    capsule = mapped.region(0).array().__dlpack__()  # that nobody takes
    mapped.unmap()
    assert mapped_of(region_name) == 3
    del arrays
    assert mapped_of(region_name) == 3
    del capsule
    assert mapped_of(region_name) == 0


def test_buffers_as_arrays(session, worker, rng):
    buffer = worker.create_buffer(1000)
    assert np.asarray(buffer.array()).shape == (1000,)
    rows = np.asarray(buffer.array("float32", (3, 5), offset_bytes=16))
    assert rows.shape == (3, 5) and rows.flags.writeable and rows.ctypes.data == buffer.address + 16
    for dtype, shape, offset in (("float32", (250,), 4), ("uint8", (1001,), 0), ("uint8", (1,), 1000), ("int8", (1,), -1)):
        with pytest.raises(ValueError, match="not inside"):
            buffer.array(dtype, shape, offset)
    with pytest.raises(ValueError, match="no type"):
        buffer.array("complex64")
    assert np.asarray(buffer.array("uint8", (0, 7))).shape == (0, 7)
    with pytest.raises(AttributeError, match="bfloat16"):
        buffer.array("bfloat16").__array_interface__
    for make in (np.asarray, np.array, np.ascontiguousarray):
        with pytest.raises(TypeError, match="no bfloat16: ask for the array with dtype uint16"):
            make(buffer.array("bfloat16"))
    halves = np.asarray(buffer.array("uint16"))
    halves[:] = 7
    assert buffer.array("uint16").__array__(np.float32).sum() == 7 * 500
    assert np.shares_memory(buffer.array("uint16").__array__(), halves)
    assert not np.shares_memory(buffer.array("uint16").__array__(copy=True), halves)


# ---- buffers


def store_and_load(worker, pool, layer, source, out, blocks, rows):
    """A step by the ring: store every slot of the blocks, load them back."""
    step = worker.step()
    step.store(pool.layer("kv", layer), source.view(rows, V41.row_bytes), slots_of(blocks, TOKENS))
    step.load(pool.layer("kv", layer), np.array(whole_block_segments(blocks, TOKENS)), rows,
              out.view(rows, V41.row_bytes))
    return worker.run(step)


@pytest.mark.parametrize("kind", ["created", "scheduler's", "memfd"])
def test_kinds_of_buffers(scheduler, session, pool, pool_name, worker, rng, kind):
    """Rows written here are stored, loads are read here, without a byte over gRPC."""
    rows, size = 3 * TOKENS, 3 * TOKENS * V41.row_bytes
    blocks = session.allocate(pool, 3)
    worker.saw_epoch(session.epoch)
    theirs = None
    if kind == "created":
        made = [worker.create_buffer(size) for _ in range(2)]
    elif kind == "scheduler's":
        theirs = [session.create_buffer(size, DEVICE) for _ in range(2)]
        made = [worker.map_buffer(buffer.id) for buffer in theirs]
    else:
        fds = [kvpool.make_memfd("tensor", size + 8192) for _ in range(2)]
        made = [worker.import_memfd(fd, size + 8192, 4096 + 16, size) for fd in fds]
        for fd in fds:
            os.close(fd)
    source, out = made
    values = random_rows(rng, V41, rows)
    np.asarray(source.array("uint16", (rows, 512)))[:] = values
    reports = store_and_load(worker, worker.map_pool(pool_name), 1, source, out, blocks, rows)
    assert (reports[0].rows_stored, reports[1].rows_loaded) == (rows, rows)
    got = np.asarray(out.array("uint16", (rows, 512)))
    assert got.tobytes() == reference.cast_back(V41, values).tobytes()
    if theirs:
        assert bytes(theirs[1].read()) == got.tobytes()
    for buffer in made:
        buffer.release()
    if theirs:  # the worker only unmapped them
        assert bytes(theirs[1].read()) == reference.cast_back(V41, values).tobytes()


@pytest.mark.parametrize("pause", [0, 0.005], ids=["at once", "after a rest"])
def test_a_buffer_released_behind_its_steps(worker, pool, pool_name, session, pause):
    """Steps posted before the release have the buffer, whether the executor has looked at them or not."""
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    layer, slots = worker.map_pool(pool_name, kvpool.NOTHING).layer("kv"), slots_of(blocks, TOKENS)
    for _ in range(60):
        buffer = worker.create_buffer(TOKENS * V41.row_bytes)
        step = worker.step().store(layer, buffer.view(TOKENS, V41.row_bytes), slots)
        time.sleep(pause)
        for _ in range(5):
            worker.post(step)
        buffer.release()
        for _ in range(5):
            assert worker.wait(MS).check()[0].rows_stored == TOKENS


def test_the_worker_s_buffers_in_grpc_steps(session, pool, pool_name, worker, rng):
    blocks = session.allocate(pool, 2)
    source = worker.create_buffer(2 * TOKENS * V41.row_bytes)
    values = random_rows(rng, V41, 2 * TOKENS)
    np.asarray(source.array("uint16", values.shape))[:] = values
    step = session.step().store(pool.layer("kv"), source.view(len(values), V41.row_bytes), slots_of(blocks, TOKENS))
    assert step.run()[0].rows_stored == len(values)
    records = np.asarray(worker.map_pool(pool_name).region("kv").array())
    assert records[blocks][..., :512].tobytes() == reference.quantize(V41, values).data.tobytes()


def test_one_step_by_both_doors(session, pool, pool_name, worker, rng):
    """The same step object: the same bytes, the same reports, the same refusals."""
    blocks = session.allocate(pool, 2)
    rows = 2 * TOKENS
    buffer = worker.create_buffer(2 * rows * V41.row_bytes)
    memory = np.asarray(buffer.array("uint16", (2 * rows, 512)))
    records = np.asarray(worker.map_pool(pool_name).region("kv").array())
    values = random_rows(rng, V41, rows)
    step = session.step()
    step.store(pool.layer("kv"), buffer.view(rows, V41.row_bytes), slots_of(blocks, TOKENS))
    step.load(pool.layer("kv"), np.array(whole_block_segments(blocks, TOKENS)), rows,
              buffer.view(rows, V41.row_bytes, rows * V41.row_bytes))
    seen = []
    for door in (step.run, lambda: worker.run(step)):
        session.step().zero_blocks(pool, blocks).run()
        memory[:rows], memory[rows:] = values, 0xABCD
        reports = [{k: v for k, v in vars(r).items() if not k.endswith("_ns")} for r in door()]
        seen.append((reports, records.tobytes(), memory.tobytes()))
    assert seen[0] == seen[1]
    assert memory[rows:].tobytes() == reference.cast_back(V41, values).tobytes()

    refusals = []
    step.clear()
    step.store(pool.layer("kv"), buffer.view(rows, V41.row_bytes), [BLOCKS * TOKENS, 0])
    for door in (step.run, lambda: worker.run(step)):
        with pytest.raises(kvpool.Error) as caught:
            door()
        refusals.append(vars(caught.value))
    assert refusals[0] == refusals[1]
    assert refusals[0]["status"] == kvpool.Status.OUT_OF_RANGE and refusals[0]["position"] == 0
    assert refusals[0]["value"] == BLOCKS * TOKENS and refusals[0]["op"] == 0


@pytest.mark.parametrize("named", ["view", "array"])
def test_a_step_with_a_buffer_of_another_device(start_daemon, named):
    """One pool on both devices; each door says where the buffer is and where the step runs."""
    with kvpool.Client(str(start_daemon(devices=("host:0", "host:1"), threads=1).socket)) as scheduler:
        pool = scheduler.create_pool("both", 4 * TOKENS, BLOCKS, REGIONS, placements=["host:0", "host:1"])
        with scheduler.open_session("engine") as session, kvpool.attach(session.ticket("host:1")) as worker:
            blocks = session.allocate(pool, 1)
            worker.saw_epoch(session.epoch)
            made = {"here": worker.create_buffer(4096), "elsewhere": session.create_buffer(4096, "host:0"),
                    "session's": session.create_buffer(4096, "host:1")}
            layer = pool.layer("plain")

            def step_of(first, second):
                step = session.step().place("host:1")
                step.store(layer, made[first].view(1, 128), slots_of(blocks, TOKENS)[:1])
                if named == "view":
                    return step.store(layer, made[second].view(1, 128), slots_of(blocks, TOKENS)[1:2])
                return step.store(layer, made[first].view(1, 128), made[second].int32(1))

            for first, second in (("here", "session's"), ("session's", "here")):
                good = step_of(first, second)
                for run in (good.run, lambda: worker.run(good)):
                    assert len(run()) == 2
            step = step_of("here", "elsewhere")
            for run in (step.run, lambda: worker.run(step)):
                with pytest.raises(kvpool.Error) as caught:
                    run()
                assert caught.value.status == kvpool.Status.WRONG_DEVICE
                assert caught.value.value == made["elsewhere"].id
                assert f"buffer {made['elsewhere'].id} is on host:0, the step runs on host:1" in str(caught.value)
            step.clear()  # and with it what it named
            worker.run(step)
            only = step_of("elsewhere", "elsewhere")
            with pytest.raises(kvpool.Error) as caught:
                worker.run(only)
            assert caught.value.status == kvpool.Status.WRONG_DEVICE


def test_epochs(session, pool, pool_name, worker):
    """A worker that wasn't told of the lease is refused, once it was told it isn't."""
    blocks = session.allocate(pool, 1)
    mapped = worker.map_pool(pool_name, kvpool.NOTHING)
    step = worker.step().zero_blocks(mapped, blocks)
    with pytest.raises(kvpool.Error) as caught:
        worker.run(step)
    assert caught.value.status == kvpool.Status.STALE_BLOCK
    worker.saw_epoch(session.epoch)
    worker.run(step)


# ---- order


def test_waits_and_signals(session, pool, pool_name, worker, rng):
    """A step that stores what the worker writes after it was posted, layer by layer; the worker reads what was loaded
    when it is signalled."""
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    mapped = worker.map_pool(pool_name)
    source, out = worker.create_buffer(TOKENS * 1024), worker.create_buffer(TOKENS * 1024)
    rows, loaded = (np.asarray(b.array("uint16", (TOKENS, 512))) for b in (source, out))
    ready, done = worker.new_word(kvpool.WORKER), worker.new_word(kvpool.EXECUTOR)
    step = worker.step()
    slots, segments = step.array(slots_of(blocks, TOKENS)), step.array([[blocks[0], 0, TOKENS, 0]])
    for layer in range(LAYERS):
        where = mapped.layer("kv", layer)
        step.store(where, source.view(TOKENS, 1024), slots).wait(ready, layer + 1)
        step.load(where, segments, TOKENS, out.view(TOKENS, 1024)).signal(done, layer + 1)
    for replay in range(20):
        base = 1000 * replay
        step_id = worker.post(step, base=base, deadline_ms=MS)
        for layer in range(LAYERS):
            values = random_rows(rng, V41, TOKENS)
            rows[:] = values
            ready.signal(base + layer + 1)
            done.wait(base + layer + 1, MS)
            assert loaded.tobytes() == reference.cast_back(V41, values).tobytes()
        completion = worker.wait(MS)
        assert completion.step_id == step_id and len(completion.check()) == 2 * LAYERS
    assert done.read() == 1000 * 19 + LAYERS


def test_a_release_waits_for_steps_that_wait(session, pool, pool_name):
    """After the timeout the handle is gone and the release goes on: done when the step is, and not before."""
    blocks = session.allocate(pool, 1)
    with kvpool.attach(session.ticket(DEVICE), timeout_ms=200) as worker:
        mapped, ready = worker.map_pool(pool_name, kvpool.NOTHING), worker.new_word(kvpool.WORKER)
        buffer = worker.create_buffer(TOKENS * 1024)
        step = worker.step().store(mapped.layer("kv"), buffer.view(TOKENS, 1024), slots_of(blocks, TOKENS))
        step_id = worker.post(step.wait(ready, 1))
        with pytest.raises(kvpool.Error) as caught:
            buffer.release()
        assert caught.value.status == kvpool.Status.DEADLINE_EXCEEDED
        assert worker.poll() is None  # it waits still
        with pytest.raises(kvpool.Error) as caught:
            worker.create_buffer(1)  # behind the release
        assert caught.value.status == kvpool.Status.DEADLINE_EXCEEDED
        ready.signal(1)
        completion = worker.wait(MS)
        assert completion.step_id == step_id and completion.check()[0].rows_stored == TOKENS


def test_a_wait_that_nobody_answers(session, pool, pool_name, worker):
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    mapped = worker.map_pool(pool_name, kvpool.NOTHING)
    ready, done, other = worker.new_word(kvpool.WORKER), worker.new_word(kvpool.EXECUTOR), worker.new_word(kvpool.WORKER)
    step = worker.step().zero_blocks(mapped, blocks).wait(ready, 5).signal(done, 1)
    first = worker.post(step, deadline_ms=30)
    after = worker.post(worker.step().zero_blocks(mapped, blocks))
    completion = worker.wait(MS)
    assert completion.step_id == first and completion.error.status == kvpool.Status.DEADLINE_EXCEEDED
    assert completion.error.op == 0
    with pytest.raises(kvpool.Error) as caught:
        done.wait(1, MS)
    assert caught.value.status == kvpool.Status.CANCELLED
    assert worker.wait(MS).step_id == after  # the queue goes on

    other.poison()
    poisoned = worker.step().zero_blocks(mapped, blocks).wait(other, 1)
    with pytest.raises(kvpool.Error) as caught:
        worker.run(poisoned)
    assert caught.value.status == kvpool.Status.CANCELLED


def test_a_later_step_does_not_pass_for_a_refused_one(session, pool, pool_name, worker):
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    mapped, done = worker.map_pool(pool_name, kvpool.NOTHING), worker.new_word(kvpool.EXECUTOR)
    nobodys = next(block for block in range(BLOCKS) if block not in blocks)
    refused = worker.post(worker.step().zero_blocks(mapped, [nobodys]).signal(done, 1))
    good = worker.post(worker.step().zero_blocks(mapped, blocks).signal(done, 2))
    with pytest.raises(kvpool.Error) as caught:
        done.wait(1, MS)
    assert caught.value.status == kvpool.Status.CANCELLED
    told = {completion.step_id: completion.error for completion in (worker.wait(MS), worker.wait(MS))}
    assert told[good] is None and told[refused].status == kvpool.Status.NOT_OWNER
    with pytest.raises(kvpool.Error):
        done.wait(2, MS)  # poison stays


def test_a_release_does_not_wait_for_others(session, pool, pool_name, worker):
    """Another worker of the session has more steps that wait than a ring's share: nothing more of it is taken."""
    blocks = session.allocate(pool, 1)
    with kvpool.attach(session.ticket(DEVICE)) as other:
        other.saw_epoch(session.epoch)
        ready, step = other.new_word(kvpool.WORKER), other.step()
        step.zero_blocks(other.map_pool(pool_name, kvpool.NOTHING), blocks).wait(ready, 1)
        posted = [other.post(step, deadline_ms=MS) for _ in range(400)]
        for _ in range(3):
            worker.create_buffer(1 << 20).release()
        assert other.poll() is None  # they wait still
        ready.signal(1)
        assert [other.wait(MS).step_id for _ in posted] == posted


def test_accepted_is_told_when_it_is_wanted(session, pool, pool_name, worker):
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    step = worker.step().zero_blocks(worker.map_pool(pool_name, kvpool.NOTHING), blocks)
    step_id = worker.post(step, want_accepted=True)
    told = [worker.wait(MS), worker.wait(MS)]
    assert [(c.step_id, c.accepted) for c in told] == [(step_id, True), (step_id, False)]


def test_threads_take_turns(session, pool, pool_name, worker):
    """Posting and waiting by many threads: every step is told once."""
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    mapped = worker.map_pool(pool_name, kvpool.NOTHING)
    posted, told, lock = [], [], threading.Lock()

    def work():
        step = worker.step().zero_blocks(mapped, blocks)
        for _ in range(100):
            try:
                step_id = worker.post(step)
            except kvpool.Busy:
                continue
            completion = worker.wait(MS)
            with lock:
                posted.append(step_id)
                told.append(completion.step_id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(posted) == sorted(told) and len(set(told)) == len(told)


def test_run_keeps_what_others_wait_for(session, pool, pool_name, worker):
    """Completions that come while `run` waits are told in their order afterwards, and an event loop is told of them."""
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    step = worker.step().zero_blocks(worker.map_pool(pool_name, kvpool.NOTHING), blocks)
    posted = [worker.post(step, want_accepted=True) for _ in range(3)]
    assert len(worker.run(step)) == 1
    assert not worker.arm()
    told = [worker.wait(MS) for _ in range(3)] + [worker.poll() for _ in range(4)]
    assert [c.step_id for c in told if c is not None and not c.accepted] == posted
    assert sorted(c.step_id for c in told if c is not None and c.accepted) == posted
    assert worker.poll() is None and worker.arm()


def test_a_thread_runs_while_another_waits(session, pool, pool_name, worker):
    """Each gets its own: neither takes the other's completion, and the runner doesn't keep the others from posting."""
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    ready = worker.new_word(kvpool.WORKER)
    step = worker.step().zero_blocks(worker.map_pool(pool_name, kvpool.NOTHING), blocks)
    held = worker.step().zero_blocks(worker.map_pool(pool_name, kvpool.NOTHING), blocks).wait(ready, 1)
    reports = []
    thread = threading.Thread(target=lambda: reports.append(worker.run(held, deadline_ms=MS)))
    thread.start()
    wait_until(lambda: worker.info()["steps_in_flight"] == 1, "the step is posted")
    step_id = worker.post(step)
    ready.signal(1)
    assert worker.wait(MS).step_id == step_id
    thread.join()
    assert [len(found) for found in reports] == [1]
    assert worker.poll() is None


def test_nothing_comes(worker):
    """The time that is told is the caller's, whatever it was waited in."""
    word = worker.new_word(kvpool.EXECUTOR)
    with pytest.raises(kvpool.DeadlineExceeded, match=r"no step of the 0 .* for 250 ms"):
        worker.wait(250)
    with pytest.raises(kvpool.DeadlineExceeded, match=f"word {int(word)} is {word.value}, not {word.value + 1}, "
                                                      "after 250 ms"):
        word.wait(word.value + 1, 250)
    assert worker.poll() is None


class Interrupted(Exception):
    pass


@pytest.fixture
def alarm():
    """alarm(handler): while the test waits in the library, soon."""
    def set_alarm(handler):
        def handle(*_):
            signal.setitimer(signal.ITIMER_REAL, 0)
            handler()

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.15, 0.15)

    before = signal.getsignal(signal.SIGALRM)
    yield set_alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", ["wait", "word", "run"])
def test_signal_handlers_run_while_python_waits(session, pool, pool_name, worker, alarm, what):
    """What each wait waits for is done by a handler, which therefore runs before the wait has ended."""
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    ready = worker.new_word(kvpool.WORKER)
    step = worker.step().zero_blocks(worker.map_pool(pool_name, kvpool.NOTHING), blocks)
    posted = []
    if what == "wait":
        alarm(lambda: posted.append(worker.post(step)))
        assert worker.wait(MS).step_id == posted[0]
        return
    alarm(lambda: ready.signal(1))
    if what == "word":
        ready.wait(1, MS)
    else:
        assert len(worker.run(step.wait(ready, 1), deadline_ms=MS)) == 1
    assert worker.poll() is None


def test_a_handler_raises_while_run_waits(session, pool, pool_name, worker, alarm):
    """The step stays posted, once, and its completion is told."""
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    ready = worker.new_word(kvpool.WORKER)
    step = worker.step().zero_blocks(worker.map_pool(pool_name, kvpool.NOTHING), blocks).wait(ready, 1)

    def interrupt():
        raise Interrupted

    alarm(interrupt)
    with pytest.raises(Interrupted):
        worker.run(step, deadline_ms=MS)
    assert worker.info()["steps_in_flight"] == 1
    ready.signal(1)
    assert len(worker.wait(MS).check()) == 1
    assert worker.poll() is None and worker.info()["steps_in_flight"] == 0


def test_detach_while_another_thread_waits(session):
    worker, ended = kvpool.attach(session.ticket(DEVICE)), []

    def wait():
        try:
            worker.wait(MS)
        except kvpool.Error as error:
            ended.append(error.status)

    def is_waiting():
        is_free = worker.turn._lock.acquire(blocking=False)
        if is_free:
            worker.turn._lock.release()
        return not is_free

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(is_waiting, "the thread has its turn")
    worker.detach()
    thread.join()
    assert ended == [kvpool.Status.CANCELLED]


# ---- mistakes: what is raised, by a process that lives on


def test_regions_that_are_not_there(worker, pool, pool_name):
    mapped = worker.map_pool(pool_name)
    assert mapped.region(2).num_layers == 1
    for index in (3, 9, -1):
        with pytest.raises(IndexError, match=f"region {index} of pool"):
            mapped.region(index)
    for access in (3, 5, -1):
        with pytest.raises(kvpool.Error, match=f"access {access} ") as caught:
            worker.map_pool(pool_name, access)
        assert caught.value.status == kvpool.Status.INVALID_ARGUMENT


def test_steps_of_somebody_else(scheduler, session, pool, pool_name, worker):
    blocks = session.allocate(pool, 1)
    mapped = worker.map_pool(pool_name, kvpool.NOTHING)
    rows = worker.create_buffer(4096)
    with kvpool.attach(session.ticket(DEVICE)) as other, scheduler.open_session() as stranger, \
            kvpool.Replay(other, 1, kvpool.BY_OP) as replay:
        step = worker.step().zero_blocks(mapped, blocks)
        stored = worker.step().fused_store(mapped.layer("plain"), rows.view(1, 128), rows.view(1, 128, 128), 1e-6, [0],
                                           [0]).points(1, 1)
        for post in (lambda: other.post(step), lambda: other.run(step), lambda: replay.post(stored)):
            with pytest.raises(kvpool.Error, match="made for another attachment") as caught:
                post()
            assert caught.value.status == kvpool.Status.INVALID_ARGUMENT
        with stranger.open_queue(print) as queue:
            with pytest.raises(kvpool.Error, match=f"for session {session.id}, the queue is of session {stranger.id}"):
                queue.submit(session.step())
            with pytest.raises(kvpool.Error, match="is posted"):
                queue.submit(step)
        other.saw_epoch(session.epoch)
        assert len(other.run(session.step().zero_blocks(pool, blocks))) == 1  # the session's are everybody's


def test_words_that_are_not_there(worker):
    for writer in (2, -1, None):
        with pytest.raises(ValueError, match="neither WORKER nor EXECUTOR"):
            worker.new_word(writer)
    for index in (-1, 1024):
        with pytest.raises(IndexError, match=f"word {index}, an attachment has 1024"):
            kvpool.Word(worker, index, 0)
    kvpool.Word(worker, 1023, 0).free()


def test_ops_that_lack_something(session, pool, pool_name, worker):
    blocks = session.allocate(pool, 1)
    buffer = worker.create_buffer(TOKENS * V41.row_bytes)
    step = worker.step()
    with pytest.raises(TypeError, match="topk is None"):
        step.convert_kv_index(pool.layer("kv"), None, [0], 1, [0], 1, buffer.view(1, 4))
    for given in (2, 3, "yes"):  # all of them true
        step.load(pool.layer("kv"), [[blocks[0], 0, 1, 0]], 1, buffer.view(1, 1024), allow_store_before_load=given)
        step.assemble(buffer.view(1, 1024), compressed=(pool.layer("kv"), [[blocks[0], 0, 1, 0]], 1),
                      allow_store_before_load=given)
    assert step.op_count == 6


def test_rows_of_a_wrong_size(session, pool, pool_name, worker):
    """The library writes as many bytes as the format says."""
    blocks = session.allocate(pool, 1)
    for layer in (pool.layer("index"), worker.map_pool(pool_name, kvpool.NOTHING).layer("index")):
        for row_bytes, scale_bytes, match in ((0, 4, "row_bytes is 0, .* 128"), (127, 4, "row_bytes is 127, .* 128"),
                                              (128, 0, "scale_bytes is 0, .* 4"), (128, 3, "scale_bytes is 3, .* 4")):
            with pytest.raises(ValueError, match=match):
                session.load_rows(layer, [[blocks[0], 0, 2, 0]], 2, row_bytes, scale_bytes)
        rows, scales, report = session.load_rows(layer, [[blocks[0], 0, 2, 0]], 2, 128, 4)
        assert (len(rows), len(scales), report.rows_loaded) == (256, 8, 2)
    with pytest.raises(ValueError, match="row_bytes is 1024, .* 128"):
        session.load_rows(pool.layer("plain"), [[blocks[0], 0, 2, 0]], 2, 1024)
    with pytest.raises(kvpool.Error) as caught:
        session.load_rows(pool.layer(7), [[blocks[0], 0, 2, 0]], 2, 128)
    assert caught.value.status == kvpool.Status.UNKNOWN_REGION
    for count in (-1, 3 - 2**32, 2**32):
        with pytest.raises(ValueError, match="no count"):
            session.allocate(pool, count)


# ---- forks


FORKS = """
import gc, os, signal, sys, numpy, kvpool
client = kvpool.Client(sys.argv[1])
session = client.open_session("forks")
pool = client.pool(sys.argv[2])
blocks, completions = session.allocate(pool, 1), []
queue = session.open_queue(completions.append)
ticket = session.ticket(sys.argv[3])
worker = kvpool.attach(ticket)
mapped, buffer, remote = worker.map_pool(pool.name), worker.create_buffer(4096), session.create_buffer(64)
word, step = worker.new_word(kvpool.WORKER), worker.step().zero_blocks(mapped, blocks)
replay, array = kvpool.Replay(worker, 1), numpy.asarray(buffer.array())

def refused(use):
    try:
        use()
    except kvpool.Error as error:
        return error.status == kvpool.Status.INVALID_ARGUMENT and "fork" in str(error)
    return False

child = os.fork()
if child == 0:
    signal.alarm(60)
    uses = [client.info, lambda: client.pool(pool.name), session.step, lambda: session.allocate(pool, 1),
            lambda: session.epoch, lambda: session.free(pool, blocks), queue.wait, lambda: queue.submit(step),
            lambda: remote.read(), lambda: buffer.address, lambda: worker.run(step), lambda: worker.post(step),
            worker.poll, lambda: worker.wait(100), worker.check, lambda: worker.map_pool(pool.name),
            lambda: worker.create_buffer(64), worker.fileno, worker.arm, word.read, lambda: word.wait(1, 100),
            lambda: word.signal(1), lambda: step.zero_blocks(pool, blocks), lambda: mapped.region(0),
            lambda: pool.free_blocks, lambda: replay.post(step), lambda: kvpool.Client(sys.argv[1])]
    wrong = [i for i, use in enumerate(uses) if not refused(use)]
    if sys.argv[4] == "closes":
        for close in (replay.destroy, buffer.release, remote.release, mapped.unmap, step.destroy, queue.close,
                      worker.detach, worker.detach, session.close, client.close):
            close()
    elif sys.argv[4] == "collects":
        uses.clear()
        del replay, buffer, remote, mapped, step, queue, word, worker, session, pool, client, array
        gc.collect()
    elif sys.argv[4] == "attaches":
        with kvpool.attach(ticket) as mine, mine.map_pool(sys.argv[2]) as map:
            assert len(mine.run(mine.step().zero_blocks(map, blocks))) == 1
    print("wrong", wrong, flush=True)
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
array[:] = 1
stored = worker.step().store(mapped.layer("plain"), buffer.view(1, 128), [int(blocks[0]) * pool.regions[2]["tokens_per_block"]])
print(worker.run(stored)[0].rows_stored, len(worker.run(step)), len(session.allocate(pool, 1)), bytes(remote.read(1)))
worker.create_buffer(64)
worker.check()
session.check()
queue.submit(session.step().zero_blocks(pool, blocks))
queue.wait()
print(len(completions), "parent")
"""


@pytest.mark.parametrize("how", ["exits", "closes", "collects", "attaches"])
def test_a_forked_child_leaves_its_parent_alone(daemon, pool, pool_name, how):
    """Whatever it does with what it inherited, its parent's session, attachment, buffers and queue go on."""
    done = subprocess.run([sys.executable, "-c", FORKS, str(daemon.socket), pool_name, DEVICE, how], env=environment(),
                          capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (
        "wrong []\nchild 7\n1 1 1 b'\\x00'\n1 parent\n", "", 0)


def test_a_fork_of_what_was_detached(session):
    """Given back by the parent alone, whoever detaches again."""
    with kvpool.attach(session.ticket(DEVICE)) as worker:
        step = worker.step()
    worker.detach()
    child = os.fork()
    if child == 0:
        worker.detach()
        worker.detach()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    step.destroy()


def test_a_forked_child_that_lives_on(client, session, worker):
    """When it has detached what it inherited the daemon sees the end of its parent's attachment, which it else can't."""
    def attached():
        return len(next(s for s in client.list_sessions() if s.session_id == session.id).attachments)

    script = """
import os, sys, kvpool
worker = kvpool.attach(sys.stdin.readline())
go_on, told = os.pipe()
if os.fork() == 0:
    worker.detach()
    os.write(told, b"x")
    print("detached", flush=True)
    sys.stdin.readline()
    os._exit(0)
os.read(go_on, 1)
os._exit(0)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env=environment())
    process.stdin.write(session.ticket(DEVICE).to_json() + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "detached\n"
    assert process.wait() == 0
    wait_until(lambda: attached() == 1, "the parent's attachment goes")
    process.communicate("\n")


# ---- ends


def test_the_session_ends(scheduler, pool, pool_name):
    session = scheduler.open_session("short")
    worker = kvpool.attach(session.ticket(DEVICE))
    records = np.asarray(worker.map_pool(pool_name).region("kv").array())
    buffer = worker.create_buffer(4096)
    session.close()
    with pytest.raises(kvpool.Error) as caught:
        worker.wait(MS)
    assert caught.value.status in (kvpool.Status.UNKNOWN_SESSION, kvpool.Status.CANCELLED)
    with pytest.raises(kvpool.Error):
        worker.post(worker.step())
    with pytest.raises(kvpool.Error):
        worker.create_buffer(4096)
    assert records.sum() == 0  # what is mapped stays
    buffer.release()
    worker.detach()


def kill_executor(scheduler):
    os.kill(scheduler.info()["devices"][0]["executor_pid"], signal.SIGKILL)


def wait_serving(worker, generation):
    """Until an executor after that one serves it."""
    def serves():
        try:
            worker.check()
            return worker.info()["generation"] > generation
        except kvpool.DeviceLost:
            return False

    wait_until(serves, "the next executor")


def test_the_executor_dies(scheduler, session, pool, pool_name, worker, rng):
    """What is in flight ends with device_lost; maps stay; buffers come back; the next executor takes up the ring."""
    blocks = session.allocate(pool, 1)
    worker.saw_epoch(session.epoch)
    mapped, buffer = worker.map_pool(pool_name), worker.create_buffer(TOKENS * 1024)
    records = np.asarray(mapped.region("kv").array())
    values = random_rows(rng, V41, TOKENS)
    np.asarray(buffer.array("uint16", (TOKENS, 512)))[:] = values
    ready, done = worker.new_word(kvpool.WORKER), worker.new_word(kvpool.EXECUTOR)
    store = worker.step().store(mapped.layer("kv"), buffer.view(TOKENS, 1024), slots_of(blocks, TOKENS))
    worker.run(store)
    stuck = worker.step().zero_blocks(mapped, blocks).wait(ready, 1).signal(done, 1)
    lost = [worker.post(stuck, deadline_ms=MS) for _ in range(3)]
    generation = worker.info()["generation"]
    kill_executor(scheduler)
    for step_id in lost:
        completion = worker.wait(MS)
        assert completion.step_id == step_id and isinstance(completion.error, kvpool.DeviceLost)
    wait_serving(worker, generation)
    expected = reference.quantize(V41, values).data.tobytes()
    assert records[blocks][..., :512].tobytes() == expected  # contents and the map are the same
    worker.run(worker.step().zero_blocks(mapped, blocks))
    assert records[blocks].sum() == 0
    worker.run(store)  # the buffer too
    assert records[blocks][..., :512].tobytes() == expected
    assert done.read() == 0
    step_id = worker.post(stuck)
    ready.signal(1)
    done.wait(1, MS)
    assert worker.wait(MS).step_id == step_id


def test_a_waiter_sees_the_executor_die(scheduler, worker):
    done, failed, generation = worker.new_word(kvpool.EXECUTOR), [], worker.info()["generation"]

    def wait():
        try:
            done.wait(1, MS)
        except kvpool.Error as error:
            failed.append(error.status)

    thread = threading.Thread(target=wait)
    thread.start()
    kill_executor(scheduler)
    thread.join()
    assert failed == [kvpool.Status.DEVICE_LOST]
    wait_serving(worker, generation)


CHILD = """
import os, sys, numpy, kvpool
worker = kvpool.attach(sys.stdin.readline())
mapped = worker.map_pool(sys.argv[1], kvpool.READ_WRITE if sys.argv[2] == "write" else kvpool.READ)
array = mapped.region("kv").array()
print("ready", flush=True)
sys.stdin.readline()
import ctypes
ctypes.memset(array.address, 7, 1)
print("written", flush=True)
sys.stdin.readline()
"""


def child(session, *arguments):
    process = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True, env=environment())
    process.stdin.write(session.ticket(DEVICE).to_json() + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_write_through_the_default_map_faults_the_writer(daemon, session, pool, pool_name, worker):
    records = np.asarray(worker.map_pool(pool_name).region("kv").array())
    for access, status in (("read", -signal.SIGSEGV), ("write", 0)):
        process = child(session, pool_name, access)
        process.stdin.write("\n")
        process.stdin.flush()
        if access == "write":
            assert process.stdout.readline() == "written\n"
        process.communicate("\n" if access == "write" else None)
        assert process.returncode == status
        assert records[0, 0, 0, 0] == (7 if access == "write" else 0)
    worker.check()


def test_a_worker_is_killed(client, session, pool, pool_name, worker):
    """Its attachment goes, and nothing else."""
    def attached():
        info = next(s for s in client.list_sessions() if s.session_id == session.id)
        return len(info.attachments)

    process = child(session, pool_name, "read")
    assert attached() == 2
    process.kill()
    process.communicate()
    wait_until(lambda: attached() == 1, "the attachment goes")
    session.check()
    worker.check()


# ---- replays


@pytest.mark.parametrize("mode", [kvpool.ONE_LAUNCH, kvpool.BY_OP])
def test_replay(session, worker, pool, mode):
    """Layers one after another, as a captured graph would signal and wait for them: each row when it is there, from the
    same place, to other slots each time. A row of one number is the weight with its sign after the norm."""
    rounds, layers, bf16 = 5, 7, 0x3F80
    blocks = session.allocate(pool, 3)
    worker.saw_epoch(session.epoch)
    with worker.map_pool(pool.name) as mapped, kvpool.Replay(worker, layers, mode) as replay:
        assert replay.mode == mode
        rows = worker.create_buffer(4096)
        row, weight = (np.asarray(rows.array("uint16", (64,), offset)) for offset in (0, 128))
        records = np.asarray(mapped.region("plain").array())
        slots = slots_of(blocks, mapped.region("plain").tokens_per_block)[:rounds * layers].reshape(rounds, layers)
        step = worker.step()
        for turn in range(rounds):
            weight[:] = bf16 + turn
            step.clear()
            for layer in range(layers):
                step.fused_store(mapped.layer("plain", 0), rows.view(1, 128), rows.view(1, 128, 128), 1e-6,
                                 [slots[turn, layer]], [0]).points(layer + 1, layer + 1)
            step_id = replay.post(step)
            replay.begin()
            for layer in range(layers):
                row[:] = 0x4040 | layer % 2 << 15
                replay.signal_and_wait(None, layer + 1)
                at = divmod(int(slots[turn, layer]), mapped.region("plain").tokens_per_block)
                assert (records[at][0].view(np.uint16) == (bf16 + turn | layer % 2 << 15)).all()
            replay.end(None, layers)
            replay.check()
            done = worker.wait(MS)
            assert done.step_id == step_id and done.error is None and len(done.reports) == layers
    session.free(pool, blocks)
