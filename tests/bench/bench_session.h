/* What the gRPC benchmarks run in: a daemon of their own, a pool with a region for each format, a session that holds
 * all its blocks, and a buffer with random rows. */
#ifndef KVPOOL_BENCH_SESSION_H
#define KVPOOL_BENCH_SESSION_H

#include <stdint.h>

#include "kvpool.pb-c.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/rpc_client.h"

enum {
  bench_block_tokens = 64,
  bench_rows = 32768, /* the most that is stored at once */
  bench_blocks = bench_rows / bench_block_tokens,
  bench_chunk_bytes = 1 << 20,
  bench_elements_max = 512,
};

struct bench_session {
  struct bench_daemon daemon;
  struct bench_client *client;
  struct bench_call *stream; /* the session's liveness */
  Kvpool__V1__ServerInfo *info;
  Kvpool__V1__Pool *pool; /* region i has format i of info */
  Kvpool__V1__SessionEvent *opened;
  Kvpool__V1__AllocateBlocksResponse *granted;
  uint64_t buffer_id;        /* three areas: source rows, loaded rows, loaded scales (16 bytes apart) */
  int32_t slots[bench_rows]; /* blocks in random order, consecutive tokens */
  int32_t segments[bench_blocks][4];
  uint8_t *rows; /* bench_rows x bench_elements_max BF16, also in the buffer's first area */
};

/* Both end the program when something goes wrong. */
void bench_session_open(struct bench_session *session, const char *kvpoold_path, const char *executor_path,
                        const char *device);
void bench_session_close(struct bench_session *session);

Kvpool__V1__SessionRef *bench_session_ref(const struct bench_session *session);
uint64_t bench_row_area_bytes(void); /* of one of the buffer's first two areas */

/* pointer, or the end of the program when it is NULL. */
void *bench_must(void *pointer, const char *what);

#endif
