"""Scores of the tokens of given responses: what a training step would have learned from them.

All rows of a file that can be used are taken as one rollout: log-probs and values are computed in
batches of `data.val_batch_size` responses, rewards by the rules and the reward model, and
advantages, returns and whatever is normalized over a rollout over all of them at once.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_ppo.config.schema import Algorithm, Config, Data, Reward
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.data.response_rows import RefusedRow, ResponseReader, ResponseRow
from jax_ppo.data.token_rows import pad_token_rows
from jax_ppo.data.tokenizer import decode_continuation, decode_tokens
from jax_ppo.errors import UserError, counted
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.ppo import reward_shaping
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.forward_passes import ForwardOutputs, join_sequences, run_forward_passes
from jax_ppo.ppo.mini_batches import sample_lengths
from jax_ppo.registries import ADVANTAGE_ESTIMATORS
from jax_ppo.reporting import console, html_report, lambda_table
from jax_ppo.reporting.atomic import replace_file
from jax_ppo.reporting.summary import to_json_value, write_summary_file
from jax_ppo.rewards import registry, row_validation
from jax_ppo.run.build import set_up_run
from jax_ppo.run.critic_quality import in_units_of_reward
from jax_ppo.run.evaluation import response_rewards
from jax_ppo.run.parts import PPORun
from jax_ppo.run.sample_records import prompt_text
from jax_ppo.run.standalone_evaluation import (
    find_checkpoint,
    load_models,
    read_run_options,
    with_exported_models,
)
from jax_ppo.runtime import (
    compilation,
    distributed,
    heartbeat,
    meshes,
    placement,
    sharding,
)
from jax_ppo.storage.paths import expand_local_path
from jax_ppo.training.roles import resolve_role_folders
from jax_ppo.training.setup import chat_template, load_model_tokenizer, make_parser
from jax_ppo.training.state import TrainState
from jax_ppo.types import Example, Prompts, Rollout, Sequences

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
WITHOUT_CRITIC = "reinforce_plus_plus"  # rewards to go
_ROWS_AT_ONCE = 1000  # responses whose tokens a Parquet row group has

Figures = dict[str, np.ndarray]  # float32 [N, T] by column, N responses of at most T tokens


@dataclasses.dataclass
class Scores:
    """The numbers of all usable rows.

    Attributes:
      figures: see `Figures`; NaN where a token has no such number.
      scores: float32 [N], the rewards of whole responses.
      correct: float32 [N], NaN where correctness is undefined.
      values: float32 [N, T], values in units of reward; `None` without a critic.
      answers: the answers that the rules read, by row.
      failures: responses that the rule failed on.
      incomplete: responses without an advantage, for want of others to the same prompt.
    """

    figures: Figures
    scores: np.ndarray
    correct: np.ndarray
    values: np.ndarray | None
    answers: dict[int, str]
    failures: int
    incomplete: int


def score_file(config: Config, workdir: Path) -> dict[str, Any]:
    """Score the rows of `score.file`, and write what they got to the work directory.

    Returns:
      The contents of summary.json.

    Raises:
      UserError: the file or a model cannot be read, or no row can be used.
    """
    started = time.monotonic()
    checkpoint = find_checkpoint(config.model.path)
    config, notes = _choose_models(config, checkpoint)
    for note in notes:
        console.print_on_main(f"note: {note}")
    mesh = meshes.make_mesh(config.mesh)
    with jax.set_mesh(mesh), compilation.count_compilations() as compiled:
        with heartbeat.activity("reading rows"):
            rows, refused = _read_rows(config, workdir)
        _write_lines(workdir / "refused.jsonl", (row._asdict() for row in refused))
        total = counted(len(rows) + len(refused), "row")
        if refused:
            notes.append(
                f"{len(refused)} of {total} refused (refused.jsonl), the first: "
                f"{refused[0].location}: {refused[0].reason}"
            )
            console.print_on_main(f"warning: {notes[-1]}")
        if not rows:
            raise UserError(f"config.score.file={config.score.file!r}: no row of {total} is usable")
        # The rules are resolved for one row of each source.
        examples = list({row.example.data_source: row.example for row in rows}.values())
        run = set_up_run(
            config, workdir, mesh, console.print_on_main, trains=False, held_out=examples
        )
        state = load_models(run, checkpoint, ("actor", "critic"))
        with run.rules.running():
            scores, late_programs = _score_rows(run, state, rows, compiled)
    if scores.failures:
        notes.append(f"the reward function failed on {scores.failures} of {len(rows)} responses")
    if scores.incomplete:
        notes.append(
            f"{scores.incomplete} of {len(rows)} responses have no advantage: "
            f"config.algorithm.adv_estimator={config.algorithm.adv_estimator!r} compares "
            f"{config.responses_per_prompt} responses to the same prompt"
        )
    table = _compare_lambdas(config.algorithm, rows, scores)
    summary = {
        "rows": len(rows),
        "refused": len(refused),
        "tokens": int(sum(len(row.response_ids) for row in rows)),
        "reward_mean": float(scores.scores.mean()),
        "rule_failures": scores.failures,
        "without_advantage": scores.incomplete,
        "lambda_table": table,
        "compiled_programs": compiled.programs,
        "programs_after_first_batch": late_programs,
        "notes": notes,
    }
    if distributed.is_main():
        with heartbeat.activity("writing tokens"):
            _write_results(config, workdir, run.tokenizer, rows, scores, summary, started)
    console.print_on_main(
        f"scored {counted(len(rows), 'response')}, {summary['tokens']} tokens, in "
        f"{time.monotonic() - started:.1f} s: {workdir}/tokens.{config.score.format}"
    )
    return summary


def _choose_models(config: Config, checkpoint: Path | None) -> tuple[Config, list[str]]:
    """Return the options with the models of a checkpoint or of an exported run, and notes."""
    # Nothing is decoded.
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, max_num_seqs=1)
    )
    if checkpoint is not None:
        run = read_run_options(checkpoint)
        config = dataclasses.replace(
            config, model=run.model, critic=run.critic, reference=run.reference
        )
        has_critic = run.has_critic
    else:
        config = with_exported_models(config)
        has_critic = bool(config.critic.path)
    if has_critic or not config.has_critic:
        return config, []
    note = "there is no critic (config.critic.path is not set): advantages are rewards to go"
    algorithm = dataclasses.replace(
        config.algorithm, adv_estimator=WITHOUT_CRITIC, bootstrap_truncated=False
    )
    critic = dataclasses.replace(config.critic, normalize_values=False)
    return dataclasses.replace(config, algorithm=algorithm, critic=critic), [note]


def _read_rows(config: Config, workdir: Path) -> tuple[list[ResponseRow], list[RefusedRow]]:
    """Return the rows that can be used, and the others."""
    folders = resolve_role_folders(config, workdir, lambda folder: None)
    option = "config.score.file"
    scores_any = config.score.reward_key or config.rewards_by_environment_alone
    scores_any = scores_any or registry.scores_any_row(config.reward)
    reader = ResponseReader(
        tokenizer=load_model_tokenizer(config.model, folders.actor),
        parse=make_parser(config.data, config.score.response_key).parse,
        chat_template=chat_template(config.data),
        vocab_size=read_architecture(folders.actor).vocab_size,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        reward_key=config.score.reward_key,
        find_obstacle=functools.partial(_find_obstacle, None if scores_any else config.reward),
    )
    rows, refused = [], list[RefusedRow]()
    for row in reader.read(expand_local_path(config.score.file, option), option):
        if isinstance(row, RefusedRow):
            refused.append(row)
        else:
            rows.append(row)
    return rows, refused


def _find_obstacle(options: Reward | None, example: Example) -> str:
    """Return why no rule can score an example; "" if one can, or `options` is `None`."""
    if options is None:
        return ""
    obstacles = row_validation.find_obstacles([example], options.function, options.terms)
    return next(obstacles, "").removeprefix("example 1: ")


def _score_rows(
    run: PPORun, state: TrainState, rows: Sequence[ResponseRow], compiled: compilation.Compilations
) -> tuple[Scores, int]:
    """Return the scores, and how many programs were compiled after the first batch."""
    size = run.config.data.val_batch_size
    has_turns = any(row.turn_rewards is not None for row in rows)
    batches = []
    programs = failures = 0
    answers: dict[int, str] = {}
    report = console.make_count_reporter("scoring", "response")
    for start in range(0, len(rows), size):
        # Batches of one size, the last one filled up: one program for all.
        numbers = np.resize(np.arange(start, min(start + size, len(rows))), size).tolist()
        chosen = [rows[number] for number in numbers]
        count = min(size, len(rows) - start)
        batches.append(_score_batch(run, state, chosen, count, has_turns))
        answers |= {start + row: text for row, text in batches[-1].pop("answers").items()}
        failures += batches[-1].pop("failures")
        programs = programs or compiled.programs
        report(start + count, len(rows))
    late_programs = compiled.programs - programs
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    scores = _estimate(run, state, rows, joined)
    return dataclasses.replace(scores, answers=answers, failures=failures), late_programs


def _score_batch(
    run: PPORun, state: TrainState, rows: Sequence[ResponseRow], count: int, has_turns: bool
) -> dict[str, Any]:
    """Return the outputs of the forward passes and the rewards of the first `count` rows."""
    options = run.step_options
    batch, rollout = _make_batch(run.config.data, rows, count, has_turns)
    rollout = placement.place(rollout, sharding.batch_rows(run.mesh, len(rows)))
    # The sampler's log-probs are not known, or of another model.
    forward = dataclasses.replace(options.forward, old_logprobs=True, entropy=True)
    outputs = run_forward_passes(
        forward,
        run.nets,
        state,
        join_sequences(rollout, options.sequence_length),
        *run.packer.pack_rows(sample_lengths(batch, rollout)),
    )
    found = {f"outputs/{name}": x for name, x in vars(outputs).items() if x is not None}
    failures, answers = 0, dict[int, str]()
    if run.config.score.reward_key:
        found["rewards"] = np.array([row.reward for row in rows], np.float32)
        found["correct"] = np.full(len(rows), np.nan, np.float32)
        steps = rollout.turn_rewards
    else:
        rule_rewards = run.rules.score(batch, rollout)
        found["rewards"] = response_rewards(run, state, batch, rollout, rule_rewards)
        found["correct"] = rule_rewards.correct
        answers = {row: text for row, text in rule_rewards.answers.items() if row < count}
        failures = rule_rewards.failures
        steps = rule_rewards.steps
    if steps is not None:
        found["steps"] = steps
    on_host = {
        name: (placement.to_host(x) if isinstance(x, jax.Array) else x)[:count]
        for name, x in found.items()
    }
    return on_host | {"failures": failures, "answers": answers}


def _make_batch(
    data: Data, rows: Sequence[ResponseRow], count: int, has_turns: bool
) -> tuple[PromptBatch, Rollout]:
    """Return rows as a batch of prompts and their responses, on the host."""
    width = data.max_response_length

    def pad(values: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        padded = np.zeros((len(values), width), dtype)
        for target, value in zip(padded, values, strict=True):
            target[: len(value)] = value
        return padded

    prompts = Prompts(
        tokens=pad_token_rows([row.prompt_ids for row in rows], data.max_prompt_length),
        lengths=np.array([len(row.prompt_ids) for row in rows], np.int32),
    )
    turn_rewards = None
    if has_turns:
        turn_rewards = pad(
            [np.zeros(0) if row.turn_rewards is None else row.turn_rewards for row in rows],
            np.float32,
        )
    batch = PromptBatch(
        examples=tuple(row.example for row in rows),
        prompts=prompts,
        indices=np.arange(len(rows)),
        count=count,
    )
    return batch, Rollout(
        prompts=prompts,
        responses=pad([row.response_ids for row in rows], np.int32),
        lengths=np.array([len(row.response_ids) for row in rows], np.int32),
        logprobs=np.zeros((len(rows), width), np.float32),
        truncated=np.array([row.truncated for row in rows]),
        action_mask=pad([row.action_mask for row in rows], bool),
        turn_rewards=turn_rewards,
    )


def _estimate(
    run: PPORun,
    state: TrainState,
    rows: Sequence[ResponseRow],
    found: dict[str, np.ndarray],
) -> Scores:
    """Return the scores of the rows, with advantages over all of them at once."""
    options = run.step_options
    lengths = np.array([len(row.response_ids) for row in rows], np.int32)
    width = int(lengths.max())
    actions = np.zeros((len(rows), width), bool)
    for target, row in zip(actions, rows, strict=True):
        target[: len(row.action_mask)] = row.action_mask
    outputs: dict[str, Any] = {
        name.removeprefix("outputs/"): x if x.ndim == 1 else x[:, :width]
        for name, x in found.items()
        if name.startswith("outputs/")
    }
    order = _group_rows(run.config.algorithm.adv_estimator, run.config.responses_per_prompt, rows)
    figures = {name: np.full(actions.shape, np.nan, np.float32) for name in FIGURES}

    def write(name: str, values: Any, numbers: np.ndarray | slice = slice(None)) -> None:
        if values is not None:
            chosen = placement.to_host(values) if isinstance(values, jax.Array) else values
            figures[name][numbers] = np.where(actions[numbers], chosen, np.nan)

    write("logprob", outputs["old_logprobs"])
    write("entropy", outputs["entropy"])
    write("ref_logprob", outputs.get("ref_logprobs"))
    write("value", outputs.get("values"))
    if "ref_logprobs" in outputs:
        everywhere = sharding.batch_rows(run.mesh, len(rows))
        on_mesh = placement.place((ForwardOutputs(**outputs), actions), everywhere)
        write("kl", _reference_kl(options.experience.algorithm, *on_mesh))
    if len(order):
        place = functools.partial(
            placement.place, sharding=sharding.batch_rows(run.mesh, len(order))
        )
        on_mesh = ForwardOutputs(**{name: place(x[order]) for name, x in outputs.items()})
        sequences = Sequences(
            tokens=place(np.zeros((len(order), 1), np.int32)),  # not read
            prompt_lengths=place(np.ones(len(order), np.int32)),
            lengths=place(lengths[order]),
            truncated=place(np.array([rows[number].truncated for number in order])),
            action_mask=place(actions[order]),
        )
        steps = found.get("steps")
        experience, _ = estimate_experience(
            options.experience,
            state.control,
            sequences,
            on_mesh.old_logprobs,
            on_mesh,
            place(found["rewards"][order]),
            None if steps is None else place(steps[order, :width]),
        )
        write("reward", experience.rewards, order)
        write("advantage", experience.advantages, order)
        write("return", experience.returns, order)
    values = None
    if "values" in outputs:
        values = np.asarray(in_units_of_reward(outputs["values"], state.control))
    rewards = found["rewards"]
    if "steps" in found:
        rewards = rewards + found["steps"].sum(1)
    return Scores(
        figures=figures,
        scores=rewards,
        correct=found["correct"],
        values=values,
        answers={},
        failures=0,
        incomplete=len(rows) - len(order),
    )


@functools.partial(jax.jit, static_argnames=("algorithm",))
def _reference_kl(algorithm: Algorithm, outputs: ForwardOutputs, actions: jax.Array) -> jax.Array:
    assert outputs.old_logprobs is not None, "they have been computed"
    return reward_shaping.reference_kl(algorithm, outputs.old_logprobs, outputs, actions)


def _group_rows(estimator: str, n: int, rows: Sequence[ResponseRow]) -> np.ndarray:
    """Return the rows that have advantages; if groups are compared, those of a prompt adjacent."""
    if not (":" in estimator or ADVANTAGE_ESTIMATORS.lookup(estimator).needs_groups):
        return np.arange(len(rows))
    groups: dict[tuple[bytes, str], list[int]] = {}
    for number, row in enumerate(rows):
        key = (row.prompt_ids.tobytes(), repr(row.example.ground_truth))
        groups.setdefault(key, []).append(number)
    whole = [numbers[: len(numbers) // n * n] for numbers in groups.values()]
    return np.array([number for numbers in whole for number in numbers], int)


def _compare_lambdas(
    algorithm: Algorithm, rows: Sequence[ResponseRow], scores: Scores
) -> list[dict[str, Any]]:
    """Return the table of lambda and gamma; empty without a critic."""
    if scores.values is None:
        return []
    tokens = lambda_table.collect_tokens(
        {
            "rewards": rewards[: len(row.action_mask)],
            "values": values[: len(row.action_mask)],
            "action_mask": row.action_mask,
        }
        for row, rewards, values in zip(rows, scores.figures["reward"], scores.values, strict=True)
    )
    if tokens is None:
        return []
    return lambda_table.compare_lambdas(tokens, algorithm.lam, algorithm.gamma)


def _write_results(
    config: Config,
    workdir: Path,
    tokenizer: Any,
    rows: Sequence[ResponseRow],
    scores: Scores,
    summary: dict[str, Any],
    started: float,
) -> None:
    """Write the tokens, the page and the summary."""
    texts = [
        decode_tokens(tokenizer, int(row.prompt_ids[-1]), row.response_ids.tolist()) for row in rows
    ]
    path = workdir / f"tokens.{config.score.format}"
    if config.score.format == "jsonl":
        _write_lines(path, _token_rows(rows, texts, scores.figures))
    else:
        _write_parquet(path, rows, texts, scores.figures)
    records = [
        _describe_row(tokenizer, rows[number], texts[number], scores, number)
        for number in range(min(len(rows), SHOWN_RESPONSES))
    ]
    status = f"{counted(len(rows), 'response')} of {config.score.file}, {len(records)} shown"
    html_report.write_scores_page(
        workdir / "report.html",
        config,
        status,
        summary["notes"],
        records,
        lambda_table.format_rows(summary["lambda_table"]),
    )
    seconds = time.monotonic() - started
    write_summary_file(workdir, summary | {"seconds": seconds})


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


def _write_parquet(
    path: Path, rows: Sequence[ResponseRow], texts: Sequence[list[str]], figures: Figures
) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    types = {"row": pa.int64(), "place": pa.int32(), "text": pa.string(), "token": pa.int32()}
    schema = pa.schema({**types, **dict.fromkeys(FIGURES, pa.float32())})
    with replace_file(path) as temporary, pa.parquet.ParquetWriter(temporary, schema) as writer:
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            some = {name: values[part] for name, values in figures.items()}
            tokens = list(_token_rows(rows[part], texts[part], some))
            writer.write_table(pa.Table.from_pylist(tokens, schema=schema))


def _write_lines(path: Path, objects: Iterator[dict[str, Any]]) -> None:
    """Write JSON objects, one per line, on the main process; the file is replaced atomically."""
    if not distributed.is_main():
        return
    with replace_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for value in objects:
            text = json.dumps(value, ensure_ascii=False)
            file.write(text.encode("utf-8", errors="replace").decode() + "\n")


def _describe_row(
    tokenizer: Any, row: ResponseRow, texts: list[str], scores: Scores, number: int
) -> dict[str, Any]:
    """Return the record that the page shows of a response."""
    ids = row.response_ids.tolist()
    correct = scores.correct[number]
    record = {
        "prompt": prompt_text(row.example),
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
    for column, name in FIGURES.items():
        values = scores.figures[column][number, : len(ids)]
        if not np.isnan(values).all():
            record[name] = [float(f"{value:.6g}") for value in values.tolist()]
    return to_json_value(record)
