"""Bytes that are no message, messages that are too large, and compression: refused, and the daemon goes on."""
import grpc
import numpy as np
import pytest

from support.client import failures
from support.errors import RpcFailure
from support.stubs import SERVICE, pb

METHODS = pb.DESCRIPTOR.services_by_name["Kvpool"].methods
CLIENT_STREAMS = {"WriteBuffer", "StoreRows", "Steps"}
SERVER_STREAMS = {"OpenSession", "ReadBuffer", "Steps", "LoadRows", "DumpBlocks"}


def send(client, method, data, **options):
    """The raw bytes as a request, whatever the method's shape; the raw replies."""
    shape = ("stream_" if method in CLIENT_STREAMS else "unary_") + ("stream" if method in SERVER_STREAMS else "unary")
    call = getattr(client.channel, shape)(f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None)
    request = iter([data]) if method in CLIENT_STREAMS else data
    with failures():
        reply = call(request, timeout=60, **options)
        return list(reply) if method in SERVER_STREAMS else [reply]


def check_serving(client):
    assert client.info().protocol_version >= 1
    session = client.open_session("after")
    buffer = session.create_buffer(4096)
    buffer.write(np.arange(64, dtype=np.uint8))
    assert buffer.read(0, 64).tolist() == list(range(64))
    session.close()


MALFORMED = {
    "reserved_wire_type": b"\x0f\x01",
    "unfinished_varint": b"\x08" + b"\xff" * 11,
    "length_past_the_end": b"\x0a\x7fabc",
    "length_overflow": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    "tag_alone": b"\x0a",
    "group_left_open": b"\x0b",
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("method", [m.name for m in METHODS])
def test_malformed(client, method, name):
    with pytest.raises(RpcFailure) as caught:
        send(client, method, MALFORMED[name])
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.status == "malformed"
    check_serving(client)


@pytest.mark.parametrize("method, data", [
    ("CreatePool", b"\x0a\x04\x0a\x02\xff\xfe"),
    ("CreatePool", b"\x0a\x04\x0a\x02\xc0\x80"),  # an overlong NUL
    ("DescribePool", b"\x12\x03\xed\xa0\x80"),  # a surrogate
    ("OpenSession", b"\x0a\x02\xc3\x28"),
    ("Steps", b"\x1a\x01\x80"),
    ("RunStep", b"\x1a\x01\x80"),
    ("CreateBuffer", b"\x12\x04\xf8\x88\x80\x80"),
])
def test_strings_that_are_not_utf8(client, method, data):
    with pytest.raises(RpcFailure) as caught:
        send(client, method, data)
    assert caught.value.status == "malformed"
    check_serving(client)


def test_names_with_a_nul(client):
    for spec in (pb.PoolSpec(name="a\0b"), pb.PoolSpec(name="ok", regions=[pb.RegionSpec(name="k\0", format="v41")])):
        with pytest.raises(RpcFailure) as caught:
            client.call("CreatePool", pb.CreatePoolRequest(spec=spec))
        assert caught.value.status in ("malformed", "invalid_argument")
    with pytest.raises(RpcFailure) as caught:
        client.open_session("a\0b")
    assert caught.value.status in ("malformed", "invalid_argument")


@pytest.mark.parametrize("method", ["RunStep", "Steps", "StoreRows", "WriteBuffer", "FreeBlocks", "OpenSession"])
def test_larger_than_a_message_may_be(client, method):
    limit = client.info().limits.message_bytes_max
    with pytest.raises(RpcFailure) as caught:
        send(client, method, b"\x7a" + _varint(limit) + bytes(limit))  # an unknown field, well formed
    assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.status in (None, "too_large")  # None: gRPC itself refused to read it
    check_serving(client)


UNKNOWN_FIELD = b"\x7a\x00"


@pytest.mark.parametrize("field", [b"\x2a\x00", b"\x32\x00", UNKNOWN_FIELD], ids=["arrays", "ops", "unknown"])
@pytest.mark.parametrize("method", ["RunStep", "Steps"])
def test_messages_that_grow_when_decoded(client, method, field):
    """Millions of empty submessages: two bytes each on the wire."""
    limit = client.info().limits.message_bytes_max
    with pytest.raises(RpcFailure) as caught:
        send(client, method, field * ((limit - 1024) // 2))
    # Unknown fields may also be dropped while decoding: then what is left has no session.
    assert caught.value.status in (("too_large", "unknown_session") if field == UNKNOWN_FIELD else ("too_large",))
    check_serving(client)


def test_deeply_nested_groups(client):
    with pytest.raises(RpcFailure):
        send(client, "RunStep", b"\x7b" * 100000)
    check_serving(client)


def test_chunks_that_are_too_large(client, session):
    limit = client.info().limits.chunk_bytes_max
    buffer = session.create_buffer(2 * limit)
    before = buffer.read()
    with pytest.raises(RpcFailure) as caught:
        buffer.write(np.ones(limit + 1, np.uint8), chunk_bytes=limit + 1)
    assert caught.value.status == "too_large"
    assert buffer.read().tobytes() == before.tobytes()
    assert buffer.write(np.ones(limit, np.uint8), chunk_bytes=limit) == limit
    assert (buffer.read(0, limit) == 1).all()


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("method", ["RunStep", "GetServerInfo", "CreatePool", "Steps", "StoreRows"])
def test_compressed(daemon, client, method, algorithm):
    with pytest.raises(RpcFailure) as caught:
        send(client, method, b"\x7a" + _varint(100000) + bytes(100000), compression=algorithm)
    assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED
    check_serving(client)


def test_a_method_that_is_not_there(client):
    call = client.channel.unary_unary(f"/{SERVICE}/Frobnicate", request_serializer=None, response_deserializer=None)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=60)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    call = client.channel.unary_unary("/kvpool.v1.Other/GetServerInfo", request_serializer=None,
                                      response_deserializer=None)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=60)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_streams_that_say_nothing(client):
    """Client streams that end before their first message."""
    for method in sorted(CLIENT_STREAMS):
        shape = "stream_stream" if method in SERVER_STREAMS else "stream_unary"
        call = getattr(client.channel, shape)(f"/{SERVICE}/{method}", request_serializer=None,
                                              response_deserializer=None)
        try:
            reply = call(iter([]), timeout=60)
            if method in SERVER_STREAMS:
                list(reply)
        except grpc.RpcError as error:
            assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED), error
    check_serving(client)


def test_random_bytes(client):
    """Nothing a decoder is fed may end the daemon."""
    rng = np.random.default_rng(3)
    names = [m.name for m in METHODS if m.name not in ("OpenSession",)]
    for _ in range(400):
        data = rng.integers(0, 256, int(rng.integers(1, 200))).astype(np.uint8).tobytes()
        try:
            send(client, str(rng.choice(names)), data)
        except RpcFailure as failure:
            assert failure.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL), failure
    check_serving(client)


def _varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])
