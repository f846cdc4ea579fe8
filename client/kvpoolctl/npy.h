/* The .npy header: what NumPy writes, as far as arrays of rows need it. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_NPY_H
#define KVPOOL_CLIENT_KVPOOLCTL_NPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { kvp_ctl_npy_dims_max = 8 };

struct kvp_ctl_npy {
  char descr[16]; /* "<f4" */
  bool fortran_order;
  uint64_t shape[kvp_ctl_npy_dims_max];
  size_t dims;
};

/* From the start of a file that begins with the magic; leaves it at the data. False, with a reason, when it is none.
 */
bool kvp_ctl_npy_read(FILE *file, struct kvp_ctl_npy *out, char *reason, size_t reason_bytes);
/* True when the file begins with .npy's magic; leaves it at the start. */
bool kvp_ctl_npy_is(FILE *file);
/* The header of an array [rows, width]. False: see errno. */
bool kvp_ctl_npy_write(FILE *file, const char *descr, uint64_t rows, uint64_t width);

#endif
