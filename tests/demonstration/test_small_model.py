"""The small model in the package, from which a run without `model.path` starts."""

from jax_ppo.data.tokenizer import load_tokenizer
from jax_ppo.demonstration import arithmetic
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.training.roles import SMALL_MODEL


def test_it_takes_less_than_a_megabyte_and_a_mesh_can_split_its_vocabulary():
    assert sum(path.stat().st_size for path in SMALL_MODEL.iterdir()) < 1_000_000
    architecture = read_architecture(SMALL_MODEL)
    assert architecture.vocab_size % 16 == 0
    assert len(load_tokenizer(str(SMALL_MODEL))) <= architecture.vocab_size


def test_its_tokenizer_writes_every_problem_and_solution_with_a_token_per_digit():
    tokenizer = load_tokenizer(str(SMALL_MODEL))
    for split in arithmetic.SPLITS:
        for index in range(200):
            problem = arithmetic.generate_problem(index, split)
            text = problem.prompt + problem.worked_solution
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            digits = [token for token in map(tokenizer.decode, ids) if token.isdigit()]
            assert all(len(token) == 1 for token in digits)
            assert len(tokenizer(problem.prompt)["input_ids"]) <= 48
