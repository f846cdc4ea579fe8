/* Functions of the CUDA driver, looked up when a device is opened: the program also runs where there is no driver. */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_DRIVER_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_DRIVER_H

#include <cuda.h>

#include "proto/status.h"

struct kvp_cuda_driver {
  __typeof__(cuMemAddressReserve) *address_reserve;
  __typeof__(cuMemAddressFree) *address_free;
  __typeof__(cuMemCreate) *create;
  __typeof__(cuMemRelease) *release;
  __typeof__(cuMemMap) *map;
  __typeof__(cuMemUnmap) *unmap;
  __typeof__(cuMemSetAccess) *set_access;
  __typeof__(cuMemExportToShareableHandle) *export_handle;
  __typeof__(cuMemImportFromShareableHandle) *import_handle;
  __typeof__(cuMemGetAllocationPropertiesFromHandle) *properties;
  __typeof__(cuMemGetAllocationGranularity) *granularity;
  __typeof__(cuMemGetAddressRange) *address_range;
  __typeof__(cuPointerGetAttribute) *pointer_attribute;
  __typeof__(cuIpcOpenMemHandle) *ipc_open;
  __typeof__(cuIpcCloseMemHandle) *ipc_close;
  __typeof__(cuDeviceGetAttribute) *attribute;
};

enum kvp_status kvp_cuda_driver_load(struct kvp_cuda_driver *out, struct kvp_error *error);

#endif
