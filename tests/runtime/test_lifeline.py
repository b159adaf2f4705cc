"""Connections by which processes learn that another one has ended; here all are in one process."""

import json
import queue
import socket

import pytest

from jax_ppo.runtime.lifeline import WITHOUT_A_WORD, Lifeline
from waiting import HANG_SECONDS


class Store:
    """The part of the coordination service's store that is used."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key, value):
        self.values[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        return self.values[key]


@pytest.fixture
def processes():
    """Return the lifelines of three processes, the news that they get, and the store."""
    news: queue.Queue = queue.Queue()
    store = Store()
    lines = []
    for number in range(3):
        line = Lifeline(number, lambda *event, number=number: news.put((number, *event)))
        lines.append(line)
        if number == 0:
            line.listen(store, "localhost", 10)
        else:
            line.connect(store, 10)
    return lines, news, store


def close_connections(line):
    for connection in list(line._peers):
        connection.shutdown(socket.SHUT_RDWR)


def collect(news, count):
    return sorted(news.get(timeout=HANG_SECONDS) for _ in range(count))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_all_others_learn_why_a_process_ends(processes, number):
    lines, news, _ = processes
    lines[number].announce("stopped by SIGTERM", 143)
    others = [other for other in range(3) if other != number]
    assert collect(news, 2) == [(other, number, "stopped by SIGTERM", 143) for other in others]


def test_a_process_that_says_nothing_is_named(processes):
    lines, news, _ = processes
    # It sends its number first, which process 0 has read once a later process is answered.
    lines[2]._is_over.set()
    close_connections(lines[2])
    assert collect(news, 2) == [(0, 2, WITHOUT_A_WORD, 75), (1, 2, WITHOUT_A_WORD, 75)]


def test_the_others_go_on_after_one_that_is_done(processes):
    lines, news, _ = processes
    lines[2].announce(None)
    close_connections(lines[2])
    lines[1].announce("failed")
    assert collect(news, 1) == [(0, 1, "failed", 1)]
    assert news.empty()


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\n", b'{"process": 1, "token": ""}\n', b"[]\n"])
def test_a_stranger_is_not_listened_to(processes, text):
    lines, news, store = processes
    address = json.loads(next(iter(store.values.values())))
    place = address["host"], address["port"]
    with socket.create_connection(place, timeout=HANG_SECONDS) as stranger:
        stranger.sendall(text + b'{"process": 1, "reason": "all must end"}\n')
        assert stranger.recv(1) == b""
    lines[1].announce("failed")
    assert collect(news, 2) == [(0, 1, "failed", 1), (2, 1, "failed", 1)]
