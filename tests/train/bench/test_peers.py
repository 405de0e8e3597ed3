"""Peers: the protocol, what goes wrong, and torch where it is installed."""

import importlib.util
import json
import stat
import subprocess
import sys
import types

import pytest

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.bench import command as bench
from paraxis.train.bench import decode as bench_decode
from paraxis.train.bench import measure
from paraxis.train.bench import peer_process
from paraxis.train.bench import peers
from paraxis.train.bench import train as bench_train

SILENT = lambda _: None
# Answers 1, 2, 3, ... seconds; `job` is what it was started with.
PEER = """
import json, sys
job = json.loads(sys.argv[1])
print(json.dumps({first}), flush=True)
for n, line in enumerate(sys.stdin, 1):
  if n > {most}:
    sys.exit('lost its memory')
  answer = dict(seconds=float(n), peak=job['sizes']['rows'])
  print(json.dumps(answer), flush=True)
"""
READY = dict(notes='a library 1.0, 2 threads')
WIDTHS = dict(vocab_size=32, d_model=8, d_ff=16, num_heads=2)


def scripted(tmp_path, monkeypatch, first=READY, most=9):
  """Peers run PEER, which begins with `first` and answers `most` times."""
  script = tmp_path / 'script.py'
  script.write_text(PEER.format(first=first, most=most))
  monkeypatch.setattr(peers, 'SCRIPT', script)


def compare(tmp_path, monkeypatch, given=('hf',), most=9, first=READY):
  """A report of one comparison, ours 8 seconds, beside a script of a peer."""
  scripted(tmp_path, monkeypatch, first, most)
  found = tuple((name, sys.executable) for name in given)
  order = []

  def ours():
    order.append('ours')
    return {'': 8.0}

  with measure.session(peers=found):
    report = measure.begin('step', 'B1', measure.CPU, True)
    with peers.beside(report, dict(rows=7), SILENT) as others:
      run = {
        k: lambda k=k, f=f: order.append(k) or f()
        for k, f in others.candidates.items()
      }
      times = measure.interleave({'ours': ours} | run, 2)
      others.judge(times, 'ours', 'step: ')
    report.add(times)
    peers.absent(report)
  return report, order


def test_a_peer_stands_in_the_rounds(tmp_path, monkeypatch):
  report, order = compare(tmp_path, monkeypatch, ('hf', 'hf_autocast'))
  assert order == ['ours', 'hf', 'hf_autocast'] * 3
  # The first answer is the warm-up's.
  assert report.rows['hf'] == ('s', [2.0, 3.0])
  assert report.rows['step: peak memory, hf'] == ('MiB', [7, 7])
  assert report.rows['step: peak memory, this process'][1][0] > 1
  check, narrow = report.checks
  assert check.what == 'step: speed of ours / hf'
  assert check.values == [0.25, 0.375] and check.verdict == 'missed'
  assert (check.target, narrow.target) == (0.83, 0.77)
  assert 'hf: a library 1.0, 2 threads' in report.notes


def test_every_peer_has_a_target_in_every_bench_of_its_own():
  pairs = {(peer, bench) for peer, bench, _ in peers.TARGETS}
  assert pairs == {(p, b) for p, (bs, _) in peers.NAMES.items() for b in bs}
  # What ours may take of a peer's time.
  bounds = {key: x for key, x in peers.TARGETS.items() if x is not None}
  most = {key: round(1 / x, 2) for key, x in bounds.items() if x < 1}
  assert most == {
    ('hf', 'step', 'float32'): 1.2,
    ('hf_autocast', 'step', 'bfloat16'): 1.3,
    ('sdpa', 'attention', 'float32'): 1.49,
    ('sdpa', 'attention', 'bfloat16'): 1.2,
    ('sdpa', 'prefill', 'float32'): 1.1,
  }


def test_a_dtype_has_its_own_target(tmp_path, monkeypatch):
  scripted(tmp_path, monkeypatch)
  with measure.session(peers=(('sdpa', sys.executable),)):
    report = measure.begin('attention', 'B1', measure.CPU, True)
    for dtype in ('float32', 'bfloat16'):
      sizes = dict(rows=7, dtype=dtype)
      with peers.beside(report, sizes, SILENT) as others:
        ours = {'ours': lambda: {'': 2.5}}
        times = measure.interleave(ours | others.candidates, 1)
        others.judge(times, 'ours', f'{dtype}: ')
  # The peer takes 2 seconds of ours 2.5: a speed of .8.
  assert [(c.target, c.verdict) for c in report.checks] == [
    (0.67, 'met'), (0.83, 'missed')
  ]  # fmt: skip


@pytest.mark.parametrize(
  'options, reason',
  [
    (dict(most=2), 'exit 1: lost its memory'),
    (dict(first=dict(skip='torch 1.0 is older than 2.4')), 'older than 2.4'),
    (dict(first='what'), 'hf: left out: '),
    (dict(given=('sdpa',)), 'sdpa: left out: it runs attention, prefill'),
  ],
)
def test_what_does_not_run_is_a_note(options, reason, tmp_path, monkeypatch):
  report, _ = compare(tmp_path, monkeypatch, **options)
  assert set(report.rows) == {'ours'} and not report.checks
  assert len(report.notes) == 1 and reason in report.notes[0]


def test_a_python_that_does_not_start_is_a_note(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, 'executable', str(tmp_path / 'script.py'))
  report, _ = compare(tmp_path, monkeypatch)
  assert 'script.py does not start' in report.notes[0]


def test_one_that_never_answers_is_given_up(monkeypatch, tmp_path):
  monkeypatch.setattr(peers, 'WAIT', 0)
  report, _ = compare(tmp_path, monkeypatch)
  assert report.notes == ['hf: left out: no answer in 0 seconds']


@pytest.mark.parametrize(
  'given, message',
  [
    (['levanter:{}'], "'levanter' is none of hf, hf_autocast"),
    (['hff:{}'], "Did you mean 'hf'"),
    (['hf:/nowhere/python'], "'/nowhere/python' is no program"),
    (['hf'], "'' is no program"),
    (['hf:{}', 'hf:{}'], 'hf is given twice'),
  ],
)
def test_bad_peers_exit_2(given, message, capsys):
  flags = [f'--peer={g.format(sys.executable)}' for g in given]
  assert command_line.run(bench.main, ['step', *flags]) == errors.EXIT_USER
  shown = capsys.readouterr().err
  assert message in shown and shown.count('\n') == 1


def test_children_of_all_get_the_peers_and_the_file(monkeypatch):
  commands = []

  def run(command, **_):
    commands.append(command)
    text = measure.to_json([measure.BenchReport('step', '', '')])
    return subprocess.CompletedProcess(command, 0, text)

  monkeypatch.setattr(subprocess, 'run', run)
  given = (('hf', '/a'), ('sdpa', '/b'))
  bench._in_child('step', 2, True, 'kept.json', given, resume=False)
  # The parent has seen that the file is not there, or is to be continued.
  assert commands[0][-4:] == [
    '--out=kept.json', '--resume', '--peer=hf:/a', '--peer=sdpa:/b'
  ]  # fmt: skip


def test_the_script_needs_nothing_of_paraxis(tmp_path):
  """Where torch is missing, it says so; its folder hides no library."""
  link = tmp_path / 'python'
  link.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
  link.chmod(link.stat().st_mode | stat.S_IXUSR)
  job = dict(peer='hf', bench='step', sizes={})
  done = subprocess.run(
    [link, peers.SCRIPT, json.dumps(job)], capture_output=True, text=True,
    input='', check=True, cwd=tmp_path,
  )  # fmt: skip
  assert 'torch does not import' in json.loads(done.stdout)['skip']


def test_an_old_library_is_named(monkeypatch):
  monkeypatch.setitem(peer_process.OLDEST, 'json', (99, 1))
  with pytest.raises(RuntimeError, match=r'json .* is older than 99.1'):
    peer_process.load('json')


def test_a_peer_without_a_target_is_a_row(tmp_path, monkeypatch):
  scripted(tmp_path, monkeypatch)
  with measure.session(peers=(('xllamacpp', sys.executable),)):
    report = measure.begin('methods', 'B1', measure.CPU, True)
    with peers.beside(report, dict(rows=7), SILENT) as others:
      ours = {'one by one': lambda: {'': 8.0}}
      times = measure.interleave(ours | others.candidates, 2)
      others.judge(times, 'one by one')
  assert not report.checks
  row = report.rows['speed of one by one / xllamacpp']
  assert row == ('ratio', [0.25, 0.375])


class Server:
  """What peer_process.llama_cpp calls; a text is as long as its prompt."""

  def __init__(self, about):
    assert (about.model.path, about.n_ctx) == ('weights.gguf', 7)
    assert about.cpuparams.n_threads == about.cpuparams_batch.n_threads == 1

  def handle_completions(self, asked):
    assert asked['temperature'] == 0 and asked['ignore_eos']
    assert not asked['cache_prompt']
    made = min(asked['n_predict'], len(asked['prompt']))
    return dict(usage=dict(completion_tokens=made))


def options():
  parts = ('model', 'cpuparams', 'cpuparams_batch')
  return types.SimpleNamespace(**{p: types.SimpleNamespace() for p in parts})


def test_llama_cpp_continues_every_prompt(monkeypatch):
  module = types.SimpleNamespace(
    CommonParams=options, Server=Server, __version__='2026.10.1'
  )
  monkeypatch.setitem(sys.modules, 'xllamacpp', module)
  sizes = dict(file='weights.gguf', prompts=[[1, 2], [3, 4, 5, 6]], new=3)
  with pytest.raises(RuntimeError, match=r'llama.cpp made 2 tokens'):
    peer_process.methods('xllamacpp', sizes)()
  sizes['prompts'][0] += [7]
  peer_process.methods('xllamacpp', sizes)()
  assert 'xllamacpp 2026.10.1' in peer_process.facts('methods')


def test_maxtext_makes_a_step_when_it_is_asked(monkeypatch):
  """Its loop, in a thread, takes one turn a call; what ends it is raised."""
  made, sizes = [], dict(rows=2, length=16, num_layers=3, **WIDTHS)
  train = types.SimpleNamespace()

  def turn(state, *rest):
    made.append(state['state'])
    state['state'] += 1
    if state['state'] == 4:
      raise ValueError('out of memory')

  def main(argv):
    assert argv[1].endswith('base.yml') and 'dtype=float32' in argv
    assert {'base_emb_dim=8', 'head_dim=4', 'per_device_batch_size=2'} <= {
      *argv
    }
    state = dict(state=1)
    while True:
      train.training_loop_iteration(state, {}, {})

  train.main, train.training_loop_iteration = main, turn
  package = types.ModuleType('maxtext')
  package.__version__, package.__file__ = '0.2.5', 'maxtext/__init__.py'
  monkeypatch.setitem(sys.modules, 'maxtext', package)
  monkeypatch.setitem(sys.modules, 'maxtext.trainers.pre_train.train', train)
  run = peer_process.step('maxtext', sizes)
  assert not made  # it waits
  run()
  run()
  assert made == [1, 2]
  with pytest.raises(RuntimeError, match='ValueError: out of memory'):
    run()
  assert peer_process.facts('step').startswith('maxtext 0.2.5, jax ')


@pytest.mark.hf
@pytest.mark.sampled(4)  # one in a turn: torch.compile builds for a minute
@pytest.mark.parametrize(
  'name', sorted({*peers.NAMES} - {'maxtext', 'xllamacpp'})
)
def test_peers_of_torch(name):
  python = sys.executable
  assert importlib.util.find_spec('torch')
  function = bench_train.step
  if name == 'sdpa':
    function = bench_decode.prefill
  with measure.session(peers=((name, python),)):
    report = function(1, True, SILENT)
  assert any(n.startswith(f'{name}: torch ') for n in report.notes)
  what = [c.what for c in report.checks if c.what.endswith(f'/ {name}')]
  ours = 'ours, bfloat16' if name == 'hf_autocast' else 'ours'
  # Prefill is compared at two lengths.
  assert len(what) == 1 + (name == 'sdpa')
  assert all(ours in x for x in what)


@pytest.mark.hf
def test_torch_decodes_and_attends():
  model = dict(vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=2)
  sizes = dict(rows=2, before=4, new=3, length=16)
  assert peer_process.decode('', model | sizes | dict(after=False))() is None
  assert peer_process.decode('', model | sizes | dict(after=True))() > 0
  sizes = dict(rows=1, heads=2, length=8, width=4)
  assert peer_process.attention('', sizes)() is None
