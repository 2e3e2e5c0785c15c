"""The other strategies under measurement. A file of its own: a start of DDP that is timed must not import them."""

from measured import MeasuredSteps

from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.model_parallel import ModelParallel
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.virtual_ranks import VirtualRanks


class MeasuredFSDP(MeasuredSteps, FSDP):
    pass


class MeasuredModelParallel(MeasuredSteps, ModelParallel):
    pass


class MeasuredPipeline(MeasuredSteps, Pipeline):
    pass


class MeasuredVirtualRanks(MeasuredSteps, VirtualRanks):
    pass
