"""What becomes of every leaf when a run begins with the weights of another.

    --init_from: taken: params/ (13 leaves)
    --init_from: new, its own left out: optimizer/ (27 leaves), step

Nothing is filled in silently: each leaf of the new run, and each of its origin,
is in one line. Whole folders of one fate are one word.
"""

from paraxis.configs.base import errors
from paraxis.models import trained

TAKEN, NEW, LEFT, MERGED = 'taken', 'new', 'left out', 'merged into its matrix'
BOTH = 'new, its own left out'  # both have it, and it is not taken
BEGINS = 'begins as the parameters'
# Rules whose rate or ramps follow a count in their state.
SCHEDULED = ('prodigy', 'schedule_free', 'ademamix')
# Folders of leaves that are copies of parameters in a new run: averages, what
# replicas have of their own (train/steps/outer.py), and the points of update
# rules (train/updates/update_rules.py).
COPIES = (
  f'{trained.EMA}/', 'outer/params/', 'outer/each/anchor/',
  'optimizer/schedule_free/point/', 'optimizer/schedule_free/inner/z/',
  'optimizer/prodigy/params0/',
)  # fmt: skip


def parameter_of(path) -> str:
  """Name, without its folder, of what a leaf begins as; '': it is no copy."""
  found = [path.removeprefix(f) for f in COPIES if path.startswith(f)]
  return found[0] if found else ''


def check_optimizer(where, was, job):
  """UserError if the state of an update rule cannot be that of a new run.

  Args:
    where: path of the run that it is of. was: (its rule, how many replicas step
      alone there, 0: none). job: program.Job of the new run.
  """
  now = job.config.optimizer.name, job.state.replicas
  for wrong, text, what in (
    (
      was[0] != now[0],
      f'the optimizer of {where} is {was[0]!r}, here optimizer.name={now[0]!r}',
      'its state begins',
    ),
    (
      was[1] != now[1],
      f'{was[1]} replicas step alone there, {now[1]} here (0: none), in '
      f'{where}',
      'their states begin',
    ),
    (
      now[0] in SCHEDULED,
      f'optimizer.name={now[0]} has its place in the schedule of {where} in '
      'its state, and would continue at its end',
      'its state begins',
    ),
  ):
    if wrong:
      raise errors.UserError(
        f'--init_optimizer: {text}: leave out --init_optimizer, and {what} '
        'anew.'
      )


def fates(wanted, saved, read, rows=(), renamed=()):
  """{path: fate} of the leaves of a new run, and of those of its origin.

  Args:
    wanted, saved: paths of the new run, of the origin.
    read: paths of `saved` that are read, by the names of `wanted`.
    rows: {path: words on which rows are taken}. renamed: {path: other one of
      `saved` that is read instead}.
  """
  rows, renamed, out = dict(rows), dict(renamed), {}
  for path in wanted:
    if path in read:
      other = renamed.get(path, path)
      folder = other.split('/')[0]
      out[path] = TAKEN if other == path else f'{TAKEN} from {folder}/'
      if path in rows:
        out[path] += f', {rows[path]}'
    elif parameter_of(path):
      out[path] = BEGINS
    else:
      out[path] = BOTH if path in saved else NEW
  used = set(renamed.values())
  for path in set(saved) - set(wanted):
    out[path] = MERGED if path in read else LEFT
    if path in used:
      del out[path]  # told of the leaf that it becomes
  return out


def _groups(chosen, paths):
  """`chosen` as text: a folder of `paths` that are all chosen is one word."""
  out = {}
  for path in sorted(chosen):
    parts = path.split('/')
    for i in range(1, len(parts) + 1):
      folder = '/'.join(parts[:i])
      inside = [p for p in paths if f'{p}/'.startswith(f'{folder}/')]
      if chosen.issuperset(inside):
        out[folder if len(inside) > 1 else path] = len(inside)
        break
  return ', '.join(f'{f}/ ({n} leaves)' if n > 1 else f for f, n in out.items())


def lines(fates) -> list[str]:
  """One for each fate, of {path: fate}."""
  by_fate = {}
  for path, fate in fates.items():
    by_fate.setdefault(fate, set()).add(path)
  return [
    f'{fate}: {_groups(chosen, fates)}'
    for fate, chosen in sorted(by_fate.items())
  ]
