"""What engines outside of JAX share: weights as files, samples as lists, and a check of both."""

import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import RolloutOptions
from jax_ppo.errors import UserError
from jax_ppo.models import heads
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.hf.weight_files import EXPORT_DTYPES
from jax_ppo.models.lora import split_adapters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.sampler import sampling
from jax_ppo.sampler.engine import SamplingOptions, rollout_shapes
from jax_ppo.types import Params, Prompts, Rollout

SHARED_MEMORY = Path("/dev/shm")
# Nats per token. Rounding to bfloat16 makes a few hundredths, other weights make several.
MAX_DIFFERENCE = 0.5
ROUNDING = 0.05
_PROBE_LENGTH, _PROBE_TOKENS = 12, 8


@dataclasses.dataclass(frozen=True)
class Response:
    """A sampled response.

    Attributes:
      tokens: its tokens, with the one that ended it.
      logprobs: of each token, under softmax(logits / temperature).
      truncated: whether it was cut off at its maximum length.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    truncated: bool


class ExternalEngine:
    """The part of a `RolloutEngine` that does not depend on what samples.

    Subclasses define `load_weights`, `sample` and, if they hold resources, `start` and `stop`.
    """

    def __init__(
        self,
        mesh: Mesh,
        actor: Transformer,
        params: Params,
        options: RolloutOptions,
        folder: Path,
        max_length: int,
    ) -> None:
        """Take what the engine needs; nothing is started.

        `actor` is the policy's model as it is trained, `params` the shapes that `update_weights`
        will get. Exports get the description and the tokenizer of the checkpoint in `folder`.
        `max_length` counts the tokens of the longest prompt with its response.

        Raises:
          UserError: the run has several processes.
        """
        self.mesh, self.actor, self.options, self.folder = mesh, actor, options, folder
        self.max_length = max(max_length, _PROBE_LENGTH + _PROBE_TOKENS)
        self.setting = f"config.rollout.engine={options.engine!r}"
        self.dtype = jnp.dtype(actor.dtype).name
        self.version = 0
        self._size = sum(x.size * jnp.dtype(self.dtype).itemsize for x in jax.tree.leaves(params))
        self._weights: Path | None = None
        if jax.process_count() > 1:
            raise UserError(
                f"{self.setting}: runs in one process, not in {jax.process_count()}; use the "
                "built-in engine, or all devices of one host"
            )
        if self.dtype not in EXPORT_DTYPES:
            raise UserError(
                f"{self.setting}: weights are sent as {' or '.join(EXPORT_DTYPES)}, not as "
                f"{self.dtype}; set config.model.dtype"
            )

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Remove the weights."""
        if self._weights is not None:
            shutil.rmtree(self._weights, ignore_errors=True)

    def release_weights(self) -> None:
        """Do nothing: the training's devices hold no copy."""

    @property
    def weights(self) -> Path:
        """Return the folder of the newest weights: in shared memory if they fit twice."""
        if self._weights is None:
            parent = None
            if self.options.weights_dir:
                try:
                    parent = Path(self.options.weights_dir).expanduser()
                    parent.mkdir(parents=True, exist_ok=True)
                except (OSError, RuntimeError) as error:
                    raise UserError(
                        f"config.rollout.weights_dir={self.options.weights_dir!r}: {error}"
                    ) from None
            elif SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 3 * self._size:
                parent = SHARED_MEMORY
            self._weights = Path(tempfile.mkdtemp(prefix="jax_ppo-", dir=parent)).absolute()
            self._weights.chmod(0o755)  # a server may run as another user
        return self._weights / "weights"

    def update_weights(self, params: Params) -> None:
        """Export the weights, load them, and compare log-probs. See `RolloutEngine`.

        Raises:
          UserError: the engine samples from other weights than these.
        """
        base, adapters = split_adapters(params)
        export_checkpoint(
            base,
            self.actor.architecture,
            self.weights,
            dtype=self.dtype,
            source_folder=self.folder,
            adapters=adapters or None,
            lora=self.actor.lora,
        )
        self.version += 1
        self.load_weights()
        self._compare(params)

    def load_weights(self) -> None:
        """Let the engine take over the weights in the folder `weights`."""
        raise NotImplementedError

    def sample(
        self, prompts: Sequence[list[int]], keys: jax.Array, options: SamplingOptions
    ) -> list[Response]:
        """Return one response to each prompt, with one key each; `options.n` has no effect."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Prompts,
        key: jax.Array,
        options: SamplingOptions,
        first_sample_index: int | None = None,
    ) -> Rollout:
        """Return the responses as a rollout on the mesh. See `RolloutEngine.generate`."""
        tokens, lengths = (
            np.repeat(jax.device_get(x), options.n, axis=0)
            for x in (prompts.tokens, prompts.lengths)
        )
        B, T = len(lengths), options.max_response_length
        with jax.transfer_guard("allow"):
            keys = sampling.sample_keys(key, jnp.arange(B) + (first_sample_index or 0))
            rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
            responses = self.sample(rows, keys, options)
        sampled, logprobs = np.zeros((B, T), np.int32), np.zeros((B, T), np.float32)
        for row, response in enumerate(responses):
            sampled[row, : len(response.tokens)] = response.tokens
            logprobs[row, : len(response.tokens)] = response.logprobs
        response_lengths = np.array([len(response.tokens) for response in responses], np.int32)
        rollout = Rollout(
            prompts=Prompts(tokens=tokens, lengths=lengths),
            responses=sampled,
            lengths=response_lengths,
            logprobs=logprobs,
            truncated=np.array([response.truncated for response in responses]),
            action_mask=np.arange(T) < response_lengths[:, None],
        )
        placed: Rollout = placement.place(rollout, sharding.batch_rows(self.mesh, B))
        return placed

    def precompile(
        self, params: Params, prompts: Prompts, key: jax.Array, options: SamplingOptions
    ) -> Generator[str, None, Rollout]:
        """Compile nothing. See `RolloutEngine.precompile`."""
        yield from ()
        samples = prompts.lengths.shape[0] * options.n
        return rollout_shapes(prompts, options, sharding.batch_rows(self.mesh, samples))

    def _compare(self, params: Params) -> None:
        """Raise `UserError` if the engine's log-probs of a short response are far from ours."""
        V = self.actor.architecture.vocab_size
        prompt = [(i + 1) * V // (_PROBE_LENGTH + 2) for i in range(_PROBE_LENGTH)]
        temperature = self.options.temperature
        # No EOS: the response has all its tokens.
        probe = SamplingOptions(max_response_length=_PROBE_TOKENS, temperature=temperature)
        with jax.transfer_guard("allow"):
            (response,) = self.sample([prompt], jax.random.split(jax.random.key(0), 1), probe)
            # As many equal rows as the mesh splits rows into, of a length that it can split.
            row = np.zeros(64, np.int32)
            row[: len(prompt) + _PROBE_TOKENS] = [*prompt, *response.tokens]
            rows = placement.place(
                np.tile(row, (meshes.row_shards(self.mesh), 1)), sharding.rows(self.mesh)
            )
            ours = np.asarray(_token_logprobs(self.actor, params, rows, (temperature, 1.0)))
        ours = ours[:, 0, len(prompt) - 1 :][:, :_PROBE_TOKENS]
        # With the temperature, and without it, which differs less than MAX_DIFFERENCE near 1.
        difference, undivided = np.abs(ours - np.asarray(response.logprobs)).mean(1).tolist()
        if not difference <= min(MAX_DIFFERENCE, max(ROUNDING, 2 * undivided)):
            raise UserError(
                f"{self.setting}: after update {self.version} its log-probs differ from the "
                f"trainer's by {difference:.2g} nats per token: it samples from other weights, or "
                f"does not divide logits by config.rollout.temperature={temperature} in the "
                "log-probs that it reports"
            )


@functools.partial(jax.jit, static_argnames=("actor", "temperatures"))
def _token_logprobs(
    actor: Transformer, params: Params, tokens_BxS: jax.Array, temperatures: tuple[float, ...]
) -> Any:
    """Return the log-prob of each token after the first at each temperature, [N, B, S - 1]."""
    positions = jnp.broadcast_to(jnp.arange(tokens_BxS.shape[1]), tokens_BxS.shape)
    output = actor.apply({"params": params}, tokens_BxS, positions, jnp.ones_like(tokens_BxS))
    logits = heads.compute_logits(actor.architecture, params, output.hidden)[:, :-1]
    targets = tokens_BxS[:, 1:, None]
    return jnp.stack(
        [
            jnp.take_along_axis(jax.nn.log_softmax(logits / temperature), targets, axis=2)[..., 0]
            for temperature in temperatures
        ]
    )
