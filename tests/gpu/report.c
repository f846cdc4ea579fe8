/* See report.h. */
#include "tests/gpu/report.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/gpu/gpu.h"

static char name[128];
static double began;

static void line(const char *outcome, const char *format, va_list arguments) {
  printf("%s %s %.2f s ", outcome, name, gpu_seconds() - began);
  (void)vprintf(format, arguments);
  printf("\n");
  (void)fflush(stdout);
}

void report_begin(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(name, sizeof(name), format, arguments);
  va_end(arguments);
  printf("[ RUN      ] %s\n", name);
  (void)fflush(stdout);
  began = gpu_seconds();
}

void report_passed(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  line("[       OK ]", format, arguments);
  va_end(arguments);
}

void report_skipped(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  line("[  SKIPPED ]", format, arguments);
  va_end(arguments);
}

void report_failed(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  line("[  FAILED  ]", format, arguments);
  va_end(arguments);
  exit(1);
}
