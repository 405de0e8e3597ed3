"""Universal Checkpointing: a run resumes on any layout from one file

paper: arXiv:2406.18820
mechanism: sharding/checkpoint/store.py, sharding/checkpoint/shards.py,
  sharding/checkpoint/chunks.py, sharding/checkpoint/manifest.py, train/state.py
test: tests/sharding/checkpoint/test_store.py,
  tests/sharding/checkpoint/test_shards.py, tests/train/run/test_hosts.py,
  tests/train/claims/checkpoint/test_resharding.py
run: paraxis reproduce universal_checkpointing
cost: 260 CPU-seconds
expect: EQ bitwise, 47 leaves written on 12 layouts by one process, and on 2 by
  two, each read on all 12 (168 of 168), pipelines of two schedules, experts
  folded, ZeRO 1 to 3, Muon, averages of parameters and small chunks among them;
  two processes read what one wrote. Losses of the next 20 steps are within 5e-7
  of the run that never moved, in float32 with all experts of a token, and 8e-16
  in float64 with 2 of 8; with 2 in float32 rounding turned a token's choice in
  2 of 12 layouts, and losses differed by 2e-3. CPU, each of two processes reads
  1.000 times the bytes of the chunks that its shards touch, cut by rows or by
  columns, where 1.05 was asked for; and with checkpoint.chunk_bytes 65536 or
  262144 1.000 times those of its shards, 1.001 with 4096, where 1.3 was asked
  for: chunks as large as the writer's shards are up to 2.000 times.
differs: nothing is converted: files are canonical, without the layout of the
  writer, and every restore cuts what it needs. The paper's patterns by name are
  logical axes here. Bytes are of four arrays of 4 MiB, whose shards are whole
  numbers of chunks; of small leaves their metadata is most. Orbax reads the
  chunk that several shards touch again for some of them, 1.1 to 2.0 times as
  many bytes by columns, and divides rows into shorter rows. Small shapes, 8
  virtual devices, random tokens that are learnt by heart.
"""

from paraxis.configs import presets

_COMPOSED = {
  'mesh': 'stage=2,data=2,tensor=2', 'pipeline.schedule': 'v_half',
  'pipeline.chunks': 2, 'mesh.zero': 2, 'model.experts.region': 'data+tensor',
  'checkpoint.chunk_bytes': 4096,
}  # fmt: skip
# Dense and expert parameters, averages, moments of AdamW and Muon on each.
LAYOUTS = [
  {'mesh': 'data=2,fsdp=2,tensor=2'},
  _COMPOSED,
  {'mesh': 'data=1'},
  {'mesh': 'data=8', 'mesh.zero': 3},
  {'mesh': 'data=4,tensor=2', 'mesh.zero': 1},
  {'mesh': 'fsdp=8'},
  {'mesh': 'fsdp=4', 'mesh.collectives': 'explicit'},
  {'mesh': 'data=2,tensor=4', 'model.experts.region': 'tensor'},
  {'mesh': 'context=8'},
  {
    'mesh': 'data=2,context=2,tensor=2',
    'model.experts.region': 'data+context+tensor',
  },
  {'mesh': 'stage=2,tensor=4'},
  {'mesh': 'stage=4,fsdp=2', 'pipeline.schedule': 'zero_bubble'},
]


def get_config():
  """A model of experts with Muon: leaves of every kind.

  Every token takes all experts: none that rounding could turn into another.
  """
  config = presets.tiny(d_model=32, d_ff=32, num_layers=4, vocab_size=64)
  config.model.experts.update(count=8, top_k=8, d_ff=16)
  config.mesh.update(data=2, fsdp=2, tensor=2)
  config.optimizer.update(name='muon', warmup_steps=2, ema_decay=0.9)
  config.data.sequence_length = 32
  config.train.batch_size = 8
  return config


def claims():
  """What `paraxis reproduce universal_checkpointing` checks."""
  from paraxis.train.claims.checkpoint import resharding

  pairs = dict(check=resharding.every_pair, layouts=LAYOUTS, gang_of=[0, 1])
  goes_on = dict(
    check=resharding.goes_on, layouts=LAYOUTS, first=4, steps=20,
    dtype='float32', within=2e-6,
  )  # fmt: skip
  two = [case | {'model.experts.top_k': 2} for case in LAYOUTS[:5]]
  chosen = goes_on | dict(layouts=two, dtype='float64', within=1e-9)
  rows, columns = (
    ['fsdp+tensor,', 'fsdp,', ','],
    ['fsdp,tensor', ',fsdp+tensor'],
  )
  along = dict(
    check=resharding.bytes_read, mesh='fsdp=4,tensor=2',
    written='fsdp+tensor,', chunk_bytes=0, read=rows, how='once', over='chunks',
    at_most=1.05,
  )  # fmt: skip
  across = along | dict(read=columns)
  chosen_for = along | dict(
    chunk_bytes=2**16, read=rows + columns, over='shards', at_most=1.3
  )
  return [
    ('12 layouts to 12 layouts', 'EQ', pairs, None),
    ('20 steps after a change of layout', 'EQ', goes_on, None),
    ('the same, 2 experts chosen of 8', 'EQ', chosen, None),
    ('bytes read over chunks, cut by rows', 'CPU', along, None),
    ('bytes read over chunks, cut by columns', 'CPU', across, None),
    ('bytes read over shards, chunk_bytes chosen', 'CPU', chosen_for, None),
  ]


def knockouts():
  """Layers in the order of memory; a moment that is lost; whole arrays read;
  chunks read for every shard; chunks that are the writer's shards."""
  from paraxis.train.claims.checkpoint import resharding

  two = {'layouts': [_COMPOSED, LAYOUTS[2]]}
  read = 'bytes read over chunks, cut by '
  return [
    (
      'order',
      '12 layouts to 12 layouts',
      resharding.layers_as_held,
      two | {'gang_of': [0]},
    ),
    (
      'moment',
      '20 steps after a change of layout',
      resharding.one_moment_lost,
      {'layouts': LAYOUTS[:1]},
    ),
    (
      'moment_and_choice',
      'the same, 2 experts chosen of 8',
      resharding.one_moment_lost,
      {'layouts': LAYOUTS[:1]},
    ),
    ('whole', f'{read}rows', {'how': 'whole'}),
    ('apart', f'{read}columns', {'how': 'apart'}),
    (
      'as_written',
      'bytes read over shards, chunk_bytes chosen',
      {'chunk_bytes': 0},
    ),
  ]
