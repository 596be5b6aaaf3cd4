/* Sessions and engines on several threads: what each gives is what it gives alone. Run it under the thread sanitizer too.
 * Arguments: target, head. */
#include "ds4.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROMPT = 20, TOKENS = 40, JOBS = 4 };

static pthread_mutex_t failures_lock = PTHREAD_MUTEX_INITIALIZER;
static int failures;
static void failed(int line, const char *what) {
    pthread_mutex_lock(&failures_lock);
    failures++;
    fprintf(stderr, "%s:%d: expected %s (last error: %s)\n", __FILE__, line, what, ds4_last_error());
    pthread_mutex_unlock(&failures_lock);
}
#define EXPECT(condition) \
    do { \
        if (!(condition)) failed(__LINE__, #condition); \
    } while (0)

static const char *target, *head;

/* A text of its own: the job's prompt, then tokens by steps with drafts, with a fork, a snapshot, a rewind and a failing call on
 * the way. Jobs 0 and 2 are greedy, 1 and 3 draw their tokens; 2 and 3 take their steps in batches with a further session, 3 as
 * deep as pays and with lookups. */
typedef struct {
    ds4_engine *engine;     /* NULL: one of the job's own */
    int number, n;
    int tokens[TOKENS];
    float *logits;          /* of the last one */
} job;

static ds4_engine *new_engine(void) {
    ds4_cfg cfg = ds4_default_cfg();
    cfg.model_path = target;
    cfg.mtp_path = head;
    cfg.ctx = 256;
    cfg.threads = 2;
    cfg.prefill_chunk = 16;
    ds4_engine *engine = ds4_engine_new(&cfg);
    EXPECT(engine);
    return engine;
}

/* Through memory into another session of the engine, which goes on in its place. */
static ds4_session *move(ds4_engine *engine, ds4_session *s) {
    size_t n = ds4_session_save_size(s);
    void *snapshot = malloc(n);
    ds4_session *other = ds4_engine_open_session(engine);
    EXPECT(other && ds4_session_save_mem(s, snapshot, n) == n && ds4_session_load_mem(other, snapshot, n) == 0);
    free(snapshot);
    ds4_session_free(s);
    return other;
}

static void failing_call(ds4_session *s, int number) {
    int wrong = 1000000 + number;
    char name[16];
    snprintf(name, sizeof name, "%d", wrong);
    EXPECT(ds4_session_eval(s, &wrong, 1) == -1 && strstr(ds4_last_error(), name));
}

static void set_up(ds4_session *s, int number) {
    ds4_bias bias = {7, 0.5f};
    ds4_gen gen = {.temperature = 0.9f, .top_p = 0.95f, .seed = 11, .frequency_penalty = 0.1f, .bias = &bias, .n_bias = 1};
    EXPECT(ds4_session_set_stops(s, NULL, 0, true) == 0 && ds4_session_set_mtp(s, 2 + number, 0) == 0);
    EXPECT(number < 3 || (ds4_session_set_lookup(s, 8) == 0 && ds4_session_set_mtp(s, DS4_DRAFT_AUTO, 0) == 0));
    EXPECT(number % 2 == 0 || ds4_session_set_gen(s, &gen) == 0);
}

/* One step, in company when there is any: the other session reads on at a prompt of its own and begins anew when it is full. */
static int step(ds4_engine *engine, ds4_session *s, ds4_session *other, int max, int *out) {
    int token = ds4_session_next(s), more[9] = {3, 4, 5, 6, 7, 8, 9, 10, 11};
    EXPECT(ds4_engine_work(engine).passes > 0); /* whatever the others are computing */
    if (!other) return ds4_session_step(s, token, max, out);
    ds4_batch_item items[2] = {{.session = s, .tokens = &token, .n_tokens = 1, .max = max, .out = out},
                               {.session = other, .tokens = more, .n_tokens = 9}};
    if (ds4_session_position(other) > 200) EXPECT(ds4_session_rewind(other, 0) == 0);
    EXPECT(ds4_batch_step(engine, items, 2) == 0 && items[1].n > 0);
    return items[0].n;
}

static void *run_job(void *arg) {
    job *j = arg;
    ds4_engine *engine = j->engine ? j->engine : new_engine();
    ds4_session *s = ds4_engine_open_session(engine), *other = j->number < 2 ? NULL : ds4_engine_open_session(engine);
    int prompt[PROMPT], vocab = ds4_engine_info(engine).vocab;
    for (int i = 0; i < PROMPT; i++) prompt[i] = 2 + (i * 7 + j->number * 31) % (vocab - 2);
    set_up(s, j->number);
    EXPECT(ds4_session_eval(s, prompt, PROMPT) == 0);
    for (j->n = 0; j->n < TOKENS;) {
        int done = step(engine, s, other, TOKENS - j->n, j->tokens + j->n);
        EXPECT(done > 0);
        if (done < 1) break;
        j->n += done;
        if (j->n % 4 == 0) failing_call(s, j->number);
        if (j->n % 5 == 0) {
            ds4_session *fork = ds4_session_fork(s);
            ds4_session_free(s);
            s = fork;
        }
        if (j->n % 7 == 0) s = move(engine, s);
        set_up(s, j->number);
        if (j->n % 3 == 0) {
            int last = j->tokens[j->n - 1];
            EXPECT(ds4_session_rewind(s, ds4_session_position(s) - 1) == 0 && ds4_session_eval(s, &last, 1) == 0);
        }
    }
    j->logits = malloc((size_t)vocab * sizeof *j->logits);
    const float *z = ds4_session_logits(s);
    EXPECT(z);
    if (z) memcpy(j->logits, z, (size_t)vocab * sizeof *z);
    ds4_session_free(s);
    ds4_session_free(other);
    if (!j->engine) ds4_engine_free(engine);
    return NULL;
}

/* All jobs at once, each in a thread of its own, must give what they gave alone. */
static void together(const job *alone, ds4_engine *engine, int vocab) {
    job jobs[JOBS];
    pthread_t threads[JOBS];
    for (int i = 0; i < JOBS; i++) {
        jobs[i] = (job){.engine = engine, .number = i};
        EXPECT(pthread_create(&threads[i], NULL, run_job, &jobs[i]) == 0);
    }
    for (int i = 0; i < JOBS; i++) {
        pthread_join(threads[i], NULL);
        EXPECT(jobs[i].n == TOKENS && !memcmp(jobs[i].tokens, alone[i].tokens, sizeof alone[i].tokens));
        EXPECT(!memcmp(jobs[i].logits, alone[i].logits, (size_t)vocab * sizeof(float)));
        free(jobs[i].logits);
    }
}

static void *cancel_it(void *arg) {
    ds4_session_cancel(arg);
    return NULL;
}

/* A call that would take its time is cancelled from another thread: it ends between passes, and the session goes on from there. */
static void cancelled(void) {
    enum { LONG = 240 };
    ds4_engine *engine = new_engine();
    ds4_session *s = ds4_engine_open_session(engine), *same = ds4_engine_open_session(engine);
    int tokens[LONG], vocab = ds4_engine_info(engine).vocab;
    pthread_t thread;
    for (int i = 0; i < LONG; i++) tokens[i] = 2 + i % (vocab - 2);
    EXPECT(pthread_create(&thread, NULL, cancel_it, s) == 0);
    int rc = ds4_session_eval(s, tokens, LONG);
    pthread_join(thread, NULL);
    EXPECT(ds4_session_cancelled(s));
    EXPECT(rc == 0 || (rc == -1 && strstr(ds4_last_error(), "cancelled")));
    EXPECT(ds4_session_step(s, tokens[0], 1, tokens) == -1);
    ds4_session_clear_cancel(s);
    int position = ds4_session_position(s);
    EXPECT(rc == 0 ? position == LONG : position % 16 == 0);
    EXPECT(ds4_session_eval(s, tokens + position, (size_t)(LONG - position)) == 0);
    EXPECT(ds4_session_eval(same, tokens, LONG) == 0);
    EXPECT(!memcmp(ds4_session_logits(s), ds4_session_logits(same), (size_t)vocab * sizeof(float)));
    ds4_engine_free(engine);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: test_threads TARGET HEAD\n");
        return 2;
    }
    target = argv[1];
    head = argv[2];
    job alone[JOBS];
    ds4_engine *engine = new_engine();
    int vocab = ds4_engine_info(engine).vocab;
    for (int i = 0; i < JOBS; i++) {
        alone[i] = (job){.engine = engine, .number = i};
        run_job(&alone[i]);
    }
    for (int round = 0; round < 3; round++) together(alone, engine, vocab);
    ds4_engine_free(engine);
    together(alone, NULL, vocab);
    for (int round = 0; round < 3; round++) cancelled();
    for (int i = 0; i < JOBS; i++) free(alone[i].logits);
    printf("test_threads: %s\n", failures ? "FAILED" : "ok");
    return failures ? 1 : 0;
}
