"""Tensor parallel: matrices split over ranks, and what a model may do with the parts."""
