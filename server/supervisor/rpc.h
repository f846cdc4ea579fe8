/* gRPC server: calls and messages as the loop thread sees them.
 *
 * One thread waits in the completion queue, decodes requests into bounded arenas, checks their strings and hands
 * whole messages to the loop (a queue and uv_async_send). Everything in this header is called on the loop thread and
 * every callback runs there. gRPC's types stay behind it.
 *
 * A call's life: on_message once per request message, with NULL when the client has half-closed (client-streaming and
 * bidirectional only); on_closed exactly once, last. A message that can't be decoded, or holds a string that is not
 * UTF-8, never reaches a method: the call ends with `malformed`; one whose decoded size exceeds the arena ends with
 * `too_large`.
 */
#ifndef KVPOOL_SUPERVISOR_RPC_H
#define KVPOOL_SUPERVISOR_RPC_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "proto/status.h"

struct kvp_rpc_call;
struct kvp_rpc_server;

enum kvp_rpc_shape { KVP_RPC_UNARY, KVP_RPC_CLIENT_STREAM, KVP_RPC_SERVER_STREAM, KVP_RPC_BIDI };

/* A decoded request. Its memory is one arena that goes with the last reference. */
struct kvp_rpc_message {
  const ProtobufCMessage *body; /* cast to the method's request type */
  size_t wire_bytes;
};

/* While the process has no more descriptors than this, every connection finds a number for its own. */
enum { kvp_rpc_descriptors_max = 98304 };

struct kvp_rpc_message *kvp_rpc_message_ref(struct kvp_rpc_message *message);
void kvp_rpc_message_unref(struct kvp_rpc_message *message); /* NULL is allowed */

struct kvp_rpc_method {
  const char *name; /* "CreatePool" */
  enum kvp_rpc_shape shape;
  bool operator_only; /* others get permission_denied before on_message */
  const ProtobufCMessageDescriptor *request;
  /* The message is the callee's only during the call unless it takes a reference. For streaming requests no further
   * message is delivered until kvp_rpc_call_read_next. context: the server's. */
  void (*on_message)(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message);
  /* The call is over: finished by us and the status is sent or dropped, or cancelled by the client. Only for calls
   * that on_message has seen; from it on, send, finish and fail do nothing. NULL: not wanted. */
  void (*on_closed)(void *context, struct kvp_rpc_call *call);
  /* Streams of responses: bytes waiting to be sent fell below the low-water mark again. NULL: not wanted. */
  void (*on_writable)(void *context, struct kvp_rpc_call *call);
};

/* Who is at the other end of the unix socket. */
struct kvp_rpc_peer {
  pid_t pid;
  uid_t uid;
  gid_t gid;
  bool is_operator; /* root, or the daemon's uid where that is one user's */
};

/* Of a connected unix socket. False: the kernel does not say (errno). */
bool kvp_rpc_peer_of(int fd, struct kvp_rpc_peer *out);

struct kvp_rpc_server_options {
  const char *socket_path;
  uint32_t socket_mode;        /* 0660 */
  const char *lock_path;       /* flock'ed as long as the server lives; a second server is refused */
  const char *package_service; /* "kvpool.v1.Kvpool" */
  const struct kvp_rpc_method *methods;
  size_t method_count;
  void *context;
  uint32_t connections_max;
  /* Loop thread: should a health check of package_service (not of the process) say that it serves? NULL: always. */
  bool (*is_ready)(const void *context);
};

/* Takes the lock, removes a stale socket, binds, listens, starts the completion-queue thread. Refused with in_use
 * when another daemon holds the lock (its pid in the text). */
enum kvp_status kvp_rpc_server_start(uv_loop_t *loop, const struct kvp_rpc_server_options *options,
                                     struct kvp_rpc_server **out, struct kvp_error *error);
/* Stops accepting connections and new calls (they get shutting_down); calls in progress go on. */
void kvp_rpc_server_drain(struct kvp_rpc_server *server);
/* Cancels what is left, waits until every call is closed (on_closed runs for each, on the loop), then calls stopped
 * from the loop. Afterwards the server is gone, its socket unlinked and the lock released. */
void kvp_rpc_server_stop(struct kvp_rpc_server *server, void (*stopped)(void *context));
uint32_t kvp_rpc_server_open_calls(const struct kvp_rpc_server *server);

struct kvp_rpc_call *kvp_rpc_call_ref(struct kvp_rpc_call *call);
void kvp_rpc_call_unref(struct kvp_rpc_call *call);

/* The method's own state of a call. Set it in the first on_message; free it in on_closed. */
void kvp_rpc_call_set_state(struct kvp_rpc_call *call, void *state);
void *kvp_rpc_call_state(const struct kvp_rpc_call *call);
const struct kvp_rpc_peer *kvp_rpc_call_peer(const struct kvp_rpc_call *call);

/* Streaming requests: allows the next on_message. */
void kvp_rpc_call_read_next(struct kvp_rpc_call *call);

/* Streaming responses: packs the message now and sends it in order. False: the call is over, nothing was queued. */
bool kvp_rpc_call_send(struct kvp_rpc_call *call, const ProtobufCMessage *message);
/* Bytes queued behind the write in progress. A method that streams much stops at kvp_rpc_high_water_bytes and goes on
 * in on_writable. */
size_t kvp_rpc_call_queued_bytes(const struct kvp_rpc_call *call);
enum { kvp_rpc_high_water_bytes = 4 << 20, kvp_rpc_low_water_bytes = 1 << 20 };

/* Ends the call. reply: the unary answer (or the single response of a client stream); NULL for streams. After it the
 * call takes no more; calling it on a call that is over already is allowed and does nothing. */
void kvp_rpc_call_finish(struct kvp_rpc_call *call, const ProtobufCMessage *reply);
/* Ends the call with error's gRPC code, its text, and grpc-status-details-bin. */
void kvp_rpc_call_fail(struct kvp_rpc_call *call, const struct kvp_error *error);

#endif
