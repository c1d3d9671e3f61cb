"""Images with a class for each pixel.

shapes.py draws images of any size and needs no files; mask_folder.py reads a folder of photographs
and masks. task.py has what they share: Dice loss and cross-entropy, Dice and IoU. A sample is an
image [channels, H, W], float32, and its classes [H, W], int64.
"""
