"""Parts that end well, fail, crash and hang: what test_command.py runs.

As a program, one process of one of them, without jax.
"""

import os
import pathlib
import sys
import time

from paraxis.train.bench.device import parts as device_parts


def _good(work):
  work.report.add({'good': [1.0, 2.0, 3.0]}, 'TF/s')
  with (pathlib.Path(work.folder) / 'ran').open('a') as out:
    out.write('good\n')


def _wrong(work):
  work.report.check('error of o', [0.5], 0.1, least=False)
  raise ValueError('o is wrong by 0.5,\n the bound is 0.1')


def _crash(work):
  print('an illegal address was encountered', flush=True)
  os._exit(7)


def _hang(work):
  time.sleep(600)


def _wait(work):
  """Hangs until somebody lets it go."""
  if not (pathlib.Path(work.folder) / 'go').exists():
    time.sleep(600)


def _mended(work):
  """Fails until somebody lets it go."""
  if not (pathlib.Path(work.folder) / 'go').exists():
    _wrong(work)
  work.report.check('error of o', [0.05], 0.1, least=False)


def mixed(quick):
  """Every way to end."""
  return dict(
    good=_good, wrong=_wrong, crash=_crash, hang=_hang, last=_good
  )  # fmt: skip


def fine(quick):
  """All is well."""
  return dict(first=_good, second=_good)


def cut(quick):
  """One case that ends, one that waits."""
  return dict(first=_good, second=_wait)


def mended(quick):
  """One of three cases fails at first."""
  return dict(first=_good, second=_mended, third=_good)


def endless(quick):
  """Nothing ends."""
  return dict(one=_hang, two=_good)


def broken(quick):
  """A part whose cases cannot be made."""
  raise ImportError('no module named paraxis.missing')


def part(name, most=60, longest=30):
  """A part of this file."""
  about = f'trial of {name}'
  return device_parts.Part(name, name, about, (1, 1), most, longest)


ALL = (
  part('mixed', longest=2), part('fine'), part('cut'), part('mended'),
  part('endless', most=2), part('broken'),
)  # fmt: skip


def cases(part, quick):
  """In place of device_parts.cases."""
  return globals()[part.where](quick)


if __name__ == '__main__':
  device_parts.PARTS, device_parts.cases = ALL, cases
  sys.exit(device_parts.run(*device_parts.begun(sys.argv[1:])))
