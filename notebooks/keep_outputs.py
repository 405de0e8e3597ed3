"""Runs notebooks and keeps what they show, as a code host renders it.

    python notebooks/keep_outputs.py                  # all of them
    python notebooks/keep_outputs.py 04_your_own_run

Each runs from top to bottom in an empty folder. Paths of this machine are cut
off, lines of one stream are joined, and pictures get 64 colours, so that a
notebook stays below LIMIT bytes. PARAXIS_STEPS: shorter trainings.
"""

import base64
import io
import pathlib
import re
import sys
import tempfile
from typing import Any

import nbclient
import nbformat
from PIL import Image  # comes with matplotlib

FOLDER = pathlib.Path(__file__).resolve().parent
LIMIT = 300_000
COLOURS = 64
_TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r'/\w+')


def execute(notebook, folder, seconds=3600):
  """The notebook with outputs, run in a folder; seconds: of a cell at most."""
  return nbclient.NotebookClient(
    notebook,
    timeout=seconds,
    kernel_name='python3',
    resources={'metadata': {'path': str(folder)}},
  ).execute()


def clean(notebook):
  """Changes the outputs of a notebook as the top says; returns it."""
  notebook.metadata['language_info'] = {'name': 'python'}
  for cell in notebook.cells:
    cell.metadata = {}
    kept = []
    for output in cell.get('outputs', ()):
      last: Any = kept[-1] if kept else {}
      if 'name' in output and last.get('name') == output.name:
        last.text += output.text
      else:
        kept.append(output)
    for output in kept:
      if 'text' in output:
        output.text = _TEMPORARY.sub('.', output.text)
      data = output.get('data', {})
      data.pop('text/html', None)  # the same as text/plain, with styles
      if 'text/plain' in data:
        data['text/plain'] = _TEMPORARY.sub('.', data['text/plain'])
      if 'image/png' in data:
        data['image/png'] = smaller(data['image/png'])
    if 'outputs' in cell:
      cell.outputs = kept
  return notebook


def smaller(picture):
  """A PNG in base64 with few colours."""
  image = Image.open(io.BytesIO(base64.b64decode(picture))).convert('RGB')
  out = io.BytesIO()
  image.quantize(COLOURS).save(out, 'png', optimize=True)
  return base64.b64encode(out.getvalue()).decode()


def main(names):
  """Runs the notebooks of these names, or all."""
  for name in names or sorted(p.stem for p in FOLDER.glob('*.ipynb')):
    path = FOLDER / f'{name}.ipynb'
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
      nbformat.write(clean(execute(notebook, folder)), path)
    print(f'{path.name}: {path.stat().st_size:,} bytes, at most {LIMIT:,}')


if __name__ == '__main__':
  main(sys.argv[1:])
