/* Ctrl-C (and SIGTERM, SIGHUP): a command that has nothing to put back ends where it stands, with its document. Of one
 * that has to clean up what is under way ends, and it gets a moment for the rest; a second signal, or the end of that
 * moment, ends the program where it stands. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_INTERRUPT_H
#define KVPOOL_CLIENT_KVPOOLCTL_INTERRUPT_H

#include <stdbool.h>
#include <sys/types.h>

#include "client/kvpoolctl/ctl.h"

/* Before the connection: the library's threads must not take the signals. Calls after the first do nothing. */
void kvp_ctl_interrupt_watch(const struct kvp_ctl *ctl);
/* The same for a command that cleans up. Writing to a pipe that nobody reads, or past the size a file may have, is an
 * error from here on, and no signal. */
void kvp_ctl_interrupt_init(const struct kvp_ctl *ctl);
/* Whose calls a signal ends; NULL: there are none, and a signal ends the program at once, as it does without
 * kvp_ctl_interrupt_init. */
void kvp_ctl_interrupt_client(kvpool_client *client);
bool kvp_ctl_interrupted(void);
/* Sleeps until interrupted or until fd is readable. The signal that ends it gives the calls that follow a moment. */
void kvp_ctl_interrupt_wait(int fd);
/* A file to remove when the program ends where it stands; NULL: none. */
void kvp_ctl_interrupt_file(const char *path);
/* A process group to kill when the program ends where it stands; 0: none. */
void kvp_ctl_interrupt_group(pid_t of_children);

#endif
