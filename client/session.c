/* Sessions: the open stream that keeps one alive, its events, its end.
 *
 * The stream's messages run on the library's thread. `end` is set once, and from then on every call of the session is
 * refused here with the reason: a daemon that came back doesn't know the session.
 */
#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/internal.h"

struct listed_session {
  kvpool_session_info info;
  size_t first_attachment;
};

struct kvpool_session_list {
  size_t count;
  kvpool_attached_info *attachments; /* of all sessions, one after the other */
  struct listed_session items[];     /* [count] */
};

void kvp_session_ref(kvpool_session *session) {
  atomic_fetch_add_explicit(&session->references, 1, memory_order_relaxed);
}

void kvp_session_unref(kvpool_session *session) {
  if (atomic_fetch_sub_explicit(&session->references, 1, memory_order_acq_rel) == 1) {
    kvp_sync_deinit(&session->lock, &session->changed);
    kvp_client_unref(session->client);
    free(session);
  }
}

void kvp_session_saw_epoch(kvpool_session *session, uint64_t epoch) {
  uint64_t known = atomic_load_explicit(&session->epoch, memory_order_relaxed);
  while (known < epoch && !atomic_compare_exchange_weak_explicit(&session->epoch, &known, epoch, memory_order_relaxed,
                                                                 memory_order_relaxed)) {
  }
}

Kvpool__V1__SessionRef kvp_session_reference(kvpool_session *session) {
  Kvpool__V1__SessionRef reference = KVPOOL__V1__SESSION_REF__INIT;
  reference.session_id = session->id;
  reference.secret = (ProtobufCBinaryData){.len = kvp_secret_bytes, .data = session->secret};
  return reference;
}

kvpool_status kvp_session_check(kvpool_session *session, kvpool_error *error) {
  kvpool_status status = kvp_client_check_process(session->client, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  pthread_mutex_lock(&session->lock);
  if (session->closing) {
    status = kvp_fail(error, KVPOOL_UNKNOWN_SESSION, "session %llu has been closed", (unsigned long long)session->id);
  } else if (session->end.status != KVPOOL_OK) {
    status = kvp_fail(error, KVPOOL_UNKNOWN_SESSION, "session %llu has ended: %s", (unsigned long long)session->id,
                      session->end.text);
  }
  pthread_mutex_unlock(&session->lock);
  return status;
}

static void session_tell(kvpool_session *session, const kvpool_session_event *event) {
  pthread_mutex_lock(&session->lock);
  bool is_wanted = session->opened && !session->closing && session->on_event != NULL;
  pthread_mutex_unlock(&session->lock);
  if (is_wanted) {
    session->on_event(session->context, event);
  }
}

/* The first reason counts. */
static void session_end(kvpool_session *session, const kvpool_error *why) {
  pthread_mutex_lock(&session->lock);
  bool is_first = session->end.status == KVPOOL_OK;
  if (is_first) {
    session->end = *why;
  }
  pthread_mutex_unlock(&session->lock);
  if (is_first) {
    session_tell(session, &(kvpool_session_event){.kind = KVPOOL_SESSION_ENDED, .device = "", .error = why});
  }
}

static void session_on_opened(kvpool_session *session, const Kvpool__V1__SessionOpened *opened) {
  bool is_whole = opened->session != NULL && opened->session->secret.len == kvp_secret_bytes;
  kvp_session_saw_epoch(session, opened->epoch);
  pthread_mutex_lock(&session->lock);
  if (is_whole && !session->opened) {
    session->id = opened->session->session_id;
    memcpy(session->secret, opened->session->secret.data, kvp_secret_bytes);
    session->opened = true;
    pthread_cond_broadcast(&session->changed);
  }
  pthread_mutex_unlock(&session->lock);
}

static void session_on_device_lost(kvpool_session *session, const Kvpool__V1__DeviceLost *lost) {
  kvpool_session_event event = {.kind = KVPOOL_SESSION_DEVICE_LOST, .device = lost->device};
  if (lost->n_torn == 0) {
    session_tell(session, &event);
  }
  for (size_t i = 0; i < lost->n_torn; i++) {
    event.pool_id = lost->torn[i]->pool_id;
    event.blocks = (const int32_t *)(const void *)lost->torn[i]->blocks.data; /* malloc'ed: aligned */
    event.block_count = lost->torn[i]->blocks.len / kvp_int32_bytes;
    session_tell(session, &event);
  }
}

/* Somebody who has the secret closed it when the daemon tells no fault. */
static void session_on_closing(kvpool_session *session, const Kvpool__V1__ErrorDetail *closing) {
  kvpool_error error;
  if (closing->status == KVPOOL__V1__STATUS_CODE__STATUS_OK) {
    (void)kvp_fail(&error, KVPOOL_UNKNOWN_SESSION, "%s", closing->message);
  } else {
    (void)kvp_fail_detail(&error, closing);
  }
  session_end(session, &error);
}

static void session_on_message(void *object, grpc_byte_buffer *buffer) {
  kvpool_session *session = object;
  Kvpool__V1__SessionEvent *message =
      (Kvpool__V1__SessionEvent *)kvp_message_unpack(buffer, &kvpool__v1__session_event__descriptor);
  grpc_byte_buffer_destroy(buffer);
  kvpool_error error;
  if (message == NULL) {
    (void)kvp_call_malformed(KVP_METHOD_OPEN_SESSION, &error);
    session_end(session, &error);
    kvp_call_cancel(session->call);
    return;
  }
  switch (message->event_case) {
  case KVPOOL__V1__SESSION_EVENT__EVENT_OPENED:
    session_on_opened(session, message->opened);
    break;
  case KVPOOL__V1__SESSION_EVENT__EVENT_DEVICE_LOST:
    session_on_device_lost(session, message->device_lost);
    break;
  case KVPOOL__V1__SESSION_EVENT__EVENT_DEVICE_RESTORED:
    session_tell(session,
                 &(kvpool_session_event){.kind = KVPOOL_SESSION_DEVICE_RESTORED, .device = message->device_restored});
    break;
  case KVPOOL__V1__SESSION_EVENT__EVENT_CLOSING:
    session_on_closing(session, message->closing);
    break;
  default:
    break; /* an event of a newer daemon */
  }
  kvpool__v1__session_event__free_unpacked(message, NULL);
  (void)kvp_call_receive(session->call);
}

static void session_on_closed(void *object, struct kvp_call *call) {
  kvpool_session *session = object;
  kvpool_error error;
  kvpool_status status = kvp_call_error(call, &error);
  if (status == KVPOOL_OK) {
    (void)kvp_fail(&error, KVPOOL_UNKNOWN_SESSION, "kvpoold ended the session");
  } else if (status == KVPOOL_DISCONNECTED && session->opened) {
    (void)kvp_fail(&error, KVPOOL_DISCONNECTED,
                   "kvpoold at %s went away, and with it the session's blocks and buffers: open a new session",
                   kvp_client_path(session->client));
  }
  session_end(session, &error);
  pthread_mutex_lock(&session->lock);
  session->call = NULL;
  session->stream_closed = true;
  pthread_cond_broadcast(&session->changed);
  pthread_mutex_unlock(&session->lock);
  kvp_call_unref(call);
  kvp_session_unref(session);
}

static const struct kvp_call_events session_events = {.on_message = session_on_message,
                                                      .on_closed = session_on_closed};

/* The program's name in the alphabet of names. */
static void name_of_program(char *out, size_t out_bytes) {
  (void)snprintf(out, out_bytes, "%s", program_invocation_short_name);
  for (char *at = out; *at != '\0'; at++) {
    if (!isalnum((unsigned char)*at) && strchr("._:-", *at) == NULL) {
      *at = '-';
    }
  }
}

static grpc_byte_buffer *session_request(const kvpool_session_options *options) {
  char program[kvp_name_bytes_max];
  name_of_program(program, sizeof program);
  Kvpool__V1__OpenSessionRequest request = KVPOOL__V1__OPEN_SESSION_REQUEST__INIT;
  request.name = options->name == NULL ? program : (char *)options->name;
  request.namespace_ = options->namespace_name == NULL ? (char *)"" : (char *)options->namespace_name;
  request.blocks_max = options->blocks_max;
  request.protocol_version = kvp_protocol_version;
  return kvp_message_pack(&request.base, NULL);
}

/* Until the stream told the session's id, or ended. call: the stream, held. */
static kvpool_status session_wait_opened(kvpool_session *session, struct kvp_call *call, kvpool_error *error) {
  struct kvp_patience patience = kvp_patience_of(session->client);
  kvpool_status status = KVPOOL_OK;
  pthread_mutex_lock(&session->lock);
  while (!session->opened && !session->stream_closed && status == KVPOOL_OK) {
    status = kvp_patience_wait(&patience, call, &session->changed, &session->lock, error);
  }
  if (session->opened) {
    status = KVPOOL_OK;
  } else if (session->stream_closed) {
    status = session->end.status;
    if (error != NULL) {
      *error = session->end;
    }
  }
  pthread_mutex_unlock(&session->lock);
  return status;
}

/* No event any more; the stream is cancelled, and ended when wait. */
static void session_stop(kvpool_session *session, bool wait) {
  struct timespec deadline = kvp_deadline_after(kvp_client_give_up_ms);
  pthread_mutex_lock(&session->lock);
  session->closing = true;
  struct kvp_call *call = session->call;
  if (call != NULL) {
    kvp_call_ref(call);
  }
  pthread_mutex_unlock(&session->lock);
  if (call == NULL) {
    return;
  }
  kvp_call_cancel(call);
  pthread_mutex_lock(&session->lock);
  bool in_time = wait;
  while (!session->stream_closed && in_time) {
    in_time = kvp_sync_wait(&session->changed, &session->lock, &deadline);
  }
  bool is_stuck = wait && !session->stream_closed;
  pthread_mutex_unlock(&session->lock);
  if (is_stuck) {
    kvp_call_abandon(call);
    pthread_mutex_lock(&session->lock);
    while (!session->stream_closed) {
      pthread_cond_wait(&session->changed, &session->lock);
    }
    pthread_mutex_unlock(&session->lock);
  }
  kvp_call_unref(call);
}

kvpool_status kvpool_session_open(kvpool_client *client, const kvpool_session_options *options, kvpool_session **out,
                                  kvpool_error *error) {
  assert(client != NULL && out != NULL);
  kvpool_session_options used = {.size_bytes = sizeof used};
  if (options != NULL) {
    if (options->size_bytes < sizeof used) {
      return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "options", -1, (int64_t)options->size_bytes,
                         "kvpool_session_options.size_bytes is %zu, not sizeof(kvpool_session_options) = %zu",
                         options->size_bytes, sizeof used);
    }
    used = *options;
  }
  kvpool_status status = kvp_client_check_may_block("kvpool_session_open", error);
  if (status != KVPOOL_OK) {
    return status;
  }
  kvpool_session *session = calloc(1, sizeof *session);
  if (session == NULL) {
    return kvp_fail_no_memory(error);
  }
  session->client = client;
  session->on_event = used.on_event;
  session->context = used.context;
  atomic_init(&session->references, 1);
  kvp_sync_init(&session->lock, &session->changed);
  kvp_client_ref(client);
  status = kvp_call_new(client, KVP_METHOD_OPEN_SESSION, &session_events, session, &session->call, error);
  if (status != KVPOOL_OK) {
    kvp_session_unref(session);
    return status;
  }
  kvp_session_ref(session); /* the stream's, given back in session_on_closed */
  struct kvp_call *call = session->call;
  kvp_call_ref(call);
  kvp_call_start_stream(call, session_request(&used), true);
  status = session_wait_opened(session, call, error);
  kvp_call_unref(call);
  if (status != KVPOOL_OK) {
    session_stop(session, true);
    kvp_session_unref(session);
    return status;
  }
  *out = session;
  return KVPOOL_OK;
}

void kvpool_session_close(kvpool_session *session) {
  if (session == NULL || !kvp_client_is_ours(session->client)) {
    return;
  }
  bool may_block = !kvp_client_on_library_thread();
  if (may_block && kvp_session_check(session, NULL) == KVPOOL_OK) {
    pthread_mutex_lock(&session->lock);
    session->closing = true;
    pthread_mutex_unlock(&session->lock);
    Kvpool__V1__SessionRef reference = kvp_session_reference(session);
    Kvpool__V1__CloseSessionRequest request = KVPOOL__V1__CLOSE_SESSION_REQUEST__INIT;
    request.session = &reference;
    ProtobufCMessage *response = NULL;
    if (kvp_call_unary(session->client, KVP_METHOD_CLOSE_SESSION, &request.base,
                       &kvpool__v1__close_session_response__descriptor, &response, NULL) == KVPOOL_OK) {
      protobuf_c_message_free_unpacked(response, NULL);
    } /* else the end of the stream, which is cancelled now, ends the session just as well */
  }
  session_stop(session, may_block);
  kvp_session_unref(session);
}

uint64_t kvpool_session_id(const kvpool_session *session) {
  return session->id;
}

void kvpool_session_secret(const kvpool_session *session, uint8_t out[16]) {
  memcpy(out, session->secret, kvp_secret_bytes);
}

uint64_t kvpool_session_epoch(const kvpool_session *session) {
  return atomic_load_explicit(&session->epoch, memory_order_relaxed);
}

kvpool_status kvpool_session_state(const kvpool_session *session, kvpool_error *error) {
  /* The lock is no part of what a const session promises. */
  pthread_mutex_t *lock = (pthread_mutex_t *)&session->lock;
  pthread_mutex_lock(lock);
  kvpool_status status = session->end.status;
  if (status != KVPOOL_OK && error != NULL) {
    *error = session->end;
  }
  pthread_mutex_unlock(lock);
  return status;
}

static void session_info_from(const Kvpool__V1__SessionInfo *from, kvpool_session_info *out) {
  *out = (kvpool_session_info){
      .session_id = from->session_id,
      .peer_pid = from->peer_pid,
      .peer_uid = from->peer_uid,
      .opened_unix_ns = from->opened_unix_ns,
      .blocks = from->blocks,
      .buffers = from->buffers,
      .buffer_bytes = from->buffer_bytes,
      .queues = from->queues,
      .steps_in_flight = from->steps_in_flight,
      .steps_done = from->steps_done,
      .steps_refused = from->steps_refused,
      .attachment_count = from->n_attachments,
  };
  (void)snprintf(out->name, sizeof out->name, "%s", from->name);
  (void)snprintf(out->namespace_name, sizeof out->namespace_name, "%s", from->namespace_);
}

static void attached_info_from(const Kvpool__V1__AttachmentInfo *from, kvpool_attached_info *out) {
  *out = (kvpool_attached_info){
      .attachment_id = from->attachment_id,
      .peer_pid = from->peer_pid,
      .peer_uid = from->peer_uid,
      .attached_unix_ns = from->attached_unix_ns,
      .state = (kvpool_attached_state)from->state,
      .steps_taken = from->steps_taken,
      .buffers = from->buffers,
  };
  (void)snprintf(out->device, sizeof out->device, "%s", from->device);
}

/* NULL: no memory. */
static kvpool_session_list *session_list_from(const Kvpool__V1__ListSessionsResponse *response) {
  size_t attachment_count = 0;
  for (size_t i = 0; i < response->n_sessions; i++) {
    attachment_count += response->sessions[i]->n_attachments;
  }
  kvpool_session_list *list = calloc(1, sizeof *list + response->n_sessions * sizeof list->items[0]);
  kvpool_attached_info *attachments = calloc(attachment_count + 1, sizeof *attachments);
  if (list == NULL || attachments == NULL) {
    free(attachments);
    free(list);
    return NULL;
  }
  list->count = response->n_sessions;
  list->attachments = attachments;
  size_t next = 0;
  for (size_t i = 0; i < list->count; i++) {
    const Kvpool__V1__SessionInfo *session = response->sessions[i];
    session_info_from(session, &list->items[i].info);
    list->items[i].first_attachment = next;
    for (size_t j = 0; j < session->n_attachments; j++) {
      attached_info_from(session->attachments[j], &attachments[next++]);
    }
  }
  return list;
}

kvpool_status kvpool_session_list_get(kvpool_client *client, kvpool_session_list **out, kvpool_error *error) {
  assert(client != NULL && out != NULL);
  const Kvpool__V1__ListSessionsRequest request = KVPOOL__V1__LIST_SESSIONS_REQUEST__INIT;
  ProtobufCMessage *message;
  kvpool_status status = kvp_call_unary(client, KVP_METHOD_LIST_SESSIONS, &request.base,
                                        &kvpool__v1__list_sessions_response__descriptor, &message, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  kvpool_session_list *list = session_list_from((const Kvpool__V1__ListSessionsResponse *)message);
  if (list != NULL) {
    *out = list;
  } else {
    status = kvp_fail_no_memory(error);
  }
  protobuf_c_message_free_unpacked(message, NULL);
  return status;
}

void kvpool_session_list_destroy(kvpool_session_list *list) {
  if (list != NULL) {
    free(list->attachments);
    free(list);
  }
}

size_t kvpool_session_list_count(const kvpool_session_list *list) {
  return list->count;
}

const kvpool_session_info *kvpool_session_list_item(const kvpool_session_list *list, size_t index) {
  assert(index < list->count);
  return &list->items[index].info;
}

const kvpool_attached_info *kvpool_session_list_attachment(const kvpool_session_list *list, size_t index,
                                                           size_t attachment) {
  assert(index < list->count && attachment < list->items[index].info.attachment_count);
  return &list->attachments[list->items[index].first_attachment + attachment];
}
