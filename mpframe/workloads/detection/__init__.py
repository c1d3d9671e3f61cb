"""Pictures with boxes, as torchvision's detectors take them: lists of images and of targets."""
