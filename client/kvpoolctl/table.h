/* A table for people: columns aligned, coloured where the terminal has colours. */
#ifndef KVPOOL_CLIENT_KVPOOLCTL_TABLE_H
#define KVPOOL_CLIENT_KVPOOLCTL_TABLE_H

#include "client/kvpoolctl/ctl.h"

struct kvp_ctl_table;

/* columns: names; ">NAME" aligns right, "~NAME" may be cut where the terminal is too narrow. "?" in front of these:
 * the column is left out where it is narrower still, the last such column first. */
struct kvp_ctl_table *kvp_ctl_table_new(const struct kvp_ctl *ctl, const char *const *columns, size_t count);
void kvp_ctl_table_row(struct kvp_ctl_table *table);
/* The next cell of the row. */
void kvp_ctl_table_cell(struct kvp_ctl_table *table, enum kvp_ctl_role role, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Prints it, and frees it. */
void kvp_ctl_table_print(struct kvp_ctl_table *table);
void kvp_ctl_table_destroy(struct kvp_ctl_table *table);

#endif
