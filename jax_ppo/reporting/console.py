"""What a run shows while it goes on: lines in columns, a bar with the phase of the step, responses in a table.

Everything is shown by the main process alone.
"""

import contextlib
import itertools
import math
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import tqdm

from jax_ppo.runtime import distributed


def print_on_main(text: str) -> None:
    """Prints a line, on the main process."""
    if distributed.is_main():
        print(text, flush=True)


def format_step_line(step: int, total: int, metrics: dict[str, float], columns, optional=()) -> str:
    """One line for a step; those of a run stand under each other.

    Args:
      columns: of each figure the text before it, its name in `metrics`, width, format, and the text after it.
      optional: figures left out where there is none; a dash in place of the others keeps the columns.
    """
    parts = [f"step {step:{len(str(total))}d}/{total}"]
    for before, name, width, form, after in columns:
        value = metrics.get(name)
        if name in optional and (value is None or math.isnan(value)):
            continue
        parts.append(
            before + ("-" if value is None else format(float(value), form)).rjust(width) + after
        )
    return "  ".join(parts)


def make_loading_reporter(role: str) -> Callable[[int, int], None]:
    """What `load_checkpoint` reports to while it reads a role's weights: a bar on a terminal, elsewhere a line at the end."""
    bar = tqdm.tqdm(
        desc=f"loading the {role}",
        unit="tensor",
        leave=False,
        disable=not (distributed.is_main() and sys.stderr.isatty()),
    )

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update()
        if done == total:
            bar.close()
            print_on_main(f"loaded the {role}: {total} tensors")

    return progress


class ProgressBar:
    """A bar with the phase of the step on a terminal, plain lines elsewhere, and the seconds of each phase."""

    def __init__(self, total: int, first_step: int, enabled: bool):
        """Begins with `first_step` of `total` steps done. Where it is not enabled nothing is shown, only measured."""
        self._enabled, self._seconds = enabled, {}
        self._bar = tqdm.tqdm(
            total=total,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=not (enabled and sys.stderr.isatty()),
        )

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error) -> None:
        self._bar.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows the phase and adds its wall seconds on the host to `seconds/NAME`.

        What JAX does meanwhile is counted in the phase that waits for it.
        """
        self._bar.set_description(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            key = f"seconds/{name}"
            self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - started

    def take_seconds(self) -> dict[str, float]:
        """The seconds of each phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    def print_line(self, text: str) -> None:
        """Prints without tearing the bar."""
        if self._enabled:
            self._bar.write(text)
            sys.stdout.flush()

    def advance(self, line: str) -> None:
        """Counts a step done and prints its line."""
        self.print_line(line)
        self._bar.update()


def format_sample_table(rows: list[dict[str, Any]], width: int | None = None) -> str:
    """Responses as a table for the console.

    Args:
      rows: dicts of prompt and response (text), score (number), correct (bool, or None where that has no meaning).
      width: columns of the table; unset: the terminal's, or 100.
    """
    width = width or shutil.get_terminal_size((100, 24)).columns
    left = (width - 21) * 2 // 5  # 21: score, correct and what stands between
    right = width - 21 - left
    lines = [f"{'prompt':{left}}  {'response':{right}}  {'score':>8}  correct", "-" * width]
    for row in rows:
        correct = {True: "yes", False: "no", None: "-"}[row["correct"]]
        texts = _cell(row["prompt"], left), _cell(row["response"], right)
        lines.append("  ".join((*texts, f"{row['score']:8.3f}", f"{correct:>7}")))
    return "\n".join(line.rstrip() for line in lines)


def _cell(text, width):
    """Text on one line of exactly `width` columns, its middle left out if it is longer."""
    # Anything that is not printed might be an escape sequence, which a model must not send to a terminal.
    text = "".join(c if c.isprintable() else "·" for c in text.strip().replace("\n", "⏎"))
    shown = [(c, 2 if unicodedata.east_asian_width(c) in "WF" else 1) for c in text]
    if sum(size for _, size in shown) > width:
        half = (width - 1) // 2
        shown = [*_take(shown, half), ("…", 1), *_take(shown[::-1], width - 1 - half)[::-1]]
    return "".join(c for c, _ in shown) + " " * (width - sum(size for _, size in shown))


def _take(columns, width):
    """As many characters as fit into `width` columns."""
    ends = itertools.accumulate(size for _, size in columns)
    return [column for column, end in zip(columns, ends, strict=True) if end <= width]
