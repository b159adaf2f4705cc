"""The tasks of the supervised commands: jax_ppo.sft and jax_ppo.reward_model."""

import dataclasses

from jax_ppo.data import responses
from jax_ppo.reporting import console, journal
from jax_ppo.reporting.html_report import Panel
from jax_ppo.training.supervised_step import LANGUAGE, PREFERENCE, SupervisedObjective


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


def _layout(figures: tuple[console.Column, ...], panels: tuple[Panel, ...]) -> journal.ReportLayout:
    return journal.ReportLayout(
        columns=(
            console.Column("train/loss", 6, 3, "loss "),
            *figures,
            console.Column("train/grad_norm", 5, 3, "grads ", least_terminal=60),
            console.Column("seconds/step", 4, 2, unit=" s"),
            console.Column("tokens_per_second", 7, 0, unit=" tok/s", least_terminal=70),
        ),
        panels=(
            *panels,
            Panel("gradient norm", "before clipping", {"norm": "train/grad_norm"}),
            Panel("learning rate", "", {"rate": "train/lr"}),
            journal.SPEED_PANEL,
        ),
        learning_rate_option="supervised.optim.lr",
        best_metric="train/loss",
    )


# fmt: off
_LOSSES = {"training": "train/loss", "evaluation": "eval/loss"}
SFT = Task(
    command="sft", objective=LANGUAGE, response_fields=responses.DEMONSTRATION_FIELDS,
    unit="examples", output="actor", next_option="model.path",
    layout=_layout(figures=(), panels=(Panel("loss", "nats per token", _LOSSES),)),
)
REWARD_MODEL = Task(
    command="reward_model", objective=PREFERENCE, response_fields=responses.PREFERENCE_FIELDS,
    unit="pairs", output="reward_model", next_option="reward.model_path",
    layout=_layout(
        figures=(
            console.Column("train/accuracy", 5, 3, "acc "),
            console.Column("train/margin", 6, 3, "margin "),
        ),
        panels=(
            Panel("loss", "per pair, center_coef included", _LOSSES),
            Panel("accuracy", "share of pairs", {
                "training": "train/accuracy", "evaluation": "eval/accuracy"}),
            Panel("scores", "score", {
                "margin": "train/margin",
                "mean": "train/score",
                "margin, evaluation": "eval/margin"}),
        ),
    ),
)
# fmt: on
