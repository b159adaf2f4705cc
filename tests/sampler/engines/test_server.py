"""A server samples: what it is asked, what is refused, and what happens when it fails."""

import dataclasses
import gzip
import json
import re
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import fake_rollout_server
import tiny_actor
from fake_rollout_server import FakeServer
from jax_ppo.config.rollout_options import VLLM
from jax_ppo.config.schema import MeshShape, RolloutOptions
from jax_ppo.errors import UserError
from jax_ppo.http_client import HTTPClient, RequestFault
from jax_ppo.models import lora
from jax_ppo.models.hf import save
from jax_ppo.models.lora import Lora, init_adapters, join_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes
from jax_ppo.sampler.engine import SamplingOptions, running
from jax_ppo.sampler.engines import external, protocols, rollout_server, server
from jax_ppo.sampler.engines.external import ExternalEngine
from jax_ppo.sampler.engines.protocols import Reply
from jax_ppo.sampler.engines.rollout_server import ServerProcess
from jax_ppo.sampler.text_search import search_for
from waiting import is_running, wait_until

MESH = meshes.make_mesh(MeshShape(), jax.devices()[:1])
V = tiny_actor.ARCHITECTURE.vocab_size
GZIPPED = gzip.compress(b"{}", mtime=0)
SAMPLING = SamplingOptions(max_response_length=6, temperature=1.0, n=8, eos_ids=(2,))


@pytest.fixture(scope="module")
def folder(actor, tmp_path_factory):
    folder = tmp_path_factory.mktemp("actor") / "model"
    save.export_checkpoint(actor.stacked, tiny_actor.ARCHITECTURE, folder)
    return folder


@pytest.fixture
def any_weights(monkeypatch):
    """Accept log-probs that no model computed."""
    monkeypatch.setattr(external, "MAX_DIFFERENCE", np.inf)
    monkeypatch.setattr(ExternalEngine, "_unused_adapters", lambda *arguments: [])
    monkeypatch.setattr(rollout_server, "_PAUSE", 0.01)


@pytest.fixture
def python(tmp_path):
    """An interpreter whose vLLM is the fake server."""
    return fake_rollout_server.write_interpreter(tmp_path / "python")


def make_engine(actor, folder, **options):
    options = RolloutOptions(**{"engine": "openai"} | options)
    return server.ServerEngine(MESH, actor.scored, actor.stacked, options, folder, 32)


def generate(engine, actor, prompts, options=SAMPLING, updates=1):
    with jax.set_mesh(MESH):
        for _ in range(updates):
            engine.update_weights(actor.stacked)
        rollout = engine.generate(prompts, jax.random.key(7), options)
        engine.release_weights()
        return jax.tree.map(np.asarray, rollout)


def read_tensors(folder):
    (file,) = folder.glob("*.safetensors")
    return safetensors.numpy.load_file(file)


def same(rollout, other):
    return all(
        (getattr(rollout, name) == getattr(other, name)).all()
        for name in ("responses", "lengths", "logprobs", "truncated")
    )


@pytest.fixture(scope="module")
def expected(actor, folder):
    """The rollout of a server without faults."""
    patch = pytest.MonkeyPatch()
    patch.setattr(external, "MAX_DIFFERENCE", np.inf)
    with FakeServer() as fake, running(make_engine(actor, folder, url=fake.url)) as engine:
        rollout = generate(engine, actor, tiny_actor.make_prompts())
    patch.undo()
    return rollout


@pytest.mark.usefixtures("any_weights")
class TestProtocols:
    @pytest.mark.parametrize("kind", fake_rollout_server.ROUTES)
    def test_all_give_the_same_rollout(self, actor, folder, prompts, expected, kind):
        with FakeServer(kind) as fake, running(make_engine(actor, folder, url=fake.url)) as engine:
            rollout = generate(engine, actor, prompts, updates=2)
        assert same(rollout, expected)
        assert len(rollout.lengths) == 4 * 8
        # Not all of a prompt's samples are alike, some end early, and the padding is 0.
        assert len({tuple(row) for row in rollout.responses[:8].tolist()}) > 4
        assert 0 < rollout.truncated.sum() < 32
        assert not rollout.logprobs[~rollout.action_mask].any()

    def test_a_request_holds_every_option(self, actor, folder, prompts):
        letters = [bytes([97 + i % 26]) for i in range(V)]
        filters = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "min_new_tokens": 2}
        stop = search_for(["never"], letters, V)
        options = dataclasses.replace(SAMPLING, n=1, stop=stop, **filters)
        with FakeServer() as fake, running(make_engine(actor, folder, url=fake.url)) as engine:
            generate(engine, actor, prompts, options)
        body = next(b for b in fake.requests if b["sampling_params"]["max_tokens"] == 6)
        assert body["token_ids"] in [
            row[:n].tolist() for row, n in zip(prompts.tokens, prompts.lengths, strict=True)
        ]
        seed = body["sampling_params"].pop("seed")
        assert 0 <= seed < 2**31
        assert body["sampling_params"] == {
            "temperature": 1.0,
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.0,
            "max_tokens": 6,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [2],
            "stop": [],  # servers begin to search before the minimum
            "skip_special_tokens": False,
            "logprobs": 0,
        }
        unlimited = dataclasses.replace(options, min_new_tokens=0)
        body = protocols.ServerProtocol().request([1], 0, unlimited)
        assert body["sampling_params"]["stop"] == ["never"]

    @pytest.mark.parametrize("kind", fake_rollout_server.ROUTES)
    def test_ids_without_text_are_forbidden_and_refused(self, actor, folder, prompts, kind):
        architecture = dataclasses.replace(tiny_actor.ARCHITECTURE, num_ids=V - 2)
        model = actor.scored.clone(architecture=architecture)
        few = types.SimpleNamespace(scored=model, stacked=actor.stacked)
        with (
            FakeServer(kind, vocabulary=V - 2) as fake,
            running(make_engine(few, folder, url=fake.url)) as engine,
        ):
            generate(engine, few, prompts)
            body = fake.requests[-1]
            bias = body.get("sampling_params", body)["logit_bias"]
            assert bias == {str(V - 2): -100, str(V - 1): -100}
            fake.vocabulary = V
            with pytest.raises(UserError, match=f"the model has {V - 2}"):
                generate(engine, few, prompts)

    def test_the_key_is_sent_and_not_shown(self, actor, folder, prompts, monkeypatch):
        monkeypatch.setenv("JAX_PPO_ROLLOUT_KEY", "secret")
        with FakeServer() as fake, running(make_engine(actor, folder, url=fake.url)) as engine:
            generate(engine, actor, prompts)
            assert fake.authorization == "Bearer secret"
            fake.fault = lambda reply, number: reply | {"status": 401}
            with pytest.raises(UserError, match="HTTP 401") as error:
                generate(engine, actor, prompts)
        assert "secret" not in str(error.value)

    @pytest.mark.parametrize("status", [401, 308])
    def test_a_server_that_refuses_is_not_waited_for(self, status, actor, folder):
        with FakeServer() as fake:
            fake.alter = lambda path, _, headers, data: (status, headers, data)
            with pytest.raises(UserError, match=f"url='{fake.url}': /openapi.json: HTTP {status}"):
                make_engine(actor, folder, url=fake.url).start()

    def test_a_server_without_updates_is_refused_at_start(self, actor, folder, monkeypatch):
        monkeypatch.setitem(fake_rollout_server.ROUTES, "vLLM", ("/inference/v1/generate",))
        with FakeServer() as fake:
            engine = make_engine(actor, folder, url=fake.url)
            message = r"lacks /collective_rpc, .*start vLLM with VLLM_SERVER_DEV_MODE=1"
            with pytest.raises(UserError, match=message):
                engine.start()

    def test_no_server_is_one_line(self, actor, folder, monkeypatch):
        monkeypatch.setattr(rollout_server, "_CONNECT_SECONDS", 0.1)
        engine = make_engine(actor, folder, url="http://127.0.0.1:9")
        with pytest.raises(UserError, match=r"rollout\.url='http://127.0.0.1:9': no answer"):
            engine.start()


def once(**changes):
    """Return a fault of the fifth reply."""
    return lambda reply, number: reply | (changes if number == 5 else {})


def hang_once(reply, number):
    if number == 5:
        time.sleep(2)
    return reply


@pytest.mark.usefixtures("any_weights")
class TestFaults:
    @pytest.mark.parametrize(
        "fault",
        [
            once(tokens=[5, 6], logprobs=[-1.0, -1.0]),
            once(tokens=[5] * 9, logprobs=[-1.0] * 9),
            once(tokens=[5] * 6, logprobs=[-1.0] * 5 + [float("nan")]),
            once(tokens=[5] * 5 + [V], logprobs=[-1.0] * 6),
            once(tokens=[5] * 6, logprobs=[-1.0] * 6, version="old"),
            once(status=503),
            hang_once,
        ],
        ids=["fewer", "more", "nan", "unknown-token", "old-version", "busy", "hang"],
    )
    def test_a_bad_response_is_requested_again(self, actor, folder, prompts, expected, fault):
        with FakeServer() as fake:
            fake.fault = fault
            engine = make_engine(actor, folder, url=fake.url, url_timeout=0.5)
            with running(engine):
                assert same(generate(engine, actor, prompts), expected)
                assert len(fake.requests) > 33

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"logprobs": [None] * 6, "tokens": [5] * 6}, "a response has the log-prob None"),
            ({"tokens": [5], "logprobs": [-1.0]}, "ends after 1 of . tokens for no reason"),
            ({"version": "old"}, "the weights have version 'old' instead of"),
            ({"status": 400}, "HTTP 400 .*refused"),
            ({"tokens": [True] * 8, "logprobs": [-1.0] * 8}, "has the token True"),
            ({"tokens": [5] * 8, "logprobs": [-1e39] * 8}, r"has the log-prob -1e\+39"),
            ({"tokens": ["5" * 999] * 8, "logprobs": [-1.0] * 8}, r"the token '5{79}\.\.\.;"),
        ],
    )
    def test_a_fault_that_stays_is_one_line(self, actor, folder, prompts, changes, message):
        with FakeServer() as fake, running(make_engine(actor, folder, url=fake.url)) as engine:
            fake.fault = lambda reply, number: reply | changes
            with pytest.raises(UserError, match=message) as error:
                generate(engine, actor, prompts)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("route", "status", "header", "data", "message"),
        [
            ("openapi", 200, ("Content-Type", "text/html"), b"<p>", r"\(text/html\) is not JSON"),
            ("openapi", 200, (), b'{"paths": null}', "no answer in .*lists no routes"),
            ("openapi", 302, ("Location", "http://a/b"), b"", "not followed, here to http://a/b"),
            ("v1/", 200, ("Content-Encoding", "gzip"), GZIPPED, "json, gzip.* is not"),
            ("v1/", 200, (), b"[" * 10**5, "is not JSON: maximum recursion"),
            ("v1/", 200, (), b'{"choices": [{}, {}]}', "not one response with .*too many values"),
            ("weight_info", 200, (), b"[]", "have version None instead of"),
        ],
    )
    def test_what_is_no_reply_is_one_line(
        self, actor, folder, prompts, monkeypatch, route, status, header, data, message
    ):
        monkeypatch.setattr(rollout_server, "_CONNECT_SECONDS", 0.1)

        def alter(path, *reply):
            if path.startswith(f"/{route}"):
                return status, reply[1] | dict([header] if header else []), data
            return reply

        with FakeServer("completions") as fake:
            fake.alter = alter
            with pytest.raises(UserError, match=message):
                with running(make_engine(actor, folder, url=fake.url)) as engine:
                    generate(engine, actor, prompts)

    def test_a_restarted_server_gets_the_weights_again(self, actor, folder, prompts, expected):
        with FakeServer() as fake, running(make_engine(actor, folder, url=fake.url)) as engine:
            generate(engine, actor, prompts)

            def restart(reply, number):
                if number == 40:
                    fake.version = "default"
                return reply | {"version": fake.version}

            fake.fault = restart
            assert same(generate(engine, actor, prompts), expected)
            assert len(fake.requests) > 50

    @pytest.mark.slow
    def test_a_server_of_ours_is_killed_50_times(self, actor, folder, prompts, python, tmp_path):
        """Every life answers one request: the samples are those of a server that lives on."""
        options = dataclasses.replace(SAMPLING, n=13, slots=1)
        rollouts = []
        for arguments in ("--die-after=1", ""):
            vllm = VLLM(python=python, arguments=arguments)
            options_of_engine = {"engine": "vllm", "weights_dir": str(tmp_path), "vllm": vllm}
            engine = make_engine(actor, folder, **options_of_engine)
            with running(engine):
                rollouts.append(generate(engine, actor, prompts, options))
                log = engine.weights.with_name("vllm.log").read_text()
            assert log.count("started") == (53 if arguments else 1)
            assert "--logprobs-mode=raw_logprobs" in log
        assert len(rollouts[0].lengths) == 52
        assert same(*rollouts)

    def test_a_server_that_does_not_start_is_one_line(self, actor, folder, prompts, python):
        Path(python).write_text(
            '#!/bin/sh\n[ "$1" = "-c" ] && exit 0\necho "OSError: no such thing"\nexit 1\n'
        )
        engine = make_engine(actor, folder, engine="vllm", vllm=VLLM(python=python))
        with running(engine), pytest.raises(UserError, match="vLLM ended: OSError: no such thing"):
            generate(engine, actor, prompts)

    @pytest.mark.parametrize("tied", [False, True])
    def test_a_tied_head_is_renewed_after_each_update(
        self, actor, folder, python, monkeypatch, tied
    ):
        """On a CPU vLLM does not renew its copy of it by itself (test_vllm.py)."""
        model = Transformer(dataclasses.replace(tiny_actor.ARCHITECTURE, tied=tied))
        params = {name: x for name, x in actor.stacked.items() if name != "lm_head" or not tied}
        options = RolloutOptions(engine="vllm", vllm=VLLM(python=python))
        engine = server.ServerEngine(MESH, model, params, options, folder, 32)
        monkeypatch.setattr(engine, "_compare", lambda params: None)
        with running(engine), jax.set_mesh(MESH):
            engine.update_weights(params)
            engine.update_weights(params)
            log = engine.weights.with_name("vllm.log").read_text()
        loading = ["reload_weights", "renew_tied_head"] if tied else ["reload_weights"]
        assert re.findall("in each worker: (.*)", log) == 2 * loading
        assert ("extended by TiedHead" in log) is tied

    def test_an_interpreter_without_vllm_is_refused(self, actor, folder):
        for python, message in ((sys.executable, "has no vLLM"), ("/none", "No such file")):
            engine = make_engine(actor, folder, engine="vllm", vllm=VLLM(python=python))
            with pytest.raises(UserError, match=message):
                engine.start()

    def test_workers_have_time_to_clean_up(self, tmp_path):
        """They remove what they have in shared memory after the server has ended."""
        worker = f"trap '' TERM; touch {tmp_path}/started; sleep 0.3; touch {tmp_path}/cleaned"
        process = ServerProcess(["sh", "-c", f"({worker}) & wait"], {}, tmp_path / "log")
        wait_until((tmp_path / "started").exists)
        process.stop()
        assert (tmp_path / "cleaned").exists()

    @pytest.mark.slow
    def test_a_server_of_ours_ends_with_its_workers(self, tmp_path):
        program = f"sleep 1000 & echo $! > {tmp_path}/worker; wait"
        process = ServerProcess(["sh", "-c", program], {}, tmp_path / "log")
        wait_until((tmp_path / "worker").read_text)
        worker = int((tmp_path / "worker").read_text())
        assert is_running(worker)
        process.stop()
        wait_until(lambda: not is_running(worker))


class TestResponse:
    def read(self, tokens, **options):
        options = dataclasses.replace(SAMPLING, **options)
        return server.read_response(Reply(tokens, [-1.0] * len(tokens), None), options, V)

    def test_it_ends_with_an_eos(self):
        assert self.read([4, 2]) == server.Response([4, 2], [-1.0] * 2, truncated=False)
        assert self.read([4, 4, 4, 4, 4, 2]).truncated is False
        assert self.read([4, 4, 4, 4, 4, 4]).truncated is True
        # What a server added to it is cut off.
        assert self.read([4, 2, 5, 5]).tokens == [4, 2]

    def test_it_ends_with_the_token_that_completes_a_stop_string(self):
        letters = [bytes([97 + i % 26]) for i in range(V)]
        stop = search_for(["ef"], letters, V)
        assert self.read([4, 5, 5, 5], stop=stop).tokens == [4, 5]
        assert self.read([4, 5, 4, 5], stop=stop, min_new_tokens=2).tokens == [4, 5, 4, 5]


class TestWeights:
    """The server runs the model that it is sent, in torch."""

    def test_it_samples_from_them_and_other_weights_are_noticed(self, actor, folder, prompts):
        torch = pytest.importorskip("torch")
        import transformers

        fake = FakeServer("SGLang")

        def load(folder):
            fake.model = transformers.AutoModelForCausalLM.from_pretrained(folder)

        def sample(prompt, options):
            generator = torch.Generator().manual_seed(options["sampling_seed"])
            tokens, logprobs = list(prompt), []
            for _ in range(options["max_new_tokens"]):
                with torch.inference_mode():
                    logits = fake.model(torch.tensor([tokens])).logits[0, -1]
                row = torch.log_softmax(logits / options["temperature"], -1)
                token = int(torch.multinomial(row.exp(), 1, generator=generator))
                tokens.append(token)
                logprobs.append(float(row[token]))
                if token in options["stop_token_ids"]:
                    break
            return tokens[len(prompt) :], logprobs

        fake.load, fake.sample = load, sample
        options = dataclasses.replace(SAMPLING, temperature=0.7, n=2)
        with fake:
            engine = make_engine(actor, folder, url=fake.url, temperature=0.7)
            with running(engine):
                rollout = generate(engine, actor, prompts, options)
                fake.load = lambda folder: None
                negative = jax.tree.map(lambda x: -x, actor.stacked)
                message = r"after update 2 its log-probs differ.*it samples from other weights"
                with jax.set_mesh(MESH), pytest.raises(UserError, match=message):
                    engine.update_weights(negative)
        ours, mask = actor.logprobs(rollout, temperature=0.7), rollout.action_mask
        np.testing.assert_allclose(rollout.logprobs[mask], ours[mask], atol=1e-4)


LORA = Lora(rank=9, alpha=4.0, targets=("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def adapters():
    return init_adapters(tiny_actor.ARCHITECTURE, LORA, jax.random.key(1), "lm")


@pytest.mark.usefixtures("any_weights")
class TestAdapters:
    """A server that can gets the base once and then adapters alone."""

    def make_engine(self, actor, adapters, folder, lora=LORA, **options):
        options = RolloutOptions(**{"engine": "openai"} | options)
        adapted = Transformer(actor.scored.architecture, lora=lora)
        params = join_params(actor.stacked, adapters)
        return server.ServerEngine(MESH, adapted, params, options, folder, 32)

    def generate(self, engine, actor, prompts, adapters, change=0.0, options=SAMPLING):
        adapters = jax.tree.map(lambda x: x + change, adapters)
        with jax.set_mesh(MESH):
            engine.update_weights(join_params(actor.stacked, adapters))
            rollout = engine.generate(prompts, jax.random.key(7), options)
            return jax.tree.map(np.asarray, rollout)

    @pytest.mark.parametrize("kind", fake_rollout_server.ROUTES)
    def test_adapters_alone_are_sent_after_the_base(self, actor, folder, prompts, adapters, kind):
        with FakeServer(kind) as fake:
            fake.adapters = {}
            engine = self.make_engine(actor, adapters, folder, url=fake.url)
            with running(engine):
                rollouts = [
                    self.generate(engine, actor, prompts, adapters, change) for change in (0, 1, 0)
                ]
                first, probe, *names = fake.loaded
                used = set(map(fake_rollout_server.adapters_of, fake.requests))
                base = read_tensors(engine.weights)
                written = read_tensors(engine.adapters)
                held = list(fake.adapters)
        # The first adapters are random, to see that all projections are adapted.
        assert first == "weights" and len(names) == 3 and used == set(names)
        assert len({probe, *names}) == 4 and held == [names[-1]]
        assert not fake.adapters  # at the end it holds none of ours
        assert all(f"-{version}-" in name for version, name in enumerate(names, start=1))
        for name, tensor in read_tensors(folder).items():
            np.testing.assert_array_equal(base[name], tensor)
        a, b = sorted(name for name in written if "layers.0.self_attn.q_proj" in name)
        kernels = adapters["layers"]["attention"]["q_proj"]
        np.testing.assert_array_equal(written[a], kernels["lora_a"][0].T)
        np.testing.assert_array_equal(written[b], kernels["lora_b"][0].T)
        assert same(rollouts[0], rollouts[2]) and not same(rollouts[0], rollouts[1])

    @pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
    def test_a_restarted_server_gets_base_and_adapters_again(
        self, actor, folder, prompts, adapters, kind
    ):
        with FakeServer(kind) as fake:
            fake.adapters = {}
            engine = self.make_engine(actor, adapters, folder, url=fake.url)
            with running(engine):
                first = self.generate(engine, actor, prompts, adapters)

                def restart(reply, number):
                    if number == 50:
                        fake.adapters, fake.version = {}, "default"
                    return reply | {"version": fake.version}

                fake.fault, fake.loaded = restart, []
                assert same(self.generate(engine, actor, prompts, adapters), first)
        assert [name == "weights" for name in fake.loaded] == [False, True, False]

    @pytest.mark.parametrize("refusal", ["", "no adapters"])
    def test_adapters_that_were_not_loaded_are_tried_again(
        self, actor, folder, prompts, adapters, monkeypatch, refusal
    ):
        """The ones before are forgotten, loaded too late or not, and a refusal is still one."""
        with FakeServer() as fake:
            fake.adapters, fake.refusal = {}, refusal
            engine = self.make_engine(actor, adapters, folder, url=fake.url)
            post, tried = HTTPClient.post, []

            def be_late(self, route, content):
                if route == "/v1/load_lora_adapter":
                    tried.append(json.loads(content)["lora_name"])
                    if len(tried) % 2:
                        if not refusal:
                            post(self, route, content)
                        raise RequestFault(f"{route}: TimeoutError")
                return post(self, route, content)

            monkeypatch.setattr(HTTPClient, "post", be_late)
            with running(engine):
                for change in (0, 1):
                    self.generate(engine, actor, prompts, adapters, change)
                assert engine.takes_adapters is not bool(refusal)
                assert list(fake.adapters) == ([] if refusal else tried[-1:])

    def test_a_server_of_ours_starts_with_the_base(self, actor, folder, prompts, adapters, python):
        """A new one gets the newest adapters."""
        rollouts = []
        for arguments in ("--die-after=30", ""):
            vllm = VLLM(python=python, arguments=arguments)
            engine = self.make_engine(actor, adapters, folder, engine="vllm", vllm=vllm)
            with running(engine):
                rollouts.append(self.generate(engine, actor, prompts, adapters, 0.5))
                log = engine.weights.with_name("vllm.log").read_text()
            assert log.count("started with") == log.count("with adapters") == 1 + bool(arguments)
            assert "--max-lora-rank=16" in log and "in each worker" not in log
        assert same(*rollouts)

    @pytest.mark.parametrize(
        ("kind", "adapters_of_server", "refusal", "changes", "reason"),
        [
            ("vLLM", None, "", {}, "the server lacks /v1/load_lora_adapter, .*--enable-lora"),
            ("vLLM", {}, "rank 9 is above max_lora_rank 8", {}, "HTTP 500 .*max_lora_rank 8"),
            ("SGLang", None, "", {}, "the server lacks /load_lora_adapter, .*SGLang with --enable"),
            ("SGLang", {}, "LoRA is not enabled", {}, "HTTP 400 .*LoRA is not enabled"),
            ("vLLM", {}, "", {"family": "phi3", "qkv_bias": False}, "phi3 hold q_proj in larger"),
        ],
    )
    def test_what_a_server_cannot_do_is_said_and_adapters_are_merged(
        self, actor, tmp_path, prompts, caplog, kind, adapters_of_server, refusal, changes, reason
    ):
        architecture = dataclasses.replace(tiny_actor.ARCHITECTURE, **changes)
        actor = tiny_actor.Actor(architecture) if changes else actor
        adapters = init_adapters(architecture, LORA, jax.random.key(1), "lm")
        save.export_checkpoint(actor.stacked, architecture, tmp_path / "model")
        with FakeServer(kind) as fake:
            fake.adapters, fake.refusal = adapters_of_server, refusal
            engine = self.make_engine(actor, adapters, tmp_path / "model", url=fake.url)
            with running(engine):
                self.generate(engine, actor, prompts, adapters, 0.5)
                self.generate(engine, actor, prompts, adapters, 0.25)
                merged = read_tensors(engine.weights)
        (record,) = caplog.records
        assert re.search(f"adapters are merged into the weights: .*{reason}", record.message)
        assert fake.loaded[-2:] == ["weights", "weights"] and not fake.adapters
        assert not fake_rollout_server.adapters_of(fake.requests[-1])
        adapters = jax.tree.map(lambda x: x[0] + 0.25, adapters["layers"]["mlp"]["down_proj"])
        kernel = actor.stacked["layers"]["mlp"]["down_proj"]["kernel"][0]
        expected = lora.merge_kernel(kernel, adapters["lora_a"], adapters["lora_b"], LORA.scale)
        sent = merged["model.layers.0.mlp.down_proj.weight"]
        np.testing.assert_allclose(sent.T, expected, rtol=1e-6)

    @pytest.mark.parametrize(
        ("rank", "arguments", "reason"),
        [(513, "", "rank=513 is above .*512"), (2, "--no-enable-lora", "--no-enable-lora")],
    )
    def test_a_vllm_of_ours_is_asked_for_what_it_can_do(
        self, actor, folder, python, adapters, caplog, rank, arguments, reason
    ):
        vllm = VLLM(python=python, arguments=arguments)
        adapted = dataclasses.replace(LORA, rank=rank)
        engine = self.make_engine(actor, adapters, folder, adapted, engine="vllm", vllm=vllm)
        engine.start()
        assert not engine.takes_adapters and re.search(reason, caplog.text)

    def test_a_server_that_leaves_adapters_out_gets_merged_weights(
        self, actor, folder, prompts, adapters, monkeypatch, caplog
    ):
        """Random adapters are tried first, as new ones would change nothing yet."""
        with FakeServer() as fake:
            fake.adapters = {}
            engine = self.make_engine(actor, adapters, folder, url=fake.url)

            def differ(params, probe):
                """The server's log-probs are those without adapters of down_proj."""
                q_proj = params["layers"]["attention"]["q_proj"]["lora_b"]
                down_proj = params["layers"]["mlp"]["down_proj"]["lora_b"]
                return [0.1 * (not q_proj.any()) + 0.2 * bool(down_proj.any()), 0.0]

            monkeypatch.undo()
            monkeypatch.setattr(engine, "_differences", differ)
            monkeypatch.setattr(engine, "_compare", lambda params: None)
            with running(engine):
                self.generate(engine, actor, prompts, adapters)
        assert "its log-probs show no adapters on down_proj" in caplog.text
        assert fake.loaded[-1] == "weights"


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-sécret"])
def test_a_key_is_never_shown(key, monkeypatch):
    monkeypatch.setenv(rollout_server.KEY_VARIABLE, key)
    with pytest.raises((UserError, RequestFault)) as caught:
        HTTPClient("http://127.0.0.1:9", rollout_server.KEY_VARIABLE, 1).get("/openapi.json")
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(("tokens", "logprobs"), [(None, []), ([3], None), ([3], ["-1"])])
def test_what_is_no_list_of_tokens_is_a_fault_and_no_traceback(tokens, logprobs):
    with pytest.raises(RequestFault):
        server.read_response(Reply(tokens, logprobs, version=None), SAMPLING, V)
