"""Signals: all processes finish the same step, save and stop."""

import contextlib
import os
import signal
import threading

from paraxis.configs.base import errors

SIGNALS = tuple(
  getattr(signal, name)
  for name in ('SIGTERM', 'SIGINT', 'SIGHUP')
  if hasattr(signal, name)  # some systems have no SIGHUP
)

_early: 'Signals | None' = None


class Signals:
  """Notes the first of SIGNALS and says what it does; the second one exits.

  Attributes:
    asked: name of the signal that came; '': none.
    doing: what is finished before the run stops. The main thread may compile,
      for minutes perhaps, and Python runs a handler after that alone, so a
      thread of its own answers.
  """

  def __init__(self):
    self.asked, self.doing, self._old = '', 'the start and one step', {}
    self._pipe: tuple[int, ...] = ()
    self._before = -1

  def stand(self):
    """Installs the handlers -> self; not in the main thread: it does not."""
    for number in SIGNALS:
      if signal.getsignal(number) is signal.SIG_IGN:
        continue  # as under nohup
      try:
        self._old[number] = signal.signal(number, self._ask)
      except ValueError:  # not the main thread
        return self
    self._pipe = os.pipe()
    os.set_blocking(self._pipe[1], False)
    self._before = signal.set_wakeup_fd(self._pipe[1])
    threading.Thread(target=self._answer, daemon=True).start()
    return self

  def close(self):
    """Puts the former handlers back."""
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
      text = f'{signal.Signals(byte[0]).name}: saving after {self.doing}; again'
      with contextlib.suppress(OSError):  # after SIGHUP nobody may read it
        os.write(2, f'{text} to exit at once\n'.encode())
    os.close(self._pipe[0])


@contextlib.contextmanager
def early():
  """Signals are noted from here on, until a `Stop` takes them over.

  For a process of several, before it joins the others: they count on it for a
  step and a checkpoint, so it may not end while they start. If its block
  raises, the handlers are gone again.
  """
  global _early
  _early = Signals().stand()
  try:
    yield
  except BaseException:
    _early.close()
    _early = None
    raise


class Stop:
  """Turns SIGTERM, SIGHUP and Ctrl-C into 'finish this step, save, exit 75'.

  A signal that came in or after `early` counts as if it came now.
  """

  def __init__(self, mesh):
    import jax  # not before the handlers of `early` stand: it starts slowly

    self._mesh, self._signals = mesh, Signals()
    self._flags, self._sum = None, jax.jit(jax.numpy.sum)

  def __enter__(self):
    global _early
    self._signals = _early or self._signals.stand()
    self.compiling, _early = False, None
    return self

  def __exit__(self, *error):
    self._signals.close()

  @property
  def asked(self):
    """Name of the signal that came; '': none."""
    return self._signals.asked

  @property
  def compiling(self):
    """Whether the main thread compiles; only the answer to a signal differs."""
    return self._signals.doing.startswith('compiling')

  @compiling.setter
  def compiling(self, now):
    self._signals.doing = 'compiling and one step' if now else 'this step'

  def agreed(self):
    """Call after every step: why all processes stop now, or ''.

    With several processes a tiny sum of their flags follows each step, and is
    read after the next one: no process waits, and all see it at the same step.
    """
    import jax

    if jax.process_count() == 1:
      return self.asked
    before, self._flags = self._flags, self._sum_flags()
    if before is None or not int(before):
      return ''
    return self.asked or 'a signal to another process'

  def _sum_flags(self):
    import jax
    import numpy as np

    layout = jax.NamedSharding(self._mesh, jax.P(self._mesh.axis_names))
    mine = np.full(1, bool(self.asked), np.int32)
    return self._sum(
      jax.make_array_from_callback((self._mesh.size,), layout, lambda _: mine)
    )
