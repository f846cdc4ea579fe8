/* One executor process: spawn, control socket, ring, death. */
#include "server/supervisor/executor_process.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/close_range.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/control_wire.h"
#include "proto/limits.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/control_queue.h"

/* In one turn of the loop, so that a busy device can't starve the rest of the daemon. */
enum { completions_per_turn_max = 256, messages_per_turn_max = 16 };

enum { hello_ring, hello_wake_executor, hello_wake_supervisor, hello_fd_count };

struct kvp_executor_process {
  const struct kvp_process_events *events;
  void *context;
  uv_process_t child;
  uv_poll_t control_poll;
  uv_poll_t completion_poll;
  unsigned open_handles;
  int control;
  int hello_fds[hello_fd_count];
  struct kvp_ring ring;
  struct kvp_control_queue outgoing;
  struct kvp_fd_message incoming;
  uint8_t *payload; /* of the completion being delivered */
  uint32_t payload_capacity_bytes;
  bool dying;         /* nothing is sent or posted any more */
  bool reaped;        /* its pid may be somebody else's */
  const char *reason; /* why it was killed */
};

/* ---- end --------------------------------------------------------------------------------------------------------
 */

static void process_free(struct kvp_executor_process *process) {
  kvp_control_queue_deinit(&process->outgoing);
  if (process->ring.map != NULL) {
    kvp_ring_deinit(&process->ring);
  }
  for (int i = 0; i < hello_fd_count; i++) {
    if (process->hello_fds[i] >= 0) {
      (void)close(process->hello_fds[i]);
    }
  }
  if (process->control >= 0) {
    (void)close(process->control);
  }
  free(process->payload);
  free(process);
}

static void process_handle_closed(uv_handle_t *handle) {
  struct kvp_executor_process *process = handle->data;
  if (--process->open_handles == 0) {
    process_free(process);
  }
}

static void process_close_handles(struct kvp_executor_process *process) {
  uv_close((uv_handle_t *)&process->control_poll, process_handle_closed);
  uv_close((uv_handle_t *)&process->completion_poll, process_handle_closed);
  uv_close((uv_handle_t *)&process->child, process_handle_closed);
}

void kvp_executor_process_kill(struct kvp_executor_process *process, const char *reason) {
  if (process->reason != NULL) {
    return;
  }
  process->reason = reason;
  process->dying = true;
  (void)uv_poll_stop(&process->control_poll);
  (void)uv_poll_stop(&process->completion_poll);
  if (!process->reaped) {
    (void)uv_process_kill(&process->child, SIGKILL); /* fails when it is dead already, which is as good */
  }
}

void kvp_executor_process_hang_up(struct kvp_executor_process *process) {
  (void)kvp_executor_process_send(process, KVP_CONTROL_STOP, 0, NULL, 0, NULL, 0);
  process->dying = true;
  (void)uv_poll_stop(&process->control_poll);
  (void)shutdown(process->control, SHUT_RDWR);
}

/* ---- completions ------------------------------------------------------------------------------------------------
 */

static bool process_payload_fit(struct kvp_executor_process *process, uint32_t bytes) {
  if (bytes <= process->payload_capacity_bytes) {
    return true;
  }
  uint8_t *payload = realloc(process->payload, bytes);
  if (payload == NULL) {
    return false;
  }
  process->payload = payload;
  process->payload_capacity_bytes = bytes;
  return true;
}

/* Delivers one record at most. */
static enum kvp_lane_state process_completion_next(struct kvp_executor_process *process) {
  struct kvp_lane_end *lane = &process->ring.completions;
  struct kvp_ring_record record;
  enum kvp_lane_state state = kvp_lane_peek(lane, &record);
  if (state != KVP_LANE_RECORD) {
    return state;
  }
  if (!process_payload_fit(process, record.payload_bytes)) {
    return KVP_LANE_CORRUPT; /* as unusable as a corrupt one */
  }
  kvp_lane_copy_payload(lane, &record, process->payload);
  kvp_lane_advance(lane, &record);
  process->events->completion(process->context, &record, record.payload_bytes > 0 ? process->payload : NULL);
  return KVP_LANE_RECORD;
}

static void completion_event_clear(const struct kvp_executor_process *process) {
  uint64_t count = 0;
  ssize_t got = read(process->hello_fds[hello_wake_supervisor], &count, sizeof count);
  (void)got; /* nothing there is fine: the lane says what is to be done */
}

static void process_completions_readable(uv_poll_t *poll, int status, int events) {
  (void)status;
  (void)events;
  struct kvp_executor_process *process = poll->data;
  kvp_lane_awake(&process->ring.completions);
  for (int i = 0; i < completions_per_turn_max && !process->dying; i++) {
    enum kvp_lane_state state = process_completion_next(process);
    if (state == KVP_LANE_CORRUPT) {
      kvp_executor_process_kill(process, "its completion lane is corrupt");
    }
    if (state == KVP_LANE_EMPTY) {
      completion_event_clear(process); /* before the flag: a wake-up after it is never swallowed */
      if (kvp_lane_prepare_sleep(&process->ring.completions)) {
        break;
      }
    }
  }
  /* A batch that ended early leaves the eventfd readable: the poll comes back in the next turn. */
  process->events->burst_end(process->context);
}

/* ---- control socket ---------------------------------------------------------------------------------------------
 */

static void process_control_ready(uv_poll_t *poll, int status, int events);

static void process_control_poll(struct kvp_executor_process *process) {
  int events = UV_READABLE | (kvp_control_queue_is_empty(&process->outgoing) ? 0 : UV_WRITABLE);
  (void)uv_poll_start(&process->control_poll, events, process_control_ready);
}

static void process_receive(struct kvp_executor_process *process) {
  for (int i = 0; i < messages_per_turn_max && !process->dying; i++) {
    enum kvp_status status = kvp_fd_socket_receive(process->control, &process->incoming);
    if (status == KVP_BUSY) {
      return;
    }
    if (status == KVP_CANCELLED) {
      kvp_executor_process_kill(process, "its control socket closed");
    } else if (status != KVP_OK) {
      kvp_executor_process_kill(process, "it sent a malformed control message");
    } else {
      process->events->message(process->context, &process->incoming);
    }
  }
}

static void process_control_ready(uv_poll_t *poll, int status, int events) {
  struct kvp_executor_process *process = poll->data;
  if (status < 0) { /* an error of the socket: the peer died with messages unread */
    kvp_executor_process_kill(process, "its control socket closed");
    return;
  }
  if ((events & UV_READABLE) != 0) {
    process_receive(process);
  }
  if (process->dying) {
    return;
  }
  if (kvp_control_queue_flush(&process->outgoing) != KVP_OK) {
    kvp_executor_process_kill(process, "its control socket takes nothing any more");
    return;
  }
  process_control_poll(process);
}

bool kvp_executor_process_send(struct kvp_executor_process *process, uint32_t kind, uint32_t request,
                               const void *body, uint32_t body_bytes, const int *fds, uint32_t fd_count) {
  if (process->dying) {
    return false;
  }
  bool was_empty = kvp_control_queue_is_empty(&process->outgoing);
  enum kvp_status status = kvp_control_queue_put(&process->outgoing, kind, request, body, body_bytes, fds, fd_count);
  if (status != KVP_OK) {
    kvp_executor_process_kill(process, "its control socket takes nothing any more");
    return false;
  }
  if (was_empty && !kvp_control_queue_is_empty(&process->outgoing)) {
    process_control_poll(process);
  }
  return true;
}

enum kvp_status kvp_executor_process_post(struct kvp_executor_process *process, uint32_t kind, uint64_t tag,
                                          const void *payload, uint32_t payload_bytes) {
  if (process->dying) {
    return KVP_DEVICE_LOST;
  }
  struct kvp_lane_end *lane = &process->ring.commands;
  void *place = kvp_lane_reserve(lane, payload_bytes);
  if (place == NULL) {
    return KVP_BUSY;
  }
  if (payload_bytes > 0) {
    memcpy(place, payload, payload_bytes);
  }
  if (kvp_lane_publish(lane, kind, tag, payload_bytes)) {
    const uint64_t one = 1;
    ssize_t written = write(process->hello_fds[hello_wake_executor], &one, sizeof one);
    (void)written; /* fails only when the counter is full, and then it is readable */
  }
  return KVP_OK;
}

/* ---- start ------------------------------------------------------------------------------------------------------
 */

/* What it said before it died still counts: results of requests, and steps that are done. */
static void process_drain(struct kvp_executor_process *process) {
  int pending = 0;
  socklen_t pending_bytes = sizeof pending;
  /* Taking the error off the socket: it would be told before the messages that are still there. */
  (void)getsockopt(process->control, SOL_SOCKET, SO_ERROR, &pending, &pending_bytes);
  while (kvp_fd_socket_receive(process->control, &process->incoming) == KVP_OK) {
    process->events->message(process->context, &process->incoming);
  }
  for (uint32_t i = 0; i < kvp_ring_completions && process_completion_next(process) == KVP_LANE_RECORD; i++) {
  }
}

static void process_exited(uv_process_t *child, int64_t exit_status, int term_signal) {
  struct kvp_executor_process *process = child->data;
  struct kvp_process_exit exit = {exit_status, term_signal, process->reason};
  process->dying = true;
  process->reaped = true;
  process_drain(process);
  process->events->exited(process->context, &exit);
  process_close_handles(process);
}

static enum kvp_status process_make_ring(struct kvp_executor_process *process, struct kvp_error *error) {
  const struct kvp_ring_sizes sizes = {kvp_ring_commands, kvp_ring_completions, kvp_ring_command_arena_bytes,
                                       kvp_ring_completion_arena_bytes};
  int ring = kvp_ring_create("kvpool-ring", &sizes, error);
  if (ring < 0) {
    return error->status;
  }
  process->hello_fds[hello_ring] = ring;
  for (int i = hello_wake_executor; i <= hello_wake_supervisor; i++) {
    process->hello_fds[i] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (process->hello_fds[i] < 0) {
      return kvp_error_set(error, KVP_INTERNAL, "no eventfd: %s", strerror(errno));
    }
  }
  return kvp_ring_init(&process->ring, ring, KVP_RING_CLIENT, error);
}

static int process_run(struct kvp_executor_process *process, uv_loop_t *loop, const char *path, const char *device,
                       int child_socket) {
  char path_copy[512]; /* libuv takes arguments that may be written to */
  char device_copy[kvp_name_bytes_max];
  (void)snprintf(path_copy, sizeof path_copy, "%s", path);
  (void)snprintf(device_copy, sizeof device_copy, "%s", device);
  char option_device[] = "--device";
  char option_control[] = "--control-fd";
  char control_number[] = "3";
  char *arguments[] = {path_copy, option_device, device_copy, option_control, control_number, NULL};
  uv_stdio_container_t stdio[kvp_executor_control_fd + 1] = {
      {.flags = UV_IGNORE},
      {.flags = UV_IGNORE},
      {.flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO},
      {.flags = UV_INHERIT_FD, .data.fd = child_socket},
  };
  uv_process_options_t options = {
      .exit_cb = process_exited,
      .file = path_copy,
      .args = arguments,
      /* In a session of its own: a terminal's Ctrl-C is for the daemon, which then drains. */
      .flags = UV_PROCESS_DETACHED,
      .stdio_count = kvp_executor_control_fd + 1,
      .stdio = stdio,
  };
  /* Our own descriptors are close-on-exec anyway; this is for those we were started with. */
  (void)close_range(STDERR_FILENO + 1, UINT_MAX, CLOSE_RANGE_CLOEXEC);
  return uv_spawn(loop, &process->child, &options);
}

static struct kvp_executor_process *process_new(const struct kvp_process_events *events, void *context) {
  struct kvp_executor_process *process = kvp_allocate(1, sizeof *process);
  process->events = events;
  process->context = context;
  process->control = -1;
  for (int i = 0; i < hello_fd_count; i++) {
    process->hello_fds[i] = -1;
  }
  process->child.data = process;
  process->control_poll.data = process;
  process->completion_poll.data = process;
  return process;
}

static void child_closed(uv_handle_t *handle) {
  process_free(handle->data);
}

/* A pair with our end non-blocking; the child's stays as it is. */
static enum kvp_status control_pair(int out[2], struct kvp_error *error) {
  if (kvp_fd_socket_pair(out) != 0) {
    return kvp_error_set(error, KVP_INTERNAL, "no control socket: %s", strerror(errno));
  }
  if (fcntl(out[0], F_SETFL, O_NONBLOCK) != 0) {
    (void)kvp_error_set(error, KVP_INTERNAL, "no control socket: %s", strerror(errno));
    (void)close(out[0]);
    (void)close(out[1]);
    return KVP_INTERNAL;
  }
  return KVP_OK;
}

enum kvp_status kvp_executor_process_spawn(uv_loop_t *loop, const char *path, const char *device,
                                           const struct kvp_process_events *events, void *context,
                                           struct kvp_executor_process **out, const int **hello_fds,
                                           struct kvp_error *error) {
  struct kvp_executor_process *process = process_new(events, context);
  int pair[2] = {-1, -1};
  enum kvp_status status = process_make_ring(process, error);
  if (status == KVP_OK) {
    status = control_pair(pair, error);
  }
  if (status != KVP_OK) {
    goto err_free;
  }
  process->control = pair[0];
  kvp_control_queue_init(&process->outgoing, pair[0]);
  int code = process_run(process, loop, path, device, pair[1]);
  (void)close(pair[1]);
  if (code != 0) {
    status = kvp_error_set(error, KVP_INTERNAL, "%s can't be run: %s", path, uv_strerror(code));
    uv_close((uv_handle_t *)&process->child, child_closed); /* a failed spawn leaves a handle all the same */
    return status;
  }
  process->open_handles = 3;
  code = uv_poll_init(loop, &process->control_poll, process->control);
  assert(code == 0);
  code = uv_poll_init(loop, &process->completion_poll, process->hello_fds[hello_wake_supervisor]);
  assert(code == 0);
  process_control_poll(process);
  (void)uv_poll_start(&process->completion_poll, UV_READABLE, process_completions_readable);
  bool asleep = kvp_lane_prepare_sleep(&process->ring.completions);
  assert(asleep); /* nobody else has the ring yet */
  *out = process;
  *hello_fds = process->hello_fds;
  return KVP_OK;

err_free:
  process_free(process);
  return status;
}

pid_t kvp_executor_process_pid(const struct kvp_executor_process *process) {
  return process->child.pid;
}
