/* One op of protobuf's as an op of an encoded step: what the supervisor does with a StepRequest, and libkvpool with the
 * op that it puts into one, so that both doors say the same. Looks at its arguments alone: any thread. */
#ifndef KVPOOL_PROTO_STEP_OP_ENCODE_H
#define KVPOOL_PROTO_STEP_OP_ENCODE_H

#include "kvpool.pb-c.h"
#include "proto/step_wire.h"

/* Of a FusedStoreOp without rope_offset: the region says what it is, see kvp_step_rope_offset. */
#define KVP_STEP_ROPE_OFFSET_DEFAULT UINT64_MAX

/* The arrays of the step, which have passed their own check. */
struct kvp_step_arrays {
  size_t count;
  uint64_t (*elements)(const void *context, uint32_t number); /* number < count */
  const void *context;
};

/* out: zeroed but for its arrays, which are none. Refused: a field that is missing, an array that the step doesn't
 * have, two ring regions, a number that an encoded op can't hold. */
enum kvp_status kvp_step_op_encode(const Kvpool__V1__Op *op, int32_t index, const struct kvp_step_arrays *arrays,
                                   struct kvp_wire_op *out, struct kvp_error *error);

/* Rotary dims are the last ones of a row where the client doesn't say. elements: of the region's rows. What can't be
 * right stays 0: the executor looks at regions and rotary dims, and says what is wrong with them. */
uint64_t kvp_step_rope_offset(const struct kvp_wire_op *op, uint32_t elements);

/* "store"; "" of an op that says nothing. */
const char *kvp_step_op_name(const Kvpool__V1__Op *op);

#endif
