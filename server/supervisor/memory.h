/* A piece of device memory whose descriptors the supervisor keeps: a region of a pool on one placement, or a buffer.
 *
 * The executor makes it and hands over one fd per chunk; as long as these are open the contents live, whatever
 * happens to the executor. A successor imports them. Or a worker brought it, with one fd or (an IPC handle) none, and
 * a successor opens it as its predecessor did. Loop thread only.
 */
#ifndef KVPOOL_SUPERVISOR_MEMORY_H
#define KVPOOL_SUPERVISOR_MEMORY_H

#include <stdint.h>

#include "server/supervisor/executor_link.h"
#include "server/supervisor/fd_budget.h"

struct kvp_memory;

typedef void (*kvp_memory_done_fn)(void *context, const struct kvp_error *error);

/* fds was charged kvp_fd_budget_memory(bytes), which is given back when the last descriptor is closed.
 * memory_id: unique over the daemon's life. name shows in /proc/PID/maps, a chunk's number behind it. done is called
 * once, later; when it tells an error nothing is left behind and *out is to be destroyed all the same. */
void kvp_memory_create(struct kvp_executor_link *link, struct kvp_fd_budget *fds, uint64_t memory_id,
                       const char *name, uint64_t bytes, kvp_memory_done_fn done, void *context,
                       struct kvp_memory **out);
/* A worker's memory as *open says, but for its id. Takes over fd (-1: there is none). fds was charged
 * kvp_memory_open_fds; otherwise like kvp_memory_create. */
void kvp_memory_open(struct kvp_executor_link *link, struct kvp_fd_budget *fds, uint64_t memory_id,
                     const struct kvp_control_open *open, int fd, kvp_memory_done_fn done, void *context,
                     struct kvp_memory **out);
enum { kvp_memory_open_fds = 2 }; /* open once, and in a message to the executor */
/* Gives the chunks to the link's new executor. done NULL: kvp_memory_failure tells. */
void kvp_memory_restore(struct kvp_memory *memory, kvp_memory_done_fn done, void *context);
/* Has the executor let go of it; closed is called, later, when it has, or has died. kvp_memory_destroy follows then, and
 * nothing else before. */
void kvp_memory_close(struct kvp_memory *memory, kvp_link_result_fn closed, void *context);
/* Tells the executor and closes the fds. Nothing may use it any more; a create or restore under way is waited for
 * inside (its done is not called any more). NULL is allowed. */
void kvp_memory_destroy(struct kvp_memory *memory);

/* Why the latest restore has failed; NULL: it hasn't. */
const char *kvp_memory_failure(const struct kvp_memory *memory);
uint64_t kvp_memory_id(const struct kvp_memory *memory);
uint64_t kvp_memory_bytes(const struct kvp_memory *memory);
/* What its chunks add up to: its bytes or more. */
uint64_t kvp_memory_chunks_bytes(const struct kvp_memory *memory);
uint32_t kvp_memory_chunk_count(const struct kvp_memory *memory);
/* The descriptor of one of them, which stays the memory's. */
int kvp_memory_chunk(const struct kvp_memory *memory, uint32_t index, uint64_t *bytes);

#endif
