/* libkvpool's inside of replays: words that a graph and an executor share, and who touches them from a stream. */
#ifndef KVPOOL_CLIENT_REPLAY_H
#define KVPOOL_CLIENT_REPLAY_H

#include "client/attach.h"

/* What a wait of a graph's found, in memory that the CPU reads: 0, or the point and one of these. */
enum kvp_replay_problem {
  KVP_REPLAY_LATE = 1,
  KVP_REPLAY_POISONED = 2,
  KVP_REPLAY_ABORTED = 3,
  KVP_REPLAY_ENDED = 4 /* by ->reason or the end of ->timelines, or `done` is poisoned and nobody has told why yet */
};
enum { kvp_replay_problem_bits = 8 };

struct kvp_replay_backend;

struct kvpool_replay {
  kvpool_attachment *attachment;
  kvpool_replay *next; /* of the attachment's */
  const struct kvp_replay_backend *backend;
  kvpool_replay_mode mode;
  uint32_t points;
  uint64_t deadline_ns;  /* of a wait */
  uint64_t first_base;   /* what `start` had when it was taken */
  uint64_t posted;       /* replays: the n-th one's base is first_base + n * points */
  kvpool_buffer *buffer; /* ONE_LAUNCH: whose words they are */
  struct kvp_replay_words words;
  struct kvp_timelines *timelines; /* of the executor that it was made with. BY_OP the words are in them */
  atomic_bool has_reason;          /* set behind `reason`, once */
  kvpool_error reason;             /* a step of it failed, its executor died, or the attachment has ended */

  /* As a stream writes and reads them. */
  uint64_t *start;           /* counted up by signals */
  uint64_t *done;            /* by the executor */
  uint64_t *base;            /* by begin */
  _Atomic uint64_t *problem; /* in host memory */
  /* The same words where the CPU can write them; NULL: they are in a GPU's memory. */
  _Atomic uint64_t *host_start;
  _Atomic uint64_t *host_done; /* BY_OP alone: other waits see ->problem */
  void *state;                 /* the backend's */
};

/* Functions that a stream does later, or the CPU at once. */
struct kvp_replay_backend {
  /* ->buffer or ->timelines and ->words are there; sets the words' addresses, ->problem and ->state, of a host
   * ->host_start. */
  kvpool_status (*init)(kvpool_replay *replay, kvpool_error *error);
  void (*deinit)(kvpool_replay *replay);
  /* base goes up by `points`; BY_OP: done goes back to 0 unless it is poisoned. */
  kvpool_status (*begin)(kvpool_replay *replay, void *stream, kvpool_error *error);
  /* Signals a point, then waits for one; 0: for none. */
  kvpool_status (*point)(kvpool_replay *replay, void *stream, uint32_t signal, uint32_t wait, kvpool_error *error);
};

extern const struct kvp_replay_backend kvp_replay_cpu;
extern const struct kvp_replay_backend kvp_replay_cuda;

/* Of ONE_LAUNCH's buffer, a word every 64 bytes; BY_OP has its base there, too. */
enum {
  kvp_replay_start_word = 0,
  kvp_replay_done_word = 1,
  kvp_replay_base_word = 2,
  kvp_replay_buffer_bytes = 4096
};

#endif
