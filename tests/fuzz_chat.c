/* libFuzzer target of the chat format: conversations of any roles and contents, with memory that may run out. `make fuzz` runs it.
 *
 * Input: a byte of options, one for the memory failure, then fields that end at a byte 0x1e: for each message a role (a digit
 * picks one, other text is taken as it stands), content, reasoning, tools, a call's name, an argument's name, its value.
 *
 * What holds: a control token in the result was written by the format, never by a text; so there are as many as the turns
 * ask for. A failure leaves what was there. */
#include "ds4_plain.h"

enum { MOST = 16, SEPARATOR = 0x1e, BASE_MODEL = 1, NO_DSML = 2, GENERATE = 4, BETTER_TEMPLATE = 8 };
enum { ID_BOS, ID_EOS, ID_PAD, ID_USER, ID_ASSISTANT, ID_THINK, ID_END_THINK, ID_DSML, CONTROLS };

static void must(bool holds) {
    if (!holds) abort();
}

/* A vocabulary of control tokens, bytes and some merges; without the DSML token the format spells it. */
static tokenizer *vocabulary(int options) {
    static const char *const controls[CONTROLS] = {"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>",
                                                   "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"};
    static const char *const merges[] = {"t h", "th e", "< t", "< /", "u s", "Ċ Ċ"}, *const made[] = {"th", "the", "<t", "</", "us", "ĊĊ"};
    enum { MERGES = sizeof merges / sizeof *merges };
    str tokens[CONTROLS + 256 + MERGES], merge[MERGES];
    int32_t types[CONTROLS + 256 + MERGES];
    char spelled[256][2];
    size_t n = 0;
    for (; n < CONTROLS; n++) {
        tokens[n] = str_of(n == ID_DSML && options & NO_DSML ? "<filler>" : controls[n]);
        types[n] = TOKEN_CONTROL;
    }
    for (uint32_t cp = 0; cp <= SPELLED_MAX; cp++) {
        int b = spelled_byte(cp);
        if (b < 0) continue;
        spelled[b][0] = (char)(cp < 0x80 ? cp : 0xc0 | cp >> 6);
        spelled[b][1] = (char)(0x80 | (cp & 0x3f));
        types[n] = 1;
        tokens[n++] = (str){spelled[b], cp < 0x80 ? 1 : 2};
    }
    for (size_t i = 0; i < MERGES; i++) {
        merge[i] = str_of(merges[i]);
        types[n] = 1;
        tokens[n++] = str_of(made[i]);
    }
    const char *template = options & BETTER_TEMPLATE ? "<｜User｜><｜Assistant｜></think> Beyond maximum" : "<｜User｜><｜Assistant｜></think>";
    tok_source source = {.tokens = tokens, .n_tokens = n, .types = types, .merges = merge, .n_merges = MERGES,
                         .model = str_of("gpt2"), .pre = str_of("deepseek-v3"), .bos = ID_BOS, .eos = ID_EOS, .pad = ID_PAD};
    if (!(options & BASE_MODEL)) source.chat_template = str_of(template);
    return tok_new(&source);
}

/* The next field as a text of its own, NULL when there is none. */
static char *take_field(const char **p, const char *end) {
    if (*p >= end) return NULL;
    const char *stop = memchr(*p, SEPARATOR, (size_t)(end - *p));
    if (!stop) stop = end;
    size_t n = (size_t)(stop - *p);
    char *text = malloc(n + 1);
    memcpy(text, *p, n);
    text[n] = 0;
    *p = stop + (stop < end);
    return text;
}

static void check(const tokenizer *t, const chat_message *m, size_t n, int options, const ids *got, size_t had) {
    size_t seen[CONTROLS] = {0}, assistants = 0, groups = 0;
    bool in_user = false;
    for (size_t i = had; i < got->n; i++) {
        must(got->v[i] >= 0 && (size_t)got->v[i] < t->n_tokens);
        if (got->v[i] < CONTROLS) seen[got->v[i]]++;
    }
    for (size_t i = 0; i < n; i++) {
        if (!strcmp(m[i].role, "system")) continue;
        bool assistant = !strcmp(m[i].role, "assistant");
        assistants += assistant;
        groups += !assistant && !in_user;
        in_user = !assistant;
    }
    bool base = options & BASE_MODEL, generate = options & GENERATE;
    must(got->v[had] == ID_BOS && seen[ID_BOS] == 1 && seen[ID_PAD] == 0);
    must(seen[ID_EOS] == (base ? 0 : assistants) && seen[ID_USER] == (base ? 0 : groups) && seen[ID_ASSISTANT] == (base ? 0 : assistants + generate));
    if (base) must(!seen[ID_THINK] && !seen[ID_END_THINK] && !seen[ID_DSML]);
    if (options & NO_DSML) must(!seen[ID_DSML]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const roles[] = {"system", "user", "developer", "assistant", "tool"};
    if (size < 2) return 0;
    int options = data[0], failing = data[1];
    const char *p = (const char *)data + 2, *end = (const char *)data + size;
    char *fields[MOST][7];
    chat_message m[MOST];
    chat_argument argument[MOST];
    chat_call call[MOST];
    size_t n = 0;
    for (; n < MOST && p < end; n++) {
        for (int k = 0; k < 7; k++) fields[n][k] = take_field(&p, end);
        char **f = fields[n];
        bool digit = f[0][0] >= '0' && f[0][0] <= '4' && !f[0][1];
        argument[n] = (chat_argument){f[5] ? f[5] : "", f[6], options & 128};
        call[n] = (chat_call){f[4] ? f[4] : "", &argument[n], f[5] ? 1 : 0};
        m[n] = (chat_message){.role = digit ? roles[f[0][0] - '0'] : f[0], .content = f[1], .reasoning = f[2],
                              .tools = f[3] && *f[3] ? f[3] : NULL, .calls = &call[n], .n_calls = f[4] && *f[4] ? 1 : 0};
    }
    tokenizer *t = vocabulary(options);
    must(t);
    ids got = {0};
    must(!ids_push(&got, ID_PAD));
    atomic_store(&fault_countdown, failing < 128 ? -1 : failing - 128);
    set_error(DS4_OK, "%s", "");
    int rc = tok_chat(t, m, n, (think_mode)((options >> 4) % 3), options & GENERATE, &got);
    atomic_store(&fault_countdown, -1);
    if (rc) must(got.n == 1 && *last_error);
    else check(t, m, n, options, &got, 1);
    mem_free(got.v);
    tok_free(t);
    must(atomic_load(&blocks_held) == 0);
    for (size_t i = 0; i < n; i++)
        for (int k = 0; k < 7; k++) free(fields[i][k]);
    return 0;
}
