/* From a checked step to a device that has limits: what intake tells it, how steps are launched on one that has no
 * room, and a server that nobody wakes.
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/owner_entry.h"
#include "server/executor/dispatch.h"
#include "server/executor/intake.h"
#include "server/executor/server.h"
#include "tests/unit/exec_harness.h"

enum { session = 3, watchdog_seconds = 300 };

/* ---- a device that does nothing until it is told to ---- */

enum { fake_steps_max = 64, timelines_bytes = kvp_streams_max * sizeof(struct kvp_timeline) };

struct fake_device {
  struct kvp_device base;
  uint32_t capacity_ops;
  uint32_t used_ops;
  uint32_t attempts;
  uint32_t launched;
  uint32_t collected;
  struct kvp_device_op *signals[fake_steps_max];
  struct kvp_device_op *firsts[fake_steps_max];
  uint32_t ops[fake_steps_max];
  atomic_bool is_lost;
  bool ends_later; /* a thread writes the timeline some time after the launch, and wakes nobody */
};

struct kvp_device_queue {
  struct fake_device *device;
};

static struct fake_device *fake_of(struct kvp_device *device) {
  return (struct fake_device *)device;
}

/* The device's side is another mapping: whoever takes one address for the other is found out. (Not with the thread
 * sanitizer, which takes two addresses for two words.) */
static enum kvp_status fake_register(struct kvp_device *device, void *host, uint64_t bytes, bool read_only,
                                     void **out, struct kvp_error *error) {
  (void)device;
  (void)read_only;
  (void)error;
  assert_int_equal(bytes, timelines_bytes);
#ifdef __SANITIZE_THREAD__
  *out = host;
#else
  *out = mremap(host, 0, bytes, MREMAP_MAYMOVE);
  assert_true(*out != MAP_FAILED);
#endif
  return KVP_OK;
}

static void fake_unregister(struct kvp_device *device, void *host) {
  (void)device;
  assert_non_null(host);
}

static enum kvp_status fake_queue_create(struct kvp_device *device, struct kvp_device_queue **out,
                                         struct kvp_error *error) {
  (void)error;
  *out = calloc(1, sizeof **out);
  assert_non_null(*out);
  (*out)->device = fake_of(device);
  return KVP_OK;
}

static void fake_queue_destroy(struct kvp_device *device, struct kvp_device_queue *queue) {
  (void)device;
  free(queue);
}

/* The op is its owner's again as soon as the value is seen. */
static void signal_write(const struct kvp_device_op *signal) {
  kvp_timeline_signal(signal->params.signal.timeline, signal->params.signal.value);
}

static void *later_main(void *argument) {
  const struct timespec pause = {.tv_nsec = 30000000};
  (void)nanosleep(&pause, NULL);
  signal_write(argument);
  return NULL;
}

static bool fake_launch(struct kvp_device_queue *queue, struct kvp_device_op *first) {
  struct fake_device *device = queue->device;
  struct kvp_device_op *op = first;
  uint32_t count = 0;
  for (; op->kind != KVP_DEVICE_SIGNAL; op = op->next) {
    count++;
  }
  assert_null(op->next);
  device->attempts++;
  if (device->used_ops + count > device->capacity_ops) {
    return false;
  }
  device->used_ops += count;
  device->firsts[device->launched] = first;
  device->ops[device->launched] = count;
  device->signals[device->launched++] = op;
  if (device->ends_later && !atomic_load(&device->is_lost)) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, later_main, op), 0);
    assert_int_equal(pthread_detach(thread), 0);
  }
  return true;
}

static enum kvp_status fake_collect(struct kvp_device_queue *queue, struct kvp_device_op *first,
                                    struct kvp_error *error) {
  (void)error;
  struct fake_device *device = queue->device;
  uint32_t i = 0;
  while (device->firsts[i] != first) {
    i++;
    assert_true(i < device->launched);
  }
  device->used_ops -= device->ops[i];
  device->collected++;
  for (struct kvp_device_op *op = first; op->kind != KVP_DEVICE_SIGNAL; op = op->next) {
    op->counts.bytes_written = 1000 + device->collected;
  }
  return KVP_OK;
}

static enum kvp_status fake_check(struct kvp_device *device, struct kvp_error *error) {
  return atomic_load(&fake_of(device)->is_lost) ? kvp_error_set(error, KVP_DEVICE_LOST, "it is lost") : KVP_OK;
}

static const struct kvp_device_backend fake_backend = {
    .prefix = "fake:",
    .polled = true,
    .check = fake_check,
    .host_register = fake_register,
    .host_unregister = fake_unregister,
    .queue_create = fake_queue_create,
    .queue_destroy = fake_queue_destroy,
    .launch = fake_launch,
    .collect = fake_collect,
};

/* ---- dispatch ---- */

static void drop_none(void *context, struct kvp_step *step) {
  (void)context;
  (void)step;
  fail();
}

static struct kvp_dispatch dispatch;

/* Every second op is two for the device, where there are two of them. */
struct test_op {
  struct kvp_device_op parts[2];
};

static void submit(uint32_t queue_id, struct kvp_step *step, struct kvp_step_op *ops, struct test_op *test_ops,
                   uint32_t op_count) {
  struct kvp_queue *queue = NULL;
  for (uint32_t i = 0; i < op_count; i++) {
    ops[i].first = &test_ops[i].parts[0];
    ops[i].last = &test_ops[i].parts[i % 2];
    ops[i].first->next = i % 2 == 0 ? NULL : ops[i].last;
  }
  *step = (struct kvp_step){.queue = queue_id, .ops = ops, .op_count = op_count};
  assert_int_equal(kvp_dispatch_open(&dispatch, queue_id, &queue, NULL), KVP_OK);
  kvp_dispatch_submit(&dispatch, queue, step);
}

/* A large step that finds no room waits first in line: nobody overtakes it, it is tried when something has ended, and
 * a step counts as finished when it was collected. */
static void test_no_room(void **state) {
  (void)state;
  struct fake_device device = {.base.backend = &fake_backend, .capacity_ops = 7};
  struct kvp_step small, large, third, empty;
  static struct kvp_step_op small_ops[4], large_ops[5], third_ops[1];
  static struct test_op small_parts[4], large_parts[5], third_parts[1];
  struct kvp_step_list finished = {0};
  assert_int_equal(kvp_dispatch_init(&dispatch, &device.base, NULL), KVP_OK);
  submit(1, &small, small_ops, small_parts, 3);
  small.op_count = 4; /* the last one is nothing for the device */
  submit(2, &large, large_ops, large_parts, 5);
  submit(3, &third, third_ops, third_parts, 1);
  assert_true(kvp_dispatch_poll(&dispatch, &finished));
  assert_int_equal(device.launched, 1);
  assert_int_equal(device.attempts, 2);
  assert_ptr_equal(device.firsts[0], &small_parts[0].parts[0]);
  assert_ptr_equal(small_parts[0].parts[0].next, &small_parts[1].parts[0]);
  assert_ptr_equal(small_parts[1].parts[0].next, &small_parts[1].parts[1]);
  assert_ptr_equal(small_parts[1].parts[1].next, &small_parts[2].parts[0]);
  assert_ptr_equal(small_parts[2].parts[0].next, &small.signal);
  assert_false(kvp_dispatch_poll(&dispatch, &finished)); /* nothing has ended: it isn't even tried */
  assert_int_equal(device.attempts, 2);
  assert_int_equal(dispatch.busy_count, 1);

  signal_write(device.signals[0]);
  assert_true(kvp_dispatch_has_finished(&dispatch));
  assert_true(kvp_dispatch_poll(&dispatch, &finished));
  assert_ptr_equal(kvp_step_list_pop(&finished), &small);
  assert_int_equal(small_parts[2].parts[0].counts.bytes_written, 1001);
  assert_int_equal(device.launched, 2);
  assert_ptr_equal(device.firsts[1], &large_parts[0].parts[0]);
  assert_int_equal(device.attempts, 4);
  signal_write(device.signals[1]);
  submit(4, &empty, NULL, NULL, 0); /* a step without ops is its signal */
  assert_true(kvp_dispatch_poll(&dispatch, &finished));
  assert_ptr_equal(kvp_step_list_pop(&finished), &large);
  assert_int_equal(device.launched, 4);
  assert_ptr_equal(device.firsts[3], &empty.signal);
  signal_write(device.signals[2]);
  signal_write(device.signals[3]);
  assert_true(kvp_dispatch_poll(&dispatch, &finished));
  assert_ptr_equal(kvp_step_list_pop(&finished), &third);
  assert_ptr_equal(kvp_step_list_pop(&finished), &empty);
  assert_int_equal(device.collected, 4);
  assert_int_equal(device.used_ops, 0);
  assert_false(kvp_dispatch_is_busy(&dispatch));
  kvp_dispatch_deinit(&dispatch, drop_none, NULL);
}

/* ---- a server whose device wakes nobody ---- */

struct served {
  struct fake_device device;
  struct exec_harness link; /* its ring, and nothing else */
  struct kvp_ring ring;
  int sockets[2];
  struct kvp_server *server;
  struct kvp_buffer buffer;
  pthread_t thread;
  atomic_int thread_id;
  bool served;
};

static void *serve_main(void *argument) {
  struct served *served = argument;
  atomic_store(&served->thread_id, (int)syscall(SYS_gettid));
  served->served = kvp_server_run(served->server);
  return NULL;
}

static void served_start(struct served *served) {
  static uint8_t memory[64];
  struct kvp_error error;
  memset(served, 0, sizeof *served);
  served->device = (struct fake_device){.base.backend = &fake_backend, .capacity_ops = 100, .ends_later = true};
  served->link.ring_fd = kvp_ring_create("test-ring", &exec_harness_defaults.ring, &error);
  assert_int_equal(kvp_ring_init(&served->link.ring, served->link.ring_fd, KVP_RING_CLIENT, &error), KVP_OK);
  assert_int_equal(kvp_ring_init(&served->ring, served->link.ring_fd, KVP_RING_EXECUTOR, &error), KVP_OK);
  assert_int_equal(kvp_fd_socket_pair(served->sockets), 0);
  served->link.command_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  served->link.completion_event = eventfd(0, EFD_CLOEXEC);
  const struct kvp_server_options options = {.ring = &served->ring,
                                             .command_event = served->link.command_event,
                                             .completion_event = served->link.completion_event,
                                             .control_socket = served->sockets[1],
                                             .allows_daemon_ops = true};
  served->server = kvp_server_new(&options, &error);
  assert_non_null(served->server);
  assert_int_equal(kvp_server_set_device(served->server, &served->device.base, &error), KVP_OK);
  assert_int_equal(pthread_create(&served->thread, NULL, serve_main, served), 0);
  served->buffer = (struct kvp_buffer){.id = 1, .base = memory, .bytes = sizeof memory, .owner = session};
  struct kvp_object_change change = {.kind = KVP_ADD_BUFFER, .buffer = &served->buffer};
  assert_int_equal(kvp_server_change(served->server, &change), KVP_OK);
}

/* Waits for the thread; true when it served to a good end. */
static bool served_stop(struct served *served) {
  assert_int_equal(pthread_join(served->thread, NULL), 0);
  kvp_server_destroy(served->server);
  kvp_ring_deinit(&served->ring);
  kvp_ring_deinit(&served->link.ring);
  const int fds[] = {served->link.ring_fd, served->link.command_event, served->link.completion_event,
                     served->sockets[0], served->sockets[1]};
  for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
    (void)close(fds[i]);
  }
  return served->served;
}

static void fill_post(struct served *served, uint64_t tag) {
  struct step_encoder encoder;
  uint32_t bytes = 0;
  step_encoder_init(&encoder, 1, session, 1);
  step_encoder_op(&encoder, KVP_OP_BUFFER_FILL)->source = step_view(1, 0, 1, 64, 64);
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  assert_true(exec_harness_post(&served->link, KVP_COMMAND_STEP, tag, encoded, bytes));
  free(encoded);
  step_encoder_deinit(&encoder);
}

/* How often the serving thread went to sleep so far. */
static unsigned long long sleeps_of(const struct served *served) {
  char path[64], line[128];
  unsigned long long count = 0;
  (void)snprintf(path, sizeof path, "/proc/self/task/%d/status", atomic_load(&served->thread_id));
  FILE *file = fopen(path, "re");
  assert_non_null(file);
  while (fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, "voluntary_ctxt_switches:", 24) == 0) {
      count = strtoull(line + 24, NULL, 10);
    }
  }
  assert_int_equal(fclose(file), 0);
  return count;
}

/* A step ends although nobody says so; with nothing launched the thread sleeps for good. */
static void test_polled_server(void **state) {
  (void)state;
  struct served served;
  served_start(&served);
  for (uint64_t tag = 1; tag <= 3; tag++) {
    fill_post(&served, tag);
    assert_int_equal(exec_harness_take(&served.link).kind, KVP_COMPLETION_ACCEPTED);
    struct exec_completion done = exec_harness_take(&served.link);
    assert_int_equal(done.kind, KVP_COMPLETION_DONE);
    assert_int_equal(done.tag, tag);
    struct kvp_wire_report report;
    memcpy(&report, done.payload, sizeof report);
    assert_int_equal(report.bytes_written, 1000 + tag); /* what collect said */
    free(done.payload);
  }
  const struct timespec pause = {.tv_nsec = 100000000};
  unsigned long long before = 0, after = 0;
  do { /* one that goes on looking never comes to rest */
    before = sleeps_of(&served);
    (void)nanosleep(&pause, NULL);
    after = sleeps_of(&served);
  } while (before != after);
  kvp_server_stop(served.server);
  assert_true(served_stop(&served));
}

/* A device that is lost ends the server: while a step waits, and, when the control thread finds out, without one. */
static void test_lost_device(void **state) {
  (void)state;
  for (int with_step = 0; with_step < 2; with_step++) {
    struct served served;
    served_start(&served);
    atomic_store(&served.device.is_lost, true);
    if (with_step != 0) {
      fill_post(&served, 1);
    } else {
      kvp_server_check_device(served.server);
    }
    assert_false(served_stop(&served));
  }
}

/* A suspicion that is wrong changes nothing. */
static void test_suspected_device(void **state) {
  (void)state;
  struct served served;
  served_start(&served);
  kvp_server_check_device(served.server);
  fill_post(&served, 1);
  assert_int_equal(exec_harness_take(&served.link).kind, KVP_COMPLETION_ACCEPTED);
  struct exec_completion done = exec_harness_take(&served.link);
  assert_int_equal(done.kind, KVP_COMPLETION_DONE);
  free(done.payload);
  kvp_server_stop(served.server);
  assert_true(served_stop(&served));
}

/* ---- what intake tells a device ---- */

enum { long_block = 4096, regions = kvp_regions_per_pool_max, pools = 3, many_rows = 1 << 22 };

struct intake_world {
  struct kvp_objects objects;
  struct kvp_intake intake;
  struct kvp_step_pool steps;
  struct kvp_pool pool[pools];
  struct kvp_buffer buffer;
};

static _Atomic uint64_t owners[2];
static const uint64_t device_owners[2];
static _Alignas(64) uint8_t somewhere[64]; /* nothing runs: what is there is never looked at */

static void region_add(struct kvp_pool *pool, uint32_t tokens_per_block, uint32_t num_layers) {
  struct kvp_region *region = &pool->regions[pool->region_count++];
  region->base = somewhere;
  assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_BF16), 64, tokens_per_block, 2, num_layers,
                                     &region->geometry, NULL),
                   KVP_OK);
}

static void intake_world_init(struct intake_world *world) {
  memset(world, 0, sizeof *world);
  world->intake = (struct kvp_intake){.objects = &world->objects, .completion_bytes_max = 1 << 20};
  for (uint32_t i = 0; i < 2; i++) {
    owners[i] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  }
  for (uint32_t p = 0; p < pools; p++) {
    struct kvp_pool *pool = &world->pool[p];
    *pool = (struct kvp_pool){
        .id = 1 + p, .num_blocks = 2, .owner_entries = owners, .device_owner_entries = device_owners};
    region_add(pool, long_block, 8);
    for (uint32_t i = 1; i < regions; i++) {
      region_add(pool, many_rows + i, 1);
    }
    assert_int_equal(kvp_objects_add_pool(&world->objects, pool, NULL), KVP_OK);
  }
  world->buffer = (struct kvp_buffer){.id = 1, .base = somewhere, .bytes = UINT64_C(1) << 40, .owner = session};
  assert_int_equal(kvp_objects_add_buffer(&world->objects, &world->buffer, NULL), KVP_OK);
}

static void intake_world_deinit(struct intake_world *world) {
  kvp_id_table_deinit(&world->objects.pools);
  kvp_id_table_deinit(&world->objects.buffers);
  kvp_intake_deinit(&world->intake);
  kvp_step_pool_deinit(&world->steps);
}

/* The checked step; the encoder is freed. */
static struct kvp_step *intake_take(struct intake_world *world, struct step_encoder *encoder) {
  struct kvp_error error = {0};
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  struct kvp_step *step = kvp_step_new(&world->steps, bytes);
  assert_non_null(step);
  memcpy(step->wire, encoded, bytes);
  free(encoded);
  step_encoder_deinit(encoder);
  if (kvp_intake_check(&world->intake, step, &error) != KVP_OK) {
    fail_msg("%s", error.text);
  }
  return step;
}

static struct kvp_wire_op *op_add(struct step_encoder *encoder, enum kvp_op_kind kind, uint64_t pool, uint32_t region,
                                  uint32_t layer, uint32_t array) {
  struct kvp_wire_op *op = step_encoder_op(encoder, kind);
  op->pool_id = pool;
  op->region = region;
  op->layer = layer;
  op->arrays[0] = array;
  op->source = step_view(1, 0, 2 * (uint64_t)many_rows, 128, 128);
  op->total_k = kind == KVP_OP_LOAD ? 2 * (uint64_t)many_rows : 0;
  return op;
}

/* Layers that share an array share what was found in it; cut segments name the same rows. */
static void test_facts_of_checked_arrays(void **state) {
  (void)state;
  struct intake_world world;
  struct step_encoder encoder;
  intake_world_init(&world);
  step_encoder_init(&encoder, 1, session, 1);
  const int32_t slots[] = {-1, 7, 3, -1, -1};
  const int32_t none[] = {0};
  const int32_t long_segments[] = {0, 0, 1000, 0, -1, 0, 300, 1000, 1, 5, 5, 1300, 1, 0, 7, 1400};
  const int32_t short_segments[] = {-1, 0, 40, 0, 0, 2, 202, 40};
  const uint32_t arrays[] = {step_encoder_array(&encoder, slots, sizeof slots),
                             step_encoder_array(&encoder, long_segments, sizeof long_segments),
                             step_encoder_array(&encoder, short_segments, sizeof short_segments),
                             step_encoder_array(&encoder, none, sizeof none)};
  for (uint32_t layer = 0; layer < 4; layer++) {
    for (uint32_t i = 0; i < 3; i++) {
      (void)op_add(&encoder, i == 0 ? KVP_OP_STORE : KVP_OP_LOAD, 1, 0, layer, arrays[i]);
    }
  }
  (void)op_add(&encoder, KVP_OP_STORE, 1, 0, 0, arrays[3]);
  struct kvp_step *step = intake_take(&world, &encoder);
  for (size_t layer = 0; layer < 4; layer++) {
    const struct kvp_step_op *ops = &step->ops[layer * 3];
    assert_int_equal(ops[0].first->params.store.rows_skipped, 3);
    const struct kvp_load_params *cut = &ops[1].first->params.load;
    assert_int_equal(cut->rows, 1307);
    assert_int_equal(cut->rows_zeroed, 300);
    assert_int_equal(cut->segment_rows_max, 256);
    assert_int_equal(cut->segment_count, 4 + 2 + 0 + 1);
    const struct kvp_load_params *whole = &ops[2].first->params.load;
    assert_int_equal(whole->rows, 240);
    assert_int_equal(whole->rows_zeroed, 40);
    assert_int_equal(whole->segment_rows_max, 200);
    assert_int_equal(whole->segment_count, 2);
    uint64_t rows = 0, longest = 0;
    for (uint64_t i = 0; i < cut->segment_count; i++) {
      const uint64_t length = (uint64_t)(cut->segments[i].src_end - cut->segments[i].src_begin);
      rows += length;
      longest = length > longest ? length : longest;
    }
    assert_int_equal(rows, cut->rows);
    assert_int_equal(longest, cut->segment_rows_max);
    assert_ptr_equal(cut->segments, step->ops[1].first->params.load.segments);
  }
  assert_int_equal(step->ops[12].first->params.store.rows_skipped, 0);
  kvp_step_destroy(&world.steps, step);
  intake_world_deinit(&world);
}

/* Of an array in a buffer nothing is known; the op counts the rows it takes, from zero, and sees the device's table. */
static void test_facts_of_unchecked_arrays(void **state) {
  (void)state;
  struct intake_world world;
  struct step_encoder encoder;
  intake_world_init(&world);
  for (int round = 0; round < 2; round++) { /* the second step has the first one's memory */
    step_encoder_init(&encoder, 1, session, 1);
    const uint32_t array = step_encoder_buffer_array(&encoder, 1, UINT64_C(1) << 39, 160);
    for (uint32_t i = 0; i < 2; i++) {
      (void)op_add(&encoder, KVP_OP_LOAD, 1, 0, i, array);
    }
    (void)op_add(&encoder, KVP_OP_STORE, 1, 0, 0, array);
    struct kvp_step *step = intake_take(&world, &encoder);
    struct kvp_load_params *first = &step->ops[0].first->params.load;
    struct kvp_load_params *second = &step->ops[1].first->params.load;
    assert_non_null(first->rows_taken);
    assert_non_null(second->rows_taken);
    assert_ptr_not_equal(first->rows_taken, second->rows_taken);
    assert_int_equal(*first->rows_taken, 0);
    assert_int_equal(*second->rows_taken, 0);
    *first->rows_taken = *second->rows_taken = UINT64_MAX;
    assert_ptr_equal(first->check.entries, device_owners);
    assert_ptr_equal(step->ops[2].first->params.store.check.entries, device_owners);
    kvp_step_destroy(&world.steps, step);
  }
  intake_world_deinit(&world);
}

/* What cutting adds to a step has a bound: loads behind it get their segments whole. */
static void test_cuts_are_bounded(void **state) {
  (void)state;
  enum { pieces = 1 << 14, cut_loads = (1 << 19) / pieces };
  struct intake_world world;
  struct step_encoder encoder;
  intake_world_init(&world);
  step_encoder_init(&encoder, 1, session, 1);
  const int32_t segment[] = {0, 0, many_rows, 0};
  const uint32_t array = step_encoder_array(&encoder, segment, sizeof segment);
  uint32_t loads = 0;
  for (uint32_t p = 0; p < pools; p++) {
    for (uint32_t i = 1; i < regions; i++, loads++) {
      (void)op_add(&encoder, KVP_OP_LOAD, 1 + p, i, 0, array);
    }
  }
  assert_true(loads > cut_loads);
  struct kvp_step *step = intake_take(&world, &encoder);
  for (uint32_t i = 0; i < loads; i++) {
    const struct kvp_load_params *load = &step->ops[i].first->params.load;
    assert_int_equal(load->rows, many_rows);
    assert_int_equal(load->segment_count, i < cut_loads ? pieces : 1);
    assert_int_equal(load->segment_rows_max, i < cut_loads ? many_rows / pieces : many_rows);
  }
  kvp_step_destroy(&world.steps, step);
  intake_world_deinit(&world);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_no_room),
      cmocka_unit_test(test_polled_server),
      cmocka_unit_test(test_lost_device),
      cmocka_unit_test(test_suspected_device),
      cmocka_unit_test(test_facts_of_checked_arrays),
      cmocka_unit_test(test_facts_of_unchecked_arrays),
      cmocka_unit_test(test_cuts_are_bounded),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
