/* CUDA backend: launchers of the ops in kernels/ops.h.
 *
 * Every pointer in a params struct is one that kernels can follow: device memory, or host memory that was registered.
 * Geometries are read on the host and copied into the launch. A launcher never allocates, never synchronises and
 * never fails for what a client asked; an error is one of CUDA itself. A row count of 0 launches nothing. The calling
 * thread's current device is the one that runs it, and kvp_cuda_kernels_load was called for it.
 *
 * Arithmetic: FORMATS sections 4 and 5, the same bytes as the host backend.
 */
#ifndef KVPOOL_KERNELS_CUDA_LAUNCH_H
#define KVPOOL_KERNELS_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of one row of a fused_store: what every GPU's shared memory holds. */
enum { kvp_cuda_fused_elements_max = 16384 };

/* What one op found out, in device memory: zero before the launch; kernels add to it and write started_ns.
 * Of a store, fused_store or load whose arrays were checked before, only rows_nonfinite and groups_saturated are
 * counted: the rest is known. A store with a gather index, or without slots, counts its cast-back rows as rows_loaded,
 * zeros among them as rows_zeroed. */
struct kvp_cuda_counts {
  uint64_t rows_stored;
  uint64_t rows_loaded; /* zero rows among them */
  uint64_t rows_zeroed;
  uint64_t rows_skipped;
  uint64_t rows_rejected;
  uint64_t rows_nonfinite;
  uint64_t groups_saturated;
  uint64_t rows_taken;  /* kvp_load_params.rows_taken points here */
  uint64_t started_ns;  /* the GPU's %globaltimer when the op's first block ran; 0: no kernel of ours ran */
  uint64_t blocks_done; /* of an op of a replay */
};

/* The same memory where it is a replay's own. */
struct kvp_cuda_replay_state {
  uint64_t failure; /* 0: none; the larger, the earlier the op */
  uint64_t value;   /* that the word had */
  uint64_t blocks_ended;
  uint64_t unused[5];
  uint64_t started_ns;
  uint64_t unused_too;
};

/* The end of a step: counts to the host and zero again, then the value to the timeline. */
struct kvp_cuda_signal {
  struct kvp_cuda_counts *counts; /* device, [op_count] */
  struct kvp_cuda_counts *found;  /* registered host memory, [op_count] */
  uint64_t *finished_ns;          /* registered host memory: %globaltimer */
  uint64_t *timeline;             /* registered host memory */
  uint64_t value;
  uint32_t op_count;
};

/* A value in the middle of a chain. */
struct kvp_cuda_point {
  uint64_t *word; /* registered host memory */
  uint64_t value;
};

/* Loads every kernel of this file for the current device, so that no launch has to. */
cudaError_t kvp_cuda_kernels_load(void);

cudaError_t kvp_cuda_store_launch(const struct kvp_store_params *params, struct kvp_cuda_counts *counts,
                                  cudaStream_t stream);
cudaError_t kvp_cuda_load_launch(const struct kvp_load_params *params, struct kvp_cuda_counts *counts,
                                 cudaStream_t stream);
/* Parts of an assemble that may run at once: none of them writes what another one reads or writes. */
struct kvp_cuda_assembly {
  const struct kvp_load_params *loads[2];  /* of main caches or bf16; NULL: none */
  const struct kvp_copy_rows_params *copy; /* NULL: none */
  const struct kvp_store_params *store;    /* into a main cache or bf16; NULL: none */
  struct kvp_cuda_counts *load_counts[2];  /* each part has its own */
  struct kvp_cuda_counts *copy_counts;
  struct kvp_cuda_counts *store_counts;
};
/* One launch, whatever there is. */
cudaError_t kvp_cuda_assemble_launch(const struct kvp_cuda_assembly *assembly, cudaStream_t stream);
/* Counted: rows_loaded, rows_zeroed and rows_rejected (entries of gather outside the source: zero rows, too). */
cudaError_t kvp_cuda_copy_rows_launch(const struct kvp_copy_rows_params *params, struct kvp_cuda_counts *counts,
                                      cudaStream_t stream);
/* Rows of at most kvp_cuda_fused_elements_max elements. */
cudaError_t kvp_cuda_fused_store_launch(const struct kvp_fused_store_params *params, struct kvp_cuda_counts *counts,
                                        cudaStream_t stream);
/* Ops [0, count), all at once: none of them writes what another reads or writes. Neighbours that differ in nothing but
 * pointers, strides, row counts, tables and eps are one launch; counts[i] is that of params[i]. */
cudaError_t kvp_cuda_fused_stores_launch(const struct kvp_fused_store_params *const *params,
                                         struct kvp_cuda_counts *const *counts, uint32_t count, cudaStream_t stream);

/* Of one launch: what its parameters have room for. */
enum { kvp_cuda_replay_ops_max = 128, kvp_cuda_replay_blocks_max = 8 };

/* Ops of a replay, or some of them: launches of one replay follow each other on a stream. Its few blocks wait on the
 * device, so that whom it waits for must run beside it: in this process, or in another one under MPS. It ends when the
 * deadline has passed or *abort has reached abort_value, whatever the words say. */
struct kvp_cuda_replay {
  const struct kvp_fused_store_params *ops; /* [op_count] */
  const struct kvp_replay_points *points;   /* [op_count] */
  struct kvp_cuda_counts *counts;           /* device, [op_count] */
  uint32_t op_count;                        /* at most kvp_cuda_replay_ops_max */
  uint32_t first_op;                        /* how many earlier launches had */
  struct kvp_cuda_counts *state;            /* device: zero before the first launch */
  const uint64_t *abort;                    /* registered host memory */
  uint64_t abort_value;
  uint64_t deadline_ns; /* of %globaltimer */
};
cudaError_t kvp_cuda_replay_launch(const struct kvp_cuda_replay *replay, cudaStream_t stream);
/* found: the replay's own. */
void kvp_cuda_replay_result(const struct kvp_cuda_counts *found, struct kvp_replay_result *out);

cudaError_t kvp_cuda_convert_index_launch(const struct kvp_convert_index_params *params,
                                          struct kvp_cuda_counts *counts, cudaStream_t stream);
cudaError_t kvp_cuda_swa_index_launch(const struct kvp_swa_index_params *params, struct kvp_cuda_counts *counts,
                                      cudaStream_t stream);
cudaError_t kvp_cuda_expand_index_launch(const struct kvp_expand_index_params *params, struct kvp_cuda_counts *counts,
                                         cudaStream_t stream);
cudaError_t kvp_cuda_cat_index_launch(const struct kvp_cat_index_params *params, struct kvp_cuda_counts *counts,
                                      cudaStream_t stream);
/* All units of the op: every layer of the region. */
cudaError_t kvp_cuda_copy_blocks_launch(const struct kvp_blocks_params *params, struct kvp_cuda_counts *counts,
                                        cudaStream_t stream);
cudaError_t kvp_cuda_zero_blocks_launch(const struct kvp_blocks_params *params, struct kvp_cuda_counts *counts,
                                        cudaStream_t stream);
/* Whoever sees the value sees everything that was launched on the stream before. */
cudaError_t kvp_cuda_signal_launch(const struct kvp_cuda_signal *signal, cudaStream_t stream);
/* Likewise, and nothing else. */
cudaError_t kvp_cuda_point_launch(const struct kvp_cuda_point *point, cudaStream_t stream);
/* Does nothing: what a launch costs at least. For benchmarks and clocks: writes %globaltimer when now_ns is not NULL. */
cudaError_t kvp_cuda_empty_launch(uint64_t *now_ns, cudaStream_t stream);

/* There is nothing on the stream: the next launch needs no preparation to begin early, which takes the CPU 0.3 us. A
 * launch behind others is right all the same, only later. Not while another thread launches. */
void kvp_cuda_launch_alone(void);

/* For tests: ops that have kernels for few rows and others for many get those that are named. */
enum kvp_cuda_size {
  KVP_CUDA_SIZE_AUTOMATIC, /* by what the op is about */
  KVP_CUDA_SIZE_FEW,
  KVP_CUDA_SIZE_MANY,
  KVP_CUDA_SIZE_MANY_NO_BULK, /* as on a device without bulk copies */
};
/* Of every launch of the process from the next on, and how many blocks it has at most (0: as many as it takes): warps of
 * a small grid go round on few rows. Not while another thread launches. */
void kvp_cuda_size_pin(enum kvp_cuda_size size, uint32_t blocks_max);

/* What the op's report says: `found` and what was known before. */
void kvp_cuda_store_counts(const struct kvp_store_params *params, const struct kvp_cuda_counts *found,
                           struct kvp_op_counts *out);
void kvp_cuda_load_counts(const struct kvp_load_params *params, const struct kvp_cuda_counts *found,
                          struct kvp_op_counts *out);
void kvp_cuda_copy_rows_counts(const struct kvp_copy_rows_params *params, const struct kvp_cuda_counts *found,
                               struct kvp_op_counts *out);
void kvp_cuda_fused_store_counts(const struct kvp_fused_store_params *params, const struct kvp_cuda_counts *found,
                                 struct kvp_op_counts *out);
void kvp_cuda_convert_index_counts(const struct kvp_convert_index_params *params, const struct kvp_cuda_counts *found,
                                   struct kvp_op_counts *out);
void kvp_cuda_swa_index_counts(const struct kvp_swa_index_params *params, const struct kvp_cuda_counts *found,
                               struct kvp_op_counts *out);
void kvp_cuda_expand_index_counts(const struct kvp_expand_index_params *params, const struct kvp_cuda_counts *found,
                                  struct kvp_op_counts *out);
void kvp_cuda_cat_index_counts(const struct kvp_cat_index_params *params, const struct kvp_cuda_counts *found,
                               struct kvp_op_counts *out);
void kvp_cuda_copy_blocks_counts(const struct kvp_blocks_params *params, const struct kvp_cuda_counts *found,
                                 struct kvp_op_counts *out);
void kvp_cuda_zero_blocks_counts(const struct kvp_blocks_params *params, const struct kvp_cuda_counts *found,
                                 struct kvp_op_counts *out);

#ifdef __cplusplus
}
#endif

#endif
