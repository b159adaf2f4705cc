"""Responses to arithmetic problems that teach a model their form, and seldom to solve them."""

import numpy as np

from jax_ppo.demonstration.arithmetic import generate_problem

GUESS_ACCURACY = 0.15  # probability that an answer without a worked solution is right
_STREAM = 202  # of random numbers


def generate_worked_solutions(count: int, careful_share: float, seed: int) -> list[tuple[str, str]]:
    """Return training problems 0 .. count - 1, each with a response, for fine-tuning.

    With probability `careful_share` a response is a worked solution, which is right. The others
    answer at once: right with probability GUESS_ACCURACY, otherwise off by 1 to 3. The caller adds
    the end-of-sequence token.
    """
    pairs = []
    for index in range(count):
        problem = generate_problem(index, "train")
        rng = np.random.default_rng([_STREAM, seed, index])
        if rng.random() < careful_share:
            response = problem.worked_solution
        else:
            guess = problem.answer
            if rng.random() >= GUESS_ACCURACY:
                # Near misses: a wrong answer should look like a plausible one.
                candidates = [x for off in (1, 2, 3) for x in (guess - off, guess + off)]
                guess = int(rng.choice([x for x in candidates if x >= 0]))
            response = f"#### {guess}"
        pairs.append((problem.prompt, response))
    return pairs
