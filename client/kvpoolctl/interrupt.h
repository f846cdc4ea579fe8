/* Ctrl-C (and SIGTERM, SIGHUP) as something to look at, for the commands that have to clean up. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_INTERRUPT_H
#define KVPOOL_CLIENT_KVPOOLCTL_INTERRUPT_H

#include <stdbool.h>

/* Before the connection: the library's threads must not take the signals. */
void kvp_ctl_interrupt_init(void);
bool kvp_ctl_interrupted(void);
/* Sleeps until interrupted or until fd is readable. */
void kvp_ctl_interrupt_wait(int fd);

#endif
