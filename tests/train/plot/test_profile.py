"""The picture of a profile."""

import json

import support

from paraxis.train import cli
from paraxis.train.plot import profile as plot
from paraxis.train.run import profile

ROWS = [
  dict(name='dot', where='a.py:1', times=4, seconds=0.5, scope='mlp'),
  dict(name='all-reduce', where='', times=2, seconds=0.25),
]


def test_bars(tmp_path, capsys):
  kept = dict(first=5, last=6, rows=ROWS)
  (tmp_path / profile.FILE).write_text(json.dumps(kept))
  first, last, rows = plot.read(tmp_path)
  assert (first, last) == (5, 6)
  assert rows[0] == ('dot', 'a.py:1', 4, 0.5, 'mlp')
  assert cli.main(['plot', f'--workdir={tmp_path}', '--profile']) == 0
  assert f'wrote {tmp_path / plot.NAME}' in capsys.readouterr().out
  assert min(support.png_size(tmp_path / plot.NAME)) > 400


def test_the_title_is_whole_beside_long_labels(tmp_path, monkeypatch):
  rows = [dict(ROWS[0], name='fusion' * 10, where='a/b/c.py:1' * 2), ROWS[1]]
  kept = dict(first=5, last=6, rows=rows)
  (tmp_path / profile.FILE).write_text(json.dumps(kept))
  seen = []
  monkeypatch.setattr(plot.figures, 'save', lambda fig, path: seen.append(fig))
  plot.draw(tmp_path)
  (figure,) = seen
  figure.draw_without_rendering()
  texts = [*figure.texts, figure.axes[0].title, figure.axes[0]._left_title]
  (title,) = [t for t in texts if 'collectives' in t.get_text()]
  box = title.get_window_extent()
  assert 0 <= box.x0 and box.x1 <= figure.bbox.x1
  assert title.get_text().endswith('33.3%')


def test_no_profile_a_damaged_one_and_two_runs(tmp_path, capsys):
  with support.refused('does not exist; train with --profile=5:8'):
    plot.read(tmp_path)
  for text in ('', '[]', '{"rows": [{}]}', '{"rows": []}'):
    (tmp_path / profile.FILE).write_text(text)
    with support.refused('is damaged; profile the run again'):
      plot.read(tmp_path)
  runs = [f'--workdir={tmp_path}'] * 2
  assert cli.main(['plot', *runs, '--profile']) == 2
  assert '--profile draws one run: 2 --workdir' in capsys.readouterr().err
