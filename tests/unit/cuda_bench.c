/* See cuda_bench.h. */
#include "tests/unit/cuda_bench.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/executor/clock.h"

enum kvp_status cuda_device_try_open(const char *name, struct kvp_device **out, struct kvp_error *error) {
  const struct kvp_device_options options = {0};
  memset(error, 0, sizeof *error);
  return kvp_device_open(name, &options, out, error);
}

struct kvp_device *cuda_device_open(const char *name) {
  struct kvp_device *device = NULL;
  struct kvp_error error;
  if (cuda_device_try_open(name, &device, &error) != KVP_OK) {
    fail_msg("%s", error.text);
  }
  return device;
}

void cuda_device_end(struct kvp_device *device) {
  device->backend->stop(device);
  device->backend->close(device);
}

void cuda_bench_init(struct cuda_bench *bench) {
  struct kvp_error error;
  void *seen = NULL;
  memset(bench, 0, sizeof *bench);
  bench->device = cuda_device_open("cuda:0");
  const struct kvp_device_backend *backend = bench->device->backend;
  assert_int_equal(
      backend->memory_create(bench->device, "memory", cuda_bench_memory_bytes, &bench->fd, &bench->memory, &error),
      KVP_OK);
  bench->timelines = kvp_timelines_new(64);
  assert_int_equal(backend->host_register(bench->device, bench->timelines, 4096, false, &seen, &error), KVP_OK);
  bench->device_timelines = seen;
  for (int i = 0; i < cuda_bench_queue_count; i++) {
    assert_int_equal(backend->queue_create(bench->device, &bench->queues[i], &error), KVP_OK);
  }
}

void cuda_bench_deinit(struct cuda_bench *bench) {
  const struct kvp_device_backend *backend = bench->device->backend;
  backend->stop(bench->device);
  backend->memory_destroy(bench->device, bench->memory);
  for (int i = 0; i < cuda_bench_queue_count; i++) {
    backend->queue_destroy(bench->device, bench->queues[i]);
  }
  backend->host_unregister(bench->device, bench->timelines);
  kvp_timelines_destroy(bench->timelines, 64);
  backend->close(bench->device);
  assert_int_equal(close(bench->fd), 0);
}

bool cuda_bench_launch(struct cuda_bench *bench, int queue, struct kvp_device_op *ops, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    ops[i].next = &ops[i + 1];
  }
  ops[count] = (struct kvp_device_op){
      .kind = KVP_DEVICE_SIGNAL,
      .params.signal = {.timeline = &bench->device_timelines[queue], .value = bench->values[queue] + 1}};
  if (!bench->device->backend->launch(bench->queues[queue], ops)) {
    return false;
  }
  bench->values[queue]++;
  return true;
}

bool cuda_bench_has_ended(const struct cuda_bench *bench, int queue) {
  return kvp_timeline_read(&bench->timelines[queue]) >= bench->values[queue];
}

enum kvp_status cuda_bench_try_collect(struct cuda_bench *bench, int queue, struct kvp_device_op *ops,
                                       struct kvp_error *error) {
  while (!cuda_bench_has_ended(bench, queue)) {
    kvp_cpu_relax();
  }
  return bench->device->backend->collect(bench->queues[queue], ops, error);
}

void cuda_bench_collect(struct cuda_bench *bench, int queue, struct kvp_device_op *ops) {
  struct kvp_error error = {0};
  if (cuda_bench_try_collect(bench, queue, ops, &error) != KVP_OK) {
    fail_msg("%s", error.text);
  }
}

struct kvp_device_op cuda_bench_transfer(enum kvp_device_op_kind kind, uint8_t *base, uint64_t stride, uint64_t rows,
                                         uint64_t row_bytes, uint8_t *host) {
  return (struct kvp_device_op){
      .kind = kind,
      .params.transfer = {
          .rows = {base, stride}, .row_count = rows, .row_bytes = row_bytes, .host = host, .fill = 0x42}};
}
