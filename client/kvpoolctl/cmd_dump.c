/* dump: what stands in given slots, for people who look for a fault. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/block_summary.h"
#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/number.h"
#include "client/kvpoolctl/record_check.h"
#include "client/kvpoolctl/table.h"
#include "client/kvpoolctl/target.h"
#include "client/kvpoolctl/text.h"

enum { option_full = 0x100, option_device, slots_max = 1024, value_cells = 9, label_width = 6 };

struct dump_arguments {
  const char *target;
  const char *device;
  struct kvp_ctl_list slots;
  bool full;
};

struct dump {
  struct kvp_ctl *ctl;
  const struct dump_arguments *arguments;
  struct kvp_ctl_target target;
  kvpool_block_map *map;
  kvpool_session_list *sessions;
};

static const struct argp_option options[] = {
    {"full", option_full, NULL, 0, "Every slot in full; default: one in full, several with a line each", 0},
    {"device", option_device, "DEVICE", 0, "Which placement of the pool; default: its first", 0},
    {0},
};

static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct dump_arguments *dump = arguments;
  switch (key) {
  case option_full:
    dump->full = true;
    return 0;
  case option_device:
    dump->device = value;
    return 0;
  case ARGP_KEY_ARG:
    if (state->arg_num == 0) {
      dump->target = value;
      return 0;
    }
    if (!kvp_ctl_list_parse(&dump->slots, value)) {
      return kvp_ctl_take_failed(&kvp_ctl_dump, "slot '%s': a number, or a list like 0-15,32, is wanted", value);
    }
    return dump->slots.count <= slots_max
               ? 0
               : kvp_ctl_take_failed(&kvp_ctl_dump, "%zu slots, at most %d; get reads more into a file",
                                     dump->slots.count, slots_max);
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

/* ---- who it belongs to ------------------------------------------------------------------------------------------
 */

static const kvpool_block_run *run_of(const struct dump *dump, uint32_t block) {
  size_t low = 0;
  size_t high = kvpool_block_map_run_count(dump->map);
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    *(kvpool_block_map_run(dump->map, middle)->first_block <= block ? &low : &high) = middle;
  }
  return kvpool_block_map_run(dump->map, low);
}

static struct kvp_ctl_text owner_of(const struct dump *dump, uint32_t block) {
  static const char *const states[] = {"free", "", "sealed ", "quarantined "};
  const kvpool_block_run *run = run_of(dump, block);
  struct kvp_ctl_text out = {.text = "free"};
  if (run->state == KVPOOL_BLOCK_FREE) {
    return out;
  }
  const char *name = "";
  for (size_t i = 0; i < kvpool_session_list_count(dump->sessions); i++) {
    const kvpool_session_info *session = kvpool_session_list_item(dump->sessions, i);
    name = session->session_id == run->session_id ? session->name : name;
  }
  (void)snprintf(out.text, sizeof out.text, "%s#%llu %s", states[run->state & 3], (unsigned long long)run->session_id,
                 name);
  return out;
}

/* ---- a record in full -------------------------------------------------------------------------------------------
 */

static void groups_print(const struct dump *dump, const kvpool_record *record) {
  static const char *const quantized[] = {">GROUP", "?>ELEMENTS", ">BYTES", ">SCALE", ">MIN", ">MAX", "~NOTE"};
  static const char *const plain[] = {">GROUP", ">ELEMENTS", ">MIN", ">MAX", "~NOTE"};
  const kvpool_format_info *format = &dump->target.format;
  bool has_scales = format->quantized_elements > 0;
  struct kvp_ctl_table *table = has_scales
                                    ? kvp_ctl_table_new(dump->ctl, quantized, sizeof quantized / sizeof quantized[0])
                                    : kvp_ctl_table_new(dump->ctl, plain, sizeof plain / sizeof plain[0]);
  for (uint32_t i = 0; i < kvp_ctl_group_count(format); i++) {
    struct kvp_ctl_group group;
    kvp_ctl_group_init(&group, format, record, i);
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "%u", i);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u-%u", group.first, group.first + group.count - 1);
    if (has_scales) {
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, strcmp(format->scale_format, "f32") == 0 ? "0x%08X" : "0x%02X",
                         group.scale_bits);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%.4g", (double)group.scale);
    }
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%.4g", (double)group.min);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%.4g", (double)group.max);
    kvp_ctl_table_cell(table, group.odd[0] != '\0' ? KVP_CTL_BAD : KVP_CTL_DIM, "%s",
                       group.odd[0] != '\0' ? group.odd
                       : group.is_zero      ? "all zero"
                                            : "");
  }
  kvp_ctl_table_print(table);
}

/* A power of two, as many as the width has room for. */
static uint32_t per_line(const struct dump *dump, uint32_t cell_width) {
  uint32_t count = 4;
  while (label_width + 2 * count * cell_width <= dump->ctl->terminal.width && count < 32) {
    count *= 2;
  }
  return count;
}

static void label_print(const struct dump *dump, uint32_t index) {
  kvp_ctl_print("%s%*u%s", kvp_ctl_terminal_role(&dump->ctl->terminal, KVP_CTL_DIM), label_width - 1, index,
                kvp_ctl_terminal_reset(&dump->ctl->terminal));
}

static void bytes_print(const struct dump *dump, const char *what, const uint8_t *bytes, uint32_t count) {
  uint32_t line = per_line(dump, 3);
  kvp_ctl_print("\n%s%s, %u bytes%s\n", kvp_ctl_terminal_role(&dump->ctl->terminal, KVP_CTL_BOLD), what, count,
                kvp_ctl_terminal_reset(&dump->ctl->terminal));
  for (uint32_t i = 0; i < count; i += line) {
    label_print(dump, i);
    for (uint32_t j = i; j < count && j < i + line; j++) {
      kvp_ctl_print(" %02x", bytes[j]);
    }
    kvp_ctl_print("\n");
  }
}

static void values_print(const struct dump *dump, const kvpool_record *record) {
  const struct kvp_ctl_terminal *terminal = &dump->ctl->terminal;
  uint32_t line = per_line(dump, value_cells);
  kvp_ctl_print("\n%svalues, %u%s\n", kvp_ctl_terminal_role(terminal, KVP_CTL_BOLD), record->value_count,
                kvp_ctl_terminal_reset(terminal));
  for (uint32_t i = 0; i < record->value_count; i += line) {
    label_print(dump, i);
    for (uint32_t j = i; j < record->value_count && j < i + line; j++) {
      bool is_odd = !isfinite(record->values[j]);
      kvp_ctl_print(" %s%*.3g%s", is_odd ? kvp_ctl_terminal_role(terminal, KVP_CTL_BAD) : "", value_cells - 1,
                    (double)record->values[j], is_odd ? kvp_ctl_terminal_reset(terminal) : "");
    }
    kvp_ctl_print("\n");
  }
}

static void record_print(const struct dump *dump, const kvpool_record *record) {
  const struct kvp_ctl_terminal *terminal = &dump->ctl->terminal;
  const kvpool_region_info *region = dump->target.region;
  uint32_t block = (uint32_t)record->slot / region->tokens_per_block;
  char odd[kvp_ctl_odd_bytes_max];
  kvp_ctl_record_odd(&dump->target.format, record, odd);
  kvp_ctl_print("%sslot %d%s of %s/%s:%u: block %u, token %u of %u (%s); %s, %u bytes\n",
                kvp_ctl_terminal_role(terminal, KVP_CTL_BOLD), record->slot, kvp_ctl_terminal_reset(terminal),
                kvpool_pool_name(dump->target.pool), region->name, dump->target.layer.layer, block,
                (uint32_t)record->slot % region->tokens_per_block, region->tokens_per_block,
                owner_of(dump, block).text, region->format, record->raw_bytes);
  kvp_ctl_print("odd: %s%s%s\n\n", kvp_ctl_terminal_role(terminal, odd[0] != '\0' ? KVP_CTL_BAD : KVP_CTL_GOOD),
                odd[0] != '\0' ? odd : "nothing", kvp_ctl_terminal_reset(terminal));
  groups_print(dump, record);
  bytes_print(dump, "data", record->raw, region->data_bytes);
  if (region->scale_bytes > 0) {
    bytes_print(dump, "scales", record->raw + region->data_bytes, region->scale_bytes);
  }
  values_print(dump, record);
}

/* ---- a record in a line -----------------------------------------------------------------------------------------
 */

static void record_row(const struct dump *dump, struct kvp_ctl_table *table, const kvpool_record *record) {
  uint32_t block = (uint32_t)record->slot / dump->target.region->tokens_per_block;
  char odd[kvp_ctl_odd_bytes_max];
  float min = NAN;
  float max = NAN;
  float scale_min = NAN;
  float scale_max = NAN;
  kvp_ctl_record_odd(&dump->target.format, record, odd);
  for (uint32_t i = 0; i < record->value_count; i++) {
    min = fminf(min, record->values[i]);
    max = fmaxf(max, record->values[i]);
  }
  for (uint32_t i = 0; i < record->scale_count; i++) {
    scale_min = fminf(scale_min, record->scales[i]);
    scale_max = fmaxf(scale_max, record->scales[i]);
  }
  kvp_ctl_table_row(table);
  kvp_ctl_table_cell(table, KVP_CTL_BOLD, "%d", record->slot);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", block);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", (uint32_t)record->slot % dump->target.region->tokens_per_block);
  kvp_ctl_table_cell(table, KVP_CTL_DIM, "%s", owner_of(dump, block).text);
  if (record->scale_count > 0) {
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%.3g .. %.3g", (double)scale_min, (double)scale_max);
  } else {
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "-");
  }
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%.3g .. %.3g", (double)min, (double)max);
  /* Nobody expects anything of a free block. */
  kvp_ctl_table_cell(table, run_of(dump, block)->state == KVPOOL_BLOCK_FREE ? KVP_CTL_DIM : KVP_CTL_BAD, "%s", odd);
}

/* ---- for programs -----------------------------------------------------------------------------------------------
 */

static json_t *floats_json(const float *values, uint32_t count) {
  json_t *array = json_array();
  for (uint32_t i = 0; i < count; i++) {
    kvp_ctl_json_append(array, kvp_ctl_json_number((double)values[i]));
  }
  return array;
}

static json_t *record_json(const struct dump *dump, const kvpool_record *record) {
  uint32_t block = (uint32_t)record->slot / dump->target.region->tokens_per_block;
  char *hex = kvp_ctl_allocate(2 * (size_t)record->raw_bytes + 1, 1);
  for (uint32_t i = 0; i < record->raw_bytes; i++) {
    (void)snprintf(hex + 2 * (size_t)i, 3, "%02x", record->raw[i]);
  }
  char odd[kvp_ctl_odd_bytes_max];
  kvp_ctl_record_odd(&dump->target.format, record, odd);
  json_t *object = json_object();
  kvp_ctl_json_integer(object, "slot", record->slot);
  kvp_ctl_json_integer(object, "block", block);
  kvp_ctl_json_integer(object, "token", (uint32_t)record->slot % dump->target.region->tokens_per_block);
  kvp_ctl_json_integer(object, "session_id", (int64_t)run_of(dump, block)->session_id);
  kvp_ctl_json_string(object, "raw", hex);
  kvp_ctl_json_set(object, "scales", floats_json(record->scales, record->scale_count));
  kvp_ctl_json_set(object, "values", floats_json(record->values, record->value_count));
  kvp_ctl_json_string(object, "odd", odd);
  json_t *groups = json_array();
  for (uint32_t i = 0; i < kvp_ctl_group_count(&dump->target.format); i++) {
    struct kvp_ctl_group group;
    kvp_ctl_group_init(&group, &dump->target.format, record, i);
    kvp_ctl_json_append(groups, json_string(group.odd));
  }
  kvp_ctl_json_set(object, "odd_groups", groups);
  free(hex);
  return object;
}

/* ---- all of them ------------------------------------------------------------------------------------------------
 */

struct output {
  json_t *records;             /* with --json */
  struct kvp_ctl_table *table; /* a line each */
  size_t printed;
};

static void record_tell(const struct dump *dump, struct output *output, const kvpool_record *record) {
  if (output->records != NULL) {
    kvp_ctl_json_append(output->records, record_json(dump, record));
  } else if (output->table != NULL) {
    record_row(dump, output->table, record);
  } else {
    kvp_ctl_print("%s", output->printed > 0 ? "\n" : "");
    record_print(dump, record);
  }
  output->printed++;
}

static int records_tell(const struct dump *dump, struct output *output) {
  const struct kvp_ctl_list *slots = &dump->arguments->slots;
  size_t piece_max = kvp_ctl_target_records_per_call(&dump->target);
  for (size_t done = 0; done < slots->count; done += piece_max) {
    size_t piece = slots->count - done < piece_max ? slots->count - done : piece_max;
    kvpool_record_list *list;
    kvpool_error error;
    if (kvpool_record_list_get(dump->ctl->client, &dump->target.layer, dump->arguments->device, slots->items + done,
                               piece, &list, &error) != KVPOOL_OK) {
      return kvp_ctl_fail(dump->ctl, &error);
    }
    for (size_t i = 0; i < kvpool_record_list_count(list); i++) {
      record_tell(dump, output, kvpool_record_list_item(list, i));
    }
    kvpool_record_list_destroy(list);
  }
  return KVP_CTL_OK;
}

static int dump_tell(const struct dump *dump) {
  static const char *const columns[] = {">SLOT", ">BLOCK", "?>TOKEN", "?OWNER", "?SCALES", "VALUES", "~ODD"};
  struct output output = {0};
  if (dump->ctl->json) {
    output.records = json_array();
  } else if (dump->arguments->slots.count > 1 && !dump->arguments->full) {
    output.table = kvp_ctl_table_new(dump->ctl, columns, sizeof columns / sizeof columns[0]);
  }
  int exit_status = records_tell(dump, &output);
  if (exit_status == KVP_CTL_OK && output.records != NULL) {
    json_t *document = json_object();
    kvp_ctl_json_string(document, "pool", kvpool_pool_name(dump->target.pool));
    kvp_ctl_json_string(document, "region", dump->target.region->name);
    kvp_ctl_json_integer(document, "layer", dump->target.layer.layer);
    kvp_ctl_json_string(document, "format", dump->target.format.name);
    kvp_ctl_json_set(document, "records", output.records);
    kvp_ctl_json_print(dump->ctl, document);
  } else if (output.records != NULL) {
    json_decref(output.records);
  }
  if (output.table != NULL && exit_status == KVP_CTL_OK) {
    kvp_ctl_table_print(output.table);
  } else if (output.table != NULL) {
    kvp_ctl_table_destroy(output.table);
  }
  return exit_status;
}

static int dump_with_owners(struct dump *dump) {
  kvpool_error error;
  if (kvpool_block_map_get(dump->ctl->client, dump->target.pool, &dump->map, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(dump->ctl, &error);
  }
  int exit_status = KVP_CTL_OK;
  if (kvpool_session_list_get(dump->ctl->client, &dump->sessions, &error) != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(dump->ctl, &error);
  } else {
    exit_status = dump_tell(dump);
    kvpool_session_list_destroy(dump->sessions);
  }
  kvpool_block_map_destroy(dump->map);
  return exit_status;
}

static int dump_checked(struct kvp_ctl *ctl, const struct dump_arguments *arguments) {
  if (arguments->slots.count == 0) {
    return kvp_ctl_usage(&kvp_ctl_dump, "POOL/REGION[:LAYER] and a SLOT are needed");
  }
  int exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  struct dump dump = {.ctl = ctl, .arguments = arguments};
  exit_status = kvp_ctl_target_open(ctl, arguments->target, &dump.target);
  if (exit_status == KVP_CTL_OK) {
    exit_status = dump_with_owners(&dump);
    kvp_ctl_target_close(&dump.target);
  }
  return exit_status;
}

static int dump_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct dump_arguments arguments = {0};
  int exit_status;
  if (kvp_ctl_parse(ctl, &kvp_ctl_dump, argc, argv, &arguments, &exit_status)) {
    exit_status = dump_checked(ctl, &arguments);
  }
  kvp_ctl_list_deinit(&arguments.slots);
  return exit_status;
}

const struct kvp_ctl_command kvp_ctl_dump = {
    .name = "dump",
    .summary = "what stands in a slot: bytes, scales, values, what is odd about it",
    .synopsis = "POOL/REGION[:LAYER] SLOT...",
    .details =
        "A SLOT is a number or a list like 0-15,32. Reading contents is an operator's right (root, and the "
        "daemon's own user). Odd is what no store of this format writes, and what a store writes for bad input: "
        "NaN codes, scales that are no number, too small or too large for their codes, saturated groups, "
        "memory that was filled and not stored to.\n\n"
        "Examples:\n"
        "  kvpoolctl dump main/kv:0 1234\n"
        "  kvpoolctl dump main/kv:0 0-63\n"
        "  kvpoolctl dump main/index 7 --json | jq -r '.records[0].raw'",
    .options = options,
    .take = take,
    .run = dump_run,
};
