/* How a load is shared out among warps: what load.cu and assemble.cu have in common. */
#ifndef KVPOOL_KERNELS_CUDA_LOAD_CUH
#define KVPOOL_KERNELS_CUDA_LOAD_CUH

#include <stdint.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/layout.cuh"

namespace kvp {

struct load_share {
  load_cut cut;
  uint32_t blocks;
};

/* Nothing to do, and nothing to count: wrong segments are found by a kernel, whatever there is room for. */
inline bool load_is_empty(const kvp_load_params &params) {
  return params.segment_count == 0 || (params.check.entries == nullptr && params.rows == 0);
}

/* Pieces so small that all warps of the device get one, of `least` rows to `most`. The load has segments. */
load_share load_share_out(const kvp_load_params &params, uint64_t least, uint64_t most, uint64_t block_warps,
                          uint32_t resident_blocks);

} // namespace kvp

#endif
