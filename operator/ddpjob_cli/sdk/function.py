"""Turn a function into files. cloudpickle sends code of `__main__`, notebooks and lambdas; other code by name only."""

from __future__ import annotations

import base64
import contextlib
import inspect
import io
import json
import secrets
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ddpjob_cli.client.pack import PACKED_BYTES_MAX
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_cli.sdk import in_rank
from ddpjob_operator.failures.log_lines import ANSWER
from ddpjob_operator.job.wording import name_of

SCRIPT, ANSWER_FILE = "ddpjob_function.py", "answer"
FUNCTION_BYTES_MAX = PACKED_BYTES_MAX * 3 // 4  # bytes; weights do not compress, and cloudpickle is added
_NAMED_MAX = 3


@dataclass(frozen=True)
class Sent:
    name: str
    files: dict[str, str]
    """Files sent with the job: path → text."""
    word: str
    """Secret prefix of each line with a result."""

    def write(self, folder: Path) -> None:
        """Write the files for ranks on this machine, which return results in ANSWER_FILE and not in their output."""
        for path, text in self.files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        (folder / ANSWER_FILE).touch(mode=0o600)


class UnsentError(Exception):
    """The result or exception of a rank could not be sent back."""


class _Limited(io.BytesIO):
    """Refuses more than FUNCTION_BYTES_MAX early, before the whole of a large model is copied."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > FUNCTION_BYTES_MAX:
            raise OverflowError
        return super().write(data)


def sent(function: Callable[..., Any], arguments: Sequence[Any]) -> Sent:
    """Return the files that call a function in each rank. Raise InputError, with the names of variables that are too
    large or cannot be pickled; ImportError without cloudpickle."""
    package = Path(_cloudpickle().__file__).parent
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise InputError(f"{name}: calling it would run nothing, because it is asynchronous or a generator")
    module = inspect.getmodule(inspect.unwrap(function))
    with contextlib.ExitStack() as stack:
        if module is not None and module.__name__ != "__main__" and not _is_installed(module):
            _cloudpickle().register_pickle_by_value(module)  # a user's own module: no image has it
            stack.callback(_cloudpickle().unregister_pickle_by_value, module)
        try:
            data = _dumped((function, tuple(arguments)))
        except OverflowError:  # pickle itself raises this for 4 GB
            limit = f"more than {FUNCTION_BYTES_MAX / 1e6:.2g} MB{_culprits(function, arguments)}"
            text = f"{name}: its code and the objects that it uses are {limit}"
            raise InputError(f"{text}; load or build it within the function, or read it from a file") from None
        except Exception as error:
            raise InputError(f"{name}: cannot be sent{_culprits(function, arguments)}: {error}") from None
    word = f"{ANSWER}{secrets.token_hex(8)}"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    payload = {"name": name, "python": version, "word": word, "function": base64.b64encode(data).decode()}
    files = {SCRIPT: Path(in_rank.__file__).read_text(encoding="utf-8"), "ddpjob_function.json": json.dumps(payload)}
    files |= {f"cloudpickle/{path.name}": path.read_text(encoding="utf-8") for path in package.glob("*.py")}
    return Sent(name_of(name.strip("<>")), files, word)


def answers(word: str, texts: Iterable[str]) -> dict[tuple[str, int], bytes]:
    """Return the results by kind (value, refused, error) and rank. After a restart the last complete result counts."""
    parts: dict[tuple[str, int], list[str]] = {}
    found: dict[tuple[str, int], bytes] = {}
    for line in texts:
        _, is_ours, rest = line.partition(f"{word}:")
        with contextlib.suppress(ValueError):  # the line was cut off
            if not is_ours:
                continue
            kind, rank, place, text = rest.strip().split(":")
            index, of = map(int, place.split("/"))
            key = (kind, int(rank))
            known = parts[key] = parts.get(key, []) if index else []
            if len(known) == index:
                known.append(text)
            if len(known) == of:
                found[key] = base64.b64decode("".join(known))
    return found


def loaded(data: bytes) -> Any:
    """Unpickle a result. Raise UnsentError if this Python cannot load it."""
    try:
        return _cloudpickle().loads(data)
    except Exception as error:
        raise UnsentError(f"the result cannot be loaded here: {type(error).__name__}: {error}") from error


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        raise ImportError("a function is sent with cloudpickle: pip install 'ddpjob[sdk]', or give a script") from None
    return cloudpickle


def _dumped(value: object) -> bytes:
    file = _Limited()
    _cloudpickle().dump(value, file)
    return file.getvalue()


def _is_installed(module: ModuleType) -> bool:
    paths = (*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib"))
    file = getattr(module, "__file__", None)
    return file is None or any(Path(path) in Path(file).parents for path in paths)


def _culprits(function: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """Return the names of variables and arguments that cannot be sent: ` (model, data)`."""
    given: dict[str, Any] = {f"args[{i}]": value for i, value in enumerate(arguments)}
    with contextlib.suppress(TypeError):
        used = inspect.getclosurevars(function)
        given |= {**used.globals, **used.nonlocals}
    wrong = []
    for name, value in given.items():
        try:
            _dumped(value)
        except Exception:  # noqa: PERF203 - what it is was said
            wrong.append(name)
    return f" ({', '.join(wrong[:_NAMED_MAX])}{', …' if len(wrong) > _NAMED_MAX else ''})" if wrong else ""
