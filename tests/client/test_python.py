"""The Python package by itself: the layouts and names that it has of kvpool.h, its planners, its gRPC half, and that it
needs neither numpy nor a build's paths."""
import json
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from support import golden, plans, reference
from support.catalogue import INDEX_MXFP8
from support.device import DEVICE
from support.libkvpool import LIBRARY, PACKAGE, environment, kvpool
from support.traffic import random_rows, slots_of, whole_block_segments

INCLUDE = PACKAGE.parent / "include"
HEADERS = [INCLUDE / "kvpool" / name for name in ("kvpool.h", "plan.h", "worker.h")]

# For tools, for people, and for what Python does otherwise.
NOT_BOUND = {"status_name", "client_interrupt", "server_info_protocol_version", "server_info_started_unix_ns",
             "server_info_caller", "pool_namespace", "pool_leased_blocks", "pool_quarantined_blocks",
             "pool_bytes_per_placement", "pool_region_find", "pool_list_get", "pool_list_destroy", "pool_list_count",
             "pool_list_item", "session_list_get", "session_list_destroy", "session_list_count", "session_list_item",
             "session_list_attachment", "block_map_get", "block_map_destroy", "block_map_run_count", "block_map_run",
             "step_add_load", "record_list_get", "record_list_destroy", "record_list_count", "record_list_item",
             "blocks_dump"}


def test_every_call_is_bound():
    """A call of the headers is in the package, or it is known that it isn't."""
    declared = set()
    for header in HEADERS:
        text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
        declared |= set(re.findall(r"KVPOOL_API [^;(]*?\bkvpool_(\w+)\(", text))
    bound = {name for name in vars(kvpool._library) if not name.startswith("_")}
    assert len(declared) > 100
    assert declared - bound - {"client_interrupt"} == NOT_BOUND - {"client_interrupt"}
    assert bound <= declared


def test_layouts(tmp_path):
    """Sizes and offsets of every struct, as a C compiler has them."""
    structs = sys.modules["kvpool._library"].STRUCTS
    lines = ["#include <kvpool/kvpool.h>", "#include <stdio.h>", "int main(void) {", '  printf("{");']
    for i, (name, struct) in enumerate(structs.items()):
        lines.append(f'  printf("{"," if i else ""}\\"{name}\\": [%zu", sizeof({name}));')
        for field, *_ in struct._fields_:
            lines.append(f'  printf(", [\\"{field}\\", %zu, %zu]", offsetof({name}, {field}), '
                         f'sizeof((({name} *)0)->{field}));')
        lines.append('  printf("]");')
    lines += ['  printf("}");', "  return 0;", "}"]
    source, program = tmp_path / "layouts.c", tmp_path / "layouts"
    source.write_text("\n".join(lines))
    subprocess.run(["cc", "-std=c11", f"-I{INCLUDE}", source, "-o", program], check=True)
    found = json.loads(subprocess.run([program], capture_output=True, check=True).stdout)
    import ctypes
    for name, struct in structs.items():
        size, *fields = found[name]
        assert ctypes.sizeof(struct) == size, name
        for field, offset, width in fields:
            described = getattr(struct, field)
            assert (described.offset, described.size) == (offset, width), f"{name}.{field}"


def test_statuses_and_constants():
    text = "".join(header.read_text() for header in HEADERS)
    declared = dict(re.findall(r"\bKVPOOL_([A-Z_]+) = (\d+)", text))
    for status in kvpool.Status:
        assert int(declared[status.name]) == status
    for constant, name in ((kvpool.READ, "MAP_READ"), (kvpool.READ_WRITE, "MAP_READ_WRITE"),
                           (kvpool.NOTHING, "MAP_NOTHING"), (kvpool.WORKER, "TIMELINE_WORKER"),
                           (kvpool.EXECUTOR, "TIMELINE_EXECUTOR"), (kvpool.PAGED, "POOL_PAGED"),
                           (kvpool.RING, "POOL_RING")):
        assert int(declared[name]) == constant


# ---- without numpy, and elsewhere

WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import kvpool
slots = kvpool.plan.slot_mapping([5, 2], 4, 2, 6)
assert isinstance(slots, memoryview) and slots.tolist() == [22, 23, 8, 9], slots
segments = kvpool.plan.paged_range([5, 2], 4, 2, 6)
assert segments.tolist() == [[5, 2, 4, 0], [2, 0, 2, 2]], segments
assert kvpool.plan.paged_range([], 4, 0, 0).tolist() == []
assert kvpool.plan.slot_mapping(memoryview(bytes([5, 0, 0, 0])).cast("i"), 4, 0, 1).tolist() == [20]
with kvpool.Client(sys.argv[1]) as client, client.open_session() as session:
    pool = client.pool(sys.argv[2])
    blocks = session.allocate(pool, 3)
    step = session.step().zero_blocks(pool, blocks).copy_blocks(pool, [(blocks[0], blocks[1])])
    assert len(step.run()) == 2
    try:
        session.step().zero_blocks(pool, [2**31])
    except OverflowError:
        print("done")
"""


def test_without_numpy(client, daemon, pool_name):
    pool = client.create_pool(pool_name, 64, 4, [dict(name="kv", format="v41", num_layers=1)])
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY, str(daemon.socket), pool_name], env=environment(),
                          capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    client.delete_pool(pool.pool_id)


def test_without_the_library():
    done = subprocess.run([sys.executable, "-c", "import kvpool"], capture_output=True, text=True, check=False,
                          env={**environment(), "KVPOOL_LIBRARY": "/nowhere/libkvpool.so"})
    assert done.returncode != 0 and "KVPOOL_LIBRARY" in done.stderr and "ImportError" in done.stderr


def test_installed(tmp_path):
    """As pip puts it: the package alone, the library by its name."""
    if subprocess.run([sys.executable, "-c", "import pip, setuptools, wheel"], capture_output=True).returncode != 0:
        pytest.skip("no pip, setuptools and wheel here")
    source = tmp_path / "python"
    subprocess.run(["cp", "-r", PACKAGE, source], check=True)
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps",
                           "--no-index", "--target", tmp_path / "site", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env = {k: v for k, v in environment().items() if k != "KVPOOL_LIBRARY"}
    env.update(PYTHONPATH=str(tmp_path / "site"), LD_LIBRARY_PATH=str(LIBRARY.parent))
    told = subprocess.run([sys.executable, "-c", "import kvpool; print(kvpool.version(), kvpool.__file__)"], env=env,
                          capture_output=True, text=True, cwd=tmp_path, check=True).stdout.split()
    assert told == [kvpool.version(), str(tmp_path / "site" / "kvpool" / "__init__.py")]


# ---- planners: against the golden cases and the models of the tests

def test_int32_of_everything():
    expected = kvpool.plan.slot_mapping([7, 3, 1], 4, 0, 12).tolist()
    for values in (np.array([7, 3, 1]), np.array([7, 3, 1], np.int32), np.array([7, 0, 3, 0, 1], np.int16)[::2],
                   (7, 3, 1), np.array([7, 3, 1], np.uint64)):
        assert kvpool.plan.slot_mapping(values, 4, 0, 12).tolist() == expected
    for bad, error in (([2**31], OverflowError), (np.array([-2**31 - 1]), OverflowError), ([1.5], TypeError),
                       (np.array([2**63], np.uint64), OverflowError)):
        with pytest.raises(error):
            kvpool.plan.slot_mapping(bad, 4, 0, 1)
    with pytest.raises(kvpool.Error) as caught:
        kvpool.plan.slot_mapping([7, -1], 4, 0, 8)
    assert caught.value.position == 1 and caught.value.value == -1


@pytest.mark.parametrize("name", ["plan_swa_w40_r64", "plan_swa_w64_r64", "plan_swa_w64_r96"])
def test_swa_plans(name):
    case = golden.load(name)
    window, ring = int(case.params["window"]), int(case.params["ring_tokens"])
    sequences = [tuple(int(n) for n in row) for row in case.arrays["seqs"]]
    segments, total_k = kvpool.plan.swa(sequences, window, ring)
    assert total_k == window * len(sequences)
    np.testing.assert_array_equal(segments, case.arrays["out"])
    short = [(state, k, min(q, 1), valid) for state, k, q, valid in sequences]
    for found, expected in ((kvpool.plan.swa_slots(sequences, ring), plans.swa_slots(sequences, ring)),
                            (kvpool.plan.swa_pivots(sequences, window), plans.swa_pivots(sequences, window)),
                            (kvpool.plan.swa_decode(short, window, ring), plans.swa_decode(short, window, ring))):
        np.testing.assert_array_equal(found, expected)


def test_mirror_plans():
    """The gathered rows, put back."""
    lengths, ranks = [5, 1, 16], 2
    held = np.concatenate([kvpool.plan.mirror(lengths, ranks, rank) for rank in range(ranks)])
    assert sorted(held[held >= 0]) == list(range(sum(lengths)))
    np.testing.assert_array_equal(held[kvpool.plan.mirror_reverse(lengths, ranks)], np.arange(sum(lengths)))


def test_compressed_plans():
    """Worked out by hand: ratio 4, two sequences of 9 and 3 tokens, blocks of 2 compressed tokens."""
    batch = [(9, 5, [7]), (3, 3, [4])]
    segments, cu_seqlens, total_k = kvpool.plan.compressed(batch, 4, 2)
    assert segments.tolist() == [[7, 0, 2, 0], [-1, 0, 1, 2]]
    assert (cu_seqlens.tolist(), total_k) == ([0, 2, 3], 3)
    ks, ke = kvpool.plan.compressed_visible([(9, 5), (3, 3)], 4, cu_seqlens)
    assert ks.tolist() == [0] * 5 + [2] * 3
    assert ke.tolist() == [1, 1, 1, 2, 2, 2, 2, 2]
    assert kvpool.plan.new_compressed(9, 5, 4) == (1, 2)
    with pytest.raises(ValueError):
        kvpool.plan.compressed_visible(batch, 4, [0])


# ---- the gRPC half

@pytest.fixture(scope="module")
def scheduler(daemon):
    with kvpool.Client(str(daemon.socket), wait_until_serving=True) as made:
        yield made


def test_info(scheduler, daemon):
    info = scheduler.info()
    assert info["pid"] == daemon.pid and info["version"] == kvpool.version()
    assert [d["name"] for d in info["devices"]] == [DEVICE]
    assert {f["name"]: f["bytes_per_token"] for f in info["formats"]}["v41"] == 528


def test_pools(scheduler, pool_name):
    pool = scheduler.create_pool(pool_name, 64, 6, [{"name": "a", "format": "v41", "num_layers": 3, "note": "main"},
                                                    {"name": "b", "format": "bf16", "width": 64, "num_layers": 1,
                                                     "compression_ratio": 4}], kind=kvpool.RING, placements=[DEVICE])
    again = scheduler.pool(pool_name)
    assert again.id == pool.id and again.kind == kvpool.RING and again.num_blocks == again.free_blocks == 6
    assert [(r["name"], r["tokens_per_block"], r["note"]) for r in again.regions] == [("a", 64, "main"), ("b", 16, "")]
    assert again.placements == [DEVICE]
    assert again.layer("b").region == 1
    with pytest.raises(KeyError):
        again.layer("c")
    with pytest.raises(kvpool.Error) as caught:
        scheduler.create_pool(pool_name, 64, 6, [{"name": "a", "format": "v41", "num_layers": 3}])
    assert caught.value.status == kvpool.Status.ALREADY_EXISTS
    pool.delete()
    with pytest.raises(kvpool.Error) as caught:
        again.refresh()
    assert caught.value.status == kvpool.Status.UNKNOWN_POOL


def test_rows_queue_and_events(scheduler, pool_name):
    """Rows over gRPC, steps through a queue, and the end of the session as its events have it."""
    events, completions, ended = [], [], threading.Event()

    def on_event(event):
        events.append(event)
        ended.set()

    pool = scheduler.create_pool(pool_name, 16, 4, [{"name": "kv", "format": "index_mxfp8", "num_layers": 1}])
    session = scheduler.open_session("python", on_event=on_event)
    blocks = session.allocate(pool, 2)
    rows = random_rows(np.random.default_rng(3), INDEX_MXFP8, 32)
    assert session.store_rows(pool.layer("kv"), rows, slots_of(blocks, 16)).rows_stored == 32
    data, scales, report = session.load_rows(pool.layer("kv"), whole_block_segments(blocks, 16), 32, 128, 4)
    q = reference.quantize(INDEX_MXFP8, rows)
    assert bytes(data) == q.data.tobytes() and bytes(scales) == q.scales.tobytes() and report.rows_loaded == 32

    buffer = session.create_buffer(4096)
    buffer.write(np.arange(1024, dtype=np.int32))
    assert bytes(buffer.read(8, 4)) == bytes([1, 0, 0, 0, 2, 0, 0, 0])
    with session.open_queue(completions.append, want_accepted=True) as queue:
        good = queue.submit(session.step().zero_blocks(pool, blocks))
        bad = queue.submit(session.step().zero_blocks(pool, [99]))
        queue.wait()
    assert [(c.step_id, c.accepted, c.error is None) for c in completions] in (
        [(good, True, True), (good, False, True), (bad, False, False)],
        [(good, True, True), (bad, False, False), (good, False, True)])
    failed = next(c for c in completions if c.step_id == bad)
    with pytest.raises(kvpool.Error) as caught:
        failed.check()
    assert caught.value.status == kvpool.Status.OUT_OF_RANGE and caught.value.value == 99
    buffer.release()
    session.free(pool, blocks[:1])
    with pytest.raises(kvpool.Error) as caught:
        session.free(pool, blocks)
    assert caught.value.status == kvpool.Status.NOT_OWNER and caught.value.position == 0

    # Somebody who has its secret ends it.
    from support.client import Client
    from support.stubs import pb
    other = Client(f"unix:{scheduler.info()['attach_socket'].replace('.attach', '')}")
    ticket = session.ticket()
    other.call("CloseSession", pb.CloseSessionRequest(session=pb.SessionRef(session_id=ticket.session_id,
                                                                            secret=ticket.secret)))
    other.close()
    assert ended.wait(60)
    assert events[0]["kind"] == "ended" and isinstance(events[0]["error"], kvpool.Error)
    with pytest.raises(kvpool.Error):
        session.check()
    session.close()
    pool.delete(force=True)


CALLBACKS = """
import gc, sys, threading, kvpool
told, seen = threading.Event(), []
def on_completion(completion):
    for close in closes:
        try:
            seen.append(close())
        except kvpool.Error as error:
            seen.append(error.status.name)
    told.set()
client = kvpool.Client(sys.argv[1])
session = client.open_session()
if sys.argv[2] == "closes":
    queue = session.open_queue(on_completion)
    closes = [client.close, queue.close, session.close]
    queue.submit(session.step().zero_blocks(client.pool(sys.argv[3]), []))
else:  # the last of a client goes where nothing may wait for its thread
    other = [kvpool.Client(sys.argv[1])]
    queue = session.open_queue(on_completion)
    closes = [other.clear, lambda: None]
    queue.submit(session.step().zero_blocks(client.pool(sys.argv[3]), []))
assert told.wait(60)
gc.collect()
print(seen)
"""


@pytest.mark.parametrize("what, seen", [("closes", "['INVALID_ARGUMENT', None, None]"), ("drops", "[None, None]")])
def test_closing_inside_a_callback(scheduler, daemon, pool_name, what, seen):
    """A client waits for the thread that runs callbacks; whatever is done there, the program goes on and ends."""
    pool = scheduler.create_pool(pool_name, 64, 4, [{"name": "kv", "format": "v41", "num_layers": 1}])
    done = subprocess.run([sys.executable, "-c", CALLBACKS, str(daemon.socket), what, pool_name], env=environment(),
                          capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (seen + "\n", "", 0)
    pool.delete()


def test_handles_that_are_gone(scheduler):
    session = scheduler.open_session()
    buffer = session.create_buffer(64)
    step, view = session.step(), buffer.view(1, 16)
    buffer.release()
    with pytest.raises(ValueError, match="given back"):
        view.struct
    session.close()
    with pytest.raises(ValueError, match="Session has been given back"):
        session.allocate(None, 1)
    step.destroy()
    with pytest.raises(ValueError, match="SessionStep"):
        step.array([1])
    step.destroy()


def test_a_program_that_just_ends(daemon):
    """Nothing is closed: everything is given back at exit, quietly."""
    done = subprocess.run([sys.executable, "-c", """
import sys, kvpool
client = kvpool.Client(sys.argv[1])
session = client.open_session(on_event=print)
queue = session.open_queue(print)
step, buffer = session.step(), session.create_buffer(64)
worker = kvpool.attach(session.ticket(sys.argv[2]))
kept = worker.step(), worker.new_word(kvpool.WORKER)
print("end")
""", str(daemon.socket), DEVICE], env=environment(), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)
