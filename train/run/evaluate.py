"""Held-out text in bits per byte, per domain: comparable across tokenizers.

    bits per byte = sum of nats over all held-out targets / ln 2 / bytes of text
    loss          = the same sum / targets: nats a token, as the training loss

Documents stand alone and a piece longer than a row loses its context, so the
figure is pessimistic; the end of a document is predicted too and adds no byte.
Of train.objective=masked and block it is an upper bound in expectation over
masks (train/data/objectives.py), of one draw of them, the same in any run.
"""

from collections.abc import Mapping
import math
import time
import types
from typing import Any, NamedTuple

import jax

from paraxis.sharding import meeting
from paraxis.sharding.meter import compiling
from paraxis.train.run import metrics

BOUND = 'eval/bits_per_byte_bound'  # there where bits per byte are such a bound


def missed(workdir, step, train) -> bool:
  """Whether a run that resumes at a step has not evaluated it, and was to.

  A signal or a kill came between its save and its evaluation. The answer of
  process 0, which writes the metrics, is that of all.

  Args:
    workdir: of the run, with its metrics. train: schema.Train.
  """
  every = train.eval_every
  if not every or step % every or not 0 < step < train.steps:
    return False
  lost = True
  if not jax.process_index():
    row = metrics.read(workdir).get(step, {})
    lost = not any(name.startswith('eval/') for name in row)
  return meeting.agree('evaluation missed', lost)


class Evaluation(NamedTuple):
  """What held-out text costs.

  Attributes:
    bits_per_byte: over all domains. domains: {name: bits per byte}.
    n_bytes: of the text. loss: nats a token, over all; losses: {name: of one}.
    bound: they are upper bounds, of a model of masks.
    mean: with replicas that step alone, the Evaluation of their mean; the
      others are of the anchor. spread: the root of the mean square distance of
      replicas from their mean, in lengths of the mean.
  """

  bits_per_byte: float
  domains: dict
  n_bytes: int
  loss: float = math.nan
  losses: Mapping[str, float] = types.MappingProxyType({})
  bound: bool = False
  mean: 'Evaluation | None' = None
  spread: float = math.nan

  def values(self):
    """As metrics: 'eval/loss', 'eval/<domain>/bits_per_byte', and so on."""
    each = {f'eval/{d}/bits_per_byte': v for d, v in self.domains.items()}
    each |= {f'eval/{d}/loss': v for d, v in self.losses.items()}
    both = {'eval/loss': self.loss, 'eval/bits_per_byte': self.bits_per_byte}
    if self.bound:  # beside it: a reader of one name sees all runs
      both[BOUND] = self.bits_per_byte
    if self.mean:
      both['eval/mean/bits_per_byte'] = self.mean.bits_per_byte
      both['eval/spread'] = self.spread
    return both | each

  def line(self):
    """One line of text."""
    each = ', '.join(f'{d} {v:.3f}' for d, v in self.domains.items())
    loss = f', loss {self.loss:.4f}' if math.isfinite(self.loss) else ''
    if self.mean:
      loss += f'; the mean of the replicas {self.mean.bits_per_byte:.4f}'
      loss += f', they are {self.spread:.1e} of its length away'
    what = 'bits per byte (upper bound)' if self.bound else 'bits per byte'
    return f'held-out {what} {self.bits_per_byte:.4f} ({each}){loss}'


class Pace:
  """Says how long an evaluation takes, if that is long, and how far it is."""

  LONG, EVERY = 10.0, 30.0  # seconds in all; between lines

  def __init__(self, batches, tokens, say, clock=time.monotonic):
    self._batches, self._tokens = batches, tokens
    self._say, self._clock = say, clock
    self._first: Any = None  # (batches, time) when the clock starts
    self._said: Any = None  # the time of the last line

  def __call__(self, done):
    """So many batches are done; the first time starts the clock."""
    now = self._clock()
    if self._first is None:
      self._first = done, now
      return
    before, began = self._first
    left = (now - began) / (done - before) * (self._batches - done)
    if self._said is None and now - began + left >= self.LONG:
      self._said = now
      self._say(
        f'evaluating {self._tokens:,} held-out tokens: about {left:,.0f} s '
        'left; train.eval_batches reads fewer.'
      )
    elif self._said is not None and now - self._said >= self.EVERY:
      self._said = now
      self._say(f'evaluating: {done / self._batches:.0%}, {left:,.0f} s left')


class Evaluator:
  """Compiles once, then evaluates parameters on every held-out document."""

  def __init__(
    self,
    job,
    function,
    held_out=None,
    compiled=None,
    beat=lambda: None,
    say=lambda line: None,
  ):
    """Args:

    job: program.Job; a program.Program, if held_out is given.
    function: step.Step.evaluate, (params, batch) -> sum of nats.
    held_out: list of data.HeldOut; default the job's.
    compiled: the function, compiled already.
    beat: called whenever some batches are done (run/watchdog.py); what is true
      ends the evaluation there: in all processes, or in none.
    say: called with a line now and then, if it takes long.
    """
    self._job, self._function, self._compiled = job, function, compiled
    self._held_out = job.held_out if held_out is None else held_out
    self._beat, self._say = beat, say

  def __call__(self, params) -> Any:
    """The `Evaluation`; None: `beat` ended it."""
    job, domains, losses = self._job, {}, {}
    nats_all, bytes_all, tokens_all = 0.0, 0, 0
    lo, hi = job.local_rows(job.config.microbatch_rows)
    tokens = sum(held.n_pairs for held in self._held_out)
    pace, done = Pace(sum(map(len, self._held_out)), tokens, self._say), 0
    for held in self._held_out:
      if self._beat():
        return None
      sums = []
      for i in range(len(held)):
        batch = job.put(held.batch_at(i, lo, hi), lo)
        if self._compiled is None:
          self._compiled = compiling.compile_step(
            'evaluation', self._function, params, batch
          )
        sums.append(self._compiled(params, batch))
        done += 1
        # Hundreds of programs in flight can block each other on CPU devices.
        if i % 8 == 7 or done <= 2:
          jax.block_until_ready(sums[-1])
          pace(done)
        if i % 8 == 7 and self._beat():
          return None
      nats = math.fsum(float(s) for s in jax.device_get(sums))
      domains[held.domain] = nats / math.log(2) / held.n_bytes
      losses[held.domain] = nats / held.n_pairs
      nats_all, bytes_all = nats_all + nats, bytes_all + held.n_bytes
      tokens_all += held.n_pairs
    bits = nats_all / math.log(2) / bytes_all
    bound = job.config.train.objective != 'next_token'
    loss = nats_all / tokens_all
    return Evaluation(bits, domains, bytes_all, loss, losses, bound)
