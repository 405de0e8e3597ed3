"""Work of rules of matrices is shared out; knock-outs of it are seen."""

import jax
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.train.claims import harness
from paraxis.train.claims import papers
from paraxis.train.claims.attention import kernels
from paraxis.train.claims.updates import whole

GIVEN = dict(rules=['muon'], meshes=['fsdp=8'], at_most=1.1)


def _run(tmp_path):
  config = schema.view(command_line.load('fantastic_optimizers'))
  return harness.Run(config, tmp_path, lambda line: None)


@pytest.mark.parametrize('layers, passed', [(8, True), (3, False)])
def test_a_device_has_its_share(tmp_path, layers, passed):
  """Three layers leave devices with copies: 24 products for 9."""
  fields = {'model.num_layers': layers}
  found = whole.shared_out(_run(tmp_path), fields=fields, **GIVEN)
  assert found.passed == passed


def test_what_compiles_nothing_is_no_claim_of_hlo(tmp_path, monkeypatch):
  compiled = lambda *given, **more: pytest.fail('a program is compiled')
  monkeypatch.setattr(jax.stages.Lowered, 'compile', compiled)
  fields = {'model.num_layers': 8}
  assert whole.shared_out(_run(tmp_path), fields=fields, **GIVEN).passed
  for name, check in (
    ('fantastic_optimizers', whole.shared_out),
    ('flash_attention_2', kernels.blocks_visited),
  ):
    found = papers.claims(command_line.load_module(name), name)
    (claim,) = (c for c in found if c.check is check)
    assert claim.kind == 'SIM' and 'traced' in papers.KINDS['SIM']


def test_work_that_is_repeated_is_seen(tmp_path):
  fields = {'model.num_layers': 8}
  with whole.repeated():
    found = whole.shared_out(_run(tmp_path), fields=fields, **GIVEN)
  assert not found.passed and found.measured == '8.00'
