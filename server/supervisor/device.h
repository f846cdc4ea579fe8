/* One device as the supervisor sees it: its executor, its memory ledger, the steps it has. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_DEVICE_H
#define KVPOOL_SUPERVISOR_DEVICE_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "server/supervisor/executor_link.h"
#include "server/supervisor/ledger.h"
#include "server/supervisor/step.h"

struct kvp_daemon;

struct kvp_device {
  struct kvp_daemon *daemon;
  uint32_t index; /* into daemon->devices */
  char name[kvp_name_bytes_max];
  struct kvp_executor_link *link;
  struct kvp_ledger ledger;
  struct kvp_step_table steps;   /* waiting and in flight */
  uint32_t rings;                /* of workers that its executor has been told of and has not said to be rid of */
  uint64_t ring_bytes;           /* host memory of attachments to it; a host device's ledger has them, too */
  uint64_t import_address_bytes; /* of its executor's address space, for workers' memory; by buffer.c */
  bool limit_known;              /* the ledger's limit is decided once, by the first executor */
  uint64_t memory_bytes;         /* the latest executor's figure */
  uint64_t others_bytes;         /* of them: contexts, other processes; as the latest look found it */
  uint64_t looked_used_bytes;    /* of the ledger, when that look was asked for */
  uv_timer_t look;               /* from time to time */
  bool served;                   /* has been SERVING before */
};

/* The link and its events; spawns nothing. name is one of the configuration's. */
enum kvp_status kvp_device_init(struct kvp_daemon *daemon, uint32_t index, const char *name, struct kvp_error *error);
/* Its link is STOPPED. */
void kvp_device_deinit(struct kvp_device *device);

/* A worker's ring of so many bytes of host memory: refused as quota_exceeded where that is the device's and there is no
 * room for it. */
enum kvp_status kvp_device_charge_ring(struct kvp_device *device, uint64_t bytes, struct kvp_error *error);
void kvp_device_release_ring(struct kvp_device *device, uint64_t bytes);

/* Adds to an out_of_memory of its executor, of memory that is charged: what the ledger knows. */
void kvp_device_explain_memory(const struct kvp_device *device, struct kvp_error *error);

/* May memory be asked of it now? busy while it starts, device_lost after its executor died, shutting_down. The text
 * of a device that waits says for whom. */
enum kvp_status kvp_device_check_serving(const struct kvp_device *device, struct kvp_error *error);

#endif
