"""Read commands, shell scripts and TRL's Python scripts: the program and its options."""

import ast
import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from jax_ppo.config.schema import options_by_name
from jax_ppo.config.suggestions import Program, find_answer, read_framework
from jax_ppo.errors import UserError, shorten

EXAMPLES = {
    "verl": "python3 -m verl.trainer.main_ppo data.train_batch_size=256",
    "trl": "python ppo.py --learning_rate 3e-6",
    "openrlhf": "python3 -m openrlhf.cli.train_ppo_ray --rollout.batch_size 128",
}
# A variable of the shell, also with a default: $NAME, ${NAME}, ${NAME:-8}, ${NAME:-$HOME/data}.
_VARIABLE = r"\$(?:[A-Za-z_]\w*|\{\w+(?::-[\w./~-]*)?\})"
for _ in range(3):
    _VARIABLE = _VARIABLE.replace(r"[\w./~-]*", rf"(?:[\w./~-]|{_VARIABLE})*")
VARIABLE = re.compile(rf"({_VARIABLE})", re.ASCII)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# Arguments that a shell fills in, "$@" and "${NAME[@]}", and what ends a command.
_ARGUMENTS = re.compile(r"\$[@*]|\$\{(\w+)\[[@*]\]\}|\$\{@[^}]*\}")
_END = re.compile(r"\d?&?>+\S*|\|{1,2}|&{1,2}|;|EOF")
_MODULE = re.compile(r"(verl|openrlhf)(\.\w+)+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ARITHMETIC = re.compile(r"\$\(\([^()]*\)\)")
_COMMENT_WITHIN = re.compile(r"(?<=[^\s;])#")
_READ_SUFFIXES = (".sh", ".bash", ".txt", ".slurm", ".sbatch", "")


# TRL's classes in Python scripts, named after its programs, and what makes adapters there.
_TRL_CLASS = re.compile(r"(\w+?)(?:v2)?(?:Config|Trainer)")
_ADAPTERS = ("LoraConfig", "get_peft_model")
_PEFT_DEFAULTS = {"use_peft": "True", "r": "8", "lora_alpha": "8", "lora_dropout": "0.0"}
# Arguments of trainers that are objects which other calls of the script make.
_OBJECTS = (
    *("args", "config", "data_collator", "dataset", "eval_dataset", "peft_config"),
    *("processing_class", "ref_model", "ref_policy", "tokenizer", "train_dataset"),
)
_SAME_MODEL = ("to", "cuda", "eval", "half", "bfloat16")  # methods
_CHANGES_ROWS = ("map", "filter", "select", "train_test_split", "from_list", "from_dict")


@dataclasses.dataclass(frozen=True)
class PeerCommand:
    """A command of another framework."""

    program: Program  # the table of the program that it starts
    has_program: bool  # whether it names a program; if not, it is read as the framework's first
    flags: dict[str, str]  # its options by name
    notes: list[str]  # one line for each of its words that is not read


def read_command(framework: str, text: str) -> PeerCommand:
    """Read a command, or the shell script that the text names.

    Raise `UserError` if framework or program is unknown, or nothing in the text is its option.
    """
    if framework not in EXAMPLES:
        raise UserError(f"{framework}: expected one of {', '.join(EXAMPLES)}")
    text = _read_script(framework, text.strip().rstrip("\\ \n"))
    try:
        joined = _ARITHMETIC.sub(lambda match: match[0].replace(" ", ""), text)
        # As a shell splits, without comments; within a word # begins none: ${NAME##*/}.
        text_of_words = _COMMENT_WITHIN.sub("\0", joined.replace("\\\n", " "))
        lexer = shlex.shlex(text_of_words, posix=True, punctuation_chars=";")
        lexer.whitespace_split = True
        words = [word.replace("\0", "#") for word in lexer]
    except ValueError as error:
        raise UserError(f"the command cannot be read: {error}") from error
    start, found = _find_program_word(framework, words)
    name = words[start - 1] if start else ""
    script = None
    if framework == "trl" and name.endswith(".py") and Path(name).is_file():
        script = _PythonScript(Path(name)).read()
    if script:
        found = script.program, True
    program, is_exact = found or (read_framework(framework).programs[0], False)
    if not program.base:
        raise UserError(
            f"{name}: nothing here does the same; train, sft, reward_model and evaluate are the "
            "commands"
        )
    notes = list(script.notes) if script else []
    if name and not is_exact:
        notes.append(
            f"{name}: its contents are not seen; its options were read as {program.name}'s"
        )
    words, values = _fill_in_variables(words[:start], words[start:])
    before = {word for word in words if "=" in word}
    for match in filter(None, map(_ARGUMENTS.fullmatch, values)):
        if not any(word.startswith(f"{match[1]}=(") for word in before):
            notes.append(f"{match[0]}: what the shell puts in its place is not seen")
    values = [word for word in values if word.strip() and not _ARGUMENTS.fullmatch(word)]
    values = list(itertools.takewhile(lambda word: not _END.fullmatch(word), values))
    read = _read_hydra if framework == "verl" else _read_flags
    flags = dict(script.flags) if script else {}
    for flag, value in read(words, values):
        if value is None:
            notes.append(f"{shorten(flag)}: not an option, and not read")
        else:
            flags[flag] = value
    if not (found and is_exact) and not any(is_known(program, framework, flag) for flag in flags):
        unseen = f" ({name} is not seen)" if name else ""
        raise UserError(
            f"{shorten(text) or 'no text'}: no program and no option of {framework} in it{unseen}; "
            f"expected a command such as `{EXAMPLES[framework]}`, or the path of a script"
        )
    return PeerCommand(program, bool(name), flags, notes)


def answer_of(program: Program, framework: str, name: str) -> str | None:
    """Return the answer of the program's or the framework's table to an option's name."""
    own = find_answer(program.options, name)
    return own or find_answer(read_framework(framework).options, name)


def is_known(program: Program, framework: str, name: str) -> bool:
    """Return whether the framework's tables or our schema have an option of this name."""
    return name in options_by_name() or answer_of(program, framework, name) is not None


def _read_script(framework: str, text: str) -> str:
    """Return the shell script that the text names, up to the command, or the text itself."""
    name = re.sub(r"^(ba)?sh\s+", "", text)
    # A name of more bytes is refused by the file system.
    if not text or len(text.encode(errors="replace")) > 255:
        return text
    path = Path(name)
    if framework == "trl" and path.suffix == ".py" and path.is_file():
        return shlex.quote(name)
    if not path.is_file() and (len(name.split()) > 1 or "=" in text or text.startswith("-")):
        return text
    if path.suffix not in _READ_SUFFIXES:
        raise UserError(
            f"{text}: only shell scripts, and Python scripts of TRL, are read; write its values as "
            f"a command, such as `{EXAMPLES[framework]}`"
        )
    if not path.is_file():
        raise UserError(
            f"{text}: neither a command nor a shell script that exists; expected a command such as "
            f"`{EXAMPLES[framework]}`"
        )
    try:
        lines = path.read_text().replace("\\\n", " ").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{text}: cannot be read: {error}") from error
    commands = []
    for count, line in enumerate(lines, 1):
        _, found = _find_program_word(framework, re.split(r"(?<!\S)#", line)[0].split())
        if found:
            # A message may mention the script's name, which is only like that of a program.
            commands.append((not found[1], count))
    if not commands:
        raise UserError(f"{text}: no command of {framework} in it")
    return "\n".join(lines[: min(commands)[1]])


def _find_program_word(framework: str, words: list[str]) -> tuple[int, tuple[Program, bool] | None]:
    """Return the number of words up to the program, such as `accelerate launch ppo.py`, and it."""
    if words and words[0].startswith("--"):
        return 0, None
    candidates: list[tuple[int, tuple[Program, bool] | None]] = []
    for count, word in enumerate(words, 1):
        launcher = words[count - 2] if count > 1 else ""
        is_named = launcher in ("-m", "--module") or Path(launcher).name == "trl"
        # As in `jax_ppo.translate trl sft --option ...`.
        if framework == "trl" and count == 1 and re.match(r"--\w", "".join(words[1:2])):
            named = _find_program(read_framework(framework).programs, word)
            is_named = named is not None and named[1]
        is_file = word.endswith((".py", ".sh")) or _MODULE.fullmatch(word)
        if not is_named and (not is_file or "=" in word or " " in word):
            continue
        owner = next((peer for peer in EXAMPLES if peer in re.split(r"[./]", word)), framework)
        if owner != framework:
            raise UserError(f"{word}: a program of {owner}: python -m jax_ppo.translate {owner}")
        candidates.append((count, _find_program(read_framework(framework).programs, word)))
    # Exactly a program's name is better than a part of it, and that better than no program.
    for wanted in (True, False):
        for count, found in candidates:
            if found and found[1] == wanted:
                return count, found
    return candidates[0] if candidates else (0, None)


def _find_program(programs: tuple[Program, ...], word: str) -> tuple[Program, bool] | None:
    """Return the program that a script's name is, or has as a part; and whether it is the name."""
    name = re.split(r"[./]", word.removesuffix(".py").removesuffix(".sh"))[-1].replace("-", "_")
    for part in (name, *name.split("_")):
        for program in programs:
            if re.fullmatch(program.names, part):
                return program, part == name
    return None


def _fill_in_variables(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    """Replace the variables that words before the program assign, and sums and products of them."""
    variables: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        name, _, default = match[0].lstrip("${").removesuffix("}").partition(":-")
        # A default may contain variables, too.
        return variables.get(name, match[0].replace(f":-{default}", f":-{fill_in(default)}"))

    def fill_in(word: str) -> str:
        return _ARITHMETIC.sub(
            lambda match: _calculate(_NAME.sub(lambda x: variables.get(x[0], x[0]), match[0])),
            VARIABLE.sub(replace, word),
        )

    filled = []
    for word in before:
        word = fill_in(word)
        filled.append(word)
        assignment = _ASSIGNMENT.fullmatch(word)
        # What a command of the shell prints is not known.
        if assignment and "$(" not in word and "`" not in word:
            variables[assignment[1]] = assignment[2]
    return filled, [fill_in(word) for word in after]


def _calculate(text: str) -> str:
    """Return the value of `$((...))`, sums and products of numbers; other texts as they are."""
    if not re.fullmatch(r"\$\(\(\d{1,9}(([-+*]|/(?=[1-9]))\d{1,9})*\)\)", text):
        return text
    total = 0
    for sign, product in re.findall(r"(-?)([\d*/]+)", text):
        value = int(f"{sign}1")
        for operator, number in re.findall(r"([*/]?)(\d+)", product):
            # A shell rounds quotients towards 0.
            value = int(value / int(number)) if operator == "/" else value * int(number)
        total += value
    return str(total)


def _read_hydra(before: list[str], after: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the overrides of a command of verl, without `actor_rollout_ref.`."""
    options = read_framework("verl").options
    for index, word in enumerate(before + after):
        match = re.fullmatch(r"(?:--|\+{0,2})([^=]+)=(.*)", word, re.DOTALL)
        is_after = index >= len(before)
        name = match[1].strip().replace("-", "_") if match else ""
        # Words before the program may set variables of the environment.
        if match and ((is_after and before) or "." in name or name in options):
            yield name.removeprefix("actor_rollout_ref."), match[2]
        elif is_after:
            yield word, None


def _read_flags(before: list[str], after: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the flags of a command, `--name value`, `--name=value` or `--name`."""
    for index, word in enumerate(after):
        if not word.startswith("--") or word == "--":
            if not any(earlier.startswith("--") for earlier in after[:index]):
                yield word, None
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            # A flag takes the words up to the next flag; one without any is a switch.
            values = itertools.takewhile(lambda word: not word.startswith("--"), after[index + 1 :])
            value = ",".join(value.rstrip(",") for value in values) or "True"
        yield name.replace("-", "_"), value


def _called(node: ast.AST) -> str:
    """Return the last part of the name of what a call calls, or ""."""
    function = getattr(node, "func", None)
    return getattr(function, "id", getattr(function, "attr", ""))


class _PythonScript:
    """A script that is never run: the arguments of TRL's classes, as options of a command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            tree = ast.parse(path.read_text())
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read as Python: {error}") from error
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.calls = sorted(calls, key=lambda node: (node.lineno, node.col_offset))
        self.flags: dict[str, str] = {}
        self.notes: list[str] = []
        self.program: Program | None = None
        self.values: dict[str, dict[str, ast.expr]] = {}  # what is assigned to a name, by its dump
        self.functions: dict[str, str] = {}  # where a function can be imported from
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                    self._assign(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._assign(name, value)
                case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=name), *_])], value=value):
                    self._assign(name, value)  # model, tokenizer = X.from_pretrained(...)
                case ast.ImportFrom(module=str(module), names=names):
                    prefix = "" if module == "trl.rewards" else f"{module}."
                    self.functions |= {x.asname or x.name: f"{prefix}{x.name}" for x in names}
                case ast.FunctionDef(name=name):
                    # To import the script itself may train.
                    self.functions[name] = f"{path.stem}_rewards.py:{name}"

    def _assign(self, name: str, value: ast.expr) -> None:
        # `model = change(model)` keeps what it stands for.
        if not any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(value)):
            self.values.setdefault(name, {})[ast.dump(value)] = value

    def read(self) -> PeerCommand | None:
        """Return the script's command, or `None` if TRL's classes get no values in it."""
        for call in self.calls:
            name = _called(call)
            match = _TRL_CLASS.fullmatch(name)
            programs = read_framework("trl").programs
            program, is_exact = (match and _find_program(programs, match[1].lower())) or (None, 0)
            if name in _ADAPTERS and call.keywords:
                self.flags |= _PEFT_DEFAULTS
                self._read_arguments(call)
            elif name in ("ModelConfig", "ScriptArguments"):
                self._read_arguments(call)
            elif is_exact and self.program in (None, program):
                self.program = program
                self._read_arguments(call)
            elif name == "load_dataset":
                self._read_data_set(call)
            elif is_exact or (name in _CHANGES_ROWS and isinstance(call.func, ast.Attribute)):
                hint = "" if is_exact else "; write the rows that it makes to a file"
                self.notes.append(f"{self.path}:{call.lineno}: {name}(...) is not read{hint}")
        if self.program is None or not self.flags:
            return None
        return PeerCommand(self.program, True, self.flags, self.notes)

    def _read_arguments(self, call: ast.Call) -> None:
        """Read the keywords of a call; note those whose value only a run could tell."""
        unread = []
        for keyword in call.keywords:
            value = self._text(keyword.value)
            if keyword.arg in _OBJECTS:
                continue
            if keyword.arg and value is not None:
                self.flags[keyword.arg] = value
                if (file := value.partition(":")[0]).endswith("_rewards.py"):
                    self.notes.append(f"{file}: copy the script's reward functions to this file")
            else:
                unread.append(keyword.arg or ast.unparse(keyword))
        if unread:
            where = f"{self.path}:{call.lineno}: {_called(call)}({', '.join(unread)})"
            self.notes.append(f"{where}: values that are not literal are not read")

    def _read_data_set(self, call: ast.Call) -> None:
        """Read the first data set as training data, and another split of it as held-out data."""
        given = dict(zip(("path", "name"), call.args, strict=False))
        given |= {x.arg: x.value for x in call.keywords if x.arg}
        if isinstance(files := given.get("data_files"), ast.Dict) and files.values:
            given["data_files"] = files.values[0]  # {"train": "rows.jsonl"}
        values = {name: self._text(value) for name, value in given.items()}
        path, split = values.get("data_files") or values.get("path"), values.get("split") or "train"
        if not re.fullmatch(r"\w+(\[\d*:\d*\])?", split):
            self.notes.append(f"{self.path}:{call.lineno}: split={split}: only rows are counted")
            split = re.split(r"\W", split)[0]
        if path and "dataset_name" not in self.flags:
            self.flags |= {"dataset_name": path, "dataset_train_split": split}
            if values.get("name"):
                self.flags["dataset_config"] = str(values["name"])
        elif path and path == self.flags["dataset_name"]:
            self.flags.setdefault("dataset_test_split", split)
        else:
            what = f"load_dataset({path or '...'}) is not read"
            hint = "held-out data in config.data.val_files"
            if "dataset_name" not in self.flags:
                hint = "training data in config.data.train_files"
            self.notes.append(f"{self.path}:{call.lineno}: {what}; name {hint}")

    def _text(self, node: ast.expr | None, depth: int = 9) -> str | None:
        """Return the text of a value as a command line has it; `None` if it is no literal."""
        again = depth - 1
        match node if depth else None:
            case ast.Constant(value=value):
                return str(value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return str(-value)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                texts = [self._text(item, again) for item in items]
                return None if None in texts else ",".join(map(str, texts))
            case ast.Name(id=name):
                values = list(self.values.get(name, {}).values())
                only = self._text(values[0], again) if len(values) == 1 else None
                return self.functions.get(name) if not values else only
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
            case ast.BinOp(left=left, op=op, right=right):
                first, second = self._text(left, again) or "", self._text(right, again) or ""
                sign = {ast.Mult: "*", ast.Sub: "-", ast.Add: "+"}.get(type(op))
                if sign and first.isdecimal() and second.isdecimal():
                    return _calculate(f"$(({first}{sign}{second}))")
            case ast.Call(func=function, args=args, keywords=keywords) as call:
                names = ("pretrained_model_name_or_path", "model_name")
                args = [*args, *(x.value for x in keywords if x.arg in names)]
                if args and _called(call) in ("from_pretrained", *_ADAPTERS):
                    return self._text(args[0], again)
                if isinstance(function, ast.Attribute) and function.attr in _SAME_MODEL:
                    return self._text(function.value, again)
        return None
