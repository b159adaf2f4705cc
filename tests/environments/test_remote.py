"""An environment behind HTTP: episodes side by side, faults, limits, and no secret in a message."""

import contextlib
import http.server
import json
import re
import threading

import numpy as np
import pytest

from answering import answer_text, observed
from character_tokenizer import CharacterTokenizer
from jax_ppo import http_client
from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.environments.adapters import KEY_VARIABLE
from jax_ppo.environments.loading import load_environment_class, make_environment, try_first_reset
from jax_ppo.errors import UserError
from jax_ppo.types import NOTHING, Example
from serving import QuietHandler, serving

EXAMPLES = [Example(f"Guess {n}.", "mine", str(n), {"limit": n}) for n in range(20)]


class Handler(QuietHandler):
    """Counts each episode's turns up to the limit of its row."""

    def do_POST(self):
        body = json.loads(self.read_body())
        server = self.server
        with server.lock:
            server.requests.append((self.path, body, self.headers["Authorization"]))
            code = server.codes.pop(0) if server.codes else 200
        reply = {}
        if code == 200:
            reply = server.reply or self.take_turn(body)
        with contextlib.suppress(OSError):  # a client that gave up
            self.answer(code, json.dumps(reply).encode())

    def take_turn(self, body):
        episodes = self.server.episodes
        if self.path.startswith("/game/reset"):
            episodes[body["episode_id"]] = [body["extra_info"]["limit"], body["seed"], 0]
            reply = {"observation": {"text": "Guess"}, "reward": None, "done": False}
            return reply | {"repeatable": self.server.is_repeatable}
        # All turns of a batch are in flight together.
        if self.server.barrier:
            self.server.barrier.wait(timeout=10)
        episode = episodes[body["episode_id"]]
        episode[2] += 1
        limit, seed, turns = episode
        return {
            "observation": {"text": f"{seed}:{body['action']['message']}"},
            "reward": None if turns < limit else 0.5,
            "done": turns == limit,
            "info": {"turns": turns, "other": "text"},
        }


@pytest.fixture
def server(monkeypatch):
    """Yield a server; `codes` are its next replies' (200 once they are used up)."""
    monkeypatch.setattr(http_client, "_FIRST_PAUSE", 0.001)
    monkeypatch.setenv(KEY_VARIABLE, "hidden")
    with serving(Handler) as server:
        server.requests, server.codes, server.episodes = [], [], {}
        server.reply, server.barrier, server.lock = None, None, threading.Lock()
        server.is_repeatable = False
        server.url += "/game"
        yield server


def make(url, **options):
    fields = {"action_field": "message", "observation_field": "text", "info_metrics": "turns"}
    options = MultiTurn(environment=url, **{**fields, **options})
    server = load_environment_class(options)
    return server, make_environment(server, options, CharacterTokenizer(), EXAMPLES)


def test_each_dialogue_is_an_episode_and_all_are_stepped_side_by_side(server):
    server.barrier = threading.Barrier(3)
    remote, environment = make(server.url)
    answers = answer_text(environment, [2, 3, 4], "hi")
    assert observed(answers) == ["102:hi", "103:hi", "104:hi"]
    assert answers[2].tolist() == [0, 0, 0] and not answers[3].any()
    answers = answer_text(environment, [2, 3, 4], "ho", turn=1)
    assert observed(answers) == ["102:ho", "103:ho", "104:ho"]
    assert answers[2].tolist() == [0.5, 0, 0] and answers[3].tolist() == [True, False, False]
    np.testing.assert_array_equal(answers[4], [[2, 0]] * 3)
    assert len(server.episodes) == 3
    path, body, key = server.requests[0]
    assert path == "/game/reset" and key == "Bearer hidden"
    assert body | {"episode_id": 0, "seed": 0} == {
        "episode_id": 0,
        "seed": 0,
        "prompt": f"Guess {body['ground_truth']}.",
        "ground_truth": body["ground_truth"],
        "data_source": "mine",
        "extra_info": {"limit": int(body["ground_truth"])},
    }
    assert str(remote) == server.url


@pytest.mark.parametrize(
    ("codes", "calls", "fails"),
    [
        ([503, 429], 4, False),  # reset, twice refused
        ([500, 200], 3, False),  # a reset may be repeated
        ([200, 503, 429], 4, False),
        ([200, 500], 2, True),  # a step may have been taken
        ([200, 422], 2, True),
        ([302], 1, True),
    ],
)
def test_what_may_be_temporary_is_tried_again_and_no_turn_is_taken_twice(
    server, caplog, codes, calls, fails
):
    _, environment = make(server.url)
    server.codes = codes
    answers = answer_text(environment, [1], "hi")
    assert len(server.requests) == calls
    np.testing.assert_array_equal(answers[4], [[NOTHING, 1]] if fails else [[1, 0]])
    assert answers[2].tolist() == [0.0 if fails else 0.5]
    assert "hidden" not in caplog.text and "Traceback" not in caplog.text
    assert ("environment=http://127.0.0.1" in caplog.text) == fails


def test_a_server_that_says_so_gets_a_turn_again_by_its_number(server):
    _, environment = make(server.url)
    server.is_repeatable = True
    server.codes = [200, 500, 200, 502]
    assert answer_text(environment, [2], "hi")[4].tolist() == [[1, 0]]
    assert answer_text(environment, [2], "ho", turn=1)[4].tolist() == [[2, 0]]
    steps = [body for path, body, _ in server.requests if path.endswith("/step")]
    assert [body["turn"] for body in steps] == [0, 0, 1, 1]
    assert steps[0] == steps[1] and steps[2] == steps[3]


def test_a_server_that_keeps_failing_ends_the_run_after_some_calls(server, monkeypatch):
    monkeypatch.setattr("jax_ppo.environments.host.THREADS", 1)
    monkeypatch.setattr("jax_ppo.environments.adapters.MAX_FAULTS", 3)
    _, environment = make(server.url)
    server.codes = [500, 500, 500] * 2 + [200, 200] + [500] * 100
    answers = answer_text(environment, list(range(1, 20)), "hi")
    # Two dialogues cannot begin, one is answered, and three more fail: each after three resets.
    assert answers[4][:, -1].tolist() == [1, 1, 0] + [1] * 16
    assert len(server.requests) == 6 + 2 + 9
    for ends in (environment.raise_if_given_up, environment.raise_if_all_failed):
        with pytest.raises(UserError, match=r"3 consecutive calls of the server failed") as error:
            ends()
    assert "reset: config.rollout.multi_turn.environment=http://127" in str(error.value)
    assert "HTTP 500" in str(error.value)


@pytest.mark.parametrize(
    ("reply", "options", "problem"),
    [
        ([1], {}, "expected an object with observation, got [1]"),
        ({"observation": "x"}, {}, "expected an observation with text, got 'x'"),
        ({"observation": {"text": 5}}, {}, "expected text as observation, got 5"),
        ({"observation": ["x"]}, {"observation_field": ""}, "expected text as observation, got ['"),
        (
            {"observation": {"a": 1, "b": 2}},
            {"observation_field": ""},
            "the observation has the fields a, b; name one by config.rollout.multi_turn.obs",
        ),
    ],
)
def test_a_reply_of_another_form_is_named_before_the_run(server, reply, options, problem):
    remote, _ = make(server.url, url_retries=0, **options)
    server.reply = reply
    with pytest.raises(UserError, match=re.escape(problem)):
        try_first_reset(remote, EXAMPLES[1])


def test_a_server_that_is_not_there_or_hangs_is_named_before_the_run():
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as silent:
        remote, _ = make(f"http://127.0.0.1:{silent.server_port}", url_timeout=0.05)
        with pytest.raises(UserError, match="TimeoutError"):
            try_first_reset(remote, EXAMPLES[1])
    remote, _ = make("http://127.0.0.1:9", url_retries=0)
    with pytest.raises(
        UserError, match="environment=http://127.0.0.1:9: /reset: ConnectionRefusedError.*refused"
    ):
        try_first_reset(remote, EXAMPLES[1])


def test_a_key_that_no_header_can_hold_is_named_and_not_shown(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "hid\nden")
    with pytest.raises(UserError, match=f"{KEY_VARIABLE}: the key has characters") as error:
        make("http://host")
    assert "hid" not in str(error.value)
