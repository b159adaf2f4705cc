"""The type of the computation, by kind of device."""

import dataclasses
import json
import types

import jax
import pytest

import tiny
from jax_ppo import command
from jax_ppo.config import schema
from jax_ppo.runtime import devices


@pytest.mark.parametrize(
    ("platform", "capability", "dtype"),
    [
        ("tpu", None, "bfloat16"),
        ("gpu", "9.0", "bfloat16"),
        ("gpu", "8.0", "bfloat16"),
        ("gpu", "7.5", "float32"),
        ("gpu", "gfx942", "bfloat16"),
        ("cpu", None, "float32"),
    ],
)
def test_auto_is_what_the_device_computes_fast_in(platform, capability, dtype, monkeypatch):
    model = schema.Model(dtype="auto")
    assert devices.resolve_dtype(model, platform, capability).dtype == dtype
    device = types.SimpleNamespace(
        platform=platform, compute_capability=capability, device_kind="the device"
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    resolved, line = devices.resolve_dtype_here(model)
    assert resolved.dtype == dtype and line.startswith(f"computing in {dtype} on the device")
    assert ("no fast bfloat16" in line) == (dtype == "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_the_user_chose_is_kept_and_said_to_be_slow_where_it_is(dtype):
    model = schema.Model(dtype=dtype)
    resolved, line = devices.resolve_dtype_here(model)
    assert resolved == model and line.startswith(f"computing in {dtype} on cpu")
    assert ("model.dtype=float32 may take less time" in line) == (dtype == "bfloat16")


def test_the_choice_is_printed_and_in_the_work_directory(tmp_path, capsys):
    config = tiny.config(model__dtype="auto")
    with command.prepared_run(config, tmp_path) as (resolved, folder):
        written = json.loads((folder / "config.json").read_text())
    assert written == dataclasses.asdict(resolved) and resolved.model.dtype == "float32"
    lines = capsys.readouterr().out.splitlines()
    assert "UTC: computing in float32 on cpu" in lines[0]
    assert "dtype" not in "".join(lines), "it was not set"
