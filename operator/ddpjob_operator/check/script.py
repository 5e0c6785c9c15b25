"""A training script as the rules see it: what kind it is, which number is a rank, and which ranks come where.

A rule that hears "unknown" from here is silent.
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterator
from functools import cached_property

from ddpjob_operator.check.nodes import (
    Marker,
    Origin,
    before,
    is_named_like_a_rank,
    leaves,
    name_of,
    parts_of,
    text_in,
)
from ddpjob_operator.check.values import Values

INIT = "torch.distributed.init_process_group"
DDP = "torch.nn.parallel.DistributedDataParallel"
# Frameworks that start, wrap, sample and save by themselves: what is missing in the script is done there.
_FRAMEWORKS = {
    "accelerate", "colossalai", "composer", "deepspeed", "determined", "fairscale", "horovod", "ignite", "lightning",
    "lightning_fabric", "mmengine", "pytorch_lightning", "ray", "torchtitan", "transformers",
}  # fmt: skip
_LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "NNODES"}
_LOOPBACK = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|::1|\[::1\])$")
# Long chains of names are real, endless ones are not: what lies further than this counts as unknown.
_DEPTH_MAX = 12


class Kind(enum.Enum):
    """What a number counts."""

    GLOBAL = "global rank"
    LOCAL = "local rank"
    INDEX = "number of a started process"
    UNKNOWN = "unknown"


class Script(Values):
    """A script, read once. Raises what Values does where it does not parse."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._kinds: dict[ast.expr, set[Kind]] = {}
        self._guarded: dict[ast.AST, bool] = {}

    # ---------------------------------------------------------------- what kind of script it is

    @cached_property
    def inits(self) -> list[ast.Call]:
        """The calls that form the group: torch's init_process_group and ddpjob.init."""
        return self.calls_to(INIT, "ddpjob.init")

    @cached_property
    def is_distributed(self) -> bool:
        """Whether this file trains in a group, with no framework that does what it leaves out."""
        return bool(self.inits or self.calls_to(DDP)) and not self.uses_a_framework

    @cached_property
    def uses_a_framework(self) -> bool:
        """Whether Lightning, Accelerate or another such library is imported."""
        return any(name.split(".")[0] in _FRAMEWORKS for name in self.imported.values())

    @cached_property
    def uses_torch(self) -> bool:
        """Whether anything of torch is imported."""
        return any(name.split(".")[0] == "torch" for name in self.imported.values())

    @cached_property
    def starts(self) -> list[ast.Call]:
        """mp.spawn(…), Process(target=…): where the script starts processes itself."""
        return [c for c in self.calls if self.started(c) is not None]

    @cached_property
    def reads_launcher(self) -> bool:
        """Whether it takes its place from the variables that a launcher sets."""
        return any(self.variable_read(n) in _LAUNCHER_VARIABLES for n in self.nodes)

    @cached_property
    def is_for_one_node(self) -> bool:
        """Whether the script itself makes its processes meet on this machine: as tutorials do, to be tried at once."""
        if self.reads_launcher:
            return False
        addresses = [value for name, value, _ in self.variables_set if name == "MASTER_ADDR"]
        urls = [u for call in self.inits for u in self.texts(self.argument(call, "init_method", 1))]
        return any(_LOOPBACK.match(text) for value in addresses for text in self.texts(value)) or any(
            _LOOPBACK.match(url.removeprefix("tcp://").rpartition(":")[0]) for url in urls if url.startswith("tcp://")
        )

    def variable_read(self, node: ast.AST) -> str:
        """RANK for os.environ["RANK"], os.environ.get("RANK", …) and os.getenv("RANK"); "" for all else."""
        if isinstance(node, ast.Subscript) and self.full_name(node.value) == "os.environ":
            return text_in(node.slice) if isinstance(node.ctx, ast.Load) else ""
        if self.called(node) in ("os.environ.get", "os.getenv", "os.environ.pop") and isinstance(node, ast.Call):
            return text_in(node.args[0]) if node.args else ""
        return ""

    @cached_property
    def variables_set(self) -> list[tuple[str, ast.expr, ast.AST]]:
        """(name, value, where) of os.environ[…] = …, os.environ.update and os.putenv; not of setdefault."""
        found: list[tuple[str, ast.expr, ast.AST]] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                items = [t for t in node.targets if isinstance(t, ast.Subscript)]
                found += [
                    (text_in(t.slice), node.value, node) for t in items if self.full_name(t.value) == "os.environ"
                ]
            elif isinstance(node, ast.Call) and self.called(node) == "os.environ.update":
                found += [(k.arg, k.value, k.value) for k in node.keywords if k.arg]
                for arg in node.args:
                    if isinstance(arg, ast.Dict):
                        found += [(text_in(k), v, v) for k, v in zip(arg.keys, arg.values, strict=True) if k]
            elif isinstance(node, ast.Call) and self.called(node) == "os.putenv" and len(node.args) == 2:
                found.append((text_in(node.args[0]), node.args[1], node))
        return found

    def kinds(self, expression: ast.expr | None, depth: int = 0) -> set[Kind]:
        """Which rank, if any, a number is."""
        if expression is None or depth > _DEPTH_MAX:
            return {Kind.UNKNOWN}
        if expression not in self._kinds:
            self._kinds[expression] = {Kind.UNKNOWN}  # what a value that is made from itself adds
            self._kinds[expression] = set().union(*(self._kinds_of(o, depth + 1) for o in self.origins(expression)))
        return self._kinds[expression]

    def depends_on_rank(self, expression: ast.AST | None, *, by_arguments: bool = False) -> bool:
        """Whether a rank, or something that is called like one, has a part in an expression.

        by_arguments: also where a name in it is what a call has made of a rank: parts.use(rank). For a condition that
        does not count: the loss of a model that lies on GPU `rank` is no rank.
        """
        todo = [] if expression is None else [(expression, True)]
        seen: set[ast.AST] = set()
        while todo:
            here, is_first = todo.pop()
            for node in parts_of(here, with_arguments=is_first or by_arguments):
                if self._speaks_of_rank(node):
                    return True
                follow = isinstance(node, ast.Name | ast.Attribute) and (is_first or not by_arguments)
                origins = [o for o in self.origins(node) if o is not node] if follow else []  # type: ignore[arg-type]
                if Marker.INDEX in origins:
                    return True
                new = [o for o in origins if isinstance(o, ast.expr) and o not in seen]
                seen.update(new)
                todo += [(o, False) for o in new]
        return False

    def on_every_rank(self, node: ast.AST) -> bool:
        """Whether all processes of the group certainly come here: there is a way from the start with no `if rank …`."""
        todo, seen = [(node, False)], set()
        while todo:
            here, started = todo.pop()
            function = self.function(here)
            if (function, started) in seen or self._is_guarded(here):
                continue
            if function is not None:
                seen.add((function, started))
                if not any(self.depends_on_rank(d) for d in function.decorator_list):
                    todo += [(c.call, started or c.starts_process) for c in self.callers(function)]
            elif started or not self.starts:
                # Where the script starts the processes itself, its own first process is not one of the group.
                return True
        return False

    def runs_in_started_process(self, node: ast.AST) -> bool:
        """Whether a process that this script starts comes here."""
        todo, seen = [self.function(node)], set()
        while todo:
            function = todo.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            for caller in self.callers(function):
                if caller.starts_process:
                    return True
                todo.append(self.function(caller.call))
        return False

    def enclosing_tests(self, node: ast.AST) -> Iterator[ast.expr]:
        """The conditions under which a node runs, within its function."""
        for child, parent in self.above(node):
            if isinstance(parent, ast.If | ast.IfExp | ast.While) and child is not parent.test:
                yield parent.test
            elif isinstance(parent, ast.BoolOp):
                yield from parent.values[: parent.values.index(child)] if child in parent.values else ()
            elif isinstance(parent, ast.Match) and child is not parent.subject:
                yield parent.subject

    # ---------------------------------------------------------------- ranks

    def _kinds_of(self, origin: Origin, depth: int) -> set[Kind]:
        if isinstance(origin, Marker):
            return {Kind.INDEX if origin is Marker.INDEX else Kind.UNKNOWN}
        by_variable = {"RANK": Kind.GLOBAL, "LOCAL_RANK": Kind.LOCAL}.get(self.variable_read(origin))
        if by_variable:
            return {by_variable}
        if isinstance(origin, ast.Call):
            return self._kinds_of_call(origin, depth)
        if isinstance(origin, ast.BinOp):
            return {self._kind_of_sum(origin, depth)}
        if isinstance(origin, ast.Attribute) and self._is_world(origin.value):
            return {{"rank": Kind.GLOBAL, "local_rank": Kind.LOCAL}.get(origin.attr, Kind.UNKNOWN)}
        return {Kind.LOCAL if name_of(origin) in ("local_rank", "localrank", "LOCAL_RANK") else Kind.UNKNOWN}

    def _kinds_of_call(self, call: ast.Call, depth: int) -> set[Kind]:
        name = self.called(call)
        if name in ("int", "str", "abs") and len(call.args) == 1:
            return self.kinds(call.args[0], depth)
        if name == "torch.distributed.get_rank":
            return {Kind.UNKNOWN if call.args or call.keywords else Kind.GLOBAL}
        return {Kind.LOCAL if name == "torch.distributed.get_node_local_rank" else Kind.UNKNOWN}

    def _kind_of_sum(self, sum_: ast.BinOp, depth: int) -> Kind:
        """rank % gpus is local again; node_rank * nproc + local_rank is global."""
        own = {Kind.LOCAL, Kind.INDEX}
        if isinstance(sum_.op, ast.Mod):
            return Kind.LOCAL if self.kinds(sum_.left, depth) <= own | {Kind.GLOBAL} else Kind.UNKNOWN
        for product, local in ((sum_.left, sum_.right), (sum_.right, sum_.left)):
            if isinstance(sum_.op, ast.Add) and isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
                factors = self.kinds(product.left, depth) | self.kinds(product.right, depth)
                if not factors & own and self.kinds(local, depth) <= own:
                    return Kind.GLOBAL
        return Kind.UNKNOWN

    def _is_world(self, node: ast.expr) -> bool:
        return any(self.called(o) == "ddpjob.init" for o in self.origins(node))

    def _speaks_of_rank(self, node: ast.AST) -> bool:
        if is_named_like_a_rank(name_of(node)) or "RANK" in self.variable_read(node):
            return True
        defined = self.definition(node.func) if isinstance(node, ast.Call) else None
        return defined is not None and any(
            is_named_like_a_rank(name_of(n)) or "RANK" in self.variable_read(n) for n in ast.walk(defined)
        )

    def _is_guarded(self, node: ast.AST) -> bool:
        if node not in self._guarded:
            self._guarded[node] = self._has_a_guard(node)
        return self._guarded[node]

    def _has_a_guard(self, node: ast.AST) -> bool:
        if any(self.depends_on_rank(test) for test in self.enclosing_tests(node)):
            return True
        for child, parent in self.above(node):
            if isinstance(parent, ast.With | ast.AsyncWith) and any(
                self.depends_on_rank(item.context_expr) for item in parent.items if item is not child
            ):
                return True
            if any(self._leaves_some(sibling) for sibling in before(parent, child)):
                return True
        return False

    def _leaves_some(self, statement: ast.stmt) -> bool:
        """`if rank != 0: return`: what follows is not for all."""
        return isinstance(statement, ast.If) and leaves(statement.body) and self.depends_on_rank(statement.test)
