/* The two forms of a CUDA device's name. */
#include "server/executor/device_cuda_name.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/limits.h"

static const char prefix[] = "cuda:";
static const char uuid_prefix[] = "GPU-";
static const char hex_digits[] = "0123456789abcdefABCDEF";

enum { index_digits_max = 4, uuid_text_length = kvp_cuda_uuid_text_bytes - 1 };

/* Behind "GPU-": 8, 4, 4, 4 and 12 hex digits. */
static bool uuid_parse(const char *text, uint8_t *out) {
  static const uint8_t group_bytes[] = {4, 2, 2, 2, 6};
  if (strlen(text) != uuid_text_length - strlen(uuid_prefix)) {
    return false;
  }
  for (size_t group = 0; group < sizeof group_bytes; group++) {
    if (group > 0 && *text++ != '-') {
      return false;
    }
    for (uint32_t i = 0; i < group_bytes[group]; i++) {
      const char digits[] = {text[0], text[1], '\0'};
      if (strspn(digits, hex_digits) != 2) {
        return false;
      }
      *out++ = (uint8_t)strtoul(digits, NULL, 16);
      text += 2;
    }
  }
  return true;
}

enum kvp_status kvp_cuda_name_parse(const char *name, struct kvp_cuda_name *out, struct kvp_error *error) {
  *out = (struct kvp_cuda_name){0};
  if (strncmp(name, prefix, strlen(prefix)) == 0) {
    const char *rest = name + strlen(prefix);
    const size_t digits = strspn(rest, "0123456789");
    if (digits > 0 && digits <= index_digits_max && rest[digits] == '\0') {
      out->index = (uint32_t)strtoul(rest, NULL, 10);
      if (out->index > kvp_cuda_device_index_max) {
        return kvp_error_set(error, KVP_INVALID_ARGUMENT, "device '%s': the last CUDA device is cuda:%d", name,
                             kvp_cuda_device_index_max);
      }
      return KVP_OK;
    }
    if (strncmp(rest, uuid_prefix, strlen(uuid_prefix)) == 0) {
      out->by_uuid = uuid_parse(rest + strlen(uuid_prefix), out->uuid);
      if (out->by_uuid) {
        return KVP_OK;
      }
    }
  }
  return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                       "device '%s': a CUDA device is cuda:N or cuda:GPU-<uuid>, as nvidia-smi -L lists them", name);
}

void kvp_cuda_uuid_format(const uint8_t *uuid, char out[kvp_cuda_uuid_text_bytes]) {
  (void)snprintf(out, kvp_cuda_uuid_text_bytes,
                 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", uuid[0], uuid[1],
                 uuid[2], uuid[3], uuid[4], uuid[5], uuid[6], uuid[7], uuid[8], uuid[9], uuid[10], uuid[11], uuid[12],
                 uuid[13], uuid[14], uuid[15]);
}
