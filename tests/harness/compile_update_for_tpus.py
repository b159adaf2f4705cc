"""Print how eight TPUs exchange tables of a vocabulary in the actor's update, without a TPU.

    python tests/harness/compile_update_for_tpus.py WIDTH

The compiler for TPUs, libtpu, does not accept the flags with which tests run; they run this in a
separate process. Each line is the kind of an exchange and its bytes.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[2]))
import tiny
from hlo import read_collectives
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory.abstract_step import build_abstract_step
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.ppo.programs import take_step_on_shapes
from jax_ppo.runtime import compiled_programs, meshes, topologies

VOCABULARY = 16384


def compile_update(width: int) -> str:
    """Return the compiled update of an actor whose output embedding has this width."""
    topology = topologies.parse_topology("v5e:2x4")
    topologies.prepare_environment(topology)
    architecture = dataclasses.replace(
        tiny.ARCHITECTURE,
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=128,
        tied=False,
    )
    texts = []

    def record(name: str, lowered: jax.stages.Lowered, arguments: tuple[Any, ...]) -> Any:
        compiled = lowered.compile()
        if name == "update_actor":
            texts.append(compiled.as_text())
        return compiled_programs.output_shapes(lowered, compiled)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(to_hf_config(architecture)))
        config = tiny.config(
            model__path=folder,
            model__dtype="bfloat16",
            mesh__data=1,
            mesh__fsdp=8,
            data__train_batch_size=64,
            actor__ppo_mini_batch_size=64,
            actor__optim__param_dtype="bfloat16",
            actor__optim__gradient_dtype="bfloat16",
        )
        mesh = meshes.make_mesh(config.mesh, topologies.described_devices(topology))
        with assume_platform("tpu"), jax.set_mesh(mesh):
            step = build_abstract_step(config, mesh)
            with compiled_programs.run_on_shapes(record):
                take_step_on_shapes(step, step.state, step.batches())
    (text,) = texts
    return text


if __name__ == "__main__":
    width = int(sys.argv[1])
    for collective in read_collectives(compile_update(width)):
        if collective.bytes >= 2 * VOCABULARY * width // 8:
            print(collective.kind, collective.bytes)
