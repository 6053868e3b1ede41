"""Weight formats by kind of storage; `models/weight_formats.py` lists them."""
