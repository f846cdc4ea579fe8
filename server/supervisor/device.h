/* One device as the supervisor sees it: its executor, its memory ledger, the steps it has. Loop thread only. */
#ifndef KVPOOL_SUPERVISOR_DEVICE_H
#define KVPOOL_SUPERVISOR_DEVICE_H

#include <stdint.h>

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
  struct kvp_step_table steps; /* waiting and in flight */
};

#endif
