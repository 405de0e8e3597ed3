"""Claims about the compiled step on pipeline stages: numbers, bytes, messages.

Bytes and messages are those of the gradient compiled for CPU (HLO). A message
of the pipeline is one activation of a microbatch (b, s, h), sharded as between
layers, so that on t tensor shards each device sends b s h / t: what Megatron-LM
(arXiv:2104.04473, section 4.1) scatters before it sends, and gathers after.
Every tick sends one forward and one backward, whether a stage is busy or not:

    messages = 2 ticks = 2 (m v + p v + p - 2)

Legend: p stages, v chunks, m microbatches, t tensor shards.
"""

import numpy as np

from paraxis.sharding.meter import aot
from paraxis.sharding.meter import hlo
from paraxis.train.certify import check
from paraxis.train.certify import target_compile
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.steps import pipeline_step


def _input_bytes(config):
  """Bytes of the input of a chunk on one device, for one microbatch."""
  mesh, wide = config.mesh, np.dtype(config.model.dtype).itemsize
  rows = config.microbatch_rows // (mesh.replica * mesh.data * mesh.fsdp)
  tokens = config.data.sequence_length // (mesh.context * mesh.tensor)
  return rows * tokens * config.model.d_model * wide


def _on(run, mesh, microbatches, rows, changes):
  """(config, devices) with so many microbatches of `rows` rows."""
  sizes = {
    'pipeline.microbatches': microbatches,
    'train.batch_size': rows * microbatches,
  }
  return experiment.on(run.config, mesh, sizes | changes)


def _temporary(run, mesh, microbatches, rows, changes):
  """(temporary bytes of the gradient, bytes of the input of a chunk)."""
  config, devices = _on(run, mesh, microbatches, rows, changes)
  gradient, _ = experiment.step_program(config, devices)
  return np.array([aot.memory(gradient).temporaries, _input_bytes(config)])


def temporaries(run, *, mesh, rows, microbatches, grows):
  """HLO: how temporary memory of the gradient grows with microbatches.

  Args:
    rows: of a microbatch, all devices together.
    microbatches: [m, ...], rising, all above what 1F1B holds in flight.
    grows: {schedule: whether a microbatch more costs at least one more input
      of a chunk; else it must cost nothing}.
  """
  slopes, texts = {}, []
  for name in grows:
    schedule = {'pipeline.schedule': name}
    sizes = [_temporary(run, mesh, m, rows, schedule) for m in microbatches]
    held = [size / unit for size, unit in sizes]
    steps = np.diff(held) / np.diff(microbatches)
    slopes[name] = min(steps), max(steps)
    texts.append(f'{name} {experiment.numbers(held, ".0f")}')
  return claims.Outcome(
    ', '.join(f'{n} {">= 1" if up else "0"}' for n, up in grows.items()),
    ', '.join(f'{n} {slopes[n][1]:.2g}' for n in grows),
    f'{mesh}, inputs of a chunk for each microbatch more, rows of a '
    f'microbatch fixed ({rows}); temporaries of the gradient compiled for CPU, '
    f'm = {" ".join(map(str, microbatches))}: {"; ".join(texts)}, in inputs of '
    f'a chunk ({sizes[0][1]:,} bytes)',
    all(
      slopes[n][0] >= 1 if up else slopes[n] == (0, 0)
      for n, up in grows.items()
    ),
  )


def stored():
  """Knock-out: the forward pass keeps what the backward pass reads."""
  make = pipeline_step.Pipeline.__init__

  def keeps(self, *given, **how):
    make(self, *given, **how)
    self._stored = True

  return knockouts.patched(pipeline_step.Pipeline, '__init__', keeps)


def rematerialised(run, *, mesh, rows, microbatches, schedule, at_most):
  """HLO: temporary memory when B recomputes, over that when F stores."""
  held = {}
  for how in ('recompute', 'store'):
    changes = {'pipeline.schedule': schedule, 'pipeline.activations': how}
    size, unit = _temporary(run, mesh, microbatches, rows, changes)
    held[how] = size / unit
  ratio = held['recompute'] / held['store']
  return experiment.at_most(
    ratio,
    at_most,
    f'{mesh}, {schedule}, {microbatches} microbatches, compiled for CPU; '
    + ', '.join(f'{how} {x:.0f}' for how, x in held.items())
    + ' inputs of a chunk',
  )


def messages(run, *, mesh, rows, microbatches, chunks, times):
  """HLO: what the pipeline sends: bytes of a message, number of messages.

  Args:
    rows: of a microbatch, all devices together.
    microbatches: m, a multiple of p.
    chunks: [v, ...], 1F1B for one and interleaved above.
    times: messages of each, over those of the first.
  """
  found, right, counts = [], True, []
  for v in chunks:
    schedule = 'interleaved' if v > 1 else 'one_f_one_b'
    changes = {'pipeline.chunks': v, 'pipeline.schedule': schedule}
    config, devices = _on(run, mesh, microbatches, rows, changes)
    sent = [
      c
      for c in experiment.step_collectives(config, devices)
      if c.kind == 'collective-permute'
    ]
    p, m = config.mesh.stage, microbatches
    found.append(sum(c.count for c in sent))
    size = _input_bytes(config)
    right &= {(c.axes, c.operand_bytes) for c in sent} == {(('stage',), size)}
    right &= found[-1] == 2 * (m * v + p * v + p - 2)
    counts.append(f'v={v} {found[-1]}, {2 * m * v} of them of use at most')
  ratios = [n / found[0] for n in found]
  return claims.Outcome(
    experiment.numbers(times, 'g'),
    experiment.numbers(ratios, 'g'),
    f'{mesh}, m={microbatches}: messages a device sends in a step: '
    f'{"; ".join(counts)}. Each is b s h / t, {size:,} bytes; no scatter or '
    'gather is needed: residuals are sharded so. A tick sends whether or not a '
    'stage is busy',
    right and ratios == list(times),
  )


def compiled_fits(run, *, mesh, topology, cases, fits):
  """AOT: memory of a chip for a real machine, and bytes over each mesh axis.

  Args:
    cases: {name: {'section.field': value}}.
    fits: {name: whether a chip holds it}.
  """
  found, memory, count = {}, [], 0
  for name, changes in cases.items():
    config = experiment.fields(run.config, changes)
    count = check.parameters(config)
    try:
      report = target_compile.compile_config(config, mesh, topology)
    except aot.TooLargeError as e:
      found[name] = False
      memory.append(f'{name}: {e}')
      continue
    found[name] = bool(report.fits)
    sent = hlo.by_axis(
      [c for p in report.programs.values() for c in p.collectives]
    )
    classes = report.classes(report.worst)
    memory.append(
      f'{name}: {report.peak(report.worst) / 2**30:.1f} GiB of '
      f'{report.topology.hbm / 2**30:.0f} ('
      + ', '.join(f'{k} {v / 2**30:.1f}' for k, v in classes.items())
      + '); GB received a step, '
      + ', '.join(f'{a} {n / 1e9:.3g}' for a, n in sent.items())
    )
  answers = lambda row: ', '.join(
    f'{n} {"yes" if y else "no"}' for n, y in row.items()
  )
  return claims.Outcome(
    answers(fits),
    answers(found),
    f'{topology}, {mesh}, {count / 1e9:.0f}B parameters; ' + '; '.join(memory),
    found == fits,
  )
