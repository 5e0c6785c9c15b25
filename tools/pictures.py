"""Take the pictures of docs/pictures from real runs: `make pictures`. Needs tmux, which draws the terminal.

One run of examples/digits.yaml with a rank killed in the middle: the live table before the kill, and the restart.
"""

from __future__ import annotations

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
KEPT = "spec.template.spec.volumes[0]={name: snapshots, hostPath: {path: %s, type: DirectoryOrCreate}}"
_NORMAL = [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255)]
_NORMAL += [(57, 197, 207), (177, 186, 196)]
_BRIGHT = [(110, 118, 129), (255, 161, 152), (86, 211, 100), (227, 179, 65), (121, 192, 255), (210, 168, 255)]
_BRIGHT += [(86, 212, 221), (255, 255, 255)]
# A dark window, readable on a light page and on a dark one. Fonts that the reader has: nothing is loaded.
THEME = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    _NORMAL,
    _BRIGHT,
)


def tmux(*words: str) -> str:
    """What a tmux command of a server of our own prints."""
    done = subprocess.run(["tmux", "-L", "ddpjob-pictures", *words], capture_output=True, text=True, check=True)
    return done.stdout


def wait_for(wanted: Callable[[str], bool]) -> str:
    """The screen, with its colors, as soon as it shows what is wanted. Exits where it never does."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        if wanted(tmux("capture-pane", "-p")):
            return tmux("capture-pane", "-p", "-e", "-J")
        time.sleep(0.2)
    sys.exit("the run never came so far; its last screen:\n" + tmux("capture-pane", "-p"))


def step_of(screen: str) -> int:
    """The step of the table, 0 while there is none."""
    found = re.search(r"^Running +step (\d+)/", screen, re.MULTILINE)
    return int(found[1]) if found else 0


def draw(name: str, title: str, screen: str) -> None:
    """Write one picture. The names of this machine's folders are left out."""
    text = re.sub(r"/\S*/ddpjob/digits/[0-9a-f-]+/", "~/.local/state/ddpjob/digits/…/", screen).strip("\n")
    text = re.sub(r"/\S*/snapshots\b", "/snapshots", text)
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
    with tempfile.TemporaryDirectory() as folder:
        keep = ["--set", KEPT % f"{folder}/snapshots", "--logs", f"{folder}/ddpjob"]
        shell = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH {COMMAND} {shlex.join(keep)}; sleep 600"
        size = ["-x", str(WIDTH), "-y", str(HEIGHT)]
        tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(ROOT), "sh -c " + shlex.quote(shell))
        try:
            draw("run.svg", "ddpjob run examples/digits.yaml", wait_for(lambda screen: 350 < step_of(screen) < 515))
            draw("restart.svg", f"{COMMAND} --set …", wait_for(lambda screen: "✖" in screen and step_of(screen) > 560))
        finally:
            tmux("kill-server")


if __name__ == "__main__":
    main()
