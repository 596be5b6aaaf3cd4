/* libFuzzer target of section 5: a vocabulary, merges, types and texts out of the input, with memory that may run out. `make fuzz`
 * runs it.
 *
 * Input: one byte of options, one for the memory failure, then the tokens one a line, an empty line, the merges one a line,
 * an empty line, and the text. All but the first option tokens get types in turn. */
#include "ds4_plain.h"

enum { MOST = 512 };

static size_t lines(const char **p, const char *end, str *out) {
    size_t n = 0;
    while (*p < end && n < MOST) {
        const char *stop = memchr(*p, '\n', (size_t)(end - *p));
        if (!stop) stop = end;
        out[n] = (str){*p, (size_t)(stop - *p)};
        *p = stop + (stop < end);
        if (!out[n++].n) return n - 1;
    }
    return n;
}

static void must(bool holds) {
    if (!holds) abort();
}

/* The pieces of the ids are the text again. */
static void round_trip(const tokenizer *t, const ids *got, const char *text, size_t n) {
    size_t at = 0;
    for (size_t i = 0; i < got->n; i++) {
        const char *p;
        size_t len = tok_piece(t, got->v[i], &p);
        must(len <= n - at && !memcmp(p, text + at, len));
        at += len;
    }
    must(at == n);
}

static void use(const tokenizer *t, const char *text, size_t n, int options) {
    ids got = {0};
    if (!tok_encode(t, text, n, false, &got)) {
        round_trip(t, &got, text, n);
        for (size_t i = 0; i < got.n; i++) /* no control token out of plain text */
            for (size_t k = 0; k < t->n_controls; k++) must(t->controls[k].id != got.v[i]);
    }
    got.n = 0;
    if (!tok_encode(t, text, n, true, &got)) round_trip(t, &got, text, n);
    char *copy = malloc(n + 1);
    memcpy(copy, text, n);
    copy[n] = 0;
    chat_argument argument = {copy, copy, options & 1};
    chat_call call = {copy, &argument, options & 1};
    chat_message m[3] = {{.role = "system", .content = copy, .tools = options & 2 ? copy : NULL},
                         {.role = options & 4 ? "user" : options & 8 ? "tool" : copy, .content = copy},
                         {.role = "assistant", .content = copy, .reasoning = copy, .calls = &call, .n_calls = 1}};
    tok_chat(t, m, 3, (think_mode)(options % 3), options & 16, &got);
    tok_prompt(t, text, n, options & 1, &got);
    tok_template_is_v4(t);
    free(copy);
    mem_free(got.v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const given[] = {"<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<s>", "</s>"};
    static const char spelled[] = "ĠĊabcdefgh<>|12345 ,.";
    str token[MOST + 320], merge[MOST];
    int32_t type[MOST + 320];
    char byte[256][2];
    if (size < 2) return 0;
    int options = data[0], failing = data[1];
    const char *p = (const char *)data + 2, *end = (const char *)data + size;
    size_t n = 0, n_merges;
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) token[n++] = str_of(given[i]);
    for (uint32_t cp = 0; cp <= SPELLED_MAX && (options & 32); cp++) { /* a token for every byte */
        int b = spelled_byte(cp);
        if (b < 0) continue;
        size_t len = cp < 0x80 ? 1 : 2;
        byte[b][0] = (char)(len == 1 ? cp : 0xc0 | cp >> 6);
        byte[b][1] = (char)(0x80 | (cp & 0x3f));
        token[n++] = (str){byte[b], len};
    }
    for (const char *s = spelled; *s && !(options & 32); s += (unsigned char)*s < 0x80 ? 1 : 2) token[n++] = (str){s, (unsigned char)*s < 0x80 ? 1 : 2};
    size_t first = n;
    n += lines(&p, end, token + n);
    n_merges = lines(&p, end, merge);
    for (size_t i = 0; i < n; i++) type[i] = i < 6 ? 3 : i < first ? 1 : (int32_t)((size_t)options + i) % 7;
    tok_source src = {.tokens = token, .n_tokens = n, .types = options & 64 ? type : NULL, .merges = merge, .n_merges = n_merges,
                      .model = str_of("gpt2"), .pre = str_of("deepseek-v3"), .bos = 4, .eos = 5, .pad = -1};
    if (options & 128) src.chat_template = (str){p, (size_t)(end - p)};
    atomic_store(&fault_countdown, failing < 128 ? -1 : failing - 128);
    tokenizer *t = tok_new(&src);
    if (t) use(t, p, (size_t)(end - p), options);
    tok_free(t);
    atomic_store(&fault_countdown, -1);
    return 0;
}
