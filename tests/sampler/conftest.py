import pytest

from tiny_actor import Actor, make_prompts


@pytest.fixture(scope="session")
def actor():
    return Actor()


@pytest.fixture
def prompts():
    return make_prompts()
