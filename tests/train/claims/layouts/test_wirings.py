"""Claims about what is computed while sums travel can fail."""

import claim_cases
import support

from paraxis.configs import ladder
from paraxis.train.claims.layouts import wirings

LAYERS = {'model.num_layers': 1}


def test_no_sum_of_a_ladder_holds_the_next_part_up():
  right, wrong = claim_cases.falls('ladder', 'wiring', LAYERS)
  assert right.measured == '2 of 2, standard 0'
  assert wrong.measured == '0 of 2, standard 0'


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
