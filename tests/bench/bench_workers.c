/* Many workers beside a kvpoold of the benchmark's own: steps a second through rings, and what one that floods its ring
 * costs the others. Every worker is a process with a session, blocks and a buffer of its own.
 *
 *   bench_workers KVPOOLD EXECUTOR [DEVICE]     DEVICE: host:0 unless given
 *
 * A step is a store of 64 rows of v41. Three phases for each number of workers: one step at a time; up to 32 in flight;
 * and one at a time beside a worker more, which keeps its ring full of steps of 1,024 rows. The floor is what two
 * processes on the same machine need to tell each other one thing and hear the answer, by pipes.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kvpool/kvpool.h"
#include "kvpool/worker.h"
#include "tests/bench/daemon_process.h"

enum {
  workers_max = 17, /* 16, and the one that floods */
  block_tokens = 64,
  blocks_each = 32,
  row_bytes = 1024,
  step_rows = 64,
  flood_rows = 1024,
  depth = 32,
  phase_ms = 1000,
  settle_ms = 100, /* at the begin of a phase, not counted */
  samples_max = 1 << 18,
  serving_ms = 60000,
  floor_rounds = 20000,
};

enum phase { PHASE_SINGLE, PHASE_DEEP, PHASE_FLOODED, phases };

/* What workers leave to the parent; shared memory. */
struct result {
  uint64_t steps;
  double seconds;
  double p50_us, p99_us; /* of a step, post to completion */
};

struct shared {
  pthread_barrier_t begin, end;
  struct result results[phases][workers_max];
};

struct worker {
  kvpool_client *client;
  kvpool_pool *pool;
  kvpool_session *session;
  kvpool_attachment *attachment;
  kvpool_pool_map *map;
  kvpool_buffer *rows;
  kvpool_step *step, *flood;
};

static struct bench_daemon server;
static const char *device = "host:0";
static kvpool_error error;

#define CHECK(call)                                                                                                  \
  do {                                                                                                               \
    if ((call) != KVPOOL_OK) {                                                                                       \
      fail(#call);                                                                                                   \
    }                                                                                                                \
  } while (0)

static _Noreturn void fail(const char *what) {
  (void)fprintf(stderr, "bench_workers: %s: %s: %s\n", what, kvpool_status_name(error.status), error.text);
  exit(1);
}

static double now_us(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Sorts. */
static double percentile(double *values, size_t count, double part) {
  if (count == 0) {
    return 0;
  }
  qsort(values, count, sizeof *values, by_value);
  return values[(size_t)(part * (double)(count - 1))];
}

/* ---- a worker ---- */

static kvpool_step *step_make(const struct worker *worker, const int32_t *blocks, uint32_t rows) {
  int32_t slots[flood_rows];
  const kvpool_layer layer = {.pool = kvpool_pool_map_pool(worker->map)};
  const kvpool_view source = {.buffer = worker->rows, .rows = rows, .row_bytes = row_bytes};
  kvpool_step *step;
  uint32_t array;
  for (uint32_t i = 0; i < rows; i++) {
    slots[i] = blocks[i / block_tokens] * block_tokens + (int32_t)(i % block_tokens);
  }
  CHECK(kvpool_attachment_step_new(worker->attachment, &step, &error));
  CHECK(kvpool_step_add_array(step, slots, rows, &array, &error));
  CHECK(kvpool_step_add_store(step, &layer, &source, array, NULL, &error));
  return step;
}

static void client_connect(kvpool_client **client) {
  const kvpool_connect_options options = {
      .size_bytes = sizeof options, .timeout_ms = serving_ms, .wait_until_serving = true};
  CHECK(kvpool_client_connect(server.socket_path, &options, client, &error));
}

static void worker_begin(struct worker *worker) {
  int32_t blocks[blocks_each];
  kvpool_attach_options attach = {.size_bytes = sizeof attach, .socket = server.attach_path};
  client_connect(&worker->client);
  CHECK(kvpool_pool_open(worker->client, "workers", &worker->pool, &error));
  CHECK(kvpool_session_open(worker->client, NULL, &worker->session, &error));
  CHECK(kvpool_blocks_allocate(worker->session, worker->pool, blocks_each, blocks, &error));
  attach.session_id = kvpool_session_id(worker->session);
  kvpool_session_secret(worker->session, attach.secret);
  CHECK(kvpool_attach(&attach, &worker->attachment, &error));
  kvpool_attachment_saw_epoch(worker->attachment, kvpool_session_epoch(worker->session));
  CHECK(kvpool_attachment_map_pool(worker->attachment, "workers", KVPOOL_MAP_READ, &worker->map, &error));
  CHECK(kvpool_attachment_create_buffer(worker->attachment, (uint64_t)flood_rows * row_bytes, &worker->rows, &error));
  worker->step = step_make(worker, blocks, step_rows);
  worker->flood = step_make(worker, blocks, flood_rows);
}

static void worker_end(struct worker *worker) {
  kvpool_step_destroy(worker->step);
  kvpool_step_destroy(worker->flood);
  CHECK(kvpool_buffer_release(worker->rows, &error));
  kvpool_pool_map_destroy(worker->map);
  kvpool_detach(worker->attachment);
  kvpool_session_close(worker->session);
  kvpool_pool_destroy(worker->pool);
  kvpool_client_destroy(worker->client);
}

/* ---- phases ---- */

static void completion_check(const kvpool_completion *completion) {
  if (completion->error != NULL) {
    error = *completion->error;
    fail("a step");
  }
}

/* in_flight_max steps in flight for the time of a phase, as many as the ring takes where it is 0; then none. */
static struct result steps_run(const struct worker *worker, const kvpool_step *step, uint64_t in_flight_max) {
  static double samples[samples_max];
  static double posted_us[1 << 16];
  const uint64_t mask = sizeof posted_us / sizeof posted_us[0] - 1;
  struct result result = {0};
  uint64_t in_flight = 0;
  size_t count = 0;
  const double counted_us = now_us() + 1e3 * settle_ms, end_us = counted_us + 1e3 * phase_ms;
  for (;;) {
    const bool is_over = now_us() >= end_us;
    while (!is_over && (in_flight_max == 0 || in_flight < in_flight_max)) {
      uint64_t step_id;
      const double begin_us = now_us();
      const kvpool_status status = kvpool_attachment_post(worker->attachment, step, NULL, &step_id, &error);
      if (status == KVPOOL_BUSY && in_flight > 0) {
        break;
      }
      CHECK(status);
      posted_us[step_id & mask] = begin_us;
      in_flight++;
    }
    if (in_flight == 0) {
      break;
    }
    const kvpool_completion *completion = NULL;
    CHECK(kvpool_attachment_wait(worker->attachment, serving_ms, &completion, &error));
    completion_check(completion);
    in_flight--;
    const double done_us = now_us();
    if (done_us >= counted_us && done_us < end_us) {
      result.steps++;
      if (count < samples_max) {
        samples[count++] = done_us - posted_us[completion->step_id & mask];
      }
    }
  }
  result.seconds = 1e-3 * phase_ms;
  result.p50_us = percentile(samples, count, 0.5);
  result.p99_us = percentile(samples, count, 0.99);
  return result;
}

static _Noreturn void worker_main(struct shared *shared, uint32_t index, uint32_t count) {
  static const uint64_t in_flight[phases] = {[PHASE_SINGLE] = 1, [PHASE_DEEP] = depth, [PHASE_FLOODED] = 1};
  struct worker worker = {0};
  const bool floods = index == count;
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  worker_begin(&worker);
  for (int phase = 0; phase < phases; phase++) {
    (void)pthread_barrier_wait(&shared->begin);
    if (!floods) {
      shared->results[phase][index] = steps_run(&worker, worker.step, in_flight[phase]);
    } else if (phase == PHASE_FLOODED) {
      shared->results[phase][index] = steps_run(&worker, worker.flood, 0);
    }
    (void)pthread_barrier_wait(&shared->end);
  }
  worker_end(&worker);
  exit(0);
}

/* ---- all of them ---- */

static void barrier_init(pthread_barrier_t *barrier, uint32_t count) {
  pthread_barrierattr_t attributes;
  (void)pthread_barrierattr_init(&attributes);
  (void)pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  (void)pthread_barrier_init(barrier, &attributes, count);
  (void)pthread_barrierattr_destroy(&attributes);
}

static void phase_print(const struct shared *shared, enum phase phase, uint32_t count) {
  static const char *const names[phases] = {"one at a time", "32 in flight", "one at a time, flooded"};
  double p50[workers_max], p99[workers_max];
  uint64_t steps = 0, least = UINT64_MAX, most = 0;
  for (uint32_t i = 0; i < count; i++) {
    const struct result *result = &shared->results[phase][i];
    steps += result->steps;
    least = result->steps < least ? result->steps : least;
    most = result->steps > most ? result->steps : most;
    p50[i] = result->p50_us;
    p99[i] = result->p99_us;
  }
  printf("%7u  %-24s %9.0f  %9.0f..%-9.0f %8.1f %8.1f  %8.1f %8.1f\n", count, names[phase],
         (double)steps / (1e-3 * phase_ms), (double)least / (1e-3 * phase_ms), (double)most / (1e-3 * phase_ms),
         percentile(p50, count, 0.5), percentile(p50, count, 1), percentile(p99, count, 0.5),
         percentile(p99, count, 1));
  if (phase == PHASE_FLOODED) {
    printf("         (the one that floods: %.0f steps of %d rows a second)\n",
           (double)shared->results[phase][count].steps / (1e-3 * phase_ms), flood_rows);
  }
}

static void workers_run(struct shared *shared, uint32_t count) {
  pid_t pids[workers_max];
  barrier_init(&shared->begin, count + 1);
  barrier_init(&shared->end, count + 1);
  (void)fflush(stdout);
  for (uint32_t i = 0; i <= count; i++) {
    pids[i] = fork();
    if (pids[i] == 0) {
      worker_main(shared, i, count);
    }
  }
  for (uint32_t i = 0; i <= count; i++) { /* whichever fails first ends all: the others would wait for it */
    int status = 0;
    if (pids[i] < 0 || wait(&status) < 0 || status != 0) {
      (void)fprintf(stderr, "bench_workers: a worker ended with status 0x%x\n", (unsigned)status);
      exit(1);
    }
  }
  for (int phase = 0; phase < phases; phase++) {
    phase_print(shared, phase, count);
  }
}

/* Two processes that wake each other by pipes. */
static void floor_print(void) {
  static double samples[floor_rounds];
  int there[2], back[2];
  char byte = 0;
  if (pipe(there) != 0 || pipe(back) != 0) {
    fail("pipe");
  }
  const pid_t pid = fork();
  if (pid == 0) {
    (void)close(there[1]);
    while (read(there[0], &byte, 1) == 1 && write(back[1], &byte, 1) == 1) {
    }
    _exit(0);
  }
  for (int i = 0; i < floor_rounds; i++) {
    const double begin_us = now_us();
    if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1) {
      fail("pipe");
    }
    samples[i] = now_us() - begin_us;
  }
  printf("floor: another process told and heard by pipes: p50 %.1f us, p99 %.1f us\n",
         percentile(samples, floor_rounds, 0.5), percentile(samples, floor_rounds, 0.99));
  (void)close(there[1]);
  (void)close(there[0]);
  (void)close(back[0]);
  (void)close(back[1]);
  (void)waitpid(pid, NULL, 0);
}

/* The parent has no client, whose threads forks would not have. */
static void pool_make(void) {
  const kvpool_region_spec region = {.name = "main", .format = "v41", .num_layers = 1};
  const kvpool_pool_spec spec = {.name = "workers",
                                 .block_size = block_tokens,
                                 .num_blocks = workers_max * blocks_each,
                                 .placements = &device,
                                 .placement_count = 1,
                                 .regions = &region,
                                 .region_count = 1};
  kvpool_client *client;
  kvpool_pool *pool;
  client_connect(&client);
  const double begin_us = now_us();
  while (kvpool_pool_create(client, &spec, &pool, &error) != KVPOOL_OK) { /* its executor may be starting */
    if (now_us() - begin_us > 1e3 * serving_ms) {
      fail("kvpool_pool_create");
    }
    (void)nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
  }
  kvpool_pool_destroy(pool);
  kvpool_client_destroy(client);
  exit(0);
}

int main(int argc, char **argv) {
  static const uint32_t counts[] = {1, 4, 16};
  if (argc < 3) {
    (void)fprintf(stderr, "usage: bench_workers KVPOOLD EXECUTOR [DEVICE]\n");
    return 2;
  }
  device = argc > 3 ? argv[3] : device;
  struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    fail("mmap");
  }
  floor_print();
  (void)fflush(stdout);
  bench_daemon_start_on(&server, argv[1], argv[2], device);
  int status = 1;
  const pid_t maker = fork();
  if (maker == 0) {
    pool_make();
  }
  if (maker < 0 || waitpid(maker, &status, 0) != maker || status != 0) {
    bench_daemon_check(&server);
    fail("the pool");
  }
  printf("%s, a store of %d rows a step; latencies in us, of the workers' median and of the worst of them\n", device,
         step_rows);
  printf("workers  %-24s %9s  %20s %8s %8s  %8s %8s\n", "", "steps/s", "least..most a worker", "p50", "worst", "p99",
         "worst");
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    workers_run(shared, counts[i]);
  }
  bench_daemon_stop(&server);
  return 0;
}
