"""The Python package of client/python on the build's libkvpool: `from support.libkvpool import kvpool`.

A library with sanitizers can't be loaded into an ordinary Python: for such a build $KVPOOL_TEST_LIBRARY names another
build's."""
import os
import sys
from pathlib import Path

from support.daemon import build_dir

PACKAGE = Path(__file__).resolve().parents[2] / "client" / "python"
# Where a build has it, and a folder of tests/gpu/prepare.sh.
_PLACES = [build_dir() / "client" / "libkvpool.so", build_dir() / "lib" / "libkvpool.so.0"]
LIBRARY = Path(os.environ.get("KVPOOL_TEST_LIBRARY") or next((p for p in _PLACES if p.exists()), _PLACES[0]))

os.environ["KVPOOL_LIBRARY"] = str(LIBRARY)
sys.path.insert(0, str(PACKAGE))

import kvpool  # noqa: E402, F401


def environment():
    """Of another Python process that is to import kvpool."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE), "KVPOOL_LIBRARY": str(LIBRARY), "PYTHONDONTWRITEBYTECODE": "1"}
