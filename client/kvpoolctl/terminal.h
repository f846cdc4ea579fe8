/* What standard output is: its size, its colours, its characters. Read once at the start. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_TERMINAL_H
#define KVPOOL_CLIENT_KVPOOLCTL_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a text is, not how it looks. */
enum kvp_ctl_role {
  KVP_CTL_PLAIN,
  KVP_CTL_DIM,
  KVP_CTL_BOLD,
  KVP_CTL_GOOD,
  KVP_CTL_WARN,
  KVP_CTL_BAD,
  kvp_ctl_role_count
};

enum {
  kvp_ctl_owner_colors = 14,
  kvp_ctl_escape_bytes_max = 48,
  kvp_ctl_escape_key_bytes = 18, /* "\x02", 16 digits, "\x03" */
  kvp_ctl_width_default = 80,
  kvp_ctl_height_default = 24,
};

struct kvp_ctl_terminal {
  bool is_tty;
  bool is_limited; /* width is a real limit: a terminal's, or $COLUMNS */
  bool is_unicode;
  bool has_colors; /* never without a terminal, nor with $NO_COLOR */
  uint32_t width;
  uint32_t height;
  char
      key[kvp_ctl_escape_key_bytes + 1]; /* random: in front of each of ours, which nobody else can write therefore */
  char roles[kvp_ctl_role_count][kvp_ctl_escape_bytes_max];
  char owners[kvp_ctl_owner_colors][kvp_ctl_escape_bytes_max];
  char reset[kvp_ctl_escape_bytes_max];
};

void kvp_ctl_terminal_init(struct kvp_ctl_terminal *terminal);

/* Escape sequences behind the key, for kvp_ctl_print, which takes it away; "" without colours. */
const char *kvp_ctl_terminal_role(const struct kvp_ctl_terminal *terminal, enum kvp_ctl_role role);
const char *kvp_ctl_terminal_owner(const struct kvp_ctl_terminal *terminal, size_t index);
const char *kvp_ctl_terminal_reset(const struct kvp_ctl_terminal *terminal);
/* One of these as the terminal takes it. */
const char *kvp_ctl_terminal_bare(const char *escape);

#endif
