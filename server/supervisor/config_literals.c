/* Integer literals that libconfig would misread: it wraps those over 32 bits silently unless an L follows. So the
 * text is looked through first, with libconfig's own notion of strings, comments, names, numbers and @include. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/supervisor/config_internal.h"

enum { include_depth_max = 10, /* libconfig's */ literal_shown_max = 64, first_read_bytes = 4096 };

struct scan {
  const char *place; /* the file's name, or the flag's */
  const char *at;    /* in a text that ends in NUL */
  unsigned line;
  int depth; /* of @include */
};

static bool check_file(const char *path, int depth);

static bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

static bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Moves on to `end`, counting lines. */
static void move_to(struct scan *scan, const char *end) {
  for (; scan->at < end; scan->at++) {
    scan->line += *scan->at == '\n' ? 1 : 0;
  }
}

static void skip_line_comment(struct scan *scan) {
  move_to(scan, scan->at + strcspn(scan->at, "\n"));
}

static void skip_long_comment(struct scan *scan) {
  const char *end = strstr(scan->at + 2, "*/");
  move_to(scan, end == NULL ? scan->at + strlen(scan->at) : end + 2);
}

static void skip_string(struct scan *scan) {
  const char *end = scan->at + 1;
  while (*end != '\0' && *end != '"') {
    end += end[0] == '\\' && end[1] != '\0' ? 2 : 1;
  }
  move_to(scan, *end == '"' ? end + 1 : end);
}

static void skip_name(struct scan *scan) {
  while (is_letter(*scan->at) || is_digit(*scan->at) || *scan->at == '-' || *scan->at == '_' || *scan->at == '*') {
    scan->at++;
  }
}

/* Past the fraction and exponent of a float; NULL when what ends at `digits_end` is an integer. */
static const char *float_end(const char *digits_end) {
  const char *end = digits_end;
  if (*end == '.') {
    end++;
    end += strspn(end, "0123456789");
  }
  if (*end == 'e' || *end == 'E') {
    const char *exponent = end + 1;
    exponent += *exponent == '+' || *exponent == '-' ? 1 : 0;
    if (is_digit(*exponent)) {
      end = exponent + strspn(exponent, "0123456789");
    }
  }
  return end == digits_end ? NULL : end;
}

static bool check_literal(const struct scan *scan, const char *start, const char *digits_end, int base, bool marked) {
  errno = 0;
  bool negative = *start == '-';
  uint64_t magnitude = strtoull(negative || *start == '+' ? start + 1 : start, NULL, base);
  bool overflow = errno == ERANGE;
  uint64_t beyond = negative ? 1 : 0; /* the one more that a negative number may have */
  int bytes = digits_end - start < literal_shown_max ? (int)(digits_end - start) : literal_shown_max;
  char place[kvp_place_bytes_max];
  (void)snprintf(place, sizeof place, "%s:%u", scan->place, scan->line);
  if (overflow || magnitude > (uint64_t)INT64_MAX + beyond) {
    return kvp_config_complain(place, "%.*s%s does not fit into 64 bits with a sign", bytes, start,
                               bytes == literal_shown_max ? "..." : "");
  }
  if (!marked && magnitude > (uint64_t)INT32_MAX + beyond) {
    return kvp_config_complain(place, "%.*s does not fit into 32 bits with a sign; write %.*sL", bytes, start, bytes,
                               start);
  }
  return true;
}

/* At a digit, a sign or a point. */
static bool check_number(struct scan *scan) {
  const char *start = scan->at;
  const char *digits = start + (*start == '-' || *start == '+' ? 1 : 0);
  const char *end = digits + strspn(digits, "0123456789");
  int base = 10;
  if (digits == start && end == digits + 1 && *digits == '0' && (*end == 'x' || *end == 'X')) {
    base = 16;
    end += 1 + strspn(end + 1, "0123456789abcdefABCDEF");
  } else {
    const char *past = float_end(end);
    if (past != NULL || end == digits) {
      scan->at = past != NULL ? past : digits + (end == start ? 1 : 0);
      return true;
    }
  }
  bool marked = *end == 'L';
  if (!check_literal(scan, start, end, base, marked)) {
    return false;
  }
  scan->at = end + (marked ? 1 : 0) + (marked && end[1] == 'L' ? 1 : 0);
  return true;
}

/* At an '@'. A file that can't be read is libconfig's to complain about. */
static bool check_include(struct scan *scan) {
  static const char word[] = "@include";
  if (strncmp(scan->at, word, sizeof word - 1) != 0) {
    scan->at++;
    return true;
  }
  scan->at += sizeof word - 1;
  scan->at += strspn(scan->at, " \t");
  if (*scan->at != '"') {
    return true;
  }
  char path[kvp_place_bytes_max];
  size_t bytes = 0;
  const char *c = scan->at + 1;
  for (; *c != '\0' && *c != '"' && bytes < sizeof path - 1; c++) {
    c += c[0] == '\\' && (c[1] == '\\' || c[1] == '"') ? 1 : 0;
    path[bytes++] = *c;
  }
  path[bytes] = '\0';
  skip_string(scan);
  if (*c != '"') {
    return *c == '\0' || kvp_config_complain(scan->place, "the @include of %s has too long a path", path);
  }
  return scan->depth == include_depth_max || check_file(path, scan->depth + 1);
}

static bool check_text(const char *place, const char *text, int depth) {
  struct scan scan = {place, text, 1, depth};
  while (*scan.at != '\0') {
    char c = *scan.at;
    if (c == '"') {
      skip_string(&scan);
    } else if (c == '#' || (c == '/' && scan.at[1] == '/')) {
      skip_line_comment(&scan);
    } else if (c == '/' && scan.at[1] == '*') {
      skip_long_comment(&scan);
    } else if (is_letter(c) || c == '*') {
      skip_name(&scan);
    } else if (is_digit(c) || c == '-' || c == '+' || c == '.') {
      if (!check_number(&scan)) {
        return false;
      }
    } else if (c == '@') {
      if (!check_include(&scan)) {
        return false;
      }
    } else {
      move_to(&scan, scan.at + 1);
    }
  }
  return true;
}

static bool check_file(const char *path, int depth) {
  char *text = kvp_config_file_text(path);
  bool good = text == NULL || check_text(path, text, depth);
  free(text);
  return good;
}

char *kvp_config_file_text(const char *path) {
  FILE *file = fopen(path, "re");
  if (file == NULL) {
    return NULL;
  }
  char *text = NULL;
  size_t capacity = first_read_bytes;
  size_t bytes = 0;
  for (size_t got = 1; got > 0; bytes += got) {
    capacity += bytes + 1 >= capacity ? capacity : 0;
    char *grown = realloc(text, capacity);
    if (grown == NULL) {
      break;
    }
    text = grown;
    got = fread(text + bytes, 1, capacity - bytes - 1, file);
  }
  int failure = errno;
  bool is_whole = text != NULL && feof(file) != 0 && ferror(file) == 0;
  bool good = is_whole && memchr(text, '\0', bytes) == NULL;
  (void)fclose(file);
  if (!good) {
    free(text);
    errno = is_whole ? 0 : failure;
    return NULL;
  }
  text[bytes] = '\0';
  return text;
}

bool kvp_config_check_literals(const char *place, const char *text) {
  return check_text(place, text, 0);
}
