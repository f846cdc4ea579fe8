/* The configuration file: libconfig's tree against the table of options. A key we don't know is an error. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/supervisor/config_internal.h"

void kvp_config_place(const config_setting_t *setting, const char *fallback, char out[kvp_place_bytes_max]) {
  const char *file = config_setting_source_file(setting);
  (void)snprintf(out, kvp_place_bytes_max, "%s:%u", file == NULL ? fallback : file,
                 config_setting_source_line(setting));
}

static bool is_integer(const config_setting_t *setting) {
  int type = config_setting_type(setting);
  return type == CONFIG_TYPE_INT || type == CONFIG_TYPE_INT64;
}

static bool read_option(const struct kvp_option *option, const char *place, const config_setting_t *setting,
                        struct kvp_config *config) {
  bool text = config_setting_type(setting) == CONFIG_TYPE_STRING;
  switch (option->kind) {
  case KVP_OPTION_COUNT:
    if (!is_integer(setting)) {
      return kvp_config_complain(place, "%s must be an integer", option->key);
    }
    return kvp_option_set_number(option, place, config_setting_get_int64(setting), config);
  case KVP_OPTION_BYTES:
    if (!text && !is_integer(setting)) {
      return kvp_config_complain(place, "%s must be an integer or a string like \"64G\"", option->key);
    }
    return text ? kvp_option_set_text(option, place, config_setting_get_string(setting), config)
                : kvp_option_set_number(option, place, config_setting_get_int64(setting), config);
  case KVP_OPTION_MODE:
  case KVP_OPTION_PATH:
  case KVP_OPTION_LEVEL:
    if (!text) {
      return kvp_config_complain(place, "%s must be a string%s", option->key,
                                 option->kind == KVP_OPTION_MODE ? " with an octal mode, like \"0660\"" : "");
    }
    return kvp_option_set_text(option, place, config_setting_get_string(setting), config);
  }
  return false;
}

static bool read_devices(struct kvp_config_reader *reader, const char *path, const config_setting_t *list) {
  char place[kvp_place_bytes_max];
  kvp_config_place(list, path, place);
  if (!config_setting_is_array(list) && !config_setting_is_list(list)) {
    return kvp_config_complain(place, "devices must be a list of names, like [ \"host:0\" ]");
  }
  for (int i = 0; i < config_setting_length(list); i++) {
    const config_setting_t *entry = config_setting_get_elem(list, (unsigned)i);
    kvp_config_place(entry, path, place);
    if (config_setting_type(entry) != CONFIG_TYPE_STRING) {
      return kvp_config_complain(place, "devices: entry %d is not a string", i);
    }
    if (!kvp_config_add_device(reader, place, config_setting_get_string(entry))) {
      return false;
    }
  }
  return true;
}

static bool read_ipc_uids(struct kvp_config_reader *reader, const char *path, const config_setting_t *list) {
  char place[kvp_place_bytes_max];
  kvp_config_place(list, path, place);
  if (!config_setting_is_array(list) && !config_setting_is_list(list)) {
    return kvp_config_complain(place, "ipc_uids must be a list of numbers, like [ 1000, 1001 ]");
  }
  for (int i = 0; i < config_setting_length(list); i++) {
    const config_setting_t *entry = config_setting_get_elem(list, (unsigned)i);
    kvp_config_place(entry, path, place);
    if (!is_integer(entry)) {
      return kvp_config_complain(place, "ipc_uids: entry %d is not an integer", i);
    }
    if (!kvp_config_add_ipc_uid(reader, place, config_setting_get_int64(entry))) {
      return false;
    }
  }
  return true;
}

static bool read_pools(struct kvp_config_reader *reader, const char *path, const config_setting_t *list) {
  char place[kvp_place_bytes_max];
  kvp_config_place(list, path, place);
  if (!config_setting_is_list(list)) {
    return kvp_config_complain(place, "pools must be a list of groups: ( { name = ...; }, ... )");
  }
  for (int i = 0; i < config_setting_length(list); i++) {
    if (!kvp_config_add_pool(reader, path, config_setting_get_elem(list, (unsigned)i))) {
      return false;
    }
  }
  return true;
}

static bool read_setting(struct kvp_config_reader *reader, const char *path, const config_setting_t *setting) {
  const char *key = config_setting_name(setting);
  char place[kvp_place_bytes_max];
  kvp_config_place(setting, path, place);
  if (strcmp(key, "devices") == 0) {
    return read_devices(reader, path, setting);
  }
  if (strcmp(key, "ipc_uids") == 0) {
    return read_ipc_uids(reader, path, setting);
  }
  if (strcmp(key, "pools") == 0) {
    return read_pools(reader, path, setting);
  }
  for (int i = 0; i < kvp_option_count; i++) {
    if (strcmp(key, kvp_options[i].key) == 0) {
      return read_option(&kvp_options[i], place, setting, reader->config);
    }
  }
  return kvp_config_complain(place, "%s is no setting of kvpoold", key);
}

static bool read_root(struct kvp_config_reader *reader, const char *path, const config_t *file) {
  const config_setting_t *root = config_root_setting(file);
  for (int i = 0; i < config_setting_length(root); i++) {
    if (!read_setting(reader, path, config_setting_get_elem(root, (unsigned)i))) {
      return false;
    }
  }
  return true;
}

/* libconfig gets the text and not the file, so that what was checked is what is parsed. */
static bool parse_text(struct kvp_config_reader *reader, const char *path, const char *text) {
  config_t file;
  config_init(&file);
  bool good = false;
  if (config_read_string(&file, text)) {
    good = read_root(reader, path, &file);
  } else {
    const char *included = config_error_file(&file);
    (void)fprintf(stderr, "kvpoold: %s:%d: %s\n", included == NULL ? path : included, config_error_line(&file),
                  config_error_text(&file));
  }
  config_destroy(&file);
  return good;
}

bool kvp_config_read_file(struct kvp_config_reader *reader, const char *path) {
  char *text = kvp_config_file_text(path);
  if (text == NULL) {
    return errno == 0 ? kvp_config_complain(path, "the file is no text: it holds a NUL byte")
                      : kvp_config_complain(path, "the file can't be read: %s", strerror(errno));
  }
  bool good = kvp_config_check_literals(path, text) && parse_text(reader, path, text);
  free(text);
  return good;
}
