/* Parts of the host backend that its files share. */
#ifndef KVPOOL_EXECUTOR_DEVICE_HOST_H
#define KVPOOL_EXECUTOR_DEVICE_HOST_H

#include "server/executor/device.h"

/* ---- device_host_memory.c ---- */

enum kvp_status kvp_device_host_memory_create(struct kvp_device *device, const char *name, uint64_t bytes, int *fds,
                                              struct kvp_memory **out, struct kvp_error *error);
enum kvp_status kvp_device_host_memory_import(struct kvp_device *device, uint64_t bytes, const int *fds,
                                              const uint64_t *chunk_bytes, uint32_t chunk_count,
                                              struct kvp_memory **out, struct kvp_error *error);
enum kvp_status kvp_device_host_memory_open(struct kvp_device *device, const struct kvp_control_open *request, int fd,
                                            struct kvp_memory **out, struct kvp_error *error);
void kvp_device_host_memory_destroy(struct kvp_device *device, struct kvp_memory *memory);

/* ---- device_host_op.c: an op as units that threads can take ---- */

/* 0: there is nothing to do. */
uint64_t kvp_host_op_units(const struct kvp_device_op *op);
void kvp_host_op_run(const struct kvp_device_op *op, uint64_t unit, struct kvp_op_counts *counts);

/* ---- device_host_replay.c: where a queue is in a replay ---- */

enum kvp_host_replay_state { KVP_HOST_REPLAY_READY, KVP_HOST_REPLAY_WAITS, KVP_HOST_REPLAY_OVER };

struct kvp_host_replay {
  struct kvp_device_op *op; /* the replay's own; NULL: it is in none */
  uint32_t at;              /* the fused store whose turn it is */
};

void kvp_host_replay_begin(struct kvp_host_replay *replay, struct kvp_device_op *op);
/* Looks at the word that the next op waits for. OVER: it won't be done, nor any behind it; what they would have signalled
 * is poisoned. */
enum kvp_host_replay_state kvp_host_replay_look(struct kvp_host_replay *replay);
/* The op whose turn it was is done: signals. */
void kvp_host_replay_advance(struct kvp_host_replay *replay);

/* ---- device_host_workers.c ---- */

struct kvp_host_workers;

/* wake: as in kvp_device_options. Returns NULL with *error. */
struct kvp_host_workers *kvp_host_workers_new(uint32_t thread_count, void (*wake)(void *context), void *wake_context,
                                              struct kvp_error *error);
void kvp_host_workers_stop(struct kvp_host_workers *workers);
void kvp_host_workers_destroy(struct kvp_host_workers *workers);
struct kvp_device_queue *kvp_host_queue_new(struct kvp_host_workers *workers);
void kvp_host_queue_destroy(struct kvp_device_queue *queue);
bool kvp_host_queue_launch(struct kvp_device_queue *queue, struct kvp_device_op *first);

#endif
