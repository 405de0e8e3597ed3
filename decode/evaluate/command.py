"""The evaluate command: figures of a model on files.

    paraxis evaluate --checkpoint=RUN --tasks=quiz.jsonl,book.txt

The table goes to stdout, everything else to stderr. Tasks are read and checked
before jax starts.
"""

import contextlib
import json
import math
import pathlib

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import shares
from paraxis.decode import __main__ as decode_main
from paraxis.decode import prompts
from paraxis.decode.evaluate import tasks as tasks_lib

NEW = 64  # tokens of an exact match, where rows have room for them


def scorer(opened, overrides, mesh='', length=0, batch_size=8, say=prompts.say):
  """score.Scorer of a load.Checkpoint, or ensemble.Scorer of several.

  Args:
    opened: a load.Checkpoint, or a list of (load.Checkpoint, share).
    overrides: {'section.field': value} of its config. mesh: as --mesh=.
    length: the most tokens of a row; 0: data.sequence_length.
  """
  from paraxis.decode import latents
  from paraxis.decode.evaluate import ensemble
  from paraxis.decode.evaluate import score

  several = opened if isinstance(opened, list) else [(opened, 1.0)]
  runs, prior = zip(*several, strict=True)
  config = runs[0].config()
  _check_alike(runs)
  # Experts that drop would make a row's numbers depend on others.
  config.model.experts.capacity_factor = 0.0
  config.decode.requests = 0  # a batch has rows of its own, on any mesh
  config.update_from_flattened_dict(overrides)
  config = schema.view(config)
  if latents.change(config.model):
    raise errors.UserError(
      'model.latent.groups, scores and rotation convert parameters for '
      'decoding; evaluation computes as training: leave them out '
      '(--config.model.latent.rotation=none --config.model.latent.groups=1).'
    )
  parts = [run.parts(config, mesh, batch_size) for run in runs]
  length = length or config.data.sequence_length
  given = config.decode, length, batch_size, say
  if opened is several:
    made = ensemble.Scorer(parts, prior, *given)
  else:
    made = score.Scorer(parts[0], *given)
  say(f'{length} tokens a row, {made.rows} rows a batch')
  return made


def _check_alike(runs):
  """UserError unless all runs compute the same with their parameters; whether
  these have the same shapes is seen when they are read."""
  from paraxis.models.huggingface import source

  first, *others = (schema.view(run.config()).model for run in runs)
  for i, other in enumerate(others, 1):
    if differ := source.differences(first, other):
      raise errors.UserError(
        f'--ensemble: run {i + 1} of {len(runs)} is of another model than '
        f'the first: {"; ".join(differ)}. Their probabilities are mixed in one '
        'program: name runs of one architecture.'
      )


def _opened(options, stack):
  """(what `scorer` takes, its name, () -> the step or steps)."""
  if not options.ensemble:
    given = options.checkpoint, options.weights
    one = decode_main.open_(*given, options.step, options.ema)
    one = stack.enter_context(one)
    return one, given[0] or given[1], lambda: one.step
  opened = []
  for name, share in shares.parse(options.ensemble, '--ensemble'):
    run = decode_main.open_(name, None, None, options.ema)
    opened.append((stack.enter_context(run), share))
  steps = lambda: [run.step for run, _ in opened]
  return opened, ','.join(options.ensemble), steps


def _check_named(options):
  """UserError unless a model is named, once."""
  given = options.checkpoint, options.weights
  if not options.ensemble:
    decode_main.require_one(*given)
  elif any(given) or options.step is not None:
    raise errors.UserError(
      '--ensemble= names all models, a step as RUN/checkpoints/STEP: leave '
      'out --checkpoint=, --weights= and --step=.'
    )
  else:
    shares.parse(options.ensemble, '--ensemble')


def _new(tasks, made, asked):
  """The most tokens of an exact match, which leave room for its prompt."""
  new = asked or min(NEW, made.length // 2)
  if any(task.kind == 'match' for task in tasks):
    made.check_new(new)
    if not asked and new < NEW:
      prompts.say(f'exact matches end after {new} tokens, half of a row')
  return new


def _check_output(file):
  """UserError if figures could not be written to --json=."""
  if not file:
    return
  path = pathlib.Path(file).expanduser()
  if path.is_dir():
    raise errors.UserError(
      f'--json={file} is a folder: name a file, such as {path / "out.json"}.'
    )
  if not path.parent.is_dir():
    raise errors.UserError(f'--json={file}: no folder {path.parent}.')


def _evaluate(options, overrides, _):
  if not options.tasks:
    raise errors.UserError('evaluate on what? --tasks=FILE,...')
  names = list(dict.fromkeys(options.tasks))
  _check_named(options)
  if not all(options.stop):
    raise errors.UserError(
      '--stop= is empty, and would end every exact match at once: name a text, '
      'or leave it out.'
    )
  _check_output(options.json)
  tasks = [tasks_lib.read(name, options.text_key) for name in names]
  command_line.prepare_devices(options.devices)
  results = []
  with contextlib.ExitStack() as stack:
    opened, name, step = _opened(options, stack)
    made = scorer(
      opened, overrides, options.mesh, options.length, options.batch_size
    )
    if options.domain:
      made.tokenizer.require_domain(options.domain)
    new = _new(tasks, made, options.max_new_tokens)
    for task in tasks:
      found = tasks_lib.run(
        task, made, options.domain, new, options.stop or ['\n']
      )
      if found.cut:
        prompts.say(
          f'{task.name}: {found.cut} of {len(task.rows)} prompts are longer '
          f'than {made.length} tokens leave room for: cut from the left'
        )
      results.append(found)
  print(table(results))
  if options.json:  # last: what fails here loses no figures
    about = dict(model=name, step=step(), sequence_length=made.length)
    _write(options.json, about, results)
  return errors.EXIT_OK


def _write(file, about, results):
  """JSON has no number that is not finite: null."""
  plain = lambda x: x if x is not None and math.isfinite(x) else None
  record = about | dict(
    results={
      r.task.name: dict(
        kind=r.task.kind,
        cut=r.cut,
        metrics={
          k: dict(value=plain(v), stderr=plain(e))
          for k, (v, e) in r.metrics.items()
        },
        examples=r.examples,
      )
      for r in results
    }
  )
  text = json.dumps(record, ensure_ascii=False, indent=1)
  try:
    pathlib.Path(file).expanduser().write_text(f'{text}\n', encoding='utf-8')
  except OSError as e:
    raise errors.UserError(f'--json={file}: {e}') from None


def table(results) -> str:
  """A line for every metric of every task."""
  lines = [('task', 'kind', 'examples', 'metric', 'value', 'stderr')]
  for r in results:
    for name, (value, error) in r.metrics.items():
      lines.append(
        (
          r.task.name,
          r.task.kind,
          str(len(r.task.rows)),
          name,
          f'{value:.4f}',
          '-' if error is None else f'{error:.4f}',
        )
      )
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  pad = lambda cells: '  '.join(
    f'{cell:{"<" if i in (0, 1, 3) else ">"}{w}}'
    for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
  )
  return '\n'.join(map(pad, lines))


COMMAND = command_line.Command(
  _evaluate,
  'evaluate',
  '--checkpoint=RUN --tasks=FILE,...',
  'bits per byte, multiple choice and exact match of a model on files',
  (
    'Model',
    ('path', 'checkpoint=PATH', None,
     "a workdir, its checkpoints folder, or one step's folder"),
    ('path', 'weights=PATH', None,
     'instead: a folder of Hugging Face, a .gguf file, or smollm2'),
    (list, 'ensemble=RUN:WEIGHT,...', [],
     'instead: a Bayesian mixture of runs of one architecture, weighted by '
     'their posterior given the text so far; WEIGHT is that of the prior, by '
     'default 1'),
    (int, 'step=N', None, 'step to load; else the newest undamaged one'),
    decode_main.EMA,
    'Tasks',
    (list, 'tasks=FILE,...', [],
     '.txt and .md: a document; .jsonl: rows of {"text"}, of {"prompt", '
     '"choices", "answer": 0} or of {"prompt", "answer"} (prompt or question)'),
    (str, 'text_key=NAME', 'text', 'key of the text in rows of .jsonl'),
    (str, 'domain=NAME', None, 'kind of text of all tasks'),
    ('count', 'length=N', 0,
     'tokens a row reads; 0: data.sequence_length, of other weights the most '
     'that they say. Longer documents are cut into windows, longer prompts '
     'from the left'),
    ('count', 'max_new_tokens=N', 0,
     f'the most tokens of an exact match; 0: {NEW}, at most half a row'),
    ('several', 'stop=TEXT', [],
     'an exact match ends before it; may be repeated; else at a line break'),
    'Output and devices',
    ('path', 'json=FILE', None, 'write figures and every example'),
    ('positive', 'batch_size=N', 8, 'rows of a forward pass'),
    (str, 'mesh=AXIS=N,...', '',
     "replaces the run's mesh, e.g. --mesh=data=2,fsdp=2"),
    ('count', 'devices=N', 0,
     'virtual CPU devices; 0: the accelerators present, else 8 virtual ones'),
  ),
  'overrides',
  notes=(
    "Fields of the run's config: --config.SECTION.FIELD=VALUE changes one, as",
    (str, 'config.model.dtype=bfloat16', '',
     'activations, of --weights= else float32; logits are at least that'),
    'Exit codes: 0 done, 2 bad input, 14 a damaged checkpoint, or '
    'log-likelihoods\n  that are not finite',
  ),
)  # fmt: skip
