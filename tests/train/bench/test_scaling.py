"""Exponents: how they are computed, judged and drawn; never their values."""

import pytest

from paraxis.train.bench import measure
from paraxis.train.bench import scaling

SILENT = lambda _: None


def test_an_exponent_is_a_slope_of_logarithms():
  sizes = 1, 2, 8
  assert scaling.exponent(sizes, [3 * n**1.5 for n in sizes]) == (
    pytest.approx(1.5)
  )
  assert scaling.exponent(sizes, [5, 5, 5]) == pytest.approx(0)
  # Not all on a line: numpy.polyfit of the logarithms gives the same.
  assert scaling.exponent((1, 2, 4), (1, 4, 8)) == pytest.approx(1.5)
  assert scaling.exponent(sizes, [0, 0, 0], floor=0.1) == pytest.approx(0)


@pytest.mark.parametrize(
  'costs, verdict',
  [
    ({1: [1.0, 1.0], 4: [4.0, 4.2]}, 'met'),
    ({1: [1.0, 1.0], 4: [4.0, 5.0]}, 'within noise'),
    ({1: [1.0, 1.0], 4: [6.0, 5.0]}, 'above'),
  ],
)
def test_more_than_the_ideal_is_above(costs, verdict):
  report = measure.BenchReport('scaling', '', measure.CPU)
  report.add({f'length {n}: scan': v for n, v in costs.items()})
  report.add({f'depth {n}: scan': [n**3] * 2 for n in costs})
  report.add({f'length {n}: scan of others': [n**3] * 2 for n in costs})
  scaling._judge(report, 'length', 'scan', 1)
  (check,) = report.checks
  assert check.what == 'length: scan, exponent; ideal 1'
  assert check.verdict == verdict
  assert measure.from_json(measure.to_json([report])) == [report]


def test_scaling_bench(tmp_path):
  path = tmp_path / 'kept.json'
  with measure.session(path=path):
    report = scaling.scaling(1, True, SILENT)
  assert report.parts == list(scaling.SIZES)
  curves = [c for of_axis in scaling.CURVES.values() for c in of_axis]
  assert len(report.checks) == 2 * len(curves) + 1
  assert {c.missed for c in report.checks} == {'above'}
  for axis, sizes in scaling.QUICK.items():
    for curve in scaling.CURVES[axis]:
      for size in sizes:
        assert report.rows[f'{axis} {size}: {curve.name}'][1] > [0]
  picture = (tmp_path / 'kept.png').read_bytes()
  assert picture.startswith(b'\x89PNG') and 'kept.png' in report.notes[-1]
