"""Arguments of a script in a command line of torchrun, whose parser may take them for its own options.

argparse matches every word that begins with -- with the options, also those behind the script. One that abbreviates
several options ends torchrun with `ambiguous option`, unless its Python is new enough (3.12.8, 3.13.1: gh-58573).
What follows `--` is never matched, and torchrun and ddprun take away the `--` that follows the script.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from ddpjob_operator.job import launcher

_OF_DDPRUN = {"preload", "no_preload"}
_OF_LAUNCH = {"use_env"}


def behind_script(arguments: Sequence[str]) -> list[str]:
    """Return the words that follow the script, so that it gets exactly these arguments: with `--` first if needed.

    An abbreviation of a single option gets `--` as well, because another version of torch may have a second one.
    """
    is_taken = list(arguments[:1]) == ["--"] or any(_matches(word, "torchrun") for word in _before_dashes(arguments))
    return [*(["--"] if is_taken else []), *arguments]


def abbreviations(arguments: Sequence[str], by: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (argument, options) for each that abbreviates several options of the launcher `by`, which is an error."""
    for word in _before_dashes(arguments):
        matches = _matches(word, by)
        if len(matches) > 1:
            yield word.partition("=")[0], list(dict.fromkeys(match.replace("_", "-") for match in matches))


def _before_dashes(arguments: Sequence[str]) -> Iterator[str]:
    return takewhile(lambda word: word != "--", arguments)


def _matches(word: str, by: str) -> list[str]:
    """Return the options that a word abbreviates, in both spellings; none if the option is written out."""
    prefix = word.partition("=")[0]
    other = _OF_DDPRUN if by.endswith("launch") else _OF_DDPRUN | _OF_LAUNCH
    names = [name for name in launcher.OPTIONS if name not in other]
    spellings = dict.fromkeys(f"--{name}" for one in names for name in (one.replace("_", "-"), one))
    if len(prefix) < 3 or not prefix.startswith("--") or prefix in spellings:
        return []
    return [spelling for spelling in spellings if spelling.startswith(prefix)]
