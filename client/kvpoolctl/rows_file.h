/* Rows in a file: raw BF16, or .npy of float32, float16 or BF16 bits. Read and written in pieces, in order. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_ROWS_FILE_H
#define KVPOOL_CLIENT_KVPOOLCTL_ROWS_FILE_H

#include <stdio.h>

#include "client/kvpoolctl/output.h"

enum kvp_ctl_row_type { KVP_CTL_ROW_BF16, KVP_CTL_ROW_FLOAT32, KVP_CTL_ROW_FLOAT16, KVP_CTL_ROW_BYTES };

struct kvp_ctl_rows_file {
  FILE *stream; /* what is read */
  const char *path;
  struct kvp_ctl_output output; /* what is written */
  enum kvp_ctl_row_type type;
  uint32_t elements; /* of a row; bytes where the type is bytes */
  uint64_t rows;
  uint8_t *scratch; /* [scratch_bytes] */
  size_t scratch_bytes;
};

const char *kvp_ctl_row_type_name(enum kvp_ctl_row_type type);

/* path "-": standard input. Looks at the file - what comes through a pipe is read whole first - and finds its rows of
 * `elements` elements. KVP_CTL_OK, or the exit status with the error told. */
int kvp_ctl_rows_file_open(const struct kvp_ctl *ctl, const char *path, uint32_t elements,
                           struct kvp_ctl_rows_file *out);
/* The next `count` rows as BF16 [count, elements]. */
int kvp_ctl_rows_file_read(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, uint64_t count, uint16_t *out);

/* .npy when the name ends so, else raw. See output.h for what becomes of a file that is there. */
int kvp_ctl_rows_file_create(const struct kvp_ctl *ctl, const char *path, enum kvp_ctl_row_type type,
                             uint32_t elements, uint64_t rows, struct kvp_ctl_rows_file *out);
/* Values [count, elements], converted to the file's type. */
int kvp_ctl_rows_file_write(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, const float *values,
                            uint64_t count);
int kvp_ctl_rows_file_write_bytes(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file, const void *bytes,
                                  size_t count);
int kvp_ctl_rows_file_finish(const struct kvp_ctl *ctl, struct kvp_ctl_rows_file *file);
/* Also without _finish: then nothing is left of a file that was created. */
void kvp_ctl_rows_file_close(struct kvp_ctl_rows_file *file);

#endif
