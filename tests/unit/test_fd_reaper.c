/* What workers sent is closed by a thread: nobody else waits for it, and it is counted while it waits. close() is
 * wrapped, so that a descriptor's can be held up. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/fd_socket.h"
#include "server/supervisor/fd_reaper.h"

enum { uid = 1000, other_uid = 1001, budget_fds = 100000 };

int __real_close(int fd);
int __wrap_close(int fd);

static pthread_mutex_t gate_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_changed = PTHREAD_COND_INITIALIZER;
static int held_fd = -1;
static bool is_held; /* somebody is in its close */

int __wrap_close(int fd) {
  (void)pthread_mutex_lock(&gate_lock);
  while (fd >= 0 && fd == held_fd) {
    is_held = true;
    (void)pthread_cond_broadcast(&gate_changed);
    (void)pthread_cond_wait(&gate_changed, &gate_lock);
  }
  is_held = false;
  (void)pthread_mutex_unlock(&gate_lock);
  return __real_close(fd);
}

static void gate_set(int fd) {
  (void)pthread_mutex_lock(&gate_lock);
  held_fd = fd;
  (void)pthread_cond_broadcast(&gate_changed);
  (void)pthread_mutex_unlock(&gate_lock);
}

static void gate_wait(void) {
  (void)pthread_mutex_lock(&gate_lock);
  while (!is_held) {
    (void)pthread_cond_wait(&gate_changed, &gate_lock);
  }
  (void)pthread_mutex_unlock(&gate_lock);
}

static int null_open(void) {
  int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  assert_true(fd >= 0);
  return fd;
}

static bool is_open(int fd) {
  return fcntl(fd, F_GETFD) >= 0;
}

struct scene {
  uv_loop_t loop;
  struct kvp_fd_budget fds;
  struct kvp_fd_reaper *reaper;
  int held;
};

/* The reaper's thread hangs in the close of scene->held. */
static void scene_begin(struct scene *scene) {
  struct kvp_error error;
  *scene = (struct scene){.fds = {.limit = budget_fds}};
  assert_int_equal(uv_loop_init(&scene->loop), 0);
  assert_int_equal(kvp_fd_reaper_new(&scene->loop, &scene->fds, &scene->reaper, &error), KVP_OK);
  scene->held = null_open();
  gate_set(scene->held);
  assert_int_equal(kvp_fd_reaper_reserve(scene->reaper, 1, &error), KVP_OK);
  kvp_fd_reaper_close(scene->reaper, uid, scene->held);
  gate_wait();
}

static void scene_end(struct scene *scene) {
  kvp_fd_reaper_destroy(scene->reaper);
  (void)uv_run(&scene->loop, UV_RUN_DEFAULT);
  assert_int_equal(uv_loop_close(&scene->loop), 0);
}

/* Until nothing is charged but for `count` places. */
static void run_until_used(struct scene *scene, uint64_t count) {
  while (scene->fds.used != count) {
    (void)uv_run(&scene->loop, UV_RUN_ONCE);
  }
}

static void test_others_wait_behind_it(void **state) {
  (void)state;
  struct scene scene;
  struct kvp_error error;
  scene_begin(&scene);
  int fds[3] = {null_open(), null_open(), null_open()};
  assert_int_equal(kvp_fd_reaper_reserve(scene.reaper, 5, &error), KVP_OK);
  for (int i = 0; i < 3; i++) {
    kvp_fd_reaper_close(scene.reaper, uid, fds[i]);
  }
  kvp_fd_reaper_release(scene.reaper, 1);
  assert_int_equal(scene.fds.used, 5);
  assert_true(is_open(scene.held) && is_open(fds[0]) && is_open(fds[2]));
  gate_set(-1);
  run_until_used(&scene, 1); /* the place that is still promised */
  assert_false(is_open(scene.held) || is_open(fds[0]) || is_open(fds[1]) || is_open(fds[2]));
  kvp_fd_reaper_release(scene.reaper, 1);
  scene_end(&scene);
}

static void test_bounds(void **state) {
  (void)state;
  struct scene scene;
  struct kvp_error error;
  scene_begin(&scene);
  const uint32_t share = kvp_reaper_fds_per_uid_max;
  assert_int_equal(kvp_fd_reaper_reserve(scene.reaper, share - 1, &error), KVP_OK);
  for (uint32_t i = 1; i < share; i++) {
    assert_int_equal(kvp_fd_reaper_check_uid(scene.reaper, uid, 1, &error), KVP_OK);
    kvp_fd_reaper_close(scene.reaper, uid, null_open());
  }
  assert_int_equal(kvp_fd_reaper_check_uid(scene.reaper, uid, 1, &error), KVP_BUSY);
  assert_non_null(strstr(error.text, "506 descriptors that uid 1000"));
  assert_int_equal(kvp_fd_reaper_check_uid(scene.reaper, other_uid, share, &error), KVP_OK);
  assert_int_equal(kvp_fd_reaper_check_uid(scene.reaper, other_uid, share + 1, &error), KVP_BUSY);

  const uint32_t rest = kvp_reaper_fds_max - share;
  assert_int_equal(kvp_fd_reaper_reserve(scene.reaper, rest + 1, &error), KVP_BUSY);
  assert_int_equal(kvp_fd_reaper_reserve(scene.reaper, rest, &error), KVP_OK);
  assert_int_equal(kvp_fd_reaper_reserve(scene.reaper, 1, &error), KVP_BUSY);
  assert_int_equal(scene.fds.used, kvp_reaper_fds_max);
  kvp_fd_reaper_release(scene.reaper, rest);

  scene.fds.limit = share + 10; /* memory has the others */
  assert_int_equal(kvp_fd_reaper_reserve(scene.reaper, 11, &error), KVP_BUSY);
  assert_non_null(strstr(error.text, "RLIMIT_NOFILE"));
  gate_set(-1);
  run_until_used(&scene, 0);
  assert_int_equal(kvp_fd_reaper_check_uid(scene.reaper, uid, share, &error), KVP_OK);
  scene_end(&scene);
}

/* A connected pair whose first end isn't waited for. */
static void pair_open(int pair[2]) {
  assert_int_equal(kvp_fd_socket_pair(pair), 0);
  assert_int_equal(fcntl(pair[0], F_SETFL, O_NONBLOCK), 0);
}

static void test_sockets(void **state) {
  (void)state;
  struct scene scene;
  struct kvp_error error;
  scene_begin(&scene);
  const struct {
    int messages; /* empty ones */
    int fds;      /* in one behind them */
    bool waits;
  } cases[] = {{0, 0, false}, {1, 0, false}, {100, 0, false}, {0, 1, true}, {3, 64, true}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int pair[2];
    char byte = 0;
    int fds[kvp_control_fds_max];
    pair_open(pair);
    for (int j = 0; j < kvp_control_fds_max; j++) {
      fds[j] = pair[1];
    }
    for (int j = 0; j < cases[i].messages; j++) {
      assert_int_equal(send(pair[1], &byte, 0, 0), 0);
    }
    if (cases[i].fds > 0) {
      assert_int_equal(kvp_fd_socket_send(pair[1], 1, 1, NULL, 0, fds, (uint32_t)cases[i].fds), KVP_OK);
    }
    assert_int_equal(send(pair[0], &byte, 1, 0), 1);
    assert_int_equal(kvp_fd_reaper_reserve(scene.reaper, 1, &error), KVP_OK);
    kvp_fd_reaper_close_socket(scene.reaper, uid, pair[0]);
    assert_int_equal(is_open(pair[0]), cases[i].waits);
    assert_int_equal(recv(pair[1], &byte, 1, 0), 1); /* what was told before */
    assert_int_equal(recv(pair[1], &byte, 1, 0), 0); /* and its end, no error */
    assert_int_equal(send(pair[1], &byte, 1, MSG_NOSIGNAL), -1);
    assert_int_equal(errno, EPIPE);
    assert_int_equal(close(pair[1]), 0);
  }
  assert_int_equal(scene.fds.used, 3);
  gate_set(-1);
  run_until_used(&scene, 0);
  scene_end(&scene);
}

static void test_nobody_waits_for_it_at_the_end(void **state) {
  (void)state;
  struct scene scene;
  scene_begin(&scene);
  scene_end(&scene);
  assert_true(is_open(scene.held));
  gate_set(-1); /* the thread comes back, and cleans up behind everybody */
  while (is_open(scene.held)) {
    (void)sched_yield();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_others_wait_behind_it),
      cmocka_unit_test(test_bounds),
      cmocka_unit_test(test_sockets),
      cmocka_unit_test(test_nobody_waits_for_it_at_the_end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
