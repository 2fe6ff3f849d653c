"""Modules of your own for the routers of this image; nothing is needed here to serve a model."""
