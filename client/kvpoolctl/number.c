/* Numbers and lists of numbers of the command line. */
#include "client/kvpoolctl/number.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/ctl.h"

enum { text_pieces_max = 10 };

_Static_assert(kvp_ctl_list_max == 16777216, "what kvp_ctl_list_fault says");

bool kvp_ctl_digits_parse(const char *text, const char *end, uint64_t max, uint64_t *out) {
  uint64_t value = 0;
  if (text == end) {
    return false;
  }
  for (; text != end; text++) {
    if (*text < '0' || *text > '9' || __builtin_mul_overflow(value, 10, &value) ||
        __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value) || value > max) {
      return false;
    }
  }
  *out = value;
  return true;
}

bool kvp_ctl_number_parse(const char *text, uint64_t max, uint64_t *out) {
  return kvp_ctl_digits_parse(text, text + strlen(text), max, out);
}

void kvp_ctl_list_append(struct kvp_ctl_list *list, int32_t item) {
  if (list->count == list->room) {
    list->room = list->room == 0 ? 64 : 2 * list->room;
    list->items = kvp_ctl_reallocate(list->items, list->room, sizeof list->items[0]);
  }
  list->items[list->count++] = item;
}

bool kvp_ctl_list_parse(struct kvp_ctl_list *list, const char *text) {
  for (;;) {
    const char *end = strchrnul(text, ',');
    const char *dash = memchr(text, '-', (size_t)(end - text));
    uint64_t first = 0;
    uint64_t last = 0;
    if (!kvp_ctl_digits_parse(text, dash == NULL ? end : dash, INT32_MAX, &first)) {
      return false;
    }
    last = first;
    if (dash != NULL && (!kvp_ctl_digits_parse(dash + 1, end, INT32_MAX, &last) || last < first)) {
      return false;
    }
    if (last - first >= kvp_ctl_list_max - list->count) {
      return false;
    }
    for (uint64_t item = first; item <= last; item++) {
      kvp_ctl_list_append(list, (int32_t)item);
    }
    if (*end == '\0') {
      return true;
    }
    text = end + 1;
  }
}

const char *kvp_ctl_list_fault(const char *text) {
  for (;;) {
    const char *end = strchrnul(text, ',');
    const char *dash = memchr(text, '-', (size_t)(end - text));
    uint64_t first = 0;
    uint64_t last = 0;
    if (!kvp_ctl_digits_parse(text, dash == NULL ? end : dash, UINT64_MAX, &first) ||
        (dash != NULL && !kvp_ctl_digits_parse(dash + 1, end, UINT64_MAX, &last))) {
      return "a list like 0-15,32 is wanted";
    }
    if (first > INT32_MAX || last > INT32_MAX) {
      return "numbers go up to 2147483647";
    }
    if (dash != NULL && last < first) {
      return "a range begins with the smaller number";
    }
    if (*end == '\0') {
      return "that is more than 16777216 numbers in all";
    }
    text = end + 1;
  }
}

void kvp_ctl_list_deinit(struct kvp_ctl_list *list) {
  free(list->items);
  *list = (struct kvp_ctl_list){0};
}

char *kvp_ctl_list_text(const int32_t *items, size_t count) {
  enum { piece_bytes_max = 24 };
  char *text = kvp_ctl_allocate(text_pieces_max + 2, piece_bytes_max);
  size_t used = 0;
  size_t pieces = 0;
  for (size_t i = 0; i < count; pieces++) {
    if (pieces == text_pieces_max) {
      (void)snprintf(text + used, piece_bytes_max, ",...");
      break;
    }
    size_t last = i;
    while (last + 1 < count && items[last] < INT32_MAX && items[last + 1] == items[last] + 1) {
      last++;
    }
    int length =
        last == i ? snprintf(text + used, piece_bytes_max, "%s%d", pieces > 0 ? "," : "", items[i])
                  : snprintf(text + used, piece_bytes_max, "%s%d-%d", pieces > 0 ? "," : "", items[i], items[last]);
    used += (size_t)length;
    i = last + 1;
  }
  return text;
}
