"""Looking at a training step from outside: time, memory, communication, timeline. Changes nothing of it."""
