/* put: rows of a file become records, in blocks leased for them. */
#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/number.h"
#include "client/kvpoolctl/progress.h"
#include "client/kvpoolctl/rows_file.h"
#include "client/kvpoolctl/target.h"
#include "client/kvpoolctl/text.h"

enum { option_first_block = 0x100, option_hold, option_name, option_namespace, piece_bytes = 8 << 20 };

struct put_arguments {
  const char *target;
  const char *file;
  const char *name;
  const char *namespace_name; /* NULL: the pool's */
  uint64_t first_block;
  bool has_first_block;
  bool hold;
};

struct put {
  struct kvp_ctl *ctl;
  const struct put_arguments *arguments;
  struct kvp_ctl_target target;
  struct kvp_ctl_rows_file file;
  kvpool_session *session;
  int ended; /* eventfd: the session is over, without our doing */
  int32_t *blocks;
  uint32_t block_count;
  int32_t *slots; /* [file.rows] */
  kvpool_op_report report;
};

static const struct argp_option options[] = {
    {"first-block", option_first_block, "N", 0, "Lease the blocks from N on; default: any free ones", 0},
    {"hold", option_hold, NULL, 0, "Keep the session, and with it the blocks, until Ctrl-C", 0},
    {"name", option_name, "NAME", 0, "Of the session; default: kvpoolctl-put", 0},
    {"namespace", option_namespace, "NAMESPACE", 0, "Of the session; default: the pool's, else \"default\"", 0},
    {0},
};

static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct put_arguments *put = arguments;
  switch (key) {
  case option_first_block:
    put->has_first_block = true;
    return kvp_ctl_take_number(&kvp_ctl_put, "first-block", value, INT32_MAX, &put->first_block);
  case option_hold:
    put->hold = true;
    return 0;
  case option_name:
    put->name = value;
    return 0;
  case option_namespace:
    put->namespace_name = value;
    return 0;
  case ARGP_KEY_ARG:
    return kvp_ctl_take_word(value, state, (const char **[]){&put->target, &put->file}, 2);
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

/* On the library's thread. */
static void on_event(void *context, const kvpool_session_event *event) {
  const struct put *put = context;
  if (event->kind == KVPOOL_SESSION_ENDED) {
    const uint64_t one = 1;
    ssize_t written = write(put->ended, &one, sizeof one);
    assert(written == (ssize_t)sizeof one);
  }
}

/* ---- blocks and rows --------------------------------------------------------------------------------------------
 */

static int blocks_lease(struct put *put) {
  uint32_t per_block = put->target.region->tokens_per_block;
  uint64_t count = put->file.rows / per_block + (put->file.rows % per_block != 0);
  uint32_t pool_blocks = kvpool_pool_num_blocks(put->target.pool);
  if (count > pool_blocks) {
    return kvp_ctl_refuse(put->ctl, "a larger pool, or fewer rows",
                          "%s: %llu rows need %llu blocks of %u tokens, pool %s has %u", put->file.path,
                          (unsigned long long)put->file.rows, (unsigned long long)count, per_block,
                          kvpool_pool_name(put->target.pool), pool_blocks);
  }
  put->block_count = (uint32_t)count;
  put->blocks = kvp_ctl_allocate(count, sizeof put->blocks[0]);
  put->slots = kvp_ctl_allocate(put->file.rows, sizeof put->slots[0]);
  kvpool_error error;
  kvpool_status status;
  if (put->arguments->has_first_block) {
    uint32_t first = (uint32_t)put->arguments->first_block;
    status = kvpool_blocks_allocate_range(put->session, put->target.pool, first, put->block_count, &error);
    for (uint32_t i = 0; status == KVPOOL_OK && i < put->block_count; i++) {
      put->blocks[i] = (int32_t)(first + i);
    }
  } else {
    status = kvpool_blocks_allocate(put->session, put->target.pool, put->block_count, put->blocks, &error);
  }
  if (status == KVPOOL_OK) {
    status = kvpool_plan_slot_mapping(put->blocks, put->block_count, per_block, 0, (int64_t)put->file.rows,
                                      put->slots, &error);
  }
  if (status == KVPOOL_PERMISSION_DENIED) { /* not about who we are: the pool is another namespace's */
    return kvp_ctl_fail_hint(put->ctl, &error, "--namespace says which namespace the session is of");
  }
  return status == KVPOOL_OK ? KVP_CTL_OK : kvp_ctl_fail_session(put->ctl, put->session, &error);
}

static void report_add(kvpool_op_report *sum, const kvpool_op_report *report) {
  sum->rows_stored += report->rows_stored;
  sum->rows_nonfinite += report->rows_nonfinite;
  sum->groups_saturated += report->groups_saturated;
  sum->bytes_read += report->bytes_read;
  sum->bytes_written += report->bytes_written;
}

static int rows_store(struct put *put) {
  uint32_t row_bytes = 2 * put->target.elements;
  uint64_t piece_max = piece_bytes / row_bytes > 0 ? piece_bytes / row_bytes : 1;
  uint16_t *rows = kvp_ctl_allocate(piece_max, row_bytes);
  struct kvp_ctl_progress progress;
  kvp_ctl_progress_init(&progress, "storing", put->file.rows * row_bytes, put->ctl->json);
  int exit_status = KVP_CTL_OK;
  for (uint64_t done = 0; done < put->file.rows && exit_status == KVP_CTL_OK;) {
    uint64_t piece = put->file.rows - done < piece_max ? put->file.rows - done : piece_max;
    kvpool_op_report report;
    kvpool_error error;
    if (kvp_ctl_interrupted()) {
      kvp_ctl_progress_end(&progress);
      exit_status = kvp_ctl_tell_interrupted("interrupted after %llu rows; the blocks are free again",
                                             (unsigned long long)done);
      break;
    }
    exit_status = kvp_ctl_rows_file_read(put->ctl, &put->file, piece, rows);
    if (exit_status == KVP_CTL_OK && kvpool_rows_store(put->session, &put->target.layer, rows, piece, row_bytes,
                                                       put->slots + done, piece, &report, &error) != KVPOOL_OK) {
      kvp_ctl_progress_end(&progress);
      exit_status = kvp_ctl_fail_session(put->ctl, put->session, &error);
    }
    if (exit_status == KVP_CTL_OK) {
      report_add(&put->report, &report);
      done += piece;
      kvp_ctl_progress_set(&progress, done * row_bytes);
    }
  }
  kvp_ctl_progress_end(&progress);
  free(rows);
  return exit_status;
}

/* ---- what it says -----------------------------------------------------------------------------------------------
 */

static void result_json(const struct put *put) {
  json_t *document = json_object();
  kvp_ctl_json_string(document, "pool", kvpool_pool_name(put->target.pool));
  kvp_ctl_json_string(document, "region", put->target.region->name);
  kvp_ctl_json_integer(document, "layer", put->target.layer.layer);
  kvp_ctl_json_integer(document, "session_id", (int64_t)kvpool_session_id(put->session));
  kvp_ctl_json_integer(document, "rows_stored", (int64_t)put->report.rows_stored);
  kvp_ctl_json_integer(document, "rows_nonfinite", (int64_t)put->report.rows_nonfinite);
  kvp_ctl_json_integer(document, "groups_saturated", (int64_t)put->report.groups_saturated);
  kvp_ctl_json_integer(document, "bytes_written", (int64_t)put->report.bytes_written);
  kvp_ctl_json_bool(document, "held", put->arguments->hold);
  kvp_ctl_json_set(document, "blocks", kvp_ctl_json_int32_array(put->blocks, put->block_count));
  char *slots = kvp_ctl_list_text(put->slots, put->file.rows);
  kvp_ctl_json_string(document, "slots", slots);
  free(slots);
  kvp_ctl_json_print(put->ctl, document);
}

static void result_print(const struct put *put) {
  const struct kvp_ctl_terminal *terminal = &put->ctl->terminal;
  char *blocks = kvp_ctl_list_text(put->blocks, put->block_count);
  char *slots = kvp_ctl_list_text(put->slots, put->file.rows);
  kvp_ctl_print("stored %s row%s of %s as %s in %s/%s:%u, %s of records\n",
                kvp_ctl_count(put->report.rows_stored).text, kvp_ctl_plural(put->report.rows_stored),
                kvp_ctl_row_type_name(put->file.type), put->target.format.name, kvpool_pool_name(put->target.pool),
                put->target.region->name, put->target.layer.layer, kvp_ctl_bytes(put->report.bytes_written).text);
  kvp_ctl_print("session  %llu\nblocks   %s\nslots    %s\n", (unsigned long long)kvpool_session_id(put->session),
                blocks, slots);
  if (put->report.rows_nonfinite > 0) {
    kvp_ctl_print("%s%s row%s with NaN or Inf%s\n", kvp_ctl_terminal_role(terminal, KVP_CTL_WARN),
                  kvp_ctl_count(put->report.rows_nonfinite).text, kvp_ctl_plural(put->report.rows_nonfinite),
                  kvp_ctl_terminal_reset(terminal));
  }
  if (put->report.groups_saturated > 0) {
    kvp_ctl_print("%s%s group%s saturated: values larger than the format reaches%s\n",
                  kvp_ctl_terminal_role(terminal, KVP_CTL_WARN), kvp_ctl_count(put->report.groups_saturated).text,
                  kvp_ctl_plural(put->report.groups_saturated), kvp_ctl_terminal_reset(terminal));
  }
  if (put->arguments->hold) {
    kvp_ctl_print("held until Ctrl-C ends this session\n");
  } else {
    kvp_ctl_print("The session ends here, so its blocks are free again: get and dump show these\n"
                  "records until somebody stores over them. --hold keeps the blocks.\n");
  }
  free(blocks);
  free(slots);
}

/* ---- life -------------------------------------------------------------------------------------------------------
 */

static int hold(struct put *put) {
  kvp_ctl_json_flush(put->ctl); /* whoever reads it goes by it while it is held */
  (void)fflush(stdout);
  kvp_ctl_interrupt_wait(put->ended);
  kvpool_error error;
  if (!kvp_ctl_interrupted() && kvpool_session_state(put->session, &error) != KVPOOL_OK) {
    return kvp_ctl_fail_hint(put->ctl, &error, "the blocks are gone with the session: put again");
  }
  return KVP_CTL_OK;
}

static int put_rows(struct put *put) {
  const char *name = put->arguments->name;
  const char *namespace_name = put->arguments->namespace_name;
  const kvpool_session_options session = {
      .size_bytes = sizeof session,
      .name = name == NULL ? "kvpoolctl-put" : name,
      .namespace_name = namespace_name == NULL ? kvpool_pool_namespace(put->target.pool) : namespace_name,
      .on_event = on_event,
      .context = put};
  kvpool_error error;
  if (kvpool_session_open(put->ctl->client, &session, &put->session, &error) != KVPOOL_OK) {
    put->session = NULL;
    return kvp_ctl_fail(put->ctl, &error);
  }
  int exit_status = blocks_lease(put);
  exit_status = exit_status == KVP_CTL_OK ? rows_store(put) : exit_status;
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  if (put->ctl->json) {
    result_json(put);
  } else {
    result_print(put);
  }
  return put->arguments->hold ? hold(put) : KVP_CTL_OK;
}

static int put_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct put_arguments arguments = {0};
  int exit_status;
  if (!kvp_ctl_parse(ctl, &kvp_ctl_put, argc, argv, &arguments, &exit_status)) {
    return exit_status;
  }
  if (arguments.file == NULL) {
    return kvp_ctl_usage(&kvp_ctl_put, "POOL/REGION[:LAYER] and a FILE are needed");
  }
  kvp_ctl_interrupt_init(ctl);
  exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  struct put put = {.ctl = ctl, .arguments = &arguments};
  exit_status = kvp_ctl_target_open(ctl, arguments.target, &put.target);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  exit_status = kvp_ctl_rows_file_open(ctl, arguments.file, put.target.elements, &put.file);
  if (exit_status == KVP_CTL_OK) {
    put.ended = eventfd(0, EFD_CLOEXEC);
    exit_status = put.ended < 0 ? kvp_ctl_refuse(ctl, NULL, "eventfd: %s", strerror(errno)) : put_rows(&put);
    kvpool_session_close(put.session);
    (void)close(put.ended);
    kvp_ctl_rows_file_close(&put.file);
  }
  free(put.blocks);
  free(put.slots);
  kvp_ctl_target_close(&put.target);
  return exit_status;
}

const struct kvp_ctl_command kvp_ctl_put = {
    .name = "put",
    .summary = "store the rows of a file in blocks leased for them",
    .synopsis = "POOL/REGION[:LAYER] FILE",
    .details =
        "FILE holds raw BF16 rows, or is .npy of float32, float16 or uint16 (the bits of BF16); leading dimensions "
        "are rows; - is standard input. Row i goes to the i-th slot of the leased blocks. Blocks belong to a "
        "session, which lives as "
        "long as this command: use --hold to keep them.\n\n"
        "Examples:\n"
        "  kvpoolctl put main/kv:0 latents.npy --hold\n"
        "  kvpoolctl put main/index keys.bf16 --first-block 128\n"
        "  kvpoolctl put main/kv latents.npy --json | jq -r .slots",
    .options = options,
    .take = take,
    .run = put_run,
};
