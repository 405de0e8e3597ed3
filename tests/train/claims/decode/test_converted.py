"""A conversion starts from what was learned, and is counted in its tokens."""

import dataclasses

import numpy as np
import pytest
import unmask_cases

from paraxis.configs import schema
from paraxis.train.claims import experiment
from paraxis.train.claims import harness
from paraxis.train.claims import on_tasks
from paraxis.train.claims import tasks
from paraxis.train.claims.decode import converted

TASK = tasks.make('lists', **unmask_cases.TASK)
BASE = unmask_cases.FIELDS | {
  'model.visibility': 'causal', 'model.mask_id': -1,
  'train.objective': 'next_token', 'train.steps': 10,
}  # fmt: skip
BLOCKS = {
  'model.visibility': 'block', 'model.block': 7, 'model.mask_shift': True,
  'model.mask_id': TASK.mask, 'train.objective': 'block',
  'train.complementary': True, 'train.steps': 1,
}  # fmt: skip


def test_calls_and_tokens(tmp_path):
  run = harness.Run(schema.Config(), tmp_path, lambda line: None)
  given = dict(
    on=dict(task=unmask_cases.TASK, fields=BASE, seeds=[0]), blocks=BLOCKS,
    operations=['copy'], lists_of=[4, 4],
  )  # fmt: skip
  at_once = dict(count='threshold', threshold=0.0)
  found = converted.fewer_calls(
    run, policy=at_once, bounds=[2.9, 1.1, 0.1], **given
  )
  # A prompt is a block, so 1 call draws 4 tokens; from left to right 3 do after
  # the prompt's, which draws the first. It knows nothing, and is never right.
  assert found.measured == '0.1000, 1.1000, -0.8500, 0.0000', found
  assert not found.passed and 'in 80 tokens of rows after 800' in found.caveat
  assert found.caveat.endswith(
    'reads the prompt: 2.00 (2.00 to 2.00) times fewer'
  )
  slow = converted.fewer_calls(run, policy={}, bounds=[1, 1.1, 0.05], **given)
  # One a call is 3 against 4; a conversion of more tokens than are allowed.
  assert slow.measured == '-0.2500, 1.1000, -0.8500, -0.0500', slow


@pytest.mark.parametrize('objective', ('block', 'masked'))
def test_a_training_begins_with_given_parameters(tmp_path, objective):
  """And its answers are counted where all of them are masked."""
  fields = BASE | BLOCKS | {'optimizer.learning_rate': 1e-9}
  if objective == 'masked':
    fields |= {
      'model.visibility': 'full', 'model.block': 0, 'train.objective': 'masked'
    }  # fmt: skip
  run = harness.Run(schema.Config(), tmp_path, lambda line: None)
  [(config, first, _)], _ = on_tasks.trained(run, TASK, fields, [0], 'one')
  other = {p: x + 1 for p, x in first.items()}
  [(_, second, _)], _ = on_tasks.trained(
    run, TASK, fields, [0], 'two', ({0: other}, fields)
  )
  for path, x in second.items():
    np.testing.assert_allclose(x, other[path], atol=1e-4, err_msg=path)
  assert not np.allclose(second['embedding'], first['embedding'])
  # Steps read a text twice.
  batch = on_tasks.trained_on(config, TASK, 3)
  np.testing.assert_array_equal(batch.targets[::2], batch.targets[1::2])
  config = experiment.fields(config, {'train.complementary': False})
  batch = on_tasks.trained_on(config, TASK, 3)
  assert (batch.targets[::2] != batch.targets[1::2]).any()


@dataclasses.dataclass
class Told:
  """A model that answers with the token that it reads one place later."""

  config: schema.Model
  pairs: bool

  def features(self, params, batch):
    del params
    return batch.tokens, None

  def logits(self, params, tokens):
    del params
    seen = np.where(tokens < 0, self.config.mask_id, tokens)
    after = np.pad(seen[:, 1:], ((0, 0), (0, 1)), constant_values=TASK.mask)
    return np.eye(TASK.vocabulary)[after]


@pytest.mark.parametrize('pairs', (False, True))
def test_answers_are_masked_where_they_are_read(pairs):
  config = schema.Model(
    vocab_size=TASK.vocabulary, mask_id=TASK.mask, mask_shift=True
  )
  batch = tasks.draw(TASK, 8, 0, True)
  assert on_tasks.right(Told(config, pairs), TASK, {}, batch) == 0
