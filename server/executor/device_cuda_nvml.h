/* What NVIDIA's management library knows and the runtime doesn't: the driver's version, who uses a GPU. It is looked
 * for at run time; everything here is best effort. Before the device is served.
 */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_NVML_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_NVML_H

#include <stddef.h>

/* "580.95.05"; "" when nobody says. */
void kvp_nvml_driver_version(char *out, size_t bytes);

/* "4711 python3, 4712 vllm": those that compute on the GPU, under MPS or not; "" when there are none or nobody says.
 * gpu: "GPU-<uuid>" or a PCI address, "0000:3B:00.0". Its number won't do: CUDA counts those it may see. */
void kvp_nvml_processes(const char *gpu, char *out, size_t bytes);

#endif
