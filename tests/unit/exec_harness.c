/* The supervisor in miniature. */
#include "tests/unit/exec_harness.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

void exec_harness_fail(const char *file, int line, const char *text) {
  (void)fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
  abort();
}

const struct exec_harness_options exec_harness_defaults = {
    .ring = {.commands = 256, .completions = 512, .command_arena_bytes = 16 << 20, .completion_arena_bytes = 8 << 20},
    .thread_count = 2,
};

static const char *environment(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value == NULL ? otherwise : value;
}

static void spawn(struct exec_harness *link, const char *device) {
  const char *path = environment("KVPOOL_TEST_EXEC", KVPOOL_EXEC_PATH);
  int pair[2];
  HARNESS_CHECK(kvp_fd_socket_pair(pair) == 0);
  link->pid = fork();
  HARNESS_CHECK(link->pid >= 0);
  if (link->pid == 0) {
    char number[16];
    (void)snprintf(number, sizeof number, "%d", pair[1]);
    (void)fcntl(pair[1], F_SETFD, 0);
    (void)execl(path, "kvpool-exec", "--device", device, "--control-fd", number, "--log-level", "error",
                (char *)NULL);
    _exit(127);
  }
  (void)close(pair[1]);
  link->socket = pair[0];
}

static struct kvp_error reply_take(struct exec_harness *link) {
  struct kvp_error error;
  HARNESS_CHECK(link->message.kind == KVP_CONTROL_RESULT && link->message.body_bytes == sizeof error);
  memcpy(&error, link->message.body, sizeof error);
  return error;
}

struct kvp_error exec_harness_start(struct exec_harness *link, const struct exec_harness_options *options) {
  struct kvp_error error = {0};
  const char *device = options->device == NULL ? environment("KVPOOL_TEST_DEVICE", "host:0") : options->device;
  memset(link, 0, sizeof *link);
  spawn(link, device);
  link->ring_fd = kvp_ring_create("test-ring", &options->ring, &error);
  HARNESS_CHECK(link->ring_fd >= 0);
  HARNESS_CHECK(kvp_ring_init(&link->ring, link->ring_fd, KVP_RING_CLIENT, &error) == KVP_OK);
  link->command_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  link->completion_event = eventfd(0, EFD_CLOEXEC);
  struct kvp_control_hello hello = {.version = options->version == 0 ? KVP_CONTROL_VERSION : options->version,
                                    .thread_count = options->thread_count};
  (void)snprintf(hello.device, sizeof hello.device, "%s", device);
  if (options->socket_path != NULL) {
    (void)snprintf(hello.socket_path, sizeof hello.socket_path, "%s", options->socket_path);
    (void)snprintf(hello.lock_path, sizeof hello.lock_path, "%s", options->lock_path);
  }
  const int fds[3] = {link->ring_fd, link->command_event, link->completion_event};
  HARNESS_CHECK(kvp_fd_socket_send(link->socket, KVP_CONTROL_HELLO, ++link->last_request, &hello, sizeof hello, fds,
                                   3) == KVP_OK);
  HARNESS_CHECK(kvp_fd_socket_receive(link->socket, &link->message) == KVP_OK);
  HARNESS_CHECK(link->message.request == link->last_request);
  if (link->message.kind != KVP_CONTROL_READY) {
    return reply_take(link);
  }
  HARNESS_CHECK(link->message.body_bytes == sizeof link->ready);
  memcpy(&link->ready, link->message.body, sizeof link->ready);
  HARNESS_CHECK(link->ready.pid == (uint32_t)link->pid);
  memset(&error, 0, sizeof error);
  return error;
}

int exec_harness_wait(struct exec_harness *link) {
  int status = -1;
  HARNESS_CHECK(waitpid(link->pid, &status, 0) == link->pid);
  if (link->socket >= 0) {
    (void)close(link->socket);
  }
  kvp_ring_deinit(&link->ring);
  (void)close(link->ring_fd);
  (void)close(link->command_event);
  (void)close(link->completion_event);
  return status;
}

int exec_harness_stop(struct exec_harness *link) {
  (void)close(link->socket);
  link->socket = -1;
  return exec_harness_wait(link);
}

struct kvp_error exec_harness_request(struct exec_harness *link, uint32_t kind, const void *body, uint32_t body_bytes,
                                      const int *fds, uint32_t fd_count) {
  HARNESS_CHECK(kvp_fd_socket_send(link->socket, kind, ++link->last_request, body, body_bytes, fds, fd_count) ==
                KVP_OK);
  HARNESS_CHECK(kvp_fd_socket_receive(link->socket, &link->message) == KVP_OK);
  HARNESS_CHECK(link->message.request == link->last_request);
  return reply_take(link);
}

struct kvp_error exec_harness_memory_create(struct exec_harness *link, uint64_t id, uint64_t bytes, int *fd) {
  struct kvp_control_memory request = {.memory_id = id, .bytes = bytes, .name = "test-memory"};
  HARNESS_CHECK(kvp_fd_socket_send(link->socket, KVP_CONTROL_MEMORY_CREATE, ++link->last_request, &request,
                                   sizeof request, NULL, 0) == KVP_OK);
  HARNESS_CHECK(kvp_fd_socket_receive(link->socket, &link->message) == KVP_OK);
  HARNESS_CHECK(link->message.request == link->last_request);
  if (link->message.kind == KVP_CONTROL_RESULT) {
    return reply_take(link);
  }
  struct kvp_control_chunks chunks;
  HARNESS_CHECK(link->message.kind == KVP_CONTROL_MEMORY_CHUNKS && link->message.body_bytes == sizeof chunks);
  memcpy(&chunks, link->message.body, sizeof chunks);
  HARNESS_CHECK(link->message.fd_count == 1 && chunks.chunk_count == 1 && chunks.first_chunk == 0);
  HARNESS_CHECK(chunks.memory_id == id && chunks.memory_bytes == bytes && chunks.chunk_bytes[0] == bytes);
  *fd = link->message.fds[0];
  HARNESS_CHECK((link->ready.flags & KVP_READY_DEVICE_FDS) != 0 || kvp_memory_fd_check(*fd, bytes, NULL) == KVP_OK);
  HARNESS_CHECK(kvp_fd_socket_receive(link->socket, &link->message) == KVP_OK);
  return reply_take(link);
}

struct kvp_error exec_harness_memory_import(struct exec_harness *link, uint64_t id, uint64_t bytes, int fd) {
  struct kvp_control_chunks chunks = {.memory_id = id, .memory_bytes = bytes, .chunk_count = 1};
  chunks.chunk_bytes[0] = bytes;
  return exec_harness_request(link, KVP_CONTROL_MEMORY_IMPORT, &chunks, sizeof chunks, &fd, 1);
}

struct kvp_error exec_harness_buffer_attach(struct exec_harness *link, uint64_t id, uint64_t memory_id,
                                            uint64_t bytes, uint32_t owner) {
  struct kvp_control_buffer request = {.buffer_id = id, .memory_id = memory_id, .bytes = bytes, .owner = owner};
  return exec_harness_request(link, KVP_CONTROL_BUFFER_ATTACH, &request, sizeof request, NULL, 0);
}

uint8_t *exec_harness_map(int fd, uint64_t bytes) {
  void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  HARNESS_CHECK(map != MAP_FAILED);
  return map;
}

bool exec_lane_post(struct kvp_ring *ring, int command_event, uint32_t kind, uint64_t tag, const void *payload,
                    uint32_t bytes) {
  void *place = kvp_lane_reserve(&ring->commands, bytes);
  if (place == NULL) {
    return false;
  }
  if (bytes > 0) {
    memcpy(place, payload, bytes);
  }
  if (kvp_lane_publish(&ring->commands, kind, tag, bytes)) {
    HARNESS_CHECK(eventfd_write(command_event, 1) == 0);
  }
  return true;
}

bool exec_lane_try_take(struct kvp_ring *ring, struct exec_completion *out) {
  struct kvp_ring_record record;
  enum kvp_lane_state state = kvp_lane_peek(&ring->completions, &record);
  HARNESS_CHECK(state != KVP_LANE_CORRUPT);
  if (state == KVP_LANE_EMPTY) {
    return false;
  }
  *out = (struct exec_completion){.kind = record.kind, .tag = record.tag, .payload_bytes = record.payload_bytes};
  if (record.payload_bytes > 0) {
    out->payload = malloc(record.payload_bytes);
    HARNESS_CHECK(out->payload != NULL);
    kvp_lane_copy_payload(&ring->completions, &record, out->payload);
  }
  kvp_lane_advance(&ring->completions, &record);
  return true;
}

bool exec_harness_post(struct exec_harness *link, uint32_t kind, uint64_t tag, const void *payload, uint32_t bytes) {
  return exec_lane_post(&link->ring, link->command_event, kind, tag, payload, bytes);
}

bool exec_harness_try_take(struct exec_harness *link, struct exec_completion *out) {
  return exec_lane_try_take(&link->ring, out);
}

struct exec_completion exec_harness_take(struct exec_harness *link) {
  struct exec_completion completion;
  while (!exec_harness_try_take(link, &completion)) {
    if (kvp_lane_prepare_sleep(&link->ring.completions)) {
      eventfd_t count = 0;
      (void)eventfd_read(link->completion_event, &count);
      kvp_lane_awake(&link->ring.completions);
    }
  }
  return completion;
}

/* ---- encoding of steps ---- */

void step_encoder_init(struct step_encoder *encoder, uint32_t queue, uint32_t owner, uint64_t epoch) {
  memset(encoder, 0, sizeof *encoder);
  encoder->header = (struct kvp_wire_step){
      .magic = KVP_WIRE_STEP_MAGIC, .version = KVP_WIRE_VERSION, .queue = queue, .owner = owner, .epoch = epoch};
}

void step_encoder_deinit(struct step_encoder *encoder) {
  free(encoder->data);
  encoder->data = NULL;
}

struct kvp_wire_op *step_encoder_op(struct step_encoder *encoder, enum kvp_op_kind kind) {
  HARNESS_CHECK(encoder->header.op_count < step_ops_max);
  struct kvp_wire_op *op = &encoder->ops[encoder->header.op_count++];
  op->kind = kind;
  for (int i = 0; i < 4; i++) {
    op->arrays[i] = KVP_WIRE_NO_ARRAY;
  }
  return op;
}

uint32_t step_encoder_array(struct step_encoder *encoder, const void *data, uint32_t bytes) {
  HARNESS_CHECK(encoder->header.array_count < step_arrays_max);
  const uint32_t padded = (bytes + 7) / 8 * 8;
  encoder->data = realloc(encoder->data, (size_t)encoder->data_bytes + padded + 1);
  HARNESS_CHECK(encoder->data != NULL);
  memset(encoder->data + encoder->data_bytes, 0, (size_t)padded + 1);
  if (bytes > 0) {
    memcpy(encoder->data + encoder->data_bytes, data, bytes);
  }
  encoder->arrays[encoder->header.array_count] =
      (struct kvp_wire_array){.offset_bytes = encoder->data_bytes, .bytes = bytes};
  encoder->data_bytes += padded;
  return encoder->header.array_count++;
}

uint32_t step_encoder_buffer_array(struct step_encoder *encoder, uint64_t buffer, uint64_t offset, uint64_t bytes) {
  HARNESS_CHECK(encoder->header.array_count < step_arrays_max);
  encoder->arrays[encoder->header.array_count] =
      (struct kvp_wire_array){.buffer_id = buffer, .offset_bytes = offset, .bytes = bytes};
  return encoder->header.array_count++;
}

struct kvp_wire_view step_view(uint64_t buffer, uint64_t offset, uint64_t rows, uint32_t row_bytes, uint64_t stride) {
  return (struct kvp_wire_view){
      .buffer_id = buffer,
      .offset_bytes = offset,
      .rows = rows,
      .row_stride_bytes = stride,
      .row_bytes = row_bytes,
      .flags = KVP_WIRE_VIEW_PRESENT,
  };
}

uint8_t *step_encoder_encode(const struct step_encoder *encoder, uint32_t *bytes) {
  struct kvp_wire_step header = encoder->header;
  const size_t ops_bytes = header.op_count * sizeof(struct kvp_wire_op);
  const size_t arrays_bytes = header.array_count * sizeof(struct kvp_wire_array);
  const size_t tables = sizeof header + ops_bytes + arrays_bytes;
  header.bytes = (uint32_t)(tables + encoder->data_bytes);
  uint8_t *out = malloc(header.bytes);
  HARNESS_CHECK(out != NULL);
  memcpy(out, &header, sizeof header);
  memcpy(out + sizeof header, encoder->ops, ops_bytes);
  for (uint32_t i = 0; i < header.array_count; i++) {
    struct kvp_wire_array array = encoder->arrays[i];
    if (array.buffer_id == 0) {
      array.offset_bytes += tables;
    }
    memcpy(out + sizeof header + ops_bytes + i * sizeof array, &array, sizeof array);
  }
  if (encoder->data_bytes > 0) {
    memcpy(out + tables, encoder->data, encoder->data_bytes);
  }
  *bytes = header.bytes;
  return out;
}
