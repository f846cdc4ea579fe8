"""Python stubs of proto/kvpool.proto: those in $KVPOOL_STUBS, else generated when they are first imported and thrown
away afterwards."""
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SERVICE = "kvpool.v1.Kvpool"


def _generate():
    """The folder they are in."""
    folder = tempfile.mkdtemp(prefix="kvpool-stubs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={folder}", f"--grpc_python_out={folder}",
                    "--plugin=protoc-gen-grpc_python=/usr/bin/grpc_python_plugin", "kvpool.proto"],
                   check=True)
    return folder


sys.path.insert(0, os.environ.get("KVPOOL_STUBS") or _generate())

import kvpool_pb2 as pb  # noqa: E402,F401
import kvpool_pb2_grpc as pb_grpc  # noqa: E402,F401
