"""Reads the repository's Markdown: fenced blocks, links, anchors."""

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
# Pages whose Python is run as one program.
RECIPES = [
    ROOT / "docs" / "python-api.md",
    *(
        ROOT / "docs" / "development" / f"{name}.md"
        for name in ("built-in-parts", "model-family", "rollout-engine")
    ),
    *sorted(path for path in (ROOT / "docs" / "recipes").glob("*.md") if path.stem != "index"),
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
      page: the file, relative to the repository.
      line: of the file, on which the block's text begins.
      language: the word behind the fence, "" without one.
      text: what is fenced.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """Return the file that the block is to be saved as: its first line is `# NAME.py`."""
        first = self.text.partition("\n")[0]
        name = first.removeprefix("# ")
        return name if first.startswith("# ") and re.fullmatch(r"\w+\.py", name) else None


def page_id(path: pathlib.Path) -> str:
    """Return a page's path relative to the repository."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: pathlib.Path, language: str) -> list[Block]:
    """Return a page's fenced blocks of one language, in their order."""
    text = path.read_text()
    return [
        Block(page_id(path), text.count("\n", 0, match.start(2)) + 1, match[1], match[2])
        for match in _FENCE.finditer(text)
        if match[1] == language
    ]


def without_blocks(path: pathlib.Path) -> str:
    """Return a page's text without its fenced blocks."""
    return _FENCE.sub("", path.read_text())


def links(path: pathlib.Path) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return _LINK.findall(without_blocks(path))


def anchors(path: pathlib.Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    made = set()
    for heading in _HEADING.findall(without_blocks(path)):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).lower()
        made.add(re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain)).strip("-"))
    return made


def edits(path: pathlib.Path) -> list[tuple[str, str, str]]:
    """Return (file, old text, new text) of each hunk in a page's diffs."""
    found = []
    for block in blocks(path, "diff"):
        for line in block.text.splitlines():
            if line.startswith("+++ b/"):
                file = line.removeprefix("+++ b/")
            elif line == "@@":
                found.append((file, [], []))
            elif not line.startswith("---"):
                for side, sign in ((found[-1][1], "+"), (found[-1][2], "-")):
                    if not line.startswith(sign):
                        side.append(line[1:])
    return [(file, "\n".join(old), "\n".join(new)) for file, old, new in found]


def commands(path: pathlib.Path) -> list[tuple[str, str]]:
    """Return (place, command) of a page's shell blocks; a line that ends with \\ continues."""
    return [
        (f"{block.page}:{block.line} {number}", line)
        for block in blocks(path, "bash")
        for number, line in enumerate(re.sub(r"\s*\\\n\s*", " ", block.text).splitlines())
        if line.strip()
    ]
