"""Facts about a training script for the rules: its kind, which numbers are ranks, and which ranks run which lines.
Anything uncertain is UNKNOWN, and no rule reports anything about it."""

from __future__ import annotations

import ast
import enum
import re
import sys
from collections.abc import Iterator, Set
from functools import cached_property
from typing import TypeGuard

from ddpjob_check.nodes import (
    Function,
    Marker,
    Origin,
    before,
    dotted,
    has_hidden_arguments,
    is_method,
    is_named_like_a_rank,
    leaves,
    means_one_process,
    name_of,
    parts_of,
    text_in,
)
from ddpjob_check.values import Values

INIT = "torch.distributed.init_process_group"
DDP = "torch.nn.parallel.DistributedDataParallel"
# Frameworks that start processes, wrap models, sample and save, so their scripts need no code for it.
_FRAMEWORKS = {
    "accelerate", "colossalai", "composer", "deepspeed", "determined", "fairscale", "fastai", "horovod", "ignite",
    "lightning", "lightning_fabric", "megatron", "mmengine", "nemo", "pytorch_lightning", "ray",
    "sentence_transformers", "torchtitan", "transformers", "trl", "ultralytics",
}  # fmt: skip
# Packages that certainly form no process group, unless their functions for it are called. Others may form one.
FORM_NO_GROUP = sys.stdlib_module_names | set(
    "PIL cv2 datasets ddpjob einops matplotlib mlflow numpy pandas requests safetensors scipy sklearn tensorboard "
    "tensorboardX tiktoken timm torch torchaudio torchmetrics torchtext torchvision tqdm wandb yaml".split()
)
_LAUNCHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "NNODES"}
_LOOPBACK = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|::1|\[::1\])$")
# A value that is reached through more names is unknown, because names may refer to each other in a cycle.
_DEPTH_MAX = 12
# How many functions deep a returned result is followed, because the number of possible results multiplies.
_CALLS_MAX = 3
_PARTS_MAX = 1000  # nodes of an expression, including everything that its names refer to


def _has_arguments(node: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and bool(node.args)


class Kind(enum.Enum):
    """What a number in a script is, for example a global rank."""

    GLOBAL = "global rank"
    LOCAL = "local rank"
    INDEX = "number of a started process"
    UNKNOWN = "unknown"


class Script(Values):
    """A parsed script. Raise the errors of Values if it does not parse."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._kinds: dict[ast.expr, set[Kind]] = {}
        self._guarded: dict[tuple[ast.AST, bool], bool] = {}

    # ---------------------------------------------------------------- what kind of script it is

    @cached_property
    def inits(self) -> list[ast.Call]:
        """The calls that form the group: torch's init_process_group and ddpjob.init."""
        return self.calls_to(INIT, "ddpjob.init")

    @cached_property
    def is_distributed(self) -> bool:
        """True if this file trains in a group, without a framework that does the rest."""
        return bool(self.inits or self.calls_to(DDP)) and not self.uses_a_framework

    @cached_property
    def uses_a_framework(self) -> bool:
        """True if Lightning, Accelerate or another such library is imported."""
        return bool(self.frameworks)

    @cached_property
    def frameworks(self) -> set[str]:
        """The imported frameworks."""
        return {name.split(".")[0] for name in self.imported.values()} & _FRAMEWORKS

    @cached_property
    def uses_torch(self) -> bool:
        """True if anything of torch is imported."""
        return any(name.split(".")[0] == "torch" for name in self.imported.values())

    @cached_property
    def has_star_import(self) -> bool:
        return any(isinstance(n, ast.ImportFrom) and any(a.name == "*" for a in n.names) for n in self.nodes)

    def imports_only(self, packages: Set[str]) -> bool:
        """True if the script imports these packages alone, and no file of its project."""
        is_relative = any(isinstance(n, ast.ImportFrom) and n.level for n in self.nodes)
        tops = {name.split(".")[0] for name in self.imported.values()}
        return not is_relative and not self.has_star_import and tops <= packages

    @cached_property
    def starts(self) -> list[ast.Call]:
        """Return the calls that start processes: mp.spawn(…), Process(target=…)."""
        return [c for c in self.calls if self.started(c) is not None]

    @cached_property
    def reads_launcher(self) -> bool:
        """True if the script reads a launcher's variable, such as RANK."""
        return any(self.variable_read(n) in _LAUNCHER_VARIABLES for n in self.nodes)

    @cached_property
    def is_for_one_node(self) -> bool:
        """True if the rendezvous is at this machine's own address, as in tutorials."""
        if self.reads_launcher:
            return False
        addresses = [value for name, value, _ in self.variables_set if name == "MASTER_ADDR"]
        urls = [u for call in self.inits for u in self.texts(self.argument(call, "init_method", 1))]
        return any(_LOOPBACK.match(text) for value in addresses for text in self.texts(value)) or any(
            _LOOPBACK.match(url.removeprefix("tcp://").rpartition(":")[0]) for url in urls if url.startswith("tcp://")
        )

    def variable_read(self, node: ast.AST) -> str:
        """Return RANK for os.environ["RANK"], os.environ.get("RANK", …) and os.getenv("RANK"), also for a copy of
        os.environ; else ""."""
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            return text_in(node.slice) if self._is_environment(node.value) else ""
        if not isinstance(node, ast.Call) or not node.args:
            return ""
        reads = self.full_name(node.func) == "os.getenv" or (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in ("get", "pop", "__getitem__")
            and self._is_environment(node.func.value)
        )
        return text_in(node.args[0]) if reads else ""

    def _is_environment(self, node: ast.expr) -> bool:
        """True for os.environ, or for a value that is certainly a copy of os.environ or of some of its variables."""
        if self.full_name(node) == "os.environ":
            return True
        if not self._is_complete or not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.DictComp | ast.Dict):
            return False
        if dotted(node) in self.containers_changed:
            return False
        return all(isinstance(o, ast.expr) and self._copies_the_environment(o) for o in self.origins(node))

    def _copies_the_environment(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            copied = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "copy" else None
            if self.full_name(node.func) in ("dict", "copy.copy", "copy.deepcopy") and len(node.args) == 1:
                copied = node.args[0]
            return copied is not None and self.full_name(copied) == "os.environ"
        if isinstance(node, ast.DictComp):  # {name: os.environ[name] for name in (…)}
            value, key = node.value, node.key
            read = value.slice if isinstance(value, ast.Subscript) else value.args[0] if _has_arguments(value) else None
            of = getattr(value if isinstance(value, ast.Subscript) else getattr(value, "func", None), "value", None)
            return (
                isinstance(key, ast.Name)
                and isinstance(read, ast.Name)
                and read.id == key.id
                and of is not None
                and self.full_name(of) in ("os.environ", "os")
            )
        return self.full_name(node) == "os.environ"

    @cached_property
    def variables_set(self) -> list[tuple[str, ast.expr, ast.AST]]:
        """Return (name, value, node) for os.environ[…] = …, os.environ.update and os.putenv, but not for setdefault."""
        variables: list[tuple[str, ast.expr, ast.AST]] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                items = [t for t in node.targets if isinstance(t, ast.Subscript)]
                items = [t for t in items if self.full_name(t.value) == "os.environ"]
                variables += [item for t in items for item in self._named_by(t.slice, node)]
            elif isinstance(node, ast.Call) and self.called(node) == "os.environ.update":
                variables += [(k.arg, k.value, k.value) for k in node.keywords if k.arg]
                for arg in node.args:
                    if isinstance(arg, ast.Dict):
                        variables += [(text_in(k), v, v) for k, v in zip(arg.keys, arg.values, strict=True) if k]
            elif isinstance(node, ast.Call) and self.called(node) == "os.putenv" and len(node.args) == 2:
                variables.append((text_in(node.args[0]), node.args[1], node))
        return variables

    def _named_by(self, key: ast.expr, node: ast.Assign) -> list[tuple[str, ast.expr, ast.AST]]:
        """Return (name, value, node) for each item in `for k, v in {…}.items(): os.environ[k] = v`."""
        loop = next((parent for _, parent in self.above(node) if isinstance(parent, ast.For)), None)
        items = loop.iter.func.value if loop is not None and is_method(loop.iter, "items") else None  # type: ignore[attr-defined]
        names = [name_of(n) for n in loop.target.elts] if loop and isinstance(loop.target, ast.Tuple) else []
        if isinstance(items, ast.Dict) and names == [name_of(key), name_of(node.value)]:
            return [(text_in(k), v, node) for k, v in zip(items.keys, items.values, strict=True) if k]
        return [(text_in(key), node.value, node)]

    def kinds(self, expression: ast.expr | None, depth: int = 0) -> set[Kind]:
        """Return the kinds of rank that a number may be; {UNKNOWN} if the number is no rank."""
        if expression is None or depth > _DEPTH_MAX:
            return {Kind.UNKNOWN}
        if expression not in self._kinds:
            self._kinds[expression] = {Kind.UNKNOWN}  # if names refer to each other in a cycle, this value adds no kind
            self._kinds[expression] = set().union(*(self._kinds_of(o, depth + 1) for o in self.origins(expression)))
        return self._kinds[expression]

    def depends_on_rank(self, expression: ast.AST | None, *, by_arguments: bool = False) -> bool:
        """True if an expression contains a rank, or a name like that of a rank. by_arguments: also if a name in it
        was computed by a call with a rank, as in parts.use(rank). Conditions are checked without by_arguments,
        because the loss of a model on GPU `rank` is no rank."""
        todo = [] if expression is None else [(expression, True)]
        seen: set[ast.AST] = set()
        while todo:
            part, is_first = todo.pop()
            for node in parts_of(part, with_arguments=is_first or by_arguments):
                if self._reads_a_rank(node):
                    return True
                follow = isinstance(node, ast.Name | ast.Attribute) and (is_first or not by_arguments)
                origins = [o for o in self.origins(node) if o is not node] if follow else []  # type: ignore[arg-type]
                if Marker.INDEX in origins:
                    return True
                new = [o for o in origins if isinstance(o, ast.expr) and o not in seen]
                seen.update(new)
                todo += [(o, False) for o in new]
            if len(seen) > _PARTS_MAX:
                return True  # the value may depend on a rank, so no rule can be certain
        return False

    def on_every_rank(self, node: ast.AST) -> bool:
        """True if all processes of the group certainly run this node: no `if rank …` is around or before it."""
        todo, seen, forming = [(node, False)], set(), node in self.inits
        while todo:
            place, started = todo.pop()
            function = self.function(place)
            if (function, started) in seen or self._is_guarded(place, forming):
                continue
            if function is not None:
                seen.add((function, started))
                if not any(self.depends_on_rank(d) for d in function.decorator_list):
                    todo += [(c.call, started or c.starts_process) for c in self.callers(function)]
            elif started or not self.starts:
                # a script that starts processes itself has a first process outside of the group
                return True
        return False

    def enclosing_tests(self, node: ast.AST) -> Iterator[ast.expr]:
        """Yield the conditions that surround a node in its function."""
        for child, parent in self.above(node):
            if isinstance(parent, ast.If | ast.IfExp | ast.While) and child is not parent.test:
                yield parent.test
            elif isinstance(parent, ast.BoolOp):
                yield from parent.values[: parent.values.index(child)] if child in parent.values else ()
            elif isinstance(parent, ast.Match) and child is not parent.subject:
                yield parent.subject

    def is_wrapped(self, model: ast.expr) -> bool:
        """True if a value is certainly DDP's wrapper: self.model = DDP(self.model.to(device))."""
        origins = self.origins(model)
        before = [o for o in origins if self.called(o) != DDP]
        moved = [o for o in before if not isinstance(o, Marker) and (is_method(o, "to") or is_method(o, "cuda"))]
        return len(before) < len(origins) and moved == before

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
        if isinstance(origin, ast.Subscript):
            if dotted(origin.value) in self.containers_changed:
                return {Kind.UNKNOWN}
            items = [e for o in self.origins(origin.value) for e in self._items(o, origin.slice)]
            return set().union(*(self.kinds(e, depth) for e in items))
        owners = self.origins(origin.value) if isinstance(origin, ast.Attribute) else ()
        if isinstance(origin, ast.Attribute) and any(self.called(owner) == "ddpjob.init" for owner in owners):
            return {{"rank": Kind.GLOBAL, "local_rank": Kind.LOCAL}.get(origin.attr, Kind.UNKNOWN)}
        if isinstance(origin, ast.Attribute) and dotted(origin.value) not in self.containers_changed:
            fields = [self._field(owner, origin.attr) for owner in owners]
            if None not in fields:
                return set().union(*(self.kinds(f, depth) for f in fields))
        return {Kind.LOCAL if name_of(origin) in ("local_rank", "localrank", "LOCAL_RANK") else Kind.UNKNOWN}

    def _kinds_of_call(self, call: ast.Call, depth: int) -> set[Kind]:
        name = self.called(call)
        if name in ("int", "str", "abs") and len(call.args) == 1:
            return self.kinds(call.args[0], depth)
        if name == "torch.distributed.get_rank":
            return {Kind.UNKNOWN if call.args or call.keywords else Kind.GLOBAL}
        if name == "torch.distributed.get_node_local_rank":
            return {Kind.LOCAL}
        results = self.results(call)
        return set().union(*(self.kinds(r, depth) for r in results)) if results else {Kind.UNKNOWN}

    def _items(self, container: Origin, key: ast.expr, calls: int = 0) -> list[ast.expr | None]:
        """Return the item with this constant key of a literal dict, tuple or list, also if a function returns it."""
        results = self.results(container) if isinstance(container, ast.Call) and calls < _CALLS_MAX else []
        if results:
            return [e for r in results for o in self.origins(r) for e in self._items(o, key, calls + 1)]
        if not isinstance(key, ast.Constant):
            return [None]
        if isinstance(container, ast.Dict):
            values = [v for k, v in zip(container.keys, container.values, strict=True) if _is_constant(k, key.value)]
            return [values[-1] if values and None not in container.keys else None]
        if isinstance(container, ast.Tuple | ast.List) and type(key.value) is int:
            listed = container.elts
            plain = not any(isinstance(e, ast.Starred) for e in listed) and -len(listed) <= key.value < len(listed)
            return [listed[key.value] if plain else None]
        return [None]

    def _field(self, instance: Origin, name: str) -> ast.expr | None:
        """Return the value that a new instance of a dataclass, NamedTuple or SimpleNamespace gets for this field."""
        if not isinstance(instance, ast.Call) or has_hidden_arguments(instance):
            return None
        defined = self.definition(instance.func)
        if not isinstance(defined, ast.ClassDef):
            simple = self.called(instance) in ("types.SimpleNamespace", "argparse.Namespace")
            return self.argument(instance, name) if simple else None
        fields = [f for f in defined.body if isinstance(f, ast.AnnAssign)]
        names = [name_of(f.target) for f in fields]
        if name not in names or any(isinstance(m, Function) and m.name == "__init__" for m in defined.body):
            return None
        position = names.index(name)
        return self.argument(instance, name, position) or fields[position].value

    def _kind_of_sum(self, sum_: ast.BinOp, depth: int) -> Kind:
        """Return the kind of an arithmetic result: rank % gpus is local; node_rank * nproc + local_rank is global."""
        own = {Kind.LOCAL, Kind.INDEX}
        if isinstance(sum_.op, ast.Mod):
            return Kind.LOCAL if self.kinds(sum_.left, depth) <= own | {Kind.GLOBAL} else Kind.UNKNOWN
        for product, local in ((sum_.left, sum_.right), (sum_.right, sum_.left)):
            if isinstance(sum_.op, ast.Add) and isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
                factors = self.kinds(product.left, depth) | self.kinds(product.right, depth)
                if not factors & own and self.kinds(local, depth) <= own:
                    return Kind.GLOBAL
        return Kind.UNKNOWN

    def _reads_a_rank(self, node: ast.AST) -> bool:
        if is_named_like_a_rank(name_of(node)) or "RANK" in self.variable_read(node):
            return True
        defined = self.definition(node.func) if isinstance(node, ast.Call) else None
        return defined is not None and any(
            is_named_like_a_rank(name_of(n)) or "RANK" in self.variable_read(n) for n in ast.walk(defined)
        )

    def _is_guarded(self, node: ast.AST, forming: bool) -> bool:
        if (node, forming) not in self._guarded:
            self._guarded[node, forming] = self._has_a_guard(node, forming)
        return self._guarded[node, forming]

    def _has_a_guard(self, node: ast.AST, forming: bool) -> bool:
        if any(self.depends_on_rank(test) or self._is_set_on_some(test) for test in self.enclosing_tests(node)):
            return True
        for child, parent in self.above(node):
            if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
                inside = parent.body if isinstance(parent, ast.If) else [parent.body]
                if means_one_process(parent.test, holds=child in inside, forming=forming):
                    return True
            if isinstance(parent, ast.With | ast.AsyncWith) and any(
                self.depends_on_rank(item.context_expr) for item in parent.items if item is not child
            ):
                return True
            if any(self._leaves_some(sibling, forming) for sibling in before(parent, child)):
                return True
        return False

    def _leaves_some(self, statement: ast.stmt, forming: bool) -> bool:
        """True for `if rank != 0: return`, after which only some ranks run the remaining lines."""
        if not isinstance(statement, ast.If) or not leaves(statement.body):
            return False
        return self.depends_on_rank(statement.test) or means_one_process(statement.test, holds=False, forming=forming)

    def _is_set_on_some(self, test: ast.expr) -> bool:
        """True for `if writer is not None` if only rank 0 has a writer."""
        names = [n for n in ast.walk(test) if isinstance(n, ast.Name | ast.Attribute)]
        values = [o for n in names for o in self.origins(n) if isinstance(o, ast.expr) and o is not n]
        return any(self.depends_on_rank(t) for value in values for t in self.enclosing_tests(value))


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value and type(node.value) is type(value)
