"""Bytes that atheris makes up by following the branches that earlier ones took: the formula parser and the loaders.

    python tests/robustness/fuzz_guided.py formulas FOLDER -max_total_time=60     fuzz; a finding is kept in FOLDER
    python tests/robustness/fuzz_guided.py formulas FOLDER FOLDER/finding-x       that input again

The judges are those of fuzz_formulas.py and fuzz_files.py. A part of `make fuzz`; see fuzz.py.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

TARGETS = ("formulas", "npz", "safetensors")


def runs(log: str) -> int:
    """How many inputs a run tried, by what libFuzzer told."""
    found = re.search(r"Done (\d+) runs", log)
    return int(found.group(1)) if found else 0


def main() -> None:
    """Fuzz one target; the other arguments are those of libFuzzer."""
    import atheris

    import fuzz  # noqa: F401, whose path has what the parts import

    target, folder, *rest = sys.argv[1:]
    with atheris.instrument_imports(include=["attngrad"]):
        import fuzz_files
        import fuzz_formulas
    rng = random.Random(0)  # noqa: S311
    judge: Callable[[bytes], object]
    if target == "formulas":
        seeds = [text.encode() for text in fuzz_formulas.SEEDS]

        def judge(data: bytes) -> None:
            fuzz_formulas.check(data[:2000].decode("utf-8", "replace"), fuzz_formulas.watching())
    else:
        make, read = fuzz_files.KINDS[target]
        seeds = [make(rng) for _ in range(30)]

        def judge(data: bytes) -> None:
            with fuzz_files.watching():
                read(data)
            assert not (fuzz_files.place() / "trapped").exists()

    warnings.simplefilter("error")
    corpus = Path(folder) / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds):
        (corpus / f"seed-{i}").write_bytes(seed)
    limits = ["-timeout=300", "-rss_limit_mb=4096", "-max_len=4096", f"-artifact_prefix={folder}/finding-"]
    again = [word for word in rest if not word.startswith("-")]
    atheris.Setup([sys.argv[0], *limits, *rest, *([] if again else [str(corpus)])], judge)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
