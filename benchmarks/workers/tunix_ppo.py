"""Worker of ppo_step.py: tunix's PPOLearner. Arguments: the settings of ppo_step.py as JSON.

Uses the rule as reward. The settings have the rows of its micro-batches in training, forward passes
and generation.
"""

import json
import sys

import jax
import numpy as np
import optax
import tunix_model
import workload
from flax import nnx
from tunix.rl import rl_cluster as cluster_lib
from tunix.rl import utils
from tunix.rl.ppo import ppo_learner
from tunix.rl.rollout import base_rollout
from turnstile import Turnstile


def even_share(prompts, completions, **columns):
    """Return the rule's reward, the share of even token ids."""
    return [
        np.mean([int(word[1:]) % 2 == 0 for word in completion.split()] or [0])
        for completion in completions
    ]


def make_cluster(settings: dict) -> cluster_lib.RLCluster:
    mesh = tunix_model.one_device_mesh()
    samples, rows = settings["samples"], settings["micro_batches"]
    (actor, _), (reference, _) = (tunix_model.load_model(settings["model"], mesh) for _ in range(2))
    training = cluster_lib.RLTrainingConfig(
        actor_optimizer=optax.adamw(settings["lr"]),
        critic_optimizer=optax.adamw(settings["lr"]),
        eval_every_n_steps=10**9,
        max_steps=10**6,
        mini_batch_size=samples,
        train_micro_batch_size=rows["train_rows"],
        rollout_micro_batch_size=rows["rollout_rows"],
        compute_logps_micro_batch_size=rows["forward_rows"],
        metrics_logging_options=None,
        checkpoint_root_directory=None,
    )
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=settings["response"],
        max_prompt_length=settings["prompt"],
        kv_cache_size=settings["prompt"] + settings["response"],
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[workload.EOS],
    )
    roles = (
        cluster_lib.Role.ACTOR,
        cluster_lib.Role.CRITIC,
        cluster_lib.Role.REFERENCE,
        cluster_lib.Role.ROLLOUT,
    )
    return cluster_lib.RLCluster(
        actor=actor,
        critic=utils.create_critic_model(actor),
        reference=reference,
        tokenizer=tunix_model.Tokenizer(settings["model"]),
        cluster_config=cluster_lib.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=training,
            rollout_config=rollout,
        ),
    )


def main(settings: dict) -> None:
    turnstile = Turnstile(("google-tunix", "jax", "jaxlib", "flax", "optax"), block)
    cluster, step_tokens = make_cluster(settings), []

    def counted(*args, **kwargs):
        output = generate(*args, **kwargs)
        # One step may generate in several micro-batches.
        step_tokens.append(tunix_model.count_tokens(output.tokens, settings["response"]))
        return output

    generate = turnstile.phase("rollout", cluster.generate)
    cluster.generate = counted
    for name, phase in (
        ("get_ref_per_token_logps", "reference"),
        ("get_old_per_token_logps", "old_logprobs"),
        ("get_values", "values"),
        ("update_actor", "update"),
        ("update_critic", "update"),
    ):
        setattr(cluster, name, turnstile.phase(phase, getattr(cluster, name)))

    def batches():
        turnstile.step_done()
        for seed in range(10**6):
            yield {
                "prompts": np.array(
                    [
                        workload.text(p)
                        for p in workload.prompts(
                            settings["samples"], settings["prompt"], seed=seed
                        )
                    ]
                )
            }
            block(nnx.state(cluster.critic_trainer.model))
            turnstile.step_done({"tokens": sum(step_tokens)})
            step_tokens.clear()

    options = ppo_learner.PPOConfig(
        num_iterations=1,
        beta=settings["kl_coef"],
        gamma=1.0,
        gae_lambda=settings["lam"],
        epsilon=0.2,
    )
    ppo_learner.PPOLearner(rl_cluster=cluster, ppo_config=options, reward_fns=[even_share]).train(
        batches()
    )


def block(work):
    jax.block_until_ready([x for x in jax.tree.leaves(work) if isinstance(x, jax.Array)])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
