/* Rows through the real executor: golden cases, stores and loads, transfers, shared arrays. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/format.h"
#include "proto/owner_entry.h"
#include "tests/unit/executor_world.h"

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

  world_assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  world_assert_ok(exec_harness_memory_create(&link, 1, cache_bytes, &region_fd));
  world_assert_ok(exec_harness_memory_create(&link, 2, 1 << 20, &buffer_fd));
  int owner_fd = kvp_memory_fd_create("owners", golden.num_blocks * sizeof(uint64_t), &error);
  uint8_t *region = exec_harness_map(region_fd, cache_bytes);
  uint8_t *shared = exec_harness_map(buffer_fd, 1 << 20);
  uint64_t *owners = (uint64_t *)(void *)exec_harness_map(owner_fd, golden.num_blocks * sizeof(uint64_t));
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
  world_assert_ok(exec_harness_request(&link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &owner_fd, 1));
  world_assert_ok(exec_harness_buffer_attach(&link, 1, 2, 1 << 20, session));
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
  (void)munmap(owners, golden.num_blocks * sizeof(uint64_t));
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
  world_rows_fill(world.buffer, 256, 512, 1);
  memset(world.buffer + (1 << 20), 0x5A, 2 << 20);
  int32_t slots[192];
  for (int i = 0; i < 192; i++) {
    slots[i] = i % 3 == 1 ? -1 : 191 - i; /* blocks 0 .. 2, backwards, every third left out */
  }
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *store = world_add_store(&encoder, slots, 192);
  store->layer = 1;
  store->second = step_view(buffer, 3 << 20, 192, v41_row_bytes, v41_row_bytes); /* cast_back */
  /* Block 2 whole, two zero rows, a piece of block 0; a gap before and behind. */
  const int32_t segments[] = {2, 0, 64, 1, -1, 5, 7, 65, 0, 10, 30, 70, 1, 64, 64, 0};
  struct kvp_wire_op *load = world_add_load(&encoder, segments, 4, 100);
  load->layer = 1;
  struct exec_completion done = world_run(&world, &encoder);
  step_encoder_deinit(&encoder);

  const struct kvp_wire_report stored = world_report(&done, 0);
  const struct kvp_wire_report loaded = world_report(&done, 1);
  assert_int_equal(stored.rows_stored, 128);
  assert_int_equal(stored.rows_skipped, 64);
  assert_int_equal(stored.rows_rejected, 0);
  assert_int_equal(stored.flags, 0);
  assert_int_equal(loaded.rows_loaded, 64 + 2 + 20);
  assert_true(stored.queued_ns <= stored.started_ns && stored.started_ns <= stored.finished_ns);
  assert_true(stored.finished_ns <= loaded.started_ns && loaded.started_ns <= loaded.finished_ns);
  free(done.payload);

  /* cast_back: every row, skipped ones too; the values are exact, so it equals the source. */
  assert_memory_equal(world.buffer + (3 << 20), world.buffer, 192 * (size_t)v41_row_bytes);
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
  world_assert_ok(exec_harness_start(&link, &exec_harness_defaults));
  world_assert_ok(exec_harness_memory_create(&link, 1, (uint64_t)ring * 528, &region_fd)); /* a multiple of 1056 */
  world_assert_ok(exec_harness_memory_create(&link, 2, big_bytes, &buffer_fd));
  int owner_fd = kvp_memory_fd_create("owners", 8, &error);
  uint64_t *owners = (uint64_t *)(void *)exec_harness_map(owner_fd, 8);
  uint8_t *shared = exec_harness_map(buffer_fd, big_bytes);
  owners[0] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, session);
  struct kvp_control_pool pool = {.pool_id = 1, .num_blocks = 1, .region_count = 1, .kind = KVP_POOL_RING};
  pool.regions[0] = (struct kvp_control_region){
      .memory_id = 1, .format = KVP_FORMAT_V41, .width = 512, .tokens_per_block = ring, .num_layers = 1, .name = "r"};
  world_assert_ok(exec_harness_request(&link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &owner_fd, 1));
  world_assert_ok(exec_harness_buffer_attach(&link, 1, 2, big_bytes, session));

  int32_t *slots = malloc(ring * sizeof *slots);
  assert_non_null(slots);
  for (uint32_t i = 0; i < ring; i++) {
    slots[i] = (int32_t)((i * 1021) % ring); /* 1021 is odd: each once */
    uint16_t row[512];
    for (uint32_t k = 0; k < 512; k++) {
      row[k] = world_exact_bf16(i, k);
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
  load->flags = KVP_OP_ALLOW_STORE_BEFORE_LOAD;
  load->arrays[0] = step_encoder_array(&encoder, segments, sizeof segments);
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
  assert_true(exec_harness_post(&link, KVP_COMMAND_STEP, 1, encoded, bytes));
  assert_int_equal(exec_harness_take(&link).kind, KVP_COMPLETION_ACCEPTED);
  struct exec_completion done = exec_harness_take(&link);
  assert_int_equal(done.kind, KVP_COMPLETION_DONE);
  assert_int_equal(world_report(&done, 0).rows_stored, ring);
  assert_int_equal(world_report(&done, 1).rows_loaded, ring);
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
  struct exec_completion done = world_run(&world, &encoder);
  step_encoder_deinit(&encoder);
  const uint8_t *results = done.payload + 4 * sizeof(struct kvp_wire_report);
  assert_int_equal(done.payload_bytes, 4 * sizeof(struct kvp_wire_report) + 100 + (1 << 18));
  assert_memory_equal(results, data + 100, 50);
  assert_memory_equal(results + 50, data + 200, 50);
  assert_memory_equal(results + 100, world.main + main_bytes / 2 + 777, 1 << 18);
  assert_int_equal(world_report(&done, 0).bytes_written, 300);
  assert_int_equal(world_report(&done, 1).bytes_written, 1000 << 10);
  assert_int_equal(world_report(&done, 3).bytes_read, 1 << 18);
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
  done = world_run(&world, &encoder); /* 2 MiB: all there is */
  assert_int_equal(done.payload_bytes, 2 * sizeof(struct kvp_wire_report) + (2 << 20));
  assert_memory_equal(done.payload + 2 * sizeof(struct kvp_wire_report), world.buffer, 1 << 20);
  free(done.payload);
  step_encoder_op(&encoder, KVP_OP_BUFFER_READ)->source = step_view(buffer, 0, 1, 1, 1);
  struct kvp_error error = world_refused(&world, &encoder);
  assert_int_equal(error.status, KVP_TOO_LARGE);
  assert_int_equal(error.op, 2);
  step_encoder_deinit(&encoder);

  step_encoder_init(&encoder, 1, session, step_epoch);
  region = step_encoder_op(&encoder, KVP_OP_REGION_READ);
  region->pool_id = pool_id;
  region->argument = main_bytes / 2 - 10;
  region->total_k = 11;
  error = world_refused(&world, &encoder);
  assert_int_equal(error.status, KVP_OUT_OF_RANGE);
  encoder.ops[0].argument = UINT64_MAX;
  assert_int_equal(world_refused(&world, &encoder).status, KVP_OUT_OF_RANGE);
  step_encoder_deinit(&encoder);
  step_encoder_init(&encoder, 1, session, step_epoch);
  write = step_encoder_op(&encoder, KVP_OP_BUFFER_WRITE);
  write->source = step_view(buffer, 0, 3, 100, 100);
  write->arrays[0] = step_encoder_array(&encoder, data, 299);
  error = world_refused(&world, &encoder);
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
  world_rows_fill(world.buffer, 256, 512, 3);
  memset(world.main, 0xA5, main_bytes);
  /* In range and owned; skip; below -1; past the end; not owned; stale; sealed. */
  const int32_t slots[] = {3, -1, -2, 512, INT32_MIN, INT32_MAX, 6 * 64, 7 * 64, 5 * 64, 3 * 64, 4 * 64, 65};
  memcpy(world.buffer + (2 << 20), slots, sizeof slots);
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = world_add_store(&encoder, NULL, 0);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, 2 << 20, sizeof slots);
  struct kvp_wire_report report = world_run_one(&world, &encoder);
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
  op = world_add_load(&encoder, NULL, 0, 1024);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, 2 << 20, sizeof segments);
  report = world_run_one(&world, &encoder);
  assert_int_equal(report.flags, KVP_REPORT_UNCHECKED_ARRAYS);
  assert_int_equal(report.rows_loaded, 2);
  assert_true(report.rows_rejected > 0);
  assert_memory_equal(world.buffer + (1 << 20), world.buffer, v41_row_bytes);
  assert_memory_equal(world.buffer + (1 << 20) + v41_row_bytes, world.buffer + (size_t)11 * v41_row_bytes,
                      v41_row_bytes);
  for (int i = 2 * v41_row_bytes; i < 1 << 20; i++) {
    assert_int_equal(world.buffer[(1 << 20) + i], 0x5A);
  }
  world_deinit(&world);
}

/* ---- arrays shared by ops ---- */

/* Two layers' stores and loads share one array each; views of one buffer interleave by columns. */
static void test_shared_arrays(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  world_rows_fill(world.buffer, 256, 512, 9);
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
  struct exec_completion done = world_run(&world, &encoder);
  for (uint32_t i = 0; i < 100; i++) {
    const struct kvp_wire_report report = world_report(&done, i);
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
  struct kvp_wire_op *op = world_add_store(&encoder, slots, 64);
  op->source = step_view(buffer, 1 << 20, 64, 1024, 2048);
  op->second = step_view(buffer, (1 << 20) + 1024, 64, 1024, 2048);
  assert_int_equal(world_run_one(&world, &encoder).rows_stored, 64);
  world_deinit(&world);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_golden),
      cmocka_unit_test(test_round_trip),
      cmocka_unit_test(test_long_segments),
      cmocka_unit_test(test_transfers),
      cmocka_unit_test(test_arrays_in_buffers),
      cmocka_unit_test(test_shared_arrays),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
