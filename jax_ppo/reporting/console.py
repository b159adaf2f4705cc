"""Console output of a run: aligned step lines, a progress bar and a table of sampled responses.

Only the main process prints.
"""

import contextlib
import dataclasses
import itertools
import math
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tqdm

from jax_ppo.errors import printable_lines
from jax_ppo.runtime import distributed, faults, heartbeat

# Columns of a sample table that are neither prompt nor response: score, correct and separators.
_FIXED_TABLE_WIDTH = 21
LEAST_REPORTED_SECONDS = 5  # of work whose end is worth a line
_LEAST_TABLE_WIDTH = 40  # narrower terminals wrap the lines


@dataclasses.dataclass(frozen=True)
class Column:
    """One metric in the line that is printed after each step."""

    metric: str
    width: int  # characters of the formatted number, right-aligned
    format: str  # format specification of the number, such as ".3f"
    label: str = ""  # text before the number, including its separating space
    unit: str = ""  # text after the number, including its separating space
    optional: bool = False  # without a value the column is left out, not a dash


def print_on_main(text: str) -> None:
    """Print a line above any progress bars, if this is the main process."""
    faults.report_progress()
    if distributed.is_main():
        heartbeat.line_printed()
        print_aside(text)


def print_aside(text: str) -> None:
    """Print a line above any progress bars, without counting it as progress."""
    tqdm.tqdm.write(text)
    sys.stdout.flush()


def format_step_line(
    step: int, total: int, metrics: dict[str, float], columns: Sequence[Column]
) -> str:
    """Return the line for one step of `total`, counted from 1, with a dash for a missing value."""
    parts = [f"step {step:{len(str(total))}d}/{total}"]
    for column in columns:
        value = metrics.get(column.metric)
        if column.optional and (value is None or math.isnan(value)):
            continue
        # Numbers are right-aligned to a fixed width, so that columns line up from step to step.
        number = "-" if value is None else format(float(value), column.format)
        parts.append(column.label + number.rjust(column.width) + column.unit)
    return "  ".join(parts)


def make_loading_reporter(role: str) -> Callable[[int, int], None]:
    """Return the `make_count_reporter` of a role's weight tensors."""
    return make_count_reporter(f"loading the {role}", "tensor", f"loaded the {role}")


def make_count_reporter(
    work: str, unit: str, finished_work: str = ""
) -> Callable[[int, int], None]:
    """Return a callback (units done, units in total) that shows the progress of a piece of work.

    It shows a progress bar on a terminal, and prints one line at the end of work that took long.
    `work` names it, as in "loading the actor", `unit` what is counted, as in "tensor", and
    `finished_work` the work at its end, as in "loaded the actor"; "" for the same.
    """
    # Carriage returns would fill a log file, so bars are for terminals only.
    bar = tqdm.tqdm(
        desc=work,
        unit=unit,
        leave=False,
        disable=not (distributed.is_main() and sys.stderr.isatty()),
    )
    activity = heartbeat.Activity(work)

    def report_progress(count: int, total: int) -> None:
        activity.update(f"{count}/{total} {unit}s")
        bar.total = total
        bar.update(count - bar.n)
        if count == total:
            bar.close()
            activity.end()
            if time.monotonic() - activity.started_at >= LEAST_REPORTED_SECONDS:
                print_on_main(f"{finished_work or work}: {total} {unit}s")

    return report_progress


class ProgressBar:
    """Progress bar of the current phase on a terminal, lines elsewhere; it times the phases."""

    def __init__(self, total: int, first_step: int, enabled: bool) -> None:
        """Open the bar of a run of `total` steps; unless enabled, only phases are measured."""
        self._enabled = enabled
        self._seconds: dict[str, float] = {}
        self._bar = tqdm.tqdm(
            total=total,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            # tqdm's own estimate counts compilation and evaluations as a part of each step.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            disable=not (enabled and sys.stderr.isatty()),
        )

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the phase; add its seconds, waiting for devices included, to `seconds/NAME`."""
        self._bar.set_description(name)
        started = time.perf_counter()
        try:
            with heartbeat.activity(name):
                yield
        finally:
            # A phase may be entered several times per step.
            key = f"seconds/{name}"
            self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - started

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and reset them."""
        seconds = self._seconds
        self._seconds = {}
        return seconds

    def print_line(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._enabled:
            heartbeat.line_printed()
            self._bar.write(text)
            sys.stdout.flush()

    def advance(self, line: str, seconds_left: float) -> None:
        """Count one step as complete, print its line and show the time left."""
        left = tqdm.tqdm.format_interval(round(seconds_left))
        self._bar.set_postfix_str(f"about {left} left", refresh=False)
        self.print_line(line)
        heartbeat.line_printed(is_step=True)
        self._bar.update()


def format_sample_table(rows: list[dict[str, Any]], width: int | None = None) -> str:
    """Return sampled responses as a text table.

    Rows have prompt and response (text), score (number) and correct (bool, or None if the reward
    does not define correctness); lines have `width` characters, by default as many as the terminal.
    """
    # Prompt and response share the remaining width, 2 to 3.
    width = max(width or shutil.get_terminal_size((100, 24)).columns, _LEAST_TABLE_WIDTH)
    prompt_width = (width - _FIXED_TABLE_WIDTH) * 2 // 5
    response_width = width - _FIXED_TABLE_WIDTH - prompt_width
    lines = [f"{'prompt':{prompt_width}}  {'response':{response_width}}  {'score':>8}  correct"]
    for row in rows:
        correct = {True: "yes", False: "no", None: "-"}[row["correct"]]
        cells = (
            _format_cell(row["prompt"], prompt_width),
            _format_cell(row["response"], response_width),
            f"{row['score']:8.3f}",
            f"{correct:>7}",
        )
        lines.append("  ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _format_cell(text: str, width: int) -> str:
    """Return the text as one line of exactly `width` columns; cut its middle if it is longer."""
    # Unprintable characters may form an escape sequence, which a model must not send to a terminal.
    line = printable_lines(text.strip().replace("\n", "⏎"))
    # The columns of the terminal that each character occupies.
    sized = [(c, 2 if unicodedata.east_asian_width(c) in "WF" else 1) for c in line]
    # The end of a response, with its answer, matters as much as the beginning.
    if sum(size for _, size in sized) > width:
        half = (width - 1) // 2
        start = _take_columns(sized, half)
        end = _take_columns(sized[::-1], width - 1 - half)[::-1]
        sized = [*start, ("…", 1), *end]
    padding = width - sum(size for _, size in sized)
    return "".join(c for c, _ in sized) + " " * padding


def _take_columns(sized: list[tuple[str, int]], width: int) -> list[tuple[str, int]]:
    """Return the longest prefix of (character, columns) pairs that fits into `width` columns."""
    ends = itertools.accumulate(size for _, size in sized)
    return [pair for pair, end in zip(sized, ends, strict=True) if end <= width]
