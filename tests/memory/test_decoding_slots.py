"""The number of decoding slots that an automatic `rollout.max_num_seqs` chooses."""

import dataclasses
import types

import jax
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.memory import decoding_slots
from jax_ppo.memory.memory_check import PPOMemory
from jax_ppo.ppo.step_parts import sampling_options
from jax_ppo.run import build

CONFIG = tiny.config(data__train_batch_size=64, rollout__n=2)


@pytest.fixture
def count_slots():
    """Return a function of the bytes left per device beside weights and optimizer states."""

    def count(left, config=CONFIG):
        mesh, nets = tiny.make_mesh(2), tiny.networks(config)
        sampling = sampling_options(
            config.rollout, config.rollout, config.data.max_response_length, (1,)
        )
        with jax.set_mesh(mesh):
            run = PPOMemory(config, nets, mesh)
            least = run.measure()
            resident = least.parameters + least.optimizer + least.frozen + least.decoding
            limit = None if left is None else (resident + left) / 0.85 + 1
            return decoding_slots.count_decoding_slots(run, mesh, sampling, limit)

    return count


def test_slots_fill_the_memory_that_is_left(count_slots):
    a = tiny.ARCHITECTURE
    # By hand: keys and values of P + T tokens in float32, and two copies of the logits.
    cache = 2 * a.num_layers * a.num_kv_heads * a.head_dim * (tiny.P + tiny.T) * 4
    logits = 2 * a.vocab_size * 4
    few, many = count_slots(40_000), count_slots(40_000 + 24 * (cache + logits))
    assert many - few == 24 and few % 8 == 0, (few, many)
    # At least one, and no more than the 128 samples that two devices share.
    assert count_slots(0) == 1 and count_slots(10**9) == 64


def test_a_number_is_taken_as_it_is_and_platforms_without_figures_have_a_fixed_one(count_slots):
    assert count_slots(None) == decoding_slots.FALLBACK_SLOTS
    config = dataclasses.replace(
        CONFIG, rollout=dataclasses.replace(CONFIG.rollout, max_num_seqs=64)
    )
    assert count_slots(None, config) == count_slots(10**6, config) == 64
    with pytest.raises(UserError, match=r"max_num_seqs=64: .* at most \d+$") as refused:
        count_slots(40_000, config)
    # It may take what an automatic number leaves to activations.
    most = int(str(refused.value).split()[-1])
    assert count_slots(40_000) < most < 64


def test_the_samples_of_a_server_are_not_in_this_memory(monkeypatch):
    """Regression: so many were requested at once that the process had no files left."""
    monkeypatch.setattr(build, "read_memory_limit", lambda: 0)
    config = tiny.config(rollout__engine="openai", rollout__url="http://x")
    nets, tokenizer = tiny.networks(config), types.SimpleNamespace(eos_token_id=1)
    run = types.SimpleNamespace(config=config, nets=nets, tokenizer=tokenizer)
    made = build._sampling_options(run, tiny.make_mesh(1), run, None, pytest.fail)
    assert [options.slots for options in made] == [decoding_slots.FALLBACK_SLOTS] * 2
