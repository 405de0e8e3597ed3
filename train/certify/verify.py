"""`paraxis verify`: does a layout give the numbers of one device?

The configuration is shrunk (train/certify/shrink.py) and run on virtual devices
in the layout asked for, and on one device with nothing sharded, from the same
parameters and packed batches. A row of the table is a property
(train/certify/properties.py), its bound, what was measured, the verdict, and
the leaf that differs most:

    difference of a leaf = max |a - b| / max |b|        (b: one device)

Exit code 1 if anything differs. Cost: about 20 CPU-seconds, nearly all of it
compiling.
"""

import dataclasses
import json
import math
import textwrap
from typing import Any, NamedTuple

import jax

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import build
from paraxis.sharding import mesh as mesh_lib
from paraxis.train.certify import properties as properties_lib
from paraxis.train.certify import shrink
from paraxis.train.run import workdir as workdir_lib

ALL = tuple(properties_lib.PROPERTIES)


class Subject(NamedTuple):
  """What is certified.

  config: schema.Config, shrunk, its mesh the one to run on.
  devices: as many as the mesh has.
  packed: several documents a row, and padding; else one document fills it.
  notes: texts that say what was changed.
  """

  config: Any
  devices: Any
  packed: bool = True
  notes: tuple = ()


def prepare(config, mesh_text='', dtype='float64', packed=True, devices=None):
  """`Subject` for a schema.Config.

  Args:
    config: schema.Config of any size.
    mesh_text: --mesh=; replaces the axes of config.mesh.
    dtype: of the arithmetic: 'float64', 'float32' or 'bfloat16'.
    packed: see `Subject`.
    devices: those to use; default all.

  Raises:
    UserError: a size that does not divide, with the field to change; a mesh
      that cannot be shrunk to the devices; anything that `build` finds.
  """
  known = tuple(properties_lib.BOUNDS)
  if dtype not in known:
    raise errors.UserError(
      f'--dtype={dtype} is not one of {", ".join(known)}.'
      + schema.suggest(dtype, known)
    )
  devices = jax.devices() if devices is None else devices
  asked = {a: 1 for a in mesh_lib.AXES} | build.mesh_sizes(config, mesh_text)
  wild = -1 in asked.values()
  count = len(devices) if wild else math.prod(asked.values())
  asked = mesh_lib.resolve(asked, count)
  sizes = shrink.mesh(asked, len(devices))
  shrink.check_divides(config, asked)
  small = shrink.config(config, sizes, asked, dtype)
  devices = devices[: math.prod(sizes.values())]
  notes = [
    f'{name} {was} -> {now}'
    for name, was, now in workdir_lib.differences(config, small)
    if not name.startswith('mesh.')
  ]
  if sizes != asked:
    was, now = mesh_lib.describe(asked), mesh_lib.describe(sizes)
    notes.insert(0, f'mesh {was} -> {now}, which uses the same axes')
  with jax.enable_x64(dtype == 'float64'):
    build.build(small, '', small.train.remat, devices)
  return Subject(small, devices, packed, tuple(notes))


def certify(subject, properties=ALL, report=None):
  """Rows of a `Subject`, one or more a property.

  Args:
    subject: of `prepare`.
    properties: names in properties.PROPERTIES, in order.
    report: called with each properties.Row as it is known.
  """
  model, rows = subject.config.model, []
  with jax.enable_x64(model.param_dtype == 'float64'):
    run = properties_lib.Run(*subject[:3])
    for name in properties:
      for row in properties_lib.PROPERTIES[name](run):
        rows.append(row)
        if report:
          report(row)
  return rows


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


def _line(row):
  """A Row as a line of the table."""
  verdict = 'PASS' if row.passed else 'FAIL'
  text = f'{verdict}  {row.name:46} {row.bound:7.0e} {row.measured:8.1e}'
  return f'{text}  {row.worst}'.rstrip() if row.measured else text


def _json(subject, rows, title):
  """One JSON document; a measured value that is not finite is null."""
  finite = lambda x: x if math.isfinite(x) else None
  return json.dumps(
    dict(
      layout=title,
      dtype=subject.config.model.dtype,
      devices=len(subject.devices),
      jax=jax.__version__,
      passed=all(row.passed for row in rows),
      rows=[r._asdict() | dict(measured=finite(r.measured)) for r in rows],
      notes=subject.notes,
      config=dataclasses.asdict(subject.config),
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
  subject = prepare(config, mesh_text, dtype)
  title = _title(subject.config)
  tell = (lambda text: None) if as_json else say
  tell(
    f'{title}: {len(subject.devices)} {subject.devices[0].platform} devices '
    f'against one, {dtype}, jax {jax.__version__}'
  )
  notes = '; '.join(subject.notes) or 'nothing'
  tell(textwrap.fill(f'shrunk: {notes}', 80))
  tell(f'      {"property":46} {"bound":>7} {"measured":>8}  most in')
  rows = certify(subject, report=lambda row: tell(_line(row)))
  failed = sum(not row.passed for row in rows)
  if as_json:
    say(_json(subject, rows, title))
  elif failed:
    tell(f'{failed} of {len(rows)} properties DIFFER')
  else:
    tell(f'all {len(rows)} properties hold')
  return errors.EXIT_DIFFERENT if failed else errors.EXIT_OK
