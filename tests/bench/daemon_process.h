/* A kvpoold of the benchmark's own: started in a temporary directory, stopped with it. */
#ifndef KVPOOL_BENCH_DAEMON_PROCESS_H
#define KVPOOL_BENCH_DAEMON_PROCESS_H

#include <sys/types.h>

struct bench_daemon {
  pid_t pid;
  char directory[64];
  char socket_path[96];
  char attach_path[96];
  char log_path[96];
};

/* Returns when the process runs; whether it serves, a call must find out. Ends the program when it can't be started.
 */
void bench_daemon_start(struct bench_daemon *daemon, const char *kvpoold_path, const char *executor_path);
/* The same with another device than host:0. */
void bench_daemon_start_on(struct bench_daemon *daemon, const char *kvpoold_path, const char *executor_path,
                           const char *device);
/* Ends the program, showing the daemon's log, when it has exited. */
void bench_daemon_check(const struct bench_daemon *daemon);
/* SIGTERM, waits, removes the directory. */
void bench_daemon_stop(struct bench_daemon *daemon);

#endif
