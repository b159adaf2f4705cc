"""The tasks of the supervised commands: jax_ppo.sft and jax_ppo.reward_model."""

import dataclasses

from jax_ppo.data import responses
from jax_ppo.reporting import console, journal
from jax_ppo.reporting.curves import Panel
from jax_ppo.supervised.step import LANGUAGE, PREFERENCE, SupervisedObjective


@dataclasses.dataclass(frozen=True)
class Task:
    """Task of one of the supervised commands: its objective and its reports."""

    command: str  # the command's name
    objective: SupervisedObjective  # the objective that the model is trained on
    response_fields: tuple[str, ...]  # the responses that an example must have
    unit: str  # what an example is called, in the plural, on the console
    output: str  # the folder in the work directory where the trained model is written
    next_option: str  # the option by which PPO reads it
    layout: journal.ReportLayout  # how its metrics are shown


_LOSS = console.Column(metric="train/loss", width=6, format=".3f", label="loss ")
_GRADIENT = console.Column(metric="train/grad_norm", width=5, format=".3g", label="grads ")
_GRADIENT_PANEL = Panel("gradient", "norm before clipping", {"norm": "train/grad_norm"})
_LEARNING_RATE = "supervised.optim.lr"
SFT = Task(
    command="sft",
    objective=LANGUAGE,
    response_fields=responses.DEMONSTRATION_FIELDS,
    unit="examples",
    output="actor",
    next_option="model.path",
    layout=journal.ReportLayout(
        columns=(_LOSS, _GRADIENT, *journal.SPEED_COLUMNS),
        panels=(
            Panel("loss", "nats per token", {"training": "train/loss", "evaluation": "eval/loss"}),
            _GRADIENT_PANEL,
        ),
        learning_rate_option=_LEARNING_RATE,
        best_metric="train/loss",
        best_value=min,
    ),
)
REWARD_MODEL = Task(
    command="reward_model",
    objective=PREFERENCE,
    response_fields=responses.PREFERENCE_FIELDS,
    unit="pairs",
    output="reward_model",
    next_option="reward.model_path",
    layout=journal.ReportLayout(
        columns=(
            _LOSS,
            console.Column(metric="train/accuracy", width=5, format=".3f", label="acc "),
            console.Column(metric="train/margin", width=6, format=".3f", label="margin "),
            _GRADIENT,
            *journal.SPEED_COLUMNS,
        ),
        panels=(
            Panel(
                "loss",
                "per pair, center_coef included",
                {"training": "train/loss", "evaluation": "eval/loss"},
            ),
            Panel(
                "accuracy",
                "share of pairs",
                {"training": "train/accuracy", "evaluation": "eval/accuracy"},
            ),
            Panel(
                "scores",
                "score",
                {
                    "margin": "train/margin",
                    "mean": "train/score",
                    "margin, evaluation": "eval/margin",
                },
            ),
            _GRADIENT_PANEL,
        ),
        learning_rate_option=_LEARNING_RATE,
        best_metric="train/loss",
        best_value=min,
    ),
)
