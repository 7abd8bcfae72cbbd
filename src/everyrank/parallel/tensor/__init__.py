"""Tensor parallel: matrices are split over ranks, by a plan, with checks that the model supports it."""
