"""Whose sessions may have a pool's blocks, and whose workers may map it: a pool with a namespace is that one's, one
without is never both mapped and used by two."""
import os
import signal

import numpy as np
import pytest

from support.attach_ring import DONE, REFUSED, Ring, zero_blocks
from support.attach_wire import Attachment, Refused, close_chunks
from support.catalogue import V41
from support.client import Step
from support.device import DEVICE, ON_GPU
from support.errors import GRPC_CODE_OF, STATUS_MAP, RpcFailure, StepFailure
from support.libkvpool import kvpool
from support.process import wait_until
from support.stubs import pb
from support.traffic import random_rows
from support.worker import BLOCKS, KV, TOKENS

DENIED = "permission_denied"


@pytest.fixture
def sessions(client):
    """sessions(namespace): one of it, open to the end of the test."""
    made = []

    def begin(namespace):
        made.append(client.open_session(namespace or "default", namespace=namespace))
        return made[-1]

    yield begin
    for session in made:
        if not session.ended.is_set():
            session.close()


@pytest.fixture
def make_pool(client, pool_name):
    """make_pool(namespace): a pool of it, deleted at the end."""
    made = []

    def begin(namespace=""):
        made.append(client.create_pool(f"{pool_name}-{len(made)}", TOKENS, BLOCKS, [KV], namespace=namespace))
        return made[-1]

    yield begin
    for pool in made:
        client.delete_pool(pool.pool_id, force=True)


@pytest.fixture
def attach(client):
    """attach(session): an Attachment that is closed at the end."""
    made = []

    def begin(session):
        made.append(Attachment(client.info().attach_socket, session.ref, DEVICE))
        return made[-1]

    yield begin
    for attachment in made:
        attachment.close()


def map_of(attachment, pool):
    told, memories = attachment.map_pool(pool.spec.name)
    close_chunks(memories)
    return told.pool_id


def denied(call, pool, *namespaces):
    """Refused for the namespaces: the pool and they are named."""
    with pytest.raises((RpcFailure, StepFailure, Refused, kvpool.Error)) as caught:
        call()
    error = caught.value
    text = error.refusal.message if isinstance(error, (RpcFailure, StepFailure)) else str(error)
    status = error.status.name.lower() if isinstance(error, kvpool.Error) else error.status
    assert status == DENIED, text
    for name in (pool.spec.name if hasattr(pool, "spec") else pool.name, *namespaces):
        assert f"'{name}'" in text, text
    return error


# ---- a pool with a namespace ---------------------------------------------------------------------------------------


def test_a_pool_tells_its_namespace(client, make_pool):
    owned, free = make_pool("tenant-a"), make_pool()
    assert (owned.spec.namespace, free.spec.namespace) == ("tenant-a", "")
    assert client.pool(owned.pool_id).spec.namespace == "tenant-a"
    listed = {pool.pool_id: pool.spec.namespace for pool in client.pools()}
    assert (listed[owned.pool_id], listed[free.pool_id]) == ("tenant-a", "")


@pytest.mark.parametrize("other", ["tenant-b", "", "tenant"])
def test_only_its_own_sessions_have_its_blocks(client, sessions, make_pool, other):
    pool = make_pool("tenant-a")
    region = pb.RegionRef(pool_id=pool.pool_id)
    owner, stranger = sessions("tenant-a"), sessions(other)
    names = ("tenant-a", other or "default")
    before = client.pool(pool.pool_id).free_blocks
    for call in (lambda: stranger.allocate(pool.pool_id, 1), lambda: stranger.allocate_range(pool.pool_id, 0, 1)):
        assert denied(call, pool, *names).code == GRPC_CODE_OF[DENIED]
    assert client.pool(pool.pool_id).free_blocks == before
    blocks = owner.allocate(pool.pool_id, 2)
    stranger.epoch = owner.epoch
    rows = random_rows(np.random.default_rng(5), V41, 1)
    slot = int(blocks[0]) * TOKENS
    denied(lambda: stranger.store_rows(region, rows, [slot]), pool, *names)
    denied(lambda: stranger.load_rows(region, [(slot, 0, 1, 0)], 1), pool, *names)
    assert owner.store_rows(region, rows, [slot]).rows_stored == 1
    assert owner.load_rows(region, [(slot, 0, 1, 0)], 1)[2].rows_loaded == 1


def test_steps_name_the_op(sessions, make_pool):
    own, foreign = make_pool("tenant-b"), make_pool("tenant-a")
    owner, stranger = sessions("tenant-a"), sessions("tenant-b")
    blocks, mine = owner.allocate(foreign.pool_id, 1), stranger.allocate(own.pool_id, 1)
    stranger.epoch = owner.epoch = max(owner.epoch, stranger.epoch)
    good = Step().zero_blocks(own.pool_id, mine)
    step = Step().zero_blocks(own.pool_id, mine).zero_blocks(foreign.pool_id, blocks)
    assert len(stranger.run(good)) == 1
    assert denied(lambda: stranger.run(step), foreign, "tenant-a", "tenant-b").refusal.op == 1
    queue = stranger.open_queue()
    assert denied(lambda: queue.run(step), foreign, "tenant-a", "tenant-b").refusal.op == 1
    queue.run(good)  # the stream goes on
    owner.run(Step().zero_blocks(foreign.pool_id, blocks))


def test_only_its_own_workers_map_it(sessions, make_pool, attach):
    """A ring's steps are refused by the owner table: its session has no block of the pool."""
    pool = make_pool("tenant-a")
    owner, stranger = sessions("tenant-a"), sessions("tenant-b")
    blocks = owner.allocate(pool.pool_id, 1)
    worker = attach(stranger)
    denied(lambda: map_of(worker, pool), pool, "tenant-a", "tenant-b")
    ring = Ring(worker.shared)
    ring.post(1, 1, zero_blocks(pool.pool_id, blocks, owner.epoch))
    refused = ring.wait(1)
    assert refused.kind == REFUSED and STATUS_MAP[refused.error.status][0] == "not_owner"
    own = attach(owner)
    assert map_of(own, pool) == pool.pool_id
    ring = Ring(own.shared)
    ring.post(1, 1, zero_blocks(pool.pool_id, blocks, owner.epoch))
    assert ring.wait(1).kind == DONE


def test_operators_look_into_every_pool(client, sessions, make_pool):
    pool = make_pool("tenant-a")
    owner = sessions("tenant-a")
    block = int(owner.allocate(pool.pool_id, 1)[0])
    region = pb.RegionRef(pool_id=pool.pool_id)
    owner.store_rows(region, random_rows(np.random.default_rng(5), V41, 1), [block * TOKENS])
    assert any(client.inspect(region, [block * TOKENS])[0].raw)
    assert client.dump(region, block, 1).any()


def test_a_pool_of_the_configuration(start_daemon):
    client = start_daemon("--pool", '{ name = "theirs"; namespace = "tenant-a"; block_size = 64; num_blocks = 4; '
                          'regions = ( { name = "kv"; format = "v41"; num_layers = 1; } ); }').client()
    [pool] = client.pools()
    assert pool.spec.namespace == "tenant-a"
    denied(lambda: client.open_session().allocate(pool.pool_id, 1), pool, "tenant-a", "default")
    assert len(client.open_session(namespace="tenant-a").allocate(pool.pool_id, 1)) == 1


@pytest.mark.parametrize("namespace, status", [("a b", "invalid_argument"), ("n" * 64, "too_large")])
def test_what_is_no_namespace(client, pool_name, namespace, status):
    with pytest.raises(RpcFailure) as caught:
        client.create_pool(pool_name, TOKENS, 1, [KV], namespace=namespace)
    assert caught.value.status == status and "pool namespace" in caught.value.refusal.message


# ---- a pool without ------------------------------------------------------------------------------------------------


def test_who_used_a_pool_alone_maps_it(sessions, make_pool, attach):
    pool = make_pool()
    one, other = sessions("tenant-a"), sessions("tenant-b")
    one.allocate(pool.pool_id, 1)
    stranger = attach(other)
    denied(lambda: map_of(stranger, pool), pool, "tenant-a", "tenant-b")
    assert map_of(attach(one), pool) == map_of(attach(sessions("tenant-a")), pool) == pool.pool_id
    for call in (lambda: other.allocate(pool.pool_id, 1), lambda: other.allocate_range(pool.pool_id, 5, 1)):
        denied(call, pool, "tenant-a", "tenant-b")
    assert len(sessions("tenant-a").allocate(pool.pool_id, 1)) == 1
    assert stranger.create_buffer(64)[0].bytes == 64  # the refused worker works on


def test_a_map_keeps_others_out_for_good(client, sessions, make_pool, attach):
    """Nobody had blocks of it before the map. The worker keeps the memory when it has detached, so the pool stays its
    namespace's, whoever is still there."""
    pool, fresh = make_pool(), make_pool()
    owner, other = sessions("tenant-a"), sessions("tenant-b")
    with Attachment(client.info().attach_socket, owner.ref, DEVICE) as worker:
        map_of(worker, pool)
        denied(lambda: other.allocate(pool.pool_id, 1), pool, "tenant-a", "tenant-b")
    owner.close()
    denied(lambda: other.allocate(pool.pool_id, 1), pool, "tenant-a", "tenant-b")
    denied(lambda: map_of(attach(other), pool), pool, "tenant-a", "tenant-b")
    assert map_of(attach(sessions("tenant-a")), pool) == pool.pool_id
    assert len(other.allocate(fresh.pool_id, 1)) == 1


def test_a_pool_that_several_used_is_nobodys_to_map(sessions, make_pool, attach):
    """Freed blocks keep what they held."""
    pool = make_pool()
    one, other = sessions("tenant-a"), sessions("tenant-b")
    for session in (one, other):
        session.free(pool.pool_id, session.allocate(pool.pool_id, 2))
    for session in (one, other):
        text = str(denied(lambda s=session: map_of(attach(s), pool), pool, "tenant-a"))
        assert "others" in text
    for session in (one, other, sessions("")):
        assert len(session.allocate(pool.pool_id, 1)) == 1  # by gRPC they share it as before


def test_what_was_refused_is_no_use(sessions, make_pool, attach):
    """An allocation that gets nothing leaves the pool to others."""
    pool = make_pool()
    one, other = sessions("tenant-a"), sessions("tenant-b")
    with pytest.raises(RpcFailure) as caught:
        one.allocate(pool.pool_id, BLOCKS + 1)
    assert caught.value.status == "out_of_blocks"
    other.allocate(pool.pool_id, 1)
    with pytest.raises(RpcFailure):
        one.allocate(pool.pool_id, BLOCKS)
    assert map_of(attach(other), pool) == pool.pool_id


def test_blocks_on_their_way_count(start_daemon):
    """While tenant-b's are being zeroed, tenant-a, which alone had blocks until now, maps the pool no more."""
    client = start_daemon().client()
    pool = client.create_pool("main", TOKENS, 4, [KV])
    one, other = (client.open_session(name, namespace=name) for name in ("tenant-a", "tenant-b"))
    one.free(pool.pool_id, one.allocate(pool.pool_id, 2))
    executor = client.device().executor_pid
    with Attachment(client.info().attach_socket, one.ref, DEVICE) as worker:
        os.kill(executor, signal.SIGSTOP)
        call = client.rpc.AllocateBlocks.future(
            pb.AllocateBlocksRequest(session=other.ref, pool_id=pool.pool_id, count=2))
        wait_until(lambda: client.pool(pool.pool_id).leased_blocks == 2, "the blocks")
        assert not call.done()
        denied(lambda: map_of(worker, pool), pool, "tenant-a")
        os.kill(executor, signal.SIGCONT)
        assert len(call.result(60).blocks) == 8
        denied(lambda: map_of(worker, pool), pool, "tenant-a")


# ---- the Python package --------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="numpy looks at memory of a host device")
def test_a_tenants_worker_sees_no_other_tenants_block(daemon, pool_name):
    """With READ_WRITE and a daemon whose pool has a block of tenant-a's."""
    with kvpool.Client(str(daemon.socket)) as scheduler:
        for namespace in (None, "tenant-a"):
            pool = scheduler.create_pool(f"{pool_name}-{namespace}", TOKENS, 4, [KV], namespace=namespace)
            with scheduler.open_session("a", namespace="tenant-a") as one, \
                    scheduler.open_session("b", namespace="tenant-b") as other:
                block = int(one.allocate(pool, 1)[0])
                with kvpool.attach(other.ticket(DEVICE)) as stranger:
                    denied(lambda: stranger.map_pool(pool.name, kvpool.READ_WRITE), pool, "tenant-a", "tenant-b")
                with kvpool.attach(one.ticket(DEVICE)) as worker, \
                        worker.map_pool(pool.name, kvpool.READ_WRITE) as mapped:
                    array = np.asarray(mapped.region("kv").array(0))
                    array[block] = 7
                    del array
                denied(lambda: other.allocate(pool, 1), pool, "tenant-a", "tenant-b")
            pool.delete(force=True)
