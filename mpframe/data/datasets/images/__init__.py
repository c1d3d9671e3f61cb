"""Images with one class each.

arrays.py has what the datasets share: batches that are fetched, augmented (augment.py) and
normalised at once. Files are untrusted: idx.py, cifar_files.py and image_files.py read their
formats and check every size before they read a value.
"""
