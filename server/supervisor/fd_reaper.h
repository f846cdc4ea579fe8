/* A thread that closes what workers have sent: descriptors, and sockets in which some may wait.
 *
 * Closing somebody else's file may take as long as they like (proto/fd_socket.h). So the loop thread closes none that
 * it has not seen to be memory; it hands them on. While the thread hangs they wait here, counted: every connection has
 * a place reserved for its socket, a message with descriptors is read only when there are places for all it can bring,
 * and what waits of one uid is bounded, so that its hanging takes nothing from others. Loop thread only.
 */
#ifndef KVPOOL_SUPERVISOR_FD_REAPER_H
#define KVPOOL_SUPERVISOR_FD_REAPER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "proto/limits.h"
#include "proto/status.h"
#include "server/supervisor/fd_budget.h"

struct kvp_fd_reaper;

enum {
  kvp_reaper_fds_per_uid_max = 2 * kvp_packet_fds_max,
  kvp_reaper_fds_max = kvp_attachments_max + kvp_greetings_max + 3 * kvp_reaper_fds_per_uid_max,
};

/* Signals are blocked in the thread. fds: is charged for each place; kept by reference, it may be initialized later. */
enum kvp_status kvp_fd_reaper_new(uv_loop_t *loop, struct kvp_fd_budget *fds, struct kvp_fd_reaper **out,
                                  struct kvp_error *error);
/* What waits is left to the end of the process, which doesn't wait for sockets that linger. Closes a handle on the loop.
 * NULL is fine. */
void kvp_fd_reaper_destroy(struct kvp_fd_reaper *reaper);

/* Places for `count` more. Refused with busy. */
enum kvp_status kvp_fd_reaper_reserve(struct kvp_fd_reaper *reaper, uint32_t count, struct kvp_error *error);
void kvp_fd_reaper_release(struct kvp_fd_reaper *reaper, uint32_t count);
/* That `count` more of this uid may wait; busy, with the numbers, when it has too many. */
enum kvp_status kvp_fd_reaper_check_uid(struct kvp_fd_reaper *reaper, uid_t uid, uint32_t count,
                                        struct kvp_error *error);

/* Takes the descriptor, and one place for it. Never blocks. */
void kvp_fd_reaper_close(struct kvp_fd_reaper *reaper, uid_t uid, int fd);
/* Likewise a connected SOCK_SEQPACKET socket, out of every loop: the other side sees its end at once. One in which no
 * descriptor waits is closed at once, too. */
void kvp_fd_reaper_close_socket(struct kvp_fd_reaper *reaper, uid_t uid, int socket);

#endif
