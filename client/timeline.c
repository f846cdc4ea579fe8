/* Timelines of an attachment on the CPU. Words are looked at by any thread; what was given out is under a lock. */
#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "client/attach.h"
#include "client/worker_cuda.h"

static const uint64_t spin_ns = 200000;
static const uint64_t short_sleeps_ns = 10000000;
static const long short_sleep_ns = 50000;
static const long long_sleep_ns = 1000000;

uint64_t kvp_now_ns(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static kvpool_status map_shared(int fd, size_t bytes, int protection, void **out, kvpool_error *error) {
  void *map = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) {
    return kvp_fail(error, KVPOOL_NO_MEMORY, "%zu bytes of the attachment's can't be mapped: %s", bytes,
                    strerror(errno));
  }
  *out = map;
  return KVPOOL_OK;
}

/* The supervisor alone can write to it, so it may be sealed in other ways than what both sides write to. */
static kvpool_status status_map(int fd, void **out, kvpool_error *error) {
  struct stat stat;
  if (fstat(fd, &stat) != 0 || (uint64_t)stat.st_size < sizeof(struct kvp_attach_status)) {
    return kvp_fail(error, KVPOOL_MALFORMED, "the attachment's status is no memory of %zu bytes",
                    sizeof(struct kvp_attach_status));
  }
  return map_shared(fd, sizeof(struct kvp_attach_status), PROT_READ, out, error);
}

kvpool_status kvp_timelines_add(kvpool_attachment *attachment, int words_fd, int status_fd, kvpool_error *error) {
  struct kvp_error refused;
  void *words, *page;
  if (kvp_memory_fd_check(words_fd, kvp_timeline_bytes, &refused) != KVP_OK) {
    return kvp_fail(error, KVPOOL_MALFORMED, "the attachment's timelines: %s", refused.text);
  }
  struct kvp_timelines *timelines = calloc(1, sizeof *timelines);
  if (timelines == NULL) {
    return kvp_fail_no_memory(error);
  }
  kvpool_status status = map_shared(words_fd, kvp_timeline_bytes, PROT_READ | PROT_WRITE, &words, error);
  if (status != KVPOOL_OK) {
    goto err_free;
  }
  status = status_map(status_fd, &page, error);
  if (status != KVPOOL_OK) {
    goto err_unmap;
  }
  timelines->words = words;
  timelines->status = page;
  timelines->older = atomic_load_explicit(&attachment->timelines, memory_order_relaxed);
  atomic_store_explicit(&attachment->timelines, timelines, memory_order_release);
  return KVPOOL_OK;

err_unmap:
  (void)munmap(words, kvp_timeline_bytes);
err_free:
  free(timelines);
  return status;
}

void kvp_timelines_deinit(kvpool_attachment *attachment) {
  struct kvp_timelines *timelines = atomic_load_explicit(&attachment->timelines, memory_order_relaxed);
  while (timelines != NULL) {
    struct kvp_timelines *older = timelines->older;
    kvp_cuda_timelines_deinit(timelines);
    (void)munmap(timelines->words, kvp_timeline_bytes);
    (void)munmap((void *)timelines->status, sizeof *timelines->status);
    free(timelines);
    timelines = older;
  }
}

void kvp_timelines_poison(struct kvp_timelines *timelines, uint32_t first_word) {
  atomic_store_explicit(&timelines->is_dead, true, memory_order_release);
  for (uint32_t i = first_word; i < kvp_timeline_words; i++) {
    atomic_store_explicit(&timelines->words[i].value, KVP_TIMELINE_POISON, memory_order_release);
  }
}

struct kvp_timelines *kvp_timelines_latest(kvpool_attachment *attachment) {
  return atomic_load_explicit(&attachment->timelines, memory_order_acquire);
}

/* What the supervisor says. */
static uint32_t timelines_state(const struct kvp_timelines *timelines) {
  /* Written by another process: the one word that is read is atomic there. */
  const _Atomic uint32_t *state = (const _Atomic uint32_t *)(const void *)&timelines->status->state;
  return atomic_load_explicit(state, memory_order_acquire);
}

bool kvp_timelines_are_served(const struct kvp_timelines *timelines) {
  return timelines_state(timelines) == KVP_ATTACH_STATE_SERVING;
}

kvpool_status kvp_timelines_check(kvpool_attachment *attachment, const struct kvp_timelines *timelines) {
  const uint32_t state = timelines_state(timelines);
  if (atomic_load(&attachment->gone) || state == KVP_ATTACH_STATE_ENDED) {
    return KVPOOL_DISCONNECTED;
  }
  const bool is_dead = atomic_load_explicit(&timelines->is_dead, memory_order_acquire);
  return is_dead || state != KVP_ATTACH_STATE_SERVING || timelines != kvp_timelines_latest(attachment)
             ? KVPOOL_DEVICE_LOST
             : KVPOOL_OK;
}

static uint64_t word_load(const struct kvp_timelines *timelines, uint32_t word) {
  return atomic_load_explicit(&timelines->words[word].value, memory_order_acquire);
}

static kvpool_status word_check(uint32_t word, kvpool_error *error) {
  if (word >= kvp_timeline_words) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "word", -1, word, "word %u, an attachment has %d", word,
                       kvp_timeline_words);
  }
  return KVPOOL_OK;
}

static kvpool_status word_check_mine(uint32_t word, kvpool_error *error) {
  if (word >= kvp_client_words) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "word", -1, word,
                       "word %u is not one of the worker's, which are 0 to %d", word, kvp_client_words - 1);
  }
  return KVPOOL_OK;
}

/* ---- giving out -------------------------------------------------------------------------------------------------
 */

kvpool_status kvpool_timeline_new(kvpool_attachment *attachment, kvpool_timeline_writer writer, uint32_t *word,
                                  uint64_t *value, kvpool_error *error) {
  assert(attachment != NULL && word != NULL);
  if (writer != KVPOOL_TIMELINE_WORKER && writer != KVPOOL_TIMELINE_EXECUTOR) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "writer", -1, (int64_t)writer,
                       "writer %d is no kvpool_timeline_writer", (int)writer);
  }
  const struct kvp_timelines *timelines = kvp_timelines_latest(attachment);
  const uint32_t first = writer == KVPOOL_TIMELINE_WORKER ? 0 : kvp_client_words;
  const uint32_t end = writer == KVPOOL_TIMELINE_WORKER ? kvp_client_words : kvp_timeline_words;
  bool is_found = false;
  (void)pthread_mutex_lock(&attachment->words_lock);
  for (uint32_t i = first; i < end && !is_found; i++) {
    const uint64_t found = word_load(timelines, i);
    is_found = attachment->word_used[i] == 0 && found < KVP_TIMELINE_POISON;
    if (is_found) {
      attachment->word_used[i] = 1;
      *word = i;
      if (value != NULL) {
        *value = found;
      }
    }
  }
  (void)pthread_mutex_unlock(&attachment->words_lock);
  const kvpool_status served = kvp_timelines_check(attachment, timelines);
  if (!is_found && served == KVPOOL_DISCONNECTED) {
    return kvp_fail(error, served, "the attachment has ended, no word of it counts up any more");
  }
  if (!is_found && served == KVPOOL_DEVICE_LOST) {
    return kvp_fail(error, served, "the executor that %s died; its successor brings new ones",
                    writer == KVPOOL_TIMELINE_WORKER ? "waited for these words" : "counted these words up");
  }
  if (!is_found) {
    return kvp_fail(error, KVPOOL_QUOTA_EXCEEDED, "all %u words of the %s are in use or poisoned", end - first,
                    writer == KVPOOL_TIMELINE_WORKER ? "worker's" : "executor's");
  }
  return KVPOOL_OK;
}

void kvpool_timeline_free(kvpool_attachment *attachment, uint32_t word) {
  assert(attachment != NULL);
  if (word_check(word, NULL) != KVPOOL_OK) {
    return;
  }
  (void)pthread_mutex_lock(&attachment->words_lock);
  attachment->word_used[word] = 0;
  (void)pthread_mutex_unlock(&attachment->words_lock);
}

/* Behind what is said of a word. */
static const char *death_text(kvpool_status served) {
  return served == KVPOOL_OK             ? ""
         : served == KVPOOL_DISCONNECTED ? ": the attachment has ended"
                                         : ": the executor that it was shared with died";
}

/* ---- signal and read --------------------------------------------------------------------------------------------
 */

kvpool_status kvpool_timeline_signal(kvpool_attachment *attachment, uint32_t word, uint64_t value,
                                     kvpool_error *error) {
  assert(attachment != NULL);
  kvpool_status status = word_check_mine(word, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (value == 0 || value >= KVP_TIMELINE_POISON) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "value", -1, (int64_t)value,
                       "value %llu of a timeline is not in (0, 2^62)", (unsigned long long)value);
  }
  struct kvp_timelines *timelines = kvp_timelines_latest(attachment);
  uint64_t now = atomic_load_explicit(&timelines->words[word].value, memory_order_relaxed);
  while (now <= value) { /* the loss of the executor may poison it in between */
    if (atomic_compare_exchange_weak_explicit(&timelines->words[word].value, &now, value, memory_order_release,
                                              memory_order_relaxed)) {
      return KVPOOL_OK;
    }
  }
  if (now < KVP_TIMELINE_POISON) {
    return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "value", -1, (int64_t)value,
                       "word %u is %llu already, and can't go down to %llu", word, (unsigned long long)now,
                       (unsigned long long)value);
  }
  status = kvp_timelines_check(attachment, timelines);
  return kvp_fail_at(error, status == KVPOOL_OK ? KVPOOL_INVALID_ARGUMENT : status, "value", -1, (int64_t)value,
                     "word %u is poisoned (0x%llx) and takes no value, %llu neither%s", word, (unsigned long long)now,
                     (unsigned long long)value, death_text(status));
}

kvpool_status kvpool_timeline_poison(kvpool_attachment *attachment, uint32_t word, kvpool_error *error) {
  assert(attachment != NULL);
  kvpool_status status = word_check_mine(word, error);
  if (status == KVPOOL_OK) {
    atomic_store_explicit(&kvp_timelines_latest(attachment)->words[word].value, KVP_TIMELINE_POISON,
                          memory_order_release);
  }
  return status;
}

/* A poisoned word of these timelines as an error. */
static kvpool_status word_poisoned(kvpool_attachment *attachment, const struct kvp_timelines *timelines,
                                   uint32_t word, kvpool_error *error) {
  const kvpool_status served = kvp_timelines_check(attachment, timelines);
  return kvp_fail_at(error, served == KVPOOL_OK ? KVPOOL_CANCELLED : served, "word", -1, word,
                     "word %u is poisoned%s", word,
                     served == KVPOOL_OK ? ": what should have counted it up has failed" : death_text(served));
}

kvpool_status kvpool_timeline_read(kvpool_attachment *attachment, uint32_t word, uint64_t *value,
                                   kvpool_error *error) {
  assert(attachment != NULL && value != NULL);
  kvpool_status status = word_check(word, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const struct kvp_timelines *timelines = kvp_timelines_latest(attachment);
  const uint64_t found = word_load(timelines, word);
  if (found >= KVP_TIMELINE_POISON) {
    return word_poisoned(attachment, timelines, word, error);
  }
  *value = found;
  return KVPOOL_OK;
}

/* ---- wait -------------------------------------------------------------------------------------------------------
 */

static void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Spins first, then sleeps a little, then longer. True: it may be time to see whether the daemon is still there. */
static bool backoff(uint64_t begin_ns, uint64_t now_ns, uint64_t deadline_ns) {
  const uint64_t waited_ns = now_ns - begin_ns;
  if (waited_ns < spin_ns) {
    pause_cpu();
    return false;
  }
  long sleep_ns = waited_ns < short_sleeps_ns ? short_sleep_ns : long_sleep_ns;
  if (deadline_ns - now_ns < (uint64_t)sleep_ns) {
    sleep_ns = (long)(deadline_ns - now_ns);
  }
  (void)nanosleep(&(struct timespec){.tv_nsec = sleep_ns}, NULL);
  return sleep_ns == long_sleep_ns;
}

/* Looks without taking anything: the messages are the attachment's thread's. */
static bool is_hung_up(const kvpool_attachment *attachment) {
  struct pollfd waited = {.fd = attachment->socket, .events = 0};
  return poll(&waited, 1, 0) == 1 && (waited.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0;
}

kvpool_status kvpool_timeline_wait(kvpool_attachment *attachment, uint32_t word, uint64_t value, uint32_t timeout_ms,
                                   kvpool_error *error) {
  assert(attachment != NULL);
  kvpool_status status = word_check(word, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const struct kvp_timelines *timelines = kvp_timelines_latest(attachment);
  const uint64_t begin_ns = kvp_now_ns();
  const uint64_t deadline_ns = begin_ns + (uint64_t)timeout_ms * 1000000;
  for (;;) {
    const uint64_t found = word_load(timelines, word);
    if (found >= KVP_TIMELINE_POISON) {
      return word_poisoned(attachment, timelines, word, error);
    }
    if (found >= value) {
      return KVPOOL_OK;
    }
    const uint64_t now_ns = kvp_now_ns();
    if (now_ns >= deadline_ns) {
      return kvp_fail_at(error, KVPOOL_DEADLINE_EXCEEDED, "word", -1, (int64_t)found,
                         "word %u is %llu, not %llu, after %u ms", word, (unsigned long long)found,
                         (unsigned long long)value, timeout_ms);
    }
    if (backoff(begin_ns, now_ns, deadline_ns) && (atomic_load(&attachment->gone) || is_hung_up(attachment))) {
      return kvp_fail(error, KVPOOL_DISCONNECTED, "the attachment has ended, word %u will not be counted up", word);
    }
  }
}
