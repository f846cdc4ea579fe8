/* Command lines by argp. argp's own messages are off: ours say what to do next. */
#include "client/kvpoolctl/command.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/number.h"

/* argp's own keys lie above. */
enum { text_bytes_max = 512, name_bytes_max = 64, option_key_max = 0x1000000 };

struct parse {
  const struct kvp_ctl_command *command;
  void *arguments;
  struct kvp_ctl_global_input global;
};

static void usage_print(const struct kvp_ctl_command *command, const char *format, va_list arguments) {
  char text[text_bytes_max];
  char hint[name_bytes_max];
  (void)vsnprintf(text, sizeof text, format, arguments);
  (void)snprintf(hint, sizeof hint, "kvpoolctl %s --help", command->name);
  (void)kvp_ctl_tell_usage(hint, "%s: %s", command->name, text);
}

int kvp_ctl_usage(const struct kvp_ctl_command *command, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  usage_print(command, format, arguments);
  va_end(arguments);
  return KVP_CTL_USAGE;
}

error_t kvp_ctl_take_failed(const struct kvp_ctl_command *command, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  usage_print(command, format, arguments);
  va_end(arguments);
  return EINVAL;
}

error_t kvp_ctl_take_number(const struct kvp_ctl_command *command, const char *option, const char *value,
                            uint64_t max, uint64_t *out) {
  if (kvp_ctl_number_parse(value, max, out)) {
    return 0;
  }
  return kvp_ctl_take_failed(command, "--%s %s: a number of at most %llu is wanted", option, value,
                             (unsigned long long)max);
}

error_t kvp_ctl_take_count(const struct kvp_ctl_command *command, const char *option, const char *value, uint64_t max,
                           uint64_t *out) {
  if (kvp_ctl_number_parse(value, max, out) && *out > 0) {
    return 0;
  }
  return kvp_ctl_take_failed(command, "--%s %s: a number from 1 to %llu is wanted", option, value,
                             (unsigned long long)max);
}

error_t kvp_ctl_take_word(const char *value, const struct argp_state *state, const char **const *places,
                          size_t count) {
  if (state->arg_num >= count) {
    return ARGP_ERR_UNKNOWN;
  }
  *places[state->arg_num] = value;
  return 0;
}

/* The option's name; NULL: an argument. */
static const char *option_name(const struct kvp_ctl_command *command, int key) {
  for (const struct argp_option *option = command->options; option != NULL && option->name != NULL; option++) {
    if (option->key == key) {
      return option->name;
    }
  }
  return NULL;
}

static error_t empty_failed(const struct kvp_ctl_command *command, int key) {
  const char *name = option_name(command, key);
  return name == NULL ? kvp_ctl_take_failed(command, "an argument is empty")
                      : kvp_ctl_take_failed(command, "--%s: its value is empty", name);
}

static error_t take(int key, char *value, struct argp_state *state) {
  struct parse *parse = state->input;
  error_t result = ARGP_ERR_UNKNOWN;
  if (key == ARGP_KEY_INIT) {
    state->child_inputs[0] = &parse->global;
    return 0;
  }
  if (key == ARGP_KEY_ERROR && !parse->global.told && !parse->global.help) {
    const char *word = state->next > 1 ? state->argv[state->next - 1] : "";
    return kvp_ctl_take_failed(parse->command, "option '%s' is not known, is ambiguous, or lacks its value", word);
  }
  bool is_own = key == ARGP_KEY_ARG || (key > 0 && key < option_key_max);
  if (is_own && value != NULL && value[0] == '\0') {
    result = empty_failed(parse->command, key);
  } else if (is_own && parse->command->take != NULL) {
    result = parse->command->take(key, value, parse->arguments, state);
  }
  if (key == ARGP_KEY_ARG && result == ARGP_ERR_UNKNOWN) {
    result = kvp_ctl_take_failed(parse->command, "unexpected argument '%s'", value);
  }
  parse->global.told = parse->global.told || (result != 0 && result != ARGP_ERR_UNKNOWN);
  return result;
}

/* Without argp's note about short options: ours take their values the same way. */
static char *help_filter(int key, const char *text, void *input) {
  (void)input;
  return key == ARGP_KEY_HELP_DUP_ARGS_NOTE ? NULL : (char *)text;
}

static void help_print(const struct argp *argp, const struct kvp_ctl_command *command) {
  char name[name_bytes_max];
  (void)snprintf(name, sizeof name, "kvpoolctl %s", command->name);
  argp_help(argp, stdout, ARGP_HELP_SHORT_USAGE | ARGP_HELP_LONG | ARGP_HELP_DOC, name);
}

bool kvp_ctl_parse(struct kvp_ctl *ctl, const struct kvp_ctl_command *command, int argc, char **argv, void *arguments,
                   int *exit_status) {
  static const struct argp_child children[] = {{&kvp_ctl_global, 0, "Everywhere:", 100}, {0}};
  struct parse parse = {.command = command, .arguments = arguments, .global = {.ctl = ctl}};
  char *doc = NULL;
  if (asprintf(&doc, "%s\v%s", command->summary, command->details == NULL ? "" : command->details) < 0) {
    doc = NULL;
  }
  const struct argp argp = {.options = command->options,
                            .parser = take,
                            .args_doc = command->synopsis,
                            .doc = doc,
                            .children = children,
                            .help_filter = help_filter};
  error_t failed = argp_parse(&argp, argc, argv, ARGP_NO_HELP | ARGP_NO_EXIT | ARGP_NO_ERRS, NULL, &parse);
  *exit_status = failed != 0 ? KVP_CTL_USAGE : KVP_CTL_OK;
  if (parse.global.help) {
    help_print(&argp, command);
    *exit_status = KVP_CTL_OK;
  }
  free(doc);
  return failed == 0 && !parse.global.help;
}
