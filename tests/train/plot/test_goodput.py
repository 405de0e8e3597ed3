"""The picture and the table of where a run's time went."""

import json

import numpy as np
import pytest
import support

from paraxis.train import cli
from paraxis.train.plot import goodput as plot
from paraxis.train.run import goodput
from paraxis.train.run import ledger


def write(folder, starts=3, seconds=30):
  """Events of starts that are killed after 10 steps, 4 of them for nothing."""
  rows, now, step = [], 1.7e9, 0

  def add(event, **fields):
    rows.append(json.dumps(dict(time=now, event=event, **fields)))

  for _ in range(starts):
    add('start')
    now += seconds / 10
    add('phase', name='steps', step=step)
    now += seconds * 0.6
    add('phase', name='save', step=step + 6)
    now += seconds / 10
    add('phase', name='steps', step=step + 6)
    add('commit', step=step + 6)
    now += seconds * 0.4
    add('phase', name='steps', step=step + 10)
    step += 6
    now += seconds / 5
  add('end', why='stopped \x1b[31m', step=step + 4)
  (folder / ledger.FILE).write_text('\n'.join(rows) + '\n{"torn')
  return folder


def test_the_command(tmp_path, capsys):
  flags = ['plot', f'--workdir={write(tmp_path)}', '--goodput']
  assert cli.main(flags) == 0
  out = capsys.readouterr().out
  lines = out.splitlines()
  # 30 of 42 s of each start are steps, of the last one 36; 4 of 10 are replay.
  assert (
    lines[0] == 'goodput 57.1% of 126.0 s in 3 starts; 8 steps done and lost'
  )
  assert lines[2].split() == ['57.1%', '72.0', 'productive']
  assert lines[3].split() == ['19.0%', '24.0', 'replay']
  # 72 s of 22 steps; 3 saves; what else 3 starts took; 6 s between two.
  assert lines[11] == (
    'seconds of one: step 3.27, save 3, restore 0, start 3, replace 6'
  )
  assert lines[13].split()[-5:] == ['to', '10', '6', '4', 'killed']
  assert lines[15].endswith('4  stopped ?[31m') and '\x1b' not in out
  assert lines[16] == '1 damaged lines are left out'
  assert lines[17] == f'wrote {tmp_path / plot.NAME}'
  assert min(support.png_size(tmp_path / plot.NAME)) > 400


def test_json_is_the_account(tmp_path, capsys):
  flags = ['plot', f'--workdir={write(tmp_path)}', '--goodput', '--json']
  assert cli.main(flags) == 0
  found = json.loads(capsys.readouterr().out)
  assert found == goodput.account(tmp_path)
  assert sum(found['seconds'].values()) == found['wall'] == 126
  assert not (tmp_path / plot.NAME).exists()


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--goodput'], '--goodput draws one run: 0 --workdir are given'),
    (['--goodput', '--workdir=A', '--workdir=B'], '2 --workdir are given'),
    (['--goodput', '--profile', '--workdir=A'], 'one picture at a time'),
    (['--json', '--workdir=A'], '--json prints what --goodput found'),
    (['--goodput', '--workdir=A'], 'does not exist: a workdir without events'),
  ],
)
def test_wrong_arguments(flags, words, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert cli.main(['plot', *flags]) == 2
  said = capsys.readouterr().err
  assert words in said and said.count('\n') == 1


def test_a_column_is_what_most_of_it_was(tmp_path):
  """Against the same columns, counted second by second."""
  spans, starts, _ = goodput.read(write(tmp_path))
  found = plot.columns(spans, len(starts), 6)  # of 21 seconds
  first = spans[0].start
  for row in range(3):
    for column in range(6):
      counts = dict.fromkeys(range(len(goodput.PARTS)), 0)
      for second in range(21 * column, 21 * column + 21):
        at = first + second * goodput.SECOND + goodput.SECOND // 2
        (span,) = [s for s in spans if s.start <= at < s.end]
        if span.attempt == row + 1:
          counts[goodput.PARTS.index(span.part)] += 1
      most = max(counts.values())
      assert counts.get(found[row, column], 0) == most


@pytest.mark.parametrize('starts, seconds', [(1, 1e-3), (60, 9e4), (2, 400)])
def test_few_starts_and_many(tmp_path, starts, seconds):
  write(tmp_path, starts, seconds)
  account = goodput.account(tmp_path)
  text = plot.text(account).splitlines()
  assert f'in {starts} start' in text[0]
  assert ('        ... 30 earlier ones' in text) == (starts == 60)
  assert len(text) == 2 + 9 + 2 + min(starts, 30) + (starts == 60) + 1
  assert support.png_size(plot.draw(tmp_path, account))[0] > 400


def test_a_run_that_did_nothing(tmp_path):
  """Killed while it restored, twice."""
  rows = [
    dict(time=t, event=e, name='restore')
    for t, e in ((1, 'start'), (2, 'phase'), (9, 'start'), (11, 'phase'))
  ]
  text = '\n'.join(map(json.dumps, [*rows, dict(time=12, event='end')]))
  (tmp_path / ledger.FILE).write_text(text)
  account = goodput.account(tmp_path)
  assert account['goodput'] == 0 and account['seconds']['restore'] == 1
  assert all(
    r.split()[4:6] == ['-', '-'] for r in plot.text(account).splitlines()[-2:]
  )
  cells = plot.columns(goodput.read(tmp_path).spans, 2, 11)
  assert np.all(cells[0, 8:] == -1) and np.all(cells[1, :8] == -1)
  plot.draw(tmp_path, account)
