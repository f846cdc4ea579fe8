/* The CUDA backend on a CUDA in host memory: what a device says of itself, its memory, strides and sizes, staging memory
 * that runs out. What goes wrong is in test_executor_cuda_errors.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/executor/clock.h"
#include "tests/unit/cuda_bench.h"
#include "tests/unit/fake_cuda.h"

enum { watchdog_seconds = 300 };

/* ---- opening ---- */

static void test_described_device(void **state) {
  (void)state;
  struct kvp_device *device = cuda_device_open("cuda:GPU-A1A1A1A1-a1a1-a1a1-A1A1-a1a1A1a1a1a1");
  struct kvp_device_description description = {0};
  device->backend->describe(device, &description);
  assert_int_equal(description.memory_bytes, 1 << 30);
  assert_int_equal(description.memory_free_bytes, 1 << 30);
  assert_int_equal(description.memory_granularity_bytes, 4096);
  assert_int_equal(description.ready_flags, KVP_READY_DEVICE_FDS);
  assert_string_equal(description.text, "Fake GPU, sm_90, 132 SMs, no MPS");
  assert_non_null(strstr(description.driver, "CUDA 13.0"));
  assert_string_equal(description.uuid, "GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1");
  assert_true(device->backend->polled);
  cuda_device_end(device);
}

/* ---- memory ---- */

static void test_memory(void **state) {
  (void)state;
  struct kvp_device *device = cuda_device_open("cuda:0");
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
  cuda_device_end(device);
}

/* Read-only host memory, on devices that take it and on those that don't: ours stays read-only. */
static void test_registered_memory(void **state) {
  (void)state;
  for (int takes = 0; takes < 2; takes++) {
    assert_int_equal(setenv("FAKE_CUDA_READ_ONLY", takes != 0 ? "1" : "0", 1), 0);
    struct kvp_device *device = cuda_device_open("cuda:0");
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
    cuda_device_end(device);
  }
  assert_int_equal(unsetenv("FAKE_CUDA_READ_ONLY"), 0);
}

/* ---- steps ---- */

/* Rows of every kind of distance, wider than a copy can have them among them; times in order; bytes counted. */
static void test_transfers(void **state) {
  (void)state;
  enum { rows = 7, row_bytes = 300 };
  const uint64_t strides[] = {row_bytes, 301, 8192, 8193, 1 << 20};
  struct cuda_bench bench;
  cuda_bench_init(&bench);
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
        cuda_bench_transfer(KVP_DEVICE_FILL, base, stride, rows, row_bytes, NULL),
        cuda_bench_transfer(KVP_DEVICE_WRITE, base, stride, rows - 1, row_bytes, data),
        cuda_bench_transfer(KVP_DEVICE_READ, base, stride, rows, row_bytes, back),
        cuda_bench_transfer(KVP_DEVICE_READ, base, stride, 0, row_bytes, back),
    };
    const uint64_t before_ns = kvp_clock_ns();
    assert_true(cuda_bench_launch(&bench, 0, ops, 4));
    cuda_bench_collect(&bench, 0, ops);
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
  cuda_bench_deinit(&bench);
}

/* Steps of 8 MiB: three fit, the fourth finds no room until one has been collected; all of them arrive. */
static void test_staging_runs_out(void **state) {
  (void)state;
  enum { step_bytes = 8 << 20, steps = 5 };
  struct cuda_bench bench;
  cuda_bench_init(&bench);
  uint8_t *data = malloc(step_bytes);
  assert_non_null(data);
  struct kvp_device_op ops[steps][2];
  int launched = 0, refusals = 0;
  for (int round = 0; round < 3; round++) {
    memset(bench.memory->base, 0, (size_t)steps * step_bytes);
    fake_cuda_hold(true);
    for (launched = 0; launched < steps; launched++) {
      memset(data, launched + 1, step_bytes); /* what was launched has its own copy */
      ops[launched][0] = cuda_bench_transfer(KVP_DEVICE_WRITE, bench.memory->base + (size_t)launched * step_bytes,
                                             step_bytes, 1, step_bytes, data);
      if (!cuda_bench_launch(&bench, launched, ops[launched], 1)) {
        break;
      }
    }
    assert_int_equal(launched, 3);
    refusals++;
    fake_cuda_hold(false);
    for (int i = 0; i < steps; i++) {
      cuda_bench_collect(&bench, i, ops[i]);
      if (launched < steps) {
        memset(data, launched + 1, step_bytes);
        ops[launched][0] = cuda_bench_transfer(KVP_DEVICE_WRITE, bench.memory->base + (size_t)launched * step_bytes,
                                               step_bytes, 1, step_bytes, data);
        assert_true(cuda_bench_launch(&bench, launched, ops[launched], 1));
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
  cuda_bench_deinit(&bench);
}

/* As many device ops as a step may have, with the most that intake lets through: 8 MiB as they came, 8 MiB of cut segments,
 * 2 MiB of results. They must fit on a device that has nothing else to do. */
static void test_largest_step(void **state) {
  (void)state;
  enum { count = kvp_device_ops_per_step_max, part = 8 << 20, results = 2 << 20 };
  static struct kvp_device_op ops[count + 1];
  struct kvp_geometry geometry;
  struct cuda_bench bench;
  cuda_bench_init(&bench);
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
      ops[i] = cuda_bench_transfer(KVP_DEVICE_READ, bench.memory->base + i, bytes, 1, bytes, back + i / 2 * bytes);
    }
  }
  for (uint64_t i = 0; i < results + count; i++) {
    bench.memory->base[i] = (uint8_t)(i >> 4);
  }
  for (int round = 0; round < 2; round++) {
    memset(back, 0, results);
    assert_true(cuda_bench_launch(&bench, 0, ops, count));
    cuda_bench_collect(&bench, 0, ops);
    for (uint32_t i = 1; i < count; i += 2) {
      assert_memory_equal(ops[i].params.transfer.host, bench.memory->base + i, ops[i].params.transfer.row_bytes);
    }
  }
  free(data);
  free(back);
  cuda_bench_deinit(&bench);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_described_device),  cmocka_unit_test(test_memory),
      cmocka_unit_test(test_registered_memory), cmocka_unit_test(test_transfers),
      cmocka_unit_test(test_staging_runs_out),  cmocka_unit_test(test_largest_step),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
