"""`make dist`: wheel, sdist, the chart as an archive, and a list of what each image holds (CycloneDX), into a folder.

Two builds of one commit are equal byte for byte (tests/unit/test_dist.py): times are those of the commit, and hatchling
sorts what it packs. `helm package` writes the time of the build, so the chart is packed here, as it would pack it.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts/ddpjob-operator"
IMAGES = ("operator", "trainer")


def commit_time() -> int:
    """Seconds since 1970 of the commit; SOURCE_DATE_EPOCH where the sources are no repository."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    told = given or subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True)
    return int(told)


def pack_chart(folder: Path, time: int) -> Path:
    """The chart's archive, named as `helm package` names it."""
    about = (CHART / "Chart.yaml").read_text().splitlines()
    (version,) = (line.split()[1] for line in about if line.startswith("version:"))
    listed = subprocess.check_output(["git", "ls-files", "-z", "."], cwd=CHART, text=True).split("\0")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(filter(None, listed)):
            content = (CHART / name).read_bytes()
            member = tarfile.TarInfo(f"{CHART.name}/{name}")
            member.size, member.mtime, member.mode = len(content), time, 0o644
            archive.addfile(member, io.BytesIO(content))
    made = folder / f"{CHART.name}-{version}.tgz"
    made.write_bytes(gzip.compress(packed.getvalue(), mtime=time))
    return made


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    time = commit_time()
    env = os.environ | {"SOURCE_DATE_EPOCH": str(time)}
    # The environment has hatchling as it is pinned: a build of its own would take the newest.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, env=env, stdout=subprocess.DEVNULL)
    pack_chart(folder, time)
    for image in IMAGES:
        parts = ["requirements", str(ROOT / f"pins/{image}.txt"), "--pyproject", str(ROOT / "pyproject.toml")]
        form = ["--output-reproducible", "--output-format", "JSON", "--output-file", str(folder / f"{image}.cdx.json")]
        subprocess.run([sys.executable, "-W", "ignore", "-m", "cyclonedx_py", *parts, *form], check=True, env=env)
    print(*sorted(path.name for path in folder.iterdir()), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
