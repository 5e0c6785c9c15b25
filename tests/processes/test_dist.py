"""What `make dist` packs. A user who checks a release builds it again and compares."""

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dist

ROOT = Path(__file__).parents[2]


def test_the_chart_archive_contains_the_chart_files_and_is_reproducible(tmp_path: Path) -> None:
    first = dist.pack_chart(tmp_path, 1_700_000_000)
    packed = first.read_bytes()
    assert dist.pack_chart(tmp_path, 1_700_000_000).read_bytes() == packed
    with tarfile.open(first) as archive:
        names = archive.getnames()
        assert {"ddpjob-operator/Chart.yaml", "ddpjob-operator/values.yaml"} < set(names)
        assert all(name.startswith("ddpjob-operator/") for name in names), "Helm wants one folder with the chart's name"
        (crd,) = (name for name in names if name.endswith("ddpjobs.training.ddpjob.io.yaml"))
        assert archive.extractfile(crd).read() == (ROOT / "charts" / crd).read_bytes()  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("cyclonedx_py") is None, reason="`make dist` installs what this needs")
def test_two_builds_of_a_commit_are_equal_and_contain_only_the_packages(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        subprocess.run([sys.executable, "tools/dist.py", str(tmp_path / name)], cwd=ROOT, check=True)
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert made[0] == made[1]
    (wheel,) = (tmp_path / "one").glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {
        "ddpjob", "ddpjob_check", "ddpjob_cli", "ddpjob_convert", "ddpjob_core", "ddpjob_operator", "ddprun"
    }  # fmt: skip
