"""Profiles: which steps, whose time, and from which line of source."""

import json
import os
import types

import jax
import jax.numpy as jnp
import pytest

from paraxis.sharding.meter import aot
from paraxis.train.run import profile


def _event(op, start, end, name='thunk'):
  stats = {'hlo_op': op, 'hlo_module': 'jit_f'} if op else {}
  return types.SimpleNamespace(
    name=name, start_ns=start, end_ns=end, duration_ns=end - start,
    stats=list(stats.items()),
  )  # fmt: skip


def _data(*threads):
  lines = [types.SimpleNamespace(events=events) for events in threads]
  return types.SimpleNamespace(planes=[types.SimpleNamespace(lines=lines)])


def test_the_time_of_a_loop_is_without_what_it_holds():
  one = [
    _event('while.3', 0, 100),
    _event('dot.1', 10, 40),
    _event('all-reduce.2', 40, 60),
    _event('', 0, 1000),  # of the host: no operation
    _event('dot.7', 200, 210),
  ]
  two = [_event('dot.1', 50, 55), _event('dot.1', 55, 55)]
  found = profile.rows(_data(one, two), {'dot.1': ('a.py:1', 'mlp')})
  assert [
    (r.name, r.where, r.times, round(r.seconds * 1e9), r.scope) for r in found
  ] == [
    ('while', '', 1, 50, ''),
    ('dot', 'a.py:1', 2, 35, 'mlp'),
    ('all-reduce', '', 1, 20, ''),
    ('dot', '', 1, 10, ''),
  ]
  text = profile.table(found, 5, 8)
  assert '0.000 device-seconds' in text and 'for them 17.4%' in text  # 20 / 115
  assert '43.5%' in text.splitlines()[2] and text.splitlines()[3].endswith(
    'a.py:1'
  )
  assert 'holds no operations' in profile.table([], 5, 8)


@pytest.mark.parametrize(
  'name, moves',
  [('all-reduce', True), ('all-gather-start', True), ('all_to_all', False)]
  + [('collective-permute-done', True), ('fusion', False), ('reduce', False)],
)
def test_collectives_by_name(name, moves):
  assert profile.is_collective(name) == moves


OLD = (
  'ROOT %dot.1 = f32[] dot(%a), metadata={op_name="jit(f)/embed/dot" '
  'source_file="%s" source_line=7}'
)


def test_lines_of_source():
  """In both forms: in the instruction, and in tables at the head."""
  here = f'{profile._ROOT}/models/norm.py'
  lib = f'{profile._ROOT}/.venv/lib/site-packages/optax/a.py'
  assert profile.sources(OLD.replace('%s', here)) == {
    'dot.1': ('models/norm.py:7', 'embed')
  }
  assert profile.sources(OLD.replace('%s', lib)) == {
    'dot.1': ('optax/a.py:7', 'embed')
  }
  tables = f"""
FileNames
1 "{lib}"
2 "{here}"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=4 end_line=4 column=2}}
2 {{file_name_id=2 function_name_id=1 line=9 end_line=9 column=2}}

StackFrames
1 {{file_location_id=2 parent_frame_id=1}}
2 {{file_location_id=1 parent_frame_id=1}}

  %add.5 = f32[] add(%a), metadata={{op_name="g" stack_frame_id=2}}
  %none = f32[] add(%a), metadata={{op_name="g"}}
"""
  assert profile.sources(tables) == {'add.5': ('models/norm.py:9', '')}


@aot.uncached()  # another checkout's names would be in a program of the cache
def test_a_real_program_names_its_line():
  text = jax.jit(lambda a: jnp.sin(a) @ a).lower(jnp.ones((4, 4))).compile()
  found = set(profile.sources(text.as_text()).values())
  assert any(
    where.startswith('tests/train/run/test_profile.py:') for where, _ in found
  )


@pytest.mark.parametrize(
  'path, wanted',
  [
    ('', ''),
    ('jit(f)/add', ''),
    ('jit(f)/jvp()/while/body/closed_call/layer_F/mlp/BTD,DF->BTF/dot_general',
     'layer_F/mlp'),
    ('jit(f)/transpose(jvp(loss))/head/dot_general', 'backward loss/head'),
    ('jit(f)/transpose(jvp())/while/body/closed_call/checkpoint/'
     'rematted_computation/layer_ME/moe/shard_map/router/mul',
     'backward layer_ME/moe/router'),
    ('jit(f)/(jvp(loss)/reduce_sum:transpose(jvp(final_norm))/reduce_sum)',
     'loss'),
    ('jit(u)/turns_1_of_2/branch_1_fun/update/muon/jit(_where)/select_n',
     'update/muon'),
  ],
)  # fmt: skip
def test_scopes_of_a_path(path, wanted):
  assert profile.scope(path) == wanted


def test_a_run_is_traced(tiny, tmp_path):
  """The steps that are asked for, the run's last among them, once."""
  _, said = tiny.run(tmp_path / 'run', mesh='data=2', profile='5:6')
  [text] = [line for line in said if line.startswith('profile of steps 5 to 6')]
  assert (
    'device-seconds' in text and len(text.splitlines()) == 2 + profile.SHOWN
  )
  kept = json.loads((tmp_path / 'run' / profile.FILE).read_text())
  assert (kept['first'], kept['last']) == (5, 6)
  rows = [profile.Row(**row) for row in kept['rows']]
  assert any(profile.is_collective(row.name) for row in rows)
  assert any(row.where.startswith('models/') for row in rows)
  scopes = {row.scope for row in rows}
  assert {'layer_F/mlp', 'backward layer_F/mlp', 'update/adamw'} <= scopes, (
    sorted(scopes)
  )
  assert len(list((tmp_path / 'run').rglob('*.xplane.pb'))) == 1
  _, said = tiny.run(tmp_path / 'run', mesh='data=2', profile='5:6')
  assert said.count('all 6 steps are done') == 1
  assert [x for x in said if '--profile=5:6: nothing is traced, 6 steps' in x]


def test_steps_that_were_taken_before_are_not_traced(tmp_path):
  said = []
  for done in (0, 4, 5, 9):
    profile.Profile((5, 8), tmp_path, said.append).say_missed(done)
    profile.Profile(None, tmp_path, said.append).say_missed(done)
  assert said == [
    f'--profile=5:8: nothing is traced, {done} steps were taken before: name '
    'later ones, or another --workdir.'
    for done in (5, 9)
  ]


def test_a_run_that_ends_early_is_traced_to_its_end(tmp_path, monkeypatch):
  said, traced = [], []
  monkeypatch.setattr(jax.profiler, 'start_trace', traced.append)
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: traced.append('end'))
  one = profile.Profile((2, 9), tmp_path, said.append)
  monkeypatch.setattr(one, '_report', lambda: None)
  batches = one.over(((t, t) for t in range(20)), lambda: 0)
  for t, _ in batches:
    if t == 4:
      break
  assert traced == [str(tmp_path / profile.FOLDER)]
  batches.close()
  assert traced[1:] == ['end']


@pytest.fixture
def traces(tmp_path, monkeypatch):
  """Files that are read of traces, each of one operation of 0.9 s."""
  read = []

  def start(folder):
    made = tmp_path / profile.FOLDER / 'now' / 'host.xplane.pb'
    made.parent.mkdir(parents=True)
    made.write_bytes(b'')
    assert folder == str(tmp_path / profile.FOLDER)

  monkeypatch.setattr(jax.profiler, 'start_trace', start)
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: None)
  data = types.SimpleNamespace(from_file=read.append)
  monkeypatch.setattr(jax.profiler, 'ProfileData', data)
  row = profile.Row('dot', '', 3, 0.9)
  monkeypatch.setattr(profile, 'rows', lambda data, lines: [row])
  return read


def _until(one, last):
  """Takes steps up to one, in which the run ends."""
  batches = one.over(((t, t) for t in range(20)), lambda: 0)
  for t, _ in batches:
    if t + 1 == last:
      break
  batches.close()


def test_a_profile_that_ends_early_is_of_fewer_steps(tmp_path, traces):
  """And of the newest trace, whatever the folders' names."""
  old = tmp_path / profile.FOLDER / 'older' / 'host.xplane.pb'
  old.parent.mkdir(parents=True)
  old.write_bytes(b'')
  os.utime(old, (1e9, 1e9))
  said = []
  _until(profile.Profile((2, 9), tmp_path, said.append), 4)
  kept = json.loads((tmp_path / profile.FILE).read_text())
  assert (kept['first'], kept['last']) == (2, 4)
  assert said[0].startswith('profile of steps 2 to 4: ')
  assert ' 300.00 ' in said[0].splitlines()[2]  # ms of each of three steps
  assert traces == [str(tmp_path / profile.FOLDER / 'now' / 'host.xplane.pb')]


def test_only_the_first_process_traces(tmp_path, traces, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  _until(profile.Profile((2, 3), tmp_path, print), 4)
  assert not traces and not list(tmp_path.iterdir())
