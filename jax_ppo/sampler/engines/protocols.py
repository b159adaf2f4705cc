"""Requests and replies of servers that sample: vLLM, SGLang, and completions with token ids."""

import dataclasses
from collections.abc import Collection
from typing import Any

from jax_ppo.sampler.engine import SamplingOptions

Call = tuple[str, dict[str, Any]]  # a route and the body that is posted to it


@dataclasses.dataclass(frozen=True)
class Reply:
    """A server's answer: tokens, their log-probs, and the version of its weights."""

    tokens: list[int]
    logprobs: list[float]
    version: str | None


class ServerProtocol:
    """How to talk to a server: to vLLM, unless a subclass overrides it."""

    sample_route = "/inference/v1/generate"  # where a request for one response is sent
    version_route = ""  # where the version is asked for, if replies do not contain it
    adapter_key = "model"  # the field of a request that has the name of the adapters
    unknown_adapters = 404  # HTTP status of a request with adapters that the server does not have
    # How to start the server so that it has all routes, and so that it has those for adapters.
    hint = "; start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
    adapter_hint = "; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"

    def request(self, prompt: list[int], seed: int, options: SamplingOptions) -> dict[str, Any]:
        """Return the body of a request for one response."""
        return {"token_ids": prompt, "sampling_params": self._parameters(seed, options)}

    def _parameters(self, seed: int, options: SamplingOptions) -> dict[str, Any]:
        return {
            **_common_parameters(options),
            "top_k": max(options.top_k, 0),
            "seed": seed,
            "max_tokens": options.max_response_length,
            "min_tokens": options.min_new_tokens,
            "ignore_eos": True,  # only the tokens that we name end a response
            "logprobs": 0,  # of the sampled token alone
        }

    def read(self, body: Any) -> Reply:
        """Return a body's reply; raise a LookupError, TypeError, ValueError or AttributeError."""
        (choice,) = body["choices"]
        # One span per version that sampled a part of the response.
        versions = {span["version"] for span in choice["weight_versions"] or ()}
        return Reply(
            tokens=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
            version=" and ".join(sorted(map(str, versions))),
        )

    def update(self, folder: str, version: str) -> list[Call]:
        """Return the calls that make the server load weights, in order."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        return [("/collective_rpc", load), *self._name_version(version)]

    def load_adapters(self, folder: str, name: str, version: str) -> list[Call]:
        """Return the calls that make the server load adapters in PEFT's format, in order."""
        load = {"lora_name": name, "lora_path": folder}
        return [("/v1/load_lora_adapter", load), *self._name_version(version)]

    def _name_version(self, version: str) -> list[Call]:
        new = {"new_version": version}
        return [("/reset_prefix_cache", {}), ("/update_weight_version", new)]

    def unload_adapters(self, name: str) -> Call:
        """Return the call that makes the server forget adapters."""
        return "/v1/unload_lora_adapter", {"lora_name": name}

    def missing_routes(self, routes: Collection[str]) -> list[str]:
        """Return the routes that a server with these lacks."""
        updates = [route for route, _ in self.update("", "")]
        needed = filter(None, [self.sample_route, *updates, self.version_route])
        return [route for route in needed if route not in routes]

    def adapter_obstacle(self, routes: Collection[str]) -> str:
        """Return why a server with these routes is not sent adapters, or "" if it is."""
        needed = [*self.load_adapters("", "", ""), self.unload_adapters("")]
        if missing := [route for route, _ in needed if route not in routes]:
            return f"the server lacks {', '.join(missing)}" + self.adapter_hint
        return ""


class _Completions(ServerProtocol):
    sample_route = "/v1/completions"
    version_route = "/weight_info"

    def request(self, prompt: list[int], seed: int, options: SamplingOptions) -> dict[str, Any]:
        return {"prompt": prompt, "return_token_ids": True, **self._parameters(seed, options)}

    def read(self, body: Any) -> Reply:
        (choice,) = body["choices"]
        return Reply(choice["token_ids"], choice["logprobs"]["token_logprobs"], version=None)


class _SGLang(ServerProtocol):
    sample_route = "/generate"
    adapter_key = "lora_path"
    unknown_adapters = 400
    hint = ""
    adapter_hint = "; start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules"

    def request(self, prompt: list[int], seed: int, options: SamplingOptions) -> dict[str, Any]:
        parameters = {
            **_common_parameters(options),
            "top_k": options.top_k if options.top_k > 0 else -1,
            "sampling_seed": seed,
            "max_new_tokens": options.max_response_length,
            "min_new_tokens": options.min_new_tokens,
            "ignore_eos": not options.eos_ids,  # or it would end at the checkpoint's own
        }
        return {"input_ids": prompt, "return_logprob": True, "sampling_params": parameters}

    def read(self, body: Any) -> Reply:
        facts = body["meta_info"]
        entries = facts["output_token_logprobs"]
        return Reply(
            tokens=[token for _, token, *_ in entries],
            logprobs=[logprob for logprob, *_ in entries],
            version=facts.get("weight_version", ""),
        )

    def update(self, folder: str, version: str) -> list[Call]:
        # It also empties the prefix cache.
        return [("/update_weights_from_disk", {"model_path": folder, "weight_version": version})]

    def load_adapters(self, folder: str, name: str, version: str) -> list[Call]:
        return [
            ("/load_lora_adapter", {"lora_name": name, "lora_path": folder}),
            ("/update_weight_version", {"new_version": version, "abort_all_requests": False}),
        ]

    def unload_adapters(self, name: str) -> Call:
        return "/unload_lora_adapter", {"lora_name": name}


def choose_protocol(routes: Collection[str]) -> tuple[ServerProtocol, list[str]]:
    """Return the protocol whose routes a server has most of, and the routes that it lacks."""
    protocols = ServerProtocol(), _SGLang(), _Completions()
    best = min(  # the route that samples tells the servers apart
        protocols, key=lambda p: (p.sample_route not in routes, len(p.missing_routes(routes)))
    )
    return best, best.missing_routes(routes)


def _common_parameters(options: SamplingOptions) -> dict[str, Any]:
    """Return what vLLM and SGLang name alike, all of it set: no model's default applies."""
    # SGLang ends at strings before the minimum, and vLLM at ones that begin before it; ours count
    # only after it.
    stop = () if options.stop is None or options.min_new_tokens else options.stop.strings
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(options.eos_ids),
        "stop": list(stop),
        "skip_special_tokens": False,
    }
