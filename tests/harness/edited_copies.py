"""Run tests on edited copies of the project, many in one process.

Starting Python, importing JAX and initialising its devices takes longer than most tests. A runner
is a child process that does it once: for each copy it removes the modules of the previous copy and
runs pytest on the new one.
"""

import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("jax_ppo", "tests", "configs", "docs", "launch", "benchmarks", "examples")
FILES = ("pyproject.toml", "README.md", "setup.py")
TIMED_OUT = 124  # in place of pytest's exit code
WRONG_PACKAGE = 9  # none of pytest's exit codes
RUNS = 40  # copies after which the process is replaced, which limits its memory


@contextlib.contextmanager
def edited_copy(file: str, source: str) -> Iterator[pathlib.Path]:
    """Copy the project to a temporary folder, with `source` as the content of `file`."""
    with tempfile.TemporaryDirectory(prefix="edited_") as name:
        (pathlib.Path(name) / "shared").symlink_to(ROOT.parent / "shared")
        folder = pathlib.Path(name) / "project"
        folder.mkdir()
        for copied in filter(lambda path: (ROOT / path).is_dir(), FOLDERS):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / copied, folder / copied, ignore=ignored)
        for copied in FILES:
            shutil.copyfile(ROOT / copied, folder / copied)
        (folder / file).write_text(source)
        yield folder


class Runner:
    """A child process that runs pytest on one copy after the other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._left = 0

    def run(self, folder: pathlib.Path, arguments: list[str], timeout: float) -> tuple[int, str]:
        """Run pytest in a copy.

        Returns:
            Its exit code (`TIMED_OUT` if it did not end in time) and its output.
        """
        if self._process is None or self._left == 0 or self._process.poll() is not None:
            self._start()
        self._left -= 1
        assert self._process and self._process.stdin and self._process.stdout
        log = folder.parent / "log"
        request = {"folder": str(folder), "arguments": arguments, "log": str(log)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        answer = self._process.stdout.readline() if ready else ""
        output = log.read_text(errors="replace") if log.exists() else ""
        if not ready:
            self.stop()
            return TIMED_OUT, output
        if not answer:  # the process died, of a crash in a test
            self.stop()
            return 1, output
        return json.loads(answer), output

    def _start(self) -> None:
        self.stop()
        # conftest.py asks for programs that compile fast where XLA_FLAGS is not set.
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        self._left = RUNS
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stop(self) -> None:
        """End the child process, if there is one."""
        if self._process:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream:
                    stream.close()
        self._process = None


def serve() -> None:
    """Answer the requests of a `Runner` until its end of the pipe closes."""
    import jax
    import pytest

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        folder = request["folder"]
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        sys.path[:] = [folder] + [
            p for p in sys.path if "edited_" not in p and p != str(ROOT / "tests" / "harness")
        ]
        _forget_modules()
        import jax_ppo

        code = WRONG_PACKAGE
        if pathlib.Path(jax_ppo.__file__ or "").parents[1] == pathlib.Path(folder):
            code = int(pytest.main(request["arguments"]))
        jax.clear_caches()
        answers.write(json.dumps(code) + "\n")
        answers.flush()


def _forget_modules() -> None:
    """Remove the modules of the project, whichever copy they came from."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if name.partition(".")[0] == "jax_ppo" or "edited_" in path:
            del sys.modules[name]


if __name__ == "__main__":
    serve()
