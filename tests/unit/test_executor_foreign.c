/* Memory that workers bring, on the real executor: how it is opened, what is refused, and buffers that have lost theirs. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/attach_wire.h"
#include "tests/unit/executor_world.h"
#include "tests/unit/fake_cuda_handle.h"

static struct kvp_error memory_open(struct world *world, const struct kvp_control_open *request, int fd) {
  return exec_harness_request(&world->link, KVP_CONTROL_MEMORY_OPEN, request, sizeof *request, &fd, fd >= 0 ? 1 : 0);
}

enum { opened_bytes = 1 << 20, opened_offset = 8192 + 48 };

/* A step writes to all of it, and to nothing around it. fd: -1 of an IPC handle; map: where the allocation is seen here. */
static void opened_memory(struct world *world, uint32_t kind, int fd, const void *handle, const uint8_t *map) {
  enum { memory_id = 70, buffer_id = 170 };
  struct kvp_control_open request = {.memory_id = memory_id,
                                     .kind = kind,
                                     .allocation_bytes = opened_bytes,
                                     .offset_bytes = opened_offset,
                                     .bytes = opened_bytes - opened_offset - 100};
  if (handle != NULL) {
    memcpy(request.ipc_handle, handle, sizeof request.ipc_handle);
  }
  world_assert_ok(memory_open(world, &request, fd));
  assert_int_equal(memory_open(world, &request, fd).status, KVP_ALREADY_EXISTS);
  assert_int_equal(exec_harness_buffer_attach(&world->link, buffer_id, memory_id, request.bytes + 1, session).status,
                   KVP_OUT_OF_RANGE);
  world_assert_ok(exec_harness_buffer_attach(&world->link, buffer_id, memory_id, request.bytes, session));
  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *fill = step_encoder_op(&encoder, KVP_OP_BUFFER_FILL);
  fill->source = step_view(buffer_id, 0, 1, (uint32_t)request.bytes, request.bytes);
  fill->argument = 0x77;
  assert_int_equal(world_run_one(world, &encoder).bytes_written, request.bytes);
  assert_int_equal(map[opened_offset - 1], 0);
  assert_int_equal(map[opened_offset], 0x77);
  assert_int_equal(map[opened_offset + request.bytes - 1], 0x77);
  assert_int_equal(map[opened_offset + request.bytes], 0);
  const struct kvp_control_buffer detach = {.buffer_id = buffer_id};
  world_assert_ok(exec_harness_request(&world->link, KVP_CONTROL_BUFFER_DETACH, &detach, sizeof detach, NULL, 0));
  const struct kvp_control_memory destroy = {.memory_id = memory_id};
  world_assert_ok(exec_harness_request(&world->link, KVP_CONTROL_MEMORY_DESTROY, &destroy, sizeof destroy, NULL, 0));
}

static void test_opened_memory(void **state) {
  (void)state;
  struct world world;
  struct kvp_error error;
  world_init(&world);
  if ((world.link.ready.flags & KVP_READY_DEVICE_FDS) == 0) {
    const int fd = kvp_memory_fd_create("a worker's", opened_bytes, &error);
    uint8_t *map = exec_harness_map(fd, opened_bytes);
    opened_memory(&world, KVP_IMPORT_MEMFD, fd, NULL, map);
    (void)munmap(map, opened_bytes);
    (void)close(fd);
  } else { /* of the CUDA in host memory */
    const uint32_t kinds[] = {KVP_IMPORT_VMM, KVP_IMPORT_IPC_HANDLE};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
      const int fd = memfd_create("fake-cuda:0", MFD_CLOEXEC);
      assert_int_equal(ftruncate(fd, opened_bytes), 0);
      uint8_t *map = exec_harness_map(fd, opened_bytes);
      const struct fake_cuda_handle handle = fake_cuda_handle_of(fd, opened_bytes, 0);
      const bool is_handle = kinds[i] == KVP_IMPORT_IPC_HANDLE;
      opened_memory(&world, kinds[i], is_handle ? -1 : fd, is_handle ? &handle : NULL, map);
      (void)munmap(map, opened_bytes);
      (void)close(fd);
    }
  }
  world_deinit(&world);
}

static void test_opened_memory_refusals(void **state) {
  (void)state;
  enum { bytes = 65536 };
  struct world world;
  struct kvp_error error;
  world_init(&world);
  int fd = kvp_memory_fd_create("a worker's", bytes, &error);
  int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  assert_int_equal(ftruncate(unsealed, bytes), 0);
  const struct {
    uint64_t kind;
    uint64_t allocation_bytes, offset_bytes, bytes;
    int fd;
    enum kvp_status host, cuda;
  } cases[] = {
      {KVP_IMPORT_MEMFD, bytes, 0, bytes + 1, fd, KVP_OUT_OF_RANGE, KVP_OUT_OF_RANGE},
      {KVP_IMPORT_MEMFD, bytes, bytes, 1, fd, KVP_OUT_OF_RANGE, KVP_OUT_OF_RANGE},
      {KVP_IMPORT_MEMFD, bytes, UINT64_MAX - 15, 32, fd, KVP_OUT_OF_RANGE, KVP_OUT_OF_RANGE},
      {KVP_IMPORT_MEMFD, bytes, 16, UINT64_MAX - 15, fd, KVP_OUT_OF_RANGE, KVP_OUT_OF_RANGE},
      {KVP_IMPORT_MEMFD, bytes, 0, 0, fd, KVP_OUT_OF_RANGE, KVP_OUT_OF_RANGE},
      {KVP_IMPORT_MEMFD, 0, 0, 0, fd, KVP_TOO_LARGE, KVP_TOO_LARGE},
      {KVP_IMPORT_MEMFD, bytes, 8, 64, fd, KVP_INVALID_ARGUMENT, KVP_INVALID_ARGUMENT},
      {KVP_IMPORT_MEMFD, 2 * (uint64_t)bytes, 0, bytes, fd, KVP_INVALID_ARGUMENT, KVP_UNIMPLEMENTED},
      {KVP_IMPORT_MEMFD, bytes, 0, bytes, unsealed, KVP_INVALID_ARGUMENT, KVP_UNIMPLEMENTED},
      {KVP_IMPORT_MEMFD, bytes, 0, bytes, -1, KVP_INVALID_ARGUMENT, KVP_INVALID_ARGUMENT},
      {KVP_IMPORT_IPC_HANDLE, bytes, 0, bytes, fd, KVP_INVALID_ARGUMENT, KVP_INVALID_ARGUMENT},
      {KVP_IMPORT_IPC_HANDLE, bytes, 0, bytes, -1, KVP_UNIMPLEMENTED, KVP_INVALID_ARGUMENT},
      {KVP_IMPORT_VMM, bytes, 0, bytes, fd, KVP_UNIMPLEMENTED, KVP_INVALID_ARGUMENT},
      {77, bytes, 0, bytes, fd, KVP_UNIMPLEMENTED, KVP_UNIMPLEMENTED},
  };
  const bool is_host = (world.link.ready.flags & KVP_READY_DEVICE_FDS) == 0;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const struct kvp_control_open request = {.memory_id = 70 + i,
                                             .kind = (uint32_t)cases[i].kind,
                                             .allocation_bytes = cases[i].allocation_bytes,
                                             .offset_bytes = cases[i].offset_bytes,
                                             .bytes = cases[i].bytes};
    error = memory_open(&world, &request, cases[i].fd);
    assert_int_equal(error.status, is_host ? cases[i].host : cases[i].cuda);
    assert_true(error.text[0] != '\0');
  }
  (void)close(unsealed);
  (void)close(fd);
  world_deinit(&world);
}

/* It takes no memory, and steps are told what became of it. */
static void test_lost_buffer(void **state) {
  (void)state;
  enum { lost = 180, gone_memory = 80 };
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  const struct kvp_control_buffer body = {
      .buffer_id = lost, .memory_id = gone_memory, .bytes = 4096, .owner = session, .flags = KVP_BUFFER_LOST};
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_BUFFER_ATTACH, &body, sizeof body, NULL, 0));
  assert_int_equal(exec_harness_request(&world.link, KVP_CONTROL_BUFFER_ATTACH, &body, sizeof body, NULL, 0).status,
                   KVP_ALREADY_EXISTS);
  step_encoder_init(&encoder, 1, session, step_epoch);
  step_encoder_op(&encoder, KVP_OP_BUFFER_FILL)->source = step_view(lost, 0, 1, 64, 64);
  struct kvp_error error = world_refused(&world, &encoder);
  assert_int_equal(error.status, KVP_UNKNOWN_BUFFER);
  assert_int_equal(error.value, lost);
  assert_non_null(strstr(error.text, "buffer 180 is lost"));
  step_encoder_deinit(&encoder);
  step_encoder_init(&encoder, 1, session, step_epoch); /* as an array */
  struct kvp_wire_op *store = world_add_store(&encoder, (int32_t[]){1}, 1);
  store->arrays[0] = step_encoder_buffer_array(&encoder, lost, 0, 4);
  error = world_refused(&world, &encoder);
  assert_int_equal(error.status, KVP_UNKNOWN_BUFFER);
  assert_non_null(strstr(error.text, "buffer 180 is lost"));
  step_encoder_deinit(&encoder);
  const struct kvp_control_buffer detach = {.buffer_id = lost};
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_BUFFER_DETACH, &detach, sizeof detach, NULL, 0));
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_BUFFER_ATTACH, &body, sizeof body, NULL, 0));
  world_deinit(&world); /* with one that is still there */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_opened_memory),
      cmocka_unit_test(test_opened_memory_refusals),
      cmocka_unit_test(test_lost_buffer),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
