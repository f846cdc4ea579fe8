/* Ctrl-C (and SIGTERM, SIGHUP) for the commands that have to clean up: what is under way ends, and the command gets a
 * moment to put things back. A second signal, or the end of that moment, ends the program where it stands. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_INTERRUPT_H
#define KVPOOL_CLIENT_KVPOOLCTL_INTERRUPT_H

#include <stdbool.h>

#include "client/kvpoolctl/ctl.h"

/* Before the connection: the library's threads must not take the signals. Writing to a pipe that nobody reads, or
 * past the size a file may have, is an error from here on, and no signal. */
void kvp_ctl_interrupt_init(const struct kvp_ctl *ctl);
/* Whose calls a signal ends; NULL: there are none, and a signal ends the program at once. Any command may call it. */
void kvp_ctl_interrupt_client(kvpool_client *client);
bool kvp_ctl_interrupted(void);
/* Sleeps until interrupted or until fd is readable. The signal that ends it ends no call. */
void kvp_ctl_interrupt_wait(int fd);
/* A file to remove when the program ends where it stands; NULL: none. */
void kvp_ctl_interrupt_file(const char *path);

#endif
