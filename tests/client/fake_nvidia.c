/* NVIDIA's libraries as doctor knows them, for hosts without: one source is both libcuda.so.1 and libnvidia-ml.so.1.
 * $FAKE_NVIDIA says what is wrong, as in "init=802 version=11040": numbers that replace those below; crash=1 ends the
 * process in cuInit, hang=1 never ends it, nor does stuck=1 nvmlInit. $CUDA_VISIBLE_DEVICES counts as with NVIDIA's, as
 * far as it is a list of numbers. */
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static long setting(const char *name, long otherwise) {
  const char *settings = getenv("FAKE_NVIDIA");
  const char *at = settings == NULL ? NULL : strstr(settings, name);
  return at == NULL ? otherwise : strtol(at + strlen(name) + 1, NULL, 10);
}

static _Noreturn void wait_for_ever(void) {
  while (true) {
    (void)pause();
  }
}

/* ---- libcuda ----------------------------------------------------------------------------------------------------
 */

EXPORT int cuDriverGetVersion(int *version);
EXPORT int cuInit(unsigned flags);
EXPORT int cuDeviceGetCount(int *count);
EXPORT int cuDeviceGet(int *device, int index);
EXPORT int cuDeviceGetUuid(unsigned char *uuid, int device);
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
  if (setting("hang", 0) != 0) {
    wait_for_ever();
  }
  (void)printf("a library that talks\n");
  return (int)setting("init", 0);
}

/* The host's numbers of those that are shown; the first that is none of them ends the list. */
static int visible(int out[2]) {
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  int count = 0;
  for (const char *at = text == NULL ? "0,1" : text; *at == '0' || *at == '1'; at += at[1] == ',' ? 2 : 1) {
    out[count++] = *at - '0';
    if (count == 2) {
      break;
    }
  }
  return count;
}

int cuDeviceGetCount(int *count) {
  int shown[2];
  *count = (int)setting("count", visible(shown));
  return (int)setting("lost", 0);
}

int cuDeviceGet(int *device, int index) {
  int shown[2];
  if (index >= visible(shown)) {
    return 101;
  }
  *device = shown[index];
  return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device) {
  static const unsigned char bytes[16] = {0x01, 0x23, 0x45, 0x60, 0x89, 0xab, 0xcd, 0xef,
                                          0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef};
  memcpy(uuid, bytes, sizeof bytes);
  uuid[3] = (unsigned char)(uuid[3] + device);
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
  if (setting("stuck", 0) != 0) {
    wait_for_ever();
  }
  return (int)setting("nvml", 0);
}

const char *nvmlErrorString(int error) {
  return error == 18   ? "Driver/library version mismatch"
         : error == 15 ? "GPU is lost"
         : error == 4  ? "Insufficient Permissions"
                       : "an error of a test";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = 2;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
  *out = &gpus[index];
  return index == 0 ? 0 : (int)setting("handle", 0);
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
  out->total_bytes = 80ULL << 30;
  out->free_bytes = (unsigned long long)setting("free", 70) << 30;
  out->used_bytes = out->total_bytes - out->free_bytes;
  return device == &gpus[0] ? 0 : (int)setting("memory", 0);
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
