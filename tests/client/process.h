/* Programs that a test talks to: a kvpoold of its own, or the server that misbehaves. One at a time, in a directory
 * of its own; a failed step ends the test program. */
#ifndef KVPOOL_TESTS_CLIENT_PROCESS_H
#define KVPOOL_TESTS_CLIENT_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct process {
  pid_t pid; /* 0: none */
  char directory[64];
  char socket[96];
};

/* Makes the directory. */
void process_init(struct process *process);
/* Removes it; the program must have ended. */
void process_deinit(struct process *process);

/* kvpoold with a device host:0 and the pool "main": 100 blocks of 64 tokens; regions kv (v41, ratio 4, 2 layers),
 * index (index_mxfp8, ratio 4, 2 layers), plain (bf16 of 64 elements, 1 layer). It may still be starting. */
void process_start_daemon(struct process *process);
/* tests/client/fake_server.py in one of its modes; returns when it listens. */
void process_start_fake(struct process *process, const char *mode);
void process_signal(const struct process *process, int signal);
/* SIGKILL, and waits for the end. */
void process_kill(struct process *process);
/* SIGTERM, and waits for the end, which must be a clean one. */
void process_stop(struct process *process);

/* True as soon as condition(context) is, false when it is not within a minute: a bound against hanging. */
bool eventually(bool (*condition)(void *context), void *context);
/* Kills what is still running; for the end of a test program. */
void process_cleanup(void);

#endif
