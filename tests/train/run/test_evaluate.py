"""Bits per byte against a loop over documents; the same on any mesh."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.models import batch as batch_lib
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.run import evaluate
from paraxis.train.steps import gradients

T = 64
TEXTS = {
  'sea': ['salt', 'a gull over the wind', 'storm ' * 40, 'calm, and north'],
  'land': ['rock under rock', 'é'],
}


@pytest.fixture(scope='module')
def corpus(tiny):
  """A .jsonl with held-out documents shorter and longer than a row."""
  rows = [
    dict(text=text, domain=domain, split='held', id=f'{domain}{i}')
    for domain, texts in TEXTS.items()
    for i, text in enumerate(texts)
  ]
  rows += [dict(text='sail ' * 99, split='train') for _ in range(20)]
  path = tiny.folder / 'evaluated.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  return str(path)


def _job(tiny, corpus, mesh, microbatches=1):
  changes = {'train.eval_batches': 0, 'train.microbatches': microbatches}
  if 'stage' in mesh:
    changes['pipeline.microbatches'] = 2
  return tiny.job({'data.path': corpus, **changes}, mesh)


def test_an_evaluation_beats(tiny, corpus):
  """Or a watchdog would take a long one for a stall."""
  job, beats = _job(tiny, corpus, 'data=1'), []
  with job.context():
    made = step_lib.make(job.built, job.optimizer, 1.0)
    beat = lambda: beats.append(1)
    found = evaluate.Evaluator(job, made.evaluate, beat=beat)
    found(job.initial_state().params)
  batches = sum(len(held) // 8 + 1 for held in job.held_out)
  assert len(beats) == batches


@pytest.mark.parametrize('held, batches', [(0, 0), (8, 8), (20, 24)])
def test_an_evaluation_ends_between_batches(tiny, corpus, held, batches):
  """Not at every one: several processes agree on it."""
  job, done = _job(tiny, corpus, 'data=1'), []
  one = job.held_out[0]

  class Long:
    domain, n_bytes, n_pairs = 'sea', one.n_bytes, one.n_pairs
    __len__ = lambda self: 99
    batch_at = lambda self, i, lo, hi: one.batch_at(0, lo, hi)

  def run(params, batch):
    done.append(1)
    return jnp.ones(())

  beat = lambda: len(done) >= held
  with job.context():
    found = evaluate.Evaluator(job, None, [Long()], run, beat)(None)
  assert found is None and len(done) == batches


def test_a_long_evaluation_is_said_while_it_runs():
  """Not a short one: of 100 batches of a second the second one tells."""
  now, said = [0.0], []
  pace = evaluate.Pace(100, 5000, said.append, lambda: now[0])
  for done in range(1, 101):
    now[0] = 60.0 + done  # compiling took 60 s
    pace(done)
  assert said == [
    'evaluating 5,000 held-out tokens: about 98 s left; train.eval_batches '
    'reads fewer.',
    'evaluating: 32%, 68 s left',
    'evaluating: 62%, 38 s left',
    'evaluating: 92%, 8 s left',
  ]
  said.clear()
  pace = evaluate.Pace(9, 450, said.append, lambda: now[0])
  for done in range(1, 10):
    now[0] += 1
    pace(done)
  assert not said


def test_a_run_says_the_pace_of_its_evaluation(
  tiny, corpus, monkeypatch, tmp_path
):
  monkeypatch.setattr(evaluate.Pace, 'LONG', 0.0)
  changes = {'data.path': corpus, 'train.eval_batches': 0, 'train.steps': 1}
  _, said = tiny.run(tmp_path, changes)
  told = [line for line in said if line.startswith('evaluating')]
  assert len(told) == 1 and ' held-out tokens: about ' in told[0]


def _evaluate(job, params):
  with job.context():
    made = step_lib.make(job.built, job.optimizer, 1.0)
    placed = {
      p: jax.device_put(x, job.state.params[p].sharding)
      for p, x in params.items()
    }
    return evaluate.Evaluator(job, made.evaluate)(placed)


@pytest.fixture(scope='module')
def plain(tiny, corpus):
  """(parameters, {domain: nats}), document by document, piece by piece."""
  job = _job(tiny, corpus, 'data=1')
  params = jax.tree.map(np.asarray, job.model.init(jax.random.key(3)))

  @jax.jit
  def log_probabilities(params, tokens, segments):
    zero = jnp.zeros_like(tokens)
    positions = jnp.arange(T)[None]
    batch = batch_lib.Batch(tokens, zero, segments, positions, zero, 1.0)
    x, _ = job.model.features(params, batch)
    return jax.nn.log_softmax(job.model.logits(params, x))[0]

  nats = {}
  for domain, texts in TEXTS.items():
    nats[domain] = 0.0
    for text in texts:
      ids = [258, *text.encode(), 257]  # begin, bytes, end
      for at in range(0, len(ids) - 1, T):
        piece = ids[at : at + T + 1]
        n = len(piece) - 1
        tokens = np.zeros((1, T), np.int32)
        tokens[0, :n] = piece[:-1]
        segments = (np.arange(T)[None] < n).astype(np.int32)
        z = np.asarray(log_probabilities(params, tokens, segments))
        nats[domain] -= sum(z[i, piece[i + 1]] for i in range(n))
  return params, nats


@pytest.mark.parametrize(
  'mesh',
  ['data=1', 'data=8', 'data=2,fsdp=2,tensor=2', 'context=8']
  + ['data=2,context=2,tensor=2', 'stage=2', 'stage=2,data=2,tensor=2'],
)
def test_equals_a_plain_loop_on_any_mesh(tiny, corpus, plain, mesh):
  params, nats = plain
  result = _evaluate(_job(tiny, corpus, mesh), params)
  sizes = {d: sum(len(t.encode()) for t in ts) for d, ts in TEXTS.items()}
  assert list(result.domains) == ['land', 'sea']
  for domain, found in result.domains.items():
    want = nats[domain] / math.log(2) / sizes[domain]
    assert found == pytest.approx(want, rel=1e-5)
    targets = sum(len(t.encode()) + 1 for t in TEXTS[domain])
    assert result.losses[domain] == pytest.approx(
      nats[domain] / targets, rel=1e-5
    )
  assert result.n_bytes == sum(sizes.values())
  targets = sum(len(t.encode()) + 1 for ts in TEXTS.values() for t in ts)
  assert result.loss == pytest.approx(sum(nats.values()) / targets, rel=1e-5)
  want = sum(nats.values()) / math.log(2) / result.n_bytes
  assert result.bits_per_byte == pytest.approx(want, rel=1e-5)
  # Not the mean of the domains: they differ in size and in difficulty.
  assert abs(np.mean(list(result.domains.values())) - want) > 0.1


def test_tokens_in_another_order_are_seen(tiny, corpus, plain, monkeypatch):
  """In the order of the text, where the context axis wants zigzag."""
  params, nats = plain
  monkeypatch.setattr(job_lib.Job, 'token_order', lambda job, n=0: None)
  result = _evaluate(_job(tiny, corpus, 'context=8'), params)
  want = sum(nats.values()) / math.log(2) / result.n_bytes
  assert abs(result.bits_per_byte - want) > 1e-4 * want


def test_a_mean_instead_of_a_sum_on_stages_is_seen(
  tiny, corpus, plain, monkeypatch
):
  """The pipeline's total is of losses, which are divided by the targets."""
  params, nats = plain
  right = gradients.total_on_stages

  def wrong(built, params, batch):
    return right(built, params, batch) / batch.denominator

  monkeypatch.setattr(gradients, 'total_on_stages', wrong)
  result = _evaluate(_job(tiny, corpus, 'stage=2'), params)
  want = sum(nats.values()) / math.log(2) / result.n_bytes
  assert abs(result.bits_per_byte - want) > 1e-2 * want


def test_microbatches_change_no_bit_of_meaning(tiny, corpus, plain):
  params, _ = plain
  one = _evaluate(_job(tiny, corpus, 'data=4,tensor=2'), params)
  two = _evaluate(_job(tiny, corpus, 'data=4,tensor=2', 2), params)
  assert two.bits_per_byte == pytest.approx(one.bits_per_byte, rel=1e-6)
  assert two.n_bytes == one.n_bytes


def test_what_it_says():
  bits = {'land': 3.0, 'sea': 1.5}
  result = evaluate.Evaluation(2.0, bits, 10, 1.25, {'land': 2.0, 'sea': 1.0})
  assert result.values() == {
    'eval/bits_per_byte': 2.0,
    'eval/land/bits_per_byte': 3.0,
    'eval/sea/bits_per_byte': 1.5,
    'eval/loss': 1.25,
    'eval/land/loss': 2.0,
    'eval/sea/loss': 1.0,
  }
  assert result.line() == (
    'held-out bits per byte 2.0000 (land 3.000, sea 1.500), loss 1.2500'
  )
  bound = result._replace(bound=True)
  assert bound.values() == result.values() | {'eval/bits_per_byte_bound': 2.0}
  assert bound.line().startswith('held-out bits per byte (upper bound) 2.0000 ')
