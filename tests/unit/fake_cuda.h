/* What tests can do to the CUDA in host memory of fake_cuda.c, beside its environment. */
#ifndef KVPOOL_TESTS_FAKE_CUDA_H
#define KVPOOL_TESTS_FAKE_CUDA_H

#include <stdbool.h>

/* Nothing that is launched begins until it is false again. */
void fake_cuda_hold(bool hold);
/* The next kernel loses the context. */
void fake_cuda_fault(void);

#endif
