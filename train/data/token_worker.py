"""Processes that tokenize: started here, run here; none of them imports jax.

A worker is `python -m paraxis.train.data.token_worker`. It reads a line of JSON
(tokenizer, options, folder), then for each block a line of JSON and its bytes;
it writes the piece (train/data/pieces.py) and answers with a line of JSON. It
ends when its input does: if the process that started it is killed, too.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys

from paraxis.configs.base import errors
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.train.data import pieces
from paraxis.train.data import rows


class Ended(errors.UserError):
  """A worker is gone; pieces that are written remain."""


def message(number, block) -> bytes:
  """A block as bytes: a line of JSON, then what it announces."""
  body = block.data
  if block.kind == 'rows':
    body = json.dumps(block.rows).encode()
  source = [str(block.source.file), *block.source[1:]]
  spans = block.rows if block.kind == 'ids' else []
  head = [number, source, block.first, block.kind, spans, len(body)]
  return json.dumps(head).encode() + b'\n' + body


def received(stream):
  """(number, block) of the next message; None at the end of the stream."""
  line = stream.readline()
  if not line:
    return None
  number, source, first, kind, spans, size = json.loads(line)
  body = stream.read(size)
  source = rows.Source(pathlib.Path(source[0]), *source[1:])
  if kind == 'rows':
    return number, rows.Block(source, first, kind, b'', json.loads(body))
  return number, rows.Block(source, first, kind, body, spans)


@contextlib.contextmanager
def pool(count, folder, tokenizer, options):
  """-> function (number, block) -> Future of the tokens in the piece written.

  count: processes; 0: in this one, at once. UserErrors are those of the block.
  """
  if not count:
    yield lambda number, block: _here(folder, tokenizer, options, number, block)
    return
  about = [tokenizer.name, tokenizer.fingerprint, options, str(folder)]
  free = queue.SimpleQueue()
  workers = []
  try:
    for _ in range(count):
      workers.append(_start(about))
      free.put(workers[-1])

    def work(number, block):
      worker = free.get()
      try:
        return _ask(worker, message(number, block))
      finally:
        free.put(worker)

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
      try:
        yield lambda number, block: threads.submit(work, number, block)
      except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
          worker.kill()
        raise
  finally:
    for worker in workers:
      with contextlib.suppress(BrokenPipeError):
        worker.stdin.close()
      worker.wait()
      worker.stdout.close()


def _here(folder, tokenizer, options, number, block):
  future = concurrent.futures.Future()
  piece = pieces.encode(block, tokenizer, options)
  pieces.write(folder, number, block, piece)
  future.set_result(len(piece.tokens))
  return future


def _start(about):
  environment = os.environ | {
    'TOKENIZERS_PARALLELISM': 'false',  # one core each
    'PYTHONPATH': os.pathsep.join(filter(None, sys.path)),
  }
  process = subprocess.Popen(
    [sys.executable, '-m', 'paraxis.train.data.token_worker'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env=environment,
    start_new_session=True,  # Ctrl-C is for the process that started it
  )
  assert process.stdin
  process.stdin.write(json.dumps(about).encode() + b'\n')
  return process


def _ask(worker, body):
  answer = b''
  with contextlib.suppress(BrokenPipeError):
    worker.stdin.write(body)
    worker.stdin.flush()
    answer = worker.stdout.readline()
  if not answer:
    raise Ended(
      f'a process that tokenizes ended with code {worker.wait()}, perhaps for '
      'want of memory: run again, which continues from what is done, with '
      'data.workers=1.'
    )
  answer = json.loads(answer)
  if 'error' in answer:
    raise errors.UserError(answer['error'])
  return answer['tokens']


def main():
  """Serves until its input ends."""
  stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
  name, fingerprint, options, folder = json.loads(stdin.readline())
  options = rows.Options(*options)
  options = options._replace(specials=tuple(options.specials))
  folder = pathlib.Path(folder)
  tokenizer = tokenizer_lib.load(name)
  while given := received(stdin):
    try:
      if tokenizer.fingerprint != fingerprint:
        raise errors.UserError(f'tokenizer {name} changed while it was read.')
      piece = pieces.encode(given[1], tokenizer, options)
      pieces.write(folder, *given, piece)
      answer = {'tokens': len(piece.tokens)}
    except errors.UserError as error:
      answer = {'error': str(error)}
    except OSError as error:
      answer = {'error': f'{folder} cannot be written: {error.strerror}'}
    stdout.write(json.dumps(answer).encode() + b'\n')
    stdout.flush()


if __name__ == '__main__':
  main()
