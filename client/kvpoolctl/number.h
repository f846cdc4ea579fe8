/* Numbers and lists of numbers of the command line. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_NUMBER_H
#define KVPOOL_CLIENT_KVPOOLCTL_NUMBER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { kvp_ctl_list_max = 1 << 24 };

struct kvp_ctl_list {
  int32_t *items; /* [count], in the order given */
  size_t count;
  size_t room;
};

/* Digits only, at most max. */
bool kvp_ctl_number_parse(const char *text, uint64_t max, uint64_t *out);
/* The same, up to `end`, which may be the string's. */
bool kvp_ctl_digits_parse(const char *text, const char *end, uint64_t max, uint64_t *out);

/* Appends what "0-15,32" names, both ends of a range included. False: not such a list, or more than
 * kvp_ctl_list_max in all. */
bool kvp_ctl_list_parse(struct kvp_ctl_list *list, const char *text);
/* What is wrong with a text that kvp_ctl_list_parse doesn't take. */
const char *kvp_ctl_list_fault(const char *text);
void kvp_ctl_list_append(struct kvp_ctl_list *list, int32_t item);
void kvp_ctl_list_deinit(struct kvp_ctl_list *list);

/* The same back: "0-15,32", ",..." behind the tenth piece. Caller frees. */
char *kvp_ctl_list_text(const int32_t *items, size_t count);

#endif
