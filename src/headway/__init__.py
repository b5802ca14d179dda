"""Headway: speculative decoding that pays at every load, losslessly and without tuning."""

__version__ = "0.1.0"
