#include "tests/client/fake_attach.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/format.h"

static void must(bool is_so, const char *what) {
  if (!is_so) {
    (void)fprintf(stderr, "fake_attach: %s: %s\n", what, strerror(errno));
    abort();
  }
}

static int memory_of(const char *name, uint64_t bytes) {
  struct kvp_error error = {.text = ""};
  int fd = kvp_memory_fd_create(name, bytes, &error);
  must(fd >= 0, error.text);
  return fd;
}

static void *map_of(int fd, size_t bytes) {
  void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  must(map != MAP_FAILED, "mmap");
  return map;
}

/* ---- the executor's memory --------------------------------------------------------------------------------------
 */

static void executor_drop(struct fake_attach *fake) {
  if (fake->ring_fd < 0) {
    return;
  }
  kvp_ring_deinit(&fake->ring);
  (void)munmap(fake->words, kvp_timeline_bytes);
  (void)munmap(fake->status, sizeof *fake->status);
  const int fds[] = {fake->ring_fd,      fake->command_event, fake->completion_event[0], fake->completion_event[1],
                     fake->timelines_fd, fake->status_fd};
  for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
    (void)close(fds[i]);
  }
  fake->ring_fd = -1;
}

void fake_make_executor(struct fake_attach *fake) {
  struct kvp_error error = {.text = ""};
  const struct kvp_ring_sizes sizes = {.commands = kvp_worker_ring_commands,
                                       .completions = kvp_worker_ring_completions,
                                       .command_arena_bytes = fake_command_arena_bytes,
                                       .completion_arena_bytes = 1 << 20};
  executor_drop(fake);
  if (fake->fault == FAKE_UNSEALED_RING) {
    fake->ring_fd = memfd_create("ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    const int good = kvp_ring_create("ring", &sizes, &error);
    const size_t bytes = kvp_ring_bytes(&sizes);
    must(fake->ring_fd >= 0 && good >= 0 && ftruncate(fake->ring_fd, (off_t)bytes) == 0, "ring");
    memcpy(map_of(fake->ring_fd, bytes), map_of(good, bytes), 4096);
    must(kvp_ring_init(&fake->ring, good, KVP_RING_EXECUTOR, &error) == KVP_OK, error.text);
    (void)close(good);
  } else {
    fake->ring_fd = kvp_ring_create("ring", &sizes, &error);
    must(fake->ring_fd >= 0, error.text);
    must(kvp_ring_init(&fake->ring, fake->ring_fd, KVP_RING_EXECUTOR, &error) == KVP_OK, error.text);
  }
  fake->command_event = eventfd(0, EFD_CLOEXEC);
  must(kvp_fd_socket_pair(fake->completion_event) == 0, "socketpair");
  fake->timelines_fd = memory_of("timelines", kvp_timeline_bytes);
  fake->words = map_of(fake->timelines_fd, kvp_timeline_bytes);
  fake->status_fd = memory_of("status", sizeof *fake->status);
  fake->status = map_of(fake->status_fd, sizeof *fake->status);
  fake->status->generation = ++fake->generation;
  fake->status->state = KVP_ATTACH_STATE_SERVING;
}

static void welcome_send(struct fake_attach *fake, uint32_t kind, uint32_t request) {
  struct kvp_attach_welcome welcome = {
      .version = KVP_ATTACH_VERSION + (fake->fault == FAKE_NEWER),
      .flags = KVP_ATTACH_MPS,
      .attachment_id = 7,
      .generation = fake->generation,
      .epoch = 40 + fake->generation,
      .deadline_ns_max = 30000000000,
      .memory_granularity_bytes = 1,
      .device = "host:0",
  };
  if (fake->on_device) {
    welcome.flags |= KVP_ATTACH_DEVICE_FDS;
    welcome.memory_granularity_bytes = 64 << 10;
    (void)snprintf(welcome.device, sizeof welcome.device, "cuda:0");
    (void)snprintf(welcome.uuid, sizeof welcome.uuid, "GPU-11111111-1111-1111-1111-111111111111");
  }
  const int fds[kvp_attach_fd_count] = {fake->ring_fd, fake->command_event, fake->completion_event[1],
                                        fake->timelines_fd, fake->status_fd};
  must(kvp_fd_socket_send(fake->socket, kind, request, &welcome, sizeof welcome, fds,
                          fake->fault == FAKE_FEW_FDS ? 4 : kvp_attach_fd_count) == KVP_OK,
       "welcome");
}

/* ---- answers ----------------------------------------------------------------------------------------------------
 */

static void reply(const struct fake_attach *fake, uint32_t kind, uint32_t request, const void *body, uint32_t bytes) {
  must(kvp_fd_socket_send(fake->socket, kind, request, body, bytes, NULL, 0) == KVP_OK, "reply");
}

static void reply_result(const struct fake_attach *fake, uint32_t request, enum kvp_status status, const char *text) {
  struct kvp_error error = {.status = KVP_OK, .op = -1, .position = -1};
  if (status != KVP_OK) {
    (void)kvp_error_set(&error, status, "%s", text);
  }
  reply(fake, KVP_ATTACH_RESULT, request, &error, sizeof error);
}

static void send_chunk(const struct fake_attach *fake, uint32_t request, uint64_t id, int fd, uint64_t memory_bytes,
                       uint64_t chunk_bytes) {
  struct kvp_control_chunks chunks = {.memory_id = id, .memory_bytes = memory_bytes, .chunk_count = 1};
  chunks.chunk_bytes[0] = chunk_bytes;
  must(kvp_fd_socket_send(fake->socket, KVP_ATTACH_MEMORY_CHUNKS, request, &chunks, sizeof chunks, &fd, 1) == KVP_OK,
       "chunks");
}

/* "main": v41 of 2 layers, 16 tokens a block, and index_mxfp8 of one layer, 64 tokens a block; sizes of FORMATS.md. */
static const uint64_t region_bytes[fake_region_count] = {UINT64_C(2) * fake_pool_blocks * 16 * 528,
                                                         UINT64_C(1) * fake_pool_blocks * 64 * 132};

static void answer_pool(struct fake_attach *fake, const struct kvp_fd_message *message) {
  struct kvp_attach_pool_name name;
  memcpy(&name, message->body, sizeof name);
  if (strcmp(name.name, "main") != 0) {
    reply_result(fake, message->request, KVP_UNKNOWN_POOL, "no such pool");
    return;
  }
  struct kvp_attach_pool pool = {
      .pool_id = 12, .num_blocks = fake_pool_blocks, .block_size = 64, .region_count = fake_region_count};
  pool.regions[0] = (struct kvp_attach_region){.name = "kv",
                                               .format = KVP_FORMAT_V41,
                                               .tokens_per_block = 16,
                                               .num_layers = 2,
                                               .memory_bytes = region_bytes[0]};
  pool.regions[1] = (struct kvp_attach_region){.name = "index",
                                               .format = KVP_FORMAT_INDEX_MXFP8,
                                               .tokens_per_block = 64,
                                               .num_layers = 1,
                                               .memory_bytes = region_bytes[1]};
  pool.region_count = fake->fault == FAKE_POOL_REGIONS ? 17 : pool.region_count;
  pool.regions[1].format = fake->fault == FAKE_POOL_FORMAT ? 99 : pool.regions[1].format;
  pool.regions[0].memory_bytes -= fake->fault == FAKE_POOL_SMALL;
  if (fake->fault != FAKE_NO_DESCRIPTION) {
    reply(fake, KVP_ATTACH_POOL, message->request, &pool, sizeof pool);
  }
  for (uint32_t i = 0; i < fake_region_count && fake->fault != FAKE_NO_DESCRIPTION; i++) {
    if (i == 1 && fake->fault == FAKE_CHUNK_MISSING) {
      continue;
    }
    uint64_t chunk_bytes = region_bytes[i] + (i == 1 && fake->fault == FAKE_CHUNK_TOO_MUCH);
    int fd = fake->region_fds[i];
    if (i == 1 && fake->fault == FAKE_CHUNK_SHORT) {
      fd = memory_of("short", region_bytes[i] - 4096);
    }
    send_chunk(fake, message->request, i, fd, region_bytes[i], chunk_bytes);
    if (fd != fake->region_fds[i]) {
      (void)close(fd);
    }
  }
  reply_result(fake, message->request, KVP_OK, "");
}

static void buffer_finish(const struct fake_attach *fake) {
  send_chunk(fake, fake->half_request, 0, fake->buffer_fd, fake->buffer_bytes, fake->buffer_bytes);
  reply_result(fake, fake->half_request, KVP_OK, "");
}

static void answer_buffer(struct fake_attach *fake, const struct kvp_fd_message *message) {
  struct kvp_attach_buffer body;
  memcpy(&body, message->body, sizeof body);
  if (message->kind == KVP_ATTACH_MAP_BUFFER && body.buffer_id != 5) {
    reply_result(fake, message->request, KVP_UNKNOWN_BUFFER, "no such buffer");
    return;
  }
  if (message->kind == KVP_ATTACH_CREATE_BUFFER) {
    if (fake->buffer_fd >= 0) {
      (void)close(fake->buffer_fd);
    }
    fake->buffer_fd = memory_of("buffer", body.bytes);
    fake->buffer_bytes = body.bytes;
  }
  const struct kvp_attach_buffer made = {
      .buffer_id = 5, .bytes = fake->buffer_bytes, .memory_bytes = fake->buffer_bytes};
  reply(fake, KVP_ATTACH_BUFFER, message->request, &made, sizeof made);
  fake->half_request = message->request;
  if (fake->fault != FAKE_BUFFER_HALF) {
    buffer_finish(fake);
  }
}

static void answer_import(struct fake_attach *fake, const struct kvp_fd_message *message) {
  memcpy(&fake->import, message->body, sizeof fake->import);
  if (fake->imported >= 0) {
    (void)close(fake->imported);
  }
  fake->imported = message->fd_count == 1 ? dup(message->fds[0]) : -1;
  const struct kvp_attach_buffer made = {.buffer_id = 6, .bytes = fake->import.bytes};
  reply(fake, KVP_ATTACH_BUFFER, message->request, &made, sizeof made);
  reply_result(fake, message->request, KVP_OK, "");
}

static void garbage_send(const struct fake_attach *fake) {
  must(send(fake->socket, "no message!!", 12, MSG_NOSIGNAL) == 12, "send");
}

static void answer_attach(struct fake_attach *fake, const struct kvp_fd_message *message) {
  must(message->body_bytes == sizeof fake->hello, "hello");
  memcpy(&fake->hello, message->body, sizeof fake->hello);
  fake->attach_count++;
  if (fake->fault == FAKE_REFUSES) {
    reply_result(fake, message->request, KVP_WRONG_SECRET, "the secret is not this session's");
  } else if (fake->fault == FAKE_HANGS_UP) {
    (void)shutdown(fake->socket, SHUT_RDWR);
  } else if (fake->fault == FAKE_GARBAGE) {
    garbage_send(fake);
  } else {
    welcome_send(fake, KVP_ATTACH_ATTACHED, message->request);
  }
}

static void answer(struct fake_attach *fake, const struct kvp_fd_message *message) {
  struct kvp_attach_buffer buffer;
  if (message->kind == KVP_ATTACH_ATTACH) {
    answer_attach(fake, message);
    return;
  }
  if (fake->fault == FAKE_SILENT) {
    return;
  }
  switch (message->kind) {
  case KVP_ATTACH_MAP_POOL:
    answer_pool(fake, message);
    break;
  case KVP_ATTACH_CREATE_BUFFER:
  case KVP_ATTACH_MAP_BUFFER:
    answer_buffer(fake, message);
    break;
  case KVP_ATTACH_IMPORT_BUFFER:
    answer_import(fake, message);
    break;
  case KVP_ATTACH_RELEASE_BUFFER:
    memcpy(&buffer, message->body, sizeof buffer);
    fake->released = buffer.buffer_id;
    fake->release_count++;
    reply_result(fake, message->request, KVP_OK, "");
    break;
  default:
    must(false, "a request that nobody knows");
  }
}

/* ---- the thread -------------------------------------------------------------------------------------------------
 */

/* The lock is held. */
static void peer_read(struct fake_attach *fake) {
  static struct kvp_fd_message message; /* one thread has it */
  enum kvp_status status = kvp_fd_socket_receive(fake->socket, &message);
  if (status == KVP_OK) {
    answer(fake, &message);
    kvp_fd_message_close_fds(&message);
    return;
  }
  (void)close(fake->socket);
  fake->socket = -1;
  fake->end_count++;
  pthread_cond_broadcast(&fake->changed);
}

static void *fake_thread(void *context) {
  struct fake_attach *fake = context;
  for (;;) {
    pthread_mutex_lock(&fake->lock);
    struct pollfd waited[3] = {{.fd = fake->stop, .events = POLLIN},
                               {.fd = fake->listener, .events = POLLIN},
                               {.fd = fake->socket, .events = POLLIN}};
    pthread_mutex_unlock(&fake->lock);
    (void)poll(waited, 3, -1);
    if (waited[0].revents != 0) {
      return NULL;
    }
    pthread_mutex_lock(&fake->lock);
    if (waited[2].revents != 0 && fake->socket >= 0) {
      peer_read(fake);
    }
    if (waited[1].revents != 0 && fake->socket < 0) {
      fake->socket = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC);
    }
    pthread_mutex_unlock(&fake->lock);
  }
}

void fake_start(struct fake_attach *fake) {
  *fake = (struct fake_attach){.socket = -1, .imported = -1, .buffer_fd = -1, .ring_fd = -1};
  (void)snprintf(fake->directory, sizeof fake->directory, "/tmp/kvpool-attach-XXXXXX");
  must(mkdtemp(fake->directory) != NULL, "mkdtemp");
  (void)snprintf(fake->path, sizeof fake->path, "%s/attach.sock", fake->directory);
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", fake->path);
  fake->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  must(bind(fake->listener, (const struct sockaddr *)&address, sizeof address) == 0 && listen(fake->listener, 4) == 0,
       "listen");
  fake->stop = eventfd(0, EFD_CLOEXEC);
  for (uint32_t i = 0; i < fake_region_count; i++) {
    fake->region_fds[i] = memory_of("region", region_bytes[i]);
  }
  pthread_mutex_init(&fake->lock, NULL);
  pthread_cond_init(&fake->changed, NULL);
  fake_make_executor(fake);
  must(pthread_create(&fake->thread, NULL, fake_thread, fake) == 0, "pthread_create");
}

void fake_stop(struct fake_attach *fake) {
  must(eventfd_write(fake->stop, 1) == 0, "stop");
  (void)pthread_join(fake->thread, NULL);
  executor_drop(fake);
  const int fds[] = {fake->stop,      fake->listener,      fake->socket,       fake->imported,
                     fake->buffer_fd, fake->region_fds[0], fake->region_fds[1]};
  for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
    if (fds[i] >= 0) {
      (void)close(fds[i]);
    }
  }
  (void)unlink(fake->path);
  must(rmdir(fake->directory) == 0, "rmdir");
  pthread_mutex_destroy(&fake->lock);
  pthread_cond_destroy(&fake->changed);
}

void fake_pause(struct fake_attach *fake) {
  pthread_mutex_lock(&fake->lock);
}

void fake_go_on(struct fake_attach *fake) {
  pthread_mutex_unlock(&fake->lock);
}

void fake_finish_buffer(struct fake_attach *fake) {
  pthread_mutex_lock(&fake->lock);
  buffer_finish(fake);
  pthread_mutex_unlock(&fake->lock);
}

uint32_t fake_release_count(struct fake_attach *fake) {
  pthread_mutex_lock(&fake->lock);
  const uint32_t count = fake->release_count;
  pthread_mutex_unlock(&fake->lock);
  return count;
}

void fake_wait_ended(struct fake_attach *fake, uint32_t count) {
  pthread_mutex_lock(&fake->lock);
  while (fake->end_count < count) {
    pthread_cond_wait(&fake->changed, &fake->lock);
  }
  pthread_mutex_unlock(&fake->lock);
}

/* ---- the executor -----------------------------------------------------------------------------------------------
 */

bool fake_take(struct fake_attach *fake, struct kvp_ring_record *record, void *payload, uint32_t payload_bytes_max) {
  enum kvp_lane_state state = kvp_lane_peek(&fake->ring.commands, record);
  must(state != KVP_LANE_CORRUPT, "the client's lane is corrupt");
  if (state == KVP_LANE_EMPTY) {
    return false;
  }
  must(record->payload_bytes <= payload_bytes_max, "a large command");
  kvp_lane_copy_payload(&fake->ring.commands, record, payload);
  kvp_lane_advance(&fake->ring.commands, record);
  return true;
}

void fake_complete(struct fake_attach *fake, enum kvp_completion_kind kind, uint64_t tag, const void *payload,
                   uint32_t bytes) {
  void *place = kvp_lane_reserve(&fake->ring.completions, bytes);
  must(place != NULL, "the completion lane is full");
  if (bytes > 0) {
    memcpy(place, payload, bytes);
  }
  if (kvp_lane_publish(&fake->ring.completions, kind, tag, bytes)) {
    const uint64_t one = 1;
    must(send(fake->completion_event[0], &one, sizeof one, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof one, "wake");
  }
}

void fake_done(struct fake_attach *fake, uint64_t tag, uint32_t reports) {
  struct kvp_wire_report made[8];
  assert(reports <= 8);
  memset(made, 0, sizeof made);
  for (uint32_t i = 0; i < reports; i++) {
    made[i].rows_stored = 100 * tag + i;
    made[i].finished_ns = 77;
    made[i].flags = i % 2 == 0 ? KVP_REPORT_UNCHECKED_ARRAYS : KVP_REPORT_HAZARD_UNCHECKED;
    made[i].main_kv_offset = 9;
  }
  fake_complete(fake, KVP_COMPLETION_DONE, tag, made, reports * (uint32_t)sizeof made[0]);
}

void fake_fail(struct fake_attach *fake, enum kvp_completion_kind kind, uint64_t tag, enum kvp_status status) {
  struct kvp_error error;
  (void)kvp_error_set_at(&error, status, 3, "slots", 5, -8, "op 3 store: slots[5] = -8");
  fake_complete(fake, kind, tag, &error, sizeof error);
}

/* ---- the supervisor ---------------------------------------------------------------------------------------------
 */

static void notice(struct fake_attach *fake, uint32_t kind, enum kvp_status status, const char *text) {
  struct kvp_error error = {.status = KVP_OK, .op = -1, .position = -1};
  if (status != KVP_OK) {
    (void)kvp_error_set(&error, status, "%s", text);
  }
  pthread_mutex_lock(&fake->lock);
  must(fake->socket >= 0, "nobody is attached");
  reply(fake, kind, 0, &error, sizeof error);
  pthread_mutex_unlock(&fake->lock);
}

void fake_tell_lost(struct fake_attach *fake, bool with_status) {
  for (uint32_t i = kvp_client_words; i < kvp_timeline_words; i++) {
    atomic_store(&fake->words[i].value, KVP_TIMELINE_POISON);
  }
  notice(fake, KVP_ATTACH_DEVICE_LOST, KVP_DEVICE_LOST, "the executor of host:0 died with signal 9");
  if (with_status) {
    __atomic_store_n(&fake->status->state, KVP_ATTACH_STATE_LOST, __ATOMIC_RELEASE);
  }
}

void fake_restore(struct fake_attach *fake) {
  fake_make_executor(fake);
  pthread_mutex_lock(&fake->lock);
  welcome_send(fake, KVP_ATTACH_DEVICE_RESTORED, 0);
  pthread_mutex_unlock(&fake->lock);
}

void fake_tell_ended(struct fake_attach *fake, enum kvp_status status, const char *text) {
  notice(fake, KVP_ATTACH_ENDED, status, text);
  __atomic_store_n(&fake->status->state, KVP_ATTACH_STATE_ENDED, __ATOMIC_RELEASE);
}

void fake_hang_up(struct fake_attach *fake) {
  pthread_mutex_lock(&fake->lock);
  (void)shutdown(fake->socket, SHUT_RDWR);
  pthread_mutex_unlock(&fake->lock);
}

void fake_send_garbage(struct fake_attach *fake) {
  pthread_mutex_lock(&fake->lock);
  garbage_send(fake);
  pthread_mutex_unlock(&fake->lock);
}
