"""Trajectory trees, group statistics, admission, packing."""
