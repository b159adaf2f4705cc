"""Changes of single fields of config.json, and what may come of each: equal scores or a refusal."""

import copy
import dataclasses
import json

import numpy as np

from jax_ppo.errors import UserError

MISSING = "missing"
# Further values of fields whose values are names.
WORDS = ("gelu", "gelu_pytorch_tanh", "relu", "swish", "full_attention", "none", "c2p", "false")


def other_values(value):
    """Return other values for a field: of the same type, of other types, missing and null."""
    values = [
        MISSING,
        None,
        True,
        False,
        0,
        1,
        3,
        -1,
        0.5,
        2.0,
        1e8,
        10**8,
        "x",
        [],
        {},
        ["x"],
        [3],
    ]
    if isinstance(value, bool):
        values += [not value, str(value).lower()]
    elif isinstance(value, int | float):
        values += [2 * value, value + 1, -value, str(value), [value], float("inf"), float("nan")]
        values += [int(value), float(value)]
    elif isinstance(value, str):
        values += [value.upper(), value + "x", [value], *WORDS]
    elif isinstance(value, list) and value:
        values += [value[:-1], value + value[-1:], value[::-1], [None, *value[1:]], value[0]]
    elif value is None:
        values += ["full_attention", 8, 100]
    return [other for other in values if type(other) is not type(value) or other != value]


def change_each_field(config, names):
    """Yield (description, changed configuration) for each named field, also of nested objects."""
    table = {name: value for name, value in config.items() if name in names}
    yield from _change_each_field(config, table, ())


def _change_each_field(config, table, path):
    for name, value in table.items():
        for other in other_values(value):
            changed = copy.deepcopy(config)
            inner = changed
            for key in path:
                inner = inner[key]
            if other is MISSING:
                del inner[name]
            else:
                inner[name] = other
            yield f"{'.'.join((*path, name))}={other!r}", changed
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            yield from _change_each_field(config, value, (*path, name))


def add_fields(config, fields):
    """Yield (description, changed configuration) for each of the fields and each of its values."""
    for name, values in fields.items():
        for value in values:
            yield f"{name}={value!r}", {**copy.deepcopy(config), name: value}


@dataclasses.dataclass
class Sweep:
    """Compares changed configurations of one checkpoint with transformers.

    Attributes:
      folder: Folder of the checkpoint, whose config.json is replaced.
      read: Returns our architecture of a configuration.
      ours: Returns our scores of the checkpoint in the folder.
      theirs: Returns the scores of transformers for the checkpoint in the folder.
      harmless: Fields that we do not read. transformers may refuse a value that we ignore.
    """

    folder: object
    read: object
    ours: object
    theirs: object
    harmless: frozenset

    def __post_init__(self):
        self.config = json.loads((self.folder / "config.json").read_text())
        self.expected = self.theirs()
        self.architecture = without_ids(self.read(self.config))
        assert np.std(self.expected) > 0.2  # otherwise the comparison would be meaningless
        np.testing.assert_allclose(self.ours(), self.expected, rtol=1e-4, atol=1e-4)

    def run(self, cases):
        """Return the numbers of accepted and refused cases; raise for any other outcome."""
        accepted, refused, problems = 0, 0, []
        for description, config in cases:
            try:
                if self.is_accepted(description, config):
                    accepted += 1
                else:
                    refused += 1
            except Exception as error:
                problems.append(f"{description}: {type(error).__name__}: {str(error)[:300]}")
        assert not problems, "\n".join(problems)
        return accepted, refused

    def is_accepted(self, description, config):
        """Return whether a configuration is accepted; raise if its scores are not transformers'."""
        (self.folder / "config.json").write_text(json.dumps(config))
        try:
            architecture = without_ids(self.read(config))
            changed = architecture != self.architecture
            ours = self.ours() if changed else self.expected
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 800, error
            return False
        try:
            theirs = self.theirs_of_number(config, description.split("=")[0])
        except Exception as error:
            # transformers also refuses wrong types of fields that influence nothing.
            name = description.split("=")[0]
            names = {name, name.split(".")[0]}  # an entry of a field that is not read
            assert not changed and names & self.harmless, f"transformers refuses: {error}"
            return True
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        return True

    def theirs_of_number(self, config, name):
        """Return transformers' scores; JSON writes 2 for 2.0, which transformers refuses."""
        try:
            return self.theirs()
        except Exception as error:
            if "expected float, got int" not in str(error):
                raise
            as_float = json.dumps(config | {name: float(config[name])})
            (self.folder / "config.json").write_text(as_float)
            return self.theirs()


def without_ids(architecture):
    """Return an architecture without the special tokens, which do not influence scores."""
    names = {field.name for field in dataclasses.fields(architecture)}
    ids = {"bos_id": None, "eos_ids": (), "pad_id": None}
    return dataclasses.replace(
        architecture, **{name: value for name, value in ids.items() if name in names}
    )
