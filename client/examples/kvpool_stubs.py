"""Python stubs of kvpool.proto, generated on import by protoc and gRPC's Python plugin.

    from kvpool_stubs import pb, connect

KVPOOL_PROTO names the file when it is neither in the source tree nor in an installation's share/kvpoold.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc


def _find_proto():
    here = Path(__file__).resolve().parent
    candidates = [Path(os.environ["KVPOOL_PROTO"])] if "KVPOOL_PROTO" in os.environ else [
        here.parent.parent / "proto" / "kvpool.proto",
        here.parent / "kvpool.proto",
    ]
    for path in candidates:
        if path.is_file():
            return path
    sys.exit(f"kvpool.proto is not at {' or '.join(map(str, candidates))}: set KVPOOL_PROTO to its path")


def _generate(proto):
    """Both modules of the file, imported from a folder that lives only as long as the import takes."""
    plugin = shutil.which("grpc_python_plugin")
    if not shutil.which("protoc") or not plugin:
        sys.exit("protoc and grpc_python_plugin are needed: apt-get install protobuf-compiler protobuf-compiler-grpc")
    with tempfile.TemporaryDirectory(prefix="kvpool-stubs-") as folder:
        subprocess.run(["protoc", f"-I{proto.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}",
                        f"--plugin=protoc-gen-grpc_python={plugin}", proto.name], check=True)
        sys.path.insert(0, folder)
        try:
            import kvpool_pb2
            import kvpool_pb2_grpc
        finally:
            sys.path.remove(folder)
    return kvpool_pb2, kvpool_pb2_grpc


pb, _pb_grpc = _generate(_find_proto())


def connect(socket_path):
    """The service's stub on a channel to the daemon's unix socket."""
    return _pb_grpc.KvpoolStub(grpc.insecure_channel(f"unix:{socket_path}"))
