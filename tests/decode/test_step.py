"""Of a prompt, attention visits only blocks that its mask lets it see.

What it computes is tested in test_loop.py and tests/models/mixers/.
"""

import jax
import pytest

from paraxis.configs import schema
from paraxis.decode import step
from paraxis.models import build
from paraxis.pallas_kernels.attention import xla as attention_xla

BLOCK, BLOCKS = 16, 4
LENGTH = BLOCK * BLOCKS


@pytest.fixture
def visits(monkeypatch):
  """visits(fields of the model): block pairs of a layer's prefill."""
  counts = []
  pairs = attention_xla.visible_pairs

  def seen(*given):
    found = pairs(*given)
    counts.append(len(found))
    return found

  monkeypatch.setattr(attention_xla, 'visible_pairs', seen)

  def run(**model):
    config = schema.view(
      {
        'model': dict(
          vocab_size=32, d_model=16, num_layers=1, num_heads=2, d_ff=16,
          attention_block=BLOCK, attention='xla',
        ) | model,
      }
    )  # fmt: skip
    built = build.build(config, 'data=1', devices=jax.devices()[:1])
    counts.clear()
    with build.use(built):
      params = jax.eval_shape(
        lambda key: built.model.unstack(built.model.init(key)),
        jax.random.key(0),
      )
      tokens = jax.ShapeDtypeStruct((1, LENGTH), 'int32')
      lengths = jax.ShapeDtypeStruct((1,), 'int32')
      run = lambda *x: step.prefill(built.model, *x, 2 * LENGTH)
      jax.eval_shape(run, params, tokens, lengths)
    return max(counts)

  return run


def test_full_attention_visits_a_triangle(visits):
  assert visits() == BLOCKS * (BLOCKS + 1) // 2


def test_a_window_visits_its_band(visits):
  near = visits(pattern='W', window=BLOCK)
  assert near == 2 * BLOCKS - 1
  assert visits(pattern='W', window=2 * BLOCK) == 3 * BLOCKS - 3


def test_latent_attention_visits_a_triangle(visits):
  assert visits(pattern='A') == BLOCKS * (BLOCKS + 1) // 2
