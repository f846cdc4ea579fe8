/* The device of tests. */
#include "tests/unit/fake_device.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <cmocka.h>

struct kvp_device_queue {
  struct fake_device *device;
};

static struct fake_device *fake_of(struct kvp_device *device) {
  return (struct fake_device *)device;
}

/* The device's side is another mapping: whoever takes one address for the other is found out. (Not with the thread
 * sanitizer, which takes two addresses for two words.) */
static enum kvp_status fake_register(struct kvp_device *device, void *host, uint64_t bytes, bool read_only,
                                     void **out, struct kvp_error *error) {
  (void)read_only;
  (void)error;
  fake_of(device)->registered++;
#ifdef __SANITIZE_THREAD__
  (void)bytes;
  *out = host;
#else
  *out = mremap(host, 0, bytes, MREMAP_MAYMOVE);
  assert_true(*out != MAP_FAILED);
#endif
  return KVP_OK;
}

static void fake_unregister(struct kvp_device *device, void *host) {
  assert_non_null(host);
  fake_of(device)->registered--;
}

static enum kvp_status fake_queue_create(struct kvp_device *device, struct kvp_device_queue **out,
                                         struct kvp_error *error) {
  (void)error;
  *out = calloc(1, sizeof **out);
  assert_non_null(*out);
  (*out)->device = fake_of(device);
  return KVP_OK;
}

static void fake_queue_destroy(struct kvp_device *device, struct kvp_device_queue *queue) {
  (void)device;
  free(queue);
}

void fake_signal_write(const struct kvp_device_op *signal) {
  kvp_timeline_signal(signal->params.signal.timeline, signal->params.signal.value);
}

void fake_device_end(struct fake_device *device, uint32_t index) {
  assert_true(index < device->launched && !device->ended[index]);
  device->ended[index] = true;
  const struct kvp_device_op *op = device->firsts[index];
  for (; op->kind != KVP_DEVICE_SIGNAL; op = op->next) {
    if (op->kind == KVP_DEVICE_POINT && !device->fails[index]) {
      atomic_store(&op->params.point.word->value, op->params.point.value);
    }
  }
  fake_signal_write(op);
}

void fake_device_end_all(struct fake_device *device) {
  for (uint32_t i = 0; i < device->launched; i++) {
    if (!device->ended[i]) {
      fake_device_end(device, i);
    }
  }
}

static void *later_main(void *argument) {
  const struct timespec pause = {.tv_nsec = 30000000};
  (void)nanosleep(&pause, NULL);
  fake_signal_write(argument);
  return NULL;
}

static bool fake_launch(struct kvp_device_queue *queue, struct kvp_device_op *first) {
  struct fake_device *device = queue->device;
  struct kvp_device_op *op = first;
  uint32_t count = 0;
  for (; op->kind != KVP_DEVICE_SIGNAL; op = op->next) {
    count++;
  }
  assert_null(op->next);
  device->attempts++;
  if (device->used_ops + count > device->capacity_ops) {
    return false;
  }
  assert_true(device->launched < fake_launches_max);
  device->used_ops += count;
  device->firsts[device->launched] = first;
  device->ops[device->launched] = count;
  device->signals[device->launched++] = op;
  if (device->ends_later && !atomic_load(&device->is_lost)) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, later_main, op), 0);
    assert_int_equal(pthread_detach(thread), 0);
  }
  return true;
}

static enum kvp_status fake_collect(struct kvp_device_queue *queue, struct kvp_device_op *first,
                                    struct kvp_error *error) {
  struct fake_device *device = queue->device;
  uint32_t i = 0;
  while (device->firsts[i] != first) {
    i++;
    assert_true(i < device->launched);
  }
  device->firsts[i] = NULL; /* its memory is used again */
  device->used_ops -= device->ops[i];
  device->collected++;
  if (device->fails[i]) {
    return kvp_error_set(error, KVP_OUT_OF_MEMORY, "chain %u could not be launched", i);
  }
  for (struct kvp_device_op *op = first; op->kind != KVP_DEVICE_SIGNAL; op = op->next) {
    op->counts.bytes_written = 1000 + device->collected;
  }
  return KVP_OK;
}

static enum kvp_status fake_check(struct kvp_device *device, struct kvp_error *error) {
  return atomic_load(&fake_of(device)->is_lost) ? kvp_error_set(error, KVP_DEVICE_LOST, "it is lost") : KVP_OK;
}

const struct kvp_device_backend fake_backend = {
    .prefix = "fake:",
    .polled = true,
    .check = fake_check,
    .host_register = fake_register,
    .host_unregister = fake_unregister,
    .queue_create = fake_queue_create,
    .queue_destroy = fake_queue_destroy,
    .launch = fake_launch,
    .collect = fake_collect,
};
