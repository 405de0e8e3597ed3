"""allocator: what is freed is not faulted again, unless told otherwise."""

import os
import pathlib
import subprocess
import sys

import pytest

# Blocks of 64 MiB, written and freed: (what keep_pages says, faults of the
# second round). In a thread too, which without the call has a heap of its own.
_PROGRAM = """
import concurrent.futures, resource, sys
from paraxis.configs.base import allocator

kept = allocator.keep_pages() if sys.argv[1] == 'keep' else None

def blocks():
  for size in (2**26, 2**24):
    b'x' * size

with concurrent.futures.ThreadPoolExecutor(1) as pool:
  faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for work in (blocks, lambda: pool.submit(blocks).result()):
    work()
    before = faults()
    work()
    print(kept, faults() - before)
"""


def _run(argument, **given):
  kept = {k: v for k, v in os.environ.items() if not k.startswith('MALLOC_')}
  kept.pop('GLIBC_TUNABLES', None)
  done = subprocess.run(
    [sys.executable, '-c', _PROGRAM, argument],
    env=kept | given, check=True, capture_output=True, text=True,
  )  # fmt: skip
  lines = [line.split() for line in done.stdout.splitlines()]
  return {kept for kept, _ in lines}, [int(n) for _, n in lines]


def test_pages_are_kept():
  """Also of other threads; without the call every page faults again."""
  huge = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
  if not huge.exists() or '[always]' not in huge.read_text(encoding='ascii'):
    _, without = _run('leave')
    assert min(without) > 16_000  # of 80 MiB, 4 KiB each
  said, faults = _run('keep')
  if said == {'False'}:
    pytest.skip('the C library is not glibc')
  assert said == {'True'} and max(faults) < 1_000


@pytest.mark.parametrize(
  'given',
  [dict(MALLOC_ARENA_MAX='4'), dict(GLIBC_TUNABLES='glibc.malloc.hugetlb=1')],
)
def test_what_the_environment_says_holds(given):
  said, _ = _run('keep', **given)
  assert said == {'False'}
