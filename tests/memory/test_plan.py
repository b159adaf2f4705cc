"""The plan of a step: its memory, its time, what it says and what it refuses."""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import tiny
from jax_ppo import plan as plan_command
from jax_ppo.errors import UserError
from jax_ppo.memory import abstract_step, compiler_figures, memory_estimate, step_plan
from jax_ppo.memory.memory_check import PPOMemory
from jax_ppo.models.heads import param_shapes
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import topologies
from jax_ppo.runtime.topologies import parse_topology

LEARNING = ["forward_policy", "forward_critic", "estimate", "update_actor", "update_critic"]
PROGRAMS = ["prepare_weights", "sample", *LEARNING]


def estimate(folder, topology="v5e:2x4", **changes):
    config = tiny.config(model__path=folder, **changes)
    return step_plan.plan_step(config, parse_topology(topology), compiles=False)


def find(plan, name):
    return next(program for program in plan.programs if program.name == name)


def memory(plan, name):
    return find(plan, name).memory


def test_weights_are_those_of_the_check_at_the_start_of_a_run(folder):
    plan = estimate(folder, mesh__data=2, mesh__fsdp=4)
    mesh = tiny.make_mesh(8, data=2, fsdp=4)
    config = tiny.config(mesh__data=2, mesh__fsdp=4)
    with jax.set_mesh(mesh):
        least = PPOMemory(config, tiny.networks(config), mesh).measure()
    assert [program.name for program in plan.programs] == PROGRAMS
    for program in plan.programs:
        assert program.memory.parameters == least.parameters
        assert program.memory.optimizer == least.optimizer
        assert program.memory.frozen == least.frozen
        assert program.memory.peak == sum(vars(program.memory).values())
    assert memory(plan, "update_critic").gradients == least.gradients, "the critic is larger"
    assert memory(plan, "sample").decoding_copy == least.decoding
    assert plan.peak == max(program.memory.peak for program in plan.programs)


def test_scores_of_long_prompts_are_counted(folder):
    """Prompts are read with xla's attention; the scores of a long one outweigh its MLP."""
    lengths = (2048, 4096)
    short, long = (
        memory(estimate(folder, "cpu:1", data__max_prompt_length=length), "sample").temporaries
        for length in lengths
    )
    # As many tokens in fewer prompts: blocks of a quarter of a prompt, four heads, two arrays.
    scores = [2 * 4 * (length // 4) * length * (8192 // length) * 4 for length in lengths]
    assert long - short == scores[1] - scores[0]


def test_a_single_cpu_also_holds_the_process(folder):
    plan, others = (estimate(folder, topology) for topology in ("cpu:1", "v5e:1x1"))
    critic = memory(plan, "update_critic")
    # The scaled gradient, and two new arrays of the largest parameter.
    assert critic.temporaries > critic.gradients
    assert {program.memory.process for program in plan.programs} == {memory_estimate.PROCESS_BYTES}
    assert {program.memory.process for program in others.programs} == {0}
    table, other = (plan_command.format_plan(x).splitlines() for x in (plan, others))
    assert "process" in table[4] and not any("process" in line for line in other)


def test_int8_kernels_shrink_the_decoding_copy(folder):
    options = {"algorithm__rollout_is": "token", "model__dtype": "bfloat16"}
    plain = memory(estimate(folder, **options), "sample").decoding_copy
    int8 = estimate(folder, rollout__quantization="int8", **options)
    assert 0.5 < memory(int8, "sample").decoding_copy / plain < 0.9


@pytest.mark.parametrize(("topology", "dtype"), [("v5e:1x1", "bfloat16"), ("cpu:1", "float32")])
def test_the_dtype_is_that_of_the_named_machine(folder, topology, dtype):
    chosen = estimate(folder, topology, model__dtype="auto")
    assert chosen.to_json() == estimate(folder, topology, model__dtype=dtype).to_json()


@pytest.mark.slow
def test_a_program_of_one_shape_is_compiled_once_for_all_sizes(folder, capsys):
    compiled, mesh = {}, tiny.make_mesh()
    labels = []
    with jax.set_mesh(mesh):
        for rows in (None, 1):
            config = tiny.config(model__path=folder, actor__ppo_micro_batch_size_per_device=rows)
            step = abstract_step.build_abstract_step(config, mesh)
            memory, _ = compiler_figures.measure_programs(step, compiled)
            assert list(memory) == PROGRAMS
            lines = capsys.readouterr().err
            labels.append(re.findall(r"^compiled (.+): \d+\.\d s$", lines, re.MULTILINE))
    assert len(labels[0]) == 8
    # Sampling and advantages have no micro-batches.
    assert labels[1] == ["forward, policy", "forward, critic", "update, actor", "update, critic"]


@pytest.mark.slow
def test_the_compilers_figures_replace_the_estimate(folder):
    config = tiny.config(model__path=folder, mesh__fsdp=2, mesh__data=1)
    plan = step_plan.plan_step(config, parse_topology("cpu:2"))
    assert plan.source.startswith("compiled for cpu")
    assert [program.name for program in plan.programs] == PROGRAMS
    estimated = step_plan.plan_step(config, parse_topology("cpu:2"), compiles=False)
    for ours, other in zip(plan.programs, estimated.programs, strict=True):
        assert ours.memory.parameters == other.memory.parameters
        assert ours.memory.temporaries != other.memory.temporaries or not ours.memory.temporaries
    assert plan.available is None and plan.fits is None and plan.seconds is None
    # What an update returns takes the place of what it was given.
    updated = memory(plan, "update_actor")
    assert 0 <= updated.batch < updated.parameters


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("message", "used"),
    [
        ("Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm.", 17.5 * 2**30),
        ("the total memory required for HLO temporaries (300.00M) exceeds", 300 * 2**20),
    ],
)
def test_a_program_that_does_not_fit_counts_with_what_the_compiler_asks_for(
    folder, monkeypatch, message, used
):
    compile_program = jax.stages.Lowered.compile
    arguments = []  # bytes of each program

    def run_out_of_memory(lowered):
        shapes = jax.tree.leaves(lowered.args_info)
        arguments.append(sum(x.dtype.itemsize * math.prod(x.shape) for x in shapes))
        if len(arguments) == 2:  # the one that lays the layers out for decoding
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")
        return compile_program(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", run_out_of_memory)
    config = tiny.config(model__path=folder)
    plan = step_plan.plan_step(config, parse_topology("cpu:1"))
    assert [program.name for program in plan.programs if program.is_refused] == ["prepare_weights"]
    assert "The compiler refused: decoding weights." in plan_command.format_plan(plan)
    refused = memory(plan, "prepare_weights")
    counted = refused.temporaries + (arguments[1] if "Used" in message else 0)
    assert counted == pytest.approx(used, abs=100)


def test_without_the_compiler_the_plan_is_estimated_and_says_so(folder, monkeypatch):
    def missing(topology):
        raise topologies.CompilerMissingError("libtpu is not installed")

    monkeypatch.setattr(step_plan, "described_devices", missing)
    plan = step_plan.plan_step(tiny.config(model__path=folder), parse_topology("v5e:1x1"))
    assert plan.source.startswith("estimated, within 15 % of a compiler's peak")
    assert plan.source.endswith("because libtpu is not installed")
    assert plan.programs == estimate(folder, "v5e:1x1").programs
    assert plan.source in plan_command.format_plan(plan)


def test_what_does_not_fit_is_said_with_remedies(folder, monkeypatch):
    plan = estimate(folder)
    text = plan_command.format_plan(plan)
    assert re.search(r"of 15\.75 GiB per device: fits\.", text) and "saves" not in text
    assert "JAX takes" not in text, "of a TPU's memory it takes all"
    assert "A prediction, not a measurement" in text
    small = {"v5e": topologies.DeviceType("tpu", plan.peak - 1, slices=("2x4",))}
    monkeypatch.setattr(topologies, "DEVICE_TYPES", topologies.DEVICE_TYPES | small)
    refused = estimate(folder)
    text = plan_command.format_plan(refused)
    assert "does not fit" in text and "saves" in text
    assert "tokens per second" not in text, "the speed of this device is unknown"
    # Each remedy needs what it promises.
    needs = [needed for _, needed in refused.remedies]
    assert needs == sorted(needs) and needs[-1] < plan.peak == refused.estimated_peak
    monkeypatch.undo()
    split = dict(refused.remedies)["config.mesh.data=1 with config.mesh.fsdp=8"]
    assert split == estimate(folder, mesh__data=1, mesh__fsdp=8).peak
    shared = dict(refused.remedies)["config.critic.shared_trunk=True"]
    assert shared == estimate(folder, critic__shared_trunk=True).peak


def test_a_stage_holds_its_own_layers(tmp_path):
    architecture = dataclasses.replace(tiny.ARCHITECTURE, num_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(architecture)))
    plain, staged = (
        estimate(str(tmp_path), "h100:8", rollout__n=2, mesh__stage=stages, mesh__data=8 // stages)
        for stages in (1, 2)
    )
    layer = param_shapes(Transformer(tiny.ARCHITECTURE), "lm")["layers"]
    saved = memory(plain, "sample").parameters - memory(staged, "sample").parameters
    # Of actor and critic.
    assert saved == 2 * 4 * sum(x.size for x in jax.tree.leaves(layer))


def test_json_holds_all_figures(folder):
    plan = estimate(folder)
    values = json.loads(json.dumps(plan.to_json()))
    assert values["peak"] == plan.peak and values["fits"] is True and values["devices"] == 8
    seconds = sum(program["predicted_seconds"] for program in values["programs"])
    assert seconds == pytest.approx(values["predicted_step_seconds"])
    tokens = tiny.B * (tiny.P + tiny.T)
    assert values["predicted_tokens_per_second"] == pytest.approx(tokens / plan.seconds)


@pytest.mark.slow
def test_the_estimate_of_a_plain_decoder_is_close_to_the_compilers(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "vocab_size": 8192}
    architecture = dataclasses.replace(tiny.ARCHITECTURE, num_layers=12, **sizes)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(architecture)))
    config = tiny.config(
        model__path=str(tmp_path),
        data__max_prompt_length=128,
        data__max_response_length=128,
        model__gradient_checkpointing=True,
        critic__freeze="attention",
    )
    compiled, estimated = (
        step_plan.plan_step(config, parse_topology("cpu:2"), compiles=compiles)
        for compiles in (True, False)
    )
    assert estimated.peak == pytest.approx(compiled.peak, rel=0.15)
    ours, theirs = (memory(plan, "update_critic") for plan in (estimated, compiled))
    assert ours.peak == pytest.approx(theirs.peak, rel=0.15)
    assert (ours.optimizer, ours.gradients) == (theirs.optimizer, theirs.gradients)


def test_devices_have_memory_rates_and_a_compiler():
    for kind, device in topologies.DEVICE_TYPES.items():
        if kind != "cpu":
            assert device.memory and device.flops and device.memory_rate and device.jax_kinds, kind
            assert parse_topology(f"{kind}:{(*device.slices, device.per_host)[0]}").kind == kind
            assert device.slices or kind.partition("-")[0] in topologies._GPU_FACTS


@pytest.mark.parametrize(
    ("names", "name", "devices"),
    [
        ("v5e-64 v5e:8x8 v5litepod-64 V5E:8X8 tpu-v5litepod-64", "v5e:8x8", 64),
        ("H100:8 h100:8", "h100:8", 8),
        ("A100-80GB:8 a100-80:8", "a100-80gb:8", 8),
        ("v5e-1 v5e:1x1", "v5e:1x1", 1),
        ("v4-32 v4:2x2x4", "v4:2x2x4", 16),  # 32 TensorCores
        ("v5p:4x4x16", "v5p:4x4x16", 256),
        ("v5p-512 v5p:4x8x8", "v5p:4x8x8", 256),  # rather than 4x4x16, which is known, too
        ("v6e-16 V6e-16 v6e:4x4", "v6e:4x4", 16),
        ("tpu7x-8 tpu7x:2x2x1", "tpu7x:2x2x1", 8),  # two devices per chip
        ("gb200:12", "gb200:12", 12),  # three hosts of four
        ("cpu:3", "cpu:3", 3),
    ],
)
def test_a_machine_has_one_name_whatever_it_is_called(names, name, devices):
    for each in names.split():
        topology = parse_topology(each)
        assert topology.num_devices == devices and topology.name == name


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("v4-8", {"topology_name": "v4:2x2x1", "chip_config_name": "megacore"}),  # not by core
        ("v5e-1", {"topology_name": "v5e:1x1", "chips_per_host_bounds": (1, 1, 1)}),
        ("l4:2", {"topology": "1x1x2", "target_config": "major: 8 minor: 9 feature_ext"}),
        ("gb200:8", {"topology": "1x2x4", "target_config": 'description_str: "NVIDIA GB200"'}),
    ],
)
def test_compilers_are_told_which_machine_it_is(name, described, monkeypatch):
    told = {}
    monkeypatch.setattr(
        "jax.experimental.topologies.get_topology_desc",
        lambda **description: told.update(description) or argparse.Namespace(devices=[]),
    )
    topologies.described_devices(parse_topology(name))
    for key, text in described.items():
        assert told[key] == text or text in told[key]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5x:2x4", "unknown type 'v5x'.* add --hbm-gib and --tflops. Did you mean v5"),
        ("a100:8", "unknown type 'a100'.*Did you mean a100-40gb or a100-80gb"),
        ("v5e-10", "did you mean v5e:2x4"),
        ("v5e:8x4", "did you mean v5e:4x8"),
        ("v5p-400", "did you mean v5p:4x4x12"),
        ("v5p:128", "did you mean v5p:4x4x4"),
        ("h100:12", "did you mean h100:16"),
        ("gb200:6", "did you mean gb200:8"),
        ("v5e:16x32", "did you mean v5e:16x16"),
        ("h100:0", "did you mean h100:1"),
        ("h100", "did you mean h100:8"),
        ("h100-8", "did you mean h100:8"),
    ],
)
def test_an_unknown_machine_is_refused_in_one_line(name, message):
    with pytest.raises(UserError, match=message) as refused:
        parse_topology(name)
    assert str(refused.value).startswith(f"--topology={name}: ")
    assert "\n" not in str(refused.value)


def test_gpus_have_what_jax_takes_of_their_memory(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    whole = topologies.DEVICE_TYPES["h100"].memory
    assert parse_topology("h100:8").available_bytes == 0.75 * whole
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert parse_topology("h100:8").available_bytes == 0.9 * whole
    for text in ("most", "0", "nan"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
        with pytest.raises(UserError, match=f"^XLA_PYTHON_CLIENT_MEM_FRACTION={text}: expected a"):
            _ = parse_topology("h100:8").available_bytes


def test_the_plan_says_what_a_step_is_and_how_long_the_run_takes(folder):
    plan = estimate(folder, "h100:8", trainer__total_training_steps=7200, rollout__n=2)
    lines = plan_command.format_plan(plan).splitlines()
    assert lines[0] == "h100:8 (8 GPUs), mesh data 8 x fsdp 1 x model 1"
    assert lines[1] == (
        f"a step: {tiny.B} prompts of at most {tiny.P} tokens, 2 responses each of at most {tiny.T}"
    )
    assert f"The run, 7200 steps: at least {2 * plan.seconds:.2g} hours" in lines
    epochs = estimate(folder, "h100:8", trainer__total_training_steps=None, trainer__total_epochs=3)
    steps = 30_000 // tiny.B
    assert (
        f"For each 10,000 prompts of the training data, 3 epochs, {steps} steps: at least "
        f"{steps * epochs.seconds / 3600:.2g} hours"
    ) in plan_command.format_plan(epochs)


def test_where_much_memory_is_free_the_plan_says_what_it_could_serve(folder, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    options = {"mesh__data": 4, "mesh__fsdp": 2, "rollout__max_num_seqs": 1}
    options |= {"model__gradient_checkpointing": True}
    plan = estimate(folder, "h100:8", **options)
    text = plan_command.format_plan(plan)
    assert "of 59.33 GiB per device: fits.\nJAX takes 75 % of the 79.11 GiB of a GPU" in text
    assert "GiB per device stay free. Changes for speed or fewer devices" in text
    uses = dict(plan.remedies)
    whole = estimate(folder, "h100:8", **options | {"mesh__data": 8, "mesh__fsdp": 1})
    assert uses["config.mesh.data=8 and config.mesh.fsdp=1"] == whole.peak
    assert all(plan.estimated_peak < needed <= plan.available for needed in uses.values())
    # Half of the devices cannot have this mesh; those of the default mesh fit one GPU.
    assert not any("topology" in options for options in uses)
    smallest = dict(estimate(folder, "h100:8").remedies)["--topology=h100:1"]
    assert smallest == estimate(folder, "h100:1").peak


def test_a_device_that_is_not_in_the_table_is_planned_by_its_figures(folder):
    words = ["plan", "--config=arithmetic", f"--config.model.path={folder}", "--topology=mi300x:8"]
    figures = ["--hbm-gib=192", "--tflops=1307"]
    config, topology, _ = plan_command.read_plan_arguments([*words, *figures])
    assert topology.name == "mi300x:8" and topology.available_bytes == 0.75 * 192 * 2**30
    plan = step_plan.plan_step(config, topology)
    assert plan.source.endswith("no compiler knows mi300x")
    assert find(plan, "sample").seconds == find(plan, "sample").flops / 1307e12
    assert "bandwidth is unknown (--hbm-gb-per-s)" in plan_command.format_plan(plan)
    _, topology, _ = plan_command.read_plan_arguments([*words, *figures, "--hbm-gb-per-s=5300"])
    assert topology.device_type.memory_rate == 5300e9
    for wrong in (["--tflops=1"], ["--hbm-gib=x"], ["--hbm-gib=0"], ["--hbm-gib=1", "--tflops=-1"]):
        message = f"^{' '.join(wrong)}: expected --hbm-gib, and numbers above 0"
        with pytest.raises(UserError, match=message):
            plan_command.read_plan_arguments([*words, *wrong])
    with pytest.raises(UserError, match="v5e is known; leave out --hbm-gib=192 --tflops=1307"):
        plan_command.read_plan_arguments([*words, "--topology=v5e:2x4", *figures])


def test_a_folder_that_is_missing_needs_no_weights(tmp_path):
    message = "set config.model.path to a folder with config.json, which is enough here$"
    with pytest.raises(UserError, match=message):
        estimate(str(tmp_path / "missing"))


def test_the_command_reports_mistakes_in_one_line(capsys):
    for arguments, message in (
        ([], "--topology: must be given"),
        (["--topology", "cpu:1"], "--topology: write --topology=VALUE, with the ="),
        (["--topology=cpu:1", "--config.actor.clip_rato=1"], r"config\.actor\.clip_rato"),
        (["--topology=cpu:1", "--arithmetic=no"], "--arithmetic=no: --arithmetic takes no value"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {message}"):
            plan_command.main(["plan", "--config=arithmetic", *arguments])
    plan_command.main(["plan", "--help"])
    assert "usage: python -m jax_ppo.plan" in capsys.readouterr().out


def run_command(folder, *arguments):
    command = [sys.executable, "-m", "jax_ppo", "plan", "--config=arithmetic", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    command.append(f"--config.model.path={folder}")
    return subprocess.check_output(command, text=True, env=environment)


@pytest.mark.slow
def test_the_command_prints_the_plan_of_a_machine_that_is_not_there(folder):
    text = run_command(folder, "--topology=v6e:4x4", "--arithmetic")
    assert "v6e:4x4 (16 chips), mesh data 16" in text and "Peak" in text


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpus_compiler_measures_the_plan(folder):
    values = json.loads(run_command(folder, "--topology=v5e:2x2", "--json"))
    assert values["source"].startswith("compiled for TPU v5 lite")
    assert all(program["peak"] > 0 for program in values["programs"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpus_update_sums_no_table_of_a_vocabulary_on_all_devices():
    """Each of eight devices has 64 columns, half as many as a vector."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    script = Path(__file__).parents[1] / "harness" / "compile_update_for_tpus.py"
    output = subprocess.check_output([sys.executable, script, "512"], env=environment, text=True)
    kinds = [line.split()[0] for line in output.splitlines()]
    assert sorted(kinds) == ["all-gather", "all-to-all"]
