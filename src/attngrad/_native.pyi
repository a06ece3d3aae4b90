from typing import Any, Literal

import numpy as np
import numpy.typing as npt

compiler: str

def isa_names() -> list[str]: ...
def isa() -> str: ...
def add_isas(sets: object) -> None: ...
def set_isa(name: str, /) -> None: ...
def set_num_threads(n: int, /) -> None: ...
def get_num_threads() -> int: ...
def set_openmp(parallel: int, fork_call: int, in_parallel: int, max_threads: int) -> None: ...
def force_workers(name: str) -> None: ...
def borrow(threads: int) -> None: ...
def worker_runs() -> dict[str, int]: ...
def blas_callback() -> int: ...
def buffer(bytes: int) -> npt.NDArray[np.uint8]: ...  # noqa: A002
def narrow(wide: npt.NDArray[np.float32], out: npt.NDArray[Any]) -> None: ...
def fma_rate(f64: bool, rounds: int) -> float: ...
def read_rate(data: npt.NDArray[np.float32]) -> float: ...

_Capsule = object

# By name, the options that differ from their defaults.
_Fields = dict[str, Any]

def set_exchange(api: _Capsule) -> bool: ...
def forward_of_tensors(
    q: object,
    k: object,
    v: object,
    fields: _Fields,
    out: object,
    lse: object,
    save: bool,
    threads: int,
) -> _Capsule | Literal[False] | None: ...
def backward_of_tensors(
    saved: _Capsule,
    q: object,
    k: object,
    v: object,
    fields: _Fields,
    dout: object,
    dlse: object,
    dq: object,
    dk: object,
    dv: object,
    threads: int,
) -> bool: ...
def residuals_of(saved: _Capsule) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]: ...
def keep_mask(out: npt.NDArray[np.bool_], seed: int, threshold: int, b0: int, h0: int, i0: int, j0: int) -> None: ...

_Array = npt.NDArray[Any] | None

class Call:
    def __init__(self, q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any], fields: _Fields) -> None: ...
    def forward(self, out: _Array, wide_out: _Array, lse: _Array, row_max: _Array, inv_row_sum: _Array) -> None: ...
    def backward(
        self,
        dout: _Array,
        dlse: _Array,
        out: _Array,
        row_max: _Array,
        inv_row_sum: _Array,
        dq: _Array,
        dk: _Array,
        dv: _Array,
        delta: _Array,
        dbias: _Array,
    ) -> None: ...
    def forward_tangent(
        self,
        directions: Directions,
        out: _Array,
        wide_out: _Array,
        lse: _Array,
        row_max: _Array,
        inv_row_sum: _Array,
        out_dot: _Array,
        wide_out_dot: _Array,
        lse_dot: _Array,
        tangent_shift: _Array,
        tangent_mean: _Array,
    ) -> None: ...
    def backward_tangent(
        self,
        directions: Directions,
        dout: _Array,
        dlse: _Array,
        out: _Array,
        row_max: _Array,
        inv_row_sum: _Array,
        dq: _Array,
        dk: _Array,
        dv: _Array,
        delta: _Array,
        dbias: _Array,
        dout_dot: _Array,
        dlse_dot: _Array,
        out_dot: _Array,
        tangent_shift: _Array,
        tangent_mean: _Array,
        dq_dot: _Array,
        dk_dot: _Array,
        dv_dot: _Array,
        delta_dot: _Array,
        dbias_dot: _Array,
    ) -> None: ...

class Directions:
    def __init__(self, q: _Array, k: _Array, v: _Array, bias: _Array, sinks: _Array) -> None: ...
