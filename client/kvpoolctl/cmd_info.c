/* info: the daemon, its devices, the formats it knows. */
#include <stdio.h>
#include <string.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/table.h"
#include "client/kvpoolctl/text.h"

static const char *state_name(kvpool_device_state state) {
  static const char *const names[] = {"starting", "serving", "restarting", "stopped", "waiting", "refused"};
  return (unsigned)state < sizeof names / sizeof names[0] ? names[state] : "unknown";
}

static enum kvp_ctl_role state_role(kvpool_device_state state) {
  bool is_bad = state == KVPOOL_DEVICE_STOPPED || state == KVPOOL_DEVICE_REFUSED;
  return state == KVPOOL_DEVICE_SERVING ? KVP_CTL_GOOD : is_bad ? KVP_CTL_BAD : KVP_CTL_WARN;
}

static enum kvp_ctl_role memory_role(uint64_t used, uint64_t limit) {
  return used > limit - limit / 20 ? KVP_CTL_BAD : used > limit - limit / 5 ? KVP_CTL_WARN : KVP_CTL_GOOD;
}

/* ---- for programs -----------------------------------------------------------------------------------------------
 */

static json_t *device_json(const kvpool_device_info *device) {
  json_t *object = json_object();
  kvp_ctl_json_string(object, "name", device->name);
  kvp_ctl_json_string(object, "state", state_name(device->state));
  kvp_ctl_json_integer(object, "executor_pid", (int64_t)device->executor_pid);
  kvp_ctl_json_integer(object, "restarts", (int64_t)device->restarts);
  kvp_ctl_json_string(object, "waiting_for", device->waiting_for);
  kvp_ctl_json_integer(object, "memory_bytes", (int64_t)device->memory_bytes);
  kvp_ctl_json_integer(object, "memory_limit_bytes", (int64_t)device->memory_limit_bytes);
  kvp_ctl_json_integer(object, "pool_bytes", (int64_t)device->pool_bytes);
  kvp_ctl_json_integer(object, "buffer_bytes", (int64_t)device->buffer_bytes);
  kvp_ctl_json_integer(object, "ring_bytes", (int64_t)device->ring_bytes);
  kvp_ctl_json_integer(object, "memory_left_bytes", (int64_t)device->memory_left_bytes);
  kvp_ctl_json_integer(object, "memory_others_bytes", (int64_t)device->memory_others_bytes);
  kvp_ctl_json_integer(object, "memory_granularity_bytes", (int64_t)device->memory_granularity_bytes);
  kvp_ctl_json_integer(object, "steps_in_flight", (int64_t)device->steps_in_flight);
  kvp_ctl_json_integer(object, "steps_done", (int64_t)device->steps_done);
  kvp_ctl_json_string(object, "description", device->description);
  kvp_ctl_json_string(object, "driver", device->driver);
  kvp_ctl_json_bool(object, "mps", device->mps);
  return object;
}

static json_t *format_json(const kvpool_format_info *format) {
  json_t *object = json_object();
  kvp_ctl_json_string(object, "name", format->name);
  kvp_ctl_json_string(object, "quantized_dtype", format->quantized_dtype);
  kvp_ctl_json_integer(object, "quantized_elements", format->quantized_elements);
  kvp_ctl_json_integer(object, "elements_per_scale", format->elements_per_scale);
  kvp_ctl_json_integer(object, "bf16_elements", format->bf16_elements);
  kvp_ctl_json_string(object, "scale_format", format->scale_format);
  kvp_ctl_json_bool(object, "dequantize_on_load", format->dequantize_on_load);
  kvp_ctl_json_bool(object, "token_interleaved", format->token_interleaved);
  kvp_ctl_json_integer(object, "data_bytes", format->data_bytes);
  kvp_ctl_json_integer(object, "scale_bytes", format->scale_bytes);
  kvp_ctl_json_integer(object, "bytes_per_token", format->bytes_per_token);
  kvp_ctl_json_integer(object, "row_bytes", format->row_bytes);
  kvp_ctl_json_integer(object, "loaded_row_bytes", format->loaded_row_bytes);
  kvp_ctl_json_integer(object, "loaded_scale_bytes", format->loaded_scale_bytes);
  kvp_ctl_json_string(object, "note", format->note);
  return object;
}

static void info_json(const struct kvp_ctl *ctl, const kvpool_server_info *info) {
  json_t *document = json_object();
  kvp_ctl_json_string(document, "version", kvpool_server_info_version(info));
  kvp_ctl_json_integer(document, "protocol_version", kvpool_server_info_protocol_version(info));
  kvp_ctl_json_integer(document, "pid", (int64_t)kvpool_server_info_pid(info));
  kvp_ctl_json_integer(document, "started_unix_ns", (int64_t)kvpool_server_info_started_unix_ns(info));
  kvp_ctl_json_string(document, "attach_socket", kvpool_server_info_attach_socket(info));
  json_t *devices = json_array();
  for (size_t i = 0; i < kvpool_server_info_device_count(info); i++) {
    kvp_ctl_json_append(devices, device_json(kvpool_server_info_device(info, i)));
  }
  kvp_ctl_json_set(document, "devices", devices);
  json_t *formats = json_array();
  for (size_t i = 0; i < kvpool_server_info_format_count(info); i++) {
    kvp_ctl_json_append(formats, format_json(kvpool_server_info_format(info, i)));
  }
  kvp_ctl_json_set(document, "formats", formats);
  kvp_ctl_json_print(ctl, document);
}

/* ---- for people -------------------------------------------------------------------------------------------------
 */

/* A GPU's UUID is too long for a table; its first digits tell it apart, --json has all of it. */
static struct kvp_ctl_text device_label(const kvpool_device_info *device) {
  enum { shown = sizeof "cuda:GPU-01234567" - 1 };
  struct kvp_ctl_text label;
  (void)snprintf(label.text, sizeof label.text, "%.*s%s", shown, device->name,
                 strlen(device->name) > shown ? "..." : "");
  return label;
}

/* How a GPU's executor shares it; a host's doesn't. */
static const char *sharing_name(const kvpool_device_info *device) {
  return device->driver[0] == '\0' ? "-" : device->mps ? "MPS" : "time-sliced";
}

/* Of the workers that are attached to it now. */
static uint64_t ring_steps_of(const kvpool_session_list *sessions, const char *device) {
  uint64_t steps = 0;
  for (size_t i = 0; i < kvpool_session_list_count(sessions); i++) {
    for (size_t j = 0; j < kvpool_session_list_item(sessions, i)->attachment_count; j++) {
      const kvpool_attached_info *attached = kvpool_session_list_attachment(sessions, i, j);
      steps += strcmp(attached->device, device) == 0 ? attached->steps_taken : 0;
    }
  }
  return steps;
}

static void states_print(const struct kvp_ctl *ctl, const kvpool_server_info *info,
                         const kvpool_session_list *sessions) {
  static const char *const columns[] = {"DEVICE",     "STATE",     ">GRPC STEPS", "?>IN FLIGHT", ">RING STEPS",
                                        "?>EXECUTOR", ">RESTARTS", "SHARING",     "?~WHAT IT IS"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (size_t i = 0; i < kvpool_server_info_device_count(info); i++) {
    const kvpool_device_info *device = kvpool_server_info_device(info, i);
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_BOLD, "%s", device_label(device).text);
    kvp_ctl_table_cell(table, state_role(device->state), "%s", state_name(device->state));
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(device->steps_done).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(device->steps_in_flight).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(ring_steps_of(sessions, device->name)).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%llu", (unsigned long long)device->executor_pid);
    kvp_ctl_table_cell(table, device->restarts > 0 ? KVP_CTL_WARN : KVP_CTL_PLAIN, "%s",
                       kvp_ctl_count(device->restarts).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", sharing_name(device));
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "%s%s%s", device->description,
                       device->driver[0] != '\0' ? "; driver " : "", device->driver);
  }
  kvp_ctl_table_print(table);
}

static void memory_print(const struct kvp_ctl *ctl, const kvpool_server_info *info) {
  static const char *const columns[] = {"MEMORY OF", ">USED",  "?",     ">LIMIT",   ">POOLS",
                                        ">BUFFERS",  ">RINGS", ">LEFT", "?>OTHERS", "?>DEVICE HAS"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (size_t i = 0; i < kvpool_server_info_device_count(info); i++) {
    const kvpool_device_info *device = kvpool_server_info_device(info, i);
    uint64_t limit = device->memory_limit_bytes;
    uint64_t of_rings = strncmp(device->name, "host:", 5) == 0 ? device->ring_bytes : 0; /* else another memory's */
    uint64_t used = device->pool_bytes + device->buffer_bytes + of_rings;
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_BOLD, "%s", device_label(device).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_percent(used, limit).text);
    kvp_ctl_table_cell(table, memory_role(used, limit), "%s", kvp_ctl_bar(&ctl->terminal, used, limit).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_bytes(limit).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_bytes(device->pool_bytes).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_bytes(device->buffer_bytes).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_bytes(device->ring_bytes).text);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_bytes(device->memory_left_bytes).text);
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "%s", kvp_ctl_bytes(device->memory_others_bytes).text);
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "%s", kvp_ctl_bytes(device->memory_bytes).text);
  }
  kvp_ctl_table_print(table);
}

static void devices_print(const struct kvp_ctl *ctl, const kvpool_server_info *info,
                          const kvpool_session_list *sessions) {
  states_print(ctl, info, sessions);
  for (size_t i = 0; i < kvpool_server_info_device_count(info); i++) {
    const kvpool_device_info *device = kvpool_server_info_device(info, i);
    if (device->waiting_for[0] != '\0') {
      kvp_ctl_print("%s%s %s: %s%s\n", kvp_ctl_terminal_role(&ctl->terminal, state_role(device->state)), device->name,
                    device->state == KVPOOL_DEVICE_REFUSED ? "can't be served" : "waits", device->waiting_for,
                    kvp_ctl_terminal_reset(&ctl->terminal));
    }
  }
  kvp_ctl_print("\n");
  memory_print(ctl, info);
}

static void formats_print(const struct kvp_ctl *ctl, const kvpool_server_info *info) {
  static const char *const columns[] = {"FORMAT", "STORED", "SCALES", ">RECORD", "?>BF16 ROW", "LOAD GIVES", "~NOTE"};
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (size_t i = 0; i < kvpool_server_info_format_count(info); i++) {
    const kvpool_format_info *format = kvpool_server_info_format(info, i);
    bool is_quantized = format->quantized_elements > 0;
    kvp_ctl_table_row(table);
    kvp_ctl_table_cell(table, KVP_CTL_BOLD, "%s", format->name);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u x %s",
                       is_quantized ? format->quantized_elements : format->bf16_elements,
                       is_quantized ? format->quantized_dtype : "bf16");
    if (is_quantized) {
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s per %u", format->scale_format, format->elements_per_scale);
    } else {
      kvp_ctl_table_cell(table, KVP_CTL_DIM, "none");
    }
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u B", format->bytes_per_token);
    kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u B", format->row_bytes);
    if (format->loaded_scale_bytes > 0) {
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "codes %u + %u B", format->loaded_row_bytes,
                         format->loaded_scale_bytes);
    } else {
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "bf16 row");
    }
    kvp_ctl_table_cell(table, KVP_CTL_DIM, "%s", format->note);
  }
  kvp_ctl_table_print(table);
}

static int info_print(struct kvp_ctl *ctl, const kvpool_server_info *info) {
  kvpool_session_list *sessions; /* whose workers' rings are counted */
  kvpool_error error;
  if (kvpool_session_list_get(ctl->client, &sessions, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  kvp_ctl_print("%skvpoold %s%s, protocol version %u, pid %llu, up %s\n\n",
                kvp_ctl_terminal_role(&ctl->terminal, KVP_CTL_BOLD), kvpool_server_info_version(info),
                kvp_ctl_terminal_reset(&ctl->terminal), kvpool_server_info_protocol_version(info),
                (unsigned long long)kvpool_server_info_pid(info),
                kvp_ctl_duration(kvp_ctl_age_ns(kvpool_server_info_started_unix_ns(info))).text);
  devices_print(ctl, info, sessions);
  kvp_ctl_print("\n");
  formats_print(ctl, info);
  kvpool_session_list_destroy(sessions);
  return KVP_CTL_OK;
}

static int info_run(struct kvp_ctl *ctl, int argc, char **argv) {
  int exit_status;
  if (!kvp_ctl_parse(ctl, &kvp_ctl_info, argc, argv, NULL, &exit_status)) {
    return exit_status;
  }
  exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  kvpool_server_info *info;
  kvpool_error error;
  if (kvpool_server_info_get(ctl->client, &info, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  if (ctl->json) {
    info_json(ctl, info);
  } else {
    exit_status = info_print(ctl, info);
  }
  kvpool_server_info_destroy(info);
  return exit_status;
}

const struct kvp_ctl_command kvp_ctl_info = {
    .name = "info",
    .summary = "the daemon, its devices and memory, the formats it knows",
    .details =
        "Memory: LIMIT is what pools and buffers may take together, LEFT what of it is free; each of their memories "
        "takes whole pieces of the device (2 MiB of a GPU). OTHERS is what contexts and other processes have in use, "
        "as of the last two seconds. GRPC STEPS are done, IN FLIGHT not yet, of steps over gRPC; RING STEPS is "
        "what was taken out of the rings of the workers that are attached now.\n\n"
        "Examples:\n"
        "  kvpoolctl info\n"
        "  kvpoolctl info --json | jq '.devices[] | select(.state != \"serving\")'",
    .run = info_run,
};
