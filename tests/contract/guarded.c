/* See guarded.h. */
#include "tests/contract/guarded.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { page_bytes = 4096 };

struct guarded guarded_make(uint64_t bytes, bool at_end, uint8_t fill) {
  size_t inner = (bytes + page_bytes - 1) / page_bytes * page_bytes;
  struct guarded memory = {.bytes = bytes, .mapping_bytes = inner + 2 * (size_t)page_bytes};
  memory.mapping = mmap(NULL, memory.mapping_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory.mapping == MAP_FAILED) {
    perror("mmap");
    exit(1);
  }
  uint8_t *begin = (uint8_t *)memory.mapping + page_bytes;
  if (inner != 0 && mprotect(begin, inner, PROT_READ | PROT_WRITE) != 0) {
    perror("mprotect");
    exit(1);
  }
  if (bytes != 0) {
    memory.base = at_end ? begin + (inner - bytes) : begin;
    memset(memory.base, fill, bytes);
  }
  return memory;
}

void guarded_free(struct guarded *memory) {
  (void)munmap(memory->mapping, memory->mapping_bytes);
  *memory = (struct guarded){0};
}
