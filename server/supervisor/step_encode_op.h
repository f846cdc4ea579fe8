/* One op of a StepRequest as an op of an encoded step. Loop thread only; looks at the message alone. */
#ifndef KVPOOL_SUPERVISOR_STEP_ENCODE_OP_H
#define KVPOOL_SUPERVISOR_STEP_ENCODE_OP_H

#include "kvpool.pb-c.h"
#include "proto/step_wire.h"

/* Of a client's FusedStoreOp without rope_offset: the region says what it is, see kvp_step_encode. */
#define KVP_STEP_ROPE_OFFSET_DEFAULT UINT64_MAX

/* out: zeroed but for its arrays, which are none. Refused: a field that is missing, an array that the step doesn't
 * have, two ring regions, a number that an encoded op can't hold. The request's arrays have passed their own check. */
enum kvp_status kvp_step_encode_op(const Kvpool__V1__StepRequest *request, int32_t index, struct kvp_wire_op *out,
                                   struct kvp_error *error);

/* "store"; "" of an op that says nothing. */
const char *kvp_step_op_name(const Kvpool__V1__Op *op);

#endif
