/* ds4.c: the engine. One file, to be read from top to bottom; a section uses only those above it.
 *
 *   1 errors and small tools      6 model: sizes, weights, checks    11 MTP head and drafters
 *   2 threads                     7 row operations                   12 acceptance and speculation
 *   3 GGUF                        8 caches                           13 sessions and batches
 *   4 tensor types and kernels    9 forward                          14 save and load
 *   5 tokenizer, chat template   10 sampling
 *
 * Two rules hold everywhere and make speculation exact. A row's result never depends on the rows that run with it, on the
 * threads or on the instruction set: every sum has one order. And whatever a session remembers is addressed by absolute
 * position, so that going back is setting the position. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "ds4.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ds4 reads little-endian files in place and needs a little-endian machine"
#endif

/* ============================================================================================================================
 * 1. Errors and small tools
 *
 * fail() records the thread's one error message and returns -1, so that a failing line reads `return fail(...)`; its kind is
 * DS4_INVALID, another's is given to fail_as, or by the caller that knows what was being done to failed_as. Memory is
 * asked for through mem_new and mem_grow only: every one of these may fail, is checked, and can be made to fail by a test.
 * ========================================================================================================================== */

static _Thread_local char last_error[1024];
static _Thread_local ds4_error_kind last_kind;

/* Bytes of the UTF-8 character at `text`, which has n bytes left, at least one; 0 if it is not well-formed. A second byte that
 * would make an overlong form, a surrogate or more than U+10FFFF is none. */
static size_t utf8_size(const char *text, size_t n) {
    const unsigned char *p = (const unsigned char *)text;
    size_t size = *p < 0x80 ? 1 : *p < 0xc2 ? 0 : *p < 0xe0 ? 2 : *p < 0xf0 ? 3 : *p < 0xf5 ? 4 : 0;
    if (size <= 1 || size > n) return size <= n ? size : 0;
    if (p[1] < (*p == 0xe0 ? 0xa0 : *p == 0xf0 ? 0x90 : 0x80) || p[1] > (*p == 0xed ? 0x9f : *p == 0xf4 ? 0x8f : 0xbf))
        return 0;
    for (size_t i = 2; i < size; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return size;
}

/* Messages quote names from files. Bytes that a terminal could act on (C0 and C1 controls), or that are not UTF-8, become '?'. */
static void make_printable(char *text) {
    for (char *p = text, *end = text + strlen(text); p < end;) {
        size_t size = utf8_size(p, (size_t)(end - p));
        unsigned char c = (unsigned char)p[0], next = (unsigned char)p[1];
        bool control = c < 0x20 || c == 0x7f || (c == 0xc2 && next < 0xa0);
        if (!size || control) *p = '?';
        if (size == 2 && control) p[1] = '?';
        p += size ? size : 1;
    }
}

__attribute__((format(printf, 2, 3))) static void set_error(ds4_error_kind kind, const char *format, ...) {
    char text[sizeof last_error];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    make_printable(text);
    memcpy(last_error, text, sizeof text);
    last_kind = kind;
}
#define fail_as(kind, ...)            \
    __extension__({                   \
        set_error(kind, __VA_ARGS__); \
        -1;                           \
    })
#define fail(...) fail_as(DS4_INVALID, __VA_ARGS__)

/* The last failure was one of `kind`, if it did not say better itself. */
static int failed_as(ds4_error_kind kind) {
    if (last_kind == DS4_INVALID) last_kind = kind;
    return -1;
}

/* Memory runs out wherever it is asked for: whoever knows what for says it. */
static int name_if_no_memory(const char *what) {
    static const char text[] = "out of memory";
    char reason[sizeof last_error];
    if (memcmp(last_error, text, sizeof text - 1)) return -1;
    memcpy(reason, last_error, sizeof reason);
    return fail_as(DS4_NO_MEMORY, "%s: %.200s", what, reason);
}

const char *ds4_last_error(void) { return last_error; }
ds4_error_kind ds4_last_error_kind(void) { return last_kind; }
const char *ds4_version(void) { return DS4_VERSION; }

/* A test build (-DDS4_FAULTS) counts every request to the system and makes one of them fail, and counts what is not freed. */
#ifdef DS4_FAULTS
static _Atomic long fault_countdown = -1, blocks_held, bytes_held;
static bool fault(void) { return atomic_fetch_sub(&fault_countdown, 1) == 0; }
static void count_block(int by, size_t bytes) {
    atomic_fetch_add(&blocks_held, by);
    atomic_fetch_add(&bytes_held, by * (long)bytes);
}
#else
static bool fault(void) { return false; }
static void count_block(int by, size_t bytes) { (void)by, (void)bytes; }
#endif

enum { ALIGN = 64 };    /* a cache line, and the widest vector */

static void *mem_new(size_t bytes) {
    void *p = NULL;
    size_t rounded = bytes > SIZE_MAX - ALIGN ? SIZE_MAX : ((bytes ? bytes : 1) + ALIGN - 1) / ALIGN * ALIGN;
    if (rounded == SIZE_MAX || fault()) {
        fail_as(DS4_NO_MEMORY, "out of memory: %zu bytes asked for", bytes);
        return NULL;
    }
    /* calloc leaves large blocks untouched until they are used: a long context costs memory as it fills. */
    void *raw = calloc(1, rounded + ALIGN);
    if (raw) {
        p = (void *)(((uintptr_t)raw + ALIGN) / ALIGN * ALIGN);
        ((void **)p)[-1] = raw;
        ((size_t *)p)[-2] = bytes;
        count_block(1, bytes);
    }
    if (!p) fail_as(DS4_NO_MEMORY, "out of memory: %zu bytes asked for", bytes);
    return p;
}

/* What was asked for. */
static size_t mem_size(const void *p) { return p ? ((const size_t *)p)[-2] : 0; }

static void mem_free(void *p) {
    if (!p) return;
    count_block(-1, mem_size(p));
    free(((void **)p)[-1]);
}

/* A larger copy of p, zeroed beyond old_bytes; on failure p stays as it was. */
static void *mem_grow(void *p, size_t old_bytes, size_t new_bytes) {
    void *bigger = mem_new(new_bytes);
    if (!bigger) return NULL;
    if (old_bytes) memcpy(bigger, p, old_bytes < new_bytes ? old_bytes : new_bytes);
    mem_free(p);
    return bigger;
}

/* count * size zeroed bytes, with the product checked. */
static void *mem_array(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) bytes = SIZE_MAX;
    return mem_new(bytes);
}

typedef struct {
    const char *p;
    size_t n;
} str;

static str str_of(const char *text) { return (str){text, strlen(text)}; }
static bool str_is(str a, const char *b) { return a.n == strlen(b) && memcmp(a.p, b, a.n) == 0; }
static int str_cmp(str a, str b) {
    int order = memcmp(a.p, b.p, a.n < b.n ? a.n : b.n);
    return order ? order : (a.n > b.n) - (a.n < b.n);
}
/* For "%.*s": names in files may be long. */
#define STR_ARG(s) (int)((s).n < 200 ? (s).n : 200), (s).p

static char *str_copy(const char *text) {
    size_t n = strlen(text) + 1;
    char *copy = mem_new(n);
    if (copy) memcpy(copy, text, n);
    return copy;
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* How a thread's processor rounds and treats the smallest numbers is the caller's to set (a library built with -ffast-math does
 * so for whoever loads it), and bits depend on it. float_modes_ours sets what IEEE 754 has by default and returns what was set. */
static inline uint64_t float_modes(void) {
#if defined(__x86_64__)
    return _mm_getcsr() & ~0x3fu; /* without the flags of what has happened */
#elif defined(__aarch64__)
    uint64_t modes;
    __asm__ volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
#else
    return 0;
#endif
}

static inline void float_modes_set(uint64_t modes) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)modes);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(modes) : "memory");
#else
    (void)modes;
#endif
}

#if defined(__x86_64__)
enum { FLOAT_DEFAULT = 0x1f80 }; /* no traps, to nearest, nothing flushed */
#else
enum { FLOAT_DEFAULT = 0 };
#endif

static uint64_t float_modes_ours(void) {
    uint64_t modes = float_modes();
    if (modes != FLOAT_DEFAULT) float_modes_set(FLOAT_DEFAULT);
    return modes;
}

static void float_modes_theirs(uint64_t modes) {
    if (modes != FLOAT_DEFAULT) float_modes_set(modes);
}

static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }

/* A 64-bit checksum of bytes, continued from `h`: for damage and mix-ups, not against forgery. */
static uint64_t checksum(uint64_t h, const void *data, size_t n) {
    const uint8_t *p = data;
    const uint64_t k = 0x9e3779b97f4a7c15u;
    h ^= n * k;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        h = (h ^ w) * k;
        h ^= h >> 29;
    }
    for (; n; n--) h = (h ^ *p++) * k;
    h = (h ^ (h >> 32)) * 0xd6e8feb86659fd93u;
    return h ^ (h >> 32);
}

/* ============================================================================================================================
 * 2. Threads
 *
 * A pool of workers that lives as long as the engine. pool_run splits n items into chunks; whoever is free claims the next
 * chunk, the calling thread included, and the call returns when all chunks are done. Who computes what never shows in the
 * result. A worker that is late (its core is busy elsewhere) claims nothing and is not waited for; one without work spins for
 * a while, longer than a pass has nothing for it, then sleeps. Handing a job out costs about a microsecond and waking a sleeper
 * twenty, so small jobs stay with the caller, and sleepers are woken when they have missed more than that.
 * ========================================================================================================================== */

typedef void (*job_fn)(void *ctx, int64_t begin, int64_t end, int thread);

enum { MAX_THREADS = 256, MAX_CHUNKS = 0xffff };
enum { STACK_BYTES = 1 << 20 }; /* kernels keep up to a quarter of it there, more than some systems give a thread by default */
/* In nanoseconds: a job worth handing out, a chunk of it, what a sleeper must have missed, and how long one spins. */
enum { SPLIT_NS = 5000, CHUNK_NS = 800, WAKE_NS = 30000, SPIN_NS = 200000 };

typedef struct pool pool;
typedef struct {
    pool *pool;
    pthread_t thread;
    int index;          /* 1.., the calling thread is 0 */
} worker;

struct pool {
    int threads;
    /* generation << 32 | chunks << 16 | next chunk: claiming is one compare-and-swap, and a claim can only succeed while the
     * caller waits for that very job, so that fn, ctx, n and grain may be read after it. */
    _Alignas(ALIGN) _Atomic uint64_t ticket;
    _Alignas(ALIGN) _Atomic int done;
    _Atomic int sleepers, caller_sleeps;
    _Atomic bool stop;
    _Alignas(ALIGN) job_fn fn;
    void *ctx;
    int64_t n, grain;
    int64_t missed;     /* nanoseconds of work that sleepers could have shared */
    pthread_mutex_t lock;
    pthread_cond_t wake, finished;
    worker workers[MAX_THREADS];
};

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool ticket_open(uint64_t t) { return (t & 0xffff) < (t >> 16 & 0xffff); }

/* Claims and runs a share of what is left of the job on offer, at first many chunks at a time, so that a thread goes through memory
 * in long stretches, and in the end single ones, so that all finish together; false when none is left. */
static bool pool_claim(pool *p, int thread) {
    uint64_t t = atomic_load(&p->ticket);
    int64_t first, chunks, share;
    do {
        if (!ticket_open(t)) return false;
        first = (int64_t)(t & 0xffff);
        chunks = (int64_t)(t >> 16 & 0xffff);
        share = (chunks - first) / (4 * p->threads);
        if (share < 1) share = 1;
    } while (!atomic_compare_exchange_weak(&p->ticket, &t, t + (uint64_t)share));
    int64_t begin = first * p->grain, end = (first + share) * p->grain;
    p->fn(p->ctx, begin, end < p->n ? end : p->n, thread);
    if (atomic_fetch_add(&p->done, (int)share) + share == chunks && atomic_load(&p->caller_sleeps)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_signal(&p->finished);
        pthread_mutex_unlock(&p->lock);
    }
    return true;
}

/* Spins until a job is on offer; false after SPIN_NS without one. */
static bool pool_spin(const pool *p) {
    for (double start = now_ms(); now_ms() - start < (double)SPIN_NS * 1e-6;)
        for (int i = 0; i < 32; i++) {
            if (ticket_open(atomic_load(&p->ticket)) || atomic_load(&p->stop)) return true;
            cpu_relax();
        }
    return false;
}

/* A woken worker wakes the next, so that the caller has one call to make. */
static void *worker_main(void *arg) {
    worker *w = arg;
    pool *p = w->pool;
    float_modes_ours(); /* a thread begins with those of the one that made it */
    while (!atomic_load(&p->stop)) {
        if (pool_claim(p, w->index) || pool_spin(p)) continue;
        pthread_mutex_lock(&p->lock);
        atomic_fetch_add(&p->sleepers, 1);
        while (!ticket_open(atomic_load(&p->ticket)) && !atomic_load(&p->stop)) pthread_cond_wait(&p->wake, &p->lock);
        if (atomic_fetch_sub(&p->sleepers, 1) > 1) pthread_cond_signal(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    return NULL;
}

static void pool_wake(pool *p) {
    pthread_mutex_lock(&p->lock);
    pthread_cond_signal(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

static void pool_free(pool *p) {
    if (!p) return;
    atomic_store(&p->stop, true);
    pool_wake(p);       /* and each wakes the next */
    for (int i = 1; i < p->threads; i++) pthread_join(p->workers[i].thread, NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->wake);
    pthread_cond_destroy(&p->finished);
    mem_free(p);
}

/* Signals go to the program's own threads, where its handlers expect to run and its masks hold; only what a fault of the thread
 * itself raises comes to a worker. Threads inherit the mask they are made under: `before` is the caller's. */
static void block_signals(sigset_t *before) {
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF};
    sigset_t set;
    sigfillset(&set);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&set, own[i]);
    pthread_sigmask(SIG_BLOCK, &set, before);
}

static pool *pool_new(int threads) {
    pool *p = mem_new(sizeof *p);
    if (!p) return NULL;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->finished, NULL);
    sigset_t before;
    int error = 0;
    block_signals(&before);
    pthread_attr_t attr;
    size_t stack = 0;
    pthread_attr_init(&attr);
    if (pthread_attr_getstacksize(&attr, &stack) == 0 && stack < STACK_BYTES) pthread_attr_setstacksize(&attr, STACK_BYTES);
    for (p->threads = 1; p->threads < threads; p->threads++) {
        worker *w = &p->workers[p->threads];
        *w = (worker){.pool = p, .index = p->threads};
        error = fault() ? EAGAIN : pthread_create(&w->thread, &attr, worker_main, w);
        if (error) break;
    }
    pthread_attr_destroy(&attr);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) return p;
    fail_as(DS4_NO_MEMORY, "cannot start thread %d of %d: %s", p->threads + 1, threads, strerror(error));
    pool_free(p);
    return NULL;
}

/* Waits until all chunks are done: others may be at their last one. */
static void pool_finish(pool *p, int chunks) {
    for (double start = now_ms(); atomic_load(&p->done) < chunks;) {
        for (int i = 0; i < 32 && atomic_load(&p->done) < chunks; i++) cpu_relax();
        if (now_ms() - start < (double)SPIN_NS * 1e-6) continue;
        pthread_mutex_lock(&p->lock);
        atomic_store(&p->caller_sleeps, 1);
        while (atomic_load(&p->done) < chunks) pthread_cond_wait(&p->finished, &p->lock);
        atomic_store(&p->caller_sleeps, 0);
        pthread_mutex_unlock(&p->lock);
    }
}

/* Whether sleepers, if there are any, should be woken for a job of so many nanoseconds. */
static bool pool_needs_sleepers(pool *p, int64_t ns) {
    if (!atomic_load(&p->sleepers)) return false;
    p->missed += ns;
    if (p->missed < WAKE_NS) return false;
    p->missed = 0;
    return true;
}

/* Runs fn over [0, n), items that take about `ns` nanoseconds each. */
static void pool_run(pool *p, int64_t n, int64_t ns, job_fn fn, void *ctx) {
    if (n <= 0) return;
    if (ns < 1) ns = 1;
    bool wake = false;
    if (p->threads == 1 || n == 1 || n * ns < SPLIT_NS ||
        (!(wake = pool_needs_sleepers(p, n * ns)) && atomic_load(&p->sleepers) == p->threads - 1)) {
        fn(ctx, 0, n, 0);
        return;
    }
    int64_t chunk_ns = n * ns / (p->threads * 32);
    if (chunk_ns < CHUNK_NS) chunk_ns = CHUNK_NS;
    p->grain = (chunk_ns + ns / 2) / ns;
    if (p->grain < 1) p->grain = 1;
    if (n / p->grain >= MAX_CHUNKS) p->grain = n / (MAX_CHUNKS - 1) + 1;
    int chunks = (int)((n + p->grain - 1) / p->grain);
    p->fn = fn;
    p->ctx = ctx;
    p->n = n;
    atomic_store(&p->done, 0);
    uint64_t generation = (atomic_load(&p->ticket) >> 32) + 1;
    atomic_store(&p->ticket, generation << 32 | (uint64_t)chunks << 16);
    if (wake) pool_wake(p);
    while (pool_claim(p, 0)) {}
    pool_finish(p, chunks);
}

#if defined(__linux__)
/* The beginning of a small file as text; false if it cannot be read. */
static bool read_text(const char *dir, const char *name, char *text, size_t n) {
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s%s", dir, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, n - 1);
    if (fd >= 0) close(fd);
    text[got > 0 ? got : 0] = 0;
    return got > 0;
}

/* The processors' time that a control group has, in processors; its parents', up to `root`, if they have less. INFINITY: no limit. */
static double group_quota(const char *root, const char *group) {
    char dir[PATH_MAX], text[64];
    double least = INFINITY, quota, period;
    if ((size_t)snprintf(dir, sizeof dir, "%s%s", root, group) >= sizeof dir) return INFINITY;
    for (char *end = dir + strlen(dir); end; end = strrchr(dir + strlen(root), '/')) {
        *end = 0;
        bool limited = read_text(dir, "/cpu.max", text, sizeof text) && sscanf(text, "%lf %lf", &quota, &period) == 2;
        if (!limited && read_text(dir, "/cpu.cfs_quota_us", text, sizeof text) && sscanf(text, "%lf", &quota) == 1)
            limited = read_text(dir, "/cpu.cfs_period_us", text, sizeof text) && sscanf(text, "%lf", &period) == 1;
        if (limited && quota > 0 && period > 0 && quota / period < least) least = quota / period;
    }
    return least;
}

/* Whether "cpu" is among names with commas between them. */
static bool lists_cpu(const char *names) {
    for (const char *at = names; (at = strstr(at, "cpu")); at += 3)
        if ((at == names || at[-1] == ',') && (!at[3] || at[3] == ',')) return true;
    return false;
}

/* What the process's control groups leave it, of version 2 ("0::/path") and 1 ("4:cpu,cpuacct:/path"): `groups` lists them, and they
 * are files below `root`. In a container, where the path may be of the outside, the limit is found at the root. */
static double cpu_quota(const char *groups, const char *root) {
    char text[8192], dir[PATH_MAX];
    double least = INFINITY;
    if (!read_text(groups, "", text, sizeof text)) return least;
    for (char *line = text, *rest = NULL; (line = strtok_r(line, "\n", &rest)); line = NULL) {
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        if (*++names && !lists_cpu(names)) continue;
        snprintf(dir, sizeof dir, "%s%s", root, *names ? "/cpu" : "");
        double quota = group_quota(dir, group);
        if (quota < least) least = quota;
    }
    return least;
}
#endif

/* The processors this process may run on, by its affinity and by what its control groups leave it: threads beyond that would spin
 * away the time of those that work. */
static int cpu_count(void) {
#if defined(__linux__)
    cpu_set_t set;
    double quota = cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    int most = quota < (double)MAX_THREADS ? max_int(1, (int)quota) : MAX_THREADS;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return max_int(1, min_int(CPU_COUNT(&set), most));
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (int)n;
}

/* ============================================================================================================================
 * 3. GGUF
 *
 * Maps a file (all parts of a split one) read-only and indexes its keys and tensors in place. Nothing in the file is trusted:
 * every count is bounded by the bytes that are left before anything is allocated for it, every sum and product is checked,
 * and a tensor's bytes lie inside its part. Format: the GGUF specification, versions 2 and 3, little endian.
 * ========================================================================================================================== */

enum { G_U8, G_I8, G_U16, G_I16, G_U32, G_I32, G_F32, G_BOOL, G_STRING, G_ARRAY, G_U64, G_I64, G_F64, G_TYPES };
static const uint8_t gguf_size[G_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
enum { MAX_PARTS = 1024, MAX_NESTING = 4, MAX_ENTRIES = 1 << 19 };

typedef struct {
    str key;
    uint32_t type;              /* of an array: its elements' */
    bool array;
    uint64_t count;             /* elements of an array, else 1 */
    const uint8_t *value, *end; /* an array's first element; end: where the value's bytes end */
} meta;

typedef struct {
    str name;
    uint32_t type;
    int n_dims, part;
    int64_t dims[4];            /* fastest first; missing ones are 1 */
    uint64_t offset, bytes;     /* bytes 0: a type that is not read */
    const uint8_t *data;
} tensor;

typedef struct {
    const uint8_t *map;
    size_t size;
} mapping;

typedef struct {
    char *path;                 /* as given, for messages */
    mapping parts[MAX_PARTS];
    int n_parts;
    meta *metas;                /* sorted by key; of the first part */
    size_t n_metas;
    tensor *tensors;            /* in file order */
    tensor **by_name;
    size_t n_tensors;
} gguf;

/* Sizes of tensor data come from section 4's table of types. */
static int64_t type_row_bytes(uint32_t type, int64_t n);    /* -1: not a multiple of the block; 0: type not read */
static const char *type_name(uint32_t type);

/* ---- a cursor that cannot leave the file ---- */

typedef struct {
    const uint8_t *p, *end;
    const char *path;
    int part;
} cursor;

static size_t cursor_left(const cursor *c) { return (size_t)(c->end - c->p); }

static int take(cursor *c, void *out, size_t n, const char *what) {
    if (cursor_left(c) < n) return fail("%s: truncated: the file ends inside %s", c->path, what);
    memcpy(out, c->p, n);
    c->p += n;
    return 0;
}

static bool valid_utf8(str s) {
    size_t i = 0, size = 1;
    for (; size && i < s.n; i += size) size = utf8_size(s.p + i, s.n - i);
    return size > 0;
}

static int take_string(cursor *c, str *out, const char *what) {
    uint64_t n;
    if (take(c, &n, 8, what)) return -1;
    if (n > cursor_left(c))
        return fail("%s: truncated: %s is said to have %llu bytes, %zu are left", c->path, what, (unsigned long long)n,
                    cursor_left(c));
    *out = (str){(const char *)c->p, (size_t)n};
    c->p += n;
    return 0;
}

/* Skips `count` values of a type and checks that they are there. */
static int skip_values(cursor *c, uint32_t type, uint64_t count, int depth, str key) {
    if (type >= G_TYPES)
        return fail("%s: key %.*s: value type %u is unknown (GGUF has 0 to %d)", c->path, STR_ARG(key), type, G_TYPES - 1);
    if (type != G_STRING && type != G_ARRAY) {
        if (count > cursor_left(c) / gguf_size[type])
            return fail("%s: truncated: key %.*s has %llu values, the file ends before them", c->path, STR_ARG(key),
                        (unsigned long long)count);
        c->p += count * gguf_size[type];
        return 0;
    }
    if (depth > MAX_NESTING) return fail("%s: key %.*s: arrays nested more than %d deep", c->path, STR_ARG(key), MAX_NESTING);
    if (count > cursor_left(c) / 8)
        return fail("%s: truncated: key %.*s has %llu values, the file ends before them", c->path, STR_ARG(key),
                    (unsigned long long)count);
    for (uint64_t i = 0; i < count; i++) {
        str skipped;
        uint32_t inner;
        uint64_t n;
        if (type == G_STRING) {
            if (take_string(c, &skipped, "a string of the metadata")) return -1;
        } else if (take(c, &inner, 4, "an array") || take(c, &n, 8, "an array") || skip_values(c, inner, n, depth + 1, key))
            return -1;
    }
    return 0;
}

static int take_meta(cursor *c, meta *m) {
    if (take_string(c, &m->key, "a metadata key") || take(c, &m->type, 4, "a metadata value")) return -1;
    if (!valid_utf8(m->key)) return fail("%s: a metadata key is not UTF-8: %.*s", c->path, STR_ARG(m->key));
    m->count = 1;
    if (m->type == G_ARRAY) {
        m->array = true;
        if (take(c, &m->type, 4, "an array") || take(c, &m->count, 8, "an array")) return -1;
    }
    m->value = c->p;
    if (skip_values(c, m->type, m->count, m->array ? 1 : 0, m->key)) return -1;
    m->end = c->p;
    return 0;
}

static int take_tensor(cursor *c, tensor *t, uint64_t alignment) {
    uint32_t n_dims;
    if (take_string(c, &t->name, "a tensor's name") || take(c, &n_dims, 4, "a tensor's description")) return -1;
    if (!valid_utf8(t->name)) return fail("%s: a tensor's name is not UTF-8: %.*s", c->path, STR_ARG(t->name));
    if (n_dims < 1 || n_dims > 4)
        return fail("%s: tensor %.*s has %u dimensions, expected 1 to 4", c->path, STR_ARG(t->name), n_dims);
    t->n_dims = (int)n_dims;
    t->part = c->part;
    uint64_t values = 1;
    for (int i = 0; i < 4; i++) {
        uint64_t d = 1;
        if (i < t->n_dims && take(c, &d, 8, "a tensor's dimensions")) return -1;
        if (d < 1 || d > INT32_MAX * (uint64_t)64 || __builtin_mul_overflow(values, d, &values) || values > INT64_MAX / 16)
            return fail("%s: tensor %.*s: dimension %d is %llu, which cannot be", c->path, STR_ARG(t->name), i,
                        (unsigned long long)d);
        t->dims[i] = (int64_t)d;
    }
    if (take(c, &t->type, 4, "a tensor's type") || take(c, &t->offset, 8, "a tensor's offset")) return -1;
    if (t->offset % alignment)
        return fail("%s: tensor %.*s: offset %llu is not a multiple of the alignment %llu", c->path, STR_ARG(t->name),
                    (unsigned long long)t->offset, (unsigned long long)alignment);
    int64_t row = type_row_bytes(t->type, t->dims[0]);
    if (row < 0)
        return fail("%s: tensor %.*s: rows of %lld values do not fill blocks of type %s", c->path, STR_ARG(t->name),
                    (long long)t->dims[0], type_name(t->type));
    if (__builtin_mul_overflow((uint64_t)row, values / (uint64_t)t->dims[0], &t->bytes))
        return fail("%s: tensor %.*s is larger than any memory", c->path, STR_ARG(t->name));
    return 0;
}

/* ---- lookups ---- */

static int meta_order(const void *a, const void *b) { return str_cmp(((const meta *)a)->key, ((const meta *)b)->key); }
static int name_order(const void *a, const void *b) {
    return str_cmp((*(tensor *const *)a)->name, (*(tensor *const *)b)->name);
}
static int place_order(const void *a, const void *b) {
    const tensor *x = *(tensor *const *)a, *y = *(tensor *const *)b;
    if (x->part != y->part) return x->part - y->part;
    return x->offset != y->offset ? (x->offset > y->offset) - (x->offset < y->offset)
                                  : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static const meta *gguf_meta(const gguf *g, const char *key) {
    meta wanted = {.key = str_of(key)};
    return g->n_metas ? bsearch(&wanted, g->metas, g->n_metas, sizeof *g->metas, meta_order) : NULL;
}

static const tensor *gguf_tensor(const gguf *g, const char *name) {
    tensor wanted = {.name = str_of(name)}, *key = &wanted;
    tensor **found = g->n_tensors ? bsearch(&key, g->by_name, g->n_tensors, sizeof *g->by_name, name_order) : NULL;
    return found ? *found : NULL;
}

/* Element i of a numeric value as a double, whatever numeric type the file chose. */
static double meta_number(const meta *m, uint64_t i) {
    const uint8_t *p = m->value + i * gguf_size[m->type];
    switch (m->type) {
    case G_U8:
    case G_BOOL: return *p;
    case G_I8: return (int8_t)*p;
#define READ(tag, ctype)         \
    case tag: {                  \
        ctype v;                 \
        memcpy(&v, p, sizeof v); \
        return (double)v;        \
    }
        READ(G_U16, uint16_t)
        READ(G_I16, int16_t)
        READ(G_U32, uint32_t)
        READ(G_I32, int32_t)
        READ(G_F32, float)
        READ(G_U64, uint64_t)
        READ(G_I64, int64_t)
        READ(G_F64, double)
#undef READ
    default: return NAN;
    }
}

static bool meta_is_number(const meta *m) { return m->type != G_STRING && m->type != G_ARRAY; }

static str meta_string(const gguf *g, const char *key) {
    const meta *m = gguf_meta(g, key);
    if (!m || m->array || m->type != G_STRING) return (str){NULL, 0};
    return (str){(const char *)m->value + 8, (size_t)(m->end - m->value - 8)};
}

/* The strings of an array, NULL if it is absent (*n 0) or memory is short (*n SIZE_MAX). */
static str *meta_strings(const gguf *g, const char *key, size_t *n) {
    const meta *m = gguf_meta(g, key);
    *n = 0;
    if (!m || !m->array || m->type != G_STRING || !m->count) return NULL;
    str *out = mem_array(m->count, sizeof *out);
    if (!out) {
        *n = SIZE_MAX;
        return NULL;
    }
    const uint8_t *p = m->value;
    for (uint64_t i = 0; i < m->count; i++) {
        uint64_t length;
        memcpy(&length, p, 8);
        out[i] = (str){(const char *)p + 8, (size_t)length};
        p += 8 + length;
    }
    *n = (size_t)m->count;
    return out;
}

/* ---- opening ---- */

static void gguf_close(gguf *g) {
    if (!g) return;
    for (int i = 0; i < g->n_parts; i++)
        if (g->parts[i].map) munmap((void *)(uintptr_t)g->parts[i].map, g->parts[i].size);
    mem_free(g->metas);
    mem_free(g->tensors);
    mem_free(g->by_name);
    mem_free(g->path);
    mem_free(g);
}

static size_t gguf_memory(const gguf *g) {
    return g ? mem_size(g->metas) + mem_size(g->tensors) + mem_size(g->by_name) + mem_size(g->path) + mem_size(g) : 0;
}

static int map_file(const char *path, mapping *out) {
    int fd =
        fault() ? (errno = EMFILE, -1) : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  /* a FIFO would wait for a writer */
    if (fd < 0) return fail("%s: cannot open: %s", path, strerror(errno));
    struct stat st;
    int result = -1;
    if (fstat(fd, &st)) fail("%s: cannot read: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode)) fail("%s: not a file", path);
    else if (st.st_size < 24) fail("%s: not a GGUF file: %lld bytes, a header alone has 24", path, (long long)st.st_size);
    else {
        void *map = fault() ? (errno = ENOMEM, MAP_FAILED) : mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) fail("%s: cannot map %lld bytes: %s", path, (long long)st.st_size, strerror(errno));
        else {
            *out = (mapping){map, (size_t)st.st_size};
            result = 0;
        }
    }
    close(fd);
    return result;
}

static int check_header(cursor *c, uint64_t *n_tensors, uint64_t *n_metas) {
    uint32_t magic, version;
    if (take(c, &magic, 4, "the header")) return -1;
    if (magic != 0x46554747) return fail("%s: not a GGUF file (it does not begin with \"GGUF\")", c->path);
    if (take(c, &version, 4, "the header")) return -1;
    if (version >= 1 << 16) return fail("%s: a big-endian GGUF file; expected little endian", c->path);
    if (version != 2 && version != 3) return fail("%s: GGUF version %u; expected 2 or 3", c->path, version);
    return take(c, n_tensors, 8, "the header") || take(c, n_metas, 8, "the header") ? -1 : 0;
}

static int check_alignment(const cursor *c, const meta *metas, size_t n, uint64_t *alignment) {
    *alignment = 32;
    for (size_t i = 0; i < n; i++) {
        if (!str_is(metas[i].key, "general.alignment")) continue;
        double a = !metas[i].array && meta_is_number(&metas[i]) ? meta_number(&metas[i], 0) : 0;
        if (!(a >= 8 && a <= 1 << 30) || ((uint64_t)a & ((uint64_t)a - 1)))
            return fail("%s: key general.alignment: expected a power of two from 8 to 2^30", c->path);
        *alignment = (uint64_t)a;
    }
    return 0;
}

/* Reads one part's header into g: metadata of the first part, tensors of all. */
static int read_part(gguf *g, int part) {
    cursor c = {g->parts[part].map, g->parts[part].map + g->parts[part].size, g->path, part};
    uint64_t n_tensors, n_metas, alignment;
    if (check_header(&c, &n_tensors, &n_metas)) return -1;
    if (n_metas > MAX_ENTRIES || n_tensors > MAX_ENTRIES - g->n_tensors)
        return fail("%s: %llu metadata keys and %llu tensors announced, expected at most %d of each", g->path,
                    (unsigned long long)n_metas, (unsigned long long)n_tensors, MAX_ENTRIES);
    if (n_metas > cursor_left(&c) / 13)
        return fail("%s: truncated: %llu metadata keys announced, the file has no room for them", g->path,
                    (unsigned long long)n_metas);
    if (n_tensors > cursor_left(&c) / 32)
        return fail("%s: truncated: %llu tensors announced, the file has no room for them", g->path,
                    (unsigned long long)n_tensors);
    meta *metas = mem_array(n_metas, sizeof *metas);
    if (!metas) return -1;
    int result = -1;
    for (size_t i = 0; i < n_metas; i++)
        if (take_meta(&c, &metas[i])) goto out;
    if (check_alignment(&c, metas, n_metas, &alignment)) goto out;
    if (n_tensors) {
        tensor *grown = mem_grow(g->tensors, g->n_tensors * sizeof *grown, (g->n_tensors + n_tensors) * sizeof *grown);
        if (!grown) goto out;
        g->tensors = grown;
    }
    tensor *mine = n_tensors ? g->tensors + g->n_tensors : NULL;
    for (size_t i = 0; i < n_tensors; i++)
        if (take_tensor(&c, &mine[i], alignment)) goto out;
    size_t header = (size_t)(c.p - g->parts[part].map), start = (header + alignment - 1) / alignment * alignment;
    size_t room = start < g->parts[part].size ? g->parts[part].size - start : 0;
    for (size_t i = 0; i < n_tensors; i++) {
        if (mine[i].offset > room || mine[i].bytes > room - mine[i].offset) {
            fail("%s: truncated: tensor %.*s (%llu bytes at offset %llu) ends beyond the file", g->path, STR_ARG(mine[i].name),
                 (unsigned long long)mine[i].bytes, (unsigned long long)mine[i].offset);
            goto out;
        }
        mine[i].data = g->parts[part].map + start + mine[i].offset;
    }
    g->n_tensors += n_tensors;
    if (part == 0) {
        g->metas = metas;
        g->n_metas = n_metas;
        metas = NULL;
    }
    result = 0;
out:
    mem_free(metas);
    return result;
}

/* Sorts the indexes, and refuses keys or tensors that are there twice and tensors that overlap. */
static int gguf_index(gguf *g) {
    if (g->n_metas) qsort(g->metas, g->n_metas, sizeof *g->metas, meta_order);
    for (size_t i = 1; i < g->n_metas; i++)
        if (str_cmp(g->metas[i - 1].key, g->metas[i].key) == 0)
            return fail("%s: key %.*s is there twice", g->path, STR_ARG(g->metas[i].key));
    g->by_name = mem_array(g->n_tensors, sizeof *g->by_name);
    if (!g->by_name) return -1;
    if (!g->n_tensors) return 0;
    for (size_t i = 0; i < g->n_tensors; i++) g->by_name[i] = &g->tensors[i];
    qsort(g->by_name, g->n_tensors, sizeof *g->by_name, place_order);
    const tensor *last = NULL;  /* the last one with bytes */
    for (size_t i = 0; i < g->n_tensors; i++) {
        const tensor *t = g->by_name[i];
        if (!t->bytes) continue;
        if (last && last->part == t->part && last->offset + last->bytes > t->offset)
            return fail("%s: tensors %.*s and %.*s overlap", g->path, STR_ARG(last->name), STR_ARG(t->name));
        last = t;
    }
    qsort(g->by_name, g->n_tensors, sizeof *g->by_name, name_order);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (str_cmp(g->by_name[i - 1]->name, g->by_name[i]->name) == 0)
            return fail("%s: tensor %.*s is there twice", g->path, STR_ARG(g->by_name[i]->name));
    return 0;
}

/* "name-00002-of-00005.gguf": the number of parts and where the number stands; 1 for a file that is not split. */
static int split_parts(const char *path, size_t *digits) {
    const char suffix[] = "-00001-of-00001.gguf";
    size_t n = strlen(path), tail = sizeof suffix - 1;
    if (n < tail) return 1;
    const char *p = path + n - tail;
    for (size_t i = 0; i < tail; i++) {
        bool digit = (i >= 1 && i < 6) || (i >= 10 && i < 15);
        if (digit ? p[i] < '0' || p[i] > '9' : p[i] != suffix[i]) return 1;
    }
    *digits = n - tail + 1;
    int parts = atoi(p + 10);
    return parts < 1 || parts > MAX_PARTS ? 1 : parts;
}

static gguf *gguf_open(const char *path) {
    gguf *g = mem_new(sizeof *g);
    if (!g) return NULL;
    g->path = str_copy(path);
    if (!g->path) goto bad;
    size_t digits = 0;
    int parts = split_parts(path, &digits);
    for (int i = 0; i < parts; i++) {
        if (parts > 1) {
            char number[16];
            snprintf(number, sizeof number, "%05d", i + 1);
            memcpy(g->path + digits, number, 5);
        }
        if (map_file(g->path, &g->parts[i])) goto bad;
        g->n_parts = i + 1;
        if (read_part(g, i)) goto bad;
    }
    memcpy(g->path, path, strlen(path));
    if (gguf_index(g)) goto bad;
    return g;
bad:
    gguf_close(g);
    return NULL;
}

/* ==================================================================================================================
 * 4. Tensor types and dot kernels
 *
 * What the engine computes with: one row of weights against rows of activations, and the element-wise functions around
 * it. Everything here is written so that a result's bits depend on nothing but the row's own numbers:
 *
 *   float dot      element i goes into lane i mod 16 by fma; a ragged tail goes on in the same lanes
 *   quantised dot  activations are rounded to int8; block b of the weights gives one exact integer, which goes into lane
 *                  b mod 16: acc = fma((float)dot, weight scale * activation scale, acc)
 *   the 16 lanes   are joined in one tree: l += l+8, l += l+4, l += l+2, l += l+1
 *   exp and such   are the engine's own polynomials; libm gives other bits on other machines
 *
 * Nothing above depends on how many rows or outputs run together or on the instruction set. Bodies are written once, as
 * inline functions over plain loops that a compiler vectorises, and instantiated for each instruction set (KERNEL_SET);
 * the dots and little else are written with intrinsics, and are tested for equality with the plain ones. To add a type:
 * an entry in type_table, an unpack function, a line in tile_for and QUANTISED_SET; AVX2 and AVX-512 have unpackings of their
 * own.
 * Relies on section 1 (fail).
 * ================================================================================================================== */

/* A build with -DDS4_PLAIN has the scalar kernels alone: sanitizers take minutes to compile the others. */
#if defined(__x86_64__) && !defined(DS4_PLAIN)
#define KERNELS_X86
#elif defined(__aarch64__) && !defined(DS4_PLAIN)
#define KERNELS_ARM
#endif

/* ---- 4.1 Tensor types -------------------------------------------------------------------------------------------- */

enum {                                                                  /* as GGUF numbers them */
       T_F32 = 0,
       T_F16 = 1,
       T_Q4_0 = 2,
       T_Q8_0 = 8,
       T_Q2_K = 10,
       T_Q3_K = 11,
       T_Q4_K = 12,
       T_Q5_K = 13,
       T_Q6_K = 14,
       T_IQ2_XXS = 16,
       T_I32 = 26,
       T_BF16 = 30,
       T_MXFP4 = 39
};

/* What a type's dot takes for activations: floats, or int8 with one scale for 32 or for 256 values. */
typedef enum { ACT_FLOAT, ACT_Q32, ACT_Q256 } act_kind;

typedef struct {
    uint32_t id;
    const char *name;
    int block, bytes;           /* values in a block, and its size */
    act_kind act;
} type_info;

static const type_info type_table[] = {
    {T_F32, "F32", 1, 4, ACT_FLOAT},           {T_F16, "F16", 1, 2, ACT_FLOAT},      {T_Q4_0, "Q4_0", 32, 18, ACT_Q32},
    {T_Q8_0, "Q8_0", 32, 34, ACT_Q32},         {T_Q2_K, "Q2_K", 256, 84, ACT_Q256},  {T_Q3_K, "Q3_K", 256, 110, ACT_Q256},
    {T_Q4_K, "Q4_K", 256, 144, ACT_Q256},      {T_Q5_K, "Q5_K", 256, 176, ACT_Q256}, {T_Q6_K, "Q6_K", 256, 210, ACT_Q256},
    {T_IQ2_XXS, "IQ2_XXS", 256, 66, ACT_Q256}, {T_I32, "I32", 1, 4, ACT_FLOAT},      {T_BF16, "BF16", 1, 2, ACT_FLOAT},
    {T_MXFP4, "MXFP4", 32, 17, ACT_Q32},
};

/* A tensor type this engine reads, or NULL. */
static const type_info *type_find(uint32_t id) {
    for (size_t i = 0; i < sizeof type_table / sizeof *type_table; i++)
        if (type_table[i].id == id) return &type_table[i];
    return NULL;
}

/* The name of any GGUF tensor type, so that an error can say what a file holds; never NULL. */
static const char *type_name(uint32_t id) {
    static const char *const names[] = {
        "F32",        "F16",        "Q4_0",       "Q4_1",  "Q4_2",     "Q4_3",     "Q5_0",     "Q5_1",    "Q8_0",
        "Q8_1",       "Q2_K",       "Q3_K",       "Q4_K",  "Q5_K",     "Q6_K",     "Q8_K",     "IQ2_XXS", "IQ2_XS",
        "IQ3_XXS",    "IQ1_S",      "IQ4_NL",     "IQ3_S", "IQ2_S",    "IQ4_XS",   "I8",       "I16",     "I32",
        "I64",        "F64",        "IQ1_M",      "BF16",  "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",   "TQ2_0",
        "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4",    "Q1_0",
    };
    return id < sizeof names / sizeof *names ? names[id] : "of an unknown number";
}

/* Rows of activations. Row r: f + r*n, q + r*act_stride(n), d + r*(n/block), sum + r*(n/16).
 * `q` is in the kernels' own order (act_offset); `sum` holds the sums of 16 consecutive values of q, in natural order. */
typedef struct {
    int64_t n;
    const float *f;
    const int8_t *q;
    const float *d;
    const int16_t *sum;
} acts;

/* Bytes from a row of q to the next one. Rows that all begin at the same place of a cache's pages would push one another out of
 * it, so no multiple of 1024. */
static int64_t act_stride(int64_t n) { return n % 1024 ? n : n + 512; }

/* One instruction set's functions. */
typedef struct kernels {
    const char *name;
    /* out[j*ldo + o] = dot(row o of w, activation row rows[j]) for o < n_out, j < m; rows NULL: 0 .. m-1. */
    void (*mat)(uint32_t type, int64_t n, const uint8_t *w, size_t w_stride, int n_out, const acts *x, const int32_t *rows,
                int m, float *out, size_t ldo);
    void (*quantise)(act_kind kind, int64_t n, const float *x, int8_t *q, float *d, int16_t *sum);      /* one row */
    void (*dequantise)(uint32_t type, int64_t n, const uint8_t *w, float *out);                         /* one row */
    float (*dot)(int64_t n, const float *a, const float *b);
    void (*axpy)(int64_t n, float a, const float *x, float *y);                 /* y = fma(a, x, y) */
    /* y_h = fma(a[h*lda + i], x_i, y_h) for i = 0, 1, .. m-1 in turn: kv rows x_i (ldx floats apart), heads y_h (n apart) */
    void (*mix)(int64_t n, const float *a, int64_t lda, int heads, const float *x, int64_t ldx, int m, float *y);
    /* y_i = y_i + relu(x_hi) * w_h for h = 0, 1, .. heads-1 in turn: x (heads, n) */
    void (*relu_sum)(int64_t n, int heads, const float *w, const float *x, float *y);
    float (*sum_squares)(int64_t n, const float *x);
    void (*scale_mul)(int64_t n, float s, const float *x, const float *w, float *y); /* y = (x*s)*w; w may be NULL */
    void (*softmax)(int64_t n, float *x, float sink, bool has_sink); /* in place */
    void (*softmax_step)(int64_t n, const float *x, const float *v, const float *max, float *sum, float *out);
    /* e = exp(x - max); sum += e; out = fma(e, v, out) */
    void (*swiglu)(int64_t n, const float *gate, const float *up, float limit, float *out);
    void (*sigmoid)(int64_t n, const float *x, float *y);
    void (*router_score)(int64_t n, const float *x, float *y); /* sqrt(softplus(x)) */
    void (*f16_load)(int64_t n, const uint16_t *x, float *y);
    void (*f16_store)(int64_t n, const float *x, uint16_t *y); /* half to even */
    void (*fp8_load)(int64_t n, const uint8_t *x, const uint8_t *e8m0, float *y); /* n a multiple of 64 */
    void (*fp8_store)(int64_t n, const float *x, uint8_t *y, uint8_t *e8m0);
    int64_t (*argmax)(int64_t n, const float *x); /* ties: the lowest index; -1 if any value is not finite */
    bool (*all_finite)(int64_t n, const float *x);
} kernels;

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define LANES 16
/* A sum in the order written: compilers add a loop's terms in a tree, which would need more registers than there are. */
#define IN_ORDER(v) __asm__("" : "+x"(v))
#define UNROLL _Pragma("GCC unroll 16") /* for loops of constant length whose variables must be registers */

/* ---- 4.2 Numbers as bits ----------------------------------------------------------------------------------------- */

ALWAYS_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
ALWAYS_INLINE float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
ALWAYS_INLINE double double_of(uint64_t u) {
    double x;
    memcpy(&x, &u, 8);
    return x;
}
ALWAYS_INLINE uint16_t load_u16(const uint8_t *p) {
    uint16_t u;
    memcpy(&u, p, 2);
    return u;
}
ALWAYS_INLINE uint64_t load_u64(const uint8_t *p) {
    uint64_t u;
    memcpy(&u, p, 8);
    return u;
}
ALWAYS_INLINE uint32_t load_u32(const uint8_t *p) {
    uint32_t u;
    memcpy(&u, p, 4);
    return u;
}

/* Without a branch, so that loops over it vectorise whatever made the two. */
ALWAYS_INLINE uint32_t select_bits(bool yes, uint32_t a, uint32_t b) { return b ^ ((a ^ b) & (0u - (uint32_t)yes)); }

#define NAN_BITS 0x7fc00000u
#define INF_BITS 0x7f800000u

/* 1.5 * 2^23: adding it leaves a float's nearest integer, half to even, in its low bits. */
#define ROUNDER 12582912.0f

/* As the hardware does it: a NaN keeps its high bits and becomes quiet. */
ALWAYS_INLINE float f16_to_f32(uint32_t h) {
    uint32_t sign = (h & 0x8000) << 16, em = h & 0x7fff;
    uint32_t normal = (em << 13) + (112u << 23);
    uint32_t special = (em << 13) | INF_BITS | (em > 0x7c00 ? 0x400000u : 0u);
    uint32_t tiny = bits_of((float)(int32_t)em * 0x1p-24f);
    return float_of(sign | select_bits(em >= 0x7c00, special, select_bits(em >= 0x400, normal, tiny)));
}

ALWAYS_INLINE uint16_t f32_to_f16(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    uint32_t normal = ((a + 0xfff + ((a >> 13) & 1)) >> 13) - (112u << 10);
    normal = normal < 0x7c00 ? normal : 0x7c00;
    uint32_t tiny = bits_of(float_of(a) + 0.5f) - 0x3f000000u; /* the addition rounds to a multiple of 2^-24 */
    uint32_t nan = 0x7e00 | ((a >> 13) & 0x3ff);
    return (uint16_t)(sign | select_bits(a > INF_BITS, nan, select_bits(a >= 0x38800000u, normal, tiny)));
}

ALWAYS_INLINE float bf16_to_f32(uint32_t h) { return float_of(h << 16); }

/* 2^(e-128), the scale of an MXFP4 block whose values are doubled. */
ALWAYS_INLINE float mxfp4_scale(uint32_t e) { return float_of(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

/* ---- 4.3 Elementary functions ------------------------------------------------------------------------------------ */

/* e^x within 1 ulp, subnormal results rounded once; -inf gives 0, overflow inf, NaN NaN.
 * x = n ln2 + r; the polynomial is (e^r - 1 - r)/r^2 on |r| <= ln2/2, fitted for this file (3.2e-9). */
ALWAYS_INLINE float f_exp(float x) {
    float c = x > 89.0f ? 89.0f : x;
    c = c < -105.0f ? -105.0f : c;
    float t = __builtin_fmaf(c, 0x1.715476p+0f, ROUNDER), n = t - ROUNDER;
    float r = __builtin_fmaf(n, -0x1.62e430p-1f, c);
    r = __builtin_fmaf(n, 0x1.05c610p-29f, r);
    float p = 0x1.6a4b36p-10f;
    p = __builtin_fmaf(p, r, 0x1.12398ep-7f);
    p = __builtin_fmaf(p, r, 0x1.5558b2p-5f);
    p = __builtin_fmaf(p, r, 0x1.555492p-3f);
    p = __builtin_fmaf(p, r, 0x1.fffffcp-2f);
    p = __builtin_fmaf(p, r * r, r) + 1.0f;
    /* 2^n in two factors, neither of which leaves the range of a float */
    int32_t k = (int32_t)(bits_of(t) - 0x4b400000u), half = k >> 1;
    half = half < -100 ? -100 : half > 100 ? 100 : half; /* a NaN's k means nothing, but must shift well */
    k -= half;
    k = k < -100 ? -100 : k > 100 ? 100 : k;
    return p * float_of((uint32_t)(half + 127) << 23) * float_of((uint32_t)(k + 127) << 23);
}

ALWAYS_INLINE float f_sigmoid(float x) { return 1.0f / (1.0f + f_exp(-x)); }

/* e^x in double, for |x| < 700: tables made once, not inner loops. */
ALWAYS_INLINE double exp_body(double x) {
    static const double inverse_factorial[] = {
        1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
        1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0,
    };
    if (x != x) return x;
    x = x > 709.0 ? 709.0 : x < -708.0 ? -708.0 : x;
    double n = x * 0x1.71547652b82fep+0 + 0x1.8p52;
    n -= 0x1.8p52;
    double r = __builtin_fma(n, -0x1.62e42fef00000p-1, x), p = inverse_factorial[13];
    r = __builtin_fma(n, -0x1.473de6af278edp-34, r);
    for (int i = 12; i >= 0; i--) p = __builtin_fma(p, r, inverse_factorial[i]);
    return p * double_of((uint64_t)((int64_t)n + 1023) << 52);
}

static double d_exp(double x) { return exp_body(x); }

/* ln x in double, for normal x > 0: x = 2^e m, ln m = 2 atanh((m-1)/(m+1)) by its series. */
ALWAYS_INLINE double log_body(double x) {
    uint64_t u;
    memcpy(&u, &x, 8);
    if (!(x > 0) || (u >> 52) == 0x7ff)
        return x == 0 ? double_of(0xfff0000000000000u) : x > 0 ? x : double_of(0x7ff8000000000000u);
    int e = (int)(u >> 52) - 1023;
    double m = double_of((u & 0xfffffffffffffu) | 0x3ff0000000000000u);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    double s = (m - 1.0) / (m + 1.0), z = s * s, p = 1.0 / 25;
    for (int i = 23; i >= 1; i -= 2) p = __builtin_fma(p, z, 1.0 / i);
    return __builtin_fma((double)e, 0x1.62e42fef00000p-1, __builtin_fma((double)e, 0x1.473de6af278edp-34, 2.0 * s * p));
}

static double d_log(double x) { return log_body(x); }

/* ln(1 + e^x), computed in double: the router's choice of experts hangs on it. */
ALWAYS_INLINE float f_softplus(float x) {
    if (x != x || x > 60.0f) return x;
    double e = exp_body(x > 0 ? -(double)x : (double)x), u = 1.0 + e;
    double l = u == 1.0 ? e : log_body(u) * (e / (u - 1.0)); /* makes up for the rounding of 1 + e */
    return (float)(x > 0 ? (double)x + l : l);
}

/* Sine and cosine of an angle in radians, to double accuracy for |a| <= 2^21 or so (a rotary angle at the largest
 * position): the angle is reduced by multiples of pi/2 in three parts, each product exact. */
static void d_sincos(double a, double *s, double *c) {
    static const double ps[] = {1.0,
                                -1.0 / 6,
                                1.0 / 120,
                                -1.0 / 5040,
                                1.0 / 362880,
                                -1.0 / 39916800,
                                1.0 / 6227020800.0,
                                -1.0 / 1307674368000.0,
                                1.0 / 355687428096000.0};
    static const double pc[] = {1.0,
                                -1.0 / 2,
                                1.0 / 24,
                                -1.0 / 720,
                                1.0 / 40320,
                                -1.0 / 3628800,
                                1.0 / 479001600,
                                -1.0 / 87178291200.0,
                                1.0 / 20922789888000.0,
                                -1.0 / 6402373705728000.0};
    double n = a * 0x1.45f306dc9c883p-1 + 0x1.8p52;
    n -= 0x1.8p52;
    double r = __builtin_fma(n, -0x1.921fb54400000p+0, a);
    r = __builtin_fma(n, -0x1.0b4611a600000p-34, r);
    r = __builtin_fma(n, -0x1.3198a2e037073p-69, r);
    double z = r * r, vs = ps[8], vc = pc[9];
    for (int i = 7; i >= 0; i--) vs = __builtin_fma(vs, z, ps[i]);
    for (int i = 8; i >= 0; i--) vc = __builtin_fma(vc, z, pc[i]);
    vs *= r;
    int quadrant = n >= -0x1p50 && n <= 0x1p50 ? (int)((int64_t)n & 3) : 0;
    *s = quadrant == 0 ? vs : quadrant == 1 ? vc : quadrant == 2 ? -vs : -vc;
    *c = quadrant == 0 ? vc : quadrant == 1 ? -vs : quadrant == 2 ? -vc : vs;
}

/* ---- 4.4 Weight blocks, unpacked --------------------------------------------------------------------------------- */

#include "ds4_tables.inc"

/* One block of weights: value i is d * scale[i/16] * q[i] - dmin * min[i/16]. Blocks of 32 use no scale and no min.
 * The largest sum over a block, 256 * 127 * 32 * 128 for Q6_K, is a sixteenth of what an int32 holds. */
typedef struct {
    _Alignas(32) int8_t q[256];
    int16_t scale[16], min[16];
    float d, dmin;
} wblock;

ALWAYS_INLINE bool type_has_min(uint32_t type) { return type == T_Q2_K || type == T_Q4_K || type == T_Q5_K; }

/* Signed values that vectors hold as unsigned bytes, 4 or 32 too large. */
ALWAYS_INLINE bool type_has_offset(uint32_t type) { return type == T_Q3_K || type == T_Q6_K; }

/* Where a block of 256 keeps its scale; that of its minimums follows. */
ALWAYS_INLINE int scale_at(uint32_t type) { return type == T_Q2_K ? 80 : type == T_Q3_K ? 108 : type == T_Q6_K ? 208 : 0; }

ALWAYS_INLINE void unpack_q8_0(const uint8_t *b, wblock *u) {
    u->d = f16_to_f32(load_u16(b));
    memcpy(u->q, b + 2, 32);
}

ALWAYS_INLINE void unpack_q4_0(const uint8_t *b, wblock *u) {
    u->d = f16_to_f32(load_u16(b));
    for (int i = 0; i < 16; i++) {
        u->q[i] = (int8_t)((b[2 + i] & 15) - 8);
        u->q[16 + i] = (int8_t)((b[2 + i] >> 4) - 8);
    }
}

ALWAYS_INLINE void unpack_mxfp4(const uint8_t *b, wblock *u) {
    static const int8_t e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* doubled */
    u->d = mxfp4_scale(b[0]);
    for (int i = 0; i < 16; i++) {
        u->q[i] = e2m1[b[1 + i] & 15];
        u->q[16 + i] = e2m1[b[1 + i] >> 4];
    }
}

/* scales and minimums of 4 bits [16], 2-bit values [64], d, dmin */
ALWAYS_INLINE void unpack_q2_k(const uint8_t *b, wblock *u) {
    for (int i = 0; i < 16; i++) {
        u->scale[i] = b[i] & 15;
        u->min[i] = b[i] >> 4;
    }
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < 32; i++) u->q[128 * h + 32 * k + i] = (int8_t)((b[16 + 32 * h + i] >> (2 * k)) & 3);
    u->d = f16_to_f32(load_u16(b + 80));
    u->dmin = f16_to_f32(load_u16(b + 82));
}

/* high bits [32], low 2 bits [64], 16 scales of 6 bits [12], d */
ALWAYS_INLINE void unpack_q3_k(const uint8_t *b, wblock *u) {
    const uint8_t *low = b + 32, *s = b + 96;
    for (int i = 0; i < 16; i++) {
        int lo = i < 8 ? s[i] & 15 : s[i - 8] >> 4, hi = (s[8 + (i & 3)] >> (2 * (i >> 2))) & 3;
        u->scale[i] = (int16_t)((lo | hi << 4) - 32);
    }
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < 32; i++)
                u->q[128 * h + 32 * k + i] = (int8_t)(((low[32 * h + i] >> (2 * k)) & 3) + ((b[i] >> (4 * h + k)) & 1) * 4 - 4);
    u->d = f16_to_f32(load_u16(b + 108));
}

/* The 8 scales and 8 minimums of 6 bits that Q4_K and Q5_K keep in 12 bytes, each for 32 values. */
ALWAYS_INLINE void unpack_k_scales(const uint8_t *s, wblock *u) {
    for (int i = 0; i < 4; i++) {
        u->scale[2 * i] = u->scale[2 * i + 1] = s[i] & 63;
        u->min[2 * i] = u->min[2 * i + 1] = s[4 + i] & 63;
        u->scale[8 + 2 * i] = u->scale[9 + 2 * i] = (int16_t)((s[8 + i] & 15) | (s[i] >> 6) << 4);
        u->min[8 + 2 * i] = u->min[9 + 2 * i] = (int16_t)((s[8 + i] >> 4) | (s[4 + i] >> 6) << 4);
    }
}

/* d, dmin, scales [12], 4-bit values [128] */
ALWAYS_INLINE void unpack_q4_k(const uint8_t *b, wblock *u) {
    u->d = f16_to_f32(load_u16(b));
    u->dmin = f16_to_f32(load_u16(b + 2));
    unpack_k_scales(b + 4, u);
    for (int c = 0; c < 4; c++)
        for (int i = 0; i < 32; i++) {
            u->q[64 * c + i] = (int8_t)(b[16 + 32 * c + i] & 15);
            u->q[64 * c + 32 + i] = (int8_t)(b[16 + 32 * c + i] >> 4);
        }
}

/* d, dmin, scales [12], high bits [32], low 4 bits [128] */
ALWAYS_INLINE void unpack_q5_k(const uint8_t *b, wblock *u) {
    u->d = f16_to_f32(load_u16(b));
    u->dmin = f16_to_f32(load_u16(b + 2));
    unpack_k_scales(b + 4, u);
    const uint8_t *high = b + 16, *low = b + 48;
    for (int c = 0; c < 4; c++)
        for (int i = 0; i < 32; i++) {
            u->q[64 * c + i] = (int8_t)((low[32 * c + i] & 15) | ((high[i] >> (2 * c)) & 1) << 4);
            u->q[64 * c + 32 + i] = (int8_t)((low[32 * c + i] >> 4) | ((high[i] >> (2 * c + 1)) & 1) << 4);
        }
}

/* low 4 bits [128], high 2 bits [64], scales [16], d */
ALWAYS_INLINE void unpack_q6_k(const uint8_t *b, wblock *u) {
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < 32; i++) {
                int low = (b[64 * h + 32 * (k & 1) + i] >> (k < 2 ? 0 : 4)) & 15, high = (b[128 + 32 * h + i] >> (2 * k)) & 3;
                u->q[128 * h + 32 * k + i] = (int8_t)((low | high << 4) - 32);
            }
    for (int i = 0; i < 16; i++) u->scale[i] = (int8_t)b[192 + i];
    u->d = f16_to_f32(load_u16(b + 208));
}

/* d, then for 32 values each: 4 code words of 8 magnitudes [4 bytes], 4 times 7 sign bits and a 4-bit scale [4 bytes].
 * The value is d/4 * (1/2 + scale) * magnitude = d/8 * (1 + 2 scale) * magnitude. */
ALWAYS_INLINE void unpack_iq2_xxs(const uint8_t *b, wblock *u) {
    u->d = f16_to_f32(load_u16(b)) * 0.125f;
    for (int g = 0; g < 8; g++) {
        const uint8_t *code = b + 2 + 8 * g;
        uint32_t rest = load_u32(code + 4);
        u->scale[2 * g] = u->scale[2 * g + 1] = (int16_t)(1 + 2 * (rest >> 28));
        for (int k = 0; k < 4; k++) {
            uint32_t sign = (rest >> (7 * k)) & 127, parity = sign ^ (sign >> 4);
            parity ^= parity >> 2;
            parity ^= parity >> 1;
            sign |= (parity & 1) << 7;
            uint64_t word = iq2_grid[code[k]];
            for (int i = 0; i < 8; i++) {
                int v = (int)((word >> (8 * i)) & 255);
                u->q[32 * g + 8 * k + i] = (int8_t)((sign >> i) & 1 ? -v : v);
            }
        }
    }
}

ALWAYS_INLINE void unpack(uint32_t type, const uint8_t *b, wblock *u) {
    switch (type) {
    case T_Q8_0: unpack_q8_0(b, u); break;
    case T_Q4_0: unpack_q4_0(b, u); break;
    case T_MXFP4: unpack_mxfp4(b, u); break;
    case T_Q2_K: unpack_q2_k(b, u); break;
    case T_Q3_K: unpack_q3_k(b, u); break;
    case T_Q4_K: unpack_q4_k(b, u); break;
    case T_Q5_K: unpack_q5_k(b, u); break;
    case T_Q6_K: unpack_q6_k(b, u); break;
    case T_IQ2_XXS: unpack_iq2_xxs(b, u); break;
    default: break;
    }
}

/* ---- 4.5 Bodies, one for all instruction sets -------------------------------------------------------------------- */

ALWAYS_INLINE float join_lanes(const float *acc) {
    float t[8];
    for (int l = 0; l < 8; l++) t[l] = acc[l] + acc[l + 8];
    for (int l = 0; l < 4; l++) t[l] += t[l + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

/* Where value i of an int8 row of n lies. With one scale for 256 values: a block is four parts, and part c holds values 8c to
 * 8c + 7 of each of the block's eight runs of 32. So 64 bits of a vector are always of the same run, which is what the weights'
 * scales are given for. With one scale for 32, a group of 16 blocks is stored as 8 words of 4 values from each of its blocks in
 * turn, so that a vector's lanes are blocks and no sum crosses lanes; the last group may have fewer blocks. */
ALWAYS_INLINE int64_t act_offset(act_kind kind, int64_t n, int64_t i) {
    if (kind == ACT_FLOAT) return i;
    if (kind == ACT_Q256) return i / 256 * 256 + i / 8 % 4 * 64 + i / 32 % 8 * 8 + i % 8;
    int64_t block = i / 32, group = block / LANES, left = n / 32 - group * LANES;
    int64_t lanes = left < LANES ? left : LANES;
    return group * (32 * LANES) + (i % 32) / 4 * (4 * lanes) + block % LANES * 4 + i % 4;
}

#define QUANTISE_MIN 0x05800000u /* 2^-116 */

/* One block of activations to int8: d = amax/127, q = x * (127/amax), half to even, in natural order.
 * A block that holds a NaN or an infinity gets the scale NaN, so that it reaches the output; one whose largest value is
 * below 2^-116 counts as zero, so that 127/amax is finite. */
ALWAYS_INLINE float quantise_block(int n, const float *x, int8_t *q) {
    uint32_t top = 0;
    for (int i = 0; i < n; i++) {
        uint32_t a = bits_of(x[i]) & 0x7fffffff;
        top = a > top ? a : top;
    }
    if (top >= INF_BITS || top < QUANTISE_MIN) {
        memset(q, 0, (size_t)n);
        return top >= INF_BITS ? float_of(NAN_BITS) : 0.0f;
    }
    float inverse = 127.0f / float_of(top);
    for (int i = 0; i < n; i++) q[i] = (int8_t)(int32_t)(bits_of(x[i] * inverse + ROUNDER) - bits_of(ROUNDER));
    return float_of(top) / 127.0f;
}

ALWAYS_INLINE int16_t sum_of_16(const int8_t *q) {
    int t = 0;
    for (int i = 0; i < 16; i++) t += q[i];
    return (int16_t)t;
}

/* A block of 32 values in natural order to its places in the row. */
ALWAYS_INLINE void scatter_32(int64_t n, int64_t b, const int8_t *v, int8_t *q) {
    const int64_t at = act_offset(ACT_Q32, n, b * 32), step = act_offset(ACT_Q32, n, b * 32 + 4) - at;
    for (int k = 0; k < 8; k++) memcpy(q + at + k * step, v + 4 * k, 4);
}

ALWAYS_INLINE void quantise_32_body(int64_t n, const float *x, int8_t *q, float *d, int16_t *sum) {
    for (int64_t b = 0; b < n / 32; b++) {
        int8_t v[32];
        d[b] = quantise_block(32, x + b * 32, v);
        sum[2 * b] = sum_of_16(v);
        sum[2 * b + 1] = sum_of_16(v + 16);
        scatter_32(n, b, v, q);
    }
}

ALWAYS_INLINE void quantise_256_body(int64_t n, const float *x, int8_t *q, float *d, int16_t *sum) {
    for (int64_t b = 0; b < n / 256; b++) {
        int8_t v[256];
        d[b] = quantise_block(256, x + b * 256, v);
        for (int i = 0; i < 16; i++) sum[b * 16 + i] = sum_of_16(v + i * 16);
        for (int i = 0; i < 256; i += 8) memcpy(q + act_offset(ACT_Q256, n, b * 256 + i), v + i, 8);
    }
}

ALWAYS_INLINE void dequantise_body(uint32_t type, int64_t n, const uint8_t *w, float *out) {
    const type_info *t = type_find(type);
    if (t == NULL || t->act == ACT_FLOAT) {
        for (int64_t i = 0; i < n; i++)
            out[i] = type == T_F16    ? f16_to_f32(load_u16(w + 2 * i))
                     : type == T_BF16 ? bf16_to_f32(load_u16(w + 2 * i))
                                      : float_of(load_u32(w + 4 * i));
        return;
    }
    wblock u = {.d = 0};
    for (int64_t b = 0; b < n / t->block; b++) {
        unpack(type, w + b * t->bytes, &u);
        for (int i = 0; i < t->block; i++) {
            float d = t->block == 32 ? u.d : u.d * (float)u.scale[i / 16];
            float v = d * (float)u.q[i];
            out[b * t->block + i] = type_has_min(type) ? v - u.dmin * (float)u.min[i / 16] : v;
        }
    }
}

ALWAYS_INLINE void axpy_body(int64_t n, float a, const float *x, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = __builtin_fmaf(a, x[i], y[i]);
}

ALWAYS_INLINE void mix_body(int64_t n, const float *a, int64_t lda, int heads, const float *x, int64_t ldx, int m, float *y) {
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < m; i++) axpy_body(n, a[h * lda + i], x + i * ldx, y + h * n);
}

/* NaN counts as 0. */
ALWAYS_INLINE void relu_sum_body(int64_t n, int heads, const float *w, const float *x, float *y) {
    for (int h = 0; h < heads; h++)
        for (int64_t i = 0; i < n; i++) y[i] += w[h] * (x[h * n + i] > 0 ? x[h * n + i] : 0);
}

ALWAYS_INLINE void scale_mul_body(int64_t n, float s, const float *x, const float *w, float *y) {
    if (w == NULL)
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * s;
    else
        for (int64_t i = 0; i < n; i++) y[i] = (x[i] * s) * w[i];
}

/* A float as an integer of the same order; -0 comes just below 0, NaNs at the ends. */
ALWAYS_INLINE int32_t order_of(float x) {
    uint32_t u = bits_of(x);
    return (int32_t)(u >> 31 ? ~u ^ 0x80000000u : u);
}
ALWAYS_INLINE float of_order(int32_t key) {
    uint32_t u = (uint32_t)key;
    return float_of(key < 0 ? ~u ^ 0x80000000u : u);
}

ALWAYS_INLINE float sum_body(int64_t n, const float *x) {
    typedef float eight __attribute__((vector_size(32))); /* 16 lanes that stay in registers */
    eight lo = {0}, hi = {0}, a, b;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        memcpy(&a, x + i, sizeof a);
        memcpy(&b, x + i + 8, sizeof b);
        lo += a;
        hi += b;
    }
    float lane[LANES];
    memcpy(lane, &lo, sizeof lo);
    memcpy(lane + 8, &hi, sizeof hi);
    for (int l = 0; i + l < n; l++) lane[l] += x[i + l];
    return join_lanes(lane);
}

/* exp(x - max) / (their sum + exp(sink - max)); the sum in lanes, the sink last. NaN or +inf anywhere gives NaN. */
ALWAYS_INLINE void softmax_body(int64_t n, float *x, float sink, bool has_sink) {
    int32_t top = order_of(has_sink ? sink : float_of(0xff800000u));
    for (int64_t i = 0; i < n; i++) {
        const int32_t key = order_of(x[i]);
        top = key > top ? key : top;
    }
    const float max = of_order(top);
    for (int64_t i = 0; i < n; i++) x[i] = f_exp(x[i] - max);
    float sum = sum_body(n, x);
    if (has_sink) sum += f_exp(sink - max);
    const float inverse = 1.0f / sum; /* sum >= 1, for one exponent is 0 */
    for (int64_t i = 0; i < n; i++) x[i] *= inverse;
}

ALWAYS_INLINE void softmax_step_body(int64_t n, const float *x, const float *v, const float *max, float *sum, float *out) {
    for (int64_t i = 0; i < n; i++) {
        float e = f_exp(x[i] - max[i]);
        sum[i] += e;
        out[i] = __builtin_fmaf(e, v[i], out[i]);
    }
}

/* silu(min(gate, L)) * clip(up, -L, L); NaN goes through. */
ALWAYS_INLINE void swiglu_body(int64_t n, const float *gate, const float *up, float limit, float *out) {
    for (int64_t i = 0; i < n; i++) {
        float g = gate[i] > limit ? limit : gate[i];
        float u = up[i] > limit ? limit : up[i];
        u = u < -limit ? -limit : u;
        out[i] = g / (1.0f + f_exp(-g)) * u;
    }
}

ALWAYS_INLINE void sigmoid_body(int64_t n, const float *x, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = f_sigmoid(x[i]);
}

ALWAYS_INLINE void router_score_body(int64_t n, const float *x, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = sqrtf(f_softplus(x[i]));
}

ALWAYS_INLINE void f16_load_body(int64_t n, const uint16_t *x, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = f16_to_f32(x[i]);
}

ALWAYS_INLINE void f16_store_body(int64_t n, const float *x, uint16_t *y) {
    for (int64_t i = 0; i < n; i++) y[i] = f32_to_f16(x[i]);
}

/* FP8 E4M3 has no infinity: both NaN and infinity are stored as its NaN, and only finite values choose the scale. */
ALWAYS_INLINE void fp8_store_body(int64_t n, const float *x, uint8_t *y, uint8_t *e8m0) {
    for (int64_t b = 0; b < n / 64; b++) {
        const float *v = x + 64 * b;
        uint32_t top = 0x38d1b717u; /* 1e-4f */
        for (int i = 0; i < 64; i++) {
            uint32_t a = bits_of(v[i]) & 0x7fffffff;
            a = a < INF_BITS ? a : 0;
            top = a > top ? a : top;
        }
        /* top / 448 = (mantissa / 1.75) * 2^(exponent - 8): rounded up to a power of two without dividing */
        uint32_t e = (top >> 23) - 8 + ((top & 0x7fffff) > 0x600000 ? 1 : 0);
        e8m0[b] = (uint8_t)e;
        float inverse = float_of((254 - e) << 23);
        for (int i = 0; i < 64; i++) {
            uint32_t u = bits_of(v[i] * inverse), a = u & 0x7fffffff, s = (u >> 24) & 0x80;
            bool finite = a < INF_BITS;
            a = a < 0x43e00000u ? a : 0x43e00000u; /* 448, the largest */
            uint32_t normal = ((a + 0x7ffff + ((a >> 20) & 1)) >> 20) - (120u << 3);
            uint32_t tiny = bits_of(float_of(a) + 16384.0f) - bits_of(16384.0f); /* rounds to a multiple of 2^-9 */
            y[64 * b + i] = (uint8_t)(s | select_bits(finite, select_bits(a >= 0x3c800000u, normal, tiny), 0x7f));
        }
    }
}

ALWAYS_INLINE float fp8_to_f32(uint32_t c) {
    uint32_t em = c & 0x7f, normal = (em << 20) + (120u << 23), tiny = bits_of((float)(int32_t)em * 0x1p-9f);
    return float_of((c & 0x80) << 24 | select_bits(em == 0x7f, NAN_BITS, select_bits(em >= 8, normal, tiny)));
}

ALWAYS_INLINE void fp8_load_body(int64_t n, const uint8_t *x, const uint8_t *e8m0, float *y) {
    for (int64_t b = 0; b < n / 64; b++) {
        uint32_t e = e8m0[b];
        float scale = float_of(e == 0 ? 0x00400000u : e == 255 ? NAN_BITS : e << 23);
        for (int i = 0; i < 64; i++) y[64 * b + i] = fp8_to_f32(x[64 * b + i]) * scale;
    }
}

ALWAYS_INLINE bool all_finite_body(int64_t n, const float *x) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t a = bits_of(x[i]) & 0x7fffffff;
        top = a > top ? a : top;
    }
    return top < INF_BITS;
}

/* Two passes that vectorise: the largest value as an ordered integer, then the first index that holds it. */
ALWAYS_INLINE int64_t argmax_body(int64_t n, const float *x) {
    int32_t best = INT32_MIN;
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t a = bits_of(x[i]) & 0x7fffffff;
        const int32_t key = order_of(x[i]);
        best = key > best ? key : best;
        top = a > top ? a : top;
    }
    if (n <= 0 || top >= INF_BITS) return -1;
    const float max = of_order(best);
    for (int64_t i = 0; i < n; i += 64) {
        int64_t end = i + 64 < n ? i + 64 : n;
        uint32_t found = 0;
        for (int64_t k = i; k < end; k++) found |= x[k] == max; /* -0 equals 0 */
        if (found)
            for (int64_t k = i;; k++)
                if (x[k] == max) return k;
    }
    return -1;
}

/* ---- 4.6 Matrix products, the plain ones ------------------------------------------------------------------------- */

/* Bytes of a block of a 32-value type. */
ALWAYS_INLINE int q32_bytes(uint32_t type) { return type == T_Q8_0 ? 34 : type == T_Q4_0 ? 18 : 17; }

/* A product is computed in tiles: the weight rows w + o*w_stride, o < n_out, against the m activation rows of x, into
 * out[j*ldo + o]. What is unpacked of the weights serves all rows of a tile. */
#define TILE 64
typedef struct {
    const float *f[TILE];
    const int8_t *q[TILE];
    const float *d[TILE];
    const int16_t *sum[TILE];
} tile_acts;

#define TILE_ARGS int64_t n, const uint8_t *w, size_t w_stride, int n_out, const tile_acts *x, int m, float *out, size_t ldo
typedef void tile_fn(TILE_ARGS);

/* Element i onwards of a row of float weights of any kind against a row of activations, after what `acc` holds already. */
static float float_dot_from(uint32_t type, int64_t n, int64_t i, const uint8_t *w, const float *x, float *acc) {
    for (; i < n; i += LANES) {
        int64_t lanes = n - i < LANES ? n - i : LANES;
        for (int l = 0; l < lanes; l++) {
            float v = type == T_F16    ? f16_to_f32(load_u16(w + 2 * (i + l)))
                      : type == T_BF16 ? bf16_to_f32(load_u16(w + 2 * (i + l)))
                                       : float_of(load_u32(w + 4 * (i + l)));
            acc[l] = __builtin_fmaf(v, x[i + l], acc[l]);
        }
    }
    return join_lanes(acc);
}

ALWAYS_INLINE void float_tile(uint32_t type, TILE_ARGS) {
    for (int o = 0; o < n_out; o++)
        for (int j = 0; j < m; j++) {
            float acc[LANES] = {0};
            out[(size_t)j * ldo + (size_t)o] = float_dot_from(type, n, 0, w + (size_t)o * w_stride, x->f[j], acc);
        }
}

/* Block b of a row of weights against row j of a tile: adds to the block's lane. */
ALWAYS_INLINE void block_dot(uint32_t type, int block, int64_t n, const wblock *u, const tile_acts *x, int j, int64_t b,
                             float *acc) {
    const int8_t *q = x->q[j];
    const float scale = x->d[j][b];
    int32_t dot = 0, min = 0;
    if (block == 32) {
        const int64_t at = act_offset(ACT_Q32, n, b * 32), step = act_offset(ACT_Q32, n, b * 32 + 4) - at;
        for (int k = 0; k < 8; k++)
            for (int i = 0; i < 4; i++) dot += u->q[4 * k + i] * q[at + k * step + i];
    } else {
        for (int s = 0; s < 16; s++) {
            int32_t part = 0;
            for (int i = 0; i < 16; i++) part += u->q[16 * s + i] * q[b * 256 + act_offset(ACT_Q256, n, 16 * s + i)];
            dot += part * u->scale[s];
        }
    }
    float *lane = acc + b % LANES;
    *lane = __builtin_fmaf((float)dot, u->d * scale, *lane);
    if (type_has_min(type)) {
        for (int s = 0; s < 16; s++) min += x->sum[j][b * 16 + s] * u->min[s];
        *lane = __builtin_fmaf(-(float)min, u->dmin * scale, *lane);
    }
}

ALWAYS_INLINE void block_tile(uint32_t type, TILE_ARGS) {
    const type_info *t = type_find(type);
    for (int o = 0; o < n_out; o++) {
        float acc[TILE][LANES];
        memset(acc, 0, (size_t)m * sizeof *acc);
        for (int64_t b = 0; b < n / t->block; b++) {
            wblock u;
            unpack(type, w + (size_t)o * w_stride + b * t->bytes, &u);
            for (int j = 0; j < m; j++) block_dot(type, t->block, n, &u, x, j, b, acc[j]);
        }
        for (int j = 0; j < m; j++) out[(size_t)j * ldo + (size_t)o] = join_lanes(acc[j]);
    }
}

/* Weights come from memory, and more of them have to be on their way than the processor asks for by itself: the `size` bytes
 * from w + `ahead` on are fetched. That they may lie beyond the tensor does no harm. */
ALWAYS_INLINE void fetch(const uint8_t *w, int64_t ahead, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch((const void *)((uintptr_t)w + (uintptr_t)(ahead + i)));
}
/* As far as the second cache. */
ALWAYS_INLINE void fetch_far(const uint8_t *w, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch((const void *)((uintptr_t)w + (uintptr_t)i), 0, 2);
}
enum { AHEAD = 4096 };
ALWAYS_INLINE void fetch_ahead(const uint8_t *w, int64_t size) { fetch(w, AHEAD, size); }

/* The products of all rows, tile by tile: few weight rows at a time, so that they stay in the first cache while the
 * activations pass, and a tile of at most `most` rows of activations in the second. */
static void mat_tiles(tile_fn *tile, int few, int most, int block, int64_t n, const uint8_t *w, size_t w_stride, int n_out,
                      const acts *x, const int32_t *rows, int m, float *out, size_t ldo) {
    const int step = m <= most ? n_out : few;
    for (int o = 0; o < n_out; o += step)
        for (int j = 0; j < m; j += most) {
            tile_acts t;
            const int count = m - j < most ? m - j : most;
            for (int k = 0; k < count; k++) {
                const int64_t r = rows ? rows[j + k] : j + k;
                if (block == 1) {
                    t.f[k] = x->f + r * n;
                } else {
                    t.q[k] = x->q + r * act_stride(n);
                    t.d[k] = x->d + r * (n / block);
                    t.sum[k] = x->sum + r * (n / 16);
                }
            }
            tile(n, w + (size_t)o * w_stride, w_stride, n_out - o < step ? n_out - o : step, &t, count,
                 out + (size_t)j * ldo + (size_t)o, ldo);
        }
}

/* dot(a, b), with the tile for F32 weights. */
static float dot_tile(tile_fn *tile, int64_t n, const float *a, const float *b) {
    float out;
    tile_acts t;
    t.f[0] = b;
    tile(n, (const uint8_t *)(const void *)a, 0, 1, &t, 1, &out, 1);
    return out;
}

/* The tiles of every type, for one instruction set. */
typedef struct {
    tile_fn *f32, *f16, *bf16, *q4_0, *q8_0, *mxfp4, *q2_k, *q3_k, *q4_k, *q5_k, *q6_k, *iq2_xxs;
} tile_set;

static tile_fn *tile_for(const tile_set *s, uint32_t type) {
    switch (type) {
    case T_F16: return s->f16;
    case T_BF16: return s->bf16;
    case T_Q4_0: return s->q4_0;
    case T_Q8_0: return s->q8_0;
    case T_MXFP4: return s->mxfp4;
    case T_Q2_K: return s->q2_k;
    case T_Q3_K: return s->q3_k;
    case T_Q4_K: return s->q4_k;
    case T_Q5_K: return s->q5_k;
    case T_Q6_K: return s->q6_k;
    case T_IQ2_XXS: return s->iq2_xxs;
    default: return s->f32;
    }
}

/* A tile of one type: `body` compiled for it alone, with the instructions that `attr` names. */
#define TILE_FN(name, attr, body, type) \
    attr static void name(TILE_ARGS) { body(type, n, w, w_stride, n_out, x, m, out, ldo); }
/* A set with its own tiles of the quantised types, those of the float types from the set `of`. */
#define QUANTISED_SET(isa, attr, q32_body, q256_body, of)                                                        \
    TILE_FN(tile_q4_0_##isa, attr, q32_body, T_Q4_0)                                                             \
    TILE_FN(tile_q8_0_##isa, attr, q32_body, T_Q8_0)                                                             \
    TILE_FN(tile_mxfp4_##isa, attr, q32_body, T_MXFP4)                                                           \
    TILE_FN(tile_q2_k_##isa, attr, q256_body, T_Q2_K)                                                            \
    TILE_FN(tile_q3_k_##isa, attr, q256_body, T_Q3_K)                                                            \
    TILE_FN(tile_q4_k_##isa, attr, q256_body, T_Q4_K)                                                            \
    TILE_FN(tile_q5_k_##isa, attr, q256_body, T_Q5_K)                                                            \
    TILE_FN(tile_q6_k_##isa, attr, q256_body, T_Q6_K)                                                            \
    TILE_FN(tile_iq2_xxs_##isa, attr, q256_body, T_IQ2_XXS)                                                      \
    static const tile_set tiles_##isa = {                                                                        \
        tile_f32_##of,   tile_f16_##of,   tile_bf16_##of,  tile_q4_0_##isa, tile_q8_0_##isa, tile_mxfp4_##isa,   \
        tile_q2_k_##isa, tile_q3_k_##isa, tile_q4_k_##isa, tile_q5_k_##isa, tile_q6_k_##isa, tile_iq2_xxs_##isa, \
    };
#define TILE_SET(isa, attr, float_body, q32_body, q256_body) \
    TILE_FN(tile_f32_##isa, attr, float_body, T_F32)         \
    TILE_FN(tile_f16_##isa, attr, float_body, T_F16)         \
    TILE_FN(tile_bf16_##isa, attr, float_body, T_BF16)       \
    QUANTISED_SET(isa, attr, q32_body, q256_body, isa)

TILE_SET(scalar, , float_tile, block_tile, block_tile)

/* ---- 4.7 Matrix products with AVX2 and with AVX-VNNI --------------------------------------------------------------- */

#ifdef KERNELS_X86
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE_256 ALWAYS_INLINE TARGET_AVX2

enum { OUTPUTS_256 = 32, ROWS_256 = 64 }; /* rows of weights and of activations in a tile of a product of many */

/* AVX-VNNI is two instructions for vectors of AVX2 that multiply and add up at once; functions that use them are told so by `vnni`.
 * They are written as assembly because compilers let no intrinsic of theirs into a function for AVX2, whatever `vnni` is. */

/* sum + the products of unsigned bytes u and signed ones v, four to a word. */
INLINE_256 __m256i add_bytes_256(__m256i sum, __m256i u, __m256i v) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(v));
    return sum;
}

/* sum + the products of 16-bit words, two to a word of 32. */
INLINE_256 __m256i add_words_256(const bool vnni, __m256i sum, __m256i a, __m256i b) {
    if (!vnni) return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

/* 16 lanes as two vectors of 8. */
typedef struct {
    __m256 lo, hi;
} floats256;

INLINE_256 float join_256(floats256 a) {
    const __m256 h = _mm256_add_ps(a.lo, a.hi);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

/* The same for four at once. */
INLINE_256 __m128 join_4_256(const floats256 *a) {
    __m256 h[4], pair[2];
    UNROLL for (int i = 0; i < 4; i++) h[i] = _mm256_add_ps(a[i].lo, a[i].hi);
    UNROLL for (int i = 0; i < 2; i++) pair[i] =
        _mm256_add_ps(_mm256_permute2f128_ps(h[i], h[i + 2], 0x20), _mm256_permute2f128_ps(h[i], h[i + 2], 0x31));
    const __m256 q = _mm256_add_ps(_mm256_shuffle_ps(pair[0], pair[1], 0x44), _mm256_shuffle_ps(pair[0], pair[1], 0xee));
    const __m128 low = _mm256_castps256_ps128(q), high = _mm256_extractf128_ps(q, 1);
    return _mm_add_ps(_mm_shuffle_ps(low, high, 0x88), _mm_shuffle_ps(low, high, 0xdd));
}

/* 8 weights of a float type. */
INLINE_256 __m256 load_floats_256(uint32_t type, const uint8_t *w, int64_t i) {
    if (type == T_F32) return _mm256_loadu_ps((const float *)(const void *)(w + 4 * i));
    const __m128i h = _mm_loadu_si128((const void *)(w + 2 * i));
    return type == T_F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* O rows of float weights against J rows of activations, the sums in registers. */
INLINE_256 void floats_256(uint32_t type, const int O, const int J, int64_t n, const uint8_t *w, size_t w_stride,
                           const float *const *x, float *out, size_t ldo) {
    floats256 acc[3][4]; /* [j][o] */
    UNROLL for (int k = 0; k < O * J; k++) acc[k % J][k / J].lo = acc[k % J][k / J].hi = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        floats256 v[3];
        UNROLL for (int j = 0; j < J; j++) v[j] = (floats256){_mm256_loadu_ps(x[j] + i), _mm256_loadu_ps(x[j] + i + 8)};
        UNROLL for (int o = 0; o < O; o++) {
            const uint8_t *row = w + (size_t)o * w_stride;
            const floats256 a = {load_floats_256(type, row, i), load_floats_256(type, row, i + 8)};
            UNROLL for (int j = 0; j < J; j++) {
                acc[j][o].lo = _mm256_fmadd_ps(a.lo, v[j].lo, acc[j][o].lo);
                acc[j][o].hi = _mm256_fmadd_ps(a.hi, v[j].hi, acc[j][o].hi);
            }
        }
    }
    if (i < n) {
        for (int o = 0; o < O; o++)
            for (int j = 0; j < J; j++) {
                float lanes[LANES];
                _mm256_storeu_ps(lanes, acc[j][o].lo);
                _mm256_storeu_ps(lanes + 8, acc[j][o].hi);
                out[(size_t)j * ldo + (size_t)o] = float_dot_from(type, n, i, w + (size_t)o * w_stride, x[j], lanes);
            }
    } else if (O == 4) {
        UNROLL for (int j = 0; j < J; j++) _mm_storeu_ps(out + (size_t)j * ldo, join_4_256(acc[j]));
    } else {
        UNROLL for (int k = 0; k < O * J; k++) out[(size_t)(k % J) * ldo + (size_t)(k / J)] = join_256(acc[k % J][k / J]);
    }
}

INLINE_256 void float_tile_256(uint32_t type, TILE_ARGS) {
    for (int o = 0; o < n_out;) {
        const uint8_t *p = w + (size_t)o * w_stride;
        const int rows = m == 1 && n_out - o >= 4 ? 4 : n_out - o >= 2 ? 2 : 1;
        for (int j = 0; j < m;) {
            const int count = rows == 4 || m - j == 1 ? 1 : m - j >= 3 ? 3 : 2;
            float *to = out + (size_t)j * ldo + o;
            if (rows == 4) floats_256(type, 4, 1, n, p, w_stride, x->f + j, to, ldo);
            else if (rows == 2 && count == 3) floats_256(type, 2, 3, n, p, w_stride, x->f + j, to, ldo);
            else if (rows == 2 && count == 2) floats_256(type, 2, 2, n, p, w_stride, x->f + j, to, ldo);
            else if (rows == 2) floats_256(type, 2, 1, n, p, w_stride, x->f + j, to, ldo);
            else if (count == 3) floats_256(type, 1, 3, n, p, w_stride, x->f + j, to, ldo);
            else if (count == 2) floats_256(type, 1, 2, n, p, w_stride, x->f + j, to, ldo);
            else floats_256(type, 1, 1, n, p, w_stride, x->f + j, to, ldo);
            j += count;
        }
        o += rows;
    }
}

/* Part of mix_body with the sums in registers: H heads, 8 * C channels. */
INLINE_256 void mix_part_256(const int H, const int C, int64_t n, const float *a, int64_t lda, const float *x, int64_t ldx,
                             int m, float *y) {
    __m256 sum[2][4];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int c = 0; c < C; c++) sum[h][c] = _mm256_loadu_ps(y + h * n + 8 * c);
    for (int i = 0; i < m; i++) {
        __m256 v[4];
        UNROLL for (int c = 0; c < C; c++) v[c] = _mm256_loadu_ps(x + i * ldx + 8 * c);
        UNROLL for (int h = 0; h < H; h++) {
            const __m256 w = _mm256_set1_ps(a[h * lda + i]);
            UNROLL for (int c = 0; c < C; c++) sum[h][c] = _mm256_fmadd_ps(w, v[c], sum[h][c]);
        }
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int c = 0; c < C; c++) _mm256_storeu_ps(y + h * n + 8 * c, sum[h][c]);
}

INLINE_256 void mix_256(int64_t n, const float *a, int64_t lda, int heads, const float *x, int64_t ldx, int m, float *y) {
    int64_t c = 0;
    for (; c + 32 <= n; c += 32) {
        int h = 0;
        for (; h + 2 <= heads; h += 2) mix_part_256(2, 4, n, a + h * lda, lda, x + c, ldx, m, y + h * n + c);
        if (h < heads) mix_part_256(1, 4, n, a + h * lda, lda, x + c, ldx, m, y + h * n + c);
    }
    for (; c < n; c++)
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < m; i++) y[h * n + c] = __builtin_fmaf(a[h * lda + i], x[i * ldx + c], y[h * n + c]);
}

/* As f16_load_body and f16_store_body, by the instructions that do it. */
INLINE_256 void load_f16_256(int64_t n, const uint16_t *x, float *y) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(x + i))));
    f16_load_body(n - i, x + i, y + i);
}

INLINE_256 void store_f16_256(int64_t n, const float *x, uint16_t *y) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((void *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    f16_store_body(n - i, x + i, y + i);
}

/* As quantise_32_body. */
INLINE_256 void quantise_32_256(int64_t n, const float *x, int8_t *q, float *d, int16_t *sum) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (int64_t b = 0; b < n / 32; b++) {
        __m256 v[4];
        __m256i r[4], top = _mm256_setzero_si256();
        UNROLL for (int k = 0; k < 4; k++) {
            v[k] = _mm256_loadu_ps(x + b * 32 + 8 * k);
            top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(v[k]), magnitude));
        }
        __m128i t = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
        t = _mm_max_epu32(t, _mm_shuffle_epi32(t, 0x4e));
        t = _mm_max_epu32(t, _mm_shuffle_epi32(t, 0xb1));
        int8_t bytes[32];
        if ((uint32_t)_mm_cvtsi128_si32(t) - QUANTISE_MIN >= INF_BITS - QUANTISE_MIN) {
            d[b] = quantise_block(32, x + b * 32, bytes); /* the cases that are not numbers to round */
            sum[2 * b] = sum[2 * b + 1] = 0;
            scatter_32(n, b, bytes, q);
            continue;
        }
        const float max = _mm_cvtss_f32(_mm_castsi128_ps(t));
        const __m256 inverse = _mm256_set1_ps(127.0f / max);
        d[b] = max / 127.0f;
        UNROLL for (int k = 0; k < 4; k++) r[k] =
            _mm256_cvtps_epi32(_mm256_mul_ps(v[k], inverse)); /* half to even, as every rounding here */
        /* packing works within halves: 0 1 2 3 of four vectors come out as words 0 2 4 6 1 3 5 7 */
        const __m256i p = _mm256_packs_epi16(_mm256_packs_epi32(r[0], r[1]), _mm256_packs_epi32(r[2], r[3]));
        const __m256i all = _mm256_permutevar8x32_epi32(p, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        __m256i s = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), all), _mm256_set1_epi16(1));
        s = _mm256_hadd_epi32(s, s);
        s = _mm256_hadd_epi32(s, s);
        sum[2 * b] = (int16_t)_mm_cvtsi128_si32(_mm256_castsi256_si128(s));
        sum[2 * b + 1] = (int16_t)_mm_cvtsi128_si32(_mm256_extracti128_si256(s, 1));
        _mm256_storeu_si256((void *)bytes, all);
        scatter_32(n, b, bytes, q);
    }
}

/* How much too large weights of 32-value types are as unsigned bytes. AVX2 alone multiplies Q8_0's as signed ones. */
ALWAYS_INLINE int q32_offset(uint32_t type) { return type == T_Q4_0 ? 8 : type == T_MXFP4 ? 12 : 128; }
ALWAYS_INLINE bool is_signed_256(uint32_t type, const bool vnni) { return type == T_Q8_0 && !vnni; }

/* MXFP4's values, doubled and 12 too large. */
INLINE_256 __m256i e2m1_256(void) {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

/* As mxfp4_scale, 8 of them. */
INLINE_256 __m256 mxfp4_scales_256(__m256i e) {
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

/* The half-precision numbers at the beginning of 8 blocks. Each is loaded with its block's first bytes, from so far ahead of it that
 * it falls into its own word. */
INLINE_256 __m128i first_halves_256(const uint8_t *b, const int64_t size) {
    __m128i v = _mm_loadu_si128((const void *)b);
    v = _mm_blend_epi16(v, _mm_loadu_si128((const void *)(b + 1 * (size - 2))), 0x02);
    v = _mm_blend_epi16(v, _mm_loadu_si128((const void *)(b + 2 * (size - 2))), 0x04);
    v = _mm_blend_epi16(v, _mm_loadu_si128((const void *)(b + 3 * (size - 2))), 0x08);
    v = _mm_blend_epi16(v, _mm_loadu_si128((const void *)(b + 4 * (size - 2))), 0x10);
    v = _mm_blend_epi16(v, _mm_loadu_si128((const void *)(b + 5 * (size - 2))), 0x20);
    v = _mm_blend_epi16(v, _mm_loadu_si128((const void *)(b + 6 * (size - 2))), 0x40);
    return _mm_blend_epi16(v, _mm_loadu_si128((const void *)(b + 7 * (size - 2))), 0x80);
}

/* The scales of 8 blocks. */
INLINE_256 __m256 group_scales_256(uint32_t type, const uint8_t *b) {
    const int size = q32_bytes(type);
    if (type != T_MXFP4) return _mm256_cvtph_ps(first_halves_256(b, size));
    uint64_t v = 0;
    UNROLL for (int i = 0; i < 8; i++) v |= (uint64_t)b[size * i] << (8 * i);
    return mxfp4_scales_256(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)v)));
}

/* The integers of 8 blocks, less what weights that are too large added to them: activations sum up, in halves, to `sum`. */
INLINE_256 __m256i less_excess_256(uint32_t type, const bool vnni, __m256i dot, const int16_t *sum) {
    return add_words_256(vnni, dot, _mm256_loadu_si256((const void *)sum), _mm256_set1_epi16((short)-q32_offset(type)));
}

/* Eight blocks' integers, times the scales of the weights and of the activations d, added to their lanes. */
INLINE_256 __m256 add_lanes_256(__m256i dot, __m256 scale, const float *d, __m256 lanes) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(scale, _mm256_loadu_ps(d)), lanes);
}

/* Of two vectors' lanes, pairs added: (a0+a2, b0+b2, a1+a3, b1+b3) in each half; then quads. */
INLINE_256 __m256i add_pairs_256(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}
INLINE_256 __m256i add_quads_256(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* A block's weights in natural order, signed bytes or unsigned ones that are too large. */
INLINE_256 __m256i block_256(uint32_t type, const bool vnni, const uint8_t *b) {
    if (type == T_Q8_0) {
        const __m256i w = _mm256_loadu_si256((const void *)(b + 2));
        return vnni ? _mm256_xor_si256(w, _mm256_set1_epi8(-128)) : w;
    }
    const __m128i both = _mm_loadu_si128((const void *)(b + q32_bytes(type) - 16));
    const __m256i v = _mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 4), 1);
    const __m256i w = _mm256_and_si256(v, _mm256_set1_epi8(15));
    return type == T_Q4_0 ? w : _mm256_shuffle_epi8(e2m1_256(), w);
}

/* Most rows of activations that rows of weights are read from end to end for: fewer with AVX-VNNI, from which panels gain more. */
enum { FEW_256 = 7, FEW_VNNI = 5 };

/* The products of a block's weights u with activations a, Q8_0's, summed up by fours: |w| * (a with the sign of w), whose pairs cannot
 * saturate, 2 * 128 * 127 < 2^15. */
INLINE_256 __m256i block_sums_256(const bool vnni, __m256i u, const int8_t *a) {
    const __m256i v = _mm256_loadu_si256((const void *)a);
    if (vnni) return add_bytes_256(_mm256_setzero_si256(), u, v);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(u), _mm256_sign_epi8(v, u)), _mm256_set1_epi16(1));
}

/* Eight blocks of Q8_0 against J rows of activations in natural order, q and ldq bytes on; the integer of block b in lane b. Two
 * blocks' sums are joined at once, so that few have to be kept. */
INLINE_256 void eight_dots_256(const bool vnni, const int J, const uint8_t *w, const int8_t *q, int64_t ldq, __m256i *dot) {
    __m256i pair[FEW_256], quad[FEW_256][2];
    UNROLL for (int p = 0; p < 4; p++) {
        const uint8_t *b = w + 2 * p * q32_bytes(T_Q8_0);
        __m256i u = block_256(T_Q8_0, vnni, b), v = block_256(T_Q8_0, vnni, b + q32_bytes(T_Q8_0));
        IN_ORDER(u);
        IN_ORDER(v);
        UNROLL for (int j = 0; j < J; j++) {
            const int8_t *a = q + j * ldq + 64 * p;
            __m256i s = add_pairs_256(block_sums_256(vnni, u, a), block_sums_256(vnni, v, a + 32));
            IN_ORDER(s);
            if (p % 2 == 0) pair[j] = s;
            else quad[j][p / 2] = add_quads_256(pair[j], s);
        }
    }
    UNROLL for (int j = 0; j < J; j++) dot[j] = _mm256_add_epi32(_mm256_permute2x128_si256(quad[j][0], quad[j][1], 0x20),
                                                                 _mm256_permute2x128_si256(quad[j][0], quad[j][1], 0x31));
}

/* Two blocks of a 4-bit type, as unsigned bytes that are too large: the first 16 values of each, then the others. */
INLINE_256 void two_blocks_256(uint32_t type, const uint8_t *b, __m256i w[2]) {
    const int size = q32_bytes(type);
    const __m128i first = _mm_loadu_si128((const void *)(b + size - 16));
    const __m128i second = _mm_loadu_si128((const void *)(b + 2 * size - 16));
    const __m256i both = _mm256_blend_epi32(_mm256_castsi128_si256(first), _mm256_broadcastsi128_si256(second), 0xf0);
    const __m256i low = _mm256_set1_epi8(15);
    w[0] = _mm256_and_si256(both, low);
    w[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    if (type == T_MXFP4) UNROLL for (int i = 0; i < 2; i++) w[i] = _mm256_shuffle_epi8(e2m1_256(), w[i]);
}

/* As eight_dots_256 for types of 4 bits; activations are in the order of two_blocks_256. Each half of a vector is of a block, and no
 * sum crosses halves. 16-bit words hold the sums of eight products, 8 * 24 * 127 for MXFP4. */
INLINE_256 void eight_nibble_dots_256(uint32_t type, const int J, const uint8_t *w, const int8_t *q, int64_t ldq,
                                      __m256i *dot) {
    __m256i pair[FEW_256], quad[FEW_256];
    UNROLL for (int p = 0; p < 4; p++) {
        __m256i u[2];
        two_blocks_256(type, w + 2 * p * q32_bytes(type), u);
        IN_ORDER(u[0]);
        IN_ORDER(u[1]);
        UNROLL for (int j = 0; j < J; j++) {
            const __m256i *a = (const void *)(q + j * ldq + 64 * p);
            __m256i s = _mm256_add_epi16(_mm256_maddubs_epi16(u[0], _mm256_loadu_si256(a)),
                                         _mm256_maddubs_epi16(u[1], _mm256_loadu_si256(a + 1)));
            IN_ORDER(s);
            if (p % 2 == 0) {
                pair[j] = s;
                continue;
            }
            s = _mm256_add_epi16(_mm256_unpacklo_epi32(pair[j], s), _mm256_unpackhi_epi32(pair[j], s));
            s = _mm256_madd_epi16(s, _mm256_set1_epi16(1));
            if (p == 1) quad[j] = s;
            else dot[j] = _mm256_permutevar8x32_epi32(add_quads_256(quad[j], s), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        }
    }
}

/* J rows of activations of n values in the order of rows_order_256: rows of weights are read from end to end, and nothing of them is
 * put in another order. Groups of 8 blocks are the lower and the upper lanes in turn; n is a multiple of 256. */
INLINE_256 void q32_rows_in_order_256(uint32_t type, const bool vnni, const int J, int64_t n, const uint8_t *w, const int8_t *q,
                                      const tile_acts *x, float *out, size_t ldo) {
    __m256 acc[FEW_256][2];
    UNROLL for (int j = 0; j < J; j++) acc[j][0] = acc[j][1] = _mm256_setzero_ps();
    for (int64_t b = 0; b < n / 32; b += LANES) UNROLL for (int h = 0; h < 2; h++) {
            const int64_t at = b + 8 * h;
            const uint8_t *from = w + at * q32_bytes(type);
            if (at == n / 32) break;
            fetch_ahead(from, 8 * q32_bytes(type));
            const __m256 scale = group_scales_256(type, from);
            __m256i dot[FEW_256];
            if (type == T_Q8_0) eight_dots_256(vnni, J, from, q + 32 * at, n, dot);
            else eight_nibble_dots_256(type, J, from, q + 32 * at, n, dot);
            UNROLL for (int j = 0; j < J; j++) {
                if (!is_signed_256(type, vnni)) dot[j] = less_excess_256(type, vnni, dot[j], x->sum[j] + 2 * at);
                acc[j][h] = add_lanes_256(dot[j], scale, x->d[j] + at, acc[j][h]);
            }
        }
    UNROLL for (int j = 0; j < J; j++) out[(size_t)j * ldo] = join_256((floats256){acc[j][0], acc[j][1]});
}

INLINE_256 void q32_few_256(uint32_t type, const bool vnni, const int J, int64_t n, const uint8_t *w, size_t w_stride,
                            int n_out, const int8_t *q, const tile_acts *x, float *out, size_t ldo) {
    for (int o = 0; o < n_out; o++) q32_rows_in_order_256(type, vnni, J, n, w + (size_t)o * w_stride, q, x, out + o, ldo);
}

/* Eight vectors of eight words, their rows for columns. */
INLINE_256 void transpose_256(const __m256i *v, __m256i *to) {
    UNROLL for (int h = 0; h < 2; h++) { /* the words of even and odd number of each pair of vectors' halves */
        __m256i p[4];
        UNROLL for (int i = 0; i < 4; i++) p[i] =
            h ? _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]) : _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        UNROLL for (int i = 0; i < 2; i++) {
            const __m256i a = i ? _mm256_unpackhi_epi64(p[0], p[1]) : _mm256_unpacklo_epi64(p[0], p[1]);
            const __m256i b = i ? _mm256_unpackhi_epi64(p[2], p[3]) : _mm256_unpacklo_epi64(p[2], p[3]);
            to[2 * h + i] = _mm256_permute2x128_si256(a, b, 0x20);
            to[2 * h + i + 4] = _mm256_permute2x128_si256(a, b, 0x31);
        }
    }
}

/* A row of activations from the order of act_offset to the natural one, for types of 4 bits to that of two_blocks_256; n is a
 * multiple of 256. */
INLINE_256 void rows_order_256(uint32_t type, int64_t n, const int8_t *q, int8_t *to) {
    for (int64_t b = 0; b < n / 32; b += 8) {
        const int64_t first = b & ~(int64_t)15, step = n / 32 - first < LANES ? 32 : 64;
        __m256i v[8], block[8];
        UNROLL for (int k = 0; k < 8; k++) v[k] = _mm256_loadu_si256((const void *)(q + first * 32 + (b & 15) * 4 + k * step));
        transpose_256(v, block);
        UNROLL for (int i = 0; i < 8; i++) {
            const __m256i even = block[i & ~1], odd = block[i | 1];
            const __m256i halves =
                i % 2 ? _mm256_permute2x128_si256(even, odd, 0x31) : _mm256_permute2x128_si256(even, odd, 0x20);
            _mm256_storeu_si256((void *)(to + (b + i) * 32), type == T_Q8_0 ? block[i] : halves);
        }
    }
}

/* What belongs to a whole block of 256 weights: a scale for every pair of bytes of a pair of half parts; a minimum for each 16 values,
 * or where values are too large their excess * scale, which belongs to the same sum; and the signs of IQ2_XXS, a byte for each 8
 * weights, by halves those of two runs, then of the other two, all of it twice. */
typedef struct {
    __m256i scale[2][2]; /* [half][parts 0 and 1, or 2 and 3] */
    __m256i min, signs[2];
} wblock256;

/* Half of a part, in the order of act_offset: unsigned bytes (Q3_K: 4 too large, Q6_K: 32), or for IQ2_XXS magnitudes, and bytes
 * that have the signs and are not 0. */
typedef struct {
    __m256i w, sign;
} wpart256;

INLINE_256 __m256i each_64(const uint8_t *p) { return _mm256_set1_epi64x((long long)load_u64(p)); }

/* Scales for 16 values each, 16 signed bytes, to the words they belong to. */
INLINE_256 void spread_scales_256(__m128i s, wblock256 *u) {
    const __m256i to = _mm256_setr_epi16(0x80, 0x80, 0x80, 0x80, 0x280, 0x280, 0x280, 0x280, /* the high byte of each word */
                                         0x480, 0x480, 0x480, 0x480, 0x680, 0x680, 0x680, 0x680);
    UNROLL for (int i = 0; i < 4; i++) {
        const __m256i at = _mm256_add_epi8(to, _mm256_set1_epi8((char)(8 * (i / 2) + i % 2)));
        u->scale[i / 2][i % 2] = _mm256_srai_epi16(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(s), at), 8);
    }
}

/* Scales for 32 values each, 8 bytes, likewise. */
INLINE_256 void spread_wide_scales_256(__m128i s, wblock256 *u) {
    const __m256i to = _mm256_setr_epi16(0x80, 0x80, 0x80, 0x80, 0x180, 0x180, 0x180, 0x180, /* the high byte of each word */
                                         0x280, 0x280, 0x280, 0x280, 0x380, 0x380, 0x380, 0x380);
    UNROLL for (int h = 0; h < 2; h++) {
        const __m256i at = _mm256_add_epi8(to, _mm256_set1_epi8((char)(4 * h)));
        u->scale[h][0] = u->scale[h][1] = _mm256_srai_epi16(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(s), at), 8);
    }
}

/* Q3_K's 16 scales of 6 bits (unpack_q3_k), as signed bytes. */
INLINE_256 __m128i q3_k_scales(const uint8_t *s) {
    const uint32_t lo = 0x0f0f0f0f, hi = 0x30303030, a = load_u32(s), b = load_u32(s + 4), c = load_u32(s + 8);
    const __m128i v = _mm_setr_epi32((int)((a & lo) | (c << 4 & hi)), (int)((b & lo) | (c << 2 & hi)),
                                     (int)((a >> 4 & lo) | (c & hi)), (int)((b >> 4 & lo) | (c >> 2 & hi)));
    return _mm_sub_epi8(v, _mm_set1_epi8(32));
}

/* The scales of Q4_K and Q5_K (unpack_k_scales), 8 bytes; their minimums, each twice, as int16. */
INLINE_256 __m128i k_scales(const uint8_t *s, __m256i *min) {
    const uint32_t a = load_u32(s), b = load_u32(s + 4), c = load_u32(s + 8);
    const __m128i m = _mm_setr_epi32((int)(b & 0x3f3f3f3f), (int)((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)), 0, 0);
    *min = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(m, m));
    return _mm_setr_epi32((int)(a & 0x3f3f3f3f), (int)((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)), 0, 0);
}

/* IQ2_XXS's 8 words of signs and scale to signs, a byte for each 8 weights: first 14 bits come to each 16, then 7 to each 8. The
 * eighth is the parity of the seven that are stored. */
INLINE_256 __m256i iq2_signs_256(__m256i words) {
    const __m256i odd =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i pairs = _mm256_blend_epi16(words, _mm256_slli_epi32(words, 2), 0xaa);
    const __m256i bytes = _mm256_blendv_epi8(pairs, _mm256_add_epi16(pairs, pairs), _mm256_set1_epi16((short)0xff00));
    const __m256i sign = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f));
    const __m256i folded = _mm256_and_si256(_mm256_xor_si256(sign, _mm256_srli_epi16(sign, 4)), _mm256_set1_epi8(15));
    return _mm256_or_si256(sign, _mm256_shuffle_epi8(odd, folded));
}

/* IQ2_XXS: signs; scales, 1 + 2 * the top four bits. */
INLINE_256 void unpack_iq2_xxs_256(const uint8_t *b, wblock256 *u) {
    const __m256 lo = _mm256_loadu_ps((const void *)(b + 2)), hi = _mm256_loadu_ps((const void *)(b + 34));
    const __m256i words = _mm256_castps_si256(_mm256_shuffle_ps(lo, hi, 0xdd)); /* of runs 0 1 4 5 2 3 6 7 */
    const __m256i sign = iq2_signs_256(words), top = _mm256_or_si256(_mm256_srli_epi32(words, 27), _mm256_set1_epi32(1));
    const __m128i to = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5);
    u->signs[0] = _mm256_unpacklo_epi32(sign, sign);
    u->signs[1] = _mm256_unpackhi_epi32(sign, sign);
    UNROLL for (int h = 0; h < 2; h++) u->scale[h][0] = u->scale[h][1] =
        _mm256_shuffle_epi8(top, _mm256_broadcastsi128_si256(_mm_add_epi8(to, _mm_set1_epi8((char)(8 * h)))));
}

INLINE_256 void unpack_256(uint32_t type, const uint8_t *b, wblock256 *u) {
    if (type == T_Q4_K || type == T_Q5_K) {
        spread_wide_scales_256(k_scales(b + 4, &u->min), u);
    } else if (type == T_Q2_K) { /* scales and minimums of 4 bits */
        const __m128i s = _mm_loadu_si128((const void *)b), low = _mm_set1_epi8(15);
        spread_scales_256(_mm_and_si128(s, low), u);
        u->min = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(s, 4), low));
    } else if (type == T_IQ2_XXS) {
        unpack_iq2_xxs_256(b, u);
    } else { /* Q3_K and Q6_K */
        const __m128i scale = type == T_Q3_K ? q3_k_scales(b + 96) : _mm_loadu_si128((const void *)(b + 192));
        spread_scales_256(scale, u);
        u->min = _mm256_slli_epi16(_mm256_cvtepi8_epi16(scale), type == T_Q3_K ? 2 : 5);
    }
}

/* Half h of part c of 2-bit values. */
INLINE_256 __m256i two_bits_256(const uint8_t *p, int c, int h) {
    return _mm256_and_si256(_mm256_srlv_epi64(each_64(p + 32 * h + 8 * c), _mm256_setr_epi64x(0, 2, 4, 6)),
                            _mm256_set1_epi8(3));
}

/* Of the 4-bit values of Q4_K and Q5_K. */
INLINE_256 __m256i four_bits_256(const uint8_t *p, int c, int h) {
    const uint8_t *at = p + 64 * h + 8 * c;
    const __m256i v = _mm256_blend_epi32(each_64(at), each_64(at + 32), 0xf0);
    return _mm256_and_si256(_mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 4, 0, 4)), _mm256_set1_epi8(15));
}

/* Of Q6_K's values, whose runs come in another order. */
INLINE_256 __m256i six_bits_256(const uint8_t *b, int c, int h) {
    const uint8_t *at = b + 64 * h + 8 * c;
    const __m256i v = _mm256_blend_epi32(each_64(at), each_64(at + 32), 0xcc);
    const __m256i low = _mm256_and_si256(_mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    return _mm256_or_si256(low, _mm256_slli_epi16(two_bits_256(b + 128, c, h), 4));
}

/* One more bit of each value, bit r of byte i for value i of run r, to bit `to`. */
INLINE_256 __m256i add_bit_256(__m256i w, const uint8_t *p, int to, int c, int h) {
    const __m256i run = _mm256_add_epi64(_mm256_setr_epi64x(0, 1, 2, 3), _mm256_set1_epi64x(4 * h));
    const __m256i bit = _mm256_and_si256(_mm256_srlv_epi64(each_64(p + 8 * c), run), _mm256_set1_epi8(1));
    return _mm256_or_si256(w, _mm256_slli_epi16(bit, to));
}

/* Two code words' magnitudes. */
INLINE_256 __m128i iq2_pair_256(uint8_t first, uint8_t second) {
    const __m128i v = _mm_loadl_epi64((const void *)&iq2_grid[first]);
    return _mm_castpd_si128(_mm_loadh_pd(_mm_castsi128_pd(v), (const void *)&iq2_grid[second]));
}

/* Part c of a half of IQ2_XXS whose runs begin at b. A sign is a weight's bit of the signs, and what makes it 128. Of two code words
 * one is a load and one a shift, so that neither has to wait. */
INLINE_256 wpart256 iq2_part_256(const uint8_t *b, int c, __m256i signs) {
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u), rest = _mm256_set1_epi64x(0x01406070787c7e7f);
    const __m256i word = _mm256_setr_epi64x(0, 0x0808080808080808, 0, 0x0808080808080808); /* of each 128 bits, for part 0 */
    const __m256i s = _mm256_shuffle_epi8(signs, _mm256_add_epi8(word, _mm256_set1_epi8((char)c)));
    __m128i v[2];
    UNROLL for (int i = 0; i < 2; i++) v[i] = iq2_pair_256(b[16 * i + c], (uint8_t)(load_u32(b + 16 * i + 8) >> 8 * c));
    return (wpart256){_mm256_inserti128_si256(_mm256_castsi128_si256(v[0]), v[1], 1),
                      _mm256_add_epi8(_mm256_and_si256(s, bit), rest)};
}

/* Half h of part c of the block at b. Parts are unpacked as they are needed: all of them are more than there are registers. */
INLINE_256 wpart256 part_256(uint32_t type, const uint8_t *b, const wblock256 *u, int c, int h) {
    wpart256 p = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    switch (type) {
    case T_Q2_K: p.w = two_bits_256(b + 16, c, h); break;
    case T_Q3_K: p.w = add_bit_256(two_bits_256(b + 32, c, h), b, 2, c, h); break;
    case T_Q4_K: p.w = four_bits_256(b + 16, c, h); break;
    case T_Q5_K: p.w = add_bit_256(four_bits_256(b + 48, c, h), b + 16, 4, c, h); break;
    case T_Q6_K: p.w = six_bits_256(b, c, h); break;
    default: p = iq2_part_256(b + 2 + 32 * h, c, u->signs[h]); break;
    }
    return p;
}

/* The sums of 4 vectors, that of v[b] in lane b. */
INLINE_256 __m128i sum_each_256(const __m256i *v) {
    const __m256i a = _mm256_add_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    const __m256i b = _mm256_add_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    const __m256i c = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    return _mm_add_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
}

INLINE_256 __m256i low_words_256(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi32(0xffff)); }

/* A block of weights against J rows of activations, before lanes are summed. No 16-bit sum of products saturates: two pairs of
 * Q6_K reach 4 * 63 * 127, two of IQ2_XXS 4 * 43 * 127. With AVX-VNNI sums have 32 bits, and where they fit in 16, the low word of
 * each is scaled: eight products of Q5_K reach 8 * 31 * 127. */
INLINE_256 void block_dots_256(uint32_t type, const bool vnni, const int J, const uint8_t *w, const int8_t *const *q,
                               const int16_t *const *sum, __m256i *dot, __m256i *min) {
    const bool by_bytes = vnni && type != T_Q6_K && type != T_IQ2_XXS;
    wblock256 u;
    unpack_256(type, w, &u);
    UNROLL for (int j = 0; j < J; j++) dot[j] = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < 4; i++) {
        const int h = i / 2, p = i % 2; /* half, pair of parts */
        wpart256 first = part_256(type, w, &u, 2 * p, h), second = part_256(type, w, &u, 2 * p + 1, h);
        if (J > 1) {
            IN_ORDER(first.w);
            IN_ORDER(second.w);
        }
        const __m256i scale = by_bytes ? low_words_256(u.scale[h][p]) : u.scale[h][p];
        UNROLL for (int j = 0; j < J; j++) {
            __m256i a = _mm256_loadu_si256((const void *)(q[j] + 128 * p + 32 * h));
            __m256i b = _mm256_loadu_si256((const void *)(q[j] + 128 * p + 32 * h + 64));
            if (type == T_IQ2_XXS) {
                a = _mm256_sign_epi8(a, first.sign);
                b = _mm256_sign_epi8(b, second.sign);
            }
            if (by_bytes) a = add_bytes_256(add_bytes_256(_mm256_setzero_si256(), first.w, a), second.w, b);
            else a = _mm256_add_epi16(_mm256_maddubs_epi16(first.w, a), _mm256_maddubs_epi16(second.w, b));
            dot[j] = add_words_256(vnni, dot[j], a, scale);
            IN_ORDER(dot[j]);
        }
    }
    if (!type_has_min(type) && !type_has_offset(type)) return;
    UNROLL for (int j = 0; j < J; j++) {
        const __m256i s = _mm256_madd_epi16(u.min, _mm256_loadu_si256((const void *)sum[j]));
        if (type_has_min(type)) min[j] = s;
        else dot[j] = _mm256_sub_epi32(dot[j], s);
    }
}

/* The half-precision numbers at b and in the 3 following blocks. */
INLINE_256 __m128 block_halves_256(const uint8_t *b, int64_t size) {
    const short half[4] = {(short)load_u16(b), (short)load_u16(b + size), (short)load_u16(b + 2 * size),
                           (short)load_u16(b + 3 * size)};
    return _mm_cvtph_ps(_mm_setr_epi16(half[0], half[1], half[2], half[3], 0, 0, 0, 0));
}

/* The products of 4 blocks, their lanes summed, times the scales of weights and activations a, added to the blocks' lanes. */
INLINE_256 void add_blocks_256(uint32_t type, const uint8_t *b, const __m256i *dot, const __m256i *min, const float *a,
                               float *lane) {
    const int size = type_find(type)->bytes;
    const __m128 activation = _mm_loadu_ps(a);
    __m128 d = block_halves_256(b + scale_at(type), size);
    if (type == T_IQ2_XXS) d = _mm_mul_ps(d, _mm_set1_ps(0.125f));
    __m128 s = _mm_fmadd_ps(_mm_cvtepi32_ps(sum_each_256(dot)), _mm_mul_ps(d, activation), _mm_load_ps(lane));
    if (type_has_min(type)) {
        d = block_halves_256(b + scale_at(type) + 2, size);
        s = _mm_fnmadd_ps(_mm_cvtepi32_ps(sum_each_256(min)), _mm_mul_ps(d, activation), s);
    }
    _mm_store_ps(lane, s);
}

/* Block b of J rows of activations against the weights at w: the i-th of four whose sums are joined later. */
INLINE_256 void few_dots_256(uint32_t type, const bool vnni, const int J, const uint8_t *w, const tile_acts *x, int64_t b,
                             int i, __m256i (*dot)[4], __m256i (*min)[4]) {
    __m256i d[FEW_256], m[FEW_256];
    const int8_t *q[FEW_256];
    const int16_t *sum[FEW_256];
    UNROLL for (int j = 0; j < J; j++) {
        q[j] = x->q[j] + b * 256;
        sum[j] = x->sum[j] + b * 16;
    }
    block_dots_256(type, vnni, J, w, q, sum, d, m);
    UNROLL for (int j = 0; j < J; j++) {
        dot[j][i] = d[j];
        if (type_has_min(type)) min[j][i] = m[j];
    }
}

/* A row of weights against J rows of activations of n values, a multiple of 1024: four blocks at a time. */
INLINE_256 void q256_rows_in_order_256(uint32_t type, const bool vnni, const int J, int64_t n, const uint8_t *w,
                                       const tile_acts *x, float *out, size_t ldo) {
    const int size = type_find(type)->bytes;
    _Alignas(32) float acc[FEW_256][LANES];
    UNROLL for (int j = 0; j < J; j++) memset(acc[j], 0, sizeof acc[j]);
    for (int64_t b = 0; b < n / 256; b += 4) {
        const uint8_t *from = w + b * size;
        __m256i dot[FEW_256][4], min[FEW_256][4];
        fetch_ahead(from, 4 * size);
        if (J == 1) UNROLL for (int i = 0; i < 4; i++) few_dots_256(type, vnni, 1, from + i * size, x, b + i, i, dot, min);
        else
            for (int i = 0; i < 4; i++) few_dots_256(type, vnni, J, from + i * size, x, b + i, i, dot, min);
        UNROLL for (int j = 0; j < J; j++) add_blocks_256(type, from, dot[j], min[j], x->d[j] + b, acc[j] + (b & 12));
    }
    UNROLL for (int j = 0; j < J; j++) out[(size_t)j * ldo] =
        join_256((floats256){_mm256_load_ps(acc[j]), _mm256_load_ps(acc[j] + 8)});
}

/* Many rows of activations: eight rows of weights are put side by side, so that lane o of a vector is of row o and no sum crosses
 * lanes. A vector holds 4 values of each row, unsigned bytes but for Q8_0, and 8 vectors a run of 32 values. A panel is a part of
 * the rows, 1024 values; the tile's activations for it stay in the first caches while it serves them all. */
enum { SIDE = 8, RUNS = 32 };
typedef struct {
    __m256i w[RUNS][8];
    __m256i scale[RUNS][2]; /* in blocks of 256: of the run's 16 and 16 values, each as a pair of words */
    __m256i min[RUNS]; /* the pair of their minimums or, where values are too large, of excess * scale */
    __m256 d[RUNS], dmin[RUNS]; /* for each block */
    const uint8_t *next; /* the eight rows after these, to be fetched meanwhile */
} panel256;

/* The scales of the blocks at w[0] + at, w[1] + at, .. */
INLINE_256 __m256 side_scales_256(uint32_t type, const uint8_t *const *w, int64_t at) {
    if (type == T_MXFP4)
        return mxfp4_scales_256(
            _mm256_setr_epi32(w[0][at], w[1][at], w[2][at], w[3][at], w[4][at], w[5][at], w[6][at], w[7][at]));
    short half[SIDE];
    UNROLL for (int o = 0; o < SIDE; o++) half[o] = (short)load_u16(w[o] + at);
    const __m256 d = _mm256_cvtph_ps(_mm_setr_epi16(half[0], half[1], half[2], half[3], half[4], half[5], half[6], half[7]));
    return type == T_IQ2_XXS ? _mm256_mul_ps(d, _mm256_set1_ps(0.125f)) : d;
}

/* A scale given as a pair of words, as AVX-VNNI's sums of 32 bits are multiplied by it: see run_dots_vnni. */
INLINE_256 __m256i vnni_scale_256(uint32_t type, __m256i pair) {
    return type == T_Q6_K ? _mm256_srai_epi32(pair, 16) : low_words_256(pair);
}

/* The blocks of 256 at w[0] + at, w[1] + at, .. to 8 runs of a panel. */
INLINE_256 void pack_block_256(uint32_t type, const bool vnni, const uint8_t *const *w, int64_t at, __m256i (*to)[8],
                               __m256i (*scale)[2], __m256i *min) {
    wblock256 u[SIDE];
    __m256i part[4][2][SIDE], v[SIDE], words[8];
    for (int o = 0; o < SIDE; o++) {
        unpack_256(type, w[o] + at, &u[o]);
        UNROLL for (int i = 0; i < 8; i++) {
            const wpart256 p = part_256(type, w[o] + at, &u[o], i % 4, i / 4);
            part[i % 4][i / 4][o] =
                type == T_IQ2_XXS ? _mm256_add_epi8(_mm256_sign_epi8(p.w, p.sign), _mm256_set1_epi8(IQ2_OFFSET)) : p.w;
        }
    }
    for (int h = 0; h < 2; h++) {
        for (int c = 0; c < 4; c++) {
            transpose_256(part[c][h], words); /* two words of each of four runs: see act_offset */
            UNROLL for (int k = 0; k < 8; k++) to[4 * h + k / 2][2 * c + k % 2] = words[k];
        }
        UNROLL for (int o = 0; o < SIDE; o++) v[o] = _mm256_blend_epi32(u[o].scale[h][0], u[o].scale[h][1], 0xaa);
        transpose_256(v, scale[4 * h]);
    }
    if (type == T_IQ2_XXS) {
        UNROLL for (int r = 0; r < 8; r++) min[r] = _mm256_mullo_epi16(scale[r][0], _mm256_set1_epi16(IQ2_OFFSET));
    } else {
        UNROLL for (int o = 0; o < SIDE; o++) v[o] = u[o].min;
        transpose_256(v, min);
    }
    if (vnni) UNROLL for (int i = 0; i < 16; i++) scale[i / 2][i % 2] = vnni_scale_256(type, scale[i / 2][i % 2]);
}

INLINE_256 void pack_256(uint32_t type, const bool vnni, const uint8_t *const *w, int64_t b, int64_t blocks, panel256 *p) {
    const type_info *t = type_find(type);
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t at = (b + i) * t->bytes;
        p->d[i] = side_scales_256(type, w, at + scale_at(type));
        if (type_has_min(type)) p->dmin[i] = side_scales_256(type, w, at + scale_at(type) + 2);
        if (t->block == 256) {
            pack_block_256(type, vnni, w, at, &p->w[8 * i], &p->scale[8 * i], &p->min[8 * i]);
        } else {
            __m256i v[SIDE];
            UNROLL for (int o = 0; o < SIDE; o++) v[o] = block_256(type, vnni, w[o] + at);
            transpose_256(v, p->w[i]);
        }
    }
}

INLINE_256 __m256i each_32(const void *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

/* How many vectors' products can be added as 16-bit words, that is, twice as many products of 127 and a type's largest value; no
 * more than have one scale. */
ALWAYS_INLINE int vectors_added(uint32_t type) {
    switch (type) {
    case T_Q8_0: return 1; /* 2 * 128 * 127 */
    case T_IQ2_XXS: return 1; /* 2 * 86 * 127 */
    case T_Q6_K: return 2; /* 4 * 63 * 127 */
    case T_Q4_0: return 8; /* 16 * 15 * 127 */
    case T_Q4_K: return 8; /* the same */
    default: return 4; /* 8 * 31 * 127 for Q5_K */
    }
}

/* A run of a panel against J rows of activations, whose words of 4 values lie as act_offset says: `step` bytes apart with one
 * scale for 32. */
INLINE_256 void run_dots_256(uint32_t type, const int J, const __m256i *w, const __m256i *scale, const int8_t *const *q,
                             const int64_t step, __m256i *dot) {
    const bool wide = type_find(type)->block == 256;
    const int together = vectors_added(type);
    UNROLL for (int first = 0; first < 8; first += together) {
        __m256i s[4];
        UNROLL for (int k = first; k < first + together; k++) UNROLL for (int j = 0; j < J; j++) {
            const __m256i a = each_32(q[j] + (wide ? k / 2 * 64 + k % 2 * 4 : k * step));
            const __m256i p = type == T_Q8_0 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[k]), _mm256_sign_epi8(a, w[k]))
                                             : _mm256_maddubs_epi16(w[k], a);
            s[j] = k == first ? p : _mm256_add_epi16(s[j], p);
            IN_ORDER(s[j]);
        }
        const __m256i by = wide ? scale[first / 4] : _mm256_set1_epi16(1);
        UNROLL for (int j = 0; j < J; j++) {
            dot[j] = _mm256_add_epi32(dot[j], _mm256_madd_epi16(s[j], by));
            IN_ORDER(dot[j]);
        }
    }
}

/* The same with AVX-VNNI: all weights are unsigned, and sums of 32 bits hold whatever there is. Those of 16 products that fit in 16
 * bits, up to 16 * 15 * 127, are scaled as words, which costs less. Two sums, because each product waits for the one before. */
INLINE_256 void run_dots_vnni(uint32_t type, const int J, const __m256i *w, const __m256i *scale, const int8_t *const *q,
                              const int64_t step, __m256i *dot) {
    const bool wide = type_find(type)->block == 256;
    __m256i s[4][2];
    UNROLL for (int k = 0; k < 8; k++) UNROLL for (int j = 0; j < J; j++) {
        const __m256i a = each_32(q[j] + (wide ? k / 2 * 64 + k % 2 * 4 : k * step));
        s[j][k / 4] = add_bytes_256(k % 4 ? s[j][k / 4] : _mm256_setzero_si256(), w[k], a);
        IN_ORDER(s[j][k / 4]);
    }
    UNROLL for (int j = 0; j < J; j++) {
        const __m256i lo = s[j][0], hi = s[j][1], both = _mm256_add_epi32(lo, hi);
        if (!wide) dot[j] = _mm256_add_epi32(dot[j], both);
        else if (type == T_Q5_K || type == T_IQ2_XXS) dot[j] = _mm256_add_epi32(dot[j], _mm256_mullo_epi32(both, scale[0]));
        else if (type == T_Q6_K)
            dot[j] =
                _mm256_add_epi32(dot[j], _mm256_add_epi32(_mm256_mullo_epi32(lo, scale[0]), _mm256_mullo_epi32(hi, scale[1])));
        else dot[j] = add_words_256(true, add_words_256(true, dot[j], lo, scale[0]), hi, scale[1]);
        IN_ORDER(dot[j]);
    }
}

/* A panel, `blocks` blocks from b, against rows j .. j+J-1 of the tile. */
INLINE_256 void panel_rows_256(uint32_t type, const bool vnni, const int J, int64_t n, int64_t b, int64_t blocks,
                               const panel256 *p, const tile_acts *x, int j, __m256 (*lane)[ROWS_256]) {
    const int block = type_find(type)->block, runs = block / 32;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t at = act_offset(block == 32 ? ACT_Q32 : ACT_Q256, n, (b + i) * block);
        if (j == 0) fetch(p->next, (b + i) * SIDE * type_find(type)->bytes, SIDE * type_find(type)->bytes);
        const int64_t left = n / 32 - ((b + i) & ~(int64_t)(LANES - 1)); /* blocks whose words alternate */
        __m256i dot[4], min[4];
        const int8_t *q[4];
        UNROLL for (int k = 0; k < J; k++) {
            q[k] = x->q[j + k] + at;
            dot[k] = min[k] = _mm256_setzero_si256();
        }
        for (int r = 0; r < runs; r++) {
            const int64_t run = i * runs + r;
            const bool full = runs == 8 || left >= LANES;
            if (vnni && full) run_dots_vnni(type, J, p->w[run], p->scale[run], q, 4 * LANES, dot);
            else if (vnni) run_dots_vnni(type, J, p->w[run], p->scale[run], q, 4 * left, dot);
            else if (full) run_dots_256(type, J, p->w[run], p->scale[run], q, 4 * LANES, dot);
            else run_dots_256(type, J, p->w[run], p->scale[run], q, 4 * left, dot);
            UNROLL for (int k = 0; k < J; k++) q[k] += 8;
        }
        if (!is_signed_256(type, vnni)) UNROLL for (int r = 0; r < runs; r++) {
                const __m256i m = runs == 8 ? p->min[8 * i + r] : _mm256_set1_epi16((short)q32_offset(type));
                UNROLL for (int k = 0; k < J; k++) {
                    const __m256i sum = each_32(x->sum[j + k] + 2 * ((b + i) * runs + r));
                    min[k] = add_words_256(vnni, min[k], m, sum);
                    IN_ORDER(min[k]);
                }
            }
        UNROLL for (int k = 0; k < J; k++) {
            __m256 *to = &lane[(b + i) % LANES][j + k], d = _mm256_set1_ps(x->d[j + k][b + i]);
            if (!type_has_min(type)) dot[k] = _mm256_sub_epi32(dot[k], min[k]);
            __m256 s = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[k]), _mm256_mul_ps(p->d[i], d), *to);
            if (type_has_min(type)) s = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(min[k]), _mm256_mul_ps(p->dmin[i], d), s);
            *to = s;
        }
    }
}

/* Eight outputs, or fewer, of a row whose lanes are full. */
INLINE_256 void store_side_256(__m256 (*lane)[ROWS_256], int j, int outs, float *out) {
    __m256 t[8];
    float all[SIDE];
    UNROLL for (int l = 0; l < 8; l++) t[l] = _mm256_add_ps(lane[l][j], lane[l + 8][j]);
    UNROLL for (int l = 0; l < 4; l++) t[l] = _mm256_add_ps(t[l], t[l + 4]);
    _mm256_storeu_ps(all, _mm256_add_ps(_mm256_add_ps(t[0], t[2]), _mm256_add_ps(t[1], t[3])));
    memcpy(out, all, sizeof *out * (size_t)outs);
}

/* Up to eight outputs; a row that is not there is the last one again. */
INLINE_256 void panel_outputs_256(uint32_t type, const bool vnni, int64_t n, const uint8_t *w, size_t w_stride, int outs,
                                  const tile_acts *x, int m, float *out, size_t ldo) {
    const type_info *t = type_find(type);
    const int64_t blocks = n / t->block, step = 32 * RUNS / t->block;
    const uint8_t *rows[SIDE];
    panel256 p;
    __m256 lane[LANES][ROWS_256];
    p.next = w + SIDE * w_stride;
    for (int o = 0; o < SIDE; o++) rows[o] = w + (size_t)(o < outs ? o : outs - 1) * w_stride;
    for (int l = 0; l < LANES; l++)
        for (int j = 0; j < m; j++) lane[l][j] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b += step) {
        const int64_t count = blocks - b < step ? blocks - b : step;
        pack_256(type, vnni, rows, b, count, &p);
        int j = 0;
        for (; j + 4 <= m; j += 4) panel_rows_256(type, vnni, 4, n, b, count, &p, x, j, lane);
        if (m - j == 3) panel_rows_256(type, vnni, 3, n, b, count, &p, x, j, lane);
        else if (m - j == 2) panel_rows_256(type, vnni, 2, n, b, count, &p, x, j, lane);
        else if (m - j == 1) panel_rows_256(type, vnni, 1, n, b, count, &p, x, j, lane);
    }
    for (int j = 0; j < m; j++) store_side_256(lane, j, outs, out + (size_t)j * ldo);
}

INLINE_256 void panel_tile_256(uint32_t type, const bool vnni, TILE_ARGS) {
    for (int o = 0; o < n_out; o += SIDE)
        panel_outputs_256(type, vnni, n, w + (size_t)o * w_stride, w_stride, n_out - o < SIDE ? n_out - o : SIDE, x, m, out + o,
                          ldo);
}

INLINE_256 void q32_products_256(uint32_t type, const bool vnni, TILE_ARGS) {
    enum { MOST = 32768 };
    if (m > (vnni ? FEW_VNNI : FEW_256) || m * n > MOST || n % 256) {
        panel_tile_256(type, vnni, n, w, w_stride, n_out, x, m, out, ldo);
        return;
    }
    _Alignas(ALIGN) int8_t q[MOST];
    for (int j = 0; j < m; j++) rows_order_256(type, n, x->q[j], q + j * n);
    switch (m) { /* so that what is kept for each row stays in registers */
    case 1: q32_few_256(type, vnni, 1, n, w, w_stride, n_out, q, x, out, ldo); break;
    case 2: q32_few_256(type, vnni, 2, n, w, w_stride, n_out, q, x, out, ldo); break;
    case 3: q32_few_256(type, vnni, 3, n, w, w_stride, n_out, q, x, out, ldo); break;
    case 4: q32_few_256(type, vnni, 4, n, w, w_stride, n_out, q, x, out, ldo); break;
    case 5: q32_few_256(type, vnni, 5, n, w, w_stride, n_out, q, x, out, ldo); break;
    case 6: q32_few_256(type, vnni, 6, n, w, w_stride, n_out, q, x, out, ldo); break;
    case FEW_256: q32_few_256(type, vnni, FEW_256, n, w, w_stride, n_out, q, x, out, ldo); break;
    }
}

INLINE_256 void q256_few_256(uint32_t type, const bool vnni, const int J, int64_t n, const uint8_t *w, size_t w_stride,
                             int n_out, const tile_acts *x, float *out, size_t ldo) {
    for (int o = 0; o < n_out; o++) q256_rows_in_order_256(type, vnni, J, n, w + (size_t)o * w_stride, x, out + o, ldo);
}

INLINE_256 void q256_products_256(uint32_t type, const bool vnni, TILE_ARGS) {
    if (m > (vnni ? FEW_VNNI : FEW_256) || n % 1024) {
        panel_tile_256(type, vnni, n, w, w_stride, n_out, x, m, out, ldo);
        return;
    }
    switch (m) {
    case 1: q256_few_256(type, vnni, 1, n, w, w_stride, n_out, x, out, ldo); break;
    case 2: q256_few_256(type, vnni, 2, n, w, w_stride, n_out, x, out, ldo); break;
    case 3: q256_few_256(type, vnni, 3, n, w, w_stride, n_out, x, out, ldo); break;
    case 4: q256_few_256(type, vnni, 4, n, w, w_stride, n_out, x, out, ldo); break;
    case 5: q256_few_256(type, vnni, 5, n, w, w_stride, n_out, x, out, ldo); break;
    case 6: q256_few_256(type, vnni, 6, n, w, w_stride, n_out, x, out, ldo); break;
    case FEW_256: q256_few_256(type, vnni, FEW_256, n, w, w_stride, n_out, x, out, ldo); break;
    }
}

INLINE_256 void q32_tile_256(uint32_t type, TILE_ARGS) { q32_products_256(type, false, n, w, w_stride, n_out, x, m, out, ldo); }
INLINE_256 void q256_tile_256(uint32_t type, TILE_ARGS) {
    q256_products_256(type, false, n, w, w_stride, n_out, x, m, out, ldo);
}
TILE_SET(avx2, TARGET_AVX2, float_tile_256, q32_tile_256, q256_tile_256)

/* Few rows that would gain next to nothing are left to AVX2's functions. */
INLINE_256 void q32_tile_vnni(uint32_t type, TILE_ARGS) {
    if (type != T_Q8_0 && m <= FEW_VNNI) tile_for(&tiles_avx2, type)(n, w, w_stride, n_out, x, m, out, ldo);
    else q32_products_256(type, true, n, w, w_stride, n_out, x, m, out, ldo);
}
INLINE_256 void q256_tile_vnni(uint32_t type, TILE_ARGS) {
    if (m == 1) tile_for(&tiles_avx2, type)(n, w, w_stride, n_out, x, m, out, ldo);
    else q256_products_256(type, true, n, w, w_stride, n_out, x, m, out, ldo);
}
QUANTISED_SET(avxvnni, TARGET_AVX2, q32_tile_vnni, q256_tile_vnni, avx2)
#endif

/* ---- 4.8 Matrix products with AVX-512 (VNNI) ---------------------------------------------------------------------- */

#ifdef KERNELS_X86
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c")))
#define INLINE_512 ALWAYS_INLINE TARGET_AVX512

INLINE_512 float join_512(__m512 a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

/* The same for four vectors: their first steps side by side, a vector's four sums after another's; then the last ones. */
INLINE_512 __m512 fold_4_512(__m512 a, __m512 b, __m512 c, __m512 d) {
    a = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    c = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, c, 0x88), _mm512_shuffle_f32x4(a, c, 0xdd));
}
INLINE_512 __m128 join_4_512(__m512 a) {
    a = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4e));
    a = _mm512_add_ps(a, _mm512_permute_ps(a, 0xb1));
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), a));
}

INLINE_512 __mmask16 first_lanes(int64_t lanes) { return (__mmask16)(lanes >= LANES ? 0xffff : (1u << lanes) - 1); }

/* 16 weights of a float type. */
INLINE_512 __m512 load_floats_512(uint32_t type, const uint8_t *w, int64_t i) {
    if (type == T_F32) return _mm512_loadu_ps(w + 4 * i);
    const __m256i h = _mm256_loadu_si256((const void *)(w + 2 * i));
    return type == T_F16 ? _mm512_cvtph_ps(h) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* O rows of float weights against J rows of activations, the sums in registers. */
INLINE_512 void floats_512(uint32_t type, const int O, const int J, int64_t n, const uint8_t *w, size_t w_stride,
                           const float *const *x, float *out, size_t ldo) {
    __m512 acc[4][8];
    UNROLL for (int k = 0; k < O * J; k++) acc[k / J][k % J] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m512 v[8];
        UNROLL for (int j = 0; j < J; j++) v[j] = _mm512_loadu_ps(x[j] + i);
        UNROLL for (int o = 0; o < O; o++) {
            const __m512 a = load_floats_512(type, w + (size_t)o * w_stride, i);
            UNROLL for (int j = 0; j < J; j++) acc[o][j] = _mm512_fmadd_ps(a, v[j], acc[o][j]);
        }
    }
    if (i < n) {
        for (int o = 0; o < O; o++)
            for (int j = 0; j < J; j++) {
                float lanes[LANES];
                _mm512_storeu_ps(lanes, acc[o][j]);
                out[(size_t)j * ldo + (size_t)o] = float_dot_from(type, n, i, w + (size_t)o * w_stride, x[j], lanes);
            }
    } else if (O == 4) {
        UNROLL for (int j = 0; j < J; j++) {
            const __m512 folded = fold_4_512(acc[0][j], acc[1][j], acc[2][j], acc[3][j]);
            _mm_storeu_ps(out + (size_t)j * ldo, join_4_512(folded));
        }
    } else {
        UNROLL for (int j = 0; j < J; j++) out[(size_t)j * ldo] = join_512(acc[0][j]);
    }
}

INLINE_512 void float_tile_512(uint32_t type, TILE_ARGS) {
    for (int o = 0; o < n_out;) {
        const int rows = n_out - o >= 4 ? 4 : 1;
        const uint8_t *p = w + (size_t)o * w_stride;
        for (int j = 0; j < m;) {
            const int count = rows == 1 && m - j >= 8 ? 8 : m - j >= 4 ? 4 : m - j >= 2 && rows == 4 ? 2 : 1;
            float *to = out + (size_t)j * ldo + o;
            if (rows == 4 && count == 4) floats_512(type, 4, 4, n, p, w_stride, x->f + j, to, ldo);
            else if (rows == 4 && count == 2) floats_512(type, 4, 2, n, p, w_stride, x->f + j, to, ldo);
            else if (rows == 4) floats_512(type, 4, 1, n, p, w_stride, x->f + j, to, ldo);
            else if (count == 8) floats_512(type, 1, 8, n, p, w_stride, x->f + j, to, ldo);
            else if (count == 4) floats_512(type, 1, 4, n, p, w_stride, x->f + j, to, ldo);
            else floats_512(type, 1, 1, n, p, w_stride, x->f + j, to, ldo);
            j += count;
        }
        o += rows;
    }
}

/* Weights of 32-value types, 16 blocks at a time: w[k] holds values 4k .. 4k+3 of every block, a block a lane, as
 * unsigned bytes that are `offset` too large; scale the blocks' scales. It is the order of act_offset. */
typedef struct {
    __m512i w[8];
    __m512 scale;
} group512;

/* Of four vectors, each four parts of four words: the k-th words of a part of all of them come together, in vector k. */
INLINE_512 void interleave_512(const __m512i r[4], __m512i w[4]) {
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), c = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i d = _mm512_unpacklo_epi32(r[2], r[3]), e = _mm512_unpackhi_epi32(r[2], r[3]);
    w[0] = _mm512_unpacklo_epi64(a, d);
    w[1] = _mm512_unpackhi_epi64(a, d);
    w[2] = _mm512_unpacklo_epi64(c, e);
    w[3] = _mm512_unpackhi_epi64(c, e);
}

/* The blocks of a group: eight at most from `low` on for the first lanes, and as many from `high` on for the others, `step` bytes
 * apart. Lanes that have none repeat the last one. */
typedef struct {
    const uint8_t *low, *high;
    int64_t lows, highs, step;
} blocks512;

ALWAYS_INLINE const uint8_t *block_at(blocks512 b, int i) {
    if (i < 8) return b.low + b.step * (i < b.lows ? i : b.lows - 1);
    return b.high + b.step * (i - 8 < b.highs ? i - 8 : b.highs - 1);
}

/* `blocks` of one row, more than eight. */
ALWAYS_INLINE blocks512 row_blocks(const uint8_t *w, int64_t size, int64_t blocks) {
    return (blocks512){w, w + 8 * size, 8, blocks - 8, size};
}

/* One of each of 16 rows. */
ALWAYS_INLINE blocks512 column_blocks(const uint8_t *w, int64_t w_stride) { return row_blocks(w, w_stride, LANES); }

/* 16 bytes from each of 16 blocks, from byte `at` of a block on, as four vectors: part c of vector i is block 4c + i. */
INLINE_512 void load_quarters_512(blocks512 b, int64_t at, __m512i r[4]) {
    UNROLL for (int i = 0; i < 4; i++) {
        const __m128i *p[4];
        UNROLL for (int c = 0; c < 4; c++) p[c] = (const void *)(block_at(b, 4 * c + i) + at);
        r[i] = _mm512_castsi128_si512(_mm_loadu_si128(p[0]));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x00f0, _mm_loadu_si128(p[1]));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x0f00, _mm_loadu_si128(p[2]));
        r[i] = _mm512_mask_broadcast_i32x4(r[i], 0xf000, _mm_loadu_si128(p[3]));
    }
}

/* 32 bytes from each of 16 blocks, from byte `at` of a block on, as eight vectors whose lane b is the k-th word of block b. */
INLINE_512 void gather_words_512(blocks512 b, int64_t at, __m512i w[8]) {
    __m512i half[2][4];
    UNROLL for (int h = 0; h < 2; h++) {
        __m512i r[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const __m256i *low = (const void *)(block_at(b, 8 * h + i) + at);
            const __m256i *high = (const void *)(block_at(b, 8 * h + 4 + i) + at);
            r[i] = _mm512_castsi256_si512(_mm256_loadu_si256(low));
            r[i] = _mm512_mask_broadcast_i64x4(r[i], 0xf0, _mm256_loadu_si256(high));
        }
        interleave_512(r, half[h]);
    }
    UNROLL for (int k = 0; k < 4; k++) {
        w[k] = _mm512_shuffle_i32x4(half[0][k], half[1][k], 0x88);
        w[k + 4] = _mm512_shuffle_i32x4(half[0][k], half[1][k], 0xdd);
    }
}

/* The scales of a group of blocks, which are the first thing in each. */
INLINE_512 __m512 group_scales_512(uint32_t type, blocks512 b) {
    __m512i r[4], first[4];
    load_quarters_512(b, 0, r);
    interleave_512(r, first);
    if (type != T_MXFP4) return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(first[0]));
    const __m512i e = _mm512_and_si512(first[0], _mm512_set1_epi32(255)); /* as mxfp4_scale */
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    const __mmask16 small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, small, _mm512_set1_epi32(0x00200000), e));
}

INLINE_512 void unpack_group_512(uint32_t type, blocks512 b, group512 *u) {
    if (type == T_Q8_0) {
        gather_words_512(b, 2, u->w);
        UNROLL for (int k = 0; k < 8; k++) u->w[k] = _mm512_xor_si512(u->w[k], _mm512_set1_epi8((char)0x80));
    } else {
        const __m512i low = _mm512_set1_epi8(15);
        const __m512i e2m1 = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        __m512i r[4];
        load_quarters_512(b, q32_bytes(type) - 16, r);
        interleave_512(r, u->w);
        UNROLL for (int k = 0; k < 4; k++) {
            u->w[k + 4] = _mm512_and_si512(_mm512_srli_epi16(u->w[k], 4), low);
            u->w[k] = _mm512_and_si512(u->w[k], low);
        }
        UNROLL for (int k = 0; k < 8 && type == T_MXFP4; k++) u->w[k] = _mm512_shuffle_epi8(e2m1, u->w[k]);
    }
    u->scale = group_scales_512(type, b);
}

INLINE_512 __m512i load_lanes_512(int64_t lanes, const void *p) {
    return lanes == LANES ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi32(first_lanes(lanes), p);
}

/* What belongs to the lanes of a group, or to eight of them at most, which others repeat. */
INLINE_512 __m512i load_group_512(const bool twice, int64_t lanes, const void *p) {
    if (!twice) return load_lanes_512(lanes, p);
    const __m256i v = lanes == 8 ? _mm256_loadu_si256(p) : _mm256_maskz_loadu_epi32((__mmask8)((1u << lanes) - 1), p);
    return _mm512_broadcast_i64x4(v);
}

/* Where weights are fetched: a group of blocks of two rows after the other, as they are used. */
typedef struct {
    const uint8_t *w;
    int64_t left; /* blocks of the row */
    int rows;
} place512;

/* Weights come into the second cache 8 KiB before they are used, as many bytes as memory has to have on their way; into the first,
 * which activations fill, 2 KiB. */
typedef struct {
    int64_t blocks; /* of a row */
    size_t w_stride;
    place512 far, near;
} ahead512;

INLINE_512 void q32_fetch_512(uint32_t type, const bool far, ahead512 *a) {
    const int64_t size = q32_bytes(type);
    place512 *at = far ? &a->far : &a->near;
    const uint8_t *w = at->w;
    for (int o = 0; o < 2 && o < at->rows; o++, w += a->w_stride) {
        if (far && at->left > 8) fetch_far(w, LANES * size); /* loops of constant length */
        else if (far) fetch_far(w, 8 * size);
        else if (at->left > 8) fetch(w, 0, LANES * size);
        else fetch(w, 0, 8 * size);
    }
    if (at->left > LANES) {
        at->w += LANES * size;
        at->left -= LANES;
    } else if (at->rows > 0) {
        at->w = w - (a->blocks - at->left) * size;
        at->left = a->blocks;
        at->rows -= 2;
    }
}

INLINE_512 ahead512 q32_ahead_512(uint32_t type, int64_t n, const uint8_t *w, size_t w_stride, int n_out) {
    const place512 first = {w, n / 32, n_out};
    ahead512 a = {n / 32, w_stride, first, first};
    for (int64_t bytes = 0; bytes < 8192 && a.far.rows > 0; bytes += 2 * LANES * q32_bytes(type)) {
        q32_fetch_512(type, true, &a);
        if (bytes < 2048) q32_fetch_512(type, false, &a);
    }
    return a;
}

/* Two rows of a 32-value type, w and one `other` bytes further on, against m rows of activations, for a group of blocks from b on.
 * Their sums are acc[j]; for no more than eight blocks lanes 0 to 7 of both rows are side by side, in acc[j][0]. A block adds up in
 * two halves that do not wait for one another. */
INLINE_512 void q32_group_512(uint32_t type, const bool half, int m, int64_t b, const int64_t blocks, const uint8_t *w,
                              size_t other, const tile_acts *x, __m512 acc[TILE][2], ahead512 *ahead) {
    const int R = half ? 1 : 2;
    const int64_t size = q32_bytes(type);
    const __mmask16 mask = half ? (__mmask16)(((1u << blocks) - 1) * 0x101) : first_lanes(blocks);
    const __m512i minus_offset = _mm512_set1_epi16((int16_t)-q32_offset(type));
    group512 u[2];
    q32_fetch_512(type, true, ahead);
    if (half) unpack_group_512(type, (blocks512){w, w + other, blocks, blocks, size}, &u[0]);
    else UNROLL for (int o = 0; o < 2; o++) unpack_group_512(type, row_blocks(w + (o ? other : 0), size, blocks), &u[o]);
    q32_fetch_512(type, false, ahead);
    for (int j = 0; j < m; j++) {
        const int8_t *q = x->q[j] + b * 32;
        const __m512 scale = _mm512_castsi512_ps(load_group_512(half, blocks, x->d[j] + b));
        const __m512i start = _mm512_madd_epi16(load_group_512(half, blocks, x->sum[j] + 2 * b), minus_offset);
        __m512i dot[2] = {start, start}, more[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        UNROLL for (int k = 0; k < 4; k++) {
            __m512i v = load_group_512(half, blocks, q + k * 4 * blocks);
            __m512i z = load_group_512(half, blocks, q + (k + 4) * 4 * blocks);
            __asm__("" : "+v"(v), "+v"(z)); /* once for both rows */
            UNROLL for (int o = 0; o < R; o++) dot[o] = _mm512_dpbusd_epi32(dot[o], u[o].w[k], v);
            UNROLL for (int o = 0; o < R; o++) more[o] = _mm512_dpbusd_epi32(more[o], u[o].w[k + 4], z);
        }
        UNROLL for (int o = 0; o < R; o++) {
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(dot[o], more[o]));
            acc[j][o] = _mm512_mask3_fmadd_ps(sum, _mm512_mul_ps(u[o].scale, scale), acc[j][o], mask);
        }
    }
}

/* The tree of join_lanes for two rows: lanes 0 to 7 of both are in acc[0], 8 to 15 in acc[1]. */
INLINE_512 __m512 join_2_512(const __m512 acc[2]) {
    __m512 t = _mm512_add_ps(acc[0], acc[1]);
    t = _mm512_add_ps(t, _mm512_shuffle_f32x4(t, t, 0xb1));
    t = _mm512_add_ps(t, _mm512_permute_ps(t, 0x4e));
    return _mm512_add_ps(t, _mm512_permute_ps(t, 0xb1));
}

INLINE_512 void q32_few_512(uint32_t type, TILE_ARGS) {
    const int64_t size = q32_bytes(type), blocks = n / 32;
    ahead512 ahead = q32_ahead_512(type, n, w, w_stride, n_out);
    for (int o = 0; o < n_out; o += 2) {
        const bool two = n_out - o > 1;
        const size_t other = two ? w_stride : 0;
        const uint8_t *row = w + (size_t)o * w_stride;
        __m512 acc[TILE][2];
        for (int j = 0; j < m; j++) acc[j][0] = acc[j][1] = _mm512_setzero_ps();
        int64_t b = 0;
        for (; b + 8 < blocks; b += LANES) {
            const uint8_t *from = row + b * size;
            if (blocks - b < LANES) q32_group_512(type, false, m, b, blocks - b, from, other, x, acc, &ahead);
            else if (m == 1) q32_group_512(type, false, 1, b, LANES, from, other, x, acc, &ahead);
            else q32_group_512(type, false, m, b, LANES, from, other, x, acc, &ahead);
        }
        for (int j = 0; j < m; j++) {
            const __m512 lo = _mm512_shuffle_f32x4(acc[j][0], acc[j][1], 0x44);
            acc[j][1] = _mm512_shuffle_f32x4(acc[j][0], acc[j][1], 0xee);
            acc[j][0] = lo;
        }
        if (blocks - b == 8 && m == 1) q32_group_512(type, true, 1, b, 8, row + b * size, other, x, acc, &ahead);
        else if (blocks - b == 8) q32_group_512(type, true, m, b, 8, row + b * size, other, x, acc, &ahead);
        else if (blocks - b == 4) q32_group_512(type, true, m, b, 4, row + b * size, other, x, acc, &ahead);
        else if (b < blocks) q32_group_512(type, true, m, b, blocks - b, row + b * size, other, x, acc, &ahead);
        for (int j = 0; j < m; j++) {
            const __m512 sum = join_2_512(acc[j]);
            out[(size_t)j * ldo + (size_t)o] = _mm512_cvtss_f32(sum);
            if (two) out[(size_t)j * ldo + (size_t)o + 1] = _mm_cvtss_f32(_mm512_extractf32x4_ps(sum, 2));
        }
    }
}

/* A run of 32 values of each of eight rows, a 64-bit word of a vector for each: part c of a vector holds values 8c to 8c + 7, as
 * unsigned bytes (Q3_K: 4 too large, Q6_K: 32, IQ2_XXS: 43). Scales, of the run or of its halves, are (s, 0) as pairs of int16; of
 * Q6_K and IQ2_XXS int32. */
typedef struct {
    __m512i w[4], scale[2];
} run512;

ALWAYS_INLINE bool type_has_halves(uint32_t type) { return type == T_Q2_K || type == T_Q3_K || type == T_Q6_K; }

/* Bytes of a table of 256 by 64 indexes. */
INLINE_512 __m512i lookup_512(const uint8_t *table, __m512i at) {
    const __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), at, _mm512_loadu_si512(table + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), at, _mm512_loadu_si512(table + 192));
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
}

/* The values of two runs of IQ2_XXS. A word is four code words (part c is code word c), then four times seven signs and a scale.
 * The code words' two bits of magnitude a value are looked up for both runs together; what comes out is eight bytes of eight values
 * each, and gf2p8affineqb, whose matrix they are, turns that into eight values of eight bits each. So do the signs, where the eighth
 * value takes the parity of seven bits. A third lookup makes bytes of those bits. */
INLINE_512 void unpack_iq2_xxs_512(const __m512i raw[2], run512 u[2]) {
    const __m512i code = _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(raw[0]), _mm512_castsi512_ps(raw[1]), 0x88));
    const __m512i high = lookup_512(iq2_levels[0], code), low = lookup_512(iq2_levels[1], code);
    const __m512i level[2] = {_mm512_unpacklo_epi8(high, low), _mm512_unpackhi_epi8(high, low)};
    const __m512i each = _mm512_set1_epi64((long long)0x8040201008040201u), parity = _mm512_set1_epi64(0x7f40201008040201);
    /* bytes 4 to 7 become bits 3 to 0: the signs of parts 1, 3, 2 and 0 */
    const __m512i sign_at = _mm512_set1_epi64(0x202e352700000000);
    UNROLL for (int i = 0; i < 2; i++) {
        const __m512i sign = _mm512_gf2p8affine_epi64_epi8(parity, _mm512_multishift_epi64_epi8(sign_at, raw[i]), 0);
        const __m512i bits = _mm512_gf2p8affine_epi64_epi8(each, level[i], 0); /* of part 0 on top, of part 3 at the bottom */
        const __m512i part[4] = {_mm512_srli_epi16(bits, 2), bits, bits, bits};
        UNROLL for (int c = 0; c < 4; c++) {
            const __m512i from = _mm512_set1_epi8((char)(c == 3 ? 0x03 : c == 2 ? 0x0c : 0x30));
            const __m512i at = _mm512_ternarylogic_epi64(part[c], sign, from, 0xe4); /* from ? part : sign */
            u[i].w[c] = _mm512_permutexvar_epi8(at, _mm512_loadu_si512(iq2_values[c]));
        }
    }
}

/* Few rows of activations against a 256-value type: eight rows of weights at a time, block by block, a word for each, so that no sum
 * crosses rows. Of the activations a vector holds the same eight values in every word. Twice eight rows make a vector of outputs. */

/* Compilers would keep all that a loop reads again, or its addresses, in memory of their own. */
#define READ_AGAIN(p) __asm__("" : "+r"(p))

/* The blocks at the same place of eight rows; block i is first[i / 4] + i % 4 * step. */
typedef struct {
    const uint8_t *first[2];
    size_t step, three;
} eight512;

ALWAYS_INLINE eight512 eight_from(const uint8_t *p, size_t step) {
    eight512 e = {{p, p + 4 * step}, step, 3 * step};
    READ_AGAIN(e.first[0]);
    READ_AGAIN(e.first[1]);
    READ_AGAIN(e.step);
    READ_AGAIN(e.three);
    return e;
}

/* Byte `at` of block i. */
ALWAYS_INLINE const uint8_t *eight_at(const eight512 *e, int i, int at) {
    const uint8_t *p = e->first[i / 4] + at;
    return i % 4 == 3 ? p + e->three : p + (size_t)(i % 4) * e->step;
}

/* Four words of each of eight rows, word c to w[c]. */
INLINE_512 void words_512(const eight512 *e, int at, __m512i w[4]) {
    __m512i v[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const int first = i / 2 * 4 + i % 2;
        v[i] = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)eight_at(e, first, at)));
        v[i] = _mm512_mask_broadcast_i64x4(v[i], 0xf0, _mm256_loadu_si256((const void *)eight_at(e, first + 2, at)));
    }
    UNROLL for (int i = 0; i < 2; i++) {
        const __m512i a = i ? _mm512_unpackhi_epi64(v[0], v[1]) : _mm512_unpacklo_epi64(v[0], v[1]);
        const __m512i b = i ? _mm512_unpackhi_epi64(v[2], v[3]) : _mm512_unpacklo_epi64(v[2], v[3]);
        w[i] = _mm512_shuffle_i64x2(a, b, 0x88);
        w[i + 2] = _mm512_shuffle_i64x2(a, b, 0xdd);
    }
}

/* Two words of each. */
INLINE_512 void pairs_512(const eight512 *e, int at, __m512i w[2]) {
    __m512i v[2];
    UNROLL for (int i = 0; i < 2; i++) {
        v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)eight_at(e, i, at)));
        UNROLL for (int k = 1; k < 4; k++) v[i] = _mm512_mask_broadcast_i32x4(
            v[i], (__mmask16)(15 << 4 * k), _mm_loadu_si128((const void *)eight_at(e, i + 2 * k, at)));
    }
    w[0] = _mm512_unpacklo_epi64(v[0], v[1]);
    w[1] = _mm512_unpackhi_epi64(v[0], v[1]);
}

/* The bytes of every word that `at` names, 0 where it says 0x80. */
INLINE_512 __m512i pick_512(__m512i v, uint64_t at) {
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(_mm_set_epi64x((long long)(at + 0x0808080808080808u), (long long)at)));
}

/* A block of eight rows as it is loaded: what runs of 32 values are made of. */
typedef struct {
    __m512i w[8], high[4]; /* words with bits of values; IQ2_XXS: one of each run */
    __m512i scale[4]; /* a byte for each run or half of it; IQ2_XXS: words of 32 bits */
    __m512i min[4]; /* what goes with the sums of 16 activations, four int16 to a word: minimums, or the excess * scale */
} parts512;

/* The scales and minimums of Q4_K and Q5_K: unpack_k_scales. */
INLINE_512 void eight_k_scales_512(const eight512 *e, parts512 *u) {
    __m512i t[2]; /* d, dmin, s[0] to s[3]; s[4] to s[11] */
    pairs_512(e, 0, t);
    const __m512i low = _mm512_set1_epi64(0x0f0f0f0f3f3f3f3f), high = _mm512_set1_epi64(0x3030303000000000);
    const __m512i scale = _mm512_mask_shuffle_epi32(t[1], 0x5555, t[0], 0xf5); /* s[0] to s[3], s[8] to s[11] */
    u->scale[0] = _mm512_ternarylogic_epi64(_mm512_and_si512(scale, low), _mm512_srli_epi64(t[0], 2), high, 0xf8);
    const __m512i min = _mm512_srlv_epi32(t[1], _mm512_set1_epi64(4LL << 32)); /* s[4] to s[7], s[8] to s[11] >> 4 */
    const __m512i more = _mm512_shuffle_epi32(_mm512_srli_epi64(t[1], 2), 0xa0);
    const __m512i all = _mm512_ternarylogic_epi64(_mm512_and_si512(min, low), more, high, 0xf8);
    UNROLL for (int i = 0; i < 4; i++) u->min[i] = pick_512(all, 0x8001800180008000u + (uint64_t)i * 0x0002000200020002u);
}

INLINE_512 void eight_q3_k_scales_512(const eight512 *e, __m512i scale[2]) {
    __m512i t[2]; /* two bytes of something else, s[0] to s[5]; s[6] to s[11], d */
    pairs_512(e, 94, t);
    const __m512i low = _mm512_or_si512(_mm512_srli_epi64(t[0], 16), _mm512_slli_epi64(t[1], 48)); /* s[0] to s[7] */
    const __m512i high = _mm512_shuffle_epi32(_mm512_srli_epi64(t[1], 16), 0xa0); /* s[8] to s[11], twice */
    const __m512i bits[2] = {_mm512_sllv_epi32(high, _mm512_set1_epi64(2LL << 32 | 4)),
                             _mm512_srlv_epi32(high, _mm512_set1_epi64(2LL << 32))};
    UNROLL for (int i = 0; i < 2; i++) {
        const __m512i four = _mm512_and_si512(i ? _mm512_srli_epi16(low, 4) : low, _mm512_set1_epi8(15));
        const __m512i six = _mm512_ternarylogic_epi64(four, bits[i], _mm512_set1_epi8(0x30), 0xf8);
        scale[i] = _mm512_sub_epi8(six, _mm512_set1_epi8(32));
    }
}

INLINE_512 void eight_scales_512(uint32_t type, const eight512 *e, parts512 *u) {
    if (type == T_IQ2_XXS) {
        UNROLL for (int i = 0; i < 4; i++) { /* 1 + 2 * scale of two runs */
            const __m512i top = _mm512_mask_shuffle_epi32(u->w[2 * i + 1], 0x5555, u->w[2 * i], 0xf5);
            u->scale[i] = _mm512_or_si512(_mm512_srli_epi32(top, 27), _mm512_set1_epi32(1));
            u->min[i] = _mm512_mullo_epi32(u->scale[i], _mm512_set1_epi32(IQ2_OFFSET * 0x10001));
        }
    } else if (type == T_Q4_K || type == T_Q5_K) {
        eight_k_scales_512(e, u);
    } else if (type == T_Q2_K) {
        const __m512i low = _mm512_set1_epi8(15);
        __m512i t[2], m[2];
        pairs_512(e, 0, t);
        UNROLL for (int i = 0; i < 2; i++) {
            u->scale[i] = _mm512_and_si512(t[i], low);
            m[i] = _mm512_and_si512(_mm512_srli_epi16(t[i], 4), low);
        }
        UNROLL for (int i = 0; i < 4; i++) u->min[i] =
            pick_512(m[i / 2], 0x8003800280018000u + (uint64_t)(i % 2) * 0x0004000400040004u);
    } else {
        if (type == T_Q3_K) eight_q3_k_scales_512(e, u->scale);
        else pairs_512(e, 192, u->scale);
        UNROLL for (int i = 0; i < 4; i++) {
            const uint64_t at = 0x0380028001800080u + (uint64_t)(i % 2) * 0x0400040004000400u; /* to the upper bytes */
            u->min[i] = _mm512_srai_epi16(pick_512(u->scale[i / 2], at), type == T_Q3_K ? 6 : 3);
        }
    }
}

/* What runs r to r + 3 need (r is 0 or 4). */
INLINE_512 void eight_load_512(uint32_t type, const eight512 *e, int r, parts512 *u) {
    const int at = type == T_IQ2_XXS                  ? 2
                   : type == T_Q2_K || type == T_Q4_K ? 16
                   : type == T_Q3_K                   ? 32
                   : type == T_Q5_K                   ? 48
                                                      : 0;
    const bool wide = type == T_Q4_K || type == T_Q5_K || type == T_Q6_K; /* 64 bytes of low bits for four runs, others 32 */
    if (r == 0 || wide) {
        words_512(e, at + 16 * r, u->w);
        words_512(e, at + 16 * r + 32, u->w + 4);
    }
    if (type == T_Q6_K) words_512(e, 128 + 8 * r, u->high);
    if (r > 0) return;
    if (type == T_Q3_K || type == T_Q5_K) words_512(e, type == T_Q5_K ? 16 : 0, u->high);
    eight_scales_512(type, e, u);
}

/* Part c of run r; not of IQ2_XXS. */
INLINE_512 __m512i eight_part_512(uint32_t type, const parts512 *u, int r, int c) {
    const int k = r % 4;
    const bool two = type == T_Q2_K || type == T_Q3_K;
    const int word = two ? r / 4 * 4 : type == T_Q6_K ? k % 2 * 4 : k / 2 * 4;
    const int by = two ? 2 * k : type == T_Q6_K ? k / 2 * 4 : k % 2 * 4;
    __m512i v = u->w[word + c];
    if (by) v = _mm512_srli_epi16(v, (uint8_t)by);
    v = _mm512_and_si512(v, _mm512_set1_epi8(two ? 3 : 15));
    if (type == T_Q2_K || type == T_Q4_K) return v;
    /* one more bit of each value, or two, from bit `from` to bit `to` */
    const int to = type == T_Q3_K ? 2 : 4, from = type == T_Q6_K ? 2 * k : r;
    __m512i h = u->high[c];
    if (from > to) h = _mm512_srli_epi16(h, (uint8_t)(from - to));
    if (from < to) h = _mm512_slli_epi16(h, (uint8_t)(to - from));
    return _mm512_ternarylogic_epi64(v, h, _mm512_set1_epi8(type == T_Q3_K ? 4 : type == T_Q5_K ? 16 : 48), 0xf8);
}

/* The scale of run r or of one of its halves. */
INLINE_512 __m512i eight_scale_512(uint32_t type, const parts512 *u, int r, int half) {
    if (type == T_IQ2_XXS)
        return r % 2 ? _mm512_shuffle_epi32(u->scale[r / 2], 0xf5) : _mm512_shuffle_epi32(u->scale[r / 2], 0xa0);
    const int i = type_has_halves(type) ? 2 * r + half : r, to = type == T_Q3_K ? 1 : type == T_Q6_K ? 3 : 0;
    const uint64_t at = 0x8080808080808080u ^ ((uint64_t)(0x80 ^ (i % 8)) * 0x100000001u << 8 * to);
    const __m512i s = pick_512(u->scale[i / 8], at);
    return type == T_Q3_K ? _mm512_srai_epi16(s, 8) : type == T_Q6_K ? _mm512_srai_epi32(s, 24) : s;
}

/* The eight bytes at p in every word. */
INLINE_512 __m512i same_512(const void *p) { return _mm512_set1_epi64((long long)load_u64(p)); }

/* A sum of products that fits in 16 bits is scaled as one of a pair: 16 * 15 * 127 for Q4_K, 8 * 7 * 127 for Q3_K. */
INLINE_512 __m512i run_dot_512(uint32_t type, const run512 *u, const int8_t *q) {
    __m512i d[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    UNROLL for (int c = 0; c < 4; c++) {
        __m512i *to = &d[type_has_halves(type) ? c / 2 : 0];
        *to = _mm512_dpbusd_epi32(*to, u->w[c], same_512(q + 64 * c));
    }
    if (type == T_Q6_K) return _mm512_add_epi32(_mm512_mullo_epi32(d[0], u->scale[0]), _mm512_mullo_epi32(d[1], u->scale[1]));
    if (type_has_halves(type)) return _mm512_dpwssd_epi32(_mm512_madd_epi16(d[0], u->scale[0]), d[1], u->scale[1]);
    if (type == T_Q4_K) return _mm512_madd_epi16(d[0], u->scale[0]);
    return _mm512_mullo_epi32(d[0], u->scale[0]);
}

enum { FEW_512 = 3 }; /* of activations that share what is unpacked; their sums stay in registers */

/* Block b of rows of activations from j0 on, and the products with eight rows of weights before words are summed. */
typedef struct {
    const int8_t *q[FEW_512];
    const int16_t *sum[FEW_512];
    __m512i dot[2][FEW_512], min[2][FEW_512];
} dots512;

/* The sums of 16 activations. */
INLINE_512 void eight_sums_512(uint32_t type, const int J, const parts512 *u, dots512 *r, int h) {
    UNROLL for (int j = 0; j < J; j++) {
        const int16_t *sum = r->sum[j];
        READ_AGAIN(sum);
        __m512i s = _mm512_setzero_si512();
        UNROLL for (int i = 0; i < 4; i++) s = _mm512_dpwssd_epi32(s, u->min[i], same_512(sum + 4 * i));
        if (type_has_min(type)) r->min[h][j] = s;
        r->dot[h][j] = type_has_min(type) ? _mm512_setzero_si512() : _mm512_sub_epi32(_mm512_setzero_si512(), s);
    }
}

/* Fetches blocks i and i + 1 of eight: a few at a time, as a core can wait for no more than two dozen lines or so. */
INLINE_512 void eight_fetch_512(uint32_t type, const eight512 *e, int i) {
    const int size = type_find(type)->bytes;
    UNROLL for (int k = 0; k < 8; k++) if (64 * (k / 2) < size) fetch(eight_at(e, i + k % 2, size - 1 - 64 * (k / 2)), 0, 1);
}

/* A block of the h-th eight rows of weights against J rows of activations, while another is fetched. */
INLINE_512 void eight_dots_512(uint32_t type, const int J, const eight512 *e, const eight512 *next, dots512 *r, int h) {
    parts512 u;
    const int8_t *q[FEW_512];
    UNROLL for (int j = 0; j < J; j++) {
        q[j] = r->q[j];
        READ_AGAIN(q[j]);
    }
    UNROLL for (int i = 0; i < 8; i += 2) {
        run512 run[2];
        if (i % 4 == 0) eight_load_512(type, e, i, &u);
        if (i == 0) eight_sums_512(type, J, &u, r, h);
        eight_fetch_512(type, next, i);
        if (type == T_IQ2_XXS) unpack_iq2_xxs_512(u.w + i, run);
        UNROLL for (int k = 0; k < 2; k++) {
            UNROLL for (int c = 0; c < 4 && type != T_IQ2_XXS; c++) run[k].w[c] = eight_part_512(type, &u, i + k, c);
            UNROLL for (int half = 0; half < 2; half++) run[k].scale[half] = eight_scale_512(type, &u, i + k, half);
            UNROLL for (int j = 0; j < J; j++) r->dot[h][j] =
                _mm512_add_epi32(r->dot[h][j], run_dot_512(type, &run[k], q[j] + 8 * (i + k)));
        }
    }
}

/* The sums of both halves of words, as floats: of two words of a, of two of b and so on. */
INLINE_512 __m512 pair_sums_512(__m512i a, __m512i b) {
    const __m512 p = _mm512_castsi512_ps(a), q = _mm512_castsi512_ps(b);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(p, q, 0x88)),
                                               _mm512_castps_si512(_mm512_shuffle_ps(p, q, 0xdd))));
}

/* The four bytes at `at` of twice eight blocks, in the order of pair_sums_512. */
INLINE_512 __m512i pair_words_512(const eight512 *a, const eight512 *b, int at) {
    __m128i v[4];
    UNROLL for (int i = 0; i < 4; i++) v[i] =
        _mm_setr_epi32((int)load_u32(eight_at(a, 2 * i, at)), (int)load_u32(eight_at(a, 2 * i + 1, at)),
                       (int)load_u32(eight_at(b, 2 * i, at)), (int)load_u32(eight_at(b, 2 * i + 1, at)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(v[1], v[0])), _mm256_set_m128i(v[3], v[2]), 1);
}

/* Twice eight rows of weights, as far from one another as `step`, and where their products go. For less than 16 outputs both may be
 * the same; for less than eight all rows are the same one, and `mask` leaves one output. */
typedef struct {
    const uint8_t *row[2], *next[2]; /* those to fetch meanwhile */
    float *out[2];
    size_t step, ldo;
    __mmask8 mask;
} outputs512;

/* How many blocks of twice eight rows are to be on their way from memory: about 12 KiB. */
INLINE_512 int64_t eight_ahead_512(uint32_t type, int64_t n) {
    const int64_t blocks = 12288 / (16 * type_find(type)->bytes) + 1;
    return blocks < n / 256 ? blocks : n / 256;
}

/* Against J rows of activations from j0 on. */
INLINE_512 void outputs_512(uint32_t type, const int J, int64_t n, const outputs512 *o, const tile_acts *x, int j0) {
    const int size = type_find(type)->bytes, at = scale_at(type), halves = o->row[0] == o->row[1] ? 1 : 2;
    const bool low = type_has_min(type) || at == 0; /* the scale is the lower half of four bytes, all of them the block's */
    const int64_t blocks = n / 256, ahead = eight_ahead_512(type, n);
    __m512 acc[LANES][FEW_512];
    dots512 r;
    UNROLL for (int j = 0; j < J; j++) {
        r.q[j] = x->q[j0 + j];
        r.sum[j] = x->sum[j0 + j];
        for (int l = 0; l < LANES; l++) acc[l][j] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < blocks; b++) {
        for (int h = 0; h < halves; h++) {
            const uint8_t *from =
                b + ahead < blocks ? o->row[h] + (b + ahead) * size : o->next[h] + (b + ahead - blocks) * size;
            const eight512 e = eight_from(o->row[h] + b * size, o->step), next = eight_from(from, o->step);
            eight_dots_512(type, J, &e, &next, &r, h);
        }
        const eight512 a = eight_from(o->row[0] + b * size, o->step), c = eight_from(o->row[1] + b * size, o->step);
        const __m512i d = pair_words_512(&a, &c, low ? at : at - 2), upper = _mm512_srli_epi32(d, 16);
        __m512 scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low ? d : upper));
        const __m512 min_scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(upper));
        if (type == T_IQ2_XXS) scale = _mm512_mul_ps(scale, _mm512_set1_ps(0.125f));
        UNROLL for (int j = 0; j < J; j++) {
            const __m512 y = _mm512_set1_ps(x->d[j0 + j][b]);
            __m512 *lane = &acc[b % LANES][j];
            *lane = _mm512_fmadd_ps(pair_sums_512(r.dot[0][j], r.dot[halves - 1][j]), _mm512_mul_ps(scale, y), *lane);
            if (type_has_min(type))
                *lane = _mm512_fnmadd_ps(pair_sums_512(r.min[0][j], r.min[halves - 1][j]), _mm512_mul_ps(min_scale, y), *lane);
            r.q[j] += 256;
            r.sum[j] += 16;
        }
    }
    UNROLL for (int j = 0; j < J; j++) {
        __m512 t[8];
        UNROLL for (int l = 0; l < 8; l++) t[l] = _mm512_add_ps(acc[l][j], acc[l + 8][j]);
        UNROLL for (int l = 0; l < 4; l++) t[l] = _mm512_add_ps(t[l], t[l + 4]);
        t[0] = _mm512_add_ps(_mm512_add_ps(t[0], t[2]), _mm512_add_ps(t[1], t[3]));
        t[0] = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15), t[0]);
        _mm256_mask_storeu_ps(o->out[0] + (size_t)(j0 + j) * o->ldo, o->mask, _mm512_castps512_ps256(t[0]));
        _mm256_mask_storeu_ps(o->out[1] + (size_t)(j0 + j) * o->ldo, o->mask, _mm512_extractf32x8_ps(t[0], 1));
    }
}

/* Each number of rows has a function of its own: compilers do better with fewer variables. */
typedef void outputs_fn(int64_t n, const outputs512 *o, const tile_acts *x, int j0);
#define OUTPUTS_FN(name, type, J)                                                                      \
    TARGET_AVX512 static void name##_##J(int64_t n, const outputs512 *o, const tile_acts *x, int j0) { \
        outputs_512(type, J, n, o, x, j0);                                                             \
    }
#define OUTPUTS_SET(name, type) \
    OUTPUTS_FN(name, type, 1)   \
    OUTPUTS_FN(name, type, 2)   \
    OUTPUTS_FN(name, type, 3)   \
    static outputs_fn *const name[FEW_512] = {name##_1, name##_2, name##_3};
OUTPUTS_SET(outputs_q2_k, T_Q2_K)
OUTPUTS_SET(outputs_q3_k, T_Q3_K)
OUTPUTS_SET(outputs_q4_k, T_Q4_K)
OUTPUTS_SET(outputs_q5_k, T_Q5_K)
OUTPUTS_SET(outputs_q6_k, T_Q6_K)
OUTPUTS_SET(outputs_iq2_xxs, T_IQ2_XXS)

INLINE_512 outputs_fn *outputs_for(uint32_t type, int rows) {
    switch (type) {
    case T_Q2_K: return outputs_q2_k[rows - 1];
    case T_Q3_K: return outputs_q3_k[rows - 1];
    case T_Q4_K: return outputs_q4_k[rows - 1];
    case T_Q5_K: return outputs_q5_k[rows - 1];
    case T_Q6_K: return outputs_q6_k[rows - 1];
    default: return outputs_iq2_xxs[rows - 1];
    }
}

INLINE_512 void q256_few_512(uint32_t type, TILE_ARGS) {
    const bool single = n_out < 8;
    const int count = single ? 1 : 16, last = single ? n_out - 1 : n_out - 8;
    const size_t step = single ? 0 : w_stride;
    for (int64_t b = 0; b < eight_ahead_512(type, n); b++)
        for (int i = 0; i < n_out && i < count; i += 8) {
            const eight512 e = eight_from(w + (size_t)(i < last ? i : last) * w_stride + b * type_find(type)->bytes, step);
            for (int k = 0; k < 8; k += 2) eight_fetch_512(type, &e, k);
        }
    for (int i = 0; i < n_out; i += count) {
        outputs512 o = {.step = step, .ldo = ldo, .mask = single ? 1 : 0xff};
        for (int h = 0; h < 2; h++) {
            const int want = single ? i : i + 8 * h, at = want < last ? want : last;
            const int after = at + count < last ? at + count : last;
            o.row[h] = w + (size_t)at * w_stride;
            o.out[h] = out + at;
            o.next[h] = w + (size_t)after * w_stride;
        }
        for (int j = 0, groups = (m + FEW_512 - 1) / FEW_512; groups > 0; groups--) { /* of about as many rows */
            const int rows = (m - j + groups - 1) / groups;
            outputs_for(type, rows)(n, &o, x, j);
            j += rows;
        }
    }
}

/* Many rows of activations: 16 rows of weights are put side by side, so that lane o of a vector is of row o and no sum crosses
 * lanes; what is unpacked serves all rows of activations, of whose words of 4 values one is set against all lanes. Storing a vector
 * takes as long as two products of vectors here, so sums stay in registers as long as they can. */
enum { GROUPS_512 = 4, SIDE_512 = 2 * LANES };

/* A block of 256 of 16 rows: w[r][k] holds values 4k .. 4k+3 of run r, of 32 values, as unsigned bytes (Q6_K: 32 too large,
 * IQ2_XXS: 43). Those of Q2_K and Q3_K are multiplied by their scales, Q3_K's 124 too large. */
typedef struct {
    __m512i w[8][8];
    __m512i scale[16]; /* for each run, Q6_K: for each half of it; int32 */
    __m512i min[8]; /* the pairs of minimums of the halves */
    __m512 d, dmin;
} columns512;

ALWAYS_INLINE bool type_is_scaled(uint32_t type) { return type == T_Q2_K || type == T_Q3_K; }

/* 32 rows of weights, as far as they are unpacked, against a tile of activations. */
typedef struct {
    union {
        group512 group[LANES][GROUPS_512][2];
        columns512 block[2];
    };
    __m512 acc[TILE][LANES][2]; /* of a row of activations, the lane of the sum; lanes are outputs */
    const uint8_t *next; /* the weights after these, to be fetched meanwhile; how many at a time */
    int64_t share;
} side512;

/* Of each word of v the bytes whose numbers the bytes of `at` are, 0 where it is 0x80. */
INLINE_512 __m512i pick_bytes_512(__m512i v, uint32_t at) {
    const __m512i word = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    return _mm512_shuffle_epi8(v, _mm512_or_si512(word, _mm512_set1_epi32((int)at)));
}

/* The scales of Q4_K and Q5_K (unpack_k_scales), of Q3_K (unpack_q3_k), and Q2_K's and Q6_K's, to bytes: in words, four a row. */
INLINE_512 void column_scales_512(uint32_t type, const __m512i s[4], __m512i scale[4], __m512i min[4]) {
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(0x30), six = _mm512_set1_epi8(63);
    if (type == T_Q4_K || type == T_Q5_K) {
        scale[0] = _mm512_and_si512(s[1], six);
        min[0] = _mm512_and_si512(s[2], six);
        scale[1] = _mm512_or_si512(_mm512_and_si512(s[3], low), _mm512_and_si512(_mm512_srli_epi32(s[1], 2), high));
        min[1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(s[3], 4), low),
                                 _mm512_and_si512(_mm512_srli_epi32(s[2], 2), high));
    } else {
        UNROLL for (int i = 0; i < 4; i++) {
            scale[i] = type == T_Q2_K ? _mm512_and_si512(s[i], low) : s[i];
            min[i] = _mm512_and_si512(_mm512_srli_epi16(s[i], 4), low);
            if (type != T_Q3_K) continue;
            const __m512i lo = _mm512_and_si512(_mm512_srlv_epi32(s[1 + i % 2], _mm512_set1_epi32(i / 2 * 4)), low);
            const __m512i hi = _mm512_and_si512(_mm512_rorv_epi32(s[3], _mm512_set1_epi32(2 * i - 4)), high);
            scale[i] = _mm512_sub_epi8(_mm512_or_si512(lo, hi), _mm512_set1_epi8(32));
        }
    }
}

/* Four vectors of bytes times the scale that all bytes of a lane of `scale` hold; Q3_K's values, 4 too large, become 124 too large. */
INLINE_512 void scale_bytes_512(uint32_t type, __m512i scale, __m512i *w) {
    const __m512i less = _mm512_slli_epi16(_mm512_and_si512(scale, _mm512_set1_epi8(63)), 2);
    const __m512i add = _mm512_sub_epi8(_mm512_set1_epi8(124), less), even = _mm512_set1_epi16(255);
    UNROLL for (int k = 0; k < 4; k++) {
        if (type == T_Q2_K) { /* 3 * 15 at most */
            w[k] = _mm512_mullo_epi16(w[k], _mm512_and_si512(scale, even));
            continue;
        }
        const __m512i odd = _mm512_mullo_epi16(_mm512_andnot_si512(even, w[k]), scale);
        const __m512i both = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaau, _mm512_mullo_epi16(w[k], scale), odd);
        w[k] = _mm512_add_epi8(both, add);
    }
}

/* Values of Q2_K to Q6_K: of each byte of 32 a field of 2 or 4 bits, and of Q3_K, Q5_K and Q6_K one of 1 or 2 bits above that. */
INLINE_512 void column_values_512(uint32_t type, blocks512 b, const __m512i scale[4], columns512 *u) {
    const bool above = type == T_Q5_K || type_has_offset(type);
    const int bits = type_is_scaled(type) ? 2 : 4, more = type == T_Q6_K ? 2 : 1, fields = 8 / bits;
    const int low = type == T_Q5_K ? 48 : type == T_Q3_K ? 32 : type == T_Q6_K ? 0 : 16;
    const int high = type == T_Q5_K ? 16 : type == T_Q6_K ? 128 : 0;
    const __m512i mask = _mm512_set1_epi8((char)((1 << bits) - 1)), top = _mm512_set1_epi8((char)(((1 << more) - 1) << bits));
    __m512i v[8], h[8];
    UNROLL for (int g = 0; g < 8 / fields; g++) {
        gather_words_512(b, low + 32 * g, v);
        if (above && (type == T_Q6_K ? g % 2 == 0 : g == 0)) gather_words_512(b, high + 16 * g, h);
        UNROLL for (int f = 0; f < fields; f++) {
            const int r = type == T_Q6_K ? g / 2 * 4 + g % 2 + 2 * f : g * fields + f;
            const __m512i shift = _mm512_set1_epi32(bits * f), turn = _mm512_set1_epi32(more * r % 8 - bits);
            __m512i w[8];
            UNROLL for (int k = 0; k < 8; k++) {
                w[k] = _mm512_and_si512(_mm512_srlv_epi32(v[k], shift), mask);
                if (above) w[k] = _mm512_ternarylogic_epi64(w[k], _mm512_rorv_epi32(h[k], turn), top, 0xf8); /* w | (h & top) */
            }
            if (type_is_scaled(type))
                UNROLL for (int i = 2 * r; i < 2 * r + 2; i++)
                    scale_bytes_512(type, pick_bytes_512(scale[i / 4], (uint32_t)i % 4 * 0x01010101), w + i % 2 * 4);
            UNROLL for (int k = 0; k < 8; k++) u->w[r][k] = w[k];
        }
    }
}

/* IQ2_XXS: run by run, the eight rows of two quarters beside those of the two others. */
INLINE_512 void columns_iq2_xxs_512(blocks512 b, columns512 *u) {
    for (int g = 0; g < 8; g += 2) {
        __m512i r[4];
        load_quarters_512(b, 2 + 8 * g, r);
        UNROLL for (int i = 0; i < 2; i++) {
            const __m512i raw[2] = {i ? _mm512_unpackhi_epi64(r[0], r[1]) : _mm512_unpacklo_epi64(r[0], r[1]),
                                    i ? _mm512_unpackhi_epi64(r[2], r[3]) : _mm512_unpacklo_epi64(r[2], r[3])};
            run512 part[2];
            unpack_iq2_xxs_512(raw, part);
            UNROLL for (int k = 0; k < 8; k++) {
                const __m512 x = _mm512_castsi512_ps(part[0].w[k / 2]), y = _mm512_castsi512_ps(part[1].w[k / 2]);
                u->w[g + i][k] = _mm512_castps_si512(k % 2 ? _mm512_shuffle_ps(x, y, 0xdd) : _mm512_shuffle_ps(x, y, 0x88));
            }
            const __m512 top = _mm512_shuffle_ps(_mm512_castsi512_ps(raw[0]), _mm512_castsi512_ps(raw[1]), 0xdd);
            u->scale[g + i] = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(top), 27), _mm512_set1_epi32(1));
        }
    }
}

INLINE_512 void unpack_columns_512(uint32_t type, blocks512 b, columns512 *u) {
    const int size = type_find(type)->bytes, scales = type == T_Q3_K ? 92 : type == T_Q6_K ? 192 : 0;
    const bool first = scale_at(type) == 0; /* d and dmin are the first bytes, or the last ones */
    __m512i r[4], s[4], scale[4], min[4];
    load_quarters_512(b, first ? 0 : size - 16, r);
    interleave_512(r, s);
    const __m512i halves = first ? s[0] : s[3];
    const __m512 lo = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves));
    const __m512 hi = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(halves, 16)));
    u->d = type_has_offset(type) ? hi : type == T_IQ2_XXS ? _mm512_mul_ps(lo, _mm512_set1_ps(0.125f)) : lo;
    u->dmin = hi;
    if (type == T_IQ2_XXS) {
        columns_iq2_xxs_512(b, u);
        return;
    }
    load_quarters_512(b, scales, r);
    interleave_512(r, s);
    column_scales_512(type, s, scale, min);
    column_values_512(type, b, scale, u);
    UNROLL for (uint32_t i = 0; i < 16; i++) {
        const uint32_t at = i % 4 * 0x01010101;
        if (type == T_Q6_K) u->scale[i] = _mm512_srai_epi32(pick_bytes_512(scale[i / 4], at | 0x808080), 24);
        else if (i < 8 && !type_is_scaled(type)) u->scale[i] = pick_bytes_512(scale[i / 4], at | 0x80808000);
    }
    UNROLL for (uint32_t i = 0; i < 8; i++) {
        if (type == T_Q2_K) u->min[i] = pick_bytes_512(min[i / 2], 0x80018000 + i % 2 * 0x20002);
        else if (type_has_min(type)) u->min[i] = pick_bytes_512(min[i / 4], 0x80008000 + i % 4 * 0x10001);
    }
}

INLINE_512 __m512i each_512(const void *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

/* What the weights' excess adds to a block of Q3_K; `sum` are the sums of activations. */
INLINE_512 __m512i q3_k_excess_512(const int16_t *sum) {
    const __m256i v = _mm256_madd_epi16(_mm256_loadu_si256((const void *)sum), _mm256_set1_epi16(124));
    return _mm512_set1_epi32(_mm512_reduce_add_epi32(_mm512_zextsi256_si512(v)));
}

/* Words first .. first+count-1 of 32 values of two times 16 rows, `other` vectors apart, against J rows of activations, whose words
 * lie as act_offset says: `step` bytes apart with one scale for 32, where it is not 0. */
INLINE_512 void word_dots_512(const int J, const int first, const int count, const __m512i *w, const int64_t other,
                              const int8_t *const *q, int64_t at, const int64_t step, __m512i (*dot)[2]) {
    UNROLL for (int k = first; k < first + count; k++) UNROLL for (int j = 0; j < J; j++) {
        const __m512i v = each_512(q[j] + at + (step ? k * step : k / 2 * 64 + k % 2 * 4));
        dot[j][0] = _mm512_dpbusd_epi32(dot[j][0], w[k], v);
        dot[j][1] = _mm512_dpbusd_epi32(dot[j][1], w[other + k], v);
    }
}

/* `count` blocks from b of a 32-value type, lane by lane, against J rows of activations from j0; one that is not there is the last
 * one again. */
INLINE_512 void side_groups_512(uint32_t type, const int J, const int64_t step, int64_t b, int64_t count, const tile_acts *x,
                                int m, int j0, side512 *s) {
    const __m512i minus_offset = _mm512_set1_epi16((int16_t)-q32_offset(type));
    _Alignas(64) int32_t start[6][GROUPS_512 * LANES];
    const int8_t *q[6];
    const float *d[6];
    UNROLL for (int j = 0; j < J; j++) {
        const int row = j0 + j < m ? j0 + j : m - 1;
        q[j] = x->q[row] + b * 32;
        d[j] = x->d[row] + b;
        for (int64_t g = 0; g < count; g += LANES)
            _mm512_store_si512(start[j] + g,
                               _mm512_madd_epi16(load_lanes_512(step / 4, x->sum[row] + 2 * (b + g)), minus_offset));
    }
    for (int l = 0; l < LANES && l < count; l++) {
        __m512 acc[6][2];
        fetch(s->next, 0, s->share);
        s->next += s->share;
        UNROLL for (int j = 0; j < J; j++) UNROLL for (int h = 0; h < 2; h++) acc[j][h] =
            b < LANES ? _mm512_setzero_ps() : s->acc[j0 + j][l][h];
        for (int64_t i = l; i < count; i += LANES) {
            const group512 *u = s->group[l][i / LANES];
            __m512i dot[6][2];
            UNROLL for (int j = 0; j < J; j++) dot[j][0] = dot[j][1] = each_512(&start[j][i]);
            word_dots_512(J, 0, 8, u[0].w, u[1].w - u[0].w, q, (i - l) * 32 + 4 * l, step, dot);
            UNROLL for (int j = 0; j < J; j++) UNROLL for (int h = 0; h < 2; h++) {
                const __m512 scale = _mm512_mul_ps(u[h].scale, _mm512_set1_ps(d[j][i]));
                acc[j][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[j][h]), scale, acc[j][h]);
            }
        }
        UNROLL for (int j = 0; j < J; j++) UNROLL for (int h = 0; h < 2; h++) s->acc[j0 + j][l][h] = acc[j][h];
    }
}

/* Block b of a 256-value type against J rows of activations, likewise. */
INLINE_512 void side_block_512(uint32_t type, const int J, int64_t b, const tile_acts *x, int m, int j0, side512 *s) {
    const columns512 *u = s->block;
    const int64_t other = sizeof *u / sizeof *u->min;
    const int parts = type == T_Q6_K ? 2 : 1; /* of a run, each with its scale */
    const __m512i zero = _mm512_setzero_si512();
    _Alignas(64) int32_t start[6][16]; /* what each part's sum begins with, for weights too large */
    const int8_t *q[6];
    const int16_t *sum[6];
    const float *d[6];
    __m512i dot[6][2], min[6][2];
    __asm__ volatile("" : : : "memory"); /* or compilers keep minimums in registers from rows to rows */
    UNROLL for (int j = 0; j < J; j++) {
        const int row = j0 + j < m ? j0 + j : m - 1;
        q[j] = x->q[row] + b * 256;
        d[j] = x->d[row] + b;
        sum[j] = x->sum[row] + b * 16;
        const __m256i sums = _mm256_loadu_si256((const void *)sum[j]);
        if (type == T_IQ2_XXS) _mm256_store_si256((void *)start[j], _mm256_madd_epi16(sums, _mm256_set1_epi16(-IQ2_OFFSET)));
        if (type == T_Q6_K)
            _mm512_store_si512(start[j], _mm512_mullo_epi32(_mm512_cvtepi16_epi32(sums), _mm512_set1_epi32(-32)));
        dot[j][0] = dot[j][1] = type == T_Q3_K ? _mm512_sub_epi32(zero, q3_k_excess_512(sum[j])) : zero;
    }
    for (int r = 0; r < 8; r++) {
        fetch(s->next, 0, s->share);
        s->next += s->share;
        UNROLL for (int p = 0; p < parts; p++) {
            __m512i part[6][2];
            if (type_is_scaled(type)) {
                word_dots_512(J, 0, 8, u->w[r], other, q, 8 * r, 0, dot);
                continue;
            }
            UNROLL for (int j = 0; j < J; j++) part[j][0] = part[j][1] =
                type_has_min(type) ? zero : each_512(&start[j][parts * r + p]);
            word_dots_512(J, 8 / parts * p, 8 / parts, u->w[r], other, q, 8 * r, 0, part);
            UNROLL for (int j = 0; j < J; j++) UNROLL for (int h = 0; h < 2; h++) dot[j][h] =
                _mm512_add_epi32(dot[j][h], _mm512_mullo_epi32(part[j][h], u[h].scale[parts * r + p]));
        }
    }
    UNROLL for (int j = 0; j < J; j++) min[j][0] = min[j][1] = zero;
    for (int r = 0; r < 8 && type_has_min(type); r++)
        UNROLL for (int j = 0; j < J; j++) UNROLL for (int h = 0; h < 2; h++) min[j][h] =
            _mm512_dpwssd_epi32(min[j][h], u[h].min[r], each_512(sum[j] + 2 * r));
    UNROLL for (int j = 0; j < J; j++) UNROLL for (int h = 0; h < 2; h++) {
        __m512 *to = &s->acc[j0 + j][b % LANES][h], a = _mm512_set1_ps(*d[j]), v = b < LANES ? _mm512_setzero_ps() : *to;
        v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[j][h]), _mm512_mul_ps(u[h].d, a), v);
        if (type_has_min(type)) v = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(min[j][h]), _mm512_mul_ps(u[h].dmin, a), v);
        *to = v;
    }
}

/* The tree of join_lanes for 16 outputs side by side; lanes are `step` vectors apart. */
INLINE_512 __m512 join_columns_512(const __m512 *acc, int step) {
    __m512 t[8];
    UNROLL for (int l = 0; l < 8; l++) t[l] = _mm512_add_ps(acc[l * step], acc[(l + 8) * step]);
    UNROLL for (int l = 0; l < 4; l++) t[l] = _mm512_add_ps(t[l], t[l + 4]);
    return _mm512_add_ps(_mm512_add_ps(t[0], t[2]), _mm512_add_ps(t[1], t[3]));
}

/* `count` blocks from b, which are unpacked, against J rows of activations from j; after the last blocks, their outputs. */
INLINE_512 void side_rows_512(uint32_t type, const int J, int64_t n, int64_t b, int64_t count, const tile_acts *x, int m, int j,
                              side512 *s, float *out, size_t ldo) {
    const int block = type_find(type)->block;
    if (block == 256) side_block_512(type, J, b, x, m, j, s);
    else if (count % LANES) side_groups_512(type, J, 4 * count, b, count, x, m, j, s);
    else side_groups_512(type, J, 4 * LANES, b, count, x, m, j, s);
    for (int i = j; i < j + J && i < m && b + count == n / block; i++)
        for (int h = 0; h < 2; h++) _mm512_storeu_ps(out + (size_t)i * ldo + LANES * h, join_columns_512(&s->acc[i][0][h], 2));
}

/* 32 outputs. */
INLINE_512 void side_512(uint32_t type, int64_t n, const uint8_t *w, size_t w_stride, const tile_acts *x, int m, float *out,
                         size_t ldo) {
    const type_info *t = type_find(type);
    const int64_t blocks = n / t->block, most = t->block == 256 ? 1 : LANES * GROUPS_512, stride = (int64_t)w_stride;
    side512 s;
    s.next = w + SIDE_512 * stride;
    for (int j = 0; j < m && blocks < LANES; j++) memset(s.acc[j][blocks], 0, (size_t)(LANES - blocks) * sizeof *s.acc[j]);
    for (int64_t b = 0, count; b < blocks; b += count) {
        count = blocks - b < most ? blocks - b : most;
        if (count > LANES) count -= count % LANES; /* the last group, if it has fewer blocks, by itself */
        for (int64_t i = 0; i < count; i++)
            for (int h = 0; h < 2; h++) {
                const blocks512 from = column_blocks(w + LANES * h * stride + (b + i) * t->bytes, stride);
                if (t->block == 256) unpack_columns_512(type, from, &s.block[h]);
                else {
                    group512 u; /* each vector is stored once */
                    unpack_group_512(type, from, &u);
                    s.group[i % LANES][i / LANES][h] = u;
                }
            }
        s.share = SIDE_512 * count * t->bytes / ((m + 5) / 6 * (t->block == 256 ? 8 : LANES));
        for (int j = 0; j < m;) { /* 6 rows at a time, or 4, so that there is at most one too many */
            const int left = m - j, J = left < 5 || left == 7 || left == 8 ? 4 : 6;
            if (J == 6) side_rows_512(type, 6, n, b, count, x, m, j, &s, out, ldo);
            else side_rows_512(type, 4, n, b, count, x, m, j, &s, out, ldo);
            j += J;
        }
    }
}

/* Few rows of activations are faster row by row of weights, as are outputs that fill no side. */
INLINE_512 void quantised_tile_512(uint32_t type, TILE_ARGS) {
    const int many = type_find(type)->block == 32 ? 10 : 4, sides = m < many ? 0 : n_out - n_out % SIDE_512;
    for (int o = 0; o < sides; o += SIDE_512) side_512(type, n, w + (size_t)o * w_stride, w_stride, x, m, out + o, ldo);
    w += (size_t)sides * w_stride;
    if (sides == n_out) return;
    if (type_find(type)->block == 32) q32_few_512(type, n, w, w_stride, n_out - sides, x, m, out + sides, ldo);
    else q256_few_512(type, n, w, w_stride, n_out - sides, x, m, out + sides, ldo);
}

/* Part of mix_body with the sums in registers: H heads, 16 * C channels, of the last 16 those in `mask`. */
INLINE_512 void mix_part_512(const int H, const int C, __mmask16 mask, int64_t n, const float *a, int64_t lda, const float *x,
                             int64_t ldx, int m, float *y) {
    __m512 sum[4][4];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int c = 0; c < C; c++) sum[h][c] =
        _mm512_maskz_loadu_ps(c + 1 < C ? 0xffff : mask, y + h * n + 16 * c);
    for (int i = 0; i < m; i++) {
        __m512 v[4];
        UNROLL for (int c = 0; c < C; c++) v[c] = _mm512_maskz_loadu_ps(c + 1 < C ? 0xffff : mask, x + i * ldx + 16 * c);
        UNROLL for (int h = 0; h < H; h++) {
            const __m512 w = _mm512_set1_ps(a[h * lda + i]);
            UNROLL for (int c = 0; c < C; c++) sum[h][c] = _mm512_fmadd_ps(w, v[c], sum[h][c]);
        }
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int c = 0; c < C; c++)
        _mm512_mask_storeu_ps(y + h * n + 16 * c, c + 1 < C ? 0xffff : mask, sum[h][c]);
}

INLINE_512 void mix_512(int64_t n, const float *a, int64_t lda, int heads, const float *x, int64_t ldx, int m, float *y) {
    for (int64_t c = 0; c < n; c += 64)
        for (int h = 0; h < heads;) {
            const float *p = a + h * lda, *v = x + c;
            float *to = y + h * n + c;
            const int H = heads - h >= 4 ? 4 : 1;
            if (n - c >= 64 && H == 4) mix_part_512(4, 4, 0xffff, n, p, lda, v, ldx, m, to);
            else if (n - c >= 64) mix_part_512(1, 4, 0xffff, n, p, lda, v, ldx, m, to);
            else
                for (int64_t k = 0; k < n - c; k += 16) {
                    const __mmask16 mask = first_lanes(n - c - k);
                    if (H == 4) mix_part_512(4, 1, mask, n, p, lda, v + k, ldx, m, to + k);
                    else mix_part_512(1, 1, mask, n, p, lda, v + k, ldx, m, to + k);
                }
            h += H;
        }
}

TILE_SET(avx512, TARGET_AVX512, float_tile_512, quantised_tile_512, quantised_tile_512)
#endif

/* ---- 4.9 Matrix products with AMX --------------------------------------------------------------------------------- */

/* A tile register holds 16 rows of 64 bytes, and one instruction adds to 16 x 16 integers C the products of A, 16 rows of up to
 * 64 values, and B, as many values of 16 columns, four values of each column beside one another. Here rows are those of the
 * activations and columns outputs. Integers being exact, a block's are those of the other sets; they are scaled and added up
 * outside the tiles, in the same order. Weights are unpacked and turned into columns once for all rows of activations, which costs
 * as much as the products of a few dozen rows do: with few rows the functions for AVX-512 are faster. */
#ifdef KERNELS_X86
#define TARGET_AMX \
    __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c")))
#define INLINE_AMX ALWAYS_INLINE TARGET_AMX

enum { AMX_LEAST = 8, AMX_MOST = 64 }; /* rows of activations */
enum { TILE_BYTES = 1024 };

typedef struct {
    /* Columns of weights. 32-value types: those of 16 blocks, 8 lines each. 256-value types: those of one block's four parts, 16
     * lines each; then, where products with the scales need two bytes, the high bytes. */
    _Alignas(64) int8_t b[8 * TILE_BYTES];
    _Alignas(64) int8_t a[8 * TILE_BYTES]; /* 16 rows of activations: eight times two blocks, or four parts of one */
    _Alignas(64) int32_t c[4][LANES][LANES];
    __m512 scale[LANES]; /* of blocks of 32; a lane is an output */
    columns512 block; /* of 256 */
    __m512 acc[AMX_MOST / 16][LANES][16]; /* by rows, the lane of the sum, row: lanes are outputs */
} amx_room;

/* A test may have the tiles in C (tests/tiles.h). */
#ifndef LOAD_TILE_SETTINGS
#define LOAD_TILE_SETTINGS(config) __asm__ volatile("ldtilecfg %0" : : "m"(config))
#endif

/* Tiles 0 to 3 are sums, then come two pairs of activations and weights. */
INLINE_AMX void amx_configure(int a_bytes, int b_lines) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = (uint16_t)(i == 4 || i == 6 ? a_bytes : 64);
        config.rows[i] = (uint8_t)(i == 5 || i == 7 ? b_lines : 16);
    }
    LOAD_TILE_SETTINGS(config);
}

/* What was stored before must be in memory, which compilers need to be told. */
#define LOAD_TILE(tile, from, step)              \
    do {                                         \
        __asm__ volatile("" ::: "memory");       \
        _tile_loadd(tile, from, (size_t)(step)); \
    } while (0)

/* A group of blocks of 16 rows of a 32-value type. */
INLINE_AMX void amx_weights_32(uint32_t type, int64_t blocks, const uint8_t *w, size_t w_stride, amx_room *r) {
    const int size = q32_bytes(type);
    const __m512i offset = _mm512_set1_epi8((char)q32_offset(type));
    for (int o = 0; o < LANES; o++) fetch(w + (size_t)o * w_stride, blocks * size, blocks * size); /* the next group */
    for (int64_t b = 0; b < blocks; b++) {
        group512 u;
        unpack_group_512(type, column_blocks(w + b * size, (int64_t)w_stride), &u);
        for (int k = 0; k < 8; k++) _mm512_store_si512(r->b + b * 512 + k * 64, _mm512_sub_epi8(u.w[k], offset));
        r->scale[b] = u.scale;
    }
}

/* The rows of activations from j for the same group, b its first block: back from words of blocks to blocks. */
INLINE_AMX void amx_rows_32(const tile_acts *x, int j, int rows, int64_t b, int64_t blocks, amx_room *r) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int i = 0; i < rows; i++) {
        __m512i v[8], half[2][4];
        UNROLL for (int k = 0; k < 8; k++) v[k] = load_lanes_512(blocks, x->q[j + i] + b * 32 + k * 4 * blocks);
        UNROLL for (int h = 0; h < 2; h++) interleave_512(v + 4 * h, half[h]);
        UNROLL for (int k = 0; k < 4; k++) {
            int8_t *to = r->a + 2 * k * TILE_BYTES + i * 64;
            _mm512_store_si512(to, _mm512_permutex2var_epi64(half[0][k], low, half[1][k]));
            _mm512_store_si512(to + TILE_BYTES, _mm512_permutex2var_epi64(half[0][k], high, half[1][k]));
        }
    }
}

/* Where amx_rows_32 put block b of a group. */
ALWAYS_INLINE const int8_t *amx_block(const amx_room *r, int b) {
    return r->a + (b % 4 * 2 + b / 8) * TILE_BYTES + b / 4 % 2 * 32;
}

/* Four blocks of a 32-value type, from b on, to the four sums. */
INLINE_AMX void amx_dots_32(amx_room *r, int b) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    LOAD_TILE(4, amx_block(r, b), 64);
    LOAD_TILE(5, r->b + b * 512, 64);
    _tile_dpbssd(0, 4, 5);
    LOAD_TILE(6, amx_block(r, b + 1), 64);
    LOAD_TILE(7, r->b + b * 512 + 512, 64);
    _tile_dpbssd(1, 6, 7);
    LOAD_TILE(4, amx_block(r, b + 2), 64);
    LOAD_TILE(5, r->b + b * 512 + 1024, 64);
    _tile_dpbssd(2, 4, 5);
    LOAD_TILE(6, amx_block(r, b + 3), 64);
    LOAD_TILE(7, r->b + b * 512 + 1536, 64);
    _tile_dpbssd(3, 6, 7);
    _tile_stored(0, r->c[0], 64);
    _tile_stored(1, r->c[1], 64);
    _tile_stored(2, r->c[2], 64);
    _tile_stored(3, r->c[3], 64);
}

/* The group of blocks from b of a 32-value type: rows of activations from j, whose sums are acc. */
INLINE_AMX void amx_group_32(const tile_acts *x, int j, int rows, int64_t b, int64_t blocks, amx_room *r, __m512 (*acc)[16]) {
    amx_rows_32(x, j, rows, b, blocks, r);
    for (int k = 0; k < blocks; k++) {
        if (k % 4 == 0) amx_dots_32(r, k);
        for (int i = 0; i < rows; i++) {
            const __m512 scale = _mm512_mul_ps(r->scale[k], _mm512_set1_ps(x->d[j + i][b + k]));
            acc[k][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(r->c[k % 4][i])), scale, acc[k][i]);
        }
    }
}

/* 64 values times their scales: the low bytes, unsigned, and the high ones. */
INLINE_AMX void amx_scaled(uint32_t type, __m512i w, __m512i scale, __m512i *low, __m512i *high) {
    const __m512i pair = _mm512_mask_blend_epi16(0xaaaaaaaau, scale, _mm512_slli_epi32(scale, 16));
    const int offset = type == T_Q6_K ? 32 : type == T_IQ2_XXS ? IQ2_OFFSET : 0;
    w = _mm512_sub_epi8(w, _mm512_set1_epi8((char)offset));
    const __m512i even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8), pair);
    const __m512i odd = _mm512_mullo_epi16(_mm512_srai_epi16(w, 8), pair);
    *low = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaau, even, _mm512_slli_epi16(odd, 8));
    *high = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaau, _mm512_srli_epi16(even, 8), odd);
}

/* A block of 16 rows of a 256-value type. */
INLINE_AMX void amx_weights_256(uint32_t type, const uint8_t *w, size_t w_stride, amx_room *r) {
    const columns512 *u = &r->block;
    for (int o = 0; o < LANES; o++) fetch(w + (size_t)o * w_stride, 4 * type_find(type)->bytes, type_find(type)->bytes);
    unpack_columns_512(type, column_blocks(w, (int64_t)w_stride), &r->block);
    for (int run = 0; run < 8; run++)
        for (int k = 0; k < 8; k++) { /* in the order of act_offset */
            int8_t *to = r->b + k / 2 * TILE_BYTES + (2 * run + k % 2) * 64;
            __m512i low = u->w[run][k], high;
            if (!type_is_scaled(type)) {
                amx_scaled(type, low, u->scale[type == T_Q6_K ? 2 * run + k / 4 : run], &low, &high);
                _mm512_store_si512(to + 4 * TILE_BYTES, high);
            }
            _mm512_store_si512(to, low);
        }
}

/* Part c of a block, in the pair of tiles 4 and 5 or 6 and 7. */
#define AMX_PART(c, A, B, pieces)                        \
    do {                                                 \
        LOAD_TILE(A, r->a + (c) * TILE_BYTES, 64);       \
        LOAD_TILE(B, r->b + (c) * TILE_BYTES, 64);       \
        _tile_dpbsud(0, A, B);                           \
        if (pieces == 1) break;                          \
        LOAD_TILE(B, r->b + (4 + (c)) * TILE_BYTES, 64); \
        _tile_dpbssd(1, A, B);                           \
    } while (0)

/* Block b of a 256-value type: rows of activations from j, whose sums are acc. */
INLINE_AMX void amx_block_256(uint32_t type, const tile_acts *x, int j, int rows, int64_t b, amx_room *r, __m512 *acc) {
    const int pieces = type_is_scaled(type) ? 1 : 2;
    for (int i = 0; i < rows; i++)
        UNROLL for (int c = 0; c < 4; c++)
            _mm512_store_si512(r->a + c * TILE_BYTES + i * 64, _mm512_loadu_si512(x->q[j + i] + b * 256 + c * 64));
    _tile_zero(0);
    _tile_zero(1);
    AMX_PART(0, 4, 5, pieces);
    AMX_PART(1, 6, 7, pieces);
    AMX_PART(2, 4, 5, pieces);
    AMX_PART(3, 6, 7, pieces);
    _tile_stored(0, r->c[0], 64);
    if (pieces == 2) _tile_stored(1, r->c[1], 64);
    for (int i = 0; i < rows; i++) {
        const __m512 a = _mm512_set1_ps(x->d[j + i][b]);
        __m512i dot = _mm512_load_si512(r->c[0][i]);
        if (pieces == 2) dot = _mm512_add_epi32(dot, _mm512_slli_epi32(_mm512_load_si512(r->c[1][i]), 8));
        if (type == T_Q3_K) dot = _mm512_sub_epi32(dot, q3_k_excess_512(x->sum[j + i] + b * 16));
        acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(r->block.d, a), acc[i]);
        if (!type_has_min(type)) continue;
        __m512i min = _mm512_setzero_si512();
        UNROLL for (int k = 0; k < 8; k++) min =
            _mm512_dpwssd_epi32(min, r->block.min[k], each_512(x->sum[j + i] + b * 16 + 2 * k));
        acc[i] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(min), _mm512_mul_ps(r->block.dmin, a), acc[i]);
    }
}

/* 16 outputs. */
INLINE_AMX void amx_outputs(uint32_t type, int64_t n, const uint8_t *w, size_t w_stride, const tile_acts *x, int m, float *out,
                            size_t ldo, amx_room *r) {
    const type_info *t = type_find(type);
    const int64_t step = t->block == 32 ? LANES : 1;
    memset(r->acc, 0, (size_t)((m + 15) / 16) * sizeof *r->acc);
    for (int64_t b = 0; b < n / t->block; b += step) {
        const int64_t left = n / t->block - b, blocks = left < step ? left : step;
        if (t->block == 32) amx_weights_32(type, blocks, w + b * t->bytes, w_stride, r);
        else amx_weights_256(type, w + b * t->bytes, w_stride, r);
        for (int j = 0; j < m; j += 16) {
            const int rows = m - j < 16 ? m - j : 16;
            if (t->block == 32) amx_group_32(x, j, rows, b, blocks, r, r->acc[j / 16]);
            else amx_block_256(type, x, j, rows, b, r, r->acc[j / 16][b % LANES]);
        }
    }
    for (int j = 0; j < m; j++) _mm512_storeu_ps(out + (size_t)j * ldo, join_columns_512(&r->acc[j / 16][0][j % 16], 16));
}

INLINE_AMX void amx_tile(uint32_t type, TILE_ARGS) {
    int o = 0;
    if (m >= AMX_LEAST && n_out >= 16) {
        amx_room room;
        if (type_find(type)->block == 32) amx_configure(32, 8);
        else amx_configure(64, 16);
        for (; o + 16 <= n_out; o += 16) amx_outputs(type, n, w + (size_t)o * w_stride, w_stride, x, m, out + o, ldo, &room);
        _tile_release();
    }
    if (o < n_out) tile_for(&tiles_avx512, type)(n, w + (size_t)o * w_stride, w_stride, n_out - o, x, m, out + o, ldo);
}

QUANTISED_SET(amx, TARGET_AMX, amx_tile, amx_tile, avx512)
#endif

/* ---- 4.10 Matrix products with NEON and its dot product ----------------------------------------------------------- */

#ifdef KERNELS_ARM
#if defined(__ARM_FEATURE_DOTPROD)
#define TARGET_NEON
#else
#define TARGET_NEON __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define INLINE_NEON ALWAYS_INLINE TARGET_NEON

/* 16 lanes as four vectors. */
INLINE_NEON float join_neon(const float32x4_t *v) {
    const float32x4_t q = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
    return vpadds_f32(vadd_f32(vget_low_f32(q), vget_high_f32(q)));
}

/* 4 weights of a float type. */
INLINE_NEON float32x4_t load_floats_neon(uint32_t type, const uint8_t *w, int64_t i) {
    if (type == T_F32) return vreinterpretq_f32_u8(vld1q_u8(w + 4 * i));
    const uint16x4_t h = vreinterpret_u16_u8(vld1_u8(w + 2 * i));
    return type == T_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(h)) : vreinterpretq_f32_u32(vshll_n_u16(h, 16));
}

/* O rows of float weights against J rows of activations, the sums in registers. */
INLINE_NEON void floats_neon(uint32_t type, const int O, const int J, int64_t n, const uint8_t *w, size_t w_stride,
                             const float *const *x, float *out, size_t ldo) {
    float32x4_t acc[4][4]; /* [o*J + j][a quarter of the lanes] */
    UNROLL for (int k = 0; k < O * J; k++) UNROLL for (int c = 0; c < 4; c++) acc[k][c] = vdupq_n_f32(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) UNROLL for (int o = 0; o < O; o++) UNROLL for (int c = 0; c < 4; c++) {
            const float32x4_t a = load_floats_neon(type, w + (size_t)o * w_stride, i + 4 * c);
            UNROLL for (int j = 0; j < J; j++) acc[o * J + j][c] = vfmaq_f32(acc[o * J + j][c], a, vld1q_f32(x[j] + i + 4 * c));
        }
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int j = 0; j < J; j++) {
        float lanes[LANES], *to = out + (size_t)j * ldo + o;
        UNROLL for (int c = 0; c < 4; c++) vst1q_f32(lanes + 4 * c, acc[o * J + j][c]);
        *to = i == n ? join_neon(acc[o * J + j]) : float_dot_from(type, n, i, w + (size_t)o * w_stride, x[j], lanes);
    }
}

INLINE_NEON void float_tile_neon(uint32_t type, TILE_ARGS) {
    for (int o = 0; o < n_out;) {
        const uint8_t *p = w + (size_t)o * w_stride;
        const int rows = m == 1 && n_out - o >= 4 ? 4 : m > 1 && n_out - o >= 2 ? 2 : 1;
        for (int j = 0; j < m;) {
            const int count = rows == 2 && m - j >= 2 ? 2 : rows == 1 && m - j >= 4 ? 4 : 1;
            float *to = out + (size_t)j * ldo + o;
            if (rows == 4) floats_neon(type, 4, 1, n, p, w_stride, x->f + j, to, ldo);
            else if (count == 4) floats_neon(type, 1, 4, n, p, w_stride, x->f + j, to, ldo);
            else if (count == 2) floats_neon(type, 2, 2, n, p, w_stride, x->f + j, to, ldo);
            else if (rows == 2) floats_neon(type, 2, 1, n, p, w_stride, x->f + j, to, ldo);
            else floats_neon(type, 1, 1, n, p, w_stride, x->f + j, to, ldo);
            j += count;
        }
        o += rows;
    }
}

/* As f16_load_body and f16_store_body, by the instructions that do it. */
INLINE_NEON void load_f16_neon(int64_t n, const uint16_t *x, float *y) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(y + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + i))));
    f16_load_body(n - i, x + i, y + i);
}

INLINE_NEON void store_f16_neon(int64_t n, const float *x, uint16_t *y) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) vst1_u16(y + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
    f16_store_body(n - i, x + i, y + i);
}

/* 16 bytes from each of 4 blocks, as four vectors whose lane b is the k-th word of block b (see gather_words_512). */
INLINE_NEON void gather_words_neon(const uint8_t *b, int64_t size, int64_t blocks, int8x16_t w[4]) {
    uint32x4_t r[4];
    UNROLL for (int i = 0; i < 4; i++) r[i] = vreinterpretq_u32_u8(vld1q_u8(b + size * (i < blocks ? i : blocks - 1)));
    const uint64x2_t a = vreinterpretq_u64_u32(vzip1q_u32(r[0], r[1])), c = vreinterpretq_u64_u32(vzip2q_u32(r[0], r[1]));
    const uint64x2_t d = vreinterpretq_u64_u32(vzip1q_u32(r[2], r[3])), e = vreinterpretq_u64_u32(vzip2q_u32(r[2], r[3]));
    w[0] = vreinterpretq_s8_u64(vzip1q_u64(a, d));
    w[1] = vreinterpretq_s8_u64(vzip2q_u64(a, d));
    w[2] = vreinterpretq_s8_u64(vzip1q_u64(c, e));
    w[3] = vreinterpretq_s8_u64(vzip2q_u64(c, e));
}

/* Weights of 32-value types, 4 blocks at a time (see group512), as signed bytes; the blocks' scales. */
INLINE_NEON float32x4_t unpack_group_neon(uint32_t type, const uint8_t *b, int64_t blocks, int8x16_t w[8]) {
    static const int8_t values[2][16] = {{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
                                         {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};
    const int64_t size = q32_bytes(type);
    if (type == T_Q8_0) {
        gather_words_neon(b + 2, size, blocks, w);
        gather_words_neon(b + 18, size, blocks, w + 4);
    } else {
        const int8x16_t value = vld1q_s8(values[type == T_MXFP4]);
        gather_words_neon(b + size - 16, size, blocks, w);
        UNROLL for (int k = 0; k < 4; k++) {
            const uint8x16_t v = vreinterpretq_u8_s8(w[k]);
            w[k] = vqtbl1q_s8(value, vandq_u8(v, vdupq_n_u8(15)));
            w[k + 4] = vqtbl1q_s8(value, vshrq_n_u8(v, 4));
        }
    }
    float scale[4] = {0};
    for (int64_t i = 0; i < blocks; i++)
        scale[i] = type == T_MXFP4 ? mxfp4_scale(b[size * i]) : f16_to_f32(load_u16(b + size * i));
    return vld1q_f32(scale);
}

/* A row of a 32-value type against a tile of activations, for `lanes` blocks from b, all four or the last ones: a quarter of
 * a group of `blocks`. */
INLINE_NEON void q32_group_neon(uint32_t type, int64_t b, const int64_t lanes, int64_t blocks, const uint8_t *w,
                                const tile_acts *x, int m, float (*acc)[LANES]) {
    int8x16_t u[8];
    const float32x4_t w_scale = unpack_group_neon(type, w, lanes, u);
    for (int j = 0; j < m; j++) {
        const int8_t *q = x->q[j] + (b & ~(int64_t)15) * 32 + (b & 15) * 4;
        float *to = acc[j] + (b & 15), few[4] = {0};
        int32x4_t dot = vdupq_n_s32(0);
        UNROLL for (int k = 0; k < 8; k++) {
            int8_t word[16] = {0};
            if (lanes < 4) /* what lies beyond is not the row's */
                memcpy(word, q + k * 4 * blocks, (size_t)lanes * 4);
            dot = vdotq_s32(dot, u[k], vld1q_s8(lanes < 4 ? word : q + k * 4 * blocks));
        }
        if (lanes < 4) memcpy(few, x->d[j] + b, (size_t)lanes * 4);
        const float32x4_t scale = vmulq_f32(w_scale, vld1q_f32(lanes < 4 ? few : x->d[j] + b));
        float sum[4];
        vst1q_f32(sum, vfmaq_f32(vld1q_f32(to), vcvtq_f32_s32(dot), scale));
        memcpy(to, sum, (size_t)lanes * 4);
    }
}

INLINE_NEON void q32_tile_neon(uint32_t type, TILE_ARGS) {
    const int size = q32_bytes(type);
    for (int o = 0; o < n_out; o++) {
        const uint8_t *row = w + (size_t)o * w_stride;
        float acc[TILE][LANES];
        memset(acc, 0, (size_t)m * sizeof *acc);
        for (int64_t b = 0; b < n / 32; b += 4) {
            const int64_t left = n / 32 - b, group = n / 32 - (b & ~(int64_t)15), blocks = group < LANES ? group : LANES;
            if (left >= 4) q32_group_neon(type, b, 4, blocks, row + b * size, x, m, acc);
            else q32_group_neon(type, b, left, blocks, row + b * size, x, m, acc);
        }
        for (int j = 0; j < m; j++) out[(size_t)j * ldo + (size_t)o] = join_lanes(acc[j]);
    }
}

/* The code words and signs of IQ2_XXS by vectors; what else a block holds as unpack_iq2_xxs does it. */
INLINE_NEON void unpack_iq2_xxs_neon(const uint8_t *b, wblock *u) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
    u->d = f16_to_f32(load_u16(b)) * 0.125f;
    for (int g = 0; g < 8; g++) {
        const uint8_t *code = b + 2 + 8 * g;
        const uint32_t rest = load_u32(code + 4);
        uint32_t sign = (rest & 0x7f) | (rest << 1 & 0x7f00) | (rest << 2 & 0x7f0000) | (rest << 3 & 0x7f000000);
        uint32_t parity = sign ^ (sign >> 4);
        parity ^= parity >> 2;
        parity ^= parity >> 1;
        sign |= (parity & 0x01010101) << 7;
        UNROLL for (int k = 0; k < 4; k += 2) {
            const uint64x2_t word = vcombine_u64(vcreate_u64(iq2_grid[code[k]]), vcreate_u64(iq2_grid[code[k + 1]]));
            const uint8x16_t each =
                vcombine_u8(vdup_n_u8((uint8_t)(sign >> (8 * k))), vdup_n_u8((uint8_t)(sign >> (8 * k + 8))));
            const int8x16_t minus = vreinterpretq_s8_u8(vtstq_u8(each, bit));
            vst1q_s8(u->q + 32 * g + 8 * k, vsubq_s8(veorq_s8(vreinterpretq_s8_u64(word), minus), minus));
        }
        u->scale[2 * g] = u->scale[2 * g + 1] = (int16_t)(1 + 2 * (rest >> 28));
    }
}

/* A block of 256 weights against block b of row j of a tile: adds to the block's lane. */
INLINE_NEON void block_dot_neon(uint32_t type, const wblock *u, const tile_acts *x, int j, int64_t b, float *acc) {
    const int8_t *q = x->q[j] + b * 256;
    int32x4_t dot = vdupq_n_s32(0);
    UNROLL for (int c = 0; c < 16; c++) {
        const int8_t *v = q + c / 2 * 8 + c % 2 * 128; /* weights lie in natural order, activations as act_offset says */
        const int8x16_t two = vcombine_s8(vld1_s8(v), vld1_s8(v + 64));
        dot = vmlaq_n_s32(dot, vdotq_s32(vdupq_n_s32(0), vld1q_s8(u->q + 16 * c), two), u->scale[c]);
    }
    const float scale = x->d[j][b];
    float *lane = acc + b % LANES;
    *lane = __builtin_fmaf((float)vaddvq_s32(dot), u->d * scale, *lane);
    if (type_has_min(type)) {
        const int16x8_t s0 = vld1q_s16(x->sum[j] + b * 16), s1 = vld1q_s16(x->sum[j] + b * 16 + 8);
        const int16x8_t m0 = vld1q_s16(u->min), m1 = vld1q_s16(u->min + 8);
        int32x4_t min = vmull_s16(vget_low_s16(s0), vget_low_s16(m0));
        min = vmlal_s16(min, vget_high_s16(s0), vget_high_s16(m0));
        min = vmlal_s16(min, vget_low_s16(s1), vget_low_s16(m1));
        min = vmlal_s16(min, vget_high_s16(s1), vget_high_s16(m1));
        *lane = __builtin_fmaf(-(float)vaddvq_s32(min), u->dmin * scale, *lane);
    }
}

INLINE_NEON void q256_tile_neon(uint32_t type, TILE_ARGS) {
    const int size = type_find(type)->bytes;
    for (int o = 0; o < n_out; o++) {
        const uint8_t *row = w + (size_t)o * w_stride;
        float acc[TILE][LANES];
        memset(acc, 0, (size_t)m * sizeof *acc);
        for (int64_t b = 0; b < n / 256; b++) {
            wblock u;
            if (type == T_IQ2_XXS) unpack_iq2_xxs_neon(row + b * size, &u);
            else unpack(type, row + b * size, &u);
            for (int j = 0; j < m; j++) block_dot_neon(type, &u, x, j, b, acc[j]);
        }
        for (int j = 0; j < m; j++) out[(size_t)j * ldo + (size_t)o] = join_lanes(acc[j]);
    }
}

TILE_SET(neon, TARGET_NEON, float_tile_neon, q32_tile_neon, q256_tile_neon)
#endif

/* ---- 4.11 One set of functions for each instruction set ----------------------------------------------------------- */

/* A set with its own products, all else from the set `of`. */
#define KERNEL_TABLE(isa, of)                                                                              \
    {#isa,           mat_##isa,     quantise_##of,     dequantise_##of, dot_##of,       axpy_##of,         \
     mix_##of,       relu_sum_##of, sum_squares_##of,  scale_mul_##of,  softmax_##of,   softmax_step_##of, \
     swiglu_##of,    sigmoid_##of,  router_score_##of, f16_load_##of,   f16_store_##of, fp8_load_##of,     \
     fp8_store_##of, argmax_##of,   all_finite_##of}

/* few, most: rows of weights and of activations in a tile of quantised types, whose unpacking is dear. */
#define MAT_FN(isa, attr, few, most)                                                                                           \
    attr static void mat_##isa(uint32_t type, int64_t n, const uint8_t *w, size_t w_stride, int n_out, const acts *x,          \
                               const int32_t *rows, int m, float *out, size_t ldo) {                                           \
        const int block = type_find(type)->block;                                                                              \
        mat_tiles(tile_for(&tiles_##isa, type), block == 1 ? 8 : few, block == 1 ? 16 : most, block, n, w, w_stride, n_out, x, \
                  rows, m, out, ldo);                                                                                          \
    }

/* The functions of a set: `attr` names its instructions, so the inlined bodies are compiled for them. */
#define KERNEL_SET(isa, attr, few, most, quantise_32, load_f16, store_f16, mix)                                                \
    MAT_FN(isa, attr, few, most)                                                                                               \
    attr static void quantise_##isa(act_kind kind, int64_t n, const float *x, int8_t *q, float *d, int16_t *sum) {             \
        if (kind == ACT_Q32) quantise_32(n, x, q, d, sum);                                                                     \
        else if (kind == ACT_Q256) quantise_256_body(n, x, q, d, sum);                                                         \
    }                                                                                                                          \
    attr static void dequantise_##isa(uint32_t type, int64_t n, const uint8_t *w, float *out) {                                \
        dequantise_body(type, n, w, out);                                                                                      \
    }                                                                                                                          \
    attr static float dot_##isa(int64_t n, const float *a, const float *b) { return dot_tile(tiles_##isa.f32, n, a, b); }      \
    attr static void axpy_##isa(int64_t n, float a, const float *x, float *y) { axpy_body(n, a, x, y); }                       \
    attr static void mix_##isa(int64_t n, const float *a, int64_t lda, int heads, const float *x, int64_t ldx, int m,          \
                               float *y) {                                                                                     \
        mix(n, a, lda, heads, x, ldx, m, y);                                                                                   \
    }                                                                                                                          \
    attr static void relu_sum_##isa(int64_t n, int heads, const float *w, const float *x, float *y) {                          \
        relu_sum_body(n, heads, w, x, y);                                                                                      \
    }                                                                                                                          \
    attr static float sum_squares_##isa(int64_t n, const float *x) { return dot_##isa(n, x, x); }                              \
    attr static void scale_mul_##isa(int64_t n, float s, const float *x, const float *w, float *y) {                           \
        scale_mul_body(n, s, x, w, y);                                                                                         \
    }                                                                                                                          \
    attr static void softmax_##isa(int64_t n, float *x, float sink, bool has_sink) { softmax_body(n, x, sink, has_sink); }     \
    attr static void softmax_step_##isa(int64_t n, const float *x, const float *v, const float *max, float *sum, float *out) { \
        softmax_step_body(n, x, v, max, sum, out);                                                                             \
    }                                                                                                                          \
    attr static void swiglu_##isa(int64_t n, const float *gate, const float *up, float limit, float *out) {                    \
        swiglu_body(n, gate, up, limit, out);                                                                                  \
    }                                                                                                                          \
    attr static void sigmoid_##isa(int64_t n, const float *x, float *y) { sigmoid_body(n, x, y); }                             \
    attr static void router_score_##isa(int64_t n, const float *x, float *y) { router_score_body(n, x, y); }                   \
    attr static void f16_load_##isa(int64_t n, const uint16_t *x, float *y) { load_f16(n, x, y); }                             \
    attr static void f16_store_##isa(int64_t n, const float *x, uint16_t *y) { store_f16(n, x, y); }                           \
    attr static void fp8_load_##isa(int64_t n, const uint8_t *x, const uint8_t *e, float *y) { fp8_load_body(n, x, e, y); }    \
    attr static void fp8_store_##isa(int64_t n, const float *x, uint8_t *y, uint8_t *e) { fp8_store_body(n, x, y, e); }        \
    attr static int64_t argmax_##isa(int64_t n, const float *x) { return argmax_body(n, x); }                                  \
    attr static bool all_finite_##isa(int64_t n, const float *x) { return all_finite_body(n, x); }                             \
    static const kernels kernels_##isa = KERNEL_TABLE(isa, isa);

KERNEL_SET(scalar, , 8, 16, quantise_32_body, f16_load_body, f16_store_body, mix_body)
#ifdef KERNELS_X86
KERNEL_SET(avx2, TARGET_AVX2, OUTPUTS_256, ROWS_256, quantise_32_256, load_f16_256, store_f16_256, mix_256)
MAT_FN(avxvnni, TARGET_AVX2, OUTPUTS_256, ROWS_256)
static const kernels kernels_avxvnni = KERNEL_TABLE(avxvnni, avx2);
KERNEL_SET(avx512, TARGET_AVX512, 256, TILE, quantise_32_256, load_f16_256, store_f16_256, mix_512)

static void mat_amx(uint32_t type, int64_t n, const uint8_t *w, size_t w_stride, int n_out, const acts *x, const int32_t *rows,
                    int m, float *out, size_t ldo) {
    const int block = type_find(type)->block;
    if (block == 1) mat_avx512(type, n, w, w_stride, n_out, x, rows, m, out, ldo);
    else mat_tiles(tile_for(&tiles_amx, type), 16, AMX_MOST, block, n, w, w_stride, n_out, x, rows, m, out, ldo);
}
static const kernels kernels_amx = KERNEL_TABLE(amx, avx512);
#elif defined(KERNELS_ARM)
KERNEL_SET(neon, TARGET_NEON, 8, 16, quantise_32_body, load_f16_neon, store_f16_neon, mix_body)
#endif

/* ---- 4.12 The dispatch table -------------------------------------------------------------------------------------- */

/* In the order of preference, the best one last. */
static const kernels *const kernel_sets[] = {
    &kernels_scalar,
#ifdef KERNELS_X86
    &kernels_avx2,   &kernels_avxvnni, &kernels_avx512, &kernels_amx,
#elif defined(KERNELS_ARM)
    &kernels_neon,
#endif
};
enum { KERNEL_SETS = sizeof kernel_sets / sizeof *kernel_sets };

#ifdef KERNELS_X86
/* Tile registers are for processes that ask: Linux saves the 8 KiB for each thread of theirs. */
static bool tiles_allowed(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif

/* Does the CPU have the instructions, and (x86: XCR0) does the system save their registers? */
static bool cpu_runs(const kernels *k) {
    if (k == &kernels_scalar) return true;
#ifdef KERNELS_X86
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA) || !(c & bit_F16C) || !(c & bit_OSXSAVE)) return false;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return false;
    const unsigned need = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    const unsigned also = bit_AVX512VNNI | bit_AVX512VBMI | bit_GFNI;
    if (k == &kernels_avx2) return true;
    if (k == &kernels_avxvnni) return a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
    if ((low & 0xe6) != 0xe6 || (b & need) != need || (c & also) != also) return false;
    const unsigned tiles = 3u << 24, tile_state = 3u << 17; /* AMX-TILE and AMX-INT8; their settings and data */
    return k == &kernels_avx512 || ((d & tiles) == tiles && (low & tile_state) == tile_state && tiles_allowed());
#elif defined(KERNELS_ARM) && defined(__ARM_FEATURE_DOTPROD)
    return true;
#elif defined(KERNELS_ARM) && defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return false;
#endif
}

/* The kernels by name, or NULL (see ds4_last_error) if there are none of that name or the CPU cannot run them. */
static const kernels *kernels_named(const char *name) {
    for (int i = 0; i < KERNEL_SETS; i++) {
        if (strcmp(name, kernel_sets[i]->name) != 0) continue;
        if (cpu_runs(kernel_sets[i])) return kernel_sets[i];
        fail("this CPU cannot run the %s kernels", name);
        return NULL;
    }
    fail("there are no kernels called %s in this build", name);
    return NULL;
}

/* The fastest kernels this CPU can run. */
static const kernels *kernels_best(void) {
    int i = KERNEL_SETS - 1;
    while (!cpu_runs(kernel_sets[i])) i--;
    return kernel_sets[i];
}

/* Bytes of a row of n values: -1 if they do not fill blocks, 0 for a type that is not read. */
static int64_t type_row_bytes(uint32_t type, int64_t n) {
    const type_info *t = type_find(type);
    if (!t) return 0;
    return n % t->block ? -1 : n / t->block * t->bytes;
}

/* ============================================================================================================================
 * 5. Tokenizer and chat template
 *
 * Byte-level BPE as DeepSeek's vocabularies were trained with it, equal token for token to the `tokenizers` package,
 * and the V4 chat format on top. Relies on section 1 only.
 *
 * Text is bytes. A byte that is not part of well-formed UTF-8 counts, when text is split into words, as one U+FFFD (a
 * symbol) of its own; its token is the byte's. So every byte string encodes, and the pieces of its tokens joined
 * together are that byte string again.
 *
 * Control tokens (token types control and user-defined, the BOS, EOS and padding, the chat markers) stand outside BPE:
 * no merge yields one, so text becomes one only where the caller asks for it (parse_control).
 * ========================================================================================================================== */

#include "ds4_unicode.inc"

typedef struct {
    int32_t *v;
    size_t n, cap;
} ids;

/* What a GGUF says about its tokenizer. The strings point into the mapped file, which outlives the tokenizer. */
typedef struct {
    const str *tokens;
    size_t n_tokens;
    const int32_t *types; /* (n_tokens) 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; NULL: all normal */
    const str *merges; /* (n_merges) "left right", the best first */
    size_t n_merges;
    str model, pre;
    str chat_template; /* p NULL: none, a base model */
    int bos, eos, pad; /* -1: none */
    bool add_bos; /* not consulted: it says who writes the BOS, and here that is always tok_prompt or tok_chat */
} tok_source;

enum { TOKEN_CONTROL = 3, TOKEN_USER_DEFINED = 4, TOKEN_BYTE = 6 };
enum { MAX_CONTROL_BYTES = 512 }; /* real ones have under 64; the bound keeps the search for them linear in the text */
enum { MAX_PROBES = 256 }; /* an honest table needs a few dozen; the bound keeps a hostile one from stalling us */
enum { SMALL_WORD = 48 }; /* up to this many bytes a scan for the best merge beats a heap */

/* The tokens that the chat format writes, in the order of chat_marker_text. */
enum { MARK_USER, MARK_ASSISTANT, MARK_THINK, MARK_END_THINK, MARK_DSML, MARKS };
static const char *const chat_marker_text[MARKS] = {"<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"};

typedef struct {
    uint64_t key;
    int32_t rank, id;
} merge_slot; /* key 0: free */
typedef struct {
    str text;
    int32_t id;
} control_token;

/* Token texts by hash. A text that occurs twice is found as its lowest id. */
typedef struct {
    str *text;
    int32_t *slot; /* id + 1, 0: free */
    size_t mask;
    uint64_t seed; /* of the hash: an address, so that no file can be made whose tokens all meet in one place */
} text_index;

typedef struct tokenizer {
    text_index index;
    str *piece; /* (n_tokens) the bytes a token stands for */
    char *arena; /* where decoded pieces lie */
    size_t n_tokens;
    int32_t byte_id[256]; /* the token of a single byte, -1: none */
    merge_slot *merges; /* open addressing by token pair */
    size_t merge_mask;
    control_token *controls; /* sorted by text, each text once */
    size_t n_controls;
    uint32_t control_at[257]; /* control_at[b] .. control_at[b + 1]: those that begin with byte b */
    int32_t mark[MARKS]; /* -1: not in this vocabulary */
    int32_t bos, eos, pad;
    str chat_template;
} tokenizer;

/* ---- small tools ---- */

static int ids_reserve(ids *a, size_t more) {
    size_t want = a->n + more, cap = a->cap + a->cap / 2;
    if (want <= a->cap) return 0;
    if (want < more || want > SIZE_MAX / 2 / sizeof *a->v) return fail("too many tokens");
    if (cap < want) cap = want;
    if (cap < 64) cap = 64;
    int32_t *v = mem_grow(a->v, a->cap * sizeof *v, cap * sizeof *v);
    if (!v) return -1;
    a->v = v;
    a->cap = cap;
    return 0;
}

static int ids_push(ids *a, int32_t id) {
    if (ids_reserve(a, 1)) return -1;
    a->v[a->n++] = id;
    return 0;
}

/* Code point at p, which is before end, and its length in bytes. What is not well-formed UTF-8 is U+FFFD, one byte long. */
static unsigned utf8_next(const unsigned char *p, const unsigned char *end, uint32_t *cp) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    unsigned c = *p, n = c < 0x80 ? 1 : c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    *cp = 0xfffd;
    if (n == 1) *cp = c;
    if (n <= 1 || (size_t)(end - p) < n) return 1;
    uint32_t v = c & (0x7fu >> n);
    for (unsigned i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) return 1;
        v = v << 6 | (p[i] & 0x3fu);
    }
    if (v < least[n] || v > 0x10ffff || (v >= 0xd800 && v < 0xe000)) return 1;
    *cp = v;
    return n;
}

/* ---- vocabulary ---- */

/* Vocabularies spell a byte as one printable character: itself where that is printable Latin-1, else the next one from
 * U+0100 on. The byte of such a character, -1 if it is none. */
enum { SPELLED_MAX = 0x143 };
static int spelled_byte(uint32_t cp) {
    if ((cp >= '!' && cp <= '~') || (cp >= 0xa1 && cp <= 0xac) || (cp >= 0xae && cp <= 0xff)) return (int)cp;
    if (cp < 0x100) return -1;
    cp -= 0x100;
    return cp < 33 ? (int)cp : cp < 33 + 34 ? (int)cp - 33 + 0x7f : cp == 33 + 34 ? 0xad : -1;
}

/* Writes the bytes a normal token spells to out (text.n bytes suffice). Text that no byte spells, as in padding tokens,
 * stands for itself. */
static size_t spelled_bytes(str text, char *out) {
    const unsigned char *p = (const unsigned char *)text.p, *end = p + text.n;
    size_t n = 0;
    while (p < end) {
        uint32_t cp;
        p += utf8_next(p, end, &cp);
        int b = spelled_byte(cp);
        if (b < 0) {
            memcpy(out, text.p, text.n);
            return text.n;
        }
        out[n++] = (char)b;
    }
    return n;
}

/* A token of type byte is written <0xNN>. */
static int byte_token(str text) {
    static const char digits[] = "0123456789ABCDEF";
    if (text.n != 6 || memcmp(text.p, "<0x", 3) || text.p[5] != '>') return -1;
    const char *hi = memchr(digits, text.p[3], 16), *lo = memchr(digits, text.p[4], 16);
    return hi && lo ? (int)((hi - digits) * 16 + (lo - digits)) : -1;
}

static int tok_pieces(tokenizer *t, const tok_source *src) {
    size_t total = 0;
    for (size_t i = 0; i < src->n_tokens; i++) {
        if (src->tokens[i].n > SIZE_MAX / 2 - total) return fail("tokenizer.ggml.tokens is too large");
        total += src->tokens[i].n;
    }
    t->piece = mem_array(src->n_tokens, sizeof *t->piece);
    t->arena = mem_new(total + 1);
    if (!t->piece || !t->arena) return -1;
    char *out = t->arena;
    for (size_t i = 0; i < src->n_tokens; i++) {
        str text = src->tokens[i];
        int type = src->types ? src->types[i] : 1, byte = type == TOKEN_BYTE ? byte_token(text) : -1;
        t->piece[i] = text;
        if (!text.n) continue;
        t->piece[i] = (str){out, 1};
        if (byte >= 0) *out = (char)byte;
        else t->piece[i].n = spelled_bytes(text, out);
        out += t->piece[i].n;
    }
    return 0;
}

static uint64_t text_hash(uint64_t h, str s) {
    for (size_t i = 0; i < s.n; i++) h = (h ^ (unsigned char)s.p[i]) * 0x100000001b3u;
    return h;
}

/* Of a table of a power of two slots, at most half of them used. */
static size_t table_mask(size_t n) {
    size_t size = 2;
    while (size / 2 < n) size *= 2;
    return size - 1;
}

static size_t text_slot(const text_index *x, str a, str b) {
    uint64_t h = text_hash(text_hash(x->seed, a), b) * 0x9e3779b97f4a7c15u;
    return (size_t)(h >> 32 ^ h) & x->mask;
}

/* The id of the text a followed by b, -1 if it is no token. */
static int32_t text_find(const text_index *x, str a, str b) {
    size_t at = text_slot(x, a, b);
    for (size_t k = 0; k < MAX_PROBES && x->slot[at]; k++, at = (at + 1) & x->mask) {
        str s = x->text[x->slot[at] - 1];
        if (s.n == a.n + b.n && !memcmp(s.p, a.p, a.n) && !memcmp(s.p + a.n, b.p, b.n)) return x->slot[at] - 1;
    }
    return -1;
}

static int text_index_new(text_index *x, const str *text, size_t n) {
    x->mask = table_mask(n);
    x->slot = mem_array(x->mask + 1, sizeof *x->slot);
    x->text = mem_array(n, sizeof *x->text);
    if (!x->slot || !x->text) return -1;
    x->seed = 0xcbf29ce484222325u ^ (uintptr_t)x->slot >> 4;
    memcpy(x->text, text, n * sizeof *x->text);
    for (size_t i = 0; i < n; i++) {
        if (!text[i].n || text_find(x, text[i], str_of("")) >= 0) continue;
        size_t at = text_slot(x, text[i], str_of("")), k = 0;
        while (x->slot[at] && ++k < MAX_PROBES) at = (at + 1) & x->mask;
        if (x->slot[at]) return fail("tokenizer.ggml.tokens[%zu]: too many tokens with one hash", i);
        x->slot[at] = (int32_t)i + 1;
    }
    return 0;
}

/* ---- control tokens ---- */

static int control_order(const void *pa, const void *pb) {
    const control_token *a = pa, *b = pb;
    int order = str_cmp(a->text, b->text);
    return order ? order : (a->id > b->id) - (a->id < b->id);
}

/* Marks which tokens BPE must not reach (is_control, one byte a token) and sorts their texts for the search in text. */
static int tok_controls(tokenizer *t, const tok_source *src, unsigned char *is_control) {
    const int32_t named[3] = {t->bos, t->eos, t->pad};
    size_t n = 0;
    for (size_t i = 0; i < src->n_tokens && src->types; i++)
        is_control[i] = src->types[i] == TOKEN_CONTROL || src->types[i] == TOKEN_USER_DEFINED;
    for (int i = 0; i < 3; i++)
        if (named[i] >= 0) is_control[named[i]] = 1;
    for (int i = 0; i < MARKS; i++) {
        t->mark[i] = text_find(&t->index, str_of(chat_marker_text[i]), str_of(""));
        if (t->mark[i] >= 0) is_control[t->mark[i]] = 1;
    }
    for (size_t i = 0; i < src->n_tokens; i++) n += is_control[i];
    t->controls = mem_array(n, sizeof *t->controls);
    if (!t->controls) return -1;
    for (size_t i = 0; i < src->n_tokens; i++) {
        if (!is_control[i]) continue;
        t->piece[i] = src->tokens[i]; /* it stands for its own text */
        if (src->tokens[i].n > MAX_CONTROL_BYTES)
            return fail("tokenizer.ggml.tokens[%zu]: a control token of %zu bytes; expected at most %d", i, src->tokens[i].n,
                        MAX_CONTROL_BYTES);
        if (src->tokens[i].n) t->controls[t->n_controls++] = (control_token){src->tokens[i], (int32_t)i};
    }
    qsort(t->controls, t->n_controls, sizeof *t->controls, control_order);
    n = 0;
    for (size_t i = 0; i < t->n_controls; i++) {
        if (n && !str_cmp(t->controls[n - 1].text, t->controls[i].text)) continue;
        t->controls[n++] = t->controls[i];
        t->control_at[(unsigned char)t->controls[i].text.p[0] + 1] = (uint32_t)n;
    }
    t->n_controls = n;
    for (int b = 0; b < 256; b++) /* bytes that begin none take the place where the previous byte's end */
        if (t->control_at[b + 1] < t->control_at[b]) t->control_at[b + 1] = t->control_at[b];
    return 0;
}

/* The longest control token that begins at p: its bytes and id; 0 if none does. */
static size_t control_match(const tokenizer *t, const char *p, size_t n, int32_t *id) {
    size_t lo = t->control_at[(unsigned char)*p], hi = t->control_at[(unsigned char)*p + 1], found = 0;
    for (size_t depth = 1; lo < hi; depth++) {
        const control_token *c = t->controls;
        if (c[lo].text.n == depth) { /* the shortest of those that agree with the text so far comes first */
            found = depth;
            *id = c[lo++].id;
        }
        if (depth == n) break;
        unsigned char want = (unsigned char)p[depth];
        size_t a = lo, b = hi;
        while (a < b) { /* first whose next byte is not below the text's */
            size_t mid = a + (b - a) / 2;
            if ((unsigned char)c[mid].text.p[depth] < want) a = mid + 1;
            else b = mid;
        }
        lo = a;
        b = hi;
        while (a < b) { /* first whose next byte is above it */
            size_t mid = a + (b - a) / 2;
            if ((unsigned char)c[mid].text.p[depth] <= want) a = mid + 1;
            else b = mid;
        }
        hi = a;
    }
    return found;
}

/* ---- merges ---- */

static uint64_t merge_key(int32_t left, int32_t right) { return ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) + 1; }

static size_t merge_home(const tokenizer *t, uint64_t key) {
    key *= 0x9e3779b97f4a7c15u;
    return (size_t)(key >> 32 ^ key) & t->merge_mask;
}

/* What the pair merges to, NULL if it does not. */
static const merge_slot *merge_find(const tokenizer *t, int32_t left, int32_t right) {
    uint64_t key = merge_key(left, right);
    size_t at = merge_home(t, key);
    for (size_t k = 0; k < MAX_PROBES && t->merges[at].key; k++, at = (at + 1) & t->merge_mask)
        if (t->merges[at].key == key) return &t->merges[at];
    return NULL;
}

/* A merge of what is no token, or into a control token, never applies and is passed over (small test vocabularies carry one
 * for form's sake). Of a pair listed twice the first is found first and counts. */
static int tok_merges(tokenizer *t, const tok_source *src, const unsigned char *is_control) {
    const text_index *x = &t->index;
    const str none = str_of("");
    t->merge_mask = table_mask(src->n_merges);
    t->merges = mem_array(t->merge_mask + 1, sizeof *t->merges);
    if (!t->merges) return -1;
    for (size_t i = 0; i < src->n_merges; i++) {
        str m = src->merges[i];
        const char *gap = m.n ? memchr(m.p, ' ', m.n) : NULL;
        size_t left_n = gap ? (size_t)(gap - m.p) : 0, right_n = gap ? m.n - left_n - 1 : 0;
        if (!left_n || !right_n || memchr(gap + 1, ' ', right_n))
            return fail("tokenizer.ggml.merges[%zu] is not two tokens with a space between", i);
        str l = {m.p, left_n}, r = {gap + 1, right_n};
        int32_t left = text_find(x, l, none), right = text_find(x, r, none), made = text_find(x, l, r);
        if (left < 0 || right < 0 || made < 0 || is_control[made]) continue;
        size_t at = merge_home(t, merge_key(left, right)), k = 0;
        while (t->merges[at].key && ++k < MAX_PROBES) at = (at + 1) & t->merge_mask;
        if (t->merges[at].key) return fail("tokenizer.ggml.merges[%zu]: too many merges with one hash", i);
        t->merges[at] = (merge_slot){merge_key(left, right), (int32_t)i, made};
    }
    return 0;
}

/* ---- loading ---- */

static void tok_free(tokenizer *t) {
    if (!t) return;
    mem_free(t->index.text);
    mem_free(t->index.slot);
    mem_free(t->piece);
    mem_free(t->arena);
    mem_free(t->merges);
    mem_free(t->controls);
    mem_free(t);
}

static size_t tok_memory(const tokenizer *t) {
    return t ? mem_size(t->index.text) + mem_size(t->index.slot) + mem_size(t->piece) + mem_size(t->arena) +
                   mem_size(t->merges) + mem_size(t->controls) + mem_size(t)
             : 0;
}

static int tok_check(const tok_source *src) {
    /* Files name the same split differently: it is the architecture's, and these are the names that were given to it. */
    static const char *const known[] = {"joyai-llm", "deepseek-v3", "deepseek-llm", "deepseek-v4"};
    const struct {
        const char *key;
        int id;
    } named[3] = {{"bos", src->bos}, {"eos", src->eos}, {"padding", src->pad}};
    bool found = false;
    if (!str_is(src->model, "gpt2")) return fail("tokenizer.ggml.model is \"%.*s\"; expected gpt2", STR_ARG(src->model));
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) found = found || str_is(src->pre, known[i]);
    if (!found)
        return fail("tokenizer.ggml.pre is \"%.*s\"; expected joyai-llm, deepseek-v3, deepseek-llm or deepseek-v4",
                    STR_ARG(src->pre));
    if (!src->n_tokens) return fail("tokenizer.ggml.tokens is empty");
    if (src->n_tokens > INT32_MAX / 4) return fail("tokenizer.ggml.tokens has %zu entries", src->n_tokens);
    if (src->n_merges > INT32_MAX / 4) return fail("tokenizer.ggml.merges has %zu entries", src->n_merges);
    for (int i = 0; i < 3; i++)
        if (named[i].id < -1 || (named[i].id >= 0 && (size_t)named[i].id >= src->n_tokens))
            return fail("tokenizer.ggml.%s_token_id is %d, but there are %zu tokens", named[i].key, named[i].id, src->n_tokens);
    return 0;
}

static int tok_load(tokenizer *t, const tok_source *src, unsigned char *is_control) {
    if (text_index_new(&t->index, src->tokens, src->n_tokens)) return -1;
    if (tok_pieces(t, src) || tok_controls(t, src, is_control)) return -1;
    for (int b = 0; b < 256; b++) t->byte_id[b] = -1;
    for (uint32_t cp = 0; cp <= SPELLED_MAX; cp++) {
        char text[2] = {(char)cp, 0};
        size_t n = 1;
        if (cp >= 0x80) {
            text[0] = (char)(0xc0 | cp >> 6);
            text[1] = (char)(0x80 | (cp & 0x3f));
            n = 2;
        }
        int b = spelled_byte(cp);
        int32_t id = b < 0 ? -1 : text_find(&t->index, (str){text, n}, str_of(""));
        if (id >= 0 && !is_control[id]) t->byte_id[b] = id;
    }
    return tok_merges(t, src, is_control);
}

static tokenizer *tok_new(const tok_source *src) {
    if (tok_check(src)) return NULL;
    tokenizer *t = mem_new(sizeof *t);
    unsigned char *is_control = mem_new(src->n_tokens);
    int rc = t && is_control ? 0 : -1;
    if (!rc) {
        t->n_tokens = src->n_tokens;
        t->bos = src->bos;
        t->eos = src->eos;
        t->pad = src->pad;
        t->chat_template = src->chat_template;
        rc = tok_load(t, src, is_control);
    }
    mem_free(is_control);
    if (!rc) return t;
    tok_free(t);
    return NULL;
}

/* The bytes of a token, none for an id outside the vocabulary. They live as long as the tokenizer; a character's may be spread
 * over several tokens. */
static size_t tok_piece(const tokenizer *t, int32_t id, const char **p) {
    *p = "";
    if (id < 0 || (size_t)id >= t->n_tokens) return 0;
    *p = t->piece[id].p;
    return t->piece[id].n;
}

/* The token whose text in the file this is, -1 if there is none. */
static int32_t tok_id(const tokenizer *t, str text) { return text_find(&t->index, text, str_of("")); }

/* ---- splitting text into words ----
 *
 * What the vocabulary's three patterns do one after the other, without a regex engine and in one pass: digits by threes;
 * runs of Chinese characters and kana; and inside what these leave (and inside those runs), the first that matches of
 * 1  an ASCII punctuation mark and ASCII letters
 * 2  letters and marks, with one character before them that is no letter, punctuation, symbol or line end
 * 3  punctuation and symbols, a space before them and line ends after them
 * 4  white space up to its last line end
 * 5  white space, but for the last character if something follows
 * Characters that none of these takes (controls, unassigned ones) make a word of their own up to where one matches. */

enum { C_NONE, C_LETTER, C_MARK, C_NUMBER, C_PUNCT, C_SYMBOL, C_SPACE, C_END };
enum { KIND_NUMBER, KIND_HAN_KANA, KIND_OTHER }; /* a word never crosses from one kind to another */

static unsigned char_class(uint32_t cp) {
    if (cp < 0x80) return unicode_ascii[cp];
    size_t lo = unicode_page[UNICODE_PAGES], hi = UNICODE_RUNS;
    if (cp >> 8 < UNICODE_PAGES) {
        lo = unicode_page[cp >> 8];
        hi = unicode_page[(cp >> 8) + 1] + 1u;
    }
    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (unicode_run[mid] >> 4 <= cp) lo = mid;
        else hi = mid;
    }
    return unicode_run[lo] & 15;
}

typedef struct {
    const unsigned char *p, *end;
} text_span;
typedef struct {
    uint32_t cp;
    unsigned len, class;
} glyph; /* class C_END, len 0: where the text ends or another kind begins */

static int char_kind(uint32_t cp, unsigned class) {
    if (class == C_NUMBER) return KIND_NUMBER;
    return (cp >= 0x4e00 && cp <= 0x9fa5) || (cp >= 0x3040 && cp <= 0x30ff) ? KIND_HAN_KANA : KIND_OTHER;
}

static glyph glyph_at(text_span s, const unsigned char *p, int kind) {
    glyph g = {0, 1, C_END};
    if (p < s.end) {
        if (*p < 0x80) g.class = unicode_ascii[g.cp = *p];
        else {
            g.len = utf8_next(p, s.end, &g.cp);
            g.class = char_class(g.cp);
        }
        if (char_kind(g.cp, g.class) == kind) return g;
    }
    return (glyph){0, 0, C_END};
}

static bool is_line_end(glyph g) { return g.cp == '\r' || g.cp == '\n'; }
static bool is_word(glyph g) { return g.class == C_LETTER || g.class == C_MARK; }
static bool is_sign(glyph g) { return g.class == C_PUNCT || g.class == C_SYMBOL; }
static bool is_ascii_letter(unsigned c) { return (c | 0x20) >= 'a' && (c | 0x20) <= 'z'; }

static const unsigned char *space_end(text_span s, const unsigned char *p, int kind) {
    const unsigned char *line = NULL, *last = p;
    glyph g = glyph_at(s, p, kind);
    size_t n = 0;
    for (; g.class == C_SPACE; n++, g = glyph_at(s, p, kind)) {
        last = p;
        p += g.len;
        if (is_line_end(g)) line = p;
    }
    if (line) return line;
    return g.class == C_END || n == 1 ? p : last;
}

/* Where the word that begins at p ends; NULL if none of the five begins there. */
static const unsigned char *match_end(text_span s, const unsigned char *p, int kind) {
    glyph g = glyph_at(s, p, kind), h = glyph_at(s, p + g.len, kind);
    const unsigned char *q = p + g.len;
    if (g.cp < 0x80 && is_sign(g) && h.class == C_LETTER && h.cp < 0x80) {
        while (q < s.end && is_ascii_letter(*q)) q++;
        return q;
    }
    if (is_word(g) || (is_word(h) && !is_sign(g) && !is_line_end(g))) {
        for (; is_word(h); h = glyph_at(s, q, kind)) q += h.len;
        return q;
    }
    if (is_sign(g) || (g.cp == ' ' && is_sign(h))) {
        for (; is_sign(h); h = glyph_at(s, q, kind)) q += h.len;
        for (; is_line_end(h); h = glyph_at(s, q, kind)) q += h.len;
        return q;
    }
    return g.class == C_SPACE ? space_end(s, p, kind) : NULL;
}

static const unsigned char *word_end(text_span s, const unsigned char *p) {
    uint32_t cp;
    unsigned len = utf8_next(p, s.end, &cp);
    int kind = char_kind(cp, char_class(cp));
    if (kind == KIND_NUMBER) {
        glyph g = {cp, len, C_NUMBER};
        for (int i = 0; i < 3 && g.len; i++, g = glyph_at(s, p, kind)) p += g.len;
        return p;
    }
    const unsigned char *q = match_end(s, p, kind);
    if (q) return q;
    do p += glyph_at(s, p, kind).len;
    while (glyph_at(s, p, kind).len && !match_end(s, p, kind));
    return p;
}

/* ---- BPE of one word: the pair of the lowest rank, the leftmost of equals, merges first ---- */

enum { NO_MERGE = INT32_MAX };

/* Few bytes: keep ids and the pairs' ranks dense and scan. Returns how many ids are left. */
static size_t bpe_small(const tokenizer *t, int32_t *id, size_t n) {
    int32_t rank[SMALL_WORD], made[SMALL_WORD];
    for (size_t i = 0; i + 1 < n; i++) {
        const merge_slot *m = merge_find(t, id[i], id[i + 1]);
        rank[i] = m ? m->rank : NO_MERGE;
        made[i] = m ? m->id : 0;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NO_MERGE) break;
        id[best] = made[best];
        n--;
        memmove(id + best + 1, id + best + 2, (n - best - 1) * sizeof *id);
        memmove(rank + best, rank + best + 1, (n - best) * sizeof *rank);
        memmove(made + best, made + best + 1, (n - best) * sizeof *made);
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const merge_slot *m = merge_find(t, id[i], id[i + 1]);
            rank[i] = m ? m->rank : NO_MERGE;
            made[i] = m ? m->id : 0;
        }
    }
    return n;
}

/* Room for long words: a linked list of ids and a heap of merges, so that a word of a million bytes takes n log n steps. */
typedef struct {
    char *block;
    size_t cap; /* bytes of the longest word there is room for */
    int32_t *id, *rank, *made, *prev, *next;
    uint64_t *heap; /* rank << 32 | position; an entry whose rank is no longer its position's is stale */
    size_t n_heap;
} bpe_room;

static int bpe_reserve(bpe_room *w, size_t n) {
    if (n <= w->cap) return 0;
    if (n > INT32_MAX / 2 || n > SIZE_MAX / 64) return fail("a word of %zu bytes is too long", n);
    size_t cap = n < 1024 ? 1024 : n, each = 5 * sizeof(int32_t) + 2 * sizeof(uint64_t);
    char *block = mem_array(cap, each); /* nothing in it outlives a word, so no need to copy the old one */
    if (!block) return -1;
    mem_free(w->block);
    w->block = block;
    w->cap = cap;
    w->heap = (uint64_t *)(void *)block;
    w->id = (int32_t *)(void *)(block + cap * 2 * sizeof(uint64_t));
    w->rank = w->id + cap;
    w->made = w->rank + cap;
    w->prev = w->made + cap;
    w->next = w->prev + cap;
    return 0;
}

static void heap_push(bpe_room *w, uint64_t v) {
    size_t i = w->n_heap++;
    for (; i && w->heap[(i - 1) / 2] > v; i = (i - 1) / 2) w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = v;
}

static uint64_t heap_pop(bpe_room *w) {
    uint64_t top = w->heap[0], v = w->heap[--w->n_heap];
    size_t i = 0;
    for (size_t c; (c = 2 * i + 1) < w->n_heap; i = c) {
        if (c + 1 < w->n_heap && w->heap[c + 1] < w->heap[c]) c++;
        if (w->heap[c] >= v) break;
        w->heap[i] = w->heap[c];
    }
    w->heap[i] = v;
    return top;
}

static void bpe_pair(const tokenizer *t, bpe_room *w, int32_t i) {
    const merge_slot *m = w->next[i] < 0 ? NULL : merge_find(t, w->id[i], w->id[w->next[i]]);
    w->rank[i] = m ? m->rank : NO_MERGE;
    if (!m) return;
    w->made[i] = m->id;
    heap_push(w, (uint64_t)(uint32_t)m->rank << 32 | (uint32_t)i);
}

/* w->id holds n ids; leaves the result there and returns its length. Each merge takes one entry off the heap and adds two
 * at most, so the heap holds under 2 n. */
static size_t bpe_large(const tokenizer *t, bpe_room *w, size_t n) {
    w->n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        w->prev[i] = (int32_t)i - 1;
        w->next[i] = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    for (size_t i = 0; i < n; i++) bpe_pair(t, w, (int32_t)i);
    while (w->n_heap) {
        uint64_t top = heap_pop(w);
        int32_t i = (int32_t)(top & 0xffffffffu), right = w->next[i];
        if (w->rank[i] != (int32_t)(top >> 32)) continue;
        w->id[i] = w->made[i];
        w->rank[right] = NO_MERGE;
        w->next[i] = w->next[right];
        if (w->next[i] >= 0) w->prev[w->next[i]] = i;
        bpe_pair(t, w, i);
        if (w->prev[i] >= 0) bpe_pair(t, w, w->prev[i]);
    }
    size_t m = 0;
    for (int32_t i = 0; i >= 0; i = w->next[i]) w->id[m++] = w->id[i];
    return m;
}

static int encode_word(const tokenizer *t, bpe_room *w, const unsigned char *p, size_t n, ids *out) {
    int32_t few[SMALL_WORD], *id = few;
    if (n > SMALL_WORD) {
        if (bpe_reserve(w, n)) return -1;
        id = w->id;
    }
    for (size_t i = 0; i < n; i++) {
        id[i] = t->byte_id[p[i]];
        if (id[i] < 0) return fail("the vocabulary has no token for byte 0x%02x", p[i]);
    }
    n = n > SMALL_WORD ? bpe_large(t, w, n) : bpe_small(t, id, n);
    if (ids_reserve(out, n)) return -1;
    memcpy(out->v + out->n, id, n * sizeof *id);
    out->n += n;
    return 0;
}

static int encode_text(const tokenizer *t, bpe_room *w, const char *text, size_t n, ids *out) {
    text_span s = {(const unsigned char *)text, (const unsigned char *)text + n};
    for (const unsigned char *p = s.p, *q; p < s.end; p = q) {
        q = word_end(s, p);
        if (encode_word(t, w, p, (size_t)(q - p), out)) return -1;
    }
    return 0;
}

/* Appends the tokens of n bytes of text to out, no BOS. With parse_control the text of a control token becomes that token
 * (the leftmost and there the longest); without, text never does. On failure out is as it was. */
static int tok_encode(const tokenizer *t, const char *text, size_t n, bool parse_control, ids *out) {
    bpe_room w = {0};
    size_t had = out->n, from = 0, at = 0;
    int rc = 0;
    while (!rc && parse_control && at < n) {
        int32_t id = 0;
        size_t len = control_match(t, text + at, n - at, &id);
        if (!len) {
            at++;
            continue;
        }
        rc = encode_text(t, &w, text + from, at - from, out) || ids_push(out, id) ? -1 : 0;
        from = at += len;
    }
    if (!rc && from < n) rc = encode_text(t, &w, text + from, n - from, out);
    mem_free(w.block);
    if (rc) out->n = had;
    return rc;
}

/* A raw prompt: the BOS, if the vocabulary has one, and the text, which may itself begin with it: then there is one still. */
static int tok_prompt(const tokenizer *t, const char *text, size_t n, bool parse_control, ids *out) {
    size_t had = out->n;
    int32_t id = -1;
    size_t own = parse_control && n && t->bos >= 0 ? control_match(t, text, n, &id) : 0;
    if (t->bos >= 0 && (!own || id != t->bos) && ids_push(out, t->bos)) return -1;
    if (!tok_encode(t, text, n, parse_control, out)) return 0;
    out->n = had;
    return -1;
}

/* ---- chat ---- */

typedef enum { THINK_OFF, THINK_ON, THINK_MAX } think_mode;

typedef struct {
    const char *name, *value;
    bool is_string;
} chat_argument; /* value: the string, or JSON of what is none */
typedef struct {
    const char *name;
    const chat_argument *arguments;
    size_t n_arguments;
} chat_call;

typedef struct {
    const char *role; /* system, user, developer, assistant or tool */
    const char *content; /* NULL: empty */
    const char *reasoning; /* assistant: what it thought before it answered; NULL: nothing */
    const char *tools; /* any role, usually system: the schemas of the tools on offer, one JSON object a line; NULL: none */
    const chat_call *calls; /* assistant: the tools it called */
    size_t n_calls;
} chat_message;

/* The format's own texts. In them \1, \2 and \3 stand for the tokens <think>, </think> and ｜DSML｜. */
static const char effort_text[] =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, "
    "and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";
/* The July 2026 checkpoint was trained with a stronger one for its maximum; its template holds it. */
static const char effort_text_0731[] =
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause "
    "rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no "
    "assumption remains unchecked and no error remains undiscovered.\n\n";
static const char tools_head[] =
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by writing a "
    "\"<\3tool_calls>\" block like the following:\n\n"
    "<\3tool_calls>\n<\3invoke name=\"$TOOL_NAME\">\n"
    "<\3parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</\3parameter>\n...\n</\3invoke>\n"
    "<\3invoke name=\"$TOOL_NAME2\">\n...\n</\3invoke>\n</\3tool_calls>\n\n"
    "String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, arrays, "
    "objects), pass the value in JSON format and set `string=\"false\"`.\n\n"
    "If thinking_mode is enabled (triggered by \1), you MUST output your complete reasoning inside \1...\2 BEFORE any tool "
    "calls or final response.\n\nOtherwise, output directly after \2 with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n";
static const char tools_tail[] =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";

static bool str_has(str s, const char *word) {
    size_t n = strlen(word);
    for (size_t i = 0; s.p && n <= s.n && i <= s.n - n; i++)
        if (!memcmp(s.p + i, word, n)) return true;
    return false;
}

/* What kind of chat template the file carries, for messages: "DeepSeek-V4" is the one that tok_chat writes. */
static const char *tok_template_kind(const tokenizer *t) {
    static const char *const other[][2] = {
        {"<｜tool▁calls▁begin｜>", "DeepSeek-V3"},
        {"function_calls>", "DeepSeek-V3.2"},
        {"<|im_start|>", "ChatML"},
        {"<|start_header_id|>", "Llama 3"},
        {"[INST]", "Llama 2 or Mistral"},
        {"<start_of_turn>", "Gemma"},
        {"<|channel|>", "Harmony"},
    };
    if (!t->chat_template.p) return "none";
    for (size_t i = 0; i < sizeof other / sizeof *other; i++)
        if (str_has(t->chat_template, other[i][0])) return other[i][1];
    for (int i = MARK_USER; i <= MARK_END_THINK; i++)
        if (i != MARK_THINK && !str_has(t->chat_template, chat_marker_text[i])) return "unknown";
    return "DeepSeek-V4";
}

static bool tok_template_is_v4(const tokenizer *t) { return !strcmp(tok_template_kind(t), "DeepSeek-V4"); }

/* Text is gathered up to the next control token and encoded as one stretch, as it would be were the whole chat one string. */
typedef struct {
    const tokenizer *t;
    ids *out;
    char *text;
    size_t n, cap;
} chat_writer;

static int chat_put(chat_writer *w, const char *s, size_t n) {
    if (n > SIZE_MAX / 4 - w->n) return fail("a chat message is too long");
    if (w->n + n > w->cap) {
        size_t cap = (w->n + n) * 2;
        char *text = mem_grow(w->text, w->cap, cap);
        if (!text) return -1;
        w->text = text;
        w->cap = cap;
    }
    if (n) memcpy(w->text + w->n, s, n);
    w->n += n;
    return 0;
}

static int chat_text(chat_writer *w, const char *s) { return s ? chat_put(w, s, strlen(s)) : 0; }

static int chat_token(chat_writer *w, int32_t id) {
    if (tok_encode(w->t, w->text, w->n, false, w->out)) return -1;
    w->n = 0;
    return ids_push(w->out, id);
}

static int chat_mark(chat_writer *w, int mark) {
    if (w->t->mark[mark] >= 0) return chat_token(w, w->t->mark[mark]);
    if (mark == MARK_DSML) return chat_text(w, chat_marker_text[mark]); /* a vocabulary without it spells it */
    return fail("the vocabulary has no token %s, which the chat format needs", chat_marker_text[mark]);
}

/* One of the format's own texts. */
static int chat_literal(chat_writer *w, const char *s) {
    for (size_t n; *s; s += n) {
        n = 1;
        if ((unsigned char)*s <= 3 ? chat_mark(w, *s == 1   ? MARK_THINK
                                                  : *s == 2 ? MARK_END_THINK
                                                            : MARK_DSML)
                                   : chat_put(w, s, n = strcspn(s, "\1\2\3")))
            return -1;
    }
    return 0;
}

static int chat_calls(chat_writer *w, const chat_message *m) {
    if (!m->n_calls) return 0;
    if (chat_literal(w, "\n\n<\3tool_calls>\n")) return -1;
    for (size_t i = 0; i < m->n_calls; i++) {
        const chat_call *c = &m->calls[i];
        if (chat_literal(w, "<\3invoke name=\"") || chat_text(w, c->name) || chat_literal(w, "\">\n")) return -1;
        for (size_t k = 0; k < c->n_arguments; k++) {
            const chat_argument *a = &c->arguments[k];
            if (chat_literal(w, k ? "\n<\3parameter name=\"" : "<\3parameter name=\"") || chat_text(w, a->name) ||
                chat_literal(w, a->is_string ? "\" string=\"true\">" : "\" string=\"false\">") || chat_text(w, a->value) ||
                chat_literal(w, "</\3parameter>"))
                return -1;
        }
        if (chat_literal(w, "\n</\3invoke>\n")) return -1;
    }
    return chat_literal(w, "</\3tool_calls>");
}

static int chat_system(chat_writer *w, const chat_message *m, size_t n) {
    bool empty = true;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(m[i].role, "system")) continue;
        if (chat_text(w, empty ? "" : "\n\n") || chat_text(w, m[i].content)) return -1;
        empty = false;
    }
    for (size_t i = 0; i < n; i++) {
        if (!m[i].tools) continue;
        if (chat_text(w, empty ? "" : "\n\n") || chat_literal(w, tools_head)) return -1;
        if (chat_text(w, m[i].tools) || chat_text(w, tools_tail)) return -1;
        empty = false;
    }
    return 0;
}

static int chat_assistant(chat_writer *w, const chat_message *m, bool with_reasoning) {
    if (chat_mark(w, MARK_ASSISTANT)) return -1;
    if (with_reasoning && (chat_mark(w, MARK_THINK) || chat_text(w, m->reasoning))) return -1;
    if (chat_mark(w, MARK_END_THINK) || chat_text(w, m->content) || chat_calls(w, m)) return -1;
    if (w->t->eos < 0) return fail("the file names no EOS token, which ends an assistant's turn");
    return chat_token(w, w->t->eos);
}

static int chat_turns(chat_writer *w, const chat_message *m, size_t n, think_mode think) {
    bool in_user = false, tools = false;
    size_t last_user = 0; /* one past its index; what follows keeps its reasoning, and where there are tools, everything does */
    for (size_t i = 0; i < n; i++) {
        tools = tools || !strcmp(m[i].role, "tool") || m[i].tools || m[i].n_calls;
        if (!strcmp(m[i].role, "user") || !strcmp(m[i].role, "developer")) last_user = i + 1;
    }
    for (size_t i = 0; i < n; i++) {
        if (!strcmp(m[i].role, "system")) continue;
        if (!strcmp(m[i].role, "assistant")) {
            if (chat_assistant(w, &m[i], think != THINK_OFF && (tools || i >= last_user))) return -1;
            in_user = false;
            continue;
        }
        bool is_tool = !strcmp(m[i].role, "tool");
        if (in_user ? chat_text(w, "\n\n") : chat_mark(w, MARK_USER)) return -1;
        if (chat_text(w, is_tool ? "<tool_result>" : "") || chat_text(w, m[i].content)) return -1;
        if (is_tool && chat_text(w, "</tool_result>")) return -1;
        in_user = true;
    }
    return 0;
}

static int chat_check(const chat_message *m, size_t n) {
    static const char *const known[] = {"system", "user", "developer", "assistant", "tool"};
    for (size_t i = 0; i < n; i++) {
        bool found = false;
        for (size_t k = 0; m[i].role && k < sizeof known / sizeof *known; k++) found = found || !strcmp(m[i].role, known[k]);
        if (!found)
            return fail("message %zu has the role \"%.64s\"; expected system, user, developer, assistant or tool", i,
                        m[i].role ? m[i].role : "");
    }
    return 0;
}

static int chat_render(chat_writer *w, const chat_message *m, size_t n, think_mode think, bool add_generation_prompt) {
    const tokenizer *t = w->t;
    if (chat_check(m, n)) return -1;
    if (t->bos >= 0 && chat_token(w, t->bos)) return -1;
    if (!t->chat_template.p) { /* a base model knows no turns */
        for (size_t i = 0; i < n; i++)
            if (chat_text(w, i ? "\n\n" : "") || chat_text(w, m[i].content)) return -1;
        return 0;
    }
    const char *effort = str_has(t->chat_template, "Beyond maximum") ? effort_text_0731 : effort_text;
    if (think == THINK_MAX && chat_text(w, effort)) return -1;
    if (chat_system(w, m, n) || chat_turns(w, m, n, think)) return -1;
    if (!add_generation_prompt) return 0;
    return chat_mark(w, MARK_ASSISTANT) || chat_mark(w, think == THINK_OFF ? MARK_END_THINK : MARK_THINK) ? -1 : 0;
}

/* Appends the tokens of a conversation in the V4 format: one BOS, the system texts, the turns, and with
 * add_generation_prompt the opening of the answer. A file without a chat template is a base model: BOS and the texts, a
 * blank line between them. Nothing in a message becomes a control token. On failure out is as it was. */
static int tok_chat(const tokenizer *t, const chat_message *m, size_t n, think_mode think, bool add_generation_prompt,
                    ids *out) {
    chat_writer w = {t, out, NULL, 0, 0};
    size_t had = out->n;
    int rc = chat_render(&w, m, n, think, add_generation_prompt);
    if (!rc) rc = tok_encode(t, w.text, w.n, false, out);
    mem_free(w.text);
    if (rc) out->n = had;
    return rc;
}

/* ============================================================================================================================
 * 6. Model: sizes, weights, checks
 *
 * Three plain structs: config (every size, from the file), layer and weights (pointers into the mapped file). After
 * model_load every shape and type is known to fit, so that nothing below checks again. Facts: the DeepSeek-V4 configuration
 * and the GGUF files made of it.
 * ========================================================================================================================== */

/* Far above any real model. What no tensor's size confirms is bounded so that a small file cannot ask for much memory or time. */
enum {
    MAX_LAYERS = 512,
    MAX_STREAMS = 16,
    MAX_USED = 64,
    MAX_EXPERTS = 4096,
    MAX_SINKHORN = 100,
    MAX_RATIO = 1024,
    MAX_VOCAB = 1 << 20,
    MAX_WIDTH = 1 << 24,
    MAX_UNPACKED = 32 << 20
};

typedef struct {
    int n_layers, dim, n_vocab, n_streams, n_heads, head_dim, rope_dim, q_rank, o_groups, o_rank, window;
    int n_experts, n_used, n_shared, n_hash, sinkhorn, context_length;
    int index_heads, index_dim, index_top_k;
    int ratio[MAX_LAYERS + 1], expert_ff[MAX_LAYERS + 1]; /* the last entry in use is the head's */
    float clamp[MAX_LAYERS + 1], clamp_shared[MAX_LAYERS + 1];
    float norm_eps, hc_eps, expert_scale;
    bool expert_norm;
    double rope_base, rope_base_compressed, yarn_factor, yarn_original, yarn_fast, yarn_slow;
} config;

typedef struct {
    const uint8_t *data;
    uint32_t type;
    act_kind act;
    int64_t n_in, n_out;
    size_t bytes; /* of a row of n_in weights */
    size_t stride; /* from one row to the next */
    size_t slab; /* bytes of one expert's matrix */
} matrix;

typedef struct {
    matrix fn; /* (n_streams * dim, n_streams * (2 + n_streams)); the head's: (n_streams * dim, n_streams) */
    float *base, *scale; /* (n_streams * (2 + n_streams),), (3,); the head's (n_streams,), (1,) */
} hyper;

typedef struct {
    int parts, width; /* c, and the width of an emitted row */
    matrix kv, gate; /* (dim, c * width) */
    float *ape; /* (c * width, ratio) */
    float *norm; /* (width,) */
} compressor;

typedef struct {
    int ratio, ff, shared_ff;
    float clamp, clamp_shared;
    hyper hc_attn, hc_ffn;
    float *attn_norm; /* (dim,) */
    matrix q_a; /* (dim, q_rank) */
    float *q_a_norm; /* (q_rank,) */
    matrix q_b; /* (q_rank, n_heads * head_dim) */
    matrix kv; /* (dim, head_dim) */
    float *kv_norm; /* (head_dim,) */
    float *sinks; /* (n_heads,) */
    matrix o_a; /* (n_heads * head_dim / o_groups, o_groups * o_rank) */
    matrix o_b; /* (o_groups * o_rank, dim) */
    compressor comp; /* ratio > 0 */
    compressor index; /* ratio = 4 */
    matrix index_q; /* (q_rank, index_heads * index_dim) */
    matrix index_w; /* (dim, index_heads) */
    float *ffn_norm; /* (dim,) */
    matrix router; /* (dim, n_experts) */
    float *router_bias; /* (n_experts,), or NULL in a hash layer */
    const int32_t *hash; /* (n_used, n_vocab), or NULL */
    matrix gate, up; /* (dim, ff, n_experts) */
    matrix down; /* (ff, dim, n_experts) */
    matrix shared_gate, shared_up; /* (dim, shared_ff) */
    matrix shared_down; /* (shared_ff, dim) */
} layer;

typedef struct {
    layer block;
    matrix e_proj, h_proj; /* (dim, dim) */
    float *enorm, *hnorm, *norm; /* (dim,) */
    hyper collapse;
} mtp_head;

typedef struct {
    gguf *file, *head_file; /* head_file NULL: no head, or inside file */
    config c;
    matrix embed, output; /* (dim, n_vocab) */
    float *output_norm; /* (dim,) */
    hyper collapse;
    layer *layers;
    mtp_head head;
    bool has_head, file_has_head;
    float *owned[MAX_LAYERS * 24 + 64]; /* small tensors, unpacked to f32 */
    int n_owned;
    int64_t owned_bytes, unpacked; /* unpacked: what owned has beyond twice what its tensors have in the file */
    int64_t weight_bytes, head_weight_bytes, *counting;
    uint64_t identity; /* of the target: sizes, tensors and a sample of their bytes */
    uint64_t head_identity;
    double *freq, *freq_compressed; /* (rope_dim / 2,) radians a position */
} model;

/* ---- reading metadata ---- */

#define ARCH "deepseek4."

static const meta *arch_meta(const gguf *g, const char *key) {
    char full[128];
    snprintf(full, sizeof full, ARCH "%s", key);
    return gguf_meta(g, full);
}

/* Element i of a key; an array shorter than that gives its last element, a scalar its value. */
static int number_at(const gguf *g, const char *key, int i, double low, double high, double *out) {
    const meta *m = arch_meta(g, key);
    if (!m) return fail("%s: key " ARCH "%s is missing", g->path, key);
    if (!meta_is_number(m) || m->count == 0) return fail("%s: key " ARCH "%s: expected a number", g->path, key);
    double v = meta_number(m, (uint64_t)i < m->count ? (uint64_t)i : m->count - 1);
    if (!(v >= low && v <= high)) return fail("%s: key " ARCH "%s is %g; expected %g to %g", g->path, key, v, low, high);
    *out = v;
    return 0;
}

static int read_int(const gguf *g, const char *key, int low, int high, int *out) {
    double v;
    if (number_at(g, key, 0, low, high, &v)) return -1;
    if (v != (double)(int)v) return fail("%s: key " ARCH "%s is %g; expected a whole number", g->path, key, v);
    *out = (int)v;
    return 0;
}

static int read_int_or(const gguf *g, const char *key, int low, int high, int otherwise, int *out) {
    *out = otherwise;
    return arch_meta(g, key) ? read_int(g, key, low, high, out) : 0;
}

static int read_float(const gguf *g, const char *key, double low, double high, double *out) {
    return number_at(g, key, 0, low, high, out);
}

static int read_float_or(const gguf *g, const char *key, double low, double high, double otherwise, double *out) {
    *out = otherwise;
    return arch_meta(g, key) ? read_float(g, key, low, high, out) : 0;
}

static int read_rope(const gguf *g, config *c) {
    str type = meta_string(g, ARCH "rope.scaling.type");
    c->yarn_factor = 1;
    c->yarn_original = c->context_length;
    c->yarn_fast = 32;
    c->yarn_slow = 1;
    if (read_float(g, "rope.freq_base", 2, 1e12, &c->rope_base) ||
        read_float_or(g, "attention.compress_rope_freq_base", 2, 1e12, c->rope_base, &c->rope_base_compressed))
        return -1;
    if (type.p && !str_is(type, "yarn") && !str_is(type, "none"))
        return fail("%s: key " ARCH "rope.scaling.type is %.*s; expected yarn or none", g->path, STR_ARG(type));
    if (!type.p || str_is(type, "none")) return 0;
    return read_float(g, "rope.scaling.factor", 1, 1e6, &c->yarn_factor) ||
                   read_float(g, "rope.scaling.original_context_length", 1, 1e9, &c->yarn_original) ||
                   read_float_or(g, "rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32, &c->yarn_fast) ||
                   read_float_or(g, "rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1, &c->yarn_slow)
               ? -1
               : 0;
}

static int read_experts(const gguf *g, config *c) {
    const meta *gating = arch_meta(g, "expert_gating_func"), *norm = arch_meta(g, "expert_weights_norm");
    if (gating && !gating->array && gating->type == G_STRING) {
        str name = meta_string(g, ARCH "expert_gating_func");
        if (!str_is(name, "sqrtsoftplus") && !str_is(name, "sqrt_softplus") && !str_is(name, "sqrt-softplus"))
            return fail("%s: key " ARCH "expert_gating_func is %.*s; expected sqrtsoftplus", g->path, STR_ARG(name));
    } else if (gating && (gating->array || !meta_is_number(gating) || meta_number(gating, 0) != 4))
        return fail("%s: key " ARCH "expert_gating_func: expected 4 (sqrt-softplus)", g->path);
    c->expert_norm = !norm || !meta_is_number(norm) || norm->array || meta_number(norm, 0) != 0;
    double scale;
    if (read_int(g, "expert_count", 1, MAX_EXPERTS, &c->n_experts) ||
        read_int(g, "expert_used_count", 1, min_int(c->n_experts, MAX_USED), &c->n_used) ||
        read_int_or(g, "expert_shared_count", 1, 64, 1, &c->n_shared) ||
        read_int_or(g, "hash_layer_count", 0, MAX_LAYERS, 0, &c->n_hash) ||
        read_float_or(g, "expert_weights_scale", 0, 1e6, 1, &scale))
        return -1;
    c->expert_scale = (float)scale;
    for (int i = 0; i <= c->n_layers; i++) {
        double ff, ratio, clamp = 0, clamp_shared;
        if (number_at(g, "expert_feed_forward_length", i, 1, 1 << 24, &ff) ||
            number_at(g, "attention.compress_ratios", i, 0, MAX_RATIO, &ratio))
            return -1;
        if (arch_meta(g, "swiglu_clamp_exp") && number_at(g, "swiglu_clamp_exp", i, 0, 1e30, &clamp)) return -1;
        clamp_shared = clamp;
        if (arch_meta(g, "swiglu_clamp_shexp") && number_at(g, "swiglu_clamp_shexp", i, 0, 1e30, &clamp_shared)) return -1;
        c->expert_ff[i] = (int)ff;
        c->ratio[i] = (int)ratio;
        c->clamp[i] = clamp > 0 ? (float)clamp : INFINITY;
        c->clamp_shared[i] = clamp_shared > 0 ? (float)clamp_shared : INFINITY;
    }
    const meta *ratios = arch_meta(g, "attention.compress_ratios");
    if (ratios->array && ratios->count < (uint64_t)c->n_layers)
        return fail("%s: key " ARCH "attention.compress_ratios has %llu entries; expected one for each of %d layers", g->path,
                    (unsigned long long)ratios->count, c->n_layers);
    c->ratio[c->n_layers] = 0;
    return 0;
}

static int read_config(const gguf *g, config *c, int n_layers) {
    double eps, hc_eps;
    c->n_layers = n_layers;
    int kv_heads, value_dim;
    if (read_int(g, "embedding_length", 1, 1 << 20, &c->dim) || read_int(g, "attention.head_count", 1, 65536, &c->n_heads) ||
        read_int_or(g, "attention.head_count_kv", 1, 1, 1, &kv_heads) ||
        read_int(g, "attention.key_length", 1, 65536, &c->head_dim) ||
        read_int_or(g, "attention.value_length", c->head_dim, c->head_dim, c->head_dim, &value_dim) ||
        read_int(g, "rope.dimension_count", 2, c->head_dim, &c->rope_dim) ||
        read_int(g, "attention.q_lora_rank", 1, 1 << 20, &c->q_rank) ||
        read_int(g, "attention.output_group_count", 1, c->n_heads, &c->o_groups) ||
        read_int(g, "attention.output_lora_rank", 1, 1 << 20, &c->o_rank) ||
        read_int(g, "attention.sliding_window", 1, 1 << 20, &c->window) ||
        read_int(g, "hyper_connection.count", 1, MAX_STREAMS, &c->n_streams) ||
        read_int(g, "hyper_connection.sinkhorn_iterations", 1, MAX_SINKHORN, &c->sinkhorn) ||
        read_float(g, "hyper_connection.epsilon", 0, 1, &hc_eps) ||
        read_float(g, "attention.layer_norm_rms_epsilon", 0, 1, &eps) ||
        read_int(g, "context_length", 1, 1 << 30, &c->context_length) || read_rope(g, c) || read_experts(g, c))
        return -1;
    c->norm_eps = (float)eps;
    c->hc_eps = (float)hc_eps;
    if (c->rope_dim % 2)
        return fail("%s: key " ARCH "rope.dimension_count is %d; expected an even number", g->path, c->rope_dim);
    if (c->n_heads % c->o_groups)
        return fail("%s: key " ARCH "attention.output_group_count is %d; expected a divisor of %d heads", g->path, c->o_groups,
                    c->n_heads);
    bool indexed = false;
    for (int i = 0; i < n_layers; i++) indexed |= c->ratio[i] == 4;
    if (indexed && (read_int(g, "attention.indexer.head_count", 1, 65536, &c->index_heads) ||
                    read_int(g, "attention.indexer.key_length", c->rope_dim, 65536, &c->index_dim) ||
                    read_int(g, "attention.indexer.top_k", 1, 1 << 24, &c->index_top_k)))
        return -1;
    const struct {
        int64_t size;
        const char *what;
    } widths[] = {{(int64_t)c->n_heads * c->head_dim, "attention.head_count times attention.key_length"},
                  {(int64_t)c->o_groups * c->o_rank, "attention.output_group_count times attention.output_lora_rank"},
                  {(int64_t)c->index_heads * c->index_dim, "attention.indexer.head_count times its key_length"}};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        if (widths[i].size > MAX_WIDTH)
            return fail("%s: keys " ARCH "%s: %lld; expected at most %d", g->path, widths[i].what, (long long)widths[i].size,
                        MAX_WIDTH);
    const tensor *embed = gguf_tensor(g, "token_embd.weight");
    if (!embed) return fail("%s: tensor token_embd.weight is missing", g->path);
    if (embed->dims[1] > MAX_VOCAB)
        return fail("%s: tensor token_embd.weight: %lld rows, expected at most %d", g->path, (long long)embed->dims[1],
                    MAX_VOCAB);
    return read_int_or(g, "vocab_size", 1, MAX_VOCAB, (int)embed->dims[1], &c->n_vocab);
}

/* ---- reading tensors ---- */

typedef struct {
    model *m;
    const gguf *g;
    const char *prefix; /* "blk.3.", "mtp.0.", "" */
} reader;

static const tensor *read_tensor(reader r, const char *name, int64_t d0, int64_t d1, int64_t d2) {
    char full[160];
    snprintf(full, sizeof full, "%s%s", r.prefix, name);
    const tensor *t = gguf_tensor(r.g, full);
    if (!t) {
        fail("%s: tensor %s is missing", r.g->path, full);
        return NULL;
    }
    bool flat = t->dims[0] == d0 && t->dims[1] * t->dims[2] * t->dims[3] == d1 * d2;
    bool deep = d2 == 1 || (t->dims[1] == d1 && t->dims[2] == d2);
    if (!flat || !deep) {
        fail("%s: tensor %s has shape {%lld, %lld, %lld}, expected {%lld, %lld, %lld}", r.g->path, full, (long long)t->dims[0],
             (long long)t->dims[1], (long long)t->dims[2] * (long long)t->dims[3], (long long)d0, (long long)d1, (long long)d2);
        return NULL;
    }
    *r.m->counting += (int64_t)t->bytes;
    return t;
}

/* A matrix (or, with n_experts > 1, as many of them) used where it lies in the file. */
static int read_matrix(reader r, const char *name, int64_t n_in, int64_t n_out, int64_t n_experts, matrix *out) {
    const tensor *t = read_tensor(r, name, n_in, n_out, n_experts);
    if (!t) return -1;
    const type_info *type = type_find(t->type);
    if (!type || t->type == T_I32)
        return fail("%s: tensor %s%s has type %s, which ds4 does not read (it reads F32 F16 BF16 Q8_0 Q4_0 Q4_K Q5_K Q6_K Q3_K "
                    "Q2_K IQ2_XXS MXFP4)",
                    r.g->path, r.prefix, name, type_name(t->type));
    size_t stride = (size_t)type_row_bytes(t->type, n_in);
    *out = (matrix){t->data, t->type, type->act, n_in, n_out, stride, stride, stride * (size_t)n_out};
    return 0;
}

/* A small tensor as float32 of the engine's own. */
static int read_floats(reader r, const char *name, int64_t d0, int64_t d1, float **out) {
    matrix w;
    if (read_matrix(r, name, d0, d1, 1, &w)) return -1;
    r.m->unpacked += d1 * (d0 * (int64_t)sizeof(float) - 2 * (int64_t)w.stride);
    if (r.m->unpacked > MAX_UNPACKED)
        return fail("%s: tensor %s%s has type %s and is too large for that; expected F32 or F16", r.g->path, r.prefix, name,
                    type_name(w.type));
    float *values = mem_array((size_t)(d0 * d1), sizeof *values);
    if (!values) return -1;
    r.m->owned[r.m->n_owned++] = values;
    r.m->owned_bytes += d0 * d1 * (int64_t)sizeof *values;
    const kernels *k = kernels_named("scalar");
    for (int64_t i = 0; i < d1; i++) k->dequantise(w.type, d0, w.data + (size_t)i * w.stride, values + i * d0);
    *out = values;
    return 0;
}

static int read_hyper(reader r, const char *name, bool collapse, hyper *out) {
    const config *c = &r.m->c;
    char fn[64], base[64], scale[64];
    snprintf(fn, sizeof fn, "%sfn.weight", name);
    snprintf(base, sizeof base, "%sbase.weight", name);
    snprintf(scale, sizeof scale, "%sscale.weight", name);
    int n = c->n_streams, mixes = collapse ? n : n * (2 + n);
    return read_matrix(r, fn, (int64_t)n * c->dim, mixes, 1, &out->fn) || read_floats(r, base, mixes, 1, &out->base) ||
                   read_floats(r, scale, collapse ? 1 : 3, 1, &out->scale)
               ? -1
               : 0;
}

static int read_compressor(reader r, const char *name, int ratio, int width, compressor *out) {
    const config *c = &r.m->c;
    char kv[64], gate[64], ape[64], norm[64];
    snprintf(kv, sizeof kv, "%s_kv.weight", name);
    snprintf(gate, sizeof gate, "%s_gate.weight", name);
    snprintf(ape, sizeof ape, "%s_ape.weight", name);
    snprintf(norm, sizeof norm, "%s_norm.weight", name);
    out->parts = ratio == 4 ? 2 : 1;
    out->width = width;
    int64_t channels = (int64_t)out->parts * width;
    return read_matrix(r, kv, c->dim, channels, 1, &out->kv) || read_matrix(r, gate, c->dim, channels, 1, &out->gate) ||
                   read_floats(r, ape, channels, ratio, &out->ape) || read_floats(r, norm, width, 1, &out->norm)
               ? -1
               : 0;
}

static int read_attention(reader r, layer *l) {
    const config *c = &r.m->c;
    int64_t heads = (int64_t)c->n_heads * c->head_dim, lows = (int64_t)c->o_groups * c->o_rank;
    if (read_hyper(r, "hc_attn_", false, &l->hc_attn) || read_floats(r, "attn_norm.weight", c->dim, 1, &l->attn_norm) ||
        read_matrix(r, "attn_q_a.weight", c->dim, c->q_rank, 1, &l->q_a) ||
        read_floats(r, "attn_q_a_norm.weight", c->q_rank, 1, &l->q_a_norm) ||
        read_matrix(r, "attn_q_b.weight", c->q_rank, heads, 1, &l->q_b) ||
        read_matrix(r, "attn_kv.weight", c->dim, c->head_dim, 1, &l->kv) ||
        read_floats(r, "attn_kv_a_norm.weight", c->head_dim, 1, &l->kv_norm) ||
        read_floats(r, "attn_sinks.weight", c->n_heads, 1, &l->sinks) ||
        read_matrix(r, "attn_output_a.weight", heads / c->o_groups, lows, 1, &l->o_a) ||
        read_matrix(r, "attn_output_b.weight", lows, c->dim, 1, &l->o_b))
        return -1;
    if (l->ratio > 0 && read_compressor(r, "attn_compressor", l->ratio, c->head_dim, &l->comp)) return -1;
    if (l->ratio != 4) return 0;
    return read_compressor(r, "indexer_compressor", 4, c->index_dim, &l->index) ||
                   read_matrix(r, "indexer.attn_q_b.weight", c->q_rank, (int64_t)c->index_heads * c->index_dim, 1,
                               &l->index_q) ||
                   read_matrix(r, "indexer.proj.weight", c->dim, c->index_heads, 1, &l->index_w)
               ? -1
               : 0;
}

static int read_hash(reader r, layer *l) {
    const config *c = &r.m->c;
    const tensor *t = read_tensor(r, "ffn_gate_tid2eid.weight", c->n_used, c->n_vocab, 1);
    if (!t) return -1;
    if (t->type != T_I32)
        return fail("%s: tensor %sffn_gate_tid2eid.weight has type %s, expected I32", r.g->path, r.prefix, type_name(t->type));
    l->hash = (const int32_t *)(const void *)t->data;
    for (int64_t i = 0; i < (int64_t)c->n_used * c->n_vocab; i++)
        if (l->hash[i] < 0 || l->hash[i] >= c->n_experts)
            return fail("%s: tensor %sffn_gate_tid2eid.weight: token %lld goes to expert %d, there are %d", r.g->path, r.prefix,
                        (long long)(i / c->n_used), l->hash[i], c->n_experts);
    return 0;
}

/* Block i of the target, or the head's (i = n_layers). */
static int read_layer(reader r, int i, layer *l) {
    const config *c = &r.m->c;
    l->ratio = c->ratio[i];
    l->clamp = c->clamp[i];
    l->clamp_shared = c->clamp_shared[i];
    l->ff = c->expert_ff[i];
    l->shared_ff = l->ff * c->n_shared;
    if (read_attention(r, l) || read_hyper(r, "hc_ffn_", false, &l->hc_ffn) ||
        read_floats(r, "ffn_norm.weight", c->dim, 1, &l->ffn_norm) ||
        read_matrix(r, "ffn_gate_inp.weight", c->dim, c->n_experts, 1, &l->router) ||
        read_matrix(r, "ffn_gate_exps.weight", c->dim, l->ff, c->n_experts, &l->gate) ||
        read_matrix(r, "ffn_up_exps.weight", c->dim, l->ff, c->n_experts, &l->up) ||
        read_matrix(r, "ffn_down_exps.weight", l->ff, c->dim, c->n_experts, &l->down) ||
        read_matrix(r, "ffn_gate_shexp.weight", c->dim, l->shared_ff, 1, &l->shared_gate) ||
        read_matrix(r, "ffn_up_shexp.weight", c->dim, l->shared_ff, 1, &l->shared_up) ||
        read_matrix(r, "ffn_down_shexp.weight", l->shared_ff, c->dim, 1, &l->shared_down))
        return -1;
    return i < c->n_hash && i < c->n_layers ? read_hash(r, l)
                                            : read_floats(r, "exp_probs_b.bias", c->n_experts, 1, &l->router_bias);
}

/* ---- target ---- */

/* How many blocks the file's block_count says, and whether the last one is a head: the tensors decide, not the key. */
static int count_layers(const gguf *g, int *n_layers, bool *has_head) {
    int blocks;
    char name[64];
    if (read_int(g, "block_count", 1, MAX_LAYERS, &blocks)) return -1;
    *has_head = false;
    for (int i = max_int(0, blocks - 1); i <= blocks; i++) {
        snprintf(name, sizeof name, "blk.%d.nextn.enorm.weight", i);
        if (!gguf_tensor(g, name)) continue;
        *has_head = true;
        *n_layers = i;
        return 0;
    }
    *n_layers = blocks;
    return 0;
}

static bool is_dspark(const gguf *g, str arch) {
    return str_is(arch, "deepseek4-dspark") || str_is(arch, "dflash") || gguf_tensor(g, "mtp.0.main_proj.weight") ||
           gguf_tensor(g, "mtp.2.markov_head.weight") || gguf_tensor(g, "mtp.2.confidence_head.weight") ||
           gguf_tensor(g, "mtp.2.markov_head.markov_w1.weight") || gguf_tensor(g, "mtp.2.confidence_head.proj.weight");
}

static int check_target_arch(const gguf *g) {
    str arch = meta_string(g, "general.architecture");
    if (!arch.p) return fail("%s: key general.architecture is missing", g->path);
    if (is_dspark(g, arch))
        return fail("%s: holds a DSpark drafter, which ds4 does not read; expected a target of architecture deepseek4",
                    g->path);
    if (str_is(arch, "deepseek4_mtp_support"))
        return fail("%s: is an MTP head (architecture deepseek4_mtp_support), not a target; give it as the head", g->path);
    if (!str_is(arch, "deepseek4")) return fail("%s: architecture is %.*s; expected deepseek4", g->path, STR_ARG(arch));
    if (!gguf_tensor(g, "blk.0.attn_norm.weight")) {
        int layers;
        bool head = false;
        if (count_layers(g, &layers, &head)) return -1;
        return head ? fail("%s: holds an MTP head only, not a target; give it as the head", g->path)
                    : fail("%s: tensor blk.0.attn_norm.weight is missing", g->path);
    }
    return 0;
}

/* Sizes, names and types of every tensor, and bytes from the middle of each: enough to tell two models apart at once. */
static uint64_t file_identity(const gguf *g) {
    uint64_t h = 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        const tensor *t = &g->tensors[i];
        h = checksum(h, t->name.p, t->name.n);
        h = checksum(h, t->dims, sizeof t->dims);
        h = checksum(h, &t->type, sizeof t->type);
        size_t sample = t->bytes < 256 ? (size_t)t->bytes : 256;
        h = checksum(h, t->data + (t->bytes - sample) / 2, sample);
    }
    for (size_t i = 0; i < g->n_metas; i++)
        if (!str_is(g->metas[i].key, "general.name"))
            h = checksum(checksum(h, g->metas[i].key.p, g->metas[i].key.n), g->metas[i].value,
                         (size_t)(g->metas[i].end - g->metas[i].value));
    return h;
}

/* Radians a position of pair i, plain and for compressed layers with YaRN. */
static int model_rope(model *m) {
    const config *c = &m->c;
    int pairs = c->rope_dim / 2;
    m->freq = mem_array((size_t)pairs, sizeof(double));
    m->freq_compressed = mem_array((size_t)pairs, sizeof(double));
    if (!m->freq || !m->freq_compressed) return -1;
    double ln_base = d_log(c->rope_base_compressed), two_pi = 6.283185307179586476925;
    double low = floor(c->rope_dim * d_log(c->yarn_original / (c->yarn_fast * two_pi)) / (2 * ln_base));
    double high = ceil(c->rope_dim * d_log(c->yarn_original / (c->yarn_slow * two_pi)) / (2 * ln_base));
    if (low < 0) low = 0;
    if (high > c->rope_dim - 1) high = c->rope_dim - 1;
    double span = high - low > 0.001 ? high - low : 0.001;
    for (int i = 0; i < pairs; i++) {
        m->freq[i] = d_exp(-2.0 * i / c->rope_dim * d_log(c->rope_base));
        double f = d_exp(-2.0 * i / c->rope_dim * ln_base), ramp = (i - low) / span;
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        m->freq_compressed[i] = f * (1 - ramp) + f / c->yarn_factor * ramp;
    }
    return 0;
}

static int load_target(model *m) {
    const gguf *g = m->file;
    int n_layers = 0;
    if (check_target_arch(g) || count_layers(g, &n_layers, &m->file_has_head)) return -1;
    if (n_layers == 0) return fail("%s: holds an MTP head only, not a target; give it as the head", g->path);
    if (read_config(g, &m->c, n_layers)) return -1;
    const config *c = &m->c;
    m->counting = &m->weight_bytes;
    reader r = {m, g, ""};
    m->layers = mem_array((size_t)n_layers, sizeof *m->layers);
    if (!m->layers || model_rope(m) || read_matrix(r, "token_embd.weight", c->dim, c->n_vocab, 1, &m->embed)) return -1;
    if (!gguf_tensor(g, "output.weight")) m->output = m->embed;
    else if (read_matrix(r, "output.weight", c->dim, c->n_vocab, 1, &m->output)) return -1;
    if (read_floats(r, "output_norm.weight", c->dim, 1, &m->output_norm) || read_hyper(r, "output_hc_", true, &m->collapse))
        return -1;
    for (int i = 0; i < n_layers; i++) {
        char prefix[32];
        snprintf(prefix, sizeof prefix, "blk.%d.", i);
        r.prefix = prefix;
        if (read_layer(r, i, &m->layers[i])) return -1;
    }
    m->identity = file_identity(g);
    return 0;
}

/* ---- head ---- */

/* Where a head's file states sizes, they must be the target's; its tokens too. */
static int check_same_sizes(const model *m, const gguf *h) {
    static const struct {
        const char *key;
        size_t at;
        const char *what;
    } sizes[] = {{"embedding_length", offsetof(config, dim), "width"},
                 {"hyper_connection.count", offsetof(config, n_streams), "streams"},
                 {"vocab_size", offsetof(config, n_vocab), "vocabulary"},
                 {"attention.head_count", offsetof(config, n_heads), "attention heads"},
                 {"attention.key_length", offsetof(config, head_dim), "head width"},
                 {"expert_count", offsetof(config, n_experts), "experts"},
                 {"expert_used_count", offsetof(config, n_used), "experts used"}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int expected = *(const int *)(const void *)((const char *)&m->c + sizes[i].at), got;
        if (read_int_or(h, sizes[i].key, INT_MIN, INT_MAX, expected, &got)) return -1;
        if (got != expected)
            return fail("%s: made for another target: %s %d (key " ARCH "%s), this target has %d", h->path, sizes[i].what, got,
                        sizes[i].key, expected);
    }
    const meta *a = gguf_meta(h, "tokenizer.ggml.tokens"), *b = gguf_meta(m->file, "tokenizer.ggml.tokens");
    if (a && b &&
        (a->count != b->count || a->end - a->value != b->end - b->value ||
         memcmp(a->value, b->value, (size_t)(a->end - a->value))))
        return fail("%s: the head's vocabulary (tokenizer.ggml.tokens, %llu) is not the target's (%llu)", h->path,
                    (unsigned long long)a->count, (unsigned long long)b->count);
    return 0;
}

/* ds4's layout: mtp.0.*, a file of its own. The first shapes checked are those that tell a foreign head. */
static int load_head_ds4(model *m, const gguf *g) {
    const config *c = &m->c;
    mtp_head *h = &m->head;
    reader r = {m, g, "mtp.0."};
    return read_matrix(r, "e_proj.weight", c->dim, c->dim, 1, &h->e_proj) ||
                   read_matrix(r, "h_proj.weight", c->dim, c->dim, 1, &h->h_proj) ||
                   read_floats(r, "enorm.weight", c->dim, 1, &h->enorm) ||
                   read_floats(r, "hnorm.weight", c->dim, 1, &h->hnorm) || read_floats(r, "norm.weight", c->dim, 1, &h->norm) ||
                   read_hyper(r, "hc_head_", true, &h->collapse) || read_layer(r, c->n_layers, &h->block)
               ? -1
               : 0;
}

/* llama.cpp's layout: blk.<layers>.*, in a file of its own or in the target's. */
static int load_head_llama(model *m, const gguf *g, int index) {
    const config *c = &m->c;
    mtp_head *h = &m->head;
    char prefix[32], name[64];
    snprintf(prefix, sizeof prefix, "blk.%d.", index);
    reader r = {m, g, prefix}, outer = {m, g, ""};
    matrix both;
    if (read_matrix(r, "nextn.eh_proj.weight", 2 * (int64_t)c->dim, c->dim, 1, &both)) return -1;
    const type_info *type = type_find(both.type);
    if (c->dim % type->block)
        return fail("%s: tensor %snextn.eh_proj.weight: its halves of %d values do not fill blocks of type %s", g->path, prefix,
                    c->dim, type->name);
    h->e_proj = h->h_proj = both;
    h->e_proj.n_in = h->h_proj.n_in = c->dim;
    h->e_proj.bytes = h->h_proj.bytes = both.bytes / 2;
    h->h_proj.data += both.bytes / 2;
    snprintf(name, sizeof name, "%snextn.hc_head_fn.weight", prefix);
    bool own = gguf_tensor(g, name);
    return read_floats(r, "nextn.enorm.weight", c->dim, 1, &h->enorm) ||
                   read_floats(r, "nextn.hnorm.weight", c->dim, 1, &h->hnorm) ||
                   read_floats(r, "nextn.shared_head_norm.weight", c->dim, 1, &h->norm) ||
                   read_hyper(own ? r : outer, own ? "nextn.hc_head_" : "output_hc_", true, &h->collapse) ||
                   read_layer(r, c->n_layers, &h->block)
               ? -1
               : 0;
}

static int load_head(model *m, bool internal) {
    const gguf *g = internal ? m->file : m->head_file;
    m->counting = &m->head_weight_bytes;
    m->has_head = true;
    if (internal) {
        if (!m->file_has_head) return fail("%s: holds no MTP head (no blk.%d.nextn.* tensors)", g->path, m->c.n_layers);
        return load_head_llama(m, g, m->c.n_layers);
    }
    m->head_identity = file_identity(g);
    str arch = meta_string(g, "general.architecture");
    if (!arch.p) return fail("%s: key general.architecture is missing", g->path);
    if (is_dspark(g, arch))
        return fail("%s: holds a DSpark drafter (of the July 2026 checkpoint), which ds4 does not read; expected an MTP head",
                    g->path);
    if (!str_is(arch, "deepseek4_mtp_support") && !str_is(arch, "deepseek4"))
        return fail("%s: architecture is %.*s; expected an MTP head (deepseek4_mtp_support, or deepseek4 with nextn.* tensors)",
                    g->path, STR_ARG(arch));
    if (check_same_sizes(m, g)) return -1;
    if (gguf_tensor(g, "mtp.0.e_proj.weight")) return load_head_ds4(m, g);
    int layers = m->c.n_layers;
    bool nextn = false;
    if (str_is(arch, "deepseek4") && count_layers(g, &layers, &nextn)) return -1;
    if (!nextn)
        return fail("%s: holds no MTP head (neither mtp.0.* nor nextn.* tensors)%s", g->path,
                    gguf_tensor(g, "blk.0.attn_norm.weight") ? "; it is a target" : "");
    if (layers != m->c.n_layers)
        return fail("%s: the head's block is blk.%d, for a target of %d layers; this target has %d", g->path, layers, layers,
                    m->c.n_layers);
    return load_head_llama(m, g, layers);
}

static void model_free(model *m) {
    if (!m) return;
    for (int i = 0; i < m->n_owned; i++) mem_free(m->owned[i]);
    mem_free(m->layers);
    mem_free(m->freq);
    mem_free(m->freq_compressed);
    gguf_close(m->file);
    gguf_close(m->head_file);
    mem_free(m);
}

static size_t model_memory(const model *m) {
    size_t bytes = mem_size(m) + mem_size(m->layers) + mem_size(m->freq) + mem_size(m->freq_compressed);
    return bytes + (size_t)m->owned_bytes + gguf_memory(m->file) + gguf_memory(m->head_file);
}

static model *model_load(const char *path, const char *head_path, bool internal_head) {
    model *m = mem_new(sizeof *m);
    if (!m) return NULL;
    if (!(m->file = gguf_open(path)) || load_target(m)) goto bad;
    if ((head_path && !(m->head_file = gguf_open(head_path))) || ((head_path || internal_head) && load_head(m, !head_path))) {
        name_if_no_memory(head_path ? head_path : path);
        goto bad;
    }
    return m;
bad:
    model_free(m);
    return NULL;
}

/* ============================================================================================================================
 * 7. Row operations
 *
 * What a pass is made of: products of weight matrices with many rows, and small per-row arithmetic. All of it reaches the
 * processor through a device: a thread pool and a table of kernels. Threads split outputs and rows, never a sum.
 * ========================================================================================================================== */

/* ds4_work as it grows: whoever holds the engine's lock adds, anyone may read. */
typedef struct {
    _Atomic int64_t passes, rows, head_passes, head_rows, repaired_rows, logit_rows, weight_bytes, experts, kv_rows, index_rows;
} work_counts;

static int64_t work_of(const _Atomic int64_t *of) { return atomic_load_explicit(of, memory_order_relaxed); }
static void work_add(_Atomic int64_t *to, int64_t n) { atomic_store_explicit(to, work_of(to) + n, memory_order_relaxed); }

typedef struct {
    pool *pool;
    const kernels *k;
    work_counts *work;
} device;

/* Rows of activations that matrices are multiplied with. They are quantised when the first matrix asks for it, once a kind. */
typedef struct {
    int64_t n;
    int rows, max_rows;
    const float *f; /* (rows, n) */
    int8_t *q[3]; /* by act_kind */
    float *d[3];
    int16_t *sum[3];
    bool ready[3];
} input;

static size_t input_bytes(int64_t n, int max_rows) {
    const size_t values = (size_t)max_rows * (size_t)n, stored = (size_t)max_rows * (size_t)act_stride(n);
    return 2 * (stored + (values / 32 + 1) * sizeof(float) + (values / 16 + 1) * sizeof(int16_t));
}

static int input_new(input *in, int64_t n, int max_rows) {
    *in = (input){.n = n, .max_rows = max_rows};
    for (int kind = ACT_Q32; kind <= ACT_Q256; kind++) {
        const size_t values = (size_t)n * (size_t)max_rows;
        if (!(in->q[kind] = mem_new((size_t)act_stride(n) * (size_t)max_rows)) ||
            !(in->d[kind] = mem_array(values / 32 + 1, sizeof(float))) ||
            !(in->sum[kind] = mem_array(values / 16 + 1, sizeof(int16_t))))
            return -1;
    }
    return 0;
}

static void input_free(input *in) {
    for (int kind = 0; kind < 3; kind++) {
        mem_free(in->q[kind]);
        mem_free(in->d[kind]);
        mem_free(in->sum[kind]);
    }
}

static void input_set(input *in, const float *f, int rows) {
    in->f = f;
    in->rows = rows;
    in->ready[ACT_Q32] = in->ready[ACT_Q256] = false;
}

static acts input_acts(const input *in, act_kind kind) { return (acts){in->n, in->f, in->q[kind], in->d[kind], in->sum[kind]}; }

typedef struct {
    const device *dev;
    input *in;
    act_kind kind;
} quantise_job;

static void quantise_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const quantise_job *j = ctx;
    input *in = j->in;
    int64_t block = j->kind == ACT_Q32 ? 32 : 256;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        j->dev->k->quantise(j->kind, in->n, in->f + r * in->n, in->q[j->kind] + r * act_stride(in->n),
                            in->d[j->kind] + r * (in->n / block), in->sum[j->kind] + r * (in->n / 16));
}

static void input_need(const device *dev, input *in, act_kind kind) {
    if (kind == ACT_FLOAT || in->ready[kind]) return;
    quantise_job job = {dev, in, kind};
    pool_run(dev->pool, in->rows, in->n / 8, quantise_rows, &job);
    in->ready[kind] = true;
}

/* One product: out[j * ldo + o] = weight row o . input row rows[j], for j < m (rows NULL: j itself). */
typedef struct {
    const matrix *w;
    const uint8_t *data; /* w->data, or one expert's slab, or a group's first row */
    int64_t n_out;
    input *in;
    const int32_t *rows;
    int m;
    float *out;
    int64_t ldo;
    int64_t tile, first; /* outputs in a tile; number of the first tile */
} product;

static product product_of(const matrix *w, input *in, float *out) {
    return (product){.w = w, .data = w->data, .n_out = w->n_out, .in = in, .m = in->rows, .out = out, .ldo = w->n_out};
}

typedef struct {
    const device *dev;
    const product *list;
    int count;
} products_job;

static void product_tiles(void *ctx, int64_t begin, int64_t end, int thread) {
    const products_job *j = ctx;
    (void)thread;
    int low = 0, high = j->count - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (j->list[mid].first <= begin) low = mid;
        else high = mid - 1;
    }
    for (const product *p = &j->list[low]; begin < end; p++) {
        int64_t tiles = (p->n_out + p->tile - 1) / p->tile;
        int64_t stop = end - p->first < tiles ? end - p->first : tiles;
        int64_t o = (begin - p->first) * p->tile, o_end = stop * p->tile < p->n_out ? stop * p->tile : p->n_out;
        acts x = input_acts(p->in, p->w->act);
        if (o < o_end && p->m)
            j->dev->k->mat(p->w->type, p->w->n_in, p->data + (size_t)o * p->w->stride, p->w->stride, (int)(o_end - o), &x,
                           p->rows, p->m, p->out + o, (size_t)p->ldo);
        begin = p->first + stop;
    }
}

/* Nanoseconds that one output takes, roughly: few rows wait for the weight, many for the multiplications. */
static int64_t output_ns(const product *p) { return p->m ? p->w->n_in * (p->m + 3) / 64 + 1 : 0; }

/* Computes a list of products as one job for the pool, in tiles of outputs that take about the same time. */
static void products(const device *dev, product *list, int count) {
    int64_t ns = 0, tiles = 0, bytes = 0;
    for (int i = 0; i < count; i++) {
        if (list[i].m) input_need(dev, list[i].in, list[i].w->act);
        ns += list[i].n_out * output_ns(&list[i]);
        bytes += list[i].n_out * (int64_t)list[i].w->bytes;
    }
    work_add(&dev->work->weight_bytes, bytes);
    int64_t share = ns / (dev->pool->threads * 32);
    if (share < CHUNK_NS) share = CHUNK_NS;
    for (int i = 0; i < count; i++) {
        product *p = &list[i];
        int64_t step = p->m > 4 ? 32 : 8, tile = (share / (output_ns(p) + 1) / step + 1) * step;
        p->tile = tile < p->n_out ? tile : p->n_out;
        p->first = tiles;
        tiles += (p->n_out + p->tile - 1) / p->tile;
    }
    products_job job = {dev, list, count};
    pool_run(dev->pool, tiles, ns / tiles, product_tiles, &job);
}

/* 1 / sqrt(mean(x^2) + eps) */
static float rms_factor(const kernels *k, int64_t n, const float *x, float eps) {
    float mean = k->sum_squares(n, x) / (float)n;
    return 1.0f / sqrtf(mean + eps);
}

/* y = x / sqrt(mean(x^2) + eps) * weight (weight may be NULL). */
static void rms_norm(const kernels *k, int64_t n, const float *x, const float *weight, float eps, float *y) {
    k->scale_mul(n, rms_factor(k, n, x, eps), x, weight, y);
}

/* cos and sin of pos * freq[i], (pairs, 2). */
static void rope_table(const double *freq, int pairs, int pos, float *table) {
    for (int i = 0; i < pairs; i++) {
        double s, c;
        d_sincos((double)pos * freq[i], &s, &c);
        table[2 * i] = (float)c;
        table[2 * i + 1] = (float)s;
    }
}

/* Rotates the adjacent pairs of x (2 * pairs wide); direction -1 is the inverse. */
static void rope(float *x, int pairs, const float *table, float direction) {
    for (int i = 0; i < pairs; i++) {
        float a = x[2 * i], b = x[2 * i + 1], c = table[2 * i], s = table[2 * i + 1] * direction;
        x[2 * i] = a * c - b * s;
        x[2 * i + 1] = a * s + b * c;
    }
}

/* Makes the rows and columns of c (n, n) sum to 1, in turns: columns first, and last. */
ALWAYS_INLINE void balance(const int n, int iterations, float eps, float *c) {
    float sum[MAX_STREAMS];
    for (int step = 0; step < iterations; step++) {
        for (int a = 0; step > 0 && a < n; a++) {
            float row = 0;
            for (int b = 0; b < n; b++) row += c[a * n + b];
            row += eps;
            for (int b = 0; b < n; b++) c[a * n + b] /= row;
        }
        for (int b = 0; b < n; b++) sum[b] = 0;
        for (int a = 0; a < n; a++)
            for (int b = 0; b < n; b++) sum[b] += c[a * n + b];
        for (int b = 0; b < n; b++) sum[b] += eps;
        for (int a = 0; a < n; a++)
            for (int b = 0; b < n; b++) c[a * n + b] /= sum[b];
    }
}

/* From t = fn @ streams and their rms_factor: pre (n), post (n) and the mixing matrix (n, n) in place of it. */
static void hyper_coefficients(const kernels *k, const hyper *h, int n, int iterations, float eps, float factor, float *t) {
    float *c = t + 2 * n;
    k->scale_mul(n * (2 + n), factor, t, NULL, t);
    for (int i = 0; i < n; i++) {
        t[i] = t[i] * h->scale[0] + h->base[i];
        t[n + i] = t[n + i] * h->scale[1] + h->base[n + i];
    }
    k->sigmoid(2 * n, t, t);
    for (int i = 0; i < n; i++) {
        t[i] += eps;
        t[n + i] *= 2.0f;
    }
    for (int i = 0; i < n * n; i++) c[i] = c[i] * h->scale[2] + h->base[2 * n + i];
    for (int a = 0; a < n; a++) {
        k->softmax(n, c + a * n, 0, false);
        for (int b = 0; b < n; b++) c[a * n + b] += eps;
    }
    if (n == 4) balance(4, iterations, eps, c); /* as models have it: its loops unrolled */
    else balance(n, iterations, eps, c);
}

/* A float as an integer of the same order; equal numbers (0 and -0 too) are equal, NaN has a place. */
static uint32_t order_key(float x) {
    uint32_t u;
    x += 0.0f;
    memcpy(&u, &x, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* The k largest of n values as ascending indexes, ties to the lower index. By radix selection: no sort, no data-dependent cost. */
static void top_k_indexes(int n, const float *x, int k, int32_t *out) {
    uint32_t prefix = 0, mask = 0;
    int above = k; /* of those equal to the prefix so far, how many are wanted */
    for (int shift = 24; shift >= 0; shift -= 8) {
        int count[256] = {0};
        for (int i = 0; i < n; i++) {
            uint32_t key = order_key(x[i]);
            if ((key & mask) == prefix) count[key >> shift & 255]++;
        }
        int digit = 255;
        while (digit > 0 && count[digit] < above) above -= count[digit--];
        prefix |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    for (int i = 0, found = 0; i < n && found < k; i++) {
        uint32_t key = order_key(x[i]);
        if (key > prefix || (key == prefix && above-- > 0)) out[found++] = i;
    }
}

/* The k best experts of one row in descending order of score + bias, ties to the lower index. */
static void pick_experts(int n, const float *score, const float *bias, int k, int32_t *out) {
    for (int j = 0; j < k; j++) {
        int best = -1;
        uint32_t best_key = 0;
        for (int i = 0; i < n; i++) {
            bool taken = false;
            for (int q = 0; q < j; q++) taken |= out[q] == i;
            uint32_t key = order_key(score[i] + bias[i]);
            if (!taken && (best < 0 || key > best_key)) {
                best = i;
                best_key = key;
            }
        }
        out[j] = best;
    }
}

/* ============================================================================================================================
 * 8. Caches
 *
 * Everything a session remembers, by absolute position. A ring of size N holds position p in slot p mod N. All rows of a pass
 * are written before the first one attends, rejected ones included, so a ring needs
 *
 *     what a row looks back on + the most rows of one session in a pass + how far a rewind may go
 *
 * rows: window - 1 back for raw rows; 2r - 1 for the compressors of r = 4, whose windows overlap; r - 1 for others. One fewer
 * is wrong. Compressed and index rows have a row for each window, written when its last position is processed and written
 * again when it is processed again. A row at p reads floor((p + 1) / r) of them: from its own position, never from a counter.
 * So going back is setting the position.
 * ========================================================================================================================== */

typedef struct {
    int ring, need; /* raw rows in the ring */
    uint8_t *raw; /* (ring, kv row) */
    int ratio, comp_ring, comp_need, windows;
    float *kv, *gate; /* (comp_ring, c * head_dim), ape added to the gate */
    uint8_t *rows; /* (windows, kv row) */
    float *index_kv, *index_gate; /* (comp_ring, 2 * index_dim) */
    uint8_t *index_rows; /* (windows, index row) */
} cache;

typedef struct {
    size_t kv_row, index_row; /* bytes */
    size_t streams; /* floats */
} row_sizes;

typedef struct drafter drafter;

/* How a session chooses tokens: section 10. */
typedef struct {
    ds4_gen gen; /* its bias list is the sampler's own */
    int32_t *counts; /* (n_vocab,): how often each token stands at gen.penalty_from .. counted - 1; NULL without penalties */
    int counted;
    float *draft_logits; /* (DS4_MAX_DRAFT + 1, n_vocab): what drafts were drawn from; NULL but for rejection */
    uint64_t law; /* equal for equal settings; 0 with a mask, of which that cannot be known */
} sampler;

/* Which tokens stand at positions 0 .. counted - 1 of a session: the head's shortlist (section 11). */
typedef struct {
    int32_t *counts; /* (n_vocab,): how often; NULL without a shortlist */
    uint64_t *has; /* a bit a token: the counted ones, and the engine's own */
    int counted;
} shortlist;

struct ds4_session {
    ds4_engine *engine;
    ds4_session *next, **link; /* the engine's list of open sessions */
    int ctx, max_rewind, batch; /* batch: the most rows of this session in a pass */
    int position; /* tokens committed */
    int floor; /* the highest position ever reached (since the last rewind to 0) less max_rewind, at least 0 */
    int written; /* rows ever written, rejected ones included */
    int streams_from; /* streams from here on were ever in the ring: a snapshot brings the last ones only */
    int *tokens; /* (ctx + DS4_MAX_DRAFT + 1,); above the position: the drafts of a cycle */
    cache *caches; /* a layer each, then the head's */
    float *streams; /* (stream_ring, n_streams * dim): the target's last streams */
    int stream_ring, stream_need;
    int head_from, head_to; /* head rows made of the target's own streams: [head_from, head_to) */
    float *head_streams; /* (n_streams * dim): the head's last output, for a deeper draft */
    shortlist listed;
    float *logits; /* (DS4_MAX_DRAFT + 1, n_vocab): rows of the last pass */
    int logits_row; /* which of them belongs to the position; -1: none */
    int step_rows; /* rows that the last step committed, 0 after other calls */
    bool step_lookup; /* its drafts were a lookup's */
    int step_floor; /* the floor before it */
    sampler by;
    int pending; /* rejection: the token already drawn for the position, -1: none */
    uint64_t pending_law; /* by a sampler of this law: another draws anew */
    int chosen; /* otherwise: what the last step found to be the sampler's choice for the position, -1: not known */
    const drafter *drafter;
    void *drafter_ctx;
    struct lookup *lookup; /* NULL: off */
    struct pace *pace; /* what drafts were worth so far */
    int draft; /* DS4_DRAFT_AUTO: what pays */
    float margin;
    int *stops;
    size_t n_stops;
    bool ignore_eos;
    _Atomic bool cancel;
    ds4_stats stats;
};

static const char *kv_type_name(int32_t type) {
    static const char *const names[] = {[DS4_KV_F32] = "f32", [DS4_KV_F16] = "f16", [DS4_KV_FP8] = "fp8"};
    return type >= 0 && (size_t)type < sizeof names / sizeof *names ? names[type] : "unknown";
}

/* f16 rows of the rotary tail first, then E4M3 bytes, then one scale for each 64 of them. */
static size_t kv_row_bytes(const config *c, ds4_kv_type type) {
    size_t n = (size_t)c->head_dim, tail = (size_t)c->rope_dim;
    if (type == DS4_KV_F32) return n * 4;
    if (type == DS4_KV_F16) return n * 2;
    return (2 * tail + (n - tail) + (n - tail) / 64 + 1) / 2 * 2;
}

static void kv_store(const kernels *k, const config *c, ds4_kv_type type, const float *x, uint8_t *out) {
    int64_t n = c->head_dim, tail = c->rope_dim;
    if (type == DS4_KV_F32) memcpy(out, x, (size_t)n * 4);
    else if (type == DS4_KV_F16) k->f16_store(n, x, (uint16_t *)(void *)out);
    else {
        k->f16_store(tail, x + n - tail, (uint16_t *)(void *)out);
        k->fp8_store(n - tail, x, out + 2 * tail, out + 2 * tail + n - tail);
    }
}

static void kv_load(const kernels *k, const config *c, ds4_kv_type type, const uint8_t *row, float *out) {
    int64_t n = c->head_dim, tail = c->rope_dim;
    if (type == DS4_KV_F32) memcpy(out, row, (size_t)n * 4);
    else if (type == DS4_KV_F16) k->f16_load(n, (const uint16_t *)(const void *)row, out);
    else {
        k->f16_load(tail, (const uint16_t *)(const void *)row, out + n - tail);
        k->fp8_load(n - tail, row + 2 * tail, row + 2 * tail + n - tail, out);
    }
}

static size_t index_row_bytes(const config *c, ds4_kv_type type) { return (size_t)c->index_dim * (type == DS4_KV_F32 ? 4 : 2); }

static void index_store(const kernels *k, const config *c, ds4_kv_type type, const float *x, uint8_t *out) {
    if (type == DS4_KV_F32) memcpy(out, x, (size_t)c->index_dim * 4);
    else k->f16_store(c->index_dim, x, (uint16_t *)(void *)out);
}

static void cache_free(cache *c) {
    mem_free(c->raw);
    mem_free(c->kv);
    mem_free(c->gate);
    mem_free(c->rows);
    mem_free(c->index_kv);
    mem_free(c->index_gate);
    mem_free(c->index_rows);
}

/* Sizes of a cache for a layer of this ratio; nothing is allocated. A row looks back on no more rows than there are. */
static cache cache_sizes(const config *c, int ratio, int ctx, int slack) {
    cache out = {.need = min_int(c->window - 1, ctx), .ratio = ratio};
    out.ring = out.need + slack;
    if (ratio > 0) {
        out.comp_need = ratio == 4 ? 2 * ratio - 1 : ratio - 1;
        out.comp_need = min_int(out.comp_need, ctx);
        out.comp_ring = out.comp_need + slack;
        out.windows = ctx / ratio;
    }
    return out;
}

static int64_t cache_bytes(const config *c, const cache *k, ds4_kv_type type) {
    int64_t row = (int64_t)kv_row_bytes(c, type), parts = k->ratio == 4 ? 2 : 1;
    int64_t bytes = k->ring * row;
    if (k->ratio > 0) bytes += k->windows * row + 2 * (int64_t)k->comp_ring * parts * c->head_dim * 4;
    if (k->ratio == 4)
        bytes += k->windows * (int64_t)index_row_bytes(c, type) + 2 * (int64_t)k->comp_ring * 2 * c->index_dim * 4;
    return bytes;
}

static int cache_new(cache *out, const config *c, int ratio, int ctx, int slack, ds4_kv_type type) {
    *out = cache_sizes(c, ratio, ctx, slack);
    size_t row = kv_row_bytes(c, type), ring = (size_t)out->comp_ring, windows = (size_t)out->windows,
           parts = ratio == 4 ? 2 : 1;
    if (!(out->raw = mem_array((size_t)out->ring, row))) return -1;
    if (ratio == 0) return 0;
    size_t channels = parts * (size_t)c->head_dim * sizeof(float), index_channels = 2 * (size_t)c->index_dim * sizeof(float);
    if (!(out->kv = mem_array(ring, channels)) || !(out->gate = mem_array(ring, channels)) ||
        !(out->rows = mem_array(windows, row)))
        return -1;
    if (ratio != 4) return 0;
    return (out->index_kv = mem_array(ring, index_channels)) && (out->index_gate = mem_array(ring, index_channels)) &&
                   (out->index_rows = mem_array(windows, index_row_bytes(c, type)))
               ? 0
               : -1;
}

/* ============================================================================================================================
 * 9. Forward
 *
 * The only way a model runs. A row is (session, position, token); a pass is some rows, those of one session together and in
 * ascending order: one row to decode, 1 + K to verify, a chunk of the prompt, rows of many sessions to serve them at once. It is
 * layer-major: all rows pass layer 0, then layer 1, ... Each function below is one line of the model's description, for all
 * rows of the pass; buffers are the engine's, one pass runs at a time.
 * ========================================================================================================================== */

typedef struct {
    int rows; /* the most rows of a pass */
    float *x, *x_next; /* (rows, n_streams * dim): the residual streams */
    float *mix; /* (rows, n_streams * (2 + n_streams)): pre, post, C */
    float *y, *out; /* (rows, dim): a sub-block's input and output */
    float *rope, *rope_compressed; /* (rows, rope_dim): cos and sin by pair */
    float *qr, *q, *kv; /* (rows, q_rank), (rows, n_heads * head_dim), (rows, head_dim) */
    float *comp_kv, *comp_gate; /* (rows, c * head_dim) */
    float *index_kv, *index_gate, *index_q, *index_w;
    float *index_scores; /* (index_group, windows of a full context) */
    int32_t *selected; /* (rows, index_top_k): the compressed rows a row sees, ascending */
    float *attended, *low; /* (rows, n_heads * head_dim), (rows, o_groups * o_rank) */
    int32_t *group_rows; /* (o_groups, rows) */
    float *scores; /* (rows, n_experts) */
    int32_t *picks; /* (rows, n_used) */
    float *pick_weights; /* (rows, n_used) */
    int32_t *slots, *slot_rows; /* (rows, n_used) -> slot; slot -> row: slots are grouped by expert */
    int32_t *expert_start; /* (n_experts + 1,) */
    int32_t *iota; /* 0, 1, 2, ... */
    float *gate, *up, *down; /* (rows * n_used, ff or dim) */
    float *shared_gate, *shared_up;
    float *head_e, *head_norm; /* (rows, dim), (rows * n_streams, dim): embeddings and streams, normalised */
    product *list; /* (2 * n_experts + 8,) */
    float **thread_room; /* a thread each: rows unpacked to f32, attention scores */
    size_t thread_floats;
    int index_group;
    input in_mix, in_y, in_qr, in_heads, in_low, in_act, in_shared, in_e, in_h;
    void *owned[64];
    int n_owned;
    int64_t bytes, most;
    const char *path; /* the model's, and its bytes: in proportion to them there may be `most` bytes */
    int64_t file_bytes;
} scratch;

typedef struct {
    ds4_session *s;
    int position, token;
} pass_row;

struct ds4_engine {
    model *model;
    device dev;
    scratch s;
    ds4_kv_type kv_type;
    row_sizes sizes;
    int ctx, max_rewind, chunk, draft, lookup;
    float margin;
    sampler by; /* what sessions start with */
    struct costs *costs; /* guarded by `run` */
    bool conf_log;
    ds4_log_fn log;
    ds4_progress_fn progress;
    void *callback_ctx;
    struct tokenizer *tokens; /* NULL: token ids only */
    str *token_list, *merge_list;
    int32_t *token_types;
    int bos, eos;
    bool base_model;
    char *model_path, *head_path, *name;
    int64_t table_bytes;
    pass_row *row_room; /* (rows,): the pass being put together */
    const float **stream_room;
    float *logits; /* (logit_rows, n_vocab): rows of several sessions, and of a draft step */
    int logit_rows;
    int shortlist; /* the vocabulary's first ids that every shortlist has; 0: no shortlists */
    int32_t *listed; /* (n_vocab,) */
    struct cycle *cycles, **cycle_room; /* (rows,): the sessions of a batch; those of one drafter */
    float *adjusted; /* (n_vocab,) */
    uint8_t *allowed;
    double *weights;
    struct candidate *candidates;
    work_counts work;
    pthread_mutex_t run; /* one pass at a time; also guards the list of sessions */
    uint64_t caller_modes; /* float_modes of the thread that holds it */
    ds4_session *sessions;
};

/* Whatever computes does so between these two. */
static void engine_enter(ds4_engine *e) {
    pthread_mutex_lock(&e->run);
    e->caller_modes = float_modes_ours();
}

static void engine_leave(ds4_engine *e) {
    float_modes_theirs(e->caller_modes);
    pthread_mutex_unlock(&e->run);
}

typedef struct {
    ds4_engine *e;
    const pass_row *rows;
    int n;
    const layer *l;
    int index; /* of the layer in a session's caches */
} pass;

static cache *row_cache(const pass *p, int r) { return &p->rows[r].s->caches[p->index]; }

/* ---- hyper-connections ---- */

typedef struct {
    const pass *p;
    const hyper *h;
    const float *norm;
} hyper_job;

static void mix_streams(void *ctx, int64_t begin, int64_t end, int thread) {
    const hyper_job *j = ctx;
    ds4_engine *e = j->p->e;
    const config *c = &e->model->c;
    const kernels *k = e->dev.k;
    int n = c->n_streams;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        float *t = e->s.mix + r * n * (2 + n), *y = e->s.y + r * c->dim;
        const float *x = e->s.x + r * n * c->dim;
        hyper_coefficients(k, j->h, n, c->sinkhorn, c->hc_eps, rms_factor(k, n * c->dim, x, c->norm_eps), t);
        k->scale_mul(c->dim, t[0], x, NULL, y);
        k->mix(c->dim, t + 1, n, 1, x + c->dim, c->dim, n - 1, y);
        rms_norm(k, c->dim, y, j->norm, c->norm_eps, y);
    }
}

/* y = norm(sum_i pre_i X_i), a sub-block's input; post and C stay in `mix`. */
static void hyper_enter(const pass *p, const hyper *h, const float *norm) {
    ds4_engine *e = p->e;
    hyper_job job = {p, h, norm};
    input_set(&e->s.in_mix, e->s.x, p->n);
    /* of the streams as they are: their norm is a factor of the sums */
    product fn = product_of(&h->fn, &e->s.in_mix, e->s.mix);
    products(&e->dev, &fn, 1);
    pool_run(e->dev.pool, p->n, (int64_t)e->sizes.streams / 4 + 500, mix_streams, &job);
    input_set(&e->s.in_y, e->s.y, p->n);
}

static void add_streams(void *ctx, int64_t begin, int64_t end, int thread) {
    const pass *p = ctx;
    ds4_engine *e = p->e;
    const kernels *k = e->dev.k;
    int n = e->model->c.n_streams, dim = e->model->c.dim;
    for (int64_t r = begin; r < end; r++) {
        const float *post = e->s.mix + r * n * (2 + n) + n, *c = post + n, *x = e->s.x + r * n * dim;
        float *next = e->s.x_next + r * n * dim, *columns = e->s.thread_room[thread];
        for (int b = 0; b < n; b++) {
            k->scale_mul(dim, post[b], e->s.out + r * dim, NULL, next + b * dim);
            for (int a = 0; a < n; a++) columns[b * n + a] = c[a * n + b];
        }
        k->mix(dim, columns, n, n, x, dim, n, next);
    }
}

/* X'_b = post_b * out + sum_a C[a,b] X_a. */
static void hyper_leave(pass *p) {
    ds4_engine *e = p->e;
    pool_run(e->dev.pool, p->n, (int64_t)e->sizes.streams / 4, add_streams, p);
    float *swap = e->s.x;
    e->s.x = e->s.x_next;
    e->s.x_next = swap;
}

/* ---- attention: projections ---- */

/* Compressed rows that row r may see. */
static int visible_windows(const pass *p, int r) { return p->l->ratio ? (p->rows[r].position + 1) / p->l->ratio : 0; }
/* Whether the indexer picks among them: decided from the row's own position. */
static bool picks_windows(const pass *p, int r) {
    return p->l->ratio == 4 && visible_windows(p, r) > p->e->model->c.index_top_k;
}

static void finish_q_kv(void *ctx, int64_t begin, int64_t end, int thread) {
    const pass *p = ctx;
    ds4_engine *e = p->e;
    const config *c = &e->model->c;
    const kernels *k = e->dev.k;
    int d = c->head_dim, pairs = c->rope_dim / 2;
    const float *tables = p->l->ratio ? e->s.rope_compressed : e->s.rope;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        const float *table = tables + r * c->rope_dim;
        float *q = e->s.q + r * c->n_heads * d;
        for (int h = 0; h < c->n_heads; h++, q += d) {
            rms_norm(k, d, q, NULL, c->norm_eps, q);
            rope(q + d - c->rope_dim, pairs, table, 1);
        }
    }
}

/* The kv row: norm, rotation, rounding, and into the ring at its position. */
static void store_kv(const pass *p) {
    ds4_engine *e = p->e;
    const config *c = &e->model->c;
    const float *tables = p->l->ratio ? e->s.rope_compressed : e->s.rope;
    for (int r = 0; r < p->n; r++) {
        cache *to = row_cache(p, r);
        float *kv = e->s.kv + (int64_t)r * c->head_dim;
        rms_norm(e->dev.k, c->head_dim, kv, p->l->kv_norm, c->norm_eps, kv);
        rope(kv + c->head_dim - c->rope_dim, c->rope_dim / 2, tables + (int64_t)r * c->rope_dim, 1);
        kv_store(e->dev.k, c, e->kv_type, kv, to->raw + (size_t)(p->rows[r].position % to->ring) * e->sizes.kv_row);
    }
}

static void norm_qr(void *ctx, int64_t begin, int64_t end, int thread) {
    const pass *p = ctx;
    ds4_engine *e = p->e;
    int64_t n = e->model->c.q_rank;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        rms_norm(e->dev.k, n, e->s.qr + r * n, p->l->q_a_norm, e->model->c.norm_eps, e->s.qr + r * n);
}

/* Everything that is projected from y at once, then from qr. */
static void project(const pass *p) {
    ds4_engine *e = p->e;
    const config *c = &e->model->c;
    const layer *l = p->l;
    scratch *s = &e->s;
    product *list = s->list;
    bool picks = false; /* else the indexer's queries are not asked for */
    for (int r = 0; r < p->n; r++) picks = picks || picks_windows(p, r);
    int n = 0;
    list[n++] = product_of(&l->q_a, &s->in_y, s->qr);
    list[n++] = product_of(&l->kv, &s->in_y, s->kv);
    if (l->ratio > 0) {
        list[n++] = product_of(&l->comp.kv, &s->in_y, s->comp_kv);
        list[n++] = product_of(&l->comp.gate, &s->in_y, s->comp_gate);
    }
    if (l->ratio == 4) {
        list[n++] = product_of(&l->index.kv, &s->in_y, s->index_kv);
        list[n++] = product_of(&l->index.gate, &s->in_y, s->index_gate);
    }
    if (picks) list[n++] = product_of(&l->index_w, &s->in_y, s->index_w);
    products(&e->dev, list, n);
    pool_run(e->dev.pool, p->n, c->q_rank / 8, norm_qr, (void *)(uintptr_t)p);
    input_set(&s->in_qr, s->qr, p->n);
    n = 0;
    list[n++] = product_of(&l->q_b, &s->in_qr, s->q);
    if (picks) list[n++] = product_of(&l->index_q, &s->in_qr, s->index_q);
    products(&e->dev, list, n);
    pool_run(e->dev.pool, p->n, (int64_t)c->n_heads * c->head_dim / 4, finish_q_kv, (void *)(uintptr_t)p);
    store_kv(p);
}

/* ---- compressor ---- */

typedef struct {
    const pass *p;
    const compressor *comp;
    bool index; /* the indexer's */
} compressor_job;

/* Emits the window that ends at row r, if one does: per channel a softmax of the gate over its slots, weighting kv. */
static void emit_window(const compressor_job *j, int r, float *room) {
    ds4_engine *e = j->p->e;
    const config *c = &e->model->c;
    const kernels *k = e->dev.k;
    const cache *in = row_cache(j->p, r);
    int ratio = in->ratio, width = j->comp->width, stride = j->comp->parts * width, position = j->p->rows[r].position;
    int window = position / ratio, first = window * ratio, earlier = j->comp->parts == 2 && window > 0 ? ratio : 0;
    const float *kv = j->index ? in->index_kv : in->kv, *gate = j->index ? in->index_gate : in->gate;
    float *out = room, *top = room + width, *sum = room + 2 * width;
    for (int i = 0; i < width; i++) top[i] = -INFINITY;
    for (int q = first - earlier; q < first + ratio; q++) {
        const float *g = gate + (int64_t)(q % in->comp_ring) * stride + (j->comp->parts == 2 && q >= first ? width : 0);
        for (int i = 0; i < width; i++) top[i] = g[i] > top[i] ? g[i] : top[i];
    }
    memset(sum, 0, (size_t)width * sizeof *sum);
    memset(out, 0, (size_t)width * sizeof *out);
    for (int q = first - earlier; q < first + ratio; q++) {
        int64_t at = (int64_t)(q % in->comp_ring) * stride + (j->comp->parts == 2 && q >= first ? width : 0);
        k->softmax_step(width, gate + at, kv + at, top, sum, out);
    }
    for (int i = 0; i < width; i++) out[i] /= sum[i];
    rms_norm(k, width, out, j->comp->norm, c->norm_eps, out);
    float *table = sum;
    rope_table(e->model->freq_compressed, c->rope_dim / 2, first, table);
    rope(out + width - c->rope_dim, c->rope_dim / 2, table, 1);
    if (j->index) index_store(k, c, e->kv_type, out, in->index_rows + (size_t)window * e->sizes.index_row);
    else kv_store(k, c, e->kv_type, out, in->rows + (size_t)window * e->sizes.kv_row);
}

static void emit_windows(void *ctx, int64_t begin, int64_t end, int thread) {
    const compressor_job *j = ctx;
    for (int64_t r = begin; r < end; r++)
        if ((j->p->rows[r].position + 1) % j->p->l->ratio == 0) emit_window(j, (int)r, j->p->e->s.thread_room[thread]);
}

/* Rows into the rings, ape added to the gate. */
static void keep_projections(void *ctx, int64_t begin, int64_t end, int thread) {
    const compressor_job *j = ctx;
    const pass *p = j->p;
    const compressor *comp = j->comp;
    const bool index = j->index;
    const float *kv = index ? p->e->s.index_kv : p->e->s.comp_kv, *gate = index ? p->e->s.index_gate : p->e->s.comp_gate;
    int64_t stride = (int64_t)comp->parts * comp->width;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        const cache *to = row_cache(p, (int)r);
        int64_t slot = p->rows[r].position % to->comp_ring * stride;
        const float *ape = comp->ape + p->rows[r].position % to->ratio * stride;
        float *to_kv = (index ? to->index_kv : to->kv) + slot, *to_gate = (index ? to->index_gate : to->gate) + slot;
        memcpy(to_kv, kv + r * stride, (size_t)stride * sizeof *kv);
        for (int64_t i = 0; i < stride; i++) to_gate[i] = gate[r * stride + i] + ape[i];
    }
}

/* All rows go into the rings first; then the windows that end among them are emitted. */
static void compress(const pass *p, const compressor *comp, bool index) {
    int64_t stride = (int64_t)comp->parts * comp->width;
    compressor_job job = {p, comp, index};
    pool_run(p->e->dev.pool, p->n, stride / 4, keep_projections, &job);
    pool_run(p->e->dev.pool, p->n, stride / 2, emit_windows, &job);
}

/* ---- indexer ---- */

typedef struct {
    const pass *p;
    int first, rows, tiles; /* rows of the group, and tiles of windows in each */
} index_job;

enum { INDEX_TILE = 128 };

/* score(c) = sum_h w_h relu(q_h . index row c), for a tile of windows of one row. */
static void score_windows(void *ctx, int64_t begin, int64_t end, int thread) {
    const index_job *j = ctx;
    ds4_engine *e = j->p->e;
    const config *c = &e->model->c;
    const kernels *k = e->dev.k;
    const int heads = c->index_heads, width = c->index_dim;
    const size_t row = e->sizes.index_row;
    float *dots = e->s.thread_room[thread], *weights = dots + heads * INDEX_TILE;
    for (int64_t t = begin; t < end; t++) {
        int r = j->first + (int)(t / j->tiles), from = (int)(t % j->tiles) * INDEX_TILE;
        if (!picks_windows(j->p, r)) continue;
        int n = min_int(INDEX_TILE, visible_windows(j->p, r) - from);
        if (n <= 0) continue;
        acts q = {.n = width, .f = e->s.index_q + (int64_t)r * heads * width};
        k->mat(e->kv_type == DS4_KV_F32 ? T_F32 : T_F16, width, row_cache(j->p, r)->index_rows + (size_t)from * row, row, n, &q,
               NULL, heads, dots, (size_t)n);
        k->scale_mul(heads, 1.0f / sqrtf((float)width * (float)heads), e->s.index_w + (int64_t)r * heads, NULL, weights);
        float *scores = e->s.index_scores + (int64_t)(r - j->first) * (e->ctx / 4 + 1) + from;
        memset(scores, 0, (size_t)n * sizeof *scores);
        k->relu_sum(n, heads, weights, dots, scores);
    }
}

static void select_windows(void *ctx, int64_t begin, int64_t end, int thread) {
    const index_job *j = ctx;
    ds4_engine *e = j->p->e;
    int k = e->model->c.index_top_k;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int r = j->first + (int)i;
        if (picks_windows(j->p, r))
            top_k_indexes(visible_windows(j->p, r), e->s.index_scores + i * (e->ctx / 4 + 1), k,
                          e->s.selected + (int64_t)r * k);
    }
}

static void rotate_index_q(void *ctx, int64_t begin, int64_t end, int thread) {
    const pass *p = ctx;
    ds4_engine *e = p->e;
    const config *c = &e->model->c;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        for (int h = 0; h < c->index_heads; h++)
            rope(e->s.index_q + (r * c->index_heads + h) * c->index_dim + c->index_dim - c->rope_dim, c->rope_dim / 2,
                 e->s.rope_compressed + r * c->rope_dim, 1);
}

static void pick_windows(const pass *p) {
    ds4_engine *e = p->e;
    int64_t rows = 0;
    for (int r = 0; r < p->n; r++) rows += picks_windows(p, r) ? visible_windows(p, r) : 0;
    if (!rows) return;
    work_add(&e->work.index_rows, rows);
    pool_run(e->dev.pool, p->n, e->model->c.index_heads * 32, rotate_index_q, (void *)(uintptr_t)p);
    for (int first = 0; first < p->n; first += e->s.index_group) {
        index_job job = {p, first, min_int(e->s.index_group, p->n - first), 0};
        int most = 0;
        for (int r = first; r < first + job.rows; r++) most = max_int(most, visible_windows(p, r));
        job.tiles = (most + INDEX_TILE - 1) / INDEX_TILE;
        int64_t tile_ns = (int64_t)INDEX_TILE * e->model->c.index_heads * e->model->c.index_dim / 32;
        pool_run(e->dev.pool, (int64_t)job.rows * job.tiles, tile_ns, score_windows, &job);
        pool_run(e->dev.pool, job.rows, most * 5, select_windows, &job);
    }
}

/* ---- attention ---- */

typedef struct {
    const pass *p;
    int groups, heads; /* head groups of a row, heads in each */
} attention_job;

/* What row r sees: raw rows by ascending position, then compressed rows by ascending window. */
typedef struct {
    const cache *c;
    int raw_first, raw, rows; /* first position and number of raw rows; rows in all */
    const int32_t *picked; /* the windows the indexer picked; NULL: all of them */
} view;

static view row_view(const pass *p, int r) {
    const config *c = &p->e->model->c;
    int position = p->rows[r].position, first = max_int(0, position - c->window + 1);
    view v = {.c = row_cache(p, r), .raw_first = first, .raw = position - first + 1};
    v.picked = picks_windows(p, r) ? p->e->s.selected + (int64_t)r * c->index_top_k : NULL;
    v.rows = v.raw + (v.picked ? c->index_top_k : visible_windows(p, r));
    return v;
}

/* Rows seen are unpacked some at a time for all heads. Between them lies a vector more than they are wide, so that those of a
 * width that is a power of two do not compete for the same places in the first cache. */
enum { SEEN_TILE = 32, SEEN_GAP = 16 };

/* Rows from..from+n-1 of a view as float32 (n, head_dim + SEEN_GAP). */
static void load_seen(const ds4_engine *e, const view *v, int from, int n, float *tile) {
    const config *c = &e->model->c;
    for (int i = from; i < from + n; i++, tile += c->head_dim + SEEN_GAP) {
        const uint8_t *row;
        if (i < v->raw) row = v->c->raw + (size_t)((v->raw_first + i) % v->c->ring) * e->sizes.kv_row;
        else row = v->c->rows + (size_t)(v->picked ? v->picked[i - v->raw] : i - v->raw) * e->sizes.kv_row;
        kv_load(e->dev.k, c, e->kv_type, row, tile);
    }
}

/* Some heads of row r. Scores and sums have their order over the rows seen, whatever the tiles. */
static void attend_heads(const pass *p, int r, int h0, int heads, float *room) {
    ds4_engine *e = p->e;
    const config *c = &e->model->c;
    const kernels *k = e->dev.k;
    const int d = c->head_dim, gap = d + SEEN_GAP;
    const view v = row_view(p, r);
    const acts q = {.n = d, .f = e->s.q + ((int64_t)r * c->n_heads + h0) * d};
    float *tile = room, *scores = room + SEEN_TILE * gap, *out = e->s.attended + ((int64_t)r * c->n_heads + h0) * d;
    for (int i = 0; i < v.rows; i += SEEN_TILE) {
        int n = min_int(SEEN_TILE, v.rows - i);
        load_seen(e, &v, i, n, tile);
        k->mat(T_F32, d, (const uint8_t *)(const void *)tile, (size_t)gap * sizeof *tile, n, &q, NULL, heads, scores + i,
               (size_t)v.rows);
    }
    for (int h = 0; h < heads; h++) {
        float *score = scores + (int64_t)h * v.rows;
        k->scale_mul(v.rows, 1.0f / sqrtf((float)d), score, NULL, score);
        k->softmax(v.rows, score, p->l->sinks[h0 + h], true);
    }
    memset(out, 0, (size_t)heads * (size_t)d * sizeof *out);
    for (int i = 0; i < v.rows; i += SEEN_TILE) {
        int n = min_int(SEEN_TILE, v.rows - i);
        if (v.rows > SEEN_TILE) load_seen(e, &v, i, n, tile);
        k->mix(d, scores + i, v.rows, heads, tile, gap, n, out);
    }
    const float *table = (p->l->ratio ? e->s.rope_compressed : e->s.rope) + (int64_t)r * c->rope_dim;
    for (int h = 0; h < heads; h++) rope(out + (int64_t)h * d + d - c->rope_dim, c->rope_dim / 2, table, -1);
}

static void attend(void *ctx, int64_t begin, int64_t end, int thread) {
    const attention_job *j = ctx;
    for (int64_t t = begin; t < end; t++) {
        int h0 = (int)(t % j->groups) * j->heads, heads = min_int(j->heads, j->p->e->model->c.n_heads - h0);
        if (heads > 0) attend_heads(j->p, (int)(t / j->groups), h0, heads, j->p->e->s.thread_room[thread]);
    }
}

static void attention(const pass *p) {
    ds4_engine *e = p->e;
    const config *c = &e->model->c;
    scratch *s = &e->s;
    project(p);
    if (p->l->ratio > 0) compress(p, &p->l->comp, false);
    if (p->l->ratio == 4) {
        compress(p, &p->l->index, true);
        pick_windows(p);
    }
    /* Pieces of at least 8 heads, so that unpacking the rows seen stays cheap beside what is done with them. */
    int pieces = (4 * e->dev.pool->threads + p->n - 1) / p->n, groups = max_int(1, min_int(c->n_heads / 8, pieces));
    attention_job job = {p, groups, (c->n_heads + groups - 1) / groups};
    int64_t seen = 0;
    for (int r = 0; r < p->n; r++) seen += row_view(p, r).rows;
    work_add(&e->work.kv_rows, seen);
    pool_run(e->dev.pool, (int64_t)p->n * groups, seen * c->n_heads * c->head_dim / (16 * p->n * groups), attend, &job);
    int lows = c->o_groups * c->o_rank;
    input_set(&s->in_heads, s->attended, p->n * c->o_groups);
    for (int g = 0; g < c->o_groups; g++) {
        int32_t *rows = s->group_rows + (int64_t)g * s->rows;
        for (int r = 0; r < p->n; r++) rows[r] = r * c->o_groups + g;
        s->list[g] = (product){.w = &p->l->o_a,
                               .data = p->l->o_a.data + (size_t)g * (size_t)c->o_rank * p->l->o_a.stride,
                               .n_out = c->o_rank,
                               .in = &s->in_heads,
                               .rows = rows,
                               .m = p->n,
                               .out = s->low + (int64_t)g * c->o_rank,
                               .ldo = lows};
    }
    products(&e->dev, s->list, c->o_groups);
    input_set(&s->in_low, s->low, p->n);
    product o_b = product_of(&p->l->o_b, &s->in_low, s->out);
    products(&e->dev, &o_b, 1);
}

/* ---- MoE ---- */

static void route(void *ctx, int64_t begin, int64_t end, int thread) {
    const pass *p = ctx;
    ds4_engine *e = p->e;
    const config *c = &e->model->c;
    scratch *s = &e->s;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        float *score = s->scores + r * c->n_experts, *weight = s->pick_weights + r * c->n_used, sum = 0;
        int32_t *pick = s->picks + r * c->n_used;
        e->dev.k->router_score(c->n_experts, score, score);
        if (p->l->hash) memcpy(pick, p->l->hash + (int64_t)p->rows[r].token * c->n_used, (size_t)c->n_used * sizeof *pick);
        else pick_experts(c->n_experts, score, p->l->router_bias, c->n_used, pick);
        for (int k = 0; k < c->n_used; k++) sum += weight[k] = score[pick[k]];
        if (!c->expert_norm) sum = 1;
        else if (sum < 6.103515625e-5f) sum = 6.103515625e-5f;
        for (int k = 0; k < c->n_used; k++) weight[k] = weight[k] / sum * c->expert_scale;
    }
}

/* Gives every (row, pick) a slot, grouped by expert, so that each expert is read once for all its rows. */
static void group_by_expert(const pass *p) {
    const config *c = &p->e->model->c;
    scratch *s = &p->e->s;
    int32_t *start = s->expert_start;
    int n = p->n * c->n_used;
    memset(start, 0, (size_t)(c->n_experts + 1) * sizeof *start);
    for (int i = 0; i < n; i++) start[s->picks[i] + 1]++;
    for (int i = 0; i < c->n_experts; i++) start[i + 1] += start[i];
    for (int i = 0; i < n; i++) {
        int32_t slot = start[s->picks[i]]++;
        s->slots[i] = slot;
        s->slot_rows[slot] = i / c->n_used;
    }
    memmove(start + 1, start, (size_t)c->n_experts * sizeof *start);
    start[0] = 0;
}

typedef struct {
    const kernels *k;
    int64_t n;
    float *gate;
    const float *up;
    float limit;
} swiglu_job;

static void swiglu_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const swiglu_job *j = ctx;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        j->k->swiglu(j->n, j->gate + r * j->n, j->up + r * j->n, j->limit, j->gate + r * j->n);
}

static void add_experts(void *ctx, int64_t begin, int64_t end, int thread) {
    const pass *p = ctx;
    ds4_engine *e = p->e;
    const kernels *k = e->dev.k;
    int64_t dim = e->model->c.dim, used = e->model->c.n_used;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        const int32_t *slot = e->s.slots + r * used;
        const float *weight = e->s.pick_weights + r * used;
        float *sum = e->s.y + r * dim, *out = e->s.out + r * dim;
        k->scale_mul(dim, weight[0], e->s.down + slot[0] * dim, NULL, sum);
        for (int64_t i = 1; i < used; i++) k->axpy(dim, weight[i], e->s.down + slot[i] * dim, sum);
        k->axpy(dim, 1.0f, sum, out);
    }
}

/* One matrix of every expert that has rows. */
static int expert_products(const pass *p, const matrix *w, input *in, const int32_t *rows, float *out, product *list) {
    const scratch *s = &p->e->s;
    int n = 0;
    for (int i = 0; i < p->e->model->c.n_experts; i++) {
        int from = s->expert_start[i], m = s->expert_start[i + 1] - from;
        if (m)
            list[n++] = (product){.w = w,
                                  .data = w->data + (size_t)i * w->slab,
                                  .n_out = w->n_out,
                                  .in = in,
                                  .rows = rows + from,
                                  .m = m,
                                  .out = out + from * w->n_out,
                                  .ldo = w->n_out};
    }
    return n;
}

static void moe(const pass *p) {
    ds4_engine *e = p->e;
    const config *c = &e->model->c;
    const layer *l = p->l;
    scratch *s = &e->s;
    product router = product_of(&l->router, &s->in_y, s->scores);
    products(&e->dev, &router, 1);
    pool_run(e->dev.pool, p->n, (int64_t)c->n_experts * (16 + c->n_used), route, (void *)(uintptr_t)p);
    group_by_expert(p);
    int slots = p->n * c->n_used, n = 0;
    n += expert_products(p, &l->gate, &s->in_y, s->slot_rows, s->gate, s->list);
    work_add(&e->work.experts, n);
    n += expert_products(p, &l->up, &s->in_y, s->slot_rows, s->up, s->list + n);
    s->list[n++] = product_of(&l->shared_gate, &s->in_y, s->shared_gate);
    s->list[n++] = product_of(&l->shared_up, &s->in_y, s->shared_up);
    products(&e->dev, s->list, n);
    swiglu_job routed = {e->dev.k, l->ff, s->gate, s->up, l->clamp},
               shared = {e->dev.k, l->shared_ff, s->shared_gate, s->shared_up, l->clamp_shared};
    pool_run(e->dev.pool, slots, l->ff / 2, swiglu_rows, &routed);
    pool_run(e->dev.pool, p->n, l->shared_ff / 2, swiglu_rows, &shared);
    s->in_act.n = l->ff;
    s->in_shared.n = l->shared_ff;
    input_set(&s->in_act, s->gate, slots);
    input_set(&s->in_shared, s->shared_gate, p->n);
    n = expert_products(p, &l->down, &s->in_act, s->iota, s->down, s->list);
    s->list[n++] = product_of(&l->shared_down, &s->in_shared, s->out);
    products(&e->dev, s->list, n);
    pool_run(e->dev.pool, p->n, (int64_t)c->dim * (c->n_used + 1) / 8, add_experts, (void *)(uintptr_t)p);
}

/* ---- the pass ---- */

static void block(pass *p) {
    hyper_enter(p, &p->l->hc_attn, p->l->attn_norm);
    attention(p);
    hyper_leave(p);
    hyper_enter(p, &p->l->hc_ffn, p->l->ffn_norm);
    moe(p);
    hyper_leave(p);
}

static void embed_row(const ds4_engine *e, int token, float *out) {
    const matrix *w = &e->model->embed;
    e->dev.k->dequantise(w->type, w->n_in, w->data + (size_t)token * w->stride, out);
}

static float *session_streams(const ds4_session *s, int position) {
    return s->streams + (size_t)(position % s->stream_ring) * s->engine->sizes.streams;
}

static void rope_rows(const pass *p) {
    const model *m = p->e->model;
    int pairs = m->c.rope_dim / 2;
    for (int r = 0; r < p->n; r++) {
        rope_table(m->freq, pairs, p->rows[r].position, p->e->s.rope + (int64_t)r * m->c.rope_dim);
        rope_table(m->freq_compressed, pairs, p->rows[r].position, p->e->s.rope_compressed + (int64_t)r * m->c.rope_dim);
    }
}

/* Every stream begins as the token's embedding. */
static void embed_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const pass *p = ctx;
    const config *c = &p->e->model->c;
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        float *x = p->e->s.x + (size_t)r * p->e->sizes.streams;
        embed_row(p->e, p->rows[r].token, x);
        for (int i = 1; i < c->n_streams; i++) memcpy(x + (size_t)i * (size_t)c->dim, x, (size_t)c->dim * sizeof *x);
    }
}

static void keep_streams(void *ctx, int64_t begin, int64_t end, int thread) {
    const pass *p = ctx;
    size_t streams = p->e->sizes.streams;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        memcpy(session_streams(p->rows[r].s, p->rows[r].position), p->e->s.x + (size_t)r * streams, streams * sizeof(float));
}

/* Runs rows through the target. Their streams stay in scratch (row r at e->s.x) and in each session's ring. */
static void forward(ds4_engine *e, const pass_row *rows, int n) {
    const config *c = &e->model->c;
    pass p = {.e = e, .rows = rows, .n = n};
    work_add(&e->work.passes, 1);
    work_add(&e->work.rows, n);
    pool_run(e->dev.pool, n, (int64_t)e->sizes.streams / 8, embed_rows, &p);
    rope_rows(&p);
    for (p.index = 0; p.index < c->n_layers; p.index++) {
        p.l = &e->model->layers[p.index];
        block(&p);
    }
    pool_run(e->dev.pool, n, (int64_t)e->sizes.streams / 8, keep_streams, &p);
}

/* What the output matrix takes, for n rows from their streams x (n, n_streams * dim): collapse, norm; into in_y. */
static void collapse(ds4_engine *e, const float *x, int n, const hyper *h, const float *norm) {
    const config *c = &e->model->c;
    const kernels *k = e->dev.k;
    scratch *s = &e->s;
    input_set(&s->in_mix, x, n);
    product fn = product_of(&h->fn, &s->in_mix, s->mix);
    products(&e->dev, &fn, 1);
    for (int r = 0; r < n; r++) {
        float *w = s->mix + (int64_t)r * c->n_streams, *y = s->y + (int64_t)r * c->dim;
        const float *streams = x + (size_t)r * e->sizes.streams;
        float factor = rms_factor(k, (int64_t)e->sizes.streams, streams, c->norm_eps);
        for (int i = 0; i < c->n_streams; i++) w[i] = w[i] * factor * h->scale[0] + h->base[i];
        k->sigmoid(c->n_streams, w, w);
        for (int i = 0; i < c->n_streams; i++) w[i] += c->hc_eps;
        k->scale_mul(c->dim, w[0], streams, NULL, y);
        k->mix(c->dim, w + 1, c->n_streams, 1, streams + c->dim, c->dim, c->n_streams - 1, y);
        rms_norm(k, c->dim, y, norm, c->norm_eps, y);
    }
    input_set(&s->in_y, s->y, n);
}

/* Logits of n rows from their streams x. out (n, n_vocab). */
static void output_logits(ds4_engine *e, const float *x, int n, const hyper *h, const float *norm, float *out) {
    collapse(e, x, n, h, norm);
    work_add(&e->work.logit_rows, n);
    product output = product_of(&e->model->output, &e->s.in_y, out);
    products(&e->dev, &output, 1);
}

/* ---- scratch ---- */

/* A file's sizes decide what memory the engine asks for, so thin tensors of great width could make much of few bytes. */
static int out_of_proportion(const char *path, int64_t file_bytes) {
    return fail(
        "%s: the sizes of its layers are out of proportion to a file of %lld bytes: a pass of %d rows and sessions of 64 "
        "tokens would need more than twice that and 64 MB of memory",
        path, (long long)file_bytes, DS4_MAX_DRAFT + 1);
}

static int scratch_count(scratch *s, int64_t bytes) {
    s->bytes += bytes;
    return s->bytes <= s->most ? 0 : out_of_proportion(s->path, s->file_bytes);
}

static void *scratch_part(scratch *s, size_t count, size_t size) {
    void *p = scratch_count(s, (int64_t)(count * size)) ? NULL : mem_array(count, size);
    if (p) s->owned[s->n_owned++] = p;
    return p;
}

static int scratch_input(scratch *s, input *in, int64_t n, int rows) {
    return scratch_count(s, (int64_t)input_bytes(n, rows)) ? -1 : input_new(in, n, rows);
}

/* Where a thread unpacks rows and keeps what it works on: attention scores of all heads, or an emitted window. */
static size_t thread_floats(const config *c, int ctx) {
    int64_t windows = 0;
    for (int i = 0; i < c->n_layers; i++) {
        int64_t seen = c->ratio[i] == 0 ? 0 : ctx / c->ratio[i];
        if (c->ratio[i] == 4 && seen > c->index_top_k) seen = c->index_top_k;
        if (seen > windows) windows = seen;
    }
    int64_t attention = SEEN_TILE * (c->head_dim + SEEN_GAP) + (min_int(c->window, ctx) + windows) * c->n_heads;
    int64_t index = c->index_heads * (INDEX_TILE + 1), window = 3 * max_int(c->head_dim, c->index_dim) + c->rope_dim;
    int64_t most = attention > index ? attention : index;
    return (size_t)(most > window ? most : window) + 64;
}

static int scratch_new(scratch *s, const config *c, int rows, int threads, int ctx, bool head) {
    size_t n = (size_t)rows, dim = (size_t)c->dim, streams = dim * (size_t)c->n_streams,
           heads = (size_t)c->n_heads * (size_t)c->head_dim, used = n * (size_t)c->n_used, ff = 0;
    for (int i = 0; i <= c->n_layers; i++) ff = (size_t)c->expert_ff[i] > ff ? (size_t)c->expert_ff[i] : ff;
    size_t shared = ff * (size_t)c->n_shared, index = (size_t)c->index_dim, slots = used > n ? used : n;
    s->rows = rows;
    s->index_group = min_int(rows, max_int(2 * threads, DS4_MAX_DRAFT + 1));
    struct {
        float **to;
        size_t count;
    } floats[] = {{&s->x, n * streams},
                  {&s->x_next, n * streams},
                  {&s->mix, n * (size_t)(c->n_streams * (2 + c->n_streams))},
                  {&s->y, n * dim},
                  {&s->out, n * dim},
                  {&s->rope, n * (size_t)c->rope_dim},
                  {&s->rope_compressed, n * (size_t)c->rope_dim},
                  {&s->qr, n * (size_t)c->q_rank},
                  {&s->q, n * heads},
                  {&s->kv, n * (size_t)c->head_dim},
                  {&s->comp_kv, 2 * n * (size_t)c->head_dim},
                  {&s->comp_gate, 2 * n * (size_t)c->head_dim},
                  {&s->index_kv, 2 * n * index},
                  {&s->index_gate, 2 * n * index},
                  {&s->index_q, n * (size_t)c->index_heads * index},
                  {&s->index_w, n * (size_t)c->index_heads},
                  {&s->index_scores, index ? (size_t)s->index_group * (size_t)(ctx / 4 + 1) : 1},
                  {&s->attended, n * heads},
                  {&s->low, n * (size_t)c->o_groups * (size_t)c->o_rank},
                  {&s->scores, n * (size_t)c->n_experts},
                  {&s->pick_weights, used},
                  {&s->gate, used * ff},
                  {&s->up, used * ff},
                  {&s->down, used * dim},
                  {&s->shared_gate, n * shared},
                  {&s->shared_up, n * shared},
                  {&s->head_e, head ? n * dim : 1},
                  {&s->head_norm, head ? n * streams : 1}};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
        if (!(*floats[i].to = scratch_part(s, floats[i].count, sizeof(float)))) return -1;
    struct {
        int32_t **to;
        size_t count;
    } ints[] = {{&s->selected, n * (size_t)max_int(1, min_int(c->index_top_k, ctx / 4))},
                {&s->group_rows, n * (size_t)c->o_groups},
                {&s->picks, used},
                {&s->slots, used},
                {&s->slot_rows, used},
                {&s->expert_start, (size_t)c->n_experts + 1},
                {&s->iota, slots}};
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++)
        if (!(*ints[i].to = scratch_part(s, ints[i].count, sizeof(int32_t)))) return -1;
    for (size_t i = 0; i < slots; i++) s->iota[i] = (int32_t)i;
    if (!(s->list = scratch_part(s, (size_t)(2 * c->n_experts + 8 + c->o_groups), sizeof *s->list)) ||
        !(s->thread_room = scratch_part(s, (size_t)threads, sizeof *s->thread_room)))
        return -1;
    s->thread_floats = thread_floats(c, ctx);
    for (int i = 0; i < threads; i++)
        if (!(s->thread_room[i] = mem_array(s->thread_floats, sizeof(float)))) return -1;
    s->bytes += (int64_t)(s->thread_floats * sizeof(float)) * threads;
    return scratch_input(s, &s->in_mix, (int64_t)streams, rows) || scratch_input(s, &s->in_y, c->dim, rows) ||
                   scratch_input(s, &s->in_qr, c->q_rank, rows) ||
                   scratch_input(s, &s->in_heads, (int64_t)heads / c->o_groups, rows * c->o_groups) ||
                   scratch_input(s, &s->in_low, (int64_t)c->o_groups * c->o_rank, rows) ||
                   scratch_input(s, &s->in_act, (int64_t)ff, (int)used) ||
                   scratch_input(s, &s->in_shared, (int64_t)shared, rows) ||
                   (head &&
                    (scratch_input(s, &s->in_e, c->dim, rows) || scratch_input(s, &s->in_h, c->dim, rows * c->n_streams)))
               ? -1
               : 0;
}

static void scratch_free(scratch *s, int threads) {
    for (int i = 0; s->thread_room && i < threads; i++) mem_free(s->thread_room[i]);
    for (int i = 0; i < s->n_owned; i++) mem_free(s->owned[i]);
    input *inputs[] = {&s->in_mix, &s->in_y,      &s->in_qr, &s->in_heads, &s->in_low,
                       &s->in_act, &s->in_shared, &s->in_e,  &s->in_h};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) input_free(inputs[i]);
}

/* ============================================================================================================================
 * 10. Sampling
 *
 * How a token is chosen from a row of logits, the target's or the head's: one way for both. Penalties, bias and mask adjust
 * the logits; temperature and the filters give a law p; the draw is argmax over ids of log p + Gumbel noise that depends on
 * (seed, position, id) alone (Gumbel-max). So a seed's text does not depend on how often, or with what company, the model ran.
 * ========================================================================================================================== */

typedef struct candidate {
    float logit; /* log-weight, relative to the best candidate's */
    int id;
} candidate;

static bool candidate_before(const candidate *a, const candidate *b) {
    return a->logit != b->logit ? a->logit > b->logit : a->id < b->id;
}

/* What a random number is for: each purpose has its own stream. */
typedef enum { FOR_TOKEN, FOR_DRAFT, FOR_VERDICT, FOR_REST } purpose;

/* A uniform number in (0, 1) from a counter: SplitMix64's mixing of (seed, position, id). */
static double uniform(uint64_t seed, uint64_t position, uint64_t id) {
    uint64_t x = seed;
    const uint64_t parts[2] = {position, id};
    for (int i = 0; i < 2; i++) {
        x += 0x9e3779b97f4a7c15u * (parts[i] + 1);
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
    }
    return ((double)(x >> 12) + 0.5) * 0x1p-52;
}

static uint64_t stream_of(uint64_t seed, purpose why) { return seed ^ (0xd1342543de82ef95u * (uint64_t)why); }

static int check_gen(const ds4_gen *g) {
    if (!(g->temperature >= 0 && g->temperature <= 100))
        return fail("temperature is %g; expected 0 to 100", (double)g->temperature);
    if (g->top_k < 0) return fail("top_k is %d; expected 0 or more", g->top_k);
    if (!(g->top_p >= 0 && g->top_p <= 1)) return fail("top_p is %g; expected 0 to 1", (double)g->top_p);
    if (!(g->min_p >= 0 && g->min_p <= 1)) return fail("min_p is %g; expected 0 to 1", (double)g->min_p);
    if (!(fabsf(g->presence_penalty) <= 100))
        return fail("presence_penalty is %g; expected -100 to 100", (double)g->presence_penalty);
    if (!(fabsf(g->frequency_penalty) <= 100))
        return fail("frequency_penalty is %g; expected -100 to 100", (double)g->frequency_penalty);
    if (g->penalty_from < 0) return fail("penalty_from is %d; expected a position, 0 or more", g->penalty_from);
    if (g->scheme != DS4_COUPLED && g->scheme != DS4_REJECTION)
        return fail("scheme is %d; expected DS4_COUPLED or DS4_REJECTION", (int)g->scheme);
    return 0;
}

static int check_bias(const ds4_gen *g, int n_vocab) {
    if (g->n_bias && !g->bias) return fail("bias is missing; n_bias is %zu", g->n_bias);
    for (size_t i = 0; i < g->n_bias; i++) {
        if (g->bias[i].token < 0 || g->bias[i].token >= n_vocab)
            return fail("bias for token %d, which is outside the vocabulary (0 to %d)", g->bias[i].token, n_vocab - 1);
        float b = g->bias[i].bias;
        if (!(b < INFINITY)) return fail("bias of token %d is %g; expected a number or -inf", g->bias[i].token, (double)b);
    }
    return 0;
}

static uint64_t law_of_gen(const ds4_gen *g) {
    bool penalties = g->presence_penalty != 0 || g->frequency_penalty != 0;
    const double parts[] = {g->temperature,
                            g->top_k,
                            g->top_p,
                            g->min_p,
                            g->scheme,
                            g->presence_penalty,
                            g->frequency_penalty,
                            penalties ? g->penalty_from : 0};
    if (g->mask) return 0;
    uint64_t h = checksum(g->seed, parts, sizeof parts);
    for (size_t i = 0; i < g->n_bias; i++) {
        const double bias[] = {g->bias[i].token, g->bias[i].bias};
        h = checksum(h, bias, sizeof bias);
    }
    return h | 1;
}

static void sampler_free(sampler *b) {
    mem_free((void *)(uintptr_t)b->gen.bias);
    mem_free(b->counts);
    mem_free(b->draft_logits);
    *b = (sampler){0};
}

/* A sampler of its own copy of g. */
static int sampler_new(sampler *b, const ds4_gen *g, int n_vocab) {
    *b = (sampler){0};
    if (check_gen(g) || check_bias(g, n_vocab)) return -1;
    ds4_bias *bias = NULL;
    bool counts = g->presence_penalty != 0 || g->frequency_penalty != 0,
         laws = g->scheme == DS4_REJECTION && g->temperature > 0;
    b->gen = *g;
    b->gen.bias = NULL;
    b->counted = g->penalty_from;
    if ((g->n_bias && !(b->gen.bias = bias = mem_array(g->n_bias, sizeof *bias))) ||
        (counts && !(b->counts = mem_array((size_t)n_vocab, sizeof *b->counts))) ||
        (laws && !(b->draft_logits = mem_array((size_t)(DS4_MAX_DRAFT + 1) * (size_t)n_vocab, sizeof(float))))) {
        sampler_free(b);
        return -1;
    }
    if (g->n_bias) memcpy(bias, g->bias, g->n_bias * sizeof *bias);
    b->law = law_of_gen(&b->gen);
    return 0;
}

/* Makes the counts those of the text's first `to` tokens. Tokens above the session's position are a cycle's drafts: they are
 * counted for the rows behind them and taken back before they are overwritten (session_settle). */
static void count_to(const ds4_session *s, sampler *b, int to) {
    to = max_int(to, b->gen.penalty_from);
    while (b->counted < to) b->counts[s->tokens[b->counted++]]++;
    while (b->counted > to) b->counts[s->tokens[--b->counted]]--;
}

/* The logit of a token that bias or mask rule out: a number, so that argmax has an order for it. */
#define FORBIDDEN (-FLT_MAX)

static float max_float(float a, float b) { return a > b ? a : b; }

/* Logits z of the token at `position` with penalties, bias and mask, in the engine's room; z itself if there are none. */
static const float *adjusted(ds4_session *s, sampler *b, const float *z, int position) {
    ds4_engine *e = s->engine;
    const ds4_gen *g = &b->gen;
    int V = e->model->c.n_vocab, left = 0;
    if (!b->counts && !g->n_bias && !g->mask) return z;
    float *out = e->adjusted;
    memcpy(out, z, (size_t)V * sizeof *out);
    if (b->counts) {
        count_to(s, b, position);
        for (int i = 0; i < V; i++)
            if (b->counts[i]) out[i] -= g->presence_penalty + (float)b->counts[i] * g->frequency_penalty;
    }
    for (size_t i = 0; i < g->n_bias; i++) {
        float *to = &out[g->bias[i].token];
        *to = max_float(*to + g->bias[i].bias, FORBIDDEN);
    }
    if (g->mask) {
        memset(e->allowed, 1, (size_t)(unsigned)V);
        if (g->mask(g->mask_ctx, s->tokens, position, e->allowed)) {
            fail("the mask callback failed at position %d", position);
            return NULL;
        }
        for (int i = 0; i < V; i++)
            if (!e->allowed[i]) out[i] = FORBIDDEN;
    }
    for (int i = 0; i < V; i++) left += out[i] > FORBIDDEN;
    if (left) return out;
    fail("bias and mask leave no token at position %d", position);
    return NULL;
}

/* ---- the law ---- */

/* c[0..n-1] is a heap below i but for i itself. */
static void candidates_sift(candidate *c, int n, int i) {
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && candidate_before(&c[child + 1], &c[child])) child++;
        if (!candidate_before(&c[child], &c[i])) return;
        candidate swap = c[i];
        c[i] = c[child];
        c[child] = swap;
    }
}

static void candidates_heap(candidate *c, int n) {
    for (int i = n / 2 - 1; i >= 0; i--) candidates_sift(c, n, i);
}

/* Moves the best of a heap of n to c[n - 1]; the others stay a heap. */
static void take_best(candidate *c, int n) {
    candidate best = c[0];
    c[0] = c[n - 1];
    c[n - 1] = best;
    candidates_sift(c, n - 1, 0);
}

static double d_max(double a, double b) { return a > b ? a : b; }
static double weight_of(const candidate *c) { return d_exp((double)c->logit); }

/* What top_k, top_p and min_p leave of n candidates; their number goes to *kept. By selection: what is cut is never sorted. */
static candidate *filter(candidate *c, int n, const ds4_gen *g, int *kept) {
    *kept = n;
    if (!(g->top_k > 0 && g->top_k < n) && g->top_p >= 1 && g->min_p <= 0) return c;
    int limit = g->top_k > 0 ? min_int(g->top_k, n) : n, popped = 0, i = 0;
    double total = 0, sum = 0;
    candidates_heap(c, n);
    if (limit < n)
        for (; popped < limit; popped++) take_best(c, n - popped);
    for (int k = limit < n ? n - limit : 0; k < n; k++) total += weight_of(&c[k]);
    for (; i < limit; i++) {
        if (popped == i) take_best(c, n - popped++);
        double p = weight_of(&c[n - 1 - i]);
        if (i > 0 && (p < (double)g->min_p || sum >= (double)g->top_p * total)) break;
        sum += p;
    }
    *kept = i;
    return c + n - i;
}

/* The law of logits z (n) at a temperature above 0: candidates with their log-weights, in `room` (n). */
static candidate *law_of(const float *z, int n, const ds4_gen *g, candidate *room, int *kept) {
    double top = -INFINITY;
    int m = 0;
    for (int i = 0; i < n; i++) top = (double)z[i] > top ? (double)z[i] : top;
    for (int i = 0; i < n; i++) {
        if (z[i] <= FORBIDDEN) continue;
        /* Relative to the best one, so that no temperature overflows it. */
        double x = ((double)z[i] - top) / (double)g->temperature;
        room[m++] = (candidate){x > -1e30 ? (float)x : -1e30f, i};
    }
    return filter(room, m, g, kept);
}

/* argmax of log-weight + Gumbel noise; ties to the lowest id. A candidate behind the best score by t wins only if its uniform
 * number is above exp(-exp(-t)): most are settled by comparing it with a bound for whole t. */
static int draw(const candidate *c, int n, uint64_t seed, int position) {
    enum { BOUNDS = 36 };
    double bounds[BOUNDS], best_score = -INFINITY;
    int best = -1;
    for (int t = 0; t < BOUNDS; t++) bounds[t] = n > 4 * BOUNDS ? d_exp(-d_exp(-(double)t)) - 1e-9 : 0;
    for (int i = 0; i < n; i++) {
        double u = uniform(seed, (uint64_t)position, (uint64_t)c[i].id), behind = best_score - (double)c[i].logit;
        if (behind > 0 && u < bounds[behind < BOUNDS - 1 ? (int)behind : BOUNDS - 1]) continue;
        double score = (double)c[i].logit - d_log(-d_log(u));
        if (best < 0 || score > best_score || (score == best_score && c[i].id < best)) {
            best = c[i].id;
            best_score = score;
        }
    }
    return best;
}

/* The token that a sampler takes at `position` from logits z; the text before it is in s->tokens. -1 on failure. */
static int choose(ds4_session *s, sampler *b, const float *z, int position, purpose why) {
    ds4_engine *e = s->engine;
    int V = e->model->c.n_vocab, kept;
    if (!(z = adjusted(s, b, z, position))) return -1;
    if (b->gen.temperature == 0) return (int)e->dev.k->argmax(V, z);
    const candidate *law = law_of(z, V, &b->gen, e->candidates, &kept);
    return draw(law, kept, stream_of(b->gen.seed, why), position);
}

/* Rejection (Leviathan et al. 2023; Chen et al. 2023): draft x, drawn from the law of the head's logits `q` (NULL: certain to be
 * x), against the target's logits z. Returns x if it is taken, else a token drawn from normalise((p - q)+); -1 on failure. */
static int judge(ds4_session *s, sampler *b, const float *z, const float *q, int x, int position) {
    ds4_engine *e = s->engine;
    int V = e->model->c.n_vocab, np, nq;
    double *weight = e->weights, p_total = 0, q_total = 0, px = 0, qx = 1;
    memset(weight, 0, (size_t)V * sizeof *weight);
    if (q) {
        if (!(q = adjusted(s, b, q, position))) return -1;
        const candidate *c = law_of(q, V, &b->gen, e->candidates, &nq);
        for (int i = 0; i < nq; i++) q_total += weight_of(&c[i]);
        for (int i = 0; i < nq; i++) weight[c[i].id] = weight_of(&c[i]) / q_total;
        qx = weight[x];
    } else weight[x] = 1;
    if (!(z = adjusted(s, b, z, position))) return -1;
    const candidate *c = law_of(z, V, &b->gen, e->candidates, &np);
    for (int i = 0; i < np; i++) p_total += weight_of(&c[i]);
    for (int i = 0; i < np; i++)
        if (c[i].id == x) px = weight_of(&c[i]) / p_total;
    if (uniform(stream_of(b->gen.seed, FOR_VERDICT), (uint64_t)position, 0) * qx < px) return x;
    double rest = 0, sum = 0;
    for (int i = 0; i < np; i++) rest += d_max(0, weight_of(&c[i]) / p_total - weight[c[i].id]);
    double at = uniform(stream_of(b->gen.seed, FOR_REST), (uint64_t)position, 0) * rest;
    int last = -1;
    for (int i = 0; i < np && sum <= at; i++) {
        double r = weight_of(&c[i]) / p_total - weight[c[i].id];
        if (r <= 0) continue;
        sum += r;
        last = c[i].id;
    }
    return last >= 0 ? last : x; /* p and q equal but for rounding */
}

/* log of the sum of exp(z). */
static double log_sum_exp(const float *z, int n) {
    double top = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) top = (double)z[i] > top ? (double)z[i] : top;
    for (int i = 0; i < n; i++) sum += d_exp((double)z[i] - top);
    return top + d_log(sum);
}

/* ============================================================================================================================
 * 11. MTP head and drafters
 *
 * Row q of the head is made from the target's streams at q and the token at q + 1, and guesses the token at q + 2. What later
 * rows see of it is its kv row alone, a pure function of those two; so a row that was made while drafting (from the head's own
 * streams) is replaced by making it again, without attention or MoE, and rows are made only when a draft is about to look
 * at them: a prompt costs the head no more than its window.
 * ========================================================================================================================== */

/* X_in[i] = e_proj norm(E[token]) + h_proj norm(X_i) for each stream i, into e->s.x. */
static void head_inputs(ds4_engine *e, const pass_row *rows, int n, const float *const *streams) {
    const config *c = &e->model->c;
    const mtp_head *h = &e->model->head;
    const kernels *k = e->dev.k;
    scratch *s = &e->s;
    for (int r = 0; r < n; r++) {
        float *embedding = s->head_e + (int64_t)r * c->dim;
        embed_row(e, rows[r].token, embedding);
        rms_norm(k, c->dim, embedding, h->enorm, c->norm_eps, embedding);
        for (int i = 0; i < c->n_streams; i++)
            rms_norm(k, c->dim, streams[r] + (int64_t)i * c->dim, h->hnorm, c->norm_eps,
                     s->head_norm + ((int64_t)r * c->n_streams + i) * c->dim);
    }
    input_set(&s->in_e, s->head_e, n);
    input_set(&s->in_h, s->head_norm, n * c->n_streams);
    product list[] = {product_of(&h->e_proj, &s->in_e, s->out), product_of(&h->h_proj, &s->in_h, s->x)};
    products(&e->dev, list, 2);
    for (int r = 0; r < n; r++)
        for (int i = 0; i < c->n_streams; i++)
            k->axpy(c->dim, 1.0f, s->out + (int64_t)r * c->dim, s->x + ((int64_t)r * c->n_streams + i) * c->dim);
}

/* Runs head rows; the output streams are in e->s.x. kv_only: what later rows see of them and no more. */
static void head_forward(ds4_engine *e, const pass_row *rows, int n, const float *const *streams, bool kv_only) {
    pass p = {.e = e, .rows = rows, .n = n, .l = &e->model->head.block, .index = e->model->c.n_layers};
    work_add(&e->work.head_passes, 1);
    work_add(kv_only ? &e->work.repaired_rows : &e->work.head_rows, n);
    rope_rows(&p);
    head_inputs(e, rows, n, streams);
    if (!kv_only) {
        block(&p);
        return;
    }
    hyper_enter(&p, &p.l->hc_attn, p.l->attn_norm);
    product kv = product_of(&p.l->kv, &e->s.in_y, e->s.kv);
    products(&e->dev, &kv, 1);
    store_kv(&p);
}

static void head_logits(ds4_engine *e, int n, float *out) {
    output_logits(e, e->s.x, n, &e->model->head.collapse, e->model->head.norm, out);
}

/* ---- the shortlist ----
 *
 * Most of a draft step's time would go into logits of tokens that are hardly ever drafted. A step computes those of a list: the
 * vocabulary's first ids (byte-pair merging finds them in the order of their frequency), and whatever the session's text holds.
 * So it depends on the text alone, not on other sessions. The target judges drafts by its whole vocabulary: the list trades how
 * often drafts are right for their cost, and never changes the text. */

static int shortlist_new(shortlist *l, const ds4_engine *e) {
    int V = e->model->c.n_vocab;
    if (!e->shortlist) return 0;
    size_t words = (size_t)(V + 63) / 64;
    if (!(l->counts = mem_array((size_t)V, sizeof *l->counts)) || !(l->has = mem_array(words, sizeof *l->has))) return -1;
    for (int i = 0; i < e->shortlist; i++) l->has[i / 64] |= (uint64_t)1 << i % 64;
    return 0;
}

/* Makes the list that of the text's first `to` tokens. It shrinks before the tokens it counted are overwritten. */
static void shortlist_to(ds4_session *s, int to) {
    shortlist *l = &s->listed;
    int own = s->engine->shortlist;
    for (; l->counts && l->counted < to; l->counted++) {
        int t = s->tokens[l->counted];
        l->counts[t]++;
        l->has[t / 64] |= (uint64_t)1 << t % 64;
    }
    while (l->counts && l->counted > to) {
        int t = s->tokens[--l->counted];
        if (--l->counts[t] == 0 && t >= own) l->has[t / 64] &= ~((uint64_t)1 << t % 64);
    }
}

typedef struct {
    ds4_engine *e;
    int m;
    float *out;
} listed_job;

/* Logits of listed ids begin..end-1 of all rows: ids that follow one another in one product. */
static void listed_logits(void *ctx, int64_t begin, int64_t end, int thread) {
    const listed_job *j = ctx;
    const ds4_engine *e = j->e;
    const matrix *w = &e->model->output;
    const acts x = input_acts(&e->s.in_y, w->act);
    (void)thread;
    for (int64_t i = begin, n; i < end; i += n) {
        int32_t first = e->listed[i];
        for (n = 1; i + n < end && e->listed[i + n] == first + n;) n++;
        e->dev.k->mat(w->type, w->n_in, w->data + (size_t)first * w->stride, w->stride, (int)n, &x, NULL, j->m, j->out + first,
                      (size_t)w->n_out);
    }
}

/* Logits of the head rows of m sessions (e->row_room), whose streams are in e->s.x, of those ids that each session lists; others
 * get the lowest number there is. All lists are read together, and a row keeps to its own. */
static void draft_logits(ds4_engine *e, int m, float *out) {
    const model *w = e->model;
    int V = w->c.n_vocab, n = 0;
    if (!e->shortlist) {
        head_logits(e, m, out);
        return;
    }
    collapse(e, e->s.x, m, &w->head.collapse, w->head.norm);
    input_need(&e->dev, &e->s.in_y, w->output.act);
    for (int i = 0; i < m; i++) shortlist_to(e->row_room[i].s, e->row_room[i].s->position);
    for (int at = 0; at < V; at += 64) {
        uint64_t any = 0;
        for (int i = 0; i < m; i++) any |= e->row_room[i].s->listed.has[at / 64];
        for (; any; any &= any - 1) e->listed[n++] = at + __builtin_ctzll(any);
    }
    for (int64_t i = 0; i < (int64_t)m * V; i++) out[i] = FORBIDDEN;
    work_add(&e->work.logit_rows, m);
    work_add(&e->work.weight_bytes, n * (int64_t)w->output.bytes);
    listed_job job = {e, m, out};
    pool_run(e->dev.pool, n, w->output.n_in * (m + 3) / 64, listed_logits, &job);
    for (int i = 0; i < m && m > 1; i++)
        for (int k = 0; k < n; k++) {
            int id = e->listed[k];
            if (!(e->row_room[i].s->listed.has[id / 64] >> id % 64 & 1)) out[(int64_t)i * V + id] = FORBIDDEN;
        }
}

/* ---- the head's rows ---- */

/* Head rows from..to-1 from the target's streams; their tokens q + 1 are the session's. out: their logits, or NULL for kv only. */
static void head_rows(ds4_session *s, int from, int to, float *out) {
    ds4_engine *e = s->engine;
    pass_row *rows = e->row_room;
    const float **streams = e->stream_room;
    for (int n; from < to; from += n) {
        n = min_int(to - from, s->batch);
        for (int i = 0; i < n; i++) {
            rows[i] = (pass_row){s, from + i, s->tokens[from + i + 1]};
            streams[i] = session_streams(s, from + i);
        }
        head_forward(e, rows, n, streams, !out);
        s->stats.head_passes++;
        if (!out) continue;
        head_logits(e, n, out);
        out += (int64_t)n * e->model->c.n_vocab;
    }
}

/* Makes sure of the head rows that row `to` looks back on. */
static void head_catch_up(ds4_session *s, int to) {
    int need = max_int(0, to - (s->engine->model->c.window - 1));
    bool joined = s->head_from <= need && need <= s->head_to;
    if (!joined) s->head_from = s->head_to = need;
    if (s->head_to < to) head_rows(s, s->head_to, to, NULL);
    s->head_to = max_int(s->head_to, to);
}

/* ---- what passes and head steps cost here ----
 *
 * By number of rows (the knots below), measured as the engine works. Whatever else the machine does only adds to a time, so an
 * estimate is the lower quartile of the last few. What was not measured for a long while (the context has grown, the machine is
 * another), or only once or twice and not just now (it may have been disturbed), counts as unknown and is guessed from its
 * neighbours, low rather than high: so it is tried, and known. */

enum { COST_KEPT = 15, COST_TRUSTED = 3, COST_FRESH = 192, COST_DOUBTED = 32 };
enum { COST_KNOTS = DS4_MAX_DRAFT + 9, COST_FIRST = COST_KNOTS, COST_BACK, COST_MORE, COST_SLOTS };

static const int cost_rows[COST_KNOTS] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10,  11,  12, 13,
                                          14, 15, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256};

typedef struct {
    double kept[COST_KEPT], ms; /* the last times; their lower quartile */
    int n; /* times kept or overwritten */
    int64_t at; /* the last one's number */
} cost;

typedef struct costs {
    /* Passes by knot; a cycle's first head step, what it repairs included; the same after a pause, with many rows to make; each
     * further one. */
    cost slots[COST_SLOTS];
    int64_t passes; /* timed */
} costs;

static bool cost_within(const costs *c, int slot, int passes) { return c->passes - c->slots[slot].at < passes; }
static bool cost_known(const costs *c, int slot) {
    int n = c->slots[slot].n;
    return n > 0 && cost_within(c, slot, n < COST_TRUSTED ? COST_DOUBTED : COST_FRESH);
}

static void cost_add(costs *c, int slot, double ms) {
    cost *s = &c->slots[slot];
    if (!cost_within(c, slot, COST_FRESH)) s->n = 0;
    s->kept[s->n++ % COST_KEPT] = ms;
    s->at = c->passes;
    double sorted[COST_KEPT];
    int n = min_int(s->n, COST_KEPT);
    for (int i = 0; i < n; i++) {
        int at = i;
        for (; at > 0 && sorted[at - 1] > s->kept[i]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = s->kept[i];
    }
    s->ms = sorted[(n - 1) / 4];
}

/* A pass of `rows` rows took `ms`; between knots it counts for the nearer one. */
static void cost_add_pass(costs *c, int rows, double ms) {
    int i = 0;
    while (i + 1 < COST_KNOTS && cost_rows[i + 1] <= rows) i++;
    if (i + 1 < COST_KNOTS && cost_rows[i + 1] - rows < rows - cost_rows[i]) i++;
    c->passes++;
    cost_add(c, i, ms * cost_rows[i] / rows);
}

static double cost_slope(const costs *c, int from, int to) {
    return (c->slots[to].ms - c->slots[from].ms) / (cost_rows[to] - cost_rows[from]);
}

/* Milliseconds of a pass; 0 if nothing is known. Between known knots by interpolation; beyond them further rows are taken to
 * cost no more than those before, the last or all on average. */
static double cost_pass(const costs *c, int rows) {
    int first = -1, low = -1, lower = -1, high = -1;
    for (int i = 0; i < COST_KNOTS; i++) {
        if (!cost_known(c, i)) continue;
        if (first < 0) first = i;
        if (cost_rows[i] <= rows) {
            lower = low;
            low = i;
        } else if (high < 0) high = i;
    }
    if (low < 0) return high < 0 ? 0 : c->slots[high].ms * rows / cost_rows[high];
    double slope = high >= 0    ? cost_slope(c, low, high)
                   : lower >= 0 ? cost_slope(c, lower, low)
                                : c->slots[low].ms / (10 * cost_rows[low]);
    if (high < 0 && lower >= 0 && slope > cost_slope(c, first, low)) slope = cost_slope(c, first, low);
    return c->slots[low].ms + (slope > 0 ? slope : 0) * (rows - cost_rows[low]);
}

static double cost_step(const costs *c, int slot) { return cost_known(c, slot) ? c->slots[slot].ms : 0; }

/* ---- how many drafts are worth their time ----
 *
 * A draft costs a step of its drafter and a row of the pass, and brings a token if it and all before it are accepted. `auto`
 * drafts as many as bring the most tokens a millisecond, none included. How likely a draft is to be accepted it knows from
 * the drafts before: by place in the cycle, by the head's own lead, by the length of a lookup's match. A session begins with
 * the belief that drafts are good, which few of them outvote. Where drafting does not pay by what is known, trials go on
 * within bounds: what they cost beyond what they bring is a debt, of which PACE_DEBT may stand open and PACE_TRIALS of the time
 * pays back, more of it while a session is young. So a head that is always wrong costs a few passes, and then less than a
 * hundredth. Nothing here touches the text, and everything is a function of the costs and of what was accepted. */

enum { PACE_LEADS = 8, PACE_MATCHES = 6 };
static const double PACE_PRIOR = 0.7; /* of a first draft, until there is evidence */
static const double PACE_KEEP = 127 / 128.0; /* of the evidence, with each new draft */
static const double PACE_RECENT = 6;
static const double PACE_DEBT = 1; /* a plain pass */
static const double PACE_TRIALS = 0.007;
static const double PACE_YOUNG = 0.02; /* instead, in the first PACE_YOUTH cycles: a text may begin badly */
enum { PACE_YOUTH = 128 };

/* Over about the last 128 drafts. */
typedef struct {
    double hits, seen;
} record;

static void record_fade(record *r, double keep) {
    r->hits *= keep;
    r->seen *= keep;
}

static void records_add(record *r, int n, int at, bool hit) {
    for (int i = 0; i < n; i++) record_fade(&r[i], PACE_KEEP);
    r[at].hits += hit;
    r[at].seen += 1;
}

/* The share of hits, with `prior` as so many drafts' worth of evidence. */
static double record_rate(const record *r, double prior, double worth) { return (r->hits + worth * prior) / (r->seen + worth); }

/* What a session has learned. In pairs: a cycle's first draft; those behind it. */
typedef struct pace {
    record place[DS4_MAX_DRAFT]; /* the drafter's drafts, given that those before were accepted */
    record behind; /* all places but the first: what is expected of those that were seldom come to */
    double recent[DS4_MAX_DRAFT]; /* the same over about the last PACE_RECENT */
    record lead[2][PACE_LEADS], match[2][PACE_MATCHES];
    double worse, better; /* how far hits have lately been below, above what was expected */
    double debt; /* plain passes that trials cost and neither brought nor were paid back */
    int age; /* cycles, up to PACE_YOUTH */
    bool on; /* the last plan drafted */
    bool promising; /* the last trial succeeded */
} pace;

/* What a cycle goes by. */
typedef struct {
    double pass[DS4_MAX_DRAFT + 1]; /* milliseconds of the pass with k drafts of this session */
    double first, more; /* of the drafter's first step and of each further one */
    double place[DS4_MAX_DRAFT];
    double tokens; /* of a pass without drafts: 1, and the others' in a batch */
    double rate; /* tokens a millisecond that are expected: what time is worth */
    bool trial; /* the last draft is one more than the plan asked for */
} plan;

static int lead_class(float lead) {
    static const float edges[PACE_LEADS - 1] = {0.5f, 1, 2, 3, 4.5f, 6.5f, 9};
    int i = 0;
    while (i < PACE_LEADS - 1 && lead >= edges[i]) i++;
    return i;
}

static int match_class(int length) { return length < 4 ? length - 1 : length < 6 ? 3 : length < 9 ? 4 : 5; }

/* Fills in what is known before a cycle, for a pass that holds `others` rows of other sessions; `back`: the head did not draft for
 * a while. */
static void plan_start(plan *w, const pace *p, const costs *c, int others, bool back) {
    *w = (plan){.first = cost_step(c, back && cost_known(c, COST_BACK) ? COST_BACK : COST_FIRST),
                .more = cost_step(c, COST_MORE),
                .tokens = 1 + others};
    for (int k = DS4_MAX_DRAFT; k >= 0; k--) { /* fewer rows cannot cost more: then the larger time was a disturbed one */
        w->pass[k] = cost_pass(c, others + 1 + k);
        if (k < DS4_MAX_DRAFT && w->pass[k] > w->pass[k + 1]) w->pass[k] = w->pass[k + 1];
    }
    w->place[0] = record_rate(&p->place[0], PACE_PRIOR, 3);
    double behind = record_rate(&p->behind, w->place[0], 2);
    for (int i = 1; i < DS4_MAX_DRAFT; i++) behind = w->place[i] = record_rate(&p->place[i], behind, 16);
    w->rate = w->pass[0] > 0 ? w->tokens / w->pass[0] : 0;
}

/* How likely draft i is to be accepted once those before it are, by its lead (NAN: the drafter gives none). */
static double lead_chance(const pace *p, const plan *w, int i, float lead) {
    return isnan(lead) ? w->place[i] : record_rate(&p->lead[i > 0][lead_class(lead)], w->place[i], 4);
}

/* Tokens that `depth` drafts would bring, and the milliseconds they would add. The lead of the first may end it there. */
static double expect(const pace *p, const plan *w, int depth, double *ms) {
    double all = 1, each = 1, seen = 0, tokens = 0, further = w->pass[depth] - w->pass[0] + (depth - 1) * w->more;
    for (int i = 1; i < depth; i++) all += each *= w->place[i];
    for (int i = 0; i < PACE_LEADS; i++) seen += p->lead[0][i].seen;
    *ms = w->first;
    for (int i = 0; i < PACE_LEADS && seen > 0; i++) {
        double share = p->lead[0][i].seen / seen, hits = record_rate(&p->lead[0][i], w->place[0], 4) * all;
        if (hits <= w->rate * further) continue;
        tokens += share * hits;
        *ms += share * further;
    }
    if (seen > 0) return tokens;
    *ms += further;
    return w->place[0] * all;
}

/* The depth, at most `limit`, at which the drafter brings the most tokens a millisecond, and that rate in w->rate. To begin again
 * it must promise a fiftieth more than a plain pass: at the break-even point it does not come and go. */
static int pace_depth(pace *p, plan *w, int limit) {
    double plain = w->rate, ms;
    int depth = 0;
    if (limit <= 0 || plain <= 0) return 0; /* the plain pass is timed first */
    for (int round = 0; round < 3; round++) { /* what is pruned depends on the rate, and the rate on it */
        double best = 0;
        for (int d = 1; d <= limit; d++) {
            double tokens = w->tokens + expect(p, w, d, &ms), rate = tokens / (w->pass[0] + ms);
            if (rate <= best) continue;
            best = rate;
            depth = d;
        }
        if (best > w->rate) w->rate = best;
    }
    p->on = w->rate > plain * (p->on ? 1 : 1.02);
    if (p->on) return depth;
    w->rate = plain;
    return 0;
}

/* How likely a lookup's first guess is to be accepted, or each one behind it (later: 1), by the length of the match. */
static double lookup_chance(const pace *p, int length, int later) {
    int at = match_class(length);
    double first = record_rate(&p->match[0][at], 0.5, 2);
    return later ? record_rate(&p->match[1][at], first, 2) : first;
}

/* The same for a lookup that found a match: how many of its n guesses to verify. */
static int pace_lookup(const pace *p, plan *w, int length, int n) {
    int depth = 0;
    double first = lookup_chance(p, length, 0), later = lookup_chance(p, length, 1), tokens = w->tokens;
    if (w->rate <= 0) return 0;
    for (int k = 1; k <= n; k++, first *= later) {
        tokens += first;
        if (tokens / w->pass[k] <= w->rate) continue;
        w->rate = tokens / w->pass[k];
        depth = k;
    }
    return depth;
}

/* Whether to draft one more after `made` drafts, all of which are accepted with probability `chance`. A trial is one draft more
 * than the plan asks for, which is how it comes back, and finds out that it could go deeper. */
static bool pace_go_on(const pace *p, plan *w, int made, double chance, int limit) {
    double gain = 0, each = chance, ms = made ? w->more : w->first;
    if (made >= limit || w->trial || w->rate <= 0) return false;
    if (made == 0 && (p->on || p->promising)) {
        w->trial = !p->on;
        return true;
    }
    for (int d = made + 1; d <= limit; d++) {
        gain += each *= w->place[d - 1];
        if (made && gain > w->rate * (w->pass[d] - w->pass[made] + (d - made) * w->more)) return true;
    }
    return w->trial = chance >= 0.5 && p->debt + ms / w->pass[0] < PACE_DEBT;
}

/* How many of n drafts to verify, the i-th of which is accepted with all before it with probability chance[i]. */
static int pace_cut(const pace *p, const plan *w, const double *chance, int n) {
    double value = 0, best = 0;
    int k = 0;
    if (w->trial && n == 1) return p->promising;
    for (int i = 0; i < n; i++) {
        value += chance[i];
        double net = value - w->rate * (w->pass[i + 1] - w->pass[0]);
        if (net <= best) continue;
        best = net;
        k = i + 1;
    }
    return k;
}

/* Hits or misses that are too many for chance mean that the text has changed (Page's CUSUM test): what was learned long ago then
 * gives way to what was seen last. */
static void pace_surprise(pace *p, double expected, bool hit) {
    double off = expected - hit;
    p->worse = d_max(0, p->worse + off - 0.25);
    p->better = d_max(0, p->better - off - 0.25);
    if (p->worse < 3.5 && p->better < 3.5) return;
    p->worse = p->better = 0;
    for (int i = 0; i < DS4_MAX_DRAFT; i++)
        if (p->place[i].seen > PACE_RECENT) p->place[i] = (record){PACE_RECENT * p->recent[i], PACE_RECENT};
    record_fade(&p->behind, 1 / 8.0);
    for (int i = 0; i < PACE_LEADS; i++)
        for (int later = 0; later < 2; later++) record_fade(&p->lead[later][i], 1 / 8.0);
}

/* A trial's costs, less the tokens it brought; other cycles pay back. When a lone draft would have been right (hit), the next is
 * tried at once, as long as such drafts have not cost too much. */
static void pace_pay(pace *p, const plan *w, int made, int k, int taken, bool hit) {
    double ms, draft_ms = made ? w->first + (made - 1) * w->more : 0;
    if (!w->trial) ms = -(p->age < PACE_YOUTH ? PACE_YOUNG : PACE_TRIALS) * (w->pass[k] + draft_ms);
    else if (made == 1) ms = draft_ms + w->pass[k] - w->pass[0] - taken / w->rate;
    else ms = w->more + (k == made ? w->pass[k] - w->pass[k - 1] - (taken == k) / w->rate : 0);
    p->age += p->age < PACE_YOUTH;
    p->debt = d_max(0, p->debt + ms / w->pass[0]);
    if (w->trial && made == 1) p->promising = hit && p->debt < 2 * PACE_DEBT;
}

/* What became of the drafter's drafts: `made` of them, the first k verified, `taken` accepted; `spare` is what would have become of
 * draft k if k < made and all were taken: 1 accepted, 0 not, -1 unknown. */
static void pace_learn(pace *p, const plan *w, int made, int k, int taken, const float *leads, int spare) {
    int hit = -1;
    for (int i = 0; i < made && i <= taken; i++) {
        hit = i < taken ? 1 : i < k ? 0 : spare;
        if (hit < 0) break;
        pace_surprise(p, lead_chance(p, w, i, leads[i]), hit);
        records_add(&p->place[i], 1, 0, hit);
        if (i) records_add(&p->behind, 1, 0, hit);
        p->recent[i] += (hit - p->recent[i]) / PACE_RECENT;
        if (!isnan(leads[i])) records_add(p->lead[i > 0], PACE_LEADS, lead_class(leads[i]), hit);
    }
    if (w->pass[0] > 0) pace_pay(p, w, made, k, taken, hit > 0);
}

/* And of a lookup's guesses, verified or not: the first `known` of them met the target's choice, `hits` in a row were it. */
static void pace_learn_lookup(pace *p, int length, int known, int hits) {
    for (int i = 0; i < known && i <= hits; i++) records_add(p->match[i > 0], PACE_MATCHES, match_class(length), i < hits);
}

/* ---- prompt lookup: what followed the last time (Saxena 2023, "prompt lookup decoding") ----
 *
 * An index of the session's own tokens: n-grams of `least` tokens, by the position of their last one, in chains by hash, newest
 * first. Going back takes the newest entries off again, so the index is always what indexing the tokens anew would give. */

enum { LOOKUP_LONGEST = 64, LOOKUP_LEAST = 2, LOOKUP_TRIES = 64, LOOKUP_TABLE = 1 << 20 };

typedef struct lookup {
    int longest, least; /* tokens of a match: more than `longest` count for no more */
    int n; /* tokens indexed */
    int mask; /* of the table */
    int *table; /* the newest entry of each chain: its position + 1, 0 if there is none */
    int *slot, *before; /* (ctx,): by position, its chain, and the entry before it there */
} lookup;

static int lookup_table_size(int ctx) {
    int size = 64;
    while (size < ctx && size < LOOKUP_TABLE) size *= 2;
    return size;
}

static int64_t lookup_bytes(int ctx) {
    return (int64_t)sizeof(lookup) + (2 * (int64_t)ctx + lookup_table_size(ctx)) * (int64_t)sizeof(int);
}

static void lookup_free(lookup *l) {
    if (!l) return;
    mem_free(l->table);
    mem_free(l->slot);
    mem_free(l->before);
    mem_free(l);
}

static lookup *lookup_new(int longest, int ctx) {
    lookup *l = mem_new(sizeof *l);
    if (!l) return NULL;
    *l = (lookup){.longest = longest, .least = min_int(longest, LOOKUP_LEAST), .mask = lookup_table_size(ctx) - 1};
    if ((l->table = mem_array((size_t)l->mask + 1, sizeof(int))) && (l->slot = mem_array((size_t)ctx, sizeof(int))) &&
        (l->before = mem_array((size_t)ctx, sizeof(int))))
        return l;
    lookup_free(l);
    return NULL;
}

/* The chain of the n-gram that ends with `last`, whose other tokens end the n that stand at `tokens`. */
static int lookup_slot(const lookup *l, const int *tokens, int n, int last) {
    uint64_t h = (uint64_t)last + 1;
    for (int i = n - (l->least - 1); i < n; i++) h = (h ^ (uint64_t)tokens[i]) * 0x9e3779b97f4a7c15u + 1;
    return (int)((h * 0xd6e8feb86659fd93u) >> 40) & l->mask;
}

/* Takes in the tokens up to `to`. */
static void lookup_add(lookup *l, const int *tokens, int to) {
    for (; l->n < to; l->n++) {
        int p = l->n;
        l->slot[p] = p < l->least - 1 ? -1 : lookup_slot(l, tokens, p, tokens[p]);
        if (l->slot[p] < 0) continue;
        l->before[p] = l->table[l->slot[p]];
        l->table[l->slot[p]] = p + 1;
    }
}

/* Forgets the tokens from `to` on. */
static void lookup_drop(lookup *l, int to) {
    while (l->n > to) {
        int p = --l->n;
        if (l->slot[p] >= 0) l->table[l->slot[p]] = l->before[p];
    }
}

/* The longest match, the newest of equals, for the text that the n indexed tokens and `last` make. Returns its length, 0 if there is
 * none, and in *next the position of what followed it. Of a long chain the newest entries are tried. */
static int lookup_find(const lookup *l, const int *tokens, int last, int *next) {
    int n = l->n, best = 0;
    if (n < l->least - 1) return 0;
    int p = l->table[lookup_slot(l, tokens, n, last)] - 1;
    for (int tries = 0; p >= 0 && tries < LOOKUP_TRIES && best < l->longest; tries++, p = l->before[p] - 1) {
        int length = tokens[p] == last;
        while (length && length < l->longest && length <= p && tokens[p - length] == tokens[n - length]) length++;
        if (length < l->least || length <= best) continue;
        best = length;
        *next = p + 1;
    }
    return best;
}

/* Up to k tokens that followed, into out: past the end of the text, what follows is the guess itself. */
static void lookup_copy(const lookup *l, const int *tokens, int last, int next, int k, int *out) {
    for (int i = 0; i < k; i++, next++) out[i] = next < l->n ? tokens[next] : next == l->n ? last : out[next - l->n - 1];
}

/* ---- drafters ---- */

/* A session's part of a pass: a step (its token, then drafts) or a piece of a prompt. */
typedef struct cycle {
    ds4_session *s;
    sampler *by;
    const int *tokens;
    int n; /* tokens to evaluate: 1 in a step */
    int max; /* a step commits at most so many; 0: a prompt */
    float *all; /* (n, n_vocab): logits of every row, or NULL */
    bool last; /* a prompt's last logits are wanted */
    const int *given; /* the caller's drafts, or rows of logits to draw them from; both NULL: the session's drafter is asked */
    const float *given_logits;
    int n_given;
    int room; /* drafts that fit */
    int k, drafts[DS4_MAX_DRAFT];
    float leads[DS4_MAX_DRAFT]; /* the drafter's confidence: its best logit minus its second; NAN: not given */
    int made; /* drafts made; the first k of them are verified */
    bool automatic; /* the depth is what pays: */
    plan w;
    double chance[DS4_MAX_DRAFT]; /* how likely a draft is to be accepted with all before it */
    int match, guesses, guess[DS4_MAX_DRAFT]; /* what the lookup found, whether or not it is verified; 0: nothing */
    bool looked_up; /* the drafts are the lookup's */
    int laws; /* rejection: of how many drafts (tail included) by->draft_logits holds the logits; the others were certain */
    int tail; /* rejection: a stop token drawn after the drafts. Never a row, but judged, or the law would be another; -1 none */
    bool ended; /* drafting is over */
    int first, accepted, result; /* the first row in the pass; 0 or -1 */
    int choice; /* the target's token behind the accepted drafts, -1: not known yet */
    ds4_batch_item *item; /* where a batch wants the message; NULL: the thread's last error is enough */
} cycle;

/* A source of drafts. propose: for each of n cycles at most `room` guesses at the tokens that follow its token, into `drafts`, and
 * their number into `k`; they are written to the session's tokens too. settle: the session now holds `position` tokens; what was
 * made of others is void. */
struct drafter {
    void (*propose)(cycle **list, int n);
    void (*settle)(ds4_session *s, void *ctx, int position); /* may be NULL */
};

static void add_draft(cycle *c, int token, float lead) {
    c->leads[c->k] = lead;
    c->drafts[c->k++] = token;
    c->s->tokens[c->s->position + c->k] = token;
}

/* After a draft was added: whether another is worth its time. */
static bool draft_more(cycle *c) {
    int i = c->k - 1;
    if (!c->automatic) return true;
    c->chance[i] = (i ? c->chance[i - 1] : 1) * lead_chance(c->s->pace, &c->w, i, c->leads[i]);
    return pace_go_on(c->s->pace, &c->w, c->k, c->chance[i], c->room);
}

/* How far logit `id` is above the best of the others: negative if it is not the best. */
static float lead_of(const kernels *k, int n, const float *z, int id) {
    float best = -INFINITY;
    int64_t below = id > 0 ? k->argmax(id, z) : -1, above = id + 1 < n ? k->argmax(n - id - 1, z + id + 1) : -1;
    if (below >= 0) best = z[below];
    if (above >= 0 && z[id + 1 + above] > best) best = z[id + 1 + above];
    return z[id] - best;
}

/* A draft from logits z: drawn as the target's token will be, so that both come to the same; by rejection from noise of its own. */
static int choose_draft(ds4_session *s, sampler *b, const float *z, int position) {
    return choose(s, b, z, position, b->draft_logits ? FOR_DRAFT : FOR_TOKEN);
}

/* Draft number c->k from the head's logits z, or the caller's. */
static void head_choose(cycle *c, const float *z) {
    ds4_session *s = c->s;
    const ds4_engine *e = s->engine;
    int V = e->model->c.n_vocab;
    bool laws = c->by->draft_logits;
    int id = choose_draft(s, c->by, z, s->position + 1 + c->k);
    if (laws) memcpy(c->by->draft_logits + (int64_t)c->k * V, z, (size_t)V * sizeof *z);
    if (id >= 0) c->laws = c->k + 1;
    c->ended = id < 0 || ds4_session_is_stop(s, id);
    if (c->ended && id >= 0 && laws) c->tail = id;
    if (c->ended) return;
    add_draft(c, id, e->conf_log || c->automatic ? lead_of(e->dev.k, V, z, id) : NAN);
    c->ended = !draft_more(c);
}

/* Draft step number `step` of the sessions in e->row_room (m): the logits of what follows the token at position + step. The first
 * goes on from the target's streams, and its row stays; the others from the head's own. */
static void head_step(ds4_engine *e, int m, int step, float *logits) {
    for (int i = 0; i < m; i++) {
        pass_row *r = &e->row_room[i];
        *r = (pass_row){r->s, r->s->position - 1 + step, r->s->tokens[r->s->position + step]};
        e->stream_room[i] = step ? r->s->head_streams : session_streams(r->s, r->position);
    }
    head_forward(e, e->row_room, m, e->stream_room, false);
    for (int i = 0; i < m; i++) {
        ds4_session *s = e->row_room[i].s;
        memcpy(s->head_streams, e->s.x + (size_t)i * e->sizes.streams, e->sizes.streams * sizeof(float));
        s->stats.head_passes++;
        if (step == 0) s->head_to = s->position;
    }
    draft_logits(e, m, logits);
}

/* Whether the head comes back after a while without drafts, with many rows to make. */
static bool head_back(const ds4_session *s) { return s->head_to < s->position - 1 - (DS4_MAX_DRAFT + 1); }

/* The head drafts for all cycles at once: a pass of it for the first draft of each, one for the second, ... */
static void head_propose(cycle **list, int n) {
    ds4_engine *e = list[0]->s->engine;
    double start = now_ms();
    bool back = false; /* one of them does */
    for (int i = 0; i < n; i++) {
        ds4_session *s = list[i]->s;
        double began = now_ms();
        back = back || head_back(s);
        if (s->position == 0) list[i]->ended = true; /* no streams yet */
        else head_catch_up(s, s->position - 1);
        s->stats.repair_ms += now_ms() - began;
    }
    for (int step = 0, m;; step++) {
        for (int i = m = 0; i < n; i++)
            if (!list[i]->ended && list[i]->k < list[i]->room) e->row_room[m++].s = list[i]->s;
        if (!m) return;
        head_step(e, m, step, e->logits);
        for (int i = 0, at = 0; i < n; i++)
            if (!list[i]->ended && list[i]->k < list[i]->room)
                head_choose(list[i], e->logits + (int64_t)at++ * e->model->c.n_vocab);
        double now = now_ms();
        cost_add(e->costs, step ? COST_MORE : back ? COST_BACK : COST_FIRST, (now - start) / m);
        start = now;
    }
}

static const drafter mtp_drafter = {head_propose, NULL};

/* ============================================================================================================================
 * 12. Acceptance and speculation
 *
 * One cycle: draft, verify all drafts in one pass, accept, commit. A session's text is decided by the target's logits alone,
 * and a row's logits have the bits they would have had alone; so the text is what plain decoding gives.
 * ========================================================================================================================== */

static void engine_log(const ds4_engine *e, const char *text) {
    if (e->log) e->log(e->callback_ctx, text);
}

static int session_non_finite(int position) {
    return fail_as(DS4_NON_FINITE,
                   "non-finite logits at position %d: the weights, or what they compute there, are not finite numbers",
                   position);
}

static void log_draft(const cycle *c, int i, int target, float lead, bool kept) {
    char line[200];
    const ds4_session *s = c->s;
    snprintf(line, sizeof line, "mtp: position %d draft %d target %d head-lead %.4f target-lead %.4f margin %g %s",
             s->position + 1 + i, c->drafts[i], target, (double)c->leads[i], (double)lead,
             (double)(c->by->gen.temperature > 0 ? 0 : s->margin),
             kept                     ? "accepted"
             : target == c->drafts[i] ? "below-margin"
                                      : "rejected");
    engine_log(s->engine, line);
}

/* The token that follows row i of the cycle: the sampler's own choice, or by rejection the draft or what replaces it. */
static int verdict(const cycle *c, int i, int draft) {
    ds4_session *s = c->s;
    int V = s->engine->model->c.n_vocab, position = s->position + 1 + i;
    const float *z = s->logits + (int64_t)i * V;
    if (!c->by->draft_logits) return choose(s, c->by, z, position, FOR_TOKEN);
    return judge(s, c->by, z, i < c->laws ? c->by->draft_logits + (int64_t)i * V : NULL, draft, position);
}

/* How many drafts the session takes: each is committed iff it is what the target's row before it gives (greedy: its argmax, ties
 * to the lowest id, and leading the others by the margin). A match below the margin ends the cycle; the target then chooses the same
 * token and decodes it anew, so that the margin trades speed and never changes the text. Nothing beyond a non-finite row is
 * taken. What the target chose where it ended is left in c->choice. */
static int accept(cycle *c) {
    ds4_session *s = c->s;
    const kernels *k = s->engine->dev.k;
    int V = s->engine->model->c.n_vocab, i;
    bool greedy = c->by->gen.temperature == 0, log = s->engine->conf_log;
    c->choice = -1;
    for (i = 0; i < c->k; i++) {
        const float *z = s->logits + (int64_t)i * V;
        int target = verdict(c, i, c->drafts[i]);
        bool match = target == c->drafts[i];
        float lead = log || (match && greedy && s->margin > 0) ? lead_of(k, V, z, c->drafts[i]) : 0;
        bool low = match && greedy && lead < s->margin, keep = match && !low && k->all_finite(V, z + V);
        if (log) log_draft(c, i, target, lead, keep);
        s->stats.below_margin += low;
        if (!keep) {
            c->choice = target; /* a draft that was taken but not kept is the next token too */
            return i;
        }
        s->stats.accepted[i]++;
    }
    if (c->tail >= 0) c->choice = verdict(c, i, c->tail);
    return i;
}

/* After the position grew. */
static void session_moved(ds4_session *s) { s->floor = max_int(s->floor, s->position - s->max_rewind); }

/* After it changed: a head row stands only for the token that followed it when it was made, so the last one is void. */
static void session_settle(ds4_session *s) {
    s->head_to = min_int(s->head_to, max_int(0, s->position - 1));
    s->pending = s->chosen = -1;
    if (s->by.counts) count_to(s, &s->by, min_int(s->by.counted, s->position));
    shortlist_to(s, min_int(s->listed.counted, s->position));
    if (s->lookup) lookup_drop(s->lookup, s->position);
    if (s->drafter && s->drafter->settle) s->drafter->settle(s, s->drafter_ctx, s->position);
}

/* Whether `id`, which was not verified, would have been accepted behind the accepted drafts: 1, 0, or -1 if that cannot be known.
 * A mask is not asked here: its errors are the caller's to see. */
static int would_pass(cycle *c, int id) {
    const ds4_session *s = c->s;
    int V = s->engine->model->c.n_vocab, i = c->accepted;
    if (c->choice < 0 && !c->by->draft_logits && !c->by->gen.mask) c->choice = verdict(c, i, -1);
    if (c->choice != id) return c->choice < 0 ? -1 : 0;
    bool margin = c->by->gen.temperature == 0 && s->margin > 0;
    return !margin || lead_of(s->engine->dev.k, V, s->logits + (int64_t)i * V, id) >= s->margin;
}

/* What the cycle shows about its drafts, those that were not verified included. */
static void learn(cycle *c) {
    ds4_session *s = c->s;
    int taken = c->accepted, spare = taken == c->k && c->k < c->made ? would_pass(c, c->drafts[taken]) : -1, hits = 0;
    s->step_lookup = c->looked_up;
    if (c->looked_up) {
        s->stats.lookup_drafted += c->k;
        s->stats.lookup_accepted += taken;
    } else s->stats.pruned += c->made - c->k;
    if (c->automatic || s->lookup) pace_learn(s->pace, &c->w, c->looked_up ? 0 : c->made, c->k, taken, c->leads, spare);
    if (!c->guesses) return;
    while (hits < taken && hits < c->guesses && c->drafts[hits] == c->guess[hits]) hits++;
    int last = hits < c->guesses && hits == taken ? would_pass(c, c->guess[hits]) : -1;
    pace_learn_lookup(s->pace, c->match, min_int(c->guesses, last < 0 && hits == taken ? hits : hits + 1), hits + (last > 0));
}

/* Commits a step's accepted rows. The rest needs no undoing: the position does not reach it. */
static void commit_step(cycle *c) {
    ds4_session *s = c->s;
    c->accepted = accept(c);
    learn(c);
    s->position += 1 + c->accepted;
    s->step_floor = s->floor;
    session_moved(s);
    s->logits_row = c->accepted;
    s->step_rows = 1 + c->accepted;
    for (int i = 0; i < c->k; i++) s->stats.drafted[i]++;
    s->stats.emitted += 1 + c->accepted;
    s->stats.cycles++;
    if (c->accepted < c->k) s->stats.corrections++;
    else s->stats.bonus++;
    session_settle(s);
    s->pending_law = c->by->law;
    if (c->by->draft_logits) s->pending = c->choice;
    else if (c->by == &s->by) s->chosen = c->choice;
}

static void commit_prompt(cycle *c) {
    ds4_session *s = c->s;
    memcpy(s->tokens + s->position, c->tokens, (size_t)c->n * sizeof *c->tokens);
    s->position += c->n;
    session_moved(s);
    s->logits_row = c->all || c->last ? 0 : -1;
    s->step_rows = 0;
    s->stats.prompt_tokens += c->n;
    session_settle(s);
}

/* ---- one pass, for any number of sessions ---- */

static int check_token(const ds4_session *s, int token) {
    int V = s->engine->model->c.n_vocab;
    return token >= 0 && token < V ? 0 : fail("token %d is outside the vocabulary (0 to %d)", token, V - 1);
}

static int check_cycle(const cycle *c) {
    const ds4_session *s = c->s;
    for (int i = 0; i < c->n; i++)
        if (check_token(s, c->tokens[i])) return -1;
    if (c->n_given > DS4_MAX_DRAFT) return fail("%d drafts; a cycle takes at most %d", c->n_given, DS4_MAX_DRAFT);
    for (int i = 0; c->given && i < c->n_given; i++)
        if (check_token(s, c->given[i])) return -1;
    if (s->position >= s->ctx) return fail_as(DS4_CONTEXT_FULL, "the context is full: %d tokens", s->ctx);
    if (c->n > s->ctx - s->position)
        return fail_as(DS4_CONTEXT_FULL, "%d tokens at position %d do not fit a context of %d", c->n, s->position, s->ctx);
    if (atomic_load(&s->cancel)) return fail_as(DS4_CANCELLED, "cancelled at position %d", s->position);
    return 0;
}

/* Of several sessions each keeps its own message. */
static int cycle_error(const cycle *c, int result) {
    if (result && c->item) snprintf(c->item->error, DS4_ERROR_BYTES, "%.*s", DS4_ERROR_BYTES - 1, last_error);
    if (result && c->item) c->item->kind = last_kind;
    return result;
}

/* Drafts that fit what the caller, the context, the session's rings and its share of the pass (`most`) can hold. */
static int draft_room(const cycle *c, int most) {
    const ds4_session *s = c->s;
    int room = min_int(min_int(c->max - 1, s->ctx - s->position - 1), min_int(s->batch - 1, most));
    int wanted = c->given || c->given_logits  ? c->n_given
                 : !s->drafter && !s->lookup  ? 0
                 : s->draft == DS4_DRAFT_AUTO ? DS4_MAX_DRAFT
                                              : s->draft;
    return max_int(0, min_int(wanted, room));
}

/* What followed the last time, into c->guess: as much as may be drafted, and nothing from a stop token on. */
static void look_up(cycle *c) {
    ds4_session *s = c->s;
    int last = c->tokens[0], next = 0;
    c->guesses = 0;
    if (!s->lookup) return;
    lookup_add(s->lookup, s->tokens, s->position);
    c->match = lookup_find(s->lookup, s->tokens, last, &next);
    if (!c->match) return;
    lookup_copy(s->lookup, s->tokens, last, next, c->room, c->guess);
    while (c->guesses < c->room && !ds4_session_is_stop(s, c->guess[c->guesses])) c->guesses++;
}

/* Who drafts, the lookup or the drafter: whoever is likelier to be right (with a fixed depth), or brings more tokens a
 * millisecond. The pass holds `others` rows of other sessions. */
static void choose_drafter(cycle *c, int others) {
    ds4_session *s = c->s;
    int n = 0;
    look_up(c);
    c->automatic = s->draft == DS4_DRAFT_AUTO;
    if (!c->automatic && !s->lookup) return;
    plan_start(&c->w, s->pace, s->engine->costs, others, head_back(s));
    if (c->automatic) {
        pace_depth(s->pace, &c->w, s->drafter ? c->room : 0);
        if (c->guesses) n = pace_lookup(s->pace, &c->w, c->match, c->guesses);
    } else if (c->guesses && (!s->drafter || lookup_chance(s->pace, c->match, 0) > c->w.place[0])) n = c->guesses;
    for (int i = 0; i < n; i++) add_draft(c, c->guess[i], NAN);
    c->looked_up = n > 0;
    c->ended = n > 0 || !s->drafter || (c->automatic && !pace_go_on(s->pace, &c->w, 0, 1, c->room));
}

/* Leaves out drafts whose rows are not worth it. Under rejection each draft that was drawn is judged, or the law would change. */
static void prune(cycle *c) {
    c->made = c->k;
    if (c->automatic && !c->looked_up && !c->by->draft_logits) c->k = pace_cut(c->s->pace, &c->w, c->chance, c->made);
}

/* Drafts for the steps among n cycles: all sessions of one drafter at once. */
static void propose(ds4_engine *e, cycle *list, int n, int most) {
    cycle **same = e->cycle_room;
    int rows = 0;
    for (int i = 0; i < n; i++)
        if (!list[i].result) rows += list[i].n;
    for (int i = 0; i < n; i++) {
        cycle *c = &list[i];
        c->k = c->laws = 0;
        c->tail = -1;
        c->room = c->result || !c->max ? 0 : draft_room(c, most);
        c->ended = c->room == 0;
        if (c->max && !c->result) c->s->tokens[c->s->position] = c->tokens[0];
        for (int j = 0; c->given && j < c->room && !ds4_session_is_stop(c->s, c->given[j]); j++) add_draft(c, c->given[j], NAN);
        for (int j = 0; c->given_logits && j < c->room && !c->ended; j++)
            head_choose(c, c->given_logits + (int64_t)j * e->model->c.n_vocab);
        c->ended = c->ended || c->given || c->given_logits;
        if (!c->ended) choose_drafter(c, min_int(rows, e->s.rows) - 1);
    }
    for (int i = 0; i < n; i++) {
        const drafter *d = list[i].s->drafter;
        if (list[i].ended || list[i].k) continue;
        double start = now_ms(), repair = 0;
        int m = 0;
        for (int j = i; j < n; j++)
            if (!list[j].ended && !list[j].k && list[j].s->drafter == d) {
                repair -= list[j].s->stats.repair_ms;
                same[m++] = &list[j];
            }
        d->propose(same, m);
        for (int j = 0; j < m; j++) repair += same[j]->s->stats.repair_ms;
        for (int j = 0; j < m; j++) {
            same[j]->s->stats.draft_ms += now_ms() - start - repair;
            same[j]->ended = true;
        }
    }
    for (int i = 0; i < n; i++) prune(&list[i]);
}

/* Logits of the rows that are wanted, from the pass's streams: to their sessions, or to `all`. */
static void cycle_logits(ds4_engine *e, cycle *list, int n) {
    size_t width = e->sizes.streams, V = (size_t)e->model->c.n_vocab;
    int rows = 0, owner = -1;
    for (int i = 0; i < n; i++) {
        cycle *c = &list[i];
        if (c->result) continue;
        int count = c->max ? 1 + c->k : c->all ? c->n : c->last ? 1 : 0, from = c->first + (c->max || c->all ? 0 : c->n - 1);
        memmove(e->s.x + (size_t)rows * width, e->s.x + (size_t)from * width, (size_t)count * width * sizeof(float));
        if (count) owner = rows ? n : i;
        rows += count;
    }
    if (!rows) return;
    cycle *only = owner < n ? &list[owner] : NULL;
    float *out = !only ? e->logits : only->all ? only->all : only->s->logits;
    output_logits(e, e->s.x, rows, &e->model->collapse, e->model->output_norm, out);
    for (int i = 0; i < n; i++) {
        cycle *c = &list[i];
        size_t count = c->result ? 0 : c->max ? 1 + (size_t)c->k : c->all ? (size_t)c->n : c->last;
        if (c->all && count) memcpy(c->s->logits, out + (count - 1) * V, V * sizeof *out);
        else if (!only) memcpy(c->s->logits, out, count * V * sizeof *out);
        out += count * V;
    }
}

/* What a session makes of its rows. -1: nothing is committed. */
static int finish(cycle *c, double ms) {
    ds4_session *s = c->s;
    const ds4_engine *e = s->engine;
    int rows = c->n + c->k, result = 0;
    bool logits = c->max || c->all || c->last;
    s->stats.passes++;
    *(c->max ? &s->stats.verify_ms : &s->stats.prompt_ms) += ms;
    s->written = max_int(s->written, s->position + rows);
    s->step_rows = 0;
    s->logits_row = -1;
    if (logits && !e->dev.k->all_finite(e->model->c.n_vocab, s->logits)) {
        result = session_non_finite(s->position + (c->max ? 0 : c->n - 1));
        session_settle(s);
    } else if (c->max) commit_step(c);
    else commit_prompt(c);
    return result;
}

/* One pass over the cycles whose `result` is 0; afterwards it is -1 for those that failed. The caller holds the engine's lock. */
static void run_cycles(ds4_engine *e, cycle *list, int n) {
    pass_row *rows = e->row_room;
    int m = 0;
    bool steps = true;
    double start = now_ms();
    for (int i = 0; i < n; i++) {
        cycle *c = &list[i];
        c->first = m;
        if (c->result) continue;
        steps = steps && c->max;
        for (int j = 0; j < c->n; j++) rows[m++] = (pass_row){c->s, c->s->position + j, c->tokens[j]};
        for (int j = 0; j < c->k; j++) rows[m++] = (pass_row){c->s, c->s->position + 1 + j, c->drafts[j]};
    }
    if (!m) return;
    forward(e, rows, m);
    cycle_logits(e, list, n);
    double ms = now_ms() - start;
    if (steps) cost_add_pass(e->costs, m, ms);
    for (int i = 0; i < n; i++)
        if (!list[i].result) list[i].result = cycle_error(&list[i], finish(&list[i], ms));
}

/* A pass of one session. -1: nothing is committed. */
static int run_cycle(cycle *c) {
    ds4_engine *e = c->s->engine;
    if (check_cycle(c)) return -1;
    engine_enter(e);
    propose(e, c, 1, DS4_MAX_DRAFT);
    run_cycles(e, c, 1);
    engine_leave(e);
    return c->result;
}

/* A step of one session; what it committed goes to `out` (NULL: not wanted). */
static int run_step(cycle c, int token, int *out) {
    const ds4_session *s = c.s;
    c.tokens = &token;
    c.n = 1;
    if (c.max < 1) return fail("max is %d; a step commits at least 1 token", c.max);
    if (run_cycle(&c)) return -1;
    if (out) memcpy(out, s->tokens + s->position - s->step_rows, (size_t)s->step_rows * sizeof(int));
    return s->step_rows;
}

int ds4_session_step(ds4_session *s, int token, int max, int *out) {
    return run_step((cycle){.s = s, .by = &s->by, .max = max}, token, out);
}

int ds4_session_verify(ds4_session *s, int token, const int *drafts, int n, int max, int *out) {
    if (n < 0) return fail("%d drafts; expected 0 or more", n);
    return run_step((cycle){.s = s, .by = &s->by, .max = max, .given = n ? drafts : &token, .n_given = n}, token, out);
}

int ds4_session_verify_logits(ds4_session *s, int token, const float *logits, int n, int max, int *out) {
    int V = s->engine->model->c.n_vocab;
    if (n < 0) return fail("%d rows of draft logits; expected 0 or more", n);
    for (int64_t i = 0; n <= DS4_MAX_DRAFT && i < (int64_t)n * V; i++)
        if (!(logits[i] < INFINITY))
            return fail("draft logit %d of row %d is %g; expected a number or -inf", (int)(i % V), (int)(i / V),
                        (double)logits[i]);
    return run_step(
        (cycle){.s = s, .by = &s->by, .max = max, .given = n ? NULL : &token, .given_logits = n ? logits : NULL, .n_given = n},
        token, out);
}

int ds4_session_eval_speculative_argmax(ds4_session *s, int first, int max) {
    sampler greedy = {0};
    if (!s) return fail("no session: ds4_engine_open_session failed, or was not called");
    if (max < 1) return fail("max is %d; expected at least 1", max);
    for (int token = first;;) {
        int n = run_step((cycle){.s = s, .by = &greedy, .max = max}, token, NULL);
        if (n < 0) return -1;
        max -= n;
        token = ds4_session_argmax(s);
        if (token < 0 || max <= 0 || s->position >= s->ctx || ds4_session_is_stop(s, token)) return token;
    }
}

/* ============================================================================================================================
 * 13. Sessions and batches
 *
 * The public handles: engines open sessions, sessions take tokens. Calls that run the model hold the engine's `run` lock for
 * one pass at a time.
 * ========================================================================================================================== */

ds4_cfg ds4_default_cfg(void) {
    return (ds4_cfg){.mtp_draft = 1,
                     .mtp_shortlist = 32768,
                     .mtp_margin = DS4_MARGIN_AUTO,
                     .gen = {.temperature = 0, .top_p = 1},
                     .kv_type = DS4_KV_F16,
                     .prefill_chunk = 256,
                     .max_rewind = 64};
}

/* ---- engine ---- */

static int check_margin(const char *name, float margin) {
    if (margin == (float)DS4_MARGIN_AUTO || (margin >= 0 && margin <= 1000)) return 0;
    return fail("%s is %g; expected 0 to 1000, or %d (auto)", name, (double)margin, DS4_MARGIN_AUTO);
}

/* What serves the depth: a fixed one is careful, as scripts for other engines expect; `auto` is there to be fast. */
static float margin_of(int draft, float margin) {
    return margin != (float)DS4_MARGIN_AUTO ? margin : draft == DS4_DRAFT_AUTO ? 0 : 3;
}

static int check_cfg(const ds4_cfg *cfg) {
    if (!cfg->model_path) return fail("model_path is missing");
    if (cfg->mtp_path && cfg->mtp_internal) return fail("mtp_path and mtp_internal exclude each other: one head at a time");
    if (cfg->mtp_shortlist < 0) return fail("mtp_shortlist is %d; expected 0 or more", cfg->mtp_shortlist);
    if (cfg->mtp_draft < DS4_DRAFT_AUTO || cfg->mtp_draft > DS4_MAX_DRAFT)
        return fail("mtp_draft is %d; expected 0 to %d, or %d (auto)", cfg->mtp_draft, DS4_MAX_DRAFT, DS4_DRAFT_AUTO);
    if (cfg->draft_lookup < 0 || cfg->draft_lookup > LOOKUP_LONGEST)
        return fail("draft_lookup is %d; expected 0 to %d", cfg->draft_lookup, LOOKUP_LONGEST);
    if (check_margin("mtp_margin", cfg->mtp_margin)) return -1;
    if (cfg->threads < 0 || cfg->threads > MAX_THREADS)
        return fail("threads is %d; expected 0 (all processors) to %d", cfg->threads, MAX_THREADS);
    if (cfg->ctx < 0) return fail("ctx is %d; expected 0 or more", cfg->ctx);
    if (cfg->prefill_chunk < 1 || cfg->prefill_chunk > 4096)
        return fail("prefill_chunk is %d; expected 1 to 4096", cfg->prefill_chunk);
    if (cfg->max_rewind < 0) return fail("max_rewind is %d; expected 0 or more", cfg->max_rewind);
    if (cfg->kv_type != DS4_KV_F32 && cfg->kv_type != DS4_KV_F16 && cfg->kv_type != DS4_KV_FP8)
        return fail("kv_type is %d; expected DS4_KV_F32, DS4_KV_F16 or DS4_KV_FP8", (int)cfg->kv_type);
    return check_gen(&cfg->gen);
}

static int special_token(const gguf *g, const char *key, int n_vocab) {
    const meta *m = gguf_meta(g, key);
    double v = m && !m->array && meta_is_number(m) ? meta_number(m, 0) : -1;
    return v >= 0 && v < n_vocab ? (int)v : -1;
}

/* The tokenizer from the file's keys. A file without one is refused unless the caller wants token ids only. */
static int load_tokenizer(ds4_engine *e, bool ids_only) {
    const gguf *g = e->model->file;
    size_t n = 0, n_merges = 0;
    if (!gguf_meta(g, "tokenizer.ggml.tokens")) return ids_only ? 0 : fail("%s: key tokenizer.ggml.tokens is missing", g->path);
    const meta *tokens = gguf_meta(g, "tokenizer.ggml.tokens"), *merges = gguf_meta(g, "tokenizer.ggml.merges");
    if (tokens->array && tokens->count != (uint64_t)e->model->c.n_vocab)
        return fail("%s: key tokenizer.ggml.tokens has %llu tokens, the vocabulary has %d", g->path,
                    (unsigned long long)tokens->count, e->model->c.n_vocab);
    if (merges && merges->count > MAX_VOCAB)
        return fail("%s: key tokenizer.ggml.merges has %llu merges; expected at most %d", g->path,
                    (unsigned long long)merges->count, MAX_VOCAB);
    if (!(e->token_list = meta_strings(g, "tokenizer.ggml.tokens", &n)))
        return n ? -1 : fail("%s: key tokenizer.ggml.tokens: expected an array of strings", g->path);
    e->merge_list = meta_strings(g, "tokenizer.ggml.merges", &n_merges);
    if (!e->merge_list && n_merges) return -1;
    const meta *types = gguf_meta(g, "tokenizer.ggml.token_type"), *add_bos = gguf_meta(g, "tokenizer.ggml.add_bos_token");
    if (types && (!types->array || (types->type != G_I32 && types->type != G_U32) || types->count != n))
        return fail("%s: key tokenizer.ggml.token_type: expected %zu int32 values, one for each token", g->path, n);
    if (types && !(e->token_types = mem_array(n, sizeof(int32_t)))) return -1;
    if (types) memcpy(e->token_types, types->value, n * sizeof(int32_t));
    tok_source source = {.tokens = e->token_list,
                         .n_tokens = n,
                         .types = e->token_types,
                         .merges = e->merge_list,
                         .n_merges = n_merges,
                         .model = meta_string(g, "tokenizer.ggml.model"),
                         .pre = meta_string(g, "tokenizer.ggml.pre"),
                         .chat_template = meta_string(g, "tokenizer.chat_template"),
                         .bos = special_token(g, "tokenizer.ggml.bos_token_id", e->model->c.n_vocab),
                         .eos = special_token(g, "tokenizer.ggml.eos_token_id", e->model->c.n_vocab),
                         .pad = special_token(g, "tokenizer.ggml.padding_token_id", e->model->c.n_vocab),
                         .add_bos = add_bos && !add_bos->array && meta_is_number(add_bos) && meta_number(add_bos, 0) != 0};
    e->base_model = !source.chat_template.p;
    e->bos = source.bos;
    e->eos = source.eos;
    if ((e->tokens = tok_new(&source))) return 0;
    if (ids_only && last_kind != DS4_NO_MEMORY) return 0;
    char reason[sizeof last_error];
    memcpy(reason, last_error, sizeof reason);
    return fail_as(last_kind, "%s: %.800s", g->path, reason);
}

static int lock_memory(const gguf *g) {
    for (int i = 0; g && i < g->n_parts; i++)
        if (mlock(g->parts[i].map, g->parts[i].size))
            return fail_as(DS4_NO_MEMORY, "%s: cannot lock %zu bytes in memory: %s (see ulimit -l)", g->path, g->parts[i].size,
                           strerror(errno));
    return 0;
}

static int check_sizes(const ds4_engine *e, const ds4_cfg *cfg) {
    const config *c = &e->model->c;
    if (cfg->ctx > c->context_length)
        return fail("ctx is %d; %s was made for at most %d", cfg->ctx, e->model_path, c->context_length);
    if (e->kv_type == DS4_KV_FP8 && (c->head_dim - c->rope_dim) % 64)
        return fail("kv type fp8 needs rows whose part without rotation is a multiple of 64; %s has %d", e->model_path,
                    c->head_dim - c->rope_dim);
    return 0;
}

/* Room for the logits of n rows. */
static int logit_rows(ds4_engine *e, int n) {
    if (n <= e->logit_rows) return 0;
    float *room = mem_array((size_t)n * (size_t)e->model->c.n_vocab, sizeof *room);
    if (!room) return -1;
    mem_free(e->logits);
    e->logits = room;
    e->logit_rows = n;
    return 0;
}

static int session_slack(const ds4_engine *e) { return max_int(e->chunk, DS4_MAX_DRAFT + 1) + e->max_rewind; }

/* What session_new will ask for. */
static int64_t session_bytes(const ds4_engine *e, int ctx, int slack) {
    const config *c = &e->model->c;
    const int64_t V = c->n_vocab, rows = DS4_MAX_DRAFT + 1;
    int64_t bytes = (int64_t)(sizeof(ds4_session) + sizeof(pace) + ((size_t)c->n_layers + 1) * sizeof(cache)) +
                    (1 + slack + min_int(c->window, ctx)) * (int64_t)e->sizes.streams * 4 + V * 4 * rows + (ctx + rows) * 4 +
                    (e->shortlist ? V * 4 + (V + 63) / 64 * 8 : 0) + (e->lookup ? lookup_bytes(ctx) : 0);
    bytes +=
        (int64_t)(e->by.gen.n_bias * sizeof(ds4_bias)) + (e->by.counts ? V * 4 : 0) + (e->by.draft_logits ? V * 4 * rows : 0);
    for (int i = 0; i <= c->n_layers; i++) {
        cache sizes = cache_sizes(c, c->ratio[i], ctx, slack);
        if (i < c->n_layers || e->model->has_head) bytes += cache_bytes(c, &sizes, e->kv_type);
    }
    return bytes;
}

static int64_t file_total(const gguf *g) {
    int64_t bytes = 0;
    for (int i = 0; g && i < g->n_parts; i++) bytes += (int64_t)g->parts[i].size;
    return bytes;
}

/* What scratch may have so that the smallest use of the model (a pass of 17 rows, two sessions of 64 tokens) stays below twice the
 * file and 64 MB, of which tokenizer and sampling take about 128 bytes a token. A longer pass may have more in proportion; real
 * models are far below. */
static int limit_scratch(ds4_engine *e, int rows) {
    const model *m = e->model;
    int64_t files = file_total(m->file) + file_total(m->head_file);
    int ctx = min_int(e->ctx, 64), least = DS4_MAX_DRAFT + 1;
    int64_t left = 2 * files + (64 << 20) - 128 * (int64_t)m->c.n_vocab - m->owned_bytes -
                   2 * session_bytes(e, ctx, least + 8) - (int64_t)(thread_floats(&m->c, ctx) * sizeof(float));
    if (left <= 0) return out_of_proportion(e->model_path, files);
    e->s.path = e->model_path;
    e->s.file_bytes = files;
    e->s.most = left / least * rows;
    return 0;
}

/* What the engine has beside scratch: the tokenizer's tables, small tensors as float32, what a pass and a draw are put together in. */
static int64_t table_bytes(const ds4_engine *e) {
    const void *parts[] = {
        e,           e->dev.pool,    e->token_list, e->merge_list,  e->token_types, e->model_path,     e->head_path, e->name,
        e->row_room, e->stream_room, e->cycles,     e->cycle_room,  e->candidates,  e->adjusted,       e->allowed,   e->weights,
        e->logits,   e->listed,      e->costs,      e->by.gen.bias, e->by.counts,   e->by.draft_logits};
    size_t bytes = model_memory(e->model) + tok_memory(e->tokens);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) bytes += mem_size(parts[i]);
    return (int64_t)bytes;
}

static int engine_start(ds4_engine *e, const ds4_cfg *cfg) {
    if (!(e->model_path = str_copy(cfg->model_path)) || (cfg->mtp_path && !(e->head_path = str_copy(cfg->mtp_path)))) return -1;
    e->dev.k = !cfg->isa || !strcmp(cfg->isa, "auto") ? kernels_best() : kernels_named(cfg->isa);
    if (!e->dev.k) return -1;
    if (e->progress) e->progress(e->callback_ctx, "load", 0, 1);
    if (!(e->model = model_load(cfg->model_path, cfg->mtp_path, cfg->mtp_internal))) return failed_as(DS4_LOAD_FAILED);
    const config *c = &e->model->c;
    e->ctx = cfg->ctx ? cfg->ctx : min_int(c->context_length, 32768);
    e->max_rewind = min_int(cfg->max_rewind, e->ctx);
    if (check_sizes(e, cfg)) return -1;
    if (load_tokenizer(e, cfg->raw_vocab_ok)) return failed_as(DS4_LOAD_FAILED);
    str name = meta_string(e->model->file, "general.name");
    if (!(e->name = mem_new(name.n + 1))) return -1;
    if (name.n) memcpy(e->name, name.p, name.n);
    make_printable(e->name);
    if (cfg->mlock && (lock_memory(e->model->file) || lock_memory(e->model->head_file))) return -1;
    e->sizes = (row_sizes){kv_row_bytes(c, e->kv_type), index_row_bytes(c, e->kv_type), (size_t)c->n_streams * (size_t)c->dim};
    e->shortlist = e->model->has_head && cfg->mtp_shortlist < c->n_vocab ? cfg->mtp_shortlist : 0;
    int threads = cfg->threads ? cfg->threads : cpu_count(), rows = max_int(e->chunk, DS4_MAX_DRAFT + 1);
    if (limit_scratch(e, rows)) return -1;
    if (!(e->dev.pool = pool_new(threads)) || scratch_new(&e->s, c, rows, threads, e->ctx, e->model->has_head)) return -1;
    if (!(e->row_room = mem_array((size_t)rows, sizeof *e->row_room)) ||
        !(e->stream_room = mem_array((size_t)rows, sizeof *e->stream_room)) ||
        !(e->cycles = mem_array((size_t)rows, sizeof *e->cycles)) || !(e->costs = mem_new(sizeof *e->costs)) ||
        !(e->cycle_room = mem_array((size_t)rows, sizeof *e->cycle_room)) ||
        !(e->candidates = mem_array((size_t)c->n_vocab, sizeof *e->candidates)) ||
        !(e->adjusted = mem_array((size_t)c->n_vocab, sizeof(float))) || !(e->allowed = mem_new((size_t)c->n_vocab)) ||
        !(e->weights = mem_array((size_t)c->n_vocab, sizeof *e->weights)) || logit_rows(e, 1) ||
        (e->shortlist && !(e->listed = mem_array((size_t)c->n_vocab, sizeof *e->listed))) ||
        sampler_new(&e->by, &cfg->gen, c->n_vocab))
        return -1;
    e->table_bytes = table_bytes(e);
    if (e->progress) e->progress(e->callback_ctx, "load", 1, 1);
    return 0;
}

ds4_engine *ds4_engine_new(const ds4_cfg *cfg) {
    if (!cfg || check_cfg(cfg)) {
        if (!cfg) fail("cfg is missing");
        return NULL;
    }
    ds4_engine *e = mem_new(sizeof *e);
    if (!e) {
        name_if_no_memory(cfg->model_path);
        return NULL;
    }
    pthread_mutex_init(&e->run, NULL);
    e->dev.work = &e->work;
    e->kv_type = cfg->kv_type;
    e->chunk = cfg->prefill_chunk;
    e->draft = cfg->mtp_draft;
    e->lookup = cfg->draft_lookup;
    e->margin = margin_of(cfg->mtp_draft, cfg->mtp_margin);
    e->conf_log = cfg->conf_log;
    e->log = cfg->log;
    e->progress = cfg->progress;
    e->callback_ctx = cfg->callback_ctx;
    e->bos = e->eos = -1;
    uint64_t modes = float_modes_ours();
    int bad = engine_start(e, cfg);
    float_modes_theirs(modes);
    if (bad) {
        name_if_no_memory(cfg->model_path);
        ds4_engine_free(e);
        return NULL;
    }
    return e;
}

void ds4_engine_free(ds4_engine *e) {
    if (!e) return;
    while (e->sessions) ds4_session_free(e->sessions);
    scratch_free(&e->s, e->dev.pool ? e->dev.pool->threads : 0);
    pool_free(e->dev.pool);
    tok_free(e->tokens);
    sampler_free(&e->by);
    void *parts[] = {e->token_list, e->merge_list,  e->token_types, e->model_path, e->head_path,  e->name,
                     e->row_room,   e->stream_room, e->cycles,      e->cycle_room, e->candidates, e->adjusted,
                     e->allowed,    e->weights,     e->logits,      e->listed,     e->costs};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) mem_free(parts[i]);
    model_free(e->model);
    pthread_mutex_destroy(&e->run);
    mem_free(e);
}

ds4_info ds4_engine_info(const ds4_engine *e) {
    const config *c = &e->model->c;
    const model *m = e->model;
    return (ds4_info){.model_path = e->model_path,
                      .mtp_path = e->head_path  ? e->head_path
                                  : m->has_head ? e->model_path
                                                : NULL,
                      .name = e->name,
                      .isa = e->dev.k->name,
                      .layers = c->n_layers,
                      .embd = c->dim,
                      .heads = c->n_heads,
                      .head_dim = c->head_dim,
                      .rope_dim = c->rope_dim,
                      .vocab = c->n_vocab,
                      .streams = c->n_streams,
                      .window = c->window,
                      .experts = c->n_experts,
                      .experts_used = c->n_used,
                      .expert_ff = c->expert_ff[0],
                      .hash_layers = c->n_hash,
                      .context_length = c->context_length,
                      .ctx = e->ctx,
                      .threads = e->dev.pool->threads,
                      .prefill_chunk = e->chunk,
                      .max_rewind = e->max_rewind,
                      .mtp_margin = e->margin,
                      .kv_type = e->kv_type,
                      .has_head = m->has_head,
                      .file_has_head = m->file_has_head,
                      .base_model = e->base_model,
                      .template_is_v4 = e->tokens && tok_template_is_v4(e->tokens),
                      .bos = e->bos,
                      .eos = e->eos,
                      .file_bytes = file_total(m->file),
                      .head_file_bytes = file_total(m->head_file),
                      .weight_bytes = m->weight_bytes,
                      .head_weight_bytes = m->head_weight_bytes,
                      .scratch_bytes = e->s.bytes,
                      .table_bytes = e->table_bytes,
                      .session_bytes = session_bytes(e, e->ctx, session_slack(e)),
                      .batch_bytes = (int64_t)(e->s.rows - 1) * c->n_vocab * (int64_t)sizeof(float)};
}

ds4_work ds4_engine_work(const ds4_engine *e) {
    const work_counts *w = &e->work;
    return (ds4_work){.passes = work_of(&w->passes),
                      .rows = work_of(&w->rows),
                      .head_passes = work_of(&w->head_passes),
                      .head_rows = work_of(&w->head_rows),
                      .repaired_rows = work_of(&w->repaired_rows),
                      .logit_rows = work_of(&w->logit_rows),
                      .weight_bytes = work_of(&w->weight_bytes),
                      .experts = work_of(&w->experts),
                      .kv_rows = work_of(&w->kv_rows),
                      .index_rows = work_of(&w->index_rows)};
}

int ds4_engine_tensor(const ds4_engine *e, int64_t i, ds4_tensor_info *out) {
    const gguf *g = e->model->file;
    int64_t n = (int64_t)g->n_tensors, heads = e->model->head_file ? (int64_t)e->model->head_file->n_tensors : 0;
    if (i < 0 || i >= n + heads)
        return fail("tensor %lld does not exist; there are %lld", (long long)i, (long long)(n + heads));
    const tensor *t = i < n ? &g->tensors[i] : &e->model->head_file->tensors[i - n];
    static const char unknown[] = "unknown";
    *out = (ds4_tensor_info){.type = type_name(t->type) ? type_name(t->type) : unknown,
                             .n_dims = t->n_dims,
                             .bytes = (int64_t)t->bytes,
                             .head = i >= n};
    size_t length = t->name.n < sizeof out->name - 1 ? t->name.n : sizeof out->name - 1;
    memcpy(out->name, t->name.p, length);
    out->name[length] = 0;
    make_printable(out->name);
    memcpy(out->dims, t->dims, sizeof out->dims);
    return 0;
}

int ds4_engine_meta(const ds4_engine *e, const char *key, char *out, size_t n) {
    const meta *m = gguf_meta(e->model->file, key);
    if (n) *out = 0;
    if (!m) return fail("%s: key %s is missing", e->model_path, key);
    if (m->type == G_STRING && !m->array) {
        str text = meta_string(e->model->file, key);
        snprintf(out, n, "%.*s", (int)(text.n < INT_MAX ? text.n : INT_MAX), text.p);
    } else if (meta_is_number(m) && m->count) {
        size_t at = 0;
        for (uint64_t i = 0; i < m->count && at < n; i++)
            at += (size_t)snprintf(out + at, n - at, "%s%.10g", i ? " " : "", meta_number(m, i));
    } else snprintf(out, n, "%llu values", (unsigned long long)m->count);
    return 0;
}

/* ---- tokens and text ---- */

static int need_tokenizer(const ds4_engine *e) { return e->tokens ? 0 : fail("%s: has no tokenizer", e->model_path); }

static int64_t give_ids(ids *list, int failed, int *out, size_t cap) {
    int64_t n = failed ? -1 : (int64_t)list->n;
    for (size_t i = 0; !failed && i < list->n && i < cap; i++) out[i] = list->v[i];
    mem_free(list->v);
    return n;
}

int64_t ds4_tokenize(const ds4_engine *e, const char *text, size_t n, bool control, int *out, size_t cap) {
    ids list = {0};
    if (need_tokenizer(e)) return -1;
    return give_ids(&list, tok_encode(e->tokens, text, n, control, &list), out, cap);
}

int64_t ds4_prompt(const ds4_engine *e, const char *text, size_t n, bool control, int *out, size_t cap) {
    ids list = {0};
    if (need_tokenizer(e)) return -1;
    return give_ids(&list, tok_prompt(e->tokens, text, n, control, &list), out, cap);
}

const char *ds4_token_piece(const ds4_engine *e, int token, size_t *n) {
    const char *p = NULL;
    *n = 0;
    if (e->tokens && token >= 0 && token < e->model->c.n_vocab) *n = tok_piece(e->tokens, token, &p);
    return p;
}

int ds4_token_id(const ds4_engine *e, const char *text) { return e->tokens ? tok_id(e->tokens, str_of(text)) : -1; }

bool ds4_token_is_eos(const ds4_engine *e, int token) { return token >= 0 && token == e->eos; }

int64_t ds4_chat(const ds4_engine *e, const ds4_message *messages, size_t n, ds4_think think, int *out, size_t cap) {
    if (need_tokenizer(e)) return -1;
    chat_message *list = mem_array(n + 1, sizeof *list);
    if (!list) return -1;
    for (size_t i = 0; i < n; i++)
        list[i] = (chat_message){.role = messages[i].role, .content = messages[i].content, .reasoning = messages[i].reasoning};
    ids result = {0};
    int failed = tok_chat(e->tokens, list, n,
                          think == DS4_THINK_MAX  ? THINK_MAX
                          : think == DS4_THINK_ON ? THINK_ON
                                                  : THINK_OFF,
                          true, &result);
    mem_free(list);
    return give_ids(&result, failed, out, cap);
}

/* ---- session ---- */

static void session_set_drafter(ds4_session *s, const drafter *d, void *ctx) {
    s->drafter = d;
    s->drafter_ctx = ctx;
}

static ds4_session *session_new(ds4_engine *e, int ctx) {
    const config *c = &e->model->c;
    ds4_session *s = mem_new(sizeof *s);
    char what[64];
    if (!s) goto bad;
    s->engine = e;
    s->ctx = ctx;
    s->max_rewind = e->max_rewind;
    s->batch = max_int(e->chunk, DS4_MAX_DRAFT + 1);
    s->logits_row = s->pending = s->chosen = -1;
    s->draft = e->draft;
    s->margin = e->margin;
    s->stream_need = min_int(c->window, s->ctx);
    s->stream_ring = s->stream_need + session_slack(e);
    if (e->model->has_head) session_set_drafter(s, &mtp_drafter, NULL);
    if (!(s->caches = mem_array((size_t)c->n_layers + 1, sizeof *s->caches)) ||
        !(s->tokens = mem_array((size_t)s->ctx + DS4_MAX_DRAFT + 1, sizeof(int))) ||
        !(s->streams = mem_array((size_t)s->stream_ring * e->sizes.streams, sizeof(float))) ||
        !(s->head_streams = mem_array(e->sizes.streams, sizeof(float))) ||
        !(s->logits = mem_array((size_t)(DS4_MAX_DRAFT + 1) * (size_t)c->n_vocab, sizeof(float))) ||
        !(s->pace = mem_new(sizeof *s->pace)) || (e->lookup && !(s->lookup = lookup_new(e->lookup, s->ctx))) ||
        sampler_new(&s->by, &e->by.gen, c->n_vocab) || shortlist_new(&s->listed, e))
        goto bad;
    for (int i = 0; i < c->n_layers + (e->model->has_head ? 1 : 0); i++)
        if (cache_new(&s->caches[i], c, c->ratio[i], s->ctx, session_slack(e), e->kv_type)) goto bad;
    engine_enter(e);
    s->next = e->sessions;
    s->link = &e->sessions;
    if (s->next) s->next->link = &s->next;
    e->sessions = s;
    engine_leave(e);
    return s;
bad:
    snprintf(what, sizeof what, "a session of %d tokens", ctx);
    name_if_no_memory(what);
    ds4_session_free(s);
    return NULL;
}

ds4_session *ds4_engine_open_session(ds4_engine *e) {
    if (e) return session_new(e, e->ctx);
    fail("no engine: ds4_engine_new failed, or was not called");
    return NULL;
}

ds4_session *ds4_engine_open_session_ctx(ds4_engine *e, int ctx) {
    if (ctx >= 1 && ctx <= e->ctx) return session_new(e, ctx);
    fail("ctx is %d; a session of this engine has 1 to %d", ctx, e->ctx);
    return NULL;
}

void ds4_session_free(ds4_session *s) {
    if (!s) return;
    engine_enter(s->engine);
    if (s->link) {
        *s->link = s->next;
        if (s->next) s->next->link = s->link;
    }
    engine_leave(s->engine);
    for (int i = 0; s->caches && i <= s->engine->model->c.n_layers; i++) cache_free(&s->caches[i]);
    sampler_free(&s->by);
    lookup_free(s->lookup);
    void *parts[] = {s->caches, s->tokens,        s->streams,    s->head_streams, s->logits,
                     s->stops,  s->listed.counts, s->listed.has, s->pace};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) mem_free(parts[i]);
    mem_free(s);
}

int ds4_session_position(const ds4_session *s) { return s->position; }
int ds4_session_ctx(const ds4_session *s) { return s->ctx; }
const int *ds4_session_tokens(const ds4_session *s) { return s->tokens; }
ds4_stats ds4_session_stats(const ds4_session *s) { return s->stats; }
void ds4_session_reset_stats(ds4_session *s) { s->stats = (ds4_stats){0}; }
void ds4_session_cancel(ds4_session *s) { atomic_store(&s->cancel, true); }
bool ds4_session_cancelled(const ds4_session *s) { return atomic_load(&s->cancel); }
void ds4_session_clear_cancel(ds4_session *s) { atomic_store(&s->cancel, false); }

int ds4_session_eval_logits(ds4_session *s, const int *tokens, size_t n, float *out) {
    const ds4_engine *e = s->engine;
    if (n > (size_t)(s->ctx - s->position))
        return fail_as(DS4_CONTEXT_FULL, "%zu tokens at position %d do not fit a context of %d", n, s->position, s->ctx);
    for (size_t i = 0; i < n; i++)
        if (check_token(s, tokens[i])) return -1;
    for (size_t at = 0; at < n;) {
        size_t left = n - at, V = (size_t)e->model->c.n_vocab;
        cycle c = {.s = s,
                   .tokens = tokens + at,
                   .n = left < (size_t)e->chunk ? (int)left : e->chunk,
                   .all = out ? out + at * V : NULL};
        at += (size_t)c.n;
        c.last = at == n;
        if (run_cycle(&c)) return -1;
        if (e->progress && n > (size_t)e->chunk) e->progress(e->callback_ctx, "prompt", (int64_t)at, (int64_t)n);
    }
    return 0;
}

int ds4_session_eval(ds4_session *s, const int *tokens, size_t n) { return ds4_session_eval_logits(s, tokens, n, NULL); }

int ds4_session_rewind_floor(const ds4_session *s) { return max_int(1, s->floor); }

int ds4_session_head_logits(ds4_session *s, int from, int to, float *out) {
    ds4_engine *e = s->engine;
    if (!e->model->has_head) return fail("no MTP head is loaded");
    if (from < 0 || from > to || to > s->position - 1)
        return fail("head rows %d to %d: expected rows below %d, whose next token is known", from, to,
                    max_int(0, s->position - 1));
    int oldest = max_int(s->written - s->stream_ring, s->streams_from);
    int first = oldest > 0 ? oldest + s->stream_need - 1 : 0;
    if (from < first) return fail("head rows from %d: rows from %d on can still be made", from, first);
    engine_enter(e);
    head_catch_up(s, from);
    head_rows(s, from, to, out);
    s->head_to = max_int(s->head_to, to);
    engine_leave(e);
    return 0;
}

int ds4_session_draft(ds4_session *s, int token, int k, float *out) {
    ds4_engine *e = s->engine;
    int V = e->model->c.n_vocab, n = 0;
    if (!e->model->has_head) return fail("no MTP head is loaded");
    if (check_token(s, token)) return -1;
    if (k < 0 || k > DS4_MAX_DRAFT) return fail("%d drafts; expected 0 to %d", k, DS4_MAX_DRAFT);
    if (s->position == 0) return 0;
    engine_enter(e);
    head_catch_up(s, s->position - 1);
    for (int next = token; n < min_int(k, s->ctx - s->position - 1) && next >= 0; n++) {
        if (n && ds4_session_is_stop(s, next)) break;
        s->tokens[s->position + n] = next;
        e->row_room[0].s = s;
        head_step(e, 1, n, out + (int64_t)n * V);
        next = choose_draft(s, &s->by, out + (int64_t)n * V, s->position + 1 + n);
    }
    int pending = s->pending; /* it moved nothing */
    session_settle(s);
    s->pending = pending;
    engine_leave(e);
    return n;
}

/* Logits of the position: those of the last pass, or computed again from the row's streams after a rewind. */
const float *ds4_session_logits(ds4_session *s) {
    ds4_engine *e = s->engine;
    if (s->position == 0) {
        fail("no logits: the session is empty");
        return NULL;
    }
    int V = e->model->c.n_vocab;
    if (s->logits_row < 0) {
        engine_enter(e);
        output_logits(e, session_streams(s, s->position - 1), 1, &e->model->collapse, e->model->output_norm, s->logits);
        bool finite = e->dev.k->all_finite(V, s->logits);
        engine_leave(e);
        if (!finite) {
            session_non_finite(s->position - 1);
            return NULL;
        }
        s->logits_row = 0;
        s->step_rows = 0;
    }
    return s->logits + (int64_t)s->logits_row * V;
}

const float *ds4_session_step_logits(ds4_session *s, int i) {
    if (i < 0 || i >= s->step_rows) {
        fail("the last step has no row %d; it committed %d", i, s->step_rows);
        return NULL;
    }
    return s->logits + (int64_t)i * s->engine->model->c.n_vocab;
}

int ds4_session_argmax(ds4_session *s) {
    const float *z = ds4_session_logits(s);
    if (!z) return -1;
    engine_enter(s->engine);
    int token = (int)s->engine->dev.k->argmax(s->engine->model->c.n_vocab, z);
    engine_leave(s->engine);
    return token;
}

/* A choice for the session's position by b, whose counts are those of this session. */
static int choose_next(ds4_session *s, sampler *b) {
    const float *z = ds4_session_logits(s);
    if (!z) return -1;
    engine_enter(s->engine);
    int token = choose(s, b, z, s->position, FOR_TOKEN);
    engine_leave(s->engine);
    return token;
}

int ds4_session_next(ds4_session *s) {
    int known = !s->by.draft_logits ? s->chosen : s->pending_law == s->by.law ? s->pending : -1;
    return known >= 0 ? known : choose_next(s, &s->by);
}

int ds4_session_sample(ds4_session *s, const ds4_gen *gen) {
    if (!gen) return choose_next(s, &s->by);
    sampler b;
    ds4_gen alone = *gen;
    if (check_gen(gen)) return -1;
    alone.scheme = DS4_COUPLED; /* no drafts to judge */
    if (sampler_new(&b, &alone, s->engine->model->c.n_vocab)) return -1;
    int token = choose_next(s, &b);
    sampler_free(&b);
    return token;
}

int ds4_session_set_gen(ds4_session *s, const ds4_gen *gen) {
    sampler b;
    if (!gen) return fail("gen is missing");
    if (sampler_new(&b, gen, s->engine->model->c.n_vocab)) return -1;
    sampler_free(&s->by);
    s->by = b;
    s->chosen = -1;
    if (gen->mask) s->pending = -1;
    return 0;
}

int ds4_session_top_logprobs(ds4_session *s, int n, ds4_logprob *out) {
    ds4_engine *e = s->engine;
    const float *z = ds4_session_logits(s);
    int V = e->model->c.n_vocab;
    if (!z) return -1;
    if (n < 0) return fail("%d logprobs asked for; expected 0 or more", n);
    n = min_int(n, V);
    engine_enter(e);
    double total = log_sum_exp(z, V);
    for (int i = 0; i < V; i++) e->candidates[i] = (candidate){z[i], i};
    candidates_heap(e->candidates, V);
    for (int i = 0; i < n; i++) {
        out[i] = (ds4_logprob){e->candidates[0].id, (float)((double)e->candidates[0].logit - total)};
        take_best(e->candidates, V - i);
    }
    engine_leave(e);
    return n;
}

double ds4_session_logprob(ds4_session *s, int token) {
    const float *z = ds4_session_logits(s);
    if (!z || check_token(s, token)) return (double)NAN;
    engine_enter(s->engine);
    double logprob = (double)z[token] - log_sum_exp(z, s->engine->model->c.n_vocab);
    engine_leave(s->engine);
    return logprob;
}

int ds4_session_rewind(ds4_session *s, int position) {
    if (position < 0 || position > s->position)
        return fail_as(DS4_CANNOT_REWIND, "cannot rewind to %d: the session is at %d", position, s->position);
    if (position == s->position) return 0;
    if (position > 0 && position < s->floor)
        return fail_as(DS4_CANNOT_REWIND, "cannot rewind to %d: with max_rewind %d, 0 or %d and above can be reached", position,
                       s->max_rewind, s->floor);
    s->position = position;
    if (position == 0) s->floor = s->written = s->streams_from = s->head_from = s->head_to = 0;
    s->logits_row = -1;
    s->step_rows = 0;
    session_settle(s);
    return 0;
}

/* What is dropped is as good as a refused draft: the rings held the rows of the whole pass, on top of max_rewind. */
int ds4_session_keep(ds4_session *s, int n) {
    int dropped = s->step_rows - n;
    if (n < 1 || dropped < 0) return fail("%d tokens to keep; the last step committed %d", n, s->step_rows);
    if (!dropped) return 0;
    s->position -= dropped;
    s->floor = s->step_floor;
    session_moved(s);
    s->logits_row -= dropped;
    s->step_rows = n;
    s->stats.emitted -= dropped;
    for (int i = n - 1; i < n - 1 + dropped; i++) s->stats.accepted[i]--;
    if (s->step_lookup) s->stats.lookup_accepted -= dropped;
    session_settle(s);
    return 0;
}

int ds4_session_set_stops(ds4_session *s, const int *tokens, size_t n, bool ignore_eos) {
    int *copy = NULL;
    for (size_t i = 0; i < n; i++)
        if (check_token(s, tokens[i])) return -1;
    if (n && !(copy = mem_array(n, sizeof *copy))) return -1;
    if (n) memcpy(copy, tokens, n * sizeof *copy);
    mem_free(s->stops);
    s->stops = copy;
    s->n_stops = n;
    s->ignore_eos = ignore_eos;
    return 0;
}

bool ds4_session_is_stop(const ds4_session *s, int token) {
    if (!s->ignore_eos && token >= 0 && token == s->engine->eos) return true;
    for (size_t i = 0; i < s->n_stops; i++)
        if (s->stops[i] == token) return true;
    return false;
}

int ds4_session_set_mtp(ds4_session *s, int draft, float margin) {
    if (draft < DS4_DRAFT_AUTO || draft > DS4_MAX_DRAFT)
        return fail("draft is %d; expected 0 to %d, or %d (auto)", draft, DS4_MAX_DRAFT, DS4_DRAFT_AUTO);
    if (check_margin("margin", margin)) return -1;
    if (draft != 0 && !s->drafter && !s->lookup) return fail("draft is %d, but no MTP head is loaded and lookup is off", draft);
    s->draft = draft;
    s->margin = margin_of(draft, margin);
    return 0;
}

int ds4_session_set_lookup(ds4_session *s, int longest) {
    if (longest < 0 || longest > LOOKUP_LONGEST) return fail("lookup is %d; expected 0 to %d", longest, LOOKUP_LONGEST);
    lookup *l = NULL;
    if (longest && !(l = lookup_new(longest, s->ctx))) return -1;
    lookup_free(s->lookup);
    s->lookup = l;
    return 0;
}

int ds4_session_set_head(ds4_session *s, bool on) {
    if (on && !s->engine->model->has_head) return fail("no MTP head is loaded");
    session_set_drafter(s, on ? &mtp_drafter : NULL, NULL);
    return 0;
}

/* ---- batches ---- */

int ds4_engine_batch_rows(const ds4_engine *e) { return e->s.rows; }

static int check_item(const ds4_engine *e, const ds4_batch_item *items, int i) {
    const ds4_batch_item *it = &items[i];
    if (!it->session) return fail("batch item %d: the session is missing", i);
    if (it->session->engine != e) return fail("batch item %d: a session of another engine", i);
    for (int j = 0; j < i; j++)
        if (items[j].session == it->session) return fail("batch items %d and %d are the same session", j, i);
    if (it->max < 0) return fail("batch item %d: max is %d; expected 1 or more for a step, 0 for a prompt", i, it->max);
    if (!it->tokens || it->n_tokens < 1) return fail("batch item %d: no tokens", i);
    if (it->max && it->n_tokens != 1) return fail("batch item %d: a step takes 1 token, not %d", i, it->n_tokens);
    if (it->max && !it->out) return fail("batch item %d: out is missing", i);
    return 0;
}

static void item_done(ds4_batch_item *it, const cycle *c) {
    const ds4_session *s = c->s;
    it->n = c->result ? -1 : c->max ? s->step_rows : c->n;
    if (c->result || !c->max) return;
    memcpy(it->out, s->tokens + s->position - s->step_rows, (size_t)s->step_rows * sizeof(int));
}

/* Rows for prompts: what drafts leave, a row at least for each. */
static void share_rows(const ds4_engine *e, cycle *list, int n) {
    int left = e->s.rows;
    for (int i = 0; i < n; i++)
        if (!list[i].result) left -= 1 + list[i].k;
    for (int i = 0; i < n; i++) {
        cycle *c = &list[i];
        if (c->result || c->max) continue;
        int asked = c->n;
        c->n = min_int(asked, min_int(c->s->batch, 1 + left));
        c->last = c->n == asked;
        left -= c->n - 1;
    }
}

int ds4_batch_step(ds4_engine *e, ds4_batch_item *items, int n) {
    if (!e || (n && !items)) return fail("%s", e ? "no batch items" : "no engine");
    if (n < 0 || n > e->s.rows) return fail("a batch of %d sessions; expected 0 to %d (prefill_chunk)", n, e->s.rows);
    for (int i = 0; i < n; i++)
        if (check_item(e, items, i)) return -1;
    engine_enter(e);
    int steps = 0, rows = n, result = 0;
    for (int i = 0; i < n; i++) {
        ds4_batch_item *it = &items[i];
        cycle *c = &e->cycles[i];
        *it->error = 0;
        it->kind = DS4_OK;
        *c = (cycle){
            .s = it->session, .by = &it->session->by, .tokens = it->tokens, .n = it->n_tokens, .max = it->max, .item = it};
        c->result = cycle_error(c, check_cycle(c));
        steps += it->max > 0 && !c->result;
    }
    int most = steps ? (e->s.rows - n) / steps : 0;
    for (int i = 0; i < n; i++)
        if (items[i].max && !e->cycles[i].result) rows += draft_room(&e->cycles[i], most);
    if (!(result = logit_rows(e, rows))) {
        propose(e, e->cycles, n, most);
        share_rows(e, e->cycles, n);
        run_cycles(e, e->cycles, n);
        for (int i = 0; i < n; i++) item_done(&items[i], &e->cycles[i]);
    }
    engine_leave(e);
    return result;
}

/* ============================================================================================================================
 * 14. Save and load
 *
 * A snapshot is what later tokens can read, by absolute position: tokens; of each ring the rows that a session rewound as far
 * as it may would look back on; all compressed rows. So it does not depend on chunk or ring sizes, and a resumed session gives
 * the same bits. Walked by one function for counting, saving, loading and forking, so that these cannot drift apart.
 * ========================================================================================================================== */

typedef struct {
    uint8_t *out; /* saving: where to write, NULL to count only */
    const uint8_t *in; /* loading */
    size_t at;
} walker;

static const char snapshot_magic[8] = "ds4snap2";

typedef struct {
    char magic[8];
    uint64_t identity, bytes, sum; /* of the model; of the whole snapshot; of what follows the header */
    int32_t kv_type, position, floor, pending; /* pending: a token already drawn, by rejection; -1: none */
    uint64_t pending_law;
} snapshot_header;

enum { CHECKED_HEADER = sizeof(snapshot_header) - offsetof(snapshot_header, kv_type) };

static void walk(walker *w, void *data, size_t n) {
    if (w->out) memcpy(w->out + w->at, data, n);
    else if (w->in) memcpy(data, w->in + w->at, n);
    w->at += n;
}

/* Rows from..to-1 of a ring. */
static void walk_ring(walker *w, void *ring, int size, size_t bytes, int from, int to) {
    for (int q = max_int(0, from); q < to; q++) walk(w, (uint8_t *)ring + (size_t)(q % size) * bytes, bytes);
}

static void walk_cache(walker *w, const config *c, const row_sizes *sizes, cache *k, int floor, int position) {
    size_t parts = k->ratio == 4 ? 2 : 1, channels = parts * (size_t)c->head_dim * sizeof(float),
           index_channels = 2 * (size_t)c->index_dim * sizeof(float);
    walk_ring(w, k->raw, k->ring, sizes->kv_row, floor - k->need, position);
    if (k->ratio == 0) return;
    walk_ring(w, k->kv, k->comp_ring, channels, floor - k->comp_need, position);
    walk_ring(w, k->gate, k->comp_ring, channels, floor - k->comp_need, position);
    walk(w, k->rows, (size_t)(position / k->ratio) * sizes->kv_row);
    if (k->ratio != 4) return;
    walk_ring(w, k->index_kv, k->comp_ring, index_channels, floor - k->comp_need, position);
    walk_ring(w, k->index_gate, k->comp_ring, index_channels, floor - k->comp_need, position);
    walk(w, k->index_rows, (size_t)(position / k->ratio) * sizes->index_row);
}

/* The session's body at `position`, for rewinds down to `floor`. Head rows are made again from the streams. */
static void walk_session(walker *w, ds4_session *s, int floor, int position) {
    const ds4_engine *e = s->engine;
    walk(w, s->tokens, (size_t)position * sizeof(int));
    walk_ring(w, s->streams, s->stream_ring, e->sizes.streams * sizeof(float), floor - s->stream_need, position);
    for (int i = 0; i < e->model->c.n_layers; i++) walk_cache(w, &e->model->c, &e->sizes, &s->caches[i], floor, position);
}

size_t ds4_session_save_size(const ds4_session *s) {
    walker w = {.at = sizeof(snapshot_header)};
    walk_session(&w, (ds4_session *)(uintptr_t)s, s->floor, s->position);
    return w.at;
}

size_t ds4_session_save_mem(const ds4_session *s, void *buf, size_t n) {
    size_t need = ds4_session_save_size(s);
    if (n < need) {
        fail_as(DS4_SNAPSHOT_FAILED, "a snapshot needs %zu bytes, the buffer has %zu", need, n);
        return 0;
    }
    walker w = {.out = buf, .at = sizeof(snapshot_header)};
    walk_session(&w, (ds4_session *)(uintptr_t)s, s->floor, s->position);
    bool drawn = s->pending >= 0 && s->pending_law;
    snapshot_header h = {.identity = s->engine->model->identity,
                         .bytes = need,
                         .kv_type = (int32_t)s->engine->kv_type,
                         .position = s->position,
                         .floor = s->floor,
                         .pending = drawn ? s->pending : -1,
                         .pending_law = drawn ? s->pending_law : 0};
    memcpy(h.magic, snapshot_magic, sizeof h.magic);
    h.sum = checksum(checksum(h.identity ^ h.bytes, &h.kv_type, CHECKED_HEADER), (uint8_t *)buf + sizeof h, need - sizeof h);
    memcpy(buf, &h, sizeof h);
    return need;
}

static int check_snapshot(const ds4_session *s, const uint8_t *buf, size_t n, const char *from, snapshot_header *h) {
    if (n < sizeof *h) return fail("%s: not a snapshot: %zu bytes, its header has %zu", from, n, sizeof *h);
    memcpy(h, buf, sizeof *h);
    if (memcmp(h->magic, snapshot_magic, sizeof h->magic)) return fail("%s: not a snapshot of this version", from);
    if (h->identity != s->engine->model->identity)
        return fail("%s: a snapshot of another model, not of %s", from, s->engine->model_path);
    if (h->kv_type != (int32_t)s->engine->kv_type)
        return fail("%s: a snapshot of kv type %s, this session has %s", from, kv_type_name(h->kv_type),
                    kv_type_name((int32_t)s->engine->kv_type));
    if (h->bytes != n)
        return fail("%s: damaged: a snapshot of %llu bytes, %zu are there", from, (unsigned long long)h->bytes, n);
    uint64_t sum = checksum(checksum(h->identity ^ h->bytes, &h->kv_type, CHECKED_HEADER), buf + sizeof *h, n - sizeof *h);
    if (sum != h->sum) return fail("%s: damaged: the checksum is wrong", from);
    if (h->position < 0 || h->floor < 0 || h->floor > h->position) return fail("%s: damaged: impossible positions", from);
    if (h->pending < -1 || h->pending >= s->engine->model->c.n_vocab)
        return fail("%s: damaged: pending token %d is outside the vocabulary", from, h->pending);
    if (h->position > s->ctx)
        return fail("%s: a snapshot of %d tokens does not fit a context of %d", from, h->position, s->ctx);
    return 0;
}

static int load_snapshot(ds4_session *s, const void *buf, size_t n, const char *from) {
    snapshot_header h;
    if (check_snapshot(s, buf, n, from, &h)) return -1;
    /* A ring holds what max_rewind promises; a snapshot that goes back further loses the excess. */
    walker size = {.at = sizeof h};
    walk_session(&size, s, h.floor, h.position);
    if (size.at != n) return fail("%s: damaged: %zu bytes, a session at %d would have %zu", from, n, h.position, size.at);
    const int *tokens = (const int *)(const void *)((const uint8_t *)buf + sizeof h);
    for (int i = 0; i < h.position; i++) {
        int token;
        memcpy(&token, tokens + i, sizeof token);
        if (check_token(s, token))
            return fail("%s: damaged: token %d at position %d is outside the vocabulary", from, token, i);
    }
    if (s->by.counts) count_to(s, &s->by, 0);
    shortlist_to(s, 0);
    walker w = {.in = buf, .at = sizeof h};
    walk_session(&w, s, h.floor, h.position);
    s->position = h.position;
    s->floor = h.floor;
    s->written = h.position;
    s->streams_from = max_int(0, h.floor - s->stream_need);
    session_moved(s);
    if (s->lookup) lookup_drop(s->lookup, 0);
    s->head_from = s->head_to = 0;
    s->logits_row = -1;
    s->step_rows = 0;
    session_settle(s);
    s->pending = h.pending;
    s->pending_law = h.pending_law;
    return 0;
}

int ds4_session_load_mem(ds4_session *s, const void *buf, size_t n) {
    return load_snapshot(s, buf, n, "snapshot") ? failed_as(DS4_SNAPSHOT_FAILED) : 0;
}

/* Where symbolic links lead from `path`, into out (PATH_MAX bytes); whether anything is there does not matter. */
static int follow_links(const char *path, char *out) {
    char link[PATH_MAX];
    size_t n = strlen(path);
    if (!n) return fail("the name of the file to write is empty");
    if (n >= PATH_MAX) return fail("%s: cannot write: %s", path, strerror(ENAMETOOLONG));
    memcpy(out, path, n + 1);
    for (int links = 0; links < 40; links++) {
        ssize_t length = readlink(out, link, sizeof link - 1);
        if (length < 0) return 0;
        link[length] = 0;
        char *slash = strrchr(out, '/');
        size_t directory = *link == '/' || !slash ? 0 : (size_t)(slash - out) + 1;
        if (directory + (size_t)length >= PATH_MAX) return fail("%s: cannot write: %s", path, strerror(ENAMETOOLONG));
        memcpy(out + directory, link, (size_t)length + 1);
    }
    return fail("%s: cannot write: %s", path, strerror(ELOOP));
}

enum { BESIDE_MAX = PATH_MAX + 32 };

/* A new file beside `path` for what shall replace it: its name into `beside` (BESIDE_MAX bytes), a descriptor or -1. It has the
 * mode of what is there, else what the umask leaves. */
static int open_beside(const char *path, char *beside) {
    struct stat st;
    int fd = -1;
    bool there = stat(path, &st) == 0;
    if (there && !S_ISREG(st.st_mode)) return fail("%s: cannot write: not a file", path);
    if (there && access(path, W_OK)) return fail("%s: cannot write: %s", path, strerror(errno));
    uint64_t seed = (uint64_t)(now_ms() * 1e6) ^ (uint64_t)getpid() << 40 ^ (uint64_t)(uintptr_t)&st;
    for (int i = 0; i < 100 && fd < 0; i++) {
        snprintf(beside, BESIDE_MAX, "%s.%08x", path, (unsigned)checksum(seed, &i, sizeof i));
        fd = fault() ? (errno = EMFILE, -1) : open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0 && errno != EEXIST) break;
    }
    if (fd < 0) return fail("%s: cannot write a file beside it: %s", path, strerror(errno));
    if (there) (void)!fchmod(fd, st.st_mode & 07777);
    return fd;
}

static int write_all(int fd, const uint8_t *data, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t wrote = fault() ? (errno = ENOSPC, -1) : write(fd, data + at, n - at);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) return -1;
        at += (size_t)wrote;
    }
    return 0;
}

/* Into a file beside `path` first, so that a crash or a full disk leaves the old one as it was. */
static int replace_file(const char *path, const uint8_t *data, size_t n) {
    char target[PATH_MAX], beside[BESIDE_MAX];
    if (follow_links(path, target)) return -1;
    int fd = open_beside(target, beside);
    if (fd < 0) return -1;
    bool good = !write_all(fd, data, n) && (fault() ? (errno = EIO, -1) : fsync(fd)) == 0;
    int error = errno;
    if (close(fd) && good) {
        error = errno;
        good = false;
    }
    if (good && rename(beside, target) == 0) return 0;
    fail("%s: cannot write %zu bytes: %s", path, n, strerror(good ? errno : error));
    unlink(beside);
    return -1;
}

int ds4_session_save(const ds4_session *s, const char *path) {
    size_t n = ds4_session_save_size(s);
    uint8_t *buf = mem_new(n);
    int result = buf && ds4_session_save_mem(s, buf, n) ? replace_file(path, buf, n) : name_if_no_memory(path);
    mem_free(buf);
    return result ? failed_as(DS4_SNAPSHOT_FAILED) : 0;
}

int ds4_session_can_save(const char *path) {
    char target[PATH_MAX], beside[BESIDE_MAX];
    int fd = follow_links(path, target) ? -1 : open_beside(target, beside);
    if (fd < 0) return failed_as(DS4_SNAPSHOT_FAILED);
    close(fd);
    unlink(beside);
    return 0;
}

int ds4_session_load(ds4_session *s, const char *path) {
    struct stat st;
    int fd = fault() ? (errno = EMFILE, -1) : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), result = -1;
    if (fd < 0) return fail_as(DS4_SNAPSHOT_FAILED, "%s: cannot open: %s", path, strerror(errno));
    uint8_t *buf = NULL;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        fail("%s: not a file that can be read", path);
        goto out;
    }
    size_t n = (size_t)st.st_size, at = 0;
    if (!(buf = mem_new(n))) {
        name_if_no_memory(path);
        goto out;
    }
    while (at < n) {
        ssize_t got = fault() ? (errno = EIO, -1) : read(fd, buf + at, n - at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            fail("%s: cannot read %zu bytes: %s", path, n, got ? strerror(errno) : "the file shrank");
            goto out;
        }
        at += (size_t)got;
    }
    result = load_snapshot(s, buf, n, path);
out:
    mem_free(buf);
    close(fd);
    return result ? failed_as(DS4_SNAPSHOT_FAILED) : 0;
}

/* Through a snapshot in memory: what a later token can read, and the session's settings. */
ds4_session *ds4_session_fork(const ds4_session *s) {
    ds4_session *copy = session_new(s->engine, s->ctx);
    size_t n = ds4_session_save_size(s);
    uint8_t *buf = copy ? mem_new(n) : NULL;
    bool good = buf && ds4_session_save_mem(s, buf, n) && !ds4_session_load_mem(copy, buf, n) &&
                !ds4_session_set_lookup(copy, s->lookup ? s->lookup->longest : 0) &&
                !ds4_session_set_stops(copy, s->stops, s->n_stops, s->ignore_eos) && !ds4_session_set_gen(copy, &s->by.gen);
    mem_free(buf);
    if (!good) {
        name_if_no_memory("a copy of a session");
        ds4_session_free(copy);
        return NULL;
    }
    session_set_drafter(copy, s->drafter, s->drafter_ctx);
    copy->pending = s->pending;
    copy->draft = s->draft;
    copy->margin = s->margin;
    *copy->pace = *s->pace;
    return copy;
}
