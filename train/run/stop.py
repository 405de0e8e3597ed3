"""Signals: all processes finish the same step, save and stop."""

import os
import signal
import threading

import jax
import numpy as np

from paraxis.configs.base import errors

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
  """Turns SIGTERM and Ctrl-C into 'finish this step, save, exit 75'.

  Attributes:
    asked: name of the signal that came; '': none.
    compiling: whether the main thread compiles, for minutes perhaps. Python
      runs a handler after that alone, so a thread of its own answers.
  """

  def __init__(self, mesh):
    self.asked, self.compiling, self._mesh, self._old = '', False, mesh, {}
    self._flags, self._sum = None, jax.jit(jax.numpy.sum)
    self._pipe: tuple[int, ...] = ()
    self._before = -1

  def __enter__(self):
    for number in SIGNALS:
      try:
        self._old[number] = signal.signal(number, self._ask)
      except ValueError:  # not the main thread
        return self
    self._pipe = os.pipe()
    os.set_blocking(self._pipe[1], False)
    self._before = signal.set_wakeup_fd(self._pipe[1])
    threading.Thread(target=self._answer, daemon=True).start()
    return self

  def __exit__(self, *error):
    for number, handler in self._old.items():
      signal.signal(number, handler)
    if self._pipe:
      signal.set_wakeup_fd(self._before)
      os.close(self._pipe[1])  # ends the thread, which closes the other

  def _ask(self, number, _):
    self.asked = self.asked or signal.Signals(number).name

  def _answer(self):
    """Says at once what a signal does; a second one exits."""
    answered = False
    while byte := os.read(self._pipe[0], 1):
      if byte[0] not in SIGNALS:
        continue
      if answered:
        os._exit(errors.EXIT_CRASH)  # asked twice: the last commit stands
      answered = True
      when = 'compiling and one step' if self.compiling else 'this step'
      text = f'{signal.Signals(byte[0]).name}: saving after {when}; again to '
      os.write(2, f'{text}exit at once\n'.encode())
    os.close(self._pipe[0])

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
