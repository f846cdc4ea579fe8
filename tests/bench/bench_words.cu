/* What two kernels on one GPU need to tell each other something and hear the answer, by words in its memory: the floor of
 * an op that a graph waits for (bench_replay, bench_worker). Within one process, and between two of them, which need an
 * MPS server for that.
 *
 *   bench_words [rounds]
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static constexpr uint32_t words_apart = 64; /* a line of its own each, and more */
static constexpr uint64_t give_up_ns = 2000000000;

#define CHECK(call) check((call), #call)

static void check(cudaError_t error, const char *call) {
  if (error != cudaSuccess) {
    (void)fprintf(stderr, "bench_words: %s: %s\n", call, cudaGetErrorString(error));
    exit(1);
  }
}

static void check(CUresult error, const char *call) {
  if (error != CUDA_SUCCESS) {
    (void)fprintf(stderr, "bench_words: %s: error %d of the driver\n", call, (int)error);
    exit(1);
  }
}

/* The driver is looked up at run time, as kvpool-exec does it. */
static void *driver_function(const char *name) {
  static void *library = dlopen("libcuda.so.1", RTLD_NOW);
  void *found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) {
    (void)fprintf(stderr, "bench_words: no %s in libcuda.so.1\n", name);
    exit(1);
  }
  return found;
}
#define DRIVER(name) ((decltype(&name))driver_function(#name))

/* ---- the two kernels ---- */

enum scope { SYSTEM, DEVICE };

template <scope where> static __device__ __forceinline__ uint64_t load_acquire(const uint64_t *from) {
  uint64_t value;
  if constexpr (where == SYSTEM) {
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  } else {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  }
  return value;
}

template <scope where> static __device__ __forceinline__ void store_release(uint64_t *to, uint64_t value) {
  if constexpr (where == SYSTEM) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
  } else {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
  }
}

static __device__ __forceinline__ uint64_t timer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
  return now;
}

/* Round after round: the one that begins writes its word first. took_ns: of all rounds, 0: the other one did not answer. */
template <scope where>
static __global__ void __launch_bounds__(1)
    rounds_kernel(uint64_t *own, const uint64_t *others, uint64_t first, uint64_t count, bool begins,
                  uint32_t pause_ns, uint64_t *took_ns) {
  uint64_t start = timer_ns(), met = 0;
  for (uint64_t round = first; round < first + count; round++) {
    if (begins) {
      store_release<where>(own, round);
    }
    while (load_acquire<where>(others) < round) {
      if (timer_ns() - start > give_up_ns) {
        *took_ns = 0;
        return;
      }
      if (pause_ns > 0) {
        __nanosleep(pause_ns);
      }
    }
    if (!begins) {
      store_release<where>(own, round);
    }
    met = round == first ? timer_ns() : met; /* the other one has started too */
  }
  *took_ns = timer_ns() - met;
}

static void rounds_launch(scope where, uint64_t *own, const uint64_t *others, uint64_t first, uint64_t count,
                          bool begins, uint32_t pause_ns, uint64_t *took_ns, cudaStream_t stream) {
  if (where == SYSTEM) {
    rounds_kernel<SYSTEM><<<1, 1, 0, stream>>>(own, others, first, count, begins, pause_ns, took_ns);
  } else {
    rounds_kernel<DEVICE><<<1, 1, 0, stream>>>(own, others, first, count, begins, pause_ns, took_ns);
  }
  CHECK(cudaGetLastError());
}

/* ---- memory ---- */

static CUmemAllocationProp properties(bool is_shared) {
  CUmemAllocationProp made = {};
  made.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  made.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  made.requestedHandleTypes = is_shared ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  return made;
}

static uint64_t *handle_map(CUmemGenericAllocationHandle handle, size_t bytes) {
  CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUdeviceptr address = 0;
  CHECK(DRIVER(cuMemAddressReserve)(&address, bytes, 0, 0, 0));
  CHECK(DRIVER(cuMemMap)(address, bytes, 0, handle, 0));
  CHECK(DRIVER(cuMemSetAccess)(address, bytes, &access, 1));
  CHECK(cudaMemset((void *)address, 0, bytes));
  return (uint64_t *)address;
}

static size_t granularity() {
  CUmemAllocationProp wanted = properties(true);
  size_t bytes = 0;
  CHECK(DRIVER(cuMemGetAllocationGranularity)(&bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  return bytes;
}

static CUmemGenericAllocationHandle handle_make(bool is_shared) {
  CUmemAllocationProp wanted = properties(is_shared);
  CUmemGenericAllocationHandle handle;
  CHECK(DRIVER(cuMemCreate)(&handle, granularity(), &wanted, 0));
  return handle;
}

/* ---- one process ---- */

static void told(const char *how, scope where, uint32_t pause_ns, uint64_t took_ns, uint64_t rounds) {
  if (took_ns == 0) {
    printf("%-46s %-7s pause %2u ns  the other kernel did not answer\n", how, where == SYSTEM ? "system" : "device",
           pause_ns);
  } else {
    printf("%-46s %-7s pause %2u ns  %.2f us a round\n", how, where == SYSTEM ? "system" : "device", pause_ns,
           1e-3 * (double)took_ns / (double)(rounds - 1));
  }
}

static void one_process(const char *how, uint64_t *words, uint64_t rounds) {
  cudaStream_t here, there;
  uint64_t *took;
  uint64_t first = 1;
  CHECK(cudaStreamCreateWithFlags(&here, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&there, cudaStreamNonBlocking));
  CHECK(cudaHostAlloc((void **)&took, 2 * sizeof *took, cudaHostAllocMapped));
  for (scope where : {SYSTEM, DEVICE}) {
    for (uint32_t pause_ns : {0U, 32U}) {
      rounds_launch(where, words, words + words_apart, first, rounds, true, pause_ns, &took[0], here);
      rounds_launch(where, words + words_apart, words, first, rounds, false, pause_ns, &took[1], there);
      CHECK(cudaDeviceSynchronize());
      told(how, where, pause_ns, took[0], rounds);
      first += rounds;
    }
  }
  CHECK(cudaFreeHost(took));
}

/* ---- two processes ---- */

/* A message of one byte, with room for a descriptor. */
struct packet {
  char byte = 0;
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};

  packet() {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
};

static void fd_send(int socket, int fd) {
  packet sent;
  cmsghdr *header = CMSG_FIRSTHDR(&sent.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (sendmsg(socket, &sent.message, 0) != 1) {
    exit(1);
  }
}

static int fd_receive(int socket) {
  packet received;
  int fd;
  if (recvmsg(socket, &received.message, 0) != 1 || CMSG_FIRSTHDR(&received.message) == nullptr) {
    exit(1);
  }
  memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&received.message)), sizeof fd);
  return fd;
}

static void both_ready(int socket) {
  char byte = 0;
  if (write(socket, &byte, 1) != 1 || read(socket, &byte, 1) != 1) {
    exit(1);
  }
}

static void two_processes(int socket, uint64_t *words, bool begins, uint64_t rounds) {
  uint64_t *own = begins ? words : words + words_apart;
  const uint64_t *others = begins ? words + words_apart : words;
  uint64_t *took;
  uint64_t first = 1;
  CHECK(cudaHostAlloc((void **)&took, sizeof *took, cudaHostAllocMapped));
  for (scope where : {SYSTEM, DEVICE}) {
    for (uint32_t pause_ns : {0U, 32U}) {
      both_ready(socket);
      rounds_launch(where, own, others, first, rounds, begins, pause_ns, took, nullptr);
      CHECK(cudaDeviceSynchronize());
      if (begins) {
        told("two processes, exported virtual memory", where, pause_ns, *took, rounds);
      }
      first += rounds;
    }
  }
}

static void device_open() {
  CHECK(cudaSetDevice(0));
  CHECK(cudaFree(nullptr));
}

int main(int argc, char **argv) {
  const uint64_t asked = argc > 1 ? strtoull(argv[1], nullptr, 10) : 0;
  const uint64_t rounds = asked < 2 ? 20000 : asked;
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0) {
    return 1;
  }
  const pid_t child = fork(); /* before there is a context */
  if (child == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    int fd = fd_receive(sockets[1]);
    device_open();
    CUmemGenericAllocationHandle handle;
    CHECK(DRIVER(cuMemImportFromShareableHandle)(&handle, (void *)(uintptr_t)fd,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    uint64_t *words = handle_map(handle, granularity());
    two_processes(sockets[1], words, false, rounds);
    return 0;
  }
  device_open();
  uint64_t *plain;
  CHECK(cudaMalloc((void **)&plain, 4096));
  CHECK(cudaMemset(plain, 0, 4096));
  one_process("one process, cudaMalloc", plain, rounds);
  one_process("one process, virtual memory", handle_map(handle_make(false), granularity()), rounds);
  one_process("one process, exportable virtual memory", handle_map(handle_make(true), granularity()), rounds);
  CUmemGenericAllocationHandle shared = handle_make(true);
  uint64_t *words = handle_map(shared, granularity());
  int fd;
  CHECK(DRIVER(cuMemExportToShareableHandle)(&fd, shared, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  fd_send(sockets[0], fd);
  two_processes(sockets[0], words, true, rounds);
  int status = 1;
  return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}
