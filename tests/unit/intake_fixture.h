/* Steps through intake alone: pools, buffers of two sessions, no device. Nothing runs. */
#ifndef KVPOOL_TESTS_INTAKE_FIXTURE_H
#define KVPOOL_TESTS_INTAKE_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/executor/intake.h"
#include "tests/unit/exec_harness.h"

enum {
  session = 3,
  other_session = session + kvp_pending_lists, /* whose steps are in the same list */
  blocks = 5,                                  /* the session's; one more is the other session's */
  ring_tokens = 100,                           /* a block of region 0 */
  fine_tokens = 25,                            /* and one of region 1, which the paged pool has */
  layers = 61,
  row = 128, /* bf16, 64 elements */
  paged_pool = 1,
  ring_pool = 2,
  pools = 2,
  own_buffer = 1,
  other_buffer = 2,
  place_bytes = 1 << 16,
  watchdog_seconds = 300,
};

struct intake_fixture {
  struct kvp_objects objects;
  struct kvp_intake intake;
  struct kvp_step_pool steps;
  struct kvp_pool pool[pools];
  struct kvp_buffer buffers[2];
  _Atomic uint64_t owners[blocks + 1];
  uint64_t device_owners[blocks + 1];
  uint8_t *memory; /* addresses: nothing is looked at there */
};

void fixture_init(struct intake_fixture *world);
void fixture_deinit(struct intake_fixture *world);

/* The step, checked or refused: error->status says. The encoder is freed. */
struct kvp_step *fixture_check(struct intake_fixture *world, struct step_encoder *encoder, struct kvp_error *error);

/* Rows of a buffer from place * place_bytes on. */
struct kvp_wire_view rows_at(uint64_t buffer, uint64_t place, uint64_t rows);

#endif
