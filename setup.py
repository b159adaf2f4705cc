"""Add configs/ and the table of metrics to the wheel; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jax_ppo*"]), "jax_ppo.configs", "jax_ppo.docs"],
    package_dir={"jax_ppo.configs": "configs", "jax_ppo.docs": "docs"},
    package_data={
        "jax_ppo": [
            "py.typed",
            "config/peers/*.toml",
            "demonstration/model/*",
            "reporting/report_template.html",
        ],
        "jax_ppo.docs": ["metrics.md"],  # report.html says what metrics mean
    },
)
