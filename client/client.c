/* Connection: one channel, one completion queue and the library's thread that waits in it.
 *
 * Until kvpool_client_destroy has cancelled every call and seen each of them freed, the queue stays open; after that
 * nothing can start a batch any more. The struct itself lives as long as an object of this client does.
 */
#include <assert.h>
#include <errno.h>
#include <grpc/grpc_security.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/internal.h"

static _Thread_local bool on_library_thread;

static const char unix_scheme[] = "unix:";
static const char target_default[] = "/run/kvpoold/kvpoold.sock";

const char *kvp_client_path(const kvpool_client *client) {
  return client->target + sizeof unix_scheme - 1;
}

uint32_t kvp_client_timeout_ms(const kvpool_client *client) {
  return atomic_load_explicit(&client->timeout_ms, memory_order_relaxed);
}

bool kvp_client_on_library_thread(void) {
  return on_library_thread;
}

kvpool_status kvp_client_check_may_block(const char *what, kvpool_error *error) {
  if (on_library_thread) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "%s would block and can't be called from inside a callback",
                    what);
  }
  return KVPOOL_OK;
}

bool kvp_client_is_ours(const kvpool_client *client) {
  return client->pid == getpid();
}

kvpool_status kvp_client_check_process(const kvpool_client *client, kvpool_error *error) {
  return kvp_client_is_ours(client) ? KVPOOL_OK : kvp_fail_forked(error, "the client", client->pid);
}

void kvp_sync_init(pthread_mutex_t *lock, pthread_cond_t *condition) {
  pthread_condattr_t attributes;
  int failed = pthread_condattr_init(&attributes);
  failed |= pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  failed |= pthread_cond_init(condition, &attributes);
  failed |= pthread_condattr_destroy(&attributes);
  failed |= pthread_mutex_init(lock, NULL);
  assert(failed == 0);
}

void kvp_sync_deinit(pthread_mutex_t *lock, pthread_cond_t *condition) {
  int failed = pthread_cond_destroy(condition);
  failed |= pthread_mutex_destroy(lock);
  assert(failed == 0);
}

struct timespec kvp_deadline_after(uint32_t timeout_ms) {
  struct timespec deadline;
  int failed = clock_gettime(CLOCK_MONOTONIC, &deadline);
  assert(failed == 0);
  deadline.tv_sec += timeout_ms / 1000;
  deadline.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
  if (deadline.tv_nsec >= 1000000000) {
    deadline.tv_sec++;
    deadline.tv_nsec -= 1000000000;
  }
  return deadline;
}

bool kvp_sync_wait(pthread_cond_t *condition, pthread_mutex_t *lock, const struct timespec *deadline) {
  int failed = pthread_cond_timedwait(condition, lock, deadline);
  assert(failed == 0 || failed == ETIMEDOUT);
  return failed == 0;
}

bool kvp_deadline_passed(const struct timespec *deadline) {
  struct timespec now = kvp_deadline_after(0);
  return now.tv_sec > deadline->tv_sec || (now.tv_sec == deadline->tv_sec && now.tv_nsec >= deadline->tv_nsec);
}

void kvp_client_ref(kvpool_client *client) {
  atomic_fetch_add_explicit(&client->references, 1, memory_order_relaxed);
}

void kvp_client_unref(kvpool_client *client) {
  if (atomic_fetch_sub_explicit(&client->references, 1, memory_order_acq_rel) == 1) {
    kvp_sync_deinit(&client->lock, &client->drained);
    kvpool_server_info_destroy(client->info);
    free(client);
  }
}

/* No call is left, so nothing of gRPC is in use. */
static void connection_take_down(kvpool_client *client) {
  grpc_completion_queue_destroy(client->completions);
  grpc_channel_destroy(client->channel);
  grpc_shutdown();
  kvp_client_unref(client);
}

static void *library_thread(void *argument) {
  kvpool_client *client = argument;
  on_library_thread = true;
  for (;;) {
    grpc_event event = grpc_completion_queue_next(client->completions, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    if (event.type == GRPC_QUEUE_SHUTDOWN) {
      break;
    }
    (void)atomic_load_explicit(&client->handovers, memory_order_acquire);
    struct kvp_tag *tag = event.tag;
    tag->run(tag->call, event.success != 0);
  }
  pthread_mutex_lock(&client->lock);
  bool is_left_behind = client->left_behind;
  pthread_mutex_unlock(&client->lock);
  if (is_left_behind) {
    connection_take_down(client);
  }
  return NULL;
}

/* With every signal blocked: handlers of the program run on its own threads. */
static int thread_start(kvpool_client *client) {
  sigset_t all, before;
  sigfillset(&all);
  int failed = pthread_sigmask(SIG_SETMASK, &all, &before);
  assert(failed == 0);
  int status = pthread_create(&client->thread, NULL, library_thread, client);
  failed = pthread_sigmask(SIG_SETMASK, &before, NULL);
  assert(failed == 0);
  return status;
}

kvpool_status kvp_client_probe(const kvpool_client *client, kvpool_error *error) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", kvp_client_path(client));
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    return kvp_fail(error, KVPOOL_DISCONNECTED, "no socket to reach %s: %s", kvp_client_path(client),
                    strerror(errno));
  }
  /* EAGAIN: the backlog is full, so somebody listens. */
  int failure = connect(fd, (const struct sockaddr *)&address, sizeof address) == 0 || errno == EAGAIN ? 0 : errno;
  (void)close(fd);
  if (failure == 0) {
    return KVPOOL_OK;
  }
  if (failure == EACCES) {
    return kvp_fail(error, KVPOOL_PERMISSION_DENIED, "%s: %s (the socket's group may connect)",
                    kvp_client_path(client), strerror(failure));
  }
  return kvp_fail(error, KVPOOL_DISCONNECTED, "no kvpoold listens on %s: %s", kvp_client_path(client),
                  strerror(failure));
}

static kvpool_status target_resolve(const char *target, char *out, size_t out_bytes, kvpool_error *error) {
  const char *path = target;
  if (path == NULL) {
    const char *from_environment = getenv("KVPOOLD_SOCKET");
    path = from_environment == NULL || from_environment[0] == '\0' ? target_default : from_environment;
  }
  if (strncmp(path, unix_scheme, sizeof unix_scheme - 1) == 0) {
    path += sizeof unix_scheme - 1;
  }
  static const char *const other_schemes[] = {
      "tcp:", "dns:", "ipv4:", "ipv6:", "http:", "https:", "vsock:", "unix-abstract:"};
  for (size_t i = 0; i < sizeof other_schemes / sizeof other_schemes[0]; i++) {
    if (strncmp(path, other_schemes[i], strlen(other_schemes[i])) == 0) {
      return kvp_fail(error, KVPOOL_INVALID_ARGUMENT,
                      "target \"%s\": kvpoold listens on a unix socket, which a path names", path);
    }
  }
  size_t path_bytes = strlen(path);
  size_t path_bytes_max = sizeof((struct sockaddr_un){0}).sun_path - 1;
  if (path_bytes == 0 || path_bytes > path_bytes_max) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT,
                    "target \"%s\": a unix socket's path has 1 to %zu characters, this one %zu", path, path_bytes_max,
                    path_bytes);
  }
  (void)snprintf(out, out_bytes, "%s%s", unix_scheme, path);
  return KVPOOL_OK;
}

static grpc_channel *channel_create(const char *target) {
  static char name_receive[] = GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, name_send[] = GRPC_ARG_MAX_SEND_MESSAGE_LENGTH,
              name_compression[] = GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
              name_first[] = GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, name_max[] = GRPC_ARG_MAX_RECONNECT_BACKOFF_MS,
              name_local[] = GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, name_retries[] = GRPC_ARG_ENABLE_RETRIES,
              name_proxy[] = GRPC_ARG_ENABLE_HTTP_PROXY;
  grpc_arg arguments[] = {
      {.type = GRPC_ARG_INTEGER, .key = name_receive, .value.integer = kvp_client_receive_bytes_max},
      {.type = GRPC_ARG_INTEGER, .key = name_send, .value.integer = -1},
      {.type = GRPC_ARG_INTEGER, .key = name_compression, .value.integer = 1 << GRPC_COMPRESS_NONE},
      {.type = GRPC_ARG_INTEGER, .key = name_first, .value.integer = kvp_client_reconnect_first_ms},
      {.type = GRPC_ARG_INTEGER, .key = name_max, .value.integer = kvp_client_reconnect_max_ms},
      {.type = GRPC_ARG_INTEGER, .key = name_local, .value.integer = 1},
      /* A step must never be sent twice behind the caller's back. */
      {.type = GRPC_ARG_INTEGER, .key = name_retries, .value.integer = 0},
      {.type = GRPC_ARG_INTEGER, .key = name_proxy, .value.integer = 0},
  };
  const grpc_channel_args all = {.num_args = sizeof arguments / sizeof arguments[0], .args = arguments};
  grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
  grpc_channel *channel = grpc_channel_create(target, credentials, &all);
  grpc_channel_credentials_release(credentials);
  return channel;
}

static void methods_register(kvpool_client *client) {
  for (int i = 0; i < kvp_method_count; i++) {
    char path[64];
    (void)snprintf(path, sizeof path, "/kvpool.v1.Kvpool/%s", kvp_method_name((enum kvp_method)i));
    client->methods[i] = grpc_channel_register_call(client->channel, path, NULL, NULL);
  }
}

/* A child of a fork has gRPC's memory and descriptors, without its threads: a connection of its own would get no answer,
 * and end its parent's through the epoll set that they share. */
static kvpool_status grpc_check_process(kvpool_error *error) {
  static _Atomic pid_t first_user;
  pid_t user = 0;
  if (!atomic_compare_exchange_strong(&first_user, &user, getpid()) && user != getpid()) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT,
                    "process %ld has used gRPC before it forked this one: connect after a fork only, or exec",
                    (long)user);
  }
  return KVPOOL_OK;
}

static kvpool_status client_new(const char *target, uint32_t timeout_ms, kvpool_client **out, kvpool_error *error) {
  kvpool_client *client = calloc(1, sizeof *client);
  if (client == NULL) {
    return kvp_fail_no_memory(error);
  }
  client->pid = getpid();
  atomic_init(&client->timeout_ms, timeout_ms);
  client->message_bytes_max = kvp_message_bytes_max;
  client->chunk_bytes_max = kvp_chunk_bytes_max;
  kvpool_status status = target_resolve(target, client->target, sizeof client->target, error);
  if (status == KVPOOL_OK) {
    status = grpc_check_process(error);
  }
  if (status != KVPOOL_OK) {
    free(client);
    return status;
  }
  atomic_init(&client->references, 1);
  kvp_sync_init(&client->lock, &client->drained);
  grpc_init();
  client->channel = channel_create(client->target);
  client->completions = grpc_completion_queue_create_for_next(NULL);
  methods_register(client);
  int failure = thread_start(client);
  if (failure != 0) {
    status = kvp_fail(error, KVPOOL_NO_MEMORY, "the library's thread can't be started: %s", strerror(failure));
    goto err_grpc_init;
  }
  *out = client;
  return KVPOOL_OK;

err_grpc_init:
  grpc_completion_queue_shutdown(client->completions);
  grpc_completion_queue_destroy(client->completions);
  grpc_channel_destroy(client->channel);
  grpc_shutdown();
  kvp_client_unref(client);
  return status;
}

/* One look at the daemon: the version must be ours, *serving tells whether every device serves. */
static kvpool_status client_look(kvpool_client *client, kvpool_server_info **info, const kvpool_device_info **waiting,
                                 kvpool_error *error) {
  kvpool_status status = kvpool_server_info_get(client, info, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  if (kvpool_server_info_protocol_version(*info) != kvp_protocol_version) {
    status = kvp_fail_at(
        error, KVPOOL_VERSION_MISMATCH, "protocol_version", -1, kvpool_server_info_protocol_version(*info),
        "kvpoold %s at %s speaks protocol version %u, libkvpool %s speaks %d", kvpool_server_info_version(*info),
        kvp_client_path(client), kvpool_server_info_protocol_version(*info), kvpool_version(), kvp_protocol_version);
    kvpool_server_info_destroy(*info);
    return status;
  }
  *waiting = NULL;
  for (size_t i = 0; i < kvpool_server_info_device_count(*info) && *waiting == NULL; i++) {
    const kvpool_device_info *device = kvpool_server_info_device(*info, i);
    *waiting = device->state == KVPOOL_DEVICE_SERVING ? NULL : device;
  }
  return KVPOOL_OK;
}

static kvpool_status client_greet(kvpool_client *client, bool wait_until_serving, kvpool_error *error) {
  struct timespec deadline = kvp_deadline_after(kvp_client_timeout_ms(client));
  for (;;) {
    kvpool_server_info *info = NULL;
    const kvpool_device_info *waiting = NULL;
    kvpool_status status = client_look(client, &info, &waiting, error);
    if (status == KVPOOL_OK && (waiting == NULL || !wait_until_serving)) {
      client->info = info;
      kvp_server_info_limits(info, &client->message_bytes_max, &client->chunk_bytes_max);
      return KVPOOL_OK;
    }
    bool is_last = kvp_deadline_passed(&deadline);
    if (status == KVPOOL_OK) {
      if (is_last) {
        status =
            kvp_fail(error, KVPOOL_DEADLINE_EXCEEDED, "device %s of kvpoold at %s does not serve after %u ms%s%s",
                     waiting->name, kvp_client_path(client), kvp_client_timeout_ms(client),
                     waiting->waiting_for[0] != '\0' ? ", it waits: " : "", waiting->waiting_for);
      }
      kvpool_server_info_destroy(info);
    }
    bool may_come = status == KVPOOL_OK || (status == KVPOOL_DISCONNECTED && wait_until_serving);
    if (is_last || !may_come) {
      return status;
    }
    (void)nanosleep(&(struct timespec){.tv_nsec = kvp_client_serving_poll_ms * 1000000L}, NULL);
  }
}

kvpool_status kvpool_client_connect(const char *target, const kvpool_connect_options *options, kvpool_client **out,
                                    kvpool_error *error) {
  assert(out != NULL);
  kvpool_connect_options used = {.size_bytes = sizeof used};
  if (options != NULL) {
    if (options->size_bytes < sizeof used) {
      return kvp_fail_at(error, KVPOOL_INVALID_ARGUMENT, "options", -1, (int64_t)options->size_bytes,
                         "kvpool_connect_options.size_bytes is %zu, not sizeof(kvpool_connect_options) = %zu",
                         options->size_bytes, sizeof used);
    }
    used = *options;
  }
  kvpool_status status = kvp_client_check_may_block("kvpool_client_connect", error);
  if (status != KVPOOL_OK) {
    return status;
  }
  kvpool_client *client = NULL;
  status = client_new(target, used.timeout_ms == 0 ? kvp_client_timeout_default_ms : used.timeout_ms, &client, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  status = client_greet(client, used.wait_until_serving, error);
  if (status != KVPOOL_OK) {
    kvpool_client_destroy(client);
    return status;
  }
  *out = client;
  return KVPOOL_OK;
}

void kvpool_client_destroy(kvpool_client *client) {
  if (client == NULL || !kvp_client_is_ours(client)) {
    return;
  }
  assert(!on_library_thread && "kvpool_client_destroy from inside a callback");
  struct timespec deadline = kvp_deadline_after(kvp_client_give_up_ms);
  pthread_mutex_lock(&client->lock);
  client->closing = true;
  for (struct kvp_call *call = client->calls; call != NULL; call = call->next) {
    grpc_call_cancel(call->call, NULL);
  }
  while (client->calls != NULL && kvp_sync_wait(&client->drained, &client->lock, &deadline)) {
  }
  kvp_call_abandon_all(client);
  while (client->abandoning > 0) {
    pthread_cond_wait(&client->drained, &client->lock);
  }
  client->left_behind = client->calls != NULL;
  bool is_left_behind = client->left_behind;
  pthread_t thread = client->thread;
  pthread_mutex_unlock(&client->lock);
  if (is_left_behind) {
    int failed = pthread_detach(thread);
    assert(failed == 0);
    return;
  }
  grpc_completion_queue_shutdown(client->completions);
  int failed = pthread_join(client->thread, NULL);
  assert(failed == 0);
  connection_take_down(client);
}

void kvpool_client_interrupt(kvpool_client *client, uint32_t timeout_ms) {
  assert(client != NULL);
  pthread_mutex_lock(&client->lock);
  atomic_store_explicit(&client->timeout_ms, timeout_ms, memory_order_relaxed);
  kvp_call_interrupt_all(client);
  pthread_mutex_unlock(&client->lock);
}
