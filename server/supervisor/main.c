/* kvpoold: the supervisor's program. */
#include <signal.h>
#include <stdlib.h>

#include "server/log.h"
#include "server/supervisor/allocate.h"
#include "server/supervisor/config.h"
#include "server/supervisor/daemon.h"

enum { exit_configuration = 2 };

/* Before any thread is there, so that none but the loop's ever takes one of these. */
static void prepare_signals(void) {
  sigset_t set;
  (void)sigemptyset(&set);
  (void)sigaddset(&set, SIGTERM);
  (void)sigaddset(&set, SIGINT);
  (void)sigaddset(&set, SIGHUP);
  (void)pthread_sigmask(SIG_BLOCK, &set, NULL);
  (void)signal(SIGPIPE, SIG_IGN);
}

int main(int argc, char **argv) {
  int exit_status = EXIT_SUCCESS;
  struct kvp_config *config = kvp_allocate(1, sizeof *config);
  switch (kvp_config_read(argc, argv, config)) {
  case KVP_CONFIG_RUN:
    kvp_log_set_level(config->log_level);
    prepare_signals();
    exit_status = kvp_daemon_run(config);
    break;
  case KVP_CONFIG_DONE:
    break;
  case KVP_CONFIG_ERROR:
    exit_status = exit_configuration;
    break;
  }
  free(config);
  return exit_status;
}
