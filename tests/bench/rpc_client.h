/* A small blocking client on gRPC's C core, for benchmarks: one thread, one call at a time waits.
 *
 * Every failure ends the program, telling the method and what the daemon said: a benchmark has no other way out.
 */
#ifndef KVPOOL_BENCH_RPC_CLIENT_H
#define KVPOOL_BENCH_RPC_CLIENT_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>

struct bench_client;
struct bench_call;

/* Connects when the first call is made. The caller owns the result. */
struct bench_client *bench_client_new(const char *socket_path);
void bench_client_destroy(struct bench_client *client); /* after the last call was finished */

/* One request, one response, one batch. method: "GetServerInfo". NULL: the daemon is not there yet (UNAVAILABLE). The
 * response is the caller's: protobuf_c_message_free_unpacked. */
ProtobufCMessage *bench_client_call(struct bench_client *client, const char *method, const ProtobufCMessage *request,
                                    const ProtobufCMessageDescriptor *response);

/* A streaming call of any shape. */
struct bench_call *bench_call_start(struct bench_client *client, const char *method);
/* last: nothing follows, the request stream is closed with it. */
void bench_call_send(struct bench_call *call, const ProtobufCMessage *message, bool last);
void bench_call_send_close(struct bench_call *call);
/* NULL: the stream has ended. The message is the caller's. */
ProtobufCMessage *bench_call_receive(struct bench_call *call, const ProtobufCMessageDescriptor *response);
/* Waits for the status, which must be OK (or CANCELLED after a cancel), and destroys the call. */
void bench_call_finish(struct bench_call *call);
void bench_call_cancel(struct bench_call *call); /* then finish */

#endif
