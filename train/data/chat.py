"""Conversations -> text by a chat template, and which characters carry loss.

A line of .jsonl is {"messages": [{"role": "user", "content": ...}, ...]}. The
template (models/text/chat.py) is `data.chat_template`, else chat_template.jinja
or tokenizer_config.json beside the tokenizer.

With data.loss_on=assistant an assistant's turn carries loss: what the template
adds with it to the conversation before it, whose end asks for that turn
(add_generation_prompt). So a conversation must begin as its part does; a
template that changes earlier turns is refused.

Tokens: those of the text, special ones recognised, since templates write them;
a message that spells one is refused. The beginning-of-document token comes
before, and the end token after, where the template writes no special one there.

A template's strftime_now writes NOW, so that the text is the same on every day;
in decoding it writes the day.
"""

import datetime
from typing import NamedTuple

import numpy as np

from paraxis.configs.base import errors
from paraxis.models.text import chat

NOW = datetime.datetime(2024, 7, 26)  # as Llama 3's templates without a clock


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
  found = chat.template(data)
  if not found:
    raise chat.missing('data: lines with "messages" need', data.tokenizer)
  return found


def render(row, options, where) -> tuple[str, Turns]:
  """(text, Turns) of a line with messages; where: its file and line."""
  messages = _checked(row, options, where)
  specials = options.bos, options.end

  def of(count, ask=False):
    return chat.rendered(
      options.template, messages[:count], specials, where, ask, NOW
    )

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


def said_cut(batches, corpus, data) -> str:
  """A line on documents that rows cut; what to do, if they are conversations.

  Args:
    batches: batches.Batches of the token_cache.Corpus. data: schema.Data.
  """
  length, of = data.sequence_length, 'group' if corpus.groups else 'domain'
  line = (
    f'data: {batches.plan.cut} documents are cut between rows of {length} '
    'tokens; every token is used'
  )
  if not corpus.talks:
    return f'{line}.'
  chosen = [corpus.select('train', **{of: part}) for part in batches.parts]
  pairs = corpus.lengths[np.concatenate(chosen)] - 1  # as packing counts
  longer, longest = int((pairs > length).sum()), int(pairs.max())
  line += ', but what follows a cut in a conversation sees nothing before it: '
  enough = f'data.sequence_length={longest} cuts none.'
  if data.packing == 'first_fit':
    return line + enough
  if not longer:
    return line + 'data.packing=first_fit cuts none.'
  return line + (
    f'data.packing=first_fit cuts {longer}, longer than a row; with it {enough}'
  )


def _checked(row, options, where):
  messages = row['messages']
  if not isinstance(messages, list) or not messages:
    raise errors.UserError(f'{where}: "messages" is not a list with messages.')
  for n, message in enumerate(messages, 1):
    if not isinstance(message, dict) or 'role' not in message:
      raise errors.UserError(f'{where}: message {n} has no "role".')
    if message['role'] not in chat.ROLES:
      raise errors.UserError(
        f'{where}: message {n} has the role {message["role"]!r}, not one of '
        f'{", ".join(chat.ROLES)}.'
      )
    content = message.get('content')
    if not isinstance(content, str):
      raise errors.UserError(
        f'{where}: message {n} ({message["role"]}): "content" is not a string.'
      )
    what = f'{where}: message {n} ({message["role"]})'
    chat.check_spelling(content, options.specials, what)
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
