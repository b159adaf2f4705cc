"""Cloud TPU slices, with a stand-in for gcloud: one host, whose home is a temporary folder."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from stand_ins import LAUNCH, TRICKY, capture, script
from waiting import wait_until

needs_git_checkout = pytest.mark.skipif(
    not (LAUNCH.parent / ".git").exists() or not shutil.which("git"), reason="needs a git checkout"
)

# Accepts what gcloud 528 documents for each subcommand. The states of the queued resource are read
# from $HOME/states, one line per call of `describe`; the last line is repeated.
GCLOUD = r"""
printf '%s\n' "$*" >>"$HOME/gcloud.log"
[[ "$1 $2" == "compute tpus" ]] || exit 64
case "$3 $4" in
  "queued-resources create")
    known="node-id accelerator-type runtime-version spot data-disk zone project" ;;
  "queued-resources describe") known="zone project format" ;;
  "queued-resources delete") known="force quiet zone project" ;;
  "tpu-vm ssh") known="worker command zone project" ;;
  "tpu-vm scp") known="worker zone project" ;;
  *) exit 64 ;;
esac
for argument; do
  if [[ $argument == --* ]]; then
    flag=${argument%%=*}
    [[ " $known " == *" ${flag#--} "* ]] || { echo "unknown flag $flag" >&2; exit 64; }
  fi
  case $argument in --command=*) command=${argument#--command=} ;; esac
done
case $4 in
  create) echo ACTIVE >"$HOME/states" ;;
  describe)
    [[ -s $HOME/states ]] || { echo "ERROR: (describe) NOT_FOUND: Resource 'pod'" >&2; exit 1; }
    state=$(head -n 1 "$HOME/states")
    (($(wc -l <"$HOME/states") == 1)) || sed -i 1d "$HOME/states"
    [[ $state != OFFLINE ]] && echo "$state"
    ;;
  ssh)
    [[ ! -s $HOME/states || $(head -n 1 "$HOME/states") == ACTIVE ]] || exit 255
    cd "$HOME" && exec bash -c "$command"
    ;;
  scp) cp "$5" "$HOME/${6#*:}" ;;
esac
"""
# What the hosts run in place of Python: it obeys $HOME/behaviour and records how it was called.
PYTHON = r"""
printf '[%s]' "$@" >>"$HOME/calls"; echo >>"$HOME/calls"
echo "token=${HF_TOKEN:-none} home=${HF_HOME:-none}" >>"$HOME/environment"
source "$HOME/behaviour"
"""
FOREVER = 'trap "echo saved; exit 143" TERM; echo ready; while :; do sleep 0.02; done'


@pytest.fixture
def pod(tmp_path):
    """Return a function that runs tpu_pod.sh for a slice whose host has an installed checkout."""
    tools = tmp_path / "tools"
    tools.mkdir()
    script(tools / "gcloud", GCLOUD)
    script(tools / "python3", 'echo "python3 $*" >>"$HOME/installed"')
    home = tmp_path / "jax_ppo"
    (home / ".venv/bin").mkdir(parents=True)
    script(home / ".venv/bin/python", PYTHON)
    (home / "launch").mkdir()
    shutil.copy(LAUNCH / "tpu_host.sh", home / "launch")
    (tmp_path / "behaviour").write_text("exit 0")
    unwanted = ("HF_HOME", "HF_TOKEN", "WANDB_API_KEY", "XDG_STATE_HOME", "COMMAND")
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    environment |= {
        "HOME": str(tmp_path),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "POLL_SECONDS": "0.01",
        "PYTHON": sys.executable,
        "START_SECONDS": "300",  # which `start` waits only if the run does not end
    }

    def call(command, *arguments, **more):
        where = ["--name", "pod", "--zone", "here"]
        return capture(LAUNCH / "tpu_pod.sh", command, *where, *arguments, env=environment | more)

    yield call
    if (home / "train.pid").exists():
        capture("bash", home / "launch/tpu_host.sh", "stop")


def calls(tmp_path):
    return (tmp_path / "calls").read_text().splitlines()


class TestCreate:
    @pytest.mark.parametrize(
        ("name", "accelerator", "runtime"),
        [
            ("v5e:8x8", "v5litepod-64", "v2-alpha-tpuv5-lite"),
            ("v5p-384", "v5p-384", "v2-alpha-tpuv5"),
        ],
    )
    def test_a_queued_resource_gets_the_runtime_of_its_type(
        self, pod, tmp_path, name, accelerator, runtime
    ):
        run = pod("create", "--type", name, "--project", "mine", "--spot")
        took, active = run.stderr.splitlines()
        assert (run.returncode, active) == (0, "tpu_pod.sh: pod is ACTIVE")
        assert took in ("v5e:8x8 (64 chips)", "v5p-384 is v5p:4x4x12 (192 chips)")
        assert (tmp_path / "gcloud.log").read_text().splitlines()[0] == (
            f"compute tpus queued-resources create pod --node-id=pod "
            f"--accelerator-type={accelerator} --runtime-version={runtime} --spot --zone=here "
            "--project=mine"
        )

    def test_an_unknown_type_is_refused_with_the_nearest_name(self, pod, tmp_path):
        run = pod("create", "--type", "v5litepod-10")
        message = "error: --type=v5litepod-10: there is no such machine; did you mean v5e:2x4?\n"
        assert (run.returncode, run.stderr) == (2, message)
        assert not (tmp_path / "gcloud.log").exists()

    def test_a_version_allows_for_newer_types_and_a_disk_is_attached(self, pod, tmp_path):
        words = ("--type", "v9-8", "--version", "special", "--data-disk", "projects/p/disks/d")
        assert pod("create", *words).returncode == 0
        log = (tmp_path / "gcloud.log").read_text()
        assert "--runtime-version=special" in log
        assert "--data-disk=source=projects/p/disks/d,mode=read-only " in log

    def test_a_request_that_fails_is_reported(self, pod, tmp_path):
        fake = tmp_path / "tools/gcloud"
        fake.write_text(
            fake.read_text().replace("echo ACTIVE", "printf 'PROVISIONING\\nFAILED\\n'")
        )
        run = pod("create", "--type", "v6e-8")
        assert run.returncode == 1
        assert "pod is PROVISIONING\n" in run.stderr and "pod was not created" in run.stderr


class TestStart:
    def test_the_run_gets_the_arguments(self, pod, tmp_path):
        assert pod("start", "--", *TRICKY).returncode == 0
        expected = "".join(f"[{word}]" for word in ["-m", "jax_ppo.train", *TRICKY])
        assert calls(tmp_path) == [expected]
        assert pod("run", "--", COMMAND="sft").returncode == 0
        assert calls(tmp_path)[1] == "[-m][jax_ppo.sft]"

    def test_a_failed_start_is_reported_with_its_code_and_log(self, pod, tmp_path):
        (tmp_path / "behaviour").write_text("echo 'error: no such model'; exit 1")
        run = pod("start")
        assert run.returncode == 1 and len(calls(tmp_path)) == 1
        assert "the run failed to start: exit code 1" in run.stderr
        assert f"{tmp_path}/jax_ppo/train.log" in run.stderr
        assert "error: no such model" in run.stderr

    def test_a_second_start_is_refused_and_leaves_the_first_alone(self, pod, tmp_path):
        (tmp_path / "behaviour").write_text(FOREVER)
        assert pod("start", START_SECONDS="0").returncode == 0
        wait_until((tmp_path / "calls").exists)
        again = pod("start")
        assert again.returncode == 3 and "in progress" in again.stderr
        assert len(calls(tmp_path)) == 1 and not (tmp_path / "jax_ppo/train.exit").exists()

    def test_secrets_reach_the_run_and_nothing_else(self, pod, tmp_path):
        secret = "hf_'$(touch /tmp/x)\" \\y"
        more = {"HF_TOKEN": secret, "WANDB_API_KEY": "k3y", "EXTRA": "3xtra"}
        run = pod("start", "--env", "EXTRA", "--env", "ABSENT", **more)
        assert run.returncode == 0 and "--env ABSENT: not set here" in run.stderr
        assert (tmp_path / "environment").read_text() == f"token={secret} home=none\n"
        stored = tmp_path / "jax_ppo.env"
        assert stored.stat().st_mode & 0o777 == 0o600
        assert "WANDB_API_KEY=k3y" in stored.read_text() and "EXTRA=3xtra" in stored.read_text()
        # Command lines, outputs and what `resume` remembers.
        record = next((tmp_path / ".local/state/jax_ppo/tpu").iterdir()).read_text()
        log = (tmp_path / "gcloud.log").read_text()
        train_log = (tmp_path / "jax_ppo/train.log").read_text()
        for text in (run.stdout, run.stderr, record, log, train_log):
            assert not re.search("hf_|k3y|3xtra", text)
        copied = next(line for line in log.splitlines() if "scp" in line).split()[4]
        assert not os.path.exists(copied)

    def test_a_value_in_place_of_a_name_is_refused_unprinted(self, pod):
        run = pod("start", "--env", "hf-secret")
        assert run.returncode == 2 and "hf-secret" not in run.stderr

    def test_downloads_go_to_a_writable_data_disk(self, pod, tmp_path):
        disk = ["--data-disk", "d", "--disk-mode", "read-write"]
        pod("create", "--type", "v6e-8", *disk)
        pod("start")
        assert "home=/mnt/data/huggingface" in (tmp_path / "environment").read_text()


class TestEnd:
    """Signals and losses are followed by a restart unless `stop` asked for the end."""

    @pytest.mark.parametrize("code", [143, 130])
    def test_a_run_that_a_signal_ended_is_restarted(self, pod, tmp_path, code):
        (tmp_path / "behaviour").write_text(f'(($(wc -l <"$HOME/calls") > 2)) || exit {code}')
        assert pod("start", "--", "a b").returncode == 0
        assert calls(tmp_path) == ["[-m][jax_ppo.train][a b]"] * 3
        assert pod("watch").returncode == 0

    @pytest.mark.parametrize("code", [75, 137, 134])
    def test_a_run_that_lost_a_process_is_restarted_a_few_times(self, pod, tmp_path, code):
        (tmp_path / "behaviour").write_text(f"exit {code}")
        assert pod("start").returncode == code
        assert len(calls(tmp_path)) == 4
        log = (tmp_path / "jax_ppo/train.log").read_text()
        assert f"exit code {code}: a process was lost; resuming the run (3 of 3)" in log
        # As a rule it is found again, and the run goes on.
        (tmp_path / "calls").write_text("")
        (tmp_path / "behaviour").write_text(f'(($(wc -l <"$HOME/calls") > 1)) || exit {code}')
        assert pod("start").returncode == 0
        assert len(calls(tmp_path)) == 2

    @pytest.mark.parametrize("code", [1, 2])
    def test_a_run_that_failed_is_not(self, pod, tmp_path, code):
        pod("create", "--type", "v6e-8")
        may_end = tmp_path / "may_end"
        (tmp_path / "behaviour").write_text(
            f"until [[ -e {may_end} ]]; do sleep 0.02; done; exit {code}"
        )
        assert pod("start", START_SECONDS="0").returncode == 0
        may_end.touch()
        run = pod("watch", "--recover")
        assert run.returncode == code
        assert f"the run ended with exit code {code}" in run.stderr, run.stderr
        assert len(calls(tmp_path)) == 1

    def test_stop_waits_until_the_run_has_saved(self, pod, tmp_path):
        (tmp_path / "behaviour").write_text(FOREVER)
        pod("start", START_SECONDS="0")
        wait_until(lambda: "ready" in (tmp_path / "jax_ppo/train.log").read_text())
        run = pod("stop")
        assert run.returncode == 0 and "exit code 143: saved" in run.stdout
        assert len(calls(tmp_path)) == 1
        assert pod("watch").returncode == 143
        assert "no run is in progress" in pod("stop").stderr

    def test_sigterm_from_outside_is_handed_on_once(self, pod, tmp_path):
        (tmp_path / "behaviour").write_text(
            'trap "sleep 0.1; echo saved; exit 143" TERM\n'
            '(($(wc -l <"$HOME/calls") == 1)) || exit 0\n'
            "echo ready; while :; do sleep 0.02; done"
        )
        pod("start", START_SECONDS="0")
        log = tmp_path / "jax_ppo/train.log"
        wait_until(lambda: "ready" in log.read_text())
        os.kill(int((tmp_path / "jax_ppo/train.pid").read_text()), 15)
        wait_until((tmp_path / "jax_ppo/train.exit").exists)
        assert (tmp_path / "jax_ppo/train.exit").read_text() == "0\n"
        assert log.read_text().count("saved") == 1 and len(calls(tmp_path)) == 2


class TestResume:
    @needs_git_checkout
    def test_a_preempted_slice_is_requested_and_started_again(self, pod, tmp_path):
        pod("create", "--type", "v5litepod-8", "--spot")
        assert pod("start", "--", *TRICKY).returncode == 0
        (tmp_path / "gcloud.log").unlink()
        (tmp_path / "states").write_text("SUSPENDING\nSUSPENDED\n")
        # `setup` unpacks an archive of this checkout, which would lack the edits under test.
        script(tmp_path / "tools/tar", "true")
        run = pod("resume")
        assert run.returncode == 0, run.stderr
        log = (tmp_path / "gcloud.log").read_text()
        steps = ["delete pod --force --quiet", "create pod", "--spot", "scp", "ssh", "start"]
        positions = [log.find(step) for step in steps]
        assert -1 not in positions and positions == sorted(positions)
        assert len(calls(tmp_path)) == 2 and len(set(calls(tmp_path))) == 1

    def test_watch_recovers_a_run_whose_host_was_rebooted(self, pod, tmp_path):
        pod("create", "--type", "v5litepod-8")
        (tmp_path / "behaviour").write_text(FOREVER)
        assert pod("start", START_SECONDS="0").returncode == 0
        wait_until((tmp_path / "calls").exists)
        # Neither the run nor its supervisor could leave an exit code.
        group = int((tmp_path / "jax_ppo/train.pid").read_text())
        os.kill(group, signal.SIGSTOP)
        subprocess.run(["pkill", "-KILL", "-P", str(group)], check=True)
        os.kill(group, signal.SIGKILL)
        # Its number may be that of another process now, and this machine offline for a while.
        (tmp_path / "jax_ppo/train.pid").write_text(str(os.getpid()))
        (tmp_path / "states").write_text("OFFLINE\nACTIVE\n")
        (tmp_path / "behaviour").write_text("exit 0")
        assert pod("watch", "--recover").returncode == 0
        assert len(calls(tmp_path)) == 2

    def test_without_an_earlier_start_there_is_nothing_to_resume(self, pod):
        run = pod("resume")
        assert run.returncode == 2 and "no start of pod is recorded" in run.stderr


class TestSetup:
    @needs_git_checkout
    def test_the_commit_is_copied_and_outputs_stay(self, pod, tmp_path):
        checkout = LAUNCH.parent
        for folder in ("runs", "jax_ppo"):
            (tmp_path / "jax_ppo" / folder).mkdir()
            (tmp_path / "jax_ppo" / folder / "old.py").touch()
        run = pod("setup")
        assert run.returncode == 0, run.stderr
        assert (tmp_path / "jax_ppo/runs/old.py").exists()
        assert not (tmp_path / "jax_ppo/jax_ppo/old.py").exists()
        listing = capture("git", "ls-tree", "-r", "--name-only", "HEAD", cwd=checkout)
        names = listing.stdout.splitlines()
        assert names and all((tmp_path / "jax_ppo" / name).exists() for name in names)
        assert "-e .[tpu,gcs]" in (tmp_path / "installed").read_text()


class TestCommandLine:
    def test_a_dry_run_runs_nothing(self, pod, tmp_path):
        for command in ("setup", "start", "stop", "watch", "delete"):
            printed = pod(command, "--dry-run", HF_TOKEN="hf_x")
            assert printed.returncode == 0 and printed.stdout.count("gcloud compute tpus") >= 1
            assert "hf_x" not in printed.stdout
        created = pod("create", "--dry-run", "--type", "v4-8")
        assert "--accelerator-type=v4-8" in created.stdout
        assert not (tmp_path / "gcloud.log").exists() and not (tmp_path / ".local").exists()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["create"], "needs --type"),
            (["fly"], "expected one of"),
            (["stop", "--colour"], "unknown option --colour"),
            (["stop", "--worker"], "--worker needs a value"),
            (["watch", "--", "x"], "only start takes"),
            (["create", "--disk-mode", "fast"], "--disk-mode: expected"),
        ],
    )
    def test_wrong_arguments_are_refused(self, pod, arguments, message):
        run = pod(*arguments)
        assert run.returncode == 2 and message in run.stderr

    def test_a_command_that_does_not_exist_is_refused(self, pod):
        run = pod("start", "--", "--config=gsm8k", COMMAND="trian")
        assert run.returncode == 2
        assert run.stderr == "tpu_pod.sh: COMMAND: expected train, sft or reward_model\n"
