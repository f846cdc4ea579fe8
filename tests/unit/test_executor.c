/* The real executor behind a supervisor in miniature: rows in and out, refusals, death and rebirth. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/format.h"
#include "proto/owner_entry.h"
#include "tests/unit/exec_harness.h"

enum {
  session = 5,
  other_session = 9,
  step_epoch = 15,
  num_blocks = 8,
  tokens_per_block = 64,
  v41_record_bytes = 528,
  v41_row_bytes = 1024,
  v41_block_stride = 33792, /* 64 * 528, a multiple of 1056 */
  main_layers = 2,
  main_bytes = main_layers * num_blocks * v41_block_stride,
  index_tokens_per_block = 16,
  index_block_stride = 1088, /* 16 * 68 */
  index_bytes = num_blocks * index_block_stride,
  buffer_bytes = 4 << 20,
  pool_id = 7,
  main_memory = 1,
  index_memory = 2,
  buffer_memory = 3,
  other_memory = 4,
  buffer = 100,       /* the session's */
  other_buffer = 101, /* another session's */
  watchdog_seconds = 600,
};

/* A pool of a v41 and an index_fp4 region, buffers of two sessions, and blocks in every state. */
struct world {
  struct exec_harness link;
  int main_fd, index_fd, buffer_fd, other_fd, owner_fd;
  uint8_t *main;
  uint8_t *index;
  uint8_t *buffer;
  uint64_t *owners;
  uint64_t tag;
};

static void owners_fill(uint64_t *owners) {
  owners[0] = kvp_owner_entry_make(10, KVP_BLOCK_LEASED, session);
  owners[1] = kvp_owner_entry_make(15, KVP_BLOCK_LEASED, session);
  owners[2] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  owners[3] = kvp_owner_entry_make(16, KVP_BLOCK_LEASED, session); /* after the step's epoch */
  owners[4] = kvp_owner_entry_make(10, KVP_BLOCK_SEALED, session);
  owners[5] = kvp_owner_entry_make(10, KVP_BLOCK_QUARANTINED, session);
  owners[6] = kvp_owner_entry_make(10, KVP_BLOCK_LEASED, other_session);
  owners[7] = kvp_owner_entry_make(10, KVP_BLOCK_FREE, 0);
}

static struct kvp_control_pool pool_spec(void) {
  struct kvp_control_pool pool = {.pool_id = pool_id, .num_blocks = num_blocks, .region_count = 2};
  pool.regions[0] = (struct kvp_control_region){.memory_id = main_memory,
                                                .format = KVP_FORMAT_V41,
                                                .width = 512,
                                                .tokens_per_block = tokens_per_block,
                                                .num_layers = main_layers,
                                                .name = "main"};
  pool.regions[1] = (struct kvp_control_region){.memory_id = index_memory,
                                                .format = KVP_FORMAT_INDEX_FP4,
                                                .width = 128,
                                                .tokens_per_block = index_tokens_per_block,
                                                .num_layers = 1,
                                                .name = "index"};
  return pool;
}

static void assert_ok(struct kvp_error error) {
  if (error.status != KVP_OK) {
    print_error("%s\n", error.text);
  }
  assert_int_equal(error.status, KVP_OK);
}

static void pool_attach(struct world *world) {
  struct kvp_control_pool pool = pool_spec();
  assert_ok(exec_harness_request(&world->link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world->owner_fd, 1));
  assert_ok(exec_harness_buffer_attach(&world->link, buffer, buffer_memory, buffer_bytes, session));
  assert_ok(exec_harness_buffer_attach(&world->link, other_buffer, other_memory, buffer_bytes, other_session));
}

static void world_init_with(struct world *world, const struct exec_harness_options *options) {
  struct kvp_error error;
  memset(world, 0, sizeof *world);
  assert_ok(exec_harness_start(&world->link, options));
  assert_ok(exec_harness_memory_create(&world->link, main_memory, main_bytes, &world->main_fd));
  assert_ok(exec_harness_memory_create(&world->link, index_memory, index_bytes, &world->index_fd));
  assert_ok(exec_harness_memory_create(&world->link, buffer_memory, buffer_bytes, &world->buffer_fd));
  assert_ok(exec_harness_memory_create(&world->link, other_memory, buffer_bytes, &world->other_fd));
  world->owner_fd = kvp_memory_fd_create("owners", num_blocks * sizeof(uint64_t), &error);
  world->main = exec_harness_map(world->main_fd, main_bytes);
  world->index = exec_harness_map(world->index_fd, index_bytes);
  world->buffer = exec_harness_map(world->buffer_fd, buffer_bytes);
  world->owners = (uint64_t *)(void *)exec_harness_map(world->owner_fd, num_blocks * sizeof(uint64_t));
  owners_fill(world->owners);
  pool_attach(world);
}

static void world_init(struct world *world) {
  world_init_with(world, &exec_harness_defaults);
}

static void world_unmap(struct world *world) {
  (void)munmap(world->main, main_bytes);
  (void)munmap(world->index, index_bytes);
  (void)munmap(world->buffer, buffer_bytes);
  (void)munmap(world->owners, num_blocks * sizeof(uint64_t));
  const int fds[] = {world->main_fd, world->index_fd, world->buffer_fd, world->other_fd, world->owner_fd};
  for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
    (void)close(fds[i]);
  }
}

static void world_deinit(struct world *world) {
  assert_int_equal(exec_harness_stop(&world->link), 0); /* exit code 0: no leak either, where that is looked for */
  world_unmap(world);
}

static uint64_t post(struct world *world, const struct step_encoder *encoder) {
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  assert_true(exec_harness_post(&world->link, KVP_COMMAND_STEP, ++world->tag, encoded, bytes));
  free(encoded);
  return world->tag;
}

/* Runs a step that is to be accepted; its DONE payload, reports then results, is the caller's. */
static struct exec_completion run(struct world *world, const struct step_encoder *encoder) {
  const uint64_t tag = post(world, encoder);
  struct exec_completion accepted = exec_harness_take(&world->link);
  if (accepted.kind == KVP_COMPLETION_REFUSED) {
    print_error("%s\n", ((struct kvp_error *)(void *)accepted.payload)->text);
  }
  assert_int_equal(accepted.kind, KVP_COMPLETION_ACCEPTED);
  assert_int_equal(accepted.tag, tag);
  assert_int_equal(accepted.payload_bytes, 0);
  struct exec_completion done = exec_harness_take(&world->link);
  assert_int_equal(done.kind, KVP_COMPLETION_DONE);
  assert_int_equal(done.tag, tag);
  assert_true(done.payload_bytes >= encoder->header.op_count * sizeof(struct kvp_wire_report));
  return done;
}

static struct kvp_wire_report report_of(const struct exec_completion *done, uint32_t op) {
  struct kvp_wire_report report;
  memcpy(&report, done->payload + op * sizeof report, sizeof report);
  return report;
}

/* Runs a step of one op and returns its report. */
static struct kvp_wire_report run_one(struct world *world, struct step_encoder *encoder) {
  assert_int_equal(encoder->header.op_count, 1);
  struct exec_completion done = run(world, encoder);
  struct kvp_wire_report report = report_of(&done, 0);
  free(done.payload);
  step_encoder_deinit(encoder);
  return report;
}

static struct kvp_error refused(struct world *world, const struct step_encoder *encoder) {
  struct kvp_error error;
  const uint64_t tag = post(world, encoder);
  struct exec_completion completion = exec_harness_take(&world->link);
  assert_int_equal(completion.kind, KVP_COMPLETION_REFUSED);
  assert_int_equal(completion.tag, tag);
  assert_int_equal(completion.payload_bytes, sizeof error);
  memcpy(&error, completion.payload, sizeof error);
  free(completion.payload);
  return error;
}

static struct kvp_wire_op *add_store(struct step_encoder *encoder, const int32_t *slots, uint32_t count) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_STORE);
  op->pool_id = pool_id;
  op->source = step_view(buffer, 0, 256, v41_row_bytes, v41_row_bytes);
  op->arrays[0] = step_encoder_array(encoder, slots, count * 4);
  return op;
}

static struct kvp_wire_op *add_load(struct step_encoder *encoder, const int32_t *segments, uint32_t count,
                                    uint64_t total_k) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_LOAD);
  op->pool_id = pool_id;
  op->source = step_view(buffer, 1 << 20, 1024, v41_row_bytes, v41_row_bytes);
  op->total_k = total_k;
  op->arrays[0] = step_encoder_array(encoder, segments, count * 16);
  return op;
}

/* BF16 rows of small exact values: k * 2^-3 with |k| <= 15 in every group of 32, so that v41 keeps them exactly
 * (their largest is 15/8; scaled by a power of two they are e4m3 numbers). */
static uint16_t exact_bf16(uint32_t row, uint32_t column) {
  const float value = (float)((int)((row * 7 + column * 5) % 31) - 15) / 8.0F;
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static void rows_fill(uint8_t *out, uint32_t row_count, uint32_t width, uint32_t seed) {
  for (uint32_t row = 0; row < row_count; row++) {
    for (uint32_t column = 0; column < width; column++) {
      const uint16_t value = exact_bf16(row + seed, column);
      memcpy(out + ((size_t)row * width + column) * 2, &value, 2);
    }
  }
}

/* ---- golden files ---- */

struct golden {
  char path[512];
  uint32_t block_size, num_blocks, total_k, block_stride;
};

static uint8_t *golden_read(const struct golden *golden, const char *name, uint32_t *bytes) {
  char path[1024];
  (void)snprintf(path, sizeof path, "%s/%s.bin", golden->path, name);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  struct stat stat;
  assert_true(fd >= 0);
  assert_int_equal(fstat(fd, &stat), 0);
  uint8_t *data = malloc((size_t)stat.st_size);
  assert_non_null(data);
  assert_int_equal(read(fd, data, (size_t)stat.st_size), stat.st_size);
  assert_int_equal(close(fd), 0);
  *bytes = (uint32_t)stat.st_size;
  return data;
}

static struct golden golden_open(const char *name) {
  struct golden golden = {0};
  char line[1024];
  (void)snprintf(golden.path, sizeof golden.path, "%s/%s", KVPOOL_GOLDEN_DIR, name);
  (void)snprintf(line, sizeof line, "%s/case.txt", golden.path);
  FILE *file = fopen(line, "re");
  assert_non_null(file);
  while (fgets(line, sizeof line, file) != NULL) {
    (void)sscanf(line, "param block_size %u", &golden.block_size);
    (void)sscanf(line, "param num_blocks %u", &golden.num_blocks);
    (void)sscanf(line, "param total_k %u", &golden.total_k);
    (void)sscanf(line, "param block_stride_bytes %u", &golden.block_stride);
  }
  assert_int_equal(fclose(file), 0);
  return golden;
}

struct golden_format {
  const char *name;
  enum kvp_format_id format;
  uint32_t width, out_row_bytes, scale_bytes;
};

/* A region made of the case's parameters; store, compare the cache, load, compare the output: every byte. */
static void golden_check(const struct golden_format *format) {
  struct exec_harness link;
  struct golden golden = golden_open(format->name);
  struct kvp_error error;
  uint32_t cache_bytes = 0, out_bytes = 0, rows_bytes = 0, slots_bytes = 0, segments_bytes = 0, scale_bytes = 0;
  uint8_t *cache = golden_read(&golden, "cache", &cache_bytes);
  uint8_t *out = golden_read(&golden, "out", &out_bytes);
  uint8_t *rows = golden_read(&golden, "rows", &rows_bytes);
  uint8_t *slots = golden_read(&golden, "slots", &slots_bytes);
  uint8_t *segments = golden_read(&golden, "segments", &segments_bytes);
  uint8_t *scales = format->scale_bytes > 0 ? golden_read(&golden, "out_scale", &scale_bytes) : NULL;
  int region_fd = -1, buffer_fd = -1;
  const uint32_t row_bytes = format->width * 2;

  assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  assert_ok(exec_harness_memory_create(&link, 1, cache_bytes, &region_fd));
  assert_ok(exec_harness_memory_create(&link, 2, 1 << 20, &buffer_fd));
  int owner_fd = kvp_memory_fd_create("owners", golden.num_blocks * 8, &error);
  uint8_t *region = exec_harness_map(region_fd, cache_bytes);
  uint8_t *shared = exec_harness_map(buffer_fd, 1 << 20);
  uint64_t *owners = (uint64_t *)(void *)exec_harness_map(owner_fd, golden.num_blocks * 8);
  for (uint32_t i = 0; i < golden.num_blocks; i++) {
    owners[i] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  }
  struct kvp_control_pool pool = {.pool_id = 1, .num_blocks = golden.num_blocks, .region_count = 1};
  pool.regions[0] = (struct kvp_control_region){.memory_id = 1,
                                                .format = format->format,
                                                .width = format->width,
                                                .tokens_per_block = golden.block_size,
                                                .num_layers = 1,
                                                .name = "golden"};
  assert_ok(exec_harness_request(&link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &owner_fd, 1));
  assert_ok(exec_harness_buffer_attach(&link, 1, 2, 1 << 20, session));
  memset(region, 0xA5, cache_bytes);
  memset(shared, 0x5A, 1 << 20);
  memcpy(shared, rows, rows_bytes);

  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, 1);
  struct kvp_wire_op *store = step_encoder_op(&encoder, KVP_OP_STORE);
  store->pool_id = 1;
  store->source = step_view(1, 0, rows_bytes / row_bytes, row_bytes, row_bytes);
  store->arrays[0] = step_encoder_array(&encoder, slots, slots_bytes);
  struct kvp_wire_op *load = step_encoder_op(&encoder, KVP_OP_LOAD);
  load->pool_id = 1;
  load->source = step_view(1, 1 << 19, golden.total_k, format->out_row_bytes, format->out_row_bytes);
  if (scales != NULL) {
    load->second = step_view(1, 3 << 18, golden.total_k, format->scale_bytes, format->scale_bytes);
  }
  load->total_k = golden.total_k;
  load->arrays[0] = step_encoder_array(&encoder, segments, segments_bytes);
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  assert_true(exec_harness_post(&link, KVP_COMMAND_STEP, 1, encoded, bytes));
  assert_int_equal(exec_harness_take(&link).kind, KVP_COMPLETION_ACCEPTED);
  struct exec_completion done = exec_harness_take(&link);
  assert_int_equal(done.kind, KVP_COMPLETION_DONE);
  free(done.payload);

  assert_memory_equal(region, cache, cache_bytes);
  assert_memory_equal(shared + (1 << 19), out, out_bytes);
  assert_int_equal(shared[(1 << 19) + out_bytes], 0x5A);
  if (scales != NULL) {
    assert_memory_equal(shared + (3 << 18), scales, scale_bytes);
    assert_int_equal(shared[(3 << 18) + scale_bytes], 0x5A);
  }
  assert_int_equal(exec_harness_stop(&link), 0);
  void *allocated[] = {cache, out, rows, slots, segments, scales, encoded};
  for (size_t i = 0; i < sizeof allocated / sizeof allocated[0]; i++) {
    free(allocated[i]);
  }
  step_encoder_deinit(&encoder);
  (void)munmap(region, cache_bytes);
  (void)munmap(shared, 1 << 20);
  (void)munmap(owners, golden.num_blocks * 8);
  (void)close(region_fd);
  (void)close(buffer_fd);
  (void)close(owner_fd);
}

static void test_golden(void **state) {
  (void)state;
  const struct golden_format formats[] = {
      {"v41_b64", KVP_FORMAT_V41, 512, 1024, 0},
      {"v41_fp4_b133", KVP_FORMAT_V41_FP4, 512, 1024, 0},
      {"index_fp4_b133", KVP_FORMAT_INDEX_FP4, 128, 64, 4},
      {"index_fp8_f32_b64", KVP_FORMAT_INDEX_FP8_F32, 128, 128, 4},
      {"index_mxfp8_b133", KVP_FORMAT_INDEX_MXFP8, 128, 128, 4},
      {"bf16_b64", KVP_FORMAT_BF16, 512, 1024, 0},
  };
  for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
    golden_check(&formats[i]);
  }
}

/* ---- store and load ---- */

static void test_round_trip(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  rows_fill(world.buffer, 256, 512, 1);
  memset(world.buffer + (1 << 20), 0x5A, 2 << 20);
  int32_t slots[192];
  for (int i = 0; i < 192; i++) {
    slots[i] = i % 3 == 1 ? -1 : 191 - i; /* blocks 0 .. 2, backwards, every third left out */
  }
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *store = add_store(&encoder, slots, 192);
  store->layer = 1;
  store->second = step_view(buffer, 3 << 20, 192, v41_row_bytes, v41_row_bytes); /* cast_back */
  /* Block 2 whole, two zero rows, a piece of block 0; a gap before and behind. */
  const int32_t segments[] = {2, 0, 64, 1, -1, 5, 7, 65, 0, 10, 30, 70, 1, 64, 64, 0};
  struct kvp_wire_op *load = add_load(&encoder, segments, 4, 100);
  load->layer = 1;
  struct exec_completion done = run(&world, &encoder);
  step_encoder_deinit(&encoder);

  const struct kvp_wire_report stored = report_of(&done, 0);
  const struct kvp_wire_report loaded = report_of(&done, 1);
  assert_int_equal(stored.rows_stored, 128);
  assert_int_equal(stored.rows_skipped, 64);
  assert_int_equal(stored.rows_rejected, 0);
  assert_int_equal(stored.flags, 0);
  assert_int_equal(loaded.rows_loaded, 64 + 2 + 20);
  assert_true(stored.queued_ns <= stored.started_ns && stored.started_ns <= stored.finished_ns);
  assert_true(stored.finished_ns <= loaded.started_ns && loaded.started_ns <= loaded.finished_ns);
  free(done.payload);

  /* cast_back: every row, skipped ones too; the values are exact, so it equals the source. */
  assert_memory_equal(world.buffer + (3 << 20), world.buffer, 192 * v41_row_bytes);
  const uint8_t *out = world.buffer + (1 << 20);
  for (int row = 0; row < 1024; row++) {
    uint8_t expected[v41_row_bytes];
    memset(expected, 0x5A, sizeof expected);
    int slot = -1;
    if (row >= 1 && row < 65) {
      slot = 2 * 64 + row - 1;
    } else if (row >= 65 && row < 67) {
      memset(expected, 0, sizeof expected);
    } else if (row >= 70 && row < 90) {
      slot = 10 + row - 70;
    }
    if (slot >= 0 && (191 - slot) % 3 != 1) {
      memcpy(expected, world.buffer + (size_t)(191 - slot) * v41_row_bytes, sizeof expected);
    } else if (slot >= 0) {
      memset(expected, 0, sizeof expected); /* never stored: new memory is zero, and so is a zero record */
    }
    assert_memory_equal(out + (size_t)row * v41_row_bytes, expected, sizeof expected);
  }
  for (int i = 0; i < main_bytes / 2; i++) {
    assert_int_equal(world.main[i], 0); /* layer 0 */
  }
  world_deinit(&world);
}

/* Segments longer than a piece, as ring regions have them, and rows of strided views. */
static void test_long_segments(void **state) {
  (void)state;
  struct exec_harness link;
  struct kvp_error error;
  enum { ring = 4096, big_bytes = 24 << 20, stride = 1040, source = 0, out = 12 << 20 };
  int region_fd = -1, buffer_fd = -1;
  assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  assert_ok(exec_harness_memory_create(&link, 1, (uint64_t)ring * 528, &region_fd)); /* a multiple of 1056 */
  assert_ok(exec_harness_memory_create(&link, 2, big_bytes, &buffer_fd));
  int owner_fd = kvp_memory_fd_create("owners", 8, &error);
  uint64_t *owners = (uint64_t *)(void *)exec_harness_map(owner_fd, 8);
  uint8_t *shared = exec_harness_map(buffer_fd, big_bytes);
  owners[0] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  struct kvp_control_pool pool = {.pool_id = 1, .num_blocks = 1, .region_count = 1, .kind = KVP_POOL_RING};
  pool.regions[0] = (struct kvp_control_region){
      .memory_id = 1, .format = KVP_FORMAT_V41, .width = 512, .tokens_per_block = ring, .num_layers = 1, .name = "r"};
  assert_ok(exec_harness_request(&link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &owner_fd, 1));
  assert_ok(exec_harness_buffer_attach(&link, 1, 2, big_bytes, session));

  int32_t *slots = malloc(ring * sizeof *slots);
  assert_non_null(slots);
  for (uint32_t i = 0; i < ring; i++) {
    slots[i] = (int32_t)((i * 1021) % ring); /* 1021 is odd: each once */
    uint16_t row[512];
    for (uint32_t k = 0; k < 512; k++) {
      row[k] = exact_bf16(i, k);
    }
    memcpy(shared + source + (size_t)i * stride, row, sizeof row);
  }
  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, 1);
  struct kvp_wire_op *store = step_encoder_op(&encoder, KVP_OP_STORE);
  store->pool_id = 1;
  store->source = step_view(1, source, ring, 1024, stride);
  store->arrays[0] = step_encoder_array(&encoder, slots, ring * 4);
  const int32_t segments[] = {0, 784, 4096, 0, 0, 0, 784, 3312}; /* a ring read: older part first */
  struct kvp_wire_op *load = step_encoder_op(&encoder, KVP_OP_LOAD);
  load->pool_id = 1;
  load->source = step_view(1, out, ring, 1024, stride);
  load->total_k = ring;
  load->arrays[0] = step_encoder_array(&encoder, segments, sizeof segments);
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  assert_true(exec_harness_post(&link, KVP_COMMAND_STEP, 1, encoded, bytes));
  assert_int_equal(exec_harness_take(&link).kind, KVP_COMPLETION_ACCEPTED);
  struct exec_completion done = exec_harness_take(&link);
  assert_int_equal(done.kind, KVP_COMPLETION_DONE);
  assert_int_equal(report_of(&done, 0).rows_stored, ring);
  assert_int_equal(report_of(&done, 1).rows_loaded, ring);
  for (uint32_t i = 0; i < ring; i++) {
    const uint32_t row = ((uint32_t)slots[i] + ring - 784) % ring;
    assert_memory_equal(shared + out + (size_t)row * stride, shared + source + (size_t)i * stride, 1024);
  }
  free(done.payload);
  free(encoded);
  free(slots);
  step_encoder_deinit(&encoder);
  assert_int_equal(exec_harness_stop(&link), 0);
  (void)munmap(owners, 8);
  (void)munmap(shared, big_bytes);
  (void)close(region_fd);
  (void)close(buffer_fd);
  (void)close(owner_fd);
}

/* ---- refusals ---- */

/* A step of four ops, of which the fourth is the bad one. */
static struct kvp_wire_op *begin_refusal(struct step_encoder *encoder, bool is_store) {
  static const int32_t good_slots[] = {0, 1, 2};
  static const int32_t good_segments[] = {0, 0, 64, 0, 1, 0, 10, 64};
  step_encoder_init(encoder, 1, session, step_epoch);
  (void)add_store(encoder, good_slots, 3);
  (void)add_load(encoder, good_segments, 2, 100);
  struct kvp_wire_op *fill = step_encoder_op(encoder, KVP_OP_BUFFER_FILL);
  fill->source = step_view(buffer, 2 << 20, 1, 4096, 4096);
  fill->argument = 0x77;
  return is_store ? add_store(encoder, good_slots, 3) : add_load(encoder, good_segments, 2, 100);
}

struct refusal_world {
  struct world world;
  uint8_t *main_before;
  uint8_t *buffer_before;
};

/* The step is refused with these facts about op 3, and nothing of it ran. */
static void check_refusal(struct refusal_world *it, struct step_encoder *encoder, enum kvp_status status,
                          const char *array, int64_t position, int64_t value, const char *text) {
  const struct kvp_error error = refused(&it->world, encoder);
  step_encoder_deinit(encoder);
  if (error.status != (int32_t)status || error.op != 3 || strcmp(error.array, array) != 0 ||
      error.position != position || error.value != value || strstr(error.text, text) == NULL) {
    fail_msg("expected %s op 3 %s[%lld] = %lld '%s', got %s op %d %s[%lld] = %lld '%s'", kvp_status_name(status),
             array, (long long)position, (long long)value, text, kvp_status_name((enum kvp_status)error.status),
             error.op, error.array, (long long)error.position, (long long)error.value, error.text);
  }
  assert_memory_equal(it->world.main, it->main_before, main_bytes);
  assert_memory_equal(it->world.buffer, it->buffer_before, buffer_bytes);
}

static void refuse_slots(struct refusal_world *it, const int32_t *slots, uint32_t count, enum kvp_status status,
                         int64_t position, int64_t value, const char *text) {
  struct step_encoder encoder;
  struct kvp_wire_op *op = begin_refusal(&encoder, true);
  op->arrays[0] = step_encoder_array(&encoder, slots, count * 4);
  check_refusal(it, &encoder, status, "slots", position, value, text);
}

static void refusals_of_slots(struct refusal_world *it) {
  const int32_t minus_two[] = {0, -1, -2};
  refuse_slots(it, minus_two, 3, KVP_OUT_OF_RANGE, 2, -2, "op 3 store: slots[2] = -2 < -1");
  const int32_t least[] = {INT32_MIN};
  refuse_slots(it, least, 1, KVP_OUT_OF_RANGE, 0, INT32_MIN, "slots[0] = -2147483648 < -1");
  const int32_t end[] = {5, 512}; /* 8 * 64 */
  refuse_slots(it, end, 2, KVP_OUT_OF_RANGE, 1, 512, "slots[1] = 512 >= 8 blocks * 64 tokens_per_block");
  const int32_t nan_bits[] = {0x7FC00000};
  refuse_slots(it, nan_bits, 1, KVP_OUT_OF_RANGE, 0, 0x7FC00000, "slots[0] = 2143289344");
  const int32_t twice[] = {3, 70, -1, 9, 70};
  refuse_slots(it, twice, 5, KVP_INVALID_ARGUMENT, 4, 70, "slots[4] = 70 is slots[1] again");
  const int32_t not_owned[] = {1, 6 * 64 + 63};
  refuse_slots(it, not_owned, 2, KVP_NOT_OWNER, 1, 447, "block 6 is not this session's (another session's)");
  const int32_t unowned[] = {7 * 64};
  refuse_slots(it, unowned, 1, KVP_NOT_OWNER, 0, 448, "block 7 is not this session's (free)");
  const int32_t quarantined[] = {5 * 64 + 1};
  refuse_slots(it, quarantined, 1, KVP_NOT_OWNER, 0, 321, "(being freed)");
  const int32_t sealed[] = {-1, 4 * 64};
  refuse_slots(it, sealed, 2, KVP_SEALED_BLOCK, 1, 256, "block 4 is sealed");
  const int32_t stale[] = {0, 64, 3 * 64};
  refuse_slots(it, stale, 3, KVP_STALE_BLOCK, 2, 192, "block 3 was assigned at epoch 16, the step's is 15");
  int32_t many[257];
  for (int i = 0; i < 257; i++) {
    many[i] = -1;
  }
  refuse_slots(it, many, 257, KVP_OUT_OF_RANGE, 256, 257, "257 slots, but source has 256 rows");
}

static void refuse_segment(struct refusal_world *it, const int32_t *segment, enum kvp_status status, int64_t position,
                           int64_t value, const char *text) {
  struct step_encoder encoder;
  struct kvp_wire_op *op = begin_refusal(&encoder, false);
  int32_t segments[8] = {0, 0, 10, 40};
  memcpy(segments + 4, segment, 16);
  op->arrays[0] = step_encoder_array(&encoder, segments, sizeof segments);
  check_refusal(it, &encoder, status, "segments", position, value, text);
}

static void refusals_of_segments(struct refusal_world *it) {
  refuse_segment(it, (int32_t[]){-2, 0, 1, 0}, KVP_OUT_OF_RANGE, 4, -2, "segments[1].src_block = -2 < -1");
  refuse_segment(it, (int32_t[]){8, 0, 1, 0}, KVP_OUT_OF_RANGE, 4, 8, "segments[1].src_block = 8 >= num_blocks 8");
  refuse_segment(it, (int32_t[]){0, -1, 1, 0}, KVP_OUT_OF_RANGE, 5, -1, "segments[1].src_begin = -1 < 0");
  refuse_segment(it, (int32_t[]){0, 5, 4, 0}, KVP_OUT_OF_RANGE, 6, 4, "segments[1].src_end = 4 < src_begin 5");
  refuse_segment(it, (int32_t[]){0, 0, 65, 0}, KVP_OUT_OF_RANGE, 6, 65,
                 "op 3 load: segments[1].src_end = 65 > tokens_per_block 64");
  refuse_segment(it, (int32_t[]){-1, 0, 65, 0}, KVP_OUT_OF_RANGE, 6, 65, "src_end = 65 > tokens_per_block 64");
  refuse_segment(it, (int32_t[]){0, 0, 1, -1}, KVP_OUT_OF_RANGE, 7, -1, "segments[1].dst_offset = -1 < 0");
  refuse_segment(it, (int32_t[]){0, 0, 10, 91}, KVP_OUT_OF_RANGE, 7, 91, "rows up to 101 > total_k 100");
  refuse_segment(it, (int32_t[]){0, 0, 64, INT32_MAX}, KVP_OUT_OF_RANGE, 7, INT32_MAX, "2147483711 > total_k 100");
  refuse_segment(it, (int32_t[]){0, 0, 10, 49}, KVP_INVALID_ARGUMENT, 7, 49, "overlap those of segments[0]");
  refuse_segment(it, (int32_t[]){0, 0, 10, 31}, KVP_INVALID_ARGUMENT, 7, 31, "overlap those of segments[0]");
  refuse_segment(it, (int32_t[]){-1, 0, 1, 45}, KVP_INVALID_ARGUMENT, 7, 45, "overlap those of segments[0]");
  refuse_segment(it, (int32_t[]){6, 0, 1, 0}, KVP_NOT_OWNER, 4, 6, "block 6 is not this session's");
  refuse_segment(it, (int32_t[]){5, 0, 1, 0}, KVP_NOT_OWNER, 4, 5, "being freed");
  refuse_segment(it, (int32_t[]){3, 0, 1, 0}, KVP_STALE_BLOCK, 4, 3, "epoch 16");

  struct step_encoder encoder;
  struct kvp_wire_op *op = begin_refusal(&encoder, false);
  op->total_k = 1025;
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "total_k", -1, 1025, "total_k = 1025, but out has 1024 rows");
  op = begin_refusal(&encoder, false);
  op->arrays[0] = step_encoder_array(&encoder, (int32_t[]){0, 0, 1}, 12);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "segments", -1, 12, "12 bytes are no multiple of 16");
}

static void refusals_of_names(struct refusal_world *it) {
  struct step_encoder encoder;
  begin_refusal(&encoder, true)->pool_id = 8;
  check_refusal(it, &encoder, KVP_UNKNOWN_POOL, "pool", -1, 8, "op 3 store: pool 8");
  begin_refusal(&encoder, true)->region = 2;
  check_refusal(it, &encoder, KVP_UNKNOWN_REGION, "region", -1, 2, "region 2, the pool has 2");
  begin_refusal(&encoder, false)->layer = 2;
  check_refusal(it, &encoder, KVP_UNKNOWN_LAYER, "layer", -1, 2, "layer 2, region 'main' has 2");
  begin_refusal(&encoder, true)->source.buffer_id = 55;
  check_refusal(it, &encoder, KVP_UNKNOWN_BUFFER, "source", -1, 55, "buffer 55");
  begin_refusal(&encoder, false)->source.buffer_id = other_buffer;
  check_refusal(it, &encoder, KVP_UNKNOWN_BUFFER, "out", -1, other_buffer, "buffer 101 is not this session's");
  begin_refusal(&encoder, true)->kind = 3;
  check_refusal(it, &encoder, KVP_UNIMPLEMENTED, "kind", -1, 3, "kind 3 is not known");
  begin_refusal(&encoder, true)->flags = 4;
  check_refusal(it, &encoder, KVP_MALFORMED, "flags", -1, 4, "0x4");
  begin_refusal(&encoder, true)->reserved[12] = 1;
  check_refusal(it, &encoder, KVP_MALFORMED, "reserved", 12, 1, "reserved");
  begin_refusal(&encoder, true)->arrays[1] = 0;
  check_refusal(it, &encoder, KVP_MALFORMED, "arrays", 1, 0, "it has no array 1");
  begin_refusal(&encoder, true)->arrays[0] = 4;
  check_refusal(it, &encoder, KVP_MALFORMED, "slots", -1, 4, "array 4, the step has 3");
  begin_refusal(&encoder, true)->arrays[0] = KVP_WIRE_NO_ARRAY;
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "slots", -1, 0, "slots are missing");
}

static void refusals_of_views(struct refusal_world *it) {
  struct step_encoder encoder;
  struct kvp_wire_view *view = &begin_refusal(&encoder, true)->source;
  *view = step_view(buffer, 0, 256, 1056, 1056);
  check_refusal(it, &encoder, KVP_WRONG_FORMAT, "source", -1, 1056, "source.row_bytes = 1056");
  begin_refusal(&encoder, false)->source = step_view(buffer, 0, 100, 528, 1024);
  check_refusal(it, &encoder, KVP_WRONG_FORMAT, "out", -1, 528, "out.row_bytes = 528, rows of this region have 1024");
  begin_refusal(&encoder, true)->source = step_view(buffer, 8, 256, 1024, 1024);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "source", -1, 8, "offset_bytes = 8 is no multiple of 16");
  begin_refusal(&encoder, true)->source = step_view(buffer, 0, 256, 1024, 1032);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "source", -1, 1032,
                "row_stride_bytes = 1032 is no multiple of 16");
  begin_refusal(&encoder, true)->source = step_view(buffer, 0, 256, 1024, 1008);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "source", -1, 1008, "row_stride_bytes = 1008 < row_bytes 1024");
  begin_refusal(&encoder, true)->source = step_view(buffer, 16, 4096, 1024, 1024);
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "source", -1, 4096, "don't fit a buffer of 4194304 bytes");
  begin_refusal(&encoder, true)->source = step_view(buffer, UINT64_MAX - 15, 1, 1024, 1024);
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "source", -1, 1, "don't fit");
  begin_refusal(&encoder, true)->source = step_view(buffer, 0, UINT64_C(1) << 62, 1024, 1024);
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "source", -1, INT64_C(1) << 62, "don't fit");
  begin_refusal(&encoder, true)->source = step_view(buffer, 0, 3, 1024, UINT64_MAX - 15);
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "source", -1, 3, "don't fit");
  begin_refusal(&encoder, true)->source.flags = 0;
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "source", -1, 0, "source is missing");
  begin_refusal(&encoder, true)->source.flags = 3;
  check_refusal(it, &encoder, KVP_MALFORMED, "source", -1, 3, "flags 0x3");

  begin_refusal(&encoder, true)->second = step_view(buffer, 3072, 64, 1024, 1024);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "cast_back", -1, 3072, "cast_back overlaps source");
  begin_refusal(&encoder, true)->second = step_view(buffer, 255 * 1024 + 1008, 3, 1024, 1024);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "cast_back", -1, 262128, "cast_back overlaps source");
  begin_refusal(&encoder, true)->second = step_view(buffer, 1 << 20, 2, 1024, 1024);
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "slots", 2, 3, "3 slots, but cast_back has 2 rows");
  begin_refusal(&encoder, false)->second = step_view(buffer, 0, 100, 4, 4);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "out_scales", -1, buffer, "out_scales: there is none here");
}

static void refusals_of_index_region(struct refusal_world *it) {
  struct step_encoder encoder;
  const int32_t segments[] = {0, 0, 16, 0};
  struct kvp_wire_op *op = begin_refusal(&encoder, true);
  op->region = 1;
  op->source = step_view(buffer, 0, 3, 256, 256);
  op->second = step_view(buffer, 1 << 20, 3, 256, 256);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "cast_back", -1, buffer, "format index_fp4 has none");
  op = begin_refusal(&encoder, false);
  op->region = 1;
  op->arrays[0] = step_encoder_array(&encoder, segments, sizeof segments);
  op->source = step_view(buffer, 0, 100, 64, 64);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "out_scales", -1, 0, "out_scales is missing");
  op = begin_refusal(&encoder, false);
  op->region = 1;
  op->source = step_view(buffer, 0, 100, 64, 64);
  op->second = step_view(buffer, 1 << 20, 100, 4, 6);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "out_scales", -1, 6, "no multiple of 4");
  op = begin_refusal(&encoder, false);
  op->region = 1;
  op->source = step_view(buffer, 0, 100, 64, 64);
  op->second = step_view(buffer, 1 << 20, 99, 4, 4);
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "total_k", -1, 100, "out_scales has 99 rows");
  op = begin_refusal(&encoder, false);
  op->region = 1;
  op->source = step_view(buffer, 0, 100, 64, 64);
  op->second = step_view(buffer, 6384, 100, 4, 4);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "out_scales", -1, 6384, "out_scales overlaps out");
}

static void refusals_of_buffer_arrays(struct refusal_world *it) {
  struct step_encoder encoder;
  struct kvp_wire_op *op = begin_refusal(&encoder, true);
  op->arrays[0] = step_encoder_buffer_array(&encoder, other_buffer, 0, 12);
  check_refusal(it, &encoder, KVP_UNKNOWN_BUFFER, "slots", -1, other_buffer, "buffer 101");
  op = begin_refusal(&encoder, true);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, 2, 12);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "slots", -1, 2, "offset 2 is no multiple of 4");
  op = begin_refusal(&encoder, true);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, buffer_bytes - 8, 12);
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "slots", -1, 12, "don't fit a buffer");
  op = begin_refusal(&encoder, true);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, 0, 257 * 4);
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "slots", 256, 257, "257 slots, but source has 256 rows");
  op = begin_refusal(&encoder, false);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, (1 << 20) + 64, 16);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "out", -1, 0, "out overlaps segments");
}

static void test_refusals(void **state) {
  (void)state;
  struct refusal_world it;
  struct step_encoder encoder;
  world_init(&it.world);
  for (int i = 0; i < main_bytes; i++) {
    it.world.main[i] = (uint8_t)(i * 7);
  }
  for (int i = 0; i < buffer_bytes; i++) {
    it.world.buffer[i] = (uint8_t)(i * 5);
  }
  it.main_before = malloc(main_bytes);
  it.buffer_before = malloc(buffer_bytes);
  assert_true(it.main_before != NULL && it.buffer_before != NULL);
  memcpy(it.main_before, it.world.main, main_bytes);
  memcpy(it.buffer_before, it.world.buffer, buffer_bytes);

  refusals_of_slots(&it);
  refusals_of_segments(&it);
  refusals_of_names(&it);
  refusals_of_views(&it);
  refusals_of_index_region(&it);
  refusals_of_buffer_arrays(&it);

  /* The step that all of these were made from is a good one, and so is an operator's on anybody's blocks. */
  (void)begin_refusal(&encoder, true);
  struct exec_completion done = run(&it.world, &encoder);
  free(done.payload);
  step_encoder_deinit(&encoder);
  const int32_t everywhere[] = {3 * 64, 4 * 64, 5 * 64, 6 * 64, 7 * 64, -1};
  (void)begin_refusal(&encoder, true);
  encoder.header.owner = 0;
  encoder.ops[3].arrays[0] = step_encoder_array(&encoder, everywhere, sizeof everywhere);
  done = run(&it.world, &encoder);
  assert_int_equal(report_of(&done, 3).rows_stored, 5);
  free(done.payload);
  step_encoder_deinit(&encoder);
  free(it.main_before);
  free(it.buffer_before);
  world_deinit(&it.world);
}

/* Bytes that are no step at all. */
static void test_malformed_steps(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  const struct {
    size_t offset;
    uint32_t word;
    enum kvp_status status;
  } edits[] = {
      {offsetof(struct kvp_wire_step, magic), 1, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, version), 2, KVP_VERSION_MISMATCH},
      {offsetof(struct kvp_wire_step, op_count), 1025, KVP_TOO_LARGE},
      {offsetof(struct kvp_wire_step, op_count), 900, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, array_count), UINT32_MAX, KVP_TOO_LARGE},
      {offsetof(struct kvp_wire_step, array_count), 1000, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, bytes), 10, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, owner), 65536, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, flags), 1, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, reserved), 1, KVP_MALFORMED},
      /* the first array's offset: inside the tables, odd, past the end */
      {sizeof(struct kvp_wire_step) + sizeof(struct kvp_wire_op) + 8, 64, KVP_MALFORMED},
      {sizeof(struct kvp_wire_step) + sizeof(struct kvp_wire_op) + 8, 361, KVP_MALFORMED},
      {sizeof(struct kvp_wire_step) + sizeof(struct kvp_wire_op) + 8, 1 << 20, KVP_MALFORMED},
      {sizeof(struct kvp_wire_step) + sizeof(struct kvp_wire_op) + 20, UINT32_MAX, KVP_MALFORMED},
  };
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)add_store(&encoder, (int32_t[]){1, 2}, 2);
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  uint8_t *edited = malloc(bytes);
  assert_non_null(edited);
  for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
    memcpy(edited, encoded, bytes);
    memcpy(edited + edits[i].offset, &edits[i].word, 4);
    assert_true(exec_harness_post(&world.link, KVP_COMMAND_STEP, i, edited, bytes));
    struct exec_completion completion = exec_harness_take(&world.link);
    assert_int_equal(completion.kind, KVP_COMPLETION_REFUSED);
    assert_int_equal(completion.tag, i);
    assert_int_equal(((struct kvp_error *)(void *)completion.payload)->status, edits[i].status);
    assert_int_equal(((struct kvp_error *)(void *)completion.payload)->op, -1);
    free(completion.payload);
  }
  for (uint32_t cut = 0; cut < bytes; cut += 7) { /* a step cut short, its length made to fit or not */
    memcpy(edited, encoded, bytes);
    if (cut % 2 == 0 && cut >= 20) {
      memcpy(edited + offsetof(struct kvp_wire_step, bytes), &cut, 4);
    }
    assert_true(exec_harness_post(&world.link, KVP_COMMAND_STEP, cut, edited, cut));
    struct exec_completion completion = exec_harness_take(&world.link);
    assert_int_equal(completion.kind, KVP_COMPLETION_REFUSED);
    free(completion.payload);
  }
  uint8_t *huge = calloc(1, kvp_step_bytes_max + 1);
  assert_non_null(huge);
  assert_true(exec_harness_post(&world.link, KVP_COMMAND_STEP, 1, huge, kvp_step_bytes_max + 1));
  struct exec_completion completion = exec_harness_take(&world.link);
  assert_int_equal(((struct kvp_error *)(void *)completion.payload)->status, KVP_TOO_LARGE);
  free(completion.payload);
  free(huge);
  free(edited);
  free(encoded);
  step_encoder_deinit(&encoder);
  world_deinit(&world);
}

/* ---- the daemon's own ops ---- */

static void test_transfers(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  for (int i = 0; i < main_bytes; i++) {
    world.main[i] = (uint8_t)(i * 11 + i / 256);
  }
  memset(world.buffer, 0xEE, buffer_bytes);
  uint8_t data[300];
  for (int i = 0; i < 300; i++) {
    data[i] = (uint8_t)(i + 1);
  }
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *write = step_encoder_op(&encoder, KVP_OP_BUFFER_WRITE); /* 3 rows of 100, odd places */
  write->source = step_view(buffer, 13, 3, 100, 177);
  write->arrays[0] = step_encoder_array(&encoder, data, 300);
  struct kvp_wire_op *fill = step_encoder_op(&encoder, KVP_OP_BUFFER_FILL);
  fill->source = step_view(buffer, 1 << 20, 1 << 10, 1000, 1024);
  fill->argument = 0xAB42;
  struct kvp_wire_op *read = step_encoder_op(&encoder, KVP_OP_BUFFER_READ);
  read->source = step_view(buffer, 13 + 177, 2, 50, 177);
  struct kvp_wire_op *region = step_encoder_op(&encoder, KVP_OP_REGION_READ);
  region->pool_id = pool_id;
  region->layer = 1;
  region->argument = 777;
  region->total_k = 1 << 18;
  struct exec_completion done = run(&world, &encoder);
  step_encoder_deinit(&encoder);
  const uint8_t *results = done.payload + 4 * sizeof(struct kvp_wire_report);
  assert_int_equal(done.payload_bytes, 4 * sizeof(struct kvp_wire_report) + 100 + (1 << 18));
  assert_memory_equal(results, data + 100, 50);
  assert_memory_equal(results + 50, data + 200, 50);
  assert_memory_equal(results + 100, world.main + main_bytes / 2 + 777, 1 << 18);
  assert_int_equal(report_of(&done, 0).bytes_written, 300);
  assert_int_equal(report_of(&done, 1).bytes_written, 1000 << 10);
  assert_int_equal(report_of(&done, 3).bytes_read, 1 << 18);
  free(done.payload);
  for (int i = 0; i < 4096; i++) {
    const int row = (i - 13) / 177, column = (i - 13) % 177;
    const bool written = i >= 13 && row < 3 && column < 100;
    assert_int_equal(world.buffer[i], written ? data[row * 100 + column] : 0xEE);
  }
  for (int i = 0; i < 1 << 20; i++) {
    assert_int_equal(world.buffer[(1 << 20) + i], i % 1024 < 1000 ? 0x42 : 0xEE);
  }

  step_encoder_init(&encoder, 1, session, step_epoch);
  for (int i = 0; i < 2; i++) {
    step_encoder_op(&encoder, KVP_OP_BUFFER_READ)->source = step_view(buffer, 0, 1, 1 << 20, 1 << 20);
  }
  done = run(&world, &encoder); /* 2 MiB: all there is */
  assert_int_equal(done.payload_bytes, 2 * sizeof(struct kvp_wire_report) + (2 << 20));
  assert_memory_equal(done.payload + 2 * sizeof(struct kvp_wire_report), world.buffer, 1 << 20);
  free(done.payload);
  step_encoder_op(&encoder, KVP_OP_BUFFER_READ)->source = step_view(buffer, 0, 1, 1, 1);
  struct kvp_error error = refused(&world, &encoder);
  assert_int_equal(error.status, KVP_TOO_LARGE);
  assert_int_equal(error.op, 2);
  step_encoder_deinit(&encoder);

  step_encoder_init(&encoder, 1, session, step_epoch);
  region = step_encoder_op(&encoder, KVP_OP_REGION_READ);
  region->pool_id = pool_id;
  region->argument = main_bytes / 2 - 10;
  region->total_k = 11;
  error = refused(&world, &encoder);
  assert_int_equal(error.status, KVP_OUT_OF_RANGE);
  encoder.ops[0].argument = UINT64_MAX;
  assert_int_equal(refused(&world, &encoder).status, KVP_OUT_OF_RANGE);
  step_encoder_deinit(&encoder);
  step_encoder_init(&encoder, 1, session, step_epoch);
  write = step_encoder_op(&encoder, KVP_OP_BUFFER_WRITE);
  write->source = step_view(buffer, 0, 3, 100, 100);
  write->arrays[0] = step_encoder_array(&encoder, data, 299);
  error = refused(&world, &encoder);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  assert_int_equal(error.value, 299);
  step_encoder_deinit(&encoder);
  world_deinit(&world);
}

/* ---- arrays in buffers ---- */

static void test_arrays_in_buffers(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  rows_fill(world.buffer, 256, 512, 3);
  memset(world.main, 0xA5, main_bytes);
  /* In range and owned; skip; below -1; past the end; not owned; stale; sealed. */
  const int32_t slots[] = {3, -1, -2, 512, INT32_MIN, INT32_MAX, 6 * 64, 7 * 64, 5 * 64, 3 * 64, 4 * 64, 65};
  memcpy(world.buffer + (2 << 20), slots, sizeof slots);
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = add_store(&encoder, NULL, 0);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, 2 << 20, sizeof slots);
  struct kvp_wire_report report = run_one(&world, &encoder);
  assert_int_equal(report.flags, KVP_REPORT_UNCHECKED_ARRAYS);
  assert_int_equal(report.rows_stored, 2);
  assert_int_equal(report.rows_skipped, 1);
  assert_int_equal(report.rows_rejected, 9);
  for (int slot = 0; slot < num_blocks * tokens_per_block; slot++) {
    const uint8_t *record = world.main + (size_t)slot * v41_record_bytes;
    if (slot != 3 && slot != 65) {
      assert_int_equal(record[0], 0xA5);
      assert_int_equal(record[v41_record_bytes - 1], 0xA5);
    }
  }
  const int32_t segments[] = {0, 3, 4, 0, 1, 1, 2, 1, 6, 0, 1, 2, 0, 0, 65, 3, 0, 1, 2, 1024};
  memcpy(world.buffer + (2 << 20), segments, sizeof segments);
  memset(world.buffer + (1 << 20), 0x5A, 1 << 20);
  step_encoder_init(&encoder, 1, session, step_epoch);
  op = add_load(&encoder, NULL, 0, 1024);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, 2 << 20, sizeof segments);
  report = run_one(&world, &encoder);
  assert_int_equal(report.flags, KVP_REPORT_UNCHECKED_ARRAYS);
  assert_int_equal(report.rows_loaded, 2);
  assert_true(report.rows_rejected > 0);
  assert_memory_equal(world.buffer + (1 << 20), world.buffer, v41_row_bytes);
  assert_memory_equal(world.buffer + (1 << 20) + v41_row_bytes, world.buffer + 11 * v41_row_bytes, v41_row_bytes);
  for (int i = 2 * v41_row_bytes; i < 1 << 20; i++) {
    assert_int_equal(world.buffer[(1 << 20) + i], 0x5A);
  }
  world_deinit(&world);
}

/* ---- queues ---- */

/* Two layers' stores and loads share one array each; views of one buffer interleave by columns. */
static void test_shared_arrays(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  rows_fill(world.buffer, 256, 512, 9);
  int32_t slots[128];
  for (int i = 0; i < 128; i++) {
    slots[i] = i;
  }
  const int32_t segments[] = {0, 0, 64, 0, 1, 0, 64, 64};
  step_encoder_init(&encoder, 1, session, step_epoch);
  for (uint32_t i = 0; i < 100; i++) {
    struct kvp_wire_op *op = step_encoder_op(&encoder, i % 2 == 0 ? KVP_OP_STORE : KVP_OP_LOAD);
    op->pool_id = pool_id;
    op->layer = i / 2 % 2;
    if (i < 2) {
      op->arrays[0] = i == 0 ? step_encoder_array(&encoder, slots, sizeof slots)
                             : step_encoder_array(&encoder, segments, sizeof segments);
    } else {
      op->arrays[0] = i % 2;
    }
    if (i % 2 == 0) {
      op->source = step_view(buffer, 0, 256, v41_row_bytes, v41_row_bytes);
    } else { /* rows of layer 0 and 1 side by side */
      op->source = step_view(buffer, (1 << 20) + op->layer * 1024, 128, v41_row_bytes, 2048);
      op->total_k = 128;
    }
  }
  struct exec_completion done = run(&world, &encoder);
  for (uint32_t i = 0; i < 100; i++) {
    const struct kvp_wire_report report = report_of(&done, i);
    assert_int_equal(i % 2 == 0 ? report.rows_stored : report.rows_loaded, 128);
  }
  free(done.payload);
  for (size_t row = 0; row < 128; row++) {
    for (size_t layer = 0; layer < 2; layer++) {
      assert_memory_equal(world.buffer + (1 << 20) + row * 2048 + layer * 1024, world.buffer + row * 1024, 1024);
    }
  }
  /* cast_back beside the source, in the same rows of a wider tensor. */
  step_encoder_deinit(&encoder);
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = add_store(&encoder, slots, 64);
  op->source = step_view(buffer, 1 << 20, 64, 1024, 2048);
  op->second = step_view(buffer, (1 << 20) + 1024, 64, 1024, 2048);
  assert_int_equal(run_one(&world, &encoder).rows_stored, 64);
  world_deinit(&world);
}

/* More queues than the device has, several steps each: every one runs, those of a queue in order. */
static void test_queues(void **state) {
  (void)state;
  enum { queue_count = 150, steps_per_queue = 12 };
  struct exec_harness_options options = exec_harness_defaults;
  options.ring.commands = options.ring.completions = 4096;
  struct world world;
  world_init_with(&world, &options);
  uint64_t seen[queue_count] = {0};
  for (uint32_t round = 0; round < steps_per_queue; round++) {
    for (uint32_t queue = 0; queue < queue_count; queue++) {
      struct step_encoder encoder;
      step_encoder_init(&encoder, queue, session, step_epoch);
      struct kvp_wire_op *fill = step_encoder_op(&encoder, KVP_OP_BUFFER_FILL); /* the queue's own page */
      fill->source = step_view(buffer, queue * 4096, 1, 4096, 4096);
      fill->argument = round + 1;
      struct kvp_wire_op *read = step_encoder_op(&encoder, KVP_OP_BUFFER_READ);
      read->source = step_view(buffer, queue * 4096, 1, 64, 64);
      uint32_t bytes = 0;
      uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
      const uint64_t tag = (uint64_t)queue << 32 | round;
      assert_true(exec_harness_post(&world.link, KVP_COMMAND_STEP, tag, encoded, bytes));
      free(encoded);
      step_encoder_deinit(&encoder);
    }
  }
  for (int i = 0; i < 2 * queue_count * steps_per_queue; i++) {
    struct exec_completion completion = exec_harness_take(&world.link);
    const uint64_t queue = completion.tag >> 32;
    const uint64_t round = completion.tag & 0xFFFFFFFF;
    if (completion.kind == KVP_COMPLETION_DONE) {
      assert_int_equal(round, seen[queue]++);
      const uint8_t *result = completion.payload + 2 * sizeof(struct kvp_wire_report);
      for (int k = 0; k < 64; k++) {
        assert_int_equal(result[k], round + 1);
      }
    } else {
      assert_int_equal(completion.kind, KVP_COMPLETION_ACCEPTED);
    }
    free(completion.payload);
  }
  for (uint32_t queue = 0; queue < queue_count; queue++) {
    assert_int_equal(seen[queue], steps_per_queue);
    assert_true(exec_harness_post(&world.link, KVP_COMMAND_QUEUE_CLOSE, queue, NULL, 0));
  }
  assert_true(exec_harness_post(&world.link, KVP_COMMAND_QUEUE_CLOSE, 12345, NULL, 0)); /* never opened */
  struct step_encoder encoder;
  step_encoder_init(&encoder, 3, session, step_epoch); /* a closed queue's number may come again */
  struct exec_completion done = run(&world, &encoder);
  assert_int_equal(done.payload_bytes, 0);
  world_deinit(&world);
}

/* The reader of completions falls asleep: nothing is lost, nothing grows, everything goes on afterwards. */
static void test_backpressure(void **state) {
  (void)state;
  enum { step_count = 3000 };
  struct exec_harness_options options = exec_harness_defaults;
  options.ring.completions = 16;
  options.ring.completion_arena_bytes = 16384;
  struct world world;
  struct step_encoder encoder;
  world_init_with(&world, &options);
  step_encoder_init(&encoder, 1, session, step_epoch);
  for (int i = 0; i < 3; i++) {
    step_encoder_op(&encoder, KVP_OP_BUFFER_READ)->source = step_view(buffer, 0, 1, 1500, 1500);
  }
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  uint64_t posted = 0, accepted = 0, done = 0, refusals = 0;
  uint8_t bad = 0;
  /* Fills the lanes first: the executor stops taking commands long before 3000. */
  while (posted < step_count &&
         (posted % 10 == 9 ? exec_harness_post(&world.link, KVP_COMMAND_STEP, posted, &bad, 1)
                           : exec_harness_post(&world.link, KVP_COMMAND_STEP, posted, encoded, bytes))) {
    posted++;
  }
  const uint64_t filled = posted;
  uint64_t next_done = 0;
  for (uint64_t i = 0; done + refusals < step_count; i++) {
    if (posted < step_count) {
      posted += posted % 10 == 9 ? exec_harness_post(&world.link, KVP_COMMAND_STEP, posted, &bad, 1)
                                 : exec_harness_post(&world.link, KVP_COMMAND_STEP, posted, encoded, bytes);
    }
    struct exec_completion completion;
    if (!exec_harness_try_take(&world.link, &completion)) {
      (void)sched_yield();
      continue;
    }
    if (completion.kind == KVP_COMPLETION_ACCEPTED) {
      assert_int_equal(completion.tag % 10 == 9, 0);
      accepted++;
    } else if (completion.kind == KVP_COMPLETION_REFUSED) {
      assert_int_equal(completion.tag % 10, 9);
      refusals++;
    } else {
      assert_int_equal(completion.kind, KVP_COMPLETION_DONE);
      assert_true(done < accepted); /* never before its own acceptance */
      next_done += next_done % 10 == 9;
      assert_int_equal(completion.tag, next_done++);
      assert_int_equal(completion.payload_bytes, 3 * (sizeof(struct kvp_wire_report) + 1500));
      done++;
    }
    free(completion.payload);
  }
  assert_true(filled < step_count);
  assert_int_equal(accepted, step_count * 9 / 10);
  assert_int_equal(done, step_count * 9 / 10);
  assert_int_equal(refusals, step_count / 10);

  /* A completion that could never fit is refused up front. */
  step_encoder_deinit(&encoder);
  step_encoder_init(&encoder, 1, session, step_epoch);
  step_encoder_op(&encoder, KVP_OP_BUFFER_READ)->source = step_view(buffer, 0, 1, 8192, 8192);
  assert_int_equal(refused(&world, &encoder).status, KVP_TOO_LARGE);
  step_encoder_deinit(&encoder);
  free(encoded);
  world_deinit(&world);
}

/* ---- life and death ---- */

static void test_successor_finds_the_contents(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  rows_fill(world.buffer, 256, 512, 21);
  int32_t slots[64];
  for (int i = 0; i < 64; i++) {
    slots[i] = 64 + i;
  }
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)add_store(&encoder, slots, 64);
  assert_int_equal(run_one(&world, &encoder).rows_stored, 64);
  uint8_t *before = malloc(main_bytes);
  assert_non_null(before);
  memcpy(before, world.main, main_bytes);

  assert_int_equal(kill(world.link.pid, SIGKILL), 0);
  int status = exec_harness_wait(&world.link);
  assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  assert_ok(exec_harness_start(&world.link, &exec_harness_defaults));
  assert_ok(exec_harness_memory_import(&world.link, main_memory, main_bytes, world.main_fd));
  assert_ok(exec_harness_memory_import(&world.link, index_memory, index_bytes, world.index_fd));
  assert_ok(exec_harness_memory_import(&world.link, buffer_memory, buffer_bytes, world.buffer_fd));
  assert_ok(exec_harness_memory_import(&world.link, other_memory, buffer_bytes, world.other_fd));
  pool_attach(&world);
  assert_memory_equal(world.main, before, main_bytes);

  memset(world.buffer + (1 << 20), 0x5A, 1 << 20);
  step_encoder_init(&encoder, 1, session, step_epoch);
  const int32_t segments[] = {1, 0, 64, 0};
  (void)add_load(&encoder, segments, 1, 64);
  struct kvp_wire_op *region = step_encoder_op(&encoder, KVP_OP_REGION_READ);
  region->pool_id = pool_id;
  region->argument = v41_block_stride;
  region->total_k = v41_block_stride;
  struct exec_completion done = run(&world, &encoder);
  assert_memory_equal(world.buffer + (1 << 20), world.buffer, 64 * v41_row_bytes);
  assert_memory_equal(done.payload + 2 * sizeof(struct kvp_wire_report), before + v41_block_stride, v41_block_stride);
  free(done.payload);
  step_encoder_deinit(&encoder);
  free(before);
  world_deinit(&world);
}

/* An import of several chunks in two messages, and imports that don't add up. */
static void test_import_in_pieces(void **state) {
  (void)state;
  enum { chunk = 8192, chunk_count = 70, last = 100 };
  struct exec_harness link;
  struct kvp_error error;
  assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  int fds[chunk_count];
  struct kvp_control_chunks chunks = {
      .memory_id = 9, .memory_bytes = (chunk_count - 1) * chunk + last, .chunk_count = chunk_count};
  for (int i = 0; i < chunk_count; i++) {
    const uint64_t bytes = i + 1 < chunk_count ? chunk : last;
    fds[i] = kvp_memory_fd_create("piece", bytes, &error);
    const uint8_t mark = (uint8_t)i;
    assert_int_equal(pwrite(fds[i], &mark, 1, 0), 1);
    chunks.chunk_bytes[i % kvp_control_fds_max] = bytes;
    if (i + 1 == kvp_control_fds_max) {
      assert_int_equal(kvp_fd_socket_send(link.socket, KVP_CONTROL_MEMORY_IMPORT, 77, &chunks, sizeof chunks, fds,
                                          kvp_control_fds_max),
                       KVP_OK);
    }
  }
  chunks.first_chunk = kvp_control_fds_max;
  assert_ok(exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &chunks, sizeof chunks, fds + kvp_control_fds_max,
                                 chunk_count - kvp_control_fds_max));
  assert_ok(exec_harness_buffer_attach(&link, 1, 9, chunks.memory_bytes, session));
  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, 1);
  step_encoder_op(&encoder, KVP_OP_BUFFER_READ)->source = step_view(1, 0, chunk_count, 1, chunk);
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  assert_true(exec_harness_post(&link, KVP_COMMAND_STEP, 1, encoded, bytes));
  assert_int_equal(exec_harness_take(&link).kind, KVP_COMPLETION_ACCEPTED);
  struct exec_completion done = exec_harness_take(&link);
  for (int i = 0; i < chunk_count; i++) {
    assert_int_equal(done.payload[sizeof(struct kvp_wire_report) + (size_t)i], i);
  }
  free(done.payload);
  free(encoded);
  step_encoder_deinit(&encoder);

  struct kvp_control_chunks bad = {.memory_id = 10, .memory_bytes = chunk, .chunk_count = 1, .chunk_bytes = {chunk}};
  bad.memory_bytes = chunk + 1;
  error = exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, fds, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  bad.memory_bytes = bad.chunk_bytes[0] = chunk * 2; /* says more than the memfd has */
  error = exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, fds, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  assert_int_equal(ftruncate(unsealed, chunk * 2), 0);
  error = exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, &unsealed, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  bad.first_chunk = 1;
  error = exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, fds, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  bad = (struct kvp_control_chunks){.memory_id = 10, .memory_bytes = chunk, .chunk_count = 1, .chunk_bytes = {chunk}};
  assert_ok(exec_harness_request(&link, KVP_CONTROL_MEMORY_IMPORT, &bad, sizeof bad, fds, 1)); /* still works */
  (void)close(unsealed);
  for (int i = 0; i < chunk_count; i++) {
    (void)close(fds[i]);
  }
  assert_int_equal(exec_harness_stop(&link), 0);
}

static void test_control_refusals(void **state) {
  (void)state;
  struct world world;
  struct kvp_error error;
  int fd = -1;
  world_init(&world);
  error = exec_harness_memory_create(&world.link, 50, UINT64_C(1) << 41, &fd); /* 2 TiB */
  assert_int_equal(error.status, KVP_OUT_OF_MEMORY);
  assert_non_null(strstr(error.text, "2199023255552 bytes asked for"));
  assert_int_equal(exec_harness_memory_create(&world.link, 50, 0, &fd).status, KVP_TOO_LARGE);
  assert_int_equal(exec_harness_memory_create(&world.link, main_memory, 4096, &fd).status, KVP_ALREADY_EXISTS);

  struct kvp_control_memory memory = {.memory_id = main_memory};
  error = exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0);
  assert_int_equal(error.status, KVP_IN_USE);
  memory.memory_id = 999;
  error = exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);

  struct kvp_control_pool pool = pool_spec();
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1);
  assert_int_equal(error.status, KVP_IN_USE); /* its memories are */
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, NULL, 0);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT); /* no owner table */
  error = exec_harness_buffer_attach(&world.link, buffer, buffer_memory, buffer_bytes, session);
  assert_int_equal(error.status, KVP_ALREADY_EXISTS);
  error = exec_harness_buffer_attach(&world.link, 200, buffer_memory, buffer_bytes + 1, session);
  assert_int_equal(error.status, KVP_OUT_OF_RANGE);
  error = exec_harness_buffer_attach(&world.link, 200, main_memory, 4096, session);
  assert_int_equal(error.status, KVP_IN_USE);
  error = exec_harness_buffer_attach(&world.link, 0, buffer_memory, 4096, session);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  struct kvp_control_buffer detach = {.buffer_id = 200};
  error = exec_harness_request(&world.link, KVP_CONTROL_BUFFER_DETACH, &detach, sizeof detach, NULL, 0);
  assert_int_equal(error.status, KVP_UNKNOWN_BUFFER);

  /* Everything in the right order comes apart, and can be put together again. */
  assert_ok(exec_harness_request(&world.link, KVP_CONTROL_POOL_DETACH, &pool, sizeof pool, NULL, 0));
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_DETACH, &pool, sizeof pool, NULL, 0);
  assert_int_equal(error.status, KVP_UNKNOWN_POOL);
  struct step_encoder encoder;
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)add_store(&encoder, (int32_t[]){1}, 1);
  assert_int_equal(refused(&world, &encoder).status, KVP_UNKNOWN_POOL);
  step_encoder_deinit(&encoder);
  pool.regions[0].num_layers = 3; /* larger than its memory */
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1);
  assert_int_equal(error.status, KVP_OUT_OF_RANGE);
  pool = pool_spec();
  pool.num_blocks = 4096; /* more than the owner table has */
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  pool = pool_spec();
  pool.regions[1].memory_id = main_memory; /* two regions in one memory */
  error = exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1);
  assert_int_equal(error.status, KVP_IN_USE);
  pool = pool_spec();
  assert_ok(exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1));
  assert_ok(exec_harness_request(&world.link, KVP_CONTROL_POOL_DETACH, &pool, sizeof pool, NULL, 0));
  memory.memory_id = main_memory;
  assert_ok(exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0));
  detach.buffer_id = buffer;
  assert_ok(exec_harness_request(&world.link, KVP_CONTROL_BUFFER_DETACH, &detach, sizeof detach, NULL, 0));
  memory.memory_id = buffer_memory;
  assert_ok(exec_harness_request(&world.link, KVP_CONTROL_MEMORY_DESTROY, &memory, sizeof memory, NULL, 0));
  world_deinit(&world);
}

static void test_hello_refusals(void **state) {
  (void)state;
  struct exec_harness link;
  struct exec_harness_options options = exec_harness_defaults;
  options.version = KVP_CONTROL_VERSION + 1;
  assert_int_equal(exec_harness_start(&link, &options).status, KVP_VERSION_MISMATCH);
  assert_int_equal(WEXITSTATUS(exec_harness_wait(&link)), 2);
  options.version = 0;
  options.device = "cuda:0";
  struct kvp_error error = exec_harness_start(&link, &options);
  assert_int_equal(error.status, KVP_UNIMPLEMENTED);
  assert_non_null(strstr(error.text, "cuda:0"));
  assert_int_equal(WEXITSTATUS(exec_harness_wait(&link)), 2);
  options.device = "host:x";
  assert_int_equal(exec_harness_start(&link, &options).status, KVP_INVALID_ARGUMENT);
  assert_int_equal(WEXITSTATUS(exec_harness_wait(&link)), 2);
  options.device = NULL;
  options.thread_count = 100000;
  assert_int_equal(exec_harness_start(&link, &options).status, KVP_TOO_LARGE);
  assert_int_equal(WEXITSTATUS(exec_harness_wait(&link)), 2);
}

/* The supervisor's end: its socket is removed if and only if nobody holds its lock. */
static void test_end_of_the_supervisor(void **state) {
  (void)state;
  char directory[] = "/tmp/kvp-test-XXXXXX";
  char socket_path[64], lock_path[64];
  assert_non_null(mkdtemp(directory));
  (void)snprintf(socket_path, sizeof socket_path, "%s/socket", directory);
  (void)snprintf(lock_path, sizeof lock_path, "%s/lock", directory);
  struct exec_harness_options options = exec_harness_defaults;
  options.socket_path = socket_path;
  options.lock_path = lock_path;
  int lock = open(lock_path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  int socket = open(socket_path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  assert_true(lock >= 0 && socket >= 0);
  assert_int_equal(close(socket), 0);

  struct exec_harness link;
  assert_int_equal(flock(lock, LOCK_EX | LOCK_NB), 0); /* alive, or a successor is */
  assert_ok(exec_harness_start(&link, &options));
  assert_int_equal(kill(link.pid, SIGTERM), 0); /* not its own to decide */
  assert_int_equal(kill(link.pid, SIGINT), 0);
  int fd = -1;
  assert_ok(exec_harness_memory_create(&link, 1, 4096, &fd));
  (void)close(fd);
  assert_int_equal(exec_harness_stop(&link), 0);
  assert_int_equal(access(socket_path, F_OK), 0);

  assert_ok(exec_harness_start(&link, &options));
  assert_int_equal(close(lock), 0); /* dies, as far as anybody can see */
  assert_int_equal(exec_harness_stop(&link), 0);
  assert_int_equal(access(socket_path, F_OK), -1);
  assert_int_equal(errno, ENOENT);
  assert_int_equal(unlink(lock_path), 0);
  assert_int_equal(rmdir(directory), 0);
}

/* Steps are running and waiting when the supervisor goes: the executor goes too. */
static void test_end_in_the_middle(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  for (uint32_t i = 0; i < 100; i++) {
    step_encoder_init(&encoder, i % 5, session, step_epoch);
    for (int k = 0; k < 20; k++) {
      step_encoder_op(&encoder, KVP_OP_BUFFER_FILL)->source = step_view(buffer, 0, 1, buffer_bytes, buffer_bytes);
    }
    (void)post(&world, &encoder);
    step_encoder_deinit(&encoder);
  }
  world_deinit(&world);
}

static void test_corrupt_lane(void **state) {
  (void)state;
  struct exec_harness link;
  assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  assert_true(exec_harness_post(&link, 99, 1, NULL, 0)); /* no such command */
  int status = exec_harness_wait(&link);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);

  assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  link.ring.commands.position = 1000000; /* the next record has a number out of order */
  (void)exec_harness_post(&link, KVP_COMMAND_STEP, 1, NULL, 0);
  link.ring.commands.position = 1000;
  link.ring.commands.reserved = true;
  (void)kvp_lane_publish(&link.ring.commands, KVP_COMMAND_STEP, 1, 0);
  const uint64_t one = 1;
  assert_int_equal(write(link.command_event, &one, sizeof one), sizeof one);
  status = exec_harness_wait(&link);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_golden),
      cmocka_unit_test(test_round_trip),
      cmocka_unit_test(test_long_segments),
      cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_malformed_steps),
      cmocka_unit_test(test_transfers),
      cmocka_unit_test(test_arrays_in_buffers),
      cmocka_unit_test(test_shared_arrays),
      cmocka_unit_test(test_queues),
      cmocka_unit_test(test_backpressure),
      cmocka_unit_test(test_successor_finds_the_contents),
      cmocka_unit_test(test_import_in_pieces),
      cmocka_unit_test(test_control_refusals),
      cmocka_unit_test(test_hello_refusals),
      cmocka_unit_test(test_end_of_the_supervisor),
      cmocka_unit_test(test_end_in_the_middle),
      cmocka_unit_test(test_corrupt_lane),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
