"""The Python package of client/python on the build's libkvpool: `from support.library import kvpool`."""
import os
import sys
from pathlib import Path

from support.daemon import build_dir

PACKAGE = Path(__file__).resolve().parents[2] / "client" / "python"
LIBRARY = build_dir() / "client" / "libkvpool.so"

os.environ["KVPOOL_LIBRARY"] = str(LIBRARY)
sys.path.insert(0, str(PACKAGE))

import kvpool  # noqa: E402, F401


def environment():
    """Of another Python process that is to import kvpool."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE), "KVPOOL_LIBRARY": str(LIBRARY), "PYTHONDONTWRITEBYTECODE": "1"}
