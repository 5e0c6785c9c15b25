"""Golden stories: what the operator does in the cases that users ask about, line by line, in stories/*.txt.

The simulation runs the real operator in virtual time, so each story is the same on every machine. A change of the code
that changes a story shows up as a diff of its file. Read the diff, and if users should get the new story, write it with

    pytest -n 0 tests/simulation/test_stories.py --refresh-goldens"""

from __future__ import annotations

from pathlib import Path

import pytest
from model_training import Failure
from scenario import Deed, Scenario
from simulation import Simulation
from story import tell

STORIES = Path(__file__).with_name("stories")
LINES_MAX = 40
SCENARIOS = {
    "create": Scenario(training_seconds=20),
    "fail": Scenario(spec={"nodes": 2, "backoffLimit": 0}, training_seconds=20, failures={1: Failure(1, 5.0, 1)}),
    "restart": Scenario(training_seconds=20, failures={1: Failure(1, 5.0, 1)}, reports=True),
    "suspend_and_resume": Scenario(training_seconds=40, deeds=(Deed(10, "suspend", seconds=60),)),
    "lose_a_node": Scenario(training_seconds=60, deeds=(Deed(20, "node dies"),)),
    "delete_a_node": Scenario(training_seconds=60, deeds=(Deed(20, "node removed", seconds=300),)),
    "find_no_node": Scenario(
        spec={"nodes": 2, "onePodPerNode": True},
        cluster_nodes=2,
        training_seconds=20,
        deeds=(Deed(0.1, "neighbour", seconds=610),),
    ),
    "replace_a_pod": Scenario(launcher="ddprun", training_seconds=40, deeds=(Deed(20, "pod deleted", 1),)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_operator_acts_as_the_story_describes(name: str, request: pytest.FixtureRequest) -> None:
    lines, path = tell(Simulation(SCENARIOS[name])), STORIES / f"{name}.txt"
    assert len(lines) <= LINES_MAX, "nobody reads a longer one"
    if request.config.getoption("--refresh-goldens"):
        path.write_text("\n".join(lines) + "\n")
    assert lines == path.read_text().splitlines()


def test_every_story_file_belongs_to_a_scenario() -> None:
    assert {path.stem for path in STORIES.iterdir()} == set(SCENARIOS)
