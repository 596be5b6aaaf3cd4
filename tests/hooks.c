/* The engine as the Python tests see it: all of ds4.c in one object, with hooks for what the API does not show. */
#include "../ds4.c"

#include "hooks_kernels.inc"
#include "hooks_rows.inc"
#include "hooks_tokenizer.inc"
#include "hooks_pace.inc"

/* ---- a scripted drafter: it proposes a given text, with one wrong token at a given place of each cycle ---- */

typedef struct {
    int *text;              /* text[p] is what will stand at position p */
    int n, wrong;           /* wrong: which draft of a cycle is spoiled, -1 none */
} hook_script;

static void script_propose(cycle **list, int n) {
    for (int at = 0; at < n; at++) {
        cycle *c = list[at];
        ds4_session *s = c->s;
        const hook_script *script = s->drafter_ctx;
        int V = s->engine->model->c.n_vocab;
        for (int i = 0; i < c->room && s->position + 1 + i < script->n; i++) {
            int token = (script->text[s->position + 1 + i] + (i == script->wrong)) % V;
            if (ds4_session_is_stop(s, token)) break;
            add_draft(c, token, NAN);
            if (!draft_more(c)) break;
        }
    }
}

static const drafter script_drafter = {script_propose, NULL};

hook_script *hook_script_new(ds4_session *s, const int *text, int n, int wrong);
void hook_script_free(ds4_session *s, hook_script *script);

hook_script *hook_script_new(ds4_session *s, const int *text, int n, int wrong) {
    hook_script *script = malloc(sizeof *script);
    *script = (hook_script){malloc((size_t)n * sizeof *text), n, wrong};
    memcpy(script->text, text, (size_t)n * sizeof *text);
    session_set_drafter(s, &script_drafter, script);
    return script;
}

void hook_script_free(ds4_session *s, hook_script *script) {
    if (s) session_set_drafter(s, s->engine->model->has_head ? &mtp_drafter : NULL, NULL);
    free(script->text);
    free(script);
}

/* ---- cache rows ---- */

/* The raw kv row of a layer at a position as float32 [head_dim]; the row must be in the ring. */
void hook_raw_row(const ds4_session *s, int at_layer, int position, float *out);
void hook_raw_row(const ds4_session *s, int at_layer, int position, float *out) {
    const ds4_engine *e = s->engine;
    const cache *c = &s->caches[at_layer];
    kv_load(e->dev.k, &e->model->c, e->kv_type, c->raw + (size_t)(position % c->ring) * e->sizes.kv_row, out);
}

/* ---- long contexts ---- */

/* Some bits of a number, all of them different for the next one. */
static uint8_t hook_bits(size_t i) { return (uint8_t)((uint64_t)i * 0x9e3779b97f4a7c15u >> 60); }

/* Takes a session from where it is to `position` without reading anything: its tokens and compressed rows come again, index
 * rows with other low bits, so that their scores differ. What it goes on with means nothing, but costs what it costs there. */
void hook_stretch(ds4_session *s, int position);
void hook_stretch(ds4_session *s, int position) {
    const row_sizes *sizes = &s->engine->sizes;
    int held = s->position;
    for (int p = held; p < position; p++) s->tokens[p] = s->tokens[p % held];
    for (int i = 0; i < s->engine->model->c.n_layers; i++) {
        cache *k = &s->caches[i];
        if (!k->ratio) continue;
        size_t have = (size_t)(held / k->ratio), rows = (size_t)(position / k->ratio);
        for (size_t w = have; w < rows; w++) {
            memcpy(k->rows + w * sizes->kv_row, k->rows + w % have * sizes->kv_row, sizes->kv_row);
            if (k->ratio != 4) continue;
            uint8_t *row = k->index_rows + w * sizes->index_row;
            memcpy(row, k->index_rows + w % have * sizes->index_row, sizes->index_row);
            for (size_t b = 0; b < sizes->index_row; b += 2) row[b] ^= hook_bits(w * sizes->index_row + b);
        }
    }
    s->position = s->written = position;
    s->floor = max_int(0, position - s->max_rewind);
    s->streams_from = max_int(0, s->floor - s->stream_need);
    s->head_from = s->head_to = 0;
    s->logits_row = -1;
    s->step_rows = 0;
    session_settle(s);
}

#ifdef DS4_FAULTS
/* Makes the n-th request to the system from now fail (n < 0: none); what is left of the countdown; blocks not freed, and bytes. */
void hook_fault_set(long n);
long hook_fault_left(void);
long hook_blocks(void);
long hook_bytes(void);
void hook_fault_set(long n) { atomic_store(&fault_countdown, n); }
long hook_fault_left(void) { return atomic_load(&fault_countdown); }
long hook_blocks(void) { return atomic_load(&blocks_held); }
long hook_bytes(void) { return atomic_load(&bytes_held); }
#endif

/* ---- the sampler's law, without a model: logits that depend on the token before them ---- */

typedef struct {
    ds4_engine e;
    model m;
    ds4_session s;
    const float *target, *head;        /* (V, V): logits of what follows each token */
} hook_chain;

hook_chain *hook_chain_new(int V, const float *target, const float *head, const ds4_gen *gen);
void hook_chain_free(hook_chain *c);
int hook_chain_run(hook_chain *c, int first, int depth, uint64_t seed, int n, int *out, int64_t *tried, int64_t *taken);
int hook_chain_count(hook_chain *c, int first, int depth, uint64_t seed, int texts, int n, int64_t *counts, int64_t *tried,
                     int64_t *taken);
int hook_law(const float *z, int V, const ds4_gen *gen, const int *text, int n, double *out);

hook_chain *hook_chain_new(int V, const float *target, const float *head, const ds4_gen *gen) {
    hook_chain *c = calloc(1, sizeof *c);
    c->target = target;
    c->head = head;
    c->m.c.n_vocab = V;
    c->e.model = &c->m;
    c->e.dev.k = kernels_best();
    c->e.eos = -1;
    c->e.candidates = malloc((size_t)V * sizeof *c->e.candidates);
    c->e.adjusted = malloc((size_t)V * sizeof(float));
    c->e.allowed = malloc((size_t)V);
    c->e.weights = malloc((size_t)V * sizeof(double));
    c->s = (ds4_session){.engine = &c->e, .ctx = 256, .batch = DS4_MAX_DRAFT + 1};
    c->s.tokens = calloc(512, sizeof(int));
    c->s.logits = malloc((size_t)(DS4_MAX_DRAFT + 1) * (size_t)V * sizeof(float));
    if (sampler_new(&c->s.by, gen, V)) {
        hook_chain_free(c);
        return NULL;
    }
    return c;
}

void hook_chain_free(hook_chain *c) {
    void *parts[] = {c->e.candidates, c->e.adjusted, c->e.allowed, c->e.weights, c->s.tokens, c->s.logits};
    sampler_free(&c->s.by);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) free(parts[i]);
    free(c);
}

/* n tokens behind `first` by cycles of `depth` drafts (0: plain), through the engine's own drafting, verdicts and next token. The
 * number of cycles, -1 on failure; tried and taken [DS4_MAX_DRAFT] count drafts by position. */
int hook_chain_run(hook_chain *h, int first, int depth, uint64_t seed, int n, int *out, int64_t *tried, int64_t *taken) {
    ds4_session *s = &h->s;
    int V = h->m.c.n_vocab, cycles = 0;
    s->position = 0;
    session_settle(s);
    s->stats = (ds4_stats){0};
    s->by.gen.seed = seed;
    for (int token = first, done = 0; done < n; cycles++) {
        cycle c = {.s = s, .by = &s->by, .tokens = &token, .n = 1, .max = n + 1 - done, .tail = -1};
        c.room = min_int(depth, c.max - 1);
        s->tokens[s->position] = token;
        for (int last = token; !c.ended && c.k < c.room; last = c.drafts[c.k - 1]) head_choose(&c, h->head + (int64_t)last * V);
        for (int i = 0; i <= c.k; i++)
            memcpy(s->logits + (int64_t)i * V, h->target + (int64_t)s->tokens[s->position + i] * V, (size_t)V * sizeof(float));
        int from = s->position;
        commit_step(&c);
        for (int i = from + 1; i < s->position && done < n; i++) out[done++] = s->tokens[i];
        if ((token = ds4_session_next(s)) < 0) return -1;
        if (done < n) out[done++] = token;
    }
    for (int i = 0; i < DS4_MAX_DRAFT; i++) {
        tried[i] += s->stats.drafted[i];
        taken[i] += s->stats.accepted[i];
    }
    return cycles;
}

/* Counts [V^n] of many texts of n tokens, a seed each. */
int hook_chain_count(hook_chain *h, int first, int depth, uint64_t seed, int texts, int n, int64_t *counts, int64_t *tried,
                     int64_t *taken) {
    int out[DS4_MAX_DRAFT];
    for (int t = 0; t < texts; t++) {
        int64_t at = 0;
        if (hook_chain_run(h, first, depth, seed + (uint64_t)t, n, out, tried, taken) < 0) return -1;
        for (int i = 0; i < n; i++) at = at * h->m.c.n_vocab + out[i];
        counts[at]++;
    }
    return 0;
}

/* The law [V] that a token is drawn from behind a text: of logits z after penalties, bias, mask, temperature and filters. */
int hook_law(const float *z, int V, const ds4_gen *gen, const int *text, int n, double *out) {
    hook_chain *c = hook_chain_new(V, NULL, NULL, gen);
    if (!c) return -1;
    memcpy(c->s.tokens, text, (size_t)n * sizeof *text);
    memset(out, 0, (size_t)V * sizeof *out);
    int kept = 0, result = -1;
    double total = 0;
    const float *adjusted_z = adjusted(&c->s, &c->s.by, z, n);
    if (adjusted_z && gen->temperature == 0) out[c->e.dev.k->argmax(V, adjusted_z)] = 1;
    else if (adjusted_z) {
        const candidate *law = law_of(adjusted_z, V, gen, c->e.candidates, &kept);
        for (int i = 0; i < kept; i++) total += weight_of(&law[i]);
        for (int i = 0; i < kept; i++) out[law[i].id] = weight_of(&law[i]) / total;
    }
    if (adjusted_z) result = 0;
    hook_chain_free(c);
    return result;
}

/* ---- how many threads an engine takes when it is not told ---- */

double hook_cpu_quota(const char *groups, const char *root);
double hook_cpu_quota(const char *groups, const char *root) { return cpu_quota(groups, root); }
