"""The training loop: resume, step, record, save, stop. Nobody forks it.

A paper passes functions in: `make_step` builds the two halves of a step,
`callbacks` see every finished step. Step t reads batch t plus the batches that
loss spikes left out before it, a pure function of the seed and of the cursor
that checkpoints hold: a resumed run is bitwise the uninterrupted one. Numbers
of a step are read after the next is dispatched: the accelerator never waits.
"""

import contextlib
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding.meter import compiling
from paraxis.train import program as job_lib
from paraxis.train import recorder as recorder_lib
from paraxis.train import start
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.data import shape_cycle
from paraxis.train.run import activity as activity_lib
from paraxis.train.run import early
from paraxis.train.run import evaluate
from paraxis.train.run import header
from paraxis.train.run import hosts
from paraxis.train.run import ledger
from paraxis.train.run import memory
from paraxis.train.run import origin as origin_lib
from paraxis.train.run import profile as profile_lib
from paraxis.train.run import spikes
from paraxis.train.run import stop as stop_lib
from paraxis.train.run import workdir as workdir_lib
from paraxis.train.steps import anchor
from paraxis.train.steps import outer


def cost(config, own=False):
  """header.Cost of a token in a config's model, in any layout; own: its own."""
  train = dataclasses.replace(config.train, batch_size=1, microbatches=1)
  names = dict(mesh=schema.Mesh, pipeline=schema.Pipeline, outer=schema.Outer)
  plain = {name: kind() for name, kind in names.items()}
  alone = dataclasses.replace(config, train=train, **plain)
  one = job_lib.on_devices(alone, abstract=True)
  made = step_lib.make(one.built, one.optimizer, 0.0)
  total, *_, frozen = header.sizes(one.model, one.state.params)
  # Without gradients a step is two forward passes (steps/zeroth_order.py).
  learned = (1 - frozen / total) * (config.train.estimator == 'backprop')
  trace, found = jax.make_jaxpr(made.evaluate), []
  with one.context():
    for length, share in shape_cycle.shares(config).items():
      forward = trace(one.state.variables, one.batch_shapes(length))
      found.append((share, header.cost(forward, length, learned)))
  return header.mean(found)._replace(own=own)


class Options(NamedTuple):
  """What a command may ask of `run`.

  profile: 'FIRST:LAST', steps that are traced (train/run/profile.py).
  source: whose parameters a new run begins with: what origin.open_ gives.
  from_scratch: begins at step 0 where checkpoints are missing (run/workdir.py).
  began: unix seconds at which the goodput account begins; 0: with `run`. A
    command counts its process from its start, imports included.
  """

  profile: str = ''
  source: origin_lib.Run | origin_lib.Foreign | None = None
  from_scratch: bool = False
  began: float = 0.0


PLAIN = Options()


def run(
  config,
  workdir,
  mesh_text='',
  make_step=step_lib.make,
  callbacks=(),
  say=print,
  devices=None,
  options=PLAIN,
):
  """Trains, or resumes, the run of a workdir.

  Args:
    config: schema.Config.
    workdir: folder of the run; a relative one is resolved.
    mesh_text: --mesh=, replaces config.mesh.
    make_step: (built, optimizer, clip_norm) -> step.Step.
    callbacks: functions of (step, values, job), called when the numbers of a
      step are known: after the next one is dispatched.
    say: prints one line.
    devices: jax devices; default all.
    options: Options.

  Returns:
    dict: step, stopped ('' or the signal's name), loss, evaluation.

  Several processes make the same call; process 0 writes the folder and reports.

  Raises:
    UserError, IntegrityError, CrashError: see configs/base/errors.py.
  """
  from paraxis.sharding.checkpoint import store as store_lib  # starts slowly

  started, source = time.perf_counter(), options.source
  began = options.began or time.time()
  say = say if jax.process_index() == 0 else lambda line: None
  if source is not None:
    hosts.prepare(workdir, options.from_scratch)
    config = source.configured(config, workdir, say)
  config = workdir_lib.resumed(workdir, config, say, options.from_scratch)
  # Several processes refuse together, once each knows what the others have.
  folder = workdir if jax.process_count() == 1 else ''
  early.check(config, folder, options.profile, options.from_scratch)
  job = job_lib.make(config, mesh_text, devices, say)
  config, settings = job.config, job.config.train
  token = cost(config, make_step is not step_lib.make)  # outside the mesh
  traced = early.traced(options.profile, settings.steps)
  path, lock = _claim(job, workdir, options.from_scratch, say, source)
  events = path / ledger.FILE if jax.process_index() == 0 else None
  with (
    lock,
    activity_lib.Activity(
      events, settings.stall_seconds, say, began
    ) as activity,
    job.context(),
    contextlib.ExitStack() as stack,
    contextlib.ExitStack() as loggers,
  ):
    step = make_step(job.built, job.optimizer, config.optimizer.clip_norm)
    store = stack.enter_context(
      store_lib.Store(
        path / workdir_lib.CHECKPOINTS,
        start.kept(config, activity.commit),
        say=say,
      )
    )
    try:
      with (
        activity.phase('restore'),
        memory.explained(lambda: state_lib.flatten(job.state), lambda: True),
      ):
        state, first, kept = start.state(job, store, source, say)
      store.preflight(start.wanted(job), start.saves(config))
      if jax.process_index() == 0:
        workdir_lib.write_config(path, config)
      recorder = recorder_lib.opened(
        job, step, path, token, callbacks, say, loggers
      )
      rates = recorder.rates
      shown = profile_lib.Profile(
        traced, path, recorder.progress.say, rates.apart
      )
      training = _Training(job, step, store, recorder, state, first, shown)
      training.activity = activity
      training.origin = kept.get('origin')
      recorder.resume(kept.get('cursor', {}))
      with stop_lib.Stop(job.mesh) as training.stop:
        if evaluate.missed(path, first, settings):
          training.evaluate(recorder.progress.say)
        evaluation = training.run(started)
        activity.end(training.stopped or 'done')
    except Exception as e:
      if jax.process_count() > 1 and not isinstance(e, errors.IntegrityError):
        # Perhaps a peer died: to finish a save would wait for it for minutes.
        stack.pop_all()
      raise
  recorder.check_skipped(training.stopped)
  return dict(
    step=training.step,
    stopped=training.stopped,
    loss=recorder.last.get('train/loss'),
    evaluation=evaluation,
  )


def _claim(job, workdir, from_scratch, say, source=None):
  """Process 0 locks the folder, the others wait: -> (path, a context)."""
  path, lock, problem = workdir_lib.resolve(workdir), None, None
  if jax.process_index() == 0:
    try:
      lock = workdir_lib.claim(workdir, job.config, from_scratch, say)
    except (errors.UserError, errors.IntegrityError) as e:
      problem = e
  if jax.process_count() > 1:
    others = hosts.differing(job, path, problem, source)  # the others wait
    problem = problem or others
  if problem:
    if lock:
      lock.close()
    raise problem
  return path, contextlib.closing(lock) if lock else contextlib.nullcontext()


def _numbered(batches, first, offset, share):
  """Yields (t, batch) for t from `first` on: that of index t + offset."""
  with contextlib.closing(batches.iterate(first + offset, share)) as found:
    for index, batch in found:
      yield index - offset, batch


class _Training:
  """The steps of a run, from a state on: dispatched, recorded, saved, stopped.

  Attributes:
    state: train.state.State after `step` steps.
    stopped: why the run ended before its last step; '': it did not.
    origin: of the first parameters, for manifests (train/start.py).
  """

  def __init__(self, job, functions, store, recorder, state, step, profile):
    """functions: step.Step. recorder: Recorder. step: that `state` is of."""
    self._job, self._functions = job, functions
    self._store, self._recorder = store, recorder
    shown = dict(beat=self._beat, say=recorder.progress.say)
    self._evaluator = evaluate.Evaluator(job, functions.evaluate, **shown)
    self._axes = state_lib.axes(job.leaves)
    self.state: Any = state
    self.step, self._profile = step, profile
    self.stopped, self._saved = '', step
    self.stop: Any = None  # stop.Stop, while signals are noted
    self.activity = activity_lib.Activity(None, 0)  # of nobody
    self.origin: dict | None = None
    self._gradients = {}  # shape of a step -> its compiled gradient
    self._update: Any = None
    self._exchange = outer.Exchange(job)
    self._rows = functools.cache(job.local_rows)

  def run(self, started):
    """Steps up to train.steps -> the evaluation after them; None: a signal
    came, perhaps before.

    started: time.perf_counter() when the run began.
    """
    say, steps = self._recorder.progress.say, self._job.config.train.steps
    self._profile.say_missed(self.step)
    if self.step >= steps:
      say(f'all {steps} steps are done')
    elif not self.stopped:
      self._learn(started)
    found = None if self.stopped else self.evaluate()
    self.stopped = self.stopped or self.stop.asked
    if self.stopped:
      at = f'after step {self.step}, saved {self._saved}'
      say(f'stopped by {self.stopped} {at}')
    return found

  def _learn(self, started):
    first, shapes = self.step + 1, state_lib.flatten(self._job.state)
    with (
      self.activity.phase('steps', self.step),
      memory.explained(lambda: shapes, lambda: self.step < first),
    ):
      older = self._spiked() or self._steps(first, started)
      while older:
        self._roll_back(older)
        older = self._steps(first, started)
      with self.activity.phase('save', self.step):
        self._store.wait()

  def _steps(self, first, started):
    """Steps from the present one on -> [], or `_spiked`, if that ended them."""
    job, recorder = self._job, self._recorder
    say, settings = recorder.progress.say, job.config.train
    offset = spikes.left_out(recorder.skips)
    batches = _numbered(job.batches, self.step, offset, self._rows)
    batches = self._profile.over(batches, lambda: self.state)
    with contextlib.closing(batches):
      for t, host_batch in batches:
        size = job.batches.shape_at(t + offset)
        _, rows, _ = size
        batch = job.put(host_batch, self._rows(rows)[0], rows)
        if size not in self._gradients:
          self._compile(size, batch)
        # A dispatch waits where the device runs in this thread (CPU), or its
        # queue is full.
        with recorder.rates.waits():
          found = self._gradients[size](self.state.inner, batch)
        self._hand_over()
        with recorder.rates.waits():
          self.state, numbers = self._update(self.state, *found)
          self.state, numbers = self._exchange(t + 1, self.state, numbers)
        del found
        self.step = t + 1
        recorder.later(self.step, numbers, host_batch)
        self.activity.step(self.step)
        if older := self._spiked():
          return older
        if self.step == first:
          jax.block_until_ready(self.state)
          say(f'first step after {time.perf_counter() - started:.1f} s')
        self._store.check()
        with recorder.rates.waits():
          self.stopped = self.stop.agreed()
        last = self.step == settings.steps or bool(self.stopped)
        if last or self.step % job.config.checkpoint.every == 0:
          self._save()
        if settings.drift_every and self.step % settings.drift_every == 0:
          self._store.compare_replicas(self.step, state_lib.flatten(self.state))
        every = settings.eval_every
        if every and self.step % every == 0 and not last:
          self.evaluate(say)  # the last one is of `run`
          if self.stopped and self._saved != self.step:
            self._save()
        if last or self.stopped:
          break
    return []

  def _compile(self, size, batch):
    """Compiles the gradient of a shape, and the update the first time."""
    self.stop.compiling, say = True, self._recorder.progress.say
    with self._recorder.rates.apart(), self.activity.phase('compile'):
      gradient = compiling.compile_step(
        'gradient', self._functions.grads, self.state.inner, batch, say=say
      )
      if self._update is None:  # the same for batches of any size
        self._update = self._job.compile_update(
          self._functions.update, gradient, say
        )
        self._exchange.compile(say)
    self._gradients[size] = gradient
    device = self._job.mesh.local_devices[0]
    programs = dict(gradient=gradient, update=self._update)
    programs |= self._exchange.programs
    flat = state_lib.flatten(self._job.state)
    read = self._job.state.inner  # the rest is there beside a gradient
    memory.check(programs, device, flat, {'gradient': (flat, read)})
    self._profile.programs += programs.values()
    self.stop.compiling = False

  def _spiked(self):
    """Steps of checkpoints before a loss spike; []: none, or none is older."""
    recorder, older = self._recorder, []
    if recorder.spiked:
      with recorder.rates.apart(), self.activity.phase('save'):
        older = self._store.before(recorder.spike()[0])
      if not older:
        recorder.forget_spike()
    return older

  def _roll_back(self, older):
    """To the last checkpoint before a loss spike, past the batches it read."""
    self.state = None  # two would not fit everywhere
    with self._recorder.rates.apart(), self.activity.phase('restore'):
      self.state, self.step, kept = start.back(self._job, self._store, older)
      self._recorder.roll_back(self.step, kept['cursor'])
      self._store.drop(self.step)

  def _save(self):
    """Begins a checkpoint."""
    step, recorder = self.step, self._recorder

    def meta():  # the next gradient is under way when this is asked for
      recorder.write()
      cursor = recorder.cursor()
      return start.meta(self._job, step, self.origin, cursor, recorder.astray)

    with recorder.rates.apart('checkpoint'), self.activity.phase('save'):
      self.state = anchor.settled(self.state)
      tree = state_lib.in_order(state_lib.flatten(self.state), self._job.leaves)
      self._store.begin(step, tree, self._axes, meta)
    self._saved = step

  def _hand_over(self):
    """Before an update, which donates what a checkpoint is copied from."""
    if self._store.copying:
      recorder, phase = self._recorder, self.activity.phase
      with recorder.rates.apart('checkpoint'), phase('save'):
        self._store.barrier()

  def _beat(self):
    """Some batches of an evaluation are done -> why it ends there, or ''."""
    self.activity.beat()
    self.stopped = self.stop.agreed()
    return self.stopped

  def evaluate(self, say=lambda line: None):
    """evaluate.Evaluation of held-out text, which is written and said too;
    None: a signal cut it off, see `stopped`."""
    recorder, phase = self._recorder, self.activity.phase
    recorder.flush()
    with recorder.rates.apart('evaluation'), phase('evaluate'):
      self.state = state = anchor.settled(self.state)
      found = self._evaluator(anchor.variables(state))
      if found and state.replicas:  # `found` is of the anchor
        found = anchor.with_mean(found, state, self._evaluator)
    if found:
      recorder.writers.write(self.step, found.values())
      say(found.line())
    return found
