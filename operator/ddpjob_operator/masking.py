"""What looks like a credential is masked in what a user's program printed: a status is read by more people than a log.

Names and sentences stay readable, numbers too: `password=***`, `max_tokens: 512`. Every repetition in the patterns is
bounded or runs over what it consumes, so the time is linear in the text (a test has the times).
"""

from __future__ import annotations

import re

MASK = "***"

_NAMED = r"(?:passw(?:or)?d|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|token(?![a-z])|signature)"
_REST_OF_NAME = r"[\w-]{0,40}[\"']?\s{0,3}"
# Logs of training are full of tokens, and `eos_token: end` is no secret: what is masked there is long or has a digit.
_VALUE = r"(?:(?=[^\s\"',;&]{0,200}[0-9])[^\s\"',;&()<>\[\]{}]{8,}|[\w+/=.~-]{24,})"
_NUMBER = r"(?![-+]?[0-9][0-9.,:e+-]{0,30}(?![\w+/=~]))"

_PATTERNS = (
    # A private key, also where its head or its end is cut off.
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?P<key>.*?)(?:-----END [A-Z ]{0,40}PRIVATE KEY|\Z)",
    r"\A(?P<cut>(?:[A-Za-z0-9+/=]{1,100}\n)+)-----END [A-Z ]{0,40}PRIVATE KEY",
    # https://user:password@host, https://token@host
    r"://[^\s/:@]*:(?P<login>[^\s/@]+)@",
    r"://(?P<user>[^\s/:@]{20,})@",
    r"\bauthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:basic|bearer|digest|token)\s{1,3}(?P<header>[^\s\"',;]+)",
    rf"\bbearer\s{{1,3}}(?P<bearer>{_VALUE})",
    # password=x, "password": "x", --password x: whatever it is
    r"(?:passw(?:or)?d|passphrase)[\"']?\s{0,3}[:=]\s{0,3}(?:\"(?P<double>[^\"\n]+)\"|'(?P<single>[^'\n]+)'"
    r"|[\"']?(?P<plain>[^\s\"',;&]+))",
    rf"{_NAMED}{_REST_OF_NAME}[:=]\s{{0,3}}[\"']?(?P<value>{_NUMBER}{_VALUE})",
    rf"(?<!\S)--[\w-]{{0,40}}{_NAMED}[\w-]{{0,20}}\s{{1,3}}(?P<option>{_NUMBER}{_VALUE})",
    # Tokens known by their looks: AWS, GitHub, GitLab, Hugging Face, OpenAI, Slack, Google, JWT.
    r"(?<![A-Za-z0-9])(?P<shape>(?:AKIA|ASIA)[0-9A-Z]{16,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{35,}"
    r"|eyJ[\w-]{8,200}\.[\w.-]{8,})",
)
_COMPILED = tuple(re.compile(p, re.DOTALL | (0 if "?P<shape>" in p else re.IGNORECASE)) for p in _PATTERNS)


def mask(text: str) -> str:
    """The text with *** in the place of what looks like a credential. mask(mask(x)) == mask(x)."""
    for pattern in _COMPILED:
        text = pattern.sub(_masked, text)
    return text


def _masked(match: re.Match[str]) -> str:
    start, end = match.span(match.lastgroup or 0)
    whole, offset = match[0], match.start()
    return whole[: start - offset] + MASK + whole[end - offset :]
