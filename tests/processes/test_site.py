"""The documents as a site: read in a browser, from a server or from the disk."""

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import browser
import pytest


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return browser.site(tmp_path_factory.mktemp("site"))


class Site(http.server.ThreadingHTTPServer):
    """Serves the pages. answers: requested paths with their HTTP status codes."""

    def __init__(self, folder: Path) -> None:
        answers: dict[str, int] = {}

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_request(self, code: Any = "-", _size: Any = "-") -> None:
                answers[self.path] = int(code)

        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.answers = answers


@pytest.fixture
def server(site: Path) -> Iterator[Site]:
    with Site(site) as made:
        threading.Thread(target=made.serve_forever).start()
        yield made
        made.shutdown()


def test_all_links_of_all_pages_lead_to_files_of_the_site(site: Path) -> None:
    """All links must lead to files of the site, so that its pages work from the disk and without the internet."""
    wrong = set()
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r'(?:href|src)="([^"#?:]+)[#?"]', text):
            if page.name != "404.html" and not (page.parent / unquote(link)).is_file():
                wrong.add(f"{page.relative_to(site)}: {link}")
        # Without this setting the theme would load mermaid from another site.
        wrong |= {f"{page.relative_to(site)}: {one}" for one in re.findall(r'src="https?:[^"]*|class="mermaid', text)}
    assert wrong == set()


@pytest.mark.parametrize(
    ("page", "words", "loaded"),
    [
        ("index.html", "ddpjob run --nodes 2 train.py", "/pictures/run.svg"),
        ("tutorial.html", "import ddpjob", "/search/search_index.json"),
    ],
)
def test_a_browser_shows_a_page_with_its_pictures_and_the_search(server, tmp_path, page, words, loaded):
    shown = browser.drawn(f"http://127.0.0.1:{server.server_port}/{page}", tmp_path)
    assert words in re.sub(r"</?(?:span|a)\b[^>]*>", "", shown)
    assert server.answers.get(loaded) == 200
    assert {path: code for path, code in server.answers.items() if code >= 400} == {}
    assert 'data-md-component="search" role="dialog">' in shown, "hidden if its index cannot be loaded"
