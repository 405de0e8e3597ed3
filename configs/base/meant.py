"""What an argument may have been meant as, for messages: ' Did you mean X?'."""

from collections.abc import Iterable

from paraxis.configs import schema


def fields(name: str) -> list[str]:
  """Fields 'section.name' of the configuration that `name` may stand for."""
  every = [n for n, _ in schema.fields()]
  return [n for n in every if n == name or n.endswith(f'.{name}')][:3]


def flag(name: str, argv: Iterable[str], own: Iterable[str], reads: bool):
  """Of a flag that is not there.

  name: without dashes. argv: all arguments, for its value. own: flags of the
  command. reads: whether it reads a configuration.
  """
  found = fields(name) if reads else []
  if not found:
    close = schema.suggest(name, own, 0.6)
    return close.replace(" '", ' --').replace("'?", '?')
  given = (a.lstrip('-').partition('=') for a in argv)
  value = next((f'={v}' for n, _, v in given if n == name and v), '=VALUE')
  return f' Did you mean {" or ".join(f"--config.{n}{value}" for n in found)}?'


def override(argv: Iterable[str], own: Iterable[str]) -> str:
  """Of --config.SECTION.FIELD=, where `own` flags are all that is read."""
  for arg in argv:
    field, equals, value = arg.lstrip('-').partition('=')
    name = field.split('.')[-1]
    if field.startswith('config.') and name in own:
      return f' Did you mean --{name}{equals}{value}?'
  return ''


def word(text: str, own: Iterable[str], reads: bool) -> str:
  """Of an argument without dashes; own, reads: as of `flag`."""
  name, equals, _ = text.partition('=')
  if equals and name in own:
    return f' Did you mean --{text}?'
  if equals and reads and fields(name):
    return flag(name, [text], own, reads)
  return f' Did you mean --prompt={text}?' if 'prompt' in own else ''
