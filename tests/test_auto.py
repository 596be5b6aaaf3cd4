"""The depth that pays: the controller in worlds of its own, and in the engine, where it never changes the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import Engine, Failed, Session, batch_step, bits, ffi, lib
from fixtures import anti_head

AUTO, MOST = -1, 16
Drafts = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]

# ---------------------------------------------------------------- the controller alone


@dataclass
class Machine:
    """Milliseconds of passes by rows, of a cycle's first head step and of each further one."""

    passes: list[float]
    first: float
    more: float

    def cycle(self, made: int, verified: int) -> float:
        return self.passes[verified] + (self.first + (made - 1) * self.more if made else 0)


SMALL = Machine([1.49, 2.03, 2.92, 3.33, 3.55, 3.9, 4.3, 4.7, 4.97, *(5.4 + 0.4 * i for i in range(8))], 0.2, 0.13)
LARGE = Machine([100 + 6.0 * i for i in range(17)], 2, 2)
EXPERTS = Machine([100 + 35.0 * i for i in range(17)], 2, 2)
MACHINES = [SMALL, LARGE, EXPERTS]


def never(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Confident and always wrong."""
    return rng.exponential(4, MOST), np.zeros(MOST, bool)


def always(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.exponential(4, MOST), np.ones(MOST, bool)


def flat(p: float) -> Drafts:
    """No leads; each draft right with the same probability."""
    return lambda rng: (np.full(MOST, np.nan), rng.random(MOST) < p)


def honest(mean: float, bias: float) -> Drafts:
    """Leads that say how sure to be."""

    def drafts(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        leads = rng.exponential(mean, MOST)
        return leads, rng.random(MOST) < 1 / (1 + np.exp(bias - leads))

    return drafts


class World:
    """A controller on a machine; counts what it spends and what each fixed depth would have spent on the same drafts."""

    def __init__(self, machine: Machine, seed: int = 0, noise: float = 0, known: bool = False) -> None:
        self.p: Any = ffi.gc(lib.hook_pace_new(), lib.hook_pace_free)
        self.machine, self.noise = machine, noise
        self.rng, self.disturbance = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
        self.clear()
        for _ in range(5 if known else 0):
            for rows, ms in enumerate(machine.passes):
                self.time(1 + rows, ms)
            for slot, ms in ((0, machine.first), (-2, machine.first), (-1, machine.more)):
                self.time(slot, ms)

    def clear(self) -> None:
        self.tokens, self.ms = 0, 0.0
        self.fixed = {d: [0, 0.0] for d in range(9)}
        self.depths: list[int] = []
        self.made: list[int] = []

    def time(self, slot: int, ms: float) -> None:
        if self.noise:
            ms *= np.exp(self.noise * self.disturbance.standard_normal()) * (3 if self.disturbance.random() < 0.03 else 1)
        lib.hook_pace_cost(self.p, slot, ms)

    def cycle(self, drafts: Drafts) -> None:
        leads, hits = drafts(self.rng)
        leads, hits = leads.astype(np.float32), hits.astype(np.int32)
        made, verified = ffi.new("int *"), ffi.new("int *")
        taken = lib.hook_pace_cycle(
            self.p, MOST, ffi.from_buffer("float[]", leads), ffi.from_buffer("int[]", hits), made, verified
        )
        assert 0 <= taken <= verified[0] <= made[0] <= MOST
        self.time(1 + verified[0], self.machine.passes[verified[0]])
        for i in range(made[0]):
            self.time(-1 if i else 0, self.machine.more if i else self.machine.first)
        self.tokens += 1 + taken
        self.ms += self.machine.cycle(made[0], verified[0])
        self.depths.append(verified[0])
        self.made.append(made[0])
        for depth, spent in self.fixed.items():
            spent[0] += 1 + (int(np.argmin(hits[:depth])) if not hits[:depth].all() else depth)
            spent[1] += self.machine.cycle(depth, depth)

    def run(self, drafts: Drafts, tokens: int) -> World:
        self.clear()
        while self.tokens < tokens:
            self.cycle(drafts)
        return self

    @property
    def ratio(self) -> float:
        """Its tokens a millisecond by those of the best fixed depth, plain decoding among them."""
        return self.tokens / self.ms / max(tokens / ms for tokens, ms in self.fixed.values())


@pytest.mark.parametrize("noise", [0, 0.1])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "drafts",
    [never, always, flat(0.3), flat(0.8), honest(1, 2.5), honest(2, 2), honest(3, 2), honest(4, 1), honest(8, 0.5), honest(20, -2)],
)  # fmt: skip
def test_as_good_as_the_best_depth(machine: Machine, drafts: Drafts, noise: float) -> None:
    """1000 tokens after the first 200, in the mean of six runs: within 3% of the better of plain and the best fixed depth."""
    worlds = [World(machine, seed, noise).run(drafts, 200) for seed in range(6)]
    ratios = [world.run(drafts, 1000).ratio for world in worlds]
    assert np.mean(ratios) >= 0.97 and min(ratios) > 0.93, ratios


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("drafts", [always, flat(0.3), flat(0.65), flat(0.8), honest(2, 2), honest(4, 1), honest(8, 0.5)])
def test_short_texts(machine: Machine, drafts: Drafts) -> None:
    """The first 200 tokens of new sessions on a machine that is known: little is lost to finding out, however the first drafts fall.
    Here each depth is tried on the drafts of all the texts, or the best would be the one that met the luckier ones."""
    worlds = [World(machine, seed, known=True).run(drafts, 200) for seed in range(24)]
    speed = sum(w.tokens for w in worlds) / sum(w.ms for w in worlds)
    best = max(sum(w.fixed[d][0] for w in worlds) / sum(w.fixed[d][1] for w in worlds) for d in range(9))
    assert speed > 0.97 * best, speed / best


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("machine", MACHINES)
def test_what_a_wrong_head_costs(machine: Machine, known: bool) -> None:
    """2.5% of the first 200 tokens (half a percent more while the machine is being measured), 1.2% of a thousand."""
    for seed in range(2):
        world = World(machine, seed, known=known).run(never, 200)
        assert world.ms <= (1.025 if known else 1.03) * 200 * machine.passes[0]
        early = world.ms
        world.run(never, 800)
        assert early + world.ms <= 1.012 * 1000 * machine.passes[0]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_head_that_is_always_wrong(machine: Machine) -> None:
    """Off after a few cycles; what is left is a hundredth of the time."""
    world = World(machine)
    for _ in range(20):
        world.cycle(never)
    world.run(never, 2000)
    assert world.ms <= 1.012 * 2000 * machine.passes[0]
    assert sum(world.made) > 0 and sum(world.depths) <= 5  # trials, of which few are even verified


def test_it_goes_as_deep_as_pays() -> None:
    world = World(LARGE)
    world.run(always, 2000)
    assert world.run(always, 600).depths[-20:] == [16] * 20
    shallow = World(EXPERTS).run(flat(0.6), 2000)
    assert max(shallow.depths[500:]) <= 3 and np.mean(shallow.depths[500:]) > 0.3


@pytest.mark.parametrize("machine", MACHINES)
def test_it_comes_back(machine: Machine) -> None:
    """Wrong for 600 tokens, then right: within 60 cycles it drafts for good. Then wrong again: that costs it 40 passes at most."""
    for seed in range(5):
        world = World(machine, seed)
        assert sum(world.run(never, 600).depths[-100:]) <= 2
        world.run(honest(20, -2), 400)
        back = next(i for i in range(len(world.depths)) if all(world.depths[i : i + 5]))
        assert back <= 60, (seed, back)
        world.run(never, 200)
        assert world.ms < 240 * machine.passes[0]


def test_a_machine_that_was_busy() -> None:
    """Rows that were measured beside another program are measured again: within 200 passes it drafts."""
    for seed in range(3):
        world = World(Machine([100.0] + [2000.0] * 16, 2, 2), seed, known=True)
        assert sum(world.run(flat(0.9), 100).depths) <= 2
        world.machine = LARGE
        world.run(flat(0.9), 600)
        assert len(world.depths) < 300 and np.mean(world.depths[-30:]) > 4


def test_no_flapping() -> None:
    """Around the break-even acceptance it neither loses nor changes its mind all the time."""
    at = (SMALL.passes[1] + SMALL.first) / SMALL.passes[0] - 1
    for p in (at - 0.03, at, at + 0.03):
        ratios, changes, cycles = [], 0, 0
        for seed in range(5):
            world = World(SMALL, seed).run(flat(p), 2000)
            on = np.array(world.depths) > 0
            changes += int((on[1:] != on[:-1]).sum())
            cycles += len(on)
            ratios.append(world.ratio)
        assert np.mean(ratios) > 0.97 and changes < cycles / 25, (p, ratios, changes, cycles)
    sure = World(SMALL).run(flat(0.9), 2000)
    assert sum(depth == 0 for depth in sure.depths[10:]) <= 6  # to time a plain pass again, and after a bad beginning


def test_the_lead_prunes() -> None:
    """When the leads tell right from wrong, drafts that will be refused are not verified, and it beats every fixed depth."""

    def telling(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        hits = rng.random(MOST) < 0.6
        return np.where(hits, 6.0, 0.2), hits

    world = World(EXPERTS)
    world.run(telling, 500)
    world.run(telling, 2000)
    assert world.ratio > 1.1
    assert sum(world.made) > 1.3 * sum(world.depths)
    assert sum(world.depths) < 1.05 * (world.tokens - len(world.depths))  # nearly every verified draft is accepted


def test_costs() -> None:
    """The lower quartile of what is measured; straight lines between; unknown is cheap; a lone measurement is soon doubted."""
    p = ffi.gc(lib.hook_pace_new(), lib.hook_pace_free)
    passes = lambda rows: lib.hook_pace_pass(p, rows)  # noqa: E731
    assert passes(1) == 0
    for ms, least in ((50.0, 50), (10.0, 10), (11.0, 10)):  # the first pass reads the weights from disk
        lib.hook_pace_cost(p, 1, ms)
        assert passes(1) == least
    assert passes(1) == 10 and passes(2) == 11 and passes(5) == 14
    lib.hook_pace_cost(p, 2, 40)  # another program: not tried again for a while, and not for long
    for _ in range(31):
        assert passes(2) == 40
        lib.hook_pace_cost(p, 1, 10)
    lib.hook_pace_cost(p, 1, 10)
    assert passes(2) == 11
    for ms in (30, 30, 30):
        lib.hook_pace_cost(p, 5, ms)
    assert passes(3) == 20 and passes(5) == 30 and passes(7) == 40
    for _ in range(40):
        lib.hook_pace_cost(p, 5, 22)
        lib.hook_pace_cost(p, 1, 10)
        lib.hook_pace_cost(p, 1, 90)  # another program
    assert passes(5) == 22 and passes(1) == 10
    for _ in range(3):
        lib.hook_pace_cost(p, 40, 100)
    assert passes(32) == 80 and 22 < passes(17) < 80 and passes(64) > passes(48) > 80
    for _ in range(600):
        lib.hook_pace_cost(p, 1, 10)
    assert passes(5) == 14  # what was not seen for long is tried anew


def test_decisions_follow_from_costs_and_drafts() -> None:
    runs = [World(SMALL, 3, 0.1) for _ in range(2)]
    for world in runs:
        world.run(honest(4, 1), 500)
    assert runs[0].depths == runs[1].depths and runs[0].made == runs[1].made


# ---------------------------------------------------------------- in the engine

PROMPT, LENGTH = 40, 300
CHEAP, USUAL, DEAR = (100.0, 0.1, 0.1, 0.1), (1.0, 0.3, 0.1, 0.1), (1.0, 10.0, 5.0, 5.0)


class Plain:
    """Greedy text of the tiny model and the logits behind it."""

    def __init__(self, data: Path) -> None:
        self.target, self.head = data / "tiny/target.gguf", data / "tiny/head-ds4.gguf"
        self.prompt = np.load(data / "tiny/prompt.npy")[:PROMPT]
        with Engine(self.target, self.head, mtp_draft=0, threads=1) as engine:
            session = start(engine, self.prompt, 0)
            self.tokens = session.generate(LENGTH)
            self.logits = session.logits()
        self.text = np.concatenate([self.prompt, np.array(self.tokens, np.int32), np.zeros(32, np.int32)])


def start(engine: Engine, prompt: Any, draft: int = AUTO, margin: float = 0) -> Session:
    session = engine.session()
    session.set_stops([], ignore_eos=True)
    session.set_mtp(draft, margin)
    session.eval(prompt)
    return session


@pytest.fixture(scope="module")
def plain(data: Path) -> Plain:
    return Plain(data)


def generate(session: Session, n: int, costs: Callable[[int], tuple[float, ...]]) -> list[int]:
    """n tokens, before each step of which the engine is told what things cost."""
    out: list[int] = []
    while len(out) < n:
        session.costs(*costs(len(out)))
        out += session.step(session.next(), n - len(out))
    return out


def identity(session: Session) -> None:
    s = session.stats
    assert sum(s.accepted) + s.corrections + s.bonus == s.emitted
    assert s.lookup_accepted <= s.lookup_drafted <= sum(s.drafted) and s.lookup_accepted <= sum(s.accepted)
    assert all(a <= d for a, d in zip(s.accepted, s.drafted, strict=True))


@pytest.mark.parametrize("lookup", [0, 4])
@pytest.mark.parametrize("wrong", [-1, 0, 1, 5])
def test_the_text_is_plain(plain: Plain, wrong: int, lookup: int) -> None:
    """Whatever costs make of it from step to step, scripted drafts right and wrong: plain's tokens and bits."""
    rng = np.random.default_rng(wrong + 1)
    with Engine(plain.target, plain.head, threads=1) as engine:
        for margin in (0.0, 0.3, 1000.0):
            session = start(engine, plain.prompt, AUTO, margin)
            session.script(plain.text, wrong)
            session.set_lookup(lookup)
            assert generate(session, LENGTH, lambda _: (1.0, *rng.choice([0.01, 0.3, 3.0], 3))) == plain.tokens
            assert np.array_equal(bits(session.logits()), bits(plain.logits))
            identity(session)
            session.close()


def test_own_head(plain: Plain, root: Path) -> None:
    """The head's drafts with measured costs; the bundled pair works less than plain when rows cost little."""
    with Engine(plain.target, plain.head, mtp_draft=AUTO, mtp_margin=0) as engine:
        session = start(engine, plain.prompt)
        assert session.generate(LENGTH) == plain.tokens
        identity(session)
    pair = root / "models/small.gguf", root / "models/small-mtp.gguf"
    with Engine(*pair, mtp_draft=AUTO, mtp_margin=0) as engine:
        prompt = [0, 370, 271, 1069]
        text = generate(start(engine, prompt, 0), 96, lambda _: DEAR)
        session = start(engine, prompt)
        assert generate(session, 96, lambda _: CHEAP) == text
        assert session.stats.passes < 60 and session.stats.head_passes > 0
        dear = start(engine, prompt)
        assert generate(dear, 96, lambda _: DEAR) == text
        assert dear.stats.passes == 97 and dear.stats.head_passes == 0  # not even tried


def test_work(plain: Plain) -> None:
    """A drafter that is right saves nearly all passes where rows are cheap; one that is wrong soon costs nothing, and is noticed
    when it is right again."""
    with Engine(plain.target, plain.head, threads=1) as engine:
        session = start(engine, plain.prompt)
        session.script(plain.text)
        generate(session, LENGTH, lambda _: CHEAP)
        assert session.stats.passes - 1 < LENGTH / 8
        session = start(engine, plain.prompt)
        session.script(plain.text, 0)
        generate(session, 150, lambda _: USUAL)
        assert sum(session.stats.drafted) < 40 and session.stats.passes == 151
        session.script(plain.text)
        generate(session, LENGTH - 150, lambda _: USUAL)
        assert session.stats.passes - 151 < 75


def test_a_wrong_head_does_little_work(plain: Plain, tmp_path: Path) -> None:
    """The head's logits negated: no draft is right, and soon hardly any is made. The same again with the same costs."""
    head = anti_head(plain.head, tmp_path / "anti.gguf")
    with Engine(plain.target, head, threads=1) as engine:
        runs = []
        for costs in (USUAL, USUAL, CHEAP):
            session = start(engine, plain.prompt)
            assert generate(session, LENGTH, lambda _, costs=costs: costs) == plain.tokens
            s = session.stats
            made = sum(s.drafted) + s.pruned
            assert 0 < made and sum(s.accepted) == 0 and s.passes == LENGTH + 1
            # of USUAL a draft costs 0.4 of a pass, or 0.1 unverified: a pass of them, and 0.02 for each token, later 0.007
            assert costs is CHEAP or (sum(s.drafted) <= 10 and s.head_passes <= 80 and made <= 50)
            runs.append((list(s.drafted), s.pruned, s.head_passes))
        assert runs[0] == runs[1]


def work(session: Session, n: int, costs: tuple[float, ...]) -> np.ndarray:
    """Passes, further rows, first and further head steps of n tokens; `costs` is what one of each is said to take, in ms."""
    out, done = 0, np.zeros(4)
    while out < n:
        session.costs(*costs)
        before = session.stats
        out += len(session.step(session.next(), n - out))
        after = session.stats
        rows = sum(after.drafted) - sum(before.drafted)
        made = rows + after.pruned - before.pruned
        done += after.passes - before.passes, rows, made > 0, max(made - 1, 0)
    return done


def texts(engine: Engine, root: Path, kind: str) -> list[list[int]]:
    """Three prompts: lines of a text that the pair was not trained on, one of its lines repeated, random ids."""
    lines = (root / "models/held-out.txt").read_text().split("\n")
    if kind == "prose":
        return [engine.prompt("\n".join(lines[30 * i : 30 * i + 4])) for i in range(3)]
    if kind == "repeated":
        return [engine.prompt(6 * (lines[50 * i + 7] + "\n")) for i in range(3)]
    return [[0, *np.random.default_rng(i).integers(10, 2048, 100).tolist()] for i in range(3)]


def work_on(kind: str, temperature: float, engine: Engine, root: Path, depth: int, costs: tuple[float, ...]) -> np.ndarray:
    done = np.zeros(4)
    for seed, prompt in enumerate(texts(engine, root, kind)):
        session = start(engine, prompt, depth)
        if temperature:
            session.set_gen(temperature=temperature, seed=seed)
        done += work(session, 200, costs)
        session.close()
    return done


ROWS_DEAR, ROWS_CHEAP = (0.52, 0.245, 0.13, 0.11), (0.52, 0.1, 0.1, 0.08)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("kind", ["prose", "repeated", "random"])
def test_the_bundled_pair(root: Path, kind: str, temperature: float) -> None:
    """200 tokens behind each of three prompts: within 3% of the better of plain and the best fixed depth, on a machine whose rows
    are dear and on one where they are cheap."""
    with Engine(root / "models/small.gguf", root / "models/small-mtp.gguf", threads=1) as engine:
        fixed = [work_on(kind, temperature, engine, root, depth, ROWS_DEAR) for depth in range(1, 5)]
        for costs in (ROWS_DEAR, ROWS_CHEAP):
            best = min(600 * costs[0], *(done @ costs for done in fixed))
            auto = work_on(kind, temperature, engine, root, AUTO, costs) @ costs
            assert best / auto > 0.97, (costs, best / auto)


@pytest.mark.parametrize("costs", [ROWS_DEAR, ROWS_CHEAP])
def test_the_bundled_pair_with_a_wrong_head(root: Path, tmp_path: Path, costs: tuple[float, ...]) -> None:
    head = anti_head(root / "models/small-mtp.gguf", tmp_path / "anti.gguf")
    with Engine(root / "models/small.gguf", head, threads=1) as engine:
        for temperature in (0, 0.8):
            auto = work_on("prose", temperature, engine, root, AUTO, costs) @ costs
            assert 0.97 < 600 * costs[0] / auto < 1


def test_margin_of_auto(plain: Plain, root: Path) -> None:
    """Unless told otherwise: 0 with auto, 3 with a fixed depth."""
    pair = root / "models/small.gguf", root / "models/small-mtp.gguf"
    for options, margin in (({}, 3), ({"mtp_draft": 2}, 3), ({"mtp_draft": AUTO}, 0), ({"mtp_draft": AUTO, "mtp_margin": 2}, 2)):
        with Engine(*pair, **options) as engine:
            assert engine.info.mtp_margin == margin
    with pytest.raises(Failed, match=r"mtp_margin is -2; expected 0 to 1000, or -1 \(auto\)"):
        Engine(*pair, mtp_margin=-2)
    with Engine(*pair) as engine:
        held = {}
        for draft, given in ((2, -1), (2, 3), (2, 0), (AUTO, -1), (AUTO, 0), (AUTO, 3)):
            session = start(engine, [0, 370, 271, 1069, 5, 6, 7], draft, given)
            generate(session, 96, lambda _: CHEAP)
            held[draft, given] = session.stats.below_margin
        assert held[2, -1] == held[2, 3] > held[2, 0] == 0 == held[AUTO, -1] == held[AUTO, 0] < held[AUTO, 3]
        with pytest.raises(Failed, match="margin is -0.5"):
            session.set_mtp(2, -0.5)


def test_auto_in_the_api(plain: Plain) -> None:
    """-1 is auto, -2 nothing; auto needs something to draft with; forks go on with it."""
    with Engine(plain.target, mtp_draft=AUTO) as engine:  # without a head: plain
        session = start(engine, plain.prompt, 0)
        with pytest.raises(Failed, match="no MTP head is loaded and lookup is off"):
            session.set_mtp(AUTO, 0)
        session.set_lookup(3)
        session.set_mtp(AUTO, 0)
        with pytest.raises(Failed, match="expected 0 to 16, or -1"):
            session.set_mtp(-2, 0)
        with pytest.raises(Failed, match="0 to 64"):
            session.set_lookup(65)
    with pytest.raises(Failed, match="mtp_draft is -2"):
        Engine(plain.target, mtp_draft=-2)
    with pytest.raises(Failed, match="draft_lookup is 65"):
        Engine(plain.target, draft_lookup=65)
    with Engine(plain.target, plain.head, mtp_draft=AUTO, mtp_margin=0) as engine:
        session = start(engine, plain.prompt)
        session.script(plain.text)
        generate(session, 100, lambda _: CHEAP)
        copy = session.fork()
        assert generate(copy, 100, lambda _: CHEAP) == plain.tokens[100:200]
        assert copy.stats.passes < 10  # it knows what the session had learned
        copy.close()


@pytest.mark.parametrize("scheme", ["coupled", "rejection"])
def test_sampled(plain: Plain, scheme: str) -> None:
    """Coupled: a seed's text is plain's. Rejection: every draft that is drawn is judged, so none is pruned."""
    gen: dict[str, Any] = {"temperature": 0.8, "seed": 11, "top_p": 0.95}
    if scheme == "rejection":
        gen["scheme"] = 1
    with Engine(plain.target, plain.head, threads=1) as engine:
        costs = lambda n: CHEAP if n % 40 < 20 else (1.0, 0.4, 0.05, 0.05)  # noqa: E731
        alone = start(engine, plain.prompt, 0)
        alone.set_gen(**gen)
        text = generate(alone, 150, costs)
        session = start(engine, plain.prompt)
        session.set_lookup(5)
        session.set_gen(**gen)
        drawn = generate(session, 150, costs)
        assert sum(session.stats.drafted) > 0
        if scheme == "coupled":
            assert drawn == text and np.array_equal(bits(session.logits()), bits(alone.logits()))
        else:
            assert session.stats.pruned == 0
        identity(session)


def test_in_a_batch(plain: Plain) -> None:
    """Auto sessions with right and wrong drafts beside fixed ones and a prompt: each its own text."""
    with Engine(plain.target, plain.head, threads=1) as engine:
        sessions = []
        for i in range(5):
            s = start(engine, plain.prompt, AUTO if i < 3 else i)
            s.script(plain.text, [-1, 0, 2, -1, 1][i])
            if i == 2:
                s.set_lookup(3)
            sessions.append(s)
        out: list[list[int]] = [[] for _ in sessions]
        while any(len(o) < LENGTH for o in out):
            sessions[0].costs(*CHEAP)
            late = engine.session()
            busy = [i for i, o in enumerate(out) if len(o) < LENGTH]
            asked = [(sessions[i], [sessions[i].argmax()], LENGTH - len(out[i])) for i in busy]
            for i, got in zip(busy, batch_step(engine, [*asked, (late, list(plain.prompt), 0)]), strict=False):
                out[i] += got
            late.close()
        assert all(o == plain.tokens for o in out)
        assert sessions[0].stats.passes < 50 < sessions[1].stats.passes
