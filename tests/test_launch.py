"""The launchers, with shell scripts in place of gcloud and of the training command."""

import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

LAUNCH = pathlib.Path(__file__).parents[1] / "launch"
TRICKY = ["--config=configs/a b.py", '--config.reward.function=it\'s "$HOME"; echo *', "", "--n=1"]


def script(path, body):
    path.write_text(f"#!/usr/bin/env bash\n{body}")
    path.chmod(0o755)
    return path


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


class TestLocalProcesses:
    def test_each_process_gets_its_number_and_the_arguments(self, tmp_path):
        body = (
            'echo "$JAX_PROCESS_ID/$JAX_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS $JAX_PLATFORMS"; '
            'printf "[%s]" "$@"'
        )
        run = processes(tmp_path, body, *TRICKY)
        output, errors = run.communicate(timeout=30)
        assert (run.returncode, errors) == (0, "")
        seen = [output, *((tmp_path / f"logs/process_{i}.log").read_text() for i in (1, 2))]
        addresses = {text.split()[1] for text in seen}
        assert len(addresses) == 1 and addresses.pop().startswith("localhost:")
        for number, text in enumerate(seen):
            first, rest = text.split("\n", 1)
            assert first.startswith(f"{number}/3 ") and first.endswith(" cpu")
            assert rest == "".join(f"[{argument}]" for argument in TRICKY)

    def test_another_command(self, tmp_path, monkeypatch):
        monkeypatch.setenv("COMMAND", "sft")
        monkeypatch.setenv("EXPECTED", "sft")
        run = processes(tmp_path, "exit 0")
        run.communicate(timeout=30)
        assert run.returncode == 0

    def test_a_failure_stops_the_others_and_is_returned(self, tmp_path):
        body = """
            trap "" TERM; echo $$ >>"$0.pids"
            [[ $JAX_PROCESS_ID != 1 ]] || { sleep 0.3; echo why; exit 7; }
            exec sleep 60
        """
        run = processes(tmp_path, body)
        _, errors = run.communicate(timeout=30)
        assert run.returncode == 7
        assert "process 1 of 3 ended with code 7" in errors and "why" in errors
        pids = (tmp_path / "python.pids").read_text().split()
        assert len(pids) == 3 and not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)

    def test_sigterm_reaches_every_process(self, tmp_path):
        body = """
            trap "sleep 0.$JAX_PROCESS_ID; echo saved; exit 143" TERM; touch "$0.$JAX_PROCESS_ID"
            for i in {1..300}; do sleep 0.1; done; exit 3
        """
        run = processes(tmp_path, body, count=2)
        wait_until(lambda: all((tmp_path / f"python.{number}").exists() for number in (0, 1)))
        run.send_signal(signal.SIGTERM)
        output, errors = run.communicate(timeout=30)
        assert (run.returncode, output, errors) == (143, "saved\n", "")
        assert (tmp_path / "logs/process_1.log").read_text() == "saved\n"

    @pytest.mark.parametrize("arguments", [[], ["2"], ["0", "--"], ["two", "--"]])
    def test_wrong_arguments_show_the_usage(self, arguments):
        run = subprocess.run(
            [LAUNCH / "local_processes.sh", *arguments], capture_output=True, text=True
        )
        assert run.returncode == 2 and "launch/local_processes.sh N --" in run.stderr


GCLOUD = r"""
echo "$@" >>"$HOME/gcloud.log"
for argument; do
  case $argument in --command=*) command=${argument#--command=} ;; esac
done
case $4 in
  ssh) cd "$HOME" && exec bash -c "$command" ;;
  scp) cp "$5" "$HOME/jax_ppo.tar.gz" ;;
esac
"""


@pytest.fixture
def pod(tmp_path):
    """Return a function that runs tpu_pod.sh with a fake gcloud: one host, home in tmp_path."""
    tools = tmp_path / "tools"
    tools.mkdir()
    script(tools / "gcloud", GCLOUD)
    environment = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "COMMAND": "",
    }

    def call(command, *arguments, **more):
        where = ["--name", "pod", "--zone", "here"]
        return subprocess.run(
            [LAUNCH / "tpu_pod.sh", command, *where, *arguments],
            env=environment | more,
            capture_output=True,
            text=True,
        )

    return call


class TestTpuPod:
    def test_create_chooses_the_runtime_of_the_type(self, pod, tmp_path):
        assert (
            pod("create", "--type", "v5litepod-16", "--project", "mine", "--spot").returncode == 0
        )
        assert pod("create", "--type", "v4-32", "--version", "special").returncode == 0
        assert (tmp_path / "gcloud.log").read_text().splitlines() == [
            "compute tpus tpu-vm create pod --accelerator-type=v5litepod-16 "
            "--version=v2-alpha-tpuv5-lite --spot --zone=here --project=mine",
            "compute tpus tpu-vm create pod --accelerator-type=v4-32 --version=special --zone=here",
        ]

    def test_a_dry_run_prints_commands_that_a_shell_reads_back(self, pod, tmp_path):
        printed = pod("run", "--dry-run", "--", *TRICKY)
        assert printed.returncode == 0 and not (tmp_path / "gcloud.log").exists()
        pod("run", "--", *TRICKY)
        words = subprocess.run(
            ["bash", "-c", f"printf '%s ' {printed.stdout}"], capture_output=True, text=True
        ).stdout
        assert (
            words.removeprefix("gcloud ").strip() == (tmp_path / "gcloud.log").read_text().strip()
        )

    def test_another_command(self, pod):
        assert "jax_ppo.train" in pod("run", "--dry-run").stdout
        assert "jax_ppo.sft" in pod("run", "--dry-run", COMMAND="sft").stdout

    def test_run_logs_and_stop_on_the_host(self, pod, tmp_path):
        home = tmp_path / "jax_ppo"
        (home / ".venv/bin").mkdir(parents=True)
        body = 'trap "echo saved; exit" TERM; printf "[%s]" "$@"; while :; do sleep 0.05; done'
        script(home / ".venv/bin/python", body)
        assert pod("run", "--", *TRICKY).returncode == 0
        log = home / "train.log"
        expected = "".join(f"[{argument}]" for argument in ["-m", "jax_ppo.train", *TRICKY])
        wait_until(lambda: log.read_text() == expected)
        again = pod("run")
        assert again.returncode == 1 and "in progress" in again.stderr
        assert pod("stop").returncode == 0
        wait_until(lambda: log.read_text() == expected + "saved\n")
        shown = pod("logs", "--worker", "3", "--dry-run")
        assert "--worker=3" in shown.stdout and "train.log" in shown.stdout

    def test_setup_copies_the_commit_and_keeps_outputs(self, pod, tmp_path):
        checkout = LAUNCH.parent
        if not (checkout / ".git").exists() or not shutil.which("git"):
            pytest.skip("needs a git checkout")
        (tmp_path / "jax_ppo/output").mkdir(parents=True)
        (tmp_path / "jax_ppo/output/kept").touch()
        (tmp_path / "jax_ppo/stale.py").touch()
        script(tmp_path / "tools/python3", 'echo "python3 $*" >>"$HOME/installed"')
        run = pod("setup")
        assert run.returncode == 0, run.stderr
        assert (tmp_path / "jax_ppo/output/kept").exists() and not (
            tmp_path / "jax_ppo/stale.py"
        ).exists()
        listing = subprocess.run(
            ["git", "ls-tree", "-r", "--name-only", "HEAD"], cwd=checkout, stdout=subprocess.PIPE
        )
        names = listing.stdout.decode().splitlines()
        assert names and all((tmp_path / "jax_ppo" / name).exists() for name in names)
        assert "-e .[tpu]" in (tmp_path / "installed").read_text()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["create"], "needs --type"),
            (["fly"], "expected one of"),
            (["stop", "--colour"], "unknown option --colour"),
            (["stop", "--worker"], "--worker needs a value"),
            (["logs", "--", "x"], "only run takes"),
        ],
    )
    def test_wrong_arguments_are_refused(self, pod, arguments, message):
        run = pod(*arguments)
        assert run.returncode == 2 and message in run.stderr

    def test_help(self):
        run = subprocess.run([LAUNCH / "tpu_pod.sh", "--help"], capture_output=True, text=True)
        assert (
            run.returncode == 0 and run.stdout.startswith("Train on") and "--dry-run" in run.stdout
        )


@pytest.mark.parametrize(("option", "command"), [("", "train"), ("reward_model", "reward_model")])
def test_slurm_runs_the_command_with_the_arguments(tmp_path, option, command):
    script(tmp_path / "srun", 'printf "[%s]" "$@"')
    run = subprocess.run(
        ["bash", LAUNCH / "slurm.sbatch", *TRICKY],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COMMAND": option, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=LAUNCH.parent,
    )
    assert run.stdout.endswith(
        "".join(f"[{word}]" for word in ("python", "-m", f"jax_ppo.{command}", *TRICKY))
    )


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_shell_reads_the_file(path):
    subprocess.run(["bash", "-n", path], check=True)
