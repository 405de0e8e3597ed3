"""The training loop: resume, step, record, save, stop. Nobody forks it.

A paper passes functions in: `make_step` builds the two halves of a step,
`callbacks` see every finished step. Step t reads batch t, a pure function of
(seed, t), so the data cursor is the step itself and a resumed run is bitwise
the uninterrupted one. Numbers of a step are read after the next one is
dispatched: the accelerator never waits for the host.
"""

import contextlib
import dataclasses
import functools
import time
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train import expert_counts
from paraxis.train import program as job_lib
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.run import compiling
from paraxis.train.run import evaluate
from paraxis.train.run import metrics as metrics_lib
from paraxis.train.run import stop as stop_lib
from paraxis.train.run import workdir as workdir_lib


def _meta(job, step):
  """What a checkpoint says of its run, besides the state."""
  import flax
  import optax
  import orbax.checkpoint

  return dict(
    config=schema.to_json(job.config),
    cursor=dict(step=step, seed=job.config.train.seed),
    corpus=job.corpus.fingerprint,
    tokenizer=job.tokenizer.fingerprint,
    versions=dict(
      jax=jax.__version__,
      flax=flax.__version__,
      optax=optax.__version__,
      orbax=orbax.checkpoint.__version__,
    ),
  )


def _check_meta(job, step, meta, where):
  """Raises unless a checkpoint's run is the one that is to go on."""
  for name, now in (
    ('corpus', job.corpus.fingerprint),
    ('tokenizer', job.tokenizer.fingerprint),
  ):
    if meta.get(name) != now:
      raise errors.IntegrityError(
        f'{where}: the {name} changed since the checkpoint (fingerprint '
        f'{meta.get(name, "none")[:12]} then, {now[:12]} now): the batches '
        'would differ. Restore the data, or start in another --workdir.'
      )
  workdir_lib.compare(where, schema.from_json(meta['config']), job.config)
  steps = job.config.train.steps
  if step > steps:
    raise errors.UserError(
      f'{where} is at step {step}, beyond train.steps={steps}: give at least '
      f'{step}, or take another --workdir.'
    )


def _start(job, store, say):
  """-> (state, step to begin with), from the newest good checkpoint or new."""
  shapes = state_lib.flatten(job.state)
  found = store.restore_latest_good(state_lib.in_order(shapes, job.model))
  if found is None:
    return job.initial_state(), 0
  step, tree, meta = found
  tree = state_lib.on_stages(tree, shapes, job.model)
  _check_meta(job, step, meta, store.directory)
  say(f'resumed from step {step}, every leaf verified')
  return state_lib.unflatten(job.state, tree), step


class _Recorder:
  """Reads a step's numbers late, writes them, and watches for NaN."""

  def __init__(self, job, writers, progress, callbacks):
    self._job, self._writers, self._progress = job, writers, progress
    self._train, self._callbacks = job.config.train, callbacks
    self._paths = sorted(expert_counts.without(job.model, job.model.axes))
    self._pending, self._before = None, time.perf_counter()
    self.last = {}

  def later(self, step, numbers, tokens):
    """Keeps a step's numbers on the device and records those before it."""
    previous, self._pending = self._pending, (step, numbers, tokens)
    if previous:
      self._record(*previous)

  def flush(self):
    """Records what is still on the device."""
    previous, self._pending = self._pending, None
    if previous:
      self._record(*previous)

  def restart_clock(self):
    """What passed since the last step was no step: compiling, evaluating."""
    self._before = time.perf_counter()

  def _record(self, step, numbers, tokens):
    numbers, every = jax.device_get(numbers), self._train.print_every
    now = time.perf_counter()
    seconds, self._before = now - self._before, now
    rates = {
      k: float(v) for k, v in numbers.items() if k.startswith('learning_rate')
    }
    values = {
      'train/loss': float(numbers['loss']),
      'train/grad_norm': float(numbers['grad_norm']),
      'train/learning_rate': max(rates.values()),
      'train/skipped': int(numbers['skipped']),
      'perf/step_seconds': seconds,
      'perf/tokens_per_second': tokens / seconds,
      'perf/memory_bytes': metrics_lib.memory_bytes(),
      **expert_counts.values(self._job.model, numbers, step % every == 0),
    }
    self._writers.write(step, values)
    self._progress.step(step, values)
    if step % every == 0:
      expert_counts.warn(self._job.model, step, values, self._progress.say)
    self.last = values
    for callback in self._callbacks:
      callback(step, values, self._job)
    if int(numbers['skipped_in_a_row']):
      self._not_finite(step, numbers)

  def _not_finite(self, step, numbers):
    """Names the tensors and the batch of a skipped step; stops after K."""
    row, most = (
      int(numbers['skipped_in_a_row']),
      self._train.max_nonfinite_steps,
    )
    bad = [
      p
      for p, s in zip(self._paths, numbers['squares'], strict=True)
      if not np.isfinite(s)
    ]
    text = (
      f'step {step} is skipped ({row} in a row, {int(numbers["skipped"])} in '
      f'all): loss {float(numbers["loss"])}, {len(bad)} gradients not finite'
      f'{": " + ", ".join(bad[:5]) if bad else ""}; batch {step - 1}: '
      + self._job.batches.describe_rows(step - 1).replace('\n', '; ')
    )
    self._progress.say(text)
    if row >= most:
      raise errors.IntegrityError(
        f'{row} steps in a row are not finite (train.max_nonfinite_steps='
        f'{most}); the last checkpoint stands. Last: {text}'
      )


def run(
  config,
  workdir,
  mesh_text='',
  make_step=step_lib.make,
  callbacks=(),
  say=print,
  devices=None,
):
  """Trains, or continues, the run of a workdir.

  Args:
    config: schema.Config.
    workdir: folder of the run; a relative one is resolved.
    mesh_text: --mesh=, replaces config.mesh.
    make_step: (built, optimizer, clip_norm) -> step.Step.
    callbacks: functions of (step, values, job), called when the numbers of a
      step are known: after the next one is dispatched.
    say: prints one line.
    devices: jax devices; default all.

  Returns:
    dict: step, stopped ('' or the signal's name), loss, evaluation.

  Several processes make the same call; process 0 writes the folder and speaks.

  Raises:
    UserError, IntegrityError: see configs/base/errors.py.
  """
  started = time.perf_counter()
  say = say if jax.process_index() == 0 else lambda line: None
  job = job_lib.make(config, mesh_text, devices, say)
  path, lock = _claim(job, workdir, say)
  with lock, job.context():
    return _run(job, path, make_step, callbacks, say, started)


def _claim(job, workdir, say):
  """Process 0 takes the folder, the others wait: -> (path, a context)."""
  path, lock, problem = workdir_lib.resolve(workdir), None, None
  if jax.process_index() == 0:
    try:
      workdir_lib.prepare(workdir)
      workdir_lib.check_config(path, job.config, say)
      lock = workdir_lib.Lock(path)
    except (errors.UserError, errors.IntegrityError) as e:
      problem = e
  if jax.process_count() > 1:
    others = _differing(job, lock is not None)  # the others wait for it
    problem = problem or others
  if problem:
    if lock:
      lock.close()
    raise problem
  return path, contextlib.closing(lock) if lock else contextlib.nullcontext()


def _differing(job, locked):
  """A UserError if process 0 failed or the processes are of different runs."""
  local = dict(path='', cache_dir='')  # a host may keep its text elsewhere
  config = dataclasses.replace(
    job.config, data=dataclasses.replace(job.config.data, **local)
  )
  text = schema.to_json(config) + job.corpus.fingerprint
  text += job.tokenizer.fingerprint
  mine = np.asarray([locked, zlib.crc32(text.encode())], np.uint32)
  all_ = np.asarray(multihost_utils.process_allgather(mine))
  if not all_[0, 0]:
    return errors.UserError('process 0 cannot start, and says why.')
  other = np.flatnonzero(all_[:, 1] != all_[0, 1])
  if other.size:
    return errors.UserError(
      f'processes {", ".join(map(str, other))} have another configuration, '
      'text or tokenizer than process 0: start all with the same arguments.'
    )
  return None


def _run(job, path, make_step, callbacks, say, started):
  from paraxis.sharding.checkpoint import (
    store as store_lib,  # Orbax starts slowly
  )

  config, train = job.config, job.config.train
  made = make_step(job.built, job.optimizer, config.optimizer.clip_norm)
  with contextlib.ExitStack() as stack, contextlib.ExitStack() as loggers:
    store = stack.enter_context(
      store_lib.Store(
        path / workdir_lib.CHECKPOINTS,
        config.checkpoint.keep,
        config.checkpoint.asynchronous,
        say=say,
      )
    )
    try:
      state, first = _start(job, store, say)
      if jax.process_index() == 0:
        workdir_lib.write_config(path, config)
      writers = loggers.enter_context(metrics_lib.Writers(path, train, config))
      progress = loggers.enter_context(
        metrics_lib.Progress(train.steps, train.print_every, say)
      )
      evaluator = evaluate.Evaluator(job, made.evaluate, progress.say)
      recorder = _Recorder(job, writers, progress, callbacks)
      with stop_lib.Stop(job.mesh) as stop:
        others = stop, progress, writers, started
        state, step, result, stopped = _train(
          job, state, first, made, store, recorder, evaluator, others
        )
        if not stopped and not result:
          result = evaluator(state.params)
          writers.write(step, result.values())
          stopped = stop.asked
    except Exception as e:
      if jax.process_count() > 1 and not isinstance(e, errors.IntegrityError):
        # Perhaps a peer died: to finish a save would wait for it for minutes.
        stack.pop_all()
      raise
  loss = recorder.last.get('train/loss')
  return dict(step=step, stopped=stopped, loss=loss, evaluation=result)


def _train(job, state, first, made, store, recorder, evaluator, others):
  """Steps first .. train.steps; -> (state, steps, last evaluation, stopped)."""
  stop, progress, writers, started = others
  config, train = job.config, job.config.train
  axes = state_lib.axes(job.state, job.model)
  step, saved, result, stopped = first, first, None, ''
  if first >= train.steps:
    progress.say(f'all {train.steps} steps are done')
    return state, step, result, stopped
  programs = {}  # rows of a step -> both halves of it
  share = functools.cache(job.local_rows)
  with contextlib.closing(job.batches.iterate(first, share)) as batches:
    for t, host_batch in batches:
      size = job.batches.size_at(t)
      _, rows = job.batches.split(size)
      batch = job.put(host_batch, share(rows)[0], rows)
      if size not in programs:
        programs[size] = _compile(job, made, batch, programs, progress.say)
        recorder.restart_clock()
      grads, update = programs[size]
      loss, gradient = grads(state.params, batch)
      state, numbers = update(state, loss, gradient)
      del gradient
      step = t + 1
      recorder.later(step, numbers, int(host_batch.denominator))
      if step == first + 1:
        jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        progress.say(f'first step after {seconds:.1f} s')
      store.check()
      stopped = stop.agreed()
      last = step == train.steps or bool(stopped)
      if last or step % config.checkpoint.every == 0:
        recorder.flush()
        tree = state_lib.in_order(state_lib.flatten(state), job.model)
        store.save(step, tree, axes, _meta(job, step))
        saved = step
        recorder.restart_clock()
      if train.eval_every and step % train.eval_every == 0 and not stopped:
        recorder.flush()
        result = evaluator(state.params)
        writers.write(step, result.values())
        progress.say(result.line())
        result = result if last else None
        recorder.restart_clock()
      if last:
        break
  store.wait()
  if stopped:
    progress.say(f'stopped by {stopped} after step {step}, saved {saved}')
  return state, step, result, stopped


def _compile(job, made, batch, known, say):
  """Both halves of the step, compiled once for the real layouts."""
  grads = compiling.compile_step(
    'gradient', made.grads, job.state.params, batch, say=say
  )
  for _, update in known.values():  # which no size of batch changes
    return grads, update
  loss, gradient = grads.out_info
  shapes = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    (loss, gradient),
    grads.output_shardings,
  )
  update = compiling.compile_step(
    'update', made.update, job.state, *shapes, donate=(0,), say=say
  )
  return grads, update
