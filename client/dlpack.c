/* Mapped memory as arrays of other libraries: DLPack's structs, as its specification has them. Any thread. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/attach.h"
#include "client/worker_cuda.h"

enum { ndim_max = 8, dl_cpu = 1, dl_cuda = 2, dl_version_major = 1, dl_version_minor = 0 };
static const uint64_t dl_flag_read_only = 1;

struct dl_device {
  int32_t type;
  int32_t ordinal;
};

struct dl_tensor {
  void *data;
  struct dl_device device;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
};

struct dl_managed {
  struct dl_tensor tensor;
  void *context;
  void (*deleter)(struct dl_managed *self);
};

struct dl_managed_versioned {
  uint32_t major;
  uint32_t minor;
  void *context;
  void (*deleter)(struct dl_managed_versioned *self);
  uint64_t flags;
  struct dl_tensor tensor;
};

_Static_assert(sizeof(struct dl_tensor) == 48 && sizeof(struct dl_managed) == 64 &&
                   sizeof(struct dl_managed_versioned) == 80,
               "DLPack's layout on hosts of 64 bits");

/* Both kinds, with what they point to. */
struct exported {
  union {
    struct dl_managed plain;
    struct dl_managed_versioned versioned;
  } managed;
  struct kvp_array_owner owner;
  int64_t shape[ndim_max];
  int64_t strides[ndim_max];
};

static void exported_free(void *context) {
  struct exported *exported = context;
  exported->owner.release(exported->owner.object);
  free(exported);
}

static void delete_plain(struct dl_managed *self) {
  exported_free(self->context);
}

static void delete_versioned(struct dl_managed_versioned *self) {
  exported_free(self->context);
}

/* From the first byte to behind the last one; false: more than memory has. Empty: 0. */
static bool array_bytes(const kvpool_array *array, uint64_t *out) {
  uint64_t last = 0;
  for (int32_t i = 0; i < array->ndim; i++) {
    uint64_t reach;
    if (array->shape[i] == 0) {
      *out = 0;
      return true;
    }
    if (array->shape[i] < 0 || array->strides[i] < 0 ||
        __builtin_mul_overflow((uint64_t)array->shape[i] - 1, (uint64_t)array->strides[i], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  return !__builtin_mul_overflow(last + 1, (uint64_t)array->type_bits / 8, out) && last < UINT64_MAX;
}

static kvpool_status array_check(const struct kvp_mapping *mapping, const kvpool_array *array, kvpool_error *error) {
  uint64_t bytes;
  if (array->ndim < 0 || array->ndim > ndim_max || array->type_bits == 0 || array->type_bits % 8 != 0) {
    return kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "an array of %d dimensions and elements of %u bits", array->ndim,
                    array->type_bits);
  }
  const uint64_t begin = (uintptr_t)array->data - (uintptr_t)mapping->base;
  if (!array_bytes(array, &bytes) || begin > mapping->bytes || bytes > mapping->bytes - begin) {
    return kvp_fail_at(error, KVPOOL_OUT_OF_RANGE, "shape", -1, (int64_t)begin,
                       "the array, from byte %llu on, is not inside memory of %llu bytes", (unsigned long long)begin,
                       (unsigned long long)mapping->bytes);
  }
  return KVPOOL_OK;
}

kvpool_status kvp_array_export(const struct kvp_mapping *mapping, const kvpool_array *array, bool is_versioned,
                               struct kvp_array_owner owner, void **managed, kvpool_error *error) {
  kvpool_status status = array_check(mapping, array, error);
  if (status != KVPOOL_OK) {
    return status;
  }
  struct exported *exported = calloc(1, sizeof *exported);
  if (exported == NULL) {
    return kvp_fail_no_memory(error);
  }
  exported->owner = owner;
  if (array->ndim > 0) {
    memcpy(exported->shape, array->shape, (size_t)array->ndim * sizeof exported->shape[0]);
    memcpy(exported->strides, array->strides, (size_t)array->ndim * sizeof exported->strides[0]);
  }
  const struct dl_tensor tensor = {
      .data = array->data,
      .device = {.type = mapping->on_device ? dl_cuda : dl_cpu, .ordinal = mapping->on_device ? mapping->ordinal : 0},
      .ndim = array->ndim,
      .type_code = array->type_code,
      .type_bits = array->type_bits,
      .type_lanes = 1,
      .shape = exported->shape,
      .strides = exported->strides,
  };
  if (is_versioned) {
    exported->managed.versioned = (struct dl_managed_versioned){
        .major = dl_version_major,
        .minor = dl_version_minor,
        .context = exported,
        .deleter = delete_versioned,
        .flags = mapping->access == KVPOOL_MAP_READ_WRITE ? 0 : dl_flag_read_only,
        .tensor = tensor,
    };
  } else {
    exported->managed.plain = (struct dl_managed){.tensor = tensor, .context = exported, .deleter = delete_plain};
  }
  *managed = &exported->managed;
  return KVPOOL_OK;
}

void kvpool_attachment_dl_device(const kvpool_attachment *attachment, int32_t *type, int32_t *ordinal) {
  assert(attachment != NULL && type != NULL && ordinal != NULL);
  const bool on_device = (attachment->welcome.flags & KVP_ATTACH_DEVICE_FDS) != 0;
  *type = on_device ? dl_cuda : dl_cpu;
  *ordinal = on_device ? kvp_cuda_ordinal(attachment->welcome.uuid) : 0;
}
