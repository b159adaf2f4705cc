"""What the workers of oracles.py share: cases in, answers out, each in a file of plain arrays."""

import json
import sys
from collections.abc import Callable

import harness
import numpy as np


def serve(answer: Callable[[dict, dict], dict], packages: tuple[str, ...]) -> None:
    """Answers the cases that the settings (the first argument, JSON) name, once each time that it is asked to.

    Args:
      answer: from the arrays of one case and the options of all, the arrays to compare by name.
      packages: whose versions to report.
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
