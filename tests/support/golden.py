"""The golden cases: parameters and arrays of tests/golden/<case>/case.txt."""
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support import catalogue

ROOT = Path(__file__).resolve().parent.parent / "golden"


@dataclass(frozen=True)
class Case:
    name: str
    params: dict
    arrays: dict

    @property
    def format(self):
        return catalogue.FORMATS[self.params["format"]]

    @property
    def geometry(self):
        return catalogue.Geometry(self.format, int(self.params["block_size"]), int(self.params["num_blocks"]))

    @property
    def total_k(self):
        return int(self.params["total_k"])

    @property
    def cache(self):
        return self.arrays["cache"].reshape(-1)

    @property
    def stored(self):
        """bool: bytes of the cache that the store writes."""
        slots = self.arrays["slots"].astype(np.int64)
        mask = np.zeros(len(self.cache), bool)
        for begins, count in ((self.geometry.data_offset(0, slots[slots >= 0]), self.format.data_bytes),
                              (self.geometry.scale_offset(0, slots[slots >= 0]), self.format.scale_bytes)):
            mask[begins[:, None] + np.arange(count)] = True
        return mask

    @property
    def out(self):
        """uint8 [total_k, loaded_row_bytes], filled before the load."""
        return self.arrays["out"].view(np.uint8).reshape(self.total_k, -1)

    @property
    def out_scale(self):
        """uint8 [total_k, loaded_scale_bytes], or None."""
        scale = self.arrays.get("out_scale")
        return None if scale is None else scale.view(np.uint8).reshape(self.total_k, -1)

    @property
    def covered(self):
        """bool [total_k]: rows that a segment writes."""
        mask = np.zeros(self.total_k, bool)
        for _, begin, end, destination in self.arrays["segments"]:
            mask[destination:destination + end - begin] = True
        return mask


def names():
    """The store and load cases."""
    return sorted(p.name for p in ROOT.iterdir() if p.name.endswith(("_b64", "_b133")))


def load(name):
    params, arrays = {}, {}
    for line in (ROOT / name / "case.txt").read_text().splitlines():
        kind, key, *rest = line.split()
        if kind == "param":
            params[key] = rest[0]
        else:
            dtype = np.dtype(rest[0]).newbyteorder("<")
            shape = tuple(int(n) for n in rest[1].split("x"))
            arrays[key] = np.fromfile(ROOT / name / f"{key}.bin", dtype).reshape(shape)
    return Case(name, params, arrays)
