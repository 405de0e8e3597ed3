"""What claims share: configs, compiled programs, verdicts, decoding.

    fields, under, on           a config with fields set by full name, on a mesh
    step_program, for_chip      compiled programs, and what they send and hold
    gap, equal, near, at_most   differences, and the Outcome that follows
    restored                    parameters of a checkpoint
    rows_of, stepped            decoding, one token a row

Claims import this file, harness.py and ablation.py (trainings), and no claim.

Legend: B rows, T tokens, D model.
"""

import collections
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import step as decode_step
from paraxis.models import batch as batch_lib
from paraxis.models.mixers import packed as packed_lib
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import hlo
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.certify import target_compile
from paraxis.train.certify import trial
from paraxis.train.certify import verify
from paraxis.train.claims import harness as claims
from paraxis.train.run import workdir as workdir_lib

PARAMS = 'params/'
ONE = {f'mesh.{axis}': 1 for axis in mesh_lib.AXES}  # every mesh axis at 1


def fields(config: schema.Config, *changes: dict) -> schema.Config:
  """The config with {'section.field': value} set; the last change wins.

  Raises:
    UserError: no such field, with the full names that end in it or the nearest
      one; a value that the schema refuses.
  """
  data, known = schema.to_dict(config), [n for n, _ in schema.fields()]
  for name, value in (item for change in changes for item in change.items()):
    if name not in known:
      full = [n for n in known if n.endswith(f'.{name}')]
      hint = f' Full names: {", ".join(full)}.' if full else ''
      raise errors.UserError(
        f'unknown config field {name!r}.'
        + (hint or schema.suggest(name, known))
      )
    *sections, last = name.split('.')
    inner = functools.reduce(lambda d, s: d.setdefault(s, {}), sections, data)
    inner[last] = value
  return schema.view(data)


def under(section: str, values: dict) -> dict:
  """{'section.field': value} of {'field': value}; sections may be nested."""
  found = {}
  for name, value in values.items():
    path = f'{section}.{name}'
    found |= under(path, value) if isinstance(value, dict) else {path: value}
  return found


def laid_out(config: schema.Config, mesh: str, *changes: dict):
  """`fields` of a config on the mesh axes of a text as for --mesh alone."""
  return fields(config, ONE | under('mesh', mesh_lib.parse(mesh)), *changes)


def on(config: schema.Config, mesh: str, changes=()):
  """(config on the mesh axes of a text alone, tuple of its devices).

  Args:
    mesh: text as for --mesh; axes that it leaves out are 1.
    changes: {'section.field': value}.

  Raises:
    UserError: too few devices; as `fields`.
  """
  config = laid_out(config, mesh, dict(changes))
  return config, devices_of(config)


def on_case(config: schema.Config, case: dict, of=on):
  """`on`, or `shrunk`, for {'mesh': text, 'section.field': value, ...}."""
  return of(config, case['mesh'], {k: case[k] for k in case if k != 'mesh'})


def devices_of(config: schema.Config) -> tuple:
  """The first devices, as many as all mesh axes need; UserError: too few."""
  sizes = {axis: getattr(config.mesh, axis) for axis in mesh_lib.AXES}
  devices = tuple(jax.devices()[: math.prod(sizes.values())])
  mesh_lib.resolve(sizes, len(devices))
  return devices


def mesh_of(mesh: str | dict) -> jax.sharding.Mesh:
  """A text as for --mesh, or {axis: size}, on the first devices.

  Raises:
    UserError: too few devices.
  """
  sizes = mesh_lib.parse(mesh) if isinstance(mesh, str) else mesh
  return mesh_lib.make(sizes, jax.devices()[: math.prod(sizes.values())])


def case_text(case: dict) -> str:
  """'stage=2 model.num_layers=6': a case, its mesh first."""
  rest = [f'{k}={v}' for k, v in case.items() if k != 'mesh']
  return ' '.join([case['mesh'], *rest])


def compiled(traced) -> jax.stages.Compiled:
  """A traced program, compiled quickly: to be counted, or to run once."""
  options: Any = trial.quick_options()
  return traced.lower().compile(options)


def collectives(traced, mesh) -> list:
  """[hlo.Collective] of a traced program, compiled here."""
  return hlo.collectives(compiled(traced).as_text() or '', mesh)


@functools.lru_cache(maxsize=8)
def _traced(config, devices):
  """(program.Program, {'gradient', 'update': jax.stages.Traced})."""
  job = job_lib.of_shapes(config, '', devices)
  return job, target_compile.trace(job)


@functools.lru_cache(maxsize=32)
def step_program(config: schema.Config, devices: tuple, name='gradient'):
  """(program of a step, compiled here; program.Program).

  name: 'gradient', 'update', or 'forward': the loss without its gradient.
  """
  job, traces = _traced(config, devices)
  with job.context():
    if name == 'forward':
      evaluate = step_lib.make(job.built, job.optimizer, 0.0).evaluate
      traced = jax.jit(evaluate).trace(job.state.variables, job.batch_shapes())
    else:
      traced = traces[name]
    return compiled(traced), job


@functools.lru_cache(maxsize=64)
def step_collectives(config, devices, name='gradient') -> list:
  """[hlo.Collective] of `step_program`."""
  program, job = step_program(config, devices, name)
  return hlo.collectives(program.as_text() or '', job.mesh)


@functools.lru_cache(maxsize=16)
def step_memory(config: schema.Config, topology: str, name='gradient'):
  """(aot.Memory of a program of a step on a real machine, program.Program)."""
  target = aot.topology(topology)
  with target.context():
    job = job_lib.of_shapes(config, '', target.devices)
    traced = target_compile.trace(job)[name]
  with job.context():
    return aot.memory(aot.compile_for(target, name, traced)), job


def for_chip(topology: str, name: str, function, arrays) -> jax.stages.Compiled:
  """A function compiled ahead of time for one device of a topology.

  Args:
    name: of the program, for errors. arrays: jax.ShapeDtypeStruct of arguments.
  """
  target = aot.topology(topology)
  return aot.compile_for(target, name, aot.trace_on(target, function, *arrays))


def bytes_by_device(tree) -> list[int]:
  """Bytes that each device holds of a tree of arrays."""
  held = collections.Counter()
  for x in jax.tree.leaves(tree):
    for shard in x.addressable_shards:
      held[shard.device.id] += shard.data.nbytes
  return [held[device] for device in sorted(held)]


def gap(found, wanted) -> float:
  """max |found - wanted| / max |wanted| of two arrays."""
  a, b = (np.asarray(x, np.float64) for x in (found, wanted))
  return float(np.abs(a - b).max() / np.abs(b).max())


def equal(found, within: float, caveat: str, also=True) -> claims.Outcome:
  """Outcome of EQ: the largest of some differences is at most `within`.

  Args:
    found: a difference, several, or {name: difference}; a NaN is the largest.
    also: whether all else that the claim needs holds.
  """
  values = list(found.values()) if isinstance(found, dict) else found
  worst = float(np.max(values))
  measured = f'{worst:.1e}{"" if also else ", the rest does NOT hold"}'
  passed = worst <= within and bool(also)
  return claims.Outcome(f'<= {within:.0e}', measured, caveat, passed)


def close(found, wanted, within: float) -> bool:
  """Whether numbers in pairs differ by `within` at most."""
  return all(abs(a - b) <= within for a, b in zip(found, wanted, strict=True))


def near(found, wanted, within: float, caveat: str) -> claims.Outcome:
  """Outcome: numbers in pairs differ by `within` at most."""
  return claims.Outcome(
    f'{numbers(wanted, ".2f")} +-{within:.2f}',
    numbers(found, '.2f'),
    caveat,
    close(found, wanted, within),
  )


def at_most(ratio: float, bound: float, caveat: str) -> claims.Outcome:
  """Outcome: a ratio is at most a bound."""
  return claims.Outcome(
    f'<= {bound:.2f}', f'{ratio:.3f}', caveat, bool(ratio <= bound)
  )


def numbers(values, form='') -> str:
  """'1.00 2.50' of [1, 2.5] in the format '.2f'."""
  return ' '.join(f'{value:{form}}' for value in values)


def listed(found: dict) -> str:
  """'name 1e-15, name 2e-16' of {name: difference}."""
  return ', '.join(f'{name} {value:.0e}' for name, value in found.items())


CERTIFIED = ('loss', 'gradients', 'update', 'layout')


def _certified(config, devices, dtype, properties):
  """(largest difference of `paraxis verify`, whether all rows pass)."""
  subject = verify.prepare(config, '', dtype, devices=devices)
  rows = verify.certify(subject, properties)
  # What the config itself lets differ, and holds, has a bound of its own.
  worst = max(row.measured for row in rows if not (row.why and row.passed))
  return worst, all(row.passed for row in rows)


def equals_one_device(run, *, cases, within):
  """EQ: loss, every gradient, one update and all layouts, in each case.

  By `paraxis verify`: sizes are shrunk, rows packed, nothing of experts is
  dropped, arithmetic is float64; the first case is also run in float32.

  Args:
    cases: list of {'mesh': text, 'section.field': value, ...}.
  """
  made = {case_text(c): on_case(run.config, c) for c in cases}
  found = {k: _certified(*v, 'float64', CERTIFIED) for k, v in made.items()}
  narrow, _ = _certified(
    *made[case_text(cases[0])], 'float32', ('loss', 'gradients')
  )
  gaps = {text: worst for text, (worst, _) in found.items()}
  return equal(
    gaps,
    within,
    'loss, all gradients, one update and layouts, float64, shrunk, packed '
    f'rows; {"; ".join(f"{k}: {v:.0e}" for k, v in gaps.items())}; the first '
    f'in float32: {narrow:.0e}',
    all(passed for _, passed in found.values()),
  )


def shrunk(config: schema.Config, mesh: str, changes=()):
  """(config, devices) of `on`, in float64, sizes shrunk as by verify, which
  refuses an outer loop: that stays as it is."""
  config, devices = on(config, mesh, changes)
  plain = schema.with_value(config, 'outer', schema.Outer())
  case = verify.prepare(plain, '', devices=devices)
  return schema.with_value(case.config, 'outer', config.outer), case.devices


def on_layouts(*cases: str | dict, within: float = 1e-9) -> dict:
  """What a config's claims() expects of `equals_one_device`.

  cases: a mesh as text, or {'mesh': text, 'section.field': value, ...}.
  """
  each = [dict(mesh=c) if isinstance(c, str) else c for c in cases]
  return dict(check=equals_one_device, cases=each, within=within)


def restored(job, folder) -> dict:
  """Parameters of the newest checkpoint of a folder, on the job's mesh.

  Raises:
    UserError: it has none.
  """
  # Orbax starts slowly.
  from paraxis.sharding.checkpoint import store as store_lib

  like = {PARAMS + p: x for p, x in job.built.params.items()}
  folder = workdir_lib.resolve(folder)
  steps = folder / workdir_lib.CHECKPOINTS
  with store_lib.Store(steps, read_only=True) as store:
    found = store.restore_latest_good(like, PARAMS)
  if found is None:
    raise errors.UserError(
      f'{steps} holds no checkpoint, whose parameters the claim reads: remove '
      f'{folder}, and it is trained again.'
    )
  return {p.removeprefix(PARAMS): x for p, x in found[1].items()}


def random_parameters(model) -> dict:
  """{path: array} of a decoder.Decoder: at their initial 0 and 1 scales and
  biases hide mistakes."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  mean = lambda path: 0.5 if model.kinds[path] == 'vector' else 0.0
  return {
    path: jnp.asarray(rng.normal(mean(path), 0.3, x.shape), x.dtype)
    for path, x in sorted(shapes.items())
  }


def documents(rows: int, length: int, vocabulary: int) -> batch_lib.Batch:
  """Rows of random tokens, one document each, without targets."""
  ones = np.ones((rows, length), np.int32)
  ids = np.random.default_rng(1).integers(0, vocabulary, ones.shape)
  return rows_of(ids, ones, np.cumsum(ones, 1) - 1)


def rows_of(tokens_BT, segments_BT, positions_BT) -> batch_lib.Batch:
  """models.batch.Batch without targets."""
  cast = lambda x: jnp.asarray(x, jnp.int32)
  return batch_lib.Batch(
    cast(tokens_BT), None, cast(segments_BT), cast(positions_BT), None, None
  )


def stepped(model, params: dict, rows: batch_lib.Batch, first: int = 0):
  """x_BTD of rows: `first` tokens at once, then one after the other.

  A request for each row: where a document begins it starts again. Of the first
  tokens only those of the document that holds the last of them are read, the
  features of others are 0.
  """
  # Layer by layer, XLA would compile every operation by itself.
  return jax.jit(functools.partial(_stepped, model, first=first))(params, rows)


def _stepped(model, params, rows, first):
  count, length = rows.tokens.shape
  start, cache = [], model.init_cache(count, length)
  form, order = (packed_lib.Group(count, 1),), jnp.arange(first)
  if first:
    n = rows.positions[:, first - 1 : first] + 1
    pick = lambda x, at: jnp.take_along_axis(x, at.clip(0, first - 1), 1)
    tokens = pick(rows.tokens[:, :first], order + first - n)
    x, cache = decode_step.prefill(model, params, tokens, n[:, 0], length)
    x = pick(x, (order - first + n)[..., None])
    start = [jnp.where((order >= first - n)[..., None], x, 0)]

  def one(cache, at):
    token, segment, position = (
      jax.lax.dynamic_slice_in_dim(x, at, 1, 1)
      for x in (rows.tokens, rows.segments, rows.positions)
    )
    cache = cache._replace(length=position[:, 0])
    packed = decode_step.rows(token, segment[:, 0] > 0, position[:, 0])
    x, flight = model.step(params, cache, packed, form)
    return model.commit(cache, flight, form, jnp.isfinite(x).all(-1)), x[:, 0]

  _, x = jax.lax.scan(one, cache, jnp.arange(first, length))
  return jnp.concatenate([*start, x.swapaxes(0, 1)], 1)
