/* Workers of sessions that share memory with an executor: one attachment each. Loop thread only.
 *
 *   GREETING --ATTACH--> ATTACHING --executor has the ring--> SERVING <--+
 *                                                               |        | a new ring on the next executor
 *                                        its executor died ---> LOST ----+
 *   from anywhere: socket closed, session closed, nonsense in the ring -> ENDING -> gone
 *
 * ENDING: the executor is told, steps that wait are dropped, those that run end; the buffers that were made here go.
 * The session lives as long as its attachments and is not touched by their end.
 */
#ifndef KVPOOL_SUPERVISOR_ATTACHMENT_H
#define KVPOOL_SUPERVISOR_ATTACHMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "server/supervisor/attach_channel.h"
#include "server/supervisor/attach_requests.h"
#include "server/supervisor/attach_ring.h"
#include "server/supervisor/rpc.h"

struct kvp_daemon;
struct kvp_device;
struct kvp_session;

enum kvp_attachment_state {
  KVP_ATTACHMENT_GREETING,  /* its first message has not come */
  KVP_ATTACHMENT_ATTACHING, /* its ring is not made, or the executor has not answered */
  KVP_ATTACHMENT_SERVING,
  KVP_ATTACHMENT_LOST, /* until the next executor has its new ring */
  KVP_ATTACHMENT_ENDING,
};

struct kvp_attachment {
  struct kvp_attachment *next; /* of the daemon */
  struct kvp_attachment **link;
  struct kvp_daemon *daemon;
  enum kvp_attachment_state state;
  uint64_t id; /* never used twice; 0 while GREETING */
  struct kvp_rpc_peer peer;
  uint64_t connected_ms; /* of the loop's clock */
  uint64_t attached_unix_ns;
  struct kvp_attach_channel channel;
  bool channel_open;
  uint32_t hello_request;      /* ATTACH's number */
  struct kvp_session *session; /* NULL while GREETING, like the next one */
  struct kvp_device *device;
  uint32_t queue;
  struct kvp_attach_ring ring;
  bool ring_at_work;     /* one is made or unmade, on a thread */
  bool ring_known;       /* to the device's executor; one of device->rings */
  uint32_t answers_owed; /* by the executor, about the ring */
  uint32_t buffers;      /* made here and not gone; by buffer.c */
  struct kvp_attach_request request;
};

struct kvp_attachment_table {
  struct kvp_attachment *first;
  uint32_t count;          /* that have said whose they are */
  uint32_t greeting_count; /* that have not */
  uint32_t drains;         /* rings whose steps, accepted before the daemon's drain, may not have ended */
  uint64_t next_id;
};

enum { kvp_greeting_ms = 10000 }; /* how long a connection may take to send ATTACH */

/* Takes over an accepted, non-blocking socket and its place at the listener's reaper. Refused, which the worker is told:
 * too many are there, of all or of this uid; no descriptors. */
enum kvp_status kvp_attachment_greet(struct kvp_daemon *daemon, int socket, const struct kvp_rpc_peer *peer,
                                     struct kvp_error *error);
/* Tells the worker, closes its socket. An ENDING one stays as it is. */
void kvp_attachment_end(struct kvp_attachment *attachment, const struct kvp_error *reason);
/* All of a session, or (NULL) those without one yet. */
void kvp_attachment_end_all(struct kvp_daemon *daemon, const struct kvp_session *session,
                            const struct kvp_error *reason);
/* The daemon drains: no ring takes steps any more, those accepted go on; kvp_daemon_look_again when a ring's have ended.
 * A worker without a ring is told to go. */
void kvp_attachment_drain_all(struct kvp_daemon *daemon);
/* Those whose ATTACH is overdue. */
void kvp_attachment_end_silent(struct kvp_daemon *daemon, uint64_t now_ms);

/* By device.c: its executor died; a new one serves; a ring of its is not served any more. */
void kvp_attachment_device_lost(struct kvp_device *device);
void kvp_attachment_device_serving(struct kvp_device *device);
void kvp_attachment_ring_failed(struct kvp_device *device, const struct kvp_control_ring_failed *failed);
/* By buffer.c: one that was made here is gone. */
void kvp_attachment_buffer_gone(struct kvp_attachment *attachment, uint64_t buffer_id);

/* By step_fence.c: an executor has, or is about to have, a ring of this session's slot. */
bool kvp_attachment_has_ring(const struct kvp_device *device, uint16_t owner);

/* By attach_requests.c: what the worker may do next has changed. */
void kvp_attachment_look(struct kvp_attachment *attachment);
/* An ENDING one goes when nothing is owed any more. */
void kvp_attachment_settle(struct kvp_attachment *attachment);

#endif
