"""`paraxis verify`: does a layout give the numbers of one device?

The configuration is shrunk (train/certify/shrink.py) and run on virtual devices
in the layout asked for, and on one device with nothing sharded, from the same
parameters and packed batches. A row of the table holds the verdict on a
property (train/certify/properties.py), its bound, what was measured, and the
leaf that differs most:

    difference of a leaf = max |a - b| / max |b|        (b: one device)

Exit code 1 if anything differs. Cost: about 20 CPU-seconds, nearly all of it
compiling.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import json
import math
import textwrap
from typing import Any

import jax

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import build
from paraxis.sharding import mesh as mesh_lib
from paraxis.train.certify import certification
from paraxis.train.certify import changes as changes_lib
from paraxis.train.certify import properties as properties_lib
from paraxis.train.certify import shrink
from paraxis.train.certify import trial
from paraxis.train.run import workdir as workdir_lib

ALL = tuple(properties_lib.PROPERTIES)


@dataclasses.dataclass(frozen=True)
class Case:
  """Config and devices under test.

  config: schema.Config, shrunk, its mesh the one to run on.
  devices: as many as the mesh has.
  packed: several documents a row, and padding; else one document fills it.
  notes: texts that say what was shrunk.
  changes: changes.Change of fields that config is without.
  """

  config: schema.Config
  devices: Sequence[Any]
  packed: bool = True
  notes: tuple[str, ...] = ()
  changes: tuple[changes_lib.Change, ...] = ()

  @functools.cached_property
  def runner(self) -> trial.Runner:
    """The config built on the devices; UserError if it does not fit."""
    with self.precision():
      return trial.Runner(self.config, self.devices)

  def precision(self):
    """A context in which float64 is that, where parameters are float64."""
    return jax.enable_x64(self.config.model.param_dtype == 'float64')


def prepare(config, mesh_text='', dtype='float64', packed=True, devices=None):
  """`Case` for a schema.Config.

  Args:
    config: schema.Config of any size.
    mesh_text: --mesh=; replaces the axes of config.mesh.
    dtype: of the arithmetic: 'float64', 'float32' or 'bfloat16'.
    packed: see `Case`.
    devices: those to use; default all.

  Raises:
    UserError: what `paraxis train` refuses; a mesh that cannot be shrunk to the
      devices.
  """
  known = tuple(certification.BOUNDS)
  if dtype not in known:
    raise errors.UserError(
      f'--dtype={dtype} is not one of {", ".join(known)}.'
      + schema.suggest(dtype, known)
    )
  if config.outer.active:
    raise errors.UserError(
      f'outer.exchange={config.outer.exchange}: replicas that step alone give '
      'other numbers than one device, by design. Verify the layout of one of '
      'them: the same config without its section outer, and --mesh without '
      'replica.'
    )
  devices = jax.devices() if devices is None else devices
  asked = {a: 1 for a in mesh_lib.AXES} | build.mesh_sizes(config, mesh_text)
  wild = -1 in asked.values()
  count = len(devices) if wild else math.prod(asked.values())
  asked = mesh_lib.resolve(asked, count)
  sizes = shrink.mesh(asked, len(devices))
  shrink.check_fits(config, asked)
  small = shrink.config(config, sizes, asked, dtype)
  small, changes = changes_lib.find(config, small)
  apart = {change.field for change in changes}
  devices = devices[: math.prod(sizes.values())]
  notes = [
    f'{name} {was} -> {now}{shrink.NOTES.get(name, "")}'
    for name, was, now in workdir_lib.differences(config, small)
    if not name.startswith('mesh.') and name not in apart
  ]
  if sizes != asked:
    was, now = mesh_lib.describe(asked), mesh_lib.describe(sizes)
    notes.insert(0, f'mesh {was} -> {now}, which uses the same axes')
  case = Case(small, devices, packed, tuple(notes), changes)
  _ = case.runner  # built here: what does not fit ends here
  return case


def certify(case, properties=ALL, report=None):
  """Verdicts on a `Case`, one or more a property, and on each of its changes.

  Args:
    case: of `prepare`.
    properties: names in properties.PROPERTIES, in order.
    report: called with each certification.Verdict as it is known.
  """
  verdicts = []
  with case.precision():
    for verdict in _verdicts(case, properties):
      verdicts.append(verdict)
      if report:
        report(verdict)
  return verdicts


def _verdicts(case, properties):
  run = certification.Certification(case.runner, case.packed)
  for name in properties:
    yield from properties_lib.PROPERTIES[name](run)
  yield from map(run.changed, case.changes)


def _title(config):
  """'data=8 zero=2': the mesh and what else of the layout is not default."""
  mesh = dataclasses.asdict(config.mesh)
  plain = dataclasses.asdict(schema.Mesh())
  choices = [
    f'{name}={value}'
    for name, value in mesh.items()
    if name not in mesh_lib.AXES and value != plain[name]
  ]
  return ' '.join([mesh_lib.describe(mesh), *choices])


def _summary(rows):
  """'all 14 properties hold', or what does not."""
  failed = collections.Counter(row.word for row in rows if not row.passed)
  if not failed:
    return f'all {len(rows)} properties hold'
  differ = failed.pop('FAIL', 0)
  texts = [f'{differ} of {len(rows)} properties DIFFER'] if differ else []
  return '; '.join(texts + [f'{word}: {n}' for word, n in failed.items()])


def _json(case, rows, title):
  """One JSON document; a measured value that is not finite is null."""
  finite = lambda x: x if math.isfinite(x) else None
  return json.dumps(
    dict(
      layout=title,
      dtype=case.config.model.dtype,
      devices=len(case.devices),
      jax=jax.__version__,
      passed=all(row.passed for row in rows),
      rows=[
        r._asdict() | dict(measured=finite(r.measured), word=r.word)
        for r in rows
      ],
      notes=case.notes,
      config=schema.to_dict(case.config),
    ),
    indent=1,
  )


def run(config, mesh_text='', as_json=False, dtype='float64', say=print):
  """`paraxis verify` -> exit code: 0 all equal, 1 something differs.

  Args:
    config: schema.Config. mesh_text: --mesh=. dtype: --dtype=.
    as_json: one JSON document instead of the table.
    say: prints one line.

  Raises:
    UserError: as `prepare`.
  """
  case = prepare(config, mesh_text, dtype)
  title = _title(case.config)
  show = (lambda text: None) if as_json else say
  show(
    f'{title}: {len(case.devices)} {case.devices[0].platform} devices '
    f'against one, {dtype}, jax {jax.__version__}'
  )
  notes = '; '.join(case.notes) or 'nothing'
  show(textwrap.fill(f'shrunk: {notes}', 80))
  show(f'      {"property":46} {"bound":>7} {"measured":>8}  most in')
  rows = certify(case, report=lambda row: show(row.line()))
  if as_json:
    say(_json(case, rows, title))
  show(_summary(rows))
  held = all(row.passed for row in rows)
  return errors.EXIT_OK if held else errors.EXIT_DIFFERENT
