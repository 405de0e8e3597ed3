"""Ahead-of-time compilation, its cost shown, and the cache that saves it."""

import atexit
import contextlib
import functools
import itertools
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

from paraxis.configs.base import cache
from paraxis.configs.base import explain
from paraxis.sharding import meeting
from paraxis.sharding.meter import compile_store
from paraxis.sharding.meter import narrow as narrow_lib

_HIT = '/jax/compilation_cache/cache_hits'
_hits = []
_guarded = set()
_quickly = []  # not empty: within `quickly`
_overlays = []  # compile_store.Overlay of this process, once there is one


def use_cache():
  """Persistent compilation cache: jax's setting, else in the user's cache.

  What jax's setting names is used as it is, programs that may hang with it
  (compile_store.may_hang). Without a folder that this user alone may write,
  which is said, every program is compiled.
  """
  if not _hits:
    _hits.append(0)
    jax.monitoring.register_event_listener(_count)
  settings: Any = jax.config
  if settings.jax_compilation_cache_dir:
    given = pathlib.Path(settings.jax_compilation_cache_dir)
    above = given.parent.name == compile_store.OVERLAYS  # of another process
    if above and given not in _guarded:
      _guarded.add(given)
      compile_store.guard(given)
    return
  overlay = _overlay(cache.root() / 'compiled')
  if overlay is None:
    return
  _guarded.add(overlay.folder)
  compile_store.guard(overlay.folder)
  atexit.register(overlay.close)
  _overlays.append(overlay)
  for name, value in overlay.settings(seconds=0.5).items():
    jax.config.update(name, value)


def _overlay(root):
  """compile_store.Overlay in a folder; None, and a line: it is not to be used.

  A folder of others is neither mended nor used: what is in it may be theirs.
  """
  try:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    problem = compile_store.distrust(root)
    if not problem:
      return compile_store.Overlay(root, explain.tell)
    problem += ', and what it holds is run as code: remove it'
  except OSError as e:
    problem = f'{root} cannot be used ({e.strerror})'
  explain.tell(f'paraxis: every program is compiled: {problem}.')
  return None


def share_cache(seconds):
  """No process of several uses its cache unless all began with the same one.

  To be called by all, after `use_cache`. Process 0 alone writes (jax), so of a
  cache on its own disk it would read at a later start what the others compile:
  on GPUs their compilers share the measurements for a program, and would wait
  for its part until the run is ended.

  seconds: how long to wait for the others.
  """
  mine = _overlays[-1].began if _overlays else ''
  all_ = meeting.gather('compiled programs', mine, seconds)
  other = [str(i) for i, began in enumerate(all_) if began != all_[0]]
  if not (other and _overlays):
    return
  overlay = _overlays.pop()
  overlay.close()
  jax.config.update('jax_compilation_cache_dir', None)
  if jax.process_index() == 0:
    them = 'processes {} do' if len(other) > 1 else 'process {} does'
    explain.tell(
      f'paraxis: every program is compiled: {them.format(", ".join(other))} '
      f'not see what process 0 sees in {overlay.store}: give all hosts one '
      'shared folder as PARAXIS_CACHE.'
    )


def _count(event, **_):
  if event == _HIT:
    _hits[0] += 1


def options(jaxpr=None) -> Any:
  """XLA options of every program that a run compiles, or None.

  jaxpr: of the program (core.ClosedJaxpr): those of its own too (narrow.py).

  On CPU, LLVM's first optimisation level: the step's programs are the same
  speed and give the same bits as at the third, and compile for a fifth less;
  for the random numbers of the initial parameters, two thirds less. A level
  that XLA_FLAGS names is kept. Within `quickly`: of programs that run once.
  """
  if jax.default_backend() != 'cpu':
    return None
  own = {} if jaxpr is None or _quickly else narrow_lib.options(jaxpr)
  if 'xla_backend_optimization_level' in os.environ.get('XLA_FLAGS', ''):
    return own or None
  return _quick() if _quickly else {'xla_backend_optimization_level': 1} | own


@functools.cache
def _quick():
  """Of programs that compile in half the time, and are slow."""
  known = dict(
    xla_backend_optimization_level=0, xla_cpu_use_fusion_emitters=False
  )
  try:
    jax.jit(abs, compiler_options=known)(1.0)
  except jax.errors.JaxRuntimeError:  # another release of XLA
    known.popitem()
  return known


@contextlib.contextmanager
def quickly():
  """Within it `options` are those of programs that run once."""
  _quickly.append(True)
  try:
    yield
  finally:
    _quickly.pop()


def jit_for(dtype):
  """jax.jit with `options`, of programs that compute in a dtype.

  Options of a program in bfloat16 are its own: it is traced to see them.
  """
  if dtype == 'bfloat16' and not _quickly and narrow_lib.needed():
    return _Narrow
  return functools.partial(jax.jit, compiler_options=options())


class _Narrow:
  """jit of a function, compiled with the options of each of its programs."""

  def __init__(self, function, **settings):
    self._make = lambda own: jax.jit(function, compiler_options=own, **settings)
    self._traced = self._make(options())
    self._made = {}  # options, as pairs -> jit with them
    self._of = {}  # `_signature` -> one of those

  def __call__(self, *args, **named):
    return self._jit(args, named)(*args, **named)

  def lower(self, *args, **named):
    """As of jax.jit."""
    return self._jit(args, named).lower(*args, **named)

  def _jit(self, args, named):
    key = _signature(args, named)
    if key not in self._of:
      own = options(self._traced.trace(*args, **named).jaxpr)
      pairs = tuple((own or {}).items())
      self._of[key] = self._made.setdefault(pairs, self._make(own))
    return self._of[key]

  def _cache_size(self):
    """Programs that are compiled."""
    return sum(made._cache_size() for made in self._made.values())


def _signature(args, named):
  """What the program of a call depends on, at least; tracing takes longer."""
  leaves, tree = jax.tree.flatten((args, named))
  mesh = jax.sharding.get_abstract_mesh()
  return tree, mesh, *map(_kind, leaves)


def _kind(x):
  """Shape and type of an array; else type and value: it may be static."""
  if isinstance(x, jax.Array | np.ndarray | np.generic):
    return x.shape, x.dtype, getattr(x, 'weak_type', False)
  return type(x), x


def compile_step(name, function, *args, donate=(), say=None):
  """jit(function) compiled for the shapes and layouts of `args`.

  Says once what tracing, lowering and compiling took, in seconds, and whether
  the compiled program came from the cache.
  """
  before = _hits[0] if _hits else 0
  times = [time.perf_counter()]
  traced = jax.jit(function, donate_argnums=donate).trace(*args)
  times.append(time.perf_counter())
  lowered = traced.lower()
  times.append(time.perf_counter())
  compiled = lowered.compile(options(traced.jaxpr))
  times.append(time.perf_counter())
  for overlay in _overlays:
    overlay.publish()  # now, for a run may be killed
  if say:
    trace, lower, build = (b - a for a, b in itertools.pairwise(times))
    hit = bool(_hits) and _hits[0] > before
    say(
      f'{name}: trace {trace:.2f} s, lower {lower:.2f} s, '
      f'{"from the cache" if hit else "compile"} {build:.2f} s'
    )
  return compiled
