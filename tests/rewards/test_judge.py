"""A reward from a server, asked over HTTP."""

import contextlib
import json
import socket

import pytest

from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError
from jax_ppo.rewards import reward_functions
from jax_ppo.rewards.batch import score_batch
from jax_ppo.rewards.judge import KEY_VARIABLE, judge_function
from jax_ppo.rewards.samples import RewardRow, score_sample
from jax_ppo.rewards.worker_pool import RewardWorkers
from jax_ppo.types import Example
from serving import QuietHandler, serving

CHAT = RewardRow("mine", "4", {}, ({"role": "user", "content": "2+2?"},))


@pytest.fixture
def server():
    """Yield a server; `server.replies` are sent in turn, the last one for ever."""

    class Handler(QuietHandler):
        def do_POST(self):
            request = json.loads(self.read_body())
            self.server.requests.append((self.path, dict(self.headers), request))
            replies = self.server.replies
            code, reply = replies.pop(0) if len(replies) > 1 else replies[0]
            self.answer(code, reply.encode(), {"Location": "/elsewhere"} if code == 302 else {})

    with serving(Handler) as server:
        server.requests, server.replies = [], [(200, "0.5")]
        server.url += "/score?token=secret"
        yield server


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("jax_ppo.http_client._FIRST_PAUSE", 0.001)


def chat_reply(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def judge(server, **options):
    return judge_function(Reward(url=server.url, **options))


def test_a_server_is_sent_the_sample_and_returns_a_number_or_an_object(server, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "hidden")
    score = judge(server)
    assert score(CHAT, "four").score == 0.5
    path, headers, request = server.requests[0]
    assert path == "/score?token=secret" and headers["Authorization"] == "Bearer hidden"
    assert request == {
        "prompt": [{"role": "user", "content": "2+2?"}],
        "response": "four",
        "ground_truth": "4",
        "data_source": "mine",
    }
    server.replies = [(200, '{"score": 2, "acc": 1, "help": 0.25}')]
    result = score(CHAT, "4")
    assert (result.score, result.correct, result.extra) == (2.0, True, {"help": 0.25})


def test_equal_requests_are_sent_once(server):
    score = judge(server)
    for response in ("a", "b", "a"):
        score(CHAT, response)
    assert [request["response"] for *_, request in server.requests] == ["a", "b"]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("I give it 3 out of 10: 7.5", 7.5),
        ("-1", -1),
        ('{"score": 4}', 4),
        ("Score: .5", 0.5),
        ("Score: 1e-3", 0.001),
        ("Score: -1,250.5 points", -1250.5),
        ("Scores: 1,2", 2),
        ("**7**/10, so 7", 7),
        ("On a scale of 1-5", 5),
        ("I rate it 8/10.", 8),
        ("Score: **7.5** / **10**", 7.5),
        ("Score: 3 out of 5", 3),
        ("2/3 are fine: 4", 4),
        ("As GPT-4", 4),
        ("Score=\u22122.5", -2.5),
        ('```json\n{"score": 4, "of": 10}\n```', 4),
        ('Two errors.\n```json\n{"score": 4, "of": 10}\n```\nThat is 4 of 10.', 4),
        ('First {"score": 1}, rather {"score": 4, "confidence": 0.9}.', 4),
        ('{"score": 4,} of 10', 10),
        ('{"column": "score"} 4', 4),
        ('<think>{"score": 1}? Rather more.</think>\n4', 4),
    ],
)
def test_a_model_judges_in_words(server, reply, expected):
    server.replies = [(200, chat_reply(reply))]
    template = "Q {prompt} T {ground_truth} R {response}"
    score = judge(server, url_model="judge-1", url_prompt=template)
    assert score(CHAT, "{prompt}!").score == expected
    assert server.requests[0][2] == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": "Q user: 2+2? T 4 R {prompt}!"}],
        "temperature": 0,
    }


def test_half_a_surrogate_pair_in_a_response_reaches_the_server_as_a_question_mark(server):
    assert judge(server)(CHAT, "4\ud800").score == 0.5
    assert server.requests[0][2]["response"] == "4?"


def test_a_busy_or_broken_server_is_asked_again(server):
    server.replies = [(429, ""), (503, ""), (200, "not JSON"), (200, "1")]
    assert judge(server)(CHAT, "x").score == 1 and len(server.requests) == 4


@pytest.mark.parametrize(
    ("replies", "options", "problem", "calls"),
    [
        ([(401, "")], {}, "HTTP 401", 1),
        ([(302, "")], {}, "HTTP 302", 1),
        ([(500, "")], {"url_retries": 1}, "HTTP 500", 2),
        ([(200, "[")], {"url_retries": 0}, "unexpected reply: expected a number or an", 1),
        ([(200, "{}")], {"url_model": "m", "url_retries": 0}, "no choices", 1),
        (
            [(200, chat_reply([{"text": "4", "index": 0}]))],
            {"url_model": "m", "url_retries": 0},
            "with text",
            1,
        ),
        ([(200, chat_reply("well"))], {"url_model": "m"}, "has no number: 'well'", 1),
    ],
)
def test_failures_name_the_server_and_no_secret(
    server, monkeypatch, replies, options, problem, calls
):
    monkeypatch.setenv(KEY_VARIABLE, "hidden")
    server.replies = replies
    failure = score_sample(judge(server, **options), CHAT, "x")
    assert problem in failure.cause and len(server.requests) == calls
    assert "secret" not in failure.cause and "hidden" not in failure.cause


@pytest.mark.parametrize("workers", [0, 1])
def test_a_judge_that_hangs_is_given_up_after_consecutive_time_outs(workers):
    """It times out by itself, before `reward.timeout`, in the run's own process too."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        options = Reward(url=url, url_timeout=0.05, url_retries=1, max_timeouts=2)
        rule = judge_function(options)
        with RewardWorkers(options, 1) as pool:
            scored = score_batch(
                pool if workers else rule,
                [Example("q", "mine")] * 5,
                list("abcde"),
                Reward(fallback_score=-1.0, max_timeouts=2),
            )
        silent.setblocking(False)
        accepted = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                accepted += 1
    assert scored.failures == 5 and "TimeoutError" in scored.first_failure
    # Two samples, each asked twice; a worker may have begun the third.
    assert 4 <= accepted <= 4 + 2 * workers


def test_a_judge_that_refuses_is_asked_for_every_response(server):
    server.replies = [(401, "")]
    scored = score_batch(
        judge(server), [Example("q", "mine")] * 5, list("abcde"), Reward(max_timeouts=2)
    )
    assert scored.failures == len(server.requests) == 5


def test_workers_ask_the_judge_as_one_term_of_several(server):
    options = Reward(terms="exact:1.0,judge:0.5", url=server.url)
    assert reward_functions.needs_workers([], options) and reward_functions.has_rules(options)
    with RewardWorkers(options, 2) as pool:
        outcomes = pool.score([CHAT] * 3, ["4", "5", "6"])
    assert [outcome.score for outcome in outcomes] == [1.25, 0.25, 0.25]
    assert outcomes[0].extra["judge_term"] == 0.5


def test_a_prompt_without_the_response_is_named():
    with pytest.raises(UserError, match="config.reward.url_prompt='Rate it'"):
        judge_function(Reward(url="http://host/", url_prompt="Rate it"))
