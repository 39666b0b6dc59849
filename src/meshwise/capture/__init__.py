"""From an ``nn.Module`` to a ``Graph``: what it computes and what autograd keeps, on tensors without memory."""
