"""Modules of your own for the workers of this image; nothing is needed here to serve a model."""
