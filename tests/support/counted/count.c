/* Counts the bytes of all blocks of memory that a process has from the C library, and their peak.
 *
 * Built as a shared library and put before glibc by LD_PRELOAD. Blocks below LEAST bytes are the
 * interpreter's own objects and do not count.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

enum { LEAST = 1024 };

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long now, peak;

static void *gained(void *block) {
  size_t size = block ? malloc_usable_size(block) : 0;
  if (size >= LEAST) {
    long total = atomic_fetch_add(&now, (long)size) + (long)size;
    long seen = atomic_load(&peak);
    while (total > seen && !atomic_compare_exchange_weak(&peak, &seen, total)) {
    }
  }
  return block;
}

static void lost(void *block) {
  size_t size = block ? malloc_usable_size(block) : 0;
  if (size >= LEAST) atomic_fetch_sub(&now, (long)size);
}

void *malloc(size_t size) { return gained(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return gained(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return gained(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
  void *made = memalign(alignment, size);
  if (!made) return ENOMEM;
  *block = made;
  return 0;
}

void *realloc(void *block, size_t size) {
  lost(block);
  void *made = __libc_realloc(block, size);
  if (!made && size) gained(block);
  return gained(made);
}

void free(void *block) {
  lost(block);
  __libc_free(block);
}

long counted_now(void) { return now; }
long counted_peak(void) { return peak; }
void counted_restart(void) { peak = now; }
