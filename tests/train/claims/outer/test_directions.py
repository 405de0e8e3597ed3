"""Claims about steps along a direction fail where gradients are sent, a log is
of other directions, or little is learned."""

import claim_cases
import numpy as np

from paraxis.train import program
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims.outer import directions
from paraxis.train.steps import zeroth_order

SMALL = {
  'model.d_model': 16, 'model.d_ff': 32, 'model.num_layers': 1,
  'data.sequence_length': 16,
}  # fmt: skip


def test_gradients_that_are_sent_are_seen():
  check = lambda changes: directions.scalars(
    claim_cases.run_of('distzo2', SMALL | changes),
    meshes=['replica=2,data=2'], numbers=2,
  )  # fmt: skip
  assert check({}).passed
  found = check({'train.estimator': 'backprop'})
  assert not found.passed and 'some larger' in found.measured


def test_a_third_pass_changes_no_slope():
  """Passes are the sides of a direction: two, and with the knock-out three."""
  config, devices = experiment.on(
    claim_cases.run_of('distzo2', SMALL).config, 'data=1'
  )

  def sides():
    job = program.on_devices(config, devices=devices)
    batch = job.put(trial.batches(config, packed=False)[0])
    with job.context():
      params = job.initial_state().inner
      return zeroth_order._sides(job.built, 1e-2, params, batch)[0]

  two = sides()
  with directions.third_pass():
    three = sides()
  assert len(two) == 2 and len(three) == 3
  assert np.allclose(three[:2], two) and np.isclose(
    three[2], two.mean(), rtol=1e-3
  )
  assert three[2] not in two


def test_what_falls_too_little_is_seen(monkeypatch, tmp_path):
  bits = {}
  for seed in range(3):
    own = 6.0 + 0.01 * seed
    bits |= {f'start-{seed}': 8.0, f'directions-{seed}': own,
             f'gradients-{seed}': 5.0}  # fmt: skip
  claim_cases.trains_to(monkeypatch, bits)
  run = claim_cases.run_of('distzo2', {}, tmp_path / 'own')
  families = {n: {} for n in ('start', 'directions', 'gradients')}
  families['start'] = {'train.steps': 1}
  families['gradients'] = {'train.estimator': 'backprop'}
  check = lambda fall, share: directions.learns(
    run, families=families, seeds=[0, 1, 2], fall=fall, share=share
  )
  right = check(1.0, 0.5)
  assert right.passed and right.verdict == 'reproduced', right
  assert not check(2.0, 0.5).passed
  assert not check(1.0, 0.7).passed
