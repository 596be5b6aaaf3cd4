"""Tests of the tests: faults planted in the engine must be caught by the tests that are there for them.

A mutant is a line of ds4.c and what stands there instead. All of them are built into one library, which does as ds4.c does
until a mutant's number is set; each is checked alone, in a process of its own, by the checks of test_state.py in small; those of
`auto` and of lookups, which change no text, by tests of theirs. A line that is no longer there fails too: then the mutant has to follow
the code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DOT = "float_dot_from(type, {n}, {start}, w + (size_t)o * w_stride, x->f[j], {acc})"

# name: (the line, what it becomes): both expressions, or (with a semicolon at the end) both statements.
MUTANTS = {
    "none": ("", ""),
    "stale compressed row": (
        "(j->p->rows[r].position + 1) % j->p->l->ratio == 0",
        "(j->p->rows[r].position + 1) % j->p->l->ratio == 0 && j->p->rows[r].position >= j->p->rows[r].s->written",
    ),
    "rejected raw row kept": (
        "kv_store(e->dev.k, c, e->kv_type, kv, to->raw + (size_t)(p->rows[r].position % to->ring) * e->sizes.kv_row);",
        "if (p->rows[r].position >= p->rows[r].s->written) "
        "kv_store(e->dev.k, c, e->kv_type, kv, to->raw + (size_t)(p->rows[r].position % to->ring) * e->sizes.kv_row);",
    ),
    "raw ring a slot off": (
        "kv_store(e->dev.k, c, e->kv_type, kv, to->raw + (size_t)(p->rows[r].position % to->ring) * e->sizes.kv_row);",
        "kv_store(e->dev.k, c, e->kv_type, kv, to->raw + (size_t)((p->rows[r].position + (r > 2)) % to->ring) * e->sizes.kv_row);",
    ),
    # Its last row is needed only after a pass of the most rows that committed none of them.
    "raw ring one row short": ("out.ring = out.need + slack;", "out.ring = out.need + slack - 1;"),
    "compressor ring a slot off": (
        "p->rows[r].position % to->comp_ring * stride",
        "(p->rows[r].position + (r > 0)) % to->comp_ring * stride",
    ),
    "compressor ring too short": ("ratio == 4 ? 2 * ratio - 1 : ratio - 1", "ratio - 1"),
    "index ring not rewound": (
        """memcpy(to_kv, kv + r * stride, (size_t)stride * sizeof *kv);
        for (int64_t i = 0; i < stride; i++) to_gate[i] = gate[r * stride + i] + ape[i];""",
        """if (index && p->rows[r].position < p->rows[r].s->written) continue;
        memcpy(to_kv, kv + r * stride, (size_t)stride * sizeof *kv);
        for (int64_t i = 0; i < stride; i++) to_gate[i] = gate[r * stride + i] + ape[i];""",
    ),
    "head row left from drafting": ("s->head_to = min_int(s->head_to, max_int(0, s->position - 1));", "(void)0;"),
    "head rows not made for accepted drafts": (
        "if (s->head_to < to) head_rows(s, s->head_to, to, NULL);",
        "if (s->head_to < to - 2) head_rows(s, s->head_to, to, NULL);",
    ),
    "windows counted from the pass": (
        "(p->rows[r].position + 1) / p->l->ratio",
        "(p->rows[p->n - 1].position + 1) / p->l->ratio",
    ),
    "a norm that depends on the row count": (
        "rms_norm(k, c->dim, y, j->norm, c->norm_eps, y);",
        "rms_norm(k, c->dim, y, j->norm, c->norm_eps * (j->p->n > 1 ? 1.001f : 1.0f), y);",
    ),
    "a kernel whose sum depends on the row count": (
        DOT.format(n="n", start="0", acc="acc"),
        f"m > 1 ? {DOT.format(n='n / 2', start='0', acc='acc')} + {DOT.format(n='n', start='n / 2', acc='(float[LANES]){0}')}"
        f" : {DOT.format(n='n', start='0', acc='acc')}",
    ),
    "accepts what does not match": ("match && !low", "!low"),
    "accepts the second best": (
        "verdict(c, i, c->drafts[i])",
        "lead_of(k, V, z, c->drafts[i]) > -0.5f ? c->drafts[i] : verdict(c, i, c->drafts[i])",
    ),
    "head without history after a pause": (
        "if (!joined) s->head_from = s->head_to = need;",
        "if (!joined) s->head_from = s->head_to = to;",
    ),
    "floor left behind a kept part of a step": ("s->floor = s->step_floor;", "(void)0;"),
    "tokens taken back left in the penalties": (
        "if (s->by.counts) count_to(s, &s->by, min_int(s->by.counted, s->position));",
        "if (s->by.counts) count_to(s, &s->by, s->by.counted);",
    ),
    "a draft's draw from another position": (
        "choose(s, c->by, z, position, FOR_TOKEN)",
        "choose(s, c->by, z, position + (i > 0), FOR_TOKEN)",
    ),
    "snapshot a row short": (
        "walk_ring(w, k->kv, k->comp_ring, channels, floor - k->comp_need, position);",
        "walk_ring(w, k->kv, k->comp_ring, channels, floor - k->comp_need + 1, position);",
    ),
    "logits of another session of the batch": (
        "memcpy(c->s->logits, out, count * V * sizeof *out);",
        "memcpy(c->s->logits, i ? out - V : out, count * V * sizeof *out);",
    ),
    "streams not kept": (
        "memcpy(session_streams(p->rows[r].s, p->rows[r].position), p->e->s.x + (size_t)r * streams, streams * sizeof(float));",
        "if (r == 0) "
        "memcpy(session_streams(p->rows[r].s, p->rows[r].position), p->e->s.x + (size_t)r * streams, streams * sizeof(float));",
    ),
}

AUTO_MUTANTS = {
    "none of auto": ("", ""),
    "auto: trials without bounds": ("p->debt + ms / w->pass[0] < PACE_DEBT", "true"),
    "auto: trials that nobody pays": ("p->debt = d_max(0, p->debt + ms / w->pass[0]);", "p->debt = 0;"),
    "auto: no trials": ("p->debt + ms / w->pass[0] < PACE_DEBT", "false"),
    "auto: misses taken for hits": ("records_add(&p->place[i], 1, 0, hit);", "records_add(&p->place[i], 1, 0, true);"),
    "auto: changes not noticed": ("p->worse < 3.5 && p->better < 3.5", "true"),
    "auto: verifies all it drafts": ("net <= best", "false"),
    "auto: never trusts a lead": ("isnan(lead)", "true"),
    "auto: a disturbed pass believed for long": ("n < COST_TRUSTED ? COST_DOUBTED : COST_FRESH", "COST_FRESH"),
    "auto: forgets what it measured": ("n < COST_TRUSTED ? COST_DOUBTED : COST_FRESH", "COST_DOUBTED"),
}

# Lookups change no text, so plain decoding does not tell: each of these must fail the tests of test_lookup.py that it names.
LOOKUP: dict[str, tuple[str, str, str]] = {
    "no lookup mutant": ("", "", ""),
    "n-grams of the token before": (
        "lookup_slot(l, tokens, p, tokens[p])",
        "lookup_slot(l, tokens, p, tokens[p - 1])",
        "index",
    ),
    "a chain not taken back": (
        "if (l->slot[p] >= 0) l->table[l->slot[p]] = l->before[p];",
        "if (l->slot[p] >= 0) l->table[l->slot[p]] = 0;",
        "index",
    ),
    "the oldest of equal matches": (
        "if (length < l->least || length <= best) continue;",
        "if (length < l->least || length < best) continue;",
        "index",
    ),
    "matches shorter than they may be": (
        "if (length < l->least || length <= best) continue;",
        "if (length <= best) continue;",
        "collisions",
    ),
    "matches longer than asked for": (
        "while (length && length < l->longest && length <= p && tokens[p - length] == tokens[n - length]) length++;",
        "while (length && length <= l->longest && length <= p && tokens[p - length] == tokens[n - length]) length++;",
        "index",
    ),
    "what matched, not what followed": ("*next = p + 1;", "*next = p;", "index long_texts periods what_is_drafted"),
    "a guess that does not go on": ("out[next - l->n - 1]", "last", "index periods"),
    "the index left at a rewind": (
        "if (s->lookup) lookup_drop(s->lookup, s->position);",
        "(void)0;",
        "what_is_drafted",
    ),
    "the index left at a load": ("if (s->lookup) lookup_drop(s->lookup, 0);", "(void)0;", "what_is_drafted"),
    "the newest token not indexed": (
        "lookup_add(s->lookup, s->tokens, s->position);",
        "lookup_add(s->lookup, s->tokens, s->position - 1);",
        "what_is_drafted",
    ),
    "guesses beyond a stop token": (
        "c->guesses < c->room && !ds4_session_is_stop(s, c->guess[c->guesses])",
        "c->guesses < c->room",
        "what_is_drafted",
    ),
    "a fork without lookups": (
        "!ds4_session_set_lookup(copy, s->lookup ? s->lookup->longest : 0)",
        "true",
        "what_is_drafted",
    ),
    "the less likely drafts": (
        "lookup_chance(s->pace, c->match, 0) > c->w.place[0]",
        "lookup_chance(s->pace, c->match, 0) <= c->w.place[0]",
        "the_likelier_drafts",
    ),
    "lookups that never learn": (
        "records_add(p->match[i > 0], PACE_MATCHES, match_class(length), i < hits);",
        "records_add(p->match[i > 0], PACE_MATCHES, match_class(length), true);",
        "lookups_that_are_refused",
    ),
    "drafts counted that were only guessed": (
        "s->stats.lookup_accepted += taken;",
        "s->stats.lookup_accepted += c->guesses;",
        "the_text_is_plain",
    ),
    "accepted drafts counted that were given back": (
        "if (s->step_lookup) s->stats.lookup_accepted -= dropped;",
        "(void)0;",
        "a_step_that_is_cut_short",
    ),
    "lookups that stay when turned off": (
        "lookup_free(s->lookup);\n    s->lookup = l;",
        "if (l) { lookup_free(s->lookup); s->lookup = l; }",
        "work_is_saved",
    ),
}

# What runs against a lookup mutant: the tests that it names, or all of them against none.
LOOKUP_CHECK = """
import sys
sys.path[:0] = [{tests!r}, {python!r}]
import conftest
from pathlib import Path
conftest.make = lambda target: Path({library!r})
import engine, test_lookup
engine.ffi.cdef("extern int hook_mutant;")
engine.lib.hook_mutant = {number}
data = Path({tests!r}) / "data"
arguments = {{"what_is_drafted": (3,), "the_text_is_plain": (data, "tiny"), "work_is_saved": (data,),
             "a_step_that_is_cut_short": (data,)}}
names = {names!r}.split() or ["index", "collisions", "long_texts", "periods", "the_likelier_drafts", "lookups_that_are_refused", *arguments]
for name in names:
    try:
        getattr(test_lookup, "test_" + name)(*arguments.get(name, ()))
        print(name, "passed")
    except Exception:
        print(name, "failed")
"""

# What runs against a mutant, in a process of its own. The depths and places are few: a fault that shows only by luck would
# have to be caught by the full tests.
CHECK = """
import sys, tempfile
sys.path[:0] = [{tests!r}, {python!r}]
import conftest
from pathlib import Path
conftest.make = lambda target: Path({library!r})
import numpy as np
import engine, test_state
engine.ffi.cdef("extern int hook_mutant;")
engine.lib.hook_mutant = {number}
data = Path({tests!r}) / "data"
for name in ("tiny", "odd"):
    text = test_state.Text(data, name)
    with engine.Engine(*text.files, prefill_chunk=17, max_rewind=30, ctx=1024, isa={isa!r}) as e:
        fast, plain = text.session(e, 41), text.session(e, 41)
        fast.set_mtp(5, 0)
        plain.set_mtp(0, 0)
        order = np.random.default_rng(1).integers(0, 6, 400).tolist()
        while fast.position < 230:
            test_state.cycles(fast, plain, text, [order.pop()], 5)
        for place in range(5):      # the longest pass, all but one of its rows refused, then back as far as may be
            fast.set_mtp(16, 0)
            cycle = fast.position
            test_state.cycles(fast, plain, text, [0], 16)
            far = plain.fork()
            for s in (fast, far):
                s.rewind(cycle + 1 - 30)
                s.set_mtp(0, 0)
                assert s.generate(12 + place) == text.tokens[cycle + 1 - 30 : cycle - 17 + place].tolist()
            assert np.array_equal(fast.logits(), far.logits())
            other = text.session(e, cycle - 17 + place)
            assert np.array_equal(fast.logits(), other.logits())
            fast.eval(text.tokens[fast.position : cycle + 1])
            test_state.same(fast, plain, text)
        own = text.session(e, 60)
        own.set_mtp(3, 0)       # the head's own drafts, mostly wrong
        got = own.generate(120)
        assert got == text.tokens[60:180].tolist()
        plain = text.session(e, 180)
        assert np.array_equal(own.head_logits(150, 179), plain.head_logits(150, 179))
        own.rewind(170)             # and on with another text: the head row of 169 was made for the old token at 170
        other = text.session(e, 170)
        for s in (own, other):
            s.eval([7, 9, 11])
        assert np.array_equal(own.head_logits(171, 172), other.head_logits(171, 172))
        said, fresh = text.session(e, 60), text.session(e, 60)
        for s in (said, fresh):
            s.set_mtp(0, 0)
            s.set_gen(temperature=0, frequency_penalty=9, penalty_from=60)
        for _ in range(8):
            said.step(said.next(), 1)
        said.next()
        said.rewind(60)             # what was taken back counts no more
        for s in (said, fresh):
            s.eval([7, 9, 11])
        for _ in range(30):
            assert said.next() == fresh.next()
            for s in (said, fresh):
                s.step(s.next(), 1)
        near = text.session(e, 60)
        near.set_mtp(2, 0)
        for _ in range(20):     # a runner-up is no match
            z = near.logits()
            best, second = np.argsort(-z)[:2].tolist()
            script = text.tokens.copy()
            after = near.fork()
            after.step(best, 1)
            script[near.position + 1] = int(np.argsort(-after.logits())[1])
            near.script(script)
            near.step(best, 3)
            assert near.tokens == text.tokens[: near.position].tolist()
    with tempfile.TemporaryDirectory() as tmp:
        test_state.failed_pass(text, Path(tmp))
    options = dict(max_rewind=30, ctx=1024, isa={isa!r})
    with engine.Engine(*text.files, prefill_chunk=17, **options) as a, engine.Engine(*text.files, prefill_chunk=64, **options) as b:
        test_state.Pair([a, b], 1).run(120)
print("all equal")
"""

AUTO_CHECK = """
import sys
sys.path[:0] = [{tests!r}, {python!r}]
import conftest
from pathlib import Path
conftest.make = lambda target: Path({library!r})
import engine, test_auto
engine.ffi.cdef("extern int hook_mutant;")
engine.lib.hook_mutant = {number}
test_auto.test_costs()
test_auto.test_the_lead_prunes()
for machine in test_auto.MACHINES:
    test_auto.test_what_a_wrong_head_costs(machine, True)
    test_auto.test_it_comes_back(machine)
print("all equal")
"""


def planted(source: str) -> str:
    """ds4.c with every mutant in it, each behind its number."""
    by_line: dict[str, list[tuple[int, str]]] = {}
    for number, (old, new, *_) in enumerate(ALL.values()):
        if old:
            by_line.setdefault(old, []).append((number, new))
    for old, mutants in by_line.items():
        if source.count(old) != 1:
            continue
        text = old if old.endswith(";") else f"({old})"
        for number, new in mutants:
            if old.endswith(";"):
                text = f"if (hook_mutant == {number}) {{ {new} }} else {{ {text} }}"
            else:
                text = f"(hook_mutant == {number} ? ({new}) : {text})"
        source = source.replace(old, text)
    return "int hook_mutant;\n" + source


ALL = MUTANTS | AUTO_MUTANTS | LOOKUP


@pytest.fixture(scope="module")
def library(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine and the tests' hooks, with the mutants."""
    tmp = tmp_path_factory.mktemp("mutants")
    (tmp / "ds4.c").write_text(planted((root / "ds4.c").read_text()))
    (tmp / "tests").mkdir()
    for path in (*root.glob("ds4*.inc"), root / "ds4.h"):
        (tmp / path.name).symlink_to(path)
    for path in (*root.glob("tests/*.inc"), root / "tests/hooks.c"):
        (tmp / "tests" / path.name).write_bytes(path.read_bytes())
    flags = ["-O2", "-w", "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
    command = [os.environ.get("CC", "cc"), *flags, str(tmp / "tests/hooks.c"), "-o", str(tmp / "hooks.so"), "-lm"]
    subprocess.run(command, check=True)
    return tmp / "hooks.so"


@pytest.mark.parametrize("name", [*MUTANTS, *AUTO_MUTANTS])
def test_mutant_is_caught(root: Path, library: Path, name: str) -> None:
    line = ALL[name][0]
    assert not line or (root / "ds4.c").read_text().count(line) == 1, f"gone or not unique: {line}"
    code = (AUTO_CHECK if name in AUTO_MUTANTS else CHECK).format(
        tests=str(root / "tests"),
        python=str(root / "python"),
        library=str(library),
        number=list(ALL).index(name),
        isa="scalar" if "kernel" in name else "auto",
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    if name.startswith("none"):
        assert done.returncode == 0 and "all equal" in done.stdout, done.stderr
    else:
        assert done.returncode != 0, f"nothing noticed: {name}"
        assert "AssertionError" in done.stderr or "engine.Failed: non-finite" in done.stderr, done.stderr


@pytest.mark.parametrize("name", LOOKUP)
def test_lookup_mutant_is_caught(root: Path, library: Path, name: str) -> None:
    line, _, names = LOOKUP[name]
    assert not line or (root / "ds4.c").read_text().count(line) == 1, f"gone or not unique: {line}"
    code = LOOKUP_CHECK.format(
        tests=str(root / "tests"),
        python=str(root / "python"),
        library=str(library),
        number=list(ALL).index(name),
        names=names,
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    verdicts = dict(line.split() for line in done.stdout.splitlines())
    if line:
        assert verdicts == dict.fromkeys(names.split(), "failed"), done.stdout + done.stderr
    else:
        assert len(verdicts) == 10 and set(verdicts.values()) == {"passed"}, done.stdout + done.stderr
