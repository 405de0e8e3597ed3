"""Models of `transformers` in float64; importing this skips without torch.

Legend: B rows, T tokens, V vocabulary.
"""

import contextlib

import peers
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


@contextlib.contextmanager
def float64():
  """Within it models of torch are made, and compute, in float64."""
  before = torch.get_default_dtype()
  torch.set_default_dtype(torch.float64)
  try:
    with Wide():
      yield
  finally:
    torch.set_default_dtype(before)


def randomised(make, spread, called=str):
  """The model that `make` gives, in float64, its weights as peers.weight.

  Scales and biases too, or they hide mistakes. called: name of a parameter ->
  the name that its weight follows from.
  """
  with float64(), torch.no_grad():
    model = make().double().eval()
    for name, p in model.named_parameters():
      p.copy_(torch.tensor(peers.weight(called(name), p.shape, spread)))
  return model


def logits_of(model, data, **options):
  """HF's z_BTV, a tensor. options: of its call."""
  with float64():
    tokens = torch.tensor(data.tokens).long()
    return model(input_ids=tokens, use_cache=False, **options).logits


def weights_of(model):
  """{name: array} of HF's model."""
  return {k: v.detach().numpy() for k, v in model.named_parameters()}


def gradients_of(model, data, **options):
  """(z_BTV, {name: weight}, {name: gradient of the loss}) of HF's model.

  What gets no gradient, as a bias of choices, has none. options: of its call.
  """
  logits = logits_of(model, data, **options)
  with float64():
    torch.nn.functional.cross_entropy(
      logits.flatten(0, 1), torch.tensor(data.targets).long().flatten()
    ).backward()
  grads = {
    k: v.grad.numpy() for k, v in model.named_parameters() if v.grad is not None
  }
  return logits.detach().numpy(), weights_of(model), grads
