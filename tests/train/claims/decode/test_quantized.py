"""Claims about weights of 4 bits hold, and fail when they are broken."""

import contextlib
import types

import claim_cases
import jax
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.pallas_kernels.matmul import quantized as quantized_matmul
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.claims import ablation
from paraxis.train.claims.decode import quantized as claims_quantized
from paraxis.train.run import evaluate

SMALL = {
  'model.d_model': 128, 'model.d_ff': 256, 'model.num_layers': 2,
  'model.num_heads': 2,
}  # fmt: skip


def run():
  return claim_cases.run_of('marlin', SMALL)


def test_forms_agree():
  unpack = quantized_matmul.unpack
  right, wrong = claim_cases.holds_until(
    quantized_matmul, 'unpack', lambda *packed: unpack(*packed)[::-1],
    claims_quantized.forms_agree, tokens=3, inputs=256, outputs=8, within=1e-12,
  )  # fmt: skip
  assert 'int4 and uint8' in right.caveat and 'NOT' in wrong.caveat


def test_rounding():
  quantize = quantized_matmul.quantize

  def down(w):
    q, scale = quantize(w)
    return (q.astype('int8') - 1).astype(q.dtype), scale

  right, _ = claim_cases.holds_until(
    quantized_matmul, 'quantize', down, claims_quantized.rounding, run(),
    group=128, within=1e-4,
  )  # fmt: skip
  assert float(right.measured.split()[0]) > 0.49
  assert '2 of 14 matrices have several groups' in right.caveat


def test_one_scale_a_column_is_not_enough():
  claim_cases.falls('marlin', 'one_scale_a_column', SMALL)


def test_bytes():
  ask = lambda expected: claims_quantized.read_bytes(
    None, tokens=[16, 1], inputs=18432, outputs=73728, expected=expected,
    within=0.01,
  )  # fmt: skip
  assert ask(3.87).passed and '4.125 bits' in ask(3.87).caveat
  assert not ask(4.0).passed
  model = dict(d_model=128, d_ff=256, num_layers=1, vocab_size=0)
  whole = lambda bits, **fields: claims_quantized.model_bytes(
    None, model=model | fields, bits=bits
  )
  assert whole(4.125).passed and whole(4.125).measured == '3.88 x'
  assert whole(4.125, vocab_size=1280).measured == '1.59 x'
  assert whole(4.125, vocab_size=1280).passed
  assert not whole(4).passed and not whole(4.25).passed


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


CHIP = dict(topologies=['v5e:1x1'], tokens=16, inputs=4096, outputs=14336)


@support.compiles('tpu')
def test_compiled():
  found = claims_quantized.compiled(None, **CHIP)
  assert found.passed and 'v5e:1x1 0 against' in found.caveat


def test_a_kernel_with_temporaries_is_found(monkeypatch):
  claim_cases.compiled_to(monkeypatch, 'tpu_custom_call', temporaries=2**20)
  found = claims_quantized.compiled(None, **CHIP)
  assert not found.passed and '1048576 against 1 MiB' in found.caveat


def test_perplexity(monkeypatch):
  """800 bytes in 400 tokens: a bit per byte is two per token."""
  before, after = {'mlp/up': np.zeros(10)}, {'mlp/up': np.ones(10)}
  bits = {0.0: 2.0, 1.0: 2.05}  # by weights
  job = types.SimpleNamespace(
    built=None, optimizer=None, held_out=[types.SimpleNamespace(n_pairs=400)],
    context=contextlib.nullcontext,
  )  # fmt: skip
  measure = lambda params: evaluate.Evaluation(
    bits[float(params['mlp/up'][0])], {}, 800
  )
  step = types.SimpleNamespace(evaluate=None)
  trained = types.SimpleNamespace(
    opened=(job, before), record=dict(cpu_seconds=1)
  )
  monkeypatch.setattr(
    ablation, 'trained', lambda *given: {'float': [trained] * 3}
  )
  monkeypatch.setattr(step_lib, 'make', lambda *given: step)
  monkeypatch.setattr(evaluate, 'Evaluator', lambda *given: measure)
  monkeypatch.setattr(claims_quantized, 'rounded', lambda params: (after, 10))
  ask = lambda at_most: claims_quantized.perplexity(
    run(), seeds=[0] * 3, at_most=at_most
  )
  found = ask(1.1)
  assert found.passed and f'4 bits over float {2**0.1:.4f}' in found.caveat
  assert found.verdict == 'reproduced'
  assert '10 of 10 parameters in 4 bits' in found.caveat
  assert not ask(1.05).passed
  bits[1.0] = 2.0  # nothing was rounded
  assert not ask(1.1).passed
