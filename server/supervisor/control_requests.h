/* Requests on a control socket that have no answer yet. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_CONTROL_REQUESTS_H
#define KVPOOL_SUPERVISOR_CONTROL_REQUESTS_H

#include <stdbool.h>
#include <stdint.h>

#include "server/supervisor/executor_link.h"

/* In the order of their numbers. Zeroed: empty. */
struct kvp_control_requests {
  struct kvp_control_request *first;
  struct kvp_control_request *last;
  uint32_t last_number;
};

/* Returns the number it is sent with, never 0. */
uint32_t kvp_control_requests_add(struct kvp_control_requests *requests, kvp_link_chunks_fn chunks,
                                  kvp_link_result_fn result, void *context);
/* Calls the request's result and forgets it. A number that is not there is of no interest: a request in parts may be
 * answered twice. */
void kvp_control_requests_answer(struct kvp_control_requests *requests, uint32_t number,
                                 const struct kvp_error *error);
/* True: the request took the fds. */
bool kvp_control_requests_take_chunks(struct kvp_control_requests *requests, uint32_t number,
                                      const struct kvp_control_chunks *chunks, const int *fds, uint32_t fd_count);
/* Answers all of them, in order. */
void kvp_control_requests_fail_all(struct kvp_control_requests *requests, const struct kvp_error *error);

#endif
