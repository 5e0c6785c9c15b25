"""Whatever a script does between two steps, a restart changes nothing of its result, or it was said before."""

from __future__ import annotations

import pytest
from grammar import CHOICES, Draw, Kill, drawn, normal, parts_of, plain, recipe, script
from runs import judged
from search import searched, shrunk

TOP = Kill("top", 22, 1, "KILL")
AFTER_SAVE = Kill("top", 20, 1, "KILL")
# Scripts that users write, as draws of the grammar. By day those that stand for a promise.
SCRIPTS = {
    "the plainest": Draw(plain(), (TOP,)),
    "dropout, and the loader of docs/library.md": Draw(recipe(model="dropout", data="loader"), (TOP,)),
    "the same, from the folder": Draw(
        recipe(model="dropout", data="loader", memory="no", every="4"), (TOP,), settled=True
    ),
}


def test_a_draw_is_the_same_each_time_and_its_options_go_together() -> None:
    """A seed that was found must be found again."""
    for seed in range(500):
        found = drawn(seed)
        assert found == drawn(seed)
        assert normal(found.recipe) == found.recipe, seed
        compile(script(found.recipe), f"seed {seed}", "exec")


def test_each_option_is_drawn() -> None:
    """One that a rule always replaces would never be tried."""
    seen = {part for seed in range(3000) for part in parts_of(drawn(seed).recipe).items()}
    options = {(name, option) for name, its in CHOICES.items() for option in its[1:]}
    assert options - seen == set()


def test_what_is_found_is_made_small() -> None:
    """Twelve parts hide the two that matter."""
    wrong = {"model": "dropout", "data": "loader"}
    large = Draw(normal({**recipe(**wrong), "clip": "norm", "extra": "counter", "every": "4"}), (TOP, TOP))
    small = shrunk(large, lambda draw: wrong.items() <= draw.recipe.items())
    assert parts_of(small.recipe) == wrong
    assert len(small.kills) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_is_killed_ends_as_one_that_is_not(name: str) -> None:
    """Else it trains something else from then on, and its last line says that no step was repeated."""
    verdict = judged(SCRIPTS[name])
    assert verdict.kind in ("SAME", "REFUSED"), f"{verdict.why}\n{verdict.log}"


@pytest.mark.long  # the scripts above tell the promises by day
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_no_draw_is_silently_wrong(seed: int) -> None:
    """`make truth N=5000` has more of them."""
    wrong = [
        (found, verdict.why) for found, _, verdict in searched(list(range(seed, seed + 100)), 2) if verdict.is_wrong
    ]
    assert wrong == []
