"""`paraxis papers` and `paraxis reproduce`: flags, and what does not fit."""

from paraxis.configs.base import command_line
from paraxis.configs.base import errors


def _papers(values, config, words):
  from paraxis.train.claims import papers

  word = words[0] if words else ''
  if values.html is None:
    return papers.run(word)
  command_line.prepare_devices(1)
  from paraxis.train.claims import page

  file = '' if values.html == command_line.ALL else values.html
  print(f'wrote {page.write(word, file)}')
  return errors.EXIT_OK


def _reproduce(values, _, words):
  if values.all:
    return _reproduce_all(values, words)
  if not words:
    raise errors.UserError('reproduce what? `paraxis papers` lists the names.')
  if values.budget:
    raise errors.UserError('--budget is how much of --all fits: add --all.')
  command_line.find_config(words[0])
  command_line.prepare_devices(values.devices)
  from paraxis.sharding.meter import compiling
  from paraxis.train.claims import harness as claims

  compiling.use_cache()
  if values.knockout is not None:
    from paraxis.train.claims import knockouts

    return knockouts.reproduce(
      words[0], values.knockout, values.workdir, values.json, values.fresh
    )
  return claims.reproduce(words[0], values.workdir, values.json, values.fresh)


def _reproduce_all(values, words):
  given = [
    text
    for text, there in (
      (' '.join(words), words),
      ('--workdir', values.workdir),
      ('--knockout', values.knockout is not None),
      ('--json', values.json),
    )
    if there
  ]
  if given:
    raise errors.UserError(
      f'--all runs the claims of every config: leave out {", ".join(given)}.'
    )
  command_line.prepare_devices(values.devices)
  from paraxis.sharding.meter import compiling
  from paraxis.train.claims import budget

  compiling.use_cache()
  return budget.reproduce(values.budget, values.fresh)


def commands(json_flag, devices):
  """Both commands; json_flag, devices: rows of flags that others share."""
  return (
    command_line.Command(
      _papers,
      'papers',
      '[WORD] [--html]',
      'list the configs, or those that mention a word',
      (
        (
          'maybe',
          'html[=FILE]',
          None,
          'write one page of claims, verdicts and plots, from what `reproduce` '
          'found last: results/papers.html',
        ),
      ),
      words=1,
    ),
    command_line.Command(
      _reproduce,
      'reproduce',
      'NAME | --all --budget=30m',
      "run a config's claims; exit code 1 if one fails",
      (
        (
          'path',
          'workdir=RUN',
          '',
          'folder of all trainings and results; empty: results/NAME',
        ),
        (
          bool,
          'fresh',
          False,
          'remove compared trainings of other code, versions or configuration, '
          'which are refused otherwise, and train them again',
        ),
        (bool, 'all', False, 'the claims of every config, the cheapest first'),
        (
          str,
          'budget=TIME',
          '',
          'with --all: CPU time, as 90s, 30m or 2h; what does not fit by the '
          'cost in its header is left out, and named',
        ),
        (
          'maybe',
          'knockout[=NAME]',
          None,
          'disable the mechanism of each claim, or the knock-out NAME alone: '
          'exit code 0 if every such claim fails',
        ),
        json_flag,
        devices,
      ),
      words=1,
    ),
  )
