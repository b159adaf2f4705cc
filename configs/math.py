r"""MATH with Qwen2.5-0.5B-Instruct: the last \boxed{} must equal the solution's as mathematics.

    pip install 'jax_ppo[math]'
    python -m jax_ppo.train --config=math

Data from the Hugging Face hub (7,500 training problems; held out are the 500 of MATH-500). Answers
are compared by math-verify in worker processes. One device of 80 GB or a TPU v5e-8. Not run here
at this size; its `:smoke` form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("gsm8k")
    config.experiment_name = "math"
    config.data.train_files = (
        "hf:DigitalLearningGmbH/MATH-lighteval/data/train-00000-of-00001.parquet"
    )
    config.data.val_files = "hf:HuggingFaceH4/MATH-500/test.jsonl"
    config.data.instruction = (
        "Let's think step by step and output the final answer within \\boxed{}."
    )
    config.data.max_response_length = 1024
    config.reward.workers = 4
    return config
