/* The CUDA driver's functions by name, and a context for those that want one. */
#include "client/worker_cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static struct kvp_cuda_driver loaded;
static kvpool_error load_problem; /* status KVPOOL_OK: loaded */
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

kvpool_status kvp_cuda_symbols_load(const struct kvp_cuda_symbol *symbols, size_t count, kvpool_error *error) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    return kvp_fail(error, KVPOOL_UNIMPLEMENTED, "memory of a GPU needs NVIDIA's driver: %s", dlerror());
  }
  for (size_t i = 0; i < count; i++) {
    void *function = dlsym(library, symbols[i].name);
    if (function == NULL) {
      return kvp_fail(error, KVPOOL_UNIMPLEMENTED, "NVIDIA's driver is too old: it has no %s", symbols[i].name);
    }
    memcpy(symbols[i].place, &function, sizeof function);
  }
  return KVPOOL_OK;
}

static void load(void) {
  const struct kvp_cuda_symbol symbols[] = {
      {"cuInit", &loaded.init},
      {"cuGetErrorName", &loaded.error_name},
      {"cuDeviceGetCount", &loaded.device_count},
      {"cuDeviceGet", &loaded.device_get},
      {"cuDeviceGetUuid_v2", &loaded.device_uuid},
      {"cuDevicePrimaryCtxRetain", &loaded.primary_retain},
      {"cuDevicePrimaryCtxRelease_v2", &loaded.primary_release},
      {"cuCtxPushCurrent_v2", &loaded.context_push},
      {"cuCtxPopCurrent_v2", &loaded.context_pop},
      {"cuMemAddressReserve", &loaded.address_reserve},
      {"cuMemAddressFree", &loaded.address_free},
      {"cuMemImportFromShareableHandle", &loaded.import_handle},
      {"cuMemExportToShareableHandle", &loaded.export_handle},
      {"cuMemRetainAllocationHandle", &loaded.retain_handle},
      {"cuMemRelease", &loaded.release_handle},
      {"cuMemMap", &loaded.map},
      {"cuMemUnmap", &loaded.unmap},
      {"cuMemSetAccess", &loaded.set_access},
      {"cuMemGetAddressRange_v2", &loaded.address_range},
      {"cuPointerGetAttribute", &loaded.pointer_attribute},
      {"cuIpcGetMemHandle", &loaded.ipc_handle},
      {"cuMemHostRegister_v2", &loaded.host_register},
      {"cuMemHostUnregister", &loaded.host_unregister},
      {"cuMemHostGetDevicePointer_v2", &loaded.host_device_pointer},
      {"cuStreamWriteValue64_v2", &loaded.stream_write},
      {"cuStreamWaitValue64_v2", &loaded.stream_wait},
  };
  if (kvp_cuda_symbols_load(symbols, sizeof symbols / sizeof symbols[0], &load_problem) != KVPOOL_OK) {
    return;
  }
  const int code = loaded.init(0);
  if (code != CUDA_OK) {
    (void)kvp_cuda_fail(&loaded, code, "cuInit", "memory of a GPU", &load_problem);
  }
}

kvpool_status kvp_cuda_load(const struct kvp_cuda_driver **out, kvpool_error *error) {
  (void)pthread_once(&load_once, load);
  if (load_problem.status != KVPOOL_OK) {
    if (error != NULL) {
      *error = load_problem;
    }
    return load_problem.status;
  }
  *out = &loaded;
  return KVPOOL_OK;
}

static kvpool_status status_of(int code) {
  enum { out_of_memory = 2, not_permitted = 800, not_supported = 801, device_unavailable = 46, exclusive = 54 };
  switch (code) {
  case out_of_memory:
    return KVPOOL_OUT_OF_MEMORY;
  case not_permitted:
    return KVPOOL_PERMISSION_DENIED;
  case not_supported:
    return KVPOOL_UNIMPLEMENTED;
  case device_unavailable:
  case exclusive:
    return KVPOOL_BUSY;
  default:
    return KVPOOL_INTERNAL;
  }
}

kvpool_status kvp_cuda_fail(const struct kvp_cuda_driver *driver, int code, const char *call, const char *what,
                            kvpool_error *error) {
  const char *name = NULL;
  if (driver->error_name(code, &name) != CUDA_OK || name == NULL) {
    name = "an unknown error";
  }
  return kvp_fail_at(error, status_of(code), "", -1, code, "%s: %s (%d), for %s", call, name, code, what);
}

static void uuid_format(const uint8_t *uuid, char *out, size_t out_bytes) {
  (void)snprintf(out, out_bytes, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", uuid[0],
                 uuid[1], uuid[2], uuid[3], uuid[4], uuid[5], uuid[6], uuid[7], uuid[8], uuid[9], uuid[10], uuid[11],
                 uuid[12], uuid[13], uuid[14], uuid[15]);
}

int kvp_cuda_find(const struct kvp_cuda_driver *driver, const char *uuid) {
  int count = 0;
  if (driver->device_count(&count) != CUDA_OK) {
    return -1;
  }
  for (int ordinal = 0; ordinal < count; ordinal++) {
    uint8_t bytes[16];
    char text[kvp_name_bytes_max];
    int device = 0;
    if (driver->device_get(&device, ordinal) == CUDA_OK && driver->device_uuid(bytes, device) == CUDA_OK) {
      uuid_format(bytes, text, sizeof text);
      if (strcmp(text, uuid) == 0) {
        return ordinal;
      }
    }
  }
  return -1;
}

kvpool_status kvp_cuda_enter(struct kvp_cuda_scope *scope, const char *uuid, kvpool_error *error) {
  kvpool_status status = kvp_cuda_load(&scope->driver, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  const struct kvp_cuda_driver *driver = scope->driver;
  scope->ordinal = kvp_cuda_find(driver, uuid);
  if (scope->ordinal < 0) {
    return kvp_fail(error, KVPOOL_WRONG_DEVICE,
                    "this process doesn't see the attachment's GPU %s: CUDA_VISIBLE_DEVICES must let it", uuid);
  }
  int code = driver->device_get(&scope->device, scope->ordinal);
  if (code != CUDA_OK) {
    return kvp_cuda_fail(driver, code, "cuDeviceGet", uuid, error);
  }
  void *context = NULL;
  code = driver->primary_retain(&context, scope->device);
  if (code != CUDA_OK) {
    return kvp_cuda_fail(driver, code, "cuDevicePrimaryCtxRetain", uuid, error);
  }
  code = driver->context_push(context);
  if (code != CUDA_OK) {
    (void)driver->primary_release(scope->device);
    return kvp_cuda_fail(driver, code, "cuCtxPushCurrent", uuid, error);
  }
  return KVPOOL_OK;
}

void kvp_cuda_leave(const struct kvp_cuda_scope *scope) {
  void *context = NULL;
  (void)scope->driver->context_pop(&context);
  (void)scope->driver->primary_release(scope->device);
}
