/* Memory through which a launched step's host bytes reach a GPU, and its findings come back. Serving thread.
 *
 * A step takes one run of pages, the same in pinned host memory, which kernels can read and write too, and in device
 * memory. What ops count while they run lies in device memory of its own, which is zero wherever no step has it: the
 * end of a step makes it so again.
 */
#ifndef KVPOOL_EXECUTOR_DEVICE_CUDA_STAGING_H
#define KVPOOL_EXECUTOR_DEVICE_CUDA_STAGING_H

#include "kernels/cuda/launch.h"
#include "server/executor/page_runs.h"
#include "server/executor/step_layout.h"

enum {
  kvp_cuda_page_bytes = 4 << 10,
  kvp_cuda_page_count =
      8 << 10, /* 32 MiB; the largest step takes 19: 8 as it came, 8 of cut segments, 2 of results */
  kvp_cuda_counts_per_unit = 8,
  kvp_cuda_counts_unit_count = 4 << 10,
};

/* What one launched step has. */
struct kvp_cuda_run {
  uint32_t first_page;
  uint32_t page_count;
  uint32_t first_unit;
  uint32_t unit_count;
  uint64_t results_offset_bytes;
  uint64_t found_offset_bytes;
  uint64_t finished_offset_bytes;
  uint64_t launched_ns;
  struct kvp_cuda_signal signal; /* its end */
  int failed_code;               /* cudaError_t of the launch that failed; 0: none has */
  uint32_t failed_op;            /* which one: its number among the step's */
  uint64_t free_bytes;           /* of the device, then */
  struct kvp_cuda_run *next;     /* of its queue */
};

struct kvp_cuda_staging {
  uint8_t *host;
  uint8_t *host_on_device; /* the same memory as kernels see it */
  uint8_t *device;
  struct kvp_cuda_counts *counts; /* device memory */
  struct kvp_page_runs pages;
  struct kvp_page_runs units; /* of counts */
  struct kvp_cuda_run *runs;  /* [kvp_cuda_page_count], by first page */
};

struct kvp_cuda_device;

enum kvp_status kvp_cuda_staging_init(struct kvp_cuda_device *device, const char *name,
                                      struct kvp_cuda_staging *staging, struct kvp_error *error);
/* frees_memory: false when the device is lost or still uses it. */
void kvp_cuda_staging_deinit(struct kvp_cuda_staging *staging, bool frees_memory);

/* NULL: no room now. */
struct kvp_cuda_run *kvp_cuda_run_take(struct kvp_cuda_staging *staging, const struct kvp_step_layout *layout);
void kvp_cuda_run_give(struct kvp_cuda_staging *staging, const struct kvp_cuda_run *run);

static inline uint8_t *kvp_cuda_run_host(const struct kvp_cuda_staging *staging, const struct kvp_cuda_run *run) {
  return staging->host + (uint64_t)run->first_page * kvp_cuda_page_bytes;
}

static inline uint8_t *kvp_cuda_run_host_on_device(const struct kvp_cuda_staging *staging,
                                                   const struct kvp_cuda_run *run) {
  return staging->host_on_device + (uint64_t)run->first_page * kvp_cuda_page_bytes;
}

static inline uint8_t *kvp_cuda_run_device(const struct kvp_cuda_staging *staging, const struct kvp_cuda_run *run) {
  return staging->device + (uint64_t)run->first_page * kvp_cuda_page_bytes;
}

static inline struct kvp_cuda_counts *kvp_cuda_run_counts(const struct kvp_cuda_staging *staging,
                                                          const struct kvp_cuda_run *run) {
  return staging->counts + (uint64_t)run->first_unit * kvp_cuda_counts_per_unit;
}

#endif
