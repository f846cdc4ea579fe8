"""A gRPC server between a client and a daemon that may change what the daemon answers."""
from concurrent import futures

import grpc


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, channel, change):
        self.channel = channel
        self.change = change

    def service(self, details):
        call_upstream = self.channel.stream_stream(details.method)
        name = details.method.rpartition("/")[2]

        def pass_on(requests, context):
            call = call_upstream(requests)
            context.add_callback(call.cancel)
            try:
                for reply in call:
                    yield self.change(name, reply)
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata() or ())
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(pass_on)


class Proxy:
    """Listens on `socket`, passes everything on to `target`; change(method, reply bytes) gives what is answered."""

    def __init__(self, socket, target, change=lambda method, reply: reply):
        self.socket = socket
        self.channel = grpc.insecure_channel(target, (("grpc.max_receive_message_length", -1),
                                                      ("grpc.use_local_subchannel_pool", 1)))
        self.server = grpc.server(futures.ThreadPoolExecutor(16), (_Handler(self.channel, change),),
                                  options=(("grpc.max_receive_message_length", -1),))
        assert self.server.add_insecure_port(f"unix:{socket}")
        self.server.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop(1).wait()
        self.channel.close()
