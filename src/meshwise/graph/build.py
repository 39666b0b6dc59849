"""Building a graph operator by operator, with what PyTorch's autograd keeps for each.

The rules of saving follow PyTorch's own derivative formulas (tools/autograd/derivatives.yaml, torch 2.14): a linear
layer keeps its input, a ReLU its result, a GELU its input, a norm its input and statistics, a softmax its result, a
product of two activations both. ``capture`` does not use these rules but watches autograd; tests hold the two to each
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from meshwise.errors import GraphError
from meshwise.graph.graph import Graph, Repeat
from meshwise.graph.operator import Operator
from meshwise.graph.tensor import Tensor

DEVICES = ("cuda", "cpu")


class GraphBuilder:
    """Collects operators in the order they run; ``build`` gives the graph.

    Args:
        name: of the model.
        dtype: of parameters and activations.
        device: ``cuda`` or ``cpu``, where kernels keep different things: a dropout mask is one byte an element on CUDA,
            a number of the activation's dtype on CPU.
    """

    def __init__(
        self,
        name: str,
        *,
        batch_size: int,
        sequence_length: int = 0,
        image_size: int = 0,
        dtype: str = "float32",
        device: str = "cuda",
    ) -> None:
        self.name, self.dtype, self.device = name, dtype, device
        self.batch_size, self.sequence_length, self.image_size = batch_size, sequence_length, image_size
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.repeats: list[Repeat] = []
        self.notes: list[str] = []
        self.layers: list[tuple[str, ...]] = []
        self._count = 1

    # Tensors

    def input(self, name: str, shape: Sequence[int], dtype: str = "int64") -> Tensor:
        return self._tensor(name, shape, dtype, "input")

    def parameter(self, name: str, shape: Sequence[int], dtype: str = "") -> Tensor:
        """The parameter called ``name``; asked for again (tied weights) it is the same one.

        Raises:
            GraphError: it exists with another shape.
        """
        known = self.tensors.get(name)
        if known is None:
            return self._tensor(name, shape, dtype or self.dtype, "parameter")
        if known.shape != tuple(shape):
            raise GraphError(
                f"{name} is {list(known.shape)} and cannot be tied to {list(shape)}; tie equal shapes only"
            )
        return known

    def buffer(self, name: str, shape: Sequence[int], dtype: str = "") -> Tensor:
        return self._tensor(name, shape, dtype or self.dtype, "buffer")

    def activation(self, name: str, shape: Sequence[int], dtype: str = "") -> Tensor:
        return self._tensor(name, shape, dtype or self.dtype, "activation")

    def saved(self, name: str, shape: Sequence[int], dtype: str = "") -> Tensor:
        """Made by an operator for its own backward only."""
        return self._tensor(name, shape, dtype or self.dtype, "saved")

    def _tensor(self, name: str, shape: Sequence[int], dtype: str, role: str) -> Tensor:
        if name in self.tensors:
            raise GraphError(f"two tensors are called {name}; names are unique in a graph")
        tensor = Tensor(name=name, shape=tuple(shape), dtype=dtype, role=role, count=self._count)
        self.tensors[name] = tensor
        return tensor

    # Operators

    def add(
        self,
        kind: str,
        name: str,
        *,
        module: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attributes: Mapping[str, Any],
        parameters: Sequence[Tensor] = (),
        saved: Sequence[Tensor] = (),
        read_bytes: int | None = None,
        input_gradient: bool = True,
        weight_gradient: bool = True,
    ) -> Operator:
        """One operator. Bytes: forward reads inputs and parameters and writes outputs; backward reads the outputs'
        gradients, what was saved and the parameters, and writes the gradients of inputs and parameters."""
        made = sum(t.num_bytes for t in outputs)
        held = sum(t.num_bytes for t in parameters)
        fed = sum(t.num_bytes for t in inputs) if read_bytes is None else read_bytes - held
        kept = list(dict.fromkeys(saved))
        read_back = sum(t.num_bytes for t in kept if t.role not in ("parameter", "buffer"))
        operator = Operator(
            name=name,
            kind=kind,
            module=module,
            inputs=tuple(t.name for t in inputs),
            outputs=tuple(t.name for t in outputs),
            parameters=tuple(t.name for t in parameters),
            attributes=dict(attributes),
            read_bytes=fed + held,
            written_bytes=made,
            backward_read_bytes=made + read_back + (held if input_gradient else 0),
            backward_written_bytes=(fed if input_gradient else 0) + (held if weight_gradient else 0),
            saved=tuple(t.name for t in kept),
            input_gradient=input_gradient,
            weight_gradient=weight_gradient and bool(parameters),
            count=self._count,
        )
        self.operators.append(operator)
        return operator

    def linear(
        self,
        x: Tensor,
        module: str,
        out_features: int,
        *,
        bias: bool = True,
        weight: Tensor | None = None,
        name: str = "",
    ) -> Tensor:
        """x [.., in] → [.., out]; keeps its input. ``weight``: a parameter to share ([out, in])."""
        in_features, rows = x.shape[-1], prod(x.shape[:-1])
        weight = weight or self.parameter(f"{module}.weight", (out_features, in_features))
        parameters = [weight, *([self.parameter(f"{module}.bias", (out_features,))] if bias else [])]
        y = self.activation(f"{name or module}.out", (*x.shape[:-1], out_features))
        self.add(
            "linear",
            name or module,
            module=module,
            inputs=[x],
            outputs=[y],
            parameters=parameters,
            attributes={"rows": rows, "in_features": in_features, "out_features": out_features},
            saved=[x, weight],
        )
        return y

    def embedding(self, ids: Tensor, module: str, num_embeddings: int, features: int) -> Tensor:
        """ids [..] → [.., features]; keeps the ids; reads only the rows it needs."""
        weight = self.parameter(f"{module}.weight", (num_embeddings, features))
        y = self.activation(f"{module}.out", (*ids.shape, features))
        self.add(
            "embedding",
            module,
            module=module,
            inputs=[ids],
            outputs=[y],
            parameters=[weight],
            attributes={"rows": ids.num_elements, "features": features},
            saved=[ids],
            read_bytes=ids.num_bytes + y.num_bytes,
            input_gradient=False,
        )
        return y

    def layer_norm(self, x: Tensor, module: str, *, bias: bool = True, affine: bool = True) -> Tensor:
        """Keeps its input, and mean and 1/deviation of each row."""
        rows, features = prod(x.shape[:-1]), x.shape[-1]
        names = [f"{module}.weight", *([f"{module}.bias"] if bias else [])] if affine else []
        parameters = [self.parameter(name, (features,)) for name in names]
        statistics = self.saved(f"{module}.statistics", (2, rows), "float32")
        y = self.activation(f"{module}.out", x.shape)
        self.add(
            "layer_norm",
            module,
            module=module,
            inputs=[x],
            outputs=[y],
            parameters=parameters,
            attributes={"rows": rows, "features": features},
            saved=[x, statistics, *parameters[:1]],
        )
        return y

    def elementwise(
        self,
        name: str,
        *,
        module: str,
        inputs: Sequence[Tensor],
        saved: Sequence[Tensor] = (),
        operations: int = 1,
        gradients: int = 1,
        shape: Sequence[int] | None = None,
        save_output: bool = False,
    ) -> Tensor:
        """A chain of element-by-element operations on the first input's shape (or ``shape``)."""
        y = self.activation(f"{name}.out", shape or inputs[0].shape, inputs[0].dtype)
        self.add(
            "elementwise",
            name,
            module=module,
            inputs=inputs,
            outputs=[y],
            attributes={"elements": y.num_elements, "operations": operations, "gradients": gradients},
            saved=[*saved, *([y] if save_output else [])],
        )
        return y

    def residual(self, x: Tensor, branch: Tensor, name: str, *, module: str) -> Tensor:
        """x + branch; keeps nothing, its gradient is passed on."""
        return self.elementwise(name, module=module, inputs=[x, branch], gradients=0)

    def multiply(self, a: Tensor, b: Tensor, name: str, *, module: str) -> Tensor:
        """a · b of two activations; keeps both."""
        return self.elementwise(name, module=module, inputs=[a, b], saved=[a, b], gradients=2)

    def activate(self, x: Tensor, module: str, function: str) -> Tensor:
        """One fused activation: ReLU, tanh and sigmoid keep their result, all others their input."""
        y = self.activation(f"{module}.out", x.shape, x.dtype)
        self.add(
            "activation",
            module,
            module=module,
            inputs=[x],
            outputs=[y],
            attributes={"elements": x.num_elements, "function": function},
            saved=[y if function in ("relu", "tanh", "sigmoid") else x],
        )
        return y

    def dropout(self, x: Tensor, module: str, probability: float, *, name: str = "") -> Tensor:
        """Keeps its mask; with probability 0 it is not there."""
        if probability == 0.0:
            return x
        name = name or module
        mask = self.saved(f"{name}.mask", x.shape, "bool" if self.device == "cuda" else x.dtype)
        y = self.activation(f"{name}.out", x.shape, x.dtype)
        self.add(
            "dropout",
            name,
            module=module,
            inputs=[x],
            outputs=[y],
            attributes={"elements": x.num_elements},
            saved=[mask],
        )
        return y

    def matmul(
        self, a: Tensor, b: Tensor, name: str, *, module: str, sizes: Mapping[str, int], shape: Sequence[int]
    ) -> Tensor:
        """Batched product of two activations; keeps both. ``sizes``: batch, m, k, n."""
        y = self.activation(f"{name}.out", shape, a.dtype)
        self.add("matmul", name, module=module, inputs=[a, b], outputs=[y], attributes=sizes, saved=[a, b])
        return y

    def softmax(self, x: Tensor, name: str, *, module: str) -> Tensor:
        """Over the last dim; keeps its result."""
        y = self.activation(f"{name}.out", x.shape, x.dtype)
        sizes = {"rows": prod(x.shape[:-1]), "size": x.shape[-1]}
        self.add("softmax", name, module=module, inputs=[x], outputs=[y], attributes=sizes, saved=[y])
        return y

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        name: str,
        *,
        module: str,
        sizes: Mapping[str, Any],
        shape: Sequence[int],
    ) -> Tensor:
        """Fused attention: keeps q, k, v, its result and the log-sum-exp of every row, never the scores.

        ``sizes``: the arguments of ``flop.attention``. q, k and v may be one tensor (a fused projection).
        """
        y = self.activation(f"{name}.out", shape, v.dtype)
        rows = (sizes["batch"], sizes["heads"], sizes["queries"])
        statistics = self.saved(f"{name}.logsumexp", rows, "float32")
        inputs = list(dict.fromkeys([q, k, v]))
        self.add(
            "attention",
            name,
            module=module,
            inputs=inputs,
            outputs=[y],
            attributes=sizes,
            saved=[*inputs, y, statistics],
        )
        return y

    def cross_entropy(self, logits: Tensor, targets: Tensor, name: str = "loss") -> Tensor:
        """logits [.., classes] in fp32 (converted first if they are not) → the mean loss; keeps the log-softmax."""
        classes, rows = logits.shape[-1], prod(logits.shape[:-1])
        if logits.dtype not in ("float32", "float64"):
            wide = self.activation(f"{name}.float", logits.shape, "float32")
            sizes = {"elements": wide.num_elements}
            self.add("movement", f"{name}.float", module="", inputs=[logits], outputs=[wide], attributes=sizes)
            logits = wide
        kept = self.saved(f"{name}.log_softmax", logits.shape, logits.dtype)
        loss = self.activation(f"{name}.out", (), logits.dtype)
        self.add(
            "cross_entropy",
            name,
            module="",
            inputs=[logits, targets],
            outputs=[loss],
            attributes={"rows": rows, "classes": classes},
            saved=[kept, targets],
        )
        return loss

    # Repeats

    @contextmanager
    def repeat(self, modules: Sequence[Sequence[str]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """What is added inside happens ``len(modules)`` times; append (tensor read, tensor made) to what it yields.

            with builder.repeat([("layers.0",), ("layers.1",)]) as carried:
                y = block(x, "layers.0")
                carried.append((x, y))

        Raises:
            GraphError: a repeat inside another.
        """
        if self._count != 1:
            raise GraphError(f"a repeat inside a repeat of {self.name}; write the inner one out")
        start = len(self.operators)
        carried: list[tuple[Tensor, Tensor]] = []
        self._count = len(modules)
        try:
            yield carried
        finally:
            self._count = 1
        self.repeats.append(
            Repeat(
                start=start,
                stop=len(self.operators),
                modules=tuple(map(tuple, modules)),
                carried=tuple((read.name, made.name) for read, made in carried),
            )
        )

    def note(self, text: str) -> None:
        """Something a reader of the result must know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def build(self) -> Graph:
        repeats = tuple(repeat for repeat in self.repeats if repeat.count > 1)
        return Graph(
            name=self.name,
            operators=tuple(self.operators),
            tensors=dict(self.tensors),
            repeats=repeats,
            layers=tuple(self.layers),
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            image_size=self.image_size,
            notes=tuple(self.notes),
        )
