"""The reference itself: against the golden files, against numbers worked out on paper, and against itself."""
import numpy as np
import pytest

from support import catalogue, golden, reference
from support.catalogue import FORMATS, Geometry
from support.reference import RegionModel


@pytest.mark.parametrize("name", golden.names())
def test_store_and_load_equal_the_golden_files(name):
    case = golden.load(name)
    assert case.geometry.block_stride_bytes == int(case.params["block_stride_bytes"])
    assert case.format.bytes_per_token == int(case.params["bytes_per_token"])
    region = RegionModel(case.geometry)
    region.memory[:] = catalogue.GOLDEN_CACHE_FILL
    region.store(0, case.arrays["rows"], case.arrays["slots"])
    assert region.memory.tobytes() == case.cache.tobytes()

    out = np.full((case.total_k, case.format.loaded_row_bytes), catalogue.GOLDEN_OUT_FILL, np.uint8)
    scales = None
    if case.format.is_index:
        scales = np.full((case.total_k, case.format.loaded_scale_bytes), catalogue.GOLDEN_OUT_FILL, np.uint8)
    region.load(0, case.arrays["segments"], out, scales)
    assert out.tobytes() == case.out.tobytes()
    assert (scales is None) == (case.out_scale is None)
    if scales is not None:
        assert scales.tobytes() == case.out_scale.tobytes()


def test_every_store_and_load_case_is_there():
    assert golden.names() == sorted(f"{name}_b{size}" for name in FORMATS for size in (64, 133))


@pytest.mark.parametrize("name, bytes_per_token, stride_133, alignment", [
    ("v41", 528, 70752, 1056), ("v41_fp4", 288, 38304, 288), ("index_fp4", 68, 9056, 32),
    ("index_fp8_f32", 132, 17568, 32), ("index_mxfp8", 132, 17568, 32), ("bf16", 1024, 136192, 32)])
def test_geometry(name, bytes_per_token, stride_133, alignment):
    fmt = FORMATS[name]
    assert fmt.bytes_per_token == bytes_per_token
    assert fmt.block_stride_bytes(133) == stride_133
    assert fmt.block_alignment_bytes == alignment


def test_code_tables():
    assert reference.E4M3_VALUES[[0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE]].tolist() == [0, 2**-9, 2**-6, 1, 448, -448]
    assert np.isnan(reference.E4M3_VALUES[[0x7F, 0xFF]]).all()
    assert reference.E2M1_VALUES.tolist() == [0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6]
    assert reference.UE8M0_VALUES[[0, 1, 127, 254]].tolist() == [0, 2**-126, 1, 2**127]
    assert np.isinf(reference.UE8M0_VALUES[255])


@pytest.mark.parametrize("value, code", [
    (0.0, 0x00), (-0.0, 0x80), (2**-10, 0x00), (1.5 * 2**-9, 0x02), (2.5 * 2**-9, 0x02), (1.0625, 0x38),
    (1.1875, 0x3A), (448, 0x7E), (464, 0x7E), (1e30, 0x7E), (-1e30, 0xFE), (432, 0x7E), (431.9, 0x7D)])
def test_e4m3_rounds_to_even_and_saturates(value, code):
    assert reference.to_e4m3(np.float32(value)) == code


@pytest.mark.parametrize("value, code", [
    (0.25, 0), (0.26, 1), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5, 6), (5.01, 7), (7, 7), (-0.0, 8),
    (-5, 14), (-100, 15)])
def test_e2m1_rounds_to_even_and_saturates(value, code):
    assert reference.to_e2m1(np.float32(value)) == code


@pytest.mark.parametrize("value, bits", [
    (1.0, 0x3F80), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (float("nan"), 0x7FFF), (3.4e38, 0x7F80),
    (-3.4e38, 0xFF80), (-0.0, 0x8000)])
def test_bf16_rounds_to_even(value, bits):
    assert reference.f32_to_bf16(np.array([value], np.float32))[0] == bits


def test_zero_groups_have_the_smallest_scale():
    for name, byte in (("v41", 105), ("index_mxfp8", 105), ("index_fp4", 112)):
        q = reference.quantize(FORMATS[name], np.zeros((1, FORMATS[name].elements), np.uint16))
        assert (q.scales == byte).all() and (q.data == 0).all()


def test_bad_values_stay_in_their_group():
    for name in ("v41", "v41_fp4", "index_fp4", "index_mxfp8"):
        fmt = FORMATS[name]
        rows = np.full((1, fmt.elements), 0x3F80, np.uint16)
        clean = reference.quantize(fmt, rows)
        rows[0, 3] = 0xFF80
        q = reference.quantize(fmt, rows)
        assert q.bad_rows.tolist() == [True] and not clean.bad_rows.any()
        per_group = fmt.data_bytes // fmt.groups
        assert (q.data[0, per_group:] == clean.data[0, per_group:]).all()
        assert (q.scales[0, 1:] == clean.scales[0, 1:]).all()
        if fmt.quantized_dtype == "e4m3":
            assert q.data[0, 3] == 0x7F and q.scales[0, 0] == clean.scales[0, 0]
        else:
            assert (q.data[0, :per_group] == 0).all() and q.scales[0, 0] == (0x7F if name == "v41_fp4" else 0xFF)


def test_saturated_groups_are_counted():
    rows = np.zeros((3, 512), np.uint16)
    rows[0, 0] = 0x4528  # 2688 = 448 * 6: not saturated
    rows[1, 0] = 0x4529  # the next BF16 above
    rows[2, 0], rows[2, 16] = 0x7F7F, 0xFF7F
    assert reference.quantize(FORMATS["v41_fp4"], rows).saturated.tolist() == [0, 1, 2]


def test_a_region_is_layer_major():
    g = Geometry(FORMATS["index_fp4"], 17, 5, 3)
    assert g.data_offset(2, 1 * 17 + 3) == 2 * 5 * g.block_stride_bytes + g.block_stride_bytes + 3 * 64
    assert g.scale_offset(2, 1 * 17 + 3) == 2 * 5 * g.block_stride_bytes + g.block_stride_bytes + 17 * 64 + 3 * 4
