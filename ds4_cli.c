/* ./ds4, the command line: one answer or a chat, and the dumps that scripts and tests read. It uses nothing of the engine
 * but ds4.h.
 *
 * Sections, each using only those above it: 1 messages, small tools, files and endings, 2 options, 3 text out, 4 the application
 * (model, session, evaluation), 5 prompts, 6 generation and its statistics, 7 dumps and inspection, 8 bench, 9 line editor,
 * 10 chat, 11 main.
 *
 * Failures end the process where they are found, with one line on standard error: misuse() with status 2, fail() with 1. */
#include "ds4.h"
#include "ds4_help.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

/* ---- 1 messages, small tools, files and endings --------------------------------------------------------------------- */

static bool quiet;                     /* --quiet: no notes, no bars */
static const int ending_signals[] = {SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM, SIGXCPU, 0};
static bool bar_shown;                 /* a progress bar stands on the last line of standard error */

static void bar_erase(void) {
    if (bar_shown) fputs("\r\033[K", stderr);
    bar_shown = false;
}

__attribute__((format(printf, 2, 0))) static void message(const char *kind, const char *format, va_list args) {
    bar_erase();
    fflush(stdout);
    fprintf(stderr, "ds4: %s", kind);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

__attribute__((format(printf, 1, 2))) _Noreturn static void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    message("", format, args);
    va_end(args);
    exit(1);
}

__attribute__((format(printf, 1, 2))) _Noreturn static void misuse(const char *format, ...) {
    va_list args;
    va_start(args, format);
    message("", format, args);
    va_end(args);
    exit(2);
}

/* Something that failed in the chat, which goes on; or something the user should know of the model. */
__attribute__((format(printf, 2, 3))) static void warn(const char *kind, const char *format, ...) {
    va_list args;
    va_start(args, format);
    message(kind, format, args);
    va_end(args);
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...) {
    if (quiet) return;
    va_list args;
    va_start(args, format);
    message("note: ", format, args);
    va_end(args);
}

static void *grown(void *data, size_t *cap, size_t need, size_t size) {
    if (need <= *cap) return data;
    size_t n = *cap ? *cap : 64;
    while (n < need && n <= SIZE_MAX / 2 / size) n *= 2;
    data = n >= need ? realloc(data, n * size) : NULL;
    if (!data) fail("out of memory");
    *cap = n;
    return data;
}

/* Bytes with a NUL behind them (once anything was added). */
typedef struct {
    char *data;
    size_t len, cap;
} Bytes;

static void bytes_insert(Bytes *b, size_t at, const char *data, size_t n) {
    b->data = grown(b->data, &b->cap, b->len + n + 1, 1);
    memmove(b->data + at + n, b->data + at, b->len - at);
    if (n) memcpy(b->data + at, data, n);
    b->len += n;
    b->data[b->len] = 0;
}

static void bytes_add(Bytes *b, const char *data, size_t n) { bytes_insert(b, b->len, data, n); }

static void bytes_remove(Bytes *b, size_t from, size_t to) {
    if (from >= to) return;
    memmove(b->data + from, b->data + to, b->len - to);
    b->len -= to - from;
    b->data[b->len] = 0;
}

static void bytes_set(Bytes *b, const char *data, size_t n) {
    b->len = 0;
    bytes_add(b, data, n);
}

typedef struct {
    int *data;
    size_t len, cap;
} Ids;

static void ids_reserve(Ids *ids, size_t more) { ids->data = grown(ids->data, &ids->cap, ids->len + more, sizeof(int)); }

static void ids_add(Ids *ids, const int *data, size_t n) {
    ids_reserve(ids, n);
    if (n) memcpy(ids->data + ids->len, data, n * sizeof(int));
    ids->len += n;
}

static void ids_remove_first(Ids *ids, size_t n) {
    if (n) memmove(ids->data, ids->data + n, (ids->len - n) * sizeof(int));
    ids->len -= n;
}

typedef struct {
    char **data;
    size_t len, cap;
} Strings;

static void strings_add(Strings *s, const char *text) {
    s->data = grown(s->data, &s->cap, s->len + 1, sizeof *s->data);
    if (!(s->data[s->len] = strdup(text))) fail("out of memory");
    s->len++;
}

static void strings_free(Strings *s) {
    for (size_t i = 0; i < s->len; i++) free(s->data[i]);
    free(s->data);
    *s = (Strings){0};
}

/* Reads a file, or standard input for "-", behind what `out` holds. -1 and errno on failure. */
static int read_file(const char *path, Bytes *out) {
    FILE *f = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    if (!f) return -1;
    char block[65536];
    size_t n;
    bytes_add(out, "", 0);
    while ((n = fread(block, 1, sizeof block, f)) > 0) bytes_add(out, block, n);
    int error = ferror(f) ? errno : 0;
    if (f != stdin) fclose(f);
    errno = error;
    return error ? -1 : 0;
}

/* Signals that would end the program, held while `hold`: between a file's name and what is known of it none may come. */
static void hold_signals(bool hold) {
    static sigset_t before;
    sigset_t ending;
    sigemptyset(&ending);
    for (int i = 0; ending_signals[i]; i++) sigaddset(&ending, ending_signals[i]);
    if (hold) sigprocmask(SIG_BLOCK, &ending, &before);
    else sigprocmask(SIG_SETMASK, &before, NULL);
}

/* Whether `path` is written where it stands: devices, pipes and descriptors, in whose place no file can be put. */
static bool is_device(const char *path) {
    struct stat st;
    if (!strncmp(path, "/proc/", 6) || (!strncmp(path, "/dev/", 5) && strncmp(path, "/dev/shm/", 9))) return true;
    return stat(path, &st) == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode);
}

/* The file that `path` leads to into `place` (PATH_MAX bytes). One that is not there yet is made to be found, and removed. */
static bool find_place(const char *path, char *place) {
    if (realpath(path, place)) return true;
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return false;
    close(fd);
    bool found = realpath(path, place) != NULL;
    if (found) unlink(place);
    return found;
}

/* Files being written: each under a name beside its place, which it takes when it is whole. What fails or is ended by a signal
 * leaves neither. */
typedef struct {
    const char *path;                  /* as it was given; NULL: none */
    char place[PATH_MAX], beside[PATH_MAX + 32];
} Unfinished;

static Unfinished unfinished[4];
enum { UNFINISHED = sizeof unfinished / sizeof *unfinished };

static void remove_unfinished(void) {
    for (int i = 0; i < UNFINISHED; i++)
        if (unfinished[i].path) unlink(unfinished[i].beside);
}

/* A new file beside the place that `path` leads to, with the mode of what is there: a descriptor, or -1 and a reason in errno. */
static int open_beside(const char *path, Unfinished *u) {
    struct stat st;
    int fd = -1;
    if (!find_place(path, u->place)) return -1;
    bool there = stat(u->place, &st) == 0;
    if (there && S_ISDIR(st.st_mode)) return errno = EISDIR, -1;
    if (there && access(u->place, W_OK)) return -1;
    for (int i = 0; i < 100 && fd < 0 && (i == 0 || errno == EEXIST); i++) {
        snprintf(u->beside, sizeof u->beside, "%s.%ld-%d", u->place, (long)getpid(), i);
        fd = open(u->beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }
    if (fd >= 0 && there) (void)!fchmod(fd, st.st_mode & 07777);
    return fd;
}

/* Whether `path` could be written, seen before the work that it waits for; afterwards all is as it was. A reason in errno. */
static bool can_write(const char *path) {
    Unfinished u;
    if (is_device(path)) return access(path, W_OK) == 0;
    hold_signals(true);
    int fd = open_beside(path, &u), error = errno;
    if (fd >= 0) close(fd), unlink(u.beside);
    hold_signals(false);
    errno = error;
    return fd >= 0;
}

/* A standard stream by its name is written to where it stands: opened anew, a file behind it would be written from its start. */
static FILE *open_output(const char *path) {
    int fd = -1, i = 0;
    if (!strcmp(path, "/dev/stdout")) {
        fd = dup(STDOUT_FILENO);
    } else if (!strcmp(path, "/dev/stderr")) {
        fd = dup(STDERR_FILENO);
    } else if (is_device(path)) {
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    } else {
        while (unfinished[i].path) i++;
        hold_signals(true);
        fd = open_beside(path, &unfinished[i]);
        if (fd >= 0) unfinished[i].path = path;
        hold_signals(false);
    }
    FILE *f = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (!f) fail("%s: %s", path, strerror(errno));
    return f;
}

static void close_output(FILE *f, const char *path) {
    bool bad = ferror(f) != 0;
    if (fclose(f) != 0 || bad) fail("%s: %s", path, strerror(errno ? errno : EIO));
    for (int i = 0; i < UNFINISHED; i++) {
        if (unfinished[i].path != path) continue;
        hold_signals(true);
        if (rename(unfinished[i].beside, unfinished[i].place) != 0) fail("%s: %s", path, strerror(errno));
        unfinished[i].path = NULL;
        hold_signals(false);
    }
}

static void write_terminal(const char *text, size_t n) {
    while (n) {
        ssize_t done = write(STDOUT_FILENO, text, n);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return;
        text += done;
        n -= (size_t)done;
    }
}

static struct termios *terminal_to_restore;    /* while the terminal is raw */

static void restore_terminal(void) {
    if (!terminal_to_restore) return;
    write_terminal("\033[?2004l", 8);
    tcsetattr(STDIN_FILENO, TCSADRAIN, terminal_to_restore);
    terminal_to_restore = NULL;
}

/* A signal ends the program as it would have without this, with nothing half done left behind. */
static void on_termination(int signal_number) {
    remove_unfinished();
    restore_terminal();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

/* Signals that came ignored (nohup) stay so. */
static void catch_endings(void) {
    struct sigaction action = {.sa_handler = on_termination}, old;
    sigfillset(&action.sa_mask);
    for (int i = 0; ending_signals[i]; i++)
        if (sigaction(ending_signals[i], NULL, &old) == 0 && old.sa_handler == SIG_DFL)
            sigaction(ending_signals[i], &action, NULL);
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static int min_int(int a, int b) { return a < b ? a : b; }

/* The character at text[0..n), n >= 1: its length, and its code in *code. 0: the beginning of a character whose rest is not
 * there. -k: k bytes that are none, the longest part that could have begun one (so each such part becomes one U+FFFD). */
static int utf8_next(const char *text, size_t n, uint32_t *code) {
    const unsigned char *p = (const unsigned char *)text;
    unsigned first = p[0], low = 0x80, high = 0xbf;
    *code = first;
    if (first < 0x80) return 1;
    if (first < 0xc2 || first > 0xf4) return -1;
    int len = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (first == 0xe0) low = 0xa0;     /* no overlong forms, no surrogates, nothing above U+10FFFF */
    if (first == 0xed) high = 0x9f;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
    *code = first & (0xffu >> (len + 1));
    for (int i = 1; i < len; i++) {
        if ((size_t)i >= n) return 0;
        if (p[i] < low || p[i] > high) return -i;
        *code = *code << 6 | (p[i] & 0x3f);
        low = 0x80;
        high = 0xbf;
    }
    return len;
}

/* ---- 2 options ------------------------------------------------------------------------------------------------------ */

typedef struct {
    ds4_cfg cfg;                       /* filled in as far as an option sets a member of its own */
    const char *prompt, *prompt_file, *prompt_ids, *system, *session;
    const char *stats_json, *logprobs, *logits, *head_logits, *perplexity;
    Strings stops, biases;
    ds4_bias *bias;                    /* what `biases` say */
    float margin, env_margin;          /* -1: not given; the second from the environment */
    int draft;                         /* DRAFT_DEFAULT: not given */
    int max_rewind;                    /* -1: not given */
    int tokens;                        /* TOKENS_DEFAULT: not given */
    int bench_runs;                    /* 0: not given */
    const char *bench_ctx, *csv, *json;/* of --bench */
    int kv_type, isa, backend, scheme; /* index into the names below */
    int think;                         /* ds4_think */
    bool raw_prompt, rendered, ignore_eos;
    bool bench, inspect, inspect_tensors, dump_tokens, print_ids, stats, quiet;
    bool help, version;
    bool bundled;                      /* no model was given: it is the one that comes with ds4 */
} Options;

enum {
    MAX_TOKENS = 1 << 24,
    TOKENS_DEFAULT = -2,
    DRAFT_DEFAULT = -2,
    BASE_MODEL_TOKENS = 512,
    BENCH_TOKENS = 64,
    BENCH_FRONTIERS = 16
};

static const char *const kv_type_names[] = {"f32", "f16", "fp8", NULL};       /* in the order of ds4_kv_type */
static const char *const isa_names[] = {"auto", "scalar", "avx2", "avxvnni", "avx512", "amx", "neon", NULL};
static const char *const backend_names[] = {"cpu", NULL};
static const char *const scheme_names[] = {"coupled", "rejection", NULL};     /* in the order of ds4_scheme */

typedef enum {
    FLAG,                              /* bool, no value */
    SET,                               /* int, no value: `low` is stored */
    WHOLE,                             /* int from low to high */
    DEPTH,                             /* the same, or auto: DS4_DRAFT_AUTO */
    REAL,                              /* float from low to high */
    SEED,                              /* uint64_t */
    NAME,                              /* int, the index of one of `names` */
    TEXT,                              /* const char * */
    PATH,                              /* the same, not empty */
    LIST,                              /* Strings, each use adds one that is not empty */
} Kind;

typedef struct {
    const char *name, *brief;
    Kind kind;
    size_t at;                         /* offset in Options */
    double low, high;
    const char *const *names;
} Option;

#define AT(member) offsetof(Options, member)

static const Option options[] = {
    {"--model", "-m", PATH, AT(cfg.model_path), 0, 0, NULL},
    {"--ctx", "-c", WHOLE, AT(cfg.ctx), 1, MAX_TOKENS, NULL},
    {"--threads", "-t", WHOLE, AT(cfg.threads), 1, 256, NULL},
    {"--kv-type", NULL, NAME, AT(kv_type), 0, 0, kv_type_names},
    {"--prefill-chunk", NULL, WHOLE, AT(cfg.prefill_chunk), 1, 4096, NULL},
    {"--max-rewind", NULL, WHOLE, AT(max_rewind), 0, MAX_TOKENS, NULL},
    {"--isa", NULL, NAME, AT(isa), 0, 0, isa_names},
    {"--mlock", NULL, FLAG, AT(cfg.mlock), 0, 0, NULL},
    {"--backend", NULL, NAME, AT(backend), 0, 0, backend_names},

    {"--mtp", NULL, PATH, AT(cfg.mtp_path), 0, 0, NULL},
    {"--glm-mtp", NULL, FLAG, AT(cfg.mtp_internal), 0, 0, NULL},
    {"--mtp-draft", NULL, DEPTH, AT(draft), 0, DS4_MAX_DRAFT, NULL},
    {"--draft-lookup", NULL, WHOLE, AT(cfg.draft_lookup), 0, 64, NULL},
    {"--mtp-margin", NULL, REAL, AT(margin), 0, 1000, NULL},
    {"--mtp-shortlist", NULL, WHOLE, AT(cfg.mtp_shortlist), 0, MAX_TOKENS, NULL},
    {"--mtp-sampling", NULL, NAME, AT(scheme), 0, 0, scheme_names},

    {"--prompt", "-p", TEXT, AT(prompt), 0, 0, NULL},
    {"--prompt-file", NULL, PATH, AT(prompt_file), 0, 0, NULL},
    {"--prompt-ids", NULL, PATH, AT(prompt_ids), 0, 0, NULL},
    {"--raw-prompt", NULL, FLAG, AT(raw_prompt), 0, 0, NULL},
    {"--rendered", NULL, FLAG, AT(rendered), 0, 0, NULL},
    {"--system", "-sys", TEXT, AT(system), 0, 0, NULL},
    {"--think", NULL, SET, AT(think), DS4_THINK_ON, 0, NULL},
    {"--think-max", NULL, SET, AT(think), DS4_THINK_MAX, 0, NULL},
    {"--nothink", NULL, SET, AT(think), DS4_THINK_OFF, 0, NULL},
    {"--session", NULL, PATH, AT(session), 0, 0, NULL},

    {"--tokens", "-n", WHOLE, AT(tokens), -1, MAX_TOKENS, NULL},
    {"--temp", NULL, REAL, AT(cfg.gen.temperature), 0, 100, NULL},
    {"--top-k", NULL, WHOLE, AT(cfg.gen.top_k), 0, MAX_TOKENS, NULL},
    {"--top-p", NULL, REAL, AT(cfg.gen.top_p), 0, 1, NULL},
    {"--min-p", NULL, REAL, AT(cfg.gen.min_p), 0, 1, NULL},
    {"--presence-penalty", NULL, REAL, AT(cfg.gen.presence_penalty), -100, 100, NULL},
    {"--frequency-penalty", NULL, REAL, AT(cfg.gen.frequency_penalty), -100, 100, NULL},
    {"--logit-bias", NULL, LIST, AT(biases), 0, 0, NULL},
    {"--seed", NULL, SEED, AT(cfg.gen.seed), 0, 0, NULL},
    {"--stop", NULL, LIST, AT(stops), 0, 0, NULL},
    {"--ignore-eos", NULL, FLAG, AT(ignore_eos), 0, 0, NULL},

    {"--print-ids", NULL, FLAG, AT(print_ids), 0, 0, NULL},
    {"--stats", NULL, FLAG, AT(stats), 0, 0, NULL},
    {"--stats-json", NULL, PATH, AT(stats_json), 0, 0, NULL},
    {"--dump-logprobs", NULL, PATH, AT(logprobs), 0, 0, NULL},
    {"--dump-logits", NULL, PATH, AT(logits), 0, 0, NULL},
    {"--dump-head-logits", NULL, PATH, AT(head_logits), 0, 0, NULL},
    {"--dump-tokens", NULL, FLAG, AT(dump_tokens), 0, 0, NULL},
    {"--perplexity-file", NULL, PATH, AT(perplexity), 0, 0, NULL},
    {"--bench", NULL, FLAG, AT(bench), 0, 0, NULL},
    {"--bench-ctx", NULL, TEXT, AT(bench_ctx), 0, 0, NULL},
    {"--bench-runs", NULL, WHOLE, AT(bench_runs), 1, 99, NULL},
    {"--csv", NULL, PATH, AT(csv), 0, 0, NULL},
    {"--json", NULL, PATH, AT(json), 0, 0, NULL},
    {"--inspect", NULL, FLAG, AT(inspect), 0, 0, NULL},
    {"--inspect-tensors", NULL, FLAG, AT(inspect_tensors), 0, 0, NULL},
    {"--quiet", "-q", FLAG, AT(quiet), 0, 0, NULL},
    {"--help", "-h", FLAG, AT(help), 0, 0, NULL},
    {"--version", NULL, FLAG, AT(version), 0, 0, NULL},
};

enum { N_OPTIONS = sizeof options / sizeof *options };

static const Option *find_option(const char *name, size_t n) {
    for (int i = 0; i < N_OPTIONS; i++) {
        const Option *o = &options[i];
        if (strlen(o->name) == n && !memcmp(o->name, name, n)) return o;
        if (o->brief && strlen(o->brief) == n && !memcmp(o->brief, name, n)) return o;
    }
    return NULL;
}

/* What an option's value may be, for messages. */
static const char *expected(const Option *o) {
    static char text[160];
    size_t used = 0;
    switch (o->kind) {
    case WHOLE: snprintf(text, sizeof text, "a whole number from %.0f to %.0f", o->low, o->high); break;
    case DEPTH: snprintf(text, sizeof text, "a whole number from %.0f to %.0f, or auto", o->low, o->high); break;
    case REAL: snprintf(text, sizeof text, "a number from %g to %g", o->low, o->high); break;
    case SEED: snprintf(text, sizeof text, "a whole number from 0 to %llu", (unsigned long long)UINT64_MAX); break;
    case NAME:
        for (int i = 0; o->names[i]; i++)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s",
                                     i == 0            ? ""
                                     : o->names[i + 1] ? ", "
                                                       : " or ",
                                     o->names[i]);
        break;
    case PATH: return "the name of a file";
    default: return "some text";
    }
    return text;
}

static bool parse_whole(const char *text, double low, double high, int *out) {
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (end == text || *end || (*text != '-' && (*text < '0' || *text > '9')) || errno) return false;
    if ((double)v < low || (double)v > high) return false;
    *out = (int)v;
    return true;
}

/* Plain decimal numbers only: neither hexadecimal nor "inf". */
static bool parse_real(const char *text, double low, double high, float *out) {
    char *end;
    double v = strtod(text, &end);
    if (!*text || *end || text[strspn(text, "0123456789+-.eE")] || !(v >= low && v <= high)) return false;
    *out = (float)v + 0.0f;            /* no -0 */
    return true;
}

static bool parse_seed(const char *text, uint64_t *out) {
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno) return false;
    *out = v;
    return true;
}

static bool parse_name(const char *text, const char *const *names, int *out) {
    for (int i = 0; names[i]; i++)
        if (!strcmp(text, names[i])) {
            *out = i;
            return true;
        }
    return false;
}

/* Stores a value; false if it is not one that the option takes. */
static bool set_option(Options *opt, const Option *o, const char *value) {
    void *at = (char *)opt + o->at;
    switch (o->kind) {
    case FLAG: *(bool *)at = true; return true;
    case SET: *(int *)at = (int)o->low; return true;
    case WHOLE: return parse_whole(value, o->low, o->high, at);
    case DEPTH:
        if (!strcmp(value, "auto")) return *(int *)at = DS4_DRAFT_AUTO, true;
        return parse_whole(value, o->low, o->high, at);
    case REAL: return parse_real(value, o->low, o->high, at);
    case SEED: return parse_seed(value, at);
    case NAME: return parse_name(value, o->names, at);
    case TEXT: *(const char **)at = value; return true;
    case PATH: *(const char **)at = value; return *value != 0;
    case LIST:
        if (!*value) return false;
        strings_add(at, value);
        return true;
    }
    return false;
}

static void parse_options(Options *opt, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i], *equals = strchr(arg, '='), *value = NULL;
        if (arg[0] != '-' || !arg[1]) misuse("unexpected argument \"%s\": a prompt follows -p (see ds4 --help)", arg);
        size_t n = equals ? (size_t)(equals - arg) : strlen(arg);
        const Option *o = find_option(arg, n);
        if (!o) misuse("unknown option %.*s (see ds4 --help)", (int)n, arg);
        if (o->kind == FLAG || o->kind == SET) {
            if (equals) misuse("%.*s takes no value", (int)n, arg);
        } else if (equals) {
            value = equals + 1;
        } else if (i + 1 < argc && !find_option(argv[i + 1], strlen(argv[i + 1]))) {
            value = argv[++i];
        } else {
            misuse("%s needs a value: %s", arg, expected(o));
        }
        if (!set_option(opt, o, value)) misuse("%.*s \"%s\": expected %s", (int)n, arg, value, expected(o));
        if (opt->help || opt->version) return;
    }
}

static void read_environment(Options *opt) {
    const char *margin = getenv("DS4_MTP_MIN_MARGIN"), *log = getenv("DS4_MTP_CONF_LOG");
    if (margin && *margin && !parse_real(margin, 0, 1000, &opt->env_margin))
        misuse("DS4_MTP_MIN_MARGIN \"%s\": expected a number from 0 to 1000", margin);
    if (log && *log && strcmp(log, "0") && strcmp(log, "1")) misuse("DS4_MTP_CONF_LOG \"%s\": expected 0 or 1", log);
    opt->cfg.conf_log = log && !strcmp(log, "1");
}

static bool has_prompt(const Options *opt) { return opt->prompt || opt->prompt_file || opt->prompt_ids; }
static bool dumps_logits(const Options *opt) { return opt->logits || opt->head_logits; }

/* Without a prompt, people at a terminal talk; anything else that standard input may be is the prompt itself. */
static bool is_chat(const Options *opt) {
    return !has_prompt(opt) && !opt->inspect && !opt->perplexity && !opt->bench && isatty(STDIN_FILENO);
}

/* The contexts of --bench-ctx, ascending; returns how many, -1 if they are not a list of such. */
static int parse_frontiers(const char *text, int *out) {
    int n = 0;
    for (const char *p = text;; p++) {
        char number[16];
        size_t len = strcspn(p, ",");
        snprintf(number, sizeof number, "%.*s", (int)len, p);
        if (n == BENCH_FRONTIERS || len > 15 || !parse_whole(number, 0, MAX_TOKENS, &out[n])) return -1;
        if (n && out[n] <= out[n - 1]) return -1;
        n++;
        p += len;
        if (!*p) return n;
    }
}

static void check_bench(const Options *opt) {
    int list[BENCH_FRONTIERS];
    if (!opt->bench && (opt->bench_ctx || opt->bench_runs || opt->csv || opt->json))
        misuse("--bench-ctx, --bench-runs, --csv and --json belong to --bench");
    if (!opt->bench) return;
    if (opt->bench_ctx && parse_frontiers(opt->bench_ctx, list) < 0)
        misuse("--bench-ctx \"%s\": expected up to %d ascending whole numbers with commas between them, such as 0,512,2048",
               opt->bench_ctx, BENCH_FRONTIERS);
    if (opt->tokens == 0 || opt->tokens == -1) misuse("--bench generates at least 1 token for each measurement (-n)");
    if (opt->session || opt->stops.len || opt->print_ids || opt->stats || opt->stats_json || opt->logprobs)
        misuse("--bench: not with --session, --stop, --print-ids, --stats, --stats-json or --dump-logprobs");
}

/* "ID:BIAS" for each --logit-bias. Whether the vocabulary has the token is seen when the model is open. */
static void read_biases(Options *opt) {
    size_t n = opt->biases.len;
    size_t cap = 0;
    opt->bias = n ? grown(NULL, &cap, n, sizeof *opt->bias) : NULL;
    for (size_t i = 0; i < n; i++) {
        const char *text = opt->biases.data[i], *colon = strchr(text, ':');
        char id[16] = "";
        ds4_bias *b = &opt->bias[i];
        *b = (ds4_bias){0};
        if (colon && colon - text < (ptrdiff_t)sizeof id) memcpy(id, text, (size_t)(colon - text));
        bool forbids = colon && !strcmp(colon + 1, "-inf");
        if (!*id || !parse_whole(id, 0, MAX_TOKENS, &b->token) || (!forbids && !parse_real(colon + 1, -1000, 1000, &b->bias)))
            misuse("--logit-bias \"%s\": expected ID:BIAS, a token id and a number from -1000 to 1000 or -inf", text);
        if (forbids) b->bias = -INFINITY;
    }
    opt->cfg.gen.bias = opt->bias;
    opt->cfg.gen.n_bias = n;
}

/* Devices are no files: they may be named more than once. What is not there yet would come to the same place. */
static bool same_file(const char *a, const char *b) {
    struct stat x, y;
    char place[PATH_MAX], other[PATH_MAX];
    bool none = stat(a, &x) != 0;
    if (none != (stat(b, &y) != 0)) return false;
    if (none) return !strcmp(a, b) || (find_place(a, place) && find_place(b, other) && !strcmp(place, other));
    return x.st_dev == y.st_dev && x.st_ino == y.st_ino && S_ISREG(x.st_mode);
}

/* Models are mapped: one that was written to, whichever part of it, would end the process. */
static bool is_gguf(const char *path) {
    char magic[4] = "";
    struct stat st;
    if (stat(path, &st) || !S_ISREG(st.st_mode)) return false;
    FILE *f = fopen(path, "rb");
    bool yes = f && fread(magic, 1, 4, f) == 4 && !memcmp(magic, "GGUF", 4);
    if (f) fclose(f);
    return yes;
}

/* What cannot be written shows before the work, not after it. No file is written twice, or read and written: the second text
 * would lie over the first. A session alone is read where it is written. */
static void check_outputs(const Options *opt) {
    const struct {
        const char *name, *path;
    } file[] = {{"--prompt-file", opt->prompt_file},
                {"--prompt-ids", opt->prompt_ids},
                {"--session", opt->session},
                {"--stats-json", opt->stats_json},
                {"--dump-logprobs", opt->logprobs},
                {"--dump-logits", opt->logits},
                {"--dump-head-logits", opt->head_logits},
                {"--csv", opt->csv},
                {"--json", opt->json}};
    enum { INPUTS = 2 };
    for (size_t i = INPUTS; i < sizeof file / sizeof *file; i++) {
        if (!file[i].path) continue;
        for (size_t j = 0; j < i; j++)
            if (file[j].path && same_file(file[i].path, file[j].path))
                misuse(j < INPUTS ? "%s and %s: %s would be read and written" : "%s and %s: both would write %s", file[j].name,
                       file[i].name, file[i].path);
        if (is_gguf(file[i].path)) misuse("%s %s: a GGUF file; choose another for output", file[i].name, file[i].path);
        if (file[i].path == opt->session) continue;
        if (!can_write(file[i].path)) misuse("%s %s: %s", file[i].name, file[i].path, strerror(errno));
    }
    hold_signals(true);
    if (opt->session && ds4_session_can_save(opt->session) != 0) misuse("--session %s", ds4_last_error());
    hold_signals(false);
}

/* Combinations that cannot be meant. */
static void check_options(const Options *opt) {
    bool head = opt->cfg.mtp_path || opt->cfg.mtp_internal;
    if (opt->cfg.mtp_path && opt->cfg.mtp_internal) misuse("--mtp and --glm-mtp: only one head can be used");
    if (!!opt->prompt + !!opt->prompt_file + !!opt->prompt_ids > 1)
        misuse("-p, --prompt-file and --prompt-ids: only one prompt can be used");
    if (opt->raw_prompt && opt->rendered) misuse("--raw-prompt and --rendered exclude each other");
    if (opt->system && (opt->raw_prompt || opt->rendered || opt->prompt_ids))
        misuse("--system needs the chat template: not with --raw-prompt, --rendered or --prompt-ids");
    if (opt->prompt_ids && (opt->raw_prompt || opt->rendered))
        misuse("--prompt-ids is used as it is: not with --raw-prompt or --rendered");
    if (opt->inspect + opt->dump_tokens + dumps_logits(opt) + !!opt->perplexity + opt->bench > 1)
        misuse("--inspect, --dump-tokens, logits, --perplexity-file and --bench: only one at a time");
    if (opt->perplexity && has_prompt(opt)) misuse("--perplexity-file takes no prompt");
    check_bench(opt);
    if ((opt->inspect || opt->dump_tokens || opt->perplexity) &&
        (opt->print_ids || opt->stats || opt->stats_json || opt->logprobs))
        misuse(
            "--inspect, --dump-tokens and --perplexity-file: not with --print-ids, --stats, --stats-json or --dump-logprobs");
    if (opt->session && (opt->inspect || opt->dump_tokens || dumps_logits(opt) || opt->perplexity))
        misuse("--session: not with --inspect, --dump-tokens, --dump-logits, --dump-head-logits or --perplexity-file");
    if (opt->head_logits && !head) misuse("--dump-head-logits needs a head: --mtp FILE or --glm-mtp");
    if (is_chat(opt) && (opt->print_ids || opt->stats_json || opt->logprobs || opt->dump_tokens || dumps_logits(opt)))
        misuse("ids, dumps and --stats-json need a prompt: -p, --prompt-file or --prompt-ids");
    if (is_chat(opt) && (opt->raw_prompt || opt->rendered)) misuse("--raw-prompt and --rendered need a prompt");
    check_outputs(opt);
}

static bool file_exists(const char *path) { return access(path, F_OK) == 0; }

/* The directory of the running program into dir (n bytes); "." if it cannot be found. */
static void program_directory(const char *argv0, char *dir, size_t n) {
    ssize_t len = readlink("/proc/self/exe", dir, n - 1);
    char *path = len > 0 ? NULL : realpath(argv0, NULL);
    if (len > 0) dir[len] = 0;
    else snprintf(dir, n, "%s", path ? path : "./ds4");
    free(path);
    char *slash = strrchr(dir, '/');
    if (slash) *slash = 0;
}

/* The model when -m is not given. */
static const char *default_model(const char *argv0, bool *bundled) {
    static char path[PATH_MAX + 64];
    static const char *const places[] = {"models", "../models", "../share/ds4"};
    const char *env = getenv("DS4_MODEL");
    if (env && *env) return env;
    if (file_exists("ds4flash.gguf")) return "ds4flash.gguf";
    *bundled = true;
    char dir[PATH_MAX];
    program_directory(argv0, dir, sizeof dir);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(path, sizeof path, "%s/%s/small.gguf", dir, places[i]);
        if (file_exists(path)) return path;
    }
    fail("no model: give one with -m FILE or DS4_MODEL, or put ds4flash.gguf into this directory");
}

/* The engine's cfg from the options. */
static void finish_cfg(Options *opt, const char *argv0) {
    ds4_cfg *cfg = &opt->cfg;
    bool head = cfg->mtp_path || cfg->mtp_internal;
    if (!cfg->model_path) cfg->model_path = default_model(argv0, &opt->bundled);
    cfg->kv_type = (ds4_kv_type)opt->kv_type;
    cfg->isa = isa_names[opt->isa];
    cfg->gen.scheme = (ds4_scheme)opt->scheme;
    read_biases(opt);
    cfg->mtp_draft = !head && !cfg->draft_lookup ? 0 : opt->draft != DRAFT_DEFAULT ? opt->draft : DS4_DRAFT_AUTO;
    if (opt->margin >= 0) cfg->mtp_margin = opt->margin;
    if (opt->env_margin >= 0) cfg->mtp_margin = opt->env_margin;
    bool generates = !dumps_logits(opt) || opt->tokens != TOKENS_DEFAULT;
    bool text_out = opt->dump_tokens || (generates && !opt->print_ids && !opt->bench) || opt->stops.len;
    cfg->raw_vocab_ok = opt->inspect || (opt->prompt_ids && !text_out);
    if (opt->max_rewind >= 0) cfg->max_rewind = opt->max_rewind;
    else if (cfg->ctx) cfg->max_rewind = min_int(cfg->max_rewind, cfg->ctx);
    /* the head's logits are read for rows that a session can still go back to: some there must be */
    bool head_rows = opt->head_logits || (opt->perplexity && head);
    if (head_rows && cfg->max_rewind < 2) cfg->max_rewind = 2;
    /* Each measurement goes back to where it began. */
    if (opt->bench && opt->tokens == TOKENS_DEFAULT) opt->tokens = BENCH_TOKENS;
    if (opt->bench && !opt->bench_runs) opt->bench_runs = 3;
    if (opt->bench && cfg->max_rewind < opt->tokens + DS4_MAX_DRAFT + 1) cfg->max_rewind = opt->tokens + DS4_MAX_DRAFT + 1;
}

static Options read_options(int argc, char **argv) {
    Options opt = {.cfg = ds4_default_cfg(),
                   .margin = -1,
                   .env_margin = -1,
                   .max_rewind = -1,
                   .tokens = TOKENS_DEFAULT,
                   .draft = DRAFT_DEFAULT};
    opt.kv_type = (int)opt.cfg.kv_type;
    parse_options(&opt, argc, argv);
    opt.inspect |= opt.inspect_tensors;
    quiet = opt.quiet;
    return opt;
}

/* ---- 3 text out ----------------------------------------------------------------------------------------------------- */

/* Where generated text goes, byte by byte as tokens bring it. Held back in `pending`: the beginning of a character until it
 * is whole, and what could still become a stop string. Bytes that are no UTF-8 are printed as U+FFFD. */
typedef struct {
    bool silent;                       /* nothing is printed, stop strings are looked for all the same */
    bool terminal;
    const Strings *stops;
    Bytes pending;
    Bytes *copy;                       /* the text's own bytes are added here too, unless NULL */
    bool stopped;                      /* a stop string has come: nothing more is taken */
    bool mid_line;                     /* what was printed last was no newline */
} Out;

#define REPLACEMENT "\xef\xbf\xbd"

static void out_print(Out *out, const char *text, size_t n) {
    if (out->silent || !n) return;
    fwrite(text, 1, n, stdout);
    out->mid_line = text[n - 1] != '\n';
}

/* Prints the first n pending bytes; a character that is cut off by their end stays pending, unless nothing follows. */
static void out_release(Out *out, size_t n, bool nothing_follows) {
    size_t done = 0;
    while (done < n) {
        uint32_t code;
        const char *at = out->pending.data + done;
        int len = utf8_next(at, n - done, &code);
        if (len == 0 && !nothing_follows) break;
        size_t used = len > 0 ? (size_t)len : len < 0 ? (size_t)-len : n - done;
        bool control = code < 0x20 ? code != '\n' && code != '\t' : code >= 0x7f && code < 0xa0;
        if (len <= 0 || (control && out->terminal)) out_print(out, REPLACEMENT, 3);
        else out_print(out, at, used);
        if (out->copy) bytes_add(out->copy, at, used);
        done += used;
    }
    bytes_remove(&out->pending, 0, done);
}

/* The longest stop string that the pending bytes end with; 0 if none. */
static size_t stop_at_end(const Out *out) {
    size_t best = 0, n = out->pending.len;
    for (size_t i = 0; i < out->stops->len; i++) {
        const char *stop = out->stops->data[i];
        size_t len = strlen(stop);
        if (len > best && len <= n && !memcmp(out->pending.data + n - len, stop, len)) best = len;
    }
    return best;
}

/* How many bytes at the end of the pending ones could be the beginning of a stop string. */
static size_t could_become_stop(const Out *out) {
    size_t best = 0, n = out->pending.len;
    for (size_t i = 0; i < out->stops->len; i++) {
        const char *stop = out->stops->data[i];
        size_t len = strlen(stop);
        for (size_t k = len - 1 < n ? len - 1 : n; k > best; k--)
            if (!memcmp(out->pending.data + n - k, stop, k)) best = k;
    }
    return best;
}

/* Byte by byte, so that where a stop falls never depends on how tokens divide the text. */
static void out_text(Out *out, const char *text, size_t n) {
    for (size_t i = 0; i < n && !out->stopped; i++) {
        bytes_add(&out->pending, text + i, 1);
        size_t stop = stop_at_end(out);
        if (!stop) continue;
        out->stopped = true;
        out_release(out, out->pending.len - stop, true);
        out->pending.len = 0;
    }
    if (!out->stopped) out_release(out, out->pending.len - could_become_stop(out), false);
}

static void flush_stdout(void) {
    if (fflush(stdout) != 0 || ferror(stdout)) fail("standard output: %s", strerror(errno ? errno : EIO));
}

/* The end of the text: what was held back is printed, and a terminal's line ended. */
static void out_end(Out *out) {
    out_release(out, out->pending.len, true);
    if (out->terminal && out->mid_line) out_print(out, "\n", 1);
    flush_stdout();
    free(out->pending.data);
    out->pending = (Bytes){0};
}

/* ---- 4 the application ---------------------------------------------------------------------------------------------- */

typedef struct {
    Options opt;
    ds4_engine *engine;
    ds4_session *session;              /* NULL until open_session */
    ds4_info info;
    double load_ms;
    int think_end;                     /* the token that ends the reasoning, -1 if there is none */
    FILE *logprobs;                    /* of --dump-logprobs, or NULL */
} App;

/* A bar on the last line of a terminal, for work that takes longer than a blink. */
static void on_progress(void *ctx, const char *what, int64_t done, int64_t total) {
    static const char *current;
    static double started, drawn;
    static int64_t last;
    double now = now_ms();
    (void)ctx;
    if (!current || strcmp(what, current) || done < last) started = now;
    current = what;
    last = done;
    if (done >= total || now - started < 200 || (bar_shown && now - drawn < 100)) {
        if (done >= total) bar_erase();
        return;
    }
    char bar[31];
    size_t full = (size_t)(30 * (double)done / (double)total);
    memset(bar, '.', 30);
    memset(bar, '#', full);
    bar[30] = 0;
    fprintf(stderr, "\r%s [%s] %3.0f%% of %lld", what, bar, 100 * (double)done / (double)total, (long long)total);
    bar_shown = true;
    drawn = now;
}

static void on_log(void *ctx, const char *text) {
    (void)ctx;
    bar_erase();
    fprintf(stderr, "%s\n", text);
}

static ds4_session *volatile interrupt_target;
static volatile sig_atomic_t interrupted, second_ends;

static void on_interrupt(int signal_number) {
    if (interrupted && second_ends) {
        on_termination(signal_number);
        return;
    }
    interrupted = 1;
    if (interrupt_target) ds4_session_cancel(interrupt_target);
}

/* Ctrl+C ends the work in hand. Outside the chat a second one ends the program, for passes that take long. */
static void catch_interrupts(App *app, bool chat) {
    struct sigaction action = {.sa_handler = on_interrupt};
    sigemptyset(&action.sa_mask);
    second_ends = !chat;
    interrupt_target = app->session;
    sigaction(SIGINT, &action, NULL);
}

/* What the user may have wanted otherwise. Said once the model is open, so that a failure remains a single line. */
static void say_notes(const App *app) {
    const Options *opt = &app->opt;
    bool head = opt->cfg.mtp_path || opt->cfg.mtp_internal;
    if (opt->bundled) note("no model given: using the small one that comes with ds4 (-m FILE for another)");
    bool asks = opt->draft > 0 || opt->draft == DS4_DRAFT_AUTO;
    bool about_drafts = asks || opt->margin >= 0 || opt->scheme || opt->cfg.mtp_shortlist != ds4_default_cfg().mtp_shortlist;
    if (!head && !opt->cfg.draft_lookup && about_drafts)
        note("without a head (--mtp FILE or --glm-mtp) or --draft-lookup nothing is drafted");
    if (app->info.base_model) {
        if (opt->think != DS4_THINK_OFF) note("the model has no chat template: it does not know how to think");
        return;
    }
    if (app->info.template_is_v4 || opt->raw_prompt || opt->rendered || opt->prompt_ids || opt->inspect || opt->perplexity)
        return;
    char text[48] = "";
    ds4_engine_meta(app->engine, "tokenizer.chat_template", text, sizeof text);
    size_t shown = 0, n = strlen(text);        /* its beginning, as far as that is one line of text */
    for (uint32_t code; shown < n && utf8_next(text + shown, n - shown, &code) > 0 && code >= 0x20 && code != 0x7f;)
        shown += (size_t)utf8_next(text + shown, n - shown, &code);
    text[shown] = 0;
    warn("warning: ",
         "the model's chat template (\"%s...\") is not DeepSeek-V4's, whose turns are used all the same; "
         "see --rendered",
         text);
}

static void open_engine(App *app) {
    ds4_cfg *cfg = &app->opt.cfg;
    cfg->log = on_log;
    if (isatty(STDERR_FILENO) && !quiet) cfg->progress = on_progress;
    double start = now_ms();
    app->engine = ds4_engine_new(cfg);
    if (!app->engine) fail("%s", ds4_last_error());
    bar_erase();
    app->load_ms = now_ms() - start;
    app->info = ds4_engine_info(app->engine);
    app->think_end = ds4_token_id(app->engine, "</think>");
    say_notes(app);
}

static void open_session(App *app) {
    app->session = ds4_engine_open_session(app->engine);
    if (!app->session || ds4_session_set_stops(app->session, NULL, 0, app->opt.ignore_eos) != 0) fail("%s", ds4_last_error());
    const char *saved = app->opt.session;
    if (saved && file_exists(saved) && ds4_session_load(app->session, saved) != 0) fail("%s", ds4_last_error());
}

static void save_session(App *app) {
    if (!app->opt.session) return;
    hold_signals(true);                /* which would leave the file beside it */
    if (ds4_session_save(app->session, app->opt.session) != 0) fail("%s", ds4_last_error());
    hold_signals(false);
}

/* A failed call: true if Ctrl+C made it fail, which is then forgotten. */
static bool was_cancelled(App *app) {
    if (!ds4_session_cancelled(app->session)) return false;
    ds4_session_clear_cancel(app->session);
    return true;
}

/* The rows of a text's logits and of the head's guesses, pass by pass. Row i of `target` belongs to position first + i;
 * row i of `head` to position head_first + i, and there are head_rows of them. */
typedef void (*rows_fn)(void *ctx, const float *target, int first, int rows, const float *head, int head_first, int head_rows);

/* Evaluates ids and hands out the target's rows, the head's, or both. A head row q needs the token at q + 1, so those of a
 * pass begin one row before it, and the session must be able to go back that far: a pass is kept below max_rewind. */
static void eval_rows(App *app, const Ids *ids, bool target, bool head, rows_fn got, void *ctx) {
    size_t vocab = (size_t)app->info.vocab, n = ids->len;
    int rows = min_int(app->info.prefill_chunk, (int)((64u << 20) / (vocab * sizeof(float))));
    if (head) rows = min_int(rows, app->info.max_rewind - 1);
    if (rows < 1) rows = 1;
    float *of_target = target ? malloc((size_t)rows * vocab * sizeof(float)) : NULL;
    float *of_head = head ? malloc((size_t)rows * vocab * sizeof(float)) : NULL;
    if ((target && !of_target) || (head && !of_head)) fail("out of memory");
    for (size_t at = 0; at < n;) {
        int m = n - at < (size_t)rows ? (int)(n - at) : rows, first = ds4_session_position(app->session);
        int from = first ? first - 1 : 0, to = first + m - 1;
        int bad = target ? ds4_session_eval_logits(app->session, ids->data + at, (size_t)m, of_target)
                         : ds4_session_eval(app->session, ids->data + at, (size_t)m);
        if (!bad && head && to > from) bad = ds4_session_head_logits(app->session, from, to, of_head);
        if (bad) {
            if (was_cancelled(app)) exit(130);
            fail("%s", ds4_last_error());
        }
        got(ctx, of_target, first, m, of_head, from, head ? to - from : 0);
        at += (size_t)m;
        if (app->opt.cfg.progress) on_progress(NULL, "evaluated", (int64_t)at, (int64_t)n);
    }
    free(of_target);
    free(of_head);
}

/* ---- 5 prompts ------------------------------------------------------------------------------------------------------ */

typedef struct {
    Bytes text;
    Ids ids;                           /* of --prompt-ids */
    bool is_ids;
} Prompt;

static void parse_ids(const char *path, const Bytes *text, Ids *ids) {
    static const char space[] = " \t\r\n\v\f";
    for (const char *p = text->data, *end = p + text->len; p < end;) {
        size_t n = strcspn(p, space), shown = n < 23 ? n : 23;
        char word[24];
        int id;
        memcpy(word, p, shown);
        word[shown] = 0;
        if (n && !parse_whole(word, 0, INT_MAX, &id)) fail("%s: \"%s\" is not a token id", path, word);
        if (n) ids_add(ids, &id, 1);
        p += n;
        p += strspn(p, space);
        if (n == 0 && p < end && *p == 0) fail("%s: not a list of token ids", path);
    }
}

/* Reads the prompt before the model, so that a wrong file name shows at once. */
static Prompt read_prompt(const Options *opt) {
    Prompt prompt = {.is_ids = opt->prompt_ids != NULL};
    const char *path = opt->prompt_ids ? opt->prompt_ids : opt->prompt_file ? opt->prompt_file : "-";
    const char *name = strcmp(path, "-") ? path : "standard input";
    if (opt->prompt) {
        bytes_add(&prompt.text, opt->prompt, strlen(opt->prompt));
        return prompt;
    }
    if (read_file(path, &prompt.text) != 0) fail("%s: %s", name, strerror(errno));
    if (prompt.is_ids) {
        parse_ids(name, &prompt.text, &prompt.ids);
        return prompt;
    }
    size_t n = prompt.text.len;        /* the newline that ends a text file's last line is not the prompt's */
    if (n && prompt.text.data[n - 1] == '\n') n--;
    if (n && n < prompt.text.len && prompt.text.data[n - 1] == '\r') n--;
    bytes_remove(&prompt.text, n, prompt.text.len);
    if (!opt->raw_prompt && !opt->rendered && memchr(prompt.text.data, 0, n)) fail("%s: holds a NUL byte", name);
    return prompt;
}

/* Appends the ids of a text. */
static void add_text(App *app, Ids *ids, const Bytes *text, bool control) {
    for (;;) {
        size_t room = ids->cap - ids->len;
        int64_t n = ds4_tokenize(app->engine, text->len ? text->data : "", text->len, control,
                                 room ? ids->data + ids->len : NULL, room);
        if (n < 0) fail("%s", ds4_last_error());
        if ((size_t)n <= room) {
            ids->len += (size_t)n;
            return;
        }
        ids_reserve(ids, (size_t)n);
    }
}

/* Appends the ids of rendered messages. */
static void add_chat(App *app, Ids *ids, const ds4_message *messages, size_t count, ds4_think think) {
    for (;;) {
        size_t room = ids->cap - ids->len;
        int64_t n = ds4_chat(app->engine, messages, count, think, room ? ids->data + ids->len : NULL, room);
        if (n < 0) fail("%s", ds4_last_error());
        if ((size_t)n <= room) {
            ids->len += (size_t)n;
            return;
        }
        ids_reserve(ids, (size_t)n);
    }
}

static void add_bos(const App *app, Ids *ids) {
    if (app->info.bos >= 0) ids_add(ids, &app->info.bos, 1);
}

/* The prompt as a text of its own. */
static Ids fresh_prompt(App *app, const Prompt *prompt) {
    Ids ids = {0};
    const Options *opt = &app->opt;
    if (prompt->is_ids) {
        ids_add(&ids, prompt->ids.data, prompt->ids.len);
    } else if (opt->raw_prompt) {
        add_bos(app, &ids);
        add_text(app, &ids, &prompt->text, false);
    } else if (opt->rendered) {
        add_bos(app, &ids);
        add_text(app, &ids, &prompt->text, true);
        if (ids.len > 1 && ids.data[1] == app->info.bos) ids_remove_first(&ids, 1);
    } else {
        ds4_message messages[2] = {{"system", opt->system, NULL}, {"user", prompt->text.data, NULL}};
        if (opt->system) add_chat(app, &ids, messages, 2, (ds4_think)opt->think);
        else add_chat(app, &ids, messages + 1, 1, (ds4_think)opt->think);
    }
    for (size_t i = 0; i < ids.len; i++)
        if (ids.data[i] < 0 || ids.data[i] >= app->info.vocab)
            fail("token id %d (number %zu of the prompt): the model's ids end at %d", ids.data[i], i + 1, app->info.vocab - 1);
    return ids;
}

/* Further messages behind a session's tokens: the last answer is ended, BOS and what belongs to the beginning fall away. */
static void add_turns(App *app, Ids *ids, int last_token, const ds4_message *messages, size_t count) {
    Ids turns = {0};
    ds4_think think = app->opt.think == DS4_THINK_OFF ? DS4_THINK_OFF : DS4_THINK_ON;
    add_chat(app, &turns, messages, count, think);
    if (app->info.eos >= 0 && !ds4_token_is_eos(app->engine, last_token)) ids_add(ids, &app->info.eos, 1);
    if (turns.len && turns.data[0] == app->info.bos) ids_remove_first(&turns, 1);
    ids_add(ids, turns.data, turns.len);
    free(turns.data);
}

/* What of `full`, the prompt as a text of its own, is to be evaluated behind the session's tokens: what follows them if the
 * prompt begins with all of them, else the prompt as their continuation. */
static Ids rest_of_prompt(App *app, const Prompt *prompt, const Ids *full) {
    Ids rest = {0};
    const Options *opt = &app->opt;
    size_t held = (size_t)ds4_session_position(app->session);
    const int *tokens = ds4_session_tokens(app->session);
    if (held == 0 || (held <= full->len && !memcmp(tokens, full->data, held * sizeof(int)))) {
        ids_add(&rest, full->data + held, full->len - held);
    } else if (prompt->is_ids) {
        ids_add(&rest, prompt->ids.data, prompt->ids.len);
    } else if (!prompt->text.len) {
        return rest;
    } else if (opt->raw_prompt || opt->rendered || app->info.base_model) {
        add_text(app, &rest, &prompt->text, opt->rendered);
        if (rest.len && rest.data[0] == app->info.bos) ids_remove_first(&rest, 1);
    } else {
        ds4_message user = {"user", prompt->text.data, NULL};
        if (opt->system) note("--system is not used: the session already has its beginning");
        add_turns(app, &rest, tokens[held - 1], &user, 1);
    }
    return rest;
}

static void check_room(const App *app, size_t held, size_t more) {
    size_t ctx = (size_t)ds4_session_ctx(app->session);
    if (held + more <= ctx) return;
    if (held) fail("the prompt has %zu tokens behind the session's %zu, the context holds %zu (see --ctx)", more, held, ctx);
    fail("the prompt has %zu tokens, the context holds %zu (see --ctx)", more, ctx);
}

/* ---- 6 generation and its statistics -------------------------------------------------------------------------------- */

typedef struct {
    const char *finish;                /* "eos", "stop", "length", "cancelled" */
    size_t prompt;                     /* tokens of the prompt, the session's before it included */
    int tokens;                        /* generated */
    size_t think_bytes;                /* where the answer begins in the text's copy, behind its reasoning */
    bool thought;                      /* the end of the reasoning has come */
    double ms;
    ds4_work work;                     /* of the engine, for the generated tokens */
} Answer;

enum { TOP = 5 };
typedef struct {
    int id[TOP + 1];
    double logprob[TOP + 1];
    int count;
} Logprobs;      /* [0]: the token itself */

/* log-probabilities at temperature 1, in double: the same numbers however a step came by the logits. */
static Logprobs logprobs_of(const float *logits, int vocab, int token) {
    Logprobs r = {.count = min_int(TOP, vocab)};
    double sum = 0, most = -INFINITY;
    for (int i = 0; i < vocab; i++) most = fmax(most, (double)logits[i]);
    for (int i = 0; i < vocab; i++) sum += exp((double)logits[i] - most);
    double norm = most + log(sum);
    int found = 0;
    for (int i = 0; i < vocab; i++) {  /* insertion into the best so far; equal ones keep the order of their ids */
        int k = found;
        while (k > 0 && logits[i] > logits[r.id[k]]) k--;
        if (k == r.count) continue;
        if (found < r.count) found++;
        memmove(&r.id[k + 2], &r.id[k + 1], (size_t)(found - k - 1) * sizeof(int));
        r.id[k + 1] = i;
    }
    r.id[0] = token;
    for (int k = 0; k <= r.count; k++) r.logprob[k] = (double)logits[r.id[k]] - norm;
    return r;
}

static void write_logprobs(FILE *f, int position, const Logprobs *r) {
    fprintf(f, "{\"position\": %d, \"id\": %d, \"logprob\": %.9g, \"top\": [", position, r->id[0], r->logprob[0]);
    for (int k = 1; k <= r->count; k++) fprintf(f, "%s[%d, %.9g]", k > 1 ? ", " : "", r->id[k], r->logprob[k]);
    fputs("]}\n", f);
}

/* One token into the output. In the chat the mark between reasoning and answer is shown as a blank line. */
static void put_token(App *app, Out *out, int token, Answer *answer) {
    size_t n = 0;
    const char *piece = ds4_token_piece(app->engine, token, &n);
    answer->tokens++;
    if (app->opt.print_ids) printf("%d\n", token);
    if (ds4_token_is_eos(app->engine, token)) return;
    bool ends_thinking = token == app->think_end && app->opt.think != DS4_THINK_OFF && out->copy && !answer->thought;
    if (!ends_thinking) {
        if (piece) out_text(out, piece, n);
        return;
    }
    out_release(out, out->pending.len, true);
    answer->thought = true;
    answer->think_bytes = out->copy->len;
    const char *mark = out->terminal ? "\033[0m\n\n" : "\n\n";
    out_print(out, mark, strlen(mark));
}

/* One step: a token and the drafts accepted behind it. false when the answer is over, answer->finish says why. */
static bool generate_step(App *app, Out *out, int max, Answer *answer) {
    ds4_session *s = app->session;
    int ids[DS4_MAX_DRAFT + 1], position = ds4_session_position(s);
    int room = min_int(max - answer->tokens, ds4_session_ctx(s) - position);
    if (room <= 0) {
        answer->finish = "length";
        return false;
    }
    int token = ds4_session_next(s);
    if (token >= 0 && ds4_session_is_stop(s, token)) {
        answer->finish = "eos";
        return false;
    }
    const float *logits = token >= 0 && app->logprobs ? ds4_session_logits(s) : NULL;
    Logprobs of_token = logits ? logprobs_of(logits, app->info.vocab, token) : (Logprobs){0};
    int got = token >= 0 ? ds4_session_step(s, token, min_int(room, DS4_MAX_DRAFT + 1), ids) : -1;
    if (got < 0) {
        answer->finish = was_cancelled(app) ? "cancelled" : NULL;
        if (answer->finish) return false;
        out_end(out);
        fail("%s", ds4_last_error());
    }
    for (int i = 0; i < got; i++) {
        if (app->logprobs) {
            logits = i ? ds4_session_step_logits(s, i - 1) : NULL;
            if (i) of_token = logprobs_of(logits, app->info.vocab, ids[i]);
            write_logprobs(app->logprobs, position + i, &of_token);
        }
        put_token(app, out, ids[i], answer);
        if (!out->stopped) continue;
        /* the drafts behind the stop were committed with it: the session ends where plain decoding would have */
        if (i + 1 < got && ds4_session_keep(s, i + 1) != 0) fail("%s", ds4_last_error());
        answer->finish = "stop";
        return false;
    }
    flush_stdout();
    return true;
}

static const struct {
    const char *name;
    size_t at;
} work_counts[] = {{"passes", offsetof(ds4_work, passes)},
                   {"rows", offsetof(ds4_work, rows)},
                   {"head_passes", offsetof(ds4_work, head_passes)},
                   {"head_rows", offsetof(ds4_work, head_rows)},
                   {"repaired_rows", offsetof(ds4_work, repaired_rows)},
                   {"logit_rows", offsetof(ds4_work, logit_rows)},
                   {"weight_bytes", offsetof(ds4_work, weight_bytes)},
                   {"experts", offsetof(ds4_work, experts)},
                   {"kv_rows", offsetof(ds4_work, kv_rows)},
                   {"index_rows", offsetof(ds4_work, index_rows)}};
enum { WORK_COUNTS = sizeof work_counts / sizeof *work_counts };

static int64_t *work_count(ds4_work *w, int i) { return (int64_t *)(void *)((char *)w + work_counts[i].at); }

static ds4_work work_minus(ds4_work a, ds4_work b) {
    for (int i = 0; i < WORK_COUNTS; i++) *work_count(&a, i) -= *work_count(&b, i);
    return a;
}

/* Generates behind what the session holds, at most `max` tokens. */
static Answer generate(App *app, Out *out, int max) {
    Answer answer = {.finish = "length", .prompt = (size_t)ds4_session_position(app->session)};
    ds4_gen gen = app->opt.cfg.gen;
    gen.penalty_from = ds4_session_position(app->session); /* penalties are for what the answer repeats, not the prompt */
    if (ds4_session_set_gen(app->session, &gen)) fail("%s", ds4_last_error());
    ds4_work before = ds4_engine_work(app->engine);
    double start = now_ms();
    while (generate_step(app, out, max, &answer))
        if (interrupted) {             /* between two calls */
            was_cancelled(app);
            answer.finish = "cancelled";
            break;
        }
    answer.ms = now_ms() - start;
    answer.work = work_minus(ds4_engine_work(app->engine), before);
    out_end(out);
    return answer;
}

/* The most tokens of an answer, from -n. */
static int most_tokens(const App *app) {
    int n = app->opt.tokens;
    if (n == TOKENS_DEFAULT) n = app->info.base_model ? BASE_MODEL_TOKENS : -1;
    return n < 0 ? INT_MAX : n;
}

static double rate(double count, double ms) { return ms > 0 ? count / ms * 1e3 : 0; }

/* The most drafts of a step. */
static int depth_used(const App *app) {
    int draft = app->opt.cfg.mtp_draft;
    return draft == DS4_DRAFT_AUTO ? DS4_MAX_DRAFT : draft;
}

static double share(int64_t part, int64_t of) { return of ? (double)part / (double)of : 0; }

static void print_stats(const App *app, const Answer *answer, FILE *f) {
    ds4_stats s = ds4_session_stats(app->session);
    const ds4_work *w = &answer->work;
    fprintf(f, "prompt     %8lld tokens %10.1f ms %10.1f tokens/s\n", (long long)s.prompt_tokens, s.prompt_ms,
            rate((double)s.prompt_tokens, s.prompt_ms));
    fprintf(f, "generated  %8d tokens %10.1f ms %10.1f tokens/s, ended by %s\n", answer->tokens, answer->ms,
            rate(answer->tokens, answer->ms), answer->finish);
    if (answer->tokens)
        fprintf(f, "weights    %8.2f MB read a token, %lld experts; %lld passes of %.2f rows\n",
                (double)w->weight_bytes / 1e6 / answer->tokens, (long long)w->experts, (long long)w->passes,
                share(w->rows, w->passes));
    if (!depth_used(app)) return;
    fprintf(f, "steps      %8lld, %.2f tokens each", (long long)s.cycles, share(s.emitted, s.cycles));
    if (app->opt.cfg.gen.temperature == 0)     /* else the margin says nothing */
        fprintf(f, "; margin %g held back %lld matches", (double)app->info.mtp_margin, (long long)s.below_margin);
    fputc('\n', f);
    for (int i = 0; i < depth_used(app); i++)
        if (s.drafted[i] || app->opt.cfg.mtp_draft > 0)
            fprintf(f, "draft %-2d   %8lld drafted %9lld accepted %7.1f%%\n", i + 1, (long long)s.drafted[i],
                    (long long)s.accepted[i], 100 * share(s.accepted[i], s.drafted[i]));
    if (app->opt.cfg.draft_lookup)
        fprintf(f, "lookup     %8lld drafted %9lld accepted %7.1f%%\n", (long long)s.lookup_drafted,
                (long long)s.lookup_accepted, 100 * share(s.lookup_accepted, s.lookup_drafted));
    if (app->opt.cfg.mtp_draft == DS4_DRAFT_AUTO)
        fprintf(f, "auto       %8lld more drafts were not worth verifying\n", (long long)s.pruned);
    fprintf(f, "time       draft %.1f ms, verify %.1f ms, repair %.1f ms; %lld passes of the head\n", s.draft_ms, s.verify_ms,
            s.repair_ms, (long long)s.head_passes);
}

static void json_string(FILE *f, const char *text) {
    if (!text) {
        fputs("null", f);
        return;
    }
    fputc('"', f);
    for (size_t n = strlen(text), at = 0; at < n;) {
        uint32_t code;
        int len = utf8_next(text + at, n - at, &code);
        size_t used = len > 0 ? (size_t)len : len < 0 ? (size_t)-len : n - at;
        if (len <= 0) fputs("\\ufffd", f);
        else if (code < 0x20 || code == '"' || code == '\\') fprintf(f, "\\u%04x", code);
        else fwrite(text + at, 1, used, f);
        at += used;
    }
    fputc('"', f);
}

static void json_counts(FILE *f, const char *name, const int64_t *counts, int n) {
    fprintf(f, "  \"%s\": [", name);
    for (int i = 0; i < n; i++) fprintf(f, "%s%lld", i ? ", " : "", (long long)counts[i]);
    fputs("],\n", f);
}

static void json_work(FILE *f, const char *name, ds4_work w, const char *end) {
    fprintf(f, "  \"%s\": {", name);
    for (int i = 0; i < WORK_COUNTS; i++)
        fprintf(f, "%s\"%s\": %lld", i ? ", " : "", work_counts[i].name, (long long)*work_count(&w, i));
    fprintf(f, "}%s\n", end);
}

static void json_setup(const App *app, FILE *f) {
    const ds4_info *info = &app->info;
    const ds4_cfg *cfg = &app->opt.cfg;
    fprintf(f, "  \"version\": \"%s\",\n  \"model\": ", ds4_version());
    json_string(f, info->model_path);
    fputs(",\n  \"head\": ", f);
    json_string(f, info->mtp_path);
    fputs(",\n  \"isa\": ", f);
    json_string(f, info->isa);
    fprintf(f, ",\n  \"threads\": %d,\n  \"ctx\": %d,\n  \"kv_type\": \"%s\",\n  \"prefill_chunk\": %d,\n", info->threads,
            info->ctx, kv_type_names[info->kv_type], info->prefill_chunk);
    fprintf(f, "  \"max_rewind\": %d,\n  \"mtp_draft\": ", info->max_rewind);
    if (cfg->mtp_draft == DS4_DRAFT_AUTO) fputs("\"auto\"", f);
    else fprintf(f, "%d", cfg->mtp_draft);
    fprintf(f, ",\n  \"draft_lookup\": %d,\n  \"mtp_margin\": %g,\n  \"mtp_shortlist\": %d,\n", cfg->draft_lookup,
            (double)info->mtp_margin, cfg->mtp_shortlist);
    fprintf(f, "  \"temperature\": %g,\n  \"top_k\": %d,\n  \"top_p\": %g,\n  \"min_p\": %g,\n  \"seed\": %llu,\n",
            (double)cfg->gen.temperature, cfg->gen.top_k, (double)cfg->gen.top_p, (double)cfg->gen.min_p,
            (unsigned long long)cfg->gen.seed);
    fprintf(f, "  \"presence_penalty\": %g,\n  \"frequency_penalty\": %g,\n  \"mtp_sampling\": \"%s\",\n",
            (double)cfg->gen.presence_penalty, (double)cfg->gen.frequency_penalty, scheme_names[cfg->gen.scheme]);
    fprintf(f, "  \"load_ms\": %.3f,\n", app->load_ms);
}

static void write_stats(const App *app, const Answer *answer, FILE *f) {
    ds4_stats s = ds4_session_stats(app->session);
    fputs("{\n", f);
    json_setup(app, f);
    fprintf(f, "  \"finish_reason\": \"%s\",\n", answer->finish);
    fprintf(f, "  \"prompt_tokens\": %zu,\n  \"prompt_evaluated\": %lld,\n  \"generated_tokens\": %d,\n", answer->prompt,
            (long long)s.prompt_tokens, answer->tokens);
    fprintf(f,
            "  \"prompt_ms\": %.3f,\n  \"prompt_tokens_per_s\": %.3f,\n  \"generation_ms\": %.3f,\n"
            "  \"generation_tokens_per_s\": %.3f,\n",
            s.prompt_ms, rate((double)s.prompt_tokens, s.prompt_ms), answer->ms, rate(answer->tokens, answer->ms));
    fprintf(f, "  \"emitted\": %lld,\n  \"cycles\": %lld,\n  \"passes\": %lld,\n  \"head_passes\": %lld,\n",
            (long long)s.emitted, (long long)s.cycles, (long long)s.passes, (long long)s.head_passes);
    json_counts(f, "drafted", s.drafted, depth_used(app));
    json_counts(f, "accepted", s.accepted, depth_used(app));
    fprintf(f, "  \"lookup_drafted\": %lld,\n  \"lookup_accepted\": %lld,\n  \"pruned\": %lld,\n", (long long)s.lookup_drafted,
            (long long)s.lookup_accepted, (long long)s.pruned);
    fprintf(f, "  \"below_margin\": %lld,\n  \"corrections\": %lld,\n  \"bonus\": %lld,\n", (long long)s.below_margin,
            (long long)s.corrections, (long long)s.bonus);
    fprintf(f, "  \"draft_ms\": %.3f,\n  \"verify_ms\": %.3f,\n  \"repair_ms\": %.3f,\n", s.draft_ms, s.verify_ms, s.repair_ms);
    json_work(f, "prompt_work", work_minus(ds4_engine_work(app->engine), answer->work), ",");
    json_work(f, "generation_work", answer->work, "");
    fputs("}\n", f);
}

/* ---- 7 dumps and inspection ----------------------------------------------------------------------------------------- */

/* A NumPy file of float32 [rows, columns], little-endian, with its rows still to be written. */
static FILE *create_npy(const char *path, size_t rows, size_t columns) {
    char header[128];
    memcpy(header, "\x93NUMPY\x01\x00\x76\x00", 10);           /* 118 bytes follow, so that the data is aligned to 64 */
    int n = snprintf(header + 10, 118, "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %zu), }", rows, columns);
    memset(header + 10 + n, ' ', (size_t)(117 - n));
    header[127] = '\n';
    FILE *f = open_output(path);
    fwrite(header, 1, sizeof header, f);
    return f;
}

typedef struct {
    FILE *target, *head;
    size_t vocab;
    const Options *opt;
} LogitFiles;

static void write_rows(FILE *f, const char *path, const float *rows, size_t n) {
    if (f && n && fwrite(rows, sizeof(float), n, f) != n) fail("%s: %s", path, strerror(errno));
}

static void dump_rows(void *ctx, const float *target, int first, int rows, const float *head, int head_first, int head_rows) {
    LogitFiles *files = ctx;
    (void)first;
    (void)head_first;
    write_rows(files->target, files->opt->logits, target, (size_t)rows * files->vocab);
    write_rows(files->head, files->opt->head_logits, head, (size_t)head_rows * files->vocab);
}

/* Evaluates the prompt and writes its logits to the files that were asked for, as they come. */
static void eval_to_files(App *app, const Ids *ids) {
    const Options *opt = &app->opt;
    LogitFiles files = {.vocab = (size_t)app->info.vocab, .opt = opt};
    if (opt->logits) files.target = create_npy(opt->logits, ids->len, files.vocab);
    if (opt->head_logits) files.head = create_npy(opt->head_logits, ids->len - 1, files.vocab);
    eval_rows(app, ids, files.target != NULL, files.head != NULL, dump_rows, &files);
    if (files.target) close_output(files.target, opt->logits);
    if (files.head) close_output(files.head, opt->head_logits);
}

/* A token's bytes in quotes, as C writes them; what is valid UTF-8 and no control character stays. */
static void print_quoted(const char *text, size_t n) {
    putchar('"');
    for (size_t at = 0; at < n;) {
        uint32_t code;
        int len = utf8_next(text + at, n - at, &code);
        if (len <= 0 || code < 0x20 || (code >= 0x7f && code < 0xa0)) {
            if (code == '\n' && len > 0) fputs("\\n", stdout);
            else printf("\\x%02x", (unsigned char)text[at]);
            at++;
            continue;
        }
        if (code == '"' || code == '\\') putchar('\\');
        fwrite(text + at, 1, (size_t)len, stdout);
        at += (size_t)len;
    }
    putchar('"');
}

static void dump_tokens(App *app, const Ids *ids) {
    for (size_t i = 0; i < ids->len; i++) {
        size_t n = 0;
        const char *piece = ds4_token_piece(app->engine, ids->data[i], &n);
        printf("%d\t", ids->data[i]);
        print_quoted(piece ? piece : "", n);
        putchar('\n');
    }
}

typedef struct {
    int vocab, next, end;              /* the window's scored tokens: next..end-1 */
    const int *tokens;
    double nats;
    int64_t scored, drafts, right;     /* the head's guesses, and how many were the target's choice */
} Perplexity;

static int argmax(const float *logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static void score_rows(void *ctx, const float *target, int first, int rows, const float *head, int head_first, int head_rows) {
    Perplexity *p = ctx;
    size_t vocab = (size_t)p->vocab;
    for (int i = 0; i < rows; i++) {   /* row first + i is a law for the token behind it */
        int at = first + i + 1;
        if (at < p->next || at >= p->end) continue;
        p->nats -= logprobs_of(target + (size_t)i * vocab, p->vocab, p->tokens[at]).logprob[0];
        p->scored++;
    }
    for (int i = 0; i < head_rows; i++) {      /* row q guesses what row q + 1 chooses, the token at q + 2 */
        int q = head_first + i, at = q + 2;
        if (at < p->next || at >= p->end) continue;
        int choice = argmax(target + (size_t)(q + 1 - first) * vocab, p->vocab);
        p->drafts++;
        p->right += argmax(head + (size_t)i * vocab, p->vocab) == choice;
    }
}

/* Windows of the whole context, BOS first if there is one. The first is scored whole, each later one moves by half a window
 * and is scored where it is new, so that every token but the first has at least half a window before it. */
static int run_perplexity(App *app) {
    const char *path = app->opt.perplexity;
    Bytes text = {0};
    Ids ids = {0};
    if (read_file(path, &text) != 0) fail("%s: %s", path, strerror(errno));
    add_text(app, &ids, &text, false);
    open_session(app);
    catch_interrupts(app, false);
    int bos = app->info.bos >= 0, ctx = ds4_session_ctx(app->session), window = ctx - bos, stride = window / 2;
    if (window < 2) fail("the context is too small for a perplexity (see --ctx)");
    if (ids.len + (size_t)bos < 2) fail("%s: too short for a perplexity", path);
    Perplexity p = {.vocab = app->info.vocab};
    for (size_t start = 0, done = bos ? 0 : 1; done < ids.len; start += (size_t)stride) {
        size_t n = ids.len - start < (size_t)window ? ids.len - start : (size_t)window;
        Ids w = {0};
        add_bos(app, &w);
        ids_add(&w, ids.data + start, n);
        p.tokens = w.data;
        p.next = (int)(done - start) + bos;
        p.end = (int)n + bos;
        if (ds4_session_rewind(app->session, 0) != 0) fail("%s", ds4_last_error());
        eval_rows(app, &w, true, app->info.has_head, score_rows, &p);
        done = start + n;
        free(w.data);
    }
    bar_erase();
    double nats = p.nats / (double)p.scored;
    printf("tokens      %lld scored\nnats/token  %.6f\nperplexity  %.6f\nwindows     %d tokens, moved by %d\n",
           (long long)p.scored, nats, exp(nats), ctx, stride);
    if (app->info.has_head && p.drafts)
        printf("first draft %.2f%% of %lld are the target's choice\n", 100 * (double)p.right / (double)p.drafts,
               (long long)p.drafts);
    free(ids.data);
    free(text.data);
    return 0;
}

static const char *as_bytes(int64_t bytes, char *text, size_t n) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes / 1024;
    int u = 0;
    for (; v >= 1024 && u < 3; u++) v /= 1024;
    snprintf(text, n, "%lld bytes (%.1f %s)", (long long)bytes, v, units[u]);
    return text;
}

static void print_bytes(const char *label, int64_t bytes) {
    char text[64];
    printf("  %-22s%s\n", label, as_bytes(bytes, text, sizeof text));
}

/* Types of the target's or the head's tensors, with how many there are and their bytes, in order of first use. */
static void print_types(const App *app, bool head) {
    struct {
        const char *type;
        int64_t count, bytes;
    } types[64];
    int n = 0;
    ds4_tensor_info t;
    for (int64_t i = 0; ds4_engine_tensor(app->engine, i, &t) == 0; i++) {
        if (t.head != head) continue;
        int k = 0;
        while (k < n && strcmp(types[k].type, t.type)) k++;
        if (k == 64) continue;
        if (k == n) {
            types[n].type = t.type;
            types[n].count = types[n].bytes = 0;
            n++;
        }
        types[k].count++;
        types[k].bytes += t.bytes;
    }
    for (int k = 0; k < n; k++) {
        char text[64];
        printf("  %-10s%6lld tensor%s %s\n", types[k].type, (long long)types[k].count, types[k].count == 1 ? ", " : "s,",
               as_bytes(types[k].bytes, text, sizeof text));
    }
}

static void print_tensors(const App *app) {
    ds4_tensor_info t;
    printf("tensors\n");
    for (int64_t i = 0; ds4_engine_tensor(app->engine, i, &t) == 0; i++) {
        char dims[96];
        size_t used = 0;
        for (int d = 0; d < t.n_dims; d++)
            used += (size_t)snprintf(dims + used, sizeof dims - used, "%s%lld", d ? " x " : "", (long long)t.dims[d]);
        printf("  %-6s  %-44s %-8s %-24s %12lld\n", t.head ? "head" : "target", t.name, t.type, dims, (long long)t.bytes);
    }
}

static int run_inspect(const App *app) {
    const ds4_info *i = &app->info;
    printf("model     %s\nname      %s\n", i->model_path, *i->name ? i->name : "(none)");
    printf("template  %s\n", i->base_model ? "none: a base model" : i->template_is_v4 ? "DeepSeek-V4" : "not DeepSeek-V4's");
    printf("sizes\n");
    printf("  layers %d (%d hash-routed), width %d, streams %d\n", i->layers, i->hash_layers, i->embd, i->streams);
    printf("  heads %d of %d (%d rotary), window %d\n", i->heads, i->head_dim, i->rope_dim, i->window);
    printf("  experts %d of width %d, %d used\n", i->experts, i->expert_ff, i->experts_used);
    printf("  vocabulary %d, BOS %d, EOS %d, context %d\n", i->vocab, i->bos, i->eos, i->context_length);
    printf("types\n");
    print_types(app, false);
    if (i->has_head) {
        printf("head      %s\n", i->mtp_path);
        print_types(app, true);
    } else {
        printf("head      %s\n", i->file_has_head ? "none in use; this file holds one (--glm-mtp)" : "none");
    }
    printf("memory\n");
    print_bytes("model file, mapped", i->file_bytes);
    print_bytes("  its weights", i->weight_bytes);
    if (i->has_head) {
        print_bytes("head file, mapped", i->head_file_bytes);
        print_bytes("  its weights", i->head_weight_bytes);
    }
    print_bytes("scratch of a pass", i->scratch_bytes);
    print_bytes("tables", i->table_bytes);
    char label[48];
    snprintf(label, sizeof label, "session of %d", i->ctx);
    print_bytes(label, i->session_bytes);
    print_bytes("in all, beside files", i->scratch_bytes + i->table_bytes + i->session_bytes);
    print_bytes("for batches, at most", i->batch_bytes);
    printf("runs with %s kernels, %d threads, kv %s, passes of %d\n", i->isa, i->threads, kv_type_names[i->kv_type],
           i->prefill_chunk);
    if (app->opt.inspect_tensors) print_tensors(app);
    return 0;
}

/* ---- 8 bench -------------------------------------------------------------------------------------------------------- */

/* Speeds at some lengths of context (frontiers): the prompt up to there, plain generation from there, passes by their number of
 * rows as verification runs them, a step of the head; and what follows from these, how many drafts have to be right for
 * speculation to pay. Then the real thing behind the prompt: depths and margins. Everything is measured --bench-runs times, in turns,
 * so that a busy moment of the machine does not meet one side alone; the medians are shown. */

enum { BENCH_ROWS = 10, BENCH_RUNS = 99, BENCH_DEPTHS = 5, BENCH_SWEEP = 16, BENCH_HEAD_DEPTH = 4 };
static const int bench_rows[BENCH_ROWS] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17};
static const int bench_depths[BENCH_DEPTHS] = {1, 2, 3, 4, 8};

/* What is read when no prompt is given, over and over up to the frontier. */
static const char bench_text[] =
    "The lighthouse keeper wrote down the weather every evening, as the keeper before him had done. Wind from the west, "
    "moderate; two ships passed; the lamp was lit at six. In the winter the days were short and the entries long, for there "
    "was little else to do. He wrote about the birds that came to rest on the railing, about the sound of the sea in the "
    "rocks below, and about a letter that he meant to answer. In spring the boat came with flour, oil and newspapers, and for "
    "some days he wrote nothing at all. Then the lamp was lit at seven, and at eight, and the ships passed again.\n";

typedef struct {
    double of[BENCH_RUNS];
    int n;
} Samples;

static void sample(Samples *s, double value) {
    if (s->n < BENCH_RUNS) s->of[s->n++] = value;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const Samples *s) {
    Samples copy = *s;
    if (!copy.n) return 0;
    qsort(copy.of, (size_t)copy.n, sizeof *copy.of, by_value);
    return (copy.of[(copy.n - 1) / 2] + copy.of[copy.n / 2]) / 2;
}

typedef struct {
    int context, prompt;               /* tokens held; of them new since the frontier before */
    Samples prompt_ms, token_ms, pass_ms[BENCH_ROWS], step_ms, repair_ms;
} Frontier;

typedef struct {
    int draft;                         /* 0: plain */
    float margin;
    int64_t tokens, passes, drafted, accepted, first_drafted, first_accepted;
    Samples ms;
} Speculation;

typedef struct {
    App *app;
    int tokens, runs;                  /* generated for each measurement; how often each is made */
    Ids ids;                           /* enough for the last frontier and what is verified there */
    int prompt;                        /* of them the prompt itself */
    int n_frontiers, n_sweep;
    Frontier frontiers[BENCH_FRONTIERS];
    Speculation sweep[BENCH_SWEEP];
    int64_t done, total;
} Bench;

static void bench_check(int bad) {
    if (!bad) return;
    if (interrupted) exit(130);
    fail("%s", ds4_last_error());
}

static void bench_progress(Bench *b) {
    b->done++;
    if (b->app->opt.cfg.progress) on_progress(NULL, "bench", b->done, b->total);
}

/* Brings the session to the first n of the ids, from whatever shorter or longer beginning of them it holds. */
static void bench_go(const Bench *b, int n) {
    ds4_session *s = b->app->session;
    if (ds4_session_position(s) > n) bench_check(ds4_session_rewind(s, n < ds4_session_rewind_floor(s) ? 0 : n));
    int held = ds4_session_position(s);
    if (held < n) bench_check(ds4_session_eval(s, b->ids.data + held, (size_t)(n - held)));
}

/* Generates `tokens`; returns the milliseconds. */
static double bench_generate(ds4_session *s, int tokens, int draft, float margin) {
    int out[DS4_MAX_DRAFT + 1];
    bench_check(ds4_session_set_mtp(s, draft, margin));
    ds4_session_reset_stats(s);
    double began = now_ms();
    for (int made = 0; made < tokens;) {
        int token = ds4_session_next(s), got = token < 0 ? -1 : ds4_session_step(s, token, tokens - made, out);
        bench_check(got < 0);
        made += got;
    }
    return now_ms() - began;
}

/* A pass of so many rows with the logits of each, as verification needs them: short ones several times, the median of these. */
static double bench_pass(const Bench *b, int rows, float *logits) {
    ds4_session *s = b->app->session;
    int start = ds4_session_position(s);
    Samples all = {0};
    for (double sum = 0; all.n < 3 || (sum < 20 && all.n < 9);) {
        double began = now_ms();
        bench_check(ds4_session_eval_logits(s, b->ids.data + start, (size_t)rows, logits));
        sample(&all, now_ms() - began);
        sum += all.of[all.n - 1];
        bench_check(ds4_session_rewind(s, start));
        if (sum > 2000) break;
    }
    return median(&all);
}

static void bench_frontier(Bench *b, Frontier *f, float *logits) {
    ds4_session *s = b->app->session;
    double began = now_ms();
    bench_go(b, f->context);
    if (f->prompt > 1) sample(&f->prompt_ms, now_ms() - began);
    sample(&f->token_ms, bench_generate(s, b->tokens, 0, 0) / b->tokens);
    bench_check(ds4_session_rewind(s, f->context));
    bench_progress(b);
    for (int i = 0; i < BENCH_ROWS; i++) {
        sample(&f->pass_ms[i], bench_pass(b, bench_rows[i], logits));
        bench_progress(b);
    }
    if (!b->app->info.has_head) return;
    bench_check(ds4_session_set_lookup(s, 0));
    bench_generate(s, min_int(b->tokens, 16), BENCH_HEAD_DEPTH, 1000);
    bench_check(ds4_session_rewind(s, f->context));
    bench_check(ds4_session_set_lookup(s, b->app->opt.cfg.draft_lookup));
    ds4_stats stats = ds4_session_stats(s);
    int64_t steps = 0;
    for (int i = 0; i < BENCH_HEAD_DEPTH; i++) steps += stats.drafted[i];
    if (steps) sample(&f->step_ms, stats.draft_ms / (double)steps);
    sample(&f->repair_ms, stats.repair_ms / (double)stats.cycles);
}

/* In a copy of the session, so that what `auto` and lookups learn from one text is not there in the next. */
static void bench_speculation(Bench *b, Speculation *c) {
    bench_go(b, b->prompt);
    ds4_session *fresh = ds4_session_fork(b->app->session);
    bench_check(!fresh);
    interrupt_target = fresh;
    sample(&c->ms, bench_generate(fresh, b->tokens, c->draft, c->margin));
    ds4_stats stats = ds4_session_stats(fresh);
    interrupt_target = b->app->session;
    ds4_session_free(fresh);
    c->tokens = stats.emitted;
    c->passes = stats.passes;
    c->first_drafted = stats.drafted[0];
    c->first_accepted = stats.accepted[0];
    c->drafted = c->accepted = 0;
    for (int i = 0; i < DS4_MAX_DRAFT; i++) {
        c->drafted += stats.drafted[i];
        c->accepted += stats.accepted[i];
    }
    bench_progress(b);
}

static void bench_add(Bench *b, int draft, float margin) {
    for (int i = 0; i < b->n_sweep; i++)
        if (b->sweep[i].draft == draft && b->sweep[i].margin == margin) return;
    if (b->n_sweep < BENCH_SWEEP) b->sweep[b->n_sweep++] = (Speculation){.draft = draft, .margin = margin};
}

static void bench_plan(Bench *b, const Ids *prompt) {
    const App *app = b->app;
    const Options *opt = &app->opt;
    int list[BENCH_FRONTIERS], n = parse_frontiers(opt->bench_ctx ? opt->bench_ctx : "0,512,2048", list);
    int ctx = app->info.ctx, behind = b->tokens > bench_rows[BENCH_ROWS - 1] ? b->tokens : bench_rows[BENCH_ROWS - 1];
    if (!prompt->len) fail("the prompt is empty");
    b->prompt = (int)prompt->len;
    for (int i = 0; i < n; i++) {
        int held = list[i] ? list[i] : 1;
        if (held > ctx - behind && (opt->bench_ctx || i == 0))
            fail("--bench-ctx %d: %d tokens are generated from there, the context holds %d (see --ctx)", held, behind, ctx);
        if (held > ctx - behind) continue;
        b->frontiers[i] = (Frontier){.context = held, .prompt = held - (i ? b->frontiers[i - 1].context : 0)};
        b->n_frontiers = i + 1;
    }
    int most = b->frontiers[b->n_frontiers - 1].context + bench_rows[BENCH_ROWS - 1];
    while (b->ids.len < (size_t)most || b->ids.len < prompt->len) ids_add(&b->ids, prompt->data, prompt->len);
    b->total = (int64_t)b->runs * b->n_frontiers * (1 + BENCH_ROWS);
    if (!app->info.has_head && !app->opt.cfg.draft_lookup) return;
    if (b->prompt > ctx - b->tokens)
        fail("the prompt has %d tokens, %d are generated behind it, the context holds %d (see --ctx)", b->prompt, b->tokens,
             ctx);
    bench_add(b, 0, 0);
    bool given = app->opt.cfg.mtp_margin != (float)DS4_MARGIN_AUTO;
    for (int m = app->opt.cfg.gen.temperature > 0; m < 2; m++) {     /* drawn text knows no margin: once is enough */
        float margin = m ? 0 : given ? app->opt.cfg.mtp_margin : 3;
        for (int i = 0; i < BENCH_DEPTHS; i++) bench_add(b, bench_depths[i], margin);
        if (given || margin == 0) bench_add(b, DS4_DRAFT_AUTO, margin);
        if (opt->draft > 0) bench_add(b, opt->draft, margin);
    }
    b->total += (int64_t)b->runs * b->n_sweep;
}

/* The share of drafts that have to be accepted, each with the same probability, for `depth` of them to pay; above 1: never. */
static double break_even(const Frontier *f, int depth) {
    double plain = median(&f->pass_ms[0]), pass = 0, low = 0, high = 1;
    for (int i = 0; i < BENCH_ROWS; i++)
        if (bench_rows[i] == depth + 1) pass = median(&f->pass_ms[i]);
    double worth = (pass + depth * median(&f->step_ms) + median(&f->repair_ms)) / plain;     /* tokens that it has to bring */
    if (worth > depth + 1) return 2;
    for (int i = 0; i < 50; i++) {
        double a = (low + high) / 2, sum = 1, power = 1;
        for (int k = 0; k < depth; k++) sum += power *= a;
        if (sum < worth) low = a;
        else high = a;
    }
    return high;
}

static void print_frontiers(const Bench *b) {
    printf("context    prompt tokens/s   generated tokens/s   ms a token\n");
    for (int i = 0; i < b->n_frontiers; i++) {
        const Frontier *f = &b->frontiers[i];
        printf("%7d", f->context);
        if (f->prompt_ms.n) printf("%19.1f", rate(f->prompt, median(&f->prompt_ms)));
        else printf("%19s", "-");
        printf("%21.1f%13.3f\n", rate(1, median(&f->token_ms)), median(&f->token_ms));
    }
    printf("\nrows of a pass    ms (as much as passes of one row), by context\n%4s", "");
    for (int i = 0; i < b->n_frontiers; i++) printf("%22d", b->frontiers[i].context);
    for (int r = 0; r < BENCH_ROWS; r++) {
        printf("\n%4d", bench_rows[r]);
        for (int i = 0; i < b->n_frontiers; i++) {
            double ms = median(&b->frontiers[i].pass_ms[r]);
            printf("%14.3f (%5.2f)", ms, ms / median(&b->frontiers[i].pass_ms[0]));
        }
    }
    printf("\n");
}

static void print_break_even(const Bench *b) {
    printf("\nhead step ");
    for (int i = 0; i < b->n_frontiers; i++) printf("%16.3f ms   ", median(&b->frontiers[i].step_ms));
    printf("\na cycle's repair");
    for (int i = 0; i < b->n_frontiers; i++) printf("%*.3f ms   ", i ? 16 : 10, median(&b->frontiers[i].repair_ms));
    printf("\n\ndrafts    share that must be accepted for them to pay, by context\n");
    for (int d = 0; d < BENCH_DEPTHS; d++) {
        printf("%4d", bench_depths[d]);
        for (int i = 0; i < b->n_frontiers; i++) {
            double share = break_even(&b->frontiers[i], bench_depths[d]);
            if (share > 1) printf("%22s", "never");
            else printf("%21.1f%%", 100 * share);
        }
        printf("\n");
    }
}

static const char *draft_name(int draft, char *room, size_t n) {
    snprintf(room, n, draft == DS4_DRAFT_AUTO ? "auto" : draft ? "%d" : "plain", draft);
    return room;
}

static void print_sweep(const Bench *b) {
    double plain = median(&b->sweep[0].ms);
    char name[16];
    printf("\n%d tokens behind the prompt's %d\n", b->tokens, b->prompt);
    printf("drafts   margin     tokens/s     ratio   tokens a pass   first accepted   all accepted\n");
    for (int i = 0; i < b->n_sweep; i++) {
        const Speculation *c = &b->sweep[i];
        double ms = median(&c->ms);
        printf("%6s", draft_name(c->draft, name, sizeof name));
        if (c->draft) printf("%9g", (double)c->margin);
        else printf("%9s", "");
        printf("%13.1f%10.3f%16.2f", rate(b->tokens, ms), plain / ms, share(c->tokens, c->passes));
        if (c->draft)
            printf("%16.1f%%%14.1f%%", 100 * share(c->first_accepted, c->first_drafted), 100 * share(c->accepted, c->drafted));
        printf("\n");
    }
}

/* One value a line: what was measured, where, the value and its unit. */
static void write_csv(const Bench *b, FILE *out) {
    char name[16];
    fputs("measure,context,rows,draft,margin,value,unit\n", out);
    for (int i = 0; i < b->n_frontiers; i++) {
        const Frontier *f = &b->frontiers[i];
        if (f->prompt_ms.n) fprintf(out, "prompt,%d,,,,%.3f,tokens/s\n", f->context, rate(f->prompt, median(&f->prompt_ms)));
        fprintf(out, "generation,%d,,,,%.3f,tokens/s\n", f->context, rate(1, median(&f->token_ms)));
        for (int r = 0; r < BENCH_ROWS; r++)
            fprintf(out, "pass,%d,%d,,,%.5f,ms\n", f->context, bench_rows[r], median(&f->pass_ms[r]));
        if (!f->step_ms.n) continue;
        fprintf(out, "head step,%d,,,,%.5f,ms\n", f->context, median(&f->step_ms));
        fprintf(out, "repair,%d,,,,%.5f,ms\n", f->context, median(&f->repair_ms));
        for (int d = 0; d < BENCH_DEPTHS; d++)
            if (break_even(f, bench_depths[d]) <= 1)
                fprintf(out, "break-even,%d,,%d,,%.5f,share\n", f->context, bench_depths[d], break_even(f, bench_depths[d]));
    }
    for (int i = 0; i < b->n_sweep; i++) {
        const Speculation *c = &b->sweep[i];
        char at[64];
        snprintf(at, sizeof at, "%d,,%s,%g", b->prompt, draft_name(c->draft, name, sizeof name), (double)c->margin);
        fprintf(out, "speed,%s,%.3f,tokens/s\n", at, rate(b->tokens, median(&c->ms)));
        fprintf(out, "ratio,%s,%.5f,of plain\n", at, median(&b->sweep[0].ms) / median(&c->ms));
        fprintf(out, "tokens a pass,%s,%.5f,tokens\n", at, share(c->tokens, c->passes));
        fprintf(out, "first accepted,%s,%.5f,share\n", at, share(c->first_accepted, c->first_drafted));
        fprintf(out, "accepted,%s,%.5f,share\n", at, share(c->accepted, c->drafted));
    }
}

static void json_frontier(const Frontier *f, FILE *out) {
    fprintf(out, "    {\"context\": %d, \"prompt_tokens\": %d, \"prompt_tokens_per_s\": ", f->context, f->prompt);
    if (f->prompt_ms.n) fprintf(out, "%.3f", rate(f->prompt, median(&f->prompt_ms)));
    else fputs("null", out);
    fprintf(out, ", \"generation_tokens_per_s\": %.3f,\n     \"pass_ms\": {", rate(1, median(&f->token_ms)));
    for (int r = 0; r < BENCH_ROWS; r++) fprintf(out, "%s\"%d\": %.5f", r ? ", " : "", bench_rows[r], median(&f->pass_ms[r]));
    fputs("}", out);
    if (f->step_ms.n) {
        fprintf(out, ",\n     \"head_step_ms\": %.5f, \"repair_ms\": %.5f, \"break_even\": {", median(&f->step_ms),
                median(&f->repair_ms));
        for (int d = 0; d < BENCH_DEPTHS; d++) {
            double a = break_even(f, bench_depths[d]);
            fprintf(out, "%s\"%d\": ", d ? ", " : "", bench_depths[d]);
            if (a > 1) fputs("null", out);
            else fprintf(out, "%.5f", a);
        }
        fputs("}", out);
    }
    fputs("}", out);
}

static void write_bench(const Bench *b, FILE *out) {
    char name[16];
    fputs("{\n", out);
    json_setup(b->app, out);
    fprintf(out, "  \"tokens\": %d,\n  \"runs\": %d,\n  \"prompt_tokens\": %d,\n  \"frontiers\": [\n", b->tokens, b->runs,
            b->prompt);
    for (int i = 0; i < b->n_frontiers; i++) {
        json_frontier(&b->frontiers[i], out);
        fputs(i + 1 < b->n_frontiers ? ",\n" : "\n", out);
    }
    fputs("  ],\n  \"sweep\": [\n", out);
    for (int i = 0; i < b->n_sweep; i++) {
        const Speculation *c = &b->sweep[i];
        double ms = median(&c->ms);
        fputs("    {\"draft\": ", out);
        json_string(out, draft_name(c->draft, name, sizeof name));
        fprintf(out, ", \"margin\": %g, \"tokens_per_s\": %.3f, \"ratio\": %.5f, \"tokens\": %lld, \"passes\": %lld, ",
                (double)c->margin, rate(b->tokens, ms), median(&b->sweep[0].ms) / ms, (long long)c->tokens,
                (long long)c->passes);
        fprintf(out, "\"drafted\": %lld, \"accepted\": %lld, \"first_drafted\": %lld, \"first_accepted\": %lld}%s\n",
                (long long)c->drafted, (long long)c->accepted, (long long)c->first_drafted, (long long)c->first_accepted,
                i + 1 < b->n_sweep ? "," : "");
    }
    fputs("  ]\n}\n", out);
}

static void bench_run(Bench *b) {
    float *logits = malloc((size_t)bench_rows[BENCH_ROWS - 1] * (size_t)b->app->info.vocab * sizeof *logits);
    if (!logits) fail("out of memory");
    for (int run = 0; run < b->runs; run++) {
        bench_go(b, 0);
        for (int i = 0; i < b->n_frontiers; i++) bench_frontier(b, &b->frontiers[i], logits);
        for (int i = 0; i < b->n_sweep; i++) bench_speculation(b, &b->sweep[i]);
    }
    free(logits);
    bar_erase();
}

static void bench_write(const Bench *b, const char *path, void (*write)(const Bench *, FILE *)) {
    if (!path) return;
    FILE *f = open_output(path);
    write(b, f);
    close_output(f, path);
}

static int run_bench(App *app, const Prompt *prompt) {
    const Options *opt = &app->opt;
    Bench *b = calloc(1, sizeof *b);
    if (!b) fail("out of memory");
    *b = (Bench){.app = app, .tokens = opt->tokens, .runs = opt->bench_runs};
    Ids ids = {0};
    if (has_prompt(opt)) ids = fresh_prompt(app, prompt);
    else {
        add_bos(app, &ids);
        add_text(app, &ids, &(Bytes){.data = (char *)(uintptr_t)bench_text, .len = sizeof bench_text - 1}, false);
    }
    bench_plan(b, &ids);
    open_session(app);
    bench_check(ds4_session_set_stops(app->session, NULL, 0, true));
    catch_interrupts(app, false);
    bench_run(b);
    printf("%s, %s kernels, %d threads, kv %s; medians of %d\n\n", *app->info.name ? app->info.name : app->info.model_path,
           app->info.isa, app->info.threads, kv_type_names[app->info.kv_type], b->runs);
    print_frontiers(b);
    if (app->info.has_head) print_break_even(b);
    if (b->n_sweep) print_sweep(b);
    flush_stdout();
    bench_write(b, opt->csv, write_csv);
    bench_write(b, opt->json, write_bench);
    free(ids.data);
    free(b->ids.data);
    free(b);
    return 0;
}

/* ---- 9 line editor -------------------------------------------------------------------------------------------------- */

typedef struct {
    bool plain;                        /* a terminal that cannot move its cursor: lines as the system reads them */
    struct termios cooked;             /* the terminal's own settings */
    const char *prompt;                /* ASCII; further rows are indented by its width */
    Bytes line;
    size_t at;                         /* the cursor's place in line */
    int cursor_row;                    /* of the rows on the screen, the one the cursor stands in */
    Strings history;
    size_t recalled;                   /* the history entry shown; history.len: the line being written */
    Bytes written;                     /* that line, while an entry is shown */
    unsigned char input[512];          /* read and not yet used: typed ahead */
    size_t input_at, input_len;
} Editor;

/* Keys that are no byte. */
enum { KEY_UP = 256, KEY_DOWN, KEY_LEFT, KEY_RIGHT, KEY_HOME, KEY_END, KEY_DELETE, KEY_PASTE, KEY_NEWLINE, KEY_NONE, KEY_GONE };

static const struct {
    uint32_t from, to;
} zero_width[] =
    {
        {0x300, 0x36f},     {0x483, 0x489},     {0x591, 0x5bd},   {0x610, 0x61a},   {0x64b, 0x65f},   {0x6d6, 0x6dc},
        {0x6df, 0x6e4},     {0x93c, 0x93c},     {0x941, 0x948},   {0x94d, 0x94d},   {0xe31, 0xe31},   {0xe34, 0xe3a},
        {0xe47, 0xe4e},     {0x1ab0, 0x1aff},   {0x1dc0, 0x1dff}, {0x200b, 0x200f}, {0x202a, 0x202e}, {0x2060, 0x2064},
        {0x20d0, 0x20ff},   {0x302a, 0x302d},   {0x3099, 0x309a}, {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}, {0xfeff, 0xfeff},
        {0x1f3fb, 0x1f3ff}, {0xe0001, 0xe01ef},
    },
  double_width[] = {
      {0x1100, 0x115f},   {0x231a, 0x231b},   {0x23e9, 0x23ec},   {0x25fd, 0x25fe},   {0x2614, 0x2615},   {0x2648, 0x2653},
      {0x26aa, 0x26ab},   {0x26bd, 0x26be},   {0x26c4, 0x26c5},   {0x2705, 0x2705},   {0x270a, 0x270b},   {0x2728, 0x2728},
      {0x274c, 0x274c},   {0x2753, 0x2755},   {0x2757, 0x2757},   {0x2795, 0x2797},   {0x2b50, 0x2b50},   {0x2b55, 0x2b55},
      {0x2e80, 0x303e},   {0x3041, 0x33ff},   {0x3400, 0x4dbf},   {0x4e00, 0xa4cf},   {0xa960, 0xa97f},   {0xac00, 0xd7a3},
      {0xf900, 0xfaff},   {0xfe30, 0xfe6f},   {0xff00, 0xff60},   {0xffe0, 0xffe6},   {0x1f1e6, 0x1f1ff}, {0x1f300, 0x1f64f},
      {0x1f680, 0x1f6ff}, {0x1f7e0, 0x1f7eb}, {0x1f900, 0x1f9ff}, {0x1fa70, 0x1faff}, {0x20000, 0x3fffd},
  };

static int char_width(uint32_t code) {
    for (size_t i = 0; code >= 0x300 && i < sizeof zero_width / sizeof *zero_width; i++)
        if (code >= zero_width[i].from && code <= zero_width[i].to) return 0;
    for (size_t i = 0; code >= 0x1100 && i < sizeof double_width / sizeof *double_width; i++)
        if (code >= double_width[i].from && code <= double_width[i].to) return 2;
    return 1;
}

/* The character at `at` of the line: its bytes, and its columns in *width. */
static size_t char_at(const Bytes *line, size_t at, int *width) {
    uint32_t code;
    int len = utf8_next(line->data + at, line->len - at, &code);
    *width = len > 0 ? char_width(code) : 1;
    return len > 0 ? (size_t)len : 1;
}

/* The next place for the cursor: behind a character and what is combined with it. */
static size_t next_char(const Bytes *line, size_t at) {
    int width;
    if (at < line->len) at += char_at(line, at, &width);
    while (at < line->len) {
        size_t n = char_at(line, at, &width);
        if (width) break;
        at += n;
    }
    return at;
}

static size_t previous_char(const Bytes *line, size_t at) {
    size_t p = 0, next;
    while (p < at && (next = next_char(line, p)) < at) p = next;
    return p;
}

/* The line as rows of the screen: row i is bytes from[i]..to[i]-1. */
typedef struct {
    size_t *from, *to, count;
    int cursor_row, cursor_column;
} Layout;

static void add_row(Layout *l, size_t *cap, size_t from) {
    size_t same = *cap;
    l->from = grown(l->from, cap, l->count + 1, sizeof *l->from);
    l->to = grown(l->to, &same, l->count + 1, sizeof *l->to);
    l->from[l->count++] = from;
}

static Layout lay_out(const Editor *ed, int columns) {
    Layout l = {0};
    size_t cap = 0, at = 0;
    int column = 0, width;
    add_row(&l, &cap, 0);
    for (;;) {
        if (at == ed->at) {
            l.cursor_row = (int)l.count - 1;
            l.cursor_column = column;
        }
        if (at == ed->line.len) break;
        size_t n = char_at(&ed->line, at, &width);
        bool newline = ed->line.data[at] == '\n';
        if (newline || column + width > columns) {
            l.to[l.count - 1] = at;
            add_row(&l, &cap, newline ? at + 1 : at);
            column = 0;
            if (!newline && at == ed->at) {
                l.cursor_row++;
                l.cursor_column = 0;
            }
        }
        if (!newline) column += width;
        at += n;
    }
    l.to[l.count - 1] = at;
    return l;
}

static void screen_size(int *columns, int *rows) {
    struct winsize w = {0};
    ioctl(STDOUT_FILENO, TIOCGWINSZ, &w);
    *columns = w.ws_col ? w.ws_col : 80;
    *rows = w.ws_row ? w.ws_row : 24;
}

static Layout editor_layout(const Editor *ed) {
    int columns, rows, indent = (int)strlen(ed->prompt);
    screen_size(&columns, &rows);
    columns -= indent + 1;             /* a column for the cursor behind a full row */
    return lay_out(ed, columns > 4 ? columns : 4);
}

static void draw_row(const Editor *ed, const Layout *l, size_t row, Bytes *out) {
    if (row == 0) bytes_add(out, ed->prompt, strlen(ed->prompt));
    else
        for (size_t i = 0; i < strlen(ed->prompt); i++) bytes_add(out, " ", 1);
    for (size_t at = l->from[row]; at < l->to[row];) {
        int width;
        size_t n = char_at(&ed->line, at, &width);
        unsigned char c = (unsigned char)ed->line.data[at];
        if (c < 0x20 || c == 0x7f) bytes_add(out, " ", 1);
        else if (c >= 0x80 && n == 1) bytes_add(out, REPLACEMENT, 3);
        else bytes_add(out, ed->line.data + at, n);
        at += n;
    }
}

/* Draws the line anew: all its rows, or those around the cursor if the screen cannot hold them. */
static void redraw(Editor *ed) {
    int columns, screen_rows;
    char move[64];
    Bytes out = {0};
    screen_size(&columns, &screen_rows);
    Layout l = editor_layout(ed);
    int first = l.cursor_row - (screen_rows - 2), count = (int)l.count;
    if (first < 0) first = 0;
    int last = min_int(count, first + (screen_rows > 1 ? screen_rows - 1 : 1)) - 1;
    if (ed->cursor_row) bytes_add(&out, move, (size_t)snprintf(move, sizeof move, "\033[%dA", ed->cursor_row));
    bytes_add(&out, "\r\033[J", 4);
    for (int row = first; row <= last; row++) {
        if (row > first) bytes_add(&out, "\r\n", 2);
        draw_row(ed, &l, (size_t)row, &out);
    }
    if (last > l.cursor_row) bytes_add(&out, move, (size_t)snprintf(move, sizeof move, "\033[%dA", last - l.cursor_row));
    int column = (int)strlen(ed->prompt) + l.cursor_column;
    bytes_add(&out, move, (size_t)snprintf(move, sizeof move, "\r\033[%dC", column));
    ed->cursor_row = l.cursor_row - first;
    write_terminal(out.data, out.len);
    free(out.data);
    free(l.from);
    free(l.to);
}

/* A byte of input; -1 when there is none any more, or none comes within `wait_ms` (-1: for ever). */
static int read_byte(Editor *ed, int wait_ms) {
    if (ed->input_at < ed->input_len) return ed->input[ed->input_at++];
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
    if (wait_ms >= 0 && poll(&in, 1, wait_ms) <= 0) return -1;
    ssize_t n;
    do n = read(STDIN_FILENO, ed->input, sizeof ed->input);
    while (n < 0 && errno == EINTR);
    if (n <= 0) return -1;
    ed->input_len = (size_t)n;
    ed->input_at = 1;
    return ed->input[0];
}

/* What follows ESC: [ or O, numbers, and a letter or ~. */
static int read_escape(Editor *ed) {
    int c = read_byte(ed, 50), number = 0;
    if (c == '\r' || c == '\n') return KEY_NEWLINE;
    if (c != '[' && c != 'O') return KEY_NONE;
    bool first = true;
    for (c = read_byte(ed, 50); c >= 0x20 && c < 0x40; c = read_byte(ed, 50)) {
        if (c == ';') first = false;
        if (first && c >= '0' && c <= '9' && number < 1000) number = 10 * number + c - '0';
    }
    switch (c) {
    case 'A': return KEY_UP;
    case 'B': return KEY_DOWN;
    case 'C': return KEY_RIGHT;
    case 'D': return KEY_LEFT;
    case 'H': return KEY_HOME;
    case 'F': return KEY_END;
    case '~': break;
    default: return KEY_NONE;
    }
    switch (number) {
    case 1:
    case 7: return KEY_HOME;
    case 4:
    case 8: return KEY_END;
    case 3: return KEY_DELETE;
    case 200: return KEY_PASTE;
    default: return KEY_NONE;
    }
}

static int read_key(Editor *ed) {
    int c = read_byte(ed, -1);
    return c < 0 ? KEY_GONE : c == 27 ? read_escape(ed) : c;
}

static void insert(Editor *ed, char c) {
    bytes_insert(&ed->line, ed->at, &c, 1);
    ed->at++;
}

/* Bracketed paste: text up to ESC [ 201 ~, line ends of any kind as newlines. */
static void read_paste(Editor *ed) {
    static const char end[] = "\033[201~";
    size_t from = ed->at;
    int c, before = 0;
    while ((c = read_byte(ed, -1)) >= 0) {
        if (c == '\r') insert(ed, '\n');
        else if (c && !(c == '\n' && before == '\r')) insert(ed, (char)c);
        before = c;
        size_t n = sizeof end - 1;
        if (ed->at < from + n || memcmp(ed->line.data + ed->at - n, end, n)) continue;
        bytes_remove(&ed->line, ed->at - n, ed->at);
        ed->at -= n;
        return;
    }
}

static void show_line(Editor *ed, const char *text, size_t n) {
    bytes_set(&ed->line, text, n);
    ed->at = ed->line.len;
}

static void recall(Editor *ed, size_t entry) {
    if (entry > ed->history.len || entry == ed->recalled) return;
    if (ed->recalled == ed->history.len) bytes_set(&ed->written, ed->line.data, ed->line.len);
    ed->recalled = entry;
    if (entry == ed->history.len) show_line(ed, ed->written.data, ed->written.len);
    else show_line(ed, ed->history.data[entry], strlen(ed->history.data[entry]));
}

/* Up and down: to the row above or below in a line of many rows, else through the history. */
static void move_row(Editor *ed, int step) {
    Layout l = editor_layout(ed);
    int row = l.cursor_row + step, column = 0, width;
    if (row >= 0 && row < (int)l.count) {
        size_t at = l.from[row];
        while (at < l.to[row] && column < l.cursor_column) {
            at = next_char(&ed->line, at);
            column = 0;
            for (size_t p = l.from[row]; p < at; column += width) p += char_at(&ed->line, p, &width);
        }
        ed->at = at < l.to[row] ? at : l.to[row];
    } else if (step < 0 && ed->recalled > 0) {
        recall(ed, ed->recalled - 1);
    } else if (step > 0) {
        recall(ed, ed->recalled + 1);
    }
    free(l.from);
    free(l.to);
}

static size_t word_before(const Editor *ed) {
    size_t at = ed->at;
    while (at && (ed->line.data[at - 1] == ' ' || ed->line.data[at - 1] == '\n')) at--;
    while (at && ed->line.data[at - 1] != ' ' && ed->line.data[at - 1] != '\n') at--;
    return at;
}

static void delete_back_to(Editor *ed, size_t from) {
    bytes_remove(&ed->line, from, ed->at);
    ed->at = from;
}

static void clear_screen(Editor *ed) {
    write_terminal("\033[H\033[2J", 7);
    ed->cursor_row = 0;
}

enum {
    CTRL_A = 1,
    CTRL_B,
    CTRL_C,
    CTRL_D,
    CTRL_E,
    CTRL_F,
    BACKSPACE = 8,
    NEWLINE = 10,
    CTRL_K,
    CTRL_L,
    RETURN,
    CTRL_N,
    CTRL_P = 16,
    CTRL_U = 21,
    CTRL_W = 23,
    RUBOUT = 127
};

typedef enum { GO_ON, LINE_DONE, LINE_DROPPED, INPUT_GONE } Edited;

static Edited edit_key(Editor *ed, int key) {
    Bytes *line = &ed->line;
    switch (key) {
    case RETURN:
    case NEWLINE: return LINE_DONE;
    case CTRL_C: return LINE_DROPPED;
    case KEY_GONE: return INPUT_GONE;
    case CTRL_D:
        if (!line->len) return INPUT_GONE;
        /* fall through */
    case KEY_DELETE: bytes_remove(line, ed->at, next_char(line, ed->at)); break;
    case BACKSPACE:
    case RUBOUT: delete_back_to(ed, previous_char(line, ed->at)); break;
    case KEY_LEFT:
    case CTRL_B: ed->at = previous_char(line, ed->at); break;
    case KEY_RIGHT:
    case CTRL_F: ed->at = next_char(line, ed->at); break;
    case KEY_HOME:
    case CTRL_A: ed->at = 0; break;
    case KEY_END:
    case CTRL_E: ed->at = line->len; break;
    case KEY_UP:
    case CTRL_P: move_row(ed, -1); break;
    case KEY_DOWN:
    case CTRL_N: move_row(ed, 1); break;
    case CTRL_K: bytes_remove(line, ed->at, line->len); break;
    case CTRL_U: delete_back_to(ed, 0); break;
    case CTRL_W: delete_back_to(ed, word_before(ed)); break;
    case CTRL_L: clear_screen(ed); break;
    case KEY_PASTE: read_paste(ed); break;
    case KEY_NEWLINE: insert(ed, '\n'); break;
    default:
        if ((key >= 0x20 && key < 256) || key == '\t') insert(ed, (char)key);
    }
    return GO_ON;
}

static Edited edit_line(Editor *ed) {
    show_line(ed, "", 0);
    ed->recalled = ed->history.len;
    ed->cursor_row = 0;
    redraw(ed);
    for (;;) {
        Edited state = edit_key(ed, read_key(ed));
        if (state != GO_ON) {
            ed->at = ed->line.len;
            redraw(ed);
            if (state == LINE_DROPPED) write_terminal("^C", 2);
            write_terminal("\r\n", 2);
            return state;
        }
        uint32_t code;                 /* not in the middle of a character, nor while more is waiting */
        size_t last = ed->at;
        while (last && ((unsigned char)ed->line.data[last - 1] & 0xc0) == 0x80 && ed->at - last < 3) last--;
        bool cut = last && utf8_next(ed->line.data + last - 1, ed->at - last + 1, &code) == 0;
        if (!cut && ed->input_at == ed->input_len) redraw(ed);
    }
}

static void editor_start(Editor *ed) {
    const char *term = getenv("TERM");
    ed->plain = !isatty(STDOUT_FILENO) || !term || !*term || !strcmp(term, "dumb") || tcgetattr(STDIN_FILENO, &ed->cooked) != 0;
    atexit(restore_terminal);
}

static void editor_end(Editor *ed) {
    strings_free(&ed->history);
    free(ed->line.data);
    free(ed->written.data);
}

/* Reads a line into ed->line. false when there is no more input. */
static bool read_line(Editor *ed) {
    Edited state;
    do {
        if (ed->plain) {
            char *text = NULL;
            size_t cap = 0;
            fputs(ed->prompt, stdout);
            flush_stdout();
            ssize_t n = getline(&text, &cap, stdin);
            if (n > 0) show_line(ed, text, (size_t)n - (text[n - 1] == '\n'));
            free(text);
            if (n <= 0 && ferror(stdin) && errno == EINTR) clearerr(stdin);
            else return n > 0;
            state = LINE_DROPPED;
        } else {
            struct termios raw = ed->cooked;
            raw.c_iflag &= ~(tcflag_t)(ICRNL | INLCR | IGNCR | IXON);
            raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ISIG | IEXTEN);
            raw.c_cc[VMIN] = 1;
            raw.c_cc[VTIME] = 0;
            flush_stdout();
            tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
            terminal_to_restore = &ed->cooked;
            write_terminal("\033[?2004h", 8);
            state = edit_line(ed);
            restore_terminal();
        }
    } while (state == LINE_DROPPED);
    size_t n = ed->history.len;
    if (state == LINE_DONE && ed->line.len && (!n || strcmp(ed->history.data[n - 1], ed->line.data)))
        strings_add(&ed->history, ed->line.data);
    return state == LINE_DONE;
}

/* ---- 10 chat -------------------------------------------------------------------------------------------------------- */

typedef struct {
    char *role, *content, *reasoning;
} Turn;

typedef struct {
    App *app;
    Ids before;                        /* tokens that stand before the turns as they are: of a loaded session, and of a base
                                        * model, which knows no turns, all that was written */
    Turn *turns;                       /* what was said; the texts are the chat's own */
    size_t count, cap;
    Answer answer;                     /* the last one; finish NULL: none yet */
} Chat;

static void add_turn(Chat *chat, const char *role, const char *content, const char *reasoning) {
    chat->turns = grown(chat->turns, &chat->cap, chat->count + 1, sizeof *chat->turns);
    Turn *t = &chat->turns[chat->count++];
    t->role = strdup(role);
    t->content = strdup(content);
    t->reasoning = reasoning ? strdup(reasoning) : NULL;
    if (!t->role || !t->content || (reasoning && !t->reasoning)) fail("out of memory");
}

static void drop_turns(Chat *chat, size_t from) {
    while (chat->count > from) {
        Turn *t = &chat->turns[--chat->count];
        free(t->role);
        free(t->content);
        free(t->reasoning);
    }
}

/* The tokens that the session should hold before it answers `line`. */
static Ids chat_tokens(Chat *chat, const Bytes *line) {
    App *app = chat->app;
    Ids ids = {0};
    ids_add(&ids, chat->before.data, chat->before.len);
    if (app->info.base_model && ids.len) {     /* plain continuation, each line on a line of its own */
        Bytes text = {0};
        if (line->len) bytes_add(&text, "\n", 1);
        bytes_add(&text, line->data, line->len);
        add_text(app, &ids, &text, false);
        free(text.data);
        return ids;
    }
    ds4_message *messages = calloc(chat->count ? chat->count : 1, sizeof *messages);
    if (!messages) fail("out of memory");
    for (size_t i = 0; i < chat->count; i++)
        messages[i] = (ds4_message){chat->turns[i].role, chat->turns[i].content, chat->turns[i].reasoning};
    if (ids.len) add_turns(app, &ids, ids.data[ids.len - 1], messages, chat->count);
    else add_chat(app, &ids, messages, chat->count, (ds4_think)app->opt.think);
    free(messages);
    return ids;
}

/* Brings the session to these tokens: what it shares with them stays, the rest is evaluated. 0, or -1 after a message. */
static int chat_eval(App *app, const Ids *ids) {
    ds4_session *s = app->session;
    size_t held = (size_t)ds4_session_position(s), same = 0;
    if (ids->len >= (size_t)ds4_session_ctx(s)) {
        warn("", "this would make %zu tokens and the context holds %d: /new starts over", ids->len, ds4_session_ctx(s));
        return -1;
    }
    const int *tokens = ds4_session_tokens(s);
    while (same < held && same < ids->len && tokens[same] == ids->data[same]) same++;
    if (same < held && ds4_session_rewind(s, (int)same) != 0) {
        same = 0;                      /* it cannot go back that little: all of it anew */
        if (ds4_session_rewind(s, 0) != 0) fail("%s", ds4_last_error());
    }
    int bad = same < ids->len ? ds4_session_eval(s, ids->data + same, ids->len - same) : 0;
    bar_erase();
    if (!bad) return 0;
    if (was_cancelled(app)) printf("\n(stopped)\n");
    else warn("", "%s", ds4_last_error());
    return -1;
}

/* The tokens of the session now, as those before the turns to come. */
static void keep_tokens(Chat *chat) {
    const ds4_session *s = chat->app->session;
    chat->before.len = 0;
    ids_add(&chat->before, ds4_session_tokens(s), (size_t)ds4_session_position(s));
}

/* The answer to `line` into `text`, and onto the screen. */
static void chat_answer(Chat *chat, Bytes *text) {
    App *app = chat->app;
    bool dim = app->opt.think != DS4_THINK_OFF && !app->info.base_model && isatty(STDOUT_FILENO);
    bytes_add(text, "", 0);
    Out out = {.terminal = isatty(STDOUT_FILENO), .stops = &app->opt.stops, .copy = text};
    if (dim) out_print(&out, "\033[2m", 4);
    chat->answer = generate(app, &out, most_tokens(app));
    if (dim) fputs("\033[0m", stdout);
    if (!out.terminal && out.mid_line) putchar('\n');
    if (!strcmp(chat->answer.finish, "length")) printf("(ended by length)\n");
    if (!strcmp(chat->answer.finish, "cancelled")) printf("(stopped)\n");
    if (app->opt.stats) print_stats(app, &chat->answer, stderr);
    for (char *p; (p = memchr(text->data, 0, text->len));) *p = ' ';  /* turns are C strings */
}

static void chat_turn(Chat *chat, const Bytes *line) {
    App *app = chat->app;
    size_t turns = chat->count;
    interrupted = 0;
    ds4_session_clear_cancel(app->session);
    ds4_session_reset_stats(app->session);
    if (!turns && !chat->before.len && app->opt.system) add_turn(chat, "system", app->opt.system, NULL);
    add_turn(chat, "user", line->data, NULL);
    Ids ids = chat_tokens(chat, line);
    int bad = chat_eval(app, &ids);
    free(ids.data);
    if (bad) {
        drop_turns(chat, turns);
        return;
    }
    Bytes text = {0};
    chat_answer(chat, &text);
    if (app->info.base_model) keep_tokens(chat);
    bool reasoned = app->opt.think != DS4_THINK_OFF;
    size_t split = !reasoned ? 0 : chat->answer.thought ? chat->answer.think_bytes : text.len;
    char *reasoning = strndup(text.data, split);
    if (!reasoning) fail("out of memory");
    add_turn(chat, "assistant", text.data + split, reasoned ? reasoning : NULL);
    free(reasoning);
    free(text.data);
}

static void chat_read(Chat *chat, const char *path) {
    Bytes text = {0};
    if (!*path) warn("", "/read needs a file");
    else if (read_file(path, &text) != 0) warn("", "%s: %s", path, strerror(errno));
    else if (memchr(text.data, 0, text.len)) warn("", "%s: holds a NUL byte", path);
    else chat_turn(chat, &text);
    free(text.data);
}

static void chat_new(Chat *chat) {
    drop_turns(chat, 0);
    chat->before.len = 0;
    if (ds4_session_rewind(chat->app->session, 0) != 0) warn("", "%s", ds4_last_error());
}

/* A line that begins with /. false to leave. */
static bool chat_command(Chat *chat, const char *line) {
    App *app = chat->app;
    size_t n = strcspn(line, " ");
    const char *rest = line + n + strspn(line + n, " ");
#define IS(name) (n == sizeof name - 1 && !memcmp(line, name, n))
    if (IS("/quit") || IS("/exit")) return false;
    if (IS("/read")) chat_read(chat, rest);
    else if (IS("/help")) fputs(ds4_help_chat, stdout);
    else if (IS("/think") || IS("/nothink")) {
        app->opt.think = IS("/nothink") ? DS4_THINK_OFF : DS4_THINK_ON;
        if (app->info.base_model) printf("the model has no chat template: it does not know how to think\n");
        else printf("thinking is %s\n", app->opt.think == DS4_THINK_OFF ? "off" : "on");
    } else if (IS("/ctx")) {
        printf("%d of %d tokens\n", ds4_session_position(app->session), ds4_session_ctx(app->session));
    } else if (IS("/stats")) {
        if (chat->answer.finish) print_stats(app, &chat->answer, stdout);
        else printf("no answer yet\n");
    } else if (IS("/new")) {
        chat_new(chat);
    } else {
        printf("no command %.*s: /help lists them, a space before the / sends the line\n", (int)n, line);
    }
#undef IS
    return true;
}

static int run_chat(App *app) {
    Editor editor = {.prompt = "> "};
    Chat chat = {.app = app};
    open_session(app);
    catch_interrupts(app, true);
    editor_start(&editor);
    keep_tokens(&chat);
    printf("ds4 %s, %s%s. /help lists the commands.\n", ds4_version(), *app->info.name ? app->info.name : "a model",
           app->info.base_model ? ", a base model: it continues what you write" : "");
    if (chat.before.len) printf("The session holds %zu tokens.\n", chat.before.len);
    while (read_line(&editor)) {
        if (editor.line.data[0] == '/') {
            if (!chat_command(&chat, editor.line.data)) break;
        } else if (editor.line.len || (app->info.base_model && ds4_session_position(app->session))) {
            chat_turn(&chat, &editor.line);
        }
    }
    save_session(app);
    drop_turns(&chat, 0);
    free(chat.turns);
    free(chat.before.data);
    editor_end(&editor);
    return 0;
}

/* ---- 11 main -------------------------------------------------------------------------------------------------------- */

/* Evaluates what the session does not hold yet of the prompt. */
static void eval_prompt(App *app, const Prompt *prompt, const Ids *full) {
    Ids rest = rest_of_prompt(app, prompt, full);
    size_t held = (size_t)ds4_session_position(app->session);
    check_room(app, held, rest.len);
    if (held + rest.len == 0) fail("the prompt is empty");
    if (dumps_logits(&app->opt)) {
        eval_to_files(app, &rest);
    } else if (rest.len && ds4_session_eval(app->session, rest.data, rest.len) != 0) {
        if (was_cancelled(app)) exit(130);
        fail("%s", ds4_last_error());
    }
    bar_erase();
    free(rest.data);
}

/* One answer, with the files that go with it. */
static int run_answer(App *app, const Prompt *prompt, const Ids *full) {
    const Options *opt = &app->opt;
    open_session(app);
    catch_interrupts(app, false);
    if (opt->logprobs) app->logprobs = open_output(opt->logprobs);
    eval_prompt(app, prompt, full);
    int most = dumps_logits(opt) && opt->tokens == TOKENS_DEFAULT ? 0 : most_tokens(app);
    Out out = {.silent = opt->print_ids, .terminal = isatty(STDOUT_FILENO), .stops = &opt->stops};
    Answer answer = generate(app, &out, most);
    save_session(app);
    if (app->logprobs) close_output(app->logprobs, opt->logprobs);
    if (opt->stats) print_stats(app, &answer, stderr);
    if (opt->stats_json) {
        FILE *f = open_output(opt->stats_json);
        write_stats(app, &answer, f);
        close_output(f, opt->stats_json);
    }
    return strcmp(answer.finish, "cancelled") ? 0 : 130;
}

static int run_prompt(App *app, const Prompt *prompt) {
    Ids full = fresh_prompt(app, prompt);
    int status = 0;
    if (app->opt.dump_tokens) dump_tokens(app, &full);
    else status = run_answer(app, prompt, &full);
    free(full.data);
    return status;
}

/* A standard stream that came closed would lend its number to the next file that is opened, and what is printed would go there.
 * Nothing can be read from or written to what stands in its place, so that its use fails as before. */
static void hold_standard_streams(void) {
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0) exit(1);
}

int main(int argc, char **argv) {
    hold_standard_streams();
    signal(SIGXFSZ, SIG_IGN);          /* a file that grows beyond the limit is a failed write, with a message */
    atexit(remove_unfinished);
    catch_endings();
    App app = {.opt = read_options(argc, argv)};
    Options *opt = &app.opt;
    int status = 0;
    if (opt->version) printf("ds4 %s\n", ds4_version());
    for (int i = 0; opt->help && ds4_help_cli[i]; i++) fputs(ds4_help_cli[i], stdout);
    if (!opt->version && !opt->help) {
        Prompt prompt = {0};
        check_options(opt);
        read_environment(opt);
        finish_cfg(opt, argv[0]);
        bool chat = is_chat(opt), asks = !chat && !opt->inspect && !opt->perplexity && !opt->bench;
        if (asks || (opt->bench && has_prompt(opt))) prompt = read_prompt(opt);
        open_engine(&app);
        status = chat           ? run_chat(&app)
                 : opt->inspect ? run_inspect(&app)
                 : opt->bench   ? run_bench(&app, &prompt)
                 : asks         ? run_prompt(&app, &prompt)
                                : run_perplexity(&app);
        interrupt_target = NULL;       /* the session ends with the engine */
        ds4_engine_free(app.engine);
        free(prompt.text.data);
        free(prompt.ids.data);
    }
    strings_free(&opt->stops);
    flush_stdout();
    return status;
}
