"""Input and output of the oracles.py workers: cases and answers as plain arrays in files."""

import json
import sys
from collections.abc import Callable

import harness
import numpy as np


def serve(answer: Callable[[dict, dict], dict], packages: tuple[str, ...]) -> None:
    """Answer the cases named in the settings (first argument, JSON) on every request.

    Args:
      answer: Maps the arrays of one case and the shared options to the arrays to compare, by name.
      packages: Packages whose versions are reported.
    """
    settings = json.loads(sys.argv[1])

    def turn() -> dict:
        with np.load(settings["cases"], allow_pickle=False) as file:
            cases = {name: file[name] for name in file.files}
        count = len(cases["mask"])
        answers = [
            answer({name: rows[i] for name, rows in cases.items()}, settings["options"])
            for i in range(count)
        ]
        np.savez(
            settings["answers"],
            **{name: np.stack([each[name] for each in answers]) for name in answers[0]},
        )
        return {"answers": len(answers[0])}

    harness.serve(turn, packages)
