/* The serving thread: takes steps from the ring, has them checked and run, and posts what became of them.
 *
 * It alone owns the tables of pools and buffers, the steps and the queues. It never waits for anybody: it sleeps only
 * when there is nothing to do, and is woken by the ring's eventfd, by the device, or by the control thread. A device
 * that wakes nobody is looked at while it has something to do: without a pause at first, then less and less often.
 */
#ifndef KVPOOL_EXECUTOR_SERVER_H
#define KVPOOL_EXECUTOR_SERVER_H

#include <stdbool.h>

#include "proto/ring.h"
#include "server/executor/device.h"
#include "server/executor/objects.h"

struct kvp_server;

struct kvp_server_options {
  struct kvp_ring *ring; /* mapped as executor; outlives the server */
  int command_event;     /* eventfd that wakes us */
  int completion_event;  /* eventfd that wakes the other side */
  int control_socket;    /* only watched for its other side's end */
  bool allows_daemon_ops;
};

/* Descriptors stay the caller's. NULL with *error. */
struct kvp_server *kvp_server_new(const struct kvp_server_options *options, struct kvp_error *error);
/* Before run. */
enum kvp_status kvp_server_set_device(struct kvp_server *server, struct kvp_device *device, struct kvp_error *error);

/* The calling thread becomes the serving thread until kvp_server_stop or the other side's end. False: the command
 * lane holds nonsense, memory ran out, or the device is lost. */
bool kvp_server_run(struct kvp_server *server);

/* Any thread. */
void kvp_server_stop(struct kvp_server *server);
/* Any thread: a timeline was written. context: the server. */
void kvp_server_wake(void *context);
/* Any thread: something went wrong with the device; the serving thread ends if it is lost. */
void kvp_server_check_device(struct kvp_server *server);

enum kvp_object_change_kind { KVP_ADD_POOL, KVP_ADD_BUFFER, KVP_REMOVE_POOL, KVP_REMOVE_BUFFER };

struct kvp_object_change {
  enum kvp_object_change_kind kind;
  uint64_t id;               /* of what is removed */
  struct kvp_pool *pool;     /* in: added; out: removed */
  struct kvp_buffer *buffer; /* in: added; out: removed */
  enum kvp_status status;    /* out */
  struct kvp_error error;    /* out */
};

/* Control thread. Returns when the serving thread has done it, with KVP_CANCELLED when it has stopped. */
enum kvp_status kvp_server_change(struct kvp_server *server, struct kvp_object_change *change);

/* After run, the device stopped and the control thread gone: the objects left are the caller's to free. */
struct kvp_objects *kvp_server_objects(struct kvp_server *server);
void kvp_server_destroy(struct kvp_server *server);

#endif
