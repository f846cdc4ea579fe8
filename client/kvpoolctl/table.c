/* Tables by libsmartcols. Its calls fail for want of memory only, which ends the program. */
#include "client/kvpoolctl/table.h"

#include <assert.h>
#include <libsmartcols.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

enum { cell_bytes_max = 512, columns_max = 16, gap = 2 };

struct column {
  struct libscols_column *column;
  size_t width; /* the least it can be printed in */
  bool is_cut;
  bool is_optional;
};

struct kvp_ctl_table {
  const struct kvp_ctl_terminal *terminal;
  struct libscols_table *table;
  struct libscols_line *line; /* the last row */
  struct column columns[columns_max];
  size_t column_count;
  size_t filled; /* cells of that row */
};

static void check(int failed) {
  if (failed != 0) {
    (void)fputs("kvpoolctl: a table can't be made: out of memory\n", stderr);
    exit(KVP_CTL_FAILED);
  }
}

/* Cells of the terminal; a text that can't be decoded has as many as bytes. */
static size_t text_width(const char *text) {
  wchar_t wide[cell_bytes_max];
  size_t count = mbstowcs(wide, text, cell_bytes_max);
  int width = count == (size_t)-1 ? -1 : wcswidth(wide, count);
  return width < 0 ? strlen(text) : (size_t)width;
}

static void column_add(struct kvp_ctl_table *table, struct column *column, const char *name) {
  int flags = 0;
  column->is_optional = name[0] == '?';
  name += column->is_optional ? 1 : 0;
  if (name[0] == '>') {
    flags = SCOLS_FL_RIGHT;
    name++;
  } else if (name[0] == '~') {
    flags = SCOLS_FL_TRUNC;
    column->is_cut = true;
    name++;
  }
  column->width = text_width(name);
  column->column = scols_table_new_column(table->table, name, 0, flags);
  check(column->column == NULL);
  if (table->terminal->has_colors) {
    check(scols_cell_set_color(scols_column_get_header(column->column),
                               kvp_ctl_terminal_bare(kvp_ctl_terminal_role(table->terminal, KVP_CTL_BOLD))));
  }
}

/* Leaves out what may be left out until the rest fits. */
static void columns_fit(struct kvp_ctl_table *table) {
  size_t width = 0;
  for (size_t i = 0; i < table->column_count; i++) {
    width += table->columns[i].width + (i > 0 ? gap : 0);
  }
  for (size_t i = table->column_count; i-- > 0 && width > table->terminal->width;) {
    if (table->columns[i].is_optional) {
      width -= table->columns[i].width + gap;
      check(scols_column_set_flags(table->columns[i].column, SCOLS_FL_HIDDEN));
    }
  }
}

struct kvp_ctl_table *kvp_ctl_table_new(const struct kvp_ctl *ctl, const char *const *columns, size_t count) {
  assert(count <= columns_max);
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
    column_add(table, &table->columns[i], columns[i]);
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
  struct column *column = &table->columns[table->filled];
  size_t width = text_width(text);
  column->width = !column->is_cut && width > column->width ? width : column->width;
  struct libscols_cell *cell = scols_line_get_cell(table->line, table->filled++);
  check(scols_cell_set_data(cell, text));
  if (table->terminal->has_colors && role != KVP_CTL_PLAIN) {
    check(scols_cell_set_color(cell, kvp_ctl_terminal_bare(kvp_ctl_terminal_role(table->terminal, role))));
  }
}

void kvp_ctl_table_print(struct kvp_ctl_table *table) {
  assert(table->line == NULL || table->filled == table->column_count);
  if (table->terminal->is_limited) {
    columns_fit(table);
  }
  (void)fflush(stdout);
  check(scols_print_table(table->table));
  kvp_ctl_table_destroy(table);
}

void kvp_ctl_table_destroy(struct kvp_ctl_table *table) {
  scols_unref_table(table->table);
  free(table);
}
