"""Random parameters and held-out text, on which a wrong layout shows.

Batches are in trial.py; `objective` is what a run's objective makes of them.

Legend: B rows, T tokens.
"""

import pathlib

import jax
import numpy as np

from paraxis.train import expert_counts
from paraxis.train.data import objectives
from paraxis.train.data import token_cache

NARROW = 'bfloat16'


def objective(config, batch, t, seed):
  """A batch of all rows of step t as train.objective has it."""
  rows = len(batch.tokens)
  return objectives.batch(config, batch, t, range(rows), rows, seed)


def _of_first_gate(shift):
  return np.array([shift, 0, 0])[:, None, None]


# End of a path -> what is added to a parameter, so that a state outlives the
# shards of a row: decays near 1, gates that let little in.
LASTING = {
  '/mamba2/a_log': -4.0,
  '/mamba/a_log': -4.0,
  '/gated_linear/decay_bias': 3.0,
  '/rg_lru/rate': -5.0,
  '/gated_delta/a_log': -4.0,
  '/gru/bias': _of_first_gate(-4.0),
  '/lstm/bias': _of_first_gate(4.0),
}


def parameters(runner, seed=0):
  """Random NumPy parameters: at their initial 1 and 0, scales and biases hide
  mistakes; states would be forgotten before they cross two shards.

  Smaller in bfloat16: of a model that magnifies every rounding, such as one of
  recurrences and adapters at 0.3, not a digit of the gradient is left.
  """
  rng = np.random.default_rng(seed)
  draw = {
    'vector': lambda shape: rng.normal(0.5, 0.3, shape),
    expert_counts.LOAD: lambda shape: rng.integers(1, 9, shape),
    expert_counts.BIAS: lambda shape: rng.normal(0, 0.01, shape),
  }
  spread = 0.1 if runner.config.model.dtype == NARROW else 0.3
  plain = lambda shape: rng.normal(0, spread, shape)
  kinds = runner.job.model.kinds
  out = {}
  for path, leaf in sorted(runner.job.built.params.items()):
    value = draw.get(kinds[path], plain)(leaf.shape)
    value = value + sum(x for p, x in LASTING.items() if path.endswith(p))
    if runner.config.model.dtype == NARROW:  # the float32 run has the same
      value = value.astype(jax.numpy.bfloat16)
    out[path] = value.astype(leaf.dtype)
  return out


def corpus(config, seed=0):
  """token_cache.Corpus of random tokens, all held out: two domains.

  One is longer than two steps, so that train.eval_batches leaves text out, the
  other shorter than one; documents are shorter and longer than a row.
  """
  rng = np.random.default_rng(seed)
  B, T = config.train.batch_size, config.data.sequence_length
  counts = 4 * B, 3
  lengths = rng.integers(3, T + T // 2, sum(counts))
  starts = np.append(0, np.cumsum(lengths))
  tokens = rng.integers(0, config.model.vocab_size, starts[-1], np.int32)
  return token_cache.Corpus(
    tokens=tokens,
    starts=starts,
    domain_ids=np.repeat(np.arange(2), counts),
    n_bytes=lengths,
    held=np.ones(len(lengths), bool),
    domains=('long', 'short'),
    fingerprint='',
    vocab_size=config.model.vocab_size,
    pad_id=0,
    path='random tokens',
    folder=pathlib.Path(),
  )
