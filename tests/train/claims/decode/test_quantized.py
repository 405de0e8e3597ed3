"""Claims about weights of 4 bits hold, and fail when they are broken."""

import jax
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.pallas_kernels.matmul import quantized as quantized_matmul
from paraxis.train import program as job_lib
from paraxis.train.claims import harness as claims
from paraxis.train.claims.decode import quantized as claims_quantized

SMALL = dict(d_model=128, d_ff=128, num_layers=2, num_heads=2)


def run(**fields):
  """claims.Run of the config, shrunk."""
  config = command_line.load('marlin')
  config.model.update(SMALL | fields)
  return claims.Run(schema.view(config), '', say=lambda text: None)


def test_forms_agree(monkeypatch):
  ask = lambda: claims_quantized.forms_agree(
    None, tokens=3, inputs=256, outputs=8, within=1e-12
  )
  assert ask().passed and 'int4 and uint8' in ask().caveat
  unpack = quantized_matmul.unpack
  monkeypatch.setattr(quantized_matmul, 'unpack', lambda p: unpack(p)[::-1])
  assert not ask().passed and 'NOT' in ask().measured


def test_rounding(monkeypatch):
  ask = lambda: claims_quantized.rounding(run(), within=1e-4)
  assert ask().passed and float(ask().measured.split()[0]) > 0.49
  quantize = quantized_matmul.quantize

  def down(w):
    q, scale = quantize(w)
    return (q.astype('int8') - 1).astype(q.dtype), scale

  monkeypatch.setattr(quantized_matmul, 'quantize', down)
  assert not ask().passed


def test_bytes():
  ask = lambda expected: claims_quantized.read_bytes(
    None, tokens=[16, 1], inputs=18432, outputs=73728, expected=expected,
    within=0.01,
  )  # fmt: skip
  assert ask(3.87).passed and '4.125 bits' in ask(3.87).caveat
  assert not ask(4.0).passed
  model = dict(d_model=128, d_ff=256, num_layers=1, vocab_size=0)
  whole = lambda at_least: claims_quantized.model_bytes(
    None, model=model, at_least=at_least
  )
  assert whole(3.85).passed and whole(3.85).measured == '3.88 x'
  assert not whole(3.9).passed


def test_what_is_rounded():
  job = job_lib.of_shapes(run().config, '', jax.devices()[:1])
  with job.context():
    params = job.initial_state().params
    small, count = claims_quantized.rounded(params)
  changed = {p for p in params if np.any(params[p] != small[p])}
  assert changed == {
    f'layers/{p}' for p in claims_quantized.INPUTS
  } and count == sum(params[p].size for p in changed)
  for path in changed:
    w, q = np.asarray(params[path]), np.asarray(small[path])
    assert w.shape == q.shape and w.dtype == q.dtype
    assert np.abs(w - q).max() < np.abs(w).max() / 13
  # An output of attention: the inputs are all its heads.
  w = np.asarray(params['layers/attention/output'])[1].reshape(128, 128)
  q, scale = quantized_matmul.quantize(w)
  wanted = quantized_matmul.dequantize(q, scale).reshape(2, 64, 128)
  np.testing.assert_array_equal(small['layers/attention/output'][1], wanted)
  with pytest.raises(errors.UserError, match='none of the parameters'):
    claims_quantized.rounded({'embedding': np.ones((4, 4))})


@pytest.mark.aot
def test_compiled():
  from paraxis.sharding.meter import aot

  if aot.missing('tpu'):
    pytest.skip(aot.missing('tpu'))
  found = claims_quantized.compiled(
    None, topologies=['v5e:1x1'], tokens=16, inputs=4096, outputs=14336
  )
  assert found.passed and 'v5e:1x1 0 against' in found.caveat


def test_perplexity(tiny, tmp_path):
  """A model is trained, rounded and asked twice."""
  config = tiny.config({
    'model.d_model': 128, 'model.d_ff': 128, 'model.num_heads': 2,
    'model.head_dim': 64, 'train.steps': 2, 'train.batch_size': 4,
  })  # fmt: skip
  ask = lambda at_most: claims_quantized.perplexity(
    claims.Run(config, tmp_path, lambda text: None), at_most=at_most
  )
  found = ask(2)
  assert 'parameters in 4 bits' in found.caveat
  assert 0.9 < float(found.measured) < 1.1
  assert not ask(0.5).passed
