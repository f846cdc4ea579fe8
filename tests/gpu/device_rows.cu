/* See device_rows.h. Kernels walk their range with a stride of the whole grid, so that any grid will do. */
#include "tests/gpu/device_rows.h"

#include "tests/gpu/gpu.h"

namespace {

constexpr unsigned threads = 256;
constexpr uint64_t blocks_max = 8192;

unsigned blocks_for(uint64_t work) {
  uint64_t blocks = (work + threads - 1) / threads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > blocks_max ? blocks_max : blocks);
}

__device__ uint64_t work_first() {
  return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ uint64_t work_step() {
  return static_cast<uint64_t>(gridDim.x) * blockDim.x;
}

__device__ void differs(device_difference *difference, uint64_t index) {
  atomicAdd(&difference->count, 1ULL);
  atomicMax(&difference->inverse, ~0ULL - index);
}

/* Two elements at a time. */
__global__ void rows_make(kvp_rows rows, uint64_t row_count, uint32_t elements, uint64_t seed, uint64_t first_row) {
  uint64_t pairs = elements / 2;
  for (uint64_t work = work_first(); work < row_count * pairs; work += work_step()) {
    uint64_t row = work / pairs;
    uint32_t index = static_cast<uint32_t>(work % pairs) * 2;
    uint32_t low = row_element(seed, first_row + row, index);
    uint32_t high = row_element(seed, first_row + row, index + 1);
    uint8_t *to = rows.base + row * rows.stride_bytes + 2 * static_cast<uint64_t>(index);
    *reinterpret_cast<uint32_t *>(to) = high << 16 | low;
  }
}

__global__ void slots_make(device_population population, uint64_t first, uint64_t count, int32_t *slots,
                           kvp_segment *segments) {
  for (uint64_t work = work_first(); work < count; work += work_step()) {
    uint64_t slot = permute(first + work, population.slot_count, population.seed);
    int32_t block = static_cast<int32_t>(slot / population.tokens_per_block);
    int32_t token = static_cast<int32_t>(slot % population.tokens_per_block);
    slots[work] = static_cast<int32_t>(slot);
    segments[work] = {block, token, token + 1, static_cast<int32_t>(work)};
  }
}

__global__ void blocks_make(device_population population, uint64_t first, uint64_t count, kvp_segment *segments) {
  uint64_t blocks = population.slot_count / population.tokens_per_block;
  int32_t tokens = static_cast<int32_t>(population.tokens_per_block);
  for (uint64_t work = work_first(); work < count; work += work_step()) {
    int32_t block = static_cast<int32_t>(permute(first + work, blocks, population.seed + 1));
    segments[work] = {block, 0, tokens, static_cast<int32_t>(work) * tokens};
  }
}

__global__ void bytes_compare(const uint64_t *a, const uint64_t *b, uint64_t words, device_difference *difference) {
  for (uint64_t work = work_first(); work < words; work += work_step()) {
    if (a[work] != b[work]) {
      differs(difference, work);
    }
  }
}

__global__ void bytes_expect(const uint64_t *found, uint64_t expected, uint64_t words,
                             device_difference *difference) {
  for (uint64_t work = work_first(); work < words; work += work_step()) {
    if (found[work] != expected) {
      differs(difference, work);
    }
  }
}

/* What a record's address depends on. */
struct addressing {
  const uint8_t *base;
  uint64_t block_stride;
  uint64_t tokens;
  uint64_t data_bytes;
  uint64_t scale_bytes;
  bool interleaved;
};

__global__ void records_gather(addressing from, const int32_t *slots, uint64_t count, uint8_t *records) {
  uint64_t record_words = (from.data_bytes + from.scale_bytes) / 4;
  for (uint64_t work = work_first(); work < count * record_words; work += work_step()) {
    uint64_t slot = static_cast<uint64_t>(slots[work / record_words]);
    uint64_t at = work % record_words * 4;
    const uint8_t *block = from.base + slot / from.tokens * from.block_stride;
    uint64_t token = slot % from.tokens;
    const uint8_t *source;
    if (from.interleaved) {
      source = block + token * (from.data_bytes + from.scale_bytes) + at;
    } else if (at < from.data_bytes) {
      source = block + token * from.data_bytes + at;
    } else {
      source = block + from.tokens * from.data_bytes + token * from.scale_bytes + (at - from.data_bytes);
    }
    *reinterpret_cast<uint32_t *>(records + work * 4) = *reinterpret_cast<const uint32_t *>(source);
  }
}

/* Word by word: difference counts words of records. */
__global__ void index_compare(const uint32_t *records, const uint32_t *codes, const uint32_t *scales, uint64_t count,
                              uint32_t data_words, device_difference *difference) {
  uint64_t record_words = data_words + 1;
  for (uint64_t work = work_first(); work < count * record_words; work += work_step()) {
    uint64_t record = work / record_words;
    uint64_t at = work % record_words;
    uint32_t loaded = at < data_words ? codes[record * data_words + at] : scales[record];
    if (records[work] != loaded) {
      differs(difference, work);
    }
  }
}

__device__ uint64_t hash_row(const device_loaded &loaded, uint64_t row) {
  const uint64_t *words = reinterpret_cast<const uint64_t *>(loaded.rows + row * loaded.row_bytes);
  uint64_t hash = 1;
  for (uint32_t i = 0; i < loaded.row_bytes / 8; i++) {
    hash = mix_bits(hash + words[i]);
  }
  if (loaded.scale_bytes != 0) {
    hash = mix_bits(hash + *reinterpret_cast<const uint32_t *>(loaded.scales + row * loaded.scale_bytes));
  }
  return hash;
}

/* difference NULL: written down, else compared. */
__global__ void rows_hash(device_loaded loaded, const kvp_segment *segments, uint64_t count, uint32_t tokens,
                          uint64_t *hashes, device_difference *difference) {
  for (uint64_t work = work_first(); work < count; work += work_step()) {
    kvp_segment segment = segments[work];
    for (int32_t row = 0; row < segment.src_end - segment.src_begin; row++) {
      uint64_t slot =
          static_cast<uint64_t>(segment.src_block) * tokens + static_cast<uint64_t>(segment.src_begin + row);
      uint64_t hash = hash_row(loaded, static_cast<uint64_t>(segment.dst_offset + row));
      if (difference == nullptr) {
        hashes[slot] = hash;
      } else if (hashes[slot] != hash) {
        differs(difference, slot);
      }
    }
  }
}

__global__ void values_rewrite(int32_t *values, uint64_t count, const int32_t *choices, uint32_t choice_count,
                               uint64_t rounds, const volatile int32_t *stop) {
  for (uint64_t round = 0; round < rounds && *stop == 0; round++) {
    for (uint64_t work = work_first(); work < count; work += work_step()) {
      uint64_t pick = mix_bits(work * rounds + round) % choice_count;
      *static_cast<volatile int32_t *>(values + work) = choices[pick];
    }
  }
}

} // namespace

void device_rows_make(const kvp_rows *rows, uint64_t row_count, uint32_t elements, uint64_t seed, uint64_t first_row,
                      cudaStream_t stream) {
  rows_make<<<blocks_for(row_count * (elements / 2)), threads, 0, stream>>>(*rows, row_count, elements, seed,
                                                                            first_row);
  gpu_check(cudaGetLastError());
}

void device_slots_make(const device_population *population, uint64_t first, uint64_t count, int32_t *slots,
                       kvp_segment *segments, cudaStream_t stream) {
  slots_make<<<blocks_for(count), threads, 0, stream>>>(*population, first, count, slots, segments);
  gpu_check(cudaGetLastError());
}

void device_blocks_make(const device_population *population, uint64_t first, uint64_t count, kvp_segment *segments,
                        cudaStream_t stream) {
  blocks_make<<<blocks_for(count), threads, 0, stream>>>(*population, first, count, segments);
  gpu_check(cudaGetLastError());
}

void device_bytes_compare(const void *a, const void *b, uint64_t bytes, device_difference *difference,
                          cudaStream_t stream) {
  bytes_compare<<<blocks_for(bytes / 8), threads, 0, stream>>>(
      static_cast<const uint64_t *>(a), static_cast<const uint64_t *>(b), bytes / 8, difference);
  gpu_check(cudaGetLastError());
}

void device_bytes_expect(const void *bytes, uint8_t fill, uint64_t count, device_difference *difference,
                         cudaStream_t stream) {
  uint64_t expected = fill * UINT64_C(0x0101010101010101);
  bytes_expect<<<blocks_for(count / 8), threads, 0, stream>>>(static_cast<const uint64_t *>(bytes), expected,
                                                              count / 8, difference);
  gpu_check(cudaGetLastError());
}

void device_records_gather(const kvp_layer *layer, const int32_t *slots, uint64_t count, uint8_t *records,
                           cudaStream_t stream) {
  const kvp_geometry *geometry = layer->geometry;
  addressing from = {layer->base,
                     geometry->block_stride_bytes,
                     geometry->tokens_per_block,
                     geometry->sizes.data_bytes,
                     geometry->sizes.scale_bytes,
                     geometry->format->token_interleaved};
  records_gather<<<blocks_for(count * geometry->sizes.bytes_per_token / 4), threads, 0, stream>>>(from, slots, count,
                                                                                                  records);
  gpu_check(cudaGetLastError());
}

void device_index_compare(const uint8_t *records, const uint8_t *codes, const uint8_t *scales, uint64_t count,
                          uint32_t data_bytes, device_difference *difference, cudaStream_t stream) {
  index_compare<<<blocks_for(count * (data_bytes / 4 + 1)), threads, 0, stream>>>(
      reinterpret_cast<const uint32_t *>(records), reinterpret_cast<const uint32_t *>(codes),
      reinterpret_cast<const uint32_t *>(scales), count, data_bytes / 4, difference);
  gpu_check(cudaGetLastError());
}

void device_hashes_write(const device_loaded *loaded, const kvp_segment *segments, uint64_t count,
                         uint32_t tokens_per_block, uint64_t *hashes, cudaStream_t stream) {
  rows_hash<<<blocks_for(count), threads, 0, stream>>>(*loaded, segments, count, tokens_per_block, hashes, nullptr);
  gpu_check(cudaGetLastError());
}

void device_hashes_compare(const device_loaded *loaded, const kvp_segment *segments, uint64_t count,
                           uint32_t tokens_per_block, const uint64_t *hashes, device_difference *difference,
                           cudaStream_t stream) {
  rows_hash<<<blocks_for(count), threads, 0, stream>>>(*loaded, segments, count, tokens_per_block,
                                                       const_cast<uint64_t *>(hashes), difference);
  gpu_check(cudaGetLastError());
}

void device_values_rewrite(int32_t *values, uint64_t count, const int32_t *choices, uint32_t choice_count,
                           uint64_t rounds, const volatile int32_t *stop, cudaStream_t stream) {
  values_rewrite<<<8, threads, 0, stream>>>(values, count, choices, choice_count, rounds, stop);
  gpu_check(cudaGetLastError());
}
