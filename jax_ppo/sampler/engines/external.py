"""Base of engines outside of JAX: weights as files, samples as lists, and a check of both."""

import dataclasses
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import RolloutOptions
from jax_ppo.errors import UserError
from jax_ppo.models import heads
from jax_ppo.models.hf.peft import save_adapters
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.hf.weight_files import merge_adapters
from jax_ppo.models.lora import enlarge_adapters, join_params, omit_adapters, split_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.sampler import sampling
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.types import Params, Prompts, Rollout

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
# Nats per token. Rounding to bfloat16 makes a few hundredths, other weights make several.
MAX_DIFFERENCE = 0.5
ROUNDING = 0.05
_PROBE_LENGTH, _PROBE_TOKENS = 12, 8


@dataclasses.dataclass(frozen=True)
class Response:
    """A sampled response."""

    tokens: Sequence[int]  # its tokens, with the one that ended it
    logprobs: Sequence[float]  # of each token, under softmax(logits / temperature)
    truncated: bool  # whether it was cut off at its maximum length


class AdaptersRefused(Exception):
    """An engine cannot take the adapters that it was to load."""


class ExternalEngine(RolloutEngine):
    """Base class of external engines; subclasses define `load_weights` and `sample`."""

    takes_adapters = False  # otherwise they are merged into the weights

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

        `actor` is the policy's model as trained, `params` the shapes that `update_weights` will
        get. Exports get the description and tokenizer of `folder`. `max_length` counts the tokens
        of the longest prompt with its response. Raise `UserError` if the run has several processes.
        """
        self.mesh, self.actor, self.options, self.folder = mesh, actor, options, folder
        self.max_length = max(max_length, _PROBE_LENGTH + _PROBE_TOKENS)
        V = actor.architecture.vocab_size
        self._probe_prompt = [(i + 1) * V // (_PROBE_LENGTH + 2) for i in range(_PROBE_LENGTH)]
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

    def stop(self) -> None:
        """Remove the weights."""
        if self._weights is not None:
            shutil.rmtree(self._weights, ignore_errors=True)

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
            elif os.access(SHARED_MEMORY, os.W_OK):  # it is there, and not read-only
                if shutil.disk_usage(SHARED_MEMORY).free > 3 * self._size:
                    parent = SHARED_MEMORY
            self._weights = Path(tempfile.mkdtemp(prefix="jax_ppo-", dir=parent)).absolute()
            self._weights.chmod(0o755)  # a server may run as another user
        return self._weights / "weights"

    @property
    def adapters(self) -> Path:
        """Return the folder of the newest adapters, if the engine takes them."""
        return self.weights.with_name("adapters")

    def update_weights(self, params: Params) -> None:
        """Export and load the weights; raise `UserError` if it then samples from others."""
        base, adapters = split_params(params, "/lora_[ab]$")
        self.version += 1
        with jax.transfer_guard("allow"):
            if self.takes_adapters:
                self._load_adapters(base, adapters)
            if not self.takes_adapters:
                self._export(base, adapters)
                self.load_weights()
            self._compare(params)

    def merge_adapters(self, reason: str) -> None:
        """Send adapters merged into the weights from now on, and say why."""
        self.takes_adapters = False
        log.warning("%s: adapters are merged into the weights: %s", self.setting, reason)

    def _load_adapters(self, base: Params, adapters: Params) -> None:
        """Let the engine load the adapters; at first also the base, which stays as it is."""
        architecture, lora, weights = self.actor.architecture, self.actor.lora, self.weights
        assert lora is not None

        def load(adapters: Params) -> None:
            save_adapters(adapters, architecture, lora, self.adapters, (str(weights), None))
            self.load_weights()

        try:
            if not weights.exists():
                self._export(base, {})
                # New adapters change nothing, so that nobody would see whether they are applied.
                visible = enlarge_adapters(adapters, lora)
                load(visible)
                if unused := self._unused_adapters(base, visible, lora.targets):
                    raise AdaptersRefused(f"its log-probs show no adapters on {', '.join(unused)}")
            load(adapters)
        except AdaptersRefused as refusal:
            self.merge_adapters(str(refusal))

    def _export(self, base: Params, adapters: Params) -> None:
        architecture, lora = self.actor.architecture, self.actor.lora
        if adapters and lora is not None:
            base = merge_adapters(base, adapters, architecture, lora)
        export_checkpoint(
            base, architecture, self.weights, dtype=self.dtype, source_folder=self.folder
        )

    def load_weights(self) -> None:
        """Let the engine take over the folder `weights`; may raise `AdaptersRefused`."""
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
        return placement.place(rollout, sharding.batch_rows(self.mesh, B))

    def _unused_adapters(
        self, base: Params, adapters: Params, targets: Sequence[str]
    ) -> Sequence[str]:
        """Return the projections whose adapters the engine seems to leave out."""
        probe = self._sample_probe()

        def difference(omitted: list[str]) -> float:
            kept = omit_adapters(adapters, omitted)
            return self._differences(join_params(base, kept), probe)[0]

        unused: list[str] = []
        least = with_all = difference(unused)
        for name in targets:
            if (without := difference([*unused, name])) < least:
                unused, least = [*unused, name], without
        if not with_all <= MAX_DIFFERENCE:
            return unused or targets
        # By rounding alone, leaving adapters out would not halve the difference.
        return unused if least < with_all / 2 else []

    def _compare(self, params: Params) -> None:
        """Raise `UserError` if the engine's log-probs of a short response are far from ours."""
        difference, undivided = self._differences(params, self._sample_probe())
        temperature = self.options.temperature
        # Near temperature 1, log-probs of undivided logits differ by less than MAX_DIFFERENCE.
        if not difference <= min(MAX_DIFFERENCE, max(ROUNDING, 2 * undivided)):
            raise UserError(
                f"{self.setting}: after update {self.version} its log-probs differ from the "
                f"trainer's by {difference:.2g} nats per token: it samples from other weights, or "
                f"does not divide logits by config.rollout.temperature={temperature} in the "
                "log-probs that it reports"
            )

    def _sample_probe(self) -> Response:
        probe = SamplingOptions(  # no EOS: the response has all its tokens
            max_response_length=_PROBE_TOKENS, temperature=self.options.temperature
        )
        keys = jax.random.split(jax.random.key(0), 1)
        (response,) = self.sample([self._probe_prompt], keys, probe)
        return response

    def _differences(self, params: Params, probe: Response) -> list[float]:
        """Return mean differences in nats to our log-probs: at `rollout.temperature`, and at 1."""
        # As many equal rows as the mesh splits rows into, of a length that it can split.
        row = np.zeros(64, np.int32)
        row[: _PROBE_LENGTH + _PROBE_TOKENS] = [*self._probe_prompt, *probe.tokens]
        rows = np.tile(row, (meshes.row_shards(self.mesh), 1))
        placed = placement.place(rows, sharding.rows(self.mesh))
        ours = _token_logprobs(self.actor, params, placed, (self.options.temperature, 1.0))
        ours = np.asarray(ours)[:, 0, _PROBE_LENGTH - 1 :][:, :_PROBE_TOKENS]
        return np.abs(ours - np.asarray(probe.logprobs)).mean(1).tolist()


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
