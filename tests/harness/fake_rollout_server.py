"""A server that speaks vLLM's, SGLang's or the completions protocol, with faults on demand.

Its tokens depend on seed, prompt and weights alone. As a program it takes vLLM's arguments, and
--die-after=N: it kills itself when it gets the request after the Nth response.
"""

import argparse
import functools
import http.server
import importlib
import json
import math
import os
import random
import signal
import sys
import threading
import time
import zlib
from pathlib import Path

UPDATES = ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
ROUTES = {
    "vLLM": ("/inference/v1/generate", *UPDATES),
    "SGLang": ("/generate", "/update_weights_from_disk"),
    "completions": ("/v1/completions", "/weight_info", *UPDATES),
}
_VLLM_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
ADAPTERS = {
    "vLLM": _VLLM_ADAPTERS,
    "SGLang": ("/load_lora_adapter", "/unload_lora_adapter", "/update_weight_version"),
    "completions": _VLLM_ADAPTERS,
}


class FakeServer:
    """The server's state; `with server:` runs it in a thread at `server.url`."""

    def __init__(self, kind="vLLM", vocabulary=61, port=0, sample=None, weights=None):
        self.kind, self.vocabulary, self.port = kind, vocabulary, port
        self.sample = sample or self.draw
        self.fault = lambda reply, number: reply  # changes the fields of a reply
        # Changes what is sent: the status, the headers and the bytes.
        self.alter = lambda path, status, headers, data: (status, headers, data)
        self.die_after = math.inf
        self.die = self.stop
        self.version, self.weights = "default", weights
        self.log = lambda line: None
        self.extension = None  # class whose methods /collective_rpc may call
        self.adapters = None  # name -> folder of adapters, if it loads them
        self.refusal = ""  # why it does not load adapters
        self.loaded = []  # weights, and the names of adapters
        self.requests, self.responses = [], 0
        self.authorization = None
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(None)

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body):
                server.authorization = self.headers["Authorization"]
                status, reply = server.answer(self.path, body)
                is_text = isinstance(reply, str)
                data = (reply if is_text else json.dumps(reply)).encode()
                headers = {} if is_text else {"Content-Type": "application/json"}
                status, headers, data = server.alter(self.path, status, headers, data)
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            request_queue_size = 100
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request, address):
                pass  # the client went away

        self.http = Quiet(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_port
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def stop(self):
        self.http.shutdown()
        self.http.server_close()

    def answer(self, path, body):
        """Return status and body of the reply."""
        routes = ROUTES[self.kind] + (ADAPTERS[self.kind] if self.adapters is not None else ())
        if path == "/openapi.json":
            return 200, {"paths": dict.fromkeys(routes)}
        if path not in routes:
            return 404, {"error": f"no {path}"}
        if path.endswith("_lora_adapter"):
            return self.answer_adapters(path, body["lora_name"], body.get("lora_path"))
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        if path == "/collective_rpc":
            self.log(f"in each worker: {body['method']}")
            if body["method"] == "reload_weights":
                self.load(body["kwargs"]["weights_path"])
            else:
                getattr(self.extension, body["method"])
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/update_weights_from_disk":
            self.load(body["model_path"])
            self.version = body["weight_version"]
            return 200, {"success": True, "message": ""}
        elif path != "/reset_prefix_cache":
            return self.answer_request(body)
        return 200, {}

    def load(self, folder):
        self.loaded.append("weights")
        self.weights = Path(folder)

    def answer_adapters(self, path, name, folder):
        success = {"success": True} if self.kind == "SGLang" else "Success"
        if "unload" in path:
            return (200, success) if self.adapters.pop(name, None) else (404, {"error": "none"})
        if name in self.adapters:
            return 400, {"error": "already loaded"}
        if self.refusal:
            return 400 if self.kind == "SGLang" else 500, {"error": self.refusal}
        self.loaded.append(name)
        self.adapters[name] = (Path(folder) / "adapter_model.safetensors").read_bytes()
        return 200, success

    def answer_request(self, body):
        with self.lock:
            if self.responses >= self.die_after:
                self.die()
            self.requests.append(body)
            number = len(self.requests)
            prompt = body.get("token_ids") or body.get("input_ids") or body.get("prompt")
            options = body.get("sampling_params", body)
            name = adapters_of(body)
            if name and name not in (self.adapters or ()):
                return 400 if self.kind == "SGLang" else 404, {"error": "no such adapters"}
            self.adapter = self.adapters[name] if name else b""
            tokens, logprobs = self.sample(prompt, options)
        reply = {"tokens": tokens, "logprobs": logprobs, "version": self.version, "status": 200}
        reply = self.fault(reply, number)
        self.responses += 1
        tokens, logprobs, version = reply["tokens"], reply["logprobs"], reply["version"]
        if reply["status"] != 200:
            return reply["status"], {"error": "refused"}
        if self.kind == "vLLM":
            content = [
                {"token_id": t, "logprob": x} for t, x in zip(tokens, logprobs, strict=False)
            ]
            spans = [{"version": version, "start": 0, "end": len(tokens)}]
            choice = {"token_ids": tokens, "logprobs": {"content": content}}
            return 200, {"choices": [choice | {"weight_versions": spans}]}
        if self.kind == "SGLang":
            entries = [[x, t, None] for t, x in zip(tokens, logprobs, strict=False)]
            return 200, {"meta_info": {"output_token_logprobs": entries, "weight_version": version}}
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
        return 200, {"choices": [choice]}

    def draw(self, prompt, options):
        """Return tokens of a random length, of which only the last may be an EOS."""
        seed = options.get("seed", options.get("sampling_seed"))
        weights = zlib.crc32((self.weights / "model.safetensors").read_bytes() + self.adapter)
        random_numbers = random.Random(f"{seed} {prompt} {weights}")
        ends = options["stop_token_ids"]
        longest = options.get("max_tokens", options.get("max_new_tokens"))
        length = random_numbers.randint(1, longest) if ends else longest
        others = [t for t in range(self.vocabulary) if t not in ends]
        tokens = [random_numbers.choice(others) for _ in range(length)]
        if length < longest:
            tokens[-1] = ends[0]
        return tokens, [-math.log(self.vocabulary)] * length


def adapters_of(request):
    """Return the name of the adapters that a request gives."""
    return request.get("model") or request.get("lora_path")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--model")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--worker-extension-cls", default="")
    parser.add_argument("--die-after", type=float, default=math.inf)
    parser.add_argument("--vocabulary", type=int, default=61)
    arguments, others = parser.parse_known_args()
    print("started with", *others, flush=True)
    server = FakeServer("vLLM", arguments.vocabulary, arguments.port, weights=Path(arguments.model))
    server.die_after = arguments.die_after
    if arguments.enable_lora:
        print("with adapters", flush=True)
        server.adapters = {}
    server.log = functools.partial(print, flush=True)
    if arguments.worker_extension_cls:
        module, name = arguments.worker_extension_cls.split(".")
        server.extension = getattr(importlib.import_module(module), name)
        print("extended by", server.extension.__name__, flush=True)
    server.die = lambda: os.kill(os.getpid(), signal.SIGKILL)
    with server:
        while True:
            time.sleep(60)


def write_interpreter(path):
    """Write a program that stands for an interpreter whose vLLM is this server."""
    program = f"exec {sys.executable} {__file__}"
    path.write_text(f'#!/bin/sh\n[ "$1" = "-c" ] && exit 0\n{program} "$@"\n')
    path.chmod(0o755)
    return str(path)


if __name__ == "__main__":
    main()
