/* The supervisor's side of the executors of one device: requests and their answers, restarts.
 *
 * Always holds: `process` is NULL in PAUSED, and in STOPPED once it was reaped; requests are pending only while there
 * is a process. Executors come and go in `process` (executor_process.h).
 */
#include "server/supervisor/executor_link.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/control_requests.h"
#include "server/supervisor/executor_process.h"
#include "server/supervisor/restart_policy.h"

enum {
  ready_timeout_ms = 30000, /* a device that can't be opened must not look like one that is starting for ever */
  stop_timeout_ms = 2000,
  busy_retry_ms = 1,
};

/* HELLO's number. READY or a refusal answers it; other requests are numbered from 1 on, and none before READY. */
static const uint32_t hello_request = UINT32_MAX;

/* A result that is told from the loop. */
struct link_answer {
  struct link_answer *next;
  kvp_link_result_fn result;
  void *context;
  struct kvp_error error;
};

struct kvp_executor_link {
  uv_loop_t *loop;
  const struct kvp_link_events *events;
  void *context;
  struct kvp_control_hello hello;
  char executor_path[256];
  enum kvp_link_state state;
  struct kvp_executor_process *process;
  bool was_ready;  /* this process: `lost` is owed */
  bool is_looking; /* this process: MEMORY_FREE is owed */
  bool has_info;
  struct kvp_control_ready info;
  int32_t refused_as;                     /* of HELLO, by this process; KVP_OK: it has not */
  char refusal[kvp_error_text_bytes_max]; /* of HELLO, by the latest that refused it */
  int32_t refusal_status;                 /* the same one's; KVP_OK: none has */
  uint64_t restarts;
  struct kvp_restart_policy policy;
  struct kvp_control_requests requests;
  uint32_t part_request; /* of the request whose parts are being sent; 0: none */
  struct link_answer *first_answer;
  struct link_answer *last_answer;
  uv_timer_t deadline; /* READY, the pause before a restart, or the end, by state */
  uv_timer_t later;    /* armed while there are answers, or `stopped` is owed */
  uv_timer_t retry;    /* armed while somebody was told busy */
  unsigned open_handles;
  bool told_stopped;
};

static void link_spawn_again(struct kvp_executor_link *link);

/* ---- answers ----------------------------------------------------------------------------------------------------
 */

static struct link_answer *link_answers_take(struct kvp_executor_link *link) {
  struct link_answer *first = link->first_answer;
  link->first_answer = link->last_answer = NULL;
  return first;
}

static void link_answers_tell(struct link_answer *answer) {
  while (answer != NULL) {
    struct link_answer *next = answer->next;
    answer->result(answer->context, &answer->error);
    free(answer);
    answer = next;
  }
}

static void link_later(uv_timer_t *timer) {
  struct kvp_executor_link *link = timer->data;
  link_answers_tell(link_answers_take(link));
  if (link->state == KVP_LINK_STOPPED && link->process == NULL && !link->told_stopped && link->first_answer == NULL) {
    link->told_stopped = true;
    link->events->stopped(link->context, link);
  }
}

static void link_arm_later(struct kvp_executor_link *link) {
  (void)uv_timer_start(&link->later, link_later, 0, 0);
}

static void link_answer_later(struct kvp_executor_link *link, const struct kvp_error *error,
                              kvp_link_result_fn result, void *context) {
  struct link_answer *answer = kvp_allocate(1, sizeof *answer);
  answer->result = result;
  answer->context = context;
  answer->error = *error;
  if (link->last_answer == NULL) {
    link->first_answer = answer;
  } else {
    link->last_answer->next = answer;
  }
  link->last_answer = answer;
  link_arm_later(link);
}

static void link_lost_error(const struct kvp_executor_link *link, struct kvp_error *error) {
  (void)kvp_error_set(error, KVP_DEVICE_LOST, "device %s: its executor died", link->hello.device);
}

/* ---- messages from the executor ---------------------------------------------------------------------------------
 */

/* An error as somebody else sent it. Ends its texts. */
static bool error_valid(struct kvp_error *error) {
  error->array[sizeof error->array - 1] = error->text[sizeof error->text - 1] = '\0';
  return error->status >= 0 && error->status < kvp_status_count;
}

static bool link_take_result(struct kvp_executor_link *link, const struct kvp_fd_message *message) {
  struct kvp_error error;
  if (message->body_bytes != sizeof error) {
    return false;
  }
  memcpy(&error, message->body, sizeof error);
  if (!error_valid(&error)) {
    return false;
  }
  if (message->request == hello_request && link->state == KVP_LINK_STARTING) {
    link->refused_as = error.status;
    memcpy(link->refusal, error.text, sizeof link->refusal);
    link->refusal_status = error.status;
  }
  kvp_control_requests_answer(&link->requests, message->request, &error);
  return true;
}

/* The fds stay the message's unless a request takes them. */
static bool link_take_chunks(struct kvp_executor_link *link, struct kvp_fd_message *message) {
  struct kvp_control_chunks chunks;
  if (message->body_bytes != sizeof chunks) {
    return false;
  }
  memcpy(&chunks, message->body, sizeof chunks);
  if (kvp_control_requests_take_chunks(&link->requests, message->request, &chunks, message->fds, message->fd_count)) {
    message->fd_count = 0;
  }
  return true;
}

static bool link_take_ready(struct kvp_executor_link *link, const struct kvp_fd_message *message) {
  if (message->body_bytes != sizeof link->info || link->state != KVP_LINK_STARTING) {
    return false;
  }
  struct kvp_control_ready info;
  memcpy(&info, message->body, sizeof info);
  info.description[sizeof info.description - 1] = info.driver[sizeof info.driver - 1] = '\0';
  info.uuid[sizeof info.uuid - 1] = '\0';
  if (info.version != KVP_CONTROL_VERSION) {
    kvp_log(KVP_LOG_ERROR, "executor_version", "device=%s executor=%u supervisor=%u", link->hello.device,
            info.version, KVP_CONTROL_VERSION);
    return false;
  }
  link->info = info;
  link->has_info = true;
  link->was_ready = true;
  link->state = KVP_LINK_RESTORING;
  (void)uv_timer_stop(&link->deadline);
  kvp_restart_policy_wait_over(&link->policy, uv_now(link->loop), "ready");
  kvp_log(KVP_LOG_INFO, "executor_ready",
          "device=%s pid=%d memory_bytes=%llu memory_free_bytes=%llu mps=%d driver=\"%s\" text=\"%s\"",
          link->hello.device, (int)kvp_executor_link_pid(link), (unsigned long long)info.memory_bytes,
          (unsigned long long)info.memory_free_bytes, (info.flags & KVP_READY_MPS) != 0, info.driver,
          info.description);
  link->events->ready(link->context, link, &link->info);
  return true;
}

static bool link_take_ring_failed(struct kvp_executor_link *link, const struct kvp_fd_message *message) {
  struct kvp_control_ring_failed failed;
  if (message->body_bytes != sizeof failed || link->events->ring_failed == NULL) {
    return false;
  }
  memcpy(&failed, message->body, sizeof failed);
  if (!error_valid(&failed.error)) {
    return false;
  }
  link->events->ring_failed(link->context, &failed);
  return true;
}

static bool link_take_free(struct kvp_executor_link *link, const struct kvp_fd_message *message) {
  struct kvp_control_free body;
  if (message->body_bytes != sizeof body || !link->is_looking) {
    return false;
  }
  memcpy(&body, message->body, sizeof body);
  link->is_looking = false;
  if (link->events->memory_free != NULL) {
    link->events->memory_free(link->context, link, body.memory_free_bytes);
  }
  return true;
}

static void link_message(void *context, struct kvp_fd_message *message) {
  struct kvp_executor_link *link = context;
  bool understood = false;
  if (message->kind == KVP_CONTROL_RESULT) {
    understood = link_take_result(link, message);
  } else if (message->kind == KVP_CONTROL_MEMORY_CHUNKS) {
    understood = link_take_chunks(link, message);
  } else if (message->kind == KVP_CONTROL_READY) {
    understood = link_take_ready(link, message);
  } else if (message->kind == KVP_CONTROL_RING_FAILED) {
    understood = link_take_ring_failed(link, message);
  } else if (message->kind == KVP_CONTROL_MEMORY_FREE) {
    understood = link_take_free(link, message);
  }
  kvp_fd_message_close_fds(message);
  if (!understood) {
    kvp_executor_process_kill(link->process, "it broke the control protocol");
  }
}

static void link_completion(void *context, const struct kvp_ring_record *record, const uint8_t *payload) {
  struct kvp_executor_link *link = context;
  link->events->completion(link->context, link, record, payload);
}

static void link_progress(struct kvp_executor_link *link) {
  if (link->events->progress != NULL) {
    link->events->progress(link->context, link);
  }
}

static void link_burst_end(void *context) {
  link_progress(context);
}

static void link_retry(uv_timer_t *timer) {
  link_progress(timer->data);
}

/* ---- life and death ---------------------------------------------------------------------------------------------
 */

static void link_deadline(uv_timer_t *timer) {
  struct kvp_executor_link *link = timer->data;
  if (link->state == KVP_LINK_PAUSED) {
    link_spawn_again(link);
  } else if (link->process != NULL) {
    kvp_executor_process_kill(link->process, link->state == KVP_LINK_STOPPED ? "it did not stop in time"
                                                                             : "it was not ready in time");
  }
}

static void link_pause(struct kvp_executor_link *link, uint64_t pause_ms) {
  link->state = KVP_LINK_PAUSED;
  (void)uv_timer_start(&link->deadline, link_deadline, pause_ms, 0);
}

/* After a death. Returns the pause. */
static uint64_t link_restart(struct kvp_executor_link *link) {
  uint64_t pause_ms = kvp_restart_policy_died(&link->policy, uv_now(link->loop));
  link->restarts++;
  link_pause(link, pause_ms);
  return pause_ms;
}

/* Decides what comes next, and says so. */
static void link_go_on(struct kvp_executor_link *link, const struct kvp_process_exit *exit, int pid) {
  enum kvp_log_level level = KVP_LOG_ERROR;
  const char *event = "executor_died";
  const char *reason = link->refused_as != KVP_OK ? link->refusal : exit->reason != NULL ? exit->reason : "";
  uint64_t pause_ms = 0;
  if (link->state == KVP_LINK_STOPPED) {
    level = KVP_LOG_INFO;
    event = "executor_stopped";
  } else if (link->refused_as == KVP_BUSY || kvp_restart_policy_is_final(link->refused_as)) {
    level = KVP_LOG_DEBUG; /* again and again; the wait has its own lines */
    event = link->refused_as == KVP_BUSY ? "executor_busy" : "executor_refused";
    pause_ms = kvp_restart_policy_refused(&link->policy, uv_now(link->loop), link->refused_as, link->refusal);
    link_pause(link, pause_ms);
  } else {
    event = link->refused_as != KVP_OK ? "executor_refused" : event;
    pause_ms = link_restart(link);
  }
  kvp_log(level, event, "device=%s pid=%d exit_status=%lld signal=%d restarts=%llu pause_ms=%llu reason=\"%s\"",
          link->hello.device, pid, (long long)exit->exit_status, exit->term_signal,
          (unsigned long long)link->restarts, (unsigned long long)pause_ms, reason);
}

static void link_exited(void *context, const struct kvp_process_exit *exit) {
  struct kvp_executor_link *link = context;
  bool was_ready = link->was_ready;
  int pid = (int)kvp_executor_process_pid(link->process);
  link->process = NULL;
  link->was_ready = link->is_looking = false;
  (void)uv_timer_stop(&link->retry);
  (void)uv_timer_stop(&link->deadline);
  link_go_on(link, exit, pid);
  struct kvp_error error;
  link_lost_error(link, &error);
  kvp_control_requests_fail_all(&link->requests, &error);
  if (was_ready) {
    link->events->lost(link->context, link);
  }
  if (link->policy.is_waiting && link->events->waiting != NULL) {
    link->events->waiting(link->context, link);
  }
  if (link->state == KVP_LINK_STOPPED) {
    link_arm_later(link);
  }
}

static const struct kvp_process_events process_events = {
    .message = link_message,
    .completion = link_completion,
    .burst_end = link_burst_end,
    .exited = link_exited,
};

static enum kvp_status link_spawn(struct kvp_executor_link *link, struct kvp_error *error) {
  const int *fds = NULL;
  kvp_restart_policy_started(&link->policy, uv_now(link->loop));
  enum kvp_status status = kvp_executor_process_spawn(link->loop, link->executor_path, link->hello.device,
                                                      &process_events, link, &link->process, &fds, error);
  if (status != KVP_OK) {
    return status;
  }
  link->state = KVP_LINK_STARTING;
  link->refused_as = KVP_OK;
  kvp_log(link->policy.is_waiting ? KVP_LOG_DEBUG : KVP_LOG_INFO, "executor_started",
          "device=%s pid=%d restarts=%llu", link->hello.device, (int)kvp_executor_link_pid(link),
          (unsigned long long)link->restarts);
  (void)uv_timer_start(&link->deadline, link_deadline, ready_timeout_ms, 0);
  /* Should it fail, the process dies and all else follows. */
  (void)kvp_executor_process_send(link->process, KVP_CONTROL_HELLO, hello_request, &link->hello, sizeof link->hello,
                                  fds, 3);
  return KVP_OK;
}

static void link_spawn_again(struct kvp_executor_link *link) {
  struct kvp_error error;
  if (link_spawn(link, &error) != KVP_OK) {
    uint64_t pause_ms = link_restart(link);
    kvp_log(KVP_LOG_ERROR, "executor_not_started", "device=%s pause_ms=%llu text=\"%s\"", link->hello.device,
            (unsigned long long)pause_ms, error.text);
  }
}

enum kvp_status kvp_executor_link_start(struct kvp_executor_link *link, struct kvp_error *error) {
  assert(link->process == NULL && link->state == KVP_LINK_PAUSED);
  return link_spawn(link, error);
}

void kvp_executor_link_stop(struct kvp_executor_link *link) {
  if (link->state == KVP_LINK_STOPPED) {
    return;
  }
  link->state = KVP_LINK_STOPPED;
  kvp_restart_policy_wait_over(&link->policy, uv_now(link->loop), "stopped");
  if (link->process == NULL) {
    (void)uv_timer_stop(&link->deadline);
    link_arm_later(link);
    return;
  }
  kvp_executor_process_hang_up(link->process);
  (void)uv_timer_start(&link->deadline, link_deadline, stop_timeout_ms, 0);
}

static enum kvp_status text_copy(char *out, size_t out_bytes, const char *what, const char *text,
                                 struct kvp_error *error) {
  if (strlen(text) >= out_bytes) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "executor link: %s '%s' is longer than %zu bytes", what, text,
                         out_bytes - 1);
  }
  memcpy(out, text, strlen(text) + 1);
  return KVP_OK;
}

static void link_timer_init(struct kvp_executor_link *link, uv_timer_t *timer) {
  (void)uv_timer_init(link->loop, timer); /* can't fail */
  timer->data = link;
  link->open_handles++;
}

enum kvp_status kvp_executor_link_new(uv_loop_t *loop, const struct kvp_link_options *options,
                                      const struct kvp_link_events *events, void *context,
                                      struct kvp_executor_link **out, struct kvp_error *error) {
  struct kvp_executor_link *link = kvp_allocate(1, sizeof *link);
  struct kvp_control_hello *hello = &link->hello;
  hello->version = KVP_CONTROL_VERSION;
  hello->thread_count = options->thread_count;
  if (text_copy(hello->device, sizeof hello->device, "device", options->device, error) != KVP_OK ||
      text_copy(hello->socket_path, sizeof hello->socket_path, "socket path", options->socket_path, error) !=
          KVP_OK ||
      text_copy(hello->lock_path, sizeof hello->lock_path, "lock path", options->lock_path, error) != KVP_OK ||
      text_copy(hello->attach_socket_path, sizeof hello->attach_socket_path, "attach socket path",
                options->attach_socket_path, error) != KVP_OK ||
      text_copy(hello->attach_lock_path, sizeof hello->attach_lock_path, "attach lock path",
                options->attach_lock_path, error) != KVP_OK ||
      text_copy(link->executor_path, sizeof link->executor_path, "executor path", options->executor_path, error) !=
          KVP_OK) {
    free(link);
    return KVP_INVALID_ARGUMENT;
  }
  link->loop = loop;
  link->events = events;
  link->context = context;
  link->state = KVP_LINK_PAUSED;
  kvp_restart_policy_init(&link->policy, link->hello.device);
  link_timer_init(link, &link->deadline);
  link_timer_init(link, &link->later);
  link_timer_init(link, &link->retry);
  *out = link;
  return KVP_OK;
}

static void link_handle_closed(uv_handle_t *handle) {
  struct kvp_executor_link *link = handle->data;
  if (--link->open_handles == 0) {
    link_answers_tell(link_answers_take(link));
    free(link);
  }
}

void kvp_executor_link_destroy(struct kvp_executor_link *link) {
  if (link == NULL) {
    return;
  }
  assert(link->process == NULL);
  uv_close((uv_handle_t *)&link->deadline, link_handle_closed);
  uv_close((uv_handle_t *)&link->later, link_handle_closed);
  uv_close((uv_handle_t *)&link->retry, link_handle_closed);
}

/* ---- requests ---------------------------------------------------------------------------------------------------
 */

static bool link_is_up(const struct kvp_executor_link *link) {
  return link->state == KVP_LINK_RESTORING || link->state == KVP_LINK_SERVING;
}

static void link_send(struct kvp_executor_link *link, uint32_t number, enum kvp_control_kind kind, const void *body,
                      uint32_t body_bytes, const int *fds, uint32_t fd_count) {
  /* A failure kills the process, whose end answers the request. */
  (void)kvp_executor_process_send(link->process, (uint32_t)kind, number, body, body_bytes, fds, fd_count);
}

static void link_refuse(struct kvp_executor_link *link, kvp_link_result_fn result, void *context) {
  if (result != NULL) {
    struct kvp_error error;
    link_lost_error(link, &error);
    link_answer_later(link, &error, result, context);
  }
}

void kvp_executor_link_request(struct kvp_executor_link *link, enum kvp_control_kind kind, const void *body,
                               uint32_t body_bytes, const int *fds, uint32_t fd_count, kvp_link_chunks_fn chunks,
                               kvp_link_result_fn result, void *context) {
  assert(link->part_request == 0);
  if (!link_is_up(link)) {
    link_refuse(link, result, context);
    return;
  }
  uint32_t number = result == NULL ? 0 : kvp_control_requests_add(&link->requests, chunks, result, context);
  link_send(link, number, kind, body, body_bytes, fds, fd_count);
}

void kvp_executor_link_request_part(struct kvp_executor_link *link, enum kvp_control_kind kind, const void *body,
                                    uint32_t body_bytes, const int *fds, uint32_t fd_count, bool more,
                                    kvp_link_result_fn result, void *context) {
  assert(result != NULL);
  if (!link_is_up(link)) {
    if (!more) {
      link_refuse(link, result, context);
    }
    return;
  }
  if (link->part_request == 0) {
    link->part_request = kvp_control_requests_add(&link->requests, NULL, result, context);
  }
  link_send(link, link->part_request, kind, body, body_bytes, fds, fd_count);
  if (!more) {
    link->part_request = 0;
  }
}

/* ---- the rest ---------------------------------------------------------------------------------------------------
 */

bool kvp_executor_link_look(struct kvp_executor_link *link) {
  if (link->state != KVP_LINK_SERVING || link->is_looking) {
    return false;
  }
  const struct kvp_control_free nothing = {0};
  link->is_looking = true;
  link_send(link, 0, KVP_CONTROL_MEMORY_LOOK, &nothing, sizeof nothing, NULL, 0);
  return true;
}

void kvp_executor_link_serve(struct kvp_executor_link *link) {
  if (link->state == KVP_LINK_RESTORING) { /* else it died while the last object was restored */
    link->state = KVP_LINK_SERVING;
    kvp_restart_policy_served(&link->policy);
  }
}

enum kvp_status kvp_executor_link_post(struct kvp_executor_link *link, uint32_t kind, uint64_t tag,
                                       const void *payload, uint32_t payload_bytes) {
  if (link->state != KVP_LINK_SERVING) {
    return KVP_DEVICE_LOST;
  }
  enum kvp_status status = kvp_executor_process_post(link->process, kind, tag, payload, payload_bytes);
  if (status == KVP_BUSY && !uv_is_active((uv_handle_t *)&link->retry)) {
    (void)uv_timer_start(&link->retry, link_retry, busy_retry_ms, 0);
  }
  return status;
}

enum kvp_link_state kvp_executor_link_state(const struct kvp_executor_link *link) {
  return link->state;
}

const char *kvp_executor_link_device(const struct kvp_executor_link *link) {
  return link->hello.device;
}

pid_t kvp_executor_link_pid(const struct kvp_executor_link *link) {
  return link->process != NULL ? kvp_executor_process_pid(link->process) : 0;
}

uint64_t kvp_executor_link_restarts(const struct kvp_executor_link *link) {
  return link->restarts;
}

const char *kvp_executor_link_waiting(const struct kvp_executor_link *link) {
  return link->policy.is_waiting ? link->policy.waiting_for : NULL;
}

uint64_t kvp_executor_link_waiting_ms(const struct kvp_executor_link *link) {
  return link->policy.is_waiting ? uv_now(link->loop) - link->policy.waiting_since_ms : 0;
}

enum kvp_status kvp_executor_link_refused(const struct kvp_executor_link *link) {
  return (enum kvp_status)link->policy.refused_as;
}

const char *kvp_executor_link_refusal(const struct kvp_executor_link *link, enum kvp_status *status) {
  *status = (enum kvp_status)link->refusal_status;
  return link->refusal;
}

const struct kvp_control_ready *kvp_executor_link_info(const struct kvp_executor_link *link) {
  return link->has_info ? &link->info : NULL;
}
