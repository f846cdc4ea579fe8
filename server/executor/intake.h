/* The door every step comes through: its bytes, a private copy, become checked ops, or an error that names op, array,
 * position and value. Nothing of a step runs before all of it was checked.
 *
 * A pure function of the bytes, the tables, the owner tables, and what accepted steps have assembled. Serving thread.
 */
#ifndef KVPOOL_EXECUTOR_INTAKE_H
#define KVPOOL_EXECUTOR_INTAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "server/executor/compressed_parts.h"
#include "server/executor/objects.h"
#include "server/executor/slot_marks.h"
#include "server/executor/slot_set.h"
#include "server/executor/step.h"

struct kvp_intake {
  const struct kvp_objects *objects;
  bool allows_daemon_ops;        /* the ring is the supervisor's: ops from KVP_OP_BUFFER_WRITE on may come */
  bool allows_points;            /* it has timelines: ops may wait and signal */
  bool allows_device_words;      /* and the device may wait for words in its memory */
  uint64_t completion_bytes_max; /* reports and results of one step */
  struct kvp_compressed_parts compressed;
  struct kvp_slot_set slots;   /* scratch */
  struct kvp_slot_marks marks; /* scratch of a step */
  uint64_t elements_checked;   /* of the step at hand */
  uint64_t pieces_cut;         /* likewise: of segments, beyond its arrays */
};

/* Zeroed but for the first five fields: ready to use. They may change between two steps. */
void kvp_intake_deinit(struct kvp_intake *intake);

/* step: ->wire and ->wire_bytes are set. On success ->queue, ->ops and ->results are set, and the objects it names
 * are not held yet. On any failure *error says all. */
enum kvp_status kvp_intake_check(struct kvp_intake *intake, struct kvp_step *step, struct kvp_error *error);

#endif
