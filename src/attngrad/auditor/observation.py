"""What a candidate returned in one case."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from attngrad.auditor.truth import Judgement, Truth
from attngrad.core.arrays import NDArray


@dataclass
class Observation:
    """What a candidate returned in one case, and how it was judged."""

    truth: Truth
    results: dict[str, NDArray]
    judgements: dict[str, Judgement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, actual in self.results.items():
            self.judgements[name] = self.truth.judge(name, actual)

    @property
    def size(self) -> int:
        """The number of scores: small cases are tried first."""
        return int(np.prod(self.truth.case.dims.scores))
