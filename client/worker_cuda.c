/* A GPU's memory in a worker: pools and buffers are mapped chunk by chunk, timelines are registered for streams.
 *
 * Each mapping, and each registered timeline, holds the GPU's primary context, so that it works alike in a process that
 * uses CUDA (PyTorch's context is the primary one) and in one that doesn't. */
#include "client/worker_cuda.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "client/worker_cuda_driver.h"

/* Numbers that the driver takes, or gives, for pointers. */
static void *pointer_of(uint64_t number) {
  void *pointer = NULL;
  memcpy(&pointer, &number, sizeof pointer);
  return pointer;
}

int kvp_cuda_ordinal(const char *uuid) {
  const struct kvp_cuda_driver *driver;
  return kvp_cuda_load(&driver, NULL) == KVPOOL_OK ? kvp_cuda_find(driver, uuid) : -1;
}

/* ---- memory -----------------------------------------------------------------------------------------------------
 */

/* What so many bytes take. */
static uint64_t device_bytes(const struct kvp_mapping *mapping, uint64_t bytes) {
  const uint64_t granularity = mapping->granularity_bytes == 0 ? 1 : mapping->granularity_bytes;
  return (bytes + granularity - 1) / granularity * granularity;
}

kvpool_status kvp_cuda_reserve(struct kvp_mapping *mapping, kvpool_error *error) {
  struct kvp_cuda_scope scope;
  void *held = NULL;
  kvpool_status status = kvp_cuda_enter(&scope, mapping->uuid, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  char what[64];
  (void)snprintf(what, sizeof what, "%llu bytes", (unsigned long long)mapping->bytes);
  uint64_t address = 0;
  int code = scope.driver->primary_retain(&held, scope.device);
  if (code != CUDA_OK) {
    status = kvp_cuda_fail(scope.driver, code, "cuDevicePrimaryCtxRetain", what, error);
  } else {
    code = scope.driver->address_reserve(&address, device_bytes(mapping, mapping->bytes), 0, 0, 0);
    if (code != CUDA_OK) {
      status = kvp_cuda_fail(scope.driver, code, "cuMemAddressReserve", what, error);
      (void)scope.driver->primary_release(scope.device);
    }
  }
  kvp_cuda_leave(&scope);
  if (status == KVPOOL_OK) {
    mapping->base = pointer_of(address);
    mapping->device = scope.device;
    mapping->ordinal = scope.ordinal;
  }
  return status;
}

static kvpool_status chunk_map(const struct kvp_cuda_scope *scope, const struct kvp_mapping *mapping, int fd,
                               uint64_t bytes, kvpool_error *error) {
  const struct kvp_cuda_driver *driver = scope->driver;
  const uint64_t address = (uintptr_t)mapping->base + mapping->mapped_bytes;
  const struct kvp_cuda_access access = {
      .location_type = CU_MEM_LOCATION_DEVICE,
      .location_id = mapping->ordinal,
      .flags = mapping->access == KVPOOL_MAP_READ_WRITE ? CU_MEM_ACCESS_READ_WRITE : CU_MEM_ACCESS_READ,
  };
  char what[96];
  (void)snprintf(what, sizeof what, "a chunk of %llu bytes at offset %llu", (unsigned long long)bytes,
                 (unsigned long long)mapping->mapped_bytes);
  uint64_t handle = 0;
  int code = driver->import_handle(&handle, pointer_of((uint64_t)fd), CU_MEM_HANDLE_POSIX_FD);
  if (code != CUDA_OK) {
    return kvp_cuda_fail(driver, code, "cuMemImportFromShareableHandle", what, error);
  }
  code = driver->map(address, bytes, 0, handle, 0);
  (void)driver->release_handle(handle); /* what is mapped keeps the memory */
  if (code != CUDA_OK) {
    return kvp_cuda_fail(driver, code, "cuMemMap", what, error);
  }
  code = driver->set_access(address, bytes, &access, 1);
  if (code != CUDA_OK) {
    (void)driver->unmap(address, bytes);
    return kvp_cuda_fail(driver, code, "cuMemSetAccess", what, error);
  }
  return KVPOOL_OK;
}

kvpool_status kvp_cuda_map_chunk(struct kvp_mapping *mapping, int fd, uint64_t bytes, kvpool_error *error) {
  struct kvp_cuda_scope scope;
  kvpool_status status = kvp_cuda_enter(&scope, mapping->uuid, error);
  if (status == KVPOOL_OK) {
    status = chunk_map(&scope, mapping, fd, device_bytes(mapping, bytes), error);
    kvp_cuda_leave(&scope);
  }
  return status;
}

void kvp_cuda_unmap(struct kvp_mapping *mapping) {
  struct kvp_cuda_scope scope;
  /* Where the GPU is gone, its memory is gone with it. */
  if (kvp_cuda_enter(&scope, mapping->uuid, NULL) != KVPOOL_OK) {
    return;
  }
  const uint64_t address = (uintptr_t)mapping->base;
  if (mapping->mapped_bytes > 0) {
    (void)scope.driver->unmap(address, device_bytes(mapping, mapping->mapped_bytes));
  }
  (void)scope.driver->address_free(address, device_bytes(mapping, mapping->bytes));
  (void)scope.driver->primary_release(mapping->device);
  kvp_cuda_leave(&scope);
}

/* ---- timelines --------------------------------------------------------------------------------------------------
 */

static kvpool_status check_on_device(const kvpool_attachment *attachment, kvpool_error *error) {
  if ((attachment->welcome.flags & KVP_ATTACH_DEVICE_FDS) == 0) {
    return kvp_fail(error, KVPOOL_WRONG_DEVICE, "%s is no GPU", attachment->welcome.device);
  }
  return KVPOOL_OK;
}

/* The words as the GPU sees them; registered when they are first asked for. words_lock is held. */
static kvpool_status timelines_register(const kvpool_attachment *attachment, struct kvp_timelines *timelines,
                                        kvpool_error *error) {
  struct kvp_cuda_scope scope;
  void *held = NULL;
  uint64_t address = 0;
  kvpool_status status = kvp_cuda_enter(&scope, attachment->welcome.uuid, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const struct kvp_cuda_driver *driver = scope.driver;
  int code = driver->primary_retain(&held, scope.device);
  if (code != CUDA_OK) {
    status = kvp_cuda_fail(driver, code, "cuDevicePrimaryCtxRetain", "timelines", error);
    goto err_leave;
  }
  code = driver->host_register(timelines->words, kvp_timeline_bytes,
                               CU_HOST_REGISTER_PORTABLE | CU_HOST_REGISTER_DEVICEMAP);
  if (code != CUDA_OK) {
    status = kvp_cuda_fail(driver, code, "cuMemHostRegister", "timelines", error);
    goto err_release;
  }
  code = driver->host_device_pointer(&address, timelines->words, 0);
  if (code != CUDA_OK) {
    status = kvp_cuda_fail(driver, code, "cuMemHostGetDevicePointer", "timelines", error);
    goto err_unregister;
  }
  timelines->device = scope.device;
  (void)snprintf(timelines->uuid, sizeof timelines->uuid, "%s", attachment->welcome.uuid);
  timelines->device_words = address;
  kvp_cuda_leave(&scope);
  return KVPOOL_OK;

err_unregister:
  (void)driver->host_unregister(timelines->words);
err_release:
  (void)driver->primary_release(scope.device);
err_leave:
  kvp_cuda_leave(&scope);
  return status;
}

void kvp_cuda_timelines_deinit(struct kvp_timelines *timelines) {
  struct kvp_cuda_scope scope;
  if (timelines->device_words == 0 || kvp_cuda_enter(&scope, timelines->uuid, NULL) != KVPOOL_OK) {
    return;
  }
  (void)scope.driver->host_unregister(timelines->words);
  (void)scope.driver->primary_release(timelines->device);
  kvp_cuda_leave(&scope);
}

kvpool_status kvpool_timeline_device_address(kvpool_attachment *attachment, uint32_t word, uint64_t *address,
                                             kvpool_error *error) {
  assert(attachment != NULL && address != NULL);
  kvpool_status status = check_on_device(attachment, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (word >= kvp_timeline_words) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "word", -1, word, "word %u, an attachment has %d", word,
                       kvp_timeline_words);
  }
  (void)pthread_mutex_lock(&attachment->words_lock);
  struct kvp_timelines *timelines = kvp_timelines_latest(attachment);
  if (timelines->device_words == 0) {
    status = timelines_register(attachment, timelines, error);
  }
  const uint64_t words = timelines->device_words;
  (void)pthread_mutex_unlock(&attachment->words_lock);
  if (status == KVPOOL_OK) {
    *address = words + (uint64_t)word * sizeof(struct kvp_timeline_word);
  }
  return status;
}

static kvpool_status check_value(uint64_t value, kvpool_error *error) {
  if (value == 0 || value >= KVP_TIMELINE_POISON) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "value", -1, (int64_t)value,
                       "value %llu of a timeline is not in (0, 2^62)", (unsigned long long)value);
  }
  return KVPOOL_OK;
}

/* A stream is of the context that is current on this thread, or says itself which one it is of: no scope here. */
kvpool_status kvpool_timeline_stream_signal(kvpool_attachment *attachment, uint32_t word, uint64_t value,
                                            void *stream, kvpool_error *error) {
  const struct kvp_cuda_driver *driver;
  uint64_t address = 0;
  kvpool_status status = check_value(value, error);
  if (status == KVPOOL_OK && word >= kvp_client_words) {
    status = kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "word", -1, word,
                         "word %u is not one of the worker's, which are 0 to %d", word, kvp_client_words - 1);
  }
  if (status == KVPOOL_OK) {
    status = kvpool_timeline_device_address(attachment, word, &address, error);
  }
  if (status == KVPOOL_OK) {
    status = kvp_cuda_load(&driver, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  const int code = driver->stream_write(stream, address, value, 0);
  return code == CUDA_OK ? KVPOOL_OK : kvp_cuda_fail(driver, code, "cuStreamWriteValue64", "a signal", error);
}

kvpool_status kvpool_timeline_stream_wait(kvpool_attachment *attachment, uint32_t word, uint64_t value, void *stream,
                                          kvpool_error *error) {
  const struct kvp_cuda_driver *driver;
  uint64_t address = 0;
  kvpool_status status = check_value(value, error);
  if (status == KVPOOL_OK) {
    status = kvpool_timeline_device_address(attachment, word, &address, error);
  }
  if (status == KVPOOL_OK) {
    status = kvp_cuda_load(&driver, error);
  }
  if (status != KVPOOL_OK) {
    return status;
  }
  const int code = driver->stream_wait(stream, address, value, CU_STREAM_WAIT_GEQ);
  return code == CUDA_OK ? KVPOOL_OK : kvp_cuda_fail(driver, code, "cuStreamWaitValue64", "a wait", error);
}
