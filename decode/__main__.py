"""The decode command: continues prompts with a trained checkpoint.

    paraxis decode --checkpoint=RUN --domain=drama --prompt='KING.'

`python -m paraxis.decode` is the same. Results go to stdout, everything else to
stderr. Nothing here imports jax before the devices are chosen; --help never.
"""

import functools
import sys

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.configs.base.decode import METHODS
from paraxis.decode import prompts as prompts_lib
from paraxis.sharding import mesh as mesh_lib

_SAMPLING = ('max_new_tokens', 'temperature', 'top_k', 'top_p', 'min_p', 'seed')
_METHOD = (
  'method', 'drafts', 'draft_layers', 'draft_group', 'draft', 'judge',
  'requests',
)  # fmt: skip
# What --certify reads nothing of.
_UNREAD = (
  'prompt', 'prompts_file', 'chat', 'system', 'domain', 'stop', 'lossless',
  'stream', 'trace', *_SAMPLING, *_METHOD,
)  # fmt: skip


def require_one(checkpoint, weights):
  """UserError unless one of --checkpoint= and --weights= is given."""
  if bool(checkpoint) == bool(weights):
    raise errors.UserError(
      'name a run with --checkpoint=, or with --weights= a folder or file of '
      'another program: one of the two.'
    )


def open_(checkpoint, weights, step=None, ema=False):
  """load.Checkpoint or load.Weights; UserError unless one of both is given."""
  require_one(checkpoint, weights)
  if ema and weights:
    raise errors.UserError(
      f'--ema: --weights={weights} are of another program, only a run of '
      'paraxis holds averages: leave out --ema.'
    )
  if weights and step is not None:
    raise errors.UserError(
      f'--step={step}: --weights={weights} are of another program, only a run '
      'of paraxis has steps: leave out --step=.'
    )
  from paraxis.decode import load  # starts jax
  from paraxis.sharding.meter import compiling

  compiling.use_cache()
  if weights:
    return load.Weights(weights, prompts_lib.say)
  return load.Checkpoint(checkpoint, step, prompts_lib.say, ema)


def _require_lossless(asked, decode):
  """UserError if --lossless is asked of a judge or method that is not; decode:
  schema.Decode."""
  from paraxis.decode import judges  # starts jax
  from paraxis.decode import methods

  name, method = decode.judge, decode.method
  if asked and method in methods.CHANGING:
    raise errors.UserError(
      f'--lossless: decode.method={method} draws tokens of a call before those '
      'that they depend on are text: leave --lossless out.'
    )
  if asked and not judges.JUDGES[name].lossless:
    good = ', '.join(n for n, judge in judges.JUDGES.items() if judge.lossless)
    raise errors.UserError(
      f'--lossless: decode.judge={name} changes the distribution of the text; '
      f'take one of {good}.'
    )


def _require_read(given, method):
  """UserError: fields, of the command line, that a method passes over."""
  from paraxis.decode import methods  # starts jax

  for name in sorted(given):
    section, _, field = name.partition('.')
    readers = methods.READ_BY.get(field.split('.')[0])
    if section == 'decode' and readers and method not in readers:
      raise errors.UserError(
        f'{name} is read by decode.method={", ".join(readers)}, not {method}: '
        'leave it out.'
      )


def _check_unread(options, overrides, named):
  """UserError: flags that --certify would pass over; named: a model is."""
  own = [] if named else ['step', 'ema', 'calibration_file']
  given = [f'--{n}' for n in _UNREAD if options[n].present]
  given += [f'--config.{n}' for n in overrides if n.startswith('decode.')]
  if given:
    raise errors.UserError(
      '--certify feeds tokens of its own, by every method, in float64: leave '
      f'out {", ".join(given)}.'
    )
  if of_run := [f'--{n}' for n in own if options[n].present]:
    raise errors.UserError(
      '--certify without --checkpoint= or --weights= is of small models with '
      f'random parameters: name a model, or leave out {", ".join(of_run)}.'
    )


def _certify(options, overrides):
  """--certify: the engine against the model without a cache -> exit code."""
  named, flags = options.certify, options.checkpoint or options.weights
  names = () if named == command_line.ALL else tuple(named.split(','))
  if flags and names:
    raise errors.UserError(
      f'--certify={named} names patterns, and --checkpoint= or --weights= a '
      'model: leave out one of both.'
    )
  _check_unread(options, overrides, bool(flags))
  if not flags and 'model.pattern' in overrides:
    names += (overrides.pop('model.pattern'),)
  for name in names:
    mixers.of_pattern(name)
  mesh_lib.parse(options.mesh)
  command_line.prepare_devices(options.devices)
  from paraxis.decode.certify import cases
  from paraxis.decode.certify import table  # starts jax

  make = functools.partial(cases.small, changes=overrides)
  if not flags:
    return table.run(names, make, options.mesh, options.json)
  given = options.checkpoint, options.weights, options.step, options.ema
  with open_(*given) as checkpoint:
    file = options.calibration_file
    texts = (
      [] if file is None else [prompts_lib.text_of('calibration_file', file)]
    )
    case = cases.of_checkpoint(checkpoint, overrides, texts)
  make = lambda name: case
  return table.run((case.name,), make, options.mesh, options.json)


def _configured(checkpoint, options, overrides):
  """(schema.Config of a run, {field of schema.Decode: value} of flags)."""
  chosen = {
    name: options[name].value
    for name in _SAMPLING + _METHOD
    if options[name].value is not None
  }
  # What a mesh must serve, and what --lossless asks about.
  first = {'method', 'judge', 'requests'} & {*chosen}
  config = checkpoint.config()
  config.update_from_flattened_dict(
    overrides | {f'decode.{name}': chosen[name] for name in first}
  )
  made = schema.view(config)
  _require_read(
    {f'decode.{name}' for name in chosen} | {*overrides}, made.decode.method
  )
  return made, chosen


def _decode(options, overrides, _):
  """options: flags. overrides: {'section.field': value} of --config.x.y=."""
  if options.methods:
    for name, (drafts, claim) in METHODS.items():
      print(f'{name:16} drafts {drafts}: {claim}')
    return errors.EXIT_OK
  if options.certify is not None:
    return _certify(options, overrides)
  require_one(options.checkpoint, options.weights)
  prompts = _read(options)
  texts = prompts.texts
  if options.calibration_file is not None:
    texts = [prompts_lib.text_of('calibration_file', options.calibration_file)]
  command_line.prepare_devices(options.devices)
  given = options.checkpoint, options.weights, options.step
  with open_(*given, options.ema) as checkpoint:
    config, chosen = _configured(checkpoint, options, overrides)
    _require_lossless(options.lossless, config.decode)
    template = checkpoint.template(config.data) if options.chat else ''
    rows = max(len(prompts.texts), 1)
    how = options.mesh, rows, texts, template
    made = checkpoint.generator(config, *how)
    step = checkpoint.step
  inputs: list = list(prompts.texts)
  if options.chat:
    from paraxis.decode import chat as chat_lib

    given = made.tokenizer, template, options.system, made.begins
    chat = chat_lib.Chat(*given)
    if not inputs:
      talk = chat_lib.talk
      refused = talk(made, chat, sys.stdin, options.stop, **chosen)
      return errors.EXIT_USER if refused else errors.EXIT_OK
    inputs = chat.each(prompts)
  domains = prompts_lib.domains(options.domain, len(inputs), made)
  if options.prompts_file is not None:
    more = made.refused(inputs, domains, **chosen)
    prompts.bad.update(
      (i, why)
      for i, why in more.items()
      if prompts.places[i] and i not in prompts.bad
    )
    prompts, inputs, domains = prompts_lib.without_bad(prompts, inputs, domains)
  output = prompts_lib.Output(options, prompts, domains, step)
  try:
    results = made.generate(
      inputs, domains, options.stop, **output.hooks, **chosen
    )
  finally:
    output.close()
  method = config.decode.method
  if options.method or method != 'autoregressive' or options.prompts_file:
    from paraxis.decode import methods  # starts jax

    output.counts(results, method in methods.CHANGING)
  output.print(results)
  return errors.EXIT_USER if prompts.bad else errors.EXIT_OK


def _read(options):
  """prompts.Prompts; UserError: flags that do not go together."""
  if options.system and not options.chat:
    raise errors.UserError('--system= is the first message of a --chat.')
  if options.chat and options.domain:
    raise errors.UserError(
      '--domain= begins a document, a --chat begins by its template: leave out '
      'one of both.'
    )
  prompts = options.prompt or options.prompts_file is not None
  for name in ('json', 'stream', 'trace'):
    if options.chat and options[name].value and not prompts:
      raise errors.UserError(
        f'--{name}: a --chat without prompts is a conversation, and prints the '
        f'answers alone: give --prompt= or --prompts_file=, or leave out '
        f'--{name}.'
      )
  if options.stream and options.json:
    raise errors.UserError(
      '--stream prints a JSON object for each prompt, --json one for all: '
      'leave out one of both.'
    )
  if options.trace and not (options.json or options.stream):
    raise errors.UserError(
      '--trace adds to what --json or --stream prints: give one of both.'
    )
  return prompts_lib.read(options)


EMA = (
  bool, 'ema', False,
  'read the EMA of the parameters (optimizer.ema_decay)',
)  # fmt: skip
COMMAND = command_line.Command(
  _decode,
  'decode',
  '--checkpoint=RUN --prompt=TEXT',
  'continue prompts with a trained model',
  (
    'Checkpoint',
    ('path', 'checkpoint=PATH', None,
     "a workdir, its checkpoints folder, or one step's folder"),
    ('path', 'weights=PATH', None,
     'instead: a folder of Hugging Face, a .gguf file, or smollm2'),
    (int, 'step=N', None, 'step to load; else the newest undamaged one'),
    EMA,
    'Prompts',
    ('several', 'prompt=TEXT', [],
     'may be repeated; blanks at its end are dropped'),
    ('path', 'prompts_file=FILE', None,
     'one prompt a line, UTF-8; empty lines are dropped, lines that cannot be '
     'continued are named and left out (exit code 2 in the end)'),
    (bool, 'chat', False,
     'prompts are messages of a user, by the chat template of the weights, or '
     'data.chat_template; without any, a conversation: a message a line of '
     'stdin'),
    (str, 'system=TEXT', '', 'first message of every --chat'),
    ('several', 'domain=NAME', [],
     'domain whose token begins the text; once, or once per prompt'),
    ('path', 'calibration_file=FILE', None,
     'UTF-8 text for the covariance of latents, read with '
     '--config.model.latent.rotation=pca alone; else the prompts'),
    "Sampling (defaults: the decode section of the run's config)",
    (int, 'max_new_tokens=N', None, 'tokens after the prompt'),
    (float, 'temperature=X', None, '0: greedy, the same tokens on every run'),
    (int, 'top_k=N', None, 'keep the N most likely tokens; 0: all'),
    (float, 'top_p=X', None,
     'keep the fewest tokens of this total probability; 1: all'),
    (float, 'min_p=X', None,
     'keep tokens at least this likely relative to the best; 0: all'),
    (int, 'seed=N', None, 'random seed for sampling'),
    ('several', 'stop=TEXT', [], 'end before this text; may be repeated'),
    'Methods: several tokens a call of the model',
    (str, 'method=NAME', None, 'of the list that --methods prints'),
    (bool, 'methods', False, 'list the methods, and which are lossless'),
    (int, 'drafts=N', None, 'tokens that are drafted for a call'),
    (int, 'draft_layers=N', None,
     'speculative, pearl, easyspec: layers that draft'),
    (int, 'draft_group=N', None,
     'easyspec: layers whose mixers read the same features'),
    ('path', 'draft=FILE', None, 'a trained draft (paraxis draft), or heads'),
    (str, 'judge=NAME', None,
     'replay: the text of decoding one by one; rejection: its distribution; '
     'typical: another one'),
    (bool, 'lossless', False, 'refuse a judge that changes the distribution'),
    (int, 'requests=N', None,
     'continuous batching: rows that all prompts share; 0: a row each'),
    'Output and devices',
    ('maybe', 'certify=PATTERN,...', None,
     'continue nothing, but prove each part of decoding against the model '
     'without a cache, in float64: of the checkpoint, of patterns, or with '
     'neither of every kind of mixer'),
    (bool, 'json', False,
     'print one JSON object: step, samples (prompt, domain, text, tokens, '
     'finish: length, end or stop; calls: of the model after the prompt; '
     'lengths: how many of them made 0, 1, .. tokens; forwards: of the draft)'),
    (bool, 'stream', False,
     'print a JSON object on a line of its own for each prompt as soon as it '
     'has ended: those fields, and index, which of the prompts it is'),
    (bool, 'trace', False,
     'with --json or --stream: of every call, what its places held (canvas), '
     'the tokens it puts there, which are final, and how sure it is'),
    (str, 'mesh=AXIS=N,...', '',
     "replaces the run's mesh, e.g. --mesh=data=2,tensor=4"),
    ('count', 'devices=N', 0,
     'virtual CPU devices; 0: the accelerators present, else 8 virtual ones'),
  ),
  'overrides',
  notes=(
    "Fields of the run's config: --config.SECTION.FIELD=VALUE changes one",
    (str, 'config.model.dtype=bfloat16', '',
     'arithmetic; of --weights= else float32, twice the memory and time on a '
     'GPU or TPU'),
    *((str, f'config.{name}=VALUE', f.default, f.metadata['doc'])
      for name, f in schema.fields()
      if name.startswith('decode.')),
    'Exit codes: 0 done, 1 --certify found a difference, 2 bad input,\n'
    '  14 a damaged checkpoint, or logits that are not finite: one line names\n'
    '  the row and the step',
  ),
)  # fmt: skip
main = COMMAND

if __name__ == '__main__':
  sys.exit(command_line.run(main, sys.argv[1:]))
