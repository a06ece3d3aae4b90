"""Run the notebooks and write their outputs anew: ``python docs/notebooks/execute.py [name ...]``.

The site and the repository's web view show these outputs; tests/docs/test_notebooks.py runs the notebooks again and
compares. A cell tagged ``varies`` prints numbers that depend on the machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(path: Path) -> Any:
    """The notebook with fresh outputs, and nothing that says where or when; one thread, so that numbers repeat."""
    book = nbformat.read(path, as_version=4)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ATTNGRAD_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    client = NotebookClient(book, timeout=1200, record_timing=False, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env=environment)
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    return book


def main(names: list[str]) -> None:
    """All notebooks, or those named."""
    for path in sorted(HERE.glob("*.ipynb")):
        if not names or path.stem in names:
            print(path.stem, flush=True)
            nbformat.write(execute(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])
