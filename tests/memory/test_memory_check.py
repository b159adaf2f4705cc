"""A run that cannot fit its devices is refused before weights are loaded."""

import dataclasses
import functools
import os
import types
from pathlib import Path

import jax
import pytest

import tiny
from jax_ppo.config import loading
from jax_ppo.errors import UserError
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory import memory_check
from jax_ppo.memory.remedies import PossibleChanges, rank_remedies
from jax_ppo.run import ppo_training
from jax_ppo.runtime import devices, meshes
from jax_ppo.training.networks import Folders
from llama_folder import write_arithmetic_llama

CONFIG = tiny.config()
FOLDERS = Folders(actor=Path("actor"))


def bytes_on_first_device(tree):
    first = jax.devices()[0]
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


def test_the_bytes_are_those_of_the_arrays():
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    with jax.set_mesh(mesh):
        least = memory_check.PPOMemory(CONFIG, tiny.networks(CONFIG), mesh).measure()
        state = tiny.make_state(CONFIG, mesh)
    actor, critic = bytes_on_first_device(state.actor), bytes_on_first_device(state.critic)
    assert least.parameters == actor + critic and least.gradients == max(actor, critic)
    assert least.frozen == bytes_on_first_device(state.reference)
    assert least.optimizer == bytes_on_first_device(state.optimizers)
    resident = least.parameters + least.optimizer + least.frozen
    assert least.peak == resident + max(least.gradients, least.decoding)
    alone = tiny.config(trainer__critic_only=True, critic__freeze="embedding")
    least = memory_check.PPOMemory(alone, tiny.networks(alone), mesh).measure()
    assert least.gradients == critic - bytes_on_first_device(state.critic["embed"])


def test_decoding_weights_are_split_by_tensor_parallelism_alone():
    def decoding(**shape):
        mesh = tiny.make_mesh(8, **shape)
        return memory_check.PPOMemory(CONFIG, tiny.networks(CONFIG), mesh).measure().decoding

    assert decoding(fsdp=8) == decoding(data=8)
    assert decoding(fsdp=4, model=2) < 0.7 * decoding(data=8)


@pytest.fixture
def small_devices(monkeypatch):
    """Return a function that gives devices a memory; networks need no folders."""
    monkeypatch.setattr(
        memory_check, "read_networks", lambda config, folders: tiny.networks(config)
    )

    def limit_memory(limit):
        monkeypatch.setattr(memory_check, "read_memory_limit", lambda: limit)

    return limit_memory


def test_what_fits_is_accepted_and_the_rest_is_refused(small_devices):
    networks, mesh = tiny.networks(CONFIG), tiny.make_mesh(8, data=8)
    run = memory_check.PPOMemory(CONFIG, networks, mesh, FOLDERS)
    least = run.measure().peak
    for limit in (least, None):
        small_devices(limit)
        memory_check.validate_memory(run)
    small_devices(least - 1)
    with pytest.raises(UserError, match=r"^config.mesh: a device needs at least .* GiB") as refused:
        memory_check.validate_memory(run)
    message = str(refused.value)
    assert "\n" not in message
    for remedy in (
        "config.mesh.data=1 with config.mesh.fsdp=8",
        "config.critic.shared_trunk=True",
        "adv_estimator=reinforce_plus_plus",
    ):
        assert remedy in message


@pytest.mark.slow
def test_remedies_begin_with_the_one_that_saves_most_and_need_what_they_promise():
    mesh, nets = tiny.make_mesh(8, data=8), tiny.networks(CONFIG)
    least = memory_check.PPOMemory(CONFIG, nets, mesh).measure()

    @functools.cache
    def measure(config, mesh):
        return memory_check.PPOMemory(config, tiny.networks(config), mesh).measure().peak

    def rank(available=None):
        return rank_remedies(PossibleChanges(CONFIG, mesh), measure, least.peak, available)

    remedies = rank()
    needed = [remedy.needed for remedy in remedies]
    assert needed == sorted(needed) and needed[-1] < least.peak and len(remedies) >= 3
    split = tiny.config(mesh__data=1, mesh__fsdp=8)
    fsdp = memory_check.PPOMemory(split, nets, tiny.make_mesh(8, fsdp=8)).measure().peak
    by_options = {remedy.options: remedy for remedy in remedies}
    assert by_options["config.mesh.data=1 with config.mesh.fsdp=8"].needed == fsdp
    # What is trained takes half in bfloat16: parameters, moments and gradients.
    [half] = [remedy for words, remedy in by_options.items() if "bfloat16" in words]
    saved = least.peak - half.needed
    trained = least.parameters + least.optimizer
    assert trained / 2 <= saved <= (trained + least.gradients) / 2
    # Where no change is enough, pairs that are follow.
    available = needed[0] - 1
    pairs = [remedy for remedy in rank(available) if " and " in remedy.options]
    assert pairs and pairs[0].needed <= available
    changed = pairs[0].config
    assert pairs[0].needed == measure(changed, meshes.make_mesh(changed.mesh, jax.devices()[:8]))


def remedies_for(config, platform):
    """Return the options after each remedy by its words, without a measurement."""
    with assume_platform(platform):
        remedies = rank_remedies(
            PossibleChanges(config, tiny.make_mesh(1)), measure=lambda *changed: 0, needed=1
        )
    return {remedy.options: remedy.config for remedy in remedies}


def test_the_hosts_memory_is_a_remedy_where_devices_have_their_own():
    def least(config):
        with assume_platform("tpu"):
            nets = tiny.networks(config)
            return memory_check.PPOMemory(config, nets, tiny.make_mesh(1)).measure()

    remedies = remedies_for(CONFIG, "tpu")
    optimizers = remedies[
        "config.actor.optimizer_offload=True and config.critic.optimizer_offload=True"
    ]
    actor_and_critic = "config.actor.param_offload=True and config.critic.param_offload=True"
    idle = remedies[f"{actor_and_critic} and config.algorithm.reference_offload=True"]
    assert least(optimizers).optimizer == 0
    assert least(idle).frozen == 0 and least(idle).parameters < least(CONFIG).parameters
    assert not [words for words in remedies_for(CONFIG, "cpu") if "offload" in words]
    # The base of adapters, which the reference is, is read by all programs.
    adapters = remedies_for(tiny.config(model__lora__rank=2), "tpu")
    assert actor_and_critic in adapters
    assert not [words for words in adapters if "reference_offload" in words]


def test_sizes_that_are_set_may_be_left_to_the_run():
    def words(**changes):
        sizes = PossibleChanges(tiny.config(**changes), tiny.make_mesh()).leave_sizes()
        return [words for words, _ in sizes]

    assert words(critic__ppo_micro_batch_size_per_device=2, rollout__max_num_seqs=4) == [
        "config.model.gradient_checkpointing=auto and "
        "config.critic.ppo_micro_batch_size_per_device=auto and config.rollout.max_num_seqs=auto"
    ]
    assert words(model__gradient_checkpointing=None) == []


def test_the_limit_is_that_of_the_smallest_device(monkeypatch):
    def machine(*statistics):
        return lambda: [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in statistics]

    monkeypatch.setattr(jax, "local_devices", machine({"bytes_limit": 7}, {"bytes_limit": 5}))
    assert devices.read_memory_limit() == 5
    monkeypatch.setattr(jax, "local_devices", machine(None))
    assert devices.read_memory_limit() is None


@pytest.mark.parametrize("written", ["800", "max", None])
def test_the_memory_of_the_host_is_that_of_a_container_which_has_less(
    written, tmp_path, monkeypatch
):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(devices, "_CONTAINER_LIMITS", (str(tmp_path / "none"), str(limit)))
    if written:
        limit.write_text(f"{written}\n")
    host = 800 if written == "800" else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert devices.read_host_memory() == host


def test_cpu_devices_share_the_memory_of_the_host(monkeypatch):
    run = memory_check.PPOMemory(CONFIG, tiny.networks(CONFIG), tiny.make_mesh(1), FOLDERS)
    needed = run.measure().peak * jax.local_device_count()
    monkeypatch.setattr(memory_check, "read_host_memory", lambda: needed)
    memory_check.validate_memory(run)
    monkeypatch.setattr(memory_check, "read_host_memory", lambda: needed - jax.local_device_count())
    with pytest.raises(UserError, match="config.mesh: a device needs at least"):
        memory_check.validate_memory(run)
    # They keep what is offloaded, too.
    offloads = tiny.config(actor__optimizer_offload=True, critic__optimizer_offload=True)
    offloading = dataclasses.replace(run, config=offloads)
    with pytest.raises(UserError, match="config.mesh: a device needs at least"):
        memory_check.validate_memory(offloading)


def test_a_run_is_refused_before_it_loads_a_model(tmp_path, monkeypatch, capsys):
    write_arithmetic_llama(tmp_path)
    monkeypatch.setattr(memory_check, "read_memory_limit", lambda: 1000)
    options = {"model.path": f"{tmp_path}/llama", "data.train_files": "arithmetic:128"}
    config = loading.load_config("arithmetic", options)
    with pytest.raises(UserError, match="config.mesh: a device needs at least"):
        ppo_training.train_ppo(config, tmp_path / "work")
    assert "loaded" not in capsys.readouterr().out
