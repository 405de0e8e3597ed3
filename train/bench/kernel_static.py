"""Bytes and schedules of every kernel for every target, kept as data.

    python -m paraxis.train.bench.kernel_static FILE.json [TARGET ...]

compiles the programs of kernel_matrix.py ahead of time, by our kernels, and one
of each kernel that is no op's implementation, and writes what it found: bytes
in use at the worst moment and, for TPUs, bundles of instructions and registers
stored of each kernel (kernel_schedules.py says what these are). A test compiles
some of them again: `worse` names what has grown by more than a twentieth.
Nothing is run; another release of the compiler makes other programs, so its
version is part of the data. Attention for Hopper GPUs (pallas_hopper, 'auto' on
them) is not in it yet: its figures are made in the same way, but by jax's CUDA
wheels alone, so those of pallas_gpu stand for GPUs.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.decode_attention import slot_write_tpu
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import target as target_lib
from paraxis.train.bench import kernel_matrix
from paraxis.train.bench import kernel_schedules

GROWN = 1.05
_CALL = re.compile(r'([\w.]+) = [^\n]*custom_call_target="tpu_custom_call"')
_AROUND = re.compile(r'^(?:transpose_)?(?:jvp_)?|_*(?:\.\d+)?$')


def compiler(platform):
  """What programs depend on besides their source: {name: version}."""
  names = ['jaxlib', 'libtpu' if platform == 'tpu' else 'jax-cuda13-plugin']
  found = {'jax': jax.__version__}
  for name in names:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = 'unknown'
  return found


def _platform(name):
  return target_lib.CHIPS[name.partition(':')[0]].platform


def _slot_write(_):
  """Of 64 rows a token into two caches of 272 slots each."""

  def call(a, b, row, place, keep, *new):
    return slot_write_tpu.write((a, b), row, place, keep, new)

  caches, new = [((64, 8, 272, 128), 'bfloat16')] * 2, (64, 8, 128)
  rows = [((64,), 'int32')] * 2 + [((64,), 'bool')]
  return call, [*caches, *rows, *[(new, 'bfloat16')] * 2]


# Kernels for TPUs that no op of registry.py names, as kernel_matrix.PROGRAMS.
ALONE = {'slot_write': _slot_write}


def kernels(name):
  """{op: the implementation that is a kernel of ours} on a target."""
  own = 'pallas_tpu' if _platform(name) == 'tpu' else 'pallas_gpu'
  have = lambda op: own in [found for found, *_ in registry.explain(op)]
  ops = [op for op in kernel_matrix.PROGRAMS if have(op)]
  return dict.fromkeys([*ops, *(ALONE if own == 'pallas_tpu' else ())], own)


def _compiled(op, implementation, topology, folder):
  """Of one program, {'peak': bytes, 'schedules': {kernel: [..]}}."""
  programs = kernel_matrix.PROGRAMS | ALONE
  function, shapes = programs[op](implementation)
  arrays = [jax.ShapeDtypeStruct(*s) for s in shapes]
  before = set(os.listdir(folder))
  traced = aot.trace_on(topology, function, *arrays)
  program = aot.compile_for(topology, op, traced)
  found: dict[str, Any] = {'peak': aot.memory(program).peak}
  if implementation == 'pallas_tpu':
    new = set(os.listdir(folder)) - before
    found['schedules'] = {
      _AROUND.sub('', call): _schedule(folder, new, call)
      for call in _CALL.findall(program.as_text() or '')
    }
  return found


def _schedule(folder, files, call):
  """[bundles, registers stored] of a kernel's table among `files`."""
  ends = f'-{call}-'
  tables = [
    f for f in files
    if ends in f and f.endswith('-final_hlo-static-per-bundle-utilization.txt')
  ]  # fmt: skip
  if len(tables) != 1:
    raise RuntimeError(f'{call}: the compiler wrote {len(tables)} tables')
  text = pathlib.Path(folder, tables[0]).read_text(encoding='utf-8')
  found = kernel_schedules.read(text)
  return [found.bundles, found.spills]


def measure(name, ops=()):
  """{op: {'peak': .., 'schedules': ..}} of a target, in a process of its own.

  Args:
    name: topology, of kernel_matrix.TARGETS. ops: (): all that have a kernel.

  Raises:
    RuntimeError: it failed; its last line is in the message.
  """
  with tempfile.TemporaryDirectory() as folder:
    given = json.dumps([name, list(ops), folder])
    done = subprocess.run(
      [sys.executable, '-m', 'paraxis.train.bench.kernel_static', given],
      env=kernel_schedules.environment(folder), capture_output=True, text=True,
      check=False,
    )  # fmt: skip
  if done.returncode:
    lines = re.findall(r'^[\w.]*(?:Error|Exception): .*', done.stderr, re.M)
    raise RuntimeError(f'kernels for {name}: {(lines or ["no message"])[-1]}')
  return json.loads(done.stdout.splitlines()[-1])


def worse(found, kept):
  """Lines: what has grown by more than a twentieth, is new, or is gone.

  Both as of `measure`; ops that `found` lacks are not compared.
  """
  out = []
  for op, now in found.items():
    sizes, before = _flat(now), _flat(kept.get(op, {}))
    for what in sorted(sizes.keys() | before.keys()):
      a, b = before.get(what), sizes.get(what)
      if a is None or b is None or b > GROWN * a:
        out.append(f'{op}, {what}: was {a}, is {b}')
  return out


def _flat(found):
  out = {'peak': found['peak']} if found else {}
  for kernel, (bundles, spills) in found.get('schedules', {}).items():
    # A kernel that stores a few registers may store a few more.
    out[f'{kernel}, bundles'] = bundles
    out[f'{kernel}, spills'] = max(spills, bundles // 20)
  return out


def main(arguments):
  """Measures targets (all that compile here) and keeps them in a file."""
  path, *names = arguments
  file = pathlib.Path(path)
  kept = json.loads(file.read_text()) if file.exists() else {}
  for name in names or kernel_matrix.TARGETS:
    platform = _platform(name)
    if lacking := aot.missing(platform):
      print(f'{name}: left as it is: {lacking}')
      continue
    kept[name] = {'compiler': compiler(platform), 'kernels': measure(name)}
    print(f'{name}: {len(kept[name]["kernels"])} programs')
  file.write_text(json.dumps(kept, indent=1, sort_keys=True) + '\n')
  return errors.EXIT_OK


def _child(given):
  name, ops, folder = json.loads(given)
  own, topology = kernels(name), aot.topology(name)
  print(
    json.dumps(
      {op: _compiled(op, own[op], topology, folder) for op in ops or own}
    )
  )


if __name__ == '__main__':
  if sys.argv[1].startswith('['):
    _child(sys.argv[1])
  else:
    sys.exit(main(sys.argv[1:]))
