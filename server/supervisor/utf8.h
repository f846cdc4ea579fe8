/* UTF-8 as protobuf wants it in a string. Any thread; no state. */
#ifndef KVPOOL_SUPERVISOR_UTF8_H
#define KVPOOL_SUPERVISOR_UTF8_H

#include <stddef.h>

/* Length of the longest prefix that is valid UTF-8 (no overlong forms, no surrogates, at most U+10FFFF) and holds no
 * NUL; text_bytes when all of it is. */
size_t kvp_utf8_valid_bytes(const char *text, size_t text_bytes);

/* Copies the NUL-terminated text, with '?' for every byte that is not part of valid UTF-8. Cuts between characters
 * when it does not fit; the result is always terminated. */
void kvp_utf8_copy(const char *text, char *out, size_t out_bytes);

#endif
