"""Console output of a run: aligned step lines, a progress bar and a table of sampled responses.

Only the main process prints.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tqdm

from jax_ppo.errors import printable_lines
from jax_ppo.runtime import distributed, faults, heartbeat

# Columns of a sample table beside prompt and response: score, correct, separators, an empty one.
_FIXED_TABLE_WIDTH = 20
LEAST_REPORTED_SECONDS = 5  # of work whose end is worth a line
_LEAST_TABLE_WIDTH = 40  # narrower terminals wrap the lines


@dataclasses.dataclass(frozen=True)
class Column:
    """One metric in the line that is printed after each step."""

    metric: str
    width: int  # characters of the number, right-aligned
    decimals: int  # of the number; fewer where it would not fit
    label: str = ""  # text before the number, including its separating space
    unit: str = ""  # text after the number, including its separating space
    equal_to: str = ""  # left out until its value differs from that of this metric
    # Narrower terminals do not show it. Where a line is too long, the largest is left out first.
    least_terminal: int = 0


def shows_bars() -> bool:
    """Return whether progress bars are shown: not where they would mix with lines or fill a log."""
    return distributed.is_main() and sys.stdout.isatty() and sys.stderr.isatty()


def terminal_width() -> int:
    """Return the columns of the terminal, also behind `| tee`; 80 without one."""
    widths = [shutil.get_terminal_size((0, 0)).columns]  # reads COLUMNS, too
    for descriptor in (2, 0):
        with contextlib.suppress(OSError):
            widths.append(os.get_terminal_size(descriptor).columns)
    return next(filter(None, widths), 80)


def format_duration(seconds: float) -> str:
    """Return 41 seconds as "0:41", and 3 hours and 12 minutes as "3h12"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}" if hours else f"{minutes}:{seconds:02d}"


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


class StepLines:
    """The line printed after each step, narrower than the terminal; columns keep their places."""

    def __init__(self, total: int, columns: Sequence[Column]) -> None:
        """Take the number of steps of the run; lines have the time left where no bar shows it."""
        self._total, self._columns, self._width = total, columns, terminal_width()
        self._shows_time_left = not shows_bars()
        self._differing: set[Column] = set()

    def format(self, step: int, metrics: dict[str, float]) -> str:
        """Return the line for a step, counted from 1, with a dash for a missing value."""
        line = f"step {step:{len(str(self._total))}d}/{self._total}"
        for column in self._fitting(self._width - 1 - len(line), metrics):
            value = metrics.get(column.metric)
            number = "-" if value is None else _format_number(value, column)
            line += f"  {column.label}{number:>{column.width}}{column.unit}"
        if self._shows_time_left:
            line += f"  {format_duration(metrics['perf/seconds_left'])} left"
        return line

    def _fitting(self, width: int, metrics: dict[str, float]) -> list[Column]:
        """Return the columns that fit into `width`: the same at each step, unless one appears."""
        for column in self._columns:
            value, other = (metrics.get(x, math.nan) for x in (column.metric, column.equal_to))
            if not (math.isnan(value) or math.isclose(value, other, abs_tol=1e-6)):
                self._differing.add(column)
        shown = [x for x in self._columns if not x.equal_to or x in self._differing]
        width -= len("  59:59 left") * self._shows_time_left
        for column in sorted(shown[::-1], key=lambda x: -x.least_terminal):
            is_long = sum(2 + len(x.label) + x.width + len(x.unit) for x in shown) > width
            if column.least_terminal > (0 if is_long else self._width):
                shown.remove(column)
        return shown


def _format_number(value: float, column: Column) -> str:
    """Return a number of at most the column's width if one has it; zero has no sign."""
    numbers = (f"{value:z,.{decimals}f}" for decimals in range(column.decimals, -1, -1))
    return next((x for x in numbers if len(x) <= column.width), f"{value:.0e}")


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
    bar = tqdm.tqdm(desc=work, unit=unit, leave=False, disable=not shows_bars())
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

    def __init__(self, total: int, first_step: int) -> None:
        """Open the bar of a run of `total` steps."""
        self._seconds = collections.defaultdict[str, float](float)
        self._bar = tqdm.tqdm(
            total=total,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            leave=False,  # it would stand between two lines
            # tqdm's own estimate counts compilation and evaluations as a part of each step.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            disable=not shows_bars(),
        )
        self.close = self._bar.close

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the phase; add its seconds, waiting for devices included, to `seconds/NAME`."""
        self._bar.set_description(name)
        started = time.perf_counter()
        try:
            with heartbeat.activity(name):
                yield
        finally:
            self._seconds[f"seconds/{name}"] += time.perf_counter() - started

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and reset them."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def advance(self, line: str, seconds_left: float) -> None:
        """Count one step as complete, print its line and show the time left."""
        self._bar.set_postfix_str(f"about {format_duration(seconds_left)} left", refresh=False)
        print_on_main(line)
        heartbeat.line_printed(is_step=True)
        self._bar.update()


def format_sample_table(rows: list[dict[str, Any]], width: int | None = None) -> str:
    """Return sampled responses as a text table, each below its prompt.

    Rows have prompt and response (text), score (number) and correct (bool, or None if the reward
    does not define correctness); lines are narrower than `width`, by default the terminal. Words
    that all prompts begin or end with are left out.
    """
    width = max(width or terminal_width(), _LEAST_TABLE_WIDTH) - _FIXED_TABLE_WIDTH
    lines = [f"{'score':>8}  correct  prompt and response"]
    prompts = [row["prompt"] for row in rows]
    if len(set(prompts)) > 1:
        prompts = _without_shared_ends(prompts)
    for row, prompt in zip(rows, prompts, strict=True):
        correct = {True: "yes", False: "no", None: "-"}[row["correct"]]
        lines.append(f"{row['score']:z8.3f}  {correct:>7}  {_format_cell(prompt, width)}")
        lines.append(" " * (_FIXED_TABLE_WIDTH - 1) + _format_cell(row["response"], width))
    return "\n".join(line.rstrip() for line in lines)


def _without_shared_ends(texts: list[str]) -> list[str]:
    """Return texts with an ellipsis for the words that all of them begin or end with."""
    words = [re.split(r"(?<=\s)", text) for text in texts]
    first = len(os.path.commonprefix(words))
    last = len(os.path.commonprefix([x[::-1] for x in words]))
    last = min(last, min(map(len, words)) - first)
    ends = ("…" * bool(first), "…" * bool(last))
    return ["".join(x[first : len(x) - last]).join(ends) for x in words]


def _format_cell(text: str, width: int) -> str:
    """Return the text as one line of at most `width` columns; cut its middle if it is longer."""
    # Unprintable characters may form an escape sequence, which a model must not send to a terminal.
    line = printable_lines(text.strip().replace("\n", "⏎"))
    if _take_columns(line, width) == line:
        return line
    # The end of a response, with its answer, matters as much as the beginning.
    start = _take_columns(line, (width - 1) // 2)
    return f"{start}…{_take_columns(line[::-1], width // 2)[::-1]}"


def _take_columns(text: str, width: int) -> str:
    """Return the longest beginning of a text that fits into `width` columns of a terminal."""
    sizes = (2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
    return text[: sum(end <= width for end in itertools.accumulate(sizes))]
