/* The messages of proto/fd_socket.h. Any thread; one sender and one receiver a socket at a time. */
#include "proto/fd_socket.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

struct message_header {
  uint32_t magic;
  uint32_t kind;
  uint32_t request;
  uint32_t body_bytes;
};

/* Aligned room for the descriptors of one message. */
union control_buffer {
  struct cmsghdr align;
  uint8_t bytes[CMSG_SPACE(sizeof(int) * kvp_packet_fds_max)];
};

int kvp_fd_socket_pair(int out[2]) {
  return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, out);
}

static enum kvp_status status_of_errno(int number) {
  switch (number) {
  case EAGAIN:
    return KVP_BUSY;
  case EPIPE:
  case ECONNRESET:
  case ENOTCONN:
    return KVP_CANCELLED;
  default:
    return KVP_INTERNAL;
  }
}

enum kvp_status kvp_fd_socket_send(int socket, uint32_t kind, uint32_t request, const void *body, uint32_t body_bytes,
                                   const int *fds, uint32_t fd_count) {
  assert(body_bytes <= kvp_control_body_bytes_max && fd_count <= kvp_control_fds_max);
  struct message_header header = {KVP_CONTROL_MAGIC, kind, request, body_bytes};
  struct iovec parts[2] = {
      {.iov_base = &header, .iov_len = sizeof header},
      {.iov_base = (void *)body, .iov_len = body_bytes}, /* sendmsg only reads it */
  };
  union control_buffer control;
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
  if (fd_count > 0) {
    memset(&control, 0, sizeof control);
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
    memcpy(CMSG_DATA(rights), fds, sizeof(int) * fd_count);
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? status_of_errno(errno) : KVP_OK;
}

/* Takes every descriptor the kernel has already given us, whatever else is wrong with the message. */
static void fds_take(struct msghdr *message, struct kvp_fd_message *out) {
  for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part != NULL; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; i++) {
      int fd = -1;
      memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      assert(out->fd_count < kvp_packet_fds_max); /* there was room for no more */
      out->fds[out->fd_count++] = fd;
    }
  }
}

/* What is wrong with a packet, the loss of descriptors apart. */
static enum kvp_status packet_check(const struct message_header *header, size_t received, int flags,
                                    uint32_t fd_count, struct kvp_error *error) {
  if (fd_count > kvp_control_fds_max) {
    return kvp_error_set(error, KVP_MALFORMED, "%u descriptors in a message, there may be %d", fd_count,
                         kvp_control_fds_max);
  }
  if ((flags & MSG_TRUNC) != 0) {
    return kvp_error_set(error, KVP_MALFORMED, "a message of more than %d bytes", kvp_control_body_bytes_max);
  }
  if (received < sizeof *header) {
    return kvp_error_set(error, KVP_MALFORMED, "a message of %zu bytes, its header has %zu", received,
                         sizeof *header);
  }
  if (header->magic != KVP_CONTROL_MAGIC) {
    return kvp_error_set(error, KVP_MALFORMED, "a message that begins with 0x%x, not 0x%x", header->magic,
                         KVP_CONTROL_MAGIC);
  }
  if (header->body_bytes != received - sizeof *header) {
    return kvp_error_set(error, KVP_MALFORMED, "a message of kind %u that has %zu bytes and speaks of %u",
                         header->kind, received - sizeof *header, header->body_bytes);
  }
  return KVP_OK;
}

/* The kernel puts as many descriptors as find a place and drops the others. */
static enum kvp_status descriptors_lost(struct kvp_error *error) {
  struct rlimit limit = {0};
  (void)getrlimit(RLIMIT_NOFILE, &limit);
  return kvp_error_set(error, KVP_OUT_OF_MEMORY,
                       "this process has no descriptor left for what it was sent: RLIMIT_NOFILE is %llu",
                       (unsigned long long)limit.rlim_cur);
}

/* KVP_OUT_OF_MEMORY: all of it but descriptors. Those that came are there, whatever is wrong. */
static enum kvp_status packet_take(int socket, struct kvp_fd_message *out, struct kvp_error *error) {
  struct message_header header;
  struct iovec parts[2] = {
      {.iov_base = &header, .iov_len = sizeof header},
      {.iov_base = out->body, .iov_len = sizeof out->body},
  };
  union control_buffer control;
  struct msghdr message = {
      .msg_iov = parts,
      .msg_iovlen = 2,
      .msg_control = control.bytes,
      .msg_controllen = CMSG_LEN(sizeof(int) * kvp_packet_fds_max),
  };
  ssize_t received = 0;
  out->fd_count = 0;
  do {
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) {
    return status_of_errno(errno);
  }
  fds_take(&message, out);
  if (received == 0 && out->fd_count == 0) {
    return KVP_CANCELLED;
  }
  if (packet_check(&header, (size_t)received, message.msg_flags, out->fd_count, error) != KVP_OK) {
    return KVP_MALFORMED;
  }
  out->kind = header.kind;
  out->request = header.request;
  out->body_bytes = header.body_bytes;
  return (message.msg_flags & MSG_CTRUNC) != 0 ? descriptors_lost(error) : KVP_OK;
}

enum kvp_status kvp_fd_socket_take(int socket, struct kvp_fd_message *out) {
  enum kvp_status status = packet_take(socket, out, NULL);
  return status == KVP_OUT_OF_MEMORY ? KVP_MALFORMED : status;
}

enum kvp_status kvp_fd_socket_receive(int socket, struct kvp_fd_message *out) {
  enum kvp_status status = kvp_fd_socket_take(socket, out);
  if (status == KVP_MALFORMED) {
    kvp_fd_message_close_fds(out);
  }
  return status;
}

enum kvp_status kvp_fd_socket_receive_told(int socket, struct kvp_fd_message *out, struct kvp_error *error) {
  enum kvp_status status = packet_take(socket, out, error);
  if (status == KVP_MALFORMED || status == KVP_OUT_OF_MEMORY) {
    kvp_fd_message_close_fds(out);
  }
  return status;
}

enum kvp_status kvp_fd_socket_peek(int socket, bool *has_fds) {
  uint8_t byte = 0;
  struct iovec part = {.iov_base = &byte, .iov_len = sizeof byte};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  ssize_t received = 0;
  do {
    received = recvmsg(socket, &message, MSG_PEEK);
  } while (received < 0 && errno == EINTR);
  if (received < 0) {
    return status_of_errno(errno) == KVP_BUSY ? KVP_BUSY : KVP_CANCELLED;
  }
  *has_fds = (message.msg_flags & MSG_CTRUNC) != 0; /* there is no room for any */
  return KVP_OK;
}

void kvp_fd_message_close_fds(struct kvp_fd_message *message) {
  for (uint32_t i = 0; i < message->fd_count; i++) {
    (void)close(message->fds[i]);
  }
  message->fd_count = 0;
}
