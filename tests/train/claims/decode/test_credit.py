"""Credits are those of a loop, and are compared with the best threshold."""

import pytest
import unmask_cases

from paraxis.configs import credit_decoding
from paraxis.configs import schema
from paraxis.train.claims import harness
from paraxis.train.claims.decode import credit

ON = dict(task=unmask_cases.TASK, fields=unmask_cases.FIELDS, seeds=[0])


@pytest.mark.parametrize('knockout', [False, True])
def test_credits_are_those_of_a_loop(knockout, tmp_path):
  config = schema.view(credit_decoding.get_config())
  run = harness.Run(config, tmp_path, lambda line: None)
  given = dict(credit_decoding.claims()[0][2]) | dict(prompts=3)
  check = given.pop('check')
  if not knockout:
    found = check(run, **given)
    assert found.passed, found
    return
  with credit.never_forgets():
    assert not check(run, **given).passed
  given['policy'] = given['policy'] | dict(credit_weight=0.0)
  found = check(run, **given)  # nothing that a credit could change
  assert not found.passed and found.measured.startswith('0, '), found


def test_the_best_of_policies_are_compared(tmp_path):
  run = harness.Run(schema.Config(), tmp_path / 'own', lambda line: None)
  above = [dict(count='threshold', threshold=t) for t in (0.0, 1.0)]
  given = dict(on=ON, operations=['copy'], lists_of=[4, 4])
  found = credit.fewer(
    run, ours=above, against=above[1:], bounds=[3.9, 1.1], **given
  )
  # All at once in one call of four; a model of two steps knows no answer.
  assert found.measured == '0.1000, 1.1000, -0.8500' and not found.passed
  found = credit.fewer(
    run, ours=above[1:], against=above, bounds=[0.2, 1.1], **given
  )
  assert found.measured == '0.0500, 1.1000, -0.8500' and not found.passed
