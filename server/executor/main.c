/* kvpool-exec: the executor of one device, started by a supervisor and alive as long as it. */
#include <argp.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "proto/fd_socket.h"
#include "server/executor/control.h"
#include "server/executor/hello.h"
#include "server/executor/server.h"
#include "server/log.h"

const char *argp_program_version = "kvpool-exec " KVPOOL_VERSION;

enum { exit_refused = 2 };

struct arguments {
  const char *device;
  int control_fd; /* -1: not given */
};

static const struct argp_option options[] = {
    {"device", 'd', "NAME", 0, "Device to serve: host:0, cuda:0, ...", 0},
    {"control-fd", 'c', "N", 0, "Open descriptor of the control socket to the supervisor", 0},
    {"log-level", 'l', "LEVEL", 0, "debug, info, warning or error", 0},
    {0},
};

static error_t parse_option(int key, char *argument, struct argp_state *state) {
  struct arguments *arguments = state->input;
  enum kvp_log_level level = KVP_LOG_INFO;
  char *end = NULL;
  long number = 0;
  switch (key) {
  case 'd':
    arguments->device = argument;
    return 0;
  case 'c':
    number = strtol(argument, &end, 10);
    if (end == argument || *end != '\0' || number < 0 || number > INT_MAX) {
      argp_error(state, "--control-fd '%s' is no descriptor", argument);
    }
    arguments->control_fd = (int)number;
    return 0;
  case 'l':
    if (!kvp_log_level_parse(argument, &level)) {
      argp_error(state, "--log-level '%s' is no level", argument);
    }
    kvp_log_set_level(level);
    return 0;
  case ARGP_KEY_END:
    if (arguments->device == NULL || arguments->control_fd < 0) {
      argp_error(state, "--device and --control-fd are needed; kvpoold starts this program itself");
    }
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

/* Which devices this build has, at the end of --help. */
static char *help_text(int key, const char *text, void *input) {
  (void)input;
  if (key != ARGP_KEY_HELP_POST_DOC) {
    return (char *)text;
  }
  char *devices = NULL;
  return asprintf(&devices, "Devices of this build: %s", kvp_device_kinds()) < 0 ? NULL : devices;
}

/* The supervisor decides when we end; a signal to the whole terminal is not for us. */
static void signals_ignore(void) {
  const int ignored[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
  for (size_t i = 0; i < sizeof ignored / sizeof ignored[0]; i++) {
    (void)signal(ignored[i], SIG_IGN);
  }
}

/* A large pool is thousands of descriptors while it is handed over. */
static void descriptors_raise(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
  }
}

static void process_name(const char *device) {
  char name[16]; /* what the kernel keeps */
  (void)snprintf(name, sizeof name, "kvpx-%s", device);
  (void)prctl(PR_SET_NAME, name);
}

static void ready_send(int socket, const struct kvp_hello *hello, const struct kvp_device *device) {
  struct kvp_device_description description = {0};
  device->backend->describe(device, &description);
  struct kvp_control_ready ready = {
      .version = KVP_CONTROL_VERSION,
      .pid = (uint32_t)getpid(),
      .memory_bytes = description.memory_bytes,
      .memory_free_bytes = description.memory_free_bytes,
      .memory_granularity_bytes = description.memory_granularity_bytes,
      .flags = description.ready_flags,
  };
  memcpy(ready.uuid, description.uuid, sizeof ready.uuid);
  memcpy(ready.driver, description.driver, sizeof ready.driver);
  memcpy(ready.description, description.text, sizeof ready.description);
  (void)kvp_fd_socket_send(socket, KVP_CONTROL_READY, hello->request, &ready, sizeof ready, NULL, 0);
  kvp_log(KVP_LOG_INFO, "executor_ready", "device=%s pid=%u description=\"%s\"", hello->body.device, ready.pid,
          ready.description);
}

/* Opens, serves until the end, closes. Returns the exit code; *error when it never came to serving. */
static int serve(int socket, const struct kvp_hello *hello, struct kvp_ring *ring, enum kvp_control_end *end,
                 struct kvp_error *error) {
  int code = exit_refused;
  const struct kvp_server_options server_options = {
      .ring = ring,
      .command_event = hello->command_event,
      .completion_event = hello->completion_event,
      .control_socket = socket,
  };
  struct kvp_server *server = kvp_server_new(&server_options, error);
  if (server == NULL) {
    return code;
  }
  const struct kvp_device_options device_options = {
      .thread_count = hello->body.thread_count, .wake = kvp_server_wake, .wake_context = server};
  struct kvp_device *device = NULL;
  if (kvp_device_open(hello->body.device, &device_options, &device, error) != KVP_OK) {
    goto err_server;
  }
  struct kvp_control *control = NULL;
  if (kvp_server_set_device(server, device, error) != KVP_OK) {
    goto err_device;
  }
  ready_send(socket, hello, device);
  control = kvp_control_start(socket, device, server, error);
  if (control == NULL) {
    goto err_device;
  }
  const bool served = kvp_server_run(server);
  device->backend->stop(device);
  *end = kvp_control_destroy(control);
  code = served && *end != KVP_CONTROL_END_NONSENSE ? EXIT_SUCCESS : EXIT_FAILURE;
  kvp_server_destroy(server);
  device->backend->close(device);
  return code;

err_device:
  device->backend->stop(device);
  kvp_server_destroy(server);
  device->backend->close(device);
  return code;

err_server:
  kvp_server_destroy(server);
  return code;
}

int main(int argc, char **argv) {
  static const struct argp parser = {
      options, parse_option, NULL, "The executor of one device of kvpoold. Started by kvpoold, not by hand.\v",
      NULL,    help_text,    NULL};
  struct arguments arguments = {.control_fd = -1};
  (void)argp_parse(&parser, argc, argv, 0, NULL, &arguments);
  signals_ignore();
  descriptors_raise();
  process_name(arguments.device);

  struct kvp_error error = {0};
  struct kvp_hello hello;
  struct kvp_ring ring;
  enum kvp_control_end end = KVP_CONTROL_END_CLOSED;
  int code = exit_refused;
  if (kvp_hello_receive(arguments.control_fd, arguments.device, &hello, &error) != KVP_OK) {
    kvp_log(KVP_LOG_ERROR, "executor_refused", "device=%s text=\"%s\"", arguments.device, error.text);
    return code;
  }
  if (kvp_ring_init(&ring, hello.ring, KVP_RING_EXECUTOR, &error) == KVP_OK) {
    code = serve(arguments.control_fd, &hello, &ring, &end, &error);
    kvp_ring_deinit(&ring);
  }
  if (code == exit_refused) {
    /* The supervisor says it, too; while it waits for the device, only now and then. */
    kvp_log(KVP_LOG_DEBUG, "executor_refused", "device=%s text=\"%s\"", arguments.device, error.text);
    kvp_control_result_send(arguments.control_fd, hello.request, &error);
  } else {
    const bool told = end == KVP_CONTROL_END_TOLD;
    kvp_hello_clean_up(&hello, !told);
    kvp_log(KVP_LOG_INFO, "executor_stopped", "device=%s code=%d told=%s", arguments.device, code,
            told ? "yes" : "no");
  }
  kvp_hello_close_fds(&hello);
  if (code == EXIT_FAILURE) {
    _exit(code); /* what a driver does at the end of a process may wait for a device that is lost */
  }
  return code;
}
