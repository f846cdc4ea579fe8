/* Memory that workers bring to a GPU, on a CUDA in host memory: where ops find it, what is refused and how, and that nothing
 * stays behind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/attach_wire.h"
#include "tests/unit/cuda_bench.h"
#include "tests/unit/fake_cuda.h"
#include "tests/unit/fake_cuda_handle.h"

enum { watchdog_seconds = 300, page_bytes = 4096 };

static int chunk_new(const char *name, uint64_t bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  assert_true(fd >= 0);
  assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
  return fd;
}

static uint8_t byte_at(int fd, uint64_t offset) {
  uint8_t byte = 0;
  assert_int_equal(pread(fd, &byte, 1, (off_t)offset), 1);
  return byte;
}

static struct kvp_control_open by_descriptor(uint64_t allocation_bytes, uint64_t offset_bytes, uint64_t bytes) {
  return (struct kvp_control_open){.memory_id = 7,
                                   .kind = KVP_IMPORT_VMM,
                                   .allocation_bytes = allocation_bytes,
                                   .offset_bytes = offset_bytes,
                                   .bytes = bytes};
}

static struct kvp_control_open by_handle(const struct fake_cuda_handle *handle, uint64_t offset_bytes,
                                         uint64_t bytes) {
  struct kvp_control_open request = {.memory_id = 8,
                                     .kind = KVP_IMPORT_IPC_HANDLE,
                                     .allocation_bytes = UINT64_C(1) << 40, /* as large as one likes to say */
                                     .offset_bytes = offset_bytes,
                                     .bytes = bytes};
  memcpy(request.ipc_handle, handle, sizeof request.ipc_handle);
  return request;
}

static struct kvp_memory *opened(struct kvp_device *device, const struct kvp_control_open *request, int fd) {
  struct kvp_memory *memory = NULL;
  struct kvp_error error = {0};
  if (device->backend->memory_open(device, request, fd, &memory, &error) != KVP_OK) {
    fail_msg("%s", error.text);
  }
  return memory;
}

static void assert_held(const struct fake_cuda_state *before, uint64_t mapped_bytes, uint32_t ipc_allocations) {
  struct fake_cuda_state now;
  fake_cuda_look(&now);
  assert_int_equal(now.mapped_bytes - before->mapped_bytes, mapped_bytes);
  assert_int_equal(now.ipc_allocations - before->ipc_allocations, ipc_allocations);
  assert_int_equal(now.handles, before->handles);
  if (mapped_bytes == 0) {
    assert_int_equal(now.reserved_bytes, before->reserved_bytes);
  }
}

/* It is refused, nothing of it is left, and the device goes on. */
static void assert_refused(struct kvp_device *device, const struct kvp_control_open *request, int fd,
                           enum kvp_status status, const char *text) {
  struct kvp_memory *memory = NULL;
  struct kvp_error error = {0};
  struct fake_cuda_state before;
  fake_cuda_look(&before);
  assert_int_equal(device->backend->memory_open(device, request, fd, &memory, &error), status);
  assert_int_equal(unsetenv("FAKE_CUDA_ERROR"), 0);
  assert_null(memory);
  assert_int_equal(error.status, status);
  if (strstr(error.text, text) == NULL) {
    fail_msg("'%s' is not in: %s", text, error.text);
  }
  assert_held(&before, 0, 0);
  assert_int_equal(device->backend->check(device, &error), KVP_OK);
}

static void inject(const char *errors) {
  assert_int_equal(setenv("FAKE_CUDA_ERROR", errors, 1), 0);
}

/* ---- virtual memory ---- */

static void test_descriptor(void **state) {
  (void)state;
  enum { bytes = 3 * page_bytes, offset = page_bytes + 16, length = 100 };
  struct cuda_bench bench;
  struct fake_cuda_state before;
  struct kvp_device_op ops[2];
  cuda_bench_init(&bench);
  fake_cuda_look(&before);
  const int fd = chunk_new("fake-cuda:0", bytes), copy = dup(fd);
  const struct kvp_control_open request = by_descriptor(bytes, offset, length);
  struct kvp_memory *memory = opened(bench.device, &request, fd);
  assert_int_equal(memory->bytes, length);
  assert_held(&before, bytes, 0);
  assert_int_equal(close(fd), 0); /* the mapping holds it */
  ops[0] = cuda_bench_transfer(KVP_DEVICE_FILL, memory->base, length, 1, length, NULL);
  assert_true(cuda_bench_launch(&bench, 0, ops, 1));
  cuda_bench_collect(&bench, 0, ops);
  assert_int_equal(byte_at(copy, offset - 1), 0);
  assert_int_equal(byte_at(copy, offset), 0x42);
  assert_int_equal(byte_at(copy, offset + length - 1), 0x42);
  assert_int_equal(byte_at(copy, offset + length), 0);
  bench.device->backend->memory_destroy(bench.device, memory);
  assert_held(&before, 0, 0);
  assert_int_equal(close(copy), 0);
  cuda_bench_deinit(&bench);
}

static void test_refused_descriptors(void **state) {
  (void)state;
  enum { bytes = 2 * page_bytes };
  struct kvp_device *device = cuda_device_open("cuda:0");
  int pipe_fds[2];
  assert_int_equal(pipe(pipe_fds), 0);
  const int ours = chunk_new("fake-cuda:0", bytes), other = chunk_new("fake-cuda:1", bytes),
            host = chunk_new("fake-cuda:host", bytes), plain = chunk_new("plain", bytes), closed = dup(plain);
  assert_int_equal(close(closed), 0);
  const struct {
    const char *text;
    uint64_t allocation_bytes;
    int fd;
    enum kvp_status status;
  } cases[] = {
      {"memory 7: its descriptor is not taken: cuMemImportFromShareableHandle", bytes, plain, KVP_INVALID_ARGUMENT},
      {"cuMemImportFromShareableHandle", bytes, pipe_fds[0], KVP_INVALID_ARGUMENT},
      {"cuMemImportFromShareableHandle", bytes, closed, KVP_INVALID_ARGUMENT},
      {"memory of GPU 1, this device is GPU 0", bytes, other, KVP_WRONG_DEVICE},
      {"lies in no GPU (type 1, location type 3)", bytes, host, KVP_INVALID_ARGUMENT},
      {"12288 bytes of its descriptor's allocation can't be mapped", bytes + page_bytes, ours, KVP_INVALID_ARGUMENT},
      {"an allocation of 8092 bytes is no multiple of 4096", bytes - 100, ours, KVP_INVALID_ARGUMENT},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const struct kvp_control_open request = by_descriptor(cases[i].allocation_bytes, 0, 64);
    assert_refused(device, &request, cases[i].fd, cases[i].status, cases[i].text);
  }
  struct kvp_control_open request = by_descriptor(bytes, 0, bytes);
  const uint32_t kinds[] = {KVP_IMPORT_MEMFD, 77};
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    request.kind = kinds[i];
    assert_refused(device, &request, ours, KVP_UNIMPLEMENTED, "descriptors of its virtual memory");
  }
  request.kind = KVP_IMPORT_VMM;
  device->backend->memory_destroy(device, opened(device, &request, ours)); /* that one was fine all the time */
  const int fds[] = {ours, other, host, plain, pipe_fds[0], pipe_fds[1]};
  for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
    assert_int_equal(close(fds[i]), 0);
  }
  cuda_device_end(device);
}

/* Whatever a driver says to nonsense, it is the worker's refusal: codes that mean a lost context elsewhere, too. */
static const struct {
  int code;
  enum kvp_status status;
} said[] = {{1, KVP_INVALID_ARGUMENT},   {2, KVP_OUT_OF_MEMORY},      {101, KVP_WRONG_DEVICE},
            {201, KVP_INVALID_ARGUMENT}, {205, KVP_INVALID_ARGUMENT}, {208, KVP_INVALID_ARGUMENT},
            {217, KVP_WRONG_DEVICE},     {304, KVP_INVALID_ARGUMENT}, {400, KVP_INVALID_ARGUMENT},
            {711, KVP_WRONG_DEVICE},     {719, KVP_INVALID_ARGUMENT}, {800, KVP_INVALID_ARGUMENT},
            {801, KVP_UNIMPLEMENTED},    {999, KVP_INVALID_ARGUMENT}};

/* not_supported: what 801 comes to. */
static void assert_refused_by_each(struct kvp_device *device, const struct kvp_control_open *request, int fd,
                                   const char *const *calls, size_t count, enum kvp_status not_supported) {
  for (size_t call = 0; call < count; call++) {
    for (size_t i = 0; i < sizeof said / sizeof said[0]; i++) {
      char injected[100], number[20];
      (void)snprintf(injected, sizeof injected, "%s:%d", calls[call], said[i].code);
      (void)snprintf(number, sizeof number, "(%d)", said[i].code);
      inject(injected);
      assert_refused(device, request, fd, said[i].code == 801 ? not_supported : said[i].status, number);
    }
  }
}

static void test_descriptors_that_drivers_refuse(void **state) {
  (void)state;
  const char *const calls[] = {"cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle"};
  const char *const map_calls[] = {"cuMemMap", "cuMemSetAccess"};
  struct kvp_device *device = cuda_device_open("cuda:1");
  const int fd = chunk_new("fake-cuda:1", page_bytes);
  const struct kvp_control_open request = by_descriptor(page_bytes, 0, page_bytes);
  assert_refused_by_each(device, &request, fd, calls, sizeof calls / sizeof calls[0], KVP_UNIMPLEMENTED);
  assert_refused_by_each(device, &request, fd, map_calls, sizeof map_calls / sizeof map_calls[0],
                         KVP_INVALID_ARGUMENT); /* not of that size */
  inject("cuMemAddressReserve:2");
  assert_refused(device, &request, fd, KVP_OUT_OF_MEMORY, "cuMemAddressReserve");
  assert_int_equal(close(fd), 0);
  cuda_device_end(device);
}

/* ---- IPC handles ---- */

static void test_handles(void **state) {
  (void)state;
  enum { block = 4 * page_bytes, lead = 512, middle = 2 * page_bytes };
  struct cuda_bench bench;
  struct fake_cuda_state before;
  struct kvp_device_op ops[2];
  cuda_bench_init(&bench);
  struct kvp_device *device = bench.device;
  fake_cuda_look(&before);
  const int fd = chunk_new("a worker's", block), other_fd = chunk_new("another one", block);
  struct fake_cuda_handle handle = fake_cuda_handle_of(fd, block, 0), other = fake_cuda_handle_of(other_fd, block, 0);
  handle.lead_bytes = lead; /* a small allocation inside its block */
  struct kvp_control_open request = by_handle(&handle, 0, 64);
  struct kvp_memory *first = opened(device, &request, -1);
  request = by_handle(&handle, middle, block - lead - middle); /* to the last byte */
  struct kvp_memory *second = opened(device, &request, -1);
  assert_held(&before, 0, 1);
  request = by_handle(&other, 0, block);
  struct kvp_memory *third = opened(device, &request, -1);
  assert_held(&before, 0, 2);
  assert_ptr_equal(second->base, first->base + middle);

  first->base[0] = 0x11;
  device->backend->memory_destroy(device, first);
  assert_held(&before, 0, 2);
  ops[0] = cuda_bench_transfer(KVP_DEVICE_FILL, second->base, 64, 1, 64, NULL);
  assert_true(cuda_bench_launch(&bench, 0, ops, 1));
  cuda_bench_collect(&bench, 0, ops);
  assert_int_equal(byte_at(fd, lead - 1), 0);
  assert_int_equal(byte_at(fd, lead), 0x11);
  assert_int_equal(byte_at(fd, lead + middle - 1), 0);
  assert_int_equal(byte_at(fd, lead + middle), 0x42);
  second->base[second->bytes - 1] = 0x22;
  assert_int_equal(byte_at(fd, block - 1), 0x22);
  third->base[block - 1] = 0x33;
  assert_int_equal(byte_at(other_fd, block - 1), 0x33);

  device->backend->memory_destroy(device, second);
  assert_held(&before, 0, 1);
  request = by_handle(&handle, 0, 64);
  first = opened(device, &request, -1); /* anew */
  assert_int_equal(first->base[0], 0x11);
  assert_held(&before, 0, 2);
  device->backend->memory_destroy(device, third);
  device->backend->memory_destroy(device, first);
  assert_held(&before, 0, 0);
  assert_int_equal(close(fd), 0);
  assert_int_equal(close(other_fd), 0);
  cuda_bench_deinit(&bench);
}

/* The handle of a process that is gone. */
static struct fake_cuda_handle orphan(uint64_t bytes) {
  struct fake_cuda_handle handle = fake_cuda_handle_of(0, bytes, 0);
  const pid_t child = fork();
  if (child == 0) {
    _exit(0);
  }
  assert_int_equal(waitpid(child, NULL, 0), child);
  handle.holder = child;
  return handle;
}

static void test_refused_handles(void **state) {
  (void)state;
  enum { block = 4 * page_bytes, lead = 512, left = block - lead };
  struct kvp_device *device = cuda_device_open("cuda:0");
  const int fd = chunk_new("a worker's", block);
  struct fake_cuda_handle handle = fake_cuda_handle_of(fd, block, 0), own = handle, elsewhere = handle, garbage,
                          gone = orphan(block);
  handle.lead_bytes = lead;
  own.owner = (int32_t)getpid();
  elsewhere.device = 1;
  for (size_t i = 0; i < sizeof garbage; i++) {
    ((uint8_t *)&garbage)[i] = (uint8_t)(i * 37 + 11);
  }
  const struct {
    const struct fake_cuda_handle *handle;
    uint64_t offset_bytes, bytes;
    enum kvp_status status;
    const char *text;
  } cases[] = {
      {&handle, 0, left + 1, KVP_OUT_OF_RANGE,
       "memory 8: 15873 bytes from 0 on are not inside its allocation, which has 15872"},
      {&handle, left, 16, KVP_OUT_OF_RANGE, "16 bytes from 15872 on"},
      {&handle, left + 16, 16, KVP_OUT_OF_RANGE, "from 15888 on"},
      {&handle, 64, UINT64_MAX - 32, KVP_OUT_OF_RANGE, "which has 15872"},
      {&handle, UINT64_MAX - 15, 32, KVP_OUT_OF_RANGE, "which has 15872"},
      {&garbage, 0, 64, KVP_INVALID_ARGUMENT, "memory 8: its IPC handle can't be opened: cuIpcOpenMemHandle"},
      {&own, 0, 64, KVP_INVALID_ARGUMENT, "(201)"},
      {&gone, 0, 64, KVP_INVALID_ARGUMENT, "(400)"},
      {&elsewhere, 0, 64, KVP_WRONG_DEVICE, "its IPC handle is of GPU 1, this device is GPU 0"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const struct kvp_control_open request = by_handle(cases[i].handle, cases[i].offset_bytes, cases[i].bytes);
    assert_refused(device, &request, -1, cases[i].status, cases[i].text);
  }
  /* Bounds that are refused don't close what another memory uses. */
  const struct kvp_control_open good = by_handle(&handle, 0, left), bad = by_handle(&handle, 0, left + 1);
  struct kvp_memory *memory = opened(device, &good, -1);
  assert_refused(device, &bad, -1, KVP_OUT_OF_RANGE, "15873 bytes");
  memory->base[left - 1] = 0x44;
  assert_int_equal(byte_at(fd, block - 1), 0x44);
  device->backend->memory_destroy(device, memory);
  assert_int_equal(close(fd), 0);
  cuda_device_end(device);
}

static void test_handles_that_drivers_refuse(void **state) {
  (void)state;
  const char *const calls[] = {"cuIpcOpenMemHandle", "cuMemGetAddressRange"};
  struct kvp_device *device = cuda_device_open("cuda:0");
  const int fd = chunk_new("a worker's", page_bytes);
  const struct fake_cuda_handle handle = fake_cuda_handle_of(fd, page_bytes, 0);
  const struct kvp_control_open request = by_handle(&handle, 0, page_bytes);
  assert_refused_by_each(device, &request, -1, calls, sizeof calls / sizeof calls[0], KVP_UNIMPLEMENTED);
  inject("cuPointerGetAttribute:1"); /* a driver that doesn't tell whose it is has opened it all the same */
  struct kvp_memory *memory = opened(device, &request, -1);
  assert_int_equal(unsetenv("FAKE_CUDA_ERROR"), 0);
  device->backend->memory_destroy(device, memory);
  assert_int_equal(close(fd), 0);
  cuda_device_end(device);
}

/* ---- the end ---- */

/* A handle that does cost the context: what is open is forgotten, and no driver is asked any more. */
static void test_a_context_lost_by_a_handle(void **state) {
  (void)state;
  struct kvp_error error = {0};
  struct kvp_memory *memory = NULL, *other = NULL;
  struct kvp_device *device = cuda_device_open("cuda:0");
  const int fd = chunk_new("a worker's", page_bytes);
  struct fake_cuda_handle handle = fake_cuda_handle_of(fd, page_bytes, 0);
  struct kvp_control_open request = by_handle(&handle, 0, page_bytes);
  memory = opened(device, &request, -1);
  handle.loses_context = fake_cuda_handle_loses;
  request = by_handle(&handle, 0, page_bytes);
  assert_int_equal(device->backend->memory_open(device, &request, -1, &other, &error), KVP_DEVICE_LOST);
  assert_non_null(strstr(error.text, "cuIpcOpenMemHandle"));
  assert_int_equal(device->backend->check(device, &error), KVP_DEVICE_LOST);
  assert_int_equal(device->backend->memory_open(device, &request, -1, &other, &error), KVP_DEVICE_LOST);
  assert_non_null(strstr(error.text, "is lost"));
  assert_null(other);
  device->backend->memory_destroy(device, memory);
  struct fake_cuda_state now;
  fake_cuda_look(&now);
  assert_int_equal(now.ipc_allocations, 1); /* not closed: its context is gone */
  assert_int_equal(close(fd), 0);
  cuda_device_end(device);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_descriptor),
      cmocka_unit_test(test_refused_descriptors),
      cmocka_unit_test(test_descriptors_that_drivers_refuse),
      cmocka_unit_test(test_handles),
      cmocka_unit_test(test_refused_handles),
      cmocka_unit_test(test_handles_that_drivers_refuse),
      cmocka_unit_test(test_a_context_lost_by_a_handle), /* last: nothing works afterwards */
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
