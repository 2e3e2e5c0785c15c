"""mode=sample: text that a trained language model writes."""

import logging

import torch

from lockstep.config.schema import Count, NotNegative, Seed
from lockstep.data.text import Tokenizer
from lockstep.modes.base import Mode, TrainedRun

log = logging.getLogger(__name__)

LEAST = 1e-30  # a temperature of 0: the likeliest token alone is left


class Sample(Mode):
    """Prints a text, and the tokens that the model writes after it.

    prompt: the text goes on from here.
    length: tokens to write.
    temperature: below 1 likely tokens are drawn more often; 0: always the likeliest.
    top_k: draw from the k likeliest tokens only; null: from all.
    seed: seed of what is drawn.
    """

    name, in_one_process = "sample", True

    def __init__(
        self, snapshot: str, prompt: str, length: Count, temperature: NotNegative, top_k: Count | None, seed: Seed
    ) -> None:
        self.snapshot, self.prompt, self.length = snapshot, prompt, length
        self.temperature, self.top_k, self.seed = temperature, top_k, seed

    def run(self, trained: TrainedRun) -> None:
        """Raises ConfigError for symbols that the text of the training did not have."""
        dataset = trained.run.loaders.train.reader.dataset
        run, device = trained.run, trained.world.device
        coder = Tokenizer(dataset.tokenizer, dataset.classes)
        tokens = torch.tensor([int(token) for token in coder.encode(self.prompt)], device=device)
        generator = torch.Generator(device).manual_seed(self.seed)
        with run.averaged_weights(), torch.no_grad(), run.strategy.autocast:
            model = run.model.eval()
            for _ in range(self.length):
                logits = model(tokens[None, -dataset.block :])[0, -1].float()
                if self.top_k is not None:
                    least = logits.topk(min(self.top_k, len(logits))).values[-1]
                    logits = logits.masked_fill(logits < least, -torch.inf)
                scores = (logits - logits.max()) / max(self.temperature, LEAST)
                tokens = torch.cat([tokens, torch.multinomial(scores.softmax(0), 1, generator=generator)])
        print(coder.decode(tokens.tolist()))
        log.info("sampled: %d tokens at step %d", self.length, trained.step)
