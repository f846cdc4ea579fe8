/* What a CUDA error means for us. Numbers of CUresult and cudaError_t are the same. */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_ERROR_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_ERROR_H

#include "server/executor/device_cuda.h"

enum kvp_cuda_error_class {
  KVP_CUDA_DONE,    /* none, or "not ready" */
  KVP_CUDA_REFUSED, /* there is not enough of something: the request's error, everything else goes on */
  KVP_CUDA_LOST,    /* the context, for good: the process has to end */
  KVP_CUDA_BUG,     /* of ours: what we asked for makes no sense */
};

enum kvp_cuda_error_class kvp_cuda_error_classify(int code);

/* While a device is opened: one that will be ready by itself, or that an MPS server or its other users will let go
 * of. */
bool kvp_cuda_error_is_passing(int code);

/* What is to be done about a code, not success, that came from `call`: a context that is lost is remembered as such, a
 * bug is logged. A bug after which the context does not answer either is a loss. Any thread. */
enum kvp_cuda_error_class kvp_cuda_settle(struct kvp_cuda_device *device, int code, const char *call);

/* The same, and *error: what the rest says, and for memory that is not there, how much is. */
enum kvp_status kvp_cuda_error_set(struct kvp_cuda_device *device, int code, const char *call,
                                   struct kvp_error *error, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Of a call about memory that a worker brought: unless memory is lacking, or the context has stopped answering, the worker
 * is told that what it brought is refused, whatever the code. Drivers say 201, 999 and others to handles that make no
 * sense, which from any other call mean a context that is lost. */
enum kvp_status kvp_cuda_foreign_error_set(struct kvp_cuda_device *device, int code, const char *call,
                                           struct kvp_error *error, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Nothing works from here on; the first call that finds it is kept. Any thread. */
void kvp_cuda_lose(struct kvp_cuda_device *device, int code, const char *call);
enum kvp_status kvp_cuda_lost_error(const struct kvp_cuda_device *device, struct kvp_error *error);
enum kvp_status kvp_cuda_check(struct kvp_device *device, struct kvp_error *error);

#endif
