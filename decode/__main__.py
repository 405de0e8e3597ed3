"""The decode command: continues prompts with a trained checkpoint.

    paraxis decode --checkpoint=RUN --domain=drama --prompt='KING.'

`python -m paraxis.decode` is the same. Results go to stdout, everything else to
stderr. Nothing here imports jax before the devices are chosen; --help never.
"""

import json
import pathlib
import sys

from absl import flags

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors

HELP = """\
paraxis decode --checkpoint=RUN --prompt=TEXT [flags]

Continues prompts with a trained model: one prefill, one compiled loop.

What to read
  --checkpoint=PATH   a workdir, its checkpoints folder, or one step's folder
  --step=N            that step; default: the newest good one
What to continue
  --prompt=TEXT       may be repeated; blanks at its end are dropped
  --prompts_file=FILE one prompt a line, UTF-8; empty lines are dropped
  --domain=NAME       kind of text; once for all prompts, or once per prompt
  --calibration_file=FILE
                      text to measure latents on, UTF-8; default: the prompts
                      (--config.model.latent.rotation=pca alone reads it)
How (defaults: the decode section of the run's configuration)
  --max_new_tokens=N  tokens after the prompt
  --temperature=X     0: greedy, the same tokens on every run
  --top_k=N           keep the N most likely tokens; 0: all
  --top_p=X           keep the fewest tokens of this probability; 1: all
  --min_p=X           keep tokens this likely, relative to the best; 0: all
  --seed=N            of sampling
  --stop=TEXT         end before this text; may be repeated
Where and what else
  --json              one JSON object on stdout: step, samples (prompt, domain,
                      text, tokens, finish: length, end or stop)
  --mesh=AXIS=N,...   replaces the run's mesh, e.g. --mesh=data=2,tensor=4
  --devices=N         N virtual CPU devices; default: the machine's
                      accelerators, else 8 virtual ones
  --config.SECTION.FIELD=VALUE
                      overrides a field of the run's configuration:
"""

_SAMPLING = ('max_new_tokens', 'temperature', 'top_k', 'top_p', 'min_p', 'seed')


def help_text():
  """The whole of --help."""
  fields = [
    f'    --config.{name}={f.default!r}: {f.metadata["doc"]}'
    for name, f in schema.fields()
    if name.startswith('decode.')
  ]
  return HELP + '\n'.join(fields) + '\n'


def _define(values):
  string = lambda name: flags.DEFINE_string(name, None, '', flag_values=values)
  several = lambda name: flags.DEFINE_multi_string(
    name, [], '', flag_values=values
  )
  number = lambda name: flags.DEFINE_integer(name, None, '', flag_values=values)
  for name in ('checkpoint', 'prompts_file', 'calibration_file'):
    string(name)
  for name in ('prompt', 'domain', 'stop'):
    several(name)
  for name in ('step', 'max_new_tokens', 'top_k', 'seed'):
    number(name)
  for name in ('temperature', 'top_p', 'min_p'):
    flags.DEFINE_float(name, None, '', flag_values=values)
  flags.DEFINE_boolean('json', False, '', flag_values=values)
  flags.DEFINE_string('mesh', '', '', flag_values=values)
  flags.DEFINE_integer('devices', 0, '', lower_bound=0, flag_values=values)


def _say(line):
  print(f'paraxis: {line}', file=sys.stderr)


def _text(flag, path):
  try:
    return pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as e:
    raise errors.UserError(f'--{flag}={path}: {e}') from None


def _prompts(options):
  """Texts to continue, without blanks at their ends."""
  found = list(options.prompt)
  if options.prompts_file is not None:
    path = pathlib.Path(options.prompts_file)
    lines = _text('prompts_file', path).splitlines()
    kept = [line for line in lines if line.strip()]
    if len(kept) < len(lines):
      _say(f'{path}: {len(lines) - len(kept)} empty lines are dropped')
    if not kept:
      raise errors.UserError(f'--prompts_file={path} holds no prompt.')
    found += kept
  if not found:
    raise errors.UserError(
      "nothing to continue: give --prompt='Some text' or --prompts_file=."
    )
  short = [text.rstrip() for text in found]
  changed = sum(a != b for a, b in zip(found, short, strict=True))
  if changed:
    _say(
      f'blanks at the end of {changed} of {len(found)} prompts are dropped: '
      'a word begins with its space'
    )
  return short


def _domains(given, prompts, tokenizer):
  """One domain, or None, per prompt."""
  for domain in given:
    tokenizer.require_domain(domain)
  if len(given) in (0, 1):
    return (given or [None]) * len(prompts)
  if len(given) != len(prompts):
    raise errors.UserError(
      f'{len(given)} --domain flags for {len(prompts)} prompts: give one for '
      'all, or one each.'
    )
  return given


def _first_look(argv):
  """The command's own flags, before the run's configuration is known."""
  values = flags.FlagValues()
  _define(values)
  try:
    left = values(['paraxis', *argv], known_only=True)[1:]
  except flags.Error as e:
    raise errors.UserError(' '.join(str(e).split())) from e
  for arg in left:
    name = arg.lstrip('-').split('=', 1)[0]
    if name == 'config':
      raise errors.UserError(
        'decode takes the configuration from the checkpoint, not from '
        '--config=; --config.SECTION.FIELD= overrides a field.'
      )
    if not name.removeprefix('no').startswith('config.') or arg[:1] != '-':
      raise errors.UserError(
        f'unknown argument {arg!r} (--help lists all).'
        + schema.suggest(name, [n for n in values if not n.startswith('?')])
      )
  if not values.checkpoint:
    raise errors.UserError('--checkpoint= is missing: name a workdir.')
  return values


def _print(results, domains, prompts):
  for result, domain, prompt in zip(results, domains, prompts, strict=True):
    if len(prompts) > 1:
      print(f'=== {domain or "prompt"}')
    print(prompt + result['text'])


def main(argv):
  """Runs the command; argv: arguments after its name. -> exit code."""
  if any(arg in ('--help', '-help', '-h') for arg in argv):
    print(help_text(), end='')
    return errors.EXIT_OK
  options = _first_look(argv)
  prompts = texts = _prompts(options)
  if options.calibration_file is not None:
    texts = [_text('calibration_file', options.calibration_file)]
  command_line.prepare_devices(options.devices)
  from paraxis.decode import load  # starts jax

  with load.Checkpoint(options.checkpoint, options.step, _say) as checkpoint:
    _, config, _ = command_line.parse(argv, _define, checkpoint.config())
    config = schema.view(config)
    chosen = {
      name: options[name].value
      for name in _SAMPLING
      if options[name].value is not None
    }
    made = checkpoint.generator(config, options.mesh, len(prompts), texts)
    step = checkpoint.step
  domains = _domains(options.domain, prompts, made.tokenizer)
  live = sys.stdout.isatty() and len(prompts) == 1 and not options.json

  def show(_, piece):
    print(piece, end='', flush=True)

  if live:
    print(prompts[0], end='', flush=True)
  results = made.generate(
    prompts, domains, options.stop, show if live else None, **chosen
  )
  if options.json:
    keys = ('prompt', 'text', 'tokens', 'finish')
    samples = [
      dict(domain=d, **{k: r[k] for k in keys})
      for r, d in zip(results, domains, strict=True)
    ]
    print(json.dumps(dict(step=step, samples=samples), ensure_ascii=False))
  elif live:
    print()
  else:
    _print(results, domains, prompts)
  return errors.EXIT_OK


if __name__ == '__main__':
  sys.exit(command_line.run(main, sys.argv[1:]))
