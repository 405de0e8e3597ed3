"""Decoders of one pass, on models that learned little, and their tasks.

Legend: B rows, N tokens.
"""

import jax
import numpy as np
import pytest

from paraxis.configs import cppd
from paraxis.configs import paraformer
from paraxis.configs import presets
from paraxis.configs import schema
from paraxis.train.claims import harness
from paraxis.train.claims import on_frames
from paraxis.train.claims.decode import one_pass

END, FIRST = on_frames.END, on_frames.FIRST
CONFIG = schema.view(presets.tiny(d_model=16, d_ff=16, num_heads=2))


def _run(tmp_path):
  return harness.Run(CONFIG, tmp_path / 'own', lambda line: None)


def test_edits_are_counted():
  """Against every way to align two short sequences."""

  def slowly(a, b):
    if not a or not b:
      return len(a) + len(b)
    away = min(slowly(a[1:], b), slowly(a, b[1:])) + 1
    return min(away, slowly(a[1:], b[1:]) + (a[0] != b[0]))

  rng = np.random.default_rng(0)
  for _ in range(50):
    a, b = (rng.integers(0, 3, rng.integers(0, 6)).tolist() for _ in 'ab')
    assert on_frames.distance(a, b) == slowly(a, b)
  rows = np.array([[4, 5, END, END], [4, 4, 4, END]])
  wanted = np.array([[4, 6, END, END], [4, END, END, END]])
  assert on_frames.error(rows, wanted) == 1.0  # 1 and 2 edits of 2 and 1 tokens
  assert on_frames.error(rows, rows) == 0
  other = np.array([[4, 5, 6, END], [4, 4, END, END]])
  assert on_frames.error(other, rows) == pytest.approx(2 / 5)


def test_symbols_are_stretched():
  task = on_frames.Symbols(noise=0.0)
  frames, ids, count = on_frames.draw(task, 20, 0)
  codes = np.random.default_rng(0).normal(size=(task.classes, task.numbers))
  for b, n in enumerate(count):
    word = ids[b, :n] - FIRST
    assert (ids[b, n:] == END).all() and (np.diff(word) != 0).all()
    there = np.abs(frames[b]).sum(1) > 0
    near = ((frames[b, there][:, None] - codes) ** 2).sum(-1).argmin(1)
    first = np.flatnonzero(np.diff(near, prepend=-1))
    assert near[first].tolist() == word.tolist()
    lengths = np.diff(first, append=len(near))
    assert lengths.min() >= 1 and lengths.max() <= 4


def test_digits_are_drawn():
  task = on_frames.Digits(noise=0.0)
  frames, ids, count = on_frames.draw(task, 20, 0)
  for b, n in enumerate(count):
    ink = frames[b].sum(1) > 0
    assert (np.diff(ink, prepend=0) & ink).sum() == n  # a gap behind each
    # The ink of a row is that of its glyphs, wherever they are and how wide.
    glyphs = [on_frames.GLYPHS[i - FIRST] for i in ids[b, :n]]
    least = sum(g.count('1') for g in glyphs)
    assert least <= frames[b].sum() <= 2 * least


@pytest.mark.parametrize(
  'kind', [on_frames.Causal, one_pass.Fired, one_pass.Counted]
)
def test_answers_are_classes_and_every_parameter_is_trained(kind):
  """Answers are classes, then ends; the loss reaches every parameter."""
  task = on_frames.Symbols(most=3)
  model = kind(CONFIG, task)
  params = model.init(jax.random.key(0))
  frames, ids, count = on_frames.draw(task, 4, 0)
  found = np.asarray(model.answers(params, frames))
  assert found.shape == ids.shape
  ended = np.cumsum(found == END, 1) > 0
  assert (found[~ended] >= FIRST).all() and (found[ended] == END).all()
  value = model.loss(params, frames, ids, count, jax.random.key(1))
  grads = jax.grad(model.loss)(params, frames, ids, count, jax.random.key(1))
  assert np.isfinite(value)
  sizes = {k: abs(np.asarray(x)).max() for k, x in _leaves(grads)}
  assert all(n > 0 for n in sizes.values()), sizes


def _leaves(tree):
  return [
    (jax.tree_util.keystr(p), x) for p, x in jax.tree.leaves_with_path(tree)
  ]


def test_writing_one_by_one_is_the_row():
  """Each token is the likeliest behind those before it, by whole rows."""
  task = on_frames.Symbols(most=3)
  model = on_frames.Causal(CONFIG, task)
  params = model.init(jax.random.key(0))
  frames, _, _ = on_frames.draw(task, 4, 0)
  found = np.asarray(model.answers(params, frames))
  for b in range(4):
    row = [on_frames.HOLE]
    h = model.encoded(params, frames[b : b + 1])
    for n in range(task.most):
      x = model.read(params, h, np.array([row], np.int32))
      z = np.array(model.logits(params, x))[0, -1]
      z[:END] = -np.inf
      want = END if END in row else int(z.argmax())
      assert found[b, n] == want
      row.append(int(z.argmax()))


def test_a_claim_has_both_and_its_trainings(tmp_path):
  on = dict(
    task='symbols', fields={'train.steps': 2, 'train.batch_size': 2,
    'optimizer.warmup_steps': 1}, seeds=[0], rows=4,
  )  # fmt: skip
  found = one_pass.beside(
    _run(tmp_path), on=on, model='fired', by=2.0, at_most=2.0
  )
  assert found.passed
  assert '1 pass of the decoder against 8' in found.caveat
  records = sorted(p.parent.name for p in tmp_path.rglob('training.json'))
  assert records == ['causal-0', 'fired-0']


def test_one_pass_is_beside_what_has_learned(monkeypatch, tmp_path):
  """As bad as a decoder that knows nothing is not within a claim."""
  errors = dict(causal=[0.06, 0.05, 0.07], fired=[0.07, 0.06, 0.07])
  made = lambda run, name, make, on: (
    dict(error=errors[name], length=[1.0] * 3), 1.0
  )  # fmt: skip
  monkeypatch.setattr(on_frames, 'trained', made)
  claims = [dict(c[2]) for c in (*paraformer.claims(), *cppd.claims())]
  claims = [c | dict(model='fired') for c in claims
            if c['check'] is one_pass.beside]  # fmt: skip
  ask = lambda check, **given: check(_run(tmp_path), **given)
  assert len(claims) == 2 and all(ask(**c).passed for c in claims)
  errors |= dict(causal=[0.5, 0.6, 0.6], fired=[0.1, 0.1, 0.1])
  assert not any(ask(**c).passed for c in claims)


def _first_losses(*kinds):
  """(loss, gradients) of models of one task, of the same parameters."""
  task = on_frames.Symbols(most=3)
  given = on_frames.draw(task, 4, 0)
  for kind in kinds:
    model = kind(CONFIG, task)
    params = model.init(jax.random.key(0))
    yield jax.value_and_grad(model.loss)(params, *given, jax.random.key(1))


def test_what_is_shown_changes_the_loss():
  found = _first_losses(one_pass.Fired, one_pass.Unshown)
  first, second = (float(loss) for loss, _ in found)
  assert abs(first - second) > 1e-3


def test_counts_are_learned_or_not():
  """The logits of how often, columns 0 to 3 of the heads, of 3 tokens."""
  found = _first_losses(one_pass.Counted, one_pass.Uncounted)
  (first, learned), (second, left) = found
  assert first - second > 0.1  # nats of a count
  assert (abs(np.asarray(learned['heads'][:, :4])).max(0) > 0).all()
  np.testing.assert_array_equal(left['heads'][:, :4], 0)
  assert abs(np.asarray(left['heads'][:, 4])).max() > 0


def test_fewer_edits_are_of_the_first(monkeypatch, tmp_path):
  errors = dict(fired=[0.1, 0.2, 0.3], unshown=[0.2, 0.3, 0.41])
  made = lambda run, name, make, on: (dict(error=errors[name]), 1.0)
  monkeypatch.setattr(on_frames, 'trained', made)
  ask = lambda *models: one_pass.fewer_edits(
    _run(tmp_path), on=dict(rows=4), models=list(models)
  )
  assert ask('fired', 'unshown').passed
  assert ask('unshown', 'fired').verdict == 'opposite'


def test_a_frame_that_is_not_split_is_found(tmp_path):
  given = dict(paraformer.claims()[0][2])
  assert given.pop('check') == one_pass.as_a_loop
  assert given['within'] < 2.5 * given['length'] * np.finfo(float).eps
  assert one_pass.as_a_loop(_run(tmp_path), **given).passed
  with one_pass.not_split():
    assert not one_pass.as_a_loop(_run(tmp_path), **given).passed
