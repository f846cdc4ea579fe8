/* What a worker asks on its socket. Loop thread only. */
#include "server/supervisor/attach_requests.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/failpoint.h"
#include "server/supervisor/attachment.h"
#include "server/supervisor/daemon.h"
#include "server/supervisor/name.h"

/* ---- answers ----------------------------------------------------------------------------------------------------
 */

static void answer(struct kvp_attachment *attachment, uint32_t kind, const void *body, uint32_t body_bytes) {
  kvp_attach_channel_send(&attachment->channel, kind, attachment->request.number, body, body_bytes, NULL, 0);
}

/* The last of a request. error NULL: done. */
static void answer_result(struct kvp_attachment *attachment, const struct kvp_error *error) {
  struct kvp_error done;
  (void)kvp_error_set(&done, KVP_OK, "done");
  answer(attachment, KVP_ATTACH_RESULT, error == NULL ? &done : error, sizeof done);
  attachment->request.state = KVP_ATTACH_IDLE;
  kvp_attachment_look(attachment);
}

static void answer_buffer(struct kvp_attachment *attachment, const struct kvp_buffer *buffer) {
  const struct kvp_attach_buffer body = {
      .buffer_id = buffer->id,
      .bytes = buffer->bytes,
      .memory_bytes = buffer->imported ? 0 : kvp_memory_chunks_bytes(buffer->memory),
  };
  answer(attachment, KVP_ATTACH_BUFFER, &body, sizeof body);
}

/* ---- chunks -----------------------------------------------------------------------------------------------------
 */

bool kvp_attach_request_is_sending(const struct kvp_attach_request *request) {
  return request->state == KVP_ATTACH_SENDING_POOL || request->state == KVP_ATTACH_SENDING_BUFFER;
}

/* Of what is sent next. NULL: the last has been; or *error. */
static const struct kvp_memory *memory_next(const struct kvp_attachment *attachment, struct kvp_error *error) {
  const struct kvp_attach_request *request = &attachment->request;
  if (request->state == KVP_ATTACH_SENDING_BUFFER) {
    const struct kvp_buffer *buffer = kvp_buffer_find(attachment->session, request->buffer_id, error);
    return buffer == NULL || request->region > 0 ? NULL : buffer->memory;
  }
  struct kvp_pool *pool = kvp_pool_find(attachment->daemon, request->pool_id, error);
  if (pool == NULL || request->region == pool->spec.region_count) {
    return NULL;
  }
  return kvp_pool_placement(pool, attachment->device)->memory[request->region];
}

static void send_chunks(struct kvp_attachment *attachment, const struct kvp_memory *memory) {
  struct kvp_attach_request *request = &attachment->request;
  uint32_t chunk_count = kvp_memory_chunk_count(memory);
  uint32_t left = chunk_count - request->chunk;
  uint32_t count = left < kvp_attach_chunks_per_message ? left : kvp_attach_chunks_per_message;
  struct kvp_control_chunks body = {.memory_id = request->region,
                                    .memory_bytes = kvp_memory_chunks_bytes(memory),
                                    .first_chunk = request->chunk,
                                    .chunk_count = chunk_count};
  int fds[kvp_attach_chunks_per_message];
  for (uint32_t i = 0; i < count; i++) {
    fds[i] = kvp_memory_chunk(memory, request->chunk + i, &body.chunk_bytes[i]);
  }
  kvp_attach_channel_send(&attachment->channel, KVP_ATTACH_MEMORY_CHUNKS, request->number, &body, sizeof body, fds,
                          count);
  KVP_FAILPOINT("daemon.memory_sent");
  request->chunk += count;
  if (request->chunk == chunk_count) {
    request->chunk = 0;
    request->region++;
  }
}

void kvp_attach_request_go_on(struct kvp_attachment *attachment) {
  struct kvp_error error;
  (void)kvp_error_set(&error, KVP_OK, "done");
  const struct kvp_memory *memory = memory_next(attachment, &error);
  if (memory == NULL) {
    answer_result(attachment, &error);
  } else {
    send_chunks(attachment, memory);
  }
}

static void begin_sending(struct kvp_attachment *attachment, enum kvp_attach_request_state state) {
  attachment->request.state = state;
  attachment->request.region = attachment->request.chunk = 0;
  kvp_attachment_look(attachment);
}

/* ---- pools ------------------------------------------------------------------------------------------------------
 */

static void fill_pool(const struct kvp_pool *pool, const struct kvp_placement *placement,
                      struct kvp_attach_pool *out) {
  memset(out, 0, sizeof *out);
  out->pool_id = pool->id;
  out->num_blocks = pool->spec.num_blocks;
  out->block_size = pool->spec.block_size;
  out->kind = (uint32_t)pool->spec.kind;
  out->region_count = pool->spec.region_count;
  for (uint32_t i = 0; i < pool->spec.region_count; i++) {
    struct kvp_attach_region *region = &out->regions[i];
    memcpy(region->name, pool->spec.regions[i].name, sizeof region->name);
    region->format = (uint32_t)pool->regions[i].format->id;
    region->width = pool->regions[i].sizes.elements;
    region->tokens_per_block = pool->regions[i].tokens_per_block;
    region->num_layers = pool->regions[i].num_layers;
    region->memory_bytes = kvp_memory_chunks_bytes(placement->memory[i]);
  }
}

static enum kvp_status map_pool(struct kvp_attachment *attachment, const struct kvp_attach_pool_name *asked,
                                struct kvp_error *error) {
  if (memchr(asked->name, '\0', sizeof asked->name) == NULL) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "name", -1, 0, "the pool's name does not end");
  }
  enum kvp_status status = kvp_name_check(asked->name, "name", false, error);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_pool *pool = kvp_pool_find_name(attachment->daemon, asked->name, error);
  if (pool == NULL) {
    return KVP_UNKNOWN_POOL;
  }
  const struct kvp_placement *placement = kvp_pool_placement(pool, attachment->device);
  if (placement == NULL) {
    return kvp_error_set_at(error, KVP_WRONG_DEVICE, -1, "name", -1, 0,
                            "pool '%s' has no placement on device %s, which this worker is attached to",
                            pool->spec.name, attachment->device->name);
  }
  status = kvp_pool_access_map(&pool->access, &pool->spec, attachment->session->namespace_name, error);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_attach_pool body;
  fill_pool(pool, placement, &body);
  answer(attachment, KVP_ATTACH_POOL, &body, sizeof body);
  attachment->request.pool_id = pool->id;
  begin_sending(attachment, KVP_ATTACH_SENDING_POOL);
  return KVP_OK;
}

/* ---- buffers ----------------------------------------------------------------------------------------------------
 */

/* The session's, on this device. */
static struct kvp_buffer *find_buffer(struct kvp_attachment *attachment, uint64_t buffer_id,
                                      struct kvp_error *error) {
  struct kvp_buffer *buffer = kvp_buffer_find(attachment->session, buffer_id, error);
  if (buffer != NULL && buffer->device != attachment->device) {
    (void)kvp_error_set_at(error, KVP_WRONG_DEVICE, -1, "buffer_id", -1, (int64_t)buffer_id,
                           "buffer %" PRIu64 " is on device %s, this worker is attached to %s", buffer_id,
                           buffer->device->name, attachment->device->name);
    return NULL;
  }
  return buffer;
}

static enum kvp_status map_buffer(struct kvp_attachment *attachment, const struct kvp_attach_buffer *asked,
                                  struct kvp_error *error) {
  const struct kvp_buffer *buffer = find_buffer(attachment, asked->buffer_id, error);
  if (buffer == NULL) {
    return (enum kvp_status)error->status;
  }
  if (buffer->imported) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "buffer_id", -1, (int64_t)buffer->id,
                            "buffer %" PRIu64 " is memory that a worker brought: only the daemon's can be mapped",
                            buffer->id);
  }
  answer_buffer(attachment, buffer);
  attachment->request.buffer_id = buffer->id;
  begin_sending(attachment, KVP_ATTACH_SENDING_BUFFER);
  return KVP_OK;
}

static void on_buffer_made(void *context, struct kvp_buffer *buffer, const struct kvp_error *error) {
  struct kvp_attachment *attachment = context;
  if (buffer != NULL) {
    buffer->attachment = attachment;
    buffer->attachment_id = attachment->id;
    attachment->buffers++;
    KVP_FAILPOINT("daemon.buffer_made");
  }
  if (attachment->state == KVP_ATTACHMENT_ENDING) {
    if (buffer != NULL) { /* which may be gone at once: the request keeps the attachment until that is over */
      kvp_buffer_release(attachment->daemon, buffer);
    }
    attachment->request.state = KVP_ATTACH_IDLE;
    kvp_attachment_settle(attachment);
    return;
  }
  attachment->request.state = KVP_ATTACH_IDLE;
  if (buffer == NULL) {
    answer_result(attachment, error);
    return;
  }
  answer_buffer(attachment, buffer);
  if (buffer->imported) {
    answer_result(attachment, NULL);
  } else {
    attachment->request.buffer_id = buffer->id;
    begin_sending(attachment, KVP_ATTACH_SENDING_BUFFER);
  }
}

static void create_buffer(struct kvp_attachment *attachment, const struct kvp_attach_buffer *asked) {
  attachment->request.state = KVP_ATTACH_MAKING_BUFFER;
  kvp_buffer_create(attachment->daemon, attachment->session, attachment->device, asked->bytes, on_buffer_made,
                    attachment);
}

static enum kvp_status release_buffer(struct kvp_attachment *attachment, const struct kvp_attach_buffer *asked,
                                      struct kvp_error *error) {
  struct kvp_buffer *buffer = kvp_buffer_find(attachment->session, asked->buffer_id, error);
  if (buffer == NULL) {
    return KVP_UNKNOWN_BUFFER;
  }
  if (buffer->attachment != attachment) {
    return kvp_error_set_at(error, KVP_PERMISSION_DENIED, -1, "buffer_id", -1, (int64_t)buffer->id,
                            "buffer %" PRIu64 " was not made by this worker", buffer->id);
  }
  attachment->request.state = KVP_ATTACH_RELEASING_BUFFER;
  attachment->request.buffer_id = buffer->id;
  kvp_buffer_release(attachment->daemon, buffer);
  return KVP_OK;
}

void kvp_attach_request_buffer_gone(struct kvp_attachment *attachment, uint64_t buffer_id) {
  const struct kvp_attach_request *request = &attachment->request;
  if (request->state == KVP_ATTACH_RELEASING_BUFFER && request->buffer_id == buffer_id) {
    answer_result(attachment, NULL);
  }
}

/* ---- imports ----------------------------------------------------------------------------------------------------
 */

static bool may_bring_handles(const struct kvp_attachment *attachment) {
  const struct kvp_config *config = attachment->daemon->config;
  bool may = attachment->peer.is_operator;
  for (uint32_t i = 0; i < config->ipc_uid_count; i++) {
    may = may || config->ipc_uids[i] == attachment->peer.uid;
  }
  return may;
}

static const uint32_t nvidia_major = 195; /* of device nodes: the kernel's admin-guide, devices.txt */

/* A driver's descriptors are of its device nodes; whether one stands for memory, only the executor can tell. One of host
 * memory comes from a driver that keeps a GPU's there. Anything else stays here: the executor would wait for it as we
 * would, for a terminal's last bytes, say. Neither question is passed on to a file system: this one is asked for what it
 * knows already. */
static enum kvp_status driver_fd_check(int fd, struct kvp_error *error) {
  struct statx status;
  if (fcntl(fd, F_GET_SEALS) >= 0 || (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &status) == 0 &&
                                      S_ISCHR(status.stx_mode) && status.stx_rdev_major == nvidia_major)) {
    return KVP_OK;
  }
  return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "kind", -1, KVP_IMPORT_VMM,
                          "memory of kind %d: its descriptor is no GPU driver's", KVP_IMPORT_VMM);
}

static enum kvp_status import_check(const struct kvp_attachment *attachment, const struct kvp_attach_import *asked,
                                    const struct kvp_fd_message *message, struct kvp_error *error) {
  uint32_t wanted_fds = asked->kind == KVP_IMPORT_IPC_HANDLE ? 0 : 1;
  if (asked->kind < KVP_IMPORT_MEMFD || asked->kind > KVP_IMPORT_IPC_HANDLE) {
    return kvp_error_set_at(error, KVP_UNIMPLEMENTED, -1, "kind", -1, asked->kind,
                            "memory of kind %u is not known to this daemon", asked->kind);
  }
  if (message->fd_count != wanted_fds) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "kind", -1, message->fd_count,
                            "memory of kind %u comes with %u descriptors, not %u", asked->kind, wanted_fds,
                            message->fd_count);
  }
  if (asked->offset_bytes > asked->allocation_bytes || asked->bytes > asked->allocation_bytes - asked->offset_bytes ||
      asked->bytes == 0) {
    return kvp_error_set_at(error, KVP_OUT_OF_RANGE, -1, "bytes", -1, (int64_t)asked->bytes,
                            "%" PRIu64 " bytes from offset %" PRIu64 " are not inside the allocation's %" PRIu64,
                            asked->bytes, asked->offset_bytes, asked->allocation_bytes);
  }
  if (asked->offset_bytes % kvp_import_alignment_bytes != 0) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "offset_bytes", -1, (int64_t)asked->offset_bytes,
                            "offset %" PRIu64 " is not a multiple of %d", asked->offset_bytes,
                            kvp_import_alignment_bytes);
  }
  if (asked->kind == KVP_IMPORT_IPC_HANDLE && !may_bring_handles(attachment)) {
    return kvp_error_set_at(error, KVP_PERMISSION_DENIED, -1, "kind", -1, attachment->peer.uid,
                            "uid %u may not bring memory by an IPC handle: ipc_uids of the configuration does not "
                            "name it",
                            (unsigned)attachment->peer.uid);
  }
  switch (asked->kind) {
  case KVP_IMPORT_MEMFD:
    return kvp_memory_fd_check(message->fds[0], asked->allocation_bytes, error);
  case KVP_IMPORT_VMM:
    return driver_fd_check(message->fds[0], error);
  default:
    return KVP_OK;
  }
}

static enum kvp_status import_buffer(struct kvp_attachment *attachment, const struct kvp_attach_import *asked,
                                     struct kvp_fd_message *message, struct kvp_error *error) {
  enum kvp_status status = import_check(attachment, asked, message, error);
  if (status != KVP_OK) {
    return status;
  }
  struct kvp_control_open open = {.kind = asked->kind,
                                  .allocation_bytes = asked->allocation_bytes,
                                  .offset_bytes = asked->offset_bytes,
                                  .bytes = asked->bytes};
  memcpy(open.ipc_handle, asked->ipc_handle, sizeof open.ipc_handle);
  int fd = message->fd_count > 0 ? message->fds[0] : -1;
  message->fd_count = 0; /* it is the buffer's now */
  attachment->request.state = KVP_ATTACH_MAKING_BUFFER;
  kvp_buffer_import(attachment->daemon, attachment->session, attachment->device, &open, fd, on_buffer_made,
                    attachment);
  return KVP_OK;
}

/* ---- dispatch ---------------------------------------------------------------------------------------------------
 */

static uint32_t body_bytes_of(uint32_t kind) {
  switch (kind) {
  case KVP_ATTACH_MAP_POOL:
    return sizeof(struct kvp_attach_pool_name);
  case KVP_ATTACH_CREATE_BUFFER:
  case KVP_ATTACH_MAP_BUFFER:
  case KVP_ATTACH_RELEASE_BUFFER:
    return sizeof(struct kvp_attach_buffer);
  case KVP_ATTACH_IMPORT_BUFFER:
    return sizeof(struct kvp_attach_import);
  default:
    return 0;
  }
}

static enum kvp_status message_check(const struct kvp_fd_message *message, struct kvp_error *error) {
  uint32_t wanted = body_bytes_of(message->kind);
  if (wanted == 0 || message->request == 0) {
    return kvp_error_set(error, KVP_MALFORMED, "message %u of kind %u: it is no request of a worker's",
                         message->request, message->kind);
  }
  if (message->body_bytes != wanted) {
    return kvp_error_set(error, KVP_MALFORMED, "message %u of kind %u has %u bytes, not %u", message->request,
                         message->kind, message->body_bytes, wanted);
  }
  if (message->fd_count > 0 && message->kind != KVP_ATTACH_IMPORT_BUFFER) {
    return kvp_error_set(error, KVP_MALFORMED, "message %u of kind %u comes with %u descriptors, it takes none",
                         message->request, message->kind, message->fd_count);
  }
  return KVP_OK;
}

/* Copied: bytes of a message have no alignment. */
union request_body {
  struct kvp_attach_pool_name name;
  struct kvp_attach_buffer buffer;
  struct kvp_attach_import import;
};

static enum kvp_status request_begin(struct kvp_attachment *attachment, struct kvp_fd_message *message,
                                     struct kvp_error *error) {
  union request_body body;
  memcpy(&body, message->body, message->body_bytes);
  switch (message->kind) {
  case KVP_ATTACH_MAP_POOL:
    return map_pool(attachment, &body.name, error);
  case KVP_ATTACH_MAP_BUFFER:
    return map_buffer(attachment, &body.buffer, error);
  case KVP_ATTACH_RELEASE_BUFFER:
    return release_buffer(attachment, &body.buffer, error);
  case KVP_ATTACH_IMPORT_BUFFER:
    return import_buffer(attachment, &body.import, message, error);
  default:
    create_buffer(attachment, &body.buffer);
    return KVP_OK;
  }
}

bool kvp_attach_request_take(struct kvp_attachment *attachment, struct kvp_fd_message *message,
                             struct kvp_error *error) {
  assert(attachment->request.state == KVP_ATTACH_IDLE);
  if (message_check(message, error) != KVP_OK) {
    return false;
  }
  struct kvp_error refusal;
  attachment->request.number = message->request;
  if (request_begin(attachment, message, &refusal) != KVP_OK) {
    answer_result(attachment, &refusal);
  }
  kvp_attachment_look(attachment);
  return true;
}
