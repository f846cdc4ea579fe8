/* What the tests of the planners share: random numbers, golden files, errors. */
#ifndef KVPOOL_TESTS_UNIT_PLAN_SUPPORT_H
#define KVPOOL_TESTS_UNIT_PLAN_SUPPORT_H

#include <stddef.h>
#include <stdint.h>

#include "kvpool/kvpool.h"

/* The same numbers in every run. */
uint32_t random_below(uint32_t bound);

/* All of a golden file; the test fails when its size is not the expected one. */
void golden_read(const char *name, void *out, size_t bytes);

/* The test fails when *error is not this one. */
void expect_error(const kvpool_error *error, kvpool_status status, const char *array, int64_t position, int64_t value,
                  const char *text_part);

#endif
