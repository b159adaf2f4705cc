import dataclasses

import pytest

from tiny_actor import ARCHITECTURE, Actor, make_prompts


@pytest.fixture(scope="session")
def actor():
    return Actor()


@pytest.fixture(scope="session")
def shallow_actor():
    """Return an actor of one layer, which compiles sooner, where layers make no difference."""
    return Actor(dataclasses.replace(ARCHITECTURE, num_layers=1))


@pytest.fixture
def prompts():
    return make_prompts()
