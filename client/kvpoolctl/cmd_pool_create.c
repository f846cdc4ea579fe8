/* pool create: a specification from the command line. */
#include <stdlib.h>
#include <string.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/number.h"
#include "client/kvpoolctl/pool_view.h"

enum {
  option_kind = 0x100,
  option_block_size,
  option_blocks,
  option_placement,
  option_region,
  option_namespace,
  list_max = 64, /* more regions or placements than any daemon takes */
};

struct create_arguments {
  kvpool_pool_spec spec;
  const char *placements[list_max];
  kvpool_region_spec regions[list_max];
};

static const struct argp_option options[] = {
    {"kind", option_kind, "KIND", 0,
     "paged (default): a block holds consecutive tokens; ring: a block is one sequence's "
     "sliding window",
     0},
    {"block-size", option_block_size, "TOKENS", 0, "Tokens of the sequence that a block covers", 0},
    {"blocks", option_blocks, "COUNT", 0, "How many blocks", 0},
    {"placement", option_placement, "DEVICE", 0,
     "A device that holds the pool; several are allowed; default: the first", 0},
    {"region", option_region, "SPEC", 0,
     "name=N,format=F and any of layers=1, ratio=1, width=W (of bf16 only), note=TEXT, in one word; several are "
     "allowed, one is needed",
     0},
    {"namespace", option_namespace, "NAMESPACE", 0,
     "Whose sessions alone may have its blocks and map it; default: anybody's, but a worker maps it only where one "
     "namespace alone has used it, whose it is from then on",
     0},
    {0},
};

/* "name=kv,format=v41,layers=2": the parts stay in value, which they are cut from. */
static error_t region_take(char *value, kvpool_region_spec *region) {
  static char name[] = "name", format[] = "format", layers[] = "layers", ratio[] = "ratio", width[] = "width",
              note[] = "note";
  char *const keys[] = {name, format, layers, ratio, width, note, NULL};
  unsigned seen = 0;
  *region = (kvpool_region_spec){.num_layers = 1};
  while (*value != '\0') {
    char *part = value;
    char *text = NULL;
    int key = getsubopt(&value, keys, &text);
    if (key < 0 || text == NULL) {
      return kvp_ctl_take_failed(&kvp_ctl_pool_create,
                                 "--region: '%s' is not one of name=, format=, layers=, ratio=, width=, note=", part);
    }
    if ((seen & 1U << key) != 0) {
      return kvp_ctl_take_failed(&kvp_ctl_pool_create,
                                 "--region: %s= is there twice; a region is a --region of its own", keys[key]);
    }
    seen |= 1U << key;
    uint64_t number = 0;
    bool is_number = key >= 2 && key <= 4;
    if (is_number && (!kvp_ctl_number_parse(text, UINT32_MAX, &number) || number == 0)) {
      return kvp_ctl_take_failed(&kvp_ctl_pool_create, "--region: %s=%s: a number from 1 to %u is wanted", keys[key],
                                 text, UINT32_MAX);
    }
    if (!is_number && text[0] == '\0') {
      return kvp_ctl_take_failed(&kvp_ctl_pool_create, "--region: %s= is empty", keys[key]);
    }
    switch (key) {
    case 0:
      region->name = text;
      break;
    case 1:
      region->format = text;
      break;
    case 2:
      region->num_layers = (uint32_t)number;
      break;
    case 3:
      region->compression_ratio = (uint32_t)number;
      break;
    case 4:
      region->width = (uint32_t)number;
      break;
    default:
      region->note = text;
      break;
    }
  }
  if (region->name == NULL || region->format == NULL) {
    return kvp_ctl_take_failed(&kvp_ctl_pool_create, "--region needs %s",
                               region->name == NULL ? "name=NAME" : "format=FORMAT");
  }
  return 0;
}

static error_t number_take(const char *option, const char *value, uint32_t *out) {
  uint64_t number = 0;
  error_t failed = kvp_ctl_take_count(&kvp_ctl_pool_create, option, value, UINT32_MAX, &number);
  *out = (uint32_t)number;
  return failed;
}

static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct create_arguments *create = arguments;
  kvpool_pool_spec *spec = &create->spec;
  switch (key) {
  case option_kind:
    spec->kind = strcmp(value, "ring") == 0 ? KVPOOL_POOL_RING : KVPOOL_POOL_PAGED;
    return spec->kind == KVPOOL_POOL_RING || strcmp(value, "paged") == 0
               ? 0
               : kvp_ctl_take_failed(&kvp_ctl_pool_create, "--kind %s: paged or ring", value);
  case option_block_size:
    return number_take("block-size", value, &spec->block_size);
  case option_blocks:
    return number_take("blocks", value, &spec->num_blocks);
  case option_placement:
    if (spec->placement_count == list_max) {
      return kvp_ctl_take_failed(&kvp_ctl_pool_create, "more than %d placements", list_max);
    }
    create->placements[spec->placement_count++] = value;
    return 0;
  case option_region:
    if (spec->region_count == list_max) {
      return kvp_ctl_take_failed(&kvp_ctl_pool_create, "more than %d regions", list_max);
    }
    return region_take(value, &create->regions[spec->region_count++]);
  case option_namespace:
    spec->namespace_name = value;
    return 0;
  case ARGP_KEY_ARG:
    if (state->arg_num > 0) {
      return ARGP_ERR_UNKNOWN;
    }
    spec->name = value;
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

static int create_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct create_arguments arguments = {0};
  kvpool_pool_spec *spec = &arguments.spec;
  spec->placements = arguments.placements;
  spec->regions = arguments.regions;
  int exit_status;
  if (!kvp_ctl_parse(ctl, &kvp_ctl_pool_create, argc, argv, &arguments, &exit_status)) {
    return exit_status;
  }
  const char *missing = spec->name == NULL        ? "a NAME"
                        : spec->block_size == 0   ? "--block-size"
                        : spec->num_blocks == 0   ? "--blocks"
                        : spec->region_count == 0 ? "at least one --region"
                                                  : NULL;
  if (missing != NULL) {
    return kvp_ctl_usage(&kvp_ctl_pool_create, "%s is needed", missing);
  }
  exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  kvpool_pool *pool;
  kvpool_error error;
  if (kvpool_pool_create(ctl->client, spec, &pool, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  if (ctl->json) {
    kvp_ctl_json_print(ctl, kvp_ctl_pool_json(pool));
  } else {
    kvp_ctl_pool_print(ctl, pool);
  }
  kvpool_pool_destroy(pool);
  return KVP_CTL_OK;
}

const struct kvp_ctl_command kvp_ctl_pool_create = {
    .name = "pool create",
    .summary = "make a pool; its memory is reserved at once",
    .synopsis = "NAME",
    .details =
        "An operator's right (root, and the daemon's own user). A region with ratio R holds block-size / R tokens a "
        "block. All regions share the pool's block ids. `kvpoolctl info` lists formats and devices.\n\n"
        "Examples:\n"
        "  kvpoolctl pool create main --block-size 64 --blocks 1024 \\\n"
        "      --region name=kv,format=v41,layers=60,ratio=4 \\\n"
        "      --region name=index,format=index_fp4,layers=60,ratio=4\n"
        "  kvpoolctl pool create window --kind ring --block-size 4096 --blocks 64 \\\n"
        "      --region name=swa,format=v41,layers=60",
    .options = options,
    .take = take,
    .run = create_run,
};
