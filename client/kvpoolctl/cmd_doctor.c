/* doctor: what of this host is in kvpoold's way, and what to do about it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/doctor.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/text.h"

enum { option_root = 0x100, width_unlimited = 100, name_width = 14, indent = 2 + 8 + 1 + name_width + 1 };

struct doctor_arguments {
  const char *root;
};

static const struct argp_option options[] = {
    {"root", option_root, "DIR", 0, "Look for device nodes and for /proc, /sys and /dev/shm below DIR", 0},
    {0},
};

/* NOLINTNEXTLINE(readability-non-const-parameter): the type is that of every command. */
static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct doctor_arguments *doctor = arguments;
  (void)state;
  if (key != option_root) {
    return ARGP_ERR_UNKNOWN;
  }
  doctor->root = value;
  return 0;
}

static const char *result_name(enum kvp_ctl_finding_result result) {
  static const char *const names[] = {"ok", "warning", "problem"};
  return names[result];
}

static enum kvp_ctl_role result_role(enum kvp_ctl_finding_result result) {
  static const enum kvp_ctl_role roles[] = {KVP_CTL_GOOD, KVP_CTL_WARN, KVP_CTL_BAD};
  return roles[result];
}

static uint32_t findings_count(const struct kvp_ctl_doctor *doctor, enum kvp_ctl_finding_result result) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < doctor->count; i++) {
    count += doctor->findings[i].result == result ? 1 : 0;
  }
  return count;
}

static void findings_json(const struct kvp_ctl_doctor *doctor) {
  json_t *document = json_object();
  json_t *checks = json_array();
  for (uint32_t i = 0; i < doctor->count; i++) {
    const struct kvp_ctl_finding *finding = &doctor->findings[i];
    json_t *check = json_object();
    kvp_ctl_json_string(check, "area", finding->area);
    kvp_ctl_json_string(check, "name", finding->name);
    kvp_ctl_json_string(check, "result", result_name(finding->result));
    kvp_ctl_json_string(check, "text", finding->text);
    kvp_ctl_json_string(check, "advice", finding->advice);
    kvp_ctl_json_append(checks, check);
  }
  kvp_ctl_json_set(document, "checks", checks);
  kvp_ctl_json_integer(document, "problems", findings_count(doctor, KVP_CTL_FINDING_PROBLEM));
  kvp_ctl_json_integer(document, "warnings", findings_count(doctor, KVP_CTL_FINDING_WARNING));
  kvp_ctl_json_print(doctor->ctl, document);
}

/* Words of a text in lines, the first of which has begun already. */
static void words_print(const char *text, size_t width) {
  size_t column = indent;
  while (*text != '\0') {
    size_t length = strcspn(text, " ");
    if (column > indent && column + 1 + length > width) {
      kvp_ctl_print("\n%*s", indent, "");
      column = indent;
    }
    kvp_ctl_print("%s%.*s", column > indent ? " " : "", (int)length, text);
    column += length + (column > indent ? 1 : 0);
    text += length + strspn(text + length, " ");
  }
  kvp_ctl_print("\n");
}

static void findings_print(const struct kvp_ctl_doctor *doctor) {
  const struct kvp_ctl_terminal *terminal = &doctor->ctl->terminal;
  size_t width = terminal->is_limited ? terminal->width : width_unlimited;
  const char *area = NULL;
  for (uint32_t i = 0; i < doctor->count; i++) {
    const struct kvp_ctl_finding *finding = &doctor->findings[i];
    if (finding->area != area) {
      kvp_ctl_print("%s%s%s%s\n", area == NULL ? "" : "\n", kvp_ctl_terminal_role(terminal, KVP_CTL_BOLD),
                    finding->area, kvp_ctl_terminal_reset(terminal));
      area = finding->area;
    }
    kvp_ctl_print("  %s%-8s%s %-*s ", kvp_ctl_terminal_role(terminal, result_role(finding->result)),
                  result_name(finding->result), kvp_ctl_terminal_reset(terminal), name_width, finding->name);
    words_print(finding->text, width);
    if (finding->advice[0] != '\0') {
      kvp_ctl_print("%*s", indent, "-> ");
      words_print(finding->advice, width);
    }
  }
  uint32_t problems = findings_count(doctor, KVP_CTL_FINDING_PROBLEM);
  uint32_t warnings = findings_count(doctor, KVP_CTL_FINDING_WARNING);
  kvp_ctl_print("\n%s%u problem%s%s, %u warning%s\n",
                kvp_ctl_terminal_role(terminal, problems > 0 ? KVP_CTL_BAD : KVP_CTL_GOOD), problems,
                kvp_ctl_plural(problems), kvp_ctl_terminal_reset(terminal), warnings, kvp_ctl_plural(warnings));
}

static void examine(struct kvp_ctl_doctor *doctor) {
  struct stat status;
  doctor->daemon_uid =
      stat(kvp_ctl_socket_path(doctor->ctl), &status) == 0 ? (uint32_t)status.st_uid : (uint32_t)geteuid();
  doctor->area = "GPU";
  kvp_ctl_doctor_driver(doctor);
  kvp_ctl_doctor_mps(doctor);
  kvp_ctl_doctor_cuda(doctor);
  kvp_ctl_doctor_gpus(doctor);
  doctor->area = "host";
  kvp_ctl_doctor_host(doctor);
  doctor->area = "daemon";
  kvp_ctl_doctor_daemon(doctor);
}

static int doctor_run(struct kvp_ctl *ctl, int argc, char **argv) {
  struct doctor_arguments arguments = {.root = ""};
  int exit_status;
  if (!kvp_ctl_parse(ctl, &kvp_ctl_doctor_command, argc, argv, &arguments, &exit_status)) {
    return exit_status;
  }
  struct kvp_ctl_doctor *doctor = kvp_ctl_allocate(1, sizeof *doctor);
  doctor->ctl = ctl;
  doctor->root = arguments.root;
  examine(doctor);
  if (ctl->json) {
    findings_json(doctor);
  } else {
    findings_print(doctor);
  }
  exit_status = findings_count(doctor, KVP_CTL_FINDING_PROBLEM) > 0 ? KVP_CTL_FAILED : KVP_CTL_OK;
  free(doctor);
  return exit_status;
}

const struct kvp_ctl_command kvp_ctl_doctor_command = {
    .name = "doctor",
    .summary = "checks this host and its daemon, and says what to do",
    .details =
        "GPU driver, device nodes, MPS, limits, shared memory, the socket, and the daemon where one answers; none "
        "is needed. Run it as the daemon's user: permissions and limits are a user's. A host without a GPU is no "
        "problem, the host backend serves. Exit status: 0 no problem, 1 a problem; warnings are none.\n\n"
        "Examples:\n"
        "  kvpoolctl doctor\n"
        "  sudo -u kvpoold kvpoolctl doctor\n"
        "  kvpoolctl doctor --json | jq '.checks[] | select(.result == \"problem\")'",
    .options = options,
    .take = take,
    .run = doctor_run,
};
