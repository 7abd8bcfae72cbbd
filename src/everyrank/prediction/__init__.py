"""Predictions of a trained model, in the order of the samples.

files.py   a row for each sample, as .jsonl or .npy
rank.py    what one rank computes
"""
