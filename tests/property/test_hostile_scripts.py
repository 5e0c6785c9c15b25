"""A tenant's shell script costs the operator a bounded amount of work, whatever it contains."""

import cProfile

import pytest

from ddpjob_operator.job.launch import exit_codes, shell

CALLS_MAX = 1_500_000
FILL = shell.SCRIPT_MAX - 100
PIECES = [
    "torchrun x.py; ", "python x.py; ", "torchrun x.py || ", "true;", "a=1;", "a& ", "$(a) ", "<(a) ", "`a` ", "'' ",
    "a[;", "eval a;", "[[ a ]];", "if [ $a ];then b;fi;", "cat <<E\nE\n", "a | ", "((", "$(", '"$(', "\\\n",
]  # fmt: skip
GROWING = {
    "arguments": "f(){ f $@ $@; }; f a",
    "a variable": "a=x; " + "export a=$a$a; " * 40,
    "a variable in one word": "a=xxxxxxxxxxxxxxxx; " + "export a=$a$a$a$a$a$a$a$a; " * 12,
    "calls": "f(){ g; g; }; g(){ h; h; }; h(){ f; f; }; f",
    "evaluated text": "f(){ eval \"f;f #$1\"; }; f a",
    "many names": ";".join(f"a{i}=1" for i in range(2500)),
}  # fmt: skip


def calls(script: str) -> int:
    """Return the number of function calls to follow a script: unlike seconds, it does not depend on the machine."""
    shell.read.cache_clear()
    profile = cProfile.Profile()
    profile.runcall(exit_codes.launcher_exits, ["sh", "-c", script])
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("piece", PIECES)
def test_a_script_of_many_commands_is_followed_up_to_a_limit(piece: str) -> None:
    """A script of many commands must be followed up to a limit: 3 kB of `torchrun x.py;` would take 12 s."""
    assert calls(piece * (FILL // len(piece))) < CALLS_MAX


@pytest.mark.parametrize("script", GROWING.values(), ids=GROWING)
def test_a_script_that_doubles_its_text_with_each_step_is_not_followed(script: str) -> None:
    """A script that doubles its text with each step, such as `f(){ f $@ $@; }; f a`, must not be followed."""
    assert calls(script) < CALLS_MAX
    assert exit_codes.launcher_exits(["sh", "-c", script]) == ()


def test_a_long_script_with_a_few_launchers_is_followed() -> None:
    script = "\n".join(f"echo 'step {i} of the preparation'; mkdir -p /data/{i}" for i in range(100))
    exits = exit_codes.launcher_exits(["bash", "-c", f"{script}\ntorchrun a.py\ntorchrun b.py | tee log"])
    assert [one.lost for one in exits] == ["next", "pipe"]
