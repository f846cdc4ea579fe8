/* Words of a worker's timelines: mapping, poison. */
#include "server/executor/ring_timelines.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "proto/fd_socket.h"

enum { bits = 64 };

enum kvp_status kvp_ring_timelines_init(struct kvp_ring_timelines *timelines, int fd, struct kvp_device *device,
                                        struct kvp_error *error) {
  enum kvp_status status = kvp_memory_fd_check(fd, kvp_timeline_bytes, error);
  if (status != KVP_OK) {
    return status;
  }
  void *map = mmap(NULL, kvp_timeline_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "timelines of %d bytes can't be mapped: %s", kvp_timeline_bytes,
                         strerror(errno));
  }
  void *registered = NULL;
  status = device->backend->host_register(device, map, kvp_timeline_bytes, false, &registered, error);
  if (status != KVP_OK) {
    (void)munmap(map, kvp_timeline_bytes);
    return status;
  }
  *timelines = (struct kvp_ring_timelines){.device = device, .words = map, .device_words = registered};
  return KVP_OK;
}

void kvp_ring_timelines_deinit(struct kvp_ring_timelines *timelines) {
  if (timelines->words != NULL) {
    timelines->device->backend->host_unregister(timelines->device, timelines->words);
    (void)munmap(timelines->words, kvp_timeline_bytes);
    timelines->words = NULL;
  }
}

static uint32_t index_of(uint32_t word) {
  assert(word >= kvp_client_words && word < kvp_timeline_words);
  return word - kvp_client_words;
}

void kvp_ring_timelines_give_up(struct kvp_ring_timelines *timelines, uint32_t word) {
  const uint32_t index = index_of(word);
  timelines->given_up[index / bits] |= UINT64_C(1) << index % bits;
}

bool kvp_ring_timelines_is_given_up(const struct kvp_ring_timelines *timelines, uint32_t word) {
  const uint32_t index = index_of(word);
  return (timelines->given_up[index / bits] >> index % bits & 1) != 0;
}

void kvp_ring_timelines_poison(struct kvp_ring_timelines *timelines, uint32_t word) {
  kvp_ring_timelines_give_up(timelines, word);
  atomic_store_explicit(&timelines->words[word].value, KVP_TIMELINE_POISON, memory_order_release);
}

void kvp_ring_timelines_poison_all(struct kvp_ring_timelines *timelines) {
  for (uint32_t word = kvp_client_words; word < kvp_timeline_words && timelines->words != NULL; word++) {
    kvp_ring_timelines_poison(timelines, word);
  }
}
