"""Claims about a wavefront: what they count, and that they can fail."""

import claim_cases
import numpy as np
import pytest

from paraxis.configs import presets
from paraxis.configs import schema
from paraxis.train.claims import harness
from paraxis.train.claims import tasks
from paraxis.train.claims.decode import wavefronts

SMALL = dict(d_model=16, num_layers=3, d_ff=16, num_heads=2)
CORE = dict(prelude=1, core=1)


def test_one_token_at_a_time_and_its_knock_out():
  changes = {f'model.{name}': x for name, x in SMALL.items()}
  right, wrong = claim_cases.falls(
    'recurrent_depth', 'shallow', changes, passes=4, inner=4, new=6,
    prompts=[[1, 2, 3], [5]],
  )  # fmt: skip
  assert 'the same text' in right.measured
  assert float(wrong.measured.rpartition(' ')[2]) > 1e-6


def test_sums_are_right():
  task = tasks.make('addition', digits=3)
  asked, answers = wavefronts._sums(task, 50, 1)
  number = lambda digits: int(''.join(map(str, digits)))
  for prompt, answer in zip(asked, answers, strict=True):
    assert (prompt[3], prompt[7], len(prompt), len(answer)) == (10, 11, 8, 4)
    assert number(prompt[:3]) + number(prompt[4:7]) == number(answer)
  batch = tasks.draw(task, 4, 0)
  assert batch.tokens.shape == (4, task.length)
  assert batch.weights[0].tolist() == [0] * 7 + [1] * 4
  hit = np.ones(batch.tokens.shape, bool)
  hit[0, 9] = hit[1, 2] = False
  assert task.right(hit, batch).tolist() == [0.75, 15 / 16]


@pytest.mark.parametrize('width', [1, 6])
def test_passes_are_counted(tmp_path, width):
  """Of a model that knows nothing yet: every answer of one by one is wrong, so
  that the fewest passes are enough, and the claim fails."""
  config = schema.view(presets.tiny(**SMALL, recurrence=CORE))
  run = harness.Run(config, tmp_path / 'own', lambda line: None)
  found = wavefronts.fewer_passes(
    run, task=dict(digits=2), seeds=[0], rows=8,
    fields={'train.steps': 2, 'train.batch_size': 4},
    wavefront=dict(width=width, inner=1, threshold=0.0),
    each=[1, 2, 4], bounds=[3.0, 0.01],
  )  # fmt: skip
  assert found.passed is False
  assert 'needs 1 passes for each of 2 tokens' in found.caveat
  ours = float(
    found.caveat.partition('ours has ')[2].partition(' for all 3')[0]
  )
  # 3 tokens of 4 passes each where one comes after the other.
  assert ours == 12 if width == 1 else 5 <= ours < 12
  # One by one has 2 tokens left after the prompt; with it 3, and ours 4 more.
  off = float(found.measured.partition(' ')[0].strip(','))
  assert off == pytest.approx(2 / ours - 3, abs=1e-2)
  with_it = found.caveat.partition('prompt, 4 of ours: ')[2].partition(' ')[0]
  assert float(with_it) == pytest.approx(3 / (ours + 4), abs=1e-2)
  # A pass of ours is 3 layers, prelude and coda with it; 2 tokens have 3 too.
  layers = found.caveat.partition('in every call: ')[2].partition(' ')[0]
  assert float(layers) == pytest.approx(2 * 3 / (3 * ours), abs=1e-2)
