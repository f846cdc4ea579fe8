/* NVIDIA's libraries as doctor knows them, for hosts without: one source is both libcuda.so.1 and libnvidia-ml.so.1.
 * $FAKE_NVIDIA says what is wrong, as in "init=802 version=11040": numbers that replace those below; crash=1 ends the
 * process in cuInit. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static long setting(const char *name, long otherwise) {
  const char *settings = getenv("FAKE_NVIDIA");
  const char *at = settings == NULL ? NULL : strstr(settings, name);
  return at == NULL ? otherwise : strtol(at + strlen(name) + 1, NULL, 10);
}

/* ---- libcuda ----------------------------------------------------------------------------------------------------
 */

EXPORT int cuDriverGetVersion(int *version);
EXPORT int cuInit(unsigned flags);
EXPORT int cuDeviceGetCount(int *count);
EXPORT int cuGetErrorName(int error, const char **name);

int cuDriverGetVersion(int *version) {
  *version = (int)setting("version", 13000);
  return 0;
}

int cuInit(unsigned flags) {
  (void)flags;
  if (setting("crash", 0) != 0) {
    (void)raise(SIGKILL);
  }
  (void)printf("a library that talks\n");
  return (int)setting("init", 0);
}

int cuDeviceGetCount(int *count) {
  *count = 2;
  return 0;
}

int cuGetErrorName(int error, const char **name) {
  *name = error == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : "CUDA_ERROR_OF_A_TEST";
  return 0;
}

/* ---- libnvidia-ml: two GPUs -------------------------------------------------------------------------------------
 */

struct memory {
  unsigned long long total_bytes;
  unsigned long long free_bytes;
  unsigned long long used_bytes;
};

EXPORT int nvmlInit_v2(void);
EXPORT const char *nvmlErrorString(int error);
EXPORT int nvmlDeviceGetCount_v2(unsigned *count);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out);
EXPORT int nvmlDeviceGetName(const void *device, char *out, unsigned bytes);
EXPORT int nvmlDeviceGetUUID(const void *device, char *out, unsigned bytes);
EXPORT int nvmlDeviceGetMemoryInfo(const void *device, struct memory *out);
EXPORT int nvmlDeviceGetComputeMode(const void *device, int *out);
EXPORT int nvmlDeviceGetCudaComputeCapability(const void *device, int *major, int *minor);
EXPORT int nvmlDeviceGetMigMode(const void *device, unsigned *now, unsigned *later);

static char gpus[2];

int nvmlInit_v2(void) {
  return (int)setting("nvml", 0);
}

const char *nvmlErrorString(int error) {
  return error == 18 ? "Driver/library version mismatch" : "an error of a test";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = 2;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
  *out = &gpus[index];
  return 0;
}

int nvmlDeviceGetName(const void *device, char *out, unsigned bytes) {
  (void)snprintf(out, bytes, "Test GPU %c", device == &gpus[0] ? 'A' : 'B');
  return 0;
}

int nvmlDeviceGetUUID(const void *device, char *out, unsigned bytes) {
  (void)snprintf(out, bytes, "GPU-0123456%c-89ab-cdef-0123-456789abcdef", device == &gpus[0] ? '0' : '1');
  return 0;
}

int nvmlDeviceGetMemoryInfo(const void *device, struct memory *out) {
  (void)device;
  out->total_bytes = 80ULL << 30;
  out->free_bytes = (unsigned long long)setting("free", 70) << 30;
  out->used_bytes = out->total_bytes - out->free_bytes;
  return 0;
}

int nvmlDeviceGetComputeMode(const void *device, int *out) {
  *out = device == &gpus[0] ? 0 : (int)setting("mode", 0);
  return 0;
}

int nvmlDeviceGetCudaComputeCapability(const void *device, int *major, int *minor) {
  *major = device == &gpus[0] ? 9 : (int)setting("major", 9);
  *minor = 0;
  return 0;
}

int nvmlDeviceGetMigMode(const void *device, unsigned *now, unsigned *later) {
  *now = *later = device == &gpus[0] ? 0 : (unsigned)setting("mig", 0);
  return setting("mig", 0) != 0 ? 0 : 3; /* not supported */
}
