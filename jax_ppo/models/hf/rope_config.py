"""Rotary parameters of config.json, in the spellings of transformers 4 and 5."""

import dataclasses
from typing import Any

from jax_ppo.errors import shorten
from jax_ppo.models.architecture import ORIGINAL_LENGTH, ROPE_KINDS, Architecture
from jax_ppo.models.hf.family import Family
from jax_ppo.models.hf.fields import Config, ConfigReader

FULL = "full_attention"
LOCAL = "sliding_attention"
# Kinds of rotary embeddings that depend on the sequence length of pretraining.
ROPE_KINDS_WITH_LENGTH = ("yarn", "llama3", "longrope")
# Optional numbers of each kind, besides the required ones of `ROPE_KINDS`.
OPTIONAL_NUMBERS: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("attention_factor", "factor"),
    "proportional": ("factor", "partial_rotary_factor"),
}
LISTS = frozenset({"short_factor", "long_factor"})
# Entries that transformers ignores.
HARMLESS_ENTRIES = ("finetuned", "max_position_embeddings", "mrope_interleaved", "mrope_section")
PARTIAL_FACTOR = "partial_rotary_factor"

# Of families without rotary embeddings.
NO_ROPE = {"rope_scaling": (("rope_type", "default"),), "partial_rotary_factor": 0.0}
DISAGREEMENT = (
    "rope_scaling and rope_parameters differ: keep the one that is meant (transformers 5 writes "
    "rope_parameters, but prefers rope_scaling) and remove the other"
)


def read_rope(reader: ConfigReader, family: Family, head_dim: int) -> dict[str, Any]:
    """Return the rotary parameters, as fields of `Architecture`.

    transformers 5 writes `rope_parameters`. `rope_scaling` is transformers 4's name; where a file
    has both, transformers 5 uses `rope_scaling`, so they must agree.
    """
    if family.learned_positions:
        return NO_ROPE
    parameters = reader.table("rope_parameters")
    scaling = reader.table("rope_scaling")
    if family.local_rope_theta is not None:
        return _read_two_ropes(reader, family, parameters, scaling, head_dim)
    for table in (parameters, scaling):
        nested = [name for name, value in table.items() if isinstance(value, dict)]
        if nested:
            raise reader.error(
                f"rope_parameters for each layer type ({', '.join(nested)}) are not supported"
            )
    rope = _OneRope(reader, family, head_dim, "rope_theta", family.rope_theta)
    name = "rope_parameters"
    if not parameters:
        parameters, name = scaling or dict(family.rope_parameters), "rope_scaling"
    fields = rope.read(parameters, name)
    if scaling and rope.read(scaling, "rope_scaling") != fields:
        raise reader.error(DISAGREEMENT)
    # Some versions of transformers write Llama's name and the family's, but read the family's.
    for name in ("rope_theta", PARTIAL_FACTOR):
        other = None if reader.name(name) == name else reader.exact_number(name)
        if other is not None and other != fields[name]:
            raise reader.error(
                f"{name}={other} differs from the {fields[name]} of {reader.name(name)} or "
                "rope_parameters: keep the one that is meant and remove the other"
            )
    return fields


def _read_two_ropes(
    reader: ConfigReader, family: Family, parameters: Config, scaling: Config, head_dim: int
) -> dict[str, Any]:
    """Read the rotary parameters of a family whose local layers have separate ones.

    Before transformers 5, `rope_local_base_freq` described local layers, `rope_scaling` the others.
    """
    if parameters.keys() - {FULL, LOCAL}:
        raise reader.error(
            f"rope_parameters of model_type {reader.string('model_type')!r} must name layer types, "
            f"{FULL} and {LOCAL}; they are {shorten(repr(parameters))}"
        )
    tables = ConfigReader(parameters, where="config.json: rope_parameters.")
    full = tables.table(FULL)
    local = tables.table(LOCAL)
    if family.has_global_heads and scaling:
        raise reader.error("rope_scaling is not supported, only rope_parameters is")
    if family.has_global_heads and reader.any_value("rope_parameters") is None:
        full = dict(family.rope_parameters)
    elif family.has_global_heads and not ("rope_theta" in full and "rope_theta" in local):
        raise reader.error(f"rope_parameters must have {FULL} and {LOCAL}, each with rope_theta")
    other_rope = _OneRope(reader, family, head_dim, "rope_theta", family.rope_theta)
    fields = other_rope.read(full, f"rope_parameters.{FULL}")
    if scaling:
        if "type" in scaling:
            raise reader.error(
                "rope_scaling: type is not supported, only its new name rope_type is"
            )
        # transformers 5 adds the entries of one to the other.
        merged = other_rope.read(full | scaling, "rope_scaling")
        if full and merged != fields:
            raise reader.error(DISAGREEMENT)
        fields = merged
    assert family.local_rope_theta is not None
    local_rope = _OneRope(reader, family, head_dim, "rope_local_base_freq", family.local_rope_theta)
    local_fields = local_rope.read(local, f"rope_parameters.{LOCAL}")
    local_kind = dict(local_fields["rope_scaling"])["rope_type"]
    if local_kind != "default":
        raise reader.error(
            f"rope_parameters of {LOCAL} with rope_type {local_kind!r} are not supported, only "
            "'default' is"
        )
    return fields | {"local_rope_theta": local_fields["rope_theta"]}


@dataclasses.dataclass(frozen=True)
class _OneRope:
    """Reads the parameters of one rotary embedding."""

    reader: ConfigReader
    family: Family
    head_dim: int
    theta_field: str  # where the base is, if it is not among the parameters
    default_theta: float

    def read(self, table: Config, name: str) -> dict[str, Any]:
        """Return the parameters of a table of this name in config.json; empty: the default ones."""
        outer_theta = self.reader.optional_number(self.theta_field, above=1, nullable=False)
        max_length = self.reader.integer("max_position_embeddings")
        entries = ConfigReader(table, where=f"config.json: {name}.")
        kind = self._read_kind(entries)
        partial_factor = 1.0 if kind == "proportional" else self._read_partial_factor(entries)
        rotary_dim = int(self.head_dim * partial_factor)
        if rotary_dim < 2 or rotary_dim % 2:
            raise self.reader.error(
                f"{self.reader.name(PARTIAL_FACTOR)}={partial_factor} with heads of "
                f"{self.head_dim} numbers rotates {rotary_dim} of them, which must be an even "
                "number"
            )
        values: dict[str, Any] = {"rope_type": kind}
        for entry in ROPE_KINDS[kind]:
            if table.get(entry) is None:
                raise self.reader.error(f"rope_type {kind!r} needs {entry}")
            if entry in LISTS:
                values[entry] = entries.numbers(entry, rotary_dim // 2)
            else:
                values[entry] = entries.number(entry)
        if self.family.rope_numbers and kind != "yarn":
            raise self.reader.unsupported("rope_type", kind, "'yarn' is")
        values |= {entry: entries.number(entry) for entry in self.family.rope_numbers}
        for entry in OPTIONAL_NUMBERS.get(kind, ()):
            number = entries.optional_number(entry, nullable=entry != PARTIAL_FACTOR)
            if entry == PARTIAL_FACTOR and number is not None and number > 1:
                raise self.reader.error(f"{name}: {entry} must be at most 1; it is {number}")
            if number is not None:
                values[entry] = number
        if kind == "yarn" and "truncate" in entries:
            values["truncate"] = entries.boolean("truncate")
        if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
            raise self.reader.error(
                f"{name}: high_freq_factor must be greater than low_freq_factor"
            )
        # The order of transformers: outside the parameters, among them, or the whole length. Where
        # layer types have separate parameters, it ignores the field outside.
        outside = [self.reader] if self.family.local_rope_theta is None else []
        lengths = [
            # Its logarithm is a divisor.
            fields.optional_integer(ORIGINAL_LENGTH, minimum=2, nullable=False)
            for fields in (*outside, entries)
        ]
        if kind in ROPE_KINDS_WITH_LENGTH:
            values[ORIGINAL_LENGTH] = next(filter(None, lengths), max_length)
        inner_theta = entries.optional_number("rope_theta", above=1, nullable=False)
        if None not in (inner_theta, outer_theta) and inner_theta != outer_theta:
            raise self.reader.error(
                f"{self.reader.name(self.theta_field)}={outer_theta} and "
                f"{name}.rope_theta={inner_theta} differ: keep the one that is meant and remove "
                "the other"
            )
        entries.refuse_unread(HARMLESS_ENTRIES)
        return {
            "rope_theta": float(inner_theta or outer_theta or self.default_theta),
            "rope_scaling": tuple(sorted(values.items())),
            PARTIAL_FACTOR: partial_factor,
        }

    def _read_kind(self, entries: ConfigReader) -> str:
        older = entries.string("type", "default")
        kind = entries.string("rope_type", older)
        kind = self.family.rope_aliases.get(kind, kind)
        supported = dict.fromkeys(ROPE_KINDS)
        if self.family.local_rope_theta is None:
            del supported["proportional"]
        if self.family.has_global_heads:
            # Their factors would be local layers', whose heads may be narrower.
            del supported["yarn"], supported["longrope"]
        if kind not in supported:
            raise self.reader.unsupported("rope_type", kind, f"{', '.join(supported)} are")
        return kind

    def _read_partial_factor(self, entries: ConfigReader) -> float:
        outer = self.reader.optional_number(PARTIAL_FACTOR, nullable=False)
        inner = entries.optional_number(PARTIAL_FACTOR, nullable=False)
        default = self.family.partial_rotary_factor
        name = self.reader.name(PARTIAL_FACTOR)
        if default is None:
            if {outer, inner} - {None, 1}:
                raise self.reader.error(f"{PARTIAL_FACTOR} is not supported, only 1 is")
            return 1.0
        if None not in (outer, inner) and outer != inner:
            raise self.reader.error(
                f"{name} is {outer} outside of the rotary parameters and {inner} among "
                "them: keep the one that is meant and remove the other"
            )
        factor = float(inner or outer or default)
        if factor > 1:
            raise self.reader.error(f"{name} must be at most 1; it is {factor}")
        return factor


def write_rope(a: Architecture, family: Family) -> Config:
    """Return the rotary parameters in the spellings of transformers 4 and 5."""
    if family.learned_positions:
        return {}
    rope = dict(a.rope_scaling)
    for name in LISTS & rope.keys():
        rope[name] = list(rope[name])
    config: Config = {
        "rope_parameters": {**rope, "rope_theta": a.rope_theta},
        # transformers 4 reads the next two fields.
        "rope_theta": a.rope_theta,
        "rope_scaling": rope,
    }
    if rope["rope_type"] == "default" and not family.rope_parameters:
        config["rope_scaling"] = None
    if family.rope_length_outside and ORIGINAL_LENGTH in rope:
        config[ORIGINAL_LENGTH] = rope.pop(ORIGINAL_LENGTH)
        # transformers 4 accepts no further field in rope_scaling.
        config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    if family.partial_rotary_factor is not None:
        config[PARTIAL_FACTOR] = a.partial_rotary_factor
        config["rope_parameters"][PARTIAL_FACTOR] = a.partial_rotary_factor
    # In a fixed order, so that every run of Python writes the same file.
    for name in ("rope_theta", PARTIAL_FACTOR):
        if name in family.field_names:
            config[family.field_names[name]] = config.pop(name)
    if a.local_rope_theta is not None:
        config["rope_local_base_freq"] = a.local_rope_theta
        config["rope_parameters"] = {
            FULL: config["rope_parameters"],
            LOCAL: {"rope_type": "default", "rope_theta": a.local_rope_theta},
        }
    if family.has_global_heads:
        return {"rope_parameters": config["rope_parameters"]}
    return config
