import numpy as np
import numpy.typing as npt

compiler: str

def keep_mask(
    out: npt.NDArray[np.bool_], seed: int, threshold: int, b0: int, h0: int, i0: int, j0: int
) -> None: ...
