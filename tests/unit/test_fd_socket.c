/* Messages with descriptors, and sealed memory: nothing leaks, nothing odd gets through. */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/fd_socket.h"
#include "proto/host_memory.h"

static struct kvp_fd_message message; /* 16 KiB: not on the stack */

static int open_fd_count(void) {
  DIR *directory = opendir("/proc/self/fd");
  assert_non_null(directory);
  int count = 0;
  while (readdir(directory) != NULL) {
    count++;
  }
  assert_int_equal(closedir(directory), 0);
  return count;
}

struct raw_header {
  uint32_t magic, kind, request, body_bytes;
};

/* Sends bytes and descriptors as they are, the way a peer with other ideas would. */
static void raw_send(int socket, const void *bytes, size_t byte_count, int fd, size_t fd_count) {
  struct iovec part = {.iov_base = (void *)bytes, .iov_len = byte_count};
  _Alignas(struct cmsghdr) static uint8_t control[CMSG_SPACE(sizeof(int) * 256)];
  struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
  if (fd_count > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
    for (size_t i = 0; i < fd_count; i++) {
      memcpy(CMSG_DATA(rights) + i * sizeof fd, &fd, sizeof fd);
    }
  }
  assert_int_equal(sendmsg(socket, &header, MSG_NOSIGNAL), (ssize_t)byte_count);
}

static void test_round_trip(void **state) {
  (void)state;
  int before = open_fd_count();
  int pair[2];
  assert_int_equal(kvp_fd_socket_pair(pair), 0);
  uint8_t body[kvp_control_body_bytes_max];
  for (size_t i = 0; i < sizeof body; i++) {
    body[i] = (uint8_t)(i * 13);
  }
  int pipes[2];
  assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
  assert_int_equal(kvp_fd_socket_send(pair[0], 7, 42, body, sizeof body, pipes, 2), KVP_OK);
  assert_int_equal(kvp_fd_socket_send(pair[0], 8, 0, NULL, 0, NULL, 0), KVP_OK);

  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_OK);
  assert_int_equal(message.kind, 7);
  assert_int_equal(message.request, 42);
  assert_int_equal(message.body_bytes, sizeof body);
  assert_memory_equal(message.body, body, sizeof body);
  assert_int_equal(message.fd_count, 2);
  assert_true((fcntl(message.fds[0], F_GETFD) & FD_CLOEXEC) != 0);
  assert_int_equal(write(message.fds[1], "x", 1), 1); /* the very same pipe */
  char got = 0;
  assert_int_equal(read(pipes[0], &got, 1), 1);
  assert_int_equal(got, 'x');
  kvp_fd_message_close_fds(&message);
  assert_int_equal(message.fd_count, 0);

  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_OK);
  assert_int_equal(message.kind, 8);
  assert_int_equal(message.body_bytes, 0);
  assert_int_equal(message.fd_count, 0);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(close(pair[i]), 0);
    assert_int_equal(close(pipes[i]), 0);
  }
  assert_int_equal(open_fd_count(), before);
}

static void test_most_fds(void **state) {
  (void)state;
  int before = open_fd_count();
  int pair[2];
  assert_int_equal(kvp_fd_socket_pair(pair), 0);
  int fds[kvp_control_fds_max];
  for (int i = 0; i < kvp_control_fds_max; i++) {
    fds[i] = pair[0];
  }
  assert_int_equal(kvp_fd_socket_send(pair[0], 1, 1, "b", 1, fds, kvp_control_fds_max), KVP_OK);
  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_OK);
  assert_int_equal(message.fd_count, kvp_control_fds_max);
  kvp_fd_message_close_fds(&message);
  assert_int_equal(close(pair[0]), 0);
  assert_int_equal(close(pair[1]), 0);
  assert_int_equal(open_fd_count(), before);
}

/* Whatever is wrong with a message, the descriptors that came with it are closed. */
static void test_malformed(void **state) {
  (void)state;
  int before = open_fd_count();
  int pair[2];
  assert_int_equal(kvp_fd_socket_pair(pair), 0);
  int open_now = open_fd_count();
  static uint8_t bytes[sizeof(struct raw_header) + kvp_control_body_bytes_max + 1];
  struct raw_header header = {KVP_CONTROL_MAGIC, 1, 1, 0};

  memcpy(bytes, &header, sizeof header);
  const size_t fd_counts[] = {65, 66, 100, 253};
  for (size_t i = 0; i < sizeof fd_counts / sizeof fd_counts[0]; i++) {
    raw_send(pair[0], bytes, sizeof header, pair[0], fd_counts[i]);
    assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_MALFORMED);
    assert_int_equal(message.fd_count, 0);
    assert_int_equal(open_fd_count(), open_now);
  }

  raw_send(pair[0], bytes, sizeof header - 1, pair[0], 3); /* short */
  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_MALFORMED);
  raw_send(pair[0], bytes, sizeof header + 1, pair[0], 3); /* a body that was not announced */
  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_MALFORMED);
  header.body_bytes = kvp_control_body_bytes_max + 1;
  memcpy(bytes, &header, sizeof header);
  raw_send(pair[0], bytes, sizeof bytes, pair[0], 3); /* longer than allowed: truncated */
  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_MALFORMED);
  header = (struct raw_header){KVP_CONTROL_MAGIC + 1, 1, 1, 0};
  raw_send(pair[0], &header, sizeof header, pair[0], 3);
  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_MALFORMED);
  assert_int_equal(open_fd_count(), open_now);

  header.magic = KVP_CONTROL_MAGIC; /* the socket still works */
  raw_send(pair[0], &header, sizeof header, -1, 0);
  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_OK);
  assert_int_equal(close(pair[0]), 0);
  assert_int_equal(close(pair[1]), 0);
  assert_int_equal(open_fd_count(), before);
}

static void test_closed_and_full(void **state) {
  (void)state;
  int pair[2];
  assert_int_equal(kvp_fd_socket_pair(pair), 0);
  assert_int_equal(fcntl(pair[0], F_SETFL, O_NONBLOCK), 0);
  assert_int_equal(fcntl(pair[1], F_SETFL, O_NONBLOCK), 0);
  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_BUSY);
  enum kvp_status status = KVP_OK;
  int sent = 0;
  static uint8_t body[kvp_control_body_bytes_max];
  while ((status = kvp_fd_socket_send(pair[0], 1, 1, body, sizeof body, NULL, 0)) == KVP_OK) {
    sent++;
  }
  assert_int_equal(status, KVP_BUSY);
  assert_true(sent > 0);
  assert_int_equal(close(pair[0]), 0);
  for (int i = 0; i < sent; i++) { /* what was sent before the close still arrives */
    assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_OK);
  }
  assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_CANCELLED);
  assert_int_equal(kvp_fd_socket_send(pair[1], 1, 1, body, 1, NULL, 0), KVP_CANCELLED);
  assert_int_equal(close(pair[1]), 0);
}

static void test_memory_fd(void **state) {
  (void)state;
  int before = open_fd_count();
  struct kvp_error error;
  int fd = kvp_memory_fd_create("kvp-test", 1 << 20, &error);
  assert_true(fd >= 0);
  struct stat stat;
  assert_int_equal(fstat(fd, &stat), 0);
  assert_int_equal(stat.st_size, 1 << 20);
  assert_int_equal(stat.st_blocks * 512, 1 << 20); /* reserved, not only sized */
  assert_true((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
  assert_int_equal(ftruncate(fd, 4096), -1);
  assert_int_equal(ftruncate(fd, 2 << 20), -1);
  assert_int_equal(kvp_memory_fd_check(fd, 1 << 20, &error), KVP_OK);
  assert_int_equal(kvp_memory_fd_check(fd, (1 << 20) - 1, &error), KVP_INVALID_ARGUMENT);
  assert_int_equal(close(fd), 0);

  fd = memfd_create("half-sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  assert_int_equal(ftruncate(fd, 4096), 0);
  assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  assert_int_equal(kvp_memory_fd_check(fd, 4096, &error), KVP_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "0x6"));
  assert_int_equal(close(fd), 0);
  for (int i = 0; i < 2; i++) {
    const int seal = i == 0 ? F_SEAL_WRITE : F_SEAL_FUTURE_WRITE;
    fd = memfd_create("not-to-be-written", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | seal), 0);
    assert_int_equal(kvp_memory_fd_check(fd, 4096, &error), KVP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, i == 0 ? "0xf, with WRITE" : "0x17, with FUTURE_WRITE"));
    assert_int_equal(close(fd), 0);
  }
  fd = memfd_create("huge-pages", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
  if (fd >= 0) { /* else the kernel has none */
    struct stat huge;
    assert_int_equal(fstat(fd, &huge), 0);
    assert_int_equal(ftruncate(fd, huge.st_blksize), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    assert_int_equal(kvp_memory_fd_check(fd, (uint64_t)huge.st_blksize, &error), KVP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "a memfd of huge pages"));
    assert_int_equal(close(fd), 0);
  }
  fd = kvp_memory_fd_create("open-for-one", 4096, &error);
  for (int i = 0; i < 2; i++) {
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int half = open(path, (i == 0 ? O_RDONLY : O_WRONLY) | O_CLOEXEC);
    assert_true(half >= 0);
    assert_int_equal(kvp_memory_fd_check(half, 4096, &error), KVP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "not open for reading and writing"));
    assert_int_equal(close(half), 0);
  }
  assert_int_equal(close(fd), 0);
  assert_int_equal(kvp_memory_fd_check(STDIN_FILENO, 4096, &error), KVP_INVALID_ARGUMENT);

  assert_int_equal(kvp_memory_fd_create("none", 0, &error), -1);
  assert_int_equal(error.status, KVP_INVALID_ARGUMENT);
  /* 1 PiB: no machine that runs this test has it. Refused with the numbers, nobody is killed. */
  assert_int_equal(kvp_memory_fd_create("huge", UINT64_C(1) << 50, &error), -1);
  assert_int_equal(error.status, KVP_OUT_OF_MEMORY);
  assert_non_null(strstr(error.text, "1125899906842624 bytes asked for"));
  assert_int_equal(open_fd_count(), before);
}

static void test_host_memory(void **state) {
  (void)state;
  struct kvp_host_memory host;
  kvp_host_memory_read(&host);
  assert_true(host.total_bytes <= (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
  assert_true(host.available_bytes > 0 && host.available_bytes <= host.total_bytes);
}

/* From a peer that nobody trusts: nothing is closed here, whatever is wrong with the message. */
static void test_take(void **state) {
  (void)state;
  int before = open_fd_count();
  int pair[2];
  bool has_fds = true;
  assert_int_equal(kvp_fd_socket_pair(pair), 0);
  assert_int_equal(fcntl(pair[1], F_SETFL, O_NONBLOCK), 0);
  assert_int_equal(kvp_fd_socket_peek(pair[1], &has_fds), KVP_BUSY);
  struct raw_header header = {KVP_CONTROL_MAGIC, 1, 1, 0};
  const struct {
    size_t bytes;
    size_t fds;
    enum kvp_status status;
  } cases[] = {
      {sizeof header, 0, KVP_OK},
      {sizeof header, 1, KVP_OK},
      {sizeof header, 64, KVP_OK},
      {sizeof header, 65, KVP_MALFORMED},
      {sizeof header, 253, KVP_MALFORMED},
      {0, 253, KVP_MALFORMED},
      {3, 0, KVP_MALFORMED},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    raw_send(pair[0], &header, cases[i].bytes, pair[0], cases[i].fds);
    int open_now = open_fd_count();
    assert_int_equal(kvp_fd_socket_peek(pair[1], &has_fds), KVP_OK);
    assert_int_equal(has_fds, cases[i].fds > 0);
    assert_int_equal(open_fd_count(), open_now);
    assert_int_equal(kvp_fd_socket_take(pair[1], &message), cases[i].status);
    assert_int_equal(message.fd_count, cases[i].fds);
    assert_int_equal(open_fd_count(), open_now + (int)cases[i].fds);
    kvp_fd_message_close_fds(&message);
  }
  assert_int_equal(close(pair[0]), 0);
  assert_int_equal(kvp_fd_socket_take(pair[1], &message), KVP_CANCELLED);
  assert_int_equal(close(pair[1]), 0);
  assert_int_equal(open_fd_count(), before);
}

/* All that this process may have; back in *limit and fds what it was before. */
static int fill(struct rlimit *limit, int *fds, int max) {
  int count = 0;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, limit), 0);
  const struct rlimit small = {.rlim_cur = 64, .rlim_max = limit->rlim_max};
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &small), 0);
  for (int fd = dup(0); fd >= 0; fd = dup(0)) {
    assert_true(count < max);
    fds[count++] = fd;
  }
  return count;
}

/* A process without room for descriptors isn't a peer's fault: the message is there, and none of its descriptors is. For
 * who doesn't ask it is as malformed as ever. */
static void test_no_room(void **state) {
  (void)state;
  if (getenv("KVPOOL_UNDER_VALGRIND") != NULL) {
    skip(); /* it keeps the limit itself, and the kernel doesn't know of it */
  }
  int before = open_fd_count();
  int pair[2], fds[64] = {0};
  struct rlimit limit;
  struct kvp_error error;
  assert_int_equal(kvp_fd_socket_pair(pair), 0);
  const int two[] = {pair[0], pair[1]};
  const int count = fill(&limit, fds, 64);
  for (int room = 0; room < 2; room++) {
    for (int i = 0; i < room; i++) {
      assert_int_equal(close(fds[i]), 0);
    }
    assert_int_equal(kvp_fd_socket_send(pair[0], 7, 42, "body", 4, two, 2), KVP_OK);
    assert_int_equal(kvp_fd_socket_receive_told(pair[1], &message, &error), KVP_OUT_OF_MEMORY);
    assert_string_equal(error.text, "this process has no descriptor left for what it was sent: RLIMIT_NOFILE is 64");
    assert_int_equal(message.kind, 7);
    assert_int_equal(message.request, 42);
    assert_int_equal(message.body_bytes, 4);
    assert_memory_equal(message.body, "body", 4);
    assert_int_equal(message.fd_count, 0);
    assert_int_equal(kvp_fd_socket_send(pair[0], 7, 42, "body", 4, two, 2), KVP_OK);
    assert_int_equal(kvp_fd_socket_receive(pair[1], &message), KVP_MALFORMED);
    assert_int_equal(message.fd_count, 0);
  }
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
  for (int i = 1; i < count; i++) {
    assert_int_equal(close(fds[i]), 0);
  }
  assert_int_equal(close(pair[0]), 0);
  assert_int_equal(close(pair[1]), 0);
  assert_int_equal(open_fd_count(), before);
}

/* What was wrong is told. */
static void test_malformed_told(void **state) {
  (void)state;
  int pair[2];
  assert_int_equal(kvp_fd_socket_pair(pair), 0);
  static uint8_t long_bytes[sizeof(struct raw_header) + kvp_control_body_bytes_max + 1];
  const struct raw_header good = {KVP_CONTROL_MAGIC, 3, 1, 0}, magic = {17, 3, 1, 0},
                          body = {KVP_CONTROL_MAGIC, 3, 1, 9};
  const struct {
    const void *bytes;
    size_t byte_count, fd_count;
    const char *text;
  } cases[] = {
      {&good, sizeof good, 65, "65 descriptors in a message, there may be 64"},
      {&good, 12, 1, "a message of 12 bytes, its header has 16"},
      {&magic, sizeof magic, 1, "a message that begins with 0x11, not 0x6374766b"},
      {&body, sizeof body, 1, "a message of kind 3 that has 0 bytes and speaks of 9"},
      {long_bytes, sizeof long_bytes, 1, "a message of more than"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct kvp_error error;
    raw_send(pair[0], cases[i].bytes, cases[i].byte_count, pair[0], cases[i].fd_count);
    assert_int_equal(kvp_fd_socket_receive_told(pair[1], &message, &error), KVP_MALFORMED);
    assert_int_equal(error.status, KVP_MALFORMED);
    assert_non_null(strstr(error.text, cases[i].text));
    assert_int_equal(message.fd_count, 0);
  }
  assert_int_equal(close(pair[0]), 0);
  assert_int_equal(close(pair[1]), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_round_trip),      cmocka_unit_test(test_most_fds),
      cmocka_unit_test(test_malformed),       cmocka_unit_test(test_take),
      cmocka_unit_test(test_closed_and_full), cmocka_unit_test(test_memory_fd),
      cmocka_unit_test(test_host_memory),     cmocka_unit_test(test_no_room),
      cmocka_unit_test(test_malformed_told),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
