/* Records completions and session events; waits for them. */
#ifndef KVPOOL_TESTS_CLIENT_RECORDER_H
#define KVPOOL_TESTS_CLIENT_RECORDER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvpool/kvpool.h"

enum { recorder_entries_max = 4096, recorder_blocks_max = 64 };

struct recorded_completion {
  uint64_t step_id;
  bool accepted;
  kvpool_error error; /* status KVPOOL_OK: done */
  size_t report_count;
  kvpool_op_report first; /* the first report */
};

struct recorded_event {
  kvpool_session_event_kind kind;
  char device[64];
  uint64_t pool_id;
  size_t block_count;
  int32_t blocks[recorder_blocks_max];
  kvpool_error error;
};

struct recorder {
  pthread_mutex_t lock;
  size_t completion_count;
  struct recorded_completion completions[recorder_entries_max];
  size_t event_count;
  struct recorded_event events[16];
};

void recorder_init(struct recorder *recorder);
/* The kvpool_completion_fn and kvpool_session_event_fn; context is the recorder. */
void recorder_on_completion(void *context, const kvpool_completion *completion);
void recorder_on_event(void *context, const kvpool_session_event *event);
/* Waits until an event of this kind has come; false when none does within a minute. */
bool recorder_wait_event(struct recorder *recorder, kvpool_session_event_kind kind, struct recorded_event *out);
/* Completions that are a step's last word. */
size_t recorder_last_words(struct recorder *recorder);

#endif
