"""Inference of DeepSeek-V4 GGUF files with MTP speculative decoding."""

__version__ = "0.1.0"
