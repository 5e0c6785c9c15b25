"""The HTML report of a run in a browser."""

from pathlib import Path

import browser
from report_pages import HOSTILE, Parsed, shown


def test_a_browser_shows_the_report_without_an_error(tmp_path: Path) -> None:
    """A browser must show the report: a valid page is blank if its security policy forbids its own style."""
    (tmp_path / "digits-1-0.log").touch()
    (tmp_path / "run.html").write_text(shown(tmp_path, HOSTILE))
    drawn = Parsed(browser.drawn((tmp_path / "run.html").as_uri(), tmp_path / "profile"))
    assert drawn.count("svg") == Parsed(shown(tmp_path)).count("svg")
    assert drawn.count("script") == 0
