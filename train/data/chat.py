"""Conversations -> text by a chat template, and which characters carry loss.

A line of .jsonl is {"messages": [{"role": "user", "content": ...}, ...]}. The
template is Jinja, as Hugging Face keeps it: `data.chat_template`, else
chat_template.jinja or tokenizer_config.json beside the tokenizer. It runs in
Jinja's sandbox (extra chat).

With data.loss_on=assistant an assistant's turn carries loss: what the template
adds with it to the conversation before it, whose end asks for that turn
(add_generation_prompt). So a conversation must begin as its part does; a
template that changes earlier turns is refused.

Tokens: those of the text, special ones recognised, since templates write them;
a message that spells one is refused. The beginning-of-document token comes
before, and the end token after, where the template writes no special one there.
"""

import functools
import json
import pathlib
from typing import Any, NamedTuple

from paraxis.configs.base import errors
from paraxis.configs.base import plain_files
from paraxis.train.data import rows

ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
_FILES = ('chat_template.jinja', 'tokenizer_config.json')


class Turns(NamedTuple):
  """How the text of a conversation is tokenized.

  spans: ((start, stop), ...) characters that carry loss.
  begin, end: whether a token is added before and after; ends: with loss.
  """

  spans: tuple
  begin: bool
  end: bool
  ends: bool


def template(data) -> str:
  """The text of the template. UserError: there is none."""
  if data.chat_template:
    try:
      return plain_files.read_text(data.chat_template)
    except (OSError, UnicodeDecodeError) as error:
      raise errors.UserError(
        f'data.chat_template={data.chat_template!r} cannot be read: {error}.'
      ) from error
  beside = pathlib.Path(data.tokenizer).parent
  if pathlib.Path(data.tokenizer).is_file():
    for name in _FILES:
      if (beside / name).is_file():
        text = (beside / name).read_text(encoding='utf-8')
        if name.endswith('.json'):
          text = json.loads(text).get('chat_template')
        if isinstance(text, str) and text:
          return text
  raise errors.UserError(
    f'data: lines with "messages" need a chat template, and tokenizer '
    f'{data.tokenizer!r} has none beside it ({", ".join(_FILES)}): name a '
    'file of Jinja in data.chat_template.'
  )


def render(row, options, where) -> tuple[str, Turns]:
  """(text, Turns) of a line with messages; where: its file and line."""
  messages = _checked(row, options, where)
  template = _compiled(options.template)
  specials = dict(bos_token=options.bos, eos_token=options.end)

  def of(count, ask=False):
    try:
      return template.render(
        messages=messages[:count], add_generation_prompt=ask, **specials
      )
    except Exception as error:  # of the template: any
      raise errors.UserError(
        f'{where}: the chat template fails: {type(error).__name__}: '
        f'{str(error).splitlines()[0] if str(error) else ""}.'
      ) from error

  text = of(len(messages))
  if not text.strip():
    raise errors.UserError(f'{where}: the chat template makes no text of it.')
  bare = text.rstrip()
  begin = not text.startswith(options.specials)
  end = not bare.endswith(options.specials)
  if options.loss_on == 'all':
    return text, Turns(((0, len(text)),), begin, end, True)
  spans = []
  for n, message in enumerate(messages):
    if message['role'] == 'assistant':
      before, after = of(n, True), of(n + 1)
      if not (text.startswith(after) and after.startswith(before)):
        raise errors.UserError(
          f'{where}: data.loss_on=assistant: with turn {n + 1} the chat '
          'template changes what it made of the turns before it, or does not '
          'begin it as its generation prompt does: take another template.'
        )
      spans.append((len(before), len(after)))
  last = messages[-1]['role'] == 'assistant'
  return text, Turns(tuple(spans), begin, end, last)


def _checked(row, options, where):
  messages = row['messages']
  if not isinstance(messages, list) or not messages:
    raise errors.UserError(f'{where}: "messages" is not a list with messages.')
  for n, message in enumerate(messages, 1):
    if not isinstance(message, dict) or 'role' not in message:
      raise errors.UserError(f'{where}: message {n} has no "role".')
    if message['role'] not in ROLES:
      raise errors.UserError(
        f'{where}: message {n} has the role {message["role"]!r}, not one of '
        f'{", ".join(ROLES)}.'
      )
    content = message.get('content')
    if not isinstance(content, str):
      raise errors.UserError(
        f'{where}: message {n} ({message["role"]}): "content" is not a string.'
      )
    for special in options.specials:
      if special in content:
        raise errors.UserError(
          f'{where}: message {n} ({message["role"]}) spells the special token '
          f'{special!r}: change its text.'
        )
    if not _is_unicode(content):
      raise errors.UserError(f'{where}: message {n} is not Unicode.')
  roles = [message['role'] for message in messages]
  if options.loss_on == 'assistant' and 'assistant' not in roles:
    raise errors.UserError(
      f'{where}: no turn of the assistant among {len(roles)} messages: with '
      'data.loss_on=assistant nothing would carry loss.'
    )
  return messages


def _is_unicode(text):
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def _fail(message):
  raise ValueError(message)


@functools.lru_cache(maxsize=4)
def _compiled(text) -> Any:
  rows.needed('jinja2', 'chat', 'data.chat_template')
  sandbox = rows.needed('jinja2.sandbox', 'chat', 'data.chat_template')
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols']
  )
  environment.globals['raise_exception'] = _fail
  environment.filters['tojson'] = functools.partial(
    json.dumps, ensure_ascii=False
  )
  try:
    return environment.from_string(text)
  except Exception as error:
    raise errors.UserError(
      f'the chat template is not Jinja: {str(error).splitlines()[0]}.'
    ) from error
