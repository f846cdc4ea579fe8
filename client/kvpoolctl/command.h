/* The commands, and how each one's command line is read. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_COMMAND_H
#define KVPOOL_CLIENT_KVPOOLCTL_COMMAND_H

#include <argp.h>

#include "client/kvpoolctl/ctl.h"

struct kvp_ctl_command {
  const char *name; /* one word, or two: "pool create" */
  const char *summary;
  const char *synopsis;              /* "NAME [NAME...]"; NULL: takes no arguments */
  const char *details;               /* what --help says below the options: meaning, then examples */
  const struct argp_option *options; /* NULL: none of its own */
  /* An option, or an argument (ARGP_KEY_ARG). ARGP_ERR_UNKNOWN: not mine; another error: kvp_ctl_usage has told. */
  error_t (*take)(int key, char *value, void *arguments, const struct argp_state *state);
  int (*run)(struct kvp_ctl *ctl, int argc, char **argv);
};

extern const struct kvp_ctl_command kvp_ctl_info, kvp_ctl_pools, kvp_ctl_pool_create, kvp_ctl_pool_describe,
    kvp_ctl_pool_delete, kvp_ctl_sessions, kvp_ctl_blocks, kvp_ctl_put, kvp_ctl_get, kvp_ctl_dump, kvp_ctl_plan_range,
    kvp_ctl_plan_slots, kvp_ctl_plan_new, kvp_ctl_plan_compressed, kvp_ctl_plan_visible, kvp_ctl_plan_swa,
    kvp_ctl_plan_store, kvp_ctl_plan_pivots, kvp_ctl_plan_decode, kvp_ctl_plan_mirror, kvp_ctl_walkthrough,
    kvp_ctl_doctor_command, kvp_ctl_version;

/* The global options of main, which every command takes as well. */
extern const struct argp kvp_ctl_global;
/* What kvp_ctl_global's input points to. */
struct kvp_ctl_global_input {
  struct kvp_ctl *ctl;
  bool help; /* was asked for */
  bool told; /* an error is on standard error already */
};

/* Reads the command line into `arguments`. False: leave with *exit_status, all is told. */
bool kvp_ctl_parse(struct kvp_ctl *ctl, const struct kvp_ctl_command *command, int argc, char **argv, void *arguments,
                   int *exit_status);

/* Tells what is wrong with the command line; KVP_CTL_USAGE. */
int kvp_ctl_usage(const struct kvp_ctl_command *command, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The same from inside `take`: gives what it has to return. */
error_t kvp_ctl_take_failed(const struct kvp_ctl_command *command, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* An option's value as a number of at most max; an error is told. */
error_t kvp_ctl_take_number(const struct kvp_ctl_command *command, const char *option, const char *value,
                            uint64_t max, uint64_t *out);
/* The same, of at least 1. */
error_t kvp_ctl_take_count(const struct kvp_ctl_command *command, const char *option, const char *value, uint64_t max,
                           uint64_t *out);
/* An argument (ARGP_KEY_ARG) of a command that takes at most `count`: the n-th goes to *places[n]. */
error_t kvp_ctl_take_word(const char *value, const struct argp_state *state, const char **const *places,
                          size_t count);

#endif
