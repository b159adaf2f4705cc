"""The first step in full, for debugging: shapes, masks, and each token of one sample."""

from typing import Any

import jax

from jax_ppo.errors import printable_lines
from jax_ppo.reporting.html_report import TOKEN_FIGURES
from jax_ppo.run.sample_records import StepSamples
from jax_ppo.runtime import placement

_WIDTH = 16  # characters of a column


def format_first_step(samples: StepSamples, record: dict[str, Any]) -> str:
    """Return a table of the arrays of a step, and one of the tokens of a sample.

    Every process must call it: arrays are exchanged.

    Args:
      samples: the step's samples.
      record: the first record of `describe_step`.
    """
    arrays = {"rollout": samples.sampled.rollout, "experience": samples.experience}
    lines = ["arrays of the step:"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        note = ""
        if leaf.dtype == bool:  # masks, and which responses were cut off
            note = f"  {int(placement.to_host(leaf).sum())} of {leaf.size} true"
        lines.append(f"  {name:40} {leaf.dtype}{list(leaf.shape)}{note}")
    tokens = record["tokens"]
    names = ("response_ids", "action_mask", *TOKEN_FIGURES)
    columns = {name: record[name] for name in names if name in record}
    lines += [
        f"sample {record['address']['sample']}: score {record['score']}, ground truth "
        f"{record['ground_truth']!r}, answer {record['answer']!r}, prompt:",
        *(f"  {line}" for line in printable_lines(record["prompt"]).splitlines()),
        "tokens of its response:",
        "  " + " ".join([f"{'token':{_WIDTH}}", *(f"{name:>{_WIDTH}}" for name in columns)]),
    ]
    for row, token in enumerate(tokens):
        cells = [f"{values[row]:>{_WIDTH}.6g}" for values in columns.values()]
        shown = printable_lines(repr(token)[1:-1])[:_WIDTH]
        lines.append("  " + " ".join([f"{shown:{_WIDTH}}", *cells]))
    return "\n".join(line.rstrip() for line in lines)
