/* The serving thread: its service, and when it sleeps.
 *
 * It never waits for anybody: it sleeps only when there is nothing to do, and is woken by a ring's eventfd, by the
 * device, or by the control thread. A device that wakes nobody, and timelines that steps wait for, are looked at
 * while there are such: without a pause at first, then less and less often.
 */
#ifndef KVPOOL_EXECUTOR_SERVER_H
#define KVPOOL_EXECUTOR_SERVER_H

#include <stdbool.h>

#include "proto/ring.h"
#include "server/executor/device.h"
#include "server/executor/object_change.h"

struct kvp_server;

struct kvp_server_options {
  struct kvp_ring *ring; /* the supervisor's, mapped as executor; outlives the server */
  int command_event;     /* eventfd that wakes us */
  int completion_event;  /* eventfd that wakes the other side */
  int control_socket;    /* only watched for its other side's end */
};

/* Descriptors stay the caller's. NULL with *error. */
struct kvp_server *kvp_server_new(const struct kvp_server_options *options, struct kvp_error *error);
/* Before run. */
enum kvp_status kvp_server_set_device(struct kvp_server *server, struct kvp_device *device, struct kvp_error *error);

/* The calling thread becomes the serving thread until kvp_server_stop or the other side's end. False: the
 * supervisor's command lane holds nonsense, memory ran out, or the device is lost. */
bool kvp_server_run(struct kvp_server *server);

/* Any thread. */
void kvp_server_stop(struct kvp_server *server);
/* Any thread: a timeline was written. context: the server. */
void kvp_server_wake(void *context);
/* Any thread: something went wrong with the device; the serving thread ends if it is lost. */
void kvp_server_check_device(struct kvp_server *server);

/* Control thread. Returns when the serving thread has answered; KVP_CANCELLED when it has stopped. A change that is
 * pending afterwards comes back as news. */
enum kvp_status kvp_server_change(struct kvp_server *server, struct kvp_object_change *change);
/* An eventfd that says there is news; all of it, in order, or NULL. */
int kvp_server_news_event(const struct kvp_server *server);
struct kvp_news *kvp_server_news(struct kvp_server *server);

/* After run, the device stopped and the control thread gone: pools and buffers that are left are the caller's to
 * free, rings the server's. */
struct kvp_objects *kvp_server_objects(struct kvp_server *server);
void kvp_server_destroy(struct kvp_server *server);

#endif
