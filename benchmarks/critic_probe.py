"""How much of the returns can a linear function of a model's hidden states explain?

    python benchmarks/critic_probe.py RUN FOLDER [FOLDER ...]

Reads the responses in RUN/rollouts, whose only reward comes at their end, and runs each model over
them with transformers. A ridge regression then predicts the reward from the hidden state before
each token. It is fitted on four fifths of the responses and measured on the last, in turn: an upper
bound, for this many responses, of what a critic learns that only trains its head. Prints the
explained variance at the best of five regularizations, over all tokens and by fifth of a response.
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDS = 5
STRENGTHS = (1e1, 1e2, 1e3, 1e4, 1e5)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    records = read_records(arguments.run)
    scores = np.array([record["score"] for record in records])
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}; {len(records)} responses, mean reward {scores.mean():.3f}"
    )
    for folder in arguments.folders:
        states, responses, fifths = hidden_states(folder, records)
        targets = scores[responses]
        results = {}
        for strength in STRENGTHS:
            errors = targets - predict(states, targets, responses, strength)
            results[strength] = [
                1 - errors[chosen].var() / targets[chosen].var()
                for chosen in (fifths >= 0, *(fifths == part for part in range(5)))
            ]
        best = max(results, key=lambda strength: results[strength][0])
        figures = " ".join(f"{value:.3f}" for value in results[best][1:])
        print(
            f"{folder}: explained variance {results[best][0]:.3f} at ridge {best:g}; by fifth of "
            f"the response {figures}"
        )


def read_records(run: Path) -> list[dict]:
    """Return the records of all responses that the run wrote with their tokens."""
    lines = [line for file in sorted((run / "rollouts").glob("*.jsonl")) for line in file.open()]
    return [record for record in map(json.loads, lines) if record.get("response_ids")]


def hidden_states(folder: Path, records: list[dict]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each response token: the state before it [N, D], its response and fifth of it [N]."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states, responses, fifths = [], [], []
    for number, record in enumerate(records):
        prompt, length = len(record["prompt_ids"]), len(record["response_ids"])
        with torch.no_grad():
            tokens = torch.tensor([record["prompt_ids"] + record["response_ids"]])
            hidden = model(tokens).last_hidden_state[0].numpy()
        states.append(hidden[prompt - 1 : prompt + length - 1])
        responses += [number] * length
        fifths += [5 * position // length for position in range(length)]
    return np.concatenate(states), np.array(responses), np.array(fifths)


def predict(
    states: np.ndarray, targets: np.ndarray, responses: np.ndarray, strength: float
) -> np.ndarray:
    """Return a ridge regression's predictions [N] for responses that it was not fitted on."""
    inputs = (states - states.mean(0)) / (states.std(0) + 1e-6)
    predictions = np.zeros(len(targets))
    for fold in range(FOLDS):
        held_out = responses % FOLDS == fold
        fitted, mean = inputs[~held_out], targets[~held_out].mean()
        gram = fitted.T @ fitted + strength * np.eye(inputs.shape[1])
        weights = np.linalg.solve(gram, fitted.T @ (targets[~held_out] - mean))
        predictions[held_out] = inputs[held_out] @ weights + mean
    return predictions


if __name__ == "__main__":
    main()
