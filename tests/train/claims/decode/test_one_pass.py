"""Claims about integrate-and-fire, and without its split."""

from paraxis.configs import schema
from paraxis.train.claims import harness
from paraxis.train.claims.decode import one_pass


def test_a_frame_that_is_not_split_is_found(tmp_path):
  run = harness.Run(schema.Config(), tmp_path / 'own', lambda line: None)
  given = dict(rows=4, length=20, within=1e-13)
  assert one_pass.as_a_loop(run, **given).passed
  with one_pass.not_split():
    assert not one_pass.as_a_loop(run, **given).passed
