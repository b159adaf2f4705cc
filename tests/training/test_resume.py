"""What is said of a run that is started again."""

import dataclasses
import types

import tiny
from jax_ppo.training import resume as resuming


def begin_again(config, total_steps, saved):
    """After a checkpoint of step 3 with the options `saved`."""
    meta = {"position": 24, "evaluations": [], "config": saved}
    checkpoints = types.SimpleNamespace(
        latest_step=lambda: 3, restore=lambda step, abstract: (None, meta)
    )
    return resuming.find_progress(config, total_steps, checkpoints, print, ("seed",))


def test_it_goes_on_or_has_nothing_left_to_do(capsys):
    config = tiny.config()
    assert begin_again(config, 5, dataclasses.asdict(config)).position == 24
    assert capsys.readouterr().out == "resuming after step 3 of 5\n"
    begin_again(config, 3, dataclasses.asdict(config))
    assert "all 3 steps are done" in capsys.readouterr().out


def test_an_option_that_is_younger_than_the_checkpoint_had_its_default(capsys):
    config = tiny.config(trainer__warn_kl_above=2.0)
    saved = dataclasses.asdict(config)
    del saved["trainer"]["warn_kl_above"]
    begin_again(config, 5, saved)
    assert (
        "config.trainer.warn_kl_above was 1.0 until the checkpoint, and is 2.0"
        in capsys.readouterr().out
    )
