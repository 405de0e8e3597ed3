"""Every config in configs/: its header, its size, its files, its claims."""

import ast
import pathlib

import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.train.claims import papers

MOST_LINES = 140
CONFIGS = command_line.papers()
each = pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)


@each
def test_the_header_is_complete(path, tree):
  paper = papers.header(path)
  assert paper.fields['run'] == f'paraxis reproduce {path.stem}'
  for name in papers.files(paper):
    assert (tree.root / name).is_file(), f'{path.name} names {name}'
  assert 'TODO' not in path.read_text()


@each
def test_it_is_short(path):
  assert len(path.read_text().splitlines()) <= MOST_LINES


@each
def test_the_config_is_valid(path):
  config = command_line.load(str(path))
  assert config.is_locked
  view = schema.view(config)
  assert schema.from_json(schema.to_json(view)) == view


@each
def test_the_claims_are_well_formed(path):
  claims = papers.claims(command_line.load_module(str(path)), path.name)
  assert claims and len({c.name for c in claims}) == len(claims)


def test_quickstart_is_the_measured_recipe():
  """The numbers that the demo's promise was measured with."""
  config = schema.view(command_line.load('quickstart'))
  model, optimizer = config.model, config.optimizer
  assert (model.vocab_size, model.d_model, model.d_ff) == (2048, 160, 432)
  assert (model.num_layers, model.num_heads) == (4, 4)
  assert model.embedding_scale == pytest.approx(12.649, abs=1e-3)
  assert model.attention_scale == pytest.approx(0.4743, abs=1e-4)
  assert (optimizer.name, optimizer.muon_learning_rate) == ('muon', 0.02)
  tokens = config.train.batch_size * config.data.sequence_length
  assert (tokens, config.train.steps) == (2048, 480)
  assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (2, 2, 2)


def test_a_config_is_data_not_a_program():
  """No config opens files or starts jax: claims name checks, they hold none."""
  for path in map(pathlib.Path, CONFIGS):
    module = ast.parse(path.read_text())
    names = {n.name for n in module.body if isinstance(n, ast.FunctionDef)}
    assert names <= {'get_config', 'claims', 'knockouts'}, path.name
