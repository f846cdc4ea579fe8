/* GetServerInfo. Loop thread only. */
#include <unistd.h>

#include "proto/format.h"
#include "server/supervisor/methods.h"

struct info_reply {
  Kvpool__V1__ServerInfo body;
  Kvpool__V1__Device devices[kvp_devices_max];
  Kvpool__V1__Device *device_pointers[kvp_devices_max];
  Kvpool__V1__Format formats[kvp_format_count];
  Kvpool__V1__Format *format_pointers[kvp_format_count];
  Kvpool__V1__Limits limits;
  Kvpool__V1__Caller caller;
};

static Kvpool__V1__DeviceState device_state(const struct kvp_device *device) {
  if (kvp_executor_link_waiting(device->link) != NULL) {
    return kvp_executor_link_refused(device->link) != KVP_OK ? KVPOOL__V1__DEVICE_STATE__DEVICE_REFUSED
                                                             : KVPOOL__V1__DEVICE_STATE__DEVICE_WAITING;
  }
  switch (kvp_executor_link_state(device->link)) {
  case KVP_LINK_SERVING:
    if (device->daemon->state == KVP_DAEMON_STARTING) {
      break; /* the configuration's pools are still to come: whoever waits for a device wants them too */
    }
    return KVPOOL__V1__DEVICE_STATE__DEVICE_SERVING;
  case KVP_LINK_STOPPED:
    return KVPOOL__V1__DEVICE_STATE__DEVICE_STOPPED;
  case KVP_LINK_STARTING:
  case KVP_LINK_RESTORING:
  case KVP_LINK_PAUSED:
    break;
  }
  return device->daemon->state == KVP_DAEMON_STARTING || !device->served
             ? KVPOOL__V1__DEVICE_STATE__DEVICE_STARTING
             : KVPOOL__V1__DEVICE_STATE__DEVICE_RESTARTING;
}

static void fill_device(Kvpool__V1__Device *out, const struct kvp_device *device) {
  const struct kvp_control_ready *info = kvp_executor_link_info(device->link);
  const char *waiting = kvp_executor_link_waiting(device->link);
  kvpool__v1__device__init(out);
  out->name = (char *)device->name;
  out->state = device_state(device);
  out->executor_pid = (uint64_t)kvp_executor_link_pid(device->link);
  out->restarts = kvp_executor_link_restarts(device->link);
  out->memory_limit_bytes = device->ledger.limit_bytes;
  out->pool_bytes = device->ledger.used_bytes[KVP_LEDGER_POOL];
  out->buffer_bytes = device->ledger.used_bytes[KVP_LEDGER_BUFFER];
  out->ring_bytes = device->ring_bytes;
  out->memory_left_bytes = kvp_ledger_left_bytes(&device->ledger);
  out->memory_others_bytes = device->others_bytes;
  out->steps_in_flight = device->steps.count;
  out->steps_done = device->steps.done_count;
  if (waiting != NULL) {
    out->waiting_for = (char *)waiting;
  }
  if (info != NULL) {
    out->description = (char *)info->description;
    out->driver = (char *)info->driver;
    out->mps = (info->flags & KVP_READY_MPS) != 0;
    out->memory_bytes = info->memory_bytes;
    out->memory_granularity_bytes = info->memory_granularity_bytes;
  }
}

static void fill_format(Kvpool__V1__Format *out, const struct kvp_format *format) {
  struct kvp_format_sizes sizes = {0};
  (void)kvp_format_sizes_init(format, 0, &sizes, NULL); /* its own width is always right */
  kvpool__v1__format__init(out);
  out->name = (char *)format->name;
  out->quantized_dtype = (char *)kvp_quantized_dtype_name(format->quantized_dtype);
  out->quantized_elements = format->quantized_elements;
  out->elements_per_scale = format->elements_per_scale;
  out->bf16_elements = format->bf16_elements;
  out->scale_format = (char *)kvp_scale_format_name(format->scale_format);
  out->dequantize_on_load = format->dequantize_on_load;
  out->token_interleaved = format->token_interleaved;
  out->note = (char *)format->note;
  out->data_bytes = sizes.data_bytes;
  out->scale_bytes = sizes.scale_bytes;
  out->bytes_per_token = sizes.bytes_per_token;
  out->row_bytes = sizes.row_bytes;
  out->loaded_row_bytes = sizes.loaded_row_bytes;
  out->loaded_scale_bytes = sizes.loaded_scale_bytes;
}

static void fill_limits(Kvpool__V1__Limits *out, const struct kvp_config *config) {
  kvpool__v1__limits__init(out);
  out->message_bytes_max = kvp_message_bytes_max;
  out->chunk_bytes_max = kvp_chunk_bytes_max;
  out->sessions_max = config->sessions_max;
  out->queues_per_session_max = kvp_queues_per_session_max;
  out->steps_in_flight_per_session_max = config->steps_in_flight_max;
  out->ops_per_step_max = kvp_ops_per_step_max;
  out->arrays_per_step_max = kvp_arrays_per_step_max;
  out->buffers_per_session_max = kvp_buffers_per_session_max;
  out->pools_max = kvp_pools_max;
  out->regions_per_pool_max = kvp_regions_per_pool_max;
  out->calls_per_session_max = kvp_calls_per_session_max;
}

static void fill_caller(Kvpool__V1__Caller *out, const struct kvp_rpc_peer *peer) {
  kvpool__v1__caller__init(out);
  out->uid = (uint32_t)peer->uid;
  out->pid = (uint32_t)peer->pid;
  out->is_operator = peer->is_operator;
}

static void on_get_server_info(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)message;
  const struct kvp_daemon *daemon = context;
  struct info_reply reply;
  kvpool__v1__server_info__init(&reply.body);
  reply.body.version = KVPOOL_VERSION;
  reply.body.protocol_version = kvp_protocol_version;
  reply.body.started_unix_ns = daemon->started_unix_ns;
  reply.body.pid = (uint64_t)getpid();
  reply.body.epoch = daemon->epoch;
  reply.body.attach_socket = (char *)daemon->config->attach_socket_path;
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    fill_device(&reply.devices[i], &daemon->devices[i]);
    reply.device_pointers[i] = &reply.devices[i];
  }
  reply.body.n_devices = daemon->device_count;
  reply.body.devices = reply.device_pointers;
  for (int id = 0; id < kvp_format_count; id++) {
    fill_format(&reply.formats[id], kvp_format_get((enum kvp_format_id)id));
    reply.format_pointers[id] = &reply.formats[id];
  }
  reply.body.n_formats = kvp_format_count;
  reply.body.formats = reply.format_pointers;
  fill_limits(&reply.limits, daemon->config);
  reply.body.limits = &reply.limits;
  fill_caller(&reply.caller, kvp_rpc_call_peer(call));
  reply.body.caller = &reply.caller;
  kvp_rpc_call_finish(call, &reply.body.base);
}

static const struct kvp_rpc_method methods[] = {
    {.name = "GetServerInfo",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__get_server_info_request__descriptor,
     .on_message = on_get_server_info},
};

const struct kvp_method_table kvp_methods_info = {methods, sizeof methods / sizeof methods[0]};
