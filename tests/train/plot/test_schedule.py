"""The chart of a schedule: its boxes are the operations; bad input."""

import collections

from matplotlib import patches
import pytest
import support

from paraxis.configs.base import errors
from paraxis.sharding.pipeline import schedules
from paraxis.sharding.planner import simulate
from paraxis.train import cli
from paraxis.train.plot import command as plot_command
from paraxis.train.plot import schedule as draw_schedule


def _drawn(fig):
  """[(device, start, end, colour)] of the rectangles, and [(x, y, text)]."""
  (ax,) = fig.axes
  boxes = [
    (
      round(r.get_y() + r.get_height() / 2),
      r.get_x(),
      r.get_x() + r.get_width(),
      r.get_facecolor(),
    )
    for r in ax.patches
    if isinstance(r, patches.Rectangle)
  ]
  return boxes, [(*t.get_position(), t.get_text()) for t in ax.texts]


@pytest.mark.parametrize(
  'arguments',
  [('interleaved', 4, 8, 2), ('zero_bubble', 3, 5), ('v_half', 2, 3, 2)],
)
def test_the_boxes_are_the_operations(arguments):
  schedule = schedules.make(*arguments)
  boxes, texts = _drawn(draw_schedule.chart(schedule))
  # In lock step a device's operations, by time, are its row of the table.
  colours = collections.defaultdict(set)
  by_place = {(x, y): text for x, y, text in texts}
  for device in range(schedule.stages):
    row = sorted(b[1:] for b in boxes if b[0] == device)
    wanted = [
      (phase, *table[tick, device].tolist())
      for tick in range(schedule.ticks)
      for phase, table in schedule.phases.items()
      if table[tick, device, 0] >= 0
    ]
    assert len(row) == len(wanted)
    for (start, end, colour), (phase, microbatch, chunk) in zip(
      row, wanted, strict=True
    ):
      cost = 2 if phase == 'B' and schedule.weight is None else 1
      assert end - start == cost
      assert by_place[(start + end) / 2, device] == str(microbatch)
      colours[phase, chunk].add(colour)
    for (_, before, _), (after, *_) in zip(row, row[1:], strict=False):
      assert after >= before
  assert all(len(c) == 1 for c in colours.values())
  assert len(set.union(*colours.values())) == len(colours)
  end = max(b[2] for b in boxes)
  result = simulate.run(schedule, 'lock_step')
  assert end == pytest.approx(result.time * schedule.chunks)


def test_a_missing_box_is_seen():
  """The test above can fail: a chart of another schedule is not this one's."""
  one = _drawn(draw_schedule.chart(schedules.make('gpipe', 2, 4)))
  other = _drawn(draw_schedule.chart(schedules.make('one_f_one_b', 2, 4)))
  assert len(one[0]) == len(other[0]) and one != other


def test_numbers_too_small_are_left_out():
  schedule = schedules.make('one_f_one_b', 2, 400)
  boxes, texts = _drawn(draw_schedule.chart(schedule))
  assert len(boxes) == 1600 and not texts


def test_summary():
  text = draw_schedule.summary(schedules.make('interleaved', 4, 8, 2))
  assert 'time / ideal 1.1875' in text and 'held 11 9 7 5' in text
  text = draw_schedule.summary(schedules.make('gpipe', 16, 16))
  assert text.endswith('held at most 16')


def test_the_command(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  argv = ['plot', 'schedule', 'interleaved', '--stages=4', '--microbatches=8']
  assert cli.main([*argv, '--chunks=2', '-o', 'x.png']) == 0
  assert min(support.png_size(tmp_path / 'x.png')) > 300
  shown = capsys.readouterr().out
  assert 'F0.1' in shown and '1.1875' in shown and 'wrote x.png' in shown
  assert max(map(len, shown.splitlines())) <= 80
  assert cli.main(['plot', 'schedule', 'v_half']) == 0
  assert min(support.png_size(tmp_path / 'v_half.png')) > 300


@pytest.mark.parametrize(
  'argv, words',
  [
    ([], 'There are gpipe, one_f_one_b'),
    (['zero_buble'], "Did you mean 'zero_bubble'?"),
    (['interleaved', '--microbatches=10'], 'the nearest that are: 8, 12'),
    (['v_half', '--chunks=3'], 'runs 2 chunks on each stage, got chunks=3'),
    (['one_f_one_b', '--chunks=2'], 'take interleaved'),
    (['gpipe', '--stages=0'], 'stages=0'),
    (['gpipe', '--skip_fraction=0.5'], 'for the schedule skip'),
    (['skip', '--skip_fraction=0.3'], 'must be a whole number'),
    (['gpipe', '--workdir=x'], 'workdir'),
    (['gpipe', 'v_half'], "unexpected argument 'v_half'"),
    (['gpipe', '--stages=64', '--microbatches=512'], '65,536 operations'),
    (['gpipe', '-o', 'no/where.png'], 'cannot be written'),
  ],
)
def test_bad_input_writes_nothing(argv, words, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert cli.main(['plot', 'schedule', *argv]) == errors.EXIT_USER
  shown = capsys.readouterr().err
  assert words in shown and shown.count('\n') == 1
  assert not list(tmp_path.iterdir())


def test_help_names_what_there_is(capsys):
  assert cli.main(['plot', '--help']) == 0
  shown = capsys.readouterr().out
  listed = shown.split('Schedules: ')[1].strip(' .\n').split(', ')
  assert listed == list(schedules.NAMES)
  assert max(map(len, shown.splitlines())) <= 80
  for command in plot_command.COMMANDS:
    assert all(f'--{name}' in shown for _, name, *_ in command.flags)


def test_a_misspelt_schedule_is_no_run(capsys):
  assert cli.main(['plot', 'schedul']) == errors.EXIT_USER
  assert "Did you mean 'schedule'?" in capsys.readouterr().err


def test_skipping_is_compared_with_all_stages(tmp_path, capsys, monkeypatch):
  """Its ideal counts fewer operations: 35 units lose to 33 in lock step."""
  monkeypatch.chdir(tmp_path)
  argv = ['plot', 'schedule', 'skip', '--skip_fraction=0.25']
  assert cli.main(argv) == 0
  shown = capsys.readouterr().out
  assert 'lock step: 35 units of time, 1F1B 33: LOSES 6.1%' in shown
  assert 'asynchronous: 29 units of time, 1F1B 33: gains 12.1%' in shown
  assert max(map(len, shown.splitlines())) <= 80
  # With nothing to skip both are one schedule; 1F1B has no such lines.
  same = draw_schedule.against(schedules.make('skip', 4, 8, 1, 0.0))
  assert same.count('1F1B 33: equals') == 2
  other = draw_schedule.summary(schedules.make('one_f_one_b', 4, 8))
  assert 'units of time' not in other
