/* A pool of the configuration: a libconfig group, in the file or as the text of --pool. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "server/supervisor/config_internal.h"

enum field_kind { FIELD_TEXT, FIELD_COUNT };

/* A scalar field of a group; `out` is its place in the spec. */
struct field {
  const char *key;
  enum field_kind kind;
  void *out;
  size_t bytes_max; /* of a text */
};

static bool read_text(const struct field *field, const char *place, const config_setting_t *setting) {
  if (config_setting_type(setting) != CONFIG_TYPE_STRING) {
    return kvp_config_complain(place, "%s must be a string", field->key);
  }
  const char *text = config_setting_get_string(setting);
  size_t bytes = strlen(text) + 1;
  if (bytes > field->bytes_max) {
    return kvp_config_complain(place, "%s has %zu bytes, at most %zu are allowed", field->key, bytes - 1,
                               field->bytes_max - 1);
  }
  memcpy(field->out, text, bytes);
  return true;
}

static bool read_count(const struct field *field, const char *place, const config_setting_t *setting) {
  int type = config_setting_type(setting);
  if (type != CONFIG_TYPE_INT && type != CONFIG_TYPE_INT64) {
    return kvp_config_complain(place, "%s must be an integer", field->key);
  }
  long long number = config_setting_get_int64(setting);
  if (number < 0 || number > INT32_MAX) {
    return kvp_config_complain(place, "%s = %lld is not within 0 .. %d", field->key, number, INT32_MAX);
  }
  *(uint32_t *)field->out = (uint32_t)number;
  return true;
}

/* 1: read; 0: not one of these; -1: complained. */
static int read_field(const struct field *fields, size_t count, const char *place, const config_setting_t *setting) {
  for (size_t i = 0; i < count; i++) {
    if (strcmp(fields[i].key, config_setting_name(setting)) == 0) {
      bool good = fields[i].kind == FIELD_TEXT ? read_text(&fields[i], place, setting)
                                               : read_count(&fields[i], place, setting);
      return good ? 1 : -1;
    }
  }
  return 0;
}

static bool read_region(const char *fallback, const config_setting_t *group, struct kvp_region_spec *out) {
  char place[kvp_place_bytes_max];
  kvp_config_place(group, fallback, place);
  if (!config_setting_is_group(group)) {
    return kvp_config_complain(place, "a region must be a group: { name = ...; format = ...; }");
  }
  const struct field fields[] = {
      {"name", FIELD_TEXT, out->name, sizeof out->name},
      {"format", FIELD_TEXT, out->format, sizeof out->format},
      {"note", FIELD_TEXT, out->note, sizeof out->note},
      {"width", FIELD_COUNT, &out->width, 0},
      {"compression_ratio", FIELD_COUNT, &out->compression_ratio, 0},
      {"num_layers", FIELD_COUNT, &out->num_layers, 0},
  };
  for (int i = 0; i < config_setting_length(group); i++) {
    const config_setting_t *setting = config_setting_get_elem(group, (unsigned)i);
    kvp_config_place(setting, fallback, place);
    int result = read_field(fields, sizeof fields / sizeof fields[0], place, setting);
    if (result == 0) {
      return kvp_config_complain(place, "%s is no field of a region", config_setting_name(setting));
    }
    if (result < 0) {
      return false;
    }
  }
  return true;
}

static bool read_regions(const char *fallback, const config_setting_t *list, struct kvp_pool_spec *out) {
  char place[kvp_place_bytes_max];
  kvp_config_place(list, fallback, place);
  if (!config_setting_is_list(list)) {
    return kvp_config_complain(place, "regions must be a list of groups: ( { name = ...; }, ... )");
  }
  int count = config_setting_length(list);
  if (count > kvp_regions_per_pool_max) {
    return kvp_config_complain(place, "%d regions, at most %d are allowed", count, kvp_regions_per_pool_max);
  }
  for (int i = 0; i < count; i++) {
    if (!read_region(fallback, config_setting_get_elem(list, (unsigned)i), &out->regions[i])) {
      return false;
    }
  }
  out->region_count = (uint32_t)count;
  return true;
}

static bool read_placements(const char *fallback, const config_setting_t *list, struct kvp_pool_spec *out) {
  char place[kvp_place_bytes_max];
  kvp_config_place(list, fallback, place);
  if (!config_setting_is_array(list) && !config_setting_is_list(list)) {
    return kvp_config_complain(place, "placements must be a list of devices, like [ \"host:0\" ]");
  }
  int count = config_setting_length(list);
  if (count > kvp_devices_max) {
    return kvp_config_complain(place, "%d placements, at most %d are allowed", count, kvp_devices_max);
  }
  for (int i = 0; i < count; i++) {
    const struct field field = {"a placement", FIELD_TEXT, out->placements[i], sizeof out->placements[i]};
    if (!read_text(&field, place, config_setting_get_elem(list, (unsigned)i))) {
      return false;
    }
  }
  out->placement_count = (uint32_t)count;
  return true;
}

static bool read_kind(const char *place, const config_setting_t *setting, enum kvp_pool_kind *out) {
  const char *kind = config_setting_get_string(setting);
  if (kind != NULL && strcmp(kind, "paged") == 0) {
    *out = KVP_POOL_PAGED;
    return true;
  }
  if (kind != NULL && strcmp(kind, "ring") == 0) {
    *out = KVP_POOL_RING;
    return true;
  }
  return kvp_config_complain(place, "kind = \"%s\" is neither \"paged\" nor \"ring\"", kind == NULL ? "?" : kind);
}

static bool read_pool_setting(const char *fallback, const config_setting_t *setting, struct kvp_pool_spec *out) {
  char place[kvp_place_bytes_max];
  kvp_config_place(setting, fallback, place);
  const struct field fields[] = {
      {"name", FIELD_TEXT, out->name, sizeof out->name},
      {"namespace", FIELD_TEXT, out->namespace_name, sizeof out->namespace_name},
      {"block_size", FIELD_COUNT, &out->block_size, 0},
      {"num_blocks", FIELD_COUNT, &out->num_blocks, 0},
  };
  int result = read_field(fields, sizeof fields / sizeof fields[0], place, setting);
  if (result != 0) {
    return result > 0;
  }
  const char *key = config_setting_name(setting);
  if (strcmp(key, "kind") == 0) {
    return read_kind(place, setting, &out->kind);
  }
  if (strcmp(key, "placements") == 0) {
    return read_placements(fallback, setting, out);
  }
  if (strcmp(key, "regions") == 0) {
    return read_regions(fallback, setting, out);
  }
  return kvp_config_complain(place, "%s is no field of a pool", key);
}

/* Here and not with the other checks, since here each has its line. */
static bool check_regions(const char *fallback, const config_setting_t *list, const struct kvp_pool_spec *spec) {
  for (uint32_t i = 0; spec->block_size > 0 && spec->num_blocks > 0 && i < spec->region_count; i++) {
    struct kvp_geometry geometry;
    struct kvp_error error;
    if (kvp_region_spec_check(spec, i, &geometry, &error) != KVP_OK) {
      char place[kvp_place_bytes_max];
      kvp_config_place(config_setting_get_elem(list, i), fallback, place);
      return kvp_config_complain(place, "pool \"%s\": %s", spec->name, error.text);
    }
  }
  return true;
}

bool kvp_config_add_pool(struct kvp_config_reader *reader, const char *fallback, const config_setting_t *group) {
  struct kvp_config *config = reader->config;
  char place[kvp_place_bytes_max];
  kvp_config_place(group, fallback, place);
  if (!config_setting_is_group(group)) {
    return kvp_config_complain(place, "a pool must be a group: { name = ...; regions = ( ... ); }");
  }
  if (config->pool_count == kvp_pools_max) {
    return kvp_config_complain(place, "one more than the %d pools allowed", kvp_pools_max);
  }
  struct kvp_pool_spec *spec = &config->pools[config->pool_count];
  memset(spec, 0, sizeof *spec);
  for (int i = 0; i < config_setting_length(group); i++) {
    if (!read_pool_setting(fallback, config_setting_get_elem(group, (unsigned)i), spec)) {
      return false;
    }
  }
  if (!check_regions(fallback, config_setting_get_member(group, "regions"), spec)) {
    return false;
  }
  (void)snprintf(reader->pool_places[config->pool_count], kvp_place_bytes_max, "%s", place);
  config->pool_count++;
  return true;
}
