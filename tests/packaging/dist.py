"""What the archives in dist/ hold: every file that belongs there and nothing else. Run by ``make dist``."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".ci/", ".gitignore")
"""Files of the repository that the sdist does without."""


def tracked(folder: str = "") -> set[str]:
    """The files of the repository under a folder."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", folder or "."]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())  # noqa: S603


def compare(archive: Path, found: set[str], expected: set[str]) -> None:
    """Fail where they differ, and say in what."""
    for word, names in (("lacks", expected - found), ("has", found - expected)):
        if names:
            sys.exit(f"{archive.name} {word} {', '.join(sorted(names))}")
    print(f"{archive.name}: {len(found)} files, {archive.stat().st_size / 1e6:.1f} MB, as they should be")


def check_sdist(archive: Path) -> None:
    """The repository but for what is left out, and the metadata."""
    with tarfile.open(archive) as files:
        members = [m for m in files.getmembers() if not m.isdir()]
    if odd := [m.name for m in members if not m.isreg()]:
        sys.exit(f"{archive.name} has what is no plain file: {', '.join(odd)}")
    names = {m.name.removeprefix(f"{archive.name.removesuffix('.tar.gz')}/") for m in members}
    compare(archive, names, {name for name in tracked() if not name.startswith(LEFT_OUT)} | {"PKG-INFO"})


def check_wheel(archive: Path) -> None:
    """The package, the compiled module, and the metadata."""
    with zipfile.ZipFile(archive) as files:
        names = set(files.namelist())
    info = "-".join(archive.name.split("-")[:2]) + ".dist-info"
    package = {name.removeprefix("src/") for name in tracked("src/attngrad")}
    metadata = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    native = [name for name in names if re.fullmatch(r"attngrad/_native\.[\w.-]+\.so", name)]
    if len(native) != 1 or "attngrad/py.typed" not in names:
        sys.exit(f"{archive.name} must have one compiled module and py.typed; got {native}")
    compare(archive, names, package | metadata | set(native))


def main() -> None:
    """Check one sdist and one wheel."""
    (sdist,), (wheel,) = list((ROOT / "dist").glob("*.tar.gz")), list((ROOT / "dist").glob("*.whl"))
    check_sdist(sdist)
    check_wheel(wheel)


if __name__ == "__main__":
    main()
