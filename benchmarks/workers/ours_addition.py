"""Worker of time_to_reward.py and time_to_sums.py: jax_ppo until it has learned to add.

Arguments: configuration options as JSON, by dotted name. Each turn is a run with the next seed,
from the configuration to the target, using the components of life_cycle.run_life_cycle. Everything
is compiled before the clock starts, by steps and an evaluation on a state that is discarded. For
time_to_sums.py, the arguments have `options` and the `limits` of the clock, and the only turn is a
run of the configuration smollm2_sums, timed from the reading of the model on.
"""

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

import addition
import harness
import jax

from jax_ppo.config import loading, schema
from jax_ppo.ppo import forward_passes
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.mini_batches import sample_lengths
from jax_ppo.ppo.objectives import UpdateOptions
from jax_ppo.ppo.reward_shaping import EarnedRewards, ExperienceOptions
from jax_ppo.ppo.update import UpdateSetup, update_state
from jax_ppo.reporting import console
from jax_ppo.run.build import build_run
from jax_ppo.run.evaluation import evaluate_policy
from jax_ppo.run.parts import PPORun
from jax_ppo.runtime import meshes
from jax_ppo.training.random_streams import Stream

WARM_UP_STEPS = 2  # the second takes the state that the first one's update returned


def exact_match(data_source, solution_str, ground_truth, extra_info):
    """Return the reward of a response.

    A truncated response has four symbols, so it never equals the three-digit answer.
    """
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right}


def write_data(folder: Path) -> None:
    """Write train.jsonl and held.jsonl in verl's format, and a character tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    splits = addition.splits()
    for name in ("train", "held"):
        rows = (
            {
                "data_source": "addition",
                "prompt": addition.prompt(pair),
                "reward_model": {"style": "rule", "ground_truth": addition.answer(pair)},
            }
            for pair in splits[name]
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocabulary = {symbol: token for token, symbol in enumerate(splits["vocab"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=splits["vocab"][addition.PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    # Only EOS is special: a sampled PAD appears in the text and makes the response wrong.
    (folder / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": splits["vocab"][addition.EOS],
            }
        )
    )


def make_config(folder: Path, options: dict, seed: int) -> schema.Config:
    config = loading.default_config()
    config.update_from_flattened_dict(
        {
            "seed": seed,
            "data.train_files": str(folder / "train.jsonl"),
            "data.val_files": str(folder / "held.jsonl"),
            "data.val_batch_size": 1000,
            "data.max_prompt_length": addition.PROMPT,
            "data.max_response_length": addition.RESPONSE,
            "model.path": str(addition.FOLDER),
            "model.tokenizer_path": str(folder / "tokenizer"),
            "model.dtype": "float32",
            "model.gradient_checkpointing": False,
            "reward.function": f"{__file__}:exact_match",
            "reward.workers": 0,  # in this process, as on the other sides
            "trainer.total_training_steps": addition.MAX_STEPS,
            "trainer.log_samples": 0,
        }
        | options
    )
    return loading.from_config_dict(config)


class Training:
    """The loop of life_cycle.run_life_cycle without metrics, checkpoints and progress bar."""

    def __init__(self, run: PPORun):
        self.run, self.batches, self.steps_done = run, run.batches(0), 0
        self.state = run.states.create(run.folders, console.make_loading_reporter)

    def step(self) -> None:
        run, config, state = self.run, self.run.config, self.state
        batch = next(self.batches)
        run.engine.update_weights(run.policy_params(state))
        rollout = run.engine.generate(
            run.place_prompts(batch.prompts),
            run.sample_keys(Stream.TRAINING, self.steps_done),
            run.sampling,
        )
        run.engine.release_weights()
        packed = run.packer.pack(self.steps_done, sample_lengths(batch, rollout))
        sequences = forward_passes.join_sequences(rollout, config.sequence_length)
        scores = forward_passes.run_forward_passes(
            forward_passes.ForwardOptions.from_config(config),
            run.nets,
            state,
            sequences,
            packed.forward,
        )
        rewarded = run.rules.score(batch, rollout)
        experience, _ = estimate_experience(
            ExperienceOptions.from_config(config),
            state.control,
            sequences,
            rollout.logprobs,
            scores,
            EarnedRewards(rewarded.scores),
        )
        setup = UpdateSetup(UpdateOptions.from_config(config), run.nets, run.total_steps)
        self.state, _ = update_state(setup, state, experience, packed.mini_batches)
        self.steps_done += 1

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    def accuracy(self) -> float:
        return evaluate_policy(self.run, self.state).accuracy


def reach_target(config: schema.Config) -> dict:
    """Run once; `warm_up_seconds` covers the first calls, which compile."""
    jax.clear_caches()  # programs of an earlier turn
    mesh = meshes.make_mesh(config.mesh)
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as workdir:
        run = build_run(config, Path(workdir), mesh, console.print_on_main)
        start = time.perf_counter()
        discarded = Training(run)
        for _ in range(WARM_UP_STEPS):
            discarded.step()
        discarded.accuracy()
        warm_up = time.perf_counter() - start
        training = Training(run)
        clock = addition.Clock(addition.TARGET, addition.MAX_STEPS)
        return addition.until_target(clock, training.step, training.wait, training.accuracy) | {
            "warm_up_seconds": warm_up
        }


def reach_limits(config: schema.Config, limits: dict) -> dict:
    """Run once, until the clock ends it, and time the loading of the model and compilation too."""
    clock, mesh = addition.Clock(**limits), meshes.make_mesh(config.mesh)
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as workdir:
        training = Training(build_run(config, Path(workdir), mesh, console.print_on_main))
        return addition.until_target(clock, training.step, training.wait, training.accuracy, 1)


def main(options: dict) -> None:
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers")
    if "limits" in options:
        config = loading.load_config("smollm2_sums", options["options"])
        harness.serve(lambda: reach_limits(config, options["limits"]), packages=packages)
        return
    seeds = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        harness.serve(
            lambda: reach_target(make_config(Path(folder), options, next(seeds))),
            packages=packages,
        )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
