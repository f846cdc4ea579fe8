/* What a call and a step cost over gRPC, and how fast rows move, against floors of the same run.
 *
 *   bench_rpc KVPOOLD KVPOOL_EXEC [DEVICE]
 *
 * Starts a daemon of its own, on host:0 or on that device. Single-threaded: one request is under way at a time. How fast
 * the ops are is shown for host memory alone: bench_kernels measures a GPU's.
 */
#include <assert.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/bench_session.h"

enum {
  step_slots = 8192,
  call_count = 20000,
  step_count = 2000,
  throughput_count = 15,
  samples_max = 20000,
  threads_max = 64,
};

struct samples {
  uint32_t count;
  double values[samples_max];
};

static double now_us(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int compare_doubles(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void add_sample(struct samples *samples, double value) {
  assert(samples->count < samples_max);
  samples->values[samples->count++] = value;
}

static double percentile(struct samples *samples, double part) {
  qsort(samples->values, samples->count, sizeof samples->values[0], compare_doubles);
  return samples->values[(uint32_t)(part * (double)(samples->count - 1))];
}

static double median(struct samples *samples) {
  return percentile(samples, 0.5);
}

/* ---- steps -------------------------------------------------------------------------------------------------------
 */

/* A request with everything it points to; `ops` of them are used. */
struct step {
  Kvpool__V1__StepRequest request;
  Kvpool__V1__RegionRef region;
  Kvpool__V1__View source, out, out_scales;
  Kvpool__V1__Array slots, segments;
  Kvpool__V1__StoreOp store;
  Kvpool__V1__LoadOp load;
  Kvpool__V1__Op ops[2];
  Kvpool__V1__Array *array_list[2];
  Kvpool__V1__Op *op_list[2];
};

static void set_view(const struct bench_session *session, Kvpool__V1__View *view, uint64_t offset, uint32_t row_bytes,
                     uint64_t rows) {
  kvpool__v1__view__init(view);
  view->buffer_id = session->buffer_id;
  view->offset_bytes = offset;
  view->rows = rows;
  view->row_bytes = row_bytes;
  view->row_stride_bytes = ((uint64_t)row_bytes + 15) / 16 * 16;
}

/* A store of `rows` rows into a region, and, where ops is 2, a load of them. */
static void build_step(struct bench_session *session, struct step *step, uint32_t region, uint32_t rows, size_t ops) {
  const Kvpool__V1__Format *format = session->info->formats[region];
  kvpool__v1__step_request__init(&step->request);
  kvpool__v1__region_ref__init(&step->region);
  kvpool__v1__array__init(&step->slots);
  kvpool__v1__array__init(&step->segments);
  kvpool__v1__store_op__init(&step->store);
  kvpool__v1__load_op__init(&step->load);
  kvpool__v1__op__init(&step->ops[0]);
  kvpool__v1__op__init(&step->ops[1]);
  set_view(session, &step->source, 0, format->row_bytes, rows);
  set_view(session, &step->out, bench_row_area_bytes(), format->loaded_row_bytes, rows);
  set_view(session, &step->out_scales, 2 * bench_row_area_bytes(), format->loaded_scale_bytes, rows);
  step->region.pool_id = session->pool->pool_id;
  step->region.region = region;
  step->slots.source_case = KVPOOL__V1__ARRAY__SOURCE_INLINE;
  step->slots.inline_ = (ProtobufCBinaryData){.data = (uint8_t *)session->slots, .len = rows * sizeof(int32_t)};
  step->segments.source_case = KVPOOL__V1__ARRAY__SOURCE_INLINE;
  step->segments.inline_ = (ProtobufCBinaryData){.data = (uint8_t *)session->segments,
                                                 .len = rows / bench_block_tokens * sizeof session->segments[0]};
  step->store.region = &step->region;
  step->store.source = &step->source;
  step->store.slots = 0;
  step->load.region = &step->region;
  step->load.segments = 1;
  step->load.total_k = rows;
  step->load.out = &step->out;
  step->load.out_scales = format->loaded_scale_bytes ? &step->out_scales : NULL;
  step->ops[0].op_case = KVPOOL__V1__OP__OP_STORE;
  step->ops[0].store = &step->store;
  step->ops[1].op_case = KVPOOL__V1__OP__OP_LOAD;
  step->ops[1].load = &step->load;
  for (size_t i = 0; i < 2; i++) {
    step->array_list[i] = i == 0 ? &step->slots : &step->segments;
    step->op_list[i] = &step->ops[i];
  }
  step->request.session = bench_session_ref(session);
  step->request.epoch = session->granted->epoch;
  step->request.n_arrays = step->request.n_ops = ops;
  step->request.arrays = step->array_list;
  step->request.ops = step->op_list;
}

static Kvpool__V1__StepEvent *next_event(struct bench_call *stream, Kvpool__V1__StepEvent__EventCase wanted) {
  Kvpool__V1__StepEvent *event =
      bench_must(bench_call_receive(stream, &kvpool__v1__step_event__descriptor), "Steps: the stream has ended");
  if (event->event_case == KVPOOL__V1__STEP_EVENT__EVENT_FAILED) {
    (void)fprintf(stderr, "bench: a step failed: %s\n", event->failed->error->message);
  }
  bench_must(event->event_case == wanted ? event : NULL, "Steps: not the event that was due");
  return event;
}

/* The done event is the caller's. Times are from before the request was packed. */
static Kvpool__V1__StepEvent *run_step(struct bench_call *stream, struct step *step, double *accepted_us,
                                       double *done_us) {
  static uint64_t last_step;
  step->request.step_id = ++last_step;
  double start = now_us();
  bench_call_send(stream, &step->request.base, false);
  Kvpool__V1__StepEvent *accepted = next_event(stream, KVPOOL__V1__STEP_EVENT__EVENT_ACCEPTED);
  *accepted_us = now_us() - start;
  Kvpool__V1__StepEvent *done = next_event(stream, KVPOOL__V1__STEP_EVENT__EVENT_DONE);
  *done_us = now_us() - start;
  protobuf_c_message_free_unpacked(&accepted->base, NULL);
  return done;
}

static struct bench_call *open_steps(struct bench_session *session) {
  return bench_call_start(session->client, "Steps");
}

static void close_steps(struct bench_call *stream) {
  bench_call_send_close(stream);
  (void)bench_must(bench_call_receive(stream, &kvpool__v1__step_event__descriptor) ? NULL : stream,
                   "Steps: an event too many");
  bench_call_finish(stream);
}

/* ---- measurements ------------------------------------------------------------------------------------------------
 */

static struct samples call_samples, accepted_samples, done_samples;

static double measure_call(struct bench_session *session, const char *method, const ProtobufCMessage *request,
                           const ProtobufCMessageDescriptor *response) {
  call_samples.count = 0;
  for (int i = -call_count / 10; i < call_count; i++) {
    double start = now_us();
    ProtobufCMessage *message =
        bench_must(bench_client_call(session->client, method, request, response), "the daemon is gone");
    if (i >= 0) {
      add_sample(&call_samples, now_us() - start);
    }
    protobuf_c_message_free_unpacked(message, NULL);
  }
  printf("%-44s p50 %8.1f us   p99 %8.1f us\n", method, median(&call_samples), percentile(&call_samples, 0.99));
  return median(&call_samples);
}

static void measure_steps(struct bench_session *session, uint32_t rows, double call_us) {
  struct step step;
  build_step(session, &step, 0, rows, 1);
  struct bench_call *stream = open_steps(session);
  accepted_samples.count = done_samples.count = 0;
  for (int i = -step_count / 10; i < step_count; i++) {
    double accepted_us, done_us;
    protobuf_c_message_free_unpacked(&run_step(stream, &step, &accepted_us, &done_us)->base, NULL);
    if (i >= 0) {
      add_sample(&accepted_samples, accepted_us);
      add_sample(&done_samples, done_us);
    }
  }
  close_steps(stream);
  char name[64];
  (void)snprintf(name, sizeof name, "store of %u slots: submit to accepted", rows);
  printf("%-44s p50 %8.1f us   p99 %8.1f us   %.2f x the empty call\n", name, median(&accepted_samples),
         percentile(&accepted_samples, 0.99), median(&accepted_samples) / call_us);
  (void)snprintf(name, sizeof name, "store of %u slots: submit to done", rows);
  printf("%-44s p50 %8.1f us   p99 %8.1f us\n", name, median(&done_samples), percentile(&done_samples, 0.99));
}

/* One thread's part of a copy, done once a round. */
struct copy {
  pthread_barrier_t *barrier;
  uint8_t *to;
  const uint8_t *from;
  size_t bytes;
};

static void *copy_part(void *argument) {
  struct copy *copy = argument;
  for (int round = 0; round < throughput_count; round++) {
    (void)pthread_barrier_wait(copy->barrier);
    memcpy(copy->to, copy->from, copy->bytes);
    (void)pthread_barrier_wait(copy->barrier);
  }
  return NULL;
}

/* GB/s, read + written, of memcpy by that many threads. */
static double memcpy_speed(uint64_t moved_bytes, int threads) {
  size_t part_bytes = moved_bytes / 2 / (size_t)threads;
  uint8_t *from = bench_must(malloc(moved_bytes / 2), "out of memory");
  uint8_t *to = bench_must(malloc(moved_bytes / 2), "out of memory");
  memset(from, 1, moved_bytes / 2);
  memset(to, 2, moved_bytes / 2);
  pthread_barrier_t barrier;
  struct copy parts[threads_max];
  pthread_t running[threads_max];
  (void)pthread_barrier_init(&barrier, NULL, (unsigned)threads + 1);
  for (int i = 0; i < threads; i++) {
    size_t begin = part_bytes * (size_t)i;
    parts[i] = (struct copy){&barrier, to + begin, from + begin, part_bytes};
    bench_must(pthread_create(&running[i], NULL, copy_part, &parts[i]) == 0 ? parts : NULL, "no thread");
  }
  call_samples.count = 0; /* here: GB/s */
  for (int round = 0; round < throughput_count; round++) {
    (void)pthread_barrier_wait(&barrier);
    double start = now_us();
    (void)pthread_barrier_wait(&barrier);
    add_sample(&call_samples, 2.0 * (double)part_bytes * threads / (now_us() - start) / 1e3);
  }
  for (int i = 0; i < threads; i++) {
    (void)pthread_join(running[i], NULL);
  }
  (void)pthread_barrier_destroy(&barrier);
  free(from);
  free(to);
  return median(&call_samples);
}

static int core_count(void) {
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  return cores < 1 ? 1 : cores > threads_max ? threads_max : (int)cores;
}

static double report_speed(const Kvpool__V1__OpReport *report) {
  return (double)(report->bytes_read + report->bytes_written) / (double)(report->finished_ns - report->started_ns);
}

static void measure_formats(struct bench_session *session) {
  int threads = core_count();
  printf(
      "\n%u rows, blocks in random order, buffer <-> pool; GB/s of bytes read + written, as the op's report has it;\n"
      "memcpy: the same bytes by %d threads and by 1, in the same run; ratio: to memcpy by %d threads\n",
      bench_rows, threads, threads);
  printf("%-14s %10s %7s %10s %7s %10s %10s\n", "format", "store", "ratio", "load", "ratio", "memcpy", "1 thread");
  for (uint32_t region = 0; region < session->info->n_formats; region++) {
    struct step step;
    build_step(session, &step, region, bench_rows, 2);
    struct bench_call *stream = open_steps(session);
    uint64_t moved_bytes = 0;
    accepted_samples.count = done_samples.count = 0; /* here: speeds of store and load */
    for (int i = -2; i < throughput_count; i++) {
      double accepted_us, done_us;
      Kvpool__V1__StepEvent *event = run_step(stream, &step, &accepted_us, &done_us);
      Kvpool__V1__OpReport **reports = event->done->reports;
      if (i >= 0) {
        add_sample(&accepted_samples, report_speed(reports[0]));
        add_sample(&done_samples, report_speed(reports[1]));
      }
      moved_bytes = reports[0]->bytes_read + reports[0]->bytes_written;
      protobuf_c_message_free_unpacked(&event->base, NULL);
    }
    close_steps(stream);
    double all = memcpy_speed(moved_bytes, threads), one = memcpy_speed(moved_bytes, 1);
    double store = median(&accepted_samples), load = median(&done_samples);
    printf("%-14s %10.2f %7.2f %10.2f %7.2f %10.2f %10.2f\n", session->info->formats[region]->name, store,
           store / all, load, load / all, all, one);
  }
}

static void store_rows(struct bench_session *session, Kvpool__V1__RegionRef *region, uint64_t bytes) {
  struct bench_call *call = bench_call_start(session->client, "StoreRows");
  for (uint64_t offset = 0; offset < bytes; offset += bench_chunk_bytes) {
    Kvpool__V1__StoreRowsRequest piece = KVPOOL__V1__STORE_ROWS_REQUEST__INIT;
    if (offset == 0) {
      piece.session = bench_session_ref(session);
      piece.epoch = session->granted->epoch;
      piece.region = region;
      piece.row_bytes = session->info->formats[region->region]->row_bytes;
      piece.slots = (ProtobufCBinaryData){.data = (uint8_t *)session->slots, .len = sizeof session->slots};
    }
    piece.rows = (ProtobufCBinaryData){.data = session->rows + offset, .len = bench_chunk_bytes};
    bench_call_send(call, &piece.base, offset + bench_chunk_bytes >= bytes);
  }
  ProtobufCMessage *done = bench_call_receive(call, &kvpool__v1__step_done__descriptor);
  bench_call_finish(call);
  protobuf_c_message_free_unpacked(bench_must(done, "StoreRows has no response"), NULL);
}

static uint64_t load_rows(struct bench_session *session, Kvpool__V1__RegionRef *region) {
  Kvpool__V1__LoadRowsRequest request = KVPOOL__V1__LOAD_ROWS_REQUEST__INIT;
  request.session = bench_session_ref(session);
  request.epoch = session->granted->epoch;
  request.region = region;
  request.segments = (ProtobufCBinaryData){.data = (uint8_t *)session->segments, .len = sizeof session->segments};
  request.total_k = bench_rows;
  struct bench_call *call = bench_call_start(session->client, "LoadRows");
  bench_call_send(call, &request.base, true);
  uint64_t bytes = 0;
  for (;;) {
    ProtobufCMessage *message = bench_call_receive(call, &kvpool__v1__load_rows_response__descriptor);
    if (!message) {
      break;
    }
    bytes += ((Kvpool__V1__LoadRowsResponse *)message)->rows.len;
    protobuf_c_message_free_unpacked(message, NULL);
  }
  bench_call_finish(call);
  return bytes;
}

static void measure_inline_rows(struct bench_session *session) {
  Kvpool__V1__RegionRef region = KVPOOL__V1__REGION_REF__INIT;
  region.pool_id = session->pool->pool_id;
  uint64_t bytes = (uint64_t)bench_rows * session->info->formats[0]->row_bytes;
  accepted_samples.count = done_samples.count = 0; /* here: GB/s */
  for (int i = -2; i < throughput_count; i++) {
    double start = now_us();
    store_rows(session, &region, bytes);
    double stored = now_us();
    bench_must(load_rows(session, &region) == bytes ? session : NULL, "LoadRows: not all rows came");
    if (i >= 0) {
      add_sample(&accepted_samples, (double)bytes / (stored - start) / 1e3);
      add_sample(&done_samples, (double)bytes / (now_us() - stored) / 1e3);
    }
  }
  printf("\nrows over gRPC, %u rows of %s, GB/s of row bytes: StoreRows %.2f, LoadRows %.2f\n", bench_rows,
         session->info->formats[0]->name, median(&accepted_samples), median(&done_samples));
}

int main(int argc, char **argv) {
  if (argc < 3 || argc > 4) {
    (void)fprintf(stderr, "usage: %s KVPOOLD KVPOOL_EXEC [DEVICE]\n", argv[0]);
    return 2;
  }
  const char *device = argc == 4 ? argv[3] : "host:0";
  static struct bench_session session;
  bench_session_open(&session, argv[1], argv[2], device);

  printf("kvpoold %s, %s\n\n", session.info->version, session.info->devices[0]->description);
  Kvpool__V1__GetServerInfoRequest request = KVPOOL__V1__GET_SERVER_INFO_REQUEST__INIT;
  double call_us = measure_call(&session, "GetServerInfo", &request.base, &kvpool__v1__server_info__descriptor);
  measure_steps(&session, 1, call_us);
  measure_steps(&session, step_slots, call_us);
  if (strncmp(device, "host:", 5) == 0) {
    measure_formats(&session);
  }
  measure_inline_rows(&session);
  bench_session_close(&session);
  return 0;
}
