"""The loss plot: what is drawn, and that it is a picture."""

import json

import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.train import cli
from paraxis.train.plot import losses as plot


def _run(path, steps=60, held=True, offset=0.0):
  path.mkdir(parents=True)
  lines = []
  for step in range(1, steps + 1):
    loss = None if step == 7 else 7.6 * step**-0.2 + offset
    row = {'step': step, 'train/loss': loss, 'train/learning_rate': 0.01}
    row |= {'train/grad_norm': 1.0, 'train/tokens': 64 + step}
    if held and step % 30 == 0:
      row['eval/bits_per_byte'] = 3 - step / 100
      row['eval/loss'] = 7 - step / 20
    lines.append(json.dumps(row))
  (path / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  return path


def test_a_plot_is_a_picture(tmp_path):
  run = _run(tmp_path / 'run')
  assert plot.draw([run]) == run / 'loss.png'
  assert min(support.png_size(run / 'loss.png')) > 600


def test_a_run_at_home(tmp_path, monkeypatch):
  """bash leaves ~ as it is in --workdir=~/run."""
  run = _run(tmp_path / 'run')
  monkeypatch.setenv('HOME', str(tmp_path))
  assert cli.main(['plot', '--workdir=~/run']) == 0
  assert (run / 'loss.png').is_file()


def test_several_runs_into_another_file(tmp_path):
  runs = [
    _run(tmp_path / 'a' / 'run'),
    _run(tmp_path / 'b' / 'run', held=False),
  ]
  one, both = tmp_path / 'one.png', tmp_path / 'both.png'
  assert plot.draw(runs, str(both)) == both
  plot.draw(runs[:1], one)
  assert (
    support.png_size(both) == support.png_size(one)
    and both.read_bytes() != one.read_bytes()
  )


def test_one_point(tmp_path):
  support.png_size(plot.draw([_run(tmp_path / 'run', steps=1)]))


def test_one_point_of_a_panel_is_seen(tmp_path, monkeypatch):
  for steps, seen in ((1, '.'), (3, '')):
    ax = _figure(monkeypatch, [_run(tmp_path / str(steps), steps)])
    panel = ax.figure.axes[1].lines[0]
    assert panel.get_marker() == seen and len(panel.get_ydata()) == steps


def test_a_skipped_step_is_left_out():
  rows = {1: {'a': 2.0}, 2: {'a': None}, 3: {}, 4: {'a': 5.0}}
  steps, values = plot.curve(rows, 'a')
  assert steps.tolist() == [1, 4] and values.tolist() == [2, 5]
  assert plot.curve(rows, 'b')[0].size == 0


@pytest.mark.parametrize('count', [1, 2, 5, 400])
def test_smoothing_is_a_centred_mean(count):
  values = np.random.default_rng(0).normal(size=count)
  half = max(2, count // 80)
  wanted = []
  for i in range(count):
    wanted.append(np.mean(values[max(0, i - half) : i + half + 1]))
  np.testing.assert_allclose(plot.smooth(values), wanted, atol=1e-12)
  if count > 2:
    assert np.abs(plot.smooth(values) - values).max() > 0.01


def test_an_axis_of_tokens_adds_them_up(tmp_path):
  rows = {1: {'train/tokens': 10}, 3: {'train/tokens': 5}, 4: {'a': 1}}
  assert plot.along(rows, 'tokens') == {1: 10, 3: 15, 4: 15}
  assert plot.along(rows, 'step') == {1: 1, 3: 3, 4: 4}
  with support.refused('--x=flops', 'holds no train/flops; take --x=step'):
    plot.along(rows, 'flops')
  run = _run(tmp_path / 'run')
  by_step = plot.draw([run]).read_bytes()
  assert plot.draw([run], x='tokens').read_bytes() != by_step


def _figure(monkeypatch, runs):
  """The axes of the losses of a drawn figure."""
  seen = []
  monkeypatch.setattr(plot.figures, 'save', lambda fig, path: seen.append(fig))
  plot.draw(runs)
  return seen[0].axes[0]


def test_held_out_text_is_on_the_scale_of_the_loss(tmp_path, monkeypatch):
  """One axis: a point of loss 4 is drawn at 4."""
  ax = _figure(monkeypatch, [_run(tmp_path / 'run')])
  drawn = [line.get_ydata() for line in ax.lines]
  assert any(list(values) == [5.5, 4.0] for values in drawn)
  assert len(ax.figure.axes) == 1 + len(plot.PANELS)


def test_a_bound_is_named_so():
  row = {'eval/loss': 4.0, 'eval/bits_per_byte': 2.0}
  assert plot._held_out({1: row})[2] == '4.000 (2.000 bits per byte)'
  row['eval/bits_per_byte_bound'] = 2.0
  words = '4.000 (2.000 bits per byte, upper bound)'
  assert plot._held_out({1: row})[2] == words


def test_numbers_are_in_the_legend_and_not_on_a_curve(tmp_path, monkeypatch):
  runs = [_run(tmp_path / 'a'), _run(tmp_path / 'b', held=False)]
  for some, wanted in (
    (runs[:1], ['training loss', 'held-out text: 4.000 (2.400 bits per byte)']),
    (runs, ['a: 4.000 (2.400 bits per byte) held out', 'b']),
    (runs[1:], ['training loss']),
  ):
    ax = _figure(monkeypatch, some)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == wanted
    assert not ax.texts
    # Nothing of a curve is below the legend.
    ax.figure.canvas.draw()
    box = ax.get_legend().get_window_extent()
    for line in ax.lines:
      points = ax.transData.transform(line.get_xydata())
      inside = (points > box.min).all(1) & (points < box.max).all(1)
      assert not inside.any()


@pytest.mark.filterwarnings('error')
def test_names_are_no_mathematics(tmp_path, monkeypatch):
  """'$a^$' would not even parse, and '_b' be missing from the legend."""
  runs = [_run(tmp_path / name, held=False) for name in ('$a^$', '_b', 'c$')]
  ax = _figure(monkeypatch, runs)
  texts = ax.get_legend().get_texts()
  assert [text.get_text().count('b') for text in texts] == [0, 1, 0]
  ax.figure.canvas.draw()
  drawn = [text._preprocess_math(text.get_text()) for text in texts]
  assert drawn == [('$a^$', False), ('\u200b_b', False), ('c$', False)]
  for run in runs:
    title = _figure(monkeypatch, [run])._left_title
    assert title._preprocess_math(title.get_text())[1] is False
    title.figure.canvas.draw()


def test_labels_tell_runs_apart(tmp_path):
  names = lambda *paths: plot.labels([tmp_path / p for p in paths])
  assert names('x/a') == ['a'] and names('x/a', 'x/b') == ['a', 'b']
  assert names('x/a', 'y/a') == ['x/a', 'y/a']
  assert len(names('x/a', 'x/a')) == 2


def test_wrong_folders(tmp_path):
  with pytest.raises(errors.UserError, match='which run'):
    plot.draw([])
  with pytest.raises(errors.UserError, match='does not exist'):
    plot.draw([tmp_path])
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n')
  with pytest.raises(errors.UserError, match='no train/loss'):
    plot.draw([tmp_path])
  run = _run(tmp_path / 'run')
  with pytest.raises(errors.UserError, match='cannot be written'):
    plot.draw([run], tmp_path / 'no' / 'a.png')
