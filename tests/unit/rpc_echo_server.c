/* A server on the gRPC layer with a method of each shape, for tests/e2e/test_rpc_layer.py. It is no daemon: the
 * messages of kvpool.v1 are only borrowed.
 *
 *   rpc_echo_server SOCKET MODE LOCK CONNECTIONS_MAX
 *
 * Says "ready" on standard output, drains on SIGUSR1, stops on SIGTERM and then says "stopped".
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "kvpool.pb-c.h"
#include "proto/limits.h"
#include "server/log.h"
#include "server/supervisor/rpc.h"

enum { dump_chunk_bytes = 65536 };

/* What happened to a method's calls. */
struct counters {
  const char *method;
  uint64_t messages;
  uint64_t half_closes;
  uint64_t closed;
};

static struct counters counters_of[] = {{.method = "RunStep"},    {.method = "OpenSession"},
                                        {.method = "ReadBuffer"}, {.method = "WriteBuffer"},
                                        {.method = "Steps"},      {.method = "DumpBlocks"}};
enum { RUN_STEP, OPEN_SESSION, READ_BUFFER, WRITE_BUFFER, STEPS, DUMP_BLOCKS, counters_count };

static struct kvp_rpc_server *server;
static uv_signal_t signals[2];
static uint8_t chunk[kvp_chunk_bytes_max];

static void count(unsigned method, const struct kvp_rpc_message *message) {
  if (message == NULL) {
    counters_of[method].half_closes++;
  } else {
    counters_of[method].messages++;
  }
}

/* ---- unary ---- */

static void on_get_server_info(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  (void)message;
  Kvpool__V1__ServerInfo info = KVPOOL__V1__SERVER_INFO__INIT;
  info.pid = (uint64_t)getpid();
  kvp_rpc_call_finish(call, &info.base);
  kvp_rpc_call_finish(call, &info.base); /* allowed, and does nothing */
}

static void on_create_pool(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  const Kvpool__V1__CreatePoolRequest *request = (const Kvpool__V1__CreatePoolRequest *)message->body;
  Kvpool__V1__Pool pool = KVPOOL__V1__POOL__INIT;
  pool.spec = request->spec;
  pool.bytes_per_placement = message->wire_bytes;
  kvp_rpc_call_finish(call, &pool.base);
}

/* Fails with status pool_id and the text `name`. */
static void on_describe_pool(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  const Kvpool__V1__DescribePoolRequest *request = (const Kvpool__V1__DescribePoolRequest *)message->body;
  struct kvp_error error;
  (void)kvp_error_set_at(&error, (enum kvp_status)request->pool_id, 3, "slots", 17, -5, "%s", request->name);
  kvp_rpc_call_fail(call, &error);
}

static void on_delete_pool(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  (void)message;
  Kvpool__V1__DeletePoolResponse reply = KVPOOL__V1__DELETE_POOL_RESPONSE__INIT;
  kvp_rpc_call_finish(call, &reply.base);
}

/* Never answers; keeps call and message beyond the call's end. */
struct held {
  struct kvp_rpc_call *call;
  struct kvp_rpc_message *message;
};

static void on_run_step(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  count(RUN_STEP, message);
  struct held *held = malloc(sizeof *held);
  if (held == NULL) {
    abort();
  }
  held->call = kvp_rpc_call_ref(call);
  held->message = kvp_rpc_message_ref(message);
  kvp_rpc_call_set_state(call, held);
}

static void on_run_step_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  counters_of[RUN_STEP].closed++;
  struct held *held = kvp_rpc_call_state(call);
  Kvpool__V1__StepDone done = KVPOOL__V1__STEP_DONE__INIT;
  kvp_rpc_call_finish(held->call, &done.base); /* too late: nothing happens */
  kvp_rpc_message_unref(held->message);
  kvp_rpc_call_unref(held->call);
  free(held);
}

/* First the caller (and, as `buffers`, the open calls), then a line per method: messages in session_id, half-closes
 * in steps_done, calls closed in steps_refused. */
static void on_list_sessions(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  (void)message;
  char caller[] = "caller";
  Kvpool__V1__SessionInfo infos[counters_count + 1];
  Kvpool__V1__SessionInfo *pointers[counters_count + 1];
  for (unsigned i = 0; i <= counters_count; i++) {
    kvpool__v1__session_info__init(&infos[i]);
    pointers[i] = &infos[i];
  }
  infos[0].name = caller;
  infos[0].peer_pid = (uint32_t)kvp_rpc_call_peer(call)->pid;
  infos[0].peer_uid = kvp_rpc_call_peer(call)->uid;
  infos[0].buffers = kvp_rpc_server_open_calls(server);
  for (unsigned i = 0; i < counters_count; i++) {
    infos[i + 1].name = (char *)counters_of[i].method;
    infos[i + 1].session_id = counters_of[i].messages;
    infos[i + 1].steps_done = counters_of[i].half_closes;
    infos[i + 1].steps_refused = counters_of[i].closed;
  }
  Kvpool__V1__ListSessionsResponse reply = KVPOOL__V1__LIST_SESSIONS_RESPONSE__INIT;
  reply.sessions = pointers;
  reply.n_sessions = counters_count + 1;
  kvp_rpc_call_finish(call, &reply.base);
}

/* ---- server stream ---- */

/* Three events. Named "closing", it fails right behind them; else it stays open. */
static void on_open_session(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  count(OPEN_SESSION, message);
  const Kvpool__V1__OpenSessionRequest *request = (const Kvpool__V1__OpenSessionRequest *)message->body;
  for (uint64_t i = 0; i < 3; i++) {
    Kvpool__V1__SessionOpened opened = KVPOOL__V1__SESSION_OPENED__INIT;
    Kvpool__V1__SessionEvent event = KVPOOL__V1__SESSION_EVENT__INIT;
    opened.epoch = i;
    event.event_case = KVPOOL__V1__SESSION_EVENT__EVENT_OPENED;
    event.opened = &opened;
    (void)kvp_rpc_call_send(call, &event.base);
  }
  if (strcmp(request->name, "closing") == 0) {
    struct kvp_error error;
    (void)kvp_error_set(&error, KVP_SHUTTING_DOWN, "closed behind %d events", 3);
    kvp_rpc_call_fail(call, &error);
  }
}

static void on_open_session_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  (void)call;
  counters_of[OPEN_SESSION].closed++;
}

struct reading {
  uint64_t offset_bytes;
  uint64_t end_bytes;
};

static void read_buffer_go_on(struct kvp_rpc_call *call) {
  struct reading *reading = kvp_rpc_call_state(call);
  while (reading->offset_bytes < reading->end_bytes) {
    if (kvp_rpc_call_queued_bytes(call) >= kvp_rpc_high_water_bytes) {
      return;
    }
    const uint64_t left_bytes = reading->end_bytes - reading->offset_bytes;
    Kvpool__V1__BytesChunk piece = KVPOOL__V1__BYTES_CHUNK__INIT;
    piece.offset_bytes = reading->offset_bytes;
    piece.data.data = chunk;
    piece.data.len = left_bytes < sizeof chunk ? left_bytes : sizeof chunk;
    if (!kvp_rpc_call_send(call, &piece.base)) {
      return;
    }
    reading->offset_bytes += piece.data.len;
  }
  kvp_rpc_call_finish(call, NULL);
}

static void on_read_buffer(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  count(READ_BUFFER, message);
  const Kvpool__V1__ReadBufferRequest *request = (const Kvpool__V1__ReadBufferRequest *)message->body;
  struct reading *reading = malloc(sizeof *reading);
  if (reading == NULL) {
    abort();
  }
  *reading = (struct reading){request->offset_bytes, request->offset_bytes + request->bytes};
  kvp_rpc_call_set_state(call, reading);
  read_buffer_go_on(call);
}

static void on_read_buffer_writable(void *context, struct kvp_rpc_call *call) {
  (void)context;
  read_buffer_go_on(call);
}

static void on_read_buffer_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  counters_of[READ_BUFFER].closed++;
  free(kvp_rpc_call_state(call));
}

/* `count` chunks at once, whatever the high-water mark says, and the end right behind them. */
static void on_dump_blocks(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  count(DUMP_BLOCKS, message);
  const Kvpool__V1__DumpBlocksRequest *request = (const Kvpool__V1__DumpBlocksRequest *)message->body;
  for (uint32_t i = 0; i < request->count; i++) {
    Kvpool__V1__BytesChunk piece = KVPOOL__V1__BYTES_CHUNK__INIT;
    piece.offset_bytes = (uint64_t)i * dump_chunk_bytes;
    piece.data.data = chunk;
    piece.data.len = dump_chunk_bytes;
    (void)kvp_rpc_call_send(call, &piece.base);
  }
  kvp_rpc_call_finish(call, NULL);
}

static void on_dump_blocks_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  (void)call;
  counters_of[DUMP_BLOCKS].closed++;
}

/* ---- client stream ---- */

static void on_write_buffer(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  count(WRITE_BUFFER, message);
  uint64_t *bytes = kvp_rpc_call_state(call);
  if (bytes == NULL) {
    bytes = calloc(1, sizeof *bytes);
    kvp_rpc_call_set_state(call, bytes);
  }
  if (bytes == NULL) {
    abort();
  }
  if (message != NULL) {
    *bytes += ((const Kvpool__V1__WriteBufferRequest *)message->body)->data.len;
    kvp_rpc_call_read_next(call);
    return;
  }
  Kvpool__V1__WriteBufferResponse reply = KVPOOL__V1__WRITE_BUFFER_RESPONSE__INIT;
  reply.bytes_written = *bytes;
  kvp_rpc_call_finish(call, &reply.base);
}

static void on_write_buffer_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  counters_of[WRITE_BUFFER].closed++;
  free(kvp_rpc_call_state(call));
}

/* Answers the first message, while the client still sends. */
static void on_store_rows(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  (void)message;
  Kvpool__V1__StepDone done = KVPOOL__V1__STEP_DONE__INIT;
  done.step_id = 1;
  kvp_rpc_call_finish(call, &done.base);
}

/* ---- both ---- */

/* Echoes step_id; step 0 never gets the next message read; UINT64_MAX fails the stream. */
static void on_steps(void *context, struct kvp_rpc_call *call, struct kvp_rpc_message *message) {
  (void)context;
  count(STEPS, message);
  if (message == NULL) {
    kvp_rpc_call_finish(call, NULL);
    return;
  }
  const uint64_t step_id = ((const Kvpool__V1__StepRequest *)message->body)->step_id;
  if (step_id == UINT64_MAX) {
    struct kvp_error error;
    (void)kvp_error_set(&error, KVP_BUSY, "step %" PRIu64, step_id);
    kvp_rpc_call_fail(call, &error);
    kvp_rpc_call_read_next(call); /* allowed, and does nothing */
    return;
  }
  Kvpool__V1__StepDone done = KVPOOL__V1__STEP_DONE__INIT;
  Kvpool__V1__StepEvent event = KVPOOL__V1__STEP_EVENT__INIT;
  done.step_id = step_id;
  event.event_case = KVPOOL__V1__STEP_EVENT__EVENT_DONE;
  event.done = &done;
  (void)kvp_rpc_call_send(call, &event.base);
  if (step_id != 0) {
    kvp_rpc_call_read_next(call);
  }
}

static void on_steps_closed(void *context, struct kvp_rpc_call *call) {
  (void)context;
  (void)call;
  counters_of[STEPS].closed++;
}

/* ---- the program ---- */

static const struct kvp_rpc_method methods[] = {
    {.name = "GetServerInfo",
     .request = &kvpool__v1__get_server_info_request__descriptor,
     .on_message = on_get_server_info},
    {.name = "CreatePool", .request = &kvpool__v1__create_pool_request__descriptor, .on_message = on_create_pool},
    {.name = "DescribePool",
     .request = &kvpool__v1__describe_pool_request__descriptor,
     .on_message = on_describe_pool},
    {.name = "DeletePool",
     .operator_only = true,
     .request = &kvpool__v1__delete_pool_request__descriptor,
     .on_message = on_delete_pool},
    {.name = "ListSessions",
     .request = &kvpool__v1__list_sessions_request__descriptor,
     .on_message = on_list_sessions},
    {.name = "RunStep",
     .request = &kvpool__v1__step_request__descriptor,
     .on_message = on_run_step,
     .on_closed = on_run_step_closed},
    {.name = "OpenSession",
     .shape = KVP_RPC_SERVER_STREAM,
     .request = &kvpool__v1__open_session_request__descriptor,
     .on_message = on_open_session,
     .on_closed = on_open_session_closed},
    {.name = "ReadBuffer",
     .shape = KVP_RPC_SERVER_STREAM,
     .request = &kvpool__v1__read_buffer_request__descriptor,
     .on_message = on_read_buffer,
     .on_closed = on_read_buffer_closed,
     .on_writable = on_read_buffer_writable},
    {.name = "DumpBlocks",
     .shape = KVP_RPC_SERVER_STREAM,
     .request = &kvpool__v1__dump_blocks_request__descriptor,
     .on_message = on_dump_blocks,
     .on_closed = on_dump_blocks_closed},
    {.name = "WriteBuffer",
     .shape = KVP_RPC_CLIENT_STREAM,
     .request = &kvpool__v1__write_buffer_request__descriptor,
     .on_message = on_write_buffer,
     .on_closed = on_write_buffer_closed},
    {.name = "StoreRows",
     .shape = KVP_RPC_CLIENT_STREAM,
     .request = &kvpool__v1__store_rows_request__descriptor,
     .on_message = on_store_rows},
    {.name = "Steps",
     .shape = KVP_RPC_BIDI,
     .request = &kvpool__v1__step_request__descriptor,
     .on_message = on_steps,
     .on_closed = on_steps_closed},
};

static void on_stopped(void *context) {
  (void)context;
  uv_close((uv_handle_t *)&signals[0], NULL);
  uv_close((uv_handle_t *)&signals[1], NULL);
}

static void on_signal(uv_signal_t *handle, int number) {
  (void)handle;
  if (number == SIGUSR1) {
    kvp_rpc_server_drain(server);
  } else {
    kvp_rpc_server_stop(server, on_stopped);
  }
}

static int run(uv_loop_t *loop, const struct kvp_rpc_server_options *options) {
  struct kvp_error error;
  if (kvp_rpc_server_start(loop, options, &server, &error) != KVP_OK) {
    (void)fprintf(stderr, "%s: %s\n", kvp_status_name((enum kvp_status)error.status), error.text);
    (void)uv_run(loop, UV_RUN_DEFAULT);
    return EXIT_FAILURE;
  }
  static const int numbers[] = {SIGUSR1, SIGTERM};
  for (int i = 0; i < 2; i++) {
    (void)uv_signal_init(loop, &signals[i]);
    (void)uv_signal_start(&signals[i], on_signal, numbers[i]);
  }
  (void)puts("ready");
  (void)fflush(stdout);
  (void)uv_run(loop, UV_RUN_DEFAULT);
  (void)puts("stopped");
  return EXIT_SUCCESS;
}

int main(int argument_count, char **arguments) {
  if (argument_count != 5) {
    (void)fprintf(stderr, "usage: %s SOCKET MODE LOCK CONNECTIONS_MAX\n", arguments[0]);
    return 2;
  }
  const struct kvp_rpc_server_options options = {
      .socket_path = arguments[1],
      .socket_mode = (uint32_t)strtoul(arguments[2], NULL, 8),
      .lock_path = arguments[3],
      .package_service = "kvpool.v1.Kvpool",
      .methods = methods,
      .method_count = sizeof methods / sizeof methods[0],
      .connections_max = (uint32_t)strtoul(arguments[4], NULL, 10),
  };
  (void)signal(SIGPIPE, SIG_IGN);
  uv_loop_t loop;
  if (uv_loop_init(&loop) != 0) {
    return EXIT_FAILURE;
  }
  const int status = run(&loop, &options);
  if (uv_loop_close(&loop) != 0) {
    (void)fprintf(stderr, "handles are still open\n");
    return EXIT_FAILURE;
  }
  return status;
}
