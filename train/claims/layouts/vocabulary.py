"""Claims about the two ends of a pipeline, sharded over all its stages.

Embedding and head are the same work and the same bytes on every device, p
stages of t tensor shards each (vocabulary parallelism, arXiv:2411.05288):

    head on one device    V h / (p t) numbers
    what V adds to one    1 / p of what it adds to a stage with both ends whole
    work of a stage       (L l + x) / p,  against  L l / p + x  of the last one

where the head is x = 2 h V operations a token and a layer l = 24 h^2 + 4 s h
(arXiv:2104.04473, appendix).

Legend: p stages, t tensor shards, m microbatches, V vocabulary, h width, L
layers, s tokens of a row.
"""

import math

import jax

from paraxis.sharding.pipeline import schedules
from paraxis.sharding.planner import simulate
from paraxis.train import program as job_lib
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.run import memory as memory_lib

ENDS = ('embedding', 'head')


def head_shares(run, *, cases):
  """HLO: bytes of the ends on every device, and of all state, real arrays.

  Args:
    cases: list of {'mesh': text, 'section.field': value, ...}.
  """
  right, sizes, shares = True, [], []
  for case in cases:
    config, devices = experiment.on_case(run.config, case)
    mesh, model = config.mesh, config.model
    job = job_lib.of_shapes(config, '', devices)
    with job.context():
      state = job.initial_state()
    ends = [state.params[p] for p in ENDS if p in state.params]
    share = mesh.stage * mesh.tensor * mesh.fsdp
    whole = len(ends) * model.vocab_size * model.d_model * 4
    held = experiment.bytes_by_device(ends)
    right &= len(ends) == 2 - model.tied_embedding
    right &= set(held) == {whole // share} and len(held) == len(devices)
    every = experiment.bytes_by_device(state)
    shares.append(max(every) / (sum(every) / len(every)))
    sizes.append(
      f'{experiment.case_text(case)}: {len(ends)} x V h / {share}, '
      f'{held[0]:,} bytes, all state {min(every):,} to {max(every):,}'
    )
  return claims.Outcome(
    'V h / (p t), max/mean 1',
    f'{"V h / (p t)" if right else "NOT V h / (p t)"}, max/mean '
    f'{max(shares):g}',
    f'parameters, and with the state of the optimizer, in float32: '
    f'{"; ".join(sizes)}',
    right and max(shares) == 1,
  )


def imbalance(run, *, shape, stages, microbatches, vocabularies):
  """SIM: work of the busiest device over the mean, head spread or last.

  Args:
    shape: {'layers', 'hidden', 'sequence'}. vocabularies: [V, ...].
  """
  layers, h, s = (shape[k] for k in ('layers', 'hidden', 'sequence'))
  schedule = schedules.make('one_f_one_b', stages, microbatches)
  found, right = {}, True
  for where in simulate.HEADS:
    found[where] = []
    for vocabulary in vocabularies:
      head = 2 * h * vocabulary / (24 * h**2 + 4 * s * h)  # in layers
      parts = dict.fromkeys(('forward', 'backward', 'weight'), layers / stages)
      busy = simulate.run(schedule, head=head, vocabulary=where, **parts).busy
      ratio = max(busy) / (sum(busy) / stages)
      last = (layers / stages + head) / ((layers + head) / stages)
      right &= math.isclose(ratio, 1 if where == 'spread' else last)
      found[where].append(ratio)
  say = lambda where: experiment.numbers(found[where], '.2f')
  return claims.Outcome(
    '1.00 for all V',
    say('spread'),
    f'V = {", ".join(f"{v // 1024}k" for v in vocabularies)}, {stages} stages, '
    f'{layers} layers of {h}; with the head on the last stage '
    f'{say("last")}, as (L l / p + x) / ((L l + x) / p)',
    right,
  )


WHOLE = {'mesh.rules': 'fsdp_tensor vocab=tensor'}  # ends on every stage


def _compiled(config, topology):
  """(bytes of a device at the worst moment, [bytes of state of each device]).

  Of the gradient, with the optimizer's state added.
  """
  memory, job = experiment.step_memory(config, topology)
  held = dict.fromkeys(job.mesh.devices.flat, 0)
  for x in jax.tree.leaves(job.state):
    for device, index in x.sharding.devices_indices_map(x.shape).items():
      sides = (len(range(n)[i]) for n, i in zip(x.shape, index, strict=True))
      held[device] += math.prod(sides) * x.dtype.itemsize
  optimizer = memory_lib.device_bytes(job.state.optimizer)
  return memory.peak + memory.code + optimizer, list(held.values())


def growth(run, *, mesh, topology, model, vocabularies, few, within):
  """AOT: what a larger vocabulary adds to a stage, the ends spread or on one.

  Unequal stages: one has both ends, whole. Spread over p stages, V must add to
  each 1 / p of 18 bytes for every number of the ends (as Megatron-LM counts:
  the parameter, its gradient, two numbers of Adam in float32 and a copy in
  bfloat16 for products), without any logits. It may add no more than 1 / p of
  what it adds to the unequal stage as compiled, and all must hold the same
  bytes of the state, counted device by device.

  All devices run one program, for which the compiler reports one worst moment.
  So both kinds of unequal stage are compiled as programs of their own: of one
  every stage holds whole ends; of the other the ends have a few words only.

  Args:
    model: {'section.field': value} beyond the config's.
    vocabularies: [V, larger V]. few: words of the ends of a stage without.
    within: relative, of the growth; and of the state, (most - least) / most.
  """
  peaks, apart = {}, []
  ways = dict(even=({}, vocabularies), whole=(WHOLE, vocabularies))
  for name, (rules, sizes) in (ways | dict(without=({}, [few]))).items():
    peaks[name] = []
    for vocabulary in sizes:
      size = {'model.vocab_size': vocabulary}
      config = experiment.laid_out(run.config, mesh, model, rules, size)
      peak, held = _compiled(config, topology)
      peaks[name].append(peak)
      apart.append(1 - min(held) / max(held))
  (first, last), p = vocabularies, config.mesh.stage
  even, whole = (peaks[way][1] - peaks[way][0] for way in ways)
  counted = 2 * 18 * (last - first) * config.model.d_model
  share, (without,) = p * even / counted, peaks['without']
  less = [f'{1 - without / x:.0%}' for x in peaks['whole']]
  gib = lambda *sizes: experiment.numbers([x / 2**30 for x in sizes], '.1f')
  return claims.Outcome(
    f'1 +-{within:.2f} of an even share',
    f'{share:.3f}',
    f'{topology}, {mesh}, optimizer included, GiB at V = '
    f'{" ".join(f"{v // 1024}k" for v in vocabularies)}: every stage, ends '
    f'spread, {gib(*peaks["even"])}, state {max(apart):.0%} apart; a stage '
    f'with whole ends {gib(*peaks["whole"])}, and {gib(without)} with ends of '
    f'{few:,} words, {" and ".join(less)} less. V adds {gib(even, whole)}, '
    f'the first {p * even / whole:.3f} of an even share of the second, which '
    f'has its logits; counted without, {gib(counted / p, counted)}',
    abs(share - 1) <= within
    and p * even <= (1 + within) * whole
    and max(apart) <= within,
  )
