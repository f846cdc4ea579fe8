/* Numbers as a person reads them. No state. */
#include "client/kvpoolctl/text.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <wchar.h>
#include <wctype.h>

#include "client/kvpoolctl/ctl.h"

enum { bar_cells = 10, bar_shades = 3 };

struct kvp_ctl_text kvp_ctl_bytes(uint64_t bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  struct kvp_ctl_text out;
  size_t unit = 0;
  double value = (double)bytes;
  /* 1023.95 would print as 1024.0 of the smaller unit. */
  while (value >= 1023.95 && unit + 1 < sizeof units / sizeof units[0]) {
    value /= 1024;
    unit++;
  }
  (void)snprintf(out.text, sizeof out.text, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return out;
}

struct kvp_ctl_text kvp_ctl_count(uint64_t count) {
  char digits[24];
  int length = snprintf(digits, sizeof digits, "%llu", (unsigned long long)count);
  struct kvp_ctl_text out;
  size_t used = 0;
  for (int i = 0; i < length; i++) {
    if (i > 0 && (length - i) % 3 == 0) {
      out.text[used++] = ',';
    }
    out.text[used++] = digits[i];
  }
  out.text[used] = '\0';
  return out;
}

struct kvp_ctl_text kvp_ctl_duration(uint64_t ns) {
  unsigned long long seconds = ns / 1000000000;
  struct kvp_ctl_text out;
  if (seconds < 60) {
    (void)snprintf(out.text, sizeof out.text, "%llu s", seconds);
  } else if (seconds < 3600) {
    (void)snprintf(out.text, sizeof out.text, "%llu min %llu s", seconds / 60, seconds % 60);
  } else if (seconds < 86400) {
    (void)snprintf(out.text, sizeof out.text, "%llu h %llu min", seconds / 3600, seconds / 60 % 60);
  } else {
    (void)snprintf(out.text, sizeof out.text, "%llu d %llu h", seconds / 86400, seconds / 3600 % 24);
  }
  return out;
}

uint64_t kvp_ctl_age_ns(uint64_t unix_ns) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_REALTIME, &now); /* it can't fail for this clock */
  uint64_t now_ns = (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
  return now_ns > unix_ns ? now_ns - unix_ns : 0;
}

struct kvp_ctl_text kvp_ctl_percent(uint64_t part, uint64_t whole) {
  struct kvp_ctl_text out = {.text = "-"};
  if (whole > 0) {
    (void)snprintf(out.text, sizeof out.text, "%.1f %%", 100.0 * (double)part / (double)whole);
  }
  return out;
}

struct kvp_ctl_text kvp_ctl_bar(const struct kvp_ctl_terminal *terminal, uint64_t part, uint64_t whole) {
  static const char *const unicode[] = {"░", "▒", "▓", "█"};
  static const char *const ascii[] = {".", ":", "+", "#"};
  double share = whole == 0 ? 0 : (double)part / (double)whole;
  unsigned filled = (unsigned)(share >= 1 ? bar_cells * bar_shades : share * bar_cells * bar_shades);
  filled = filled == 0 && part > 0 ? 1 : filled;
  struct kvp_ctl_text out = {.text = ""};
  size_t used = 0;
  for (unsigned i = 0; i < bar_cells; i++) {
    unsigned left = filled > i * bar_shades ? filled - i * bar_shades : 0;
    unsigned shade = left > bar_shades ? bar_shades : left;
    used += (size_t)snprintf(out.text + used, sizeof out.text - used, "%s",
                             terminal->is_unicode ? unicode[shade] : ascii[shade]);
  }
  return out;
}

const char *kvp_ctl_plural(uint64_t count) {
  return count == 1 ? "" : "s";
}

/* The terminal's own escape sequence at the text's begin; NULL: there is none. */
static const char *own_escape(const char *text, const struct kvp_ctl_terminal *terminal) {
  if (terminal->key[0] == '\0' || strncmp(text, terminal->key, kvp_ctl_escape_key_bytes) != 0) {
    return NULL;
  }
  const char *found = kvp_ctl_terminal_reset(terminal);
  bool is_found = strncmp(text, found, strlen(found)) == 0;
  for (int i = 0; i < kvp_ctl_role_count && !is_found; i++) {
    found = kvp_ctl_terminal_role(terminal, (enum kvp_ctl_role)i);
    is_found = found[0] != '\0' && strncmp(text, found, strlen(found)) == 0;
  }
  for (size_t i = 0; i < kvp_ctl_owner_colors && !is_found; i++) {
    found = kvp_ctl_terminal_owner(terminal, i);
    is_found = found[0] != '\0' && strncmp(text, found, strlen(found)) == 0;
  }
  return is_found ? found : NULL;
}

/* Bytes of the printable character there; 0: what is there is none. */
static size_t printable_length(const char *text, size_t bytes) {
  wchar_t wide = 0;
  mbstate_t state = {0};
  size_t length = mbrtowc(&wide, text, bytes, &state);
  bool is_whole = length > 0 && length <= bytes;
  return is_whole && (wide == L'\n' || wide == L'\t' || iswprint((wint_t)wide)) ? length : 0;
}

char *kvp_ctl_clean(const char *text, const struct kvp_ctl_terminal *keep) {
  enum { escaped_bytes = 4 }; /* "\x1b" */
  size_t left = strlen(text);
  char *out = kvp_ctl_allocate(escaped_bytes * left + 1, 1);
  size_t used = 0;
  while (left > 0) {
    const char *own = keep == NULL ? NULL : own_escape(text, keep);
    size_t length = own == NULL ? printable_length(text, left) : strlen(own);
    if (own != NULL) {
      size_t bare = strlen(kvp_ctl_terminal_bare(own));
      memcpy(out + used, kvp_ctl_terminal_bare(own), bare);
      used += bare;
    } else if (length > 0) {
      memcpy(out + used, text, length);
      used += length;
    } else {
      length = 1;
      used += (size_t)snprintf(out + used, escaped_bytes + 1, "\\x%02x", (unsigned)(unsigned char)*text);
    }
    text += length;
    left -= length;
  }
  return out;
}
