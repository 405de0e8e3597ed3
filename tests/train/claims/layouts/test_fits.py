"""What fits is found, compared, and nothing is proven where nothing fits."""

import itertools
import math
import types

import claim_cases
import jax
import pytest
import support

from paraxis.configs import schema
from paraxis.sharding.meter import aot
from paraxis.train.claims.layouts import fits as claims_fits


@pytest.fixture
def run():
  return claim_cases.run_of('ring_self_attention')


def largest(need, start, step, close):
  """(largest that fits, tries) against a plain search."""
  tried = []

  def counted(size):
    assert size > 0 and size % step == 0 and size not in tried
    tried.append(size)
    return need(size)

  good, bad = claims_fits.most(counted, 100.0, start, step, close)
  right = max(n for n in range(0, 20000 * step, step) if need(n) <= 100)
  assert good <= right < bad <= good + max(step, close * good)
  assert (bad in tried and good in tried) or not good
  return good, len(tried)


def test_most_finds_what_a_plain_search_finds():
  for base, line, square, known in itertools.product(
    (0.0, 30.0), (1.0, 0.02), (0.0, 1e-3, 1e-5), (True, False)
  ):

    def need(size, base=base, line=line, square=square, known=known):
      used = base + line * size + square * size**2
      return used if known or used <= 100 else math.inf

    for start, step, close in ((8, 1, 0.02), (64, 8, 0.0), (512, 64, 0.05)):
      _, tries = largest(need, start, step, close)
      assert tries <= 10


def test_most_with_steps_and_when_nothing_fits():
  padded = lambda size: -(-size // 100) * 5.0  # tiles of 100
  assert largest(padded, 10, 1, 0.0)[0] == 2000
  assert largest(lambda size: 101.0 * (size > 0), 512, 64, 0.02)[0] == 0
  assert largest(lambda size: size * math.inf if size else 0, 64, 64, 0)[0] == 0


@pytest.fixture
def chips(monkeypatch):
  """Machines of 100 bytes a device; a step needs what `price` says."""
  made = lambda name: types.SimpleNamespace(hbm=100.0, devices=range(int(name)))
  monkeypatch.setattr(aot, 'topology', made)
  asked = []

  def price(config, topology):
    asked.append(config)
    rows, tokens = config.train.batch_size, config.data.sequence_length
    shards = config.mesh.context * config.mesh.tensor
    assert shards == len(topology.devices)
    return 1 + rows * tokens / shards / 4

  monkeypatch.setattr(claims_fits, 'needed', price)
  return asked


def fits(run, at_least, wide_first=False, **given):
  layouts = {
    'long': dict(topology='8', mesh=dict(context=8, context_form='rsa')),
    'wide': dict(topology='2', mesh=dict(tensor=2, sequence=False)),
  }
  return claims_fits.most_that_fits(
    run,
    model=dict(position='learned', num_layers=3),
    layouts=dict(reversed(layouts.items())) if wide_first else layouts,
    at_least=at_least,
    close=0.0,
    **given,
  )


def test_layouts_are_compared(run, chips):
  rows = dict(vary='rows', given=8, start=4)
  outcome = fits(run, 4, **rows)
  assert outcome.passed and outcome.measured == '4.0x'  # 396 / 99
  assert 'long 396 (8 chips' in outcome.caveat
  assert 'wide 99 (2 chips' in outcome.caveat
  found = fits(run, 4.01, **rows)
  assert found.passed and found.verdict == 'direction only'
  assert not outcome.verdict
  assert not fits(run, 0.1, wide_first=True, **rows).passed
  tokens = dict(vary='tokens', given=1, start=64)
  outcome = fits(run, 4, **tokens)
  assert outcome.passed and outcome.measured == '4.1x'  # 3136 / 768, by 64
  models = {(c.model.num_layers, c.model.max_positions) for c in chips}
  assert models == {(3, c.data.sequence_length) for c in chips}
  assert {c.mesh.context_form for c in chips if c.mesh.context > 1} == {'rsa'}


def test_a_layout_that_never_fits_proves_nothing(run, chips):
  outcome = fits(run, 2, vary='rows', given=10**6, start=4)
  assert not outcome.passed and 'wide 0 ' in outcome.caveat


def test_settings_of_the_compiler_come_back():
  level = jax.config.jax_optimization_level
  with pytest.raises(KeyError), claims_fits._quickly():
    assert jax.config.jax_optimization_level == 'O0' != level
    raise KeyError
  assert jax.config.jax_optimization_level == level


MODEL = dict(
  vocab_size=256, d_model=128, num_layers=2, num_heads=4, d_ff=256,
  num_kv_heads=0,
)  # fmt: skip


@support.compiles('tpu')
@pytest.mark.sampled(4)
def test_scores_are_kept_by_one_form_and_not_by_the_other(run):
  topology = aot.topology('v5e:2x2')

  def need(form, tokens, rows=8):
    mesh = schema.Mesh(context=4, context_form=form, context_order='contiguous')
    config = claims_fits._config(run.config, MODEL, mesh, rows, tokens)
    return claims_fits.needed(config, topology)

  growth = {}
  for form in ('rsa', 'ring'):
    small, large = need(form, 1024), need(form, 2048)
    growth[form] = large / small
  scores = 2 * 8 * 4 * 2048 * 2048 * 4 / 4  # layers, rows, heads, float32
  assert large + scores < need('rsa', 2048)
  assert growth['ring'] < 2.1 < 2.5 < growth['rsa']
  assert need('rsa', 2048, rows=2048) == math.inf
