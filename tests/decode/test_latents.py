"""Latents of a checkpoint are sharded and rotated as decoding asks for."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.decode import __main__ as command
from paraxis.decode import latents
from paraxis.decode import load
from paraxis.models import build

LATENT = dict(rank=8, nope_dim=4, rope_dim=4, value_dim=4)
TINY = dict(
  vocab_size=264, d_model=16, num_layers=2, num_heads=2, d_ff=16,
  pattern='FA', tied_embedding=False,
)  # fmt: skip
PROMPT = 'And it came to pass'
OWN = dict(groups=2, scores='own')


def save(path, **latent):
  config = schema.view(
    {
      'model': TINY | {'latent': LATENT | latent},
      'data': dict(tokenizer='bytes'),
      'decode': dict(max_new_tokens=6, temperature=0.0),
    }
  )
  built = build.build(config, 'data=1', devices=jax.devices()[:1])
  rng, name = np.random.default_rng(0), latents.PREFIX
  params = {
    p: np.ones(x.shape)
    if built.model.kinds[p] == 'vector'
    else rng.normal(0, 1 if p == 'embedding' else 0.3, x.shape)
    for p, x in sorted(built.params.items())
  }
  # Latents of a few directions; gamma is not 1.
  few = 0.5 ** np.arange(8) @ np.linalg.qr(rng.normal(size=(8, 8)))[0]
  params[f'{name}down'] *= few
  params[f'{name}latent_norm'] += rng.uniform(-0.3, 0.3, 8)
  if latent:
    params[f'{name}shares'] /= latent['groups']
  params = {
    p: jax.device_put(v.astype(np.float32), built.params[p].sharding)
    for p, v in params.items()
  }
  return support.save_run(path, config, built, params)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return save(tmp_path_factory.mktemp('run'))


def generator(path, texts=(PROMPT,), said=None, mesh='', **latent):
  say = [].append if said is None else said.append
  with load.Checkpoint(path, say=say) as checkpoint:
    config = schema.view(checkpoint.config())
    own = dataclasses.replace(config.model.latent, **latent)
    model = dataclasses.replace(config.model, latent=own)
    config = dataclasses.replace(config, model=model)
    return checkpoint.generator(config, mesh, 1, texts)


def continued(*given, **latent):
  """(tokens, log probabilities) of a greedy continuation."""
  (found,) = generator(*given, **latent).generate([PROMPT])
  return found['tokens'], np.array(found['logprobs'])


@pytest.fixture(scope='module')
def exact(workdir):
  return continued(workdir)


def test_another_basis_is_the_same_model(workdir, exact):
  made = generator(workdir, rotation='pca', groups=2)
  (found,) = made.generate([PROMPT])
  assert found['tokens'] == exact[0]
  np.testing.assert_allclose(found['logprobs'], exact[1], atol=1e-5)
  scale = made._params['layers/1/latent_attention/latent_norm']
  np.testing.assert_array_equal(scale, np.ones(8))  # it was rotated
  assert 'layers/1/latent_attention/shares' not in made._params


def test_shards_with_scores_of_their_own_are_another_model(workdir, exact):
  """After the prompt, which they do not change; on a mesh as on one device."""
  found = {
    rotation: continued(workdir, rotation=rotation, **OWN)[1]
    for rotation in ('none', 'pca')
  }
  for logprobs in found.values():
    np.testing.assert_allclose(logprobs[0], exact[1][0], atol=1e-5)
    assert abs(logprobs[1] - exact[1][1]) > 1e-4
  mesh = 'data=4,tensor=2'
  on_mesh = continued(workdir, mesh=mesh, rotation='pca', **OWN)[1]
  np.testing.assert_allclose(on_mesh, found['pca'], atol=1e-5)


def test_drafts_of_a_long_lane_are_judged_by_that_model(workdir):
  """Eight drafts and the last token are more than attend one by one."""
  own = OWN | dict(rotation='pca')
  one = generator(workdir, **own)
  (want,) = one.generate([PROMPT])
  for made in (one, generator(workdir, mesh='data=4,tensor=2', **own)):
    (found,) = made.generate([PROMPT], method='jacobi', drafts=8)
    assert found['tokens'] == want['tokens']
    np.testing.assert_allclose(found['logprobs'], want['logprobs'], atol=1e-5)


def test_shares_are_measured_on_text(workdir):
  said = []
  texts = [PROMPT, 'The quick brown fox']
  made = generator(workdir, texts, said, rotation='pca', **OWN)
  share = np.asarray(made._params['layers/1/latent_attention/shares'])
  assert share[0] > 0.6 and abs(share.sum() - 1) < 1e-6
  assert said[-1] == 'latents are measured on 40 tokens of 40 of text'
  made = generator(workdir, rotation='hadamard', **OWN)
  share = made._params['layers/1/latent_attention/shares']
  np.testing.assert_allclose(share, 0.5)


def test_a_run_that_was_trained_with_latent_shards(workdir, tmp_path):
  """Its checkpoint holds shares; whole latents have none."""
  path = save(tmp_path, **OWN)
  found, want = generator(path, groups=1)._params, generator(workdir)._params
  assert set(found) == set(want)
  for name, value in want.items():
    np.testing.assert_array_equal(found[name], value)
  name = 'layers/1/latent_attention/shares'
  np.testing.assert_array_equal(
    generator(path, groups=4)._params[name], [0.25] * 4
  )


def test_the_command_asks_for_it(workdir, tmp_path, capsys, exact):
  text = tmp_path / 'text.txt'
  text.write_text('It was the best of times.', 'utf-8')

  def run(*flags):
    own = ('groups=2', 'scores=own', 'rotation=pca')
    argv = [f'--checkpoint={workdir}', '--json', f'--prompt={PROMPT}']
    argv += [f'--config.model.latent.{x}' for x in own]
    code = command_line.run(command.main, [*argv, *flags])
    out, err = capsys.readouterr()
    return code, out, err

  code, out, err = run(f'--calibration_file={text}', '--max_new_tokens=1')
  assert code == 0 and 'measured on 26 tokens of 26' in err
  assert json.loads(out)['samples'][0]['tokens'] == exact[0][:1]
  text.write_text('It was', 'utf-8')
  code, out, err = run(f'--calibration_file={text}')
  assert (code, out) == (2, '')
  assert '7 tokens of text' in err and 'covariance of 8 numbers' in err
  code, out, err = run('--calibration_file=none.txt')
  assert (code, out) == (2, '') and '--calibration_file=none.txt' in err
  code, out, err = run('--config.model.latent.groups=3')
  assert (code, out) == (2, '') and 'rank=8 is not divisible' in err


def test_more_text_than_is_read_is_reported(monkeypatch):
  monkeypatch.setattr(latents, 'MOST', 16)
  said = []
  rows = latents._rows([range(20), range(30)], 8, 4, said.append)
  assert list(map(len, rows)) == [8, 8]
  assert said == ['latents are measured on 16 tokens of 50 of text']
  with pytest.raises(errors.UserError, match='0 tokens .* of 4 numbers'):
    latents._rows([], 8, 4, said.append)
