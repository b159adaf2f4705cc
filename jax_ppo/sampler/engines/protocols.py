"""Requests and replies of servers that sample: vLLM, SGLang, and completions with token ids."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from jax_ppo.sampler.engine import SamplingOptions

Call = tuple[str, dict[str, Any]]  # a route and the body that is posted to it


@dataclasses.dataclass(frozen=True)
class Reply:
    """A server's answer: tokens, their log-probs, and the version of its weights."""

    tokens: list[int]
    logprobs: list[float]
    version: str | None


@dataclasses.dataclass(frozen=True)
class ServerProtocol:
    """How to talk to one kind of server."""

    name: str  # the server
    sample_route: str  # where a request for one response is sent
    # (prompt, seed, options) -> body of the request.
    request: Callable[[list[int], int, SamplingOptions], dict[str, Any]]
    # The reply's body -> what it says. Raises `LookupError`, `TypeError`, `ValueError` or
    # `AttributeError` if it is not one response.
    read: Callable[[Any], Reply]
    # (folder, version) -> routes and bodies that make the server load weights, in order.
    update: Callable[[str, str], list[Call]]
    # The same for adapters in PEFT's format: (folder, name, version) -> ...
    load_adapters: Callable[[str, str, str], list[Call]]
    # Name -> route and body that make the server forget adapters.
    unload_adapters: Callable[[str], Call]
    adapter_key: str = "model"  # the field of a request that has the name of the adapters
    # HTTP's status of a request with adapters that the server does not have.
    unknown_adapters: int = 404
    adapter_hint: str = ""  # how to start the server so that it has the routes for adapters
    version_route: str = ""  # where the version is asked for, if replies do not contain it
    hint: str = ""  # how to start the server so that it has all routes

    @property
    def routes(self) -> list[str]:
        """Return all routes that the server must have."""
        updates = [route for route, _ in self.update("", "")]
        return [self.sample_route, *updates, *([self.version_route] if self.version_route else [])]

    def adapter_obstacle(self, routes: Collection[str]) -> str:
        """Return why a server with these routes is not sent adapters, or "" if it is."""
        needed = [*self.load_adapters("", "", ""), self.unload_adapters("")]
        if missing := [route for route, _ in needed if route not in routes]:
            return f"the server lacks {', '.join(missing)}" + self.adapter_hint
        return ""


def choose_protocol(routes: Collection[str]) -> tuple[ServerProtocol, list[str]]:
    """Return the protocol whose routes a server has most of, and the routes that it lacks."""

    def missing(protocol: ServerProtocol) -> list[str]:
        return [route for route in protocol.routes if route not in routes]

    # The route that samples tells the servers apart.
    best = min(PROTOCOLS, key=lambda p: (p.sample_route not in routes, len(missing(p))))
    return best, missing(best)


def _common_parameters(options: SamplingOptions) -> dict[str, Any]:
    """Return what vLLM and SGLang name alike, all of it set: no model's default applies."""
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(options.eos_ids),
        "stop": list(options.stop.strings) if options.stop else [],
        "skip_special_tokens": False,
    }


def _vllm_parameters(seed: int, options: SamplingOptions) -> dict[str, Any]:
    return {
        **_common_parameters(options),
        "top_k": max(options.top_k, 0),
        "seed": seed,
        "max_tokens": options.max_response_length,
        "min_tokens": options.min_new_tokens,
        "ignore_eos": True,  # only the tokens that we name end a response
        "logprobs": 0,  # of the sampled token alone
    }


def _vllm_request(prompt: list[int], seed: int, options: SamplingOptions) -> dict[str, Any]:
    return {"token_ids": prompt, "sampling_params": _vllm_parameters(seed, options)}


def _read_vllm(body: Any) -> Reply:
    (choice,) = body["choices"]
    # One span per version that sampled a part of the response.
    versions = {span["version"] for span in choice["weight_versions"] or ()}
    return Reply(
        tokens=choice["token_ids"],
        logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        version=" and ".join(sorted(map(str, versions))),
    )


def _vllm_update(folder: str, version: str) -> list[Call]:
    return [
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
        *_vllm_version(version),
    ]


def _vllm_load_adapters(folder: str, name: str, version: str) -> list[Call]:
    load = {"lora_name": name, "lora_path": folder}
    return [("/v1/load_lora_adapter", load), *_vllm_version(version)]


def _vllm_unload_adapters(name: str) -> Call:
    return "/v1/unload_lora_adapter", {"lora_name": name}


def _vllm_version(version: str) -> list[Call]:
    return [
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": version}),
    ]


def _completion_request(prompt: list[int], seed: int, options: SamplingOptions) -> dict[str, Any]:
    return {"prompt": prompt, "return_token_ids": True, **_vllm_parameters(seed, options)}


def _read_completion(body: Any) -> Reply:
    (choice,) = body["choices"]
    return Reply(choice["token_ids"], choice["logprobs"]["token_logprobs"], version=None)


def _sglang_request(prompt: list[int], seed: int, options: SamplingOptions) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "return_logprob": True,
        "sampling_params": {
            **_common_parameters(options),
            "top_k": options.top_k if options.top_k > 0 else -1,
            "sampling_seed": seed,
            "max_new_tokens": options.max_response_length,
            "min_new_tokens": options.min_new_tokens,
            "ignore_eos": not options.eos_ids,  # or it would end at the checkpoint's own
        },
    }


def _read_sglang(body: Any) -> Reply:
    facts = body["meta_info"]
    entries = facts["output_token_logprobs"]
    return Reply(
        tokens=[token for _, token, *_ in entries],
        logprobs=[logprob for logprob, *_ in entries],
        version=facts.get("weight_version", ""),
    )


def _sglang_update(folder: str, version: str) -> list[Call]:
    # It also empties the prefix cache.
    return [("/update_weights_from_disk", {"model_path": folder, "weight_version": version})]


def _sglang_load_adapters(folder: str, name: str, version: str) -> list[Call]:
    return [
        ("/load_lora_adapter", {"lora_name": name, "lora_path": folder}),
        ("/update_weight_version", {"new_version": version, "abort_all_requests": False}),
    ]


def _sglang_unload_adapters(name: str) -> Call:
    return "/unload_lora_adapter", {"lora_name": name}


_ADAPTER_HINT = "; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
_VLLM_HINT = "start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
PROTOCOLS = (
    ServerProtocol(
        name="vLLM",
        sample_route="/inference/v1/generate",
        request=_vllm_request,
        read=_read_vllm,
        update=_vllm_update,
        load_adapters=_vllm_load_adapters,
        unload_adapters=_vllm_unload_adapters,
        adapter_hint=_ADAPTER_HINT,
        hint=_VLLM_HINT,
    ),
    ServerProtocol(
        name="SGLang",
        sample_route="/generate",
        request=_sglang_request,
        read=_read_sglang,
        update=_sglang_update,
        load_adapters=_sglang_load_adapters,
        unload_adapters=_sglang_unload_adapters,
        adapter_key="lora_path",
        unknown_adapters=400,
        adapter_hint="; start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules",
    ),
    ServerProtocol(
        name="completions",
        sample_route="/v1/completions",
        request=_completion_request,
        read=_read_completion,
        update=_vllm_update,
        load_adapters=_vllm_load_adapters,
        unload_adapters=_vllm_unload_adapters,
        adapter_hint=_ADAPTER_HINT,
        version_route="/weight_info",
        hint=_VLLM_HINT,
    ),
)
