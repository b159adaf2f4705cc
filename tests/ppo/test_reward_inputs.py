"""Reward models of another family or tokenizer than the actor's, from tokens to scores."""

import json

import jax
import numpy as np
import pytest

import reward_models
import tiny
from jax_ppo.errors import UserError
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.ppo import forward_passes, reward_inputs
from jax_ppo.training.networks import Folders
from jax_ppo.training.roles import read_networks
from jax_ppo.training.state import StateBuilder
from jax_ppo.types import Example
from trained_tokenizer import train_tokenizer

CHAT = (
    {"role": "user", "content": "Tom has 3 apples."},
    {"role": "assistant", "content": "So?"},
    {"role": "user", "content": "He buys 2 more."},
)
PROMPTS = ["How many apples?", CHAT] * 4
ANSWERS = [
    "#### 4",
    "3+2=5\n5-1=4\n#### 4",
    "The answer is not 11 but 1. " * 3,
    "",
    " apples",
    "Ann finds 7 coins",
    "= =",
    "5",
]


@pytest.fixture(scope="module")
def actors(tmp_path_factory):
    return train_tokenizer(reward_models.TEXTS, 600, tmp_path_factory.mktemp("actor"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return reward_models.deberta(
        tmp_path_factory.mktemp("deberta"), conv_kernel_size=3, conv_act="gelu"
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return reward_models.decoder(tmp_path_factory.mktemp("decoder"))


def network(options, folder, decoder):
    # The actor's network is not used here.
    nets = read_networks(options, Folders(actor=decoder, reward=folder))
    return nets, nets.reward


def make_reward_inputs(options, net, folder, actors, mesh=None, **others):
    """Call `~reward_inputs.make_reward_inputs` with the sections of `~options` that it reads."""
    tokenizer, _ = reward_inputs.load_reward_tokenizer(options.reward, net, folder, actors, "")
    return reward_inputs.make_reward_inputs(
        options.reward,
        mesh or tiny.make_mesh(),
        net,
        (tokenizer, actors),
        packed=options.packing.enabled,
        **others,
    )


def score_answers(folder, decoder, actors, mesh=None, **changes):
    """Return scores of ANSWERS to PROMPTS, packed inputs, whether each was cut, and messages."""
    options = tiny.config(
        algorithm__adv_estimator="reinforce_plus_plus", reward__model_path=str(folder), **changes
    )
    mesh = mesh or tiny.make_mesh()
    nets, net = network(options, folder, decoder)
    with jax.set_mesh(mesh):
        shapes = StateBuilder(options, nets, mesh).shapes().models["reward"]
        where = jax.tree.map(lambda x: x.sharding, shapes)
        params = load_checkpoint(folder, net.architecture, where, np.float32, "reward")
        encode, messages = make_reward_inputs(options, net, folder, actors, mesh=mesh)
        ids = [np.array(actors.encode(answer), np.int32) for answer in ANSWERS]
        texts = actors.batch_decode(ids, skip_special_tokens=True)
        responses = reward_inputs.LocalResponses(
            indices=np.arange(len(ids)),
            examples=[Example(prompt, "x") for prompt in PROMPTS],
            tokens=ids,
            texts=texts,
            policy_texts=texts,
            thoughts=[""] * len(ids),
        )
        inputs, cut = encode(responses, [actors.encode("?")[-1]] * len(ids), len(ids))
        position = options.reward.score_position
        scores = forward_passes.reward_model_scores(net, params, *inputs, position)
        return np.asarray(scores), inputs, cut, messages


def test_an_encoders_matrices_are_split(encoder, decoder):
    options = tiny.config(
        algorithm__adv_estimator="reinforce_plus_plus", reward__model_path=str(encoder)
    )
    mesh = tiny.make_mesh(8, fsdp=2, model=2)
    nets, _ = network(options, encoder, decoder)
    params = StateBuilder(options, nets, mesh).shapes().models["reward"]

    def block(*path):
        leaf = params
        for name in path:
            leaf = leaf[name]
        return leaf.sharding.shard_shape(leaf.shape)

    assert block("layers", "attention", "q_proj", "kernel") == (2, 16, 16)
    assert block("layers", "mlp", "down_proj", "kernel") == (2, 24, 16)
    assert block("conv", "kernel") == (3, 16, 16) and block("pooler", "kernel") == (16, 16)
    assert block("words", "embedding")[1] == 16 and block("relative", "embedding") == (32, 16)


def text(prompt):
    return (
        prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    )


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"devices": 8, "fsdp": 2, "model": 2},
        pytest.param({"devices": 8, "data": 2, "fsdp": 4}, marks=pytest.mark.exhaustive),
    ],
)
def test_an_encoder_scores_pairs_on_any_mesh(encoder, decoder, actors, mesh):
    ours, (sequences, (packed, _)), cut, messages = score_answers(
        encoder, decoder, actors, tiny.make_mesh(**mesh)
    )
    pairs = zip(map(text, PROMPTS), ANSWERS, strict=True)
    inputs = reward_models.pair_inputs(reward_models.load_tokenizer(encoder), pairs)
    reward_models.assert_close(ours, reward_models.scores(encoder, inputs))
    assert messages == [
        "the reward model reads prompt and response as pair, in at most 128 of its tokens"
    ]
    assert not any(cut) and sequences.tokens.shape == (8, 128)
    if not mesh:  # several inputs in one row
        assert packed.sample.shape == (2, 4, 128)
        assert 0 < (packed.sample >= 0).any(axis=-1).sum() < 8


def test_text_is_read_as_text_whatever_the_template(decoder, actors, tmp_path):
    tokenizer = reward_models.load_tokenizer(decoder)
    tokenizer.chat_template = reward_models.CHAT
    folder = reward_models.decoder(tmp_path, tokenizer)
    options = tiny.config(reward__model_path=str(folder))
    net = network(options, folder, decoder)[0].reward
    for chats, form in ((False, "text"), (True, "chat")):
        inputs, _ = make_reward_inputs(options, net, folder, actors, prompts_are_chats=chats)
        assert inputs.reader.form == form
    # Regression: a traceback once the first responses had been sampled.
    chat = [{"role": role, "content": "Hi"} for role in ("system", "user")]
    refusal = "{{ raise_exception('no system') if messages[0].role == 'system' }}"
    inputs.reader._tokenizer.chat_template = refusal + reward_models.CHAT
    inputs.validate_chats([Example("Hi", "x"), Example(tuple(chat[1:]), "x")])
    with pytest.raises(UserError, match="roles system, user, assistant: no system; .*=text needs"):
        inputs.validate_chats([Example(tuple(chat), "x")])


@pytest.mark.parametrize("position", ["auto", "last_token"])
def test_a_pad_token_that_is_the_eos_is_skipped_as_in_transformers(
    decoder, actors, tmp_path, position
):
    """Regression: the score was read at the EOS, where transformers does not read it."""
    tokenizer = reward_models.load_tokenizer(decoder)
    eos = tokenizer.eos_token_id
    folder = reward_models.decoder(tmp_path, tokenizer, pad_token_id=eos, eos_token_id=eos)
    ours, _, _, messages = score_answers(folder, decoder, actors, reward__score_position=position)
    inputs = [
        {"input_ids": [*tokenizer.encode(text(prompt) + answer), eos]}
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    reward_models.assert_close(ours, reward_models.scores(folder, inputs, position))
    lines = [line for line in messages if "is read at the token before the final EOS" in line]
    assert len(lines) == (position == "auto")


def test_where_a_score_is_read_is_said_only_if_an_input_ends_in_the_pad_token(
    decoder, actors, tmp_path
):
    """A chat may end in other tokens, such as a line break."""
    tokenizer = reward_models.load_tokenizer(decoder)
    eos = tokenizer.eos_token_id
    for end, is_said in ((tokenizer.eos_token, True), (".", False)):
        tokenizer.chat_template = reward_models.CHAT + end
        folder = reward_models.decoder(
            tmp_path / str(is_said), tokenizer, pad_token_id=eos, eos_token_id=eos
        )
        messages = score_answers(folder, decoder, actors, reward__model_input="chat")[-1]
        assert any("before the final EOS" in line for line in messages) == is_said


def test_an_encoder_has_one_score_position(encoder, decoder, actors):
    with pytest.raises(UserError, match="config.reward.score_position='last_token': is not read"):
        score_answers(encoder, decoder, actors, reward__score_position="last_token")


@pytest.mark.parametrize("form", ["auto", "chat", "pair"])
def test_a_decoder_reads_text_or_its_own_chat(decoder, actors, tmp_path, form):
    template = form != "auto"
    tokenizer = reward_models.load_tokenizer(decoder)
    tokenizer.chat_template = reward_models.CHAT if template else None
    folder = reward_models.decoder(tmp_path, tokenizer)
    ours, _, _, messages = score_answers(folder, decoder, actors, reward__model_input=form)
    tokenizer = reward_models.load_tokenizer(folder)

    def ids(prompt, answer):
        if form == "pair":
            return tokenizer(text(prompt), answer)["input_ids"]
        if not template:
            return [*tokenizer.encode(text(prompt) + answer), tokenizer.eos_token_id]
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        chat.append({"role": "assistant", "content": answer})
        return tokenizer.encode(
            tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False
        )

    inputs = [{"input_ids": ids(*texts)} for texts in zip(PROMPTS, ANSWERS, strict=True)]
    reward_models.assert_close(ours, reward_models.scores(folder, inputs))
    assert f"as {'text' if form == 'auto' else form}, in" in messages[0]
    if form == "chat":  # the default for this tokenizer as well
        again, _, _, messages = score_answers(folder, decoder, actors)
        np.testing.assert_array_equal(again, ours)


def test_what_is_cut_is_counted_and_said_once(encoder, decoder, actors, caplog):
    ours, _, cut, messages = score_answers(encoder, decoder, actors, reward__max_length=40)
    assert "at most 40" in messages[0]
    ids = reward_models.load_tokenizer(encoder)(list(map(text, PROMPTS)), ANSWERS)["input_ids"]
    too_long = [len(row) > 40 for row in ids]
    assert cut == too_long and 0 < sum(too_long) < 8
    assert "longer than the 40 tokens that it reads (config.reward.max_length)" in caplog.text
    whole, *_ = score_answers(encoder, decoder, actors)
    np.testing.assert_array_equal(np.abs(ours - whole) > 1e-4, too_long)


def test_micro_batches_and_packing_change_nothing(encoder, decoder, actors):
    whole, *_ = score_answers(encoder, decoder, actors)
    for changes in ({"reward__micro_batch_size_per_device": 2}, {"packing__enabled": False}):
        ours, (_, (packed, count)), *_ = score_answers(encoder, decoder, actors, **changes)
        np.testing.assert_allclose(ours, whole, rtol=1e-4, atol=1e-5)
        assert packed.sample.shape[1] == changes.get("reward__micro_batch_size_per_device", 4)
    assert int(count) == 2  # one row each


def reward_inputs_of(folder, decoder, actors, mesh=None, **changes):
    options = tiny.config(
        algorithm__adv_estimator="reinforce_plus_plus", reward__model_path=str(folder), **changes
    )
    net = network(options, folder, decoder)[1]
    return make_reward_inputs(options, net, folder, actors, mesh=mesh)[0]


def test_a_critic_as_reward_model_is_told(decoder, tmp_path):
    own = reward_models.load_tokenizer(decoder)
    options = tiny.config(reward__model_path="critic")
    net = network(tiny.config(), decoder, decoder)[1]
    config = json.loads((decoder / "config.json").read_text())
    for told, task in enumerate(("Sequence", "Token")):
        text = json.dumps(config | {"architectures": [f"LlamaFor{task}Classification"]})
        (tmp_path / "config.json").write_text(text)
        _, notes = reward_inputs.load_reward_tokenizer(options.reward, net, tmp_path, own, "")
        assert ["as critics are exported" in note for note in notes] == [True] * told


def test_with_the_actors_tokens_nothing_goes_through_the_host(decoder, tmp_path):
    own = reward_models.load_tokenizer(decoder)
    assert reward_inputs_of(decoder, decoder, own) is None
    assert reward_inputs_of(decoder, decoder, own, reward__model_input="text").reader.form == "text"
    without = tmp_path / "without"  # a tokenizer, which is then the actor's
    without.mkdir()
    for name in ("config.json", "model.safetensors"):
        (without / name).write_bytes((decoder / name).read_bytes())
    assert reward_inputs_of(without, decoder, own) is None
    with pytest.raises(UserError, match="max_length=64: is not read: this .* takes the sampled"):
        reward_inputs_of(decoder, decoder, own, reward__max_length=64)


def test_what_does_not_fit_is_refused_before_weights_load(encoder, decoder, actors, tmp_path):
    with pytest.raises(UserError, match="model_input='chat': .* its tokenizer has no chat"):
        reward_inputs_of(encoder, decoder, actors, reward__model_input="chat")
    with pytest.raises(UserError, match="max_length=300: the reward model takes 256 tokens at"):
        reward_inputs_of(decoder, decoder, actors, reward__max_length=300)
    # Relative distances are unlimited.
    inputs = reward_inputs_of(encoder, decoder, actors, reward__max_length=300)
    assert inputs.reader.max_length == 300
    with pytest.raises(UserError, match="mesh.model=8: must divide the model's attention heads .4"):
        reward_inputs_of(encoder, decoder, actors, tiny.make_mesh(8, model=8))
    small = reward_models.deberta(tmp_path / "small", vocab_size=30)
    with pytest.raises(UserError, match=r"the tokenizer there has \d+ tokens, .* embedding 30"):
        reward_inputs_of(small, decoder, actors)
    for file in [*small.glob("*token*"), *small.glob("spm*")]:
        file.unlink()
    with pytest.raises(UserError, match="small has no tokenizer .*copy the encoder's into it"):
        reward_inputs_of(small, decoder, actors)
