"""The parts of ``train_nano.py``: one file for each idea."""
