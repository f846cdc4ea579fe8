/* See rewriter.h. */
#include "tests/gpu/rewriter.h"

#include <string.h>

#include "tests/gpu/device_rows.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/report.h"

static void *rewrite_on_host(void *context) {
  struct rewriter *rewriter = context;
  uint64_t counter = 1;
  while (__atomic_load_n(rewriter->stop, __ATOMIC_RELAXED) == 0) {
    for (uint64_t i = 0; i < rewriter->count; i++) {
      int32_t choice = rewriter->choices[mix_bits(counter++) % rewriter_choices_max];
      __atomic_store_n(&rewriter->values[i], choice, __ATOMIC_RELAXED);
    }
  }
  return NULL;
}

void rewriter_start(struct rewriter *rewriter, uint64_t count, uint64_t rewrites, bool on_host) {
  rewriter->count = count;
  rewriter->on_host = on_host;
  gpu_check(cudaHostAlloc((void **)&rewriter->stop, sizeof(*rewriter->stop), cudaHostAllocMapped));
  *rewriter->stop = 0;
  if (on_host) {
    gpu_check(cudaHostAlloc((void **)&rewriter->values, count * sizeof(int32_t), cudaHostAllocMapped));
    memset(rewriter->values, 0xFF, count * sizeof(int32_t));
    if (pthread_create(&rewriter->thread, NULL, rewrite_on_host, rewriter) != 0) {
      report_failed("no thread");
    }
    return;
  }
  gpu_check(cudaMalloc((void **)&rewriter->values, count * sizeof(int32_t)));
  gpu_check(cudaMemset(rewriter->values, 0xFF, count * sizeof(int32_t)));
  gpu_check(cudaMalloc((void **)&rewriter->device_choices, sizeof(rewriter->choices)));
  gpu_check(
      cudaMemcpy(rewriter->device_choices, rewriter->choices, sizeof(rewriter->choices), cudaMemcpyHostToDevice));
  gpu_check(cudaDeviceSynchronize());
  gpu_check(cudaStreamCreateWithFlags(&rewriter->stream, cudaStreamNonBlocking));
  device_values_rewrite(rewriter->values, count, rewriter->device_choices, rewriter_choices_max, rewrites,
                        rewriter->stop, rewriter->stream);
}

void rewriter_end(struct rewriter *rewriter) {
  __atomic_store_n(rewriter->stop, 1, __ATOMIC_RELEASE);
  if (rewriter->on_host) {
    (void)pthread_join(rewriter->thread, NULL);
    gpu_check(cudaFreeHost(rewriter->values));
  } else {
    gpu_check(cudaStreamSynchronize(rewriter->stream));
    gpu_check(cudaStreamDestroy(rewriter->stream));
    gpu_check(cudaFree(rewriter->values));
    gpu_check(cudaFree(rewriter->device_choices));
  }
  gpu_check(cudaFreeHost(rewriter->stop));
}
