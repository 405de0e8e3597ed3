"""Memory that programs free on CPU stays with the process.

XLA:CPU allocates the temporaries of every call by malloc and frees them. glibc
returns large blocks to the kernel at once, which clears each of their pages
when it is touched again: 174,000 page faults in a training step of the
quickstart, an eighth of its CPU-seconds. One heap that is never returned has
none of them after the first step; the process then holds what it held at most.
"""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of <malloc.h>
# Threads' own heaps are returned whenever they are empty: one heap for all.
_OPTIONS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _ARENA_MAX: 1}


def keep_pages() -> bool:
  """Freed memory is used again instead of returned -> whether that is so.

  Before jax starts its threads. False: the C library is not glibc, or the
  environment says how it is to allocate (MALLOC_*, GLIBC_TUNABLES).
  """
  if any(name.startswith('MALLOC_') for name in os.environ):
    return False
  if 'glibc.malloc' in os.environ.get('GLIBC_TUNABLES', ''):
    return False
  if platform.libc_ver()[0] != 'glibc':
    return False
  mallopt = ctypes.CDLL(None).mallopt
  return all([mallopt(*option) for option in _OPTIONS.items()])
