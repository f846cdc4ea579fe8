/* StepRequests as encoded steps: layout from step_wire.h by arithmetic, refusals with op, array, position and value.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/supervisor/daemon.h"
#include "server/supervisor/step_build.h"
#include "server/supervisor/step_encode.h"

/* Two devices; pool 3 on both, pool 4 on the second only. */
static struct kvp_config config;
static struct kvp_daemon supervisor;
static struct kvp_pool pools[2];
static const struct kvp_session session = {.namespace_name = "tenant"};

static int setup(void **state) {
  (void)state;
  supervisor.config = &config;
  supervisor.device_count = 2;
  for (uint32_t i = 0; i < 2; i++) {
    supervisor.devices[i].daemon = &supervisor;
    supervisor.devices[i].index = i;
    memcpy(supervisor.devices[i].name, i == 0 ? "host:0" : "host:1", 7);
    pools[i].id = 3 + i;
    pools[i].serving = true;
    memcpy(pools[i].spec.name, i == 0 ? "first_" : "second", 7);
    supervisor.pools.pools[i == 0 ? 0 : 5] = &pools[i];
  }
  pools[0].placement_count = 2;
  pools[0].placements[0].device = &supervisor.devices[0];
  pools[0].placements[1].device = &supervisor.devices[1];
  pools[1].placement_count = 1;
  pools[1].placements[0].device = &supervisor.devices[1];
  return 0;
}

/* A request with a store and a load that share nothing: the good one that every test spoils in its own way. */
struct good {
  Kvpool__V1__RegionRef store_region;
  Kvpool__V1__RegionRef load_region;
  Kvpool__V1__View source;
  Kvpool__V1__View cast_back;
  Kvpool__V1__View out;
  Kvpool__V1__View out_scales;
  Kvpool__V1__StoreOp store;
  Kvpool__V1__LoadOp load;
  Kvpool__V1__Op ops[2];
  Kvpool__V1__Op *op_pointers[kvp_ops_per_step_max + 1];
  Kvpool__V1__BufferArray buffer_array;
  Kvpool__V1__Array arrays[2];
  Kvpool__V1__Array *array_pointers[kvp_arrays_per_step_max + 1];
  Kvpool__V1__StepRequest request;
};

static int32_t slots[3] = {7, -1, 9};

static void view_fill(Kvpool__V1__View *view, uint64_t first) {
  kvpool__v1__view__init(view);
  view->buffer_id = first;
  view->offset_bytes = first + 1;
  view->rows = first + 2;
  view->row_stride_bytes = first + 3;
  view->row_bytes = (uint32_t)first + 4;
}

static struct good *good_new(void) {
  struct good *good = calloc(1, sizeof *good);
  assert_non_null(good);
  kvpool__v1__region_ref__init(&good->store_region);
  kvpool__v1__region_ref__init(&good->load_region);
  good->store_region.pool_id = 3;
  good->store_region.region = 1;
  good->store_region.layer = 2;
  good->load_region.pool_id = 3;
  view_fill(&good->source, 100);
  view_fill(&good->cast_back, 200);
  view_fill(&good->out, 300);
  view_fill(&good->out_scales, 400);
  kvpool__v1__store_op__init(&good->store);
  good->store.region = &good->store_region;
  good->store.source = &good->source;
  kvpool__v1__load_op__init(&good->load);
  good->load.region = &good->load_region;
  good->load.segments = 1;
  good->load.total_k = 77;
  good->load.out = &good->out;
  for (int i = 0; i < 2; i++) {
    kvpool__v1__op__init(&good->ops[i]);
    kvpool__v1__array__init(&good->arrays[i]);
    good->op_pointers[i] = &good->ops[i];
    good->array_pointers[i] = &good->arrays[i];
  }
  good->ops[0].op_case = KVPOOL__V1__OP__OP_STORE;
  good->ops[0].store = &good->store;
  good->ops[1].op_case = KVPOOL__V1__OP__OP_LOAD;
  good->ops[1].load = &good->load;
  good->arrays[0].source_case = KVPOOL__V1__ARRAY__SOURCE_INLINE;
  good->arrays[0].inline_.data = (uint8_t *)slots;
  good->arrays[0].inline_.len = sizeof slots;
  kvpool__v1__buffer_array__init(&good->buffer_array);
  good->buffer_array.buffer_id = 9;
  good->buffer_array.offset_bytes = 64;
  good->buffer_array.count = 20;
  good->arrays[1].source_case = KVPOOL__V1__ARRAY__SOURCE_BUFFER;
  good->arrays[1].buffer = &good->buffer_array;
  kvpool__v1__step_request__init(&good->request);
  good->request.epoch = 12;
  good->request.arrays = good->array_pointers;
  good->request.n_arrays = 2;
  good->request.ops = good->op_pointers;
  good->request.n_ops = 2;
  return good;
}

static void expect_view(const struct kvp_wire_view *view, uint64_t first) {
  assert_int_equal(view->buffer_id, first);
  assert_int_equal(view->offset_bytes, first + 1);
  assert_int_equal(view->rows, first + 2);
  assert_int_equal(view->row_stride_bytes, first + 3);
  assert_int_equal(view->row_bytes, first + 4);
  assert_int_equal(view->flags, KVP_WIRE_VIEW_PRESENT);
  assert_int_equal(view->reserved, 0);
}

static bool is_zero(const void *memory, size_t bytes) {
  const uint8_t *at = memory;
  for (size_t i = 0; i < bytes; i++) {
    if (at[i] != 0) {
      return false;
    }
  }
  return true;
}

static void test_layout(void **state) {
  (void)state;
  struct good *good = good_new();
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  good->store.cast_back = &good->cast_back;
  good->load.out_scales = &good->out_scales;
  good->load.allow_store_before_load = true;
  assert_int_equal(kvp_step_encode(&supervisor, &session, &good->request, &encoded, &error), KVP_OK);
  assert_ptr_equal(encoded.device, &supervisor.devices[0]);
  assert_int_equal(encoded.pool_count, 1);
  assert_ptr_equal(encoded.pools[0], &pools[0]);

  const struct kvp_wire_step *step = encoded.wire;
  assert_int_equal(step->magic, KVP_WIRE_STEP_MAGIC);
  assert_int_equal(step->version, 3);
  assert_int_equal(step->op_count, 2);
  assert_int_equal(step->array_count, 2);
  assert_int_equal(step->bytes, 64 + 2 * 320 + 2 * 40 + 16); /* 12 bytes of slots take 16 */
  assert_int_equal(step->epoch, 12);
  assert_int_equal(step->queue, 0);
  assert_int_equal(step->owner, 0);
  assert_int_equal(step->flags, 0);

  const struct kvp_wire_op *ops = (const void *)((const uint8_t *)step + 64);
  assert_int_equal(ops[0].kind, 1);
  assert_int_equal(ops[0].pool_id, 3);
  assert_int_equal(ops[0].region, 1);
  assert_int_equal(ops[0].layer, 2);
  assert_int_equal(ops[0].arrays[0], 0);
  assert_int_equal(ops[0].arrays[1], UINT32_MAX);
  assert_int_equal(ops[0].total_k, 0);
  expect_view(&ops[0].source, 100);
  expect_view(&ops[0].second, 200);
  assert_int_equal(ops[1].kind, 2);
  assert_int_equal(ops[1].arrays[0], 1);
  assert_int_equal(ops[1].total_k, 77);
  assert_int_equal(ops[0].flags, 0);
  assert_int_equal(ops[1].flags, 1);
  expect_view(&ops[1].source, 300);
  expect_view(&ops[1].second, 400);
  assert_true(is_zero(&ops[0].wait, sizeof ops[0].wait));
  assert_true(is_zero(&ops[0].signal, sizeof ops[0].signal));

  const struct kvp_wire_array *arrays = (const void *)((const uint8_t *)step + 64 + 640);
  assert_int_equal(arrays[0].buffer_id, 0);
  assert_int_equal(arrays[0].offset_bytes, 64 + 640 + 80);
  assert_int_equal(arrays[0].bytes, 12);
  assert_int_equal(arrays[1].buffer_id, 9);
  assert_int_equal(arrays[1].offset_bytes, 64);
  assert_int_equal(arrays[1].bytes, 80);
  assert_memory_equal((const uint8_t *)step + 784, slots, 12);
  assert_true(is_zero((const uint8_t *)step + 796, 4));
  kvp_step_free(encoded.wire);
  free(good);
}

static void test_absent_views_are_zero(void **state) {
  (void)state;
  struct good *good = good_new();
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  assert_int_equal(kvp_step_encode(&supervisor, &session, &good->request, &encoded, &error), KVP_OK);
  const struct kvp_wire_op *ops = (const void *)(encoded.wire + 1);
  assert_true(is_zero(&ops[0].second, sizeof ops[0].second));
  assert_true(is_zero(&ops[1].second, sizeof ops[1].second));
  kvp_step_free(encoded.wire);
  free(good);
}

static void test_nothing_to_do(void **state) {
  (void)state;
  struct good *good = good_new();
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  good->request.n_ops = 0;
  good->request.n_arrays = 0;
  assert_int_equal(kvp_step_encode(&supervisor, &session, &good->request, &encoded, &error), KVP_OK);
  assert_int_equal(encoded.wire->bytes, 64);
  assert_int_equal(encoded.pool_count, 0);
  assert_ptr_equal(encoded.device, &supervisor.devices[0]);
  kvp_step_free(encoded.wire);
  free(good);
}

/* Encodes what was spoiled; frees it. */
static void expect_refused(struct good *good, enum kvp_status status, int32_t op, const char *array, int64_t position,
                           int64_t value) {
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  assert_int_equal(kvp_step_encode(&supervisor, &session, &good->request, &encoded, &error), status);
  assert_int_equal(error.status, status);
  assert_int_equal(error.op, op);
  assert_string_equal(error.array, array);
  assert_int_equal(error.position, position);
  assert_int_equal(error.value, value);
  assert_true(strlen(error.text) > 0);
  free(good);
}

static void test_arrays_refused(void **state) {
  (void)state;
  struct good *good = good_new();
  good->arrays[1].source_case = KVPOOL__V1__ARRAY__SOURCE__NOT_SET;
  expect_refused(good, KVP_INVALID_ARGUMENT, -1, "arrays", 1, 0);
  good = good_new();
  good->arrays[0].inline_.len = 11;
  expect_refused(good, KVP_INVALID_ARGUMENT, -1, "arrays", 0, 11);
  good = good_new();
  good->buffer_array.buffer_id = 0;
  expect_refused(good, KVP_UNKNOWN_BUFFER, -1, "arrays", 1, 0);
  good = good_new();
  good->buffer_array.count = UINT64_C(1) << 62; /* times 4 is 0 in 64 bits */
  expect_refused(good, KVP_OUT_OF_RANGE, -1, "arrays", 1, INT64_C(1) << 62);
  good = good_new();
  for (size_t i = 0; i <= kvp_arrays_per_step_max; i++) {
    good->array_pointers[i] = &good->arrays[0];
  }
  good->request.n_arrays = kvp_arrays_per_step_max + 1;
  expect_refused(good, KVP_TOO_LARGE, -1, "arrays", -1, 1025);
}

static void test_ops_refused(void **state) {
  (void)state;
  struct good *good = good_new();
  good->ops[1].op_case = KVPOOL__V1__OP__OP__NOT_SET;
  expect_refused(good, KVP_INVALID_ARGUMENT, 1, "ops", 1, 0);
  good = good_new();
  good->store.region = NULL;
  expect_refused(good, KVP_INVALID_ARGUMENT, 0, "region", -1, 0);
  good = good_new();
  good->load.region = NULL;
  expect_refused(good, KVP_INVALID_ARGUMENT, 1, "region", -1, 0);
  good = good_new();
  good->store.source = NULL;
  expect_refused(good, KVP_INVALID_ARGUMENT, 0, "source", -1, 0);
  good = good_new();
  good->load.out = NULL;
  expect_refused(good, KVP_INVALID_ARGUMENT, 1, "out", -1, 0);
  good = good_new();
  good->store.slots = 2;
  expect_refused(good, KVP_OUT_OF_RANGE, 0, "slots", -1, 2);
  good = good_new();
  good->load.segments = UINT32_MAX; /* the wire's "no array" is no number a client may say */
  expect_refused(good, KVP_OUT_OF_RANGE, 1, "segments", -1, UINT32_MAX);
  good = good_new();
  for (size_t i = 0; i <= kvp_ops_per_step_max; i++) {
    good->op_pointers[i] = &good->ops[0];
  }
  good->request.n_ops = kvp_ops_per_step_max + 1;
  expect_refused(good, KVP_TOO_LARGE, -1, "ops", -1, 1025);
}

static void test_bytes_of_a_step(void **state) {
  (void)state;
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  uint8_t *data = calloc(1, kvp_step_bytes_max);
  assert_non_null(data);
  const size_t tables = 64 + 640 + 80;
  struct good *good = good_new();
  good->arrays[0].inline_.data = data;
  good->arrays[0].inline_.len = kvp_step_bytes_max - tables; /* a multiple of 8: exactly full */
  assert_int_equal(kvp_step_encode(&supervisor, &session, &good->request, &encoded, &error), KVP_OK);
  assert_int_equal(encoded.wire->bytes, kvp_step_bytes_max);
  kvp_step_free(encoded.wire);
  good->arrays[0].inline_.len += 4;
  expect_refused(good, KVP_TOO_LARGE, -1, "", -1, 0);
  free(data);
}

static void test_pools_of_namespaces(void **state) {
  (void)state;
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  char second[] = "host:1";
  struct good *good = good_new();
  good->request.placement = second;
  good->load_region.pool_id = 4;
  memcpy(pools[1].spec.namespace_name, "tenant", sizeof "tenant");
  assert_int_equal(kvp_step_encode(&supervisor, &session, &good->request, &encoded, &error), KVP_OK);
  kvp_step_free(encoded.wire);
  memcpy(pools[1].spec.namespace_name, "other", sizeof "other");
  expect_refused(good, KVP_PERMISSION_DENIED, 1, "", -1, 0);
  memset(pools[1].spec.namespace_name, 0, sizeof pools[1].spec.namespace_name);
}

static void test_placement(void **state) {
  (void)state;
  struct kvp_encoded_step encoded;
  struct kvp_error error;
  char second[] = "host:1";
  char unknown[] = "cuda:0";
  struct good *good = good_new();
  good->request.placement = second;
  good->load_region.pool_id = 4;
  assert_int_equal(kvp_step_encode(&supervisor, &session, &good->request, &encoded, &error), KVP_OK);
  assert_ptr_equal(encoded.device, &supervisor.devices[1]);
  assert_int_equal(encoded.pool_count, 2);
  kvp_step_free(encoded.wire);
  free(good);

  good = good_new(); /* the first op's pool says where; the second's is not there */
  good->load_region.pool_id = 4;
  expect_refused(good, KVP_WRONG_DEVICE, 1, "region", -1, 4);
  good = good_new();
  good->request.placement = unknown;
  expect_refused(good, KVP_WRONG_DEVICE, -1, "device", -1, 0);
  good = good_new();
  good->load_region.pool_id = 5;
  expect_refused(good, KVP_UNKNOWN_POOL, 1, "pool_id", -1, 5);
  pools[0].serving = false; /* still being made: not there for anybody */
  expect_refused(good_new(), KVP_UNKNOWN_POOL, 0, "pool_id", -1, 3);
  pools[0].serving = true;
}

/* ---- the daemon's own steps -------------------------------------------------------------------------------------
 */

static void test_own_steps(void **state) {
  (void)state;
  struct kvp_error error;
  const struct kvp_region_place place = {3, 1, 2};
  struct kvp_wire_step *step = kvp_step_build_write(9, 5, "hello", 5, &error);
  const struct kvp_wire_op *op = (const void *)(step + 1);
  assert_int_equal(step->bytes, 64 + 320 + 40 + 8);
  assert_int_equal(op->kind, KVP_OP_BUFFER_WRITE);
  assert_int_equal(op->source.offset_bytes, 5);
  assert_int_equal(op->source.rows * op->source.row_bytes, 5);
  assert_memory_equal((const uint8_t *)step + 424, "hello\0\0\0", 8);
  kvp_step_free(step);

  const struct kvp_byte_range ranges[2] = {{UINT64_C(5) << 32, 528}, {7, 16}};
  step = kvp_step_build_region_read(&place, ranges, 2, &error);
  op = (const void *)(step + 1);
  assert_int_equal(step->bytes, 64 + 640);
  assert_int_equal(op[0].argument, UINT64_C(5) << 32);
  assert_int_equal(op[0].total_k, 528);
  assert_int_equal(op[1].argument, 7);
  assert_int_equal(op[1].layer, 2);
  kvp_step_free(step);

  const int32_t segment[4] = {1, 0, 3, 0};
  const struct kvp_rows_layout layout = {
      .rows = 3, .row_bytes = 64, .scale_bytes = 4, .scales_begin = 192, .bytes = 204};
  step = kvp_step_build_load_rows(&place, 8, (const uint8_t *)segment, sizeof segment, 9, &layout, &error);
  op = (const void *)(step + 1);
  assert_int_equal(step->epoch, 8);
  assert_int_equal(op->total_k, 3);
  assert_int_equal(op->source.row_stride_bytes, 64);
  assert_int_equal(op->second.offset_bytes, 192);
  assert_int_equal(op->second.row_bytes, 4);
  kvp_step_free(step);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_layout),
      cmocka_unit_test(test_absent_views_are_zero),
      cmocka_unit_test(test_nothing_to_do),
      cmocka_unit_test(test_arrays_refused),
      cmocka_unit_test(test_ops_refused),
      cmocka_unit_test(test_bytes_of_a_step),
      cmocka_unit_test(test_pools_of_namespaces),
      cmocka_unit_test(test_placement),
      cmocka_unit_test(test_own_steps),
  };
  return cmocka_run_group_tests(tests, setup, NULL);
}
