/* A file that a command writes. A regular one, or a new one, appears under its name when it is whole and not before,
 * with the mode it had, behind a symbolic link where there is one; anything else - a pipe, a device - is written to
 * directly. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_OUTPUT_H
#define KVPOOL_CLIENT_KVPOOLCTL_OUTPUT_H

#include <stdbool.h>
#include <stdio.h>

#include "client/kvpoolctl/ctl.h"

struct kvp_ctl_output {
  FILE *stream;
  const char *path; /* as it was given */
  char *target;     /* what comes to be; NULL: written directly */
  char *part;       /* its name until then; NULL: it has none yet */
  bool is_stdout;   /* what the command says must not go there too */
};

/* path "-": standard output. KVP_CTL_OK, or the exit status with the error told. */
int kvp_ctl_output_create(const struct kvp_ctl *ctl, const char *path, struct kvp_ctl_output *out);
/* Everything has been written. */
int kvp_ctl_output_finish(const struct kvp_ctl *ctl, struct kvp_ctl_output *output);
/* Also without _finish: then nothing is left of a file that was to be made or replaced. */
void kvp_ctl_output_close(struct kvp_ctl_output *output);
/* Tells that it could not be written, by errno. */
int kvp_ctl_output_failed(const struct kvp_ctl *ctl, const char *path);

#endif
