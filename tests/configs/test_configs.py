"""Every config in configs/: its header, its size, its files, its claims."""

import ast
import contextlib
import pathlib
import re

import house
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.train.claims import harness
from paraxis.train.claims import papers

MOST_LINES = 155  # with a knock-out for each claim
BOUNDS = 'at_least', 'above', 'at_most', 'below'
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
def test_the_header_says_what_it_costs(path):
  assert papers.cost(papers.header(path)) > 0


@each
def test_what_the_header_of_a_lossless_method_may_cost(path):
  """But where drafts of SmolLM2 are trained for longer, or of two methods."""
  if 'claims.decode import lossless' in path.read_text():
    dear = path.stem in ('medusa', 'eagle', 'falcon')
    assert (papers.cost(papers.header(path)) > 1200) == dear


@each
def test_few_seeds_are_not_called_reproduced(path):
  """What is trained with fewer than three seeds shows a direction at most."""
  assert not _claims_too_much(path.read_text(), _seeds(path))


@pytest.fixture(scope='module')
def used(tree):
  """(file) -> whether more than claims, benches and its own room needs it."""
  importers, ends = {}, ('tests/', 'configs/', 'train/claims/', 'train/bench/')
  for file, code in tree.code.items():
    if not file.startswith(ends):
      for name in house.imports(code):
        importers.setdefault(name, set()).add(file)

  def check(file, seen=frozenset()):
    room = file.rpartition('/')[0]
    module = 'paraxis.' + file.removesuffix('.py').replace('/', '.')
    others = importers.get(module, set()) - seen - {file}
    return any(
      other.rpartition('/')[0] != room or check(other, seen | {file})
      for other in others
    )

  return check


@each
def test_what_only_claims_run_is_called_partial(path, used):
  """A file of the mechanism has a user, or the header says that it has none."""
  files = [f for f in papers.mechanism(path) if not f.startswith('train/')]
  unused = [f for f in files if f.endswith('.py') and not used(f)]
  assert not unused or 'partial' in papers.header(path).fields, unused


def test_a_mechanism_without_a_user_is_found(used):
  assert not used('sharding/planner/conversions.py')
  assert not used('decode/parallel_contexts.py')
  assert used('sharding/tensor/rings.py')


def _seeds(path):
  """Seeds of each claim of the kind LEARN."""
  claims = papers.claims(command_line.load_module(str(path)), path.name)
  return [_seeds_of(c) for c in claims if c.kind == 'LEARN']


def _seeds_of(claim):
  """Seeds of a claim; one where none are named."""
  given = claim.parameters
  told = given.get('seeds') or given.get('training', given).get('seeds', [0])
  return len(told)


def _claims_too_much(text, seeds):
  said = re.findall(
    r'(?<!not )\breproduced\b', ast.get_docstring(ast.parse(text))
  )
  return any(n < harness.ENOUGH_SEEDS for n in seeds) and bool(said)


def test_a_header_that_claims_too_much_is_found():
  text = '"""A\n\nexpect: LEARN 2.1 against 2.2, %s, one seed\n"""'
  assert _claims_too_much(text % 'reproduced', [1])
  assert _claims_too_much(text % 'reproduced', [3, 2])
  assert not _claims_too_much(text % 'reproduced', [3])
  assert not _claims_too_much(text % 'NOT REPRODUCED; not reproduced', [1])
  assert _seeds(command_line.find_config('demons_lbl')) == [6, 6]
  assert _seeds(command_line.find_config('skippipe')) == [3, 3, 3]


def _untold(path):
  """Claims that fall short of the paper, of which the header is silent."""
  claims = papers.claims(command_line.load_module(str(path)), path.name)
  said = ' '.join(papers.header(path).fields.values()).lower()
  word = lambda c: c.admits or ('direction only' if c.published else '')
  return [c.name for c in claims if word(c) not in said]


@each
def test_what_is_admitted_is_told(path):
  assert not _untold(path)


def test_what_is_admitted_and_not_told_is_found(tmp_path):
  path = tmp_path / 'mine.py'
  text = command_line.find_config('deepspeed_moe').read_text()
  path.write_text(text.replace('REPRODUCED', 'well'))
  assert len(_untold(path)) == 3
  text = command_line.find_config('skippipe').read_text()
  path.write_text(text.replace('irection', 'istance'))
  assert _untold(path) == ['time of a step, 1/2 left out']


def _loose(claim):
  """Whether a claim can be called reproduced short of the paper's number."""
  few = claim.kind == 'LEARN' and _seeds_of(claim) < harness.ENOUGH_SEEDS
  number = re.match(r'\d*\.?\d+', str(claim.paper))
  if number is None or few or claim.admits:
    return False
  wanted, asked = float(number[0]), claim.parameters | claim.published
  least = [asked[n] for n in BOUNDS[:2] if n in asked]
  least += asked.get('bounds', [])[:1]
  most = [asked[n] for n in BOUNDS[2:] if n in asked]
  short = [x < wanted for x in least] + [x > wanted for x in most]
  return any(short)


@each
def test_less_than_the_paper_is_not_called_reproduced(path):
  claims = papers.claims(command_line.load_module(str(path)), path.name)
  assert not [c.name for c in claims if _loose(c)]


@pytest.mark.parametrize('name', ('multigrid', 'recurrent_depth', 'ape'))
def test_a_bound_that_is_looser_than_the_paper_is_found(name):
  path = command_line.find_config(name)
  claims = papers.claims(command_line.load_module(str(path)), path.name)
  (short,) = (c for c in claims if c.published)
  assert not _loose(short) and _loose(short._replace(published={}))


@each
def test_nothing_is_compared_with_itself(path):
  """Nor by a knock-out: whatever the code does, the gain is 0."""
  module = command_line.load_module(str(path))
  claims = {c.name: c for c in papers.claims(module, path.name)}
  given = [c.parameters for c in claims.values()]
  for off in papers.knockouts(module, path.name):
    given.append(claims[off.claim].parameters | off.change)
  pairs = [p for g in given for n in ('better', 'more') for p in g.get(n, ())]
  assert not [(a, b) for a, b, *_ in pairs if a == b]


@each
def test_a_knockout_is_no_other_number_that_is_expected(path):
  """It would show that the judge compares, whatever the mechanism does."""
  module = command_line.load_module(str(path))
  wanted = {'expected', 'forwards', *BOUNDS}
  assert not [
    off.name
    for off in papers.knockouts(module, path.name)
    if off.off is contextlib.nullcontext and set(off.change) <= wanted
  ]


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
  assert (optimizer.name, optimizer.matrix_learning_rate) == ('muon', 0.02)
  tokens = config.train.batch_size * config.data.sequence_length
  assert (tokens, config.train.steps) == (2048, 480)
  assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (2, 2, 2)


def test_a_config_is_data_not_a_program():
  """No config opens files or starts jax: claims name checks, they hold none."""
  for path in map(pathlib.Path, CONFIGS):
    module = ast.parse(path.read_text())
    names = {n.name for n in module.body if isinstance(n, ast.FunctionDef)}
    assert names <= {'get_config', 'claims', 'knockouts'}, path.name
