/* Names and notes that come from outside. No state. */
#include "server/supervisor/name.h"

#include <string.h>
#include <strings.h>

#include "proto/limits.h"
#include "server/supervisor/utf8.h"

static bool name_has(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
         c == ':' || c == '-';
}

enum kvp_status kvp_name_check(const char *name, const char *what, bool empty_allowed, struct kvp_error *error) {
  size_t length = strlen(name);
  if (length == 0 && !empty_allowed) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, what, -1, 0, "%s is empty", what);
  }
  if (length >= kvp_name_bytes_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, what, -1, (int64_t)length,
                            "%s has %zu characters, at most %d are allowed", what, length, kvp_name_bytes_max - 1);
  }
  for (size_t i = 0; i < length; i++) {
    if (!name_has(name[i])) {
      return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, what, (int64_t)i, (unsigned char)name[i],
                              "%s has the byte 0x%02x at %zu; allowed are [A-Za-z0-9._:-]", what,
                              (unsigned)(unsigned char)name[i], i);
    }
  }
  return KVP_OK;
}

enum kvp_status kvp_note_check(const char *note, const char *what, size_t bytes_max, struct kvp_error *error) {
  size_t length = strlen(note);
  if (length >= bytes_max) {
    return kvp_error_set_at(error, KVP_TOO_LARGE, -1, what, -1, (int64_t)length,
                            "%s has %zu bytes, at most %zu are allowed", what, length, bytes_max - 1);
  }
  size_t valid = kvp_utf8_valid_bytes(note, length);
  for (size_t i = 0; i < length; i++) {
    unsigned char byte = (unsigned char)note[i];
    if (i == valid || byte < 0x20 || byte == 0x7F) {
      return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, what, (int64_t)i, byte,
                              "%s has the byte 0x%02x at %zu: one line of UTF-8 is allowed", what, (unsigned)byte, i);
    }
  }
  return KVP_OK;
}

bool kvp_device_names_equal(const char *one, const char *other) {
  static const char by_uuid[] = "cuda:GPU-";
  const size_t prefix_bytes = sizeof by_uuid - 1;
  if (strncmp(one, by_uuid, prefix_bytes) != 0 || strncmp(other, by_uuid, prefix_bytes) != 0) {
    return strcmp(one, other) == 0;
  }
  return strcasecmp(one + prefix_bytes, other + prefix_bytes) == 0;
}
