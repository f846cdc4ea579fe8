"""Threads on one attachment: each call has its turn, whatever others call meanwhile, detach, or raise from a signal
handler. Programs of their own: what is wrong here hangs, and that must end."""
import subprocess
import sys

import pytest

from support.device import DEVICE, ON_GPU
from support.libkvpool import environment
from support.worker_fixtures import blocks, pool, scheduler, session  # fixtures

pytestmark = pytest.mark.skipif(ON_GPU, reason="threads are the host's")

BLOCK_SIZE, BLOCKS = 64, 16
REGIONS = [{"name": "kv", "format": "v41", "num_layers": 1}]


def run_program(script, *arguments, given=""):
    """What it prints. One that hangs is killed."""
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], input=given, env=environment(),
                          capture_output=True, text=True, check=False, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


ATTACHED = """
import sys, threading, kvpool
worker = kvpool.attach(sys.stdin.readline())
mapped = worker.map_pool(sys.argv[1], kvpool.NOTHING)
block, others, MS = int(sys.argv[2]), sys.argv[3:], 60000
"""

TOGETHER = ATTACHED + """
done, wrong = threading.Event(), []

def run():
    step = worker.step().zero_blocks(mapped, [block])
    return lambda: len(worker.run(step)) == 1

def step():  # of whoever runs or polls: each completion is told once, to one of them
    step = worker.step().zero_blocks(mapped, [block])
    def call():
        worker.post(step)
        return worker.wait(MS).check() is not None
    return call

def poll():
    return lambda: worker.poll() is None

def steps_made():
    def call():
        step = worker.step().zero_blocks(mapped, [block])
        step.destroy()
        return True
    return call

def buffers():
    def call():
        worker.create_buffer(4096)  # dropped, and given back in somebody's turn
        worker.create_buffer(4096).release()
        return True
    return call

def replays():
    def call():
        kvpool.Replay(worker, 1, kvpool.ONE_LAUNCH)
        kvpool.Replay(worker, 1, kvpool.BY_OP).destroy()
        return True
    return call

def looks():
    def call():
        worker.check()
        worker.fileno()
        worker.arm()
        worker.map_pool(sys.argv[1]).unmap()
        return worker.info()["generation"] == 1
    return call

def loop(make, count):
    try:
        call = make()
        while count != 0 and not done.is_set():
            if not call():
                wrong.append(f"{make.__name__} gave something else")
            count -= 1
    except BaseException as error:
        wrong.append(f"{make.__name__}: {error!r}")

threads = [threading.Thread(target=loop, args=(globals()[name], -1)) for name in others]
for thread in threads:
    thread.start()
loop(run, 2000)
done.set()
for thread in threads:
    thread.join()
print(wrong, worker.poll(), worker.info()["steps_in_flight"])
"""


@pytest.mark.parametrize("others", [["run"], ["poll"], ["step"], ["steps_made"], ["buffers"], ["replays"], ["looks"],
                                    ["run", "run", "poll", "buffers", "replays", "looks"]], ids=" ".join)
def test_a_thread_runs_while_others_call(session, pool, blocks, others):
    told = run_program(TOGETHER, pool.name, blocks[0], *others, given=session.ticket(DEVICE).to_json())
    assert told == "[] None 0\n"


DETACHED = ATTACHED + """
ended, begun = [], threading.Barrier(4)

def loop():
    step, is_first = worker.step().zero_blocks(mapped, [block]), True
    while True:
        try:
            worker.run(step)
            worker.create_buffer(64)
        except kvpool.Error as error:
            return ended.append(error.status.name)
        if is_first:
            begun.wait()
            is_first = False

threads = [threading.Thread(target=loop) for _ in range(3)]
for thread in threads:
    thread.start()
begun.wait()
worker.detach()
for thread in threads:
    thread.join()
print(sorted(ended))
"""


def test_a_thread_detaches_while_others_call(session, pool, blocks):
    told = run_program(DETACHED, pool.name, blocks[0], given=session.ticket(DEVICE).to_json())
    assert told == "['CANCELLED', 'CANCELLED', 'CANCELLED']\n"


# ---- the queue by itself

QUEUE = """
import signal, sys, threading, time
from kvpool._turns import Turns
turns, told = Turns(), []
class Interrupted(Exception):
    pass

def queued(name, call=lambda: None):
    '''A thread that has queued.'''
    last = turns._last
    thread = threading.Thread(target=lambda: turns(lambda: (told.append(name), call())))
    thread.start()
    while turns._last is last:
        time.sleep(0.001)
    return thread

def held():
    '''A thread whose turn it is, and what ends it.'''
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: turns(lambda: (entered.set(), leave.wait(), told.append("holder"))))
    thread.start()
    entered.wait()
    return thread, leave.set

def alarm_soon(handler):
    signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, 0.05)
"""

IN_ORDER = QUEUE + """
threads = []
def first():
    threads.extend(queued(name) for name in "abc")
    turns(lambda: told.append("inside"))
turns(first)
turns(lambda: told.append("again"))
for thread in threads:
    thread.join()
print(*told)
"""

HANDLER_ASKS = QUEUE + """
holder, leave = held()
behind = []
def handler():
    behind.append(queued("behind"))  # whose place is behind that of the thread that this interrupts
    leave()
    turns(lambda: told.append("handler"))
alarm_soon(handler)
turns(lambda: told.append("queued"))
behind[0].join()
holder.join()
print(told.index("holder") < told.index("handler") < told.index("queued") < told.index("behind"), len(told))
"""

HANDLER_RAISES = QUEUE + """
holder, leave = held()
behind = []
def handler():
    behind.append(queued("behind"))
    raise Interrupted
alarm_soon(handler)
try:
    turns(lambda: told.append("never"))
except Interrupted:
    told.append("interrupted")
time.sleep(0.05)
leave()
holder.join()
behind[0].join()
turns(lambda: told.append("again"))
print(*told)
"""

STORM = QUEUE + """
signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(Interrupted))
interrupts, wrong = 0, []
other_done = threading.Event()
inside = threading.Lock()

def alone():
    if inside.locked():
        wrong.append("two at once")
    with inside:
        sum(range(100))

def other():
    while not other_done.is_set():
        turns(alone)

thread = threading.Thread(target=other)
thread.start()
while interrupts < 3000:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + interrupts % 40 * 0.000005)
        while True:
            turns(alone)
    except Interrupted:
        interrupts += 1
other_done.set()
thread.join()
last = threading.Thread(target=lambda: turns(lambda: told.append("free")))
last.start()
last.join()
print(wrong, *told)
"""


@pytest.mark.parametrize("script, told", [(IN_ORDER, "inside a b c again"), (HANDLER_ASKS, "True 4"),
                                          (HANDLER_RAISES, "interrupted holder behind again"), (STORM, "[] free")],
                         ids=["in order", "a handler asks", "a handler raises", "many handlers raise"])
def test_turns(script, told):
    assert run_program(script) == told + "\n"
