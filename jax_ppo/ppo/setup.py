"""What one run is made of, built in the order in which things can be wrong: cheap checks first, weights last.

Everything here stays the same from step to step; what changes is in TrainState.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jax_ppo.config import notes, validation
from jax_ppo.config.schema import Config
from jax_ppo.data import prompts as prompts_lib
from jax_ppo.data import sources
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.errors import UserError
from jax_ppo.models import heads
from jax_ppo.models.hf import peft
from jax_ppo.models.hf.hub import resolve_model_folder
from jax_ppo.ppo import objectives, reward_inputs
from jax_ppo.rewards import registry, step_rewards
from jax_ppo.rewards.rules import RewardResult
from jax_ppo.runtime import sharding
from jax_ppo.sampler.built_in import resolve_engine
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.supervised import warmup
from jax_ppo.training import packing
from jax_ppo.training import setup as shared_setup
from jax_ppo.training.networks import Folders, full_parameters, read_networks
from jax_ppo.training.state import TrainState, state_shapes
from jax_ppo.types import MiniBatches, Packing, Prompts, Rollout, Sequences

TRAINING, EVALUATION, REFERENCE = 0, 1, 2  # streams of random numbers


@dataclasses.dataclass(frozen=True)
class Plans:
    """Packed rows for one rollout: arguments of scoring.score (plan, micro_batches), and those of update; None: no critic."""

    scoring: tuple[Packing, jax.Array]
    actor: MiniBatches
    critic: MiniBatches | None


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """What the rules say of a rollout; arrays on the mesh.

    Attributes:
      scores: float32 [B].
      steps: float32 [B, T], rewards within the responses; None where the rules give none (reward.process_rewards).
      correct: float32 [B], 1 or 0, NaN where the rules have no notion of right.
      failures: samples of this process whose rule failed.
      extra: what else the rules report, means over this process's samples that have it; and how many of its responses, with
        their prompts, were longer than the reward model reads (`model_inputs_cut`).
      model_inputs: for a reward model with tokens of its own what it reads, as scoring.reward_model_scores takes it.
    """

    scores: jax.Array
    steps: jax.Array | None
    correct: jax.Array
    failures: int
    extra: dict[str, float]
    model_inputs: tuple[Sequences, Packing, jax.Array] | None = None


class Experiment:
    """The parts of a run.

    Attributes:
      config, mesh: as given.
      folders: where each role's checkpoint lies.
      nets: each role's model.
      tokenizer: the actor's.
      reward_inputs: what the reward model reads is made by it; None: it takes the samples as they are, or there is none.
      training, held_out: PromptDatasets; held_out is None without validation files.
      steps_per_epoch, total_steps: counts of steps.
      engine: generates responses, with the parameters that `policy` returns.
      sampling, held_out_sampling: how it samples, from rollout.* and rollout.val_kwargs.*.
    """

    def __init__(self, config: Config, workdir: Path, mesh, report: Callable[[str], None]):
        self.config, self.mesh = config, mesh
        validation.validate_batch_sharding(config, sharding.row_shards(mesh))
        training, held_out = self._examples()
        for note in notes.train_notes(config):
            report(f"note: {note}")
        self._reward_function = None  # a reward model without a function is all the reward there is
        if config.reward.function or not config.reward.model_path:
            self._reward_function = registry.resolve_reward_function(
                config.reward.function, config.reward.gsm8k_method
            )
            registry.validate_data_sources([*training, *held_out], config.reward.function)
        objectives.policy_loss(
            config.actor.policy_loss
        )  # one of the user's own is imported before anything heavy
        self._engine_class = resolve_engine(config.rollout.engine)
        self.folders = self._folders(workdir, report)
        self.nets = read_networks(config, self.folders)
        self.tokenizer = (
            tokenizer_lib.load_tokenizer(config.model.tokenizer_path)
            if config.model.tokenizer_path
            else tokenizer_lib.load_tokenizer(str(self.folders.actor), option="config.model.path")
        )
        self.reward_inputs = self.nets.reward and reward_inputs.choose(
            config,
            mesh,
            self.nets.reward,
            self.folders.reward,
            self.tokenizer,
            report,
            not isinstance(training[0].prompt, str),
        )
        self._check_model()
        self.training = self._tokenize(training, "config.data.train_files")
        self.held_out = self._tokenize(held_out, "config.data.val_files") if held_out else None
        self.steps_per_epoch = self.batches(0).steps_per_epoch
        self.total_steps = (
            config.trainer.total_training_steps
            or config.trainer.total_epochs * self.steps_per_epoch
        )
        self._build_engine()
        self._key = jax.jit(
            functools.partial(_sample_key, config.seed), out_shardings=sharding.replicated(mesh)
        )
        kept = len(self.held_out.examples) if self.held_out else 0
        report(
            f"{len(self.training.examples)} training and {kept} held-out prompts, "
            f"{self.total_steps} steps of {config.data.train_batch_size} prompts x {config.rollout.n}"
        )

    def batches(self, position: int) -> prompts_lib.PromptBatches:
        """Training batches from a position on, in examples consumed."""
        return prompts_lib.PromptBatches(
            self.training,
            self.config.data.train_batch_size,
            self.config.data.shuffle,
            self.config.seed,
            position,
        )

    def held_out_batches(self):
        return prompts_lib.evaluation_batches(self.held_out, self.config.data.val_batch_size)

    def key(self, stream: int, step: int) -> jax.Array:
        """The base key of a step's samples, on the mesh."""
        return self._key(self._everywhere(np.int32(stream)), self._everywhere(np.int32(step)))

    def on_mesh(self, prompts: Prompts) -> Prompts:
        return sharding.place(prompts, sharding.rows(self.mesh))

    def plan_scoring(self, lengths) -> tuple[Packing, jax.Array]:
        """Packs all samples, of these lengths (prompt and response), for the passes that only read."""
        packed, counts = self._pack(
            lengths,
            np.arange(len(lengths))[None],
            self.config.rollout.logprob_micro_batch_size_per_device
            or self.config.actor.ppo_micro_batch_size_per_device,
        )
        packed = jax.tree.map(lambda x: x[0], packed)
        return sharding.place(packed, sharding.rows(self.mesh, axis=1)), self._everywhere(counts[0])

    def plan(self, step: int, lengths) -> Plans:
        """Packs a rollout of these lengths for scoring, and each epoch's freshly shuffled mini-batches for the update."""
        of_actor, of_critic = (_cut(options) for options in (self.config.actor, self.config.critic))
        of_critic = tuple(own or actors for own, actors in zip(of_critic, of_actor, strict=True))
        actor, critic = self._mini_batches(step, lengths, *of_actor), None
        if self.nets.critic:
            critic = (
                actor if of_critic == of_actor else self._mini_batches(step, lengths, *of_critic)
            )
        return Plans(self.plan_scoring(lengths), actor, critic)

    def _mini_batches(self, step, lengths, epochs, prompts, per_device) -> MiniBatches:
        """`prompts` a mini-batch. Roles that cut a rollout alike get the same mini-batches."""
        samples, count = len(lengths), self.config.data.train_batch_size // prompts
        groups = np.concatenate(
            [
                np.random.default_rng([self.config.seed, step, epoch])
                .permutation(samples)
                .reshape(count, -1)
                for epoch in range(epochs)
            ]
        )
        members = np.zeros((len(groups), samples), bool)
        np.put_along_axis(members, groups, True, axis=1)
        packed, counts = self._pack(lengths, groups, per_device)
        return MiniBatches(
            sharding.place(packed, sharding.rows(self.mesh, axis=2)),
            self._everywhere(counts),
            self._everywhere(members),
        )

    def _everywhere(self, array) -> jax.Array:
        return sharding.place(array, sharding.replicated(self.mesh))

    def _pack(self, lengths, groups, per_device):
        config = self.config
        at_once = packing.rows_at_once(
            per_device, config.row_length, groups.shape[1], sharding.row_shards(self.mesh)
        )
        return packing.plan(lengths, groups, at_once, config.row_length, config.packing.enabled)

    def reward(self, batch, rollout: Rollout, keep: int = 0):
        """Scores this process's responses by the rules.

        Returns:
          Rewarded, and the first `keep` responses as dicts of row (of all samples), prompt, response, score, correct.
        """
        indices, responses = sharding.local_rows(rollout.responses)
        _, lengths = sharding.local_rows(rollout.lengths)
        responses = [row[:length] for row, length in zip(responses, lengths, strict=True)]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        n = rollout.responses.shape[0] // len(batch.examples)
        examples = [batch.examples[i // n] for i in indices]
        rule = self._reward_function or (lambda example, text: RewardResult(0.0))
        scored = registry.score_batch(rule, examples, texts, self.config.reward.fallback_score)
        earned = scored.scores + np.array(
            [sum(reward for _, reward in steps) for steps in scored.step_rewards], np.float32
        )
        samples = [
            {
                "row": int(row),
                "prompt": _text(example.prompt),
                "response": text,
                "score": float(score),
                "correct": None if np.isnan(correct) else bool(correct),
            }
            for row, example, text, score, correct in list(
                zip(indices, examples, texts, earned, scored.correct, strict=True)
            )[: max(keep, 0)]
        ]
        total, steps = rollout.responses.shape[0], None
        if self.config.reward.process_rewards:
            decode = functools.partial(
                self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            of_samples = [
                step_rewards.assign_step_rewards(
                    given, response.tolist(), decode, rollout.responses.shape[1]
                )
                for given, response in zip(scored.step_rewards, responses, strict=True)
            ]
            steps = sharding.from_local_rows(self.mesh, indices, np.stack(of_samples), total)
        extra, inputs = (
            {name: float(np.nanmean(values)) for name, values in scored.extra.items()},
            None,
        )
        if self.reward_inputs:
            prompts = batch.prompts
            last = prompts.tokens[np.arange(len(prompts.lengths)), prompts.lengths - 1]
            inputs, cut = self.reward_inputs(
                examples, last[indices // n], responses, texts, indices, total
            )
            extra["model_inputs_cut"] = cut
        return Rewarded(
            sharding.from_local_rows(self.mesh, indices, scored.scores, total),
            steps,
            sharding.from_local_rows(self.mesh, indices, scored.correct, total),
            scored.failures,
            extra,
            inputs,
        ), samples

    def _examples(self):
        data = self.config.data
        load = functools.partial(
            sources.load_examples,
            prompt_key=data.prompt_key,
            instruction=data.instruction,
            seed=self.config.seed,
        )
        training = load(data.train_files)
        held_out = load(data.val_files, option="config.data.val_files") if data.val_files else []
        return training, held_out[: data.val_max_samples]

    def _folders(self, workdir, report) -> Folders:
        """Finds or fetches every role's checkpoint; makes the actor where none is named."""
        model, critic, reward = self.config.model, self.config.critic, self.config.reward
        if model.path:
            actor = resolve_model_folder(model.path)
        else:
            actor = workdir / "model"
            warmup.make_model(self.config, actor, self.mesh, report)
        return Folders(
            actor=actor,
            critic=None
            if not self.config.has_critic or self.config.shares_trunk
            else resolve_model_folder(critic.path, what="config.critic.path")
            if critic.path
            else actor,
            reward=resolve_model_folder(reward.model_path, what="config.reward.model_path")
            if reward.model_path
            else None,
            adapters=resolve_model_folder(
                model.lora.path,
                "config.model.lora.path",
                f"{peft.ADAPTER_CONFIG} and {peft.ADAPTER_WEIGHTS}",
            )
            if model.lora.path
            else None,
        )

    def _check_model(self):
        config, tokenizer = self.config, self.tokenizer
        for net in (
            self.nets.actor,
            self.nets.critic,
            None if self.reward_inputs else self.nets.reward,
        ):
            if net is not None:
                shared_setup.check_model(config, self.mesh, net.architecture, tokenizer)
        if config.critic.path and tokenizer_lib.has_tokenizer(self.folders.critic):
            critics = tokenizer_lib.load_tokenizer(
                str(self.folders.critic), option="config.critic.path"
            )
            if critics.get_vocab() != tokenizer.get_vocab():
                raise UserError(
                    f"config.critic.path={config.critic.path!r}: has the tokenizer of another vocabulary; a "
                    "critic reads the actor's tokens"
                )

    def _tokenize(self, examples, name):
        data = self.config.data
        return prompts_lib.tokenize_prompts(
            examples,
            self.tokenizer,
            max_prompt_length=data.max_prompt_length,
            filter_overlong_prompts=data.filter_overlong_prompts,
            truncation=data.truncation,
            chat_template=data.chat_template,
            name=name,
        )

    def _build_engine(self):
        actor = self.policy(state_shapes(self.config, self.nets, self.mesh))
        self.engine: RolloutEngine = self._engine_class(
            mesh=self.mesh, actor=self.nets.actor, params=actor
        )
        self.sampling = self._sampling_options(self.config.rollout)
        self.held_out_sampling = self._sampling_options(self.config.rollout.val_kwargs)

    def _sampling_options(self, options) -> SamplingOptions:
        """Return the engine's options for `rollout` or `rollout.val_kwargs`."""
        # config.json may name only the end of text and the tokenizer the end of a chat turn: a
        # response ends at either.
        ids = (*self.nets.actor.architecture.eos_ids, self.tokenizer.eos_token_id)
        return SamplingOptions(
            max_response_length=self.config.data.max_response_length,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            n=options.n,
            eos_ids=tuple(dict.fromkeys(i for i in ids if i is not None)),
            slots=self.config.rollout.max_num_seqs,
        )

    def policy(self, state: TrainState):
        """The actor's parameters, with the base where they are adapters, and without a critic's head."""
        return heads.without_scalar_head(
            full_parameters(self.nets.actor, state.actor, state.reference)
        )


def _cut(options):
    """(epochs, prompts of a mini-batch, rows of a micro-batch) of a role's options."""
    return options.ppo_epochs, options.ppo_mini_batch_size, options.ppo_micro_batch_size_per_device


def _sample_key(seed, stream, step):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)


def _text(prompt):
    return (
        prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    )
