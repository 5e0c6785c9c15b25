"""Cleans texts of programs and clients before they reach a status, an Event or a terminal, and masks credentials.

`shown` handles every text for people (plan/finish.py, the local run's screen), after all decoding: JSON turns
`\\u001b` into an escape character long after a log was cleaned. Credentials are masked because more people can read a
status than a log. Names, sentences and numbers stay readable: `password=***`, `max_tokens: 512`. All repetitions in the
patterns are bounded or consume their input, so the time is linear in the text (measured in a test).
"""

from __future__ import annotations

import functools
import re

from ddpjob_core.failures import abridged

MASK = "***"

_KEPT_LENGTH_MAX = 256
# Sequences that control a terminal: titles, links, clipboard (OSC and similar), colours, cursor (CSI), and others.
# Of an incomplete sequence only the beginning is removed: its end is unknown, and later lines must stay visible.
_ESCAPES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]{0,4096}(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,16}[@-~]"
    r"|\x1b[ -/]{1,4}[0-~]|\x1b[0-~]?"
)
_LINE_ENDS = re.compile(r"\r\n?|[\u2028\u2029]")
# Control characters, and characters that reorder or hide text (Unicode's bidirectional and format characters).
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]"
)

# Names with these endings do not belong to a secret: secretName, token_file, token_count.
_NOT = (
    r"(?![_-]?(?:names?|refs?|key_?refs?|types?|counts?|ids?|files?|paths?|dirs?|ur[li]|len(?:gth)?|limits?|size"
    r"|embeddings?|classification)"
    r"(?![a-z]))"
)
_KEYS = (
    r"(?:api|access|private|account|session|storage|shared[_-]?access|signing|encryption|master|auth|secret|service"
    r"|client|wandb)"
)
_STRONG = rf"(?:secret|credentials?|{_KEYS}[_-]?key){_NOT}"
# Training logs are full of tokens (`eos_token: end`), so these values are masked only if long or with a digit.
_WEAK = rf"(?:token(?![a-z])|signature|(?<![a-z])sig|(?<=[_-])pass(?![a-z])){_NOT}"
_NAMED = rf"(?:{_STRONG}|{_WEAK})"
_PASSWORD = rf"(?:passw(?:or)?d|passphrase|passcode|(?<=[_;-])pwd){_NOT}[\w-]{{0,20}}"
_REST_OF_NAME = r"[\w-]{0,40}[\"']?\s{0,3}"
_ANY = r"[^\s\"',;&()<>\[\]{}]{8,}"
_VALUE = rf"(?:(?=[^\s\"',;&]{{0,200}}[0-9]){_ANY}|[\w+/=.~-]{{16,}})"
_NUMBER = r"(?!torch\.|[-+]?[0-9][0-9.,:e+-]{0,30}(?![\w+/=~]))"
# Separators between an option and its value: on a command line, or in a Python list as in CalledProcessError.
_OPTION, _THEN = r"(?<![^\s\"'])--[\w-]{0,40}", r"(?:[\"'],)?\s{1,3}(?![\"']?--)"
_SCHEMES = r"(?:basic|bearer|oauth|digest|token|api-?key|key|negotiate|ntlm|splunk|aws4-hmac-sha256)"

# Each pattern comes with words. A text without any of them cannot match, so the pattern is skipped.
# Skipping saves about 0.1 us per character and pattern, and the time to compile it, 1 ms, in commands of `ddpjob`.
# A pattern without words is always tried, and case-sensitive.
_PATTERNS = (
    # A private key; the log may have cut off its beginning or its end.
    ("private key", r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(.*?)(?:-----END [A-Z ]{0,40}PRIVATE KEY|\Z)"),
    ("private key", r"\A((?:[A-Za-z0-9+/=]{1,100}[\n ])+)-----END [A-Z ]{0,40}PRIVATE KEY"),
    # https://user:password@host, up to the last @ because a password may contain @; https://token@host
    ("://", r"://[^\s/:@\"']{0,200}:(?!\d{1,5}/)((?:(?!://)[^\s\"'<>]){1,200})@"),
    # abfss://container@account does not match, because it is a path of data
    ("://", r"(?<!abfs)(?<!abfss)(?<!wasb)(?<!wasbs)://([^\s/:@]{20,})@"),
    ("authorization", rf"\bauthorization[\"']?\s{{0,3}}[:=]\s{{0,3}}[\"']?{_SCHEMES}\s{{1,3}}([^\s\"',;]+)"),
    ("authorization", rf"\bauthorization[\"']?\s{{0,3}}[:=]\s{{0,3}}[\"']?({_VALUE})"),
    ("bearer", rf"\bbearer\s{{1,3}}({_VALUE})"),
    ("cookie", r"\b(?:set-)?cookie[\"']?\s{0,3}[:=]\s{0,3}[\"']?([^\s\"'=;]{1,100}=[^\n\"']+)"),
    ("sess", r"(?:jsessionid|phpsessid|(?<![a-z])sessionid)\s{0,3}=\s{0,3}([^\s\"',;&]{8,})"),
    # password=x, "password": "x", --password x, login u password x: any value
    (
        "passw|passphrase|passcode|pwd",
        rf"{_PASSWORD}[\"']?\s{{0,3}}[:=]\s{{0,3}}(?:\"([^\"\n]+)\"|'([^'\n]+)'"
        r"|[\"']?([^\s\"',;&]+))",
    ),
    ("--", rf"{_OPTION}passw(?:or)?d{_THEN}(?:\"([^\"\n]+)\"|'([^'\n]+)'|([^\s-][^\s]*))"),
    ("login", r"\blogin\s{1,20}\S{1,100}\s{1,20}password\s{1,20}(\S+)"),
    ("-u", r"(?<!\S)(?:-u|--user)[\s=]{1,3}[^\s:]{1,100}:(\S+)"),
    # docker login -p x, mysql -px
    (
        "-p",
        r"\b(?:(?:docker|podman|nerdctl|registry|oras|skopeo|crane|az)\s{1,3}login|mysql\w{0,10}|mariadb\w{0,10})\b[^\n]{0,200}?\s-p\s{0,3}([^\s-][^\s]*)",
    ),
    ("sshpass", r"\bsshpass\s{1,3}-p\s{0,3}(\S+)"),
    ("wandb", r"\bwandb[\s.:]{1,3}(?:login|api|ai)[^\n]{0,40}?(?<![0-9a-f])([0-9a-f]{40})(?![0-9a-f])"),
    ("secret|credential|key", rf"{_STRONG}{_REST_OF_NAME}[:=]\s{{0,3}}[\"']?({_NUMBER}{_ANY})"),
    ("token|sig|pass", rf"{_WEAK}{_REST_OF_NAME}=\s{{0,3}}[\"']?({_NUMBER}{_ANY})"),
    ("token|sig|pass", rf"{_WEAK}{_REST_OF_NAME}[:=]\s{{0,3}}[\"']?({_NUMBER}{_VALUE})"),
    # kaggle.json, KAGGLE_KEY: a hexadecimal key; .npmrc, .docker/config.json: a login in base64
    ("key", r"(?<![a-z])key[\"']?\s{0,3}[:=]\s{0,3}[\"']?([0-9a-f]{32,64})(?![\w-])"),
    ("auth", rf"(?<![a-z])auth[\"']?\s{{0,3}}[:=]\s{{0,3}}[\"']?({_NUMBER}{_VALUE})"),
    ("--", rf"{_OPTION}{_NAMED}[\w-]{{0,20}}{_THEN}[\"']?({_NUMBER}{_VALUE})"),
    ("secret_access_key", rf"secret_access_key{_THEN}[\"']?({_VALUE})"),
    # Webhook addresses are credentials, because anybody who knows them can post.
    (
        "slack.com/|webhook|telegram.org/",
        r"(?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
        r"|webhook\.office\.com/webhookb2|api\.telegram\.org)/([^\s\"'<>]+)",
    ),
    # Tokens of clouds (AWS, Google, Azure, Alibaba, Tencent) and of code hosts (GitHub, GitLab, npm, PyPI, Docker).
    # Tokens for models: Hugging Face, OpenAI, Anthropic, W&B, NVIDIA, Replicate, Groq, Databricks.
    # Others: Slack, Stripe, SendGrid, Vault, Grafana, Shopify, DigitalOcean, Atlassian, Sentry, Telegram, age, JWT.
    # The characters after a token's prefix must match too, because a job may be named sk-finetune-bert-large.
    (
        "",
        r"(?<![A-Za-z0-9])((?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16,}|LTAI[A-Za-z0-9]{12,}|AKID[A-Za-z0-9]{13,}|AIza[\w-]{35,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"
        r"|\w{3}8Q~[\w.~-]{30,}|[A-Za-z0-9+/]{86}==|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
        r"|gl(?:pat|oas|dt|rtr?|cbt|ptt|ft|imt|agent|wt|soat|ffct)-[\w-]{16,}"
        r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dckr_[a-z]{3}_[\w-]{20,}|(?:hf|api_org)_[A-Za-z0-9]{20,}"
        r"|sk-(?:proj|ant|svcacct|admin|or|lf)-[\w-]{20,}|sk-(?=[\w-]{0,200}[A-Z])[\w-]{20,}|sk-[a-z0-9]{20,}"
        r"|wandb_v1_\w{20,}|nvapi-[\w-]{20,}|r8_[A-Za-z0-9]{30,}|(?:gsk|pplx|xai)[_-][A-Za-z0-9]{30,}|dapi[0-9a-f]{32}"
        r"|xox[a-z]-[\w-]{10,}|xapp-\d-[\w-]{10,}|(?:sk|rk)_(?:live|test)_\w{16,}|whsec_[\w+/=]{20,}"
        r"|SG\.[\w-]{16,}\.[\w-]{16,}|hv[sbr]\.[\w-]{20,}|gl(?:sa|c)_[\w=]{20,}|shp(?:at|ss|ca|pa)_[0-9a-fA-F]{32}"
        r"|do[opr]_v1_[0-9a-f]{40,}|AT[AC]TT3[\w=-]{20,}|sntry[su]_[\w+/=-]{20,}|\d{8,10}:AA[\w-]{30,}"
        r"|AGE-SECRET-KEY-1[0-9A-Z]{20,}|eyJ[\w-]{8,200}\.[\w.-]{8,})",
    ),
)
_SPLIT = tuple((words.split("|"), pattern, not words) for words, pattern in _PATTERNS)


# Splits the name of a metric into words: apiToken, api.token and "API token" become api_token.
_BETWEEN_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
# Metrics whose names match the first pattern are always masked. The second pattern masks a value unless it is a number.
_SECRET = rf"{_PASSWORD}|(?:{_STRONG}|{_KEYS}[_-]?token|authorization|bearer|cookie)_?$"
_PERHAPS_SECRET = rf"{_STRONG}|{_WEAK}_?$"
_PLAIN_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9.,]{0,30}(?:e[-+]?[0-9]{1,4})?|nan|inf)\s?%?", re.IGNORECASE)


# number of passes, because masking a credential may reveal another one before it: https://https://://a:b@
_PASSES_MAX = 20


def clean(text: str) -> str:
    """Remove terminal sequences, characters that reorder or hide text, and invalid Unicode."""
    text = _LINE_ENDS.sub("\n", _ESCAPES.sub("", text))
    return _CONTROL.sub("", text).encode("utf-8", "replace").decode()


def mask(text: str) -> str:
    """Replace everything that looks like a credential by ***. mask(mask(x)) == mask(x)."""
    for _ in range(_PASSES_MAX):
        before, text = text, _masked_once(text)
        if text == before:
            break  # most texts have no credential, so the first pass is the last
    return text


def _masked_once(text: str) -> str:
    lower = text.lower()
    for words, pattern, case_sensitive in _SPLIT:
        if any(word in lower for word in words):
            text = _compiled(pattern, case_sensitive).sub(_masked, text)
    return text


@functools.cache
def _compiled(pattern: str, case_sensitive: bool = False) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL | (0 if case_sensitive else re.IGNORECASE))


def shown(text: str, length: int) -> str:
    """Return a text as one line, because a second line could look like the operator's own. Idempotent."""
    # Cached: each message goes into a status, its conditions, an event and the log, and most are equal.
    return _kept(text, length) if len(text) <= _KEPT_LENGTH_MAX else _shown(text, length)


def shown_pair(name: str, value: str, length: int) -> tuple[str, str]:
    """Return name and value of a metric, each as `shown`. The value is masked if the name says that it is a
    credential, or if name and value together look like one. shown_pair(*shown_pair(x, y)) == shown_pair(x, y)."""
    name, value = shown(name, length), shown(value, length)
    words = "_" + _BETWEEN_WORDS.sub("_", name)
    both = f"{name}={value}"
    is_secret = (
        _compiled(_SECRET).search(words) is not None
        or (_compiled(_PERHAPS_SECRET).search(words) is not None and _PLAIN_NUMBER.fullmatch(value) is None)
        or mask(both) != both
    )
    return name, MASK if is_secret else value


def _shown(text: str, length: int) -> str:
    lines = (line.strip() for line in clean(text).replace("\t", " ").split("\n"))
    whole = mask(" ".join(line for line in lines if line))
    text = abridged(whole, length)
    # If the abridged text looks like a secret, return only its beginning: a second call of `shown` would mask it.
    return text if len(whole) <= length or mask(text) == text else whole[:length].rstrip()


_kept = functools.lru_cache(maxsize=1024)(_shown)


def _masked(match: re.Match[str]) -> str:
    start, end = match.span(match.lastindex or 0)
    whole, offset = match[0], match.start()
    return whole[: start - offset] + MASK + whole[end - offset :]
