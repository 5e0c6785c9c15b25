"""Training scripts drawn from choices: a recipe names one option of each, and `script` writes the whole program.

Each script is right by the folder: what it does between two steps is done again, or is in the state, where it goes on
from a save. So a run that was killed must end as one that was not, or the library has said before that it cannot.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

EPOCH = 10  # steps
TOTAL = 40
PLAIN = (0.8, 0.6, 0.3)  # how often a choice stays as plain as it can be; one of them for each script

# The first option of each is the plainest: shrinking goes there.
CHOICES: dict[str, tuple[str, ...]] = {
    "model": ("linear", "layers", "dropout", "batchnorm", "tied", "sparse", "complex"),
    "buffers": ("none", "of_each_rank", "of_rank_0"),
    "parameters": ("all", "ignored_by_ddp", "thawed"),
    "second": ("none", "adversary"),
    "hook": ("none", "fp16", "power_sgd", "own"),
    "static_graph": ("no", "yes"),
    "optimizer": (
        "sgd",
        "momentum",
        "adam",
        "adamw_fused",
        "rmsprop",
        "adagrad",
        "nadam",
        "lbfgs",
        "zero",
        "lookahead",
        "sharing",
    ),
    "scheduler": ("none", "step", "one_cycle", "plateau", "sequential", "rewound"),
    "scheduler_at": ("stepped", "marked", "epoch_end"),
    "accumulation": ("none", "no_sync", "counted", "library"),
    "scaler": ("none", "scaler"),
    "clip": ("none", "norm"),
    "surgery": (
        "none",
        "clamp",
        "momentum_corrected",
        "optimizer_replaced",
        "model_replaced",
        "state_cleared",
        "noise",
    ),
    "surgery_at": ("stepped", "marked", "top"),
    "average": ("none", "averaged_model", "deep_copy", "own_object", "deep_copy_by_value"),
    "average_at": ("stepped", "marked"),
    "data": (
        "computed",
        "sampler",
        "loader",
        "workers",
        "reader_of_each_rank",
        "generator",
        "stateful_loader",
    ),
    "sampler": ("one", "replaced"),
    "draws": ("none", "torch", "python", "numpy"),
    "evaluation": ("none", "all_ranks", "rank_0"),
    "evaluation_at": ("stepped", "marked"),
    "evaluation_by": ("computed", "loader", "random"),
    "extra": ("none", "counter", "history_of_each_rank", "always_another"),
    "mark": ("stop", "stop_top", "stop_some", "keep", "none"),
    "save": ("in_loop", "epoch_end", "rank_0", "other_thread", "never"),
    "every": ("10", "7", "4"),
    "place_at_end": ("next_epoch", "last_batch"),
    "best": ("none", "second_snapshot"),
    "load": ("at_once", "in_parts"),
    "memory": ("yes", "no"),
    "folder": ("one", "of_each_rank"),
}
Recipe = Mapping[str, str]


class Kill(NamedTuple):
    """One failure: where it strikes, in which step, which rank, how, in which generation."""

    place: str
    step: int
    rank: int
    how: str
    generation: int = 0


PLACES = ("top", "forward", "reduced", "stepped", "told", "marked", "saved", "epoch_end")
HOWS = ("KILL", "KILL", "KILL", "raise", "TERM")


class Draw(NamedTuple):
    """A script, and what happens to it."""

    recipe: Recipe
    kills: tuple[Kill, ...]
    settled: bool = False
    """Whether the first kill waits until all that was saved is in the folder."""


def plain() -> dict[str, str]:
    """The plainest script."""
    return {name: options[0] for name, options in CHOICES.items()}


def recipe(**parts: str) -> dict[str, str]:
    """The plainest script but for these parts."""
    assert all(option in CHOICES[name] for name, option in parts.items()), parts
    return plain() | parts


def parts_of(recipe: Recipe) -> dict[str, str]:
    """What is not plain in it."""
    return {name: option for name, option in recipe.items() if option != CHOICES[name][0]}


def drawn(seed: int) -> Draw:
    """What this seed draws."""
    chance = random.Random(seed)
    plain = chance.choice(PLAIN)
    found = {
        name: options[0] if chance.random() < plain else chance.choice(options) for name, options in CHOICES.items()
    }
    found = normal(found)
    kills = [_kill(chance, found, 0)]
    if chance.random() < 0.2 and kills[0] is not None:
        kills.append(_kill(chance, found, 1, after=kills[0].step))
    return Draw(found, tuple(kill for kill in kills if kill is not None), settled=chance.random() < 0.5)


def _kill(chance: random.Random, recipe: Recipe, generation: int, after: int = 0) -> Kill | None:
    """after: the step of the kill before. None if no such place follows that."""
    how = chance.choice(HOWS)
    stops = recipe["mark"].startswith("stop") and recipe["save"] != "never" and recipe["scheduler_at"] != "epoch_end"
    if how == "TERM" and not stops:  # a script that stops before the end of its epoch leaves out what is done there
        how = "KILL"
    place = chance.choice([place for place in PLACES if place != "reduced" or recipe["optimizer"] != "lbfgs"])
    ends = _epoch_ends(recipe)
    # Often where epochs meet.
    steps = ends if place == "epoch_end" or chance.random() < 0.3 else list(range(5, TOTAL - 2))
    later = [step for step in steps if step > after + 1]
    if not later:
        return None
    return Kill(place, chance.choice(later), chance.randrange(2), how, generation)


def _epoch_ends(recipe: Recipe) -> list[int]:
    """Steps after which an epoch ends; the sampler that is replaced goes on with batches of half the size."""
    is_replaced = recipe["sampler"] == "replaced" and recipe["data"] == "sampler"
    return [10, 20, 23, 37] if is_replaced else [10, 20, 30]


# ---- options that do not go together -----------------------------------------------------------------------------

# Where the first is chosen, the second is as said. In this order.
RULES: tuple[tuple[tuple[str, str], dict[str, str]], ...] = (
    (("optimizer", "lbfgs"), {"accumulation": "none", "scaler": "none", "clip": "none", "second": "none"}),
    (("optimizer", "lbfgs"), {"model": "linear", "surgery": "none", "hook": "none"}),
    (("optimizer", "zero"), {"surgery": "none", "scaler": "none", "second": "none", "mark": "stop", "save": "in_loop"}),
    (("optimizer", "zero"), {"load": "at_once", "parameters": "all", "best": "none"}),
    (("optimizer", "lookahead"), {"scaler": "none", "surgery": "none"}),
    (("optimizer", "sharing"), {"scaler": "none", "surgery": "none"}),
    (("optimizer", "adamw_fused"), {"scaler": "none"}),
    (
        ("model", "sparse"),
        {"optimizer": "sgd", "clip": "none", "scaler": "none", "hook": "none", "accumulation": "none"},
    ),
    (("model", "sparse"), {"parameters": "all", "surgery": "none", "buffers": "none"}),
    (("model", "complex"), {"optimizer": "adam", "hook": "none", "scaler": "none", "surgery": "none"}),
    (("parameters", "ignored_by_ddp"), {"static_graph": "no", "optimizer": "sgd", "hook": "none", "second": "none"}),
    (("parameters", "thawed"), {"static_graph": "no", "hook": "none", "optimizer": "adam", "second": "none"}),
    (("accumulation", "counted"), {"scheduler": "none", "surgery": "none", "scaler": "none", "static_graph": "no"}),
    (("accumulation", "counted"), {"second": "none", "average": "none"}),
    (("accumulation", "no_sync"), {"static_graph": "no"}),
    (("accumulation", "library"), {"static_graph": "no", "second": "none"}),
    (("second", "adversary"), {"static_graph": "no", "scaler": "none", "buffers": "none"}),
    (("scheduler", "none"), {"scheduler_at": "stepped"}),
    (("scheduler_at", "epoch_end"), {"save": "epoch_end", "every": "10"}),
    (("surgery", "none"), {"surgery_at": "stepped"}),
    (("surgery", "momentum_corrected"), {"optimizer": "momentum"}),
    (("surgery", "state_cleared"), {"optimizer": "momentum"}),
    (
        ("surgery", "optimizer_replaced"),
        {"scheduler": "none", "optimizer": "adam", "load": "at_once", "second": "none"},
    ),
    (("surgery", "optimizer_replaced"), {"surgery_at": "stepped", "parameters": "all"}),
    (("surgery", "model_replaced"), {"scheduler": "none", "optimizer": "adam", "load": "at_once", "second": "none"}),
    (("surgery", "model_replaced"), {"parameters": "all", "hook": "none", "static_graph": "no", "buffers": "none"}),
    (("surgery", "model_replaced"), {"surgery_at": "stepped", "average": "none", "scaler": "none"}),
    (("surgery", "noise"), {"surgery_at": "stepped"}),
    (("average", "none"), {"average_at": "stepped"}),
    (("average", "deep_copy_by_value"), {"load": "at_once"}),
    (("data", "computed"), {"sampler": "one"}),
    (("data", "loader"), {"sampler": "one"}),
    (("data", "workers"), {"sampler": "one", "load": "at_once"}),
    (("data", "generator"), {"sampler": "one", "load": "at_once"}),
    (("data", "reader_of_each_rank"), {"sampler": "one"}),
    (("data", "stateful_loader"), {"sampler": "one"}),
    (("sampler", "replaced"), {"accumulation": "none", "load": "at_once", "scheduler_at": "stepped"}),
    (("evaluation", "none"), {"evaluation_at": "stepped", "evaluation_by": "computed"}),
    (("save", "never"), {"best": "none", "memory": "yes"}),
    (("save", "epoch_end"), {"every": "10"}),
)


def normal(recipe: Recipe) -> dict[str, str]:
    """The same, where options that do not go together are plain."""
    found = dict(recipe)
    for _ in range(3):
        for (name, option), others in RULES:
            if found[name] == option:
                found |= others
        if by_value(found) and found["mark"] == "none" and found["save"] == "never":
            found["mark"] = "keep"
        if found["scheduler_at"] == "epoch_end" and found["save"] != "epoch_end":
            found["scheduler_at"] = "stepped"
        if found["data"] != "workers" or found["save"] != "epoch_end":
            found["place_at_end"] = "next_epoch"
        if found["save"] == "rank_0" and found["optimizer"] == "zero":
            found["save"] = "in_loop"
        if found["average_at"] == "marked" and found["mark"] == "stop_top":
            found["average_at"] = "stepped"
    return found


def by_value(recipe: Recipe) -> bool:
    """Whether something is saved as a value."""
    return recipe["data"] in ("workers", "generator") or recipe["average"] == "deep_copy_by_value"


# ---- the program ---------------------------------------------------------------------------------------------

HEAD = """
import collections, copy, hashlib, itertools, json, os, random, signal, sys, threading
import numpy
import torch, torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
import ddpjob

EPOCH, TOTAL, N = {epoch}, {total}, 320
x = torch.randn(N, 16, generator=torch.Generator().manual_seed(5)); y = x.sum(1, keepdim=True)
kills, settle = json.loads(os.environ["KILLS"]), int(os.environ["SETTLE"])
generation = os.environ["LIFE"] + "." + os.environ["DDPJOB_GENERATION"]

def strike(place, step):
    for its_place, its_step, rank, how, its_generation in kills:
        if [place, step, world.rank, generation] == [its_place, its_step, rank, its_generation]:
            print("STRUCK", place, step, rank, how, file=sys.stderr, flush=True)
            if how == "raise": raise RuntimeError("struck")
            if how == "TERM": os.kill(os.getppid(), signal.SIGTERM)
            else: os.kill(os.getpid(), signal.SIGKILL)

def digest(value):
    if isinstance(value, torch.Tensor):
        if value.is_sparse: value = value.to_dense()
        return digest(value.detach().resolve_conj().contiguous().view(torch.uint8).numpy().tobytes()) if value.dim() else digest(value.item())
    if isinstance(value, dict): return digest(repr([(str(k), digest(v)) for k, v in value.items()]))
    if isinstance(value, (list, tuple, collections.deque)): return digest(repr([digest(v) for v in value]))
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()[:10]

def saw(step, part):
    with open(f"seen-{{world.rank}}", "a") as file:
        print(json.dumps([generation, step, [int(i) for i in part]]), file=file, flush=True)
"""


def script(recipe: Recipe) -> str:
    """The program."""
    return _Writer(normal(recipe)).text()


def names_of(recipe: Recipe) -> set[str]:
    """What the script saves, by its names."""
    writer = _Writer(normal(recipe))
    return {*writer.names(), *writer.values()}


def _block(text: str, indent: int) -> str:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), " " * indent)


class _Writer:
    """Writes one script."""

    def __init__(self, recipe: Recipe) -> None:
        self.r = recipe

    def has(self, name: str, *options: str) -> bool:
        return self.r[name] in options

    def text(self) -> str:
        parts = ", ".join(f"{name}={option}" for name, option in parts_of(self.r).items()) or "the plainest script"
        lines = [f"# {parts}", HEAD.format(epoch=EPOCH, total=TOTAL).strip("\n"), "", self.classes(), ""]
        lines += ["with ddpjob.init() as world:", _block(self.construction(), 4), _block(self.resume(), 4)]
        lines += [_block(self.loop(), 4), _block(self.ending(), 4)]
        return "\n".join(lines) + "\n"

    # ---- classes

    def classes(self) -> str:
        found = [self._net()]
        if self.has("data", "reader_of_each_rank", "stateful_loader"):
            found.append(READER)
        if self.has("average", "own_object"):
            found.append(OWN_AVERAGE)
        if self.has("optimizer", "lookahead"):
            found.append(LOOKAHEAD)
        if self.has("optimizer", "sharing"):
            found.append(SHARING)
        if self.has("extra", "always_another"):
            found.append(ALWAYS_ANOTHER)
        return "\n\n".join(textwrap.dedent(one).strip("\n") for one in found)

    def _net(self) -> str:
        body = {
            "linear": "self.body = torch.nn.Linear(16, 1)",
            "layers": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))",
            "dropout": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))",
            "batchnorm": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))",
            "tied": "one = torch.nn.Linear(16, 16); self.body = torch.nn.Sequential(one, torch.nn.Tanh(), one, torch.nn.Linear(16, 1))",
            "sparse": "self.table = torch.nn.Embedding(8, 16, sparse=True); self.body = torch.nn.Linear(16, 1)",
            "complex": "self.phase = torch.nn.Parameter(torch.ones(16, dtype=torch.cfloat)); self.body = torch.nn.Linear(16, 1)",
        }[self.r["model"]]
        before = {
            "sparse": "a = a + self.table((a[:, 0].abs() * 7 % 8).long())",
            "complex": "a = (a * self.phase).abs()",
        }.get(self.r["model"], "")
        lines = [
            "class Net(torch.nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        {body}",
        ]
        if self.has("buffers", "of_each_rank", "of_rank_0"):
            lines.append('        self.register_buffer("centre", torch.zeros(16))')
        if self.has("parameters", "ignored_by_ddp"):
            lines.append("        self.own = torch.nn.Linear(16, 1)")
        if self.has("parameters", "thawed"):
            lines.append("        self.late = torch.nn.Linear(16, 1); self.late.requires_grad_(False)")
        lines.append("    def forward(self, a):")
        if self.has("buffers", "of_each_rank", "of_rank_0"):
            lines += [
                "        if self.training:",
                "            with torch.no_grad(): self.centre.mul_(0.9).add_(a.mean(0), alpha=0.1)",
                "        a = a - self.centre",
            ]
        if before:
            lines.append(f"        {before}")
        result = "self.body(a)"
        if self.has("parameters", "ignored_by_ddp"):
            result += " + (self.own(a) if step >= 15 else 0)"
        if self.has("parameters", "thawed"):
            result += " + self.late(a)"
        lines.append(f"        return {result}")
        return "\n".join(lines)

    # ---- before the loop

    def construction(self) -> str:
        lines = ["torch.manual_seed(1)", "step = 0", "net = Net()"]
        if self.has("parameters", "ignored_by_ddp"):
            lines.append('DDP._set_params_and_buffers_to_ignore_for_model(net, ["own.weight", "own.bias"])')
        options = ["broadcast_buffers=False"] if self.has("buffers", "of_each_rank") else []
        options += ["static_graph=True"] if self.has("static_graph", "yes") else []
        options += ["find_unused_parameters=True"] if self.has("parameters", "thawed") else []
        if self.has("parameters", "thawed"):  # DDP takes in what is trained when it is made
            lines.append("net.late.requires_grad_(True)")
        lines.append(f"model = DDP(net, {', '.join(options)})" if options else "model = world.wrap(net)")
        lines += self._hook()
        lines.append(f"optimizer = {self._optimizer('net')}")
        if self.has("parameters", "thawed"):
            lines.append("net.late.requires_grad_(False)")
        lines += self._scheduler()
        if self.has("scaler", "scaler"):
            lines.append('scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)')
        if self.has("second", "adversary"):
            lines += [
                "critic = world.wrap(torch.nn.Linear(1, 1))",
                "critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)",
            ]
        lines += self._average()
        lines += self._data()
        lines += self._extra()
        lines.append(f"def objects(): return dict({', '.join(f'{k}={v}' for k, v in self.names().items())})")
        lines.append(f"def values(): return dict({', '.join(f'{k}={v}' for k, v in self.values().items())})")
        folder = 'os.environ["SNAPSHOTS"]' + (' + f"/{world.rank}"' if self.has("folder", "of_each_rank") else "")
        memory = ", memory=False" if self.has("memory", "no") else ""
        where = "None" if self.has("save", "never") else folder
        lines.append(f"snapshot = ddpjob.Snapshot({where}, world{memory})")
        if self.has("best", "second_snapshot"):
            lines.append(f'best = ddpjob.Snapshot({folder} + "-best", world)')
        lines.append(
            "torch.manual_seed(10 + world.rank); random.seed(10 + world.rank); numpy.random.seed(10 + world.rank)"
        )
        return "\n".join(lines)

    def _hook(self) -> list[str]:
        return {
            "none": [],
            "fp16": [
                "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
                "model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
            ],
            "power_sgd": [
                "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power",
                "hook_state = power.PowerSGDState(None, 1, start_powerSGD_iter=5, min_compression_rate=1)",
                "model.register_comm_hook(hook_state, power.powerSGD_hook)",
            ],
            "own": [
                "momenta = {}",
                "def own_hook(state, bucket):",
                "    kept = state.setdefault(bucket.index(), torch.zeros_like(bucket.buffer()))",
                "    kept.mul_(0.5).add_(bucket.buffer())",
                "    work = dist.all_reduce(kept.div(2).clone(), async_op=True).get_future()",
                "    return work.then(lambda done: done.value()[0])",
                "model.register_comm_hook(momenta, own_hook)",
            ],
        }[self.r["hook"]]

    def _optimizer(self, what: str) -> str:
        parameters = f"{what}.parameters()"
        return {
            "sgd": f"torch.optim.SGD({parameters}, lr=0.02)",
            "momentum": f"torch.optim.SGD({parameters}, lr=0.02, momentum=0.9)",
            "adam": f"torch.optim.Adam({parameters}, lr=1e-2)",
            "adamw_fused": f"torch.optim.AdamW({parameters}, lr=1e-2, fused=True)",
            "rmsprop": f"torch.optim.RMSprop({parameters}, lr=1e-3, momentum=0.5)",
            "adagrad": f"torch.optim.Adagrad({parameters}, lr=1e-2)",
            "nadam": f"torch.optim.NAdam({parameters}, lr=1e-3)",
            "lbfgs": f"torch.optim.LBFGS({parameters}, lr=0.1, max_iter=2, history_size=3)",
            "zero": f"__import__('torch.distributed.optim').distributed.optim.ZeroRedundancyOptimizer({parameters}, torch.optim.Adam, lr=1e-2)",
            "lookahead": f"Lookahead({parameters}, lr=0.02, momentum=0.9)",
            "sharing": f"Sharing({parameters}, lr=0.02, momentum=0.9)",
        }[self.r["optimizer"]]

    def _scheduler(self) -> list[str]:
        steps = "EPOCH_COUNT" if self.has("scheduler_at", "epoch_end") else "TOTAL"
        its = {
            "step": "torch.optim.lr_scheduler.StepLR(optimizer, 1 if PER_EPOCH else 5, 0.8)",
            "one_cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=TOTAL + 1, cycle_momentum=False)",
            "plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0 if PER_EPOCH else 2, factor=0.7)",
            "rewound": "torch.optim.lr_scheduler.StepLR(optimizer, 1 if PER_EPOCH else 5, 0.8)",
            "sequential": "torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)], [2])",
        }.get(self.r["scheduler"])
        if its is None:
            return []
        return [f"scheduler = {its.replace('PER_EPOCH', str(steps == 'EPOCH_COUNT'))}"]

    def _average(self) -> list[str]:
        return {
            "none": [],
            "averaged_model": ["average = torch.optim.swa_utils.AveragedModel(net)"],
            "deep_copy": ["average = copy.deepcopy(net)"],
            "own_object": ["average = Average(net)"],
            "deep_copy_by_value": ["average = copy.deepcopy(net)"],
        }[self.r["average"]]

    def _data(self) -> list[str]:
        sampler = "sampler = ddpjob.GlobalBatchSampler(N, global_batch=32, seed=7)"
        loader = "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(N)), batch_sampler=sampler"
        return {
            "computed": [],
            "sampler": [sampler],
            "loader": [sampler, loader + ")"],
            "workers": [sampler, loader + ", num_workers=1)"],
            "reader_of_each_rank": ["reader = Reader(world.rank)"],
            "stateful_loader": ["reader = Reader(world.rank)"],
            "generator": ["generator = torch.Generator().manual_seed(3)"],
        }[self.r["data"]]

    def _extra(self) -> list[str]:
        return {
            "none": [],
            "counter": ["extra = {'steps': 0}"],
            "history_of_each_rank": ["extra = {'losses': []}"],
            "always_another": ["extra = Another()"],
        }[self.r["extra"]]

    def names(self) -> dict[str, str]:
        """What is saved as an object."""
        found = {"model": "model", "optimizer": "optimizer"}
        if not self.has("scheduler", "none"):
            found["scheduler"] = "scheduler"
        if self.has("scaler", "scaler"):
            found["scaler"] = "scaler"
        if self.has("second", "adversary"):
            found |= {"critic": "critic", "critic_optimizer": "critic_optimizer"}
        if not self.has("average", "none", "deep_copy_by_value"):
            found["average"] = "average"
        if self.has("data", "sampler", "loader"):
            found["sampler"] = "sampler"
        if self.has("data", "reader_of_each_rank", "stateful_loader"):
            found["reader"] = "reader"
        if not self.has("extra", "none"):
            found["extra"] = "extra"
        return found

    def values(self) -> dict[str, str]:
        """What is saved as a value."""
        found = {}
        if self.has("data", "workers"):
            found["sampler"] = "sampler.state_dict(epoch=epoch, batches=batches)"
        if self.has("data", "generator"):
            found["generator"] = "generator.get_state()"
        if self.has("average", "deep_copy_by_value"):
            found["average"] = "average.state_dict()"
        return found

    def resume(self) -> str:
        lines = ["epoch = batches = 0"]
        loaded = "objects()"
        if self.has("data", "workers"):
            loaded = "{**objects(), 'sampler': sampler}"
        if self.has("surgery", "optimizer_replaced"):
            lines += ["probe = None"]
        if self.has("load", "in_parts"):
            lines += ["for name, value in objects().items():", "    step = snapshot.load(**{name: value})"]
        else:
            lines.append(f"step = snapshot.load(**{loaded})")
        if self.has("data", "generator"):
            lines.append("if step: generator.set_state(snapshot.state['generator'])")
        if self.has("average", "deep_copy_by_value"):
            lines.append("if step: average.load_state_dict(snapshot.state['average'])")
        if self.has("parameters", "thawed"):
            lines.append("if step >= 15: net.late.requires_grad_(True)")
        if self.has("sampler", "replaced"):
            lines += [
                "def other(old):",
                "    new = ddpjob.GlobalBatchSampler(N, global_batch=16, seed=7); new.load_state_dict(old.state_dict()); return new",
                "if step >= 23: sampler = other(sampler)",
            ]
        first = "sampler.current_epoch" if self.has("data", "sampler", "loader", "workers") else "step // EPOCH"
        lines.append(f"first = {first}")
        lines.append("def note():")
        lines += [f"    {line}" for line in self._mark("note")]
        return "\n".join(lines)

    def _mark(self, _: str) -> list[str]:
        return ["pass"]

    # ---- the loop

    def loop(self) -> str:
        lines = ["stop = False", "for epoch in range(first, 99):", *self._iteration()]
        lines += [f"        {line}" for line in self._body()]
        if self.has("sampler", "replaced"):
            lines.append("        if step == 23: sampler = other(sampler); break")
        lines.append("        if step == TOTAL: break")
        lines += [f"    {line}" for line in self._epoch_end()]
        lines.append("    if step == TOTAL: break")
        return "\n".join(lines)

    def _iteration(self) -> list[str]:
        if self.has("data", "computed", "reader_of_each_rank", "stateful_loader", "generator"):
            return ["    while step < EPOCH * (epoch + 1):"]
        if self.has("data", "sampler") and self.has("sampler", "replaced"):
            return ["    epoch = sampler.current_epoch", "    for part in sampler.epoch(epoch):"]
        if self.has("data", "sampler"):
            return ["    for part in sampler.epoch(epoch):"]
        return ["    sampler.set_epoch(epoch)", "    for batches, (part,) in enumerate(loader, start=1):"]

    def _body(self) -> list[str]:
        lines = ["if step == settle: snapshot.wait(); dist.barrier()"] if not self.has("save", "never") else []
        lines += ["strike('top', step)"]
        if self.has("mark", "stop_top"):
            lines.append("stop = ddpjob.should_stop(step + 1)")
        lines += self._surgery("top")
        lines += {
            "computed": ["part = [(step * 32 + world.rank * 16 + i) % N for i in range(16)]"],
            "reader_of_each_rank": ["part = reader.next()"],
            "stateful_loader": ["part = next(iter(reader))"],
            "generator": ["part = torch.randint(0, N, (32,), generator=generator)[world.rank::2].tolist()"],
        }.get(self.r["data"], ["part = [int(i) for i in part]"])
        if self.has("parameters", "thawed"):
            lines.append("if step == 15: net.late.requires_grad_(True)")
        lines += self._draws()
        lines += ["saw(step + 1, part)", *self._step(), "step += 1"]
        lines += self._extra_step()
        lines += self._surgery("stepped") + self._piece("stepped")
        lines += ["strike('stepped', step)", "ddpjob.progress(step=step, total=TOTAL)", "strike('told', step)"]
        lines += self._marks()
        lines += ["strike('marked', step)"]
        lines += self._surgery("marked") + self._piece("marked")
        lines += self._saves()
        lines += ["strike('saved', step)"]
        return lines

    def _draws(self) -> list[str]:
        return {
            "none": ["noise = 0"],
            "torch": ["noise = 0.1 * torch.randn(16)"],
            "python": ["noise = random.gauss(0, 0.1)"],
            "numpy": ["noise = float(numpy.random.normal(0, 0.1))"],
        }[self.r["draws"]]

    def _step(self) -> list[str]:
        loss = "F.mse_loss(model(x[PART] + noise), y[PART])"
        whole = loss.replace("PART", "part")
        if self.has("second", "adversary"):
            whole = f"{whole} + 0.01 * critic(net(x[part])).square().mean()"
        if self.has("optimizer", "lbfgs"):
            return [
                "def closure():",
                f"    optimizer.zero_grad(); loss = {whole}; loss.backward(); return loss",
                "strike('forward', step)",
                "loss = optimizer.step(closure).detach()",
            ]
        backward = "scaler.scale(loss).backward()" if self.has("scaler", "scaler") else "loss.backward()"
        lines: list[str] = []
        if self.has("second", "adversary"):
            lines += [
                "critic_optimizer.zero_grad()",
                "F.mse_loss(critic(net(x[part]).detach()), y[part]).backward()",
                "critic_optimizer.step()",
            ]
        if self.has("accumulation", "counted"):
            return [
                *lines,
                f"loss = {whole} / 4",
                "strike('forward', step)",
                "loss.backward(); loss = loss.detach()",
                "strike('reduced', step)",
                "if (step + 1) % 4 == 0:",
                *[f"    {line}" for line in self._optimizer_step()],
                "    optimizer.zero_grad()",
            ]
        lines.append("optimizer.zero_grad()")
        if self.has("accumulation", "library"):
            lines += [
                "def loss_of(piece): return F.mse_loss(model(x[piece] + noise), y[piece], reduction='sum')",
                "strike('forward', step)",
                "loss = ddpjob.accumulate(model, part, 32, loss_of, micro_batch=6"
                + (", backward=lambda loss: scaler.scale(loss).backward())" if self.has("scaler", "scaler") else ")"),
            ]
        elif self.has("accumulation", "no_sync"):
            lines += [
                "with model.no_sync():",
                f"    loss = {loss.replace('PART', 'part[:8]')} / 2; {backward}",
                "strike('forward', step)",
                f"loss = {loss.replace('PART', 'part[8:]')} / 2; {backward}; loss = loss.detach()",
            ]
        else:
            lines += [f"loss = {whole}", "strike('forward', step)", f"{backward}; loss = loss.detach()"]
        lines.append("strike('reduced', step)")
        return lines + self._optimizer_step()

    def _optimizer_step(self) -> list[str]:
        lines = []
        if self.has("clip", "norm"):
            if self.has("scaler", "scaler"):
                lines.append("scaler.unscale_(optimizer)")
            lines.append("torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)")
        lines += ["scaler.step(optimizer); scaler.update()"] if self.has("scaler", "scaler") else ["optimizer.step()"]
        return lines

    def _extra_step(self) -> list[str]:
        return {
            "counter": ["extra['steps'] += len(part)"],
            "history_of_each_rank": ["extra['losses'] = [*extra['losses'], float(loss)][-5:]"],
        }.get(self.r["extra"], [])

    def _surgery(self, at: str) -> list[str]:
        place = "top" if self.has("surgery", "momentum_corrected") else self.r["surgery_at"]
        if place != at:
            return []
        now = "step == 20" if at == "top" else "step == 21"
        return {
            "clamp": ["for p in net.parameters(): p.data.clamp_(-0.2, 0.2)"],
            "noise": [
                "if step % 5 == 0:",
                "    with torch.no_grad():",
                "        for p in net.parameters(): p.add_(torch.full_like(p, 1e-3))",
            ],
            "momentum_corrected": [
                f"if {now}:",
                "    optimizer.param_groups[0]['lr'] *= 0.1",
                "    for state in optimizer.state.values(): state['momentum_buffer'].mul_(0.1)",
            ],
            "state_cleared": [f"if {now}: optimizer.state.clear()"],
            "model_replaced": [
                "if step == 21:",
                "    net = Net(); model = world.wrap(net); optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)",
            ],
            "optimizer_replaced": ["if step == 21: optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)"],
        }.get(self.r["surgery"], [])

    def _piece(self, at: str) -> list[str]:
        lines: list[str] = []
        if not self.has("scheduler", "none") and self.r["scheduler_at"] == at:
            lines += self._scheduler_step()
        if self.r["average_at"] == at:
            lines += {
                "averaged_model": ["average.update_parameters(net)"],
                "deep_copy": [
                    "with torch.no_grad():",
                    "    for a, p in zip(average.parameters(), net.parameters()): a.lerp_(p, 0.1)",
                ],
                "own_object": ["average.update(net)"],
                "deep_copy_by_value": [
                    "with torch.no_grad():",
                    "    for a, p in zip(average.parameters(), net.parameters()): a.lerp_(p, 0.1)",
                ],
            }.get(self.r["average"], [])
        if not self.has("evaluation", "none") and self.r["evaluation_at"] == at:
            lines += self._evaluation()
        return lines

    def _scheduler_step(self) -> list[str]:
        if self.has("scheduler", "plateau"):
            return ["mean = loss.clone(); dist.all_reduce(mean); scheduler.step(float(mean))"]
        if self.has("scheduler", "rewound"):
            return [
                "scheduler.step()",
                "if step == 20: scheduler.load_state_dict(scheduler.state_dict() | {'last_epoch': 0})",
            ]
        return ["scheduler.step()"]

    def _evaluation(self) -> list[str]:
        who = "step % 5 == 0 and world.rank == 0" if self.has("evaluation", "rank_0") else "step % 5 == 0"
        how = {
            "computed": ["net(x[:64])"],
            "loader": [
                "for (some,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:32]), 16): net(some)"
            ],
            "random": ["net(x[:64] + torch.rand(64, 1))"],
        }[self.r["evaluation_by"]]
        return [
            f"if {who}:",
            "    net.eval()",
            "    with torch.no_grad():",
            *[f"        {line}" for line in how],
            "    net.train()",
        ]

    def _state(self) -> str:
        return "**objects(), **values()"

    def _marks(self) -> list[str]:
        return {
            "stop": ["stop = ddpjob.should_stop(step)"],
            "stop_top": [],
            "stop_some": ["if step % 2 == 0: stop = ddpjob.should_stop(step)"],
            "keep": [f"snapshot.keep(step, {self._state()})"],
            "none": [],
        }[self.r["mark"]]

    def _saves(self) -> list[str]:
        lines = []
        save = f"snapshot.save(step, {self._state()})"
        if self.has("save", "other_thread"):
            save = f"saving = threading.Thread(target=lambda: {save}); saving.start(); saving.join()"
        if self.has("save", "rank_0"):
            save = f"if world.rank == 0: {save}"
        if self.has("optimizer", "zero"):
            save = f"optimizer.consolidate_state_dict(0); {save}"
        if self.has("save", "in_loop", "rank_0", "other_thread"):
            lines += [f"if stop or step % {self.r['every']} == 0:", f"    {save}"]
        elif self.has("save", "epoch_end"):
            lines += ["if stop:", f"    {save}"]
        if self.has("best", "second_snapshot"):
            lines.append(f"if step % 6 == 0: best.save(step, {self._state()})")
        if self.r["mark"].startswith("stop") and not self.has("save", "never"):
            lines.append("if stop: raise ddpjob.Stopped(step)")
        return lines

    def _epoch_end(self) -> list[str]:
        lines: list[str] = []
        if self.has("scheduler_at", "epoch_end"):
            lines += self._scheduler_step()
        if self.has("save", "epoch_end"):
            if self.has("data", "workers") and self.has("place_at_end", "next_epoch"):
                lines += ["epoch, batches = epoch + 1, 0  # its work is done: a resume must not end it again"]
            save = f"snapshot.save(step, {self._state()})"
            lines.append(f"optimizer.consolidate_state_dict(0); {save}" if self.has("optimizer", "zero") else save)
        return [*lines, "strike('epoch_end', step)"]

    def ending(self) -> str:
        lines = ["snapshot.close()"]
        if self.has("best", "second_snapshot"):
            lines.append("best.close()")
        if self.has("optimizer", "zero"):
            lines += ["optimizer.consolidate_state_dict(0)"]
        lines += [
            "if world.rank == 0 or 'Zero' not in type(optimizer).__name__:",
            "    states = {k: v.state_dict() if hasattr(v, 'state_dict') else v for k, v in objects().items() if k != 'extra' or not isinstance(v, torch.nn.Module)}",
            "else:",
            "    states = {}",
            "result = {k: digest(v) for k, v in states.items()}",
            "result |= {k: digest(v) for k, v in values().items()}",
        ]
        if self.has("extra", "always_another"):
            lines.append("result.pop('extra', None)")
        lines += [
            "result['torch'], result['python'] = digest(torch.get_rng_state()), digest(random.getstate())",
            "result['numpy'] = digest(str(numpy.random.get_state()))",
            "with open(f'result-{world.rank}', 'w') as file: json.dump(result, file)",
        ]
        return "\n".join(lines)


READER = """
class Reader:
    # Draws from a shard of each rank.
    def __init__(self, shard):
        self.shard, self.place = shard, 0
    def next(self):
        part = [self.shard * 160 + (self.place * 16 + i) % 160 for i in range(16)]
        self.place += 1
        return part
    def __iter__(self):
        while True: yield self.next()
    def state_dict(self): return {"shard": self.shard, "place": self.place}
    def load_state_dict(self, state): self.shard, self.place = state["shard"], state["place"]
"""
OWN_AVERAGE = """
class Average:
    def __init__(self, net):
        self.values, self.updates = [p.detach().clone() for p in net.parameters()], 0
    def update(self, net):
        self.updates += 1
        for value, p in zip(self.values, net.parameters()): value.lerp_(p.detach(), 0.1)
    def state_dict(self): return {"values": self.values, "updates": self.updates}
    def load_state_dict(self, state):
        self.updates = state["updates"]
        for value, saved in zip(self.values, state["values"]): value.copy_(saved)
"""
LOOKAHEAD = """
class Lookahead(torch.optim.SGD):
    # Slow weights, made at the fifth step.
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None: continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                if state["count"] % 5 == 0:
                    if "slow" not in state: state["slow"] = p.detach().clone()
                    state["slow"].lerp_(p.detach(), 0.5); p.data.copy_(state["slow"])
        return loss
"""
SHARING = """
class Sharing(torch.optim.SGD):
    # Has the parameters themselves in its state.
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None: self.state[p]["shared"] = p.data
        return loss
"""
ALWAYS_ANOTHER = """
class Another:
    # Gives another state each time.
    count = 0
    def state_dict(self):
        self.count += 1
        return {"given": self.count}
    def load_state_dict(self, state): pass
"""
