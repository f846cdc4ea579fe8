/* The serving thread's work without its thread: rings of several workers on a device that does nothing until it is told
 * to, one call at a time.
 */
#ifndef KVPOOL_TESTS_SERVICE_RIG_H
#define KVPOOL_TESTS_SERVICE_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/executor/service.h"
#include "tests/unit/exec_harness.h"
#include "tests/unit/fake_device.h"

enum {
  session = 3,
  other_session = 4,
  buffer_id = 1,
  other_buffer_id = 2,
  pool_id = 7,
  workers_max = 16,
  first_queue = 100, /* of the workers */
  watchdog_seconds = 120,
  /* words */
  client_a = 1,
  client_b = 2,
  done_a = kvp_client_words,
  done_b,
  done_c,
};

/* A worker's end, or the supervisor's. */
struct end {
  struct kvp_ring ring;
  int ring_fd;
  int command_event;
  int completion_event;
  int timelines_fd;
  struct kvp_timeline_word *words;
  struct kvp_served_ring *served;
};

struct rig {
  struct fake_device device;
  struct kvp_service service;
  struct kvp_mailbox mailbox;
  struct kvp_ring supervisors;
  struct end supervisor;
  struct end workers[workers_max];
  struct kvp_buffer buffers[2];
  struct kvp_pool pool;
  int wake_event;
};

extern struct rig rig;

/* One rig a test. teardown sees that nothing is left. */
int rig_setup(void **state);
int rig_teardown(void **state);
#define RIG_TEST(name) cmocka_unit_test_setup_teardown(name, rig_setup, rig_teardown)

extern const struct kvp_ring_sizes rig_worker_sizes;

/* Worker i: its attachment is i + 1, its queue first_queue + i. */
struct end *rig_attach(uint32_t i);
struct end *rig_attach_with(uint32_t i, const struct kvp_ring_sizes *sizes, uint64_t deadline_ns_max);

/* ---- steps ---- */

/* The supervisor's. */
void rig_post_fence(uint64_t tag, uint32_t owner);
void rig_post_record(struct end *end, uint32_t kind, uint64_t tag, const void *payload, uint32_t bytes);
/* The encoder is freed. */
void rig_post_step(struct end *end, uint64_t tag, struct step_encoder *encoder);
/* Of a worker that says it is the daemon itself. */
void rig_step_begin(struct step_encoder *encoder);
/* An op that writes to the buffer; rig_op_add: the session's. */
struct kvp_wire_op *rig_op_add(struct step_encoder *encoder);
struct kvp_wire_op *rig_op_add_to(struct step_encoder *encoder, uint64_t buffer);
void rig_op_waits(struct kvp_wire_op *op, uint32_t word, uint64_t value);
void rig_op_signals(struct kvp_wire_op *op, uint32_t word, uint64_t value);
/* A step of one op; words 0: no wait, no signal. */
void rig_post(struct end *end, uint64_t tag, uint32_t wait_word, uint64_t wait_value, uint32_t signal_word,
              uint64_t signal_value);

void rig_word_set(struct end *end, uint32_t word, uint64_t value);
uint64_t rig_word(struct end *end, uint32_t word);

/* ---- what becomes of them ---- */

/* Until nothing happens any more. */
void rig_serve(void);
bool rig_try_take(struct end *end, struct exec_completion *out, struct kvp_error *error);
/* The next completion is this one; its error, if it has one. */
struct kvp_error rig_expect(struct end *end, enum kvp_completion_kind kind, uint64_t tag);
void rig_expect_nothing(struct end *end);

#endif
