"""The demonstration: generated data sets, and a small model, in `model/`, for one of them."""
