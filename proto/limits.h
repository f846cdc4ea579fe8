/* Every limit of the system. Sizes of queues are written as the sum of who uses them. */
#ifndef KVPOOL_PROTO_LIMITS_H
#define KVPOOL_PROTO_LIMITS_H

enum {
  kvp_protocol_version = 1, /* of kvpool.proto; client and daemon must agree */

  /* gRPC messages */
  kvp_message_bytes_max = 4 << 20,                         /* one request */
  kvp_message_arena_bytes_max = 4 * kvp_message_bytes_max, /* what unpacking one may allocate */
  kvp_chunk_bytes_max = 1 << 20,                           /* one piece of a buffer or of inline rows */
  kvp_secret_bytes = 16,

  /* names */
  kvp_name_bytes_max = 64, /* pools, regions, devices, sessions, namespaces; terminating NUL included */
  kvp_note_bytes_max = 256,

  /* pools */
  kvp_pools_max = 64,
  kvp_regions_per_pool_max = 16,
  kvp_layers_per_region_max = 1024,
  kvp_devices_max = 16,            /* of one daemon */
  kvp_host_device_index_max = 255, /* host:255 */
  kvp_cuda_device_index_max = 63,  /* cuda:63: tables of kernels have an entry for each */
  kvp_format_width_max = 65536,    /* elements of a bf16 record */

  /* sessions */
  kvp_sessions_max = 1024, /* the configuration may lower it; owner entries have room for 65535 */
  kvp_queues_per_session_max = 16,
  kvp_calls_per_session_max = 64,            /* that run steps without a stream, a queue each; one more is `busy` */
  kvp_steps_in_flight_per_session_max = 256, /* accepted or waiting; one more is `busy` */
  kvp_step_bytes_in_flight_per_session_max = 64 << 20,
  kvp_buffers_per_session_max = 1024,
  /* Addresses of an executor at which workers' GPU memory is mapped, an allocation as a whole for each buffer of it. A
   * process has 128 TiB. */
  kvp_import_address_gib_per_session_max = 8 << 10,
  kvp_import_address_gib_per_device_max = 64 << 10,

  /* steps */
  kvp_ops_per_step_max = 1024,
  kvp_device_ops_per_step_max =
      5 * kvp_ops_per_step_max, /* an assemble is up to four, a copy one a region, a signal one more */
  kvp_arrays_per_step_max = 1024,
  kvp_step_elements_checked_max =
      8 << 20, /* of its arrays, once for each pool and block size: bounds a check's time */
  kvp_inspect_records_max = 1024,
  kvp_queues_per_executor_max = 4096, /* open step streams of one device, and one for each call without one */
  kvp_queues_for_operators = 64,      /* of them, never a session's */

  /* Of the supervisor's ring; all workers together have half as much beside it. More stay in their ring. */
  kvp_executor_steps_max = 16384,          /* accepted and not reported */
  kvp_executor_step_bytes_max = 512 << 20, /* memory of those steps */

  /* one ring */
  kvp_ring_commands = 4096,                /* power of two */
  kvp_ring_command_arena_bytes = 64 << 20, /* >= 2 steps of the largest size */
  kvp_ring_completions = 8192,             /* power of two; two a command: accepted, done */
  kvp_ring_completion_arena_bytes = 16 << 20,
  kvp_step_bytes_max = 8 << 20, /* one encoded step: arrays of one message, and its ops */

  /* attachments: workers on this host, a ring each */
  kvp_attachments_max = 256,
  kvp_attachments_per_session_max = 64,
  kvp_greetings_max = 256,        /* connections whose ATTACH has not come */
  kvp_greetings_per_uid_max = 64, /* of them; as many as a session's workers may come at a time */
  kvp_worker_ring_commands = 1024,
  kvp_worker_ring_command_arena_bytes = 8 << 20, /* a step is at most half of it */
  kvp_worker_ring_completions = 2048,
  kvp_worker_ring_completion_arena_bytes = 4 << 20,
  kvp_wait_deadline_ms_max = 30000, /* of a wait for a timeline, unless the configuration lowers it */

  /* control messages */
  kvp_control_fds_max = 64, /* in one message */
  kvp_packet_fds_max = 253, /* the kernel's limit: what a peer with other ideas can send at once */
  kvp_control_body_bytes_max = 16384,
  kvp_chunks_per_memory_max = 4096, /* fds of one region: 4 TiB */
  kvp_chunk_memory_bytes = 1 << 30, /* size of one memory chunk */
};

#endif
