/* A supervisor in miniature: starts the real kvpool-exec and talks to it, for tests and benchmarks. KVPOOL_TEST_EXEC
 * of the environment is another program to start.
 *
 * Everything fails loudly (cmocka-free: abort with a line that says what), so that callers read straight on.
 */
#ifndef KVPOOL_TESTS_EXEC_HARNESS_H
#define KVPOOL_TESTS_EXEC_HARNESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/control_wire.h"
#include "proto/fd_socket.h"
#include "proto/ring.h"
#include "proto/step_wire.h"

/* Aborts with the place and the text. */
#define HARNESS_CHECK(condition)                                                                                     \
  do {                                                                                                               \
    if (!(condition)) {                                                                                              \
      exec_harness_fail(__FILE__, __LINE__, #condition);                                                             \
    }                                                                                                                \
  } while (0)
_Noreturn void exec_harness_fail(const char *file, int line, const char *text);

struct exec_harness {
  pid_t pid;
  int socket;
  int ring_fd;
  int command_event;
  int completion_event;
  struct kvp_ring ring;
  uint32_t last_request;
  struct kvp_control_ready ready;
  struct kvp_fd_message message;
};

struct exec_harness_options {
  struct kvp_ring_sizes ring;
  uint32_t thread_count;
  const char *device;      /* NULL: KVPOOL_TEST_DEVICE of the environment, host:0 without it */
  const char *socket_path; /* NULL: none */
  const char *lock_path;
  uint32_t version; /* 0: the right one */
};

extern const struct exec_harness_options exec_harness_defaults;

/* Starts it and says HELLO. The answer, READY or a refusal, is the result. */
struct kvp_error exec_harness_start(struct exec_harness *link, const struct exec_harness_options *options);
/* Closes the socket and waits; returns the status of waitpid. */
int exec_harness_stop(struct exec_harness *link);
/* Waits for a process that ends by itself or was killed, and frees the rest. */
int exec_harness_wait(struct exec_harness *link);

/* One request and its RESULT. */
struct kvp_error exec_harness_request(struct exec_harness *link, uint32_t kind, const void *body, uint32_t body_bytes,
                                      const int *fds, uint32_t fd_count);
/* MEMORY_CREATE of less than one chunk: *fd is the caller's. */
struct kvp_error exec_harness_memory_create(struct exec_harness *link, uint64_t id, uint64_t bytes, int *fd);
struct kvp_error exec_harness_memory_import(struct exec_harness *link, uint64_t id, uint64_t bytes, int fd);
struct kvp_error exec_harness_buffer_attach(struct exec_harness *link, uint64_t id, uint64_t memory_id,
                                            uint64_t bytes, uint32_t owner);
/* Maps what the executor made. */
uint8_t *exec_harness_map(int fd, uint64_t bytes);

/* A completion with its payload; the payload is the caller's to free (NULL when empty). */
struct exec_completion {
  uint32_t kind;
  uint64_t tag;
  uint8_t *payload;
  uint32_t payload_bytes;
};

/* Of any ring, supervisor's or worker's, by its client. False when the command lane is full. */
bool exec_lane_post(struct kvp_ring *ring, int command_event, uint32_t kind, uint64_t tag, const void *payload,
                    uint32_t bytes);
/* False when there is none. */
bool exec_lane_try_take(struct kvp_ring *ring, struct exec_completion *out);

/* False when the command lane is full. */
bool exec_harness_post(struct exec_harness *link, uint32_t kind, uint64_t tag, const void *payload, uint32_t bytes);
/* Waits for the next completion. */
struct exec_completion exec_harness_take(struct exec_harness *link);
/* Without waiting; false when there is none. */
bool exec_harness_try_take(struct exec_harness *link, struct exec_completion *out);

/* ---- encoding of steps ---- */

enum { step_ops_max = 300, step_arrays_max = 300 };

struct step_encoder {
  struct kvp_wire_step header;
  struct kvp_wire_op ops[step_ops_max];
  struct kvp_wire_array arrays[step_arrays_max]; /* inline ones: offsets count from the start of data */
  uint8_t *data;
  uint32_t data_bytes;
};

void step_encoder_init(struct step_encoder *encoder, uint32_t queue, uint32_t owner, uint64_t epoch);
void step_encoder_deinit(struct step_encoder *encoder);
/* A new op with no arrays and no views. */
struct kvp_wire_op *step_encoder_op(struct step_encoder *encoder, enum kvp_op_kind kind);
uint32_t step_encoder_array(struct step_encoder *encoder, const void *data, uint32_t bytes);
uint32_t step_encoder_buffer_array(struct step_encoder *encoder, uint64_t buffer, uint64_t offset, uint64_t bytes);
struct kvp_wire_view step_view(uint64_t buffer, uint64_t offset, uint64_t rows, uint32_t row_bytes, uint64_t stride);
/* Returns malloc'd bytes. */
uint8_t *step_encoder_encode(const struct step_encoder *encoder, uint32_t *bytes);

#endif
