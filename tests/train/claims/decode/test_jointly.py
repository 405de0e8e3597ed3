"""Heads that learn with their model, at sizes that a test can train."""

import claim_cases
import numpy as np

from paraxis.models.text import tokenizer
from paraxis.train.claims.decode import jointly

GIVEN = dict(
  fields={
    'model.d_model': 16, 'model.d_ff': 16, 'model.num_layers': 1,
    'model.num_heads': 2, 'train.steps': 3, 'optimizer.warmup_steps': 1,
  },
  recipe=dict(heads=2, length=32, rows=4, steps=4, batch=64, rate=1e-2),
  together=dict(steps=2, rows=4, rate=1e-2, slower=0.3, share=0.5),
  text=[1024, 2, 16, 12], within=1.05, method=dict(
    method='medusa', drafts=4
  ), seeds=[0],
)  # fmt: skip


def test_heads_alone_have_the_steps_of_both(monkeypatch, tmp_path):
  """The texts are those of one by one, of the model that they belong to."""
  steps, shaped, fit = [], [], jointly.distill.fit
  accuracy = jointly.distill.accuracy

  def seen(model, params, found, kind, recipe, *more):
    steps.append(recipe.steps)
    learned[:] = found.tokens
    return fit(model, params, found, kind, recipe, *more)

  def shaping(model, params, own, found, *more, **how):
    shaped.append(found.tokens)
    return accuracy(model, params, own, found, *more, **how)

  learned = []
  monkeypatch.setattr(jointly.distill, 'fit', seen)
  monkeypatch.setattr(jointly.distill, 'accuracy', shaping)
  monkeypatch.setattr(
    jointly.ablation, 'cpu_seconds', lambda rows: jointly.ablation.LIMIT
  )
  run = claim_cases.run_of('medusa', folder=tmp_path)
  found = jointly.more_tokens_a_call(run, **GIVEN)
  assert steps == [4, 4 + 2 * 4 * 32 // 64]
  assert 'the same texts' in found.caveat and found.seeds == 1
  assert (run.results / 'together-0.npz').exists()
  # Fits count beside the model's training; trees are of what nothing learns,
  # and no prompt is of.
  assert 'more than 1,800, for a training' in found.caveat
  text = jointly.draft.rows(
    tokenizer.load('bytes'), run.config.data.path, False, 1024, 32
  )
  np.testing.assert_array_equal(learned, text[:28])
  for rows in shaped:
    np.testing.assert_array_equal(rows, text[28:])
  # Other texts than those of one by one: the claim fails, whatever the gain is.
  gains = lambda *_: jointly.ablation.judged('more', [1.0])
  monkeypatch.setattr(jointly.ablation, 'more', gains)
  monkeypatch.setattr(jointly.ablation, 'at_most', gains)
  for same in ([True, True], [True, False], [False, True]):  # alone, together
    asked = iter(same)
    monkeypatch.setattr(jointly, '_asked', lambda *_, x=asked: (1.0, next(x)))
    found = jointly.more_tokens_a_call(run, **GIVEN)
    assert found.passed == found.sound == all(same)
