"""Draw the pictures of docs/pictures from a real run: `make pictures`. Needs tmux, which emulates the terminal.

One run of examples/digits.yaml with a rank killed in the middle: the live table before the kill, and the restart.
`--check` draws nothing, and fails if a picture's lines differ from the run's in more than numbers.
"""

from __future__ import annotations

import html
import io
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 100, 24
LIMIT_SECONDS = 400.0
COMMAND = "ddpjob run examples/digits.yaml --fail rank=1,step=520,signal=KILL"
_NORMAL = [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255)]
_NORMAL += [(57, 197, 207), (177, 186, 196)]
_BRIGHT = [(110, 118, 129), (255, 161, 152), (86, 211, 100), (227, 179, 65), (121, 192, 255), (210, 168, 255)]
_BRIGHT += [(86, 212, 221), (255, 255, 255)]
# A dark window, which is readable on light and dark pages. Only the reader's own fonts are used: no web fonts.
THEME = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    _NORMAL,
    _BRIGHT,
)


def tmux(*words: str) -> str:
    """Run a tmux command on a separate server and return its output."""
    done = subprocess.run(["tmux", "-L", "ddpjob-pictures", *words], capture_output=True, text=True, check=True)
    return done.stdout


def wait_for(wanted: Callable[[str], bool]) -> str:
    """Wait until the screen's text is `wanted`, and return the screen with its colors. Exits after LIMIT_SECONDS."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        if wanted(tmux("capture-pane", "-p")):
            return tmux("capture-pane", "-p", "-e", "-J")
        time.sleep(0.2)
    sys.exit("the run never came so far; its last screen:\n" + tmux("capture-pane", "-p"))


def step_of(screen: str) -> int:
    """Return the step in the table; 0 if there is none."""
    found = re.search(r"^Running +step (\d+)/", screen, re.MULTILINE)
    return int(found[1]) if found else 0


def lines_of(text: str) -> list[str]:
    """Return the screen's lines without parts that differ between runs: numbers, bars, the curve, the pace's trend."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"(# [a-z]+?)s?\b", r"\1s", re.sub(r"\d[\d.,]*", "#", text))  # 1 line, 2 lines
    text = re.sub(r", # % (slower|faster)|(#h)?(#m)?(#s)? left|elapsed \S+|pids? #( #)*|# [MG]B", "", text)
    lines = (" ".join(re.sub(r"[━─▁-█]+", "", line).split()) for line in text.splitlines())
    return [line for line in lines if line]


def text_of(picture: str) -> str:
    """Return the text of the screen in a picture."""
    rows: dict[float, str] = {}
    for y, text in re.findall(r'<text class="\S+-r\d+" x="[\d.]+" y="([\d.]+)"[^>]*>(.*?)</text>', picture):
        rows[float(y)] = rows.get(float(y), "") + html.unescape(text).replace("\xa0", " ")
    return "\n".join(rows[y] for y in sorted(rows))


def compare(name: str, screen: str) -> None:
    """Exit with the lines that differ between picture and screen. Pictures wrap long lines, so compare by substring."""
    old, new = lines_of(text_of((PICTURES / name).read_text(encoding="utf-8"))), lines_of(screen)
    gone = [f"- {line}" for line in old if line not in " ".join(new)]
    added = [f"+ {line}" for line in new if line not in " ".join(old)]
    if gone or added:
        sys.exit("\n".join([f"{name} is not what a run shows: make pictures", *gone, *added]))


def draw(name: str, title: str, screen: str) -> None:
    """Write one picture."""
    if "--check" in sys.argv:
        compare(name, screen)
        return
    text = screen.strip("\n")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title=title, theme=THEME)
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono").replace(
        "<svg ", f'<svg role="img" aria-label="{title}" ', 1
    )
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / name).write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def main() -> None:
    """Run the job in a terminal of tmux, and draw two of its screens."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the run may still be writing
        state = f"XDG_STATE_HOME={shlex.quote(folder)}"
        shell = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH {state} {COMMAND}; sleep 600"
        size = ["-x", str(WIDTH), "-y", str(HEIGHT)]
        tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(ROOT), "sh -c " + shlex.quote(shell))
        try:
            draw("run.svg", "ddpjob run examples/digits.yaml", wait_for(lambda screen: 350 < step_of(screen) < 515))
            draw("restart.svg", COMMAND, wait_for(lambda screen: "✖" in screen and step_of(screen) > 560))
        finally:
            tmux("kill-server")


if __name__ == "__main__":
    main()
