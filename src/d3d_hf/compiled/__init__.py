"""Forwards compiled once and run often: static KV storage, packed weights, one graph for layers that are alike."""

from ..model.storage import GrowingCache
from .target import compile_target, compiled_target, uncompile_target


__all__ = ["GrowingCache", "compile_target", "compiled_target", "uncompile_target"]
