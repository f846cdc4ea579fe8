/* Connection, pools, sessions, blocks and buffers of libkvpool against a kvpoold of its own. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/client/check.h"
#include "tests/client/process.h"

static struct process daemon_process;
static kvpool_client *client;
static kvpool_pool *pool;
static kvpool_error error;

static int setup(void **state) {
  (void)state;
  process_init(&daemon_process);
  process_start_daemon(&daemon_process);
  const kvpool_connect_options options = {.size_bytes = sizeof options, .wait_until_serving = true};
  if (kvpool_client_connect(daemon_process.socket, &options, &client, &error) != KVPOOL_OK ||
      pool_wait(client, &pool, &error) != KVPOOL_OK) {
    (void)fprintf(stderr, "setup: %s\n", error.text);
    process_cleanup();
    return -1;
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(client);
  process_stop(&daemon_process);
  process_deinit(&daemon_process);
  return 0;
}

static void test_names(void **state) {
  (void)state;
  char version[32];
  (void)snprintf(version, sizeof version, "%d.%d.%d", KVPOOL_VERSION_MAJOR, KVPOOL_VERSION_MINOR,
                 KVPOOL_VERSION_PATCH);
  assert_string_equal(kvpool_version(), version);
  assert_string_equal(kvpool_status_name(KVPOOL_OUT_OF_RANGE), "out_of_range");
  assert_string_equal(kvpool_status_name(KVPOOL_DISCONNECTED), "disconnected");
  assert_string_equal(kvpool_status_name(KVPOOL_NO_MEMORY), "no_memory");
  assert_string_equal(kvpool_status_name((kvpool_status)31), "unknown");
}

static void test_connect(void **state) {
  (void)state;
  kvpool_client *other = NULL;
  char target[128];
  assert_fails(kvpool_client_connect("/nonexistent/socket", NULL, &other, &error), KVPOOL_DISCONNECTED,
               "/nonexistent/socket: No such file");
  assert_null(other);
  memset(target, 'a', sizeof target - 1);
  target[sizeof target - 1] = '\0';
  assert_fails(kvpool_client_connect(target, NULL, &other, &error), KVPOOL_INVALID_ARGUMENT, "127");
  assert_fails(kvpool_client_connect("unix:", NULL, &other, &error), KVPOOL_INVALID_ARGUMENT, "1 to 107");
  const kvpool_connect_options small = {.size_bytes = 8};
  assert_fails(kvpool_client_connect(daemon_process.socket, &small, &other, &error), KVPOOL_INVALID_ARGUMENT,
               "size_bytes is 8");
  /* Waiting for a daemon that doesn't come ends with why. */
  const kvpool_connect_options short_wait = {
      .size_bytes = sizeof short_wait, .timeout_ms = 100, .wait_until_serving = true};
  assert_fails(kvpool_client_connect("/nonexistent/socket", &short_wait, &other, &error), KVPOOL_DISCONNECTED,
               "No such file");
  assert_int_equal(kvpool_client_connect("/nonexistent/socket", NULL, &other, NULL), KVPOOL_DISCONNECTED);

  (void)snprintf(target, sizeof target, "unix:%s", daemon_process.socket);
  assert_ok(kvpool_client_connect(target, NULL, &other, &error));
  kvpool_client_destroy(other);
  assert_int_equal(setenv("KVPOOLD_SOCKET", daemon_process.socket, 1), 0);
  assert_ok(kvpool_client_connect(NULL, NULL, &other, &error));
  assert_int_equal(unsetenv("KVPOOLD_SOCKET"), 0);
  kvpool_client_destroy(other);
  kvpool_client_destroy(NULL);
}

static void test_server_info(void **state) {
  (void)state;
  kvpool_server_info *info;
  assert_ok(kvpool_server_info_get(client, &info, &error));
  assert_string_equal(kvpool_server_info_version(info), kvpool_version());
  assert_int_equal(kvpool_server_info_protocol_version(info), 1);
  assert_int_equal(kvpool_server_info_pid(info), daemon_process.pid);
  assert_true(kvpool_server_info_started_unix_ns(info) > 1600000000ULL * 1000000000);
  kvpool_caller_info caller;
  assert_true(kvpool_server_info_caller(info, &caller));
  assert_int_equal(caller.uid, geteuid());
  assert_int_equal(caller.pid, getpid());
  assert_true(caller.is_operator); /* the daemon is a child of ours */
  assert_int_equal(kvpool_server_info_device_count(info), 1);
  const kvpool_device_info *device = kvpool_server_info_device(info, 0);
  assert_string_equal(device->name, "host:0");
  assert_int_equal(device->state, KVPOOL_DEVICE_SERVING);
  assert_int_equal(device->restarts, 0);
  assert_int_equal(device->memory_limit_bytes, 1 << 30);
  assert_true(device->pool_bytes > 0 && device->description[0] != '\0');
  assert_int_equal(kill((pid_t)device->executor_pid, 0), 0);
  assert_int_equal(kvpool_server_info_format_count(info), 6);
  for (size_t i = 0; i < kvpool_server_info_format_count(info); i++) {
    const kvpool_format_info *format = kvpool_server_info_format(info, i);
    assert_int_equal(format->bytes_per_token, format->data_bytes + format->scale_bytes);
    if (strcmp(format->name, "v41") == 0) {
      assert_string_equal(format->quantized_dtype, "e4m3");
      assert_string_equal(format->scale_format, "ue8m0");
      assert_int_equal(format->bytes_per_token, 528);
      assert_int_equal(format->loaded_row_bytes, 1024);
      assert_true(format->dequantize_on_load);
    }
  }
  kvpool_server_info_destroy(info);
  kvpool_server_info_destroy(NULL);
}

static void test_pool_describe(void **state) {
  (void)state;
  assert_string_equal(kvpool_pool_name(pool), "main");
  assert_true(kvpool_pool_id(pool) > 0);
  assert_int_equal(kvpool_pool_get_kind(pool), KVPOOL_POOL_PAGED);
  assert_int_equal(kvpool_pool_block_size(pool), 64);
  assert_int_equal(kvpool_pool_num_blocks(pool), 100);
  assert_int_equal(kvpool_pool_free_blocks(pool), 100);
  assert_int_equal(kvpool_pool_leased_blocks(pool), 0);
  assert_int_equal(kvpool_pool_quarantined_blocks(pool), 0);
  assert_int_equal(kvpool_pool_placement_count(pool), 1);
  assert_string_equal(kvpool_pool_placement(pool, 0), "host:0");
  assert_int_equal(kvpool_pool_region_count(pool), 3);
  assert_int_equal(kvpool_pool_region_find(pool, "index"), 1);
  assert_int_equal(kvpool_pool_region_find(pool, "nothing"), -1);
  const kvpool_region_info *region = kvpool_pool_region(pool, 0);
  assert_string_equal(region->name, "kv");
  assert_string_equal(region->format, "v41");
  assert_string_equal(region->note, "main cache");
  assert_int_equal(region->compression_ratio, 4);
  assert_int_equal(region->num_layers, 2);
  assert_int_equal(region->tokens_per_block, 16);
  assert_int_equal(region->bytes_per_token, 528);
  assert_int_equal(region->data_bytes, 512);
  assert_int_equal(region->scale_bytes, 16);
  assert_true(region->block_stride_bytes >= (uint64_t)16 * 528);
  assert_int_equal(region->layer_stride_bytes, 100 * region->block_stride_bytes);
  assert_int_equal(region->region_bytes, 2 * region->layer_stride_bytes);
  assert_int_equal(kvpool_pool_region(pool, 2)->width, 64);
  uint64_t bytes = 0;
  for (size_t i = 0; i < kvpool_pool_region_count(pool); i++) {
    bytes += kvpool_pool_region(pool, i)->region_bytes;
  }
  assert_int_equal(kvpool_pool_bytes_per_placement(pool), bytes);
  kvpool_pool *other;
  assert_fails(kvpool_pool_open(client, "nothing", &other, &error), KVPOOL_UNKNOWN_POOL, "nothing");
}

static void test_pool_create_delete(void **state) {
  (void)state;
  const kvpool_region_spec regions[] = {{.name = "ring", .format = "v41", .num_layers = 1, .note = "window"}};
  const char *placements[] = {"host:0"};
  kvpool_pool_spec spec = {.name = "second",
                           .kind = KVPOOL_POOL_RING,
                           .block_size = 128,
                           .num_blocks = 4,
                           .placements = placements,
                           .placement_count = 1,
                           .regions = regions,
                           .region_count = 1};
  kvpool_pool *second, *third;
  assert_ok(kvpool_pool_create(client, &spec, &second, &error));
  assert_int_equal(kvpool_pool_get_kind(second), KVPOOL_POOL_RING);
  assert_string_equal(kvpool_pool_region(second, 0)->note, "window");
  assert_string_equal(kvpool_pool_namespace(second), "");
  assert_fails(kvpool_pool_create(client, &spec, &third, &error), KVPOOL_ALREADY_EXISTS, "second");
  spec.name = "third";
  spec.num_blocks = 1 << 20; /* 2^20 * 128 * 528 bytes */
  assert_fails(kvpool_pool_create(client, &spec, &third, &error), KVPOOL_OUT_OF_MEMORY, "host:0");
  spec.num_blocks = 2;
  spec.namespace_name = "not ok";
  assert_fails(kvpool_pool_create(client, &spec, &third, &error), KVPOOL_INVALID_ARGUMENT, "pool namespace");
  spec.namespace_name = "tenant";
  assert_ok(kvpool_pool_create(client, &spec, &third, &error));
  assert_string_equal(kvpool_pool_namespace(third), "tenant");
  kvpool_session *stranger;
  int32_t block;
  assert_ok(kvpool_session_open(client, NULL, &stranger, &error));
  assert_fails(kvpool_blocks_allocate(stranger, third, 1, &block, &error), KVPOOL_PERMISSION_DENIED,
               "pool 'third' is of namespace 'tenant', the session is of 'default'");
  kvpool_session_close(stranger);
  assert_ok(kvpool_pool_delete(third, false, &error));
  kvpool_pool_destroy(third);
  spec.num_blocks = 0;
  assert_fails(kvpool_pool_create(client, &spec, &third, &error), KVPOOL_INVALID_ARGUMENT, "num_blocks");
  spec.region_count = 17;
  assert_fails(kvpool_pool_create(client, &spec, &third, &error), KVPOOL_INVALID_ARGUMENT, "17 regions");
  spec.region_count = 1;
  spec.placement_count = 17;
  assert_fails(kvpool_pool_create(client, &spec, &third, &error), KVPOOL_INVALID_ARGUMENT, "17 placements");
  const char *no_name[] = {NULL};
  spec.placements = no_name;
  spec.placement_count = 1;
  assert_fails(kvpool_pool_create(client, &spec, &third, &error), KVPOOL_INVALID_ARGUMENT, "placements[0]");
  assert_string_equal(error.array, "placements");
  assert_int_equal(error.position, 0);

  kvpool_pool_list *list;
  assert_ok(kvpool_pool_list_get(client, &list, &error));
  assert_int_equal(kvpool_pool_list_count(list), 2);
  assert_string_equal(kvpool_pool_name(kvpool_pool_list_item(list, 0)), "main");
  assert_string_equal(kvpool_pool_name(kvpool_pool_list_item(list, 1)), "second");
  kvpool_pool_list_destroy(list);
  kvpool_pool_list_destroy(NULL);

  kvpool_session *session;
  assert_ok(kvpool_session_open(client, NULL, &session, &error));
  assert_ok(kvpool_blocks_allocate_range(session, second, 2, 2, &error));
  assert_fails(kvpool_pool_delete(second, false, &error), KVPOOL_IN_USE, "2 blocks");
  assert_ok(kvpool_pool_delete(second, true, &error));
  assert_fails(kvpool_pool_refresh(second, &error), KVPOOL_UNKNOWN_POOL, "pool");
  assert_string_equal(kvpool_pool_name(second), "second"); /* still what it was */
  kvpool_pool_destroy(second);
  kvpool_pool_destroy(NULL);
  kvpool_session_close(session);
}

static void test_session(void **state) {
  (void)state;
  const kvpool_session_options options = {
      .size_bytes = sizeof options, .name = "test-0", .namespace_name = "tenant", .blocks_max = 10};
  kvpool_session *session, *other = NULL;
  uint8_t secret[16] = {0}, none[16] = {0};
  assert_ok(kvpool_session_open(client, &options, &session, &error));
  assert_true(kvpool_session_id(session) > 0);
  kvpool_session_secret(session, secret);
  assert_memory_not_equal(secret, none, sizeof secret);
  assert_int_equal(kvpool_session_state(session, &error), KVPOOL_OK);
  kvpool_session_options bad = {.size_bytes = 1};
  assert_fails(kvpool_session_open(client, &bad, &other, &error), KVPOOL_INVALID_ARGUMENT, "size_bytes is 1");
  bad = (kvpool_session_options){.size_bytes = sizeof bad, .name = "not a name"};
  assert_fails(kvpool_session_open(client, &bad, &other, &error), KVPOOL_INVALID_ARGUMENT, "name");
  assert_null(other);
  assert_ok(kvpool_session_open(client, NULL, &other, &error)); /* with the program's name */

  kvpool_session_list *list;
  assert_ok(kvpool_session_list_get(client, &list, &error));
  assert_int_equal(kvpool_session_list_count(list), 2);
  int found = 0;
  for (size_t i = 0; i < 2; i++) {
    const kvpool_session_info *info = kvpool_session_list_item(list, i);
    assert_int_equal(info->peer_pid, getpid());
    assert_int_equal(info->peer_uid, getuid());
    if (info->session_id == kvpool_session_id(session)) {
      assert_string_equal(info->name, "test-0");
      assert_string_equal(info->namespace_name, "tenant");
      found++;
    } else {
      assert_int_equal(info->session_id, kvpool_session_id(other));
      assert_string_equal(info->namespace_name, "default");
    }
  }
  assert_int_equal(found, 1);
  kvpool_session_list_destroy(list);
  kvpool_session_list_destroy(NULL);
  kvpool_session_close(other);
  kvpool_session_close(session);
  kvpool_session_close(NULL);
  assert_ok(kvpool_session_list_get(client, &list, &error));
  assert_int_equal(kvpool_session_list_count(list), 0); /* a close has taken effect when it returns */
  kvpool_session_list_destroy(list);
}

static void test_blocks(void **state) {
  (void)state;
  const kvpool_session_options options = {.size_bytes = sizeof options, .blocks_max = 50};
  kvpool_session *session;
  int32_t blocks[101];
  assert_ok(kvpool_session_open(client, &options, &session, &error));
  uint64_t epoch = kvpool_session_epoch(session);
  assert_ok(kvpool_blocks_allocate_range(session, pool, 90, 5, &error));
  assert_true(kvpool_session_epoch(session) > epoch);
  assert_fails(kvpool_blocks_allocate_range(session, pool, 94, 2, &error), KVPOOL_IN_USE, "94");
  assert_fails(kvpool_blocks_allocate_range(session, pool, 98, 3, &error), KVPOOL_OUT_OF_RANGE, "100");
  assert_ok(kvpool_blocks_allocate(session, pool, 40, blocks, &error));
  for (int i = 0; i < 40; i++) {
    assert_in_range(blocks[i], 0, 99);
    assert_false(blocks[i] >= 90 && blocks[i] < 95);
    for (int j = 0; j < i; j++) {
      assert_int_not_equal(blocks[i], blocks[j]);
    }
  }
  memset(&blocks[40], 0x55, 8);
  assert_fails(kvpool_blocks_allocate(session, pool, 6, &blocks[40], &error), KVPOOL_QUOTA_EXCEEDED, "50");
  assert_int_equal(blocks[40], 0x55555555);

  kvpool_session *greedy;
  assert_ok(kvpool_session_open(client, NULL, &greedy, &error));
  int32_t more[101];
  assert_fails(kvpool_blocks_allocate(greedy, pool, 56, more, &error), KVPOOL_OUT_OF_BLOCKS, "55");
  assert_fails(kvpool_blocks_free(greedy, pool, blocks, 1, &error), KVPOOL_NOT_OWNER, "block");
  assert_string_equal(error.array, "blocks");
  assert_int_equal(error.position, 0);
  assert_int_equal(error.value, blocks[0]);
  assert_ok(kvpool_pool_refresh(pool, &error));
  assert_int_equal(kvpool_pool_free_blocks(pool), 55);
  assert_int_equal(kvpool_pool_leased_blocks(pool), 45);

  kvpool_block_map *map;
  assert_ok(kvpool_block_map_get(client, pool, &map, &error));
  uint32_t next = 0, leased = 0;
  for (size_t i = 0; i < kvpool_block_map_run_count(map); i++) {
    const kvpool_block_run *run = kvpool_block_map_run(map, i);
    assert_int_equal(run->first_block, next);
    assert_true(run->count > 0);
    next += run->count;
    if (run->state == KVPOOL_BLOCK_LEASED) {
      assert_int_equal(run->session_id, kvpool_session_id(session));
      assert_in_range(run->epoch, 1, kvpool_session_epoch(session));
      leased += run->count;
    } else {
      assert_int_equal(run->state, KVPOOL_BLOCK_FREE);
    }
  }
  assert_int_equal(next, 100);
  assert_int_equal(leased, 45);
  kvpool_block_map_destroy(map);
  kvpool_block_map_destroy(NULL);

  assert_ok(kvpool_blocks_free(session, pool, blocks, 40, &error));
  kvpool_session_close(session); /* frees the rest */
  kvpool_session_close(greedy);
  assert_ok(kvpool_pool_refresh(pool, &error));
  assert_int_equal(kvpool_pool_free_blocks(pool), 100);
}

static void test_buffers(void **state) {
  (void)state;
  enum { bytes = (5 << 19) + 48 }; /* two and a half chunks, and a bit */
  kvpool_session *session;
  kvpool_buffer *buffer, *other;
  uint8_t *written = malloc(bytes), *read = malloc(bytes);
  assert_true(written != NULL && read != NULL);
  for (int i = 0; i < bytes; i++) {
    written[i] = (uint8_t)(i * 31 + (i >> 12));
  }
  assert_ok(kvpool_session_open(client, NULL, &session, &error));
  assert_ok(kvpool_buffer_create(session, NULL, bytes, &buffer, &error));
  assert_true(kvpool_buffer_id(buffer) > 0);
  assert_int_equal(kvpool_buffer_bytes(buffer), bytes);
  memset(read, 0x55, bytes);
  assert_ok(kvpool_buffer_read(buffer, 0, read, bytes, &error));
  for (int i = 0; i < bytes; i++) {
    assert_int_equal(read[i], 0); /* new memory is zero */
  }
  assert_ok(kvpool_buffer_write(buffer, 0, written, bytes, &error));
  assert_ok(kvpool_buffer_read(buffer, 0, read, bytes, &error));
  assert_memory_equal(read, written, bytes);
  assert_ok(kvpool_buffer_write(buffer, 100, written, 3, &error));
  assert_ok(kvpool_buffer_read(buffer, 99, read, 5, &error));
  const uint8_t expected[] = {written[99], written[0], written[1], written[2], written[103]};
  assert_memory_equal(read, expected, 5);

  assert_ok(kvpool_buffer_write(buffer, bytes, NULL, 0, &error));
  assert_ok(kvpool_buffer_read(buffer, bytes, NULL, 0, &error));
  assert_fails(kvpool_buffer_write(buffer, bytes - 2, written, 3, &error), KVPOOL_OUT_OF_RANGE, "3 bytes at offset");
  assert_fails(kvpool_buffer_read(buffer, UINT64_MAX, read, 3, &error), KVPOOL_OUT_OF_RANGE, "3 bytes at offset");
  assert_fails(kvpool_buffer_create(session, "host:9", 16, &other, &error), KVPOOL_WRONG_DEVICE, "host:9");
  assert_fails(kvpool_buffer_create(session, "host:0", 0, &other, &error), KVPOOL_INVALID_ARGUMENT, "0 bytes");
  assert_fails(kvpool_buffer_create(session, "host:0", 1ULL << 40, &other, &error), KVPOOL_OUT_OF_MEMORY, "host:0");
  assert_ok(kvpool_buffer_create(session, "host:0", 16, &other, &error));
  assert_ok(kvpool_buffer_release(other, &error));
  assert_ok(kvpool_buffer_release(NULL, &error));

  kvpool_session_close(session);
  /* The handle outlives its session; it only can't do anything any more. */
  assert_fails(kvpool_buffer_read(buffer, 0, read, 1, &error), KVPOOL_UNKNOWN_SESSION, "closed");
  assert_fails(kvpool_buffer_release(buffer, &error), KVPOOL_UNKNOWN_SESSION, "closed");
  free(read);
  free(written);
}

/* 100 tokens of 528 bytes at 16 a block; 1.0, 2.0 and 3.0 are exact in v41. */
static void test_example(void **state) {
  (void)state;
  char command[512], line[256] = "";
  (void)snprintf(command, sizeof command, "%s %s", SCHEDULER_PATH, daemon_process.socket);
  FILE *output = popen(command, "r");
  assert_non_null(output);
  assert_non_null(fgets(line, sizeof line, output));
  assert_int_equal(pclose(output), 0);
  assert_string_equal(line, "100 rows in 7 blocks, 7 segments, 52800 bytes read, first values 3f80 4000 4040\n");
}

/* Many threads on one client, each with a session of its own. */
static void *worker(void *argument) {
  (void)argument;
  kvpool_error why = {0};
  for (int i = 0; i < 20; i++) {
    kvpool_session *session = NULL;
    int32_t blocks[10];
    if (kvpool_session_open(client, NULL, &session, &why) != KVPOOL_OK ||
        kvpool_blocks_allocate(session, pool, 10, blocks, &why) != KVPOOL_OK ||
        kvpool_blocks_free(session, pool, blocks, 10, &why) != KVPOOL_OK) {
      (void)fprintf(stderr, "worker: %s\n", why.text);
      return session;
    }
    kvpool_session_close(session);
  }
  return NULL;
}

static void run_threads(void *(*function)(void *)) {
  pthread_t threads[8];
  for (int i = 0; i < 8; i++) {
    assert_int_equal(pthread_create(&threads[i], NULL, function, NULL), 0);
  }
  for (int i = 0; i < 8; i++) {
    void *failed;
    assert_int_equal(pthread_join(threads[i], &failed), 0);
    assert_null(failed);
  }
}

static void test_threads(void **state) {
  (void)state;
  run_threads(worker);
}

/* Whatever is still there when the client goes; the handles stay safe to give back, in any order. */
static void test_destroy_in_any_order(void **state) {
  (void)state;
  kvpool_client *short_lived;
  kvpool_pool *its_pool;
  kvpool_session *session;
  kvpool_buffer *buffer;
  kvpool_step *step;
  kvpool_queue *queue;
  int32_t block;
  assert_ok(kvpool_client_connect(daemon_process.socket, NULL, &short_lived, &error));
  assert_ok(kvpool_pool_open(short_lived, "main", &its_pool, &error));
  assert_ok(kvpool_session_open(short_lived, NULL, &session, &error));
  assert_ok(kvpool_buffer_create(session, NULL, 4096, &buffer, &error));
  assert_ok(kvpool_step_new(session, &step, &error));
  assert_ok(kvpool_queue_open(session, NULL, NULL, false, &queue, &error));
  kvpool_client_destroy(short_lived);
  assert_fails(kvpool_blocks_allocate(session, its_pool, 1, &block, &error), KVPOOL_UNKNOWN_SESSION, "ended");
  assert_int_not_equal(kvpool_session_state(session, &error), KVPOOL_OK);
  assert_fails(kvpool_pool_refresh(its_pool, &error), KVPOOL_DISCONNECTED, "destroyed");
  kvpool_session_close(session);
  kvpool_queue_close(queue);
  kvpool_pool_destroy(its_pool);
  kvpool_step_destroy(step);
  assert_int_equal(kvpool_buffer_release(buffer, NULL), KVPOOL_UNKNOWN_SESSION);
}

/* Clients that go while their streams are ending, on many threads. */
static void *short_lives(void *argument) {
  (void)argument;
  kvpool_error why = {0};
  for (int i = 0; i < 40; i++) {
    kvpool_client *own;
    kvpool_session *session = NULL;
    kvpool_queue *queue = NULL;
    if (kvpool_client_connect(daemon_process.socket, NULL, &own, &why) != KVPOOL_OK) {
      (void)fprintf(stderr, "short_lives: %s\n", why.text);
      return &daemon_process;
    }
    if (kvpool_session_open(own, NULL, &session, &why) != KVPOOL_OK ||
        kvpool_queue_open(session, NULL, NULL, false, &queue, &why) != KVPOOL_OK) {
      (void)fprintf(stderr, "short_lives: %s\n", why.text);
      return &daemon_process;
    }
    if (i % 2 == 0) {
      kvpool_client_destroy(own);
    }
    kvpool_queue_close(queue);
    kvpool_session_close(session);
    if (i % 2 == 1) {
      kvpool_client_destroy(own);
    }
  }
  return NULL;
}

static void test_short_lives(void **state) {
  (void)state;
  run_threads(short_lives);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_names),
      cmocka_unit_test(test_connect),
      cmocka_unit_test(test_server_info),
      cmocka_unit_test(test_pool_describe),
      cmocka_unit_test(test_pool_create_delete),
      cmocka_unit_test(test_session),
      cmocka_unit_test(test_blocks),
      cmocka_unit_test(test_buffers),
      cmocka_unit_test(test_threads),
      cmocka_unit_test(test_destroy_in_any_order),
      cmocka_unit_test(test_short_lives),
      cmocka_unit_test(test_example),
  };
  int failed = cmocka_run_group_tests_name("libkvpool", tests, setup, teardown);
  process_cleanup();
  return failed;
}
