"""What is refused before jax starts, and before data is read."""

import subprocess
import sys
import textwrap

import pytest
import support

from paraxis.configs.base import errors
from paraxis.train.data import corpus
from paraxis.train.data import token_cache
from paraxis.train.run import early
from paraxis.train.run import workdir


@pytest.mark.parametrize(
  'text, wanted',
  [('', None), ('5:8', (5, 8)), ('3', (3, 3)), ('1:10', (1, 10))],
)
def test_steps(text, wanted):
  assert early.traced(text, 10) == wanted


@pytest.mark.parametrize('text', ['8:5', '0:2', '5:11', 'a:b', '5:', ':', '-1'])
def test_wrong_steps(text):
  with support.refused(f'--profile={text} is not FIRST:LAST', 'train.steps=10'):
    early.traced(text, 10)


def test_before_jax_starts(tiny, tmp_path):
  """One process asks for all of it; jax is not imported, nor a folder made."""
  other = workdir.prepare(tmp_path / 'other')
  workdir.write_config(other, tiny.config({'train.seed': 7}))
  (tmp_path / 'file').write_text('')
  tried = {
    '--config.model.num_heads=3': 'model.num_heads=3',
    '--config.model.num_kv_heads=3': 'model.num_kv_heads=3',
    '--config.model.pattern=FX': "'X' is no mixer",
    '--config.model.experts.count=3 --config.model.experts.top_k=4': 'top_k=4',
    '--mesh=dta=8': "'dta' is not a mesh axis",
    '--profile=abc': '--profile=abc is not FIRST:LAST',
    f'--workdir={tmp_path}/file/x': 'cannot write',
    f'--workdir={other}': 'train.seed was 7, is now 0',
  }
  code = f"""
    import contextlib, io, sys
    from paraxis.train import cli
    first = ['--config={tiny.file}', '--workdir={tmp_path}/new']
    for command in ('train', 'check', 'verify'):
      for flags, words in {tried!r}.items():
        if command != 'train' and flags.startswith(('--w', '--p')):
          continue
        given = first if command == 'train' else first[:1]
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
          code = cli.main([command, *given, *flags.split()])
        assert code == 2 and words in said.getvalue(), (flags, said.getvalue())
        assert 'jax' not in sys.modules, (command, flags)
    import paraxis.sharding.rules  # the check can fail
    assert 'jax' in sys.modules
  """
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code)],
    capture_output=True,
    text=True,
  )
  assert not done.returncode, done.stderr
  assert not (tmp_path / 'new').exists()
  assert [p.name for p in other.iterdir()] == [workdir.CONFIG]


@pytest.mark.parametrize(
  'changes, profile, words',
  [
    ({'model.num_heads': 3}, '', 'model.num_heads=3'),
    ({}, '9:8', '--profile=9:8'),
    ({'train.seed': 1}, '', 'train.seed was 0, is now 1'),
  ],
)
def test_before_data_is_read(
  tiny, tmp_path, monkeypatch, changes, profile, words
):
  """loop.run itself, as a notebook calls it."""

  def read(*_):
    raise AssertionError('data was read')

  workdir.write_config(tmp_path, corpus.with_places(tiny.config()))
  monkeypatch.setattr(token_cache, 'tokens', read)
  with support.refused(words):
    tiny.run(tmp_path, changes, profile=profile)
  with pytest.raises(AssertionError, match='data was read'):
    tiny.run(tmp_path)


def test_a_folder_is_left_as_it_is(tmp_path):
  new, config = tmp_path / 'a' / 'b', support.piped()
  workdir.check(new, config)
  assert not list(tmp_path.iterdir())
  held = workdir.Lock(workdir.prepare(new))
  with pytest.raises(errors.UserError, match='in use by another run'):
    workdir.check(new, config)
  held.close()
  workdir.check(new, config)
  (new / workdir.CONFIG).write_text('{')
  with pytest.raises(errors.IntegrityError, match='damaged'):
    workdir.check(new, config)
