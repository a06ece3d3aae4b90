"""PyTorch, Transformers and JAX: what their arrays can be and NumPy's cannot. ``do()`` is the whole call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

import attngrad.jax as of_jax
import attngrad.torch as of_torch
import attngrad.transformers as of_transformers
from bad_inputs.row import Errors, Row

RNG = np.random.default_rng(2)
ARRAYS = tuple(RNG.standard_normal(shape) for shape in ((2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)))
Q, K, V = (torch.from_numpy(x.copy()) for x in ARRAYS)
NO_TENSOR = r"attention: q must be a torch\.Tensor; got "


def tensors(name: str, error: Errors | None, words: str, /, q: Any = Q, k: Any = K, v: Any = V, **options: Any) -> Row:
    return Row(f"torch: {name}", lambda: of_torch.attention(q, k, v, **options), error, words)


def same(name: str, q: torch.Tensor, k: torch.Tensor = K, v: torch.Tensor = V, **options: Any) -> Row:
    """Right: what contiguous copies give."""

    def do() -> Any:
        copies = [x.detach().resolve_neg().clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
        found, expected = of_torch.attention(q, k, v, **options), of_torch.attention(*copies, **options)
        assert torch.equal(found, expected)

    return Row(f"torch: {name}", do)


def sdpa(name: str, error: Errors, words: str, /, *given: Any, **keywords: Any) -> Row:
    query = (Q, K, V)[len(given) :]
    call: Callable[[], Any] = lambda: of_torch.scaled_dot_product_attention(*given, *query, enable_gqa=True, **keywords)  # noqa: E731
    return Row(f"sdpa: {name}", call, error, words)


SPARSE = torch.eye(4).to_sparse()
WIDE = torch.zeros(1, 1, 1, dtype=torch.float64)
MHA = of_torch.MultiheadAttention(8, 2, batch_first=True)
X = torch.zeros(2, 3, 8)
TORCH = [
    tensors("q: a NumPy array", TypeError, NO_TENSOR + r"ndarray.*attngrad\.attention takes NumPy arrays", q=ARRAYS[0]),
    tensors("q: a list", TypeError, NO_TENSOR + "list", q=[[1.0]]),
    tensors("q: None", TypeError, NO_TENSOR + "None", q=None),
    tensors("q: a number", TypeError, NO_TENSOR + r"1\.0 \(float\)", q=1.0),
    tensors("q: integers", TypeError, "q must have dtype .*got int64", q=Q.long()),
    tensors("q: booleans", TypeError, "q must have dtype .*got bool", q=Q > 0),
    tensors("q: complex", TypeError, "q must have dtype .*got complex128", q=Q.to(torch.complex128)),
    tensors("q: float8", TypeError, "q must have dtype float64, float32, float16 or bfloat16; got float8_e4m3fn", q=Q.to(torch.float8_e4m3fn)),
    tensors("q: sparse", TypeError, "q must be a strided tensor; got layout torch.sparse_coo", q=SPARSE),
    tensors("q: on another device", ValueError, "k must be on the device of q, meta; got cpu", q=torch.zeros(2, 4, 3, 4, device="meta")),
    tensors("q: a number in a tensor", ValueError, "q must have at least 2 axes", q=torch.tensor(1.0, dtype=torch.float64)),
    tensors("q: another dtype", TypeError, "k must have the dtype of q, float32", q=Q.float()),
    tensors("k: another batch", ValueError, "k must have .*leading axes", k=K[:1]),
    tensors("k: heads that do not divide", ValueError, "k must have 4 or a divisor of 4 heads", k=K.repeat(1, 4, 1, 1)[:, :3], v=V.repeat(1, 4, 1, 1)[:, :3]),
    tensors("k: 2**31 keys", ValueError, r"k must have fewer than 2\*\*31 tokens", q=WIDE, k=WIDE.expand(1, 2**31, 1), v=WIDE.expand(1, 2**31, 1)),
    tensors("mask: a NumPy array", TypeError, r"mask must be a torch\.Tensor", mask=np.ones((3, 5), bool)),
    tensors("mask: numbers", TypeError, "mask must be boolean", mask=torch.ones(3, 5)),
    tensors("bias: another dtype", TypeError, "bias must have the dtype of q", bias=torch.ones(3, 5)),
    tensors("bias: another shape", ValueError, "bias must broadcast", bias=torch.ones(5, 3, dtype=torch.float64)),
    tensors("sinks: another shape", ValueError, r"sinks must have shape \(4,\)", sinks=torch.ones(2, dtype=torch.float64)),
    tensors("segments: lists", TypeError, r"q_segments must be a torch\.Tensor", segments=([0], [0])),
    tensors("segments: one", TypeError, "segments must be a pair", segments=torch.zeros(5)),
    tensors("offset: floats", TypeError, "offset must have an integer dtype", offset=torch.ones(2), causal=True),
    tensors("offset: beyond 2**61", ValueError, r"offset must be within 2\*\*61", offset=torch.tensor([2**62, 0]), causal=True),
    tensors("seed: a tensor of two", ValueError, "seed must be one number", seed=torch.zeros(2, dtype=torch.int64), dropout=0.5),
    tensors("seed: a floating tensor", TypeError, "seed must be an integer or an int64 tensor", seed=torch.zeros(()), dropout=0.5),
    tensors("softcap: subnormal in float32", ValueError, r"softcap must be from 2\*\*-100 to 2\*\*100 in float32", q=Q.float(), k=K.float(), v=V.float(), softcap=1e-40),
    tensors("scale: infinite in float16's float32", ValueError, "scale must be finite in float32", q=Q.half(), k=K.half(), v=V.half(), scale=1e39),
    same("q: expanded", Q[:, :1].expand(2, 4, 3, 4)),
    same("q: transposed", Q.transpose(1, 2).contiguous().transpose(1, 2)),
    same("q: every other feature", Q.repeat_interleave(2, -1)[..., ::2]),
    same("q: a negative bit", torch.view_as_complex(torch.stack([Q, Q], -1)).conj().imag),
    same("q: bfloat16, strided", Q.bfloat16().transpose(1, 2).contiguous().transpose(1, 2), K.bfloat16(), V.bfloat16()),
    same("q: a parameter", torch.nn.Parameter(Q.clone())),
    same("q: nothing", Q[:, :, :0]),
    same("q, k: no features", Q[..., :0], K[..., :0]),
    same("v: no features", Q, K, V[..., :0]),
    same("seed: a negative tensor", Q, dropout=0.5, seed=torch.tensor(-1)),
    sdpa("query: None", TypeError, r"query must be a torch\.Tensor", None),
    sdpa("query: one axis", ValueError, "query must have at least 2 axes", Q[0, 0, 0]),
    sdpa("attn_mask: integers", TypeError, "attn_mask must be boolean or floating", attn_mask=torch.ones(3, 5, dtype=torch.int64)),
    sdpa("attn_mask: another shape", ValueError, "mask must broadcast to", attn_mask=torch.ones(5, 3, dtype=torch.bool)),
    sdpa("attn_mask beside mask", ValueError, "mask must not be given beside", attn_mask=torch.ones(3, 5, dtype=torch.bool), mask=torch.ones(3, 5, dtype=torch.bool)),
    sdpa("dropout_p: 1", ValueError, r"dropout(_p)? must be in \[0, 1\)", dropout_p=1.0),
    sdpa("dropout_p: text", TypeError, "dropout(_p)? must be a real number", dropout_p="0.1"),
    sdpa("is_causal: 1", TypeError, "causal must be True or False", is_causal=1),
    sdpa("causal for is_causal", TypeError, "Did you mean 'is_causal'", causal=True),
    Row("torch module: query of 4 axes", lambda: MHA(X[None], X, X), ValueError, "query must have 3 axes"),
    Row("torch module: mask of another shape", lambda: MHA(X, X, X, attn_mask=torch.zeros(2, 2)), ValueError, r"attn_mask must have shape \(3, 3\)"),
    Row("torch module: padding of another shape", lambda: MHA(X, X, X, torch.zeros(2, 2)), ValueError, r"key_padding_mask must have shape \(2, 3\)"),
    Row("torch module: is_causal without a mask", lambda: MHA(X, X, X, is_causal=True), ValueError, "attn_mask must be given with is_causal"),
    Row("transformers: a mask of 2 axes", lambda: of_transformers.attention_forward(MHA, Q, K, V, torch.ones(2, 5)), ValueError, "attention_mask must be a boolean or floating mask"),
    Row("transformers: an argument without a pass", lambda: of_transformers.attention_forward(MHA, Q, K, V, None, head_mask=torch.ones(4)), ValueError, "head_mask must be None; .*eager"),
    Row("transformers: sinks of another shape", lambda: of_transformers.attention_forward(MHA, Q, K, V, None, s_aux=torch.ones(3)), ValueError, r"sinks must have shape \(4,\)"),
]  # fmt: skip

# --- jax, with and without x64 ----------------------------------------------------------------------------------------------

NO_JAX = "attention: q must be an array of JAX or NumPy; got "


def in_jax(name: str, error: Errors | None, words: str, /, q: Any = None, x64: bool = True, **options: Any) -> Row:
    def do() -> Any:
        with jax.enable_x64(x64):
            a, b, c = (jnp.asarray(x) for x in ARRAYS)
            return of_jax.attention(a if q is None else q, options.pop("k", b), options.pop("v", c), **options)

    return Row(f"jax: {name}", do, error, words)


def equal(name: str, q: Callable[[np.ndarray], Any], x64: bool = True, **options: Any) -> Row:
    """Right: what ``attngrad.attention`` gives for the same numbers."""

    def do() -> None:
        with jax.enable_x64(x64):
            x = q(ARRAYS[0].astype(np.float64 if x64 else np.float32))
            found = of_jax.attention(x, *(jnp.asarray(y) for y in ARRAYS[1:]), **options)
            wide = [np.array(y, found.dtype) for y in (x, *ARRAYS[1:])]
            assert np.array_equal(np.asarray(found), attngrad_attention(*wide, **options))

    return Row(f"jax: {name}", do)


def attngrad_attention(*given: Any, **options: Any) -> Any:
    from attngrad import attention

    return attention(*given, **options)


IDS = (np.array([0, 2**32, 2**33]), np.array([0, 2**32, 0, 2**33, 5]))
JAX = [
    in_jax("q: a list", TypeError, NO_JAX + "list", q=[[1.0]]),
    in_jax("q: a number", TypeError, NO_JAX + r"1\.0", q=1.0),
    in_jax("q: a tensor of torch", TypeError, NO_JAX + "Tensor", q=Q),
    in_jax("q: a string", TypeError, NO_JAX + "'q'", q="q"),
    in_jax("q: masked", TypeError, r"q must be a plain numpy\.ndarray; got MaskedArray", q=np.ma.masked_less(ARRAYS[0], 0)),
    in_jax("q: objects", TypeError, "q must have a dtype that JAX has; got object", q=ARRAYS[0].astype(object)),
    in_jax("q: text", TypeError, "q must have a dtype that JAX has; got <U", q=ARRAYS[0].astype("U8")),
    in_jax("q: integers", TypeError, "q must have dtype float64, .*got int64", q=np.zeros((2, 4, 3, 4), int)),
    in_jax("q: complex", TypeError, "q must have dtype", q=np.zeros((2, 4, 3, 4), complex)),
    in_jax("q: float8", TypeError, "q must have dtype", q=jnp.zeros((2, 4, 3, 4), ml_dtypes.float8_e4m3fn)),
    in_jax("q: one axis", ValueError, "q must have at least 2 axes", q=np.zeros(4)),
    in_jax("k: other features", ValueError, "k must have 4 features", k=np.zeros((2, 2, 5, 3))),
    in_jax("layout: unknown", ValueError, "layout must be one of BHTD, BTNH", layout="BHDT"),
    in_jax("layout: no heads", ValueError, "q must have a heads axis", q=jnp.zeros((3, 4)), layout="BTNH"),
    in_jax("mask: numbers", TypeError, "mask must be boolean", mask=jnp.ones((3, 5))),
    in_jax("mask: a list", TypeError, "mask must be an array of JAX or NumPy", mask=[True]),
    in_jax("bias: another shape", ValueError, "bias must broadcast", bias=np.ones((5, 3))),
    in_jax("segments: one array", TypeError, "segments must be a pair", segments=np.zeros(5, int)),
    in_jax("offset: floats", TypeError, "offset must have an integer dtype", offset=jnp.ones(2), causal=True),
    in_jax("offset: an array beyond 2**61", ValueError, r"offset must be within 2\*\*61", offset=np.array([2**62, 0]), causal=True),
    in_jax("seed: an array of two", TypeError, r"seed must be an integer, or an integer array of shape \(\)", seed=jnp.zeros(2, int), dropout=0.5),
    in_jax("softcap: 0", ValueError, "softcap must be positive", softcap=0.0),
    in_jax("softcap: subnormal in float32", ValueError, r"softcap must be from 2\*\*-100", softcap=1e-40, x64=False),
    in_jax("segments: ids beyond 32 bits without x64", ValueError, "q_segments must fit into int32 where jax_enable_x64 is off", segments=IDS, x64=False),
    in_jax("offset: beyond 32 bits without x64", ValueError, "offset must fit into int32", offset=np.array([2**40, 0]), causal=True, x64=False),
    equal("q: negative strides", lambda x: x[:, ::-1]),
    equal("q: read-only", lambda x: np.broadcast_to(x[:, :1], x.shape)),
    equal("q: big-endian", lambda x: x.astype(">f8")),
    equal("segments: ids beyond 32 bits with x64", jnp.asarray, segments=IDS),
    equal("offset: at its limits with x64", jnp.asarray, offset=np.array([2**61 - 1, 1 - 2**61]), causal=True),
    equal("q: no queries", lambda x: jnp.asarray(x[:, :, :0])),
    equal("float64 without x64 is float32", lambda x: x.astype(np.float64), x64=False),
    Row("jax.nn: causal for is_causal", lambda: of_jax.dot_product_attention(*(jnp.zeros((1, 2, 1, 2)),) * 3, causal=True), TypeError, "Use 'is_causal'"),
    Row("jax.nn: two axes", lambda: of_jax.dot_product_attention(*(jnp.zeros((2, 2)),) * 3), ValueError, "query must have 3 or 4 axes|heads axis"),
    Row("jax.nn: window of three", lambda: of_jax.dot_product_attention(*(jnp.zeros((1, 2, 1, 2)),) * 3, local_window_size=(1, 2, 3)), ValueError, "window must be a pair"),
]  # fmt: skip
