"""The engines `vllm` and `openai`: send token ids over HTTP to a server that samples."""

import concurrent.futures
import dataclasses
import json
import os
import shlex
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jax_ppo.errors import UserError, counted, shorten
from jax_ppo.http_client import RequestFault
from jax_ppo.models.hf.peft import peft_obstacle
from jax_ppo.models.lora import Lora
from jax_ppo.sampler import text_search
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.engines.external import AdaptersRefused, ExternalEngine, Response
from jax_ppo.sampler.engines.protocols import Reply
from jax_ppo.sampler.engines.rollout_server import WORKER, WORKER_PROGRAM, RolloutServer

ATTEMPTS = 3  # consecutive ones without a new response
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank can be (0.32.0)


@dataclasses.dataclass
class _Loaded:
    """The weights of a run that a server with adapters has loaded."""

    has_base: bool = False  # the weights to which adapters are added
    adapters: str = ""  # the name of those that it has loaded last
    names: tuple[str, ...] = ()  # of all that it may still hold
    loads: int = 0  # how often it was to load adapters


class ServerEngine(ExternalEngine):
    """Samples from a server at `rollout.url`, or from a vLLM that it starts.

    A response that another version of the weights sampled is requested again, with its seed.
    """

    def start(self) -> None:
        """Require a server with all routes, or an interpreter that has vLLM."""
        self._run = os.urandom(4).hex()  # another run's versions are not ours
        self._loaded = _Loaded()
        self._server = RolloutServer(self.options)
        routes = [] if self._server.is_ours else self._server.connect()
        if self.actor.lora is not None:
            self.takes_adapters = True
            if obstacle := self._adapter_obstacle(self.actor.lora, routes):
                self.merge_adapters(obstacle)

    def merge_adapters(self, reason: str) -> None:
        """Send adapters merged into the weights from now on, and say why."""
        super().merge_adapters(reason)
        if self._server.is_running:
            self._revive()  # without what a vLLM of ours holds for adapters

    def _adapter_obstacle(self, lora: Lora, routes: Collection[str]) -> str:
        """Return why the server is not sent adapters, or "" if it is."""
        if obstacle := peft_obstacle(self.actor.architecture, lora):
            return obstacle
        if not self._server.is_ours:
            return self._server.protocol.adapter_obstacle(routes)
        if lora.rank > VLLM_RANKS[-1]:
            return f"config.model.lora.rank={lora.rank} is above vLLM's limit, {VLLM_RANKS[-1]}"
        if "--no-enable-lora" in self.options.vllm.arguments:
            return f"config.rollout.vllm.arguments={self.options.vllm.arguments!r}"
        return ""

    def stop(self) -> None:
        """End a server that this engine has started; let another forget our adapters."""
        names = self._loaded.names
        self._server.stop([self._server.protocol.unload_adapters(name) for name in names])
        super().stop()

    def load_weights(self) -> None:
        """Start the server with the weights, or let it load them."""
        for attempt in range(ATTEMPTS):
            try:
                self._publish()
                return
            except RequestFault as fault:
                if fault.is_final or attempt == ATTEMPTS - 1:
                    raise UserError(
                        f"{self._server.setting}: cannot load weights: {fault}"
                    ) from None
            self._revive()

    def sample(
        self, prompts: Sequence[list[int]], keys: jax.Array, options: SamplingOptions
    ) -> list[Response]:
        """Request one response per prompt; re-request missing ones after a fault.

        Raise `UserError` if a request is refused, or several rounds bring no new response.
        """
        # All servers take seeds of 31 bits.
        seeds = (np.asarray(jax.vmap(jax.random.bits)(keys)) >> 1).tolist()
        responses: dict[int, Response] = {}
        attempts = 0
        while missing := [i for i in range(len(prompts)) if i not in responses]:
            requests = {i: (prompts[i], seeds[i], options) for i in missing}
            before = len(responses)
            fault = self._request_all(requests, responses)
            if fault is None:
                break
            attempts = 0 if len(responses) > before else attempts + 1
            if fault.is_final or attempts == ATTEMPTS:
                raise UserError(
                    f"{self._server.setting}: {len(prompts) - len(responses)} of {len(prompts)} "
                    f"responses are missing after {counted(attempts or 1, 'attempt')}: "
                    f"{fault}{self._server.last_words()}"
                )
            self._revive()
            self.load_weights()
        return [responses[i] for i in range(len(prompts))]

    @property
    def _renews_head(self) -> bool:
        """Return whether a vLLM of ours may compute with an old copy of the output embedding."""
        is_on_cpu = jax.default_backend() == "cpu"
        return is_on_cpu and self._server.is_ours and self.actor.architecture.tied

    @property
    def _version(self) -> str:
        return f"{self._run}-{self.version}"

    def _request_all(
        self,
        requests: dict[int, tuple[list[int], int, SamplingOptions]],
        responses: dict[int, Response],
    ) -> RequestFault | None:
        """Add the responses that the server gives; return the first fault, if there was one."""
        faults: list[RequestFault] = []
        received: dict[int, Response] = {}
        is_over = False

        def request(index: int) -> None:
            # After a fault only what is under way goes on, as it may still succeed.
            if not faults and not is_over:
                try:
                    received[index] = self._request(*requests[index])
                except RequestFault as fault:
                    faults.append(fault)

        slots = next(iter(requests.values()))[2].slots
        with concurrent.futures.ThreadPoolExecutor(slots or len(requests)) as pool:
            futures = [pool.submit(request, index) for index in requests]
            try:
                for future in futures:
                    future.result()
            finally:
                is_over = True  # after an interrupt nobody waits for what is under way
                self._server.client.abort()
        version_route = self._server.protocol.version_route
        if version_route and received:
            try:
                facts = self._server.client.get(version_route)
                is_table = isinstance(facts, dict)
                self._require_version(facts.get("weight_version") if is_table else None)
            except RequestFault as fault:
                return fault
        responses.update(received)
        return faults[0] if faults else None

    def _request(self, prompt: list[int], seed: int, options: SamplingOptions) -> Response:
        """Return one response; raise `RequestFault` unless options and weights permit it."""
        protocol = self._server.protocol
        request = protocol.request(prompt, seed, options)
        V, num_ids = self.actor.architecture.vocab_size, self.actor.architecture.num_ids
        if num_ids is not None:
            parameters = request.get("sampling_params", request)
            parameters["logit_bias"] = {str(token): -100.0 for token in range(num_ids, V)}
        if self.takes_adapters:
            request[protocol.adapter_key] = self._loaded.adapters
        try:
            body = self._server.client.post(protocol.sample_route, json.dumps(request))
        except RequestFault as fault:
            if self.takes_adapters and fault.status == protocol.unknown_adapters:
                fault.is_final = False  # a server that was restarted does not know them
            raise
        try:
            reply = protocol.read(body)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise RequestFault(
                f"{protocol.sample_route}: the reply is not one response with log-probs "
                f"({type(error).__name__}: {error})"
            ) from None
        if not protocol.version_route:
            self._require_version(reply.version)
        return read_response(reply, options, num_ids or V)

    def _require_version(self, version: str | None) -> None:
        if version != self._version:
            raise RequestFault(
                f"the weights have version {version!r} instead of {self._version!r}: the server "
                "was restarted, or something else updates it"
            )

    def _publish(self) -> None:
        """Let the server load the weights, and start it if needed; may raise `AdaptersRefused`."""
        if self._server.is_ours and not self._server.is_running:
            self._start_vllm()
        if not self._server.is_connected:
            self._server.connect()
        if not (self.takes_adapters and self._loaded.has_base):
            updates = self._server.protocol.update(str(self.weights), self._version)
            if self._renews_head:
                updates.insert(1, ("/collective_rpc", {"method": "renew_tied_head"}))
            self._server.post_all(updates)
        if self.takes_adapters:
            self._loaded.has_base = True
            self._publish_adapters()

    def _publish_adapters(self) -> None:
        """Let the server load the adapters under a new name, and forget those before."""
        protocol, loaded = self._server.protocol, self._loaded
        loaded.loads += 1
        name = f"{self._version}-{loaded.loads}"
        loaded.names += (name,)  # without a reply it may have loaded them all the same
        try:
            self._server.post_all(protocol.load_adapters(str(self.adapters), name, self._version))
        except RequestFault as fault:
            if fault.status and not loaded.adapters:
                raise AdaptersRefused(str(fault)) from None
            raise
        loaded.adapters = name
        self._server.try_all([protocol.unload_adapters(old) for old in loaded.names[:-1]])
        loaded.names = (name,)

    def _revive(self) -> None:
        """After a fault, end a server of ours, or wait until a server that is not ours answers."""
        self._loaded.has_base = False
        self._server.revive()

    def _start_vllm(self) -> None:
        # The policy's log-probs: vLLM reports them before temperature and filters, or after both.
        mode = "raw_logprobs" if self.options.temperature == 1 else "processed_logprobs"
        arguments: dict[str, Any] = {
            "model": self.weights,
            "served-model-name": "policy",
            "host": "127.0.0.1",
            "port": self._server.port,
            "dtype": self.dtype,
            "max-model-len": self.max_length,
            "logprobs-mode": mode,
            "generation-config": "vllm",
            "uvicorn-log-level": "warning",
        }
        flags = ["--enable-scale-out"]
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if self.takes_adapters:
            assert self.actor.lora is not None
            rank = self.actor.lora.rank
            arguments["max-lora-rank"] = min(limit for limit in VLLM_RANKS if limit >= rank)
            flags.append("--enable-lora")
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self._renews_head:
            modules = self.weights.with_name("modules")
            modules.mkdir(exist_ok=True)
            (modules / f"{WORKER}.py").write_text(WORKER_PROGRAM)
            variables["PYTHONPATH"] = str(modules)
            arguments["worker-extension-cls"] = f"{WORKER}.TiedHead"
        self._loaded.has_base = True
        flags += shlex.split(self.options.vllm.arguments)
        self._server.launch(arguments, flags, variables, log=self.weights.with_name("vllm.log"))


def read_response(reply: Reply, options: SamplingOptions, vocab_size: int) -> Response:
    """Return the response, cut after its end; raise `RequestFault` if the reply is malformed."""
    tokens, logprobs = reply.tokens, reply.logprobs
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        raise RequestFault("a response has no list of token ids or none of log-probs")
    T = options.max_response_length
    if len(tokens) != len(logprobs):
        raise RequestFault(f"a response has {len(tokens)} tokens and {len(logprobs)} log-probs")
    # `True` is an int, too.
    if wrong := [x for x in tokens if type(x) is not int or not 0 <= x < vocab_size]:
        raise RequestFault(
            f"a response has the token {shorten(repr(wrong[0]))}; the model has {vocab_size}"
        )
    lowest = float(np.finfo(np.float32).min)
    if bad := [x for x in logprobs if type(x) not in (int, float) or not lowest <= x < 1e-3]:
        raise RequestFault(f"a response has the log-prob {shorten(repr(bad[0]))}")
    state = text_search.START
    for count, token in enumerate(tokens, start=1):
        ends = token in options.eos_ids
        if options.stop is not None and count > options.min_new_tokens:
            state = options.stop.next_states[state, options.stop.class_of_token[token]]
            ends |= bool(state == options.stop.found_state)
        if ends and count <= T:
            return Response(tokens[:count], logprobs[:count], truncated=False)
    if len(tokens) != T:
        raise RequestFault(f"a response ends after {len(tokens)} of {T} tokens for no reason")
    return Response(tokens, logprobs, truncated=True)
