"""The messages of a run that is started again."""

import dataclasses
import types

import pytest

import tiny
from jax_ppo.config import schema
from jax_ppo.errors import UserError
from jax_ppo.run import life_cycle
from jax_ppo.runtime import distributed
from jax_ppo.runtime.devices import resolve_dtype
from jax_ppo.training import progress
from jax_ppo.training.checkpoint import Checkpointer, Restored

DATA = {"rows": 8, "memory": "f00d", "weights": None}


def find_saved_run(config, meta, command="train"):
    """Read the checkpoint of step 3 with this description."""
    checkpoints = types.SimpleNamespace(
        latest_step=lambda: 3, restore=lambda step, abstract: Restored({}, meta)
    )
    return progress.find_saved_run(config, checkpoints, command)


def resume(config, saved=None, total_steps=5, command="train", data=DATA, frozen=None):
    """Resume after a checkpoint of step 3 that was saved with other options than `config`."""
    saved = config if saved is None else saved
    saved = saved if isinstance(saved, dict) else dataclasses.asdict(saved)
    meta = {**progress.Progress().history(), "position": 24, "config": saved, "data": DATA}
    saved_run = find_saved_run(config, meta | {"frozen": {"teacher.path": "f00d"}}, command)
    return progress.find_progress(total_steps, saved_run, print, data, frozen)


def test_options_that_are_gone_are_named(capsys):
    saved = dataclasses.asdict(tiny.config())
    saved["critic"]["huber_delta"] = 0.5
    resume(tiny.config(), saved)
    line = "options of the checkpoint that this version does not have: critic.huber_delta=0.5"
    assert line in capsys.readouterr().out


def test_it_goes_on_or_has_nothing_left_to_do(capsys):
    config = tiny.config()
    assert resume(config).position == 24
    assert capsys.readouterr().out == "resuming after step 3 of 5\n"
    saved = tiny.config(trainer__warn_kl_above=2.0)
    progress = resume(config, saved, total_steps=3)
    assert "done: 3 steps; to" in capsys.readouterr().out
    assert progress.changed_options == []
    resume(config, saved, total_steps=1)
    assert "done: 1 step, and 2 more; to" in capsys.readouterr().out


def test_an_option_that_is_younger_than_the_checkpoint_had_its_default(capsys):
    config = tiny.config(trainer__warn_kl_above=2.0)
    saved = dataclasses.asdict(config)
    del saved["trainer"]["warn_kl_above"]
    progress = resume(config, saved)
    change = "config.trainer.warn_kl_above was 1.0 until the checkpoint, and is 2.0 from here on"
    assert change in capsys.readouterr().out
    assert progress.changed_options == [f"after step 3: {change}"]


def test_an_option_is_fixed_for_the_commands_that_read_it():
    config = tiny.config(critic__normalize_values=True)
    with pytest.raises(UserError, match=r"normalize_values=True: .*another experiment, with False"):
        resume(config, tiny.config())
    assert resume(config, tiny.config(), command="sft").step == 3


def test_a_run_that_moves_to_a_machine_with_another_dtype_is_told_what_to_set():
    config = tiny.config(model__dtype="auto")
    resolved, other = (
        dataclasses.replace(config, model=resolve_dtype(config.model, platform))
        for platform in ("cpu", "tpu")
    )
    with pytest.raises(UserError, match=r"model.dtype='float32': .*, with 'bfloat16'; set that"):
        resume(resolved, other)


def test_an_option_that_only_the_first_step_reads_is_kept(capsys):
    adaptive = {"algorithm__kl_ctrl__type": "adaptive", "algorithm__use_kl_in_reward": True}
    resume(tiny.config(**adaptive, algorithm__kl_ctrl__kl_coef=0.5), tiny.config(**adaptive))
    note = "kl_coef=0.5: only a new run reads it; this one began with 0.001"
    assert note in capsys.readouterr().out


def test_a_fixed_kl_coefficient_follows_the_option(capsys):
    resume(tiny.config(algorithm__kl_ctrl__kl_coef=0.5), tiny.config())
    change = "kl_coef was 0.001 until the checkpoint, and is 0.5 from here on"
    assert change in capsys.readouterr().out


def test_no_option_of_the_model_may_change():
    """Weights and shapes of a checkpoint depend on the model that the run started with."""
    config = tiny.config()
    names = [o.name for o in schema.all_options() if o.name.startswith("model.")]
    # These change memory and speed only.
    names.remove("model.gradient_checkpointing")
    names.remove("model.gradient_checkpointing_policy")
    assert len(names) > 7
    for name in names:
        saved = dataclasses.asdict(config)
        section = saved
        *parents, last = name.split(".")
        for parent in parents:
            section = section[parent]
        section[last] = "another"
        with pytest.raises(UserError, match=rf"config\.{name}=.* with 'another'"):
            resume(config, saved)


def test_a_teacher_whose_files_have_changed_is_refused():
    config = tiny.config(teacher__path="a folder")
    assert resume(config, frozen={"teacher.path": "f00d"}).step == 3
    with pytest.raises(UserError, match=r"teacher\.path='a folder': its files have changed"):
        resume(config, frozen={"teacher.path": "beef"})


def test_everything_is_due_after_the_last_step():
    assert [progress.is_due(step, 5, 2) for step in range(1, 6)] == [False, True, False, True, True]
    assert [progress.is_due(step, 5, 0) for step in range(1, 6)] == [False] * 4 + [True]
    # verl's "never".
    assert not any(progress.is_due(step, 5, -1) for step in range(1, 6))


RENAMED = {"data__train_files": "arithmetic:9"}


def test_the_same_rows_may_be_in_other_files():
    assert resume(tiny.config(**RENAMED), tiny.config()).position == 24


@pytest.mark.parametrize(
    "change",
    [{"rows": 9, "memory": "beef"}, {"memory": "beef"}, {"weights": [0.7, 0.3]}],
)
def test_changed_rows_are_refused(change):
    with pytest.raises(UserError, match="arithmetic:9.*8 rows until .*another --workdir"):
        resume(tiny.config(**RENAMED), tiny.config(), data=DATA | change)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        # Files are blamed only where no option explains the rows.
        ({}, "config.data.train_files='arithmetic:8': the training data have changed, "),
        (
            {"data__prompt_key": "text", "data__shuffle": False, "data__val_max_samples": 1},
            "config.data.prompt_key='text' (until the checkpoint ''): the training data have ",
        ),
        (
            {"rollout__multi_turn__environment": "tools:python", "data__train_max_samples": 8},
            "config.data.train_max_samples=8 (until the checkpoint None), "
            "config.rollout.multi_turn.environment='tools:python' (until the checkpoint ''): the ",
        ),
    ],
)
def test_rows_that_an_option_has_changed_are_not_blamed_on_their_files(changes, cause):
    """Regression: after a change of a template the files were said to have changed."""
    with pytest.raises(UserError) as refusal:
        resume(tiny.config(**changes), tiny.config(), data=DATA | {"memory": "beef"})
    assert str(refusal.value).startswith(cause)


def test_a_file_of_a_template_is_named_with_the_files_of_the_rows():
    config = tiny.config(data__prompt_template="@template.txt")
    with pytest.raises(UserError, match="config.data.prompt_template='@template.txt': the train"):
        resume(config, data=DATA | {"memory": "beef"})


@pytest.mark.parametrize(
    "change",
    [
        {"data__prompt_template": "Q: {prompt}"},
        {"data__train_files": "arithmetic:9", "model__lora__rank": 2},
    ],
)
@pytest.mark.parametrize("memory", [None, 1e9])
def test_options_are_compared_before_a_run_is_built(change, memory, tmp_path, monkeypatch):
    """Regression: a changed rank was blamed on a folder of exports, after data were read."""
    saved = tiny.config()
    meta = {**progress.Progress().history(), "position": 0, "data": DATA}
    with Checkpointer(tmp_path / "checkpoints", max_to_keep=1, report=print) as checkpoints:
        checkpoints.save(1, {}, meta | {"config": dataclasses.asdict(saved)}, None)
    name = list(change)[-1].replace("__", ".")
    kind = life_cycle.TrainingKind(
        "train",
        "accuracy",
        lambda config, mesh: pytest.fail("built"),
        lambda mesh: pytest.fail("models were read"),
    )
    monkeypatch.setattr(life_cycle, "read_memory_limit", lambda: memory)
    with pytest.raises(UserError, match=rf"config\.{name}=.*another experiment"):
        life_cycle.run_life_cycle(tiny.config(**change), tmp_path, kind)


def test_processes_with_other_files_are_refused(tmp_path, monkeypatch):
    """Regression: each trained on its own copy of the data, to an exit code of 0."""
    training = types.SimpleNamespace(total_steps=1, fingerprints=lambda: {"data": DATA})
    kind = life_cycle.TrainingKind("train", "accuracy", lambda sizes, mesh: training, None)
    others = [{"config.data": {"rows": 9}}]
    monkeypatch.setattr(
        distributed, "allgather_json", lambda own: [own, *others * isinstance(own, dict)]
    )
    with pytest.raises(UserError, match="^config.data: process 1 has {'rows': 9}, .* same files$"):
        life_cycle.run_life_cycle(tiny.config(), tmp_path, kind)


def test_the_work_directory_of_another_command_is_refused():
    """Regression: the parameters of the checkpoint were said to be of another model."""
    config = tiny.config()
    meta = {"command": "sft", "config": dataclasses.asdict(config)}
    with pytest.raises(UserError, match=r"checkpoints of jax_ppo.sft, which jax_ppo.train cannot"):
        find_saved_run(config, meta)
    assert find_saved_run(config, meta, "sft").step == 3


def test_rows_are_compared_by_the_facts_that_checkpoint_and_run_both_have():
    known = {"rows": 8, "weights": None}  # without a hash
    assert resume(tiny.config(), data=known).position == 24
    with pytest.raises(UserError, match="9 other"):
        resume(tiny.config(), data=known | {"rows": 9})
