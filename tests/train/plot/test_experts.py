"""Pictures of experts: what is drawn, and that the plot command draws it."""

import json

import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.train.plot import command as plot_command
from paraxis.train.plot import experts as plot_experts
from paraxis.train.run import metrics

LOAD = 'experts/load/layers/moe/load'
WIDE = 'experts/load/layers/wide_moe/load'


def rows(layers=2, wide=0, steps=12, every=4):
  """{step: row}: expert 0 gets twice what expert 1 gets."""
  out = {}
  for step in range(1, steps + 1):
    row = {'experts/imbalance': 1.3, 'experts/dropped': 0.0}
    row |= {'experts/entropy': 1.9 - step / 100, 'train/loss': 7.0 / step}
    if step % every == 0:
      row[LOAD] = [[2 / 3, 1 / 3]] * layers
      if wide:
        row[WIDE] = [[0.25] * 4] * wide
    out[step] = row
  return out


def test_a_panel_holds_loads_over_an_even_load():
  found = plot_experts.panels(rows())
  assert [title for title, *_ in found] == ['expert layer 0', 'expert layer 1']
  for _, steps, even in found:
    assert steps == [4, 8, 12]
    np.testing.assert_allclose(even, [[4 / 3] * 3, [2 / 3] * 3])


def test_many_layers_become_means_of_those_with_as_many_experts():
  found = plot_experts.panels(rows(layers=5, wide=3))
  assert [title for title, *_ in found] == [
    'mean of 5 layers of 2 experts',
    'mean of 3 layers of 4 experts',
  ]
  np.testing.assert_allclose(found[0][2], [[4 / 3] * 3, [2 / 3] * 3])
  np.testing.assert_allclose(found[1][2], 1.0)


def test_layers_of_two_kinds_are_told_apart():
  titles = [title for title, *_ in plot_experts.panels(rows(2, wide=1))]
  assert titles == [
    'moe expert layer 0',
    'moe expert layer 1',
    'wide_moe expert layer 0',
  ]


def test_a_name_is_no_mathematics(tmp_path):
  """'$a^$' would not even parse."""
  support.png_size(plot_experts.draw(rows(), tmp_path / 'a.png', '$a^$'))
  loads = {'$d^$': np.ones((1, 2))}
  plot_experts.draw_domains({'$run^$': loads}, tmp_path / 'b.png')
  support.png_size(tmp_path / 'b.png')


@pytest.mark.parametrize('steps', [4, 12])
def test_a_plot_is_a_picture(tmp_path, steps):
  path = plot_experts.draw(rows(steps=steps), tmp_path / 'a.png', 'run')
  assert min(support.png_size(path)) > 600
  more = plot_experts.draw(rows(3, steps=steps), tmp_path / 'b.png', 'run')
  assert support.png_size(more)[1] > support.png_size(path)[1]


def test_no_loads(tmp_path):
  assert not plot_experts.present({1: {'train/loss': 1.0}})
  assert plot_experts.present(rows())
  with pytest.raises(errors.UserError, match='no experts, or no loads yet'):
    plot_experts.draw({1: {'experts/dropped': 0.0}}, tmp_path / 'a.png')


def test_domains(tmp_path):
  rng = np.random.default_rng(0)
  one = {d: rng.integers(1, 9, (3, 4)) for d in ('code', 'drama')}
  path = tmp_path / 'domains.png'
  plot_experts.draw_domains({'a row': one, 'the batch': one}, path)
  assert min(support.png_size(path)) > 400


def test_the_command_draws_experts_where_there_are_some(tmp_path, capsys):
  for name, kept in (('moe', ''), ('dense', 'train/')):
    (tmp_path / name).mkdir()
    lines = [
      json.dumps(
        {'step': s} | {k: v for k, v in r.items() if k.startswith(kept)}
      )
      for s, r in rows().items()
    ]
    (tmp_path / name / metrics.FILE).write_text('\n'.join(lines))
  folders = [f'--workdir={tmp_path / name}' for name in ('dense', 'moe')]
  assert plot_command.COMMANDS[0](folders) is None
  wrote = capsys.readouterr().out.splitlines()
  assert len(wrote) == 2 and wrote[1].endswith('experts.png')
  support.png_size(tmp_path / 'moe' / plot_experts.NAME)
  assert not (tmp_path / 'dense' / plot_experts.NAME).exists()
