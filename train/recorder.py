"""What a run records of a step, after the next one is dispatched.

Numbers of a step are read late, so that the accelerator never waits for the
host; skipped steps are named and counted here.
"""

import collections
import json

import jax
import numpy as np

from paraxis.configs.base import errors
from paraxis.sharding import meeting
from paraxis.train import expert_counts
from paraxis.train.run import header
from paraxis.train.run import metrics as metrics_lib
from paraxis.train.run import rates as rates_lib
from paraxis.train.run import spikes
from paraxis.train.run import stragglers
from paraxis.train.steps import replicas

LOGGED = 'slope', 'draw'  # of steps.zeroth_order, which replay from them


def opened(job, step, path, token, callbacks, say, loggers):
  """The `Recorder` of a run, whose header is printed here.

  step: step.Step. path: folder of the run. token: its header.Cost.
  loggers: ExitStack that closes its files.
  """
  config, settings = job.config, job.config.train
  about = header.text(job, token, str(path), header.trace(job, step.grads))
  writers = metrics_lib.Writers(path, settings, config, about, say)
  loggers.enter_context(writers)
  progress = metrics_lib.Progress(settings.steps, settings.print_every, say)
  loggers.enter_context(progress)
  say(about)
  rates = rates_lib.Rates(token.flops, header.peak(job.mesh.devices.flat))
  return Recorder(job, writers, progress, callbacks, rates)


class Recorder:
  """Reads a step's numbers late, writes them, and watches for NaN."""

  def __init__(self, job, writers, progress, callbacks, rates):
    self._job, self.writers, self.progress = job, writers, progress
    self.rates = rates
    self._train, self._callbacks = job.config.train, callbacks
    self._paths = sorted(expert_counts.without(job.model, job.model.axes))
    self._pending, self.last = None, {}
    self._since, self._unwritten = {}, None  # sums, and the row of them
    self.streak = 0  # skipped steps in a row, up to the last one recorded
    self.skips: list[list[int]] = []  # of the cursor (run/spikes.py)
    self.spiked = 0  # step that completed a loss spike, 0: none
    self._spikes = spikes.Detector(self._train.spike)
    self._back = collections.Counter()  # step -> how often it went back there

  def resume(self, cursor):
    """Continues at the cursor of a checkpoint, {} at the start."""
    self._pending = self._unwritten = None
    self.writers.back(cursor.get('step', 0))
    self._since, self.streak, self.spiked = {}, 0, 0
    self.skips = [list(pair) for pair in cursor.get('skips', [])]
    found = cursor.get('spike', {})
    self._spikes = spikes.Detector(self._train.spike, **found)
    if self._spikes.found:  # the run was stopped before it went back
      self.spiked = cursor['step']

  def spike(self):
    """(first step of the loss spike, what to say of it)."""
    in_a_row = self._train.spike.in_a_row
    first = self._spikes.first or self.spiked - in_a_row + 1
    return first, f'the loss spiked in steps {first} to {self.spiked}'

  def forget_spike(self):
    """No checkpoint is older than it: losses are compared with later ones."""
    what = 'no checkpoint is older: training continues'
    self.progress.say(f'{self.spike()[1]}, and {what}')
    self.spiked, self._spikes = 0, spikes.Detector(self._train.spike)

  def roll_back(self, step, cursor):
    """Continues at the cursor of a step before the spike, past the batches up
    to its last one: those that an earlier spike left out, too.

    IntegrityError: it was there more than spikes.MOST times.
    """
    (_, what), last = self.spike(), self.spiked
    self._back[step] += 1
    if self._back[step] > spikes.MOST:
      raise errors.IntegrityError(
        f'{what}: the run would go back to step {step} for the '
        f'{self._back[step]}th time, and {spikes.MOST} are the most. Begin '
        f'with its parameters (--init_from=RUN/{step}) and a lower '
        'optimizer.learning_rate, or with train.spike.deviations=0.'
      )
    read = last + spikes.left_out(self.skips)
    self.resume(cursor)
    count = read - step - spikes.left_out(self.skips)
    self.skips.append([step, count])
    self.progress.say(
      f'{what}: back to step {step}, leaving out the {count} batches up to '
      f'step {last}'
    )

  def cursor(self):
    """What the cursor of a checkpoint has beside step and seed."""
    found = {'skips': self.skips} if self.skips else {}
    spike = self._spikes.state()
    return found | ({'spike': spike} if spike else {})

  @property
  def astray(self):
    """Whether the last step recorded was skipped, or its loss spiked."""
    return self.streak > 0 or self._spikes.row > 0

  def check_skipped(self, stopped):
    """IntegrityError if most steps of a finished run changed nothing.

    stopped: what stopped it before its last step, ''.
    """
    skipped, steps = self.last.get('train/skipped', 0), self._train.steps
    if 2 * skipped > steps and not stopped:
      raise errors.IntegrityError(
        f'{skipped} of {steps} steps were skipped, their gradients were not '
        'finite: lower optimizer.learning_rate, or more optimizer.warmup_steps.'
      )

  def batch(self, step):
    """Index of the batch of a step, counted from 1."""
    return step - 1 + spikes.left_out(self.skips)

  def later(self, step, numbers, batch):
    """Keeps a step's numbers on the device and records those before it.

    batch: models.batch.Batch of the step, whose tokens are counted.
    """
    self.flush()
    self._pending = step, numbers, int(batch.denominator), int(batch.read)

  def flush(self):
    """Records the step whose numbers are still on the device."""
    previous, self._pending = self._pending, None
    if previous:
      self._record(*previous)

  def write(self):
    """Records what is pending and writes its row, due or not.

    A checkpoint calls it, so that the rows of a resumed run miss no step.
    """
    self.flush()
    self._row()
    self.writers.sync()

  def _row(self):
    if self._unwritten:
      self.writers.write(*self._unwritten)
    self._since, self._unwritten = {}, None

  def _record(self, step, numbers, tokens, read):
    every = self._train.print_every
    with self.rates.waits():
      numbers = jax.device_get(numbers)
    if self._job.config.outer.active:
      numbers = replicas.together(numbers)
    self.rates.step(tokens, read)
    rates = {
      k: float(v) for k, v in numbers.items() if k.startswith('learning_rate')
    }
    values = {
      'train/loss': float(numbers['loss']),
      'train/grad_norm': float(numbers['grad_norm']),
      'train/learning_rate': max(rates.values()),
      'train/skipped': int(numbers['skipped']),
      **{f'train/{n}': numbers[n].item() for n in LOGGED if n in numbers},
      **self._sums({'train/tokens': tokens, **self.rates.work(read)}),
      **expert_counts.values(self._job.model, numbers, step % every == 0),
    }
    speed = self.rates.values(self._train.steps - step)
    speed['perf/memory_bytes'] = metrics_lib.memory_bytes()
    line = self.progress.step(step, values | speed)
    if line:
      self.rates.begin()
      values |= speed
    self._unwritten = step, values
    if line or step % self._train.log_every == 0:
      self._row()
    if step % every == 0:
      expert_counts.warn(self._job.model, step, values, self.progress.say)
    self.last = values
    for callback in self._callbacks:
      callback(step, values, self._job)
    if step % every == 0:
      self._compare_hosts(step)
    self.streak = int(numbers['skipped_in_a_row'])
    if self._spikes.seen(step, values['train/loss']):
      self.spiked = step
    if self.streak:
      self._not_finite(step, numbers)

  def _compare_hosts(self, step):
    """All processes compare their own times of the last steps."""
    own = self.rates.own(stragglers.FEWEST)
    if not own:
      return
    with self.rates.waits():
      found = meeting.gather('step times', json.dumps(own))
    slow = stragglers.table([json.loads(text) for text in found], step)
    if slow:
      self.progress.say(slow)

  def _sums(self, counts):
    """Counts of a step, added to those of steps since the last row."""
    counts = {k: n + self._since.get(k, 0) for k, n in counts.items()}
    self._since = counts
    return counts

  def _not_finite(self, step, numbers):
    """Names the tensors and the batch of a skipped step; stops after K."""
    row, batch = int(numbers['skipped_in_a_row']), self.batch(step)
    most = self._train.max_nonfinite_steps
    bad = [
      p
      for p, s in zip(self._paths, numbers['squares'], strict=True)
      if not np.isfinite(s)
    ]
    who = numbers.get('replicas', [])
    which = f' by replica {", ".join(map(str, who))}' if who else ''
    text = (
      f'step {step} is skipped{which} ({row} in a row, '
      f'{int(numbers["skipped"])} in all): loss {float(numbers["loss"])}, '
      f'{len(bad)} gradients not finite'
      f'{": " + ", ".join(bad[:5]) if bad else ""}; batch {batch}: '
      + self._job.batches.describe_rows(batch).replace('\n', '; ')
    )
    self.progress.say(text)
    if row >= most:
      raise errors.IntegrityError(
        f'{row} steps in a row are not finite (train.max_nonfinite_steps='
        f'{most}); the last checkpoint stands. Last: {text}'
      )
