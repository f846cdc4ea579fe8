/* A CUDA device of a test: memory, queues with their timelines, steps on them. One thread; asserts. */
#ifndef KVPOOL_TESTS_CUDA_BENCH_H
#define KVPOOL_TESTS_CUDA_BENCH_H

#include "server/executor/device.h"

enum { cuda_bench_memory_bytes = 64 << 20, cuda_bench_queue_count = 8 };

struct cuda_bench {
  struct kvp_device *device;
  struct kvp_memory *memory;
  struct kvp_timeline *timelines;
  struct kvp_timeline *device_timelines;
  struct kvp_device_queue *queues[cuda_bench_queue_count];
  uint64_t values[cuda_bench_queue_count];
  int fd;
};

enum kvp_status cuda_device_try_open(const char *name, struct kvp_device **out, struct kvp_error *error);
struct kvp_device *cuda_device_open(const char *name);
void cuda_device_end(struct kvp_device *device);

void cuda_bench_init(struct cuda_bench *bench);
void cuda_bench_deinit(struct cuda_bench *bench);
/* ops [count], and room for the signal behind them. What the device says. */
bool cuda_bench_launch(struct cuda_bench *bench, int queue, struct kvp_device_op *ops, uint32_t count);
bool cuda_bench_has_ended(const struct cuda_bench *bench, int queue); /* everything launched on it */
/* Waits for all that was launched on the queue, then collects one step. */
enum kvp_status cuda_bench_try_collect(struct cuda_bench *bench, int queue, struct kvp_device_op *ops,
                                       struct kvp_error *error);
void cuda_bench_collect(struct cuda_bench *bench, int queue, struct kvp_device_op *ops);

/* Of kind WRITE, READ or FILL, with 0x42. */
struct kvp_device_op cuda_bench_transfer(enum kvp_device_op_kind kind, uint8_t *base, uint64_t stride, uint64_t rows,
                                         uint64_t row_bytes, uint8_t *host);

#endif
