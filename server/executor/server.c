/* The loop of the serving thread. */
#include "server/executor/server.h"

#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "server/executor/clock.h"
#include "server/executor/dispatch.h"
#include "server/executor/intake.h"
#include "server/executor/outbox.h"
#include "server/log.h"

enum {
  commands_per_round = 16, /* between two looks at what has finished */
  linger_ns = 50 * 1000,   /* so long a busy thread looks around before it sleeps, where there are cores for that */
  result_bytes_max = 2 << 20,
  /* A polled device with something launched: as above, then looked at after short pauses, then after long ones. */
  polled_linger_ns = 200 * 1000,
  short_pauses_ns = 10 * 1000 * 1000,
  short_pause_ns = 50 * 1000,
  long_pause_ns = 1000 * 1000,
  timer_slack_ns = 1000,  /* short pauses would be twice as long with the usual one */
  check_ns = 1000 * 1000, /* between two questions whether the device still works */
  blocked_pause_ns_min = 1000 * 1000,
  blocked_pause_ns_max = 8 * 1000 * 1000,
  second_ns = 1000 * 1000 * 1000,
};

static const uint64_t forever_ns = UINT64_MAX;

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
  struct kvp_device *device; /* NULL: there is none yet */
  uint64_t device_seen_ns;   /* it worked, or had nothing to do */
  bool device_seen;          /* since the last look at the clock */
  struct kvp_outbox outbox;
  atomic_bool asleep;   /* in epoll_wait, or about to be */
  atomic_bool stopping; /* asked to */
  atomic_bool device_suspect;
  atomic_bool stopped; /* no change is taken any more */
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
  server->device = status == KVP_OK ? device : NULL;
  return status;
}

static void step_drop(void *context, struct kvp_step *step) {
  struct kvp_server *server = context;
  if (!step->posting) { /* the outbox has it otherwise */
    kvp_step_destroy(&server->steps, step);
  }
}

void kvp_server_destroy(struct kvp_server *server) {
  if (server->device != NULL) {
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

void kvp_server_check_device(struct kvp_server *server) {
  atomic_store(&server->device_suspect, true);
  (void)eventfd_write(server->wake_event, 1);
}

void kvp_server_stop(struct kvp_server *server) {
  atomic_store(&server->stopping, true);
  (void)eventfd_write(server->wake_event, 1);
}

/* ---- changes of the tables ---- */

static enum kvp_status change_do(struct kvp_server *server, struct kvp_object_change *change) {
  struct kvp_objects *objects = &server->objects;
  enum kvp_status status = KVP_INTERNAL;
  switch (change->kind) {
  case KVP_ADD_POOL:
    return kvp_objects_add_pool(objects, change->pool, &change->error);
  case KVP_ADD_BUFFER:
    return kvp_objects_add_buffer(objects, change->buffer, &change->error);
  case KVP_REMOVE_POOL:
    status = kvp_objects_remove_pool(objects, change->id, &change->pool, &change->error);
    if (status == KVP_OK) {
      kvp_compressed_parts_forget_pool(&server->intake.compressed, change->pool);
    }
    return status;
  case KVP_REMOVE_BUFFER:
    status = kvp_objects_remove_buffer(objects, change->id, &change->buffer, &change->error);
    if (status == KVP_OK) {
      kvp_compressed_parts_forget_buffer(&server->intake.compressed, change->buffer);
    }
    return status;
  }
  return status;
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
                                                 : change_do(server, change);
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
  kvp_compressed_parts_accept(&server->intake.compressed, step);
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
  const bool was_busy = kvp_dispatch_is_busy(&server->dispatch);
  bool any = kvp_dispatch_poll(&server->dispatch, &finished);
  server->device_seen = finished.first != NULL || !was_busy;
  struct kvp_step *step = NULL;
  while ((step = kvp_step_list_pop(&finished)) != NULL) {
    kvp_step_release_objects(step);
    kvp_compressed_parts_finish(&server->intake.compressed, step);
    kvp_outbox_finished(&server->outbox, step);
  }
  return any;
}

/* ---- sleep ---- */

static void event_drain(int fd) {
  eventfd_t count = 0;
  (void)eventfd_read(fd, &count);
}

/* A wait of less than a millisecond takes a kernel of 5.11 or later; before, it is one millisecond. */
static int events_wait_for(struct kvp_server *server, struct epoll_event *events, int events_max, uint64_t pause_ns) {
  if (pause_ns == forever_ns) {
    return epoll_wait(server->epoll, events, events_max, -1);
  }
  const struct timespec timeout = {.tv_sec = (time_t)(pause_ns / second_ns), .tv_nsec = (long)(pause_ns % second_ns)};
  int count = epoll_pwait2(server->epoll, events, events_max, &timeout, NULL);
  if (count < 0 && errno == ENOSYS) {
    count = epoll_wait(server->epoll, events, events_max, (int)((pause_ns + long_pause_ns - 1) / long_pause_ns));
  }
  return count;
}

static void events_wait(struct kvp_server *server, uint64_t pause_ns) {
  struct epoll_event events[3];
  int count = events_wait_for(server, events, 3, pause_ns);
  for (int i = 0; i < count; i++) {
    if (events[i].data.fd == server->control_socket) {
      atomic_store(&server->stopping, true);
    } else {
      event_drain(events[i].data.fd);
    }
  }
}

static void server_sleep(struct kvp_server *server, uint64_t pause_ns) {
  struct kvp_lane_end *lane = &server->ring->commands;
  const bool is_open = intake_is_open(server);
  if (is_open && !kvp_lane_prepare_sleep(lane)) {
    return;
  }
  (void)atomic_exchange(&server->asleep, true);
  if (!kvp_dispatch_has_finished(&server->dispatch) && atomic_load(&server->change) == NULL &&
      !atomic_load(&server->device_suspect) && !atomic_load(&server->stopping)) {
    events_wait(server, pause_ns);
  }
  (void)atomic_exchange(&server->asleep, false);
  if (is_open) {
    kvp_lane_awake(lane);
  }
}

/* Somebody has to look whether a launched step has ended: nobody else will say so. */
static bool must_poll(const struct kvp_server *server) {
  return server->device->backend->polled && kvp_dispatch_is_busy(&server->dispatch);
}

/* How long to sleep when nothing has happened for idle_ns; 0: not at all. */
static uint64_t pause_ns_of(const struct kvp_server *server, uint64_t idle_ns, uint64_t blocked_ns) {
  const bool polls = must_poll(server);
  if (server->may_linger && idle_ns < (uint64_t)(polls ? polled_linger_ns : linger_ns)) {
    return 0;
  }
  uint64_t pause_ns = forever_ns;
  if (polls) {
    pause_ns = idle_ns < short_pauses_ns ? short_pause_ns : long_pause_ns;
  }
  if (kvp_outbox_is_blocked(&server->outbox) && blocked_ns < pause_ns) {
    pause_ns = blocked_ns; /* nobody tells us when a full lane has room again */
  }
  return pause_ns;
}

/* A step that doesn't end may be one that can't any more. */
static void device_watch(struct kvp_server *server, uint64_t now_ns) {
  const struct kvp_device_backend *backend = server->device->backend;
  if (server->device_seen) {
    server->device_seen_ns = now_ns;
  }
  const bool is_due = must_poll(server) && now_ns - server->device_seen_ns >= check_ns;
  const bool is_suspect = atomic_load_explicit(&server->device_suspect, memory_order_relaxed);
  if (backend->check == NULL || !(is_due || is_suspect)) {
    return;
  }
  struct kvp_error error = {0};
  atomic_store(&server->device_suspect, false);
  if (backend->check(server->device, &error) != KVP_OK) {
    kvp_log(KVP_LOG_ERROR, "device_failed", "text=\"%s\"", error.text);
    server->failed = true;
  }
  server->device_seen_ns = now_ns;
}

bool kvp_server_run(struct kvp_server *server) {
  uint64_t busy_ns = kvp_clock_ns();
  uint64_t blocked_ns = blocked_pause_ns_min;
  if (server->device->backend->polled) {
    (void)prctl(PR_SET_TIMERSLACK, (unsigned long)timer_slack_ns, 0, 0, 0);
  }
  if (server->device->backend->thread_begin != NULL) {
    server->device->backend->thread_begin(server->device);
  }
  while (!server->failed && !atomic_load_explicit(&server->stopping, memory_order_relaxed)) {
    bool any = change_apply(server);
    any = commands_take(server) || any;
    any = finished_take(server) || any;
    any = kvp_outbox_flush(&server->outbox) || any;
    const uint64_t now_ns = kvp_clock_ns();
    device_watch(server, now_ns);
    if (any || server->failed) {
      busy_ns = now_ns;
      blocked_ns = blocked_pause_ns_min;
      continue;
    }
    const uint64_t pause_ns = pause_ns_of(server, now_ns - busy_ns, blocked_ns);
    if (pause_ns == 0) {
      kvp_cpu_relax();
      continue;
    }
    server_sleep(server, pause_ns);
    if (kvp_outbox_is_blocked(&server->outbox)) {
      blocked_ns = blocked_ns * 2 < blocked_pause_ns_max ? blocked_ns * 2 : blocked_pause_ns_max;
    }
  }
  atomic_store(&server->stopped, true);
  (void)change_apply(server);
  return !server->failed;
}
