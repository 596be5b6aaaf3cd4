/* The program that users were shown, as it stands, and the library's manners around it. Arguments: target, head. */
#include "ds4.h"

#include <stdio.h>
#include <string.h>

static int failures;
#define EXPECT(condition)                                                                                                   \
    do {                                                                                                                    \
        if (!(condition))                                                                                                   \
            failures++,                                                                                                     \
                fprintf(stderr, "%s:%d: expected %s (last error: %s)\n", __FILE__, __LINE__, #condition, ds4_last_error()); \
    } while (0)

static void shown_program(const char *target, const char *head, int *tokens, int *next) {
    ds4_cfg cfg = ds4_default_cfg();
    cfg.model_path = target;
    cfg.mtp_path = head;
    cfg.gen.temperature = 0.0f;
    cfg.mtp_draft = 2;
    cfg.mtp_margin = 3.0f;
    ds4_engine *engine = ds4_engine_new(&cfg);
    ds4_session *sess = ds4_engine_open_session(engine);
    int token = ds4_session_eval_speculative_argmax(sess, 0, 100); /* (session, first token, max tokens) */
    EXPECT(token >= 0);
    EXPECT(ds4_session_position(sess) <= 100);
    memcpy(tokens, ds4_session_tokens(sess), (size_t)ds4_session_position(sess) * sizeof(int));
    *next = token;
    ds4_engine_free(engine);
}

/* The same text, one token at a time, without a head. */
static void plainly(const char *target, const int *tokens, int next) {
    ds4_cfg cfg = ds4_default_cfg();
    cfg.model_path = target;
    ds4_engine *engine = ds4_engine_new(&cfg);
    EXPECT(engine);
    ds4_session *sess = ds4_engine_open_session(engine);
    int token = 0, n = 0;
    for (; n < 100 && (n == 0 || !ds4_session_is_stop(sess, token)); n++) {
        EXPECT(token == tokens[n]);
        EXPECT(ds4_session_eval(sess, &token, 1) == 0);
        token = ds4_session_argmax(sess);
    }
    EXPECT(token == next);
    EXPECT(ds4_session_position(sess) == n);
    ds4_session_free(sess);
    ds4_engine_free(engine);
}

/* Head and lookup together, at a fixed depth and at the one that pays: where nothing was said before, and where it was. */
static void with_lookup(const char *target, const char *head, const int *tokens) {
    ds4_cfg cfg = ds4_default_cfg();
    cfg.model_path = target;
    cfg.mtp_path = head;
    cfg.mtp_margin = 0;
    cfg.draft_lookup = 8;
    ds4_engine *engine = ds4_engine_new(&cfg);
    EXPECT(engine);
    for (int draft = DS4_DRAFT_AUTO; draft <= 2; draft += 3) {
        ds4_session *sess = ds4_engine_open_session(engine);
        EXPECT(ds4_session_set_stops(sess, NULL, 0, true) == 0 && ds4_session_set_mtp(sess, draft, 0) == 0);
        for (int n = 0, token = 0, out[8]; n < 40; token = ds4_session_argmax(sess)) {
            int got = ds4_session_step(sess, token, n < 33 ? 8 : 1, out);
            EXPECT(got > 0 && memcmp(out, tokens + n, (size_t)(got > 0 ? got : 0) * sizeof *out) == 0);
            if (got <= 0) break;
            n += got;
        }
        ds4_session_free(sess);
    }
    ds4_engine_free(engine);
}

static void failures_are_reported(const char *target, const char *head) {
    ds4_cfg cfg = ds4_default_cfg();
    EXPECT(ds4_engine_new(&cfg) == NULL && strstr(ds4_last_error(), "model_path"));
    cfg.model_path = "no-such-file.gguf";
    EXPECT(ds4_engine_new(&cfg) == NULL && strstr(ds4_last_error(), "no-such-file.gguf"));
    cfg.model_path = head;
    EXPECT(ds4_engine_new(&cfg) == NULL && strstr(ds4_last_error(), "not a target"));
    cfg.model_path = target;
    cfg.mtp_path = target;
    EXPECT(ds4_engine_new(&cfg) == NULL && strstr(ds4_last_error(), "no MTP head"));
    cfg.mtp_path = NULL;
    cfg.mtp_draft = 17;
    EXPECT(ds4_engine_new(&cfg) == NULL && strstr(ds4_last_error(), "mtp_draft"));
    cfg.mtp_draft = 1;
    cfg.isa = "abacus";
    EXPECT(ds4_engine_new(&cfg) == NULL && strstr(ds4_last_error(), "abacus"));
    cfg.isa = NULL;
    ds4_engine *engine = ds4_engine_new(&cfg);
    EXPECT(engine);
    ds4_session *sess = ds4_engine_open_session(engine);
    int token = 1 << 30;
    EXPECT(ds4_session_logits(sess) == NULL && ds4_session_argmax(sess) == -1);
    EXPECT(ds4_session_eval(sess, &token, 1) == -1 && strstr(ds4_last_error(), "vocabulary"));
    EXPECT(ds4_session_rewind(sess, 5) == -1 && ds4_session_rewind(sess, 0) == 0);
    EXPECT(ds4_session_set_mtp(sess, 2, 0) == -1 && strstr(ds4_last_error(), "head"));
    EXPECT(ds4_session_position(sess) == 0);
    ds4_engine_free(engine);
    ds4_engine_free(NULL);
    ds4_session_free(NULL);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: test_api TARGET HEAD\n");
        return 2;
    }
    int tokens[100] = {0}, next = -1;
    shown_program(argv[1], argv[2], tokens, &next);
    plainly(argv[1], tokens, next);
    with_lookup(argv[1], argv[2], tokens);
    failures_are_reported(argv[1], argv[2]);
    printf("test_api: %s\n", failures ? "FAILED" : "ok");
    return failures ? 1 : 0;
}
