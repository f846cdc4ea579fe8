/* UTF-8 as protobuf wants it in a string: the table of well-formed sequences of the Unicode standard (3.9, table
 * 3-7). Any thread; no state. */
#include "server/supervisor/utf8.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

static bool between(unsigned char byte, unsigned char first, unsigned char last) {
  return byte >= first && byte <= last;
}

/* Bytes of the character at text, 0 when it is not one. */
static size_t character_bytes(const unsigned char *text, size_t text_bytes) {
  const unsigned char lead = text[0];
  if (between(lead, 0x01, 0x7F)) {
    return 1;
  }
  size_t bytes = 0;
  unsigned char second_first = 0x80;
  unsigned char second_last = 0xBF;
  if (between(lead, 0xC2, 0xDF)) {
    bytes = 2;
  } else if (between(lead, 0xE0, 0xEF)) {
    bytes = 3;
    second_first = lead == 0xE0 ? 0xA0 : 0x80; /* below: overlong */
    second_last = lead == 0xED ? 0x9F : 0xBF;  /* above: surrogates */
  } else if (between(lead, 0xF0, 0xF4)) {
    bytes = 4;
    second_first = lead == 0xF0 ? 0x90 : 0x80; /* below: overlong */
    second_last = lead == 0xF4 ? 0x8F : 0xBF;  /* above: past U+10FFFF */
  } else {
    return 0;
  }
  if (text_bytes < bytes || !between(text[1], second_first, second_last)) {
    return 0;
  }
  for (size_t i = 2; i < bytes; i++) {
    if (!between(text[i], 0x80, 0xBF)) {
      return 0;
    }
  }
  return bytes;
}

size_t kvp_utf8_valid_bytes(const char *text, size_t text_bytes) {
  size_t valid = 0;
  while (valid < text_bytes) {
    const size_t bytes = character_bytes((const unsigned char *)text + valid, text_bytes - valid);
    if (bytes == 0) {
      break;
    }
    valid += bytes;
  }
  return valid;
}

void kvp_utf8_copy(const char *text, char *out, size_t out_bytes) {
  assert(out_bytes > 0);
  const size_t text_bytes = strlen(text);
  size_t from = 0;
  size_t to = 0;
  while (from < text_bytes) {
    const size_t bytes = character_bytes((const unsigned char *)text + from, text_bytes - from);
    const size_t step = bytes == 0 ? 1 : bytes;
    if (to + step >= out_bytes) {
      break;
    }
    if (bytes == 0) {
      out[to] = '?';
    } else {
      memcpy(out + to, text + from, bytes);
    }
    from += step;
    to += step;
  }
  out[to] = '\0';
}
