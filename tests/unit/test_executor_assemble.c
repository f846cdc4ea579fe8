/* Assembles through the real executor: their parts, their order, rows that come through an index. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/executor_world.h"

enum { out_offset = 1 << 20, ints_offset = 3 << 20 };

static const uint64_t row = v41_row_bytes;

static uint8_t *row_at(struct world *world, uint64_t offset, uint64_t index) {
  return world->buffer + offset + index * row;
}

/* Stores rows [first, first + count) of the buffer's beginning at slots that run on, in one ring layer or in "main". */
static void rows_store(struct world *world, bool in_ring, uint32_t layer, uint32_t first, int32_t slot,
                       uint32_t count) {
  struct step_encoder encoder;
  int32_t slots[256];
  for (uint32_t i = 0; i < count; i++) {
    slots[i] = slot + (int32_t)i;
  }
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op =
      in_ring ? world_add_ring_store(&encoder, layer, slots, count) : world_add_store(&encoder, slots, count);
  op->layer = layer;
  op->source = step_view(buffer, (uint64_t)first * row, count, row, row);
  assert_int_equal(world_run_one(world, &encoder).rows_stored, count);
}

/* A ring pool, 256 rows, ring block 1 of layer 1 full of rows 0 .. 31, "main" block 0 of layer 1 of rows 64 .. 127. */
static void ops_world_init(struct world *world) {
  world_init(world);
  world_ring_attach(world);
  world_rows_fill(world->buffer, 256, 512, 1);
  rows_store(world, true, 1, 0, 32, 32);
  rows_store(world, false, 1, 64, 0, 64);
  memset(world->buffer + out_offset, 0x5A, 2 << 20);
}

static void assert_filled(const uint8_t *bytes, uint8_t value, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) {
    assert_int_equal(bytes[i], value);
  }
}

static const int32_t history[] = {1, 20, 32, 0, 1, 0, 20, 12}; /* ring block 1, older part first */
static const int32_t compressed[] = {0, 4, 40, 2};

/* S = 32, C = 10, K = 38 of which 36 are covered; a row in front of the output and one behind it. */
static struct kvp_wire_op *add_whole(struct step_encoder *encoder, const int32_t *slots) {
  struct kvp_wire_op *op = world_add_assemble(encoder, 80);
  op->pool_id = ring_pool_id;
  op->layer = 1;
  op->arrays[0] = step_encoder_array(encoder, history, sizeof history);
  op->total_k = 32;
  op->source = step_view(buffer, 200 * row, 10, row, row);
  op->argument = 10;
  if (slots != NULL) {
    op->arrays[2] = step_encoder_array(encoder, slots, 40);
  }
  op->second_pool_id = pool_id;
  op->second_layer = 1;
  op->arrays[3] = step_encoder_array(encoder, compressed, sizeof compressed);
  op->numbers[0] = 38;
  return op;
}

static void check_whole(struct world *world, const struct kvp_wire_report *report) {
  assert_int_equal(report->main_kv_offset, 42);
  assert_int_equal(report->rows_loaded, 32 + 10 + 36);
  assert_int_equal(report->rows_rejected, 0);
  assert_int_equal(report->flags, 0);
  for (uint64_t i = 0; i < 32; i++) { /* logical order: slot 20 first */
    assert_memory_equal(row_at(world, out_offset, i), row_at(world, 0, (20 + i) % 32), row);
  }
  assert_memory_equal(row_at(world, out_offset, 32), row_at(world, 0, 200), 10 * row);
  assert_filled(row_at(world, out_offset, 42), 0x5A, 2 * row); /* no segment covers them */
  assert_memory_equal(row_at(world, out_offset, 44), row_at(world, 0, 64 + 4), 36 * row);
  assert_filled(row_at(world, out_offset, 80), 0x5A, 4 * row);
}

/* The chunk's new rows go to slots that the history is read from: the old rows are read, then overwritten. */
static void test_assemble(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  ops_world_init(&world);
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)add_whole(&encoder, NULL);
  struct kvp_wire_report report = world_run_one(&world, &encoder);
  check_whole(&world, &report);
  assert_int_equal(report.rows_stored, 0);
  assert_int_equal(report.bytes_read, (32 + 36) * (uint64_t)v41_record_bytes + 10 * row);
  assert_int_equal(report.bytes_written, (32 + 10 + 36) * row);

  memset(world.buffer + out_offset, 0x5A, 1 << 20);
  int32_t slots[10];
  for (int i = 0; i < 10; i++) {
    slots[i] = i == 3 ? -1 : 32 + 20 + i;
  }
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)add_whole(&encoder, slots);
  report = world_run_one(&world, &encoder);
  check_whole(&world, &report);
  assert_int_equal(report.rows_stored, 9);
  assert_int_equal(report.rows_skipped, 1);
  assert_int_equal(report.bytes_read, (32 + 36) * (uint64_t)v41_record_bytes + 10 * row);
  assert_int_equal(report.bytes_written, (32 + 10 + 36) * row + 9 * (uint64_t)v41_record_bytes);
  assert_true(report.queued_ns <= report.started_ns && report.started_ns <= report.finished_ns);

  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_ring_load(&encoder, 1, (int32_t[]){1, 0, 32, 0}, 1, 32);
  assert_int_equal(world_run_one(&world, &encoder).rows_loaded, 32);
  for (uint64_t i = 0; i < 32; i++) {
    const uint64_t expected = i >= 20 && i < 30 && i != 23 ? 200 + i - 20 : i;
    assert_memory_equal(row_at(&world, out_offset, i), row_at(&world, 0, expected), row);
  }
  world_deinit(&world);
}

/* How many launches of kernels the executor has made; 0 where it has no GPU, true or false. */
static uint64_t launches_read(int fd) {
  uint64_t count = 0;
  assert_int_equal(pread(fd, &count, sizeof count, 0), sizeof count);
  return count;
}

/* All parts are one launch; the store is another one where it overwrites what is read. */
static void test_assemble_launches(void **state) {
  (void)state;
  static const struct {
    int32_t first_slot; /* of ten, the history reads 32 .. 63; -1: nothing is stored */
    uint64_t launches;
  } cases[] = {{-1, 1}, {86, 1}, {64, 1}, {22, 1}, {63, 2}, {23, 2}, {40, 2}};
  struct world world;
  struct step_encoder encoder;
  char path[] = "/tmp/kvpool-launches-XXXXXX";
  const int fd = mkstemp(path);
  assert_true(fd >= 0 && ftruncate(fd, sizeof(uint64_t)) == 0);
  assert_int_equal(setenv("FAKE_CUDA_LAUNCHES", path, 1), 0);
  ops_world_init(&world);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int32_t slots[10];
    for (int k = 0; k < 10; k++) {
      slots[k] = cases[i].first_slot + k;
    }
    rows_store(&world, true, 1, 0, 32, 32);
    memset(world.buffer + out_offset, 0x5A, 1 << 20);
    const uint64_t before = launches_read(fd);
    step_encoder_init(&encoder, 1, session, step_epoch);
    (void)add_whole(&encoder, cases[i].first_slot < 0 ? NULL : slots);
    const struct kvp_wire_report report = world_run_one(&world, &encoder);
    check_whole(&world, &report);
    assert_int_equal(report.rows_stored, cases[i].first_slot < 0 ? 0 : 10);
    const uint64_t after = launches_read(fd);
    assert_int_equal(after - before, after == 0 ? 0 : cases[i].launches);
  }
  const char *device = getenv("KVPOOL_TEST_DEVICE");
  assert_int_equal(launches_read(fd) != 0, device != NULL && strncmp(device, "cuda:", 5) == 0);
  world_deinit(&world);
  (void)unsetenv("FAKE_CUDA_LAUNCHES");
  (void)unlink(path);
  (void)close(fd);
}

/* A mirror order undone: rows out of order, some twice, zero rows between; straight and through the format. */
static void test_assemble_gather(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  ops_world_init(&world);
  const int32_t gather[] = {5, -1, 0, 5, -1, 2, 9, 1};
  const int32_t slots[] = {64, -1, 65, 66, -1, -1, 95, 67};
  for (int with_cast_back = 0; with_cast_back < 2; with_cast_back++) {
    for (int in_buffer = 0; in_buffer < 2; in_buffer++) {
      memset(world.buffer + out_offset, 0x5A, 1 << 20);
      memset(world.ring, 0xA5, ring_bytes);
      memcpy(world.buffer + ints_offset, gather, sizeof gather);
      step_encoder_init(&encoder, 1, session, step_epoch);
      struct kvp_wire_op *op = world_add_assemble(&encoder, 9);
      op->pool_id = ring_pool_id;
      op->layer = 2;
      op->flags = with_cast_back != 0 ? KVP_OP_CHUNK_CAST_BACK : 0;
      op->source = step_view(buffer, 200 * row, 10, row, row);
      op->argument = 8;
      op->arrays[1] = in_buffer != 0 ? step_encoder_buffer_array(&encoder, buffer, ints_offset, sizeof gather)
                                     : step_encoder_array(&encoder, gather, sizeof gather);
      op->arrays[2] = step_encoder_array(&encoder, slots, sizeof slots);
      const struct kvp_wire_report report = world_run_one(&world, &encoder);
      assert_int_equal(report.main_kv_offset, 8);
      assert_int_equal(report.rows_stored, 5);
      assert_int_equal(report.rows_skipped, 3);
      assert_int_equal(report.rows_rejected, 0);
      assert_int_equal(report.flags, in_buffer != 0 ? KVP_REPORT_UNCHECKED_ARRAYS : 0);
      for (uint64_t i = 0; i < 8; i++) {
        if (gather[i] < 0) {
          assert_filled(row_at(&world, out_offset, i), 0, row);
        } else {
          assert_memory_equal(row_at(&world, out_offset, i), row_at(&world, 0, 200 + (uint64_t)gather[i]), row);
        }
      }
      assert_filled(row_at(&world, out_offset, 8), 0x5A, row);
      step_encoder_init(&encoder, 1, session, step_epoch);
      (void)world_add_ring_load(&encoder, 2, (int32_t[]){2, 0, 4, 0, 2, 31, 32, 4}, 2, 5);
      assert_int_equal(world_run_one(&world, &encoder).rows_loaded, 5);
      const uint64_t stored[] = {5, 0, 5, 1, 9};
      for (uint64_t i = 0; i < 5; i++) {
        assert_memory_equal(row_at(&world, out_offset, i), row_at(&world, 0, 200 + stored[i]), row);
      }
    }
  }
  world_deinit(&world);
}

/* Entries that nobody could check: zero rows, counted, and nothing stored for them. */
static void test_assemble_hostile_gather(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  ops_world_init(&world);
  const int32_t gather[] = {-2, 10, INT32_MIN, 3, 0x7FC00000, -1};
  const int32_t slots[] = {64, 65, 66, 67, -1, 68};
  memset(world.ring, 0xA5, ring_bytes);
  memcpy(world.buffer + ints_offset, gather, sizeof gather);
  memcpy(world.buffer + ints_offset + 64, slots, sizeof slots);
  for (int with_cast_back = 0; with_cast_back < 2; with_cast_back++) {
    memset(world.buffer + out_offset, 0x5A, 8 * row);
    step_encoder_init(&encoder, 1, session, step_epoch);
    struct kvp_wire_op *op = world_add_assemble(&encoder, 6);
    op->pool_id = ring_pool_id;
    op->flags = with_cast_back != 0 ? KVP_OP_CHUNK_CAST_BACK : 0;
    op->source = step_view(buffer, 200 * row, 10, row, row);
    op->argument = 6;
    op->arrays[1] = step_encoder_buffer_array(&encoder, buffer, ints_offset, sizeof gather);
    op->arrays[2] = step_encoder_buffer_array(&encoder, buffer, ints_offset + 64, sizeof slots);
    const struct kvp_wire_report report = world_run_one(&world, &encoder);
    assert_int_equal(report.rows_stored, 1);
    assert_int_equal(report.rows_rejected, 5); /* four wrong entries, and a zero row that has a slot: each once */
    assert_int_equal(report.rows_skipped, 0);
    assert_int_equal(report.rows_loaded, with_cast_back != 0 ? 0 : 2);
    for (uint64_t i = 0; i < 6; i++) {
      if (i == 3) {
        assert_memory_equal(row_at(&world, out_offset, i), row_at(&world, 0, 203), row);
      } else {
        assert_filled(row_at(&world, out_offset, i), 0, row);
      }
    }
    for (int slot = 0; slot < num_blocks * ring_tokens; slot++) {
      if (slot != 67) {
        assert_int_equal(world.ring[(size_t)slot * v41_record_bytes], 0xA5);
      }
    }
  }
  world_deinit(&world);
}

/* Parts that are absent, and rows that a fused store fills later in the step. */
static void test_assemble_parts(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  ops_world_init(&world);
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_assemble(&encoder, 4);                     /* nothing at all */
  struct kvp_wire_op *op = world_add_assemble(&encoder, 50); /* reserved, then compressed */
  op->flags = KVP_OP_CHUNK_RESERVED;
  op->argument = 10;
  op->second_pool_id = pool_id;
  op->second_layer = 1;
  op->arrays[3] = step_encoder_array(&encoder, compressed, sizeof compressed);
  op->numbers[0] = 38;
  struct exec_completion done = world_run(&world, &encoder);
  step_encoder_deinit(&encoder);
  struct kvp_wire_report report = world_report(&done, 0);
  assert_int_equal(report.rows_loaded, 0);
  assert_int_equal(report.main_kv_offset, 0);
  assert_int_equal(report.started_ns, report.queued_ns);
  report = world_report(&done, 1);
  assert_int_equal(report.rows_loaded, 36);
  assert_int_equal(report.main_kv_offset, 10);
  free(done.payload);
  assert_filled(row_at(&world, out_offset, 0), 0x5A, 12 * row);
  assert_memory_equal(row_at(&world, out_offset, 12), row_at(&world, 0, 68), 36 * row);
  assert_filled(row_at(&world, out_offset, 48), 0x5A, row);
  world_deinit(&world);
}

/* Rows of another width than any format, without a region: copied. */
static void test_assemble_copy_only(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  for (int i = 0; i < 4096; i++) {
    world.buffer[i] = (uint8_t)(i * 7);
  }
  step_encoder_init(&encoder, 1, session, step_epoch);
  struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_ASSEMBLE);
  op->source = step_view(buffer, 0, 5, 48, 64);
  op->second = step_view(buffer, out_offset, 5, 48, 80);
  op->argument = 5;
  const struct kvp_wire_report report = world_run_one(&world, &encoder);
  assert_int_equal(report.bytes_written, 5 * 48);
  for (uint64_t i = 0; i < 5; i++) {
    assert_memory_equal(world.buffer + out_offset + i * 80, world.buffer + i * 64, 48);
    assert_filled(world.buffer + out_offset + i * 80 + 48, 0, 32);
  }
  world_deinit(&world);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_assemble),           cmocka_unit_test(test_assemble_gather),
      cmocka_unit_test(test_assemble_parts),     cmocka_unit_test(test_assemble_hostile_gather),
      cmocka_unit_test(test_assemble_copy_only), cmocka_unit_test(test_assemble_launches),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
