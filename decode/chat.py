"""Conversations: messages go in by a chat template, the answers come out.

The template is that of the weights, or data.chat_template, or beside the run's
tokenizer. Its text asks for the assistant's next turn; special tokens that it
writes are recognised, and a message that spells one is refused.
"""

import io
import sys

from paraxis.configs.base import errors
from paraxis.decode import prompts as prompts_lib
from paraxis.models.text import chat as templates

ANSWER = '\ue000'  # of private use: a template writes none of its own


class Chat:
  """A tokenizer and a template; UserError: there is none.

  Args:
    tokenizer: of models.text.tokenizer. template: its text. system: first
      message of every conversation; '': none. begins: as of loop.Generator.
  """

  def __init__(self, tokenizer, template, system='', begins=True):
    if not template:
      raise templates.missing('--chat: answers need', tokenizer.name)
    self._tokenizer, self._template = tokenizer, template
    self._begins = begins
    self._first = [dict(role='system', content=system)] if system else []
    self._specials = self._token('bos_id'), self._token('end_id')

  def _token(self, name):
    """Text of a special token; '': this vocabulary has none."""
    try:
      found = getattr(self._tokenizer, name)
      return self._tokenizer.name_of(found() if callable(found) else found)
    except errors.UserError:
      return ''

  def ends(self):
    """(id,) of the first special token that the template writes behind an
    answer, which a model of conversations learns to end it with; (): none."""
    messages = self._first + asked('a')
    messages.append(dict(role='assistant', content=ANSWER))
    try:
      text = templates.rendered(
        self._template, messages, self._specials, '--chat'
      )
    except errors.UserError:  # of questions alone, until there is an answer
      return ()
    found, _ = self._tokenizer.encode_offsets(text.partition(ANSWER)[2])
    return tuple(i for i in found if i in self._tokenizer.special_ids)[:1]

  def each(self, prompts):
    """[ids] of prompts.Prompts, each a conversation of one message; what is
    refused of a file's line is among its `bad`, and an empty list here."""
    out = []
    for i, text in enumerate(prompts.texts):
      try:
        out.append([] if i in prompts.bad else self.ids(asked(text)))
      except errors.UserError as e:
        if not prompts.places[i]:
          raise
        prompts.bad[i] = str(e)
        out.append([])
    return out

  def ids(self, messages):
    """Ids of a conversation that ends with a user's message.

    Raises:
      UserError: a message spells a special token, or the template fails.
    """
    messages, tokens = self._first + messages, self._tokenizer
    for n, message in enumerate(messages, 1):
      what = f'message {n} ({message["role"]})'
      templates.check_spelling(message['content'], tokens.specials, what)
    text = templates.rendered(
      self._template, messages, self._specials, '--chat', ask=True
    )
    found, _ = tokens.encode_offsets(text)
    begun = text.startswith(tokens.specials)
    if begun:
      return found if self._begins else found[1:]
    return [*tokens.opening(), *found] if self._begins else found


def asked(text):
  """[the message of a user]."""
  return [dict(role='user', content=text)]


def talk(made, chat, lines, stop=(), **options):
  """One conversation: a message a line, the answers to stdout as they come.

  Args:
    made: loop.Generator. chat: Chat. lines: of text; empty ones are passed
      over. stop, options: as for `Generator.generate`.

  Raises:
    UserError: a line that is no UTF-8.
  """
  history = []

  def show(_, piece):
    print(piece, end='', flush=True)

  if isinstance(lines, io.TextIOWrapper):  # whatever the locale says
    lines.reconfigure(encoding='utf-8', errors='surrogateescape')
  for line in lines:
    if not line.strip():
      continue
    prompts_lib.check_utf8('stdin: ', [line.strip()])
    history += asked(line.strip())
    try:
      (result,) = made.generate(
        [chat.ids(history)], stop=stop, on_text=show, **options
      )
    finally:
      print(flush=True)
    history.append(dict(role='assistant', content=result['text']))
  if not history:
    print('paraxis: no message came in on stdin', file=sys.stderr)
