/* What the files of the configuration share: the table of options, and complaints with their place. */
#ifndef KVPOOL_SUPERVISOR_CONFIG_INTERNAL_H
#define KVPOOL_SUPERVISOR_CONFIG_INTERNAL_H

#include <libconfig.h>
#include <stddef.h>

#include "server/supervisor/config.h"

enum kvp_option_kind {
  KVP_OPTION_PATH,  /* char[kvp_config_path_bytes_max] */
  KVP_OPTION_COUNT, /* uint32_t, within min .. max */
  KVP_OPTION_BYTES, /* uint64_t; text may end in K, M, G or T (binary) */
  KVP_OPTION_MODE,  /* uint32_t, octal text */
  KVP_OPTION_LEVEL, /* enum kvp_log_level */
};

/* A value with one place in struct kvp_config, by file and by flag. */
struct kvp_option {
  const char *key;      /* in the file: "socket_mode" */
  const char *flag;     /* "socket-mode" */
  const char *argument; /* "MODE", for --help */
  const char *help;
  enum kvp_option_kind kind;
  size_t offset;
  uint64_t min;
  uint64_t max; /* paths: bytes with the terminating NUL */
};

enum { kvp_option_count = 13 };
extern const struct kvp_option kvp_options[kvp_option_count];

enum { kvp_place_bytes_max = 512 };

/* While reading. Where each list entry came from is kept for the checks that need all of them. */
struct kvp_config_reader {
  struct kvp_config *config;
  char pool_places[kvp_pools_max][kvp_place_bytes_max];
};

/* "kvpoold: PLACE: text" on standard error. Returns false. */
bool kvp_config_complain(const char *place, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Sets one option. False: complained. */
bool kvp_option_set_text(const struct kvp_option *option, const char *place, const char *text,
                         struct kvp_config *config);
bool kvp_option_set_number(const struct kvp_option *option, const char *place, int64_t number,
                           struct kvp_config *config);

/* Appends. False: complained. */
bool kvp_config_add_device(struct kvp_config_reader *reader, const char *place, const char *name);
bool kvp_config_add_ipc_uid(struct kvp_config_reader *reader, const char *place, int64_t uid);
bool kvp_config_add_pool(struct kvp_config_reader *reader, const char *fallback, const config_setting_t *group);

/* "FILE:LINE" of a setting; fallback is the file's name where libconfig knows none. */
void kvp_config_place(const config_setting_t *setting, const char *fallback, char out[kvp_place_bytes_max]);

/* False: complained about an integer literal that libconfig would not read as the number it says, at PLACE:LINE. */
bool kvp_config_check_literals(const char *place, const char *text);
/* The caller's to free. NULL: the file can't be read (errno), or holds a NUL byte (errno 0). */
char *kvp_config_file_text(const char *path);

/* Complains itself. */
bool kvp_config_read_file(struct kvp_config_reader *reader, const char *path);

struct kvp_flags_seen {
  const char *config_path; /* --config, NULL without */
  bool answered;           /* --help, --usage or --version */
  bool check;              /* --check-config */
};

/* First look: what decides how to go on; complains about flags that don't exist. */
bool kvp_flags_look(int argc, char **argv, struct kvp_flags_seen *out);
/* Second look: the values, over those of the file. */
bool kvp_flags_apply(int argc, char **argv, struct kvp_config_reader *reader);

#endif
