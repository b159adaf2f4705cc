"""Options of sampling, of dialogues, and of engines."""

import dataclasses
import shlex

from jax_ppo.config import option_rules as rule
from jax_ppo.config.option import (
    ADVANTAGES,
    MODELS,
    PPO,
    OptionRule,
    option,
    redeclare,
    section,
    unread_unless,
)
from jax_ppo.config.parsing import parse_strings
from jax_ppo.registries import ROLLOUT_ENGINES

# fmt: off
# As in schema.py.


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of drawing tokens."""

    temperature: float = option(0.0, "divisor of the logits; 0 is greedy", at_least=0)
    top_k: int = option(-1, "draw from the k most likely tokens; -1: from all",
        at_least=-1, not_zero=True, rules=(rule.DRAWS_HELD_OUT,))
    top_p: float = option(1.0,
        "draw from the most likely tokens that together have this probability",
        above=0, at_most=1, rules=(rule.DRAWS_HELD_OUT,))
    min_p: float = option(0.0,
        "draw from the tokens at least this fraction as likely as the most likely one",
        at_least=0, at_most=1, rules=(rule.DRAWS_HELD_OUT,))
    n: int = option(1, "responses per prompt", unit="responses", at_least=1,
        rules=(OptionRule(lambda c: (
            c.rollout.val_kwargs.temperature or c.rollout.multi_turn.environment),
            "`rollout.val_kwargs.temperature` is above 0, or there is an environment",
            "a temperature of 0 repeats one response; set config.rollout.val_kwargs.temperature "
            "above 0"),))

    @property
    def truncates(self) -> bool:
        """Return whether unlikely tokens are left out of a draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class RolloutMesh:
    """The mesh for decoding, over the devices of `mesh`, or over others.

    It has no fsdp axis: decoding reads every weight for each token.
    """

    model: int | None = option(None,
        "devices that split each matrix while decoding; unset: decoding uses `mesh`, or 1 with "
        "`rollout.mesh.devices`",
        unit="devices", at_least=1,
        rules=(OptionRule(lambda c: not ROLLOUT_ENGINES.lookup(c.rollout.engine).is_external,
            ROLLOUT_ENGINES.condition(lambda entry: entry.is_external, negated=True),
            "config.rollout.engine={c.rollout.engine!r} does not decode on the mesh; unset "
            "it"),))
    devices: int = option(0,
        "devices that only decode, the last of each process, while those of `mesh` learn "
        "(docs/sample-sources.md#devices-that-only-decode); 0: those of `mesh` decode",
        unit="devices", at_least=0, read_by=PPO,
        rules=(
            rule.engine_is_built_in("decodes elsewhere; use the built-in engine"),
            OptionRule(lambda c: c.rollout.max_staleness > 0,
                "`rollout.max_staleness` is at least 1",
                "these devices would decode nothing while the others learn; set "
                "config.rollout.max_staleness to 1 or more")))
    data: int = option(-1,
        "groups of devices with a copy of the weights each; -1: as many as fit",
        unit="groups", at_least=-1, not_zero=True, rules=(rule.HAS_ROLLOUT_MESH,))


@dataclasses.dataclass(frozen=True)
class MultiTurn:
    """Dialogues: responses of several turns, which an environment answers."""

    environment: str = option("",
        "environment that answers the policy's turns: a class, `module:Class` or `file.py:Class` "
        "(environments/protocol.py, or with Gymnasium's methods); `gymnasium:ID`; tools, "
        "`tools:calculator,python,file.py:function`; or a server, http://HOST:PORT, which gets "
        "the environment variable JAX_PPO_ENVIRONMENT_KEY, if set, as a bearer token; empty: a "
        "response is one turn",
        rules=(
            rule.engine_is_built_in("has no environment; use the built-in engine"),
            rule.option_is("reward.process_rewards", False,
                "the environment rewards turns; set config.reward.process_rewards=False"),
            OptionRule(lambda c: ":" in c.rollout.multi_turn.environment, "",
                "expected module:Class, path/to/file.py:Class or http://HOST:PORT"),
            rule.DRAWN_WITHIN_STEP,
            rule.DRAWN_ONCE))
    max_assistant_turns: int | None = option(None,
        "turns of the policy after which a response is cut off; unset: no limit",
        unit="turns", at_least=1, rules=(rule.HAS_ENVIRONMENT,))
    max_turn_length: int | None = option(None,
        "tokens after which a turn ends; unset: data.max_response_length",
        unit="tokens", at_least=1, rules=(rule.HAS_ENVIRONMENT,))
    max_observation_length: int = option(64,
        "maximum length of an observation; longer ones are cut",
        unit="tokens", at_least=1, rules=(rule.HAS_ENVIRONMENT,))
    timeout: float = option(60.0,
        "longest time for a `step` of the environment (the first includes `reset`), after which "
        "the dialogue ends with a reward of 0 for the turn",
        unit="seconds", above=0, rules=(rule.HAS_ENVIRONMENT,))
    observation_role: str = option("",
        "role under which the chat template renders observations, such as user; empty: they are "
        "inserted unchanged (results of tools: as the role tool)",
        rules=(rule.HAS_ENVIRONMENT,))
    url_timeout: float = option(20.0,
        "longest time for a call of the environment's server",
        unit="seconds", above=0,
        rules=(
            rule.ENVIRONMENT_IS_SERVER,
            OptionRule(lambda c: not rule.ENVIRONMENT_IS_SERVER.is_met(c) or (
                c.rollout.multi_turn.url_timeout < c.rollout.multi_turn.timeout),
                "it is below `rollout.multi_turn.timeout`",
                "expected less than "
                "config.rollout.multi_turn.timeout={c.rollout.multi_turn.timeout}, which bounds "
                "all calls of a turn together", at_default=True)))
    url_retries: int = option(2,
        "retries of a call that the environment's server refused (429, 503) or did not accept; "
        "`reset`, and `step` if the server permits it, are also retried after other faults",
        at_least=0, rules=(rule.ENVIRONMENT_IS_SERVER,))
    action_field: str = option("",
        "field of the object that the environment's server takes as action, such as `message`; "
        "empty: the action is a text",
        rules=(rule.ENVIRONMENT_IS_SERVER,))
    observation_field: str = option("",
        "field of the object that the environment's server returns as observation; empty: it is a "
        "text",
        rules=(rule.ENVIRONMENT_IS_SERVER,))
    info_metrics: str = option("",
        "numbers in the `info` of a server's or Gymnasium's environment that become metrics "
        "environment/NAME",
        is_list=True, rules=(rule.HAS_ENVIRONMENT,))
    reward: str = option("sum",
        "sum: the environment's rewards and the reward of the response; environment: only the "
        "environment's",
        choices=("sum", "environment"),
        rules=(
            OptionRule(lambda c: not any((
                c.reward.function, c.reward.terms, c.reward.url, c.reward.model_path)),
                "no other reward is set",
                "ignores the rewards that config.reward sets; unset function, terms, url and "
                "model_path there, or set config.rollout.multi_turn.reward='sum'"),
            rule.HAS_ENVIRONMENT))


@dataclasses.dataclass(frozen=True)
class VLLM:
    """The vLLM that a run starts and ends, on this machine."""

    python: str = option("", "interpreter of an environment that has vLLM",
        rules=(rule.STARTS_VLLM,))
    arguments: str = option("",
        "further arguments, such as --gpu-memory-utilization=0.4 --tensor-parallel-size=2",
        parse=shlex.split, rules=(rule.STARTS_VLLM,))


@dataclasses.dataclass(frozen=True)
class RolloutOptions(Sampling):
    """Sampling for training."""

    # Training cannot be greedy: a policy gradient needs samples.
    temperature: float = option(1.0,
        "divisor of the logits, in sampling and training",
        above=0, read_by=ADVANTAGES,
        rules=(OptionRule(lambda c: not (
            ROLLOUT_ENGINES.lookup(c.rollout.engine).is_server
            and (c.rollout.truncates or c.rollout.min_new_tokens)),
            ROLLOUT_ENGINES.condition(lambda entry: entry.is_server, negated=True),
            "servers report log-probs before temperature and filters or after both; set it to "
            "1, unset top_k, top_p, min_p and min_new_tokens, or use the built-in engine"),))
    top_k: int = redeclare(Sampling, "top_k", read_by=PPO, rules=())
    top_p: float = redeclare(Sampling, "top_p", read_by=PPO, rules=())
    min_p: float = redeclare(Sampling, "min_p", read_by=PPO, rules=())
    n: int = redeclare(Sampling, "n",
        read_by=PPO,
        rules=(*rule.compares_responses(lambda c: c.rollout.n),))
    engine: str = option("built-in",
        "generator of responses, or your own RolloutEngine, `module:Class` or `file.py:Class` "
        "(sampler/engine.py)",
        choices=tuple(ROLLOUT_ENGINES), is_plugin=True, aliases=ROLLOUT_ENGINES.other_names(),
        rules=(
            *map(rule.has_server, ROLLOUT_ENGINES.names(lambda entry: entry.is_server)),
            rule.DRAWN_WITHIN_STEP,
            rule.DRAWN_ONCE))
    weights_dir: str = option("",
        "folder in which an external engine finds the weights of each step, shared with a server "
        "on another machine; empty: shared memory, or the temporary folder if two copies do "
        "not fit",
        rules=(OptionRule(lambda c: ROLLOUT_ENGINES.lookup(c.rollout.engine).is_external,
            ROLLOUT_ENGINES.condition(lambda entry: entry.is_external)),))
    url: str = option("",
        "address of a running server that samples, http://HOST:PORT; it gets the environment "
        "variable JAX_PPO_ROLLOUT_KEY, if set, as a bearer token",
        rules=(
            rule.ENGINE_IS_SERVER,
            OptionRule(lambda c: not c.rollout.url.rstrip("/").endswith("/v1"), "",
                "expected the address below which /openapi.json is, without /v1")))
    url_timeout: float = option(600.0, "longest wait for one response of a server",
        unit="seconds", above=0, rules=(unread_unless(rule.ENGINE_IS_SERVER),))
    vllm: VLLM = section(VLLM)
    max_num_seqs: int | None = option(None,
        "samples that a device decodes at once, each followed by another when it ends; auto: as "
        "many as fit into memory, or 256 where its size is unknown, as on CPUs and outside of JAX",
        unit="samples", at_least=1, is_automatic=True)
    stop: str = option("",
        'strings that end a response or a turn: one string, or a JSON list such as ["Question:", '
        '"\\n\\n"]; the token that completes one is part of the response',
        is_json=True, parse=parse_strings)
    min_new_tokens: int = option(0,
        "minimum; earlier no EOS is drawn and no stop string counts", unit="tokens", at_least=0,
        rules=(OptionRule(lambda c: c.rollout.min_new_tokens <= c.data.max_response_length,
            "it is at most `data.max_response_length`",
            "must be at most config.data.max_response_length={c.data.max_response_length}"),))
    attention: str = option("auto",
        "attention in decoding: xla runs everywhere; cudnn needs model.attention=cudnn and has no "
        "sliding window; auto: cudnn where it can run",
        choices=("auto", "xla", "cudnn"), rules=(unread_unless(rule.HAS_BUILT_IN_ENGINE),))
    quantization: str = option("none",
        "how weights are stored for decoding: none, as model.dtype; int8, half of bfloat16's "
        "memory, but a slightly different policy (algorithm.rollout_is corrects that)",
        choices=("none", "int8"), rules=(rule.HAS_BUILT_IN_ENGINE,))
    logprob_micro_batch_size_per_device: int | None = option(None,
        "packed rows that a device processes at once without gradients; auto: as for the actor",
        unit="rows", at_least=1, is_automatic=True, read_by=MODELS, rules=(rule.DRAWN_ONCE,))
    reuse_logprobs: str = option("auto",
        "take the sampler's log-probs as the old policy's: always (ratios then start at 1 up to "
        "rounding, percents in bfloat16); never, compute them again; auto, where rounding cannot "
        "bias the update",
        choices=("auto", "always", "never"), read_by=PPO,
        rules=(
            OptionRule(lambda c: c.rollout.reuse_logprobs != "always" or (
                not ROLLOUT_ENGINES.lookup(c.rollout.engine).is_external),
                "the engine is built-in, for `always`",
                "config.rollout.engine={c.rollout.engine!r} rounds differently, so its log-probs "
                "are compared with the trainer's; set it to 'auto'"),
            OptionRule(
                lambda c: c.rollout.reuse_logprobs != "always" or c.algorithm.rollout_is == "none",
                "`algorithm.rollout_is` is none, for `always`",
                "leaves config.algorithm.rollout_is={c.algorithm.rollout_is!r} no other log-probs "
                "to compare the sampler's with; set it to 'auto'"),
            rule.DRAWN_ONCE))
    exact: bool = option(False,
        "draw each token again from a forward pass over the rows of the update, so that sampling "
        "and update have bit-identical log-probs (docs/sample-sources.md)",
        read_by=PPO,
        rules=(
            OptionRule(lambda c: not rule.HAS_ROLLOUT_MESH.is_met(c) and all(
                getattr(c.mesh, axis) == 1
                for axis in ("fsdp", "model", "stage", "context", "expert")),
                "`mesh.data` is the only axis, also of decoding",
                "sums over other axes depend on their sizes; leave config.mesh.fsdp, model, stage,"
                " context and expert at 1, config.rollout.mesh.devices at 0, and "
                "config.rollout.mesh.model unset"),
            rule.SEVERAL_TOKENS))
    max_staleness: int = option(0,
        "updates by which sampling weights may be older than trained ones: 0, sample within each "
        "step; 1, sample the next batch while this one is scored; more, partial rollouts, whose "
        "unfinished responses continue under newer weights for at most this many steps",
        unit="steps", at_least=0, read_by=PPO,
        rules=(
            rule.DRAWN_ONCE,
            OptionRule(lambda c: c.algorithm.rollout_is != "none",
                "`algorithm.rollout_is` is token or sequence",
                "the sampling weights are older than the weights that are trained; set "
                "config.algorithm.rollout_is to 'token' or 'sequence'"),
            rule.SEVERAL_TOKENS))
    partial_length: int | None = option(None,
        "tokens of each response that partial rollouts draw at a time; unset: an eighth of "
        "data.max_response_length",
        unit="tokens", at_least=1, read_by=PPO,
        rules=(
            OptionRule(lambda c: c.rollout.max_staleness > 1, "`rollout.max_staleness` is above 1"),
            OptionRule(lambda c: c.rollout.max_staleness < 2 or (
                c.rollout.partial_length < c.data.max_response_length),
                "it is below `data.max_response_length`",
                "expected fewer tokens than "
                "config.data.max_response_length={c.data.max_response_length}")))
    keep: int | None = option(None,
        "responses per prompt to learn from, of the n that are sampled; unset: all",
        unit="responses", at_least=1, read_by=PPO,
        rules=(
            rule.REWARDS_BY_RULE,
            rule.NEWEST_WEIGHTS,
            OptionRule(lambda c: c.rollout.keep <= c.rollout.n, "it is at most `rollout.n`",
                "expected at most config.rollout.n={c.rollout.n}"),
            rule.DRAWN_ONCE,
            *rule.compares_responses(lambda c: c.rollout.keep or c.rollout.n)))
    keep_by: str = option("spread",
        "responses to keep: spread, those whose scores differ most (PODS); best, those with the "
        "highest",
        choices=("spread", "best"), read_by=PPO, rules=(rule.is_set("rollout.keep"),))
    multi_turn: MultiTurn = section(MultiTurn)
    mesh: RolloutMesh = section(RolloutMesh)
    val_kwargs: Sampling = section(Sampling)
