/* One stored record group by group, and what is odd about it. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_RECORD_CHECK_H
#define KVPOOL_CLIENT_KVPOOLCTL_RECORD_CHECK_H

#include "client/kvpoolctl/ctl.h"

enum { kvp_ctl_odd_bytes_max = 160 };

/* Elements that share a scale; of an unquantized record all of them. */
struct kvp_ctl_group {
  uint32_t first;
  uint32_t count;
  uint32_t scale_bits; /* as stored */
  float scale;
  float min; /* of the values that are numbers; NaN when none is */
  float max;
  uint32_t code_max; /* of the magnitudes, NaN codes left out */
  uint32_t nan_codes;
  bool is_zero;                    /* all codes 0 under the smallest scale: what a store makes of zeros */
  char odd[kvp_ctl_odd_bytes_max]; /* "" when nothing is */
};

uint32_t kvp_ctl_group_count(const kvpool_format_info *format);
void kvp_ctl_group_init(struct kvp_ctl_group *group, const kvpool_format_info *format, const kvpool_record *record,
                        uint32_t index);
/* All of the record in one line: a fill pattern, or the first oddity and how many groups have one. "" when none. */
void kvp_ctl_record_odd(const kvpool_format_info *format, const kvpool_record *record,
                        char out[kvp_ctl_odd_bytes_max]);

#endif
