/* Terminal capabilities by terminfo; what standard output is not a terminal for has none of them. */
#include "client/kvpoolctl/terminal.h"

#include <assert.h>
#include <langinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <unistd.h>

/* Last: term.h makes macros of ordinary words. */
#include <curses.h>
#include <term.h>

enum { width_min = 40, width_max = 1000, height_min = 10, colors_rich = 256 };

/* A number between the bounds from the environment; 0 when it says none. */
static uint32_t number_from_environment(const char *variable, long low, long high) {
  const char *text = getenv(variable);
  if (text == NULL || text[0] == '\0') {
    return 0;
  }
  char *end = NULL;
  long value = strtol(text, &end, 10);
  if (*end != '\0' || value <= 0) {
    return 0;
  }
  return (uint32_t)(value < low ? low : value > high ? high : value);
}

static void size_init(struct kvp_ctl_terminal *terminal) {
  struct winsize size = {0};
  if (terminal->is_tty) {
    (void)ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
  }
  uint32_t told = number_from_environment("COLUMNS", width_min, width_max);
  terminal->is_limited = terminal->is_tty || told != 0;
  terminal->width = told != 0 ? told : size.ws_col != 0 ? size.ws_col : (uint32_t)kvp_ctl_width_default;
  terminal->width = terminal->width < width_min ? (uint32_t)width_min : terminal->width;
  terminal->height = size.ws_row != 0 ? size.ws_row : (uint32_t)kvp_ctl_height_default;
  terminal->height = terminal->height < height_min ? (uint32_t)height_min : terminal->height;
}

static void escape_set(const char *key, char out[kvp_ctl_escape_bytes_max], const char *escape) {
  if (escape != NULL && strlen(escape) < kvp_ctl_escape_bytes_max - kvp_ctl_escape_key_bytes) {
    (void)snprintf(out, kvp_ctl_escape_bytes_max, "%s%s", key, escape);
  }
}

static const char *capability(const char *name) {
  const char *value = tigetstr(name);
  return (intptr_t)value == -1 ? NULL : value; /* -1: no string capability */
}

static void colors_init(struct kvp_ctl_terminal *terminal) {
  /* Told apart on dark and on light grounds; neighbours in the list differ most. */
  static const int rich[kvp_ctl_owner_colors] = {39, 208, 77, 170, 178, 44, 203, 105, 113, 211, 33, 172, 37, 141};
  static const int plain[kvp_ctl_owner_colors] = {COLOR_BLUE, COLOR_YELLOW, COLOR_GREEN, COLOR_MAGENTA, COLOR_CYAN,
                                                  COLOR_BLUE, COLOR_YELLOW, COLOR_GREEN, COLOR_MAGENTA, COLOR_CYAN,
                                                  COLOR_BLUE, COLOR_YELLOW, COLOR_GREEN, COLOR_MAGENTA};
  static const int role_colors[kvp_ctl_role_count] = {
      [KVP_CTL_GOOD] = COLOR_GREEN, [KVP_CTL_WARN] = COLOR_YELLOW, [KVP_CTL_BAD] = COLOR_RED};
  const char *foreground = capability("setaf");
  const char *reset = capability("sgr0");
  int color_count = tigetnum("colors");
  uint64_t random = 0;
  bool has_random = getrandom(&random, sizeof random, 0) == (ssize_t)sizeof random;
  if (foreground == NULL || reset == NULL || color_count < 8 || !has_random) {
    return;
  }
  (void)snprintf(terminal->key, sizeof terminal->key, "\x02%016llx\x03", (unsigned long long)random);
  terminal->has_colors = true;
  escape_set(terminal->key, terminal->reset, reset);
  escape_set(terminal->key, terminal->roles[KVP_CTL_BOLD], capability("bold"));
  escape_set(terminal->key, terminal->roles[KVP_CTL_DIM],
             color_count >= colors_rich ? tiparm(foreground, 244) : capability("dim"));
  for (int i = KVP_CTL_GOOD; i < kvp_ctl_role_count; i++) {
    escape_set(terminal->key, terminal->roles[i], tiparm(foreground, role_colors[i]));
  }
  for (int i = 0; i < kvp_ctl_owner_colors; i++) {
    escape_set(terminal->key, terminal->owners[i],
               tiparm(foreground, color_count >= colors_rich ? rich[i] : plain[i]));
  }
}

void kvp_ctl_terminal_init(struct kvp_ctl_terminal *terminal) {
  *terminal = (struct kvp_ctl_terminal){.is_tty = isatty(STDOUT_FILENO) == 1};
  terminal->is_unicode = strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
  size_init(terminal);
  const char *no_color = getenv("NO_COLOR");
  if (!terminal->is_tty || (no_color != NULL && no_color[0] != '\0')) {
    return;
  }
  int found = 0;
  if (setupterm(NULL, STDOUT_FILENO, &found) == OK) {
    colors_init(terminal);
    (void)del_curterm(cur_term);
  }
}

const char *kvp_ctl_terminal_role(const struct kvp_ctl_terminal *terminal, enum kvp_ctl_role role) {
  assert(role < kvp_ctl_role_count);
  return terminal->roles[role];
}

const char *kvp_ctl_terminal_owner(const struct kvp_ctl_terminal *terminal, size_t index) {
  return terminal->owners[index % kvp_ctl_owner_colors];
}

const char *kvp_ctl_terminal_reset(const struct kvp_ctl_terminal *terminal) {
  return terminal->reset;
}

const char *kvp_ctl_terminal_bare(const char *escape) {
  return escape[0] == '\0' ? escape : escape + kvp_ctl_escape_key_bytes;
}
