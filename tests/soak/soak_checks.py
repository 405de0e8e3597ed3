"""What a run that was killed must have left: the checks of soak.py, on data.

Each returns (whether it holds, one line of text).
"""

import collections
import contextlib
import json
import math

SHARE = 0.01  # of the time that the account may miss
PHASES = collections.Counter(compile=2, restore=1, save=2)  # hit, at least


def losses(text):
  """{step: [loss as hex, ...]} of a metrics.jsonl; cut lines are left out."""
  out = {}
  for line in text.splitlines():
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
      row = json.loads(line)
      step, loss = row['step'], row['train/loss'].hex()
      out.setdefault(step, []).append(loss)
  return out


def check_losses(wanted, found, steps):
  """The losses of both runs, as `losses` gives them."""
  complete = set(range(1, steps + 1))
  for name, run in (('in peace', wanted), ('killed', found)):
    if odd := sorted(complete ^ run.keys()):
      return False, f'steps {odd} are not those of 1 to {steps} ({name})'
  for step, (first, *more) in sorted(wanted.items()):
    if odd := [x for x in more + found[step] if x != first]:
      return False, f'step {step}: {odd[0]}, not {first}'
  replayed = [s for s, records in found.items() if len(records) > 1]
  count = sum(map(len, found.values())) - steps
  text = f'{count} records more of {len(replayed)} replayed ones'
  return True, f'{steps} of {steps} equal, bit for bit, with {text}'


def check_steps(attempts, steps):
  """goodput.account's attempts: each step is counted once."""
  done = again = 0
  for one in attempts:
    if one['first'] is None:
      continue
    if one['first'] > done:
      return False, f'a start began at {one["first"]}, {done} were done'
    again += min(one['last'], done) - one['first']
    done = max(done, one['last'])
  text = f'{done} productive of {steps}, {again} replayed, in {len(attempts)}'
  return done == steps, f'{text} starts'


def check_time(account, seconds):
  """goodput.account, and the seconds that were measured."""
  total = sum(account['seconds'].values())
  parts = '  '.join(f'{n} {s:.1f}' for n, s in account['seconds'].items() if s)
  text = f'{total:.2f} s of {seconds:.2f} s: {parts}'
  return abs(total - seconds) <= SHARE * seconds, text


def check_kills(hits, kills, restarts):
  """hits: the phase that each kill hit. kills: how many were asked for.

  restarts: of the run, which must have no other reason.
  """
  found = collections.Counter(hits)
  text = ', '.join(f'{n} in {phase}' for phase, n in sorted(found.items()))
  holds = len(hits) >= kills and found >= PHASES and restarts == len(hits)
  return holds, f'{len(hits)} kills, {restarts} restarts: {text}'


def check_flip(said, step):
  """said: what the run said after a bit of a step's checkpoint was flipped."""
  words = f'/{step} is damaged', 'Trying an older one', 'resumed from step '
  at = 0
  for word in words:
    at = said.find(word, at)
    if at < 0:
      return False, f'step {step}: the run did not say "{word}"'
  older = int(said[at + len(words[-1]) :].split(',')[0])
  aside = f'/{step} is now in ' in said
  text = f'step {step} was found damaged, {older} taken'
  return aside and older < step, f'{text}, set aside: {aside}'


def check_disk(reported, again):
  """Seconds until a failed save was reported, and to the next commit."""
  text = f'reported in {reported:.1f} s, the next save took {again:.1f} s'
  return math.isfinite(reported + again), text


def reported(said):
  """Whether a failed save of a full disk is reported in it."""
  return 'the disk is full' in said or 'free bytes' in said
