"""Block sizes of kernels that were searched for: data, by kind of device.

block_table.json is a list of rows. A row names the calls that it is for,

  op, pass      'attention'; 'forward', 'dq' or 'dkv'
  device        device_kind, as jax prints it
  head, dtype   the larger head size, and the dtype of q
  mask          'full': no block needs a mask; 'partial': some may

the best block (queries, keys) among those tried, its cost and that of the
kernel's default (`figure` and `default`, in `unit`), and the source of both:

  static        instruction bundles of programs compiled ahead of time for the
                device; not measured
  measured      time on such a device

A call without a row takes the kernel's default. `paraxis bench kernels
--tune=FILE` writes such a file. With PARAXIS_BLOCKS=FILE in the environment its
rows take precedence over those of the package; both are read once a process.
"""

import functools
import json
import os
import pathlib
from typing import NamedTuple

from paraxis.configs.base import errors

OWN = pathlib.Path(__file__).with_name('block_table.json')
VARIABLE = 'PARAXIS_BLOCKS'
SOURCES = ('static', 'measured')
MASKS = ('full', 'partial')


class Key(NamedTuple):
  """Key of a row: the calls that it is for."""

  op: str
  which: str
  device: str
  head: int
  dtype: str
  mask: str


class TunedBlock(NamedTuple):
  """One row. figure, default: None, or its cost and that of the default."""

  key: Key
  block: tuple[int, int]
  source: str
  unit: str = ''
  figure: float | None = None
  default: float | None = None

  def report(self):
    """'static: 2.1e+05 bundles, 2.4e+05 with the default'."""
    if self.figure is None:
      return self.source
    text = f'{self.source}: {self.figure:.3g} {self.unit}'
    if self.default is None:
      return text
    return f'{text}, {self.default:.3g} with the default'


def _row(given):
  """dict -> TunedBlock; ValueError, KeyError or TypeError if it is invalid."""
  given = dict(given)
  names = ('op', 'pass', 'device', 'head', 'dtype', 'mask')
  key = Key(*(given.pop(name) for name in names))
  row = TunedBlock(key, tuple(given.pop('block')), **given)
  if row.source not in SOURCES or key.mask not in MASKS:
    raise ValueError(f'source {row.source!r}, mask {key.mask!r}')
  if len(row.block) != 2 or not all(
    isinstance(n, int) and n > 0 for n in row.block
  ):
    raise ValueError(f'block {row.block}, not two numbers above 0')
  return row


def read(path):
  """{Key: TunedBlock} of a file.

  Raises:
    errors.UserError: the file cannot be read, or a row (its number) is invalid.
  """
  number = 0
  try:
    rows = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    out = {}
    for given in rows:
      number += 1
      row = _row(given)
      if row.key in out:
        raise ValueError(f'a second row for {tuple(row.key)}')
      out[row.key] = row
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
    raise errors.UserError(
      f'block table {path}, row {number}: {type(e).__name__}: {e}; write it '
      f'with paraxis bench kernels --tune=FILE'
    ) from e
  return out


def write(path, rows):
  """Writes rows, one to a line, sorted.

  Raises:
    errors.UserError: the folder does not exist or cannot be written to.
  """
  lines = []
  for row in sorted(rows, key=lambda r: r.key):
    fields = row.key._asdict() | row._asdict()
    del fields['key']
    fields = {'pass' if n == 'which' else n: x for n, x in fields.items()}
    lines.append(json.dumps({n: x for n, x in fields.items() if x is not None}))
  text = '[\n' + ',\n'.join(lines) + '\n]\n'
  try:
    pathlib.Path(path).write_text(text, encoding='utf-8')
  except OSError as e:
    raise errors.UserError(f'--tune={path}: {e.strerror}') from e


@functools.cache
def _rows(path):
  return (read(OWN) if OWN.exists() else {}) | (read(path) if path else {})


def rows():
  """{Key: TunedBlock} in use."""
  return _rows(os.environ.get(VARIABLE, ''))


def find(key):
  """The TunedBlock of a Key, or None."""
  return rows().get(key)
