"""Pools: what is created is what was asked for, in the geometry of the byte contract; what can't be is refused."""
import pytest

from support.catalogue import FORMATS, Geometry, bf16_of_width
from support.device import DEVICE
from support.errors import RpcFailure
from support.stubs import pb


def refused(call, *statuses):
    with pytest.raises(RpcFailure) as caught:
        call()
    assert caught.value.status in statuses, caught.value
    return caught.value.refusal


def test_the_catalogue(client):
    told = {f.name: f for f in client.info().formats}
    assert set(told) == set(FORMATS)
    for name, fmt in FORMATS.items():
        f = told[name]
        assert (f.quantized_dtype, f.scale_format) == (fmt.quantized_dtype, fmt.scale_format)
        assert (f.dequantize_on_load, f.token_interleaved) == (fmt.dequantize_on_load, fmt.token_interleaved)
        quantized = fmt.quantized_dtype != "none"
        assert f.quantized_elements == (fmt.elements if quantized else 0)
        assert f.bf16_elements == (0 if quantized else fmt.elements)
        assert f.elements_per_scale == fmt.elements_per_scale
        assert (f.data_bytes, f.scale_bytes, f.bytes_per_token) == (fmt.data_bytes, fmt.scale_bytes,
                                                                    fmt.bytes_per_token)
        assert (f.row_bytes, f.loaded_row_bytes, f.loaded_scale_bytes) == (fmt.row_bytes, fmt.loaded_row_bytes,
                                                                           fmt.loaded_scale_bytes)


@pytest.mark.parametrize("block_size", [1, 16, 17, 64, 133, 4096])
def test_geometry(client, pool_name, block_size):
    formats = [*FORMATS.values(), bf16_of_width(8)]
    regions = [{"name": f"r{i}", "format": fmt.name, "num_layers": i + 1, "note": f"note {i}",
                "width": fmt.elements if fmt.name == "bf16" else 0} for i, fmt in enumerate(formats)]
    pool = client.create_pool(pool_name, block_size, 3, regions)
    total = 0
    for i, (fmt, region) in enumerate(zip(formats, pool.regions)):
        geometry = Geometry(fmt, block_size, 3, i + 1)
        assert (region.spec.name, region.spec.format, region.spec.note) == (f"r{i}", fmt.name, f"note {i}")
        assert region.tokens_per_block == block_size
        assert (region.bytes_per_token, region.data_bytes, region.scale_bytes) == (fmt.bytes_per_token,
                                                                                   fmt.data_bytes, fmt.scale_bytes)
        assert region.block_stride_bytes == geometry.block_stride_bytes
        assert region.layer_stride_bytes == geometry.layer_stride_bytes
        assert region.region_bytes == geometry.region_bytes
        total += geometry.region_bytes
    assert pool.bytes_per_placement >= total
    assert (pool.free_blocks, pool.leased_blocks, pool.quarantined_blocks) == (3, 0, 0)
    assert client.pool(pool.pool_id) == pool
    assert client.call("DescribePool", pb.DescribePoolRequest(name=pool_name)) == pool
    assert pool in list(client.pools())
    client.delete_pool(pool.pool_id)
    assert pool_name not in [p.spec.name for p in client.pools()]


def test_compression(client, pool_name):
    pool = client.create_pool(pool_name, 64, 4, [
        {"name": "full", "format": "v41", "num_layers": 1}, {"name": "one", "format": "v41", "num_layers": 1,
                                                            "compression_ratio": 1},
        {"name": "quarter", "format": "v41", "num_layers": 1, "compression_ratio": 4},
        {"name": "all", "format": "v41", "num_layers": 1, "compression_ratio": 64}])
    assert [r.tokens_per_block for r in pool.regions] == [64, 64, 16, 1]
    client.delete_pool(pool.pool_id)


def test_a_ring_pool(client, pool_name):
    pool = client.create_pool(pool_name, 4096, 2, [{"name": "swa", "format": "v41", "num_layers": 1}],
                              kind=pb.POOL_RING)
    assert (pool.spec.kind, pool.regions[0].tokens_per_block) == (pb.POOL_RING, 4096)
    client.delete_pool(pool.pool_id)


def region(**changes):
    return {"name": "kv", "format": "v41", "num_layers": 1, **changes}


BAD_SPECS = {
    "no_name": (dict(name=""), "invalid_argument"),
    "long_name": (dict(name="n" * 64), "too_large"),
    "odd_name": (dict(name="a b/c"), "invalid_argument"),
    "no_blocks": (dict(num_blocks=0), "invalid_argument"),
    "no_block_size": (dict(block_size=0), "invalid_argument"),
    "no_regions": (dict(regions=[]), "invalid_argument"),
    "too_many_regions": (dict(regions=[region(name=f"r{i}") for i in range(17)]), "too_large"),
    "region_twice": (dict(regions=[region(), region()]), "invalid_argument"),
    "region_without_name": (dict(regions=[region(name="")]), "invalid_argument"),
    "no_layers": (dict(regions=[region(num_layers=0)]), "invalid_argument"),
    "too_many_layers": (dict(regions=[region(num_layers=1025)]), "too_large"),
    "unknown_format": (dict(regions=[region(format="v42")]), "wrong_format"),
    "no_format": (dict(regions=[region(format="")]), "invalid_argument"),
    "width_of_v41": (dict(regions=[region(width=256)]), "invalid_argument"),
    "odd_bf16_width": (dict(regions=[region(format="bf16", width=12)]), "invalid_argument"),
    "huge_bf16_width": (dict(regions=[region(format="bf16", width=65544)]), "too_large"),
    "ratio_does_not_divide": (dict(regions=[region(compression_ratio=3)]), "invalid_argument"),
    "ratio_larger_than_block": (dict(regions=[region(compression_ratio=128)]), "invalid_argument"),
    "slots_past_int32": (dict(block_size=4096, num_blocks=524288), "too_large"),
    "sizes_that_overflow": (dict(block_size=2**32 - 1, num_blocks=2**32 - 1), "too_large"),
    "unknown_placement": (dict(placements=[DEVICE, "host:5"]), "wrong_device"),
    "placement_twice": (dict(placements=[DEVICE, DEVICE]), "invalid_argument"),
    "unknown_kind": (dict(kind=7), "invalid_argument"),
    "long_note": (dict(regions=[region(note="x" * 256)]), "too_large"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_bad_specs(client, pool_name, name):
    changes, status = BAD_SPECS[name]
    spec = {"name": pool_name, "block_size": 64, "num_blocks": 4, "regions": [region()], **changes}
    before = len(client.pools())
    refusal = refused(lambda: client.create_pool(**spec), status)
    assert refusal.message
    assert len(client.pools()) == before


def test_no_spec(client):
    refused(lambda: client.call("CreatePool", pb.CreatePoolRequest()), "invalid_argument")


def test_a_name_that_is_taken(client, pool_name):
    pool = client.create_pool(pool_name, 64, 4, [region()])
    assert pool_name in refused(lambda: client.create_pool(pool_name, 16, 1, [region()]), "already_exists").message
    client.delete_pool(pool.pool_id)
    again = client.create_pool(pool_name, 16, 1, [region()])
    assert again.pool_id != pool.pool_id
    client.delete_pool(again.pool_id)


def test_describing_nothing(client, pool_name):
    refused(lambda: client.pool(123456), "unknown_pool")
    refused(lambda: client.call("DescribePool", pb.DescribePoolRequest(name="nobody")), "unknown_pool")
    refused(lambda: client.call("DescribePool", pb.DescribePoolRequest()), "invalid_argument", "unknown_pool")
    pool = client.create_pool(pool_name, 64, 4, [region()])
    refused(lambda: client.call("DescribePool", pb.DescribePoolRequest(pool_id=pool.pool_id, name=pool_name)),
            "invalid_argument")
    client.delete_pool(pool.pool_id)


def test_memory_returns_with_a_deleted_pool(client, pool_name):
    before = client.device().pool_bytes
    for _ in range(20):
        pool = client.create_pool(pool_name, 64, 512, [region(format="bf16")])
        assert client.device().pool_bytes == before + pool.bytes_per_placement
        client.delete_pool(pool.pool_id)
        assert client.device().pool_bytes == before


def test_the_largest_slot_number(start_daemon):
    """num_blocks * tokens_per_block = 2^31 - 1 passes the check of slots; only memory is in its way."""
    client = start_daemon(device_memory="64M").client()
    refused(lambda: client.create_pool("edge", 1, 2**31 - 1, [region(format="bf16", width=8)]), "out_of_memory")
    refused(lambda: client.create_pool("edge", 1, 2**31, [region(format="bf16", width=8)]), "too_large")
