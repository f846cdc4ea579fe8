/* See case_file.h. */
#include "tests/contract/case_file.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { path_bytes_max = 1024 };

static __attribute__((noreturn, format(printf, 1, 2))) void die(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vfprintf(stderr, format, arguments);
  va_end(arguments);
  (void)fputc('\n', stderr);
  exit(1);
}

static uint64_t element_bytes(const char *type) {
  static const struct {
    const char *name;
    uint64_t bytes;
  } types[] = {{"uint8", 1}, {"uint16", 2}, {"int32", 4}, {"float32", 4}};
  for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
    if (strcmp(types[i].name, type) == 0) {
      return types[i].bytes;
    }
  }
  die("unknown array type %s", type);
}

static uint64_t parse_number(const char *text, char **end) {
  return strtoull(text, end, 0);
}

/* "3x65536" or "27"; *rows is the first dimension. */
static uint64_t parse_shape(const char *text, uint64_t *rows) {
  char *rest;
  *rows = parse_number(text, &rest);
  uint64_t count = *rows;
  while (*rest == 'x') {
    count *= parse_number(rest + 1, &rest);
  }
  if (*rest != '\0') {
    die("bad shape %s", text);
  }
  return count;
}

static void read_array(const char *directory, struct case_array *array) {
  char path[path_bytes_max];
  (void)snprintf(path, sizeof(path), "%s/%s.bin", directory, array->name);
  FILE *file = fopen(path, "rb");
  if (file == NULL) {
    die("can't open %s", path);
  }
  array->data = malloc(array->bytes + 1);
  if (array->data == NULL) {
    die("out of memory");
  }
  if (fread(array->data, 1, array->bytes + 1, file) != array->bytes) {
    die("%s is not %llu bytes long", path, (unsigned long long)array->bytes);
  }
  (void)fclose(file);
}

static void read_line(const char *directory, const char *line, struct case_file *out) {
  char name[case_text_bytes_max];
  char type[case_text_bytes_max];
  char shape[case_text_bytes_max];
  if (sscanf(line, "param %63s %63s", name, type) == 2) {
    if (out->param_count == case_entries_max) {
      die("%s: too many parameters", directory);
    }
    struct case_param *param = &out->params[out->param_count++];
    memcpy(param->name, name, sizeof(name));
    memcpy(param->value, type, sizeof(type));
  } else if (sscanf(line, "array %63s %63s %63s", name, type, shape) == 3) {
    if (out->array_count == case_entries_max) {
      die("%s: too many arrays", directory);
    }
    struct case_array *array = &out->arrays[out->array_count++];
    memcpy(array->name, name, sizeof(name));
    array->bytes = parse_shape(shape, &array->rows) * element_bytes(type);
    read_array(directory, array);
  } else if (strspn(line, " \r\n") != strlen(line)) {
    die("%s/case.txt: bad line %s", directory, line);
  }
}

void case_file_read(const char *directory, struct case_file *out) {
  *out = (struct case_file){0};
  char path[path_bytes_max];
  (void)snprintf(path, sizeof(path), "%s/case.txt", directory);
  FILE *file = fopen(path, "r");
  if (file == NULL) {
    die("can't open %s", path);
  }
  char line[4 * case_text_bytes_max];
  while (fgets(line, sizeof(line), file) != NULL) {
    read_line(directory, line, out);
  }
  (void)fclose(file);
}

void case_file_free(struct case_file *file) {
  for (size_t i = 0; i < file->array_count; i++) {
    free(file->arrays[i].data);
  }
  *file = (struct case_file){0};
}

const char *case_file_param(const struct case_file *file, const char *name) {
  for (size_t i = 0; i < file->param_count; i++) {
    if (strcmp(file->params[i].name, name) == 0) {
      return file->params[i].value;
    }
  }
  die("no parameter %s", name);
}

uint64_t case_file_number(const struct case_file *file, const char *name) {
  char *rest;
  const char *text = case_file_param(file, name);
  uint64_t number = parse_number(text, &rest);
  if (rest == text || *rest != '\0') {
    die("parameter %s = %s is no number", name, text);
  }
  return number;
}

const struct case_array *case_file_find(const struct case_file *file, const char *name) {
  for (size_t i = 0; i < file->array_count; i++) {
    if (strcmp(file->arrays[i].name, name) == 0) {
      return &file->arrays[i];
    }
  }
  return NULL;
}

const struct case_array *case_file_array(const struct case_file *file, const char *name) {
  const struct case_array *array = case_file_find(file, name);
  if (array == NULL) {
    die("no array %s", name);
  }
  return array;
}
