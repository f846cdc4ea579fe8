/* See replay_case.h. */
#include "tests/bench/replay_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { slots_max = 1024 };

static uint64_t random_state = 88172645463325252U;

static uint32_t random_below(uint32_t limit) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)((random_state >> 32) % limit);
}

/* Between -2 and 2, never 0. */
static uint16_t random_bf16(void) {
  return (uint16_t)((random_below(2) << 15) | (0x3C00 + random_below(0x400)));
}

void replay_case_slots(int32_t *out, uint32_t count, uint32_t limit) {
  const uint32_t step = limit / count;
  const uint32_t first = random_below(limit);
  for (uint32_t i = 0; i < count; i++) {
    out[i] = (int32_t)((first + i * step + random_below(step)) % limit);
  }
}

static void *device_copy(const void *host, uint64_t bytes) {
  void *out = NULL;
  REPLAY_CHECK(cudaMalloc(&out, bytes));
  REPLAY_CHECK(cudaMemcpy(out, host, bytes, cudaMemcpyHostToDevice));
  return out;
}

static void inputs_fill(uint8_t *inputs) {
  uint8_t *host = malloc(replay_case_inputs_bytes);
  if (host == NULL) {
    exit(1);
  }
  uint16_t *numbers = (uint16_t *)(void *)host;
  for (uint32_t i = 0; i < replay_case_table_offset / 2; i++) {
    numbers[i] = random_bf16();
  }
  float *table = (float *)(void *)(host + replay_case_table_offset);
  for (uint32_t i = 0; i < replay_case_positions * replay_case_rotary / 2; i++) {
    const float angle = (float)random_below(1 << 16) / 1024.0F;
    const uint32_t at = i / (replay_case_rotary / 2) * replay_case_rotary + i % (replay_case_rotary / 2);
    table[at] = cosf(angle);
    table[at + replay_case_rotary / 2] = sinf(angle);
  }
  REPLAY_CHECK(cudaMemcpy(inputs, host, replay_case_inputs_bytes, cudaMemcpyHostToDevice));
  free(host);
}

void replay_case_init(struct replay_case *it, uint8_t *inputs) {
  int32_t slots[slots_max], positions[slots_max];
  *it = (struct replay_case){.inputs = inputs};
  inputs_fill(inputs);
  if (kvp_geometry_init(kvp_format_get(KVP_FORMAT_V41), 512, replay_case_tokens, replay_case_blocks,
                        replay_graph_layers, &it->geometry, NULL) != KVP_OK) {
    exit(1);
  }
  replay_case_slots(slots, slots_max, replay_case_blocks * replay_case_tokens);
  for (uint32_t i = 0; i < slots_max; i++) {
    positions[i] = (int32_t)random_below(replay_case_positions);
  }
  it->slots = device_copy(slots, sizeof slots);
  it->positions = device_copy(positions, sizeof positions);
  REPLAY_CHECK(cudaMalloc((void **)&it->region, it->geometry.region_bytes));
  REPLAY_CHECK(cudaMemset(it->region, 0, it->geometry.region_bytes));
  REPLAY_CHECK(cudaMalloc((void **)&it->counts, (1 + replay_graph_layers) * sizeof *it->counts));
  REPLAY_CHECK(cudaMemset(it->counts, 0, (1 + replay_graph_layers) * sizeof *it->counts));
  for (uint32_t layer = 0; layer < replay_graph_layers; layer++) {
    it->ops[layer] = (struct kvp_fused_store_params){
        .store = {.layer = {it->region + layer * it->geometry.layer_stride_bytes, &it->geometry},
                  .source = {inputs + (uint64_t)layer * replay_case_rows * replay_case_row_bytes,
                             replay_case_row_bytes},
                  .slots = it->slots,
                  .row_count = replay_case_rows},
        .norm_weight = (const uint16_t *)(const void *)(inputs + replay_case_weight_offset),
        .positions = it->positions,
        .cos_sin = {inputs + replay_case_table_offset, replay_case_rotary * sizeof(float)},
        .position_count = replay_case_positions,
        .rotary_dims = replay_case_rotary,
        .rope_offset = replay_case_elements - replay_case_rotary,
        .eps = 1e-6F,
        .flags = KVP_FUSED_ROUND_TO_BF16,
        .positions_checked = true,
        .rows_are_known = true,
    };
  }
}

void replay_case_deinit(struct replay_case *it) {
  REPLAY_CHECK(cudaFree(it->slots));
  REPLAY_CHECK(cudaFree(it->positions));
  REPLAY_CHECK(cudaFree(it->region));
  REPLAY_CHECK(cudaFree(it->counts));
}

void replay_case_launch(struct replay_case *it, uint32_t layer, uint32_t rows, cudaStream_t stream) {
  struct kvp_fused_store_params op = it->ops[layer];
  op.store.row_count = rows;
  REPLAY_CHECK(kvp_cuda_fused_store_launch(&op, &it->counts[1 + layer], stream));
}
