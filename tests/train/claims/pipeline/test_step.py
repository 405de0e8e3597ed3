"""Claims about the compiled step on stages hold, and fail on wrong numbers."""

import types

import claim_cases
import pytest

from paraxis.configs.base import errors
from paraxis.sharding.meter import aot
from paraxis.train.certify import target_compile
from paraxis.train.claims.pipeline import step as claims_pipeline_step

small = claim_cases.small


def test_temporaries():
  given = dict(mesh='stage=2', rows=2, microbatches=[4, 8, 12])
  check = lambda **grows: claims_pipeline_step.temporaries(
    small('gpipe'), grows=grows, **given
  )
  assert check(gpipe=True, one_f_one_b=False).passed
  assert not check(gpipe=False).passed
  assert not check(one_f_one_b=True).passed
  ratio = lambda at_most: claims_pipeline_step.rematerialised(
    small('gpipe'), mesh='stage=2', rows=2, microbatches=12, schedule='gpipe',
    at_most=at_most,
  )  # fmt: skip
  found = float(ratio(0.5).measured)
  assert found < 0.5 and ratio(0.5).passed
  assert not ratio(found / 2).passed


def test_messages(monkeypatch):
  check = lambda times: claims_pipeline_step.messages(
    small('megatron', num_layers=4), mesh='stage=2,tensor=2', rows=2,
    microbatches=2, chunks=[1, 2], times=times,
  )  # fmt: skip
  right = check([1, 2])
  # 2 (m v + p v + p - 2) messages of 2 rows, 16 / 2 tokens, 32 numbers.
  assert right.passed and 'v=1 8, 4 of' in right.caveat
  assert 'v=2 16,' in right.caveat and '2,048 bytes' in right.caveat
  assert not check([1, 3]).passed
  monkeypatch.setattr(claims_pipeline_step, '_input_bytes', lambda config: 4096)
  wrong = check([1, 2])  # as without tensor shards
  assert not wrong.passed and wrong.measured == right.measured


def test_compiled_fits(monkeypatch):
  def report(config, mesh, topology):
    assert (mesh, topology) == ('stage=2', 'v5p:2x2x1')
    if config.mesh.zero > 1:
      kind = aot.TooLargeError if config.mesh.zero == 2 else errors.UserError
      raise kind('99 GiB of 95')
    return types.SimpleNamespace(
      fits=config.mesh.zero == 1,
      worst='gradient',
      peak=lambda name: 3 * 2**30,
      classes=lambda name: dict(parameters=2**30),
      topology=types.SimpleNamespace(hbm=95 * 2**30),
      programs={},
    )

  monkeypatch.setattr(target_compile, 'compile_config', report)
  check = lambda **fits: claims_pipeline_step.compiled_fits(
    small('gpipe'), mesh='stage=2', topology='v5p:2x2x1', fits=fits,
    cases={name: {'mesh.zero': int(name[-1])} for name in fits},
  )  # fmt: skip
  right = check(ZeRO1=True, ZeRO0=False)
  assert right.passed and 'ZeRO1: 3.0 GiB of 95' in right.caveat
  assert not check(ZeRO0=True).passed
  wrong = check(ZeRO1=True, ZeRO2=True)
  assert not wrong.passed and wrong.measured == 'ZeRO1 yes, ZeRO2 no'
  assert check(ZeRO2=False).passed and '99 GiB of 95' in wrong.caveat
  with pytest.raises(errors.UserError):  # nothing is known of its size
    check(ZeRO3=False)
