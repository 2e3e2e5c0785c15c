"""A net of transformers, as an option such as conf/model/gpt2.yaml:

_target_: my_transformers.Logits
net:
  _target_: transformers.GPT2LMHeadModel
  config: {_target_: transformers.GPT2Config, vocab_size: "${dataset.classes}", n_layer: 4, n_head: 4, n_embd: 128}
"""

from torch import Tensor, nn


class Logits(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor | dict[str, Tensor]) -> Tensor:
        found = self.net(**inputs) if isinstance(inputs, dict) else self.net(inputs)
        return found.logits
