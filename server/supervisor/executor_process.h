/* One executor process, from spawn to reaped: its control socket, its ring, its completions, its death.
 *
 * A process that closes its control socket, breaks the protocol or corrupts its lane is killed. `exited` comes when
 * it has been reaped and not before, so that nothing of it can still write to pool memory when its successor starts;
 * what it had said until then has been delivered first. Loop thread only; callbacks never from inside a call of this
 * API.
 */
#ifndef KVPOOL_SUPERVISOR_EXECUTOR_PROCESS_H
#define KVPOOL_SUPERVISOR_EXECUTOR_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "proto/fd_socket.h"
#include "proto/ring.h"
#include "proto/status.h"

struct kvp_executor_process;

struct kvp_process_exit {
  int64_t exit_status;
  int term_signal;    /* 0: it exited by itself */
  const char *reason; /* why we killed it; NULL when we did not */
};

struct kvp_process_events {
  /* message->fds are the callee's. */
  void (*message)(void *context, struct kvp_fd_message *message);
  void (*completion)(void *context, const struct kvp_ring_record *record, const uint8_t *payload);
  /* No more completions in this turn of the loop. */
  void (*burst_end)(void *context);
  /* The last event. The process object goes by itself. */
  void (*exited)(void *context, const struct kvp_process_exit *exit);
};

/* The child's control socket has this number. */
enum { kvp_executor_control_fd = 3 };

/* Makes ring, eventfds and control socket and runs `path --device DEVICE --control-fd 3`. Hands out what HELLO
 * carries: [3] fds, valid until the next call into this process. events is kept by reference. */
enum kvp_status kvp_executor_process_spawn(uv_loop_t *loop, const char *path, const char *device,
                                           const struct kvp_process_events *events, void *context,
                                           struct kvp_executor_process **out, const int **hello_fds,
                                           struct kvp_error *error);

/* False: it is dying, the message was dropped. */
bool kvp_executor_process_send(struct kvp_executor_process *process, uint32_t kind, uint32_t request,
                               const void *body, uint32_t body_bytes, const int *fds, uint32_t fd_count);
/* busy: no room in the lane; device_lost: it is dying. */
enum kvp_status kvp_executor_process_post(struct kvp_executor_process *process, uint32_t kind, uint64_t tag,
                                          const void *payload, uint32_t payload_bytes);
/* Tells it to stop; its control socket reads as closed from then on, and it exits by itself. */
void kvp_executor_process_hang_up(struct kvp_executor_process *process);
/* reason: a literal. The first one counts. */
void kvp_executor_process_kill(struct kvp_executor_process *process, const char *reason);
pid_t kvp_executor_process_pid(const struct kvp_executor_process *process);

#endif
