"""What a fused_store makes of a row before it quantizes it: RMSNorm, rotation, Hadamard, in numpy float32.

Every multiply and add is an array operation of its own, so that nothing is contracted or reassociated.
"""
from dataclasses import dataclass

import numpy as np

from support.reference import bf16_to_f32, f32_to_bf16

SUM_ELEMENTS = 16


@dataclass(frozen=True)
class Recipe:
    """The parameters of a fused_store that are the same for every row."""

    weight: np.ndarray  # uint16 [D], BF16
    cos_sin: np.ndarray  # float32 [positions, rotary_dims]: cosines, then sines
    eps: float = 1e-6
    rope_offset: int = 0
    neox: bool = False
    hadamard: bool = False
    round_to_bf16: bool = True


def rope_table(positions, rotary_dims, base=10000.0):
    """float32 [positions, rotary_dims]."""
    angles = np.arange(positions)[:, None] * base**(-np.arange(0, rotary_dims, 2) / rotary_dims)
    return np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32)


def _rounded(recipe, y):
    return bf16_to_f32(f32_to_bf16(y)) if recipe.round_to_bf16 else y


def _squares_summed(x):
    squares = (x * x).reshape(len(x), x.shape[1] // SUM_ELEMENTS, SUM_ELEMENTS)
    sums = squares[:, :, 0]
    for i in range(1, SUM_ELEMENTS):
        sums = sums + squares[:, :, i]
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums


def _rotated(recipe, y, positions):
    dims = recipe.cos_sin.shape[1]
    if dims == 0:
        return y
    end = recipe.rope_offset + dims
    first, second = slice(recipe.rope_offset, end, 2), slice(recipe.rope_offset + 1, end, 2)
    if recipe.neox:
        middle = recipe.rope_offset + dims // 2
        first, second = slice(recipe.rope_offset, middle), slice(middle, end)
    cos, sin = recipe.cos_sin[positions, :dims // 2], recipe.cos_sin[positions, dims // 2:]
    out, a, b = y.copy(), y[:, first], y[:, second]
    out[:, first] = a * cos - b * sin
    out[:, second] = a * sin + b * cos
    return _rounded(recipe, out)


def _hadamard(y):
    n, stride = y.shape[1], 1
    while stride < n:
        pairs = y.reshape(len(y), n // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = np.stack((a + b, a - b), 2).reshape(len(y), n)
        stride *= 2
    return y * (np.float32(1) / np.sqrt(np.float32(n)))


def transformed(recipe, rows, positions):
    """rows: uint16 [n, D], BF16. The BF16 rows that go to the quantizer."""
    x = bf16_to_f32(np.asarray(rows, np.uint16))
    variance = _squares_summed(x) * (np.float32(1) / np.float32(x.shape[1]))
    r = np.float32(1) / np.sqrt(variance + np.float32(recipe.eps))
    y = _rounded(recipe, (x * r) * bf16_to_f32(recipe.weight))
    y = _rotated(recipe, y, np.asarray(positions))
    y = _hadamard(y) if recipe.hadamard else y
    assert y.dtype == np.float32
    return f32_to_bf16(y)
