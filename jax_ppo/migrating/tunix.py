"""Options of tunix."""

from jax_ppo.migrating import answers

OPTIONS = {
    "max_target_length": answers.LENGTHS,
    "actor_optimizer": "config.actor.optim.*, an AdamW",
    "critic_optimizer": "config.critic.optim.*, an AdamW",
    "training_config.max_steps": "config.trainer.total_training_steps",
    "training_config.eval_every_n_steps": "config.trainer.test_freq",
    "eval_every_n_steps": "config.trainer.test_freq",
    "mini_batch_size": "config.actor.ppo_mini_batch_size, in prompts",
    "train_micro_batch_size": "config.actor.ppo_micro_batch_size_per_device, in packed rows",
    "rollout_micro_batch_size": "config.rollout.max_num_seqs",
    "compute_logps_micro_batch_size": "config.rollout.logprob_micro_batch_size_per_device",
    "checkpoint_root_directory": answers.WORKDIR,
    "max_tokens_to_generate": "config.data.max_response_length",
    "kv_cache_size": "the cache has room for prompt and response",
    "total_generation_steps": "config.data.max_response_length",
    "num_batches": "config.trainer.total_training_steps",
    "gae_lambda": "config.algorithm.lam",
    "clip_range_value": "config.critic.cliprange_value",
    "role_to_mesh": answers.ONE_PROGRAM,
    "rollout_engine": answers.ENGINE,
    "offload_to_cpu": "config.actor.optimizer_offload and config.critic.optimizer_offload",
}
