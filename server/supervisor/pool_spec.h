/* What a pool is asked to be: from the configuration, a flag or CreatePool. Plain data. */
#ifndef KVPOOL_SUPERVISOR_POOL_SPEC_H
#define KVPOOL_SUPERVISOR_POOL_SPEC_H

#include <stdint.h>

#include "proto/control_wire.h"
#include "proto/format.h"
#include "proto/limits.h"

struct kvp_region_spec {
  char name[kvp_name_bytes_max];
  char format[kvp_name_bytes_max]; /* a catalogue name */
  char note[kvp_note_bytes_max];
  uint32_t width;             /* elements; 0 = the format's own */
  uint32_t compression_ratio; /* tokens_per_block = block_size / ratio; 0 = 1 */
  uint32_t num_layers;
};

struct kvp_pool_spec {
  char name[kvp_name_bytes_max];
  char namespace_name[kvp_name_bytes_max]; /* whose sessions alone may use it; "": anybody's */
  enum kvp_pool_kind kind;
  uint32_t block_size; /* tokens of the sequence that a block covers */
  uint32_t num_blocks;
  uint32_t placement_count; /* 0 = the first device */
  char placements[kvp_devices_max][kvp_name_bytes_max];
  uint32_t region_count;
  struct kvp_region_spec regions[kvp_regions_per_pool_max];
};

/* Checks all that needs no device: names, formats, geometry, duplicates. regions: [spec->region_count], NULL allowed;
 * bytes: of all regions together, on each placement. */
enum kvp_status kvp_pool_spec_check(const struct kvp_pool_spec *spec, struct kvp_geometry *regions, uint64_t *bytes,
                                    struct kvp_error *error);
/* The part of it that is about one region: its name (unique among those before it), format, note, geometry. */
enum kvp_status kvp_region_spec_check(const struct kvp_pool_spec *spec, uint32_t index, struct kvp_geometry *out,
                                      struct kvp_error *error);

#endif
