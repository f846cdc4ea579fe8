/* What attachments map and share: pools, buffers, timelines; and a daemon's end that says nonsense about them. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/client/check.h"
#include "tests/client/fake_attach.h"

enum { timeout_ms = 60000, page = 4096, memfd_bytes = 3 * page };

static struct fake_attach fake;
static kvpool_error error;
static kvpool_attachment *attachment;

static int setup(void **state) {
  (void)state;
  fake_start(&fake);
  const kvpool_attach_options options = {.size_bytes = sizeof options, .socket = fake.path, .timeout_ms = timeout_ms};
  if (kvpool_attach(&options, &attachment, &error) != KVPOOL_OK) {
    (void)fprintf(stderr, "setup: %s\n", error.text);
    return -1;
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  kvpool_detach(attachment);
  fake_stop(&fake);
  return 0;
}

/* ---- pools ------------------------------------------------------------------------------------------------------
 */

/* The daemon's view of a region's memory. */
static uint8_t *region_memory(int region, size_t bytes) {
  void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fake.region_fds[region], 0);
  assert_true(map != MAP_FAILED);
  return map;
}

static void test_map_pool(void **state) {
  (void)state;
  kvpool_pool_map *map;
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error));
  const kvpool_pool *pool = kvpool_pool_map_pool(map);
  assert_int_equal(kvpool_pool_id(pool), 12);
  assert_string_equal(kvpool_pool_name(pool), "main");
  assert_int_equal(kvpool_pool_get_kind(pool), KVPOOL_POOL_PAGED);
  assert_int_equal(kvpool_pool_block_size(pool), 64);
  assert_int_equal(kvpool_pool_num_blocks(pool), 10);
  assert_int_equal(kvpool_pool_region_count(pool), 2);
  assert_int_equal(kvpool_pool_region_find(pool, "index"), 1);
  assert_int_equal(kvpool_pool_placement_count(pool), 1);
  assert_string_equal(kvpool_pool_placement(pool, 0), "host:0");
  const kvpool_region_info *info = kvpool_pool_region(pool, 0);
  assert_string_equal(info->name, "kv");
  assert_string_equal(info->format, "v41");
  assert_int_equal(info->compression_ratio, 4);
  assert_int_equal(info->bytes_per_token, 528);
  assert_int_equal(info->block_stride_bytes, 8448);
  assert_int_equal(info->region_bytes, 168960);

  const kvpool_mapped_region *kv = kvpool_pool_map_region(map, 0), *index = kvpool_pool_map_region(map, 1);
  assert_int_equal(kv->num_layers, 2);
  assert_int_equal(kv->num_blocks, 10);
  assert_int_equal(kv->tokens_per_block, 16);
  assert_int_equal(kv->layer_stride_bytes, 84480);
  assert_int_equal(kv->block_stride_bytes, 8448);
  assert_true(kv->token_interleaved);
  assert_int_equal(kv->token_stride_bytes, 528);
  assert_int_equal(kv->scale_stride_bytes, 528);
  assert_int_equal(kv->scales_offset_bytes, 512);
  assert_int_equal(kv->memory_bytes, 168960);
  assert_false(index->token_interleaved);
  assert_int_equal(index->data_bytes, 128);
  assert_int_equal(index->scale_bytes, 4);
  assert_int_equal(index->bytes_per_token, 132);
  assert_int_equal(index->token_stride_bytes, 128);
  assert_int_equal(index->scale_stride_bytes, 4);
  assert_int_equal(index->scales_offset_bytes, 8192);

  /* The same memory, each region its own. */
  uint8_t *theirs = region_memory(0, 168960), *their_index = region_memory(1, 84480);
  theirs[168959] = 0x5A;
  their_index[84479] = 0x6B;
  assert_int_equal(((const uint8_t *)kv->base)[168959], 0x5A);
  assert_int_equal(((const uint8_t *)index->base)[84479], 0x6B);
  kvpool_pool_map_destroy(map);

  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ_WRITE, &map, &error));
  ((uint8_t *)kvpool_pool_map_region(map, 0)->base)[7] = 0x77;
  assert_int_equal(theirs[7], 0x77);
  kvpool_pool_map_destroy(map);
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_NOTHING, &map, &error));
  assert_null(kvpool_pool_map_region(map, 0)->base);
  assert_int_equal(kvpool_pool_map_region(map, 0)->memory_bytes, 168960);
  kvpool_pool_map_destroy(map);
  kvpool_pool_map_destroy(NULL);
  assert_fails(kvpool_attachment_map_pool(attachment, "main", (kvpool_map_access)3, &map, &error),
               KVPOOL_INVALID_ARGUMENT, "access 3");
  assert_fails(kvpool_attachment_map_pool(attachment, "other", KVPOOL_MAP_READ, &map, &error), KVPOOL_UNKNOWN_POOL,
               "no such pool");
  (void)munmap(theirs, 168960);
  (void)munmap(their_index, 84480);
}

static void test_write_faults_the_writer(void **state) {
  (void)state;
  kvpool_pool_map *map;
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error));
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    (void)signal(SIGSEGV, SIG_DFL);
    *(volatile uint8_t *)kvpool_pool_map_region(map, 0)->base = 1;
    _exit(0);
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
  assert_int_equal(*(const uint8_t *)kvpool_pool_map_region(map, 0)->base, 0);
  kvpool_pool_map_destroy(map);
}

/* Whether a child of a fork is told that it has no attachment. Its parent's asserts aren't its own. */
static bool is_refused(void) {
  kvpool_pool_map *map;
  kvpool_buffer *buffer;
  return kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error) == KVPOOL_INVALID_ARGUMENT &&
         strstr(error.text, "no handle survives a fork") != NULL &&
         kvpool_attachment_create_buffer(attachment, 64, &buffer, &error) == KVPOOL_INVALID_ARGUMENT &&
         kvpool_attachment_state(attachment, &error) == KVPOOL_INVALID_ARGUMENT;
}

struct range {
  uintptr_t begin, end;
};

/* Where the attachment has mapped its ring: it is the fake executor's, which has a mapping of its own. */
static struct range ring_find(void) {
  struct range found = {.begin = 0};
  char line[512];
  FILE *maps = fopen("/proc/self/maps", "r");
  assert_non_null(maps);
  while (fgets(line, sizeof line, maps) != NULL) {
    char *end;
    const struct range range = {.begin = strtoul(line, &end, 16), .end = strtoul(end + 1, NULL, 16)};
    if (strstr(line, "ring (deleted)") != NULL && range.begin != (uintptr_t)fake.ring.map) {
      found = range;
    }
  }
  (void)fclose(maps);
  assert_true(found.begin != 0);
  return found;
}

/* Where its parent's ring is not any more the child has memory of its own, which stays when it detaches. */
static bool is_detached_alone(struct range ring) {
  void *begin = NULL;
  memcpy(&begin, &ring.begin, sizeof begin);
  void *there = mmap(begin, ring.end - ring.begin, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (there == MAP_FAILED) {
    return false;
  }
  kvpool_detach(attachment);
  *(volatile uint8_t *)there = 1;
  return true;
}

/* A child of a fork that detaches leaves its parent's attachment alone, what it asks is refused, and one that posts
 * faults alone. */
static void test_fork(void **state) {
  (void)state;
  kvpool_step *step;
  assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
  const struct range ring = ring_find();
  struct pollfd waited = {.fd = kvpool_attachment_fd(attachment), .events = POLLIN};
  for (int way = 0; way < 3; way++) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
      (void)signal(SIGSEGV, SIG_DFL);
      if (way == 0) {
        _exit(is_detached_alone(ring) ? 0 : 1);
      } else if (way == 1) {
        _exit(is_refused() ? 0 : 1);
      } else {
        (void)kvpool_attachment_post(attachment, step, NULL, NULL, NULL);
      }
      _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(way < 2 ? WIFEXITED(status) && WEXITSTATUS(status) == 0
                        : WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
  }
  assert_ok(kvpool_attachment_post(attachment, step, NULL, NULL, &error));
  uint8_t payload[4096];
  struct kvp_ring_record record;
  assert_true(fake_take(&fake, &record, payload, sizeof payload));
  assert_int_equal(record.tag, 1);
  assert_true(kvpool_attachment_arm(attachment));
  fake_done(&fake, record.tag, 0);
  assert_int_equal(poll(&waited, 1, 10000),
                   1); /* the child's detach took nothing off the epoll set that they share */
  kvpool_pool_map *map;
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_NOTHING, &map, &error));
  kvpool_pool_map_destroy(map);
  kvpool_step_destroy(step);
}

static void test_nonsense_about_pools(void **state) {
  (void)state;
  static const struct {
    enum fake_fault fault;
    kvpool_status status;
    const char *text;
  } faults[] = {
      {FAKE_CHUNK_SHORT, KVPOOL_MALFORMED, "not 84480"},
      {FAKE_CHUNK_MISSING, KVPOOL_MALFORMED, "0 of 84480 bytes of region 1"},
      {FAKE_CHUNK_TOO_MUCH, KVPOOL_MALFORMED, "a chunk of 84481 bytes where 84480 of 84480 are left"},
      {FAKE_POOL_REGIONS, KVPOOL_MALFORMED, "17 regions"},
      {FAKE_POOL_FORMAT, KVPOOL_WRONG_FORMAT, "format 99"},
      {FAKE_POOL_SMALL, KVPOOL_MALFORMED, "of 168960 bytes has memory of 168959"},
      {FAKE_NO_DESCRIPTION, KVPOOL_MALFORMED, "no pool \"main\""},
  };
  kvpool_pool_map *map = NULL;
  for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
    fake.fault = faults[i].fault;
    assert_fails(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error), faults[i].status,
                 faults[i].text);
    assert_null(map);
    fake.fault = FAKE_GOOD; /* and the next answer is understood */
    assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error));
    kvpool_pool_map_destroy(map);
    map = NULL;
  }
}

/* ---- buffers ----------------------------------------------------------------------------------------------------
 */

static void test_buffers(void **state) {
  (void)state;
  kvpool_buffer *made, *mapped;
  assert_ok(kvpool_attachment_create_buffer(attachment, 10000, &made, &error));
  assert_int_equal(kvpool_buffer_id(made), 5);
  assert_int_equal(kvpool_buffer_bytes(made), 10000);
  assert_ok(kvpool_attachment_map_buffer(attachment, 5, &mapped, &error));
  memset(kvpool_buffer_data(made), 0x42, 10000);
  assert_int_equal(((const uint8_t *)kvpool_buffer_data(mapped))[9999], 0x42);
  assert_fails(kvpool_attachment_map_buffer(attachment, 77, &mapped, &error), KVPOOL_UNKNOWN_BUFFER,
               "no such buffer");
  uint8_t byte = 0;
  assert_fails(kvpool_buffer_write(made, 0, &byte, 1, &error), KVPOOL_INVALID_ARGUMENT, "kvpool_buffer_data");
  assert_fails(kvpool_buffer_read(made, 0, &byte, 1, &error), KVPOOL_INVALID_ARGUMENT, "kvpool_buffer_data");
  assert_ok(kvpool_buffer_release(mapped, &error)); /* the scheduler's: only unmapped */
  assert_int_equal(fake.released, 0);
  assert_ok(kvpool_buffer_release(made, &error));
  assert_int_equal(fake.released, 5);
}

static void test_import_memfd(void **state) {
  (void)state;
  int fd;
  kvpool_buffer *buffer;
  assert_ok(kvpool_memfd_create("tensor", memfd_bytes, &fd, &error));
  uint8_t *mine = mmap(NULL, memfd_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  assert_true(mine != MAP_FAILED);
  assert_ok(kvpool_attachment_import_memfd(attachment, fd, memfd_bytes, 4096 + 48, 5000, &buffer, &error));
  assert_int_equal(kvpool_buffer_id(buffer), 6);
  assert_int_equal(kvpool_buffer_bytes(buffer), 5000);
  assert_int_equal(fake.import.kind, KVP_IMPORT_MEMFD);
  assert_int_equal(fake.import.allocation_bytes, memfd_bytes);
  assert_int_equal(fake.import.offset_bytes, 4096 + 48);
  assert_int_equal(fake.import.bytes, 5000);
  assert_true(fake.imported >= 0);
  mine[4096 + 48 + 4999] = 0x31;
  assert_int_equal(((const uint8_t *)kvpool_buffer_data(buffer))[4999], 0x31);
  assert_ok(kvpool_buffer_release(buffer, &error));
  assert_int_equal(fake.released, 6);
  assert_fails(kvpool_attachment_import_memfd(attachment, fd, memfd_bytes, 4096, 8193, &buffer, &error),
               KVPOOL_OUT_OF_RANGE, "8193");
  assert_fails(kvpool_attachment_import_memfd(attachment, fd, 4096, 0, 4096, &buffer, &error),
               KVPOOL_INVALID_ARGUMENT, "12288");
  assert_fails(kvpool_attachment_import_memfd(attachment, 1, 4096, 0, 4096, &buffer, &error), KVPOOL_INVALID_ARGUMENT,
               "fd 1");
  (void)munmap(mine, memfd_bytes);
  (void)close(fd);
  fd = memfd_create("loose", MFD_CLOEXEC);
  assert_int_equal(ftruncate(fd, 4096), 0);
  assert_fails(kvpool_attachment_import_memfd(attachment, fd, 4096, 0, 4096, &buffer, &error),
               KVPOOL_INVALID_ARGUMENT, "seals");
  (void)close(fd);
  assert_fails(kvpool_memfd_create("nothing", 0, &fd, &error), KVPOOL_INVALID_ARGUMENT, "0 bytes");
}

/* ---- timelines --------------------------------------------------------------------------------------------------
 */

static void test_words_are_given_out(void **state) {
  (void)state;
  uint32_t words[512], word;
  uint64_t value;
  atomic_store(&fake.words[513].value, 9);
  atomic_store(&fake.words[514].value, KVP_TIMELINE_POISON);
  for (uint32_t i = 0; i < 511; i++) { /* 514 is of no use to anybody */
    assert_ok(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_EXECUTOR, &words[i], &value, &error));
    assert_int_equal(words[i], 512 + i + (i >= 2));
    assert_int_equal(value, i == 1 ? 9 : 0);
  }
  assert_fails(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_EXECUTOR, &word, NULL, &error), KVPOOL_QUOTA_EXCEEDED,
               "512 words of the executor's");
  kvpool_timeline_free(attachment, 700);
  assert_ok(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_EXECUTOR, &word, NULL, &error));
  assert_int_equal(word, 700);
  for (uint32_t i = 0; i < 512; i++) {
    assert_ok(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_WORKER, &word, NULL, &error));
    assert_int_equal(word, i);
  }
  assert_fails(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_WORKER, &word, NULL, &error), KVPOOL_QUOTA_EXCEEDED,
               "worker's");
}

/* Not the program's fault, and over when the next one serves: it is told apart from all being in use. */
static void test_no_words_of_a_dead_executor(void **state) {
  (void)state;
  uint32_t word;
  uint64_t value;
  fake_tell_lost(&fake, true);
  assert_fails(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_EXECUTOR, &word, &value, &error), KVPOOL_DEVICE_LOST,
               "executor that counted these words up died");
  assert_ok(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_WORKER, &word, &value, &error));
  assert_int_equal(kvpool_attachment_state(attachment, &error), KVPOOL_DEVICE_LOST);
  fake_restore(&fake);
  while (kvpool_attachment_state(attachment, &error) != KVPOOL_OK) {
    assert_int_equal(error.status, KVPOOL_DEVICE_LOST);
  }
  assert_ok(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_EXECUTOR, &word, &value, &error));
  assert_int_equal(word, kvp_client_words);
  fake_tell_ended(&fake, KVP_SHUTTING_DOWN, "the daemon is draining");
  while (kvpool_attachment_state(attachment, &error) != KVPOOL_SHUTTING_DOWN) {
  }
  assert_fails(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_EXECUTOR, &word, &value, &error), KVPOOL_DISCONNECTED,
               "the attachment has ended");
}

/* Words and writers that there are not. */
static void test_no_such_word(void **state) {
  (void)state;
  uint32_t word = 77;
  assert_fails(kvpool_timeline_new(attachment, (kvpool_timeline_writer)7, &word, NULL, &error),
               KVPOOL_INVALID_ARGUMENT, "writer 7");
  assert_int_equal(word, 77);
  kvpool_timeline_free(attachment, 1024);
  kvpool_timeline_free(attachment, 5000);
  kvpool_timeline_free(attachment, UINT32_MAX);
  assert_ok(kvpool_timeline_new(attachment, KVPOOL_TIMELINE_WORKER, &word, NULL, &error));
  assert_int_equal(word, 0);
}

static void test_signal_and_read(void **state) {
  (void)state;
  uint64_t value = 77;
  assert_ok(kvpool_timeline_read(attachment, 3, &value, &error));
  assert_int_equal(value, 0);
  assert_ok(kvpool_timeline_signal(attachment, 3, 5, &error));
  assert_int_equal(atomic_load(&fake.words[3].value), 5);
  assert_ok(kvpool_timeline_signal(attachment, 3, 5, &error));
  assert_fails(kvpool_timeline_signal(attachment, 3, 4, &error), KVPOOL_INVALID_ARGUMENT, "5 already");
  assert_fails(kvpool_timeline_signal(attachment, 3, UINT64_C(1) << 62, &error), KVPOOL_OUT_OF_RANGE, "2^62");
  assert_fails(kvpool_timeline_signal(attachment, 4, 0, &error), KVPOOL_OUT_OF_RANGE, "value 0");
  assert_fails(kvpool_timeline_signal(attachment, 512, 1, &error), KVPOOL_OUT_OF_RANGE, "0 to 511");
  assert_fails(kvpool_timeline_poison(attachment, 512, &error), KVPOOL_OUT_OF_RANGE, "0 to 511");
  assert_fails(kvpool_timeline_read(attachment, 1024, &value, &error), KVPOOL_OUT_OF_RANGE, "word 1024");
  assert_fails(kvpool_timeline_wait(attachment, 1024, 1, 0, &error), KVPOOL_OUT_OF_RANGE, "word 1024");
  assert_ok(kvpool_timeline_signal(attachment, 3, (UINT64_C(1) << 62) - 1, &error));
  assert_ok(kvpool_timeline_poison(attachment, 3, &error));
  assert_int_equal(atomic_load(&fake.words[3].value), UINT64_C(1) << 62);
  assert_fails(kvpool_timeline_signal(attachment, 3, (UINT64_C(1) << 62) - 1, &error), KVPOOL_INVALID_ARGUMENT,
               "poisoned");
  assert_fails(kvpool_timeline_read(attachment, 3, &value, &error), KVPOOL_CANCELLED, "word 3 is poisoned");
  assert_int_equal(value, 0);
}

struct counting {
  uint32_t word;
  uint64_t last;
  useconds_t pause_us;
};

static void *count_up(void *context) {
  const struct counting *counting = context;
  for (uint64_t value = 1; value <= counting->last; value++) {
    (void)usleep(counting->pause_us);
    atomic_store_explicit(&fake.words[counting->word].value, value, memory_order_release);
  }
  return NULL;
}

static void test_wait(void **state) {
  (void)state;
  assert_ok(kvpool_timeline_wait(attachment, 600, 0, 0, &error));
  assert_fails(kvpool_timeline_wait(attachment, 600, 1, 3, &error), KVPOOL_DEADLINE_EXCEEDED,
               "is 0, not 1, after 3 ms");
  struct counting fast = {600, 50000, 0}, slow = {601, 3, 20000}; /* spins; sleeps a ms at a time */
  pthread_t threads[2];
  assert_int_equal(pthread_create(&threads[0], NULL, count_up, &fast), 0);
  assert_int_equal(pthread_create(&threads[1], NULL, count_up, &slow), 0);
  for (uint64_t value = 1; value <= 50000; value += 100) {
    assert_ok(kvpool_timeline_wait(attachment, 600, value, timeout_ms, &error));
  }
  for (uint64_t value = 1; value <= 3; value++) {
    uint64_t found;
    assert_ok(kvpool_timeline_wait(attachment, 601, value, timeout_ms, &error));
    assert_ok(kvpool_timeline_read(attachment, 601, &found, &error));
    assert_true(found >= value);
  }
  (void)pthread_join(threads[0], NULL);
  (void)pthread_join(threads[1], NULL);
  atomic_store(&fake.words[602].value, KVP_TIMELINE_POISON);
  assert_fails(kvpool_timeline_wait(attachment, 602, 5, timeout_ms, &error), KVPOOL_CANCELLED,
               "word 602 is poisoned");
}

struct waiting {
  uint32_t word;
  kvpool_status status;
  kvpool_error error;
};

static void *wait_for_word(void *context) {
  struct waiting *waiting = context;
  waiting->status = kvpool_timeline_wait(attachment, waiting->word, 1, timeout_ms, &waiting->error);
  return NULL;
}

static void test_wait_over_loss(void **state) {
  (void)state;
  struct waiting waiting = {.word = 700};
  pthread_t thread;
  assert_ok(kvpool_timeline_signal(attachment, 3, 5, &error));
  assert_int_equal(pthread_create(&thread, NULL, wait_for_word, &waiting), 0);
  __atomic_store_n(&fake.status->state, KVP_ATTACH_STATE_LOST, __ATOMIC_RELEASE);
  fake_tell_lost(&fake, true);
  (void)pthread_join(thread, NULL);
  assert_int_equal(waiting.status, KVPOOL_DEVICE_LOST);
  assert_non_null(strstr(waiting.error.text, "word 700"));
  fake_restore(&fake);
  assert_ok(kvpool_attachment_state(attachment, &error));
  uint64_t value;
  for (uint32_t word = 3; word <= 700; word += 697) {
    assert_ok(kvpool_timeline_read(attachment, word, &value, &error));
    assert_int_equal(value, 0);
  }

  /* The daemon goes without a word. */
  waiting = (struct waiting){.word = 700};
  assert_int_equal(pthread_create(&thread, NULL, wait_for_word, &waiting), 0);
  fake_hang_up(&fake);
  (void)pthread_join(thread, NULL);
  assert_int_equal(waiting.status, KVPOOL_DISCONNECTED);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_map_pool, setup, teardown),
      cmocka_unit_test_setup_teardown(test_write_faults_the_writer, setup, teardown),
      cmocka_unit_test_setup_teardown(test_fork, setup, teardown),
      cmocka_unit_test_setup_teardown(test_nonsense_about_pools, setup, teardown),
      cmocka_unit_test_setup_teardown(test_buffers, setup, teardown),
      cmocka_unit_test_setup_teardown(test_import_memfd, setup, teardown),
      cmocka_unit_test_setup_teardown(test_words_are_given_out, setup, teardown),
      cmocka_unit_test_setup_teardown(test_no_words_of_a_dead_executor, setup, teardown),
      cmocka_unit_test_setup_teardown(test_no_such_word, setup, teardown),
      cmocka_unit_test_setup_teardown(test_signal_and_read, setup, teardown),
      cmocka_unit_test_setup_teardown(test_wait, setup, teardown),
      cmocka_unit_test_setup_teardown(test_wait_over_loss, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
