/* The engine as the Python tests see it: all of ds4.c in one object, with hooks for what the API does not show. */
#include "../ds4.c"

#include "hooks_kernels.inc"
#include "hooks_tokenizer.inc"

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
            add_draft(c, token, 0);
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

#ifdef DS4_FAULTS
/* Makes the n-th request to the system from now fail (n < 0: none); what is left of the countdown; blocks not freed. */
void hook_fault_set(long n);
long hook_fault_left(void);
long hook_blocks(void);
void hook_fault_set(long n) { atomic_store(&fault_countdown, n); }
long hook_fault_left(void) { return atomic_load(&fault_countdown); }
long hook_blocks(void) { return atomic_load(&blocks_held); }
#endif
