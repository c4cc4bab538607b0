"""Forwards compiled once and run often: static KV storage, packed weights, one graph for layers that are alike."""

from .static_cache import GrowingStaticCache
from .target import compile_target, compiled_target, uncompile_target


__all__ = ["GrowingStaticCache", "compile_target", "compiled_target", "uncompile_target"]
