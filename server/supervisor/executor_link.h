/* The supervisor's side of one executor process: spawn, control socket, ring, restart.
 *
 * Loop thread only; callbacks run there too and never from inside a call of this API. A link outlives any number of
 * executors: when one dies, requests without an answer end with device_lost, the ring is given up, `lost` is called,
 * and after a pause (restart_policy.h) a new one is spawned on a new ring.
 *
 * An executor that refuses HELLO as busy says that others have to go first (an MPS server that recovers takes nobody
 * until the processes of the fault are gone): the link waits for them and tries again. That is no restart, and nor is
 * a refusal that would be the same again (control_wire.h): it is told at once, and tried again now and then.
 *
 *   STARTING --READY--> RESTORING --kvp_executor_link_serve--> SERVING
 *      ^                    |                                      |
 *      +------ pause <------+------------- executor died ----------+
 */
#ifndef KVPOOL_SUPERVISOR_EXECUTOR_LINK_H
#define KVPOOL_SUPERVISOR_EXECUTOR_LINK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "proto/control_wire.h"
#include "proto/ring.h"
#include "proto/status.h"

struct kvp_executor_link;

enum kvp_link_state { KVP_LINK_STARTING, KVP_LINK_RESTORING, KVP_LINK_SERVING, KVP_LINK_PAUSED, KVP_LINK_STOPPED };

struct kvp_link_options {
  const char *device; /* "host:0" */
  const char *executor_path;
  const char *socket_path; /* for the executor to remove should it find us dead */
  const char *lock_path;
  const char *attach_socket_path; /* the same; "": there is none */
  const char *attach_lock_path;
  uint32_t thread_count;
};

struct kvp_link_events {
  /* READY arrived: re-attach every object of this device with requests, then kvp_executor_link_serve. */
  void (*ready)(void *context, struct kvp_executor_link *link, const struct kvp_control_ready *ready);
  /* An executor that was ready is gone, on kvp_executor_link_stop too. It has been reaped, what it had completed has
   * been told, requests have been answered, the ring holds nothing any more. */
  void (*lost)(void *context, struct kvp_executor_link *link);
  /* A record from the executor, checked and copied. */
  void (*completion)(void *context, struct kvp_executor_link *link, const struct kvp_ring_record *record,
                     const uint8_t *payload);
  /* After a burst of completions, and when a post that was told busy may be tried again. NULL: not wanted. */
  void (*progress)(void *context, struct kvp_executor_link *link);
  /* The executor doesn't serve this worker's ring any more. NULL: there are none. */
  void (*ring_failed)(void *context, const struct kvp_control_ring_failed *failed);
  /* An attempt was refused, as busy or for good; the next one comes by itself. NULL: not wanted. */
  void (*waiting)(void *context, struct kvp_executor_link *link);
  /* The answer to kvp_executor_link_look; 0: it can't be told. NULL: not wanted. */
  void (*memory_free)(void *context, struct kvp_executor_link *link, uint64_t free_bytes);
  /* After kvp_executor_link_stop: the process is reaped. The link may be destroyed. */
  void (*stopped)(void *context, struct kvp_executor_link *link);
};

/* options and their strings are copied; events is kept by reference. Spawns nothing yet. */
enum kvp_status kvp_executor_link_new(uv_loop_t *loop, const struct kvp_link_options *options,
                                      const struct kvp_link_events *events, void *context,
                                      struct kvp_executor_link **out, struct kvp_error *error);
enum kvp_status kvp_executor_link_start(struct kvp_executor_link *link, struct kvp_error *error);
/* Closes the control socket (the executor exits by itself; SIGKILL after 2 s) and ends with `stopped`. */
void kvp_executor_link_stop(struct kvp_executor_link *link);
/* Only after `stopped`, or before the start. Its handles close on the loop, which has to run for it. NULL is allowed.
 */
void kvp_executor_link_destroy(struct kvp_executor_link *link);

/* One MEMORY_CHUNKS message on the way to the answer; the fds become the callee's. */
typedef void (*kvp_link_chunks_fn)(void *context, const struct kvp_control_chunks *chunks, const int *fds,
                                   uint32_t fd_count);
/* The answer. error->status KVP_OK: done. device_lost: the executor died before it answered. */
typedef void (*kvp_link_result_fn)(void *context, const struct kvp_error *error);

/* Sends a control message. fds stay the caller's and may be closed on return. result NULL: no answer wanted. While no
 * executor is READY the request ends with device_lost (from the loop, like every callback). Messages are sent, and
 * handled by the executor, in order. */
void kvp_executor_link_request(struct kvp_executor_link *link, enum kvp_control_kind kind, const void *body,
                               uint32_t body_bytes, const int *fds, uint32_t fd_count, kvp_link_chunks_fn chunks,
                               kvp_link_result_fn result, void *context);
/* Several messages that get one answer, to the last: MEMORY_IMPORT. more: another of the same request follows. */
void kvp_executor_link_request_part(struct kvp_executor_link *link, enum kvp_control_kind kind, const void *body,
                                    uint32_t body_bytes, const int *fds, uint32_t fd_count, bool more,
                                    kvp_link_result_fn result, void *context);

/* Asks how much of the device's memory is free, behind all requests so far. Does nothing (false) unless SERVING, or
 * while an answer is still to come. */
bool kvp_executor_link_look(struct kvp_executor_link *link);

/* RESTORING -> SERVING: steps may be posted from now on. */
void kvp_executor_link_serve(struct kvp_executor_link *link);

/* Posts a record into the command lane and wakes the executor. busy: the lane is full now; device_lost: not SERVING.
 */
enum kvp_status kvp_executor_link_post(struct kvp_executor_link *link, uint32_t kind, uint64_t tag,
                                       const void *payload, uint32_t payload_bytes);

enum kvp_link_state kvp_executor_link_state(const struct kvp_executor_link *link);
const char *kvp_executor_link_device(const struct kvp_executor_link *link);
pid_t kvp_executor_link_pid(const struct kvp_executor_link *link); /* 0: none */
uint64_t kvp_executor_link_restarts(const struct kvp_executor_link *link);
/* What the link waits for, or why it is refused, in the executor's words. NULL: neither. */
const char *kvp_executor_link_waiting(const struct kvp_executor_link *link);
/* While it waits: the status of a refusal that would be the same again; else KVP_OK. */
enum kvp_status kvp_executor_link_refused(const struct kvp_executor_link *link);
/* How long it has; 0 when it does not. */
uint64_t kvp_executor_link_waiting_ms(const struct kvp_executor_link *link);
/* Why the last executor that said so would not serve this device: its refusal of HELLO. "" and KVP_OK: none has. */
const char *kvp_executor_link_refusal(const struct kvp_executor_link *link, enum kvp_status *status);
/* The latest; NULL before the first READY. */
const struct kvp_control_ready *kvp_executor_link_info(const struct kvp_executor_link *link);

#endif
