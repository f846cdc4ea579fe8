/* A file without a name (O_TMPFILE) gets one when it is whole: however the program ends, nothing is left of it. Where
 * the file system can't do that it has a name of its own meanwhile. */
#include "client/kvpoolctl/output.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvpoolctl/hint.h"
#include "client/kvpoolctl/interrupt.h"

enum { links_max = 40, names_max = 100, part_suffix_bytes = 40, new_mode = 0666, mode_bits = 07777 };

int kvp_ctl_output_failed(const struct kvp_ctl *ctl, const char *path) {
  int failure = errno;
  const char *hint = failure == ENOSPC || failure == EDQUOT || failure == EFBIG
                         ? "free some space, or write elsewhere"
                     : failure == ENOENT || failure == ENOTDIR ? "the directory has to be there"
                     : failure == EPIPE                        ? "whoever was to read it is gone"
                                                               : "write elsewhere, or see to the permissions";
  return kvp_ctl_refuse(ctl, hint, "%s can't be written: %s", path, strerror(failure));
}

/* The path of directory-of(path)/name. */
static char *beside(const char *path, const char *name) {
  const char *slash = strrchr(path, '/');
  size_t head = slash == NULL || name[0] == '/' ? 0 : (size_t)(slash + 1 - path);
  size_t bytes = head + strlen(name) + 1;
  char *joined = kvp_ctl_allocate(bytes, 1);
  (void)snprintf(joined, bytes, "%.*s%s", (int)head, path, name);
  return joined;
}

/* Through symbolic links, to a path that is none; what it leads to need not be there. NULL: errno. */
static char *resolve(const char *path) {
  char *at = beside("", path);
  for (int links = 0;; links++) {
    char name[PATH_MAX];
    ssize_t length = readlink(at, name, sizeof name - 1);
    if (length < 0 && (errno == EINVAL || errno == ENOENT)) { /* no link, or nothing at all */
      return at;
    }
    if (length < 0 || links == links_max) {
      errno = length < 0 ? errno : ELOOP;
      free(at);
      return NULL;
    }
    name[length] = '\0';
    char *next = beside(at, name);
    free(at);
    at = next;
  }
}

/* Without a name where that can be had, else under output->part. -1: errno. */
static int part_open(struct kvp_ctl_output *output) {
  char *directory = beside(output->target, ".");
  int fd = open(directory, O_TMPFILE | O_WRONLY | O_CLOEXEC, new_mode);
  free(directory);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) {
    return fd;
  }
  size_t bytes = strlen(output->target) + part_suffix_bytes;
  output->part = kvp_ctl_allocate(bytes, 1);
  (void)snprintf(output->part, bytes, "%s.kvpoolctl-%d", output->target, (int)getpid());
  fd = open(output->part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, new_mode);
  if (fd < 0) {
    free(output->part);
    output->part = NULL;
  } else {
    kvp_ctl_interrupt_file(output->part);
  }
  return fd;
}

/* A file that is there lends its mode and its owner; status NULL: there is none. */
static int part_create(struct kvp_ctl_output *output, const struct stat *status) {
  if (status != NULL && access(output->target, W_OK) != 0) {
    return -1;
  }
  int fd = part_open(output);
  if (fd >= 0 && status != NULL) {
    /* Only root may give a file away; for others it stays theirs. */
    int failed = fchown(fd, status->st_uid, status->st_gid);
    (void)failed;
    (void)fchmod(fd, status->st_mode & mode_bits);
  }
  return fd;
}

/* The same file as standard output is. */
static bool is_standard_output(const struct stat *status) {
  struct stat mine;
  return fstat(STDOUT_FILENO, &mine) == 0 && mine.st_dev == status->st_dev && mine.st_ino == status->st_ino;
}

int kvp_ctl_output_create(const struct kvp_ctl *ctl, const char *path, struct kvp_ctl_output *out) {
  struct kvp_ctl_output output = {.path = path};
  struct stat status;
  bool is_there = stat(path, &status) == 0;
  int fd = -1;
  output.is_stdout = strcmp(path, "-") == 0 || (is_there && is_standard_output(&status));
  if (output.is_stdout && ctl->json) {
    return kvp_ctl_refuse(ctl, "name another FILE",
                          "the document of --json and the rows can't both go to standard output");
  }
  if (output.is_stdout) {
    fd = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0);
  } else if (is_there && S_ISDIR(status.st_mode)) {
    errno = EISDIR;
  } else if (is_there && !S_ISREG(status.st_mode)) {
    fd = open(path, O_WRONLY | O_NOCTTY | O_CLOEXEC);
  } else {
    output.target = resolve(path);
    fd = output.target == NULL ? -1 : part_create(&output, is_there ? &status : NULL);
  }
  output.stream = fd < 0 ? NULL : fdopen(fd, "wb");
  if (output.stream == NULL) {
    int exit_status = kvp_ctl_output_failed(ctl, path);
    if (fd >= 0) {
      (void)close(fd);
    }
    kvp_ctl_output_close(&output);
    return exit_status;
  }
  *out = output;
  return KVP_CTL_OK;
}

/* Gives the nameless file a name beside its target, which nobody else has. */
static bool part_link(struct kvp_ctl_output *output) {
  size_t bytes = strlen(output->target) + part_suffix_bytes;
  char source[64];
  char *part = kvp_ctl_allocate(bytes, 1);
  (void)snprintf(source, sizeof source, "/proc/self/fd/%d", fileno(output->stream));
  for (int i = 0; i < names_max; i++) {
    (void)snprintf(part, bytes, "%s.kvpoolctl-%d-%d", output->target, (int)getpid(), i);
    if (linkat(AT_FDCWD, source, AT_FDCWD, part, AT_SYMLINK_FOLLOW) == 0) {
      output->part = part;
      kvp_ctl_interrupt_file(part);
      return true;
    }
    if (errno != EEXIST) {
      break;
    }
  }
  free(part);
  return false;
}

int kvp_ctl_output_finish(const struct kvp_ctl *ctl, struct kvp_ctl_output *output) {
  assert(output->stream != NULL);
  bool is_good = fflush(output->stream) == 0 && (output->target == NULL || output->part != NULL || part_link(output));
  is_good = is_good && (output->part == NULL || rename(output->part, output->target) == 0);
  if (is_good) {
    kvp_ctl_interrupt_file(NULL);
    free(output->part);
    output->part = NULL;
  }
  int failure = errno;
  FILE *stream = output->stream;
  output->stream = NULL;
  if (fclose(stream) != 0 && is_good) {
    is_good = false;
    failure = errno;
  }
  errno = failure;
  return is_good ? KVP_CTL_OK : kvp_ctl_output_failed(ctl, output->path);
}

void kvp_ctl_output_close(struct kvp_ctl_output *output) {
  if (output->stream != NULL) {
    (void)fclose(output->stream);
    output->stream = NULL;
  }
  if (output->part != NULL) {
    kvp_ctl_interrupt_file(NULL);
    (void)unlink(output->part);
    free(output->part);
  }
  free(output->target);
}
