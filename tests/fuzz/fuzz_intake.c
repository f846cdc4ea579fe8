/* libFuzzer: bytes -> a step through the executor's intake; what is accepted runs.
 *
 * The first byte: bit 0 leaves magic, version and length as they came (they are put right otherwise), bit 1 makes the
 * ring a worker's: none of the daemon's own ops, but waits and signals. The rest is the step. Regions, buffers, owner
 * table and the step itself are allocations of their exact sizes, so that a byte touched outside of them is seen.
 */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "server/executor/device_host.h"
#include "server/executor/intake.h"
#include "server/executor/step_layout.h"
#include "tests/fuzz/fuzz_world.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { keeps_header = 1, is_foreign_ring = 2 };

static struct kvp_objects objects;

/* Every array that the device would be given lies inside the step, whatever it says; nothing of a step is launched
 * twice. */
static void arrays_check(const struct kvp_step *step, const struct kvp_device_op *op) {
  struct kvp_host_array arrays[kvp_host_arrays_per_op_max];
  const uint32_t count = kvp_device_op_host_arrays(op, arrays);
  for (uint32_t i = 0; i < count; i++) {
    const uint8_t *begin = NULL;
    memcpy(&begin, (const uint8_t *)op + arrays[i].field_offset, sizeof begin);
    const bool is_cut = op->kind == KVP_DEVICE_LOAD;
    const bool is_inside = begin >= step->wire && begin + arrays[i].bytes <= step->wire + step->wire_bytes;
    assert(is_inside || is_cut);
  }
}

static void step_run(struct kvp_intake *intake, struct kvp_step *step) {
  uint32_t device_ops = 0;
  for (uint32_t i = 0; i < step->op_count; i++) {
    const struct kvp_step_op *op = &step->ops[i];
    device_ops += op->point != NULL;
    for (struct kvp_device_op *it = op->first; it != NULL; it = kvp_step_op_next(op, it), device_ops++) {
      arrays_check(step, it);
      const uint64_t units = kvp_host_op_units(it);
      for (uint64_t unit = 0; unit < units; unit++) {
        kvp_host_op_run(it, unit, &it->counts);
      }
    }
  }
  assert(device_ops == step->device_op_count);
  kvp_compressed_parts_accept(&intake->compressed, step);
  kvp_compressed_parts_finish(&intake->compressed, step);
  kvp_compressed_parts_deinit(&intake->compressed); /* one input knows nothing of another */
  uint8_t *report = malloc(kvp_step_report_bytes(step) + 1);
  assert(report != NULL);
  kvp_step_report_write(step, report);
  free(report);
}

static void refusal_check(const struct kvp_error *error, enum kvp_status status) {
  assert(error->status == (int32_t)status && error->text[0] != '\0');
  assert(memchr(error->text, '\0', sizeof error->text) != NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  static struct kvp_intake intake;
  if (intake.objects == NULL) {
    fuzz_world_build(&objects);
    intake.objects = &objects;
    intake.completion_bytes_max = 1 << 20;
  }
  if (bytes < 1 || bytes > kvp_step_bytes_max) {
    return 0;
  }
  const uint8_t flags = data[0];
  struct kvp_step step = {.wire_bytes = (uint32_t)(bytes - 1)};
  step.wire = malloc(bytes > 1 ? bytes - 1 : 1);
  assert(step.wire != NULL);
  memcpy(step.wire, data + 1, bytes - 1);
  if ((flags & keeps_header) == 0 && bytes > sizeof(struct kvp_wire_step)) {
    struct kvp_wire_step header;
    memcpy(&header, step.wire, sizeof header);
    header.magic = KVP_WIRE_STEP_MAGIC;
    header.version = KVP_WIRE_VERSION;
    header.bytes = step.wire_bytes;
    memcpy(step.wire, &header, sizeof header);
  }
  intake.allows_daemon_ops = (flags & is_foreign_ring) == 0;
  intake.allows_points = !intake.allows_daemon_ops;
  intake.allows_device_words = intake.allows_points;
  struct kvp_error error;
  enum kvp_status status = kvp_intake_check(&intake, &step, &error);
  if (status == KVP_OK) {
    kvp_step_hold_objects(&step);
    step_run(&intake, &step);
    kvp_step_release_objects(&step);
  } else {
    refusal_check(&error, status);
  }
  free(step.wire);
  kvp_arena_deinit(&step.arena);
  return 0;
}
