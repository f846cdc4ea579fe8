/* Requests on a control socket that have no answer yet. */
#include "server/supervisor/control_requests.h"

#include <stdlib.h>

#include "server/supervisor/allocate.h"

struct kvp_control_request {
  struct kvp_control_request *next;
  uint32_t number;
  kvp_link_chunks_fn chunks; /* NULL: none are expected */
  kvp_link_result_fn result;
  void *context;
};

uint32_t kvp_control_requests_add(struct kvp_control_requests *requests, kvp_link_chunks_fn chunks,
                                  kvp_link_result_fn result, void *context) {
  struct kvp_control_request *request = kvp_allocate(1, sizeof *request);
  requests->last_number = requests->last_number == UINT32_MAX ? 1 : requests->last_number + 1;
  request->number = requests->last_number;
  request->chunks = chunks;
  request->result = result;
  request->context = context;
  if (requests->last == NULL) {
    requests->first = request;
  } else {
    requests->last->next = request;
  }
  requests->last = request;
  return request->number;
}

/* Answers come in the order of requests: the first one looked at is nearly always the one. */
static struct kvp_control_request *requests_find(struct kvp_control_requests *requests, uint32_t number,
                                                 struct kvp_control_request **previous) {
  struct kvp_control_request *request = requests->first;
  *previous = NULL;
  while (request != NULL && request->number != number) {
    *previous = request;
    request = request->next;
  }
  return request;
}

void kvp_control_requests_answer(struct kvp_control_requests *requests, uint32_t number,
                                 const struct kvp_error *error) {
  struct kvp_control_request *previous = NULL;
  struct kvp_control_request *request = requests_find(requests, number, &previous);
  if (request == NULL) {
    return;
  }
  if (previous == NULL) {
    requests->first = request->next;
  } else {
    previous->next = request->next;
  }
  if (requests->last == request) {
    requests->last = previous;
  }
  request->result(request->context, error);
  free(request);
}

bool kvp_control_requests_take_chunks(struct kvp_control_requests *requests, uint32_t number,
                                      const struct kvp_control_chunks *chunks, const int *fds, uint32_t fd_count) {
  struct kvp_control_request *previous = NULL;
  struct kvp_control_request *request = requests_find(requests, number, &previous);
  if (request == NULL || request->chunks == NULL) {
    return false;
  }
  request->chunks(request->context, chunks, fds, fd_count);
  return true;
}

void kvp_control_requests_fail_all(struct kvp_control_requests *requests, const struct kvp_error *error) {
  struct kvp_control_request *request = requests->first;
  requests->first = requests->last = NULL;
  while (request != NULL) {
    struct kvp_control_request *next = request->next;
    request->result(request->context, error);
    free(request);
    request = next;
  }
}
