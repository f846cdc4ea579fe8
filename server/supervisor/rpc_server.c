/* The gRPC server: starts and stops it, runs the completion-queue thread, carries events to the loop.
 *
 * The end is a chain, each step begun by the one before it, on the loop: gRPC's server is shut down and the last call
 * closed -> the completion queue is drained and its thread ends -> gRPC itself is shut down; connections' watchers,
 * socket and lock are closed -> the last handle is closed, `stopped` is called.
 */
#include "server/supervisor/rpc_internal.h"

#include <assert.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/limits.h"
#include "server/log.h"

enum {
  armed_per_method = 8, /* calls gRPC can hand over before the completion-queue thread has asked for the next */
  concurrent_streams_max = 1024,
  keepalive_time_ms = 20000,
  keepalive_timeout_ms = 10000,
  client_ping_interval_ms_min = 1000, /* clients may look for a dead daemon as often as this */
  method_path_bytes_max = 160,
};

/* ---- events ---- */

void kvp_rpc_server_post(struct kvp_rpc_server *server, struct kvp_rpc_event *event) {
  struct kvp_rpc_event *newest = atomic_load_explicit(&server->posted, memory_order_relaxed);
  do {
    event->next = newest;
  } while (!atomic_compare_exchange_weak_explicit(&server->posted, &newest, event, memory_order_acq_rel,
                                                  memory_order_relaxed));
  if (newest == NULL) {
    (void)uv_async_send(&server->wake);
  }
}

static void on_wake(uv_async_t *handle) {
  struct kvp_rpc_server *server = handle->data;
  struct kvp_rpc_event *newest = atomic_exchange_explicit(&server->posted, NULL, memory_order_acq_rel);
  struct kvp_rpc_event *oldest = NULL;
  while (newest != NULL) {
    struct kvp_rpc_event *next = newest->next;
    newest->next = oldest;
    oldest = newest;
    newest = next;
  }
  while (oldest != NULL) {
    struct kvp_rpc_event *next = oldest->next;
    oldest->deliver(oldest);
    oldest = next;
  }
}

static void take_tags(struct kvp_rpc_server *server) {
  for (;;) {
    const grpc_event done = grpc_completion_queue_next(server->queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    if (done.type == GRPC_QUEUE_SHUTDOWN) {
      return;
    }
    struct kvp_rpc_event *event = done.tag;
    (void)atomic_load_explicit(&event->handed_over, memory_order_acquire);
    event->complete(event, done.success != 0);
  }
}

static void *thread_main(void *argument) {
  struct kvp_rpc_server *server = argument;
  take_tags(server);
  kvp_rpc_server_post(server, &server->thread_over);
  return NULL;
}

/* ---- the end ---- */

static void server_free(struct kvp_rpc_server *server) {
  free(server->slots);
  free(server->package_service);
  free(server);
}

static void on_wake_closed(uv_handle_t *handle) {
  struct kvp_rpc_server *server = handle->data;
  void (*stopped)(void *context) = server->stopped;
  void *context = server->context;
  server_free(server);
  if (stopped != NULL) {
    stopped(context);
  }
}

static void on_listener_closed(void *context) {
  struct kvp_rpc_server *server = context;
  uv_close((uv_handle_t *)&server->wake, on_wake_closed);
}

static void on_listener_closed_early(void *context) {
  server_free(context);
}

static void grpc_side_destroy(struct kvp_rpc_server *server) {
  grpc_completion_queue_destroy(server->queue);
  grpc_server_credentials_release(server->credentials);
  grpc_shutdown_blocking();
}

static void deliver_thread_over(struct kvp_rpc_event *event) {
  struct kvp_rpc_server *server = KVP_RPC_CONTAINER(event, struct kvp_rpc_server, thread_over);
  (void)pthread_join(server->thread, NULL);
  grpc_side_destroy(server);
  kvp_rpc_listener_close(&server->listener, on_listener_closed);
}

static void post_shut_down(struct kvp_rpc_event *event, bool ok) {
  (void)ok;
  kvp_rpc_server_post(KVP_RPC_CONTAINER(event, struct kvp_rpc_server, shut_down), event);
}

/* gRPC tells that it is shut down as soon as its connections are gone; cancelled calls may be open still. */
static void deliver_shut_down(struct kvp_rpc_event *event) {
  kvp_rpc_server_release(KVP_RPC_CONTAINER(event, struct kvp_rpc_server, shut_down));
}

void kvp_rpc_server_release(struct kvp_rpc_server *server) {
  if (atomic_fetch_sub(&server->users, 1) == 1) {
    kvp_rpc_server_post(server, &server->unused);
  }
}

static void deliver_unused(struct kvp_rpc_event *event) {
  struct kvp_rpc_server *server = KVP_RPC_CONTAINER(event, struct kvp_rpc_server, unused);
  grpc_server_destroy(server->grpc);
  grpc_completion_queue_shutdown(server->queue);
}

void kvp_rpc_server_drain(struct kvp_rpc_server *server) {
  server->draining = true;
  kvp_rpc_listener_drain(&server->listener);
}

void kvp_rpc_server_stop(struct kvp_rpc_server *server, void (*stopped)(void *context)) {
  assert(server->stopped == NULL);
  server->stopped = stopped;
  kvp_rpc_server_drain(server);
  atomic_store_explicit(&server->shut_down.handed_over, true, memory_order_release);
  grpc_server_shutdown_and_notify(server->grpc, server->queue, &server->shut_down);
  grpc_server_cancel_all_calls(server->grpc);
}

uint32_t kvp_rpc_server_open_calls(const struct kvp_rpc_server *server) {
  return atomic_load(&server->users) - 1;
}

/* ---- the start ---- */

static void log_of_grpc(gpr_log_func_args *line) {
  /* gRPC's errors are mostly a client's doing, so they are no more than warnings here. */
  const enum kvp_log_level level = line->severity == GPR_LOG_SEVERITY_ERROR ? KVP_LOG_WARNING : KVP_LOG_DEBUG;
  kvp_log(level, "grpc", "file=%s line=%d text=\"%s\"", line->file, line->line, line->message);
}

static void adopt_connection(void *context, int fd) {
  struct kvp_rpc_server *server = context;
  grpc_server_add_channel_from_fd(server->grpc, fd, server->credentials);
}

static grpc_arg integer(const char *key, int value) {
  return (grpc_arg){.type = GRPC_ARG_INTEGER, .key = (char *)key, .value.integer = value};
}

static grpc_server *grpc_server_new(void) {
  grpc_arg list[] = {
      integer(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, kvp_message_bytes_max),
      integer(GRPC_ARG_MAX_CONCURRENT_STREAMS, concurrent_streams_max),
      integer(GRPC_ARG_ALLOW_REUSEPORT, 0),
      /* Identity only: a compressed message would be inflated before its size is checked. */
      integer(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1),
      integer(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
      integer(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_time_ms),
      integer(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_timeout_ms),
      integer(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
      integer(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
      integer(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, client_ping_interval_ms_min),
  };
  const grpc_channel_args arguments = {.num_args = sizeof list / sizeof list[0], .args = list};
  return grpc_server_create(&arguments, NULL);
}

static void *register_method(grpc_server *grpc, const char *service, const struct kvp_rpc_method *method) {
  char path[method_path_bytes_max];
  const int bytes = snprintf(path, sizeof path, "/%s/%s", service, method->name);
  assert(bytes > 0 && bytes < (int)sizeof path);
  const bool streams_requests = method->shape == KVP_RPC_CLIENT_STREAM || method->shape == KVP_RPC_BIDI;
  void *registered = grpc_server_register_method(
      grpc, path, NULL, streams_requests ? GRPC_SRM_PAYLOAD_NONE : GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
  assert(registered != NULL); /* a method twice in the table */
  return registered;
}

static bool slots_new(struct kvp_rpc_server *server, const struct kvp_rpc_server_options *options) {
  server->slot_count = options->method_count + 2;
  server->slots = calloc(server->slot_count, sizeof *server->slots);
  if (server->slots == NULL) {
    return false;
  }
  for (size_t i = 0; i < options->method_count; i++) {
    server->slots[i].method = options->methods[i];
  }
  server->slots[options->method_count].method = kvp_rpc_health_check;
  server->slots[options->method_count + 1].method = (struct kvp_rpc_method){.name = "(unknown)"};
  return true;
}

/* Threads that gRPC starts take over the caller's signal mask, so the caller has all signals blocked. */
static void grpc_side_start(struct kvp_rpc_server *server) {
  gpr_set_log_function(log_of_grpc);
  grpc_init();
  server->grpc = grpc_server_new();
  server->credentials = grpc_insecure_server_credentials_create();
  server->queue = grpc_completion_queue_create_for_next(NULL);
  grpc_server_register_completion_queue(server->grpc, server->queue, NULL);
  const size_t method_count = server->slot_count - 2;
  for (size_t i = 0; i < method_count; i++) {
    server->slots[i].registered = register_method(server->grpc, server->package_service, &server->slots[i].method);
  }
  server->slots[method_count].registered =
      register_method(server->grpc, "grpc.health.v1.Health", &server->slots[method_count].method);
  grpc_server_start(server->grpc);
  for (size_t i = 0; i < server->slot_count; i++) {
    for (int armed = 0; armed < armed_per_method; armed++) {
      kvp_rpc_call_arm(server, &server->slots[i]);
    }
  }
}

static void destroy_now(struct kvp_rpc_event *event, bool ok) {
  (void)ok;
  deliver_unused(&KVP_RPC_CONTAINER(event, struct kvp_rpc_server, shut_down)->unused);
}

/* Undoes grpc_side_start while there is no thread yet: this one takes the tags. */
static void grpc_side_abandon(struct kvp_rpc_server *server) {
  server->shut_down.complete = destroy_now;
  grpc_server_shutdown_and_notify(server->grpc, server->queue, &server->shut_down);
  take_tags(server);
  grpc_side_destroy(server);
}

static enum kvp_status threads_start(struct kvp_rpc_server *server, struct kvp_error *error) {
  sigset_t all;
  sigset_t before;
  (void)sigfillset(&all);
  (void)pthread_sigmask(SIG_SETMASK, &all, &before);
  grpc_side_start(server);
  const int failed = pthread_create(&server->thread, NULL, thread_main, server);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed != 0) {
    grpc_side_abandon(server);
    return kvp_error_set(error, KVP_INTERNAL, "starting the completion-queue thread: %s", strerror(failed));
  }
  (void)pthread_setname_np(server->thread, "kvp-rpc");
  return KVP_OK;
}

enum kvp_status kvp_rpc_server_start(uv_loop_t *loop, const struct kvp_rpc_server_options *options,
                                     struct kvp_rpc_server **out, struct kvp_error *error) {
  struct kvp_rpc_server *server = calloc(1, sizeof *server);
  if (server == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for the gRPC server");
  }
  server->loop = loop;
  server->context = options->context;
  server->is_ready = options->is_ready;
  server->package_service = strdup(options->package_service);
  server->shut_down = (struct kvp_rpc_event){.complete = post_shut_down, .deliver = deliver_shut_down};
  server->unused.deliver = deliver_unused;
  atomic_init(&server->users, 1);
  server->thread_over.deliver = deliver_thread_over;
  enum kvp_status status = KVP_OK;
  if (server->package_service == NULL || !slots_new(server, options)) {
    status = kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for the gRPC server");
    goto err_server;
  }
  status = kvp_rpc_listener_init(&server->listener, loop, options, adopt_connection, server, error);
  if (status != KVP_OK) {
    goto err_server;
  }
  /* From here on handles are open: they close on the loop, and the last of them frees the server. */
  const int failed = uv_async_init(loop, &server->wake, on_wake);
  server->wake.data = server;
  if (failed != 0) {
    kvp_rpc_listener_close(&server->listener, on_listener_closed_early);
    return kvp_error_set(error, KVP_INTERNAL, "uv_async_init: %s", uv_strerror(failed));
  }
  status = threads_start(server, error);
  if (status != KVP_OK) {
    kvp_rpc_listener_close(&server->listener, on_listener_closed);
    return status;
  }
  kvp_rpc_listener_start(&server->listener);
  *out = server;
  return KVP_OK;

err_server:
  server_free(server);
  return status;
}
