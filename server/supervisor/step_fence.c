/* Fences over the steps of workers' rings. Loop thread only. */
#include "server/supervisor/step_fence.h"

#include <string.h>

#include "proto/step_wire.h"
#include "server/supervisor/daemon.h"

/* Tags of steps have a slot in their low bits (step.c), which never has this value. */
enum { tag_bits = 16, tag_mark = 0xFFFF };

static uint64_t fence_tag(uint64_t number) {
  return number << tag_bits | tag_mark;
}

uint64_t kvp_step_fence_oldest(const struct kvp_step_fences *fences, uint16_t owner) {
  if (owner > kvp_sessions_max) {
    return UINT64_MAX; /* nobody's: no ring has it */
  }
  const struct kvp_owner_fence *fence = &fences->of[owner];
  if (fence->posted != 0) {
    return fence->posted;
  }
  return fence->waiting != 0 ? fence->waiting : UINT64_MAX;
}

/* False: not now. */
static bool fence_post(struct kvp_device *device, uint16_t owner) {
  struct kvp_step_fences *fences = &device->steps.fences;
  struct kvp_owner_fence *fence = &fences->of[owner];
  const struct kvp_wire_fence wire = {.owner = owner};
  /* When it can't be posted the lane is full, or the executor is dying and its `lost` is still to come. */
  if (fences->posted_count == kvp_fences_posted_max ||
      kvp_executor_link_post(device->link, KVP_COMMAND_FENCE, fence_tag(fence->waiting), &wire, sizeof wire) !=
          KVP_OK) {
    return false;
  }
  fence->posted = fence->waiting;
  fence->waiting = 0;
  fences->posted_count++;
  fences->postable_count--;
  return true;
}

void kvp_step_fence_post_waiting(struct kvp_device *device) {
  struct kvp_step_fences *fences = &device->steps.fences;
  for (uint32_t owner = 1; owner <= kvp_sessions_max && fences->postable_count > 0; owner++) {
    const struct kvp_owner_fence *fence = &fences->of[owner];
    if (fence->waiting != 0 && fence->posted == 0 && !fence_post(device, (uint16_t)owner)) {
      return;
    }
  }
}

uint64_t kvp_step_fence(struct kvp_daemon *daemon, uint16_t owner) {
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    struct kvp_device *device = &daemon->devices[i];
    struct kvp_owner_fence *fence = &device->steps.fences.of[owner];
    if (fence->waiting == 0 && device->rings > 0 && kvp_attachment_has_ring(device, owner)) {
      fence->waiting = ++daemon->step_sequence;
      device->steps.fences.postable_count += fence->posted == 0;
    }
  }
  return daemon->step_sequence;
}

void kvp_step_fence_post(struct kvp_daemon *daemon) {
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    kvp_step_fence_post_waiting(&daemon->devices[i]);
  }
}

bool kvp_step_fence_completion(struct kvp_device *device, const struct kvp_ring_record *record) {
  struct kvp_step_fences *fences = &device->steps.fences;
  if (record->kind != KVP_COMPLETION_FENCED) {
    return false;
  }
  for (uint32_t owner = 1; owner <= kvp_sessions_max; owner++) {
    struct kvp_owner_fence *fence = &fences->of[owner];
    if (fence->posted != 0 && fence_tag(fence->posted) == record->tag) {
      fence->posted = 0;
      fences->posted_count--;
      fences->postable_count += fence->waiting != 0;
      device->steps.retired = true;
      return true;
    }
  }
  return false;
}

void kvp_step_fence_device_lost(struct kvp_device *device) {
  memset(&device->steps.fences, 0, sizeof device->steps.fences);
  device->steps.retired = true;
}
