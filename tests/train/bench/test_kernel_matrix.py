"""Every op, implementation and chip has its line, and the kernels are there."""

import importlib
import pkgutil

import pytest
import support

from paraxis import pallas_kernels
from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import block_table
from paraxis.sharding.meter import aot
from paraxis.train import cli
from paraxis.train.bench import kernel_matrix as matrix

# Custom calls of a program with its gradients, and MiB at its worst moment:
# arguments, results, and what a kernel may keep besides. For tpu7x the compiler
# reports a peak above the sum of all that it lists.
KERNELS = {
  'attention': (3, 24), 'decode_attention': (1, 18), 'gated_scan': (2, 25),
  'linear_scan': (2, 36), 'quantized_matmul': (1, 3),
  'selective_scan': (2, 18),
  'grouped_matmul': (2, 24),
}  # fmt: skip
# Besides, of kernels for GPUs: one that joins pieces; sweeps over segments.
MORE = {'decode_attention': 1, 'selective_scan': 2}
# Of the XLA forms; dense attention would hold 64 MiB of scores and weights,
# plain cross-entropy 64 of logits and their gradient.
MOST = dict(attention=32, cross_entropy=48, gated_scan=40)


def lines(found):
  return {(r.op, r.implementation) for r in found}


def expected():
  return {
    (op, name) for op in registry.ops() for name, *_ in registry.explain(op)
  }


def test_every_registered_op_has_a_program():
  prefix = f'{pallas_kernels.__name__}.'
  for module in pkgutil.walk_packages(pallas_kernels.__path__, prefix):
    importlib.import_module(module.name)
  assert set(matrix.PROGRAMS) == set(registry.ops())


def test_without_a_compiler_every_line_says_so(monkeypatch):
  monkeypatch.setattr(aot, 'missing', lambda platform: f'no {platform}')
  found = list(matrix.rows())
  kinds = {name.partition(':')[0] for name in matrix.TARGETS}
  assert len(found) == len(expected()) * len(kinds)
  assert lines(found) == expected()
  assert {r.state for r in found} == {'not tried'}
  assert matrix.line(found[0]).endswith('v5e   not tried: no tpu')


def check(found):
  """No failure; each kernel is in its program, within its memory."""
  for r in found:
    assert r.state in ('compiled', 'refused'), r
    assert (r.state == 'refused') == bool(r.reason), r
    if r.state == 'compiled' and r.implementation in matrix.KERNELS:
      calls, most = KERNELS[r.op]
      calls += MORE.get(r.op, 0) * (r.implementation == 'pallas_gpu')
      assert r.kernels == calls and 0 < r.peak <= most * 2**20, r
    elif r.state == 'compiled':
      assert r.kernels == 0 or r.implementation == 'ragged', r
      if r.implementation == 'xla':
        assert 0 < r.peak <= MOST.get(r.op, 64) * 2**20, r


@support.compiles('tpu')
@pytest.mark.sampled(4)
def test_all_of_it_on_one_tpu():
  found = list(matrix.rows(['v5e:1x1']))
  assert lines(found) == expected()
  check(found)
  state = {(r.op, r.implementation): r for r in found}
  for op in KERNELS:
    kernel = 'megablox' if op == 'grouped_matmul' else 'pallas_tpu'
    assert state[op, kernel].state == 'compiled'
  assert state['attention', 'splash'].state == 'compiled'
  assert 'needs a GPU' in state['attention', 'pallas_gpu'].reason


@support.compiles('tpu')
def test_kernels_on_another_tpu():
  topology = aot.topology('tpu7x:1x1x1')
  ours = [op for op in KERNELS if op != 'grouped_matmul']
  check(matrix.row(op, 'pallas_tpu', 'tpu7x', topology) for op in ours)


@support.compiles('cuda')
@pytest.mark.parametrize('name', ['h100:1', 'h200:1'])
def test_all_of_it_on_gpus(name):
  found = list(matrix.rows([name]))
  assert lines(found) == expected()
  check(found)


@support.compiles('tpu')
def test_a_kernel_that_is_not_there_is_a_failure(monkeypatch, capsys):
  real = matrix.PROGRAMS['quantized_matmul']

  def absent(impl):
    return real('xla' if impl == 'pallas_tpu' else impl)

  monkeypatch.setattr(matrix, 'PROGRAMS', dict(quantized_matmul=absent))
  assert matrix.run(['v5e:1x1']) == 1
  assert '1 failed' in capsys.readouterr().out


@support.compiles('tpu')
def test_what_does_not_compile_is_a_line(monkeypatch):
  def refuse(topology, name, traced):
    raise NotImplementedError('no such\n instruction')

  monkeypatch.setattr(aot, 'compile_for', refuse)
  topology = aot.topology('v5e:1x1')
  found = matrix.row('quantized_matmul', 'xla', 'v5e', topology)
  assert (found.state, found.reason) == ('failed', 'no such instruction')


def test_blocks_are_printed_with_their_source():
  found = list(matrix.block_lines([('tpu', 'TPU v9')], [128]))
  assert found[0] == (
    'blocks of attention by pallas_tpu, TPU v9, head size 128: forward 512x512 '
    '(default), dq 512x512 (default), dkv 512x512 (default)'
  )
  assert len(found) == 1 + len(block_table.rows())


def test_without_compilers_nothing_is_checked(monkeypatch, capsys):
  monkeypatch.setattr(aot, 'missing', lambda platform: 'not installed')
  assert matrix.run() == errors.EXIT_SKIPPED
  last, count = capsys.readouterr().out.splitlines()[-1], len(expected())
  assert last == (
    f'0 compiled, 0 refused, {count * len(matrix.TARGETS)} not tried, '
    '0 failed; none was executed'
  )


def test_the_command(monkeypatch):
  called = []
  monkeypatch.setattr(matrix, 'run', lambda: called.append(1) or 0)
  assert cli.COMMANDS['doctor'](['--kernels', '--devices=8']) == 0
  assert called
