"""Random states that a rank writes at each step are the current ones."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from ddpjob.checkpoint.state import random_states

Draw = Callable[[], Any]
DRAWS: dict[str, Draw] = {
    "one": numpy.random.random,
    "a normal one": numpy.random.normal,
    "an odd number of normal ones": lambda: numpy.random.normal(size=3),
    "half a word": lambda: numpy.random.randint(0, 2, dtype=numpy.uint8),
    "a shuffle": lambda: numpy.random.shuffle(numpy.arange(9)),
    "more than there are words": lambda: numpy.random.random(700),
    "a seed": lambda: numpy.random.seed(3),
    "nothing": lambda: None,
}


def goes_on_the_same(state: Any) -> bool:
    """True if numpy draws the same numbers from this state as from its own. numpy's own state is restored."""
    now = numpy.random.get_state()
    expected = [numpy.random.normal(), *numpy.random.random(3)]
    random_states.set_to(random_states.expanded(state))
    found = [numpy.random.normal(), *numpy.random.random(3)]
    numpy.random.set_state(now)
    return found == expected


@pytest.mark.parametrize("first", DRAWS)
def test_the_written_random_state_is_the_current_one_whatever_was_drawn_before(first: str) -> None:
    """The written random states must be the current ones, because with older states a restart repeats augmentations."""
    numpy.random.seed(5)
    for second in DRAWS.values():
        for draw in (DRAWS[first], second, second):
            draw()
            assert goes_on_the_same(random_states.compact())


PYTHON_DRAWS: dict[str, Draw] = {
    "one": random.random,
    "a normal one": lambda: random.gauss(0, 1),
    "bits": lambda: random.getrandbits(7),
    "more than there are words": lambda: [random.random() for _ in range(700)],
    "a seed": lambda: random.seed(3),
    "a state": lambda: random.setstate(random.Random(4).getstate()),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("first", PYTHON_DRAWS)
def test_the_written_random_state_of_python_is_the_current_one_too(first: str) -> None:
    """Each draw from Python's generator must change the written state, because a missed draw would be repeated."""
    random.seed(5)
    for second in PYTHON_DRAWS.values():
        for draw in (PYTHON_DRAWS[first], second, second):
            draw()
            assert random_states.expanded(random_states.compact())["python"] == random.getstate()


def test_a_generator_that_replaces_that_of_python_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a script replaces Python's generator, its state must be read by its methods, and not from its memory."""

    class Own(random.Random):
        pass

    own = Own(3)
    monkeypatch.setattr(random, "getstate", own.getstate)
    for _ in range(3):
        own.random()
        assert random_states.expanded(random_states.compact())["python"] == own.getstate()


def test_numpy_is_not_read_while_no_number_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's get_state() must not be called while a script draws no numbers from numpy, because it is slow."""
    numpy.random.seed(5)
    before = random_states.compact()
    monkeypatch.setattr(numpy.random, "get_state", None)
    assert random_states.compact() == before


def test_a_generator_that_replaces_that_of_numpy_is_read_each_time() -> None:
    """If a script replaces numpy's generator by another kind, its state must be read by get_state() each time."""
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.MT19937(3))
    try:
        for _ in range(3):
            numpy.random.random()
            assert goes_on_the_same(random_states.compact())
    finally:
        numpy.random.set_bit_generator(usual)
