/* The CUDA backend: open, describe, stop, close. */
#include <assert.h>
#include <stdlib.h>
#include <time.h>

#include "server/executor/clock.h"
#include "server/executor/device_cuda_error.h"
#include "server/executor/device_cuda_failpoint.h"
#include "server/log.h"

extern const struct kvp_device_backend kvp_device_cuda;

enum { clock_looks = 16 };

static const uint64_t stop_wait_ns = UINT64_C(5000000000);

/* First stamps of the GPU's clock. */
static cudaError_t clock_calibrate(struct kvp_cuda_device *device, const char **call) {
  uint64_t *stamp = (uint64_t *)(void *)device->staging.host;
  cudaError_t code = cudaSuccess;
  kvp_device_clock_init(&device->clock);
  for (int i = 0; i < clock_looks && code == cudaSuccess; i++) {
    *call = "kvp_cuda_empty_launch";
    code = kvp_cuda_empty_launch((uint64_t *)(void *)device->staging.host_on_device, device->control_stream);
    if (code == cudaSuccess) {
      *call = "cudaStreamSynchronize";
      code = cudaStreamSynchronize(device->control_stream);
    }
    if (code == cudaSuccess) {
      kvp_device_clock_observe(&device->clock, *stamp, kvp_clock_ns());
    }
  }
  return code;
}

static void device_free(struct kvp_cuda_device *device) {
  assert(device->ipc_allocations == NULL); /* they went with the memories */
  const bool frees_memory = kvp_cuda_frees_memory(device);
  for (uint32_t i = 0; frees_memory && i < kvp_cuda_streams_max; i++) {
    if (device->streams[i] != NULL) {
      (void)cudaStreamDestroy(device->streams[i]);
    }
  }
  if (frees_memory && device->control_stream != NULL) {
    (void)cudaStreamDestroy(device->control_stream);
  }
  if (device->staging.runs != NULL) {
    kvp_cuda_staging_deinit(&device->staging, frees_memory);
  }
  free(device);
}

/* All of them now, and each with what the driver gives a stream at its first launch: steps must not find out that there
 * is no memory for it. */
static cudaError_t streams_make(struct kvp_cuda_device *device, const char **call) {
  cudaError_t code = cudaSuccess;
  for (uint32_t i = 0; i < kvp_cuda_streams_max && code == cudaSuccess; i++) {
    *call = "cudaStreamCreateWithFlags";
    code = cudaStreamCreateWithFlags(&device->streams[i], cudaStreamNonBlocking);
    if (code != cudaSuccess) {
      device->streams[i] = NULL;
      break;
    }
    *call = "kvp_cuda_empty_launch";
    code = kvp_cuda_empty_launch(NULL, device->streams[i]);
  }
  if (code == cudaSuccess) {
    *call = "cudaDeviceSynchronize";
    code = cudaDeviceSynchronize();
  }
  return code;
}

static enum kvp_status cuda_open(const char *name, const struct kvp_device_options *options, struct kvp_device **out,
                                 struct kvp_error *error) {
  (void)options; /* a GPU has no threads of ours and wakes nobody */
  struct kvp_cuda_device *device = calloc(1, sizeof *device);
  if (device == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "device '%s': no memory for it", name);
  }
  device->base.backend = &kvp_device_cuda;
  enum kvp_status status = kvp_cuda_gpu_open(device, name, error);
  if (status != KVP_OK) {
    goto err_device;
  }
  const char *call = "cudaStreamCreateWithFlags";
  cudaError_t code = cudaStreamCreateWithFlags(&device->control_stream, cudaStreamNonBlocking);
  if (code == cudaSuccess) {
    status = kvp_cuda_staging_init(device, name, &device->staging, error);
    if (status != KVP_OK) {
      goto err_device;
    }
    code = streams_make(device, &call);
  }
  if (code == cudaSuccess) {
    code = clock_calibrate(device, &call);
  }
  if (code != cudaSuccess) {
    status = kvp_cuda_error_set(device, (int)code, call, error, "device '%s'", name);
    goto err_device;
  }
  kvp_cuda_failpoint_arm();
  *out = &device->base;
  return KVP_OK;

err_device:
  device_free(device);
  return status;
}

static void cuda_thread_begin(struct kvp_device *base) {
  struct kvp_cuda_device *device = kvp_cuda_device_of(base);
  const cudaError_t code = cudaSetDevice(device->ordinal);
  if (code != cudaSuccess) {
    kvp_cuda_lose(device, (int)code, "cudaSetDevice"); /* the context is there: this takes no memory */
  }
}

/* Launched steps get some time to end; the memory of those that don't must not be freed under them. */
static void cuda_stop(struct kvp_device *base) {
  struct kvp_cuda_device *device = kvp_cuda_device_of(base);
  const uint64_t began_ns = kvp_clock_ns();
  const struct timespec pause = {.tv_nsec = 200000};
  for (uint32_t i = 0; i < kvp_cuda_streams_max && kvp_cuda_frees_memory(device);) {
    const cudaError_t code = cudaStreamQuery(device->streams[i]);
    if (code == cudaSuccess) {
      i++;
    } else if (code != cudaErrorNotReady) {
      kvp_cuda_lose(device, (int)code, "cudaStreamQuery"); /* whatever it is: nothing waits for what follows */
    } else if (kvp_clock_ns() - began_ns > stop_wait_ns) {
      kvp_log(KVP_LOG_WARNING, "device_stuck", "text=\"launched steps did not end in %llu ms\"",
              (unsigned long long)(stop_wait_ns / 1000000));
      atomic_store(&device->is_stuck, true);
    } else {
      (void)nanosleep(&pause, NULL);
    }
  }
}

static void cuda_close(struct kvp_device *device) {
  device_free(kvp_cuda_device_of(device));
}

static void cuda_describe(const struct kvp_device *device, struct kvp_device_description *out) {
  const struct kvp_cuda_device *cuda = (const struct kvp_cuda_device *)device;
  size_t free_bytes = 0, total_bytes = 0;
  *out = cuda->description;
  out->memory_granularity_bytes = cuda->granularity_bytes;
  if (!kvp_cuda_is_lost(cuda) && cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
    out->memory_free_bytes = free_bytes;
    out->memory_bytes = total_bytes;
  }
}

const struct kvp_device_backend kvp_device_cuda = {
    .prefix = "cuda:",
    .polled = true,
    .open = cuda_open,
    .stop = cuda_stop,
    .close = cuda_close,
    .describe = cuda_describe,
    .thread_begin = cuda_thread_begin,
    .check = kvp_cuda_check,
    .memory_create = kvp_cuda_memory_create,
    .memory_import = kvp_cuda_memory_import,
    .memory_open = kvp_cuda_memory_open,
    .memory_destroy = kvp_cuda_memory_destroy,
    .host_register = kvp_cuda_host_register,
    .host_unregister = kvp_cuda_host_unregister,
    .queue_create = kvp_cuda_queue_create,
    .queue_destroy = kvp_cuda_queue_destroy,
    .launch = kvp_cuda_queue_launch,
    .collect = kvp_cuda_queue_collect,
};
