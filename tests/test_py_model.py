"""Models by name, and speculation call by call: the same tokens as `generate`, whatever is drafted, committed and trimmed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import built  # noqa: F401 - builds the extension
import numpy as np
import pytest
from conftest import ROOT
from ds4 import ContextFull, InvalidArgument, LoadError, Model, RewindError, SamplerConfig, names, registry, sampling
from ds4.model import MTPCache, _sampling, hold, options_of

TINY = ROOT / "tests/data/tiny"
PROMPT = "And it came to pass"
LENGTH = 40


def no_repeats(ids: np.ndarray) -> np.ndarray:
    """A mask: not token 17, and no token twice in a row."""
    allowed = np.ones(2048, bool)
    allowed[[17, *ids[-1:]]] = False
    return allowed


CONFIGS = {
    "mask": SamplerConfig(speculative_depth=2, temperature=0.9, mask=no_repeats),
    "greedy": SamplerConfig(speculative_depth=2),
    "margin 0": SamplerConfig(speculative_depth=3, margin=0),
    "sampled": SamplerConfig(speculative_depth=2, temperature=1.5, top_k=50, seed=7),
    "rejection": SamplerConfig(speculative_depth=3, temperature=1.0, seed=3, scheme="rejection"),
    "rejection, filtered": SamplerConfig(
        speculative_depth=3, temperature=1.3, top_k=30, presence_penalty=1, seed=4, scheme="rejection"
    ),
    "penalties": SamplerConfig(
        speculative_depth=2, temperature=0.7, presence_penalty=3, frequency_penalty=2, logit_bias={5: 1.0}
    ),
}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model of whoever runs the tests."""
    monkeypatch.delenv("DS4_MODEL", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.from_pretrained("small", threads=1) as m:
        yield m


# ---- the documentation's calls ----


def test_documented_generate() -> None:
    """The issue's first block, but for a name that is not set up: the bundled pair answers, with a warning."""
    with pytest.warns(UserWarning, match="small bundled one"):
        model = Model.from_pretrained("deepseek_v4")
    sampler_cfg = SamplerConfig(speculative_depth=2)
    output = model.generate("Explain speculative decoding.", sampler_cfg=sampler_cfg, max_tokens=8)
    assert isinstance(output, str) and len(output.tokens) == 8
    model.close()


def test_documented_cycle(model: Model) -> None:
    """The second block as it stands, with both outcomes."""
    outcomes = set()
    input_ids = model.encode("The king of Israel said unto his servant")
    draft_cache = model.make_mtp_cache()
    for _ in range(30):
        draft_logits = model.mtp_forward(draft_cache, input_ids, depth=3)
        verified = model.mtp_update_cache(draft_cache, input_ids, draft_logits)
        if verified.accepted:
            model.commit(draft_cache)
        else:
            draft_cache.trim()
        outcomes.add(bool(verified.accepted))
        input_ids += verified.tokens
    assert outcomes == {True, False}


# ---- the same tokens as generate ----


def by_hand(model: Model, cache: MTPCache, ids: list[int], length: int, depth: int, *, commit: bool = True) -> int:
    """Appends at least `length` tokens to ids; returns the passes."""
    end, passes = len(ids) + length, 0
    while len(ids) < end:
        rows = model.mtp_forward(cache, ids, depth=depth)
        verified = model.mtp_update_cache(cache, ids, rows)
        passes += 1
        assert len(verified.tokens) == verified.accepted + 1
        if verified.accepted and commit:
            model.commit(cache)
            assert cache.position == len(ids) + verified.accepted
        else:
            cache.trim()
            assert cache.position == len(ids)
        ids += verified.tokens
        assert cache.tokens == ids[: cache.position]
    return passes


def by_steps(model: Model, config: SamplerConfig, prompt: list[int], length: int, depth: int) -> list[int]:
    """The same by `Session.step`, whose first drafts follow the prompt's last token too."""
    with model.engine.session() as s:
        s.eval(prompt[:-1])
        s.set_sampling(penalty_from=len(prompt), **_sampling(config))
        s.set_speculation(depth, config.margin)
        token = prompt[-1]
        while s.position < len(prompt) + length:
            s.step(token, depth + 1)
            token = s.next()
        return [*s.tokens[len(prompt) :], token]


@pytest.mark.parametrize("name", CONFIGS)
def test_loop_is_generate(model: Model, name: str) -> None:
    config = CONFIGS[name]
    prompt = model.encode(PROMPT)
    expected = model.generate(PROMPT, sampler_cfg=config, max_tokens=LENGTH).tokens
    plain = model.generate(PROMPT, sampler_cfg=replace(config, draft_core="none"), max_tokens=LENGTH).tokens
    assert expected == plain or config.scheme == "rejection"
    for depth, commit in ((0, True), (1, True), (3, True), (3, False), (16, True)):
        ids = list(prompt)
        with model.make_mtp_cache(config) as cache:
            passes = by_hand(model, cache, ids, LENGTH, depth, commit=commit)
            steps = by_steps(model, config, prompt, LENGTH, depth)
            assert ids[len(prompt) :][:LENGTH] == steps[:LENGTH], (depth, commit)
            assert steps[:LENGTH] == plain or (config.scheme == "rejection" and depth)
            assert name not in ("margin 0", "rejection", "sampled") or depth != 3 or passes < LENGTH * 0.7
            if commit:  # nothing is evaluated twice, the prompt's last token included
                assert cache.session.stats.prompt_tokens == len(prompt) - 1


def test_penalties_count_generated_tokens_only(model: Model) -> None:
    config = SamplerConfig(presence_penalty=100)
    out = model.generate(PROMPT, sampler_cfg=config, max_tokens=LENGTH)
    assert len(set(out.tokens)) == len(out.tokens)
    assert set(out.tokens) & set(model.encode(PROMPT)[1:])


@pytest.mark.parametrize("scheme", ["coupled", "rejection"])
@pytest.mark.parametrize("drafts", ["good", "bad", "certain"])
def test_the_law_of_hand_loops(scheme: str, drafts: str) -> None:
    """Counts of three tokens behind a prompt against the target's law, for drafts drawn from other laws; a coin says whether what was
    accepted is committed or trimmed."""
    config = SamplerConfig(temperature=1.0, top_k=3, margin=0, scheme=scheme)  # type: ignore[arg-type]
    rng, texts = np.random.default_rng(5), 1500
    with Model.from_pretrained(TINY / "target.gguf", TINY / "head-ds4.gguf", threads=1) as tiny, tiny.engine.session() as s:
        prompt, law = [*range(20, 30)], dict[tuple[int, ...], float]()
        after: dict[tuple[int, ...], np.ndarray] = {}
        for text in ((), *((a,) for a in range(256)), *((a, b) for a in range(256) for b in range(256))):
            if text and text not in law:
                continue
            hold(s, [*prompt, *text])
            after[text] = s.logits().astype(np.float64)
            p = sampling.law(after[text], config)
            law |= {(*text, int(t)): law.get(text, 1.0) * float(p[t]) for t in np.flatnonzero(p)}
        law = {text: p for text, p in law.items() if len(text) == 3}
        noise = {"good": 0.3, "bad": 3.0, "certain": 0.0}[drafts]
        guess = {text: z + noise * rng.standard_normal(256) for text, z in after.items()}
        if drafts == "certain":
            guess = {text: np.where(z == z.max(), 0.0, -np.inf) for text, z in guess.items()}
        counts, accepted = dict.fromkeys(law, 0), 0
        for seed in range(texts):
            with tiny.make_mtp_cache(replace(config, seed=seed), ctx=32) as cache:
                ids = list(prompt)
                while len(ids) < len(prompt) + 3:
                    done = tuple(ids[len(prompt) :])
                    follow = (*done, int(guess[done].argmax()))  # the second draft's law supposes that the first is this one
                    rows = [guess[t] for t in (done, follow) if t in guess]
                    verified = tiny.mtp_update_cache(cache, ids, np.array(rows))
                    accepted += verified.accepted
                    if rng.integers(2):
                        tiny.commit(cache)
                    else:
                        cache.trim()
                    ids += verified.tokens
                counts[tuple(ids[len(prompt) :][:3])] += 1
        assert accepted > texts / 10
        seen, want = np.array([*counts.values()]), texts * np.array([*law.values()])
        assert len(want) > 20 and abs(sum(law.values()) - 1) < 1e-9
        rare = want < 8
        seen, want = (np.append(a[~rare], a[rare].sum() + 1) for a in (seen, want))
        x, k = float(((seen - want) ** 2 / want).sum()), len(want) - 1
        assert x < k + 4 * (2 * k) ** 0.5 + 8, (x, k)


def test_any_drafts(model: Model) -> None:
    """Drafts from anywhere: right, wrong, half right; the accepted ones are the right beginning."""
    ids = model.encode(PROMPT)
    text = model.generate(PROMPT, sampler_cfg=SamplerConfig(speculative_depth=0, margin=0), max_tokens=30).tokens
    vocab = model.engine.info.vocab
    with model.make_mtp_cache(SamplerConfig(margin=0)) as cache:
        for right in range(4):
            drafts = [*text[:right], (text[right] + 1) % vocab, text[right + 1]]
            rows = np.zeros((len(drafts), vocab), np.float64)
            rows[np.arange(len(drafts)), drafts] = 1
            verified = model.mtp_update_cache(cache, ids, rows)
            assert verified.accepted == right and bool(verified.accepted) == (right > 0)
            assert verified.tokens == text[: right + 1]
            assert verified.logits.dtype == np.float32 and verified.logits.shape == (vocab,)
            assert int(verified.logits.argmax()) == verified.tokens[-1]
            cache.trim()
            assert cache.tokens == ids
        verified = model.mtp_update_cache(cache, ids, np.empty((0, vocab)))
        assert verified.accepted == 0 and verified.tokens == text[:1]


def test_texts_that_change(model: Model) -> None:
    """The longest common prefix is kept; a text that shares nothing, is shorter, or goes back further than max_rewind is right too."""
    a = model.engine.prompt("In the beginning God created the heaven and the earth. " * 8)
    texts = [a[:60], a[:59] + [7, 8, 9], a[:120], a[:30], a[:8] + [3] * 40, [5, 6], a[:100]]
    with model.make_mtp_cache() as cache:
        for text in texts:
            rows = model.mtp_forward(cache, np.array([text]), depth=2)
            with model.make_mtp_cache() as fresh:
                expected = model.mtp_forward(fresh, text, depth=2)
                assert np.array_equal(rows.view(np.int32), expected.view(np.int32))
                one, two = (model.mtp_update_cache(c, text, rows) for c in (cache, fresh))
            assert one.tokens == two.tokens and np.array_equal(one.logits.view(np.int32), two.logits.view(np.int32))
        before = cache.session.stats.prompt_tokens
        model.mtp_forward(cache, [*texts[-1], 4], depth=1)
        assert cache.session.stats.prompt_tokens == before  # the pass that verified has evaluated all but the new one


def test_first_row_is_the_heads_guess(model: Model) -> None:
    ids = model.encode(PROMPT)
    with model.make_mtp_cache() as cache, model.engine.session() as session:
        rows = model.mtp_forward(cache, ids, depth=4)
        assert rows.shape == (4, model.engine.info.vocab) and rows.dtype == np.float32
        session.eval(ids)
        assert np.array_equal(rows[0], session.head_logits(len(ids) - 2, len(ids) - 1)[0])
        assert model.mtp_forward(cache, ids, depth=0).shape == (0, model.engine.info.vocab)
        assert model.mtp_forward(cache, ids[:1], depth=4).shape == (0, model.engine.info.vocab)
        verified = model.mtp_update_cache(cache, ids[:1], rows)  # any drafts may be verified there, though
        assert verified.tokens


# ---- trim and commit ----


def test_trim(model: Model) -> None:
    ids = model.encode(PROMPT)
    with model.make_mtp_cache(CONFIGS["margin 0"]) as cache:
        by_hand(model, cache, ids, 30, 3)
        tokens = cache.tokens
        cache.trim(0)
        assert cache.tokens == tokens
        cache.trim(5)
        assert cache.tokens == tokens[:-5]
        with pytest.raises(InvalidArgument, match="n is -1"):
            cache.trim(-1)
        for n in (len(tokens), len(tokens) + 100):
            with pytest.raises(RewindError):
                cache.trim(n)
        assert cache.tokens == tokens[:-5]
        more = list(ids)
        by_hand(model, cache, more, 10, 3)
        assert more[: len(ids)] == ids


def test_trim_beyond_the_rewind_changes_nothing() -> None:
    with Model.from_pretrained(TINY / "target.gguf", mtp=TINY / "head-ds4.gguf", threads=1, max_rewind=4) as model:
        ids = list(range(30, 60))
        with model.make_mtp_cache() as cache:
            rows = model.mtp_forward(cache, ids, depth=2)
            verified = model.mtp_update_cache(cache, ids, rows)
            position, accepted = cache.position, verified.accepted
            snapshot = cache.session.snapshot()
            with pytest.raises(RewindError, match="max_rewind 4"):
                cache.trim(6)
            assert cache.position == position and cache.session.snapshot() == snapshot
            model.commit(cache)
            assert cache.position == position + accepted
            cache.trim(4 - accepted)
            assert cache.position == position + 2 * accepted - 4


def test_drafts_can_be_dropped_without_any_rewind() -> None:
    with Model.from_pretrained("small", threads=1, max_rewind=0) as model:
        ids = model.encode(PROMPT)
        expected = model.generate(ids, sampler_cfg=CONFIGS["margin 0"], max_tokens=LENGTH, stop="\n").tokens
        prompt = len(ids)
        with model.make_mtp_cache(CONFIGS["margin 0"]) as cache:
            by_hand(model, cache, ids, len(expected), 3, commit=False)
            assert ids[prompt:][: len(expected)] == expected


def test_uncommitted_drafts_do_not_count(model: Model) -> None:
    ids = model.encode(PROMPT)
    with model.make_mtp_cache(SamplerConfig(margin=0)) as cache:
        with pytest.raises(InvalidArgument, match="mtp_update_cache comes first"):
            model.commit(cache)
        verified = model.mtp_update_cache(cache, ids, model.mtp_forward(cache, ids, depth=3))
        assert verified.accepted and cache.position == len(ids) and cache.session.position == len(ids) + verified.accepted
        assert "not committed" in repr(cache)
        cache.trim(2)
        assert cache.position == cache.session.position == len(ids) - 2
        with pytest.raises(InvalidArgument, match="mtp_update_cache comes first"):
            model.commit(cache)


def test_wrong_arguments(model: Model) -> None:
    vocab = model.engine.info.vocab
    with model.make_mtp_cache(ctx=20) as cache:
        for call, error, message in (
            (lambda: model.mtp_forward(cache, [], depth=1), InvalidArgument, "input_ids is empty"),
            (lambda: model.mtp_forward(cache, [1, 2], depth=17), InvalidArgument, "depth is 17; expected 0 to 16"),
            (lambda: model.mtp_forward(cache, [1, vocab], depth=1), InvalidArgument, "outside the vocabulary"),
            (lambda: model.mtp_forward(cache, [vocab, 1], depth=1), InvalidArgument, "outside the vocabulary"),
            (lambda: model.mtp_forward(cache, [1] * 22, depth=1), ContextFull, "do not fit a context of 20"),
            (lambda: model.mtp_update_cache(cache, [1], np.zeros(vocab)), InvalidArgument, "draft_logits has shape"),
            (lambda: model.mtp_update_cache(cache, [1], np.zeros((17, vocab))), InvalidArgument, "draft_logits has shape"),
            (lambda: model.mtp_update_cache(cache, [1], np.full((1, vocab), np.nan)), InvalidArgument, "NaN"),
            (lambda: model.mtp_update_cache(cache, [1] * 21, np.zeros((1, vocab))), ContextFull, "context is full"),
        ):
            with pytest.raises(error, match=message):
                call()
        with pytest.raises(TypeError, match="expected a sequence of integers"):
            model.mtp_forward(cache, [1.5], depth=1)  # type: ignore[list-item]
        assert model.mtp_forward(cache, [1] * 16, depth=8).shape == (4, vocab)  # what the context holds
    with Model.from_pretrained(TINY / "target.gguf", mtp=False) as plain:
        assert not plain.engine.info.has_head
        with plain.make_mtp_cache() as cache, pytest.raises(InvalidArgument, match="no MTP head"):
            plain.mtp_forward(cache, [1, 2], depth=1)


# ---- who drafts ----


REPEATED = "Now these are the names of the men: Zaz, Buz, Uz. Now these are the names of the men: Zaz,"


@pytest.mark.parametrize("config", [SamplerConfig(margin=0), SamplerConfig(temperature=0.9, seed=3)], ids=["greedy", "sampled"])
def test_cores_and_depths_give_one_text(model: Model, config: SamplerConfig) -> None:
    """stock, lookup, both and none, fixed depths and auto: the same tokens; each by the drafts it is named for."""
    expected = model.generate(REPEATED, sampler_cfg=replace(config, draft_core="none"), max_tokens=LENGTH).tokens
    for core, depth, lookup in (
        ("stock", 3, 0),
        ("stock", "auto", 0),
        ("stock", 4, 6),
        ("lookup", 4, 0),
        ("lookup", "auto", 3),
    ):
        options = options_of(replace(config, draft_core=core, speculative_depth=depth, draft_lookup=lookup))  # type: ignore[arg-type]
        with model.engine.session() as session:
            options["max_tokens"] = LENGTH
            assert session.generate(model.encode(REPEATED), **options).tokens == expected, (core, depth)
            stats = session.stats
            assert stats.head_passes > 0 or core == "lookup" or depth == "auto"
            if core == "lookup":
                assert stats.head_passes == 0 and sum(stats.drafted) == stats.lookup_drafted
                assert stats.lookup_drafted > 0 or depth == "auto"
            elif not lookup:
                assert stats.lookup_drafted == 0
    with Model.from_pretrained("small", mtp=False, threads=1) as plain:
        own = replace(config, draft_core="lookup", speculative_depth=4)
        assert plain.generate(REPEATED, sampler_cfg=own, max_tokens=LENGTH).tokens == expected
        assert plain.generate(REPEATED, sampler_cfg=config, max_tokens=LENGTH).tokens == expected  # auto, and nobody to draft
        with pytest.raises(InvalidArgument, match="no MTP head is loaded"):
            plain.generate(REPEATED, sampler_cfg=replace(config, speculative_depth=2))


def test_a_session_changes_who_drafts(model: Model) -> None:
    with model.engine.session() as session:
        session.eval(model.encode(REPEATED))
        for core, head, looked in (
            ("stock", True, False),
            ("lookup", False, True),
            ("stock", True, False),
            ("none", False, False),
        ):
            session.set_speculation(4, 0, draft_core=core)
            session.reset_stats()
            fork = session.fork()
            for s in (session, fork):
                for _ in range(4):
                    s.step(s.next(), 8)
                assert (s.stats.head_passes > 0, s.stats.lookup_drafted > 0) == (head, looked), core
            assert fork.tokens == session.tokens
            session.rewind(session.position - 12)


# ---- registered cores ----


class Oracle:
    """Drafts a known text, with a wrong token at every third place."""

    text: list[int] = []

    def __init__(self, session: Any) -> None:
        self.session = session
        self.asked: list[int] = []

    def propose(self, token: int, k: int) -> list[int]:
        at = self.session.position + 1
        self.asked.append(at)
        return [t if (at + i) % 3 else (t + 1) % 2048 for i, t in enumerate(self.text[at : at + k])]


def test_a_draft_core_of_ones_own(model: Model) -> None:
    prompt = model.encode(PROMPT)
    for config in (SamplerConfig(margin=0), SamplerConfig(temperature=1.2, seed=3)):
        plain = model.generate(prompt, sampler_cfg=replace(config, draft_core="none"), max_tokens=LENGTH)
        Oracle.text = prompt + plain.tokens
        registry.register_draft_core("oracle", Oracle)
        try:
            own = replace(config, draft_core="oracle", speculative_depth=4)
            with model.engine.session() as session:
                out = session.generate(
                    prompt, draft_core="oracle", speculative_depth=4, margin=0, max_tokens=LENGTH, temperature=config.temperature,
                    seed=config.seed,
                )  # fmt: skip
                assert out.tokens == plain.tokens and session.stats.passes < LENGTH // 2
            assert model.generate(prompt, sampler_cfg=own, max_tokens=LENGTH).tokens == plain.tokens
        finally:
            registry.unregister("oracle")
        with pytest.raises(InvalidArgument, match="draft_core 'oracle' needs a number"):
            registry.register_draft_core("oracle", Oracle)
            try:
                model.engine.generate(prompt, draft_core="oracle", speculative_depth="auto")
            finally:
                registry.unregister("oracle")
    with pytest.raises(InvalidArgument, match="expected one of 'stock'"):
        model.engine.generate(prompt, draft_core="oracle")


# ---- names ----


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names.find("small")[0] == names.bundled() and names.bundled().model.is_file()
    with pytest.raises(LoadError, match=r"no model 'smal': neither a file nor one of small, deepseek_v4"):
        Model.from_pretrained("smal")
    with pytest.raises(LoadError, match="no such file"):
        Model.from_pretrained("smal.gguf")
    with pytest.raises(LoadError, match="no such file"):
        Model.from_pretrained(tmp_path / "x")
    with pytest.raises(LoadError, match="not a file"):
        Model.from_pretrained(tmp_path)
    entry, note = names.find("deepseek_v4")
    assert entry == names.bundled() and note is not None and "ds4py models add" in note
    names.add("deepseek_v4", TINY / "target.gguf", TINY / "head-ds4.gguf")
    names.add("other", TINY / "target.gguf")
    assert names.names() == ["small", "deepseek_v4", "other"]
    assert names.find("deepseek_v4") == (names.Entry(TINY / "target.gguf", TINY / "head-ds4.gguf"), None)
    with Model.from_pretrained("deepseek_v4") as m:
        assert m.engine.info.mtp_path == str(TINY / "head-ds4.gguf")
    monkeypatch.setenv("DS4_MODEL", str(ROOT / "models/small.gguf"))
    assert names.find("deepseek_v4")[0].model == ROOT / "models/small.gguf"
    monkeypatch.setenv("DS4_MODEL", "/none.gguf")
    with pytest.raises(LoadError, match=r"DS4_MODEL is /none.gguf"):
        names.find("deepseek_v4")
    for bad in ("small", "", "a b", "../x"):
        with pytest.raises(InvalidArgument, match="expected letters"):
            names.add(bad, TINY / "target.gguf")
    with pytest.raises(InvalidArgument, match="registered already"):
        names.add("other", TINY / "target.gguf")
    with pytest.raises(LoadError, match="no such file"):
        names.add("other", tmp_path / "none.gguf", replace=True)
    names.add("other", ROOT / "models/small.gguf", replace=True)
    names.remove("other")
    with pytest.raises(InvalidArgument, match="registered are: deepseek_v4"):
        names.remove("other")
    assert json.loads(names.store().read_text()).keys() == {"deepseek_v4"}
    assert [f.name for f in names.store().parent.iterdir()] == ["models.json"]
    for text in ("{", "[]", '{"a": 1}', '{"a": {"model": 3}}'):
        names.store().write_text(text)
        with pytest.raises(LoadError, match=r"models\.json"):
            names.find("other")


def test_a_head_is_found(tmp_path: Path) -> None:
    target, head = TINY / "target.gguf", TINY / "head-ds4.gguf"

    def mtp_of(file: Path, **options: Any) -> str:
        with Model.from_pretrained(file, **options) as m:
            return m.engine.info.mtp_path

    shutil.copy(target, tmp_path / "a.gguf")
    assert mtp_of(tmp_path / "a.gguf") == ""
    shutil.copy(ROOT / "models/small-mtp.gguf", tmp_path / "MTP-wrong.gguf")
    with pytest.warns(UserWarning, match=r"no head is used: .*MTP-wrong"):
        assert mtp_of(tmp_path / "a.gguf") == ""
    shutil.copy(head, tmp_path / "other-mtp.gguf")
    assert mtp_of(tmp_path / "a.gguf") == str(tmp_path / "other-mtp.gguf")
    shutil.copy(head, tmp_path / "a-mtp.gguf")
    assert mtp_of(tmp_path / "a.gguf") == str(tmp_path / "a-mtp.gguf")
    assert mtp_of(tmp_path / "a.gguf", mtp=False) == ""
    assert mtp_of(tmp_path / "a.gguf", mtp=head) == str(head)
    with pytest.raises(LoadError):
        Model.from_pretrained(tmp_path / "a.gguf", mtp=ROOT / "models/small-mtp.gguf")
    combined = ROOT / "tests/data/edge/combined.gguf"
    assert mtp_of(combined) == str(combined)
