/* Shared memory as sealed memfds (declared in proto/fd_socket.h). Any thread. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "proto/fd_socket.h"
#include "proto/host_memory.h"

enum { memory_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };
static const unsigned long hugetlbfs_magic = 0x958458f6; /* statfs(2) */

static int fd_reserve(int fd, uint64_t bytes) {
  int result = 0;
  do {
    result = fallocate(fd, 0, 0, (off_t)bytes);
  } while (result != 0 && errno == EINTR);
  return result;
}

int kvp_memory_fd_create(const char *name, uint64_t bytes, struct kvp_error *error) {
  if (bytes == 0 || bytes > INT64_MAX) {
    (void)kvp_error_set(error, KVP_INVALID_ARGUMENT, "memory '%s': %llu bytes", name, (unsigned long long)bytes);
    return -1;
  }
  struct kvp_host_memory host;
  kvp_host_memory_read(&host);
  if (bytes > host.available_bytes) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "memory '%s': %llu bytes asked for, %llu of %llu are available",
                        name, (unsigned long long)bytes, (unsigned long long)host.available_bytes,
                        (unsigned long long)host.total_bytes);
    return -1;
  }
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "memory '%s': memfd_create: %s", name, strerror(errno));
    return -1;
  }
  if (ftruncate(fd, (off_t)bytes) != 0 || fd_reserve(fd, bytes) != 0) {
    (void)kvp_error_set(error, KVP_OUT_OF_MEMORY, "memory '%s': %llu bytes can't be reserved: %s", name,
                        (unsigned long long)bytes, strerror(errno));
    goto err_close;
  }
  if (fcntl(fd, F_ADD_SEALS, memory_seals) != 0) {
    (void)kvp_error_set(error, KVP_INTERNAL, "memory '%s': it can't be sealed: %s", name, strerror(errno));
    goto err_close;
  }
  return fd;

err_close:
  (void)close(fd);
  return -1;
}

enum kvp_status kvp_memory_fd_check(int fd, uint64_t bytes, struct kvp_error *error) {
  struct stat stat;
  struct statfs system;
  /* Seals first: whose file it is, the kernel knows by itself, and anything but memory ends here. fstat() would ask the
   * file, which a worker can have made such that it never answers. */
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || fstat(fd, &stat) != 0 || fstatfs(fd, &system) != 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "fd %d is not a memfd", fd);
  }
  /* Its pages come out of the administrator's pool: where that is empty, or a hole was punched, touching one is SIGBUS. */
  if ((unsigned long)system.f_type == hugetlbfs_magic) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "fd %d is a memfd of huge pages, of %lld bytes each", fd,
                         (long long)system.f_bsize);
  }
  if ((seals & memory_seals) != memory_seals) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "fd %d: seals are 0x%x, SHRINK, GROW and SEAL are needed", fd,
                         (unsigned)seals);
  }
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT,
                         "fd %d: seals are 0x%x, with %s it can't be mapped to be written", fd, (unsigned)seals,
                         (seals & F_SEAL_WRITE) != 0 ? "WRITE" : "FUTURE_WRITE");
  }
  if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "fd %d is not open for reading and writing", fd);
  }
  if (stat.st_size < 0 || (uint64_t)stat.st_size != bytes) {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "fd %d is %lld bytes, not %llu", fd, (long long)stat.st_size,
                         (unsigned long long)bytes);
  }
  return KVP_OK;
}
