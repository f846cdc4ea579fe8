/* Connections: accepted on the loop thread, handed to gRPC, watched until they are gone. Loop thread.
 *
 * gRPC names the peer of a connection "fd:N". So that N means one connection for as long as a call of it may live,
 * the descriptor gRPC gets is a duplicate with a number from a range of its own, which rises with every connection
 * and wraps only far away; a table says whose number it is. The accepted descriptor itself stays here, watched for
 * the hang-up that every end of the connection brings (gRPC shuts its socket down before it closes it).
 */
#ifndef KVPOOL_SUPERVISOR_RPC_LISTENER_H
#define KVPOOL_SUPERVISOR_RPC_LISTENER_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "server/supervisor/rpc.h"
#include "server/supervisor/unix_socket.h"

struct kvp_rpc_connection;

struct kvp_rpc_listener {
  uv_loop_t *loop;
  struct kvp_unix_socket endpoint;
  uv_poll_t acceptable;
  uv_timer_t pause; /* no descriptors left: accepting rests a while */
  bool draining;
  unsigned open_handles;
  uint32_t connections;
  uint32_t connections_max;
  bool refusing; /* at connections_max; logged once */
  struct kvp_rpc_connection *first;

  int number_first; /* numbers are [number_first, number_end) */
  int number_end;
  int number_next;
  struct kvp_rpc_peer *peers; /* [number_end - number_first] */

  void *context;
  void (*adopt)(void *context, int fd); /* takes fd */
  void (*closed)(void *context);
};

/* Raises the limit of descriptors and opens the endpoint. adopt: called with each connection's numbered descriptor.
 */
enum kvp_status kvp_rpc_listener_init(struct kvp_rpc_listener *listener, uv_loop_t *loop,
                                      const struct kvp_rpc_server_options *options,
                                      void (*adopt)(void *context, int fd), void *context, struct kvp_error *error);
/* Starts accepting. */
void kvp_rpc_listener_start(struct kvp_rpc_listener *listener);
/* Accepts no more; connections stay. */
void kvp_rpc_listener_drain(struct kvp_rpc_listener *listener);
/* Closes everything, socket and lock included, and calls closed(context) from the loop. */
void kvp_rpc_listener_close(struct kvp_rpc_listener *listener, void (*closed)(void *context));

/* Who is at the other end of connection `number`. False: not one of ours. */
bool kvp_rpc_listener_peer(const struct kvp_rpc_listener *listener, int number, struct kvp_rpc_peer *out);

#endif
