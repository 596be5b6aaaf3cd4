/* ds4: DeepSeek-V4 models from GGUF files, with exact multi-token-prediction speculation.
 *
 *     ds4_cfg cfg = ds4_default_cfg();
 *     cfg.model_path = "target.gguf";  cfg.mtp_path = "head.gguf";
 *     cfg.mtp_draft = 2;               cfg.mtp_margin = 3.0f;
 *     ds4_engine *engine = ds4_engine_new(&cfg);
 *     ds4_session *sess = ds4_engine_open_session(engine);
 *     int token = ds4_session_eval_speculative_argmax(sess, 0, 100);
 *     ds4_engine_free(engine);
 *
 * An engine is an opened model: weights mapped read-only, its head, its threads. A session is one text: its tokens,
 * caches and logits. Output with speculation, greedy or drawn with a seed, is bit for bit the output without it: for every
 * head, depth, margin, thread count and company in a batch. (The rejection scheme alone, chosen for a little more acceptance,
 * keeps the law of sampled text and not the text.)
 *
 * Errors. A call that fails returns NULL or -1, changes nothing unless it says so, and leaves one message that names the
 * file, key, tensor or option and what was expected in ds4_last_error(), which belongs to the calling thread. The
 * library never exits and prints nothing; messages worth showing go to cfg.log when it is set. A pointer may be NULL only where
 * that is said, or where it points to 0 values.
 *
 * Threads. Engines are independent of each other; sessions of one engine may be used from different threads (their passes
 * take turns on the engine's thread pool). One session is used by one thread at a time; only ds4_session_cancel may be
 * called from another. A call takes up to 512 KiB of its thread's stack. Positions count tokens from 0; "V" is the
 * vocabulary's size. */
#ifndef DS4_H
#define DS4_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Everything between the two marks is plain C declarations that a binding generator can read. */
/* binding: begin */

#define DS4_VERSION "0.1.0"
#define DS4_MAX_DRAFT 16               /* the deepest speculation */
enum { DS4_DRAFT_AUTO = -1 };          /* a draft depth: as many as pay, none included */
enum { DS4_MARGIN_AUTO = -1 };         /* a margin: 0 with DS4_DRAFT_AUTO, 3 with a fixed depth */
#define DS4_ERROR_BYTES 256            /* of a batch item's message */

typedef struct ds4_engine ds4_engine;
typedef struct ds4_session ds4_session;

typedef enum { DS4_KV_F32, DS4_KV_F16, DS4_KV_FP8 } ds4_kv_type;
typedef enum { DS4_THINK_OFF, DS4_THINK_ON, DS4_THINK_MAX } ds4_think;

typedef void (*ds4_log_fn)(void *ctx, const char *message);
/* What is being done ("load", "prompt"), how far it is and of how much. Called from the thread that called the library. */
typedef void (*ds4_progress_fn)(void *ctx, const char *what, int64_t done, int64_t total);

typedef struct { int token; float bias; } ds4_bias;
/* Which tokens may follow the text tokens [n]: `allowed` [V] comes all 1, the callback writes 0 for those that may not. 0, or
 * -1 to end the generation with an error. Called for each row a token is chosen from, drafts included, from the thread that
 * called the library; must be a function of the text alone and must not call the library for the same engine. */
typedef int (*ds4_mask_fn)(void *ctx, const int *tokens, int n, uint8_t *allowed);
/* How speculation keeps the law of sampled text (temperature > 0). DS4_COUPLED: a draft is taken when it is the token that
 * plain sampling draws, so a seed's text is bit for bit the plain text. DS4_REJECTION: a draft x of the head's law q is taken with
 * probability min(1, p(x) / q(x)), else the token is drawn from the rest of p (Leviathan et al. 2023, Chen et al. 2023): the
 * same law, a little more often a draft, but a seed's text depends on the depth. */
typedef enum { DS4_COUPLED, DS4_REJECTION } ds4_scheme;

/* How a token is chosen from logits. In this order: presence and frequency penalties, bias, mask; then temperature 0 is
 * greedy: argmax, ties to the lowest id. Otherwise temperature, top_k (0: off), top_p (0 to 1; 1: off), min_p (0: off), ties
 * kept by lowest id, and the draw: at position i argmax(log p + Gumbel noise of (seed, i, id)). Penalties count the tokens from
 * position penalty_from on: a token that occurs c > 0 times loses presence + c * frequency. */
typedef struct {
    float temperature;                 /* 0 to 100 */
    int top_k;
    float top_p;
    float min_p;
    uint64_t seed;
    float presence_penalty, frequency_penalty;  /* in logits; -100 to 100 */
    int penalty_from;                  /* a position: 0 counts the prompt too */
    const ds4_bias *bias;              /* added to logits, -INFINITY forbids; a token named twice gets both; copied when kept */
    size_t n_bias;
    ds4_mask_fn mask;                  /* NULL: all tokens */
    void *mask_ctx;
    ds4_scheme scheme;
} ds4_gen;

/* Options of an engine and of the sessions it opens. Start from ds4_default_cfg(). */
typedef struct {
    const char *model_path;            /* target GGUF; any part of a split file will do */
    const char *mtp_path;              /* head GGUF (either layout), or NULL */
    bool mtp_internal;                 /* use the head inside the target's file */
    int mtp_draft;                     /* tokens drafted a cycle, 0 to DS4_MAX_DRAFT; 0: no speculation; DS4_DRAFT_AUTO (1) */
    int draft_lookup;                  /* draft what followed the last time that up to so many tokens occurred, 0 to 64; 0: off (0) */
    float mtp_margin;                  /* lead in logits a draft needs to be taken from the batch, 0 to 1000 (DS4_MARGIN_AUTO) */
    int mtp_shortlist;                 /* the head drafts the vocabulary's first so many ids and those of the text; 0: any (32768) */
    ds4_gen gen;                       /* how sessions choose tokens until ds4_session_set_gen (greedy) */
    int ctx;                           /* most tokens of a session; 0: min(the model's context, 32768) */
    int threads;                       /* 0: the processors this process may use, by its affinity and its container's quota */
    ds4_kv_type kv_type;               /* rows of the attention caches (f16) */
    int prefill_chunk;                 /* most rows of one pass, 1 to 4096 (256) */
    int max_rewind;                    /* how many tokens a session can go back; at most ctx counts (64) */
    bool mlock;                        /* lock the mapped weights in memory */
    bool raw_vocab_ok;                 /* accept a file without a usable tokenizer: token ids only */
    const char *isa;                   /* kernels: NULL or "auto", "scalar", "avx2", "avxvnni", "avx512", "amx", "neon"; all give the same bits */
    bool conf_log;                     /* one line a draft to log: position, ids, leads, margin, verdict */
    ds4_log_fn log;                    /* may be NULL; called from the threads that call the library; must not call it */
    ds4_progress_fn progress;          /* may be NULL */
    void *callback_ctx;                /* first argument of log and progress */
} ds4_cfg;

ds4_cfg ds4_default_cfg(void);
const char *ds4_version(void);
/* The calling thread's last error, "" if none. Valid until the thread's next failing call. */
const char *ds4_last_error(void);
/* What kind of failure it was, for callers that act on it. */
typedef enum {
    DS4_OK,                            /* no error yet */
    DS4_INVALID,                       /* an argument or option out of its range, or a call that cannot be made now */
    DS4_LOAD_FAILED,                   /* a model or head that cannot be opened, is not what is expected, or does not fit */
    DS4_NO_MEMORY,                     /* memory or threads that the system does not give */
    DS4_CONTEXT_FULL,                  /* more tokens than the session can hold */
    DS4_CANNOT_REWIND,                 /* a position that the session cannot go back to */
    DS4_CANCELLED,                     /* ds4_session_cancel */
    DS4_NON_FINITE,                    /* logits that are not numbers */
    DS4_SNAPSHOT_FAILED                /* a snapshot that cannot be written or read, is damaged, or is of something else */
} ds4_error_kind;
ds4_error_kind ds4_last_error_kind(void);

/* ---- engine ---- */

/* Opens the model (and head), checks every key, tensor and shape, starts the threads. NULL on failure. */
ds4_engine *ds4_engine_new(const ds4_cfg *cfg);
/* Closes the sessions still open, then the engine. NULL is fine. */
void ds4_engine_free(ds4_engine *engine);

typedef struct {
    const char *model_path, *mtp_path; /* as opened; mtp_path NULL without a head, the model's own when internal */
    const char *name;                  /* general.name, "" if absent */
    const char *isa;                   /* kernels in use */
    int layers, embd, heads, head_dim, rope_dim, vocab, streams, window, experts, experts_used, expert_ff, hash_layers;
    int context_length;                /* the model's own */
    int ctx, threads, prefill_chunk, max_rewind;
    float mtp_margin;                  /* of new sessions */
    ds4_kv_type kv_type;
    bool has_head;                     /* a head was loaded */
    bool file_has_head;                /* the target's file holds one (mtp_internal would use it) */
    bool base_model;                   /* no chat template */
    bool template_is_v4;
    int bos, eos;                      /* -1: none */
    int64_t file_bytes, head_file_bytes;    /* of all parts */
    int64_t weight_bytes, head_weight_bytes;/* of the tensors used */
    int64_t scratch_bytes;             /* allocated by the engine for its passes */
    int64_t table_bytes;               /* and for all else: vocabulary, names, small tensors as float32. The weights are used where
                                        * the files are mapped: there is no second copy of them */
    int64_t session_bytes;             /* allocated by one session with this cfg; what its context does not reach stays untouched */
    int64_t batch_bytes;               /* allocated as batches grow, at most: logits of the rows of one pass. 0 until the first */
} ds4_info;
/* Sizes of an opened engine; pointers live as long as the engine. */
ds4_info ds4_engine_info(const ds4_engine *engine);

/* What the engine has computed since it was opened, for whatever sessions. One pass serves all sessions of a batch, and reads a
 * matrix once however many rows it has; so bytes / passes, beside the bandwidth of the machine, say how good the speed is. */
typedef struct {
    int64_t passes, rows;              /* of the target */
    int64_t head_passes;               /* of the head: draft steps, and the rows made again before them */
    int64_t head_rows, repaired_rows;  /* of either kind */
    int64_t logit_rows;                /* rows of logits, of target and head */
    int64_t weight_bytes;              /* of the matrices multiplied with: all of them, but of experts those that a row chose, and of
                                        * a shortlist's logits its rows. Not the embedding, nor vectors such as norms */
    int64_t experts;                   /* of these: routed experts, once a layer and pass, chosen by however many rows */
    int64_t kv_rows;                   /* cached rows that rows attended to, raw and compressed, in all layers */
    int64_t index_rows;                /* compressed rows that the indexer scored to pick some of them */
} ds4_work;
/* Any thread, at any time; a pass at work counts as far as it has come. */
ds4_work ds4_engine_work(const ds4_engine *engine);

typedef struct {
    char name[128];                    /* as in the file, cut to 127 bytes */
    const char *type;                  /* "Q8_0", ... */
    int n_dims;
    int64_t dims[4];                   /* fastest first, as GGUF has them */
    int64_t bytes;
    bool head;                         /* from the head's file */
} ds4_tensor_info;
/* Tensors of the target's file, then of the head's. -1 when there is no tensor i. */
int ds4_engine_tensor(const ds4_engine *engine, int64_t i, ds4_tensor_info *out);
/* The value of a metadata key as text ("" and -1 if absent): name is the file's, "deepseek4.block_count". */
int ds4_engine_meta(const ds4_engine *engine, const char *key, char *out, size_t n);

/* ---- tokens and text ---- */

/* Ids of n bytes of text into out (at most cap); returns how many there are in all, which may exceed cap; -1 on failure.
 * Control tokens in the text are parsed only if `control`. No BOS is added. Works on bytes: invalid UTF-8 round-trips. */
int64_t ds4_tokenize(const ds4_engine *engine, const char *text, size_t n, bool control, int *out, size_t cap);
/* The same with one BOS before it (none if the vocabulary has none, or the text is parsed and begins with one). */
int64_t ds4_prompt(const ds4_engine *engine, const char *text, size_t n, bool control, int *out, size_t cap);
/* The bytes of a token; *n their count. NULL (and *n 0) for an id outside the vocabulary. Not NUL-terminated; a piece may
 * hold part of a UTF-8 character. */
const char *ds4_token_piece(const ds4_engine *engine, int token, size_t *n);
/* The id of the token with this exact text as the file writes it (control tokens are their own text), -1 if none. */
int ds4_token_id(const ds4_engine *engine, const char *text);
bool ds4_token_is_eos(const ds4_engine *engine, int token);

typedef struct {
    const char *role;                  /* "system", "user", "developer", "assistant", "tool" */
    const char *content;               /* UTF-8, never read as control tokens */
    const char *reasoning;             /* of an assistant turn, or NULL */
} ds4_message;
/* Renders messages as DeepSeek-V4's published template does, ready to be continued by the assistant. A base model takes the texts
 * after one BOS. Returns as ds4_tokenize does. */
int64_t ds4_chat(const ds4_engine *engine, const ds4_message *messages, size_t n, ds4_think think, int *out, size_t cap);

/* ---- session ---- */

/* A session with the engine's cfg, at position 0. NULL on failure. */
ds4_session *ds4_engine_open_session(ds4_engine *engine);
/* The same with room for `ctx` tokens, 1 to the engine's ctx. */
ds4_session *ds4_engine_open_session_ctx(ds4_engine *engine, int ctx);
void ds4_session_free(ds4_session *s);
/* An independent copy: every byte that a later token can read. */
ds4_session *ds4_session_fork(const ds4_session *s);

int ds4_session_position(const ds4_session *s);                 /* tokens committed */
int ds4_session_ctx(const ds4_session *s);                      /* most tokens it can hold */
const int *ds4_session_tokens(const ds4_session *s);            /* [position]; valid until the next call on s */

/* Evaluates n tokens at the session's position, in passes of at most prefill_chunk rows. 0, or -1: with a full context
 * nothing is evaluated; cancelled, or non-finite logits: the rows of earlier passes stay committed. */
int ds4_session_eval(ds4_session *s, const int *tokens, size_t n);
/* The same, and the logits of every row: out float32 [n, V]. */
int ds4_session_eval_logits(ds4_session *s, const int *tokens, size_t n, float *out);
/* The head's logits for rows from..to-1 into out float32 [to - from, V]: row q from the target's streams at q and the token
 * at q+1, its guess at the token at q+2. Needs a head, and rows the session can still rewind to. */
int ds4_session_head_logits(ds4_session *s, int from, int to, float *out);

/* The head's logits for the k tokens after `token`, which stands at the session's position, into out float32 [k, V]: each row
 * follows the one before by the token that the session's ds4_gen draws from it (greedy: the most likely one), as a step would
 * draft. Ids outside the shortlist (mtp_shortlist) get -FLT_MAX. Commits nothing.
 * Returns the rows made: fewer after a stop token and at the context's end, none at position 0, which has nothing to draft from. */
int ds4_session_draft(ds4_session *s, int token, int k, float *out);

/* Logits of the next token: float32 [V], valid until the next call on s. NULL at position 0 or on failure. */
const float *ds4_session_logits(ds4_session *s);
int ds4_session_argmax(ds4_session *s);                         /* ties: the lowest id; -1 on failure */
/* A draw by `gen` (NULL: the session's), without regard to the session's own. -1 on failure. */
int ds4_session_sample(ds4_session *s, const ds4_gen *gen);
typedef struct { int token; float logprob; } ds4_logprob;
/* The n most likely next tokens, best first, natural logarithms in float64 sums. Returns how many were written. */
int ds4_session_top_logprobs(ds4_session *s, int n, ds4_logprob *out);
/* Log-probability of one token as the next one; NAN on failure. */
double ds4_session_logprob(ds4_session *s, int token);

/* Goes back to a position. Allowed iff 0 <= position <= now and (position = 0 or it lies at most max_rewind below the highest
 * position ever committed). -1 otherwise, with nothing changed. */
int ds4_session_rewind(ds4_session *s, int position);
/* The lowest position above 0 that ds4_session_rewind accepts now. */
int ds4_session_rewind_floor(const ds4_session *s);

/* ---- generation ---- */

/* Stop tokens besides EOS (replaces the set). ignore_eos: EOS is a token like any other. */
int ds4_session_set_stops(ds4_session *s, const int *tokens, size_t n, bool ignore_eos);
bool ds4_session_is_stop(const ds4_session *s, int token);
/* Speculation of this session: draft 0 to DS4_MAX_DRAFT or DS4_DRAFT_AUTO (0: off; any other needs a head, lookup or another
 * drafter), margin 0 to 1000 or DS4_MARGIN_AUTO. Auto drafts as many tokens as measured times and acceptance say will pay, none
 * included. */
int ds4_session_set_mtp(ds4_session *s, int draft, float margin);
/* Prompt lookup: when the last tokens, `longest` (1 to 64) or fewer but at least 2 (of 1, that one), stand earlier in the session, what
 * followed them is drafted, as far as the draft depth goes; with a head, whichever is likelier to be accepted. 0: off. */
int ds4_session_set_lookup(ds4_session *s, int longest);
/* Whether the model's head drafts in this session; it does unless told otherwise. -1: there is none to turn on. */
int ds4_session_set_head(ds4_session *s, bool on);

/* How this session chooses tokens from now on, the next one too: copied, the bias list too. A token that rejection has drawn in a
 * refused draft's place stays if all is as it was when it was drawn and there is no mask. -1: refused, with the old one in force. */
int ds4_session_set_gen(ds4_session *s, const ds4_gen *gen);
/* The next token as the session's ds4_gen chooses it; the same until the session moves or its ds4_gen changes. -1 on failure. */
int ds4_session_next(ds4_session *s);

/* One cycle: evaluates `token` at the session's position together with drafts of what follows, and commits it and the
 * drafts that the session's ds4_gen chooses too (greedy: and that lead by the margin; the margin is greedy's alone). At most `max` tokens
 * (>= 1) are committed. out int [max or more]: what was committed, `token` first. Returns how many, -1 on failure. The next
 * token is ds4_session_next. Drafts never cross a stop token. */
int ds4_session_step(ds4_session *s, int token, int max, int *out);
/* The same with the caller's drafts [n], at most DS4_MAX_DRAFT, in place of the session's drafter. */
int ds4_session_verify(ds4_session *s, int token, const int *drafts, int n, int max, int *out);
/* The same with the caller's logits for the tokens after `token`, float32 [n, V], below infinity: drafts are drawn from them as the
 * session's ds4_gen says, with the noise that the target's tokens are drawn with, or by rejection judged by their law. Of
 * ds4_session_draft's rows it makes the step that ds4_session_step would make. */
int ds4_session_verify_logits(ds4_session *s, int token, const float *logits, int n, int max, int *out);
/* Keeps the first n (1 to all) of the tokens that the last step committed: the session, how far it can go back and its counters
 * are as if the step had committed no more. For who finds an end in the text of those tokens. -1 otherwise, nothing changed. */
int ds4_session_keep(ds4_session *s, int n);
/* Logits after the i-th token that the last step committed, float32 [V]; the last one's are ds4_session_logits. NULL for an i
 * the step did not commit, or after any other call that moves the session. */
const float *ds4_session_step_logits(ds4_session *s, int i);
/* Greedy whatever the session's ds4_gen says: evaluates `first` and runs cycles until `max` tokens, `first` included, are
 * committed, the context is full, or a stop token comes (it is not evaluated). Returns the next token, -1 only on failure; what
 * was committed is ds4_session_tokens. */
int ds4_session_eval_speculative_argmax(ds4_session *s, int first, int max);

/* ---- batches ---- */

/* A session's part of a pass. A step (max >= 1): tokens [1], as ds4_session_step. A prompt (max 0): tokens [n_tokens], of which
 * as many are evaluated as the pass has rows left. */
typedef struct {
    ds4_session *session;
    const int *tokens;
    int n_tokens;
    int max;
    int *out;                          /* [max] of a step, NULL for a prompt: what was committed */
    int n;                             /* out: how many tokens were committed; -1: failed, the session is as it was */
    ds4_error_kind kind;               /* out: of the error */
    char error[DS4_ERROR_BYTES];       /* out: the message if n is -1, else "" */
} ds4_batch_item;

/* One step of many sessions of one engine: drafts for all, verifies all their rows in one pass of the target, commits each by
 * itself. Each session, with its own draft depth, margin, ds4_gen and stops, gets the bits it would get alone. Steps
 * have rows before prompts, and drafts are cut when rows are short. Sessions join and leave between calls.
 * 0 (items may have failed, each by itself), -1 if the call is refused: no session moved. */
int ds4_batch_step(ds4_engine *engine, ds4_batch_item *items, int n);
/* The most rows of a pass, and so the most sessions of a batch: max(prefill_chunk, DS4_MAX_DRAFT + 1). */
int ds4_engine_batch_rows(const ds4_engine *engine);

/* Makes the session's running call end with an error after the pass in work, and every later one until
 * ds4_session_clear_cancel. Any thread; safe in a signal handler. */
void ds4_session_cancel(ds4_session *s);
/* Whether a cancel is waiting or ended the last call; cleared by ds4_session_clear_cancel. */
bool ds4_session_cancelled(const ds4_session *s);
void ds4_session_clear_cancel(ds4_session *s);

/* Counters since the session was opened or reset. accepted + corrections + bonus = emitted: each cycle that verified drafts
 * ends with one token of the target's own, a correction where a draft was refused, a bonus where none was. */
typedef struct {
    int64_t prompt_tokens;             /* rows of ds4_session_eval */
    int64_t emitted;                   /* tokens committed by steps */
    int64_t cycles;                    /* steps */
    int64_t passes;                    /* target passes, prompt included */
    int64_t head_passes;               /* passes of the head: draft steps and repairs */
    int64_t drafted[DS4_MAX_DRAFT], accepted[DS4_MAX_DRAFT];    /* by position in the cycle */
    int64_t lookup_drafted, lookup_accepted;                    /* of these, from lookups */
    int64_t pruned;                    /* drafts made and not verified: not worth a row */
    int64_t below_margin;              /* matches not committed because of the margin */
    int64_t corrections, bonus;
    double prompt_ms, draft_ms, verify_ms, repair_ms;           /* wall clock */
} ds4_stats;
ds4_stats ds4_session_stats(const ds4_session *s);
void ds4_session_reset_stats(ds4_session *s);

/* ---- save and load ---- */

/* Bytes of a snapshot of s now. */
size_t ds4_session_save_size(const ds4_session *s);
/* Writes a snapshot into buf (n bytes at least ds4_session_save_size). Returns the bytes written, 0 on failure. */
size_t ds4_session_save_mem(const ds4_session *s, void *buf, size_t n);
int ds4_session_load_mem(ds4_session *s, const void *buf, size_t n);
/* The same through a file: written beside it (a link's target), then renamed over it, with its mode. Loading refuses a snapshot of
 * another model, kv type or version, a damaged one, or one longer than the session's context, and leaves the session as it was. */
int ds4_session_save(const ds4_session *s, const char *path);
int ds4_session_load(ds4_session *s, const char *path);
/* Whether ds4_session_save could write there: what it needs beside `path` is made and removed. 0, or -1. */
int ds4_session_can_save(const char *path);

/* binding: end */

#ifdef __cplusplus
}
#endif
#endif
