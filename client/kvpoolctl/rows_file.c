/* Rows in a file. A file that is written appears under its name when it is whole, and not before. */
#include "client/kvpoolctl/rows_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/npy.h"
#include "client/kvpoolctl/number_format.h"

static const char types_hint[] = "raw BF16 rows, or .npy of float32, float16 or uint16 (the bits of BF16)";

static size_t type_bytes(enum kvp_ctl_row_type type) {
  return type == KVP_CTL_ROW_FLOAT32 ? 4 : type == KVP_CTL_ROW_BYTES ? 1 : 2;
}

const char *kvp_ctl_row_type_name(enum kvp_ctl_row_type type) {
  static const char *const names[] = {"bf16", "float32", "float16", "bytes"};
  return names[type];
}

static uint8_t *scratch(struct kvp_ctl_rows_file *file, size_t bytes) {
  if (bytes > file->scratch_bytes) {
    file->scratch = kvp_ctl_reallocate(file->scratch, bytes, 1);
    file->scratch_bytes = bytes;
  }
  return file->scratch;
}

/* ---- reading ----------------------------------------------------------------------------------------------------
 */

static bool type_from_descr(const char *descr, enum kvp_ctl_row_type *out) {
  static const struct {
    const char *descr;
    enum kvp_ctl_row_type type;
  } known[] = {
      {"<f4", KVP_CTL_ROW_FLOAT32}, {"<f2", KVP_CTL_ROW_FLOAT16}, {"<u2", KVP_CTL_ROW_BF16},
      {"|V2", KVP_CTL_ROW_BF16},    {"<V2", KVP_CTL_ROW_BF16}, /* how ml_dtypes' bfloat16 is saved */
  };
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (strcmp(known[i].descr, descr) == 0) {
      *out = known[i].type;
      return true;
    }
  }
  return false;
}

/* Leading dimensions are rows, the rest is a row: so many of the last ones that they make its elements. */
static bool rows_from_shape(const struct kvp_ctl_npy *header, uint32_t elements, uint64_t *rows) {
  uint64_t width = 1;
  size_t dims = header->dims;
  while (dims > 0 && width < elements) {
    if (__builtin_mul_overflow(width, header->shape[--dims], &width)) {
      return false;
    }
  }
  *rows = 1;
  while (dims > 0) {
    if (__builtin_mul_overflow(*rows, header->shape[--dims], rows)) {
      return false;
    }
  }
  return width == elements;
}

static int npy_open(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file) {
  struct kvp_ctl_npy header;
  char reason[128];
  if (!kvp_ctl_npy_read(file->stream, &header, reason, sizeof reason)) {
    return kvp_ctl_refuse(ctl, types_hint, "%s: %s", file->path, reason);
  }
  if (!type_from_descr(header.descr, &file->type)) {
    return kvp_ctl_refuse(ctl, types_hint, "%s: elements of type %s", file->path, header.descr);
  }
  if (header.fortran_order) {
    return kvp_ctl_refuse(ctl, "save numpy.ascontiguousarray(...) of it", "%s is in Fortran order", file->path);
  }
  if (!rows_from_shape(&header, file->elements, &file->rows)) {
    char shape[128] = "";
    size_t used = 0;
    for (size_t i = 0; i < header.dims && used < sizeof shape; i++) {
      used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%llu", i > 0 ? ", " : "",
                               (unsigned long long)header.shape[i]);
    }
    return kvp_ctl_refuse(ctl, NULL, "%s: shape (%s) is not one of rows of %u elements", file->path, shape,
                          file->elements);
  }
  return KVP_CTL_OK;
}

int kvp_ctl_rows_file_open(const struct kvp_ctl *ctl, const char *path, uint32_t elements,
                           struct kvp_ctl_rows_file *out) {
  struct kvp_ctl_rows_file file = {.path = path, .type = KVP_CTL_ROW_BF16, .elements = elements};
  file.stream = fopen(path, "rbe");
  struct stat status;
  if (file.stream == NULL || fstat(fileno(file.stream), &status) != 0) {
    int exit_status = kvp_ctl_refuse(ctl, NULL, "%s: %s", path, strerror(errno));
    kvp_ctl_rows_file_close(&file);
    return exit_status;
  }
  uint64_t row_bytes = 2 * (uint64_t)elements;
  int exit_status = KVP_CTL_OK;
  if (!S_ISREG(status.st_mode)) {
    exit_status = kvp_ctl_refuse(ctl, NULL, "%s is not a regular file", path);
  } else if (kvp_ctl_npy_is(file.stream)) {
    exit_status = npy_open(ctl, &file);
  } else {
    file.rows = (uint64_t)status.st_size / row_bytes;
    if ((uint64_t)status.st_size % row_bytes != 0) {
      exit_status =
          kvp_ctl_refuse(ctl, types_hint, "%s: %lld bytes are not a whole number of BF16 rows of %llu bytes", path,
                         (long long)status.st_size, (unsigned long long)row_bytes);
    }
  }
  if (exit_status == KVP_CTL_OK && file.rows == 0) {
    exit_status = kvp_ctl_refuse(ctl, NULL, "%s has no rows", path);
  }
  if (exit_status != KVP_CTL_OK) {
    kvp_ctl_rows_file_close(&file);
    return exit_status;
  }
  *out = file;
  return KVP_CTL_OK;
}

int kvp_ctl_rows_file_read(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, uint64_t count, uint16_t *out) {
  size_t numbers = (size_t)count * file->elements;
  size_t bytes = numbers * type_bytes(file->type);
  uint8_t *from = file->type == KVP_CTL_ROW_BF16 ? (uint8_t *)out : scratch(file, bytes);
  if (fread(from, 1, bytes, file->stream) != bytes) {
    return kvp_ctl_refuse(ctl, NULL, "%s: %s", file->path,
                          ferror(file->stream) != 0 ? strerror(errno) : "it ends before its last row");
  }
  for (size_t i = 0; i < numbers && file->type != KVP_CTL_ROW_BF16; i++) {
    float value;
    uint16_t half;
    if (file->type == KVP_CTL_ROW_FLOAT32) {
      memcpy(&value, from + 4 * i, sizeof value);
    } else {
      memcpy(&half, from + 2 * i, sizeof half);
      value = kvp_ctl_half_to_float(half);
    }
    out[i] = kvp_ctl_bf16_from_float(value);
  }
  return KVP_CTL_OK;
}

/* ---- writing ----------------------------------------------------------------------------------------------------
 */

static bool ends_with(const char *text, const char *end) {
  size_t length = strlen(text);
  size_t end_length = strlen(end);
  return length >= end_length && strcmp(text + length - end_length, end) == 0;
}

int kvp_ctl_rows_file_create(const struct kvp_ctl *ctl, const char *path, enum kvp_ctl_row_type type,
                             uint32_t elements, uint64_t rows, struct kvp_ctl_rows_file *out) {
  static const char *const descr[] = {"<u2", "<f4", "<f2", "|u1"};
  struct kvp_ctl_rows_file file = {.path = path, .type = type, .elements = elements, .rows = rows};
  size_t part_bytes = strlen(path) + 16;
  file.part = kvp_ctl_allocate(part_bytes, 1);
  (void)snprintf(file.part, part_bytes, "%s.XXXXXX", path);
  int fd = mkstemp(file.part);
  if (fd < 0) {
    free(file.part);
    return kvp_ctl_refuse(ctl, NULL, "%s can't be written: %s", path, strerror(errno));
  }
  mode_t mask = umask(0); /* mkstemp's file is private; this one gets what any new file gets */
  (void)umask(mask);
  (void)fchmod(fd, 0666 & ~mask);
  file.stream = fdopen(fd, "wb");
  if (file.stream == NULL ||
      (ends_with(path, ".npy") && !kvp_ctl_npy_write(file.stream, descr[type], rows, elements))) {
    int exit_status = kvp_ctl_refuse(ctl, NULL, "%s can't be written: %s", path, strerror(errno));
    kvp_ctl_rows_file_close(&file);
    return exit_status;
  }
  *out = file;
  return KVP_CTL_OK;
}

int kvp_ctl_rows_file_write_bytes(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, const void *bytes,
                                  size_t count) {
  if (fwrite(bytes, 1, count, file->stream) != count) {
    return kvp_ctl_refuse(ctl, NULL, "%s can't be written: %s", file->path, strerror(errno));
  }
  return KVP_CTL_OK;
}

int kvp_ctl_rows_file_write(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, const float *values,
                            uint64_t count) {
  size_t numbers = (size_t)count * file->elements;
  if (file->type == KVP_CTL_ROW_FLOAT32) {
    return kvp_ctl_rows_file_write_bytes(ctl, file, values, numbers * sizeof *values);
  }
  uint8_t *to = scratch(file, 2 * numbers);
  for (size_t i = 0; i < numbers; i++) {
    uint16_t half =
        file->type == KVP_CTL_ROW_FLOAT16 ? kvp_ctl_half_from_float(values[i]) : kvp_ctl_bf16_from_float(values[i]);
    memcpy(to + 2 * i, &half, sizeof half);
  }
  return kvp_ctl_rows_file_write_bytes(ctl, file, to, 2 * numbers);
}

int kvp_ctl_rows_file_finish(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file) {
  FILE *stream = file->stream;
  file->stream = NULL;
  if (fclose(stream) != 0 || rename(file->part, file->path) != 0) {
    return kvp_ctl_refuse(ctl, NULL, "%s can't be written: %s", file->path, strerror(errno));
  }
  free(file->part);
  file->part = NULL;
  return KVP_CTL_OK;
}

void kvp_ctl_rows_file_close(struct kvp_ctl_rows_file *file) {
  if (file->stream != NULL) {
    (void)fclose(file->stream);
  }
  if (file->part != NULL) {
    (void)unlink(file->part);
    free(file->part);
  }
  free(file->scratch);
}
