"""The JobSet for Google Kubernetes Engine, with its published schema and a stand-in for kubectl."""

import os
import shlex
import sys

import pytest
import yaml

from stand_ins import LAUNCH, TRICKY, capture, script

JOBSET = LAUNCH / "gke" / "jobset.py"
# It records its arguments and its input. States of the JobSet are read from $HOME/states, one line
# per `get`.
KUBECTL = r"""
printf '%s\n' "$*" >>"$HOME/kubectl.log"
case $1 in
  apply) cat >"$HOME/applied.yaml"; [[ ! -e $HOME/refused ]] ;;
  logs) echo "step 1/2" ;;
  get) [[ -s $HOME/states ]] || exit 1; head -n 1 "$HOME/states"; sed -i 1d "$HOME/states" ;;
  delete) ;;
  *) exit 64 ;;
esac
"""
OPTIONS = ("--accelerator=v6e:4x4", "--image=mine:1")


@pytest.fixture
def gke(tmp_path):
    """Return a function that runs jobset.py."""
    tools = tmp_path / "tools"
    tools.mkdir()
    script(tools / "kubectl", KUBECTL)
    environment = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "POLL_SECONDS": "0.01",
    }

    def call(*arguments, **more):
        return capture(sys.executable, JOBSET, *arguments, env=environment | more)

    return call


def render(gke, *options, arguments=("--config=gsm8k",), **more):
    run = gke("render", "demo", "--image=mine:1", *options, "--", *arguments, **more)
    assert run.returncode == 0, run.stderr
    return yaml.safe_load(run.stdout)


def pod_template(manifest):
    [replicated] = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return replicated["replicas"], job["completions"], job["template"]["spec"]


@pytest.mark.parametrize(
    ("accelerator", "label", "chips", "nodes", "resource"),
    [
        ("v5e:4x4", "tpu-v5-lite-podslice", "4", 4, "google.com/tpu"),
        ("v5e:1x1", "tpu-v5-lite-podslice", "1", 1, "google.com/tpu"),
        ("v6e:8x8", "tpu-v6e-slice", "4", 16, "google.com/tpu"),
        ("tpu7x:2x2x2", "tpu7x", "4", 2, "google.com/tpu"),
        ("H100:16", "nvidia-h100-80gb", "8", 2, "nvidia.com/gpu"),
        ("h100-mega:8", "nvidia-h100-mega-80gb", "8", 1, "nvidia.com/gpu"),
    ],
)
def test_a_pod_per_node_asks_for_all_devices_of_its_node(
    gke, accelerator, label, chips, nodes, resource
):
    manifest = render(gke, f"--accelerator={accelerator}")
    replicas, completions, pod = pod_template(manifest)
    assert (replicas, completions) == (1, nodes)
    assert label in pod["nodeSelector"].values()
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {resource: chips}


@pytest.mark.parametrize(
    "options",
    [
        ("--accelerator=v6e:4x4", "--slices=2", "--spot", "--queue=team", "--priority=high"),
        ("--accelerator=h100:16", "--data-claim=data", "--service-account=trainer"),
    ],
)
def test_the_manifest_has_only_fields_of_the_published_schema(gke, options):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = render(gke, *options)
    read = models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    assert read == manifest


def test_gpu_processes_find_each_other(gke):
    _, _, pod = pod_template(render(gke, "--accelerator=h100:16"))
    variables = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    assert variables["JAX_COORDINATOR_ADDRESS"]["value"] == "demo-workers-0-0.demo:8476"
    assert variables["JAX_NUM_PROCESSES"]["value"] == "2"
    assert "job-completion-index" in str(variables["JAX_PROCESS_ID"]["valueFrom"])


def test_arguments_are_passed_on_as_they_are(gke):
    words = [*TRICKY, "$$", "$(HF_HOME)"]  # Kubernetes reads $$ as $
    _, _, pod = pod_template(render(gke, "--accelerator=v6e:4x4", arguments=words))
    read = [
        word.replace("$$", "\0").replace("$(", "").replace("\0", "$")
        for word in pod["containers"][0]["args"]
    ]
    assert read == ["train", *words]


def test_a_signal_or_a_lost_node_restarts_the_run_without_limit(gke):
    spec = render(gke, "--accelerator=v6e:4x4", MAX_RESTARTS="7")["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 7
    spec = render(gke, "--accelerator=v6e:4x4", "--max-restarts=5", MAX_RESTARTS="7")["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 5
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    job = spec["replicatedJobs"][0]["template"]["spec"]
    disrupted, signal, lost, other = job["podFailurePolicy"]["rules"]
    assert disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert signal["onExitCodes"]["values"] == [130, 143] and signal["action"] == "Count"
    # The pods that have lost another one leave the decision to that one.
    assert lost["onExitCodes"]["values"] == [75] and lost["action"] == "Ignore"
    assert other["onExitCodes"]["operator"] == "NotIn" and other["action"] == "FailJob"


@pytest.mark.parametrize(
    ("accelerator", "message"),
    [
        ("v5litepod:16", "there is no such machine; did you mean v5e:4x4?"),
        ("tpu7x:8x4x4", "there is no such machine; did you mean tpu7x:4x4x8?"),
        ("h100:9", "there is no such machine; did you mean h100:16?"),
        ("l4:8", "expected TPUs, or nodes of eight h100 or h100-mega or h200"),
    ],
)
def test_an_accelerator_that_gke_lacks_is_refused(gke, accelerator, message):
    run = gke("render", "demo", f"--accelerator={accelerator}", "--image=mine:1")
    assert run.returncode == 1 and not run.stdout
    assert run.stderr.splitlines()[-1] == f"error: --accelerator={accelerator}: {message}"


def test_the_command_for_xpk_asks_for_the_same(gke):
    run = gke("xpk", "demo", *OPTIONS, "--slices=2", "--spot", "--cluster=mine", "--", *TRICKY)
    assert run.returncode == 0, run.stderr
    record = "() { printf '%s\\0' \"$@\"; };"
    words = capture("bash", "-c", f"xpk{record} {run.stdout}").stdout.split("\0")
    # As xpk 1.16 documents them for `workload create`.
    assert words[:2] == ["workload", "create"]
    for flag in ("--workload=demo", "--cluster=mine", "--tpu-type=v6e-4x4", "--num-slices=2"):
        assert flag in words
    assert "--docker-image=mine:1" in words and "--spot" in words
    [command] = [word for word in words if word.startswith("--command=")]
    started = capture("bash", "-c", f"python{record} {command[10:].replace('exec', '')}")
    assert started.stdout.split("\0")[:-1] == ["-m", "jax_ppo", "train", *TRICKY]


def test_processes_on_gpus_find_each_other_by_the_variables_of_xpk(gke):
    run = gke("xpk", "demo", "--accelerator=h100:16", "--image=mine:1", "--", "--config=gsm8k")
    (command,) = [word for word in shlex.split(run.stdout) if word.startswith("--command=")]
    # As in the JobSets of xpk 1.16, which have no variable for the address with its port.
    xpk = {"JAX_COORDINATOR_ADDRESS": "first", "JAX_COORDINATOR_PORT": "6002", "NNODES": "2"}
    shown = command.removeprefix("--command=").replace(" exec ", " exec env #")
    environment = {"PATH": os.environ["PATH"], "NODE_RANK": "1", **xpk}
    seen = capture("bash", "-c", shown, env=environment).stdout.splitlines()
    assert "JAX_COORDINATOR_ADDRESS=first:6002" in seen
    assert "JAX_NUM_PROCESSES=2" in seen and "JAX_PROCESS_ID=1" in seen
    assert '"' not in command


def test_what_xpk_lacks_is_refused(gke):
    run = gke("xpk", "demo", "--accelerator=v5e:1x1", "--image=mine:1")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "v5e:1x1 (1 chip)\nerror: --accelerator: xpk has no v5e:1x1; its smallest is v5e:2x4\n"
    )


@pytest.mark.parametrize("option", ["--queue=team", "--service-account=trainer", "--secret=mine"])
def test_what_xpk_would_not_pass_on_is_refused(gke, option):
    run = gke("xpk", "demo", *OPTIONS, option)
    assert (run.returncode, run.stdout) == (2, "")
    name = option.partition("=")[0]
    assert run.stderr.endswith(f"error: xpk does not take {name}; use render or start\n")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--slices=0", "--slices: expected at least 1"),
        ("--max-restarts=-1", "--max-restarts: expected a whole number, got '-1'"),
        ("--grace-seconds=0", "--grace-seconds: expected at least 1"),
        ("--command=trian", "--command: invalid choice: 'trian'"),
        ("--priority=high", "--priority needs --queue"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(gke, option, message):
    run = gke("render", "demo", *OPTIONS, option)
    assert (run.returncode, run.stdout) == (2, "")
    assert message in run.stderr


class TestRuns:
    def test_a_start_is_submitted_and_can_be_resumed(self, gke, tmp_path):
        assert gke("start", "demo", *OPTIONS, "--", "--config=gsm8k").returncode == 0
        applied = (tmp_path / "applied.yaml").read_text()
        assert yaml.safe_load(applied)["metadata"]["name"] == "demo"
        (tmp_path / "applied.yaml").unlink()
        (tmp_path / "states").write_text("Failed\n")
        assert gke("resume", "demo").returncode == 0
        log = [line.split()[0] for line in (tmp_path / "kubectl.log").read_text().splitlines()]
        assert log == ["get", "apply", "get", "delete", "apply"], "one that has ended is replaced"
        assert (tmp_path / "applied.yaml").read_text() == applied

    def test_a_start_that_kubectl_refuses_fails_and_is_not_recorded(self, gke, tmp_path):
        (tmp_path / "refused").touch()
        assert gke("start", "demo", *OPTIONS).returncode == 1
        run = gke("resume", "demo")
        assert run.returncode == 1
        assert "no start of demo is recorded" in run.stderr and "Traceback" not in run.stderr

    @pytest.mark.parametrize(
        ("state", "message", "code"),
        [("Completed", "all jobs completed", 0), ("Failed", "a job failed", 1)],
    )
    def test_watch_follows_restarts_to_the_end(self, gke, tmp_path, state, message, code):
        (tmp_path / "states").write_text(
            '{"status": {"restarts": 1}}\n'
            f'{{"status": {{"terminalState": "{state}", "conditions": '
            f'[{{"message": "{message}"}}]}}}}\n'
        )
        run = gke("watch", "demo")
        assert run.returncode == code
        assert run.stdout == "step 1/2\n" * 2
        assert run.stderr.splitlines() == [
            "demo: waiting for process 0; 1 restarts so far",
            f"demo: {state}: {message}",
        ]

    def test_stop_deletes_and_waits(self, gke, tmp_path):
        assert gke("stop", "demo", "--namespace=mine").returncode == 0
        assert (tmp_path / "kubectl.log").read_text() == (
            "delete jobset demo --namespace=mine --cascade=foreground\n"
        )

    @pytest.mark.parametrize("name", ["Demo", "a" * 41, "a_b", ""])
    def test_names_that_kubernetes_refuses_are_refused(self, gke, name):
        run = gke("start", name, *OPTIONS)
        assert run.returncode == 2 and "name: expected up to 40" in run.stderr
