/* The loop of the serving thread. */
#include "server/executor/server.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "server/executor/clock.h"
#include "server/executor/service.h"
#include "server/log.h"

enum {
  linger_ns = 50 * 1000, /* so long a busy thread looks around before it sleeps, where there are cores for that */
  /* With something to look at, a polled device's step or a timeline: as above, then after short pauses, then long
   * ones.
   */
  polled_linger_ns = 200 * 1000,
  short_pauses_ns = 10 * 1000 * 1000,
  short_pause_ns = 50 * 1000,
  long_pause_ns = 1000 * 1000,
  timer_slack_ns = 1000,  /* short pauses would be twice as long with the usual one */
  check_ns = 1000 * 1000, /* between two questions whether the device still works */
  blocked_pause_ns_min = 1000 * 1000,
  blocked_pause_ns_max = 8 * 1000 * 1000,
  second_ns = 1000 * 1000 * 1000,
  events_max = 16,
};

static const uint64_t forever_ns = UINT64_MAX;

struct kvp_server {
  int wake_event;
  int epoll;
  bool may_linger;
  struct kvp_service service;
  struct kvp_mailbox mailbox;
  struct kvp_device *device; /* NULL: there is none yet */
  uint64_t device_seen_ns;   /* it worked, or had nothing to do */
  uint64_t ended_legs;       /* at the last look at it */
  atomic_bool asleep;        /* in epoll_wait, or about to be */
  atomic_bool stopping;      /* asked to */
  atomic_bool device_suspect;
};

/* what: the event's pointer. */
static bool watch(struct kvp_server *server, int fd, uint32_t events, void *what) {
  struct epoll_event event = {.events = events, .data.ptr = what};
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
  struct kvp_service *service = &server->service;
  server->may_linger = has_several_cores();
  server->wake_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  server->epoll = epoll_create1(EPOLL_CLOEXEC);
  const bool has_mailbox = kvp_mailbox_init(&server->mailbox, server->wake_event);
  service->mailbox = &server->mailbox;
  service->rings.epoll = server->epoll;
  kvp_served_ring_init(&service->supervisors, options->ring, options->command_event, options->completion_event);
  if (server->wake_event < 0 || server->epoll < 0 || !has_mailbox ||
      !watch(server, server->wake_event, EPOLLIN, &server->wake_event) ||
      !watch(server, options->control_socket, 0, &server->stopping)) {
    (void)kvp_error_set(error, KVP_INTERNAL, "the server can't wait for its events: %s", strerror(errno));
    goto err_server;
  }
  if (kvp_service_init(service, error) != KVP_OK) {
    goto err_server;
  }
  return server;

err_server:
  kvp_server_destroy(server);
  return NULL;
}

enum kvp_status kvp_server_set_device(struct kvp_server *server, struct kvp_device *device, struct kvp_error *error) {
  enum kvp_status status = kvp_dispatch_init(&server->service.dispatch, device, error);
  server->device = status == KVP_OK ? device : NULL;
  server->service.intake.allows_device_words = device->may_wait;
  return status;
}

void kvp_server_destroy(struct kvp_server *server) {
  if (server->device != NULL) {
    kvp_dispatch_deinit(&server->service.dispatch, kvp_service_step_drop, &server->service);
  }
  kvp_service_deinit(&server->service);
  kvp_mailbox_deinit(&server->mailbox);
  (void)close(server->wake_event);
  (void)close(server->epoll);
  free(server);
}

struct kvp_objects *kvp_server_objects(struct kvp_server *server) {
  return &server->service.objects;
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

/* ---- control thread ---- */

enum kvp_status kvp_server_change(struct kvp_server *server, struct kvp_object_change *change) {
  return kvp_mailbox_change(&server->mailbox, change);
}

int kvp_server_news_event(const struct kvp_server *server) {
  return server->mailbox.control_event;
}

struct kvp_news *kvp_server_news(struct kvp_server *server) {
  return kvp_mailbox_read(&server->mailbox);
}

static bool change_apply(struct kvp_server *server) {
  struct kvp_object_change *change = kvp_mailbox_take(&server->mailbox);
  if (change == NULL) {
    return false;
  }
  change->status = kvp_service_change(&server->service, change);
  kvp_mailbox_answer(&server->mailbox);
  return true;
}

/* ---- sleep ---- */

/* A wait of less than a millisecond takes a kernel of 5.11 or later; before, it is one millisecond. */
static int events_wait_for(struct kvp_server *server, struct epoll_event *events, uint64_t pause_ns) {
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

/* Rings' events are edges, which need nothing done: every ring is looked at anyway. */
static void events_wait(struct kvp_server *server, uint64_t pause_ns) {
  struct epoll_event events[events_max];
  int count = events_wait_for(server, events, pause_ns);
  for (int i = 0; i < count; i++) {
    if (events[i].data.ptr == &server->stopping) {
      atomic_store(&server->stopping, true);
    } else if (events[i].data.ptr == &server->wake_event) {
      eventfd_t wakes = 0;
      (void)eventfd_read(server->wake_event, &wakes);
    }
  }
}

static void server_sleep(struct kvp_server *server, uint64_t pause_ns) {
  if (!kvp_service_prepare_sleep(&server->service)) {
    return;
  }
  (void)atomic_exchange(&server->asleep, true);
  if (!kvp_dispatch_has_finished(&server->service.dispatch) && !kvp_mailbox_has_change(&server->mailbox) &&
      !atomic_load(&server->device_suspect) && !atomic_load(&server->stopping)) {
    events_wait(server, pause_ns);
  }
  (void)atomic_exchange(&server->asleep, false);
  kvp_service_awake(&server->service);
}

/* Somebody has to look whether something launched has ended: nobody else will say so. */
static bool must_poll_device(const struct kvp_server *server) {
  return server->device->backend->polled && kvp_dispatch_is_busy(&server->service.dispatch);
}

/* How long to sleep when nothing has happened for idle_ns; 0: not at all. */
static uint64_t pause_ns_of(const struct kvp_server *server, uint64_t idle_ns, uint64_t blocked_ns) {
  const bool polls = must_poll_device(server) || kvp_dispatch_is_waiting(&server->service.dispatch);
  if (server->may_linger && idle_ns < (uint64_t)(polls ? polled_linger_ns : linger_ns)) {
    return 0;
  }
  uint64_t pause_ns = forever_ns;
  if (polls) {
    pause_ns = idle_ns < short_pauses_ns ? short_pause_ns : long_pause_ns;
  }
  if (blocked_ns < pause_ns && kvp_service_is_blocked(&server->service)) {
    pause_ns = blocked_ns; /* nobody tells us when a full lane has room again */
  }
  return pause_ns;
}

/* A step that doesn't end may be one that can't any more. */
static void device_watch(struct kvp_server *server, uint64_t now_ns) {
  const struct kvp_device_backend *backend = server->device->backend;
  const struct kvp_dispatch *dispatch = &server->service.dispatch;
  if (dispatch->ended_legs != server->ended_legs || !kvp_dispatch_is_busy(dispatch)) {
    server->ended_legs = dispatch->ended_legs;
    server->device_seen_ns = now_ns;
  }
  const bool is_due = must_poll_device(server) && now_ns - server->device_seen_ns >= check_ns;
  const bool is_suspect = atomic_load_explicit(&server->device_suspect, memory_order_relaxed);
  if (backend->check == NULL || !(is_due || is_suspect)) {
    return;
  }
  struct kvp_error error = {0};
  atomic_store(&server->device_suspect, false);
  if (backend->check(server->device, &error) != KVP_OK) {
    kvp_log(KVP_LOG_ERROR, "device_failed", "text=\"%s\"", error.text);
    server->service.failed = true;
  }
  server->device_seen_ns = now_ns;
}

bool kvp_server_run(struct kvp_server *server) {
  struct kvp_service *service = &server->service;
  uint64_t busy_ns = kvp_clock_ns();
  uint64_t blocked_ns = blocked_pause_ns_min;
  (void)prctl(PR_SET_TIMERSLACK, (unsigned long)timer_slack_ns, 0, 0, 0);
  if (server->device->backend->thread_begin != NULL) {
    server->device->backend->thread_begin(server->device);
  }
  while (!service->failed && !atomic_load_explicit(&server->stopping, memory_order_relaxed)) {
    bool any = change_apply(server);
    any = kvp_service_commands_take(service) || any;
    any = kvp_service_finished_take(service) || any;
    const uint64_t now_ns = kvp_clock_ns();
    device_watch(server, now_ns);
    if (any || service->failed) {
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
    if (pause_ns == blocked_ns) {
      blocked_ns = blocked_ns * 2 < blocked_pause_ns_max ? blocked_ns * 2 : blocked_pause_ns_max;
    }
  }
  kvp_dispatch_abort(&service->dispatch);
  kvp_mailbox_close(&server->mailbox);
  return !service->failed;
}
