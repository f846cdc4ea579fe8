/* A worker's ring in miniature. */
#include "tests/unit/exec_ring.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

struct kvp_error exec_ring_attach(struct exec_harness *link, struct exec_ring *ring,
                                  const struct kvp_control_ring *spec) {
  static const struct kvp_ring_sizes sizes = {.commands = kvp_worker_ring_commands,
                                              .completions = kvp_worker_ring_completions,
                                              .command_arena_bytes = kvp_worker_ring_command_arena_bytes,
                                              .completion_arena_bytes = kvp_worker_ring_completion_arena_bytes};
  struct kvp_error error;
  int pair[2];
  *ring = (struct exec_ring){.attachment_id = spec->attachment_id};
  ring->ring_fd = kvp_ring_create("test-worker", &sizes, &error);
  HARNESS_CHECK(ring->ring_fd >= 0);
  HARNESS_CHECK(kvp_ring_init(&ring->ring, ring->ring_fd, KVP_RING_CLIENT, &error) == KVP_OK);
  ring->command_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  HARNESS_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
  ring->completion_event = pair[1];
  ring->timelines_fd = kvp_memory_fd_create("test-timelines", kvp_timeline_bytes, &error);
  HARNESS_CHECK(ring->timelines_fd >= 0);
  ring->words = (struct kvp_timeline_word *)(void *)exec_harness_map(ring->timelines_fd, kvp_timeline_bytes);
  const int fds[kvp_control_ring_fd_count] = {
      [KVP_CONTROL_RING_FD_RING] = ring->ring_fd,
      [KVP_CONTROL_RING_FD_COMMAND_EVENT] = ring->command_event,
      [KVP_CONTROL_RING_FD_COMPLETION_EVENT] = pair[0],
      [KVP_CONTROL_RING_FD_TIMELINES] = ring->timelines_fd,
  };
  error = exec_harness_request(link, KVP_CONTROL_RING_ATTACH, spec, sizeof *spec, fds, kvp_control_ring_fd_count);
  (void)close(pair[0]);
  return error;
}

struct kvp_error exec_ring_detach(struct exec_harness *link, const struct exec_ring *ring) {
  const struct kvp_control_ring spec = {.attachment_id = ring->attachment_id};
  return exec_harness_request(link, KVP_CONTROL_RING_DETACH, &spec, sizeof spec, NULL, 0);
}

void exec_ring_close(struct exec_ring *ring) {
  (void)munmap(ring->words, kvp_timeline_bytes);
  kvp_ring_deinit(&ring->ring);
  const int fds[] = {ring->ring_fd, ring->command_event, ring->completion_event, ring->timelines_fd};
  for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
    (void)close(fds[i]);
  }
}

bool exec_ring_post(struct exec_ring *ring, uint32_t kind, uint64_t tag, const void *payload, uint32_t bytes) {
  return exec_lane_post(&ring->ring, ring->command_event, kind, tag, payload, bytes);
}

bool exec_ring_try_take(struct exec_ring *ring, struct exec_completion *out) {
  return exec_lane_try_take(&ring->ring, out);
}

struct exec_completion exec_ring_take(struct exec_ring *ring) {
  struct exec_completion completion;
  while (!exec_ring_try_take(ring, &completion)) {
    if (kvp_lane_prepare_sleep(&ring->ring.completions)) {
      struct pollfd event = {.fd = ring->completion_event, .events = POLLIN};
      uint64_t tokens = 0;
      (void)poll(&event, 1, -1);
      (void)read(ring->completion_event, &tokens, sizeof tokens);
      kvp_lane_awake(&ring->ring.completions);
    }
  }
  return completion;
}
