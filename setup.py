from setuptools import find_packages, setup

REQUIREMENTS = [
    "absl-py",
    "flax",
    "jax>=0.10",
    "jaxtyping",
    "jinja2",  # chat templates
    "matplotlib",
    "ml-collections",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "pyarrow",
    "safetensors",
    "tensorboardX",  # writes TensorBoard's event files without TensorBoard's server
    "tensorflow-datasets",
    "tqdm",
    "transformers>=5",
]

EXTRAS = {
    "cuda": ["jax[cuda12]"],
    "tpu": ["jax[tpu]"],
    "wandb": ["wandb"],
    "dev": ["mypy", "pre-commit", "ruff"],
    "docs": ["mkdocs-material"],
    # torch and peft are what models and adapters are compared with; without them those tests are skipped. tensorboard reads the
    # curves back.
    "test": [
        "hypothesis",
        "peft",
        "pytest-cov",
        "pytest-xdist",
        "pytest>=9",
        "tensorboard",
        "torch==2.13.0",
    ],
}

setup(
    name="jax_ppo",
    version="0.1.0",
    description="PPO for language models in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["jax_ppo*"]),
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
)
