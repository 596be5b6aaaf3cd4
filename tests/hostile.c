/* Opens files that may be anything, uses what opens, and says how that went.
 *
 * Each line of standard input is a target's path or, with a tab between, a target's and a head's ("=": the target's own head).
 * For each there is one line of output, tabs between its parts: the verdict, milliseconds of CPU time, the most bytes
 * allocated at once, the message.
 *
 * Verdicts: "opened"; "refused", with the engine's message; "broken", with the rule that was broken: a failure gives one message
 * that is a line of printable UTF-8 and names the file, memory stays under twice the files plus 64 MB, and all of it is
 * given back. A crash or a hang (30 seconds) ends the program; whoever reads its output knows the line. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* ds4.c asks the system for memory with calloc and gives it back with free, nothing else. */
static size_t memory_now, memory_peak;

static void *counted_calloc(size_t n, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes) || bytes > SIZE_MAX - 16) return NULL;
    size_t *block = calloc(1, bytes + 16);
    if (!block) return NULL;
    *block = bytes;
    memory_now += bytes;
    if (memory_now > memory_peak) memory_peak = memory_now;
    return (char *)block + 16;
}

static void counted_free(void *p) {
    if (!p) return;
    size_t *block = (size_t *)(void *)((char *)p - 16);
    memory_now -= *block;
    free(block);
}

#define calloc counted_calloc
#define free counted_free
#include "../ds4.c"
#undef calloc
#undef free

const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1:detect_leaks=1"; }

enum { ROOM = 64 << 20, LINE = 8192 };

static char fault_text[1600];
__attribute__((format(printf, 1, 2))) static void broken(const char *format, ...) {
    if (*fault_text) return;
    va_list args;
    va_start(args, format);
    vsnprintf(fault_text, sizeof fault_text, format, args);
    va_end(args);
    for (char *p = fault_text; *p; p++)
        if ((unsigned char)*p < 0x20) *p = '?';
}

/* Printable, well-formed UTF-8: no control characters, no overlong forms, no surrogates. */
static bool clean_text(const char *text) {
    const unsigned char *p = (const unsigned char *)text;
    while (*p) {
        int more = *p < 0x80 ? 0 : *p >= 0xc2 && *p < 0xe0 ? 1 : *p >= 0xe0 && *p < 0xf0 ? 2 : *p >= 0xf0 && *p < 0xf5 ? 3 : -1;
        if (more < 0) return false;
        uint32_t c = more ? *p & (0x3fu >> more) : *p;
        for (int i = 1; i <= more; i++) {
            if ((p[i] & 0xc0) != 0x80) return false;
            c = c << 6 | (p[i] & 0x3fu);
        }
        if (c < 0x20 || (c >= 0x7f && c < 0xa0) || (more == 2 && c < 0x800) || (c >= 0xd800 && c < 0xe000) || (more == 3 && (c < 0x10000 || c > 0x10ffff))) return false;
        p += more + 1;
    }
    return true;
}

/* `path` NULL: a failure of an opened model, which need not name its file. */
static void check_message(const char *path, const char *other) {
    const char *text = ds4_last_error();
    if (!*text) broken("a failure without a message");
    else if (!clean_text(text)) broken("a message that is not one line of printable UTF-8: %s", text);
    else if (path && !strstr(text, path) && !(other && strstr(text, other))) broken("a message that does not name the file: %s", text);
}

static void look_around(const ds4_engine *e) {
    ds4_tensor_info t;
    char value[256];
    ds4_info info = ds4_engine_info(e);
    if (!clean_text(info.name)) broken("a model's name that is not printable");
    for (int64_t i = 0; ds4_engine_tensor(e, i, &t) == 0; i++)
        if (!t.type || !clean_text(t.name)) broken("a tensor's name that is not printable: %s", t.name);
    check_message(NULL, NULL);
    if (ds4_engine_meta(e, "tokenizer.ggml.tokens", value, sizeof value)) check_message(NULL, NULL);
    if (ds4_engine_meta(e, "deepseek4.attention.compress_ratios", value, sizeof value)) check_message(NULL, NULL);
    int ids_of_text[64];
    size_t length;
    const char text[] = "Hello \xff<think> 12345\n\n\xe4\xb8\x80";
    ds4_message turns[2] = {{"system", "s", NULL}, {"user", text, NULL}};
    if (ds4_tokenize(e, text, sizeof text - 1, true, ids_of_text, 64) < 0) check_message(NULL, NULL);
    if (ds4_prompt(e, text, sizeof text - 1, false, ids_of_text, 64) < 0) check_message(NULL, NULL);
    if (ds4_chat(e, turns, 2, DS4_THINK_MAX, ids_of_text, 64) < 0) check_message(NULL, NULL);
    for (int i = -1; i <= info.vocab; i++) ds4_token_piece(e, i, &length);
}

/* Three tokens, a step with drafts, a snapshot and back. */
static void run(ds4_engine *e) {
    ds4_info info = ds4_engine_info(e);
    ds4_session *s = ds4_engine_open_session(e), *copy = ds4_engine_open_session(e);
    int tokens[3] = {0, info.vocab / 2, info.vocab - 1}, out[DS4_MAX_DRAFT + 1];
    uint8_t *snapshot = NULL;
    if (!s || !copy) {
        check_message(NULL, NULL);
        return;
    }
    if (ds4_session_eval(s, tokens, 3)) check_message(NULL, NULL);
    else if (ds4_session_set_mtp(s, info.has_head ? 2 : 0, 0)) broken("drafts refused: %s", ds4_last_error());
    else if (ds4_session_step(s, tokens[1], 3, out) < 1) check_message(NULL, NULL);
    else if (ds4_session_argmax(s) < 0) check_message(NULL, NULL);
    size_t n = ds4_session_save_size(s);
    snapshot = malloc(n);
    if (ds4_session_save_mem(s, snapshot, n) != n || ds4_session_load_mem(copy, snapshot, n)) broken("a snapshot is refused: %s", ds4_last_error());
    else if (ds4_session_position(copy) != ds4_session_position(s)) broken("a snapshot lost its place");
    else if (ds4_session_eval(copy, tokens, 1)) check_message(NULL, NULL);
    free(snapshot);
}

static int64_t size_of(const char *path) {
    struct stat st;
    return path && !stat(path, &st) ? st.st_size : 0;
}

static double cpu_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void probe(const char *target, const char *head) {
    ds4_cfg cfg = ds4_default_cfg();
    cfg.model_path = target;
    cfg.mtp_internal = head && !strcmp(head, "=");
    cfg.mtp_path = head = cfg.mtp_internal ? NULL : head;
    cfg.ctx = 64;
    cfg.threads = 1;
    cfg.prefill_chunk = 8;
    cfg.max_rewind = 8;
    *fault_text = 0;
    memory_peak = memory_now = 0;
    set_error(DS4_OK, "%s", "");
    alarm(30);
    double start = cpu_ms();
    ds4_engine *e = ds4_engine_new(&cfg);
    char message[sizeof last_error] = "";
    if (e) {
        look_around(e);
        run(e);
    } else {
        check_message(head ? head : target, target);
        memcpy(message, last_error, sizeof message);
    }
    bool opened = e;
    ds4_engine_free(e);
    double ms = cpu_ms() - start;
    alarm(0);
    int64_t limit = 2 * (size_of(target) + size_of(head)) + ROOM;
    if ((int64_t)memory_peak > limit) broken("%zu bytes were allocated, the limit for these files is %lld", memory_peak, (long long)limit);
    if (memory_now) broken("%zu bytes were not given back", memory_now);
    printf("%s\t%.1f\t%zu\t%s\n", *fault_text ? "broken" : opened ? "opened" : "refused", ms, memory_peak, *fault_text ? fault_text : message);
    fflush(stdout);
}

int main(void) {
    char line[LINE];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        char *head = strchr(line, '\t');
        if (head) *head++ = 0;
        probe(line, head);
    }
    return 0;
}
