/* sessions: who is connected, what they hold, and the workers that are attached to them. */
#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/table.h"
#include "client/kvpoolctl/text.h"

static const char *attached_state_name(kvpool_attached_state state) {
  static const char *const names[] = {"starting", "serving", "lost", "ending"};
  return (unsigned)state < sizeof names / sizeof names[0] ? names[state] : "unknown";
}

static json_t *attached_json(const kvpool_attached_info *attached) {
  json_t *object = json_object();
  kvp_ctl_json_integer(object, "attachment_id", (int64_t)attached->attachment_id);
  kvp_ctl_json_string(object, "device", attached->device);
  kvp_ctl_json_integer(object, "peer_pid", attached->peer_pid);
  kvp_ctl_json_integer(object, "peer_uid", attached->peer_uid);
  kvp_ctl_json_integer(object, "attached_unix_ns", (int64_t)attached->attached_unix_ns);
  kvp_ctl_json_string(object, "state", attached_state_name(attached->state));
  kvp_ctl_json_integer(object, "steps_taken", (int64_t)attached->steps_taken);
  kvp_ctl_json_integer(object, "buffers", attached->buffers);
  return object;
}

static json_t *session_json(const kvpool_session_list *list, size_t index) {
  const kvpool_session_info *session = kvpool_session_list_item(list, index);
  json_t *object = json_object();
  kvp_ctl_json_integer(object, "session_id", (int64_t)session->session_id);
  kvp_ctl_json_string(object, "name", session->name);
  kvp_ctl_json_string(object, "namespace", session->namespace_name);
  kvp_ctl_json_integer(object, "peer_pid", session->peer_pid);
  kvp_ctl_json_integer(object, "peer_uid", session->peer_uid);
  kvp_ctl_json_integer(object, "opened_unix_ns", (int64_t)session->opened_unix_ns);
  kvp_ctl_json_integer(object, "blocks", session->blocks);
  kvp_ctl_json_integer(object, "buffers", session->buffers);
  kvp_ctl_json_integer(object, "buffer_bytes", (int64_t)session->buffer_bytes);
  kvp_ctl_json_integer(object, "queues", session->queues);
  kvp_ctl_json_integer(object, "steps_in_flight", session->steps_in_flight);
  kvp_ctl_json_integer(object, "steps_done", (int64_t)session->steps_done);
  kvp_ctl_json_integer(object, "steps_refused", (int64_t)session->steps_refused);
  json_t *attachments = json_array();
  for (size_t i = 0; i < session->attachment_count; i++) {
    kvp_ctl_json_append(attachments, attached_json(kvpool_session_list_attachment(list, index, i)));
  }
  kvp_ctl_json_set(object, "attachments", attachments);
  return object;
}

/* Of the workers that are attached to it now. */
static uint64_t ring_steps_of(const kvpool_session_list *list, size_t index) {
  uint64_t steps = 0;
  for (size_t i = 0; i < kvpool_session_list_item(list, index)->attachment_count; i++) {
    steps += kvpool_session_list_attachment(list, index, i)->steps_taken;
  }
  return steps;
}

static void session_row(struct kvp_ctl_table *table, const kvpool_session_info *session, uint64_t ring_steps) {
  kvp_ctl_table_row(table);
  kvp_ctl_table_cell(table, KVP_CTL_BOLD, "%llu", (unsigned long long)session->session_id);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", session->name);
  kvp_ctl_table_cell(table, KVP_CTL_DIM, "%s", session->namespace_name);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", session->peer_pid);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", session->peer_uid);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_duration(kvp_ctl_age_ns(session->opened_unix_ns)).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(session->blocks).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_bytes(session->buffer_bytes).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", session->queues);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(session->steps_done).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", session->steps_in_flight);
  kvp_ctl_table_cell(table, session->steps_refused > 0 ? KVP_CTL_WARN : KVP_CTL_PLAIN, "%s",
                     kvp_ctl_count(session->steps_refused).text);
  kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(ring_steps).text);
}

/* The second table, when there is anything to say. */
static void attachments_print(const struct kvp_ctl *ctl, const kvpool_session_list *list) {
  static const char *const columns[] = {">WORKER", ">SESSION", ">PID",     "?>UID", "DEVICE",
                                        "STATE",   ">AGE",     ">BUFFERS", ">STEPS"};
  size_t count = 0;
  for (size_t i = 0; i < kvpool_session_list_count(list); i++) {
    count += kvpool_session_list_item(list, i)->attachment_count;
  }
  if (count == 0) {
    return;
  }
  kvp_ctl_print("\n");
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (size_t i = 0; i < kvpool_session_list_count(list); i++) {
    const kvpool_session_info *session = kvpool_session_list_item(list, i);
    for (size_t j = 0; j < session->attachment_count; j++) {
      const kvpool_attached_info *attached = kvpool_session_list_attachment(list, i, j);
      kvp_ctl_table_row(table);
      kvp_ctl_table_cell(table, KVP_CTL_BOLD, "%llu", (unsigned long long)attached->attachment_id);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%llu", (unsigned long long)session->session_id);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", attached->peer_pid);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", attached->peer_uid);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", attached->device);
      kvp_ctl_table_cell(table, attached->state == KVPOOL_ATTACHED_SERVING ? KVP_CTL_GOOD : KVP_CTL_WARN, "%s",
                         attached_state_name(attached->state));
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s",
                         kvp_ctl_duration(kvp_ctl_age_ns(attached->attached_unix_ns)).text);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%u", attached->buffers);
      kvp_ctl_table_cell(table, KVP_CTL_PLAIN, "%s", kvp_ctl_count(attached->steps_taken).text);
    }
  }
  kvp_ctl_table_print(table);
}

static void sessions_print(const struct kvp_ctl *ctl, const kvpool_session_list *list) {
  static const char *const columns[] = {">ID",         "NAME",     "?NAMESPACE", ">PID",     "?>UID",
                                        ">AGE",        ">BLOCKS",  ">BUFFERS",   "?>QUEUES", ">GRPC STEPS",
                                        "?>IN FLIGHT", ">REFUSED", ">RING STEPS"};
  size_t count = kvpool_session_list_count(list);
  if (count == 0) {
    kvp_ctl_print("no sessions\n");
    return;
  }
  uint64_t blocks = 0;
  uint64_t buffer_bytes = 0;
  struct kvp_ctl_table *table = kvp_ctl_table_new(ctl, columns, sizeof columns / sizeof columns[0]);
  for (size_t i = 0; i < count; i++) {
    const kvpool_session_info *session = kvpool_session_list_item(list, i);
    session_row(table, session, ring_steps_of(list, i));
    blocks += session->blocks;
    buffer_bytes += session->buffer_bytes;
  }
  kvp_ctl_table_print(table);
  kvp_ctl_print("%s%zu session%s: %s blocks, %s in buffers%s\n", kvp_ctl_terminal_role(&ctl->terminal, KVP_CTL_DIM),
                count, kvp_ctl_plural(count), kvp_ctl_count(blocks).text, kvp_ctl_bytes(buffer_bytes).text,
                kvp_ctl_terminal_reset(&ctl->terminal));
  attachments_print(ctl, list);
}

static int sessions_run(struct kvp_ctl *ctl, int argc, char **argv) {
  int exit_status;
  if (!kvp_ctl_parse(ctl, &kvp_ctl_sessions, argc, argv, NULL, &exit_status)) {
    return exit_status;
  }
  exit_status = kvp_ctl_connect(ctl);
  if (exit_status != KVP_CTL_OK) {
    return exit_status;
  }
  kvpool_session_list *list;
  kvpool_error error;
  if (kvpool_session_list_get(ctl->client, &list, &error) != KVPOOL_OK) {
    return kvp_ctl_fail(ctl, &error);
  }
  if (ctl->json) {
    json_t *sessions = json_array();
    for (size_t i = 0; i < kvpool_session_list_count(list); i++) {
      kvp_ctl_json_append(sessions, session_json(list, i));
    }
    json_t *document = json_object();
    kvp_ctl_json_set(document, "sessions", sessions);
    kvp_ctl_json_print(ctl, document);
  } else {
    sessions_print(ctl, list);
  }
  kvpool_session_list_destroy(list);
  return KVP_CTL_OK;
}

const struct kvp_ctl_command kvp_ctl_sessions = {
    .name = "sessions",
    .summary = "who is connected, and the blocks, buffers and steps of each",
    .details =
        "PID and UID are those of the process at the other end of the socket. BLOCKS counts all pools; `kvpoolctl "
        "blocks POOL` shows where they lie. GRPC STEPS, IN FLIGHT and REFUSED are of steps over gRPC alone: of a "
        "ring's, kvpoold knows how many were taken out of it. RING STEPS adds them up for the workers that are "
        "attached now, whom the second table has; STEPS of one is what came through its ring since its executor was "
        "started.\n\n"
        "Examples:\n"
        "  kvpoolctl sessions\n"
        "  kvpoolctl sessions --json | jq '.sessions | max_by(.blocks)'",
    .run = sessions_run,
};
