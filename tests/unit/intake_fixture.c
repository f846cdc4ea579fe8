/* The fixture of tests of intake alone. */
#include "tests/unit/intake_fixture.h"

#include <stdlib.h>
#include <string.h>

#include "proto/owner_entry.h"

static void region_init(struct kvp_region *region, uint8_t *base, uint32_t tokens_per_block) {
  region->base = base;
  assert_int_equal(kvp_geometry_init(kvp_format_get(KVP_FORMAT_BF16), row / 2, tokens_per_block, blocks + 1, layers,
                                     &region->geometry, NULL),
                   KVP_OK);
}

void fixture_init(struct intake_fixture *world) {
  memset(world, 0, sizeof *world);
  world->intake = (struct kvp_intake){.objects = &world->objects, .completion_bytes_max = 1 << 20};
  for (uint32_t i = 0; i <= blocks; i++) {
    world->owners[i] = kvp_owner_entry_make(1, KVP_BLOCK_LEASED, i < blocks ? session : other_session);
  }
  world->memory = malloc(64);
  assert_non_null(world->memory);
  for (uint32_t p = 0; p < pools; p++) {
    struct kvp_pool *pool = &world->pool[p];
    *pool = (struct kvp_pool){.id = 1 + p,
                              .kind = 1 + p == ring_pool ? KVP_POOL_RING : KVP_POOL_PAGED,
                              .num_blocks = blocks + 1,
                              .region_count = 1 + p == paged_pool ? 2 : 1,
                              .owner_entries = world->owners,
                              .device_owner_entries = world->device_owners};
    region_init(&pool->regions[0], world->memory + ((uint64_t)(1 + 2 * p) << 32), ring_tokens);
    region_init(&pool->regions[1], world->memory + ((uint64_t)(2 + 2 * p) << 32), fine_tokens);
    assert_int_equal(kvp_objects_add_pool(&world->objects, pool, NULL), KVP_OK);
  }
  for (uint32_t i = 0; i < 2; i++) {
    world->buffers[i] = (struct kvp_buffer){.id = 1 + i,
                                            .base = world->memory + ((uint64_t)i << 28),
                                            .bytes = 1 << 24,
                                            .owner = 1 + i == own_buffer ? session : other_session};
    assert_int_equal(kvp_objects_add_buffer(&world->objects, &world->buffers[i], NULL), KVP_OK);
  }
}

void fixture_deinit(struct intake_fixture *world) {
  kvp_id_table_deinit(&world->objects.pools);
  kvp_id_table_deinit(&world->objects.buffers);
  kvp_intake_deinit(&world->intake);
  assert_int_equal(world->steps.use.count, 0);
  kvp_step_pool_deinit(&world->steps);
  free(world->memory);
}

struct kvp_step *fixture_check(struct intake_fixture *world, struct step_encoder *encoder, struct kvp_error *error) {
  uint32_t bytes = 0;
  uint8_t *encoded = step_encoder_encode(encoder, &bytes);
  struct kvp_step *step = kvp_step_new(&world->steps, bytes);
  assert_non_null(step);
  memcpy(step->wire, encoded, bytes);
  free(encoded);
  step_encoder_deinit(encoder);
  *error = (struct kvp_error){0};
  error->status = (int32_t)kvp_intake_check(&world->intake, step, error);
  return step;
}

struct kvp_wire_view rows_at(uint64_t buffer, uint64_t place, uint64_t rows) {
  return step_view(buffer, place * place_bytes, rows, row, row);
}
