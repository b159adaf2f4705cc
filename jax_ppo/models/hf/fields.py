"""JSON files of a checkpoint, and typed access to the fields of config.json.

Every field is either read here, with a type and a range, or listed as having no influence on what
the model computes. Any other field is refused, because it might change the numbers. Names that
begin with an underscore hold notes of transformers, such as `_name_or_path`: ignored.
"""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax_ppo.errors import UserError, named_file, nearest_name, shorten

Config = dict[str, Any]

MAX_SIZE = 2**31 - 1
# Far more than any model has. Names of tensors are listed per layer, so a limit is needed.
MAX_LAYERS = 10_000

# Fields of any family, of transformers 4 and 5 and other programs, that do not change the output.
HARMLESS_FIELDS = frozenset(
    """
    architectures attn_implementation auto_map begin_suppress_tokens
    cache_implementation chunk_size_feed_forward dtype finetuning_task gradient_checkpointing
    hidden_act hidden_activation id2label initializer_range is_decoder is_llama_config label2id
    max_sequence_length max_window_layers model_max_length name_or_path num_labels
    aux_loss_alpha ep_size mtp_num_hidden_layers mtp_use_dedicated_embeddings
    num_mtp_layers num_nextn_predict_layers seq_aux
    output_attentions output_hidden_states output_past output_router_logits prefix pretraining_tp
    problem_type return_dict router_aux_loss_coef router_jitter_noise sliding_window_pattern
    sliding_window_size task_specific_params tf_legacy_loss
    tokenizer_class torch_dtype torchscript transformers.js_config transformers_version
    unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attention_2

    attention_dropout attention_probs_dropout_prob classifier_dropout cls_dropout embd_pdrop
    activation_dropout attn_pdrop embedding_dropout hidden_dropout hidden_dropout_prob mlp_dropout
    pooler_dropout resid_pdrop residual_dropout
    summary_first_dropout summary_last_dropout

    n_ctx reorder_and_upcast_attn summary_activation summary_proj_to_labels summary_type
    summary_use_proj

    experts_per_token initial_context_length

    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
    block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc

    cls_token_id decoder_start_token_id mask_token_id sep_token_id unk_token_id

    bad_words_ids diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature
    top_k top_p typical_p
    """.split()
)

# Fields that no family reads, with the values that do not change the output.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "attention_chunk_size": (None,),
    "conv_bias": (False,),
    "cross_attention_hidden_size": (None,),
    "decoder_sparse_step": (1,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "mamba_ssm_dtype": ("float32",),
    "mlp_bias": (False,),
    "mlp_only_layers": ([], None),
    "per_layer_config": (None,),
    "pruned_heads": ({}, None),
    "quantization_config": (None, {}),
    "rope_interleaved": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False, None),
}


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise `UserError` if there is none, or no such file."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    if not isinstance(contents, dict):
        raise UserError(f"{path} must hold a JSON object; it holds {shorten(repr(contents))}")
    return contents


def write_json(path: Path, value: Any) -> None:
    """Write a value as an indented JSON file."""
    with named_file(path):
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class ConfigReader:
    """Reads fields of config.json and remembers which ones.

    A missing field has its default. null does not mean the default, and is an error unless a method
    says otherwise.
    """

    def __init__(
        self,
        values: Config,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        where: str = "config.json: ",
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start reading.

        Missing fields have the values of `defaults`; `where` precedes a field's name in errors, and
        `names` are those in the file of fields that callers call by other names.
        """
        self._values = _without_notes(values)
        self._defaults, self._where, self._names = defaults, where, names
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.name(name) in self._values

    def name(self, name: str) -> str:
        """Return the name of a field in the file."""
        return self._names.get(name, name)

    def error(self, message: str) -> UserError:
        """Return an error about these fields."""
        return UserError(self._where + message)

    def unsupported(self, name: str, value: Any, supported: str) -> UserError:
        """Return an error about a value that would be computed differently."""
        return self.error(f"{name} {shorten(repr(value))} is not supported, only {supported}")

    def any_value(self, name: str, default: Any = None) -> Any:
        """Return a field of whatever type."""
        name = self.name(name)
        self._read.add(name)
        if name in self._values:
            return self._values[name]
        return self._defaults.get(name, default)

    def integer(self, name: str, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """Return a required whole number."""
        value = self.any_value(name)
        if type(value) is not int:  # bool is a subclass of int
            raise self._mismatch(name, "a whole number", value)
        if not minimum <= value <= maximum:
            raise self._mismatch(name, f"a whole number from {minimum} to {maximum}", value)
        return value

    def optional_integer(
        self, name: str, minimum: int = 1, maximum: int = MAX_SIZE, nullable: bool = True
    ) -> int | None:
        """Return a whole number, or `None` if it is missing or, if `nullable`, null."""
        if self.any_value(name) is None and (nullable or name not in self):
            return None
        return self.integer(name, minimum, maximum)

    def token_id(self, name: str, maximum: int = MAX_SIZE) -> int | None:
        """Return a token id; `None` for null and for -1, which some files use instead."""
        value = self.optional_integer(name, minimum=-1, maximum=maximum)
        return None if value == -1 else value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return token ids, which may be one number, a list or null."""
        value = self.any_value(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not -1 <= token <= MAX_SIZE:
                raise self._mismatch(name, "a token id or a list of them", value)
        return tuple(token for token in ids if token >= 0)

    def number(self, name: str, above: float = 0.0) -> float:
        """Return a required finite number greater than `above`."""
        value = self.any_value(name)
        if not _is_number(value):
            raise self._mismatch(name, "a finite number", value)
        if value <= above:
            raise self._mismatch(name, f"a number greater than {above:g}", value)
        return value

    def fraction(self, name: str) -> float:
        """Return a number between 0 and 1, exclusive."""
        value = self.number(name)
        if value >= 1:
            raise self._mismatch(name, "a number less than 1", value)
        return value

    def optional_number(self, name: str, above: float = 0.0, nullable: bool = True) -> float | None:
        """Return a finite number, or `None` if it is missing or, if `nullable`, null."""
        if self.any_value(name) is None and (nullable or name not in self):
            return None
        return self.number(name, above)

    def exact_number(self, name: str) -> float | None:
        """Return a number as `optional_number` does, of a field that has this name in the file."""
        self._read.add(name)
        value = self._values.get(name)
        if name in self._values and not _is_number(value):
            raise self.error(f"{name} must be a finite number; it is {shorten(repr(value))}")
        return value

    def boolean(self, name: str, default: bool = False, nullable: bool = False) -> bool:
        """Return true or false; if `nullable`, null is false."""
        value = self.any_value(name, default)
        if value is None and nullable:
            return False
        if not isinstance(value, bool):
            raise self._mismatch(name, "true or false", value)
        return value

    def string(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self.any_value(name, default)
        if not isinstance(value, str):
            raise self._mismatch(name, "a string", value)
        return value

    def strings(self, name: str) -> list[str] | None:
        """Return a list of strings, or `None` if it is missing or null."""
        return self._list(name, str, "strings")

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` positive numbers."""
        value = self.any_value(name)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_number, value)):
            raise self._mismatch(name, f"a list of {count} numbers", value)
        if min(value) <= 0:
            raise self._mismatch(name, f"a list of {count} numbers greater than 0", value)
        return tuple(value)

    def integers(self, name: str) -> list[int]:
        """Return a list of whole numbers; a missing one and null are empty."""
        return self._list(name, int, "whole numbers") or []

    def flags(self, name: str, at_least: int) -> tuple[bool, ...] | None:
        """Return a list of `at_least` or more zeros and ones; `None` if it is missing or null."""
        value = self._list(name, int, "zeros and ones")
        if value is None:
            return None
        if len(value) < at_least or set(value) - {0, 1}:
            raise self._mismatch(name, f"a list of at least {at_least} zeros and ones", value)
        return tuple(map(bool, value))

    def table(self, name: str) -> Config:
        """Return an object; a missing one and null are empty."""
        value = self.any_value(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._mismatch(name, "an object", value)
        return _without_notes(value)

    def refuse_unread(self, harmless: Collection[str] = HARMLESS_FIELDS) -> None:
        """Raise `UserError` for a field that was not read and, unless `harmless`, might matter."""
        unknown = []
        for name in self._values.keys() - self._read - set(harmless):
            value, neutral = self._values[name], NEUTRAL_VALUES.get(name)
            if neutral is None:
                unknown.append(name)
            elif not any(type(value) is type(other) and value == other for other in neutral):
                raise self.unsupported(name, value, f"{neutral[0]!r} is")
        if unknown:
            first = min(unknown)
            nearest = nearest_name(first, self._read)
            hint = nearest and f"; the nearest known field is {nearest}"
            raise self.error(
                f"{shorten(repr(first))[1:-1]} is an unknown field, which might change what the "
                f"model computes: remove it if it does not{hint}"
            )

    def _list(self, name: str, kind: type, words: str) -> list[Any] | None:
        value = self.any_value(name)
        if value is not None and not (  # bool is a subclass of int
            isinstance(value, list) and all(type(item) is kind for item in value)
        ):
            raise self._mismatch(name, f"a list of {words}", value)
        return value

    def _mismatch(self, name: str, expected: str, value: Any) -> UserError:
        name = self.name(name)
        if name not in self._values:
            return self.error(f"{name} must be {expected}; it is missing")
        return self.error(f"{name} must be {expected}; it is {shorten(repr(value))}")


def _without_notes(values: Config) -> Config:
    """Return the fields that describe the model; transformers' notes begin with an underscore."""
    return {name: value for name, value in values.items() if not name.startswith("_")}


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= MAX_SIZE
    return type(value) is float and math.isfinite(value)


def require_divisor(name: str, divisor: int, total_name: str, total: int) -> None:
    """Raise `UserError` unless one size of config.json divides another."""
    if total % divisor:
        raise UserError(f"config.json: {name}={divisor} must divide {total_name}={total}")
