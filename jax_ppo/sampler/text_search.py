"""Search for strings in text while it is generated, wherever tokens begin and end.

A string may begin in one token and end in another, or stand in the middle of one. An Aho-Corasick
automaton over bytes finds it exactly. Each token's transitions between its states are computed
once, on the host, so that a decode step only looks up one number per sample.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

START = 0  # the state before any text


@dataclasses.dataclass(frozen=True, eq=False)
class TextSearch:
    """A search for strings in generated text, equal to itself alone."""

    strings: tuple[str, ...]  # what is searched for
    # int32 [V], tokens that lead from every state to the same one share a class.
    class_of_token: np.ndarray
    # int32 [S, K], the next state by class of token; S - 1: a string is found, for good.
    next_states: np.ndarray

    @property
    def found_state(self) -> int:
        """Return the state that means that a string was found."""
        return len(self.next_states) - 1

    def advance(self, states_B: jax.Array, tokens_B: jax.Array) -> jax.Array:
        """Return the states after one more token each, int32 [B]."""
        classes_B = jnp.asarray(self.class_of_token)[tokens_B]
        return jnp.asarray(self.next_states)[states_B, classes_B]


def search_for(strings: Sequence[str], tokens: Sequence[bytes], vocab_size: int) -> TextSearch:
    """Return the search for strings, at least one and none empty, in texts made of tokens.

    `tokens` are the bytes that each adds to the text; of the V = `vocab_size` ids, others add none.
    """
    assert strings and all(strings), strings
    byte_states_Sx256 = _byte_automaton([string.encode() for string in strings])
    states_VxS = _run_tokens(byte_states_Sx256, [*tokens, *[b""] * (vocab_size - len(tokens))])
    distinct_KxS, class_of_token = np.unique(states_VxS, axis=0, return_inverse=True)
    return TextSearch(
        strings=tuple(strings),
        class_of_token=class_of_token.reshape(-1).astype(np.int32),
        next_states=np.ascontiguousarray(distinct_KxS.T, dtype=np.int32),
    )


def _byte_automaton(strings: Sequence[bytes]) -> np.ndarray:
    """Return the state after each byte in each state, int32 [S, 256]; the last one is absorbing."""
    # A trie of all strings: the children of each node, and whether a string ends there.
    children: list[dict[int, int]] = [{}]
    ends = [False]
    for string in strings:
        node = 0
        for byte in string:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ends.append(False)
            node = children[node][byte]
        ends[node] = True
    # Breadth first: a byte without a child leads where it leads from the longest proper suffix. The
    # root is its own suffix, and every byte leads from it to itself until its children are set.
    found_state = len(children)
    next_states = np.zeros((found_state + 1, 256), np.int32)
    suffix = [0] * found_state
    queue = deque([0])
    while queue:
        node = queue.popleft()
        ends[node] = ends[node] or ends[suffix[node]]
        next_states[node] = next_states[suffix[node]]
        for byte, child in children[node].items():
            suffix[child] = int(next_states[suffix[node], byte])
            next_states[node, byte] = child
            queue.append(child)
    next_states[np.isin(next_states, np.flatnonzero(ends))] = found_state
    next_states[found_state] = found_state
    return next_states


def _run_tokens(byte_states_Sx256: np.ndarray, tokens: Sequence[bytes]) -> np.ndarray:
    """Return the state after each token in each state, int32 [V, S]."""
    states_VxS = np.tile(np.arange(len(byte_states_Sx256), dtype=np.int32), (len(tokens), 1))
    lengths_V = np.array([len(token) for token in tokens])
    for position in range(lengths_V.max(initial=0)):
        longer = np.flatnonzero(lengths_V > position)
        bytes_v = np.array([tokens[token][position] for token in longer.tolist()])
        states_VxS[longer] = byte_states_Sx256[states_VxS[longer], bytes_v[:, None]]
    return states_VxS
