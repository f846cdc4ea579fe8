/* The .npy header, versions 1 to 3: a Python dictionary with three known keys. Hostile files end in a reason. */
#include "client/kvpoolctl/npy.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { magic_bytes = 6, header_bytes_max = 4096, alignment = 64 };

static const char magic[] = "\x93NUMPY";

bool kvp_ctl_npy_is(FILE *file) {
  char begin[magic_bytes];
  bool is_npy = fread(begin, 1, sizeof begin, file) == sizeof begin && memcmp(begin, magic, sizeof begin) == 0;
  rewind(file);
  return is_npy;
}

static const char *skip_space(const char *at) {
  while (isspace((unsigned char)*at)) {
    at++;
  }
  return at;
}

/* 'text' or "text"; NULL: something else. */
static const char *parse_string(const char *at, char *out, size_t out_bytes) {
  char quote = *at;
  if (quote != '\'' && quote != '"') {
    return NULL;
  }
  const char *end = strchr(at + 1, quote);
  if (end == NULL || (size_t)(end - at - 1) >= out_bytes) {
    return NULL;
  }
  memcpy(out, at + 1, (size_t)(end - at - 1));
  out[end - at - 1] = '\0';
  return end + 1;
}

static const char *parse_shape(const char *at, struct kvp_ctl_npy *out) {
  if (*at != '(') {
    return NULL;
  }
  for (at = skip_space(at + 1); *at != ')';) {
    char *end = NULL;
    if (!isdigit((unsigned char)*at) || out->dims == kvp_ctl_npy_dims_max) {
      return NULL;
    }
    errno = 0;
    out->shape[out->dims++] = strtoull(at, &end, 10);
    if (errno != 0) {
      return NULL;
    }
    at = skip_space(end);
    if (*at == ',') {
      at = skip_space(at + 1);
    } else if (*at != ')') {
      return NULL;
    }
  }
  return at + 1;
}

static const char *parse_bool(const char *at, bool *out) {
  *out = strncmp(at, "True", 4) == 0;
  return *out ? at + 4 : strncmp(at, "False", 5) == 0 ? at + 5 : NULL;
}

/* The three keys in any order, each once, and nothing else. */
static bool parse_dictionary(const char *at, struct kvp_ctl_npy *out) {
  unsigned seen = 0;
  at = skip_space(at);
  if (*at != '{') {
    return false;
  }
  for (at = skip_space(at + 1); at != NULL && *at != '}';) {
    char key[32];
    at = parse_string(at, key, sizeof key);
    at = at == NULL ? NULL : skip_space(at);
    if (at == NULL || *at != ':') {
      return false;
    }
    at = skip_space(at + 1);
    unsigned bit = 0;
    if (strcmp(key, "descr") == 0) {
      bit = 1;
      at = parse_string(at, out->descr, sizeof out->descr);
    } else if (strcmp(key, "fortran_order") == 0) {
      bit = 2;
      at = parse_bool(at, &out->fortran_order);
    } else if (strcmp(key, "shape") == 0) {
      bit = 4;
      at = parse_shape(at, out);
    }
    if (bit == 0 || (seen & bit) != 0 || at == NULL) {
      return false;
    }
    seen |= bit;
    at = skip_space(at);
    if (*at == ',') {
      at = skip_space(at + 1);
    } else if (*at != '}') {
      return false;
    }
  }
  return seen == 7;
}

bool kvp_ctl_npy_read(FILE *file, struct kvp_ctl_npy *out, char *reason, size_t reason_bytes) {
  unsigned char head[magic_bytes + 6];
  char text[header_bytes_max + 1];
  *out = (struct kvp_ctl_npy){0};
  if (fread(head, 1, magic_bytes + 4, file) != magic_bytes + 4) {
    (void)snprintf(reason, reason_bytes, "the .npy header is cut off");
    return false;
  }
  unsigned version = head[magic_bytes];
  size_t length = head[magic_bytes + 2] | (size_t)head[magic_bytes + 3] << 8;
  if (version < 1 || version > 3) {
    (void)snprintf(reason, reason_bytes, "version %u of .npy is not known", version);
    return false;
  }
  if (version > 1) {
    if (fread(head + magic_bytes + 4, 1, 2, file) != 2) {
      (void)snprintf(reason, reason_bytes, "the .npy header is cut off");
      return false;
    }
    length |= (size_t)head[magic_bytes + 4] << 16 | (size_t)head[magic_bytes + 5] << 24;
  }
  if (length > header_bytes_max || fread(text, 1, length, file) != length) {
    (void)snprintf(reason, reason_bytes, "the .npy header of %zu bytes is cut off, or longer than %d", length,
                   header_bytes_max);
    return false;
  }
  text[length] = '\0';
  if (!parse_dictionary(text, out)) {
    (void)snprintf(reason, reason_bytes, "the .npy header is not that of a plain array");
    return false;
  }
  return true;
}

bool kvp_ctl_npy_write(FILE *file, const char *descr, uint64_t rows, uint64_t width) {
  char text[128];
  int length = snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': (%llu, %llu), }", descr,
                        (unsigned long long)rows, (unsigned long long)width);
  /* Padded with spaces and a newline, so that the data begins at a multiple of 64. */
  size_t padded = ((size_t)length + 1 + magic_bytes + 4 + alignment - 1) / alignment * alignment - magic_bytes - 4;
  const unsigned char version[4] = {1, 0, (unsigned char)(padded & 0xFF), (unsigned char)(padded >> 8)};
  return fwrite(magic, 1, magic_bytes, file) == magic_bytes &&
         fwrite(version, 1, sizeof version, file) == sizeof version &&
         fprintf(file, "%-*s\n", (int)padded - 1, text) == (int)padded;
}
