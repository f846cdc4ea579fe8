/* grpc.health.v1.Health/Check, which probes of service managers ask. Loop thread. It answers while the daemon drains,
 * when nothing else does. Asked about no service it speaks for the process alone: whoever restarts what is not healthy
 * must not restart a daemon for a device that waits, and lose what its pools hold. */
#include "server/supervisor/rpc_internal.h"

#include <string.h>

#include "health.pb-c.h"

static void on_check(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  const Grpc__Health__V1__HealthCheckRequest *request = (const Grpc__Health__V1__HealthCheckRequest *)message->body;
  const struct kvp_rpc_server *server = call->server;
  bool about_service = request->service[0] != '\0';
  if (about_service && strcmp(request->service, server->package_service) != 0) {
    kvp_rpc_reply_fail(call, GRPC_STATUS_NOT_FOUND, "no such service");
    return;
  }
  Grpc__Health__V1__HealthCheckResponse reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
  bool waits = about_service && server->is_ready != NULL && !server->is_ready(server->context);
  reply.status = server->draining || waits ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
                                           : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
  kvp_rpc_call_finish(call, &reply.base);
}

const struct kvp_rpc_method kvp_rpc_health_check = {
    .name = "Check",
    .shape = KVP_RPC_UNARY,
    .request = &grpc__health__v1__health_check_request__descriptor,
    .on_message = on_check,
};
