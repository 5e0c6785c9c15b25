"""A script never silently gets another result because of a restart, whatever it does between two steps."""

import pytest
from grammar import CHOICES, Draw, Kill, drawn, normal, parts_of, plain, recipe, script
from refusals import LOSS, SAMPLES, Part, excused
from runs import Outcome, compared, difference, verdicts
from search import searched, shrunk

from ddprun.core.charges import REPEATS

TOP = Kill("top", 22, 1, "KILL")
# Typical scripts of users, each for one rule of the library about restarts.
SCRIPTS = {
    "the plainest": Draw(plain(), (TOP,)),
    "dropout, and the loader of docs/library.md": Draw(recipe(model="dropout", data="loader"), (TOP,)),
    "should_stop at every second step": Draw(recipe(model="dropout", mark="stop_some"), (Kill("told", 34, 1, "KILL"),)),
    "another model from step 21 on": Draw(recipe(surgery="model_replaced"), (Kill("marked", 21, 1, "KILL"),)),
    "an evaluation that draws random numbers before save()": Draw(
        recipe(model="dropout", data="loader", evaluation="rank_0", evaluation_by="loader", evaluation_at="marked"),
        (Kill("forward", 25, 0, "KILL"),),
    ),
    "the same, from the folder": Draw(
        recipe(model="dropout", data="loader", memory="no", every="4"), (TOP,), settled=True
    ),
}


def test_a_seed_always_draws_the_same_script_with_options_that_can_be_combined() -> None:
    """A seed must always draw the same script, so that a failure can be repeated."""
    for seed in range(500):
        found = drawn(seed)
        assert found == drawn(seed)
        assert normal(found.recipe) == found.recipe, seed
        compile(script(found.recipe), f"seed {seed}", "exec")


def test_every_option_is_drawn_by_some_seed() -> None:
    """Each option must be drawn by some seed, because an option that others always replace would never be tested."""
    seen = {part for seed in range(3000) for part in parts_of(drawn(seed).recipe).items()}
    options = {(name, option) for name, its in CHOICES.items() for option in its[1:]}
    assert options - seen == set()


def test_a_failing_draw_is_reduced_to_the_parts_that_matter() -> None:
    wrong = {"model": "dropout", "data": "loader"}
    large = Draw(normal({**recipe(**wrong), "clip": "norm", "extra": "counter", "every": "4"}), (TOP, TOP))
    small = shrunk(large, lambda draw: wrong.items() <= draw.recipe.items())
    assert parts_of(small.recipe) == wrong
    assert len(small.kills) == 1


HOOK = (
    "ddpjob: model: its communication hook has a state (dict), which is in no state_dict(): a restart does not "
    "continue it, so the gradients differ after it"
)
LATE = (
    "ddpjob: rank 1 did not save step 10: from the snapshot a restart does not continue the random numbers there "
    "(dropout, augmentation), nor what else differs between the ranks. Call save() on every rank."
)
PLACES = (
    "ddpjob: scheduler: changed between should_stop() or keep() and the next optimizer.step(). A restart within such a "
    "step does not use the memory, and a restart goes on from the last save"
)
STRUCK = "STRUCK top 22 1 KILL"
FROM_FOLDER = "ddpjob: resumed at step 20 from /ckpt"
FROM_MEMORY = "ddpjob: resumed at step 22 from the memory on the nodes of ranks 0, 1"


def names_excused(*lines: str, **parts: str) -> set[str]:
    return {part.name for part in excused("\n".join(lines), recipe(**parts))[0]}


def test_a_refusal_allows_differences_in_what_it_names_and_what_depends_on_it() -> None:
    """A refusal about a communication hook must not hide that the script has lost its sampler's position."""
    excuses = names_excused(HOOK, STRUCK, FROM_FOLDER)
    assert {"model", "optimizer"} <= excuses
    assert excuses.isdisjoint({SAMPLES, "reader", "scheduler", "torch"})
    assert "scheduler" in names_excused(HOOK, STRUCK, FROM_FOLDER, scheduler="plateau")


def test_lost_random_numbers_allow_another_model_only_if_training_draws_them() -> None:
    """If training draws no random numbers, lost random states do not explain different weights."""
    assert "model" not in names_excused(LATE, STRUCK, FROM_FOLDER)
    assert "model" not in names_excused(LATE, STRUCK, FROM_FOLDER, draws="none", evaluation="all_ranks")
    assert "model" in names_excused(LATE, STRUCK, FROM_FOLDER, model="dropout")
    assert {SAMPLES, "reader", "model"} <= names_excused(LATE, STRUCK, FROM_FOLDER, data="reader_of_each_rank")
    assert Part(0, "torch") not in excused(f"{LATE}\n{STRUCK}\n{FROM_FOLDER}", recipe())[0]


def test_an_incomplete_file_allows_no_difference_after_a_restart_from_memory() -> None:
    """A file that lacks a late rank's part must allow no difference after a restart from memory."""
    assert names_excused(LATE, STRUCK, FROM_MEMORY, model="dropout") == set()
    assert names_excused(STRUCK, LATE, FROM_FOLDER, model="dropout") != set()  # LATE is logged before the file is read
    assert names_excused(STRUCK, FROM_FOLDER, LATE, model="dropout") == set()


def test_a_rank_that_was_late_for_a_save_may_differ_in_random_numbers_if_the_restart_reports_it() -> None:
    report = "ddpjob: /ckpt/step-20.pt has no random state of rank 1, which did not save in time: seeded from rank 0's"
    log = "\n".join([STRUCK, FROM_FOLDER, report])
    assert excused(log, recipe(model="dropout"))[0] == set()
    found = {part.name for part in excused(log, recipe(model="dropout", data="sampler"), at_restart=True)[0]}
    assert {"torch", "model"} <= found
    assert found.isdisjoint({SAMPLES, "sampler", "scheduler"})


def test_the_seed_of_a_data_loader_does_not_allow_batches_that_are_trained_twice() -> None:
    """A lost random state allows another order of samples. A message about the seed of a DataLoader must not: it would
    hide an epoch that begins again from a state in memory."""
    seed = "ddpjob: a DataLoader draws its seed from torch's global generator: a restart within an epoch does not"
    assert SAMPLES not in names_excused(seed, STRUCK, FROM_MEMORY, data="shuffled")
    assert SAMPLES in names_excused(LATE, STRUCK, FROM_FOLDER, data="shuffled")
    assert SAMPLES not in names_excused(LATE, STRUCK, FROM_FOLDER, data="sequential")


def test_a_refusal_after_the_failure_or_in_favor_of_the_folder_allows_no_difference() -> None:
    """The refusal PLACES is about memory only, so it must not allow differences after a restart from the folder."""
    assert names_excused(STRUCK, HOOK, FROM_FOLDER) == set()
    assert names_excused(PLACES, STRUCK, FROM_FOLDER, scheduler="step") == set()


def test_a_refusal_between_two_kills_allows_differences_after_the_later_one() -> None:
    """A refusal that is logged between two kills must allow differences, because a run per kill would take too long."""
    log = "\n".join([STRUCK, FROM_FOLDER, HOOK, STRUCK, FROM_FOLDER])
    assert excused(log, recipe())[0] == set()
    assert {"model", "optimizer"} <= {part.name for part in excused(log, recipe(), late=True)[0]}
    log = "\n".join([STRUCK, FROM_FOLDER, STRUCK, HOOK, FROM_FOLDER])
    assert excused(log, recipe(), late=True)[0] == set()
    log = "\n".join([STRUCK, FROM_FOLDER, STRUCK, LATE, FROM_FOLDER])  # LATE is logged before the file is read
    assert excused(log, recipe(model="dropout"), late=True)[0] != set()


def test_an_error_that_an_agent_does_not_restart_proves_nothing() -> None:
    """A run must prove nothing if a new agent did not restart the ranks after an error before its first step."""
    whole = Outcome((0,), {0: {}, 1: {}}, {0: {}, 1: {}}, "")
    for log, kind in ((f"{STRUCK}\n{REPEATS}", "UNSTRUCK"), (STRUCK, "FAILED")):
        assert compared(Draw(recipe(), (TOP,)), whole, whole._replace(codes=(75, 1), log=log)).kind == kind


def test_a_step_that_only_one_of_two_runs_makes_is_a_difference() -> None:
    """A step that only one of two runs makes must be a difference, because its samples are trained again."""
    step, its_loss = (SAMPLES, 1), (LOSS, 1)
    whole = Outcome((0,), {0: {}, 1: {}}, {0: {step: [[4]], its_loss: ["0x1"]}, 1: {step: [[5]]}}, "")
    others = {
        "a step too many": {step: [[4]], (SAMPLES, 2): [[6]]},
        "a step that a later restart has undone": {step: [[6], [4]]},
        "a step less": {},
    }
    for name, seen in others.items():
        assert difference(whole, whole._replace(seen=whole.seen | {0: seen})) == {Part(0, SAMPLES)}, name
    other_loss = whole.seen | {0: {step: [[4]], its_loss: ["0x2", "0x1"]}}
    assert difference(whole, whole._replace(seen=other_loss)) == {Part(0, LOSS)}
    made_again = whole.seen | {0: {step: [[4], [4]]}}  # as if the rank was killed before it recorded the step's loss
    assert difference(whole, whole._replace(seen=made_again)) == set()


# Kinds of scripts that once had a wrong result without a report.
WERE_WRONG = (
    "average=averaged_model",
    "buffers=of_each_rank",
    "data=generator mark=keep",
    "accumulation=counted every=7",
    "accumulation=counted mark=stop_some",
    "accumulation=counted every=7 mark=none",
    "optimizer=momentum surgery=momentum_corrected",
    "parameters=ignored_by_ddp",
    "model=layers hook=power_sgd",
    "data=reader_of_each_rank",
    "data=sampler sampler=replaced",
    "scheduler=step scheduler_at=marked",
    "scheduler=step scheduler_at=epoch_end",
    "mark=stop_top",
    "optimizer=zero",
    "model=dropout data=plain_loader",
    "scheduler=step scheduler_at=marked mark=keep save=epoch_end",
    "buffers=of_rank_0 join=yes",
    "average=averaged_model draws=python",
    "model=dropout evaluation=all_ranks evaluation_by=random evaluation_at=marked mark=keep",
    "model=batchnorm evaluation=all_ranks evaluation_by=training_mode evaluation_at=marked",
    "average=deep_copy_by_value average_at=epoch_end mark=keep",
    "parameters=ignored_by_ddp average=averaged_model average_at=epoch_end",
    "model=batchnorm buffers=of_each_rank evaluation=all_ranks evaluation_by=random mark=keep",
    "average=target_replaced",
    "surgery=layer_replaced",
    "backward=perturbed",
    "optimizer=momentum surgery=state_by_data",
    "optimizer=hooked",
    "precision=all_bf16 optimizer=master",
    "backward=noise",
    "mark=rank_0",
    "data=sampler ahead=one",
    "data=sequential load=in_parts save=epoch_end",
    "data=sequential extra=metric save=epoch_end",
    "data=unsaved_sampler extra=counter mark=keep",
    "data=unsaved_loader extra=counter mark=keep",
    "parameters=alternating optimizer=adam surgery=clamp surgery_at=marked mark=keep save=rank_0",
)
FIVE = (
    Kill("forward", 8, 0, "KILL"),
    Kill("marked", 14, 1, "KILL", 1),
    Kill("reduced", 20, 1, "raise", 2),
    Kill("top", 27, 0, "KILL", 3),
    Kill("told", 33, 1, "KILL", 4),
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_script_ends_like_an_undisturbed_one_or_is_refused(name: str) -> None:
    """A killed script must have the result of an undisturbed run, unless a message says what is lost."""
    for _, verdict in verdicts(SCRIPTS[name]):
        assert verdict.kind in ("SAME", "REFUSED"), f"{verdict.why}\n{verdict.log}"


@pytest.mark.long  # slow; ordinary runs test only the scripts in SCRIPTS, and tests/trainer tests each rule
@pytest.mark.parametrize("parts", WERE_WRONG)
def test_a_kind_of_script_that_once_had_wrong_results_is_correct_or_refused(parts: str) -> None:
    """A kind of script that once had wrong results must be correct or refused; random draws would rarely test it."""
    for _, verdict in verdicts(Draw(normal(recipe(**dict(part.split("=") for part in parts.split()))), FIVE)):
        assert verdict.kind in ("SAME", "REFUSED"), f"{verdict.why}\n{verdict.log}"


@pytest.mark.long  # slow; each run tests the typical scripts in SCRIPTS
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_no_draw_is_silently_wrong(seed: int) -> None:
    """No random draw may be silently wrong. For more draws use `make truth N=5000`."""
    wrong = [
        (found, verdict.why) for found, _, verdict in searched(list(range(seed, seed + 100)), 2) if verdict.is_wrong
    ]
    assert wrong == []
