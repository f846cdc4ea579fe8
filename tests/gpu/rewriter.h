/* An array of int32 that changes all the time: a thread of the CPU, or a kernel on a stream of its own, writes numbers
 * picked from a list into it while an op reads it. Test code, one thread starts and ends it.
 */
#ifndef KVPOOL_TESTS_GPU_REWRITER_H
#define KVPOOL_TESTS_GPU_REWRITER_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

enum { rewriter_choices_max = 1024 };
/* Times that a kernel writes the whole array, unless it is stopped earlier. */
enum { rewrites_many = 1000000, rewrites_few = 200 };

struct rewriter {
  int32_t *values; /* [count]: pinned host memory, or device memory */
  uint64_t count;
  int32_t choices[rewriter_choices_max]; /* the caller's, before the start */
  int32_t *device_choices;
  int32_t *stop; /* pinned */
  cudaStream_t stream;
  pthread_t thread;
  bool on_host;
};

/* The array is all -1 at first. */
void rewriter_start(struct rewriter *rewriter, uint64_t count, uint64_t rewrites, bool on_host);
void rewriter_end(struct rewriter *rewriter);

#endif
