/* A CUDA runtime, driver and kernels in host memory: behind it, the CUDA backend runs where there is no GPU. Here: the
 * device, its streams and their errors; memory is in fake_cuda_memory.c, the driver in fake_cuda_driver.c and
 * fake_cuda_ipc.c, kernels are in fake_cuda_kernels.c.
 *
 * Streams are worked off by one thread, each in order, turn by turn, so that a launch returns before it has been done.
 * Environment: FAKE_CUDA_FAULT=N makes the Nth kernel lose the context, FAKE_CUDA_BYTES is the size of the device,
 * FAKE_CUDA_ERROR=NAME:CODE,... lets functions of those names fail ("kernel": the launch of any op's kernel),
 * FAKE_CUDA_READ_ONLY=0 takes no read-only host memory, FAKE_CUDA_LAUNCHES=FILE (8 bytes) gets the number of launches of
 * ops' kernels.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/fake_cuda.h"
#include "tests/unit/fake_cuda_parts.h"

enum { sm_count = 132, device_count = 2, first_bus = 0x3B };

void fake_check(bool condition, const char *what) {
  if (!condition) {
    (void)fprintf(stderr, "fake_cuda: %s\n", what);
    abort();
  }
}

/* ---- state ---- */

struct work {
  void (*run)(void *arguments);
  struct work *next;
  _Alignas(16) uint8_t arguments[];
};

struct CUstream_st {
  struct work *first;
  struct work *last;
  bool runs; /* its first work is being done */
  struct CUstream_st *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct CUstream_st *streams;
static bool has_worker;
static bool is_held;
static uint64_t kernels_until_fault;
static atomic_int sticky;
static _Thread_local bool has_device;

cudaError_t fake_injected(const char *function) {
  const size_t length = strlen(function);
  for (const char *text = getenv("FAKE_CUDA_ERROR"); text != NULL; text = strchr(text, ',')) {
    text += text[0] == ',' ? 1 : 0;
    if (strncmp(text, function, length) == 0 && text[length] == ':') {
      return (cudaError_t)strtol(text + length + 1, NULL, 10);
    }
  }
  return (cudaError_t)atomic_load(&sticky);
}

uint64_t fake_total_bytes(void) {
  const char *text = getenv("FAKE_CUDA_BYTES");
  return text == NULL ? UINT64_C(1) << 30 : strtoull(text, NULL, 10);
}

bool fake_has_device(void) {
  return has_device;
}

bool fake_kernel_faults(void) {
  (void)pthread_mutex_lock(&lock);
  const bool faults = kernels_until_fault > 0 && --kernels_until_fault == 0;
  (void)pthread_mutex_unlock(&lock);
  if (faults) {
    fake_lose();
  }
  return faults;
}

void fake_lose(void) {
  atomic_store(&sticky, cudaErrorIllegalAddress);
}

/* ---- streams ---- */

static struct CUstream_st *stream_with_work(void) {
  struct CUstream_st *stream = streams;
  while (stream != NULL && stream->first == NULL) {
    stream = stream->next;
  }
  return stream;
}

static void *worker_main(void *argument) {
  (void)argument;
  (void)pthread_mutex_lock(&lock);
  for (;;) {
    struct CUstream_st *stream = is_held ? NULL : stream_with_work();
    if (stream == NULL) {
      (void)pthread_cond_wait(&changed, &lock);
      continue;
    }
    struct work *work = stream->first;
    stream->runs = true;
    (void)pthread_mutex_unlock(&lock);
    if (atomic_load(&sticky) == 0) {
      work->run(work->arguments);
    }
    (void)pthread_mutex_lock(&lock);
    stream->runs = false;
    stream->first = work->next;
    free(work);
    (void)pthread_cond_broadcast(&changed);
  }
  return NULL;
}

void fake_cuda_hold(bool hold) {
  (void)pthread_mutex_lock(&lock);
  is_held = hold;
  (void)pthread_cond_broadcast(&changed);
  (void)pthread_mutex_unlock(&lock);
}

void fake_cuda_fault(void) {
  (void)pthread_mutex_lock(&lock);
  kernels_until_fault = 1;
  (void)pthread_mutex_unlock(&lock);
}

cudaError_t fake_enqueue(cudaStream_t stream, void (*run)(void *arguments), const void *arguments, size_t bytes) {
  fake_check(stream != NULL, "the default stream is used");
  fake_check(has_device, "a thread without a device");
  if (atomic_load(&sticky) != 0) {
    return (cudaError_t)atomic_load(&sticky);
  }
  struct work *work = malloc(sizeof *work + bytes);
  fake_check(work != NULL, "no memory");
  work->run = run;
  work->next = NULL;
  memcpy(work->arguments, arguments, bytes);
  (void)pthread_mutex_lock(&lock);
  if (stream->first == NULL) {
    stream->first = work;
  } else {
    stream->last->next = work;
  }
  stream->last = work;
  (void)pthread_cond_broadcast(&changed);
  (void)pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags) {
  RETURN_INJECTED("cudaStreamCreateWithFlags");
  fake_check(flags == cudaStreamNonBlocking, "a blocking stream");
  struct CUstream_st *stream = calloc(1, sizeof *stream);
  fake_check(stream != NULL, "no memory");
  (void)pthread_mutex_lock(&lock);
  if (!has_worker) {
    pthread_t thread;
    const char *fault = getenv("FAKE_CUDA_FAULT");
    kernels_until_fault = fault == NULL ? 0 : strtoull(fault, NULL, 10);
    fake_check(pthread_create(&thread, NULL, worker_main, NULL) == 0, "no thread");
    (void)pthread_detach(thread);
    has_worker = true;
  }
  stream->next = streams;
  streams = stream;
  (void)pthread_mutex_unlock(&lock);
  *out = stream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  (void)pthread_mutex_lock(&lock);
  while (stream->first != NULL || stream->runs) {
    (void)pthread_cond_wait(&changed, &lock);
  }
  struct CUstream_st **link = &streams;
  while (*link != stream) {
    link = &(*link)->next;
  }
  *link = stream->next;
  (void)pthread_mutex_unlock(&lock);
  free(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  (void)pthread_mutex_lock(&lock);
  const bool is_idle = stream->first == NULL;
  (void)pthread_mutex_unlock(&lock);
  RETURN_INJECTED("cudaStreamQuery");
  return is_idle ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  (void)pthread_mutex_lock(&lock);
  while (stream->first != NULL) {
    (void)pthread_cond_wait(&changed, &lock);
  }
  (void)pthread_mutex_unlock(&lock);
  return (cudaError_t)atomic_load(&sticky);
}

/* ---- device ---- */

cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
  RETURN_INJECTED("cudaGetDeviceCount");
  const char *order = getenv("CUDA_DEVICE_ORDER");
  fake_check(order != NULL && strcmp(order, "PCI_BUS_ID") == 0, "devices are counted in no order");
  *count = device_count;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  memset(out, 0, sizeof *out);
  (void)snprintf(out->name, sizeof out->name, "Fake GPU");
  memset(out->uuid.bytes, 0xA0 + device, sizeof out->uuid.bytes);
  out->major = 9;
  out->multiProcessorCount = sm_count;
  out->memPitch = 8192; /* so that wider strides are tried */
  out->totalGlobalMem = fake_total_bytes();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  (void)device;
  const char *read_only = getenv("FAKE_CUDA_READ_ONLY");
  const char *mps = getenv("FAKE_CUDA_MPS");
  if (attribute == cudaDevAttrMpsEnabled) {
    *value = mps != NULL && mps[0] == '1';
    return cudaSuccess;
  }
  *value = attribute == cudaDevAttrHostRegisterReadOnlySupported && (read_only == NULL || read_only[0] != '0');
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  RETURN_INJECTED("cudaSetDevice");
  fake_check(device >= 0 && device < device_count, "no such device");
  has_device = true;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
  return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t code) {
  static _Thread_local char name[32];
  (void)snprintf(name, sizeof name, "fakeError%d", (int)code);
  return name;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int bytes, int device) {
  (void)snprintf(out, (size_t)bytes, "0000:%02X:00.0", (unsigned)(first_bus + device));
  return cudaSuccess;
}
