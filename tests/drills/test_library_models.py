"""Small nets of torchvision, timm and transformers, as they are: three steps are those of plain torch on any number of
ranks.

Each is trained as its options say, with all that it draws, on 1 and 2 ranks, and without any dropout on 2 ranks, which
is compared with plain torch. One world of ranks trains all nets of a library: the imports take longer than the steps.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from lockstep.config.check import instantiate
from support.commands import ROOT
from support.configs import composed
from support.reference import train_reference
from support.worlds import in_world, train_all

SAMPLES, TESTS, BATCH, CLASSES, TOKENS, LENGTH = 18, 4, 6, 5, 40, 12
SHAPE, NEXT = (3, 64, 64), "next tokens"


class Net(NamedTuple):
    """node: of the config. quiet: what switches its dropout off. of: what it computes with, images, texts, or the next
    tokens of texts. tolerance: of some that compute in float32 inside."""

    node: dict
    quiet: dict
    of: str = "images"
    tolerance: float = 1e-9


def of_torchvision(name, **drop):
    node = {"_target_": "torchvision.models.get_model", "name": name, "weights": None, "num_classes": CLASSES}
    return Net(node | drop, dict.fromkeys(drop, 0.0))


def of_timm(name, drop=None, **options):
    """drop: what it draws, in place of stochastic depth and dropout before the head."""
    drop = {"drop_rate": 0.2, "drop_path_rate": 0.3} if drop is None else drop
    node = {"_target_": "timm.create_model", "model_name": name, "num_classes": CLASSES}
    return Net(node | options | drop, dict.fromkeys(drop, 0.0))


def of_transformers(name, config, of, quiet, tolerance=1e-9, **options):
    """quiet: names of the options that are probabilities; the net draws with 0.2."""
    sizes, drop = {"num_labels": CLASSES} if of != NEXT else {}, dict.fromkeys(quiet.split(), 0.2)
    node = {"_target_": f"transformers.{config}"} | sizes | options | drop
    made = {"_target_": "my_transformers.Logits", "net": {"_target_": f"transformers.{name}", "config": node}}
    return Net(made, {f"net.config.{key}": 0.0 for key in drop}, of, tolerance)


TRANSFORMER = {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2}
ALL = {"drop_rate": 0.2, "drop_path_rate": 0.3, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = {"vocab_size": TOKENS, "max_position_embeddings": 32, "pad_token_id": 0}
HIDDEN = "hidden_dropout_prob attention_probs_dropout_prob"
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": TOKENS}
OPT = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 16}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": TOKENS, "pad_token_id": 0}
T5 |= {"eos_token_id": 2, "decoder_start_token_id": 0}
SWIN = {"image_size": 64, "window_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 2]}
OF_OPT = "dropout attention_dropout layerdrop"
LLAMA = SMALL | WORDS | {"num_key_value_heads": 1}
NETS = {
    "torchvision": [
        of_torchvision("squeezenet1_1", dropout=0.5),
        of_torchvision("mnasnet0_5", dropout=0.2),
        of_torchvision("mobilenet_v3_small", dropout=0.2),
        of_torchvision("regnet_y_400mf"),
        of_torchvision("densenet121", drop_rate=0.2),
    ],
    "timm": [
        of_timm("test_resnet"),
        of_timm("test_efficientnet"),
        of_timm("test_byobnet"),
        of_timm("test_maxvit", img_size=64),
        of_timm("test_vit", ALL | {"patch_drop_rate": 0.25}, img_size=64),
        of_timm("deit_tiny_distilled_patch16_224", ALL, **TRANSFORMER),
        of_timm("cait_xxs24_224", ALL, **TRANSFORMER),
        of_timm("gmlp_ti16_224", {"drop_path_rate": 0.3}, img_size=64),
        of_timm("levit_128s", img_size=64),
    ],
    "transformers": [
        of_transformers("BertForSequenceClassification", "BertConfig", "texts", HIDDEN, **SMALL, **WORDS),
        of_transformers("GPT2LMHeadModel", "GPT2Config", NEXT, "resid_pdrop embd_pdrop attn_pdrop", **GPT2),
        of_transformers("LlamaForCausalLM", "LlamaConfig", NEXT, "attention_dropout", 1e-5, **LLAMA),
        of_transformers("OPTForCausalLM", "OPTConfig", NEXT, OF_OPT, **OPT, **WORDS),
        of_transformers("T5ForSequenceClassification", "T5Config", "texts", "dropout_rate classifier_dropout", **T5),
        of_transformers("SwinForImageClassification", "SwinConfig", "images", f"{HIDDEN} drop_path_rate", **SWIN),
    ],
}


class Samples(torch.utils.data.Dataset):
    def __init__(self, samples, of):
        generator = torch.Generator().manual_seed(samples)
        self.of, self.images = of, torch.rand(samples, *SHAPE, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(3, TOKENS, (samples, LENGTH + 1), generator=generator)
        if of == "texts":
            self.tokens[:, LENGTH - 1] = 2  # the end of a text

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index, :LENGTH]
        target = self.tokens[index, 1:] if self.of == NEXT else index % CLASSES
        if self.of == "images":
            return self.images[index], target
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, target


def node_of(net, more):
    """The net's node with other values at the keys of `more`, which may lie deeper."""
    changed = OmegaConf.create(net.node)
    for key, value in more.items():
        OmegaConf.update(changed, key, value)
    return OmegaConf.to_container(changed)


def config(net, folder, more):
    """Of a run that trains the net for three steps. more: keys of the model."""
    task, classes = ("language_modelling", TOKENS) if net.of == NEXT else ("classification", CLASSES)
    words = [f"run_dir={folder}", f"task={task}", "model=linear", "logger=[]", "trainer.precision=fp64"]
    words += [f"trainer.batch_size={BATCH}", "trainer.epochs=1", "optimizer.lr=0.01", "scheduler=constant"]
    data = {"_target_": f"{__name__}.Samples", "of": net.of}
    pair = {"_target_": "lockstep.data.Pair", "train": data | {"samples": SAMPLES}, "test": data | {"samples": TESTS}}
    changes = {"dataset": pair | {"shape": [*SHAPE], "classes": classes}, "model": node_of(net, more)}
    return composed(*words, "strategy.find_unused_parameters=true").changed(changes)


def plain(net):
    torch.manual_seed(0)
    model = instantiate(node_of(net, net.quiet)).double().train()
    inputs, targets = torch.utils.data.default_collate([*map(Samples(SAMPLES, net.of).__getitem__, range(SAMPLES))])

    def loss(outputs, targets):
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    samples = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]  # without a mask none is masked
    sgd = partial(SGD, lr=0.01, momentum=0.9)
    train_reference(model, (samples, targets), loss, sgd, epochs=1, batch_size=BATCH)
    return dict(model.state_dict())


def apart(one, other):
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    floating = {name: value for name, value in one.items() if value.is_floating_point() and value.numel()}
    scales = {name: value.abs().max().clamp(min=1) for name, value in floating.items()}
    return max((float(((value - other[name]) / scales[name]).abs().max()), name) for name, value in floating.items())


@pytest.mark.drill
@pytest.mark.timeout(0)
@pytest.mark.parametrize("library", NETS)
def test_three_steps_are_those_of_plain_torch_on_any_number_of_ranks(tmp_path, monkeypatch, library):
    pytest.importorskip(library)
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    torch.set_num_threads(1)
    one, two, quiet = (
        [config(net, tmp_path / f"{n}-{of}", net.quiet if of == "quiet" else {}) for n, net in enumerate(NETS[library])]
        for of in ("one", "two", "quiet")
    )
    in_world(1, train_all, one, limit=600)
    in_world(2, train_all, [*two, *quiet], limit=600)
    wrong = []
    for net, *configs in zip(NETS[library], one, two, quiet, strict=True):
        found = [torch.load(Path(run.run_dir) / "model.pt", weights_only=True) for run in configs]
        for what, pair in {"1 and 2 ranks": found[:2], "plain torch and 2 ranks": (plain(net), found[2])}.items():
            distance, where = apart(*pair)
            if not distance <= net.tolerance:
                wrong.append(f"{net.node}: {what} are {distance:.1e} apart in {where}")
    assert not wrong, "\n".join(wrong)
