/* How a ring comes to be served. */
#include "server/executor/served_ring.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  supervisor_turn_commands = 16, /* of many sessions */
  worker_turn_commands = 4,
  result_bytes_max = 2 << 20,
};

static const uint64_t deadline_ns_limit = (uint64_t)kvp_wait_deadline_ms_max * 1000000;

static void lanes_set(struct kvp_served_ring *ring, struct kvp_ring *lanes, int command_event, int completion_event) {
  /* Half of the arena: a completion of the largest size always fits once the reader has caught up. */
  const uint64_t arena_half = lanes->completions.arena_bytes / 2;
  const uint64_t largest = result_bytes_max + kvp_ops_per_step_max * sizeof(struct kvp_wire_report);
  ring->ring = lanes;
  ring->command_event = command_event;
  ring->completion_event = completion_event;
  ring->completion_bytes_max = arena_half < largest ? arena_half : largest;
  ring->outbox.lane = &lanes->completions;
  ring->outbox.wake_fd = completion_event;
}

void kvp_served_ring_init(struct kvp_served_ring *ring, struct kvp_ring *lanes, int command_event,
                          int completion_event) {
  *ring = (struct kvp_served_ring){.is_supervisors = true,
                                   .turn_commands = supervisor_turn_commands,
                                   .steps_max = kvp_executor_steps_max,
                                   .step_bytes_max = kvp_executor_step_bytes_max};
  lanes_set(ring, lanes, command_event, completion_event);
}

static enum kvp_status spec_check(const struct kvp_control_ring *spec, int completion_event,
                                  struct kvp_error *error) {
  struct stat status;
  if (spec->owner == 0 || spec->owner > kvp_sessions_max) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "attachment %llu: owner %u is no session slot",
                         (unsigned long long)spec->attachment_id, spec->owner);
  }
  if (fstat(completion_event, &status) != 0 || !S_ISSOCK(status.st_mode)) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "attachment %llu: its completion event is no socket, a write to it could block",
                         (unsigned long long)spec->attachment_id);
  }
  return KVP_OK;
}

struct kvp_served_ring *kvp_served_ring_new(const struct kvp_control_ring *spec, const int *fds,
                                            struct kvp_device *device, struct kvp_error *error) {
  if (spec_check(spec, fds[KVP_CONTROL_RING_FD_COMPLETION_EVENT], error) != KVP_OK) {
    return NULL;
  }
  struct kvp_served_ring *ring = calloc(1, sizeof *ring);
  if (ring == NULL) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a ring");
    return NULL;
  }
  if (kvp_ring_init(&ring->mapped, fds[KVP_CONTROL_RING_FD_RING], KVP_RING_EXECUTOR, error) != KVP_OK) {
    goto err_ring;
  }
  if (kvp_ring_timelines_init(&ring->timelines, fds[KVP_CONTROL_RING_FD_TIMELINES], device, error) != KVP_OK) {
    goto err_mapped;
  }
  ring->attachment_id = spec->attachment_id;
  ring->owner = spec->owner;
  ring->queue = spec->queue;
  ring->deadline_ns_max = spec->deadline_ns_max == 0 || spec->deadline_ns_max > deadline_ns_limit
                              ? deadline_ns_limit
                              : spec->deadline_ns_max;
  ring->turn_commands = worker_turn_commands;
  ring->steps_max = kvp_steps_in_flight_per_session_max;
  ring->step_bytes_max = kvp_step_bytes_in_flight_per_session_max;
  ring->outbox.wakes_by_socket = true;
  lanes_set(ring, &ring->mapped, fds[KVP_CONTROL_RING_FD_COMMAND_EVENT], fds[KVP_CONTROL_RING_FD_COMPLETION_EVENT]);
  return ring;

err_mapped:
  kvp_ring_deinit(&ring->mapped);

err_ring:
  free(ring);
  return NULL;
}

static uint64_t produced_of(const struct kvp_lane_end *lane) {
  return atomic_load_explicit(kvp_lane_produced(lane), memory_order_acquire);
}

static bool mark_is_reached(const struct kvp_served_ring *ring) {
  const struct kvp_lane_end *commands = &ring->ring->commands;
  return (int64_t)(commands->position - ring->mark.position) >= 0 || produced_of(commands) == commands->position;
}

bool kvp_served_ring_has_taken(struct kvp_served_ring *ring, uint64_t number, uint64_t latest) {
  struct kvp_ring_mark *mark = &ring->mark;
  if (mark_is_reached(ring)) {
    mark->reached = mark->number;
  }
  if (mark->reached == mark->number && mark->reached < number) {
    mark->number = latest;
    mark->position = produced_of(&ring->ring->commands);
    mark->reached = mark_is_reached(ring) ? mark->number : mark->reached;
  }
  return mark->reached >= number;
}

void kvp_served_ring_destroy(struct kvp_served_ring *ring) {
  kvp_ring_timelines_deinit(&ring->timelines);
  kvp_ring_deinit(&ring->mapped);
  (void)close(ring->command_event);
  (void)close(ring->completion_event);
  free(ring);
}
