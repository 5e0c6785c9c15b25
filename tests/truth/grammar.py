"""Training scripts drawn at random. A recipe names one option of each choice, and `script` writes the program for it.

Each script resumes correctly from the folder: everything that it does after a save is repeated, or is part of the
state. So a killed run must end like an undisturbed one, unless the library has reported before the kill what it cannot
restore."""

import random
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

EPOCH = 10  # steps in an epoch
KILLS_MAX = 6  # largest number of generations that are killed in a run
PLAIN = (0.8, 0.6, 0.3)  # each script draws one of these as its probability of a plain (first) option

# The first option of each choice is the plain one. A failing recipe is reduced towards the plain options.
_OPTIONS = {
    "model": "linear layers dropout batchnorm tied sparse complex spectral weight_norm cumulative own_norm "
    "plain_norm stochastic_depth momentum_encoder convolution checkpointed reentrant",
    "buffers": "none of_each_rank of_rank_0",
    "parameters": "all ignored_by_ddp thawed thawed_group alternating",
    "second": "none adversary head",
    "hook": "none fp16 power_sgd own",
    "ddp": "plain static_graph find_unused bucket_view",
    "precision": "float32 bf16 all_bf16",
    "join": "no yes",
    "optimizer": "sgd momentum adam adamw_fused rmsprop adagrad nadam lbfgs zero lookahead sharing groups adafactor "
    "post_local master hooked groups_of_sets",
    "scheduler": "none step one_cycle plateau plateau_of_each_rank sequential rewound restarts falling by_hand in_hook "
    "looked_ahead groups_by_hand swa_rate",
    "scheduler_at": "stepped marked epoch_end top",
    "accumulation": "none no_sync counted library",
    "inner": "one two varying",
    "backward": "plain perturbed penalty noise noise_of_each_rank",
    "scaler": "none scaler",
    "clip": "none norm value cancelled skipped",
    "surgery": "none clamp momentum_corrected optimizer_replaced model_replaced state_cleared noise layer_replaced "
    "state_by_data optimizer_loaded normalised rate_finder reset_once rate_once frozen_once buffer_once",
    "surgery_at": "stepped marked top",
    "average": "none averaged_model deep_copy own_object deep_copy_by_value target_replaced target_loaded by_data "
    "of_all ema_model",
    "average_at": "stepped marked epoch_end",
    "data": "computed sampler loader workers reader_of_each_rank generator stateful_loader persistent_workers "
    "distributed plain_loader weighted iterable shuffled sequential unsaved_sampler unsaved_loader begun_by_state",
    "augmented": "no torch python numpy",
    "sampler": "one replaced",
    "ahead": "no one all forever",
    "draws": "none torch python numpy mixup unequal seeded by_epoch",
    "evaluation": "none all_ranks rank_0 once",
    "evaluation_at": "stepped marked epoch_end",
    "evaluation_by": "computed loader random training_mode swapped fork_rng second_sampler deciding calibrated",
    "extra": "none counter history_of_each_rank always_another metric early_stop best_copy criterion adaptive "
    "hard_examples tensor clip_history normalizer best_restored of_rank_0 value_of_rank_0 unequal_number",
    "mark": "stop stop_top stop_some stop_keep keep none rank_0",
    "save": "in_loop epoch_end rank_0 other_thread never",
    "every": "10 7 4",
    "place_at_end": "next_epoch last_batch",
    "best": "none second_snapshot",
    "load": "at_once in_parts looked_at",
    "total": "40 37 43 150",
    "memory": "yes no",
    "folder": "one of_each_rank",
    "nodes": "one two",
}
CHOICES = {name: tuple(options.split()) for name, options in _OPTIONS.items()}
Recipe = Mapping[str, str]


class Kill(NamedTuple):
    """A failure: place in the step, step, rank, kind of failure, generation."""

    place: str
    step: int
    rank: int
    how: str
    generation: int = 0


PLACES = ("top", "forward", "reduced", "stepped", "told", "marked", "saved", "epoch_end", "evaluated")
HOWS = ("KILL", "KILL", "KILL", "raise", "TERM")


class Draw(NamedTuple):
    """A script and the failures of its run."""

    recipe: Recipe
    kills: tuple[Kill, ...]
    settled: bool = False
    """True if the first kill waits until all saves are in the folder."""


def plain() -> dict[str, str]:
    """Return the recipe with the plain option of each choice."""
    return {name: options[0] for name, options in CHOICES.items()}


def recipe(**parts: str) -> dict[str, str]:
    """Return the plain recipe with these options instead."""
    assert all(option in CHOICES[name] for name, option in parts.items()), parts
    return plain() | parts


def parts_of(recipe: Recipe) -> dict[str, str]:
    """Return the choices and options that are not plain."""
    return {name: option for name, option in recipe.items() if option != CHOICES[name][0]}


def drawn(seed: int, number: int = 0) -> Draw:
    """Return the script for this seed, and the kills of its run with this number."""
    chance = random.Random(seed)
    plain = chance.choice(PLAIN)
    found = {
        name: options[0] if chance.random() < plain else chance.choice(options) for name, options in CHOICES.items()
    }
    found = normal(found)
    chance = random.Random(f"{seed} {number}")
    kills: list[Kill] = []
    for left in range(chance.randint(1, KILLS_MAX), 0, -1):
        kills += _kill(chance, found, kills, left)
    both = [kill for kill in kills if kill.how == "KILL" and chance.random() < 0.1]
    kills += [kill._replace(place=chance.choice(PLACES[:-2]), rank=1 - kill.rank) for kill in both]
    return Draw(found, tuple(kills), settled=chance.random() < 0.5)


def _kill(chance: random.Random, recipe: Recipe, before: list[Kill], left: int) -> list[Kill]:
    """Return one more kill, or nothing if no step is left. With a large `left` the kill comes early."""
    how = chance.choice(HOWS)
    stops = recipe["mark"].startswith("stop") and recipe["save"] != "never" and not works_at_epoch_end(recipe)
    stops &= recipe["nodes"] == "one"  # of two agents, only one would end
    stops &= recipe["data"] not in FROM_THE_FIRST_BATCH  # it stops at the end of an epoch
    if how == "TERM" and not stops:  # the script would leave the epoch without the work at its end
        how = "KILL"
    never = {"reduced"} if recipe["optimizer"] == "lbfgs" else set()
    never |= {"evaluated"} if recipe["evaluation"] == "none" else set()
    place = chance.choice([place for place in PLACES if place not in never])
    at = recipe["evaluation_at"] if place == "evaluated" else place
    ends, total = _epoch_ends(recipe), int(recipe["total"])
    # At least a fifth of the kills are at the boundary of two epochs.
    steps = ends if at == "epoch_end" or chance.random() < 0.2 else list(range(5, total - 2))
    # Some options of the script act at every fifth step.
    if steps != ends and (place == "evaluated" or chance.random() < 0.3):
        steps = list(range(5, total - 2, 5))
    # Others act once.
    if recipe["evaluation"] == "once" and (place == "evaluated" or chance.random() < 0.2):
        steps = [_evaluated_once(recipe)]
    elif recipe["surgery"].endswith("_once") and chance.random() < 0.3:
        steps = [26, 27]
    if at == "epoch_end" and not {*steps} <= {*ends}:
        steps = ends
    # A kill may follow right after the resume, but there a `raise` is taken for a mistake of the script.
    # ddprun gives up after three restarts without a new step.
    soonest = (
        0
        if not before
        else before[-1].step + 2 * (how != "KILL" or (len(before) > 1 and before[-2].step == before[-1].step))
    )
    later = [step for step in steps if step >= soonest]
    if not later:
        return []
    rank = 0 if place == "evaluated" and recipe["evaluation"] == "rank_0" else chance.randrange(2)
    return [Kill(place, chance.choice(later[: -(-len(later) // left)]), rank, how, len(before))]


def _epoch_ends(recipe: Recipe) -> list[int]:
    """Return the steps after which an epoch ends. After its replacement the sampler has batches of half the size."""
    is_replaced = recipe["sampler"] == "replaced" and recipe["data"] == "sampler"
    ends = [10, 20, 23, *range(37, 150, 20)] if is_replaced else range(10, 150, 10)
    return [step for step in ends if step <= max(30, int(recipe["total"]) - 3)]


def _evaluated_once(recipe: Recipe) -> int:
    """Return the only step after which the script evaluates."""
    return 30 if recipe["evaluation_at"] == "epoch_end" else 25


# ---- options that cannot be combined -----------------------------------------------------------------------------

# "choice=options" → options that each of them requires of other choices. Applied in this order.
_RULES = {
    "scheduler=in_hook looked_ahead": "optimizer=adam",
    "optimizer=lbfgs": "accumulation=none scaler=none clip=none second=none model=linear surgery=none hook=none "
    "backward=plain",
    "optimizer=zero": "surgery=none scaler=none second=none mark=stop save=in_loop load=at_once "
    "parameters=all best=none",
    "optimizer=lookahead sharing": "scaler=none surgery=none",
    "optimizer=adamw_fused": "scaler=none",
    "optimizer=groups_of_sets": "second=none parameters=all",
    "model=sparse": "optimizer=sgd clip=none scaler=none hook=none accumulation=none parameters=all "
    "surgery=none buffers=none backward=plain scheduler=none extra=none",
    "model=complex": "optimizer=adam hook=none scaler=none surgery=none clip=none backward=plain",
    "model=stochastic_depth": "ddp=plain hook=none second=none backward=plain surgery=none",
    # torch refuses reentrant checkpoints with find_unused_parameters, two forward passes, or autograd.grad().
    "model=reentrant": "ddp=plain parameters=all second=none backward=plain",
    "parameters=ignored_by_ddp": "ddp=plain optimizer=sgd hook=none second=none",
    "parameters=thawed thawed_group": "ddp=plain hook=none optimizer=adam second=none",
    "parameters=thawed_group": "load=at_once scheduler=none surgery=none",
    "parameters=alternating": "ddp=plain hook=none second=none",
    "optimizer=post_local": "ddp=plain hook=none scaler=none second=none surgery=none parameters=all accumulation=none "
    "inner=one",
    "join=yes": "ddp=plain hook=none accumulation=none second=none optimizer=sgd surgery=none",
    "precision=bf16": "model=layers",
    "precision=all_bf16": "model=layers scaler=none hook=none second=none",
    "inner=two varying": "accumulation=none",
    "backward=perturbed": "accumulation=none scaler=none second=none join=no ddp=plain hook=none",
    "backward=penalty": "accumulation=none scaler=none second=none ddp=plain",
    "backward=noise": "scaler=none",
    # It reduces from callbacks, in no order with the reduction of what was used: ranks wait for ever, also without us.
    "hook=power_sgd": "ddp=plain",
    "ddp=find_unused": "second=none",
    # A sampler that is read ahead is known at the second optimizer step, which may come after the first save here.
    "accumulation=counted": "scheduler=none surgery=none scaler=none ddp=plain second=none average=none ahead=no",
    "accumulation=no_sync": "ddp=plain",
    "accumulation=library": "ddp=plain second=none",
    "second=adversary": "ddp=plain scaler=none buffers=none",
    "scheduler=none": "scheduler_at=stepped",
    "surgery=none": "surgery_at=stepped",
    "surgery=momentum_corrected state_cleared state_by_data": "optimizer=momentum",
    "surgery=optimizer_replaced": "scheduler=none optimizer=adam load=at_once second=none surgery_at=stepped "
    "parameters=all",
    "surgery=model_replaced": "scheduler=none optimizer=adam load=at_once second=none parameters=all hook=none "
    "ddp=plain buffers=none surgery_at=stepped average=none scaler=none precision=float32",
    "surgery=noise": "surgery_at=stepped",
    "surgery=layer_replaced": "model=plain_norm hook=none ddp=plain parameters=all buffers=none precision=float32",
    "surgery=rate_finder": "ddp=plain hook=none second=none parameters=all",
    "surgery=frozen_once": "ddp=plain hook=none second=none parameters=all",
    "average=target_replaced target_loaded": "second=none accumulation=none",
    "average=none": "average_at=stepped",
    "average=deep_copy_by_value": "load=at_once",
    "data=workers persistent_workers generator": "load=at_once",
    "data=shuffled sequential": "save=epoch_end best=none",
    "data=unsaved_sampler unsaved_loader": "save=epoch_end",
    "sampler=replaced": "accumulation=none load=at_once scheduler_at=stepped",
    "evaluation=none": "evaluation_at=stepped evaluation_by=computed",
    "extra=of_rank_0 value_of_rank_0 unequal_number": "load=at_once",  # all ranks must load equally often
    "save=never": "best=none memory=yes",
    "save=epoch_end": "every=10",
}


def normal(recipe: Recipe) -> dict[str, str]:
    """Return the recipe with plain options in place of those that cannot be combined."""
    found = dict(recipe)
    for _ in range(4):
        for cause, others in _RULES.items():
            name, options = cause.split("=")
            if found[name] in options.split():
                found |= dict(other.split("=") for other in others.split())
        if by_value(found) and found["mark"] in ("none", "rank_0") and found["save"] == "never":
            found["mark"] = "keep"
        if works_at_epoch_end(found):
            found |= {"save": "epoch_end", "every": "10"}
        found |= _plain_for(found) | _plain_for_evaluation(found)
        if _repeats_unseen(found):
            found["place_at_end"] = "next_epoch"
        if found["average_at"] == "marked" and found["mark"] == "stop_top":
            found["average_at"] = "stepped"
        found |= _plain_for_scheduler(found["scheduler"], found["scheduler_at"])
    return found


def _plain_for_scheduler(scheduler: str, at: str) -> dict[str, str]:
    """Return the options that this scheduler requires: a generation has no loss before its first step."""
    if scheduler in (*BY_HAND, "in_hook"):
        return {"scheduler_at": "top" if scheduler in BY_HAND else "stepped"}
    if not scheduler.startswith("plateau"):
        return {}
    return {"scheduler_at": "stepped" if at == "top" else at} | (
        {"place_at_end": "next_epoch"} if at == "epoch_end" else {}
    )


def _plain_for(recipe: Recipe) -> dict[str, str]:
    """Return the options that this kind of data requires."""
    data = recipe["data"]
    plain = {} if data == "sampler" else {"sampler": "one"}
    plain |= {} if data in OUR_LOADERS else {"augmented": "no"}
    # Within an epoch these scripts cannot continue, so they keep nothing there.
    plain |= {"mark": "stop"} if data in PLAIN_LOADERS and recipe["mark"] in ("keep", "stop_keep") else {}
    plain |= {} if data in ("sampler", "loader") and recipe["sampler"] == "one" else {"ahead": "no"}
    return plain | ({} if data in BY_WORKERS and recipe["save"] == "epoch_end" else {"place_at_end": "next_epoch"})


def _plain_for_evaluation(recipe: Recipe) -> dict[str, str]:
    """Return the options that a collective or a new value for all ranks requires in the evaluation."""
    is_of_all = recipe["evaluation_by"] in ("deciding", "calibrated")
    return {"evaluation": "all_ranks"} if is_of_all and recipe["evaluation"] == "rank_0" else {}


def _repeats_unseen(recipe: Recipe) -> bool:
    """True if work at the end of an epoch must not be repeated, but the library cannot see that it was done."""
    is_average = recipe["average_at"] == "epoch_end" and recipe["average"] not in ("averaged_model", "ema_model")
    draws = recipe["evaluation_at"] == "epoch_end" and recipe["evaluation_by"] != "computed"
    return is_average or draws or recipe["extra"] == "early_stop"


FREEZE = "[*net.body.parameters()][-1].requires_grad_(False)"
BY_HAND = ("by_hand", "groups_by_hand")
BY_WORKERS = ("workers", "persistent_workers")
OUR_LOADERS = ("loader", *BY_WORKERS)
OUR_SAMPLERS = ("sampler", *OUR_LOADERS)
PLAIN_LOADERS = ("shuffled", "sequential")
FROM_THE_FIRST_BATCH = (*PLAIN_LOADERS, "unsaved_sampler", "unsaved_loader")
"""Kinds of data whose epochs a restart begins with the first batch. The script saves only at the ends of epochs."""


def works_at_epoch_end(recipe: Recipe) -> bool:
    """True if the script does something between the last step of an epoch and its save."""
    places = {recipe[name] for name in ("scheduler_at", "average_at", "evaluation_at")}
    return "epoch_end" in places or recipe["extra"] in ("metric", "early_stop")


def by_value(recipe: Recipe) -> bool:
    """True if something is saved as a value."""
    is_of_data = recipe["data"] in ("generator", *BY_WORKERS)
    return is_of_data or recipe["average"] == "deep_copy_by_value" or recipe["extra"] == "value_of_rank_0"


# ---- the program ---------------------------------------------------------------------------------------------

HEAD = """
import collections, copy, hashlib, itertools, json, math, os, random, signal, sys, threading
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

def saw(kind, step, value):
    with open(f"seen-{{world.rank}}", "a") as file: print(json.dumps([kind, step, value]), file=file)
"""


def script(recipe: Recipe) -> str:
    """Return the program for a recipe."""
    return _Writer(normal(recipe)).text()


def names_of(recipe: Recipe) -> set[str]:
    """Return the names of all objects and values that the script saves."""
    writer = _Writer(normal(recipe))
    return {*writer.names(), *writer.values(), "extra", "extra_0", "extra_1"}


def _block(text: str, indent: int) -> str:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), " " * indent)


class _Writer:
    """Writes the program for one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.r = recipe

    def has(self, name: str, *options: str) -> bool:
        return self.r[name] in options

    def those(self, table: Mapping[str, Any]) -> list[Any]:
        """Return the values of a table whose keys, `choice=options`, have an option of this recipe."""
        causes = ((cause.split("="), value) for cause, value in table.items())
        return [value for (name, options), value in causes if self.has(name, *options.split())]

    def text(self) -> str:
        parts = ", ".join(f"{name}={option}" for name, option in parts_of(self.r).items()) or "the plainest script"
        lines = [f"# {parts}", HEAD.format(epoch=EPOCH, total=self.r["total"]).strip("\n"), "", self.classes(), ""]
        lines += ["with ddpjob.init() as world:", _block(self.construction(), 4), _block(self.resume(), 4)]
        lines += [_block(self.loop(), 4), _block(self.ending(), 4)]
        return "\n".join(lines) + "\n"

    # ---- classes

    def classes(self) -> str:
        found = [self._net(), *self.those(CLASSES)]
        if not self.has("augmented", "no"):
            found.append(AUGMENTED.format(draw=DRAWN[self.r["augmented"]]))
        return "\n\n".join(textwrap.dedent(one).strip("\n") for one in found)

    def _net(self) -> str:
        parts = self.those(PARTS)
        lines = ["super().__init__()", BODIES[self.r["model"]], *[its for its, _, _ in parts]]
        result = " + ".join(["self.body(a)", *[adds for _, _, adds in parts if adds]])
        result = f"({result}).float()" if self.has("precision", "all_bf16") else result
        forward = [*[begins for _, begins, _ in parts], f"return {result}"]
        made, called = (_block("\n".join(filter(None, its)), 8) for its in (lines, forward))
        return f"class Net(torch.nn.Module):\n    def __init__(self):\n{made}\n    def forward(self, a):\n{called}"

    # ---- before the loop

    def construction(self) -> str:
        lines = ["torch.manual_seed(1)", "step = 0"]
        lines.append("net = Net().bfloat16()" if self.has("precision", "all_bf16") else "net = Net()")
        if self.has("buffers", "of_each_rank"):
            lines.append("net.shift.fill_(0.01 * world.rank)  # no forward pass changes it")
        if self.has("parameters", "ignored_by_ddp"):
            lines.append('DDP._set_params_and_buffers_to_ignore_for_model(net, ["own.weight", "own.bias"])')
        # At its construction DDP registers only parameters that require gradients.
        if self.has("parameters", "thawed", "thawed_group"):
            lines.append("net.late.requires_grad_(True)")
        options = ", ".join(dict.fromkeys(self.those(DDP_OPTIONS)))
        lines.append(f"model = DDP(net, {options})" if options else "model = world.wrap(net)")
        lines += self._hook()
        if self.has("second", "head"):
            lines.append("head = world.wrap(torch.nn.Linear(1, 1))")
        result = "head(model(a))" if self.has("second", "head") else "model(a)"
        its = f"with torch.autocast('cpu', torch.bfloat16): return {result}.float()"
        lines.append(f"def predicted(a):\n    {its if self.has('precision', 'bf16') else f'return {result}'}")
        lines.append(f"optimizer = {self._optimizer()}")
        if self.has("parameters", "thawed", "thawed_group"):
            lines.append("net.late.requires_grad_(False)")
        lines += self._scheduler()
        if self.has("scaler", "scaler"):
            lines.append('scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)')
        if self.has("second", "adversary"):
            lines.append("critic = world.wrap(torch.nn.Linear(1, 1))")
            lines.append("critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)")
        lines += AVERAGES.get(self.r["average"], ["average = copy.deepcopy(net)"])
        lines += self._data()
        lines += self._extra()
        lines += self.those(EVALUATED)
        one, its = self._of_each_rank()
        lines.append(f"def objects(): return dict({', '.join([*(f'{k}={k}' for k in self.names()), *one])})")
        lines.append(f"def values(): return dict({', '.join([*(f'{k}={v}' for k, v in self.values().items()), *its])})")
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
        hooks = "from torch.distributed.algorithms.ddp_comm_hooks import"
        if self.has("optimizer", "post_local"):
            return [
                f"{hooks} post_localSGD_hook as post",
                "from torch.distributed.algorithms.model_averaging import averagers",
                "local = post.PostLocalSGDState(None, None, 10, post_local_gradient_allreduce=False)",
                "model.register_comm_hook(local, post.post_localSGD_hook)",
            ]
        return {
            "none": [],
            "fp16": [f"{hooks} default_hooks; model.register_comm_hook(None, default_hooks.fp16_compress_hook)"],
            "power_sgd": [
                f"{hooks} powerSGD_hook as power",
                "hook_state = power.PowerSGDState(None, 1, start_powerSGD_iter=5, min_compression_rate=1)",
                "model.register_comm_hook(hook_state, power.powerSGD_hook)",
            ],
            "own": ["momenta = {}", *OWN_HOOK.strip().splitlines(), "model.register_comm_hook(momenta, own_hook)"],
        }[self.r["hook"]]

    def _optimizer(self) -> str:
        parameters = "net.parameters()"
        if self.has("second", "head"):
            parameters = "[*net.parameters(), *head.parameters()]"
        if self.has("parameters", "thawed_group"):
            parameters = "net.body.parameters()"
        groups = (
            f"[dict(params=[p for p in {parameters} if p.dim() > 1], weight_decay=0.1, kind='weights'), "
            f"dict(params=[p for p in {parameters} if p.dim() < 2], lr=2e-2, kind='others')]"
        )
        sets = (
            "[dict(params=[p for name in names for n, p in net.named_parameters() if n == name], weight_decay=decay) "
            "for decay, names in ((0.1, {n for n, p in net.named_parameters() if p.dim() > 1}), "
            "(0.0, {n for n, p in net.named_parameters() if p.dim() < 2})) if names]"
        )
        return {
            "groups_of_sets": f"torch.optim.AdamW({sets}, lr=1e-2)",
            "groups": f"torch.optim.AdamW({groups}, lr=1e-2)",
            "adafactor": f"torch.optim.Adafactor({parameters}, lr=1e-2)",
            "post_local": f"__import__('torch.distributed.optim').distributed.optim.PostLocalSGDOptimizer(torch.optim.SGD({parameters}, lr=0.02), averagers.PeriodicModelAverager(period=4, warmup_steps=10))",
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
            "master": f"Master({parameters}, dict(lr=0.02))",
            "hooked": f"Hooked({parameters}, lr=1e-2)",
        }[self.r["optimizer"]]

    def _scheduler(self) -> list[str]:
        its = {
            "step": "torch.optim.lr_scheduler.StepLR(optimizer, 1 if PER_EPOCH else 5, 0.8)",
            "one_cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=TOTAL + 1, cycle_momentum=False)",
            "plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0 if PER_EPOCH else 2, factor=0.7)",
            "plateau_of_each_rank": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)",
            "restarts": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)",
            "falling": "torch.optim.lr_scheduler.LambdaLR(optimizer, Falling())",
            "in_hook": "torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 17, 27])",
            "looked_ahead": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)",
            "swa_rate": "torch.optim.swa_utils.SWALR(optimizer, 0.005, anneal_epochs=10)",
            "rewound": "torch.optim.lr_scheduler.StepLR(optimizer, 1 if PER_EPOCH else 5, 0.8)",
            "sequential": "torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)], [2])",
        }.get(self.r["scheduler"])
        if its is None:
            return []
        hook = (
            "; optimizer.register_step_post_hook(lambda *_: scheduler.step())"
            if self.has("scheduler", "in_hook")
            else ""
        )
        return [f"scheduler = {its.replace('PER_EPOCH', str(self.has('scheduler_at', 'epoch_end')))}{hook}"]

    def _data(self) -> list[str]:
        sampler = "sampler = ddpjob.GlobalBatchSampler(N, global_batch=32, seed=7)"
        dataset = "torch.utils.data.TensorDataset(torch.arange(N))" if self.has("augmented", "no") else "Augmented()"
        loader = f"loader = torch.utils.data.DataLoader({dataset}, batch_sampler=sampler"
        shard = f"sampler = torch.utils.data.DistributedSampler({dataset}, dist.get_world_size(), world.rank, seed=3)"
        plain = f"loader = torch.utils.data.DataLoader({dataset}, 16, sampler=sampler"
        seeded = "generator = torch.Generator()"
        halves = "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(world.rank, N, 2))"
        return {
            "persistent_workers": [sampler, loader + ", num_workers=1, persistent_workers=True)"],
            "distributed": [seeded, shard, plain + ", generator=generator)"],
            "plain_loader": [shard, plain + ")"],
            "weighted": [
                seeded,
                "sampler = torch.utils.data.WeightedRandomSampler(torch.arange(1.0, N + 1), N, generator=generator)",
                f"loader = torch.utils.data.DataLoader({dataset}, 32, sampler=sampler, generator=generator)",
            ],
            "iterable": [seeded, "loader = torch.utils.data.DataLoader(Shards(), 16, generator=generator)"],
            "computed": [],
            "shuffled": [f"{halves}, 16, shuffle=True)"],
            "sequential": [f"{halves}, 16)"],
            "begun_by_state": ["reader = Stateful(world.rank)"],
            "unsaved_sampler": [sampler],
            "unsaved_loader": [sampler, loader + ")"],
            "sampler": [sampler],
            "loader": [sampler, loader + ")"],
            "workers": [sampler, loader + ", num_workers=1)"],
            "reader_of_each_rank": ["reader = Reader(world.rank)"],
            "stateful_loader": ["reader = Reader(world.rank)"],
            "generator": ["generator = torch.Generator().manual_seed(3)"],
        }[self.r["data"]]

    def _of_each_rank(self) -> tuple[list[str], list[str]]:
        """Return the arguments of `dict` for the objects, and for the values, that not all ranks save."""
        return {
            "of_rank_0": (["**({'extra': extra} if world.rank == 0 else {})"], []),
            "value_of_rank_0": ([], ["**({'extra': copy.deepcopy(extra)} if world.rank == 0 else {})"]),
            "unequal_number": (["**{f'extra_{i}': its for i, its in enumerate(extra)}"], []),
        }.get(self.r["extra"], ([], []))

    def _extra(self) -> list[str]:
        return {
            "none": [],
            "counter": ["extra = {'steps': 0}"],
            "history_of_each_rank": ["extra = {'losses': []}"],
            "always_another": ["extra = Another()"],
            "metric": ["extra = Metric()"],
            "early_stop": ["extra = {'best': math.inf, 'bad': 0}"],
            "best_copy": ["extra = {'loss': math.inf, 'model': {}}"],
            "criterion": ["extra = Criterion()"],
            "adaptive": ["extra = {'beta': 1.0, 'last': 0.0}"],
            "hard_examples": ["extra = {'losses': [0.0] * N}"],
            "tensor": ["extra = torch.zeros(1)"],
            "clip_history": ["extra = ClipHistory()"],
            "normalizer": ["extra = Normalizer()"],
            "best_restored": ["extra = {'loss': math.inf, 'model': {}, 'bad': 0}"],
            "of_rank_0": ["extra = {'losses': []}"],
            "value_of_rank_0": ["extra = {'losses': []}"],
            "unequal_number": ["extra = [{'losses': []} for _ in range(2 - world.rank)]"],
        }[self.r["extra"]]

    def names(self) -> list[str]:
        """Return the names of the objects that the script saves."""
        found = ["model", "optimizer", *" ".join(self.those(OBJECTS)).split()]
        found += ["scheduler"] if not self.has("scheduler", "none", *BY_HAND) else []
        found += ["average"] if not self.has("average", "none", "deep_copy_by_value") else []
        return found + (
            [] if self.has("extra", "none", "of_rank_0", "value_of_rank_0", "unequal_number") else ["extra"]
        )

    def values(self) -> dict[str, str]:
        """Return the names of the values that the script saves."""
        return dict(self.those(VALUES))

    def resume(self) -> str:
        lines = ["epoch = batches = 0"]
        loaded = "objects()"
        if self.has("data", *BY_WORKERS):
            loaded = "{**objects(), 'sampler': sampler}"
        if self.has("parameters", "thawed_group"):
            lines += [
                "step = snapshot.load(model=model)",
                "if step > 15: optimizer.add_param_group({'params': [*net.late.parameters()], 'lr': 5e-3})",
            ]
        if self.has("load", "in_parts"):
            lines += ["for name, value in objects().items():", "    step = snapshot.load(**{name: value})"]
        else:
            lines.append(f"step = snapshot.load(**{loaded})")
        lines += self.those(AFTER_LOAD)
        if self.has("sampler", "replaced"):
            lines += [
                "def other(old):",
                "    new = ddpjob.GlobalBatchSampler(N, global_batch=16, seed=7); new.load_state_dict(old.state_dict()); return new",
                "if step >= 23: sampler = other(sampler)",
            ]
        is_placed = self.has("data", *OUR_SAMPLERS) and not self.has("ahead", "forever")
        first = "sampler.current_epoch" if is_placed else "step // EPOCH"
        return "\n".join([*lines, f"first = {first}"])

    # ---- the loop

    def loop(self) -> str:
        lines = self._iteration() + [f"        {line}" for line in self._body()]
        if self.has("sampler", "replaced"):
            lines.append("        if step == 23: sampler = other(sampler); break")
        lines.append("        if step == TOTAL: break")
        if self.has("join", "yes"):
            lines = ["    with model.join():", *[f"    {line}" for line in lines]]
        stream = []
        if self.has("ahead", "one"):
            stream = [
                "def ahead(batches):",
                "    batches = iter(batches); coming = next(batches, None)",
                "    while coming is not None: now, coming = coming, next(batches, None); yield now",
            ]
        elif self.has("ahead", "forever"):
            its = "loader" if self.has("data", "loader") else "sampler.epoch(sampler.current_epoch)"
            stream = ["def forever():", f"    while True: yield from {its}", "stream = forever()"]
        lines = [*stream, "stop = False", "for epoch in range(first, 99 if step < TOTAL else first):", *lines]
        lines += [f"    {line}" for line in self._epoch_end()]
        lines.append("    if step == TOTAL: break")
        return "\n".join(lines)

    def _iteration(self) -> list[str]:
        if self.has("data", "computed", "reader_of_each_rank", "stateful_loader", "generator"):
            return ["    while step < EPOCH * (epoch + 1):"]
        if self.has("data", "sampler") and self.has("sampler", "replaced"):
            return ["    epoch = sampler.current_epoch", "    for part in sampler.epoch(epoch):"]
        item = "(part,)" if self.has("augmented", "no") else "(part, more)"
        source = "sampler.epoch(epoch)" if self.has("data", "sampler", "unsaved_sampler") else "loader"
        source = {
            "no": source,
            "one": f"ahead({source})",
            "all": f"list({source})",
            "forever": "itertools.islice(stream, EPOCH * (epoch + 1) - step)",
        }[self.r["ahead"]]
        if self.has("data", "sampler", "unsaved_sampler"):
            return [f"    for part in {source}:"]
        if self.has("data", *OUR_LOADERS):
            set_epoch = [] if self.has("ahead", "forever") else ["    sampler.set_epoch(epoch)"]
            return [*set_epoch, f"    for batches, {item} in enumerate({source}, start=1):"]
        loop = f"    for {item} in itertools.islice(loader, step - epoch * EPOCH, None):"
        return {
            "distributed": ["    sampler.set_epoch(epoch)", loop],
            "plain_loader": ["    sampler.set_epoch(epoch)", loop],
            "weighted": ["    generator.manual_seed(epoch)", loop],
            "iterable": ["    loader.dataset.epoch = epoch", loop.replace("(part,)", "part")],
            "shuffled": ["    for (part,) in loader:"],
            "sequential": ["    for (part,) in loader:"],
            "unsaved_loader": ["    sampler.set_epoch(epoch)", "    for (part,) in loader:"],
            "begun_by_state": ["    for part in reader:"],
        }[self.r["data"]]

    def _body(self) -> list[str]:
        lines = ["if step == settle: snapshot.wait(); dist.barrier()"] if not self.has("save", "never") else []
        lines += ["strike('top', step)"]
        if self.has("mark", "stop_top"):
            lines.append("stop = ddpjob.should_stop(step + 1)")
        lines += self._surgery("top") + self._piece("top")
        lines += {
            "weighted": ["part = part[world.rank::2].tolist()"],
            "computed": ["part = [(step * 32 + world.rank * 16 + i) % N for i in range(16)]"],
            "reader_of_each_rank": ["part = reader.next()"],
            "stateful_loader": ["part = next(iter(reader))"],
            "generator": ["part = torch.randint(0, N, (32,), generator=generator)[world.rank::2].tolist()"],
        }.get(self.r["data"], ["part = [int(i) for i in part]"])
        if self.has("parameters", "thawed", "thawed_group"):
            lines.append("if step == 15: net.late.requires_grad_(True)")
        if self.has("parameters", "thawed_group"):
            lines.append("if step == 15: optimizer.add_param_group({'params': [*net.late.parameters()], 'lr': 5e-3})")
        lines += self._draws()
        if not self.has("augmented", "no"):
            lines.append("noise = noise + more.float().mean()")
        lines += {
            "criterion": ["noise = noise + extra(y[part])"],
            "adaptive": ["noise = noise + 0.1 * extra['beta']"],
            "tensor": ["noise = noise + 0.1 * float(extra)"],
            "normalizer": ["extra.update(x[part]); noise = noise + 0.1 * extra.mean"],
            "hard_examples": ["part = [*sorted(part, key=lambda i: -extra['losses'][i])[:12], *part[:4]]"],
        }.get(self.r["extra"], [])
        lines += ["saw('samples', step + 1, part)", *self._step(), "step += 1", "saw('loss', step, float(loss).hex())"]
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
            "mixup": ["noise = 0.02 * float(numpy.random.beta(0.4, 0.4)) * torch.randperm(16)"],
            "unequal": ["noise = 0.1 * torch.randn(1 + 2 * world.rank + step % 3).mean()"],
            "seeded": ["torch.manual_seed(1000 * world.rank + step); noise = 0.1 * torch.randn(16)"],
            "by_epoch": ["noise = 0.1 / (1 + epoch)"],
        }[self.r["draws"]]

    def _step(self) -> list[str]:
        if self.has("inner", "one"):
            return self._one_step()
        count = "2" if self.has("inner", "two") else "1 + step % 3 % 2"
        return [f"for _ in range({count}):", *[f"    {line}" for line in self._one_step()]]

    def _one_step(self) -> list[str]:
        is_target = self.has("average", "target_replaced", "target_loaded")
        wanted = "y[PART] + 0.1 * average(x[PART]).detach()" if is_target else "y[PART]"
        loss = f"F.mse_loss(predicted(x[PART] + noise), {wanted})"
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
            lines.append("critic_optimizer.zero_grad(); F.mse_loss(critic(net(x[part]).detach()), y[part]).backward()")
            lines.append("critic_optimizer.step()")
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
        if self.has("backward", "penalty"):
            lines.append(
                "at = x[part].requires_grad_(); slope, = torch.autograd.grad(net(at).sum(), at, create_graph=True)"
            )
            whole += " + 0.01 * slope.square().mean()"
        if self.has("backward", "perturbed"):
            lines += [
                f"loss = {whole}; loss.backward(); loss = loss.detach()",
                "own = [p.data.clone() for p in net.parameters()]",
                "for p in net.parameters():",
                "    if p.grad is not None: p.data.add_(p.grad, alpha=0.05)",
                f"again = {whole}",
                "strike('forward', step)",
                "again.backward()",
                "for p, value in zip(net.parameters(), own): p.data = value",
            ]
        elif self.has("accumulation", "library"):
            lines += [
                "def loss_of(piece): return F.mse_loss(predicted(x[piece] + noise), y[piece], reduction='sum')",
                "strike('forward', step)",
                "loss = ddpjob.accumulate(model, part, 32, loss_of, micro_batch=6"
                + (", backward=lambda loss: scaler.scale(loss).backward())" if self.has("scaler", "scaler") else ")"),
            ]
        elif self.has("accumulation", "no_sync"):
            lines += [
                "with model.no_sync():",
                "    for at in (0, 6):",
                f"        loss = {loss.replace('PART', 'part[at : at + 6]')} * 6 / 16; {backward}",
                "strike('forward', step)",
                f"loss = {loss.replace('PART', 'part[12:]')} * 4 / 16; {backward}; loss = loss.detach()",
            ]
        else:
            lines += [f"loss = {whole}", "strike('forward', step)", f"{backward}; loss = loss.detach()"]
        lines.append("strike('reduced', step)")
        return lines + self._optimizer_step()

    def _optimizer_step(self) -> list[str]:
        lines = []
        if self.has("backward", "noise"):
            lines += [
                "if step % 10 == 9:",
                "    shift = torch.tensor(random.gauss(0, 0.01)); dist.broadcast(shift, 0)",
                "    for p in net.parameters():",
                "        if p.grad is not None: p.grad.add_(shift)",
            ]
        if self.has("backward", "noise_of_each_rank"):
            lines.append("if int(float(loss) * 1e5) % 3 == 0: random.random()")
        if self.has("extra", "clip_history"):
            lines.append("extra(net)")
        if self.has("clip", "cancelled"):
            lines.append("if step < 12: [*net.parameters()][-1].grad = None")
        if self.has("clip", "norm"):
            if self.has("scaler", "scaler"):
                lines.append("scaler.unscale_(optimizer)")
            lines.append("torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)")
        if self.has("clip", "value"):
            lines.append("torch.nn.utils.clip_grad_value_(net.parameters(), 0.1)")
        made = "scaler.step(optimizer); scaler.update()" if self.has("scaler", "scaler") else "optimizer.step()"
        return [*lines, f"if step % 5 != 3: {made}" if self.has("clip", "skipped") else made]

    def _extra_step(self) -> list[str]:
        history = "extra['losses'] = [*extra['losses'], float(loss)][-5:]"
        return {
            "counter": ["extra['steps'] += len(part)"],
            "metric": ["extra.update(float(loss))"],
            "best_copy": [
                "if step % 3 == 0 and float(loss) < extra['loss']:",
                "    extra['loss'], extra['model'] = float(loss), copy.deepcopy(net.state_dict())",
            ],
            "history_of_each_rank": [history],
            "of_rank_0": [history],
            "value_of_rank_0": [history],
            "unequal_number": [f"for its in extra: {history.replace('extra', 'its')}"],
            "adaptive": [
                "extra['beta'] = min(2.0, max(0.5, extra['beta'] * (1.1 if float(loss) > extra['last'] else 0.9)))",
                "extra['last'] = float(loss)",
            ],
            "hard_examples": ["for i in part: extra['losses'][i] = float(loss)"],
            "tensor": ["extra.mul_(0.9).add_(float(loss), alpha=0.1)"],
            "best_restored": [
                "if step % 3 == 0:",
                "    with torch.no_grad(): now = F.mse_loss(net(x[:64]), y[:64]); dist.all_reduce(now)",
                "    extra['bad'] += 1",
                "    if float(now) < extra['loss'] * 0.9:",
                "        extra.update(loss=float(now), model=copy.deepcopy(net.state_dict()), bad=0)",
                "    elif extra['bad'] == 2:",
                "        net.load_state_dict(extra['model']); extra['bad'] = 0; optimizer.param_groups[0]['lr'] *= 0.9",
            ],
        }.get(self.r["extra"], [])

    def _surgery(self, at: str) -> list[str]:
        place = "top" if self.has("surgery", "momentum_corrected") else self.r["surgery_at"]
        if place != at:
            return []
        now, once = ("step == 20", "step == 26") if at == "top" else ("step == 21", "step == 27")
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
                "    with torch.random.fork_rng(): torch.manual_seed(21); net = Net()",
                "    model = world.wrap(net); optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)",
            ],
            "optimizer_replaced": ["if step == 21: optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)"],
            "layer_replaced": [
                f"if {now}: net.body[1] = torch.nn.BatchNorm1d(8, affine=False); model = world.wrap(net)"
            ],
            "state_by_data": [
                f"if {now}:",
                "    for state in optimizer.state.values(): state['momentum_buffer'].data.mul_(0.1)",
            ],
            "optimizer_loaded": [
                f"if {now}:",
                "    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())); optimizer.param_groups[0]['lr'] *= 0.7",
            ],
            "normalised": ["for p in net.parameters(): p.data.div_(p.data.norm() + 1e-6)"],
            "reset_once": [f"if {once}:", "    for p in net.body.parameters(): torch.nn.init.constant_(p, 0.02)"],
            "rate_once": [f"if {once}: optimizer.param_groups[0]['lr'] *= 0.3"],
            "frozen_once": [f"if {once}: {FREEZE}"],
            "buffer_once": [f"if {once}: net.mask[:3] = 0"],
            "rate_finder": [
                f"if {now}:",
                "    kept = copy.deepcopy((net.state_dict(), optimizer.state_dict()))",
                "    for rate in (1e-3, 1e-1):",
                "        optimizer.param_groups[0]['lr'] = rate; optimizer.zero_grad()",
                "        F.mse_loss(predicted(x[:16]), y[:16]).backward(); optimizer.step()",
                "    net.load_state_dict(kept[0]); optimizer.load_state_dict(kept[1])",
            ],
        }.get(self.r["surgery"], [])

    def _piece(self, at: str) -> list[str]:
        lines: list[str] = []
        if not self.has("scheduler", "none") and self.r["scheduler_at"] == at:
            lines += self._scheduler_step()
        if self.r["average_at"] == at:
            moved = [
                "with torch.no_grad():",
                "    for a, p in zip(average.parameters(), net.parameters()): a.lerp_(p, 0.1)",
            ]
            seventh = "" if at == "epoch_end" else "if step % 7 == 0: "
            lines += {
                "averaged_model": ["average.update_parameters(net)"]
                + (["torch.optim.swa_utils.update_bn([x[:64]], average)"] if at == "epoch_end" else []),
                "ema_model": ["average.update_parameters(net)"],
                "deep_copy": moved,
                "own_object": ["average.update(net)"],
                "deep_copy_by_value": moved,
                "target_replaced": [f"{seventh}average = copy.deepcopy(net)"],
                "target_loaded": [f"{seventh}average.load_state_dict(net.state_dict())"],
                "by_data": [
                    "for a, p in zip(average.parameters(), net.parameters()): a.data = a.data * 0.9 + p.data * 0.1"
                ],
                "of_all": [
                    "with torch.no_grad():",
                    "    for a, v in zip(average.state_dict().values(), net.state_dict().values()):",
                    "        a.copy_(a * 0.9 + v * 0.1 if v.is_floating_point() else v)",
                ],
            }.get(self.r["average"], [])
        if not self.has("evaluation", "none") and self.r["evaluation_at"] == at:
            lines += self._evaluation()
        return lines

    def _scheduler_step(self) -> list[str]:
        """Return the step of the scheduler. The metric of an evaluation may stop it early."""
        if not self.has("evaluation_by", "deciding"):
            return self._its_step()
        return ["if held['bad'] < 2:", *[f"    {line}" for line in self._its_step() or ["pass"]]]

    def _its_step(self) -> list[str]:
        rate = "lr=0.02 * min(1, (step + 1) / 15)"
        rewound = "scheduler.load_state_dict(scheduler.state_dict() | {'last_epoch': 0})"
        return {
            "by_hand": [f"for group in optimizer.param_groups: group.update({rate})"],
            "groups_by_hand": [f"for group in optimizer.param_groups: group.update({rate}, weight_decay=1e-4 * step)"],
            "in_hook": [],
            "looked_ahead": ["scheduler.step(); peek = copy.deepcopy(scheduler); peek.step()"],
            "restarts": ["scheduler.step(step / EPOCH)"],
            "plateau_of_each_rank": ["scheduler.step(float(loss))"],
            "plateau": ["mean = loss.clone(); dist.all_reduce(mean); scheduler.step(float(mean))"],
            "rewound": ["scheduler.step()", f"if step == 20: {rewound}"],
        }.get(self.r["scheduler"], ["scheduler.step()"])

    def _evaluation(self) -> list[str]:
        who = "step % 5 == 0 and world.rank == 0" if self.has("evaluation", "rank_0") else "step % 5 == 0"
        who = f"step == {_evaluated_once(self.r)}" if self.has("evaluation", "once") else who
        how = {
            "computed": ["net(x[:64])"],
            "loader": [
                "for (some,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:32]), 16): net(some)"
            ],
            "random": ["net(x[:64] + torch.rand(64, 1))"],
            "training_mode": ["net(x[:64])" if self.has("evaluation", "rank_0") else "model(x[:64])"],
            "fork_rng": ["with torch.random.fork_rng(): torch.manual_seed(0); net(x[:64] + torch.rand(64, 1))"],
            "second_sampler": ["for (some,) in held: net(x[some])"],
            "calibrated": ["net.scale.fill_(1 + 0.1 * torch.tanh(net(x[:64]).mean()))"],
            "deciding": [
                "now = F.mse_loss(net(x[world.rank :: 5]), y[world.rank :: 5]); dist.all_reduce(now)",
                "if float(now) < held['loss'] * 0.9:",
                "    held.update(loss=float(now), model=copy.deepcopy(net.state_dict()))",
                "else:",
                "    held['bad'] += 1; optimizer.param_groups[0]['lr'] *= 0.9",
            ],
            "swapped": [
                "own = [p.clone() for p in net.parameters()]",
                "for p in net.parameters(): p.mul_(0.9)",
                "net(x[:64]); strike('evaluated', step)",
                "for p, value in zip(net.parameters(), own): p.copy_(value)",
            ],
        }[self.r["evaluation_by"]]
        return [
            f"if {who}:",
            "    net.train()" if self.has("evaluation_by", "training_mode") else "    net.eval()",
            "    with torch.no_grad():",
            *[f"        {line}" for line in how],
            "    net.train(); strike('evaluated', step)",
        ]

    def _state(self) -> str:
        return "**objects(), **values()"

    def _marks(self) -> list[str]:
        return {
            "stop": ["stop = ddpjob.should_stop(step)"],
            "stop_top": [],
            "stop_keep": ["stop = ddpjob.should_stop(step)", f"snapshot.keep(step, {self._state()})"],
            "stop_some": ["if step % 3 == 0: stop = ddpjob.should_stop(step)"],
            "keep": [f"snapshot.keep(step, {self._state()})"],
            "none": [],
            "rank_0": ["if world.rank == 0: ddpjob.should_stop(step)"],
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
        elif self.has("save", "epoch_end") and not self.has("data", *FROM_THE_FIRST_BATCH):
            lines += ["if stop:", f"    {save}"]
        if self.has("best", "second_snapshot"):
            lines.append(f"if step % 6 == 0: best.save(step, {self._state()})")
        if self._stops() and not self.has("data", *FROM_THE_FIRST_BATCH):
            lines.append("if stop: raise ddpjob.Stopped(step)")
        return lines

    def _stops(self) -> bool:
        return self.r["mark"].startswith("stop") and not self.has("save", "never")

    def _epoch_end(self) -> list[str]:
        lines: list[str] = []
        lines += self._piece("epoch_end")
        if self.has("extra", "early_stop"):
            lines += [
                "with torch.no_grad(): now = float(F.mse_loss(net(x[:64]), y[:64]))",
                "extra['bad'] = 0 if now < extra['best'] - 0.05 else extra['bad'] + 1",
                "extra['best'] = min(now, extra['best'])",
            ]
        if self.has("extra", "metric"):
            lines.append("extra.reset()")
        if self.has("save", "epoch_end"):
            if self.has("data", *BY_WORKERS) and self.has("place_at_end", "next_epoch"):
                lines += ["epoch, batches = epoch + 1, 0  # its work is done: a resume must not end it again"]
            save = f"snapshot.save(step, {self._state()})"
            lines.append(f"optimizer.consolidate_state_dict(0); {save}" if self.has("optimizer", "zero") else save)
        if self._stops() and self.has("data", *FROM_THE_FIRST_BATCH):
            lines.append("if stop: raise ddpjob.Stopped(step)")
        return [*lines, "strike('epoch_end', step)"]

    def ending(self) -> str:
        lines = ["snapshot.close()"]
        if self.has("best", "second_snapshot"):
            lines.append("best.close()")
        if self.has("optimizer", "zero"):
            lines += ["optimizer.consolidate_state_dict(0)"]
        all_of = "objects().items() if world.rank == 0" if self.has("optimizer", "zero") else "objects().items()"
        lines += [
            f"states = {{k: v.state_dict() if hasattr(v, 'state_dict') else v for k, v in {all_of}}}",
            "result = {k: digest(v) for k, v in (states | values()).items()}",
        ]
        if self.has("extra", "always_another"):
            lines.append("result.pop('extra', None)")
        lines += [
            "result['torch'], result['python'] = digest(torch.get_rng_state()), digest(random.getstate())",
            "result['numpy'] = digest(numpy.random.get_state()[1].tobytes())",
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
STATEFUL = """
class Stateful:
    # Like torchdata's StatefulDataLoader: the first state_dict() begins the epoch, unless a state was loaded.
    def __init__(self, shard):
        self.shard, self.seed, self.place = shard, None, EPOCH
    def begin(self):
        self.seed, self.place = int(torch.empty((), dtype=torch.int64).random_()), 0
    def __iter__(self):
        if self.place == EPOCH: self.begin()
        order = torch.randperm(160, generator=torch.Generator().manual_seed(self.seed))
        while self.place < EPOCH:
            self.place += 1
            yield order[(self.place - 1) * 16 : self.place * 16] * 2 + self.shard
    def state_dict(self):
        if self.seed is None: self.begin()
        return {"seed": self.seed, "place": self.place}
    def load_state_dict(self, state): self.seed, self.place = state["seed"], state["place"]
"""
OWN_NORM = """
class OwnNorm(torch.nn.Module):
    # Its statistics are written in C++, which moves no version counter.
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8)); self.register_buffer("var", torch.ones(8))
    def forward(self, x): return F.batch_norm(x, self.mean, self.var, training=self.training)
"""
CHECKPOINTED = """
class Checkpointed(torch.nn.Module):
    # The backward pass repeats its forward pass.
    def __init__(self, is_reentrant):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
        self.is_reentrant = is_reentrant
    def forward(self, x): return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.is_reentrant)
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
FALLING = """
class Falling:
    # Has a state of its own, which the scheduler saves.
    rate = 1.0
    def __call__(self, epoch):
        self.rate *= 0.97
        return self.rate
"""
SHARDS = """
class Shards(torch.utils.data.IterableDataset):
    # Each rank reads every second sample.
    epoch = 0
    def __iter__(self):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[dist.get_rank()::2])
"""
DRAWN = {"torch": "float(torch.randn(()))", "python": "random.gauss(0, 1)", "numpy": "float(numpy.random.normal())"}
AUGMENTED = """
class Augmented(torch.utils.data.Dataset):
    def __len__(self): return N
    def __getitem__(self, i): return i, 0.1 * {draw}
"""
METRIC = """
class Metric:
    total, count = 0.0, 0
    def update(self, value): self.total += value; self.count += 1
    def reset(self): self.total, self.count = 0.0, 0
    def state_dict(self): return {"total": self.total, "count": self.count}
    def load_state_dict(self, state): self.total, self.count = state["total"], state["count"]
"""
CRITERION = """
class Criterion(torch.nn.Module):
    # An average over what this rank has seen, as of label smoothing or centring.
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
    def forward(self, values):
        self.mean.mul_(0.9).add_(values.mean(), alpha=0.1)
        return 0.1 * self.mean
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
CLIP_HISTORY = """
class ClipHistory:
    def __init__(self): self.norms = collections.deque([1.0], maxlen=5)
    def __call__(self, net):
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), sum(self.norms) / len(self.norms))))
    def state_dict(self): return {"norms": list(self.norms)}
    def load_state_dict(self, state): self.norms = collections.deque(state["norms"], maxlen=5)
"""
NORMALIZER = """
class Normalizer(torch.nn.Module):
    # Of observations, as in reinforcement learning.
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16)); self.register_buffer("count", torch.zeros(()))
    def update(self, a):
        self.count += len(a)
        self.mean.data = self.mean.data + (a.mean(0) - self.mean.data) * len(a) / self.count
"""
MASTER = """
class Master(torch.optim.Optimizer):
    # Moments and weights in float32 of parameters in any type.
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None: continue
                state = self.state[p]
                if not state: state.update(moment=torch.zeros_like(p, dtype=torch.float32), master=p.float())
                state["moment"].mul_(0.9).add_(p.grad.float())
                state["master"].add_(state["moment"], alpha=-group["lr"]); p.copy_(state["master"])
"""
HOOKED = """
class Hooked(torch.optim.Adam):
    # Counts its steps, and saves the count by a hook.
    count = 0
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_state_dict_post_hook(lambda own, state: {**state, "count": own.count})
        self.register_load_state_dict_pre_hook(lambda own, state: setattr(own, "count", state.get("count", 0)))
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups: group["lr"] = 1e-2 * 0.97 ** self.count
        return super().step(closure)
"""
BODIES = {
    "linear": "self.body = torch.nn.Linear(16, 1)",
    "layers": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))",
    "dropout": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))",
    "batchnorm": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))",
    "tied": "one = torch.nn.Linear(16, 16); self.body = torch.nn.Sequential(one, torch.nn.Tanh(), one, torch.nn.Linear(16, 1))",
    "spectral": "self.body = torch.nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(16, 8)), torch.nn.Linear(8, 1))",
    "weight_norm": "self.body = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 8)), torch.nn.Linear(8, 1))",
    "cumulative": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8, momentum=None), torch.nn.Linear(8, 1))",
    "own_norm": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 8), OwnNorm(), torch.nn.Linear(8, 1))",
    "plain_norm": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8, affine=False), torch.nn.Linear(8, 1))",
    "checkpointed": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), Checkpointed(False))",
    "reentrant": "self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), Checkpointed(True))",
    "convolution": "self.body = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 4, 4)), torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 1)).to(memory_format=torch.channels_last)",
} | dict.fromkeys(("sparse", "complex", "stochastic_depth", "momentum_encoder"), "self.body = torch.nn.Linear(16, 1)")
# "choice=options" → what the model has, does before its result, and adds to the result.
PARTS = {
    "precision=all_bf16": ("", "a = a.bfloat16()", ""),
    "buffers=of_each_rank of_rank_0": (
        "self.register_buffer('centre', torch.zeros(16))",
        "if self.training: self.centre.mul_(0.9).add_(a.detach().mean(0), alpha=0.1)\na = a - self.centre",
        "",
    ),
    "buffers=of_each_rank": ("self.register_buffer('shift', torch.zeros(1))", "a = a + self.shift", ""),
    "surgery=buffer_once": ("self.register_buffer('mask', torch.ones(16))", "a = a * self.mask", ""),
    "evaluation_by=calibrated": ("self.register_buffer('scale', torch.ones(()))", "a = a * self.scale", ""),
    "model=sparse": (
        "self.table = torch.nn.Embedding(8, 16, sparse=True)",
        "a = a + self.table((a[:, 0].abs() * 7 % 8).long())",
        "",
    ),
    "model=complex": (
        "self.phase = torch.nn.Parameter(torch.ones(16, dtype=torch.cfloat))",
        "a = (a * self.phase).abs()",
        "",
    ),
    "model=stochastic_depth": (
        "self.side = torch.nn.Linear(16, 16)",
        "a = a + self.side(a) if self.training and random.random() < 0.5 else a",
        "",
    ),
    "model=momentum_encoder": (
        "self.queue = Queue(self.body)",
        "self.queue.take(self.body, a)",
        "0.1 * self.queue.keys.mean()",
    ),
    "parameters=ignored_by_ddp": ("self.own = torch.nn.Linear(16, 1)", "", "(self.own(a) if step >= 15 else 0)"),
    "parameters=thawed thawed_group": (
        "self.late = torch.nn.Linear(16, 1); self.late.requires_grad_(False)",
        "",
        "self.late(a)",
    ),
    "parameters=alternating": (
        "self.even, self.odd = torch.nn.Linear(16, 1), torch.nn.Linear(16, 1)",
        "",
        "(self.even if step % 2 else self.odd)(a)",
    ),
}
QUEUE = """
class Queue(torch.nn.Module):
    # Keys of an encoder that follows the trained one, as for contrastive learning.
    def __init__(self, body):
        super().__init__()
        self.encoder = copy.deepcopy(body).requires_grad_(False)
        self.register_buffer("keys", torch.zeros(64, 1)); self.register_buffer("at", torch.zeros((), dtype=torch.long))
    @torch.no_grad()
    def take(self, body, a):
        if not self.training: return
        for own, p in zip(self.encoder.parameters(), body.parameters()): own.mul_(0.9).add_(p, alpha=0.1)
        self.keys[(self.at + torch.arange(len(a))) % 64] = self.encoder(a); self.at.add_(len(a)).remainder_(64)
"""
OWN_HOOK = """
def own_hook(state, bucket):
    kept = state.setdefault(bucket.index(), torch.zeros_like(bucket.buffer())); kept.mul_(0.5).add_(bucket.buffer())
    work = dist.all_reduce(kept.div(2).clone(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])
"""
AVERAGES = {
    "none": [],
    "averaged_model": ["average = torch.optim.swa_utils.AveragedModel(net)"],
    "ema_model": [
        "average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)"
    ],
    "own_object": ["average = Average(net)"],
}
DDP_OPTIONS = {
    "buffers=of_each_rank": "broadcast_buffers=False",
    "ddp=static_graph": "static_graph=True",
    "ddp=bucket_view": "gradient_as_bucket_view=True",
    "ddp=find_unused": "find_unused_parameters=True",
    "parameters=thawed thawed_group alternating": "find_unused_parameters=True",
    "surgery=frozen_once": "find_unused_parameters=True",
    "model=stochastic_depth": "find_unused_parameters=True",
}
# "choice=options" → names of objects, and name and text of a value, that the script saves.
OBJECTS = {
    "scaler=scaler": "scaler",
    "second=adversary": "critic critic_optimizer",
    "second=head": "head",
    "data=sampler loader": "sampler",
    "data=reader_of_each_rank stateful_loader begun_by_state": "reader",
    "evaluation_by=deciding": "held",
}
VALUES = {
    "data=workers persistent_workers": ("sampler", "sampler.state_dict(epoch=epoch, batches=batches)"),
    "data=generator": ("generator", "generator.get_state()"),
    "average=deep_copy_by_value": ("average", "average.state_dict()"),
}
# "choice=options" → what an evaluation needs.
EVALUATED = {
    "evaluation_by=second_sampler": "held = torch.utils.data.DataLoader(torch.utils.data.TensorDataset("
    "torch.arange(64)), batch_sampler=ddpjob.GlobalBatchSampler(64, global_batch=32, seed=8))",
    "evaluation_by=deciding": "held = {'loss': math.inf, 'model': {}, 'bad': 0}",
}
# "choice=options" → what the script does after `load`.
AFTER_LOAD = {
    "load=looked_at": "found = {k: v.state_dict() for k, v in objects().items() if hasattr(v, 'state_dict')}",
    "extra=value_of_rank_0": "if step and world.rank == 0: extra = snapshot.state['extra']",
    "data=generator": "if step: generator.set_state(snapshot.state['generator'])",
    "average=deep_copy_by_value": "if step: average.load_state_dict(snapshot.state['average'])",
    "parameters=thawed thawed_group": "if step >= 15: net.late.requires_grad_(True)",
    "surgery=frozen_once": f"if step > 26: {FREEZE}",
}
# "choice=options" → class that a script with one of these options needs.
CLASSES = {
    "model=own_norm": OWN_NORM,
    "model=checkpointed reentrant": CHECKPOINTED,
    "model=momentum_encoder": QUEUE,
    "data=reader_of_each_rank stateful_loader": READER,
    "data=iterable": SHARDS,
    "data=begun_by_state": STATEFUL,
    "average=own_object": OWN_AVERAGE,
    "optimizer=lookahead": LOOKAHEAD,
    "optimizer=sharing": SHARING,
    "optimizer=master": MASTER,
    "optimizer=hooked": HOOKED,
    "scheduler=falling": FALLING,
    "extra=always_another": ALWAYS_ANOTHER,
    "extra=metric": METRIC,
    "extra=criterion": CRITERION,
    "extra=clip_history": CLIP_HISTORY,
    "extra=normalizer": NORMALIZER,
}
