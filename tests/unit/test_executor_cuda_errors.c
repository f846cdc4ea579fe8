/* What goes wrong with a CUDA device, on a CUDA in host memory: what one is refused for, what errors mean, steps that
 * find no memory, and the end of a context.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/executor/clock.h"
#include "server/executor/device_cuda_error.h"
#include "tests/unit/cuda_bench.h"
#include "tests/unit/exec_harness.h"
#include "tests/unit/fake_cuda.h"

enum { watchdog_seconds = 300 };

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
    assert_int_equal(kvp_cuda_error_is_passing(code), code == 46 || code == 802 || (code >= 805 && code <= 810));
  }
}

/* ---- opening ---- */

static void assert_refused(const char *name, const char *injected, enum kvp_status status, const char *text) {
  struct kvp_device *device = NULL;
  struct kvp_error error;
  if (injected != NULL) {
    assert_int_equal(setenv("FAKE_CUDA_ERROR", injected, 1), 0);
  }
  assert_int_equal(cuda_device_try_open(name, &device, &error), status);
  assert_int_equal(unsetenv("FAKE_CUDA_ERROR"), 0);
  assert_null(device);
  assert_non_null(strstr(error.text, name));
  if (strstr(error.text, text) == NULL) {
    fail_msg("'%s' is not in: %s", text, error.text);
  }
}

static void test_refused_devices(void **state) {
  (void)state;
  assert_refused("cuda:2", NULL, KVP_INVALID_ARGUMENT, "1 GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1");
  assert_refused("cuda:GPU-00000000-0000-0000-0000-000000000000", NULL, KVP_INVALID_ARGUMENT, "no such GPU");
  assert_refused("cuda:64", NULL, KVP_INVALID_ARGUMENT, "the last CUDA device is cuda:63");
  assert_refused("cuda:63", NULL, KVP_INVALID_ARGUMENT, "no such GPU");
  assert_refused("cuda:first", NULL, KVP_INVALID_ARGUMENT, "GPU-<uuid>");
  assert_refused("cuda:0", "cudaGetDeviceCount:35", KVP_VERSION_MISMATCH, "too old");
  assert_refused("cuda:0", "cudaGetDeviceCount:36", KVP_VERSION_MISMATCH, "too old");
  assert_refused("cuda:0", "cudaGetDeviceCount:803", KVP_VERSION_MISMATCH, "don't fit each other");
  assert_refused("cuda:0", "cudaGetDeviceCount:804", KVP_VERSION_MISMATCH, "don't fit each other");
  assert_refused("cuda:0", "cudaGetDeviceCount:100", KVP_INVALID_ARGUMENT, "sees no GPU");
  assert_refused("cuda:0", "cudaGetDeviceCount:3", KVP_UNIMPLEMENTED, "needs of this host");
  assert_refused("cuda:0", "cudaFree:304", KVP_UNIMPLEMENTED, "cudaFree: ");
  assert_refused("cuda:0", "cudaSetDevice:304", KVP_UNIMPLEMENTED, "needs of this host");
  assert_refused("cuda:0", "cudaFree:800", KVP_PERMISSION_DENIED, "may not use the GPU");
  assert_refused("cuda:0", "cudaGetDeviceCount:802", KVP_BUSY, "nvidia-fabricmanager");
  assert_refused("cuda:0", "cudaFree:802", KVP_BUSY, "nvidia-fabricmanager");
  assert_refused("cuda:0", "kvp_cuda_kernels_load:209", KVP_UNIMPLEMENTED, "no code for Fake GPU, sm_90");
  assert_refused("cuda:0", "cudaHostAlloc:2", KVP_OUT_OF_MEMORY, "1073741824 of 1073741824 bytes are free");
  assert_refused("cuda:0", "cudaStreamCreateWithFlags:2", KVP_OUT_OF_MEMORY,
                 "1073741824 of 1073741824 bytes are free");
  assert_refused("cuda:0", "kvp_cuda_empty_launch:2", KVP_OUT_OF_MEMORY, "kvp_cuda_empty_launch");
  assert_refused("cuda:0", "cudaSetDevice:101", KVP_INTERNAL, "cudaSetDevice");
  const char *const busy[] = {"cudaGetDeviceCount:805", "cudaGetDeviceCount:806", "cudaSetDevice:807",
                              "cudaFree:808"};
  for (size_t i = 0; i < sizeof busy / sizeof busy[0]; i++) {
    assert_refused("cuda:0", busy[i], KVP_BUSY, "MPS server");
  }
  assert_refused("cuda:0", "cudaSetDevice:46", KVP_BUSY, "exclusively");
  assert_refused("cuda:0", "cudaGetDeviceCount:805", KVP_BUSY, "processes on it: not known");
}

/* The management library is asked for the GPU by an address that is the same for everybody; a process is told once. */
static void test_busy_device_names_processes(void **state) {
  (void)state;
  assert_refused("cuda:1", "cudaSetDevice:46", KVP_BUSY, "processes on 0000:3C:00.0: 91234567 ?, 1234567 ?");
  assert_refused("cuda:GPU-A1A1A1A1-A1A1-A1A1-A1A1-A1A1A1A1A1A1", "cudaGetDeviceCount:805", KVP_BUSY,
                 "processes on GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1: 91234567 ?, 1234567 ?");
  assert_refused("cuda:0", "cudaSetDevice:46", KVP_BUSY, "processes on 0000:3B:00.0: not known");
}

/* ---- steps ---- */

static void inject(const char *errors) {
  assert_int_equal(errors == NULL ? unsetenv("FAKE_CUDA_ERROR") : setenv("FAKE_CUDA_ERROR", errors, 1), 0);
}

static void assert_text(const struct kvp_error *error, const char *text) {
  if (strstr(error->text, text) == NULL) {
    fail_msg("'%s' is not in: %s", text, error->text);
  }
}

enum { fill_bytes = 100, fill_stride = 200, fill_step_ops = 3 };

/* One row, three, one more: the one in the middle is a copy of another kind. */
static void fill_step(struct cuda_bench *bench, struct kvp_device_op *ops) {
  uint8_t *base = bench->memory->base;
  memset(base, 0, 16 << 10);
  ops[0] = cuda_bench_transfer(KVP_DEVICE_FILL, base, fill_stride, 1, fill_bytes, NULL);
  ops[1] = cuda_bench_transfer(KVP_DEVICE_FILL, base + 4096, fill_stride, 3, fill_bytes, NULL);
  ops[2] = cuda_bench_transfer(KVP_DEVICE_FILL, base + 8192, fill_stride, 1, fill_bytes, NULL);
}

/* A launch that is refused fails its step, whose ops before it have run, and nothing else. */
static void test_refused_launch(void **state) {
  (void)state;
  const struct {
    const char *injected;
    enum kvp_status status;
    const char *text;
  } cases[] = {{"cudaMemset2DAsync:2", KVP_OUT_OF_MEMORY, "1006632960 of 1073741824 bytes of the device are free"},
               {"cudaMemset2DAsync:9", KVP_INTERNAL, "a bug of the daemon"},
               {"cudaMemset2DAsync:801", KVP_INTERNAL, "(801)"}};
  struct cuda_bench bench;
  cuda_bench_init(&bench);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct kvp_device_op ops[fill_step_ops + 1];
    struct kvp_error error = {0};
    fill_step(&bench, ops);
    inject(cases[i].injected);
    assert_true(cuda_bench_launch(&bench, 1, ops, fill_step_ops));
    assert_int_equal(cuda_bench_try_collect(&bench, 1, ops, &error), cases[i].status);
    assert_int_equal(error.status, cases[i].status);
    assert_text(&error, "device op 1 of 3");
    assert_text(&error, cases[i].text); /* 1006632960 = 2^30 - 2^26 */
    assert_int_equal(bench.memory->base[0], 0x42);
    assert_int_equal(bench.memory->base[4096], 0);
    assert_int_equal(bench.memory->base[8192], 0);
    assert_int_equal(bench.device->backend->check(bench.device, &error), KVP_OK);
    inject(NULL);
    fill_step(&bench, ops);
    assert_true(cuda_bench_launch(&bench, 1, ops, fill_step_ops));
    cuda_bench_collect(&bench, 1, ops);
    assert_int_equal(bench.memory->base[4096 + 2 * fill_stride], 0x42);
    assert_int_equal(bench.memory->base[8192], 0x42);
    assert_int_equal(ops[1].counts.bytes_written, 3 * fill_bytes);
  }
  cuda_bench_deinit(&bench);
}

/* The end of a step finds no memory: it comes when there is some, and nothing on its queue overtakes it. */
static void test_refused_signal(void **state) {
  (void)state;
  struct kvp_device_op ops[3][fill_step_ops + 1];
  struct kvp_error error = {0};
  struct cuda_bench bench;
  cuda_bench_init(&bench);
  for (int i = 0; i < 3; i++) {
    fill_step(&bench, ops[i]);
  }
  inject("kvp_cuda_signal_launch:2");
  assert_true(cuda_bench_launch(&bench, 0, ops[0], fill_step_ops));
  assert_true(cuda_bench_launch(&bench, 1, ops[1], fill_step_ops));
  assert_false(cuda_bench_launch(&bench, 0, ops[2], fill_step_ops));
  assert_int_equal(bench.device->backend->check(bench.device, &error), KVP_OK);
  assert_false(cuda_bench_has_ended(&bench, 0));
  assert_false(cuda_bench_has_ended(&bench, 1));
  inject(NULL);
  assert_int_equal(bench.device->backend->check(bench.device, &error), KVP_OK);
  for (int queue = 0; queue < 2; queue++) {
    cuda_bench_collect(&bench, queue, ops[queue]);
    assert_int_equal(ops[queue][1].counts.bytes_written, 3 * fill_bytes);
  }
  assert_true(cuda_bench_launch(&bench, 0, ops[2], fill_step_ops));
  cuda_bench_collect(&bench, 0, ops[2]);
  cuda_bench_deinit(&bench);
}

/* An open device makes no stream any more: more steps than it has streams. */
static void test_streams_are_there(void **state) {
  (void)state;
  struct cuda_bench bench;
  cuda_bench_init(&bench);
  inject("cudaStreamCreateWithFlags:2");
  for (int queue = 0; queue < cuda_bench_queue_count; queue++) {
    struct kvp_device_op ops[fill_step_ops + 1];
    fill_step(&bench, ops);
    assert_true(cuda_bench_launch(&bench, queue, ops, fill_step_ops));
    cuda_bench_collect(&bench, queue, ops);
  }
  inject(NULL);
  cuda_bench_deinit(&bench);
}

/* An error that should not be, after which the context answers nothing else. */
static void test_bug_that_stays(void **state) {
  (void)state;
  struct kvp_device_op ops[fill_step_ops + 1];
  struct kvp_error error = {0};
  struct cuda_bench bench;
  cuda_bench_init(&bench);
  fill_step(&bench, ops);
  inject("cudaMemset2DAsync:9,cudaStreamQuery:9");
  assert_true(cuda_bench_launch(&bench, 0, ops, fill_step_ops));
  assert_int_equal(bench.device->backend->check(bench.device, &error), KVP_DEVICE_LOST);
  assert_text(&error, "a launch");
  inject(NULL);
  cuda_bench_deinit(&bench);
}

/* ---- the end ---- */

/* Nothing that needs the context is tried any more, and its memory is what was known last. */
static void assert_lost_calls(struct cuda_bench *bench) {
  struct kvp_device *device = bench->device;
  struct kvp_device_description description = {0};
  struct kvp_memory *memory = NULL;
  struct kvp_error error = {0};
  void *seen = NULL;
  const uint64_t bytes = 4096;
  int fd = -1;
  assert_int_equal(device->backend->memory_create(device, "late", bytes, &fd, &memory, &error), KVP_DEVICE_LOST);
  assert_text(&error, "cudaStreamQuery");
  assert_int_equal(fd, -1);
  error = (struct kvp_error){0};
  assert_int_equal(device->backend->memory_import(device, bytes, &bench->fd, &bytes, 1, &memory, &error),
                   KVP_DEVICE_LOST);
  assert_text(&error, "700");
  error = (struct kvp_error){0};
  assert_int_equal(device->backend->host_register(device, bench->timelines, 4096, false, &seen, &error),
                   KVP_DEVICE_LOST);
  assert_text(&error, "is lost");
  device->backend->describe(device, &description);
  assert_int_equal(description.memory_bytes, 1 << 30);
}

/* Launches whose step never ends, a check that says why, and a way out that waits for nothing. */
static void test_lost_context(void **state) {
  (void)state;
  struct kvp_error error = {0};
  struct cuda_bench bench;
  static struct kvp_device_op ops[2];
  cuda_bench_init(&bench);
  assert_int_equal(bench.device->backend->check(bench.device, &error), KVP_OK);
  fake_cuda_fault();
  assert_true(cuda_bench_launch(&bench, 0, ops, 0));
  while (bench.device->backend->check(bench.device, &error) == KVP_OK) {
    kvp_cpu_relax();
  }
  assert_int_equal(error.status, KVP_DEVICE_LOST);
  assert_non_null(strstr(error.text, "700"));
  assert_true(cuda_bench_launch(&bench, 1, ops, 0));
  assert_lost_calls(&bench);
  cuda_bench_deinit(&bench);
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

/* Memory that is not there for a step is that step's error: the program goes on. */
static void test_executor_survives(void **state) {
  (void)state;
  const struct exec_harness_options options = {.ring = exec_harness_defaults.ring, .device = "cuda:1"};
  const uint64_t rows[] = {3, 1, 3};
  const enum kvp_completion_kind ends[] = {KVP_COMPLETION_FAILED, KVP_COMPLETION_DONE, KVP_COMPLETION_FAILED};
  struct exec_harness link;
  struct step_encoder encoder;
  uint32_t bytes = 0;
  int fd = -1;
  assert_int_equal(setenv("KVPOOL_TEST_EXEC", FAKE_CUDA_EXEC, 1), 0);
  inject("cudaMemset2DAsync:2");
  assert_int_equal(exec_harness_start(&link, &options).status, KVP_OK);
  inject(NULL);
  assert_int_equal(exec_harness_memory_create(&link, 1, 1 << 20, &fd).status, KVP_OK);
  assert_int_equal(exec_harness_buffer_attach(&link, 1, 1, 1 << 20, 5).status, KVP_OK);
  for (uint64_t i = 0; i < 3; i++) {
    step_encoder_init(&encoder, 1, 5, 1);
    step_encoder_op(&encoder, KVP_OP_BUFFER_FILL)->source = step_view(1, 0, rows[i], 64, 128);
    uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
    assert_true(exec_harness_post(&link, KVP_COMMAND_STEP, i + 1, encoded, bytes));
    assert_int_equal(exec_harness_take(&link).kind, KVP_COMPLETION_ACCEPTED);
    struct exec_completion end = exec_harness_take(&link);
    assert_int_equal(end.kind, ends[i]);
    if (end.kind == KVP_COMPLETION_FAILED) {
      struct kvp_error error;
      assert_int_equal(end.payload_bytes, sizeof error);
      memcpy(&error, end.payload, sizeof error);
      assert_int_equal(error.status, KVP_OUT_OF_MEMORY);
      assert_text(&error, "device op 0 of 1");
    }
    free(end.payload);
    free(encoded);
    step_encoder_deinit(&encoder);
  }
  exec_harness_stop(&link);
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
      cmocka_unit_test(test_busy_device_names_processes),
      cmocka_unit_test(test_refused_launch),
      cmocka_unit_test(test_refused_signal),
      cmocka_unit_test(test_streams_are_there),
      cmocka_unit_test(test_bug_that_stays),
      cmocka_unit_test(test_executor_survives),
      cmocka_unit_test(test_lost_executor),
      cmocka_unit_test(test_lost_context), /* last: nothing works afterwards */
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
