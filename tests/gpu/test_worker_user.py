"""A worker that is another user than the daemon: what it may do on the same GPU, time-sliced and as a client of one MPS server
for all users."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from support import reference
from support.catalogue import V41
from support.device import DEVICE, ON_GPU
from support.libkvpool import environment, kvpool
from support.traffic import random_rows, slots_of, whole_block_segments

pytest.importorskip("torch")

pytestmark = [pytest.mark.skipif(not ON_GPU, reason="$KVPOOL_TEST_DEVICE names no GPU"),
              pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")]

UNDER_MPS = os.environ.get("KVPOOL_TEST_MPS") == "1"
UID = 4242
TOKENS, BLOCKS = 64, 64

WORKER = """
import json, os, sys, numpy as np, torch, kvpool
worker = kvpool.attach(sys.stdin.readline())
blocks = json.loads(sys.stdin.readline())
slots = np.array([block * 64 + i for block in blocks for i in range(64)], dtype=np.int32)
given = np.load(sys.argv[1])
rows = torch.from_numpy(given.view(np.int16)).view(torch.bfloat16).cuda()
mapped = worker.map_pool("shared")
try:
    source, how = worker.import_tensor(rows), "imported"
except kvpool.Error as error:
    how = error.status.name
    source = worker.create_buffer(rows.numel() * 2)
    torch.from_dlpack(source.array("bfloat16", rows.shape)).copy_(rows)
torch.cuda.synchronize()
[report] = worker.run(worker.step().store(mapped.layer("kv"), source.view(len(slots), 1024), slots))
records = torch.from_dlpack(mapped.region("kv").array())[torch.as_tensor(blocks, device="cuda")]
print(json.dumps([os.getuid(), how, report.rows_stored, records.cpu().numpy().tobytes().hex()]))
worker.detach()
"""


def run_as_other_user(session, blocks, path):
    lines = session.ticket(DEVICE).to_json() + "\n" + json.dumps(np.asarray(blocks).tolist()) + "\n"
    done = subprocess.run([sys.executable, "-c", WORKER, str(path)], input=lines, text=True, capture_output=True, timeout=90,
                          user=UID, group=UID, extra_groups=[], env={**environment(), "HOME": "/tmp"}, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("flags, how", [([], "PERMISSION_DENIED"), (["--ipc-uid", UID], "imported")],
                         ids=["as it is", "named by ipc_uids"])
def test_a_worker_of_another_user(start_daemon, flags, how):
    daemon = start_daemon("--socket-mode", "0666", *flags)
    os.chmod(daemon.directory, 0o755)
    rows = random_rows(np.random.default_rng(9), V41, 4 * TOKENS)
    path = daemon.directory / "rows.npy"
    np.save(path, rows)
    with kvpool.Client(str(daemon.socket)) as scheduler:
        pool = scheduler.create_pool("shared", TOKENS, BLOCKS, [{"name": "kv", "format": "v41", "num_layers": 1}])
        session = scheduler.open_session("another-user")
        blocks = session.allocate(pool, 4)
        uid, found, stored, records = run_as_other_user(session, blocks, path)
        quantized = reference.quantize(V41, rows)
        expected = np.concatenate([quantized.data.view(np.uint8), quantized.scales.view(np.uint8)], axis=1)
        assert (uid, found, stored) == (UID, how, len(rows))
        assert bytes.fromhex(records) == expected.tobytes()
        loaded, *_ = session.load_rows(pool.layer("kv"), np.array(whole_block_segments(blocks, TOKENS)), len(rows),
                                       V41.row_bytes)
        assert bytes(loaded) == reference.cast_back(V41, rows).tobytes()
        assert daemon.client().device(DEVICE).restarts == 0
    path.unlink()
