/* What the executor refuses: every class of it, with op, array, position and value, and nothing executed. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/executor_world.h"

/* ---- refusals ---- */

/* A step of four ops, of which the fourth is the bad one. */
static struct kvp_wire_op *begin_refusal(struct step_encoder *encoder, bool is_store) {
  static const int32_t good_slots[] = {0, 1, 2};
  static const int32_t good_segments[] = {0, 0, 64, 0, 1, 0, 10, 64};
  step_encoder_init(encoder, 1, session, step_epoch);
  (void)world_add_store(encoder, good_slots, 3);
  (void)world_add_load(encoder, good_segments, 2, 100);
  struct kvp_wire_op *fill = step_encoder_op(encoder, KVP_OP_BUFFER_FILL);
  fill->source = step_view(buffer, 2 << 20, 1, 4096, 4096);
  fill->argument = 0x77;
  return is_store ? world_add_store(encoder, good_slots, 3) : world_add_load(encoder, good_segments, 2, 100);
}

struct refusal_world {
  struct world world;
  uint8_t *main_before;
  uint8_t *buffer_before;
};

/* The step is refused with these facts about op 3, and nothing of it ran. */
static void check_refusal(struct refusal_world *it, struct step_encoder *encoder, enum kvp_status status,
                          const char *array, int64_t position, int64_t value, const char *text) {
  const struct kvp_error error = world_refused(&it->world, encoder);
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
  const int32_t next_block[] = {191, 192}; /* the neighbour of a good slot */
  refuse_slots(it, next_block, 2, KVP_STALE_BLOCK, 1, 192, "block 3 was assigned");
  struct step_encoder encoder; /* an empty segment to the load before, the same slot twice to this op */
  struct kvp_wire_op *op = begin_refusal(&encoder, true);
  op->arrays[0] = step_encoder_array(&encoder, (int32_t[]){0, 5, 5, 0}, 16);
  encoder.ops[1].arrays[0] = op->arrays[0];
  encoder.ops[1].total_k = 0;
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "slots", 2, 5, "slots[2] = 5 is slots[1] again");
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
  begin_refusal(&encoder, true)->kind = 11;
  check_refusal(it, &encoder, KVP_UNIMPLEMENTED, "kind", -1, 11, "kind 11 is not known");
  begin_refusal(&encoder, true)->flags = 4;
  check_refusal(it, &encoder, KVP_MALFORMED, "flags", -1, 4, "0x4");
  begin_refusal(&encoder, true)->flags = KVP_OP_WAITS; /* the supervisor's ring has no timelines */
  check_refusal(it, &encoder, KVP_MALFORMED, "flags", -1, KVP_OP_WAITS, "0x80");
  begin_refusal(&encoder, true)->flags = KVP_OP_SIGNALS;
  check_refusal(it, &encoder, KVP_MALFORMED, "flags", -1, KVP_OP_SIGNALS, "0x100");
  begin_refusal(&encoder, true)->wait.value = 1;
  check_refusal(it, &encoder, KVP_MALFORMED, "wait", -1, 0, "wait is not empty");
  begin_refusal(&encoder, true)->signal.word = 600;
  check_refusal(it, &encoder, KVP_MALFORMED, "signal", -1, 600, "signal is not empty");
  begin_refusal(&encoder, true)->signal.flags = 1;
  check_refusal(it, &encoder, KVP_MALFORMED, "signal", -1, 0, "signal is not empty");
  begin_refusal(&encoder, true)->arrays[1] = 0;
  check_refusal(it, &encoder, KVP_MALFORMED, "arrays", 1, 0, "it has no array 1");
  begin_refusal(&encoder, true)->arrays[0] = 4;
  check_refusal(it, &encoder, KVP_MALFORMED, "slots", -1, 4, "array 4, the step has 3");
  begin_refusal(&encoder, true)->arrays[0] = KVP_WIRE_NO_ARRAY;
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "slots", -1, 0, "slots are missing");
}

static void refusals_of_views(struct refusal_world *it) {
  struct step_encoder encoder;
  struct kvp_wire_op *op = NULL;
  struct kvp_wire_view *view = &begin_refusal(&encoder, true)->source;
  *view = step_view(buffer, 0, 256, 1056, 1056);
  check_refusal(it, &encoder, KVP_WRONG_FORMAT, "source", -1, 1056, "source.row_bytes = 1056");
  begin_refusal(&encoder, false)->source = step_view(buffer, 0, 100, 528, 1024);
  check_refusal(it, &encoder, KVP_WRONG_FORMAT, "out", -1, 528, "out.row_bytes = 528, rows of this op have 1024");
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
  op = begin_refusal(&encoder, true); /* in front of the source, its last 16 bytes in it */
  op->source = step_view(buffer, (3 << 20) + 65536 - 16, 64, 1024, 1024);
  op->second = step_view(buffer, 3 << 20, 64, 1024, 1024);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "cast_back", -1, 3 << 20, "cast_back overlaps source");
  op = begin_refusal(&encoder, true); /* beside each row, but 16 bytes into the next one */
  op->source = step_view(buffer, 3 << 20, 64, 1024, 2048);
  op->second = step_view(buffer, (3 << 20) + 1040, 64, 1024, 2048);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "cast_back", -1, (3 << 20) + 1040, "cast_back overlaps source");
  op = begin_refusal(&encoder, true); /* the same with the source behind */
  op->source = step_view(buffer, (3 << 20) + 1040, 64, 1024, 2048);
  op->second = step_view(buffer, 3 << 20, 64, 1024, 2048);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "cast_back", -1, 3 << 20, "cast_back overlaps source");
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
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, 0, 257 * sizeof(int32_t));
  check_refusal(it, &encoder, KVP_OUT_OF_RANGE, "slots", 256, 257, "257 slots, but source has 256 rows");
  op = begin_refusal(&encoder, false);
  op->arrays[0] = step_encoder_buffer_array(&encoder, buffer, (1 << 20) + 64, 16);
  check_refusal(it, &encoder, KVP_INVALID_ARGUMENT, "out", -1, 1 << 20, "out overlaps segments");
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
  struct exec_completion done = world_run(&it.world, &encoder);
  free(done.payload);
  step_encoder_deinit(&encoder);
  const int32_t everywhere[] = {3 * 64, 4 * 64, 5 * 64, 6 * 64, 7 * 64, -1};
  (void)begin_refusal(&encoder, true);
  encoder.header.owner = 0;
  encoder.ops[3].arrays[0] = step_encoder_array(&encoder, everywhere, sizeof everywhere);
  done = world_run(&it.world, &encoder);
  assert_int_equal(world_report(&done, 3).rows_stored, 5);
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
      {offsetof(struct kvp_wire_step, version), 1, KVP_VERSION_MISMATCH},
      {offsetof(struct kvp_wire_step, op_count), 1025, KVP_TOO_LARGE},
      {offsetof(struct kvp_wire_step, op_count), 900, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, array_count), UINT32_MAX, KVP_TOO_LARGE},
      {offsetof(struct kvp_wire_step, array_count), 1000, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, bytes), 10, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, owner), 65536, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, flags), 1, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, words_buffer_id), 1, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, flags), 2, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, base), 1, KVP_MALFORMED},
      {offsetof(struct kvp_wire_step, deadline_ns), 1, KVP_MALFORMED},
      /* the first array's offset: inside the tables, odd, past the end */
      {sizeof(struct kvp_wire_step) + sizeof(struct kvp_wire_op) + 8, 64, KVP_MALFORMED},
      {sizeof(struct kvp_wire_step) + sizeof(struct kvp_wire_op) + 8, 425, KVP_MALFORMED},
      {sizeof(struct kvp_wire_step) + sizeof(struct kvp_wire_op) + 8, 1 << 20, KVP_MALFORMED},
      {sizeof(struct kvp_wire_step) + sizeof(struct kvp_wire_op) + 20, UINT32_MAX, KVP_MALFORMED},
  };
  step_encoder_init(&encoder, 1, session, step_epoch);
  (void)world_add_store(&encoder, (int32_t[]){1, 2}, 2);
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_malformed_steps),
  };
  (void)alarm(watchdog_seconds);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
