"""What the documentation names exists: files, links, options, commands."""

import importlib
import pathlib
import re
import shlex
import subprocess
import sys
from types import ModuleType

import pytest

import doc_pages
import museum
from jax_ppo import plan, report
from jax_ppo.config import command_line, loading, schema
from jax_ppo.errors import UserError

check = importlib.import_module("jax_ppo.check")  # the package has a function of this name
each_page = pytest.mark.parametrize("page", doc_pages.PAGES, ids=doc_pages.page_id)
OPTIONS = {option.name for option in schema.all_options()}
SECTIONS = {name.partition(".")[0] for name in OPTIONS if "." in name}
FOREIGN = (
    "| verl |",
    "| `PPOConfig` |",
    "| `train_ppo_ray` |",
)  # tables whose first column is theirs
MADE_BY_THE_BUILD = {"jax_ppo/configs/"}  # in the wheel
OTHER_PROGRAMS = {
    *("cd", "cosmic-ray", "cr-report", "docker", "git", "jax-ppo", "kubectl", "mkdocs", "pip"),
    *("pre-commit", "python", "python3", "sbatch", "source", "vllm", "vllm/bin/python"),
}
READERS = {
    "plan": plan.read_plan_arguments,
    "report": report.read_report_arguments,
    "check": check.read_check_arguments,
}
RUNNABLE = ("train", "critic", "evaluate", "score", "sft", "reward_model")


def test_the_readme_has_at_most_1000_words():
    words = re.findall(r"\b[\w'’.-]+\b", (doc_pages.ROOT / "README.md").read_text())
    assert len(words) <= 1000


@pytest.mark.parametrize(
    "name", ["README.md", "docs/getting-started.md", "docs/ppo-step.md", "docs/data-and-rewards.md"]
)
def test_blocks_are_as_narrow_as_the_sites_column(name):
    page = doc_pages.ROOT / name
    blocks = [b for kind in ("text", "bash") for b in doc_pages.blocks(page, kind)]
    lines = [line for block in blocks for line in block.text.splitlines()]
    assert [x for x in lines if len(x) > 80 and not x.startswith("error: ")] == []


def test_the_first_run_is_promised_the_same_figures_everywhere():
    for name in ("README.md", "docs/getting-started.md", "configs/arithmetic.py"):
        text = " ".join((doc_pages.ROOT / name).read_text().split())
        assert "rise" in text and "from 0.37-0.38 to 0.98-0.99" in text, name


@each_page
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in doc_pages.links(page):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{doc_pages.page_id(page)}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in doc_pages.anchors(file), f"{doc_pages.page_id(page)}: {target}"


@each_page
def test_files_of_the_repository_that_are_named_exist(page):
    named = re.findall(
        r"`((?:jax_ppo|tests|benchmarks|configs|launch|docs|examples)/[\w./-]*)(?:::\w+)?`",
        doc_pages.without_blocks(page),
    )
    for name in set(named) - MADE_BY_THE_BUILD:
        assert (doc_pages.ROOT / name).exists(), f"{doc_pages.page_id(page)}: {name}"


def test_the_table_of_packages_has_each_one():
    page = (doc_pages.ROOT / "docs" / "development" / "index.md").read_text()
    named = re.findall(r"`jax_ppo/(\w+)/`", page.partition("## The packages")[2])
    packages = [path.parent.name for path in (doc_pages.ROOT / "jax_ppo").glob("*/__init__.py")]
    assert sorted(named) == sorted(packages)


@each_page
def test_functions_that_are_named_exist(page):
    """Functions are written with parentheses: `estimate_experience()`."""
    source = "".join(path.read_text() for path in (doc_pages.ROOT / "jax_ppo").rglob("*.py"))
    for name in re.findall(r"`(\w+)\(\)`", doc_pages.without_blocks(page)):
        assert re.search(rf"\bdef {name}\(", source), f"{doc_pages.page_id(page)}: {name}"


def option_names(page: pathlib.Path) -> list[str]:
    """Return the options that a page names in code marks, not other frameworks' options."""
    names, foreign = [], False
    for line in doc_pages.without_blocks(page).splitlines():
        foreign = line.startswith(FOREIGN) or (foreign and line.startswith("|"))
        text = line.split("|", 2)[2] if foreign else line
        for code in re.findall(r"`([^`]+)`", text):
            name = code.removeprefix("--config.").partition("=")[0]
            if re.fullmatch(r"\w+(\.\w+)+", name) and name.partition(".")[0] in SECTIONS:
                names.append(name)
    return names


@each_page
def test_options_that_are_named_exist(page):
    for name in option_names(page):
        is_file = name.endswith((".py", ".json", ".md"))
        is_section = any(option.startswith(f"{name}.") for option in OPTIONS)
        assert is_file or is_section or name in OPTIONS, f"{doc_pages.page_id(page)}: {name}"


@each_page
def test_values_of_options_that_are_named_are_valid(page):
    """Of `actor.clip_ratio=0.1`, but not of placeholders such as `rollout.keep=K`."""
    for code in re.findall(r"`([^`]+)`", doc_pages.without_blocks(page)):
        for name, value in re.findall(r"(?:^|\s)(?:--)?(?:config\.)?([\w.]+)=(\S+)", code):
            if name in OPTIONS and not value.isupper():
                loading.parse_option(name, value)


def test_the_check_of_options_sees_a_wrong_one(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`actor.clip_ratoi` and `actor.clip_ratio=0.1`\n\n| verl |\n| `data.bogus` | |\n"
    )
    assert option_names(page) == ["actor.clip_ratoi", "actor.clip_ratio"]


def parts(command: str) -> list[list[str]]:
    """Return the simple commands of a line, each without environment variables in front."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    simple, current = [], []
    for word in lexer:
        if word in ("&&", ";", "||", "|"):
            simple.append(current)
            current = []
        elif current or not re.fullmatch(r"[A-Z_]+=.*", word):
            current.append(word)
    return [*simple, current]


@pytest.mark.parametrize(
    ("place", "command"),
    [
        found
        for page in doc_pages.PAGES
        if not doc_pages.edits(page)  # see test_recipes.py
        for found in doc_pages.commands(page)
    ],
)
def test_commands_are_understood(place, command, monkeypatch):
    """Reads every training command as the program would, and checks that other programs exist."""
    monkeypatch.chdir(doc_pages.ROOT)
    monkeypatch.setitem(sys.modules, "gcsfs", ModuleType("gcsfs"))  # buckets need it, tests do not
    for words in parts(command):
        if words[0] == "ssh":
            words = parts(words[-1])[-1]  # after cd
        if words[0].endswith("python") and words[1] == "-m" and words[2].startswith("jax_ppo."):
            check_module(words[2].removeprefix("jax_ppo."), words[3:])
        elif words[0].startswith(("launch/", "tests/", ".ci/")):
            subprocess.run(["bash", "-n", words[0]], check=True)
            if "--" in words:
                check_module("train", words[words.index("--") + 1 :])
        elif words[0] == "python" and words[1].endswith(".py"):
            assert pathlib.Path(words[1]).is_file()
        elif words[:3] == ["ray", "job", "submit"]:
            launcher = words.index("--")
            assert words[launcher + 1] == "python" and pathlib.Path(words[launcher + 2]).is_file()
            check_module("train", words[words.index("--", launcher + 1) + 1 :])
        elif words[:3] == ["sky", "jobs", "launch"]:
            assert pathlib.Path(words[3]).is_file()
            (arguments,) = [word for word in words if word.startswith("ARGUMENTS=")]
            check_module("train", shlex.split(arguments.removeprefix("ARGUMENTS=")))
        else:
            assert words[0] in OTHER_PROGRAMS


def check_module(name: str, arguments: list[str]) -> None:
    """Have the command-line reader accept the arguments of `python -m jax_ppo.NAME`."""
    if name in READERS:
        READERS[name]([name, *arguments])
    elif name in RUNNABLE and "--help" not in arguments:
        command_line.read_command_line([name, *arguments], name)
    else:
        subprocess.run(
            [sys.executable, "-m", f"jax_ppo.{name}", *arguments], check=True, capture_output=True
        )


def test_the_check_of_commands_sees_a_wrong_option():
    with pytest.raises(Exception, match="clip_ratoi"):
        check_module("train", ["--config=configs/arithmetic.py", "--config.actor.clip_ratoi=1"])


def test_the_error_that_getting_started_shows_is_the_one_that_is_printed():
    page = (doc_pages.ROOT / "docs" / "getting-started.md").read_text()
    (shown,) = re.findall(r"^error: (config\.\S+: there is no such option.*)$", page, re.MULTILINE)
    option = shown.partition(":")[0]
    with pytest.raises(UserError, match=f"^{re.escape(shown)}$"):
        check_module("train", ["--config=arithmetic", f"--{option}=1"])


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    pytest.importorskip("material", reason="needs the extra `docs`")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=doc_pages.ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "ppo-step" / "index.html").is_file()


def test_the_number_of_exhibits_is_the_museums():
    published = sum(exhibit.source != museum.MUTATION for exhibit in museum.EXHIBITS)
    mutations = len(museum.EXHIBITS) - published
    readme = (doc_pages.ROOT / "README.md").read_text()
    page = (doc_pages.ROOT / "docs" / "development" / "testing.md").read_text()
    row = "bugs reported against other libraries, each with a test here"
    assert f"| {row} | {published} |" in readme
    assert f"lists {published} published bugs of such programs and {mutations} mutations" in page


def table_cells(text: str, columns: list[str]) -> dict[tuple[str, str], str]:
    """Return the cells of tables by row label and first word of a column's head."""
    cells, head = {}, [""]
    for line in text.splitlines():
        row = [cell.strip() for cell in line.strip().removesuffix("|").split("|")[1:]]
        if row and row[0] == "":
            head = [cell.partition(" ")[0] for cell in row]
        label = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row[0]) if row else ""
        cells |= {
            (label, name): cell
            for name, cell in zip(head, row, strict=False)
            if name in columns and label and set(label) != {"-"}
        }
    return cells


def test_each_cell_about_another_library_has_its_source():
    """And a blank or undecided cell has none."""
    libraries = ["verl", "NeMo-RL", "OpenRLHF", "tunix", "EasyDeL", "TRL"]
    readme = (doc_pages.ROOT / "README.md").read_text()
    readme = readme.partition("## What it can do")[2].partition("\n## ")[0]
    page = (doc_pages.ROOT / "docs" / "development" / "rivals.md").read_text()
    claims, sources = (table_cells(text, libraries) for text in (readme, page))
    for name in libraries:
        version = re.search(rf"\| {name} (\S+) ", readme)[1]
        assert re.search(rf"\b{name}\b[^|]*?\bv?{re.escape(version)}\b", page), name
    assert len({column for _, column in claims}) == len(libraries)
    assert set(sources) <= set(claims)
    for place, claim in claims.items():
        source = sources.get(place, "")
        decided = re.match(r"`[\w/.-]+:\d+`", source) is not None
        assert decided == (claim not in ("", "?")) and (source == "?") == (claim == "?"), place
