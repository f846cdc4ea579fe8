/* See bench_session.h. */
#include "tests/bench/bench_session.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void *bench_must(void *pointer, const char *what) {
  if (pointer) {
    return pointer;
  }
  (void)fprintf(stderr, "bench: %s\n", what);
  exit(1);
}

/* One request and its response. */
static void *call(struct bench_session *session, const char *method, const ProtobufCMessage *request,
                  const ProtobufCMessageDescriptor *response) {
  return bench_must(bench_client_call(session->client, method, request, response), "the daemon is gone");
}

static void wait_until_serving(struct bench_session *session) {
  for (;;) {
    bench_daemon_check(&session->daemon);
    Kvpool__V1__GetServerInfoRequest request = KVPOOL__V1__GET_SERVER_INFO_REQUEST__INIT;
    ProtobufCMessage *response =
        bench_client_call(session->client, "GetServerInfo", &request.base, &kvpool__v1__server_info__descriptor);
    session->info = (Kvpool__V1__ServerInfo *)response;
    if (response && session->info->devices[0]->state == KVPOOL__V1__DEVICE_STATE__DEVICE_SERVING) {
      return;
    }
    if (response) {
      protobuf_c_message_free_unpacked(response, NULL);
    }
    struct timespec pause = {.tv_nsec = 20000000};
    (void)nanosleep(&pause, NULL);
  }
}

static void create_pool(struct bench_session *session) {
  enum { formats_max = 16 };
  Kvpool__V1__RegionSpec regions[formats_max];
  Kvpool__V1__RegionSpec *region_list[formats_max];
  size_t count = session->info->n_formats;
  assert(count <= formats_max);
  for (size_t i = 0; i < count; i++) {
    kvpool__v1__region_spec__init(&regions[i]);
    regions[i].name = regions[i].format = session->info->formats[i]->name;
    regions[i].num_layers = 1;
    region_list[i] = &regions[i];
  }
  Kvpool__V1__PoolSpec spec = KVPOOL__V1__POOL_SPEC__INIT;
  spec.name = (char *)"bench";
  spec.block_size = bench_block_tokens;
  spec.num_blocks = bench_blocks;
  spec.n_regions = count;
  spec.regions = region_list;
  Kvpool__V1__CreatePoolRequest request = KVPOOL__V1__CREATE_POOL_REQUEST__INIT;
  request.spec = &spec;
  session->pool = call(session, "CreatePool", &request.base, &kvpool__v1__pool__descriptor);
}

static void open_session(struct bench_session *session) {
  Kvpool__V1__OpenSessionRequest request = KVPOOL__V1__OPEN_SESSION_REQUEST__INIT;
  request.name = (char *)"bench";
  session->stream = bench_call_start(session->client, "OpenSession");
  bench_call_send(session->stream, &request.base, true);
  session->opened =
      bench_must(bench_call_receive(session->stream, &kvpool__v1__session_event__descriptor), "no session");
}

Kvpool__V1__SessionRef *bench_session_ref(const struct bench_session *session) {
  return session->opened->opened->session;
}

/* All blocks, in random order with consecutive tokens: slots to store to and segments to load by. */
static void allocate(struct bench_session *session) {
  Kvpool__V1__AllocateBlocksRequest request = KVPOOL__V1__ALLOCATE_BLOCKS_REQUEST__INIT;
  request.session = bench_session_ref(session);
  request.pool_id = session->pool->pool_id;
  request.count = bench_blocks;
  session->granted =
      call(session, "AllocateBlocks", &request.base, &kvpool__v1__allocate_blocks_response__descriptor);
  int32_t blocks[bench_blocks];
  assert(session->granted->blocks.len == sizeof blocks);
  memcpy(blocks, session->granted->blocks.data, sizeof blocks);
  srand(1);
  for (int i = bench_blocks - 1; i > 0; i--) {
    int other = rand() % (i + 1);
    int32_t block = blocks[i];
    blocks[i] = blocks[other];
    blocks[other] = block;
  }
  for (int i = 0; i < bench_rows; i++) {
    session->slots[i] = blocks[i / bench_block_tokens] * bench_block_tokens + i % bench_block_tokens;
  }
  for (int i = 0; i < bench_blocks; i++) {
    session->segments[i][0] = blocks[i];
    session->segments[i][1] = 0;
    session->segments[i][2] = bench_block_tokens;
    session->segments[i][3] = i * bench_block_tokens;
  }
}

uint64_t bench_row_area_bytes(void) {
  return (uint64_t)bench_rows * bench_elements_max * 2;
}

/* Random finite BF16 near 1, so that no op takes a path for odd values. */
static void fill_rows(struct bench_session *session) {
  session->rows = bench_must(malloc(bench_row_area_bytes()), "out of memory");
  for (uint64_t i = 0; i < bench_row_area_bytes(); i += 2) {
    uint16_t value = (uint16_t)(0x3F00 + (rand() & 0x80FF));
    memcpy(session->rows + i, &value, sizeof value);
  }
}

static void create_buffer(struct bench_session *session) {
  Kvpool__V1__CreateBufferRequest request = KVPOOL__V1__CREATE_BUFFER_REQUEST__INIT;
  request.session = bench_session_ref(session);
  request.device = session->info->devices[0]->name;
  request.bytes = 2 * bench_row_area_bytes() + 16ULL * bench_rows;
  Kvpool__V1__Buffer *buffer = call(session, "CreateBuffer", &request.base, &kvpool__v1__buffer__descriptor);
  session->buffer_id = buffer->buffer_id;
  protobuf_c_message_free_unpacked(&buffer->base, NULL);

  struct bench_call *call = bench_call_start(session->client, "WriteBuffer");
  for (uint64_t offset = 0; offset < bench_row_area_bytes(); offset += bench_chunk_bytes) {
    Kvpool__V1__WriteBufferRequest piece = KVPOOL__V1__WRITE_BUFFER_REQUEST__INIT;
    piece.session = bench_session_ref(session);
    piece.buffer_id = session->buffer_id;
    piece.offset_bytes = offset;
    piece.data.data = session->rows + offset;
    piece.data.len = bench_chunk_bytes;
    bench_call_send(call, &piece.base, offset + bench_chunk_bytes >= bench_row_area_bytes());
  }
  ProtobufCMessage *written = bench_call_receive(call, &kvpool__v1__write_buffer_response__descriptor);
  bench_call_finish(call);
  protobuf_c_message_free_unpacked(bench_must(written, "WriteBuffer has no response"), NULL);
}

void bench_session_open(struct bench_session *session, const char *kvpoold_path, const char *executor_path,
                        const char *device) {
  bench_daemon_start_on(&session->daemon, kvpoold_path, executor_path, device);
  session->client = bench_client_new(session->daemon.socket_path);
  wait_until_serving(session);
  create_pool(session);
  open_session(session);
  allocate(session);
  fill_rows(session);
  create_buffer(session);
}

void bench_session_close(struct bench_session *session) {
  bench_call_cancel(session->stream);
  bench_call_finish(session->stream);
  bench_client_destroy(session->client);
  bench_daemon_stop(&session->daemon);
  protobuf_c_message_free_unpacked(&session->granted->base, NULL);
  protobuf_c_message_free_unpacked(&session->opened->base, NULL);
  protobuf_c_message_free_unpacked(&session->pool->base, NULL);
  protobuf_c_message_free_unpacked(&session->info->base, NULL);
  free(session->rows);
}
