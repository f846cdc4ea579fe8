/* OpenSession, CloseSession, ListSessions. Loop thread only.
 *
 * An OpenSession call's state is its session as long as that is open; NULL before and after. */
#include <stdlib.h>
#include <string.h>

#include "server/supervisor/allocate.h"
#include "server/supervisor/methods.h"

static char default_namespace[] = "default";

static struct kvp_session *open_session(struct kvp_daemon *daemon, struct kvp_rpc_call *call,
                                        const Kvpool__V1__OpenSessionRequest *request, struct kvp_error *error) {
  if (request->protocol_version != 0 && request->protocol_version != kvp_protocol_version) {
    (void)kvp_error_set_at(error, KVP_VERSION_MISMATCH, -1, "protocol_version", -1, request->protocol_version,
                           "the client speaks protocol version %u, this daemon %d", request->protocol_version,
                           kvp_protocol_version);
    return NULL;
  }
  struct kvp_session *session = NULL;
  char name[kvp_name_bytes_max];
  char namespace_name[kvp_name_bytes_max];
  const char *asked = request->namespace_[0] == '\0' ? default_namespace : request->namespace_;
  enum kvp_status status = kvp_method_name(request->name, "name", false, name, sizeof name, error);
  if (status == KVP_OK) {
    status = kvp_method_name(asked, "namespace", false, namespace_name, sizeof namespace_name, error);
  }
  if (status == KVP_OK) {
    status = kvp_session_open(daemon, call, name, namespace_name, request->blocks_max, &session, error);
  }
  return status == KVP_OK ? session : NULL;
}

static void send_opened(const struct kvp_daemon *daemon, struct kvp_session *session) {
  Kvpool__V1__SessionRef reference = KVPOOL__V1__SESSION_REF__INIT;
  reference.session_id = session->id;
  reference.secret.data = session->secret;
  reference.secret.len = sizeof session->secret;
  Kvpool__V1__SessionOpened opened = KVPOOL__V1__SESSION_OPENED__INIT;
  opened.session = &reference;
  opened.epoch = daemon->epoch;
  opened.protocol_version = kvp_protocol_version;
  Kvpool__V1__SessionEvent event = KVPOOL__V1__SESSION_EVENT__INIT;
  event.event_case = KVPOOL__V1__SESSION_EVENT__EVENT_OPENED;
  event.opened = &opened;
  (void)kvp_rpc_call_send(session->stream, &event.base);
}

static void on_open_session(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  struct kvp_daemon *daemon = context;
  daemon->sessions.stream_count++;
  struct kvp_error error;
  struct kvp_session *session =
      open_session(daemon, call, (const Kvpool__V1__OpenSessionRequest *)message->body, &error);
  if (session == NULL) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  kvp_rpc_call_set_state(call, session);
  send_opened(daemon, session);
}

static void on_open_session_closed(void *context, struct kvp_rpc_call *call) {
  struct kvp_daemon *daemon = context;
  struct kvp_session *session = kvp_rpc_call_state(call);
  daemon->sessions.stream_count--;
  if (session != NULL) {
    kvp_session_close(daemon, session, NULL);
  }
  kvp_daemon_look_again(daemon);
}

static void on_close_session(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  const Kvpool__V1__CloseSessionRequest *request = (const Kvpool__V1__CloseSessionRequest *)message->body;
  struct kvp_error error;
  struct kvp_session *session = kvp_method_session(context, request->session, &error);
  if (session == NULL) {
    kvp_rpc_call_fail(call, &error);
    return;
  }
  struct kvp_error reason;
  (void)kvp_error_set(&reason, KVP_OK, "closed by CloseSession");
  kvp_session_close(context, session, &reason);
  Kvpool__V1__CloseSessionResponse reply = KVPOOL__V1__CLOSE_SESSION_RESPONSE__INIT;
  kvp_rpc_call_finish(call, &reply.base);
}

static Kvpool__V1__AttachmentState attachment_state(const struct kvp_attachment *attachment) {
  switch (attachment->state) {
  case KVP_ATTACHMENT_SERVING:
    return KVPOOL__V1__ATTACHMENT_STATE__ATTACHMENT_SERVING;
  case KVP_ATTACHMENT_LOST:
    return KVPOOL__V1__ATTACHMENT_STATE__ATTACHMENT_LOST;
  case KVP_ATTACHMENT_ENDING:
    return KVPOOL__V1__ATTACHMENT_STATE__ATTACHMENT_ENDING;
  case KVP_ATTACHMENT_GREETING:
  case KVP_ATTACHMENT_ATTACHING:
    break;
  }
  return KVPOOL__V1__ATTACHMENT_STATE__ATTACHMENT_ATTACHING;
}

static void fill_attachment(Kvpool__V1__AttachmentInfo *out, const struct kvp_attachment *attachment) {
  kvpool__v1__attachment_info__init(out);
  out->attachment_id = attachment->id;
  out->device = attachment->device->name;
  out->peer_pid = (uint32_t)attachment->peer.pid;
  out->peer_uid = (uint32_t)attachment->peer.uid;
  out->attached_unix_ns = attachment->attached_unix_ns;
  out->state = attachment_state(attachment);
  out->steps_taken = kvp_attach_ring_commands(&attachment->ring);
  out->buffers = attachment->buffers;
}

/* Those of all sessions, one after the other. */
struct attachment_infos {
  Kvpool__V1__AttachmentInfo infos[kvp_attachments_max];
  Kvpool__V1__AttachmentInfo *pointers[kvp_attachments_max];
  size_t count;
};

static void fill_attachments(Kvpool__V1__SessionInfo *out, const struct kvp_daemon *daemon,
                             const struct kvp_session *session, struct attachment_infos *infos) {
  out->attachments = &infos->pointers[infos->count];
  for (const struct kvp_attachment *attachment = daemon->attachments.first; attachment != NULL;
       attachment = attachment->next) {
    if (attachment->session == session) {
      fill_attachment(&infos->infos[infos->count], attachment);
      infos->pointers[infos->count] = &infos->infos[infos->count];
      infos->count++;
      out->n_attachments++;
    }
  }
}

static void fill_session(Kvpool__V1__SessionInfo *out, struct kvp_session *session) {
  kvpool__v1__session_info__init(out);
  out->session_id = session->id;
  out->name = session->name;
  out->namespace_ = session->namespace_name;
  out->peer_pid = (uint32_t)session->peer.pid;
  out->peer_uid = (uint32_t)session->peer.uid;
  out->opened_unix_ns = session->opened_unix_ns;
  out->blocks = session->blocks;
  out->buffers = session->buffer_count;
  out->buffer_bytes = session->buffer_bytes;
  out->queues = session->queues + session->call_queues;
  out->steps_in_flight = session->steps_in_flight;
  out->steps_done = session->steps_done;
  out->steps_refused = session->steps_refused;
}

static void on_list_sessions(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)message;
  struct kvp_daemon *daemon = context;
  uint32_t count = daemon->sessions.count;
  Kvpool__V1__SessionInfo *infos = kvp_allocate(count + 1, sizeof *infos);
  Kvpool__V1__SessionInfo **pointers = kvp_allocate(count + 1, sizeof(Kvpool__V1__SessionInfo *));
  struct attachment_infos *attachments = kvp_allocate(1, sizeof *attachments);
  Kvpool__V1__ListSessionsResponse reply = KVPOOL__V1__LIST_SESSIONS_RESPONSE__INIT;
  reply.sessions = pointers;
  for (uint32_t slot = 1; slot <= kvp_sessions_max; slot++) {
    struct kvp_session *session = daemon->sessions.slots[slot];
    if (session != NULL && session->state == KVP_SESSION_OPEN) {
      fill_session(&infos[reply.n_sessions], session);
      fill_attachments(&infos[reply.n_sessions], daemon, session, attachments);
      pointers[reply.n_sessions] = &infos[reply.n_sessions];
      reply.n_sessions++;
    }
  }
  kvp_rpc_call_finish(call, &reply.base);
  free(attachments);
  free(pointers);
  free(infos);
}

static const struct kvp_rpc_method methods[] = {
    {.name = "OpenSession",
     .shape = KVP_RPC_SERVER_STREAM,
     .request = &kvpool__v1__open_session_request__descriptor,
     .on_message = on_open_session,
     .on_closed = on_open_session_closed},
    {.name = "CloseSession",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__close_session_request__descriptor,
     .on_message = on_close_session},
    {.name = "ListSessions",
     .shape = KVP_RPC_UNARY,
     .request = &kvpool__v1__list_sessions_request__descriptor,
     .on_message = on_list_sessions},
};

const struct kvp_method_table kvp_methods_session = {methods, sizeof methods / sizeof methods[0]};
