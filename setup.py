"""Add configs/ to the wheel as jax_ppo/configs/; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jax_ppo*"]), "jax_ppo.configs"],
    package_dir={"jax_ppo.configs": "configs"},
    package_data={
        "jax_ppo": [
            "py.typed",
            "config/peers/*.toml",
            "demonstration/model/*",
            "reporting/report_template.html",
        ]
    },
)
