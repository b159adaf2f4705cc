"""Compare runs: `python -m jax_ppo.report RUN RUN ... [--out=FILE]`.

Writes a page with the curves of several runs in the same plots, their warnings, the options in
which they differ and their responses. It reads what the runs have written, also while they run.
"""

import sys
from pathlib import Path

from jax_ppo.config import command_line
from jax_ppo.errors import UserError, exit_on_user_error
from jax_ppo.storage.local_files import expand_local_path

USAGE = """\
usage: python -m jax_ppo.report RUN [RUN ...] [--out=FILE]

RUN    the work directory of a run
--out  the page to write (comparison.html)
"""


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`."""
    with exit_on_user_error():
        if len(arguments) < 2 or {"--help", "-h", "-help"} & set(arguments[1:]):
            print(USAGE, end="")
            return
        from jax_ppo.reporting import html_report

        runs, out = read_report_arguments(arguments)
        html_report.write_comparison(runs, out)
    print(f"report: {out}")


def read_report_arguments(arguments: list[str]) -> tuple[list[Path], Path]:
    """Return the work directories and the file to write; raise `UserError` for wrong ones."""
    flags, runs = command_line.take_flags(arguments[1:], (), ("--out",))
    if unknown := [word for word in runs if word.startswith("-")]:
        raise UserError(f"{unknown[0]}: no such option; expected RUN or --out=FILE")
    if not runs:
        raise UserError("report: name the work directory of at least one run")
    out = expand_local_path(flags.get("--out", "comparison.html"), "--out")
    if out.is_dir():
        raise UserError(f"--out={out}: is a folder; expected a file")
    return [expand_local_path(run, "report: RUN") for run in runs], out


if __name__ == "__main__":
    main(sys.argv)
