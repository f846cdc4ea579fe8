/* libkvpool's inside of attachments: the socket, the ring, shared memory and timelines of a worker.
 *
 * An attachment belongs to one thread at a time; only its timelines and `gone` are looked at by others. Maps, buffers
 * and steps hold a reference to it, so that they may be given back after kvpool_detach.
 */
#ifndef KVPOOL_CLIENT_ATTACH_H
#define KVPOOL_CLIENT_ATTACH_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "client/internal.h"
#include "proto/attach_wire.h"
#include "proto/fd_socket.h"
#include "proto/ring.h"
#include "proto/step_wire.h"
#include "proto/timeline_wire.h"

enum {
  kvp_attachment_steps_max = kvp_worker_ring_commands, /* posted, without a last word; a power of two */
  kvp_abandoned_requests_max = 64,
  kvp_attachment_step_bytes_max = kvp_worker_ring_command_arena_bytes / 2
};

/* CLOCK_MONOTONIC. */
uint64_t kvp_now_ns(void);

/* ---- memory: attach_memory.c ---- */

/* Memory of several chunks at one address. Zeroed, its first four fields set, it is ready for kvp_mapping_add. */
struct kvp_mapping {
  bool on_device;
  kvpool_map_access access;
  char uuid[kvp_name_bytes_max]; /* of the GPU whose memory it is */
  uint64_t granularity_bytes;    /* its chunks take a multiple of it; of a host device 1 */
  void *base;                    /* NULL: nothing is mapped */
  uint64_t bytes;
  uint64_t mapped_bytes;
  uint32_t chunk_count;
  uint32_t chunks_mapped;
  int device; /* of a GPU: the driver's number, and this process's */
  int ordinal;
};

/* The chunks of a message, in order; the first one reserves the room for all. The fds stay the caller's. */
kvpool_status kvp_mapping_add(struct kvp_mapping *mapping, const struct kvp_fd_message *message, kvpool_error *error);
bool kvp_mapping_is_whole(const struct kvp_mapping *mapping);
void kvp_mapping_deinit(struct kvp_mapping *mapping);

/* ---- arrays: dlpack.c ---- */

/* Who keeps the memory of an array: `release` gives back a reference that the caller has taken. */
struct kvp_array_owner {
  void *object;
  void (*release)(void *object);
};

/* Takes over the owner's reference on success only. */
kvpool_status kvp_array_export(const struct kvp_mapping *mapping, const kvpool_array *array, bool is_versioned,
                               struct kvp_array_owner owner, void **managed, kvpool_error *error);

/* ---- timelines: timeline.c ---- */

/* Those of one executor, and what the supervisor says of it. They stay mapped until the attachment is freed: other
 * threads may wait for them. */
struct kvp_timelines {
  struct kvp_timelines *older;
  struct kvp_timeline_word *words;        /* [kvp_timeline_words] */
  const struct kvp_attach_status *status; /* read-only */
  atomic_bool is_dead;                    /* the library has taken its executor's end, and poisoned the words */
  uint64_t device_words;                  /* as a GPU sees them; 0: it doesn't. With what follows under words_lock */
  int device;
  char uuid[kvp_name_bytes_max];
};

kvpool_status kvp_timelines_add(kvpool_attachment *attachment, int words_fd, int status_fd, kvpool_error *error);
void kvp_timelines_deinit(kvpool_attachment *attachment);
/* Whoever waits for words from first_word on, streams of a GPU too, goes on. kvp_client_words: the executor's, which
 * nobody writes any more; 0: the worker's as well, which count on in a successor's memory. */
void kvp_timelines_poison(struct kvp_timelines *timelines, uint32_t first_word);
/* Any thread. */
struct kvp_timelines *kvp_timelines_latest(kvpool_attachment *attachment);
bool kvp_timelines_are_served(const struct kvp_timelines *timelines);
/* KVPOOL_OK: its executor reads and writes them. KVPOOL_DEVICE_LOST, KVPOOL_DISCONNECTED. Any thread. */
kvpool_status kvp_timelines_check(kvpool_attachment *attachment, const struct kvp_timelines *timelines);

/* ---- attachments ---- */

struct kvp_outstanding {
  kvpool_replay *replay; /* whose step it is; NULL: none's */
  uint16_t op_count;
  bool is_posted; /* its last word has not been told */
};

/* A completion that waits to be told: of another step than the one kvpool_attachment_run waits for. */
struct kvp_held {
  struct kvp_held *next;
  struct kvp_ring_record record;
  uint8_t payload[];
};

/* A request that makes a buffer and that nobody waits for any more: what comes of it is given back. */
struct kvp_abandoned_request {
  uint32_t request;   /* 0: none */
  bool is_answered;   /* its release could not be sent yet */
  uint64_t buffer_id; /* 0: none was made so far */
};

enum kvp_attachment_state { KVP_ATTACHMENT_SERVING, KVP_ATTACHMENT_LOST, KVP_ATTACHMENT_ENDED };

struct kvpool_attachment {
  atomic_uint references; /* the user's, and each map, buffer and step */
  pid_t pid;              /* who attached */
  uint32_t timeout_ms;
  int socket;
  uint32_t last_request;
  uint32_t asked;           /* whose answer is waited for; 0: none's */
  uint64_t asked_buffer_id; /* what its answer has named so far */
  bool is_abandoned;        /* the latest request was, and with it the buffer that it makes */
  struct kvp_abandoned_request abandoned[kvp_abandoned_requests_max];
  struct kvp_attach_welcome welcome;
  char path[108];

  enum kvp_attachment_state state;
  kvpool_error problem;  /* why it doesn't serve */
  uint64_t looked_at_ns; /* when the socket was last looked at */
  _Atomic uint64_t epoch;

  struct kvp_ring ring; /* map NULL: none */
  int command_event;
  int completion_event; /* a socket: read until there is nothing */
  int epoll;            /* -1 until it is asked for */
  uint64_t last_step_id;
  uint64_t lost_through; /* outstanding steps up to this one have ended with `lost` */
  kvpool_error lost;
  uint64_t oldest; /* no step below it is outstanding */
  uint32_t outstanding_count;
  struct kvp_outstanding outstanding[kvp_attachment_steps_max]; /* by step id */
  struct kvp_held *held_first, *held_last;
  struct kvp_ring_record record; /* what the latest completion was made of */
  struct kvp_bytes payload;
  struct kvp_bytes reports; /* kvpool_op_report[] */
  kvpool_completion completion;
  kvpool_error completion_error;

  kvpool_replay *replays;
  _Atomic(struct kvp_timelines *) timelines; /* the latest */
  pthread_mutex_t words_lock;                /* guards word_used */
  uint8_t word_used[kvp_timeline_words];
  atomic_bool gone; /* ended: whoever waits for a word can stop */

  struct kvp_fd_message message; /* what is being received */
  struct kvp_error fds_problem;  /* not KVP_OK: its descriptors found no place in this process */
};

void kvp_attachment_ref(kvpool_attachment *attachment);
void kvp_attachment_unref(kvpool_attachment *attachment);
/* Takes what the supervisor has told, without waiting. */
void kvp_attachment_look(kvpool_attachment *attachment);
/* The same when its status says that there is something, or a millisecond has passed. */
void kvp_attachment_glance(kvpool_attachment *attachment);
/* KVPOOL_OK while it serves; else `problem`. */
kvpool_status kvp_attachment_check(const kvpool_attachment *attachment, kvpool_error *error);
/* The first reason counts. */
void kvp_attachment_end(kvpool_attachment *attachment, const kvpool_error *why);

/* What is done with the messages of an answer but its RESULT. Anything but KVPOOL_OK fails the request, whose rest is
 * still received. The message's fds are closed behind it, those it set to -1 apart. */
typedef kvpool_status (*kvp_attach_part_fn)(void *context, struct kvp_fd_message *message, kvpool_error *error);

struct kvp_attach_request {
  enum kvp_attach_kind kind;
  const void *body;
  uint32_t body_bytes;
  int fd; /* -1: none */
};

/* Blocking, at most the attachment's timeout. on_part NULL: nothing but RESULT may come. */
kvpool_status kvp_attachment_ask(kvpool_attachment *attachment, const struct kvp_attach_request *request,
                                 kvp_attach_part_fn on_part, void *context, kvpool_error *error);
/* KVPOOL_MALFORMED unless the message's body is a struct of so many bytes. */
kvpool_status kvp_attach_check_body(const struct kvp_fd_message *message, size_t bytes, kvpool_error *error);

/* ---- requests that were given up: attach_abandoned.c ---- */

/* NULL: there is none. 0: a free place. */
struct kvp_abandoned_request *kvp_abandoned_find(kvpool_attachment *attachment, uint32_t request);
/* What may be part of a late answer. The buffer is given back behind its last message. */
void kvp_abandoned_take(kvpool_attachment *attachment, const struct kvp_fd_message *message);
/* Releases for which there was no room in the socket. */
void kvp_abandoned_retry(kvpool_attachment *attachment);
/* Of a message that describes a buffer. */
void kvp_attach_buffer_id(const struct kvp_fd_message *message, uint64_t *out);

/* ---- buffers: attach_buffer.c ---- */

/* fd: -1 of an IPC handle. data: where the buffer begins in this process. */
kvpool_status kvp_attached_buffer_import(kvpool_attachment *attachment, const struct kvp_attach_import *import,
                                         int fd, void *data, kvpool_buffer **out, kvpool_error *error);

/* ---- the ring: attach_ring.c ---- */

/* The ring and its eventfds (the attachment's from now on) come into use. On failure the fds are still the caller's. */
kvpool_status kvp_attachment_set_ring(kvpool_attachment *attachment, int ring, int command_event,
                                      int completion_event, kvpool_error *error);
/* What the ring still has is kept; everything else that is outstanding has ended with *why. */
void kvp_attachment_drop_ring(kvpool_attachment *attachment, const kvpool_error *why);
void kvp_attachment_free_held(kvpool_attachment *attachment);

/* ---- steps as bytes: step_wire.c ---- */

/* The words of a replay's points, which in a step are KVP_REPLAY_WORD. */
#define KVP_REPLAY_WORD UINT32_MAX
struct kvp_replay_words {
  uint32_t start;
  uint32_t done;
  bool is_absolute; /* the values of `done` */
};

struct kvp_step_head {
  uint64_t epoch;
  uint64_t base;
  uint64_t deadline_ns;
  uint64_t words_buffer_id;
  const struct kvp_replay_words *replay; /* NULL: it is none */
  uint32_t flags;
};

/* attach_ring.c. ->epoch of the head is set here. step_id may be NULL. */
kvpool_status kvp_attachment_post_step(kvpool_attachment *attachment, const kvpool_step *step,
                                       struct kvp_step_head *head, uint64_t *step_id, kvpool_error *error);

/* The outstanding step is that replay's; the replay is no more. */
void kvp_attachment_set_replay(kvpool_attachment *attachment, uint64_t step_id, kvpool_replay *replay);
void kvp_attachment_forget_replay(kvpool_attachment *attachment, const kvpool_replay *replay);

/* ---- replays: replay.c ---- */

/* The last word about one of its steps: the replay is over. */
void kvp_replay_step_failed(kvpool_replay *replay, uint64_t step_id, bool is_refused, const kvpool_error *why);
/* All of the attachment's are over: it has lost its executor or, as its state says, has ended. */
void kvp_replays_end(kvpool_attachment *attachment, const kvpool_error *why);

uint64_t kvp_step_wire_bytes(const kvpool_step *step);
/* out: kvp_step_wire_bytes of them. */
void kvp_step_wire_write(const kvpool_step *step, const struct kvp_step_head *head, uint32_t bytes, void *out);
/* The op that is being added, behind what protobuf got of it. elements: of a row of its region. */
kvpool_status kvp_step_wire_add_op(kvpool_step *step, const Kvpool__V1__Op *op, uint32_t elements,
                                   kvpool_error *error);
/* An array whose bytes stand in the step's body at body_offset. */
bool kvp_step_wire_add_inline(kvpool_step *step, size_t body_offset, size_t bytes);
bool kvp_step_wire_add_buffer(kvpool_step *step, uint64_t buffer_id, uint64_t offset_bytes, uint64_t count);

/* ---- pools: pool.c ---- */

/* A handle without a connection. message: taken on success only. */
kvpool_status kvp_pool_new_detached(Kvpool__V1__Pool *message, kvpool_pool **out, kvpool_error *error);

#endif
