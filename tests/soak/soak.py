"""Kills a run again and again, and asks whether its numbers are the same.

    python tests/soak/soak.py [--seed=0] [--steps=60] [--kills=8] [--folder=...]

A tiny run of two processes with four virtual devices each is trained once
without interruption. The same run then meets what the seed draws: SIGKILL of
either rank in a compilation (twice), a restore, a save (twice) and in steps; a
flipped bit in the newest checkpoint while no process runs; a small disk of its
own that has no room for a save, and one that fills up while a save is written.
Those two need a tmpfs, that is, root; else they are left out. Order, ranks,
steps and delays are drawn; the moments are seen by soak_run.py.

Every loss, replayed ones too, must equal bit for bit that of the run without
interruption, every step be counted once, every second be accounted for
(soak_checks.py). Exit codes: 0 all checks hold, 1 one does not, 2 bad input.
Cost: 10 CPU-minutes.
"""

import argparse
import collections
import contextlib
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile

import soak_checks
import soak_run

from paraxis.configs.base import command_line
from paraxis.train.run import goodput

EVERY = 4  # steps between checkpoints
FIXED = ('compile', 'compile', 'restore', 'save', 'save', 'flip')  # of kills
DELAYS = dict(compile=1.0, restore=0.2, save=0.05, flip=0.2, steps=0.2)
# By turns of the seed: both processes write shards, or the first one alone.
MESHES = 'fsdp=4, tensor=2', 'data=2, fsdp=2, tensor=2'
WORDS = 'sea wind rock salt gull and over under storm calm sail north'.split()
CONFIG = """
from paraxis.configs import schema

def get_config():
  config = schema.default()
  config.mesh.update({mesh})
  config.model.vocab_size = 264
  config.model.d_model, config.model.d_ff = 32, 64
  config.model.num_layers, config.model.num_heads = 2, 4
  config.data.path, config.data.tokenizer = {text!r}, 'bytes'
  config.data.cache_dir = {tokens!r}
  config.data.sequence_length = 512
  config.optimizer.warmup_steps = 2
  config.train.batch_size, config.train.steps = 16, {steps}
  config.train.eval_batches = config.train.print_every = 1
  config.checkpoint.every = {every}
  return config
"""


def plan(seed, steps, kills, disk=True):
  """[Act] in their order. ValueError: too few kills or steps."""
  rng = random.Random(seed)
  timed = ['save', 'save', 'flip'] + ['steps'] * (kills - len(FIXED))
  rng.shuffle(timed)
  if disk:
    timed.insert(rng.randrange(1, len(timed) + 1), soak_run.FULL)
  first, last = 3 * EVERY + 1, steps - 2 * EVERY
  if kills < len(FIXED) or last - first < 2 * len(timed):
    most = first + 2 * len(timed) + 2 * EVERY
    raise ValueError(f'at least {len(FIXED)} kills, here {most} steps')
  width = (last - first) / len(timed)
  kinds = [
    (kind, int(first + (i + rng.random()) * width))
    for i, kind in enumerate(timed)
  ]
  # At the next start: after a kill, or at the beginning.
  for kind in ('compile', 'compile', 'restore'):
    places = [i + 1 for i, (k, _) in enumerate(kinds) if k != soak_run.FULL]
    places += [0] if kind == 'compile' else []
    kinds.insert(rng.choice(places), (kind, 0))
  if disk:  # two checkpoints: there is none that could make room
    early = next(i for i, (_, step) in enumerate(kinds) if step)
    kinds.insert(early, (soak_run.REFUSED, 2 * EVERY))
  rank = collections.defaultdict(lambda: rng.randrange(2))
  out = []
  for kind, step in kinds:
    rank[kind] ^= 1
    delay = rng.random() * DELAYS.get(kind, 0.0)
    out.append(soak_run.Act(kind, step, rank[kind], delay))
  return out


def write_config(folder, given):
  """tiny.py and its text."""
  text, rng = folder / 'song.txt', random.Random(given.seed)
  lines = (' '.join(rng.choices(WORDS, k=40)) + '.' for _ in range(800))
  text.write_text('\n\n'.join(lines))
  config = CONFIG.format(
    text=str(text),
    tokens=str(folder / 'tokens'),
    mesh=MESHES[given.seed % len(MESHES)],
    steps=given.steps,
    every=EVERY,
  )
  (folder / 'tiny.py').write_text(config)


def perform(acts, run, rng):
  """All acts, to the end of the run -> [(name, holds, text)] of theirs."""
  checks, flipped = [], (0, -1)
  for act in acts:
    if act.kind in soak_run.DISKS:
      found = soak_checks.check_disk(*run.fill(act))
      checks.append((f'disk, {act.kind}', *found))
      continue
    for _ in range(soak_run.TRIES):
      hit = run.kill(act)
      if act.kind in ('flip', 'steps', hit):
        break
    if act.kind == 'flip':
      at = len(run.said())
      flipped = at, soak_run.flip(run.workdir / 'checkpoints', rng)
  code = run.wait()
  found = soak_checks.check_flip(run.said(flipped[0]), flipped[1])
  return [('end', code == 0, f'exit code {code}'), *checks, ('flip', *found)]


def judge(peace, run, given):
  """[(name, holds, text)] of what the runs left."""
  read = lambda one: (one.workdir / 'metrics.jsonl').read_text('utf-8')
  wanted, found = (soak_checks.losses(read(one)) for one in (peace, run))
  account = goodput.account(run.workdir)
  command = [sys.executable, '-m', 'paraxis.train.cli', 'checkpoint', 'verify']
  command += [f'--checkpoint={run.workdir}']
  done = subprocess.run(command, capture_output=True, text=True)
  last = (done.stderr or done.stdout).strip().splitlines()[-1:]
  text = f'exit code {done.returncode}: {"".join(last)}'
  restarts = sum(row['event'] == 'restart' for row in run.rows)
  check_kills = soak_checks.check_kills(run.hits, given.kills, restarts)
  check_losses = soak_checks.check_losses(wanted, found, given.steps)
  check_steps = soak_checks.check_steps(account['attempts'], given.steps)
  return [
    ('losses', *check_losses),
    ('steps', *check_steps),
    ('checkpoints', done.returncode == 0, text),
    ('time', *soak_checks.check_time(account, run.seconds)),
    ('kills', *check_kills),
  ]


def soak(folder, given):
  """Both runs -> exit code."""
  write_config(folder, given)
  with soak_run.small_disk(folder / 'disk') as disk:
    acts = plan(given.seed, given.steps, given.kills, disk)
    with contextlib.closing(soak_run.Run(folder, folder / 'peace')) as peace:
      code = peace.wait()
    print(f'in peace: exit code {code}, {peace.seconds:.1f} s', flush=True)
    workdir = folder / 'disk' / 'killed'
    with contextlib.closing(soak_run.Run(folder, workdir, given.kills)) as run:
      try:
        checks = perform(acts, run, random.Random(given.seed))
        checks += judge(peace, run, given)
      except soak_run.StoppedError as e:
        checks = [('the run', False, f'{e}; see {folder}')]
        print(run.said()[-3000:])
    shutil.copytree(workdir, folder / 'killed')
  for name, holds, text in checks:
    print(f'{"PASS" if holds else "FAIL"}  {name}: {text}')
  return int(not all(holds for _, holds, _ in checks))


def main(argv=None):
  parser = argparse.ArgumentParser(prog='soak.py', description=__doc__)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--steps', type=int, default=60)
  parser.add_argument('--kills', type=int, default=8)
  parser.add_argument('--folder', help='empty; what is left stays there')
  given = parser.parse_args(argv)
  try:
    plan(given.seed, given.steps, given.kills)
  except ValueError as e:
    parser.error(str(e))
  command_line.prepare_devices(1)
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  folder = given.folder or tempfile.mkdtemp(prefix='paraxis-soak-')
  folder = pathlib.Path(folder).resolve()
  folder.mkdir(parents=True, exist_ok=True)
  code = soak(folder, given)
  if not (code or given.folder):
    shutil.rmtree(folder)
  return code


if __name__ == '__main__':
  sys.exit(main())
