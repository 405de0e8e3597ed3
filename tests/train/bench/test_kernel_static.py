"""Bytes and schedules of kernels that are kept, and what counts as worse.

After a change that is meant, or a new compiler, the module of kernel_static.py
writes the file again.
"""

import json
import pathlib
import re

import pytest
import support

from paraxis.train.bench import kernel_matrix
from paraxis.train.bench import kernel_static

FILE = pathlib.Path(__file__).parents[2] / 'golden' / 'kernels.json'
KEPT = json.loads(FILE.read_text())
ROOM = FILE.parents[2] / 'pallas_kernels'
CALL = re.compile(r"\.pallas_call\(.*?name=f?'(\w+)", re.DOTALL)
BEFORE: dict = {'scan': {'peak': 1000, 'schedules': {'forward': [200, 0]}}}


def scan(peak=1000, **schedules):
  schedules = BEFORE['scan']['schedules'] | schedules
  return {'scan': {'peak': peak, 'schedules': schedules}}


@pytest.mark.parametrize(
  'found, words',
  [
    (scan(), []),
    (scan(1050, forward=[210, 10]), []),  # a twentieth; a few stores
    (scan(500, forward=[100, 0]), []),
    (scan(1051), ['scan, peak: was 1000, is 1051']),
    (scan(forward=[211, 0]), ['scan, forward, bundles: was 200, is 211']),
    (scan(forward=[200, 11]), ['scan, forward, spills: was 10, is 11']),
    (
      scan(more=[1, 0]),
      ['scan, more, bundles: was None, is 1',
       'scan, more, spills: was None, is 0'],
    ),
    ({'new': {'peak': 1}}, ['new, peak: was None, is 1']),
    (
      {'scan': {'peak': 1000}},
      ['scan, forward, bundles: was 200, is None',
       'scan, forward, spills: was 10, is None'],
    ),
    ({}, []),
  ],
)  # fmt: skip
def test_what_is_worse(found, words):
  assert kernel_static.worse(found, BEFORE) == words


@pytest.mark.parametrize('name', kernel_matrix.TARGETS)
def test_every_kernel_of_every_target_is_kept(name):
  own = kernel_static.kernels(name)
  assert own and set(KEPT[name]['kernels']) == set(own)
  for op, found in KEPT[name]['kernels'].items():
    assert found['peak'] > 0
    assert bool(found.get('schedules')) == (own[op] == 'pallas_tpu')
  assert {'attention', 'selective_scan', 'linear_scan'} <= set(own)


def test_no_kernel_for_tpus_is_left_out():
  """Each `pallas_call` of a file of kernels for TPUs has a schedule."""
  files = [*ROOM.glob('**/tpu.py'), *ROOM.glob('**/*_tpu.py')]
  calls = {file: CALL.findall(file.read_text()) for file in files}
  names = [name for found in calls.values() for name in found]
  assert len(files) >= 7 and sum(map(bool, calls.values())) >= 6
  assert {'attention_tpu_', 'slot_write_tpu'} <= set(names)
  for target in kernel_matrix.TARGETS[:4]:
    kept = KEPT[target]['kernels'].values()
    made = [name for found in kept for name in found['schedules']]
    assert [n for n in names if not any(x.startswith(n) for x in made)] == []


def compare(name, ops=()):
  platform = 'cuda' if name[0] == 'h' else 'tpu'
  made, now = KEPT[name]['compiler'], kernel_static.compiler(platform)
  if made != now:
    pytest.skip(f'kept of {made}, this is {now}')
  found = kernel_static.measure(name, ops)
  assert kernel_static.worse(found, KEPT[name]['kernels']) == []


@support.compiles('tpu')
@pytest.mark.sampled(4)
@pytest.mark.parametrize('name', kernel_matrix.TARGETS[:4])
def test_no_kernel_for_tpus_is_worse(name):
  compare(name)


@support.compiles('cuda')
@pytest.mark.parametrize('name', kernel_matrix.TARGETS[4:])
def test_no_kernel_for_gpus_is_worse(name):
  compare(name)


@support.compiles('tpu')
def test_a_kernel_that_grew_is_found():
  (name, *_), op = kernel_matrix.TARGETS, 'quantized_matmul'
  found = kernel_static.measure(name, [op])
  assert list(found) == [op]
  ((bundles, _),) = found[op]['schedules'].values()
  found[op]['schedules'] = {'quantized_matmul_tpu': [2 * bundles, 0]}
  assert kernel_static.worse(found, KEPT[name]['kernels'])
