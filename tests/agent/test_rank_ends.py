"""Reports about jobs that ended with 0, but whose replicas differ or whose ranks trained alone."""

import json
import sys
from typing import Any

import pytest
from agents import Launcher, finish

# Each function is one training; the tests check the findings about its model.
TRAININGS = """
import contextlib, copy, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["RANK"])

def made(**options):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    return DDP(net, **options)

def train(model, call=None, steps=6, around=contextlib.nullcontext, lr=0.1, dtype=torch.float32):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        with around():
            (call or model)(torch.randn(4, 4, generator=generator).to(dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

# ---- not kept in step, in this order ---------------------------------------------------------------------

def every_backward_in_no_sync():
    model = made()
    train(model, around=model.no_sync)

def around_the_wrapper():
    model = made()
    train(model, call=model.module)

def a_checkpoint_loaded_on_one_rank():
    model = made()
    if rank == 1:
        model.module.load_state_dict({name: value + 1 for name, value in model.module.state_dict().items()})
    train(model)

def another_learning_rate():
    train(made(), lr=0.1 + 0.1 * rank)

def changed_by_hand_amid_the_training():
    model = made()
    train(model, steps=30)
    if rank == 1:
        with torch.no_grad():
            model.module[2].bias.add_(1)
    train(model, steps=30)

def no_sync_after_a_thousand_passes():
    model = made()
    train(model, steps=1100, lr=1e-4)
    train(model, steps=7, around=model.no_sync)

def no_sync_in_the_last_two_passes():
    model = made()
    train(model, steps=29)
    train(model, steps=2, around=model.no_sync)

class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)

def another_dtype_on_one_rank():
    model = made()
    train(model, around=model.no_sync, dtype=torch.float32)
    model.module.to(torch.float64 if rank else torch.float32)
    train(model, around=model.no_sync, dtype=torch.float64 if rank else torch.float32, steps=6)

def with_a_last_layer_that_is_not_used():
    train(DDP(Half(), find_unused_parameters=True), lr=0.1 + rank)

# ---- right -------------------------------------------------------------------------------------------------

def plain():
    train(made())

def accumulated():
    model = made()
    for _ in range(3):
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(4, 4) * rank).sum().backward()
        train(model, steps=1)

def averaged_weights_on_rank_0():
    model = made()
    train(model)
    if rank == 0:
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data * 0.9)

def the_best_checkpoint_loaded_on_rank_0():
    model = made()
    best = copy.deepcopy(model.module.state_dict())
    train(model)
    if rank == 0:
        model.module.load_state_dict(best)

def pruned_and_put_in_half_on_rank_0():
    model = made()
    train(model)
    if rank == 0:
        model.module[0].weight.data = torch.zeros(8, 4)
        model.module.half()

def a_learning_rate_looked_for_on_rank_0():
    model = made()
    before = copy.deepcopy(model.module.state_dict())
    if rank == 0:
        train(model, call=model.module)
        model.module.load_state_dict(before)
    train(model)
    averaged = [parameter.data.mul_(1 - 0.1 * rank) for parameter in model.parameters()]

def evaluated_on_rank_0():
    model = made()
    train(model, steps=2)
    if rank == 0:
        model.eval()
        model.module(torch.ones(1, 4)).sum().backward()
        model.train()
        model.zero_grad()
    train(model, steps=4)

def ignored():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    with torch.no_grad():
        net[0].weight.fill_(rank)
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    train(DDP(net))

def frozen():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    net[0].requires_grad_(False)
    model = DDP(net)
    with torch.no_grad():
        net[0].weight.fill_(rank)
    train(model)

def not_a_number():
    train(made(), lr=float("nan"))

def a_group_of_one():
    group = [dist.new_group([one]) for one in range(2)][rank]
    model = DDP(torch.nn.Linear(4, 1 + rank), process_group=group)
    train(model)

def averaged_weights_after_a_thousand_passes():
    model = made()
    train(model, steps=1100, lr=1e-4)
    for parameter in model.parameters():
        parameter.data = parameter.data * (0.9 + rank)

def averaged_weights_evaluated_with_gradients_on_rank_0():
    model = made()
    for _ in range(4):
        train(model, steps=5)
        if rank == 0:
            own = copy.deepcopy(model.module.state_dict())
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
            for _ in range(3):
                model.module(torch.ones(1, 4)).sum().backward()
            model.zero_grad()
            model.module.load_state_dict(own)
    if rank == 0:
        for parameter in model.parameters():
            parameter.data.mul_(0.9)

def with_parts_unused():
    train(DDP(Half(), find_unused_parameters=True))

def sparse():
    model = DDP(torch.nn.Embedding(8, 2, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.tensor([rank, 5])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def of_another_hook():
    model = made()
    model.register_comm_hook(None, lambda _, bucket: torch.futures.Future() if False else done(bucket))
    train(model)

def done(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

dist.init_process_group("gloo")
for training in TRAININGS:
    training()
dist.destroy_process_group()
sys.exit(0)
"""


def trained(launcher: Launcher, *names: str) -> list[str]:
    """Return the findings of two nodes that run these trainings one after the other. Only node 0 reports."""
    script = launcher.script(TRAININGS.replace("in TRAININGS", f"in [{', '.join(names)}]"))
    ran = [finish(node) for node in launcher.nodes(2, script, is_warm=True)]
    assert [node.returncode for node in ran] == [0, 0], [node.stderr for node in ran]
    assert ran[1].stderr == ""
    assert not (launcher.folder / "termination-1.json").exists()
    message = launcher.folder / "termination-0.json"
    found: list[dict[str, Any]] = json.loads(message.read_text())["findings"] if message.exists() else []
    assert {finding["reason"] for finding in found} <= {"ReplicasDiffer"}
    texts = [finding["message"] for finding in found]
    assert ran[0].stderr.splitlines() == [f"ddprun: {text}" for text in texts]
    return texts


def test_replicas_that_differ_are_named_at_the_end(launcher: Launcher) -> None:
    """Replicas that differ must be named at the end, because the exit code is 0."""
    found = trained(
        launcher,
        "every_backward_in_no_sync",
        "around_the_wrapper",
        "a_checkpoint_loaded_on_one_rank",
        "another_learning_rate",
        "changed_by_hand_amid_the_training",
        "another_dtype_on_one_rank",
        "with_a_last_layer_that_is_not_used",
    )
    who = "rank 1 ended with other parameters than rank 0: "
    why = "; the replicas were not kept in step, e.g. every backward ran in no_sync()"
    before = "; they differed before the first step, e.g. a checkpoint was loaded on one rank after DDP(...)"
    assert found == [
        f"{who}0.weight is the first that differs{why}",
        f"{who}0.weight is the first that differs{why}",
        f"{who}0.weight is the first that differs{before}",
        f"{who}0.weight is the first that differs{why}",
        f"{who}2.bias is the first that differs{why}",
        f"{who}0.weight is the first that differs (float64 where rank 0 has float32){why}",
        f"{who}used.weight is the first that differs{why}",
    ]


def test_replicas_that_diverge_late_are_named_too(launcher: Launcher) -> None:
    """Replicas that diverge only in the last phase, or in a later fine-tuning, must be named, too."""
    found = trained(launcher, "no_sync_after_a_thousand_passes", "no_sync_in_the_last_two_passes")
    who = "rank 1 ended with other parameters than rank 0: 0.weight is the first that differs; "
    assert found == [f"{who}the replicas were not kept in step, e.g. every backward ran in no_sync()"] * 2


def test_changes_to_the_model_after_the_training_are_not_reported(launcher: Launcher) -> None:
    """A correct job must end without a warning. Otherwise users would learn to ignore all warnings."""
    right = TRAININGS.partition("# ---- right")[2].partition("def done(")[0]
    names = [line.split()[1].partition("(")[0] for line in right.splitlines() if line.startswith("def ")]
    assert len(names) == 16
    assert trained(launcher, *names) == []


WITH_LIBRARY = """
import torch, ddpjob
from torch.nn.parallel import DistributedDataParallel as DDP

with ddpjob.init(backend="gloo") as world:
    torch.manual_seed(3)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + world.rank)
    for step in range(1, 7):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        ddpjob.progress(step)
"""


def test_ranks_without_a_fork_server_are_compared_if_they_use_the_library(launcher: Launcher) -> None:
    """Without a fork server, as with a shell around Python, ranks that use the library must be compared."""
    words = ["--no-python", "sh", "-c", f"{sys.executable} {launcher.script(WITH_LIBRARY)}; exit $?"]
    done = finish(launcher.ddprun("--nproc-per-node", 2, *words))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    text = "ddprun: rank 1 ended with other parameters than rank 0: weight is the first that differs; the replicas were"
    assert text in done.stderr


ALONE = """
import os, sys
import torch
if WAY == "no group":
    torch.ones(2, requires_grad=True).sum().backward()
elif WAY == "groups of one":
    path = f"{os.getcwd()}/{os.environ['RANK']}"
    form = torch.distributed.init_process_group
    form("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    torch.ones(2, requires_grad=True).sum().backward()
elif WAY == "by another library":
    sys.modules["horovod"] = sys
    torch.ones(2, requires_grad=True).sum().backward()
elif WAY == "a forward pass only":
    torch.nn.Linear(2, 2)(torch.ones(2))
elif os.environ["RANK"] == "1" or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    torch.ones(2, requires_grad=True).sum().backward()
    os._exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 3)
"""


@pytest.mark.parametrize("way", ["no group", "groups of one"])
def test_ranks_that_trained_alone_are_reported_although_they_exited_with_0(launcher: Launcher, way: str) -> None:
    """Ranks that trained alone must be reported, for example if `--launcher pytorch` is missing."""
    script = launcher.script(ALONE.replace("WAY", repr(way)))
    done = finish(launcher.warm("--nproc-per-node", 2, script))
    text = "ddprun: 2 ranks ran, but none formed a process group with another: each trained a model"
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(text)
    message = json.loads((launcher.folder / "termination.json").read_text())
    assert [finding["reason"] for finding in message["findings"]] == ["NoProcessGroup"]


@pytest.mark.parametrize("way", ["a forward pass only", "by another library", "an end that nobody sees"])
def test_ranks_with_a_possible_reason_to_form_no_group_are_not_reported(launcher: Launcher, way: str) -> None:
    """Ranks with a possible reason to form no group (own data, predictions, Horovod) must not be reported."""
    script = launcher.script(ALONE.replace("WAY", repr(way)))
    # A forked process might inherit autograd threads that another test has started here.
    start = launcher.ddprun if way == "a forward pass only" else launcher.warm
    done = finish(start("--nproc-per-node", 2, script))
    assert done.returncode == 0
    assert "process group" not in done.stderr


LOST = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
class Done(Exception): pass
def main():
    raise {raised}
    torch.distributed.init_process_group("gloo")
{around}
"""


@pytest.mark.parametrize(
    ("raised", "around", "reason", "text"),
    [
        (
            "KeyError(1)",
            "try: main()\nfinally: sys.exit(0)",
            "FailureInLog",
            "rank 0 has failed in train.py:6, although",
        ),
        ("KeyError(1)", "try: main()\nexcept KeyError: sys.exit()", "FailureInLog", "the exit code is 0: KeyError: 1"),
        ("KeyError(1)", "with ThreadPoolExecutor() as pool: pool.submit(main)", "NoProcessGroup", "none formed a"),
        ("Done()", "try: main()\nexcept Done: sys.exit(0)", "", ""),
    ],
)
def test_a_failure_that_a_script_loses_makes_its_success_suspicious(launcher, raised, around, reason, text):
    """The script drops the failure: it prints nothing and exits with 0, although no rank has trained."""
    # A forked copy of pytest has pytest as __main__, in which a rank would not find the script.
    start = launcher.ddprun if reason == "NoProcessGroup" else launcher.warm
    done = finish(start("--nproc-per-node", 2, launcher.script(LOST.format(raised=raised, around=around))))
    assert done.returncode == 0
    message = launcher.folder / "termination.json"
    found = json.loads(message.read_text())["findings"] if message.exists() else []
    assert [finding["reason"] for finding in found] == ([reason] if reason else [])
    assert all(text in finding["message"] for finding in found)
