/* What became of a step, as protobuf messages: events of a stream, answers of a call, a session's torn blocks.
 *
 * Loop thread only: the messages are built in memory of this file and packed before a function returns.
 */
#ifndef KVPOOL_SUPERVISOR_STEP_MESSAGES_H
#define KVPOOL_SUPERVISOR_STEP_MESSAGES_H

#include "kvpool.pb-c.h"
#include "server/supervisor/rpc.h"
#include "server/supervisor/step.h"

void kvp_op_report_init(Kvpool__V1__OpReport *out, const struct kvp_wire_report *report);

/* Events of a Steps stream. */
void kvp_step_send_accepted(struct kvp_rpc_call *call, uint64_t step_id);
void kvp_step_send_finished(struct kvp_rpc_call *call, uint64_t step_id, const struct kvp_step_result *result);
/* Refused before it became a step of the daemon's. */
void kvp_step_send_refused(struct kvp_rpc_call *call, uint64_t step_id, const struct kvp_error *error);

/* Ends a call whose answer is a StepDone: with it, or with the error, whose text then names the torn blocks. */
void kvp_step_finish_call(struct kvp_rpc_call *call, uint64_t step_id, const struct kvp_step_result *result);

#endif
