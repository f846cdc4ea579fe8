/* Random latents as BF16 rows, and how far what a v41 region gives back is from them. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_LATENTS_H
#define KVPOOL_CLIENT_KVPOOLCTL_LATENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Normally distributed, each group of 32 with a spread of its own, so that scales differ. out: [count]. */
void kvp_ctl_latents_fill(uint16_t *out, size_t count, uint64_t *seed);

struct kvp_ctl_difference {
  double relative_l2;    /* |loaded - source| / |source| over all elements */
  double bound_used_max; /* largest |difference|, in parts of what e4m3 and the group's scale allow; more than 1:
                            wrong */
  size_t element;        /* where that is */
};

/* Both [count], count a multiple of 32. */
void kvp_ctl_latents_compare(const uint16_t *source, const uint16_t *loaded, size_t count,
                             struct kvp_ctl_difference *out);

#endif
