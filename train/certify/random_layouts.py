"""`paraxis verify --random=N --seed=S`: random configurations x meshes.

Options are those of the invariance test (options.py), with mixers and experts
of every kind; what the checks of a configuration refuse is drawn again. Each is
printed as the command that certifies it alone, then loss, gradients, an update
and the layout are compared with one device on verify's batches: rows full of
one document, packed, nearly empty and empty. At the first that differs, what
can be left out of its command is left out, and that is the answer: exit code 1.

Cost: about 8 CPU-seconds a configuration.
"""

import random

import jax

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.sharding import mesh as mesh_lib
from paraxis.train.certify import changes
from paraxis.train.certify import options
from paraxis.train.certify import verify
from paraxis.train.run import workdir as workdir_lib

PROPERTIES = ('loss', 'gradients', 'update', 'layout')
CONFIG = 'configs/quickstart.py'
DEVICES = 8  # of `paraxis verify` without --devices
FEWEST = 4  # every mesh that is drawn has two axes or more
_ONE = {f'mesh.{axis}': 1 for axis in mesh_lib.AXES}
# Fields of mixers so small that eight devices share them.
_MIXERS = {
  'mesh.context_order': 'auto',
  'model.gated_linear.key_expand': 1.0,
  'model.gated_linear.gate_rank': 4,
  'model.mamba.head_dim': 4,
  'model.mamba.state': 8,
  'model.mamba.dt_rank': 2,
  'model.recurrent.heads': 8,
  'model.rg_lru.heads': 8,
  'model.gated_delta.heads': 8,
  'model.recurrent.tolerance': changes.EXACT,
  'model.latent.rank': 16,
}
# The layers of the table's three models, or others: {field: value}.
LAYERS = (
  *({} for _ in range(6)),
  *(
    {'model.pattern': pattern} | _MIXERS
    for pattern in 'GM SR LC A-M MF S C UV DU HN H'.split()
  ),
  *(
    {
      'model.experts.count': 8,
      'model.experts.d_ff': 16,
      'model.experts.region': region,
      'model.experts.scores': scores,
      'model.experts.shared': shared,
      'model.experts.hot': hot,
    }
    for region, scores, shared, hot in (
      ('tensor', 'softmax', 0, 0),
      ('data+tensor', 'sigmoid', 1, 2),
      ('context+tensor', 'softmax', 1, 0),
      ('fsdp', 'sigmoid', 0, 1),
    )
  ),
)


def _case(rng):
  """A case of options.FACTORS under its rules, value by value."""
  while True:
    case = {}
    for name, values in options.FACTORS.items():
      fits = [v for v in values if _holds(case | {name: v})]
      if not fits:
        break
      case[name] = rng.choice(fits)
    else:
      return case


def _holds(case):
  return all(
    holds(*(case[name] for name in names))
    for names, holds in options.RULES
    if all(name in case for name in names)
  )


def _drawn(rng, base):
  """{field: value}: what a case and layers of any kind set, other than base."""
  config = options.config_of(_case(rng))
  config = schema.with_values(config, rng.choice(LAYERS))
  of_case = workdir_lib.differences(schema.Config(), config)
  whole = 'model.', 'mesh.', 'pipeline.', 'optimizer.'  # none is base's own
  given = workdir_lib.differences(base, config)
  names = {n for n, *_ in of_case} | {
    n for n, *_ in given if n.startswith(whole)
  }
  left_out = 'model.dtype', 'model.param_dtype'  # --dtype says which
  return {n: new for n, _, new in given if n in names and n not in left_out}


def draw(count, seed, base, devices):
  """Yields `count` {field: value}, what to change in schema.Config `base`.

  Only such as fit `devices` and whose numbers no layout changes.
  """
  rng = random.Random(seed)
  while count:
    fields = _drawn(rng, base)
    try:
      case = verify.prepare(schema.with_values(base, fields), devices=devices)
    except errors.UserError:
      continue
    if not case.changes:
      count -= 1
      yield fields


def command(fields, dtype, devices=DEVICES):
  """The command that certifies a configuration alone, mesh first.

  devices: how many there are.
  """
  mesh = {axis: fields.get(f'mesh.{axis}', 1) for axis in mesh_lib.AXES}
  words = [f'paraxis verify --config={CONFIG}']
  words += [f'--mesh={mesh_lib.describe(mesh)}']
  words += [f'--devices={devices}'] if devices != DEVICES else []
  words += [f'--dtype={dtype}'] if dtype != 'float64' else []
  rest = {n: v for n, v in fields.items() if n not in _ONE}
  return ' '.join(words + [f'--config.{n}={v}' for n, v in rest.items()])


def _failed(base, fields, dtype, devices):
  """Verdicts that do not hold; UserError: the configuration is refused."""
  config = schema.with_values(base, fields)
  case = verify.prepare(config, '', dtype, devices=devices)
  return [row for row in verify.certify(case, PROPERTIES) if not row.passed]


def shrunk(fields, fails):
  """{field: value}: without any that fails(fields) does not need."""
  for name in list(fields):
    fewer = {n: v for n, v in fields.items() if n != name}
    if fails(fewer):
      fields = fewer
  return fields


def run(count, seed, dtype='float64', say=print, devices=None):
  """`paraxis verify --random` -> exit code.

  Args:
    count: configurations to try. seed: of the draws.
    dtype: --dtype=. say: prints one line. devices: default all.

  Raises:
    UserError: too few devices for the meshes that are drawn.
  """
  devices = jax.devices() if devices is None else devices
  if len(devices) < FEWEST:
    raise errors.UserError(
      f'--random={count} draws meshes of two axes or more, which need {FEWEST} '
      f'devices, and there are {len(devices)}; --devices={DEVICES} gives them.'
    )
  shown = lambda fields: command(fields, dtype, len(devices))
  base = schema.view(command_line.load(CONFIG))
  base = schema.with_values(base, _ONE)
  for i, fields in enumerate(draw(count, seed, base, devices), 1):
    say(f'{i}/{count} {shown(fields)}')
    rows = _failed(base, fields, dtype, devices)
    if rows:
      for row in rows:
        say(row.line())

      def fails(fewer):
        try:
          return bool(_failed(base, fewer, dtype, devices))
        except errors.UserError:  # it needs the field
          return False

      say(f'DIFFERS, shrunk: {shown(shrunk(fields, fails))}')
      return errors.EXIT_DIFFERENT
  say(f'all {count} configurations hold')
  return errors.EXIT_OK
