"""Names of machines in the launchers' notations."""

import sys

import pytest

from stand_ins import LAUNCH, capture


def name(*words):
    # Without any package.
    return capture(sys.executable, "-I", "-S", LAUNCH / "machine_name.py", *words)


@pytest.mark.parametrize("machine", ["v5e-64", "v5e:8x8", "v5litepod-64"])
def test_gcloud_gets_its_own_name_of_a_slice(machine):
    run = name("gcloud", machine)
    assert (run.returncode, run.stdout) == (0, "v5litepod-64 v2-alpha-tpuv5-lite\n")
    assert run.stderr.endswith("v5e:8x8 (64 chips)\n")


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ("v5p:4x4x16", "v5p-512 has the shape of v5p:4x8x8"),
        ("tpu7x-8", "tpu7x and GPUs need GKE: see launch/gke/jobset.py"),
        ("H100:8", "tpu7x and GPUs need GKE: see launch/gke/jobset.py"),
    ],
)
def test_what_gcloud_cannot_create_is_refused(machine, message):
    run = name("gcloud", machine)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("error: ") and run.stderr.endswith(f"{message}\n")


def test_the_task_of_skypilot_is_written_for_other_machines():
    shipped = (LAUNCH / "sky.yaml").read_text()
    assert name("sky", "v6e-8", "v5litepod-8", "H100:8", "a100-80gb:8").stdout == shipped
    other = name("sky", "v5e:8x8", "l4:1", "a100-40:8").stdout
    changed = sorted(set(other.splitlines()) - set(shipped.splitlines()))
    assert changed == [
        "    - accelerators: A100:8",
        "    - accelerators: L4:1",
        "    - accelerators: tpu-v5litepod-64",
    ]
    assert (
        "runtime_version: v2-alpha-tpuv5-lite" in other and "H100" not in other.split("any_of")[1]
    )
    assert name("sky", "h100:16").stderr == ("error: h100:16: expected TPUs, or GPUs of one host\n")


@pytest.mark.parametrize("words", [(), ("gcloud",), ("fly", "v5e-8"), ("gcloud", "v5e-8", "v5e-4")])
def test_wrong_arguments_show_the_usage(words):
    run = name(*words)
    assert run.returncode == 1 and "launch/machine_name.py gcloud v5e:8x8" in run.stderr
