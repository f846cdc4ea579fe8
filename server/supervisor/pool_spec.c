/* What can be said about a pool before any device is asked. No state. */
#include "server/supervisor/pool_spec.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "server/supervisor/name.h"

/* Puts the region's name in front of an error's text. */
static enum kvp_status in_region(const struct kvp_region_spec *region, struct kvp_error *error) {
  if (error == NULL) {
    return KVP_INVALID_ARGUMENT;
  }
  struct kvp_error cause = *error;
  return kvp_error_set_at(error, (enum kvp_status)cause.status, cause.op, cause.array, cause.position, cause.value,
                          "region '%s': %s", region->name, cause.text);
}

static enum kvp_status check_geometry(const struct kvp_pool_spec *spec, const struct kvp_region_spec *region,
                                      struct kvp_geometry *out, struct kvp_error *error) {
  const struct kvp_format *format = kvp_format_find(region->format);
  if (format == NULL) {
    return kvp_error_set_at(error, KVP_WRONG_FORMAT, -1, "format", -1, 0, "'%s' is no format of the catalogue",
                            region->format);
  }
  uint32_t ratio = region->compression_ratio == 0 ? 1 : region->compression_ratio;
  if (spec->block_size % ratio != 0) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "compression_ratio", -1, ratio,
                            "block_size %u is not divisible by compression_ratio %u", spec->block_size, ratio);
  }
  return kvp_geometry_init(format, region->width, spec->block_size / ratio, spec->num_blocks, region->num_layers, out,
                           error);
}

enum kvp_status kvp_region_spec_check(const struct kvp_pool_spec *spec, uint32_t index, struct kvp_geometry *out,
                                      struct kvp_error *error) {
  const struct kvp_region_spec *region = &spec->regions[index];
  enum kvp_status status = kvp_name_check(region->name, "region name", false, error);
  if (status != KVP_OK) {
    return status;
  }
  for (uint32_t other = 0; other < index; other++) {
    if (strcmp(spec->regions[other].name, region->name) == 0) {
      return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "regions", index, other,
                              "regions %u and %u are both named '%s'", other, index, region->name);
    }
  }
  if (kvp_note_check(region->note, "note", sizeof region->note, error) != KVP_OK ||
      check_geometry(spec, region, out, error) != KVP_OK) {
    return in_region(region, error);
  }
  const uint64_t bytes_max = (uint64_t)kvp_chunks_per_memory_max * kvp_chunk_memory_bytes;
  if (out->region_bytes > bytes_max) {
    return kvp_error_set(error, KVP_TOO_LARGE, "region '%s': %" PRIu64 " bytes, at most %" PRIu64 " are allowed",
                         region->name, out->region_bytes, bytes_max);
  }
  return KVP_OK;
}

static enum kvp_status check_placements(const struct kvp_pool_spec *spec, struct kvp_error *error) {
  for (uint32_t i = 0; i < spec->placement_count; i++) {
    enum kvp_status status = kvp_name_check(spec->placements[i], "placement", false, error);
    if (status != KVP_OK) {
      return status;
    }
    for (uint32_t other = 0; other < i; other++) {
      if (strcmp(spec->placements[other], spec->placements[i]) == 0) {
        return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "placements", i, other,
                                "placements %u and %u are both '%s'", other, i, spec->placements[i]);
      }
    }
  }
  return KVP_OK;
}

enum kvp_status kvp_pool_spec_check(const struct kvp_pool_spec *spec, struct kvp_geometry *regions, uint64_t *bytes,
                                    struct kvp_error *error) {
  enum kvp_status status = kvp_name_check(spec->name, "pool name", false, error);
  if (status == KVP_OK) {
    status = kvp_name_check(spec->namespace_name, "pool namespace", true, error);
  }
  if (status != KVP_OK) {
    return status;
  }
  if (spec->kind != KVP_POOL_PAGED && spec->kind != KVP_POOL_RING) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "kind", -1, (int64_t)spec->kind, "kind %d is unknown",
                            (int)spec->kind);
  }
  if (spec->block_size == 0 || spec->num_blocks == 0) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, spec->block_size == 0 ? "block_size" : "num_blocks", -1,
                            0, "block_size %u and num_blocks %u must be at least 1", spec->block_size,
                            spec->num_blocks);
  }
  if (spec->region_count == 0) {
    return kvp_error_set_at(error, KVP_INVALID_ARGUMENT, -1, "regions", -1, 0, "pool '%s' has no region", spec->name);
  }
  status = check_placements(spec, error);
  uint64_t total = 0;
  for (uint32_t i = 0; i < spec->region_count && status == KVP_OK; i++) {
    struct kvp_geometry geometry = {0};
    status = kvp_region_spec_check(spec, i, &geometry, error);
    if (status == KVP_OK) {
      total += geometry.region_bytes; /* at most kvp_regions_per_pool_max * 4 TiB */
      if (regions != NULL) {
        regions[i] = geometry;
      }
    }
  }
  if (status == KVP_OK && bytes != NULL) {
    *bytes = total;
  }
  return status;
}
