"""A server that speaks kvpool.v1 and does one thing wrong: fake_server.py SOCKET MODE.

version    GetServerInfo tells a protocol version of the future
garbage    GetServerInfo answers with bytes that are no protobuf
lies       everything up to buffers works; answers after that are short, long, malformed, or errors of the future
"""
import signal
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.stubs import SERVICE, pb, pb_grpc  # noqa: E402

SECRET = bytes(range(16))


def info(version):
    return pb.ServerInfo(version="9.9.9", protocol_version=version, pid=1, formats=[
        pb.Format(name="bf16", bf16_elements=8, data_bytes=16, bytes_per_token=16, row_bytes=16, loaded_row_bytes=16)])


class Lies(pb_grpc.KvpoolServicer):
    def GetServerInfo(self, request, context):
        return info(1)

    def DescribePool(self, request, context):
        region = pb.RegionSpec(name="plain", format="bf16", width=8, compression_ratio=1, num_layers=1)
        return pb.Pool(pool_id=7, spec=pb.PoolSpec(name="main", block_size=4, num_blocks=4, placements=["host:0"],
                                                   regions=[region]),
                       regions=[pb.Region(spec=region, tokens_per_block=4, bytes_per_token=16, data_bytes=16,
                                          block_stride_bytes=64, layer_stride_bytes=256, region_bytes=256)])

    def OpenSession(self, request, context):
        yield pb.SessionEvent(opened=pb.SessionOpened(session=pb.SessionRef(session_id=3, secret=SECRET), epoch=5))
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()

    def CloseSession(self, request, context):
        return pb.CloseSessionResponse()

    def AllocateBlocks(self, request, context):  # one block too few
        return pb.AllocateBlocksResponse(blocks=bytes(4 * (request.count - 1)), epoch=6)

    def FreeBlocks(self, request, context):  # a status and fields of the future
        detail = pb.ErrorDetail(message="from the future", about_op=True, op=4, array="slots", position=2, value=-3)
        status = pb.RpcStatus(code=9, message="future", details=[
            pb.RpcStatusDetail(type_url="type.googleapis.com/other.Detail", value=b"x"),
            pb.RpcStatusDetail(type_url="type.googleapis.com/kvpool.v1.ErrorDetail",
                               value=detail.SerializeToString() + bytes([0x08, 0x64]))])
        context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "future")

    def CreateBuffer(self, request, context):
        return pb.Buffer(buffer_id=9, device="host:0", bytes=request.bytes)

    def WriteBuffer(self, requests, context):  # says less than it got
        return pb.WriteBufferResponse(bytes_written=sum(len(request.data) for request in requests) - 1)

    def ReadBuffer(self, request, context):  # one byte short, or one too many
        count = request.bytes + (1 if request.offset_bytes else -1)
        for begin in range(0, count, 1000):
            yield pb.BytesChunk(offset_bytes=begin, data=bytes(min(1000, count - begin)))

    def ReleaseBuffer(self, request, context):  # an error without detail
        context.abort(grpc.StatusCode.NOT_FOUND, "what buffer?")

    def Steps(self, requests, context):
        request = next(requests)
        yield pb.StepEvent(done=pb.StepDone(step_id=request.step_id + 1000))  # nobody asked for it
        yield pb.StepEvent(done=pb.StepDone(step_id=request.step_id, reports=[pb.OpReport(rows_stored=11)]))
        yield pb.StepEvent(done=pb.StepDone(step_id=request.step_id))  # twice
        next(requests)
        yield b"\xff\xff\xff"

    def LoadRows(self, request, context):  # a row more than was asked for
        yield pb.LoadRowsResponse(rows=bytes(16 * (request.total_k + 1)))


def raw(message):
    return message if isinstance(message, bytes) else message.SerializeToString()


def handlers(mode):
    if mode == "version":
        return {"GetServerInfo": grpc.unary_unary_rpc_method_handler(lambda request, context: raw(info(2)))}
    if mode == "garbage":
        return {"GetServerInfo": grpc.unary_unary_rpc_method_handler(lambda request, context: b"\xff\xff\xff")}
    found = {}
    servicer = Lies()
    shapes = {(False, False): grpc.unary_unary_rpc_method_handler, (False, True): grpc.unary_stream_rpc_method_handler,
              (True, False): grpc.stream_unary_rpc_method_handler, (True, True): grpc.stream_stream_rpc_method_handler}
    for method in pb.DESCRIPTOR.services_by_name["Kvpool"].methods:
        request = getattr(pb, method.input_type.name)
        shape = shapes[method.client_streaming, method.server_streaming]
        found[method.name] = shape(getattr(servicer, method.name), request.FromString, raw)
    return found


def main():
    # Before there are threads: it must come to sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    socket, mode = sys.argv[1:]
    server = grpc.server(futures.ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers(mode)),))
    # The file appears when it listens: a test waits for it.
    assert server.add_insecure_port(f"unix:{socket}") == 1
    server.start()
    signal.sigwait({signal.SIGTERM})
    server.stop(0).wait()


main()
