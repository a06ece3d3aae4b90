"""How smart are automatic differentiation systems? Count what each spends on the backward of attention.

The backward needs four matrix products, dA = dO V^T, dV = A^T dO, dQ = dS K and dK = dS^T Q, and the matrix dS (Omega)
serves two of them. For every system that is installed this script records what its backward really issues, and says:
how many products, whether dQ and dK read the same dS, how many arrays of T x S, how many bytes.

    eager PyTorch      every dispatched operation (TorchDispatchMode)
    fused PyTorch      its one operation; the products inside it from the log of MKL
    torch.compile      the graph given to Inductor, and Inductor's own count of bytes after fusion
    JAX                the jaxpr of the pullback, and the optimised HLO of XLA
    HIPS autograd      every NumPy call, by a subclass of ndarray

Run it: ``python docs/studies/how_smart_is_autograd.py`` (``--json`` for the counts). A system that is missing is named.
The recorders are in ``autograd_counts``, beside this file. Both can be taken along: they need NumPy alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable

from autograd_counts.compiled import torch_compiled_count
from autograd_counts.hips import hips_operations
from autograd_counts.pytorch import torch_eager, torch_fused_count, torch_softmax, torch_written_out
from autograd_counts.record import BATCH, HEADS, Count, D, E, S, T, count, least_megabytes
from autograd_counts.xla import hlo_operations, hlo_text, jaxpr_operations

SYSTEMS: dict[str, Callable[[], list[Count]]] = {
    "torch": lambda: [
        count("PyTorch, eager", torch_eager(torch_softmax)),
        count("PyTorch, eager, softmax written out", torch_eager(torch_written_out)),
        torch_fused_count(),
        torch_compiled_count(),
        torch_compiled_count(D),
    ],
    "jax": lambda: [count("JAX, jaxpr", jaxpr_operations()), count("JAX, optimised HLO", hlo_operations(hlo_text()))],
    "autograd": lambda: [count("HIPS autograd", hips_operations())],
}


def main() -> None:
    """Count for every system that is installed, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    as_json = parser.parse_args().json
    missing = [name for name in SYSTEMS if importlib.util.find_spec(name) is None]
    counts = [c for name, found in SYSTEMS.items() if name not in missing for c in found()]
    if as_json:
        print(json.dumps({"counts": [c._asdict() for c in counts], "missing": missing, "least": least_megabytes()}))
        return
    print(f"Backward of attention, float32, batch {BATCH}, heads {HEADS}, T {T}, S {S}, D {D}, E {E}.")
    print(f"Inputs once and gradients once are {least_megabytes():.2f} MB, or {least_megabytes(D):.2f} with E = {D}.\n")
    print(f"{'':<37}{'products':<23}{'Omega':<7}{'T x S arrays':<17}{'MB moved':>8}")
    print(f"{'':<37}{'':<23}{'formed':<7}{'kept  written':<17}")
    for c in counts:
        names = f"{len(c.products)}: {' '.join(c.products)}" if c.products else "not seen"
        arrays_ = f"{c.score_arrays_kept:>4}  {c.score_arrays_written:>7}"
        print(f"{c.system:<37}{names:<23}{c.omega.split(':')[0]:<7}{arrays_:<17}{c.megabytes:>8.2f}")
    for note in dict.fromkeys(f"{c.system}: {c.omega}." for c in counts if ":" in c.omega):
        print(note)
    for name in missing:
        print(f"{name} is not installed, so nothing is said of it: pip install {name}")


if __name__ == "__main__":
    main()
