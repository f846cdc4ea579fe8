/* pool describe, pool delete: one pool by its name. */
#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/pool_view.h"

enum { option_force = 'f' };

struct pool_arguments {
  char *name;
  bool force;
};

static const struct argp_option delete_options[] = {
    {"force", option_force, NULL, 0, "Also while blocks are leased; their sessions' later steps are refused", 0},
    {0},
};

static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct pool_arguments *pool = arguments;
  if (key == option_force) {
    pool->force = true;
    return 0;
  }
  if (key == ARGP_KEY_ARG && state->arg_num == 0) {
    pool->name = value;
    return 0;
  }
  return ARGP_ERR_UNKNOWN;
}

/* The pool of the command line, or an exit status with the error told. */
static int pool_open(struct kvp_ctl *ctl, const struct kvp_ctl_command *command, int argc, char **argv,
                     struct pool_arguments *arguments, kvpool_pool **out) {
  int exit_status;
  if (!kvp_ctl_parse(ctl, command, argc, argv, arguments, &exit_status)) {
    return exit_status;
  }
  if (arguments->name == NULL) {
    return kvp_ctl_usage(command, "which pool?");
  }
  exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  kvpool_error error;
  return kvpool_pool_open(ctl->client, arguments->name, out, &error) == KVPOOL_OK ? KVP_CTL_OK
                                                                                  : kvp_ctl_fail(ctl, &error);
}

static int describe_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct pool_arguments arguments = {0};
  kvpool_pool *pool = NULL;
  int exit_status = pool_open(ctl, &kvp_ctl_pool_describe, argc, argv, &arguments, &pool);
  if (pool == NULL) {
    return exit_status;
  }
  if (ctl->json) {
    kvp_ctl_json_print(ctl, kvp_ctl_pool_json(pool));
  } else {
    kvp_ctl_pool_print(ctl, pool);
  }
  kvpool_pool_destroy(pool);
  return KVP_CTL_OK;
}

static int delete_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct pool_arguments arguments = {0};
  kvpool_pool *pool = NULL;
  int exit_status = pool_open(ctl, &kvp_ctl_pool_delete, argc, argv, &arguments, &pool);
  if (pool == NULL) {
    return exit_status;
  }
  kvpool_error error;
  kvpool_status status = kvpool_pool_delete(pool, arguments.force, &error);
  if (status == KVPOOL_IN_USE) {
    exit_status = kvp_ctl_fail_hint(ctl, &error,
                                    "`kvpoolctl blocks POOL` shows who holds them; --force deletes it all the same, "
                                    "and their sessions' later steps are refused");
  } else if (status != KVPOOL_OK) {
    exit_status = kvp_ctl_fail(ctl, &error);
  } else if (ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_string(document, "deleted", arguments.name);
    kvp_ctl_json_print(ctl, document);
  } else {
    kvp_ctl_print("pool %s is deleted\n", arguments.name);
  }
  kvpool_pool_destroy(pool);
  return exit_status;
}

const struct kvp_ctl_command kvp_ctl_pool_describe = {
    .name = "pool describe",
    .summary = "one pool: its regions, strides and memory",
    .synopsis = "POOL",
    .details = "Examples:\n"
               "  kvpoolctl pool describe main\n"
               "  kvpoolctl pool describe main --json | jq '.regions[].tokens_per_block'",
    .take = take,
    .run = describe_run,
};

const struct kvp_ctl_command kvp_ctl_pool_delete = {
    .name = "pool delete",
    .summary = "delete a pool and give its memory back",
    .synopsis = "POOL",
    .details = "An operator's right (root, and the daemon's own user).\n\n"
               "Examples:\n"
               "  kvpoolctl pool delete scratch\n"
               "  kvpoolctl pool delete main --force",
    .options = delete_options,
    .take = take,
    .run = delete_run,
};
