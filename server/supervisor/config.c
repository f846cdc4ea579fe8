/* The configuration: defaults, the table of its values, and the checks over all of it. Read once, before any thread.
 */
#include "server/supervisor/config.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/supervisor/config_internal.h"
#include "server/supervisor/name.h"

static const char default_socket[] = "/run/kvpoold/kvpoold.sock";
static const char default_device[] = "host:0";

enum {
  socket_bytes_max = sizeof(struct sockaddr_un) - offsetof(struct sockaddr_un, sun_path),
  threads_max = 1024,
  connections_max = 65536,
  drain_ms_max = 3600 * 1000,
};

#define AT(field) offsetof(struct kvp_config, field)

const struct kvp_option kvp_options[kvp_option_count] = {
    {"socket", "socket", "PATH", "Unix socket to serve on (default /run/kvpoold/kvpoold.sock)", KVP_OPTION_PATH,
     AT(socket_path), 0, socket_bytes_max},
    {"socket_mode", "socket-mode", "OCTAL", "Permissions of the socket (default 0660)", KVP_OPTION_MODE,
     AT(socket_mode), 0, 0777},
    {"attach_socket", "attach-socket", "PATH",
     "Unix socket that workers on this host attach to (default: the socket's path, .attach.sock for .sock)",
     KVP_OPTION_PATH, AT(attach_socket_path), 0, socket_bytes_max},
    {"executor", "executor", "PATH",
     "The executor program (default: kvpool-exec beside kvpoold, else the installed one)", KVP_OPTION_PATH,
     AT(executor_path), 0, kvp_config_path_bytes_max},
    {"device_memory", "device-memory", "BYTES",
     "What pools and buffers may take of each device, e.g. 64G; 0: what it has, of a GPU what is free, less "
     "--device-reserve (default)",
     KVP_OPTION_BYTES, AT(device_memory_bytes), 0, INT64_MAX},
    {"device_reserve", "device-reserve", "BYTES",
     "What --device-memory=0 keeps back of each device for others (default: of a GPU 1G, of a host 1G or a tenth)",
     KVP_OPTION_BYTES, AT(device_reserve_bytes), 0, INT64_MAX},
    {"device_threads", "device-threads", "N", "Threads of a host device; 0: one per core (default)", KVP_OPTION_COUNT,
     AT(device_thread_count), 0, threads_max},
    {"sessions_max", "sessions-max", "N", "Sessions at a time (default 1024)", KVP_OPTION_COUNT, AT(sessions_max), 1,
     kvp_sessions_max},
    {"steps_in_flight_max", "steps-in-flight-max", "N", "Steps of a session at a time (default 256)",
     KVP_OPTION_COUNT, AT(steps_in_flight_max), 1, kvp_steps_in_flight_per_session_max},
    {"connections_max", "connections-max", "N", "Connections at a time (default 4096)", KVP_OPTION_COUNT,
     AT(connections_max), 1, connections_max},
    {"drain_timeout_ms", "drain-timeout-ms", "MS", "How long SIGTERM waits for steps in flight (default 10000)",
     KVP_OPTION_COUNT, AT(drain_timeout_ms), 0, drain_ms_max},
    {"wait_deadline_max_ms", "wait-deadline-max-ms", "MS",
     "How long a worker's op may wait for a timeline (default 30000)", KVP_OPTION_COUNT, AT(wait_deadline_max_ms), 1,
     kvp_wait_deadline_ms_max},
    {"log_level", "log-level", "LEVEL", "debug, info (default), warning or error", KVP_OPTION_LEVEL, AT(log_level), 0,
     0},
};

bool kvp_config_complain(const char *place, const char *format, ...) {
  char text[kvp_error_text_bytes_max + kvp_place_bytes_max];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  (void)fprintf(stderr, "kvpoold: %s: %s\n", place, text);
  return false;
}

bool kvp_option_set_number(const struct kvp_option *option, const char *place, int64_t number,
                           struct kvp_config *config) {
  if (number < 0 || (uint64_t)number < option->min || (uint64_t)number > option->max) {
    return kvp_config_complain(place, "%s = %" PRId64 " is not within %" PRIu64 " .. %" PRIu64, option->key, number,
                               option->min, option->max);
  }
  char *field = (char *)config + option->offset;
  if (option->kind == KVP_OPTION_BYTES) {
    *(uint64_t *)(void *)field = (uint64_t)number;
  } else {
    *(uint32_t *)(void *)field = (uint32_t)number;
  }
  return true;
}

/* Digits of a base, then nothing or, with `suffixes`, one of K M G T. No sign, no spaces. */
static bool parse_number(const char *text, unsigned base, bool suffixes, int64_t *out) {
  int64_t number = 0;
  const char *c = text;
  for (; *c >= '0' && *c < (char)('0' + base); c++) {
    if (__builtin_mul_overflow(number, (int64_t)base, &number) || __builtin_add_overflow(number, *c - '0', &number)) {
      return false;
    }
  }
  if (c == text) {
    return false;
  }
  static const char units[] = "KMGT";
  const char *unit = suffixes && *c != '\0' ? strchr(units, *c) : NULL;
  if (unit != NULL) {
    if (__builtin_mul_overflow(number, INT64_C(1) << (10 * (unit - units + 1)), &number)) {
      return false;
    }
    c++;
  }
  *out = number;
  return *c == '\0';
}

static bool set_path(const struct kvp_option *option, const char *place, const char *text,
                     struct kvp_config *config) {
  size_t bytes = strlen(text) + 1;
  if (bytes == 1 || bytes > option->max) {
    return kvp_config_complain(place, "%s = \"%s\": a path has 1 to %" PRIu64 " bytes, this one %zu", option->key,
                               text, option->max - 1, bytes - 1);
  }
  memcpy((char *)config + option->offset, text, bytes);
  return true;
}

bool kvp_option_set_text(const struct kvp_option *option, const char *place, const char *text,
                         struct kvp_config *config) {
  int64_t number = 0;
  switch (option->kind) {
  case KVP_OPTION_PATH:
    return set_path(option, place, text, config);
  case KVP_OPTION_LEVEL:
    if (!kvp_log_level_parse(text, (enum kvp_log_level *)(void *)((char *)config + option->offset))) {
      return kvp_config_complain(place, "%s = \"%s\" is none of debug, info, warning, error", option->key, text);
    }
    return true;
  case KVP_OPTION_MODE:
    if (!parse_number(text, 8, false, &number) || number > (int64_t)option->max) {
      return kvp_config_complain(place, "%s = \"%s\" is not an octal mode of 0 .. 0777", option->key, text);
    }
    return kvp_option_set_number(option, place, number, config);
  case KVP_OPTION_COUNT:
  case KVP_OPTION_BYTES:
    if (!parse_number(text, 10, option->kind == KVP_OPTION_BYTES, &number)) {
      return kvp_config_complain(place, "%s = \"%s\" is not a number%s", option->key, text,
                                 option->kind == KVP_OPTION_BYTES ? " (K, M, G or T may follow it)" : "");
    }
    return kvp_option_set_number(option, place, number, config);
  }
  return false;
}

static const char uuid_prefix[] = "cuda:GPU-";
static const char uuid_name[] = "cuda:GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"; /* x: a hexadecimal digit */

static bool is_uuid_name(const char *name) {
  const char *shape = uuid_name;
  for (; *name != '\0' && *shape != '\0'; name++, shape++) {
    bool fits = *shape == 'x' ? strchr("0123456789abcdefABCDEF", *name) != NULL : *name == *shape;
    if (!fits) {
      return false;
    }
  }
  return *name == *shape; /* both are at their ends */
}

/* One spelling for each name, so that equal names are equal devices. Both backends have prefixes of 5 bytes. */
static bool is_device_name(const char *name) {
  enum { prefix_bytes = sizeof "host:" - 1 };
  const bool is_cuda = strncmp(name, "cuda:", prefix_bytes) == 0;
  if (strncmp(name, "host:", prefix_bytes) != 0 && !is_cuda) {
    return false;
  }
  const char *index = name + prefix_bytes;
  int64_t number = 0;
  return parse_number(index, 10, false, &number) &&
         number <= (is_cuda ? kvp_cuda_device_index_max : kvp_host_device_index_max) &&
         (index[0] != '0' || index[1] == '\0');
}

bool kvp_config_add_device(struct kvp_config_reader *reader, const char *place, const char *name) {
  struct kvp_config *config = reader->config;
  bool by_uuid = strncmp(name, uuid_prefix, sizeof uuid_prefix - 1) == 0;
  if (by_uuid && !is_uuid_name(name)) {
    return kvp_config_complain(
        place,
        "device \"%s\": behind cuda: a GPU's UUID is wanted as nvidia-smi -L prints it: GPU- and "
        "8-4-4-4-12 hexadecimal digits",
        name);
  }
  if (!by_uuid && !is_device_name(name)) {
    return kvp_config_complain(
        place,
        "device \"%s\" is not of the form host:N or cuda:N (the last are host:%d and cuda:%d), or cuda:GPU-UUID",
        name, kvp_host_device_index_max, kvp_cuda_device_index_max);
  }
  for (uint32_t i = 0; i < config->device_count; i++) {
    if (kvp_device_names_equal(config->devices[i], name)) {
      return kvp_config_complain(place, "device \"%s\" is there twice", name);
    }
  }
  if (config->device_count == kvp_devices_max) {
    return kvp_config_complain(place, "device \"%s\" is one more than the %d allowed", name, kvp_devices_max);
  }
  memcpy(config->devices[config->device_count++], name, strlen(name) + 1);
  return true;
}

bool kvp_config_add_ipc_uid(struct kvp_config_reader *reader, const char *place, int64_t uid) {
  struct kvp_config *config = reader->config;
  if (uid < 0 || uid >= UINT32_MAX) {
    return kvp_config_complain(place, "ipc_uids: %" PRId64 " is no uid", uid);
  }
  if (config->ipc_uid_count == kvp_ipc_uids_max) {
    return kvp_config_complain(place, "ipc_uids: %" PRId64 " is one more than the %d allowed", uid, kvp_ipc_uids_max);
  }
  config->ipc_uids[config->ipc_uid_count++] = (uint32_t)uid;
  return true;
}

static bool first_executable(const char *directory, const char *const *relative, size_t count, char *out) {
  for (size_t i = 0; i < count; i++) {
    int length = snprintf(out, kvp_config_path_bytes_max, "%s/%s", directory, relative[i]);
    if (length > 0 && length < kvp_config_path_bytes_max && access(out, X_OK) == 0) {
      return true;
    }
  }
  return false;
}

/* Beside this program, where a build tree or an installation puts it, else where it was to be installed. */
static void find_executor(char out[kvp_config_path_bytes_max]) {
  static const char *const relative[] = {"kvpool-exec", "../executor/kvpool-exec", "../libexec/kvpool/kvpool-exec"};
  char self[kvp_config_path_bytes_max];
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length > 0) {
    self[length] = '\0';
    *strrchr(self, '/') = '\0';
    if (first_executable(self, relative, sizeof relative / sizeof relative[0], out)) {
      return;
    }
  }
  (void)snprintf(out, kvp_config_path_bytes_max, "%s/kvpool-exec", KVPOOL_LIBEXEC_DIR);
}

static void set_defaults(struct kvp_config *config) {
  memset(config, 0, sizeof *config);
  memcpy(config->socket_path, default_socket, sizeof default_socket);
  config->socket_mode = 0660;
  config->device_reserve_bytes = KVP_RESERVE_DEFAULT;
  config->sessions_max = kvp_sessions_max;
  config->steps_in_flight_max = kvp_steps_in_flight_per_session_max;
  config->connections_max = 4096;
  config->drain_timeout_ms = 10000;
  config->wait_deadline_max_ms = kvp_wait_deadline_ms_max;
  config->log_level = KVP_LOG_INFO;
}

/* "x.sock" -> "x.attach.sock"; what has another ending gets it behind all of it. False: complained. */
static bool default_attach_socket(struct kvp_config *config) {
  static const char ending[] = ".sock";
  size_t bytes = strlen(config->socket_path);
  if (bytes >= sizeof ending && strcmp(config->socket_path + bytes + 1 - sizeof ending, ending) == 0) {
    bytes -= sizeof ending - 1;
  }
  int length = snprintf(config->attach_socket_path, sizeof config->attach_socket_path, "%.*s.attach%s", (int)bytes,
                        config->socket_path, ending);
  return length < socket_bytes_max ||
         kvp_config_complain("attach_socket",
                             "\"%s\", which socket = \"%s\" gives, has %d bytes, a socket's path %d at most: set it",
                             config->attach_socket_path, config->socket_path, length, socket_bytes_max - 1);
}

static bool settle_paths(struct kvp_config *config) {
  if (config->attach_socket_path[0] == '\0' && !default_attach_socket(config)) {
    return false;
  }
  if (strcmp(config->attach_socket_path, config->socket_path) == 0) {
    return kvp_config_complain("attach_socket", "\"%s\" is the path of `socket`", config->attach_socket_path);
  }
  if (config->executor_path[0] == '\0') {
    find_executor(config->executor_path);
  }
  (void)snprintf(config->lock_path, sizeof config->lock_path, "%.*s.lock", socket_bytes_max, config->socket_path);
  (void)snprintf(config->attach_lock_path, sizeof config->attach_lock_path, "%.*s.lock", socket_bytes_max,
                 config->attach_socket_path);
  return true;
}

static uint32_t find_device(const struct kvp_config *config, const char *name) {
  uint32_t i = 0;
  while (i < config->device_count && !kvp_device_names_equal(config->devices[i], name)) {
    i++;
  }
  return i;
}

/* Adds a pool's bytes to those of a device that earlier pools take. */
static bool check_placement(const struct kvp_config_reader *reader, uint32_t pool, const char *name, uint64_t bytes,
                            uint64_t *used) {
  const struct kvp_config *config = reader->config;
  const char *place = reader->pool_places[pool];
  uint32_t device = find_device(config, name);
  if (device == config->device_count) {
    return kvp_config_complain(place, "pool \"%s\": placement \"%s\" is no device of this configuration",
                               config->pools[pool].name, name);
  }
  used[device] += bytes;
  if (config->device_memory_bytes != 0 && used[device] > config->device_memory_bytes) {
    return kvp_config_complain(place,
                               "pool \"%s\": %" PRIu64 " bytes on %s make %" PRIu64 ", device_memory is %" PRIu64,
                               config->pools[pool].name, bytes, name, used[device], config->device_memory_bytes);
  }
  return true;
}

static bool check_pools(const struct kvp_config_reader *reader) {
  const struct kvp_config *config = reader->config;
  uint64_t used[kvp_devices_max] = {0};
  for (uint32_t i = 0; i < config->pool_count; i++) {
    const struct kvp_pool_spec *spec = &config->pools[i];
    for (uint32_t other = 0; other < i; other++) {
      if (strcmp(config->pools[other].name, spec->name) == 0) {
        return kvp_config_complain(reader->pool_places[i], "pool \"%s\" is there twice, first at %s", spec->name,
                                   reader->pool_places[other]);
      }
    }
    uint64_t bytes = 0;
    struct kvp_error error;
    if (kvp_pool_spec_check(spec, NULL, &bytes, &error) != KVP_OK) {
      return kvp_config_complain(reader->pool_places[i], "pool \"%s\": %s", spec->name, error.text);
    }
    if (spec->placement_count == 0 && !check_placement(reader, i, config->devices[0], bytes, used)) {
      return false;
    }
    for (uint32_t p = 0; p < spec->placement_count; p++) {
      if (!check_placement(reader, i, spec->placements[p], bytes, used)) {
        return false;
      }
    }
  }
  return true;
}

static enum kvp_config_outcome read_all(int argc, char **argv, struct kvp_config_reader *reader) {
  struct kvp_config *config = reader->config;
  struct kvp_flags_seen seen;
  if (!kvp_flags_look(argc, argv, &seen)) {
    return KVP_CONFIG_ERROR;
  }
  if (seen.answered) {
    return KVP_CONFIG_DONE;
  }
  if ((seen.config_path != NULL && !kvp_config_read_file(reader, seen.config_path)) ||
      !kvp_flags_apply(argc, argv, reader)) {
    return KVP_CONFIG_ERROR;
  }
  if (config->device_count == 0 && !kvp_config_add_device(reader, "default", default_device)) {
    return KVP_CONFIG_ERROR;
  }
  if (!settle_paths(config) || !check_pools(reader)) {
    return KVP_CONFIG_ERROR;
  }
  if (seen.check) {
    (void)printf("configuration is valid: socket %s, %u devices, %u pools\nexecutor: %s\n", config->socket_path,
                 config->device_count, config->pool_count, config->executor_path);
    return KVP_CONFIG_DONE;
  }
  return KVP_CONFIG_RUN;
}

enum kvp_config_outcome kvp_config_read(int argc, char **argv, struct kvp_config *config) {
  static struct kvp_config_reader reader; /* 32 KiB of places, needed once */
  memset(&reader, 0, sizeof reader);
  reader.config = config;
  set_defaults(config);
  return read_all(argc, argv, &reader);
}
