/* Fences, and the steps that they wait for. */
#include "server/executor/fence.h"

void kvp_fences_step_accepted(struct kvp_fences *fences, struct kvp_step *step) {
  step->serial = ++fences->accepted;
  step->older = fences->newest;
  step->newer = NULL;
  if (fences->newest != NULL) {
    fences->newest->newer = step;
  } else {
    fences->oldest = step;
  }
  fences->newest = step;
}

void kvp_fences_step_ended(struct kvp_fences *fences, struct kvp_step *step) {
  if (step->older != NULL) {
    step->older->newer = step->newer;
  } else {
    fences->oldest = step->newer;
  }
  if (step->newer != NULL) {
    step->newer->older = step->older;
  } else {
    fences->newest = step->older;
  }
}

void kvp_fences_add(struct kvp_fences *fences, struct kvp_step *fence) {
  fence->is_fence = true;
  fence->serial = fences->accepted;
  kvp_step_list_push(&fences->waiting, fence);
}

struct kvp_step *kvp_fences_pop(struct kvp_fences *fences) {
  const struct kvp_step *fence = fences->waiting.first;
  if (fence == NULL || (fences->oldest != NULL && fences->oldest->serial <= fence->serial)) {
    return NULL;
  }
  return kvp_step_list_pop(&fences->waiting);
}
