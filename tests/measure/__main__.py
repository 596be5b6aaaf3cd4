"""The command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click
from ds4 import Error

from measure import files, flash, more, parts, profile
from measure.figures import Report
from measure.peer import Peer, build, default_cache

PARTS: dict[str, Callable[[parts.Bench], None]] = {
    "decode": parts.decode,
    "prompt": parts.prompt,
    "rows": parts.rows,
    "flash": flash.flash,
    "small": more.small,
    "least": more.least,
    "busy": more.busy,
    "context": more.context,
    "deep": more.deep,
    "load": more.load,
    "profile": profile.profile,
}
ASKED = ("deep", "profile")
"""Measured only when named."""
FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING = click.Path(path_type=Path, exists=True, dir_okay=False)


def listed(allowed: Callable[[str], bool], expected: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A callback of click for words with commas between them."""

    def check(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
        words = value.split(",")
        for word in words:
            if not allowed(word):
                raise click.BadParameter(f"{word!r}: expected {expected}")
        return words

    return check


def progress(text: str) -> None:
    """What is being done, on a terminal; nothing in a pipe."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", nl=False, err=True)


def show(text: str) -> None:
    """A table, in place of the progress."""
    progress("")
    click.echo(text)


@click.command(context_settings={"max_content_width": 125})
@click.option(
    "--only", metavar="PARTS", default=",".join(p for p in PARTS if p not in ASKED), show_default=True, help="Parts to measure, with commas between them.",
    callback=listed(PARTS.__contains__, f"some of {','.join(PARTS)}"),
)  # fmt: skip
@click.option(
    "--files", "names", metavar="NAMES", default="iq2,q4k,mxfp4", show_default=True, help=f"Slices: {', '.join(files.MADE)}.",
    callback=listed(files.MADE.__contains__, f"some of {','.join(files.MADE)}"),
)  # fmt: skip
@click.option(
    "--threads", metavar="NUMBERS", default="1,2", show_default=True, help="Numbers of threads.",
    callback=listed(lambda w: w.isdecimal() and 1 <= int(w) <= 256, "numbers from 1 to 256"),
)  # fmt: skip
@click.option("--runs", type=click.IntRange(1, 99), default=3, show_default=True, help="How often everything is measured.")
@click.option("--cache", type=FOLDER, default=default_cache, help="For slices and peer.  [default: $XDG_CACHE_HOME/ds4-bench]")
@click.option("--peer", "program", type=EXISTING, help="A llama-bench; else one is built in the cache.")
@click.option("--no-peer", is_flag=True, help="Measure ds4 alone.")
@click.option("--csv", "out", type=FILE, help="All figures, one a line.")
def main(
    only: list[str],
    names: list[str],
    threads: list[str],
    runs: int,
    cache: Path,
    program: Path | None,
    no_peer: bool,
    out: Path | None,
) -> None:
    """Measures ds4 beside llama.cpp's llama-bench on the same files, in turns, and prints medians (and spreads) as tables.

    \b
    decode  generation and a prompt of 256, beside memory's limit
    prompt  a prompt of 2048
    rows    passes of 1, 2, 3, 5 and 9 rows
    flash   speculation with a scripted head on slices of 4, 8 and 16 layers, and computed for all of Flash's 43
    small   the bundled pair: plain, and what its head brings
    least   a pass of a model of width 64
    busy    decoding while another process keeps a core busy
    context decoding and a prompt of 2048 at contexts of 1024, 32768 and 100000
    deep    a prompt of 2048 at 32768, beside the peer; takes long, measured only when named
    load    opening a file
    profile where a pass of 1 row and of 256 spends its time; needs perf, measured only when named

    The files are slices of DeepSeek-V4-Flash's shape with random weights, of 4 to 12 GB, made when missing. For an idle machine.
    """
    if no_peer and program:
        raise click.UsageError("--peer and --no-peer exclude each other")
    report = Report(show=show)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if out:
            report.write(out)  # before the work: it may not be writable
        peer = None if no_peer else Peer(program or build(cache, progress))
        bench = parts.Bench(cache, runs, [int(t) for t in threads], names, peer, report, progress)
        for part in only:
            PARTS[part](bench)
            if out:
                report.write(out)
    except (OSError, Error) as e:
        raise click.ClickException(str(e)) from e
    finally:
        progress("")


if __name__ == "__main__":
    main(prog_name="python -m measure")
