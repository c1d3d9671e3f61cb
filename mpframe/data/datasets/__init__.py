"""The datasets that ship: each module is named after its function, which returns a `Task`.

digits.py is the shortest one to read. images.py has what image datasets share: batches that are
fetched, augmented (augment.py) and normalised at once. Files are untrusted: idx.py, cifar_files.py
and image_files.py read their formats and check every size before they read a value.
"""
