"""What a rank imports in any case, in one import, by the parent before ranks are forked.

torch takes a second of a core, and half of it again when the first optimizer imports the compiler.
"""

# ruff: noqa: F401

import encodings.idna  # of socket.getaddrinfo

import hydra.utils
import numpy.random
import tensorboard.plugins.hparams.metadata
import torch.optim
import torch.utils.tensorboard
import tqdm.contrib.logging
from torch.utils.serialization import config  # of torch.save

import lockstep.build
import lockstep.loggers.console
import lockstep.loggers.tensorboard
import lockstep.strategies.ddp
import lockstep.training.loop

torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch imports its compiler with the first optimizer
