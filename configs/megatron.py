"""Megatron-LM: tensor, sequence and pipeline parallel layers

paper: arXiv:2104.04473
mechanism: sharding/tensor/project.py, sharding/tensor/vocabulary.py,
  sharding/pipeline/schedules.py
test: tests/sharding/tensor/test_project.py,
  tests/train/claims/layouts/test_step.py,
  tests/train/claims/pipeline/test_step.py
run: paraxis reproduce megatron
cost: 30 CPU-seconds
expect: EQ 1e-15, on stages too; HLO 2 all-reduces forward and 2 backward a
  layer, 8 (t - 1) / t activations in all; sharded along the sequence 2 + 2
  gathers and scatters forward, 4 + 2 backward: the same bytes forward, 1.5
  times backward, direction only (the paper: 2 + 2, the same bytes); largest
  message of a step 1 / 16 of the logits. SIM bubbles (p - 1) / (v m), 2 (p - 1)
  + (v - 1) p + 1 inputs held; HLO v times the messages between stages, b s h /
  t each.
differs: the sequence part is arXiv:2205.05198, which counts 4 gathers and 4
  scatters a layer, and besides gathers inputs again in the backward pass,
  overlapped; here they are counted. A tick of the pipeline has a forward and a
  backward and waits for all devices: 1F1B then holds 2 p - 1 inputs, not p, and
  idle ticks send too. No claim about 52% of peak: this is a CPU. RMSNorm,
  rotary positions, no biases, no dropout; messages compiled for CPU.
"""

from paraxis.configs import presets


def get_config():
  """A small GPT on tensor=8, residuals sharded along the length."""
  config = presets.tiny(
    vocab_size=1024, d_ff=256, num_layers=4, num_heads=8, mlp='gelu'
  )
  config.mesh.tensor = 8
  # With stages, as in --mesh=stage=2,data=2,tensor=2: a layer in each chunk.
  config.pipeline.update(schedule='interleaved', chunks=2)
  return config


def claims():
  """What `paraxis reproduce megatron` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.layouts import step as layouts
  from paraxis.train.claims.pipeline import schedules
  from paraxis.train.claims.pipeline import step

  on = dict(mesh='tensor=8')
  alone = experiment.on_layouts('tensor=8')
  layer = on | dict(check=layouts.messages_per_layer)
  reduced = layer | dict(
    sequence=False, forward={'all-reduce': 2}, backward={'all-reduce': 2}
  )
  scattered = layer | dict(
    sequence=True,
    forward={'all-gather': 2, 'reduce-scatter': 2},
    backward={'all-gather': 4, 'reduce-scatter': 2},
    published={'backward': {'all-gather': 2, 'reduce-scatter': 2}},
  )
  # (4 + 2) / (2 + 2), as an all-reduce is a gather and a scatter.
  volume = on | dict(check=layouts.sequence_volume, forward=1.0, backward=1.5)
  volume |= dict(published={'backward': 1.0})
  logits = on | dict(check=layouts.logits_stay)
  cube = dict(mesh='stage=2,data=2,tensor=2')
  small = cube | {'train.batch_size': 16, 'pipeline.microbatches': 4}
  one = {'pipeline.schedule': 'one_f_one_b', 'pipeline.chunks': 1}
  equal = experiment.on_layouts(small, small | one)
  table = lambda check, schedule, **given: dict(
    check=check, schedule=schedule, **given
  )
  grid = lambda *chunks: [
    [p, m, v] for p, m in ((4, 8), (4, 32), (8, 32)) for v in chunks
  ]
  bubble = lambda schedule, *chunks: table(
    schedules.bubbles,
    schedule,
    cases=grid(*chunks),
    share=1,
    model='asynchronous',
  )
  held = table(
    schedules.inputs_held, 'interleaved', balanced=False,
    cases=[[p, m, v, 2 * (p - 1) + (v - 1) * p + 1] for p, m, v in grid(2, 4)],
  )  # fmt: skip
  sent = cube | dict(
    check=step.messages, rows=4, microbatches=4,
    chunks=[1, 2], times=[1, 2],
  )  # fmt: skip
  return [
    ('loss and all gradients equal one device', 'EQ', alone, None),
    ('tensor parallel: messages a layer', 'HLO', reduced, '2 | 2'),
    ('sequence parallel: messages a layer', 'HLO', scattered, '2, 2 | 2, 2'),
    ('bytes of sequence over tensor parallel', 'HLO', volume, '1 and 1'),
    ('logits are never gathered', 'HLO', logits, None),
    ('stages, data and tensor equal one device', 'EQ', equal, None),
    ('bubble of 1F1B', 'SIM', bubble('one_f_one_b', 1), '(p-1)/m'),
    ('bubble, v chunks', 'SIM', bubble('interleaved', 2, 4), '(p-1)/(vm)'),
    ('inputs of chunks held at once', 'SIM', held, '2(p-1)+(v-1)p+1'),
    ('messages of stages, times', 'HLO', sent, 'v'),
  ]


def knockouts():
  """Layers, residuals, chunks and the loss as they were before Megatron; sums
  that are made whole and cut; a batch that is not split; GPipe's order."""
  from paraxis.train.claims.layouts import step
  from paraxis.train.claims.pipeline import schedules

  whole = {'mesh.rules': 'fsdp_tensor heads= kv_heads= mlp='}
  volume = 'bytes of sequence over tensor parallel'
  return [
    ('microbatches', 'bubble of 1F1B', schedules.one_microbatch),
    ('chunks', 'bubble, v chunks', schedules.plain_1f1b),
    ('one_f_one_b', 'inputs of chunks held at once', {'schedule': 'gpipe'}),
    ('tensor_parallel_layers', 'tensor parallel: messages a layer', whole),
    (
      'sequence_parallelism',
      'sequence parallel: messages a layer',
      {'sequence': False},
    ),
    ('scattered_sums', volume, step.reduced_then_cut),
    ('parallel_loss', 'logits are never gathered', step.gathered_logits),
    ('more_chunks', 'messages of stages, times', schedules.plain_1f1b),
  ]
