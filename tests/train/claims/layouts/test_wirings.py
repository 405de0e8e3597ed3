"""Claims about what is computed while sums travel can fail."""

import claim_cases
import jax
import numpy as np
import pytest
import support

from paraxis.configs import ladder
from paraxis.models import decoder
from paraxis.train.claims import experiment
from paraxis.train.claims.layouts import wirings

LAYERS = {'model.num_layers': 1}


def test_no_sum_of_a_ladder_holds_the_next_part_up():
  right, wrong = claim_cases.falls('ladder', 'wiring', LAYERS)
  assert right.measured == '2 of 2, standard 0'
  assert wrong.measured == '0 of 2, standard 0'


@pytest.mark.parametrize('name, lost', [('ladder', True), ('standard', False)])
def test_a_ladder_that_forgets_sees_no_other_token(name, lost):
  small = {'model.wiring': name, 'model.num_layers': 2}
  config = claim_cases.run_of('ladder', small).config
  model = decoder.Decoder(config.model)
  params = experiment.random_parameters(model)
  rows = experiment.documents(1, 8, config.model.vocab_size)
  other = rows._replace(tokens=rows.tokens.at[0, 0].add(1))

  def moved():
    run = jax.jit(lambda rows: model.features(params, rows)[0])
    return np.flatnonzero(np.abs(run(rows) - run(other)).max(-1)[0]).tolist()

  assert moved() == list(range(8))
  with wirings.forgets():
    assert moved() == ([0] if lost else list(range(8)))


@support.compiles('tpu')
def test_sums_of_a_ladder_travel_under_products_on_a_tpu(monkeypatch):
  right, wrong = claim_cases.falls('ladder', 'wiring_of_a_chip')
  assert right.measured.endswith('standard 0')
  assert wrong.measured == '0 of 6, standard 0'
  # Joined with the next one, a sum would have to wait for it.
  monkeypatch.setattr(wirings, 'FLAGS', {})
  given = dict(topology='v5p:2x2x1', mesh='tensor=4', changes=ladder.LARGE)
  run = claim_cases.run_of('ladder')
  assert not wirings.overlapped(run, **given).passed
