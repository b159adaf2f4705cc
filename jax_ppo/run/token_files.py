"""The files of `jax_ppo.score`: a row per token, the page with coloured tokens, the summary."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_ppo.data.messages import join_contents
from jax_ppo.data.response_rows import ResponseRow
from jax_ppo.data.tokenizer import decode_continuation, decode_tokens
from jax_ppo.errors import counted
from jax_ppo.reporting import html_report
from jax_ppo.reporting.files import to_json_value, write_json_lines, write_summary_file

# The numbers of a token by the names of their columns; a report's name of each.
FIGURES = {
    "logprob": "logprobs",
    "ref_logprob": "reference_logprobs",
    "kl": "kl",
    "entropy": "entropies",
    "value": "values",
    "reward": "rewards",
    "advantage": "advantages",
    "return": "returns",
}
SHOWN_RESPONSES = 200

Figures = dict[str, np.ndarray]  # float32 [N, T] by column, N responses of at most T tokens


@dataclasses.dataclass
class Scores:
    """The numbers of all usable rows."""

    figures: Figures  # NaN where a token has no such number
    scores: np.ndarray  # float32 [N], the rewards of whole responses
    correct: np.ndarray  # float32 [N], NaN where correctness is undefined
    answers: dict[int, str]  # that the rules read, by row
    failures: int  # responses that the rule failed on
    incomplete: int  # responses without an advantage, for want of others to the same prompt


def write_results(
    options: dict[str, Any],
    workdir: Path,
    tokenizer: Any,
    rows: Sequence[ResponseRow],
    scores: Scores,
    summary: dict[str, Any],
    started: float,
) -> None:
    """Write the tokens, the page with all options, and the summary."""
    texts = [
        decode_tokens(tokenizer, int(row.prompt_ids[-1]), row.response_ids.tolist()) for row in rows
    ]
    write_json_lines(workdir / "tokens.jsonl", _token_rows(rows, texts, scores.figures))
    shown = enumerate(zip(rows[:SHOWN_RESPONSES], texts, strict=False))
    records = [_describe_row(tokenizer, *row, scores, number) for number, row in shown]
    status = f"{counted(len(rows), 'response')} of {options['score']['file']}, {len(records)} shown"
    html_report.write_scores_page(
        workdir / "report.html", options, status, summary["notes"], records
    )
    write_summary_file(workdir, summary | {"seconds": time.monotonic() - started})


def _token_rows(
    rows: Sequence[ResponseRow], texts: Sequence[list[str]], figures: Figures
) -> Iterator[dict[str, Any]]:
    """Yield a row for each token: its response's row in the file, its place, and its numbers."""
    for number, (row, tokens) in enumerate(zip(rows, texts, strict=True)):
        columns = [figures[name][number].tolist() for name in FIGURES]
        for place, (text, token) in enumerate(zip(tokens, row.response_ids.tolist(), strict=True)):
            values = {
                name: column[place] if column[place] == column[place] else None
                for name, column in zip(FIGURES, columns, strict=True)
            }
            yield {"row": row.number, "place": place, "text": text, "token": token, **values}


def _describe_row(
    tokenizer: Any, row: ResponseRow, texts: list[str], scores: Scores, number: int
) -> dict[str, Any]:
    ids = row.response_ids.tolist()
    correct = scores.correct[number]
    record = {
        "prompt": join_contents(row.example.prompt),
        "response": decode_continuation(tokenizer, int(row.prompt_ids[-1]), ids),
        "data_source": row.example.data_source,
        # Shown beside the answer that a rule has read.
        "ground_truth": "" if np.isnan(correct) else row.example.ground_truth,
        "score": float(f"{scores.scores[number]:.6g}"),
        "answer": scores.answers.get(number),
        "correct": None if np.isnan(correct) else bool(correct),
        "truncated": row.truncated,
        "address": row.location,
        "response_ids": ids,
        "tokens": texts,
    }
    if not row.action_mask.all():
        record["action_mask"] = row.action_mask.astype(int).tolist()
        record["turn_starts"] = row.turn_starts.astype(int).tolist()
    for column, name in FIGURES.items():
        values = scores.figures[column][number, : len(ids)]
        if not np.isnan(values).all():
            record[name] = [float(f"{value:.6g}") for value in values.tolist()]
    return to_json_value(record)
