"""Signals: all processes finish the same step, save and stop."""

import os
import signal

import jax
import numpy as np

from paraxis.configs.base import errors


class Stop:
  """Turns SIGTERM and Ctrl-C into 'finish this step, save, exit 75'."""

  def __init__(self, mesh):
    self.asked, self._mesh, self._old = '', mesh, {}
    self._flags, self._sum = None, jax.jit(jax.numpy.sum)

  def __enter__(self):
    for number in (signal.SIGTERM, signal.SIGINT):
      try:
        self._old[number] = signal.signal(number, self._ask)
      except ValueError:  # not the main thread
        break
    return self

  def __exit__(self, *error):
    for number, handler in self._old.items():
      signal.signal(number, handler)

  def _ask(self, number, _):
    if self.asked:
      os._exit(errors.EXIT_CRASH)  # asked twice: the last commit stands
    self.asked = signal.Signals(number).name
    text = f'{self.asked}: saving after this step; again to exit at once\n'
    os.write(2, text.encode())  # print would fail inside an interrupted print

  def agreed(self):
    """Call after every step: why all processes stop now, or ''.

    With several processes a tiny sum of their flags follows each step, and is
    read after the next one: no process waits, and all see it at the same step.
    """
    if jax.process_count() == 1:
      return self.asked
    before, self._flags = self._flags, self._sum_flags()
    if before is None or not int(before):
      return ''
    return self.asked or 'a signal to another process'

  def _sum_flags(self):
    layout = jax.NamedSharding(self._mesh, jax.P(self._mesh.axis_names))
    mine = np.full(1, bool(self.asked), np.int32)
    return self._sum(
      jax.make_array_from_callback((self._mesh.size,), layout, lambda _: mine)
    )
