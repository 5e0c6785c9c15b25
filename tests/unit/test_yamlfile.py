"""The reader of YAML files ends within a second for any file, and names a mistake with its line."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpjob_cli.manifest import override, yamlbounds, yamlfile
from ddpjob_operator.job import validation

GOOD = """apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata:
  name: digits
spec:
  nodes: 2
  template:
    spec:
      containers:
      - name: trainer
        image: pytorch
        command: [torchrun, train.py]
"""


def said(path: Path, content: str | bytes) -> str:
    """Return the message that a user reads; "" if the file is valid."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    try:
        document = yamlfile.read_job(str(path))
        problems = validation.parse(document.data)[1]
    except yamlfile.InputError as error:
        return str(error).replace(str(path), "job.yaml")
    return str(document.error(problems)).replace(str(path), "job.yaml") if problems else ""


def bomb(levels: int, width: int = 10) -> str:
    lines = ["a0: &a0 x"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a: 1\n? [a, b]\n: 1\n", "job.yaml:2: a list cannot be a key; a key must be text"),
        ("a: 1\n? {a: b}\n: 1\n", "job.yaml:2: a mapping cannot be a key; a key must be text"),
        ("a:\n- {? {} : 1}\n", "job.yaml:2: a mapping cannot be a key; a key must be text"),
        ("x: &x [1]\n? *x\n: 1\n", "job.yaml:1: a list cannot be a key; a key must be text"),
        (bomb(6), "job.yaml:6: more than 20,000 keys, values and items, with aliases expanded"),
        (bomb(60), "job.yaml:6: more than 20,000 keys"),
        (bomb(3, 200), "job.yaml:3: more than 20,000 keys"),
        ("a: &a {k: v}\nb: &b {<<: [" + "*a, " * 30_000 + "]}\n", "job.yaml:2: more than 20,000 keys"),
        ("a:\n  b: &x {c: *x}\n", "job.yaml:2: an alias that contains itself"),
        ("a: 1\nb: *nowhere\n", "job.yaml:2: not valid YAML: found undefined alias"),
        ("a:\n" + "- 1\n" * 700_000, "job.yaml:19998: more than 20,000 keys"),
        ("a: [" + "1," * 1_500_000 + "]\n", "job.yaml:1: more than 20,000 keys"),
        ("a: {" + ",".join(f"k{i}: v" for i in range(30_000)) + "}\n", "job.yaml:1: more than 20,000 keys"),
        ("---\n" * 300_000, "job.yaml:10001: more than 20,000 keys"),
        ("a: 1\n" + "#\n" * 5_000_000, "job.yaml:2097152: more than 4 MiB: too large for a file of jobs"),
        ("a: " + "[" * 100_000, "job.yaml:1: more than 100 levels of lists and mappings"),
        ("a: " + "{a: " * 10_000, "job.yaml:1: more than 100 levels"),
        ("".join(f"{' ' * i}a:\n" for i in range(200)), "job.yaml:101: more than 100 levels"),
        ("a: " + "- " * 5000, "job.yaml:1: not valid YAML"),
        ("? " * 5000, "job.yaml:1: more than 100 levels"),
        ("a: 1\nb: " + "9" * 5000 + "\n", "job.yaml:2: " + "9" * 60 + "… is not a number that JSON has"),
        ("a: 1\nb: !!int 0b_\n", "job.yaml:2: 0b_ is not a number"),
        ("a: 1\nb: .inf\n", "job.yaml:2: .inf is not a number"),
        ("a: 1\nb: .nan\n", "job.yaml:2: .nan is not a number"),
        ("a: 1\nb: !!int x\n", "job.yaml:2: x is not a number"),
        ("a: 1\nb: 1e999\n", "job.yaml:2: 1e999 is not a number that JSON has"),
        ("a: 1\nb: !!int ''\n", "job.yaml:2: an empty text is not a number that JSON has"),
        ("a: 1\nb: !!float '-'\n", "job.yaml:2: - is not a number that JSON has"),
        ("a: 1\nb: !!bool maybe\n", "job.yaml:2: not valid YAML: maybe is not true or false"),
        ('a: 1\n"x\\0y": 1\n', "job.yaml:2: a text with a NUL character"),
        ("a: 1\nb: !!set {a}\n", "job.yaml:2: not valid YAML: could not determine a constructor"),
        ("a: 1\nb: !!binary aGk=\n", "job.yaml:2: not valid YAML: could not determine a constructor"),
        ("a: 1\nb: !!python/object:os.system x\n", "job.yaml:2: not valid YAML: could not determine a constructor"),
        ("a: 1\n1: x\n'1': y\n", "job.yaml:3: 1 is given twice, first in line 2; remove one"),
        (
            "a: 1\n" + "k" * 90 + ": x\n" + "k" * 90 + ": y\n",
            f"job.yaml:3: {'k' * 60}… is given twice, first in line 2; remove one",
        ),
        ("a:\n  b: {c: 1, 'c': 2}\n", "job.yaml:2: c is given twice, first in line 2; remove one"),
        ('a: 1\nb: "x\\0y"\n', "job.yaml:2: a text with a NUL character"),
        ("a: 1\nb: \0\n", "job.yaml:2: not valid YAML: the control character U+0000"),
        ("a: 1\nb: \x1b[2J\n", "job.yaml:2: not valid YAML: the control character U+001B"),
        ('a: 1\nb: "\\ud800"\n', "job.yaml:2: not valid YAML"),
        (b"a: 1\nb: \xff\n", "job.yaml:2: byte 8 is not UTF-8, so not valid YAML"),
        ("a: 1\nb: \ud800\n", "job.yaml:2: byte 8 is not UTF-8"),
        (GOOD.encode("utf-16"), "job.yaml:1: byte 0 is not UTF-8"),
        (GOOD.replace("nodes: 2", "nodes: " + "x" * 100_000), "job.yaml:6: spec.nodes: must be a whole number"),
        (GOOD.replace("  nodes: 2", "  nodes: 2\n  " + "x" * 900 + ": 1"), "job.yaml:7: spec.xxx"),
    ],
)
def test_a_file_that_is_too_large_or_no_json_is_refused_within_a_second(tmp_path, content, sentence):
    """A large or invalid file must give an error in a sentence within a second, not a traceback of PyYAML."""
    began = time.process_time()
    assert sentence in said(tmp_path / "job.yaml", content)
    assert time.process_time() - began < 1


def test_many_mistakes_are_counted_and_not_all_shown(tmp_path: Path) -> None:
    """A file with 3000 mistakes must show only some of them and the total, or the first lines would scroll away."""
    job = GOOD.replace("[torchrun, train.py]", "[torchrun]\n" + "      - 7\n" * 3000)
    lines = said(tmp_path / "job.yaml", job).splitlines()
    assert len(lines) <= yamlfile.PROBLEMS_MAX + 1
    assert re.fullmatch(r"job.yaml: and \d+ more", lines[-1])


def test_keys_and_dates_are_texts_as_in_kubectl(tmp_path: Path) -> None:
    """Keys and dates must be read as texts, as in kubectl: `labels: {1: x}` works on a cluster."""
    path = tmp_path / "any.yaml"
    path.write_text(
        "kind: DDPJob\n1: x\ntrue: u\nnull: z\na: 2024-01-31\nb: 2024-99-99\n? &k c\n: 2001-12-14 21:59:43.10 -5\n"
    )
    (document,) = yamlfile.read(str(path))
    assert document.data == {
        "kind": "DDPJob",
        "1": "x",
        "true": "u",
        "null": "z",
        "a": "2024-01-31",
        "b": "2024-99-99",
        "c": "2001-12-14 21:59:43.10 -5",
    }


def test_plain_words_and_numbers_are_read_as_in_kubectl(tmp_path: Path) -> None:
    """Words and numbers must be read as in kubectl: `--time 1:30:00` is text, and `args: [--lr, 1e-4]` is refused."""
    path = tmp_path / "any.yaml"
    rows: dict[str, Any] = {}
    rows |= {"1e-4": 0.0001, "1e3": 1000, "2.0": 2, "+12e03": 12000, ".5": 0.5, "1.": 1, "08": 8, "-1.5": -1.5}
    rows |= {"1_000": 1000, "017": 15, "0o17": 15, "0b11": 3, "-0x1F": -31, "0": 0, "00": 0, "-0": 0, "1e22": 1e22}
    rows |= {"1:30:00": "1:30:00", "29500:29501": "29500:29501", "190:20:30.15": "190:20:30.15", "1.2.3": "1.2.3"}
    rows |= {"y": True, "N": False, "yes": True, "Off": False, "TRUE": True, "yEs": "yEs", "tRue": "tRue"}
    rows |= {"~": None, "": None, "NULL": None, "nULL": "nULL", "=": "=", "<<": "<<", "_1": "_1", "1e": "1e"}
    rows |= {"'1e-4'": "1e-4", '"y"': "y", "!!str 5": "5", "!!float 5": 5, "!!int '7'": 7, "!!bool 'no'": False}
    for text, value in rows.items():
        path.write_text(f"a: {text}\n")
        (document,) = yamlfile.read(str(path))
        assert repr(document.data["a"]) == repr(value), text


def test_an_anchored_value_used_as_a_key_elsewhere_keeps_its_type(tmp_path: Path) -> None:
    """With `nodes: &n 2` and `*n : x`, nodes must stay a number and the key must be a text."""
    path = tmp_path / "any.yaml"
    path.write_text("a: &n 2\n*n : x\nb: &t true\n*t : u\n? &k 5\n: z\nc: *k\n")
    (document,) = yamlfile.read(str(path))
    assert document.data == {"a": 2, "2": "x", "b": True, "true": "u", "5": "z", "c": 5}


def test_a_file_with_ordinary_aliases_and_merges_is_read(tmp_path: Path) -> None:
    """A file with ordinary aliases must be read, although the number of expanded aliases is limited."""
    path = tmp_path / "job.yaml"
    path.write_text(
        GOOD + "        env: &e\n        - {name: A, value: x}\n      - {name: b, <<: {image: p}, env: *e}\n"
    )
    document = yamlfile.read_job(str(path))
    assert document.data["spec"]["template"]["spec"]["containers"][1]["env"] == [{"name": "A", "value": "x"}]


@pytest.mark.parametrize(
    "setting",
    [
        "spec.nodes=0b_",
        "spec.nodes=" + "9" * 5000,
        "spec.x=" + "[" * 5000,
        "spec.x=? [a, b]",
        "spec.x={? [a, b] : 1}",
        "spec.x={a: &a [1], b: [" + "*a," * 30_000 + "]}",
        "spec.x=\x1b[2J",
        'spec.x="\\0"',
        "spec.x=2024-99-99",
        "spec.template.spec.containers[" + "9" * 5000 + "].image=x",
        "spec" + ".a" * 50_000 + "=1",
    ],
    ids=lambda s: s[:24].encode("unicode_escape").decode(),
)
def test_a_value_of_set_has_the_same_limits_as_a_file(tmp_path: Path, setting: str) -> None:
    """A value of --set must give an error in a sentence, not a traceback of PyYAML or an endless wait."""
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    document = yamlfile.read_job(str(path))
    began = time.process_time()
    words = ""
    try:
        override.set_field(document, setting, f"--set {setting}")
    except yamlfile.InputError as error:
        words = str(error)
    assert words.startswith("--set ") or validation.parse(document.data)[1], setting[:60]
    assert time.process_time() - began < 1


def test_an_impossible_file_name_is_reported(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 5000, str(tmp_path)):
        with pytest.raises(yamlfile.InputError):
            yamlfile.read_job(name)


PIECES = st.sampled_from(
    """a|b: |- |? |: |N|  |[|]|{|}|, |&x |*x|<<: |!!set |!t |'|"|\\|\\0|\\ud800|---N|...N|%YAML 1.1N|#|T|Z|é|0x|0b_
    |1e999|.nan|2024-99-99|=|~|kind: DDPJobN|spec: |template: |containers: |name: |99999999999999999999""".replace(
        "N", "\n"
    )
    .replace("T", "\t")
    .replace("Z", "\0")
    .split("|")
)


@settings(max_examples=400, deadline=None)
@example("kind: DDPJob\n---\nkind: DDPJob\n")
@given(st.one_of(st.lists(PIECES, max_size=30).map("".join), st.text(max_size=60), st.binary(max_size=60)))
def test_any_text_is_read_or_refused_in_one_sentence_with_its_line(tmp_path_factory, content):
    sentence = said(tmp_path_factory.getbasetemp() / "job.yaml", content)
    assert re.match(r"job\.yaml:\d+: \S", sentence), sentence


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, 12), PIECES)
def test_a_good_file_with_a_mistake_anywhere_is_read_or_refused_with_a_line(tmp_path_factory, at, cut, piece):
    """A file with one typo must be read, or refused with a line number, but never cause a traceback."""
    sentence = said(tmp_path_factory.getbasetemp() / "job.yaml", GOOD[:at] + piece + GOOD[at + cut :])
    assert sentence == "" or re.match(r"job\.yaml:\d+: \S", sentence), sentence


def rows(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + rows(v) for v in value.values())
    return 1 + sum(map(rows, value)) if isinstance(value, list) else 1


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.just("x"), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab"), inner)))
def test_the_limit_counts_the_nodes_that_are_built(value: Any) -> None:
    """The limit must count the nodes that PyYAML builds. Another count admits a YAML bomb, or refuses a sound job."""
    import yaml

    reader = yamlbounds._BoundedReader()
    for event in yaml.parse(yaml.safe_dump(value)):
        reader.read(event)
    assert reader.nodes == 1 + rows(value)


def test_the_jobs_of_a_list_are_read_like_those_of_a_file(tmp_path: Path) -> None:
    """The jobs of a List must be read, as in `kubectl get ddpjobs -o yaml | ddpjob check -`."""
    item = "".join(f"  {line}\n" for line in GOOD.splitlines()).replace("  api", "- api", 1)
    path = tmp_path / "job.yaml"
    path.write_text(f"kind: List\napiVersion: v1\nitems:\n{item}{item.replace('digits', 'other')}")
    assert "2 DDPJobs: digits (line 4), other (line 16)" in said(tmp_path / "job.yaml", path.read_bytes())
    document = yamlfile.read_job(str(path), "other")
    assert (document.name, document.line(("spec", "nodes"))) == ("other", 21)
    assert said(path, "kind: List\nitems: []\n") == "job.yaml:1: the file has no DDPJob: it is empty"
    assert 'kind: must be DDPJob, is "List"' in said(path, "kind: List\nitems: {a: b}\n")
