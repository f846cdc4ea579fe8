/* Buffers of an attachment: made by the daemon and mapped here, or brought along. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/attach.h"
#include "client/worker_cuda.h"
#include "proto/failpoint.h"

struct kvp_attached_buffer {
  atomic_uint references; /* the buffer's, and each array's */
  kvpool_attachment *attachment;
  struct kvp_mapping mapping; /* base NULL: not mapped by us */
  void *data;                 /* where the buffer begins */
  bool is_owned;              /* its release releases it in the daemon */
};

struct buffer_request {
  kvpool_buffer *buffer;
  bool is_described;
  bool is_imported; /* no memory comes */
};

static kvpool_status buffer_on_part(void *context, struct kvp_fd_message *message, kvpool_error *error) {
  struct buffer_request *request = context;
  kvpool_buffer *buffer = request->buffer;
  if (message->kind == KVP_ATTACH_MEMORY_CHUNKS && request->is_described && !request->is_imported) {
    KVP_FAILPOINT("worker.buffer_memory_received");
    return kvp_mapping_add(&buffer->attached->mapping, message, error);
  }
  if (message->kind != KVP_ATTACH_BUFFER || request->is_described) {
    return kvp_fail(error, KVPOOL_MALFORMED, "kvpoold answers with a message of kind %u", message->kind);
  }
  struct kvp_attach_buffer body;
  kvpool_status status = kvp_attach_check_body(message, sizeof body, error);
  if (status == KVPOOL_OK) {
    memcpy(&body, message->body, sizeof body);
    request->is_described = true;
    buffer->id = body.buffer_id;
    buffer->bytes = body.bytes;
  }
  return status;
}

static void attached_unref(void *object) {
  struct kvp_attached_buffer *attached = object;
  if (atomic_fetch_sub_explicit(&attached->references, 1, memory_order_acq_rel) == 1) {
    kvp_mapping_deinit(&attached->mapping);
    kvp_attachment_unref(attached->attachment);
    free(attached);
  }
}

static void buffer_free(kvpool_buffer *buffer) {
  attached_unref(buffer->attached);
  free(buffer);
}

static kvpool_buffer *buffer_new(kvpool_attachment *attachment, bool is_owned) {
  kvpool_buffer *buffer = calloc(1, sizeof *buffer);
  struct kvp_attached_buffer *attached = calloc(1, sizeof *attached);
  if (buffer == NULL || attached == NULL) {
    free(attached);
    free(buffer);
    return NULL;
  }
  kvp_attachment_ref(attachment);
  *attached = (struct kvp_attached_buffer){
      .attachment = attachment,
      .mapping = {.access = KVPOOL_MAP_READ_WRITE,
                  .on_device = (attachment->welcome.flags & KVP_ATTACH_DEVICE_FDS) != 0,
                  .granularity_bytes = attachment->welcome.memory_granularity_bytes},
      .is_owned = is_owned,
  };
  atomic_init(&attached->references, 1);
  memcpy(attached->mapping.uuid, attachment->welcome.uuid, sizeof attached->mapping.uuid);
  buffer->attached = attached;
  (void)snprintf(buffer->device, sizeof buffer->device, "%s", attachment->welcome.device);
  return buffer;
}

/* Asks, and takes what comes; buffer is freed on failure. */
static kvpool_status buffer_ask(kvpool_buffer *buffer, const struct kvp_attach_request *asked, kvpool_buffer **out,
                                kvpool_error *error) {
  struct buffer_request request = {.buffer = buffer, .is_imported = asked->kind == KVP_ATTACH_IMPORT_BUFFER};
  struct kvp_attached_buffer *attached = buffer->attached;
  kvpool_status status = kvp_attachment_ask(attached->attachment, asked, buffer_on_part, &request, error);
  if (status == KVPOOL_OK &&
      (!request.is_described || (!request.is_imported && !kvp_mapping_is_whole(&attached->mapping)) ||
       (!request.is_imported && attached->mapping.bytes < buffer->bytes))) {
    status = kvp_fail(error, KVPOOL_MALFORMED, "kvpoold sent %llu bytes for buffer %llu of %llu bytes",
                      (unsigned long long)attached->mapping.mapped_bytes, (unsigned long long)buffer->id,
                      (unsigned long long)buffer->bytes);
  }
  if (status != KVPOOL_OK) {
    if (request.is_described && attached->is_owned) {
      (void)kvp_attached_buffer_release(buffer, NULL);
    } else {
      buffer_free(buffer);
    }
    return status;
  }
  if (!request.is_imported) {
    attached->data = attached->mapping.base;
  }
  *out = buffer;
  return KVPOOL_OK;
}

static kvpool_status buffer_get(kvpool_attachment *attachment, enum kvp_attach_kind kind,
                                const struct kvp_attach_buffer *body, kvpool_buffer **out, kvpool_error *error) {
  kvpool_buffer *buffer = buffer_new(attachment, kind == KVP_ATTACH_CREATE_BUFFER);
  if (buffer == NULL) {
    return kvp_fail_no_memory(error);
  }
  const struct kvp_attach_request asked = {.kind = kind, .body = body, .body_bytes = sizeof *body, .fd = -1};
  return buffer_ask(buffer, &asked, out, error);
}

kvpool_status kvpool_attachment_create_buffer(kvpool_attachment *attachment, uint64_t bytes, kvpool_buffer **out,
                                              kvpool_error *error) {
  assert(attachment != NULL && out != NULL);
  const struct kvp_attach_buffer body = {.bytes = bytes};
  return buffer_get(attachment, KVP_ATTACH_CREATE_BUFFER, &body, out, error);
}

kvpool_status kvpool_attachment_map_buffer(kvpool_attachment *attachment, uint64_t buffer_id, kvpool_buffer **out,
                                           kvpool_error *error) {
  assert(attachment != NULL && out != NULL);
  const struct kvp_attach_buffer body = {.buffer_id = buffer_id};
  return buffer_get(attachment, KVP_ATTACH_MAP_BUFFER, &body, out, error);
}

/* ---- memory of this process -------------------------------------------------------------------------------------
 */

kvpool_status kvp_attached_buffer_import(kvpool_attachment *attachment, const struct kvp_attach_import *import,
                                         int fd, void *data, kvpool_buffer **out, kvpool_error *error) {
  kvpool_buffer *buffer = buffer_new(attachment, true);
  if (buffer == NULL) {
    return kvp_fail_no_memory(error);
  }
  const struct kvp_attach_request asked = {
      .kind = KVP_ATTACH_IMPORT_BUFFER, .body = import, .body_bytes = sizeof *import, .fd = fd};
  kvpool_buffer *made;
  kvpool_status status = buffer_ask(buffer, &asked, &made, error);
  if (status == KVPOOL_OK) {
    made->attached->data = data;
    *out = made;
  }
  return status;
}

kvpool_status kvpool_attachment_import_memfd(kvpool_attachment *attachment, int fd, uint64_t memfd_bytes,
                                             uint64_t offset_bytes, uint64_t bytes, kvpool_buffer **out,
                                             kvpool_error *error) {
  assert(attachment != NULL && out != NULL);
  if (bytes == 0 || offset_bytes > memfd_bytes || bytes > memfd_bytes - offset_bytes) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "offset_bytes", -1, (int64_t)offset_bytes,
                       "%llu bytes at offset %llu are not inside a memfd of %llu bytes", (unsigned long long)bytes,
                       (unsigned long long)offset_bytes, (unsigned long long)memfd_bytes);
  }
  const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  const uint64_t begin = offset_bytes / page * page;
  const uint64_t map_bytes = offset_bytes - begin + bytes;
  struct kvp_error refused;
  if (kvp_memory_fd_check(fd, memfd_bytes, &refused) != KVP_OK) {
    return kvp_fail_wire(error, &refused);
  }
  void *map = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)begin);
  if (map == MAP_FAILED) {
    return kvp_fail(error, KVPOOL_NO_MEMORY, "the memfd can't be mapped: %s", strerror(errno));
  }
  const struct kvp_attach_import import = {
      .kind = KVP_IMPORT_MEMFD, .allocation_bytes = memfd_bytes, .offset_bytes = offset_bytes, .bytes = bytes};
  kvpool_status status =
      kvp_attached_buffer_import(attachment, &import, fd, (uint8_t *)map + (offset_bytes - begin), out, error);
  if (status != KVPOOL_OK) {
    (void)munmap(map, map_bytes);
    return status;
  }
  struct kvp_mapping *mapping = &(*out)->attached->mapping;
  mapping->base = map;
  mapping->bytes = map_bytes;
  mapping->on_device = false;
  return KVPOOL_OK;
}

kvpool_status kvpool_memfd_create(const char *name, uint64_t bytes, int *fd, kvpool_error *error) {
  assert(name != NULL && fd != NULL);
  struct kvp_error refused;
  int made = kvp_memory_fd_create(name, bytes, &refused);
  if (made < 0) {
    return kvp_fail_wire(error, &refused);
  }
  *fd = made;
  return KVPOOL_OK;
}

/* ---- the end ----------------------------------------------------------------------------------------------------
 */

kvpool_status kvp_attached_buffer_release(kvpool_buffer *buffer, kvpool_error *error) {
  const struct kvp_attached_buffer *attached = buffer->attached;
  kvpool_attachment *attachment = attached->attachment;
  kvpool_status status = KVPOOL_OK;
  if (attached->is_owned && attachment->state != KVP_ATTACHMENT_ENDED) { /* which took them along */
    const struct kvp_attach_buffer body = {.buffer_id = buffer->id};
    const struct kvp_attach_request asked = {
        .kind = KVP_ATTACH_RELEASE_BUFFER, .body = &body, .body_bytes = sizeof body, .fd = -1};
    status = kvp_attachment_ask(attachment, &asked, NULL, NULL, error);
    if (attachment->state == KVP_ATTACHMENT_ENDED) {
      status = KVPOOL_OK;
    }
  }
  buffer_free(buffer);
  return status;
}

kvpool_status kvpool_buffer_export(kvpool_buffer *buffer, const kvpool_array *array, bool is_versioned,
                                   void **managed, kvpool_error *error) {
  assert(buffer != NULL && array != NULL && managed != NULL);
  struct kvp_attached_buffer *attached = buffer->attached;
  if (attached == NULL || attached->mapping.base == NULL) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "buffer %llu is not mapped by this library",
                    (unsigned long long)buffer->id);
  }
  atomic_fetch_add_explicit(&attached->references, 1, memory_order_relaxed);
  const struct kvp_array_owner owner = {.object = attached, .release = attached_unref};
  kvpool_status status = kvp_array_export(&attached->mapping, array, is_versioned, owner, managed, error);
  if (status != KVPOOL_OK) {
    attached_unref(attached);
  }
  return status;
}

void *kvp_attached_buffer_data(const kvpool_buffer *buffer) {
  return buffer->attached->data;
}
