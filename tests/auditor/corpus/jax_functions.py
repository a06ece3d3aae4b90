# ruff: noqa
"""JAX: custom_vjp and custom_jvp."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def attention(q, k, v):
    """(B, H, T, D)"""
    return _attention_fwd(q, k, v)[0]


def _attention_fwd(q, k, v):
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    p = jax.nn.softmax(s, axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", p, v), (q, k, v, p)


def _attention_bwd(res, g):
    q, k, v, p = res
    scale = 1 / jnp.sqrt(q.shape[-1])
    dv = jnp.einsum("bhqk,bhqd->bhkd", p, g)
    dp = jnp.einsum("bhqd,bhkd->bhqk", g, v)
    ds = p * (dp - jnp.sum(dp * p, axis=-1, keepdims=True)) * scale
    return jnp.einsum("bhqk,bhkd->bhqd", ds, k), jnp.einsum("bhqk,bhqd->bhkd", ds, q), dv


attention.defvjp(_attention_fwd, _attention_bwd)


# memory-efficient: keep lse only, no gradient through the residual
@jax.custom_vjp
def flash(q, k, v):
    return _flash_fwd(q, k, v)[0]


def _flash_fwd(q, k, v):
    s = q @ k.mT * q.shape[-1] ** -0.5
    lse = lax.stop_gradient(jax.nn.logsumexp(s, axis=-1, keepdims=True))
    p = jnp.exp(s - lse)
    return p @ v, (q, k, v, lse)


def _flash_bwd(res, do):
    q, k, v, lse = res
    scale = q.shape[-1] ** -0.5
    p = jnp.exp(q @ k.mT * scale - lse)
    dp = do @ v.mT
    ds = p * (dp - jnp.sum(p * dp, -1, keepdims=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


flash.defvjp(_flash_fwd, _flash_bwd)


@jax.custom_vjp
def pallas_like(q, k, v):
    return jax.nn.softmax(q @ k.mT * q.shape[-1] ** -0.5) @ v


def _pallas_like_bwd(res, do):
    q, k, v = map(lax.stop_gradient, res)
    do = lax.stop_gradient(do)
    scale = q.shape[-1] ** -0.5
    p = jax.nn.softmax(q @ k.mT * scale)
    dp = do @ v.mT
    ds = p * (dp - jnp.sum(p * dp, -1, keepdims=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


pallas_like.defvjp(lambda q, k, v: (pallas_like(q, k, v), (q, k, v)), _pallas_like_bwd)


@jax.custom_jvp
def attention_fwdmode(q, k, v):
    return jax.nn.softmax(q @ k.mT / jnp.sqrt(q.shape[-1])) @ v


@attention_fwdmode.defjvp
def _attention_fwdmode_jvp(primals, tangents):
    q, k, v = primals
    qd, kd, vd = tangents
    c = 1 / jnp.sqrt(q.shape[-1])
    p = jax.nn.softmax(q @ k.mT * c)
    sd = (qd @ k.mT + q @ kd.mT) * c
    pd = p * (sd - jnp.sum(p * sd, -1, keepdims=True))
    return p @ v, pd @ v + p @ vd


@jax.custom_jvp
def attention_saved_probs(q, k, v):
    return jax.nn.softmax(q @ k.mT / jnp.sqrt(q.shape[-1])) @ v


@attention_saved_probs.defjvp
def _attention_saved_probs_jvp(primals, tangents):
    q, k, v = primals
    qd, kd, vd = tangents
    c = 1 / jnp.sqrt(q.shape[-1])
    out = jax.nn.softmax(q @ k.mT * c) @ v
    # the linear map is fixed at the primal point
    q, k, v = lax.stop_gradient((q, k, v))
    p = jax.nn.softmax(q @ k.mT * c)
    sd = (qd @ k.mT + q @ kd.mT) * c
    pd = p * (sd - jnp.sum(p * sd, -1, keepdims=True))
    return out, pd @ v + p @ vd


# (B, T, H, D), causal switch as a static argument
@partial(jax.custom_vjp, nondiff_argnums=(3,))
def mha(query, key, value, causal=False):
    return _mha_fwd(query, key, value, causal)[0]


def _logits(query, key, causal):
    w = jnp.einsum("bqhd,bkhd->bhqk", query, key) * key.shape[-1] ** -0.5
    if causal:
        t, s = w.shape[-2:]
        assert t <= s
        keep = jnp.tril(jnp.ones((t, s), bool), s - t)
        w = jnp.where(keep, w, jnp.finfo(w.dtype).min)
    return w


def _mha_fwd(query, key, value, causal):
    p = jax.nn.softmax(_logits(query, key, causal))
    return jnp.einsum("bhqk,bkhd->bqhd", p, value), (query, key, value, p)


def _mha_bwd(causal, res, g):
    query, key, value, p = res
    dp = jnp.einsum("bqhd,bkhd->bhqk", g, value)
    ds = p * (dp - jnp.einsum("bhqk,bhqk->bhq", dp, p)[..., None])
    scale = key.shape[-1] ** -0.5
    dquery = jnp.einsum("bhqk,bkhd->bqhd", ds, key)
    dkey = jnp.einsum("bhqk,bqhd->bkhd", ds, query) * scale
    dvalue = jnp.einsum("bhqk,bqhd->bkhd", p, g)
    return dquery, dkey, dvalue


mha.defvjp(_mha_fwd, _mha_bwd)


def single_head(q, k, v, mask=None):
    """(T, D); mask True = attend. No custom rule: jax does the rest."""
    s = q @ k.T / jnp.sqrt(q.shape[-1])
    if mask is not None:
        s = jnp.where(mask, s, jnp.finfo(s.dtype).min)
    w = jax.nn.softmax(s, axis=-1)
    if mask is not None:
        w = jnp.where(mask.any(-1, keepdims=True), w, 0.0)
    return w @ v


def single_head_columns(q, k, v):
    s = q @ k.T / jnp.sqrt(q.shape[-1])
    return jax.nn.softmax(s, axis=0) @ v
