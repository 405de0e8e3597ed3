"""ReaLHF: parameters move in memory between the layouts of calls

paper: arXiv:2406.14088
mechanism: sharding/reallocate.py, sharding/pieces.py
test: tests/sharding/test_reallocate.py,
  tests/train/claims/layouts/test_reallocate.py
run: paraxis reproduce realhf
cost: 90 CPU-seconds
expect: EQ every shard bitwise as restored from a checkpoint, for 6 pairs of
  layouts on 8 devices, disjoint halves, overlapping ones and a single device;
  EQ bytes sent to each device are those of the elements it lacks, exactly
  (bound 1%): all arrays between devices pass through one device_put, where they
  are counted by receiver while other transfers are refused; no compiled program
  is counted, for a move has none with collectives. HLO within one mesh the
  compiler's own reshard receives 1 to 1.5 times those bytes, never fewer; CPU a
  save and verified restore takes 10 to 13 times the CPU-seconds of a move of 14
  MB, 7 in the worst round (bound 5). The bounds are ours, the paper has none.
partial: no training moves a state between layouts yet: in claims only.
differs: the reallocation alone: no search for the plan of each call, no
  dataflow of calls, no PPO; the paper's 2.0 to 10.6 times are not claimed. The
  paper broadcasts parameters; here a device gets what it lacks, moments of the
  optimizer included. The ratio to a checkpoint is for layouts that shard and
  falls with the size: at 64 MB both copy memory, 2 to 8 times. Onto a
  replicated layout a checkpoint is cheaper (0.4): it is restored into one
  buffer that all virtual devices share. The first move of a pair compiles for 7
  to 17 CPU-seconds, as long as 30 to 80 checkpoints, and is left out. One
  process. Rows of interleaved pipelines are first put in order by
  train/state.py.
"""

from paraxis.configs import presets


def get_config():
  """The quickstart's model: a state of 14 MB in 32 arrays."""
  config = presets.small_text()
  config.mesh.update(fsdp=4, tensor=2)
  return config


def claims():
  """What `paraxis reproduce realhf` checks."""
  from paraxis.train.claims.layouts import reallocate

  on = lambda mesh, first=0, **more: dict(
    mesh=mesh, first=first, **{f'mesh.{k}': v for k, v in more.items()}
  )
  cycle = [
    on('data=2,fsdp=2,tensor=2'), on('fsdp=8'), on('stage=2,tensor=4'),
    on('context=8'), on('data=8', zero=1), on('fsdp=2,tensor=4'),
  ]  # fmt: skip
  same = [[a, b] for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
  halves = [on('fsdp=2,tensor=2'), on('fsdp=4', 4)]
  others = [
    halves,
    [on('fsdp=4', 2), on('tensor=4')],
    [on('fsdp=8'), on('data=1', 5)],
  ]
  equal = dict(check=reallocate.equals_the_disk, pairs=same + others)
  least = dict(
    check=reallocate.bytes_are_least, pairs=same + others, within=0.01
  )
  compiler = dict(
    check=reallocate.compiler_sends_no_less,
    mesh='data=2,tensor=4',
    shape=[16, 32],
    conversions_of=[
      'tensor:S(0) -> tensor:S(1)', 'tensor:S(0) -> B', 'B -> tensor:S(0)',
      'data:S(0) tensor:S(1) -> data:S(1) tensor:S(0)',
      'data:S(0) -> tensor:S(0)',
    ],
  )  # fmt: skip
  cost = dict(
    check=reallocate.cost, rounds=5, at_least=5,
    pairs=[same[0], same[1], halves],
  )  # fmt: skip
  return [
    ('as through a checkpoint', 'EQ', equal, None),
    ('bytes sent over the least', 'EQ', least, None),
    ("the compiler's reshard over ours", 'HLO', compiler, None),
    ('a checkpoint over memory', 'CPU', cost, None),
  ]


def knockouts():
  """Nothing travels; whole blocks do; nothing is held; by the disk."""
  from paraxis.train.claims.layouts import reallocate

  side = lambda mesh, first: dict(mesh=mesh, first=first)
  one = {'pairs': [[side('fsdp=2,tensor=2', 0), side('fsdp=4', 4)]]}
  return [
    ('travel', 'as through a checkpoint', reallocate.nothing_travels, one),
    ('parts', 'bytes sent over the least', reallocate.whole_blocks, one),
    ('held', "the compiler's reshard over ours", reallocate.nothing_is_held),
    ('memory', 'a checkpoint over memory', reallocate.by_the_disk, one),
  ]
