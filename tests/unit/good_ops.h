/* One good op of each kind that sessions have, on what executor_world.h attaches with its ring: tests change one
 * thing about it. */
#ifndef KVPOOL_TESTS_GOOD_OPS_H
#define KVPOOL_TESTS_GOOD_OPS_H

#include "tests/unit/executor_world.h"

/* Each adds its arrays and the op to the step. */
struct kvp_wire_op *good_store(struct step_encoder *encoder);       /* 3 rows, cast back */
struct kvp_wire_op *good_load(struct step_encoder *encoder);        /* 10 rows of the index region, with scales */
struct kvp_wire_op *good_assemble(struct step_encoder *encoder);    /* S = 12; C = 4, gathered, stored; K = 8 */
struct kvp_wire_op *good_fused_store(struct step_encoder *encoder); /* 3 rows, rotated, cast back */
struct kvp_wire_op *good_convert(struct step_encoder *encoder);    /* in place: 2 sequences of 2 queries, 3 entries */
struct kvp_wire_op *good_swa_decode(struct step_encoder *encoder); /* 2 windows of 4 */
struct kvp_wire_op *good_expand(struct step_encoder *encoder);     /* 2 rows of 4 */
struct kvp_wire_op *good_cat(struct step_encoder *encoder);        /* 2 rows of 2 and 3 */
struct kvp_wire_op *good_copy_blocks(struct step_encoder *encoder); /* 0 to 1 and 2 */
struct kvp_wire_op *good_zero_blocks(struct step_encoder *encoder); /* 1 */

#endif
