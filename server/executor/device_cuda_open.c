/* From a name to a GPU that is ready: which one it is, whether it can be used, what it is like.
 *
 * Most of this file is about why it can't: every reason that an operator can do something about has its own words.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/executor/clock.h"
#include "server/executor/device_cuda_error.h"
#include "server/executor/device_cuda_name.h"
#include "server/executor/device_cuda_nvml.h"
#include "server/log.h"

enum { processes_bytes_max = 160, gpus_bytes_max = 200, pci_bytes_max = 32, no_ordinal = -1 };

/* Before the first call that looks for a driver; what the user has set stays. More than the 8 connections that CUDA
 * makes by itself are not asked for: 32 make a context take half a second to come up instead of a tenth. */
static void environment_set(void) {
  (void)setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0); /* no kernel is loaded while steps run */
}

static void version_format(int version, char *out, size_t bytes) {
  (void)snprintf(out, bytes, "%d.%d", version / 1000, version % 1000 / 10);
}

static enum kvp_status driver_missing(const char *name, struct kvp_error *error) {
  int driver_version = 0;
  char has[16], needs[16];
  if (cudaDriverGetVersion(&driver_version) != cudaSuccess || driver_version == 0) {
    return kvp_error_set(error, KVP_UNIMPLEMENTED, "device '%s': there is no NVIDIA driver here (no libcuda.so.1)",
                         name);
  }
  version_format(driver_version, has, sizeof has);
  version_format(CUDART_VERSION, needs, sizeof needs);
  return kvp_error_set(error, KVP_VERSION_MISMATCH,
                       "device '%s': the NVIDIA driver is too old: it knows CUDA %s, this kvpool-exec needs %s", name,
                       has, needs);
}

/* The GPU's UUID or its PCI address, the same for everybody; "" while neither is known. */
static void gpu_address(const struct kvp_cuda_device *device, const struct kvp_cuda_name *parsed,
                        char out[kvp_cuda_uuid_text_bytes]) {
  _Static_assert((int)pci_bytes_max <= (int)kvp_cuda_uuid_text_bytes, "either of them fits");
  out[0] = '\0';
  if (parsed->by_uuid) {
    kvp_cuda_uuid_format(parsed->uuid, out);
  } else if (device->ordinal != no_ordinal &&
             cudaDeviceGetPCIBusId(out, pci_bytes_max, device->ordinal) != cudaSuccess) {
    out[0] = '\0';
  }
}

/* Somebody else's fault or presence: it can be tried again soon. */
static enum kvp_status gpu_busy(const struct kvp_cuda_device *device, const char *name,
                                const struct kvp_cuda_name *parsed, int code, const char *call,
                                struct kvp_error *error) {
  char gpu[kvp_cuda_uuid_text_bytes];
  char processes[processes_bytes_max] = "";
  gpu_address(device, parsed, gpu);
  if (gpu[0] != '\0') {
    kvp_nvml_processes(gpu, processes, sizeof processes);
  }
  return kvp_error_set(error, KVP_BUSY, "device '%s': %s: %s: %s; processes on %s: %s", name, call,
                       cudaGetErrorName((cudaError_t)code),
                       code == cudaErrorDevicesUnavailable ? "others use the GPU exclusively"
                                                           : "the MPS server takes no new client at the moment",
                       gpu[0] == '\0' ? "it" : gpu, processes[0] == '\0' ? "not known" : processes);
}

static enum kvp_status open_error(struct kvp_cuda_device *device, const char *name,
                                  const struct kvp_cuda_name *parsed, int code, const char *call,
                                  struct kvp_error *error) {
  const char *code_name = cudaGetErrorName((cudaError_t)code);
  if (kvp_cuda_error_is_passing(code) && code != cudaErrorSystemNotReady) {
    return gpu_busy(device, name, parsed, code, call, error);
  }
  switch (code) {
  case cudaErrorSystemNotReady:
    return kvp_error_set(error, KVP_BUSY,
                         "device '%s': %s: %s: the GPUs of this host are not initialized yet: the fabric manager "
                         "(nvidia-fabricmanager) starts, or does not run",
                         name, call, code_name);
  case cudaErrorNotPermitted:
    return kvp_error_set(error, KVP_PERMISSION_DENIED,
                         "device '%s': %s: %s: this user or container may not use the GPU so", name, call, code_name);
  case cudaErrorInitializationError:
  case cudaErrorOperatingSystem:
    return kvp_error_set(error, KVP_UNIMPLEMENTED,
                         "device '%s': %s: %s: the NVIDIA driver does not get what it needs of this host (kernel "
                         "modules, device nodes, limits)",
                         name, call, code_name);
  case cudaErrorInsufficientDriver:
  case cudaErrorCallRequiresNewerDriver:
  case cudaErrorStubLibrary:
    return driver_missing(name, error);
  case cudaErrorSystemDriverMismatch:
  case cudaErrorCompatNotSupportedOnDevice:
    return kvp_error_set(error, KVP_VERSION_MISMATCH,
                         "device '%s': the driver's library and its kernel module don't fit each other (%s): reboot "
                         "after an update; in a container take the host's libraries",
                         name, code_name);
  case cudaErrorNoDevice:
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "device '%s': the NVIDIA driver sees no GPU (CUDA_VISIBLE_DEVICES is %s)", name,
                         getenv("CUDA_VISIBLE_DEVICES") == NULL ? "not set" : "set");
  case cudaErrorNoKernelImageForDevice:
  case cudaErrorInvalidDeviceFunction:
  case cudaErrorUnsupportedPtxVersion:
    return kvp_error_set(error, KVP_UNIMPLEMENTED, "device '%s': this kvpool-exec has no code for %s: %s", name,
                         device->description.text, code_name);
  default:
    return kvp_cuda_error_set(device, code, call, error, "device '%s'", name);
  }
}

/* "0 GPU-..., 1 GPU-...". */
static void gpus_list(int count, char *out, size_t bytes) {
  out[0] = '\0';
  for (int i = 0; i < count; i++) {
    struct cudaDeviceProp properties;
    char uuid[kvp_cuda_uuid_text_bytes];
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      continue;
    }
    kvp_cuda_uuid_format((const uint8_t *)properties.uuid.bytes, uuid);
    const size_t used = strlen(out);
    (void)snprintf(out + used, bytes - used, "%s%d %s", used == 0 ? "" : ", ", i, uuid);
  }
}

/* Sets the ordinal. */
static enum kvp_status gpu_find(struct kvp_cuda_device *device, const char *name, const struct kvp_cuda_name *parsed,
                                struct kvp_error *error) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    return open_error(device, name, parsed, (int)code, "cudaGetDeviceCount", error);
  }
  if (!parsed->by_uuid && parsed->index < (uint32_t)count) {
    device->ordinal = (int)parsed->index;
    return KVP_OK;
  }
  for (int i = 0; parsed->by_uuid && i < count && i <= kvp_cuda_device_index_max; i++) {
    struct cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) == cudaSuccess &&
        memcmp(properties.uuid.bytes, parsed->uuid, kvp_cuda_uuid_bytes) == 0) {
      device->ordinal = i;
      return KVP_OK;
    }
  }
  char gpus[gpus_bytes_max];
  gpus_list(count, gpus, sizeof gpus);
  return kvp_error_set(error, KVP_INVALID_ARGUMENT, "device '%s': there is no such GPU; visible are: %s", name, gpus);
}

/* What it is like, as far as that is known before it has a context. */
static enum kvp_status gpu_describe(struct kvp_cuda_device *device, const char *name,
                                    const struct kvp_cuda_name *parsed, struct kvp_error *error) {
  struct cudaDeviceProp properties;
  int has_mps = 0, registers_read_only = 0, driver_version = 0;
  cudaError_t code = cudaGetDeviceProperties(&properties, device->ordinal);
  if (code != cudaSuccess) {
    return open_error(device, name, parsed, (int)code, "cudaGetDeviceProperties", error);
  }
  if (cudaDeviceGetAttribute(&has_mps, cudaDevAttrMpsEnabled, device->ordinal) != cudaSuccess) {
    has_mps = 0; /* an older driver doesn't know the question */
    (void)cudaGetLastError();
  }
  if (cudaDeviceGetAttribute(&registers_read_only, cudaDevAttrHostRegisterReadOnlySupported, device->ordinal) !=
      cudaSuccess) {
    registers_read_only = 0;
    (void)cudaGetLastError();
  }
  struct kvp_device_description *description = &device->description;
  device->pitch_bytes_max = properties.memPitch;
  device->registers_read_only = registers_read_only != 0;
  /* Time-sliced, a kernel that waits holds the GPU while whoever it waits for would need it. */
  device->base.may_wait = has_mps != 0;
  description->memory_bytes = properties.totalGlobalMem;
  description->ready_flags = KVP_READY_DEVICE_FDS | (has_mps != 0 ? KVP_READY_MPS : 0U);
  (void)snprintf(description->text, sizeof description->text, "%.120s, sm_%d%d, %d SMs, %s", properties.name,
                 properties.major, properties.minor, properties.multiProcessorCount,
                 has_mps != 0 ? "under MPS" : "no MPS");
  kvp_cuda_uuid_format((const uint8_t *)properties.uuid.bytes, description->uuid);
  char driver[24], version[16];
  kvp_nvml_driver_version(driver, sizeof driver);
  (void)cudaDriverGetVersion(&driver_version);
  version_format(driver_version, version, sizeof version);
  (void)snprintf(description->driver, sizeof description->driver, "%s, CUDA %s",
                 driver[0] == '\0' ? "unknown" : driver, version);
  return KVP_OK;
}

static enum kvp_status chunks_supported(const struct kvp_cuda_device *device, const char *name,
                                        struct kvp_error *error) {
  int has_addresses = 0, has_descriptors = 0;
  (void)device->driver.attribute(&has_addresses, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                 device->ordinal);
  (void)device->driver.attribute(&has_descriptors, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                 device->ordinal);
  if (has_addresses == 0 || has_descriptors == 0) {
    return kvp_error_set(error, KVP_UNIMPLEMENTED,
                         "device '%s': %s: its memory can't be %s here, and a pool must outlive its executor", name,
                         device->description.text, has_addresses == 0 ? "mapped" : "handed over as a descriptor");
  }
  return KVP_OK;
}

enum kvp_status kvp_cuda_gpu_open(struct kvp_cuda_device *device, const char *name, struct kvp_error *error) {
  struct kvp_cuda_name parsed;
  enum kvp_status status = kvp_cuda_name_parse(name, &parsed, error);
  if (status != KVP_OK) {
    return status;
  }
  environment_set();
  device->ordinal = no_ordinal;
  const uint64_t began_ns = kvp_clock_ns();
  if ((status = gpu_find(device, name, &parsed, error)) != KVP_OK ||
      (status = gpu_describe(device, name, &parsed, error)) != KVP_OK) {
    return status;
  }
  const uint64_t found_ns = kvp_clock_ns();
  const char *call = "cudaSetDevice";
  cudaError_t code = cudaSetDevice(device->ordinal);
  if (code == cudaSuccess) {
    call = "cudaFree";
    code = cudaFree(NULL); /* the context is there after that, whatever the runtime's version */
  }
  const uint64_t context_ns = kvp_clock_ns();
  if (code == cudaSuccess) {
    call = "loading the kernels";
    code = kvp_cuda_kernels_load();
  }
  if (code != cudaSuccess) {
    return open_error(device, name, &parsed, (int)code, call, error);
  }
  kvp_log(KVP_LOG_INFO, "gpu_opened", "device=%s driver_ms=%llu context_ms=%llu kernels_ms=%llu", name,
          (unsigned long long)((found_ns - began_ns) / 1000000),
          (unsigned long long)((context_ns - found_ns) / 1000000),
          (unsigned long long)((kvp_clock_ns() - context_ns) / 1000000));
  if ((status = kvp_cuda_driver_load(&device->driver, error)) != KVP_OK ||
      (status = chunks_supported(device, name, error)) != KVP_OK) {
    return status;
  }
  return kvp_cuda_memory_granularity(device, error);
}
