/* What the CUDA in host memory takes for an IPC handle: an allocation in a memfd of the process that hands it out. */
#ifndef KVPOOL_TESTS_FAKE_CUDA_HANDLE_H
#define KVPOOL_TESTS_FAKE_CUDA_HANDLE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

static const char fake_cuda_handle_magic[8] = "fakeipc";
enum { fake_cuda_handle_loses = 0x105E };

struct fake_cuda_handle {
  char magic[8];
  int32_t holder; /* process whose descriptor `fd` is */
  int32_t fd;
  int32_t owner; /* process that made the allocation: one that opens its own is refused */
  int32_t device;
  uint64_t block_bytes;   /* what is mapped of the descriptor: whole pages */
  uint64_t lead_bytes;    /* where the allocation begins in there */
  uint32_t loses_context; /* fake_cuda_handle_loses: who opens it loses his */
  uint8_t unused[20];
};

_Static_assert(sizeof(struct fake_cuda_handle) == 64, "the size of CUDA's");

static inline struct fake_cuda_handle fake_cuda_handle_of(int fd, uint64_t bytes, int device) {
  struct fake_cuda_handle handle;
  memset(&handle, 0, sizeof handle);
  memcpy(handle.magic, fake_cuda_handle_magic, sizeof handle.magic);
  handle.holder = (int32_t)getpid();
  handle.fd = fd;
  handle.device = device;
  handle.block_bytes = bytes;
  return handle;
}

#endif
