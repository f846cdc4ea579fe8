/* Decodes the bytes of a request into a kvp_rpc_message. Any thread; a message belongs to one thread at a time.
 *
 * A message and its arena are one block of memory, sized so that an ordinary request fits; a list of further chunks
 * takes what does not. What always holds: the chunks together are never larger than the limit, and nothing of the
 * arena is freed before the message is.
 */
#include "server/supervisor/rpc_decode.h"

#include <assert.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stdlib.h>

#include "server/supervisor/rpc_wire.h"

enum { first_chunk_spare_bytes = 1024, next_chunk_bytes_min = 16384, alignment = alignof(max_align_t) };

struct chunk {
  alignas(max_align_t) struct chunk *next;
};

/* What a kvp_rpc_message really is; the first chunk's memory lies behind it. */
struct decoded {
  struct kvp_rpc_message message;
  unsigned references;
  alignas(max_align_t) struct chunk more; /* its next: the chunks beyond the first */
};

struct arena {
  struct decoded *owner;
  uint8_t *at; /* free memory of the newest chunk */
  size_t left_bytes;
  size_t newest_bytes;
  size_t allowed_bytes; /* what further chunks may still take */
  bool too_large;
  bool out_of_memory;
};

static size_t smaller(size_t a, size_t b) {
  return a < b ? a : b;
}

static size_t larger(size_t a, size_t b) {
  return a > b ? a : b;
}

static bool arena_grow(struct arena *arena, size_t bytes) {
  if (bytes > arena->allowed_bytes) {
    arena->too_large = true;
    return false;
  }
  const size_t wanted_bytes = larger(next_chunk_bytes_min, 2 * arena->newest_bytes);
  const size_t chunk_bytes = larger(bytes, smaller(wanted_bytes, arena->allowed_bytes));
  struct chunk *chunk = malloc(sizeof *chunk + chunk_bytes);
  if (chunk == NULL) {
    arena->out_of_memory = true;
    return false;
  }
  chunk->next = arena->owner->more.next;
  arena->owner->more.next = chunk;
  arena->at = (uint8_t *)(chunk + 1);
  arena->left_bytes = chunk_bytes;
  arena->newest_bytes = chunk_bytes;
  arena->allowed_bytes -= chunk_bytes;
  return true;
}

static void *arena_allocate(void *context, size_t bytes) {
  struct arena *arena = context;
  if (bytes > SIZE_MAX - alignment) {
    arena->too_large = true;
    return NULL;
  }
  const size_t rounded_bytes = (bytes + alignment - 1) / alignment * alignment;
  if (rounded_bytes > arena->left_bytes && !arena_grow(arena, rounded_bytes)) {
    return NULL;
  }
  void *memory = arena->at;
  arena->at += rounded_bytes;
  arena->left_bytes -= rounded_bytes;
  return memory;
}

static void arena_free_nothing(void *context, void *memory) {
  (void)context;
  (void)memory;
}

/* Most of a large request is one array of bytes, so the wire's length and a little more holds the decoded message. */
static struct decoded *decoded_new(const ProtobufCMessageDescriptor *type, size_t wire_bytes, size_t arena_bytes_max,
                                   struct arena *arena) {
  const size_t wanted_bytes = wire_bytes + type->sizeof_message + first_chunk_spare_bytes;
  const size_t chunk_bytes = smaller(wanted_bytes, arena_bytes_max) / alignment * alignment;
  struct decoded *decoded = malloc(sizeof *decoded + chunk_bytes);
  if (decoded == NULL) {
    return NULL;
  }
  *decoded = (struct decoded){.message.wire_bytes = wire_bytes, .references = 1};
  *arena = (struct arena){
      .owner = decoded,
      .at = (uint8_t *)(decoded + 1),
      .left_bytes = chunk_bytes,
      .newest_bytes = chunk_bytes,
      .allowed_bytes = arena_bytes_max - chunk_bytes,
  };
  return decoded;
}

enum kvp_status kvp_rpc_decode(const ProtobufCMessageDescriptor *type, const uint8_t *wire, size_t wire_bytes,
                               size_t arena_bytes_max, struct kvp_rpc_message **out, struct kvp_error *error) {
  if (kvp_rpc_wire_check(type, wire, wire_bytes, error) != KVP_OK) {
    return KVP_MALFORMED;
  }
  struct arena arena;
  struct decoded *decoded = decoded_new(type, wire_bytes, arena_bytes_max, &arena);
  if (decoded == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "%s of %zu bytes: no memory", type->short_name, wire_bytes);
  }
  ProtobufCAllocator allocator = {arena_allocate, arena_free_nothing, &arena};
  decoded->message.body = protobuf_c_message_unpack(type, &allocator, wire_bytes, wire);
  if (decoded->message.body != NULL) {
    *out = &decoded->message;
    return KVP_OK;
  }
  kvp_rpc_message_unref(&decoded->message);
  if (arena.too_large) {
    return kvp_error_set(error, KVP_TOO_LARGE, "%s of %zu bytes decodes to more than %zu bytes", type->short_name,
                         wire_bytes, arena_bytes_max);
  }
  if (arena.out_of_memory) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "%s of %zu bytes: no memory", type->short_name, wire_bytes);
  }
  return kvp_error_set(error, KVP_MALFORMED, "%s of %zu bytes is not a valid protobuf message", type->short_name,
                       wire_bytes);
}

struct kvp_rpc_message *kvp_rpc_message_ref(struct kvp_rpc_message *message) {
  struct decoded *decoded = (struct decoded *)message;
  assert(decoded->references > 0);
  decoded->references++;
  return message;
}

void kvp_rpc_message_unref(struct kvp_rpc_message *message) {
  if (message == NULL) {
    return;
  }
  struct decoded *decoded = (struct decoded *)message;
  assert(decoded->references > 0);
  decoded->references--;
  if (decoded->references > 0) {
    return;
  }
  for (struct chunk *chunk = decoded->more.next; chunk != NULL;) {
    struct chunk *next = chunk->next;
    free(chunk);
    chunk = next;
  }
  free(decoded);
}
