"""The benchmark: every case is verified against the reference, then timed side by side with its peers, in one process.

Reading order: ``cases`` (what is computed), ``grid`` (the table of cases), ``passes`` and ``peers`` (who computes it),
``verify``, ``timing``, ``memory``, ``runner``; then ``results``, ``bounds``, ``report`` and ``plots``. Units and FLOP
formulas: benchmarks/README.md. A new pass is one entry in ``passes.PASSES`` and one method on each peer that has it.
"""
