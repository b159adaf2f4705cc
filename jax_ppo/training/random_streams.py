"""Streams of random numbers that follow from the seed of a run, each with a number of its own."""

import enum


@enum.unique
class Stream(enum.IntEnum):
    """Second coordinate of a random key, after the seed.

    A number is never given to another use: a run would draw the same numbers twice.
    """

    TRAINING = 0
    EVALUATION = 1
    REFERENCE = 2  # rollouts for `reward.normalize=reference`
    ACTOR_ADAPTERS = 3  # initial values
    CRITIC_ADAPTERS = 4
    ACTOR_ROUNDING = 5  # of what is stored in bfloat16
    CRITIC_ROUNDING = 6
    SUPERVISED_ROUNDING = 7
    FURTHER_DRAWS = 8  # and all numbers above: further draws of a step that replaces groups
