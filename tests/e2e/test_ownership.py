"""Who may do what: sessions and their secrets, blocks and their epochs, buffers of others, things that are gone."""
import numpy as np
import pytest

from support.catalogue import V41
from support.client import Step, failures
from support.errors import RpcFailure
from support.refusal import BLOCKS, BUFFER_BYTES, FREE_BLOCK, KV, TOKENS, Expect, Scene
from support.stubs import pb
from support.traffic import random_rows


@pytest.fixture(scope="module")
def scene(daemon):
    made = Scene(daemon)
    yield made
    made.close()


def secrets(scene):
    good = bytes(scene.session.ref.secret)
    flipped = bytes([good[0]]) + bytes([good[1] ^ 1]) + good[2:]
    return {"last_bit": good[:-1] + bytes([good[-1] ^ 0x80]), "flipped": flipped, "short": good[:15], "empty": b"",
            "long": good + b"\x00", "another_sessions": bytes(scene.other.ref.secret), "zeros": bytes(16)}


def session_calls(scene, ref):
    """Every call that acts for a session, made with this reference."""
    client, step = scene.client, scene.good_op(Step())
    pool_id, epoch = scene.pool_id, scene.session.epoch
    return {
        "AllocateBlocks": lambda: client.call("AllocateBlocks", pb.AllocateBlocksRequest(
            session=ref, pool_id=pool_id, count=1)),
        "AllocateBlockRange": lambda: client.call("AllocateBlockRange", pb.AllocateBlockRangeRequest(
            session=ref, pool_id=pool_id, first_block=FREE_BLOCK, count=1)),
        "FreeBlocks": lambda: client.call("FreeBlocks", pb.FreeBlocksRequest(
            session=ref, pool_id=pool_id, blocks=bytes(4))),
        "CreateBuffer": lambda: client.call("CreateBuffer", pb.CreateBufferRequest(
            session=ref, device="host:0", bytes=4096)),
        "ReadBuffer": lambda: list(stream(client.rpc.ReadBuffer(pb.ReadBufferRequest(
            session=ref, buffer_id=scene.buffer.id, bytes=16)))),
        "WriteBuffer": lambda: unary(lambda: client.rpc.WriteBuffer(iter([pb.WriteBufferRequest(
            session=ref, buffer_id=scene.buffer.id, data=bytes(16))]))),
        "ReleaseBuffer": lambda: client.call("ReleaseBuffer", pb.ReleaseBufferRequest(
            session=ref, buffer_id=scene.buffer.id)),
        "RunStep": lambda: client.call("RunStep", step.request(ref, epoch)),
        "StoreRows": lambda: unary(lambda: client.rpc.StoreRows(iter([pb.StoreRowsRequest(
            session=ref, epoch=epoch, region=scene.region(), row_bytes=1024, slots=bytes(4), rows=bytes(1024))]))),
        "LoadRows": lambda: list(stream(client.rpc.LoadRows(pb.LoadRowsRequest(
            session=ref, epoch=epoch, region=scene.region(), segments=bytes(16), total_k=1)))),
        "Steps": lambda: steps_first(scene, step.request(ref, epoch, 1)),
        "CloseSession": lambda: client.call("CloseSession", pb.CloseSessionRequest(session=ref)),
    }


def unary(call):
    with failures():
        return call()


def stream(call):
    with failures():
        yield from call


def steps_first(scene, request):
    """A step as the first message of a stream of its own: its refusal, whichever way it is told."""
    steps = scene.session.open_queue()
    try:
        steps.send_raw(request)
        steps.wait(request.step_id)
    finally:
        steps.abandon()


SESSION_CALLS = ("AllocateBlocks", "AllocateBlockRange", "FreeBlocks", "CreateBuffer", "ReadBuffer", "WriteBuffer",
                 "ReleaseBuffer", "RunStep", "StoreRows", "LoadRows", "Steps", "CloseSession")


@pytest.mark.parametrize("method", SESSION_CALLS)
@pytest.mark.parametrize("secret", ["last_bit", "flipped", "short", "empty", "long", "another_sessions", "zeros"])
def test_wrong_secret(scene, method, secret):
    ref = pb.SessionRef(session_id=scene.session.id, secret=secrets(scene)[secret])
    refusal = scene.refused(session_calls(scene, ref)[method])
    assert refusal.status == "wrong_secret"
    assert bytes(scene.session.ref.secret).hex() not in refusal.message


@pytest.mark.parametrize("method", SESSION_CALLS)
@pytest.mark.parametrize("kind", ["number", "absent", "closed"])
def test_unknown_session(scene, method, kind):
    ref = pb.SessionRef(session_id=987654321, secret=scene.session.ref.secret)
    if kind == "absent":
        ref = None
    elif kind == "closed":
        closed = scene.client.open_session("closed")
        closed.close()
        ref = closed.ref
    refusal = scene.refused(session_calls(scene, ref)[method])
    assert refusal.status == "unknown_session"


def test_a_secret_is_random(scene):
    opened = [scene.client.open_session(f"secret{i}") for i in range(8)]
    assert all(len(s.ref.secret) == 16 for s in opened)
    assert len({bytes(s.ref.secret) for s in opened}) == len({s.id for s in opened}) == 8
    for session in opened:
        session.close()


DOORS = ["queue", "call", "rows"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_block_freed_and_assigned_again(scene, door, kind):
    """To the same session: stale with the old epoch, fine with the new one. To another: not the owner."""
    def call(epoch):
        slot = block * TOKENS + 1
        if door == "rows" and kind == "store":
            rows = random_rows(scene.rng, V41, 1)
            return lambda: scene.session.store_rows(scene.region(), rows, [slot], epoch=epoch)
        if door == "rows":
            return lambda: scene.session.load_rows(scene.region(), [(block, 1, 2, 0)], 1, epoch=epoch)
        step = scene.good_op(Step())
        if kind == "store":
            step.store(scene.region(), scene.source(), [slot])
        else:
            step.load(scene.region(), [(block, 1, 2, 0)], 1, scene.out())
        return lambda: (scene.queue if door == "queue" else scene.session).run(step, epoch=epoch)

    op = 0 if door == "rows" else 1
    array, value = ("slots", FREE_BLOCK * TOKENS + 1) if kind == "store" else ("segments", FREE_BLOCK)
    block = scene.session.allocate_range(scene.pool_id, FREE_BLOCK, 1)[0]
    old = scene.session.epoch
    scene.session.free(scene.pool_id, [block])
    scene.session.allocate_range(scene.pool_id, FREE_BLOCK, 1)
    assert scene.session.epoch > old
    Expect("stale_block", array, 0, value).check(scene.refused(call(old)), op)
    call(scene.session.epoch)()

    scene.session.free(scene.pool_id, [block])
    scene.other.allocate_range(scene.pool_id, FREE_BLOCK, 1)
    newest = max(scene.session.epoch, scene.other.epoch)
    Expect("not_owner", array, 0, value).check(scene.refused(call(newest)), op)
    Expect(("not_owner", "stale_block"), array, 0, value).check(scene.refused(call(old)), op)
    scene.other.free(scene.pool_id, [block])
    Expect("not_owner", array, 0, value).check(scene.refused(call(newest)), op)


@pytest.mark.parametrize("door", DOORS)
def test_a_deleted_pool(scene, door):
    pool = scene.client.create_pool("deleted", 16, 2, [{"name": "kv", "format": "v41", "num_layers": 1}])
    scene.session.allocate(pool.pool_id, 2)
    with pytest.raises(RpcFailure) as caught:
        scene.client.delete_pool(pool.pool_id)
    assert caught.value.status == "in_use"
    scene.client.delete_pool(pool.pool_id, force=True)
    region = pb.RegionRef(pool_id=pool.pool_id)
    step = scene.good_op(Step()).store(region, scene.source(), [0])
    call = {"queue": lambda: scene.queue.run(step), "call": lambda: scene.session.run(step),
            "rows": lambda: scene.session.store_rows(region, random_rows(scene.rng, V41, 1), [0])}[door]
    refusal = scene.refused(call)
    assert (refusal.status, refusal.value) == ("unknown_pool", pool.pool_id)
    for again in (lambda: scene.client.pool(pool.pool_id), lambda: scene.client.delete_pool(pool.pool_id),
                  lambda: scene.session.allocate(pool.pool_id, 1)):
        assert scene.refused(again).status == "unknown_pool"


# -- buffers and inspection

BAD_CALLS = {
    "read_past_the_end": (lambda s: s.buffer.read(BUFFER_BYTES - 8, 16), "out_of_range"),
    "read_overflow": (lambda s: s.buffer.read(2**64 - 8, 16), "out_of_range"),
    "write_past_the_end": (lambda s: s.buffer.write(np.zeros(16, np.uint8), BUFFER_BYTES - 8), "out_of_range"),
    "write_overflow": (lambda s: s.buffer.write(np.zeros(16, np.uint8), 2**64 - 8), "out_of_range"),
    "unknown_device": (lambda s: s.session.create_buffer(4096, "host:7"), "wrong_device"),
    "no_bytes": (lambda s: s.session.create_buffer(0), "invalid_argument"),
    "too_many_bytes": (lambda s: s.session.create_buffer(1 << 50), "out_of_memory"),
    "release_twice": (lambda s: s.released.release(), "unknown_buffer"),
    "inspect_too_many": (lambda s: s.client.inspect(s.region(), [0] * 1025), "too_large"),
    "inspect_out_of_range": (lambda s: s.client.inspect(s.region(), [1, TOKENS * BLOCKS]), "out_of_range"),
    "inspect_negative": (lambda s: s.client.inspect(s.region(), [-1]), "out_of_range"),
    "inspect_unknown_layer": (lambda s: s.client.inspect(s.region(KV, 2), [0]), "unknown_layer"),
    "dump_past_the_end": (lambda s: s.client.dump(s.region(), 7, 2), "out_of_range"),
    "dump_overflow": (lambda s: s.client.dump(s.region(), 2**32 - 1, 2), "out_of_range"),
    "dump_unknown_region": (lambda s: s.client.dump(s.region(4), 0, 1), "unknown_region"),
    "blocks_of_nothing": (lambda s: s.client.block_states(12345678), "unknown_pool"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(scene, name):
    call, status = BAD_CALLS[name]
    assert scene.refused(lambda: call(scene)).status == status


def test_a_buffer_of_another_session(scene):
    class Stolen:
        session = scene.session
        id = scene.others_buffer.id
        bytes = BUFFER_BYTES
    for call in (lambda: type(scene.buffer).read(Stolen, 0, 16),
                 lambda: type(scene.buffer).write(Stolen, np.zeros(16, np.uint8)),
                 lambda: type(scene.buffer).release(Stolen)):
        assert scene.refused(call).status == "unknown_buffer"
    assert len(scene.others_buffer.read()) == BUFFER_BYTES
