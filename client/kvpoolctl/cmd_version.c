/* version: of this program, and of the daemon where one answers. */
#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/json.h"

static int version_run(struct kvp_ctl *ctl, int argc, char **argv) {
  int exit_status;
  if (!kvp_ctl_parse(ctl, &kvp_ctl_version, argc, argv, NULL, &exit_status)) {
    return exit_status;
  }
  const kvpool_connect_options options = {.size_bytes = sizeof options, .timeout_ms = ctl->timeout_ms};
  kvpool_server_info *info = NULL;
  kvpool_error error;
  kvpool_status status = kvpool_client_connect(ctl->socket, &options, &ctl->client, &error);
  if (status != KVPOOL_OK) {
    ctl->client = NULL;
  } else {
    status = kvpool_server_info_get(ctl->client, &info, &error);
  }
  if (ctl->json) {
    json_t *document = json_object();
    kvp_ctl_json_string(document, "kvpoolctl", kvpool_version());
    if (status == KVPOOL_OK) {
      kvp_ctl_json_string(document, "kvpoold", kvpool_server_info_version(info));
      kvp_ctl_json_integer(document, "protocol_version", kvpool_server_info_protocol_version(info));
    }
    kvp_ctl_json_print(ctl, document);
  } else if (status == KVPOOL_OK) {
    kvp_ctl_print("kvpoolctl %s\nkvpoold   %s, protocol version %u\n", kvpool_version(),
                  kvpool_server_info_version(info), kvpool_server_info_protocol_version(info));
  } else {
    kvp_ctl_print("kvpoolctl %s\nkvpoold   does not answer: %s\n", kvpool_version(), error.text);
  }
  kvpool_server_info_destroy(info);
  return KVP_CTL_OK;
}

const struct kvp_ctl_command kvp_ctl_version = {
    .name = "version",
    .summary = "the versions of this program and of the daemon",
    .details = "That no daemon answers is not an error here.",
    .run = version_run,
};
