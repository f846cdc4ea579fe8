/* libkvpool's inside: connection, calls and the objects on top of them.
 *
 * Threads. Each client has one library thread that waits in gRPC's completion queue and runs every completion;
 * callers only start batches and wait on condition variables. A call object is alive while somebody holds a
 * reference, and each batch in flight holds one: a late completion never meets freed memory. Locks are leaves, but
 * that a call's may be taken under its client's: no callback of the user runs while one is held.
 */
#ifndef KVPOOL_CLIENT_INTERNAL_H
#define KVPOOL_CLIENT_INTERNAL_H

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>
#include <protobuf-c/protobuf-c.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <time.h>

#include "client/include/kvpool/kvpool.h"
#include "kvpool.pb-c.h"
#include "proto/limits.h"
#include "proto/status.h"

enum {
  kvp_client_timeout_default_ms = 10000,
  kvp_client_receive_bytes_max = 256 << 20, /* an inspection of the widest records is the largest answer */
  kvp_client_reconnect_first_ms = 50,
  kvp_client_reconnect_max_ms = 1000,
  kvp_client_serving_poll_ms = 20,
  kvp_client_nap_first_ms = 20, /* between two looks whether there is still somebody to connect to */
  kvp_client_nap_max_ms = 640,
  kvp_client_give_up_ms = 200, /* how long what was cancelled may take to end before it is left behind */
  kvp_queue_steps_max = kvp_steps_in_flight_per_session_max,
  kvp_int32_bytes = 4
};

/* ---- errors: error.c ---- */

void kvp_error_fill(kvpool_error *error, kvpool_status status, const char *array, int64_t position, int64_t value,
                    const char *format, ...) __attribute__((format(printf, 6, 7)));

/* Fill *error (NULL is allowed) and are the status; macros, so that whoever reads `return kvp_fail(...)`, compilers
 * included, sees which. kvp_fail_at: about one element of an array. */
#define kvp_fail(error, status, ...) (kvp_error_fill((error), (status), "", -1, 0, __VA_ARGS__), (status))
#define kvp_fail_at(error, status, array, position, value, ...)                                                      \
  (kvp_error_fill((error), (status), (array), (position), (value), __VA_ARGS__), (status))
#define kvp_fail_no_memory(error) kvp_fail(error, KVPOOL_NO_MEMORY, "this process is out of memory")
/* In a child of a fork. what: which handle, made by process `pid`. */
#define kvp_fail_forked(error, what, pid)                                                                            \
  kvp_fail(error, KVPOOL_INVALID_ARGUMENT, "%s is of process %ld, no handle survives a fork", what, (long)(pid))
/* From the protocol's own detail. */
kvpool_status kvp_fail_detail(kvpool_error *error, const Kvpool__V1__ErrorDetail *detail);
/* From the daemon's own struct, as rings and the attach socket carry it. */
kvpool_status kvp_fail_wire(kvpool_error *error, const struct kvp_error *from);
/* From a call's gRPC status and trailing metadata. target: for the text. Not for an OK status. */
kvpool_status kvp_fail_grpc(kvpool_error *error, const char *method, const char *target, grpc_status_code code,
                            grpc_slice details, const grpc_metadata_array *trailing);

/* ---- messages: message.c ---- */

/* Bytes that grow and keep their memory. */
struct kvp_bytes {
  uint8_t *data;
  size_t size;
  size_t capacity;
};

/* Room for `more` bytes after size; false: no memory, nothing changed. */
bool kvp_bytes_reserve(struct kvp_bytes *bytes, size_t more);
/* A length-delimited field: its tag and length; the caller appends `length` bytes. Room is reserved for all of it. */
bool kvp_bytes_open_field(struct kvp_bytes *bytes, uint32_t field, size_t length);
bool kvp_bytes_append_message(struct kvp_bytes *bytes, uint32_t field, const ProtobufCMessage *message);
void kvp_bytes_deinit(struct kvp_bytes *bytes);

/* message packed, then tail (which may be NULL) behind it: fields of one message may stand in any order. */
grpc_byte_buffer *kvp_message_pack(const ProtobufCMessage *message, const struct kvp_bytes *tail);
/* NULL: malformed. */
ProtobufCMessage *kvp_message_unpack(grpc_byte_buffer *buffer, const ProtobufCMessageDescriptor *descriptor);

/* Reads protobuf fields straight from the slices of a message, so that big bytes fields are copied once. */
struct kvp_reader {
  grpc_byte_buffer_reader slices;
  grpc_slice slice;
  const uint8_t *at;
  const uint8_t *end;
  size_t left; /* bytes of the message not yet read, those of this slice included */
  bool has_slice;
};

enum { KVP_WIRE_VARINT = 0, KVP_WIRE_FIXED64 = 1, KVP_WIRE_BYTES = 2, KVP_WIRE_FIXED32 = 5 };

/* A field header. Wire type 0: value is its value. Wire type 2: value is its length, and the bytes come next. */
struct kvp_field {
  uint32_t number;
  uint32_t wire_type;
  uint64_t value;
};

bool kvp_reader_init(struct kvp_reader *reader, grpc_byte_buffer *buffer);
void kvp_reader_deinit(struct kvp_reader *reader);
/* False: malformed, or at the end (then left is 0). A fixed-width field's bytes are skipped already. */
bool kvp_reader_next_field(struct kvp_reader *reader, struct kvp_field *field);
/* out NULL: skips. False: fewer are left. */
bool kvp_reader_bytes(struct kvp_reader *reader, void *out, size_t bytes);

/* ---- connection: client.c ---- */

enum kvp_method {
  KVP_METHOD_GET_SERVER_INFO,
  KVP_METHOD_CREATE_POOL,
  KVP_METHOD_LIST_POOLS,
  KVP_METHOD_DESCRIBE_POOL,
  KVP_METHOD_DELETE_POOL,
  KVP_METHOD_OPEN_SESSION,
  KVP_METHOD_CLOSE_SESSION,
  KVP_METHOD_LIST_SESSIONS,
  KVP_METHOD_ALLOCATE_BLOCKS,
  KVP_METHOD_ALLOCATE_BLOCK_RANGE,
  KVP_METHOD_FREE_BLOCKS,
  KVP_METHOD_CREATE_BUFFER,
  KVP_METHOD_WRITE_BUFFER,
  KVP_METHOD_READ_BUFFER,
  KVP_METHOD_RELEASE_BUFFER,
  KVP_METHOD_STEPS,
  KVP_METHOD_RUN_STEP,
  KVP_METHOD_STORE_ROWS,
  KVP_METHOD_LOAD_ROWS,
  KVP_METHOD_LIST_BLOCKS,
  KVP_METHOD_INSPECT_RECORDS,
  KVP_METHOD_DUMP_BLOCKS,
  kvp_method_count
};

struct kvp_call;

struct kvpool_client {
  atomic_uint references;
  char target[128]; /* "unix:PATH" */
  pid_t pid;        /* whose it is */
  atomic_uint timeout_ms;
  size_t message_bytes_max; /* what the daemon said at connect */
  size_t chunk_bytes_max;
  kvpool_server_info *info; /* of connect: the format catalogue */
  grpc_channel *channel;
  grpc_completion_queue *completions;
  void *methods[kvp_method_count];
  pthread_t thread;
  atomic_uint handovers; /* batches so far: what a thread wrote before one, the library thread sees after it */
  pthread_mutex_t lock;  /* guards the rest */
  pthread_cond_t drained;
  bool closing;
  bool left_behind;       /* the library thread takes it down when the last call is gone */
  uint32_t abandoning;    /* calls whose owner is still to be told so */
  struct kvp_call *calls; /* every call that is not freed */
};

/* The timeout as it is now. */
uint32_t kvp_client_timeout_ms(const kvpool_client *client);

void kvp_client_ref(kvpool_client *client);
void kvp_client_unref(kvpool_client *client);
const char *kvp_client_path(const kvpool_client *client);
/* True on a library thread, where nothing may block. */
bool kvp_client_on_library_thread(void);
/* KVPOOL_INVALID_ARGUMENT from inside a callback. */
kvpool_status kvp_client_check_may_block(const char *what, kvpool_error *error);
/* False in a child of a fork: it has neither the library's thread nor gRPC's, and what its parent's locks guard may be
 * half done. */
bool kvp_client_is_ours(const kvpool_client *client);
/* KVPOOL_INVALID_ARGUMENT in a child of a fork. */
kvpool_status kvp_client_check_process(const kvpool_client *client, kvpool_error *error);
/* Whether the socket is listened on, by a connect(2) of our own: gRPC alone can't tell "nobody there" from "still
 * connecting". */
kvpool_status kvp_client_probe(const kvpool_client *client, kvpool_error *error);
/* Mutex and condition variable on CLOCK_MONOTONIC. */
void kvp_sync_init(pthread_mutex_t *lock, pthread_cond_t *condition);
void kvp_sync_deinit(pthread_mutex_t *lock, pthread_cond_t *condition);
struct timespec kvp_deadline_after(uint32_t timeout_ms);
bool kvp_deadline_passed(const struct timespec *deadline);
/* False: the deadline has passed. */
bool kvp_sync_wait(pthread_cond_t *condition, pthread_mutex_t *lock, const struct timespec *deadline);

/* ---- calls: call.c ---- */

/* What gRPC's completion queue hands back. */
struct kvp_tag {
  void (*run)(struct kvp_call *call, bool ok);
  struct kvp_call *call;
};

/* How an asynchronous call tells its owner. On the library thread, one at a time. */
struct kvp_call_events {
  /* A message has come; the callee's to destroy. The next one is asked for by kvp_call_receive. */
  void (*on_message)(void *object, grpc_byte_buffer *message);
  /* The message given to kvp_call_send is on its way; the next may be sent. NULL: not wanted. */
  void (*on_sent)(void *object);
  /* The call is over: once, last. Its reference to object ends here. */
  void (*on_closed)(void *object, struct kvp_call *call);
};

struct kvp_call {
  atomic_uint references;
  kvpool_client *client;
  enum kvp_method method;
  grpc_call *call;
  struct kvp_call *next, *previous; /* in client->calls */
  const struct kvp_call_events *events;
  void *object;
  struct kvp_tag sent, received, ended, given_up;
  uint32_t start_flags;
  atomic_bool abandoning; /* kvp_call_abandon was called */
  bool abandoned;         /* the library thread's: the owner was told the end, whatever gRPC still does */

  pthread_mutex_t lock; /* guards the flags below */
  pthread_cond_t changed;
  uint32_t batches; /* in flight */
  bool sending;
  bool receiving;
  bool interrupted; /* a blocking call that nobody waits for any more */
  bool over;        /* the status is here */
  bool closed;      /* and nothing is in flight any more */

  grpc_byte_buffer *outgoing; /* the receive and send batches' own until they complete */
  grpc_byte_buffer *incoming;
  grpc_metadata_array initial;
  grpc_metadata_array trailing;
  grpc_status_code code;
  grpc_slice details;
};

const char *kvp_method_name(enum kvp_method method);

/* events NULL: a blocking call, waited for with kvp_call_wait_*. Refused when nobody listens at the target. */
kvpool_status kvp_call_new(kvpool_client *client, enum kvp_method method, const struct kvp_call_events *events,
                           void *object, struct kvp_call **out, kvpool_error *error);
void kvp_call_ref(struct kvp_call *call);
void kvp_call_unref(struct kvp_call *call);
/* The whole call in one batch. Takes request. */
void kvp_call_start_unary(struct kvp_call *call, grpc_byte_buffer *request);
/* Sends the header, `first` (NULL: nothing yet) and, with `last`, the half-close; asks for the first message. */
void kvp_call_start_stream(struct kvp_call *call, grpc_byte_buffer *first, bool last);
/* One at a time. message NULL: only the half-close. False: the call is over; message is destroyed either way. */
bool kvp_call_send(struct kvp_call *call, grpc_byte_buffer *message, bool last);
bool kvp_call_receive(struct kvp_call *call);
void kvp_call_cancel(struct kvp_call *call);
/* For a call with events that was cancelled and doesn't end, because gRPC waits until the daemon takes what is being
 * sent: its owner is told the end now, KVPOOL_CANCELLED, on the library thread. The call itself ends when it can. */
void kvp_call_abandon(struct kvp_call *call);
/* Every call of the client, whose lock is held. */
void kvp_call_abandon_all(kvpool_client *client);
/* Every call of the client, whose lock is held, ends at once for whoever waits for it, KVPOOL_CANCELLED. */
void kvp_call_interrupt_all(kvpool_client *client);
/* Only after it closed. KVPOOL_OK when the call succeeded. */
kvpool_status kvp_call_error(const struct kvp_call *call, kvpool_error *error);

/* A wait for something that call brings about. */
struct kvp_patience {
  struct timespec deadline;
  uint32_t timeout_ms; /* for the text */
  uint32_t nap_ms;
};

struct kvp_patience kvp_patience_of(const kvpool_client *client);
/* Sleeps until changed is told, the lock being held. KVPOOL_OK: look again. Else there is no use in waiting:
 * KVPOOL_DEADLINE_EXCEEDED, KVPOOL_CANCELLED, or what the socket says of a daemon that a call waits to be connected
 * with. */
kvpool_status kvp_patience_wait(struct kvp_patience *patience, struct kvp_call *call, pthread_cond_t *changed,
                                pthread_mutex_t *lock, kvpool_error *error);

/* Blocking waits of at most the client's timeout; when it passes the call is cancelled (KVPOOL_DEADLINE_EXCEEDED). */
kvpool_status kvp_call_wait_sent(struct kvp_call *call, kvpool_error *error);
/* *out NULL: no further message; kvp_call_wait_closed tells why. */
kvpool_status kvp_call_wait_message(struct kvp_call *call, grpc_byte_buffer **out, kvpool_error *error);
kvpool_status kvp_call_wait_closed(struct kvp_call *call, kvpool_error *error);

/* A blocking unary call. *out is the caller's, by protobuf_c_message_free_unpacked. */
kvpool_status kvp_call_unary(kvpool_client *client, enum kvp_method method, const ProtobufCMessage *request,
                             const ProtobufCMessageDescriptor *response, ProtobufCMessage **out, kvpool_error *error);
/* The same for a request packed already; takes it. */
kvpool_status kvp_call_unary_packed(kvpool_client *client, enum kvp_method method, grpc_byte_buffer *request,
                                    const ProtobufCMessageDescriptor *response, ProtobufCMessage **out,
                                    kvpool_error *error);
/* A blocking server stream of BytesChunk, in order, into out: exactly `bytes` of them. */
kvpool_status kvp_call_collect(kvpool_client *client, enum kvp_method method, const ProtobufCMessage *request,
                               void *out, uint64_t bytes, kvpool_error *error);
/* "the daemon's answer to X can't be decoded". */
kvpool_status kvp_call_malformed(enum kvp_method method, kvpool_error *error);

/* ---- objects ---- */

/* Unchanged when the daemon tells none. */
void kvp_server_info_limits(const kvpool_server_info *info, size_t *message_bytes_max, size_t *chunk_bytes_max);

struct kvpool_session {
  atomic_uint references; /* the user, the stream, and each step, buffer and queue */
  kvpool_client *client;
  struct kvp_call *call;
  kvpool_session_event_fn on_event;
  void *context;
  uint64_t id;
  uint8_t secret[kvp_secret_bytes];
  _Atomic uint64_t epoch;

  pthread_mutex_t lock; /* guards the rest */
  pthread_cond_t changed;
  bool opened;
  bool closing;       /* by us: no more events */
  bool stream_closed; /* no callback runs any more */
  kvpool_error end;   /* status KVPOOL_OK while it lives */
};

void kvp_session_ref(kvpool_session *session);
void kvp_session_unref(kvpool_session *session);
/* KVPOOL_UNKNOWN_SESSION, with why, once it is over. */
kvpool_status kvp_session_check(kvpool_session *session, kvpool_error *error);
void kvp_session_saw_epoch(kvpool_session *session, uint64_t epoch);
/* The reference that calls carry; points into session. */
Kvpool__V1__SessionRef kvp_session_reference(kvpool_session *session);

struct kvpool_pool {
  kvpool_client *client; /* NULL: of an attachment */
  Kvpool__V1__Pool *message;
  kvpool_region_info *regions; /* [message->n_regions] */
};

/* What a call about this pool came to, as it is; the text of KVPOOL_UNKNOWN_POOL says what that means for the
 * handle. */
kvpool_status kvp_pool_explain(const kvpool_pool *pool, kvpool_status status, kvpool_error *error);
/* KVPOOL_UNKNOWN_REGION and _LAYER before anything is sent. */
kvpool_status kvp_layer_check(const kvpool_layer *layer, kvpool_error *error);
Kvpool__V1__RegionRef kvp_layer_reference(const kvpool_layer *layer);
/* Of a row of the layer's region, which has been checked. */
uint32_t kvp_layer_elements(const kvpool_layer *layer);

/* What an attachment has of a buffer: attach_buffer.c. */
struct kvp_attached_buffer;

struct kvpool_buffer {
  kvpool_session *session; /* NULL: of an attachment */
  uint64_t id;
  uint64_t bytes;
  struct kvp_attached_buffer *attached; /* NULL: of a session */
  char device[kvp_name_bytes_max];
};

/* kvpool_buffer_release and kvpool_buffer_data of an attachment's. */
kvpool_status kvp_attached_buffer_release(kvpool_buffer *buffer, kvpool_error *error);
void *kvp_attached_buffer_data(const kvpool_buffer *buffer);

/* A buffer that a step names. */
struct kvp_step_buffer {
  uint64_t id; /* 0: none */
  int32_t op;  /* -1: an array */
  char device[kvp_name_bytes_max];
};

struct kvpool_step {
  kvpool_session *session;       /* NULL: of an attachment */
  kvpool_attachment *attachment; /* NULL: of a session */
  size_t array_bytes_max;        /* of an inline array */
  char placement[kvp_name_bytes_max];
  struct kvp_bytes body; /* arrays and ops as they go on the wire of gRPC */
  uint32_t array_count;
  uint32_t op_count;
  uint32_t point_count;         /* waits and signals: for rings alone */
  struct kvp_bytes wire_ops;    /* struct kvp_wire_op[op_count]: the same ops as a ring takes them */
  struct kvp_bytes wire_arrays; /* struct kvp_wire_array[array_count]; of an inline one, where it stands in body */
  uint64_t inline_bytes;        /* what inline arrays take in a ring's step */
  struct kvp_step_buffer buffer_first;     /* that it names */
  struct kvp_step_buffer buffer_elsewhere; /* the first on another device than that one */
};

/* Remembered for kvp_step_check_device. op -1: an array. */
void kvp_step_name_buffer(kvpool_step *step, int32_t op, const kvpool_buffer *buffer);
/* KVPOOL_WRONG_DEVICE: the step names a buffer of another device. A ring's executor knows its own device's alone, and
 * could only say that there is no such buffer. */
kvpool_status kvp_step_check_device(const kvpool_step *step, const char *device, kvpool_error *error);

/* A StepRequest: the head that changes with every submit, and the step's body. with_session: name the session. */
kvpool_status kvp_step_pack(const kvpool_step *step, uint64_t step_id, bool with_session, grpc_byte_buffer **out,
                            kvpool_error *error);
void kvp_op_report_from(const Kvpool__V1__OpReport *from, kvpool_op_report *out);

/* ---- planners: plan_paged.c ---- */

/* The range is inside the table, and every entry it uses is a block. label: in front of the text. */
kvpool_status kvp_plan_check_range(const int32_t *block_table, size_t table_count, uint32_t tokens_per_block,
                                   int64_t token_begin, int64_t token_end, const char *label, kvpool_error *error);
size_t kvp_plan_range_segments(uint32_t tokens_per_block, int64_t token_begin, int64_t token_end);
/* Of a range that was checked, and whose destinations fit into int32. */
void kvp_plan_fill_range(const int32_t *block_table, uint32_t tokens_per_block, int64_t token_begin,
                         int64_t token_end, int32_t dst_begin, kvpool_segment *out);

#endif
