/* Rows in a file: types converted to BF16 on the way in, and from float on the way out. */
#include "client/kvpoolctl/rows_file.h"

#include <errno.h>
#include <fcntl.h>
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

static int npy_open(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, uint64_t bytes) {
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
    return kvp_ctl_refuse(ctl, "the last dimensions make a row, the others count them",
                          "%s: shape (%s) is not one of rows of %u elements", file->path, shape, file->elements);
  }
  long begin = ftell(file->stream);
  uint64_t row_bytes = (uint64_t)file->elements * type_bytes(file->type);
  if (begin < 0 || file->rows > (bytes - (uint64_t)begin) / row_bytes) {
    return kvp_ctl_refuse(ctl, "it is cut off, or its header is not its own",
                          "%s: it ends before its last row: %llu rows of %llu bytes, %llu bytes behind the header",
                          file->path, (unsigned long long)file->rows, (unsigned long long)row_bytes,
                          (unsigned long long)bytes - (unsigned long long)begin);
  }
  return KVP_CTL_OK;
}

static int read_failed(const struct kvp_ctl *ctl, const char *path) {
  return kvp_ctl_refuse(ctl, "FILE has to be there, and readable; - is standard input", "%s: %s", path,
                        strerror(errno));
}

/* What comes through a pipe, in a file without a name: how many rows there are has to be known before the first. */
static FILE *spool(FILE *from) {
  static uint8_t piece[1 << 16];
  FILE *to = tmpfile();
  size_t count;
  while (to != NULL && (count = fread(piece, 1, sizeof piece, from)) > 0) {
    if (fwrite(piece, 1, count, to) != count) {
      break;
    }
  }
  if (to != NULL && (ferror(from) != 0 || ferror(to) != 0 || fflush(to) != 0 || fseek(to, 0, SEEK_SET) != 0)) {
    int failure = errno;
    (void)fclose(to);
    to = NULL;
    errno = failure;
  }
  return to;
}

/* The stream, and how many bytes it has; what can't be told that of is refused. */
static int stream_open(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, uint64_t *bytes) {
  bool is_standard = strcmp(file->path, "-") == 0;
  struct stat status;
  /* A pipe that nobody writes to yet is waited for; the wait ends with a signal. */
  file->stream = is_standard ? fdopen(fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0), "rb") : fopen(file->path, "rbe");
  if (file->stream == NULL || fstat(fileno(file->stream), &status) != 0) {
    return read_failed(ctl, file->path);
  }
  if (is_standard || S_ISFIFO(status.st_mode)) {
    FILE *from = file->stream;
    file->stream = spool(from);
    if (file->stream == NULL || fstat(fileno(file->stream), &status) != 0) {
      int exit_status = read_failed(ctl, file->path);
      (void)fclose(from);
      return exit_status;
    }
    (void)fclose(from);
  } else if (!S_ISREG(status.st_mode)) {
    return kvp_ctl_refuse(ctl, "a file of rows, or a pipe that they come through", "%s is a %s", file->path,
                          S_ISDIR(status.st_mode) ? "directory" : "device, neither a file nor a pipe");
  }
  *bytes = (uint64_t)status.st_size;
  return KVP_CTL_OK;
}

static int raw_open(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, uint64_t bytes) {
  uint64_t row_bytes = 2 * (uint64_t)file->elements;
  file->rows = bytes / row_bytes;
  if (bytes % row_bytes != 0) {
    return kvp_ctl_refuse(ctl, types_hint, "%s: %llu bytes are not a whole number of BF16 rows of %llu bytes",
                          file->path, (unsigned long long)bytes, (unsigned long long)row_bytes);
  }
  return KVP_CTL_OK;
}

int kvp_ctl_rows_file_open(const struct kvp_ctl *ctl, const char *path, uint32_t elements,
                           struct kvp_ctl_rows_file *out) {
  struct kvp_ctl_rows_file file = {.path = path, .type = KVP_CTL_ROW_BF16, .elements = elements};
  uint64_t bytes = 0;
  int exit_status = stream_open(ctl, &file, &bytes);
  if (exit_status == KVP_CTL_OK) {
    exit_status = kvp_ctl_npy_is(file.stream) ? npy_open(ctl, &file, bytes) : raw_open(ctl, &file, bytes);
  }
  if (exit_status == KVP_CTL_OK && file.rows == 0) {
    exit_status = kvp_ctl_refuse(ctl, "a row is what one slot holds", "%s has no rows", path);
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
    return kvp_ctl_refuse(ctl, "it has become shorter, or can't be read any more", "%s: %s", file->path,
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
  int exit_status = kvp_ctl_output_create(ctl, path, &file.output);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  if (ends_with(path, ".npy") && !kvp_ctl_npy_write(file.output.stream, descr[type], rows, elements)) {
    exit_status = kvp_ctl_output_failed(ctl, path);
    kvp_ctl_rows_file_close(&file);
    return exit_status;
  }
  *out = file;
  return KVP_CTL_OK;
}

int kvp_ctl_rows_file_write_bytes(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, const void *bytes,
                                  size_t count) {
  if (fwrite(bytes, 1, count, file->output.stream) != count) {
    return kvp_ctl_output_failed(ctl, file->path);
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
  return kvp_ctl_output_finish(ctl, &file->output);
}

void kvp_ctl_rows_file_close(struct kvp_ctl_rows_file *file) {
  if (file->stream != NULL) {
    (void)fclose(file->stream);
  }
  kvp_ctl_output_close(&file->output);
  free(file->scratch);
}
