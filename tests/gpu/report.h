/* Lines of a test program that has no framework, in the words of cmocka, so that they are counted alike. */
#ifndef KVPOOL_TESTS_GPU_REPORT_H
#define KVPOOL_TESTS_GPU_REPORT_H

/* Names the test that runs from here on. */
void report_begin(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* It passed; the text says what was seen, "" for nothing. */
void report_passed(const char *format, ...) __attribute__((format(printf, 1, 2)));
void report_skipped(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* It failed, and the program ends. */
void report_failed(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

#endif
