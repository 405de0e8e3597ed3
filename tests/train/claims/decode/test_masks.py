"""The masked loss is the mean over orders, and is not without its weights."""

import numpy as np
import pytest

from paraxis.configs import fast_dllm_v2
from paraxis.configs import llada
from paraxis.configs import schema
from paraxis.train.claims import harness
from paraxis.train.claims.decode import masks
from paraxis.train.data import objectives


def test_an_order_is_walked_token_by_token():
  """Nats of place i by what is shown: 10 i + how many are shown."""
  nats = {
    shown: np.array([10 * i + sum(shown) for i in range(3)])
    for shown in np.ndindex(2, 2, 2)
  }
  nats = {tuple(map(bool, k)): v for k, v in nats.items()}
  assert masks._walked(nats, (2, 0, 1)) == 20 + (0 + 1) + (10 + 2)


@pytest.mark.parametrize('knockout', [False, True])
def test_the_loss_is_the_mean_over_orders(knockout, tmp_path):
  config = schema.view(llada.get_config())
  run = harness.Run(config, tmp_path, lambda line: None)
  small = {'model.vocab_size': 6, 'model.mask_id': 5, 'model.d_model': 16}
  given = dict(changes=small, length=3, steps=60, at_most=4.0)
  if not knockout:
    found = masks.any_order(run, **given)
    assert found.passed, found
    return
  batch = objectives.batch
  with masks.unweighted():
    assert objectives.batch is not batch
    assert not masks.any_order(run, **given).passed


@pytest.mark.parametrize('knockout, claim, off', [
  x for x in fast_dllm_v2.knockouts()
  if x[0] in ('no_clean_pass', 'nothing_read_first', 'old_keys_too')
])  # fmt: skip
def test_what_blocks_and_sub_blocks_read(knockout, claim, off, tmp_path):
  del knockout
  run = harness.Run(
    schema.view(fast_dllm_v2.get_config()), tmp_path, lambda line: None
  )
  given = {n: dict(x) for n, _, x, _ in fast_dllm_v2.claims()}[claim]
  check = given.pop('check')
  found = check(run, **given)
  assert found.passed, found
  with off():
    assert not check(run, **given).passed
