/* What tests can do to the CUDA in host memory of fake_cuda.c, beside its environment. */
#ifndef KVPOOL_TESTS_FAKE_CUDA_H
#define KVPOOL_TESTS_FAKE_CUDA_H

#include <stdbool.h>
#include <stdint.h>

/* Nothing that is launched begins until it is false again. */
void fake_cuda_hold(bool hold);
/* The next kernel loses the context. */
void fake_cuda_fault(void);

/* What this process has of the driver. */
struct fake_cuda_state {
  uint64_t reserved_bytes;
  uint64_t mapped_bytes; /* of chunks */
  uint32_t handles;
  uint32_t ipc_allocations;
};
void fake_cuda_look(struct fake_cuda_state *out);

#endif
