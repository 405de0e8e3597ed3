"""Gated DeltaNet against its definition, token by token.

Legend: B rows, T tokens, D model, N heads of values, G heads of q and k, K and
V their widths, W taps.
"""

import dataclasses

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import checks
from paraxis.models.mixers import gated_delta
from paraxis.pallas_kernels import registry

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, N, G, K, V, W = 2, 7, 6, 4, 2, 4, 3, 3


def config_of(**own):
  own = dict(
    heads=G, value_heads=N, key_dim=K, value_dim=V, conv_width=W
  ) | own  # fmt: skip
  return schema.Model(
    d_model=D, num_heads=3, num_layers=2, pattern='D', dtype='float64',
    param_dtype='float64', gated_delta=mixer_schema.GatedDelta(**own),
  )  # fmt: skip


SEE = module_cases.see_of(((3, 1, 2), (7,)), T)
X = np.random.default_rng(1).normal(size=(B, T, D))


def module(**own):
  return module_cases.module(gated_delta.GatedDelta, config_of(**own), 'D', 0.5)


def loop(w, x, most=1, grouped=True):
  """y_BTD; most: of a share. grouped: value heads follow one another."""
  rows = []
  for b in range(B):
    heads = lambda name, b=b: jnp.einsum('td,dnh->tnh', x[b], w[name])
    q, k, v = (
      module_cases.convolved(
        w[f'{name}_conv'], heads(name), SEE.positions[b]
      )
      for name in ('query', 'key', 'value')
    )  # fmt: skip
    q, k = (y / jnp.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    z, step, share = heads('output_gate'), x[b] @ w['step'], x[b] @ w['share']
    rate = jnp.exp(w['a_log'])
    group = np.arange(N) // (N // G) if grouped else np.arange(N) % G
    s = jnp.zeros((N, K, V))
    for t in range(T):
      s = 0 * s if SEE.positions[b, t] == 0 else s
      decay = jnp.exp(-rate * jnp.logaddexp(0, step[t] + w['step_bias']))
      s, now = s * decay[:, None, None], k[t, group]
      more = v[t] - jnp.einsum('nkv,nk->nv', s, now)
      more = more * (most / (1 + jnp.exp(-share[t])))[:, None]
      s = s + now[..., None] * more[:, None]
      o = jnp.einsum('nkv,nk->nv', s, q[t, group]) * K**-0.5
      o = o / jnp.sqrt((o * o).mean(-1, keepdims=True) + 1e-6)
      o = o * w['output_norm'] * jax.nn.silu(z[t])
      rows.append(jnp.einsum('nv,nvd->d', o, w['output']))
  return jnp.stack(rows).reshape(x.shape)


@pytest.mark.parametrize('most', [1, 2])
def test_equals_a_loop_over_tokens(most):
  run, values = module(reflect=most == 2)
  module_cases.assert_equal(
    lambda w, x: run(w, x, SEE)[0], lambda w, x: loop(w, x, most), values, X,
    SEE.segments > 0,
  )  # fmt: skip


def test_the_order_of_heads_is_seen():
  values = module()[1]
  found, other = (
    jax.jit(loop, static_argnums=(2, 3))(values, X, 1, g) for g in (0, 1)
  )
  assert not module_cases.close(found, other, 1e-3)


def test_narrow_arithmetic_keeps_wide_states():
  """bfloat16 inside, float32 in decays, shares and states."""
  run, values = module()
  exact = jax.jit(loop)(values, X)
  cast = lambda tree, dtype: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
  narrow = cast(values, 'f4'), cast(X, jnp.bfloat16)
  y, (memory, tails), _ = jax.jit(
    lambda w, x: run(w, x, SEE, 'empty')
  )(*narrow)  # fmt: skip
  assert y.dtype == jnp.bfloat16 and memory.dtype == jnp.float32
  assert {t.dtype for t in tails} == {jnp.dtype('bfloat16')}
  here = (SEE.segments > 0)[..., None]
  error = np.abs(here * (y.astype(np.float64) - exact)).max()
  assert 1e-4 < error / np.abs(here * exact).max() < 0.05


def test_sizes_by_default_are_those_of_attention():
  config = schema.Model(d_model=64, num_heads=4)
  assert gated_delta.sizes(config) == (4, 4, 16, 16)


@pytest.mark.parametrize('own, scan, text', [
  (dict(heads=3), 'auto', 'value_heads=4 .*heads=3'),
  ({}, 'pallas_tpu', "delta_scan: no implementation 'pallas_tpu'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(own, scan, text):
  model = dataclasses.replace(config_of(**own), scan=scan)
  with pytest.raises(errors.UserError, match=text):
    gated_delta.GatedDelta.check(model)


@pytest.mark.parametrize('pattern, own', [('D', True), ('DG', False)])
def test_scans_of_its_own_are_named(monkeypatch, pattern, own):
  """An implementation that gated scans lack, where a device takes it."""
  gpu = registry.Target('gpu', 'NVIDIA H100')
  monkeypatch.setattr(registry, 'current_target', lambda: gpu)
  model = dataclasses.replace(config_of(), scan='batched', pattern=pattern)
  if own:
    return checks.check_model(model)
  with pytest.raises(errors.UserError, match="gated_scan: no .* 'batched'"):
    checks.check_model(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
  'mesh', [dict(tensor=8, collectives='explicit'), dict(stage=2, tensor=4)],
  ids=str,
)  # fmt: skip
def test_a_layout_equals_one_device(mesh):
  """What tests/train/certify/test_invariance_mixers.py does not meet: several
  heads of values for one of keys."""
  own = mixer_schema.GatedDelta(
    heads=8, value_heads=16, key_dim=3, value_dim=2, reflect=True
  )
  model = schema.Model(
    vocab_size=32, d_model=16, num_heads=8, head_dim=2, d_ff=16, num_layers=2,
    pattern='D', dtype='float64', param_dtype='float64', gated_delta=own,
  )  # fmt: skip
  rows = module_cases.certified(model, **mesh)
  assert len(rows) == 2 and all(row.passed for row in rows), rows
