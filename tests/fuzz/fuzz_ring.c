/* libFuzzer: bytes -> what a hostile worker does to its ring, its completions and its timelines, between looks of the
 * executor. Whatever that is, the other worker's steps, the supervisor's fences and the hostile one's own removal come to
 * their end, and nothing is left over.
 *
 * An input is a list of actions, a byte each with its arguments behind it. Steps run on memory of exact sizes (see
 * fuzz_world.h), at once or, as the input says, later.
 */
#include <assert.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/fd_socket.h"
#include "server/executor/device_host.h"
#include "server/executor/service.h"
#include "server/log.h"
#include "tests/fuzz/fuzz_world.h"
#include "tests/fuzz/intake_world.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { launches_max = 1024, hostile = 1, innocent = 2, rounds_max = 4096 };

static const struct kvp_ring_sizes sizes = {
    .commands = 16, .completions = 16, .command_arena_bytes = 16384, .completion_arena_bytes = 16384};

struct worker {
  struct kvp_ring ring; /* as its client */
  struct kvp_timeline_word *words;
  struct kvp_served_ring *served;
  int ring_fd;
  int timelines_fd;
  int completion_event;
};

static struct kvp_service service;
static struct kvp_mailbox mailbox;
static struct kvp_ring supervisors;
static struct kvp_ring supervisors_client;
static struct worker workers[3];

/* Hostile workers are nothing to write home about. */
void kvp_log(enum kvp_log_level level, const char *event, const char *format, ...) {
  (void)level;
  (void)event;
  (void)format;
}

/* ---- a device that runs what it is given, in this thread ---- */

static struct kvp_device device;
static struct kvp_device_op *launches[launches_max];
static uint32_t launch_count;
static bool runs_later;

static void chain_run(const struct kvp_device_op *first) {
  const struct kvp_device_op *op = first;
  while (op->kind != KVP_DEVICE_SIGNAL) {
    const struct kvp_device_op *next = op->next;
    struct kvp_op_counts counts = {0};
    const uint64_t units = kvp_host_op_units(op);
    for (uint64_t unit = 0; unit < units; unit++) {
      kvp_host_op_run(op, unit, &counts);
    }
    if (op->kind == KVP_DEVICE_POINT) {
      atomic_store(&op->params.point.word->value, op->params.point.value);
    }
    op = next;
  }
  kvp_timeline_signal(op->params.signal.timeline, op->params.signal.value);
}

static void launches_run(void) {
  for (uint32_t i = 0; i < launch_count; i++) {
    chain_run(launches[i]);
  }
  launch_count = 0;
}

static bool fuzz_launch(struct kvp_device_queue *queue, struct kvp_device_op *first) {
  (void)queue;
  if (launch_count == launches_max) {
    return false;
  }
  launches[launch_count++] = first;
  if (!runs_later) {
    launches_run();
  }
  return true;
}

static enum kvp_status fuzz_register(struct kvp_device *it, void *host, uint64_t bytes, bool read_only, void **out,
                                     struct kvp_error *error) {
  (void)it;
  (void)bytes;
  (void)read_only;
  (void)error;
  *out = host;
  return KVP_OK;
}

static void fuzz_unregister(struct kvp_device *it, void *host) {
  (void)it;
  (void)host;
}

static enum kvp_status fuzz_queue_create(struct kvp_device *it, struct kvp_device_queue **out,
                                         struct kvp_error *error) {
  (void)it;
  (void)error;
  *out = NULL;
  return KVP_OK;
}

static const struct kvp_device_backend backend = {
    .prefix = "fuzz:",
    .host_register = fuzz_register,
    .host_unregister = fuzz_unregister,
    .queue_create = fuzz_queue_create,
    .launch = fuzz_launch,
};

/* ---- rings ---- */

static void service_build(void) {
  const struct kvp_ring_sizes large = {
      .commands = 64, .completions = 64, .command_arena_bytes = 4096, .completion_arena_bytes = 4096};
  struct kvp_error error;
  device.backend = &backend;
  bool built = kvp_mailbox_init(&mailbox, eventfd(0, EFD_CLOEXEC));
  const int fd = kvp_ring_create("supervisor", &large, &error);
  built = kvp_ring_init(&supervisors, fd, KVP_RING_EXECUTOR, &error) == KVP_OK && built;
  built = kvp_ring_init(&supervisors_client, fd, KVP_RING_CLIENT, &error) == KVP_OK && built;
  service.mailbox = &mailbox;
  service.rings.epoll = epoll_create1(EPOLL_CLOEXEC);
  kvp_served_ring_init(&service.supervisors, &supervisors, eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC));
  built = kvp_service_init(&service, &error) == KVP_OK && built;
  built = kvp_dispatch_init(&service.dispatch, &device, &error) == KVP_OK && built;
  assert(built);
  fuzz_world_build(&service.objects);
}

static void worker_attach(uint32_t id) {
  struct worker *worker = &workers[id];
  struct kvp_error error;
  int pair[2];
  worker->ring_fd = kvp_ring_create("ring", &sizes, &error);
  bool made = kvp_ring_init(&worker->ring, worker->ring_fd, KVP_RING_CLIENT, &error) == KVP_OK;
  worker->timelines_fd = kvp_memory_fd_create("timelines", kvp_timeline_bytes, &error);
  worker->words = mmap(NULL, kvp_timeline_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, worker->timelines_fd, 0);
  made = socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0 && made;
  worker->completion_event = pair[1];
  const struct kvp_control_ring spec = {.attachment_id = id, .owner = intake_world_session, .queue = 100 + id};
  const int fds[kvp_control_ring_fd_count] = {worker->ring_fd, eventfd(0, EFD_CLOEXEC), pair[0],
                                              worker->timelines_fd};
  worker->served = kvp_served_ring_new(&spec, fds, &device, &error);
  struct kvp_object_change change = {.kind = KVP_ADD_RING, .ring = worker->served};
  made = worker->served != NULL && kvp_service_change(&service, &change) == KVP_OK && made;
  assert(made);
}

static void serve(void) {
  for (uint32_t i = 0; i < rounds_max; i++) {
    const bool any = kvp_service_commands_take(&service);
    if (!kvp_service_finished_take(&service) && !any) {
      return;
    }
  }
}

/* Whatever state its ring is in, all of it goes. */
static void worker_detach(uint32_t id) {
  struct worker *worker = &workers[id];
  struct kvp_object_change change = {.kind = KVP_REMOVE_RING, .id = id};
  const enum kvp_status status = kvp_service_change(&service, &change);
  assert(status == KVP_OK);
  runs_later = false;
  launches_run();
  serve();
  bool is_done = !change.is_pending;
  for (struct kvp_news *news = kvp_mailbox_read(&mailbox); news != NULL; news = news->next) {
    is_done = is_done || news == &change.news;
  }
  assert(is_done && change.ring == worker->served && worker->served->use.count == 0);
  kvp_served_ring_destroy(worker->served);
  kvp_ring_deinit(&worker->ring);
  (void)munmap(worker->words, kvp_timeline_bytes);
  (void)close(worker->ring_fd);
  (void)close(worker->timelines_fd);
  (void)close(worker->completion_event);
}

static bool completion_take(struct kvp_ring *ring, uint32_t kind, uint64_t tag) {
  struct kvp_ring_record record = {0};
  if (kvp_lane_peek(&ring->completions, &record) != KVP_LANE_RECORD) {
    return false;
  }
  kvp_lane_advance(&ring->completions, &record);
  return record.kind == kind && record.tag == tag;
}

/* ---- the one who does no wrong ---- */

static void innocent_run(void) {
  static uint64_t tag;
  const struct kvp_wire_step step = {.magic = KVP_WIRE_STEP_MAGIC, .version = KVP_WIRE_VERSION, .bytes = sizeof step};
  struct kvp_ring *ring = &workers[innocent].ring;
  void *place = kvp_lane_reserve(&ring->commands, sizeof step);
  assert(place != NULL);
  memcpy(place, &step, sizeof step);
  (void)kvp_lane_publish(&ring->commands, KVP_COMMAND_STEP, ++tag, sizeof step);
  place = kvp_lane_reserve(&supervisors_client.commands, 0);
  assert(place != NULL);
  serve();
  launches_run();
  serve();
  const bool accepted = completion_take(ring, KVP_COMPLETION_ACCEPTED, tag);
  const bool done = completion_take(ring, KVP_COMPLETION_DONE, tag);
  assert(accepted && done && !service.failed);
}

static void fence_run(void) {
  static uint64_t tag;
  const struct kvp_wire_fence fence = {.owner = 1};
  void *place = kvp_lane_reserve(&supervisors_client.commands, sizeof fence);
  assert(place != NULL);
  memcpy(place, &fence, sizeof fence);
  (void)kvp_lane_publish(&supervisors_client.commands, KVP_COMMAND_FENCE, ++tag, sizeof fence);
  serve();
  const bool fenced = completion_take(&supervisors_client, KVP_COMPLETION_FENCED, tag);
  assert(fenced);
}

/* ---- actions ---- */

struct input {
  const uint8_t *data;
  size_t left;
};

/* What is missing is 0. */
static uint64_t number_read(struct input *input, size_t bytes) {
  uint64_t number = 0;
  const size_t there = bytes < input->left ? bytes : input->left;
  memcpy(&number, input->data, there);
  input->data += there;
  input->left -= there;
  return number;
}

/* Bytes of the input to `out`, no more than there are. */
static uint32_t bytes_read(struct input *input, uint8_t *out, uint64_t bytes) {
  const uint32_t there = (uint32_t)(bytes < input->left ? bytes : input->left);
  memcpy(out, input->data, there);
  input->data += there;
  input->left -= there;
  return there;
}

static void record_publish(struct input *input, bool puts_right) {
  struct kvp_lane_end *lane = &workers[hostile].ring.commands;
  const uint32_t kind = puts_right ? KVP_COMMAND_STEP : (uint32_t)number_read(input, 1);
  const uint32_t bytes = (uint32_t)(number_read(input, 2) % (sizes.command_arena_bytes / 2));
  uint8_t *place = kvp_lane_reserve(lane, bytes);
  if (place == NULL) {
    return;
  }
  memset(place, 0, bytes);
  (void)bytes_read(input, place, bytes);
  struct kvp_wire_step header;
  if (puts_right && bytes >= sizeof header) {
    memcpy(&header, place, sizeof header);
    header.magic = KVP_WIRE_STEP_MAGIC;
    header.version = KVP_WIRE_VERSION;
    header.bytes = bytes;
    memcpy(place, &header, sizeof header);
  }
  (void)kvp_lane_publish(lane, kind, 1, bytes);
}

/* Anywhere: header, records, arenas, the executor's side of both lanes among it. */
static void ring_poke(struct input *input) {
  struct kvp_ring *ring = &workers[hostile].ring;
  const uint64_t offset = number_read(input, 3) % ring->map_bytes;
  const uint64_t bytes = number_read(input, 1);
  (void)bytes_read(input, (uint8_t *)ring->map + offset, bytes < ring->map_bytes - offset ? bytes : 0);
}

static void word_poke(struct input *input) {
  const uint64_t word = number_read(input, 2) % kvp_timeline_words;
  atomic_store(&workers[hostile].words[word].value, number_read(input, 8));
}

static void act(struct input *input) {
  struct kvp_ring *ring = &workers[hostile].ring;
  struct kvp_ring_record record;
  switch (number_read(input, 1) % 10) {
  case 0:
    record_publish(input, false);
    break;
  case 1:
  case 2:
    record_publish(input, true);
    break;
  case 3:
    ring_poke(input);
    break;
  case 4:
    word_poke(input);
    break;
  case 5:
    serve();
    break;
  case 6:
    runs_later = !runs_later;
    launches_run();
    break;
  case 7: /* counts its own way */
    ring->commands.position += number_read(input, 1);
    break;
  case 8:
    while (kvp_lane_peek(&ring->completions, &record) == KVP_LANE_RECORD) {
      kvp_lane_advance(&ring->completions, &record);
    }
    break;
  default:
    innocent_run();
    break;
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  static bool is_built;
  if (!is_built) {
    service_build();
    worker_attach(innocent);
    is_built = true;
  }
  struct input input = {data, bytes};
  worker_attach(hostile);
  while (input.left > 0) {
    act(&input);
  }
  serve();
  innocent_run();
  worker_detach(hostile);
  innocent_run();
  fence_run();
  assert(fuzz_world_uses(&service.objects) == 0 && service.steps.use.count == 0 && service.steps.use.bytes == 0);
  kvp_compressed_parts_deinit(&service.intake.compressed); /* one input knows nothing of another */
  return 0;
}
