"""Loading of the environment that `rollout.multi_turn.environment` names."""

import copy
import functools
import importlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from jax_ppo.config import parsing, plugins
from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.data.chat_templates import (
    ChatTemplate,
    MessageFrame,
    render_prompt,
    template_variables,
)
from jax_ppo.data.messages import join_contents
from jax_ppo.data.tokenizer import encode_text
from jax_ppo.environments.adapters import (
    GymnasiumDialogue,
    GymnasiumEnvironment,
    RemoteEnvironment,
    has_gymnasium_reset,
)
from jax_ppo.environments.host import HostEnvironment
from jax_ppo.environments.protocol import (
    ENVIRONMENT_OPTION,
    FAILURES,
    EnvironmentLost,
    validate_metric_names,
)
from jax_ppo.environments.tool_calls import ROLE, TOOLS_PREFIX, ToolEnvironment, parse_calls
from jax_ppo.errors import UserError, shorten
from jax_ppo.http_client import RequestFault
from jax_ppo.types import Example

_GYMNASIUM = "gymnasium:"


def load_environment_class(options: MultiTurn) -> Callable[..., Any] | None:
    """Return what makes environments; `None` if each response is a single turn.

    Raise `UserError` if it cannot be imported or constructed, or lacks a method.
    """
    name = options.environment
    if not name:
        return None
    setting = f"config.{ENVIRONMENT_OPTION}={name!r}"
    info_metrics = parsing.parse_names(options.info_metrics)
    info_setting = f"config.rollout.multi_turn.info_metrics={options.info_metrics!r}"
    validate_metric_names(info_metrics, info_setting)
    if name.startswith(("http://", "https://")):
        return RemoteEnvironment(options, info_metrics)
    if name.startswith(TOOLS_PREFIX):
        if info_metrics:
            raise UserError(f"{info_setting}: tools have no info; they report their own metrics")
        return ToolEnvironment(options)
    if name.startswith(_GYMNASIUM):
        try:
            gymnasium = importlib.import_module("gymnasium")
        except ImportError:
            raise UserError(f"{setting}: needs Gymnasium: pip install gymnasium") from None
        environment_class: Any = functools.partial(gymnasium.make, name.removeprefix(_GYMNASIUM))
    else:
        environment_class = plugins.load_plugin(name, ENVIRONMENT_OPTION, (), by_name=True)
    # A function makes environments, too: one of them shows which kind.
    is_class = isinstance(environment_class, type)
    made = environment_class if is_class else _try(setting, environment_class)
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise UserError(
                f"{setting}: has no method {method}; expected a class as in "
                "jax_ppo/environments/protocol.py, or Gymnasium's methods"
            )
    if has_gymnasium_reset(made):
        if not is_class:
            _try(setting, GymnasiumDialogue(made, ()).close)
        return GymnasiumEnvironment(name, environment_class, info_metrics)
    if not is_class:
        raise UserError(
            f"{setting}: is a function that makes no environment with Gymnasium's methods; "
            "expected a class"
        )
    if info_metrics:
        raise UserError(
            f"{info_setting}: {name} has no info of Gymnasium's; name its metrics in metric_names"
        )
    validate_metric_names(getattr(environment_class, "metric_names", ()), setting)
    return environment_class


def _try(setting: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call to the user's code returns; raise `UserError` if it fails."""
    try:
        return call(*arguments)
    except (RequestFault, EnvironmentLost) as error:
        raise UserError(str(error)) from error
    except FAILURES as error:
        raise UserError(
            f"{setting}: failed: {type(error).__name__}: {error}",
            details="".join(traceback.format_exception(error, limit=-4)),
        ) from error


def describe_tools(
    environment_class: Callable[..., Any] | None, examples: list[Example]
) -> list[Example]:
    """Describe tools, if any, in the examples; raise `UserError` for a plain-text prompt."""
    if isinstance(environment_class, ToolEnvironment):
        return environment_class.describe(examples)
    return examples


def try_first_reset(environment_class: Callable[..., Any] | None, example: Example) -> str:
    """Try, before a run, what an adapted environment's reset shows and what confines tools' code.

    Return a note, else "", if the policy does not see what is shown first, or if the system cannot
    confine the code that it writes. Raise `UserError` if it fails, or the server does not answer.
    """
    if isinstance(environment_class, ToolEnvironment):
        return environment_class.describe_gaps()
    if not isinstance(environment_class, RemoteEnvironment | GymnasiumEnvironment):
        return ""
    setting = f"config.{ENVIRONMENT_OPTION}={environment_class}"
    dialogue = _try(setting, environment_class)
    observation: str = _try(setting, dialogue.reset, copy.deepcopy(example), 0)
    if isinstance(dialogue, GymnasiumDialogue):
        _try(setting, dialogue.close)
    if observation.strip() in join_contents(example.prompt):
        return ""
    return (
        f"{environment_class}: the policy does not see the first observation, "
        f"{shorten(observation)!r}: reset returns it, but the prompt does not contain it"
    )


def make_environment(
    environment_class: Callable[..., Any],
    options: MultiTurn,
    tokenizer: Any,
    examples: Sequence[Example],
    chat_template: ChatTemplate = True,
) -> HostEnvironment:
    """Construct the environment for the decode loop; training examples come before held-out ones.

    Raise `UserError` if the template does not render observations as the options want.
    """
    return HostEnvironment(
        environment_class,
        tokenizer,
        examples,
        observation_length=options.max_observation_length,
        timeout=options.timeout,
        metric_names=getattr(environment_class, "metric_names", ()),
        frame=_make_frame(environment_class, options, tokenizer, chat_template),
    )


def _require_readable_calls(setting: str, tokenizer: Any, chat_template: ChatTemplate) -> None:
    """Raise `UserError` if the template writes calls in a form not read; none at all is fine."""
    name, arguments, result = "a-tool", {"an-argument": "a-value"}, "a-result"
    function = {"name": name, "arguments": arguments}
    messages: Any = (
        {"role": "user", "content": "a-question"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": ROLE, "content": result},
    )
    try:
        text, _ = render_prompt(tokenizer, messages, chat_template)
    except Exception:  # of a template that takes no calls in this form
        return
    written = text.partition(result)[0]
    if name not in written:
        return
    # As the host reads a turn.
    tokens = encode_text(tokenizer, written, special=False)
    (read,) = tokenizer.batch_decode([tokens], skip_special_tokens=True)
    try:
        is_read = list(parse_calls(read)) == [(name, arguments)]
    except ValueError:
        is_read = False
    if not is_read:
        form = shorten(repr(written.partition("a-question")[2]))
        raise UserError(
            f"{setting}: the chat template writes calls of tools as {form}; only JSON between "
            "<tool_call> and </tool_call>, as text, is read"
        )


def _make_frame(
    environment_class: Callable[..., Any],
    options: MultiTurn,
    tokenizer: Any,
    chat_template: ChatTemplate,
) -> MessageFrame | None:
    """Return what surrounds observations, `None` if they are inserted unchanged."""
    has_tools = isinstance(environment_class, ToolEnvironment)
    role = options.observation_role or (ROLE if has_tools else "")
    if not role:
        return None
    setting = f"config.rollout.multi_turn.observation_role={role!r}"
    if has_tools:
        setting = f"config.{ENVIRONMENT_OPTION}={environment_class}"
    if chat_template is False or not tokenizer.chat_template:
        raise UserError(
            f"{setting}: needs a chat template; config.data.chat_template is off or the tokenizer "
            "has none"
        )
    if has_tools and "tools" not in template_variables(tokenizer):
        raise UserError(f"{setting}: the tokenizer's chat template does not describe tools")
    try:
        frame = MessageFrame(tokenizer, role, chat_template)
    except ValueError as error:
        raise UserError(
            f"{setting}: the chat template renders no message of the role {role!r} after the "
            f"assistant's: {error}"
        ) from error
    if has_tools:
        _require_readable_calls(setting, tokenizer, chat_template)
    if options.max_observation_length <= frame.overhead:
        raise UserError(
            f"config.rollout.multi_turn.max_observation_length={options.max_observation_length}: "
            f"the chat template writes {frame.overhead} tokens around an observation; set it to "
            "more"
        )
    return frame
