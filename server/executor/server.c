/* The loop of the serving thread. */
#include "server/executor/server.h"

#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "server/executor/clock.h"
#include "server/executor/dispatch.h"
#include "server/executor/intake.h"
#include "server/executor/outbox.h"
#include "server/log.h"

enum {
  commands_per_round = 16, /* between two looks at what has finished */
  linger_ns = 50 * 1000,   /* so long a busy thread looks around before it sleeps, where there are cores for that */
  blocked_sleep_ms_max = 8,
  result_bytes_max = 2 << 20,
};

struct kvp_server {
  struct kvp_ring *ring;
  int command_event;
  int control_socket;
  int wake_event;
  int epoll;
  bool may_linger;
  bool failed;
  struct kvp_objects objects;
  struct kvp_intake intake;
  struct kvp_step_pool steps;
  struct kvp_dispatch dispatch;
  bool has_dispatch;
  struct kvp_outbox outbox;
  atomic_bool asleep;   /* in epoll_wait, or about to be */
  atomic_bool stopping; /* asked to */
  atomic_bool stopped;  /* no change is taken any more */
  _Atomic(struct kvp_object_change *) change;
  sem_t change_done;
};

static bool watch(struct kvp_server *server, int fd, uint32_t events) {
  struct epoll_event event = {.events = events, .data.fd = fd};
  return epoll_ctl(server->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static bool has_several_cores(void) {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 1;
}

struct kvp_server *kvp_server_new(const struct kvp_server_options *options, struct kvp_error *error) {
  struct kvp_server *server = calloc(1, sizeof *server);
  if (server == NULL) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for the server");
    return NULL;
  }
  server->ring = options->ring;
  server->command_event = options->command_event;
  server->control_socket = options->control_socket;
  server->may_linger = has_several_cores();
  server->outbox = (struct kvp_outbox){
      .lane = &options->ring->completions, .wake_fd = options->completion_event, .steps = &server->steps};
  server->intake.objects = &server->objects;
  server->intake.allows_daemon_ops = options->allows_daemon_ops;
  /* Half of the arena: a completion of the largest size always fits once the reader has caught up. */
  const uint64_t arena_half = options->ring->completions.arena_bytes / 2;
  const uint64_t largest = result_bytes_max + kvp_ops_per_step_max * sizeof(struct kvp_wire_report);
  server->intake.completion_bytes_max = arena_half < largest ? arena_half : largest;
  (void)sem_init(&server->change_done, 0, 0);
  server->wake_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  server->epoll = epoll_create1(EPOLL_CLOEXEC);
  if (server->wake_event < 0 || server->epoll < 0 || !watch(server, server->wake_event, EPOLLIN) ||
      !watch(server, options->command_event, EPOLLIN) || !watch(server, options->control_socket, 0)) {
    (void)kvp_error_set(error, KVP_INTERNAL, "the server can't wait for its events: %s", strerror(errno));
    kvp_server_destroy(server);
    return NULL;
  }
  return server;
}

enum kvp_status kvp_server_set_device(struct kvp_server *server, struct kvp_device *device, struct kvp_error *error) {
  enum kvp_status status = kvp_dispatch_init(&server->dispatch, device, error);
  server->has_dispatch = status == KVP_OK;
  return status;
}

static void step_drop(void *context, struct kvp_step *step) {
  struct kvp_server *server = context;
  if (!step->posting) { /* the outbox has it otherwise */
    kvp_step_destroy(&server->steps, step);
  }
}

void kvp_server_destroy(struct kvp_server *server) {
  if (server->has_dispatch) {
    kvp_dispatch_deinit(&server->dispatch, step_drop, server);
  }
  kvp_outbox_drop(&server->outbox);
  kvp_step_pool_deinit(&server->steps);
  kvp_intake_deinit(&server->intake);
  kvp_id_table_deinit(&server->objects.pools);
  kvp_id_table_deinit(&server->objects.buffers);
  (void)close(server->wake_event);
  (void)close(server->epoll);
  (void)sem_destroy(&server->change_done);
  free(server);
}

struct kvp_objects *kvp_server_objects(struct kvp_server *server) {
  return &server->objects;
}

void kvp_server_wake(void *context) {
  struct kvp_server *server = context;
  /* Exchanges on both sides: who comes second sees what the first one wrote before, a timeline or the flag. */
  if (atomic_exchange(&server->asleep, false)) {
    (void)eventfd_write(server->wake_event, 1);
  }
}

void kvp_server_stop(struct kvp_server *server) {
  atomic_store(&server->stopping, true);
  (void)eventfd_write(server->wake_event, 1);
}

/* ---- changes of the tables ---- */

static enum kvp_status change_do(struct kvp_objects *objects, struct kvp_object_change *change) {
  switch (change->kind) {
  case KVP_ADD_POOL:
    return kvp_objects_add_pool(objects, change->pool, &change->error);
  case KVP_ADD_BUFFER:
    return kvp_objects_add_buffer(objects, change->buffer, &change->error);
  case KVP_REMOVE_POOL:
    return kvp_objects_remove_pool(objects, change->id, &change->pool, &change->error);
  case KVP_REMOVE_BUFFER:
    return kvp_objects_remove_buffer(objects, change->id, &change->buffer, &change->error);
  }
  return KVP_INTERNAL;
}

static bool change_apply(struct kvp_server *server) {
  if (atomic_load_explicit(&server->change, memory_order_relaxed) == NULL) {
    return false;
  }
  struct kvp_object_change *change = atomic_exchange(&server->change, NULL);
  if (change == NULL) {
    return false;
  }
  change->status = atomic_load(&server->stopped) ? kvp_error_set(&change->error, KVP_CANCELLED, "the executor stops")
                                                 : change_do(&server->objects, change);
  (void)sem_post(&server->change_done);
  return true;
}

enum kvp_status kvp_server_change(struct kvp_server *server, struct kvp_object_change *change) {
  atomic_store(&server->change, change);
  (void)eventfd_write(server->wake_event, 1);
  if (atomic_load(&server->stopped) && atomic_exchange(&server->change, NULL) != NULL) {
    return kvp_error_set(&change->error, KVP_CANCELLED, "the executor stops");
  }
  while (sem_wait(&server->change_done) != 0) {
  }
  return change->status;
}

/* ---- steps ---- */

static void lane_fail(struct kvp_server *server, const char *what, uint64_t value) {
  kvp_log(KVP_LOG_ERROR, "command_lane_corrupt", "what=\"%s\" value=%llu position=%llu", what,
          (unsigned long long)value, (unsigned long long)server->ring->commands.position);
  server->failed = true;
}

/* The record's payload as a private copy, its place in the ring given back. NULL: no memory at all. */
static struct kvp_step *step_copy(struct kvp_server *server, const struct kvp_ring_record *record) {
  struct kvp_lane_end *lane = &server->ring->commands;
  struct kvp_step *step = NULL;
  if (record->payload_bytes <= kvp_step_bytes_max) {
    step = kvp_step_new(&server->steps, record->payload_bytes);
  }
  if (step != NULL) {
    kvp_lane_copy_payload(lane, record, step->wire);
  } else if ((step = kvp_step_new(&server->steps, 0)) != NULL) {
    step->error.status = record->payload_bytes > kvp_step_bytes_max ? KVP_TOO_LARGE : KVP_OUT_OF_MEMORY;
    (void)kvp_error_set(&step->error, (enum kvp_status)step->error.status,
                        "step: %u bytes, at most %d are allowed and memory must be there", record->payload_bytes,
                        kvp_step_bytes_max);
  }
  kvp_lane_advance(lane, record);
  return step;
}

static void step_take(struct kvp_server *server, const struct kvp_ring_record *record) {
  struct kvp_step *step = step_copy(server, record);
  if (step == NULL) {
    kvp_log(KVP_LOG_ERROR, "out_of_memory", "step_bytes=%u", record->payload_bytes);
    server->failed = true;
    return;
  }
  step->tag = record->tag;
  struct kvp_queue *queue = NULL;
  enum kvp_status status = (enum kvp_status)step->error.status;
  if (status == KVP_OK) {
    status = kvp_intake_check(&server->intake, step, &step->error);
  }
  if (status == KVP_OK) {
    status = kvp_dispatch_open(&server->dispatch, step->queue, &queue, &step->error);
  }
  if (status != KVP_OK) {
    kvp_outbox_checked(&server->outbox, step);
    return;
  }
  step->accepted = true;
  step->queued_ns = kvp_clock_ns();
  kvp_step_charge(&server->steps, step);
  kvp_step_hold_objects(step);
  kvp_outbox_checked(&server->outbox, step);
  kvp_dispatch_submit(&server->dispatch, queue, step);
}

/* While the other side doesn't take its completions, or too much is under way, its commands stay where they are. */
static bool intake_is_open(const struct kvp_server *server) {
  return !kvp_outbox_is_blocked(&server->outbox) && server->steps.used_count < kvp_executor_steps_max &&
         server->steps.used_bytes < kvp_executor_step_bytes_max;
}

static bool command_take(struct kvp_server *server) {
  struct kvp_ring_record record = {0};
  switch (kvp_lane_peek(&server->ring->commands, &record)) {
  case KVP_LANE_EMPTY:
    return false;
  case KVP_LANE_CORRUPT:
    lane_fail(server, "record", record.sequence);
    return false;
  case KVP_LANE_RECORD:
    break;
  }
  switch (record.kind) {
  case KVP_COMMAND_STEP:
    step_take(server, &record);
    return true;
  case KVP_COMMAND_QUEUE_CLOSE:
    kvp_dispatch_close_queue(&server->dispatch, (uint32_t)record.tag);
    kvp_lane_advance(&server->ring->commands, &record);
    return true;
  default:
    lane_fail(server, "kind", record.kind);
    return false;
  }
}

static bool commands_take(struct kvp_server *server) {
  bool any = false;
  for (int i = 0; i < commands_per_round && !server->failed && intake_is_open(server); i++) {
    if (!command_take(server)) {
      break;
    }
    any = true;
  }
  return any;
}

static bool finished_take(struct kvp_server *server) {
  struct kvp_step_list finished = {0};
  bool any = kvp_dispatch_poll(&server->dispatch, &finished);
  struct kvp_step *step = NULL;
  while ((step = kvp_step_list_pop(&finished)) != NULL) {
    kvp_step_release_objects(step);
    kvp_outbox_finished(&server->outbox, step);
  }
  return any;
}

/* ---- sleep ---- */

static void event_drain(int fd) {
  eventfd_t count = 0;
  (void)eventfd_read(fd, &count);
}

/* timeout_ms: -1 = until something happens. */
static void events_wait(struct kvp_server *server, int timeout_ms) {
  struct epoll_event events[3];
  int count = epoll_wait(server->epoll, events, 3, timeout_ms);
  for (int i = 0; i < count; i++) {
    if (events[i].data.fd == server->control_socket) {
      atomic_store(&server->stopping, true);
    } else {
      event_drain(events[i].data.fd);
    }
  }
}

static void server_sleep(struct kvp_server *server, int timeout_ms) {
  struct kvp_lane_end *lane = &server->ring->commands;
  const bool is_open = intake_is_open(server);
  if (is_open && !kvp_lane_prepare_sleep(lane)) {
    return;
  }
  (void)atomic_exchange(&server->asleep, true);
  if (!kvp_dispatch_has_finished(&server->dispatch) && atomic_load(&server->change) == NULL &&
      !atomic_load(&server->stopping)) {
    events_wait(server, timeout_ms);
  }
  (void)atomic_exchange(&server->asleep, false);
  if (is_open) {
    kvp_lane_awake(lane);
  }
}

bool kvp_server_run(struct kvp_server *server) {
  uint64_t busy_ns = kvp_clock_ns();
  int blocked_sleep_ms = 1;
  while (!server->failed && !atomic_load_explicit(&server->stopping, memory_order_relaxed)) {
    bool any = change_apply(server);
    any = commands_take(server) || any;
    any = finished_take(server) || any;
    any = kvp_outbox_flush(&server->outbox) || any;
    const uint64_t now_ns = kvp_clock_ns();
    if (any) {
      busy_ns = now_ns;
      blocked_sleep_ms = 1;
    } else if (server->may_linger && now_ns - busy_ns < linger_ns) {
      kvp_cpu_relax();
    } else if (kvp_outbox_is_blocked(&server->outbox)) {
      /* Nobody tells us when a full lane has room again. */
      server_sleep(server, blocked_sleep_ms);
      blocked_sleep_ms = blocked_sleep_ms * 2 < blocked_sleep_ms_max ? blocked_sleep_ms * 2 : blocked_sleep_ms_max;
    } else {
      server_sleep(server, -1);
    }
  }
  atomic_store(&server->stopped, true);
  (void)change_apply(server);
  return !server->failed;
}
