/* Replays: what a captured graph and the executor say to each other, and the post of each launch.
 *
 * Words count up from launch to launch: base + k is point k, base goes up by `points` a launch, and the library and the
 * graph count the launches each for itself. BY_OP, the executor's word can't, since memory-operation nodes compare with
 * constants: its values are k alone, and the graph sets it back to 0 where it begins, which is behind its end's wait for
 * the last value of the launch before.
 */
#include "client/replay.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t points_max = 1 << 20;

/* ---- the end ---- */

/* What waits for a word of the graph's or for the executor's ends: memory-operation nodes would wait without an end. */
static void words_poison(kvpool_replay *replay) {
  if (replay->host_start != NULL) {
    atomic_store_explicit(replay->host_start, KVP_TIMELINE_POISON, memory_order_release);
  }
  if (replay->host_done != NULL) {
    atomic_store_explicit(replay->host_done, KVP_TIMELINE_POISON, memory_order_release);
  }
}

/* Any thread. */
static void replay_stop(kvpool_replay *replay, enum kvp_replay_problem problem) {
  uint64_t none = 0;
  (void)atomic_compare_exchange_strong(replay->problem, &none, (uint64_t)problem);
  words_poison(replay);
}

/* The first reason counts. */
static void replay_end(kvpool_replay *replay, const kvpool_error *reason) {
  if (!atomic_load_explicit(&replay->has_reason, memory_order_relaxed)) {
    replay->reason = *reason;
    atomic_store_explicit(&replay->has_reason, true, memory_order_release);
  }
  replay_stop(replay, KVP_REPLAY_ENDED);
}

void kvp_replay_step_failed(kvpool_replay *replay, uint64_t step_id, bool is_refused, const kvpool_error *why) {
  kvpool_error reason;
  (void)kvp_fail(&reason, KVPOOL_CANCELLED, "step %llu of the replay %s: %s: %s", (unsigned long long)step_id,
                 is_refused ? "was refused" : "failed", kvpool_status_name(why->status), why->text);
  reason.op = why->op;
  reason.position = why->position;
  reason.value = why->value;
  memcpy(reason.array, why->array, sizeof reason.array);
  replay_end(replay, &reason);
}

void kvp_replays_end(kvpool_attachment *attachment, const kvpool_error *why) {
  kvpool_error reason;
  if (attachment->state == KVP_ATTACHMENT_ENDED) {
    (void)kvp_fail(&reason, KVPOOL_DISCONNECTED, "the attachment has ended: %s", why->text);
  } else {
    (void)kvp_fail(&reason, KVPOOL_DEVICE_LOST, "the executor that the replay was made with has died: %s", why->text);
  }
  for (kvpool_replay *replay = attachment->replays; replay != NULL; replay = replay->next) {
    replay_end(replay, &reason);
  }
}

/* The executor that the words are shared with, also before the attachment's thread has taken its end. */
static kvpool_status served_check(kvpool_replay *replay, kvpool_error *error) {
  switch (kvp_timelines_check(replay->attachment, replay->timelines)) {
  case KVPOOL_OK:
    return KVPOOL_OK;
  case KVPOOL_DISCONNECTED:
    return kvp_fail(error, KVPOOL_DISCONNECTED, "the attachment of the replay has ended");
  default:
    return kvp_fail(error, KVPOOL_DEVICE_LOST, "the executor that the replay was made with has died");
  }
}

/* ---- new and destroy ---- */

static kvpool_status options_check(const kvpool_replay_options *options, kvpool_replay_options *out,
                                   kvpool_error *error) {
  *out = (kvpool_replay_options){.size_bytes = sizeof *out};
  if (options == NULL) {
    return KVPOOL_OK;
  }
  if (options->size_bytes < sizeof *out) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "options", -1, (int64_t)options->size_bytes,
                       "kvpool_replay_options.size_bytes is %zu, not sizeof(kvpool_replay_options) = %zu",
                       options->size_bytes, sizeof *out);
  }
  if (options->mode > KVPOOL_REPLAY_BY_OP) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "mode", -1, options->mode, "mode %d is none of a replay's",
                       (int)options->mode);
  }
  *out = *options;
  return KVPOOL_OK;
}

static kvpool_status mode_choose(const kvpool_attachment *attachment, kvpool_replay_mode wanted,
                                 kvpool_replay_mode *out, kvpool_error *error) {
  const uint32_t flags = attachment->welcome.flags;
  const bool may_wait = (flags & KVP_ATTACH_DEVICE_FDS) == 0 || (flags & KVP_ATTACH_MPS) != 0;
  if (wanted == KVPOOL_REPLAY_ONE_LAUNCH && !may_wait) {
    return kvp_fail(
        error, KVPOOL_UNIMPLEMENTED,
        "one launch a replay is for GPUs under MPS: %s is time-sliced, where a kernel that waits keeps from "
        "running what it waits for",
        attachment->welcome.device);
  }
  *out = wanted != KVPOOL_REPLAY_AUTOMATIC ? wanted : may_wait ? KVPOOL_REPLAY_ONE_LAUNCH : KVPOOL_REPLAY_BY_OP;
  return KVPOOL_OK;
}

/* The words that the mode needs. */
static kvpool_status words_new(kvpool_replay *replay, kvpool_error *error) {
  kvpool_attachment *attachment = replay->attachment;
  if (replay->mode == KVPOOL_REPLAY_ONE_LAUNCH) {
    replay->words = (struct kvp_replay_words){.start = kvp_replay_start_word, .done = kvp_replay_done_word};
    return kvpool_attachment_create_buffer(attachment, kvp_replay_buffer_bytes, &replay->buffer, error);
  }
  uint32_t start = 0, done = 0;
  kvpool_status status = kvpool_timeline_new(attachment, KVPOOL_TIMELINE_WORKER, &start, &replay->first_base, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  status = kvpool_timeline_new(attachment, KVPOOL_TIMELINE_EXECUTOR, &done, NULL, error);
  if (status != KVPOOL_OK) {
    kvpool_timeline_free(attachment, start);
    return status;
  }
  replay->words = (struct kvp_replay_words){.start = start, .done = done, .is_absolute = true};
  replay->host_start = &replay->timelines->words[start].value;
  replay->host_done = &replay->timelines->words[done].value;
  return KVPOOL_OK;
}

/* Words that once had values are not for others. */
static void words_free(kvpool_replay *replay) {
  kvpool_error ignored;
  if (replay->buffer != NULL) {
    (void)kvpool_buffer_release(replay->buffer, &ignored);
  } else if (replay->posted == 0) {
    kvpool_timeline_free(replay->attachment, replay->words.start);
    kvpool_timeline_free(replay->attachment, replay->words.done);
  }
}

static void attachment_add(kvpool_attachment *attachment, kvpool_replay *replay) {
  kvp_attachment_ref(attachment);
  replay->next = attachment->replays;
  attachment->replays = replay;
}

static void attachment_remove(kvpool_replay *replay) {
  kvpool_replay **place = &replay->attachment->replays;
  while (*place != replay) {
    place = &(*place)->next;
  }
  *place = replay->next;
  kvp_attachment_forget_replay(replay->attachment, replay);
}

kvpool_status kvpool_replay_new(kvpool_attachment *attachment, uint32_t points, const kvpool_replay_options *options,
                                kvpool_replay **out, kvpool_error *error) {
  assert(attachment != NULL && out != NULL);
  kvpool_replay_options used;
  kvpool_status status = options_check(options, &used, error);
  if (status == KVPOOL_OK && (points == 0 || points > points_max)) {
    status = kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "points", -1, points, "%u points, a replay has 1 to %u", points,
                         points_max);
  }
  if (status == KVPOOL_OK) {
    status = kvp_attachment_check(attachment, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  kvpool_replay *replay = calloc(1, sizeof *replay);
  if (replay == NULL) {
    return kvp_fail_no_memory(error);
  }
  const uint64_t asked_ns = (uint64_t)used.deadline_ms * 1000000;
  const uint64_t most_ns = attachment->welcome.deadline_ns_max;
  replay->attachment = attachment;
  replay->timelines = kvp_timelines_latest(attachment);
  replay->points = points;
  replay->deadline_ns = asked_ns == 0 || asked_ns > most_ns ? most_ns : asked_ns;
  replay->backend = (attachment->welcome.flags & KVP_ATTACH_DEVICE_FDS) != 0 ? &kvp_replay_cuda : &kvp_replay_cpu;
  status = mode_choose(attachment, used.mode, &replay->mode, error);
  if (status != KVPOOL_OK) {
    goto err_replay;
  }
  status = words_new(replay, error);
  if (status != KVPOOL_OK) {
    goto err_replay;
  }
  status = replay->backend->init(replay, error);
  if (status != KVPOOL_OK) {
    goto err_words;
  }
  status = served_check(replay, error); /* it may have died while the words were made */
  if (status != KVPOOL_OK) {
    goto err_backend;
  }
  attachment_add(attachment, replay);
  *out = replay;
  return KVPOOL_OK;

err_backend:
  replay->backend->deinit(replay);

err_words:
  words_free(replay);

err_replay:
  free(replay);
  return status;
}

void kvpool_replay_destroy(kvpool_replay *replay) {
  if (replay == NULL) {
    return;
  }
  if (atomic_load_explicit(replay->problem, memory_order_relaxed) != 0) {
    words_poison(replay); /* once more: a graph may have signalled since; no step waits any longer for another one */
  }
  attachment_remove(replay); /* before the release looks at what the daemon says */
  replay->backend->deinit(replay);
  words_free(replay);
  kvp_attachment_unref(replay->attachment);
  free(replay);
}

kvpool_replay_mode kvpool_replay_mode_get(const kvpool_replay *replay) {
  assert(replay != NULL);
  return replay->mode;
}

/* ---- steps ---- */

kvpool_status kvpool_step_set_replay_points(kvpool_step *step, uint32_t begins, uint32_t ends, kvpool_error *error) {
  assert(step != NULL);
  if (step->op_count == 0) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "the step has no op that could have points");
  }
  if (begins == 0 && ends == 0) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "an op of a replay begins at a point or ends at one");
  }
  struct kvp_wire_op *op = (struct kvp_wire_op *)(void *)step->wire_ops.data + (step->op_count - 1);
  if (begins != 0) {
    op->flags |= KVP_OP_WAITS;
    op->wait = (struct kvp_wire_point){.word = KVP_REPLAY_WORD, .value = begins};
  }
  if (ends != 0) {
    op->flags |= KVP_OP_SIGNALS;
    op->signal = (struct kvp_wire_point){.word = KVP_REPLAY_WORD, .value = ends};
  }
  step->point_count++;
  return KVPOOL_OK;
}

static kvpool_status point_check(const kvpool_replay *replay, uint32_t op, const char *name, bool is_there,
                                 const struct kvp_wire_point *point, kvpool_error *error) {
  if (is_there && point->word != KVP_REPLAY_WORD) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, name, op, point->word,
                       "op %u: its %s is word %u of a timeline, no point of a replay", op, name, point->word);
  }
  if (is_there && point->value > replay->points) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, name, op, (int64_t)point->value,
                       "op %u: its %s is point %llu, the replay has %u", op, name, (unsigned long long)point->value,
                       replay->points);
  }
  return KVPOOL_OK;
}

/* The points that an op's come behind. */
struct points_before {
  uint64_t begins, ends;
};

/* Graphs signal in order and wait in order, and a word doesn't count down. */
static kvpool_status order_check(struct points_before *before, uint32_t op, const struct kvp_wire_op *wire,
                                 kvpool_error *error) {
  if ((wire->flags & KVP_OP_WAITS) != 0) {
    if (wire->wait.value < before->begins) {
      return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "wait", op, (int64_t)wire->wait.value,
                         "op %u begins at point %llu, one before it at %llu: they don't go down", op,
                         (unsigned long long)wire->wait.value, (unsigned long long)before->begins);
    }
    before->begins = wire->wait.value;
  }
  if ((wire->flags & KVP_OP_SIGNALS) != 0) {
    if (wire->signal.value <= before->ends) {
      return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "signal", op, (int64_t)wire->signal.value,
                         "op %u ends at point %llu, one before it at %llu: they go up", op,
                         (unsigned long long)wire->signal.value, (unsigned long long)before->ends);
    }
    before->ends = wire->signal.value;
  }
  return KVPOOL_OK;
}

static kvpool_status step_check(const kvpool_replay *replay, const kvpool_step *step, kvpool_error *error) {
  const struct kvp_wire_op *ops = (const void *)step->wire_ops.data;
  struct points_before before = {0};
  if (step->op_count == 0) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "the step has no op");
  }
  if ((ops[0].flags & KVP_OP_WAITS) == 0) { /* it could end before the graph begins, which sets the word back */
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "wait", 0, 0,
                       "op 0 begins at no point of the graph's: the first op of a replay waits for one");
  }
  for (uint32_t i = 0; i < step->op_count; i++) {
    const struct kvp_wire_op *op = &ops[i];
    const bool waits = (op->flags & KVP_OP_WAITS) != 0, signals = (op->flags & KVP_OP_SIGNALS) != 0;
    if (op->kind != KVP_OP_FUSED_STORE || (!waits && !signals)) {
      return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "ops", i, op->kind,
                         "op %u of a replay is no fused_store, or has no points", i);
    }
    kvpool_status status = point_check(replay, i, "wait", waits, &op->wait, error);
    if (status == KVPOOL_OK) {
      status = point_check(replay, i, "signal", signals, &op->signal, error);
    }
    if (status == KVPOOL_OK) {
      status = order_check(&before, i, op, error);
    }
    if (status != KVPOOL_OK) {
      return status;
    }
  }
  if ((ops[step->op_count - 1].flags & KVP_OP_SIGNALS) == 0) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "the last op of a replay ends at a point");
  }
  return KVPOOL_OK;
}

kvpool_status kvpool_replay_post(kvpool_replay *replay, const kvpool_step *step, uint64_t *step_id,
                                 kvpool_error *error) {
  assert(replay != NULL && step != NULL);
  kvpool_status status = step_check(replay, step, error);
  if (status == KVPOOL_OK) {
    status = kvpool_replay_check(replay, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  uint64_t id;
  const bool is_one_launch = replay->mode == KVPOOL_REPLAY_ONE_LAUNCH;
  struct kvp_step_head head = {
      .base = replay->first_base + (replay->posted + 1) * replay->points,
      .deadline_ns = replay->deadline_ns,
      .words_buffer_id = is_one_launch ? replay->buffer->id : 0,
      .replay = &replay->words,
      .flags = KVP_STEP_NOT_ACCEPTED_TOLD | (is_one_launch ? (uint32_t)KVP_STEP_DEVICE_WORDS : 0U),
  };
  status = kvp_attachment_post_step(replay->attachment, step, &head, &id, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  replay->posted++;
  kvp_attachment_set_replay(replay->attachment, id, replay);
  if (step_id != NULL) {
    *step_id = id;
  }
  return KVPOOL_OK;
}

/* ---- streams ---- */

static kvpool_status stream_point_check(const kvpool_replay *replay, uint32_t point, kvpool_error *error) {
  assert(replay != NULL);
  if (point == 0 || point > replay->points) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "point", -1, point, "point %u, the replay has 1 to %u", point,
                       replay->points);
  }
  return KVPOOL_OK;
}

kvpool_status kvpool_replay_begin(kvpool_replay *replay, void *stream, kvpool_error *error) {
  assert(replay != NULL);
  return replay->backend->begin(replay, stream, error);
}

kvpool_status kvpool_replay_signal(kvpool_replay *replay, void *stream, uint32_t point, kvpool_error *error) {
  kvpool_status status = stream_point_check(replay, point, error);
  return status == KVPOOL_OK ? replay->backend->point(replay, stream, point, 0, error) : status;
}

kvpool_status kvpool_replay_wait(kvpool_replay *replay, void *stream, uint32_t point, kvpool_error *error) {
  kvpool_status status = stream_point_check(replay, point, error);
  return status == KVPOOL_OK ? replay->backend->point(replay, stream, 0, point, error) : status;
}

kvpool_status kvpool_replay_signal_and_wait(kvpool_replay *replay, void *stream, uint32_t point,
                                            kvpool_error *error) {
  kvpool_status status = stream_point_check(replay, point, error);
  return status == KVPOOL_OK ? replay->backend->point(replay, stream, point, point, error) : status;
}

kvpool_status kvpool_replay_end(kvpool_replay *replay, void *stream, uint32_t last_point, kvpool_error *error) {
  return kvpool_replay_wait(replay, stream, last_point, error);
}

/* ---- what went wrong ---- */

static uint32_t problem_kind(uint64_t problem) {
  return problem & ((1U << kvp_replay_problem_bits) - 1);
}

static kvpool_status problem_error(uint64_t problem, kvpool_error *error) {
  const unsigned long long point = problem >> kvp_replay_problem_bits;
  switch (problem_kind(problem)) {
  case KVP_REPLAY_LATE:
    return kvp_fail_at(error, KVPOOL_DEADLINE_EXCEEDED, "point", -1, (int64_t)point,
                       "the graph waited for point %llu until its deadline", point);
  case KVP_REPLAY_POISONED:
    return kvp_fail_at(error, KVPOOL_CANCELLED, "point", -1, (int64_t)point,
                       "the graph waited for point %llu of a step that has failed", point);
  case KVP_REPLAY_ENDED:
    return kvp_fail(error, KVPOOL_CANCELLED, "a step of the replay's has failed");
  default:
    return kvp_fail(error, KVPOOL_CANCELLED, "the replay was aborted");
  }
}

/* Finds out what nobody has told yet. */
static void replay_look(kvpool_replay *replay) {
  const bool is_poisoned = replay->host_done != NULL &&
                           atomic_load_explicit(replay->host_done, memory_order_acquire) >= KVP_TIMELINE_POISON;
  if (is_poisoned || kvp_timelines_check(replay->attachment, replay->timelines) != KVPOOL_OK) {
    replay_stop(replay, KVP_REPLAY_ENDED);
  } else if (atomic_load_explicit(replay->problem, memory_order_relaxed) != 0) {
    words_poison(replay); /* once more: a graph that was launched before may have set them back */
  }
}

kvpool_status kvpool_replay_check(kvpool_replay *replay, kvpool_error *error) {
  assert(replay != NULL);
  replay_look(replay);
  const uint64_t problem = atomic_load_explicit(replay->problem, memory_order_acquire);
  if (problem == 0) {
    return KVPOOL_OK;
  }
  if (problem_kind(problem) == KVP_REPLAY_ABORTED) {
    return problem_error(problem, error);
  }
  if (atomic_load_explicit(&replay->has_reason, memory_order_acquire)) {
    if (error != NULL) {
      *error = replay->reason;
    }
    return replay->reason.status;
  }
  kvpool_status status = served_check(replay, error);
  return status == KVPOOL_OK ? problem_error(problem, error) : status;
}

void kvpool_replay_abort(kvpool_replay *replay) {
  assert(replay != NULL);
  replay_stop(replay, KVP_REPLAY_ABORTED);
}
