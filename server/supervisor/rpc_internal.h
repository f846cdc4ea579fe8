/* What the files of the gRPC layer share. gRPC's types appear here and in no header above.
 *
 * Two threads. The completion-queue thread takes a batch's tag out of the queue and runs its `complete`; what
 * concerns the loop it posts, and the loop thread runs `deliver`. A field of a call belongs to one of them, or passes
 * from one to the other with an event.
 */
#ifndef KVPOOL_SUPERVISOR_RPC_INTERNAL_H
#define KVPOOL_SUPERVISOR_RPC_INTERNAL_H

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <uv.h>

#include "server/supervisor/rpc.h"
#include "server/supervisor/rpc_listener.h"

#define KVP_RPC_CONTAINER(pointer, type, member) ((type *)(void *)((char *)(pointer)-offsetof(type, member)))

/* The tag of a batch, and a node of the loop's queue once the batch is done. */
struct kvp_rpc_event {
  struct kvp_rpc_event *next;
  /* Stored (release) when gRPC gets the tag, loaded (acquire) when it gives it back: the order that gRPC keeps by
   * itself, said in terms that a race detector sees. */
  atomic_bool handed_over;
  void (*complete)(struct kvp_rpc_event *event, bool ok); /* completion-queue thread */
  void (*deliver)(struct kvp_rpc_event *event);           /* loop thread */
};

/* A registered method. */
struct kvp_rpc_slot {
  struct kvp_rpc_method method;
  void *registered; /* gRPC's handle; NULL: the slot of all unknown methods */
};

struct kvp_rpc_server {
  uv_loop_t *loop;
  void *context;
  char *package_service;
  bool (*is_ready)(const void *context); /* may be NULL */
  struct kvp_rpc_slot *slots;            /* [slot_count]: options.methods, health check, unknown methods */
  size_t slot_count;
  bool draining;
  atomic_uint users; /* open calls, and one for gRPC's server until that is shut down */
  struct kvp_rpc_listener listener;

  uv_async_t wake;
  _Atomic(struct kvp_rpc_event *) posted; /* newest first */

  grpc_server *grpc;
  grpc_server_credentials *credentials;
  grpc_completion_queue *queue;
  pthread_t thread;
  struct kvp_rpc_event shut_down;   /* gRPC's connections are gone and no call will arrive */
  struct kvp_rpc_event unused;      /* no users left */
  struct kvp_rpc_event thread_over; /* the completion-queue thread has taken its last tag */
  void (*stopped)(void *context);
};

enum kvp_rpc_read { KVP_RPC_READ_FAILED, KVP_RPC_READ_HALF_CLOSE, KVP_RPC_READ_REFUSED, KVP_RPC_READ_MESSAGE };

/* How a call ends, in gRPC's terms. */
struct kvp_rpc_trailer {
  grpc_status_code code;
  grpc_slice text;
  grpc_slice details; /* serialized google.rpc.Status; empty when code is OK */
};

/* A packed message on its way. */
struct kvp_rpc_send {
  struct kvp_rpc_send *next;
  grpc_byte_buffer *buffer;
  size_t bytes;
};

struct kvp_rpc_call {
  struct kvp_rpc_server *server;
  const struct kvp_rpc_slot *slot;
  grpc_call *grpc; /* NULL once the call is closed */

  /* Batches not done, and events done but not delivered. When it falls to zero the call is closed. */
  atomic_uint pending;
  atomic_uint references;
  /* Set before the batch with the status starts: the loop starts nothing after it. */
  atomic_bool status_started;

  struct kvp_rpc_event arrival;
  struct kvp_rpc_event read;
  struct kvp_rpc_event write;
  struct kvp_rpc_event status;
  struct kvp_rpc_event close;

  /* Completion-queue thread; passes to the loop with `arrival`. */
  gpr_timespec deadline;
  grpc_metadata_array metadata;
  grpc_call_details details; /* unknown methods only */
  int connection_number;
  int cancelled; /* gRPC wants a place for it; a failed send counts too, so nobody looks */

  /* Completion-queue thread while a read is on; passes to the loop with `arrival` or `read`. */
  grpc_byte_buffer *payload;
  enum kvp_rpc_read outcome;
  struct kvp_rpc_message *message; /* outcome MESSAGE */
  struct kvp_error refusal;        /* outcome REFUSED */

  /* Loop thread. */
  void *state;
  struct kvp_rpc_peer peer;
  bool announced;     /* the method has seen it */
  bool close_started; /* streams: set by the completion-queue thread, before the arrival is posted */
  bool over;          /* cancelled, or closed */
  bool finishing;     /* trailer is set */
  bool reading;       /* a read is on, or done and not delivered */
  bool half_closed;   /* the client sends no more */
  bool headers_sent;
  struct kvp_rpc_send *sending; /* the write in progress */
  struct kvp_rpc_send *first_queued;
  struct kvp_rpc_send *last_queued;
  size_t queued_bytes;
  struct kvp_rpc_trailer trailer;
  grpc_metadata trailing_metadata; /* gRPC reads it while the batch is on */
};

/* ---- rpc_server.c */

/* Any thread. Hands the event to the loop; the call (or server) passes with it. */
void kvp_rpc_server_post(struct kvp_rpc_server *server, struct kvp_rpc_event *event);
/* Any thread. One user less. */
void kvp_rpc_server_release(struct kvp_rpc_server *server);

/* ---- rpc_call.c */

/* Any thread. Asks gRPC for one more call of this method. */
void kvp_rpc_call_arm(struct kvp_rpc_server *server, const struct kvp_rpc_slot *slot);
/* Any thread. Starts a batch whose tag is event; it counts as pending. */
void kvp_rpc_call_start_batch(struct kvp_rpc_call *call, const grpc_op *ops, size_t op_count,
                              struct kvp_rpc_event *event);
/* Loop thread, as the last thing of a deliver: one pending less. May close and free the call. */
void kvp_rpc_call_delivered(struct kvp_rpc_call *call);
/* Completion-queue thread: one pending less, nothing for the loop to do unless it was the last. */
void kvp_rpc_call_completed(struct kvp_rpc_call *call, struct kvp_rpc_event *event);

/* ---- rpc_reply.c */

void kvp_rpc_reply_init(struct kvp_rpc_call *call);
/* Frees what has not been sent. Not while a write is on. */
void kvp_rpc_reply_drop_queue(struct kvp_rpc_call *call);
void kvp_rpc_reply_deinit(struct kvp_rpc_call *call);
/* Ends the call with a code that none of ours stands for; no details. text: static. */
void kvp_rpc_reply_fail(struct kvp_rpc_call *call, grpc_status_code code, const char *text);

/* ---- rpc_status.c */

void kvp_rpc_trailer_init(struct kvp_rpc_trailer *trailer, const struct kvp_error *error);
void kvp_rpc_trailer_deinit(struct kvp_rpc_trailer *trailer);

/* ---- rpc_health.c */

extern const struct kvp_rpc_method kvp_rpc_health_check; /* its context is the kvp_rpc_server */

#endif
