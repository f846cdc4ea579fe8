/* Sessions: one engine each, with a secret, a quota, blocks, buffers and steps. Loop thread only.
 *
 *   OPEN --stream ends, close, drain--> CLOSING --last step retired--> gone, its slot free again
 *
 * CLOSING: nothing new is taken; steps that have not reached the executor are dropped; blocks go to quarantine,
 * buffers are released when the last step that may use them has retired.
 */
#ifndef KVPOOL_SUPERVISOR_SESSION_H
#define KVPOOL_SUPERVISOR_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/limits.h"
#include "server/supervisor/namespace_table.h"
#include "server/supervisor/rpc.h"

struct kvp_daemon;
struct kvp_buffer;
struct kvp_session_torn;
struct kvp_torn_blocks;
struct kvp_step_stream;

enum kvp_session_state { KVP_SESSION_OPEN, KVP_SESSION_CLOSING };

struct kvp_session {
  uint64_t id;   /* random-free counter, never used twice */
  uint16_t slot; /* owner in owner tables, 1 .. sessions_max; free again when the session is gone */
  enum kvp_session_state state;
  uint8_t secret[kvp_secret_bytes];
  char name[kvp_name_bytes_max];
  char namespace_name[kvp_name_bytes_max];
  uint64_t namespace_number; /* of kvp_namespace_hold */
  struct kvp_rpc_peer peer;
  uint64_t opened_unix_ns;
  struct kvp_rpc_call *stream; /* its OpenSession call, referenced; NULL when over */
  uint32_t blocks;             /* leased in all pools */
  uint32_t blocks_coming;      /* asked for, being zeroed */
  uint32_t blocks_max;         /* 0: no quota */
  uint32_t buffer_count;
  uint64_t buffer_bytes;                /* of those that a ledger knows of */
  uint64_t import_address_bytes;        /* of the others */
  struct kvp_buffer *buffers;           /* list, by buffer.c */
  uint32_t attachments;                 /* by attachment.c; ending ones too */
  uint32_t queues;                      /* open step streams */
  uint32_t call_queues;                 /* of other calls, by step_caller.c */
  struct kvp_step_stream *step_streams; /* they, by step_stream.c */
  uint32_t steps_in_flight;             /* by step.c, like the next three */
  uint64_t step_bytes_in_flight;
  uint64_t steps_done;
  uint64_t steps_refused;
  struct kvp_session_torn *torn; /* by session_torn.c; NULL: nothing collected */
};

struct kvp_session_table {
  struct kvp_session *slots[kvp_sessions_max + 1]; /* by slot; [0] stays NULL */
  uint32_t count;
  uint32_t closing_count; /* of them CLOSING */
  uint32_t stream_count;  /* OpenSession calls that have not closed yet */
  uint64_t next_id;
  struct kvp_namespace_table namespaces;
};

/* busy: sessions_max reached (the number in the text). The stream is referenced. */
enum kvp_status kvp_session_open(struct kvp_daemon *daemon, struct kvp_rpc_call *stream, const char *name,
                                 const char *namespace_name, uint32_t blocks_max, struct kvp_session **out,
                                 struct kvp_error *error);
/* Checks id and secret (in constant time). unknown_session, wrong_secret; never a CLOSING one. */
struct kvp_session *kvp_session_authenticate(struct kvp_daemon *daemon, uint64_t session_id, const void *secret,
                                             size_t secret_bytes, struct kvp_error *error);
/* reason: sent as the last event when the stream is still there; NULL when the client closed it. */
void kvp_session_close(struct kvp_daemon *daemon, struct kvp_session *session, const struct kvp_error *reason);
/* Called by step.c and buffer.c whenever a session's last step retired or a buffer went: finishes a CLOSING one. */
void kvp_session_settle(struct kvp_daemon *daemon, struct kvp_session *session);
/* Blocks came back: finishes every CLOSING session that waited for them. */
void kvp_session_settle_all(struct kvp_daemon *daemon);
/* The daemon ends: closes every open session for `reason`. */
void kvp_session_close_all(struct kvp_daemon *daemon, const struct kvp_error *reason);
/* Tells every open session about a device: lost, with what kvp_session_torn_add collected, or restored. */
void kvp_session_tell_device(struct kvp_daemon *daemon, const char *device, bool lost);

/* session_torn.c: blocks that lost steps may have torn, until they are told in one device_lost event (or several,
 * when there are very many). step.c adds those of every lost step. Nothing happens once the session's stream is over.
 */
void kvp_session_torn_add(struct kvp_session *session, const struct kvp_torn_blocks *torn, uint32_t torn_count);
void kvp_session_torn_tell(struct kvp_session *session, const char *device);
void kvp_session_torn_drop(struct kvp_session *session);

#endif
