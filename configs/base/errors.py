"""The errors a user meets, and the exit codes of every command.

A `UserError` is one clear line: the fault, its place, both numbers, the remedy.
The command line prints it without a traceback and exits with 2, if possible
before compiling or writing. Standard library only: every folder may import it.
"""

EXIT_OK = 0
EXIT_DIFFERENT = 1  # a claim or a check did not hold
EXIT_USER = 2  # bad input, found before the work started
EXIT_CRASH = 13  # an unexpected failure; starting again is safe
EXIT_INTEGRITY = 14  # data or checkpoints are damaged; starting again is not
EXIT_PREEMPTED = 75  # stopped by a signal after saving
EXIT_SKIPPED = 77  # nothing could be checked here; what is missing is named
EXIT_INTERRUPTED = 130  # Ctrl-C before there was anything to save
EXIT_PIPE = 141  # the reader of the output went away, as of `| head`


class UserError(ValueError):
  """Bad input: one line with fault, place, both numbers, remedy."""

  code = EXIT_USER


class MissingError(UserError):
  """What is needed is not installed: what, and how to get it."""


class IntegrityError(RuntimeError):
  """Data or a checkpoint is damaged, or numbers of a run are not finite."""

  code = EXIT_INTEGRITY


class CrashError(RuntimeError):
  """The run cannot continue, by no fault of its input: a full disk, a host that
  does not answer. Starting again is safe."""

  code = EXIT_CRASH
