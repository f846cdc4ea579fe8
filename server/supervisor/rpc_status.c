/* A kvp_error as clients see it: gRPC code, message, and a serialized google.rpc.Status with one ErrorDetail. Any
 * thread; no state. */
#include "server/supervisor/rpc_status.h"

#include <stdlib.h>

#include "server/supervisor/rpc_internal.h"
#include "server/supervisor/utf8.h"

static char type_url[] = "type.googleapis.com/kvpool.v1.ErrorDetail";

void kvp_rpc_error_detail_init(struct kvp_rpc_error_detail *detail, const struct kvp_error *error) {
  kvp_utf8_copy(error->text, detail->message, sizeof detail->message);
  kvp_utf8_copy(error->array, detail->array, sizeof detail->array);
  kvpool__v1__error_detail__init(&detail->body);
  detail->body.status = (Kvpool__V1__StatusCode)error->status;
  detail->body.message = detail->message;
  detail->body.about_op = error->op >= 0;
  detail->body.op = error->op >= 0 ? (uint32_t)error->op : 0;
  detail->body.array = detail->array;
  detail->body.position = error->position;
  detail->body.value = error->value;
}

void kvp_rpc_trailer_init(struct kvp_rpc_trailer *trailer, const struct kvp_error *error) {
  struct kvp_rpc_error_detail detail;
  kvp_rpc_error_detail_init(&detail, error);
  uint8_t packed_detail[sizeof detail + 64];
  Kvpool__V1__RpcStatusDetail any = KVPOOL__V1__RPC_STATUS_DETAIL__INIT;
  any.type_url = type_url;
  any.value.data = packed_detail;
  any.value.len = kvpool__v1__error_detail__pack(&detail.body, packed_detail);

  Kvpool__V1__RpcStatusDetail *details[] = {&any};
  Kvpool__V1__RpcStatus status = KVPOOL__V1__RPC_STATUS__INIT;
  status.code = kvp_status_grpc((enum kvp_status)error->status);
  status.message = detail.message;
  status.details = details;
  status.n_details = 1;

  trailer->code = (grpc_status_code)status.code;
  trailer->text = grpc_slice_from_copied_string(detail.message);
  trailer->details = grpc_slice_malloc(kvpool__v1__rpc_status__get_packed_size(&status));
  kvpool__v1__rpc_status__pack(&status, GRPC_SLICE_START_PTR(trailer->details));
}

void kvp_rpc_trailer_deinit(struct kvp_rpc_trailer *trailer) {
  grpc_slice_unref(trailer->text);
  grpc_slice_unref(trailer->details);
}
