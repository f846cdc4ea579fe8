/* An executor that keeps no memory and runs nothing: it answers as its device's name says, so that tests of the
 * supervisor's side can see every kind of end. Run as `fake_executor --device NAME --control-fd N`.
 *
 *   good    answers everything; a step is done at once, its payload is its own bytes
 *   mute    is ready and answers nothing
 *   exits   exits with status 7 before it is ready
 *   done    answers one step with done, then kills itself
 *   corrupt answers a step with a record that is none
 *   garbage answers a request with bytes that are no message
 *   fds     tells in its description which descriptors it was born with
 *   refuses refuses HELLO: there is no such device
 *   memfds  chunks are descriptors that no check of ours would pass, and it does not say so
 *   cuda:*  a GPU of 80 GiB, 8 of them in use by others, that counts in 2 MiB; chunks are a driver's descriptors.
 *           cuda:5 has no memory of more than 1 GiB, whatever is free.
 *           Every start that finds the file $FAKE_EXECUTOR_BUSY refuses HELLO as busy, with the file's first line; one
 *           that finds $FAKE_EXECUTOR_REFUSED, as if there were no such GPU. $FAKE_EXECUTOR_FREE: how many GiB are free,
 *           with none of its own memories.
 *
 * What it does with a worker's ring says $FAKE_EXECUTOR_RINGS: takes it (without), or
 *   refuse  refuses it
 *   die     kills itself
 *   late    answers when it is to be detached, and not before
 *   fail    takes it, and says at once that there is nonsense in it and in another one that nobody knows
 */
#include <dirent.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/control_wire.h"
#include "proto/fd_socket.h"
#include "proto/ring.h"
#include "proto/step_wire.h"

enum { control = 3, small_chunk_bytes = 4096, granularity_bytes = 2 << 20, refusal_bytes_max = 256 };

static const uint64_t gib = UINT64_C(1) << 30;

static const char *mode;
static struct kvp_fd_message message;
static struct kvp_ring ring;
static int wake_supervisor = -1;
static uint32_t imported;     /* chunks of the import under way */
static uint32_t ring_request; /* of the ring that is answered late; 0: none */
static struct {
  uint64_t id;
  uint64_t bytes;
} made[64]; /* memories */

static bool mode_is(const char *name) {
  return strcmp(mode, name) == 0;
}

static bool is_gpu(void) {
  return strncmp(mode, "cuda:", sizeof "cuda:" - 1) == 0;
}

static void fail(const char *what) {
  (void)fprintf(stderr, "fake_executor: %s\n", what);
  exit(9);
}

static void reply(uint32_t kind, uint32_t request, const void *body, uint32_t body_bytes, const int *fds,
                  uint32_t fd_count) {
  if (kvp_fd_socket_send(control, kind, request, body, body_bytes, fds, fd_count) != KVP_OK) {
    exit(0);
  }
}

static void reply_result(uint32_t request, enum kvp_status status, const char *text) {
  struct kvp_error error;
  (void)kvp_error_set(&error, status, "%s", text);
  if (request != 0) {
    reply(KVP_CONTROL_RESULT, request, &error, sizeof error, NULL, 0);
  }
}

static void describe_fds(char *out, size_t out_bytes) {
  DIR *directory = opendir("/proc/self/fd");
  const struct dirent *entry = NULL;
  out[0] = '\0';
  while (directory != NULL && (entry = readdir(directory)) != NULL) {
    int fd = atoi(entry->d_name); /* NOLINT(cert-err34-c): "." and ".." are 0, like /dev/null */
    if (fd > 0 && fd != dirfd(directory)) {
      size_t used = strlen(out);
      (void)snprintf(out + used, out_bytes - used, "%d ", fd);
    }
  }
  if (directory != NULL) {
    (void)closedir(directory);
  }
}

/* The first line of the file that the environment names; false: there is none. */
static bool line_of(const char *variable, char *out) {
  const char *path = getenv(variable);
  FILE *file = path == NULL ? NULL : fopen(path, "re");
  if (file == NULL) {
    return false;
  }
  bool there = fgets(out, refusal_bytes_max, file) != NULL;
  (void)fclose(file);
  out[strcspn(out, "\n")] = '\0';
  return there;
}

static uint64_t gpu_free_bytes(void) {
  char text[refusal_bytes_max];
  uint64_t free_bytes = (line_of("FAKE_EXECUTOR_FREE", text) ? strtoull(text, NULL, 10) : 72) * gib;
  for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
    free_bytes -= made[i].bytes < free_bytes ? made[i].bytes : free_bytes;
  }
  return free_bytes;
}

/* id 0 with no bytes: a place that is empty. */
static void made_set(uint64_t id, uint64_t to_id, uint64_t bytes) {
  for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
    if (made[i].id == id) {
      made[i].id = to_id;
      made[i].bytes = (bytes + granularity_bytes - 1) / granularity_bytes * granularity_bytes;
      return;
    }
  }
}

static void ready_fill(struct kvp_control_ready *ready, const char *description) {
  *ready = (struct kvp_control_ready){.version = KVP_CONTROL_VERSION,
                                      .pid = (uint32_t)getpid(),
                                      .memory_bytes = 1234,
                                      .memory_free_bytes = 1000,
                                      .memory_granularity_bytes = 1};
  if (is_gpu()) {
    ready->memory_bytes = 80 * gib;
    ready->memory_free_bytes = gpu_free_bytes();
    ready->memory_granularity_bytes = granularity_bytes;
    ready->flags = KVP_READY_MPS | KVP_READY_DEVICE_FDS;
    (void)snprintf(ready->driver, sizeof ready->driver, "1.2.3, CUDA 4.5");
    description = "a GPU that is none";
  }
  (void)snprintf(ready->description, sizeof ready->description, "%s", description);
}

/* As kvpool-exec does it: the refusal is the last thing that is heard of it. */
static void refuse(enum kvp_status status, const char *text) {
  reply_result(message.request, status, text);
  exit(2);
}

static void hello(const char *description) {
  if (kvp_fd_socket_receive(control, &message) != KVP_OK || message.kind != KVP_CONTROL_HELLO ||
      message.fd_count != 3 || message.body_bytes != sizeof(struct kvp_control_hello)) {
    fail("no hello");
  }
  struct kvp_control_hello body;
  memcpy(&body, message.body, sizeof body);
  bool is_unit_test = !is_gpu(); /* a daemon has paths of its own */
  if (strcmp(body.device, mode) != 0 ||
      (is_unit_test && (strcmp(body.socket_path, "/socket") != 0 || strcmp(body.lock_path, "/lock") != 0 ||
                        strcmp(body.attach_socket_path, "/workers") != 0 ||
                        strcmp(body.attach_lock_path, "/workers.lock") != 0 || body.thread_count != 3))) {
    fail("a wrong hello");
  }
  char text[refusal_bytes_max];
  if (is_gpu() && line_of("FAKE_EXECUTOR_BUSY", text)) {
    refuse(KVP_BUSY, text);
  }
  if (is_gpu() && line_of("FAKE_EXECUTOR_REFUSED", text)) {
    refuse(KVP_INVALID_ARGUMENT, text);
  }
  if (mode_is("refuses")) {
    refuse(KVP_WRONG_DEVICE, "there is no GPU 7");
  }
  if (kvp_ring_init(&ring, message.fds[0], KVP_RING_EXECUTOR, NULL) != KVP_OK) {
    fail("a bad ring");
  }
  wake_supervisor = message.fds[2];
  struct kvp_control_ready ready;
  ready_fill(&ready, description);
  reply(KVP_CONTROL_READY, 0, &ready, sizeof ready, NULL, 0);
}

static int chunk_create(const struct kvp_control_memory *memory, uint64_t bytes) {
  int fd = is_gpu() || mode_is("memfds") ? eventfd(0, EFD_CLOEXEC) : kvp_memory_fd_create(memory->name, bytes, NULL);
  if (fd < 0) {
    fail("no chunk");
  }
  return fd;
}

/* One chunk a page, or a GiB of a GPU; as many messages as that takes. */
static void memory_create(const struct kvp_control_memory *memory, uint32_t request) {
  const uint64_t chunk_bytes = is_gpu() ? gib : small_chunk_bytes;
  struct kvp_control_chunks chunks = {.memory_id = memory->memory_id,
                                      .memory_bytes = memory->bytes,
                                      .chunk_count = (uint32_t)((memory->bytes + chunk_bytes - 1) / chunk_bytes)};
  while (chunks.first_chunk < chunks.chunk_count) {
    int fds[kvp_control_fds_max];
    uint32_t count = 0;
    while (count < kvp_control_fds_max && chunks.first_chunk + count < chunks.chunk_count) {
      fds[count] = chunk_create(memory, chunk_bytes);
      chunks.chunk_bytes[count] = chunk_bytes;
      count++;
    }
    reply(KVP_CONTROL_MEMORY_CHUNKS, request, &chunks, sizeof chunks, fds, count);
    for (uint32_t i = 0; i < count; i++) {
      (void)close(fds[i]);
    }
    chunks.first_chunk += count;
  }
  reply_result(request, KVP_OK, "");
}

static void memory_import(const struct kvp_control_chunks *chunks, uint32_t request) {
  imported = chunks->first_chunk == 0 ? 0 : imported;
  for (uint32_t i = 0; i < message.fd_count; i++) {
    bool is_good = is_gpu() || kvp_memory_fd_check(message.fds[i], chunks->chunk_bytes[i], NULL) == KVP_OK;
    if (chunks->first_chunk != imported || !is_good) {
      reply_result(request, KVP_INTERNAL, "a bad chunk");
    }
  }
  imported += message.fd_count;
  if (imported == chunks->chunk_count) {
    char text[32];
    (void)snprintf(text, sizeof text, "%u chunks", imported);
    reply_result(request, KVP_OK, text);
  }
}

static bool rings_are(const char *what) {
  const char *asked = getenv("FAKE_EXECUTOR_RINGS");
  return asked != NULL && strcmp(asked, what) == 0;
}

static void ring_fail(uint64_t attachment_id) {
  struct kvp_control_ring_failed failed = {.attachment_id = attachment_id};
  (void)kvp_error_set(&failed.error, KVP_MALFORMED, "nonsense in ring %llu", (unsigned long long)attachment_id);
  reply(KVP_CONTROL_RING_FAILED, 0, &failed, sizeof failed, NULL, 0);
}

static void ring_attach(const struct kvp_control_ring *asked, uint32_t request) {
  if (rings_are("die")) {
    (void)kill(getpid(), SIGKILL);
  } else if (rings_are("late")) {
    ring_request = request;
  } else if (rings_are("refuse")) {
    reply_result(request, KVP_BUSY, "no room for a ring");
  } else {
    reply_result(request, KVP_OK, "");
    if (rings_are("fail")) {
      ring_fail(asked->attachment_id + 1000);
      ring_fail(asked->attachment_id);
    }
  }
}

static void ring_detach(uint32_t request) {
  reply_result(ring_request, KVP_OK, ""); /* no request is numbered 0 */
  ring_request = 0;
  reply_result(request, KVP_OK, "");
}

static void handle(void) {
  if (mode_is("garbage") && message.request != 0) {
    (void)send(control, "garbage", 7, 0);
  } else if (mode_is("mute")) {
    return;
  } else if (message.kind == KVP_CONTROL_MEMORY_LOOK) {
    const struct kvp_control_free body = {.memory_free_bytes = is_gpu() ? gpu_free_bytes() : 1000};
    reply(KVP_CONTROL_MEMORY_FREE, message.request, &body, sizeof body, NULL, 0);
  } else if (message.kind == KVP_CONTROL_MEMORY_CREATE) {
    struct kvp_control_memory memory;
    memcpy(&memory, message.body, sizeof memory);
    if (mode_is("cuda:5") && memory.bytes > gib) {
      char text[64];
      (void)snprintf(text, sizeof text, "%llu bytes asked for", (unsigned long long)memory.bytes);
      reply_result(message.request, KVP_OUT_OF_MEMORY, text);
    } else {
      memory_create(&memory, message.request);
      made_set(0, memory.memory_id, memory.bytes);
    }
  } else if (message.kind == KVP_CONTROL_MEMORY_DESTROY) {
    struct kvp_control_memory memory;
    memcpy(&memory, message.body, sizeof memory);
    made_set(memory.memory_id, 0, 0);
    reply_result(message.request, KVP_OK, "");
  } else if (message.kind == KVP_CONTROL_MEMORY_IMPORT) {
    struct kvp_control_chunks chunks;
    memcpy(&chunks, message.body, sizeof chunks);
    memory_import(&chunks, message.request);
  } else if (message.kind == KVP_CONTROL_RING_ATTACH) {
    struct kvp_control_ring asked;
    memcpy(&asked, message.body, sizeof asked);
    ring_attach(&asked, message.request);
  } else if (message.kind == KVP_CONTROL_RING_DETACH) {
    ring_detach(message.request);
  } else {
    reply_result(message.request, KVP_OK, "");
  }
}

static void complete(uint32_t kind, uint64_t tag, const void *payload, uint32_t bytes) {
  void *place = kvp_lane_reserve(&ring.completions, bytes);
  if (place == NULL) {
    fail("no room for a completion");
  }
  memcpy(place, payload, bytes);
  if (kvp_lane_publish(&ring.completions, kind, tag, bytes)) {
    const uint64_t one = 1;
    ssize_t written = write(wake_supervisor, &one, sizeof one);
    (void)written;
  }
}

static void serve_commands(void) {
  struct kvp_ring_record record;
  static uint8_t payload[kvp_step_bytes_max];
  while (!mode_is("mute") && kvp_lane_peek(&ring.commands, &record) == KVP_LANE_RECORD) {
    kvp_lane_copy_payload(&ring.commands, &record, payload);
    kvp_lane_advance(&ring.commands, &record);
    if (mode_is("corrupt")) {
      ring.completions.position += 10; /* ten records that were never written */
    }
    bool is_fence = record.kind == KVP_COMMAND_FENCE;
    complete(is_fence ? KVP_COMPLETION_FENCED : KVP_COMPLETION_DONE, record.tag, payload, record.payload_bytes);
    if (mode_is("done")) {
      (void)kill(getpid(), SIGKILL);
    }
  }
}

int main(int argc, char **argv) {
  char description[kvp_note_bytes_max];
  if (argc != 5 || strcmp(argv[1], "--device") != 0 || strcmp(argv[3], "--control-fd") != 0 ||
      strcmp(argv[4], "3") != 0) {
    fail("wrong arguments");
  }
  mode = argv[2];
  describe_fds(description, sizeof description);
  if (mode_is("exits")) {
    return 7;
  }
  hello(description);
  for (;;) {
    serve_commands();
    ssize_t there = recv(control, description, 1, MSG_PEEK | MSG_DONTWAIT);
    if (there < 0) {
      (void)usleep(200); /* a fake needs no better way to wait for two things */
      continue;
    }
    if (kvp_fd_socket_receive(control, &message) != KVP_OK) {
      return 0;
    }
    handle();
    kvp_fd_message_close_fds(&message);
  }
}
