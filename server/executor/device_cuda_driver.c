/* The driver's functions by name. */
#include "server/executor/device_cuda_driver.h"

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <string.h>

enum { driver_version = 11020 }; /* whose form of the functions is asked for; all of them are older */

enum kvp_status kvp_cuda_driver_load(struct kvp_cuda_driver *out, struct kvp_error *error) {
  const struct {
    const char *symbol;
    void *place; /* of a function pointer */
  } functions[] = {
      {"cuMemAddressReserve", &out->address_reserve},
      {"cuMemAddressFree", &out->address_free},
      {"cuMemCreate", &out->create},
      {"cuMemRelease", &out->release},
      {"cuMemMap", &out->map},
      {"cuMemUnmap", &out->unmap},
      {"cuMemSetAccess", &out->set_access},
      {"cuMemExportToShareableHandle", &out->export_handle},
      {"cuMemImportFromShareableHandle", &out->import_handle},
      {"cuMemGetAllocationPropertiesFromHandle", &out->properties},
      {"cuMemGetAllocationGranularity", &out->granularity},
      {"cuMemGetAddressRange", &out->address_range},
      {"cuPointerGetAttribute", &out->pointer_attribute},
      {"cuIpcOpenMemHandle", &out->ipc_open},
      {"cuIpcCloseMemHandle", &out->ipc_close},
      {"cuDeviceGetAttribute", &out->attribute},
  };
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t code =
        cudaGetDriverEntryPointByVersion(functions[i].symbol, &function, driver_version, cudaEnableDefault, &result);
    if (code != cudaSuccess || function == NULL || result != cudaDriverEntryPointSuccess) {
      return kvp_error_set(error, KVP_VERSION_MISMATCH, "the NVIDIA driver has no %s: %s", functions[i].symbol,
                           cudaGetErrorName(code));
    }
    memcpy(functions[i].place, &function, sizeof function);
  }
  return KVP_OK;
}
