/* Command line: one flag for every value of the file, parsed by argp in two looks, since the file lies between them.
 */
#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/supervisor/config_internal.h"

enum {
  key_config = 'c',
  key_help = '?',
  key_version = 'V',
  key_usage = 0x100,
  key_check,
  key_device,
  key_pool,
  key_ipc_uid,
  key_option, /* key_option + i: kvp_options[i] */
};

enum { own_option_count = 8, argp_option_count = own_option_count + kvp_option_count + 1 };

static const char documentation[] =
    "Owns the KV memory of this host's devices and serves it to inference engines over gRPC."
    "\vValues given as flags replace those of the file; --device, --pool and --ipc-uid replace the file's whole "
    "list. "
    "The file has the flags' names with underscores, and lists `devices`, `pools` and `ipc_uids`.";

struct look {
  struct kvp_flags_seen *seen;      /* first look, else NULL */
  struct kvp_config_reader *reader; /* second look, else NULL */
  bool devices_replaced;
  bool pools_replaced;
  bool ipc_uids_replaced;
  bool failed;
};

static bool add_pool_text(struct kvp_config_reader *reader, const char *text) {
  if (!kvp_config_check_literals("--pool", text)) {
    return false;
  }
  size_t bytes = strlen(text) + sizeof "pool = ;";
  char *wrapped = malloc(bytes);
  if (wrapped == NULL) {
    return kvp_config_complain("--pool", "out of memory");
  }
  (void)snprintf(wrapped, bytes, "pool = %s;", text);
  config_t parsed;
  config_init(&parsed);
  bool good = false;
  if (!config_read_string(&parsed, wrapped)) {
    (void)fprintf(stderr, "kvpoold: --pool:%d: %s in %s\n", config_error_line(&parsed), config_error_text(&parsed),
                  text);
  } else if (config_setting_length(config_root_setting(&parsed)) != 1) {
    (void)kvp_config_complain("--pool", "one group is wanted: %s", text);
  } else {
    good = kvp_config_add_pool(reader, "--pool", config_setting_get_elem(config_root_setting(&parsed), 0));
  }
  config_destroy(&parsed);
  free(wrapped);
  return good;
}

static bool add_ipc_uid_text(struct kvp_config_reader *reader, const char *text) {
  char *end = NULL;
  errno = 0;
  long long uid = strtoll(text, &end, 10);
  if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0) {
    return kvp_config_complain("--ipc-uid", "\"%s\" is no uid: a number is wanted", text);
  }
  return kvp_config_add_ipc_uid(reader, "--ipc-uid", uid);
}

static bool apply(struct look *look, int key, const char *argument) {
  struct kvp_config_reader *reader = look->reader;
  if (key == key_device) {
    if (!look->devices_replaced) {
      look->devices_replaced = true;
      reader->config->device_count = 0;
    }
    return kvp_config_add_device(reader, "--device", argument);
  }
  if (key == key_pool) {
    if (!look->pools_replaced) {
      look->pools_replaced = true;
      reader->config->pool_count = 0;
    }
    return add_pool_text(reader, argument);
  }
  if (key == key_ipc_uid) {
    if (!look->ipc_uids_replaced) {
      look->ipc_uids_replaced = true;
      reader->config->ipc_uid_count = 0;
    }
    return add_ipc_uid_text(reader, argument);
  }
  if (key >= key_option && key < key_option + kvp_option_count) {
    const struct kvp_option *option = &kvp_options[key - key_option];
    char place[kvp_name_bytes_max];
    (void)snprintf(place, sizeof place, "--%s", option->flag);
    return kvp_option_set_text(option, place, argument, reader->config);
  }
  return true;
}

static void note(struct look *look, int key, const char *argument, struct argp_state *state) {
  struct kvp_flags_seen *seen = look->seen;
  switch (key) {
  case key_config:
    seen->config_path = argument;
    break;
  case key_check:
    seen->check = true;
    break;
  case key_version:
    (void)printf("kvpoold %s\n", KVPOOL_VERSION);
    seen->answered = true;
    break;
  case key_help:
    argp_state_help(state, stdout, ARGP_HELP_STD_HELP);
    seen->answered = true;
    break;
  case key_usage:
    argp_state_help(state, stdout, ARGP_HELP_USAGE);
    seen->answered = true;
    break;
  default:
    break;
  }
}

static error_t on_flag(int key, char *argument, struct argp_state *state) {
  struct look *look = state->input;
  if (key == ARGP_KEY_ARG) {
    if (look->seen != NULL) {
      (void)kvp_config_complain(argument, "no such argument; everything is a flag (see --help)");
    }
    look->failed = true;
    return EINVAL;
  }
  if (key == key_config || key == key_help || key == key_version ||
      (key >= key_usage && key < key_option + kvp_option_count)) {
    if (look->seen != NULL) {
      note(look, key, argument, state);
    } else if (!apply(look, key, argument)) {
      look->failed = true;
      return EINVAL;
    }
    return 0;
  }
  return ARGP_ERR_UNKNOWN;
}

static void fill_options(struct argp_option options[argp_option_count]) {
  static const struct argp_option own[own_option_count] = {
      {"config", key_config, "FILE", 0, "Read this file first", 0},
      {"check-config", key_check, NULL, 0, "Check file and flags, say what is wrong, and exit", 0},
      {"device", key_device, "NAME", 0, "A device, e.g. host:0; may be given several times (default host:0)", 0},
      {"pool", key_pool, "GROUP", 0,
       "A pool to create at start, as in the file: '{ name = \"main\"; block_size = 64; num_blocks = 100; regions = "
       "( { name = \"kv\"; format = \"v41\"; num_layers = 2; } ); }'; may be given several times",
       0},
      {"ipc-uid", key_ipc_uid, "UID", 0,
       "Whose workers may bring memory by a CUDA IPC handle, besides root's and this daemon's; may be given several "
       "times",
       0},
      {"help", key_help, NULL, 0, "Give this help list", -1},
      {"usage", key_usage, NULL, 0, "Give a short usage message", -1},
      {"version", key_version, NULL, 0, "Print program version", -1},
  };
  memset(options, 0, argp_option_count * sizeof options[0]);
  memcpy(options, own, sizeof own);
  for (int i = 0; i < kvp_option_count; i++) {
    options[own_option_count + i] =
        (struct argp_option){kvp_options[i].flag, key_option + i, kvp_options[i].argument, 0, kvp_options[i].help, 0};
  }
}

static bool parse(int argc, char **argv, struct look *look, unsigned flags) {
  struct argp_option options[argp_option_count];
  fill_options(options);
  const struct argp argp = {options, on_flag, NULL, documentation, NULL, NULL, NULL};
  error_t error = argp_parse(&argp, argc, argv, ARGP_NO_HELP | ARGP_NO_EXIT | flags, NULL, look);
  return error == 0 && !look->failed;
}

bool kvp_flags_look(int argc, char **argv, struct kvp_flags_seen *out) {
  memset(out, 0, sizeof *out);
  struct look look = {.seen = out};
  return parse(argc, argv, &look, 0);
}

bool kvp_flags_apply(int argc, char **argv, struct kvp_config_reader *reader) {
  struct look look = {.reader = reader};
  return parse(argc, argv, &look, ARGP_SILENT);
}
