"""The record formats and the geometry of a region, from the prose of the byte contract.

Nothing here is generated from, or shares code with, the daemon: it is what the daemon is compared against.
"""
import math
from dataclasses import dataclass

GOLDEN_CACHE_FILL = 0xA5
GOLDEN_OUT_FILL = 0x5A


@dataclass(frozen=True)
class Format:
    """One format of a given width."""

    name: str
    quantized_dtype: str  # "none", "e4m3", "e2m1"
    elements: int
    elements_per_scale: int
    scale_format: str  # "none", "ue8m0", "e4m3", "f32"
    dequantize_on_load: bool
    token_interleaved: bool

    @property
    def data_bytes(self):
        if self.quantized_dtype == "none":
            return 2 * self.elements
        return self.elements if self.quantized_dtype == "e4m3" else self.elements // 2

    @property
    def groups(self):
        return self.elements // self.elements_per_scale if self.elements_per_scale else 0

    @property
    def scale_bytes(self):
        return self.groups * {"none": 0, "ue8m0": 1, "e4m3": 1, "f32": 4}[self.scale_format]

    @property
    def bytes_per_token(self):
        return self.data_bytes + self.scale_bytes

    @property
    def row_bytes(self):
        """A BF16 source row."""
        return 2 * self.elements

    @property
    def is_index(self):
        """Loads hand out codes and scales as they are stored."""
        return self.quantized_dtype != "none" and not self.dequantize_on_load

    @property
    def loaded_row_bytes(self):
        return self.data_bytes if self.is_index else self.row_bytes

    @property
    def loaded_scale_bytes(self):
        return self.scale_bytes if self.is_index else 0

    @property
    def block_alignment_bytes(self):
        return math.lcm(32, self.bytes_per_token) if self.token_interleaved else 32

    def block_stride_bytes(self, tokens_per_block):
        size, alignment = tokens_per_block * self.bytes_per_token, self.block_alignment_bytes
        return (size + alignment - 1) // alignment * alignment


V41 = Format("v41", "e4m3", 512, 32, "ue8m0", True, True)
V41_FP4 = Format("v41_fp4", "e2m1", 512, 16, "e4m3", True, True)
INDEX_FP4 = Format("index_fp4", "e2m1", 128, 32, "ue8m0", False, False)
INDEX_FP8_F32 = Format("index_fp8_f32", "e4m3", 128, 128, "f32", False, False)
INDEX_MXFP8 = Format("index_mxfp8", "e4m3", 128, 32, "ue8m0", False, False)
BF16 = Format("bf16", "none", 512, 0, "none", False, False)

FORMATS = {f.name: f for f in (V41, V41_FP4, INDEX_FP4, INDEX_FP8_F32, INDEX_MXFP8, BF16)}


def bf16_of_width(width):
    return Format("bf16", "none", width, 0, "none", False, False)


@dataclass(frozen=True)
class Geometry:
    """Where the bytes of a region's records are, as offsets from the region's first byte."""

    format: Format
    tokens_per_block: int
    num_blocks: int
    num_layers: int = 1

    @property
    def block_stride_bytes(self):
        return self.format.block_stride_bytes(self.tokens_per_block)

    @property
    def layer_stride_bytes(self):
        return self.num_blocks * self.block_stride_bytes

    @property
    def region_bytes(self):
        return self.num_layers * self.layer_stride_bytes

    @property
    def num_slots(self):
        return self.num_blocks * self.tokens_per_block

    def data_offset(self, layer, slot):
        """Works on numbers and on int64 arrays."""
        block, token = slot // self.tokens_per_block, slot % self.tokens_per_block
        per_token = self.format.bytes_per_token if self.format.token_interleaved else self.format.data_bytes
        return layer * self.layer_stride_bytes + block * self.block_stride_bytes + token * per_token

    def scale_offset(self, layer, slot):
        if self.format.token_interleaved:
            return self.data_offset(layer, slot) + self.format.data_bytes
        block, token = slot // self.tokens_per_block, slot % self.tokens_per_block
        return (layer * self.layer_stride_bytes + block * self.block_stride_bytes +
                self.tokens_per_block * self.format.data_bytes + token * self.format.scale_bytes)
