/* Configuration: what is read, what wins, and the line that every complaint names. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/supervisor/config.h"

enum { output_bytes_max = 65536, flags_max = 24 };

struct outcome {
  enum kvp_config_outcome result;
  char output[output_bytes_max]; /* standard output and error */
};

static struct kvp_config config;
static struct outcome outcome;

#define POOL_REGIONS "regions = ( { name = \"kv\"; format = \"v41\"; num_layers = 2; } );"
#define POOL(name)   "{ name = \"" name "\"; block_size = 64; num_blocks = 10; " POOL_REGIONS " }"

/* Runs kvp_config_read with both outputs into outcome.output. */
static void read_config(const char *const *flags) {
  char *argv[flags_max + 2] = {(char *)"kvpoold"};
  int argc = 1;
  for (; flags[argc - 1] != NULL; argc++) {
    argv[argc] = (char *)flags[argc - 1];
  }
  char path[] = "/tmp/kvpool-test-output-XXXXXX";
  int file = mkstemp(path);
  assert_true(file >= 0);
  assert_int_equal(unlink(path), 0);
  assert_int_equal(fflush(stdout), 0);
  int saved_out = dup(STDOUT_FILENO);
  int saved_error = dup(STDERR_FILENO);
  assert_true(dup2(file, STDOUT_FILENO) >= 0 && dup2(file, STDERR_FILENO) >= 0);
  outcome.result = kvp_config_read(argc, argv, &config);
  int flushed = fflush(stdout);
  assert_true(dup2(saved_out, STDOUT_FILENO) >= 0 && dup2(saved_error, STDERR_FILENO) >= 0);
  assert_int_equal(flushed, 0);
  ssize_t length = pread(file, outcome.output, sizeof outcome.output - 1, 0);
  assert_true(length >= 0);
  outcome.output[length] = '\0';
  (void)close(saved_out);
  (void)close(saved_error);
  (void)close(file);
}

/* Writes a file, reads it with --config, removes it. In expectations "@" is the file's name. */
static char file_path[64];

static void read_file(const char *text, const char *const *more) {
  (void)snprintf(file_path, sizeof file_path, "/tmp/kvpool-test-XXXXXX");
  int file = mkstemp(file_path);
  assert_true(file >= 0);
  assert_int_equal(write(file, text, strlen(text)), strlen(text));
  (void)close(file);
  const char *flags[flags_max] = {"--config", file_path};
  for (int i = 0; more != NULL && more[i] != NULL; i++) {
    flags[2 + i] = more[i];
  }
  read_config(flags);
  assert_int_equal(unlink(file_path), 0);
}

static void expect_complaint(const char *text, const char *line, const char *words) {
  char expected[512];
  read_file(text, NULL);
  (void)snprintf(expected, sizeof expected, "kvpoold: %s:%s: ", file_path, line);
  if (outcome.result != KVP_CONFIG_ERROR || strstr(outcome.output, expected) != outcome.output ||
      strstr(outcome.output, words) == NULL) {
    fail_msg("for:\n%s\nwanted line %s and \"%s\", got:\n%s", text, line, words, outcome.output);
  }
}

static void expect_flag_complaint(const char *const *flags, const char *words) {
  read_config(flags);
  if (outcome.result != KVP_CONFIG_ERROR || strstr(outcome.output, words) == NULL) {
    fail_msg("wanted \"%s\", got:\n%s", words, outcome.output);
  }
}

#define FLAGS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_defaults(void **state) {
  (void)state;
  read_config((const char *const[]){NULL});
  assert_int_equal(outcome.result, KVP_CONFIG_RUN);
  assert_string_equal(config.socket_path, "/run/kvpoold/kvpoold.sock");
  assert_string_equal(config.lock_path, "/run/kvpoold/kvpoold.sock.lock");
  assert_string_equal(config.attach_socket_path, "/run/kvpoold/kvpoold.attach.sock");
  assert_string_equal(config.attach_lock_path, "/run/kvpoold/kvpoold.attach.sock.lock");
  assert_int_equal(config.wait_deadline_max_ms, 30000);
  assert_int_equal(config.ipc_uid_count, 0);
  assert_non_null(strstr(config.executor_path, "/kvpool-exec"));
  assert_int_equal(config.socket_mode, 0660);
  assert_int_equal(config.device_count, 1);
  assert_string_equal(config.devices[0], "host:0");
  assert_int_equal(config.device_memory_bytes, 0);
  assert_true(config.device_reserve_bytes == KVP_RESERVE_DEFAULT);
  assert_int_equal(config.sessions_max, 1024);
  assert_int_equal(config.steps_in_flight_max, 256);
  assert_int_equal(config.connections_max, 4096);
  assert_int_equal(config.drain_timeout_ms, 10000);
  assert_int_equal(config.log_level, KVP_LOG_INFO);
  assert_int_equal(config.pool_count, 0);
  assert_string_equal(outcome.output, "");
}

static void test_a_file_with_everything(void **state) {
  (void)state;
  read_file(
      "socket = \"/tmp/a.sock\"; socket_mode = \"0600\"; executor = \"/opt/exec\";\n"
      "devices = [ \"host:0\", \"host:12\" ]; device_memory = \"3M\"; device_threads = 5;\n"
      "device_reserve = 0;\n"
      "sessions_max = 7; steps_in_flight_max = 8; connections_max = 9; drain_timeout_ms = 10;\n"
      "log_level = \"debug\"; attach_socket = \"/tmp/w.sock\"; wait_deadline_max_ms = 11;\n"
      "ipc_uids = [ 1000, 0 ];\n"
      "pools = ( { name = \"main\"; namespace = \"tenant-a\"; kind = \"ring\"; block_size = 64; num_blocks = 10;\n"
      "  placements = ( \"host:12\" );\n"
      "  regions = ( { name = \"kv\"; format = \"bf16\"; width = 64; num_layers = 2; compression_ratio = 4;\n"
      "                note = \"for people\"; } ); } );\n",
      NULL);
  assert_string_equal(outcome.output, "");
  assert_int_equal(outcome.result, KVP_CONFIG_RUN);
  assert_string_equal(config.socket_path, "/tmp/a.sock");
  assert_string_equal(config.lock_path, "/tmp/a.sock.lock");
  assert_string_equal(config.attach_socket_path, "/tmp/w.sock");
  assert_string_equal(config.attach_lock_path, "/tmp/w.sock.lock");
  assert_int_equal(config.wait_deadline_max_ms, 11);
  assert_int_equal(config.ipc_uid_count, 2);
  assert_int_equal(config.ipc_uids[0], 1000);
  assert_int_equal(config.ipc_uids[1], 0);
  assert_string_equal(config.executor_path, "/opt/exec");
  assert_int_equal(config.socket_mode, 0600);
  assert_int_equal(config.device_count, 2);
  assert_string_equal(config.devices[1], "host:12");
  assert_int_equal(config.device_memory_bytes, 3 * 1024 * 1024);
  assert_int_equal(config.device_reserve_bytes, 0);
  assert_int_equal(config.device_thread_count, 5);
  assert_int_equal(config.sessions_max, 7);
  assert_int_equal(config.steps_in_flight_max, 8);
  assert_int_equal(config.connections_max, 9);
  assert_int_equal(config.drain_timeout_ms, 10);
  assert_int_equal(config.log_level, KVP_LOG_DEBUG);
  assert_int_equal(config.pool_count, 1);
  const struct kvp_pool_spec *pool = &config.pools[0];
  assert_string_equal(pool->name, "main");
  assert_string_equal(pool->namespace_name, "tenant-a");
  assert_int_equal(pool->kind, KVP_POOL_RING);
  assert_int_equal(pool->block_size, 64);
  assert_int_equal(pool->num_blocks, 10);
  assert_int_equal(pool->placement_count, 1);
  assert_string_equal(pool->placements[0], "host:12");
  assert_int_equal(pool->region_count, 1);
  assert_string_equal(pool->regions[0].name, "kv");
  assert_string_equal(pool->regions[0].format, "bf16");
  assert_string_equal(pool->regions[0].note, "for people");
  assert_int_equal(pool->regions[0].width, 64);
  assert_int_equal(pool->regions[0].compression_ratio, 4);
  assert_int_equal(pool->regions[0].num_layers, 2);
}

static void test_flags_win(void **state) {
  (void)state;
  read_file("socket = \"/tmp/a.sock\"; device_memory = 100000000L; devices = [ \"host:0\" ]; sessions_max = 5;\n"
            "ipc_uids = [ 5, 6 ];\n"
            "pools = ( " POOL("one") ", " POOL("two") " );",
            FLAGS("--socket=/tmp/b.sock", "--device-memory", "2G", "--device", "host:3", "--device", "host:4",
                  "--pool", POOL("three"), "--socket-mode", "666", "--log-level=error", "--drain-timeout-ms=0",
                  "--device-reserve=3G", "--ipc-uid=7", "--attach-socket=/tmp/c", "--wait-deadline-max-ms=1"));
  assert_string_equal(outcome.output, "");
  assert_int_equal(outcome.result, KVP_CONFIG_RUN);
  assert_string_equal(config.socket_path, "/tmp/b.sock");
  assert_int_equal(config.device_memory_bytes, UINT64_C(2) << 30);
  assert_int_equal(config.device_reserve_bytes, UINT64_C(3) << 30);
  assert_int_equal(config.device_count, 2);
  assert_string_equal(config.devices[0], "host:3");
  assert_int_equal(config.pool_count, 1);
  assert_string_equal(config.pools[0].name, "three");
  assert_int_equal(config.socket_mode, 0666);
  assert_int_equal(config.sessions_max, 5);
  assert_int_equal(config.log_level, KVP_LOG_ERROR);
  assert_int_equal(config.drain_timeout_ms, 0);
  assert_int_equal(config.ipc_uid_count, 1);
  assert_int_equal(config.ipc_uids[0], 7);
  assert_string_equal(config.attach_socket_path, "/tmp/c");
  assert_int_equal(config.wait_deadline_max_ms, 1);
}

/* Beside the socket, whatever that is called. */
static void test_attach_socket_follows_the_socket(void **state) {
  (void)state;
  static const struct {
    const char *socket;
    const char *attach;
  } cases[] = {{"/run/x/y.sock", "/run/x/y.attach.sock"},
               {"/run/x/y", "/run/x/y.attach.sock"},
               {"/run/x/.sock", "/run/x/.attach.sock"},
               {".sock", ".sock.attach.sock"},
               {"/a.socket", "/a.socket.attach.sock"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    read_config(FLAGS("--socket", cases[i].socket));
    assert_int_equal(outcome.result, KVP_CONFIG_RUN);
    assert_string_equal(config.attach_socket_path, cases[i].attach);
  }
  char longest[108]; /* 107 bytes, and 7 more are too many */
  memset(longest, 'x', sizeof longest);
  memcpy(longest + 102, ".sock", 6);
  expect_flag_complaint(FLAGS("--socket", longest), "has 114 bytes, a socket's path 107 at most");
  read_config(FLAGS("--socket", longest, "--attach-socket", "/tmp/short"));
  assert_int_equal(outcome.result, KVP_CONFIG_RUN);
  expect_flag_complaint(FLAGS("--socket", "/a", "--attach-socket", "/a"), "\"/a\" is the path of `socket`");
}

static void test_ipc_uids(void **state) {
  (void)state;
  expect_complaint("ipc_uids = 5;", "1", "must be a list of numbers");
  expect_complaint("ipc_uids = [ \"root\" ];", "1", "entry 0 is not an integer");
  expect_complaint("ipc_uids = [ 1,\n -1 ];", "2", "-1 is no uid");
  expect_complaint("ipc_uids = [ 4294967295L ];", "1", "4294967295 is no uid");
  expect_flag_complaint(FLAGS("--ipc-uid", "12x"), "\"12x\" is no uid");
  expect_flag_complaint(FLAGS("--ipc-uid", "-1"), "\"-1\" is no uid");
  expect_flag_complaint(FLAGS("--ipc-uid", ""), "\"\" is no uid");
  expect_complaint("wait_deadline_max_ms = 30001;", "1", "is not within 1 .. 30000");
}

static void test_byte_suffixes(void **state) {
  (void)state;
  static const struct {
    const char *text;
    uint64_t bytes;
  } cases[] = {{"0", 0},
               {"17", 17},
               {"1K", 1024},
               {"5M", 5242880},
               {"64G", UINT64_C(68719476736)},
               {"3T", UINT64_C(3298534883328)}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    read_config(FLAGS("--device-memory", cases[i].text));
    assert_int_equal(outcome.result, KVP_CONFIG_RUN);
    assert_int_equal(config.device_memory_bytes, cases[i].bytes);
  }
  static const char *const wrong[] = {"",   "G",  "1X",   "1GB",         "-1",
                                      " 1", "1 ", "0x10", "9999999999T", "9223372036854775808"};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    expect_flag_complaint(FLAGS("--device-memory", wrong[i]), "--device-memory: ");
  }
}

static void test_complaints_of_a_file_name_the_line(void **state) {
  (void)state;
  expect_complaint("\nsokcet = \"/x\";", "2", "sokcet is no setting");
  expect_complaint("socket = 5;", "1", "socket must be a string");
  expect_complaint("socket = \"\";", "1", "1 to 107 bytes, this one 0");
  expect_complaint("\n\nsessions_max = \"5\";", "3", "sessions_max must be an integer");
  expect_complaint("sessions_max = 0;", "1", "sessions_max = 0 is not within 1 .. 1024");
  expect_complaint("sessions_max = 1025;", "1", "1025 is not within");
  expect_complaint("sessions_max = 4294967297L;", "1", "4294967297 is not within");
  expect_complaint("drain_timeout_ms = -1;", "1", "-1 is not within 0 .. 3600000");
  expect_complaint("device_memory = 1.5;", "1", "device_memory must be an integer or a string");
  expect_complaint("socket_mode = 660;", "1", "octal");
  expect_complaint("socket_mode = \"0888\";", "1", "\"0888\" is not an octal mode");
  expect_complaint("socket_mode = \"01000\";", "1", "\"01000\" is not an octal mode");
  expect_complaint("log_level = \"loud\";", "1", "\"loud\" is none of");
  expect_complaint("devices = \"host:0\";", "1", "devices must be a list");
  expect_complaint("devices = [\n\"host:0\",\n\"host:0\" ];", "3", "\"host:0\" is there twice");
  expect_complaint("devices = ( \"host\" );", "1", "\"host\" is not of the form");
  expect_complaint("devices = ( \"host:x\" );", "1", "\"host:x\" is not of the form");
  expect_complaint("devices = [ \"host:0\",\n\"cuda:64\" ];", "2",
                   "\"cuda:64\" is not of the form host:N or cuda:N (the last are host:255 and cuda:63)");
  expect_complaint("pools = {};", "1", "pools must be a list");
  expect_complaint("socket = ;", "1", "syntax error");
}

/* libconfig's own limit is 32 bits, signed, unless an L follows; 2^31 = 2147483648 and 2^36 = 68719476736. */
static void test_literals_that_would_wrap(void **state) {
  (void)state;
  expect_complaint("device_memory = 68719476736;", "1",
                   "68719476736 does not fit into 32 bits with a sign; write 68719476736L");
  expect_complaint("\ndevice_memory =\n 2147483648;", "3", "write 2147483648L");
  expect_complaint("drain_timeout_ms = -2147483649;", "1", "write -2147483649L");
  expect_complaint("device_memory = 0x80000000;", "1", "write 0x80000000L");
  expect_complaint("device_memory = 0XfffFFFFFF;", "1", "write 0XfffFFFFFFL");
  expect_complaint("device_memory = 68719476736l;", "1", "write 68719476736L");
  expect_complaint("device_memory = 9223372036854775808L;", "1", "9223372036854775808 does not fit into 64 bits");
  expect_complaint("device_memory = 99999999999999999999;", "1", "99999999999999999999 does not fit into 64 bits");
  expect_complaint("device_memory = 0x10000000000000000L;", "1", "0x10000000000000000 does not fit into 64 bits");
  expect_complaint("/* a\n \" */ # \"\n// \"\nsocket = \"a\nb\"; device_memory = 4294967296;", "5",
                   "write 4294967296L");
  expect_complaint("pools = ( {\nname = \"x\";\nnum_blocks = 4294967298; } );", "3", "write 4294967298L");
  expect_flag_complaint(FLAGS("--pool", "{ name = \"x\";\nnum_blocks = 4294967298; }"),
                        "--pool:2: 4294967298 does not fit into 32 bits with a sign; write 4294967298L");
}

static void test_literals_that_are_none(void **state) {
  (void)state;
  static const struct {
    const char *text;
    uint64_t bytes;
  } cases[] = {
      {"device_memory = 68719476736L;", UINT64_C(68719476736)},
      {"device_memory = 68719476736LL;", UINT64_C(68719476736)},
      {"device_memory = 0x1000000000L;", UINT64_C(68719476736)},
      {"device_memory = 2147483647;", UINT64_C(2147483647)},
      {"device_memory = 0x7FFFFFFF;", UINT64_C(2147483647)},
      {"device_memory = 9223372036854775807L;", INT64_MAX},
      {"# 4294967296\n// 4294967296\n/* 4294967296\n4294967296 */ device_memory = 5; # 4294967296\n", 5},
      {"socket = \"/4294967296\\\"4294967296\"; device_memory = 6;", 6},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    read_file(cases[i].text, NULL);
    if (outcome.result != KVP_CONFIG_RUN || config.device_memory_bytes != cases[i].bytes) {
      fail_msg("for:\n%s\ngot %llu and:\n%s", cases[i].text, (unsigned long long)config.device_memory_bytes,
               outcome.output);
    }
  }
  expect_complaint("a-4294967296 = 1;", "1", "a-4294967296 is no setting");
  expect_complaint("device_memory = 4294967296.5;", "1", "device_memory must be an integer or a string");
  expect_complaint("device_memory = 4294967296e3;", "1", "device_memory must be an integer or a string");
}

/* A complaint about an included file names that file. */
static void test_literals_of_an_included_file(void **state) {
  (void)state;
  char included[] = "/tmp/kvpool-test-XXXXXX";
  int file = mkstemp(included);
  assert_true(file >= 0);
  static const char text[] = "# first\ndevice_memory = 4294967296;\n";
  assert_int_equal(write(file, text, sizeof text - 1), sizeof text - 1);
  (void)close(file);
  char outer[128];
  char expected[128];
  (void)snprintf(outer, sizeof outer, "sessions_max = 5;\n@include \"%s\"\n", included);
  (void)snprintf(expected, sizeof expected, "kvpoold: %s:2: 4294967296 does not fit", included);
  read_file(outer, NULL);
  assert_int_equal(unlink(included), 0);
  assert_int_equal(outcome.result, KVP_CONFIG_ERROR);
  assert_non_null(strstr(outcome.output, expected));
}

static void test_device_names(void **state) {
  (void)state;
  static const char *const good[] = {"host:0",
                                     "host:255",
                                     "cuda:0",
                                     "cuda:7",
                                     "cuda:63",
                                     "host:10",
                                     "cuda:GPU-2d0f4a51-0a1b-4c5d-8e9f-0123456789ab",
                                     "cuda:GPU-2D0F4A51-0a1b-4C5D-8E9F-0123456789AB"};
  for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
    read_config(FLAGS("--device", good[i]));
    assert_int_equal(outcome.result, KVP_CONFIG_RUN);
    assert_string_equal(config.devices[0], good[i]);
  }
  static const char *const wrong[] = {"",
                                      "host",
                                      "host:",
                                      "host:256",
                                      "cuda:1000",
                                      "host:00",
                                      "cuda:01",
                                      "rocm:0",
                                      "hosts:0",
                                      "HOST:0",
                                      "host:-1",
                                      "host: 1",
                                      "host:+1",
                                      "host:1 ",
                                      "cuda:1a",
                                      "0",
                                      ":0",
                                      "host0",
                                      "host:0:0",
                                      "cuda",
                                      "host:4294967296",
                                      "cuda:64",
                                      "cuda:gpu-2d0f4a51-0a1b-4c5d-8e9f-0123456789ab"};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    char words[128];
    (void)snprintf(words, sizeof words, "--device: device \"%s\" is not of the form host:N or cuda:N", wrong[i]);
    expect_flag_complaint(FLAGS("--device", wrong[i]), words);
  }
  static const char *const wrong_uuids[] = {"cuda:GPU-",
                                            "cuda:GPU-0",
                                            "cuda:GPU-2d0f4a51-0a1b-4c5d-8e9f-0123456789a",
                                            "cuda:GPU-2d0f4a51-0a1b-4c5d-8e9f-0123456789abc",
                                            "cuda:GPU-2d0f4a510a1b-4c5d-8e9f-0123456789abcd",
                                            "cuda:GPU-2d0f4a51-0a1b-4c5d-8e9f-0123456789xy",
                                            "cuda:GPU-2d0f4a51-0a1b-4c5d-8e9f-0123456789ab "};
  for (size_t i = 0; i < sizeof wrong_uuids / sizeof wrong_uuids[0]; i++) {
    char words[192];
    (void)snprintf(words, sizeof words, "--device: device \"%s\": behind cuda: a GPU's UUID is wanted",
                   wrong_uuids[i]);
    expect_flag_complaint(FLAGS("--device", wrong_uuids[i]), words);
  }
  expect_flag_complaint(FLAGS("--device", "cuda:1", "--device", "host:1", "--device", "cuda:1"),
                        "--device: device \"cuda:1\" is there twice");
  static const char by_uuid[] = "cuda:GPU-2d0f4a51-0a1b-4c5d-8e9f-0123456789ab";
  expect_flag_complaint(FLAGS("--device", by_uuid, "--device", by_uuid), "0123456789ab\" is there twice");
  expect_flag_complaint(FLAGS("--device", by_uuid, "--device", "cuda:GPU-2D0F4A51-0A1B-4C5D-8E9F-0123456789AB"),
                        "0123456789AB\" is there twice");
  read_config(FLAGS("--device", by_uuid, "--device", "cuda:0")); /* they may be one GPU: the operator knows */
  assert_int_equal(outcome.result, KVP_CONFIG_RUN);
  assert_int_equal(config.device_count, 2);
}

static void expect_pool_complaint(const char *pool, const char *line, const char *words) {
  char text[2048];
  (void)snprintf(text, sizeof text, "pools = (\n%s\n);", pool);
  expect_complaint(text, line, words);
}

static void test_complaints_about_pools(void **state) {
  (void)state;
  expect_pool_complaint("5", "2", "a pool must be a group");
  expect_pool_complaint("{\nnmae = \"x\"; }", "3", "nmae is no field of a pool");
  expect_pool_complaint("{ name = 5; }", "2", "name must be a string");
  expect_pool_complaint("{ kind = \"square\"; }", "2", "\"square\" is neither");
  expect_pool_complaint("{ block_size = -4; }", "2", "block_size = -4 is not within");
  expect_pool_complaint("{ regions = (\n{\n\nwidht = 5; } ); }", "5", "widht is no field of a region");
  expect_pool_complaint("{ regions = ( 7 ); }", "2", "a region must be a group");
  expect_pool_complaint("{ name = \"a b\"; block_size = 64; num_blocks = 1; " POOL_REGIONS " }", "2",
                        "byte 0x20 at 1");
  expect_pool_complaint("{ name = \"x\"; namespace = \"a b\"; block_size = 64; num_blocks = 1; " POOL_REGIONS " }",
                        "2", "pool namespace");
  expect_pool_complaint("{ name = \"x\";\nnamespace = 7; }", "3", "namespace must be a string");
  expect_pool_complaint("{ name = \"x\"; block_size = 0; num_blocks = 1; " POOL_REGIONS " }", "2", "block_size 0");
  expect_pool_complaint("{ name = \"x\"; block_size = 64; num_blocks = 1; }", "2", "has no region");
  expect_pool_complaint("{ name = \"x\"; block_size = 64; num_blocks = 1; regions = ( { name = \"kv\"; format = "
                        "\"v42\"; num_layers = 1; } ); }",
                        "2", "region 'kv': 'v42' is no format");
  expect_pool_complaint("{ name = \"x\"; block_size = 64; num_blocks = 1; regions = ( { name = \"kv\"; format = "
                        "\"v41\"; num_layers = 1; compression_ratio = 3; } ); }",
                        "2", "block_size 64 is not divisible by compression_ratio 3");
  expect_pool_complaint("{ name = \"x\"; block_size = 64; num_blocks = 33554432; " POOL_REGIONS " }", "2",
                        "region 'kv'");
  expect_pool_complaint("{ name = \"x\"; block_size = 64; num_blocks = 1; regions = (\n"
                        "{ name = \"kv\"; format = \"v41\"; num_layers = 1; },\n"
                        "{ name = \"kv\"; format = \"v41\"; num_layers = 1; } ); }",
                        "4", "regions 0 and 1 are both named 'kv'");
  expect_pool_complaint("{ name = \"x\"; block_size = 64; num_blocks = 1; placements = [ \"host:7\" ]; " POOL_REGIONS
                        " }",
                        "2", "placement \"host:7\" is no device");
  expect_pool_complaint(
      "{ name = \"x\"; block_size = 64; num_blocks = 1; placements = [ \"host:0\", \"host:0\" ]; " POOL_REGIONS " }",
      "2", "placements 0 and 1 are both 'host:0'");
  expect_pool_complaint(POOL("x") ",\n" POOL("y") ",\n" POOL("x"), "4", "pool \"x\" is there twice");
}

/* 10 blocks x 64 tokens x 528 bytes x 2 layers of v41 (512 e4m3 + 16 scales of 32) fit once into 1 MiB, not twice. */
static void test_pools_must_fit_what_devices_may_take(void **state) {
  (void)state;
  read_file("device_memory = \"1M\"; pools = ( " POOL("x") " );", NULL);
  assert_int_equal(outcome.result, KVP_CONFIG_RUN);
  expect_complaint("device_memory = \"1M\"; pools = ( " POOL("x") ",\n" POOL("y") " );", "2",
                   "device_memory is 1048576");
}

static void test_flag_complaints(void **state) {
  (void)state;
  expect_flag_complaint(FLAGS("--sessions-max", "five"), "--sessions-max: sessions_max = \"five\" is not a number");
  expect_flag_complaint(FLAGS("--sessions-max", "2000"), "2000 is not within 1 .. 1024");
  expect_flag_complaint(FLAGS("--no-such-flag"), "no-such-flag");
  expect_flag_complaint(FLAGS("stray"), "stray: no such argument");
  expect_flag_complaint(FLAGS("--pool", "{ name = "), "--pool:1: syntax error");
  expect_flag_complaint(FLAGS("--pool", "5"), "a pool must be a group");
  expect_flag_complaint(FLAGS("--pool", POOL("x"), "--pool", POOL("x")), "\"x\" is there twice");
  expect_flag_complaint(FLAGS("--config", "/nonexistent/kvpoold.conf"),
                        "/nonexistent/kvpoold.conf: the file can't be read: No such file or directory");
  expect_flag_complaint(FLAGS("--config", "/tmp"), "/tmp: the file can't be read: Is a directory");
  char path[200];
  memset(path, 'a', sizeof path - 1);
  path[sizeof path - 1] = '\0';
  expect_flag_complaint(FLAGS("--socket", path), "1 to 107 bytes, this one 199");
}

static void test_answers(void **state) {
  (void)state;
  read_config(FLAGS("--version"));
  assert_int_equal(outcome.result, KVP_CONFIG_DONE);
  assert_string_equal(outcome.output, "kvpoold " KVPOOL_VERSION "\n");
  read_config(FLAGS("--help"));
  assert_int_equal(outcome.result, KVP_CONFIG_DONE);
  static const char *const flags[] = {
      "--socket=",          "--socket-mode=",      "--executor=",     "--device=",
      "--device-memory=",   "--device-threads=",   "--sessions-max=", "--steps-in-flight-max=",
      "--connections-max=", "--drain-timeout-ms=", "--log-level=",    "--pool=",
      "--config=",          "--check-config",      "--version"};
  for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
    if (strstr(outcome.output, flags[i]) == NULL) {
      fail_msg("%s is not in:\n%s", flags[i], outcome.output);
    }
  }
  read_config(FLAGS("--check-config", "--pool", POOL("x")));
  assert_int_equal(outcome.result, KVP_CONFIG_DONE);
  assert_non_null(strstr(outcome.output, "configuration is valid"));
  expect_flag_complaint(FLAGS("--check-config", "--device", "host"), "--device: device \"host\"");
}

static void test_the_sample_is_valid(void **state) {
  (void)state;
  read_config(FLAGS("--check-config", "--config", KVPOOL_SOURCE_DIR "/deploy/kvpoold.conf"));
  assert_int_equal(outcome.result, KVP_CONFIG_DONE);
  assert_non_null(strstr(outcome.output, "1 devices, 2 pools"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_defaults),
      cmocka_unit_test(test_a_file_with_everything),
      cmocka_unit_test(test_flags_win),
      cmocka_unit_test(test_attach_socket_follows_the_socket),
      cmocka_unit_test(test_ipc_uids),
      cmocka_unit_test(test_byte_suffixes),
      cmocka_unit_test(test_complaints_of_a_file_name_the_line),
      cmocka_unit_test(test_literals_that_would_wrap),
      cmocka_unit_test(test_literals_that_are_none),
      cmocka_unit_test(test_literals_of_an_included_file),
      cmocka_unit_test(test_device_names),
      cmocka_unit_test(test_complaints_about_pools),
      cmocka_unit_test(test_pools_must_fit_what_devices_may_take),
      cmocka_unit_test(test_flag_complaints),
      cmocka_unit_test(test_answers),
      cmocka_unit_test(test_the_sample_is_valid),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
