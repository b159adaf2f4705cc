"""Several processes on one machine, with a shell script in place of the training command."""

import os
import pathlib
import signal
import subprocess

import pytest

from stand_ins import LAUNCH, TRICKY, capture, script
from waiting import HANG_SECONDS, wait_until


def processes(tmp_path, body, *arguments, count=3, **popen):
    """Return a function that starts local_processes.sh with `~body` as the training command."""
    choose = 'if [[ $1 == -c ]]; then exec python3 "$@"; fi\n'
    choose += '[[ "$1 $2" == "-m jax_ppo.${EXPECTED:-train}" ]] || exit 99\nshift 2\n'
    environment = os.environ | {
        "PYTHON": str(script(tmp_path / "python", choose + body)),
        "LOG_DIR": str(tmp_path / "logs"),
        "STOP_SECONDS": "1",
    }
    command = [str(LAUNCH / "local_processes.sh"), str(count), "--", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen
    )


def test_two_machines_are_started_by_the_two_lines_of_the_documentation(tmp_path):
    page = (LAUNCH.parent / "docs/launching.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("ssh ")]
    script(tmp_path / "ssh", 'cd "$HOME/$2" && exec bash -c "$3"')
    for host in ("host0", "host1"):
        bin_folder = tmp_path / host / "jax_ppo/.venv/bin"
        bin_folder.mkdir(parents=True)
        script(bin_folder / "python", 'printf "%s " "${PWD%/*}" "$@"; env | grep ^JAX_ | sort')
    home = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    outputs = [subprocess.check_output(["bash", "-c", line], env=home, text=True) for line in lines]
    for host, output in zip(("host1", "host0"), outputs, strict=True):
        assert output == (
            f"{tmp_path}/{host} -m jax_ppo.train --config=gsm8k --workdir=/shared/gsm8k "
            f"JAX_COORDINATOR_ADDRESS=host0:8476\nJAX_NUM_PROCESSES=2\nJAX_PROCESS_ID={host[-1]}\n"
        )


class TestLocalProcesses:
    def test_each_process_gets_its_number_and_the_arguments(self, tmp_path, monkeypatch):
        monkeypatch.setenv("COMMAND", "sft")
        monkeypatch.setenv("EXPECTED", "sft")
        body = (
            'echo "$JAX_PROCESS_ID/$JAX_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS $JAX_PLATFORMS"; '
            'printf "[%s]" "$@"'
        )
        run = processes(tmp_path, body, *TRICKY)
        output, errors = run.communicate(timeout=HANG_SECONDS)
        assert (run.returncode, errors) == (0, "")
        seen = [output, *((tmp_path / f"logs/process_{i}.log").read_text() for i in (1, 2))]
        addresses = {text.split()[1] for text in seen}
        assert len(addresses) == 1 and addresses.pop().startswith("localhost:")
        for number, text in enumerate(seen):
            first, rest = text.split("\n", 1)
            assert first.startswith(f"{number}/3 ") and first.endswith(" cpu")
            assert rest == "".join(f"[{argument}]" for argument in TRICKY)

    def test_a_failure_stops_the_others_and_is_returned(self, tmp_path):
        body = """
            trap "" TERM; echo $$ >>"$0.pids"
            [[ $JAX_PROCESS_ID == 1 ]] || exec sleep 3600
            until (($(wc -l <"$0.pids") == 3)); do sleep 0.02; done
            echo why; exit 7
        """
        run = processes(tmp_path, body)
        _, errors = run.communicate(timeout=HANG_SECONDS)
        assert run.returncode == 7
        assert "process 1 of 3 ended with code 7" in errors and "why" in errors
        pids = (tmp_path / "python.pids").read_text().split()
        assert len(pids) == 3 and not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)

    @pytest.mark.parametrize(
        ("code", "starts", "end"), [(75, 3, 0), (137, 3, 0), (1, 1, 1), (143, 1, 143)]
    )
    def test_a_run_that_lost_a_process_is_started_again(
        self, tmp_path, monkeypatch, code, starts, end
    ):
        monkeypatch.setenv("MAX_RESTARTS", "2")
        body = f"""
            [[ $JAX_PROCESS_ID == 1 ]] || exit 0
            echo "$@" >>"$0.starts"; (($(wc -l <"$0.starts") > 2)) || exit {code}
        """
        run = processes(tmp_path, body, "a  b")
        _, errors = run.communicate(timeout=HANG_SECONDS)
        assert run.returncode == end, errors
        assert (tmp_path / "python.starts").read_text() == "a  b\n" * starts

    def test_sigterm_reaches_every_process(self, tmp_path):
        body = """
            trap "sleep 0.$JAX_PROCESS_ID; echo saved; exit 143" TERM; touch "$0.$JAX_PROCESS_ID"
            for i in {1..3000}; do sleep 0.1; done; exit 3
        """
        run = processes(tmp_path, body, count=2)
        wait_until(lambda: all((tmp_path / f"python.{number}").exists() for number in (0, 1)))
        run.send_signal(signal.SIGTERM)
        output, errors = run.communicate(timeout=HANG_SECONDS)
        assert (run.returncode, output, errors) == (143, "saved\n", "")
        assert (tmp_path / "logs/process_1.log").read_text() == "saved\n"

    @pytest.mark.parametrize("arguments", [[], ["2"], ["0", "--"], ["two", "--"]])
    def test_wrong_arguments_show_the_usage(self, arguments):
        run = capture(LAUNCH / "local_processes.sh", *arguments)
        assert run.returncode == 2 and "launch/local_processes.sh N --" in run.stderr
