/* Which device a daemon could serve here, for whoever starts one without knowing the host. */
#include <stdio.h>
#include <string.h>

#include "client/kvpoolctl/doctor.h"

static bool is_worse(const struct kvp_ctl_finding *finding, const struct kvp_ctl_finding *than) {
  return finding->result != KVP_CTL_FINDING_OK && (than == NULL || finding->result > than->result);
}

/* What is in the GPUs' way: the first problem, else the first warning. MPS is in nobody's. */
static const struct kvp_ctl_finding *obstacle(const struct kvp_ctl_doctor *doctor) {
  const struct kvp_ctl_finding *worst = NULL;
  for (uint32_t i = 0; i < doctor->count; i++) {
    const struct kvp_ctl_finding *finding = &doctor->findings[i];
    bool is_about = strcmp(finding->name, "MPS") != 0 && strcmp(finding->name, "configuration") != 0;
    worst = is_about && is_worse(finding, worst) ? finding : worst;
  }
  return worst;
}

/* The first of that name with a problem, or with less. NULL: there is none. */
static const struct kvp_ctl_finding *finding_of(const struct kvp_ctl_doctor *doctor, const char *name,
                                                enum kvp_ctl_finding_result least) {
  for (uint32_t i = 0; i < doctor->count; i++) {
    if (doctor->findings[i].result >= least && strcmp(doctor->findings[i].name, name) == 0) {
      return &doctor->findings[i];
    }
  }
  return NULL;
}

/* A problem of these is every GPU's; one of a single GPU leaves the others. */
static const struct kvp_ctl_finding *problem_of_all(const struct kvp_ctl_doctor *doctor) {
  static const char *const names[] = {"driver", "device nodes", "libcuda"};
  const struct kvp_ctl_finding *found = NULL;
  for (size_t i = 0; i < sizeof names / sizeof names[0] && found == NULL; i++) {
    found = finding_of(doctor, names[i], KVP_CTL_FINDING_PROBLEM);
  }
  return found;
}

void kvp_ctl_doctor_device(struct kvp_ctl_doctor *doctor) {
  const struct kvp_ctl_finding *why = problem_of_all(doctor);
  bool has_choice = doctor->device[0] != '\0' && why == NULL;
  if (has_choice && doctor->has_backend) {
    return; /* a GPU, whose name is the reason */
  }
  why = why != NULL  ? why
        : has_choice ? finding_of(doctor, "kvpool-exec", KVP_CTL_FINDING_WARNING)
                     : obstacle(doctor);
  (void)snprintf(doctor->device, sizeof doctor->device, "host:0");
  if (why != NULL) {
    (void)snprintf(doctor->device_reason, sizeof doctor->device_reason, "%s: %.600s", why->name, why->text);
  } else {
    (void)snprintf(doctor->device_reason, sizeof doctor->device_reason, "%s",
                   has_choice        ? "there is no kvpool-exec beside this program"
                   : doctor->has_gpu ? "no GPU here is one for kvpoold"
                                     : "no GPU on this machine");
  }
}
