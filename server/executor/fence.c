/* Fences, and the steps that they wait for. */
#include "server/executor/fence.h"

static struct kvp_owner_steps *steps_of(struct kvp_fences *fences, uint32_t owner) {
  return &fences->owners[owner < kvp_fence_owners ? owner : kvp_fence_owners - 1];
}

void kvp_fences_step_accepted(struct kvp_fences *fences, struct kvp_step *step) {
  struct kvp_owner_steps *steps = steps_of(fences, step->owner);
  step->serial = ++fences->accepted;
  step->older = steps->newest;
  step->newer = NULL;
  if (steps->newest != NULL) {
    steps->newest->newer = step;
  } else {
    steps->oldest = step;
  }
  steps->newest = step;
}

void kvp_fences_step_ended(struct kvp_fences *fences, struct kvp_step *step) {
  struct kvp_owner_steps *steps = steps_of(fences, step->owner);
  if (step->older != NULL) {
    step->older->newer = step->newer;
  } else {
    steps->oldest = step->newer;
  }
  if (step->newer != NULL) {
    step->newer->older = step->older;
  } else {
    steps->newest = step->older;
  }
}

void kvp_fences_add(struct kvp_fences *fences, struct kvp_step *fence) {
  fence->is_fence = true;
  fence->serial = fences->accepted;
  kvp_step_list_push(&fences->waiting, fence);
}

struct kvp_step *kvp_fences_pop(struct kvp_fences *fences) {
  struct kvp_step *before = NULL;
  for (struct kvp_step *fence = fences->waiting.first; fence != NULL; before = fence, fence = fence->next) {
    const struct kvp_step *oldest = steps_of(fences, fence->owner)->oldest;
    if (oldest == NULL || oldest->serial > fence->serial) {
      kvp_step_list_remove(&fences->waiting, before, fence);
      return fence;
    }
  }
  return NULL;
}
