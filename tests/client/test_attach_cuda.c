/* A worker of a GPU, with a driver of host memory: maps, memory of its own, timelines on streams, and what fails. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/client/check.h"
#include "tests/client/fake_attach.h"
#include "tests/client/fake_worker_cuda.h"

enum { timeout_ms = 60000, kv_bytes = 168960, index_bytes = 84480, allocation_bytes = 65536 };

static struct fake_attach fake;
static kvpool_error error;
static kvpool_attachment *attachment;
static struct fake_worker_cuda_state looked(void) {
  struct fake_worker_cuda_state state;
  fake_worker_cuda_look(&state);
  return state;
}

/* Nothing of ours is left in the driver, and no context on the thread. */
static void expect_nothing_left(void) {
  const struct fake_worker_cuda_state state = looked();
  assert_int_equal(state.reserved_bytes, 0);
  assert_int_equal(state.mapped_bytes, 0);
  assert_int_equal(state.handles, 0);
  assert_int_equal(state.retained[0], 0);
  assert_int_equal(state.retained[1], 0);
  assert_int_equal(state.registered, 0);
  assert_int_equal(state.depth, 0);
}

static int setup(void **state) {
  (void)state;
  fake_start(&fake);
  fake.on_device = true;
  const kvpool_attach_options options = {.size_bytes = sizeof options, .socket = fake.path, .timeout_ms = timeout_ms};
  assert_ok(kvpool_attach(&options, &attachment, &error));
  return 0;
}

static int teardown(void **state) {
  (void)state;
  kvpool_detach(attachment);
  fake_stop(&fake);
  expect_nothing_left();
  return 0;
}

/* A region takes whole granules of 64 KiB. */
static uint64_t granules(uint64_t bytes) {
  return (bytes + 65535) / 65536 * 65536;
}

static void test_map_pool(void **state) {
  (void)state;
  kvpool_pool_map *map;
  kvpool_attachment_info info;
  int32_t type, ordinal;
  kvpool_attachment_info_get(attachment, &info);
  assert_true(info.device_memory);
  assert_string_equal(info.uuid, "GPU-11111111-1111-1111-1111-111111111111");
  kvpool_attachment_dl_device(attachment, &type, &ordinal);
  assert_int_equal(type, 2);
  assert_int_equal(ordinal, 1);
  uint8_t *theirs = mmap(NULL, kv_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fake.region_fds[0], 0);
  theirs[kv_bytes - 1] = 0x5A;

  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error));
  struct fake_worker_cuda_state seen = looked();
  assert_int_equal(seen.access, 1);
  assert_int_equal(seen.access_device, 1);
  assert_int_equal(seen.mapped_bytes, granules(kv_bytes) + granules(index_bytes));
  assert_int_equal(seen.handles, 0);
  assert_int_equal(seen.retained[1], 2); /* a region each */
  assert_int_equal(seen.retained[0], 0);
  assert_int_equal(seen.depth, 0);
  assert_int_equal(((const uint8_t *)kvpool_pool_map_region(map, 0)->base)[kv_bytes - 1], 0x5A);

  /* As an array, which outlives the map. */
  const int64_t shape[] = {10, 64, 1, 4}, strides[] = {8448, 4, 4, 1};
  const kvpool_array array = {.data = (uint8_t *)kvpool_pool_map_region(map, 1)->base + 8192,
                              .ndim = 4,
                              .shape = shape,
                              .strides = strides,
                              .type_code = 1,
                              .type_bits = 8};
  struct {
    void *data;
    int32_t device_type, device_id;
    uint8_t rest[40];
    void (*deleter)(void *);
  } * managed;
  assert_ok(kvpool_pool_map_export(map, &array, false, (void **)&managed, &error));
  assert_int_equal(managed->device_type, 2);
  assert_int_equal(managed->device_id, 1);
  kvpool_pool_map_destroy(map);
  assert_int_equal(looked().mapped_bytes, granules(kv_bytes) + granules(index_bytes));
  managed->deleter(managed);
  expect_nothing_left();

  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ_WRITE, &map, &error));
  assert_int_equal(looked().access, 3);
  ((uint8_t *)kvpool_pool_map_region(map, 0)->base)[3] = 0x33;
  assert_int_equal(theirs[3], 0x33);
  kvpool_pool_map_destroy(map);
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_NOTHING, &map, &error));
  expect_nothing_left();
  kvpool_pool_map_destroy(map);
  (void)munmap(theirs, kv_bytes);
}

static void test_map_fails(void **state) {
  (void)state;
  static const struct {
    const char *function;
    int code;
    kvpool_status status;
    const char *text;
  } failures[] = {
      {"cuDevicePrimaryCtxRetain", 2, KVPOOL_OUT_OF_MEMORY,
       "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY (2), for GPU-1111"},
      {"cuMemAddressReserve", 2, KVPOOL_OUT_OF_MEMORY, "for 168960 bytes"},
      {"cuMemImportFromShareableHandle", 999, KVPOOL_INTERNAL, "a chunk of 196608 bytes at offset 0"},
      {"cuMemMap", 1, KVPOOL_INTERNAL, "cuMemMap: CUDA_ERROR_OF_A_TEST (1)"},
      {"cuMemSetAccess", 801, KVPOOL_UNIMPLEMENTED, "cuMemSetAccess"},
  };
  kvpool_pool_map *map;
  for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
    fake_worker_cuda_fail(failures[i].function, failures[i].code);
    assert_fails(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error), failures[i].status,
                 failures[i].text);
    fake_worker_cuda_fail("", 0);
    expect_nothing_left();
  }
  fake_worker_cuda_devices(1);
  assert_fails(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error), KVPOOL_WRONG_DEVICE,
               "CUDA_VISIBLE_DEVICES");
  fake_worker_cuda_devices(2);
  expect_nothing_left();
}

static void test_buffers(void **state) {
  (void)state;
  kvpool_buffer *buffer;
  assert_ok(kvpool_attachment_create_buffer(attachment, 8192, &buffer, &error));
  assert_int_equal(looked().access, 3);
  memset(kvpool_buffer_data(buffer), 0x21, 8192);
  uint8_t byte = 0;
  assert_int_equal(pread(fake.buffer_fd, &byte, 1, 8191), 1);
  assert_int_equal(byte, 0x21);
  assert_ok(kvpool_buffer_release(buffer, &error));
  expect_nothing_left();
}

static void test_import_malloc(void **state) {
  (void)state;
  uint8_t *memory = fake_worker_cuda_allocate(FAKE_MALLOC, 1);
  kvpool_buffer *buffer;
  assert_ok(kvpool_attachment_import_device(attachment, memory + 4096, 8192, &buffer, &error));
  assert_ptr_equal(kvpool_buffer_data(buffer), memory + 4096);
  assert_int_equal(fake.import.kind, KVP_IMPORT_IPC_HANDLE);
  assert_int_equal(fake.import.allocation_bytes, allocation_bytes);
  assert_int_equal(fake.import.offset_bytes, 4096);
  assert_int_equal(fake.import.bytes, 8192);
  assert_int_equal(fake.imported, -1);
  for (int i = 0; i < kvp_ipc_handle_bytes; i++) {
    assert_int_equal(fake.import.ipc_handle[i], 0x41); /* of the allocation's begin, not of the pointer */
  }
  assert_ok(kvpool_buffer_release(buffer, &error));
  assert_int_equal(fake.released, 6);
  assert_fails(kvpool_attachment_import_device(attachment, memory + 4096, allocation_bytes - 4095, &buffer, &error),
               KVPOOL_OUT_OF_RANGE, "61441 bytes");
  assert_fails(kvpool_attachment_import_device(attachment, memory, 0, &buffer, &error), KVPOOL_OUT_OF_RANGE,
               "0 bytes");
  fake_worker_cuda_fail("cuIpcGetMemHandle", 801);
  assert_fails(kvpool_attachment_import_device(attachment, memory, 16, &buffer, &error), KVPOOL_UNIMPLEMENTED,
               "use a buffer that the daemon makes");
  fake_worker_cuda_fail("", 0);
  expect_nothing_left();
}

static void test_import_vmm(void **state) {
  (void)state;
  uint8_t *memory = fake_worker_cuda_allocate(FAKE_VMM, 1);
  kvpool_buffer *buffer;
  memory[1000] = 0x66;
  for (int i = 0; i < 2; i++) { /* a driver that doesn't tell mappings, too */
    fake_worker_cuda_fail(i == 0 ? "" : "mapping attributes", 1);
    assert_ok(kvpool_attachment_import_device(attachment, memory + 512, 4096, &buffer, &error));
    assert_int_equal(fake.import.kind, KVP_IMPORT_VMM);
    assert_int_equal(fake.import.allocation_bytes, allocation_bytes);
    assert_int_equal(fake.import.offset_bytes, 512);
    uint8_t byte = 0;
    assert_int_equal(pread(fake.imported, &byte, 1, 1000), 1);
    assert_int_equal(byte, 0x66);
    assert_ok(kvpool_buffer_release(buffer, &error));
    expect_nothing_left();
  }
  assert_fails(kvpool_attachment_import_device(attachment, memory + 512, allocation_bytes, &buffer, &error),
               KVPOOL_OUT_OF_RANGE, "piece by piece, use a buffer that the daemon makes");
  fake_worker_cuda_fail("cuMemExportToShareableHandle", 800);
  assert_fails(kvpool_attachment_import_device(attachment, memory, 16, &buffer, &error), KVPOOL_PERMISSION_DENIED,
               "cuMemExportToShareableHandle");
  fake_worker_cuda_fail("", 0);
  expect_nothing_left();

  const int fd = memfd_create("exported", MFD_CLOEXEC);
  assert_ok(kvpool_attachment_import_vmm(attachment, fd, 1 << 21, 4096, 64, NULL, &buffer, &error));
  assert_null(kvpool_buffer_data(buffer));
  assert_int_equal(fake.import.kind, KVP_IMPORT_VMM);
  assert_int_equal(fake.import.allocation_bytes, 1 << 21);
  assert_ok(kvpool_buffer_release(buffer, &error));
  assert_fails(kvpool_attachment_import_vmm(attachment, fd, 4096, 4090, 64, NULL, &buffer, &error),
               KVPOOL_OUT_OF_RANGE, "4096 bytes");
  (void)close(fd);
}

static void test_memory_without_a_handle(void **state) {
  (void)state;
  kvpool_buffer *buffer;
  int local = 0;
  uint8_t *expandable = fake_worker_cuda_allocate(FAKE_VMM_WITHOUT_HANDLE, 1),
          *pool = fake_worker_cuda_allocate(FAKE_POOL_MEMORY, 1);
  uint8_t *elsewhere = fake_worker_cuda_allocate(FAKE_MALLOC, 0);
  assert_fails(kvpool_attachment_import_device(attachment, expandable, 16, &buffer, &error), KVPOOL_UNIMPLEMENTED,
               "expandable segments");
  assert_fails(kvpool_attachment_import_device(attachment, pool, 16, &buffer, &error), KVPOOL_UNIMPLEMENTED,
               "cudaMallocAsync");
  assert_fails(kvpool_attachment_import_device(attachment, elsewhere, 16, &buffer, &error), KVPOOL_WRONG_DEVICE,
               "GPU 0, the attachment's is GPU 1");
  assert_fails(kvpool_attachment_import_device(attachment, &local, 4, &buffer, &error), KVPOOL_INVALID_ARGUMENT,
               "no memory of a GPU");
  expect_nothing_left();
}

static void test_streams(void **state) {
  (void)state;
  int stream;
  uint64_t address, again;
  fake_worker_cuda_fail("cuMemHostRegister", 2);
  assert_fails(kvpool_timeline_device_address(attachment, 0, &address, &error), KVPOOL_OUT_OF_MEMORY, "timelines");
  fake_worker_cuda_fail("cuMemHostGetDevicePointer", 999);
  assert_fails(kvpool_timeline_device_address(attachment, 0, &address, &error), KVPOOL_INTERNAL, "timelines");
  fake_worker_cuda_fail("", 0);
  expect_nothing_left();
  assert_ok(kvpool_timeline_device_address(attachment, 0, &address, &error));
  assert_ok(kvpool_timeline_device_address(attachment, 1023, &again, &error));
  assert_int_equal(again - address, 1023 * 64);
  assert_int_equal(looked().registered, 1);
  assert_ok(kvpool_timeline_stream_signal(attachment, 5, 77, &stream, &error));
  assert_int_equal(atomic_load(&fake.words[5].value), 77);
  assert_ptr_equal(looked().stream, &stream);
  assert_ok(kvpool_timeline_stream_wait(attachment, 600, 3, NULL, &error));
  assert_int_equal(looked().waited_address, address + UINT64_C(600) * 64);
  assert_int_equal(looked().waited_value, 3);
  assert_null(looked().stream);
  assert_fails(kvpool_timeline_stream_signal(attachment, 512, 1, NULL, &error), KVPOOL_OUT_OF_RANGE, "0 to 511");
  assert_fails(kvpool_timeline_stream_signal(attachment, 5, 0, NULL, &error), KVPOOL_OUT_OF_RANGE, "value 0");
  assert_fails(kvpool_timeline_stream_wait(attachment, 1024, 1, NULL, &error), KVPOOL_OUT_OF_RANGE, "word 1024");
  fake_worker_cuda_fail("cuStreamWaitValue64", 801);
  assert_fails(kvpool_timeline_stream_wait(attachment, 5, 1, NULL, &error), KVPOOL_UNIMPLEMENTED, "a wait");
  fake_worker_cuda_fail("", 0);

  /* A successor's words are others; streams that wait for the old ones go on. */
  const struct kvp_timeline_word *old = mmap(NULL, kvp_timeline_bytes, PROT_READ, MAP_SHARED, fake.timelines_fd, 0);
  fake_tell_lost(&fake, true);
  assert_int_equal(kvpool_attachment_state(attachment, &error), KVPOOL_DEVICE_LOST);
  fake_restore(&fake);
  assert_ok(kvpool_attachment_state(attachment, &error));
  assert_int_equal(atomic_load(&old[600].value), KVP_TIMELINE_POISON);
  (void)munmap((void *)old, kvp_timeline_bytes);
  assert_ok(kvpool_timeline_device_address(attachment, 0, &again, &error));
  assert_int_not_equal(again, address);
  assert_int_equal(looked().registered, 2);
}

/* The daemon goes, and nobody would ever write the executor's words again. */
static void test_words_are_poisoned_at_the_end(void **state) {
  (void)state;
  assert_int_equal(atomic_load(&fake.words[1023].value), 0);
  fake_hang_up(&fake);
  const kvpool_completion *completion;
  assert_fails(kvpool_attachment_wait(attachment, timeout_ms, &completion, &error), KVPOOL_DISCONNECTED, "gone");
  assert_int_equal(atomic_load(&fake.words[1023].value), KVP_TIMELINE_POISON);
  assert_int_equal(atomic_load(&fake.words[512].value), KVP_TIMELINE_POISON);
  assert_int_equal(atomic_load(&fake.words[511].value), 0);
}

static void test_a_host_has_none_of_it(void **state) {
  (void)state;
  kvpool_attachment *host;
  kvpool_buffer *buffer;
  uint64_t address;
  int local;
  struct fake_attach other;
  fake_start(&other);
  const kvpool_attach_options options = {.size_bytes = sizeof options, .socket = other.path};
  assert_ok(kvpool_attach(&options, &host, &error));
  assert_fails(kvpool_attachment_import_device(host, &local, 4, &buffer, &error), KVPOOL_WRONG_DEVICE, "host:0");
  assert_fails(kvpool_attachment_import_vmm(host, 0, 4, 0, 4, NULL, &buffer, &error), KVPOOL_WRONG_DEVICE, "host:0");
  assert_fails(kvpool_timeline_device_address(host, 0, &address, &error), KVPOOL_WRONG_DEVICE, "host:0");
  kvpool_detach(host);
  fake_stop(&other);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_map_pool, setup, teardown),
      cmocka_unit_test_setup_teardown(test_map_fails, setup, teardown),
      cmocka_unit_test_setup_teardown(test_buffers, setup, teardown),
      cmocka_unit_test_setup_teardown(test_import_malloc, setup, teardown),
      cmocka_unit_test_setup_teardown(test_import_vmm, setup, teardown),
      cmocka_unit_test_setup_teardown(test_memory_without_a_handle, setup, teardown),
      cmocka_unit_test_setup_teardown(test_streams, setup, teardown),
      cmocka_unit_test_setup_teardown(test_words_are_poisoned_at_the_end, setup, teardown),
      cmocka_unit_test_setup_teardown(test_a_host_has_none_of_it, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
