"""Pack a folder of code for a ConfigMap. Equal files give equal bytes, and sizes are checked before reading."""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob import own_files
from ddpjob_cli.client.gitignore import FOLDERS_DEEP_MAX, Ignored
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import wording

PACKED_BYTES_MAX = 900_000  # a ConfigMap holds 1 MiB
FIT = "at most 900 kB packed fit into a ConfigMap"
READ_BYTES_MAX = 20 << 20  # limit of bytes to read; more would never fit: text is compressed to a fifth of its size
FILES_MAX = 5000
HELP = "docs/your-code.md has three other ways: an image of your own, a volume (PVC), git"

# Folders that are never part of a program: caches, environments, repositories.
_IGNORED_FOLDERS = frozenset(
    ".git .hg .svn __pycache__ .venv node_modules .mypy_cache .pytest_cache .ruff_cache .ipynb_checkpoints .tox .nox "
    ".idea .vscode .eggs".split()
)
_IGNORED_FILES = ("*.pyc", "*.pyo", ".DS_Store", "*.swp")
# Leave out secrets, because anybody who may read the namespace's ConfigMaps could read the secrets.
_SECRET_FOLDERS = frozenset([".ssh", ".aws", ".kube", ".gnupg", ".azure", ".docker"])
_SECRET_FILES = (
    ".env .env.* *.env *.pem *.key *.p12 *.pfx *.jks *.keytab *.kubeconfig kubeconfig kubeconfig.* id_rsa id_rsa.* "
    "id_dsa id_ecdsa id_ed25519 .netrc .pypirc .npmrc .git-credentials .htpasswd credentials.json client_secret*.json "
    "service-account*.json service_account*.json secrets.yaml secrets.yml secrets.json secrets.toml"
).split()
# A file that `ddpjob.Snapshot` writes. Its folder is not packed, or the job would resume this machine's training.
_SNAPSHOT_FILE = "writer-*.json"
_KEY_BEGINS = (b"-----BEGIN ", b"PRIVATE KEY")
Contents = dict[str, tuple[bytes, bool]]  # path → data, and whether it is executable


@dataclass
class Folder:
    """The content of a folder: paths with their sizes, and the paths that are left out, each with the reason."""

    root: Path
    files: dict[str, int] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic links within the folder: path and target, both relative."""
    secrets: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    """Symbolic links that are not sent: they lead out of the folder, form a cycle, or are broken."""
    snapshots: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class Archive:
    data: bytes
    files: int
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{wording.count(self.files, 'file')} ({_size(len(self.data))})"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()[:16]


def pack(root: Path, made: Mapping[str, str] | None = None, without: str = "") -> Archive:
    """Return the archive of a folder. Raise InputError. made: added files: path → text. without: a path to skip."""
    folder, contents = read(root, without)
    contents |= _of_texts(made or {})
    if not contents and not folder.links:
        raise InputError(f"{root}: contains no file to pack")
    data = _tar(contents, folder)
    if len(data) > PACKED_BYTES_MAX:
        folder.files |= {without or path: len(text) for path, text in (made or {}).items()}
        raise InputError(f"{root}: {_size(len(data))} packed, and {FIT}. {_largest(folder)}")
    return Archive(data, len(contents) + len(folder.links), tuple(_remarks(folder)))


def read(root: Path, without: str = "") -> tuple[Folder, Contents]:
    """Read the files of a program. Raise InputError if they are too many or too large, or cannot be read."""
    folder = scan(root)
    folder.files.pop(without, None)
    if len(folder.files) > FILES_MAX:
        raise InputError(
            f"{folder.root}: more than {FILES_MAX:,} files, so it is not a folder of code. {_largest(folder)}"
        )
    if folder.bytes > READ_BYTES_MAX:
        raise InputError(f"{folder.root}: {_size(folder.bytes)}, and {FIT}. {_largest(folder)}")
    return folder, dict(_contents(folder))


def pack_texts(made: Mapping[str, str]) -> Archive:
    """Return an archive of generated texts, by path. Raise InputError if it is too large."""
    data = _tar(_of_texts(made), Folder(Path()))
    if len(data) > PACKED_BYTES_MAX:
        raise InputError(f"{', '.join(made)}: {_size(len(data))} packed, and {FIT}; {HELP}")
    return Archive(data, len(made))


def scan(root: Path) -> Folder:
    """Find the files of the program by name and .gitignore. Only .gitignore files are read. Raise InputError."""
    folder = Folder(root)
    if not root.is_dir():
        raise InputError(f"{root}: no such folder")
    ignored, left = Ignored(root), [""]
    while left and len(folder.files) <= FILES_MAX:
        left += reversed(_scan(folder, left.pop(), ignored))
    return folder


def _scan(folder: Folder, below: str, ignored: Ignored) -> list[str]:
    """Scan one folder; return the subfolders to scan. below: its path in the root with a final slash; "": the root."""
    if below.count("/") > FOLDERS_DEEP_MAX:
        raise InputError(
            f"{folder.root / below}: more than {FOLDERS_DEEP_MAX} folders deep, so it is not a folder of code"
        )
    entries = _entries(folder.root / below)
    ignored.enter(below)
    if below and any(fnmatch.fnmatchcase(entry.name, _SNAPSHOT_FILE) for entry in entries):
        folder.snapshots.append(below)
        return []
    inside = []
    for entry in entries:
        path = below + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        is_no_code = entry.name in _IGNORED_FOLDERS or (not is_folder and _matches(entry.name, _IGNORED_FILES))
        if is_no_code or ignored.has(path, is_folder=is_folder):
            continue
        if entry.name in _SECRET_FOLDERS if is_folder else _matches(entry.name, _SECRET_FILES):
            folder.secrets.append(path + ("/" if is_folder else ""))
        elif entry.is_symlink():
            _add_link(folder, path)
        elif is_folder and not os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
            inside.append(f"{path}/")
        elif entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # for example an editor's backup that was just removed
                folder.files[path] = entry.stat(follow_symlinks=False).st_size
    return inside


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _matches(name: str, patterns: Any) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns)


def _add_link(folder: Folder, path: str) -> None:
    """Store a link as a link, because following a link to a folder may lead into a cycle."""
    link, root = folder.root / path, folder.root.resolve()
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # a cycle raises RuntimeError before Python 3.13
        folder.outside.append(path)
        return
    if target == root or root in target.parents:
        folder.links[path] = os.path.relpath(target, (root / path).parent)
    else:
        folder.outside.append(path)


def _largest(folder: Folder) -> str:
    """Return a sentence with the largest entries of the folder, and what to do about them."""
    parts: dict[str, int] = {}
    for path, size in folder.files.items():
        top = path.split("/", 1)[0] + ("/" if "/" in path else "")
        parts[top] = parts.get(top, 0) + size
    ordered = sorted(parts.items(), key=lambda part: -part[1])[:3]
    shown = ", ".join(f"{path} {_size(size)}" for path, size in ordered)
    return f"The largest: {shown}. Put data into .gitignore, or name a smaller folder with --code DIR; {HELP}"


def _contents(folder: Folder) -> Iterator[tuple[str, tuple[bytes, bool]]]:
    """Yield the path of each file, with its content and True if it is executable. Private keys are left out."""
    for path in list(folder.files):
        try:
            with open(_opened(folder.root, path), "rb") as file:
                data = file.read(READ_BYTES_MAX + 1)
                runs = bool(os.fstat(file.fileno()).st_mode & stat.S_IXUSR)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(f"{folder.root / path}: {error.strerror}") from None
        if all(word in data[:200] for word in _KEY_BEGINS):
            folder.secrets.append(path)
        else:
            yield path, (data, runs)


def _opened(root: Path, path: str) -> int:
    """Open a file below the root without following links, because a scanned folder may be replaced by a link."""
    *folders, name = path.split("/")
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            above, at = at, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(above)
        return own_files.open_file(name, os.O_RDONLY, dir_fd=at)
    finally:
        os.close(at)


def _of_texts(made: Mapping[str, str]) -> Contents:
    return {path: (text.encode(), False) for path, text in made.items()}


def _tar(contents: Contents, folder: Folder) -> bytes:
    """Return a packed tar without times and owners, so that equal code gives an equal ConfigMap name."""
    packed = io.BytesIO()
    zipped = gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="")
    with zipped, tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted({*contents, *folder.links}):
            member = tarfile.TarInfo(path)
            if path in folder.links:
                member.type, member.linkname = tarfile.SYMTYPE, folder.links[path]
                tar.addfile(member)
                continue
            data, runs = contents[path]
            member.size, member.mode = len(data), 0o755 if runs else 0o644
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def _remarks(folder: Folder) -> Iterator[str]:
    if folder.secrets:
        yield f"left out, because they look like credentials: {_listed(folder.secrets)}; put them into a Secret"
    if folder.snapshots:
        yield f"left out, because they are snapshots of another training: {_listed(folder.snapshots)}"
    if folder.outside:
        yield f"left out, because these links lead out of the folder or are broken: {_listed(folder.outside)}"


def _listed(paths: list[str]) -> str:
    more = f" and {wording.count(len(paths) - 5, 'more file')}" if len(paths) > 5 else ""
    return ", ".join(paths[:5]) + more


def _size(number: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number} B"
