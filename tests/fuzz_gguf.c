/* libFuzzer target of sections 3 and 6: whole files, opened as a target or as a target and its head, and a few tokens through
 * whatever opens. `make fuzz` runs it.
 *
 * Input: a byte of options, one for the request to the system that fails, then the target; with a head, 4 bytes that say how
 * long the target is, the target and the head. */
#include "../ds4.c"

#include <sys/mman.h>

enum { WITH_HEAD = 1, INTERNAL = 2, IDS_ONLY = 4, KV_FP8 = 8, KV_F32 = 16, SCALAR = 32, LONG_CONTEXT = 64 };

static void must(bool holds) {
    if (!holds) abort();
}

/* A failure leaves a message, which is one line. */
static void must_fail_well(void) { must(*last_error && !strpbrk(last_error, "\n\r\t")); }

/* Files that live in memory: the target's and the head's. */
static char paths[2][32];
static int files[2];

static void write_file(int which, const uint8_t *data, size_t n) {
    must(ftruncate(files[which], 0) == 0 && pwrite(files[which], data, n, 0) == (ssize_t)n);
}

static void use(ds4_engine *e, bool has_head) {
    ds4_info info = ds4_engine_info(e);
    ds4_session *s = ds4_engine_open_session(e);
    int tokens[3] = {0, info.vocab / 2, info.vocab - 1}, out[4];
    if (!s) {
        must_fail_well();
        return;
    }
    int rc = ds4_session_eval(s, tokens, info.ctx < 3 ? (size_t)info.ctx : 3);
    if (!rc && has_head) rc = ds4_session_set_mtp(s, 2, 0);
    if (!rc && ds4_session_position(s) < info.ctx) rc = ds4_session_step(s, tokens[1], 3, out) < 0 ? -1 : 0;
    if (!rc) rc = ds4_session_argmax(s) < 0 ? -1 : 0;
    if (rc) must_fail_well();
    ds4_session *copy = ds4_session_fork(s);
    if (copy) must(ds4_session_position(copy) == ds4_session_position(s));
    if (ds4_tokenize(e, "Ab <think> 12", 13, true, out, 4) < 0) must_fail_well();
    ds4_tensor_info t;
    for (int64_t i = 0; ds4_engine_tensor(e, i, &t) == 0; i++) must(*t.type);
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    for (int i = 0; i < 2; i++) {
        files[i] = memfd_create("fuzz", MFD_CLOEXEC);
        must(files[i] >= 0);
        snprintf(paths[i], sizeof paths[i], "/proc/self/fd/%d", files[i]);
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 6) return 0;
    int options = data[0], failing = data[1];
    uint32_t first = (uint32_t)(size - 2);
    const uint8_t *target = data + 2;
    if (options & WITH_HEAD) {
        memcpy(&first, target, 4);
        target += 4;
        first %= (uint32_t)(size - 5);
        write_file(1, target + first, size - 6 - first);
    }
    write_file(0, target, first);
    ds4_cfg cfg = ds4_default_cfg();
    cfg.model_path = paths[0];
    cfg.mtp_path = options & WITH_HEAD ? paths[1] : NULL;
    cfg.mtp_internal = !cfg.mtp_path && options & INTERNAL;
    cfg.raw_vocab_ok = options & IDS_ONLY;
    cfg.kv_type = options & KV_FP8 ? DS4_KV_FP8 : options & KV_F32 ? DS4_KV_F32 : DS4_KV_F16;
    cfg.isa = options & SCALAR ? "scalar" : NULL;
    cfg.ctx = options & LONG_CONTEXT ? 0 : 16;
    cfg.threads = 1;
    cfg.prefill_chunk = 4;
    cfg.max_rewind = 4;
    set_error(DS4_OK, "%s", "");
    atomic_store(&fault_countdown, failing < 128 ? -1 : failing - 128);
    ds4_engine *e = ds4_engine_new(&cfg);
    if (e) use(e, cfg.mtp_path || cfg.mtp_internal);
    else must_fail_well();
    ds4_engine_free(e);
    atomic_store(&fault_countdown, -1);
    must(atomic_load(&blocks_held) == 0);
    return 0;
}
