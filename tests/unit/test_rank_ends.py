"""A success is suspicious if ranks trained alone, or if their replicas differed during the whole training."""

import json
from typing import Any

import pytest

from ddpjob_core.findings import NO_PROCESS_GROUP, REPLICAS_DIFFER
from ddprun.core.rank_ends import MESSAGE_BYTES_MAX, NodeEnd, as_message, findings, node_end, of_message

NAMES = ["net.0.weight", "net.0.bias"]


def module(sums: str = "aaaaaaaabbbbbbbb", passes: str = "xyz", **fields: Any) -> dict[str, Any]:
    """Return a rank's record of a module. Each letter of `passes` is a hash of the parameters before a forward pass."""
    noted = [[number, 10 * number, letter] for number, letter in enumerate(passes, start=1)]
    about = {"group": "0-1", "number": 0, "digest": "d", "dtypes": ["float32"], "hardware": "EPYC", "names": NAMES}
    return {**about, "sums": sums, "passes": noted, **fields}


def rank(*modules: Any, alone: bool = False) -> dict[str, Any]:
    return {"alone": alone, "modules": [*modules]}


def found(*ranks: Any) -> list[tuple[str, str]]:
    """Return the findings for these ranks. Check that one node and separate nodes give the same findings."""
    one_node = findings([node_end(dict(enumerate(ranks)))], len(ranks))
    sent = [json.loads(json.dumps(as_message(node_end({number: one})))) for number, one in enumerate(ranks)]
    assert findings([of_message(message) for message in sent], len(ranks)) == one_node
    return [(finding.reason, finding.message) for finding in one_node]


OTHER = module("aaaaaaaacccccccc", "xqr")


def test_replicas_that_differ_after_training_are_named_by_rank_and_parameter() -> None:
    """Replicas that differ after training must be named, because one of N different models is saved."""
    [(reason, message)] = found(rank(module()), rank(OTHER))
    assert reason == REPLICAS_DIFFER
    assert message == (
        "rank 1 ended with other parameters than rank 0: net.0.bias is the first that differs; "
        "the replicas were not kept in step, e.g. every backward ran in no_sync()"
    )


def test_a_difference_before_the_first_step_is_not_blamed_on_the_steps() -> None:
    [(_, message)] = found(rank(module()), rank(module("aaaaaaaacccccccc", "pqr")))
    assert "they differed before the first step, e.g. a checkpoint was loaded on one rank after DDP(...)" in message


def test_many_ranks_are_named_in_one_sentence() -> None:
    [(_, message)] = found(rank(module()), rank(OTHER), rank(module()), rank(OTHER))
    assert message.startswith("ranks 1 and 3 ended with other parameters than rank 0: ")
    [(_, message)] = found(rank(module()), *[rank(OTHER)] * 7)
    assert message.startswith("ranks 1, 2, 3, 4 and 3 others ended with ")


@pytest.mark.parametrize(
    "other",
    [
        module(),
        module("aaaaaaaacccccccc", "xyz"),  # weights averaged, pruned or reloaded after training
        module(passes="xqz"),  # replicas that differed for a while, as in local SGD
        module("aaaaaaaacccccccc", ""),
        module("aaaaaaaacccccccc", "xqr", group="1"),
        module("aaaaaaaacccccccc", "xqr", number=1),
        module("aaaaaaaacccccccc", "xqr", digest="e"),  # a second network, as in a GAN
        # Only the second pass differs: one rank has searched for its learning rate alone.
        module("aaaaaaaacccccccc", passes="") | {"passes": [[1, 10, "x"], [2, 10, "q"]]},
    ],
)
def test_uncertain_differences_are_not_reported(other: dict[str, Any]) -> None:
    """Differences that may be intended must give no warning, because users ignore warnings after a false one."""
    assert found(rank(module()), rank(other)) == []


def test_a_rank_without_a_record_is_not_compared() -> None:
    assert found(rank(module()), None) == []
    assert found(rank(module()), rank(alone=True)) == []


def test_a_different_processor_or_dtype_is_named_with_the_difference() -> None:
    [(_, message)] = found(rank(module()), rank(OTHER | {"hardware": "Xeon"}))
    assert message.endswith("; rank 0 ran on EPYC, rank 1 on Xeon")
    assert found(rank(module()), rank(module(hardware="Xeon"))) == []
    [(_, message)] = found(rank(module()), rank(module(passes="xqr", dtypes=["float32", "float16"])))
    assert "net.0.bias is the first that differs (float16 where rank 0 has float32); " in message


def test_ranks_that_have_all_trained_alone_are_reported() -> None:
    """Ranks that have all trained alone must be reported, for example if the script lacks an option."""
    [(reason, message)] = found(rank(alone=True), rank(alone=True))
    assert reason == NO_PROCESS_GROUP
    assert message.startswith("2 ranks ran, but none formed a process group with another: each trained a model")


@pytest.mark.parametrize("ranks", [[True], [True, False], [True, None]])
def test_a_single_or_unknown_rank_is_not_reported_as_training_alone(ranks: list[bool | None]) -> None:
    assert found(*(None if alone is None else rank(alone=alone) for alone in ranks)) == []


def test_a_node_without_reports_is_not_reported_as_training_alone() -> None:
    assert findings([node_end({0: rank(alone=True)}), NodeEnd()], 2) == []


@pytest.mark.parametrize(
    "written",
    [
        None,
        [],
        "x",
        {},
        {"alone": 1, "modules": 1},
        {
            "modules": [
                None,
                {},
                {**module(), "passes": 3},
                {**module(), "passes": [[1, 2]]},
                {**module(), "number": "n"},
            ]
        },
        {"modules": [{**module(), "ranks": []}, {**module(), "ranks": ["x"]}, {**module(), "ranks": [1e999]}]},
        {"modules": [{**module(), "dtypes": None}, {**module(), "sums": 3, "passes": [[1e999, 1, "x"]]}]},
    ],
)
def test_malformed_data_counts_as_unknown(written: Any) -> None:
    """Another node's agent, or a script that writes this file, must not fail a successful job."""
    assert of_message(written) == NodeEnd()
    assert findings([node_end({0: rank(module()), 1: written})], 2) == []


def test_a_large_model_fits_into_one_line_between_agents() -> None:
    """A large model must fit into one line between agents, because a longer line ends their connection and the job."""
    names = [f"model.layers.{number}.self_attention.query_key_value.weight" for number in range(5000)]
    large = {"names": names, "sums": "0" * 8 * len(names)}
    end = node_end({0: rank(module(**large), *[module(**large, number=number) for number in range(1, 9)])})
    message = as_message(end)
    assert len(json.dumps(message)) < MESSAGE_BYTES_MAX
    assert [one.number for one in of_message(message).modules] == [0]
    other = node_end({1: rank(module(names=names, sums="0" * (8 * len(names) - 1) + "1", passes="xqr"))})
    [finding] = findings([of_message(message), of_message(as_message(other))], 2)
    assert "parameter 4999 is the first that differs" in finding.message
    [finding] = findings([end, of_message(as_message(other))], 2)
    assert "layers.4999.self_attention.query_key_value.weight is the first" in finding.message
