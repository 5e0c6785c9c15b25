"""`make dist`: write wheel, sdist, the chart's archive, and an SBOM of each image (CycloneDX) to a folder.

Two builds of one commit are equal byte for byte (tests/processes/test_dist.py): timestamps are the commit's, and
hatchling sorts files. `helm package` would write the build time, so the chart is packed here, in the same format.
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
    """Return the commit's time in seconds since 1970; SOURCE_DATE_EPOCH if the sources are no Git repository."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    told = given or subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True)
    return int(told)


def pack_chart(folder: Path, time: int) -> Path:
    """Write the chart's archive, with the name that `helm package` gives it."""
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
    # Build with this environment's pinned hatchling: an isolated build would install the newest one.
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
