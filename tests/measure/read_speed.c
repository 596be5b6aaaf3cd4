/* read_speed THREADS MIB ROUNDS: how fast so many threads read memory, each its own part of MIB mebibytes, in the largest
 * pages the system gives. Prints the gigabytes (10^9) a second of the median round, of rounds that leave fetching ahead to the
 * processor or of those that ask for it, whichever are faster. It is the limit of whatever has to read all its weights for a
 * token. Exit status: 0, 1 failed, 2 misuse. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { MAX_THREADS = 256, MAX_ROUNDS = 99, AHEAD = 8192 };

static const uint64_t *memory;
static size_t words;                    /* of a thread's part, a multiple of 32 */
static int threads, rounds;
static pthread_barrier_t gate;
static uint64_t found[MAX_THREADS];

/* Four independent sums of vectors, so that memory is what is waited for; what lies `ahead` bytes further on is fetched. */
#if defined(__x86_64__) && defined(__gnu_linux__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static uint64_t sum_up(const uint64_t *p, size_t n, size_t ahead) {
    uint64_t lane[32] = {0}, all = 0;
    for (size_t i = 0; i < n; i += 32) {
        for (size_t k = 0; k < 256 && ahead; k += 64) __builtin_prefetch((const void *)((uintptr_t)(p + i) + ahead + k));
        for (int k = 0; k < 32; k++) lane[k] ^= p[i + (size_t)k];
    }
    for (int k = 0; k < 32; k++) all ^= lane[k];
    return all;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *reader(void *arg) {
    int i = (int)(intptr_t)arg;
    for (int round = 0; round < 2 * rounds; round++) {
        pthread_barrier_wait(&gate);
        found[i] += sum_up(memory + (size_t)i * words, words, round % 2 ? AHEAD : 0);
        pthread_barrier_wait(&gate);
    }
    return NULL;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int number(const char *text, int most) {
    char *end;
    long n = strtol(text, &end, 10);
    return *end || n < 1 || n > most ? 0 : (int)n;
}

int main(int argc, char **argv) {
    int mib = argc == 4 ? number(argv[2], 1 << 20) : 0;
    threads = argc == 4 ? number(argv[1], MAX_THREADS) : 0;
    rounds = argc == 4 ? number(argv[3], MAX_ROUNDS) : 0;
    if (!mib || !threads || !rounds) {
        fprintf(stderr, "usage: read_speed THREADS MIB ROUNDS (1 to %d, 1 to %d, 1 to %d)\n", MAX_THREADS, 1 << 20, MAX_ROUNDS);
        return 2;
    }
    size_t size = (size_t)mib << 20;
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
        perror("read_speed: mmap");
        return 1;
    }
    madvise(map, size, MADV_HUGEPAGE);  /* a wish */
    memset(map, 1, size);               /* pages that were never written are one page of zeros */
    memory = map;
    words = size / sizeof *memory / (size_t)threads / 32 * 32;
    pthread_barrier_init(&gate, NULL, (unsigned)threads + 1);
    for (int i = 0; i < threads; i++) {
        pthread_t t;
        if (pthread_create(&t, NULL, reader, (void *)(intptr_t)i)) {
            perror("read_speed: thread");
            return 1;
        }
        pthread_detach(t);
    }
    double seconds[2][MAX_ROUNDS];
    for (int round = 0; round < 2 * rounds; round++) {
        double start = now();
        pthread_barrier_wait(&gate);
        pthread_barrier_wait(&gate);
        seconds[round % 2][round / 2] = now() - start;
    }
    uint64_t all = 0;
    for (int i = 0; i < threads; i++) all ^= found[i];
    for (int i = 0; i < 2; i++) qsort(seconds[i], (size_t)rounds, sizeof **seconds, by_value);
    double alone = seconds[0][rounds / 2], asked = seconds[1][rounds / 2], bytes = (double)words * sizeof *memory * threads;
    printf("%.3f\n", bytes / (alone < asked ? alone : asked) * 1e-9);
    volatile uint64_t wanted = all;     /* so that the reads are not optimised away */
    (void)wanted;
    return 0;
}
