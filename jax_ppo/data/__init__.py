"""Data sets: from a file, the hub or a generator to tokenized prompts.

Runs on the host only, with NumPy and text; nothing here touches an accelerator.
"""
