"""What neighbouring stages of an asynchronous pipeline tell each other about one micro-batch.

Every message sent while a stage works on its ``i``-th forward is received by a neighbour that has posted its receive
by its own ``i``-th forward. So nothing is left waiting for a later step, whatever the training loop does between
steps (a barrier, a device synchronisation), and a stage never waits for another to take what it sends:

    activation of micro-batch b   stage s, forward b           → stage s+1, posted while it does forward b-1
    gradient of micro-batch b     stage s+1, forward b+n-2-s   → stage s, posted one backward ahead
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from meshwise.errors import ModelError
from meshwise.run.point_to_point import BACKWARD, FORWARD, HEADER, Shape, StageLink, Transfer


class Messages:
    """Activations to the next stage and gradients back, by the number of their micro-batch.

    The shape of an activation is told once per shape of the model's inputs, which every stage sees.
    """

    def __init__(self, link: StageLink) -> None:
        self._link = link
        self._shapes_in: dict[Shape, Shape] = {}
        self._shapes_out: dict[Shape, Shape] = {}
        self._expected_activations: dict[int, Transfer] = {}
        self._expected_gradients: dict[int, Transfer] = {}
        self._sent_activations: dict[int, list[Transfer]] = {}
        self._gradient_shapes: dict[int, Shape] = {}
        self._sent_gradients: deque[Transfer] = deque()

    def expect_activation(self, number: int, inputs: Shape) -> None:
        """Posts a receive, if the shape is known by now."""
        if inputs in self._shapes_in and number not in self._expected_activations:
            shape = self._shapes_in[inputs]
            previous = self._link.stage - 1
            self._expected_activations[number] = self._link.receive(shape, previous, kind=FORWARD, number=number)

    def take_activation(self, number: int, inputs: Shape) -> Tensor:
        """Waits for the output of the stage before."""
        if inputs not in self._shapes_in:
            self._shapes_in[inputs] = self._link.receive_shape(self._link.stage - 1, kind=HEADER, number=number)
        self.expect_activation(number, inputs)
        return self._expected_activations.pop(number).wait()

    def give_activation(self, number: int, inputs: Shape, output: Tensor) -> None:
        """Starts sending this stage's output.

        Raises:
            ModelError: the output is not one float tensor whose shape follows from the inputs' shape.
        """
        shape = Shape.of(output)
        if not output.is_floating_point():
            raise ModelError(
                f"stage {self._link.stage} gives {shape.dtype}, which has no gradient; cut the model where floats pass"
            )
        transfers = []
        if inputs not in self._shapes_out:
            self._shapes_out[inputs] = shape
            transfers.append(self._link.send_shape(shape, self._link.stage + 1, kind=HEADER, number=number))
        elif self._shapes_out[inputs] != shape:
            raise ModelError(
                f"stage {self._link.stage} gives {shape.sizes} where it gave {self._shapes_out[inputs].sizes} for "
                f"inputs of the same shape {inputs.sizes}; cut the model where the shape does not depend on the values"
            )
        transfers.append(self._link.send(output, self._link.stage + 1, kind=FORWARD, number=number))
        self._sent_activations[number] = transfers
        self._gradient_shapes[number] = shape

    def expect_gradient(self, number: int) -> None:
        """Posts a receive for the gradient of an activation given before."""
        if number in self._gradient_shapes:
            shape = self._gradient_shapes.pop(number)
            following = self._link.stage + 1
            self._expected_gradients[number] = self._link.receive(shape, following, kind=BACKWARD, number=number)

    def take_gradient(self, number: int) -> Tensor:
        """Waits for the gradient of this stage's output."""
        self.expect_gradient(number)
        gradient = self._expected_gradients.pop(number).wait()
        for transfer in self._sent_activations.pop(number):  # the gradient's arrival proves that these are done
            transfer.wait()
        return gradient

    def give_gradient(self, number: int, gradient: Tensor) -> None:
        """Starts sending the gradient of this stage's input."""
        transfer = self._link.send(gradient, self._link.stage - 1, kind=BACKWARD, number=number)
        self._sent_gradients.append(transfer)
        while len(self._sent_gradients) > 2:  # the oldest was taken one forward ago, or is being taken now
            self._sent_gradients.popleft().wait()

    def settle(self) -> None:
        """Waits until all that was sent has arrived; the numbers may begin again after it."""
        while self._sent_gradients:
            self._sent_gradients.popleft().wait()
