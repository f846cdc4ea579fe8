"""What one client may cost the others: long steps wait for nobody else's, and no step takes long to check."""
import numpy as np
import pytest

from support.catalogue import V41, Geometry
from support.client import Step
from support.errors import StepFailure
from support.traffic import Lane, random_rows

KV = {"name": "kv", "format": "v41", "num_layers": 1}


def lane_of(session, pool, blocks, tokens=64):
    made = Lane(session, Geometry(V41, tokens, pool.spec.num_blocks), pool.pool_id, session.allocate(pool.pool_id, blocks))
    made.write(random_rows(np.random.default_rng(blocks), V41, made.count))
    return made


def test_more_long_steps_than_the_device_has_threads(start_daemon):
    """96 queues of six sessions, each with a step of many ops: a small step of somebody else is done before any is."""
    client = start_daemon().client()
    pool = client.create_pool("fair", 64, 400, [KV])
    victim = lane_of(client.open_session("victim"), pool, 1)
    long_steps = []
    for name in range(6):
        lane = lane_of(client.open_session(f"greedy{name}"), pool, 32)
        for _ in range(16):
            queue = lane.session.open_queue()
            long_steps.append((queue, queue.send(lane.long_step(200))))
    for queue, step_id in long_steps:
        queue.wait_accepted(step_id)
    victim.session.run(victim.store_and_load_step())
    finished = [step_id for queue, step_id in long_steps if step_id in queue.finished]
    assert not finished, f"{len(finished)} long steps came first"
    victim.check_out()
    for queue, _ in long_steps:
        queue.abandon()


def test_one_plan_shared_by_loads_of_different_sizes(client, session, pool_name):
    """The plan is checked once; each op's total_k still counts."""
    pool = client.create_pool(pool_name, 64, 2, [KV])
    lane = lane_of(session, pool, 1)
    segments = [(int(lane.blocks[0]), 0, 10, 30), (-1, 0, 20, 0)]
    step = lane.store_step()
    plan = step.array(segments)
    step.load(lane.region, plan, 64, lane.out_view)
    step.load(lane.region, plan, 40, lane.out_view)
    step.load(lane.region, plan, 39, lane.out_view)
    step.load(lane.region, plan, 10, lane.out_view)
    with pytest.raises(StepFailure) as caught:
        session.open_queue().run(step)
    refusal = caught.value.refusal
    assert (refusal.status, refusal.op, refusal.array) == ("out_of_range", 3, "segments")
    assert (refusal.position, refusal.value) == (3, 30)
    assert "segments[0].dst_offset = 30: rows up to 40 > total_k 39" in refusal.message


def test_elements_to_check_are_bounded(client, session, pool_name):
    """The same array is checked for each pool it is used with; all checks of one step together are limited."""
    elements = 4 * 240_000  # nearly a whole message
    plan = np.zeros((elements // 4, 4), np.int32)
    plan[:, 0] = -1
    pools = [client.create_pool(f"{pool_name}-{i}", 16, 1, [KV]) for i in range(9)]
    lanes = [lane_of(session, pool, 1, 16) for pool in pools]
    steps = {}
    for uses in (8, 9):
        step = Step("host:0")
        array = step.array(plan)
        for lane in lanes[:uses]:
            step.load(lane.region, array, 16, lane.out_view)
        steps[uses] = step
    session.open_queue().run(steps[8])
    with pytest.raises(StepFailure) as caught:
        session.open_queue().run(steps[9])
    refusal = caught.value.refusal
    assert (refusal.status, refusal.op, refusal.array, refusal.value) == ("too_large", 8, "segments", elements)
    assert str(9 * elements) in refusal.message and str(8 << 20) in refusal.message
