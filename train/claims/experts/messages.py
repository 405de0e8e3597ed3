"""Claims about what experts make devices send, by mesh axis.

Messages are those of the compiled step (sharding/meter/hlo.py), in bytes that
one device receives. With a capacity factor c every device sends c N K tokens to
its experts' owners and as many back, so that on r ranks an exchange moves

    c N K D w (r - 1) / r

whatever the number of experts, and there are two forward and two backward in a
layer. Gradients of experts that n / r devices hold are summed over them:

    2 |experts of a device| (n / r - 1) / (n / r)

Legend: N tokens of a device, K choices, E experts, D width, r ranks of the
region, n devices, w bytes of a number.
"""

import collections
import functools
import math

import jax
import numpy as np

from paraxis.configs.base import errors
from paraxis.models import build
from paraxis.models import layer
from paraxis.models.ffn import moe
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.experts import dispatch as expert
from paraxis.sharding.meter import hlo
from paraxis.train.certify import target_compile
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

EXCHANGES = ('all-to-all', 'ragged-all-to-all')
REGION, COUNT = 'model.experts.region', 'model.experts.count'
CAPACITY = 'model.experts.capacity_factor'


def _exchanges(found):
  return [c for c in found if c.kind in EXCHANGES]


def at_once():
  """Knock-out: a single exchange over all axes, where one after the other is
  asked for."""
  swap = lambda x, plan: jax.lax.all_to_all(x, plan.region, 0, 0, tiled=True)
  return knockouts.patched(expert, '_swap', swap)


def unfolded():
  """Knock-out: experts are sharded over data alone, whatever is asked for."""
  over = functools.partial(rules_lib.region, 'data')
  return knockouts.patched(rules_lib, 'region', lambda text, sizes: over(sizes))


def all_gathered():
  """Knock-out: whichever experts are hot, all are gathered."""

  def gather(w_EDF, hot, region):
    return jax.lax.all_gather(w_EDF, region, tiled=True)[hot]

  return knockouts.patched(expert, 'materialise', gather)


def exchanges_per_layer(run, *, mesh, regions, forward, backward):
  """HLO: all-to-alls of a layer in each pass, and over which axes.

  Args:
    regions: list of model.experts.region.
    forward, backward: how many of a layer.
  """
  found, right = {}, True
  for region in regions:
    config, devices = experiment.on(
      run.config, mesh, {REGION: region, 'train.microbatches': 1}
    )
    layers, both = config.model.num_layers, []
    for name in ('forward', 'gradient'):
      sent = _exchanges(experiment.step_collectives(config, devices, name))
      right &= {c.axes for c in sent} == {tuple(region.split('+'))}
      both.append(sum(c.count for c in sent) / layers)
    found[region] = both[0], both[1] - both[0]
  values = sorted(set(found.values()))
  return claims.Outcome(
    f'{forward} + {backward}',
    '; '.join(f'{a:g} + {b:g}' for a, b in values),
    f'{mesh}; forward + backward, {"just" if right else "NOT just"} over the '
    f'axes of the region: {", ".join(found)}',
    right and values == [(forward, backward)],
  )


def _expert_bytes(model):
  matrices = 2 if model.mlp == 'gelu' else 3
  wide = np.dtype(model.param_dtype).itemsize
  return matrices * model.d_model * moe.width(model) * wide


def _formulas(config, devices):
  """Bytes of exchanges, and of sums of experts' gradients, of a whole step.

  As in the module; all axes of the mesh with more than one device share tokens.
  """
  model, experts, n = config.model, config.model.experts, len(devices)
  times = dict(E=1, P=2)  # of a layer, its experts
  layers = [times[k[1]] for k in layer.kinds_of(model)[1] if k[1:] in times]
  r = math.prod(getattr(config.mesh, a) for a in experts.region.split('+'))
  tokens = config.train.batch_size * config.data.sequence_length / n
  wide = np.dtype(model.dtype).itemsize
  sent = experts.capacity_factor * tokens * experts.top_k * model.d_model * wide
  held = experts.count / r * _expert_bytes(model)
  both = 4 * len(layers) * sent, 2 * sum(layers) * held
  return both[0] * (r - 1) / r, both[1] * (1 - r / n)


def folded_bytes(run, *, mesh, regions, counts):
  """HLO: bytes of a step with experts over other axes, over those of the first.

  They are fewer, and differ by exchanges and sums of experts' gradients alone,
  each as by formula. Capacity factor 1, so that tokens cost the same for any
  number of experts. The whole gradient is counted: attention and the other
  parameters too.

  Args:
    regions: list of model.experts.region, the first unfolded.
    counts: of experts.
  """
  found, received, right = [], [], True
  for count in counts:
    rows, others = [], set()
    for region in regions:
      config, devices = experiment.on(
        run.config, mesh, {REGION: region, COUNT: count, CAPACITY: 1.0}
      )
      exchanged, summed = _formulas(config, devices)
      sent = experiment.step_collectives(config, devices)
      far = [c for c in sent if 'data' in c.axes]
      rows.append(
        [sum(c.total for c in part) for part in (sent, _exchanges(sent), far)]
      )
      right &= rows[-1][1] == exchanged
      others.add(rows[-1][0] - exchanged - summed)
    right &= len(others) == 1
    found.append([row[0] / rows[0][0] for row in rows[1:]])
    received.append(
      f'E={count} '
      + ', '.join(' '.join(f'{n / 1e3:,.0f}' for n in row) for row in rows)
    )
  text = lambda table: '; '.join(experiment.numbers(r, '.2f') for r in table)
  tokens = config.train.batch_size * config.data.sequence_length
  return claims.Outcome(
    'fewer, by formula',
    text(found),
    f'{mesh}, experts over {", ".join(regions)}; KB a device receives, '
    f'exchanges alone, and of all what crosses data: {"; ".join(received)}. '
    'Exchanges over more devices cost more, gradients of experts that fewer '
    f'devices share less; {tokens // len(devices)} tokens a device here: the '
    'more, the smaller the gain; what regions differ by is '
    f'{"as" if right else "NOT as"} the formulas',
    right and all(ratio < 1 for row in found for ratio in row),
  )


def exchanged_bytes(run, *, mesh, region, variants, ratio):
  """HLO: bytes of all-to-alls of a step, of one variant over another.

  Capacity factor 1: c N K tokens are sent, so that the ratio is that of K.

  Args:
    region: model.experts.region.
    variants: {name: {'section.field': value}}, the first over the second.
    ratio: expected.
  """
  found, right = {}, True
  for name, fields in variants.items():
    own = fields | {REGION: region, CAPACITY: 1.0, 'train.microbatches': 1}
    config, devices = experiment.on(run.config, mesh, own)
    sent = _exchanges(experiment.step_collectives(config, devices))
    found[name] = sum(c.total for c in sent)
    right &= found[name] == _formulas(config, devices)[0] > 0
  first, second = found.values()
  return claims.Outcome(
    f'{ratio:g}',
    f'{first / second:.3g}',
    f'{mesh}, experts over {region}, capacity factor 1; KB a device receives '
    f'in a step: {", ".join(f"{n} {x / 1e3:,.0f}" for n, x in found.items())}, '
    f'{"as" if right else "NOT as"} the formula',
    right and first == ratio * second,
  )


def _fits(run, devices, tensor, context, region, count):
  """Whether a mesh of so many devices shares out so many experts, built."""
  data, rest = divmod(devices, tensor * context)
  if rest or not data:
    return False
  sizes = dict(data=data, context=context, tensor=tensor)
  ranks = math.prod(sizes.get(a, 1) for a in region.split('+'))
  if ranks != count:
    return False
  config = experiment.fields(
    run.config,
    experiment.ONE | {f'mesh.{a}': n for a, n in sizes.items()},
    {REGION: region, COUNT: count},
    {'model.num_heads': tensor * 2, 'model.d_model': 16 * tensor},
  )
  try:
    build.build(config, abstract=True)
  except errors.UserError:
    return False
  return True


def _least(run, case, regions):
  """The smallest power of 2 that `_fits` one of the regions, up to 4,096."""
  tensor, context, count = case
  fits = lambda n: any(
    _fits(run, n, tensor, context, region, count) for region in regions
  )
  return next(filter(fits, (2**i for i in range(13))), None)


def least_devices(run, *, cases, unfolded, folded, devices):
  """SIM: fewest devices with one expert each on a rank, as `build` finds them.

  Args:
    cases: list of [tensor, context, experts]. unfolded: region where experts
      may use the devices of data alone. folded: list of other regions.
    devices: for each case [unfolded, folded].
  """
  found = [
    [_least(run, case, regions) for regions in ([unfolded], folded)]
    for case in cases
  ]
  rows = [
    f'tensor={t} context={c} E={e}: {a} -> {b}'
    for (t, c, e), (a, b) in zip(cases, found, strict=True)
  ]
  text = lambda table: ' '.join(f'{a}->{b}' for a, b in table)
  return claims.Outcome(
    text(devices),
    text(found),
    f'one expert a device, experts over {unfolded} or over any of '
    f'{", ".join(folded)}: {"; ".join(rows)}',
    found == [list(row) for row in devices],
  )


def _slots(config, devices):
  """(bytes of one exchange of each layer on a device, summed; such layers)."""
  model, data = config.model, config.data
  tokens = config.train.batch_size * data.sequence_length // devices
  wide = {'E': 1, 'P': 2}
  kinds = [kind[1:] for kind in layer.kinds_of(model)[1] if kind[1:]]
  experts = model.experts.count * sum(wide[kind] for kind in kinds)
  each = tokens * model.d_model * np.dtype(model.dtype).itemsize
  return experts * each, len(kinds)


def axis_by_axis(run, *, mesh, region):
  """HLO: messages of exchanges axis by axis, over each axis, by formula.

  A device has E N slots of D numbers (nothing is dropped). At once each of
  r - 1 others gets 1 / r of them; axis by axis, over an axis of r_a, each of
  r_a - 1 gets 1 / r_a.

  Args:
    region: model.experts.region, two axes or more.
  """
  found, right = {}, True
  axes, sizes = tuple(region.split('+')), mesh_lib.parse(mesh)
  for hierarchical in (False, True):
    how = {'model.experts.hierarchical': hierarchical, CAPACITY: 0.0}
    config, devices = experiment.on(
      run.config, mesh, how | {REGION: region, 'train.microbatches': 1}
    )
    held, layers = _slots(config, len(devices))
    bytes_of, times = collections.Counter(), collections.Counter()
    for c in _exchanges(experiment.step_collectives(config, devices)):
      bytes_of[c.axes] += c.total
      times[c.axes] += c.count
    steps = [(a,) for a in axes] if hierarchical else [axes]
    right &= set(times) == set(steps)
    for step in steps:
      r = math.prod(sizes[a] for a in step)
      right &= bytes_of[step] * r == 4 * held * (r - 1)
      right &= times[step] == 4 * layers
    found[hierarchical] = bytes_of
  peers = lambda steps: sum(math.prod(sizes[a] for a in s) - 1 for s in steps)
  both = peers([axes]), peers([(a,) for a in axes])
  kbytes = lambda row: ', '.join(
    f'{"+".join(a)} {n / 1e3:,.0f}' for a, n in row.items()
  )
  return claims.Outcome(
    'the formulas',
    'the formulas' if right else 'DIFFERENT',
    f'{mesh}, experts over {region}: peers {both[0]} -> {both[1]} an exchange; '
    f'KB a device receives in a step, at once {kbytes(found[False])}; axis by '
    f'axis {kbytes(found[True])}, the last axis being the nearest',
    right,
  )


def hot_bytes(run, *, mesh, hots):
  """HLO: what gathering hot experts costs, against gathering all.

  Forward 2 h |expert| (r - 1) / r, and as much backward; a gather of all
  experts would be E |expert| (r - 1) / r, and a scatter as much.

  Args:
    hots: how many, the first 0.
  """
  totals = {}
  for hot in hots:
    config, devices = experiment.on(
      run.config, mesh, {'model.experts.hot': hot}
    )
    axes = tuple(config.model.experts.region.split('+'))
    sent = experiment.step_collectives(config, devices)
    totals[hot] = sum(c.total for c in sent if c.kind == 'all-reduce')
  model = config.model
  size = _expert_bytes(model)
  r = math.prod(mesh_lib.parse(mesh)[a] for a in axes)
  share = (r - 1) / r * size * model.num_layers
  more = {h: totals[h] - totals[hots[0]] for h in hots[1:]}
  right = all(n == round(4 * h * share) for h, n in more.items())
  whole = 2 * model.experts.count * share
  return claims.Outcome(
    '4 h |expert| (r-1)/r',
    'equal' if right else 'DIFFERENT',
    f'{mesh}, {model.num_layers} layers, experts of {size:,} bytes on {r} '
    'ranks; KB more in a step, by hot experts: '
    + '; '.join(f'{h} {n / 1e3:,.0f}' for h, n in more.items())
    + f'; all {model.experts.count} gathered and scattered would be '
    f'{whole / 1e3:,.0f}: worth it below half of them',
    right,
  )


def compiled(run, *, fields, mesh, topology, regions):
  """AOT: memory, bytes and time to compile for a machine, by region.

  All fit, and each needs less memory and receives less than the one before.

  Args:
    fields: {'section.field': value} beyond the config's.
    regions: list of model.experts.region.
  """
  reports, right = [], True
  for region in regions:
    config = experiment.fields(run.config, fields, {REGION: region})
    report = target_compile.compile_config(config, mesh, topology)
    sent = [c for p in report.programs.values() for c in p.collectives]
    sizes = hlo.by_axis(sent)
    found = {a: n / 1e9 for a, n in sizes.items()}
    found |= dict(
      peak=report.peak(report.worst) / 2**30, all=sum(sizes.values()) / 1e9
    )
    right &= bool(report.fits)
    if reports:
      right &= all(found[k] < reports[-1][-1][k] for k in ('peak', 'all'))
    reports.append((region, report, found))
  lines = [
    f'{region}: {found["peak"]:.1f} GiB, {found["all"]:.1f} GB ('
    + ', '.join(
      f'{a} {n:.2f}' for a, n in found.items() if a not in ('peak', 'all')
    )
    + f'), {report.cpu_seconds:.0f} CPU-seconds'
    for region, report, found in reports
  ]
  return claims.Outcome(
    'all fit, less and less',
    ' | '.join(f'{f["peak"]:.1f} GiB {f["all"]:.1f} GB' for *_, f in reports),
    f'{topology}, {mesh}, {report.parameters / 1e9:.1f}B parameters; memory, '
    f'received by a device in a step, compiled in: {"; ".join(lines)}',
    right,
  )
