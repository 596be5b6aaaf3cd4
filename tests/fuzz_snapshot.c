/* libFuzzer target of the snapshot loader, on the least of the test models; run from the project's directory, as `make fuzz` does.
 *
 * Input: a byte of options, then bytes of a snapshot; or (PATCH) a position and patches of a good snapshot at it: offset, value. With
 * SEAL the header is made to fit the bytes and the checksum is right, so that what is behind it is reached. The session is at
 * position 0 or 9; after a refusal it goes on only with GO_ON, for that takes most of the time.
 *
 * What holds: a refused snapshot leaves the session as it was, byte for byte; one that is accepted leaves a session that goes on
 * (or says that its logits are not finite); and after a good one is loaded everything is as it should be. */
#include "../ds4.c"

enum { SEAL = 1, PATCH = 2, GO_ON = 16, MOST = 40, ROOM = 1 << 16 };

static ds4_engine *engine;
static ds4_session *session;
static uint8_t *good[MOST + 1]; /* snapshots at each position */
static size_t good_bytes[MOST + 1];
static uint64_t good_next;      /* checksum of the logits after one more token, from position 9 */
static uint8_t now[ROOM], changed[ROOM];

static void must(bool holds) {
    if (!holds) abort();
}

static uint64_t next_logits(void) {
    int token = 7;
    must(!ds4_session_eval(session, &token, 1));
    return checksum(0, ds4_session_logits(session), (size_t)ds4_engine_info(engine).vocab * sizeof(float));
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    ds4_cfg cfg = ds4_default_cfg();
    cfg.model_path = "tests/data/least/target.gguf";
    cfg.mtp_path = "tests/data/least/head-ds4.gguf";
    cfg.ctx = MOST;
    cfg.prefill_chunk = 4;
    cfg.max_rewind = 4;
    cfg.threads = 1;
    engine = ds4_engine_new(&cfg);
    session = engine ? ds4_engine_open_session(engine) : NULL;
    if (!session) fprintf(stderr, "%s\n", ds4_last_error());
    must(session);
    for (int i = 0; i <= MOST; i++) {
        good_bytes[i] = ds4_session_save_size(session);
        must(good_bytes[i] <= ROOM && (good[i] = malloc(good_bytes[i])) && ds4_session_save_mem(session, good[i], good_bytes[i]) == good_bytes[i]);
        int token = (3 + i * 5) % ds4_engine_info(engine).vocab;
        if (i < MOST) must(!ds4_session_eval(session, &token, 1));
    }
    must(!ds4_session_load_mem(session, good[9], good_bytes[9]));
    good_next = next_logits();
    return 0;
}

/* The snapshot that the input describes, in `changed`. */
static size_t make_snapshot(const uint8_t *data, size_t size, int options) {
    size_t n = size < ROOM ? size : ROOM;
    if (options & PATCH) {
        int position = size ? data[0] % (MOST + 1) : 0;
        n = good_bytes[position];
        memcpy(changed, good[position], n);
        for (size_t i = 1; i + 4 <= size; i += 4) changed[(data[i] | data[i + 1] << 8 | data[i + 2] << 16) % n] = data[i + 3];
    } else memcpy(changed, data, n);
    snapshot_header h;
    if (!(options & SEAL) || n < sizeof h) return n;
    memcpy(&h, changed, sizeof h);
    memcpy(h.magic, snapshot_magic, sizeof h.magic);
    h.identity = engine->model->identity;
    h.bytes = n;
    h.kv_type = (int32_t)engine->kv_type;
    h.sum = checksum(checksum(h.identity ^ h.bytes, &h.kv_type, CHECKED_HEADER), changed + sizeof h, n - sizeof h);
    memcpy(changed, &h, sizeof h);
    return n;
}

static void go_on(void) {
    int token = 1, out[4];
    size_t n = ds4_session_save_size(session);
    must(n <= ROOM && ds4_session_save_mem(session, now, n) == n);
    for (int i = 0; i < ds4_session_position(session); i++) must(ds4_session_tokens(session)[i] >= 0);
    set_error(DS4_OK, "%s", "");
    if (ds4_session_position(session) && !ds4_session_logits(session)) must(*last_error);
    if (ds4_session_set_mtp(session, 2, 0) || ds4_session_step(session, token, 3, out) < 0) must(*last_error);
    int floor = ds4_session_rewind_floor(session);
    if (floor <= ds4_session_position(session)) must(!ds4_session_rewind(session, floor));
    if (ds4_session_eval(session, &token, 1)) must(*last_error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return 0;
    int start = data[0] >> 2 & 3 ? 9 : 0;
    must(!ds4_session_load_mem(session, good[start], good_bytes[start]));
    size_t n = make_snapshot(data + 1, size - 1, data[0]);
    set_error(DS4_OK, "%s", "");
    if (ds4_session_load_mem(session, changed, n)) {
        must(*last_error && ds4_session_position(session) == start);
        must(ds4_session_save_mem(session, now, ROOM) == good_bytes[start] && !memcmp(now, good[start], good_bytes[start]));
        if (!(data[0] & GO_ON)) return 0;
    }
    go_on();
    must(!ds4_session_load_mem(session, good[9], good_bytes[9]) && next_logits() == good_next);
    return 0;
}
