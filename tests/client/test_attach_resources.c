/* What attachments of libkvpool take, and give back: buffers whose answer comes too late, descriptors, maps. Against a
 * daemon's end in this process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/client/check.h"
#include "tests/client/fake_attach.h"

enum { timeout_ms = 60000 };

static struct fake_attach fake;
static kvpool_error error;

static kvpool_attach_options options_of(uint32_t timeout) {
  return (kvpool_attach_options){
      .size_bytes = sizeof(kvpool_attach_options), .socket = fake.path, .timeout_ms = timeout};
}

static int setup(void **state) {
  (void)state;
  fake_start(&fake);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  fake_stop(&fake);
  return 0;
}

static kvpool_attachment *attached(void) {
  kvpool_attachment *attachment;
  const kvpool_attach_options options = options_of(timeout_ms);
  assert_ok(kvpool_attach(&options, &attachment, &error));
  return attachment;
}

static int fd_count(void) {
  int count = 0;
  DIR *directory = opendir("/proc/self/fd");
  assert_non_null(directory);
  while (readdir(directory) != NULL) {
    count++;
  }
  (void)closedir(directory);
  return count;
}

static void await_releases(kvpool_attachment *attachment, uint32_t count) {
  while (fake_release_count(&fake) < count) {
    assert_ok(kvpool_attachment_state(attachment, &error));
  }
}

/* Buffers that the daemon makes for calls that have given up go back to it. */
static void test_late_buffers(void **state) {
  (void)state;
  enum { unanswered_max = 64 };
  kvpool_attachment *attachment;
  const kvpool_attach_options options = options_of(20);
  assert_ok(kvpool_attach(&options, &attachment, &error));
  kvpool_buffer *buffer;
  int fd;
  assert_ok(kvpool_memfd_create("tensor", 4096, &fd, &error));
  const int before = fd_count();
  fake_pause(&fake);
  assert_fails(kvpool_attachment_create_buffer(attachment, 8192, &buffer, &error), KVPOOL_DEADLINE_EXCEEDED, "20 ms");
  fake_go_on(&fake);
  await_releases(attachment, 1);
  assert_int_equal(fake.released, 5);
  fake_pause(&fake);
  assert_fails(kvpool_attachment_import_memfd(attachment, fd, 4096, 0, 4096, &buffer, &error),
               KVPOOL_DEADLINE_EXCEEDED, "20 ms");
  fake_go_on(&fake);
  await_releases(attachment, 2);
  assert_int_equal(fake.released, 6);
  /* Half of an answer came in time. */
  fake.fault = FAKE_BUFFER_HALF;
  assert_fails(kvpool_attachment_create_buffer(attachment, 8192, &buffer, &error), KVPOOL_DEADLINE_EXCEEDED, "20 ms");
  assert_int_equal(fake_release_count(&fake), 2);
  fake.fault = FAKE_GOOD;
  fake_finish_buffer(&fake);
  await_releases(attachment, 3);
  assert_int_equal(fake.released, 5);
  /* As many as the library remembers. */
  fake_pause(&fake);
  for (int i = 0; i < unanswered_max; i++) {
    assert_fails(kvpool_attachment_create_buffer(attachment, 4096, &buffer, &error), KVPOOL_DEADLINE_EXCEEDED,
                 "20 ms");
  }
  assert_fails(kvpool_attachment_create_buffer(attachment, 4096, &buffer, &error), KVPOOL_BUSY, "64 calls");
  fake_go_on(&fake);
  await_releases(attachment, 3 + unanswered_max);
  assert_int_equal(fd_count(), before + 2); /* the fake's own: the latest buffer, and the import's */
  (void)close(fd);
  kvpool_detach(attachment);
}

/* ---- leaks ------------------------------------------------------------------------------------------------------
 */

static int map_count(void) {
  int count = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  assert_non_null(maps);
  for (int c = fgetc(maps); c != EOF; c = fgetc(maps)) {
    count += c == '\n';
  }
  (void)fclose(maps);
  return count;
}

/* Everything an attachment can have, and all of it gone behind it. */
static void attachment_life(uint32_t number) {
  kvpool_attachment *attachment = attached();
  kvpool_pool_map *map;
  kvpool_buffer *made, *imported;
  int fd;
  assert_true(kvpool_attachment_fd(attachment) >= 0);
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error));
  assert_ok(kvpool_attachment_create_buffer(attachment, 8192, &made, &error));
  assert_ok(kvpool_memfd_create("tensor", 4096, &fd, &error));
  assert_ok(kvpool_attachment_import_memfd(attachment, fd, 4096, 0, 4096, &imported, &error));
  (void)close(fd);
  fake_tell_lost(&fake, true);
  assert_int_equal(kvpool_attachment_state(attachment, &error), KVPOOL_DEVICE_LOST);
  fake_restore(&fake);
  assert_ok(kvpool_attachment_state(attachment, &error));
  if (number % 2 == 0) {
    assert_ok(kvpool_buffer_release(made, &error));
    kvpool_pool_map_destroy(map);
    assert_ok(kvpool_buffer_release(imported, &error));
    kvpool_detach(attachment);
  } else {
    kvpool_detach(attachment);
    kvpool_pool_map_destroy(map);
    assert_ok(kvpool_buffer_release(imported, &error));
    assert_ok(kvpool_buffer_release(made, &error));
  }
  fake_wait_ended(&fake, number + 1);
}

static void test_no_leaks(void **state) {
  (void)state;
  attachment_life(0);
  attachment_life(1);
  const int fds = fd_count(), maps = map_count();
  for (uint32_t i = 2; i < 200; i++) {
    attachment_life(i);
  }
  assert_int_equal(fd_count(), fds);
  assert_in_range(map_count(), 0, maps + 4); /* malloc's own */
}

/* ---- descriptors ------------------------------------------------------------------------------------------------
 */

static struct rlimit limit_before;
static int fillers[64], filler_count;

/* This process gets no further descriptor but `room` more. */
static void descriptors_fill(int room) {
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit_before), 0);
  const struct rlimit small = {.rlim_cur = 64, .rlim_max = limit_before.rlim_max};
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &small), 0);
  filler_count = 0;
  for (int fd = dup(0); fd >= 0; fd = dup(0)) {
    fillers[filler_count++] = fd;
  }
  assert_true(filler_count >= room);
  for (; room > 0; room--) {
    (void)close(fillers[--filler_count]);
  }
}

static void descriptors_free(void) {
  while (filler_count > 0) {
    (void)close(fillers[--filler_count]);
  }
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit_before), 0);
}

static const char *const no_descriptor = "no descriptor left for what it was sent: RLIMIT_NOFILE is 64";

/* Each call fails alone, what the daemon made for it is given back, and the attachment goes on. */
static void test_no_descriptor_left(void **state) {
  (void)state;
  kvpool_attachment *attachment = attached();
  kvpool_buffer *first, *buffer;
  kvpool_pool_map *map;
  assert_ok(kvpool_attachment_create_buffer(attachment, 4096, &first, &error));
  const int before = fd_count();
  descriptors_fill(0);
  assert_fails(kvpool_attachment_create_buffer(attachment, 8192, &buffer, &error), KVPOOL_NO_MEMORY, no_descriptor);
  assert_int_equal(fake.released, 5);
  assert_fails(kvpool_attachment_map_buffer(attachment, 5, &buffer, &error), KVPOOL_NO_MEMORY, no_descriptor);
  assert_fails(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error), KVPOOL_NO_MEMORY,
               no_descriptor);
  assert_ok(kvpool_attachment_state(attachment, &error));
  descriptors_free();
  assert_int_equal(fd_count(), before);
  assert_ok(kvpool_attachment_map_pool(attachment, "main", KVPOOL_MAP_READ, &map, &error));
  assert_ok(kvpool_attachment_create_buffer(attachment, 8192, &buffer, &error));
  kvpool_pool_map_destroy(map);
  assert_ok(kvpool_buffer_release(buffer, &error));
  assert_ok(kvpool_buffer_release(first, &error));
  kvpool_detach(attachment);
}

/* Without a ring it can't go on, and says why: at the attach, and when a successor brings another one. */
static void test_no_descriptor_for_a_ring(void **state) {
  (void)state;
  kvpool_attachment *attachment;
  const kvpool_attach_options options = options_of(timeout_ms);
  const int before = fd_count();
  descriptors_fill(4); /* both ends of the socket, and two of five */
  assert_fails(kvpool_attach(&options, &attachment, &error), KVPOOL_NO_MEMORY, no_descriptor);
  descriptors_free();
  fake_wait_ended(&fake, 1);
  assert_int_equal(fd_count(), before);

  attachment = attached();
  kvpool_step *step;
  assert_ok(kvpool_attachment_step_new(attachment, &step, &error));
  assert_ok(kvpool_attachment_post(attachment, step, NULL, NULL, &error));
  descriptors_fill(0);
  fake_tell_lost(&fake, true);
  assert_fails(kvpool_attachment_state(attachment, &error), KVPOOL_DEVICE_LOST, "signal 9");
  fake_restore(&fake);
  assert_fails(kvpool_attachment_state(attachment, &error), KVPOOL_NO_MEMORY, no_descriptor);
  const kvpool_completion *completion;
  assert_ok(kvpool_attachment_poll(attachment, &completion, &error));
  assert_non_null(completion);
  assert_int_equal(completion->error->status, KVPOOL_DEVICE_LOST);
  descriptors_free();
  kvpool_step_destroy(step);
  kvpool_detach(attachment);
  fake_wait_ended(&fake, 2);
  assert_int_equal(fd_count(), before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_late_buffers, setup, teardown),
      cmocka_unit_test_setup_teardown(test_no_leaks, setup, teardown),
      cmocka_unit_test_setup_teardown(test_no_descriptor_left, setup, teardown),
      cmocka_unit_test_setup_teardown(test_no_descriptor_for_a_ring, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
