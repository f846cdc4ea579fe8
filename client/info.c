/* What the daemon says of itself: a snapshot that is converted once and read only afterwards. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/internal.h"

struct kvpool_server_info {
  Kvpool__V1__ServerInfo *message;
  kvpool_device_info *devices; /* [message->n_devices] */
  kvpool_format_info *formats; /* [message->n_formats] */
};

static void device_from(const Kvpool__V1__Device *from, kvpool_device_info *out) {
  *out = (kvpool_device_info){
      .state = (kvpool_device_state)from->state,
      .executor_pid = from->executor_pid,
      .restarts = from->restarts,
      .memory_limit_bytes = from->memory_limit_bytes,
      .pool_bytes = from->pool_bytes,
      .buffer_bytes = from->buffer_bytes,
      .steps_in_flight = from->steps_in_flight,
      .steps_done = from->steps_done,
      .mps = from->mps != 0,
      .memory_bytes = from->memory_bytes,
      .memory_left_bytes = from->memory_left_bytes,
      .memory_others_bytes = from->memory_others_bytes,
      .memory_granularity_bytes = from->memory_granularity_bytes,
      .ring_bytes = from->ring_bytes,
  };
  (void)snprintf(out->name, sizeof out->name, "%s", from->name);
  (void)snprintf(out->description, sizeof out->description, "%s", from->description);
  (void)snprintf(out->driver, sizeof out->driver, "%s", from->driver);
  (void)snprintf(out->waiting_for, sizeof out->waiting_for, "%s", from->waiting_for);
}

static void format_from(const Kvpool__V1__Format *from, kvpool_format_info *out) {
  *out = (kvpool_format_info){
      .quantized_elements = from->quantized_elements,
      .elements_per_scale = from->elements_per_scale,
      .bf16_elements = from->bf16_elements,
      .dequantize_on_load = from->dequantize_on_load,
      .token_interleaved = from->token_interleaved,
      .data_bytes = from->data_bytes,
      .scale_bytes = from->scale_bytes,
      .bytes_per_token = from->bytes_per_token,
      .row_bytes = from->row_bytes,
      .loaded_row_bytes = from->loaded_row_bytes,
      .loaded_scale_bytes = from->loaded_scale_bytes,
  };
  (void)snprintf(out->name, sizeof out->name, "%s", from->name);
  (void)snprintf(out->quantized_dtype, sizeof out->quantized_dtype, "%s", from->quantized_dtype);
  (void)snprintf(out->scale_format, sizeof out->scale_format, "%s", from->scale_format);
  (void)snprintf(out->note, sizeof out->note, "%s", from->note);
}

kvpool_status kvpool_server_info_get(kvpool_client *client, kvpool_server_info **out, kvpool_error *error) {
  assert(client != NULL && out != NULL);
  const Kvpool__V1__GetServerInfoRequest request = KVPOOL__V1__GET_SERVER_INFO_REQUEST__INIT;
  ProtobufCMessage *response;
  kvpool_status status = kvp_call_unary(client, KVP_METHOD_GET_SERVER_INFO, &request.base,
                                        &kvpool__v1__server_info__descriptor, &response, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  Kvpool__V1__ServerInfo *message = (Kvpool__V1__ServerInfo *)response;
  kvpool_server_info *info = calloc(1, sizeof *info);
  kvpool_device_info *devices = calloc(message->n_devices + 1, sizeof *devices);
  kvpool_format_info *formats = calloc(message->n_formats + 1, sizeof *formats);
  if (info == NULL || devices == NULL || formats == NULL) {
    free(formats);
    free(devices);
    free(info);
    kvpool__v1__server_info__free_unpacked(message, NULL);
    return kvp_fail_no_memory(error);
  }
  for (size_t i = 0; i < message->n_devices; i++) {
    device_from(message->devices[i], &devices[i]);
  }
  for (size_t i = 0; i < message->n_formats; i++) {
    format_from(message->formats[i], &formats[i]);
  }
  *info = (kvpool_server_info){.message = message, .devices = devices, .formats = formats};
  *out = info;
  return KVPOOL_OK;
}

void kvpool_server_info_destroy(kvpool_server_info *info) {
  if (info != NULL) {
    kvpool__v1__server_info__free_unpacked(info->message, NULL);
    free(info->devices);
    free(info->formats);
    free(info);
  }
}

const char *kvpool_server_info_version(const kvpool_server_info *info) {
  return info->message->version;
}

uint32_t kvpool_server_info_protocol_version(const kvpool_server_info *info) {
  return info->message->protocol_version;
}

uint64_t kvpool_server_info_pid(const kvpool_server_info *info) {
  return info->message->pid;
}

uint64_t kvpool_server_info_started_unix_ns(const kvpool_server_info *info) {
  return info->message->started_unix_ns;
}

const char *kvpool_server_info_attach_socket(const kvpool_server_info *info) {
  return info->message->attach_socket;
}

bool kvpool_server_info_caller(const kvpool_server_info *info, kvpool_caller_info *out) {
  const Kvpool__V1__Caller *caller = info->message->caller;
  if (caller == NULL) {
    return false;
  }
  *out = (kvpool_caller_info){.uid = caller->uid, .pid = caller->pid, .is_operator = caller->is_operator != 0};
  return true;
}

size_t kvpool_server_info_device_count(const kvpool_server_info *info) {
  return info->message->n_devices;
}

const kvpool_device_info *kvpool_server_info_device(const kvpool_server_info *info, size_t index) {
  assert(index < info->message->n_devices);
  return &info->devices[index];
}

size_t kvpool_server_info_format_count(const kvpool_server_info *info) {
  return info->message->n_formats;
}

const kvpool_format_info *kvpool_server_info_format(const kvpool_server_info *info, size_t index) {
  assert(index < info->message->n_formats);
  return &info->formats[index];
}

void kvp_server_info_limits(const kvpool_server_info *info, size_t *message_bytes_max, size_t *chunk_bytes_max) {
  const Kvpool__V1__Limits *limits = info->message->limits;
  if (limits != NULL && limits->message_bytes_max > 0 && limits->chunk_bytes_max > 0) {
    *message_bytes_max = limits->message_bytes_max;
    *chunk_bytes_max = limits->chunk_bytes_max;
  }
}
