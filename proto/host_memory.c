/* Reads /proc/meminfo and the memory limits of the control groups (v2 and v1) around this process.
 *
 * A memfd is not refused by the kernel when memory runs out; somebody is killed instead. So we look before we take.
 */
#include "proto/host_memory.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { path_bytes_max = 4096, line_bytes_max = 4352 };

/* Names of the files of one version of the interface. */
struct cgroup_files {
  const char *root;
  const char *limit;
  const char *usage;
  const char *reclaimable; /* key in memory.stat */
};

static const struct cgroup_files cgroup_v2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};
static const struct cgroup_files cgroup_v1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                              "memory.usage_in_bytes", "total_inactive_file"};

static uint64_t min_u64(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

/* A file that holds one number; `otherwise` when there is none ("max" among them). */
static uint64_t number_read(const char *directory, const char *name, uint64_t otherwise) {
  char path[path_bytes_max + 64];
  (void)snprintf(path, sizeof path, "%s/%s", directory, name);
  FILE *file = fopen(path, "re");
  if (file == NULL) {
    return otherwise;
  }
  char text[32] = "";
  char *end = text;
  uint64_t number = otherwise;
  if (fgets(text, sizeof text, file) != NULL) {
    number = strtoull(text, &end, 10);
  }
  (void)fclose(file);
  return end == text ? otherwise : number;
}

/* The number behind a key at a line's beginning. */
static uint64_t key_read(const char *path, const char *key, uint64_t otherwise) {
  FILE *file = fopen(path, "re");
  if (file == NULL) {
    return otherwise;
  }
  char line[256];
  size_t key_length = strlen(key);
  uint64_t number = otherwise;
  while (fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, key, key_length) == 0 && (line[key_length] == ' ' || line[key_length] == ':')) {
      number = strtoull(line + key_length + 1, NULL, 10);
      break;
    }
  }
  (void)fclose(file);
  return number;
}

/* Applies the limits of a group and of all its ancestors. */
static void cgroup_apply(const struct cgroup_files *files, const char *group, struct kvp_host_memory *memory) {
  char directory[path_bytes_max];
  char stat[path_bytes_max + 64];
  size_t root_length = strlen(files->root);
  int length = snprintf(directory, sizeof directory, "%s%s", files->root, group);
  if (length < 0 || (size_t)length >= sizeof directory) {
    return;
  }
  for (;;) {
    uint64_t limit = number_read(directory, files->limit, UINT64_MAX);
    if (limit < memory->total_bytes) {
      (void)snprintf(stat, sizeof stat, "%s/memory.stat", directory);
      uint64_t usage = number_read(directory, files->usage, 0);
      uint64_t reclaimable = min_u64(key_read(stat, files->reclaimable, 0), usage);
      uint64_t used = usage - reclaimable;
      memory->total_bytes = limit;
      memory->available_bytes = min_u64(memory->available_bytes, limit > used ? limit - used : 0);
    }
    char *slash = strrchr(directory, '/');
    if (slash == NULL || (size_t)(slash - directory) < root_length) {
      return;
    }
    *slash = '\0';
  }
}

void kvp_host_memory_read(struct kvp_host_memory *out) {
  uint64_t total_kib = key_read("/proc/meminfo", "MemTotal", UINT64_MAX);
  uint64_t available_kib = key_read("/proc/meminfo", "MemAvailable", UINT64_MAX);
  out->total_bytes = total_kib == UINT64_MAX ? UINT64_MAX : total_kib * 1024;
  out->available_bytes = available_kib == UINT64_MAX ? UINT64_MAX : available_kib * 1024;

  FILE *file = fopen("/proc/self/cgroup", "re");
  if (file == NULL) {
    return;
  }
  char line[line_bytes_max];
  while (fgets(line, sizeof line, file) != NULL) {
    line[strcspn(line, "\n")] = '\0';
    char *memory = strstr(line, ":memory:");
    if (strncmp(line, "0::", 3) == 0) {
      cgroup_apply(&cgroup_v2, line + 3, out);
    } else if (memory != NULL) {
      cgroup_apply(&cgroup_v1, memory + strlen(":memory:"), out);
    }
  }
  (void)fclose(file);
}
