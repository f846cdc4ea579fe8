/* Tables by libsmartcols. Its calls fail for want of memory only, which ends the program. */
#include "client/kvpoolctl/table.h"

#include <assert.h>
#include <libsmartcols.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { cell_bytes_max = 512 };

struct kvp_ctl_table {
  const struct kvp_ctl_terminal *terminal;
  struct libscols_table *table;
  struct libscols_line *line; /* the last row */
  size_t column_count;
  size_t filled; /* cells of that row */
};

static void check(int failed) {
  if (failed != 0) {
    (void)fputs("kvpoolctl: a table can't be made: out of memory\n", stderr);
    exit(KVP_CTL_FAILED);
  }
}

static void column_add(struct kvp_ctl_table *table, const char *name) {
  int flags = 0;
  if (name[0] == '>') {
    flags = SCOLS_FL_RIGHT;
    name++;
  } else if (name[0] == '~') {
    flags = SCOLS_FL_TRUNC;
    name++;
  }
  struct libscols_column *column = scols_table_new_column(table->table, name, 0, flags);
  check(column == NULL);
  if (table->terminal->has_colors) {
    check(scols_cell_set_color(scols_column_get_header(column),
                               kvp_ctl_terminal_role(table->terminal, KVP_CTL_BOLD)));
  }
}

struct kvp_ctl_table *kvp_ctl_table_new(const struct kvp_ctl *ctl, const char *const *columns, size_t count) {
  struct kvp_ctl_table *table = kvp_ctl_allocate(1, sizeof *table);
  table->terminal = &ctl->terminal;
  table->table = scols_new_table();
  check(table->table == NULL);
  table->column_count = count;
  check(scols_table_enable_colors(table->table, ctl->terminal.has_colors));
  check(scols_table_set_column_separator(table->table, "  "));
  check(scols_table_set_termforce(table->table,
                                  ctl->terminal.is_limited ? SCOLS_TERMFORCE_ALWAYS : SCOLS_TERMFORCE_NEVER));
  check(scols_table_set_termwidth(table->table, ctl->terminal.width));
  for (size_t i = 0; i < count; i++) {
    column_add(table, columns[i]);
  }
  return table;
}

void kvp_ctl_table_row(struct kvp_ctl_table *table) {
  assert(table->line == NULL || table->filled == table->column_count);
  table->line = scols_table_new_line(table->table, NULL);
  check(table->line == NULL);
  table->filled = 0;
}

void kvp_ctl_table_cell(struct kvp_ctl_table *table, enum kvp_ctl_role role, const char *format, ...) {
  assert(table->filled < table->column_count);
  char text[cell_bytes_max];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  struct libscols_cell *cell = scols_line_get_cell(table->line, table->filled++);
  check(scols_cell_set_data(cell, text));
  if (table->terminal->has_colors && role != KVP_CTL_PLAIN) {
    check(scols_cell_set_color(cell, kvp_ctl_terminal_role(table->terminal, role)));
  }
}

void kvp_ctl_table_print(struct kvp_ctl_table *table) {
  assert(table->line == NULL || table->filled == table->column_count);
  (void)fflush(stdout);
  check(scols_print_table(table->table));
  scols_unref_table(table->table);
  free(table);
}
