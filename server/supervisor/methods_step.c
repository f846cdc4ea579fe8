/* Steps, RunStep. Loop thread only. */
#include <stdlib.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/methods.h"
#include "server/supervisor/step_caller.h"
#include "server/supervisor/step_encode.h"
#include "server/supervisor/step_messages.h"
#include "server/supervisor/step_stream.h"

static void run_step_finished(void *context, uint64_t step_id, const struct kvp_step_result *result) {
  const struct kvp_step_caller *caller = context;
  kvp_step_finish_call(caller->call, step_id, result);
}

static const struct kvp_step_events run_step_events = {.finished = run_step_finished};

static enum kvp_status run_step_start(struct kvp_step_caller *caller, const struct kvp_session *session,
                                      const Kvpool__V1__StepRequest *request, struct kvp_error *error) {
  struct kvp_encoded_step encoded;
  enum kvp_status status = kvp_step_encode(caller->daemon, session, request, &encoded, error);
  if (status != KVP_OK) {
    return status;
  }
  status = kvp_step_caller_place(caller, encoded.device, error);
  if (status != KVP_OK) {
    kvp_step_free(encoded.wire);
    return status;
  }
  return kvp_step_caller_submit(caller, encoded.wire, encoded.pools, encoded.pool_count, &run_step_events, caller,
                                request->step_id, error);
}

static void on_run_step(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__StepRequest *request = (const Kvpool__V1__StepRequest *)message->body;
  struct kvp_daemon *daemon = context;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(daemon, request->session, &error);
  if (session == NULL) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  struct kvp_step_caller *caller = kvp_allocate(1, sizeof *caller);
  kvp_step_caller_init(caller, daemon, call, session);
  kvp_rpc_call_set_state(call, caller);
  if (run_step_start(caller, session, request, &error) != KVP_OK) {
    session->steps_refused++;
    kvp_rpc_call_fail(call, &error);
  }
}

static void on_run_step_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  struct kvp_step_caller *caller = kvp_rpc_call_state(call);
  if (caller != NULL) {
    kvp_step_caller_abandon(caller, caller);
    kvp_step_caller_deinit(caller);
    free(caller);
  }
}

static const struct kvp_rpc_method methods[] = {
    {.name = "Steps",
     .shape = KVP_RPC_BIDI,
     .request = &kvpool__v1__step_request__descriptor,
     .on_message = kvp_step_stream_on_message,
     .on_closed = kvp_step_stream_on_closed,
     .on_writable = kvp_step_stream_on_writable},
    {.name = "RunStep",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__step_request__descriptor,
     .on_message = on_run_step,
     .on_closed = on_run_step_closed},
};

const struct kvp_method_table kvp_methods_step = {methods, sizeof methods / sizeof methods[0]};
