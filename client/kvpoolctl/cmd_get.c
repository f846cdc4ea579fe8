/* get: records, decoded or as they are, into a file. An operator's look at any block: nothing is leased for it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/number.h"
#include "client/kvpoolctl/progress.h"
#include "client/kvpoolctl/rows_file.h"
#include "client/kvpoolctl/target.h"
#include "client/kvpoolctl/text.h"

enum {
  option_slots = 0x100,
  option_blocks,
  option_as,
  option_device,
};

enum get_form { GET_DEFAULT, GET_BF16, GET_FLOAT32, GET_FLOAT16, GET_RECORD, GET_MEMORY };

struct get_arguments {
  const char *target;
  const char *file;
  const char *device;
  enum get_form form;
  struct kvp_ctl_list slots;
  struct kvp_ctl_list blocks;
};

struct get {
  struct kvp_ctl *ctl;
  const struct get_arguments *arguments;
  struct kvp_ctl_target target;
  struct kvp_ctl_rows_file file;
  enum get_form form;
};

static const struct argp_option options[] = {
    {"slots", option_slots, "LIST", 0, "Slots, as in 0-15,32", 0},
    {"blocks", option_blocks, "LIST", 0, "All slots of these blocks", 0},
    {"as", option_as, "FORM", 0,
     "bf16, float32, float16: decoded values; record: each record's bytes, data then scales; memory: whole blocks as "
     "they lie in memory, padding included. Default: float32 for .npy, else bf16",
     0},
    {"device", option_device, "DEVICE", 0, "Which placement of the pool; default: its first", 0},
    {0},
};

static error_t form_take(const char *value, enum get_form *out) {
  static const char *const names[] = {"", "bf16", "float32", "float16", "record", "memory"};
  for (size_t i = 1; i < sizeof names / sizeof names[0]; i++) {
    if (strcmp(names[i], value) == 0) {
      *out = (enum get_form)i;
      return 0;
    }
  }
  return kvp_ctl_take_failed(&kvp_ctl_get, "--as %s: bf16, float32, float16, record or memory", value);
}

static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct get_arguments *get = arguments;
  switch (key) {
  case option_slots:
    return kvp_ctl_list_parse(&get->slots, value)
               ? 0
               : kvp_ctl_take_failed(&kvp_ctl_get, "--slots %s: %s", value, kvp_ctl_list_fault(value));
  case option_blocks:
    return kvp_ctl_list_parse(&get->blocks, value)
               ? 0
               : kvp_ctl_take_failed(&kvp_ctl_get, "--blocks %s: %s", value, kvp_ctl_list_fault(value));
  case option_as:
    return form_take(value, &get->form);
  case option_device:
    get->device = value;
    return 0;
  case ARGP_KEY_ARG:
    return kvp_ctl_take_word(value, state, (const char **[]){&get->target, &get->file}, 2);
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

/* ---- records ----------------------------------------------------------------------------------------------------
 */

/* Records of slots [count], one call. */
static int records_get(struct get *get, const int32_t *slots, size_t count) {
  kvpool_record_list *list;
  kvpool_error error;
  if (kvpool_record_list_get(get->ctl->client, &get->target.layer, get->arguments->device, slots, count, &list,
                             &error) != KVPOOL_OK) {
    return kvp_ctl_fail(get->ctl, &error);
  }
  int exit_status = KVP_CTL_OK;
  for (size_t i = 0; i < kvpool_record_list_count(list) && exit_status == KVP_CTL_OK; i++) {
    const kvpool_record *record = kvpool_record_list_item(list, i);
    if (record->raw_bytes != get->target.region->bytes_per_token || record->value_count != get->target.elements) {
      exit_status = kvp_ctl_refuse(get->ctl, "use the kvpoolctl that was installed with this daemon",
                                   "the record of slot %d came with %u bytes and %u values", record->slot,
                                   record->raw_bytes, record->value_count);
    } else if (get->form == GET_RECORD) {
      exit_status = kvp_ctl_rows_file_write_bytes(get->ctl, &get->file, record->raw, record->raw_bytes);
    } else {
      exit_status = kvp_ctl_rows_file_write(get->ctl, &get->file, record->values, 1);
    }
  }
  kvpool_record_list_destroy(list);
  return exit_status;
}

static int slots_get(struct get *get, const struct kvp_ctl_list *slots) {
  const kvpool_region_info *region = get->target.region;
  size_t piece_max = kvp_ctl_target_records_per_call(&get->target);
  struct kvp_ctl_progress progress;
  kvp_ctl_progress_init(&progress, "reading", slots->count * (uint64_t)region->bytes_per_token, get->ctl->json);
  int exit_status = KVP_CTL_OK;
  for (size_t done = 0; done < slots->count && exit_status == KVP_CTL_OK;) {
    size_t piece = slots->count - done < piece_max ? slots->count - done : piece_max;
    exit_status = kvp_ctl_interrupted() ? KVP_CTL_INTERRUPTED : records_get(get, slots->items + done, piece);
    done += piece;
    kvp_ctl_progress_set(&progress, done * region->bytes_per_token);
  }
  kvp_ctl_progress_end(&progress);
  return exit_status;
}

static int memory_get(struct get *get, const struct kvp_ctl_list *blocks) {
  uint64_t stride = get->target.region->block_stride_bytes;
  uint8_t *memory = kvp_ctl_allocate(stride, 1);
  struct kvp_ctl_progress progress;
  kvp_ctl_progress_init(&progress, "reading", blocks->count * stride, get->ctl->json);
  int exit_status = KVP_CTL_OK;
  for (size_t i = 0; i < blocks->count && exit_status == KVP_CTL_OK; i++) {
    kvpool_error error;
    if (kvp_ctl_interrupted()) {
      exit_status = KVP_CTL_INTERRUPTED;
    } else if (kvpool_blocks_dump(get->ctl->client, &get->target.layer, get->arguments->device,
                                  (uint32_t)blocks->items[i], 1, memory, stride, &error) != KVPOOL_OK) {
      kvp_ctl_progress_end(&progress);
      exit_status = kvp_ctl_fail(get->ctl, &error);
    } else {
      exit_status = kvp_ctl_rows_file_write_bytes(get->ctl, &get->file, memory, stride);
    }
    kvp_ctl_progress_set(&progress, (i + 1) * stride);
  }
  kvp_ctl_progress_end(&progress);
  free(memory);
  return exit_status;
}

/* ---- the file ---------------------------------------------------------------------------------------------------
 */

static int file_create(struct get *get, uint64_t rows) {
  const char *path = get->arguments->file;
  size_t length = strlen(path);
  bool is_npy = length >= 4 && strcmp(path + length - 4, ".npy") == 0;
  get->form = get->arguments->form != GET_DEFAULT ? get->arguments->form : is_npy ? GET_FLOAT32 : GET_BF16;
  switch (get->form) {
  case GET_RECORD:
    return kvp_ctl_rows_file_create(get->ctl, path, KVP_CTL_ROW_BYTES, get->target.region->bytes_per_token, rows,
                                    &get->file);
  case GET_MEMORY:
    return get->target.region->block_stride_bytes > UINT32_MAX
               ? kvp_ctl_refuse(get->ctl, "--as record", "a block of more than 4 GiB can't be read as memory")
               : kvp_ctl_rows_file_create(get->ctl, path, KVP_CTL_ROW_BYTES,
                                          (uint32_t)get->target.region->block_stride_bytes, rows, &get->file);
  default:
    return kvp_ctl_rows_file_create(get->ctl, path,
                                    get->form == GET_BF16      ? KVP_CTL_ROW_BF16
                                    : get->form == GET_FLOAT32 ? KVP_CTL_ROW_FLOAT32
                                                               : KVP_CTL_ROW_FLOAT16,
                                    get->target.elements, rows, &get->file);
  }
}

static void result_tell(const struct get *get, uint64_t rows) {
  const char *what = get->form == GET_MEMORY ? "block" : "record";
  const char *type = kvp_ctl_row_type_name(get->file.type);
  if (get->ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_string(document, "file", get->arguments->file);
    kvp_ctl_json_string(document, "of", what);
    kvp_ctl_json_integer(document, "rows", (int64_t)rows);
    kvp_ctl_json_integer(document, "elements", get->file.elements);
    kvp_ctl_json_string(document, "type", type);
    kvp_ctl_json_print(get->ctl, document);
    return;
  }
  if (get->file.output.is_stdout) {
    return; /* the rows are there */
  }
  kvp_ctl_print("%s: %s %s%s of %s/%s:%u (%s), each %u %s%s\n", get->arguments->file, kvp_ctl_count(rows).text, what,
                kvp_ctl_plural(rows), kvpool_pool_name(get->target.pool), get->target.region->name,
                get->target.layer.layer, get->target.format.name, get->file.elements,
                get->file.type == KVP_CTL_ROW_BYTES ? "" : "x ", type);
}

static int get_rows(struct get *get) {
  const struct get_arguments *arguments = get->arguments;
  uint32_t per_block = get->target.region->tokens_per_block;
  bool is_memory = arguments->form == GET_MEMORY;
  struct kvp_ctl_list slots = {0};
  int exit_status = KVP_CTL_OK;
  for (size_t i = 0; i < arguments->slots.count; i++) {
    kvp_ctl_list_append(&slots, arguments->slots.items[i]);
  }
  for (size_t i = 0; i < arguments->blocks.count && exit_status == KVP_CTL_OK; i++) {
    uint32_t block = (uint32_t)arguments->blocks.items[i];
    if (block >= kvpool_pool_num_blocks(get->target.pool)) {
      exit_status =
          kvp_ctl_refuse(get->ctl, "blocks are counted from 0", "pool %s has %u blocks, there is no block %u",
                         kvpool_pool_name(get->target.pool), kvpool_pool_num_blocks(get->target.pool), block);
    }
    for (uint32_t token = 0; exit_status == KVP_CTL_OK && !is_memory && token < per_block; token++) {
      kvp_ctl_list_append(&slots, (int32_t)(block * per_block + token));
    }
  }
  uint64_t rows = is_memory ? arguments->blocks.count : slots.count;
  exit_status = exit_status == KVP_CTL_OK ? file_create(get, rows) : exit_status;
  if (exit_status == KVP_CTL_OK) {
    exit_status = is_memory ? memory_get(get, &arguments->blocks) : slots_get(get, &slots);
    exit_status = exit_status == KVP_CTL_OK ? kvp_ctl_rows_file_finish(get->ctl, &get->file) : exit_status;
    if (exit_status == KVP_CTL_OK) {
      result_tell(get, rows);
    } else if (exit_status == KVP_CTL_INTERRUPTED) {
      (void)kvp_ctl_tell_interrupted("interrupted; %s is not written", arguments->file);
    }
    kvp_ctl_rows_file_close(&get->file);
  }
  kvp_ctl_list_deinit(&slots);
  return exit_status;
}

static int get_checked(struct kvp_ctl *ctl, const struct get_arguments *arguments) {
  if (arguments->file == NULL) {
    return kvp_ctl_usage(&kvp_ctl_get, "POOL/REGION[:LAYER] and a FILE are needed");
  }
  if (arguments->slots.count == 0 && arguments->blocks.count == 0) {
    return kvp_ctl_usage(&kvp_ctl_get, "which records? --slots or --blocks");
  }
  if (arguments->form == GET_MEMORY && arguments->slots.count > 0) {
    return kvp_ctl_usage(&kvp_ctl_get, "--as memory is about whole blocks: --blocks, not --slots");
  }
  kvp_ctl_interrupt_init(ctl);
  int exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  struct get get = {.ctl = ctl, .arguments = arguments};
  exit_status = kvp_ctl_target_open(ctl, arguments->target, &get.target);
  if (exit_status == KVP_CTL_OK) {
    exit_status = get_rows(&get);
    kvp_ctl_target_close(&get.target);
  }
  return exit_status;
}

static int get_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct get_arguments arguments = {0};
  int exit_status;
  if (kvp_ctl_parse(ctl, &kvp_ctl_get, argc, argv, &arguments, &exit_status)) {
    exit_status = get_checked(ctl, &arguments);
  }
  kvp_ctl_list_deinit(&arguments.slots);
  kvp_ctl_list_deinit(&arguments.blocks);
  return exit_status;
}

const struct kvp_ctl_command kvp_ctl_get = {
    .name = "get",
    .summary = "read records into a file, whoever they belong to",
    .synopsis = "POOL/REGION[:LAYER] FILE",
    .details =
        "Reading contents is an operator's right (root, and the daemon's own user); nothing is leased, and "
        "the owner may be writing meanwhile. Values are what dump shows: code times scale. FILE is .npy when its "
        "name ends so, else raw; - is standard output. A file appears, or is replaced, when all of it is there; "
        "a pipe or a device is written to as it is.\n\n"
        "Examples:\n"
        "  kvpoolctl get main/kv:0 rows.npy --slots 0-99\n"
        "  kvpoolctl get main/kv:0 rows.bf16 --blocks 7,12\n"
        "  kvpoolctl get main/index block7.bin --blocks 7 --as memory",
    .options = options,
    .take = take,
    .run = get_run,
};
