"""Context parallel: sequences split over ranks, and attention that reaches over all of them."""
