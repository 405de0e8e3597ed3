"""What the tests against `transformers` share; without it they are skipped.

Import this file first: it skips the importing file where a peer is missing.
"""

import pytest

torch = pytest.importorskip('torch', reason='the peer needs torch')
transformers = pytest.importorskip(
  'transformers', reason='the peer needs transformers'
)


class Wide(torch.overrides.TorchFunctionMode):
  """Within it torch's float32 means float64.

  HF computes norms, angles, decays, routers and soft-max in float32 in models
  of any dtype.
  """

  def __torch_function__(self, function, types, args=(), kwargs=None):
    swap = lambda x: torch.float64 if x is torch.float32 else x
    if function is torch.Tensor.float:
      function = torch.Tensor.double
    args = tuple(map(swap, args))
    kwargs = {k: swap(v) for k, v in (kwargs or {}).items()}
    return function(*args, **kwargs)
