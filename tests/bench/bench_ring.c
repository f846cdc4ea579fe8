/* A step through a ring and the executor: from its post to the completion that the poster sees.
 *
 * Posts one step at a time and polls for DONE, as a worker does that waits for its step: through the supervisor's ring,
 * through a worker's, beside idle ones, and beside one that is always full. The floor beside it: the same 256 rows moved
 * by memcpy, and the two switches of a thread that sleeps on an eventfd. Then how many steps a second go through 1, 4 and
 * 16 rings, all of them fed by this one thread.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "proto/format.h"
#include "proto/owner_entry.h"
#include "tests/unit/exec_harness.h"
#include "tests/unit/exec_ring.h"

enum {
  rounds_warm = 200,
  rounds = 5000,
  rounds_asleep = 500,
  session = 1,
  blocks = 512,
  tokens_per_block = 64,
  buffer_bytes = 32 << 20,
  memcpy_from_bytes = 256 * 1024,
  memcpy_bytes = 256 * 528,
  rings_max = kvp_attachments_max,
  rounds_crowded = 2000,
  steps_of_throughput = 100000,
  steps_ahead = 32, /* of one ring */
};

static struct exec_ring rings[rings_max];

/* Who posts. */
struct door {
  struct exec_harness *link; /* NULL: a worker's ring */
  struct exec_ring *ring;
};

static bool door_post(const struct door *door, uint64_t tag, const uint8_t *encoded, uint32_t bytes) {
  return door->link != NULL ? exec_harness_post(door->link, KVP_COMMAND_STEP, tag, encoded, bytes)
                            : exec_ring_post(door->ring, KVP_COMMAND_STEP, tag, encoded, bytes);
}

static bool door_try_take(const struct door *door, struct exec_completion *out) {
  return door->link != NULL ? exec_harness_try_take(door->link, out) : exec_ring_try_take(door->ring, out);
}

/* A ring that is kept full; acceptance isn't told. */
struct flood {
  struct exec_ring *ring;
  uint32_t under_way;
};

/* As many steps as it takes, and none of its completions kept. */
static void flood_go_on(struct flood *flood, const uint8_t *encoded, uint32_t bytes) {
  struct exec_completion completion;
  while (exec_ring_post(flood->ring, KVP_COMMAND_STEP, 1, encoded, bytes)) {
    flood->under_way++;
  }
  while (exec_ring_try_take(flood->ring, &completion)) {
    free(completion.payload);
    flood->under_way--;
  }
}

static void flood_end(struct flood *flood) {
  for (; flood->under_way > 0; flood->under_way--) {
    free(exec_ring_take(flood->ring).payload);
  }
}

static uint64_t now_ns(void) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int compare(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a;
  const uint64_t y = *(const uint64_t *)b;
  return (x > y) - (x < y);
}

static void print(const char *what, uint64_t *samples, uint32_t count) {
  qsort(samples, count, sizeof *samples, compare);
  const uint64_t median = samples[count / 2];
  const uint64_t p99 = samples[count - 1 - count / 100];
  printf("%-58s p50 %8.1f us   p99 %8.1f us\n", what, (double)median / 1000, (double)p99 / 1000);
}

struct timed {
  uint64_t accepted[rounds];
  uint64_t done[rounds];
};

/* pause_us: 0 = the executor is still awake from the step before; else it has gone to sleep. flood: a ring that is kept
 * full of the same steps. */
static void measure(const struct door *door, const char *what, const struct step_encoder *encoder, uint32_t count,
                    uint32_t pause_us, struct flood *flood) {
  static struct timed timed;
  char line[128];
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  for (uint32_t i = 0; i < rounds_warm + count; i++) {
    if (pause_us > 0) {
      (void)usleep(pause_us);
    }
    if (flood != NULL) {
      flood_go_on(flood, encoded, bytes);
    }
    const uint64_t begin = now_ns();
    HARNESS_CHECK(door_post(door, i, encoded, bytes));
    uint64_t accepted = 0;
    struct exec_completion completion;
    for (;;) {
      if (!door_try_take(door, &completion)) {
        continue;
      }
      free(completion.payload);
      if (completion.kind == KVP_COMPLETION_DONE) {
        break;
      }
      HARNESS_CHECK(completion.kind == KVP_COMPLETION_ACCEPTED);
      accepted = now_ns() - begin;
    }
    if (i >= rounds_warm) { /* 0: acceptance isn't told */
      timed.accepted[i - rounds_warm] = accepted;
      timed.done[i - rounds_warm] = now_ns() - begin;
    }
  }
  free(encoded);
  if (timed.accepted[0] != 0) {
    (void)snprintf(line, sizeof line, "%s: post to accepted", what);
    print(line, timed.accepted, count);
  }
  (void)snprintf(line, sizeof line, "%s: post to done", what);
  print(line, timed.done, count);
}

static void pool_make(struct exec_harness *link) {
  struct kvp_geometry geometry;
  int fd = -1;
  HARNESS_CHECK(kvp_geometry_init(kvp_format_get(KVP_FORMAT_V41), 0, tokens_per_block, blocks, 1, &geometry, NULL) ==
                KVP_OK);
  HARNESS_CHECK(exec_harness_memory_create(link, 1, geometry.region_bytes, &fd).status == KVP_OK);
  (void)close(fd);
  HARNESS_CHECK(exec_harness_memory_create(link, 2, buffer_bytes, &fd).status == KVP_OK);
  (void)close(fd);
  int owner_fd = kvp_memory_fd_create("owners", blocks * sizeof(uint64_t), NULL);
  HARNESS_CHECK(owner_fd >= 0);
  uint64_t *owners = (uint64_t *)(void *)exec_harness_map(owner_fd, blocks * sizeof(uint64_t));
  for (uint32_t i = 0; i < blocks; i++) {
    owners[i] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  }
  (void)munmap(owners, blocks * sizeof(uint64_t));
  struct kvp_control_pool pool = {.pool_id = 1, .num_blocks = blocks, .region_count = 1};
  pool.regions[0] = (struct kvp_control_region){.memory_id = 1,
                                                .format = KVP_FORMAT_V41,
                                                .width = 512,
                                                .tokens_per_block = tokens_per_block,
                                                .num_layers = 1,
                                                .name = "main"};
  HARNESS_CHECK(exec_harness_request(link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &owner_fd, 1).status ==
                KVP_OK);
  (void)close(owner_fd);
  HARNESS_CHECK(exec_harness_buffer_attach(link, 1, 2, buffer_bytes, session).status == KVP_OK);
}

/* Slots of consecutive tokens in blocks of random order. */
static void store_encode(struct step_encoder *encoder, uint32_t rows) {
  int32_t *slots = malloc(rows * sizeof *slots);
  HARNESS_CHECK(slots != NULL);
  for (uint32_t i = 0; i < rows; i++) {
    const uint32_t block = (i / tokens_per_block * 197 + 31) % blocks; /* 197 is odd: each block once */
    slots[i] = (int32_t)(block * tokens_per_block + i % tokens_per_block);
  }
  step_encoder_init(encoder, 1, session, 1);
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_STORE);
  op->pool_id = 1;
  op->source = step_view(1, 0, rows, 1024, 1024);
  op->arrays[0] = step_encoder_array(encoder, slots, rows * 4);
  free(slots);
}

static void memcpy_floor(void) {
  static uint64_t samples[rounds];
  uint8_t *from = malloc(memcpy_from_bytes);
  uint8_t *to = malloc(memcpy_bytes);
  HARNESS_CHECK(from != NULL && to != NULL);
  memset(from, 1, memcpy_from_bytes);
  for (uint32_t i = 0; i < rounds; i++) {
    const uint64_t begin = now_ns();
    memcpy(to, from, memcpy_bytes);
    __asm__ volatile("" ::"r"(to) : "memory");
    samples[i] = now_ns() - begin;
  }
  print("memcpy of the records of 256 rows", samples, rounds);
  free(from);
  free(to);
}

static void rings_attach(struct exec_harness *link, uint32_t first, uint32_t end) {
  for (uint32_t i = first; i < end; i++) {
    const struct kvp_control_ring spec = {.attachment_id = i + 1, .owner = session, .queue = 100 + i};
    HARNESS_CHECK(exec_ring_attach(link, &rings[i], &spec).status == KVP_OK);
  }
}

static void rings_measure(struct exec_harness *link) {
  struct step_encoder encoder;
  const struct door door = {.ring = &rings[0]};
  struct flood flood = {.ring = &rings[1]};
  rings_attach(link, 0, 2);
  store_encode(&encoder, 256);
  encoder.header.flags = KVP_STEP_NOT_ACCEPTED_TOLD;
  measure(&door, "store of 256 v41 rows, a worker's ring", &encoder, rounds, 0, NULL);
  measure(&door, "the same beside a ring that is always full", &encoder, rounds_crowded, 0, &flood);
  flood_end(&flood);
  step_encoder_deinit(&encoder);
  step_encoder_init(&encoder, 1, session, 1);
  encoder.header.flags = KVP_STEP_NOT_ACCEPTED_TOLD;
  measure(&door, "empty step, a worker's ring", &encoder, rounds, 0, NULL);
  measure(&door, "the same beside a ring that is always full", &encoder, rounds_crowded, 0, &flood);
  flood_end(&flood);
  rings_attach(link, 2, rings_max);
  measure(&door, "the same beside 255 idle rings", &encoder, rounds, 0, NULL);
  measure(&door, "the same, executor asleep", &encoder, rounds_asleep, 2000, NULL);
  step_encoder_deinit(&encoder);
}

static void throughput_measure(uint32_t ring_count) {
  struct step_encoder encoder;
  uint32_t bytes = 0, ahead[16] = {0};
  store_encode(&encoder, 1);
  encoder.header.flags = KVP_STEP_NOT_ACCEPTED_TOLD;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  const uint64_t begin = now_ns();
  for (uint32_t done = 0; done < steps_of_throughput;) {
    for (uint32_t i = 0; i < ring_count; i++) {
      struct exec_completion completion;
      while (exec_ring_try_take(&rings[i], &completion)) {
        HARNESS_CHECK(completion.kind == KVP_COMPLETION_DONE);
        free(completion.payload);
        ahead[i]--;
        done++;
      }
      while (ahead[i] < steps_ahead && exec_ring_post(&rings[i], KVP_COMMAND_STEP, 1, encoded, bytes)) {
        ahead[i]++;
      }
    }
  }
  const double seconds = (double)(now_ns() - begin) / 1e9;
  for (uint32_t i = 0; i < ring_count; i++) {
    for (; ahead[i] > 0; ahead[i]--) {
      free(exec_ring_take(&rings[i]).payload);
    }
  }
  printf("stores of 1 row, %2u rings, %u ahead in each: %.0f steps a second\n", ring_count, steps_ahead,
         steps_of_throughput / seconds);
  free(encoded);
  step_encoder_deinit(&encoder);
}

int main(void) {
  static struct exec_harness link;
  const struct door door = {.link = &link};
  struct step_encoder encoder;
  struct exec_harness_options options = exec_harness_defaults;
  options.thread_count = 0;
  HARNESS_CHECK(exec_harness_start(&link, &options).status == KVP_OK);
  printf("executor: %s; %ld cores\n", link.ready.description, sysconf(_SC_NPROCESSORS_ONLN));
  pool_make(&link);

  step_encoder_init(&encoder, 1, session, 1);
  measure(&door, "empty step", &encoder, rounds, 0, NULL);
  measure(&door, "empty step, executor asleep", &encoder, rounds_asleep, 2000, NULL);
  step_encoder_deinit(&encoder);
  const uint32_t sizes[] = {1, 256, 8192};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    char what[64];
    (void)snprintf(what, sizeof what, "store of %u v41 rows", sizes[i]);
    store_encode(&encoder, sizes[i]);
    measure(&door, what, &encoder, sizes[i] > 1000 ? rounds / 10 : rounds, 0, NULL);
    step_encoder_deinit(&encoder);
  }
  memcpy_floor();
  rings_measure(&link);
  const uint32_t counts[] = {1, 4, 16};
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    throughput_measure(counts[i]);
  }
  HARNESS_CHECK(exec_harness_stop(&link) == 0);
  return 0;
}
