"""Which axes of a mesh exchange what in a pass over the layers and back: that and nothing else."""

import dataclasses

import pytest

import tiny
from hlo import read_collectives
from layers_on_mesh import ARCHITECTURE, EXPERTS, T, compiled_on_mesh
from tiny_actor import HYBRID

DENSE, MIXTURE = (dataclasses.replace(each, num_layers=2) for each in (ARCHITECTURE, EXPERTS))
# Weights, and keys and values or tokens, are gathered, gradients summed; embeddings change sides.
CONTEXT = {f"{kind} context" for kind in ("all-gather", "reduce-scatter", "all-reduce")}
EXPERT = {f"{kind} expert" for kind in ("all-gather", "reduce-scatter", "all-reduce")}
# Rows reach the first stage and leave the last, and so do their gradients and the embeddings'.
STAGE = {
    f"{kind} stage"
    for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter", "all-reduce")
}


@pytest.mark.parametrize(
    ("shape", "architecture", "expected"),
    [
        # Each device has its own heads of a Gated DeltaNet: only their sums are exchanged.
        ({"model": 2, "data": 4}, HYBRID, {f"all-reduce {x}" for x in ("model", "data")}),
        # tests/training/test_collectives.py has the update of such parts.
        pytest.param(
            {"context": 8}, DENSE, CONTEXT | {"all-to-all context"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"stage": 2, "context": 4},
            DENSE,
            # The last norm is outside of the stages.
            STAGE | CONTEXT | {"all-to-all context", "all-reduce stage + context"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"expert": 4, "context": 2},
            MIXTURE,
            # Kernels of experts are gathered over context alone, other weights over both.
            CONTEXT
            | {"all-gather expert", "reduce-scatter expert"}
            | {f"{kind} expert + context" for kind in ("all-gather", "all-to-all", "all-reduce")},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"expert": 4, "data": 2},
            MIXTURE,
            EXPERT | {"all-to-all expert", "all-reduce data", "all-reduce data + expert"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"stage": 2, "expert": 4},
            MIXTURE,
            STAGE | EXPERT | {"all-to-all expert", "all-reduce stage + expert"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["heads", "parts", "stages of parts", "experts of parts", "experts", "stages of experts"],
)
def test_each_axis_exchanges_what_it_must_and_no_more(shape, architecture, expected):
    mesh = tiny.make_mesh(8, **({"data": 1} | shape))
    compiled, _ = compiled_on_mesh(tuple(shape.items()), architecture)
    collectives = read_collectives(compiled.as_text())
    # XLA keeps sums over a single device.
    along = [(one, one.axes(mesh)) for one in collectives if one.axes(mesh)]
    assert {f"{one.kind} {' + '.join(axes)}" for one, axes in along} == expected
    between_stages = [one for one, axes in along if "stage" in axes and one.kind != "all-reduce"]
    assert all(T in dims for one in between_stages for dims in one.shapes), "layers move"
    # Each device selects the experts of its own tokens.
    gathered = [dims[-2:] for one in collectives if one.kind == "all-gather" for dims in one.shapes]
    assert (T, EXPERTS.num_experts) not in gathered, "probabilities of experts move"
