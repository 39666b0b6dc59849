"""Real data, the same samples in the same order for every strategy and device count."""

from meshwise.zoo.data.order import StepIndices, epoch_order, num_steps_per_epoch, step_indices
from meshwise.zoo.data.samples import Data, Samples
from meshwise.zoo.data.sources import SOURCES, load

__all__ = ["SOURCES", "Data", "Samples", "StepIndices", "epoch_order", "load", "num_steps_per_epoch", "step_indices"]
