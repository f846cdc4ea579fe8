/* Parts of the executor that a process around them hides: tables, sets, turns, uses, guard pages. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/executor/device.h"
#include "server/executor/id_table.h"
#include "server/executor/intake.h"
#include "server/executor/queue.h"
#include "server/executor/slot_marks.h"
#include "server/executor/slot_set.h"
#include "tests/unit/exec_harness.h"

static uint64_t random_next(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

/* Random additions and removals of a few ids, many of which collide, against an array. */
static void test_id_table(void **state) {
  (void)state;
  enum { id_count = 500, rounds = 200000 };
  struct kvp_id_table table = {0};
  static int objects[id_count];
  bool present[id_count] = {false};
  uint64_t count = 0, random = 42;
  for (int round = 0; round < rounds; round++) {
    const uint32_t k = (uint32_t)(random_next(&random) % id_count);
    const uint64_t id = k % 2 == 0 ? k : (uint64_t)k << 40;
    assert_ptr_equal(kvp_id_table_get(&table, id), present[k] ? &objects[k] : NULL);
    if (present[k]) {
      assert_ptr_equal(kvp_id_table_remove(&table, id), &objects[k]);
      assert_null(kvp_id_table_remove(&table, id));
      count--;
    } else {
      assert_true(kvp_id_table_add(&table, id, &objects[k]));
      count++;
    }
    present[k] = !present[k];
    assert_int_equal(table.count, count);
  }
  for (uint32_t k = 0; k < id_count; k++) {
    assert_ptr_equal(kvp_id_table_get(&table, k % 2 == 0 ? k : (uint64_t)k << 40), present[k] ? &objects[k] : NULL);
  }
  while (kvp_id_table_take_any(&table) != NULL) {
    count--;
  }
  assert_int_equal(count, 0);
  kvp_id_table_deinit(&table);
}

/* Runs, scattered slots and repeats, against a bitmap; small sets after large ones and the other way round. */
static void test_slot_set(void **state) {
  (void)state;
  enum { slot_space = 1 << 16 };
  static bool seen[slot_space];
  struct kvp_slot_set set = {0};
  uint64_t random = 7;
  const uint32_t counts[] = {1, 3000, 10, 300000, 0, 5000, 64};
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    memset(seen, 0, sizeof seen);
    assert_true(kvp_slot_set_begin(&set, counts[i]));
    int32_t slot = 0;
    for (uint32_t k = 0; k < counts[i]; k++) {
      slot = random_next(&random) % 8 == 0 ? (int32_t)(random_next(&random) % slot_space) : (slot + 1) % slot_space;
      assert_int_equal(kvp_slot_set_add(&set, slot), !seen[slot]);
      seen[slot] = true;
    }
  }
  assert_true(kvp_slot_set_begin(&set, 4));
  assert_true(kvp_slot_set_add(&set, INT32_MAX));
  assert_true(kvp_slot_set_add(&set, 0));
  assert_false(kvp_slot_set_add(&set, INT32_MAX));
  kvp_slot_set_deinit(&set);
}

/* Slots are the client's choice: which of them meet in a table is not for it to know. */
static void test_hashes_are_no_two_times_the_same(void **state) {
  (void)state;
  struct kvp_slot_set sets[2] = {{0}, {0}};
  struct kvp_slot_marks marks[2] = {{0}, {0}};
  const int32_t slot = 1000;
  for (size_t i = 0; i < 2; i++) {
    assert_true(kvp_slot_set_begin(&sets[i], 1));
    assert_true(kvp_slot_set_add(&sets[i], slot));
    kvp_slot_marks_begin(&marks[i]);
    assert_true(kvp_slot_marks_add(&marks[i], 3, &slot, 1));
    assert_int_equal(kvp_slot_marks_find(&marks[i], 3, 0, 2000), slot);
    assert_int_equal(sets[i].multiplier % 2, 1);
    assert_int_equal(marks[i].multiplier % 2, 1);
  }
  assert_true(sets[0].multiplier != sets[1].multiplier && marks[0].multiplier != marks[1].multiplier);
  for (size_t i = 0; i < 2; i++) {
    kvp_slot_set_deinit(&sets[i]);
    kvp_slot_marks_deinit(&marks[i]);
  }
}

static void test_arena(void **state) {
  (void)state;
  struct kvp_arena arena = {0};
  for (int round = 0; round < 20; round++) {
    uint8_t *pieces[50];
    for (int i = 0; i < 50; i++) {
      const size_t bytes = (size_t)i * (size_t)round * 37;
      pieces[i] = kvp_arena_alloc(&arena, bytes);
      assert_non_null(pieces[i]);
      assert_int_equal((uintptr_t)pieces[i] % kvp_arena_alignment_bytes, 0);
      memset(pieces[i], i, bytes);
    }
    for (int i = 1; i < 50; i++) {
      const size_t bytes = (size_t)i * (size_t)round * 37;
      assert_true(bytes == 0 || (pieces[i][0] == i && pieces[i][bytes - 1] == i));
    }
    kvp_arena_reset(&arena);
  }
  /* What was needed before is there again in one piece: a second round takes nothing more. */
  (void)kvp_arena_alloc(&arena, 1000000);
  kvp_arena_reset(&arena);
  const uint64_t capacity = arena.capacity_bytes;
  for (int i = 0; i < 10; i++) {
    assert_non_null(kvp_arena_alloc(&arena, 100000 - 64));
  }
  assert_int_equal(arena.capacity_bytes, capacity);
  kvp_arena_reset(&arena);
  assert_non_null(kvp_arena_alloc(&arena, 10 << 20));
  kvp_arena_reset(&arena);
  assert_true(arena.capacity_bytes < 10 << 20); /* a large step's memory is not kept */
  assert_null(kvp_arena_alloc(&arena, UINT64_MAX));
  assert_null(kvp_arena_alloc(&arena, UINT64_MAX - 63));
  kvp_arena_deinit(&arena);
}

static void drop_none(void *context, struct kvp_step *step) {
  (void)context;
  (void)step;
  fail();
}

/* One queue with a thousand steps and two with one: those two get their turn after one step of the first. */
static void test_queues_take_turns(void **state) {
  (void)state;
  enum { flood = 1000 };
  static struct kvp_step steps[flood + 2];
  static struct kvp_queues queues;
  struct kvp_queue *first = NULL, *second = NULL, *third = NULL;
  assert_int_equal(kvp_queues_get(&queues, 1, &first, NULL), KVP_OK);
  assert_int_equal(kvp_queues_get(&queues, 2, &second, NULL), KVP_OK);
  assert_int_equal(kvp_queues_get(&queues, 3, &third, NULL), KVP_OK);
  for (int i = 0; i < flood + 2; i++) {
    assert_int_equal(kvp_step_cut(&steps[i], NULL), KVP_OK);
  }
  for (int i = 0; i < flood; i++) {
    kvp_queue_push(&queues, first, &steps[i]);
  }
  kvp_queue_push(&queues, second, &steps[flood]);
  kvp_queue_push(&queues, third, &steps[flood + 1]);
  assert_ptr_equal(kvp_queues_take(&queues)->step, &steps[0]);
  assert_ptr_equal(kvp_queues_take(&queues)->step, &steps[flood]);
  assert_ptr_equal(kvp_queues_take(&queues)->step, &steps[flood + 1]);
  for (int i = 1; i < flood; i++) {
    if (kvp_queues_first(&queues) == NULL) { /* as many of it are launched as may be */
      kvp_queue_done(&queues, first);
    }
    assert_ptr_equal(kvp_queues_first(&queues), first);
    assert_ptr_equal(kvp_queues_take(&queues)->step, &steps[i]);
  }
  while (first->launched_count > 1) {
    kvp_queue_done(&queues, first);
  }
  kvp_queues_close(&queues, 1); /* still busy */
  struct kvp_queue *again = NULL;
  assert_int_equal(kvp_queues_get(&queues, 1, &again, NULL), KVP_OK);
  assert_ptr_equal(again, first);
  kvp_queue_done(&queues, first); /* and gone */
  assert_null(kvp_id_table_get(&queues.table, 1));
  kvp_queue_done(&queues, second);
  kvp_queue_done(&queues, third);

  for (uint32_t id = 10; queues.table.count < kvp_queues_per_executor_max; id++) {
    assert_int_equal(kvp_queues_get(&queues, id, &again, NULL), KVP_OK);
  }
  struct kvp_error error;
  assert_int_equal(kvp_queues_get(&queues, 5000000, &again, &error), KVP_BUSY);
  kvp_queues_close(&queues, 10);
  assert_int_equal(kvp_queues_get(&queues, 5000000, &again, &error), KVP_OK);
  kvp_queues_deinit(&queues, drop_none, NULL);
}

/* A ring that is not the supervisor's carries no op of the daemon's own. */
static void test_foreign_rings(void **state) {
  (void)state;
  static uint8_t memory[64];
  struct kvp_buffer buffer = {.id = 1, .base = memory, .bytes = sizeof memory, .owner = 3};
  struct kvp_objects objects = {0};
  struct kvp_intake intake = {.objects = &objects, .completion_bytes_max = 1 << 20};
  struct kvp_step_pool pool = {0};
  assert_int_equal(kvp_objects_add_buffer(&objects, &buffer, NULL), KVP_OK);
  const struct {
    bool allows_daemon_ops;
    uint32_t owner;
    enum kvp_status status;
  } cases[] = {
      {true, 3, KVP_OK}, {false, 3, KVP_PERMISSION_DENIED}, {false, 0, KVP_PERMISSION_DENIED}, {true, 0, KVP_OK}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct step_encoder encoder;
    struct kvp_error error;
    uint32_t bytes = 0;
    step_encoder_init(&encoder, 1, cases[i].owner, 1);
    step_encoder_op(&encoder, KVP_OP_BUFFER_FILL)->source = step_view(1, 0, 1, 64, 64);
    uint8_t *encoded = step_encoder_encode(&encoder, &bytes);
    struct kvp_step *step = kvp_step_new(&pool, bytes);
    memcpy(step->wire, encoded, bytes);
    intake.allows_daemon_ops = cases[i].allows_daemon_ops;
    assert_int_equal(kvp_intake_check(&intake, step, &error), cases[i].status);

    /* An accepted step holds what it names until it is done, even when it isn't to be found any more. */
    struct kvp_buffer *removed = NULL;
    const bool is_held = cases[i].status == KVP_OK;
    if (is_held) {
      kvp_step_hold_objects(step);
    }
    assert_int_equal(kvp_objects_remove_buffer(&objects, 1, &removed, &error), KVP_OK);
    assert_ptr_equal(removed, &buffer);
    assert_int_equal(kvp_objects_remove_buffer(&objects, 1, &removed, &error), KVP_UNKNOWN_BUFFER);
    assert_int_equal(buffer.uses, is_held);
    if (is_held) {
      kvp_step_release_objects(step);
    }
    assert_int_equal(buffer.uses, 0);
    assert_int_equal(kvp_objects_add_buffer(&objects, &buffer, NULL), KVP_OK);
    kvp_step_destroy(&pool, step);
    assert_int_equal(pool.use.count, 0);
    assert_int_equal(pool.use.bytes, 0);
    free(encoded);
    step_encoder_deinit(&encoder);
  }
  kvp_id_table_deinit(&objects.buffers);
  kvp_intake_deinit(&intake);
  kvp_step_pool_deinit(&pool);
}

static void wake_nobody(void *context) {
  (void)context;
}

/* True when a child that touches the byte dies of it. */
static bool faults(volatile uint8_t *byte) {
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    (void)signal(SIGSEGV, SIG_DFL); /* a sanitizer's handler would only talk about it */
    *byte = 1;
    _exit(0);
  }
  int status = -1;
  assert_int_equal(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

/* An inaccessible mapping ends, or begins, at the address. */
static bool is_guarded(const uint8_t *address, bool ends_there) {
  FILE *maps = fopen("/proc/self/maps", "re");
  assert_non_null(maps);
  char line[512];
  bool found = false;
  while (fgets(line, sizeof line, maps) != NULL) {
    char *rest = line;
    const unsigned long begin = strtoul(rest, &rest, 16);
    const unsigned long end = strtoul(rest + 1, &rest, 16);
    if (strncmp(rest, " ---p", 5) == 0) {
      found = found || (ends_there ? end : begin) == (uintptr_t)address;
    }
  }
  assert_int_equal(fclose(maps), 0);
  return found;
}

static void test_guard_pages(void **state) {
  (void)state;
  const struct kvp_device_options options = {.thread_count = 1, .wake = wake_nobody};
  struct kvp_device *device = NULL;
  struct kvp_error error;
  assert_int_equal(kvp_device_open("host:0", &options, &device, &error), KVP_OK);
  const uint64_t sizes[] = {4096, 1 << 20, 3 << 16};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    struct kvp_memory *memory = NULL;
    int fd = -1;
    assert_int_equal(device->backend->memory_create(device, "guarded", sizes[i], &fd, &memory, &error), KVP_OK);
    assert_false(faults(memory->base));
    assert_false(faults(memory->base + sizes[i] - 1));
    assert_true(is_guarded(memory->base, true));
    assert_true(is_guarded(memory->base + sizes[i], false));
    assert_true(faults(memory->base - 1));
    assert_true(faults(memory->base + sizes[i]));
    device->backend->memory_destroy(device, memory);
    assert_int_equal(close(fd), 0);
  }
  device->backend->stop(device);
  device->backend->close(device);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_id_table),
      cmocka_unit_test(test_slot_set),
      cmocka_unit_test(test_hashes_are_no_two_times_the_same),
      cmocka_unit_test(test_arena),
      cmocka_unit_test(test_queues_take_turns),
      cmocka_unit_test(test_foreign_rings),
      cmocka_unit_test(test_guard_pages),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
