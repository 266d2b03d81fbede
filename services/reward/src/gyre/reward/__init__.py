"""Evaluators: the score of a preserved workspace."""
