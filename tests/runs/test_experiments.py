"""The experiments of docs/experiments.md and docs/examples against plain torch in float64.

The first steps on one rank, and after a stop the others on two. What is drawn is taken from the project's own
generators, whose draws other tests compare; all else is plain torch.
"""

import copy
import importlib
import json
import math
import re
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.data.loader import Batch, LoadedPart, Progress
from lockstep.data.partition import generator, seeded
from lockstep.models.tutorial import mlp
from lockstep.training.rng import Draws
from support.commands import PYTHON_TRAIN, ROOT
from support.digits import FEW, digits
from support.event_files import read, scalars
from support.pages import copy_examples, example_files
from support.reference import parameter_vector, saved_parameters
from support.refusals import accepted
from support.worlds import in_world, train_all

PAGE = (ROOT / "docs" / "experiments.md").read_text()
EXAMPLES = ROOT / "docs" / "examples"
EPOCHS, BATCH, EVALUATED, LR = 2, 110, 128, 0.05
SMALL = {"width": 16, "depth": 1, "dropout": 0.0}
JOB = [FEW, "loader.validation=null", "trainer.precision=fp64", f"trainer.epochs={EPOCHS}", "scheduler=constant"]
JOB += [f"trainer.batch_size={BATCH}", "optimizer.momentum=0", "logger=[]", "snapshot.every=1steps"]
MLP = ["model=mlp", *[f"model.{key}={value}" for key, value in SMALL.items()]]
WITHOUT_OFFSET = ["dataset.mean=null", "dataset.std=null"]


def small_mlp():
    return mlp([1, 8, 8], 10, **SMALL)


def images(normalised=True):
    """The 360 test digits, on which these runs train and are tested."""
    data = digits(False)
    values = data.inputs.double() / 255
    return (values - 0.287) / 0.353 if normalised else values, data.targets.long()


@contextmanager
def drawing(place, rows):
    """Inside the block noise is that of a step of one process. place: (epoch, step)."""
    draws = Draws(0, torch.device("cpu"), True, Progress(step=place[1]))
    with draws.of_part(LoadedPart(0, 0, None, None, torch.arange(rows)), Batch(0, rows, [])):
        yield


def batches(inputs, targets):
    step = 0
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(inputs), generator=generator(0, epoch)).split(BATCH):
            yield (epoch, step), inputs[batch], targets[batch]
            step += 1


def built(make):
    with seeded(0):
        return make().double()


def trained(model, loss, normalised=True):
    """Plain training, and the loss of the test. loss: (place, inputs, targets, whether in training) -> (N,)."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
    for place, x, y in batches(*images(normalised)):
        optimizer.zero_grad()
        with drawing(place, len(x)):
            loss(place, x, y, True).mean().backward()
        optimizer.step()
        if hasattr(model, "teacher"):
            for average, weight in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                average.data = 0.99 * average.data + 0.01 * weight.data
    return model, loss_of_test(loss, normalised)


def loss_of_test(loss, normalised=True):
    cut = zip(*(values.split(EVALUATED) for values in images(normalised)), strict=True)
    return float(torch.cat([loss((EPOCHS, 0), x, y, False).detach() for x, y in cut]).mean())


def cross_entropy(logits, targets):
    return -logits.log_softmax(1)[torch.arange(len(targets)), targets]


def simclr(_):
    model = built(small_mlp)

    def loss(place, x, y, training):
        views = [x, x.roll(1, -1)]
        if training:
            views = [(view + 0.1 * torch.randn_like(view)) * torch.rand_like(view[:, :1, :1, :1]) for view in views]
        z = torch.cat([F.normalize(model(view), dim=1) for view in views])
        n, alike = len(x), (z @ z.T / 0.5).exp()
        total = alike.sum(1) - alike.diagonal()
        losses = -(torch.cat([alike.diagonal(n), alike.diagonal(-n)]) / total).log()
        return (losses[:n] + losses[n:]) / 2

    return trained(model, loss)


def distillation(folder):
    model, teacher = built(small_mlp), built(small_mlp)
    teacher.load_state_dict(torch.load(folder / "mywork" / "teacher.pt", weights_only=True))

    def loss(place, x, y, training):
        logits, wanted = model(x), (teacher(x) / 2).softmax(1).detach()
        soft = (wanted * (wanted.log() - (logits / 2).log_softmax(1))).sum(1)
        return 0.5 * cross_entropy(logits, y) + 0.5 * 4 * soft

    return trained(model, loss)


def mean_teacher(_):
    model = nn.Module()
    model.student = built(small_mlp)
    model.teacher = copy.deepcopy(model.student).requires_grad_(False)

    def loss(place, x, y, training):
        noisy = x + 0.1 * torch.randn_like(x) if training else x
        logits, weight = model.student(noisy), 10 * min(1, place[0] / 2)
        apart = (logits.softmax(1) - model.teacher(x).softmax(1)) ** 2
        return cross_entropy(logits, y) + weight * apart.mean(1)

    return trained(model, loss)


def sam(_):
    model = built(small_mlp)
    weights = [*model.parameters()]
    for _place, x, y in batches(*images()):
        before = [weight.detach().clone() for weight in weights]
        slopes = torch.autograd.grad(cross_entropy(model(x), y).mean(), weights)
        norm = math.sqrt(sum(float((slope**2).sum()) for slope in slopes)) + 1e-12
        for weight, slope in zip(weights, slopes, strict=True):
            weight.data += 0.05 * slope / norm
        slopes = torch.autograd.grad(cross_entropy(model(x), y).mean(), weights)
        for weight, slope, old in zip(weights, slopes, before, strict=True):
            weight.data = old - LR * slope
    return model, loss_of_test(lambda place, x, y, training: cross_entropy(model(x), y))


def penalty(_):
    model = built(small_mlp)

    def loss(place, x, y, training):
        x = x.detach().requires_grad_()
        logits = model(x)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return cross_entropy(logits, y) + 0.05 * (slope**2).sum((1, 2, 3))

    return trained(model, loss)


def gan(_):
    model = built(lambda: importlib.import_module("my_work.gan").GAN(16, 64, 64))
    of_critic = torch.optim.Adam(model.critic.parameters(), 0.001, (0.5, 0.999))
    of_generator = torch.optim.SGD(model.generator.parameters(), LR)

    def critic_loss(x, noise):
        real, fake = model.critic(x), model.critic(model.generator(noise).detach())
        return (-F.logsigmoid(real) - F.logsigmoid(-fake))[:, 0]

    for place, x, _y in batches(*images(False)):
        with drawing(place, len(x)):
            noise = torch.zeros(len(x), 16).double().normal_()
        model.zero_grad()
        critic_loss(x, noise).mean().backward()
        of_critic.step()
        model.zero_grad()
        (-F.logsigmoid(model.critic(model.generator(noise)))).mean().backward()
        of_generator.step()
    return model, loss_of_test(lambda place, x, y, training: critic_loss(x, torch.zeros(len(x), 16).double()), False)


def vae(_):
    model = built(lambda: importlib.import_module("my_tasks").VAE(64, 64, 8))

    def loss(place, x, y, training):
        mean, log_variance = model.encoder(x).chunk(2, 1)
        drawn = mean + (log_variance / 2).exp() * torch.randn_like(mean) if training else mean
        p, x = model.decoder(drawn).sigmoid(), x.flatten(1)
        share = min(1, (place[1] + 1) / 4) if training else 1
        kl = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return -(x * p.log() + (1 - x) * (1 - p).log()).sum(1) + share * kl

    return trained(model, loss, False)


def trades(_):
    model = built(small_mlp)

    def apart(wanted, logits):
        return (wanted.softmax(1) * (wanted.log_softmax(1) - logits.log_softmax(1))).sum(1)

    def loss(place, x, y, training):
        logits, moved = model(x), x + 0.01 * (x - x.roll(1, -1))
        for _step in range(3):
            moved = moved.detach().requires_grad_()
            (slope,) = torch.autograd.grad(apart(logits.detach(), model(moved)).sum(), moved)
            moved = (moved + 0.1 / 3 * slope.sign()).clamp(x - 0.1, x + 0.1)
        return cross_entropy(logits, y) + 3 * apart(logits, model(moved.detach()))

    return trained(model, loss)


STUDENT = "{_target_: lockstep.models.tutorial.mlp, shape: [1, 8, 8], classes: 10, width: 16, depth: 1, dropout: 0.0}"
MEAN_TEACHER = ["task._target_=my_mean_teacher.Consistency", "+task.noise=0.1", "+task.weight=10"]
MEAN_TEACHER += ["+task.rampup_epochs=2"]
MEAN_TEACHER += ["model._target_=my_mean_teacher.StudentAndTeacher", f"+model.student={STUDENT}"]
MEAN_TEACHER += ["step._target_=my_mean_teacher.AveragingStep", "+step.decay=0.99"]
VAE = ["model._target_=my_tasks.VAE", "+model.pixels=64", "+model.width=64", "+model.latent=8"]
TRADES = ["task._target_=my_tasks.Trades", "+task.radius=0.1", "+task.steps=3", "+task.weight=3.0"]
TEACHER = [f"task.teacher.{key}={value}" for key, value in SMALL.items()]
EXPERIMENTS = {  # what computes (the model, the loss of its test) by plain torch, and the words
    "simclr": (simclr, ["task=simclr", *MLP]),
    "distillation": (distillation, ["task=distillation", "task.weights=teacher.pt", *MLP, *TEACHER]),
    "mean_teacher": (mean_teacher, MEAN_TEACHER),
    "sam": (sam, ["step=sam", *MLP]),
    "penalty": (penalty, ["task._target_=my_tasks.GradientPenalty", "+task.weight=0.1", *MLP]),
    "gan": (gan, ["task=gan", "model=gan", "step=gan", "strategy.find_unused_parameters=true", *WITHOUT_OFFSET]),
    "vae": (vae, ["task._target_=my_tasks.Annealed", "+task.steps=4", *VAE, *WITHOUT_OFFSET]),
    "trades": (trades, [*TRADES, *MLP]),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """With mywork/, which has the files of the page and the weights of a teacher."""
    folder = tmp_path_factory.mktemp("home")
    copy_examples(PAGE, folder)
    with seeded(1):
        torch.save(small_mlp().state_dict(), folder / "mywork" / "teacher.pt")
    sys.path[:0] = [str(folder / "mywork"), str(EXAMPLES)]
    yield folder
    del sys.path[:2]


@pytest.fixture(scope="module")
def runs(home):
    """The first steps of each of EXPERIMENTS on one rank, and the others on two."""
    mywork = home / "mywork"
    for ranks, steps in ((1, 3), (2, "null")):
        last, configs = ["launch=env", f"optimizer.lr={LR}", f"trainer.max_steps={steps}"], []
        for name, (_, words) in EXPERIMENTS.items():
            own = [word.replace("teacher.pt", f"{mywork}/teacher.pt") for word in words]
            searched = f"hydra.searchpath=[file://{mywork}/conf]"
            configs.append(accepted(searched, *JOB, *own, *last, f"run_dir={mywork / name}"))
        in_world(ranks, train_all, configs, limit=600)
    return mywork


@pytest.mark.timeout(900)  # of the first one, which trains them all
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_that_of_plain_torch_on_one_rank_and_after_a_stop_on_two(home, runs, name):
    model, loss = EXPERIMENTS[name][0](home)
    assert (saved_parameters(runs / name, model) - parameter_vector(model)).abs().max() < 1e-9
    found = json.loads((runs / name / "run.json").read_text())["test"]["metrics"]["loss"]
    assert found == pytest.approx(loss, rel=1e-9)


def test_callbacks_show_the_norm_of_each_gradient_and_a_picture(start, home):
    nodes = "callbacks=[{_target_: my_work.looks.GradientNorms}]"
    words = ["--config-dir=conf", *JOB, *MLP, nodes, "logger=tensorboard", "trainer.batch_size=36", "trainer.epochs=1"]
    start(*PYTHON_TRAIN, *words, "hydra.run.dir=looks", cwd=home / "mywork").finish()
    folder, model, (inputs, targets) = home / "mywork" / "looks", built(small_mlp), images()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for batch in torch.randperm(360, generator=generator(0, 0)).split(36):
        optimizer.zero_grad()
        cross_entropy(model(inputs[batch]), targets[batch]).mean().backward()
        optimizer.step()
    for name, weight in model.named_parameters():
        assert scalars(folder)[f"gradient/{name}"] == [(10, pytest.approx(float(weight.grad.norm()), rel=1e-5))]
    (picture,) = read(folder).Images("first_weights")
    assert (picture.step, picture.height, picture.width) == (10, 10, 64)


def test_the_page_counts_its_lines():
    written = dict(re.findall(r"^\| \[.*?\]\(#(\S+)\).* \| (\d+) \|$", PAGE, re.MULTILINE))
    files = [text for name, text in example_files(PAGE) if name.endswith(".py")]
    lines = [len([line for line in text.splitlines() if line.strip()]) for text in files]
    assert [int(number) for number in written.values()] == lines[: len(written)]
    assert max(lines) <= 45
