/* The CUDA backend on a CUDA in host memory: what a device is refused for, what errors mean, staging memory that runs
 * out, strides and sizes, and the end of a context.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/executor/clock.h"
#include "server/executor/device_cuda_error.h"
#include "server/executor/timeline.h"
#include "tests/unit/exec_harness.h"
#include "tests/unit/fake_cuda.h"

enum { watchdog_seconds = 300 };

/* ---- errors ---- */

/* On paper: what CUDA's documentation says about each. */
static void test_error_classes(void **state) {
  (void)state;
  const int lost[] = {53,  214, 220, 226, 700, 702, 709, 710, 714, 715, 716,
                      717, 718, 719, 721, 805, 806, 807, 810, 911, 999};
  const int bugs[] = {1, 9, 98, 101, 301, 212, 304, 400, 712, 713, 801, 900};
  for (size_t i = 0; i < sizeof lost / sizeof lost[0]; i++) {
    assert_int_equal(kvp_cuda_error_classify(lost[i]), KVP_CUDA_LOST);
  }
  for (size_t i = 0; i < sizeof bugs / sizeof bugs[0]; i++) {
    assert_int_equal(kvp_cuda_error_classify(bugs[i]), KVP_CUDA_BUG);
  }
  assert_int_equal(kvp_cuda_error_classify(0), KVP_CUDA_DONE);
  assert_int_equal(kvp_cuda_error_classify(600), KVP_CUDA_DONE);
  assert_int_equal(kvp_cuda_error_classify(2), KVP_CUDA_REFUSED);
  for (int code = 0; code < 1000; code++) {
    assert_int_equal(kvp_cuda_error_is_passing(code), code == 46 || (code >= 805 && code <= 810));
  }
}

/* ---- opening ---- */

static enum kvp_status try_open(const char *name, struct kvp_device **out, struct kvp_error *error) {
  const struct kvp_device_options options = {0};
  memset(error, 0, sizeof *error);
  return kvp_device_open(name, &options, out, error);
}

static void assert_refused(const char *name, const char *injected, enum kvp_status status, const char *text) {
  struct kvp_device *device = NULL;
  struct kvp_error error;
  if (injected != NULL) {
    assert_int_equal(setenv("FAKE_CUDA_ERROR", injected, 1), 0);
  }
  assert_int_equal(try_open(name, &device, &error), status);
  assert_int_equal(unsetenv("FAKE_CUDA_ERROR"), 0);
  assert_null(device);
  assert_non_null(strstr(error.text, name));
  if (strstr(error.text, text) == NULL) {
    fail_msg("'%s' is not in: %s", text, error.text);
  }
}

static void test_refused_devices(void **state) {
  (void)state;
  assert_refused("cuda:2", NULL, KVP_INVALID_ARGUMENT, "1 GPU-11111111-1111-1111-1111-111111111111");
  assert_refused("cuda:GPU-00000000-0000-0000-0000-000000000000", NULL, KVP_INVALID_ARGUMENT, "no such GPU");
  assert_refused("cuda:first", NULL, KVP_INVALID_ARGUMENT, "GPU-<uuid>");
  assert_refused("cuda:0", "cudaGetDeviceCount:35", KVP_VERSION_MISMATCH, "too old");
  assert_refused("cuda:0", "cudaGetDeviceCount:100", KVP_INVALID_ARGUMENT, "sees no GPU");
  assert_refused("cuda:0", "kvp_cuda_kernels_load:209", KVP_UNIMPLEMENTED, "no code for Fake GPU, sm_90");
  assert_refused("cuda:0", "cudaHostAlloc:2", KVP_OUT_OF_MEMORY, "1073741824 of 1073741824 bytes are free");
  assert_refused("cuda:0", "cudaSetDevice:101", KVP_INTERNAL, "cudaSetDevice");
  const char *const busy[] = {"cudaGetDeviceCount:805", "cudaGetDeviceCount:806", "cudaSetDevice:807",
                              "cudaFree:808"};
  for (size_t i = 0; i < sizeof busy / sizeof busy[0]; i++) {
    assert_refused("cuda:0", busy[i], KVP_BUSY, "MPS server");
  }
  assert_refused("cuda:0", "cudaSetDevice:46", KVP_BUSY, "exclusively");
}

static struct kvp_device *device_open(const char *name) {
  struct kvp_device *device = NULL;
  struct kvp_error error;
  if (try_open(name, &device, &error) != KVP_OK) {
    fail_msg("%s", error.text);
  }
  return device;
}

static void device_end(struct kvp_device *device) {
  device->backend->stop(device);
  device->backend->close(device);
}

static void test_described_device(void **state) {
  (void)state;
  struct kvp_device *device = device_open("cuda:GPU-11111111-1111-1111-1111-111111111111");
  struct kvp_device_description description = {0};
  device->backend->describe(device, &description);
  assert_int_equal(description.memory_bytes, 1 << 30);
  assert_int_equal(description.memory_free_bytes, 1 << 30);
  assert_int_equal(description.memory_granularity_bytes, 4096);
  assert_int_equal(description.ready_flags, KVP_READY_DEVICE_FDS);
  assert_string_equal(description.text, "Fake GPU, sm_90, 132 SMs, no MPS");
  assert_non_null(strstr(description.driver, "CUDA 13.0"));
  assert_string_equal(description.uuid, "GPU-11111111-1111-1111-1111-111111111111");
  assert_true(device->backend->polled);
  device_end(device);
}

/* ---- memory ---- */

static void test_memory(void **state) {
  (void)state;
  struct kvp_device *device = device_open("cuda:0");
  struct kvp_memory *memory = NULL, *import = NULL;
  struct kvp_error error = {0};
  int fds[2] = {-1, -1};
  assert_int_equal(device->backend->memory_create(device, "large", (UINT64_C(1) << 30) + 1, fds, &memory, &error),
                   KVP_OUT_OF_MEMORY);
  assert_non_null(strstr(error.text, "1073741825 bytes asked for, 1073741824 of 1073741824 are free"));
  assert_int_equal(setenv("FAKE_CUDA_ERROR", "cuMemCreate:2", 1), 0);
  assert_int_equal(device->backend->memory_create(device, "small", 100, fds, &memory, &error), KVP_OUT_OF_MEMORY);
  assert_non_null(strstr(error.text, "'small'"));
  assert_int_equal(unsetenv("FAKE_CUDA_ERROR"), 0);
  atomic_store(&device->closing, true);
  assert_int_equal(device->backend->memory_create(device, "late", 100, fds, &memory, &error), KVP_CANCELLED);
  atomic_store(&device->closing, false);

  const uint64_t bytes = 10001; /* takes three pages, and is 10001 long */
  assert_int_equal(device->backend->memory_create(device, "odd", bytes, fds, &memory, &error), KVP_OK);
  assert_int_equal(memory->bytes, bytes);
  for (uint64_t i = 0; i < bytes; i++) {
    assert_int_equal(memory->base[i], 0);
  }
  memory->base[bytes - 1] = 42;
  assert_int_equal(device->backend->memory_import(device, bytes, fds, &bytes, 1, &import, &error), KVP_OK);
  assert_ptr_not_equal(import->base, memory->base);
  assert_int_equal(import->base[bytes - 1], 42);
  device->backend->memory_destroy(device, memory);
  assert_int_equal(import->base[bytes - 1], 42);
  device->backend->memory_destroy(device, import);
  const uint64_t uneven[] = {5000, 5001};
  const int twice[] = {fds[0], fds[0]};
  assert_int_equal(device->backend->memory_import(device, bytes, twice, uneven, 2, &import, &error),
                   KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "chunk 0 of 2"));
  assert_int_equal(close(fds[0]), 0);
  assert_int_equal(device->backend->memory_import(device, bytes, fds, &bytes, 1, &import, &error),
                   KVP_INVALID_ARGUMENT); /* no descriptor any more */
  device_end(device);
}

/* Read-only host memory, on devices that take it and on those that don't: ours stays read-only. */
static void test_registered_memory(void **state) {
  (void)state;
  for (int takes = 0; takes < 2; takes++) {
    assert_int_equal(setenv("FAKE_CUDA_READ_ONLY", takes != 0 ? "1" : "0", 1), 0);
    struct kvp_device *device = device_open("cuda:0");
    struct kvp_error error = {0};
    int fd = memfd_create("owners", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, 8192), 0);
    uint64_t *shared = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    uint64_t *ours = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);
    void *seen = NULL;
    assert_int_equal(device->backend->host_register(device, ours, 8192, true, &seen, &error), KVP_OK);
    assert_ptr_not_equal(seen, ours);
    shared[700] = 77;
    assert_int_equal(((uint64_t *)seen)[700], 77);
    char line[512];
    bool is_read_only = false;
    FILE *maps = fopen("/proc/self/maps", "re");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps) != NULL) {
      char *rest = line;
      if (strtoul(rest, &rest, 16) == (uintptr_t)ours) {
        is_read_only = strstr(rest, " r--s ") != NULL;
      }
    }
    assert_int_equal(fclose(maps), 0);
    assert_true(is_read_only);
    device->backend->host_unregister(device, ours);
    (void)munmap(shared, 8192);
    (void)munmap(ours, 8192);
    assert_int_equal(close(fd), 0);
    device_end(device);
  }
  assert_int_equal(unsetenv("FAKE_CUDA_READ_ONLY"), 0);
}

/* ---- steps ---- */

enum { memory_bytes = 64 << 20, queue_count = 8 };

struct bench {
  struct kvp_device *device;
  struct kvp_memory *memory;
  struct kvp_timeline *timelines;
  struct kvp_timeline *device_timelines;
  struct kvp_device_queue *queues[queue_count];
  uint64_t values[queue_count];
  int fd;
};

static void bench_init(struct bench *bench) {
  struct kvp_error error;
  void *seen = NULL;
  memset(bench, 0, sizeof *bench);
  bench->device = device_open("cuda:0");
  const struct kvp_device_backend *backend = bench->device->backend;
  assert_int_equal(backend->memory_create(bench->device, "memory", memory_bytes, &bench->fd, &bench->memory, &error),
                   KVP_OK);
  bench->timelines = kvp_timelines_new(64);
  assert_int_equal(backend->host_register(bench->device, bench->timelines, 4096, false, &seen, &error), KVP_OK);
  bench->device_timelines = seen;
  for (int i = 0; i < queue_count; i++) {
    assert_int_equal(backend->queue_create(bench->device, &bench->queues[i], &error), KVP_OK);
  }
}

static void bench_deinit(struct bench *bench) {
  const struct kvp_device_backend *backend = bench->device->backend;
  backend->stop(bench->device);
  backend->memory_destroy(bench->device, bench->memory);
  for (int i = 0; i < queue_count; i++) {
    backend->queue_destroy(bench->device, bench->queues[i]);
  }
  backend->host_unregister(bench->device, bench->timelines);
  kvp_timelines_destroy(bench->timelines, 64);
  backend->close(bench->device);
  assert_int_equal(close(bench->fd), 0);
}

/* ops [count], and room for the signal behind them. */
static bool launch(struct bench *bench, int queue, struct kvp_device_op *ops, uint32_t count) {
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

static void collect(struct bench *bench, int queue, struct kvp_device_op *ops) {
  while (kvp_timeline_read(&bench->timelines[queue]) < bench->values[queue]) {
    kvp_cpu_relax();
  }
  bench->device->backend->collect(bench->queues[queue], ops);
}

static struct kvp_device_op transfer_op(enum kvp_device_op_kind kind, uint8_t *base, uint64_t stride, uint64_t rows,
                                        uint64_t row_bytes, uint8_t *host) {
  return (struct kvp_device_op){
      .kind = kind,
      .params.transfer = {
          .rows = {base, stride}, .row_count = rows, .row_bytes = row_bytes, .host = host, .fill = 0x42}};
}

/* Rows of every kind of distance, wider than a copy can have them among them; times in order; bytes counted. */
static void test_transfers(void **state) {
  (void)state;
  enum { rows = 7, row_bytes = 300 };
  const uint64_t strides[] = {row_bytes, 301, 8192, 8193, 1 << 20};
  struct bench bench;
  bench_init(&bench);
  static uint8_t data[rows * row_bytes], back[rows * row_bytes];
  for (int i = 0; i < rows * row_bytes; i++) {
    data[i] = (uint8_t)(i * 7 + i / 256);
  }
  for (size_t s = 0; s < sizeof strides / sizeof strides[0]; s++) {
    const uint64_t stride = strides[s];
    uint8_t *base = bench.memory->base + 13;
    memset(bench.memory->base, 0xEE, 8 << 20);
    memset(back, 0, sizeof back);
    struct kvp_device_op ops[5] = {
        transfer_op(KVP_DEVICE_FILL, base, stride, rows, row_bytes, NULL),
        transfer_op(KVP_DEVICE_WRITE, base, stride, rows - 1, row_bytes, data),
        transfer_op(KVP_DEVICE_READ, base, stride, rows, row_bytes, back),
        transfer_op(KVP_DEVICE_READ, base, stride, 0, row_bytes, back),
    };
    const uint64_t before_ns = kvp_clock_ns();
    assert_true(launch(&bench, 0, ops, 4));
    collect(&bench, 0, ops);
    const uint64_t after_ns = kvp_clock_ns();
    assert_memory_equal(back, data, sizeof data - row_bytes);
    for (uint64_t i = 0; i < 8 << 20; i++) {
      const uint64_t row = (i - 13) / stride, column = (i - 13) % stride;
      const bool touched = i >= 13 && row < rows && column < row_bytes;
      const uint8_t expected = !touched ? 0xEE : row < rows - 1 ? data[row * row_bytes + column] : 0x42;
      if (bench.memory->base[i] != expected) {
        assert_int_equal(bench.memory->base[i], expected);
      }
    }
    assert_int_equal(back[rows * row_bytes - 1], 0x42);
    assert_int_equal(ops[0].counts.bytes_written, rows * row_bytes);
    assert_int_equal(ops[1].counts.bytes_written, (rows - 1) * row_bytes);
    assert_int_equal(ops[2].counts.bytes_read, rows * row_bytes);
    assert_int_equal(ops[3].counts.bytes_read, 0);
    uint64_t last_ns = before_ns;
    for (int i = 0; i < 4; i++) {
      assert_true(last_ns <= ops[i].started_ns && ops[i].started_ns <= ops[i].finished_ns);
      last_ns = ops[i].finished_ns;
    }
    assert_true(last_ns <= after_ns);
  }
  bench_deinit(&bench);
}

/* Steps of 8 MiB: three fit, the fourth finds no room until one has been collected; all of them arrive. */
static void test_staging_runs_out(void **state) {
  (void)state;
  enum { step_bytes = 8 << 20, steps = 5 };
  struct bench bench;
  bench_init(&bench);
  uint8_t *data = malloc(step_bytes);
  assert_non_null(data);
  struct kvp_device_op ops[steps][2];
  int launched = 0, refusals = 0;
  for (int round = 0; round < 3; round++) {
    memset(bench.memory->base, 0, (size_t)steps * step_bytes);
    fake_cuda_hold(true);
    for (launched = 0; launched < steps; launched++) {
      memset(data, launched + 1, step_bytes); /* what was launched has its own copy */
      ops[launched][0] = transfer_op(KVP_DEVICE_WRITE, bench.memory->base + (size_t)launched * step_bytes, step_bytes,
                                     1, step_bytes, data);
      if (!launch(&bench, launched, ops[launched], 1)) {
        break;
      }
    }
    assert_int_equal(launched, 3);
    refusals++;
    fake_cuda_hold(false);
    for (int i = 0; i < steps; i++) {
      collect(&bench, i, ops[i]);
      if (launched < steps) {
        memset(data, launched + 1, step_bytes);
        ops[launched][0] = transfer_op(KVP_DEVICE_WRITE, bench.memory->base + (size_t)launched * step_bytes,
                                       step_bytes, 1, step_bytes, data);
        assert_true(launch(&bench, launched, ops[launched], 1));
        launched++;
      }
    }
    for (int i = 0; i < steps; i++) {
      assert_int_equal(bench.memory->base[(size_t)i * step_bytes], i + 1);
      assert_int_equal(bench.memory->base[(size_t)(i + 1) * step_bytes - 1], i + 1);
    }
  }
  assert_int_equal(refusals, 3);
  free(data);
  bench_deinit(&bench);
}

/* As many device ops as a step may have, with the most that intake lets through: 8 MiB as they came, 8 MiB of cut segments,
 * 2 MiB of results. They must fit on a device that has nothing else to do. */
static void test_largest_step(void **state) {
  (void)state;
  enum { count = kvp_device_ops_per_step_max, part = 8 << 20, results = 2 << 20 };
  static struct kvp_device_op ops[count + 1];
  struct kvp_geometry geometry;
  struct bench bench;
  bench_init(&bench);
  uint8_t *data = calloc(1, 2 * (size_t)part);
  uint8_t *back = malloc(results);
  assert_true(data != NULL && back != NULL);
  assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_BF16), 64, 16, 64, 1, &geometry, NULL), KVP_OK);
  const uint64_t piece = 2 * part / (count / 2) / 64 * 64; /* of an array: empty segments, all of them */
  for (uint32_t i = 0; i < count; i++) {
    if (i % 2 == 0) {
      ops[i] = (struct kvp_device_op){
          .kind = KVP_DEVICE_LOAD,
          .host_arrays = KVP_ARRAY_SEGMENTS,
          .params.load = {.layer = {bench.memory->base, &geometry},
                          .segments = (const struct kvp_segment *)(const void *)(data + i / 2 * piece),
                          .segment_count = piece / sizeof(struct kvp_segment)}};
    } else {
      const uint64_t bytes = results / (count / 2);
      ops[i] = transfer_op(KVP_DEVICE_READ, bench.memory->base + i, bytes, 1, bytes, back + i / 2 * bytes);
    }
  }
  for (uint64_t i = 0; i < results + count; i++) {
    bench.memory->base[i] = (uint8_t)(i >> 4);
  }
  for (int round = 0; round < 2; round++) {
    memset(back, 0, results);
    assert_true(launch(&bench, 0, ops, count));
    collect(&bench, 0, ops);
    for (uint32_t i = 1; i < count; i += 2) {
      assert_memory_equal(ops[i].params.transfer.host, bench.memory->base + i, ops[i].params.transfer.row_bytes);
    }
  }
  free(data);
  free(back);
  bench_deinit(&bench);
}

/* ---- the end ---- */

/* Launches whose step never ends, a check that says why, and a way out that waits for nothing. */
static void test_lost_context(void **state) {
  (void)state;
  struct kvp_error error = {0};
  struct bench bench;
  static struct kvp_device_op ops[2];
  bench_init(&bench);
  assert_int_equal(bench.device->backend->check(bench.device, &error), KVP_OK);
  fake_cuda_fault();
  assert_true(launch(&bench, 0, ops, 0));
  while (bench.device->backend->check(bench.device, &error) == KVP_OK) {
    kvp_cpu_relax();
  }
  assert_int_equal(error.status, KVP_DEVICE_LOST);
  assert_non_null(strstr(error.text, "700"));
  assert_true(launch(&bench, 1, ops, 0));
  bench_deinit(&bench);
}

/* The program ends, and says so, when a step can't any more. */
static void executor_lose(bool by_signal) {
  const struct exec_harness_options options = {.ring = exec_harness_defaults.ring, .device = "cuda:1"};
  struct exec_harness link;
  struct step_encoder encoder;
  uint32_t bytes = 0;
  int fd = -1;
  assert_int_equal(setenv("KVPOOL_TEST_EXEC", FAKE_CUDA_EXEC, 1), 0);
  assert_int_equal(setenv("FAKE_CUDA_FAULT", by_signal ? "0" : "2", 1), 0);
  assert_int_equal(exec_harness_start(&link, &options).status, KVP_OK);
  assert_int_equal(exec_harness_memory_create(&link, 1, 1 << 20, &fd).status, KVP_OK);
  assert_int_equal(exec_harness_buffer_attach(&link, 1, 1, 1 << 20, 5).status, KVP_OK);
  step_encoder_init(&encoder, 1, 5, 1);
  step_encoder_op(&encoder, KVP_OP_BUFFER_FILL)->source = step_view(1, 0, 1, 64, 64);
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  for (uint64_t tag = 1; tag <= 2; tag++) {
    assert_true(exec_harness_post(&link, KVP_COMMAND_STEP, tag, encoded, bytes));
    assert_int_equal(exec_harness_take(&link).kind, KVP_COMPLETION_ACCEPTED);
    if (tag == 1) {
      struct exec_completion done = exec_harness_take(&link);
      assert_int_equal(done.kind, KVP_COMPLETION_DONE);
      free(done.payload);
      assert_int_equal(by_signal ? kill(link.pid, SIGUSR2) : 0, 0);
    }
  }
  const int status = exec_harness_wait(&link);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), EXIT_FAILURE);
  assert_int_equal(unsetenv("FAKE_CUDA_FAULT"), 0);
  free(encoded);
  step_encoder_deinit(&encoder);
  assert_int_equal(close(fd), 0);
}

static void test_lost_executor(void **state) {
  (void)state;
  executor_lose(false);
#ifdef KVPOOL_FAILPOINTS
  executor_lose(true);
#endif
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_error_classes),
      cmocka_unit_test(test_refused_devices),
      cmocka_unit_test(test_described_device),
      cmocka_unit_test(test_memory),
      cmocka_unit_test(test_registered_memory),
      cmocka_unit_test(test_transfers),
      cmocka_unit_test(test_staging_runs_out),
      cmocka_unit_test(test_largest_step),
      cmocka_unit_test(test_lost_executor),
      cmocka_unit_test(test_lost_context), /* last: nothing works afterwards */
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
