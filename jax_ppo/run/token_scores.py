"""Scores of the tokens of given responses: what a training step would have learned from them.

All rows of a file that can be used are taken as one rollout: log-probs and values are computed in
batches of `data.val_batch_size` responses, rewards by the rules and the reward model, and
advantages, returns and whatever is normalized over a rollout over all of them at once. The results
are a row per token, a page with coloured tokens, and a summary.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_ppo.config.schema import Config, replace_options
from jax_ppo.data.messages import join_contents
from jax_ppo.data.prompt_batches import PromptBatch, make_batch
from jax_ppo.data.response_rows import GivenResponses, ResponseRow
from jax_ppo.data.tokenizer import decode_continuation, decode_tokens
from jax_ppo.errors import counted
from jax_ppo.ppo import reward_shaping
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.rewarding import given_rewards
from jax_ppo.registries import ADVANTAGE_ESTIMATORS
from jax_ppo.reporting import console, html_report
from jax_ppo.reporting.files import to_json_value, write_json_lines, write_summary_file
from jax_ppo.run.build import build_run
from jax_ppo.run.evaluation import response_rewards
from jax_ppo.run.parts import PPORun
from jax_ppo.run.run_examples import read_given_responses
from jax_ppo.run.standalone_evaluation import (
    find_checkpoint,
    load_models,
    read_run_options,
    with_exported_models,
)
from jax_ppo.runtime import distributed, heartbeat, meshes, placement, sharding
from jax_ppo.training.state import TrainState
from jax_ppo.types import Sequences, with_nan

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


@dataclasses.dataclass
class Scores:
    """The numbers of all N usable rows, whose responses have at most T tokens."""

    figures: dict[str, np.ndarray]  # float32 [N, T] by column, NaN where a token has no number
    scores: np.ndarray  # float32 [N], the rewards of whole responses
    correct: np.ndarray  # float32 [N], NaN where correctness is undefined
    answers: dict[int, str]  # that the rules read, by row
    failures: int  # responses that the rule failed on
    incomplete: int  # responses without an advantage, for want of others to the same prompt


def score_file(config: Config, workdir: Path) -> dict[str, Any]:
    """Score the rows of `score.file`, and return the contents of summary.json.

    Raise `UserError` if the file or a model cannot be read, or no row can be used.
    """
    started = time.monotonic()
    checkpoint = find_checkpoint(config.model.path)
    config, notes = _choose_models(config, checkpoint)
    for note in notes:
        console.print_on_main(f"note: {note}")
    mesh = meshes.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        given, refused, refusal = read_given_responses(config, workdir)
        notes += refusal
        rows = given.rows
        run = build_run(config, workdir, mesh, console.print_on_main, trains=False, given=given)
        state = load_models(run, checkpoint, ("actor", "critic"))
        with run.rules.running():
            scores = _score_rows(run, state, given)
    if scores.failures:
        notes.append(f"the reward function failed on {scores.failures} of {len(rows)} responses")
    if scores.incomplete:
        notes.append(
            f"{scores.incomplete} of {len(rows)} responses have no advantage: "
            f"config.algorithm.adv_estimator={config.algorithm.adv_estimator!r} compares "
            f"{config.responses_per_prompt} responses to the same prompt"
        )
    summary = {
        "rows": len(rows),
        "refused": refused,
        "tokens": int(sum(len(row.response_ids) for row in rows)),
        "reward_mean": float(scores.scores.mean()),
        "rule_failures": scores.failures,
        "without_advantage": scores.incomplete,
        "notes": notes,
    }
    if distributed.is_main():
        with heartbeat.activity("writing tokens"):
            texts = [
                decode_tokens(run.tokenizer, int(row.prompt_ids[-1]), row.response_ids.tolist())
                for row in rows
            ]
            write_json_lines(workdir / "tokens.jsonl", _token_rows(rows, texts, scores.figures))
            shown = enumerate(zip(rows[:SHOWN_RESPONSES], texts, strict=False))
            records = [_describe_row(run.tokenizer, *row, scores, number) for number, row in shown]
            status = f"{counted(len(rows), 'response')} of {config.score.file}"
            report = html_report.HTMLReport(workdir, dataclasses.asdict(config), ())
            report.write_scores(f"{status}, {len(records)} shown", notes, records)
            seconds = time.monotonic() - started
            write_summary_file(workdir, summary | {"seconds": seconds})
    console.print_on_main(
        f"scored {counted(len(rows), 'response')}, {summary['tokens']} tokens, in "
        f"{time.monotonic() - started:.1f} s: {workdir}/tokens.jsonl"
    )
    console.print_on_main(f"report: {workdir}/report.html")
    return summary


def _choose_models(config: Config, checkpoint: Path | None) -> tuple[Config, list[str]]:
    """Return the options with the models of a checkpoint or of an exported run, and notes."""
    notes = []
    # Nothing is decoded, and nothing held out is read.
    unread = {"data.val_files": "", "data.val_fraction": 0.0}
    config = replace_options(config, unread | {"rollout.max_num_seqs": 1})
    if config.score.reward_key:  # the rewards are in the rows
        config = replace_options(config, {"reward.model_path": ""})
    if checkpoint is not None:
        run = read_run_options(checkpoint)
        if config.reward.normalize != run.reward.normalize:
            notes.append(
                f"config.reward.normalize={config.reward.normalize!r}: not read; the checkpoint "
                f"was saved with {run.reward.normalize!r}, and has the moments for it"
            )
        sections = {name: getattr(run, name) for name in ("model", "critic", "reference")}
        config = replace_options(config, {"reward.normalize": run.reward.normalize, **sections})
        has_critic = run.has_critic
    else:
        model, critic = with_exported_models(config.model, config.critic, config.has_critic)
        config = dataclasses.replace(config, model=model, critic=critic)
        has_critic = bool(config.critic.path)
    if has_critic or not config.has_critic:
        return config, notes
    notes.append("there is no critic (config.critic.path is not set): advantages are rewards to go")
    without_critic = {
        "algorithm.adv_estimator": "reinforce_plus_plus",  # rewards to go
        "algorithm.bootstrap_truncated": False,
        "critic.normalize_values": False,
    }
    return replace_options(config, without_critic), notes


def _score_rows(run: PPORun, state: TrainState, given: GivenResponses) -> Scores:
    size = run.config.data.val_batch_size
    batches = []
    failures = 0
    answers: dict[int, str] = {}
    report = console.make_count_reporter("scoring", "response")
    for start in range(0, len(given), size):
        # Batches of one size and width, the last one filled up: one program for all.
        count = min(size, len(given) - start)
        indices = np.resize(np.arange(start, start + count), size)
        batch = make_batch(given, indices, count, width=given.max_prompt_length)
        batches.append(_score_batch(run, state, given, batch))
        answers |= {start + row: text for row, text in batches[-1].pop("answers").items()}
        failures += batches[-1].pop("failures")
        report(start + count, len(given))
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    return _estimate(run, state, given, joined, answers, failures)


def _score_batch(
    run: PPORun, state: TrainState, given: GivenResponses, batch: PromptBatch
) -> dict[str, Any]:
    """Return the outputs of the forward passes and the rewards of the real rows of a batch."""
    layout = sharding.batch_rows(run.mesh, len(batch.examples))
    rollout = placement.place(given.rollout(batch), layout)
    # The sampler's log-probs are not known, or of another model.
    _, outputs = run.run_forward_passes(state, batch, rollout, old_logprobs=True, entropy=True)
    if given.has_rewards:
        rule_rewards = given_rewards(run.mesh, given, batch, rollout)
    else:
        rule_rewards = run.rules.score(batch, rollout)
    found = {
        "outputs": outputs,
        "rewards": response_rewards(run, state, batch, rollout, rule_rewards),
        "correct": rule_rewards.correct,
        "steps": rule_rewards.steps,
    }
    on_host = jax.tree.map(lambda x: placement.to_host(x)[: batch.count], found)
    answers = {row: text for row, text in rule_rewards.answers.items() if row < batch.count}
    return on_host | {"failures": rule_rewards.failures, "answers": answers}


def _estimate(
    run: PPORun,
    state: TrainState,
    given: GivenResponses,
    found: dict[str, Any],
    answers: dict[int, str],
    failures: int,
) -> Scores:
    """Return the scores of the rows, with advantages over all of them at once."""
    rows = given.rows
    rollout = given.rollout(make_batch(given, np.arange(len(rows)), len(rows)))
    longest = rollout.lengths.max()  # often far shorter than a response may be
    rollout, outputs, steps = jax.tree.map(
        lambda x: x if x.ndim == 1 else x[:, :longest], (rollout, found["outputs"], found["steps"])
    )
    actions = rollout.action_mask
    sequences = Sequences(
        tokens=np.zeros((len(rows), 1), np.int32),  # no estimator reads them
        prompt_lengths=np.ones(len(rows), np.int32),
        lengths=rollout.lengths,
        truncated=rollout.truncated,
        action_mask=actions,
        turn_starts=rollout.turn_starts,
    )
    columns = {
        "logprob": outputs.old_logprobs,
        "entropy": outputs.entropy,
        "ref_logprob": outputs.ref_logprobs,
        "value": outputs.values,
    }
    if outputs.ref_logprobs is not None:
        estimate_kl = jax.jit(reward_shaping.reference_kl, static_argnums=0)
        placed = placement.place(
            (outputs.old_logprobs, outputs, actions), sharding.batch_rows(run.mesh, len(rows))
        )
        kl = estimate_kl(run.step_options.experience.algorithm, *placed)
        columns["kl"] = placement.to_host(kl)
    figures = {name: np.full(actions.shape, np.nan, np.float32) for name in FIGURES}
    for name, values in columns.items():
        if values is not None:
            figures[name] = np.where(actions, values, figures[name])
    order = _group_rows(run.config.algorithm.adv_estimator, run.config.responses_per_prompt, rows)
    rewards = found["rewards"]
    if len(order):
        chosen = jax.tree.map(lambda x: x[order], (sequences, outputs, rewards, steps))
        layout = sharding.batch_rows(run.mesh, len(order))
        sequences, outputs, *earned = placement.place(chosen, layout)
        experience, _ = estimate_experience(
            run.step_options.experience,
            state.control,
            sequences,
            outputs.old_logprobs,
            outputs,
            reward_shaping.EarnedRewards(*earned),
        )
        estimates = {"reward": experience.rewards, "advantage": experience.advantages}
        for name, estimate in (estimates | {"return": experience.returns}).items():
            if estimate is not None:
                on_host = placement.to_host(estimate)
                figures[name][order] = np.where(actions[order], on_host, np.nan)
    if steps is not None:
        rewards = rewards + steps.sum(1)
    incomplete = len(rows) - len(order)
    return Scores(figures, rewards, with_nan(found["correct"]), answers, failures, incomplete)


def _group_rows(estimator: str, n: int, rows: Sequence[ResponseRow]) -> np.ndarray:
    """Return the rows that have advantages; if groups are compared, a prompt's are adjacent."""
    if not (":" in estimator or ADVANTAGE_ESTIMATORS.lookup(estimator).needs_groups):
        return np.arange(len(rows))
    groups: dict[tuple[bytes, str], list[int]] = {}
    for number, row in enumerate(rows):
        key = (row.prompt_ids.tobytes(), repr(row.example.ground_truth))
        groups.setdefault(key, []).append(number)
    whole = [numbers[: len(numbers) // n * n] for numbers in groups.values()]
    return np.array([number for numbers in whole for number in numbers], int)


def _token_rows(
    rows: Sequence[ResponseRow], texts: Sequence[list[str]], figures: dict[str, np.ndarray]
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
