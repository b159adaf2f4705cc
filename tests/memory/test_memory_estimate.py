"""Every figure of an estimated plan, worked by hand for a tiny model: no term is twice too large.

Of a layer's 2,336 parameters 2,304 are in matrices: 2 x 256 of queries and output, 256 of keys and
values, 1,536 of the MLP. The embedding has 512, the last norm 16, the critic's head 16. So the
actor has 2,864 and the critic 2,880. The inputs and outputs of a layer's products are 4 x 16
+ 2 x 24 of heads + 3 x 32 of the MLP = 208 numbers per token.
"""

import functools

import pytest

import tiny
from jax_ppo.memory import step_plan
from jax_ppo.runtime.topologies import parse_topology

ACTOR, CRITIC = 4 * 2864, 4 * 2880  # bytes
LAYER, EMBEDDING, NORMS = 4 * 2336, 4 * 512, 4 * 32
SPLIT = dict(model__dtype="bfloat16", mesh__data=1, mesh__fsdp=4, mesh__model=2)
REMAT = dict(model__gradient_checkpointing=True)


@pytest.fixture(scope="module")
def plan(folder):
    """Return a function that plans a topology without its compiler, once for equal arguments."""

    @functools.cache
    def find(topology, **changes):
        config = tiny.config(model__path=folder, **changes)
        plan = step_plan.plan_step(config, parse_topology(topology), compiles=False)
        return {program.name: program for program in plan.programs}

    return find


# Two micro-batches of four rows of 18 tokens; the scores of a row are 4 heads x 18 x 18.
TOKENS, SCORES = 4 * 18, 4 * 4 * 18 * 18
WIDTH = 208 * 4  # bytes per token
# A layer's gradients, three halves of its numbers, and four arrays of scores.
BACKWARD = LAYER + 3 * TOKENS * WIDTH // 2 + 4 * SCORES * 4
# On a CPU, a copy of the whole gradient and two arrays of the largest parameter, the embedding.
COPY = ACTOR + 2 * EMBEDDING
# On a TPU, rows of 128 tokens for splash attention, which has no scores, and heads of 4 numbers
# that take 128: the cache of two heads takes 31 times more.
CACHE = 2 * 2 * 4 * 4 * (8 * 18 + 8 * 8)
ON_TPU = 4 * 128 * WIDTH
PREFILL = 8 * 8 * WIDTH + 8 * (4 * 8 * 8) * (4 + 4)  # 8 prompts of 8 tokens, their scores twice
LOGITS = 2 * 8 * 32 * 4  # of 8 slots, twice
# In bfloat16 on 4 x 2 devices, each has one row; of a layer 64 + 144 / 2 numbers per token, two
# heads, half of the vocabulary's 512 weights and of the layer's 2,336.
PART, PART_SCORES = 18 * (64 + 72) * 2, 2 * 18 * 18
CHUNK = 18 * 32 * 4 // 2  # logits of all tokens
HEAD = 256 * (2 + 4)  # gathered in float32 and rounded
GATHERED = 2 * 1168 * 2  # this layer's and the next one's, rounded
KEPT = 3 * 16 + (24 + 2 * 32 + 16) // 2  # products, and attention's output
PART_GRADIENTS = 4 * 2304 // 8 + NORMS
ROUNDED = (PART_GRADIENTS + 4 * (512 // 8 + 16)) // 2
TPU_PART, TPU_CHUNK = 128 * (64 + 72) * 2, 128 * 32 * 4 // 2


@pytest.mark.parametrize(
    ("topology", "changes", "program", "temporaries"),
    [
        ("cpu:1", {}, "sample", PREFILL + LOGITS),
        ("cpu:1", {}, "forward_policy", TOKENS * WIDTH + SCORES * (4 + 4)),
        # Without checkpointing a layer keeps its numbers, and half of the scores of two blocks.
        ("cpu:1", {}, "update_actor", TOKENS * WIDTH + SCORES * 4 + BACKWARD + COPY),
        ("cpu:1", REMAT, "update_actor", TOKENS * 16 * 4 + BACKWARD + COPY),
        ("cpu:1", REMAT | dict(model__gradient_checkpointing_policy="attention"), "update_actor",
            2 * TOKENS * 16 * 4 + BACKWARD + COPY),
        # Input, outputs of attention and MLP, queries and keys, gate and up.
        ("cpu:1", REMAT | dict(model__gradient_checkpointing_policy="dots"), "update_actor",
            TOKENS * (3 * 16 + 24 + 2 * 32) * 4 + SCORES * 4 + BACKWARD + COPY),
        # The reference's pass of the loss.
        ("cpu:1", REMAT | dict(actor__use_kl_loss=True, actor__kl_loss_type="full"), "update_actor",
            TOKENS * 16 * 4 + BACKWARD + COPY + TOKENS * WIDTH + SCORES * (4 + 4)),
        ("v5e:1x1", {}, "sample", PREFILL + LOGITS + 31 * CACHE),
        ("v5e:1x1", {}, "forward_policy", ON_TPU),
        # On accelerators, without checkpointing a layer also keeps the output of attention.
        ("v5e:1x1", {}, "update_critic",
            4 * 128 * (3 * 16 + 24 + 2 * 32 + 16) * 4 + 3 * ON_TPU // 2 + LAYER),
        ("h100:8", SPLIT, "forward_critic", PART + PART_SCORES * (4 + 2) + GATHERED),
        ("h100:8", SPLIT, "forward_policy",
            PART + PART_SCORES * (4 + 2) + GATHERED + CHUNK + HEAD),
        ("h100:8", SPLIT, "update_actor",
            18 * KEPT * 2 + PART_SCORES * 4
            + 3 * PART // 2 + 4 * PART_SCORES * 4 + PART_GRADIENTS + GATHERED
            + 3 * CHUNK // 2 + 256 * 4 + HEAD),
        # A TPU gathers rounded weights, of one layer, and rounds its part of the others first.
        ("v5e:2x4", SPLIT, "forward_policy",
            TPU_PART + 1168 * 2 + TPU_CHUNK + 256 * 2 + ROUNDED),
        ("v5e:2x4", SPLIT, "update_actor",
            128 * KEPT * 2 + 3 * TPU_PART // 2 + PART_GRADIENTS + 1168 * 2
            + 3 * TPU_CHUNK // 2 + 256 * 4 + 256 * 2 + ROUNDED),
    ],
)  # fmt: skip
def test_temporary_arrays_by_hand(plan, topology, changes, program, temporaries):
    assert plan(topology, **changes)[program].memory.temporaries == temporaries


def test_arrays_that_stay_by_hand(plan):
    programs = plan("v5e:1x1")
    packing = 2 * 2 * 4 * 128 * 4  # sample and position of each token of two micro-batches
    for program in programs.values():
        memory = program.memory
        assert memory.peak == sum(vars(memory).values())
        assert memory.parameters == ACTOR + CRITIC
        assert memory.optimizer == 2 * (ACTOR + CRITIC) + 2 * 4  # moments, and two counts
        assert memory.frozen == ACTOR  # the reference
        # Prompts and their lengths; a packing for the passes and one for each update, with their
        # numbers of micro-batches and the updates' members.
        assert memory.batch == 8 * 8 * 4 + 8 * 4 + 3 * packing + 3 * 4 + 2 * 8
    gradients = {name: program.memory.gradients for name, program in programs.items()}
    assert (gradients.pop("update_actor"), gradients.pop("update_critic")) == (ACTOR, CRITIC)
    copies = {name: program.memory.decoding_copy for name, program in programs.items()}
    assert (copies.pop("prepare_weights"), copies.pop("sample")) == (ACTOR, ACTOR)
    caches = {name: program.memory.cache for name, program in programs.items()}
    assert caches.pop("sample") == CACHE
    assert not any((*gradients.values(), *copies.values(), *caches.values()))


def test_frozen_attention_has_neither_moments_nor_gradients(plan):
    program = plan("v5e:1x1", critic__freeze="attention")["update_critic"]
    frozen = 2 * 256 + 256  # of queries and output, of keys and values
    memory, trained = program.memory, CRITIC - 4 * frozen
    assert (memory.parameters, memory.gradients) == (ACTOR + CRITIC, trained)
    assert memory.optimizer == 2 * (ACTOR + trained) + 2 * 4
    forward = 8 * (18 * 2 * 2304 + 171 * 4 * 16)
    assert program.flops == 3 * forward - 8 * 18 * 2 * frozen
    assert program.read_bytes == 2 * 2 * CRITIC + 2 * (trained + 2 * trained + 4)


def test_work_and_bytes_and_seconds_by_hand(plan):
    """For eight samples of 18 tokens, of which 10 are responses, at the rates of a v5e."""
    programs = plan("v5e:1x1")
    # Products of 2,304 weights per token, and of 4 x 16 numbers per pair of 171.
    critic = 8 * (18 * 2 * 2304 + 171 * 4 * 16)
    actor = critic + 8 * 10 * 2 * 32 * 16  # and logits
    moved = {"update_actor": ACTOR + 2 * ACTOR + 4, "update_critic": CRITIC + 2 * CRITIC + 4}
    expected = {
        "prepare_weights": (0, ACTOR + 2 * ACTOR),
        "sample": (actor, 10 * (ACTOR + CACHE)),
        "forward_policy": (2 * actor, 2 * (ACTOR + ACTOR)),  # the reference's, too
        "forward_critic": (critic, 2 * CRITIC),
        "estimate": (0, 0),
        # Two micro-batches read the weights twice each; the step reads and writes what it moves.
        "update_actor": (3 * actor, 2 * 2 * ACTOR + 2 * moved["update_actor"]),
        "update_critic": (3 * critic, 2 * 2 * CRITIC + 2 * moved["update_critic"]),
    }
    assert {name: (x.flops, x.read_bytes) for name, x in programs.items()} == expected
    # At this size reading takes longer than the products; of many rows at once it does not.
    assert all(programs[name].seconds == x[1] / 819e9 for name, x in expected.items())
    rows = ("data__train_batch_size", "actor__ppo_mini_batch_size")
    rows = dict.fromkeys((*rows, "actor__ppo_micro_batch_size_per_device"), 512)
    assert plan("v5e:1x1", **rows)["forward_critic"].seconds == 64 * critic / 197e12
    # On eight devices each has an eighth of the products.
    split = plan("h100:8", **SPLIT)
    assert [split[name].flops for name in expected] == [x[0] / 8 for x in expected.values()]
    # Three slots take three rounds; partial rollouts, whose queue has two batches, as many a step.
    slots, partial = dict(rollout__max_num_seqs=3), dict(rollout__max_staleness=2)
    sample = plan("v5e:1x1", **slots)["sample"]
    assert sample.memory.cache == CACHE * (3 * 18 + 3 * 8) // (8 * 18 + 8 * 8)
    continued = plan("v5e:1x1", algorithm__rollout_is="token", **slots, **partial)["sample"]
    assert continued.memory.cache != CACHE
    for program in (sample, continued):
        assert program.read_bytes == 10 * 3 * (ACTOR + program.memory.cache)
    full = dict(actor__use_kl_loss=True, actor__kl_loss_type="full")
    reads_reference = plan("v5e:1x1", **full)["update_actor"].read_bytes
    assert reads_reference == expected["update_actor"][1] + 2 * ACTOR


def test_offloaded_arrays_count_where_a_program_reads_them(plan):
    names = ("actor__optimizer_offload", "critic__optimizer_offload", "critic__param_offload")
    offloads = dict.fromkeys((*names, "algorithm__reference_offload"), True)
    read = {
        name: (program.memory.parameters, program.memory.optimizer, program.memory.frozen)
        for name, program in plan("v5e:1x1", **offloads).items()
    }
    assert read == {
        "prepare_weights": (ACTOR, 0, 0),
        "sample": (ACTOR, 0, 0),
        "forward_policy": (ACTOR, 0, ACTOR),
        "forward_critic": (ACTOR + CRITIC, 0, 0),
        "estimate": (ACTOR, 0, 0),
        "update_actor": (ACTOR, 2 * ACTOR + 4, 0),
        "update_critic": (ACTOR + CRITIC, 2 * CRITIC + 4, 0),
    }
