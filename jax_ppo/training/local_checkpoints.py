"""Local checkpoints: each process keeps its own shards of the newest states on a local disk.

They cost no network and no shared disk, so they can be written more often than the checkpoints of
the work directory. A run whose processes end while its machines stay resumes from them. A machine
that is lost takes its shards with it; then, and on another mesh or number of processes, the run
resumes from its work directory.

A folder DIRECTORY/RUN/process_N/STEP holds a file per shard, a manifest and a checksum of each
file. It gets its name once it is complete.
"""

import concurrent.futures
import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.errors import UserError
from jax_ppo.runtime import distributed
from jax_ppo.storage import disk_space, remote
from jax_ppo.training import checksums

MANIFEST = "manifest.json"


class LocalCheckpoints:
    """The local checkpoints of one run.

    Every process of the run creates one and calls its methods in the same order. `step` is the step
    of the newest checkpoint that every process had when this object was created, or `None`.
    """

    def __init__(
        self,
        directory: str,
        run_id: str,
        mesh: Mesh,
        shared_step: int | None,
        report: Callable[[str], None],
    ) -> None:
        """Find the newest checkpoint that all processes have, and remove all others.

        `run_id` distinguishes the runs that use the directory, which is on a disk of this machine.
        Checkpoints of another mesh are not used, nor those until `shared_step`, the step of the
        newest in the work directory. `report` is called with a line if there are checkpoints, but
        none that all processes can use. Raise `UserError` if the directory cannot be used.
        """
        if remote.is_address(directory):
            raise UserError(f"config.trainer.local_dir={directory!r}: expected a local folder")
        run_folder = Path(directory).expanduser().absolute() / run_id
        self._folder = run_folder / f"process_{jax.process_index()}"
        self._layout = {
            "processes": jax.process_count(),
            "mesh": dict(mesh.shape),
            "devices": [device.id for device in mesh.devices.flat],
        }
        self._writer = concurrent.futures.ThreadPoolExecutor(1)
        self._writing: concurrent.futures.Future[None] | None = None
        self._saved_step: int | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.step = self._agree_on_step(shared_step, report)
            self._remove_all_but(self.step)
        except OSError as error:
            raise _directory_error(error) from error

    def save(self, step: int, arrays: dict[str, Any], meta: dict) -> None:
        """Copy this process's shards and return; they are written in the background.

        The trees of `arrays` may hold typed PRNG keys; `meta` is what JSON can hold. Raise
        `UserError` if the disk has too little space, or the previous save failed.
        """
        self.wait()
        # Only once every process has the previous checkpoint may any remove the one before.
        distributed.barrier("local checkpoint")
        self._remove_all_but(self._saved_step or self.step)
        shards: list[np.ndarray] = []
        trees = {
            name: {
                leaf_name(path): _take_shards(array, shards)
                for path, array in jax.tree_util.tree_leaves_with_path(tree)
            }
            for name, tree in arrays.items()
        }
        num_bytes = sum(shard.nbytes for shard in shards)
        disk_space.require_free_space(
            self._folder, num_bytes, f"the local checkpoint of step {step}"
        )
        manifest = json.dumps({"layout": self._layout, "meta": meta, "trees": trees})
        self._writing = self._writer.submit(self._write, step, manifest, shards)
        self._saved_step = step

    @property
    def path(self) -> Path:
        """Return the folder of this process's part of the checkpoint of `step`."""
        return self._folder / str(self.step)

    def saved_shapes(self, name: str) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of a tree of `step`, of PRNG keys their data's; `None` without it."""
        trees = self._read_manifest(self.step)["trees"]
        if name not in trees:
            return None
        return {leaf: tuple(entry["shape"]) for leaf, entry in trees[name].items()}

    def restore(self, abstract: dict[str, Any]) -> tuple[dict[str, Any], dict]:
        """Return the arrays of the checkpoint of `step`, and its `meta`.

        `abstract` has trees of `jax.ShapeDtypeStruct` with shardings, with the checkpoint's names
        and shapes; raise `UserError` if they have another layout than the checkpoint's.
        """
        manifest = self._read_manifest(self.step)

        def read(entry: dict[str, Any], x: jax.ShapeDtypeStruct) -> jax.Array:
            if "key_impl" not in entry:
                return self._read_array(entry, x)
            data = jax.eval_shape(jax.random.key_data, x)
            data = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
            return jax.random.wrap_key_data(self._read_array(entry, data), impl=entry["key_impl"])

        arrays = {
            name: jax.tree_util.tree_map_with_path(
                lambda path, x, name=name: read(manifest["trees"][name][leaf_name(path)], x), tree
            )
            for name, tree in abstract.items()
        }
        return arrays, manifest["meta"]

    def wait(self) -> None:
        """Wait until everything saved is on disk; raise `UserError` if it is not."""
        if self._writing is not None:
            try:
                self._writing.result()
            except OSError as error:
                raise _directory_error(error) from error
            self._writing = None

    def close(self, shared_step: int | None) -> None:
        """Wait for a save in progress; remove all if the work directory has a newer checkpoint."""
        self.wait()
        self._writer.shutdown()
        newest = self._saved_step or self.step or 0
        if shared_step is not None and shared_step >= newest:
            shutil.rmtree(self._folder, ignore_errors=True)
            # The processes of one machine share the run's folder: the last one removes it, and for
            # the others it is not empty, or already removed.
            with contextlib.suppress(OSError):
                self._folder.parent.rmdir()

    def _read_array(self, entry: dict[str, Any], x: jax.ShapeDtypeStruct) -> jax.Array:
        """Read an array of the checkpoint of `step`, in the layout and memory of its sharding."""

        def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
            bounds = _bounds(index or (), x.shape)
            if str(bounds) not in entry["shards"]:
                raise UserError(
                    f"the local checkpoint of step {self.step} is of another layout; without "
                    f"{self._folder.parent} the run resumes from its work directory"
                )
            shape = [stop - start for start, stop in bounds]
            file = self.path / f"{entry['shards'][str(bounds)]}.bin"
            stored = np.fromfile(file, np.uint8).view(jnp.dtype(entry["dtype"]))
            return stored.reshape(shape).astype(x.dtype)

        return jax.make_array_from_callback(x.shape, x.sharding, read_shard)

    def _agree_on_step(self, shared_step: int | None, report: Callable[[str], None]) -> int | None:
        steps = [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        if shared_step is not None:
            steps = [step for step in steps if step > shared_step]
        # Of this layout, and with files as they were written.
        usable = [
            step
            for step in steps
            if checksums.find_damage(self._folder / str(step)) is None
            and self._read_manifest(step)["layout"] == self._layout
        ]
        answers = distributed.allgather_json({"saved": steps, "usable": usable})
        common = set.intersection(*(set(answer["usable"]) for answer in answers))
        if not common and any(answer["saved"] for answer in answers):
            report(
                "local checkpoints are not used: no step is whole on every process, with the "
                "run's mesh"
            )
        return max(common, default=None)

    def _read_manifest(self, step: int | None) -> dict[str, Any]:
        return json.loads((self._folder / str(step) / MANIFEST).read_text())

    def _remove_all_but(self, step: int | None) -> None:
        for path in self._folder.iterdir():
            if path.name != str(step):
                shutil.rmtree(path)

    def _write(self, step: int, manifest: str, shards: list[np.ndarray]) -> None:
        # Not flushed to the disk: after a loss of power the checksums show what is missing.
        temporary = self._folder / f"{step}.tmp"
        temporary.mkdir()
        for number, shard in enumerate(shards):
            shard.tofile(temporary / f"{number}.bin")
        (temporary / MANIFEST).write_text(manifest)
        checksums.write_checksums(temporary)
        os.rename(temporary, self._folder / str(step))


def leaf_name(path: jax.tree_util.KeyPath) -> str:
    """Return the name of an array in a checkpoint, from its place in its tree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _take_shards(array: jax.Array, shards: list[np.ndarray]) -> dict[str, Any]:
    """Append copies of this process's shards, each once, and return how to find them."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _take_shards(jax.random.key_data(array), shards)
        return data | {"key_impl": str(jax.random.key_impl(array))}
    numbers: dict[str, int] = {}
    for shard in array.addressable_shards:
        bounds = str(_bounds(shard.index, array.shape))
        if bounds not in numbers:
            numbers[bounds] = len(shards)
            # A copy: the array's buffer may be donated before it is written.
            shards.append(np.array(shard.data))
    return {"shape": array.shape, "dtype": array.dtype.name, "shards": numbers}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first and the last position plus one of a shard on each axis."""
    return [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]


def _directory_error(error: OSError) -> UserError:
    return UserError(f"config.trainer.local_dir: {error}")
