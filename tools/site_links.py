"""Hook of mkdocs: files outside docs/ to which pages link become part of the site, as text, so that all links work
without the repository and without the internet."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add linked files outside docs/ to the site, and for each linked folder a list of its files."""
    from mkdocs.structure.files import File

    for page in list(files.documentation_pages()):
        for link in _LINK.findall(Path(page.abs_src_path).read_text(encoding="utf-8")):
            name = _outside(page.src_uri, link)
            if name and files.get_file_from_path(_uri(name)) is None:
                path = ROOT / name
                text = "\n".join(sorted(p.name for p in path.iterdir())) if path.is_dir() else path.read_text("utf-8")
                files.append(File.generated(config, _uri(name), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the page's links so that they lead to these files in the site."""

    def moved(match: re.Match[str]) -> str:
        name = _outside(page.file.src_uri, match[1])
        return f"]({posixpath.relpath(_uri(name), posixpath.dirname(page.file.src_uri))})" if name else match[0]

    return _LINK.sub(moved, markdown)


def _outside(page: str, link: str) -> str:
    """Return the path of a linked file from the root of the repository; "" if it is a page of docs/."""
    name = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return "" if name.startswith("docs/") else name


def _uri(name: str) -> str:
    return f"source/{name}.txt"
