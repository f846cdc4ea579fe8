/* A golden case: case.txt names parameters and arrays, each array is raw little-endian <name>.bin beside it.
 * Test code; every fault ends the program with its reason.
 */
#ifndef KVPOOL_TESTS_CONTRACT_CASE_FILE_H
#define KVPOOL_TESTS_CONTRACT_CASE_FILE_H

#include <stddef.h>
#include <stdint.h>

enum { case_entries_max = 32, case_text_bytes_max = 64 };

struct case_array {
  char name[case_text_bytes_max];
  uint64_t rows; /* first dimension */
  uint64_t bytes;
  uint8_t *data;
};

struct case_param {
  char name[case_text_bytes_max];
  char value[case_text_bytes_max];
};

struct case_file {
  size_t param_count;
  struct case_param params[case_entries_max];
  size_t array_count;
  struct case_array arrays[case_entries_max];
};

void case_file_read(const char *directory, struct case_file *out);
void case_file_free(struct case_file *file);

const char *case_file_param(const struct case_file *file, const char *name);
/* Decimal or 0x... */
uint64_t case_file_number(const struct case_file *file, const char *name);
/* NULL when the case has no such array. */
const struct case_array *case_file_find(const struct case_file *file, const char *name);
const struct case_array *case_file_array(const struct case_file *file, const char *name);

#endif
