/* The host backend: memfds and threads. Devices host:0, host:1, ... differ in name only. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/host_memory.h"
#include "server/executor/device_host.h"

enum { threads_max = 256, device_number_digits_max = 4 };

struct host_device {
  struct kvp_device base;
  struct kvp_host_workers *workers;
  uint32_t thread_count;
};

static struct host_device *host_device_of(struct kvp_device *device) {
  return (struct host_device *)device;
}

static uint32_t core_count(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    return 1;
  }
  return (uint32_t)CPU_COUNT(&set);
}

static enum kvp_status host_open(const char *name, const struct kvp_device_options *options, struct kvp_device **out,
                                 struct kvp_error *error) {
  const char *number = name + strlen(kvp_device_host.prefix);
  size_t digits = strspn(number, "0123456789");
  if (digits == 0 || digits > device_number_digits_max || number[digits] != '\0') {
    return kvp_error_set(error, KVP_INVALID_ARGUMENT, "device '%s': a host device is host:N", name);
  }
  uint32_t threads = options->thread_count == 0 ? core_count() : options->thread_count;
  if (threads > threads_max) {
    return kvp_error_set(error, KVP_TOO_LARGE, "device '%s': %u threads, at most %d are allowed", name, threads,
                         threads_max);
  }
  struct host_device *device = calloc(1, sizeof *device);
  if (device == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "device '%s': no memory for it", name);
  }
  device->base.backend = &kvp_device_host;
  device->base.may_wait = true;
  device->thread_count = threads;
  device->workers = kvp_host_workers_new(threads, options->wake, options->wake_context, error);
  if (device->workers == NULL) {
    free(device);
    return (enum kvp_status)error->status;
  }
  *out = &device->base;
  return KVP_OK;
}

static void host_stop(struct kvp_device *device) {
  kvp_host_workers_stop(host_device_of(device)->workers);
}

static void host_close(struct kvp_device *device) {
  kvp_host_workers_destroy(host_device_of(device)->workers);
  free(device);
}

static void host_describe(const struct kvp_device *device, struct kvp_device_description *out) {
  struct kvp_host_memory memory;
  kvp_host_memory_read(&memory);
  out->memory_bytes = memory.total_bytes;
  out->memory_free_bytes = memory.available_bytes;
  out->memory_granularity_bytes = 1;
  (void)snprintf(out->text, sizeof out->text, "host memory, %u kernel threads, %s",
                 ((const struct host_device *)device)->thread_count, kvp_host_isa());
}

/* Worker threads follow every pointer of this process. */
static enum kvp_status host_register(struct kvp_device *device, void *host, uint64_t bytes, bool read_only,
                                     void **out, struct kvp_error *error) {
  (void)device;
  (void)bytes;
  (void)read_only;
  (void)error;
  *out = host;
  return KVP_OK;
}

static void host_unregister(struct kvp_device *device, void *host) {
  (void)device;
  (void)host;
}

static enum kvp_status host_queue_create(struct kvp_device *device, struct kvp_device_queue **out,
                                         struct kvp_error *error) {
  struct kvp_device_queue *queue = kvp_host_queue_new(host_device_of(device)->workers);
  if (queue == NULL) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "no memory for a device queue");
  }
  *out = queue;
  return KVP_OK;
}

static void host_queue_destroy(struct kvp_device *device, struct kvp_device_queue *queue) {
  (void)device;
  kvp_host_queue_destroy(queue);
}

const struct kvp_device_backend kvp_device_host = {
    .prefix = "host:",
    .open = host_open,
    .stop = host_stop,
    .close = host_close,
    .describe = host_describe,
    .memory_create = kvp_device_host_memory_create,
    .memory_import = kvp_device_host_memory_import,
    .memory_open = kvp_device_host_memory_open,
    .memory_destroy = kvp_device_host_memory_destroy,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .queue_create = host_queue_create,
    .queue_destroy = host_queue_destroy,
    .launch = kvp_host_queue_launch,
};
