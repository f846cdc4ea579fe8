/* A fault on demand. The signal's handler sets a flag, the serving thread does the rest. */
#include "server/executor/device_cuda_failpoint.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "kernels/cuda/fault.h"

static atomic_bool wants_fault;

static void on_signal(int number) {
  (void)number;
  atomic_store(&wants_fault, true);
}

void kvp_cuda_failpoint_arm(void) {
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
  (void)sigaction(SIGUSR2, &action, NULL);
}

cudaError_t kvp_cuda_failpoint_pass(cudaStream_t stream) {
  return atomic_exchange(&wants_fault, false) ? kvp_cuda_fault_launch(stream) : cudaSuccess;
}
