"""Chat templates: a conversation becomes the text that a model has learned.

A template is Jinja, as Hugging Face keeps it, with the names and the tag that
transformers gives it; it runs in Jinja's sandbox (extra chat). Messages are
{'role': .., 'content': ..}.
"""

import datetime
import functools
import importlib
import json
import os
import pathlib
from typing import Any

from paraxis.configs.base import errors
from paraxis.configs.base import plain_files
from paraxis.models.text import tokenizer as tokenizer_lib

ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
_FILES = ('chat_template.jinja', tokenizer_lib.STATED)


def template(data) -> str:
  """The text of schema.Data's template, or of the one beside its tokenizer;
  '': there is none.

  Raises:
    UserError: data.chat_template cannot be read.
  """
  if data.chat_template:
    try:
      return plain_files.read_text(os.path.expanduser(data.chat_template))
    except (OSError, UnicodeDecodeError) as error:
      raise errors.UserError(
        f'data.chat_template={data.chat_template!r} cannot be read: {error}.'
      ) from error
  named = pathlib.Path(os.path.expanduser(data.tokenizer))
  if os.path.isfile(named):
    for name in _FILES:
      if (beside := named.with_name(name)).is_file():
        if text := read(beside):
          return text
  return ''


def read(path) -> str:
  """The template in chat_template.jinja or tokenizer_config.json; '': none.

  Of several that have names it is the one named default.

  Raises:
    UserError: it does not read, or there are several and no default.
  """
  if path.name != tokenizer_lib.STATED:
    try:
      return plain_files.read_text(path)
    except (OSError, ValueError) as error:
      raise errors.UserError(f'{path} does not read: {error}.') from error
  found = tokenizer_lib.stated(path.parent).get('chat_template')
  if isinstance(found, list):
    pairs = [x for x in found if isinstance(x, dict)]
    named = {str(x.get('name')): x.get('template') for x in pairs}
    if len(named) > 1 and 'default' not in named:
      raise errors.UserError(
        f'{path}: chat_template has {", ".join(named)}, and none is named '
        f'default: write the one to use to {_FILES[0]} beside it.'
      )
    found = named.get('default', next(iter(named.values()), ''))
  return found if isinstance(found, str) else ''


def missing(what, tokenizer):
  """UserError: `what` needs a template, a tokenizer's name has none."""
  return errors.UserError(
    f'{what} a chat template, and tokenizer {tokenizer!r} has none beside it '
    f'({", ".join(_FILES)}): name a file of Jinja in data.chat_template.'
  )


def rendered(text, messages, specials, where, ask=False, now=None):
  """Text of a conversation.

  Args:
    text: of the template. messages: dicts. specials: (beginning, end) as text,
      the template's bos_token and eos_token.
    where: begins an error. ask: for the assistant's next turn.
    now: the datetime that its strftime_now writes; None: the present.

  Raises:
    UserError: the template is not Jinja, or fails.
  """
  made, (bos, end) = _compiled(text), specials
  try:
    return made.render(
      messages=messages, tools=None, documents=None, add_generation_prompt=ask,
      bos_token=bos, eos_token=end,
      strftime_now=(now or datetime.datetime.now()).strftime,
    )  # fmt: skip
  except Exception as error:  # of the template: any
    raise errors.UserError(
      f'{where}: the chat template fails: {type(error).__name__}: '
      f'{str(error).splitlines()[0] if str(error) else ""}.'
    ) from error


def check_spelling(content, specials, where):
  """UserError if a message spells a special token."""
  for special in specials:
    if special in content:
      raise errors.UserError(
        f'{where} spells the special token {special!r}: change its text.'
      )


def _fail(message):
  raise ValueError(message)


def _answers():
  """Jinja's extension for the tag of what a model says: {% generation %}.

  transformers counts its characters; here its text is as it stands.
  """
  jinja2: Any = importlib.import_module('jinja2')
  extension: Any = importlib.import_module('jinja2.ext')

  class Answers(extension.Extension):
    tags = frozenset(['generation'])

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return jinja2.nodes.Scope(body, lineno=line)

  return Answers


@functools.lru_cache(maxsize=4)
def _compiled(text) -> Any:
  try:
    importlib.import_module('jinja2')
    sandbox = importlib.import_module('jinja2.sandbox')
  except ImportError as error:
    raise errors.UserError(
      'data.chat_template: reading it takes the package jinja2: '
      "pip install 'paraxis[chat]'."
    ) from error
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True,
    extensions=[_answers(), 'jinja2.ext.loopcontrols'],
  )  # fmt: skip
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
