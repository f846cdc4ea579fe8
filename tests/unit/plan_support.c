/* Random numbers, golden files and errors of the tests of the planners. */
#include "tests/unit/plan_support.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

uint32_t random_below(uint32_t bound) {
  static uint64_t random_state = 20240607;
  random_state = random_state * 6364136223846793005U + 1442695040888963407U;
  return (uint32_t)((random_state >> 33) % bound);
}

void golden_read(const char *name, void *out, size_t bytes) {
  char path[512];
  (void)snprintf(path, sizeof path, "%s/%s", KVPOOL_GOLDEN_DIR, name);
  FILE *file = fopen(path, "rb");
  if (file == NULL) {
    fail_msg("%s can't be opened", path);
    return;
  }
  assert_int_equal(fread(out, 1, bytes, file), bytes);
  assert_int_equal(fgetc(file), EOF);
  assert_int_equal(fclose(file), 0);
}

void expect_error(const kvpool_error *error, kvpool_status status, const char *array, int64_t position, int64_t value,
                  const char *text_part) {
  assert_int_equal(error->status, status);
  assert_string_equal(error->array, array);
  assert_int_equal(error->position, position);
  assert_int_equal(error->value, value);
  assert_int_equal(error->op, -1);
  assert_non_null(strstr(error->text, text_part));
}
