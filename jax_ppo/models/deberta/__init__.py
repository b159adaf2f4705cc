"""DeBERTa-v2 and v3, encoders that serve as reward models."""
