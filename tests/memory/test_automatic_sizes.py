"""Recomputation and micro-batches choose themselves by the memory of the devices."""

import jax
import jax.numpy as jnp
import pytest

import tiny
from jax_ppo.config.loading import load_config
from jax_ppo.errors import UserError
from jax_ppo.memory import automatic_sizes, step_plan
from jax_ppo.memory.automatic_sizes import Sizes, choose_sizes, compile_within, rank_sizes
from jax_ppo.memory.memory_check import OutOfMemory
from jax_ppo.run import life_cycle, ppo_training
from jax_ppo.runtime.topologies import parse_topology
from whole_run import read_steps

ROWS = "actor.ppo_micro_batch_size_per_device"
CHECKPOINTING, POLICY = "model.gradient_checkpointing", "model.gradient_checkpointing_policy"
AUTOMATIC = dict(model__gradient_checkpointing=None, actor__ppo_micro_batch_size_per_device=None)


def test_less_recomputation_comes_before_larger_micro_batches():
    needs = iter([80, 60, 55, 50, 40, 30])
    ranked = rank_sizes(None, (ROWS, None), 4, lambda sizes: next(needs))
    recomputed = {CHECKPOINTING: True, POLICY: "full"}
    assert [sizes.options for sizes in ranked] == [
        {CHECKPOINTING: False, POLICY: "full", ROWS: None},
        {CHECKPOINTING: True, POLICY: "dots", ROWS: None},
        {CHECKPOINTING: True, POLICY: "attention", ROWS: None},
        {**recomputed, ROWS: None},
        {**recomputed, ROWS: 2},
        {**recomputed, ROWS: 1},
    ]
    # 85 % of 71 are 60.35, of 40 are 34.
    choice = choose_sizes(ranked, 71)
    assert choice.index == 1 and choose_sizes(ranked, 40).index == 5
    assert str(choice).startswith(f"sizes by the free memory: {CHECKPOINTING}=True")
    # Without enough for any, the smallest are tried.
    assert choose_sizes(ranked, 10).index == 5
    # The compiler needed 90 instead of 60: the others are taken for half as large again, too.
    assert choice.smaller(90).index == 4 and choice.smaller().index == 2
    assert choose_sizes(ranked, 10).smaller() is None
    # A checkpoint's sizes stay as long as they fit.
    assert choose_sizes(ranked, 1000, {**recomputed, ROWS: 2, "seed": 1}).index == 4
    assert choose_sizes(ranked, 40, {**recomputed, ROWS: None}).index == 5


def test_options_that_are_set_stay():
    only_rows = rank_sizes(False, (ROWS, None), 2, lambda sizes: 1)
    assert [sizes.options for sizes in only_rows] == [{ROWS: None}, {ROWS: 1}]
    are_set = choose_sizes(rank_sizes(False, (ROWS, 2), 2, lambda sizes: 1), 1000)
    assert not str(are_set) and are_set.smaller() is None


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [("h100:1", f"{CHECKPOINTING}=False, {ROWS}=auto"), ("cpu:1", "")],
)
def test_a_plan_names_the_sizes_of_a_machine_of_known_memory(folder, topology, sizes):
    config = tiny.config(model__path=folder, **AUTOMATIC)
    plan = step_plan.plan_step(config, parse_topology(topology), compiles=False)
    assert sizes in plan.sizes and bool(sizes) == bool(plan.sizes)


def test_the_compilers_figures_decide():
    lowered = jax.jit(lambda x: jnp.sort(x @ x)).lower(jnp.ones((64, 64)))  # 16 KiB and more
    choice = automatic_sizes.SizeChoice([Sizes({}), Sizes({})], 0, available=100_000)
    assert compile_within(choice, resident=1000)("update_actor", lowered, ()).shape == (64, 64)
    with pytest.raises(OutOfMemory, match="update_actor needs") as error:
        compile_within(choice, resident=80_000)("update_actor", lowered, ())
    assert 96_384 <= error.value.needed <= 200_000
    # What samples has its own measure.
    compile_within(choice, resident=80_000)("sample", lowered, ())
    # The smallest may need all: 80,000 and twice 16,384 bytes at most.
    smallest = choice.smaller()
    compile_within(smallest, resident=67_000)("update_actor", lowered, ())
    with pytest.raises(OutOfMemory):
        compile_within(smallest, resident=90_000)("update_actor", lowered, ())


def test_a_compiler_may_refuse_a_program_or_not_state_its_memory(monkeypatch):
    lowered = jax.jit(lambda x: jnp.sort(x @ x)).lower(jnp.ones((64, 64)))
    compile_ = compile_within(automatic_sizes.SizeChoice([Sizes({})], 0, 1000), resident=10_000)
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)
    assert compile_("update_actor", lowered, ()).shape == (64, 64)

    def refuse(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in hbm\nmore")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(OutOfMemory, match="update_actor: RESOURCE_EXHAUSTED: .* hbm$") as error:
        compile_("update_actor", lowered, ())
    assert error.value.needed == 1000


def test_processes_agree_on_what_the_compiler_needs(monkeypatch):
    """This process is the first of two."""
    others = iter([[0, 50], [90, "update_actor needs"]])
    gather = lambda value: [value, next(others)]  # noqa: E731
    monkeypatch.setattr(automatic_sizes.distributed, "allgather_json", gather)
    ranked = [Sizes({ROWS: rows}, 10 * rows) for rows in (4, 2, 1)]
    choice = choose_sizes(ranked, 100)
    assert choice.index == 0 and choice.available == 50
    with pytest.raises(OutOfMemory) as error, automatic_sizes.raise_in_all_processes():
        pass
    monkeypatch.setattr(life_cycle.jax, "process_count", lambda: 2)
    tried = []

    def train(choice, needed):
        tried.append(choice.index)
        if choice.index == 0:
            raise OutOfMemory("exhausted", needed=needed)
        return {}

    life_cycle._train_while_memory_lasts(choice, lambda x: train(x, error.value.needed))
    assert tried == [0, 2]  # 45 bytes for two rows are more than 85 % of 50
    # The others may be waiting for a process that an allocation fails in.
    with pytest.raises(OutOfMemory):
        life_cycle._train_while_memory_lasts(choice, lambda x: train(x, 0))


def test_a_run_without_resume_goes_on_from_its_own_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(life_cycle, "read_memory_limit", lambda: 2 * 2**30)
    take_step, failures = ppo_training.PPOTraining.take_step, []

    def exhaust_second_step(self, state, step, journal):
        if step == 1 and not failures:
            failures.append(step)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return take_step(self, state, step, journal)

    monkeypatch.setattr(ppo_training.PPOTraining, "take_step", exhaust_second_step)
    options = dict(trainer__total_training_steps=2, trainer__export=False, trainer__save_freq=1)
    config = load_config("arithmetic:smoke", trainer__resume=False, **options, **AUTOMATIC)
    summary = ppo_training.train_ppo(config, tmp_path)
    assert failures and summary["steps"] == 2
    output = capsys.readouterr().out
    assert "resuming after step 1 of 2" in output
    assert [row["step"] for row in read_steps(tmp_path)] == ["1", "2"]
    with pytest.raises(UserError, match=r"resume=False: .* checkpoint after step 2"):
        ppo_training.train_ppo(config, tmp_path)


def test_a_run_goes_on_with_smaller_sizes_and_is_resumed_with_them(tmp_path, monkeypatch, capsys):
    """A CPU stands for a device of 2 GiB, whose compiler refuses the first sizes."""
    monkeypatch.setattr(life_cycle, "read_memory_limit", lambda: 2 * 2**30)
    compile_ = automatic_sizes.compile_within
    refused = []

    def refuse_first(choice, resident):
        def refuse(name, lowered, arguments):
            if name == "update_actor" and not refused:
                refused.append(choice.sizes.options)
                raise OutOfMemory("update_actor needs 3 of 2 GiB per device", needed=3 * 2**30)
            return compile_(choice, resident)(name, lowered, arguments)

        return refuse

    monkeypatch.setattr(life_cycle, "compile_within", refuse_first)
    options = dict(trainer__total_training_steps=2, trainer__export=False)
    automatic = options | AUTOMATIC

    def train(folder, **changes):
        config = load_config("arithmetic:smoke", **(automatic | changes))
        ppo_training.train_ppo(config, tmp_path / folder)
        return capsys.readouterr().out, read_steps(tmp_path / folder)

    output, rows = train("run")
    assert refused == [{CHECKPOINTING: False, POLICY: "full", ROWS: None}]
    line = "note: update_actor needs 3 of 2 GiB per device; the run continues with smaller sizes"
    before, after = output.split(line)
    assert f"sizes by the free memory: {CHECKPOINTING}=False" in before
    assert f"sizes by the free memory: {CHECKPOINTING}=True" in after and "step 2/2" in after
    resumed, _ = train("run", trainer__total_training_steps=3)
    assert "resuming after step 2 of 3" in resumed and "until the checkpoint" not in (
        resumed.replace("trainer.total_training_steps was 2 until the checkpoint", "")
    )
    assert f"sizes by the free memory: {CHECKPOINTING}=True" in resumed
    # Sizes change results by rounding alone.
    _, larger = train("other", model__gradient_checkpointing=False)
    for ours, theirs in zip(rows, larger, strict=True):
        for name in ("actor/grad_norm", "critic/grad_norm", "reward/mean"):
            assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-3, abs=1e-5), name


def test_sizes_that_are_set_and_do_not_fit_are_refused_before_weights_are_loaded(
    tmp_path, monkeypatch
):
    """Two CPU devices stand for devices of 30 MiB."""
    for module in (life_cycle, ppo_training):
        monkeypatch.setattr(module, "read_memory_limit", lambda: 30 * 2**20)
    monkeypatch.setattr(life_cycle, "target_platform", lambda: "gpu")
    make_mesh = life_cycle.meshes.make_mesh
    two = lambda options, **others: make_mesh(options, jax.devices()[:2])  # noqa: E731
    monkeypatch.setattr(life_cycle.meshes, "make_mesh", two)
    loaded = []
    monkeypatch.setattr(ppo_training.PPOTraining, "load_state", lambda *_: loaded.append(1))
    options = dict(
        trainer__total_training_steps=1, trainer__export=False, trainer__val_before_train=False,
        trainer__test_freq=-1, data__train_batch_size=64, actor__ppo_mini_batch_size=64,
        model__gradient_checkpointing=False,
    )  # fmt: skip

    config = load_config("arithmetic:smoke", **options, actor__ppo_micro_batch_size_per_device=64)
    with pytest.raises(UserError, match=rf"{ROWS}=64: .* needs .* fit: ") as refused:
        ppo_training.train_ppo(config, tmp_path)
    assert not loaded and str(refused.value).endswith(
        f"{CHECKPOINTING}=True, {POLICY}=attention, {ROWS}=auto"
    )


def test_sizes_on_devices_that_state_no_memory_are_those_of_cpus(tmp_path, monkeypatch, capsys):
    def build(sizes, mesh):
        assert not sizes
        raise UserError("built")

    kind = life_cycle.TrainingKind("train", "accuracy", build, rank_sizes=None)
    for platform, lines in (("cpu", 0), ("gpu", 1)):
        monkeypatch.setattr(life_cycle, "target_platform", lambda platform=platform: platform)
        with pytest.raises(UserError, match="built"):
            life_cycle.run_life_cycle(load_config("arithmetic:smoke"), tmp_path, kind)
        assert capsys.readouterr().out.count("auto is the same as on CPUs") == lines
