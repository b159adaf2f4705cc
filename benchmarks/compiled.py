"""What the compilers of accelerators make of a step, counted without one.

    python benchmarks/compiled.py --config=gsm8k --topology=h100:1 --config.model.path=FOLDER

Takes the options of `jax_ppo.plan`; of the model, config.json is enough. With `--layers=10` the
model has so many layers: less to compile, and the figures are ratios or per layer. Prints, per
program and device at full lengths: FLOPs that the maths needs and FLOPs compiled, loops times their
trips; bytes that a decode step moves over weights and the used part of the cache; kernels a layer;
copies and transposes of more than 1 MiB; collectives. Of a conditional's branches, each counts in
part. Writes compiled_NAME.json to `--output`, a folder. `--texts`, a folder, keeps the programs.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import re
import sys
import tempfile

import hlo_counts
import jax
import numpy as np

from jax_ppo import plan
from jax_ppo.config.schema import Config
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory import step_plan
from jax_ppo.memory.abstract_step import AbstractStep, build_abstract_step
from jax_ppo.memory.decoding_slots import cache_bytes_per_device
from jax_ppo.memory.step_flops import count_program_flops
from jax_ppo.ppo.programs import find_step_program, take_step_on_shapes
from jax_ppo.runtime import meshes, topologies
from jax_ppo.runtime.compiled_programs import output_shapes, run_on_shapes
from jax_ppo.runtime.devices import bytes_per_device

MIB = 2**20


def compile_step(
    config: Config, topology: topologies.Topology, folder: pathlib.Path | None
) -> tuple[AbstractStep, dict[str, str]]:
    """Return the step with its automatic sizes, and the text of each program.

    A folder keeps the texts, and is read instead of compiling if it has some.
    """
    platform = topology.device_type.platform
    config = dataclasses.replace(config, model=step_plan.resolve_dtype(config.model, platform))
    devices = topologies.described_devices(topology)
    mesh = meshes.make_mesh(config.mesh, devices, processes=topology.num_hosts)
    texts = {}

    def compile_program(name, lowered, arguments):
        compiled = lowered.compile()
        if name:
            texts[name] = compiled.as_text()
            if folder:
                (folder / f"{name}.hlo").write_text(texts[name])
            print(f"compiled {name}", file=sys.stderr, flush=True)
        return output_shapes(lowered, compiled)

    def build(sizes):
        sized = step_plan.replace_options(config, sizes)
        return build_abstract_step(sized, mesh, topology.available_bytes)

    with assume_platform("gpu" if platform == "cuda" else platform), jax.set_mesh(mesh):
        ranked = step_plan.rank_step_sizes(build)
        choice = step_plan.choose_sizes(ranked, topology.available_bytes)
        print(choice)
        step = build(choice.sizes.options)
        if folder and any(folder.glob("*.hlo")):
            return step, {path.stem: path.read_text() for path in folder.glob("*.hlo")}
        with run_on_shapes(compile_program):
            take_step_on_shapes(step, step.state, step.batches())
    return step, texts


class StepCounts:
    """Counts the programs of a step."""

    def __init__(self, step: AbstractStep) -> None:
        self.step = step
        self.architecture = step.nets.actor.architecture
        data = step.config.data
        self.prompt, self.response = data.max_prompt_length, data.max_response_length
        prompts = step.prompts.tokens.shape[0]
        self.needed = count_program_flops(
            step.step_options,
            step.nets,
            np.full(prompts, self.prompt),
            np.full(step.samples, self.prompt + self.response),
        )

    def count(self, name: str, text: str) -> dict:
        """Return the figures of a program."""
        program, kind = hlo_counts.Program(text), find_step_program(name).kind
        figures = {}
        if kind == "sampling":
            figures, parts = self._sampling(program)
        else:
            launches = list(program.launched(program.entry, self._trips(program, name)))
            parts = [(launches, 1.0)]
            moved = sum(times * program.moved_bytes(x, used=1) for x, times in launches)
            figures |= {"kernels": sum(times for _, times in launches), "moved_gib": moved / 2**30}
            in_layers = sum(times for x, times in launches if "Layer/" in x.path)
            passes = self._passes(name) * self.architecture.num_layers
            if passes:
                figures["kernels_a_layer"] = in_layers / passes
        totals = collections.Counter()
        for launches, repeats in parts:
            for x, times in launches:
                totals["flops"] += repeats * times * program.flops(x)
                copied, sent = program.copied_bytes(x), hlo_counts.collective_bytes(x)
                totals["large_copies"] += repeats * times * (copied > 0)
                totals["large_copy_mib"] += repeats * times * copied / MIB
                totals["collectives"] += repeats * times * (sent > 0)
                totals["collective_mib"] += repeats * times * sent / MIB
        needed = self.needed.get(name, 0.0) / self.step.mesh.size
        if needed:
            figures |= {"tflop_needed": needed / 1e12, "tflop_compiled": totals["flops"] / 1e12}
            figures["flops_over_needed"] = totals["flops"] / needed
        figures |= {name: totals[name] for name in totals if name != "flops"}
        return {name: float(f"{value:.4g}") for name, value in figures.items()}

    def _passes(self, name: str) -> float:
        """Return the micro-batches that a program runs, times the models that run forward."""
        found = find_step_program(name)
        if found.kind == "update":
            steps, parts, *_ = self.step.packed.mini_batches[found.role].packing.sample.shape
            return steps * parts * found.epochs(self.step.step_options)
        if found.kind == "forward pass":
            rows, _ = self.step.packed.forward
            return rows.sample.shape[0] * len(found.forwards(self.step.step_options))
        return 0

    def _trips(self, program: hlo_counts.Program, name: str):
        """Return the function that tells a loop's trips at full lengths."""
        found = find_step_program(name)
        vocabulary = self.architecture.vocab_size

        def trips(loop: hlo_counts.Instruction) -> float:
            fixed = program.fixed_trips(loop)
            if fixed is not None:
                return fixed
            packed = self.step.packed.forward[0]
            if found.kind == "update":
                packed = self.step.packed.mini_batches[found.role].packing
            micro_batches, rows, length = packed.sample.shape[-3:]
            (body,) = re.findall(r"body=%([\w.\-]+)", loop.rest)
            chunks = [x.dims for x in program.inner(body, "dot") if x.dims[-1:] == [vocabulary]]
            chunks += [x.dims for x in program.inner(body, "convolution") if vocabulary in x.dims]
            # An update's micro-batches are in the loop of its mini-batches.
            if chunks and loop.path.count("while/body") > (found.kind == "update"):
                # Chunks of the positions whose logits count: those of responses.
                size = np.prod(chunks[0], dtype=float) / vocabulary
                shards = meshes.row_shards(self.step.mesh)
                positions = rows * length / shards
                share = self.response / (self.prompt + self.response)
                return float(np.ceil(positions * share / size))
            return micro_batches

        return trips

    def _sampling(self, program: hlo_counts.Program) -> tuple[dict, list]:
        """Return the figures of a decode step, and what runs how often in the whole program."""
        step, layers = self.step, self.architecture.num_layers
        decodes, prefills = [], []
        for lines in program.computations.values():
            for loop in (x for x in lines if x.op == "while"):
                (body,) = re.findall(r"body=%([\w.\-]+)", loop.rest)
                launches = list(program.launched(body, lambda x: program.fixed_trips(x) or 1))
                inner = any(
                    x.op == "while" and program.fixed_trips(x) is None
                    for x in program.computations[body]
                )
                flops = sum(times * program.flops(x) for x, times in launches)
                if flops and not inner and program.fixed_trips(loop) is None:
                    (decodes if self._draws(program, launches) else prefills).append(launches)
        widest = max(decodes, key=lambda x: sum(program.flops(y) for y, _ in x))
        columns = self.prompt + self.response
        used = (self.prompt + self.response / 2) / columns
        cache = max(cache_bytes_per_device((x, ()), step.rollout_mesh) for x, _ in step.caches)
        least = bytes_per_device(step.decoding_weights) + used * cache
        made = {x.name for x, _ in widest}
        moved = sum(times * program.moved_bytes(x, used) for x, times in widest)
        far = sum(times * program.moved_bytes(x, used, made) for x, times in widest)
        in_layers = sum(times for x, times in widest if "Layer/" in x.path)
        kernels = sum(times for _, times in widest)
        figures = {
            "kernels_a_layer": in_layers / layers,
            "other_kernels_a_step": kernels - in_layers,
            "bytes_over_needed": moved / least,
            "bytes_beyond_l2_over_needed": far / least,
            "decode_loops": len(decodes),
        }
        fills = -(-step.queue // step.slots)
        parts = [(widest, fills * self.response)]
        groups = -(-step.queue // (step.samples // step.prompts.tokens.shape[0]))
        for launches in prefills:
            hidden = self.architecture.hidden_size
            lookups = [x for y, _ in launches for x in y.arrays if x[-1:] == [hidden]]
            rows = max(np.prod(sizes[:-1]) for sizes in lookups) / self.prompt
            parts.append((launches, np.ceil(groups / rows)))
        return figures, parts

    def _draws(self, program: hlo_counts.Program, launches: list) -> bool:
        vocabulary = self.architecture.vocab_size
        split = vocabulary // self.step.rollout_mesh.shape["model"]
        sizes = {vocabulary, split}
        return any(program.flops(x) and sizes & set(sum(x.arrays, [])) for x, _ in launches)


def with_layers(config: Config, layers: int, folder: str) -> Config:
    """Return the options with a model of fewer layers, whose config.json is in `folder`."""
    source = json.loads((pathlib.Path(config.model.path) / "config.json").read_text())
    (pathlib.Path(folder) / "config.json").write_text(
        json.dumps(source | {"num_hidden_layers": layers})
    )
    return step_plan.replace_options(config, {"model.path": folder})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--name", default="")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--texts", type=pathlib.Path)
    ours, others = parser.parse_known_args()
    config, topology, _ = plan.read_plan_arguments([sys.argv[0], *others])
    topologies.prepare_environment(topology)
    with tempfile.TemporaryDirectory() as folder:
        if ours.layers:
            config = with_layers(config, ours.layers, folder)
        step, texts = compile_step(config, topology, ours.texts)
    counts = StepCounts(step)
    print(f"{topology}, {counts.architecture.num_layers} layers, per device")
    if step.mesh.size > 1 and texts.pop("sample", None):
        print("sample: not counted on several devices, where prefills are not recognized")
    figures = {name: counts.count(name, text) for name, text in texts.items()}
    for name, of_program in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in of_program.items()))
    if ours.output:
        kind = topology.device_type
        given = [x for x in sorted(others) if "model.path" not in x]
        result = {
            "options": given,
            "layers": counts.architecture.num_layers,
            "versions": {"jax": jax.__version__, "platform": kind.platform},
            "programs": figures,
        }
        ours.output.mkdir(exist_ok=True)
        path = ours.output / f"compiled_{ours.name or topology.kind}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
