/* kvpoolctl: looks into a kvpoold, manages its pools, and moves rows by hand. */
#include <errno.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/number.h"

enum { option_socket = 's', option_help = 'h', option_timeout = 0x100, option_json, option_version };

static const struct kvp_ctl_command *const commands[] = {
    &kvp_ctl_info,         &kvp_ctl_pools,
    &kvp_ctl_pool_create,  &kvp_ctl_pool_describe,
    &kvp_ctl_pool_delete,  &kvp_ctl_sessions,
    &kvp_ctl_blocks,       &kvp_ctl_put,
    &kvp_ctl_get,          &kvp_ctl_dump,
    &kvp_ctl_plan_range,   &kvp_ctl_plan_slots,
    &kvp_ctl_plan_new,     &kvp_ctl_plan_compressed,
    &kvp_ctl_plan_visible, &kvp_ctl_plan_swa,
    &kvp_ctl_plan_store,   &kvp_ctl_plan_pivots,
    &kvp_ctl_plan_decode,  &kvp_ctl_plan_mirror,
    &kvp_ctl_walkthrough,  &kvp_ctl_doctor_command,
    &kvp_ctl_version,
};

enum { command_count = sizeof commands / sizeof commands[0], timeout_ms_max = 3600 * 1000 };

/* ---- global options ---------------------------------------------------------------------------------------------
 */

static const struct argp_option global_options[] = {
    {"socket", option_socket, "PATH", 0,
     "The daemon's socket; default: $KVPOOLD_SOCKET, else /run/kvpoold/kvpoold.sock", 0},
    {"timeout", option_timeout, "MS", 0, "Of every call to the daemon; default: 10000", 0},
    {"json", option_json, NULL, 0, "One JSON document on standard output, refusals and failures included", 0},
    {"help", option_help, NULL, 0, "This text", 0},
    {0},
};

static error_t global_take(int key, char *value, struct argp_state *state) {
  struct kvp_ctl_global_input *input = state->input;
  uint64_t number = 0;
  switch (key) {
  case option_socket:
    input->ctl->socket = value;
    if (value[0] == '\0') {
      (void)kvp_ctl_tell_usage("kvpoolctl --help", "--socket: the path of the daemon's socket is wanted");
      input->told = true;
      return EINVAL;
    }
    return 0;
  case option_timeout:
    if (!kvp_ctl_number_parse(value, timeout_ms_max, &number) || number == 0) {
      (void)kvp_ctl_tell_usage("kvpoolctl --help", "--timeout %s: 1 to %d milliseconds are wanted", value,
                               timeout_ms_max);
      input->told = true;
      return EINVAL;
    }
    input->ctl->timeout_ms = (uint32_t)number;
    return 0;
  case option_json:
    input->ctl->json = true;
    return 0;
  case option_help:
    input->help = true;
    return ECANCELED; /* the rest of the line doesn't matter */
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

const struct argp kvp_ctl_global = {.options = global_options, .parser = global_take};

/* ---- the line before the command --------------------------------------------------------------------------------
 */

struct line {
  struct kvp_ctl_global_input global;
  bool version;
  int command; /* index of the first word; 0: there is none */
};

static const struct argp_option line_options[] = {
    {"version", option_version, NULL, 0, "The same as the command version", 0},
    {0},
};

/* NOLINTNEXTLINE(readability-non-const-parameter): the type is argp's. */
static error_t line_take(int key, char *value, struct argp_state *state) {
  struct line *line = state->input;
  (void)value;
  switch (key) {
  case ARGP_KEY_INIT:
    state->child_inputs[0] = &line->global;
    return 0;
  case option_version:
    line->version = true;
    return 0;
  case ARGP_KEY_ARG:
    line->command = state->next - 1;
    state->next = state->argc; /* what follows is the command's */
    return 0;
  case ARGP_KEY_ERROR:
    if (!line->global.told && !line->global.help) {
      (void)kvp_ctl_tell_usage("kvpoolctl --help", "option '%s' is not known, is ambiguous, or lacks its value",
                               state->argv[state->next - 1]);
    }
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

static void help_print(void) {
  kvp_ctl_print("Usage: kvpoolctl [OPTION...] COMMAND [ARGUMENT...]\n"
                "Looks into a kvpoold, manages its pools, and moves rows by hand.\n\n");
  for (size_t i = 0; i < command_count; i++) {
    kvp_ctl_print("  %-16s %s\n", commands[i]->name, commands[i]->summary);
  }
  kvp_ctl_print(
      "\n`kvpoolctl COMMAND --help` has the options and examples of each. Everywhere:\n\n"
      "  -s, --socket=PATH  the daemon's socket; default $KVPOOLD_SOCKET, else /run/kvpoold/kvpoold.sock\n"
      "      --timeout=MS   of every call to the daemon; default 10000\n"
      "      --json         one JSON document on standard output, refusals and failures included\n"
      "  -h, --help\n"
      "      --version\n\n"
      "Exit status: 0 done; 1 refused or failed; 2 wrong command line; 3 no daemon answers; 4 a check failed;\n"
      "130 interrupted.\n"
      "Environment: KVPOOLD_SOCKET, COLUMNS, NO_COLOR.\n");
}

/* The command that one or two words name; *used: how many. */
static const struct kvp_ctl_command *command_find(int count, char **words, int *used) {
  char two[64] = "";
  if (count > 1) {
    (void)snprintf(two, sizeof two, "%s %s", words[0], words[1]);
  }
  for (size_t i = 0; i < command_count; i++) {
    if (strcmp(commands[i]->name, words[0]) == 0 || strcmp(commands[i]->name, two) == 0) {
      *used = strchr(commands[i]->name, ' ') == NULL ? 1 : 2;
      return commands[i];
    }
  }
  return NULL;
}

static int command_unknown(const char *word) {
  size_t length = strlen(word);
  char known[256] = "";
  size_t used = 0;
  for (size_t i = 0; i < command_count; i++) {
    if (strncmp(commands[i]->name, word, length) == 0 && commands[i]->name[length] == ' ') {
      used += (size_t)snprintf(known + used, sizeof known - used, "%s %s", used > 0 ? "," : "",
                               commands[i]->name + length + 1);
    }
  }
  return used > 0 ? kvp_ctl_tell_usage("kvpoolctl --help", "'%s' wants one of:%s", word, known)
                  : kvp_ctl_tell_usage("kvpoolctl --help lists them", "no command '%s'", word);
}

static int run(struct kvp_ctl *ctl, int argc, char **argv) {
  static const struct argp_child children[] = {{&kvp_ctl_global, 0, NULL, 0}, {0}};
  static const struct argp argp = {.options = line_options, .parser = line_take, .children = children};
  struct line line = {.global = {.ctl = ctl}};
  error_t failed =
      argp_parse(&argp, argc, argv, ARGP_IN_ORDER | ARGP_NO_HELP | ARGP_NO_EXIT | ARGP_NO_ERRS, NULL, &line);
  if (line.global.help) {
    help_print();
    return KVP_CTL_OK;
  }
  if (failed != 0) {
    return KVP_CTL_USAGE;
  }
  if (line.version) {
    return kvp_ctl_version.run(ctl, 1, argv);
  }
  if (line.command == 0) {
    return kvp_ctl_tell_usage("kvpoolctl --help lists them", "which command?");
  }
  int used = 0;
  const struct kvp_ctl_command *command = command_find(argc - line.command, argv + line.command, &used);
  if (command == NULL) {
    return command_unknown(argv[line.command]);
  }
  return command->run(ctl, argc - line.command - used + 1, argv + line.command + used - 1);
}

/* Before anything is parsed, so that what is wrong in front of it is told as a document too. */
static bool json_is_wanted(int argc, char **argv) {
  bool is_wanted = false;
  for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
    is_wanted = is_wanted || strcmp(argv[i], "--json") == 0;
  }
  return is_wanted;
}

int main(int argc, char **argv) {
  (void)setlocale(LC_ALL, "");
  (void)setlocale(LC_NUMERIC, "C"); /* numbers are read by programs too */
  struct kvp_ctl ctl = {.json = json_is_wanted(argc, argv)};
  kvp_ctl_this = &ctl;
  kvp_ctl_terminal_init(&ctl.terminal);
  int exit_status = run(&ctl, argc, argv);
  if (exit_status == KVP_CTL_INTERRUPTED) {
    (void)kvp_ctl_tell_interrupted("interrupted");
  }
  kvp_ctl_interrupt_client(NULL);
  kvpool_client_destroy(ctl.client);
  kvp_ctl_json_flush(&ctl);
  errno = 0;
  if (fflush(stdout) != 0 || ferror(stdout) != 0) {
    kvp_ctl_warn("standard output: %s", errno == 0 ? "it could not be written" : strerror(errno));
    exit_status = exit_status == KVP_CTL_OK ? KVP_CTL_FAILED : exit_status;
  }
  return exit_status;
}
