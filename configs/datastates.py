"""DataStates-LLM: a checkpoint that the step does not wait for

paper: arXiv:2406.10707
mechanism: sharding/checkpoint/snapshot.py, sharding/checkpoint/writer.py,
  sharding/checkpoint/store.py
test: tests/sharding/checkpoint/test_writer.py,
  tests/train/claims/checkpoint/test_saving.py
run: paraxis reproduce datastates
cost: 80 CPU-seconds
expect: EQ bitwise the states of a loop that never saves, 8 of 8 steps, although
  every next update donates them, and equal losses; CPU, wall time for which the
  thread that trains is blocked, at every step: a synchronous save 56, 128 and
  503 times as long as ours at 32, 128 and 512 MiB (108, 247 and 1,002 ms over
  1.7, 1.9 and 1.9; the paper: up to 48), in steps of 0.25, 0.5 and 2 s, long
  enough to write in; with both cores taken by others 41, 129 and 240, direction
  only. From 32 to 512 MiB ours grows 1.1 times, a synchronous save 8 to 9
  times. Before a thread asked for copies and fingerprints it was 5 to 9 ms and
  waits for a core: 8, 12 and 60 times as long.
differs: a stall is in wall time, as CPU-seconds do not show it, on two cores
  that others used: spreads are given. The device is a pause: gradients would
  take the cores that copy and write. What a step with a save takes longer
  beside them is in `paraxis bench checkpoint`. One device. Several processes
  ask for copies in the thread that trains. No tiers: one host copy, then one
  file system. Two copies at most wait to be written; a third save waits. No
  claim on an accelerator: BENCHMARKS.md has a trial on an H200.
"""

from paraxis.configs import presets


def get_config():
  """A small model that saves every step, and keeps them all."""
  config = presets.tiny()
  config.mesh.update(data=2, fsdp=2, tensor=2)
  config.optimizer.warmup_steps = 2
  config.train.update(steps=8, eval_batches=0)
  config.checkpoint.update(every=1, keep=8, failures=8)
  return config


def claims():
  """What `paraxis reproduce datastates` checks."""
  from paraxis.train.claims.checkpoint import saving

  holds = dict(check=saving.holds_what_was_asked, mesh='data=2,fsdp=2,tensor=2')
  sizes = dict(megabytes=[32, 128, 512], steps=[0.25, 0.5, 2], rounds=5)
  wall = dict(
    check=saving.stall, at_least=10, published=dict(at_least=48), **sizes
  )
  growth = dict(check=saving.growth, at_most=0.5, **sizes)
  return [
    ('the file holds the state asked for', 'EQ', holds, None),
    ('stall of a step, synchronous over ours', 'CPU', wall, 'up to 48'),
    ('growth of the stall with size, likewise', 'CPU', growth, None),
  ]


def knockouts():
  """No copies: what is written is what the update donates. No thread: a step
  waits where a save begins until it is committed."""
  from paraxis.train.claims.checkpoint import saving

  asked = 'the file holds the state asked for'
  slower = 'stall of a step, synchronous over ours'
  grows = 'growth of the stall with size, likewise'
  # What is written at once needs no step to be written in.
  few = dict(megabytes=[32, 512], steps=[0, 0], rounds=7)
  return [
    ('copies', asked, saving.the_arrays_themselves),
    ('thread', slower, saving.written_at_once, few),
    ('thread_and_size', grows, saving.written_at_once, few),
  ]
