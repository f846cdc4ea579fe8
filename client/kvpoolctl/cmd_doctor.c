/* doctor: what of this host is in kvpoold's way, and what to do about it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/command.h"
#include "client/kvpoolctl/doctor.h"
#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"
#include "client/kvpoolctl/json.h"
#include "client/kvpoolctl/text.h"

enum { option_root = 0x100, option_config, option_executor };
enum { width_unlimited = 100, name_width = 14, indent = 2 + 8 + 1 + name_width + 1 };

struct doctor_arguments {
  const char *root;
  const char *config;
  const char *executor;
};

static const struct argp_option options[] = {
    {"root", option_root, "DIR", 0, "Look for device nodes and for /proc, /sys and /dev/shm below DIR", 0},
    {"config", option_config, "FILE", 0,
     "The daemon's configuration; default: " KVPOOL_SYSCONFDIR "/kvpoold/kvpoold.conf where it is there", 0},
    {"executor", option_executor, "PATH", 0, "The executor, as kvpoold's --executor names it", 0},
    {0},
};

/* NOLINTNEXTLINE(readability-non-const-parameter): the type is that of every command. */
static error_t take(int key, char *value, void *arguments, const struct argp_state *state) {
  struct doctor_arguments *doctor = arguments;
  (void)state;
  switch (key) {
  case option_root:
    doctor->root = value;
    return 0;
  case option_config:
    doctor->config = value;
    return 0;
  case option_executor:
    doctor->executor = value;
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
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
  kvp_ctl_json_string(document, "device", doctor->device);
  kvp_ctl_json_string(document, "device_reason", doctor->device_reason);
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
  doctor->area = "programs";
  kvp_ctl_doctor_programs(doctor);
  kvp_ctl_doctor_device(doctor);
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
  struct stat status;
  if (arguments.root[0] != '\0' && (stat(arguments.root, &status) != 0 || !S_ISDIR(status.st_mode))) {
    return kvp_ctl_usage(&kvp_ctl_doctor_command, "--root %s: it is no directory", arguments.root);
  }
  kvp_ctl_interrupt_watch(ctl);
  struct kvp_ctl_doctor *doctor = kvp_ctl_allocate(1, sizeof *doctor);
  doctor->ctl = ctl;
  doctor->root = arguments.root;
  doctor->config = arguments.config;
  doctor->executor = arguments.executor;
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
        "GPU driver, device nodes, MPS, the daemon's configuration and executor, limits, shared memory, the socket, "
        "the daemon where one answers, and what a worker would find that runs where this does; none is needed. Run "
        "it as the daemon's user and with its environment: "
        "permissions, limits and CUDA_VISIBLE_DEVICES are a user's. Nothing holds it: what doesn't answer within "
        "twice --timeout is told as that. A host without a GPU is no problem, the host backend serves. The document "
        "of --json also says which `device` kvpoold could serve here, and the reason. Exit status: 0 no problem, 1 a "
        "problem; warnings are none.\n\n"
        "Examples:\n"
        "  kvpoolctl doctor\n"
        "  sudo -u kvpoold kvpoolctl doctor\n"
        "  kvpoolctl doctor --config /etc/kvpoold/kvpoold.conf\n"
        "  kvpoolctl doctor --json | jq '.checks[] | select(.result == \"problem\")'",
    .options = options,
    .take = take,
    .run = doctor_run,
};
