#include "tests/client/recorder.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "tests/client/process.h"

void recorder_init(struct recorder *recorder) {
  memset(recorder, 0, sizeof *recorder);
  int failed = pthread_mutex_init(&recorder->lock, NULL);
  assert(failed == 0);
}

void recorder_on_completion(void *context, const kvpool_completion *completion) {
  struct recorder *recorder = context;
  pthread_mutex_lock(&recorder->lock);
  assert(recorder->completion_count < recorder_entries_max);
  struct recorded_completion *entry = &recorder->completions[recorder->completion_count++];
  *entry = (struct recorded_completion){
      .step_id = completion->step_id, .accepted = completion->accepted, .report_count = completion->report_count};
  if (completion->error != NULL) {
    entry->error = *completion->error;
  }
  if (completion->report_count > 0) {
    entry->first = completion->reports[0];
  }
  pthread_mutex_unlock(&recorder->lock);
}

void recorder_on_event(void *context, const kvpool_session_event *event) {
  struct recorder *recorder = context;
  pthread_mutex_lock(&recorder->lock);
  assert(recorder->event_count < sizeof recorder->events / sizeof recorder->events[0]);
  struct recorded_event *entry = &recorder->events[recorder->event_count++];
  *entry = (struct recorded_event){.kind = event->kind, .pool_id = event->pool_id, .block_count = event->block_count};
  (void)snprintf(entry->device, sizeof entry->device, "%s", event->device);
  assert(event->block_count <= recorder_blocks_max);
  if (event->block_count > 0) {
    memcpy(entry->blocks, event->blocks, event->block_count * sizeof event->blocks[0]);
  }
  if (event->error != NULL) {
    entry->error = *event->error;
  }
  pthread_mutex_unlock(&recorder->lock);
}

struct event_search {
  struct recorder *recorder;
  kvpool_session_event_kind kind;
  struct recorded_event *out;
};

static bool event_is_there(void *context) {
  struct event_search *search = context;
  bool is_there = false;
  pthread_mutex_lock(&search->recorder->lock);
  for (size_t i = 0; i < search->recorder->event_count && !is_there; i++) {
    is_there = search->recorder->events[i].kind == search->kind;
    *search->out = search->recorder->events[i];
  }
  pthread_mutex_unlock(&search->recorder->lock);
  return is_there;
}

bool recorder_wait_event(struct recorder *recorder, kvpool_session_event_kind kind, struct recorded_event *out) {
  struct event_search search = {.recorder = recorder, .kind = kind, .out = out};
  return eventually(event_is_there, &search);
}

size_t recorder_last_words(struct recorder *recorder) {
  size_t count = 0;
  pthread_mutex_lock(&recorder->lock);
  for (size_t i = 0; i < recorder->completion_count; i++) {
    count += !recorder->completions[i].accepted;
  }
  pthread_mutex_unlock(&recorder->lock);
  return count;
}
