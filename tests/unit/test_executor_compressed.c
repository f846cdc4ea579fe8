/* keep_compressed: what the executor remembers of compressed parts, and when it no longer does. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/executor_world.h"

enum { out_offset = 1 << 20, reserved_rows = 10, kept_rows = 36 };

static const uint64_t row = v41_row_bytes;

/* Blocks 0 and 1 of "main", layer 0. */
static const int32_t segments[] = {0, 4, 40, 0, 1, 5, 5, 36};

/* What may be different about an assemble. */
struct part {
  bool keeps;
  uint32_t queue;
  uint32_t layer;
  uint64_t rows;      /* C, in front of it */
  uint64_t kept_rows; /* K */
  uint64_t out;
  uint64_t stride;
  const int32_t *segments;
  bool in_buffer;
};

static const struct part whole = {.queue = 1,
                                  .rows = reserved_rows,
                                  .kept_rows = kept_rows,
                                  .out = out_offset,
                                  .stride = row,
                                  .segments = segments};

static struct kvp_wire_op *part_add(struct step_encoder *encoder, const struct part *part) {
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_ASSEMBLE);
  op->flags = KVP_OP_CHUNK_RESERVED | (part->keeps ? KVP_OP_KEEP_COMPRESSED : 0U);
  op->second = step_view(buffer, part->out, 60, row, part->stride);
  op->argument = part->rows;
  op->second_pool_id = pool_id;
  op->second_layer = part->layer;
  op->numbers[0] = part->kept_rows;
  op->arrays[3] = part->in_buffer ? step_encoder_buffer_array(encoder, buffer, 3 << 20, sizeof segments)
                                  : step_encoder_array(encoder, part->segments, sizeof segments);
  return op;
}

static void begin(struct step_encoder *encoder, uint32_t queue) {
  step_encoder_init(encoder, queue, session, step_epoch);
}

static void run(struct world *world, struct step_encoder *encoder) {
  struct exec_completion done = world_run(world, encoder);
  step_encoder_deinit(encoder);
  free(done.payload);
}

static void part_run(struct world *world, const struct part *part) {
  struct step_encoder encoder;
  begin(&encoder, part->queue);
  (void)part_add(&encoder, part);
  run(world, &encoder);
}

static void part_refuse(struct world *world, const struct part *part, const char *text) {
  struct step_encoder encoder;
  begin(&encoder, part->queue);
  (void)part_add(&encoder, part);
  const struct kvp_error error = world_refused(world, &encoder);
  step_encoder_deinit(&encoder);
  if (error.status != KVP_INVALID_ARGUMENT || error.op != 0 || strstr(error.text, text) == NULL) {
    fail_msg("expected '%s', got %s '%s'", text, kvp_status_name((enum kvp_status)error.status), error.text);
  }
}

static struct part keeping(void) {
  struct part part = whole;
  part.keeps = true;
  return part;
}

/* The rows are there: they are neither written nor read again, and the report doesn't count them. */
static void test_kept(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  part_run(&world, &whole);
  memset(world.buffer + out_offset, 0x5A, 60 * row); /* by the client: nobody of us knows */
  const struct part part = keeping();
  begin(&encoder, 1);
  (void)part_add(&encoder, &part);
  struct kvp_wire_report report = world_run_one(&world, &encoder);
  assert_int_equal(report.rows_loaded, 0);
  assert_int_equal(report.main_kv_offset, reserved_rows);
  assert_int_equal(report.bytes_written, 0);
  for (uint64_t i = 0; i < 60 * row; i++) {
    assert_int_equal(world.buffer[out_offset + i], 0x5A);
  }
  begin(&encoder, 7); /* the assembling step is done: any queue may */
  (void)part_add(&encoder, &part);
  (void)world_run_one(&world, &encoder);
  begin(&encoder, 1); /* assembled and kept in one step, and nothing to keep is kept, too */
  (void)part_add(&encoder, &whole);
  (void)part_add(&encoder, &part);
  struct part nothing = part;
  nothing.out = 2 << 20;
  nothing.kept_rows = 0;
  nothing.segments = (const int32_t[]){0, 0, 0, 0, 0, 0, 0, 0};
  (void)part_add(&encoder, &nothing);
  run(&world, &encoder);
  world_deinit(&world);
}

static void test_mismatches(void **state) {
  (void)state;
  struct world world;
  world_init(&world);
  const int32_t other[] = {0, 4, 40, 0, 1, 6, 6, 36};
  struct part part = keeping();
  part_refuse(&world, &part, "keep_compressed of 36 rows from row 10 on: no assemble has written them");
  part_run(&world, &whole);
  part.rows++;
  part_refuse(&world, &part, "other rows");
  part = keeping();
  part.kept_rows++;
  part_refuse(&world, &part, "other rows");
  part = keeping();
  part.stride = 2 * row;
  part_refuse(&world, &part, "other rows");
  part = keeping();
  part.layer = 1;
  part_refuse(&world, &part, "another region or layer");
  part = keeping();
  part.segments = other;
  part_refuse(&world, &part, "other segments");
  part = keeping();
  part.out += 32 << 10;
  part_refuse(&world, &part, "other rows");
  part = keeping();
  part.in_buffer = true;
  memcpy(world.buffer + (3 << 20), segments, sizeof segments);
  part_refuse(&world, &part, "segments in a buffer can't be compared");
  part = keeping(); /* none of these changed anything */
  part_run(&world, &part);
  struct part unknown = whole; /* assembled by segments that nobody saw */
  unknown.in_buffer = true;
  part_run(&world, &unknown);
  part_refuse(&world, &part, "no assemble");
  world_deinit(&world);
}

/* ---- writes in between ---- */

static void write_rows(struct step_encoder *encoder, uint64_t offset) { /* one byte */
  struct kvp_wire_op *op = step_encoder_op(encoder, KVP_OP_BUFFER_FILL);
  op->source = step_view(buffer, offset, 1, 1, 1);
}

static void write_block(struct step_encoder *encoder, uint32_t layer, int32_t block) {
  (void)world_add_store(encoder, (int32_t[]){block * tokens_per_block + 63}, 1);
  encoder->ops[encoder->header.op_count - 1].layer = layer;
}

/* The change, between assemble and keep: in a step of its own, and in the step that keeps. */
static void expect(struct world *world, const struct step_encoder *change, const char *text) {
  const struct part part = keeping();
  for (int together = 0; together < 2; together++) {
    struct step_encoder encoder;
    part_run(world, &whole);
    begin(&encoder, 1);
    assert_true(change->header.op_count <= 2);
    for (uint32_t i = 0; i < change->header.op_count; i++) {
      struct kvp_wire_op *op = step_encoder_op(&encoder, KVP_OP_STORE);
      *op = change->ops[i];
      if (op->arrays[0] != KVP_WIRE_NO_ARRAY) {
        const struct kvp_wire_array *array = &change->arrays[op->arrays[0]];
        op->arrays[0] =
            array->buffer_id != 0
                ? step_encoder_buffer_array(&encoder, buffer, array->offset_bytes, array->bytes)
                : step_encoder_array(&encoder, change->data + array->offset_bytes, (uint32_t)array->bytes);
      }
    }
    if (together == 0) {
      run(world, &encoder);
      begin(&encoder, 1);
    }
    (void)part_add(&encoder, &part);
    if (text == NULL) {
      run(world, &encoder);
      continue;
    }
    const struct kvp_error error = world_refused(world, &encoder);
    step_encoder_deinit(&encoder);
    assert_int_equal(error.op, together == 0 ? 0 : change->header.op_count);
    assert_string_equal(error.array, "keep_compressed");
    if (strstr(error.text, text) == NULL) {
      fail_msg("expected '%s', got '%s'", text, error.text);
    }
  }
}

static void expect_one(struct world *world, struct step_encoder *change, const char *text) {
  expect(world, change, text);
  step_encoder_deinit(change);
}

static const char rows_written[] = "written since they were assembled";
static const char blocks_written[] = "blocks that they were assembled from were written since";

static void test_rows_written(void **state) {
  (void)state;
  struct world world;
  struct step_encoder change;
  world_init(&world);
  const uint64_t first = out_offset + reserved_rows * row;
  const struct {
    uint64_t offset;
    const char *text;
  } cases[] = {{first - 1, NULL},
               {first, rows_written},
               {first + kept_rows * row - 1, rows_written},
               {first + kept_rows * row, NULL}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    begin(&change, 1);
    write_rows(&change, cases[i].offset);
    expect_one(&world, &change, cases[i].text);
  }
  begin(&change, 1); /* cast back into them */
  world_add_store(&change, (int32_t[]){2 * tokens_per_block}, 1)->second = step_view(buffer, first, 1, row, row);
  expect_one(&world, &change, rows_written);
  begin(&change, 1); /* loaded over them */
  (void)world_add_load(&change, (int32_t[]){-1, 0, 1, 0}, 1, 11);
  expect_one(&world, &change, rows_written);
  begin(&change, 1); /* indices, in front of them and in them */
  struct kvp_wire_op *op = step_encoder_op(&change, KVP_OP_EXPAND_SWA_INDEX);
  op->argument = 4;
  op->arrays[0] = step_encoder_array(&change, (int32_t[]){0, 1, 0, 1}, 16);
  op->second = step_view(buffer, first - 16, 1, 16, 16);
  expect(&world, &change, NULL);
  change.ops[0].second.offset_bytes = first + 16;
  expect_one(&world, &change, rows_written);
  begin(&change, 1); /* another assemble's chunk */
  op = step_encoder_op(&change, KVP_OP_ASSEMBLE);
  op->source = step_view(buffer, 0, 1, row, row);
  op->second = step_view(buffer, first + row, 1, row, row);
  op->argument = 1;
  expect_one(&world, &change, rows_written);
  world_deinit(&world);
}

static void test_blocks_written(void **state) {
  (void)state;
  struct world world;
  struct step_encoder change;
  world_init(&world);
  world_ring_attach(&world);
  begin(&change, 1);
  write_block(&change, 0, 2); /* another block, another layer */
  write_block(&change, 1, 0);
  expect_one(&world, &change, NULL);
  begin(&change, 1);
  write_block(&change, 0, 0);
  expect_one(&world, &change, blocks_written);
  begin(&change, 1);
  write_block(&change, 0, 1); /* only an empty segment names it: named is named */
  expect_one(&world, &change, blocks_written);
  begin(&change, 1);
  (void)world_add_store(&change, (int32_t[]){-1, -1}, 2);
  expect_one(&world, &change, NULL);
  begin(&change, 1); /* of slots in a buffer nobody knows anything */
  memset(world.buffer + (3 << 20), 0xFF, 64);
  struct kvp_wire_op *op = world_add_store(&change, NULL, 0);
  op->arrays[0] = step_encoder_buffer_array(&change, buffer, 3 << 20, 8);
  expect_one(&world, &change, blocks_written);
  begin(&change, 1); /* the same block of another pool */
  (void)world_add_ring_store(&change, 0, (int32_t[]){0}, 1);
  expect_one(&world, &change, NULL);
  const struct {
    enum kvp_op_kind kind;
    int32_t blocks[2];
    const char *text;
  } cases[] = {{KVP_OP_COPY_BLOCKS, {2, 0}, blocks_written},
               {KVP_OP_COPY_BLOCKS, {0, 2}, NULL},
               {KVP_OP_ZERO_BLOCKS, {2, 1}, blocks_written}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    begin(&change, 1);
    op = step_encoder_op(&change, cases[i].kind);
    op->pool_id = pool_id;
    op->arrays[0] = step_encoder_array(&change, cases[i].blocks, 8);
    expect_one(&world, &change, cases[i].text);
  }
  world_deinit(&world);
}

/* A refused step, and one that was refused for another op of it, change nothing of what is remembered. */
static void test_refused_steps_change_nothing(void **state) {
  (void)state;
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  const struct part part = keeping();
  part_run(&world, &whole);
  begin(&encoder, 1);
  write_rows(&encoder, out_offset + reserved_rows * row);
  (void)world_add_store(&encoder, (int32_t[]){-2}, 1);
  assert_int_equal(world_refused(&world, &encoder).op, 1);
  step_encoder_deinit(&encoder);
  part_run(&world, &part);
  struct part elsewhere = whole;
  elsewhere.out = 2 << 20;
  begin(&encoder, 1);
  (void)part_add(&encoder, &elsewhere);
  (void)world_add_store(&encoder, (int32_t[]){-2}, 1);
  assert_int_equal(world_refused(&world, &encoder).op, 1);
  step_encoder_deinit(&encoder);
  elsewhere.keeps = true;
  part_refuse(&world, &elsewhere, "no assemble");
  world_deinit(&world);
}

/* What was detached and came again under the same number is not what it was. */
static void test_objects_that_go(void **state) {
  (void)state;
  struct world world;
  world_init(&world);
  struct kvp_control_pool pool = world_pool_spec();
  const struct part part = keeping();
  part_run(&world, &whole);
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_POOL_DETACH, &pool, sizeof pool, NULL, 0));
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_POOL_ATTACH, &pool, sizeof pool, &world.owner_fd, 1));
  part_refuse(&world, &part, "no assemble");
  part_run(&world, &whole);
  part_run(&world, &part);
  const struct kvp_control_buffer detached = {.buffer_id = buffer};
  world_assert_ok(exec_harness_request(&world.link, KVP_CONTROL_BUFFER_DETACH, &detached, sizeof detached, NULL, 0));
  world_assert_ok(exec_harness_buffer_attach(&world.link, buffer, buffer_memory, buffer_bytes, session));
  part_refuse(&world, &part, "no assemble");
  world_deinit(&world);
}

/* One session's many parts make room among themselves: the newest are remembered, the oldest aren't, and another
 * session's part is left alone. */
static void test_many_parts(void **state) {
  (void)state;
  enum { parts = 80, remembered = 64 };
  struct world world;
  struct step_encoder encoder;
  world_init(&world);
  struct kvp_wire_op *op = NULL;
  for (int keeps = 0; keeps < 2; keeps++) {
    if (keeps == 0) { /* an operator's, in the other session's buffer */
      step_encoder_init(&encoder, 1, 0, step_epoch);
      op = part_add(&encoder, &whole);
      op->second.buffer_id = other_buffer;
      run(&world, &encoder);
    }
    for (uint32_t i = 0; i < parts; i++) {
      struct part part = whole;
      part.keeps = keeps != 0;
      part.rows = 0;
      part.kept_rows = 1;
      part.out = out_offset + (uint64_t)i * row;
      const int32_t one[] = {0, 0, 1, 0, 0, 0, 0, 0};
      part.segments = one;
      begin(&encoder, 1);
      op = part_add(&encoder, &part);
      op->second.rows = 1;
      if (keeps == 0 || i >= parts - remembered) {
        run(&world, &encoder);
      } else {
        assert_int_equal(world_refused(&world, &encoder).status, KVP_INVALID_ARGUMENT);
        step_encoder_deinit(&encoder);
      }
    }
  }
  const struct part part = keeping();
  step_encoder_init(&encoder, 1, 0, step_epoch);
  op = part_add(&encoder, &part);
  op->second.buffer_id = other_buffer;
  run(&world, &encoder);
  world_deinit(&world);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_kept),
      cmocka_unit_test(test_mismatches),
      cmocka_unit_test(test_rows_written),
      cmocka_unit_test(test_blocks_written),
      cmocka_unit_test(test_objects_that_go),
      cmocka_unit_test(test_refused_steps_change_nothing),
      cmocka_unit_test(test_many_parts),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
