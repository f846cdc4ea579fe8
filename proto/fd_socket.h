/* Messages with file descriptors over a SOCK_SEQPACKET unix socket.
 *
 * Used between supervisor and executor and, with the same rules, between supervisor and workers. One message is
 * one packet. Received descriptors are close-on-exec; a truncated message, or one with more descriptors than
 * allowed, closes every descriptor that came with it and is an error of the peer.
 *
 * What a worker sends may be the last descriptor of a socket that lingers, or of a file in a file system that does not
 * answer: close(), fstat(), anything that asks the file itself, then waits as long as the worker likes. The same holds
 * for a socket in which such descriptors wait, and for a message that is received without room for them: the kernel
 * closes them there and then.
 */
#ifndef KVPOOL_PROTO_FD_SOCKET_H
#define KVPOOL_PROTO_FD_SOCKET_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/limits.h"
#include "proto/status.h"

#define KVP_CONTROL_MAGIC   UINT32_C(0x6374766b) /* "kvtc" */
#define KVP_CONTROL_VERSION UINT32_C(3)

struct kvp_fd_message {
  uint32_t kind;
  uint32_t request; /* echoed by the reply; 0 = no reply wanted */
  uint32_t body_bytes;
  uint32_t fd_count;
  uint8_t body[kvp_control_body_bytes_max];
  int fds[kvp_packet_fds_max];
};

/* A connected pair, close-on-exec, blocking. Returns 0 or -1 with errno. */
int kvp_fd_socket_pair(int out[2]);

/* Sends; fds stay the caller's. Returns KVP_OK; KVP_BUSY when a non-blocking socket is full; KVP_CANCELLED when
 * the peer is gone. */
enum kvp_status kvp_fd_socket_send(int socket, uint32_t kind, uint32_t request, const void *body, uint32_t body_bytes,
                                   const int *fds, uint32_t fd_count);

/* Receives one message; its fds are the caller's. KVP_BUSY: nothing there (non-blocking). KVP_CANCELLED: closed.
 * KVP_MALFORMED: bad magic, truncated, too many fds; none is left open. */
enum kvp_status kvp_fd_socket_receive(int socket, struct kvp_fd_message *out);

/* Likewise for who wants to tell what was wrong, and may be at its own limit of descriptors. KVP_OUT_OF_MEMORY: all of
 * the message is there but its descriptors, which did not all find a place in this process; none is left open, fd_count
 * is 0. *error is set with that and with KVP_MALFORMED. */
enum kvp_status kvp_fd_socket_receive_told(int socket, struct kvp_fd_message *out, struct kvp_error *error);

/* Likewise from a peer that nobody trusts, closing of whose descriptors may block: those that came with what is
 * KVP_MALFORMED are the caller's, too. */
enum kvp_status kvp_fd_socket_take(int socket, struct kvp_fd_message *out);
/* Whether the next message comes with descriptors, which stay in the socket. KVP_BUSY: there is none;
 * KVP_CANCELLED: something is wrong with the socket. One that was closed is told by what receives next. */
enum kvp_status kvp_fd_socket_peek(int socket, bool *has_fds);

void kvp_fd_message_close_fds(struct kvp_fd_message *message);

/* Creates a memfd of `bytes`, its memory reserved, with seals SHRINK | GROW | SEAL. Returns the fd or -1 with *error:
 * out_of_memory when the host has not that much. */
int kvp_memory_fd_create(const char *name, uint64_t bytes, struct kvp_error *error);
/* Checks that fd is a memfd of exactly `bytes` with those seals, of ordinary pages, and can be mapped to be written. It
 * may have holes: pages that come when they are touched, and are counted as memory of who does. Never blocks. */
enum kvp_status kvp_memory_fd_check(int fd, uint64_t bytes, struct kvp_error *error);

#endif
