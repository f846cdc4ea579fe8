/* The ring: order, wrap-around, full lanes, wake-ups, and peers that lie. */
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/fd_socket.h"
#include "proto/ring.h"

enum { stress_records = 200000, payload_bytes_max = 3000, watchdog_seconds = 300 };

static const struct kvp_ring_sizes small_sizes = {
    .commands = 8, .completions = 16, .command_arena_bytes = 8192, .completion_arena_bytes = 4096};

/* Both ends of one ring, mapped twice as two processes would. */
struct pair {
  int fd;
  struct kvp_ring client;
  struct kvp_ring executor;
};

static void pair_init(struct pair *pair) {
  struct kvp_error error;
  pair->fd = kvp_ring_create("test-ring", &small_sizes, &error);
  assert_true(pair->fd >= 0);
  assert_int_equal(kvp_ring_init(&pair->client, pair->fd, KVP_RING_CLIENT, &error), KVP_OK);
  assert_int_equal(kvp_ring_init(&pair->executor, pair->fd, KVP_RING_EXECUTOR, &error), KVP_OK);
}

static void pair_deinit(struct pair *pair) {
  kvp_ring_deinit(&pair->client);
  kvp_ring_deinit(&pair->executor);
  assert_int_equal(close(pair->fd), 0);
}

/* The other end of a fresh lane through the same mapping: a race detector knows memory by its address. */
static struct kvp_lane_end opposite_end(const struct kvp_lane_end *end) {
  struct kvp_lane_end opposite = *end;
  opposite.is_producer = !end->is_producer;
  return opposite;
}

static uint64_t mix(uint64_t x) {
  x += UINT64_C(0x9E3779B97F4A7C15);
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return x ^ x >> 31;
}

/* Record i of a stress run: its size and its bytes follow from i alone. */
static uint32_t stress_bytes(uint64_t i) {
  return mix(i) % 5 == 0 ? 0 : (uint32_t)(mix(i) % payload_bytes_max);
}

static void stress_fill(uint64_t i, uint8_t *out, uint32_t bytes) {
  for (uint32_t k = 0; k < bytes; k++) {
    out[k] = (uint8_t)(i * 31 + (uint64_t)k * 7);
  }
}

static void wake(int event) {
  assert_int_equal(eventfd_write(event, 1), 0);
}

static void produce_all(struct kvp_lane_end *end, int event) {
  for (uint64_t i = 0; i < stress_records; i++) {
    uint32_t bytes = stress_bytes(i);
    void *payload = NULL;
    while ((payload = kvp_lane_reserve(end, bytes)) == NULL) {
      (void)sched_yield();
    }
    stress_fill(i, payload, bytes);
    if (kvp_lane_publish(end, (uint32_t)(i % 7), i, bytes)) {
      wake(event);
    }
  }
}

/* Returns the number of records that are not what the producer wrote; sleeps whenever there is nothing. */
static uint64_t consume_all(struct kvp_lane_end *end, int event) {
  static uint8_t got[payload_bytes_max];
  static uint8_t expected[payload_bytes_max];
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < stress_records;) {
    struct kvp_ring_record record;
    enum kvp_lane_state state = kvp_lane_peek(end, &record);
    if (state == KVP_LANE_EMPTY) {
      if (kvp_lane_prepare_sleep(end)) {
        eventfd_t count = 0;
        (void)eventfd_read(event, &count);
        kvp_lane_awake(end);
      }
      continue;
    }
    if (state != KVP_LANE_RECORD) {
      return stress_records;
    }
    bool right = record.tag == i && record.kind == i % 7 && record.payload_bytes == stress_bytes(i);
    if (right) {
      kvp_lane_copy_payload(end, &record, got);
      stress_fill(i, expected, record.payload_bytes);
      right = memcmp(got, expected, record.payload_bytes) == 0;
    }
    wrong += !right;
    kvp_lane_advance(end, &record);
    i++;
  }
  return wrong;
}

struct producer {
  struct kvp_lane_end *end;
  int event;
};

static void *producer_main(void *argument) {
  struct producer *producer = argument;
  produce_all(producer->end, producer->event);
  return NULL;
}

static void test_two_threads(void **state) {
  (void)state;
  struct pair pair;
  pair_init(&pair);
  int event = eventfd(0, EFD_CLOEXEC);
  struct producer producer = {&pair.client.commands, event};
  struct kvp_lane_end consumer = opposite_end(&pair.client.commands);
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, producer_main, &producer), 0);
  assert_int_equal(consume_all(&consumer, event), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(close(event), 0);
  pair_deinit(&pair);
}

static void test_two_processes(void **state) {
  (void)state;
  struct pair pair;
  pair_init(&pair);
  int event = eventfd(0, EFD_CLOEXEC);
  pid_t child = fork();
  if (child == 0) {
    (void)alarm(watchdog_seconds);
    produce_all(&pair.executor.completions, event);
    _exit(0);
  }
  assert_true(child > 0);
  assert_int_equal(consume_all(&pair.client.completions, event), 0);
  int status = -1;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  assert_int_equal(close(event), 0);
  pair_deinit(&pair);
}

/* One message at a time, both sides asleep in between: a lost wake-up hangs here. */
enum { pings = 20000 };

struct echo {
  struct kvp_lane_end commands;
  struct kvp_lane_end completions;
  int to_echo;
  int from_echo;
};

/* Takes the next record, asleep until it is there. */
static uint64_t take_one(struct kvp_lane_end *end, int event) {
  struct kvp_ring_record record;
  while (kvp_lane_peek(end, &record) != KVP_LANE_RECORD) {
    if (kvp_lane_prepare_sleep(end)) {
      eventfd_t count = 0;
      (void)eventfd_read(event, &count);
      kvp_lane_awake(end);
    }
  }
  kvp_lane_advance(end, &record);
  return record.tag;
}

static void post_one(struct kvp_lane_end *end, uint64_t tag, int event) {
  if (kvp_lane_reserve(end, 0) != NULL && kvp_lane_publish(end, 1, tag, 0)) {
    wake(event);
  }
}

static void *echo_main(void *argument) {
  struct echo *echo = argument;
  for (uint64_t i = 0; i < pings; i++) {
    post_one(&echo->completions, take_one(&echo->commands, echo->to_echo), echo->from_echo);
  }
  return NULL;
}

static void test_no_wakeup_is_lost(void **state) {
  (void)state;
  struct pair pair;
  pair_init(&pair);
  struct echo echo = {
      .commands = opposite_end(&pair.client.commands),
      .completions = opposite_end(&pair.client.completions),
      .to_echo = eventfd(0, EFD_CLOEXEC),
      .from_echo = eventfd(0, EFD_CLOEXEC),
  };
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, echo_main, &echo), 0);
  for (uint64_t i = 0; i < pings; i++) {
    post_one(&pair.client.commands, i, echo.to_echo);
    assert_int_equal(take_one(&pair.client.completions, echo.from_echo), i);
  }
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(close(echo.to_echo), 0);
  assert_int_equal(close(echo.from_echo), 0);
  pair_deinit(&pair);
}

static void test_full_lane(void **state) {
  (void)state;
  struct pair pair;
  pair_init(&pair);
  struct kvp_lane_end *producer = &pair.client.commands;
  struct kvp_lane_end *consumer = &pair.executor.commands;
  struct kvp_ring_record record;

  assert_int_equal(kvp_lane_free_records(producer), 8);
  for (uint64_t i = 0; i < 8; i++) {
    assert_non_null(kvp_lane_reserve(producer, 0));
    (void)kvp_lane_publish(producer, 1, i, 0);
  }
  assert_int_equal(kvp_lane_free_records(producer), 0);
  assert_null(kvp_lane_reserve(producer, 0));
  assert_int_equal(kvp_lane_peek(consumer, &record), KVP_LANE_RECORD);
  kvp_lane_advance(consumer, &record);
  assert_non_null(kvp_lane_reserve(producer, 0));
  (void)kvp_lane_publish(producer, 1, 8, 0);
  for (uint64_t i = 1; i < 9; i++) {
    assert_int_equal(kvp_lane_peek(consumer, &record), KVP_LANE_RECORD);
    assert_int_equal(record.tag, i);
    kvp_lane_advance(consumer, &record);
  }
  assert_int_equal(kvp_lane_peek(consumer, &record), KVP_LANE_EMPTY);
  pair_deinit(&pair);
}

static void test_full_arena(void **state) {
  (void)state;
  struct pair pair;
  pair_init(&pair);
  struct kvp_lane_end *producer = &pair.client.commands;
  struct kvp_lane_end *consumer = &pair.executor.commands;
  struct kvp_ring_record record;

  assert_null(kvp_lane_reserve(producer, 8193)); /* never fits */
  assert_non_null(kvp_lane_reserve(producer, 5000));
  (void)kvp_lane_publish(producer, 1, 1, 5000);
  assert_null(kvp_lane_reserve(producer, 5000));     /* no room behind it, none before */
  assert_non_null(kvp_lane_reserve(producer, 3136)); /* 8192 - 5056 */
  (void)kvp_lane_publish(producer, 1, 2, 3136);
  assert_null(kvp_lane_reserve(producer, 1));
  assert_non_null(kvp_lane_reserve(producer, 0)); /* records without payload still go */
  (void)kvp_lane_publish(producer, 1, 3, 0);
  for (int i = 0; i < 3; i++) {
    assert_int_equal(kvp_lane_peek(consumer, &record), KVP_LANE_RECORD);
    kvp_lane_advance(consumer, &record);
  }
  /* The position stands inside the arena; a payload of the whole arena starts over and fits, as the lane is empty. */
  assert_non_null(kvp_lane_reserve(producer, 100));
  (void)kvp_lane_publish(producer, 1, 4, 100);
  assert_null(kvp_lane_reserve(producer, 8192));
  assert_int_equal(kvp_lane_peek(consumer, &record), KVP_LANE_RECORD);
  kvp_lane_advance(consumer, &record);
  assert_non_null(kvp_lane_reserve(producer, 8192));
  (void)kvp_lane_publish(producer, 1, 5, 8192);
  assert_int_equal(kvp_lane_peek(consumer, &record), KVP_LANE_RECORD);
  assert_int_equal(record.payload_bytes, 8192);
  kvp_lane_advance(consumer, &record);
  assert_int_equal(kvp_lane_peek(consumer, &record), KVP_LANE_EMPTY);
  pair_deinit(&pair);
}

/* A publish may give back what it didn't need, all of it included. */
static void test_publish_less_than_reserved(void **state) {
  (void)state;
  struct pair pair;
  pair_init(&pair);
  struct kvp_ring_record record;
  for (uint64_t i = 0; i < 1000; i++) {
    assert_non_null(kvp_lane_reserve(&pair.client.commands, 4000));
    (void)kvp_lane_publish(&pair.client.commands, 1, i, (uint32_t)(mix(i) % 4001) * (i % 3 != 0));
    assert_int_equal(kvp_lane_peek(&pair.executor.commands, &record), KVP_LANE_RECORD);
    kvp_lane_advance(&pair.executor.commands, &record);
  }
  pair_deinit(&pair);
}

/* Writes one record as a hostile producer would and says what the consumer makes of it. */
static enum kvp_lane_state forged(const struct kvp_ring_record *record, uint64_t produced) {
  struct pair pair;
  pair_init(&pair);
  memcpy(&pair.client.commands.records[0], record, sizeof *record);
  *(volatile uint64_t *)(void *)pair.client.commands.shared = produced; /* its first word */
  struct kvp_ring_record seen;
  enum kvp_lane_state state = kvp_lane_peek(&pair.executor.commands, &seen);
  pair_deinit(&pair);
  return state;
}

static void test_forged_records(void **state) {
  (void)state;
  const struct kvp_ring_record good = {.sequence = 1, .payload_bytes = 100, .payload_begin = 0};
  assert_int_equal(forged(&good, 1), KVP_LANE_RECORD);
  assert_int_equal(forged(&good, 0), KVP_LANE_EMPTY);
  assert_int_equal(forged(&good, 8), KVP_LANE_RECORD);
  assert_int_equal(forged(&good, 9), KVP_LANE_CORRUPT);          /* more than the lane holds */
  assert_int_equal(forged(&good, UINT64_MAX), KVP_LANE_CORRUPT); /* went backwards */

  struct kvp_ring_record bad = good;
  bad.sequence = 0;
  assert_int_equal(forged(&bad, 1), KVP_LANE_CORRUPT);
  bad.sequence = 2;
  assert_int_equal(forged(&bad, 1), KVP_LANE_CORRUPT);

  bad = good;
  bad.payload_bytes = 8192;
  assert_int_equal(forged(&bad, 1), KVP_LANE_RECORD);
  bad.payload_bytes = 8193;
  assert_int_equal(forged(&bad, 1), KVP_LANE_CORRUPT);
  bad.payload_bytes = UINT32_MAX;
  assert_int_equal(forged(&bad, 1), KVP_LANE_CORRUPT);

  const uint64_t begins[] = {1, 64, 4096, 8191, 8192, UINT64_MAX, UINT64_MAX - 63, UINT64_C(1) << 63};
  for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++) {
    bad = good;
    bad.payload_begin = begins[i];
    assert_int_equal(forged(&bad, 1), KVP_LANE_CORRUPT);
    bad.payload_bytes = 0;
    assert_int_equal(forged(&bad, 1), KVP_LANE_CORRUPT);
  }
}

/* Random nonsense in every record and word: what peek lets through lies inside the arena, always. */
static void test_random_garbage(void **state) {
  (void)state;
  struct pair pair;
  pair_init(&pair);
  struct kvp_lane_end *consumer = &pair.executor.commands;
  uint8_t *copy = malloc(small_sizes.command_arena_bytes);
  assert_non_null(copy);
  uint64_t accepted = 0;
  for (uint64_t i = 0; i < 200000; i++) {
    uint64_t r = mix(i);
    struct kvp_ring_record forged_record = {
        .sequence = r % 16 == 0 ? mix(r) : consumer->position + 1,
        .payload_bytes = (uint32_t)(r % 3 == 0 ? mix(r + 1) : mix(r + 1) % 9000),
        .payload_begin = r % 5 == 0
                             ? mix(r + 2)
                             : consumer->arena_position + (r % 5 == 1) * (8192 - consumer->arena_position % 8192),
    };
    memcpy(&pair.client.commands.records[consumer->position % 8], &forged_record, sizeof forged_record);
    *(volatile uint64_t *)(void *)pair.client.commands.shared = r % 7 == 0 ? mix(r + 3) : consumer->position + r % 9;
    struct kvp_ring_record record;
    if (kvp_lane_peek(consumer, &record) == KVP_LANE_RECORD) {
      assert_true(record.payload_bytes <= small_sizes.command_arena_bytes);
      kvp_lane_copy_payload(consumer, &record, copy);
      kvp_lane_advance(consumer, &record);
      accepted++;
    }
  }
  assert_true(accepted > 1000); /* the garbage was plausible enough to test something */
  free(copy);
  pair_deinit(&pair);
}

/* A consumer that lies about what it has consumed: the producer writes inside its arena or not at all. */
static void test_forged_consumer(void **state) {
  (void)state;
  struct pair pair;
  pair_init(&pair);
  struct kvp_lane_end *producer = &pair.client.commands;
  /* shared: produced on the first cache line, arena_consumed and consumed on the second. */
  volatile uint64_t *words = (volatile uint64_t *)(void *)producer->shared;
  for (uint64_t i = 0; i < 100000; i++) {
    uint64_t r = mix(i);
    words[8] = r % 3 == 0 ? mix(r) : producer->arena_position - r % 20000;
    words[9] = r % 3 == 1 ? mix(r) : producer->position - r % 10;
    uint32_t bytes = (uint32_t)(mix(r + 1) % 9000);
    uint8_t *payload = kvp_lane_reserve(producer, bytes);
    if (payload != NULL) {
      assert_true(payload >= producer->arena && payload + bytes <= producer->arena + 8192);
      memset(payload, 0xEE, bytes);
      (void)kvp_lane_publish(producer, 1, i, bytes);
    }
  }
  pair_deinit(&pair);
}

static void test_init_refusals(void **state) {
  (void)state;
  struct kvp_error error;
  struct kvp_ring ring;
  struct kvp_ring_sizes sizes = small_sizes;
  assert_true(kvp_ring_bytes(&sizes) == 4096 + 4096 + 4096 + 8192 + 4096);
  sizes.commands = 12;
  assert_int_equal(kvp_ring_bytes(&sizes), 0);
  assert_int_equal(kvp_ring_create("x", &sizes, &error), -1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  sizes = small_sizes;
  sizes.command_arena_bytes = 5000;
  assert_int_equal(kvp_ring_bytes(&sizes), 0);
  sizes.command_arena_bytes = UINT64_MAX - 4095;
  assert_int_equal(kvp_ring_bytes(&sizes), 0);

  int fd = kvp_ring_create("x", &small_sizes, &error);
  assert_true(fd >= 0);
  uint32_t word = 0;
  assert_int_equal(pread(fd, &word, 4, 0), 4);
  uint32_t wrong = ~word;
  assert_int_equal(pwrite(fd, &wrong, 4, 0), 4); /* magic */
  assert_int_equal(kvp_ring_init(&ring, fd, KVP_RING_CLIENT, &error), KVP_MALFORMED);
  assert_int_equal(pwrite(fd, &word, 4, 0), 4);
  wrong = 99;
  assert_int_equal(pwrite(fd, &wrong, 4, 4), 4); /* version */
  assert_int_equal(kvp_ring_init(&ring, fd, KVP_RING_CLIENT, &error), KVP_VERSION_MISMATCH);
  wrong = KVP_RING_VERSION;
  assert_int_equal(pwrite(fd, &wrong, 4, 4), 4);
  wrong = 1 << 16;
  assert_int_equal(pwrite(fd, &wrong, 4, 8), 4); /* more commands than the file has room for */
  assert_int_equal(kvp_ring_init(&ring, fd, KVP_RING_CLIENT, &error), KVP_INVALID_ARGUMENT);
  assert_int_equal(close(fd), 0);

  fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  assert_true(fd >= 0);
  struct {
    uint32_t magic, version;
    struct kvp_ring_sizes sizes;
  } header = {KVP_RING_MAGIC, KVP_RING_VERSION, small_sizes};
  assert_int_equal(ftruncate(fd, (off_t)kvp_ring_bytes(&small_sizes)), 0);
  assert_int_equal(pwrite(fd, &header, sizeof header, 0), sizeof header);
  assert_int_equal(kvp_ring_init(&ring, fd, KVP_RING_CLIENT, &error), KVP_INVALID_ARGUMENT);
  assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  assert_int_equal(kvp_ring_init(&ring, fd, KVP_RING_CLIENT, &error), KVP_OK);
  kvp_ring_deinit(&ring);
  assert_int_equal(close(fd), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_init_refusals),   cmocka_unit_test(test_full_lane),
      cmocka_unit_test(test_full_arena),      cmocka_unit_test(test_publish_less_than_reserved),
      cmocka_unit_test(test_forged_records),  cmocka_unit_test(test_random_garbage),
      cmocka_unit_test(test_forged_consumer), cmocka_unit_test(test_two_threads),
      cmocka_unit_test(test_two_processes),   cmocka_unit_test(test_no_wakeup_is_lost),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
