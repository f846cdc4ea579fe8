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

uint64_t kvp_step_fence_oldest(const struct kvp_step_fences *fences) {
  if (fences->posted_count > 0) {
    return fences->posted[0];
  }
  return fences->waiting != 0 ? fences->waiting : UINT64_MAX;
}

void kvp_step_fence_post_waiting(struct kvp_device *device) {
  struct kvp_step_fences *fences = &device->steps.fences;
  if (fences->waiting == 0 || fences->posted_count == kvp_fences_posted_max) {
    return;
  }
  /* When it can't be posted the lane is full, or the executor is dying and its `lost` is still to come. */
  if (kvp_executor_link_post(device->link, KVP_COMMAND_FENCE, fence_tag(fences->waiting), NULL, 0) == KVP_OK) {
    fences->posted[fences->posted_count++] = fences->waiting;
    fences->waiting = 0;
  }
}

uint64_t kvp_step_fence(struct kvp_daemon *daemon) {
  for (uint32_t i = 0; i < daemon->device_count; i++) {
    struct kvp_device *device = &daemon->devices[i];
    if (device->rings > 0 && device->steps.fences.waiting == 0) {
      device->steps.fences.waiting = ++daemon->step_sequence;
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
  for (uint32_t i = 0; i < fences->posted_count; i++) {
    if (fence_tag(fences->posted[i]) == record->tag && record->kind == KVP_COMPLETION_FENCED) {
      fences->posted_count--;
      memmove(&fences->posted[i], &fences->posted[i + 1], (fences->posted_count - i) * sizeof fences->posted[0]);
      device->steps.retired = true;
      return true;
    }
  }
  return false;
}

void kvp_step_fence_device_lost(struct kvp_device *device) {
  struct kvp_step_fences *fences = &device->steps.fences;
  if (fences->posted_count > 0 || fences->waiting != 0) {
    memset(fences, 0, sizeof *fences);
    device->steps.retired = true;
  }
}
