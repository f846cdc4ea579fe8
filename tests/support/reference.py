"""Quantizer, dequantizer and region model in numpy: the independent implementation that the daemon must equal.

Code conversion searches a table of every value a code can have; there is no bit trick shared with a kernel.
All arithmetic is float32 (numpy does not contract or reassociate it).
"""
from dataclasses import dataclass

import numpy as np

from support.catalogue import Geometry

NAN_BF16 = 0x7FFF


def _e4m3_value(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0**(exponent - 10)
    return -magnitude if code & 0x80 else magnitude


def _e2m1_value(code):
    magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    return -magnitude if code & 8 else magnitude


E4M3_VALUES = np.array([_e4m3_value(c) for c in range(256)], np.float32)
E2M1_VALUES = np.array([_e2m1_value(c) for c in range(16)], np.float32)
UE8M0_VALUES = (np.arange(256, dtype=np.uint32) << 23).view(np.float32)  # byte 0 is 0.0, byte 255 is Inf


class _Codes:
    """Float32 to the nearest code, ties to the even code, saturating, sign kept."""

    def __init__(self, positive_values, sign_bit):
        self.midpoints = ((positive_values[:-1].astype(np.float64) + positive_values[1:]) / 2).astype(np.float32)
        self.sign_bit = sign_bit

    def __call__(self, x):
        magnitude = np.abs(x)
        code = np.searchsorted(self.midpoints, magnitude, side="left")
        tie = self.midpoints[np.minimum(code, len(self.midpoints) - 1)] == magnitude
        code = code + (tie & (code & 1 == 1))
        return (code | np.where(np.signbit(x), self.sign_bit, 0)).astype(np.uint8)


to_e4m3 = _Codes(E4M3_VALUES[:0x7F], 0x80)  # without the NaN at 0x7F
to_e2m1 = _Codes(E2M1_VALUES[:8], 8)


def bf16_to_f32(rows):
    return (rows.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x):
    """Round to nearest even; NaN becomes 0x7FFF, too large becomes Inf."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    lower, rest = bits >> 16, bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (lower & 1 == 1))
    return np.where(np.isnan(x), NAN_BF16, lower + up).astype(np.uint16)


def nonfinite(rows):
    return ~np.isfinite(bf16_to_f32(rows))


@dataclass
class Quantized:
    data: np.ndarray  # uint8 [n, data_bytes]
    scales: np.ndarray  # uint8 [n, scale_bytes]
    bad_rows: np.ndarray  # bool [n]: the input held NaN or Inf
    saturated: np.ndarray  # int [n]: saturated groups without a bad element
    saturated_bad: np.ndarray  # int [n]: groups that would have saturated and hold a bad element


def _ceil_log2(s):
    fraction, exponent = np.frexp(s)
    return np.where(fraction == 0.5, exponent - 1, exponent)


def _pack_fp4(codes):
    return codes[:, 0::2] | codes[:, 1::2] << 4


def quantize(fmt, rows):
    """rows: uint16 [n, elements], BF16 bits."""
    rows = np.ascontiguousarray(rows, np.uint16).reshape(-1, fmt.elements)
    n, zeros = len(rows), np.zeros(len(rows), np.int64)
    bad = nonfinite(rows)
    if fmt.quantized_dtype == "none":
        data = rows.view(np.uint8).reshape(n, fmt.row_bytes)
        return Quantized(data, np.zeros((n, 0), np.uint8), bad.any(1), zeros, zeros)

    groups = (n, fmt.groups, fmt.elements_per_scale)
    x = np.where(bad, np.float32(0), bf16_to_f32(rows)).reshape(groups)
    bad = bad.reshape(groups)
    amax = np.abs(x).max(2)
    saturated = np.zeros(amax.shape, bool)
    if fmt.name == "v41_fp4":
        m = np.maximum(amax, np.float32(2.0**-9 * 6)) * (np.float32(1) / np.float32(6))
        scales = to_e4m3(np.minimum(m, np.float32(448)))
        saturated = m > 448
        factor = np.float32(1) / E4M3_VALUES[scales]
    else:
        largest = np.float32(6 if fmt.quantized_dtype == "e2m1" else 448)
        s = np.maximum(amax, np.float32(1e-4)) / largest
        if fmt.scale_format == "ue8m0":
            exponent = _ceil_log2(s)
            scales = (exponent + 127).astype(np.uint8)
            factor = np.ldexp(np.float32(1), -exponent)
        else:
            scales = s
            factor = np.float32(1) / s
    assert factor.dtype == np.float32
    scaled = x * factor[:, :, None]

    if fmt.quantized_dtype == "e4m3":
        codes = np.where(bad, 0x7F, to_e4m3(scaled)).astype(np.uint8)
        data = codes.reshape(n, fmt.elements)
    else:
        bad_group = bad.any(2)
        codes = np.where(bad_group[:, :, None], 0, to_e2m1(scaled)).astype(np.uint8)
        scales = np.where(bad_group, 0x7F if fmt.scale_format == "e4m3" else 0xFF, scales).astype(np.uint8)
        data = _pack_fp4(codes.reshape(n, fmt.elements))
    bad_any = bad.any(2)
    return Quantized(data, np.ascontiguousarray(scales).view(np.uint8).reshape(n, fmt.scale_bytes), bad_any.any(1),
                     (saturated & ~bad_any).sum(1), (saturated & bad_any).sum(1))


def decoded_codes(fmt, data):
    """The codes of records as float32 [n, elements], scales not applied."""
    if fmt.quantized_dtype == "e4m3":
        return E4M3_VALUES[data]
    codes = np.stack((data & 15, data >> 4), axis=2).reshape(len(data), fmt.elements)
    return E2M1_VALUES[codes]


def decoded_scales(fmt, scales):
    """float32 [n, groups] with the meaning a load gives them."""
    if fmt.scale_format == "f32":
        return np.ascontiguousarray(scales).view(np.float32)
    return (UE8M0_VALUES if fmt.scale_format == "ue8m0" else E4M3_VALUES)[scales]


def decode(fmt, data, scales):
    """Records as numbers: float32 [n, elements]."""
    if fmt.quantized_dtype == "none":
        return bf16_to_f32(np.ascontiguousarray(data).view(np.uint16))
    codes = decoded_codes(fmt, data).reshape(len(data), fmt.groups, fmt.elements_per_scale)
    with np.errstate(invalid="ignore", over="ignore"):
        return (codes * decoded_scales(fmt, scales)[:, :, None]).reshape(len(data), fmt.elements)


def loaded_rows(fmt, data, scales):
    """What the first output of a load holds: uint8 [n, loaded_row_bytes]."""
    if not fmt.dequantize_on_load:
        return data
    return f32_to_bf16(decode(fmt, data, scales)).view(np.uint8).reshape(len(data), fmt.row_bytes)


def cast_back(fmt, rows):
    """Rows as a later load would return them: uint8 [n, row_bytes]; main caches and bf16 only."""
    assert not fmt.is_index
    q = quantize(fmt, rows)
    return loaded_rows(fmt, q.data, q.scales)


class RegionModel:
    """A region's bytes and what store and load do to them."""

    def __init__(self, geometry: Geometry, memory=None):
        self.geometry = geometry
        self.format = geometry.format
        self.memory = np.zeros(geometry.region_bytes, np.uint8) if memory is None else memory

    def _indices(self, layer, slots):
        slots = np.asarray(slots, np.int64)
        data = self.geometry.data_offset(layer, slots)[:, None] + np.arange(self.format.data_bytes)
        scales = self.geometry.scale_offset(layer, slots)[:, None] + np.arange(self.format.scale_bytes)
        return data, scales

    def records(self, layer, slots):
        data, scales = self._indices(layer, slots)
        return self.memory[data], self.memory[scales]

    def store(self, layer, rows, slots):
        """rows: uint16 [>= len(slots), elements]. Returns the quantized rows of all slots, skipped ones included."""
        slots = np.asarray(slots, np.int64)
        q = quantize(self.format, rows[:len(slots)])
        kept = slots >= 0
        data, scales = self._indices(layer, slots[kept])
        self.memory[data] = q.data[kept]
        self.memory[scales] = q.scales[kept]
        return q

    def load(self, layer, segments, out, out_scales=None):
        """out: uint8 [>= total_k, loaded_row_bytes], out_scales: uint8 [>= total_k, loaded_scale_bytes]. Rows that no
        segment covers are left alone."""
        tokens_per_block = self.geometry.tokens_per_block
        for block, begin, end, destination in np.asarray(segments, np.int64).reshape(-1, 4):
            target = slice(destination, destination + end - begin)
            if block < 0:
                out[target] = 0
                if out_scales is not None:
                    out_scales[target] = 0
                continue
            data, scales = self.records(layer, block * tokens_per_block + np.arange(begin, end))
            out[target] = loaded_rows(self.format, data, scales)
            if out_scales is not None:
                out_scales[target] = scales
