/* Asserts on the calls of kvpool.h. Included after cmocka.h. */
#ifndef KVPOOL_TESTS_CLIENT_CHECK_H
#define KVPOOL_TESTS_CLIENT_CHECK_H

#include <string.h>

#include "kvpool/kvpool.h"
#include "tests/client/process.h"

/* The call succeeds; the error's text is told when it doesn't. `error` is the name of the kvpool_error it fills. */
#define assert_ok(call)                                                                                              \
  do {                                                                                                               \
    kvpool_status status_ = (call);                                                                                  \
    if (status_ != KVPOOL_OK) {                                                                                      \
      fail_msg("%s: %s: %s", #call, kvpool_status_name(status_), error.text);                                        \
    }                                                                                                                \
  } while (0)

/* The call fails with this status, says so in the error too, and its text has this part. */
#define assert_fails(call, expected, text_part)                                                                      \
  do {                                                                                                               \
    memset(&error, 0, sizeof error);                                                                                 \
    kvpool_status status_ = (call);                                                                                  \
    if (status_ != (expected) || error.status != (expected) || strstr(error.text, (text_part)) == NULL) {            \
      fail_msg("%s: %s, not %s with \"%s\": %s", #call, kvpool_status_name(status_), kvpool_status_name(expected),   \
               (text_part), error.text);                                                                             \
    }                                                                                                                \
  } while (0)

struct pool_wait {
  kvpool_client *client;
  kvpool_pool **out;
  kvpool_error *error;
};

static inline bool pool_is_open(void *context) {
  const struct pool_wait *wait = context;
  return kvpool_pool_open(wait->client, "main", wait->out, wait->error) == KVPOOL_OK;
}

/* The pool of the configuration, which is made when the devices serve. */
static inline kvpool_status pool_wait(kvpool_client *client, kvpool_pool **out, kvpool_error *error) {
  struct pool_wait wait = {.client = client, .out = out, .error = error};
  return eventually(pool_is_open, &wait) ? KVPOOL_OK : error->status;
}

#endif
