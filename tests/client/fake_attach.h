/* The daemon's end of attachments, in a test's own process: a thread answers on the attach socket, the test itself is
 * the executor at the other end of the ring. One attachment at a time. */
#ifndef KVPOOL_TESTS_CLIENT_FAKE_ATTACH_H
#define KVPOOL_TESTS_CLIENT_FAKE_ATTACH_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/attach_wire.h"
#include "proto/fd_socket.h"
#include "proto/ring.h"
#include "proto/step_wire.h"
#include "proto/timeline_wire.h"

enum { fake_command_arena_bytes = 64 << 10, fake_region_count = 2, fake_pool_blocks = 10 };

/* What it does wrong. */
enum fake_fault {
  FAKE_GOOD,
  FAKE_REFUSES,        /* the attach: wrong_secret */
  FAKE_HANGS_UP,       /* instead of a welcome */
  FAKE_GARBAGE,        /* instead of a welcome */
  FAKE_NEWER,          /* another version */
  FAKE_FEW_FDS,        /* a welcome without its status */
  FAKE_UNSEALED_RING,  /* a ring that can shrink */
  FAKE_SILENT,         /* answers to nothing behind the welcome */
  FAKE_BUFFER_HALF,    /* a buffer's description; its memory comes with fake_finish_buffer */
  FAKE_CHUNK_SHORT,    /* memory that is smaller than it says */
  FAKE_CHUNK_MISSING,  /* of the second region */
  FAKE_CHUNK_TOO_MUCH, /* more than the region has */
  FAKE_POOL_REGIONS,   /* more than any pool has */
  FAKE_POOL_FORMAT,    /* one that nobody knows */
  FAKE_POOL_SMALL,     /* memory that its geometry doesn't fit into */
  FAKE_NO_DESCRIPTION, /* RESULT alone */
};

struct fake_attach {
  char directory[64];
  char path[96];
  enum fake_fault fault;
  bool on_device; /* a GPU's: "GPU-11111111-..." */
  pthread_t thread;
  int listener;
  int stop; /* eventfd */

  pthread_mutex_t lock; /* guards the rest but what the test's thread alone uses */
  pthread_cond_t changed;
  int socket; /* -1: nobody is attached */
  uint32_t attach_count, end_count;
  struct kvp_attach_hello hello;
  struct kvp_attach_import import; /* the latest */
  int imported;                    /* its fd, -1 without */
  uint64_t released;               /* the latest buffer */
  uint32_t release_count;
  uint32_t half_request; /* of which a buffer's description was sent */
  int region_fds[fake_region_count];
  int buffer_fd;
  uint64_t buffer_bytes;

  /* The test's: of the latest welcome. */
  struct kvp_ring ring;
  int ring_fd, command_event, timelines_fd, status_fd;
  int completion_event[2]; /* the executor's end, the worker's */
  struct kvp_timeline_word *words;
  struct kvp_attach_status *status;
  uint64_t generation;
};

void fake_start(struct fake_attach *fake);
void fake_stop(struct fake_attach *fake);
/* Makes the memory of an executor: before kvpool_attach, and before fake_restore. */
void fake_make_executor(struct fake_attach *fake);
/* The daemon answers nothing until it goes on. */
void fake_pause(struct fake_attach *fake);
void fake_go_on(struct fake_attach *fake);
void fake_finish_buffer(struct fake_attach *fake);
uint32_t fake_release_count(struct fake_attach *fake);
/* Until the peer's socket is closed. */
void fake_wait_ended(struct fake_attach *fake, uint32_t count);

/* The next command; false: none is there. payload: room for payload_bytes_max. */
bool fake_take(struct fake_attach *fake, struct kvp_ring_record *record, void *payload, uint32_t payload_bytes_max);
void fake_complete(struct fake_attach *fake, enum kvp_completion_kind kind, uint64_t tag, const void *payload,
                   uint32_t bytes);
void fake_done(struct fake_attach *fake, uint64_t tag, uint32_t reports);
void fake_fail(struct fake_attach *fake, enum kvp_completion_kind kind, uint64_t tag, enum kvp_status status);

/* The supervisor's notices. */
void fake_tell_lost(struct fake_attach *fake, bool with_status);
void fake_restore(struct fake_attach *fake);
void fake_tell_ended(struct fake_attach *fake, enum kvp_status status, const char *text);
void fake_hang_up(struct fake_attach *fake);
/* 12 bytes that are no message. */
void fake_send_garbage(struct fake_attach *fake);

#endif
