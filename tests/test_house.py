"""The picture of the house: few rooms, few floors, no arrow back."""

import ast

import house
import pytest

ROOMS = 25  # of train, sub-folders and own files together
FLOORS = 8


@pytest.fixture(scope='module')
def edges(tree):
  return house.graph(house.sources(tree.root))


def test_train_has_few_rooms_and_no_arrow_back(edges):
  drawn = house.picture(edges, 'train')
  assert {'data/', 'claims/', 'program'} <= set(drawn.files)
  assert ('program', 'data/') in drawn.arrows
  assert len(drawn.files) <= ROOMS
  assert not drawn.circle
  assert 1 < drawn.floors <= FLOORS


def test_the_report_is_whole(tree):
  text = '\n'.join(house.report(tree.root))
  for folder in (*house.FOLDERS, 'train/claims', 'sharding/pipeline'):
    assert f'\n{folder} ' in text


FOUR = {
  'train/a.py': 'from paraxis.train.x import b',
  'train/x/__init__.py': '',
  'train/x/b.py': 'from paraxis.train import c',
  'train/c.py': 'from paraxis.sharding import mesh',
  'configs/p.py': 'def claims():\n  from paraxis.train import a',
}


def test_arrows_floors_and_circles():
  drawn = house.picture(house.graph(FOUR), 'train')
  assert drawn.files == {'a': 1, 'x/': 1, 'c': 1}
  assert drawn.arrows == {('a', 'x/'), ('x/', 'c')}
  assert drawn.floors == 3 and not drawn.circle
  back = FOUR | {'train/c.py': 'import paraxis.train.a'}
  assert set(house.picture(house.graph(back), 'train').circle) == {
    'a', 'x/', 'c'
  }  # fmt: skip


def test_late_imports_of_a_config_are_left_out():
  assert house.graph(FOUR)['configs/p.py'] == set()
  early = FOUR | {'configs/p.py': 'from paraxis.train import a'}
  assert house.graph(early)['configs/p.py'] == {'train/a.py'}


def test_copies():
  again = 'def {}(x):\n  x += 1\n  x *= 2\n  return x\n'
  texts = {'a.py': again.format('f'), 'b.py': again.format('g')}
  assert house.copies(texts) == (1, 4)
  assert house.copies({'a.py': again.format('f'), 'b.py': 'def g(x): 1'}) == (
    0,
    0,
  )
  assert list(house.imports(ast.parse('import os'))) == ['os']
