"""A signal handler raises while a handle is being made, or given back: nothing is left over that nobody has, and the
attachment goes on."""
import gc
import os
import subprocess
import sys
import weakref

import pytest

from support.device import DEVICE, ON_GPU
from support.libkvpool import environment, kvpool
from support.process import wait_until
from support.worker_fixtures import blocks, pool, scheduler, session, worker  # fixtures

pytestmark = pytest.mark.skipif(ON_GPU, reason="handles are the host's")

BLOCK_SIZE, BLOCKS = 64, 16
REGIONS = [{"name": "kv", "format": "v41", "num_layers": 1}]
MS = 60000


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupted(monkeypatch):
    """interrupted(call, what): what() in which a handler raises just behind the library's `call`, which was done."""
    def run(call, what):
        real, calls = getattr(kvpool._library, call), []

        def then_raise(*arguments):
            real(*arguments)
            calls.append(call)
            raise Interrupted

        with monkeypatch.context() as patched:
            patched.setattr(kvpool._library, call, then_raise)
            with pytest.raises(Interrupted):
                what()
        assert calls == [call]

    return run


def session_info(client, session):
    return next(found for found in client.list_sessions() if found.session_id == session.id)


@pytest.mark.parametrize("call, make", [
    ("attachment_create_buffer", lambda worker: worker.create_buffer(4096)),
    ("replay_new", lambda worker: kvpool.Replay(worker, 3, kvpool.ONE_LAUNCH)),
    ("buffer_id", lambda worker: worker.create_buffer(4096)),
    ("replay_mode_get", lambda worker: kvpool.Replay(worker, 3, kvpool.ONE_LAUNCH))])
def test_the_daemon_s_memory(client, session, worker, interrupted, call, make):
    """Given back in the next turn."""
    for _ in range(3):
        interrupted(call, lambda: make(worker))
    gc.collect()
    worker.info()
    assert session_info(client, session).buffers == 0


def test_the_scheduler_s_handles(client, scheduler, session, interrupted):
    interrupted("buffer_create", lambda: session.create_buffer(4096))
    gc.collect()
    assert session_info(client, session).buffers == 0
    before = len(client.list_sessions())
    interrupted("session_open", scheduler.open_session)
    gc.collect()
    assert len(client.list_sessions()) == before
    interrupted("queue_open", lambda: session.open_queue(print))
    gc.collect()
    wait_until(lambda: session_info(client, session).queues == 0, "the queue goes")


def test_an_attachment(client, session, interrupted):
    for call in ("attach", "attachment_step_new", "attachment_saw_epoch", "attachment_dl_device"):
        interrupted(call, lambda: kvpool.attach(session.ticket(DEVICE)))
    gc.collect()
    wait_until(lambda: len(session_info(client, session).attachments) == 0, "the attachments go")


def test_maps_words_and_descriptors(pool, worker, interrupted):
    def mapped():
        with open("/proc/self/maps") as maps:
            return sum(f"kvpool:{pool.name}:" in line for line in maps)

    for call in ("attachment_map_pool", "pool_map_pool"):
        interrupted(call, lambda: worker.map_pool(pool.name))
    interrupted("pool_map_export", lambda: worker.map_pool(pool.name).region(0).array().__dlpack__())
    gc.collect()
    assert mapped() == 0
    for _ in range(600):  # of 512
        interrupted("timeline_new", lambda: worker.new_word(kvpool.WORKER))
    worker.new_word(kvpool.WORKER).free()
    before = os.listdir("/proc/self/fd")
    interrupted("memfd_create", lambda: kvpool.make_memfd("interrupted", 4096))
    assert os.listdir("/proc/self/fd") == before


class Tensor:
    """Of another library, on a GPU as it says."""

    __cuda_array_interface__ = {"data": (16, False), "typestr": "<f4", "shape": (4, 4), "version": 3}


def test_a_tensor_stays_until_its_buffer_is_given_back(worker, monkeypatch):
    """Also where nobody has the buffer any more and the release waits for a turn."""
    monkeypatch.setattr(kvpool.Attachment, "import_device", lambda self, address, count: self.create_buffer(count))
    tensor = Tensor()
    alive = weakref.ref(tensor)
    buffer = worker.import_tensor(tensor)
    assert buffer.bytes == 64
    del tensor, buffer
    gc.collect()
    assert alive() is not None
    worker.info()
    gc.collect()
    assert alive() is None


def test_a_completion_is_told_once(worker, pool, blocks, interrupted):
    """By the next poll, when an exception came behind the call that told it."""
    step = worker.step().zero_blocks(worker.map_pool(pool.name, kvpool.NOTHING), blocks)
    step_id = worker.post(step)
    interrupted("attachment_wait", lambda: worker.wait(MS))
    assert not worker.arm()
    assert worker.poll().step_id == step_id
    interrupted("attachment_wait", lambda: worker.run(step))
    assert len(worker.wait(MS).check()) == 1
    interrupted("attachment_post", lambda: worker.run(step))
    assert len(worker.wait(MS).check()) == 1
    assert worker.poll() is None and worker.info()["steps_in_flight"] == 0


def test_a_handler_polls(worker, pool, blocks, monkeypatch):
    """What the interrupted call was told is kept first: both steps are told once."""
    step = worker.step().zero_blocks(worker.map_pool(pool.name, kvpool.NOTHING), blocks)
    posted = [worker.post(step) for _ in range(4)]
    wait_until(lambda: worker.info()["steps_in_flight"] == 4 and not worker.arm(), "the first is done")
    real, told = kvpool._library.attachment_wait, []

    def then_poll(*arguments):
        real(*arguments)
        if not told:
            told.append(worker.poll().step_id)

    monkeypatch.setattr(kvpool._library, "attachment_wait", then_poll)
    told.extend(worker.wait(MS).step_id for _ in range(3))
    assert told == posted and worker.poll() is None


STORM = """
import gc, signal, sys, threading, kvpool
class Interrupted(Exception):
    pass
def handle(*_):
    raise Interrupted
sys.unraisablehook = lambda told: None  # a handler may run in a finalizer, which can't raise
worker = kvpool.attach(sys.stdin.readline())
mapped, block = worker.map_pool(sys.argv[1]), int(sys.argv[2])
kept = worker.create_buffer(64)
signal.signal(signal.SIGALRM, handle)
interrupts = rounds = 0
while interrupts < 1000:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + rounds % 60 * 0.00002)
            rounds += 1
            buffer = worker.create_buffer(1 << 16)
            step = worker.step().store(mapped.layer("kv"), buffer.view(8, 1024), [block * 64 + i for i in range(8)])
            worker.run(step)
            buffer.release()
            buffer = None
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            interrupts += 1
    except Interrupted:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
buffer = step = None
gc.collect()
while True:
    try:
        worker.wait(200)
    except kvpool.DeadlineExceeded:
        break
in_flight = []
thread = threading.Thread(target=lambda: in_flight.append(worker.info()["steps_in_flight"]))  # another's turn
thread.start()
thread.join()
print(*in_flight, flush=True)
sys.stdin.readline()
"""


def test_many_interrupts(client, session, pool, blocks):
    """Wherever they come: no buffer but the one that is kept, no step, and another thread has its turn."""
    process = subprocess.Popen([sys.executable, "-c", STORM, pool.name, str(blocks[0])], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, env=environment())
    try:
        process.stdin.write(session.ticket(DEVICE).to_json() + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n"
        info = session_info(client, session)
        assert (info.buffers, info.buffer_bytes) == (1, 64)
    finally:
        process.kill()
        process.communicate()
