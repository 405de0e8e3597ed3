"""Arrays of a checkpoint, read by Orbax: a tree, or the fault in one line.

Orbax reads all leaves at once and stops at the first that fails; later reports
of the other reads carry no information and are filtered out.
"""

import inspect
import logging
import pathlib
import sys
from typing import Any

import orbax.checkpoint as ocp

from paraxis.sharding.checkpoint import manifest as manifest_lib

_WHOLE = logging.Formatter()
_NO_ORBAX_TRACE = lambda record: 'orbax' not in _WHOLE.format(record)


def first_line(error):
  while error.__cause__:  # Orbax wraps the reason in pages of specification
    error = error.__cause__
  text = str(error).strip() or type(error).__name__
  return text.partition('\n')[0][:160]


def _without_abandoned(hook):
  """`hook` of sys.unraisablehook, without what Orbax's abandoned reads report.

  After a first failure Orbax closes the loop its other reads still answer to,
  from TensorStore's threads and whenever they end: pages of text, no news.
  """

  def filtered(report):
    # TensorStore's threads name no object; what names one may be the user's.
    late = report.object is None and 'loop is closed' in str(report.exc_value)
    if not late and not inspect.iscoroutine(report.object):
      hook(report)

  filtered.of_paraxis = True
  return filtered


def read(folder: pathlib.Path, wanted) -> tuple[dict, str | None]:
  """(restored tree, None), or ({}, the fault of the files).

  Reads the item itself: a Checkpointer ends in a barrier, where the others
  would wait for a process that met a damaged file.
  """
  hook = sys.unraisablehook
  if not hasattr(hook, 'of_paraxis'):
    sys.unraisablehook = _without_abandoned(hook)
  try:
    target = manifest_lib.nest(wanted)
    each = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(target, each, partial_restore=True)
    path: Any = folder / 'state'  # Orbax asks for etils' own kind of path
    nested = ocp.PyTreeCheckpointHandler().restore(path, args=args)
    tree = manifest_lib.flatten(nested, wanted)
  except Exception as e:  # Orbax raises many kinds for damaged files
    # With shapes already compared, lack of memory is not damage.
    if isinstance(e, MemoryError) or 'Out of memory' in str(e):
      raise
    # Both filters stay: the end of the last abandoned read is not observable.
    logging.getLogger('asyncio').addFilter(_NO_ORBAX_TRACE)
    return {}, f'its files do not read: {first_line(e)}'
  sys.unraisablehook = hook
  return tree, None
