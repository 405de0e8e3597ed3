"""Conversations: messages go in by a chat template, the answers come out.

The template is that of the weights, or data.chat_template, or beside the run's
tokenizer. Its text asks for the assistant's next turn; special tokens that it
writes are recognised, and a message that spells one is refused.

A conversation goes on from ids: those that the model read and wrote stay, and
the template adds what follows them. As text, an answer could be cut into other
tokens than were written, or spell a special one.
"""

import datetime
import io

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

  def goes_on(self, before, messages):
    """`ids` of messages that end with an answer and a user's message.

    A template that writes a part of answers alone, as without their reasoning,
    is followed: then all is read anew, unless an answer spells a special token.

    Args:
      before: the ids up to the end of that answer.

    Raises:
      UserError: as of `ids`.
    """
    specials, now = self._tokenizer.specials, datetime.datetime.now()
    last = f'message {len(self._first + messages)} (user)'
    templates.check_spelling(messages[-1]['content'], specials, last)
    said = [m['content'] for m in messages if m['role'] == 'assistant']
    texts = '\n'.join(m['content'] for m in messages)
    free = (c for c in map(chr, range(ord(ANSWER), 0xF900)) if c not in texts)
    mark = next(free, ANSWER)

    def rendered(answer):
      held = [*self._first, *messages]
      held[-2] = held[-2] | dict(content=answer)
      return templates.rendered(
        self._template, held, self._specials, '--chat', ask=True, now=now
      )

    marked, squeezed = rendered(mark), lambda text: ''.join(text.split())
    follows = marked.count(mark) == 1
    if follows and not any(s in text for text in said for s in specials):
      plain = squeezed(marked.replace(mark, said[-1]))  # blanks may be cut
      follows = plain == squeezed(rendered(said[-1]))
    if not follows:
      return self.ids(messages)
    return [*before, *self._inside(marked.partition(mark)[2])]

  def written(self, result):
    """Ids of an answer of `Generator.generate`, without a stop string."""
    ids, text = result['tokens'], result['text']
    if result['finish'] != 'stop':
      return ids
    for n in range(len(ids), 0, -1):
      head = self._tokenizer.decode_bytes(ids[:n]).decode('utf-8', 'replace')
      if text.startswith(head):
        return [*ids[:n], *self._inside(text[len(head) :])]
    return self._inside(text)

  def _inside(self, text):
    """Ids of text behind other text: some vocabularies put a space in front of
    what begins."""
    found, places = self._tokenizer.encode_offsets(ANSWER + text)
    if any(start < 1 < stop for start, stop in places):
      return self._tokenizer.encode_offsets(text)[0]
    return [i for i, (_, end) in zip(found, places, strict=True) if end > 1]


def asked(text):
  """[the message of a user]."""
  return [dict(role='user', content=text)]


def talk(made, chat, lines, stop=(), **options):
  """One conversation: a message a line, the answers to stdout as they come.

  A line that spells a special token is refused on stderr, and left out.

  Args:
    made: loop.Generator. chat: Chat. lines: of text; empty ones are passed
      over. stop, options: as for `Generator.generate`.

  Returns:
    how many lines were refused.

  Raises:
    UserError: a line that is no UTF-8; the template fails; the conversation is
      longer than the cache.
  """
  history, before, refused = [], [], 0

  def show(_, piece):
    print(piece, end='', flush=True)

  if isinstance(lines, io.TextIOWrapper):  # whatever the locale says
    lines.reconfigure(encoding='utf-8', errors='surrogateescape')
  for text in filter(None, map(str.strip, lines)):
    prompts_lib.check_utf8('stdin: ', [text])
    try:
      templates.check_spelling(
        text, made.tokenizer.specials, 'stdin: a message'
      )
    except errors.UserError as e:
      prompts_lib.say(e)
      refused += 1
      continue
    history += asked(text)
    ids = chat.goes_on(before, history) if before else chat.ids(history)
    try:
      (result,) = made.generate([ids], stop=stop, on_text=show, **options)
    finally:
      print(flush=True)
    history.append(dict(role='assistant', content=result['text']))
    before = [*ids, *chat.written(result)]
  if not history and not refused:
    prompts_lib.say('no message came in on stdin')
  return refused
