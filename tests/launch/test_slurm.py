"""The Slurm script, with stand-ins for srun and scontrol."""

import os
import signal
import subprocess

import pytest

from stand_ins import LAUNCH, TRICKY, script
from waiting import HANG_SECONDS, wait_until


@pytest.fixture
def job(tmp_path):
    """Return a function that starts the batch script, as Slurm would, with `body` as srun."""

    def start(body, *arguments, **more):
        script(tmp_path / "srun", body)
        script(tmp_path / "scontrol", f'echo "$*" >>{tmp_path}/requeued')
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        return subprocess.Popen(
            ["bash", LAUNCH / "slurm.sbatch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"COMMAND": ""} | path | more,
        )

    return start


@pytest.mark.parametrize(("option", "command"), [("", "train"), ("reward_model", "reward_model")])
def test_the_command_gets_the_arguments(job, option, command):
    output, _ = job('printf "[%s]" "$@"', *TRICKY, COMMAND=option).communicate(timeout=HANG_SECONDS)
    assert output.endswith(
        "".join(f"[{word}]" for word in ("python", "-m", f"jax_ppo.{command}", *TRICKY))
    )


@pytest.mark.parametrize(
    ("code", "requeued"),
    # Of four starts: all after a signal, a few after the loss of a process, none after an error.
    [(0, 0), (1, 0), (2, 0), (143, 4), (130, 4), (75, 3), (137, 3), (134, 3)],
)
def test_what_is_requeued_and_how_often(job, tmp_path, monkeypatch, code, requeued):
    monkeypatch.chdir(tmp_path)
    for _ in range(4):
        run = job(f"exit {code}")
        run.communicate(timeout=HANG_SECONDS)
        assert run.returncode == code
    record = tmp_path / "requeued"
    assert (record.read_text() if record.exists() else "") == requeued * "requeue 17\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_run_that_the_user_stops_saves_and_is_not_requeued(job, tmp_path, number):
    body = f"""
        trap "sleep 0.1; echo saved; exit 143" TERM; echo $$ >{tmp_path}/pid
        for i in {{1..3000}}; do sleep 0.1; done
    """
    run = job(body)
    wait_until((tmp_path / "pid").read_text)
    run.send_signal(number)
    if number == signal.SIGTERM:  # scancel sends it to the processes itself
        os.kill(int((tmp_path / "pid").read_text()), number)
    output, _ = run.communicate(timeout=HANG_SECONDS)
    assert (run.returncode, output) == (143, "saved\n")
    assert not (tmp_path / "requeued").exists()


def test_options_that_a_resumed_job_needs():
    text = (LAUNCH / "slurm.sbatch").read_text()
    for option in ("--requeue", "--open-mode=append", "--signal=TERM@300"):
        assert f"\n#SBATCH {option}\n" in text
