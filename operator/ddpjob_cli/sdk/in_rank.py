"""The script of a job that was made from a function: it calls the function in each rank, and returns the result of rank
0. The result is written as lines with a secret prefix, to the file `answer` next to this script if it exists, else to
the log. cloudpickle is sent along, so the pod needs no installed package."""

from __future__ import annotations

import base64
import json
import os
import sys

ANSWER_BYTES_MAX = 1_000_000
LINE_CHARACTERS = 3000  # characters; a pipe writes up to 4096 bytes (PIPE_BUF) atomically, so lines of ranks do not mix


def main() -> None:
    """Call the function, and return its result. Its exception ends the rank, as in any script."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "ddpjob_function.json"), encoding="utf-8") as file:
        sent = json.load(file)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if sent["python"] != here:
        sys.exit(
            f"{sent['name']} was sent by Python {sent['python']}, but this image has Python {here}, which "
            f"cannot load it: use an image with Python {sent['python']}, or send a script"
        )
    import cloudpickle

    rank = int(os.environ.get("RANK", "0"))
    try:
        function, arguments = cloudpickle.loads(base64.b64decode(sent["function"]))
    except Exception as error:
        sys.exit(
            f"{sent['name']} cannot be loaded here: {type(error).__name__}: {error}. If it imports a module "
            "that is not in the image, send the module with code=DIR"
        )
    try:
        answer = function(*arguments)
    except Exception as error:
        _give(sent["word"], "error", rank, error)
        raise
    if rank == 0:
        _give(sent["word"], "value", rank, answer)


def _give(word: str, kind: str, rank: int, answer: object) -> None:
    import cloudpickle

    what, why = f"a {type(answer).__name__}", ""
    try:
        data: bytes = cloudpickle.dumps(answer)
        if len(data) > ANSWER_BYTES_MAX:
            why = f"{what} of {len(data) / 1e6:.1f} MB, but at most 1 MB can be returned: save it, and return the path"
    except Exception as error:
        why = f"{what}, which cannot be pickled: {error}"
    if why:
        if kind == "error":
            return  # an exception that cannot be pickled is still in the log as text
        kind, data = "refused", why.encode()
    text = base64.b64encode(data).decode()
    parts = [text[i : i + LINE_CHARACTERS] for i in range(0, len(text), LINE_CHARACTERS)]
    sys.stdout.flush()
    try:
        out = os.open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "answer"), os.O_WRONLY | os.O_APPEND)
    except OSError:
        out = 1
    for i, part in enumerate(parts):
        os.write(out, f"{word}:{kind}:{rank}:{i}/{len(parts)}:{part}\n".encode())


if __name__ == "__main__":
    main()
