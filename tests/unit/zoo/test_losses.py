"""Losses are means, and find the logits in every kind of answer."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy as reference
from torchvision.models.inception import InceptionOutputs

from meshwise.zoo.losses import cross_entropy, inception_cross_entropy

LOGITS, TARGETS = torch.randn(4, 6, 5), torch.randint(5, (4, 6))


def test_language_loss_is_the_mean_over_tokens():
    by_hand = torch.stack([-LOGITS[b, s].log_softmax(-1)[TARGETS[b, s]] for b in range(4) for s in range(6)]).mean()
    torch.testing.assert_close(cross_entropy(LOGITS, TARGETS), by_hand)


def test_mean_of_equal_parts_is_the_mean_of_the_whole():
    parts = [cross_entropy(LOGITS[part], TARGETS[part]) for part in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(parts) / 2, cross_entropy(LOGITS, TARGETS))


@pytest.mark.parametrize("wrap", [lambda t: SimpleNamespace(logits=t), lambda t: (t, None), lambda t: [t]])
def test_logits_are_found_in(wrap):
    assert cross_entropy(wrap(LOGITS), TARGETS) == cross_entropy(LOGITS, TARGETS)


def test_answer_without_logits_is_named():
    with pytest.raises(TypeError, match="int, which holds no logits"):
        cross_entropy(3, TARGETS)


def test_inception_adds_four_tenths_of_the_auxiliary_head():
    main, auxiliary, targets = torch.randn(3, 5), torch.randn(3, 5), torch.randint(5, (3,))
    expected = reference(main, targets) + 0.4 * reference(auxiliary, targets)
    torch.testing.assert_close(inception_cross_entropy(InceptionOutputs(main, auxiliary), targets), expected)
    torch.testing.assert_close(inception_cross_entropy(main, targets), reference(main, targets))
