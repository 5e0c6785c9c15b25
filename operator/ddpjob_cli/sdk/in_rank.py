"""The script of a job that was made from a function: it calls the function in each rank, and returns the result of rank
0. The result is written as lines with a secret prefix, to the file `answer` next to this script if it exists, else to
the log. cloudpickle is sent along, so the pod needs no installed package."""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

ANSWER_BYTES_MAX = 1_000_000
LINE_CHARACTERS = 3000  # characters; below the 4096 bytes that a pipe writes at once, so lines of ranks do not mix


def main() -> None:
    """Call the function, and return its result. Its exception ends the rank, as in any script."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "ddpjob_function.json"), encoding="utf-8") as file:
        sent = json.load(file)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if sent["python"] != here:
        sys.exit(
            f"{sent['name']} was sent by Python {sent['python']}, and here is Python {here}, which cannot load it: "
            f"take an image with Python {sent['python']}, or send a script"
        )
    import cloudpickle

    rank = int(os.environ.get("RANK", "0"))
    try:
        function, arguments = cloudpickle.loads(base64.b64decode(sent["function"]))
    except Exception as error:
        sys.exit(
            f"{sent['name']} cannot be loaded here: {type(error).__name__}: {error}. A module that it imports and that "
            "is not in the image goes along with code=DIR"
        )
    try:
        answer = function(*arguments)
    except Exception as error:
        _give(sent["word"], "error", rank, _pickled(cloudpickle, error))
        raise
    if rank == 0:
        data = _pickled(cloudpickle, answer)
        _give(sent["word"], "value" if isinstance(data, bytes) else "refused", rank, data)


def _pickled(cloudpickle: Any, answer: object) -> bytes | str:
    try:
        data: bytes = cloudpickle.dumps(answer)
    except Exception as error:
        return f"a {type(answer).__name__} cannot be pickled: {error}"
    if len(data) <= ANSWER_BYTES_MAX:
        return data
    return (
        f"a {type(answer).__name__} of {len(data) / 1e6:.1f} MB, and at most 1 MB comes back: save it, return its path"
    )


def _give(word: str, kind: str, rank: int, data: bytes | str) -> None:
    if isinstance(data, str) and kind == "error":
        return  # an exception that cannot be pickled is still in the log as text
    text = base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
    parts = [text[i : i + LINE_CHARACTERS] for i in range(0, len(text), LINE_CHARACTERS)]
    lines = [f"{word}:{kind}:{rank}:{i}/{len(parts)}:{part}\n".encode() for i, part in enumerate(parts)]
    sys.stdout.flush()
    try:
        out = os.open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "answer"), os.O_WRONLY | os.O_APPEND)
    except OSError:
        out = 1
    for line in lines:
        os.write(out, line)


if __name__ == "__main__":
    main()
