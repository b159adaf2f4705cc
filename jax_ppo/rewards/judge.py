"""Rewards from a server: a language model as the judge, or a reward model behind HTTP.

With `reward.url_model` the server speaks OpenAI's chat completions, and its reply holds the score
as JSON or as its last number. Without it the server takes a JSON object with prompt, response,
ground_truth and data_source, and returns a number or an object with `score`.

A call blocks, so the rule runs in worker processes: `reward.workers` calls are made at a time.
"""

import contextlib
import functools
import json
import re
from typing import Any

from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError, shorten
from jax_ppo.http_client import HTTPClient
from jax_ppo.rewards.custom import read_reward_output
from jax_ppo.rewards.samples import RewardFunction, RewardResult, RewardRow
from jax_ppo.thoughts import after_thinking

KEY_VARIABLE = "JAX_PPO_REWARD_KEY"
PLACEHOLDERS = ("{prompt}", "{response}", "{ground_truth}")

_CACHE_SIZE = 10_000  # replies per worker process
# The hyphen of "1-5" or "GPT-4" is not a minus. With an exponent, or commas between thousands:
# otherwise -3 would be read in 1e-3.
_NUMBER = re.compile(
    r"((?:(?<!\w)[-\u2212])?"
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d+)?)"
    # The end of the scale is not the score.
    r"(?:\W{0,4}(?:/|\bout\s+of\b)\W{0,4}\d+(?:\.\d+)?)?"
)
# The JSON object in which models state the score; its other numbers are not scores.
_SCORE_OBJECT = re.compile(r'\{[^{}]*"score"\s*:[^{}]*\}')
# A reply that is one block of code, as models write JSON.
_CODE_BLOCK = re.compile(r"\s*```\w*\n(.*)```\s*", re.DOTALL)


def judge_function(options: Reward) -> RewardFunction:
    """Return the reward function that asks `reward.url`; equal requests are sent once per process.

    Raise `UserError` if the prompt lacks `{response}`, or the server's key cannot be sent.
    """
    server = HTTPClient(
        option="config.reward.url",
        url=options.url,
        key_variable=KEY_VARIABLE,
        timeout=options.url_timeout,
        retries=options.url_retries,
    )
    if "{response}" not in options.url_prompt:
        raise UserError(
            f"config.reward.url_prompt={shorten(options.url_prompt)!r}: expected text with "
            "{response}, and optionally {prompt} and {ground_truth}"
        )
    read = _read_message if options.url_model else _refuse_text
    ask = functools.lru_cache(maxsize=_CACHE_SIZE)(functools.partial(server.post, "", read=read))

    def score(row: RewardRow, response: str) -> RewardResult:
        value = ask(json.dumps(_make_request(options, row, response), ensure_ascii=False))
        if options.url_model:
            value = _read_score(value)
        return read_reward_output(value, response, "the server of config.reward.url")

    return score


def _make_request(options: Reward, row: RewardRow, response: str) -> dict[str, Any]:
    if not options.url_model:
        return {
            "prompt": row.prompt,
            "response": response,
            "ground_truth": row.ground_truth,
            "data_source": row.data_source,
        }
    prompt = row.prompt
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    values = (prompt, response, str(row.ground_truth))
    replacements = dict(zip(PLACEHOLDERS, values, strict=True))
    pattern = "|".join(map(re.escape, PLACEHOLDERS))
    # A single pass leaves a placeholder that the response itself contains unchanged.
    content = re.sub(pattern, lambda match: replacements[match[0]], options.url_prompt)
    return {
        "model": options.url_model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
    }


def _refuse_text(reply: Any) -> Any:
    if isinstance(reply, str):
        raise ValueError(f"expected a number or an object with score, got {shorten(reply)!r}")
    return reply


def _read_message(reply: Any) -> str:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    # A number in a list of parts may be anything, such as an index.
    if not isinstance(content, str):
        raise ValueError("no choices[0].message.content with text")
    return content


def _read_score(text: str) -> Any:
    """Return the score that a reply, after any thinking, holds as JSON or as its last number."""
    text = after_thinking(text)
    if block := _CODE_BLOCK.fullmatch(text):
        text = block[1]
    for stated in (text, *_SCORE_OBJECT.findall(text)[-1:]):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(stated)
            if isinstance(value, (dict, int, float)):
                return value
    numbers = _NUMBER.findall(text)
    if not numbers:
        raise ValueError(f"the judge's reply has no number: {shorten(text)!r}")
    return float(numbers[-1].replace(",", "").replace("\u2212", "-"))
