/* fused_store: which kernel is launched, for how many ops at once, and how wide. See fused_store_kernel.cuh. */
#include <assert.h>
#include <math.h>

#include "kernels/cuda/fused_store_kernel.cuh"
#include "kernels/cuda/fused_store_wide_kernel.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/prepare.cuh"

namespace kvp {

constexpr int batch_ops_max = 64; /* a kernel's parameters are at most 32764 bytes */
static_assert(sizeof(fused_batch<batch_ops_max>) <= 32764, "ops of one launch");

struct fused_entry {
  void (*one)(const fused_batch<1>);
  void (*several)(const fused_batch<batch_ops_max>);
  kernel_facts facts_one[devices_max];
  kernel_facts facts_several[devices_max];
};

template <class format, bool counted, bool cast_back> constexpr fused_entry fusing() {
  return fused_entry{fused_store_kernel<format, 1, counted, cast_back>,
                     fused_store_kernel<format, batch_ops_max, counted, cast_back>,
                     {},
                     {}};
}
template <bool counted, bool cast_back> constexpr fused_entry fusing_wide() {
  return fused_entry{fused_store_wide_kernel<1, counted, cast_back>,
                     fused_store_wide_kernel<batch_ops_max, counted, cast_back>,
                     {},
                     {}};
}

#define KVP_FUSING(format, cast_back)                                                                                \
  { fusing<format, false, cast_back>(), fusing<format, true, cast_back>() }

/* [format][cast-back][the kernel counts rows]; index caches have no cast-back. */
static fused_entry entries[kvp_format_count][2][2] = {
    {KVP_FUSING(format_v41, false), KVP_FUSING(format_v41, true)},
    {KVP_FUSING(format_v41_fp4, false), KVP_FUSING(format_v41_fp4, true)},
    {KVP_FUSING(format_index_fp4, false)},
    {KVP_FUSING(format_index_fp8_f32, false)},
    {KVP_FUSING(format_index_mxfp8, false)},
    {{fusing_wide<false, false>(), fusing_wide<true, false>()},
     {fusing_wide<false, true>(), fusing_wide<true, true>()}},
};
static_assert(KVP_FORMAT_V41 == 0 && KVP_FORMAT_V41_FP4 == 1 && KVP_FORMAT_INDEX_FP4 == 2 &&
                  KVP_FORMAT_INDEX_FP8_F32 == 3 && KVP_FORMAT_INDEX_MXFP8 == 4 && KVP_FORMAT_BF16 == 5,
              "the table is in catalogue order");

/* Rows in shared memory may take more than what a block gets without asking. */
template <class kernel_fn> static cudaError_t prepare(kernel_fn *kernel, bool wide, int device, kernel_facts *facts) {
  cudaError_t error = cudaSuccess;
  if (wide) {
    error = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)wide_shared_bytes(kvp_cuda_fused_elements_max));
  }
  if (error != cudaSuccess) {
    return error;
  }
  return kernel_facts_find((const void *)kernel, wide ? wide_threads_max : fused_threads, device, facts);
}

cudaError_t fused_store_prepare(int device) {
  fused_entry *all = &entries[0][0][0];
  fused_entry *wide = &entries[KVP_FORMAT_BF16][0][0];
  for (fused_entry *entry = all; entry < all + sizeof(entries) / sizeof(fused_entry); entry++) {
    if (entry->one == nullptr) {
      continue;
    }
    cudaError_t error = prepare(entry->one, entry >= wide, device, &entry->facts_one[device]);
    if (error == cudaSuccess) {
      error = prepare(entry->several, entry >= wide, device, &entry->facts_several[device]);
    }
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

/* What was checked before was counted before. */
static bool kernel_counts(const kvp_fused_store_params &params) {
  return params.store.check.entries != nullptr || !params.positions_checked;
}

static fused_args make_args(const kvp_fused_store_params &params, kvp_cuda_counts *counts) {
  uint32_t elements = params.store.layer.geometry->sizes.elements;
  assert((elements & (elements - 1)) == 0 && elements >= 8 && elements <= kvp_cuda_fused_elements_max);
  assert(params.store.gather == nullptr);
  return fused_args{layer_layout::make(params.store.layer),
                    params.store.source,
                    params.store.cast_back,
                    params.store.slots,
                    params.positions,
                    params.norm_weight,
                    params.cos_sin,
                    params.store.row_count,
                    params.position_count,
                    params.store.check,
                    counts,
                    elements,
                    params.rotary_dims,
                    params.rope_offset,
                    params.eps,
                    1.0f / (float)elements,
                    1.0f / sqrtf((float)elements),
                    params.flags};
}

/* Same kernel, same shape of its blocks. */
static bool go_together(const kvp_fused_store_params &a, const kvp_fused_store_params &b) {
  const kvp_geometry &left = *a.store.layer.geometry;
  const kvp_geometry &right = *b.store.layer.geometry;
  return left.format->id == right.format->id && left.sizes.elements == right.sizes.elements &&
         has_cast_back(a.store) == has_cast_back(b.store) && kernel_counts(a) == kernel_counts(b);
}

/* Blocks for the longest op, as many of all as the device holds: a warp keeps the weights from row to row. */
static uint32_t blocks_of(const kvp_geometry &geometry, uint64_t rows_max, uint32_t ops, uint32_t resident_blocks) {
  uint64_t rows = fused_warps; /* of a block at a time */
  if (geometry.format->id == KVP_FORMAT_BF16) {
    rows = 1;
  } else if (geometry.sizes.elements == (uint32_t)format_index_fp4::elements) {
    rows *= format_index_fp4::rows_per_pass;
  }
  uint64_t blocks = divide_up(rows_max, rows);
  uint64_t most = divide_up(resident_blocks, ops);
  return launched_blocks(blocks, most);
}

/* Ops that go together, each of one row at least. */
static cudaError_t launch_together(const kvp_fused_store_params *const *params, kvp_cuda_counts *const *counts,
                                   uint32_t count, int device, cudaStream_t stream) {
  const kvp_fused_store_params &first = *params[0];
  const kvp_geometry &geometry = *first.store.layer.geometry;
  bool wide = geometry.format->id == KVP_FORMAT_BF16;
  const fused_entry &entry = entries[geometry.format->id][has_cast_back(first.store)][kernel_counts(first)];
  const kernel_facts &facts = count == 1 ? entry.facts_one[device] : entry.facts_several[device];
  assert(facts.resident_blocks > 0); /* kernels were loaded */
  uint32_t threads = wide ? wide_threads(geometry.sizes.elements) : fused_threads;
  uint32_t shared_bytes = wide ? wide_shared_bytes(geometry.sizes.elements) : 0;
  if (count == 1) {
    fused_batch<1> batch = {{make_args(first, counts[0])}};
    dim3 blocks(blocks_of(geometry, first.store.row_count, 1, facts.resident_blocks));
    return launch_chained(entry.one, facts, blocks, threads, shared_bytes, stream, batch);
  }
  fused_batch<batch_ops_max> batch = {};
  uint64_t rows_max = 0;
  for (uint32_t i = 0; i < count; i++) {
    batch.of[i] = make_args(*params[i], counts[i]);
    rows_max = params[i]->store.row_count > rows_max ? params[i]->store.row_count : rows_max;
  }
  dim3 blocks(blocks_of(geometry, rows_max, count, facts.resident_blocks), count);
  return launch_chained(entry.several, facts, blocks, threads, shared_bytes, stream, batch);
}

} // namespace kvp

extern "C" cudaError_t kvp_cuda_fused_stores_launch(const struct kvp_fused_store_params *const *params,
                                                    struct kvp_cuda_counts *const *counts, uint32_t count,
                                                    cudaStream_t stream) {
  using namespace kvp;
  int device;
  cudaError_t error = cudaGetDevice(&device);
  uint32_t done = 0;
  while (done < count && error == cudaSuccess) {
    if (params[done]->store.row_count == 0) {
      done++;
      continue;
    }
    uint32_t end = done + 1;
    while (end < count && end - done < batch_ops_max && params[end]->store.row_count != 0 &&
           go_together(*params[done], *params[end])) {
      end++;
    }
    error = launch_together(params + done, counts + done, end - done, device, stream);
    done = end;
  }
  return error;
}

extern "C" cudaError_t kvp_cuda_fused_store_launch(const struct kvp_fused_store_params *params,
                                                   struct kvp_cuda_counts *counts, cudaStream_t stream) {
  return kvp_cuda_fused_stores_launch(&params, &counts, 1, stream);
}

extern "C" void kvp_cuda_fused_store_counts(const struct kvp_fused_store_params *params,
                                            const struct kvp_cuda_counts *found, struct kvp_op_counts *out) {
  const kvp_store_params &store = params->store;
  const kvp_format_sizes &sizes = store.layer.geometry->sizes;
  *out = kvp_op_counts{};
  if (kvp::kernel_counts(*params)) {
    out->rows_skipped = found->rows_skipped;
    out->rows_stored = found->rows_stored;
    out->rows_rejected = found->rows_rejected;
  } else {
    out->rows_skipped = store.rows_skipped;
    out->rows_stored = store.row_count - store.rows_skipped;
  }
  out->rows_nonfinite = found->rows_nonfinite;
  out->groups_saturated = found->groups_saturated;
  uint64_t cast_back = kvp::has_cast_back(store) ? out->rows_stored + out->rows_skipped : 0;
  out->bytes_read = (cast_back != 0 ? cast_back : out->rows_stored) * sizes.row_bytes;
  out->bytes_written = out->rows_stored * sizes.bytes_per_token + cast_back * sizes.row_bytes;
}
