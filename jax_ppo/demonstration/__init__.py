"""The demonstration: generated data sets, and a small model that is made for one of them."""
