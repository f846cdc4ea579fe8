/* Pinned pages, their device side, and counts. */
#include "server/executor/device_cuda_staging.h"

#include <stdlib.h>
#include <string.h>

#include "server/executor/device_cuda_error.h"

static const uint64_t staging_bytes = (uint64_t)kvp_cuda_page_count * kvp_cuda_page_bytes;
static const uint64_t counts_bytes =
    (uint64_t)kvp_cuda_counts_unit_count * kvp_cuda_counts_per_unit * sizeof(struct kvp_cuda_counts);

enum kvp_status kvp_cuda_staging_init(struct kvp_cuda_device *device, const char *name,
                                      struct kvp_cuda_staging *staging, struct kvp_error *error) {
  memset(staging, 0, sizeof *staging);
  staging->runs = calloc(kvp_cuda_page_count, sizeof *staging->runs);
  if (staging->runs == NULL || !kvp_page_runs_init(&staging->pages, kvp_cuda_page_count) ||
      !kvp_page_runs_init(&staging->units, kvp_cuda_counts_unit_count)) {
    kvp_cuda_staging_deinit(staging, true);
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "device '%s': no memory for the tables of staging memory", name);
  }
  const char *call = "cudaHostAlloc";
  void *host = NULL, *mapped = NULL, *memory = NULL, *counts = NULL;
  cudaError_t code = cudaHostAlloc(&host, staging_bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (code == cudaSuccess) {
    staging->host = host;
    call = "cudaHostGetDevicePointer";
    code = cudaHostGetDevicePointer(&mapped, host, 0);
    staging->host_on_device = mapped;
  }
  if (code == cudaSuccess) {
    call = "cudaMalloc";
    code = cudaMalloc(&memory, staging_bytes);
    staging->device = memory;
  }
  if (code == cudaSuccess) {
    code = cudaMalloc(&counts, counts_bytes);
    staging->counts = counts;
  }
  if (code == cudaSuccess) {
    call = "cudaMemset";
    code = cudaMemset(counts, 0, counts_bytes);
  }
  if (code == cudaSuccess) {
    call = "cudaDeviceSynchronize";
    code = cudaDeviceSynchronize();
  }
  if (code != cudaSuccess) {
    enum kvp_status status =
        kvp_cuda_error_set(device, (int)code, call, error, "device '%s': %llu bytes of staging memory", name,
                           (unsigned long long)staging_bytes);
    kvp_cuda_staging_deinit(staging, !kvp_cuda_is_lost(device));
    return status;
  }
  return KVP_OK;
}

void kvp_cuda_staging_deinit(struct kvp_cuda_staging *staging, bool frees_memory) {
  if (frees_memory) {
    (void)cudaFree(staging->counts);
    (void)cudaFree(staging->device);
    (void)cudaFreeHost(staging->host);
  }
  kvp_page_runs_deinit(&staging->pages);
  kvp_page_runs_deinit(&staging->units);
  free(staging->runs);
  memset(staging, 0, sizeof *staging);
}

struct kvp_cuda_run *kvp_cuda_run_take(struct kvp_cuda_staging *staging, const struct kvp_step_layout *layout) {
  const uint32_t page_count = (uint32_t)((layout->bytes + kvp_cuda_page_bytes - 1) / kvp_cuda_page_bytes);
  const uint32_t unit_count = layout->op_count / kvp_cuda_counts_per_unit + 1;
  const uint32_t first_page = kvp_page_runs_take(&staging->pages, page_count);
  if (first_page == KVP_NO_PAGES) {
    return NULL;
  }
  const uint32_t first_unit = kvp_page_runs_take(&staging->units, unit_count);
  if (first_unit == KVP_NO_PAGES) {
    kvp_page_runs_give(&staging->pages, first_page, page_count);
    return NULL;
  }
  struct kvp_cuda_run *run = &staging->runs[first_page];
  *run = (struct kvp_cuda_run){
      .first_page = first_page,
      .page_count = page_count,
      .first_unit = first_unit,
      .unit_count = unit_count,
      .results_offset_bytes = layout->results_offset_bytes,
      .found_offset_bytes = layout->found_offset_bytes,
      .finished_offset_bytes = layout->finished_offset_bytes,
  };
  return run;
}

void kvp_cuda_run_give(struct kvp_cuda_staging *staging, const struct kvp_cuda_run *run) {
  kvp_page_runs_give(&staging->pages, run->first_page, run->page_count);
  kvp_page_runs_give(&staging->units, run->first_unit, run->unit_count);
}
