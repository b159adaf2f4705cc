"""Rewards from a server: a language model as the judge, or a reward model behind HTTP.

With `reward.url_model` the server speaks OpenAI's chat completions, and its reply holds the score
as JSON or as its last number. Without it the server takes a JSON object with prompt, response,
ground_truth and data_source, and returns a number or an object with `score`.

A call blocks, so the rule runs in worker processes: `reward.workers` calls are made at a time.
"""

import dataclasses
import email.message
import functools
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError, shorten
from jax_ppo.rewards.custom import parse_reward_output
from jax_ppo.rewards.rules import RewardResult
from jax_ppo.rewards.samples import RewardFunction, RewardRow, RewardTimeout

# Sent as a bearer token. It never occurs in an option, a message or a file of the run.
KEY_VARIABLE = "JAX_PPO_REWARD_KEY"
PLACEHOLDERS = ("{prompt}", "{response}", "{ground_truth}")

_MAX_REPLY = 1_000_000  # bytes
_FIRST_PAUSE = 0.5  # seconds before the second attempt; doubled for each further one
_CACHE_SIZE = 10_000  # replies per worker process
# The hyphen of "1-5" or "GPT-4" is no minus. With an exponent, or commas between thousands:
# otherwise -3 would be read in 1e-3.
_NUMBER = re.compile(
    r"((?:(?<!\w)[-\u2212])?"
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d+)?)"
    # The end of the scale is not the score.
    r"(?:\W{0,4}(?:/|\bout\s+of\b)\W{0,4}\d+(?:\.\d+)?)?"
)
# A reply that is one block of code, as models write JSON.
_CODE_BLOCK = re.compile(r"\s*```\w*\n(.*)```\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Judge:
    """How responses are judged, and by which server; `config.reward` documents the fields."""

    url: str
    url_model: str
    url_prompt: str
    url_timeout: float
    url_retries: int

    @classmethod
    def from_options(cls, options: Reward) -> "Judge | None":
        """Return the judge of the options, `None` without `reward.url`.

        Raises:
          UserError: the address is not an HTTP address, or the prompt lacks `{response}`.
        """
        if not options.url:
            return None
        parts = urllib.parse.urlsplit(options.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"config.reward.url={options.url!r}: expected http://HOST/PATH or https://HOST/PATH"
            )
        if parts.username or parts.password:
            raise UserError(
                "config.reward.url: the address contains a user name or a password; set the "
                f"environment variable {KEY_VARIABLE} instead"
            )
        if "{response}" not in options.url_prompt:
            raise UserError(
                f"config.reward.url_prompt={shorten(options.url_prompt)!r}: expected text with "
                "{response}, and optionally {prompt} and {ground_truth}"
            )
        return cls(
            url=options.url,
            url_model=options.url_model,
            url_prompt=options.url_prompt,
            url_timeout=options.url_timeout,
            url_retries=options.url_retries,
        )

    def reward_function(self) -> RewardFunction:
        """Return the reward function; equal requests are sent once per process."""
        ask = functools.lru_cache(maxsize=_CACHE_SIZE)(self._ask)

        def score(row: RewardRow, response: str) -> RewardResult:
            request = json.dumps(self._request(row, response), ensure_ascii=False)
            value = ask(request)
            if self.url_model:
                value = _read_score(value)
            return parse_reward_output(value)

        return score

    def _request(self, row: RewardRow, response: str) -> dict[str, Any]:
        if not self.url_model:
            return {
                "prompt": row.prompt,
                "response": response,
                "ground_truth": row.ground_truth,
                "data_source": row.data_source,
            }
        values = (_as_text(row.prompt), response, str(row.ground_truth))
        replacements = dict(zip(PLACEHOLDERS, values, strict=True))
        pattern = "|".join(map(re.escape, PLACEHOLDERS))
        # A single pass leaves a placeholder that the response itself contains unchanged.
        content = re.sub(pattern, lambda match: replacements[match[0]], self.url_prompt)
        return {
            "model": self.url_model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
        }

    def _ask(self, request: str) -> Any:
        """Return the server's reply; retry after errors that may be temporary.

        Raises:
          RuntimeError: no attempt succeeded; `RewardTimeout` if the last one took too long.
        """
        problem = ""
        timed_out = False
        for attempt in range(self.url_retries + 1):
            timed_out = False
            if attempt:
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                return self._send(request)
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code} {error.reason}"
                # A refusal is final, unless the server is busy or broken.
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
                # While connecting, the error is the reason of a URLError.
                timed_out = isinstance(getattr(error, "reason", error), TimeoutError)
            except ValueError as error:
                problem = f"the reply is not JSON: {error}"
        error_type = RewardTimeout if timed_out else RuntimeError
        raise error_type(f"config.reward.url={_without_query(self.url)}: {problem}")

    def _send(self, request: str) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        # Half of a surrogate pair has no encoding.
        data = request.encode(errors="replace")
        message = urllib.request.Request(self.url, data, headers, method="POST")
        opener = urllib.request.build_opener(_RefuseRedirects)
        with opener.open(message, timeout=self.url_timeout) as reply:
            value = json.loads(reply.read(_MAX_REPLY))
        if not self.url_model:
            return value
        try:
            content = value["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
        # A number in a list of parts may be anything, such as an index.
        if not isinstance(content, str):
            raise ValueError("no choices[0].message.content with text")
        return content


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: key and data are sent only to the host that the user named."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: Any,
        code: int,
        msg: str,
        headers: email.message.Message,
        newurl: str,
    ) -> None:
        """Return `None`, which turns the redirect into an error."""


def _read_score(text: str) -> Any:
    """Return the score that a reply holds as JSON, or else its last number."""
    if block := _CODE_BLOCK.fullmatch(text):
        text = block[1]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, (dict, int, float)):
        return value
    numbers = _NUMBER.findall(text)
    if not numbers:
        raise ValueError(f"the judge's reply has no number: {shorten(text)!r}")
    return float(numbers[-1].replace(",", "").replace("\u2212", "-"))


def _as_text(prompt: str | tuple[dict[str, str], ...]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _without_query(url: str) -> str:
    """Return an address without its query, which may contain a key."""
    return urllib.parse.urlunsplit(urllib.parse.urlsplit(url)._replace(query="", fragment=""))
