/* What NVIDIA's management library knows and the runtime doesn't: the driver's version, who uses a GPU. It is looked
 * for at run time; everything here is best effort. Before the device is served.
 */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_NVML_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_NVML_H

#include <stddef.h>

#include "server/executor/device_cuda_name.h"

/* "580.95.05"; "" when nobody says. */
void kvp_nvml_driver_version(char *out, size_t bytes);

/* "4711 python3, 4712 vllm": those that compute on the GPU, under MPS or not; "" when there are none or nobody says. */
void kvp_nvml_processes(const struct kvp_cuda_name *name, char *out, size_t bytes);

#endif
