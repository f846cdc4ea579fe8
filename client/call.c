/* One gRPC call of any shape.
 *
 * Three batches can be in flight: one that sends, one that receives, one that waits for the status (a unary call has
 * everything in the last). Their completions run on the library's thread. The call is closed when the status is there
 * and the other two are back; it stays in the client's list until its last reference goes. One that gRPC doesn't end
 * is abandoned: to its owner it is closed, and no event of it is told any more.
 */
#include <assert.h>
#include <stdlib.h>

#include "client/internal.h"

static const char *const method_names[kvp_method_count] = {
    [KVP_METHOD_GET_SERVER_INFO] = "GetServerInfo",
    [KVP_METHOD_CREATE_POOL] = "CreatePool",
    [KVP_METHOD_LIST_POOLS] = "ListPools",
    [KVP_METHOD_DESCRIBE_POOL] = "DescribePool",
    [KVP_METHOD_DELETE_POOL] = "DeletePool",
    [KVP_METHOD_OPEN_SESSION] = "OpenSession",
    [KVP_METHOD_CLOSE_SESSION] = "CloseSession",
    [KVP_METHOD_LIST_SESSIONS] = "ListSessions",
    [KVP_METHOD_ALLOCATE_BLOCKS] = "AllocateBlocks",
    [KVP_METHOD_ALLOCATE_BLOCK_RANGE] = "AllocateBlockRange",
    [KVP_METHOD_FREE_BLOCKS] = "FreeBlocks",
    [KVP_METHOD_CREATE_BUFFER] = "CreateBuffer",
    [KVP_METHOD_WRITE_BUFFER] = "WriteBuffer",
    [KVP_METHOD_READ_BUFFER] = "ReadBuffer",
    [KVP_METHOD_RELEASE_BUFFER] = "ReleaseBuffer",
    [KVP_METHOD_STEPS] = "Steps",
    [KVP_METHOD_RUN_STEP] = "RunStep",
    [KVP_METHOD_STORE_ROWS] = "StoreRows",
    [KVP_METHOD_LOAD_ROWS] = "LoadRows",
    [KVP_METHOD_LIST_BLOCKS] = "ListBlocks",
    [KVP_METHOD_INSPECT_RECORDS] = "InspectRecords",
    [KVP_METHOD_DUMP_BLOCKS] = "DumpBlocks",
};

const char *kvp_method_name(enum kvp_method method) {
  return method_names[method];
}

void kvp_call_ref(struct kvp_call *call) {
  atomic_fetch_add_explicit(&call->references, 1, memory_order_relaxed);
}

/* Off the client's list, whose destroy may be cancelling what is on it, only after gRPC's call is gone: when the list
 * is empty nothing of gRPC is in use any more. */
static void call_unlink(struct kvp_call *call) {
  kvpool_client *client = call->client;
  pthread_mutex_lock(&client->lock);
  grpc_call_unref(call->call);
  if (call->previous != NULL) {
    call->previous->next = call->next;
  } else {
    client->calls = call->next;
  }
  if (call->next != NULL) {
    call->next->previous = call->previous;
  }
  if (client->calls == NULL) {
    pthread_cond_broadcast(&client->drained);
  }
  if (client->calls == NULL && client->left_behind) {
    grpc_completion_queue_shutdown(client->completions);
  }
  pthread_mutex_unlock(&client->lock);
}

void kvp_call_unref(struct kvp_call *call) {
  if (call == NULL || atomic_fetch_sub_explicit(&call->references, 1, memory_order_acq_rel) != 1) {
    return;
  }
  kvpool_client *client = call->client;
  grpc_byte_buffer_destroy(call->incoming);
  grpc_byte_buffer_destroy(call->outgoing);
  grpc_metadata_array_destroy(&call->initial);
  grpc_metadata_array_destroy(&call->trailing);
  grpc_slice_unref(call->details);
  call_unlink(call);
  kvp_sync_deinit(&call->lock, &call->changed);
  free(call);
  kvp_client_unref(client);
}

/* A batch is back and its events are told. */
static void call_batch_done(struct kvp_call *call) {
  pthread_mutex_lock(&call->lock);
  call->batches--;
  bool is_last = call->over && call->batches == 0;
  if (is_last) {
    call->closed = true;
    pthread_cond_broadcast(&call->changed);
  }
  pthread_mutex_unlock(&call->lock);
  if (is_last) {
    if (call->events != NULL && !call->abandoned) {
      call->events->on_closed(call->object, call);
    }
    kvp_call_unref(call);
  }
}

static void call_on_sent(struct kvp_call *call, bool ok) {
  (void)ok; /* a send that failed is followed by the status, which says why */
  pthread_mutex_lock(&call->lock);
  grpc_byte_buffer *sent = call->outgoing;
  call->outgoing = NULL;
  call->sending = false;
  pthread_cond_broadcast(&call->changed);
  pthread_mutex_unlock(&call->lock);
  grpc_byte_buffer_destroy(sent);
  if (call->events != NULL && call->events->on_sent != NULL && !call->abandoned) {
    call->events->on_sent(call->object);
  }
  call_batch_done(call);
}

static void call_on_received(struct kvp_call *call, bool ok) {
  (void)ok; /* no message then */
  grpc_byte_buffer *message = NULL;
  pthread_mutex_lock(&call->lock);
  call->receiving = false;
  if (call->events != NULL) {
    message = call->incoming;
    call->incoming = NULL;
  }
  pthread_cond_broadcast(&call->changed);
  pthread_mutex_unlock(&call->lock);
  if (message != NULL && !call->abandoned) {
    call->events->on_message(call->object, message);
  } else {
    grpc_byte_buffer_destroy(message);
  }
  call_batch_done(call);
}

static void call_on_ended(struct kvp_call *call, bool ok) {
  (void)ok; /* always true for a status */
  pthread_mutex_lock(&call->lock);
  call->over = true;
  pthread_cond_broadcast(&call->changed);
  pthread_mutex_unlock(&call->lock);
  call_batch_done(call);
}

static void call_on_given_up(struct kvp_call *call, bool ok) {
  (void)ok;
  kvpool_client *client = call->client;
  if (!call->closed) { /* written by this thread only */
    call->abandoned = true;
    call->events->on_closed(call->object, call);
  }
  pthread_mutex_lock(&client->lock);
  client->abandoning--;
  pthread_cond_broadcast(&client->drained);
  pthread_mutex_unlock(&client->lock);
  kvp_call_unref(call);
}

/* While not READY gRPC either fails a call at once, although the daemon may be back, or waits although nobody is
 * there; asking the socket decides which is right. */
static kvpool_status connection_check(kvpool_client *client, bool waits, uint32_t *start_flags, kvpool_error *error) {
  *start_flags = 0;
  if (grpc_channel_check_connectivity_state(client->channel, 0) == GRPC_CHANNEL_READY) {
    return KVPOOL_OK;
  }
  kvpool_status status = kvp_client_probe(client, error);
  if (status == KVPOOL_OK && waits) {
    grpc_channel_reset_connect_backoff(client->channel);
    *start_flags = GRPC_INITIAL_METADATA_WAIT_FOR_READY | GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
  }
  return status;
}

/* The lock is held: the channel can't go away meanwhile. */
static void call_link(kvpool_client *client, struct kvp_call *call) {
  call->call =
      grpc_channel_create_registered_call(client->channel, NULL, GRPC_PROPAGATE_DEFAULTS, client->completions,
                                          client->methods[call->method], gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
  call->next = client->calls;
  if (client->calls != NULL) {
    client->calls->previous = call;
  }
  client->calls = call;
}

kvpool_status kvp_call_new(kvpool_client *client, enum kvp_method method, const struct kvp_call_events *events,
                           void *object, struct kvp_call **out, kvpool_error *error) {
  kvpool_status status = kvp_client_check_process(client, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  struct kvp_call *call = calloc(1, sizeof *call);
  if (call == NULL) {
    return kvp_fail_no_memory(error);
  }
  call->client = client;
  call->method = method;
  call->events = events;
  call->object = object;
  call->sent = (struct kvp_tag){.run = call_on_sent, .call = call};
  call->received = (struct kvp_tag){.run = call_on_received, .call = call};
  call->ended = (struct kvp_tag){.run = call_on_ended, .call = call};
  call->given_up = (struct kvp_tag){.run = call_on_given_up, .call = call};
  call->details = grpc_empty_slice();
  grpc_metadata_array_init(&call->initial);
  grpc_metadata_array_init(&call->trailing);
  pthread_mutex_lock(&client->lock);
  if (client->closing) {
    status = kvp_fail(error, KVPOOL_DISCONNECTED, "%s: the client has been destroyed", kvp_method_name(method));
  } else {
    /* A queue is of a session, which ended with the connection that it was opened on. */
    status = connection_check(client, method != KVP_METHOD_STEPS, &call->start_flags, error);
  }
  if (status == KVPOOL_OK) {
    call_link(client, call);
  }
  pthread_mutex_unlock(&client->lock);
  if (status != KVPOOL_OK) {
    free(call);
    return status;
  }
  kvp_client_ref(client);
  kvp_sync_init(&call->lock, &call->changed);
  atomic_init(&call->references, 2); /* the caller, and the call itself until it closes */
  *out = call;
  return KVPOOL_OK;
}

static void call_start_batch(struct kvp_call *call, const grpc_op *ops, size_t count, struct kvp_tag *tag) {
  atomic_fetch_add_explicit(&call->client->handovers, 1, memory_order_release);
  grpc_call_error failed = grpc_call_start_batch(call->call, ops, count, tag, NULL);
  assert(failed == GRPC_CALL_OK);
}

static grpc_op op_header(const struct kvp_call *call) {
  return (grpc_op){.op = GRPC_OP_SEND_INITIAL_METADATA, .flags = call->start_flags};
}

static grpc_op op_receive_header(struct kvp_call *call) {
  grpc_op op = {.op = GRPC_OP_RECV_INITIAL_METADATA};
  op.data.recv_initial_metadata.recv_initial_metadata = &call->initial;
  return op;
}

static grpc_op op_message(grpc_byte_buffer *message) {
  grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};
  op.data.send_message.send_message = message;
  return op;
}

static grpc_op op_receive(struct kvp_call *call) {
  grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
  op.data.recv_message.recv_message = &call->incoming;
  return op;
}

static grpc_op op_status(struct kvp_call *call) {
  grpc_op op = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
  op.data.recv_status_on_client.trailing_metadata = &call->trailing;
  op.data.recv_status_on_client.status = &call->code;
  op.data.recv_status_on_client.status_details = &call->details;
  return op;
}

void kvp_call_start_unary(struct kvp_call *call, grpc_byte_buffer *request) {
  const grpc_op ops[] = {op_header(call),         op_message(request), {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
                         op_receive_header(call), op_receive(call),    op_status(call)};
  pthread_mutex_lock(&call->lock);
  call->outgoing = request;
  call->batches = 1;
  pthread_mutex_unlock(&call->lock);
  call_start_batch(call, ops, sizeof ops / sizeof ops[0], &call->ended);
}

void kvp_call_start_stream(struct kvp_call *call, grpc_byte_buffer *first, bool last) {
  const grpc_op status[] = {op_status(call)};
  const grpc_op receive[] = {op_receive_header(call), op_receive(call)};
  grpc_op send[3] = {op_header(call)};
  size_t send_count = 1;
  if (first != NULL) {
    send[send_count++] = op_message(first);
  }
  if (last) {
    send[send_count++] = (grpc_op){.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
  }
  pthread_mutex_lock(&call->lock);
  call->outgoing = first;
  call->batches = 3;
  call->sending = true;
  call->receiving = true;
  pthread_mutex_unlock(&call->lock);
  call_start_batch(call, status, 1, &call->ended);
  call_start_batch(call, send, send_count, &call->sent);
  call_start_batch(call, receive, 2, &call->received);
}

bool kvp_call_send(struct kvp_call *call, grpc_byte_buffer *message, bool last) {
  assert(message != NULL || last);
  grpc_op ops[2];
  size_t count = 0;
  if (message != NULL) {
    ops[count++] = op_message(message);
  }
  if (last) {
    ops[count++] = (grpc_op){.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
  }
  pthread_mutex_lock(&call->lock);
  bool may_send = !call->over;
  if (may_send) {
    assert(!call->sending);
    call->outgoing = message;
    call->sending = true;
    call->batches++;
  }
  pthread_mutex_unlock(&call->lock);
  if (may_send) {
    call_start_batch(call, ops, count, &call->sent);
  } else {
    grpc_byte_buffer_destroy(message);
  }
  return may_send;
}

bool kvp_call_receive(struct kvp_call *call) {
  pthread_mutex_lock(&call->lock);
  bool may_receive = !call->over;
  if (may_receive) {
    assert(!call->receiving && call->incoming == NULL);
    call->receiving = true;
    call->batches++;
  }
  pthread_mutex_unlock(&call->lock);
  if (may_receive) {
    const grpc_op ops[] = {op_receive(call)};
    call_start_batch(call, ops, 1, &call->received);
  }
  return may_receive;
}

void kvp_call_cancel(struct kvp_call *call) {
  grpc_call_cancel(call->call, NULL);
}

/* False: its last reference is gone, and it is about to leave the list. */
static bool call_ref_if_alive(struct kvp_call *call) {
  unsigned count = atomic_load_explicit(&call->references, memory_order_relaxed);
  while (count > 0 && !atomic_compare_exchange_weak_explicit(&call->references, &count, count + 1,
                                                             memory_order_relaxed, memory_order_relaxed)) {
  }
  return count > 0;
}

/* A watch of the channel whose time is over at once is how the library thread is told something. */
static void call_give_up(struct kvp_call *call) {
  kvpool_client *client = call->client;
  if (call->events == NULL || atomic_exchange(&call->abandoning, true) || !call_ref_if_alive(call)) {
    return;
  }
  client->abandoning++;
  atomic_fetch_add_explicit(&client->handovers, 1, memory_order_release);
  grpc_channel_watch_connectivity_state(client->channel, grpc_channel_check_connectivity_state(client->channel, 0),
                                        gpr_inf_past(GPR_CLOCK_REALTIME), client->completions, &call->given_up);
}

void kvp_call_abandon(struct kvp_call *call) {
  pthread_mutex_lock(&call->client->lock);
  call_give_up(call);
  pthread_mutex_unlock(&call->client->lock);
}

void kvp_call_abandon_all(kvpool_client *client) {
  for (struct kvp_call *call = client->calls; call != NULL; call = call->next) {
    call_give_up(call);
  }
}

void kvp_call_interrupt_all(kvpool_client *client) {
  for (struct kvp_call *call = client->calls; call != NULL; call = call->next) {
    grpc_call_cancel(call->call, NULL);
    call_give_up(call);
    if (call->events == NULL) {
      pthread_mutex_lock(&call->lock);
      call->interrupted = true;
      pthread_cond_broadcast(&call->changed);
      pthread_mutex_unlock(&call->lock);
    }
  }
}

kvpool_status kvp_call_error(const struct kvp_call *call, kvpool_error *error) {
  if (call->abandoned) {
    return kvp_fail(error, KVPOOL_CANCELLED,
                    "%s: the call was cancelled; kvpoold at %s doesn't take what it was sent",
                    kvp_method_name(call->method), kvp_client_path(call->client));
  }
  if (call->code == GRPC_STATUS_OK) {
    return KVPOOL_OK;
  }
  return kvp_fail_grpc(error, kvp_method_name(call->method), kvp_client_path(call->client), call->code, call->details,
                       &call->trailing);
}

static bool is_sent(const struct kvp_call *call) {
  return !call->sending;
}

static bool is_received(const struct kvp_call *call) {
  return !call->receiving;
}

static bool is_closed(const struct kvp_call *call) {
  return call->closed;
}

struct kvp_patience kvp_patience_of(const kvpool_client *client) {
  uint32_t timeout_ms = kvp_client_timeout_ms(client);
  return (struct kvp_patience){
      .deadline = kvp_deadline_after(timeout_ms), .timeout_ms = timeout_ms, .nap_ms = kvp_client_nap_first_ms};
}

/* The socket is asked again for as long as a call waits to be connected: whoever listened may be gone. */
static kvpool_status reachable_check(const struct kvp_call *call, kvpool_error *error) {
  if (grpc_channel_check_connectivity_state(call->client->channel, 0) == GRPC_CHANNEL_READY) {
    return KVPOOL_OK;
  }
  return kvp_client_probe(call->client, error);
}

kvpool_status kvp_patience_wait(struct kvp_patience *patience, struct kvp_call *call, pthread_cond_t *changed,
                                pthread_mutex_t *lock, kvpool_error *error) {
  const struct timespec nap = kvp_deadline_after(patience->nap_ms);
  bool naps = call->start_flags != 0;
  bool nap_is_last = nap.tv_sec > patience->deadline.tv_sec ||
                     (nap.tv_sec == patience->deadline.tv_sec && nap.tv_nsec >= patience->deadline.tv_nsec);
  bool in_time = kvp_sync_wait(changed, lock, naps && !nap_is_last ? &nap : &patience->deadline);
  if (call->interrupted) {
    return kvp_fail(error, KVPOOL_CANCELLED, "%s: the call was cancelled", kvp_method_name(call->method));
  }
  if (in_time) {
    return KVPOOL_OK;
  }
  if (kvp_deadline_passed(&patience->deadline)) {
    return kvp_fail(error, KVPOOL_DEADLINE_EXCEEDED, "%s: no answer from kvpoold at %s within %u ms",
                    kvp_method_name(call->method), kvp_client_path(call->client), patience->timeout_ms);
  }
  patience->nap_ms = 2 * patience->nap_ms > kvp_client_nap_max_ms ? kvp_client_nap_max_ms : 2 * patience->nap_ms;
  pthread_mutex_unlock(lock);
  kvpool_status status = reachable_check(call, error);
  pthread_mutex_lock(lock);
  return status;
}

static kvpool_status call_wait(struct kvp_call *call, bool (*condition)(const struct kvp_call *),
                               kvpool_error *error) {
  struct kvp_patience patience = kvp_patience_of(call->client);
  kvpool_status status = KVPOOL_OK;
  pthread_mutex_lock(&call->lock);
  while (!condition(call) && status == KVPOOL_OK) {
    status = call->interrupted
                 ? kvp_fail(error, KVPOOL_CANCELLED, "%s: the call was cancelled", kvp_method_name(call->method))
                 : kvp_patience_wait(&patience, call, &call->changed, &call->lock, error);
  }
  bool is_true = condition(call);
  pthread_mutex_unlock(&call->lock);
  if (is_true) {
    return KVPOOL_OK;
  }
  kvp_call_cancel(call);
  return status;
}

kvpool_status kvp_call_wait_sent(struct kvp_call *call, kvpool_error *error) {
  return call_wait(call, is_sent, error);
}

kvpool_status kvp_call_wait_message(struct kvp_call *call, grpc_byte_buffer **out, kvpool_error *error) {
  kvpool_status status = call_wait(call, is_received, error);
  if (status == KVPOOL_OK) {
    pthread_mutex_lock(&call->lock);
    *out = call->incoming;
    call->incoming = NULL;
    pthread_mutex_unlock(&call->lock);
  }
  return status;
}

kvpool_status kvp_call_wait_closed(struct kvp_call *call, kvpool_error *error) {
  kvpool_status status = call_wait(call, is_closed, error);
  return status == KVPOOL_OK ? kvp_call_error(call, error) : status;
}

kvpool_status kvp_call_malformed(enum kvp_method method, kvpool_error *error) {
  return kvp_fail(error, KVPOOL_MALFORMED, "%s: the daemon's answer can't be decoded", kvp_method_name(method));
}

kvpool_status kvp_call_unary_packed(kvpool_client *client, enum kvp_method method, grpc_byte_buffer *request,
                                    const ProtobufCMessageDescriptor *response, ProtobufCMessage **out,
                                    kvpool_error *error) {
  struct kvp_call *call = NULL;
  kvpool_status status = kvp_client_check_may_block(kvp_method_name(method), error);
  if (status == KVPOOL_OK) {
    status = kvp_call_new(client, method, NULL, NULL, &call, error);
  }
  if (status != KVPOOL_OK) {
    grpc_byte_buffer_destroy(request);
    return status;
  }
  kvp_call_start_unary(call, request);
  status = kvp_call_wait_closed(call, error);
  if (status == KVPOOL_OK) {
    ProtobufCMessage *message = call->incoming == NULL ? NULL : kvp_message_unpack(call->incoming, response);
    if (message == NULL) {
      status = kvp_call_malformed(method, error);
    } else {
      *out = message;
    }
  }
  kvp_call_unref(call);
  return status;
}

kvpool_status kvp_call_unary(kvpool_client *client, enum kvp_method method, const ProtobufCMessage *request,
                             const ProtobufCMessageDescriptor *response, ProtobufCMessage **out,
                             kvpool_error *error) {
  return kvp_call_unary_packed(client, method, kvp_message_pack(request, NULL), response, out, error);
}
