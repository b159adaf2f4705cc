"""Variants of tiny runs that `chaos.py` disturbs: all commands, and several kinds of PPO."""

import dataclasses
import json
from pathlib import Path

from llama_folder import write_arithmetic_llama

CONFIG = '''
"""A tiny run."""
from jax_ppo.config import default_config

def get_config():
    config = default_config()
    config.model.path = "{folder}/llama"
    config.model.dtype = "float32"
    config.data.train_batch_size = config.data.val_batch_size = 8
    config.data.max_prompt_length, config.data.max_response_length = 64, 12
    config.trainer.compilation_cache = "{folder}/compiled"
    config.trainer.total_training_steps = 5
    config.trainer.save_freq, config.trainer.test_freq = 2, 3
    config.distributed.heartbeat_seconds = 10
'''
PPO_CONFIG = """
    config.data.train_files = "arithmetic:24"
    config.data.val_files = "arithmetic:12:heldout"
    config.actor.ppo_mini_batch_size = 4
    config.rollout.n = 2
    config.rollout.temperature = 0.8
    config.actor.optim.lr = config.critic.optim.lr = 1e-3
    config.reward.function = "{folder}/reward.py:reward"
    config.reward.workers = 0
    return config
"""
SUPERVISED_CONFIG = """
    config.data.train_files = "{folder}/pairs.jsonl[:24]"
    config.data.val_files = "{folder}/pairs.jsonl[24:]"
    config.supervised.optim.lr = 1e-2
    return config
"""
ENVIRONMENT = '''
class Digits:
    """Answer with the last digits of all turns; end after five."""

    def reset(self, example, seed):
        self.digits, self.turns = str(seed % 10), 0

    def step(self, text):
        self.digits = (self.digits + "".join(c for c in text if c.isdigit()))[-3:]
        self.turns += 1
        return self.digits, len(self.digits) / 10, self.turns == 5
'''
REWARD = '''
def reward(data_source, solution_str, ground_truth, extra_info):
    """The share of digits, and a further figure."""
    digits = sum(c.isdigit() for c in solution_str)
    return {"score": digits / max(len(solution_str), 1), "digits": digits}
'''


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kind of run.

    Attributes:
      command: train, sft or reward_model.
      options: `--config.NAME=VALUE` without the first part; {inputs} is the folder of
        `write_inputs`, {server} the address of the run's environment server.
      devices: virtual devices of each process.
      processes: number of processes.
      exports: the folders of the work directory that the run makes.
    """

    command: str = "train"
    options: tuple[str, ...] = ()
    devices: int = 1
    processes: int = 1
    exports: tuple[str, ...] = ("actor",)


DIALOGUES = (
    "rollout.multi_turn.environment={inputs}/environment.py:Digits",
    "rollout.multi_turn.max_observation_length=4",
    "rollout.multi_turn.max_turn_length=2",
)
SERVER = (
    "rollout.multi_turn.environment={server}",
    "rollout.multi_turn.max_observation_length=2",
    "rollout.multi_turn.max_turn_length=2",
    "rollout.multi_turn.info_metrics=turns",
    "rollout.multi_turn.url_retries=7",
    "rollout.multi_turn.timeout=300",
)

VARIANTS = {
    "ppo": Variant(
        options=(
            "actor.ppo_epochs=2",
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.type=adaptive",
            "critic.normalize_values=True",
            "reward.normalize=running",
            "trainer.critic_warmup=1",
        )
    ),
    "lora": Variant(options=("model.lora.rank=4",), exports=("actor", "adapter")),
    "shared trunk": Variant(options=("critic.shared_trunk=True",)),
    "one step off": Variant(options=("rollout.max_staleness=1", "algorithm.rollout_is=token")),
    "separate devices": Variant(
        options=(
            "rollout.max_staleness=4",
            "rollout.partial_length=4",
            "algorithm.rollout_is=token",
            "rollout.mesh.devices=2",
        ),
        devices=2,
        processes=2,
    ),
    "partial rollouts": Variant(
        options=(
            "rollout.max_staleness=4",
            "rollout.partial_length=2",
            "algorithm.rollout_is=token",
        )
    ),
    "dialogues": Variant(options=DIALOGUES),
    "dialogues beside updates": Variant(
        options=(
            *DIALOGUES,
            "rollout.max_staleness=1",
            "algorithm.rollout_is=token",
            "rollout.mesh.devices=1",
        ),
        devices=2,
    ),
    "environment server": Variant(options=SERVER),
    "grpo": Variant(options=("algorithm.adv_estimator=grpo",)),
    "sft": Variant(command="sft"),
    "reward model": Variant(command="reward_model", exports=("reward_model",)),
    "8 devices": Variant(options=("mesh.fsdp=2", "mesh.model=2"), devices=8),
    "2 processes": Variant(processes=2),
    # Eight devices; tensor parallelism spans two processes.
    "4 processes": Variant(options=("mesh.fsdp=2", "mesh.model=4"), devices=2, processes=4),
}


def write_inputs(folder: Path) -> None:
    """Write the model, the data, the reward function and the configuration files."""
    (folder / "temporary").mkdir(parents=True)
    write_arithmetic_llama(folder, problems=200)
    (folder / "reward.py").write_text(REWARD)
    (folder / "environment.py").write_text(ENVIRONMENT)
    pairs = [
        {
            "chosen": f"\n\nHuman: How many?\n\nAssistant: {i % 7} apples{'.' * (i % 3)}",
            "rejected": f"\n\nHuman: How many?\n\nAssistant: {i % 5} pears{'!' * (i % 4)}",
        }
        for i in range(29)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for name, part in (("ppo", PPO_CONFIG), ("supervised", SUPERVISED_CONFIG)):
        (folder / f"{name}.py").write_text((CONFIG + part).format(folder=folder))
