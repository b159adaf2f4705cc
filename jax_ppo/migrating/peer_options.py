"""Options of other frameworks and their counterparts here, for users who migrate.

Names are those of verl 0.9.1, TRL 1.12.0, OpenRLHF 0.11.2 and its earlier names with underscores,
tunix 0.1.7 and NeMo-RL 0.7. They are compared without `actor_rollout_ref.`. A name that ends in
`.*` stands for all options of a group that have no answer of their own. docs/migrating.md describes
the differences.
"""

from jax_ppo.migrating import nemo_rl, openrlhf, trl, tunix, verl

FRAMEWORKS = {
    "verl": verl.OPTIONS,
    "TRL": trl.OPTIONS,
    "OpenRLHF": openrlhf.OPTIONS,
    "tunix": tunix.OPTIONS,
    "NeMo-RL": nemo_rl.OPTIONS,
}
VERL_PREFIX = "actor_rollout_ref."


def find_answer(options: dict[str, str], name: str) -> str | None:
    """Return a table's answer to a name, or to the smallest group `a.b.*` that contains it."""
    if name in options:
        return options[name]
    parts = name.split(".")
    groups = (".".join(parts[:end]) + ".*" for end in range(len(parts) - 1, 0, -1))
    return next((options[group] for group in groups if group in options), None)


def explain_peer_option(name: str) -> str | None:
    """Return the counterparts of another framework's option in words; `None` if none has it.

    Args:
      name: as written, without `config.`; hyphens count as underscores.
    """
    normalized = name.replace("-", "_").removeprefix(VERL_PREFIX)
    answers: dict[str, list[str]] = {}
    for framework, options in FRAMEWORKS.items():
        answer = find_answer(options, normalized)
        if answer is not None:
            answers.setdefault(answer, []).append(framework)
    if not answers:
        return None
    return "; ".join(
        f"{' and '.join(frameworks)}'s {normalized}: {answer}"
        for answer, frameworks in answers.items()
    )
