/* Classes of CUDA errors, and the one that ends the process. */
#include "server/executor/device_cuda_error.h"

#include <stdarg.h>
#include <stdio.h>

#include "server/log.h"

enum kvp_cuda_error_class kvp_cuda_error_classify(int code) {
  switch (code) {
  case cudaSuccess:
  case cudaErrorNotReady:
    return KVP_CUDA_DONE;
  case cudaErrorMemoryAllocation:
    return KVP_CUDA_REFUSED;
  case cudaErrorCudartUnloading:
  case cudaErrorPriorLaunchFailure:
  case cudaErrorDeviceUninitialized:
  case cudaErrorECCUncorrectable:
  case cudaErrorNvlinkUncorrectable:
  case cudaErrorContained:
  case cudaErrorIllegalAddress:
  case cudaErrorLaunchTimeout:
  case cudaErrorContextIsDestroyed:
  case cudaErrorAssert:
  case cudaErrorHardwareStackError:
  case cudaErrorIllegalInstruction:
  case cudaErrorMisalignedAddress:
  case cudaErrorInvalidAddressSpace:
  case cudaErrorInvalidPc:
  case cudaErrorLaunchFailure:
  case cudaErrorTensorMemoryLeak:
  case cudaErrorSystemNotReady:
  case cudaErrorMpsConnectionFailed:
  case cudaErrorMpsRpcFailure:
  case cudaErrorMpsServerNotReady:
  case cudaErrorMpsMaxClientsReached:
  case cudaErrorMpsMaxConnectionsReached:
  case cudaErrorMpsClientTerminated:
  case cudaErrorExternalDevice:
  case cudaErrorUnknown:
    return KVP_CUDA_LOST;
  default:
    return KVP_CUDA_BUG;
  }
}

bool kvp_cuda_error_is_passing(int code) {
  switch (code) {
  case cudaErrorDevicesUnavailable:
  case cudaErrorSystemNotReady:
  case cudaErrorMpsConnectionFailed:
  case cudaErrorMpsRpcFailure:
  case cudaErrorMpsServerNotReady:
  case cudaErrorMpsMaxClientsReached:
  case cudaErrorMpsMaxConnectionsReached:
  case cudaErrorMpsClientTerminated:
    return true;
  default:
    return false;
  }
}

void kvp_cuda_lose(struct kvp_cuda_device *device, int code, const char *call) {
  const char *none = NULL;
  if (atomic_compare_exchange_strong(&device->lost_call, &none, call)) {
    atomic_store_explicit(&device->lost_code, code, memory_order_release);
  }
}

/* Errors that stay are told again by the next call. */
static bool context_answers(const struct kvp_cuda_device *device) {
  (void)cudaGetLastError(); /* or this thread's next launch would find it */
  if (device->control_stream == NULL) {
    return true; /* while it is opened: nothing of ours has run yet */
  }
  const cudaError_t code = cudaStreamQuery(device->control_stream);
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
  }
  return kvp_cuda_error_classify((int)code) == KVP_CUDA_DONE;
}

enum kvp_cuda_error_class kvp_cuda_settle(struct kvp_cuda_device *device, int code, const char *call) {
  enum kvp_cuda_error_class class = kvp_cuda_error_classify(code);
  const bool answers = class != KVP_CUDA_LOST && context_answers(device);
  if (class == KVP_CUDA_BUG && atomic_exchange(&device->told_bug_code, code) != code) {
    kvp_log(KVP_LOG_ERROR, "cuda_bug", "text=\"%s: %s (%d): a bug of kvpool-exec; please report it\" context=%s",
            call, cudaGetErrorName((cudaError_t)code), code, answers ? "works" : "lost");
  }
  if (!answers) {
    kvp_cuda_lose(device, code, call);
    class = KVP_CUDA_LOST;
  }
  return class;
}

enum kvp_status kvp_cuda_lost_error(const struct kvp_cuda_device *device, struct kvp_error *error) {
  const int code = atomic_load_explicit(&device->lost_code, memory_order_acquire);
  return kvp_error_set(error, KVP_DEVICE_LOST, "the GPU's context is lost: %s: %s (%d)",
                       atomic_load(&device->lost_call), cudaGetErrorName((cudaError_t)code), code);
}

enum kvp_status kvp_cuda_error_set(struct kvp_cuda_device *device, int code, const char *call,
                                   struct kvp_error *error, const char *format, ...) {
  char what[kvp_error_text_bytes_max];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  const char *name = cudaGetErrorName((cudaError_t)code);
  size_t free_bytes = 0, total_bytes = 0;
  switch (kvp_cuda_settle(device, code, call)) {
  case KVP_CUDA_REFUSED:
    if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) { /* not even a context fits */
      (void)cudaGetLastError();
      return kvp_error_set(error, KVP_OUT_OF_MEMORY, "%s: %s: %s", what, call, name);
    }
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "%s: %s: %s; %zu of %zu bytes are free", what, call, name,
                         free_bytes, total_bytes);
  case KVP_CUDA_LOST:
    return kvp_error_set(error, KVP_DEVICE_LOST, "%s: %s: %s", what, call, name);
  default:
    return kvp_error_set(error, KVP_INTERNAL, "%s: %s: %s (%d): a bug of the daemon", what, call, name, code);
  }
}

static enum kvp_status foreign_status(int code) {
  switch (code) {
  case cudaErrorMemoryAllocation:
    return KVP_OUT_OF_MEMORY;
  case cudaErrorInvalidDevice:
  case cudaErrorPeerAccessUnsupported:
  case cudaErrorTooManyPeers:
    return KVP_WRONG_DEVICE;
  case cudaErrorNotSupported:
    return KVP_UNIMPLEMENTED;
  default:
    return KVP_INVALID_ARGUMENT;
  }
}

enum kvp_status kvp_cuda_foreign_error_set(struct kvp_cuda_device *device, int code, const char *call,
                                           struct kvp_error *error, const char *format, ...) {
  char what[kvp_error_text_bytes_max];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  enum kvp_status status = foreign_status(code);
  if (!context_answers(device)) {
    kvp_cuda_lose(device, code, call);
    status = KVP_DEVICE_LOST;
  }
  return kvp_error_set(error, status, "%s: %s: %s (%d)", what, call, cudaGetErrorName((cudaError_t)code), code);
}

enum kvp_status kvp_cuda_check(struct kvp_device *device, struct kvp_error *error) {
  struct kvp_cuda_device *cuda = kvp_cuda_device_of(device);
  if (!kvp_cuda_is_lost(cuda) && cuda->last_stream != NULL) {
    const cudaError_t code = cudaStreamQuery(cuda->last_stream);
    if (kvp_cuda_error_classify((int)code) != KVP_CUDA_DONE) {
      (void)kvp_cuda_settle(cuda, (int)code, "cudaStreamQuery");
    } else if (code == cudaErrorNotReady) {
      (void)cudaGetLastError();
    }
  }
  kvp_cuda_queues_signal(cuda);
  return kvp_cuda_is_lost(cuda) ? kvp_cuda_lost_error(cuda, error) : KVP_OK;
}
