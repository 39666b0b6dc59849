"""What is computed: a training step as operators with tensors between them. Pure: no torch."""

from meshwise.graph.build import GraphBuilder
from meshwise.graph.graph import Graph, Repeat
from meshwise.graph.operator import Operator
from meshwise.graph.tensor import Tensor

__all__ = ["Graph", "GraphBuilder", "Operator", "Repeat", "Tensor"]
