"""The plan of a step: its memory, its work, what it says and what it refuses."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import tiny
from jax_ppo import plan as plan_command
from jax_ppo.errors import UserError
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory import memory_formulas, step_plan
from jax_ppo.memory import step_work as work_counts
from jax_ppo.memory.abstract_step import build_abstract_step
from jax_ppo.memory.memory_check import PPOMemory
from jax_ppo.memory.step_work import PhaseWork, count_work, predict_seconds
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.runtime import meshes, topologies
from jax_ppo.runtime.devices import PEAK_RATES, PeakRates, bytes_per_device
from jax_ppo.runtime.topologies import parse_topology

PHASES = [
    "prepare_weights",
    "sample",
    "forward_policy",
    "forward_critic",
    "estimate",
    "update_actor",
    "update_critic",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model folder that holds nothing but a config.json."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(to_hf_config(tiny.ARCHITECTURE)))
    return str(path)


def estimate(folder, topology="v5e:2x4", **changes):
    config = tiny.config(model__path=folder, **changes)
    return step_plan.plan_step(config, parse_topology(topology), compiles=False)


def memory(plan, name):
    return next(phase.memory for phase in plan.phases if phase.name == name)


def test_weights_are_those_of_the_check_at_the_start_of_a_run(folder):
    plan = estimate(folder, mesh__data=2, mesh__fsdp=4)
    mesh = tiny.make_mesh(8, data=2, fsdp=4)
    config = tiny.config(mesh__data=2, mesh__fsdp=4)
    with jax.set_mesh(mesh):
        least = PPOMemory(config, tiny.networks(config), mesh).measure()
    assert [phase.name for phase in plan.phases] == PHASES
    for phase in plan.phases:
        assert phase.memory.parameters == least.parameters
        assert phase.memory.optimizer == least.optimizer
        assert phase.memory.frozen == least.frozen
        assert phase.memory.peak == sum(vars(phase.memory).values())
    assert memory(plan, "update_critic").gradients == least.gradients, "the critic is larger"
    assert memory(plan, "sample").decoding_copy == least.decoding
    assert plan.peak == max(phase.memory.peak for phase in plan.phases)


def test_shared_prompts_are_counted_once_per_row(folder):
    options = {"rollout__n": 4, "packing__row_length": 64}
    alone, shared = (
        estimate(folder, "v5e:1x1", **options, packing__share_prompts=x) for x in (False, True)
    )
    flops = [
        next(phase.work.flops for phase in plan.phases if phase.name == "forward_critic")
        for plan in (alone, shared)
    ]
    # The prompt's last token is computed for each response.
    prompt = work_counts.count_forward_flops(tiny.ARCHITECTURE, np.array([tiny.P - 1]))
    assert flops[0] - flops[1] == pytest.approx(3 * tiny.B * prompt)
    # There are as many rows as prompts in the worst case, and no second packing of them.
    assert memory(shared, "update_critic").batch < memory(alone, "update_critic").batch


def test_the_cache_is_that_of_the_slots_and_the_first_stage(folder):
    architecture = tiny.ARCHITECTURE
    token_bytes = 2 * architecture.num_kv_heads * architecture.head_dim * 4
    # One device: 8 slots with room for prompt and response, and 8 prompts in the prefill buffer.
    expected = token_bytes * (tiny.B * (tiny.P + tiny.T) + tiny.B * tiny.P)
    assert memory(estimate(folder, "v5e:1x1"), "sample").cache == expected
    fewer = memory(estimate(folder, "v5e:1x1", rollout__max_num_seqs=2), "sample").cache
    assert fewer == token_bytes * (2 * (tiny.P + tiny.T) + 2 * tiny.P)
    # A later stage has more room in fewer slots, and prompts that are longer.
    staged = memory(estimate(folder, "v5e:1x1", rollout__stage_length=5), "sample").cache
    assert token_bytes * tiny.B * (tiny.P + 5) < staged < expected + token_bytes * tiny.B * 5


@pytest.mark.parametrize(
    ("changes", "per_device"),
    [
        # Two rows of 512 tokens: two heads of a block of 128 queries with 512 keys.
        ({"mesh__data": 4, "mesh__model": 2}, 2 * 2 * 128 * 512),
        # Two rows of 512 in four parts, each with 2 blocks of 64: four heads.
        ({"mesh__data": 2, "mesh__context": 4}, 2 * 4 * 64 * 512),
    ],
)
def test_scores_of_each_pair_of_tokens_are_counted(folder, changes, per_device):
    """xla has scores and weights, here both in float32, and their gradients; splash has none."""
    options = changes | {
        "packing__row_length": 512,
        "packing__enabled": False,
        "rollout__logprob_micro_batch_size_per_device": 2,
        "actor__ppo_micro_batch_size_per_device": 2,
        "model__gradient_checkpointing": True,  # otherwise the scores of all layers are kept
    }
    splash, xla = (estimate(folder, **options, model__attention=name) for name in ("splash", "xla"))
    for phase, arrays in (("forward_critic", 2), ("update_critic", 4)):
        difference = memory(xla, phase).temporaries - memory(splash, phase).temporaries
        assert difference == arrays * 4 * per_device


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
    assert {phase.memory.process for phase in plan.phases} == {memory_formulas.PROCESS_BYTES}
    assert {phase.memory.process for phase in others.phases} == {0}
    table, other = (step_plan.format_plan(x).splitlines() for x in (plan, others))
    assert "process" in table[3] and not any("process" in line for line in other)


def test_cudnns_mask_is_counted_once_for_all_heads(tmp_path):
    """A row of 512 tokens on each device, and bfloat16."""
    architecture = dataclasses.replace(tiny.ARCHITECTURE, head_dim=16)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(architecture)))
    options = {
        "packing__row_length": 512,
        "packing__enabled": False,
        "model__dtype": "bfloat16",
        "model__gradient_checkpointing": True,
    }
    cudnn, xla = (
        estimate(str(tmp_path), "h100:8", **options, model__attention=name)
        for name in ("cudnn", "xla")
    )
    # Scores in float32 and weights in bfloat16; with gradients four arrays in float32.
    for phase, score_bytes in (("forward_critic", 4 + 2), ("update_critic", 4 * 4)):
        difference = memory(xla, phase).temporaries - memory(cudnn, phase).temporaries
        assert difference == score_bytes * (4 * 128 * 512) - 2 * 512 * 512


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
def test_the_compilers_figures_replace_the_estimate(folder):
    config = tiny.config(model__path=folder, mesh__fsdp=2, mesh__data=1)
    plan = step_plan.plan_step(config, parse_topology("cpu:2"))
    assert plan.is_compiled and plan.source.startswith("compiled for cpu")
    assert [phase.name for phase in plan.phases] == PHASES
    estimated = step_plan.plan_step(config, parse_topology("cpu:2"), compiles=False)
    for phase, other in zip(plan.phases, estimated.phases, strict=True):
        assert phase.memory.parameters == other.memory.parameters
        assert phase.estimated_peak == other.memory.peak
        assert phase.memory.temporaries != other.memory.temporaries or not phase.memory.temporaries
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
    programs = 0
    arguments = 0

    def run_out_of_memory(lowered):
        nonlocal programs, arguments
        programs += 1
        if programs == 2:  # the one that lays the layers out for decoding
            shapes = jax.tree.leaves(lowered.args_info)
            arguments = sum(x.dtype.itemsize * math.prod(x.shape) for x in shapes)
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")
        return compile_program(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", run_out_of_memory)
    config = tiny.config(model__path=folder)
    plan = step_plan.plan_step(config, parse_topology("cpu:1"))
    assert [phase.name for phase in plan.phases if phase.is_refused] == ["prepare_weights"]
    assert "The compiler refused: decoding weights." in step_plan.format_plan(plan)
    refused = memory(plan, "prepare_weights")
    counted = refused.temporaries + (arguments if "Used" in message else 0)
    assert counted == pytest.approx(used, abs=100)


def test_without_the_compiler_the_plan_is_arithmetic_and_says_so(folder, monkeypatch):
    def missing(topology):
        raise topologies.CompilerMissingError("libtpu is not installed")

    monkeypatch.setattr(step_plan, "described_devices", missing)
    plan = step_plan.plan_step(tiny.config(model__path=folder), parse_topology("v5e:1x1"))
    assert not plan.is_compiled
    assert plan.source == "arithmetic, because libtpu is not installed"
    assert plan.phases == estimate(folder, "v5e:1x1").phases
    assert plan.source in step_plan.format_plan(plan)


def test_what_does_not_fit_is_said_with_remedies(folder, monkeypatch):
    plan = estimate(folder)
    text = step_plan.format_plan(plan)
    assert re.search(r"of 15\.75 GiB per device: fits\.", text) and "saves" not in text
    assert "A prediction, not a measurement" in text
    small = {"v5e": topologies.DeviceType("tpu", plan.peak - 1, chips_per_host=(2, 2))}
    monkeypatch.setattr(topologies, "DEVICE_TYPES", topologies.DEVICE_TYPES | small)
    refused = estimate(folder)
    text = step_plan.format_plan(refused)
    assert "does not fit" in text and "saves" in text
    assert "tokens per second" not in text, "the speed of this device is unknown"
    # Each remedy needs what it promises.
    needs = [needed for _, needed in refused.remedies]
    assert needs == sorted(needs) and needs[-1] < plan.peak
    monkeypatch.undo()
    split = dict(refused.remedies)["config.mesh.data=1 with config.mesh.fsdp=8"]
    assert split == estimate(folder, mesh__data=1, mesh__fsdp=8).peak
    shared = dict(refused.remedies)["config.critic.shared_trunk=True"]
    assert shared == estimate(folder, critic__shared_trunk=True).peak


def test_json_holds_all_figures(folder):
    plan = estimate(folder)
    values = json.loads(json.dumps(plan.to_json()))
    assert values["peak"] == plan.peak and values["fits"] is True and values["devices"] == 8
    assert sum(phase["predicted_seconds"] for phase in values["phases"]) == pytest.approx(
        values["predicted_step_seconds"]
    )
    tokens = tiny.B * (tiny.P + tiny.T)
    assert values["predicted_tokens_per_second"] == pytest.approx(tokens / plan.seconds)


def work(folder, **changes):
    config = tiny.config(model__path=folder, **changes)
    mesh = meshes.make_mesh(config.mesh, jax.devices()[:8])
    with jax.set_mesh(mesh):
        return count_work(build_abstract_step(config, mesh))


def test_links_carry_gathered_weights_and_gradients_alone(folder):
    replicated = work(folder, mesh__data=8)
    assert replicated["forward_policy"].link_bytes == 0
    actor = tiny.ARCHITECTURE
    gathered = work(folder, mesh__data=1, mesh__fsdp=8)
    layer = (
        2 * actor.hidden_size * actor.num_heads * actor.head_dim
        + 2 * actor.hidden_size * actor.num_kv_heads * actor.head_dim
        + 3 * actor.hidden_size * actor.intermediate_size
        + 2 * actor.hidden_size
    )
    weights = 4 * (layer + actor.hidden_size + actor.vocab_size * actor.hidden_size)
    # One micro-batch, actor and reference: each device sends its eighth to seven others in a ring.
    assert gathered["forward_policy"].link_bytes == pytest.approx(2 * weights * 7 / 8)
    # The sum of a gradient over copies: a ring sends it twice, all but an eighth.
    assert replicated["update_actor"].link_bytes == pytest.approx(2 * weights * 7 / 8)
    for name in PHASES:
        assert replicated[name].flops == gathered[name].flops


def test_a_pass_reads_its_weights_and_moves_the_outputs_of_its_products(folder):
    """The terms of a product's output are split over `model`, the hidden state's are not."""
    architecture = tiny.ARCHITECTURE
    one_pass = {"rollout__logprob_micro_batch_size_per_device": 8}
    heads = architecture.num_heads + 2 * architecture.num_kv_heads
    columns = heads * architecture.head_dim + 3 * architecture.intermediate_size
    whole_rows = work(folder, mesh__data=8, **one_pass)["forward_critic"].memory_bytes
    half_rows = work(folder, mesh__data=4, mesh__model=2, **one_pass)["forward_critic"].memory_bytes
    params = tiny.random_params(architecture, seed=0, stream=0, head="scalar")
    weights = 4 * sum(x.size for x in jax.tree.leaves(params))
    moved = {
        parts: architecture.hidden_size * work_counts._HIDDEN_MOVES
        + work_counts._OUTPUT_MOVES * columns / parts
        for parts in (1, 2)
    }
    one, two = whole_rows - weights, half_rows - weights / 2
    # Half as many groups of devices: twice the tokens each.
    assert two / one == pytest.approx(2 * moved[2] / moved[1])


def test_an_update_moves_three_forward_passes_and_a_fourth_to_recompute(folder):
    plain = work(folder, mesh__data=8)
    again = work(folder, mesh__data=8, model__gradient_checkpointing=True)
    forward = plain["forward_critic"].memory_bytes
    added = again["update_critic"].memory_bytes - plain["update_critic"].memory_bytes
    assert added == pytest.approx(forward)
    assert plain["update_critic"].memory_bytes > 3 * forward


def test_gathered_weights_of_the_head_are_there_while_the_layers_run():
    def join(**shape):
        mesh = tiny.make_mesh(8, **{"data": 1} | shape)
        step = types.SimpleNamespace(mesh=mesh)
        return memory_formulas._join(step, layers=3, head=5)

    assert join(fsdp=8) == 8 and join(data=8) == 5 and join(data=4, model=2) == 5


def test_weights_are_gathered_in_the_type_that_the_platforms_compiler_gathers(folder):
    """For GPUs in float32, then rounded; for TPUs each device rounds its own part of all first."""
    architecture = tiny.ARCHITECTURE
    embedding = architecture.vocab_size * architecture.hidden_size
    config = tiny.config(model__path=folder, model__dtype="bfloat16", mesh__data=1, mesh__fsdp=8)
    mesh = meshes.make_mesh(config.mesh, jax.devices()[:8])
    with jax.set_mesh(mesh):
        step = build_abstract_step(config, mesh)
        role = step.role("actor")
        stored = sum(bytes_per_device(x) for x in jax.tree.leaves(role.params))
        with assume_platform("tpu"):
            assert memory_formulas.head_weight_bytes(step, role) == embedding * 2
            assert memory_formulas.cast_weight_bytes(role) == stored // 2
            one_layer = memory_formulas.gathered_bytes(step, role)
        with assume_platform("gpu"):
            assert memory_formulas.head_weight_bytes(step, role) == embedding * (2 + 4)
            assert memory_formulas.cast_weight_bytes(role) == 0
            # The next layer, too.
            assert 0 < one_layer * 2 * 2 == memory_formulas.gathered_bytes(step, role)


def test_a_tpus_update_has_the_gradients_of_the_head_or_those_of_the_layers(folder, monkeypatch):
    """In a small model the layers' are larger; for GPUs the head's weights arrive early."""
    options = {"mesh__data": 1, "mesh__fsdp": 8}
    count_chunk = memory_formulas.logit_chunk_bytes

    def temporaries(topology, added):
        monkeypatch.setattr(
            memory_formulas, "logit_chunk_bytes", lambda *args: count_chunk(*args) + added
        )
        return memory(estimate(folder, topology, **options), "update_actor").temporaries

    assert temporaries("v5e:2x4", added=2) == temporaries("v5e:2x4", added=0)
    assert temporaries("h100:8", added=2) == temporaries("h100:8", added=0) + 3
    assert temporaries("v5e:2x4", added=2**30) > 2**30


@pytest.mark.parametrize(("lanes", "sums"), [(2, 1), (128, 0)])
def test_a_tpus_sum_of_gradients_in_float32_is_whole_if_columns_fill_lanes(
    folder, lanes, sums, monkeypatch
):
    """Two columns of the output embedding on each of eight devices."""
    monkeypatch.setattr(memory_formulas, "TPU_LANES", lanes)
    options = {"mesh__data": 1, "mesh__fsdp": 8}
    wide, narrow = (
        memory(estimate(folder, actor__optim__gradient_dtype=dtype, **options), "update_actor")
        for dtype in ("float32", "bfloat16")
    )
    embedding = tiny.ARCHITECTURE.vocab_size * tiny.ARCHITECTURE.hidden_size
    assert wide.temporaries - narrow.temporaries == sums * embedding * 4


def test_a_phase_takes_as_long_as_its_slowest_resource():
    rates = PeakRates(flops=10.0, memory_bytes=5.0, link_bytes=2.0)
    one = PhaseWork(flops=20.0, memory_bytes=5.0, link_bytes=2.0, row_bytes=1.0)
    assert predict_seconds(one, rates, None) == 2.0
    assert predict_seconds(one * 3, rates, None) == 6.0
    assert predict_seconds(one + PhaseWork(memory_bytes=20.0), rates, None) == 5.0
    assert predict_seconds(one, rates, 0.25) == 4.0
    assert predict_seconds(one, None, 1.0) is None


def test_devices_have_memory_and_rates():
    for kind, device in topologies.DEVICE_TYPES.items():
        if kind != "cpu":
            assert device.memory and PEAK_RATES[device.jax_kind].link_bytes, kind


@pytest.mark.parametrize(
    ("name", "devices"),
    [("v5e:1x1", 1), ("v5e:2x4", 8), ("v5p:2x2x2", 8), ("v6e:4x4", 16), ("tpu7x:2x2x1", 8)]
    + [("h100:8", 8), ("h200:16", 16), ("cpu:3", 3)],
)
def test_machines_are_known_by_name(name, devices):
    topology = parse_topology(name)
    assert topology.num_devices == devices and topology.name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5x:2x4", "unknown type 'v5x'.*Did you mean 'v5"),
        ("H100:8", "unknown type 'H100'.*Did you mean 'h100'"),
        ("v5e-8", "unknown type"),
        ("v5e:8", "a shape of v5e has 2 numbers"),
        ("v5e:3x4", "nearest larger one is v5e:4x4"),
        ("v5p:1x2x2", "nearest larger one is v5p:2x2x2"),
        ("h100:12", "nearest larger machine is h100:16"),
        ("v5e:16x32", "a slice of v5e has at most 256 chips, these are 512"),
        ("h100:0", "expected TYPE:SHAPE"),
        ("h100", "expected TYPE:SHAPE"),
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


def test_gpus_of_several_hosts_have_a_network():
    assert parse_topology("h100:8").network_bytes(model=2) is None
    assert parse_topology("v5e:8x8").network_bytes(model=2) is None
    two_hosts = parse_topology("h100:16")
    # With groups of 4, two devices of a host share out what a group sends.
    assert two_hosts.network_bytes(model=4) == 2 * topologies.GPU_NETWORK_BYTES
    assert two_hosts.network_bytes(model=8) == topologies.GPU_NETWORK_BYTES


def test_the_command_reports_mistakes_in_one_line(capsys):
    with pytest.raises(SystemExit, match=r"^error: --topology: must be given"):
        plan_command.main(["plan", "--config=arithmetic"])
    with pytest.raises(SystemExit, match=r"^error: config\.actor\.clip_rato"):
        plan_command.main(
            ["plan", "--config=arithmetic", "--topology=cpu:1", "--config.actor.clip_rato=1"]
        )
    with pytest.raises(SystemExit, match=r"^error: --arithmetic=no: --arithmetic takes no value"):
        plan_command.main(["plan", "--config=arithmetic", "--topology=cpu:1", "--arithmetic=no"])
    plan_command.main(["plan", "--help"])
    assert "usage: python -m jax_ppo.plan" in capsys.readouterr().out


def run_command(folder, *arguments):
    command = [sys.executable, "-m", "jax_ppo", "plan", "--config=arithmetic", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    return subprocess.run(
        [*command, f"--config.model.path={folder}"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    ).stdout


@pytest.mark.slow
def test_the_command_prints_the_plan_of_a_machine_that_is_not_there(folder):
    text = run_command(folder, "--topology=v6e:4x4", "--arithmetic")
    assert "v6e:4x4, mesh data 16" in text and "Peak" in text


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpus_compiler_measures_the_plan(folder):
    values = json.loads(run_command(folder, "--topology=v5e:2x2", "--json"))
    assert values["is_compiled"] and "TPU v5 lite" in values["source"]
    assert all(phase["peak"] > 0 for phase in values["phases"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpus_update_sums_no_table_of_a_vocabulary_on_all_devices():
    """Each of eight devices has 64 columns, half as many as a vector."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    script = Path(__file__).parents[1] / "harness" / "compile_update_for_tpus.py"
    output = subprocess.check_output([sys.executable, script, "512"], env=environment, text=True)
    kinds = [line.split()[0] for line in output.splitlines()]
    assert sorted(kinds) == ["all-gather", "all-to-all"]
