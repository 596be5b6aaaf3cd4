"""`ds4py` and `python -m ds4`: the command line of the package. Options are named as those of `./ds4`."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from ds4 import names, registry
from ds4.errors import Error
from ds4.outputs import OutputFile, replacing, text_output, written_twice
from ds4.sampling import MAX_DEPTH, SamplerConfig

if TYPE_CHECKING:
    from ds4.engine import Engine, Session, Stats, Thinking
    from ds4.generation import Completion, Options, Piece
    from ds4.model import Model

Command = TypeVar("Command", bound=Callable[..., Any])
MAX_TOKENS = 1 << 24
BASE_MODEL_TOKENS = 512  # -n for a model that does not end its answers itself


# ---- types of options ----


class ModelName(click.ParamType):  # type: ignore[type-arg]
    """A file, or a name of `ds4py models list`."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Known names, then files."""
        try:
            known = [n for n in names.names() if n.startswith(incomplete)]
        except Error:
            known = []
        return [*(CompletionItem(n) for n in known), CompletionItem(incomplete, type="file")]


class Depth(click.ParamType):  # type: ignore[type-arg]
    """A number of drafts, or "auto"."""

    name = "depth"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """An int, or "auto"."""
        if value == "auto":
            return str(value)
        return int(click.IntRange(0, MAX_DEPTH).convert(value, param, ctx))


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Ascending whole numbers with commas between them."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The numbers."""
        if isinstance(value, list):
            return value
        try:
            out = [int(part) for part in str(value).split(",")]
        except ValueError:
            out = []
        if not out or out[0] < 0 or any(a >= b for a, b in zip(out, out[1:], strict=False)):
            self.fail(f"{value!r}: expected ascending whole numbers with commas between them, such as 0,512,2048", param, ctx)
        return out


class FloatRange(click.FloatRange):
    """Without "nan", which compares as inside every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class StopText(click.ParamType):  # type: ignore[type-arg]
    """A text that is not empty."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text."""
        if not value:
            self.fail("expected some text", param, ctx)
        return value


class Bias(click.ParamType):  # type: ignore[type-arg]
    """A token id and what is added to its logit."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """The pair."""
        if isinstance(value, tuple):
            return value
        token, _, addend = str(value).partition(":")
        try:
            pair = int(token), float(addend)
        except ValueError:
            pair = -1, 0.0
        if "_" in value or not 0 <= pair[0] <= MAX_TOKENS or not (pair[1] == -math.inf or -1000 <= pair[1] <= 1000):
            self.fail(f"{value!r}: expected ID:F, F -1000 to 1000 or -inf", param, ctx)
        return pair


def summed(pairs: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Biases by token: one that is given twice gets both."""
    out: dict[int, float] = {}
    for token, addend in pairs:
        out[token] = out.get(token, 0.0) + addend
    return out


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUT = OutputFile()
TEXT_FILE = click.Path(exists=True, dir_okay=False, allow_dash=True)


# ---- groups of options ----


def options(*groups: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """All options of some groups, in this order in the help text."""

    def add(f: Command) -> Command:
        for option in reversed([o for group in groups for o in group]):
            f = option(f)
        return f

    return add


MODEL = [
    click.option(
        "-m", "--model", type=ModelName(), metavar="MODEL",
        help="Target: a GGUF file, or a name (see ds4py models). [default: $DS4_MODEL, else ./ds4flash.gguf, else deepseek_v4]",
    ),
    click.option("--mtp", type=FILE, help="Head GGUF. [default: the registered one, else one inside or beside the target's file]"),
    click.option("--glm-mtp", is_flag=True, help="Use the head inside the target's own file, and no other."),
    click.option("--no-mtp", is_flag=True, help="Use no head."),
    click.option("-c", "--ctx", type=click.IntRange(1, MAX_TOKENS), help="Most tokens of a session. [default: the model's, at most 32768]"),
    click.option("-t", "--threads", type=click.IntRange(1, 256), help="[default: the processors this process may use, by its affinity and its container's quota]"),
    click.option("--kv-type", type=click.Choice(["f32", "f16", "fp8"]), default="f16", show_default=True, help="Rows of the attention caches."),
    click.option("--prefill-chunk", type=click.IntRange(1, 4096), default=256, show_default=True, help="Most tokens of one pass."),
    click.option("--max-rewind", type=click.IntRange(0, MAX_TOKENS), help="Tokens a session can go back. [default: 64, or what it takes]"),
    click.option("--isa", type=click.Choice(["auto", "scalar", "avx2", "avxvnni", "avx512", "amx", "neon"]), default="auto", show_default=True, help="Kernels; all give the same bits."),
    click.option("--mlock", is_flag=True, help="Lock the weights in memory."),
    click.option("--mtp-shortlist", type=click.IntRange(0, MAX_TOKENS), default=32768, show_default=True, help="Draft from the vocabulary's first N tokens and those of the text; 0: from all."),
    click.option("-q", "--quiet", is_flag=True, help="No notes and no progress bars."),
]  # fmt: skip

DRAFTS = [
    click.option("--mtp-draft", type=Depth(), default="auto", show_default=True, metavar="N|auto", help=f"Tokens drafted a cycle, 0 to {MAX_DEPTH}."),
    click.option("--mtp-margin", type=FloatRange(0, 1000), help="Lead in logits that a draft needs. Trades speed, never the text. [default: 0 with --mtp-draft auto, 3.0 with a number]"),
    click.option("--draft-core", type=click.Choice(registry.draft_cores()), default="stock", show_default=True, help="Who drafts."),
    click.option("--draft-lookup", type=click.IntRange(0, 64), default=0, show_default=True, help="Draft also what followed the last time that up to N tokens occurred; 0: off, but for --draft-core lookup."),
    click.option("--mtp-sampling", type=click.Choice(["coupled", "rejection"]), default="coupled", show_default=True, help="How drafts are verified with a temperature."),
]  # fmt: skip

SAMPLING = [
    click.option("--temp", type=FloatRange(0, 100), default=0.0, show_default=True, help="Temperature; 0: greedy."),
    click.option("--top-k", type=click.IntRange(0, MAX_TOKENS), default=0, help="Keep the N most likely tokens. [default: all]"),
    click.option("--top-p", type=FloatRange(0, 1), default=1.0, help="Keep the most likely tokens until their sum is F. [default: all]"),
    click.option("--min-p", type=FloatRange(0, 1), default=0.0, help="Keep tokens at least F times as likely as the first. [default: all]"),
    click.option("--presence-penalty", type=FloatRange(-100, 100), default=0.0, help="Taken off the logit of each token that the answer holds."),
    click.option("--frequency-penalty", type=FloatRange(-100, 100), default=0.0, help="Taken off it for each time that the answer holds it."),
    click.option("--logit-bias", type=Bias(), multiple=True, metavar="ID:F", help="Added to the logit of token ID; -inf forbids it; may be given many times."),
    click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Same seed, same text."),
]  # fmt: skip

THINKING = [
    click.option("--think", "thinking", flag_value="on", help="Let the model reason before it answers."),
    click.option("--think-max", "thinking", flag_value="max", help="The same with the template's maximum-effort paragraph."),
    click.option("--nothink", "thinking", flag_value="off", default="off", help="Answer directly (the default)."),
]

SYSTEM = [click.option("-sys", "--system", metavar="TEXT", help="System text, before the first turn.")]

PROMPT = [
    click.option("-p", "--prompt", metavar="TEXT", help="A user turn if the model has a chat template, plain text if it has none."),
    click.option("--prompt-file", type=TEXT_FILE, help="The same from a file, - for standard input; one newline at its end is dropped."),
    click.option("--prompt-ids", type=TEXT_FILE, help="Token ids with white space between them; nothing is added."),
    click.option("--raw-prompt", is_flag=True, help="No chat template: BOS and the text."),
    click.option("--rendered", is_flag=True, help="The text is rendered already: control tokens in it are parsed."),
    *SYSTEM,
    *THINKING,
]  # fmt: skip

LENGTH = [
    click.option("-n", "--tokens", type=click.IntRange(-1, MAX_TOKENS), help=f"Most tokens of an answer, -1: what the context holds. [default: -1 with a chat template, else {BASE_MODEL_TOKENS}]"),
    click.option("--stop", type=StopText(), multiple=True, metavar="TEXT", help="End the answer before TEXT; may be given many times."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token."),
]  # fmt: skip


def margin_of(o: dict[str, Any]) -> float | None:
    """--mtp-margin, which $DS4_MTP_MIN_MARGIN overrides; None: neither is given."""
    given = os.environ.get("DS4_MTP_MIN_MARGIN")
    if not given:
        return cast("float | None", o["mtp_margin"])
    try:
        return float(FloatRange(0, 1000).convert(given, None, None))
    except click.BadParameter as e:
        raise click.UsageError(f"DS4_MTP_MIN_MARGIN: {e.message}") from e


def sampler_of(o: dict[str, Any]) -> SamplerConfig:
    """The options of DRAFTS and SAMPLING."""
    return SamplerConfig(
        draft_core=o["draft_core"], draft_lookup=o["draft_lookup"], speculative_depth=o["mtp_draft"], margin=margin_of(o), scheme=o["mtp_sampling"],
        temperature=o["temp"], top_k=o["top_k"], top_p=o["top_p"], min_p=o["min_p"], seed=o["seed"],
        presence_penalty=o["presence_penalty"], frequency_penalty=o["frequency_penalty"], logit_bias=summed(o["logit_bias"]),
    )  # fmt: skip


def with_drafter(config: SamplerConfig, engine: Engine, quiet: bool) -> SamplerConfig:
    """The config, without drafts where nothing drafts; which is said if any were asked for."""
    if config.draft_core != "stock" or config.draft_lookup or engine.info.has_head:
        return config
    note_no_drafter(quiet)
    return dataclasses.replace(config, speculative_depth=0)


def note_no_drafter(quiet: bool) -> None:
    """For a command that was asked for drafts and has nothing that drafts."""
    ctx = click.get_current_context()
    about = ("mtp_draft", "mtp_margin", "mtp_sampling", "mtp_shortlist")
    given = [n for n in about if ctx.get_parameter_source(n) == ParameterSource.COMMANDLINE and (n != "mtp_draft" or ctx.params[n] != 0)]
    if given:
        note("without a head (--mtp FILE or --glm-mtp) or --draft-lookup nothing is drafted", quiet)


# ---- what commands share ----


class Bar:
    """A progress bar on standard error, where that is a terminal; begun and ended by the numbers it is given."""

    def __init__(self, quiet: bool = False) -> None:
        self.shown = not quiet and sys.stderr.isatty()
        self.bar: Any = None
        self.at = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self.shown or total <= 1:
            return
        if self.bar is None:
            self.bar = click.progressbar(length=total, label=what, file=sys.stderr)
            self.bar.__enter__()
            self.at = 0
        self.bar.update(done - self.at)
        self.at = done
        if done >= total:
            self.end()

    def end(self) -> None:
        """Leave the line."""
        if self.bar is not None:
            self.bar.__exit__(None, None, None)
            self.bar = None


def note(text: str, quiet: bool = False) -> None:
    """A line for the user, beside the output."""
    if not quiet:
        click.echo(f"ds4py: {text}", err=True)


def default_model() -> str:
    """The model when -m is not given."""
    if not os.environ.get("DS4_MODEL") and Path("ds4flash.gguf").is_file():
        return "ds4flash.gguf"
    return names.FLASH


@contextlib.contextmanager
def opened(o: dict[str, Any], bar: Bar | None = None, **more: Any) -> Iterator[Model]:
    """The model that the options of MODEL name."""
    from ds4.model import Model

    if o["mtp"] is not None and (o["glm_mtp"] or o["no_mtp"]) or (o["glm_mtp"] and o["no_mtp"]):
        raise click.UsageError("--mtp, --glm-mtp and --no-mtp: only one of them")
    settings = {k: o[k] for k in ("ctx", "threads", "kv_type", "prefill_chunk", "isa", "mlock")}
    rewind = o["max_rewind"] if o["max_rewind"] is not None else min(64, o["ctx"] or 64)
    settings["shortlist"] = o["mtp_shortlist"]
    settings["max_rewind"] = max(rewind, more.pop("least_rewind", 0))
    settings |= {"mtp_internal": True} if o["glm_mtp"] else {}
    if (log := os.environ.get("DS4_MTP_CONF_LOG", "")) not in ("", "0", "1"):
        raise click.UsageError(f'DS4_MTP_CONF_LOG "{log}": expected 0 or 1')
    if log == "1":
        settings |= {"conf_log": True, "log": lambda line: click.echo(line, err=True)}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        model = Model.from_pretrained(
            default_model() if o["model"] is None else o["model"],
            mtp=False if o["no_mtp"] or o["glm_mtp"] else o["mtp"],
            progress=bar,
            **settings,
            **more,
        )
    for n in notes:
        note(str(n.message), o["quiet"])
    if model.engine.info.base_model and o.get("thinking", "off") != "off":
        note("the model has no chat template: it does not know how to think", o["quiet"])
    with model:
        yield model


def read_text(path: str) -> str:
    """A file's text, - for standard input; one newline at its end is dropped."""
    with click.open_file(path, "rb") as f:
        data: bytes = f.read()
    text = data.decode("utf-8", "surrogateescape")
    return text[:-1].removesuffix("\r") if text.endswith("\n") else text


def read_ids(path: str) -> list[int]:
    """Token ids with white space between them."""
    with click.open_file(path, "rb") as f:
        words = f.read().decode("utf-8", "replace").split()
    return token_ids(words, f"{path}: ")


def token_ids(words: Sequence[str], where: str = "") -> list[int]:
    """What they say in digits."""
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) < 1 << 31):
            raise click.ClickException(f'{where}"{word[:23]}" is not a token id')
    return [int(word) for word in words]


Prompt = str | list[int]


def read_prompt(o: dict[str, Any], otherwise: str | None = "-") -> Prompt:
    """The prompt's text or ids; before the model is opened, so that a wrong file name shows at once."""
    given = [k for k in ("prompt", "prompt_file", "prompt_ids") if o[k] is not None]
    if len(given) > 1:
        raise click.UsageError("-p, --prompt-file and --prompt-ids: only one of them")
    if o["raw_prompt"] and o["rendered"]:
        raise click.UsageError("--raw-prompt and --rendered: only one of them")
    if o["system"] is not None and (o["raw_prompt"] or o["rendered"] or o["prompt_ids"] is not None):
        raise click.UsageError("--system needs the chat template: not with --raw-prompt, --rendered or --prompt-ids")
    if o["prompt_ids"] is not None and (o["raw_prompt"] or o["rendered"]):
        raise click.UsageError("--prompt-ids is used as it is: not with --raw-prompt or --rendered")
    if o["prompt_ids"] is not None:
        return read_ids(o["prompt_ids"])
    if o["prompt"] is not None:
        return str(o["prompt"])
    if o["prompt_file"] is None and otherwise is None:
        return ""
    return read_text(o["prompt_file"] or str(otherwise))


def prompt_ids(engine: Engine, prompt: Prompt, o: dict[str, Any]) -> list[int]:
    """The prompt as `./ds4` takes it."""
    if not isinstance(prompt, str):
        return prompt
    data = prompt.encode("utf-8", "surrogateescape")
    if o["rendered"] or o["raw_prompt"]:
        return engine.prompt(data, control=o["rendered"])
    system = [{"role": "system", "content": o["system"]}] if o["system"] is not None else []
    if engine.info.base_model and not system:
        return engine.prompt(data)
    if not (engine.info.base_model or engine.info.template_is_v4):
        note("the model's chat template is not DeepSeek-V4's, whose turns are used all the same; see --rendered", o["quiet"])
    text = data.decode("utf-8", "replace")
    return engine.chat_template([*system, {"role": "user", "content": text}], thinking=o["thinking"])


_SHOWN = {i: "\ufffd" for i in [*range(0x20), *range(0x7F, 0xA0)] if chr(i) not in "\n\t"}


def put(text: str) -> None:
    """Generated text on standard output; a terminal gets no control characters."""
    click.echo(text.translate(_SHOWN) if sys.stdout and sys.stdout.isatty() else text, nl=False)


def put_stream(pieces: Iterator[Piece]) -> Completion:
    """Prints a stream as it comes; what it came to in the end."""
    from ds4.generation import joined

    def shown() -> Iterator[Piece]:
        for piece in pieces:
            put(piece)
            yield piece

    done = joined(shown())
    if not done.endswith("\n"):
        click.echo()
    return done


def most_tokens(o: dict[str, Any], session: Session) -> int:
    """-n, its default filled in."""
    n = o["tokens"]
    if n is None:
        n = BASE_MODEL_TOKENS if session.engine.info.base_model else -1
    return int(session.ctx if n < 0 else n)


def generation_options(config: SamplerConfig, o: dict[str, Any], session: Session) -> Options:
    """The options of SAMPLING, DRAFTS and LENGTH as `Session.stream` takes them."""
    from ds4.model import options_of

    text: Options = {"max_tokens": most_tokens(o, session), "stop": o["stop"], "ignore_eos": o["ignore_eos"]}
    return {**options_of(config), **text}


def rate(count: float, ms: float) -> float:
    """A second."""
    return 1000 * count / ms if ms > 0 else 0.0


def stats_lines(stats: Stats, done: Completion, ms: float, config: SamplerConfig) -> Iterator[str]:
    """Speed, and what became of drafts. The margin says nothing of sampled text."""
    margin = config.margin_used if config.temperature == 0 else None
    n = len(done.tokens)
    yield f"prompt     {stats.prompt_tokens:8} tokens {stats.prompt_ms:10.1f} ms {rate(stats.prompt_tokens, stats.prompt_ms):10.1f} tokens/s"
    yield f"generated  {n:8} tokens {ms:10.1f} ms {rate(n, ms):10.1f} tokens/s, ended by {done.finish_reason}"
    if config.speculative_depth == 0 or config.draft_core == "none":
        return
    each = stats.emitted / stats.cycles if stats.cycles else 0
    held = f"; margin {margin:g} held back {stats.below_margin} matches" if margin is not None else ""
    yield f"steps      {stats.cycles:8}, {each:.2f} tokens each{held}"
    for i, (drafted, accepted) in enumerate(zip(stats.drafted, stats.accepted, strict=True)):
        if drafted:
            yield f"draft {i + 1:<2}   {drafted:8} drafted {accepted:9} accepted {100 * accepted / drafted:7.1f}%"
    yield (
        f"time       draft {stats.draft_ms:.1f} ms, verify {stats.verify_ms:.1f} ms, repair {stats.repair_ms:.1f} ms; "
        f"{stats.head_passes} passes of the head"
    )


def as_bytes(n: float) -> str:
    """In bytes and in a unit to read."""
    v, units = n / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while v >= 1024 and len(units) > 1:
        v /= 1024
        units.pop(0)
    return f"{n} bytes ({v:.1f} {units[0]})"


# ---- the group ----


class Lazy(click.Command):
    """A command of a module that is imported when it is used, and may need packages that are not installed."""

    def __init__(self, name: str, module: str, needs: str, help: str) -> None:
        super().__init__(
            name, help=f"{help}\n\nNeeds {needs}.", short_help=help, callback=self._missing,
            params=[click.Argument(["args"], nargs=-1, type=click.UNPROCESSED)], context_settings={"ignore_unknown_options": True},
        )  # fmt: skip
        self.module, self.needs, self.why = module, needs, ""

    def _missing(self, args: tuple[str, ...]) -> None:
        raise click.ClickException(f"{self.why}; ds4py {self.name} needs {self.needs}")

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The real command's, or one that says what is missing."""
        try:
            real: click.Command = importlib.import_module(self.module).main
        except ImportError as e:
            self.why = str(e)
            return super().make_context(info_name, args, parent, **extra)
        return real.make_context(info_name, args, parent, **extra)


class Main(click.Group):
    """Failures are one line and status 1, misuse 2, Ctrl+C 130."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (Error, OSError) as e:
            if isinstance(e, BrokenPipeError):
                raise
            text = f"{e.filename or 'standard output'}: {e.strerror}" if isinstance(e, OSError) else str(e)
            raise click.ClickException(text) from e
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(130)


def show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the version and leave."""
    if value and not ctx.resilient_parsing:
        from ds4._native import version

        click.echo(f"ds4py {version()}")
        ctx.exit()


@click.group(cls=Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=show_version, help="Show the version and exit."
)
def main() -> None:
    """DeepSeek-V4 models from GGUF files, with exact multi-token-prediction speculation.

    ds4py COMMAND --help says more. Failures are one line on standard error; exit status 0: done, 1: something failed, 2: misuse,
    130: stopped by Ctrl+C.

    DS4_MODEL is the model when -m is not given; DS4_MTP_MIN_MARGIN overrides --mtp-margin; DS4_MTP_CONF_LOG=1 prints a line for
    each drafted token on standard error.
    """


main.add_command(Lazy("synth", "ds4.synth", "gguf: pip install 'ds4[tools]'", "Write random models of any size."))
main.add_command(
    Lazy("train", "ds4.train", "gguf, tokenizers and torch: pip install 'ds4[tools]' torch", "Train a small model and head.")
)


# ---- text ----


@main.command()
@options(MODEL, DRAFTS, SAMPLING, PROMPT, LENGTH)
@click.option("--print-ids", is_flag=True, help="The generated token ids, one a line, and nothing else.")
@click.option("--stats", is_flag=True, help="Speed and speculation, on standard error.")
@click.option("--stats-json", type=OUT, help="The same as JSON.")
def generate(print_ids: bool, stats: bool, stats_json: Path | None, **o: Any) -> None:
    """Answer a prompt: -p TEXT, a file, or standard input."""
    prompt, config, bar = read_prompt(o), sampler_of(o), Bar(o["quiet"])
    ids_only = o["prompt_ids"] is not None and print_ids and not o["stop"]
    with opened(o, bar, raw_vocab_ok=ids_only) as model, model.engine.session() as session:
        config = with_drafter(config, model.engine, o["quiet"])
        session.eval(prompt_ids(model.engine, prompt, o))
        bar.end()
        began = time.perf_counter()
        stream = session.stream((), **generation_options(config, o, session))
        done = _print_ids(stream) if print_ids else put_stream(stream)
        ms = 1000 * (time.perf_counter() - began)
        if stats:
            click.echo("\n".join(stats_lines(session.stats, done, ms, config)), err=True)
        if stats_json is not None:
            _write_json(stats_json, _stats_dict(model.engine, session.stats, done, ms))


def _print_ids(stream: Iterator[Piece]) -> Completion:
    from ds4.generation import joined

    done = joined(stream)
    click.echo("".join(f"{t}\n" for t in done.tokens), nl=False)
    return done


def _stats_dict(engine: Engine, stats: Stats, done: Completion, ms: float) -> dict[str, Any]:
    info = engine.info
    return {
        "model": info.model_path, "head": info.mtp_path or None, "isa": info.isa, "threads": info.threads, "ctx": info.ctx,
        "kv_type": info.kv_type, "prefill_chunk": info.prefill_chunk, "finish_reason": done.finish_reason,
        "generated_tokens": len(done.tokens), "generation_ms": ms, "generation_tokens_per_s": rate(len(done.tokens), ms),
        "prompt_tokens_per_s": rate(stats.prompt_tokens, stats.prompt_ms), **dataclasses.asdict(stats),
    }  # fmt: skip


def _write_json(path: Path, value: Any) -> None:
    with text_output(path) as f:
        f.write(json.dumps(value, indent=1) + "\n")


CHAT_HELP = """\
/think        reason before answering, from the next message on
/nothink      answer directly
/ctx          how much of the context is used
/stats        speed and speculation of the last answer
/read FILE    send a file's text as a message
/new          forget the chat and start over
/quit         leave (so does Ctrl+D)
Ctrl+C stops an answer. A message that begins with / is sent with a space before it."""


class Talk:
    """A chat: its turns, and a session that holds what it can of them."""

    def __init__(self, model: Model, config: SamplerConfig, o: dict[str, Any]) -> None:
        self.model, self.config, self.o = model, config, o
        self.session = model.engine.session()
        self.thinking: Thinking = o["thinking"]
        self.turns: list[dict[str, str]] = []
        self.report = "no answer yet"
        self.start_over()

    def start_over(self) -> None:
        """Back to the system text."""
        self.turns = [{"role": "system", "content": self.o["system"]}] if self.o["system"] is not None else []

    def say(self, text: str) -> None:
        """Send a message and print the answer. Ctrl+C ends the answer, of which what came is kept."""
        from ds4.engine import split_reasoning
        from ds4.generation import joined
        from ds4.model import hold

        engine, session = self.model.engine, self.session
        turns = [*self.turns, {"role": "user", "content": text}]
        came: list[Piece] = []
        session.reset_stats()
        began = time.perf_counter()
        try:
            hold(session, engine.chat_template(turns, thinking=self.thinking))
            began = time.perf_counter()
            stream = session.stream((), **generation_options(self.config, self.o, session))
            for piece in stream:
                came.append(piece)
                put(piece)
        except KeyboardInterrupt:
            click.echo(" (stopped)", nl=False)
        text = joined(iter(came))
        if not text.endswith("\n"):
            click.echo()
        answer = split_reasoning(engine, text, self.thinking)
        self.turns = [*turns, {"role": "assistant", "content": answer.text, "reasoning": answer.reasoning}]
        ms = 1000 * (time.perf_counter() - began)
        self.report = "\n".join(stats_lines(session.stats, answer, ms, self.config))

    def command(self, line: str) -> bool:
        """A line that begins with /. False: leave."""
        word, _, rest = line.partition(" ")
        if word in ("/quit", "/exit"):
            return False
        if word in ("/think", "/nothink"):
            self.thinking = "on" if word == "/think" else "off"
        elif word == "/ctx":
            click.echo(f"{self.session.position} of {self.session.ctx} tokens")
        elif word == "/stats":
            click.echo(self.report)
        elif word == "/new":
            self.start_over()
        elif word == "/read":
            self.say(read_text(rest.strip()))
        else:
            click.echo(CHAT_HELP)
        return True


@main.command()
@options(MODEL, DRAFTS, SAMPLING, SYSTEM, THINKING, LENGTH)
def chat(**o: Any) -> None:
    """Talk to a model. Lines are messages; /help lists commands."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited
    config, bar = sampler_of(o), Bar(o["quiet"])
    with opened(o, bar) as model:
        talk = Talk(model, with_drafter(config, model.engine, o["quiet"]), o)
        bar.end()
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                line = input(prompt)
            except (EOFError, KeyboardInterrupt):
                break
            try:
                if line.startswith("/"):
                    if not talk.command(line):
                        break
                elif line.strip():
                    talk.say(line.removeprefix(" ") if line.startswith(" /") else line)
            except (Error, OSError) as e:
                if not sys.stdin.isatty():
                    raise
                click.echo(f"{e}", err=True)


# ---- looking at things ----


@main.command()
@options(MODEL)
@click.option("--tensors", is_flag=True, help="Every tensor too.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def inspect(tensors: bool, as_json: bool, **o: Any) -> None:
    """Sizes, types, bytes and memory of a model and its head."""
    with opened(o, raw_vocab_ok=True) as model:
        i, found = model.engine.info, model.engine.tensors()
    if as_json:
        value = dataclasses.asdict(i) | ({"tensors": [dataclasses.asdict(t) for t in found]} if tensors else {})
        click.echo(json.dumps(value, indent=1))
        return

    def types(head: bool) -> Iterator[str]:
        for kind in dict.fromkeys(t.type for t in found if t.head == head):
            sizes = [t.bytes for t in found if t.head == head and t.type == kind]
            yield f"  {kind:<10}{len(sizes):6} tensor{'s,' if len(sizes) > 1 else ', '} {as_bytes(sum(sizes))}"

    lines = [
        f"model     {i.model_path}",
        f"name      {i.name or '(none)'}",
        "template  " + ("none: a base model" if i.base_model else "DeepSeek-V4" if i.template_is_v4 else "not DeepSeek-V4's"),
        "sizes",
        f"  layers {i.layers} ({i.hash_layers} hash-routed), width {i.embd}, streams {i.streams}",
        f"  heads {i.heads} of {i.head_dim} ({i.rope_dim} rotary), window {i.window}",
        f"  experts {i.experts} of width {i.expert_ff}, {i.experts_used} used",
        f"  vocabulary {i.vocab}, BOS {i.bos}, EOS {i.eos}, context {i.context_length}",
        "types",
        *types(False),
        f"head      {i.mtp_path or 'none'}",
        *types(True),
        "memory",
    ]
    sizes = [("model file, mapped", i.file_bytes), ("  its weights", i.weight_bytes)]
    sizes += [("head file, mapped", i.head_file_bytes), ("  its weights", i.head_weight_bytes)] if i.has_head else []
    sizes += [("scratch of a pass", i.scratch_bytes), ("tables", i.table_bytes), (f"session of {i.ctx}", i.session_bytes)]
    sizes += [("in all, beside files", i.scratch_bytes + i.table_bytes + i.session_bytes), ("for batches, at most", i.batch_bytes)]
    lines += [f"  {label:<22}{as_bytes(n)}" for label, n in sizes]
    lines.append(f"runs with {i.isa} kernels, {i.threads} threads, kv {i.kv_type}, passes of {i.prefill_chunk}")
    if tensors:
        lines.append("tensors")
        for t in found:
            dims = " x ".join(map(str, t.dims))
            lines.append(f"  {'head' if t.head else 'target':<6}  {t.name:<44} {t.type:<8} {dims:<24} {t.bytes:12}")
    click.echo("\n".join(lines))


@main.command()
@options(MODEL)
@click.argument("text", required=False)
@click.option(
    "--file", "file", type=TEXT_FILE, help="The text of a file, whole. [default: standard input, if there is no TEXT]"
)
@click.option("--control", is_flag=True, help="Parse control tokens in the text.")
@click.option("--bos", is_flag=True, help="One BOS before it.")
@click.option("--ids", "only_ids", is_flag=True, help="Ids only, on one line.")
@click.option("--decode", is_flag=True, help="The other way: the text of token ids, as they are in TEXT or the file.")
def tokenize(text: str | None, file: str | None, control: bool, bos: bool, only_ids: bool, decode: bool, **o: Any) -> None:
    """Token ids of a text, and what each of them stands for."""
    if text is not None and file is not None:
        raise click.UsageError("TEXT and --file: only one of them")
    with click.open_file(file or "-", "rb") if text is None else contextlib.nullcontext() as f:
        data = f.read() if text is None and f is not None else os.fsencode(text or "")
    with opened(o | {"no_mtp": o["mtp"] is None and not o["glm_mtp"]}) as model:
        engine = model.engine
        if decode:
            click.echo(engine.detokenize_bytes(token_ids(data.decode("utf-8", "replace").split())), nl=False)
            return
        ids = engine.prompt(data, control=control) if bos else engine.tokenize(data, control=control)
        if only_ids:
            click.echo(" ".join(map(str, ids)))
            return
        for token in ids:
            click.echo(f"{token}\t{_quoted(engine.piece(token))}")


def _quoted(piece: bytes) -> str:
    """Bytes in quotes, as C writes them; what is UTF-8 and no control character stays."""
    out = []
    for c in piece.decode("utf-8", "surrogateescape"):
        if "\udc80" <= c <= "\udcff" or ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0:
            data = c.encode("utf-8", "surrogateescape")
            out.append("\\n" if c == "\n" else "".join(f"\\x{b:02x}" for b in data))
        else:
            out.append("\\" + c if c in '"\\' else c)
    return f'"{"".join(out)}"'


@main.command()
@options(MODEL)
@click.argument("file", type=TEXT_FILE)
def perplexity(file: str, **o: Any) -> None:
    """Nats a token and perplexity of a text; with a head, how often its first draft is the target's choice.

    A text longer than --ctx tokens is read in windows of that length, each starting in the middle of the one before; a token is
    scored in the first window it is in.
    """
    from ds4 import evaluate

    with click.open_file(file, "rb") as f:
        data = f.read()
    bar = Bar(o["quiet"])
    with opened(o, least_rewind=2) as model:
        ids = model.engine.tokenize(data)
        found = evaluate.perplexity(model.engine, ids, lambda done, total: bar("evaluated", done, total))
        bar.end()
    click.echo(f"tokens      {found.tokens} scored\nnats/token  {found.nats:.6f}\nperplexity  {found.perplexity:.6f}")
    click.echo(f"windows     {found.window} tokens, moved by {found.moved}")
    if found.drafts:
        click.echo(f"first draft {100 * found.right / found.drafts:.2f}% of {found.drafts} are the target's choice")


BENCH_TEXT = (
    "The lamp was lit at six, and the keeper wrote down the weather: wind from the west, moderate; two ships passed. In the "
    "morning the boat came with flour, oil and letters, and for some days he wrote nothing at all. "
)


@main.command()
@options(MODEL, PROMPT)
@click.option(
    "-n", "--tokens", type=click.IntRange(1, MAX_TOKENS), default=64, show_default=True, help="Generated for each measurement."
)
@click.option("--mtp-draft", type=Depth(), metavar="N|auto", help="A depth to try besides 1, 2, 3, 4, 8 and auto.")
@click.option(
    "--mtp-margin", type=FloatRange(0, 1000), help="The margin to try besides 0. [default: 3.0, and auto with 0 alone]"
)
@click.option(
    "--draft-lookup", type=click.IntRange(0, 64), default=0, show_default=True, help="Draft also what followed the last time that up to N tokens occurred; 0: off."
)
@click.option(
    "--bench-ctx", type=Numbers(), help="The contexts to measure at, ascending. [default: 0,512,2048, those that fit]"
)
@click.option(
    "--bench-runs", type=click.IntRange(1, 99), default=3, show_default=True, help="How often each is measured; medians count."
)
@click.option("--csv", "csv_file", type=OUT, help="The figures, one a line.")
@click.option("--json", "json_file", type=OUT, help="The figures as JSON.")
@click.option("--plot", type=OUT, help="The figures as a picture (PNG; needs matplotlib: pip install 'ds4[plot]').")
@click.option(
    "--from", "earlier", type=FILE, help="Measure nothing: take the figures that --json of ds4py bench or ./ds4 --bench wrote."
)
def bench(
    tokens: int, mtp_draft: int | str | None, mtp_margin: float | None, draft_lookup: int, bench_ctx: list[int] | None, bench_runs: int,
    csv_file: Path | None, json_file: Path | None, plot: Path | None, earlier: Path | None, **o: Any,
) -> None:  # fmt: skip
    """Measure plain and speculative generation, passes by their rows, head steps, and how many drafts must be right to pay.

    Behind the prompt (-p and so on, or a text of its own), end-of-text ignored. All in turns, so that a busy moment does not meet
    one side alone.
    """
    from ds4 import bench as b

    if twice := written_twice(path for path in (csv_file, json_file, plot) if path is not None):
        raise click.UsageError(f"--csv, --json and --plot: more than one would write {twice}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install 'ds4[plot]'")
    if earlier is not None:
        result = _read_result(earlier)
    else:
        prompt, bar = read_prompt(o, None), Bar(o["quiet"])
        depths = sorted({*b.DEPTHS, *([mtp_draft] if isinstance(mtp_draft, int) and mtp_draft else [])})
        with opened(o, least_rewind=max(tokens, b.ROWS[-1]), raw_vocab_ok=o["prompt_ids"] is not None) as model:
            if not model.engine.info.has_head and not draft_lookup:
                note_no_drafter(o["quiet"])
            ids = prompt_ids(model.engine, prompt, o) if prompt else model.engine.prompt(BENCH_TEXT)
            margin = margin_of({"mtp_margin": mtp_margin})
            result = b.measure(
                model.engine, ids, tokens=tokens, runs=bench_runs, contexts=bench_ctx, depths=depths,
                margins=None if margin is None else (margin, 0.0), lookup=draft_lookup,
                progress=lambda done, total: bar("bench", done, total),
            )  # fmt: skip
            bar.end()
    head = (
        f"{result.get('name') or result['model']}, {result['isa']} kernels, {result['threads']} threads, kv {result['kv_type']}"
    )
    click.echo(f"{head}; medians of {result['runs']}\n\n{b.table(result)}", nl=False)
    if csv_file is not None:
        with text_output(csv_file) as f:
            _write_csv(f, b.COLUMNS, b.rows(result))
    if json_file is not None:
        _write_json(json_file, result)
    if plot is not None:
        with replacing(plot) as file:
            b.plot(result, file)


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(result, dict) and result["frontiers"] and result["sweep"] is not None and result["runs"]):
            raise ValueError("no frontiers")
    except (ValueError, KeyError) as e:
        raise click.ClickException(f"{path}: not what --json of a bench writes ({e})") from e
    return result


def _write_csv(f: IO[str], columns: Sequence[str], lines: Iterator[tuple[Any, ...]]) -> None:
    writer = csv.writer(f, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([*where, f"{value:.5f}", unit] for *where, value, unit in lines)


# ---- names ----


@main.group()
def models() -> None:
    """Models by name, for -m and Model.from_pretrained."""


class RegisteredName(click.ParamType):  # type: ignore[type-arg]
    """A name that `models add` registered."""

    name = "name"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """What is registered."""
        try:
            return [CompletionItem(n) for n in names.registered() if n.startswith(incomplete)]
        except Error:
            return []


@models.command("add")
@click.argument("name")
@click.argument("file", type=FILE)
@click.option("--mtp", type=FILE, help="Its head. [default: none is registered; the one inside or beside the file is found]")
@click.option("--replace", is_flag=True, help="Take the name from whatever has it.")
def models_add(name: str, file: Path, mtp: Path | None, replace: bool) -> None:
    """Register FILE under NAME, after opening it (and the head) to see that it can be."""
    from ds4.engine import Engine

    with Engine(file, mtp, raw_vocab_ok=True, threads=1):
        pass
    names.add(name, file, mtp, replace=replace)


@models.command("list")
def models_list() -> None:
    """All names, and what is behind them."""
    for name in names.names():
        entry, unset = names.find(name)
        head = f"  --mtp {entry.mtp}" if entry.mtp else ""
        click.echo(f"{name:<16} {'not set; the small one stands in' if unset else f'{entry.model}{head}'}")


@models.command("remove")
@click.argument("name", type=RegisteredName())
def models_remove(name: str) -> None:
    """Forget a registered name; the files stay."""
    names.remove(name)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """A script that completes ds4py's commands, options, models and files.

    bash: ds4py completion bash > ~/.local/share/bash-completion/completions/ds4py

    zsh: ds4py completion zsh > a folder of $fpath/_ds4py
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, "ds4py", "_DS4PY_COMPLETE").source())
